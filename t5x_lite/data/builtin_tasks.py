"""Tasks that need no TensorFlow: the embedded ones, and how to register your own.

A task gives, for a split and feature lengths, an `ExampleTable`: examples by number. Example n of a table of N is
example n % N of epoch n // N, and depends on (seed, n) alone; shuffling, packing, batching and resuming are built on
that in `table_iterator`. A text task of one's own takes a function that returns texts:

  from t5x_lite import data

  data.register_builtin_task(data.text_task(
      name='upper_case',
      texts_fn=lambda split: [('shout: hello', 'HELLO'), ('shout: bye', 'BYE')],
      splits=('train', 'validation'),
      vocabulary=data.ByteVocabulary(extra_ids=125),
      metric_fns=[data.exact_match]))

Put that in a module, name it as `DatasetConfig.module`, and set `source = 'builtin'`. The embedded tasks are
registered in seqio under the same names by `seqio_tasks`.
"""

import abc
import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lite.data import corpora, philox, span_corruption
from t5x_lite.data.features import trim
from t5x_lite.data.interfaces import MetricFn, identity_postprocess
from t5x_lite.data.text_metrics import exact_match
from t5x_lite.data.vocabularies import ByteVocabulary, Vocabulary, sentinel_id
from t5x_lite.errors import ConfigError, DataError, did_you_mean

NOISE_DENSITY = 0.15
MEAN_NOISE_SPAN_LENGTH = 3.0
_SENTINEL_TEXT = re.compile(r'<extra_id_(\d{1,9})>')
# The seeds that seqio hands to `denoise` in the task of the same name: 42 per preprocessor before the cache, then two
# for each random preprocessor before it (the chunk, the split).
_DENOISE_SEED_OFFSET = 2 * 42 + 4


