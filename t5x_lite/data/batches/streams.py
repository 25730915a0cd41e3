"""Endless order of the examples of all sources without TensorFlow.

Each position of the stream has an example: epochs are shuffled by a random order each, and tasks are mixed by fixed
quotas in random order. With packing, groups of a fixed number of consecutive examples are packed into rows. The example
at a position and the rows of a group are functions of the configuration, so a saved position is two integers, and
readers may prefetch.
"""

import abc
from collections.abc import Callable, Sequence
import sys
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches import philox
from t5x_lite.data.batches.features import FeatureConverter
from t5x_lite.data.builtin_tasks import ExampleTable
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import HostBatch

# The order of an epoch of up to this size is kept in memory; in a larger epoch each position is computed on demand.
_LARGEST_KEPT_ORDER = 1 << 20
# Positions per block of a mixture, in which each task has a fixed quota; rates are rounded to multiples of its inverse.
_MIXTURE_BLOCK = 1 << 16


class _Recent:
  """Cache of the last results of a function of one integer, which can be pickled, unlike `functools.lru_cache`."""

  def __init__(self, fn: Callable[[int], Any], size: int):
    self._fn = fn
    self._size = size
    self._results: dict[int, Any] = {}

  def __call__(self, number: int) -> Any:
    results = self._results
    if number not in results:
      # A new dict, since other threads may be reading the old one.
      if self._size > 1:
        kept = dict(list(results.items())[-self._size + 1 :])
      else:
        kept = {}
      results = self._results = {**kept, number: self._fn(number)}
    return results[number]


class Stream(abc.ABC):
  """An endless sequence of examples by position; may be shared by threads and pickled."""

  @abc.abstractmethod
  def num_examples(self, num_epochs: int) -> int:
    """Return the number of positions before the first example that comes after `num_epochs` epochs of its table."""

  @abc.abstractmethod
  def examples(self, positions: np.ndarray) -> list[dict[str, Any]]:
    """Return the n examples at `positions`, int64[n]."""


class TaskStream(Stream):
  """Endless sequence of the epochs of one table."""

  def __init__(self, name: str, table: ExampleTable, seed: int, shuffle: bool):
    """Args:
    name: name of the task, on which the order depends.
    table: examples of the task.
    seed: seed of the order and of the examples.
    shuffle: whether the order is random.
    """
    self._name = name
    self._table = table
    self._seed = seed
    self._shuffle = shuffle
    self._order = _Recent(self._draw_order, 4)

  def _draw_order(self, epoch: int) -> np.ndarray:
    """Return the order of an epoch, int64[number of examples], or its seed, uint64[2], if the epoch is large."""
    seed = philox.fold(self._seed, self._name, 'order', epoch)
    if len(self._table) <= _LARGEST_KEPT_ORDER:
      return philox.permutation(seed, len(self._table))
    return seed

  def numbers(self, positions: np.ndarray) -> np.ndarray:
    """Return the number of the example at each position; both int64[n]."""
    if not self._shuffle:
      return positions
    size = len(self._table)
    epochs, offsets = np.divmod(positions, size)
    numbers = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
      rows = epochs == epoch
      order = self._order(epoch)
      if size <= _LARGEST_KEPT_ORDER:
        in_epoch = order[offsets[rows]]
      else:
        in_epoch = philox.permuted(order, size, offsets[rows])
      numbers[rows] = epoch * size + in_epoch
    return numbers

  def num_examples(self, num_epochs: int) -> int:
    """See base class."""
    return num_epochs * len(self._table)

  def examples(self, positions: np.ndarray) -> list[dict[str, Any]]:
    """See base class."""
    return self._table.examples(self._seed, self.numbers(positions))


