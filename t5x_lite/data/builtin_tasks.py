"""Tasks without TensorFlow: the embedded tasks and the registration of custom tasks.

For a split and feature lengths, a task gives an `ExampleTable`: examples by number. Example n of a table of N examples
is example n % N of epoch n // N and depends only on (seed, n); `table_iterator` bases shuffling, packing, batching and
resuming on this. To register a custom text task, write a function that returns texts:

  from t5x_lite import data

  data.register_builtin_task(data.text_task(
      name='upper_case',
      texts_fn=lambda split: [('shout: hello', 'HELLO'), ('shout: bye', 'BYE')],
      splits=('train', 'validation'),
      vocabulary=data.ByteVocabulary(extra_ids=125),
      metric_fns=[data.exact_match]))

Put this code in a module, set `DatasetConfig.module` to its name, and set `source = 'builtin'`. `seqio_tasks` registers
the embedded tasks in seqio under the same names.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
import dataclasses
import functools
import hashlib
import math
from typing import Any, TypeVar

import numpy as np

from t5x_lite import checks
from t5x_lite.configuration import module_imports
from t5x_lite.data import corpora
from t5x_lite.data.batches import philox
from t5x_lite.data.batches import span_corruption
from t5x_lite.data.batches.features import trim
from t5x_lite.data.interfaces import MetricFn
from t5x_lite.data.interfaces import identity_postprocess
from t5x_lite.data.text.ids import as_ids
from t5x_lite.data.text.ids import earlier_vocabulary
from t5x_lite.data.text.ids import encode_text
from t5x_lite.data.text.ids import encode_with_sentinel
from t5x_lite.data.text.ids import has_sentinel
from t5x_lite.data.text_metrics import edit_similarity
from t5x_lite.data.text_metrics import exact_match
from t5x_lite.data.vocabularies import ByteVocabulary
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.data.vocabularies import required_eos_id
from t5x_lite.data.vocabularies import sentinel_id
from t5x_lite.errors import ConfigError, DataError, MissingSplitError, did_you_mean

NOISE_DENSITY = 0.15
MEAN_NOISE_SPAN_LENGTH = 3.0
# Offset of the seeds that seqio passes to `denoise` in the task of the same name: 42 per preprocessor before the cache,
# then two for each random preprocessor before it (the chunk, the split).
_DENOISE_SEED_OFFSET = 2 * 42 + 4


_Found = TypeVar('_Found', bound=Sized)
# Function from a text to ids.
_EncodeFn = Callable[[Any], Sequence[int]]


class ExampleTable(abc.ABC):
  """Examples of one epoch, by number."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Return the number of examples in an epoch."""

  @abc.abstractmethod
  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    """Return examples of the endless sequence of epochs; each depends only on (seed, number).

    Args:
      seed: seed of the examples' randomness.
      numbers: int64[n], numbers of the examples.

    Returns:
      For each example, one int32[length] array per task feature, with the end-of-sequence id, not trimmed.
    """

  @property
  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Hash of the content, so that resuming with other data under the same name is an error."""

  @property
  def end_ids(self) -> Mapping[str, int]:
    """Task feature name to the end-of-sequence id that trimmed examples keep."""
    return {}

  @property
  def num_skipped(self) -> int:
    """Number of records that were left out because they are bad."""
    return 0

  def record(self, number: int) -> Mapping[str, Any]:
    """Return those fields of the record of an example that results keep, as the file has them; {} for none."""
    del number
    return {}

  @property
  def earlier(self) -> 'ExampleTable | None':
    """The table with the ids of earlier versions for sentinels and added tokens in texts; None if all are equal."""
    return None

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    """Return the texts of example `number` as `<feature>_pretokenized`, and further fields for postprocessors."""
    del number, seed
    return {}


class StaticExamples(ExampleTable):
  """Table of examples that are equal in each epoch."""

  def __init__(
    self,
    examples: Sequence[Mapping[str, np.ndarray]],
    texts: Sequence[Mapping[str, str]],
    end_ids: Mapping[str, int] | None = None,
    lengths: Mapping[str, int] | None = None,
    earlier_fn: Callable[[], ExampleTable] | None = None,
  ):
    """Args:
    examples: task features of each example, int32[length] arrays, not trimmed.
    texts: texts of each example.
    end_ids: see `ExampleTable.end_ids`.
    lengths: task feature lengths for the fingerprint, which ignores ids beyond; None for all ids.
    earlier_fn: function that makes `ExampleTable.earlier`; None if all ids are equal.
    """
    self._earlier_fn = earlier_fn
    self._examples = [dict(example) for example in examples]
    self._texts = texts
    self._end_ids = dict(end_ids or {})
    self._lengths = dict(lengths or {})

  def __len__(self) -> int:
    return len(self._examples)

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    """See base class."""
    return [self._examples[number % len(self)] for number in np.asarray(numbers).tolist()]

  @functools.cached_property
  def fingerprint(self) -> str:
    """See base class."""
    arrays = []
    for example in self._examples:
      trimmed = trim(example, self._lengths, True, self._end_ids)
      arrays += [array for _, array in sorted(trimmed.items())]
    return _hash_arrays(arrays)

  @property
  def end_ids(self) -> Mapping[str, int]:
    """See base class."""
    return self._end_ids

  @functools.cached_property
  def earlier(self) -> ExampleTable | None:
    """See base class."""
    if self._earlier_fn is None:
      return None
    table = self._earlier_fn()
    return None if table.fingerprint == self.fingerprint else table

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    """See base class."""
    return dict(self._texts[number % len(self)])


class SpanCorruptionExamples(ExampleTable):
  """Table of segments of documents, with new noise in each epoch."""

  def __init__(
    self,
    documents: Sequence[str],
    vocabulary: Vocabulary,
    lengths: Mapping[str, int],
    encode_fn: _EncodeFn | None = None,
  ):
    """Args:
    documents: texts.
    vocabulary: vocabulary of inputs and targets.
    lengths: lengths of 'inputs' and 'targets', which determine the length of a segment.
    encode_fn: function from a text to ids; by default `encode_text` with the vocabulary.
    """
    encode = encode_fn or functools.partial(encode_text, vocabulary=vocabulary)
    self._documents = documents
    self._is_earlier = encode_fn is not None
    segment_length = span_corruption.check_lengths(
      dict(lengths), NOISE_DENSITY, MEAN_NOISE_SPAN_LENGTH
    )
    self._segments = span_corruption.segment([encode(text) for text in documents], segment_length)
    longest = max(map(len, self._segments), default=1)
    span_corruption.check_sentinels(vocabulary, longest, NOISE_DENSITY, MEAN_NOISE_SPAN_LENGTH)
    self._vocabulary = vocabulary
    self._lengths = dict(lengths)

  def __len__(self) -> int:
    return len(self._segments)

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    """See base class."""
    numbers = np.asarray(numbers)
    first = seed + _DENOISE_SEED_OFFSET
    seeds = philox.as_seeds(
      philox.stream_values(first, numbers), philox.stream_values(first + 1, numbers)
    )
    corrupted = span_corruption.corrupt(
      [self._segments[number % len(self)] for number in numbers.tolist()],
      seeds,
      first_sentinel=sentinel_id(self._vocabulary),
      noise_density=NOISE_DENSITY,
      mean_noise_span_length=MEAN_NOISE_SPAN_LENGTH,
    )
    eos_id = required_eos_id(self._vocabulary)
    examples = []
    for inputs, targets in corrupted:
      inputs = append_eos_after_trim(inputs, eos_id, self._lengths['inputs'])
      targets = append_eos_after_trim(targets, eos_id, self._lengths['targets'])
      examples.append({'inputs': inputs, 'targets': targets})
    return examples

  @functools.cached_property
  def fingerprint(self) -> str:
    """See base class."""
    return _hash_arrays(self._segments)

  @functools.cached_property
  def earlier(self) -> ExampleTable | None:
    """See base class."""
    if self._is_earlier:
      return None
    vocabulary = earlier_vocabulary(self._vocabulary)
    table = SpanCorruptionExamples(self._documents, vocabulary, self._lengths, vocabulary.encode)
    return None if table.fingerprint == self.fingerprint else table


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltinTask:
  """A task without TensorFlow.

  Attributes:
    name: name for `DatasetConfig.mixture_or_task_name`.
    splits: names of the splits.
    vocabularies: task feature name to vocabulary.
    table_fn: `fn(split, task_feature_lengths)` that returns the examples.
    metric_fns: functions of (targets, predictions) or (targets, scores) for evaluation by decoding, which ignores tasks
      without metrics; `data.metrics` has them by name.
    score_metric_fns: functions of (targets, scores), for log likelihoods of the targets.
    predict_with_aux_metric_fns: functions of (targets, predictions, aux_values).
    postprocess_fn: `fn(text, example=..., is_target=...)`, applied to texts before the metrics.
    record_keys: task feature name to the name of its value in a record, for tasks of files; `infer` uses them for JSON
      lines.
  """

  name: str
  splits: tuple[str, ...]
  vocabularies: Mapping[str, Vocabulary]
  table_fn: Callable[[str, Mapping[str, int]], ExampleTable]
  metric_fns: Sequence[MetricFn] = ()
  postprocess_fn: Callable[..., Any] = identity_postprocess
  score_metric_fns: Sequence[MetricFn] = ()
  predict_with_aux_metric_fns: Sequence[Callable[..., Mapping[str, Any]]] = ()
  record_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def has_metrics(self) -> bool:
    """Whether the task has metrics for evaluation by decoding."""
    return bool(self.metric_fns or self.score_metric_fns or self.predict_with_aux_metric_fns)

  def table(self, split: str, lengths: Mapping[str, int]) -> ExampleTable:
    """Return the examples of `split`.

    Raises:
      DataError: the split is unknown or empty.
    """
    check_split(self.name, split, self.splits)
    table = self.table_fn(split, lengths)
    check_not_empty(table, split, self.name)
    return table


class TaskDescription(abc.ABC):
  """Options of a task, such as its files, which may be the value of `DatasetConfig.mixture_or_task_name`."""

  name: str | None

  @abc.abstractmethod
  def builtin_task(self) -> BuiltinTask:
    """Return the task; this reads no data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltinMixture:
  """A mixture of tasks, drawn at random in proportion to their rates.

  Attributes:
    name: name for `DatasetConfig.mixture_or_task_name`.
    rates: task name to a positive number.
  """

  name: str
  rates: Mapping[str, float]

  def __post_init__(self) -> None:
    checks.check(
      'BuiltinMixture',
      vars(self),
      rates=checks.Expectation(
        'a mapping of task names to positive numbers, e.g. {"task": 1.0}',
        lambda rates: bool(rates) and all(0 < rate < math.inf for rate in rates.values()),
      ),
    )

  @property
  def tasks(self) -> list[BuiltinTask]:
    """The tasks, in the order of `rates`."""
    entries = [get_builtin(name) for name in self.rates]
    tasks: list[BuiltinTask] = []
    for entry in entries:
      if not isinstance(entry, BuiltinTask):
        got = 'which is a mixture'
      elif tasks and entry.vocabularies != tasks[0].vocabularies:
        got = f'with {dict(entry.vocabularies)}'
      else:
        tasks.append(entry)
        continue
      raise ConfigError(
        f'The tasks of the mixture {self.name!r} must have the features and vocabularies of '
        f'{entries[0].name!r}, got {entry.name!r}, {got}.'
      )
    return tasks


