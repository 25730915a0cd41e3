"""Kernels with a LoRA adapter merged into them, as NumPy arrays of any layout.

The dims of a kernel are described by a text with one letter each: 'i' for an input, 'o' for an output, and 's' for a
dim that A and B share, that of layers or of experts. A has the dims of the kernel without the outputs, and the rank
behind them; B has the rank in place of the inputs. So A is [embed, layers, rank] and B [rank, layers, heads, kv] for
'isoo', and A is [expert, embed, rank] and B [expert, rank, mlp] for 'sio'. Hu et al. 2021,
https://arxiv.org/abs/2106.09685
"""

from collections.abc import Mapping
import math
import string
from typing import Any

import numpy as np


def scale_of(rank: int, alpha: float, rank_stabilized: bool) -> float:
  """Return the factor of the product A B: alpha / rank, or alpha / sqrt(rank) if it is rank-stabilized.

  Rank-stabilized: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732
  """
  if rank_stabilized:
    return alpha / math.sqrt(rank)
  return alpha / rank


def scales_of(metadata: Mapping[str, Any]) -> dict[str, float]:
  """Return the factor of the product of each adapted kernel by its path, from `Lora.metadata`."""
  is_stabilized = metadata['rank_stabilized']
  return {
    path: scale_of(kernel['rank'], kernel['alpha'], is_stabilized)
    for path, kernel in metadata['kernels'].items()
  }


def is_leaf(path: str) -> bool:
  """Return True for the path of an A or a B."""
  return path.endswith(('/lora_a', '/lora_b'))


def leaves_of(kernel: str) -> tuple[str, str]:
  """Return the paths of A and B next to a kernel."""
  module = kernel.removesuffix('kernel')
  return f'{module}lora_a', f'{module}lora_b'


def merge(kernel: np.ndarray, a: np.ndarray, b: np.ndarray, dims: str, scale: float) -> np.ndarray:
  """Return kernel + scale * A B, computed in float32.

  Args:
    kernel: <float>[...], with the dims that `dims` describes.
    a: <float>[shared dims and inputs, rank].
    b: <float>[shared dims and outputs, with the rank in place of the inputs].
    dims: the letters of the kernel's dims.
    scale: factor of the product.

  Returns:
    float32, of the kernel's shape. Round it once, to the dtype in which it is stored.
  """
  named = list(zip(string.ascii_lowercase, dims, strict=False))
  of_a = [name for name, dim in named if dim != 'o']
  of_b = [name for name, dim in named if dim != 'i']
  of_b.insert(dims.index('i'), 'R')
  of_kernel = ''.join(name for name, _ in named)
  product = np.einsum(
    f'{"".join(of_a)}R,{"".join(of_b)}->{of_kernel}',
    a.astype(np.float32),
    b.astype(np.float32),
    optimize=True,
  )
  product *= np.float32(scale)
  product += kernel.astype(np.float32)
  return product
