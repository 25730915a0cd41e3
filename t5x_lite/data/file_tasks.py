"""Tasks from files of records, such as JSON lines, with preprocessors in plain Python.

  from t5x_lite import data

  data.register_builtin_task(data.file_task(
      name='questions',
      splits={'train': 'data/train-*.jsonl', 'validation': 'data/validation.jsonl'},
      format='jsonl',
      vocabulary=data.ByteVocabulary(extra_ids=125),
      keys={'inputs': 'question', 'targets': 'answer'},
      metric_fns=[data.exact_match]))

A record is a mapping of names to values. Preprocessors transform it; then each task feature is made from the value that
`keys` names: a text is encoded, ids are used unchanged, and the end-of-sequence id is appended. Records are read on
demand, so a split may be larger than the memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches import philox
from t5x_lite.data.batches import span_corruption
from t5x_lite.data.batches.features import trim
from t5x_lite.data.builtin_tasks import MEAN_NOISE_SPAN_LENGTH
from t5x_lite.data.builtin_tasks import NOISE_DENSITY
from t5x_lite.data.builtin_tasks import BuiltinTask
from t5x_lite.data.builtin_tasks import ExampleTable
from t5x_lite.data.files import opening
from t5x_lite.data.files.records import Records
from t5x_lite.data.files.records import Where
from t5x_lite.data.files.records import find_files
from t5x_lite.data.interfaces import MetricFn
from t5x_lite.data.interfaces import identity_postprocess
from t5x_lite.data.text.ids import as_ids
from t5x_lite.data.text.ids import earlier_vocabulary
from t5x_lite.data.text.ids import num_sentinels
from t5x_lite.data.text.ids import spaces_sentinels
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.data.vocabularies import required_eos_id
from t5x_lite.data.vocabularies import sentinel_id
from t5x_lite.errors import ConfigError, DataError, did_you_mean

_DEFAULT_KEYS = {'inputs': 'inputs', 'targets': 'targets'}
# Names of the parts of a result of `infer`, next to which it has fields of the record.
RESULT_NAMES = ('inputs', 'prediction', 'prediction_tokens', 'score', 'aux')
# Examples that are prepared when a table is opened, to find errors early.
_NUM_TRIED = 4


class RecordContext:
  """Context of a record for preprocessors: feature lengths, vocabularies and a seed.

  Attributes:
    lengths: task feature name to length in ids; `sys.maxsize` while the lengths of a split are computed.
    vocabularies: task feature name to vocabulary.
    literal_sentinels: the task's option, see `file_task`.
  """

  def __init__(
    self,
    lengths: Mapping[str, int],
    vocabularies: Mapping[str, Vocabulary],
    seeds: np.ndarray,
    number: int,
    literal_sentinels: bool = False,
  ):
    """Args:
    lengths: see above.
    vocabularies: see above.
    seeds: uint64[2], from which the seeds of all examples are derived.
    number: number of the example, counted over all epochs.
    literal_sentinels: see above.
    """
    self.literal_sentinels = literal_sentinels
    self.lengths = lengths
    self.vocabularies = vocabularies
    self._seeds = seeds
    self._number = number

  @functools.cached_property
  def seed(self) -> np.ndarray:
    """Seed of this example, epoch and preprocessor, uint64[2]; equal whenever the example is read."""
    return philox.member(self._seeds, self._number)


# `fn(record, context)` returns the transformed record.
Preprocessor = Callable[[dict[str, Any], RecordContext], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruption:
  """Preprocessor for T5's pretraining objective, on a random segment of each text, a new segment in each epoch.

  A text longer than a segment gives one segment per epoch at a random position (T5's random chunk); a shorter text is
  used entirely, so use packing for short texts. A text needs at least one id.

  Attributes:
    key: name of the text, or of its ids, in the record.
    noise_density: fraction of ids that are moved to the targets.
    mean_noise_span_length: mean number of ids per replaced span.
    first_sentinel: id of the first sentinel, for weights that were trained with other sentinels, such as 258 for the
      published weights of ByT5; the next sentinels have the ids below. None for the sentinels of the vocabulary.
  """

  key: str = 'text'
  noise_density: float = NOISE_DENSITY
  mean_noise_span_length: float = MEAN_NOISE_SPAN_LENGTH
  first_sentinel: int | None = None

  def __post_init__(self) -> None:
    checks.check(
      'SpanCorruption',
      vars(self),
      noise_density=checks.number(above=0, below=1),
      mean_noise_span_length=checks.number(at_least=1),
      first_sentinel=checks.number(at_least=0, integer=True).or_none(),
    )

  def __call__(self, record: dict[str, Any], context: RecordContext) -> dict[str, Any]:
    """Return the record with ids `inputs` and `targets`, int32[length] each, instead of the text."""
    vocabulary = context.vocabularies['targets']
    segment_length = span_corruption.check_lengths(
      dict(context.lengths), self.noise_density, self.mean_noise_span_length
    )
    ids = as_ids(
      _value(record, self.key),
      vocabulary,
      repr(self.key),
      literal_sentinels=context.literal_sentinels,
    )
    if not len(ids):
      raise DataError(
        f'{self.key!r} is empty, but span corruption needs at least one id: remove such records.'
      )
    place_seed, mask_seed = philox.split(context.seed, 2)
    num_positions = max(len(ids) - segment_length, 0) + 1
    first = int(philox.random_words(place_seed, 1)[0] * np.uint64(num_positions) >> np.uint64(32))
    segment = ids[first : first + segment_length]
    ((inputs, targets),) = span_corruption.corrupt(
      [segment],
      mask_seed[None],
      first_sentinel=self._first_sentinel(segment, vocabulary),
      noise_density=self.noise_density,
      mean_noise_span_length=self.mean_noise_span_length,
    )
    kept = {name: value for name, value in record.items() if name != self.key}
    return {**kept, 'inputs': inputs, 'targets': targets}

  def _first_sentinel(self, segment: np.ndarray, vocabulary: Vocabulary) -> int:
    """Return the id of the first sentinel for a segment, int32[length].

    Raises:
      ConfigError: the vocabulary has fewer sentinels than the segment has spans.
      DataError: the segment contains an id that would be a sentinel too.
    """
    length = len(segment)
    if self.first_sentinel is None and num_sentinels(vocabulary) is not None:
      span_corruption.check_sentinels(
        vocabulary, length, self.noise_density, self.mean_noise_span_length
      )
      return sentinel_id(vocabulary)
    first = self.first_sentinel
    if first is None:
      first = sentinel_id(vocabulary)
    _, needed = span_corruption.count_spans(length, self.noise_density, self.mean_noise_span_length)
    used = segment[(segment <= first) & (segment > first - needed)]
    if len(used):
      raise DataError(
        f'The ids of {self.key!r} must not contain the sentinels {first - needed + 1} to {first} of its {needed} '
        f'spans, got {used[0]}. Lower TASK_FEATURE_LENGTHS, or remove such records.'
      )
    return first


class FileExamples(ExampleTable):
  """Table of the examples of one split of a `file_task`."""

  def __init__(
    self,
    name: str,
    records: Records,
    keys: Mapping[str, str],
    vocabularies: Mapping[str, Vocabulary],
    add_eos: Mapping[str, bool],
    preprocessors: Sequence[Preprocessor],
    lengths: Mapping[str, int],
    literal_sentinels: bool = False,
    num_skipped: int = 0,
    keep_fields: Sequence[str] | None = (),
  ):
    """Args:
    name: name of the task, on which seeds of preprocessors depend.
    records: the records.
    keys: task feature to the name of its value after the preprocessors.
    vocabularies: task feature to vocabulary.
    add_eos: task feature to whether it ends with an end-of-sequence id.
    preprocessors: see `file_task`.
    lengths: task feature to length, for the features of the examples.
    literal_sentinels: see `file_task`.
    num_skipped: see base class.
    keep_fields: names of the fields of `record`; None for all.
    """
    self._literal_sentinels = literal_sentinels
    self._num_skipped = num_skipped
    self._keep_fields = keep_fields
    self._is_earlier = False
    self._name = name
    self._records = records
    self._keys = dict(keys)
    self._vocabularies = vocabularies
    self._add_eos = add_eos
    self._preprocessors = preprocessors
    self._lengths = dict(lengths)

  def __len__(self) -> int:
    return len(self._records)

  @functools.cached_property
  def fingerprint(self) -> str:
    """Hash of the files and of the first examples, which depend on the preprocessors and vocabularies."""
    digest = hashlib.sha256(self._records.fingerprint.encode())
    for example in self.examples(0, np.arange(min(_NUM_TRIED, len(self)))):
      trimmed = trim(example, self._lengths, True, self.end_ids)
      for feature, ids in sorted(trimmed.items()):
        digest.update(f'{feature} {len(ids)} '.encode())
        digest.update(np.ascontiguousarray(ids, '<i4').tobytes())
    longest = self._records.longest
    if longest is not None:
      # A configuration for which the longest record is too long is an error before the first step; a record that
      # cannot be read is one when it is reached.
      with contextlib.suppress(DataError):
        self.examples(0, np.array([longest]))
    return digest.hexdigest()[:16]

  @property
  def num_skipped(self) -> int:
    """See base class."""
    return self._num_skipped

  def record(self, number: int) -> dict[str, Any]:
    """See base class."""
    if self._keep_fields is not None and not self._keep_fields:
      return {}
    where = Where(self._records, number % len(self))
    (content,) = self._records.read([number % len(self)])
    return kept_fields(self._records.parse(content, where), self._keep_fields, where)

  @property
  def end_ids(self) -> Mapping[str, int]:
    """See base class."""
    ending = [feature for feature in self._lengths if self._add_eos[feature]]
    return {feature: required_eos_id(self._vocabularies[feature]) for feature in ending}

  @property
  def earlier(self) -> 'FileExamples | None':
    """See base class; sentencepiece found sentinels after a space only."""
    vocabularies = [self._vocabularies[feature] for feature in self._lengths]
    has_added = any(earlier_vocabulary(each) is not each for each in vocabularies)
    has_spaces = not self._literal_sentinels and any(map(spaces_sentinels, vocabularies))
    if self._is_earlier or not (has_added or has_spaces):
      return None
    table = copy.copy(self)
    table._is_earlier = True
    table._vocabularies = {
      feature: earlier_vocabulary(each) for feature, each in self._vocabularies.items()
    }
    vars(table).pop('fingerprint', None)
    return table

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    """See base class."""
    numbers = np.asarray(numbers).tolist()
    contents = self._records.read([number % len(self) for number in numbers])
    seeds = self._seeds(seed)
    return [
      self._finish(*self._prepare(seeds, number, content))
      for number, content in zip(numbers, contents, strict=True)
    ]

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    """Return the texts of the features, and the other fields of the record, which postprocessors may use."""
    (content,) = self._records.read([number % len(self)])
    record, _ = self._prepare(self._seeds(seed), number, content)
    texts = {name: value for name, value in record.items() if name not in self._keys}
    for feature, key in self._keys.items():
      value = record.get(key)
      if isinstance(value, bytes):
        value = value.decode('utf-8', errors='replace')
      if isinstance(value, str):
        texts[f'{feature}_pretokenized'] = value
    return texts

  def _seeds(self, seed: int) -> list[np.ndarray]:
    """Return, for each preprocessor, the seed from which its seeds are derived."""
    return [philox.fold(seed, self._name, 'example', p) for p in range(len(self._preprocessors))]

  def _prepare(
    self, seeds: Sequence[np.ndarray], number: int, content: bytes
  ) -> tuple[dict[str, Any], Where]:
    """Return the record after the preprocessors, and its location."""
    where = Where(self._records, number % len(self))
    record = self._records.parse(content, where)
    for preprocessor, family in zip(self._preprocessors, seeds, strict=True):
      context = RecordContext(
        self._lengths, self._vocabularies, family, number, self._literal_sentinels
      )
      name = getattr(preprocessor, '__name__', type(preprocessor).__name__)
      with located(where, f'the preprocessor {name} of the task {self._name!r}'):
        record = dict(preprocessor(record, context))
    return record, where

  def _finish(self, record: Mapping[str, Any], where: Where) -> dict[str, np.ndarray]:
    """Return the ids of each feature in `lengths`, int32[length], with the end-of-sequence id."""
    example = {}
    for feature in self._lengths:
      vocabulary = self._vocabularies[feature]
      with located(where, f'the vocabulary of {feature!r}'):
        key = self._keys[feature]
        value = _value(record, key)
        is_plain = self._is_earlier and not self._literal_sentinels
        if is_plain and spaces_sentinels(vocabulary) and isinstance(value, str):
          value = vocabulary.encode(value)
        ids = as_ids(value, vocabulary, repr(key), literal_sentinels=self._literal_sentinels)
      has_eos = len(ids) and ids[-1] == vocabulary.eos_id
      if self._add_eos[feature] and not has_eos:
        ids = np.append(ids, np.int32(required_eos_id(vocabulary)))
      example[feature] = ids
    return example


def kept_fields(
  record: Mapping[str, Any], names: Sequence[str] | None, where: object
) -> dict[str, Any]:
  """Return the fields of a record that results keep.

  Args:
    record: the record.
    names: names of the fields; None for all.
    where: location of the record, for messages.

  Raises:
    DataError: the record lacks a field, or has one with the name of a part of the results.
  """
  taken = [name for name in record if name in RESULT_NAMES]
  if names is None and taken:
    others = ','.join(name for name in record if name not in taken) or 'NAMES'
    raise DataError(
      f'{where}: the field {taken[0]!r} cannot be kept, since a part of the results has this name. Rename it, or keep '
      f'other fields: --keep_fields={others}.'
    )
  for name in names or ():
    if name not in record:
      raise DataError(
        f'{where}: the record has no {name!r}.{did_you_mean(name, record)} Correct the record, or --keep_fields.'
      )
  if names is None:
    return dict(record)
  return {name: record[name] for name in names}


@contextlib.contextmanager
def located(where: object, what: str) -> Iterator[None]:
  """Add the location of a record, and for unexpected exceptions the failing function, to errors within the context.

  Args:
    where: location of the record.
    what: function that fails, for the message.
  """
  try:
    yield
  except ConfigError:
    raise
  except Exception as error:
    if isinstance(error, DataError):
      problem = str(error)
    else:
      problem = f'{what} failed: {type(error).__name__}: {error}. Correct it, or the record.'
    raise DataError(f'{where}: {problem}') from error


def _value(record: Mapping[str, Any], key: str) -> Any:
  if key not in record:
    raise DataError(
      f"the record has no {key!r}.{did_you_mean(key, record)} Correct the record, or the task's keys."
    )
  return record[key]


def file_task(
  *,
  name: str,
  splits: Mapping[str, str | Sequence[str]],
  format: str,
  vocabulary: Vocabulary | Mapping[str, Vocabulary],
  keys: Mapping[str, str] | None = None,
  add_eos: bool | Mapping[str, bool] = True,
  preprocessors: Sequence[Preprocessor] = (),
  metric_fns: Sequence[MetricFn] = (),
  postprocess_fn: Callable[..., Any] = identity_postprocess,
  literal_sentinels: bool = False,
) -> BuiltinTask:
  """Return a task of files, without registering it.

  Args:
    name: name of the task.
    splits: split name to one or several file patterns such as `data/train-*.jsonl`. Records are in the order of the
      sorted file names.
    format: 'jsonl' (one JSON object per line), 'array_record' (records of JSON or msgpack; needs the extra `[grain]`),
      or another one of `FileTask`, with the default separators and a header.
    vocabulary: vocabulary of all task features, or task feature name to vocabulary.
    keys: task feature name to the name of its value in a record; by default `inputs` and `targets`. A task for language
      models may have only `targets`.
    add_eos: whether features end with the vocabulary's end-of-sequence id, or task feature name to that.
    preprocessors: functions `fn(record, context)` that return the transformed record, applied in order. Random
      preprocessors use `context.seed`, so that a record is transformed equally whenever it is read.
    metric_fns: see `BuiltinTask`.
    postprocess_fn: see `BuiltinTask`; its `example` has the other fields of the record.
    literal_sentinels: encode `<extra_id_0>` like any other text, by bytes or pieces. Set the option of this name in
      `infer` and `chat` too.

  Returns:
    The task. A text is encoded (sentinels such as `<extra_id_0>` are one id each), ids are used unchanged; both are
    trimmed to the feature's length and end with the vocabulary's end-of-sequence id.

  Raises:
    ConfigError: the format is unknown, there are no splits, or features lack a vocabulary.
  """
  keys = dict(_DEFAULT_KEYS if keys is None else keys)
  if isinstance(vocabulary, Mapping):
    vocabularies = dict(vocabulary)
  else:
    vocabularies = dict.fromkeys(keys, vocabulary)
  if isinstance(add_eos, Mapping):
    ends = dict(add_eos)
  else:
    ends = dict.fromkeys(keys, add_eos)
  without_eos = [
    feature for feature, vocabulary in vocabularies.items() if vocabulary.eos_id is None
  ]
  checks.check(
    f'file_task({name!r})',
    {'format': format, 'splits': splits, 'keys': sorted(keys), 'add_eos': ends},
    format=checks.one_of(opening.FORMATS),
    splits=checks.Expectation(
      "a mapping of split names to file patterns such as {'train': 'train-*.jsonl'}", bool
    ),
    keys=checks.Expectation(
      'at least one feature, those of vocabulary and add_eos',
      lambda keys: keys and keys == sorted(vocabularies) == sorted(ends),
      f'The vocabularies are for {sorted(vocabularies)}, add_eos is for {sorted(ends)}.',
    ),
    add_eos=checks.Expectation(
      f'False for {without_eos}, whose vocabularies have no end-of-sequence id',
      lambda ends: not any(ends[feature] for feature in without_eos),
    ),
  )

  def table_fn(split: str, lengths: Mapping[str, int]) -> FileExamples:
    paths = find_files(splits[split], f'The split {split!r} of the task {name!r}')
    records = opening.open_records(paths, format)
    return FileExamples(
      name,
      records,
      keys,
      vocabularies,
      ends,
      tuple(preprocessors),
      lengths,
      literal_sentinels,
    )

  return BuiltinTask(
    name=name,
    splits=tuple(splits),
    vocabularies=vocabularies,
    table_fn=table_fn,
    metric_fns=metric_fns,
    postprocess_fn=postprocess_fn,
    record_keys=keys,
  )
