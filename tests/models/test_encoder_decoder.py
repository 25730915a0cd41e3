"""Encoder-decoder models: predictions, prompts, options of decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import models
from t5x_lite import networks
from t5x_lite.models import generation
from tests.models import model_cases as cases


@jax.jit
def run_network(params, inputs, decoder_inputs):
  return cases.TinySeq2Seq().apply(
    {'params': params}, inputs, decoder_inputs, decoder_inputs, enable_dropout=False
  )


def greedy_by_full_passes(params, batch, prompt=None):
  """Return the result of greedy decoding without a cache, with a full pass for every token."""
  rows, length = batch['decoder_input_tokens'].shape
  forced = np.zeros((rows, length + 1), np.int32)
  if prompt is not None:
    forced[:, :length] = prompt
  sequences, scores, ended = forced.copy(), np.zeros(rows), np.zeros(rows, bool)
  for position in range(length):
    inputs = jnp.asarray(sequences[:, :length])
    logits = run_network(params, batch['encoder_input_tokens'], inputs)
    log_probs = np.asarray(jax.nn.log_softmax(logits[:, position]))
    for row in range(rows):
      if forced[row, position + 1]:
        continue
      choice = int(log_probs[row].argmax())
      sequences[row, position + 1] = 0 if ended[row] else choice
      scores[row] += 0.0 if ended[row] else log_probs[row, choice]
      ended[row] |= choice == 1
  return sequences[:, 1:], scores


@pytest.mark.parametrize('seed', range(2))
def test_predictions_equal_greedy_search_by_full_passes(batch, seed):
  model = cases.make_model()
  params = cases.initialise(model, seed)['params']
  params['embed']['embedding'] *= 3
  params['out']['kernel'] *= 2
  # Make ends of sequence likely enough to be met in some rows.
  params['out']['bias'] = params['out']['bias'].at[1].add(0.5)
  tokens, aux = jax.jit(model.predict_batch_with_aux)(params, batch)
  expected_tokens, expected_scores = greedy_by_full_passes(params, batch)
  np.testing.assert_array_equal(tokens, expected_tokens)
  np.testing.assert_allclose(aux['scores'], expected_scores, rtol=1e-4, atol=1e-5)
  assert tokens.dtype == jnp.int32


def test_a_network_for_t5x_makes_its_cache_when_it_is_called(batch):
  params = cases.initialise(cases.make_model())['params']
  for decode_fn in (decoding.greedy_search, decoding.beam_search):
    ours, t5x = (
      cases.make_model(module, decode_fn=decode_fn).predict_batch(params, batch)
      for module in (cases.TinySeq2Seq(), cases.T5XSeq2Seq())
    )
    np.testing.assert_array_equal(ours, t5x)


def test_scanned_layers_of_a_network_for_t5x_come_before_the_batch():
  class Scanned(cases.T5XSeq2Seq):
    scan_layers: bool = True

  assert [
    generation.cache_offset(module) for module in (Scanned(), Scanned(scan_layers=False))
  ] == [1, 0]


def test_decode_fn_is_told_where_the_batch_dim_of_the_cache_is(batch):
  seen = []

  class Stacked(cases.TinySeq2Seq, networks.Network):
    cache_offset = 1

  def spy(*, inputs, cache_offset, **kwargs):
    seen.append(cache_offset)
    return jnp.zeros((*inputs.shape[:1], 1, inputs.shape[1]), jnp.int32), jnp.zeros(
      (inputs.shape[0], 1)
    )

  cases.make_model(Stacked(), decode_fn=spy).predict_batch(cases.initial_params(), batch)
  assert seen == [1]


class Offset(cases.TinySeq2Seq):
  cache_offset = 1


class Sharing(cases.TinySeq2Seq):
  def share_beams(self, cache, num_beams):
    raise AssertionError


@pytest.mark.parametrize(
  'module, message',
  [
    (
      Offset(),
      r'attribute cache_offset=1 of module class Offset .*`class Offset\(networks.Network\)`',
    ),
    (
      Sharing(),
      r'method share_beams of module class Sharing .*`class Sharing\(networks.Network\)`',
    ),
  ],
)
def test_attributes_of_a_cache_need_a_network(module, message):
  with pytest.raises(errors.ConfigError, match=message):
    cases.make_model(module)


class _ModelOfAProject(models.EncoderDecoderModel):
  """Sets the attributes that a model of T5X has, and does not call the base class."""

  def __init__(self):
    self.module = cases.TinySeq2Seq()
    self.optimizer_def = None
    self._input_vocabulary = self._output_vocabulary = cases.Vocabulary()
    self._decode_fn = functools.partial(decoding.temperature_sample, temperature=0.0)
    self._label_smoothing = 0.0
    self._z_loss = 0.0
    self._loss_normalizing_factor = None
    self._default_decoder_params = models.DecoderParams()


def test_a_model_with_the_attributes_of_t5x_trains_scores_and_predicts(batch):
  model, params = _ModelOfAProject(), cases.initial_params()
  expected = cases.make_model(decode_fn=model.decode_fn)
  for method in ('predict_batch', 'score_batch', 'eval_fn'):
    found, wanted = (getattr(each, method)(params, batch) for each in (model, expected))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_prompt_with_targets_forces_targets_without_their_ends(batch):
  batch = {
    **batch,
    'decoder_input_tokens': jnp.asarray(
      [[0, 5, 1, 0, 0, 0], [0, 3, 4, 6, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 7, 7, 7, 7]], jnp.int32
    ),
  }
  predict = functools.partial(cases.make_model().predict_batch_with_aux, prompt_with_targets=True)
  tokens, aux = jax.jit(predict)(cases.initial_params(), batch)
  prompt = np.where(
    np.asarray(batch['decoder_input_tokens']) == 1, 0, batch['decoder_input_tokens']
  )
  expected_tokens, expected_scores = greedy_by_full_passes(cases.initial_params(), batch, prompt)
  np.testing.assert_array_equal(tokens, expected_tokens)
  np.testing.assert_allclose(aux['scores'], expected_scores, rtol=1e-5)
  assert tokens[1, :3].tolist() == [3, 4, 6] and tokens[3, :5].tolist() == [7] * 5


def test_any_decode_fn_sees_expanded_rows_and_its_options(batch):
  seen = {}

  def two_decodes(
    *, inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset, bonus
  ):
    seen.update(eos_id=eos_id, rng=decode_rng, cache_offset=cache_offset, bonus=bonus)
    expand = functools.partial(decoding.flat_batch_beam_expand, beam_size=num_decodes)
    cache = jax.tree.map(expand, cache)
    rows = inputs.shape[0] * num_decodes
    logits, cache = tokens_to_logits(
      decoding.DecodingState(
        cur_index=jnp.int32(0),
        sequences=expand(inputs),
        cur_token=jnp.zeros((rows, 1), jnp.int32),
        cache=cache,
      )
    )
    seen['logits'] = logits
    first = jnp.argsort(logits, axis=-1).reshape(inputs.shape[0], num_decodes, -1)[:, :, -1]
    sequences = (
      jnp.zeros((inputs.shape[0], num_decodes, inputs.shape[1]), jnp.int32).at[..., 0].set(first)
    )
    return sequences, jnp.broadcast_to(jnp.arange(num_decodes) * bonus, sequences.shape[:2])

  model = cases.make_model(
    decode_fn=two_decodes, default_decoder_params=models.DecoderParams(num_decodes=2)
  )
  rng = jax.random.key(1)
  options = {'bonus': 10.0, 'eos_id': 3}
  tokens, aux = model.predict_batch_with_aux(cases.initial_params(), batch, rng, options)
  assert options == {'bonus': 10.0, 'eos_id': 3}
  assert (seen['eos_id'], seen['rng'], seen['cache_offset'], seen['bonus']) == (3, rng, 0, 10.0)
  assert tokens.shape == (4, 6) and aux['scores'].tolist() == [10.0] * 4
  np.testing.assert_array_equal(seen['logits'][0::2], seen['logits'][1::2])
  greedy_first = jax.jit(cases.make_model().predict_batch)(cases.initial_params(), batch)[:, 0]
  np.testing.assert_array_equal(tokens[:, 0], greedy_first)
  tokens, aux = jax.eval_shape(
    lambda params: model.predict_batch_with_aux(
      params, batch, rng, {'bonus': 1.0}, return_all_decodes=True, num_decodes=3
    ),
    cases.initial_params(),
  )
  assert tokens.shape == (4, 3, 6) and aux['scores'].shape == (4, 3)


@pytest.mark.parametrize(
  'name',
  [
    'num_decodes',
    'cache',
    'inputs',
    'tokens_to_logits',
    'cache_offset',
    'initial_index',
    'padding_mask',
  ],
)
def test_decoder_params_that_the_model_sets_raise(batch, name):
  with pytest.raises(errors.ConfigError, match=f"`decoder_params` must be options .* got '{name}'"):
    cases.make_model().predict_batch_with_aux(
      cases.initial_params(), batch, decoder_params={name: 1}
    )


def _from_the_start(
  *, inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset, bonus=0.0
):
  raise AssertionError


@pytest.mark.parametrize(
  'decode_fn, options, message',
  [
    (
      decoding.temperature_sample,
      {'temprature': 0.5},
      "temperature_sample .* got 'temprature'. Did you mean 'temperature'",
    ),
    (
      functools.partial(decoding.beam_search, alpha=1.0),
      {'top_k': 5},
      'decode_fn=beam_search .*Known names: alp',
    ),
    (decoding.greedy_search, {'temperature': 0.5}, "decode_fn=greedy_search .* got 'temperature'"),
    (_from_the_start, {'bonuss': 0.5}, "decode_fn=_from_the_start .*Did you mean 'bonus'"),
    (
      _from_the_start,
      {'top_k': 5},
      r'decode_fn=_from_the_start .*Known names: bonus, decode_rng, eos_id\.',
    ),
  ],
)
def test_options_that_the_decode_fn_does_not_have_raise(batch, decode_fn, options, message):
  params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), cases.initial_params())
  with pytest.raises(errors.ConfigError, match=message):
    cases.make_model(decode_fn=decode_fn).predict_batch_with_aux(
      params, batch, decoder_params=options
    )


@pytest.mark.parametrize(
  'decode_fn',
  [
    _from_the_start,
    functools.partial(_from_the_start, bonus=1.0),
    decoding.declare(initial_index=False)(lambda **options: _from_the_start(**options)),
  ],
)
def test_prompts_need_a_decode_fn_that_starts_after_them(batch, decode_fn):
  with pytest.raises(
    errors.ConfigError, match='Prompts need a decode_fn with the argument initial_index'
  ):
    cases.make_model(decode_fn=decode_fn).predict_batch_with_aux(
      cases.initial_params(), batch, prompt_with_targets=True
    )


@pytest.mark.parametrize('decode_fn', [decoding.greedy_search, decoding.beam_search])
def test_stop_token_ids_of_the_model_end_sequences(batch, decode_fn):
  """A folder may name several end tokens; the vocabulary's own, which may be among them, counts once."""
  model = cases.make_model(decode_fn=decode_fn)
  params = cases.initialise(model)['params']
  params['out']['bias'] = params['out']['bias'].at[5].add(1.5)
  plain = model.predict_batch(params, batch)
  stops = cases.make_model(decode_fn=decode_fn, stop_token_ids=(1, 5))
  found = stops.predict_batch(params, batch)
  wanted, _ = model.predict_batch_with_aux(params, batch, decoder_params={'stop_token_ids': (5,)})
  np.testing.assert_array_equal(found, wanted)
  assert not np.array_equal(found, plain)
  same = cases.make_model(decode_fn=decode_fn, stop_token_ids=(1,)).predict_batch(params, batch)
  np.testing.assert_array_equal(same, plain)


