"""Predictions of encoder-decoder models through the T5 network: prompts, beams, meshes, and the cost of a step."""

import collections
import dataclasses
import functools
import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import models
from t5x_lite.errors import ConfigError
from t5x_lite.models import generation
from t5x_lite.networks import t5
from tests.networks import network_cases as cases

_LENGTH = 6
_LAYOUTS = {'t5': {}, 'scalable': dict(param_layout='scalable_t5', scan_layers=True)}
_VOCABULARY = types.SimpleNamespace(vocab_size=40, eos_id=1, pad_id=0)


def _long(*values):
  """Return parameters of a test case that runs with the long tests."""
  return pytest.param(*values, marks=pytest.mark.full)


def _model(layout='t5', decode_fn=decoding.greedy_search, **options):
  config = cases.tiny_config(num_encoder_layers=1, num_decoder_layers=2, **_LAYOUTS[layout])
  return models.EncoderDecoderModel(
    t5.Transformer(config), _VOCABULARY, _VOCABULARY, None, decode_fn, **options
  )


@functools.cache
def _params(layout='t5'):
  params = cases.random_params(_model(layout).module.config)
  # With this end token some sequences end early, and some do not.
  params['decoder']['logits_dense']['kernel'][:, 1] *= -1
  return params


def _batch(rows=4):
  batch = cases.tiny_batch(batch=rows, decoder_length=_LENGTH)
  return {name: batch[name] for name in ('encoder_input_tokens', 'decoder_input_tokens')}


def _prompts():
  """Return `decoder_input_tokens` with prompts of 2, 0, 5 and 3 tokens; the last one contains an end token."""
  return jnp.asarray(
    [[0, 7, 9, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 4, 5, 6, 7, 8], [0, 3, 3, 3, 1, 0]], jnp.int32
  )


def _predict(model, params, batch, **options):
  return cases.jit(functools.partial(model.predict_batch_with_aux, **options))(params, batch)


def _assert_same(got, want):
  np.testing.assert_allclose(got[1]['scores'], want[1]['scores'], rtol=1e-4, atol=1e-5)
  # If fewer sequences have ended than there are beams, the others are empty.
  some = np.asarray(want[1]['scores']) > -1e6
  assert np.all(np.any(some.reshape(len(some), -1), axis=1))
  np.testing.assert_array_equal(np.asarray(got[0])[some], np.asarray(want[0])[some])


# ---- Prompts --------------------------------------------------------------------------------------------------------


_COLD = functools.partial(decoding.temperature_sample, temperature=0.0, rescale_log_probs=False)


@pytest.mark.parametrize(
  'layout, decode_fn, num_decodes',
  [
    _long('t5', decoding.greedy_search, 1),
    ('scalable', decoding.beam_search, 3),
    _long('t5', _COLD, 2),
    _long('scalable', decoding.greedy_search, 1),
    _long('scalable', _COLD, 2),
    _long('t5', decoding.beam_search, 3),
  ],
)
def test_prompts_read_in_one_pass_continue_as_those_forced_token_by_token(
  layout, decode_fn, num_decodes
):
  model, params = _model(layout, decode_fn), _params(layout)
  batch = {**_batch(), 'decoder_input_tokens': _prompts()}
  got = _predict(
    model, params, batch, prompt_with_targets=True, return_all_decodes=True, num_decodes=num_decodes
  )
  prompt = generation.prompt_from_targets(_prompts(), 1)

  def force(params, inputs):
    return generation.generate(
      model.module,
      params,
      inputs,
      prompt,
      decode_fn,
      eos_id=1,
      num_decodes=num_decodes,
      decode_rng=None,
    )

  sequences, scores = cases.jit(force)(params, batch['encoder_input_tokens'])
  _assert_same(got, (sequences, {'scores': scores}))
  for row, length in enumerate((2, 0, 5, 3)):
    assert (np.asarray(got[0])[row, -1, :length] == _prompts()[row, 1 : length + 1]).all()


