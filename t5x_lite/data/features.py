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


def trim(example: Mapping[str, np.ndarray], lengths: Mapping[str, int], trim_output_features: bool,
         end_ids: Mapping[str, int] | None = None) -> dict[str, np.ndarray]:
  """Returns the features of `example` that `lengths` names, cut to their lengths.

  Args:
    example: task features, of any length.
    lengths: task feature name to the most ids; features without one are left out. Empty keeps all as they are.
    trim_output_features: cut longer features instead of raising an error.
    end_ids: task feature name to the end-of-sequence id that it keeps when it is cut, as after seqio's
      `append_eos_after_trim`.

  Raises:
    DataError: one is longer and `trim_output_features` is False.
  """
  for feature, length in lengths.items():
    if not trim_output_features and len(example[feature]) > length:
      raise DataError(
          f'An example has {len(example[feature])} ids of {feature!r}, expected at most {length}: raise '
          f"task_feature_lengths['{feature}'], or set trim_output_features = True.")
  if not lengths:
    return dict(example)
  trimmed = {feature: example[feature][:length] for feature, length in lengths.items()}
  for feature, end_id in (end_ids or {}).items():
    if feature in trimmed and len(trimmed[feature]) < len(example[feature]):
      trimmed[feature] = np.concatenate([trimmed[feature][:-1], [end_id]]).astype(np.int32)
  return trimmed


