"""Examples as a person types them, made into task features: texts become ids by a model's own vocabularies.

Nothing here needs TensorFlow, but for preprocessors of tf.data, which go through `seqio_examples`.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lite.data import builtin_tasks
from t5x_lite.data.features import FeatureConverter
from t5x_lite.data.vocabularies import kind_of
from t5x_lite.errors import ConfigError, DataError, did_you_mean

# A text (or its UTF-8 bytes), or features by name, each a text or a sequence of ids.
TextExample = str | bytes | Mapping[str, Any]
# What T5X calls the features of such examples.
_T5X_NAMES = {'input': 'inputs', 'target': 'targets'}
_PRETOKENIZED = '_pretokenized'
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFeature:
  """A task feature that is made of text; what seqio's `Feature` says of it.

  Attributes:
    vocabulary: encodes it.
    add_eos: whether an end-of-sequence id follows the text.
  """

  vocabulary: Any
  add_eos: bool = True


@dataclasses.dataclass(frozen=True)
class ExamplesPreprocessor:
  """A preprocessor in plain Python; made by `map_over_examples` and `over_examples`.

  Attributes:
    fn: examples to examples, each a dict of feature name to text or ids.
  """

  fn: Callable[[Iterable[dict[str, Any]]], Iterable[Mapping[str, Any]]]

  def __call__(self, examples: Iterable[dict[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Returns what `fn` makes of the examples."""
    return self.fn(examples)


def map_over_examples(fn: Callable[[dict[str, Any]], Mapping[str, Any]]) -> ExamplesPreprocessor:
  """Returns a preprocessor that replaces each example by `fn(example)`.

  >>> shout = map_over_examples(lambda example: {**example, 'inputs': 'shout: ' + example['inputs']})
  >>> list(shout([{'inputs': 'hello', 'targets': 'HELLO'}]))
  [{'inputs': 'shout: hello', 'targets': 'HELLO'}]
  """
  return ExamplesPreprocessor(lambda examples: map(fn, examples))


def over_examples(fn: Callable[[Iterable[dict[str, Any]]], Iterable[Mapping[str, Any]]]) -> ExamplesPreprocessor:
  """Returns a preprocessor that replaces the examples by `fn(examples)`; it may drop some, or make more of them."""
  return ExamplesPreprocessor(fn)


def encode_text(text: str, vocabulary: Any) -> list[int]:
  """Returns the ids of `text`, without an end-of-sequence id; `<extra_id_0>` and its like become one id each.

  A sentencepiece vocabulary reads these markers by itself; one of bytes would spell them.
  """
  if kind_of(vocabulary) == 'ByteVocabulary':
    return builtin_tasks.encode_with_sentinel(text, vocabulary)
  return list(vocabulary.encode(text))


def decode_ids(ids: Sequence[int], vocabulary: Any) -> str:
  """Returns the text of `ids` up to the first end-of-sequence id, with sentinels shown as `<extra_id_0>` and its like.

  The inverse of `encode_text`: a vocabulary of bytes by itself decodes sentinels to nothing.
  """
  ids = [int(i) for i in ids]
  if kind_of(vocabulary) != 'ByteVocabulary':
    return str(vocabulary.decode(ids))
  if vocabulary.eos_id in ids:
    ids = ids[:ids.index(vocabulary.eos_id)]
  first, parts, start = builtin_tasks.sentinel_id(vocabulary), [], 0
  for place, i in enumerate(ids):
    if first - vocabulary.extra_ids < i <= first:
      parts += [vocabulary.decode(ids[start:place]), f'<extra_id_{first - i}>']
      start = place + 1
  return ''.join([*parts, vocabulary.decode(ids[start:])])


