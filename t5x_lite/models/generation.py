"""Token-by-token decoding with a network: encoder-decoder generation, and functions shared with decoder-only models."""

from collections.abc import Callable, Collection, Mapping, Sequence
import functools
import inspect
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite.models.base import FlaxMutables
from t5x_lite.models.base import apply_module
from t5x_lite.networks.network import Network
from t5x_lite.types import Array, Batch, Params

# Features with the tokens of an encoder-decoder's batch.
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
  padding_mask: Array | None = None,
  flax_mutables: FlaxMutables | None = None,
  logits_from_slice: Callable[..., Any] | None = None,
  kv_cache: Callable[..., Any] | None = None,
  **decoder_params,
) -> tuple[Array, Array]:
  """Decode a batch from an encoder-decoder network.

  Args:
    module: network with the methods `encode`, `decode` and `init_cache`. If `init_cache` makes a collection
      `cross_cache`, `decode` gets the encoder's output once per example, otherwise once per decode. Without the method,
      as in networks for T5X, a call with `decode=True` makes the cache. A `networks.Network` may have more attributes
      of its cache.
    params: tree of parameters.
    encoder_input_tokens: <int32>[batch, input_length].
    decoder_prompt: <int32>[batch, length]; see the inputs of `DecodeFnCallable`.
    decode_fn: decoding algorithm.
    eos_id: token that ends a sequence.
    num_decodes: number of sequences for each row.
    prefill: True to read the prompts in one pass, by `decode(..., prefill=True, prefill_lengths=...)`, and start
      `decode_fn` after them (its argument `initial_index`); False to force them token by token.
    padding_mask: <bool>[batch], True for padding rows; passed to a `decode_fn` that declares it
      (`decoding.DecodeContract`).
    flax_mutables: the module's collections other than the parameters.
    logits_from_slice: method `_compute_logits_from_slice` of a model written for T5X, instead of a step of the network;
      see `EncoderDecoderModel`. It gets a cache without `cross_cache`, as in T5X.
    kv_cache: method `_compute_kv_cache` of a model written for T5X, instead of the network's.
    **decoder_params: options of `decode_fn`.

  Returns:
    (<int32>[batch, num_decodes, length] sequences, <float32>[batch, num_decodes] scores), best last.
  """
  max_decode_length = decoder_prompt.shape[1]
  encoded, _ = apply_module(
    module,
    params,
    encoder_input_tokens,
    enable_dropout=False,
    method=module.encode,
    flax_mutables=flax_mutables,
  )
  is_of_t5x = logits_from_slice is not None or kv_cache is not None
  others = flax_mutables or {}
  if kv_cache is not None:
    cache, lengths = kv_cache(
      encoded_inputs=encoded,
      encoder_input_tokens=encoder_input_tokens,
      decoder_input_tokens=decoder_prompt,
      prefill_decoder_prompt=prefill,
    )
  else:
    cache, cross_cache, lengths = read_prompts(
      module,
      params,
      encoded,
      encoder_input_tokens,
      decoder_prompt,
      prefill=prefill,
      has_cross_cache=not is_of_t5x,
      flax_mutables=flax_mutables,
    )
    others = {**others, **cross_cache}
  if prefill:
    decoder_params['initial_index'] = lengths
  if padding_mask is not None and decoding.contract_of(decode_fn).padding_mask:
    decoder_params['padding_mask'] = padding_mask
  if not is_of_t5x:
    cache = share_beams(module, cache, decode_fn, num_decodes)

  def repeat_inputs(copies: int) -> tuple[Array, Array]:
    if others.get('cross_cache'):
      return encoded, encoder_input_tokens
    # [batch * copies, ...]: without a cache of its keys and values, each decode attends to the encoder's output.
    return (
      decoding.flat_batch_beam_expand(encoded, copies),
      decoding.flat_batch_beam_expand(encoder_input_tokens, copies),
    )

  batch_size = decoder_prompt.shape[0]
  repeated = {num_decodes: repeat_inputs(num_decodes)}  # before the loop

  def tokens_to_logits(state: decoding.DecodingState) -> tuple[Array, Mapping[str, Any]]:
    check_fits_cache(state, max_decode_length)
    copies = state.cur_token.shape[0] // batch_size
    inputs = repeated.get(copies) or repeat_inputs(copies)
    if logits_from_slice is not None:
      encoded_inputs, raw_inputs = inputs
      return logits_from_slice(
        state,
        encoded_inputs=encoded_inputs,
        raw_inputs=raw_inputs,
        max_decode_length=max_decode_length,
      )
    variables = {**others, 'cache': state.cache}
    return decode_step(module, params, *inputs, state.cur_token, variables, max_decode_length)

  return call_decode_fn(
    decode_fn,
    inputs=decoder_prompt,
    cache=cache,
    tokens_to_logits=tokens_to_logits,
    eos_id=eos_id,
    num_decodes=num_decodes,
    cache_offset=cache_offset(module),
    **decoder_params,
  )


