"""The examples of seqio Tasks for inference, read as a stream since their number is unknown; and their texts."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from t5x_lite.data import seqio_features
from t5x_lite.data import seqio_tfexample
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.example_sources import task_identity
from t5x_lite.data.features import check_features
from t5x_lite.data.interfaces import Example, ExampleSource, HostBatch
from t5x_lite.data.seqio_import import quiet, summary, tf
from t5x_lite.data.seqio_source import convert, task_dataset
from t5x_lite.errors import DataError


def open_example_sources(cfg: DatasetConfig, feature_converter: Any) -> list[ExampleSource]:
  """Returns the examples of a Task, or of each Task of a Mixture that has the split.

  Raises:
    ConfigError, DataError: see `DataSource`.
  """
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  return [_SeqioSource(cfg, task, seqio_features.get_converter(cfg, feature_converter, task))
          for task in seqio_features.subtasks_with_split(provider, cfg.split)]


class _SeqioSource(ExampleSource):
  """A Task's examples, each beside the model features that seqio's converter makes of it."""

  is_exact = False

  def __init__(self, cfg: DatasetConfig, task: Any, converter: Any):
    self.name = task.name
    self.has_targets = not seqio_tfexample.lacks_targets(task.name)
    self._description = f'The split {cfg.split!r} of {task.name!r}'
    examples = task_dataset(task, cfg, num_epochs=1)
    rows = convert(converter, examples, cfg, task)
    # Two passes over the task in step: a converter drops what it does not know, texts among it.
    self._dataset = tf.data.Dataset.zip((examples, rows))
    self._spec = {name: (tuple(spec.shape), spec.dtype.as_numpy_dtype) for name, spec in rows.element_spec.items()}
    with quiet():
      self.num_examples = task.num_input_examples(cfg.split)
    first = next(self.records(), None)
    if first is None:
      raise DataError(f'{self._description} is empty: it gave no example.')
    self.identity = {**task_identity(cfg, task.name), 'first_example': _fingerprint(self.prepare(first))}

  def records(self, first: int = 0) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    iterator = self._dataset.skip(first).as_numpy_iterator()
    for number in itertools.count(first):
      try:
        record = next(iterator, None)
      except tf.errors.OpError as error:
        raise DataError(f'{self._description} failed while reading example {number}: {summary(error)}') from error
      if record is None:
        return
      yield record

  def prepare(self, record: tuple[dict[str, Any], dict[str, np.ndarray]]) -> Example:
    fields, row = record
    return Example({name: value.decode('utf-8', errors='replace') if isinstance(value, bytes) else value
                    for name, value in fields.items()}, row)

  def element_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((batch_size, *shape), dtype) for name, (shape, dtype) in self._spec.items()}

  def convert(self, examples: Sequence[Example], num_rows: int) -> HostBatch:
    batch = {name: np.zeros((num_rows, *shape), dtype) for name, (shape, dtype) in self._spec.items()}
    for name, array in batch.items():
      for i, example in enumerate(examples):
        array[i] = example.row[name]
    return batch


def _fingerprint(example: Example) -> str:
  """Returns a hash of an example's row."""
  digest = hashlib.sha256()
  for name, array in sorted(example.row.items()):
    digest.update(f'{name} {array.shape} {array.dtype}'.encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()[:16]


def read_task_texts(cfg: DatasetConfig, max_examples: int | None) -> dict[str, list[str]]:
  """See `DataSource.read_task_texts`."""
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  check_features(cfg.task_feature_lengths, provider.name, list(provider.output_features))
  texts: dict[str, list[str]] = {feature: [] for feature in cfg.task_feature_lengths}
  for task in seqio_features.subtasks_with_split(provider, cfg.split):
    dataset = task_dataset(task, cfg, num_epochs=1).take(-1 if max_examples is None else max_examples)
    try:
      with quiet():
        examples = list(dataset.as_numpy_iterator())
    except tf.errors.OpError as error:
      raise DataError(f'The split {cfg.split!r} of {task.name!r} failed while reading: {summary(error)}') from error
    for feature, found in texts.items():
      vocabulary = task.output_features[feature].vocabulary
      for example in examples:
        text = example.get(f'{feature}_pretokenized')
        if text is None:
          text = vocabulary.decode([int(i) for i in example[feature]])
        found.append(text.decode('utf-8', errors='replace') if isinstance(text, bytes) else str(text))
  return texts
