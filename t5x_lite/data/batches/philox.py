"""Random numbers as functions of a key and a position, equal on all machines and with all versions of NumPy.

All randomness of the sources without TensorFlow comes from this module. Philox 4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011) maps a 64-bit key and a 128-bit counter to four 32-bit words, so random access is
fast and there is no state to save. NumPy guarantees the streams of its generators only within a version. TensorFlow's
stateless functions use the same generator; the functions below derive words from a seed as TensorFlow does, so that
`span_corruption` gives the same masks as a seqio Task.

Seeds are pairs of 64-bit integers; functions accept arrays of seeds, uint64[..., 2].
"""

import math

import numpy as np
from numpy.typing import ArrayLike

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Key with which TensorFlow maps the seed of a stateless function to a key and a counter.
_SCRAMBLE_KEY = np.uint64(0x02461E29_3EC8F720)
# Four rounds suffice with a random round function; two more rounds cost little.
_NUM_FEISTEL_ROUNDS = 6
# TensorFlow's default for the seed of the graph if only the seed of the operation is set.
_DEFAULT_GRAPH_SEED = np.uint64(87654321)


def philox_words(key: ArrayLike, counter_high: ArrayLike, counter_low: ArrayLike) -> np.ndarray:
  """Return the words of the counters `counter_high * 2**64 + counter_low` with `key`.

  Args:
    key: uint64[...].
    counter_high: uint64[...].
    counter_low: uint64[...]; the shapes of the three arguments are broadcast.

  Returns:
    uint64[..., 4], each below 2**32.
  """
  keys, high, low = np.broadcast_arrays(key, counter_high, counter_low)
  c0 = low & _LOW
  c1 = low >> _SHIFT
  c2 = high & _LOW
  c3 = high >> _SHIFT
  k0 = keys & _LOW
  k1 = keys >> _SHIFT
  for _ in range(10):
    product_0 = _MULTIPLIER_0 * c0
    product_1 = _MULTIPLIER_1 * c2
    c0 = (product_1 >> _SHIFT) ^ c1 ^ k0
    c1 = product_1 & _LOW
    c2 = (product_0 >> _SHIFT) ^ c3 ^ k1
    c3 = product_0 & _LOW
    k0 = (k0 + _WEYL_0) & _LOW
    k1 = (k1 + _WEYL_1) & _LOW
  return np.stack([c0, c1, c2, c3], axis=-1)


def _join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
  return low | high << _SHIFT


def as_seeds(*columns: int | np.ndarray) -> np.ndarray:
  """Return integers or arrays, stacked in a new last dim, uint64[..., len(columns)]; negative values wrap around."""
  arrays = []
  for column in columns:
    if isinstance(column, int):
      column = column % 2**64
    arrays.append(np.asarray(column).astype(np.uint64))
  return np.stack(np.broadcast_arrays(*arrays), axis=-1)


