"""From each process's rows to global arrays on the devices, prepared in the background while the step runs."""

import collections
import json
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from t5x_lite.data.interfaces import DataState, HostBatch, HostIterator
from t5x_lite.data.positions import MAX_UNDELIVERED, RESTART_REMEDY
from t5x_lite.errors import ConfigError, DataError, DataUnavailableError

# How long saving and closing wait for a batch in preparation; less where a batch has been awaited in vain before.
_PATIENCE_SECONDS = 30.0
_STALLED_SAVE_SECONDS = 5.0
_STALLED_CLOSE_SECONDS = 1.0
# Before the first retry; each further one waits twice as long.
_FIRST_DELAY_SECONDS = 1.0
# The last of so many waits 17 minutes.
_MOST_RETRIES = 11
# Of a saved position: how many batches to read and drop after it.
_SKIP_FILE = 'skipped_batches.json'


def to_global_arrays(batch: Mapping[str, np.ndarray], partitioner: Any,
                     element_spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
  """Returns the global arrays of which `batch` holds this process's rows, sharded over the partitioner's data axes.

  Args:
    batch: feature name to this process's rows.
    partitioner: gives `mesh` and `data_partition_spec`.
    element_spec: feature name to the global shape.
  """
  sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
  return {name: jax.make_array_from_process_local_data(sharding, rows, element_spec[name].shape)
          for name, rows in batch.items()}


def _may_be_transient(error: BaseException | None) -> bool:
  """Returns True if reading again may succeed: the error, or one that it was raised from, is about input or output."""
  while error is not None:
    if isinstance(error, (OSError, DataUnavailableError)):
      return True
    error = error.__cause__
  return False


def _as_failure_of_the_source(error: BaseException, num_retries: int) -> BaseException:
  """Returns an error that says that the data is at fault, since one of input or output may stem from anywhere."""
  if isinstance(error, DataUnavailableError):
    return error
  failure = DataUnavailableError(
      f'The training data could not be read, after {num_retries} retries (`num_retries`): {type(error).__name__}: '
      f'{error}. Make the data available, then rerun the command.')
  failure.__cause__ = error
  return failure


class _Producer:
  """The thread and what it shares with the consumer; it does not hold the consumer, which may be collected."""

  def __init__(self, host_iterator: HostIterator, convert, capacity: int, num_retries: int, batch_size: int):
    self._batch_size = batch_size
    self._host_iterator = host_iterator
    self._convert = convert
    self._capacity = capacity
    self._num_retries = num_retries
    # Only the thread touches the host iterator, which may stall in any call; everything else is read and changed here.
    self._changed = threading.Condition()
    # Batch as read, as global arrays, and the position after it if the source tells that after each batch.
    self._ready: collections.deque[tuple[HostBatch, dict[str, jax.Array], DataState | None]] = collections.deque()
    self._error: BaseException | None = None
    self._closed = False
    self._thread: threading.Thread | None = None
    # Batches since the start, or since the position that was set last: read, put into the queue, and handed out.
    self._num_read = self._num_queued = self._num_taken = 0
    # The position to read from again after an error, and the number of batches before it; None while it is unknown.
    self._known: tuple[DataState, int] | None = None
    # The one that the source told before it. A source that reads ahead, such as tf.data, may tell a position that holds
    # an error which no batch has shown yet: it raises the same error again wherever it is opened.
    self._older: tuple[DataState, int] | None = None
    self._tells_each_state = host_iterator.has_cheap_state
    # The position after the last batch handed out, if the source tells it after each batch.
    self._state_taken: DataState | None = None
    # After an error the host iterator may stand anywhere.
    self._must_reopen = False
    # Counts the positions that were set; what the thread still does for an earlier one is dropped.
    self._generation = 0
    self._num_failures = 0  # in a row
    # Batches are wanted. Before the first one the source is only opened, if that is asked for.
    self._is_read = False
    self._open_wanted = False
    # A consumer has waited in vain for the batch in preparation, for the source to open, or for its position.
    self._stalls = False
    # Who closes the host iterator: the thread, if it still reads when the others have waited for it long enough.
    self._is_left_behind = self._saw_close = False
    # The consumer wants to know the position; the thread asks, since a source that stalls may not answer either.
    self._state_wanted = False
    self._state_error: Exception | None = None

  def _start(self) -> None:
    """Starts the thread, if it does not run; call with the lock."""
    if self._closed:
      raise RuntimeError('This iterator is closed.')
    if self._thread is None:
      # A run that saves no positions can do without them, but not reopen its source.
      self._state_wanted = self._known is None
      self._thread = threading.Thread(target=self._run, name='t5x_lite-data', daemon=True)
      self._thread.start()

  def _has_work(self) -> bool:
    return (self._closed or self._state_wanted or (self._open_wanted and self._must_reopen)
            or (self._is_read and len(self._ready) < self._capacity))

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(self._has_work)
        if self._closed:
          self._saw_close = True
          break
        generation, state_wanted = self._generation, self._state_wanted
      if state_wanted:
        self._find_position()
        continue
      try:
        self._advance(generation)
        continue
      except BaseException as error:  # The consumer raises it where it would have got the batch.
        with self._changed:
          if generation != self._generation:
            continue
          is_transient = _may_be_transient(error)
          is_final = self._known is None or self._num_failures == self._num_retries or not is_transient
          # The newest position may hold the error, unless it could not even be opened.
          if (self._num_failures or is_final) and self._older is not None and not self._must_reopen:
            self._known, self._older = self._older, None
          self._must_reopen = True
          self._changed.notify_all()
          if is_final:
            self._error = _as_failure_of_the_source(error, self._num_failures) if is_transient else error
            if self._closed:
              continue
            return
          delay = _FIRST_DELAY_SECONDS * 2**self._num_failures
          self._num_failures += 1
          logging.getLogger(__name__).warning(
              'The training data could not be read (%s: %s). Retry %d of %d in %g s, from the same position.',
              type(error).__name__, error, self._num_failures, self._num_retries, delay)
      with self._changed:
        self._changed.wait_for(lambda: self._closed or generation != self._generation, delay)
    if self._is_left_behind:
      self._host_iterator.close()

  def _find_position(self) -> None:
    """Notes the position after the last batch handed out."""
    with self._changed:
      undelivered, number = [host_batch for host_batch, _, _ in self._ready], self._num_taken
      generation = self._generation
      # Not where the source failed, nor where it is still to read what was handed out before.
      can_ask = not self._must_reopen and self._num_read == self._num_queued
    state = error = None
    if can_ask:
      try:
        state = self._host_iterator.get_state(undelivered)
      except Exception as e:  # pylint: disable=broad-exception-caught
        error = e  # The consumer raises it if it wants to know.
    with self._changed:
      if generation == self._generation:
        if can_ask and error is None:
          if self._known is not None and self._known[1] < number:
            self._older = self._known
          self._known = state, number
        self._state_error = error
        if self._tells_each_state and number == self._num_taken:
          self._state_taken = state
      self._state_wanted = self._stalls = False
      self._changed.notify_all()

  def _advance(self, generation: int) -> None:
    """Goes to the position that was set or that is to be read again, then puts the next batch into the queue."""
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
        self._num_read, self._must_reopen, self._stalls = number, False, False
        self._changed.notify_all()
      if not self._is_read:
        return
    # Where the source was reopened, batches that were handed out or wait are read again and dropped.
    while not self._closed:
      host_batch = next(source)
      tells = self._tells_each_state and self._known is not None
      state = source.get_state() if tells else None
      is_new = self._num_read >= self._num_queued
      batch = self._convert(host_batch) if is_new else {}
      with self._changed:
        if generation != self._generation:
          return
        self._num_read += 1
        if tells:
          self._known = state, self._num_read
        if is_new:
          self._num_queued += 1
          self._ready.append((host_batch, batch, state))
          self._stalls, self._num_failures = False, 0
          self._changed.notify_all()
          return

  def open(self, timeout: float | None = None) -> bool:
    """Returns whether the source stands at a known position within `timeout` seconds; raises what the source raised."""
    with self._changed:
      self._start()
      if self._known is None and not self._must_reopen and self._state_error is None:
        self._state_wanted = True
      self._open_wanted = True
      self._changed.notify_all()
      self._changed.wait_for(lambda: self._closed or self._error is not None or self._is_open(), timeout)
      if self._error is not None:
        raise self._error
      if self._closed:
        raise RuntimeError('This iterator was closed while it was opened.')
      if self._known is None and self._state_error is not None:
        error, self._state_error = self._state_error, None
        raise error
      self._stalls = not self._is_open()
      return not self._stalls

  def _is_open(self) -> bool:
    return not self._must_reopen and not self._state_wanted

  def take(self, timeout: float | None = None) -> dict[str, jax.Array] | None:
    """Returns the next batch, or None after `timeout` seconds without one; the first call starts the thread."""
    with self._changed:
      self._start()
      self._is_read = True
      self._changed.notify_all()
      self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed, timeout)
      if self._ready:
        _, batch, self._state_taken = self._ready.popleft()
        self._num_taken += 1
        self._changed.notify_all()
        return batch
      if self._error is not None:
        raise self._error
      if self._closed:
        raise RuntimeError('This iterator was closed while a batch was awaited.')
      self._stalls = True
      return None

  def get_state(self) -> DataState:
    """Returns the position after the last batch taken."""
    with self._changed:
      if self._state_taken is not None:
        return self._state_taken
      # Before the first batch, the position that was told at first holds.
      if not self._must_reopen and (self._is_read or self._known is None):
        self._start()
        self._state_wanted, self._state_error = True, None
        self._changed.notify_all()
        patience = None if not self._is_read else _STALLED_SAVE_SECONDS if self._stalls else _PATIENCE_SECONDS
        if not self._changed.wait_for(lambda: not self._state_wanted or self._must_reopen or self._closed, patience):
          self._stalls = True  # `close` need not be as patient once more.
      if self._state_taken is not None:
        return self._state_taken
      known, error = self._known, self._state_error
      if known is None or known[1] > self._num_taken:
        raise error or DataError(
            'The position in the training data is unknown: the source stalls or failed, and never told it.')
      self._state_error = None
    # While the source stalls or fails, or cannot tell its position, batches are counted from the last one that it told.
    state, number = known
    num_batches = self._num_taken - number
    if not num_batches:
      return state
    if error is not None:
      logging.getLogger(__name__).warning(
          'The training data could not tell its position (%s: %s). The position told %d batches ago is used instead; a '
          'resumed run reads these batches again and drops them.', type(error).__name__, error, num_batches)
    skip = {'version': 1, 'num_batches': num_batches, 'batch_size': self._batch_size}
    return {**state, _SKIP_FILE: json.dumps(skip, indent=1).encode()}

  def set_state(self, state: DataState) -> None:
    """Drops what was prepared; the thread goes to `state` when the source is opened or read."""
    state, num_skipped = dict(state), 0
    if _SKIP_FILE in state:
      skip = json.loads(state.pop(_SKIP_FILE))
      num_skipped = skip['num_batches']
      if skip['batch_size'] != self._batch_size:
        raise DataError(
            f"The saved data position counts {num_skipped} batches of {skip['batch_size']} rows, but this run's batch "
            f"size is {self._batch_size}. Set it back to {skip['batch_size']}, or {RESTART_REMEDY}.")
    with self._changed:
      self._generation += 1
      self._ready.clear()
      self._known, self._older = (state, 0), None
      self._num_read, self._num_queued, self._num_taken = 0, num_skipped, num_skipped
      # Where batches are still to be dropped, the source's own position is not the one that was set.
      self._tells_each_state = self._host_iterator.has_cheap_state and not num_skipped
      self._state_taken = state if self._tells_each_state else None
      self._state_error, self._num_failures, self._must_reopen = None, 0, True
      if self._error is not None:
        # The thread ended with the error; another one is started when the source is opened or read.
        self._error = self._thread = None
      self._changed.notify_all()

  def close(self) -> None:
    """Stops the thread, waits for it, and closes the host iterator; one that stalls is closed when the stall ends."""
    with self._changed:
      if self._closed:
        return
      self._closed = True
      self._changed.notify_all()
    if self._thread is not None and self._thread is not threading.current_thread():
      self._thread.join(_STALLED_CLOSE_SECONDS if self._stalls else _PATIENCE_SECONDS)
      with self._changed:
        # The source stalls, and closing it might wait for what it waits for.
        self._is_left_behind = self._thread.is_alive() and not self._saw_close
      if self._is_left_behind:
        return
    self._ready.clear()
    self._host_iterator.close()


