"""Compilation of the training step while the state is restored or initialized, and log lines about compilations."""

from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import dataclasses
import time
from typing import Any

import jax

from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite.trainer import trainer as trainer_lib


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """Result of a compilation; as text, a line for the log.

  Attributes:
    seconds: time from the begin of tracing until the program could run.
    cache_hit: whether the program was loaded from the compilation cache.
    all_programs: number and time of the programs of step and state, as text.
  """

  seconds: float
  cache_hit: bool
  all_programs: str = ''

  def __str__(self) -> str:
    what = 'Compiled the training step'
    if self.cache_hit:
      what = f'Loaded the training step from {jax.config.values["jax_compilation_cache_dir"]}'
    return f'{what} in {self.seconds:.1f} s with tracing; step and state: {self.all_programs}.'


class StepCompilation:
  """Compilation of a trainer's step, in a thread if there is one process and trainer and partitioner compile as ours.

  The step is traced in the calling thread, so the thread runs no code of users. A subclass of `Trainer` may read the
  state when its step is traced, and several processes compile in one order.
  """

  def __init__(
    self,
    stack: contextlib.ExitStack,
    trainer: trainer_lib.BaseTrainer,
    batch: Mapping[str, Any],
    is_needed: bool = True,
    phase_fn: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
  ):
    """Trace the step and begin to compile it, or leave both to `finish`.

    Args:
      stack: exit stack that abandons the compilation if the run ends before; XLA cannot be interrupted.
      trainer: trainer, which may still hold shapes instead of a state.
      batch: `jax.ShapeDtypeStruct` of a global batch, by feature.
      is_needed: False for a run without steps, which does not call `finish`.
      phase_fn: returns a context, entered with the name 'compiling' while the calling thread traces or waits.
    """
    self._phase_fn = phase_fn
    self._trainer, self._batch, self._started = trainer, batch, time.perf_counter()
    self._compiling, self._executor = (
      None,
      concurrent.futures.ThreadPoolExecutor(1, 't5x_lite-compilation'),
    )
    stack.callback(self._executor.shutdown, wait=False)
    self._all_counts = stack.enter_context(runtime.count_cache_use(all_threads=True))
    compiles_as_usual = (
      type(trainer.partitioner).compile is partitioning.BasePjitPartitioner.compile
    )
    if (
      is_needed
      and jax.process_count() == 1
      and type(trainer) is trainer_lib.Trainer
      and compiles_as_usual
    ):
      with phase_fn('compiling'):
        self._compiling = self._executor.submit(self._run, trainer.lower_train(batch))

  def _run(self, compile_fn: Callable[[], None]) -> CompiledStep:
    with runtime.count_cache_use() as counts:
      compile_fn()
    return CompiledStep(
      time.perf_counter() - self._started, cache_hit=bool(counts.hits and not counts.misses)
    )

  def finish(self) -> CompiledStep:
    """Wait until the step is compiled, and raise the error of its compilation.

    The result also counts the programs that were compiled since the construction, such as those of the state.
    """
    with self._phase_fn('compiling'):
      if self._compiling is None:
        self._started = time.perf_counter()
        done = self._run(lambda: self._trainer.compile_train(self._batch))
      else:
        self._executor.shutdown()
        done = self._compiling.result()
    return dataclasses.replace(done, all_programs=str(self._all_counts))


@contextlib.contextmanager
def log_compilation(
  watchdog: runtime.Watchdog, progress: runtime.Progress, name: str
) -> Iterator[None]:
  """Context in which the programs of an evaluation are compiled, without a limit of time; logs a line if there are any.

  Args:
    watchdog: watchdog, which does not expect progress in the context.
    progress: log.
    name: name of the evaluation.
  """
  with (
    watchdog.watching('compiling'),
    progress.working(f'compiling the evaluation {name}'),
    runtime.count_cache_use() as counts,
  ):
    yield
  if counts.programs:
    progress.log(f'Prepared the evaluation {name}: {counts}.')
