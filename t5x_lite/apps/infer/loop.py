"""From a source to results: the device works on one batch while the host reads the next and writes the last."""

import collections
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
from typing import Any, Protocol

import jax
import numpy as np

from t5x_lite import data
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.apps.infer.jsonl import Inferences
from t5x_lite.errors import ConfigError, DataError, did_you_mean
from t5x_lite.models import BaseModel
from t5x_lite.train_state import TrainState
from t5x_lite.types import Array, PyTree

MODES = ('predict', 'predict_with_aux', 'score')
# Batches that are prepared ahead, and chunks that may wait to be written.
_NUM_AHEAD = 2


def check_mode(mode: str) -> None:
  """Refuses a mode that there is not.

  Raises:
    ConfigError: see above.
  """
  if mode not in MODES:
    raise ConfigError(f'mode is {mode!r}; expected one of {", ".join(map(repr, MODES))}.'
                      f'{did_you_mean(str(mode), MODES)}')


class BatchInference:
  """The computation of one batch in one mode."""

  def __init__(self, model: BaseModel, mode: str, partitioner: partitioning.BasePartitioner, random_seed: int = 0):
    """Configures; computes nothing.

    Args:
      model: the model.
      mode: one of `MODES`.
      partitioner: compiles over the mesh.
      random_seed: of a decoding that draws. The key of a batch is made of it and of the number of the batch in the
        source, so results do not depend on interruptions or on the number of shards.

    Raises:
      ConfigError: an unknown mode.
    """
    check_mode(mode)
    self._model = model
    self._mode = mode
    self._partitioner = partitioner
    self._random_seed = random_seed
    self._compiled: Callable[..., tuple[Array, PyTree]] | None = None
    self._spec: dict[str, jax.ShapeDtypeStruct] = {}

  def compile(self, train_state: TrainState, train_state_axes: PyTree, spec: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Compiles for batches of one shape.

    Args:
      train_state: the state.
      train_state_axes: its mesh PartitionSpecs.
      spec: feature name to shape and dtype of a global batch.

    Raises:
      DataError: the model gives something with another number of rows.
    """
    if self._compiled is not None and spec == self._spec:
      return
    data_spec = self._partitioner.data_partition_spec
    step = self._partitioner.partition(
        self._step, in_axis_resources=(train_state_axes, data_spec, None), out_axis_resources=None)
    sharding = jax.sharding.NamedSharding(self._partitioner.mesh, data_spec)
    batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in spec.items()}
    lowered = step.lower(train_state, batch, np.int32(0))
    num_rows = next(iter(spec.values())).shape[0]
    for path, leaf in tree_utils.named_leaves(lowered.out_info):
      if not leaf.shape or leaf.shape[0] != num_rows:
        raise DataError(f'In mode {self._mode!r} the model gives {path or "an array"} of shape {leaf.shape}; expected '
                        f'{num_rows} rows, one for each example of the batch.')
    self._compiled, self._spec = lowered.compile(), dict(spec)

  def __call__(self, train_state: TrainState, batch: dict[str, Array], number: int) -> tuple[Array, PyTree]:
    """Returns (predictions or scores, what else is known), on the devices, the same on every process.

    Args:
      train_state: the state.
      batch: global arrays.
      number: of the batch in the source.
    """
    return self._compiled(train_state, batch, np.int32(number))

  def _step(self, train_state, batch, number):
    mutables = tree_utils.to_dict(train_state.flax_mutables)
    options = {'flax_mutables': mutables} if mutables else {}
    if self._mode == 'score':
      return self._model.score_batch(train_state.eval_params, batch, **options), {}
    rng = jax.random.fold_in(jax.random.key(self._random_seed), number)
    if self._mode == 'predict':
      return self._model.predict_batch(train_state.eval_params, batch, rng=rng, **options), {}
    return self._model.predict_batch_with_aux(train_state.eval_params, batch, rng=rng, **options)


class ChunkWriter(Protocol):
  """Takes the results of some batches, to write them."""

  def __call__(self, first: int, num_batches: int, examples: Sequence[data.Example], inferences: Inferences) -> None:
    """Writes the results of `num_batches` batches from number `first` of the shard on; called from one thread.

    A chunk may come after one that could not be written; it must then be refused.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
  """Which batches of a source a worker takes: each `num_shards`-th, from `shard_id` on."""

  shard_id: int = 0
  num_shards: int = 1

  def __post_init__(self) -> None:
    for name in ('num_shards', 'shard_id'):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f'{name} is {value!r}; expected a whole number.')
    if self.num_shards < 1:
      raise ConfigError(f'num_shards is {self.num_shards}; expected at least 1.')
    if not 0 <= self.shard_id < self.num_shards:
      raise ConfigError(f'shard_id is {self.shard_id}; with num_shards = {self.num_shards}, expected 0 to '
                        f'{self.num_shards - 1}.')


