"""Examples of tables for inference, and the base class of sources that use our feature converters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x_lite.data.batches.features import FeatureConverter
from t5x_lite.data.batches.features import Row
from t5x_lite.data.batches.trimming import TrimmedExamples
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import Example
from t5x_lite.data.interfaces import ExampleSource
from t5x_lite.data.interfaces import HostBatch

# Field of an example with those fields of its record that results keep.
KEPT_FIELDS = '_kept_fields'


class ConvertedSource(ExampleSource):
  """Base of sources whose rows are made by one of our feature converters."""

  def __init__(self, converter: FeatureConverter, lengths: Mapping[str, int]):
    """Args:
    converter: feature converter of the model.
    lengths: task feature name to length.
    """
    self._converter = converter
    self._lengths = dict(lengths)

  def element_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
    return self._converter.element_spec(self._lengths, batch_size, False)

  def convert(self, examples: Sequence[Example], num_rows: int) -> HostBatch:
    """See base class."""
    rows: list[Row] = [(example.row,) for example in examples]
    rows += [()] * (num_rows - len(examples))
    return self._converter.convert(rows, self._lengths, False)


class TableExamples(ConvertedSource):
  """Source of the examples of a table."""

  def __init__(
    self, cfg: DatasetConfig, name: str, table: TrimmedExamples, converter: FeatureConverter
  ):
    """Args:
    cfg: options of the dataset.
    name: name of the task.
    table: examples of the task.
    converter: feature converter of the model.
    """
    super().__init__(converter, cfg.known_lengths)
    self.name = name
    self.num_examples = len(table)
    self.num_skipped = table.num_skipped
    self.identity = {**task_identity(cfg, name), 'content': [len(table), table.fingerprint]}
    self._cfg = cfg
    self._table = table

  def records(self, first: int = 0) -> Iterator[int]:
    """See base class."""
    return iter(range(first, len(self._table)))

  def prepare(self, record: int) -> Example:
    """See base class."""
    (found,) = self._table.whole.examples(self._cfg.effective_seed, np.array([record]))
    row = self._table.trim(found)
    texts = self._table.texts(record, self._cfg.effective_seed)
    if kept := self._table.record(record):
      texts[KEPT_FIELDS] = kept
    is_cut = any(len(found[name]) > len(row[name]) for name in row)
    return Example({**row, **texts}, row, is_cut)


def task_identity(cfg: DatasetConfig, name: str) -> dict[str, Any]:
  """Return the options that determine the examples of the task `name`."""
  return {
    'source': cfg.source,
    'task': name,
    'split': cfg.split,
    'seed': cfg.effective_seed,
    'task_feature_lengths': dict(sorted(cfg.known_lengths.items())),
    'use_cached': cfg.use_cached,
  }
