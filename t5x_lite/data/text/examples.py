"""Conversion of interactive examples to task features with a model's vocabularies.

Only preprocessors of tf.data need TensorFlow; they use `data.seqio.examples`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import logging
from typing import Any

from t5x_lite import checks
from t5x_lite.data import builtin_tasks
from t5x_lite.data.batches.features import FeatureConverter
from t5x_lite.data.text.ids import as_ids
from t5x_lite.data.text.ids import decode_ids as decode_ids
from t5x_lite.data.text.ids import encode_text as encode_text
from t5x_lite.errors import ConfigError, DataError, did_you_mean
from t5x_lite.formatting import short_repr

# A text (or its UTF-8 bytes), or features by name, each a text or a sequence of ids.
TextExample = str | bytes | Mapping[str, Any]
# T5X's names of the features of such examples.
_T5X_NAMES = {'input': 'inputs', 'target': 'targets'}
_PRETOKENIZED = '_pretokenized'
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFeature:
  """A task feature made from text, like seqio's `Feature`.

  Attributes:
    vocabulary: vocabulary of the text.
    add_eos: whether the end-of-sequence id is appended.
    literal_sentinels: encode `<extra_id_0>` like any other text, as a task with this option.
  """

  vocabulary: Any
  add_eos: bool = True
  literal_sentinels: bool = False


@dataclasses.dataclass(frozen=True)
class ExamplesPreprocessor:
  """A preprocessor in plain Python, made by `map_over_examples` or `over_examples`.

  Attributes:
    fn: function from examples to examples, each a dict of feature name to text or ids.
  """

  fn: Callable[[Iterable[dict[str, Any]]], Iterable[Mapping[str, Any]]]

  def __call__(self, examples: Iterable[dict[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Return `fn(examples)`."""
    return self.fn(examples)


def map_over_examples(fn: Callable[[dict[str, Any]], Mapping[str, Any]]) -> ExamplesPreprocessor:
  """Return a preprocessor that replaces each example by `fn(example)`.

  >>> shout = map_over_examples(lambda example: {**example, 'inputs': 'shout: ' + example['inputs']})
  >>> list(shout([{'inputs': 'hello', 'targets': 'HELLO'}]))
  [{'inputs': 'shout: hello', 'targets': 'HELLO'}]
  """
  return ExamplesPreprocessor(lambda examples: map(fn, examples))


def over_examples(
  fn: Callable[[Iterable[dict[str, Any]]], Iterable[Mapping[str, Any]]],
) -> ExamplesPreprocessor:
  """Return a preprocessor that replaces the examples by `fn(examples)`, whose number may differ."""
  return ExamplesPreprocessor(fn)