class GlobalBatches:
  """An endless iterator of global batches, prepared by a background thread.

  The saved position counts the batches handed out only: those that wait are part of it or are made again. Close it
  (or use it as a context manager) when done; one that is forgotten is closed when it is collected or when Python
  exits.
  """

  def __init__(self, host_iterator: HostIterator, partitioner: Any, prefetch: int = 2, *, num_retries: int = 0):
    """Args:
      host_iterator: this process's rows; it belongs to this object from now on.
      partitioner: gives `mesh` and `data_partition_spec`.
      prefetch: how many batches to prepare ahead, at least 1.
      num_retries: how many times in a row to reopen a source that raised an OSError or a DataUnavailableError, at the
        position of the batch that failed. The first retry waits 1 s, each further one twice as long.

    Raises:
      ConfigError: `prefetch` or `num_retries` is out of range.
    """
    if not 1 <= prefetch <= MAX_UNDELIVERED:
      raise ConfigError(f'GlobalBatches(prefetch={prefetch}): expected 1 to {MAX_UNDELIVERED}.')
    if isinstance(num_retries, bool) or not isinstance(num_retries, int) or not 0 <= num_retries <= _MOST_RETRIES:
      raise ConfigError(f'num_retries is {num_retries!r}, expected an integer from 0 to {_MOST_RETRIES}.')
    self.element_spec = dict(host_iterator.element_spec)
    spec = self.element_spec
    self._producer = _Producer(
        host_iterator, lambda batch: to_global_arrays(batch, partitioner, spec), prefetch, num_retries,
        batch_size=next(iter(spec.values())).shape[0])
    self._finalizer = weakref.finalize(self, self._producer.close)

  def __iter__(self) -> Iterator[dict[str, jax.Array]]:
    return self

  def __next__(self) -> dict[str, jax.Array]:
    """Returns the next batch; raises what the source raised, with its traceback."""
    return self._producer.take()

  def take(self, timeout: float) -> dict[str, jax.Array] | None:
    """Returns the next batch, or None if there is none within `timeout` seconds; raises as `next` does."""
    return self._producer.take(timeout)

  def get_state(self) -> DataState:
    """Returns the exact position after the last batch handed out, also while the source stalls or after it failed.

    Before the first batch it waits for the source without a limit, unless `open` has been called.

    Where the source cannot tell its position, because it stalls, failed, or raises an error when it is asked, the state
    is the last position that it told and the number of batches handed out since: `set_state` has them read again and
    dropped.

    Raises:
      Exception: the source's own error when it was asked for its position, if it never told one before.
      DataError: the source stalls or failed, and never told a position.
    """
    return self._producer.get_state()

  def open(self, timeout: float | None = None) -> bool:
    """Waits until the source is at the position that was set; where none was set, until it has told its first position.

    Without this, the source goes there before the first batch is read.

    Args:
      timeout: how many seconds to wait; None for no limit.

    Returns:
      False if it takes longer; call it again.

    Raises:
      DataError: the position does not fit the source, or cannot be told.
      DataUnavailableError: an OSError of the source, after all retries.
      Exception: another error of the source's own.
    """
    return self._producer.open(timeout)

  def set_state(self, state: DataState) -> None:
    """Sets the position of the next batch. The source goes there, with retries, when it is opened or read.

    Raises:
      DataError: the position counts batches of another size.
    """
    self._producer.set_state(state)

  def close(self) -> None:
    """Stops the background thread and closes the source; safe to call twice."""
    self._finalizer()

  def __enter__(self) -> 'GlobalBatches':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()
