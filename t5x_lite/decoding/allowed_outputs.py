"""A fixed set of outputs as a trie in two arrays, for decoding that produces only these outputs.

A node is a position in the arrays. Its child by token t, if it has one, is at `base[node] + t`, where `parent` has the
node. The tokens that may follow a node are therefore found in one slice of `parent` of the size of the vocabulary,
whatever the number of outputs.

Reference: Aoe, "An Efficient Digital Search Algorithm by Using a Double-Array Structure" (1989).
"""

from collections.abc import Sequence
import hashlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.errors import ConfigError, InvalidFileError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted
from t5x_lite.types import Array

# Node without children and without parent, for sequences that are not a prefix of any output.
DEAD = 0
ROOT = 1
_NO_PARENT = -1
# Size of the largest file; its trie takes a few times as much on each device.
_MAX_BYTES = 2**28
# Number of positions at which the children of a node are tried at once.
_WINDOW = 64


class AllowedOutputs:
  """Trie of token sequences.

  Args:
    outputs: token ids above 0 of each output, without the end token.
    eos_id: token that ends each output.

  Attributes:
    eos_id: the end token.
    tokens: set of all tokens of the outputs, without the end token.
    max_length: number of tokens of the longest output, including the end token.
    identity: hash of the set of outputs.

  Raises:
    ConfigError: there are no outputs, or one is empty or has other ids.
  """

  def __init__(self, outputs: Sequence[Sequence[int]], eos_id: int):
    checks.check(
      'decoding.AllowedOutputs',
      locals(),
      eos_id=checks.number(
        at_least=1, integer=True, remedy='Use a vocabulary with an end-of-sequence id.'
      ),
      outputs=checks.Expectation(
        f'one or more lists of one or more token ids above 0 other than the end token {eos_id}',
        lambda outputs: (
          len(outputs) > 0 and all(min(output) > 0 and eos_id not in output for output in outputs)
        ),
        'Remove empty outputs. The end token is added.',
      ),
    )
    lengths = np.asarray([len(output) for output in outputs])
    flat = np.concatenate([np.asarray(output, np.int32) for output in outputs])
    self.eos_id = eos_id
    self.tokens = frozenset(np.unique(flat).tolist())
    self.max_length = int(lengths.max()) + 1
    # [outputs, max_length]: tokens, the end token, then -1; sorted, so that equal prefixes are adjacent.
    rows = np.full((len(outputs), self.max_length), -1, np.int32)
    is_token = np.arange(self.max_length) < lengths[:, None]
    rows[is_token] = flat
    rows[np.arange(len(outputs)), lengths] = eos_id
    rows = rows[np.lexsort(rows.T[::-1])]
    # True where a prefix occurs for the first time: one edge of the trie.
    is_new = np.ones(rows.shape, bool)
    is_new[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    is_new &= rows >= 0
    distinct = rows[is_new.any(axis=1)]
    self.identity = hashlib.sha256(distinct.tobytes()).hexdigest()[:16]
    # [outputs, max_length]: edge of each prefix, from 1, and 0 for the root. Since rows are sorted, the first
    # occurrence of a prefix is the last new edge of its column.
    number = np.cumsum(is_new).reshape(rows.shape)
    edge = np.maximum.accumulate(np.where(is_new, number, 0), axis=0)
    edge_parent = np.pad(edge[:, :-1], ((0, 0), (1, 0)))[is_new]
    self._parent, self._base = _pack(edge_parent, rows[is_new])

  def start(self, num_rows: int) -> Array:
    """Return <int32>[num_rows], the node of the empty sequence."""
    return jnp.full((num_rows,), ROOT, jnp.int32)

  def advance(self, node: Array, token: Array) -> Array:
    """Return the nodes <int32>[rows] after tokens <int32>[rows]; DEAD if no output has the prefix."""
    child = jnp.take(jnp.asarray(self._base), node) + token
    is_child = jnp.take(jnp.asarray(self._parent), child, mode='clip') == node
    return jnp.where(is_child, child, DEAD)

  def allowed(self, node: Array, vocab_size: int) -> Array:
    """Return <bool>[rows, vocab_size], True for tokens that may follow the nodes <int32>[rows]."""
    base = jnp.take(jnp.asarray(self._base), node)
    # [rows, vocab_size]; positions after the last one are clipped to it, which has no parent.
    children = base[:, None] + jnp.arange(vocab_size)
    return jnp.take(jnp.asarray(self._parent), children, mode='clip') == node[:, None]


def _pack(edge_parent: np.ndarray, edge_token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Return (parent <int32>[positions], base <int32>[positions]) of a trie.

  Args:
    edge_parent: <int>[edges], edge before each edge, numbered from 1; 0 for the root.
    edge_token: <int>[edges], token of each edge; ascending among the edges of one parent.
  """
  num_edges = len(edge_parent)
  largest = int(edge_token.max())
  order = np.argsort(edge_parent, kind='stable')
  counts = np.bincount(edge_parent, minlength=num_edges + 1)
  starts = np.cumsum(counts) - counts
  # Any base is at least 2 above the position of the root if positions start here.
  used = np.zeros(num_edges + 2 * largest + 2 * _WINDOW, bool)
  used[: largest + 2] = True
  base = np.zeros(num_edges + 1, np.int64)
  cursor = largest + 2
  several = np.flatnonzero(counts > 1)
  # Many children first: they need large gaps.
  for node in several[np.argsort(-counts[several], kind='stable')]:
    tokens = edge_token[order[starts[node] : starts[node] + counts[node]]]
    offsets = tokens - tokens[0]
    fits = np.zeros(1, bool)
    while not fits.any():
      needed = cursor + _WINDOW + largest + 1
      if needed > len(used):
        used = np.pad(used, (0, needed))
      free = cursor + np.flatnonzero(~used[cursor : cursor + _WINDOW])
      fits = ~used[free[:, None] + offsets].any(axis=1)
      if not fits.any():
        cursor += _WINDOW
    position = free[np.argmax(fits)]
    used[position + offsets] = True
    base[node] = position - tokens[0]
  # Only children fit anywhere: they fill the gaps.
  single = np.flatnonzero(counts == 1)
  used = np.pad(used, (0, len(single)))
  tokens = edge_token[order[starts[single]]]
  base[single] = np.flatnonzero(~used)[: len(single)] - tokens
  position = base[edge_parent] + edge_token
  # Position of the node after each edge; the root has no edge.
  node_position = np.concatenate([[ROOT], position])
  parent = np.full(position.max() + 2, _NO_PARENT, np.int32)
  parent[position] = node_position[edge_parent]
  base_at = np.zeros(len(parent), np.int32)
  base_at[node_position] = base
  return parent, base_at


def read_allowed_outputs(path: str, vocabulary: Any) -> AllowedOutputs:
  """Read the outputs that decoding may produce.

  Args:
    path: file of UTF-8 text with one output a line; equal lines count once.
    vocabulary: vocabulary of the targets, which encodes the lines.

  Raises:
    ConfigError: the file is missing, empty or not UTF-8, or the vocabulary cannot encode a line.
  """
  lines = read_lines('allowed_outputs', path, 'output')
  outputs = encode_lines('allowed_outputs', lines, f'of {path}', vocabulary)
  return AllowedOutputs(outputs, vocabulary.eos_id)


def read_lines(option: str, path: str, what: str) -> list[str]:
  """Return the lines of a file of UTF-8 text with one text a line.

  Args:
    option: name of the option, for errors.
    path: path of the file.
    what: noun for a text, such as 'output'.

  Raises:
    ConfigError: the file is missing, empty or not UTF-8.
  """
  try:
    text = untrusted.read_regular(files.path(path), _MAX_BYTES).decode('utf-8-sig')
  except (OSError, UnicodeDecodeError, InvalidFileError) as error:
    raise ConfigError(
      f'`{option}` must be a file of UTF-8 text with one {what} a line, got {path!r}: {error}. Correct the path or the '
      'file.'
    ) from error
  if not text:
    raise checks.invalid(
      '',
      option,
      f'a file with one {what} a line',
      path,
      f'The file is empty. Write the {what}s into it.',
    )
  # Not `splitlines`: texts may have other characters that Unicode counts as line breaks.
  lines = text.removesuffix('\n').split('\n')
  return [line.removesuffix('\r') for line in lines]


def encode_lines(
  option: str, lines: Sequence[str], source: str, vocabulary: Any
) -> list[list[int]]:
  """Return the token ids of each line, without the end token.

  Args:
    option: name of the option, for errors.
    lines: texts to encode.
    source: what has the lines, for errors, such as 'of labels.txt'.
    vocabulary: vocabulary of the targets.

  Raises:
    ConfigError: the vocabulary cannot encode a line.
  """
  encoded = []
  unknown = getattr(vocabulary, 'unk_id', None)
  for number, line in enumerate(lines, start=1):
    ids = list(vocabulary.encode(line))
    problem = ''
    if not ids:
      problem = 'has no tokens. Remove it'
    elif unknown is not None and unknown in ids:
      problem = 'has characters that the vocabulary of the targets does not know. Replace them, or remove it'
    elif vocabulary.eos_id in ids:
      problem = 'contains the text of the end token. Remove this text'
    if problem:
      raise ConfigError(
        f'`{option}` must be texts of the target vocabulary, but line {number} {source}, {line!r}, {problem}.'
      )
    encoded.append(ids)
  return encoded
