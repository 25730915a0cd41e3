"""Tasks from files of records: JSON lines or array records, read example by example and prepared in plain Python.

  from t5x_lite import data

  data.register_builtin_task(data.file_task(
      name='questions',
      splits={'train': 'data/train-*.jsonl', 'validation': 'data/validation.jsonl'},
      format='jsonl',
      vocabulary=data.ByteVocabulary(extra_ids=125),
      keys={'inputs': 'question', 'targets': 'answer'},
      metric_fns=[data.exact_match]))

A record is a map of names to values. Preprocessors turn it into another one; then each task feature is made of the
value that `keys` names: a text is encoded, ids are taken as they are, and an end-of-sequence id follows. No record is
read before it is needed, so a split may be larger than the memory.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lite.data import philox, span_corruption
from t5x_lite.data.builtin_tasks import (
    MEAN_NOISE_SPAN_LENGTH,
    NOISE_DENSITY,
    BuiltinTask,
    ExampleTable,
)
from t5x_lite.data.features import trim
from t5x_lite.data.interfaces import MetricFn, identity_postprocess
from t5x_lite.data.records import JsonLines, Records, Where, find_files, parse_json, parse_record
from t5x_lite.data.text_examples import encode_text
from t5x_lite.data.vocabularies import Vocabulary, sentinel_id
from t5x_lite.errors import ConfigError, DataError, did_you_mean

FORMATS = ('jsonl', 'array_record')
_DEFAULT_KEYS = {'inputs': 'inputs', 'targets': 'targets'}
# Examples that are prepared when a table is opened: what is wrong with all of them is found then.
_NUM_TRIED = 4


class RecordContext:
  """What a preprocessor may need beside the record: feature lengths, vocabularies, and a seed.

  Attributes:
    lengths: task feature name to length in ids.
    vocabularies: task feature name to vocabulary.
  """

  def __init__(self, lengths: Mapping[str, int], vocabularies: Mapping[str, Vocabulary], seeds: np.ndarray,
               number: int):
    """Args:
      lengths: see above.
      vocabularies: see above.
      seeds: uint64[2], from which the seeds of all examples come.
      number: the example's number, counted through all epochs.
    """
    self.lengths = lengths
    self.vocabularies = vocabularies
    self._seeds = seeds
    self._number = number

  @functools.cached_property
  def seed(self) -> np.ndarray:
    """uint64[2], its own for each example, epoch and preprocessor, the same whenever the example is read."""
    return philox.member(self._seeds, self._number)


# `fn(record, context)` returns the record in another form.
Preprocessor = Callable[[dict[str, Any], RecordContext], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruption:
  """A preprocessor: T5's pretraining objective, on a random segment of each text, another one in each epoch.

  A text that is longer than a segment gives one segment per epoch, at a random place (what T5 calls a random chunk); a
  shorter one is taken as a whole, so that with short texts packing fills the rows. A text needs at least one id.

  Attributes:
    key: the name of the text, or of its ids, in the record.
    noise_density: fraction of ids that go to the targets.
    mean_noise_span_length: ids per replaced span, on average.
  """

  key: str = 'text'
  noise_density: float = NOISE_DENSITY
  mean_noise_span_length: float = MEAN_NOISE_SPAN_LENGTH

  def __post_init__(self) -> None:
    if not 0 < self.noise_density < 1:
      raise ConfigError(f'SpanCorruption.noise_density is {self.noise_density}, expected a fraction between 0 and 1.')
    if not self.mean_noise_span_length >= 1:
      raise ConfigError(f'SpanCorruption.mean_noise_span_length is {self.mean_noise_span_length}, expected at least 1.')

  def __call__(self, record: dict[str, Any], context: RecordContext) -> dict[str, Any]:
    """Returns the record with `inputs` and `targets` of ids in place of the text."""
    vocabulary = context.vocabularies['targets']
    segment_length = span_corruption.check_lengths(dict(context.lengths), self.noise_density,
                                                   self.mean_noise_span_length)
    ids = _as_ids(_value(record, self.key), vocabulary, self.key)
    if not len(ids):
      raise DataError(f'{self.key!r} is empty, and span corruption needs at least one id: leave such records out.')
    place_seed, mask_seed = philox.split(context.seed, 2)
    num_places = max(len(ids) - segment_length, 0) + 1
    first = int(philox.random_words(place_seed, 1)[0] * np.uint64(num_places) >> np.uint64(32))
    ((inputs, targets),) = span_corruption.corrupt(
        [ids[first:first + segment_length]], mask_seed[None], first_sentinel=sentinel_id(vocabulary),
        noise_density=self.noise_density, mean_noise_span_length=self.mean_noise_span_length)
    kept = {name: value for name, value in record.items() if name != self.key}
    return {**kept, 'inputs': inputs, 'targets': targets}


class FileExamples(ExampleTable):
  """The examples of one split of a `file_task`."""

  def __init__(self, name: str, records: Records, parse_fn: Callable[[bytes, object], dict[str, Any]],
               keys: Mapping[str, str], vocabularies: Mapping[str, Vocabulary], add_eos: Mapping[str, bool],
               preprocessors: Sequence[Preprocessor], lengths: Mapping[str, int]):
    """Args:
      name: the task's name, which random preprocessors depend on.
      records: what to read.
      parse_fn: of a record's bytes, and of where they stand.
      keys: task feature to the name of its value after the preprocessors.
      vocabularies: task feature to vocabulary.
      add_eos: task feature to whether it ends with an end-of-sequence id.
      preprocessors: see `file_task`.
      lengths: task feature to length; names the features that are made.
    """
    self._name = name
    self._records = records
    self._parse = parse_fn
    self._keys = dict(keys)
    self._vocabularies = vocabularies
    self._add_eos = add_eos
    self._preprocessors = preprocessors
    self._lengths = dict(lengths)

  def __len__(self) -> int:
    return len(self._records)

  @functools.cached_property
  def fingerprint(self) -> str:
    """Of the files, and of the first examples: what preprocessors and vocabularies make of them is content, too."""
    digest = hashlib.sha256(self._records.fingerprint.encode())
    for example in self.examples(0, np.arange(min(_NUM_TRIED, len(self)))):
      for feature, ids in sorted(trim(example, self._lengths, True, self.end_ids).items()):
        digest.update(f'{feature} {len(ids)} '.encode() + np.ascontiguousarray(ids, '<i4').tobytes())
    return digest.hexdigest()[:16]

  @property
  def end_ids(self) -> Mapping[str, int]:
    return {feature: self._vocabularies[feature].eos_id for feature in self._lengths if self._add_eos[feature]}

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    numbers = np.asarray(numbers).tolist()
    contents = self._records.read([number % len(self) for number in numbers])
    seeds = self._seeds(seed)
    return [self._finish(*self._prepare(seeds, number, content))
            for number, content in zip(numbers, contents, strict=True)]

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    """Returns the texts of the features, and what else the record has: postprocessors may read it."""
    (content,) = self._records.read([number % len(self)])
    record, _ = self._prepare(self._seeds(seed), number, content)
    texts = {f'{feature}_pretokenized': _as_text(record[key], key) for feature, key in self._keys.items()
             if isinstance(record.get(key), (str, bytes))}
    return {**{name: value for name, value in record.items() if name not in self._keys}, **texts}

  def _seeds(self, seed: int) -> list[np.ndarray]:
    """Returns, for each preprocessor, what its seeds come from."""
    return [philox.fold(seed, self._name, 'example', p) for p in range(len(self._preprocessors))]

  def _prepare(self, seeds: Sequence[np.ndarray], number: int, content: bytes) -> tuple[dict[str, Any], Where]:
    """Returns the record after the preprocessors, and where it stands."""
    where = Where(self._records, number % len(self))
    record = self._parse(content, where)
    for preprocessor, family in zip(self._preprocessors, seeds, strict=True):
      context = RecordContext(self._lengths, self._vocabularies, family, number)
      try:
        record = dict(preprocessor(record, context))
      except ConfigError:
        raise
      except DataError as error:
        raise DataError(f'{where}: {error}') from error
      except Exception as error:
        name = getattr(preprocessor, '__name__', type(preprocessor).__name__)
        raise DataError(f'{where}: the preprocessor {name} of the task {self._name!r} failed: {type(error).__name__}: '
                        f'{error}. Correct it, or the record.') from error
    return record, where

  def _finish(self, record: Mapping[str, Any], where: Where) -> dict[str, np.ndarray]:
    """Returns int32 ids of each feature that `lengths` names, end-of-sequence id included."""
    example = {}
    for feature in self._lengths:
      vocabulary = self._vocabularies[feature]
      try:
        ids = _as_ids(_value(record, self._keys[feature]), vocabulary, self._keys[feature])
      except DataError as error:
        raise DataError(f'{where}: {error}') from error
      if self._add_eos[feature] and not (len(ids) and ids[-1] == vocabulary.eos_id):
        ids = np.append(ids, np.int32(vocabulary.eos_id))
      example[feature] = ids
    return example


def _value(record: Mapping[str, Any], key: str) -> Any:
  if key not in record:
    raise DataError(f"there is no {key!r}.{did_you_mean(key, record)} Correct the record, or the task's keys.")
  return record[key]


def _as_text(value: str | bytes, key: str) -> str:
  try:
    return value if isinstance(value, str) else value.decode('utf-8')
  except UnicodeDecodeError as error:
    raise DataError(f'{key!r} must be a text, got bytes that are not UTF-8 ({error.reason} at byte {error.start}).'
                    ) from error


def _as_ids(value: Any, vocabulary: Vocabulary, key: str) -> np.ndarray:
  """Returns the ids of a text, or ids as they are, int32[n]; `key` names the value in messages."""
  if isinstance(value, (str, bytes)):
    try:
      return np.array(encode_text(_as_text(value, key), vocabulary), np.int32)
    except UnicodeEncodeError as error:
      raise DataError(f'{key!r} must be a text, got half of a surrogate pair at character {error.start}.') from error
  try:
    ids = np.asarray(value if len(value) else np.zeros(0, np.int32))
  except (TypeError, ValueError):
    ids = np.asarray(None)
  if ids.ndim != 1 or ids.dtype.kind not in 'iu':
    raise DataError(f'{key!r} must be a text or a list of ids, got {_shown(value)} of type {type(value).__name__}. '
                    'Correct the record, or convert the value in a preprocessor.')
  outside = ids[(ids < 0) | (ids >= vocabulary.vocab_size)]
  if len(outside):
    raise DataError(f'{key!r} must have ids from 0 to {vocabulary.vocab_size - 1}, those of the vocabulary '
                    f'{vocabulary}, got {outside[0]}.')
  return ids.astype(np.int32)


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'


def file_task(*, name: str, splits: Mapping[str, str | Sequence[str]], format: str,
              vocabulary: Vocabulary | Mapping[str, Vocabulary], keys: Mapping[str, str] | None = None,
              add_eos: bool | Mapping[str, bool] = True, preprocessors: Sequence[Preprocessor] = (),
              metric_fns: Sequence[MetricFn] = (), postprocess_fn: Callable[..., Any] = identity_postprocess
              ) -> BuiltinTask:
  """Returns a task from files, which is not registered yet.

  Args:
    name: the task's name.
    splits: split name to one or several file patterns such as `data/train-*.jsonl`. The order of the records is that of
      the sorted file names.
    format: 'jsonl' (one JSON object a line) or 'array_record' (records of JSON or msgpack; needs the extra `[grain]`).
    vocabulary: of all task features, or task feature name to vocabulary.
    keys: task feature name to the name of its value in a record. By default `inputs` and `targets` are called just so;
      a task for language models may have `targets` only.
    add_eos: whether features end with the vocabulary's end-of-sequence id, or task feature name to that.
    preprocessors: functions `fn(record, context)` that return the record in another form, one after another. One that
      needs randomness takes it from `context.seed`: a record must come out the same whenever it is read.
    metric_fns: see `BuiltinTask`.
    postprocess_fn: see `BuiltinTask`; its `example` holds what else the record has.

  Returns:
    The task. A value that is a text is encoded (`<extra_id_0>` and its like are one id each), ids are taken as they
    are; both are cut to the feature's length and end with the vocabulary's end-of-sequence id.

  Raises:
    ConfigError: an unknown format, no splits, or features without a vocabulary.
  """
  if format not in FORMATS:
    raise ConfigError(f'The task {name!r} has the format {format!r}, expected one of: {", ".join(FORMATS)}.'
                      f'{did_you_mean(str(format), FORMATS)}')
  if not splits:
    raise ConfigError(f"The task {name!r} has no splits: give file patterns such as {{'train': 'train-*.jsonl'}}.")
  keys = dict(_DEFAULT_KEYS if keys is None else keys)
  vocabularies = dict(vocabulary) if isinstance(vocabulary, Mapping) else dict.fromkeys(keys, vocabulary)
  if not keys or set(vocabularies) != set(keys):
    raise ConfigError(f'The task {name!r} has keys for the features {sorted(keys)} and vocabularies for '
                      f'{sorted(vocabularies)}: expected the same features, at least one.')

  ends = dict(add_eos) if isinstance(add_eos, Mapping) else dict.fromkeys(keys, add_eos)
  if set(ends) != set(keys):
    raise ConfigError(f'The task {name!r} has keys for the features {sorted(keys)} and add_eos for {sorted(ends)}: '
                      'expected the same features.')
  for feature, ends_with_eos in ends.items():
    if ends_with_eos and vocabularies[feature].eos_id is None:
      raise ConfigError(f'The vocabulary of {feature!r} of the task {name!r} has no end-of-sequence id: set add_eos = '
                        'False, or choose another vocabulary.')

  def table_fn(split: str, lengths: Mapping[str, int]) -> FileExamples:
    paths = find_files(splits[split], f'The split {split!r} of the task {name!r}')
    if format == 'array_record':
      from t5x_lite.data import grain_records
      records: Records = grain_records.ArrayRecords(paths)
    else:
      records = JsonLines(paths)
    return FileExamples(name, records, parse_json if format == 'jsonl' else parse_record, keys, vocabularies,
                        ends, tuple(preprocessors), lengths)

  return BuiltinTask(name=name, splits=tuple(splits), vocabularies=vocabularies, table_fn=table_fn,
                     metric_fns=metric_fns, postprocess_fn=postprocess_fn)
