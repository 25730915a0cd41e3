"""Compile the programs of a run ahead of time.

Their memory is known before the run, and a run with the same compilation cache starts without compiling.

    python -m t5x_lite precompile --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze \
      --compilation_cache_dir=runs/cache
    python -m t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze \
      --compilation_cache_dir=runs/cache
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import functools
import inspect
import os
import re
import time
from typing import Any

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite import schedules
from t5x_lite.apps.common import speed
from t5x_lite.apps.common import starting_point
from t5x_lite.apps.common import trainer_setup
from t5x_lite.formatting import format_bytes
from t5x_lite.formatting import format_table
from t5x_lite.storage import files
from t5x_lite.trainer import trainer as trainer_lib

HLO_FOLDER = 'precompile'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
  """Result of compiling one program; bytes and operations are per device.

  Attributes:
    name: name of the program.
    seconds: time to trace and compile it, or to load it from the cache.
    cache: 'found', 'written', or 'none' without a cache.
    flops: floating-point operations per call that XLA counts; loops count once.
    argument_bytes: bytes of the arguments.
    output_bytes: bytes of the outputs, including those that reuse memory of arguments.
    alias_bytes: bytes of the outputs that reuse memory of arguments.
    temporary_bytes: bytes of temporary arrays.
    code_bytes: bytes of the program itself.
    hlo_files: paths of the program as text, if requested.
    model_flops: model FLOPs per call, see `trainer.model_flops`; None except for a training step of known products.
  """

  name: str
  seconds: float
  cache: str
  flops: float
  argument_bytes: int
  output_bytes: int
  alias_bytes: int
  temporary_bytes: int
  code_bytes: int
  hlo_files: Sequence[str] = ()
  model_flops: float | None = None

  @property
  def total_bytes(self) -> int:
    """Bytes on a device while the program runs."""
    return (
      self.argument_bytes
      + self.output_bytes
      - self.alias_bytes
      + self.temporary_bytes
      + self.code_bytes
    )


# Arguments of `train` that determine the programs of a run.
_SIGNATURE = inspect.signature(trainer_setup.RunConfig)
TRAIN_ARGUMENTS = tuple(_SIGNATURE.parameters)
# T5X's learning rate of a program without a trainer.
_LEARNING_RATE = 1e-3


def precompile(
  *,
  model: models.BaseModel,
  train_dataset_cfg: data.DatasetConfig,
  partitioner: partitioning.BasePartitioner,
  model_dir: str,
  random_seed: int | None = 0,
  get_dataset_fn: Callable[..., Any] = data.get_dataset,
  verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None]
  | None = data.verify_matching_vocabs,
  compilation_cache_dir: str | None = None,
  write_hlo: bool = False,
  note_fn: Callable[[str], None] = lambda text: None,
  **train_arguments: Any,
) -> list[CompiledProgram]:
  """Compile the programs of `train` with the same arguments: initialization, training, evaluation and prediction.

  All checks of `train` before its first computation are made: the data is opened, and no parameter is initialized.
  Constants are part of a program: the seed (for dropout) and the numbers of the learning-rate schedule. JAX's version
  and the number and kind of devices must be those of the run.

  Args:
    model: the model with its optimizer.
    train_dataset_cfg: training data.
    partitioner: the mesh and the sharding rules.
    model_dir: the run directory.
    random_seed: seed of parameters and dropout; None is 0.
    get_dataset_fn: see `train`.
    verify_matching_vocabs_fn: see `train`.
    compilation_cache_dir: folder of JAX's persistent compilation cache, which stays active in this process. None keeps
      JAX's setting, e.g. of the environment variable JAX_COMPILATION_CACHE_DIR.
    write_hlo: write each program as StableHLO and as optimized HLO to `model_dir/precompile`.
    note_fn: called with a description of the work.
    **train_arguments: further `TRAIN_ARGUMENTS` of the run. Without `trainer_cls`, as in T5X, the training step has the
      constant learning rate 0.001, unless the optimizer has its own.

  Returns:
    The programs, in the order in which a run uses them.

  Raises:
    ConfigError, DataError: as for `train`; or the cache is not writable, or an argument is missing or unknown.
  """
  train_arguments |= {
    'model': model,
    'train_dataset_cfg': train_dataset_cfg,
    'partitioner': partitioner,
    'model_dir': model_dir,
    'random_seed': random_seed,
    'get_dataset_fn': get_dataset_fn,
    'verify_matching_vocabs_fn': verify_matching_vocabs_fn,
  }
  trainer_cls = trainer_lib.Trainer
  if getattr(model.optimizer_def, 'needs_learning_rate', False):
    trainer_cls = functools.partial(
      trainer_lib.Trainer,
      learning_rate_fn=schedules.create_learning_rate_scheduler(
        'constant', base_learning_rate=_LEARNING_RATE
      ),
    )
  # Unlike `train`, this function requires none of the first four.
  options = {
    'train_eval_dataset_cfg': None,
    'infer_eval_dataset_cfg': None,
    'trainer_cls': trainer_cls,
    'eval_steps': None,
    **train_arguments,
  }
  checks.bind_arguments('precompile', _SIGNATURE, (), options)
  cfg = trainer_setup.RunConfig(**options)
  if compilation_cache_dir is not None:
    runtime.use_compilation_cache(compilation_cache_dir)
  seed = starting_point.choose_seed(cfg.random_seed)
  if write_hlo:
    folder = files.path(cfg.model_dir) / HLO_FOLDER
  else:
    folder = None
  with contextlib.ExitStack() as stack:
    run_data = trainer_setup.open_data(stack, cfg, note_fn=note_fn)
    trainer, initializer, init_rng = trainer_setup.make_trainer(
      stack, cfg, run_data, random_seed=seed, summary_dir=None
    )
    state_shape = initializer.global_train_state_shape
    state_axes = initializer.train_state_axes

    programs: list[CompiledProgram] = []

    def compile_program(name: str, lower_fn: Callable[[], jax.stages.Lowered]) -> None:
      note_fn(f'compiling: {name}')
      programs.append(_compile(name, lower_fn, folder))

    compile_program(
      'initial state',
      lambda: initializer.lower(
        init_rng, starting_point.initial_stacks(trainer, initializer, cfg.partitioner)
      ),
    )
    batch = run_data.batches.element_spec
    compile_program(
      'training step',
      lambda: trainer.make_train_step().lower(
        trainer.step_state, batch, *trainer.step_arguments(is_last=False)
      ),
    )
    speed.count_flops(trainer, batch)
    if trainer.step_flops is not None:
      per_device = trainer.step_flops.total / cfg.partitioner.mesh.size
      programs[-1] = dataclasses.replace(programs[-1], model_flops=per_device)
    for names, metric_fns, eval_spec in run_data.eval_programs:
      lower_eval = trainer.eval_steps.make(metric_fns).lower
      lower_fn = functools.partial(lower_eval, trainer.step_state, eval_spec)
      compile_program(f'evaluation step ({", ".join(names)})', lower_fn)
    for each in run_data.evaluations:
      if each.evaluator is not None:
        for name, lower_fn in each.evaluator.programs(state_shape, state_axes).items():
          if each.name != evaluation.INFERENCE_EVAL:
            name = f'{each.name}: {name}'
          compile_program(name, lower_fn)
  return programs


def _compile(
  name: str, lower_fn: Callable[[], jax.stages.Lowered], folder: files.Path | None
) -> CompiledProgram:
  start = time.perf_counter()
  with runtime.count_cache_use() as counts:
    lowered = lower_fn()
    compiled = lowered.compile()
  seconds = time.perf_counter() - start
  memory: Any = compiled.memory_analysis()
  cost = compiled.cost_analysis() or {}
  hlo_files = []
  if folder is not None and multihost.is_lead():
    stem = re.sub(r'\W', '_', name).strip('_')
    texts = {'stablehlo.mlir': lowered.as_text(), 'optimized_hlo.txt': compiled.as_text()}
    for suffix, text in texts.items():
      assert text is not None  # the backends of XLA have texts
      path = folder / f'{stem}.{suffix}'
      folder.mkdir(parents=True, exist_ok=True)
      files.write(path, text, durable=False)
      hlo_files.append(str(path))
  cache = 'none'
  if counts.misses:
    cache = 'written'
  elif counts.hits:
    cache = 'found'
  return CompiledProgram(
    name=name,
    seconds=seconds,
    cache=cache,
    flops=max(0.0, cost.get('flops', 0.0)),
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    alias_bytes=memory.alias_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    code_bytes=memory.generated_code_size_in_bytes,
    hlo_files=tuple(hlo_files),
  )


def describe(programs: Sequence[CompiledProgram], partitioner: partitioning.PjitPartitioner) -> str:
  """Return a table of the programs, followed by how to use the cache."""
  mesh = partitioner.mesh
  axes = ' x '.join(f'{axis}={size}' for axis, size in mesh.shape.items())
  titles = (
    'program',
    'seconds',
    'cache',
    'GFLOP',
    'model GFLOP',
    'arguments',
    'outputs',
    'in place',
    'temporaries',
    'code',
    'total',
  )
  rows: list[tuple[str, ...]] = [titles]
  for p in programs:
    sizes = (
      p.argument_bytes,
      p.output_bytes,
      p.alias_bytes,
      p.temporary_bytes,
      p.code_bytes,
      p.total_bytes,
    )
    of_model = ''
    if p.model_flops is not None:
      of_model = f'{p.model_flops / 1e9:.3g}'
    numbers = (f'{p.seconds:.1f}', p.cache, f'{p.flops / 1e9:.3g}', of_model)
    rows.append((p.name, *numbers, *map(format_bytes, sizes)))
  parts = [
    f'Programs for {mesh.size} {np.ravel(mesh.devices)[0].device_kind} device(s) ({axes}); operations and '
    'memory are per device',
    format_table(rows),
  ]
  folder = jax.config.values['jax_compilation_cache_dir']
  if not folder:
    parts.append('No compilation cache is configured: the programs are not kept.')
  elif folder == str(runtime.default_folder()):
    parts.append(f'The compilation cache is {folder}, the default of all commands.')
  else:
    parts.append(
      f'The compilation cache is {folder}: run the command with --compilation_cache_dir={folder}.'
    )
  files = [path for p in programs for path in p.hlo_files]
  if files:
    parts.append(f'The programs are written in {os.path.dirname(files[0])}.')
  return '\n'.join(parts)
