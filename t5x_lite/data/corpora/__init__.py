"""The two embedded corpora, fixed files of about 130 KB, built by `scripts/build_corpora.py` in a checkout.

Both come from Python 3.11's standard library and are under its licence, which permits redistribution: see
`PSF-LICENSE.txt` and `NOTICE.txt` in this folder.
"""

import functools
import gzip
import hashlib
import json
import pathlib
from typing import NamedTuple

# Replaces the missing keyword in a line; T5's name of the first sentinel.
SENTINEL_TEXT = '<extra_id_0>'
SPLITS = ('train', 'validation')
_FOLDER = pathlib.Path(__file__).parent


class ClozeExample(NamedTuple):
  """A line of code in which `SENTINEL_TEXT` replaces `keyword`."""

  line: str
  keyword: str


@functools.cache
def _read(name: str) -> dict:
  return json.loads(gzip.decompress((_FOLDER / f'{name}.json.gz').read_bytes()))['splits']


@functools.cache
def python_keyword_cloze(split: str) -> tuple[ClozeExample, ...]:
  """Return the examples of `split` ('train': 11,000, 'validation': 1,000), in a fixed random order.

  No file of the library has lines in both splits, and no line occurs twice.
  """
  examples = [ClozeExample(line, keyword)
              for keyword, lines in _read('python_keyword_cloze')[split].items() for line in lines]
  return tuple(sorted(examples, key=lambda example: hashlib.sha256('\t'.join(example).encode('utf-8')).digest()))


@functools.cache
def python_docs(split: str) -> tuple[str, ...]:
  """Return the documents of `split`, of a few paragraphs each; neighbours have the same topic.

  Their number is a multiple of 128 ('train': 1,152, 'validation': 128), the number of documents that span corruption
  joins.
  """
  return tuple(_read('python_docs')[split])