_REGISTRY: dict[str, BuiltinTask | BuiltinMixture] = {}


def register_builtin_task(task: BuiltinTask) -> BuiltinTask:
  """Register `task` by its name and return it.

  Raises:
    ConfigError: the name is taken.
  """
  return _register(task)


def register_builtin_mixture(mixture: BuiltinMixture) -> BuiltinMixture:
  """Register `mixture` by its name and return it.

  Raises:
    ConfigError: the name is taken, or the tasks differ in features or vocabularies.
    DataError: a task is unknown.
  """
  _ = mixture.tasks  # checks the tasks
  return _register(mixture)


def _register(entry: Any) -> Any:
  if entry.name in _REGISTRY:
    raise ConfigError(
      f'The name {entry.name!r} is taken by another builtin task or mixture: choose another.'
    )
  _REGISTRY[entry.name] = entry
  return entry


def builtin_names() -> list[str]:
  """Return the registered names of tasks and mixtures."""
  return sorted(_REGISTRY)


def get_builtin(name_or_task: Any) -> BuiltinTask | BuiltinMixture:
  """Return the task or mixture with the given name; a task or mixture itself is returned unchanged.

  A `TaskDescription` gives its task.

  Raises:
    DataError: the name is unknown.
  """
  if isinstance(name_or_task, TaskDescription):
    return name_or_task.builtin_task()
  if isinstance(name_or_task, BuiltinTask | BuiltinMixture):
    return name_or_task
  if not isinstance(name_or_task, str) or name_or_task not in _REGISTRY:
    raise DataError(
      f'Unknown builtin task or mixture {name_or_task!r}.{did_you_mean(str(name_or_task), _REGISTRY)} A '
      "task of seqio needs source = 'seqio'; a custom task needs the module that registers it "
      '(DatasetConfig.module).'
    )
  return _REGISTRY[name_or_task]


