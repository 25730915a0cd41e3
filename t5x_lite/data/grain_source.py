"""The source 'grain': the batches of the builtin source, prepared ahead by grain in threads or worker processes.

`streams` says what stands where in the data, so the order, packing and saved positions of both sources are the same,
and anything that makes a piece of a batch by its number may do so in any order. grain makes many pieces at once and
hands them over in theirs. Records come from JSON lines or, read by grain, from array records (`file_tasks`).

Why the order is not grain's own: its shuffle depends on the seed and the epoch by their sum, so that runs whose seeds
differ by one share their epochs, and the places that it gives to neighbours are correlated in large data sets (0.4 at
10**6 examples, 0.8 at 2**32; grain 0.2.18); its packing depends on how many processes and workers take part.
"""

import multiprocessing
import os
import signal
import sys
import threading
import weakref
from typing import Any

from absl import flags

from t5x_lite.data.grain_records import grain
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.streams import PieceReader, Pieces
from t5x_lite.errors import DataError, T5xLiteError

# Pieces that are made at once, and that may wait to be used. They are large: a batch, or the rows of a packed group.
_NUM_THREADS = 4
_NUM_WAITING = 4


class _Sequence:
  """Pieces from one number on, as grain's random access source."""

  def __init__(self, pieces: Pieces, first: int):
    self._pieces = pieces
    self._first = first

  def __len__(self) -> int:
    return (sys.maxsize - self._first) // self._pieces.step

  def __getitem__(self, index: int) -> HostBatch:
    return self._pieces.make(self._first + index * self._pieces.step)

  def __repr__(self) -> str:
    return f'pieces of batches from number {self._first} on'


def _start_worker(worker: int, num_workers: int) -> None:
  """Ties a worker to its run: it works on while the run saves its state after Ctrl-C, and ends when the run is gone."""
  del worker, num_workers
  # The terminal sends the signal to both.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # grain tells its workers to stop, but a run that is killed tells them nothing.
  threading.Thread(target=_end_with_the_run, name='t5x_lite-parent', daemon=True).start()


def _end_with_the_run() -> None:
  run = multiprocessing.parent_process()
  if run is not None:
    run.join()
    os._exit(1)


class GrainReader(PieceReader):
  """Hands over pieces that grain makes ahead.

  Pieces are asked for in order but after a restored position: then grain starts anew at that one.
  """

  def __init__(self, pieces: Pieces, num_workers: int):
    """Args:
      pieces: what to make.
      num_workers: processes that make them; 0 for threads of this process.
    """
    self._pieces = pieces
    self._num_workers = num_workers
    # grain's iterator, if one is open; it is closed and let go when Python exits, at the latest.
    self._opened: list[Any] = []
    self._finalizer = weakref.finalize(self, _close_all, self._opened)
    self._number: int | None = None
    self._piece: HostBatch = {}

  def read(self, number: int) -> HostBatch:
    if number != self._number:
      follows = self._number is not None and number == self._number + self._pieces.step
      if not follows:
        self._leave()
        self._opened.append(self._open(number))
      self._number = None
      self._piece = self._next()
      self._number = number
    return self._piece

  def _open(self, number: int) -> Any:
    """Returns grain's iterator of the pieces from `number` on."""
    dataset = grain.MapDataset.source(_Sequence(self._pieces, number)).to_iter_dataset(
        grain.ReadOptions(num_threads=_NUM_THREADS, prefetch_buffer_size=_NUM_WAITING))
    if self._num_workers:
      if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads flags of its own, whose defaults serve.
      # Through pipes: a container's shared memory is often 64 MB, and what a killed run leaves in it stays.
      options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
      dataset = grain.experimental.WithOptionsIterDataset(dataset, options).mp_prefetch(
          grain.MultiprocessingOptions(num_workers=self._num_workers, per_worker_buffer_size=1),
          worker_init_fn=_start_worker)
    return iter(dataset)

  def _next(self) -> HostBatch:
    try:
      return next(self._opened[0])
    except Exception as error:
      if isinstance(error, T5xLiteError) or not self._num_workers:
        raise
      raise DataError(f'Preparing data in worker processes failed ({type(error).__name__}: {error}). They are sent the '
                      "task's functions and vocabularies, and may be killed for want of memory. "
                      f'DatasetConfig.num_workers is {self._num_workers}: 0 prepares data in this process.') from error

  def _leave(self) -> None:
    _close_all(self._opened)
    self._number, self._piece = None, {}

  def close(self) -> None:
    self._leave()
    self._finalizer()


def _close_all(iterators: list[Any]) -> None:
  while iterators:
    iterators.pop().close()
