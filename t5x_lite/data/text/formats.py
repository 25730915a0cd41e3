"""Files that are not lines of UTF-8 text, recognized by their first bytes and names, each with a remedy.

Read as lines, a table or a compressed file would give inputs without a meaning instead of an error.
"""

import codecs
import json
import pathlib
import re
from typing import NamedTuple

# Number of bytes at the beginning of a file that are searched for NUL, which text does not contain.
HEAD_SIZE = 8192
# Names that can be part of a shell command in a message.
_PLAIN = re.compile(r'[\w./+:-]+')
# Endings of names that say the format of lines, and stay when the text is decompressed or in another encoding.
_LINES = ('.csv', '.tsv', '.tab', '.jsonl', '.ndjson')
_JSON_LINES = 'JSON lines, one object such as {"inputs": "a text"} per line'
_JSON_SUFFIX = '.jsonl'


class _Kind(NamedTuple):
  """Kind of a file.

  Attributes:
    what: noun phrase for messages.
    command: shell command that writes text, with {path} and {new}, the path of the text; '' for an unknown format.
    suffix: suffix of the path of the text, if the suffix of the file is not removed.
  """

  what: str
  command: str = ''
  suffix: str = ''


def _decompressed(what: str, command: str) -> _Kind:
  return _Kind(f'compressed by {what}', f'{command} {{path}} > {{new}}')


def _table(what: str, function: str) -> _Kind:
  options = "'{new}', orient='records', lines=True"
  command = f'python -c "import pandas; pandas.{function}(\'{{path}}\').to_json({options})"'
  return _Kind(what, command, _JSON_SUFFIX)


def _text_table(delimiter: str) -> _Kind:
  reader = "csv.DictReader(open('{path}', encoding='utf-8-sig', newline='')" + delimiter
  command = f'python -c "import csv, json; [print(json.dumps(row)) for row in {reader})]" > {{new}}'
  return _Kind('a table, whose lines include the header and all columns', command, _JSON_SUFFIX)


_UTF_16 = _Kind('UTF-16 text', 'iconv -f UTF-16 -t UTF-8 {path} > {new}', '.txt')
# The longest of several matching beginnings comes first.
_BEGINNINGS: dict[bytes, _Kind] = {
  b'\x1f\x8b': _decompressed('gzip', 'gzip -dc <'),
  b'\x1f\x9d': _decompressed('compress', 'gzip -dc <'),
  b'BZh': _decompressed('bzip2', 'bzip2 -dc'),
  b'\xfd7zXZ\0': _decompressed('xz', 'xz -dc'),
  b'\x28\xb5\x2f\xfd': _decompressed('Zstandard', 'zstd -dc'),
  b'\x04\x22\x4d\x18': _decompressed('LZ4', 'lz4 -dc'),
  b'7z\xbc\xaf\x27\x1c': _Kind('a 7-Zip archive'),
  b'PK\x03\x04': _Kind('a ZIP archive, such as a spreadsheet (.xlsx)'),
  b'PK\x05\x06': _Kind('an empty ZIP archive'),
  b'\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1': _Kind('an Office document, such as a spreadsheet (.xls)'),
  b'PAR1': _table('a Parquet table', 'read_parquet'),
  b'ARROW1': _table('an Arrow or Feather table', 'read_feather'),
  b'FEA1': _table('a Feather table', 'read_feather'),
  b'ORC': _table('an ORC table', 'read_orc'),
  b'Obj\x01': _Kind('an Avro table'),
  b'SQLite format 3\0': _Kind('an SQLite database'),
  b'\x89HDF': _Kind('an HDF5 file'),
  b'\x93NUMPY': _Kind('a NumPy array'),
  b'%PDF-': _Kind('a PDF document'),
  codecs.BOM_UTF32_LE: _Kind('UTF-32 text', 'iconv -f UTF-32 -t UTF-8 {path} > {new}', '.txt'),
  codecs.BOM_UTF32_BE: _Kind('UTF-32 text', 'iconv -f UTF-32 -t UTF-8 {path} > {new}', '.txt'),
  codecs.BOM_UTF16_LE: _UTF_16,
  codecs.BOM_UTF16_BE: _UTF_16,
}
_BINARY = _Kind('a binary file or text in another encoding than UTF-8')
_HTML = _Kind('an HTML or XML document')
# Text in lines that are not inputs; a user may still ask for them.
_SUFFIXES: dict[str, _Kind] = {
  '.csv': _text_table(''),
  '.tsv': _text_table(r", delimiter='\t'"),
  '.tab': _text_table(r", delimiter='\t'"),
  '.psv': _text_table(", delimiter='|'"),
  '.html': _HTML,
  '.htm': _HTML,
  '.xhtml': _HTML,
  '.xml': _HTML,
}


