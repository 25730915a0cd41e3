"""Normalization tables of sentencepiece models, also T5's.

T5's models have the table of sentencepiece's rule nmt_nfkc of 2019. Later versions have rules for newer characters
of Unicode, and keep zero-width joiners.
"""

from collections.abc import Mapping
import functools
import os
import subprocess
import sys
import tempfile

import numpy as np

from t5x_lite import checks
from t5x_lite.data.text.packages import sentencepiece_modules

T5 = 't5'
# White space is a space, and all other characters stay: what `WhitespaceSplit` of the library tokenizers does.
WHITE_SPACE = 'white_space'
# Rules of sentencepiece.
_RULES = ('nmt_nfkc', 'nfkc', 'nmt_nfkc_cf', 'nfkc_cf', 'identity')
NAMES = (T5, WHITE_SPACE, *_RULES)
# Characters of Unicode with the property White_Space, and sentencepiece's sign of a space.
_WHITE_SPACE = '\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\u2581' + ''.join(
  map(chr, range(0x2000, 0x200B))
)
_ZERO_WIDTH_JOINER = '\u200d'
# First and last code points without rules in T5's table, which later tables of nmt_nfkc have.
_WITHOUT_RULES = (
  (0x61C, 0x61C),
  (0x32FF, 0x32FF),
  (0xA7F1, 0xA7F4),
  (0xAB69, 0xAB69),
  (0x105D2, 0x105DA),
  (0x10781, 0x107BA),
  (0x11382, 0x11390),
  (0x113B8, 0x113C9),
  (0x11930, 0x11935),
  (0x1611E, 0x16129),
  (0x16D63, 0x16D67),
  (0x1CCD6, 0x1CCF9),
  (0x1E030, 0x1E06D),
  (0x1F16C, 0x1F16C),
  (0x1F23B, 0x1F23B),
  (0x1FBF0, 0x1FBF9),
)
_COMPILER = """
import sys
import sentencepiece
normalizer = sentencepiece.SentencePieceNormalizer(rule_tsv=sys.argv[1])
sys.stdout.buffer.write(normalizer.serialized_model_proto())
"""
# Layout of a unit of the double array of the table, 32 bits.
_LABEL_MASK = np.uint32((1 << 31) | 0xFF)
_LEAF_BIT = 8
_WIDE_BIT = 9
_OFFSET_BIT = 10


@functools.cache
def charsmap(name: str) -> bytes:
  """Return the normalization table of a sentencepiece model, `precompiled_charsmap`.

  Args:
    name: 't5', 'white_space', or a rule of sentencepiece such as 'nmt_nfkc'.

  Raises:
    ConfigError: the name is unknown, or sentencepiece or protobuf is not installed.
  """
  checks.check('charsmap', {'name': name}, name=checks.one_of(NAMES))
  sentencepiece, _, _ = sentencepiece_modules()
  if name == WHITE_SPACE:
    return _compile_rules(dict.fromkeys(_WHITE_SPACE, ' '))
  if name != T5:
    return _table(sentencepiece.SentencePieceNormalizer(rule_name=name))
  newest = _table(sentencepiece.SentencePieceNormalizer(rule_name='nmt_nfkc'))
  rules = {source: target for source, target in read_rules(newest).items() if _is_in_t5(source)}
  rules[_ZERO_WIDTH_JOINER] = ' '
  return _compile_rules(rules)


def _compile_rules(rules: Mapping[str, str]) -> bytes:
  """Return the normalization table of rules, text to its replacement."""
  with tempfile.NamedTemporaryFile('w', suffix='.tsv', encoding='ascii') as file:
    file.writelines(
      f'{_hexadecimal(source)}\t{_hexadecimal(target)}\n'
      for source, target in sorted(rules.items())
    )
    file.flush()
    return _compile(file.name)


def _compile(path: str) -> bytes:
  """Return the normalization table of the rules in a file.

  sentencepiece logs its progress, and has no function that returns the log level of this process, so that a change
  could not be undone: another process compiles. With -P it imports no file of the current directory.
  """
  process = subprocess.run(
    [sys.executable, '-P', '-c', _COMPILER, path],
    capture_output=True,
    check=False,
    env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
  )
  if process.returncode:
    raise RuntimeError(f'sentencepiece could not compile rules: {process.stderr.decode()}')
  model_pb2 = sentencepiece_modules()[1]
  model = model_pb2.ModelProto.FromString(process.stdout)
  return model.normalizer_spec.precompiled_charsmap


def read_rules(table: bytes) -> Mapping[str, str]:
  """Return the rules of a normalization table: text to its replacement.

  The table is the size of a trie in bytes, the trie as a double array, and the replacements, each with a final zero.
  """
  size = int(np.frombuffer(table, '<u4', 1)[0])
  units = np.frombuffer(table, '<u4', size // 4, offset=4)  # uint32[units]
  texts = table[4 + size :]
  labels = np.arange(1, 256, dtype=np.uint32)
  nodes = np.zeros(1, np.uint32)  # uint32[nodes], all nodes of one depth
  keys = [b'']
  rules = {}
  while len(nodes):
    unit = units[nodes]
    shift = (unit >> _WIDE_BIT & 1) * 8
    bases = nodes ^ (unit >> _OFFSET_BIT << shift)  # uint32[nodes]
    for node in np.flatnonzero(unit >> _LEAF_BIT & 1).tolist():
      start = int(units[bases[node]] & np.uint32(0x7FFFFFFF))
      rules[keys[node].decode()] = texts[start : texts.index(b'\0', start)].decode()
    children = bases[:, None] ^ labels  # uint32[nodes, 255]
    inside = children < len(units)
    found = inside & ((units[np.where(inside, children, 0)] & _LABEL_MASK) == labels)
    parents, columns = np.nonzero(found)
    keys = [
      keys[parent] + bytes([column + 1])
      for parent, column in zip(parents.tolist(), columns.tolist(), strict=True)
    ]
    nodes = children[parents, columns]
  return rules


def _table(normalizer: object) -> bytes:
  """Return the table of a `SentencePieceNormalizer`."""
  _, model_pb2, _ = sentencepiece_modules()
  model = model_pb2.ModelProto.FromString(normalizer.serialized_model_proto())  # type: ignore[attr-defined]
  return model.normalizer_spec.precompiled_charsmap


def _is_in_t5(source: str) -> bool:
  """Return True if T5's table has a rule for a text, which the newest table has."""
  return not any(first <= ord(c) <= last for c in source for first, last in _WITHOUT_RULES)


def _hexadecimal(text: str) -> str:
  return ' '.join(f'{ord(c):X}' for c in text)
