"""From numbers to rows: the endless order of examples that every source without TensorFlow reads.

An endless stream of positions; each position names an example (shuffled by one random order per epoch, mixed by fixed
quotas in random order). Packed, a fixed number of consecutive examples are put into rows together, and the rows of
these groups follow each other. So what stands at a position or in a group is a function of the configuration alone,
whoever asks and in whatever order: a saved position is two integers, and readers may work ahead.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from t5x_lite.data import philox
from t5x_lite.data.builtin_tasks import ExampleTable
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.features import FeatureConverter
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.errors import ConfigError

# Up to so many examples, the order of an epoch is drawn at once and kept; beyond, its places are computed one by one.
_LARGEST_KEPT_ORDER = 1 << 20
# Positions over which a mixture keeps its rates exactly: rates are honoured to one part in this many.
_MIXTURE_BLOCK = 1 << 16


class _Recent:
  """The last few results of a function of one integer; unlike those of `functools.lru_cache`, it can be pickled."""

  def __init__(self, fn: Callable[[int], Any], size: int):
    self._fn = fn
    self._size = size
    self._results: dict[int, Any] = {}

  def __call__(self, number: int) -> Any:
    results = self._results
    if number not in results:
      # A new dict: other threads may be reading the old one.
      kept = dict(list(results.items())[-self._size + 1:]) if self._size > 1 else {}
      results = self._results = {**kept, number: self._fn(number)}
    return results[number]


class Stream(abc.ABC):
  """An endless sequence of examples, by position. Threads may share it, and processes may be sent it."""

  @abc.abstractmethod
  def examples(self, positions: np.ndarray) -> list[dict[str, Any]]:
    """Returns the examples at `positions`, int64[n]."""


class TaskStream(Stream):
  """Epoch after epoch of one table."""

  def __init__(self, name: str, table: ExampleTable, seed: int, shuffle: bool):
    """Args:
      name: the task's name, which its order depends on.
      table: its examples.
      seed: of the order, and of the examples' own randomness.
      shuffle: read in random order.
    """
    self._name = name
    self._table = table
    self._seed = seed
    self._shuffle = shuffle
    self._order = _Recent(self._draw_order, 4)

  def _draw_order(self, epoch: int) -> np.ndarray:
    """Returns the order of an epoch, int64[number of examples], or the seed of it where it would be large."""
    seed = philox.fold(self._seed, self._name, 'order', epoch)
    return philox.permutation(seed, len(self._table)) if len(self._table) <= _LARGEST_KEPT_ORDER else seed

  def numbers(self, positions: np.ndarray) -> np.ndarray:
    """Returns which example of the table stands at each position, int64[n]."""
    if not self._shuffle:
      return positions
    size = len(self._table)
    epochs, places = np.divmod(positions, size)
    numbers = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
      rows = epochs == epoch
      order = self._order(epoch)
      numbers[rows] = epoch * size + (order[places[rows]] if size <= _LARGEST_KEPT_ORDER else
                                      philox.permuted(order, size, places[rows]))
    return numbers

  def examples(self, positions: np.ndarray) -> list[dict[str, Any]]:
    return self._table.examples(self._seed, self.numbers(positions))


class MixtureStream(Stream):
  """Streams drawn in proportion to their rates: in each block every stream has its quota, in random order.

  Quotas, not independent draws, so that the position within each stream follows from the position in the mixture.
  """

  def __init__(self, name: str, streams: Sequence[Stream], rates: Sequence[float], seed: int):
    """Args:
      name: the mixture's name, which the order depends on.
      streams: of its tasks.
      rates: positive numbers, one for each stream.
      seed: of the draws.

    Raises:
      ConfigError: a rate is too small beside the others.
    """
    exact = np.asarray(rates, np.float64) / sum(rates) * _MIXTURE_BLOCK
    quotas = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind='stable')[:_MIXTURE_BLOCK - quotas.sum()]] += 1
    if not quotas.all():
      raise ConfigError(f'The rates of the mixture {name!r} are {list(rates)}: the smallest is below '
                        f'1/{_MIXTURE_BLOCK} of their sum, which this source cannot draw. Raise it, or leave the task '
                        'out.')
    self._name = name
    self._streams = streams
    self._quotas = quotas
    self._seed = seed
    self._drawn = _Recent(self._draw, 2)

  def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (which stream, which of its quota) stands at each place of a block, int64[_MIXTURE_BLOCK] each."""
    order = philox.permutation(philox.fold(self._seed, self._name, 'mixture', block), _MIXTURE_BLOCK)
    chosen = np.repeat(np.arange(len(self._quotas)), self._quotas)[order]
    ranks = np.empty(_MIXTURE_BLOCK, np.int64)
    for stream, quota in enumerate(self._quotas):
      ranks[chosen == stream] = np.arange(quota)
    return chosen, ranks

  def examples(self, positions: np.ndarray) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = [{} for _ in positions]
    blocks, places = np.divmod(positions, _MIXTURE_BLOCK)
    for block in np.unique(blocks).tolist():
      chosen, ranks = self._drawn(block)
      for s, stream in enumerate(self._streams):
        rows = np.flatnonzero((blocks == block) & (chosen[places] == s))
        if len(rows):
          inner = block * self._quotas[s] + ranks[places[rows]]
          for row, example in zip(rows.tolist(), stream.examples(inner), strict=True):
            results[row] = example
    return results


class Pieces:
  """What batches are made of, by number: this process's rows of a batch, or, packed, all rows of a group of examples.

  Which example goes to which packed row is known only after all before it in the group, so that each process makes
  whole groups, rows of other processes included.
  """

  def __init__(self, stream: Stream, converter: FeatureConverter, cfg: DatasetConfig, own: slice):
    """Args:
      stream: the examples, trimmed.
      converter: makes model features of them.
      cfg: lengths, packing and batch size.
      own: which rows of a batch are this process's.
    """
    self._stream = stream
    self._converter = converter
    self._lengths = dict(cfg.task_feature_lengths)
    self._pack = cfg.pack
    self._own = own
    self._group_size = converter.pack_group_size(self._lengths)
    # From one piece's number to the next one's.
    self.step = 1 if cfg.pack else cfg.batch_size

  def make(self, number: int) -> HostBatch:
    """Returns a piece.

    Args:
      number: packed, of the group; else the position at which the batch starts.
    """
    if self._pack:
      positions = number * self._group_size + np.arange(self._group_size)
    else:
      positions = number + np.arange(self._own.start, self._own.stop)
    examples = self._stream.examples(positions)
    rows = self._converter.pack(examples, self._lengths) if self._pack else [(example,) for example in examples]
    return self._converter.convert(rows, self._lengths, self._pack)


class PieceReader(abc.ABC):
  """Gives pieces, mostly one after another; may prepare the next ones meanwhile."""

  @abc.abstractmethod
  def read(self, number: int) -> HostBatch:
    """Returns the piece of that number, often the last one again."""

  def close(self) -> None:
    """Frees threads and processes. The reader cannot be used afterwards."""


class DirectReader(PieceReader):
  """Makes a piece when it is asked for."""

  def __init__(self, pieces: Pieces):
    """Args:
      pieces: what to make.
    """
    self._made = _Recent(pieces.make, 1)

  def read(self, number: int) -> HostBatch:
    return self._made(number)
