"""Kernels with a LoRA adapter merged into them, as NumPy arrays of any layout.

The dims of a kernel are described by a text with one letter each: 'i' for an input, 'o' for an output, and 's' for a
dim that A and B share, that of layers or of experts. A has the dims of the kernel without the outputs, and the rank
behind them; B has the rank in place of the inputs. So A is [embed, layers, rank] and B [rank, layers, heads, kv] for
'isoo', and A is [expert, embed, rank] and B [expert, rank, mlp] for 'sio'. Hu et al. 2021,
https://arxiv.org/abs/2106.09685
"""

from collections.abc import Mapping, Sequence
import math
import string
from typing import Any

import jax.numpy as jnp
import numpy as np

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import Params


def scale_of(rank: int, alpha: float, rank_stabilized: bool) -> float:
  """Return the factor of the product A B: alpha / rank, or alpha / sqrt(rank) if it is rank-stabilized.

  Rank-stabilized: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732
  """
  if rank_stabilized:
    return alpha / math.sqrt(rank)
  return alpha / rank


def scales_of(metadata: Mapping[str, Any]) -> dict[str, float]:
  """Return the factor of each kernel by path, from `Lora.metadata`."""
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


def of_a(dims: str, values: Sequence[Any], of_rank: Any) -> tuple[Any, ...]:
  """Return the values of the dims of A, given those of the kernel's dims and that of the rank."""
  kept = [value for value, dim in zip(values, dims, strict=True) if dim != 'o']
  return (*kept, of_rank)


def of_b(dims: str, values: Sequence[Any], of_rank: Any) -> tuple[Any, ...]:
  """Return the values of the dims of B, given those of the kernel's dims and that of the rank."""
  kept = [value for value, dim in zip(values, dims, strict=True) if dim != 'i']
  kept.insert(dims.index('i'), of_rank)
  return tuple(kept)


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
  letters = string.ascii_lowercase[: len(dims)]
  letters_a = ''.join(of_a(dims, letters, 'R'))
  letters_b = ''.join(of_b(dims, letters, 'R'))
  product = np.einsum(
    f'{letters_a},{letters_b}->{letters}',
    a.astype(np.float32),
    b.astype(np.float32),
    optimize=True,
  )
  product *= np.float32(scale)
  product += kernel.astype(np.float32)
  return product


def merged_kernel(
  adapter: Mapping[str, Any], path: str, arrays: Mapping[str, Any], dtype: Any
) -> np.ndarray:
  """Return a kernel with its adapter merged into it, rounded once.

  Args:
    adapter: description of the adapter, see `Lora.metadata`.
    path: path of the kernel.
    arrays: the arrays of the kernel and of the adapter by path.
    dtype: floating-point dtype of the result.

  Raises:
    ConfigError: a sum is beyond the maximum of the dtype.
  """
  own = adapter['kernels'][path]
  scale = scale_of(own['rank'], own['alpha'], adapter['rank_stabilized'])
  kernel, a, b = (np.asarray(arrays[each]) for each in (path, *leaves_of(path)))
  merged = merge(kernel, a, b, own['dims'], scale)
  with np.errstate(over='ignore'):
    rounded = merged.astype(dtype)
  is_lost = np.isfinite(merged) & ~np.isfinite(rounded)
  if is_lost.any():
    raise ConfigError(
      f'{path} with its adapter must have values up to {float(jnp.finfo(rounded.dtype).max):.6g}, the maximum of '
      f'{rounded.dtype.name}, got {float(np.abs(merged[is_lost]).max()):.6g}. Store the result in another dtype: '
      "`convert --dtype=bfloat16`, or `RestoreCheckpointConfig.dtype = 'bfloat16'` for `export`."
    )
  return rounded


def merged_params(adapter: Mapping[str, Any], params: Params, dtype: Any) -> dict[str, Any]:
  """Return the parameters of a model without adapters, as NumPy arrays.

  Args:
    adapter: description of the adapter, see `Lora.metadata`.
    params: nested dicts of arrays, without stacked layers.
    dtype: floating-point dtype of all results.

  Raises:
    ConfigError: see `merged_kernel`.
  """
  flat = tree_utils.flatten_dict(tree_utils.to_dict(params))
  result = {}
  for path, leaf in flat.items():
    if path in adapter['kernels']:
      result[path] = merged_kernel(adapter, path, flat, dtype)
    elif not is_leaf(path):
      result[path] = np.asarray(leaf).astype(dtype)
  return tree_utils.unflatten_dict(result)