# ---- Beams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('layout', ['t5', _long('scalable')])
def test_beams_share_the_encoding_and_equal_a_search_by_full_passes_over_copies(layout):
  model, params, batch, num_decodes = (
    _model(layout, decoding.beam_search),
    _params(layout),
    _batch(),
    3,
  )
  got = _predict(model, params, batch, num_decodes=num_decodes, return_all_decodes=True)

  def by_full_passes(params, inputs):
    rows = jnp.repeat(inputs, num_decodes, axis=0)

    def tokens_to_logits(state):
      tokens = state.sequences[:, :_LENGTH]
      logits = model.module.apply(
        {'params': params}, rows, tokens, jnp.ones_like(tokens), enable_dropout=False
      )
      return jax.lax.dynamic_index_in_dim(logits, state.cur_index, 1, keepdims=False), state.cache

    return decoding.beam_search(
      jnp.zeros((4, _LENGTH), jnp.int32), {}, tokens_to_logits, 1, num_decodes
    )

  sequences, scores = cases.jit(by_full_passes)(params, batch['encoder_input_tokens'])
  _assert_same(got, (sequences, {'scores': scores}))
  assert len(np.unique(np.asarray(sequences)[0], axis=0)) == num_decodes
  assert (np.asarray(sequences)[..., -1] == 0).any(), 'no sequence ends early'
  best = _predict(model, params, batch, num_decodes=num_decodes)
  _assert_same(best, (sequences[:, -1], {'scores': scores[:, -1]}))


def test_sequences_longer_than_the_cache_raise_and_shorter_ones_are_the_same_search():
  model, params = (
    _model(decode_fn=decoding.beam_search),
    jax.eval_shape(lambda: jax.tree.map(jnp.asarray, _params())),
  )

  def search(decode_fn):
    return jax.eval_shape(
      functools.partial(
        model.with_decode_fn(decode_fn).predict_batch_with_aux, num_decodes=np.int64(2)
      ),
      params,
      _batch(),
    )

  with pytest.raises(ConfigError, match=f'at most {_LENGTH} tokens, .*, got {_LENGTH + 1}.'):
    search(functools.partial(decoding.beam_search, max_decode_len=_LENGTH + 1))
  for length in (_LENGTH, _LENGTH - 2):
    assert search(functools.partial(decoding.beam_search, max_decode_len=length))[0].shape == (
      4,
      length,
    )


@pytest.mark.full  # by default, test_encoder_decoder.py has options and keys of any decode_fn
def test_sampling_takes_its_options_and_key():
  model, batch = _model(decode_fn=decoding.temperature_sample), _batch()
  predict = cases.jit(
    lambda params, batch, rng, temperature: model.predict_batch_with_aux(
      params,
      batch,
      rng,
      {'topk': 0, 'temperature': temperature},
      num_decodes=2,
      return_all_decodes=True,
    )
  )
  first, again, other, cold = (
    np.asarray(predict(_params(), batch, jax.random.key(seed), temperature)[0])
    for seed, temperature in ((0, 3.0), (0, 3.0), (1, 3.0), (0, 1e-3))
  )
  np.testing.assert_array_equal(first, again)
  assert (first != other).any() and (first[:, 0] != first[:, 1]).any()
  greedy = _predict(_model(), _params(), batch)[0]
  np.testing.assert_array_equal(cold, np.repeat(np.asarray(greedy)[:, None], 2, axis=1))


# ---- What must not matter -------------------------------------------------------------------------------------------


@pytest.mark.full  # by default, rows of padding are below and inputs in tests/networks
@pytest.mark.parametrize(
  'decode_fn, num_decodes', [_long(decoding.greedy_search, 1), (decoding.beam_search, 2)]
)
def test_padding_of_the_batch_and_of_inputs_changes_no_prediction(decode_fn, num_decodes):
  model, params = _model(decode_fn=decode_fn), _params()
  batch = {**_batch(), 'decoder_input_tokens': _prompts()}
  options = dict(num_decodes=num_decodes, prompt_with_targets=True)
  padded = {
    name: jnp.pad(value, ((0, 3), (0, 4 if name.startswith('encoder') else 0)))
    for name, value in batch.items()
  }
  got = _predict(model, params, padded, **options)
  _assert_same(
    (got[0][:4], {'scores': got[1]['scores'][:4]}), _predict(model, params, batch, **options)
  )


