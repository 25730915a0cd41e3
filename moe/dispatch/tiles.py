"""Grouped expert MLP for CPU: a scan over experts with a loop over tiles of each expert's rows.

The cost is proportional to the rows, for any distribution: an expert has one large tile of about an even share of the
rows, then more large and small tiles for the rest; an expert with few rows has only small tiles. A tile may include
rows of later experts, which are overwritten later, so no padding is needed. Tiles read tokens by index, and the outputs
are gathered at the end, so there is no sorted copy of the tokens. Weights are inputs of the scan and their gradients
are its outputs. Temporaries are the pre-activations, which are saved, one buffer of rows, and the intermediates of a
tile.

Experts run one after the other, which suits a CPU, where each product uses all cores, but not a GPU.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from moe.dispatch.blocks import without_second_derivatives
from moe.dispatch.mlp import DropoutMask
from moe.dispatch.mlp import activate
from moe.dispatch.types import MlpParams
from moe.dispatch.types import MlpSpec
from moe.routing import plan as plans
from moe.routing.plan import RowPlan
from t5x_lite import layers

# Bounds of tile sizes. Larger tiles are not faster and need more memory for intermediates.
_SMALLEST_TILE = 16
_LARGEST_SMALL_TILE = 64
_LARGEST_TILE = 1024


def tile_sizes(num_rows: int, num_experts: int) -> tuple[int, int]:
  """Return (rows of a large tile, about `num_rows` / `num_experts`; rows of a small tile)."""
  share = max(num_rows // num_experts, 1)
  large = min(max(-(-share // _SMALLEST_TILE) * _SMALLEST_TILE, _SMALLEST_TILE), _LARGEST_TILE)
  return large, min(
    max(large // 4 // _SMALLEST_TILE * _SMALLEST_TILE, _SMALLEST_TILE), _LARGEST_SMALL_TILE
  )


def tiled_mlp(
  params: MlpParams,
  rows: jax.Array,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  balanced_rows: int | None = None,
) -> jax.Array:
  """Return the experts' outputs for their rows; see `grouped_mlp`."""
  if rows.shape[0] == 0:
    return jnp.zeros(rows.shape, spec.dtype)
  sizes = tile_sizes(balanced_rows or rows.shape[0], group_sizes.shape[0])
  return _tiled(spec, sizes, params, rows.astype(spec.dtype), None, None, group_sizes, keep)


def tiled_tokens(
  params: MlpParams,
  tokens: jax.Array,
  gates: jax.Array,
  plan: RowPlan,
  group_sizes: jax.Array,
  spec: MlpSpec,
  keep: DropoutMask | None = None,
  balanced_rows: int | None = None,
) -> jax.Array:
  """Return the sums of the experts' outputs for tokens, weighted by the gates.

  Args:
    params: parameters of the experts.
    tokens: <float>[S, D], cast to `spec.dtype`.
    gates: float32 [S, K].
    plan: plan of S * K choices, sorted by expert.
    group_sizes: int32 [E], number of rows of each expert.
    spec: computation of an expert.
    keep: hidden units that dropout keeps in the S * K rows; None for all.
    balanced_rows: number of rows if loads are balanced; None for all. It decides the sizes of tiles.

  Returns:
    <spec.dtype>[S, D].
  """
  if gates.size == 0:
    return jnp.zeros(tokens.shape, spec.dtype)
  sizes = tile_sizes(balanced_rows or gates.size, group_sizes.shape[0])
  return _tiled(spec, sizes, params, tokens.astype(spec.dtype), gates, plan, group_sizes, keep)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _tiled(spec, sizes, params, x, gates, plan, group_sizes, keep):
  return _forward(spec, sizes, params, x, gates, plan, group_sizes, keep, save=False)[0]


def _tiled_fwd(spec, sizes, params, x, gates, plan, group_sizes, keep):
  y, pre = _forward(spec, sizes, params, x, gates, plan, group_sizes, keep, save=True)
  pre = checkpoint_name(pre, 'expert_hidden')
  return checkpoint_name(y, 'expert_output'), (params, x, gates, plan, group_sizes, keep, pre)


def _tiled_bwd(spec, sizes, residuals, grad):
  params_grad, x_grad, gates_grad = _backward(spec, sizes, residuals, grad)
  return params_grad, x_grad, gates_grad, None, None, None


_tiled.defvjp(_tiled_fwd, _tiled_bwd)


