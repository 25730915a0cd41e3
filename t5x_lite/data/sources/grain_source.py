"""The source 'grain': the batches of the builtin source, prefetched by grain in threads or worker processes.

`streams` defines the order of the data, so that order, packing and saved positions are those of the builtin source.
grain prepares several pieces of batches in parallel and returns them in order. Records come from JSON lines or, read by
grain, from array records (`file_tasks`).

grain's own order is not used: its shuffle depends on the sum of seed and epoch, so that runs whose seeds differ by one
share their epochs; positions of neighbours are correlated in large data sets (0.4 at 10**6 examples, 0.8 at 2**32;
grain 0.2.18); and its packing depends on the number of processes and workers.
"""

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any
import weakref

from absl import flags

from t5x_lite import compat
from t5x_lite.data.batches.streams import PieceReader
from t5x_lite.data.batches.streams import Pieces
from t5x_lite.data.files.grain_records import grain
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.errors import DataError, T5xLiteError

# Default number of pieces that are prepared in parallel, and pieces in the queue. A piece is a batch, or the rows of a
# packed group.
_NUM_THREADS = 4
_NUM_WAITING = 4


class _Sequence:
  """Pieces from a given number on, as a random access source of grain."""

  def __init__(self, pieces: Pieces, first: int):
    self._set_up = compat.SetUp()  # Before the pieces, whose modules a worker must find.
    self._pieces = pieces
    self._first = first

  def __len__(self) -> int:
    return self._pieces.num_from(self._first)

  def __getitem__(self, index: int) -> HostBatch:
    return self._pieces.make(self._first + index * self._pieces.step)

  def __repr__(self) -> str:
    return f'pieces of batches from number {self._first} on'


def _start_worker(worker: int, num_workers: int) -> None:
  """Let a worker ignore Ctrl-C, while the run saves its state, and end when the run has ended."""
  del worker, num_workers
  # The terminal sends the signal to the run and to its workers.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # grain stops its workers, but not if the run is killed.
  threading.Thread(target=_end_with_the_run, name='t5x_lite-parent', daemon=True).start()


def _end_with_the_run() -> None:
  run = multiprocessing.parent_process()
  if run is not None:
    run.join()
    os._exit(1)


class GrainReader(PieceReader):
  """Reader of pieces that grain prefetches; after a jump, such as a restored position, grain is restarted."""

  def __init__(self, pieces: Pieces, num_workers: int, num_threads: int = 0):
    """Args:
    pieces: the pieces.
    num_workers: number of processes that prepare them; 0 for threads of this process.
    num_threads: number of threads that prepare them, in each process; 0 for 4.
    """
    self._pieces = pieces
    self._num_workers = num_workers
    self._num_threads = num_threads or _NUM_THREADS
    # At most one open iterator of grain; closed at the latest when Python exits.
    self._opened: list[Any] = []
    self._finalizer = weakref.finalize(self, _close_all, self._opened)
    self._number: int | None = None
    self._piece: HostBatch = {}

  def read(self, number: int) -> HostBatch:
    """See base class."""
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
    """Return grain's iterator of the pieces from `number` on."""
    dataset = grain.MapDataset.source(_Sequence(self._pieces, number)).to_iter_dataset(
      grain.ReadOptions(
        num_threads=self._num_threads, prefetch_buffer_size=max(_NUM_WAITING, self._num_threads)
      )
    )
    if self._num_workers:
      if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain reads its flags, whose defaults are suitable
      # Use pipes: a container's shared memory is often 64 MB, and a killed run would not free it.
      options = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
      dataset = grain.experimental.WithOptionsIterDataset(dataset, options).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=self._num_workers, per_worker_buffer_size=1),
        worker_init_fn=_start_worker,
      )
    return iter(dataset)

  def _next(self) -> HostBatch:
    try:
      return next(self._opened[0])
    except Exception as error:
      if isinstance(error, T5xLiteError) or not self._num_workers:
        raise
      raise DataError(
        f'Preparing data in worker processes failed ({type(error).__name__}: {error}). Possible '
        'causes are a lack of memory, or functions and vocabularies of the task that cannot be pickled. '
        f'Set DatasetConfig.num_workers to 0 instead of {self._num_workers}.'
      ) from error

  def _leave(self) -> None:
    _close_all(self._opened)
    self._number = None
    self._piece = {}

  def close(self) -> None:
    """See base class."""
    self._leave()
    self._finalizer()


def _close_all(iterators: list[Any]) -> None:
  while iterators:
    iterators.pop().close()
