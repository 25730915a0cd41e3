"""Encoder-decoder models."""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import flax.linen as nn
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

_PACKING_FEATURES = (
  'encoder_segment_ids',
  'decoder_segment_ids',
  'encoder_positions',
  'decoder_positions',
)


@dataclasses.dataclass(frozen=True)
class DecoderParams:
  """Defaults of `EncoderDecoderModel.predict_batch_with_aux`.

  Attributes:
    return_all_decodes: return all decoded sequences of an example, best last, instead of the best one.
    num_decodes: number of sequences per example; in beam search, the number of beams. Greedy search decodes one.

  Raises:
    ConfigError: `num_decodes` is below 1.
  """

  return_all_decodes: bool = False
  num_decodes: int = 1

  def __post_init__(self):
    checks.check(
      'models.DecoderParams', vars(self), num_decodes=checks.number(at_least=1, integer=True)
    )


class EncoderDecoderModel(base.BaseTransformerModel):
  """Model that reads inputs with an encoder and predicts targets with a decoder.

  Args:
    module: network called as `module(encoder_input_tokens, decoder_input_tokens, decoder_target_tokens,
      encoder_segment_ids=, decoder_segment_ids=, encoder_positions=, decoder_positions=, decode=, enable_dropout=)`,
      returning <float32>[batch, length, vocab]. Predictions also use its methods `encode`, `decode` and `init_cache`;
      see `generation.generate`.
    input_vocabulary: see `BaseTransformerModel`.
    output_vocabulary: see `BaseTransformerModel`.
    optimizer_def: see `BaseTransformerModel`.
    decode_fn: decoding algorithm of predictions; prompts need one with an argument `initial_index`.
    feature_converter_cls: name of a feature converter, or a seqio converter class, instead of 'encoder_decoder'.
    label_smoothing: see `BaseTransformerModel`.
    z_loss: see `BaseTransformerModel`.
    loss_normalizing_factor: see `BaseTransformerModel`.
    default_decoder_params: `DecoderParams` of predictions whose call does not specify them.
    metric_fns: see `BaseTransformerModel`.
    constraints: see `BaseTransformerModel`.
    stop_token_ids: tokens that end a decoded sequence, in addition to the end token of `output_vocabulary`; if there
      are any, they replace those of `decode_fn`.
    decoder_start_id: first input of the decoder for each text, also in packed rows. Batches have 0 there, whatever
      made them, and the model replaces it.
    adapter: see `BaseTransformerModel`.

  Raises:
    ConfigError: see `BaseTransformerModel`; or a number of decodes that `decode_fn` does not support.
  """

  FEATURE_CONVERTER = 'encoder_decoder'
  ACCEPTS_STACKED_LAYERS = True
  SUPPORTS_CHUNKED_LOSS = True
  # Defaults for a subclass whose `__init__` does not call ours, see `BaseTransformerModel`.
  stop_token_ids: tuple[int, ...] = ()
  decoder_start_id: int = 0

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary: Any,
    output_vocabulary: Any,
    optimizer_def: Any,
    decode_fn: decoding.DecodeFnCallable | decoding.LabelScores = decoding.beam_search,
    feature_converter_cls: Any = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    loss_normalizing_factor: losses.LossNormalizingFactor = None,
    default_decoder_params: DecoderParams | None = None,
    *,
    metric_fns: Sequence[base.MetricFn] = (),
    constraints: decoding.Constraints | None = None,
    stop_token_ids: Sequence[int] = (),
    decoder_start_id: int = 0,
    adapter: Lora | None = None,
  ):
    super().__init__(
      module=module,
      input_vocabulary=input_vocabulary,
      output_vocabulary=output_vocabulary,
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
    checks.check(
      'models.EncoderDecoderModel',
      {'stop_token_ids': tuple(stop_token_ids), 'decoder_start_id': decoder_start_id},
      decoder_start_id=checks.number(at_least=0, integer=True),
      stop_token_ids=checks.Expectation(
        'ids above 0', lambda ids: all(isinstance(i, int) and i > 0 for i in ids)
      ),
    )
    self.stop_token_ids = tuple(stop_token_ids)
    self.decoder_start_id = decoder_start_id
    self._default_decoder_params = default_decoder_params or DecoderParams()
    generation.check_decoder_options(
      self.decode_fn, self._default_decoder_params.num_decodes, 'models.DecoderParams.num_decodes'
    )

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """See `BaseModel.get_initial_variables`.

    Args:
      rng: key of the parameters.
      input_shapes: shapes of `encoder_input_tokens` and `decoder_input_tokens` [batch, length]; of a packed batch also
        shapes of segment ids and positions.
      input_types: dtypes of features, by default int32.

    Raises:
      ConfigError: a vocabulary is larger than the logits' last dim.
      KeyError: a shape is missing.
    """
    input_types = input_types or {}

    def ones(name):
      return jnp.ones(input_shapes[name], input_types.get(name, jnp.int32))

    encoder_inputs = ones('encoder_input_tokens')
    decoder_inputs = ones('decoder_input_tokens')
    packing: dict[str, Any] = {
      name: ones(name) for name in _PACKING_FEATURES if name in input_shapes
    }
    logits, variables = self._initialize(
      rng,
      encoder_inputs,
      decoder_inputs,
      decoder_inputs,
      decode=False,
      enable_dropout=False,
      **packing,
    )
    vocabulary_size.check_vocabulary_fits(
      'output_vocabulary', self.output_vocabulary, logits.shape[-1]
    )
    return variables

  def compute_logits(
    self, params, batch, dropout_rng=None, *, flax_mutables=None, mutable=(), return_logits=True
  ):
    """Run the network on given targets; see `BaseTransformerModel.compute_logits`."""
    options: dict[str, Any] = {name: batch[name] for name in _PACKING_FEATURES if name in batch}
    if not return_logits:
      options['return_logits'] = False
    return base.apply_module(
      self.module,
      self.network_params(params, dropout_rng),
      batch['encoder_input_tokens'],
      self._with_start(batch['decoder_input_tokens'], batch.get('decoder_segment_ids')),
      batch['decoder_target_tokens'],
      **options,
      decode=False,
      enable_dropout=dropout_rng is not None,
      rngs=self._rngs(dropout_rng),
      flax_mutables=flax_mutables,
      mutable=mutable,
    )

  def _with_start(self, decoder_inputs: Array, segment_ids: Array | None = None) -> Array:
    """Return <int32>[batch, length] with `decoder_start_id` where a text starts.

    Args:
      decoder_inputs: <int32>[batch, length].
      segment_ids: <int32>[batch, length] of packed rows, 0 for padding; None if each row is one text.
    """
    if self.decoder_start_id == 0:
      return decoder_inputs
    # [batch, length]
    is_start = jnp.zeros_like(decoder_inputs, bool).at[:, 0].set(True)
    if segment_ids is not None:
      is_other = segment_ids[:, 1:] != segment_ids[:, :-1]
      is_start = is_start.at[:, 1:].set(is_other & (segment_ids[:, 1:] != 0))
    return jnp.where(is_start, self.decoder_start_id, decoder_inputs)

  def check_prediction_features(self, features: Collection[str]) -> None:
    """Raise if batches are packed, or without inputs or a length to decode; see `BaseModel`."""
    generation.check_features(
      features,
      {
        'encoder_input_tokens': 'the inputs, int32 [batch, input length]',
        'decoder_input_tokens': 'int32 [batch, length], the prompts or zeros, with the length to decode',
      },
    )

  def predict_batch_with_aux(
    self,
    params: Params,
    batch: Batch,
    rng: Array | None = None,
    decoder_params: Mapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    prompt_with_targets: bool = False,
    *,
    flax_mutables: base.FlaxMutables | None = None,
  ) -> tuple[Array, dict[str, Array]]:
    """Decode the targets of a batch: encode the inputs once, then run the decoder step by step with a cache.

    Padding rows, without tokens of inputs or targets, do not delay decoding and give padding with scores of 0. (A
    `decode_fn` that does not declare `padding_mask` decodes them like all others.) If all rows are empty, they are
    decoded.

    Args:
      params: tree of parameters.
      batch: `encoder_input_tokens` <int32>[batch, input_length] and `decoder_input_tokens` <int32>[batch, length];
        `length` is the number of tokens to decode. The values of the latter are read only if `prompt_with_targets`.
      rng: key for a `decode_fn` that draws.
      decoder_params: more options of `decode_fn`; `eos_id` overrides the output vocabulary's.
      return_all_decodes: True to return all sequences, False for the best; None for the model's default.
      num_decodes: number of sequences for each row; None for the model's default.
      prompt_with_targets: True to start each row with its `decoder_input_tokens` without end tokens. These prompts, of
        any length, are read in one pass; the results contain them.
      flax_mutables: the module's other collections.

    Returns:
      (<int32>[batch, length] tokens, {'scores': <float32>[batch]}) of the best sequences, or with
      `return_all_decodes` ([batch, num_decodes, length], {'scores': [batch, num_decodes]}), best last. Scores of
      `decoding.LabelScores` have one more dim, the labels.

    Raises:
      ConfigError: a packed batch, a missing feature, or options that `decode_fn` does not support; see
        `generation.decode_options`.
    """
    self.check_prediction_features(batch)
    defaults = self._default_decoder_params
    if num_decodes is None:
      num_decodes = defaults.num_decodes
    else:
      num_decodes = num_decodes
    options = generation.decode_options(
      self.decode_fn,
      decoder_params,
      _GENERATION_KEYS,
      rng=rng,
      eos_id=self.output_vocabulary.eos_id,
      num_decodes=num_decodes,
      prefilled=prompt_with_targets,
      stop_token_ids=self.stop_token_ids,
      constraints=self.constraints,
    )
    decoder_inputs = batch['decoder_input_tokens']
    if prompt_with_targets:
      prompt = generation.prompt_from_targets(decoder_inputs, options['eos_id'])
    else:
      prompt = jnp.zeros_like(decoder_inputs)
    prompt = generation.resize(
      prompt, generation.decode_length(self.decode_fn, prompt.shape[1], prompt_with_targets)
    )
    sequences, scores = generation.generate(
      self.module,
      self.network_params(params),
      batch['encoder_input_tokens'],
      self._with_start(prompt),
      self.decode_fn,
      num_decodes=num_decodes,
      prefill=prompt_with_targets,
      padding_mask=generation.padding_mask(batch),
      flax_mutables=flax_mutables,
      **self._methods_of_t5x(params, flax_mutables),
      **options,
    )
    if prompt.shape != decoder_inputs.shape:
      sequences = generation.resize(sequences, decoder_inputs.shape[1])
    if return_all_decodes is None:
      return_all_decodes = defaults.return_all_decodes
    if return_all_decodes:
      return sequences, {'scores': scores}
    return sequences[:, -1], {'scores': scores[:, -1]}

  def _methods_of_t5x(
    self, params: Params, flax_mutables: base.FlaxMutables | None
  ) -> dict[str, Any]:
    """Return the methods of T5X that a subclass overrides, as arguments of `generation.generate`."""
    mutables = base.mutables_argument(flax_mutables)
    found = {}
    if subclassing.overrides(self, EncoderDecoderModel._compute_logits_from_slice):
      found['logits_from_slice'] = functools.partial(
        self._compute_logits_from_slice, params=params, **mutables
      )
    if subclassing.overrides(self, EncoderDecoderModel._compute_kv_cache):
      found['kv_cache'] = functools.partial(self._compute_kv_cache, params, **mutables)
    return found

  @subclassing.takes_ids_and_cache
  def _compute_logits_from_slice(
    self,
    decoding_state: decoding.DecodingState,
    params: Params,
    encoded_inputs: Array,
    raw_inputs: Array,
    max_decode_length: int,
    flax_mutables: base.FlaxMutables | None = None,
  ) -> tuple[Array, Mapping[str, Any]]:
    """Return the logits of the next tokens and the new cache: T5X's method, called if a subclass overrides it.

    Args:
      decoding_state: tokens <int32>[rows, 1] and the cache of the rows, batch * decodes.
      params: tree of parameters.
      encoded_inputs: <float>[rows, input_length, embed] output of the encoder.
      raw_inputs: <int32>[rows, input_length], whose zeros are padding.
      max_decode_length: number of positions of the cache.
      flax_mutables: the module's other collections; passed if there are any.

    Returns:
      (<float32>[rows, vocab] logits, cache).
    """
    return generation.decode_step(
      self.module,
      self.network_params(params),
      encoded_inputs,
      raw_inputs,
      decoding_state.cur_token,
      {**(flax_mutables or {}), 'cache': decoding_state.cache},
      max_decode_length,
    )

  def _compute_kv_cache(
    self,
    params: Params,
    encoded_inputs: Array,
    encoder_input_tokens: Array,
    decoder_input_tokens: Array,
    prefill_decoder_prompt: bool = False,
    flax_mutables: base.FlaxMutables | None = None,
  ) -> tuple[Any, Array | None]:
    """Return the cache of the prompts: T5X's method, called if a subclass overrides it.

    Args:
      params: tree of parameters.
      encoded_inputs: <float>[batch, input_length, embed] output of the encoder.
      encoder_input_tokens: <int32>[batch, input_length], whose zeros are padding.
      decoder_input_tokens: <int32>[batch, length], the prompts and zeros.
      prefill_decoder_prompt: True to read the prompts.
      flax_mutables: the module's other collections; passed if there are any.

    Returns:
      (cache, <int32>[batch] number of tokens in it; None if the prompts are not read).
    """
    cache, _, lengths = generation.read_prompts(
      self.module,
      self.network_params(params),
      encoded_inputs,
      encoder_input_tokens,
      decoder_input_tokens,
      prefill=prefill_decoder_prompt,
      has_cross_cache=False,
      flax_mutables=flax_mutables,
    )
    return cache, lengths


# Arguments of decoding functions that the model sets, and the remedy for callers that set them.
_GENERATION_KEYS = {
  'inputs': 'Use prompt_with_targets.',
  'cache': "It is the result of the network's init_cache.",
  'tokens_to_logits': "It is the network's decode.",
  'num_decodes': 'Pass the argument num_decodes.',
  'initial_index': 'Use prompt_with_targets.',
  'padding_mask': 'It is True for rows of the batch without tokens.',
  'cache_offset': "It is a property of the network's cache.",
}