class _Tiles:
  """Rows of tiles.

  Attributes:
    sizes: sizes of tiles.
    num_rows: number of rows, N.
    space: number of rows of a buffer that is large enough for all tiles.
    ends, counts: int32 [E], one past the last row of each expert, and its number of rows.
  """

  def __init__(self, sizes, x, gates, plan, group_sizes):
    if plan is None:
      self.num_rows = x.shape[0]
    else:
      self.num_rows = plan.row_choice.shape[0]
    self.sizes = sizes
    self.space = self.num_rows + self.sizes[0]
    self.counts = group_sizes.astype(jnp.int32)
    self.ends = jnp.cumsum(self.counts, dtype=jnp.int32)
    self._num_selected = None
    if gates is not None:
      self._num_selected = gates.shape[1]
    if plan is not None and gates is not None:
      # Only these arrays, with one number per row, are padded.
      pad = (0, self.sizes[0])
      self._choices = jnp.pad(plan.row_choice, pad)
      self._gates = jnp.take(gates.reshape(-1), self._choices, mode='clip')

  def zeros(self, width, dtype):
    """Return an empty buffer of rows.

    It depends on the routing: the compiler would make constant buffers of all layers at the start of a program.
    """
    return jnp.full((self.space, width), jnp.where(self.ends[-1] < 0, 1, 0), dtype)

  def rows(self, start, size):
    """Return int32 [size], the rows of a tile; beyond the end, the last row."""
    return jnp.minimum(start + jnp.arange(size, dtype=jnp.int32), self.num_rows - 1)

  def sources(self, start, size):
    """Return int32 [size], the tokens of the rows of a tile."""
    if self._num_selected is None:
      return self.rows(start, size)
    return jax.lax.dynamic_slice_in_dim(self._choices, start, size) // self._num_selected

  def gates(self, start, size):
    """Return float32 [size, 1], or None if rows have none."""
    if self._num_selected is None:
      return None
    return jax.lax.dynamic_slice_in_dim(self._gates, start, size)[:, None]

  def over_expert(self, run, carry, start, count):
    """Run all tiles of an expert: a large one, more full large tiles, and small tiles for the rest.

    The first tile is not in a loop, so that sums over tiles start with its terms instead of zeros. If the expert has
    few rows, all tiles are small.

    Args:
      run: (tile size, start, valid rows) -> (results of the rows, terms of sums over rows).
      carry: buffers of rows for the results.
      start: first row of the expert.
      count: number of rows of the expert.

    Returns:
      (carry, sums).
    """
    large, small = self.sizes
    is_large = count > large // 2

    def first():
      return run(large, start, count)

    def nothing():
      return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(first))

    results, sums = jax.lax.cond(is_large, first, nothing)
    carry = _put_all(carry, results, start)

    def loop(size, num_tiles, done, carry, sums):
      def tile(i, state):
        carry, sums = state
        offset = done + i * size
        results, terms = run(size, start + offset, count - offset)
        return _put_all(carry, results, start + offset), jax.tree.map(jnp.add, sums, terms)

      return jax.lax.fori_loop(0, num_tiles, tile, (carry, sums))

    done = jnp.where(is_large, large, 0)
    if self.num_rows >= 2 * large:
      num_full = jnp.maximum(count - done, 0) // large
      carry, sums = loop(large, num_full, done, carry, sums)
      done += num_full * large
    rest = jnp.maximum(count - done, 0)
    return loop(small, (rest + small - 1) // small, done, carry, sums)


def _take(x, index):
  return jnp.take(x, index, axis=0, mode='clip')


def _slice(x, start, size):
  return jax.lax.dynamic_slice_in_dim(x, start, size)


def _put(x, update, start):
  return jax.lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), start, axis=0)


def _put_all(buffers, updates, start):
  return jax.tree.map(lambda x, update: _put(x, update, start), buffers, updates)


def _dot(a, b, contracted, dtype=jnp.float32):
  contracting_dims = ((contracted[0],), (contracted[1],))
  batch_dims = ((), ())
  return jax.lax.dot_general(a, b, (contracting_dims, batch_dims), preferred_element_type=dtype)


def _project(x, kernel, bias, dtype):
  operands = layers.operand_dtype(kernel, dtype)
  y = _dot(x.astype(operands), kernel.astype(operands), (1, 0), dtype)
  if bias is None:
    return y
  return y + bias.astype(dtype)


