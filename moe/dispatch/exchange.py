"""Rows of tokens from every shard to every other: an all-to-all whose parts differ in size."""

import functools

import jax
import jax.numpy as jnp

from t5x_lite.errors import ConfigError, did_you_mean

FORMS = ('ragged', 'blocks')


def select_form(backend: str) -> str:
  """Return how rows are moved on `backend`: 'ragged' where it has a ragged all-to-all, else 'blocks'.

  'blocks' is exact too: every pair of shards exchanges a block of the size that the largest part could have. It moves
  padding, and needs, for a moment, as many rows again as the receive buffer. To gather all tokens on every shard and to
  sum the results would need fewer rows there (one per token instead of one per choice), but no smaller buffers would
  make it smaller, and it would not try the way that accelerators go.
  """
  return 'ragged' if backend in ('gpu', 'tpu') else 'blocks'


def exchange(rows: jax.Array, sizes: jax.Array, num_received: int, block: int, axis_name: tuple[str, ...],
             form: str) -> jax.Array:
  """Send every shard its part of the rows; called inside `shard_map`. Its derivative is the way back.

  Args:
    rows: [N, D], the parts for shard 0, 1, ... one after the other; what lies behind them is not sent.
    sizes: int32 [P, P], how many rows shard s sends to shard r, at [s, r]; the same on all P shards.
    num_received: R, rows of the receive buffer; what arrives must fit into it.
    block: no entry of `sizes` is above it.
    axis_name: the mesh axes whose P shards exchange rows.
    form: one of `FORMS`.

  Returns:
    [R, D], the parts from shard 0, 1, ... one after the other, and then zeros.

  Raises:
    ConfigError: an unknown form.
  """
  if form not in FORMS:
    raise ConfigError(f'unknown form of exchange {form!r}; expected one of {", ".join(FORMS)}.'
                      f'{did_you_mean(str(form), FORMS)}')
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
  """Return where each part begins if parts lie side by side, along the last dim."""
  return (jnp.cumsum(sizes, axis=-1) - sizes).astype(jnp.int32)


def _ragged(rows, sizes, num_received, axis_name):
  shard = jax.lax.axis_index(axis_name)
  # Where this shard's part begins in the buffer of every receiver.
  output_offsets = _starts(sizes.T)[:, shard]
  output = jnp.zeros((num_received, *rows.shape[1:]), rows.dtype)
  return jax.lax.ragged_all_to_all(
      rows, output, _starts(sizes[shard]), sizes[shard], output_offsets, sizes[:, shard], axis_name=axis_name)


def _by_blocks(rows, sizes, num_received, block, axis_name):
  shard = jax.lax.axis_index(axis_name)
  # What a block has beyond its part is read by nobody.
  source = _starts(sizes[shard])[:, None] + jnp.arange(block, dtype=jnp.int32)
  blocks = jnp.take(rows, source, axis=0, mode='clip')
  blocks = jax.lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)
  arriving = sizes[:, shard]
  row = jnp.arange(num_received, dtype=jnp.int32)
  sender = jnp.searchsorted(jnp.cumsum(arriving), row, side='right').astype(jnp.int32)
  place = sender * block + row - jnp.take(_starts(arriving), sender, mode='clip')
  flat = blocks.reshape(-1, *blocks.shape[2:])
  received = jnp.take(flat, place, axis=0, mode='clip')
  is_filled = (sender < sizes.shape[0]).reshape(-1, *[1] * (received.ndim - 1))
  return jnp.where(is_filled, received, jnp.zeros([], received.dtype))