def content_problem(path: str, head: bytes) -> str | None:
  """Return why a file is not text in UTF-8, with the remedy; None if it may be.

  Args:
    path: path of the file, or '-' for standard input.
    head: first `HEAD_SIZE` bytes of the file.

  >>> content_problem('a.jsonl.gz', b'\\x1f\\x8b\\x08')
  'is compressed by gzip. Convert it: `gzip -dc < a.jsonl.gz > a.jsonl`.'
  """
  is_text = _is_text(head)
  for beginning, kind in _BEGINNINGS.items():
    # A text may begin with a word such as ORC.
    is_word = beginning.isascii() and beginning.decode().isprintable()
    if head.startswith(beginning) and not (is_word and is_text):
      return _problem(path, kind)
  if b'\0' in head:
    return _problem(path, _BINARY)
  return None


def _is_text(head: bytes) -> bool:
  """Return whether the beginning of a file may be that of a text in UTF-8; its last character may be incomplete."""
  try:
    codecs.getincrementaldecoder('utf-8')().decode(head)
    return b'\0' not in head
  except UnicodeDecodeError:
    return False


def lines_problem(path: str, head: bytes) -> str | None:
  """Return why the lines of a text file are not inputs, with the remedy; None if they may be.

  Args:
    path: path of the file.
    head: first `HEAD_SIZE` bytes of the file.
  """
  kind = _SUFFIXES.get(pathlib.PurePath(path).suffix.lower())
  if kind is None and head.lstrip()[:14].lower() == b'<!doctype html':
    kind = _HTML
  if kind is None:
    return None
  problem = _problem(path, kind).removesuffix('.')
  if kind.command:
    problem += ', and set --gin.data.TextFileConfig.inputs_key to the column of the inputs'
  return f'{problem}; or pass --input_format=text to use each line as an input.'


def document_problem(path: str, head: bytes) -> str | None:
  """Return why a file is not JSON lines but one JSON document, with the remedy; otherwise None.

  Args:
    path: path of the file.
    head: first `HEAD_SIZE` bytes of the file.
  """
  first, newline, _ = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b'\n')
  first = first.strip()
  if first != b'{' and not first.startswith(b'['):
    return None
  what = 'one JSON document over several lines'
  try:
    if not any(isinstance(row, dict) for row in json.loads(first)):
      return None
    what = 'a JSON array'
  except (ValueError, RecursionError):
    if not newline:
      return None
  command = 'python -c "import json; [print(json.dumps(row)) for row in json.load(open(\'{path}\'))]" > {new}'
  return _problem(path, _Kind(what, command, '.lines.jsonl'))


def _problem(path: str, kind: _Kind) -> str:
  command = kind.command
  if not command or not _PLAIN.fullmatch(path) or path == '-':
    return f'is {kind.what}. Convert it to UTF-8 text, or to {_JSON_LINES}.'
  pure = pathlib.PurePath(path)
  new = str(pure.with_suffix('')) + kind.suffix
  if not kind.suffix and pure.with_suffix('').suffix == '':
    new += '.txt'
  if pure.suffix.lower() in _LINES and kind.suffix != _JSON_SUFFIX:
    new = path
  if new == path:
    new = f'{pure.with_suffix("")}.converted{pure.suffix}'
  return f'is {kind.what}. Convert it: `{command.format(path=path, new=new)}`.'
