"""Global arrays on the devices from each process's rows, prepared in the background during the training step."""

import collections
from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import queue
import threading
import time
from typing import Any
import weakref

import jax
from jax.sharding import NamedSharding
import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches.positions import MAX_UNDELIVERED
from t5x_lite.data.batches.positions import RESTART_REMEDY
from t5x_lite.data.interfaces import DataState
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.interfaces import HostIterator
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
_CLOSED = 'This iterator is closed.'


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


@dataclasses.dataclass(frozen=True)
class _Position:
  """Position that the source has returned.

  Attributes:
    state: the files of the position.
    number: number of batches of the stream before it; negative if the run has used batches after it already.
    older: position of an earlier save. The newest position of a source that prefetches, such as tf.data, may contain an
      error that no batch has shown yet and that it raises again whenever it is opened.
  """

  state: DataState
  number: int
  older: '_Position | None' = None


@dataclasses.dataclass(frozen=True)
class _Batch:
  """A prepared batch.

  Attributes:
    arrays: feature name to array, [batch, ...].
    position: position after the batch; None if the source is asked only when the run saves.
  """

  arrays: dict[str, jax.Array]
  position: _Position | None


@dataclasses.dataclass
class _Stream:
  """Batches from a position on, until `set_state` begins another stream.

  Attributes:
    saved: position from which later ones are counted; None while it is unknown. The thread writes it, and the consumer
      all fields below.
    is_read: True after the first request for a batch; before it the source is only opened, on request.
    num_taken: number of batches that were returned.
    position: position after the last of them, if the source returns one after each batch.
    prepared: batches, then possibly an error, from the thread.
    next: element of `prepared` that is known and not returned; an error stays.
  """

  saved: _Position | None = None
  is_read: bool = False
  num_taken: int = 0
  position: _Position | None = None
  prepared: queue.SimpleQueue = dataclasses.field(default_factory=queue.SimpleQueue)
  next: _Batch | BaseException | None = None

  def fetch(self, timeout: float | None) -> _Batch | BaseException | None:
    """Return `next`, for which this waits; None after `timeout` seconds."""
    if self.next is None:
      with contextlib.suppress(queue.Empty):
        self.next = self.prepared.get(timeout=timeout)
    return self.next


class _Read:
  """Request to prepare one more batch."""


@dataclasses.dataclass(frozen=True)
class _Request:
  """Request with an answer; the other messages to the thread are `_Read` and `_Stream`.

  Attributes:
    num_taken: number of batches of the stream that were returned.
    answer: future of the result.
  """

  num_taken: int
  answer: concurrent.futures.Future


class _Open(_Request):
  """Request to go to the stream's position, or to ask for it if it is unknown."""


class _Ask(_Request):
  """Request to ask the source for the position after the last returned batch, if the source is in order."""


class _Close(_Request):
  """Request to close the source."""


def _answer(answer: concurrent.futures.Future, fn: Callable[..., Any], *args: Any) -> None:
  """Set the result of a future to `fn(*args)`, or to its error."""
  try:
    result = fn(*args)
  except BaseException as error:  # raised when the consumer reads the answer
    answer.set_exception(error)
  else:
    answer.set_result(result)


