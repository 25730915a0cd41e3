"""Waiting for training batches: if a source stalls, fails or ends, the loop ends with a state that can be saved."""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import math
from typing import Any, TypeVar

import jax

from t5x_lite import data
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import waiting
from t5x_lite.errors import DataError, DataStalledError
from t5x_lite.types import Batch

T = TypeVar('T')

# Interval at which the device is looked at while it computes and no batch is ready.
_COMPUTING_SECONDS = 0.002


def no_batch_error(cfg: data.DatasetConfig) -> DataError:
  """Return the error for training data that ends before the first step."""
  return DataError(
    f'The training data {cfg.name!r} must have at least one batch of {cfg.batch_size} rows, got its end before the '
    'first step. Reduce the batch size or raise DatasetConfig.num_epochs.'
  )


class TrainBatches:
  """Iterator over a run's batches. It ends early if the run must stop, or if the source ends, stalls or fails.

  The first batch of the run and after a rollback has no limit, since shuffle buffers and caches are filled.
  With several processes, errors are raised at once and stop requests wait for the batch, since no process can stop
  alone. If the data may end earlier on one process than on another, they agree on the end before each step, and batches
  that the others have beyond it are not used. The end of the data is no error: the run ends at the same step on all
  processes.

  Batches are counted from the beginning of the data, so that a run that rolls back skips the batches of bad steps.

  Attributes:
    error: error that ended the iteration, to be raised after saving; None after a stop request.
    has_ended: whether the data ended after the newest batch, as far as `reached_end` has told.
  """

  def __init__(
    self,
    batches: data.GlobalBatches,
    *,
    should_stop: Callable[[], bool],
    facts: Mapping[str, Any],
    first_step: int,
    waits: waiting.DataWaits,
    max_batch_seconds: float | None = None,
    is_computing: Callable[[], bool] = lambda: False,
    phase_fn: Callable[[str], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
  ):
    """Store the arguments; read nothing.

    Args:
      batches: global batches of the source.
      should_stop: returns whether the run must stop; called between steps.
      facts: `facts` at the save that the run resumes from; empty for a new run.
      first_step: step at which the run begins.
      waits: waits for batches; it raises `waiting.Interrupted` if the run must stop.
      max_batch_seconds: maximum wait for a batch after the first; None for no limit.
      is_computing: returns whether the device still computes a step, so that no time is lost by waiting.
      phase_fn: returns a context, entered with the name 'data' while only the data is waited for.
    """
    self.error: Exception | None = None
    self.has_ended = False
    # A source that calls itself endless may have ended before.
    self._is_endless = batches.is_endless and 'data_ended_at' not in facts
    # Also of a source that calls itself endless.
    self._agrees = jax.process_count() > 1 and not batches.ends_together
    self._batches = batches
    self._should_stop = should_stop
    self._waits = waits
    self._max_batch_seconds = max_batch_seconds
    self._is_computing = is_computing
    self._phase_fn = phase_fn
    # True until the first batch after the source was opened.
    self._is_opening = True
    # Number of the newest batch that was taken from the source.
    self._number = 0
    # Numbers of the batches of the newest steps, in order, and of the batches to skip.
    self._numbers: collections.deque[int] = collections.deque(maxlen=16)
    self._skipped: set[int] = set()
    self._resume(facts, first_step)

  @property
  def facts(self) -> dict[str, Any]:
    """Position of the newest batch and of skipped ones, as JSON values for the next checkpoint."""
    end = {'data_ended_at': self._number} if self.has_ended else {}
    return {'batch_number': self._number, 'left_out_batches': sorted(self._skipped), **end}

  @property
  def element_spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch."""
    return self._batches.element_spec

  @property
  def tokens_per_step(self) -> int:
    """Number of input and target positions in a batch."""
    spec = self.element_spec
    names = ('encoder_input_tokens', 'decoder_target_tokens')
    return sum(math.prod(spec[name].shape) for name in names if name in spec)

  def get_state(self) -> Any:
    """Return the position after the newest batch."""
    return self._batches.get_state()

  def rewind(
    self, data_state: Any, facts: Mapping[str, Any], step: int, *, bad_step_age: int
  ) -> None:
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
    self.has_ended = False
    self._resume(facts, step)
    self._skipped.add(bad)

  def _resume(self, facts: Mapping[str, Any], step: int) -> None:
    self._number = facts.get('batch_number', step)
    self._numbers.clear()
    self._numbers.append(self._number)
    self._skipped.update(facts.get('left_out_batches', ()))

  def should_stop(self) -> bool:
    """Return whether training must stop before the next step."""
    return self.has_ended or self.error is not None or self._should_stop()

  def reached_end(self) -> bool:
    """Return whether the data has ended; unless it is endless, wait until it is known whether another batch follows.

    With several processes, all must call it together. A stop request ends the wait, and so does an error, as in
    `__next__`.
    """
    if not self._is_endless and not self.has_ended and self.error is None:
      try:
        self._skip()
        self._wait(self._batches.knows_next)
        self.has_ended = self._batches.has_ended
      except StopIteration:
        self.has_ended = True
      except waiting.Interrupted:
        pass
      except Exception as error:
        self._keep(error)
      if self._agrees:
        self.has_ended = multihost.any_process(self.has_ended)
    return self.has_ended

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    try:
      self._skip()
      batch = self._take()
    except waiting.Interrupted:
      raise StopIteration from None
    except StopIteration:
      self.has_ended = True
      raise
    except Exception as error:
      self._keep(error)
      raise StopIteration from None
    self._numbers.append(self._number)
    return batch

  def _keep(self, error: Exception) -> None:
    """Keep an error, which the run raises after saving; raise it at once if the run cannot save because of it."""
    if jax.process_count() > 1 or isinstance(error, trainer_lib.PreemptionError):
      raise error
    self.error = error

  def _skip(self) -> None:
    """Take the next batches as long as they belong to bad steps."""
    while self._number + 1 in self._skipped:
      self._take()

  def _take(self) -> Batch:
    """Return the next batch; raise StopIteration if the data has ended on this or, if they agree, on any process."""
    batch: Any = None
    try:
      batch = self._wait(self._batches.take)
    except StopIteration:
      if not self._agrees:
        raise
    if self._agrees and multihost.any_process(batch is None):
      raise StopIteration
    self._number += 1
    return batch

  def _wait(self, poll_fn: Callable[[float], T]) -> T:
    """Poll until there is a result and return it; raise `waiting.Interrupted` if the run must stop before."""
    found = poll_fn(0)
    while not found and self._is_computing():
      found = poll_fn(_COMPUTING_SECONDS)
    if not found:
      with self._phase_fn('data'):
        found = self._waits.until(
          poll_fn, 'reading the training data', warning_fn=self._warning, check_fn=self._check_limit
        )
    self._is_opening = False
    return found

  def _check_limit(self, waited: float) -> None:
    """Raise DataStalledError if the wait for a batch after the first has reached its limit."""
    limit = self._max_batch_seconds
    if self._is_opening or limit is None or waited < limit:
      return
    runtime.print_stacks(f'No training batch for {waited:.0f} s.')
    raise DataStalledError(
      f'No training batch for {waited:.0f} s; `max_batch_seconds` is {limit:g}. Check the stacks of the threads '
      'above, then rerun the command.'
    )

  def _warning(self, waited: float) -> str:
    """Return the warning about a long wait."""
    if jax.process_count() > 1:
      remedy = f'{runtime.signals_that_end_a_wait()} ends it without a save'
    elif self._is_opening:
      remedy = 'SIGTERM or Ctrl-C ends it; `max_batch_seconds` does not limit the first batch'
    else:
      remedy = 'SIGTERM or Ctrl-C saves it; set `max_batch_seconds` to limit the wait'
    return f'No training batch for {waited:.0f} s. The run is waiting; {remedy}.'