def record_keys(name_or_task: Any, module: str | None = None) -> dict[str, tuple[str, ...]]:
  """Return the names of the features' values in the records of a task of files, or of a mixture's tasks.

  Args:
    name_or_task: see `get_builtin`.
    module: module that registers the task, or None.

  Returns:
    Task feature name to the names, without repetitions; {} for tasks without records.

  Raises:
    ConfigError: the module cannot be imported.
    DataError: the name is unknown.
  """
  if module is not None:
    module_imports.import_module(module)
  found = get_builtin(name_or_task)
  tasks = found.tasks if isinstance(found, BuiltinMixture) else [found]
  keys: dict[str, tuple[str, ...]] = {}
  for task in tasks:
    for feature, key in task.record_keys.items():
      keys[feature] = tuple(dict.fromkeys((*keys.get(feature, ()), key)))
  return keys


def append_eos_after_trim(ids: np.ndarray, eos_id: int, length: int) -> np.ndarray:
  """Return `ids`, int32[n], trimmed and with the end-of-sequence id appended: int32[min(n + 1, length)]."""
  return np.concatenate([ids[: length - 1], [eos_id]]).astype(np.int32)


def text_task(
  *,
  name: str,
  texts_fn: Callable[[str], Sequence[tuple[str, str]]],
  splits: tuple[str, ...],
  vocabulary: Vocabulary,
  metric_fns: Sequence[MetricFn] = (),
  encode_inputs_fn: Callable[[str], Sequence[int]] | None = None,
  postprocess_fn: Callable[..., Any] = identity_postprocess,
  literal_sentinels: bool = False,
) -> BuiltinTask:
  """Return a task of (input, target) texts, without registering it.

  By T5's law, a sentinel such as `<extra_id_0>` in a text is one id, as in `infer` and `chat`.

  Args:
    name: name of the task.
    texts_fn: function from a split's name to (input, target) texts, in a fixed order.
    splits: split names that `texts_fn` accepts.
    vocabulary: vocabulary of inputs and targets.
    metric_fns: see `BuiltinTask`.
    encode_inputs_fn: function from an input text to ids; by default the vocabulary encodes it.
    postprocess_fn: see `BuiltinTask`.
    literal_sentinels: encode `<extra_id_0>` like any other text, by bytes or pieces. Set the option of this name in
      `infer` and `chat` too.
  """
  encode = functools.partial(
    encode_text, vocabulary=vocabulary, literal_sentinels=literal_sentinels
  )
  earlier = earlier_vocabulary(vocabulary)
  return _text_task(
    name=name,
    texts_fn=texts_fn,
    splits=splits,
    vocabulary=vocabulary,
    metric_fns=metric_fns,
    encode_fns=(encode_inputs_fn or encode, encode),
    earlier_encode_fns=(encode_inputs_fn or earlier.encode, earlier.encode),
    has_custom_inputs=encode_inputs_fn is not None,
    postprocess_fn=postprocess_fn,
  )