def test_the_decoder_starts_with_the_id_of_the_model(batch):
  model = cases.make_model(decoder_start_id=5)
  params = cases.initialise(model)['params']
  started = dict(batch, decoder_input_tokens=np.array(batch['decoder_input_tokens']))
  started['decoder_input_tokens'][:, 0] = 5
  plain = cases.make_model()
  logits, _ = plain.compute_logits(params, started)
  np.testing.assert_array_equal(model.compute_logits(params, batch)[0], logits)
  # In packed rows each text starts with it, and padding stays 0.
  segments = np.array([[1, 1, 2, 2, 0, 0]] * len(batch['decoder_input_tokens']), np.int32)
  seen = []

  class Recorder(cases.TinySeq2Seq):
    def __call__(self, inputs, decoder_inputs, *args, **kwargs):
      seen.append(np.asarray(decoder_inputs))
      kwargs = {name: value for name, value in kwargs.items() if 'segment' not in name}
      return super().__call__(inputs, decoder_inputs, *args, **kwargs)

  packed = dict(
    batch, decoder_input_tokens=np.array([[0, 7, 0, 8, 0, 0]] * len(segments), np.int32)
  )
  packed |= {'decoder_segment_ids': segments}
  cases.make_model(Recorder(), decoder_start_id=5).compute_logits(params, packed)
  np.testing.assert_array_equal(seen[0][0], [5, 7, 5, 8, 0, 0])
  # Decoding: the first tokens are those after the id, with and without prompts.
  tokens = model.predict_batch(params, batch)
  np.testing.assert_array_equal(tokens[:, 0], np.asarray(logits)[:, 0].argmax(-1))
  assert not np.array_equal(tokens, plain.predict_batch(params, batch))
  prompted, _ = model.predict_batch_with_aux(params, batch, prompt_with_targets=True)
  real = np.asarray(batch['decoder_input_tokens'])[:, 1:]
  prompt = np.where(real == 1, 0, real)
  kept = np.cumprod(prompt != 0, axis=1).astype(bool)
  np.testing.assert_array_equal(np.asarray(prompted)[:, :-1][kept], prompt[kept])