def random_words(seeds: np.ndarray, num_words: int) -> np.ndarray:
  """Return random words for each seed, also for similar seeds such as (0, 1).

  Args:
    seeds: uint64[..., 2].
    num_words: number of words per seed.

  Returns:
    uint64[..., num_words], each below 2**32.
  """
  mixed = philox_words(_SCRAMBLE_KEY, seeds[..., 1], seeds[..., 0])
  key = _join(mixed[..., 0], mixed[..., 1])
  counter_high = _join(mixed[..., 2], mixed[..., 3])
  blocks = np.arange(-(-num_words // 4), dtype=np.uint64)
  words = philox_words(key[..., None], counter_high[..., None], blocks)
  return words.reshape(*words.shape[:-2], -1)[..., :num_words]


def uniform(seeds: np.ndarray, size: int) -> np.ndarray:
  """Return float32[..., size] in [0, 1), equal to TensorFlow's `stateless_uniform`, from 23 bits of each word."""
  words = random_words(seeds, size).astype(np.uint32)
  # A float32 in [1, 2): the exponent of 1, and 23 random bits of mantissa.
  bits = (words & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)
  return bits.view(np.float32) - np.float32(1)


def split(seeds: np.ndarray, num: int) -> np.ndarray:
  """Return `num` new seeds per seed: uint64[..., num, 2] from uint64[..., 2].

  They are equal to TensorFlow's `stateless_split` of 64-bit seeds.
  """
  words = random_words(seeds, 4 * num)
  new_seeds = _join(words[..., 0::2], words[..., 1::2])
  return new_seeds.reshape(*seeds.shape[:-1], num, 2)


def stream_values(seed: int, positions: np.ndarray) -> np.ndarray:
  """Return the elements at `positions`, int64[...], of TensorFlow's `Dataset.random(seed)`, uint64[...]."""
  positions = np.asarray(positions, np.uint64)
  # A counter gives four words.
  counters, word_numbers = np.divmod(positions, np.uint64(4))
  words = philox_words(_DEFAULT_GRAPH_SEED, np.uint64(seed % 2**64), counters)
  indices = word_numbers[..., None].astype(np.int64)
  return np.take_along_axis(words, indices, axis=-1)[..., 0]


def fold(*parts: int | str) -> np.ndarray:
  """Return a seed, uint64[2], that depends on all `parts` (integers of up to 64 bits, or names) and their order.

  >>> bool((fold(0, 'order', 3) == fold(0, 'order', 3)).all())
  True
  >>> bool((fold(0, 'order', 3) == fold(0, 'order', 4)).any())
  False
  """
  seed = np.zeros(2, np.uint64)
  for part in parts:
    if isinstance(part, int):
      values = (part,)
    else:
      values = (-1, *part.encode('utf-8'))
    for value in values:
      seed = member(seed, value)
  return seed


def member(family: np.ndarray, number: int) -> np.ndarray:
  """Return seed `number` of a family, uint64[2], equal to `fold` of the family's parts and the number.

  >>> bool((member(fold(0, 'order'), 3) == fold(0, 'order', 3)).all())
  True

  Args:
    family: a seed, uint64[2].
    number: integer of up to 64 bits.
  """
  w0, w1, w2, w3 = philox_words(family[0], family[1], np.uint64(number % 2**64))
  return np.array([_join(w0, w1), _join(w2, w3)], np.uint64)


def permutation(seed: np.ndarray, size: int) -> np.ndarray:
  """Return a random order of 0..size-1, int64[size], that depends on `seed`, uint64[2]."""
  words = random_words(seed, 2 * size)
  # Sort 64-bit keys; a stable sort orders ties, which practically never occur, equally on all machines.
  return np.argsort(_join(words[0::2], words[1::2]), kind='stable')


def permuted(seed: np.ndarray, size: int, positions: np.ndarray) -> np.ndarray:
  """Return the numbers at `positions` of a random order of 0..size-1, without computing the entire order.

  This is a cipher of the numbers below `size` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): a
  Feistel network over pairs (left, right) whose ranges multiply to `size` or slightly more, repeated for results beyond
  `size`. The order differs from that of `permutation`.

  Args:
    seed: uint64[2].
    size: number of ordered numbers, below 2**62.
    positions: int64[n] in [0, size).

  Returns:
    int64[n] in [0, size), different for different positions.
  """
  num_left = math.isqrt(size - 1) + 1
  num_right = -(-size // num_left)
  numbers = np.array(positions, np.uint64)
  todo = np.arange(len(numbers))
  while len(todo):
    left, right = np.divmod(numbers[todo], np.uint64(num_right))
    for round_number in range(0, _NUM_FEISTEL_ROUNDS, 2):
      left = _add_mixed(left, right, seed, round_number, num_left)
      right = _add_mixed(right, left, seed, round_number + 1, num_right)
    numbers[todo] = left * np.uint64(num_right) + right
    todo = todo[numbers[todo] >= size]
  return numbers.astype(np.int64)


def _add_mixed(
  half: np.ndarray, other: np.ndarray, seed: np.ndarray, round_number: int, size: int
) -> np.ndarray:
  """Return `half` plus a random function of `other`, modulo `size`; uint64[n]."""
  words = philox_words(seed[0], seed[1] ^ np.uint64(round_number), other)
  divisor = np.uint64(size)
  mixed = _join(words[..., 0], words[..., 1]) % divisor
  return (half + mixed) % divisor
