"""Custom texts as a source for inference, from a text file, a file of JSON lines, or standard input.

No task is needed: the model's vocabularies tokenize the texts. All lines are checked before any computation; a warning
has the number of each unusable line, which is skipped.
"""

import codecs
import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import difflib
import hashlib
import json
import logging
import os
import pathlib
import shutil
import stat
import sys
import tempfile
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches.features import get_converter
from t5x_lite.data.builtin_tasks import append_eos_after_trim
from t5x_lite.data.interfaces import Example
from t5x_lite.data.sources.example_sources import ConvertedSource
from t5x_lite.data.text import formats as text_formats
from t5x_lite.data.text import ids as text_ids
from t5x_lite.errors import ConfigError, DataError, did_you_mean
from t5x_lite.storage import files

FILE_FORMATS = ('auto', 'text', 'jsonl')
STANDARD_INPUT = '-'
_JSONL_SUFFIXES = ('.jsonl', '.json', '.ndjson')
# Maximal number of warnings about unusable lines.
_MAX_NAMED = 20
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFileConfig:
  """Options of a file of texts for inference, instead of a `DatasetConfig` with a task.

  In a text file each line is an input, also an empty line; for a model that has only targets, each line is a target. In
  a JSON-lines file each line is an object with a text under `inputs_key` and, if targets are needed, under
  `targets_key`; empty lines are ignored. If targets are not needed, `targets_key` may have any JSON value, which the
  results keep. Files are UTF-8; tables (.csv, .parquet), compressed files and other formats are errors.

  Attributes:
    path: path of the file; '-' for standard input, which is read to its end first.
    task_feature_lengths: 'inputs' and 'targets' to lengths in ids; longer texts are trimmed.
    batch_size: rows of the global batch.
    file_format: 'text', 'jsonl', or 'auto': JSON lines if the file's name ends in .jsonl, .json or .ndjson.
    inputs_key: key of the input text in a JSON line; None for the first of `task_keys` that a line has, or 'inputs'.
    targets_key: key of the target text in a JSON line; None as for `inputs_key`, or 'targets'.
    append_eos_to_inputs: whether inputs end with the end-of-sequence id, as in T5's tasks.
    append_eos_to_targets: whether targets end with the end-of-sequence id.
    literal_sentinels: whether `<extra_id_0>` is encoded like any other text, as in a task with this option.
    name: name of the result files; by default the file's name without its suffix.
    finds_added_tokens: whether tokens that were added to a tokenizer of Hugging Face have one id each in texts; False
      for runs of earlier versions, as `infer` sets it.
    task_keys: 'inputs' and 'targets' to the keys of the task with which the model was trained; the command `infer` sets
      them for a run with a `file_task`.
  """

  path: str
  task_feature_lengths: Mapping[str, int]
  batch_size: int
  file_format: str = 'auto'
  inputs_key: str | None = None
  targets_key: str | None = None
  append_eos_to_inputs: bool = True
  append_eos_to_targets: bool = True
  name: str | None = None
  literal_sentinels: bool = False
  finds_added_tokens: bool = True
  task_keys: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    count = checks.number(at_least=1, integer=True)
    checks.check(
      'TextFileConfig',
      {**vars(self), 'targets_key': self.targets_key or 'targets'},
      path=checks.Expectation(
        "the path of a file, or '-' for standard input",
        lambda path: isinstance(path, str) and bool(path),
      ),
      file_format=checks.one_of(FILE_FORMATS),
      batch_size=count,
      task_feature_lengths=checks.Expectation(
        "a mapping such as {'inputs': 512, 'targets': 114} to integers >= 1",
        lambda lengths: (
          isinstance(lengths, Mapping) and bool(lengths) and all(map(count.holds, lengths.values()))
        ),
      ),
      name=checks.Expectation(
        f'a name without {os.sep!r}', lambda name: bool(name) and os.sep not in name
      ).or_none(),
      targets_key=checks.Expectation(
        'different from inputs_key', lambda key: key != self.inputs_key
      ),
    )

  def keys_of(self, feature: str) -> tuple[str, ...]:
    """Return the keys under which a JSON line may have the text of a feature, in order of preference."""
    given = {'inputs': self.inputs_key, 'targets': self.targets_key}[feature]
    if given is not None:
      return (given,)
    return tuple(dict.fromkeys((*self.task_keys.get(feature, ()), feature)))

  @property
  def is_jsonl(self) -> bool:
    """True if the lines are JSON."""
    suffix = pathlib.PurePath(self.path).suffix.lower()
    return self.file_format == 'jsonl' or (self.file_format == 'auto' and suffix in _JSONL_SUFFIXES)