@pytest.mark.parametrize(
  'decode_fn, options',
  [
    (decoding.greedy_search, {}),
    (decoding.temperature_sample, {'topk': 1}),
    (decoding.beam_search, {}),
  ],
)
def test_each_search_starts_with_the_id_of_the_model(batch, decode_fn, options):
  model = cases.make_model(decode_fn=decode_fn, decoder_start_id=5)
  params = cases.initialise(model)['params']
  logits, _ = model.compute_logits(params, batch)
  tokens, _ = model.predict_batch_with_aux(
    params, batch, jax.random.key(0), decoder_params=options, num_decodes=1
  )
  np.testing.assert_array_equal(tokens[:, 0], np.asarray(logits)[:, 0].argmax(-1))


def test_stop_token_ids_need_a_decode_fn_with_them(batch):
  def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset):
    raise AssertionError

  model = cases.make_model(decode_fn=decode, stop_token_ids=(5,))
  with pytest.raises(errors.ConfigError, match=r'argument stop_token_ids, which gets \(5,\)'):
    model.predict_batch(cases.initialise(model)['params'], batch)
  with pytest.raises(errors.ConfigError, match=r'stop_token_ids` must be ids above 0, got \(0,\)'):
    cases.make_model(stop_token_ids=(0,))


@pytest.mark.parametrize(
  'decode_fn', [decoding.greedy_search, decoding.temperature_sample, decoding.beam_search]
)
def test_constraints_of_the_model_reach_its_decode_fn(batch, decode_fn):
  constraints = decoding.Constraints(min_decode_len=4, no_repeat_ngram_size=1)
  plain = cases.make_model(decode_fn=decode_fn)
  params = cases.initialise(plain)['params']
  wanted, _ = plain.predict_batch_with_aux(
    params, batch, decoder_params={'logit_processor': constraints}
  )
  assert not np.array_equal(wanted, plain.predict_batch(params, batch))
  model = cases.make_model(constraints=constraints)
  assert model.constraints == constraints
  for constrained in (plain.with_constraints(constraints), model.with_decode_fn(decode_fn)):
    np.testing.assert_array_equal(constrained.predict_batch(params, batch), wanted)


