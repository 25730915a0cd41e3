"""Pipeline of inference: devices compute a batch while the host reads the next one and writes the previous one."""

import collections
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
from typing import Any, Protocol

import jax
import numpy as np

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import runtime
from t5x_lite.apps.common import waiting
from t5x_lite.apps.infer.config import InferConfig
from t5x_lite.apps.infer.jsonl import Inferences
from t5x_lite.train_state import EvaluationState
from t5x_lite.types import Array, PyTree

# Number of batches that are prepared ahead, and of chunks that may wait to be written.
_NUM_AHEAD = 2
# Time that a stop waits for the batch that is being read, before a stalled source is abandoned.
_PATIENCE_SECONDS = 5.0


class ChunkWriter(Protocol):
  """Function that writes the results of some batches."""

  def __call__(
    self, first: int, num_batches: int, examples: Sequence[data.Example], inferences: Inferences
  ) -> None:
    """Write the results of `num_batches` batches starting with number `first` of the shard; called from one thread.

    After a failed write it may be called with a later chunk, which it must reject.
    """


class _Reader:
  """Reads a worker's batches of a source; sets `num_examples` of the entire source at the end."""

  def __init__(self, source: data.ExampleSource, cfg: InferConfig, first_batch: int):
    self._source = source
    self._cfg = cfg
    self._first = first_batch * cfg.num_shards + cfg.shard
    self.num_examples = 0

  def batches(self) -> Iterator[tuple[list[data.Example], int, dict[str, Array]]]:
    """Yield (examples of a batch, its number in the source, global arrays)."""
    size = self._cfg.layout.batch_size
    number = self._first * size
    batch = self._first
    records = []
    for record in self._source.records(number):
      number += 1
      if batch % self._cfg.num_shards == self._cfg.shard:
        records.append(record)
      if number == (batch + 1) * size:
        if records:
          yield self._make(batch, records)
        batch = batch + 1
        records = []
    if records:
      yield self._make(batch, records)
    if number > self._first * size:
      self.num_examples = number
    else:  # The source ends earlier: the rest of this shard is empty.
      if self._source.is_exact:
        self.num_examples = self._source.num_examples
      else:
        self.num_examples = sum(1 for _ in self._source.records())

  def _make(self, number, records):
    examples = [self._source.prepare(record) for record in records]
    local_rows = self._cfg.partitioner.get_rows(self._cfg.layout.batch_size)
    rows = self._source.convert(
      [examples[row] for row in local_rows if row < len(examples)], len(local_rows)
    )
    spec = self._source.element_spec(self._cfg.layout.batch_size)
    return examples, number, data.to_global_arrays(rows, self._cfg.partitioner, spec)


def infer_source(
  source: data.ExampleSource,
  cfg: InferConfig,
  runner: evaluation.PredictRunner,
  train_state: EvaluationState,
  train_state_axes: PyTree,
  *,
  first_batch: int,
  write_fn: ChunkWriter,
  waits: waiting.DataWaits,
  should_stop: Callable[[], bool] = lambda: False,
  on_batch: Callable[[int], None] = lambda num_examples: None,
) -> int | None:
  """Compute a worker's batches of a source and write the results in chunks.

  Args:
    source: the examples.
    cfg: configuration, with mode, shard and number of batches per chunk; the last chunk may have fewer.
    runner: computes predictions or scores.
    train_state: the state.
    train_state_axes: mesh PartitionSpecs of the state.
    first_batch: number, within the shard, of the first batch to compute.
    write_fn: writes a chunk; called in the background.
    waits: waits for batches; it raises `waiting.Interrupted` if the run must stop.
    should_stop: returns whether to stop; called after each batch. Computed results are written before this function
      returns.
    on_batch: called with the number of examples of each computed batch.

  Returns:
    Number of examples in the entire source; None if stopped.
  """
  reader = _Reader(source, cfg, first_batch)
  chunk: list[tuple[list[data.Example], tuple[Any, PyTree]]] = []
  chunk_start = first_batch
  writes: collections.deque[concurrent.futures.Future] = collections.deque()
  stopped = False
  # The program ends while threads of this name stall, see `cli.run_program`.
  read_pool = concurrent.futures.ThreadPoolExecutor(1, 't5x_lite-data-read')
  reads: collections.deque[concurrent.futures.Future] = collections.deque()
  with concurrent.futures.ThreadPoolExecutor(1, 't5x_lite-write') as write_pool:

    def submit_chunk():
      nonlocal chunk_start
      while len(writes) >= _NUM_AHEAD or (writes and writes[0].done()):
        writes.popleft().result()
      writes.append(write_pool.submit(write_fn, chunk_start, len(chunk), *_join(chunk)))
      chunk_start += len(chunk)
      chunk.clear()

    def read_batches():
      nonlocal stopped
      batches = reader.batches()
      reads.extend(read_pool.submit(next, batches, None) for _ in range(_NUM_AHEAD))
      while not stopped:
        try:
          batch = waits.result(reads[0], 'reading the input')
        except waiting.Interrupted:
          stopped = True
          return
        if batch is None:
          return
        reads.popleft()
        reads.append(read_pool.submit(next, batches, None))
        yield batch
        stopped = should_stop()

    def finish_writing():
      if chunk:
        submit_chunk()
      while writes:
        writes.popleft().result()

    try:
      with runtime.reporting_errors():  # before the results so far are written
        for examples, outputs in runner.run(
          cfg.mode, read_batches(), train_state, train_state_axes, seed=cfg.random_seed
        ):
          if cfg.mode != 'predict_with_aux':
            outputs = (outputs, {})
          chunk.append((examples, _first_rows(outputs, len(examples))))
          on_batch(len(examples))
          if len(chunk) == cfg.checkpoint_period:
            submit_chunk()
    except BaseException:
      with contextlib.suppress(Exception):
        finish_writing()  # Keep the results computed before the error.
      raise
    finally:
      read_pool.shutdown(wait=False, cancel_futures=True)
      # Reads that are cancelled before they begin never become done.
      patience = _PATIENCE_SECONDS if stopped else None
      concurrent.futures.wait([read for read in reads if not read.cancelled()], patience)
    finish_writing()
  if stopped:
    return None
  return reader.num_examples


def _first_rows(outputs: PyTree, count: int) -> PyTree:
  return jax.tree.map(lambda rows: rows[:count], outputs)


def _join(
  chunk: Sequence[tuple[list[data.Example], tuple[Any, PyTree]]],
) -> tuple[list[data.Example], Inferences]:
  """Return the examples and the results of the batches of a chunk, concatenated."""
  examples = [example for batch, _ in chunk for example in batch]
  outputs = [outputs for _, outputs in chunk]
  joined = jax.tree.map(lambda *rows: np.concatenate(rows), *outputs)
  return examples, joined