def _text_task(
  *,
  name: str,
  texts_fn: Callable[[str], Sequence[tuple[str, str]]],
  splits: tuple[str, ...],
  vocabulary: Vocabulary,
  metric_fns: Sequence[MetricFn],
  encode_fns: tuple[_EncodeFn, _EncodeFn],
  earlier_encode_fns: tuple[_EncodeFn, _EncodeFn],
  has_custom_inputs: bool = False,
  postprocess_fn: Callable[..., Any] = identity_postprocess,
) -> BuiltinTask:
  """Return a task of (input, target) texts; see `text_task`.

  Args:
    name: see `text_task`.
    texts_fn: see `text_task`.
    splits: see `text_task`.
    vocabulary: see `text_task`.
    metric_fns: see `text_task`.
    encode_fns: functions from an input and from a target to ids, without an end-of-sequence id.
    earlier_encode_fns: the functions of earlier versions, for runs that they recorded.
    has_custom_inputs: whether inputs need not be texts.
    postprocess_fn: see `text_task`.
  """
  # A vocabulary of ids accepts ids.
  takes_texts = not isinstance(vocabulary.encode('a'), str)
  features = {'input': takes_texts and not has_custom_inputs, 'target': takes_texts}

  def table_fn(split: str, lengths: Mapping[str, int]) -> StaticExamples:
    eos_id = required_eos_id(vocabulary)
    where = f'The task {name!r}, split {split!r}'
    pairs = _checked_pairs(texts_fn(split), where, features)
    names = ('inputs', 'targets')
    # A language model may need only the targets.
    if 'inputs' not in lengths:
      names = ('targets',)
    end_ids = dict.fromkeys(lengths, eos_id)

    def make(encode_fns: tuple[_EncodeFn, _EncodeFn]) -> list[dict[str, np.ndarray]]:
      encoders = dict(zip(('inputs', 'targets'), encode_fns, strict=True))
      examples = []
      for number, pair in enumerate(pairs, start=1):
        values = dict(zip(('inputs', 'targets'), pair, strict=True))
        example = {}
        for feature in names:
          found = encoders[feature](values[feature])
          ids = as_ids(found, vocabulary, f'{where}, example {number}: the {feature}')
          example[feature] = np.append(ids, np.int32(eos_id))
        examples.append(example)
      return examples

    texts = [
      {'inputs_pretokenized': source, 'targets_pretokenized': target} for source, target in pairs
    ]

    def make_earlier() -> StaticExamples:
      return StaticExamples(make(earlier_encode_fns), texts, end_ids, lengths)

    earlier_fn = None
    has_added = earlier_vocabulary(vocabulary) is not vocabulary
    if has_added or any(has_sentinel(value) for pair in pairs for value in pair):
      earlier_fn = make_earlier
    return StaticExamples(make(encode_fns), texts, end_ids, lengths, earlier_fn)

  return BuiltinTask(
    name=name,
    splits=splits,
    vocabularies={'inputs': vocabulary, 'targets': vocabulary},
    table_fn=table_fn,
    metric_fns=metric_fns,
    postprocess_fn=postprocess_fn,
  )


