"""What inference reads: every example of a source once, in the source's order, one after another.

A pass may be started anywhere, and what is passed over is not tokenized, so that a stopped run goes on cheaply and
several workers can share a source.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x_lite.data import builtin_source
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.features import FeatureConverter
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Example:
  """One example, ready for a batch.

  Attributes:
    fields: what may be shown of it: texts (`inputs_pretokenized`), ids, and what else the source has of it.
    row: what `ExampleSource.convert` makes a row of.
    is_cut: whether its inputs or targets were longer than the model reads.
  """

  fields: Mapping[str, Any]
  row: Mapping[str, np.ndarray]
  is_cut: bool = False


class ExampleSource(abc.ABC):
  """A finite sequence of examples that can be gone through again and again.

  Attributes:
    name: names the files of results.
    identity: everything that decides which examples come, in which order; fit for JSON.
    num_examples: how many there are, None where that is known only at the end.
    is_exact: whether `num_examples` is a count rather than an estimate.
    num_skipped: how many entries of the source are no examples and are left out.
    has_targets: whether there are targets that could be scored.
  """

  name: str
  identity: dict[str, Any]
  num_examples: int | None
  is_exact: bool = True
  num_skipped: int = 0
  has_targets: bool = True

  @abc.abstractmethod
  def records(self, first: int = 0) -> Iterator[Any]:
    """Yields the examples from number `first` on, in a raw form that costs little."""

  @abc.abstractmethod
  def prepare(self, record: Any) -> Example:
    """Returns the example that `records` yielded; here is where tokenization takes place."""

  @abc.abstractmethod
  def element_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns model feature name to the shape and dtype of a batch."""

  @abc.abstractmethod
  def convert(self, examples: Sequence[Example], num_rows: int) -> HostBatch:
    """Returns a batch of `num_rows` rows, of which the first hold `examples` and the others zeros."""

  def close(self) -> None:
    """Frees files. The source cannot be used afterwards."""


class ConvertedSource(ExampleSource):
  """A source whose rows are made by one of our feature converters."""

  def __init__(self, converter: FeatureConverter, lengths: Mapping[str, int]):
    """Args:
      converter: makes model features.
      lengths: task feature name to length.
    """
    self._converter = converter
    self._lengths = dict(lengths)

  def element_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    return self._converter.element_spec(self._lengths, batch_size, False)

  def convert(self, examples: Sequence[Example], num_rows: int) -> HostBatch:
    rows = [(example.row,) for example in examples] + [()] * (num_rows - len(examples))
    return self._converter.convert(rows, self._lengths, False)


class _TableSource(ConvertedSource):
  """The examples of a task that needs no TensorFlow (sources 'builtin', 'grain' and 'synthetic')."""

  def __init__(self, cfg: DatasetConfig, name: str, table: Any, converter: FeatureConverter):
    super().__init__(converter, cfg.task_feature_lengths)
    self.name = name
    self.num_examples = len(table)
    self.identity = {**task_identity(cfg, name), 'content': [len(table), table.fingerprint]}
    self._cfg = cfg
    self._table = table

  def records(self, first: int = 0) -> Iterator[int]:
    return iter(range(first, len(self._table)))

  def prepare(self, record: int) -> Example:
    (found,) = self._table.whole.examples(self._cfg.effective_seed, np.array([record]))
    row = self._table.trim(found)
    texts = self._table.texts(record, self._cfg.effective_seed)
    return Example({**row, **texts}, row, any(len(found[name]) > len(row[name]) for name in row))


def task_identity(cfg: DatasetConfig, name: str) -> dict[str, Any]:
  """Returns what a configuration says of the examples of its task `name`."""
  return {'source': cfg.source, 'task': name, 'split': cfg.split, 'seed': cfg.effective_seed,
          'task_feature_lengths': dict(sorted(cfg.task_feature_lengths.items())), 'use_cached': cfg.use_cached}


def fingerprint(example: Example) -> str:
  """Returns a hash of an example's row."""
  digest = hashlib.sha256()
  for name, array in sorted(example.row.items()):
    digest.update(f'{name} {array.shape} {array.dtype}'.encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()[:16]


def open_example_sources(cfg: Any, model: Any, *, needs_targets: bool = False) -> list[ExampleSource]:
  """Returns the examples of a task, of each task of a mixture that has the split, or of a file of texts.

  Args:
    cfg: a `TextFileConfig`, or a `DatasetConfig` that is neither shuffled nor packed.
    model: the model that will read them, with `FEATURE_CONVERTER` and, for texts, its vocabularies.
    needs_targets: whether inference is of no use without targets, as when they are scored.

  Raises:
    ConfigError: options that inference cannot honour, or that do not fit the model.
    DataError: unknown task, mixture or split, or a split without examples.
  """
  if not isinstance(cfg, DatasetConfig):
    from t5x_lite.data import text_sources
    return [text_sources.TextSource(cfg, model.FEATURE_CONVERTER, model.input_vocabulary, model.output_vocabulary,
                                    needs_targets=needs_targets)]
  for option, why in (('shuffle', 'results are written in the order of the source'), ('pack', 'a row is one example')):
    if getattr(cfg, option):
      raise ConfigError(f'DatasetConfig.{option} is True, but in inference {why}: set it to False.')
  if cfg.source == 'seqio':
    from t5x_lite.data import seqio_inference
    sources: list[ExampleSource] = seqio_inference.open_sources(cfg, model.FEATURE_CONVERTER)
  else:
    converter, tables, _ = builtin_source.resolve(cfg, model.FEATURE_CONVERTER)
    sources = [_TableSource(cfg, name, table, converter) for name, table in tables.items()]
  for source in sources:
    if needs_targets and not source.has_targets:
      raise ConfigError(f'Scoring needs targets, and {source.name!r} has none: set '
                        'create_task_from_tfexample_file.targets_key, or choose another mode.')
  return sources
