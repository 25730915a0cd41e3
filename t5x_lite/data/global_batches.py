"""Global arrays on the devices from each process's rows, prepared in the background during the training step."""

import collections
from collections.abc import Iterator, Mapping
import json
import logging
import threading
from typing import Any
import weakref

import jax
from jax.sharding import NamedSharding
import numpy as np

from t5x_lite import checks
from t5x_lite.data.interfaces import DataState
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.data.positions import MAX_UNDELIVERED
from t5x_lite.data.positions import RESTART_REMEDY
from t5x_lite.errors import DataError, DataUnavailableError

# Time that saving and closing wait for a batch in preparation; shorter if an earlier wait for a batch timed out.
_PATIENCE_SECONDS = 30.0
_STALLED_SAVE_SECONDS = 5.0
_STALLED_CLOSE_SECONDS = 1.0
# Delay of the first retry; each further retry waits twice as long.
_FIRST_DELAY_SECONDS = 1.0
# The last of these retries waits 17 minutes.
_MAX_RETRIES = 11
# File of a saved position with the number of batches to read and drop after it.
_SKIP_FILE = 'skipped_batches.json'


def to_global_arrays(
  batch: Mapping[str, np.ndarray],
  partitioner: Any,
  element_spec: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
  """Return global arrays, sharded over the partitioner's data axes.

  Args:
    batch: feature name to this process's rows, [rows of the process, ...].
    partitioner: object with `mesh` and `data_partition_spec`.
    element_spec: feature name to the global shape, [batch, ...].

  Returns:
    Feature name to array of the global shape, in the dtype of the rows.
  """
  sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  return {
    name: jax.make_array_from_process_local_data(sharding, rows, element_spec[name].shape)
    for name, rows in batch.items()
  }


def _may_be_transient(error: BaseException | None) -> bool:
  """Return True if reading again may succeed: the error or one of its causes is about input or output."""
  while error is not None:
    if isinstance(error, (OSError, DataUnavailableError)):
      return True
    error = error.__cause__
  return False


def _as_source_error(error: BaseException, num_retries: int) -> BaseException:
  """Return an error that names the training data, since an OSError alone could come from anywhere."""
  if isinstance(error, DataUnavailableError):
    return error
  failure = DataUnavailableError(
    f'The training data could not be read, after {num_retries} retries (`num_retries`): {type(error).__name__}: '
    f'{error}. Make the data available, then rerun the command.'
  )
  failure.__cause__ = error
  return failure


class _Producer:
  """The background thread and the data that it shares with the consumer, without a reference to the consumer."""

  def __init__(
    self, host_iterator: HostIterator, convert, capacity: int, num_retries: int, batch_size: int
  ):
    self._batch_size = batch_size
    self._host_iterator = host_iterator
    self._convert = convert
    self._capacity = capacity
    self._num_retries = num_retries
    # Only the thread calls the host iterator, which may stall in any call; this lock protects everything else.
    self._changed = threading.Condition()
    # (batch as read, global arrays, position after it if the source returns one after each batch)
    self._ready: collections.deque[tuple[HostBatch, dict[str, jax.Array], DataState | None]] = (
      collections.deque()
    )
    self._error: BaseException | None = None
    self._closed = False
    self._thread: threading.Thread | None = None
    # Batches since the start, or since the last `set_state`: read, put into the queue, and returned to the consumer.
    self._num_read = self._num_queued = self._num_taken = 0
    # The position to read from again after an error, and the number of batches before it; None while it is unknown.
    self._known: tuple[DataState, int] | None = None
    # The position before `_known`. The newest position of a source that prefetches, such as tf.data, may contain an
    # error that no batch has shown yet and that it raises again whenever it is opened.
    self._older: tuple[DataState, int] | None = None
    self._tells_each_state = host_iterator.has_cheap_state
    # The position after the last returned batch, if the source returns one after each batch.
    self._state_taken: DataState | None = None
    # After an error the position of the host iterator is unknown.
    self._must_reopen = False
    # Counts calls of `set_state`; results that the thread makes for an earlier generation are dropped.
    self._generation = 0
    self._num_failures = 0  # in a row
    # True after the first request for a batch; before it the source is only opened, on request.
    self._is_read = False
    self._open_wanted = False
    # A wait for a batch, for the source to open, or for its position timed out.
    self._stalls = False
    # The thread closes the host iterator if `close` timed out while the thread was reading.
    self._is_left_behind = self._saw_close = False
    # The consumer requests the position; the thread asks for it, since a source that stalls may not answer.
    self._state_wanted = False
    self._state_error: Exception | None = None

  def _start(self) -> None:
    """Start the thread, if it is not running; call with the lock."""
    self._check_open()
    if self._thread is None:
      # Without a known position the source cannot be reopened.
      self._state_wanted = self._known is None
      self._thread = threading.Thread(target=self._run, name='t5x_lite-data', daemon=True)
      self._thread.start()

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError('This iterator is closed.')

  def _has_work(self) -> bool:
    return (
      self._closed
      or self._state_wanted
      or (self._open_wanted and self._must_reopen)
      or (self._is_read and len(self._ready) < self._capacity)
    )

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(self._has_work)
        if self._closed:
          self._saw_close = True
          break
        generation = self._generation
        state_wanted = self._state_wanted
      if state_wanted:
        self._find_position()
        continue
      try:
        self._advance(generation)
        continue
      except BaseException as error:  # raised when the consumer requests the batch
        with self._changed:
          if generation != self._generation:
            continue
          is_transient = _may_be_transient(error)
          is_final = (
            self._known is None or self._num_failures == self._num_retries or not is_transient
          )
          # The newest position may contain the error, unless opening it failed.
          if (self._num_failures or is_final) and self._older is not None and not self._must_reopen:
            self._known = self._older
            self._older = None
          self._must_reopen = True
          self._changed.notify_all()
          if is_final:
            if is_transient:
              self._error = _as_source_error(error, self._num_failures)
            else:
              self._error = error
            if self._closed:
              continue
            return
          delay = _FIRST_DELAY_SECONDS * 2**self._num_failures
          self._num_failures += 1
          logging.getLogger(__name__).warning(
            'The training data could not be read (%s: %s). Retry %d of %d in %g s, from the same position.',
            type(error).__name__,
            error,
            self._num_failures,
            self._num_retries,
            delay,
          )
      with self._changed:
        self._changed.wait_for(
          lambda generation=generation: self._closed or generation != self._generation, delay
        )
    if self._is_left_behind:
      self._host_iterator.close()

  def _find_position(self) -> None:
    """Record the position after the last returned batch."""
    with self._changed:
      undelivered = [host_batch for host_batch, _, _ in self._ready]
      number = self._num_taken
      generation = self._generation
      # Not after a failure, and not before batches that were returned earlier are read again.
      can_ask = not self._must_reopen and self._num_read == self._num_queued
    state = error = None
    if can_ask:
      try:
        state = self._host_iterator.get_state(undelivered)
      except Exception as e:  # pylint: disable=broad-exception-caught
        error = e  # raised if the consumer requests the position
    with self._changed:
      if generation == self._generation:
        if state is not None:
          if self._known is not None and self._known[1] < number:
            self._older = self._known
          self._known = state, number
        self._state_error = error
        if self._tells_each_state and number == self._num_taken:
          self._state_taken = state
      self._state_wanted = self._stalls = False
      self._changed.notify_all()

  def _advance(self, generation: int) -> None:
    """Reopen the source at the known position if necessary, then put the next batch into the queue."""
    source = self._host_iterator
    with self._changed:
      if generation != self._generation:
        return
      known = self._known if self._must_reopen else None
    if known is not None:
      state, number = known
      source.set_state(state)
    with self._changed:
      if generation != self._generation:
        return
      if known is not None:
        self._num_read = number
        self._must_reopen = False
        self._stalls = False
        self._changed.notify_all()
      if not self._is_read:
        return
    # After reopening, batches that were returned or are in the queue are read again and dropped.
    while not self._closed:
      host_batch = self._read(source)
      tells = self._tells_each_state and self._known is not None
      state = None
      if tells:
        state = source.get_state()
      is_new = self._num_read >= self._num_queued
      batch = {}
      if is_new:
        batch = self._convert(host_batch)
      with self._changed:
        if generation != self._generation:
          return
        self._num_read += 1
        if state is not None:
          self._known = state, self._num_read
        if is_new:
          self._num_queued += 1
          self._ready.append((host_batch, batch, state))
          self._stalls = False
          self._num_failures = 0
          self._changed.notify_all()
          return

  def _read(self, source: HostIterator) -> HostBatch:
    """Return the source's next batch; raise DataError if it ends before batches that the run has used already."""
    try:
      return next(source)
    except StopIteration as error:
      if self._num_read >= self._num_queued:
        raise
      raise DataError(
        f'The training data ended after {self._num_read} batches, but the run has used {self._num_queued}: there are '
        f'fewer records than when the position was saved. Restore the data, or {RESTART_REMEDY}.'
      ) from error

  def open(self, timeout: float | None = None) -> bool:
    """Return True if the source is at a known position within `timeout` seconds; raises errors of the source."""
    with self._changed:
      self._start()
      if self._known is None and not self._must_reopen and self._state_error is None:
        self._state_wanted = True
      self._open_wanted = True
      self._changed.notify_all()
      self._changed.wait_for(
        lambda: self._closed or self._error is not None or self._is_open(), timeout
      )
      if self._error is not None:
        raise self._error
      self._check_open()
      if self._known is None and self._state_error is not None:
        error = self._state_error
        self._state_error = None
        raise error
      self._stalls = not self._is_open()
      return not self._stalls

  def _is_open(self) -> bool:
    return not self._must_reopen and not self._state_wanted

  def take(self, timeout: float | None = None) -> dict[str, jax.Array] | None:
    """Return the next batch, or None after `timeout` seconds; the first call starts the thread."""
    with self._changed:
      self._start()
      self._is_read = True
      self._changed.notify_all()
      self._changed.wait_for(
        lambda: self._ready or self._error is not None or self._closed, timeout
      )
      if self._ready:
        _, batch, self._state_taken = self._ready.popleft()
        self._num_taken += 1
        self._changed.notify_all()
        return batch
      if self._error is not None:
        raise self._error
      self._check_open()
      self._stalls = True
      return None

  def peek(self) -> dict[str, jax.Array]:
    """Return the next batch, which `take` will return too."""
    self.knows_next()
    with self._changed:
      if self._ready:
        return self._ready[0][1]
      if self._error is not None:
        raise self._error
      raise RuntimeError('This iterator is closed.')

  def knows_next(self, timeout: float | None = None) -> bool:
    """Return True if it is known within `timeout` seconds whether `take` will return a batch."""
    with self._changed:
      self._start()
      self._is_read = True
      self._changed.notify_all()
      return bool(
        self._changed.wait_for(
          lambda: self._ready or self._error is not None or self._closed, timeout
        )
      )

  def has_ended(self) -> bool:
    """Return True if the source has raised StopIteration and all of its batches were returned."""
    with self._changed:
      return not self._ready and isinstance(self._error, StopIteration)

  def get_state(self) -> DataState:
    """Return the position after the last returned batch."""
    with self._changed:
      if self._state_taken is not None:
        return self._state_taken
      # Before the first batch, the first known position is valid.
      if not self._must_reopen and (self._is_read or self._known is None):
        self._start()
        self._state_wanted = True
        self._state_error = None
        self._changed.notify_all()
        if not self._is_read:
          patience = None
        elif self._stalls:
          patience = _STALLED_SAVE_SECONDS
        else:
          patience = _PATIENCE_SECONDS
        if not self._changed.wait_for(
          lambda: not self._state_wanted or self._must_reopen or self._closed, patience
        ):
          self._stalls = True  # `close` then waits for a shorter time
      if self._state_taken is not None:
        return self._state_taken
      known = self._known
      error = self._state_error
      if known is None or known[1] > self._num_taken:
        raise error or DataError(
          'The position in the training data is unknown: the source stalls or failed before it returned a position.'
        )
      self._state_error = None
    # If the source stalls, fails or cannot return its position, batches are counted from the last known position.
    state, number = known
    num_batches = self._num_taken - number
    if not num_batches:
      return state
    if error is not None:
      logging.getLogger(__name__).warning(
        'The position in the training data is not available (%s: %s). The position of %d batches ago is used '
        'instead; a resumed run reads these batches again and drops them.',
        type(error).__name__,
        error,
        num_batches,
      )
    skip = {'version': 1, 'num_batches': num_batches, 'batch_size': self._batch_size}
    return {**state, _SKIP_FILE: json.dumps(skip, indent=1).encode()}

  def set_state(self, state: DataState) -> None:
    """Drop prepared batches; the thread goes to `state` when the source is opened or read."""
    state = dict(state)
    num_skipped = 0
    if _SKIP_FILE in state:
      skip = json.loads(state.pop(_SKIP_FILE))
      num_skipped = skip['num_batches']
      if skip['batch_size'] != self._batch_size:
        raise DataError(
          f"The saved data position counts {num_skipped} batches of {skip['batch_size']} rows, but this run's batch "
          f'size is {self._batch_size}. Set the batch size to {skip["batch_size"]}, or {RESTART_REMEDY}.'
        )
    with self._changed:
      self._generation += 1
      self._ready.clear()
      self._known = (state, 0)
      self._older = None
      self._num_read = 0
      self._num_queued = num_skipped
      self._num_taken = num_skipped
      # While batches must be skipped, the source's position is not the one that was set.
      self._tells_each_state = self._host_iterator.has_cheap_state and not num_skipped
      self._state_taken = state if self._tells_each_state else None
      self._state_error = None
      self._num_failures = 0
      self._must_reopen = True
      if self._error is not None:
        # The thread ended with the error; a new one is started when the source is opened or read.
        self._error = self._thread = None
      self._changed.notify_all()

  def close(self) -> None:
    """Stop the thread, wait for it, and close the host iterator; a stalled iterator is closed when it returns."""
    with self._changed:
      if self._closed:
        return
      self._closed = True
      self._changed.notify_all()
    if self._thread is not None and self._thread is not threading.current_thread():
      self._thread.join(_STALLED_CLOSE_SECONDS if self._stalls else _PATIENCE_SECONDS)
      with self._changed:
        # The source stalls, and closing it might stall too.
        self._is_left_behind = self._thread.is_alive() and not self._saw_close
      if self._is_left_behind:
        return
    self._ready.clear()
    self._host_iterator.close()


class GlobalBatches:
  """An iterator of global batches, prepared by a background thread; endless if that of the rows is.

  The saved position counts only returned batches; batches in the queue are part of the position or prepared again. Use
  it as a context manager, or close it; otherwise it is closed when it is collected or when Python exits.
  """

  def __init__(
    self, host_iterator: HostIterator, partitioner: Any, prefetch: int = 2, *, num_retries: int = 0
  ):
    """Args:
      host_iterator: iterator of this process's rows; this object owns and closes it.
      partitioner: object with `mesh` and `data_partition_spec`.
      prefetch: number of batches to prepare in advance, at least 1.
      num_retries: maximal number of consecutive attempts to reopen a source that raised an OSError or a
        DataUnavailableError, at the position of the failed batch. The first retry waits 1 s, each further one twice as
        long.

    Raises:
      ConfigError: `prefetch` or `num_retries` is out of range.
    """
    checks.check(
      'GlobalBatches',
      {'prefetch': prefetch, 'num_retries': num_retries},
      prefetch=checks.number(at_least=1, at_most=MAX_UNDELIVERED, integer=True),
      num_retries=checks.number(at_least=0, at_most=_MAX_RETRIES, integer=True),
    )
    # A user's `get_dataset_fn` may return an iterator of another class.
    is_ours = isinstance(host_iterator, HostIterator)
    self.is_endless = is_ours and host_iterator.is_endless
    self.ends_together = is_ours and host_iterator.ends_together
    self.handles_process_count = is_ours and host_iterator.handles_process_count
    self.element_spec = dict(host_iterator.element_spec)
    spec = self.element_spec
    self._producer = _Producer(
      host_iterator,
      lambda batch: to_global_arrays(batch, partitioner, spec),
      prefetch,
      num_retries,
      batch_size=next(iter(spec.values())).shape[0],
    )
    self._finalizer = weakref.finalize(self, self._producer.close)

  def __iter__(self) -> Iterator[dict[str, jax.Array]]:
    return self

  def __next__(self) -> dict[str, jax.Array]:
    """Return the next batch; raises errors of the source with their traceback."""
    batch = self._producer.take()
    assert batch is not None  # It waits without a limit.
    return batch

  def peek(self) -> dict[str, jax.Array]:
    """Return the next batch without taking it; at the end of the data, raise StopIteration."""
    return self._producer.peek()

  def knows_next(self, timeout: float) -> bool:
    """Return True if it is known within `timeout` seconds whether another batch follows; takes no batch."""
    return self._producer.knows_next(timeout)

  @property
  def has_ended(self) -> bool:
    """True if the data has ended and the last batch was returned, as far as it is known; see `knows_next`."""
    return self._producer.has_ended()

  def take(self, timeout: float) -> dict[str, jax.Array] | None:
    """Return the next batch, arrays [batch, ...], or None after `timeout` seconds; raise like `next`.

    At the end of the data it raises StopIteration.
    """
    return self._producer.take(timeout)

  def get_state(self) -> DataState:
    """Return the exact position after the last returned batch, also if the source stalls or failed.

    Before the first batch it waits for the source without a limit, unless `open` was called.

    If the source cannot return its position, the state is its last known position and the number of batches returned
    since then: after `set_state` these batches are read again and dropped.

    Raises:
      Exception: error of the source, if it never returned a position.
      DataError: the source stalls or failed before it returned a position.
    """
    return self._producer.get_state()

  def open(self, timeout: float | None = None) -> bool:
    """Wait until the source is at the position of `set_state`, or has returned its first position.

    Without this call, the source is opened before the first batch is read.

    Args:
      timeout: seconds to wait; None for no limit.

    Returns:
      False after `timeout` seconds; the call may be repeated.

    Raises:
      DataError: the position does not fit the source, or is not available.
      DataUnavailableError: the source raised an OSError, also in all retries.
      Exception: another error of the source.
    """
    return self._producer.open(timeout)

  def set_state(self, state: DataState) -> None:
    """Set the position of the next batch; the source goes there, with retries, when it is opened or read.

    Raises:
      DataError: the position was saved with another batch size.
    """
    self._producer.set_state(state)

  def close(self) -> None:
    """Stop the background thread and close the source; may be called several times."""
    self._finalizer()

  def __enter__(self) -> 'GlobalBatches':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()
