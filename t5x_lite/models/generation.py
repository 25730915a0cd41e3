"""How an encoder-decoder network is driven token by token: encode once, then step with a cache."""

from collections.abc import Mapping
import functools
import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite.models.base import FlaxMutables, apply_module
from t5x_lite.types import Array, Params


def generate(
    module: nn.Module,
    params: Params,
    encoder_input_tokens: Array,
    decoder_prompt: Array,
    decode_fn: decoding.DecodeFnCallable,
    *,
    eos_id: int,
    num_decodes: int,
    cache_offset: int = 0,
    flax_mutables: FlaxMutables | None = None,
    **decoder_params,
) -> tuple[Array, Array]:
  """Decodes a batch from an encoder-decoder network.

  Args:
    module: network with the methods `encode`, `init_cache` and `decode`.
    params: its parameters.
    encoder_input_tokens: <int32>[batch, input_length].
    decoder_prompt: <int32>[batch, length]; see the inputs of `DecodeFnCallable`.
    decode_fn: decoding algorithm.
    eos_id: the token that ends a sequence.
    num_decodes: number of sequences for each row.
    cache_offset: number of dims before the batch dim in cache leaves.
    flax_mutables: the module's collections other than the parameters.
    **decoder_params: options of `decode_fn`.

  Returns:
    (<int32>[batch, num_decodes, length] sequences, <float32>[batch, num_decodes] scores), best last.
  """
  apply = functools.partial(apply_module, module, params, flax_mutables=flax_mutables)
  max_decode_length = decoder_prompt.shape[1]
  encoded, _ = apply(encoder_input_tokens, enable_dropout=False, method=module.encode)
  _, collections = apply(
      encoded, encoder_input_tokens, max_decode_length, method=module.init_cache, mutable=('cache',))

  encoded_rows = decoding.flat_batch_beam_expand(encoded, num_decodes)
  input_rows = decoding.flat_batch_beam_expand(encoder_input_tokens, num_decodes)

  def tokens_to_logits(state: decoding.DecodingState) -> tuple[Array, Mapping[str, Any]]:
    logits, updated = apply_module(
        module, params, encoded_rows, input_rows, state.cur_token, state.cur_token,
        enable_dropout=False, decode=True, max_decode_length=max_decode_length,
        flax_mutables={**(flax_mutables or {}), 'cache': state.cache}, mutable=('cache',), method=module.decode)
    return jnp.squeeze(logits, axis=1), updated['cache']

  return decode_fn(
      inputs=decoder_prompt, cache=collections['cache'], tokens_to_logits=tokens_to_logits, eos_id=eos_id,
      num_decodes=num_decodes, cache_offset=cache_offset, **decoder_params)


def prompt_from_targets(decoder_input_tokens: Array, eos_id: int) -> Array:
  """Returns the prompt that forces the given tokens, <int32>[batch, length]: the inputs without end tokens."""
  return jnp.where(decoder_input_tokens == eos_id, 0, decoder_input_tokens)


def remove_prefix(sequence: Array, prefix_length: Array) -> Array:
  """Shifts each row to the left by its own prefix and fills up with 0.

  Args:
    sequence: [batch, length].
    prefix_length: <int>[batch], how much to take off the start of each row.

  Returns:
    [batch, length] in the dtype of `sequence`.

  >>> import numpy as np
  >>> remove_prefix(np.array([[1, 2, 3], [4, 5, 6]]), np.array([1, 2])).tolist()
  [[2, 3, 0], [6, 0, 0]]
  """
  length = sequence.shape[1]
  source = jnp.arange(length) + prefix_length[:, None]
  shifted = jnp.take_along_axis(sequence, jnp.minimum(source, length - 1), axis=1)
  return jnp.where(source < length, shifted, jnp.zeros_like(shifted))


def check_decoder_options(decode_fn: decoding.DecodeFnCallable, num_decodes: int) -> None:
  """Refuses, before anything is traced, a number of decodes that `decode_fn` cannot give.

  Sees through `functools.partial` and through wrappers that name what they wrap, as configuration frameworks use.

  Raises:
    ConfigError: greedy search and a number other than 1.
  """
  fn = decode_fn
  while True:
    inner = fn.func if isinstance(fn, functools.partial) else inspect.unwrap(fn)
    if inner is fn:
      break
    fn = inner
  if fn is decoding.greedy_search:
    decoding.check_num_decodes(num_decodes)


def check_unpacked(batch: Mapping[str, jax.Array]) -> None:
  """Refuses a packed batch, whose rows cannot be decoded one example at a time.

  Raises:
    ConfigError: the batch has segment ids.
  """
  packed = sorted(name for name in batch if name.endswith('_segment_ids'))
  if packed:
    raise errors.ConfigError(
        f'Got a packed batch (features {", ".join(packed)}) to predict from; expected one example per row. '
        'Set pack=False in the dataset config of inference.')
