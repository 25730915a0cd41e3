"""Texts of a user's own as a source for inference: a file of lines, a file of JSON lines, or standard input.

No task is needed: the model's vocabularies tokenize. Every line is looked at before anything is computed. One that
cannot be read is named with its number and left out, the rest is done.
"""

import codecs
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
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from t5x_lite.data import text_examples
from t5x_lite.data.builtin_tasks import append_eos_after_trim
from t5x_lite.data.example_sources import ConvertedSource
from t5x_lite.data.features import get_converter
from t5x_lite.data.interfaces import Example
from t5x_lite.errors import ConfigError, DataError, did_you_mean

FILE_FORMATS = ('auto', 'text', 'jsonl')
STANDARD_INPUT = '-'
_JSONL_SUFFIXES = ('.jsonl', '.json', '.ndjson')
# How many unusable lines are named one by one.
_MAX_NAMED = 20
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFileConfig:
  """Texts to infer from, where a `DatasetConfig` names a task.

  In a text file each line is an input, an empty line too. In a JSON-lines file each line is an object with a text
  under `inputs_key` and, where targets are wanted, under `targets_key`; empty lines mean nothing. Files are UTF-8. A
  model that reads nothing but targets takes them from the lines of a text file.

  Attributes:
    path: the file; '-' is standard input, which is read to its end first.
    task_feature_lengths: 'inputs' and 'targets' to lengths in ids; longer texts are cut.
    batch_size: rows of the global batch.
    file_format: 'text', 'jsonl', or 'auto': JSON lines if the file's name ends in .jsonl, .json or .ndjson.
    inputs_key: key of the input text in a JSON line.
    targets_key: key of the target text in a JSON line.
    append_eos_to_inputs: end inputs with the end-of-sequence id, as T5's tasks do.
    append_eos_to_targets: the same for targets.
    name: names the files of results; by default the file's own name without its ending.
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

  def __post_init__(self) -> None:
    if not isinstance(self.path, str) or not self.path:
      raise ConfigError(f"TextFileConfig.path is {self.path!r}; expected the path of a file, or '-' for standard "
                        'input.')
    if self.file_format not in FILE_FORMATS:
      raise ConfigError(f'TextFileConfig.file_format is {self.file_format!r}; expected one of '
                        f'{", ".join(map(repr, FILE_FORMATS))}.{did_you_mean(str(self.file_format), FILE_FORMATS)}')
    if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
      raise ConfigError(f'TextFileConfig.batch_size is {self.batch_size!r}; expected an integer of 1 or more.')
    if not isinstance(self.task_feature_lengths, Mapping) or not self.task_feature_lengths:
      raise ConfigError(f'TextFileConfig.task_feature_lengths is {self.task_feature_lengths!r}; expected a mapping '
                        "such as {'inputs': 512, 'targets': 114}.")
    for feature, length in self.task_feature_lengths.items():
      if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ConfigError(f'TextFileConfig.task_feature_lengths[{feature!r}] is {length!r}; expected an integer of 1 '
                          'or more.')
    if self.name is not None and (not self.name or os.sep in self.name):
      raise ConfigError(f'TextFileConfig.name is {self.name!r}; expected a name without {os.sep!r}, or None.')
    if self.inputs_key == self.targets_key:
      raise ConfigError(f'TextFileConfig.inputs_key and targets_key are both {self.inputs_key!r}; expected two keys.')

  @property
  def is_jsonl(self) -> bool:
    """Whether the lines are JSON."""
    suffix = pathlib.PurePath(self.path).suffix.lower()
    return self.file_format == 'jsonl' or (self.file_format == 'auto' and suffix in _JSONL_SUFFIXES)


class _UnusableLine(Exception):
  """Says what is wrong with a line."""


class TextSource(ConvertedSource):
  """The lines of a file as examples."""

  def __init__(self, cfg: TextFileConfig, feature_converter: Any, input_vocabulary: Any, output_vocabulary: Any, *,
               needs_targets: bool):
    """Reads the whole file once: what it is, how many examples it has, and which lines are none.

    Args:
      cfg: what to read.
      feature_converter: the name that the model gives (`FEATURE_CONVERTER`).
      input_vocabulary: of the inputs.
      output_vocabulary: of the targets.
      needs_targets: whether a line without targets is no example, as when targets are scored.

    Raises:
      ConfigError: the configuration does not fit the model, or the file cannot give what is needed.
      DataError: the file cannot be read, or no line of it is usable.
    """
    converter = get_converter(feature_converter)
    vocabularies = {'inputs': input_vocabulary, 'targets': output_vocabulary}
    converter.check(cfg.task_feature_lengths, list(vocabularies), 'the text file')
    super().__init__(converter, cfg.task_feature_lengths)
    self._cfg = cfg
    self._vocabularies = {name: vocabularies[name] for name in cfg.task_feature_lengths}
    self._keys = {'inputs': cfg.inputs_key, 'targets': cfg.targets_key}
    if 'inputs' not in self._vocabularies:  # a model of targets alone: they are what the file is for
      self._required, self._line_feature = ('targets',), 'targets'
    else:
      self._required, self._line_feature = ('inputs', 'targets') if needs_targets else ('inputs',), 'inputs'
    if not cfg.is_jsonl and len(self._required) > 1:
      raise ConfigError(f'{_shown(cfg.path)} is read as plain text, which has inputs only, but scoring needs targets '
                        f'too. Give a JSON-lines file with the keys {cfg.inputs_key!r} and {cfg.targets_key!r} '
                        "(TextFileConfig.file_format='jsonl' if its name does not say so).")
    for name, vocabulary in self._vocabularies.items():
      if isinstance(vocabulary.encode('a'), str):
        raise ConfigError(f"The model's vocabulary of {name} is {vocabulary!r}, which reads numbers; expected one that "
                          'encodes text. Choose another VOCABULARY, or infer from a task.')
    self._append_eos = {'inputs': cfg.append_eos_to_inputs, 'targets': cfg.append_eos_to_targets}
    stem = 'stdin' if cfg.path == STANDARD_INPUT else pathlib.PurePath(cfg.path).stem
    self.name = cfg.name or stem
    self._spooled: BinaryIO | None = None
    if cfg.path == STANDARD_INPUT or not _is_regular(cfg.path):
      self._spooled = _spool(cfg.path)
    self.num_examples, self.num_skipped, digest = self._look_through()
    self.identity = {
        'source': 'jsonl' if cfg.is_jsonl else 'text', 'content': digest, 'keys': dict(self._keys),
        'append_eos': dict(self._append_eos), 'task_feature_lengths': dict(sorted(cfg.task_feature_lengths.items()))}

  @contextlib.contextmanager
  def _open(self) -> Iterator[BinaryIO]:
    if self._spooled is not None:
      self._spooled.seek(0)
      yield self._spooled
      return
    try:
      with open(self._cfg.path, 'rb') as stream:
        yield stream
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
      if isinstance(error, DataError) or (isinstance(error, OSError) and error.filename is None):
        raise
      why = error.strerror if isinstance(error, OSError) else error
      raise DataError(f'{_shown(self._cfg.path)!r} cannot be read: {why}.{_similar(self._cfg.path)}') from error

  def _look_through(self) -> tuple[int, int, str]:
    """Returns (number of examples, number of unusable lines, hash of the content), and names the latter."""
    digest, count, skipped = hashlib.sha256(), 0, []
    with self._open() as stream:
      for number, line in enumerate(stream, start=1):
        digest.update(line)
        try:
          count += self._parse(number, line) is not None
        except _UnusableLine as problem:
          skipped.append((number, str(problem)))
    where = _shown(self._cfg.path)
    if not count:
      if not skipped:
        raise DataError(f'{where} is empty: it has no line to infer from.')
      raise DataError(f'None of the {len(skipped)} line(s) of {where} can be used. Line {skipped[0][0]}: '
                      f'{skipped[0][1]}.')
    for number, problem in skipped[:_MAX_NAMED]:
      _logger.warning('%s, line %d is skipped: %s.', where, number, problem)
    if len(skipped) > _MAX_NAMED:
      _logger.warning('%s: %d more lines are skipped, the last is line %d.', where, len(skipped) - _MAX_NAMED,
                      skipped[-1][0])
    return count, len(skipped), digest.hexdigest()

  def _parse(self, number: int, line: bytes) -> dict[str, Any] | None:
    """Returns the fields of a line with its texts under task feature names; None for a line that means nothing."""
    if number == 1:
      line = line.removeprefix(codecs.BOM_UTF8)
    try:
      text = line.decode('utf-8').removesuffix('\n').removesuffix('\r')
    except UnicodeDecodeError as error:
      raise _UnusableLine(f'not UTF-8 at byte {error.start + 1} of the line; convert the file') from None
    if not self._cfg.is_jsonl:
      return {self._line_feature: text}
    if not text.strip():
      return None
    try:
      found = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise _UnusableLine(f'not JSON: {str(error).partition(": line")[0]}') from None
    if not isinstance(found, dict):
      raise _UnusableLine(f'a JSON {type(found).__name__}; expected an object such as '
                          f'{{"{self._keys[self._line_feature]}": "a text"}}')
    used = {}
    for feature in self._vocabularies:
      key = self._keys[feature]
      if feature not in self._required and not isinstance(found.get(key), str):
        continue
      if key not in found:
        close = difflib.get_close_matches(key, found, n=1)
        raise _UnusableLine(f'no {key!r}' + (f' (did you mean {close[0]!r}?)' if close else
                                             f', only {", ".join(map(repr, list(found)[:8])) or "nothing"}'))
      if not isinstance(found[key], str):
        raise _UnusableLine(f'{key!r} is a {type(found[key]).__name__}; expected a text')
      try:
        found[key].encode('utf-8')
      except UnicodeEncodeError:
        raise _UnusableLine(f'{key!r} holds half of a surrogate pair, which is no text') from None
      used[feature] = key
    others = {key: value for key, value in found.items() if key not in used.values()}
    return others | {feature: found[key] for feature, key in used.items()}

  def records(self, first: int = 0) -> Iterator[dict[str, Any]]:
    """Yields the fields of the usable lines.

    Raises:
      DataError: the file is no longer what it was when this source was made.
    """
    digest, count = hashlib.sha256(), 0
    with self._open() as stream:
      for number, line in enumerate(stream, start=1):
        digest.update(line)
        with contextlib.suppress(_UnusableLine):
          fields = self._parse(number, line)
          if fields is not None:
            count += 1
            if count > first:
              yield fields
    if digest.hexdigest() != self.identity['content']:
      raise DataError(f'{_shown(self._cfg.path)} was changed while it was read. Run the same command again when it is '
                      'complete, into another output.')

  def prepare(self, record: dict[str, Any]) -> Example:
    row, fields, is_cut = {}, dict(record), False
    for feature, vocabulary in self._vocabularies.items():
      text = fields.pop(feature, None)
      if text is None:
        row[feature] = np.zeros(0, np.int32)
        continue
      fields[f'{feature}_pretokenized'] = text
      ids, length = text_examples.encode_text(text, vocabulary), self._lengths[feature]
      is_cut |= len(ids) + self._append_eos[feature] > length
      row[feature] = (append_eos_after_trim(np.asarray(ids, np.int32), vocabulary.eos_id, length)
                      if self._append_eos[feature] else np.asarray(ids[:length], np.int32))
    texts = {name: value for name, value in fields.items() if name.endswith('_pretokenized')}
    return Example({**texts, **row, **fields}, row, is_cut)

  def close(self) -> None:
    if self._spooled is not None:
      self._spooled.close()


def _is_regular(path: str) -> bool:
  """Whether `path` can be read twice; a pipe such as the shell's <(...) cannot. What is missing is left to `open`."""
  try:
    mode = os.stat(path).st_mode
  except (OSError, ValueError):
    return True
  return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _spool(path: str) -> BinaryIO:
  """Returns a temporary file with all that standard input, or a pipe, has to give."""
  if path == STANDARD_INPUT:
    if sys.stdin is None:
      raise DataError('Standard input is closed; expected lines of text. Pipe a file into it, or name the file.')
    if sys.stdin.isatty():
      print('Reading from the terminal, one input a line; end with Ctrl-D.', file=sys.stderr, flush=True)
    with _temporary() as spooled:
      shutil.copyfileobj(sys.stdin.buffer, spooled)
      return spooled
  with open(path, 'rb') as stream, _temporary() as spooled:
    shutil.copyfileobj(stream, spooled)
    return spooled


@contextlib.contextmanager
def _temporary() -> Iterator[BinaryIO]:
  """Yields a nameless file; it stays open unless copying into it fails."""
  spooled = tempfile.TemporaryFile()
  try:
    yield spooled
    spooled.flush()
  except BaseException:
    spooled.close()
    raise


def _shown(path: str) -> str:
  return 'standard input' if path == STANDARD_INPUT else path


def _similar(path: str) -> str:
  folder = pathlib.Path(path).parent
  with contextlib.suppress(OSError):
    close = did_you_mean(pathlib.Path(path).name, [entry.name for entry in folder.iterdir() if entry.is_file()])
    if close.startswith(' Did you mean'):
      return close
  return ''
