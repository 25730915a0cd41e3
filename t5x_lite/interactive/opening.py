"""Opens a run by its directory: its config.gin says what the model is, its checkpoints hold the parameters.

    from t5x_lite import notebook

    model = notebook.open_run('runs/keyword_cloze')
    model.predict_with_aux(['<extra_id_0> x in numbers:'])
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
from typing import Any, NamedTuple

from t5x_lite.apps.common import flags as common
from t5x_lite.errors import CheckpointError, ConfigError, did_you_mean

CONFIG_FILE = 'config.gin'
# The function that a run's config.gin configures.
ENTRY = 't5x_lite.apps.train.train'
# Read first where a run has no config.gin, since the gin files may say no more than what the model is.
_RUN_FILE = 'runs/train.gin'
# Values that a training run requires and that decide nothing about its model.
_STAND_INS = {'MIXTURE_OR_TASK_NAME': "'none'", 'TRAIN_STEPS': '1', 'MODEL_DIR': "'none'",
              'INITIAL_CHECKPOINT_PATH': "'none'", 'DROPOUT_RATE': '0.0'}


class FoundRun(NamedTuple):
  """A run, and which of its checkpoints was meant.

  Attributes:
    model_dir: the run's directory.
    checkpoint: the path to restore from.
    mode: of `RestoreCheckpointConfig`: 'latest' for the run's newest sound one, 'specific' for this one.
  """

  model_dir: str
  checkpoint: str
  mode: str


def find_run(path: str) -> FoundRun:
  """Returns the run that a path names: its directory, that of one of its checkpoints, or of weights under another name.

  Raises:
    ConfigError: there is nothing, or nothing of a run.
    CheckpointError: the run has no checkpoint.
  """
  folder = pathlib.Path(path)
  if not folder.is_dir():
    near = did_you_mean(folder.name, [entry.name for entry in folder.parent.glob('*') if entry.is_dir()])
    raise ConfigError(f'{path!r} is {"a file" if folder.exists() else "not there"}; expected the directory of a run '
                      '(MODEL_DIR), or a checkpoint in it, such as runs/keyword_cloze/checkpoint_500.'
                      + (near if near.startswith(' Did you mean') else ''))
  from t5x_lite import checkpoints
  from t5x_lite.checkpoints import discovery
  absolute = pathlib.Path(os.path.abspath(path))
  # One that was renamed still has its manifest; one of another program has at least the name.
  if (folder / discovery.MANIFEST_FILENAME).exists() or discovery.is_checkpoint_dir_name(path):
    return FoundRun(str(absolute.parent), path, 'specific')
  if checkpoints.latest_step(path) is None:
    if checkpoints.detect_format(path) is not None:
      return FoundRun(str(absolute), path, 'specific')  # Weights under a name of their own, as a Hugging Face folder.
    others = checkpoints.all_steps(path, require_manifest=False)
    if others:
      newest = checkpoints.get_checkpoint_dir(path, others[-1])
      raise CheckpointError(f'{path!r} has checkpoints of another program only, which cannot be verified. Name one to '
                            f'use it: {newest}.')
    raise CheckpointError(f'{path!r} holds no checkpoint; expected checkpoint_<step> in it. Name the directory of a '
                          'run that has saved one.')
  return FoundRun(str(absolute), path, 'latest')


def gin_files_of(run: FoundRun, named: Sequence[str]) -> list[str]:
  """Returns the gin files that say what a run is, in the order to read them: its config.gin, then those named.

  Files under runs/, which come with t5x_lite, are read before config.gin: what a run says is more than their defaults.
  A run without config.gin has the named files alone.

  Raises:
    ConfigError: there is no config.gin, and no file is named.
  """
  config = os.path.join(run.model_dir, CONFIG_FILE)
  if not os.path.isfile(config):
    if named:
      return list(named)
    from t5x_lite import checkpoints
    # The checkpoint's path is that of the folder's weights, which the recipe reads the sizes and vocabulary of.
    flags = '--gin_file=recipes/keyword_cloze.gin'
    if checkpoints.detect_format(run.checkpoint) == 'hugging_face':
      flags = f'--gin_file=recipes/finetune_from_hf.gin --gin.INITIAL_CHECKPOINT_PATH={run.checkpoint}'
    raise ConfigError(f'{run.model_dir!r} has no {CONFIG_FILE}, which would say what the model is. Say it by gin '
                      f'files, e.g. {flags}.')
  others = [name for name in named if os.path.realpath(name) != os.path.realpath(config)]
  return [*(name for name in others if name.startswith('runs/')), config,
          *(name for name in others if not name.startswith('runs/'))]


def load_run(run: FoundRun, arguments: argparse.Namespace) -> Any:
  """Returns the `gin_utils.Configuration` of a run: of its config.gin and, on top of it, the gin files that are given.

  Args:
    run: what `find_run` returned.
    arguments: of a command line with `add_gin_arguments`.

  Raises:
    ConfigError: there is no config.gin, or what the files and flags say is not sound.
  """
  files = gin_files_of(run, arguments.gin_file)
  has_config = os.path.isfile(os.path.join(run.model_dir, CONFIG_FILE))
  arguments.gin_file = files if has_config else [_RUN_FILE, *files]
  return common.load_configuration(arguments, _STAND_INS)


def open_run(path: str, *, output_dir: str | None = None, batch_size: int | None = None,
             save_period: int | None = None, gin_files: Sequence[str] = (), gin_bindings: Sequence[str] = (),
             allowed_modules: str | None = None, **overrides: Any) -> Any:
  """Returns an `InteractiveModel` of a run, with the run's optimizer and learning-rate schedule.

  Opening a run runs code: what its config.gin names is imported and called. gin's tables hold the run's configuration
  afterwards, and nothing else.

  Args:
    path: the run's directory, for its newest sound checkpoint, or one of its checkpoints; or a Hugging Face
      folder, with `gin_files` that say what it is.
    output_dir: where the model writes; by default beside the run, its name followed by '-interactive'.
    batch_size: rows of a batch; by default the run's.
    save_period: see `InteractiveModel`; None saves only when asked to.
    gin_files: read after the run's config.gin, and thus on top of it; alone, where the run has none.
    gin_bindings: gin text, e.g. 'DROPOUT_RATE = 0.0', applied last.
    allowed_modules: names of modules, separated by commas, that the configuration may import besides jax, flax, optax,
      seqio, t5x_lite and moe; None for any.
    **overrides: further arguments of `InteractiveModel`.

  Raises:
    ConfigError: there is no run, or its configuration is not sound.
    CheckpointError: there is no checkpoint, it is damaged, or it does not fit the configuration.
  """
  run = find_run(path)
  configuration = load_run(run, argparse.Namespace(
      command='open_run', entry=ENTRY, gin_file=list(gin_files), gin_bindings=list(gin_bindings), gin_flags=[],
      gin_search_paths=[], compilation_cache_dir=None, allowed_modules=allowed_modules))
  from t5x_lite.interactive import model as interactive_model
  dataset_cfg = configuration.argument('train_dataset_cfg')
  arguments = {
      'batch_size': dataset_cfg.batch_size if batch_size is None else batch_size,
      'task_feature_lengths': dataset_cfg.task_feature_lengths,
      'output_dir': f'{run.model_dir}-interactive' if output_dir is None else output_dir,
      'partitioner': configuration.argument('partitioner'), 'model': configuration.argument('model'), 'dtype': None,
      'restore_mode': run.mode, 'checkpoint_path': run.checkpoint,
      'trainer_cls': configuration.argument('trainer_cls'), 'save_period': save_period}
  return interactive_model.InteractiveModel(**{**arguments, **overrides})
