"""Conversion of task features to model features in NumPy, equal to seqio's: trimming, padding, packing, shifting.

A model names its converter (`FEATURE_CONVERTER = 'encoder_decoder'`); a source looks it up here or in seqio.
"""

import abc
from collections.abc import Mapping, Sequence
import sys

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.errors import DataError, did_you_mean
from t5x_lite.formatting import printable

# Length of a task feature while the lengths of a split are computed: nothing is trimmed.
UNKNOWN_LENGTH = sys.maxsize
# A row of a batch before conversion: the examples that share it, in order.
Row = Sequence[Mapping[str, np.ndarray]]


def trim(
  example: Mapping[str, np.ndarray],
  lengths: Mapping[str, int],
  trim_output_features: bool,
  end_ids: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
  """Return the features of `example` that are in `lengths`, trimmed to their lengths.

  Args:
    example: task features, int32[any length].
    lengths: task feature name to the maximal number of ids; other features are omitted. Empty: the example is returned
      unchanged.
    trim_output_features: whether longer features are trimmed; otherwise they are an error.
    end_ids: task feature name to the end-of-sequence id that a trimmed feature keeps, as in seqio's
      `append_eos_after_trim`.

  Returns:
    Task feature name to int32[<= length].

  Raises:
    DataError: a feature is too long and `trim_output_features` is False.
  """
  for feature, length in lengths.items():
    if not trim_output_features and len(example[feature]) > length:
      raise DataError(
        f'An example must have at most {length} ids of {feature!r}, got {len(example[feature])}. Increase '
        f"task_feature_lengths['{feature}'], or set trim_output_features = True."
      )
  if not lengths:
    return dict(example)
  trimmed = {feature: example[feature][:length] for feature, length in lengths.items()}
  for feature, end_id in (end_ids or {}).items():
    if feature in trimmed and len(trimmed[feature]) < len(example[feature]):
      trimmed[feature] = np.concatenate([trimmed[feature][:-1], [end_id]]).astype(np.int32)
  return trimmed


class FeatureConverter(abc.ABC):
  """Converter of rows of task features to a batch of model features."""

  # Required task features.
  TASK_FEATURES: tuple[str, ...]
  # Task features that are used if `task_feature_lengths` has them.
  OPTIONAL_TASK_FEATURES: tuple[str, ...] = ()

  def check(self, lengths: Mapping[str, int], task_features: Sequence[str], task_name: str) -> None:
    """Raise if a length is missing or unknown, or the task lacks a feature of the model.

    Raises:
      ConfigError: the message names the feature.
    """
    check_lengths(
      lengths, task_features, task_name, self.TASK_FEATURES, self.OPTIONAL_TASK_FEATURES
    )

  def features_of(self, task_features: Sequence[str]) -> list[str]:
    """Return the features of a task that this converter uses."""
    used = (*self.TASK_FEATURES, *self.OPTIONAL_TASK_FEATURES)
    return [name for name in used if name in task_features]

  def row_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
    """Return the lengths of a row by name; by default those of the task features."""
    return dict(lengths)

  def sizes(self, example: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Return the length of a trimmed example, features int32[length], for each name of `row_lengths`."""
    return {feature: len(values) for feature, values in example.items()}

  def pack(
    self, examples: Sequence[Mapping[str, np.ndarray]], lengths: Mapping[str, int]
  ) -> Sequence[Row]:
    """Pack examples into rows, in order: a new row begins when the next example does not fit.

    Args:
      examples: trimmed examples, features int32[length]; `pack_group_size` of them, or the last of an evaluation.
      lengths: task feature lengths.
    """
    row_lengths = self.row_lengths(lengths)
    rows: list[list[Mapping[str, np.ndarray]]] = []
    used = dict.fromkeys(row_lengths, 0)
    for example in examples:
      sizes = self.sizes(example)
      is_full = any(used[name] + sizes[name] > length for name, length in row_lengths.items())
      if not rows or is_full:
        rows.append([])
        used = dict.fromkeys(row_lengths, 0)
      rows[-1].append(example)
      used = {name: used[name] + sizes[name] for name in used}
    return rows

  def pack_group_size(self, lengths: Mapping[str, int]) -> int:
    """Return the number of examples packed together, as in seqio: enough to fill a row with examples of one id."""
    return max(self.row_lengths(lengths).values(), default=1)

  @abc.abstractmethod
  def element_spec(
    self, lengths: Mapping[str, int], batch_size: int, pack: bool
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch: model feature name to int32[batch_size, length]."""

  @abc.abstractmethod
  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    """Return the model features, int32[len(rows), length]; a row without examples is zeros."""


class EncoderDecoderFeatureConverter(FeatureConverter):
  """Converter to the features of an encoder-decoder, with T5X's names."""

  TASK_FEATURES = ('inputs', 'targets')

  def element_spec(
    self, lengths: Mapping[str, int], batch_size: int, pack: bool
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
    names = {
      'encoder_input_tokens': 'inputs',
      'decoder_input_tokens': 'targets',
      'decoder_target_tokens': 'targets',
      'decoder_loss_weights': 'targets',
    }
    if pack:
      names |= {
        'encoder_segment_ids': 'inputs',
        'encoder_positions': 'inputs',
        'decoder_segment_ids': 'targets',
        'decoder_positions': 'targets',
      }
    return {
      name: jax.ShapeDtypeStruct((batch_size, lengths[feature]), np.int32)
      for name, feature in names.items()
    }

  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    """See base class."""
    inputs, input_segments, input_positions = _lay_out(
      [[e['inputs'] for e in row] for row in rows], lengths['inputs']
    )
    batch = {'encoder_input_tokens': inputs, **_decoder_features(rows, lengths['targets'], pack)}
    if pack:
      batch |= {'encoder_segment_ids': input_segments, 'encoder_positions': input_positions}
    return batch


class DecoderFeatureConverter(FeatureConverter):
  """Converter to the features of a decoder-only model, with T5X's names.

  With a length for `inputs`, the features are those of a prefix language model: a row holds the inputs of an example,
  then its targets; `decoder_causal_attention` is 1 at positions that read inputs, and `decoder_loss_weights` is 0 at
  positions that predict inputs. Otherwise the features are those of a language model of the targets.
  """

  TASK_FEATURES = ('targets',)
  OPTIONAL_TASK_FEATURES = ('inputs',)

  def __init__(self, *, inputs_required: bool = False, loss_on_targets_only: bool = True):
    """Args:
    inputs_required: whether a length for `inputs` is required.
    loss_on_targets_only: whether positions that predict inputs have no loss.
    """
    if inputs_required:
      self.TASK_FEATURES = ('inputs', 'targets')
      self.OPTIONAL_TASK_FEATURES = ()
    self._loss_on_targets_only = loss_on_targets_only

  def row_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
    """See base class."""
    return {'targets': sum(lengths.values())}

  def sizes(self, example: Mapping[str, np.ndarray]) -> dict[str, int]:
    """See base class."""
    return {'targets': sum(len(values) for values in example.values())}

  def element_spec(
    self, lengths: Mapping[str, int], batch_size: int, pack: bool
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
    names = ['decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights']
    if 'inputs' in lengths:
      names.append('decoder_causal_attention')
    if pack:
      names += ['decoder_segment_ids', 'decoder_positions']
    (length,) = self.row_lengths(lengths).values()
    return {name: jax.ShapeDtypeStruct((batch_size, length), np.int32) for name in names}

  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    """See base class."""
    (length,) = self.row_lengths(lengths).values()
    if 'inputs' not in lengths:
      return _decoder_features(rows, length, pack)
    joined = [
      [{'targets': np.concatenate([e['inputs'], e['targets']])} for e in row] for row in rows
    ]
    batch = _decoder_features(joined, length, pack)
    reads_inputs = np.zeros((len(rows), length), np.int32)
    predicts_inputs = np.zeros_like(reads_inputs)
    for r, row in enumerate(rows):
      start = 0
      for example in row:
        # The first position reads the start id, so n + 1 positions read inputs of n ids and n positions predict them.
        end = start + len(example['inputs'])
        reads_inputs[r, start : end + 1] = 1
        predicts_inputs[r, start:end] = 1
        start = end + len(example['targets'])
    batch['decoder_causal_attention'] = reads_inputs
    if self._loss_on_targets_only:
      batch['decoder_loss_weights'] = batch['decoder_loss_weights'] * (1 - predicts_inputs)
    return batch


def _decoder_features(rows: Sequence[Row], length: int, pack: bool) -> HostBatch:
  """Return the decoder's features for `targets` of the examples in `rows`, each int32[len(rows), length]."""
  targets, segments, positions = _lay_out(
    [[example['targets'] for example in row] for row in rows], length
  )
  # Teacher forcing: each position reads the id before it, the first position of an example reads 0.
  shifted = np.zeros_like(targets)
  shifted[:, 1:] = targets[:, :-1]
  if pack:
    shifted[:, 1:] *= segments[:, 1:] == segments[:, :-1]
  batch = {
    'decoder_input_tokens': shifted,
    'decoder_target_tokens': targets,
    'decoder_loss_weights': (targets != 0).astype(np.int32),
  }
  if pack:
    return batch | {'decoder_segment_ids': segments, 'decoder_positions': positions}
  return batch


def _lay_out(
  rows: Sequence[Sequence[np.ndarray]], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return (ids, segment ids from 1, positions within the example), each int32[len(rows), length], padded with 0."""
  ids, segments, positions = (np.zeros((len(rows), length), np.int32) for _ in range(3))
  for r, row in enumerate(rows):
    start = 0
    for s, values in enumerate(row):
      end = start + len(values)
      ids[r, start:end] = values
      segments[r, start:end] = s + 1
      positions[r, start:end] = np.arange(len(values))
      start = end
  return ids, segments, positions


CONVERTERS: dict[str, FeatureConverter] = {
  'encoder_decoder': EncoderDecoderFeatureConverter(),
  'decoder_only': DecoderFeatureConverter(),
  'prefix_lm': DecoderFeatureConverter(inputs_required=True),
  'prefix_lm_with_loss_on_inputs': DecoderFeatureConverter(
    inputs_required=True, loss_on_targets_only=False
  ),
}


def get_converter(name: str) -> FeatureConverter:
  """Return the converter with the name that a model gives.

  Raises:
    ConfigError: the name is unknown.
  """
  checks.check(
    '',
    {'FEATURE_CONVERTER': name},
    FEATURE_CONVERTER=checks.one_of(
      CONVERTERS, "A converter class of seqio needs DatasetConfig.source = 'seqio'."
    ),
  )
  return CONVERTERS[name]


def check_lengths(
  lengths: Mapping[str, int],
  task_features: Sequence[str],
  task_name: str,
  required: Sequence[str] = (),
  optional: Sequence[str] | None = None,
) -> None:
  """Raise if `task_feature_lengths` lacks a required feature, or has one that the model or the task does not have.

  Args:
    lengths: task feature name to length in ids.
    task_features: features of the task.
    task_name: name of the task, for messages.
    required: features that the model requires.
    optional: further features that the model accepts; None for all features of the task.

  Raises:
    ConfigError: the message names the feature.
  """
  if optional is None:
    known = tuple(task_features)
  else:
    known = (*required, *optional)
  for feature in dict.fromkeys((*required, *lengths)):
    if feature not in task_features or feature not in lengths or feature not in known:
      if feature not in lengths and feature in task_features:
        remedy = f"Add '{feature}': <number of ids>."
      else:
        names = ', '.join(map(printable, sorted(task_features)))
        remedy = f'{task_name!r} has the features {names}.{did_you_mean(feature, known)}'
      expected = f'a mapping {"with" if feature in required else "without"} the feature {feature!r}'
      raise checks.invalid(
        '', 'task_feature_lengths', f'{expected} for {task_name!r}', dict(lengths), remedy
      )
