"""Opening of a run by its directory: its config.gin defines the model, its checkpoints have the parameters.

from t5x_lite import notebook

model = notebook.open_run('runs/keyword_cloze')
model.predict_with_aux(['<extra_id_0> x in numbers:'])
"""

from collections.abc import Sequence
from typing import Any

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.runs import ENTRY
from t5x_lite.apps.common.runs import find_run
from t5x_lite.apps.common.runs import load_run
from t5x_lite.apps.common.runs import moved_base
from t5x_lite.interactive.model import InteractiveModel


def open_run(
  path: str,
  *,
  output_dir: str | None = None,
  batch_size: int | None = None,
  save_period: int | None = None,
  gin_files: Sequence[str] = (),
  gin_bindings: Sequence[str] = (),
  allowed_modules: str | None = None,
  mesh_selector: str | None = None,
  **overrides: Any,
) -> Any:
  """Return an `InteractiveModel` of a run, with the run's optimizer and learning-rate schedule.

  Opening a run executes code: the functions and classes of its config.gin are imported and called. Afterwards, gin's
  configuration is that of the run.

  Args:
    path: a run directory, whose newest sound checkpoint is used; or one checkpoint; or a Hugging Face folder, with
      `gin_files` that define the model.
    output_dir: folder for results; default: a folder next to the run, with the suffix '-interactive'.
    batch_size: number of rows per batch; default: the run's.
    save_period: see `InteractiveModel`; None saves only on request.
    gin_files: gin files that are read after the run's config.gin and override it; required without one.
    gin_bindings: gin text that is applied last, e.g. 'DROPOUT_RATE = 0.0'.
    allowed_modules: names of modules, separated by commas, that the configuration may import in addition to jax, flax,
      optax, seqio, t5x_lite and moe, and whose functions and classes it may name in addition to those that recipes
      need; None allows any.
    mesh_selector: selector of the run's mesh rules; None detects the hardware.
    **overrides: further arguments of `InteractiveModel`.

  Raises:
    ConfigError: the run does not exist, or its configuration is invalid.
    CheckpointError: the checkpoint is missing, damaged or does not match the configuration.
  """
  run = find_run(path)
  configuration = load_run(
    run,
    Invocation(
      command='open_run',
      entry=ENTRY,
      gin_files=gin_files,
      gin_flags=[f'--gin_bindings={text}' for text in gin_bindings],
      allowed_modules=allowed_modules,
      mesh_selector=mesh_selector,
    ),
  )
  dataset_cfg = configuration.argument('train_dataset_cfg')
  arguments = {
    'batch_size': dataset_cfg.batch_size if batch_size is None else batch_size,
    'task_feature_lengths': dataset_cfg.task_feature_lengths,
    'output_dir': f'{run.model_dir}-interactive' if output_dir is None else output_dir,
    'partitioner': configuration.argument('partitioner'),
    'model': configuration.argument('model'),
    'dtype': None,
    'restore_mode': run.mode,
    'checkpoint_path': run.checkpoint,
    'base_path': moved_base(configuration),
    'trainer_cls': configuration.argument('trainer_cls'),
    'save_period': save_period,
  }
  return InteractiveModel(**{**arguments, **overrides})