class _Reader:
  """Reads a stream and answers its requests; created and used in the producer's thread only."""

  def __init__(
    self,
    source: HostIterator,
    convert_fn: Callable[[HostBatch], dict[str, jax.Array]],
    num_retries: int,
    capacity: int,
    inbox: queue.SimpleQueue,
    stream: _Stream,
  ):
    self._source = source
    self._convert = convert_fn
    self._num_retries = num_retries
    self._inbox = inbox
    self._stream = stream
    # Position to read from after an error; None while it is unknown.
    self._position = stream.saved
    self._num_prepared = 0
    # Number of batches to read again and drop; None if the source must first go to `_position`.
    self._num_to_drop: int | None = None
    if stream.saved is None:
      self._num_to_drop = 0
    self._num_wanted = 0
    self._openings: collections.deque[_Open] = collections.deque()
    # The newest prepared batches; no more than these can be unused.
    self._newest: collections.deque[HostBatch] = collections.deque(maxlen=capacity)
    self._num_failures = 0  # in a row
    self._retry_at = 0.0
    self._error: BaseException | None = None

  def serve(self) -> '_Stream | _Close':
    """Handle messages until one ends the stream, a `_Stream` or a `_Close`, and return it."""
    while True:
      message = self._receive()
      match message:
        case None:
          self._work()
        case _Read():
          self._num_wanted += 1
        case _Open():
          self._openings.append(message)
        case _Ask():
          _answer(message.answer, self._ask, message.num_taken)
        case _:
          self._answer_all(RuntimeError(_CLOSED))
          return message

  def _receive(self) -> Any:
    """Wait for a message and return it, or None when a batch must be read or a retry is due."""
    timeout = None
    if self._num_wanted or self._openings:
      timeout = max(0.0, self._retry_at - time.monotonic())
    try:
      return self._inbox.get(timeout=timeout)
    except queue.Empty:
      return None

  def _work(self) -> None:
    """Do one step for the requests."""
    if self._error is not None:
      self._answer_all(self._error)
      return
    try:
      self._advance()
    except BaseException as error:  # raised when the consumer requests the batch
      self._fail(error)

  def _answer_all(self, error: BaseException) -> None:
    while self._openings:
      self._openings.popleft().answer.set_exception(error)
    if self._num_wanted:
      self._num_wanted = 0
      self._stream.prepared.put(error)

  def _advance(self) -> None:
    """Go to the position if necessary, else answer that the source is open, or read."""
    if self._num_to_drop is None:
      assert self._position is not None  # Without a position no error is retried.
      self._source.set_state(self._position.state)
      self._num_to_drop = self._num_prepared - self._position.number
    elif not self._openings:
      self._read()
    elif self._position is None:
      opening = self._openings.popleft()
      _answer(opening.answer, self._ask, opening.num_taken)
    else:
      self._openings.popleft().answer.set_result(None)

  def _read(self) -> None:
    """Prepare the next batch, or drop it if it was prepared before."""
    host_batch = self._next_batch()
    if self._num_to_drop:
      self._num_to_drop -= 1
      return
    position = None
    if self._source.has_cheap_state and self._position is not None:
      position = _Position(self._source.get_state(), self._num_prepared + 1)
    arrays = self._convert(host_batch)
    self._num_prepared += 1
    self._position = position or self._position
    self._newest.append(host_batch)
    self._num_failures = 0
    self._num_wanted -= 1
    self._stream.prepared.put(_Batch(arrays, position))

  def _next_batch(self) -> HostBatch:
    """Return the source's next batch; raise DataError if it ends before batches that the run has used already."""
    try:
      return next(self._source)
    except StopIteration as error:
      if not self._num_to_drop:
        raise
      assert self._position is not None  # Batches are dropped after it.
      num_used = self._num_prepared - self._position.number
      raise DataError(
        f'The training data ended after {num_used - self._num_to_drop} batches, but the run has used {num_used}: there '
        f'are fewer records than when the position was saved. Restore the data, or {RESTART_REMEDY}.'
      ) from error

  def _ask(self, num_taken: int) -> None:
    """Ask for the position after `num_taken` batches, unless the source failed or must read batches again."""
    if self._num_to_drop != 0:
      return
    undelivered = list(self._newest)[len(self._newest) - self._num_prepared + num_taken :]
    state = self._source.get_state(undelivered)
    older = self._position
    if older is not None and older.number >= num_taken:
      older = older.older
    elif older is not None:
      older = dataclasses.replace(older, older=None)
    self._position = _Position(state, num_taken, older)
    self._stream.saved = self._position

  def _fail(self, error: BaseException) -> None:
    """Plan a retry, or keep the error for all requests from now on."""
    was_open = self._num_to_drop is not None
    self._num_to_drop = None  # After an error the position of the source is unknown.
    is_transient = _may_be_transient(error)
    is_final = self._position is None or self._num_failures == self._num_retries or not is_transient
    # The newest position may contain the error, unless opening it failed: tf.data reports a position after it has read
    # ahead. A checkpoint between such a read and the failing batch holds the error; resume from the one before it.
    may_contain_error = was_open and (self._num_failures > 0 or is_final)
    if may_contain_error and self._position is not None and self._position.older is not None:
      self._position = self._position.older
      self._stream.saved = self._position
    if is_final:
      if is_transient:
        error = _as_source_error(error, self._num_failures)
      self._error = error
      return
    delay = _FIRST_DELAY_SECONDS * 2**self._num_failures
    self._num_failures += 1
    self._retry_at = time.monotonic() + delay
    logging.getLogger(__name__).warning(
      'The training data could not be read (%s: %s). Retry %d of %d in %g s, from the same position.',
      type(error).__name__,
      error,
      self._num_failures,
      self._num_retries,
      delay,
    )