class FeatureConverter(abc.ABC):
  """Turns rows of task features into a batch of model features."""

  # The task features that are read, all required.
  TASK_FEATURES: tuple[str, ...]
  # Those that are read where `task_feature_lengths` names them.
  OPTIONAL_TASK_FEATURES: tuple[str, ...] = ()

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
    known = (*self.TASK_FEATURES, *self.OPTIONAL_TASK_FEATURES)
    for feature in lengths:
      if feature not in known:
        raise ConfigError(f'task_feature_lengths names the unknown feature {feature!r}.'
                          f'{did_you_mean(feature, known)}')
      if feature not in task_features:
        raise ConfigError(f'task_feature_lengths has a length for {feature!r}, but {task_name!r} has only: '
                          f'{", ".join(sorted(task_features))}. Leave it out.')

  def row_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
    """Returns the lengths of what a row is filled with, by name; by default the task features themselves."""
    return dict(lengths)

  def sizes(self, example: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Returns how much of each of `row_lengths` a trimmed example takes."""
    return {feature: len(values) for feature, values in example.items()}

  def pack(self, examples: Sequence[Mapping[str, np.ndarray]], lengths: Mapping[str, int]) -> list[Row]:
    """Distributes examples over rows, in order: a row is closed when the next example does not fit.

    Args:
      examples: trimmed examples, `pack_group_size` of them, or the last ones of an evaluation.
      lengths: task feature lengths.
    """
    row_lengths = self.row_lengths(lengths)
    rows: list[list[Mapping[str, np.ndarray]]] = []
    used = dict.fromkeys(row_lengths, 0)
    for example in examples:
      sizes = self.sizes(example)
      if not rows or any(used[name] + sizes[name] > length for name, length in row_lengths.items()):
        rows.append([])
        used = dict.fromkeys(row_lengths, 0)
      rows[-1].append(example)
      used = {name: used[name] + sizes[name] for name in used}
    return rows

  def pack_group_size(self, lengths: Mapping[str, int]) -> int:
    """Returns how many examples are packed at a time, as in seqio: they fill a row even if each is only one id long."""
    return max(self.row_lengths(lengths).values(), default=1)

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
    inputs, input_segments, input_positions = _lay_out([[e['inputs'] for e in row] for row in rows], lengths['inputs'])
    batch = {'encoder_input_tokens': inputs, **_decoder_features(rows, lengths['targets'], pack)}
    if pack:
      batch |= {'encoder_segment_ids': input_segments, 'encoder_positions': input_positions}
    return batch


class DecoderFeatureConverter(FeatureConverter):
  """Features of a decoder-only model, with T5X's names.

  With a length for `inputs`, those of a prefix language model: a row holds the inputs of an example and, behind them,
  its targets; `decoder_causal_attention` is 1 where the inputs, and no targets, are read, and `decoder_loss_weights` is
  0 where inputs are to be predicted. Otherwise those of a plain language model of the targets.
  """

  TASK_FEATURES = ('targets',)
  OPTIONAL_TASK_FEATURES = ('inputs',)

  def __init__(self, *, inputs_required: bool = False, loss_on_targets_only: bool = True):
    """Args:
      inputs_required: refuse lengths without `inputs`.
      loss_on_targets_only: no loss where inputs are to be predicted.
    """
    if inputs_required:
      self.TASK_FEATURES, self.OPTIONAL_TASK_FEATURES = ('inputs', 'targets'), ()
    self._loss_on_targets_only = loss_on_targets_only

  def row_lengths(self, lengths: Mapping[str, int]) -> dict[str, int]:
    return {'targets': sum(lengths.values())}

  def sizes(self, example: Mapping[str, np.ndarray]) -> dict[str, int]:
    return {'targets': sum(len(values) for values in example.values())}

  def element_spec(self, lengths: Mapping[str, int], batch_size: int, pack: bool) -> dict[str, jax.ShapeDtypeStruct]:
    names = ['decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights']
    names += ['decoder_causal_attention'] if 'inputs' in lengths else []
    names += ['decoder_segment_ids', 'decoder_positions'] if pack else []
    (length,) = self.row_lengths(lengths).values()
    return {name: jax.ShapeDtypeStruct((batch_size, length), np.int32) for name in names}

  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    (length,) = self.row_lengths(lengths).values()
    if 'inputs' not in lengths:
      return _decoder_features(rows, length, pack)
    joined = [[{'targets': np.concatenate([e['inputs'], e['targets']])} for e in row] for row in rows]
    batch = _decoder_features(joined, length, pack)
    reads_inputs = np.zeros((len(rows), length), np.int32)
    predicts_inputs = np.zeros_like(reads_inputs)
    for r, row in enumerate(rows):
      start = 0
      for example in row:
        # The first position reads the start, so inputs of n ids are read at n + 1 positions and predicted at n.
        end = start + len(example['inputs'])
        reads_inputs[r, start:end + 1] = 1
        predicts_inputs[r, start:end] = 1
        start = end + len(example['targets'])
    batch['decoder_causal_attention'] = reads_inputs
    if self._loss_on_targets_only:
      batch['decoder_loss_weights'] = batch['decoder_loss_weights'] * (1 - predicts_inputs)
    return batch


def _decoder_features(rows: Sequence[Row], length: int, pack: bool) -> HostBatch:
  """Returns the decoder's features for `targets` of the examples in `rows`, each int32[len(rows), length]."""
  targets, segments, positions = _lay_out([[example['targets'] for example in row] for row in rows], length)
  # Teacher forcing: each position sees the ids before it; the first of each example sees 0.
  shifted = np.zeros_like(targets)
  shifted[:, 1:] = targets[:, :-1]
  if pack:
    shifted[:, 1:] *= segments[:, 1:] == segments[:, :-1]
  batch = {'decoder_input_tokens': shifted, 'decoder_target_tokens': targets,
           'decoder_loss_weights': (targets != 0).astype(np.int32)}
  return batch | {'decoder_segment_ids': segments, 'decoder_positions': positions} if pack else batch


def _lay_out(rows: Sequence[Sequence[np.ndarray]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns (ids, segment ids from 1, positions within the example), each int32[len(rows), length], padded with 0."""
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
    'prefix_lm_with_loss_on_inputs': DecoderFeatureConverter(inputs_required=True, loss_on_targets_only=False),
}


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


def check_features(lengths: Mapping[str, int], task_name: str, features: Sequence[str]) -> None:
  """Raises if lengths name features that a task does not have.

  Raises:
    ConfigError: naming the feature.
  """
  for feature in lengths:
    if feature not in features:
      raise ConfigError(f'task_feature_lengths names {feature!r}, which {task_name!r} does not have.'
                        f'{did_you_mean(feature, features)}')
