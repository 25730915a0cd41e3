"""From task features to model features in NumPy: trimming, padding, packing, shifting. seqio's converters do the same.

A model names its converter (`FEATURE_CONVERTER = 'encoder_decoder'`); a source finds it here, or among seqio's.
"""

import abc
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from t5x_lite.data.interfaces import HostBatch
from t5x_lite.errors import ConfigError, DataError, did_you_mean

# A row of a batch before conversion: the examples that share it, in order.
Row = Sequence[Mapping[str, np.ndarray]]


def trim(example: Mapping[str, np.ndarray], lengths: Mapping[str, int],
         trim_output_features: bool) -> dict[str, np.ndarray]:
  """Returns the features of `example` that `lengths` names, cut to their lengths.

  Raises:
    DataError: one is longer and `trim_output_features` is False.
  """
  for feature, length in lengths.items():
    if not trim_output_features and len(example[feature]) > length:
      raise DataError(
          f'An example has {len(example[feature])} ids of {feature!r}, expected at most {length}: raise '
          f"task_feature_lengths['{feature}'], or set trim_output_features = True.")
  return {feature: example[feature][:length] for feature, length in lengths.items()}


def pack_group(examples: Sequence[Mapping[str, np.ndarray]], lengths: Mapping[str, int]) -> list[Row]:
  """Distributes examples over rows, in order: a row is closed when the next example does not fit in every feature.

  Args:
    examples: trimmed examples.
    lengths: task feature name to the length of a row.
  """
  rows: list[list[Mapping[str, np.ndarray]]] = []
  used = dict.fromkeys(lengths, 0)
  for example in examples:
    if not rows or any(used[feature] + len(example[feature]) > length for feature, length in lengths.items()):
      rows.append([])
      used = dict.fromkeys(lengths, 0)
    rows[-1].append(example)
    for feature in lengths:
      used[feature] += len(example[feature])
  return rows


class FeatureConverter(abc.ABC):
  """Turns rows of task features into a batch of model features."""

  # The task features that are read, all required.
  TASK_FEATURES: tuple[str, ...]

  def check(self, lengths: Mapping[str, int], task_features: Sequence[str], task_name: str) -> None:
    """Refuses lengths for unknown features, missing lengths, and tasks without the features that the model reads.

    Raises:
      ConfigError: naming the feature.
    """
    for feature in self.TASK_FEATURES:
      if feature not in task_features:
        raise ConfigError(f'The model reads the task feature {feature!r}, but {task_name!r} has only: '
                          f'{", ".join(sorted(task_features))}.')
      if feature not in lengths:
        raise ConfigError(f'task_feature_lengths has no length for {feature!r}, got lengths for: '
                          f"{', '.join(sorted(lengths))}. Add '{feature}': <number of ids>.")
    for feature in lengths:
      if feature not in self.TASK_FEATURES:
        raise ConfigError(f'task_feature_lengths names the unknown feature {feature!r}.'
                          f'{did_you_mean(feature, self.TASK_FEATURES)}')

  @abc.abstractmethod
  def element_spec(self, lengths: Mapping[str, int], batch_size: int, pack: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch: model feature name to int32[batch_size, length]."""

  @abc.abstractmethod
  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    """Returns int32[len(rows), length] model features; a row without examples becomes zeros."""


class EncoderDecoderFeatureConverter(FeatureConverter):
  """Features of an encoder-decoder, with T5X's names."""

  TASK_FEATURES = ('inputs', 'targets')

  def element_spec(self, lengths: Mapping[str, int], batch_size: int, pack: bool) -> dict[str, jax.ShapeDtypeStruct]:
    names = {'encoder_input_tokens': 'inputs', 'decoder_input_tokens': 'targets', 'decoder_target_tokens': 'targets',
             'decoder_loss_weights': 'targets'}
    if pack:
      names |= {'encoder_segment_ids': 'inputs', 'encoder_positions': 'inputs', 'decoder_segment_ids': 'targets',
                'decoder_positions': 'targets'}
    return {name: jax.ShapeDtypeStruct((batch_size, lengths[feature]), np.int32) for name, feature in names.items()}

  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    inputs, input_segments, input_positions = _lay_out(rows, 'inputs', lengths['inputs'])
    targets, target_segments, target_positions = _lay_out(rows, 'targets', lengths['targets'])
    # Teacher forcing: each position sees the ids before it; the first of each example sees 0.
    shifted = np.zeros_like(targets)
    shifted[:, 1:] = targets[:, :-1]
    if pack:
      shifted[:, 1:] *= target_segments[:, 1:] == target_segments[:, :-1]
    batch = {'encoder_input_tokens': inputs, 'decoder_input_tokens': shifted, 'decoder_target_tokens': targets,
             'decoder_loss_weights': (targets != 0).astype(np.int32)}
    if pack:
      batch |= {'encoder_segment_ids': input_segments, 'encoder_positions': input_positions,
                'decoder_segment_ids': target_segments, 'decoder_positions': target_positions}
    return batch


def _lay_out(rows: Sequence[Row], feature: str, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (ids, segment ids from 1, positions within the example), each int32[len(rows), length], padded with 0."""
  ids, segments, positions = (np.zeros((len(rows), length), np.int32) for _ in range(3))
  for r, row in enumerate(rows):
    start = 0
    for s, example in enumerate(row):
      values = example[feature]
      end = start + len(values)
      ids[r, start:end] = values
      segments[r, start:end] = s + 1
      positions[r, start:end] = np.arange(len(values))
      start = end
  return ids, segments, positions


CONVERTERS: dict[str, FeatureConverter] = {'encoder_decoder': EncoderDecoderFeatureConverter()}


def get_converter(name: str) -> FeatureConverter:
  """Returns the converter that a model names.

  Raises:
    ConfigError: there is none of that name.
  """
  if not isinstance(name, str):
    raise ConfigError(f'The feature converter is {name!r}, a class of seqio: it needs DatasetConfig.source = '
                      f"'seqio'. Other sources take a name: {', '.join(CONVERTERS)}.")
  if name not in CONVERTERS:
    raise ConfigError(f'Unknown feature converter {name!r}.{did_you_mean(name, CONVERTERS)}')
  return CONVERTERS[name]