def _checked_pairs(pairs: Any, where: str, features: Mapping[str, bool]) -> list[tuple[Any, Any]]:
  """Return the pairs of a `text_task`.

  Args:
    pairs: result of `texts_fn`.
    where: task and split, for messages.
    features: 'input' and 'target', in the order of a pair, to whether they must be texts.

  Raises:
    DataError: an example is not a pair of texts.
  """
  if isinstance(pairs, Iterable):
    checked = list(pairs)
  else:
    checked = [pairs]  # e.g. None: fails below
  for number, pair in enumerate(checked, start=1):
    problem = _problem_of_pair(pair, features)
    if problem is not None:
      raise DataError(
        f'{where}, example {number}: {problem}, got {pair!r:.80}. '
        'data.read_tsv reports the file and line of an invalid pair.'
      )
  return checked


def _problem_of_pair(pair: Any, features: Mapping[str, bool]) -> str | None:
  """Return the expectation that a pair does not meet, for a message, or None; see `_checked_pairs`."""
  if not isinstance(pair, (tuple, list)) or len(pair) != 2:
    return 'it must be a pair (input, target) of texts'
  for (feature, is_text), value in zip(features.items(), pair, strict=True):
    if is_text and not isinstance(value, str):
      return f'{feature} must be a text'
  return None


def check_split(name: str, split: str, splits: Sequence[str]) -> None:
  """Raise MissingSplitError if the task or mixture `name` does not have `split` among its `splits`."""
  if split not in splits:
    remedy = did_you_mean(split, splits, lists_all=False)
    if not remedy:
      remedy = f'{did_you_mean(split, splits)}{split_remedy(splits)}'
    raise MissingSplitError(f'{name!r} has no split {split!r}.{remedy}', split)


def check_not_empty(found: _Found | None, split: str, name: str, where: str = '') -> _Found:
  """Return the examples of a split, or raise if it gave none.

  Args:
    found: examples, or the features of one; empty or None without an example.
    split: name of the split, for the message.
    name: name of the task, for the message.
    where: data shard, for the message.

  Raises:
    DataError: `found` is empty or None.
  """
  if found is None or not len(found):  # an array has no truth value
    raise DataError(
      f'The split {split!r} of {name!r} is empty: it gave no example{where}. Check its files, its '
      'preprocessors, and the number of processes.'
    )
  return found