class _ReadingThread:
  """A thread that prepares batches of a source; without a reference to the `GlobalBatches` that uses it.

  Only the thread calls the source, which may stall in any call. The two sides share nothing but queues and
  `_Stream.saved`: streams replace each other, requests have futures of their answers.

  Attributes:
    stalls: True if the last wait for the source timed out.
  """

  def __init__(
    self,
    source: HostIterator,
    make_reader: Callable[[queue.SimpleQueue, _Stream], _Reader],
  ):
    self.stalls = False
    self._source = source
    self._make_reader = make_reader
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    self._thread: threading.Thread | None = None
    self._is_closed = False

  def _run(self, stream: _Stream) -> None:
    message: _Stream | _Close = stream
    while isinstance(message, _Stream):
      message = self._make_reader(self._inbox, message).serve()
    _answer(message.answer, self._source.close)

  def start(self, stream: _Stream) -> None:
    """Start the thread with this stream, if it is not running."""
    if self._is_closed:
      raise RuntimeError(_CLOSED)
    if self._thread is None:
      self._thread = threading.Thread(
        target=self._run, args=(stream,), name='t5x_lite-data', daemon=True
      )
      self._thread.start()

  def send(self, message: '_Read | _Request | _Stream') -> None:
    """Send a message, if the thread is running."""
    if self._thread is not None:
      self._inbox.put(message)

  def is_done(self, answer: concurrent.futures.Future, timeout: float | None) -> bool:
    """Return True if the answer comes within `timeout` seconds."""
    is_done = bool(concurrent.futures.wait([answer], timeout).done)
    self.stalls = not is_done
    return is_done

  def close(self) -> None:
    """Let the thread close the source, and wait for it unless it stalls; without a thread, close the source."""
    self._is_closed = True
    if self._thread is None:
      self._source.close()
      return
    answer = concurrent.futures.Future()
    self.send(_Close(0, answer))
    if self._thread is threading.current_thread():
      return
    self._thread.join(_STALLED_CLOSE_SECONDS if self.stalls else _PATIENCE_SECONDS)
    if answer.done():
      answer.result()


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
    self._batch_size = next(iter(spec.values())).shape[0]
    self._capacity = prefetch

    def make_reader(inbox: queue.SimpleQueue, stream: _Stream) -> _Reader:
      return _Reader(
        host_iterator,
        lambda batch: to_global_arrays(batch, partitioner, spec),
        num_retries,
        prefetch,
        inbox,
        stream,
      )

    self._thread = _ReadingThread(host_iterator, make_reader)
    self._stream = _Stream()
    # Answer of a call of `open` that timed out.
    self._opening: concurrent.futures.Future | None = None
    self._finalizer = weakref.finalize(self, self._thread.close)

  def __iter__(self) -> Iterator[dict[str, jax.Array]]:
    return self

  def __next__(self) -> dict[str, jax.Array]:
    """Return the next batch; raises errors of the source with their traceback."""
    batch = self.take(None)
    assert batch is not None  # It waits without a limit.
    return batch

  def _fetch(self, timeout: float | None) -> _Batch | BaseException | None:
    """Return what comes next, or None after `timeout` seconds; the first call requests batches."""
    stream = self._stream
    self._thread.start(stream)
    if not stream.is_read:
      stream.is_read = True
      if stream.saved is None:  # Without a known position the source cannot be reopened.
        self._send(_Ask)
      for _ in range(self._capacity):
        self._thread.send(_Read())
    return stream.fetch(timeout)

  def _send(self, kind: type[_Request]) -> concurrent.futures.Future:
    """Send a request and return the future of its answer."""
    self._thread.start(self._stream)
    answer = concurrent.futures.Future()
    self._thread.send(kind(self._stream.num_taken, answer))
    return answer

  def peek(self) -> dict[str, jax.Array]:
    """Return the next batch without taking it; at the end of the data, raise StopIteration."""
    batch = self._fetch(None)
    if isinstance(batch, BaseException):
      raise batch
    assert batch is not None  # It waits without a limit.
    return batch.arrays

  def knows_next(self, timeout: float) -> bool:
    """Return True if it is known within `timeout` seconds whether another batch follows; takes no batch."""
    return self._fetch(timeout) is not None

  @property
  def has_ended(self) -> bool:
    """True if the data has ended and the last batch was returned, as far as it is known; see `knows_next`."""
    return isinstance(self._stream.fetch(0), StopIteration)

  def take(self, timeout: float | None) -> dict[str, jax.Array] | None:
    """Return the next batch, arrays [batch, ...], or None after `timeout` seconds; raise like `next`.

    At the end of the data it raises StopIteration.
    """
    batch = self._fetch(timeout)
    self._thread.stalls = batch is None
    if isinstance(batch, BaseException):
      raise batch
    if batch is None:
      return None
    stream = self._stream
    stream.next = None
    stream.num_taken += 1
    stream.position = batch.position
    self._thread.send(_Read())
    return batch.arrays

  def get_state(self) -> DataState:
    """Return the exact position after the last returned batch, also if the source stalls or failed.

    Before the first batch it waits for the source without a limit, unless `open` was called.

    If the source cannot return its position, the state is its last known position and the number of batches returned
    since then: after `set_state` these batches are read again and dropped.

    Raises:
      Exception: error of the source, if it never returned a position.
      DataError: the source stalls or failed before it returned a position.
    """
    stream = self._stream
    position = stream.position
    error = None
    if position is None:
      # Before the first batch, the first known position is valid.
      if stream.num_taken or stream.saved is None:
        error = self._ask()
      position = stream.saved
    if position is None:
      raise error or DataError(
        'The position in the training data is unknown: the source stalls or failed before it returned a position.'
      )
    # If the source stalls, fails or cannot return its position, batches are counted from the last known position.
    num_batches = stream.num_taken - position.number
    if not num_batches:
      return position.state
    if error is not None:
      logging.getLogger(__name__).warning(
        'The position in the training data is not available (%s: %s). The position of %d batches ago is used '
        'instead; a resumed run reads these batches again and drops them.',
        type(error).__name__,
        error,
        num_batches,
      )
    skip = {'version': 1, 'num_batches': num_batches, 'batch_size': self._batch_size}
    return {**position.state, _SKIP_FILE: json.dumps(skip, indent=1).encode()}

  def _ask(self) -> BaseException | None:
    """Let the thread ask for the position; return the source's error, if it is known in time."""
    if not self._stream.is_read:
      patience = None
    elif self._thread.stalls:
      patience = _STALLED_SAVE_SECONDS
    else:
      patience = _PATIENCE_SECONDS
    answer = self._send(_Ask)
    if self._thread.is_done(answer, patience):
      return answer.exception()
    return None

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
    answer = self._opening or self._send(_Open)
    self._opening = None
    if self._thread.is_done(answer, timeout):
      answer.result()
      return True
    self._opening = answer
    return False

  def set_state(self, state: DataState) -> None:
    """Set the position of the next batch; the source goes there, with retries, when it is opened or read.

    Raises:
      DataError: the position was saved with another batch size.
    """
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
    self._stream = _Stream(_Position(state, -num_skipped))
    self._opening = None
    self._thread.send(self._stream)

  def close(self) -> None:
    """Stop the background thread and close the source; may be called several times."""
    self._finalizer()
    # Prepared batches need not stay in memory.
    self._stream = dataclasses.replace(self._stream, prepared=queue.SimpleQueue(), next=None)

  def __enter__(self) -> 'GlobalBatches':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()
