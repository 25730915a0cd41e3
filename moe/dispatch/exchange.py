"""Exchange of rows of tokens between shards: an all-to-all with parts of different sizes."""

import functools

import jax
import jax.numpy as jnp

from t5x_lite import checks

FORMS = ('ragged', 'blocks')


def select_form(backend: str) -> str:
  """Return the form of the exchange on `backend`: 'ragged' if it supports a ragged all-to-all, else 'blocks'.

  'blocks' is exact too: every pair of shards exchanges a block of the largest possible size. It moves padding, and
  temporarily needs as many rows as the receive buffer. Gathering all tokens on every shard would need fewer rows (one
  per token instead of one per choice), but not fewer with smaller buffers, and would not test the algorithm of
  accelerators.
  """
  if backend in ('gpu', 'tpu'):
    return 'ragged'
  return 'blocks'


def exchange(
  rows: jax.Array,
  sizes: jax.Array,
  num_received: int,
  block: int,
  axis_name: tuple[str, ...],
  form: str,
) -> jax.Array:
  """Send every shard its part of the rows, inside `shard_map`. The derivative is the reverse exchange.

  Args:
    rows: <float>[N, D], the parts for shard 0, 1, ... in order; rows after them are not sent.
    sizes: int32 [P, P], at [s, r] the number of rows that shard s sends to shard r; equal on all P shards.
    num_received: number of rows of the receive buffer, R, which must be sufficient.
    block: upper bound of the entries of `sizes`.
    axis_name: mesh axes of the P shards.
    form: one of `FORMS`.

  Returns:
    <float>[R, D], the parts from shard 0, 1, ... in order, then zeros.

  Raises:
    ConfigError: an unknown form.
  """
  checks.check('exchange', {'form': form}, form=checks.one_of(FORMS))
  return _exchange(num_received, block, axis_name, form, rows, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _exchange(num_received, block, axis_name, form, rows, sizes):
  if form == 'ragged':
    return _ragged(rows, sizes, num_received, axis_name)
  return _by_blocks(rows, sizes, num_received, block, axis_name)


def _exchange_fwd(num_received, block, axis_name, form, rows, sizes):
  return _exchange(num_received, block, axis_name, form, rows, sizes), (rows.shape[0], sizes)


def _exchange_bwd(num_received, block, axis_name, form, residuals, grad):
  del num_received
  num_rows, sizes = residuals
  return exchange(grad, sizes.T, num_rows, block, axis_name, form), None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _starts(sizes):
  """Return the start of each part of consecutive parts, along the last dim."""
  return (jnp.cumsum(sizes, axis=-1) - sizes).astype(jnp.int32)


def _ragged(rows, sizes, num_received, axis_name):
  shard = jax.lax.axis_index(axis_name)
  # Start of this shard's part in the buffer of every receiver.
  output_offsets = _starts(sizes.T)[:, shard]
  output = jnp.zeros((num_received, *rows.shape[1:]), rows.dtype)
  return jax.lax.ragged_all_to_all(
    rows,
    output,
    _starts(sizes[shard]),
    sizes[shard],
    output_offsets,
    sizes[:, shard],
    axis_name=axis_name,
  )


def _by_blocks(rows, sizes, num_received, block, axis_name):
  shard = jax.lax.axis_index(axis_name)
  # [receivers, block, width]: `all_to_all` moves equal parts, of which the rows after the own part are not read.
  source = _starts(sizes[shard])[:, None] + jnp.arange(block, dtype=jnp.int32)
  blocks = jnp.take(rows, source, axis=0, mode='clip')
  blocks = jax.lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)
  # [received rows]: sender of each row, then its position in the blocks; rows are ordered by sender, without gaps.
  arriving = sizes[:, shard]
  row = jnp.arange(num_received, dtype=jnp.int32)
  sender = jnp.searchsorted(jnp.cumsum(arriving), row, side='right').astype(jnp.int32)
  source = sender * block + row - jnp.take(_starts(arriving), sender, mode='clip')
  flat = blocks.reshape(-1, *blocks.shape[2:])
  received = jnp.take(flat, source, axis=0, mode='clip')
  is_filled = (sender < sizes.shape[0]).reshape(-1, *[1] * (received.ndim - 1))
  return jnp.where(is_filled, received, jnp.zeros([], received.dtype))
