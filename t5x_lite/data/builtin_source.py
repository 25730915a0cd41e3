"""The iterator of the sources without TensorFlow: any batch by its number, on any number of processes.

`streams` says which example stands where; here consecutive rows make a global batch, of which each process keeps its
own. All of it is a function of the configuration, so a saved position is a few integers, and the number of processes
may change between runs.
"""

import collections
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x_lite.data.builtin_tasks import BuiltinMixture, BuiltinTask, ExampleTable, get_builtin
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.features import FeatureConverter, Row, get_converter
from t5x_lite.data.interfaces import DataState, HostBatch, HostIterator
from t5x_lite.data.streams import DirectReader, MixtureStream, PieceReader, Pieces, Stream, TaskStream
from t5x_lite.data.synthetic import StackConverter, SyntheticExamples, get_synthetic
from t5x_lite.data.trimming import TrimmedExamples
from t5x_lite.data.truncation import Truncation, sample_truncation
from t5x_lite.errors import ConfigError, DataError

STATE_FILE = 'data_state.json'
# The most batches that may wait between this iterator and whoever uses them.
MAX_UNDELIVERED = 64
# Examples that are read at a time to see how much of them is cut.
_NUM_READ = 16
# A run that goes on in its MODEL_DIR always takes its data position.
RESTART_REMEDY = ('start another run from this checkpoint: another MODEL_DIR, with RestoreCheckpointConfig.path naming '
                  'it and restore_dataset = False')


def shard_rows(layout: Any) -> slice:
  """Returns which rows of a global batch are this process's.

  Raises:
    ConfigError: the batch does not divide.
  """
  if layout.batch_size % layout.num_shards:
    raise ConfigError(f'The batch size {layout.batch_size} does not divide over {layout.num_shards} data shards: '
                      f'choose a multiple of {layout.num_shards}.')
  per_shard = layout.batch_size // layout.num_shards
  return slice(layout.shard_id * per_shard, (layout.shard_id + 1) * per_shard)


# Where the next row comes from: (position, 0) unpacked, (group, row within the group) packed.
_Cursor = tuple[int, int]


class BuiltinIterator(HostIterator):
  """Batches of a task of ours, a mixture of them, or synthetic data."""

  has_cheap_state = True

  def __init__(self, cfg: DatasetConfig, layout: Any, feature_converter: str,
               open_reader_fn: Callable[[Pieces], PieceReader] = DirectReader):
    """Args:
      cfg: what to read, with any source but 'seqio'.
      layout: the partitioner's `DataLayout`.
      feature_converter: the converter's name.
      open_reader_fn: makes what gives the pieces that batches are put together from.

    Raises:
      ConfigError, DataError: see `resolve`.
    """
    self._converter, tables, rates = resolve(cfg, feature_converter)
    self._lengths = dict(cfg.task_feature_lengths)
    self._pack = cfg.pack
    self._trims = cfg.trim_output_features
    self._batch_size = layout.batch_size
    self._own = shard_rows(layout)

    def stream_of(tables: Mapping[str, ExampleTable]) -> Stream:
      streams = [TaskStream(name, table, cfg.effective_seed, cfg.shuffle) for name, table in tables.items()]
      return streams[0] if len(streams) == 1 else MixtureStream(cfg.name, streams, rates, cfg.effective_seed)

    stream = stream_of(tables)
    self._whole_stream = stream_of({name: table.whole for name, table in tables.items()})
    self._reader = open_reader_fn(Pieces(stream, self._converter, cfg, self._own))
    self._cursor: _Cursor = (0, 0)
    self._num_batches = 0
    self._past_cursors: collections.deque[_Cursor] = collections.deque(maxlen=MAX_UNDELIVERED)
    # Everything that decides which rows come, and nothing else: neither the batch size nor the number of processes.
    self._identity = {
        'source': cfg.source, 'mixture_or_task_name': cfg.name, 'split': cfg.split,
        'task_feature_lengths': dict(sorted(self._lengths.items())), 'seed': cfg.effective_seed, 'shuffle': cfg.shuffle,
        'pack': cfg.pack, 'trim_output_features': cfg.trim_output_features, 'feature_converter': feature_converter,
        'rates': list(rates), 'content': {name: [len(table), table.fingerprint] for name, table in tables.items()}}

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return self._converter.element_spec(self._lengths, self._batch_size, self._pack)

  def sample_truncation(self) -> Truncation | None:
    """See base class; of the examples that come first."""
    if not self._trims:
      return None
    positions = (np.arange(first, first + _NUM_READ) for first in itertools.count(step=_NUM_READ))
    return sample_truncation(
        itertools.chain.from_iterable(map(self._whole_stream.examples, positions)), self._lengths)

  def __next__(self) -> HostBatch:
    batch, after = self._read_packed(self._cursor) if self._pack else self._read(self._cursor)
    self._past_cursors.append(self._cursor)
    self._cursor = after
    self._num_batches += 1
    return batch

  def _read(self, cursor: _Cursor) -> tuple[HostBatch, _Cursor]:
    """Returns this process's rows of the batch at `cursor`, and the cursor after it."""
    return self._reader.read(cursor[0]), (cursor[0] + self._batch_size, 0)

  def _read_packed(self, cursor: _Cursor) -> tuple[HostBatch, _Cursor]:
    """Returns the same as `_read`, put together from as many groups as it takes."""
    group, offset = cursor
    parts: list[HostBatch] = []
    num_missing = self._batch_size
    while num_missing:
      rows = self._reader.read(group)
      part = {name: array[offset:offset + num_missing] for name, array in rows.items()}
      num_taken, num_rows = (len(next(iter(features.values()))) for features in (part, rows))
      parts.append(part)
      num_missing -= num_taken
      group, offset = (group + 1, 0) if offset + num_taken == num_rows else (group, offset + num_taken)
    return {name: np.concatenate([part[name] for part in parts])[self._own] for name in parts[0]}, (group, offset)

  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    num = len(undelivered)
    if num > len(self._past_cursors):
      raise ValueError(f'{num} undelivered batches, expected at most the {len(self._past_cursors)} last ones yielded.')
    cursor = self._past_cursors[-num] if num else self._cursor
    state = {'version': 1, 'identity': self._identity, 'cursor': list(cursor), 'num_batches': self._num_batches - num}
    return {STATE_FILE: json.dumps(state, indent=1).encode('utf-8')}

  def set_state(self, state: DataState) -> None:
    saved = read_state(state)
    check_identity(saved['identity'], self._identity)
    self._cursor = (saved['cursor'][0], saved['cursor'][1])
    self._num_batches = saved['num_batches']
    self._past_cursors.clear()

  def close(self) -> None:
    self._reader.close()