def _forward(spec, sizes, params, x, gates, plan, group_sizes, keep, *, save):
  """Return (y like x, pre-activations <dtype>[N + largest tile, F] per activation, or () if not to be saved)."""
  tiles = _Tiles(sizes, x, gates, plan, group_sizes)
  total = tiles.ends[-1]

  def expert(carry, inputs):
    weights, end, count = inputs
    biases = weights.wi_bias or (None,) * len(weights.wi)

    def run(size, start, num_valid):
      del num_valid
      tokens = _take(x, tiles.sources(start, size))
      pre = [
        _project(tokens, kernel, bias, spec.dtype)
        for kernel, bias in zip(weights.wi, biases, strict=True)
      ]
      tile_keep = None
      if keep is not None:
        tile_keep = keep.of_rows(tiles.rows(start, size))
      hidden = activate(pre, tile_keep, spec)
      out = _project(hidden, weights.wo, weights.wo_bias, spec.dtype)
      gate = tiles.gates(start, size)
      if gate is not None:
        out = (out.astype(jnp.float32) * gate).astype(spec.dtype)
      is_row = start + jnp.arange(size) < total
      out = jnp.where(is_row[:, None], out, 0)
      if save:
        return (out, tuple(pre)), ()
      return (out, ()), ()

    carry, _ = tiles.over_expert(run, carry, end - count, count)
    return carry, None

  if save:
    saved = tuple(tiles.zeros(params.wo.shape[1], spec.dtype) for _ in params.wi)
  else:
    saved = ()
  y = tiles.zeros(x.shape[1], spec.dtype)
  (y, saved), _ = jax.lax.scan(expert, (y, saved), (params, tiles.ends, tiles.counts))
  if plan is None:
    return y[: tiles.num_rows], saved
  return plans.sum_of_choices(y, plan, x.shape[0]), saved


@functools.partial(without_second_derivatives, static_argnums=(0, 1))
def _backward(spec, sizes, residuals, grad):
  """Return the gradients of parameters (in their dtypes), x and gates."""
  params, x, gates, plan, group_sizes, keep, pre = residuals
  tiles = _Tiles(sizes, x, gates, plan, group_sizes)

  def expert(carry, inputs):
    weights, end, count = inputs

    def run(size, start, num_valid):
      source = tiles.sources(start, size)
      # Rows of other experts get a gradient of 0, so that they do not contribute.
      dy = jnp.where((jnp.arange(size) < num_valid)[:, None], _take(grad, source), 0)
      tokens = _take(x, source)
      tile_keep = None
      if keep is not None:
        tile_keep = keep.of_rows(tiles.rows(start, size))
      hidden, pull = jax.vjp(
        lambda pre: activate(pre, tile_keep, spec), [_slice(p, start, size) for p in pre]
      )
      dhidden = _dot(dy, weights.wo.astype(spec.dtype), (1, 1), jnp.float32)
      gate = tiles.gates(start, size)
      dgate = None
      if gate is not None:
        # <out, dy> without `out`: <hidden @ wo + bias, dy>.
        dgate = jnp.sum(hidden.astype(jnp.float32) * dhidden, axis=1)
        if weights.wo_bias is not None:
          bias = weights.wo_bias.astype(spec.dtype).astype(jnp.float32)
          dgate += jnp.sum(bias * dy.astype(jnp.float32), axis=1)
        dhidden = dhidden * gate
        dy = (dy.astype(jnp.float32) * gate).astype(spec.dtype)
      (dpre,) = pull(dhidden.astype(spec.dtype))
      # Gradients of the expert's parameters by the rows of this tile, in float32, as tiles are summed.
      wi_grad = tuple(_dot(tokens, d, (0, 0)) for d in dpre)
      wo_grad = _dot(hidden, dy, (0, 0))
      wi_bias_grad = None
      wo_bias_grad = None
      if weights.wi_bias is not None:
        wi_bias_grad = tuple(jnp.sum(d, 0, dtype=jnp.float32) for d in dpre)
      if weights.wo_bias is not None:
        wo_bias_grad = jnp.sum(dy, 0, dtype=jnp.float32)
      terms = MlpParams(wi=wi_grad, wo=wo_grad, wi_bias=wi_bias_grad, wo_bias=wo_bias_grad)
      dx = sum(
        _dot(d, kernel.astype(spec.dtype), (1, 1))
        for d, kernel in zip(dpre, weights.wi, strict=True)
      )
      return (dx, dgate), terms

    carry, sums = tiles.over_expert(run, carry, end - count, count)
    return carry, jax.tree.map(lambda total, w: total.astype(w.dtype), sums, weights)

  x_grad = tiles.zeros(x.shape[1], spec.dtype)
  if gates is None:
    gate_grad = None
  else:
    gate_grad = jnp.zeros((tiles.space,), jnp.float32)
  (x_grad, gate_grad), params_grad = jax.lax.scan(
    expert, (x_grad, gate_grad), (params, tiles.ends, tiles.counts)
  )
  if plan is None or gates is None or gate_grad is None:  # Rows of tokens have gates.
    return params_grad, x_grad[: tiles.num_rows], None
  gates_grad = _take(gate_grad, plan.choice_row).reshape(gates.shape)
  return params_grad, plans.sum_of_choices(x_grad, plan, x.shape[0]), gates_grad