def test_constraints_without_effect_change_no_program(batch):
  plain = cases.make_model(decode_fn=decoding.beam_search)
  params = cases.initial_params()
  without = cases.make_model(decode_fn=decoding.beam_search, constraints=decoding.Constraints())
  programs = {str(jax.make_jaxpr(model.predict_batch)(params, batch)) for model in (plain, without)}
  assert without.constraints is None and len(programs) == 1


def test_constraints_need_a_decode_fn_with_them(batch):
  def decode(inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset):
    raise AssertionError

  model = cases.make_model(decode_fn=decode, constraints=decoding.Constraints(min_decode_len=2))
  with pytest.raises(errors.ConfigError, match='argument logit_processor, for the constraints'):
    model.predict_batch(cases.initial_params(), batch)
  with pytest.raises(
    errors.ConfigError, match='constraints` must be decoding.Constraints .*In gin'
  ):
    cases.make_model(constraints=decoding.Constraints)


def test_two_keys_for_one_decoding_raise(batch):
  with pytest.raises(errors.ConfigError, match='not both'):
    cases.make_model().predict_batch_with_aux(
      cases.initial_params(),
      batch,
      jax.random.key(0),
      decoder_params={'decode_rng': jax.random.key(1)},
    )


def test_remove_prefix_shifts_each_row():
  sequences = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], jnp.int32)
  shifted = jax.jit(models.remove_prefix)(sequences, jnp.asarray([0, 1, 4]))
  assert (
    shifted.tolist() == [[1, 2, 3, 4], [6, 7, 8, 0], [0, 0, 0, 0]] and shifted.dtype == jnp.int32
  )


