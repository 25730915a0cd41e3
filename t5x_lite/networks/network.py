"""What networks tell models about themselves."""

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn


class Network(nn.Module):
  """Base of networks that tell models about themselves; of any other Linen module models assume these defaults.

  Attributes:
    cache_offset: number of dims before the batch dim in the leaves of the cache, as that of stacked layers may have.
  """

  cache_offset: ClassVar[int] = 0

  @property
  def vocab_size(self) -> int | None:
    """Number of ids that have an embedding and a logit; None if known by the shape of the logits only."""
    return None

  def share_beams(self, cache: Mapping[str, Any], num_beams: int) -> Mapping[str, Any]:
    """Return the collection `cache` in a form that beam search does not have to move, if there is one.

    Args:
      cache: of the rows of a batch.
      num_beams: number of beams of each row.
    """
    del num_beams
    return cache
