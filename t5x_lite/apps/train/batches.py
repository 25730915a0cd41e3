"""Waiting for training batches: a source that stalls or fails ends the loop, and leaves a state that can be saved."""

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
from t5x_lite.errors import ConfigError, DataError, DataStalledError
from t5x_lite.types import Batch


class _StopRequested(Exception):
  """Ends the wait for a batch."""


class TrainBatches:
  """Iterator of a run's batches. It ends early if the run is asked to stop or if the source stalls or fails.

  The wait for the first batch, of the run or after going back, has no limit, because shuffle buffers are filled and
  caches are read for it. With several processes no process can stop alone, so errors are raised at once, and requests
  to stop wait for the batch.

  Batches are counted from the beginning of the data, so that a run that rolls back leaves out those of bad steps.

  Attributes:
    error: the reason for the end, to be raised when the state has been saved; None for a request to stop.
  """

  def __init__(self, batches: data.GlobalBatches, *, should_stop: Callable[[], bool], facts: Mapping[str, Any],
               first_step: int, max_batch_seconds: float | None = None, on_wait: Callable[[], None] = lambda: None, warning_seconds: float = waiting.WARNING_SECONDS,
               clock: Callable[[], float] = time.monotonic):
    """Args:
      batches: the source.
      should_stop: true ends the wait for a batch.
      facts: what `facts` returned when the state was saved that the run resumes from; empty for a run that begins.
      first_step: the step that the run begins at.
      max_batch_seconds: the longest wait for a batch after the first, after which the source counts as failed; None for
        no limit.
      on_wait: called again and again during a wait.
      warning_seconds: a longer wait is reported, again after each further such time.
      clock: function that returns seconds.

    Raises:
      ConfigError: `max_batch_seconds` is not positive.
    """
    if max_batch_seconds is not None and not max_batch_seconds > 0:
      raise ConfigError(f'max_batch_seconds is {max_batch_seconds}, expected a positive number, or None for no limit.')
    self.error: Exception | None = None
    self._batches = batches
    self._should_stop = should_stop
    self._max_batch_seconds = max_batch_seconds
    self._on_wait = on_wait
    self._warning_seconds = warning_seconds
    self._clock = clock
    self._num_batches = 0
    # Until the first batch since the source was opened.
    self._is_opening = True
    # Number in the data of each of the newest batches, newest last, and of those to leave out.
    self._numbers: collections.deque[int] = collections.deque(maxlen=16)
    self._left_out: set[int] = set()
    self._resume(facts, first_step)

  @property
  def facts(self) -> dict[str, Any]:
    """Numbers of the newest batch and of those left out, as JSON values for the next checkpoint."""
    return {'batch_number': self._numbers[-1], 'left_out_batches': sorted(self._left_out)}

  @property
  def element_spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch."""
    return self._batches.element_spec

  @property
  def tokens_per_step(self) -> int:
    """Number of positions of inputs and targets in a batch."""
    spec, names = self.element_spec, ('encoder_input_tokens', 'decoder_target_tokens')
    return sum(math.prod(spec[name].shape) for name in names if name in spec)

  def get_state(self) -> Any:
    """Returns the position after the newest batch."""
    return self._batches.get_state()

  def rewind(self, data_state: Any, facts: Mapping[str, Any], step: int, *, bad_step_age: int) -> None:
    """Goes back to the position of a checkpoint, to leave out the batch of a bad step when it comes again.

    Args:
      data_state: the position; None leaves it as it is, after the bad step.
      facts: see `__init__`.
      step: step of the checkpoint.
      bad_step_age: number of steps made after the bad one.
    """
    if data_state is None:
      return
    bad = self._numbers[-1 - bad_step_age]
    self._batches.set_state(data_state)
    self._is_opening = True
    self._resume(facts, step)
    self._left_out.add(bad)

  def _resume(self, facts: Mapping[str, Any], step: int) -> None:
    self._numbers.clear()
    self._numbers.append(facts.get('batch_number', step))
    self._left_out.update(facts.get('left_out_batches', ()))

  def should_stop(self) -> bool:
    """Returns True if no further step can or should be made."""
    return self.error is not None or self._should_stop()

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    number = self._numbers[-1] + 1
    try:
      batch = self._wait()
      while number in self._left_out:
        number += 1
        batch = self._wait()
    except _StopRequested:
      raise StopIteration from None
    except Exception as error:
      if jax.process_count() > 1 or isinstance(error, trainer_lib.PreemptionError):
        raise
      self.error = error
      if isinstance(error, StopIteration):
        self.error = DataError(f"The training data ended after {self._num_batches} of the run's batches; expected an "
                               'iterator that repeats its data.')
      raise StopIteration from None
    self._num_batches += 1
    self._numbers.append(number)
    return batch

  def _wait(self) -> Batch:
    """Returns the next batch; raises `_StopRequested` if the run is asked to stop before it is there."""
    limit = None if self._is_opening else self._max_batch_seconds

    def check(waited: float) -> None:
      if self._should_stop():
        raise _StopRequested
      self._on_wait()
      if limit is not None and waited >= limit:
        runtime.print_stacks(f'The training data gave no batch for {waited:.0f} s.')
        raise DataStalledError(
            f'The training data gave no batch for {waited:.0f} s, and `max_batch_seconds` is {limit:g}. Look at the '
            'stacks of the threads above, then rerun the command.')

    def warning(waited: float) -> str:
      remedy = ('ends it; `max_batch_seconds` does not limit the first batch' if self._is_opening else
                'saves it, and `max_batch_seconds` sets a limit')
      return (f'The training data has given no batch for {waited:.0f} s. The run waits; SIGTERM or Ctrl-C {remedy}.')

    batch = waiting.wait_for(
        self._batches.take, check, warning, warning_seconds=self._warning_seconds, clock=self._clock)
    self._is_opening = False
    return batch
