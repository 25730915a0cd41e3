"""Decoder-only models: plain (causal) and prefix language models."""

from collections.abc import Collection, Mapping, Sequence
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import losses
from t5x_lite import tree_utils
from t5x_lite.models import base
from t5x_lite.models import generation
from t5x_lite.types import Array, Batch, Params

_PREFIX = 'decoder_causal_attention'
_PACKING_FEATURES = ('decoder_segment_ids', 'decoder_positions')


class DecoderOnlyModel(base.BaseTransformerModel):
  """A model that reads inputs and predicts targets in one sequence.

  What is input is said by the batch's feature `decoder_causal_attention`, <int32>[batch, length]: 1 at the first
  positions of an example, one more than it has input tokens, as the first position reads the start. Training and
  scoring go without it unless `inputs_bidirectional_attention`; prediction needs it.

  Args:
    module: network called as `module(decoder_input_tokens, decoder_target_tokens, decoder_segment_ids=,
      decoder_positions=, decoder_causal_attention=, decode=, enable_dropout=)`, returning <float32>[batch, length,
      vocab]. Predictions also use `max_decode_length=`, `prefill=` and `prefill_lengths=` (see
      `networks.decoder_only.DecoderWrapper`). A `networks.Network` may say more about its cache.
    vocabulary: of inputs and targets.
    optimizer_def: see `BaseTransformerModel`.
    decode_fn: decoding algorithm of predictions; it must take `initial_index`, where each row's decoding starts.
    inputs_bidirectional_attention: let the inputs see each other both ways (prefix language model), in training,
      scoring and prediction alike. Otherwise all is causal.
    feature_converter_cls: name of a feature converter, or a seqio converter class, in place of 'decoder_only', which
      makes batches of a prefix language model where task_feature_lengths has `inputs`, and else of the targets alone.
    label_smoothing: see `BaseTransformerModel`.
    z_loss: see `BaseTransformerModel`.
    loss_normalizing_factor: see `BaseTransformerModel`.
    metric_fns: see `BaseTransformerModel`.

  Raises:
    ConfigError: see `BaseTransformerModel`.
  """

  FEATURE_CONVERTER = 'decoder_only'

  def __init__(
      self,
      module: nn.Module,
      vocabulary: Any,
      optimizer_def: Any,
      decode_fn: decoding.DecodeFnCallable = decoding.temperature_sample,
      inputs_bidirectional_attention: bool = False,
      feature_converter_cls: Any = None,
      label_smoothing: float = 0.0,
      z_loss: float = 0.0,
      loss_normalizing_factor: losses.LossNormalizingFactor = None,
      *,
      metric_fns: Sequence[base.MetricFn] = (),
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
    )
    self._inputs_bidirectional_attention = inputs_bidirectional_attention

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """See `BaseModel.get_initial_variables`.

    Args:
      rng: key of the parameters.
      input_shapes: shape of `decoder_input_tokens` [batch, length], among others.
      input_types: dtypes of features; int32 where none is given.

    Raises:
      ConfigError: the shape is missing, or the vocabulary is larger than the logits' last dim.
    """
    name = 'decoder_input_tokens'
    if name not in input_shapes:
      raise errors.ConfigError(
          f'Got input_shapes of {sorted(input_shapes)} without {name!r}.{errors.did_you_mean(name, input_shapes)}')
    tokens = jnp.ones(input_shapes[name], (input_types or {}).get(name, jnp.int32))
    logits, variables = self.module.init_with_output(rng, tokens, tokens, decode=False, enable_dropout=False)
    base.check_vocabulary_fits('vocabulary', self.output_vocabulary, logits.shape[-1])
    variables = dict(tree_utils.to_dict(variables))
    # Sown values belong to a batch, not to the state.
    variables.pop('intermediates', None)
    return variables

  def compute_logits(self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=()):
    """See `BaseTransformerModel.compute_logits`.

    Raises:
      ConfigError: the batch does not say what is input, and `inputs_bidirectional_attention` needs it.
    """
    return base.apply_module(
        self.module, params, batch['decoder_input_tokens'], batch['decoder_target_tokens'],
        **{name: batch[name] for name in _PACKING_FEATURES if name in batch}, **self._prefix(batch),
        decode=False, enable_dropout=dropout_rng is not None,
        rngs=self._rngs(dropout_rng),
        flax_mutables=flax_mutables, mutable=mutable)

  def _prefix(self, batch: Batch) -> dict[str, Array]:
    """Returns the network's argument that opens the inputs to each other, if there is to be one."""
    if not self._inputs_bidirectional_attention:
      return {}
    if _PREFIX not in batch:
      raise errors.ConfigError(
          f'Got inputs_bidirectional_attention=True and a batch without {_PREFIX!r}, which says what is input. Add a '
          "length for 'inputs' to task_feature_lengths, or set inputs_bidirectional_attention=False.")
    return {_PREFIX: batch[_PREFIX]}

  def check_prediction_features(self, features: Collection[str]) -> None:
    """See `BaseModel.check_prediction_features`: rows are not packed and say what is input."""
    generation.check_features(features, {
        'decoder_input_tokens': 'int32 [batch, length], the inputs, with room for what is to be decoded'})
    if _PREFIX not in features:
      raise errors.ConfigError(
          f'Got batches without {_PREFIX!r} to predict from, which says what the inputs are. Add a length for '
          "'inputs' to task_feature_lengths; a task of targets alone cannot be decoded: set infer_eval_dataset_cfg to "
          'None.')

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
    """Decodes what follows the inputs of a batch: reads each row's inputs in one pass, then steps with a cache.

    Args:
      params: the parameters.
      batch: `decoder_input_tokens` <int32>[batch, length], of which the inputs alone are read, and
        `decoder_causal_attention` <int32>[batch, length], which says how long these are. `length` is that of inputs and
        decoded tokens together, so rows with short inputs may decode more.
      rng: key for a `decode_fn` that draws.
      return_all_decodes: return all sequences, not the best alone.
      num_decodes: number of sequences for each row.
      decoder_params: further options of `decode_fn`; an `eos_id` here replaces the vocabulary's.
      flax_mutables: the module's other collections.

    Returns:
      (<int32>[batch, length] decoded tokens without the inputs, filled up with 0, {'scores': <float32>[batch]}) of the
      best sequences, or with `return_all_decodes` ([batch, num_decodes, length], {'scores': [batch, num_decodes]}),
      best last.

    Raises:
      ConfigError: a packed batch, one that does not say what is input, and whatever `decode_fn` cannot take; see
        `generation.decode_options`.
    """
    self.check_prediction_features(batch)
    options = generation.decode_options(
        self.decode_fn, decoder_params, _GENERATION_KEYS, rng=rng, eos_id=self.output_vocabulary.eos_id,
        num_decodes=num_decodes, prefilled=True)
    is_prompt = batch[_PREFIX] > 0
    # Rows that only fill up a batch have not even the position that reads the start. Nothing is to wait for them: they
    # get a prompt that leaves room for one token.
    is_filling = ~jnp.any(is_prompt, axis=1)
    prompt = jnp.where(is_filling[:, None], 1, jnp.where(is_prompt, batch['decoder_input_tokens'], 0))
    length = prompt.shape[1]
    num_inputs = jnp.where(is_filling, length, jnp.sum(is_prompt, axis=1, dtype=jnp.int32)) - 1
    apply = functools.partial(
        base.apply_module, self.module, params, enable_dropout=False, decode=True, max_decode_length=length,
        mutable=('cache',))
    # The last input is read with the others, but left to the first step, which needs its logits.
    _, collections = apply(
        prompt, batch[_PREFIX], **self._prefix(batch), prefill=True, prefill_lengths=num_inputs,
        flax_mutables=flax_mutables)
    cache = generation.share_beams(self.module, collections['cache'], self.decode_fn, num_decodes)

    def tokens_to_logits(state: decoding.DecodingState) -> tuple[Array, Mapping[str, Any]]:
      generation.check_fits_cache(state, length)
      logits, updated = apply(
          state.cur_token, state.cur_token, flax_mutables={**(flax_mutables or {}), 'cache': state.cache})
      return jnp.squeeze(logits, axis=1), updated['cache']

    sequences, scores = self.decode_fn(
        inputs=prompt, cache=cache, tokens_to_logits=tokens_to_logits, num_decodes=num_decodes,
        initial_index=num_inputs, cache_offset=generation.cache_offset(self.module), **options)
    # The first token that a row decodes stands where its last input was the token to feed.
    sequences = jax.vmap(generation.remove_prefix, in_axes=(1, None), out_axes=1)(sequences, num_inputs)
    if return_all_decodes:
      return sequences, {'scores': scores}
    return sequences[:, -1], {'scores': scores[:, -1]}


# Arguments of decoding functions that are not the caller's to set, and what the caller sets instead.
_GENERATION_KEYS = {
    'inputs': 'they are in the batch',
    'cache': 'it is filled with the inputs of the batch',
    'tokens_to_logits': 'it is a step of the network',
    'num_decodes': 'pass the argument num_decodes',
    'initial_index': 'it is where the inputs of each row end',
    'is_filling': f'rows that only fill up a batch have no 1 in {_PREFIX}',
    'cache_offset': "it is a property of the network's cache",
}
