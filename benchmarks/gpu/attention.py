"""Part 'attention': each kernel forward and backward, with position biases or packed rows, by length.

The reference of the error is 'dot' in float32 with full precision. Programs are the value and the gradients of query,
key and value, as in training.
"""

from collections.abc import Iterator
import functools
from typing import Any

from benchmarks.gpu import items

_HEADS = 12
_HEAD_DIM = 64
_KERNELS = ('dot', 'blockwise', 'cudnn')
# Lengths, and tokens of a batch: the same number for every length. Later ones may be cut off by the limit of the part.
_SIZES = {'real': ((512, 2048, 8192, 1024, 4096), 16384), 'tiny': ((64, 128), 256)}
# Largest relative error in bfloat16, as in `correctness`.
_TOLERANCE = 4e-2
# Number of examples of a packed row.
_EXAMPLES = 4


def _loss(
  query, key, value, weights, distances, segments, *, kernel: str, dtype: str, is_packed: bool
):
  """Return a weighted sum of the outputs of an attention <float>[batch, length, heads, head_dim]."""
  import jax.numpy as jnp

  from t5x_lite import layers

  is_token = segments > 0
  options: Any = {'position': layers.DistanceBias(distances, query.shape[1])}
  if is_packed:
    # cuDNN adds no position biases within packed rows.
    options = {'query_segment_ids': segments, 'key_segment_ids': segments}
  bias = layers.make_attention_bias(is_token, is_token, arrays=False, **options)
  output = layers.dot_product_attention(
    query, key, value, bias, dtype=jnp.dtype(dtype), float32_logits=True, kernel=kernel
  )
  # Padding queries have zeros with 'cudnn' only, and count in no loss.
  output = jnp.where(is_token[:, :, None, None], output, 0)
  return jnp.sum(output.astype(jnp.float32) * weights), output


def _trace(batch: int, length: int, kernel: str, is_packed: bool, dtype: str = 'bfloat16'):
  """Return the traced gradients for shapes alone."""
  import jax
  import jax.numpy as jnp

  x = jax.ShapeDtypeStruct((batch, length, _HEADS, _HEAD_DIM), jnp.dtype(dtype))
  shapes = (
    *[x] * 3,
    jax.ShapeDtypeStruct(x.shape, jnp.float32),
    jax.ShapeDtypeStruct((_HEADS, 2 * length - 1), jnp.float32),
    jax.ShapeDtypeStruct((batch, length), jnp.int32),
  )
  loss = functools.partial(_loss, kernel=kernel, dtype=dtype, is_packed=is_packed)
  precision = 'highest' if dtype == 'float32' else None
  with jax.default_matmul_precision(precision):
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True)).trace(*shapes)


def _arrays(batch: int, length: int, is_packed: bool, dtype: str = 'bfloat16'):
  """Return random arguments of the traced function, with equal rows, whose last eighth is padding."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  keys = jax.random.split(jax.random.key(0), 5)
  shape = (1, length, _HEADS, _HEAD_DIM)

  def rows(x):
    return jnp.tile(x, (batch, *[1] * (x.ndim - 1)))

  # Rounded to bfloat16 for every dtype, so that the reference has the same inputs.
  query, key, value = (
    rows((jax.random.normal(one, shape) * scale).astype(jnp.bfloat16).astype(dtype))
    for one, scale in zip(keys[:3], (_HEAD_DIM**-0.5, 1.0, 1.0), strict=True)
  )
  weights = rows(jax.random.normal(keys[3], shape))
  distances = jax.random.normal(keys[4], (_HEADS, 2 * length - 1))
  segments = np.ones(length, np.int32)
  if is_packed:
    segments = np.arange(length, dtype=np.int32) * _EXAMPLES // length + 1
  segments[length - length // 8 :] = 0
  return query, key, value, weights, distances, rows(jnp.asarray(segments)[None])


def _measure(batch: int, length: int, is_packed: bool) -> Iterator[items.Row]:
  import jax

  form = 'packed' if is_packed else 'position biases'
  programs = items.compile_together(_programs(batch, length, is_packed))
  reference = programs['reference'].result()
  expected = jax.device_get(reference(*_arrays(1, length, is_packed, 'float32')))
  arrays = _arrays(batch, length, is_packed)
  for kernel in _KERNELS:
    row = {'length': length, 'rows': batch, 'form': form, 'kernel': kernel}
    try:
      program = programs[kernel].result()
      (_, output), grads = program(*arrays)
      output, *grads = jax.device_get([x[:1] for x in (output, *grads)])
      seconds = items.seconds_per_call(lambda program=program: program(*arrays))
      row['ms'] = 1e3 * seconds
      row['temporaries, MB'] = program.memory_analysis().temp_size_in_bytes / 1e6
      row['error of output'] = items.relative_error(output, expected[0][1])
      row['error of gradients'] = items.relative_error(grads, list(expected[1]))
      # NaN does not pass.
      errors = (row['error of output'], row['error of gradients'])
      row['passes'] = all(error <= _TOLERANCE for error in errors)
    except Exception as error:  # A kernel that cannot run must not end the others.
      row['note'] = items.note_of(error)
    yield row


def _programs(batch: int, length: int, is_packed: bool):
  programs = {
    kernel: functools.partial(_trace, batch, length, kernel, is_packed) for kernel in _KERNELS
  }
  # One row: the scores of several would not fit in float32.
  programs['reference'] = functools.partial(_trace, 1, length, 'dot', is_packed, 'float32')
  return programs


def make_items(sizes: str) -> list[items.Item]:
  """Return the items of this part."""
  lengths, num_tokens = _SIZES[sizes]
  found = []
  for length in lengths:
    for is_packed in (False, True):
      arguments = (max(1, num_tokens // length), length, is_packed)
      found.append(
        items.Item(
          name=f'{length}, {"packed" if is_packed else "position biases"}',
          measure=functools.partial(_measure, *arguments),
          programs=functools.partial(_programs, *arguments),
          limit=40.0,
        )
      )
  return found


def thresholds(rows: list[items.Row]) -> list[str]:
  """Return what the rows say about the thresholds of 'auto': scores per head from which a kernel is the fastest.

  Args:
    rows: rows of this part.
  """
  sentences = []
  for form in ('position biases', 'packed'):
    times: dict[int, dict[str, float]] = {}
    for row in rows:
      if row.get('form') == form and 'ms' in row:
        times.setdefault(row['length'], {})[row['kernel']] = row['ms']
    fastest = {length: min(found, key=found.__getitem__) for length, found in times.items()}
    shown = ', '.join(f'{kernel} at {length}' for length, kernel in sorted(fastest.items()))
    if shown:
      sentences.append(f'Fastest with {form}: {shown}.')
    pairs = {length: found for length, found in times.items() if {'dot', 'blockwise'} <= set(found)}
    wins = [length for length, found in pairs.items() if found['blockwise'] <= found['dot']]
    # The threshold holds if 'blockwise' is faster from there on.
    lasting = [length for length in wins if all(other in wins for other in pairs if other > length)]
    if lasting:
      sentences.append(
        f"With {form} 'blockwise' is as fast as 'dot' from {min(lasting)}^2 = {min(lasting) ** 2:,} scores per head on."
      )
    elif pairs:
      sentences.append(f"With {form} 'dot' is faster than 'blockwise' at the largest length.")
  return sentences
