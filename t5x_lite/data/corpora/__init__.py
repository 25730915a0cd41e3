"""The two embedded corpora, built by `scripts/build_corpora.py` of a checkout: frozen files, free to redistribute.

Both come from Python 3.11's standard library and stay under its licence: see `PSF-LICENSE.txt` and `NOTICE.txt` beside
this file. They are small (about 130 KB each) so that a first run needs no download.
"""

import functools
import gzip
import hashlib
import json
import pathlib
from typing import NamedTuple

# What stands for the missing keyword in a line's text; T5's name of the first sentinel.
SENTINEL_TEXT = '<extra_id_0>'
SPLITS = ('train', 'validation')
_FOLDER = pathlib.Path(__file__).parent


class ClozeExample(NamedTuple):
  """A line of code in which `SENTINEL_TEXT` stands for `keyword`."""

  line: str
  keyword: str


@functools.cache
def _read(name: str) -> dict:
  return json.loads(gzip.decompress((_FOLDER / f'{name}.json.gz').read_bytes()))['splits']


@functools.cache
def python_keyword_cloze(split: str) -> tuple[ClozeExample, ...]:
  """Returns the examples of `split` ('train': 11,000, 'validation': 1,000), in a fixed order without meaning.

  No file of the library has lines in both splits, and no line occurs twice.
  """
  examples = [ClozeExample(line, keyword)
              for keyword, lines in _read('python_keyword_cloze')[split].items() for line in lines]
  return tuple(sorted(examples, key=lambda example: hashlib.sha256('\t'.join(example).encode('utf-8')).digest()))


@functools.cache
def python_docs(split: str) -> tuple[str, ...]:
  """Returns the documents of `split`: prose of some paragraphs each, neighbours coming from one topic.

  Their number is a multiple of 128 ('train': 1,152, 'validation': 128), T5's group of documents for span corruption.
  """
  return tuple(_read('python_docs')[split])