class MixtureStream(Stream):
  """Streams mixed in proportion to their rates: in each block every stream has its quota, in random order.

  With quotas instead of independent draws, the position in the mixture determines the position in each stream.
  """

  def __init__(self, name: str, streams: Sequence[Stream], rates: Sequence[float], seed: int):
    """Args:
      name: name of the mixture, on which the order depends.
      streams: streams of the tasks.
      rates: positive numbers, one for each stream.
      seed: seed of the order.

    Raises:
      ConfigError: a rate is too small compared with the others.
    """
    exact = np.asarray(rates, np.float64) / sum(rates) * _MIXTURE_BLOCK
    quotas = np.floor(exact).astype(np.int64)
    # The rest of the block goes to the streams with the largest fractions.
    num_left = _MIXTURE_BLOCK - quotas.sum()
    by_fraction = np.argsort(quotas - exact, kind='stable')
    quotas[by_fraction[:num_left]] += 1
    if not quotas.all():
      raise checks.invalid(
        f'Mixture {name}',
        'rates',
        f'numbers of at least 1/{_MIXTURE_BLOCK} of their sum',
        list(rates),
        'Raise the smallest rate, or omit the task.',
      )
    self._name = name
    self._streams = streams
    self._quotas = quotas
    self._seed = seed
    self._drawn = _Recent(self._draw, 2)

  def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of the stream, index in its quota) at each offset of a block, int64[_MIXTURE_BLOCK] each."""
    order = philox.permutation(
      philox.fold(self._seed, self._name, 'mixture', block), _MIXTURE_BLOCK
    )
    chosen = np.repeat(np.arange(len(self._quotas)), self._quotas)[order]
    ranks = np.empty(_MIXTURE_BLOCK, np.int64)
    for stream, quota in enumerate(self._quotas):
      ranks[chosen == stream] = np.arange(quota)
    return chosen, ranks

  def num_examples(self, num_epochs: int) -> int:
    """See base class."""
    ends = []
    for s, stream in enumerate(self._streams):
      block, rank = divmod(stream.num_examples(num_epochs), self._quotas[s])
      chosen, ranks = self._drawn(int(block))
      ends.append(
        int(block) * _MIXTURE_BLOCK + int(np.flatnonzero((chosen == s) & (ranks == rank))[0])
      )
    return min(ends)

  def examples(self, positions: np.ndarray) -> list[dict[str, Any]]:
    """See base class."""
    results: list[dict[str, Any]] = [{} for _ in positions]
    blocks, offsets = np.divmod(positions, _MIXTURE_BLOCK)
    for block in np.unique(blocks).tolist():
      chosen, ranks = self._drawn(block)
      for s, stream in enumerate(self._streams):
        rows = np.flatnonzero((blocks == block) & (chosen[offsets] == s))
        if len(rows):
          inner = block * self._quotas[s] + ranks[offsets[rows]]
          for row, example in zip(rows.tolist(), stream.examples(inner), strict=True):
            results[row] = example
    return results


class Pieces:
  """Pieces of batches by number: this process's rows of a batch or, with packing, all rows of a group of examples.

  The packed row of an example depends on all examples before it in the group, so each process makes entire groups, with
  the rows of other processes.
  """

  def __init__(self, stream: Stream, converter: FeatureConverter, cfg: DatasetConfig, own: slice):
    """Args:
    stream: trimmed examples.
    converter: feature converter of the model.
    cfg: options with lengths, packing and batch size.
    own: this process's rows of a batch.
    """
    self._stream = stream
    self._converter = converter
    self._lengths = dict(cfg.known_lengths)
    self._pack = cfg.pack
    self._own = own
    self._group_size = converter.pack_group_size(self._lengths)
    # Difference between the numbers of consecutive pieces.
    self.step = cfg.batch_size
    if cfg.pack:
      self.step = 1
    self._num_examples: int | None = None
    if cfg.num_epochs is not None:
      self._num_examples = stream.num_examples(cfg.num_epochs)

  def num_from(self, number: int) -> int:
    """Return the number of pieces from `number` on; of endless data, as many as can be counted.

    The last group may have fewer examples than the others; a batch is complete.
    """
    if self._num_examples is None:
      return (sys.maxsize - number) // self.step
    if self._pack:
      end = -(-self._num_examples // self._group_size)
    else:
      end = self._num_examples
    return max(0, (end - number) // self.step)

  def make(self, number: int) -> HostBatch:
    """Return a piece.

    Args:
      number: number of the group with packing; otherwise the first position of the batch.

    Returns:
      Feature name to [rows, length].
    """
    if self._pack:
      positions = number * self._group_size + np.arange(self._group_size)
      if self._num_examples is not None:
        positions = positions[: self._num_examples - int(positions[0])]
    else:
      positions = number + np.arange(self._own.start, self._own.stop)
    examples = self._stream.examples(positions)
    if self._pack:
      rows = self._converter.pack(examples, self._lengths)
    else:
      rows = [(example,) for example in examples]
    return self._converter.convert(rows, self._lengths, self._pack)


class PieceReader(abc.ABC):
  """Reader of pieces, which may prefetch the next ones."""

  @abc.abstractmethod
  def read(self, number: int) -> HostBatch:
    """Return the piece with the given number, often the same as before or the next one."""

  def close(self) -> None:  # noqa: B027  # Most readers have nothing to free.
    """Free threads and processes; the reader cannot be used afterwards."""


class DirectReader(PieceReader):
  """Reader that makes a piece on demand."""

  def __init__(self, pieces: Pieces):
    """Args:
    pieces: the pieces.
    """
    self._made = _Recent(pieces.make, 1)

  def read(self, number: int) -> HostBatch:
    """See base class."""
    return self._made(number)
