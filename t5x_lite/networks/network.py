"""Base class of networks, with the attributes that models read."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn


class Network(nn.Module):
  """Base class of networks with attributes for models; for other Linen modules models use these defaults.

  Attributes:
    cache_offset: number of dims before the batch dim in the leaves of the cache, for stacked layers.
    SUPPORTS_CHUNKED_LOSS: True in a class whose `__call__` returns a `layers.OutputProjection` with
      `return_logits=False`. A subclass must declare it again.
  """

  cache_offset: ClassVar[int] = 0
  SUPPORTS_CHUNKED_LOSS: ClassVar[bool] = False

  @property
  def scanned_layers(self) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """Numbers of equal layers whose parameters the network also reads stacked, by stack; see `layer_stacks`."""
    return {}

  @property
  def min_stacked_layers(self) -> int:
    """Least number of layers that are stacked."""
    return 2

  @property
  def vocab_size(self) -> int | None:
    """Number of ids with an embedding and a logit; None if only the shape of the logits is known."""
    return None

  @property
  def loss_chunk_size(self) -> int | None:
    """Number of tokens whose logits the loss computes at once, if it is set; see `t5_config.StackConfig`."""
    return None

  def share_beams(self, cache: Mapping[str, Any], num_beams: int) -> Mapping[str, Any]:
    """Return the collection `cache` in a form that beam search need not reorder, if supported.

    Args:
      cache: cache of the rows of a batch.
      num_beams: number of beams of each row.
    """
    del num_beams
    return cache
