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
    prefill: bool = False,
    cache_offset: int = 0,
    flax_mutables: FlaxMutables | None = None,
    **decoder_params,
) -> tuple[Array, Array]:
  """Decodes a batch from an encoder-decoder network.

  Args:
    module: network with the methods `encode`, `init_cache` and `decode`. If its `init_cache` makes a collection
      `cross_cache`, its `decode` gets the encoder's side once per example, however many decodes an example has;
      otherwise once per decode.
    params: its parameters.
    encoder_input_tokens: <int32>[batch, input_length].
    decoder_prompt: <int32>[batch, length]; see the inputs of `DecodeFnCallable`.
    decode_fn: decoding algorithm.
    eos_id: the token that ends a sequence.
    num_decodes: number of sequences for each row.
    prefill: run the prompts through the network at once, by `decode(..., prefill=True, prefill_lengths=...)`, and let
      `decode_fn` start behind them (its argument `initial_index`); otherwise it forces them token by token.
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
      encoded, encoder_input_tokens, max_decode_length, method=module.init_cache, mutable=('cache', 'cross_cache'))

  def decode(encoded, inputs, tokens, cache, **options):
    logits, updated = apply_module(
        module, params, encoded, inputs, tokens, tokens, enable_dropout=False, decode=True,
        max_decode_length=max_decode_length, flax_mutables={**(flax_mutables or {}), **collections, 'cache': cache},
        mutable=('cache',), method=module.decode, **options)
    return logits, updated['cache']

  cache = collections['cache']
  if prefill:
    # The last token of a prompt is what the first step reads.
    lengths = prompt_lengths(decoder_prompt) - 1
    _, cache = decode(
        encoded, encoder_input_tokens, decoder_prompt, cache, prefill=True, prefill_lengths=lengths)
    decoder_params['initial_index'] = lengths

  encoder_side = encoded, encoder_input_tokens
  if not collections.get('cross_cache'):
    encoder_side = tuple(decoding.flat_batch_beam_expand(x, num_decodes) for x in encoder_side)

  def tokens_to_logits(state: decoding.DecodingState) -> tuple[Array, Mapping[str, Any]]:
    logits, cache = decode(*encoder_side, state.cur_token, state.cache)
    return jnp.squeeze(logits, axis=1), cache

  return decode_fn(
      inputs=decoder_prompt, cache=cache, tokens_to_logits=tokens_to_logits, eos_id=eos_id,
      num_decodes=num_decodes, cache_offset=cache_offset, **decoder_params)


def prompt_lengths(prompt: Array) -> Array:
  """Returns <int32>[batch]: the tokens of each row before its first 0, the start token (column 0) counted with them.

  >>> prompt_lengths(jnp.array([[0, 5, 6, 0], [0, 0, 7, 0], [0, 5, 6, 7]])).tolist()
  [3, 1, 4]
  """
  given = (prompt != 0).at[:, 0].set(True)
  return jnp.sum(jnp.cumprod(given.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


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
