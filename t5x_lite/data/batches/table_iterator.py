"""Iterator of the sources without TensorFlow, on any number of processes.

`streams` defines the order of the examples; consecutive rows are a global batch, of which each process uses its rows.
All batches are functions of the configuration, so a saved position is a few integers, and the number of processes may
change between runs.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import logging
from typing import Any

import jax
import numpy as np

from t5x_lite.data.batches import positions
from t5x_lite.data.batches.features import FeatureConverter
from t5x_lite.data.batches.streams import DirectReader
from t5x_lite.data.batches.streams import MixtureStream
from t5x_lite.data.batches.streams import PieceReader
from t5x_lite.data.batches.streams import Pieces
from t5x_lite.data.batches.streams import Stream
from t5x_lite.data.batches.streams import TaskStream
from t5x_lite.data.batches.trimming import TrimmedExamples
from t5x_lite.data.batches.truncation import Truncation
from t5x_lite.data.batches.truncation import sample_truncation
from t5x_lite.data.builtin_tasks import ExampleTable
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import DataState
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.interfaces import HostIterator

# Examples that are read together for the sample of trimmed ids.
_NUM_READ = 16
# Position of the next row: (position, 0) without packing, (group, row in the group) with packing.
_Cursor = tuple[int, int]
_logger = logging.getLogger(__name__)


class TableIterator(HostIterator):
  """Iterator of batches of one or several tables, which are mixed in proportion to rates."""

  has_cheap_state = True
  ends_together = True
  handles_process_count = True

  def __init__(
    self,
    cfg: DatasetConfig,
    layout: Any,
    tables: Mapping[str, TrimmedExamples],
    rates: Sequence[float],
    converter: FeatureConverter,
    converter_name: str,
    open_reader_fn: Callable[[Pieces], PieceReader] = DirectReader,
  ):
    """Args:
      cfg: options of the dataset.
      layout: the partitioner's `DataLayout`.
      tables: name of a task to its examples.
      rates: a positive number for each table.
      converter: feature converter of the model.
      converter_name: name of the converter, a part of the position's identity.
      open_reader_fn: function that makes the reader of the pieces of batches.

    Raises:
      ConfigError: the batch size is not a multiple of the number of processes, or a rate is too small.
    """
    self._converter = converter
    self._lengths = dict(cfg.known_lengths)
    self._pack = cfg.pack
    self.is_endless = cfg.num_epochs is None
    self._trims = cfg.trim_output_features
    self._batch_size = layout.batch_size
    self._own = positions.shard_rows(layout)

    self._cfg = cfg
    self._rates = rates
    self._open_reader = open_reader_fn
    self._open(tables)
    self._cursor: _Cursor = (0, 0)
    self._num_batches = 0
    self._past_cursors: collections.deque[_Cursor] = collections.deque(
      maxlen=positions.MAX_UNDELIVERED
    )
    # All options that determine the rows, without the batch size and the number of processes.
    self._identity = {
      'source': cfg.source,
      'mixture_or_task_name': cfg.name,
      'split': cfg.split,
      'task_feature_lengths': dict(sorted(self._lengths.items())),
      'seed': cfg.effective_seed,
      'shuffle': cfg.shuffle,
      'pack': cfg.pack,
      'trim_output_features': cfg.trim_output_features,
      'feature_converter': converter_name,
      'rates': list(rates),
      'content': _content(tables),
    }

  def _open(self, tables: Mapping[str, TrimmedExamples]) -> None:
    """Read the examples of `tables`."""
    self._tables = tables
    self._whole_stream = self._make_stream({name: table.whole for name, table in tables.items()})
    stream = self._make_stream(tables)
    self._pieces = Pieces(stream, self._converter, self._cfg, self._own)
    self._reader = self._open_reader(self._pieces)

  def _make_stream(self, tables: Mapping[str, ExampleTable]) -> Stream:
    """Return the endless sequence of the examples of `tables`, mixed if there are several."""
    cfg = self._cfg
    streams = [
      TaskStream(name, table, cfg.effective_seed, cfg.shuffle) for name, table in tables.items()
    ]
    if len(streams) == 1:
      return streams[0]
    return MixtureStream(cfg.name, streams, self._rates, cfg.effective_seed)

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
    return self._converter.element_spec(self._lengths, self._batch_size, self._pack)

  def sample_truncation(self) -> Truncation | None:
    """See base class; the sample is the first examples."""
    if not self._trims:
      return None
    found = sample_truncation(self._whole_examples(), self._lengths)
    num_skipped = sum(table.num_skipped for table in self._tables.values())
    return found and dataclasses.replace(found, num_skipped=num_skipped)

  def _whole_examples(self) -> Iterator[Mapping[str, np.ndarray]]:
    for first in itertools.count(step=_NUM_READ):
      yield from self._whole_stream.examples(np.arange(first, first + _NUM_READ))

  def __next__(self) -> HostBatch:
    if self._pack:
      batch, after = self._read_packed(self._cursor)
    else:
      batch, after = self._read(self._cursor)
    self._past_cursors.append(self._cursor)
    self._cursor = after
    self._num_batches += 1
    return batch

  def _read(self, cursor: _Cursor) -> tuple[HostBatch, _Cursor]:
    """Return this process's rows of the batch at `cursor`, and the cursor after it."""
    return self._read_piece(cursor[0]), (cursor[0] + self._batch_size, 0)

  def _read_piece(self, number: int) -> HostBatch:
    if not self._pieces.num_from(number):
      raise StopIteration
    return self._reader.read(number)

  def _read_packed(self, cursor: _Cursor) -> tuple[HostBatch, _Cursor]:
    """Return the same as `_read`, from the rows of one or several groups."""
    group, offset = cursor
    parts: list[HostBatch] = []
    num_missing = self._batch_size
    while num_missing:
      rows = self._read_piece(group)
      part = {name: array[offset : offset + num_missing] for name, array in rows.items()}
      num_taken = len(next(iter(part.values())))
      num_rows = len(next(iter(rows.values())))
      parts.append(part)
      num_missing -= num_taken
      offset += num_taken
      if offset == num_rows:
        group += 1
        offset = 0
    batch = {}
    for name in parts[0]:
      batch[name] = np.concatenate([part[name] for part in parts])[self._own]
    return batch, (group, offset)

  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    """See base class."""
    num = len(undelivered)
    cursor = self._cursor
    if num:
      cursor = self._past_cursors[-num]
    return positions.write_state(
      self._identity, cursor=list(cursor), num_batches=self._num_batches - num
    )

  def set_state(self, state: DataState) -> None:
    """See base class."""
    saved = positions.read_state(state)
    self._keep_ids(saved['identity'].get('content', {}))
    positions.check_identity(saved['identity'], self._identity)
    self._cursor = (saved['cursor'][0], saved['cursor'][1])
    self._num_batches = saved['num_batches']
    self._past_cursors.clear()

  def _keep_ids(self, saved: Mapping[str, Any]) -> None:
    """Open the tables with the ids of earlier versions if the position with this content was saved in them."""
    kept = {}
    for name, table in self._tables.items():
      kept[name] = table
      if saved.get(name) == _content({name: table})[name] or table.earlier is None:
        continue
      if saved.get(name) == _content({name: table.earlier})[name]:
        log_earlier_sentinels(name)
        kept[name] = table.earlier
    if any(kept[name] is not table for name, table in self._tables.items()):
      self._reader.close()
      self._open(kept)
      self._identity['content'] = _content(kept)

  def close(self) -> None:
    """See base class."""
    self._reader.close()


def _content(tables: Mapping[str, ExampleTable]) -> dict[str, list[Any]]:
  """Return [number of examples, hash] of each table, as JSON values."""
  return {name: [len(table), table.fingerprint] for name, table in tables.items()}


@functools.cache
def log_earlier_sentinels(name: str) -> None:
  """Warn once that a task keeps the ids of earlier versions.

  Args:
    name: name of the task.
  """
  _logger.warning(
    'Sentinels such as <extra_id_0> and added tokens in the texts of %r keep the ids of the earlier version of '
    't5x_lite that recorded the run, not one id each as in new runs (DatasetConfig.earlier_sentinels).',
    name,
  )