def read_prompts(
  module: nn.Module,
  params: Params,
  encoded: Array,
  encoder_input_tokens: Array,
  decoder_prompt: Array,
  *,
  prefill: bool,
  has_cross_cache: bool,
  flax_mutables: FlaxMutables | None,
) -> tuple[Any, dict[str, Any], Array | None]:
  """Make the cache of an encoder-decoder network.

  Args:
    module, params, encoder_input_tokens, decoder_prompt, prefill, flax_mutables: see `generate`.
    encoded: output of the encoder.
    has_cross_cache: False to make no `cross_cache`.

  Returns:
    (collection `cache`, {'cross_cache': that collection} or {}, <int32>[batch] number of cached tokens of each row;
    None if the prompts are not read).
  """
  apply = functools.partial(apply_module, module, params, flax_mutables=flax_mutables)
  max_decode_length = decoder_prompt.shape[1]
  if hasattr(module, 'init_cache'):
    _, collections = apply(
      encoded,
      encoder_input_tokens,
      max_decode_length,
      method=module.init_cache,
      mutable=('cache', 'cross_cache'),
    )
  else:  # A network for T5X makes its cache when it is called with `decode=True`.
    prompt = jnp.ones_like(decoder_prompt)
    _, collections = apply(
      jnp.ones_like(encoder_input_tokens),
      prompt,
      prompt,
      enable_dropout=False,
      decode=True,
      mutable=('cache',),
    )
  cross_cache = {}
  if has_cross_cache and collections.get('cross_cache'):
    cross_cache['cross_cache'] = collections['cross_cache']
  if not prefill:
    return collections['cache'], cross_cache, None
  # The first step reads the last token of a prompt.
  lengths = prompt_lengths(decoder_prompt) - 1
  _, updated = apply_module(
    module,
    params,
    encoded,
    encoder_input_tokens,
    decoder_prompt,
    decoder_prompt,
    enable_dropout=False,
    decode=True,
    max_decode_length=max_decode_length,
    prefill=True,
    prefill_lengths=lengths,
    flax_mutables={**(flax_mutables or {}), **cross_cache, 'cache': collections['cache']},
    mutable=('cache',),
    method=module.decode,
  )
  return updated['cache'], cross_cache, lengths


def decode_step(
  module: nn.Module,
  params: Params,
  encoded: Array,
  encoder_input_tokens: Array,
  tokens: Array,
  variables: Mapping[str, Any],
  max_decode_length: int,
) -> tuple[Array, Any]:
  """Run an encoder-decoder network on the next token of each sequence.

  Args:
    module: network.
    params: tree of parameters.
    encoded: output of the encoder, for each sequence or, with a `cross_cache`, for each example.
    encoder_input_tokens: <int32>, as many rows as `encoded`, whose padding they mark.
    tokens: <int32>[rows, 1].
    variables: the collection `cache` and others.
    max_decode_length: number of positions of the cache.

  Returns:
    (<float32>[rows, vocab] logits, new `cache`).
  """
  logits, updated = apply_module(
    module,
    params,
    encoded,
    encoder_input_tokens,
    tokens,
    tokens,
    enable_dropout=False,
    decode=True,
    max_decode_length=max_decode_length,
    flax_mutables=variables,
    mutable=('cache',),
    method=module.decode,
  )
  return jnp.squeeze(logits, axis=1), updated['cache']


