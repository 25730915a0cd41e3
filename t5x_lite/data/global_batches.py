"""From each process's rows to global arrays on the devices, prepared in the background while the step runs."""

import collections
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from t5x_lite.data.builtin_source import MAX_UNDELIVERED
from t5x_lite.data.interfaces import DataState, HostBatch, HostIterator
from t5x_lite.errors import ConfigError

# How long `close` waits for a batch in preparation.
_JOIN_SECONDS = 30.0


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


class _Producer:
  """The thread and what it shares with the consumer; it does not hold the consumer, which may be collected."""

  def __init__(self, host_iterator: HostIterator, convert, capacity: int):
    self._host_iterator = host_iterator
    self._convert = convert
    self._capacity = capacity
    # Held while the host iterator moves, so that whoever holds it sees iterator and queue agree.
    self._source_lock = threading.Lock()
    self._changed = threading.Condition()
    self._ready: collections.deque[tuple[HostBatch, dict[str, jax.Array]]] = collections.deque()
    self._error: BaseException | None = None
    self._closed = False
    self._thread: threading.Thread | None = None

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._closed or len(self._ready) < self._capacity)
        if self._closed:
          return
      with self._source_lock:
        if self._closed:
          return
        try:
          host_batch = next(self._host_iterator)
          item = host_batch, self._convert(host_batch)
        except BaseException as error:  # The consumer raises it where it would have got the batch.
          with self._changed:
            self._error = error
            self._changed.notify_all()
          return
        with self._changed:
          self._ready.append(item)
          self._changed.notify_all()

  def take(self) -> dict[str, jax.Array]:
    """Returns the next batch; starts the thread at the first call."""
    with self._changed:
      if self._closed:
        raise RuntimeError('This iterator is closed.')
      if self._thread is None:
        self._thread = threading.Thread(target=self._run, name='t5x_lite-data', daemon=True)
        self._thread.start()
      self._changed.wait_for(lambda: self._ready or self._error is not None or self._closed)
      if self._ready:
        _, batch = self._ready.popleft()
        self._changed.notify_all()
        return batch
      if self._error is not None:
        raise self._error
      raise RuntimeError('This iterator was closed while a batch was awaited.')

  def get_state(self) -> DataState:
    """Returns the position after the last batch taken."""
    with self._source_lock:
      return self._host_iterator.get_state([host_batch for host_batch, _ in self._ready])

  def set_state(self, state: DataState) -> None:
    """Drops what was prepared and goes to `state`."""
    with self._source_lock, self._changed:
      self._host_iterator.set_state(state)
      self._ready.clear()
      if self._error is not None:
        # The thread ended with the error; the next `take` starts another at the new position.
        self._error = self._thread = None
      self._changed.notify_all()

  def close(self) -> None:
    """Stops the thread, waits for it, and closes the host iterator."""
    with self._changed:
      if self._closed:
        return
      self._closed = True
      self._changed.notify_all()
    if self._thread is not None and self._thread is not threading.current_thread():
      self._thread.join(_JOIN_SECONDS)
    self._ready.clear()
    self._host_iterator.close()


class GlobalBatches:
  """An endless iterator of global batches, prepared by a background thread.

  The saved position counts the batches handed out only: those that wait are part of it or are made again. Close it
  (or use it as a context manager) when done; one that is forgotten is closed when it is collected or when Python
  exits.
  """

  def __init__(self, host_iterator: HostIterator, partitioner: Any, prefetch: int = 2):
    """Args:
      host_iterator: this process's rows; it belongs to this object from now on.
      partitioner: gives `mesh` and `data_partition_spec`.
      prefetch: how many batches to prepare ahead, at least 1.

    Raises:
      ConfigError: `prefetch` is out of range.
    """
    if not 1 <= prefetch <= MAX_UNDELIVERED:
      raise ConfigError(f'GlobalBatches(prefetch={prefetch}): expected 1 to {MAX_UNDELIVERED}.')
    self.element_spec = dict(host_iterator.element_spec)
    spec = self.element_spec
    self._producer = _Producer(host_iterator, lambda batch: to_global_arrays(batch, partitioner, spec), prefetch)
    self._finalizer = weakref.finalize(self, self._producer.close)

  def __iter__(self) -> Iterator[dict[str, jax.Array]]:
    return self

  def __next__(self) -> dict[str, jax.Array]:
    """Returns the next batch; raises what the source raised, with its traceback."""
    return self._producer.take()

  def get_state(self) -> DataState:
    """Returns the exact position after the last batch handed out."""
    return self._producer.get_state()

  def set_state(self, state: DataState) -> None:
    """Goes to a saved position; raises DataError where it does not fit the source."""
    self._producer.set_state(state)

  def close(self) -> None:
    """Stops the background thread and closes the source; safe to call twice."""
    self._finalizer()

  def __enter__(self) -> 'GlobalBatches':
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()
