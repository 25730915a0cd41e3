"""Compiles the programs of a run ahead of time: what they cost in memory is known before the machines are rented, and
a later run with the same compilation cache starts without compiling.

    python -m t5x_lite precompile --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze \
      --compilation_cache_dir=runs/cache
    python -m t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze \
      --compilation_cache_dir=runs/cache
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import inspect
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import files
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite.apps.common import parts as parts_lib
from t5x_lite.apps.common import start as start_lib
from t5x_lite.errors import ConfigError
from t5x_lite.formatting import format_bytes, format_table

HLO_FOLDER = 'precompile'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledProgram:
  """What the compiler says of one program; bytes and operations are those of one device.

  Attributes:
    name: what it does.
    seconds: to trace it and to compile it, or to load it from the cache.
    cache: 'found', 'written', or 'none' where no cache is in use.
    flops: floating-point operations of a call, loops counted once.
    argument_bytes: of what it is given.
    output_bytes: of what it returns, what reuses an argument's memory counted too.
    alias_bytes: of these, what reuses an argument's memory.
    temporary_bytes: of what it needs meanwhile.
    code_bytes: of the program itself.
    hlo_files: where its text was written, if it was asked for.
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

  @property
  def total_bytes(self) -> int:
    """What a device holds while it runs."""
    return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes + self.code_bytes


# Those that are `train`'s too: what decides about a run's programs.
_SIGNATURE = inspect.signature(parts_lib.RunConfig)
TRAIN_ARGUMENTS = tuple(_SIGNATURE.parameters)


def precompile(
    *, compilation_cache_dir: str | None = None, write_hlo: bool = False,
    note_fn: Callable[[str], None] = lambda text: None, **train_arguments: Any) -> list[CompiledProgram]:
  """Compiles what `train` with the same arguments runs: initialisation, training, evaluation and prediction.

  Everything that `train` checks before it computes is checked: the data is opened, no parameter is made. What a program
  holds as constants is part of it: the seed (where dropout draws) and the numbers of the learning-rate schedule. The
  JAX, the number and the kind of devices must be those of the run.

  Args:
    compilation_cache_dir: folder of JAX's persistent compilation cache; it stays in use in this process. None leaves
      JAX as it is set, which may be by the environment variable JAX_COMPILATION_CACHE_DIR.
    write_hlo: write each program as StableHLO and as optimized HLO into `model_dir/precompile`.
    note_fn: told what is going on, from time to time.
    **train_arguments: the run's `TRAIN_ARGUMENTS`; `model`, `train_dataset_cfg`, `partitioner` and `model_dir` are
      required. A `random_seed` of None, for which a run takes the clock, is refused with a cache: no later run would
      find a training step that holds it.

  Returns:
    The programs, in the order in which a run needs them.

  Raises:
    ConfigError, DataError: as `train`; or the cache's folder cannot be written, or an argument is missing or is not one
      of these.
  """
  checks.bind_arguments('precompile', _SIGNATURE, (), train_arguments)
  cfg = parts_lib.RunConfig(**train_arguments)
  if compilation_cache_dir is not None:
    runtime.use_compilation_cache(compilation_cache_dir)
  if cfg.random_seed is None and jax.config.jax_compilation_cache_dir is not None:
    raise ConfigError('random_seed is None, for which a run takes the clock: no run would find the training step in the '
                      'compilation cache, since the seed is part of it. Set RANDOM_SEED to a number.')
  seed = start_lib.choose_seed(cfg.random_seed)
  folder = pathlib.Path(cfg.model_dir) / HLO_FOLDER if write_hlo else None
  with contextlib.ExitStack() as stack:
    run_data = parts_lib.open_data(stack, cfg, note_fn=note_fn)
    trainer, initializer, init_rng = parts_lib.make_trainer(stack, cfg, run_data, random_seed=seed, summary_dir=None)
    eval_batches = run_data.eval_batches
    state_shape, state_axes = initializer.global_train_state_shape, initializer.train_state_axes

    programs: list[CompiledProgram] = []

    def compile_program(name: str, lower_fn: Callable[[], jax.stages.Lowered]) -> None:
      note_fn(f'compiling: {name}')
      programs.append(_compile(name, lower_fn, folder))

    compile_program('initial state', lambda: initializer.lower(init_rng))
    compile_program('training step', lambda: trainer.partitioned_train_step().lower(
        state_shape, run_data.batches.element_spec))
    by_spec: dict[tuple[Any, ...], list[str]] = {}
    for name, found in eval_batches.items():
      key = tuple(sorted((feature, leaf.shape, str(leaf.dtype)) for feature, leaf in found.element_spec.items()))
      by_spec.setdefault(key, []).append(name)
    for names in by_spec.values():
      spec_of_eval = eval_batches[names[0]].element_spec
      compile_program(f'evaluation step ({", ".join(names)})',
                      lambda spec=spec_of_eval: trainer.partitioned_eval_step().lower(state_shape, spec))
    if run_data.evaluator is not None:
      for name, lower_fn in run_data.evaluator.programs(state_shape, state_axes).items():
        compile_program(name, lower_fn)
  return programs


def _compile(name: str, lower_fn: Callable[[], jax.stages.Lowered], folder: pathlib.Path | None) -> CompiledProgram:
  start = time.perf_counter()
  with runtime.count_cache_use() as counts:
    lowered = lower_fn()
    compiled = lowered.compile()
  seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  cost = compiled.cost_analysis() or {}
  hlo_files = []
  if folder is not None and multihost.is_lead():
    stem = ''.join(c if c.isalnum() else '_' for c in name).strip('_')
    for suffix, text in (('stablehlo.mlir', lowered.as_text()), ('optimized_hlo.txt', compiled.as_text())):
      folder.mkdir(parents=True, exist_ok=True)
      files.write(folder / f'{stem}.{suffix}', text, durable=False)
      hlo_files.append(str(folder / f'{stem}.{suffix}'))
  return CompiledProgram(
      name=name, seconds=seconds, cache='written' if counts.misses else 'found' if counts.hits else 'none',
      flops=max(0.0, cost.get('flops', 0.0)), argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes, alias_bytes=memory.alias_size_in_bytes,
      temporary_bytes=memory.temp_size_in_bytes, code_bytes=memory.generated_code_size_in_bytes,
      hlo_files=tuple(hlo_files))


def describe(programs: Sequence[CompiledProgram], partitioner: partitioning.PjitPartitioner) -> str:
  """Returns a table of the programs, and what to do with the cache."""
  mesh = partitioner.mesh
  axes = ' x '.join(f'{axis}={size}' for axis, size in mesh.shape.items())
  rows = [('program', 'seconds', 'cache', 'GFLOP', 'arguments', 'outputs', 'in place', 'temporaries', 'code', 'in all')]
  for p in programs:
    rows.append((p.name, f'{p.seconds:.1f}', p.cache, f'{p.flops / 1e9:.3g}', *map(format_bytes, (
        p.argument_bytes, p.output_bytes, p.alias_bytes, p.temporary_bytes, p.code_bytes, p.total_bytes))))
  parts = [f'Programs for {mesh.size} {np.ravel(mesh.devices)[0].device_kind} device(s) ({axes}); operations and memory '
           'are those of one device', format_table(rows)]
  folder = jax.config.jax_compilation_cache_dir
  parts.append('No compilation cache is in use: nothing is kept.' if folder is None else
               f'The compilation cache is {folder}: run the command with --compilation_cache_dir={folder}.')
  files = [path for p in programs for path in p.hlo_files]
  if files:
    parts.append(f'The programs are written in {os.path.dirname(files[0])}.')
  return '\n'.join(parts)
