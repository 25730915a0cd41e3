"""Decoder-only models: plain (causal) and prefix language models."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import decoding
from t5x_lite import losses
from t5x_lite import subclassing
from t5x_lite.adapters import Lora
from t5x_lite.models import base
from t5x_lite.models import generation
from t5x_lite.models import vocabulary_size
from t5x_lite.types import Array, Batch, Params

_PREFIX = 'decoder_causal_attention'
_DECODED_FEATURES = ('decoder_input_tokens', _PREFIX)
_PACKING_FEATURES = ('decoder_segment_ids', 'decoder_positions')


class DecoderOnlyModel(base.BaseTransformerModel):
  """Model that reads inputs and predicts targets in one sequence.

  The batch's feature `decoder_causal_attention`, <int32>[batch, length], marks the inputs: it is 1 at the start token
  and the input tokens of an example. Predictions need it; training and scoring need it only with
  `inputs_bidirectional_attention`.

  Args:
    module: network called as `module(decoder_input_tokens, decoder_target_tokens, decoder_segment_ids=,
      decoder_positions=, decoder_causal_attention=, decode=, enable_dropout=)`, returning <float32>[batch, length,
      vocab]. Predictions also use `max_decode_length=`, `prefill=` and `prefill_lengths=` (see
      `networks.decoder_only.DecoderWrapper`). A network that implements `networks.Network` can also describe its cache.
    vocabulary: vocabulary of inputs and targets.
    optimizer_def: see `BaseTransformerModel`.
    decode_fn: decoding algorithm of predictions; it must accept `initial_index`, the start of each row's decoding.
    inputs_bidirectional_attention: True for bidirectional attention among the inputs (prefix language model), in
      training, scoring and prediction. False for causal attention.
    feature_converter_cls: name of a feature converter, or a seqio converter class, instead of 'decoder_only', which
      makes batches of a prefix language model if task_feature_lengths has `inputs`, else of the targets alone.
    label_smoothing: see `BaseTransformerModel`.
    z_loss: see `BaseTransformerModel`.
    loss_normalizing_factor: see `BaseTransformerModel`.
    metric_fns: see `BaseTransformerModel`.
    constraints: see `BaseTransformerModel`.
    adapter: see `BaseTransformerModel`.

  Raises:
    ConfigError: see `BaseTransformerModel`.
  """

  FEATURE_CONVERTER = 'decoder_only'
  ACCEPTS_STACKED_LAYERS = True
  SUPPORTS_CHUNKED_LOSS = True

  def __init__(
    self,
    module: nn.Module,
    vocabulary: Any,
    optimizer_def: Any,
    decode_fn: decoding.DecodeFnCallable | decoding.LabelScores = decoding.temperature_sample,
    inputs_bidirectional_attention: bool = False,
    feature_converter_cls: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor = None,
    *,
    metric_fns: Sequence[base.MetricFn] = (),
    constraints: decoding.Constraints | None = None,
    adapter: Lora | None = None,
  ):
    super().__init__(
      module=module,
      input_vocabulary=vocabulary,
      output_vocabulary=vocabulary,
      optimizer_def=optimizer_def,
      decode_fn=decode_fn,
      label_smoothing=label_smoothing,
      z_loss=z_loss,
      loss_normalizing_factor=loss_normalizing_factor,
      feature_converter_cls=feature_converter_cls,
      metric_fns=metric_fns,
      constraints=constraints,
      adapter=adapter,
    )
    self._inputs_bidirectional_attention = inputs_bidirectional_attention

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """See `BaseModel.get_initial_variables`.

    Args:
      rng: key of the parameters.
      input_shapes: shape of `decoder_input_tokens` [batch, length], among others.
      input_types: dtypes of features, by default int32.

    Raises:
      ConfigError: the vocabulary is larger than the logits' last dim.
      KeyError: the shape is missing.
    """
    name = 'decoder_input_tokens'
    tokens = jnp.ones(input_shapes[name], (input_types or {}).get(name, jnp.int32))
    logits, variables = self._initialize(rng, tokens, tokens, decode=False, enable_dropout=False)
    vocabulary_size.check_vocabulary_fits('vocabulary', self.output_vocabulary, logits.shape[-1])
    return variables

  def compute_logits(
    self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=(), return_logits=True
  ):
    """Run the network on given targets; see `BaseTransformerModel.compute_logits`.

    Raises:
      ConfigError: the inputs are not marked, but `inputs_bidirectional_attention` is set.
    """
    options: dict[str, Any] = {name: batch[name] for name in _PACKING_FEATURES if name in batch}
    options.update(self._prefix(batch))
    if not return_logits:
      options['return_logits'] = False
    return base.apply_module(
      self.module,
      self.network_params(params, dropout_rng),
      batch['decoder_input_tokens'],
      batch['decoder_target_tokens'],
      **options,
      decode=False,
      enable_dropout=dropout_rng is not None,
      rngs=self._rngs(dropout_rng),
      flax_mutables=flax_mutables,
      mutable=mutable,
    )

  def _prefix(self, batch: Batch) -> dict[str, Any]:
    """Return the network's argument for bidirectional attention among inputs, if it is used."""
    causal_attention = self._get_decoder_causal_attention(batch)
    if causal_attention is None:
      return {}
    return {_PREFIX: causal_attention}

  def _get_decoder_causal_attention(self, batch: Batch) -> Array | None:
    """Return the marks of the inputs if attention among them is bidirectional, or None; T5X's method."""
    if not self._inputs_bidirectional_attention:
      return None
    if _PREFIX not in batch:
      raise checks.invalid(
        type(self).__name__,
        'inputs_bidirectional_attention',
        f'False for batches without {_PREFIX!r}, which marks the inputs',
        True,
        "Set it to False, or add a length for 'inputs' to task_feature_lengths.",
      )
    return batch[_PREFIX]

  def check_prediction_features(self, features: Collection[str]) -> None:
    """Raise if batches are packed, or their inputs are not marked; see `BaseModel`."""
    generation.check_features(
      features,
      {
        'decoder_input_tokens': 'int32 [batch, length], the inputs, followed by positions to decode',
        _PREFIX: "which marks the inputs if task_feature_lengths has a length for 'inputs' (set "
        'infer_eval_dataset_cfg=None for a task without inputs)',
      },
    )

  def predict_batch_with_aux(
    self,
    params: Params,
    batch: Batch,
    rng: Array | None = None,
    *,
    return_all_decodes: bool = False,
    num_decodes: int = 1,
    decoder_params: Mapping[str, Any] | None = None,
    flax_mutables: base.FlaxMutables | None = None,
  ) -> tuple[Array, dict[str, Array]]:
    """Decode the targets of a batch: read all inputs in one pass, then run the network step by step with a cache.

    Args:
      params: tree of parameters.
      batch: `decoder_input_tokens` <int32>[batch, length], of which only the inputs are read, and
        `decoder_causal_attention` <int32>[batch, length], which marks the inputs. `length` counts inputs and decoded
        tokens, so rows with shorter inputs may decode more tokens.
      rng: key for a `decode_fn` that draws.
      return_all_decodes: True to return all sequences, False for the best.
      num_decodes: number of sequences for each row.
      decoder_params: more options of `decode_fn`; `eos_id` overrides the vocabulary's.
      flax_mutables: the module's other collections.

    Returns:
      (<int32>[batch, length] decoded tokens without the inputs, padded with 0, {'scores': <float32>[batch]}) of the
      best sequences, or with `return_all_decodes` ([batch, num_decodes, length], {'scores': [batch, num_decodes]}),
      best last. Scores of `decoding.LabelScores` have one more dim, the labels.

    Raises:
      ConfigError: a packed batch, unmarked inputs, or options that `decode_fn` does not support; see
        `generation.decode_options`.
    """
    self.check_prediction_features(batch)
    options = generation.decode_options(
      self.decode_fn,
      decoder_params,
      _GENERATION_KEYS,
      rng=rng,
      eos_id=self.output_vocabulary.eos_id,
      num_decodes=num_decodes,
      prefilled=True,
      constraints=self.constraints,
    )
    num_columns = batch['decoder_input_tokens'].shape[1]
    length = generation.decode_length(self.decode_fn, num_columns, prefilled=True)
    batch = {name: generation.resize(batch[name], length) for name in _DECODED_FEATURES}
    is_prompt = batch[_PREFIX] > 0
    # Padding rows have no start token. They get a prompt that leaves one token to decode, so that they end at once.
    padding_mask = ~jnp.any(is_prompt, axis=1)
    prompt = jnp.where(
      padding_mask[:, None], 1, jnp.where(is_prompt, batch['decoder_input_tokens'], 0)
    )
    num_inputs = jnp.where(padding_mask, length, jnp.sum(is_prompt, axis=1, dtype=jnp.int32)) - 1
    mutables = base.mutables_argument(flax_mutables)
    has_own_step = subclassing.overrides(self, DecoderOnlyModel._compute_logits_from_slice)
    has_own_cache = subclassing.overrides(self, DecoderOnlyModel._compute_kv_cache)
    if has_own_cache:
      cache, num_inputs = self._compute_kv_cache(params, prompt, batch[_PREFIX], **mutables)
    else:
      cache = self._read_prompts(params, prompt, batch[_PREFIX], num_inputs, flax_mutables)
    if not has_own_step:
      params = self.network_params(params)
    if not has_own_step and not has_own_cache:
      cache = generation.share_beams(self.module, cache, self.decode_fn, num_decodes)

    def tokens_to_logits(state: decoding.DecodingState) -> tuple[Array, Mapping[str, Any]]:
      generation.check_fits_cache(state, length)
      if has_own_step:
        return self._compute_logits_from_slice(
          state, params=params, max_decode_length=length, **mutables
        )
      return self._decode_step(params, state, length, flax_mutables)

    sequences, scores = generation.call_decode_fn(
      self.decode_fn,
      inputs=prompt,
      cache=cache,
      tokens_to_logits=tokens_to_logits,
      num_decodes=num_decodes,
      initial_index=num_inputs,
      cache_offset=generation.cache_offset(self.module),
      **options,
    )
    # The first decoded token of a row is at the position of its last input token.
    sequences = jax.vmap(generation.remove_prefix, in_axes=(1, None), out_axes=1)(
      sequences, num_inputs
    )[:, :, :num_columns]
    if return_all_decodes:
      return sequences, {'scores': scores}
    return sequences[:, -1], {'scores': scores[:, -1]}

  def _read_prompts(
    self,
    params: Params,
    prompt: Array,
    causal_attention: Array,
    num_inputs: Array,
    flax_mutables: base.FlaxMutables | None,
  ) -> Mapping[str, Any]:
    """Return the cache of the first `num_inputs` positions of prompts; see `_compute_kv_cache`."""
    # The last input is excluded from the cache: the first step reads it again for its logits.
    _, collections = base.apply_module(
      self.module,
      self.network_params(params),
      prompt,
      causal_attention,
      **self._prefix({_PREFIX: causal_attention}),
      enable_dropout=False,
      decode=True,
      max_decode_length=prompt.shape[1],
      prefill=True,
      prefill_lengths=num_inputs,
      flax_mutables=flax_mutables,
      mutable=('cache',),
    )
    return collections['cache']

  def _decode_step(
    self,
    params: Params,
    state: Any,
    max_decode_length: int,
    flax_mutables: base.FlaxMutables | None,
  ) -> tuple[Array, Mapping[str, Any]]:
    """Return the logits of the next tokens and the new cache, for the network's parameters."""
    logits, updated = base.apply_module(
      self.module,
      params,
      state.cur_token,
      state.cur_token,
      enable_dropout=False,
      decode=True,
      max_decode_length=max_decode_length,
      flax_mutables={**(flax_mutables or {}), 'cache': state.cache},
      mutable=('cache',),
    )
    return jnp.squeeze(logits, axis=1), updated['cache']

  @subclassing.takes_ids_and_cache
  def _compute_logits_from_slice(
    self,
    decoding_state: decoding.DecodingState,
    params: Params,
    max_decode_length: int,
    flax_mutables: base.FlaxMutables | None = None,
  ) -> tuple[Array, Mapping[str, Any]]:
    """Return the logits of the next tokens and the new cache: T5X's method, called if a subclass overrides it.

    Args:
      decoding_state: tokens <int32>[rows, 1] and the cache of the rows, batch * decodes.
      params: tree of parameters.
      max_decode_length: number of positions of the cache.
      flax_mutables: the module's other collections; passed if there are any.

    Returns:
      (<float32>[rows, vocab] logits, cache).
    """
    return self._decode_step(
      self.network_params(params), decoding_state, max_decode_length, flax_mutables
    )

  def _compute_kv_cache(
    self,
    params: Params,
    inputs: Array,
    causal_attention_mask: Array,
    flax_mutables: base.FlaxMutables | None = None,
  ) -> tuple[Mapping[str, Any], Array]:
    """Return the cache of prompts: T5X's method, called if a subclass overrides it.

    Args:
      params: tree of parameters.
      inputs: <int32>[batch, length], the start token, the inputs and zeros.
      causal_attention_mask: <int32>[batch, length], 1 at the start token and the inputs.
      flax_mutables: the module's other collections; passed if there are any.

    Returns:
      (cache of all inputs but the last, <int32>[batch] number of inputs after the start token).
    """
    num_inputs = jnp.sum(inputs[:, 1:] != 0, axis=1, dtype=jnp.int32)
    cache = self._read_prompts(params, inputs, causal_attention_mask, num_inputs, flax_mutables)
    return cache, num_inputs


# Arguments of decoding functions that the model sets, and the remedy for callers that set them.
_GENERATION_KEYS = {
  'inputs': 'They are in the batch.',
  'cache': 'It contains the inputs of the batch.',
  'tokens_to_logits': 'It is a step of the network.',
  'num_decodes': 'Pass the argument num_decodes.',
  'initial_index': 'It is the end of the inputs of each row.',
  'padding_mask': f'Padding rows have no 1 in {_PREFIX}.',
  'cache_offset': "It is a property of the network's cache.",
}
