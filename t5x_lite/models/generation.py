"""How a network is driven token by token: an encoder-decoder as a whole, and what decoder-only models need as well."""

from collections.abc import Collection, Mapping
import functools
import inspect
import numbers
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite.models.base import FlaxMutables, apply_module
from t5x_lite.networks.network import Network
from t5x_lite.types import Array, Batch, Params

# The features of whose tokens a row of an encoder-decoder's batch consists.
_TOKENS = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')


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
    is_filling: Array | None = None,
    flax_mutables: FlaxMutables | None = None,
    **decoder_params,
) -> tuple[Array, Array]:
  """Decodes a batch from an encoder-decoder network.

  Args:
    module: network with the methods `encode`, `init_cache` and `decode`. If its `init_cache` makes a collection
      `cross_cache`, its `decode` gets the encoder's side once per example, however many decodes an example has;
      otherwise once per decode. A `networks.Network` may say more about its cache.
    params: its parameters.
    encoder_input_tokens: <int32>[batch, input_length].
    decoder_prompt: <int32>[batch, length]; see the inputs of `DecodeFnCallable`.
    decode_fn: decoding algorithm.
    eos_id: the token that ends a sequence.
    num_decodes: number of sequences for each row.
    prefill: run the prompts through the network at once, by `decode(..., prefill=True, prefill_lengths=...)`, and let
      `decode_fn` start behind them (its argument `initial_index`); otherwise it forces them token by token.
    is_filling: <bool>[batch], rows that only fill up the batch, for a `decode_fn` that declares to accept
      them (`decoding.DecodeContract`).
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
  if is_filling is not None and decoding.contract_of(decode_fn).is_filling:
    decoder_params['is_filling'] = is_filling
  cache = share_beams(module, cache, decode_fn, num_decodes)

  encoder_side = encoded, encoder_input_tokens
  if not collections.get('cross_cache'):
    encoder_side = tuple(decoding.flat_batch_beam_expand(x, num_decodes) for x in encoder_side)

  def tokens_to_logits(state: decoding.DecodingState) -> tuple[Array, Mapping[str, Any]]:
    check_fits_cache(state, max_decode_length)
    logits, cache = decode(*encoder_side, state.cur_token, state.cache)
    return jnp.squeeze(logits, axis=1), cache

  return decode_fn(
      inputs=decoder_prompt, cache=cache, tokens_to_logits=tokens_to_logits, eos_id=eos_id,
      num_decodes=num_decodes, cache_offset=cache_offset(module), **decoder_params)


def share_beams(
    module: nn.Module, cache: Mapping[str, Any], decode_fn: decoding.DecodeFnCallable, num_decodes: int
) -> Mapping[str, Any]:
  """Returns the cache that `decode_fn` is to start from: one that it does not have to move, if it would.

  Args:
    module: network; only a `Network` can make such a cache.
    cache: its `cache` collection, for the rows of the batch.
    decode_fn: decoding algorithm.
    num_decodes: number of sequences for each row.
  """
  if num_decodes == 1 or not isinstance(module, Network) or not decoding.contract_of(decode_fn).reorders_decodes:
    return cache
  return module.share_beams(cache, num_decodes)


def cache_offset(module: nn.Module) -> int:
  """Returns the number of dims before the batch dim in the leaves of the module's cache."""
  return module.cache_offset if isinstance(module, Network) else Network.cache_offset


def check_fits_cache(state: decoding.DecodingState, max_decode_length: int) -> None:
  """Refuses, while a step is traced, sequences that a decoding algorithm lets grow longer than the cache.

  Raises:
    ConfigError: naming both lengths.
  """
  # Sequences may have a column for the start token beside those that are decoded.
  length = state.sequences.shape[1] - 1
  if length > max_decode_length:
    raise errors.ConfigError(
        f'Got sequences of {length} tokens to decode (max_decode_len of decode_fn) for rows of {max_decode_length}; '
        'expected at most as many. Leave max_decode_len out, or make decoder_input_tokens longer, by '
        'task_feature_lengths.')


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


def filling_rows(batch: Batch) -> Array:
  """Returns <bool>[batch]: the rows of an encoder-decoder's batch that only fill it up, as a data set's last batch is.

  These are the rows without any token, of inputs or targets, beside rows that have some. Where no row has any, all are
  taken for what they are: inputs of nothing.

  >>> filling_rows({'encoder_input_tokens': jnp.array([[5, 1], [0, 0]])}).tolist()
  [False, True]
  """
  has_tokens = functools.reduce(
      jnp.logical_or, (jnp.any(batch[name] != 0, axis=1) for name in _TOKENS if name in batch))
  return ~has_tokens & jnp.any(has_tokens)