def call_decode_fn(
  decode_fn: decoding.DecodeFnCallable, *, inputs: Array, num_decodes: int, **options: Any
) -> tuple[Array, Array]:
  """Return (sequences [batch, num_decodes, length], scores [batch, num_decodes]) of a decoding algorithm.

  Raises:
    ConfigError: `decode_fn` does not take the arguments, or returns arrays of other shapes.
  """
  options |= {'inputs': inputs, 'num_decodes': num_decodes}
  result = checks.call_custom(
    '', 'decode_fn', ', '.join(f'{name}=' for name in sorted(options)), decode_fn, **options
  )
  if isinstance(result, (tuple, list)):
    results = list(result)
  else:
    results = [result]
  shapes = [getattr(x, 'shape', type(x).__name__) for x in results]
  rows = (inputs.shape[0], num_decodes)
  is_valid = len(shapes) == 2 and len(shapes[0]) == 3
  if not is_valid or shapes[0][:2] != rows or shapes[1][:2] != rows:
    raise errors.ConfigError(
      f'`decode_fn` must return (sequences of shape [batch, num_decodes, length], scores [batch, num_decodes]) with '
      f'batch={rows[0]} and num_decodes={num_decodes}, got {shapes} from {_name(decode_fn)}. Return both arrays.'
    )
  sequences, scores = results
  return sequences, scores


def share_beams(
  module: nn.Module,
  cache: Mapping[str, Any],
  decode_fn: decoding.DecodeFnCallable,
  num_decodes: int,
) -> Mapping[str, Any]:
  """Return the initial cache of `decode_fn`; if it reorders decodes, a cache that need not be reordered, if supported.

  Args:
    module: network; only a `Network` supports such a cache.
    cache: its `cache` collection, for the rows of the batch.
    decode_fn: decoding algorithm.
    num_decodes: number of sequences for each row.
  """
  if (
    num_decodes == 1
    or not isinstance(module, Network)
    or not decoding.contract_of(decode_fn).reorders_decodes
  ):
    return cache
  return module.share_beams(cache, num_decodes)


def cache_offset(module: nn.Module) -> int:
  """Return the number of dims before the batch dim in the leaves of the module's cache: 1 for scanned layers of T5X."""
  if isinstance(module, Network):
    return module.cache_offset
  return int(bool(getattr(module, 'scan_layers', False)))


def check_fits_cache(state: decoding.DecodingState, max_decode_length: int) -> None:
  """Raise ConfigError, while a step is traced, if the sequences of a decoding algorithm are longer than the cache.

  Args:
    state: state of the decoding.
    max_decode_length: number of positions of the cache.
  """
  # Sequences may have an additional column for the start token.
  length = state.sequences.shape[1] - 1
  if length > max_decode_length:
    raise errors.ConfigError(
      f'The sequences of decode_fn (max_decode_len) must have at most {max_decode_length} tokens, the length of '
      f'decoder_input_tokens, got {length}. Remove max_decode_len, or increase task_feature_lengths.'
    )


def decode_length(decode_fn: decoding.DecodeFnCallable, length: int, prefilled: bool) -> int:
  """Return the number of positions of the cache for a decoding algorithm.

  Labels get as many as they need, after all prompts: a cut label would have another score.

  Args:
    decode_fn: decoding algorithm.
    length: number of columns of `decoder_input_tokens`.
    prefilled: True if decoding starts after prompts.

  Raises:
    ConfigError: a label is longer.
  """
  labels = decoding.labels_of(decode_fn)
  if labels is None:
    return length
  labels.check_length(length)
  if prefilled:
    return length + labels.max_length
  return labels.max_length


