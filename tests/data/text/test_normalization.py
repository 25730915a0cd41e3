"""Normalization tables of sentencepiece models."""

import hashlib

import pytest

from t5x_lite.data.text import normalization
from t5x_lite.errors import ConfigError


def test_t5s_table():
  """The hash is that of the table in T5's published model (Apache-2.0), with sentencepiece 0.2."""
  found = normalization.charsmap('t5')
  assert (
    hashlib.sha256(found).hexdigest()
    == '0942789e0111452f1cc446f70036e26d24458c3c7858c53cc12ca4d87531279b'
  )
  rules = normalization.read_rules(found)
  assert rules['\t'] == rules['\u200b'] == rules['\u200d'] == rules['\u3000'] == ' '
  assert (rules['\uff21'], rules['e\u0301'], rules['\ufb01']) == ('A', '\xe9', 'fi')
  assert '\u32ff' not in rules and 'a' not in rules


def test_files_in_the_current_directory_are_not_imported(tmp_path, monkeypatch):
  (tmp_path / 'sentencepiece.py').write_text('raise ValueError')
  monkeypatch.chdir(tmp_path)
  table = normalization.charsmap.__wrapped__(normalization.WHITE_SPACE)
  assert normalization.read_rules(table)['\u3000'] == ' '


def test_other_tables():
  assert normalization.charsmap('identity') == b''
  with pytest.raises(ConfigError, match="must be one of 't5', .*Did you mean 'nfkc'"):
    normalization.charsmap('nfck')
