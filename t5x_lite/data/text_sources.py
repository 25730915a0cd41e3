"""Custom texts as a source for inference, from a text file, a file of JSON lines, or standard input.

No task is needed: the model's vocabularies tokenize the texts. All lines are checked before any computation; a warning
has the number of each unusable line, which is skipped.
"""

import codecs
from collections.abc import Iterator, Mapping
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
from typing import IO, Any, BinaryIO

import numpy as np

from t5x_lite import checks
from t5x_lite import files
from t5x_lite.data import text_ids
from t5x_lite.data.builtin_tasks import append_eos_after_trim
from t5x_lite.data.example_sources import ConvertedSource
from t5x_lite.data.features import get_converter
from t5x_lite.data.interfaces import Example
from t5x_lite.errors import ConfigError, DataError, did_you_mean

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
  `targets_key`; empty lines are ignored. Files are UTF-8.

  Attributes:
    path: path of the file; '-' for standard input, which is read to its end first.
    task_feature_lengths: 'inputs' and 'targets' to lengths in ids; longer texts are trimmed.
    batch_size: rows of the global batch.
    file_format: 'text', 'jsonl', or 'auto': JSON lines if the file's name ends in .jsonl, .json or .ndjson.
    inputs_key: key of the input text in a JSON line.
    targets_key: key of the target text in a JSON line.
    append_eos_to_inputs: whether inputs end with the end-of-sequence id, as in T5's tasks.
    append_eos_to_targets: whether targets end with the end-of-sequence id.
    literal_sentinels: whether `<extra_id_0>` is encoded like any other text, as in a task with this option.
    name: name of the result files; by default the file's name without its suffix.
  """

  path: str
  task_feature_lengths: Mapping[str, int]
  batch_size: int
  file_format: str = 'auto'
  inputs_key: str = 'inputs'
  targets_key: str = 'targets'
  append_eos_to_inputs: bool = True
  append_eos_to_targets: bool = True
  name: str | None = None
  literal_sentinels: bool = False

  def __post_init__(self) -> None:
    count = checks.number(at_least=1, integer=True)
    checks.check(
      'TextFileConfig',
      vars(self),
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

  @property
  def is_jsonl(self) -> bool:
    """True if the lines are JSON."""
    suffix = pathlib.PurePath(self.path).suffix.lower()
    return self.file_format == 'jsonl' or (self.file_format == 'auto' and suffix in _JSONL_SUFFIXES)


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
      ConfigError: the options do not fit the model, or the file cannot have targets.
      DataError: the file cannot be read, or has no usable line.
    """
    converter = get_converter(feature_converter)
    vocabularies = {'inputs': input_vocabulary, 'targets': output_vocabulary}
    converter.check(cfg.task_feature_lengths, list(vocabularies), 'the text file')
    super().__init__(converter, cfg.task_feature_lengths)
    self._cfg = cfg
    self._vocabularies = {name: vocabularies[name] for name in cfg.task_feature_lengths}
    self._keys = {'inputs': cfg.inputs_key, 'targets': cfg.targets_key}
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
        f'a JSON-lines file with the keys {cfg.inputs_key!r} and {cfg.targets_key!r} '
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
    self.num_examples, self.num_skipped, digest = self._scan()
    self.identity = {
      'source': 'jsonl' if cfg.is_jsonl else 'text',
      'content': digest,
      'keys': dict(self._keys),
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

  def _scan(self) -> tuple[int, int, str]:
    """Return (number of examples, number of unusable lines, hash of the content); warns of unusable lines."""
    digest = hashlib.sha256()
    count = 0
    skipped = []
    with self._open() as stream:
      for number, line in enumerate(stream, start=1):
        digest.update(line)
        fields, problem = self._parse(number, line)
        count += fields is not None
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
    return count, len(skipped), digest.hexdigest()

  def _parse(self, number: int, line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Return (fields of a line with its texts under task feature names, problem).

    The fields are None for an unusable line and for an empty line of a JSON-lines file; the problem is None for a
    usable line and for an empty line.
    """
    if number == 1:
      line = line.removeprefix(codecs.BOM_UTF8)
    try:
      text = line.decode('utf-8').removesuffix('\n').removesuffix('\r')
    except UnicodeDecodeError as error:
      return None, f'not UTF-8 at byte {error.start + 1} of the line; convert the file'
    if not self._cfg.is_jsonl:
      return {self._line_feature: text}, None
    if not text.strip():
      return None, None
    try:
      found = json.loads(text)
    except (ValueError, RecursionError) as error:
      return None, f'not JSON: {str(error).partition(": line")[0]}'
    if not isinstance(found, dict):
      return None, (
        f'the line must be a JSON object such as {{"{self._keys[self._line_feature]}": "a text"}}, '
        f'got a {type(found).__name__}'
      )
    used = {}
    for feature in self._vocabularies:
      key = self._keys[feature]
      if feature not in self._required and not isinstance(found.get(key), str):
        continue
      if (problem := _field_problem(found, key)) is not None:
        return None, problem
      used[feature] = key
    others = {key: value for key, value in found.items() if key not in used.values()}
    return others | {feature: found[key] for feature, key in used.items()}, None

  def records(self, first: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the fields of the usable lines.

    Raises:
      DataError: the file has changed since this source was made.
    """
    digest = hashlib.sha256()
    count = 0
    with self._open() as stream:
      for number, line in enumerate(stream, start=1):
        digest.update(line)
        fields, _ = self._parse(number, line)
        if fields is not None:
          count += 1
          if count > first:
            yield fields
    if digest.hexdigest() != self.identity['content']:
      raise DataError(
        f'{_shown(self._cfg.path)} was changed while it was read. Rerun the command, with another '
        'output, when the file is complete.'
      )

  def prepare(self, record: dict[str, Any]) -> Example:
    """See base class."""
    row = {}
    fields = dict(record)
    is_cut = False
    for feature, vocabulary in self._vocabularies.items():
      text = fields.pop(feature, None)
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