class _Line(NamedTuple):
  """Contents of a usable line.

  Attributes:
    texts: task feature name to text.
    labels: task feature name to a value that is not a text which a vocabulary can encode.
    others: the other fields by name.
  """

  texts: dict[str, str]
  labels: dict[str, Any]
  others: dict[str, Any]


class TextSource(ConvertedSource):
  """Source of the lines of a file as examples."""

  def __init__(
    self,
    cfg: TextFileConfig,
    feature_converter: Any,
    input_vocabulary: Any,
    output_vocabulary: Any,
    *,
    needs_targets: bool,
  ):
    """Read the entire file once, to count the examples and to find unusable lines.

    Args:
      cfg: options of the file.
      feature_converter: name that the model gives (`FEATURE_CONVERTER`).
      input_vocabulary: vocabulary of the inputs.
      output_vocabulary: vocabulary of the targets.
      needs_targets: whether targets are required, e.g. for scoring.

    Raises:
      ConfigError: the options do not fit the model, or the file cannot have targets or is a table.
      DataError: the file cannot be read, is not text, or has no usable line.
    """
    converter = get_converter(feature_converter)
    vocabularies = {'inputs': input_vocabulary, 'targets': output_vocabulary}
    converter.check(cfg.task_feature_lengths, list(vocabularies), 'the text file')
    super().__init__(converter, cfg.task_feature_lengths)
    self._cfg = cfg
    if not cfg.finds_added_tokens:
      vocabularies = {
        name: text_ids.earlier_vocabulary(each) for name, each in vocabularies.items()
      }
    self._vocabularies = {name: vocabularies[name] for name in cfg.task_feature_lengths}
    self._keys = {feature: cfg.keys_of(feature) for feature in vocabularies}
    # Numbers of usable lines by key, by feature.
    self._used_keys: dict[str, collections.Counter[str]] = {
      feature: collections.Counter() for feature in vocabularies
    }
    if 'inputs' not in self._vocabularies:  # the model has only targets
      self._required = ('targets',)
      self._line_feature = 'targets'
    else:
      if needs_targets:
        self._required = ('inputs', 'targets')
      else:
        self._required = ('inputs',)
      self._line_feature = 'inputs'
    if not cfg.is_jsonl and len(self._required) > 1:
      raise ConfigError(
        f'{_shown(cfg.path)} is a text file, which has only inputs, but scoring needs targets too. Use '
        f'a JSON-lines file with the keys {self._keys["inputs"][0]!r} and {self._keys["targets"][0]!r} '
        "(TextFileConfig.file_format='jsonl' for another suffix)."
      )
    for name, vocabulary in self._vocabularies.items():
      if isinstance(vocabulary.encode('a'), str):
        raise checks.invalid(
          '',
          'VOCABULARY',
          f'a vocabulary of texts for {name}',
          vocabulary,
          'Choose another one, or infer from a task.',
        )
    self._append_eos = {'inputs': cfg.append_eos_to_inputs, 'targets': cfg.append_eos_to_targets}
    if cfg.path == STANDARD_INPUT:
      stem = 'stdin'
    else:
      stem = pathlib.PurePath(cfg.path).stem
    self.name = cfg.name or stem
    self._spooled: BinaryIO | None = None
    if cfg.path == STANDARD_INPUT or not _is_regular(cfg.path):
      self._spooled = _spool(cfg.path)
    self._check_format()
    self.num_examples, self.num_skipped, digest = self._scan()
    self.identity = {
      'source': 'jsonl' if cfg.is_jsonl else 'text',
      'content': digest,
      'keys': {feature: self._key_of_results(feature) for feature in self._keys},
      'append_eos': dict(self._append_eos),
      'task_feature_lengths': dict(sorted(cfg.task_feature_lengths.items())),
    }
    if cfg.literal_sentinels:
      self.identity['literal_sentinels'] = True

  @contextlib.contextmanager
  def _open(self) -> Iterator[IO[bytes]]:
    if self._spooled is not None:
      self._spooled.seek(0)
      yield self._spooled
      return
    try:
      with files.path(self._cfg.path).open('rb') as stream:
        yield stream
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
      if isinstance(error, DataError) or (isinstance(error, OSError) and error.filename is None):
        raise
      why = error.strerror if isinstance(error, OSError) else error
      raise DataError(
        f'{_shown(self._cfg.path)!r} cannot be read: {why}.{_similar(self._cfg.path)}'
      ) from error

  def _check_format(self) -> None:
    """Raise if the file is not lines of text, and warn if they seem to be JSON but are read as text."""
    cfg = self._cfg
    with self._open() as stream:
      head = stream.read(text_formats.HEAD_SIZE)
    where = _shown(cfg.path)
    problem = text_formats.content_problem(cfg.path, head)
    if problem is None and cfg.is_jsonl:
      problem = text_formats.document_problem(cfg.path, head)
    if problem is not None:
      raise DataError(f'{where} must be lines of text in UTF-8, but it {problem}')
    if cfg.is_jsonl or cfg.file_format == 'text':
      return
    problem = text_formats.lines_problem(cfg.path, head)
    if problem is not None:
      raise ConfigError(f'{where} must be one input per line, but it {problem}')
    first = head.removeprefix(codecs.BOM_UTF8).partition(b'\n')[0]
    with contextlib.suppress(ValueError, RecursionError):
      found = json.loads(first)
      if isinstance(found, dict) and any(key in found for key in self._keys[self._line_feature]):
        _logger.warning(
          '%s: lines are read as texts, and line 1 is a JSON object. Pass --input_format=jsonl to use its text.',
          where,
        )

  def _key_of_results(self, feature: str) -> Any:
    """Return the key of a feature for the identity of the results; a list if lines have different keys."""
    used = sorted(self._used_keys[feature])
    if len(used) > 1:
      return used
    if used:
      return used[0]
    return self._keys[feature][-1]

  def _scan(self) -> tuple[int, int, str]:
    """Return (number of examples, number of unusable lines, hash of the content); warns of unusable lines."""
    digest = hashlib.sha256()
    count = 0
    skipped = []
    with self._open() as stream:
      for number, line in enumerate(stream, start=1):
        digest.update(line)
        found, problem = self._parse(number, line)
        count += found is not None
        if problem is not None:
          skipped.append((number, problem))
    where = _shown(self._cfg.path)
    if not count:
      if not skipped:
        reason = 'it is empty'
      else:
        reason = f'all {len(skipped)} lines are unusable. Line {skipped[0][0]}: {skipped[0][1]}'
      raise DataError(f'{where} must have at least one usable line, but {reason}.')
    for number, problem in skipped[:_MAX_NAMED]:
      _logger.warning('%s, line %d is skipped: %s.', where, number, problem)
    if len(skipped) > _MAX_NAMED:
      _logger.warning(
        '%s: %d more lines are skipped, the last is line %d.',
        where,
        len(skipped) - _MAX_NAMED,
        skipped[-1][0],
      )
    for feature, used in self._used_keys.items():
      own = [key for key in self._cfg.task_keys.get(feature, ()) if key != feature]
      if used[feature] and any(used[key] for key in own):
        _logger.warning(
          '%s: %s of %s lines have %r instead of %s, the key of the task of the run. To skip them, set '
          'TextFileConfig.%s_key=%r.',
          where,
          f'{used[feature]:,}',
          f'{count:,}',
          feature,
          ' or '.join(map(repr, own)),
          feature,
          own[0],
        )
    return count, len(skipped), digest.hexdigest()

  def _parse(self, number: int, line: bytes) -> tuple[_Line | None, str | None]:
    """Return (contents of a line, problem).

    The contents are None for an unusable line and for an empty line of a JSON-lines file; the problem is None for a
    usable line and for an empty line.
    """
    if number == 1:
      line = line.removeprefix(codecs.BOM_UTF8)
    try:
      text = line.decode('utf-8').removesuffix('\n').removesuffix('\r')
    except UnicodeDecodeError as error:
      return None, f'not UTF-8 at byte {error.start + 1} of the line; convert the file'
    if not self._cfg.is_jsonl:
      if '\0' in text:
        return None, f'NUL at character {text.index(chr(0)) + 1} of the line; text has none'
      return _Line({self._line_feature: text}, {}, {}), None
    if not text.strip():
      return None, None
    try:
      found = json.loads(text)
    except (ValueError, RecursionError) as error:
      return None, f'not JSON: {str(error).partition(": line")[0]}'
    if not isinstance(found, dict):
      return None, (
        f'the line must be a JSON object such as {{"{self._keys[self._line_feature][0]}": "a text"}}, '
        f'got a {type(found).__name__}'
      )
    texts = {}
    labels = {}
    used = {}
    for feature in self._vocabularies:
      free = [key for key in self._keys[feature] if key not in used.values()]
      key = next((key for key in free if key in found), self._keys[feature][0])
      problem = _field_problem(found, key)
      if problem is None:
        texts[feature] = found[key]
      elif feature in self._required:
        return None, problem
      elif key not in found:
        continue
      else:
        labels[feature] = found[key]
      used[feature] = key
    for feature, key in used.items():
      self._used_keys[feature][key] += 1
    others = {}
    for key, value in found.items():
      # The ids of a feature have its name.
      if key not in used.values() and key not in self._vocabularies:
        others[key] = value
    return _Line(texts, labels, others), None

  def records(self, first: int = 0) -> Iterator[_Line]:
    """Yield the contents of the usable lines.

    Raises:
      DataError: the file has changed since this source was made.
    """
    digest = hashlib.sha256()
    count = 0
    with self._open() as stream:
      for number, line in enumerate(stream, start=1):
        digest.update(line)
        found, _ = self._parse(number, line)
        if found is not None:
          count += 1
          if count > first:
            yield found
    if digest.hexdigest() != self.identity['content']:
      raise DataError(
        f'{_shown(self._cfg.path)} was changed while it was read. Rerun the command, with another '
        'output, when the file is complete.'
      )

  def prepare(self, record: _Line) -> Example:
    """See base class."""
    row = {}
    fields = dict(record.others)
    is_cut = False
    for feature, vocabulary in self._vocabularies.items():
      if feature in record.labels:
        fields[f'{feature}_pretokenized'] = record.labels[feature]
      text = record.texts.get(feature)
      if text is None:
        row[feature] = np.zeros(0, np.int32)
        continue
      fields[f'{feature}_pretokenized'] = text
      ids = text_ids.encode_text(text, vocabulary, literal_sentinels=self._cfg.literal_sentinels)
      length = self._lengths[feature]
      is_cut |= len(ids) + self._append_eos[feature] > length
      ids = np.asarray(ids, np.int32)
      if self._append_eos[feature]:
        row[feature] = append_eos_after_trim(ids, vocabulary.eos_id, length)
      else:
        row[feature] = ids[:length]
    texts = {name: value for name, value in fields.items() if name.endswith('_pretokenized')}
    return Example({**texts, **row, **fields}, row, is_cut)

  def close(self) -> None:
    """See base class."""
    if self._spooled is not None:
      self._spooled.close()