def decode_options(
    decode_fn: decoding.DecodeFnCallable,
    decoder_params: Mapping[str, Any] | None,
    set_by_model: Mapping[str, str],
    *,
    rng: Array | None,
    eos_id: int,
    num_decodes: int,
    prefilled: bool,
) -> dict[str, Any]:
  """Puts together the options of a decoding, and refuses, before anything is computed, what `decode_fn` cannot take.

  Args:
    decode_fn: decoding algorithm, the model's.
    decoder_params: options that the caller of a prediction gives; an `eos_id` here replaces the vocabulary's.
    set_by_model: arguments of `decode_fn` that are not the caller's to give, and what to do instead.
    rng: key of the draws, if the caller gives one.
    eos_id: the vocabulary's end token.
    num_decodes: number of sequences for each row.
    prefilled: decoding starts behind prompts.

  Returns:
    Keyword arguments of `decode_fn`.

  Raises:
    ConfigError: no `decode_fn`, an option that is unknown or the model's to set, two keys, a number of decodes below 1
      or that `decode_fn` cannot give, or prompts for a `decode_fn` that cannot start behind them.
  """
  if decode_fn is None:
    raise errors.ConfigError(
        'Got decode_fn=None to predict with; expected a decoding algorithm. Give the model one, such as '
        'decode_fn=decoding.greedy_search, or predict with model.with_decode_fn(decoding.greedy_search).')
  check_decoder_options(decode_fn, num_decodes)
  contract = decoding.contract_of(decode_fn)
  arguments = _argument_names(decode_fn)
  if prefilled and not (contract.initial_index and (arguments is None or 'initial_index' in arguments)):
    raise errors.ConfigError(
        f'Got prompts for decode_fn={_name(decode_fn)}, which has no argument initial_index, the number of tokens of '
        'each row that have been read already. Use a decode_fn that has, such as decoding.temperature_sample, or decode '
        'without prompts.')
  own_options = arguments if contract.options is None else contract.options
  options = {'decode_rng': rng, 'eos_id': eos_id}
  for name, value in (decoder_params or {}).items():
    if name in set_by_model or (name == 'decode_rng' and rng is not None):
      raise errors.ConfigError(
          f'Got decoder_params[{name!r}], which predict_batch_with_aux sets itself; '
          f'{set_by_model.get(name, "pass it as rng or in decoder_params, not both")}.')
    known = None if own_options is None else {*own_options, *options} - set_by_model.keys()
    if known is not None and name not in known:
      raise errors.ConfigError(
          f'Got decoder_params[{name!r}], but decode_fn={_name(decode_fn)} has no such option.'
          f'{errors.did_you_mean(str(name), sorted(known))}')
    options[name] = value
  return options


def _argument_names(decode_fn: decoding.DecodeFnCallable) -> frozenset[str] | None:
  """Returns the names of a function's arguments, to name those that it lacks in an error; None if it takes any."""
  parameters = inspect.signature(decode_fn).parameters.values()
  if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
    return None
  return frozenset(parameter.name for parameter in parameters)


def _name(decode_fn: decoding.DecodeFnCallable) -> str:
  while isinstance(decode_fn, functools.partial):
    decode_fn = decode_fn.func
  return getattr(decode_fn, '__name__', repr(decode_fn))


def check_decoder_options(decode_fn: decoding.DecodeFnCallable, num_decodes: int, name: str = 'num_decodes') -> None:
  """Refuses, before anything is traced, a number of decodes that `decode_fn` cannot give.

  Raises:
    ConfigError: a number below 1, or above what `decode_fn` declares.
  """
  check_num_decodes(num_decodes, name)
  most = decoding.contract_of(decode_fn).max_num_decodes
  if most is not None and num_decodes > most:
    raise errors.ConfigError(
        f'Got {name}={num_decodes} with decode_fn={_name(decode_fn)}, which returns at most {most} for each row; '
        f'expected at most {most}. Set {name}={most}, or use a decode_fn that returns several sequences.')


def check_num_decodes(num_decodes: int, name: str = 'num_decodes') -> None:
  """Refuses any number of decodes but whole ones of at least 1; `name` is where it was set.

  Raises:
    ConfigError: see above.
  """
  if not isinstance(num_decodes, numbers.Integral) or isinstance(num_decodes, bool) or num_decodes < 1:
    raise errors.ConfigError(f'Got {name}={num_decodes!r}; expected a whole number of at least 1: the number of '
                             'sequences to decode for each input, in beam search the number of beams.')


def check_features(features: Collection[str], needed: Mapping[str, str]) -> None:
  """Refuses batches that cannot be decoded: packed ones, whose rows are not one example each, and incomplete ones.

  Args:
    features: names of the features of a batch.
    needed: those that predictions read, and what each is to be.

  Raises:
    ConfigError: there are segment ids, or a feature is missing.
  """
  packed = sorted(name for name in features if name.endswith('_segment_ids'))
  if packed:
    raise errors.ConfigError(
        f'Got a packed batch (features {", ".join(packed)}) to predict from; expected one example per row. '
        'Set pack=False in the dataset config of inference.')
  for name, meaning in needed.items():
    if name not in features:
      raise errors.ConfigError(
          f'Got a batch of {sorted(features)} to predict from, without {name!r}; expected {meaning}.'
          f'{errors.did_you_mean(name, features)}')
