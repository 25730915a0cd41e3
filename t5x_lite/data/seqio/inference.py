"""Examples of seqio Tasks for inference, read as a stream since their number is unknown, and their texts."""

from collections.abc import Iterator, Sequence
import hashlib
import itertools
from typing import Any

import jax
import numpy as np

from t5x_lite.data.batches.features import check_lengths
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import Example
from t5x_lite.data.interfaces import ExampleSource
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.seqio import features as seqio_features
from t5x_lite.data.seqio import tfexample as seqio_tfexample
from t5x_lite.data.seqio.packages import as_text
from t5x_lite.data.seqio.packages import element_specs
from t5x_lite.data.seqio.packages import numpy_elements
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import reading
from t5x_lite.data.seqio.packages import tf
from t5x_lite.data.seqio.source import convert
from t5x_lite.data.seqio.source import task_dataset
from t5x_lite.data.sources.example_sources import task_identity


def open_example_sources(cfg: DatasetConfig, feature_converter: Any) -> list[ExampleSource]:
  """Return the examples of a Task, or of each Task of a Mixture that has the split.

  Raises:
    ConfigError, DataError: see `DataSource`.
  """
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  return [
    _SeqioSource(cfg, task, seqio_features.get_converter(cfg, feature_converter, task))
    for task in seqio_features.subtasks_with_split(provider, cfg.split)
  ]


class _SeqioSource(ExampleSource):
  """Source of a Task's examples, each with its model features from seqio's converter."""

  is_exact = False

  def __init__(self, cfg: DatasetConfig, task: Any, converter: Any):
    self.name = task.name
    self.has_targets = not seqio_tfexample.lacks_targets(task.name)
    self._cfg = cfg
    self._task = task
    examples = task_dataset(task, cfg, num_epochs=1)
    rows = convert(converter, examples, cfg, task)
    # Read the task twice in parallel, since a converter drops texts and other unknown fields.
    self._dataset = tf.data.Dataset.zip((examples, rows))
    self._spec = {
      name: (tuple(spec.shape), spec.dtype.as_numpy_dtype)
      for name, spec in element_specs(rows).items()
    }
    with quiet():
      self.num_examples = task.num_input_examples(cfg.split)
    first = next(self.records(), None)
    first = check_not_empty(first, cfg.split, task.name)
    self.identity = {
      **task_identity(cfg, task.name),
      'first_example': _fingerprint(self.prepare(first)),
    }

  def records(self, first: int = 0) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    iterator = numpy_elements(self._dataset.skip(first))
    for number in itertools.count(first):
      with reading(self._cfg, self._task, f' example {number}'):
        record = next(iterator, None)
      if record is None:
        return
      yield record

  def prepare(self, record: tuple[dict[str, Any], dict[str, np.ndarray]]) -> Example:
    fields, row = record
    return Example({name: as_text(value) for name, value in fields.items()}, row)

  def element_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
      name: jax.ShapeDtypeStruct((batch_size, *shape), dtype)
      for name, (shape, dtype) in self._spec.items()
    }

  def convert(self, examples: Sequence[Example], num_rows: int) -> HostBatch:
    batch = {
      name: np.zeros((num_rows, *shape), dtype) for name, (shape, dtype) in self._spec.items()
    }
    for name, array in batch.items():
      for i, example in enumerate(examples):
        array[i] = example.row[name]
    return batch


def _fingerprint(example: Example) -> str:
  """Return a hash of an example's row."""
  digest = hashlib.sha256()
  for name, array in sorted(example.row.items()):
    digest.update(f'{name} {array.shape} {array.dtype}'.encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()[:16]


def read_task_texts(cfg: DatasetConfig, max_examples: int | None) -> dict[str, list[str]]:
  """See `DataSource.read_task_texts`."""
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  check_lengths(cfg.known_lengths, list(provider.output_features), provider.name)
  texts: dict[str, list[str]] = {feature: [] for feature in cfg.known_lengths}
  for task in seqio_features.subtasks_with_split(provider, cfg.split):
    dataset = task_dataset(task, cfg, num_epochs=1)
    if max_examples is not None:
      dataset = dataset.take(max_examples)
    with reading(cfg, task):
      examples = list(numpy_elements(dataset))
    for feature, found in texts.items():
      vocabulary = task.output_features[feature].vocabulary
      for example in examples:
        text = example.get(f'{feature}_pretokenized')
        if text is None:
          text = vocabulary.decode([int(i) for i in example[feature]])
        found.append(str(as_text(text)))
  return texts