class ExampleReader:
  """Turns examples that a person types into the task features of one model."""

  def __init__(self, converter: FeatureConverter, features: Mapping[str, TextFeature], lengths: Mapping[str, int],
               length_remedies: Mapping[str, str] | None = None):
    """Args:
      converter: the model's feature converter.
      features: task feature name to what it is made by.
      lengths: task feature name to length in ids; names the features that are made.
      length_remedies: by feature, what a warning about a text that is too long says to do.

    Raises:
      ConfigError: lengths that the converter has no use for, or lacks.
    """
    converter.check(lengths, list(features), 'the interactive model')
    for name in lengths:
      if features[name].add_eos and features[name].vocabulary.eos_id is None:
        raise ConfigError(f'The vocabulary of {name!r}, {features[name].vocabulary!r}, has no end-of-sequence id, '
                          'which add_eos=True asks for: set add_eos=False.')
    self.features = {name: features[name] for name in lengths}
    self.lengths = dict(lengths)
    self._length_remedies = {name: f'raise task_feature_lengths[{name!r}]' for name in lengths} | dict(
        length_remedies or {})
    self._has_warned: set[str] = set()

  def read(self, examples: Sequence[TextExample], preprocessors: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Returns the task features of examples.

    A feature that is text, after the preprocessors, is encoded, and ends with the end-of-sequence id where its
    `TextFeature` says so; one that is ids is taken as it is. What is too long is cut, a text in front of its
    end-of-sequence id, as seqio's `append_eos_after_trim` does; the first time a warning says so.

    Args:
      examples: each a text, taken for the inputs (for the targets, where a model reads nothing else), or a mapping of
        `input` and `target` (or of `inputs` and `targets`) to texts or ids. What is left out is empty.
      preprocessors: plain functions wrapped by `map_over_examples` or `over_examples`; or tf.data preprocessors, as
        seqio has them, which make the ids themselves.

    Returns:
      For each example int32 arrays by feature name, and the texts that they were made of, `<feature>_pretokenized`.

    Raises:
      DataError: no examples, one that is neither text nor mapping, or features that are no text and no ids.
      ConfigError: a feature that the model does not read, or preprocessors of both kinds.
    """
    dicts = as_dicts(examples, 'inputs' if 'inputs' in self.features else 'targets')
    ours = [isinstance(preprocessor, ExamplesPreprocessor) for preprocessor in preprocessors]
    if not ours:
      for number, example in enumerate(dicts):
        self._check_names(example, number)
    if preprocessors and not any(ours):
      from t5x_lite.data import seqio_examples
      dicts = seqio_examples.preprocess(self._completed(dicts), preprocessors, self.features, self.lengths)
    elif not all(ours):
      raise ConfigError('Got plain functions (map_over_examples, over_examples) and tf.data preprocessors in one list; '
                        'expected one kind. Wrap each function of plain Python, or none.')
    else:
      for preprocessor in preprocessors:
        dicts = [dict(example) for example in preprocessor(dicts)]
    if not dicts:
      raise DataError('The preprocessors left none of the examples; expected at least one.')
    return [self._finish(example, number) for number, example in enumerate(self._completed(dicts))]

  def _check_names(self, example: Mapping[str, Any], number: int) -> None:
    for name in example:
      if name.removesuffix(_PRETOKENIZED) not in self.features:
        raise ConfigError(f'Example {number} has {name!r}, which the model does not read.'
                          f'{did_you_mean(name, [*self.features, *_T5X_NAMES])} Preprocessors may make features of '
                          'others.')

  def _completed(self, dicts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**{name: '' for name in self.features}, **example} for example in dicts]

  def _finish(self, example: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Returns the features of one example as ids, with their texts."""
    finished: dict[str, Any] = {}
    for name, feature in self.features.items():
      value, vocabulary = example[name], feature.vocabulary
      if isinstance(value, bytes):
        value = _as_text(value, name, number)
      if isinstance(value, str):
        finished[name + _PRETOKENIZED] = value
        try:
          ids = encode_text(value, vocabulary)
        except UnicodeEncodeError:
          raise DataError(f'{name!r} of example {number} holds half of a surrogate pair, which is no text.') from None
        if any(isinstance(i, str) for i in ids):
          raise DataError(f'{name!r} of example {number} is a text, but the vocabulary {vocabulary!r} knows ids only: '
                          'give the ids in a list.')
        self._note_length(name, len(ids) + feature.add_eos)
        if feature.add_eos:
          ids = builtin_tasks.append_eos_after_trim(np.asarray(ids, np.int32), vocabulary.eos_id, self.lengths[name])
      else:
        ids = _as_ids(value, name, number, vocabulary)
        if name + _PRETOKENIZED in example:
          finished[name + _PRETOKENIZED] = _as_text(example[name + _PRETOKENIZED], name, number)
        self._note_length(name, len(ids))
      finished[name] = _as_ids(ids, name, number, vocabulary)[:self.lengths[name]]
    return finished

  def _note_length(self, name: str, num_ids: int) -> None:
    if num_ids > self.lengths[name] and name not in self._has_warned:
      self._has_warned.add(name)
      _logger.warning('%r of %d ids is cut to %d, as every longer one will be: %s.', name, num_ids, self.lengths[name],
                      self._length_remedies[name])


def as_dicts(examples: Sequence[TextExample], feature_of_texts: str = 'inputs') -> list[dict[str, Any]]:
  """Returns each example as a dict by the names `inputs` and `targets`.

  Args:
    examples: see `ExampleReader.read`.
    feature_of_texts: what a plain text is.

  Raises:
    DataError: no examples, or one that is neither text nor mapping.
  """
  if isinstance(examples, (str, bytes, Mapping)) or not isinstance(examples, Sequence):
    raise DataError(f'Got {type(examples).__name__} as examples; expected a list of texts or of mappings such as '
                    "{'input': 'a text', 'target': 'another'}.")
  if not examples:
    raise DataError('Got an empty list of examples; expected at least one.')
  return [_as_dict(example, number, feature_of_texts) for number, example in enumerate(examples)]


def _as_dict(example: Any, number: int, feature_of_texts: str) -> dict[str, Any]:
  if isinstance(example, (str, bytes)):
    return {feature_of_texts: example}
  if not isinstance(example, Mapping):
    raise DataError(f'Example {number} is a {type(example).__name__}; expected a text, or a mapping such as '
                    "{'input': 'a text', 'target': 'another'}.")
  named = {_T5X_NAMES.get(name, name): value for name, value in example.items()}
  if len(named) < len(example):
    raise DataError(f'Example {number} names one feature twice: {", ".join(map(repr, example))}.')
  return named


def _as_text(value: Any, name: str, number: int) -> Any:
  if not isinstance(value, bytes):
    return value
  try:
    return value.decode('utf-8')
  except UnicodeDecodeError as error:
    raise DataError(f'{name!r} of example {number} is not UTF-8 ({error.reason} at byte {error.start}).') from None


def _as_ids(values: Any, name: str, number: int, vocabulary: Any) -> np.ndarray:
  try:
    ids = np.asarray(values)
  except (TypeError, ValueError):
    ids = np.asarray(None)
  if ids.ndim != 1 or (ids.size and ids.dtype.kind not in 'iu'):
    raise DataError(f'{name!r} of example {number} is {_shown(values)}; expected a text, or the ids of one in a flat '
                    'list.')
  outside = ids[(ids < 0) | (ids >= vocabulary.vocab_size)] if ids.size else ids
  if len(outside):
    raise DataError(f'{name!r} of example {number} has the id {outside[0]}; the vocabulary has ids 0 to '
                    f'{vocabulary.vocab_size - 1}.')
  return ids.astype(np.int32)


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