def read_state(state: DataState) -> dict[str, Any]:
  """Returns the decoded `STATE_FILE` of a saved position.

  Raises:
    DataError: there is none, or it was written by a later version.
  """
  if STATE_FILE not in state:
    raise DataError(f'The saved data position has no {STATE_FILE!r}, only {sorted(state)}: {RESTART_REMEDY}.')
  decoded = json.loads(state[STATE_FILE])
  if decoded['version'] != 1:
    raise DataError(f"The saved data position has version {decoded['version']}, expected 1: it was written by a later "
                    f'version of this package. Update it, or {RESTART_REMEDY}.')
  return decoded


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Refuses to go on at a position of other data.

  Raises:
    DataError: naming each difference.
  """
  now = json.loads(json.dumps(now))
  differences = [f'{key}: saved {saved.get(key)!r}, now {now.get(key)!r}'
                 for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
  if differences:
    raise DataError('The checkpoint holds a position in other data than this run reads (' + '; '.join(differences) +
                    f'). Resume with the same data configuration, or {RESTART_REMEDY}.')


def resolve(cfg: DatasetConfig,
            feature_converter: Any) -> tuple[FeatureConverter, dict[str, TrimmedExamples], list[float]]:
  """Returns the converter, the tables by task name, and the mixture's rates (of one task: [1.0]).

  Raises:
    ConfigError: unknown converter; missing or unknown feature length; options that exclude each other.
    DataError: unknown task, mixture or split; an empty split.
  """
  cfg.import_module()
  lengths = cfg.task_feature_lengths
  if cfg.source == 'synthetic':
    source = get_synthetic(cfg.mixture_or_task_name)
    if source.features:
      if lengths or cfg.pack:
        raise ConfigError('A SyntheticSource with features of its own takes task_feature_lengths = {} and pack = '
                          f'False, got task_feature_lengths = {dict(lengths)} and pack = {cfg.pack}.')
      converter: FeatureConverter = StackConverter(source.features)
    else:
      converter = get_converter(feature_converter)
      converter.check(lengths, (*converter.TASK_FEATURES, *converter.OPTIONAL_TASK_FEATURES), source.name)
    return converter, {source.name: _trimmed(SyntheticExamples(source, cfg.split, lengths), cfg)}, [1.0]
  task_or_mixture = get_builtin(cfg.mixture_or_task_name)
  converter = get_converter(feature_converter)
  tasks = task_or_mixture.tasks if isinstance(task_or_mixture, BuiltinMixture) else [task_or_mixture]
  rates = list(task_or_mixture.rates.values()) if isinstance(task_or_mixture, BuiltinMixture) else [1.0]
  for task in tasks:
    converter.check(lengths, list(task.vocabularies), task.name)
  return converter, {task.name: _trimmed(task.table(cfg.split, lengths), cfg) for task in tasks}, rates


def _trimmed(table: ExampleTable, cfg: DatasetConfig) -> TrimmedExamples:
  return TrimmedExamples(table, cfg.task_feature_lengths, cfg.trim_output_features)


def tasks_of(cfg: DatasetConfig) -> list[BuiltinTask]:
  """Returns the task that `cfg` names, or the tasks of its mixture."""
  cfg.import_module()
  task_or_mixture = get_builtin(cfg.mixture_or_task_name)
  return task_or_mixture.tasks if isinstance(task_or_mixture, BuiltinMixture) else [task_or_mixture]


def eval_examples(cfg: DatasetConfig, name: str, table: ExampleTable,
                  limit: int | None) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
  """Returns (numbers, trimmed examples) of one epoch of `table`, at most `limit`, in the order that `cfg` asks for."""
  count = len(table) if limit is None else min(limit, len(table))
  numbers = TaskStream(name, table, cfg.effective_seed, cfg.shuffle).numbers(np.arange(count))
  examples = table.examples(cfg.effective_seed, numbers)
  return numbers, examples


def eval_rows(cfg: DatasetConfig, examples: Sequence[Mapping[str, np.ndarray]],
              converter: FeatureConverter) -> list[Row]:
  """Returns the rows of a finite evaluation: packed by groups if `cfg` says so, else one example each."""
  if not cfg.pack:
    return [(example,) for example in examples]
  size = converter.pack_group_size(cfg.task_feature_lengths)
  return [row for start in range(0, len(examples), size)
          for row in converter.pack(examples[start:start + size], cfg.task_feature_lengths)]