class ExampleReader:
  """Reader of interactive examples as the task features of one model."""

  def __init__(
    self,
    converter: FeatureConverter,
    features: Mapping[str, TextFeature],
    lengths: Mapping[str, int],
    length_remedies: Mapping[str, str] | None = None,
  ):
    """Args:
      converter: the model's feature converter.
      features: task feature name to `TextFeature`.
      lengths: task feature name to length in ids, for the features to make.
      length_remedies: by feature, the remedy in the warning about a text that is too long.

    Raises:
      ConfigError: a length is missing or unknown, or a vocabulary has no end-of-sequence id.
    """
    converter.check(lengths, list(features), 'the interactive model')
    for name in lengths:
      if features[name].add_eos and features[name].vocabulary.eos_id is None:
        raise checks.invalid(
          f'TextFeature of {name!r}',
          'add_eos',
          'False without an end-of-sequence id',
          True,
          f'The vocabulary is {features[name].vocabulary!r}.',
        )
    self.features = {name: features[name] for name in lengths}
    self.lengths = dict(lengths)
    self._length_remedies = {
      name: f'raise task_feature_lengths[{name!r}]' for name in lengths
    } | dict(length_remedies or {})
    self._has_warned: set[str] = set()

  def read(
    self, examples: Sequence[TextExample], preprocessors: Sequence[Any] = ()
  ) -> list[dict[str, Any]]:
    """Return the task features of examples.

    After the preprocessors, a text is encoded and ends with the end-of-sequence id according to its `TextFeature`; ids
    are used unchanged. Longer features are trimmed, with a warning the first time; a text keeps its end-of-sequence id,
    as in seqio's `append_eos_after_trim`.

    Args:
      examples: texts, which are the inputs (the targets, if the model has only targets), or mappings of `input` and
        `target` (or `inputs` and `targets`) to texts or ids; a missing feature is empty.
      preprocessors: functions wrapped by `map_over_examples` or `over_examples`, or preprocessors of tf.data as in
        seqio, which make the ids.

    Returns:
      For each example, int32[<= length] arrays by feature name, and the original texts as `<feature>_pretokenized`.

    Raises:
      DataError: there are no examples, an example is neither text nor mapping, or a feature is neither text nor ids.
      ConfigError: the model does not read a feature, or there are preprocessors of both kinds.
    """
    dicts = as_dicts(examples, 'inputs' if 'inputs' in self.features else 'targets')
    ours = [isinstance(preprocessor, ExamplesPreprocessor) for preprocessor in preprocessors]
    if not ours:
      for number, example in enumerate(dicts):
        self._check_names(example, number)
    if preprocessors and not any(ours):
      from t5x_lite.data.seqio import examples as seqio_examples

      dicts = seqio_examples.preprocess(
        self._completed(dicts), preprocessors, self.features, self.lengths
      )
    elif not all(ours):
      raise ConfigError(
        'Preprocessors must all be functions wrapped by map_over_examples or over_examples, or all be '
        'preprocessors of tf.data, got both kinds.'
      )
    else:
      for preprocessor in preprocessors:
        dicts = [dict(example) for example in preprocessor(dicts)]
    if not dicts:
      raise DataError('The preprocessors must keep at least one example, got none.')
    return [self._finish(example, number) for number, example in enumerate(self._completed(dicts))]

  def _check_names(self, example: Mapping[str, Any], number: int) -> None:
    for name in example:
      if name.removesuffix(_PRETOKENIZED) not in self.features:
        raise ConfigError(
          f'Example {number} has {name!r}, which the model does not read.'
          f'{did_you_mean(name, [*self.features, *_T5X_NAMES])} Use a preprocessor to convert it.'
        )

  def _completed(self, dicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**dict.fromkeys(self.features, ''), **example} for example in dicts]

  def _finish(self, example: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the features of one example as ids, with their texts."""
    finished: dict[str, Any] = {}
    for name, feature in self.features.items():
      value = example[name]
      vocabulary = feature.vocabulary
      ids = as_ids(
        value,
        vocabulary,
        f'{name!r} of example {number}',
        literal_sentinels=feature.literal_sentinels,
      )
      is_text = isinstance(value, (str, bytes))
      text = value
      if not is_text:
        text = example.get(name + _PRETOKENIZED)
      if isinstance(text, bytes):
        text = text.decode('utf-8', errors='replace')
      if text is not None:
        finished[name + _PRETOKENIZED] = text
      add_eos = is_text and feature.add_eos
      self._note_length(name, len(ids) + add_eos)
      if add_eos:
        ids = builtin_tasks.append_eos_after_trim(ids, vocabulary.eos_id, self.lengths[name])
      finished[name] = ids[: self.lengths[name]]
    return finished

  def _note_length(self, name: str, num_ids: int) -> None:
    if num_ids > self.lengths[name] and name not in self._has_warned:
      self._has_warned.add(name)
      _logger.warning(
        '%r has %d ids and is truncated to %d, like all later ones that are too long. To avoid this, %s.',
        name,
        num_ids,
        self.lengths[name],
        self._length_remedies[name],
      )


def as_dicts(
  examples: Sequence[TextExample], feature_of_texts: str = 'inputs'
) -> list[dict[str, Any]]:
  """Return each example as a dict with the names `inputs` and `targets`.

  Args:
    examples: see `ExampleReader.read`.
    feature_of_texts: feature of examples that are texts.

  Raises:
    DataError: there are no examples, or an example is neither text nor mapping.
  """
  checks.check(
    '',
    {'examples': examples},
    DataError,
    examples=checks.Expectation(
      "a non-empty list of texts or of mappings such as {'input': 'a text', 'target': 'another'}",
      lambda value: (
        isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0
      ),
    ),
  )
  return [_as_dict(example, number, feature_of_texts) for number, example in enumerate(examples)]


def _as_dict(example: Any, number: int, feature_of_texts: str) -> dict[str, Any]:
  if isinstance(example, (str, bytes)):
    return {feature_of_texts: example}
  named: dict[Any, Any] = {}
  if isinstance(example, Mapping):
    for name, value in example.items():
      named[_T5X_NAMES.get(name, name)] = value
  if not isinstance(example, Mapping) or len(named) < len(example):
    raise DataError(
      f"Example {number} must be a text, or a mapping such as {{'input': 'a text', 'target': 'another'}} "
      f'with each feature once, got {short_repr(example)} of type {type(example).__name__}.'
    )
  return named
