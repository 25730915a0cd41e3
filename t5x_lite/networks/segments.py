"""Division of a sequence of layers of several kinds into segments that can run as loops."""

from collections.abc import Hashable, Sequence
import functools
from typing import NamedTuple


class Segment(NamedTuple):
  """Consecutive layers: `period` layers, `repeats` times.

  Attributes:
    start: number of the first layer.
    period: number of layers that are repeated.
    repeats: number of repetitions.
  """

  start: int
  period: int
  repeats: int

  def layers_at(self, offset: int) -> range:
    """Return the numbers of the layers at position `offset` of each repetition, which are of one kind."""
    return range(self.start + offset, self.start + self.period * self.repeats, self.period)


def kinds_of(layers: Sequence[object]) -> tuple[int, ...]:
  """Return one number per layer, the index of the first equal layer.

  >>> kinds_of(['dense', 'sparse', 'dense'])
  (0, 1, 0)
  """
  return tuple(next(i for i, other in enumerate(layers) if other == layer) for layer in layers)


@functools.lru_cache(maxsize=1024)
def find_segments(kinds: tuple[Hashable, ...]) -> tuple[Segment, ...]:
  """Divide layers into segments with the fewest compiled layers, and of these divisions into the fewest segments.

  A repeated segment is compiled once, as the body of a loop. Layers without repetition are segments of one layer.

  Args:
    kinds: kind of each layer.

  >>> find_segments(('dense', 'sparse') * 6)
  (Segment(start=0, period=2, repeats=6),)
  >>> find_segments(('dense',) * 4 + ('sparse',) * 2)
  (Segment(start=0, period=1, repeats=4), Segment(start=4, period=1, repeats=2))
  """
  num_layers = len(kinds)
  # Best division of the layers from each start: (compiled layers, segments), and the first segment.
  costs = {num_layers: (0, 0)}
  first_segments: dict[int, Segment] = {}
  for start in reversed(range(num_layers)):
    candidates = []
    for segment in _segments_from(kinds, start):
      length = segment.period * segment.repeats
      layers, segments = costs[start + length]
      cost = (layers + segment.period, segments + 1)
      # Of equal costs, choose the longest first segment.
      candidates.append((cost, -length, segment))
    costs[start], _, first_segments[start] = min(candidates)
  result = []
  start = 0
  while start < num_layers:
    segment = first_segments[start]
    result.append(segment)
    start += segment.period * segment.repeats
  return tuple(result)


def _segments_from(kinds: tuple[Hashable, ...], start: int) -> list[Segment]:
  """Return all segments that start with layer `start`; those without repetition have one layer."""
  found = [Segment(start, 1, 1)]
  for period in range(1, (len(kinds) - start) // 2 + 1):
    repeats = 2
    while (
      kinds[start + period * (repeats - 1) : start + period * repeats]
      == kinds[start : start + period]
    ):
      found.append(Segment(start, period, repeats))
      repeats += 1
  return found