class _Reader:
  """Reads a worker's batches of a source; afterwards, `num_examples` is what the whole source has."""

  def __init__(self, source: data.ExampleSource, layout: partitioning.DataLayout, shard: Shard, first_batch: int,
               partitioner: partitioning.BasePartitioner):
    self._source = source
    self._layout = layout
    self._shard = shard
    self._first = first_batch * shard.num_shards + shard.shard_id
    self._partitioner = partitioner
    self.num_examples = 0

  def batches(self) -> Iterator[tuple[int, list[data.Example], dict[str, Array]]]:
    """Yields (number of the batch in the source, its examples, global arrays)."""
    size = self._layout.batch_size
    number = self._first * size
    batch, records = self._first, []
    for record in self._source.records(number):
      number += 1
      if batch % self._shard.num_shards == self._shard.shard_id:
        records.append(record)
      if number == (batch + 1) * size:
        if records:
          yield self._make(batch, records)
        batch, records = batch + 1, []
    if records:
      yield self._make(batch, records)
    if number > self._first * size:
      self.num_examples = number
    else:  # the source ends before there: this shard, or what is left of it, is empty
      self.num_examples = (self._source.num_examples if self._source.is_exact
                           else sum(1 for _ in self._source.records()))

  def _make(self, number, records):
    examples = [self._source.prepare(record) for record in records]
    own = self._partitioner.get_rows(self._layout.batch_size)
    rows = self._source.convert([examples[row] for row in own if row < len(examples)], len(own))
    spec = self._source.element_spec(self._layout.batch_size)
    return number, examples, data.to_global_arrays(rows, self._partitioner, spec)


def infer_source(
    source: data.ExampleSource,
    infer_fn: BatchInference,
    train_state: TrainState,
    *,
    partitioner: partitioning.BasePartitioner,
    batch_size: int,
    shard: Shard,
    first_batch: int,
    batches_per_chunk: int,
    write_fn: ChunkWriter,
    should_stop: Callable[[bool], bool] = lambda at_end_of_chunk: False,
    on_batch: Callable[[int], None] = lambda num_examples: None,
) -> int | None:
  """Works on a worker's batches of a source and hands the results on in chunks.

  Args:
    source: the examples.
    infer_fn: compiled for batches of the source.
    train_state: the state.
    partitioner: lays batches out over the mesh.
    batch_size: rows of a global batch.
    shard: which batches are the worker's.
    first_batch: number, within the shard, of the first batch to work on.
    batches_per_chunk: how many batches make a chunk; the last one may have fewer.
    write_fn: called in the background, while the devices work on.
    should_stop: asked after each batch, with whether a chunk ends there, if to stop. What was worked on is handed on
      before this function returns.
    on_batch: called with the number of examples of each batch that is done.

  Returns:
    The number of examples in the whole source; None if stopped.
  """
  reader = _Reader(source, partitioner.get_data_layout(batch_size), shard, first_batch, partitioner)
  chunk: list[tuple[list[data.Example], tuple[Any, PyTree]]] = []
  chunk_start = first_batch
  writes: collections.deque[concurrent.futures.Future] = collections.deque()
  stopped = False
  with (concurrent.futures.ThreadPoolExecutor(1, 't5x_lite-read') as read_pool,
        concurrent.futures.ThreadPoolExecutor(1, 't5x_lite-write') as write_pool):

    def hand_on():
      nonlocal chunk_start
      while len(writes) >= _NUM_AHEAD or (writes and writes[0].done()):
        writes.popleft().result()
      writes.append(write_pool.submit(write_fn, chunk_start, len(chunk), *_join(chunk)))
      chunk_start += len(chunk)
      chunk.clear()

    def take(waiting):
      examples, outputs = waiting
      chunk.append((examples, jax.tree.map(lambda rows: np.asarray(rows)[:len(examples)], jax.device_get(outputs))))
      on_batch(len(examples))
      if len(chunk) == batches_per_chunk:
        hand_on()

    def finish_writing():
      if chunk:
        hand_on()
      while writes:
        writes.popleft().result()

    try:
      waiting = None
      for number, examples, arrays in _ahead(reader.batches(), read_pool):
        outputs = infer_fn(train_state, arrays, number)
        if waiting is not None:
          take(waiting)
        waiting = examples, outputs
        if should_stop(len(chunk) + 1 == batches_per_chunk):
          stopped = True
          break
      if waiting is not None:
        take(waiting)
    except BaseException:
      with contextlib.suppress(Exception):
        finish_writing()  # what was worked on before an error is worth keeping
      raise
    finally:
      read_pool.shutdown(wait=True, cancel_futures=True)
    finish_writing()
  return None if stopped else reader.num_examples


def _ahead(iterator: Iterator[Any], pool: concurrent.futures.Executor) -> Iterator[Any]:
  """Yields what `iterator` does, of which the next items are being made in a thread meanwhile."""
  waiting = collections.deque(pool.submit(next, iterator, None) for _ in range(_NUM_AHEAD))
  while (item := waiting.popleft().result()) is not None:
    waiting.append(pool.submit(next, iterator, None))
    yield item


def _join(chunk: Sequence[tuple[list[data.Example], tuple[Any, PyTree]]]) -> tuple[list[data.Example], Inferences]:
  """Returns the examples and the results of the batches of a chunk as one."""
  examples = [example for batch, _ in chunk for example in batch]
  outputs = jax.tree.map(lambda *rows: np.concatenate(rows), *(outputs for _, outputs in chunk))
  return examples, outputs
