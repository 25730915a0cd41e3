"""Allowed outputs: the trie against the set of their prefixes, and files that are invalid."""

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError

_EOS = 1


def _children(outputs):
  """Return the tokens that may follow each prefix."""
  children = {}
  for output in outputs:
    tokens = (*output, _EOS)
    for i, token in enumerate(tokens):
      children.setdefault(tokens[:i], set()).add(token)
  return children


def _random_outputs(num_outputs, vocab_size, longest, seed=0):
  rng = np.random.default_rng(seed)
  return [
    rng.integers(2, vocab_size, rng.integers(1, longest + 1)).tolist() for _ in range(num_outputs)
  ]


@pytest.mark.parametrize(
  'outputs, vocab_size',
  [
    ([[5]], 8),
    ([[2], [2, 2], [2, 2, 2], [7, 2], [7, 2]], 8),
    ([[token] for token in range(2, 300)], 300),
    (_random_outputs(400, 6, 5), 6),
    (_random_outputs(3000, 40, 3), 40),
    (_random_outputs(500, 3000, 4), 3000),
    # Gaps of the first windows are too small for some nodes.
    ([[t, u] for t in range(2, 150) for u in range(2, 4000, t)], 4000),
  ],
)
def test_each_prefix_is_followed_by_the_tokens_of_the_outputs(outputs, vocab_size):
  allowed = decoding.AllowedOutputs(outputs, _EOS)
  children = _children(outputs)
  assert allowed.max_length == max(map(len, children)) + 1
  prefixes = sorted(children)
  longest = max(map(len, prefixes))
  tokens = np.zeros((len(prefixes), longest), np.int32)
  for row, prefix in enumerate(prefixes):
    tokens[row, : len(prefix)] = prefix
  lengths = np.array([len(prefix) for prefix in prefixes])
  node = allowed.start(len(prefixes))
  for column in range(longest):
    node = jnp.where(lengths > column, allowed.advance(node, tokens[:, column]), node)
  # More logits than tokens of the outputs, as in a table of embeddings with a rounded size.
  for first in range(0, len(prefixes), 512):
    mask = np.asarray(allowed.allowed(node[first : first + 512], vocab_size + 7))
    for found, prefix in zip(mask, prefixes[first : first + 512], strict=True):
      assert set(np.flatnonzero(found)) == children[prefix], prefix


def test_a_prefix_of_no_output_is_followed_by_nothing_ever():
  allowed = decoding.AllowedOutputs([[2, 3], [4]], _EOS)
  node = allowed.start(3)
  node = allowed.advance(node, jnp.array([3, 2, 7]))
  node = allowed.advance(node, jnp.array([3, 4, 2]))
  assert not np.any(allowed.allowed(node, 9))
  for token in range(9):
    node = allowed.advance(node, jnp.full(3, token))
    assert not np.any(allowed.allowed(node, 9))


def test_nothing_follows_the_end_token():
  allowed = decoding.AllowedOutputs([[2], [2, 3]], _EOS)
  node = allowed.advance(allowed.advance(allowed.start(1), jnp.array([2])), jnp.array([_EOS]))
  assert not np.any(allowed.allowed(node, 9))


def test_the_order_and_repetitions_of_lines_do_not_matter(tmp_path):
  vocabulary = vocabularies.ByteVocabulary()
  identities = set()
  for name, text in (
    ('a', 'yes\nno\n'),
    ('b', '\ufeffno\r\nyes'),
    ('c', 'no\nyes\nno'),
    ('d', 'no\n'),
  ):
    path = tmp_path / name
    path.write_bytes(text.encode())
    allowed = decoding.read_allowed_outputs(str(path), vocabulary)
    assert allowed.eos_id == vocabulary.eos_id
    if name != 'd':
      assert allowed.max_length == 4
      assert allowed.tokens == {byte + 3 for byte in b'yesno'}
    identities.add(allowed.identity)
  assert len(identities) == 2


class _Words(vocabularies.PassThroughVocabulary):
  """Vocabulary of the words of a sentence, of which it knows some."""

  unk_id = 2

  def encode(self, text):
    return [{'yes': 5, 'no': 6, '</s>': 1}.get(word, 2) for word in text.split()]


@pytest.mark.parametrize(
  'content, message',
  [
    (None, "must be a file of UTF-8 text .*labels.txt'.* Correct the path or the file"),
    (b'', 'a file with one output a line, got .*The file is empty'),
    (b'yes\n\nno\n', "line 2 of .*labels.txt, '', has no tokens. Remove it"),
    (b'yes\n \n', "line 2 of .*labels.txt, ' ', has no tokens. Remove it"),
    (b'yes\nmaybe\n', "line 2 of .*'maybe', has characters that the vocabulary .* not know"),
    (b'no </s>\n', "line 1 of .*'no </s>', contains the text of the end token"),
    (b'\xff\xfey\x00', 'must be a file of UTF-8 text'),
  ],
)
def test_an_invalid_file_is_an_error(tmp_path, content, message):
  path = tmp_path / 'labels.txt'
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(ConfigError, match=message):
    decoding.read_allowed_outputs(str(path), _Words(9, eos_id=1))


@pytest.mark.parametrize(
  'outputs, eos_id, message',
  [
    ([], 1, 'one or more lists of one or more token ids'),
    ([[3], []], 1, 'one or more lists of one or more token ids .*Remove empty outputs'),
    ([[3, 0]], 1, 'token ids above 0 other than the end token 1, got .*The end token is added'),
    ([[3, 1]], 1, 'token ids above 0 other than the end token 1, got .*The end token is added'),
    ([[3]], None, 'eos_id` must be .*, got None. Use a vocabulary with an end-of-sequence id'),
  ],
)
def test_invalid_ids_are_an_error(outputs, eos_id, message):
  with pytest.raises(ConfigError, match=message):
    decoding.AllowedOutputs(outputs, eos_id)