def test_packed_batches_are_not_predicted(batch):
  with pytest.raises(errors.ConfigError, match='pack=False'):
    cases.make_model().predict_batch(
      cases.initial_params(), {**batch, 'encoder_segment_ids': batch['encoder_input_tokens']}
    )


@pytest.mark.parametrize(
  'missing, message',
  [
    (
      'decoder_input_tokens',
      "need the feature 'decoder_input_tokens', .* zeros, with the length to decode",
    ),
    ('encoder_input_tokens', "need the feature 'encoder_input_tokens', the inputs"),
  ],
)
def test_batches_without_a_feature_that_predictions_read_raise(batch, missing, message):
  batch.pop(missing)
  for check in (
    lambda: cases.make_model().predict_batch(cases.initial_params(), batch),
    lambda: cases.make_model().check_prediction_features(batch.keys()),
  ):
    with pytest.raises(errors.ConfigError, match=message):
      check()


def test_a_model_without_decode_fn_trains_but_does_not_predict(batch):
  model = cases.make_model(decode_fn=None)
  assert np.isfinite(jax.jit(model.eval_fn)(cases.initial_params(), batch)[0])
  with pytest.raises(
    errors.ConfigError, match=r'decode_fn` must be a decoding .*got None. .*with_decode_fn\('
  ):
    model.predict_batch(cases.initial_params(), batch)
  for make in (
    lambda: cases.make_model(decode_fn='greedy_search'),
    lambda: model.with_decode_fn('greedy_search'),
  ):
    with pytest.raises(
      errors.ConfigError, match="decode_fn` must be a decoding algorithm, .* got 'greedy_search'"
    ):
      make()


@pytest.mark.parametrize(
  'options, message',
  [
    (
      {'label_smoothing': 1.0},
      r'`EncoderDecoderModel.label_smoothing` must be a number in \[0, 1\), got 1.0',
    ),
    ({'label_smoothing': -0.1}, 'label_smoothing` .* got -0.1'),
    ({'label_smoothing': float('nan')}, 'label_smoothing` .* got nan'),
    ({'z_loss': -1e-4}, 'z_loss` must be a number >= 0, got -0.0001'),
    ({'z_loss': '1e-4'}, "z_loss` .* got '1e-4'"),
    (
      {'loss_normalizing_factor': 0},
      'loss_normalizing_factor` must be a number > 0 or None, or the name .* got 0',
    ),
    ({'loss_normalizing_factor': -1.0}, 'loss_normalizing_factor` .* got -1.0'),
    ({'loss_normalizing_factor': True}, 'loss_normalizing_factor` .* got True'),
    ({'loss_normalizing_factor': 'num_real_target_token'}, "Did you mean 'NUM_REAL_TARGET_TOKENS'"),
    (
      {'default_decoder_params': models.DecoderParams(num_decodes=4)},
      '`models.DecoderParams.num_decodes` must be an integer .*, got 4. .*decode_fn=greedy_search',
    ),
    (
      {
        'decode_fn': functools.partial(decoding.greedy_search),
        'default_decoder_params': models.DecoderParams(num_decodes=2),
      },
      'got 2',
    ),
  ],
)
def test_options_out_of_range_raise(options, message):
  with pytest.raises(errors.ConfigError, match=message):
    cases.make_model(**options)


def test_a_wrapped_greedy_search_is_recognised():

  @functools.wraps(decoding.greedy_search)
  def configured(*args, **kwargs):
    return decoding.greedy_search(*args, **kwargs)

  with pytest.raises(errors.ConfigError, match='num_decodes` must be .* got 2'):
    cases.make_model(
      decode_fn=configured, default_decoder_params=models.DecoderParams(num_decodes=2)
    )


def test_num_decodes_of_a_call_are_checked(batch):
  with pytest.raises(errors.ConfigError, match='num_decodes` must be .* got 2'):
    cases.make_model().predict_batch_with_aux(cases.initial_params(), batch, num_decodes=2)
  for wrong in (0, 2.0, True):
    with pytest.raises(
      errors.ConfigError, match=f'num_decodes` must be an integer >= 1, got {wrong}'
    ):
      models.DecoderParams(num_decodes=wrong)
    with pytest.raises(
      errors.ConfigError, match=f'num_decodes` must be an integer >= 1, got {wrong}'
    ):
      cases.make_model(decode_fn=decoding.beam_search).predict_batch_with_aux(
        cases.initial_params(), batch, num_decodes=wrong
      )