@pytest.mark.full  # by default, test_base.py has predictions on a mesh
@pytest.mark.parametrize(
  'layout, prompted',
  [('t5', True), _long('t5', False), _long('scalable', True), _long('scalable', False)],
)
def test_predictions_on_a_mesh_equal_those_of_one_device(layout, prompted):
  rules = (
    ('batch', 'data'),
    ('vocab', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('joined_kv', 'model'),
  )
  model, params = _model(layout, decoding.beam_search), _params(layout)
  batch = {**_batch(), 'decoder_input_tokens': _prompts()}
  batch = {name: jnp.concatenate([value, value[::-1]]) for name, value in batch.items()}

  predict = functools.partial(
    model.predict_batch_with_aux,
    num_decodes=2,
    return_all_decodes=True,
    prompt_with_targets=prompted,
  )
  want = cases.jit(predict)(params, batch)
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P('data'))
    compiled = cases.jit(predict, in_shardings=shardings).lower(params, batch).compile()
    got = compiled(*jax.device_put((params, batch), shardings))
  # Caches are cut over the batch and over heads: here 2 rows and 1 head of 2 slots at 6 positions.
  assert 'f32[2,1,12,8]' in compiled.as_text() and 'f32[8,2,12,8]' not in compiled.as_text()
  _assert_same(got, want)


# ---- Padding rows ---------------------------------------------------------------------------------------------------


def _counted(decode_fn, masked=True):
  """Return (`decode_fn`, list with an entry per step); if not `masked`, one that does not declare `padding_mask`."""
  steps = []

  def decode(*, tokens_to_logits, **options):
    def step(state):
      jax.debug.callback(lambda: steps.append(1))
      return tokens_to_logits(state)

    return decode_fn(tokens_to_logits=step, **options)

  # The outermost declaration overrides that of the wrapped function.
  decode = functools.wraps(decode_fn)(decode)
  contract = dataclasses.asdict(decoding.contract_of(decode_fn))
  return (
    decode if masked else decoding.declare(**{**contract, 'padding_mask': False})(decode)
  ), steps


_SAMPLE = functools.partial(decoding.temperature_sample, topk=0, temperature=0.01)


@pytest.mark.parametrize(
  'decode_fn, num_decodes, prompted',
  [
    _long(decoding.greedy_search, 1, False),
    (decoding.beam_search, 3, True),
    _long(_SAMPLE, 2, False),
    _long(decoding.beam_search, 1, False),
    _long(decoding.beam_search, 3, False),
    _long(_SAMPLE, 2, True),
  ],
  ids=lambda value: getattr(value, '__name__', None),
)
def test_padding_rows_do_not_delay_decoding(decode_fn, num_decodes, prompted):
  params = jax.tree.map(np.copy, _params())
  # With these parameters, rows with inputs end earlier than rows without inputs.
  params['decoder']['logits_dense']['kernel'][:, 1] *= 3
  one = {
    'encoder_input_tokens': _batch()['encoder_input_tokens'][1:2],
    'decoder_input_tokens': _prompts()[:1] * prompted,
  }
  padded = {name: jnp.pad(value, ((0, 7), (0, 0))) for name, value in one.items()}

  def predict(batch, masked):
    counted, steps = _counted(decode_fn, masked)
    result = _predict(
      _model(decode_fn=counted),
      params,
      batch,
      num_decodes=num_decodes,
      prompt_with_targets=prompted,
      return_all_decodes=True,
    )
    jax.block_until_ready(result)
    jax.effects_barrier()
    return len(steps), result

  num_steps, alone = predict(one, True)
  num_steps_padded, (sequences, aux) = predict(padded, True)
  num_steps_unmasked, (unmasked, _) = predict(padded, False)
  assert num_steps_padded == num_steps < num_steps_unmasked
  _assert_same((sequences[:1], {'scores': aux['scores'][:1]}), alone)
  np.testing.assert_array_equal(sequences[:1], unmasked[:1])
  assert not np.any(sequences[1:]) and not np.any(aux['scores'][1:]) and np.any(unmasked[1:])


def test_a_decode_fn_with_the_arguments_of_t5x_gets_no_padding_mask():

  def of_t5x(
    *, inputs, cache, tokens_to_logits, eos_id, num_decodes, decode_rng, cache_offset, **options
  ):
    assert not options
    return jnp.full((len(inputs), num_decodes, inputs.shape[1]), 7), jnp.zeros(
      (len(inputs), num_decodes)
    )

  batch = {
    name: jnp.pad(_batch()[name], ((0, 1), (0, 0)))
    for name in ('encoder_input_tokens', 'decoder_input_tokens')
  }
  tokens, _ = _predict(_model(decode_fn=of_t5x), _params(), batch)
  assert tokens.shape == (len(batch['encoder_input_tokens']), _LENGTH) and np.all(tokens == 7)