def resize(x: Array, length: int) -> Array:
  """Return [..., `length`], the last dim of `x` cut or padded with 0."""
  if x.shape[-1] >= length:
    return x[..., :length]
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


def prompt_lengths(prompt: Array) -> Array:
  """Return <int32>[batch], the number of tokens of each row before its first 0, including the start token.

  Args:
    prompt: <int32>[batch, length]; column 0 is the start token.

  >>> prompt_lengths(jnp.array([[0, 5, 6, 0], [0, 0, 7, 0], [0, 5, 6, 7]])).tolist()
  [3, 1, 4]
  """
  is_token = (prompt != 0).at[:, 0].set(True)
  return jnp.sum(jnp.cumprod(is_token.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def prompt_from_targets(decoder_input_tokens: Array, eos_id: int) -> Array:
  """Return `decoder_input_tokens` <int32>[batch, length] with 0 instead of `eos_id`, as prompts."""
  return jnp.where(decoder_input_tokens == eos_id, 0, decoder_input_tokens)


def remove_prefix(sequence: Array, prefix_length: Array) -> Array:
  """Remove the prefix of each row and pad with 0.

  Args:
    sequence: [batch, length].
    prefix_length: <int>[batch], number of columns to remove from each row.

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


def padding_mask(batch: Batch) -> Array:
  """Return <bool>[batch], True for padding rows of an encoder-decoder's batch, as in the last batch of a data set.

  Padding rows have no tokens, neither inputs nor targets. If no row has tokens, no row is padding.

  >>> padding_mask({'encoder_input_tokens': jnp.array([[5, 1], [0, 0]])}).tolist()
  [False, True]
  """
  has_tokens = functools.reduce(
    jnp.logical_or, (jnp.any(batch[name] != 0, axis=1) for name in _TOKENS if name in batch)
  )
  return ~has_tokens & jnp.any(has_tokens)


def decode_options(
  decode_fn: decoding.DecodeFnCallable,
  decoder_params: Mapping[str, Any] | None,
  set_by_model: Mapping[str, str],
  *,
  rng: Array | None,
  eos_id: int | None,
  num_decodes: int,
  prefilled: bool,
  stop_token_ids: Sequence[int] = (),
  constraints: decoding.Constraints | None = None,
) -> dict[str, Any]:
  """Return the options of a decoding, checked before anything is computed.

  Args:
    decode_fn: decoding algorithm of the model.
    decoder_params: options of the caller; `eos_id` overrides the vocabulary's.
    set_by_model: arguments of `decode_fn` that the caller must not set, and the remedy for each.
    rng: key of the draws, or None.
    eos_id: the vocabulary's end token; None if it has none, which `decode_fn` may reject.
    num_decodes: number of sequences for each row.
    prefilled: True if decoding starts after prompts.
    stop_token_ids: further tokens that end a sequence.
    constraints: constraints of the model, or None.

  Returns:
    Keyword arguments of `decode_fn`.

  Raises:
    ConfigError: no `decode_fn`, an option that is unknown or set by the model, two keys, an unsupported number of
      decodes, or prompts for a `decode_fn` that cannot start after them.
  """
  if decode_fn is None:
    raise checks.invalid(
      '',
      'decode_fn',
      'a decoding algorithm for predictions',
      None,
      'Use model.with_decode_fn(decoding.greedy_search).',
    )
  check_decoder_options(decode_fn, num_decodes)
  contract = decoding.contract_of(decode_fn)
  arguments = _argument_names(decode_fn)
  if prefilled and not (
    contract.initial_index and (arguments is None or 'initial_index' in arguments)
  ):
    raise errors.ConfigError(
      f'Prompts need a decode_fn with the argument initial_index, the number of prompt tokens of each row, got '
      f'{_name(decode_fn)}. Use decoding.temperature_sample, or decode without prompts.'
    )
  if contract.options is None:
    supported = arguments
  else:
    supported = contract.options
  if eos_id is None and checks.log_for_t5x(
    'The output vocabulary has no eos_id: the token 1 ends sequences.'
  ):
    eos_id = 1
  options: dict[str, Any] = {'decode_rng': rng, 'eos_id': eos_id}
  others = tuple(i for i in stop_token_ids if i != eos_id)
  if others and supported is not None and 'stop_token_ids' not in supported:
    raise checks.invalid(
      '',
      'decode_fn',
      f'a decoding algorithm with the argument stop_token_ids, which gets {others}',
      _name(decode_fn),
      'Use decoding.beam_search, or set stop_token_ids of the model to ().',
    )
  if others:
    options['stop_token_ids'] = others
  if constraints is not None and supported is not None and 'logit_processor' not in supported:
    raise checks.invalid(
      '',
      'decode_fn',
      'a decoding algorithm with the argument logit_processor, for the constraints of the model',
      _name(decode_fn),
      'Use decoding.beam_search, or remove the constraints.',
    )
  if constraints is not None:
    options['logit_processor'] = constraints
  for name, value in (decoder_params or {}).items():
    if supported is None:
      known = None
    else:
      known = {*supported, *options} - set_by_model.keys()
    remedy = set_by_model.get(name)
    if name == 'decode_rng' and rng is not None:
      remedy = 'Pass a key as rng or in decoder_params, not both.'
    if remedy or (known is not None and name not in known):
      raise checks.invalid(
        '',
        'decoder_params',
        f'options of decode_fn={_name(decode_fn)} that the model does not set',
        name,
        remedy or errors.did_you_mean(str(name), known or ()).strip(),
      )
    options[name] = value
  return options


def _argument_names(decode_fn: decoding.DecodeFnCallable) -> frozenset[str] | None:
  """Return the names of a function's arguments; None if it accepts any, by `**kwargs`."""
  parameters = inspect.signature(decode_fn).parameters.values()
  if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
    return None
  return frozenset(parameter.name for parameter in parameters)


def _name(decode_fn: decoding.DecodeFnCallable) -> str:
  while isinstance(decode_fn, functools.partial):
    decode_fn = decode_fn.func
  return getattr(decode_fn, '__name__', repr(decode_fn))


def check_decoder_options(
  decode_fn: decoding.DecodeFnCallable, num_decodes: int, name: str = 'num_decodes'
) -> None:
  """Raise ConfigError, before anything is traced, if `decode_fn` does not support a number of decodes.

  Args:
    decode_fn: decoding algorithm.
    num_decodes: number of sequences for each row.
    name: name of the option, for the error.
  """
  checks.check(
    '',
    {name: num_decodes},
    **{
      name: checks.number(
        at_least=1,
        at_most=decoding.contract_of(decode_fn).max_num_decodes,
        integer=True,
        remedy=f'It is the number of sequences per input, which decode_fn={_name(decode_fn)} must support.',
      )
    },
  )


def check_features(features: Collection[str], needed: Mapping[str, str]) -> None:
  """Raise ConfigError for batches that cannot be decoded: packed batches, or batches without a needed feature.

  Args:
    features: names of the features of a batch.
    needed: features that predictions read, and a description of each.
  """
  packed = sorted(name for name in features if name.endswith('_segment_ids'))
  if packed:
    raise errors.ConfigError(
      f'Predictions need one example per row, got a packed batch (features {", ".join(packed)}). Set pack=False in '
      'the dataset config of inference.'
    )
  for name, meaning in needed.items():
    if name not in features:
      similar = errors.did_you_mean(name, features)
      raise errors.ConfigError(
        f'Predictions need the feature {name!r}, {meaning}, got {sorted(features)}.{similar}'
      )
