"""The grouped expert MLP for CPU: a scan over experts, and in it a loop over tiles of an expert's rows.

Each expert has as many tiles as its rows need, so the cost follows the rows whatever their distribution. An expert's
last tile may run into the next expert's rows: these are overwritten when their own expert comes, so nothing is padded
and the forward pass masks nothing but the end. Weights enter as the scan's inputs and their gradients leave as its
outputs. The experts come one after the other: right for a CPU, which has all cores in every product, and wrong for a
GPU.
"""

import functools

import jax
import jax.numpy as jnp

from moe.dispatch.mlp import activate
from moe.dispatch.types import MlpParams, MlpSpec
from t5x_lite.errors import ConfigError

_SMALLEST_TILE = 16
_LARGEST_TILE = 256


def tile_rows(num_rows: int, num_experts: int) -> int:
  """Returns how many rows a tile has: about the rows of an expert, within bounds."""
  per_expert = max(num_rows // num_experts, 1)
  return min(max(1 << (per_expert - 1).bit_length(), _SMALLEST_TILE), _LARGEST_TILE)


def tiled_mlp(params: MlpParams, rows: jax.Array, group_sizes: jax.Array, spec: MlpSpec,
              keep: jax.Array | None = None) -> jax.Array:
  """Lets every expert transform its rows (see `grouped_mlp` for arguments and result)."""
  if rows.shape[0] == 0 or params.num_experts == 0:
    return jnp.zeros(rows.shape, spec.dtype)
  return _tiled_mlp(spec, params, rows.astype(spec.dtype), group_sizes, keep)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled_mlp(spec, params, rows, group_sizes, keep):
  return _forward(spec, params, rows, group_sizes, keep, save=False)[0]


def _tiled_fwd(spec, params, rows, group_sizes, keep):
  y, pre = _forward(spec, params, rows, group_sizes, keep, save=True)
  return y, (params, rows, group_sizes, keep, pre)


def _pad(x, num_rows):
  return jnp.pad(x, ((0, num_rows), (0, 0)))


def _tile_of(x, start, size):
  return jax.lax.dynamic_slice_in_dim(x, start, size)


def _put(x, update, start):
  return jax.lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), start, axis=0)


def _dot(a, b, dims=((1,), (0,)), dtype=jnp.float32):
  return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=dtype)


def _project(x, kernel, bias, dtype):
  y = _dot(x, kernel.astype(dtype), dtype=dtype)
  return y if bias is None else y + bias.astype(dtype)


def _forward(spec, params, rows, group_sizes, keep, *, save):
  """Returns (<dtype>[N, D], pre-activations <dtype>[N + tile, F] per activation, or () if they are not to be saved)."""
  num_rows, width = rows.shape
  tile = tile_rows(num_rows, params.num_experts)
  hidden_dim = params.wo.shape[1]
  padded = _pad(rows, tile)
  padded_keep = None if keep is None else _pad(keep, tile)
  ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
  total = ends[-1]
  y = jnp.zeros((num_rows + tile, width), spec.dtype)
  pre = tuple(jnp.zeros((num_rows + tile, hidden_dim), spec.dtype) for _ in params.wi) if save else ()

  def expert(carry, inputs):
    weights, end, size = inputs
    biases = weights.wi_bias or (None,) * len(weights.wi)

    def run(i, carry):
      y, pre = carry
      start = end - size + i * tile
      x = _tile_of(padded, start, tile)
      projections = [_project(x, kernel, bias, spec.dtype) for kernel, bias in zip(weights.wi, biases, strict=True)]
      hidden = activate(projections, None if keep is None else _tile_of(padded_keep, start, tile), spec)
      out = _project(hidden, weights.wo, weights.wo_bias, spec.dtype)
      out = jnp.where((start + jnp.arange(tile) < total)[:, None], out, 0)
      pre = tuple(_put(saved, new, start) for saved, new in zip(pre, projections, strict=True)) if save else ()
      return _put(y, out, start), pre

    return jax.lax.fori_loop(0, (size + tile - 1) // tile, run, carry), None

  (y, pre), _ = jax.lax.scan(expert, (y, pre), (params, ends, group_sizes))
  return y[:num_rows], pre


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(spec, residuals, grad):
  """Returns the gradients of the parameters (in their dtypes) and of the rows <dtype>[N, D]."""
  params, rows, group_sizes, keep, pre = residuals
  num_rows, width = rows.shape
  tile = tile_rows(num_rows, params.num_experts)
  padded, padded_grad = _pad(rows, tile), _pad(grad, tile)
  padded_keep = None if keep is None else _pad(keep, tile)
  ends = jnp.cumsum(group_sizes, dtype=jnp.int32)

  def expert(rows_grad, inputs):
    weights, end, size = inputs

    def run(i, carry):
      rows_grad, sums = carry
      start = end - size + i * tile
      # Rows of the next expert must not count: with a gradient of 0 they do not.
      dy = jnp.where((start + jnp.arange(tile) < end)[:, None], _tile_of(padded_grad, start, tile), 0)
      x = _tile_of(padded, start, tile)
      tile_keep = None if keep is None else _tile_of(padded_keep, start, tile)
      hidden, pull = jax.vjp(lambda pre: activate(pre, tile_keep, spec), [_tile_of(p, start, tile) for p in pre])
      dhidden = _dot(dy, weights.wo.astype(spec.dtype), ((1,), (1,)), spec.dtype)
      dpre, = pull(dhidden)
      terms = MlpParams(
          wi=tuple(_dot(x, d, ((0,), (0,))) for d in dpre), wo=_dot(hidden, dy, ((0,), (0,))),
          wi_bias=None if weights.wi_bias is None else tuple(jnp.sum(d, 0, jnp.float32) for d in dpre),
          wo_bias=None if weights.wo_bias is None else jnp.sum(dy, 0, jnp.float32))
      dx = sum(_dot(d, kernel.astype(spec.dtype), ((1,), (1,)))
               for d, kernel in zip(dpre, weights.wi, strict=True))
      return _put(rows_grad, dx, start), jax.tree.map(jnp.add, sums, terms)

    sums = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    rows_grad, sums = jax.lax.fori_loop(0, (size + tile - 1) // tile, run, (rows_grad, sums))
    return rows_grad, jax.tree.map(lambda total, w: total.astype(w.dtype), sums, weights)

  rows_grad = jnp.zeros((num_rows + tile, width), spec.dtype)
  rows_grad, params_grad = jax.lax.scan(expert, rows_grad, (params, ends, group_sizes))
  return params_grad, rows_grad[:num_rows]


@_backward.defjvp
def _backward_jvp(spec, primals, tangents):
  del spec, primals, tangents
  raise ConfigError('the grouped expert MLP has no second derivatives. Use dispatch=\'capacity\' or \'einsum\' with a '
                    'capacity factor for what needs them.')


def _tiled_bwd(spec, residuals, grad):
  params_grad, rows_grad = _backward(spec, residuals, grad)
  return params_grad, rows_grad, None, None


_tiled_mlp.defvjp(_tiled_fwd, _tiled_bwd)
