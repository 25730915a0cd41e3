"""Waiting for training batches: if a source stalls or fails, the loop ends with a state that can be saved."""

import collections
from collections.abc import Callable, Iterator, Mapping
import math
import time
from typing import Any

import jax

from t5x_lite import data
from t5x_lite import runtime
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import waiting
from t5x_lite.errors import DataError, DataStalledError
from t5x_lite.types import Batch


class _StopRequested(Exception):
  """Ends the wait for a batch because the run must stop."""


class TrainBatches:
  """Iterator over a run's batches. It ends early if the run must stop, or if the source stalls or fails.

  The first batch of the run and after a rollback has no limit, since shuffle buffers and caches are filled.
  With several processes, errors are raised at once and stop requests wait for the batch, since no process can stop
  alone.

  Batches are counted from the beginning of the data, so that a run that rolls back skips the batches of bad steps.

  Attributes:
    error: error that ended the iteration, to be raised after saving; None after a stop request.
  """

  def __init__(self, batches: data.GlobalBatches, *, should_stop: Callable[[], bool], facts: Mapping[str, Any],
               first_step: int, max_batch_seconds: float | None = None, on_wait: Callable[[], None] = lambda: None,
               warning_seconds: float = waiting.WARNING_SECONDS,
               clock: Callable[[], float] = time.monotonic):
    """Store the arguments; read nothing.

    Args:
      batches: global batches of the source.
      should_stop: returns whether the run must stop.
      facts: `facts` at the save that the run resumes from; empty for a new run.
      first_step: step at which the run begins.
      max_batch_seconds: maximum wait for a batch after the first; None for no limit.
      on_wait: called repeatedly during a wait.
      warning_seconds: interval of the warnings about a long wait.
      clock: returns seconds.
    """
    self.error: Exception | None = None
    self._batches = batches
    self._should_stop = should_stop
    self._max_batch_seconds = max_batch_seconds
    self._on_wait = on_wait
    self._warning_seconds = warning_seconds
    self._clock = clock
    self._num_batches = 0
    # True until the first batch after the source was opened.
    self._is_opening = True
    # Positions in the data of the newest batches, in order, and of the batches to skip.
    self._numbers: collections.deque[int] = collections.deque(maxlen=16)
    self._skipped: set[int] = set()
    self._resume(facts, first_step)

  @property
  def facts(self) -> dict[str, Any]:
    """Position of the newest batch and of skipped ones, as JSON values for the next checkpoint."""
    return {'batch_number': self._numbers[-1], 'left_out_batches': sorted(self._skipped)}

  @property
  def element_spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch."""
    return self._batches.element_spec

  @property
  def tokens_per_step(self) -> int:
    """Number of input and target positions in a batch."""
    spec, names = self.element_spec, ('encoder_input_tokens', 'decoder_target_tokens')
    return sum(math.prod(spec[name].shape) for name in names if name in spec)

  def get_state(self) -> Any:
    """Return the position after the newest batch."""
    return self._batches.get_state()

  def rewind(self, data_state: Any, facts: Mapping[str, Any], step: int, *, bad_step_age: int) -> None:
    """Return to the position of a checkpoint; the batch of the bad step will be skipped.

    Args:
      data_state: position in the data; None keeps the position after the bad step.
      facts: see `__init__`.
      step: step of the checkpoint.
      bad_step_age: number of completed steps after the bad one.
    """
    if data_state is None:
      return
    bad = self._numbers[-1 - bad_step_age]
    self._batches.set_state(data_state)
    self._is_opening = True
    self._resume(facts, step)
    self._skipped.add(bad)

  def _resume(self, facts: Mapping[str, Any], step: int) -> None:
    self._numbers.clear()
    self._numbers.append(facts.get('batch_number', step))
    self._skipped.update(facts.get('left_out_batches', ()))

  def should_stop(self) -> bool:
    """Return whether training must stop before the next step."""
    return self.error is not None or self._should_stop()

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    number = self._numbers[-1] + 1
    try:
      batch = self._wait()
      while number in self._skipped:
        number += 1
        batch = self._wait()
    except _StopRequested:
      raise StopIteration from None
    except Exception as error:
      if jax.process_count() > 1 or isinstance(error, trainer_lib.PreemptionError):
        raise
      self.error = error
      if isinstance(error, StopIteration):
        self.error = DataError('The training data must repeat, got the end of the data after '
                               f"{self._num_batches} of the run's batches. Let the iterator repeat its data.")
      raise StopIteration from None
    self._num_batches += 1
    self._numbers.append(number)
    return batch

  def _wait(self) -> Batch:
    """Return the next batch; raise `_StopRequested` if the run must stop before it is available."""
    limit = None if self._is_opening else self._max_batch_seconds

    def check(waited: float) -> None:
      if self._should_stop():
        raise _StopRequested
      self._on_wait()
      if limit is not None and waited >= limit:
        runtime.print_stacks(f'No training batch for {waited:.0f} s.')
        raise DataStalledError(
            f'No training batch for {waited:.0f} s; `max_batch_seconds` is {limit:g}. Check the stacks of the threads '
            'above, then rerun the command.')

    def warning(waited: float) -> str:
      remedy = ('ends it; `max_batch_seconds` does not limit the first batch' if self._is_opening else
                'saves it; set `max_batch_seconds` to limit the wait')
      return f'No training batch for {waited:.0f} s. The run is waiting; SIGTERM or Ctrl-C {remedy}.'

    batch = waiting.wait_for(
        self._batches.take, check, warning, warning_seconds=self._warning_seconds, clock=self._clock)
    self._is_opening = False
    return batch
