"""The three embedded corpora, fixed files of 130 to 350 KB, built by `scripts/build_corpora.py` in a checkout.

They come from Python 3.11's standard library and are under its licence, which permits redistribution: see
`PSF-LICENSE.txt` and `NOTICE.txt` in this folder.
"""

from collections.abc import Iterable
import functools
import gzip
import hashlib
import json
import pathlib
from typing import NamedTuple

# Replaces the missing keyword or function body; T5's name of the first sentinel.
SENTINEL_TEXT = '<extra_id_0>'
SPLITS = ('train', 'validation')
# Source around a missing body: with the sentinel and the end-of-sequence id, it fits in 2048 input ids.
CONTEXT_BYTES = 2046
# Share of the context before the body; the rest follows it.
_BYTES_BEFORE = 1534
_FOLDER = pathlib.Path(__file__).parent


class ClozeExample(NamedTuple):
  """A line of code in which `SENTINEL_TEXT` replaces `keyword`."""

  line: str
  keyword: str


class FunctionExample(NamedTuple):
  """A piece of a module in which `SENTINEL_TEXT` replaces the `body` of a function."""

  source: str
  body: str


@functools.cache
def _read(name: str) -> dict:
  return json.loads(gzip.decompress((_FOLDER / f'{name}.json.gz').read_bytes()))['splits']


def _hash(example: Iterable[str]) -> bytes:
  """Return the key of a fixed random order of examples."""
  return hashlib.sha256('\t'.join(example).encode('utf-8')).digest()


@functools.cache
def python_keyword_cloze(split: str) -> tuple[ClozeExample, ...]:
  """Return the examples of `split` ('train': 11,000, 'validation': 1,000), in a fixed random order.

  No file of the library has lines in both splits, and no line occurs twice.
  """
  examples = []
  for keyword, lines in _read('python_keyword_cloze')[split].items():
    examples += [ClozeExample(line, keyword) for line in lines]
  return tuple(sorted(examples, key=_hash))


@functools.cache
def python_function_cloze(split: str) -> tuple[FunctionExample, ...]:
  """Return the examples of `split` ('train': 1,287, 'validation': 170), in a fixed random order.

  The source has whole lines, at most `CONTEXT_BYTES` bytes of ASCII without the body; a body has 64 to 511. No module
  of the library is in both splits, and no body occurs twice.
  """
  examples = []
  for module in _read('python_function_cloze')[split]:
    text = module['text']
    for start, end in module['bodies']:
      examples.append(FunctionExample(_context(text, start, end), text[start:end]))
  return tuple(sorted(examples, key=_hash))


def _context(text: str, start: int, end: int) -> str:
  """Return the lines of `text` around text[start:end], with the sentinel in its place."""
  # Near an end of the module, the other side gets the bytes that are missing there.
  num_after = min(len(text) - end, max(CONTEXT_BYTES - _BYTES_BEFORE, CONTEXT_BYTES - start))
  first = max(start - (CONTEXT_BYTES - num_after), 0)
  if first:
    first = text.index('\n', first - 1) + 1
  last = end + num_after
  if last < len(text):
    last = text.rindex('\n', end, last) + 1
  return text[first:start] + SENTINEL_TEXT + text[end:last]


@functools.cache
def python_docs(split: str) -> tuple[str, ...]:
  """Return the documents of `split`, of a few paragraphs each; neighbours have the same topic.

  Their number is a multiple of 128 ('train': 1,152, 'validation': 128), the number of documents that span corruption
  joins.
  """
  return tuple(_read('python_docs')[split])