def split_remedy(splits: Iterable[str]) -> str:
  """Return a sentence with the flag that selects a split; '' without splits.

  >>> split_remedy(['train', 'validation'])
  ' To evaluate or to infer, set --gin.MIXTURE_OR_TASK_SPLIT=validation, or DatasetConfig.split in files of T5X.'
  """
  splits = list(splits)
  if 'validation' in splits:
    proposed = 'validation'
  else:
    proposed = next(iter(splits), None)
  if not proposed:
    return ''
  return (
    f' To evaluate or to infer, set --gin.MIXTURE_OR_TASK_SPLIT={proposed}, or '
    'DatasetConfig.split in files of T5X.'
  )


def _hash_arrays(arrays) -> str:
  digest = hashlib.sha256()
  for array in arrays:
    digest.update(np.int64(array.size).tobytes())
    digest.update(np.ascontiguousarray(array, '<i4').tobytes())
  return digest.hexdigest()[:16]


# --- The embedded tasks -------------------------------------------------------

BYTE_VOCABULARY = ByteVocabulary(extra_ids=125)


def _cloze_task(
  name: str,
  texts_fn: Callable[[str], Sequence[tuple[str, str]]],
  vocabulary: Vocabulary,
  metric_fns: Sequence[MetricFn],
) -> BuiltinTask:
  """Return an embedded cloze task, without registering it."""
  encode = functools.partial(encode_text, vocabulary=vocabulary)
  return _text_task(
    name=name,
    texts_fn=texts_fn,
    splits=corpora.SPLITS,
    vocabulary=vocabulary,
    metric_fns=metric_fns,
    encode_fns=(encode, encode),
    earlier_encode_fns=(
      functools.partial(encode_with_sentinel, vocabulary=earlier_vocabulary(vocabulary)),
      earlier_vocabulary(vocabulary).encode,
    ),
  )


def keyword_cloze_task(
  *, vocabulary: Vocabulary, name: str = 'python_keyword_cloze'
) -> BuiltinTask:
  """Return the embedded cloze task of keywords with another vocabulary, for gin files, without registering it.

  Args:
    vocabulary: vocabulary of inputs and targets, whose last id is the sentinel `<extra_id_0>`.
    name: name of the task.
  """
  return _cloze_task(name, corpora.python_keyword_cloze, vocabulary, (exact_match,))


register_builtin_task(keyword_cloze_task(vocabulary=BYTE_VOCABULARY))


def function_cloze_task(
  *, vocabulary: Vocabulary, name: str = 'python_function_cloze'
) -> BuiltinTask:
  """Return the embedded cloze task of function bodies with another vocabulary, for gin files, without registering it.

  In bytes, inputs have at most 2048 ids and targets 512, with the end-of-sequence id.

  Args:
    vocabulary: vocabulary of inputs and targets, whose last id is the sentinel `<extra_id_0>`.
    name: name of the task.
  """
  return _cloze_task(
    name, corpora.python_function_cloze, vocabulary, (exact_match, edit_similarity)
  )


register_builtin_task(function_cloze_task(vocabulary=BYTE_VOCABULARY))


def docs_span_corruption_task(
  *, vocabulary: Vocabulary, name: str = 'python_docs_span_corruption'
) -> BuiltinTask:
  """Return the embedded pretraining task with another vocabulary, for gin files, without registering it.

  Args:
    vocabulary: vocabulary of inputs and targets, whose last id is the sentinel `<extra_id_0>`.
    name: name of the task.
  """
  return BuiltinTask(
    name=name,
    splits=corpora.SPLITS,
    vocabularies={'inputs': vocabulary, 'targets': vocabulary},
    table_fn=lambda split, lengths: SpanCorruptionExamples(
      corpora.python_docs(split), vocabulary, lengths
    ),
  )


register_builtin_task(docs_span_corruption_task(vocabulary=BYTE_VOCABULARY))

register_builtin_mixture(
  BuiltinMixture(
    name='python_cloze_and_docs',
    rates={'python_keyword_cloze': 1.0, 'python_docs_span_corruption': 1.0},
  )
)