def test_padding_mask_depends_on_all_tokens_and_on_other_rows():
  inputs, decoder_inputs = np.zeros((3, 4), np.int32), np.zeros((3, 2), np.int32)

  def mask(**features):
    return generation.padding_mask(
      {'encoder_input_tokens': inputs, 'decoder_input_tokens': decoder_inputs, **features}
    ).tolist()

  # The batch of an unconditional model has no inputs.
  assert mask() == [False] * 3
  inputs[0, 3], decoder_inputs[1, 1] = 5, 6
  assert mask() == [False, False, True]
  # An example with targets and empty inputs.
  assert mask(decoder_target_tokens=np.int32([[0, 0], [0, 0], [1, 0]])) == [False] * 3


# ---- Cost -----------------------------------------------------------------------------------------------------------


def _loop_body(text):
  """Return the lines of the longest loop body of a compiled program."""
  bodies = re.findall(r' while\(.*body=%?([\w.\-]+)', text)
  found = [
    re.search(rf'^%{re.escape(name)} .*?^}}', text, re.MULTILINE | re.DOTALL).group().splitlines()
    for name in bodies
  ]
  return max(found, key=len)


@pytest.mark.parametrize(
  'layout, decode_fn, num_beams',
  [
    _long('t5', decoding.greedy_search, 1),
    _long('scalable', decoding.greedy_search, 1),
    _long('t5', decoding.beam_search, 1),
    ('t5', decoding.beam_search, 3),
  ],
)
def test_the_loop_copies_neither_cache_nor_parameters(layout, decode_fn, num_beams):
  """Greedy search and beam search, which reorders its beams, copy no cache."""
  model, length = _model(layout, decode_fn), 96
  batch = {
    'encoder_input_tokens': jax.ShapeDtypeStruct((4, 7), jnp.int32),
    'decoder_input_tokens': jax.ShapeDtypeStruct((4, length), jnp.int32),
  }
  params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, _params(layout)))
  # Compiled as it is run: it is the optimizations that put copies in.
  predict = functools.partial(model.predict_batch_with_aux, num_decodes=num_beams)
  body = _loop_body(jax.jit(predict).lower(params, batch).compile().as_text())
  results = collections.Counter()
  for line in body:
    if match := re.match(r'\s*%([\w.\-]+) = f32\[([\d,]*)\]', line):
      name, shape = match.groups()
      if 'copy' in name or 'slice' in name or 'transpose' in name:
        results['update' if 'dynamic-update-slice' in name else 'other', shape] += 1
  # Keys and values of two layers are updated by one position each.
  assert results['update', f'4,2,{length * num_beams},8'] == 4, results
  # Nothing else of the size of such a cache, of the encoder's keys, or of a kernel is moved.
  sizes = {4 * 2 * length * num_beams * 8, 4 * 2 * 7 * 8, 16 * 16, 16 * 24, 16 * 40}
  moved = {
    shape: int(np.prod([int(d) for d in shape.split(',') if d]))
    for kind, shape in results
    if kind == 'other'
  }
  assert not sizes & set(moved.values()), moved


def test_the_error_for_a_wrong_number_of_decodes_names_the_option():
  with pytest.raises(ConfigError, match=r'`models\.DecoderParams\.num_decodes` must be .*, got 0'):
    models.DecoderParams(num_decodes=0)


@pytest.mark.parametrize(
  ('decode_fn', 'message'),
  [
    (
      lambda inputs, cache, tokens_to_logits: None,
      '`decode_fn` must be a function of .*eos_id=.*unexpected keyword',
    ),
    (
      lambda inputs, **options: inputs,
      r'`decode_fn` must return \(sequences .*, got \[\(2, 3\)\] from <lambda>',
    ),
    (
      lambda inputs, num_decodes, **options: (inputs, inputs[:, 0]),
      r'got \[\(2, 3\), \(2,\)\] from',
    ),
  ],
)
def test_a_decode_fn_with_other_parameters_or_results_raises(decode_fn, message):
  with pytest.raises(ConfigError, match=message):
    generation.call_decode_fn(
      decode_fn,
      inputs=jnp.zeros((2, 3), jnp.int32),
      num_decodes=1,
      cache={},
      tokens_to_logits=None,
      eos_id=1,
    )