class ExampleTable(abc.ABC):
  """The examples of one epoch, by number."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """The number of examples in an epoch."""

  @abc.abstractmethod
  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    """Returns the examples `numbers`, int64[n], of the endless sequence of epochs; a function of (seed, number) alone.

    Each has one int32 array per task feature, end-of-sequence id included, not trimmed.
    """

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """A hash of the content: resuming with other data under the same name is refused by it."""

  @property
  def end_ids(self) -> Mapping[str, int]:
    """Task feature name to the end-of-sequence id that examples keep when they are cut."""
    return {}

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    """Returns the texts that example `number` was made of, `<feature>_pretokenized`, where there are any.

    What else belongs to the example and postprocessors may read stands beside them.
    """
    del number, seed
    return {}


class StaticExamples(ExampleTable):
  """Examples that are the same in each epoch."""

  def __init__(self, examples: Sequence[Mapping[str, np.ndarray]], texts: Sequence[Mapping[str, str]],
               end_ids: Mapping[str, int] | None = None, lengths: Mapping[str, int] | None = None):
    """Args:
      examples: task features of each example, not trimmed.
      texts: the texts of each example.
      end_ids: see `ExampleTable.end_ids`.
      lengths: task feature lengths up to which the content counts; None for all of it.
    """
    self._examples = [dict(example) for example in examples]
    self._texts = texts
    self._end_ids = dict(end_ids or {})
    self._lengths = dict(lengths or {})

  def __len__(self) -> int:
    return len(self._examples)

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    return [self._examples[number % len(self)] for number in np.asarray(numbers).tolist()]

  @functools.cached_property
  def fingerprint(self) -> str:
    trimmed = (trim(example, self._lengths, True, self._end_ids) for example in self._examples)
    return _hash_arrays(array for example in trimmed for _, array in sorted(example.items()))

  @property
  def end_ids(self) -> Mapping[str, int]:
    return self._end_ids

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    return dict(self._texts[number % len(self)])


class SpanCorruptionExamples(ExampleTable):
  """Segments of documents with new noise in each epoch."""

  def __init__(self, documents: Sequence[str], vocabulary: Vocabulary, lengths: Mapping[str, int]):
    """Args:
      documents: the texts.
      vocabulary: of inputs and targets.
      lengths: 'inputs' and 'targets' lengths; they decide the length of a segment.
    """
    segment_length = span_corruption.check_lengths(dict(lengths), NOISE_DENSITY, MEAN_NOISE_SPAN_LENGTH)
    self._segments = span_corruption.segment([vocabulary.encode(text) for text in documents], segment_length)
    self._vocabulary = vocabulary
    self._lengths = dict(lengths)

  def __len__(self) -> int:
    return len(self._segments)

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    numbers = np.asarray(numbers)
    first = seed + _DENOISE_SEED_OFFSET
    seeds = philox.as_seeds(philox.stream_values(first, numbers), philox.stream_values(first + 1, numbers))
    corrupted = span_corruption.corrupt(
        [self._segments[number % len(self)] for number in numbers.tolist()], seeds,
        first_sentinel=sentinel_id(self._vocabulary), noise_density=NOISE_DENSITY,
        mean_noise_span_length=MEAN_NOISE_SPAN_LENGTH)
    eos_id = self._vocabulary.eos_id
    return [{'inputs': append_eos_after_trim(inputs, eos_id, self._lengths['inputs']),
             'targets': append_eos_after_trim(targets, eos_id, self._lengths['targets'])}
            for inputs, targets in corrupted]

  @functools.cached_property
  def fingerprint(self) -> str:
    return _hash_arrays(self._segments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltinTask:
  """A task of the source without TensorFlow.

  Attributes:
    name: what `DatasetConfig.mixture_or_task_name` names.
    splits: the names of its splits.
    vocabularies: task feature name to vocabulary.
    table_fn: `fn(split, task_feature_lengths)` that returns the examples.
    metric_fns: of (targets, predictions), for evaluation by decoding; a task without metrics is left out of it.
    score_metric_fns: of (targets, scores), for log likelihoods of the targets.
    predict_with_aux_metric_fns: of (targets, predictions, aux_values).
    postprocess_fn: `fn(text, example=..., is_target=...)`, before the metrics see a text.
  """

  name: str
  splits: tuple[str, ...]
  vocabularies: Mapping[str, Vocabulary]
  table_fn: Callable[[str, Mapping[str, int]], ExampleTable]
  metric_fns: Sequence[MetricFn] = ()
  postprocess_fn: Callable[..., Any] = identity_postprocess
  score_metric_fns: Sequence[MetricFn] = ()
  predict_with_aux_metric_fns: Sequence[Callable[..., Mapping[str, Any]]] = ()

  def table(self, split: str, lengths: Mapping[str, int]) -> ExampleTable:
    """Returns the examples of `split`.

    Raises:
      DataError: unknown split, or a split without examples.
    """
    if split not in self.splits:
      raise DataError(f'The task {self.name!r} has no split {split!r}.{did_you_mean(split, self.splits)}'
                      f'{split_remedy(self.splits)}')
    table = self.table_fn(split, lengths)
    if not len(table):
      raise DataError(f'The split {split!r} of the task {self.name!r} is empty: it gave no example.')
    return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltinMixture:
  """Tasks drawn at random in proportion to their rates.

  Attributes:
    name: what `DatasetConfig.mixture_or_task_name` names.
    rates: task name to a positive number.
  """

  name: str
  rates: Mapping[str, float]

  def __post_init__(self) -> None:
    if not self.rates:
      raise ConfigError(f'The mixture {self.name!r} has no tasks: give rates such as {{"task": 1.0}}.')
    for task, rate in self.rates.items():
      if not 0 < rate < math.inf:
        raise ConfigError(f'The mixture {self.name!r} gives the task {task!r} the rate {rate!r}, expected a positive '
                          'number.')

  @property
  def tasks(self) -> list[BuiltinTask]:
    """The tasks, in the order of `rates`."""
    tasks = [get_builtin(name) for name in self.rates]
    for task in tasks:
      if not isinstance(task, BuiltinTask):
        raise ConfigError(f'The mixture {self.name!r} contains the mixture {task.name!r}: name its tasks instead.')
    return tasks


_REGISTRY: dict[str, BuiltinTask | BuiltinMixture] = {}


def register_builtin_task(task: BuiltinTask) -> BuiltinTask:
  """Makes `task` known by its name, and returns it.

  Raises:
    ConfigError: the name is taken.
  """
  return _register(task)


def register_builtin_mixture(mixture: BuiltinMixture) -> BuiltinMixture:
  """Makes `mixture` known by its name, and returns it.

  Raises:
    ConfigError: the name is taken, or a task is unknown.
  """
  first, *others = mixture.tasks
  for task in others:
    if task.vocabularies != first.vocabularies:
      raise ConfigError(f'The tasks {first.name!r} and {task.name!r} of the mixture {mixture.name!r} differ in '
                        f'features or vocabularies: {dict(first.vocabularies)} and {dict(task.vocabularies)}.')
  return _register(mixture)


def _register(entry: Any) -> Any:
  if entry.name in _REGISTRY:
    raise ConfigError(f'The name {entry.name!r} is taken by another builtin task or mixture: choose another.')
  _REGISTRY[entry.name] = entry
  return entry


def builtin_names() -> list[str]:
  """Returns the registered names of tasks and mixtures."""
  return sorted(_REGISTRY)


def get_builtin(name_or_task: Any) -> BuiltinTask | BuiltinMixture:
  """Returns the task or mixture of that name; a task or mixture itself is returned as it is.

  Raises:
    DataError: there is none.
  """
  if isinstance(name_or_task, BuiltinTask | BuiltinMixture):
    return name_or_task
  if not isinstance(name_or_task, str):
    raise ConfigError(f"With DatasetConfig.source 'builtin', mixture_or_task_name is a {type(name_or_task).__name__}, "
                      'expected a name, a BuiltinTask or a BuiltinMixture.')
  if name_or_task not in _REGISTRY:
    raise DataError(f'Unknown builtin task or mixture {name_or_task!r}.{did_you_mean(name_or_task, _REGISTRY)} A task '
                    "that seqio knows needs source = 'seqio'; one of your own needs the module that registers it "
                    '(DatasetConfig.module).')
  return _REGISTRY[name_or_task]


def append_eos_after_trim(ids: np.ndarray, eos_id: int, length: int) -> np.ndarray:
  """Returns int32 `ids`, cut so that they and the end-of-sequence id behind them fit in `length`."""
  return np.concatenate([ids[:length - 1], [eos_id]]).astype(np.int32)


def text_task(*, name: str, texts_fn: Callable[[str], Sequence[tuple[str, str]]], splits: tuple[str, ...],
              vocabulary: Vocabulary, metric_fns: Sequence[MetricFn] = (),
              encode_inputs_fn: Callable[[str], Sequence[int]] | None = None,
              postprocess_fn: Callable[..., Any] = identity_postprocess) -> BuiltinTask:
  """Returns a task from (input, target) texts, which is not registered yet.

  Args:
    name: the task's name.
    texts_fn: split name to (input, target) texts, in a fixed order.
    splits: the names that `texts_fn` takes.
    vocabulary: of inputs and targets.
    metric_fns: see `BuiltinTask`.
    encode_inputs_fn: text to ids of an input, default `vocabulary.encode`.
    postprocess_fn: see `BuiltinTask`.
  """
  encode_inputs = encode_inputs_fn or vocabulary.encode
  # An encoder of a user's own may take other inputs than texts, and a vocabulary of ids takes ids.
  takes_texts = not isinstance(vocabulary.encode('a'), str)
  features = {'input': takes_texts and encode_inputs_fn is None, 'target': takes_texts}

  def table_fn(split: str, lengths: Mapping[str, int]) -> StaticExamples:
    def finish(ids: Sequence[int]) -> np.ndarray:
      return np.array([*ids, vocabulary.eos_id], np.int32)

    pairs = _checked_pairs(texts_fn(split), f'The task {name!r}, split {split!r}', features)
    # A language model may read the targets alone.
    inputs = [{'inputs': finish(encode_inputs(source))} if 'inputs' in lengths else {} for source, _ in pairs]
    return StaticExamples(
        [{**example, 'targets': finish(vocabulary.encode(target))}
         for example, (_, target) in zip(inputs, pairs, strict=True)],
        [{'inputs_pretokenized': source, 'targets_pretokenized': target} for source, target in pairs],
        end_ids=dict.fromkeys(lengths, vocabulary.eos_id), lengths=lengths)

  return BuiltinTask(name=name, splits=splits, vocabularies={'inputs': vocabulary, 'targets': vocabulary},
                     table_fn=table_fn, metric_fns=metric_fns, postprocess_fn=postprocess_fn)


def _checked_pairs(pairs: Any, where: str, features: Mapping[str, bool]) -> list[tuple[Any, Any]]:
  """Return the pairs of a `text_task`.

  Args:
    pairs: what the user's function returned.
    where: task and split, for messages.
    features: 'input' and 'target', in the order of a pair, to whether they must be texts.

  Raises:
    DataError: something that is not a pair of texts.
  """
  if not isinstance(pairs, Iterable):
    raise DataError(f'{where}: texts_fn must return a list of (input, target) texts, got {pairs!r}.')
  checked = list(pairs)
  for number, pair in enumerate(checked, start=1):
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
      raise DataError(f'{where}, example {number}: must be a pair (input, target) of texts, got {pair!r:.80}. '
                      'data.read_tsv names the file and line of such a pair.')
    for (feature, is_text), value in zip(features.items(), pair, strict=True):
      if is_text and not isinstance(value, str):
        raise DataError(f'{where}, example {number}: the {feature} must be a text, got {value!r:.80} of '
                        f'type {type(value).__name__}.')
  return checked


def split_remedy(splits: Iterable[str]) -> str:
  """Returns a sentence on how commands name a split; empty where there is none.

  >>> split_remedy(['train', 'validation'])
  ' To evaluate or to infer, set --gin.MIXTURE_OR_TASK_SPLIT=validation.'
  """
  splits = list(splits)
  proposed = 'validation' if 'validation' in splits else next(iter(splits), None)
  return f' To evaluate or to infer, set --gin.MIXTURE_OR_TASK_SPLIT={proposed}.' if proposed else ''


def encode_with_sentinel(text: str, vocabulary: Vocabulary) -> list[int]:
  """Returns the ids of `text`, in which `<extra_id_0>` is one id, T5's first sentinel, and not its twelve bytes.

  So are `<extra_id_1>` and all others that the vocabulary has, behind its pieces or, as mT5's, among them.
  """
  ids, start = [], 0
  for marker in _SENTINEL_TEXT.finditer(text):
    sentinel = sentinel_id(vocabulary) - int(marker[1])
    if int(marker[1]) < vocabulary.extra_ids or vocabulary.encode(marker[0]) == [sentinel]:
      ids += [*vocabulary.encode(text[start:marker.start()]), sentinel]
      start = marker.end()
  return ids + vocabulary.encode(text[start:])


def _hash_arrays(arrays) -> str:
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.int64(array.size).tobytes())
    digest.update(np.ascontiguousarray(array, '<i4').tobytes())
  return digest.hexdigest()[:16]


# --- The embedded tasks -------------------------------------------------------

BYTE_VOCABULARY = ByteVocabulary(extra_ids=125)


def keyword_cloze_task(*, vocabulary: Vocabulary, name: str = 'python_keyword_cloze') -> BuiltinTask:
  """Returns the embedded cloze task with a vocabulary of one's own, for gin files; it is not registered.

  Args:
    vocabulary: of inputs and targets; with sentinels, `<extra_id_0>` being its last id.
    name: the task's name.
  """
  return text_task(
      name=name, texts_fn=corpora.python_keyword_cloze, splits=corpora.SPLITS, vocabulary=vocabulary,
      encode_inputs_fn=functools.partial(encode_with_sentinel, vocabulary=vocabulary), metric_fns=(exact_match,))


register_builtin_task(keyword_cloze_task(vocabulary=BYTE_VOCABULARY))


def docs_span_corruption_task(*, vocabulary: Vocabulary, name: str = 'python_docs_span_corruption') -> BuiltinTask:
  """Returns the embedded pretraining task with a vocabulary of one's own, for gin files; it is not registered.

  Args:
    vocabulary: of inputs and targets; with sentinels, `<extra_id_0>` being its last id.
    name: the task's name.
  """
  return BuiltinTask(
      name=name, splits=corpora.SPLITS, vocabularies={'inputs': vocabulary, 'targets': vocabulary},
      table_fn=lambda split, lengths: SpanCorruptionExamples(corpora.python_docs(split), vocabulary, lengths))


register_builtin_task(docs_span_corruption_task(vocabulary=BYTE_VOCABULARY))

register_builtin_mixture(BuiltinMixture(
    name='python_cloze_and_docs', rates={'python_keyword_cloze': 1.0, 'python_docs_span_corruption': 1.0}))
