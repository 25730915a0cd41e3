"""Compilation of the training step while the state is restored or initialized."""

from collections.abc import Mapping
import concurrent.futures
import contextlib
import time
from typing import Any

import jax

from t5x_lite import runtime
from t5x_lite import trainer as trainer_lib


class StepCompilation:
  """Compilation of a trainer's step, in a thread if there is one process and the trainer's class is ours.

  A subclass may read the state when its step is traced, and several processes compile in one order.
  """

  def __init__(self, stack: contextlib.ExitStack, trainer: trainer_lib.BaseTrainer, batch: Mapping[str, Any]):
    """Begin to compile, or leave it to `finish`.

    Args:
      stack: exit stack that waits for the thread.
      trainer: trainer, which may still hold shapes instead of a state.
      batch: `jax.ShapeDtypeStruct` of a global batch, by feature.
    """
    self._trainer, self._batch = trainer, batch
    self._compiling = None
    if jax.process_count() == 1 and type(trainer) is trainer_lib.Trainer:
      executor = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1, 't5x_lite-compilation'))
      self._compiling = executor.submit(self._compile)

  def _compile(self) -> str:
    started = time.perf_counter()
    with runtime.count_cache_use() as counts:
      self._trainer.compile_train(self._batch)
    seconds = time.perf_counter() - started
    if counts.hits and not counts.misses:
      return f'Loaded the training step from {jax.config.jax_compilation_cache_dir} in {seconds:.1f} s.'
    return f'Compiled the training step in {seconds:.1f} s.'

  def finish(self) -> str:
    """Wait until the step is compiled, raise the errors of its compilation, and return a line for the log."""
    return self._compile() if self._compiling is None else self._compiling.result()