def _field_problem(found: Mapping[str, Any], key: str) -> str | None:
  """Return the problem of the field `key` of a JSON object, which must be a text; None if it is valid."""
  if key not in found:
    close = difflib.get_close_matches(key, found, n=1)
    if close:
      return f'no {key!r} (did you mean {close[0]!r}?)'
    names = ', '.join(map(repr, list(found)[:8])) or 'nothing'
    return f'no {key!r}, only {names}'
  if not isinstance(found[key], str):
    return f'{key!r} must be a text, got a value of type {type(found[key]).__name__}'
  try:
    found[key].encode('utf-8')
  except UnicodeEncodeError:
    return f'{key!r} holds half of a surrogate pair'
  return None


def _is_regular(path: str) -> bool:
  """Return True if `path` can be read twice, unlike a pipe such as the shell's <(...); `open` reports missing files."""
  if files.is_remote(path):
    return True
  try:
    mode = os.stat(path).st_mode
  except (OSError, ValueError):
    return True
  return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _spool(path: str) -> BinaryIO:
  """Return a temporary file with the contents of standard input or a pipe."""
  if path == STANDARD_INPUT:
    if sys.stdin is None:
      raise DataError(
        'Standard input must be open, got a closed stream. Pipe a file into it, or give its path.'
      )
    if sys.stdin.isatty():
      print(
        'Reading one input per line from the terminal; end with Ctrl-D.',
        file=sys.stderr,
        flush=True,
      )
    with _temporary() as spooled:
      shutil.copyfileobj(sys.stdin.buffer, spooled)
      return spooled
  with open(path, 'rb') as stream, _temporary() as spooled:
    shutil.copyfileobj(stream, spooled)
    return spooled


@contextlib.contextmanager
def _temporary() -> Iterator[BinaryIO]:
  """Yield an unnamed file, which stays open unless copying into it fails."""
  spooled = tempfile.TemporaryFile()  # noqa: SIM115  # The caller reads it later.
  try:
    yield spooled
    spooled.flush()
  except BaseException:
    spooled.close()
    raise


def _shown(path: str) -> str:
  if path == STANDARD_INPUT:
    return 'standard input'
  return path


def _similar(path: str) -> str:
  folder = files.path(path).parent
  with contextlib.suppress(OSError):
    names = [entry.name for entry in folder.iterdir() if entry.is_file()]
    return did_you_mean(pathlib.Path(path).name, names, lists_all=False)
  return ''
