"""Decoder-only models: T5X's recorded losses, scores and decodes; prompts, packing, meshes, errors."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import DecoderWrapper
from t5x_lite.networks import TransformerConfig
from tests import golden_models
from tests.models import model_cases
from tests.networks import network_cases as cases

_VOCAB_SIZE = 24


def _vocabulary(size=_VOCAB_SIZE):
  return types.SimpleNamespace(vocab_size=size, eos_id=1, pad_id=0)


def _model(bidirectional=True, **options):
  network = {
    name: options.pop(name)
    for name in ('num_layers', 'scan_layers', 'param_layout')
    if name in options
  }
  config = TransformerConfig(
    vocab_size=_VOCAB_SIZE,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=24,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
    **{'num_layers': 2, **network},
  )
  return models.DecoderOnlyModel(
    DecoderWrapper(config),
    _vocabulary(),
    None,
    inputs_bidirectional_attention=bidirectional,
    **options,
  )


def _batch(num_inputs=(0, 2, None, 5), length=10, seed=0):
  """Return rows with the given numbers of inputs and three targets; None gives a padding row."""
  rng = np.random.default_rng(seed)
  targets, prefix, weights = (np.zeros((len(num_inputs), length), np.int32) for _ in range(3))
  for row, num in enumerate(num_inputs):
    if num is not None:
      targets[row, : num + 3] = [*rng.integers(2, _VOCAB_SIZE, num + 2), 1]
      prefix[row, : num + 1] = 1
      weights[row, num : num + 3] = 1
  shifted = np.concatenate([np.zeros((len(num_inputs), 1), np.int32), targets[:, :-1]], axis=1)
  return {
    name: jnp.asarray(array)
    for name, array in {
      'decoder_input_tokens': shifted,
      'decoder_target_tokens': targets,
      'decoder_loss_weights': weights,
      'decoder_causal_attention': prefix,
    }.items()
  }


@functools.cache
def _params(num_layers=2):
  model = _model(num_layers=num_layers)
  shapes = {'decoder_input_tokens': (1, 4)}
  shapes = jax.eval_shape(
    lambda rng: model.get_initial_variables(rng, shapes)['params'], jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.4, shapes)


# ---- Numbers of T5X -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', golden_models.DECODER_ONLY)
def test_golden_losses_and_scores(name):
  golden, arrays, _, batch = golden_models.load(name)

  @cases.jit
  def evaluate(logits):
    by_factor = {}
    for factor in golden['losses_by_normalizing_factor']:
      model = golden_models.make_model(golden, golden_models.parse_factor(factor))
      model.module = model_cases.Recorded(logits)
      by_factor[factor] = model.eval_fn({}, batch)
    return by_factor, model.score_batch({}, batch)

  by_factor, scores = evaluate(arrays['out/logits'])
  for factor, (loss, metrics) in by_factor.items():
    expected = golden['losses_by_normalizing_factor'][factor]
    assert float(loss) == pytest.approx(expected['loss'], rel=1e-5), factor
    assert float(metrics['z_loss'].compute()) == pytest.approx(expected['z_loss'], rel=1e-4)
    assert float(metrics['accuracy'].compute()) == expected['accuracy']
  np.testing.assert_allclose(scores, arrays['out/score_batch'], **golden['tol'])


def test_golden_gradients():
  golden, arrays, params, batch = golden_models.load('net_decoder_only_prefixlm')
  grads = cases.jit(
    jax.grad(lambda p: golden_models.make_model(golden).loss_fn(p, batch, None)[0])
  )(params)
  norms = golden['grad_norms_no_lnf']
  for path, gradient in tree_utils.named_leaves(grads):
    assert np.linalg.norm(gradient - arrays[f'grad/{path}']) <= 1e-4 * norms[path], path


def test_golden_decodes():
  golden, arrays, params, batch = golden_models.load('net_decoder_only_prefixlm')
  model = golden_models.make_model(golden)
  tokens, aux = cases.jit(
    functools.partial(
      model.predict_batch_with_aux, decoder_params={'temperature': 0.0, 'rescale_log_probs': False}
    )
  )(params, batch)
  np.testing.assert_array_equal(tokens, arrays['out/greedy_tokens'])
  np.testing.assert_allclose(aux['scores'], arrays['out/greedy_scores'], rtol=1e-4)
  tokens, aux = cases.jit(
    functools.partial(
      model.predict_batch_with_aux,
      num_decodes=2,
      return_all_decodes=True,
      decoder_params={'topk': 8, 'temperature': 0.7, 'rescale_log_probs': False},
    )
  )(params, batch, jnp.asarray(arrays['out/sample_rng_key']))
  np.testing.assert_array_equal(tokens, arrays['out/sample_k8_t0.7_nd2_tokens'])
  np.testing.assert_allclose(aux['scores'], arrays['out/sample_k8_t0.7_nd2_scores'], rtol=1e-4)


# ---- Loss and scores ------------------------------------------------------------------------------------------------


def test_inputs_attend_both_ways_only_if_asked():
  batch = _batch()
  without = {name: array for name, array in batch.items() if name != 'decoder_causal_attention'}
  causal = cases.jit(_model(bidirectional=False).score_batch)
  np.testing.assert_array_equal(causal(_params(), batch), causal(_params(), without))
  scores = cases.jit(_model().score_batch)(_params(), batch)
  # The first row has no inputs, the third is empty.
  same = np.isclose(scores, causal(_params(), batch), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(same, [True, False, True, False])


def _pack(batch, rows):
  """Return the examples in `rows` in one row."""
  lengths = [int(jnp.sum(batch['decoder_target_tokens'][row] > 0)) for row in rows]
  packed = {
    name: np.concatenate([array[row][:n] for row, n in zip(rows, lengths, strict=True)] + [[0]])[
      None
    ]
    for name, array in batch.items()
  }
  packed['decoder_segment_ids'] = np.concatenate(
    [np.full(n, i + 1) for i, n in enumerate(lengths)] + [[0]]
  )[None]
  packed['decoder_positions'] = np.concatenate([np.arange(n) for n in lengths] + [[0]])[None]
  return {name: jnp.asarray(array, jnp.int32) for name, array in packed.items()}


def test_packed_rows_score_and_train_as_their_examples_together():
  batch, model, params = _batch((3, 2, 4)), _model(num_layers=1), _params(num_layers=1)
  packed = _pack(batch, [0, 1, 2])

  def run(batch):
    (loss, metrics), grads = jax.value_and_grad(
      lambda p: model.loss_fn(p, batch, None), has_aux=True
    )(params)
    scores, intermediates = model.score_batch(params, batch, return_intermediates=True)
    return loss, metrics, grads, scores, intermediates

  loss, metrics, grads, scores, intermediates = cases.jit(run)(batch)
  packed_loss, packed_metrics, packed_grads, packed_scores, _ = cases.jit(run)(packed)
  np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)
  np.testing.assert_allclose(packed_scores, [np.sum(scores)], rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), packed_grads, grads
  )
  count = 'effective_batch_size/decoder'
  assert (
    float(metrics[f'{count}_target_tokens'].compute())
    == float(packed_metrics[count].compute())
    == 3
  )
  np.testing.assert_array_equal(
    intermediates['decoder']['loss_weights'][0], batch['decoder_loss_weights']
  )
  np.testing.assert_array_equal(
    intermediates['decoder']['target_tokens'][0], batch['decoder_target_tokens']
  )


# ---- Prediction -----------------------------------------------------------------------------------------------------


def _greedy_by_full_passes(model, params, batch):
  """Decode without a cache, with a full pass for every token."""
  prefix = np.asarray(batch['decoder_causal_attention'])
  inputs = np.asarray(batch['decoder_input_tokens']) * prefix
  inputs[~prefix.any(axis=1)] = 1  # a row that only fills up the batch ends at once
  rows, length = inputs.shape
  logits_fn = cases.jit(
    lambda inputs: model.compute_logits(
      params,
      {**batch, 'decoder_input_tokens': inputs, 'decoder_target_tokens': jnp.ones_like(inputs)},
    )[0]
  )
  tokens = np.zeros((rows, length), np.int32)
  scores = np.zeros(rows)
  for row in range(rows):
    sequence = np.append(inputs[row], 0)
    start = int(prefix[row].sum()) - 1 if prefix[row].any() else length - 1
    for i in range(start, length):
      batch_inputs = inputs.copy()
      batch_inputs[row] = sequence[:length]
      log_probs = jax.nn.log_softmax(logits_fn(jnp.asarray(batch_inputs))[row, i])
      sequence[i + 1] = tokens[row, i - start] = int(jnp.argmax(log_probs))
      scores[row] += float(jnp.max(log_probs))
      if sequence[i + 1] == 1:
        break
  return tokens, scores


@pytest.mark.parametrize(
  'bidirectional, options',
  [(True, {}), pytest.param(False, dict(scan_layers=True), marks=pytest.mark.full)],
)
def test_greedy_decoding_is_that_of_full_passes(bidirectional, options):
  model = _model(
    bidirectional,
    decode_fn=functools.partial(
      decoding.temperature_sample, temperature=0.0, rescale_log_probs=False
    ),
    **options,
  )
  batch = _batch((0, 2, None, 5, 7))
  predict = cases.jit(model.predict_batch_with_aux)
  tokens, aux = predict(_params(), batch)
  expected, scores = _greedy_by_full_passes(model, _params(), batch)
  np.testing.assert_array_equal(tokens, expected)
  np.testing.assert_allclose(aux['scores'], scores, rtol=1e-4)
  # Some row ends before its end, some at it; only what fits behind the inputs is decoded.
  assert len({int(np.sum(row > 0)) for row in expected}) > 2
  # The targets are not looked at.
  blind = {
    **batch,
    'decoder_input_tokens': jnp.where(
      batch['decoder_causal_attention'] > 0, batch['decoder_input_tokens'], 7
    ),
    'decoder_target_tokens': jnp.full_like(tokens, 5),
    'decoder_loss_weights': jnp.zeros_like(tokens),
  }
  np.testing.assert_array_equal(predict(_params(), blind)[0], tokens)


def _beams():
  """Return a model with stacked layers and beam search, its parameters, a batch, and its three decoded beams."""
  model = _model(num_layers=1, param_layout='scalable_t5', decode_fn=decoding.beam_search)
  shapes = {'decoder_input_tokens': (1, 4)}
  params = cases.jit(lambda rng: model.get_initial_variables(rng, shapes)['params'])(
    jax.random.key(1)
  )
  batch = _batch((0, 2, 5))
  return model, params, batch, _three_beams(model, params, batch)


def _three_beams(model, params, batch):
  return cases.jit(
    functools.partial(model.predict_batch_with_aux, num_decodes=3, return_all_decodes=True)
  )(params, batch)


def test_several_decodes_and_beams():
  model, params, batch, (tokens, aux) = _beams()
  assert tokens.shape == (3, 3, 10) and aux['scores'].shape == (3, 3)
  assert np.all(np.diff(aux['scores'], axis=1) >= 0)
  assert all(len({tuple(beam) for beam in row}) == 3 for row in np.asarray(tokens).tolist())
  # A row decodes the same tokens alone and in a batch, at any offset.
  alone, alone_aux = cases.jit(functools.partial(model.predict_batch_with_aux, num_decodes=3))(
    params, {name: array[1:2] for name, array in batch.items()}
  )
  np.testing.assert_array_equal(alone[0], tokens[1, -1])
  np.testing.assert_allclose(alone_aux['scores'], aux['scores'][1:2, -1], rtol=1e-5)
  with pytest.raises(ConfigError, match='must have at most 10 tokens, .*got 11'):
    longer = functools.partial(model.predict_batch_with_aux, decoder_params={'max_decode_len': 11})
    jax.eval_shape(longer, params, batch)


@pytest.mark.full
def test_a_search_that_is_not_known_to_be_one_moves_its_cache_to_the_same_end():
  model, params, batch, (tokens, aux) = _beams()
  moving = model.with_decode_fn(lambda **kwargs: decoding.beam_search(**kwargs))
  moved, moved_aux = _three_beams(moving, params, batch)
  np.testing.assert_array_equal(moved, tokens)
  np.testing.assert_allclose(moved_aux['scores'], aux['scores'], rtol=1e-5)


@pytest.mark.full  # by default, test_base.py has losses and predictions on a mesh
def test_on_a_mesh_all_is_as_on_one_device():
  model = _model(
    num_layers=1,
    decode_fn=functools.partial(
      decoding.temperature_sample, temperature=0.0, rescale_log_probs=False
    ),
  )
  batch, params = _batch((0, 2, None, 5)), _params(num_layers=1)
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  partitioner = partitioning.PjitPartitioner(mesh=mesh)

  def run(params, batch):
    (loss, _), grads = jax.value_and_grad(lambda p: model.loss_fn(p, batch, None), has_aux=True)(
      params
    )
    return (
      loss,
      grads,
      model.score_batch(params, batch),
      model.predict_batch_with_aux(params, batch),
    )

  expected = cases.jit(run)(params, batch)
  shapes = {'decoder_input_tokens': (4, 10)}
  axes = jax.eval_shape(lambda rng: model.get_initial_variables(rng, shapes), jax.random.key(0))[
    'params_axes'
  ]
  specs = jax.tree.map(
    lambda names: jax.sharding.PartitionSpec(
      *(dict(partitioner.logical_axis_rules).get(name) for name in names.names)
    ),
    tree_utils.to_dict(axes),
    is_leaf=lambda leaf: hasattr(leaf, 'names'),
  )
  specs = {
    path.removesuffix('_axes'): spec for path, spec in tree_utils.flatten_dict(specs).items()
  }
  specs = tree_utils.unflatten_dict(specs)
  sharded = partitioner.partition(
    run, in_axis_resources=(specs, partitioner.data_partition_spec), out_axis_resources=None
  )(params, batch)
  loss, grads, scores, (tokens, aux) = expected
  np.testing.assert_allclose(sharded[0], loss, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), sharded[1], grads
  )
  np.testing.assert_allclose(sharded[2], scores, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(sharded[3][0], tokens)
  np.testing.assert_allclose(sharded[3][1]['scores'], aux['scores'], rtol=1e-4)


# ---- Variables and errors -------------------------------------------------------------------------------------------


def test_initial_variables_need_the_decoders_shape_alone():
  model = _model()
  variables = jax.eval_shape(
    lambda rng: model.get_initial_variables(
      rng, {'decoder_input_tokens': (2, 6), 'decoder_causal_attention': (2, 6)}
    ),
    jax.random.key(0),
  )
  assert set(variables) == {'params', 'params_axes'} and set(variables['params']) == {'decoder'}
  with pytest.raises(KeyError, match='decoder_input_tokens'):
    model.get_initial_variables(jax.random.key(0), {'decoder_input_token': (2, 6)})
  with pytest.raises(ConfigError, match='vocab_size <= 24, .* got 30'):
    models.DecoderOnlyModel(model.module, _vocabulary(30), None)
  assert (model.FEATURE_CONVERTER, models.DecoderOnlyModel.FEATURE_CONVERTER) == (
    'decoder_only',
  ) * 2
  assert _model(feature_converter_cls='prefix_lm').FEATURE_CONVERTER == 'prefix_lm'
  assert model.input_vocabulary is model.output_vocabulary
  assert _model().decode_fn is decoding.temperature_sample


@pytest.mark.parametrize(
  'change, options, message',
  [
    ({'decoder_segment_ids': 1}, {}, 'packed batch .*pack=False'),
    (
      {'decoder_input_tokens': None},
      {},
      "need the feature 'decoder_input_tokens', .*, the inputs, followed",
    ),
    (
      {'decoder_causal_attention': None},
      {},
      "need the feature 'decoder_causal_attention'.*length for 'inputs'",
    ),
    ({}, {'decoder_params': {'initial_index': 3}}, "'initial_index'. It is the end of the inputs"),
    ({}, {'decoder_params': {'num_decodes': 3}}, 'argument num_decodes'),
    ({}, {'decoder_params': {'decode_rng': 1}, 'rng': 1}, 'not both'),
    ({}, {'decoder_params': {'top_k': 4}}, "'top_k'.*mean 'topk'"),
    ({}, {'num_decodes': 0}, 'num_decodes` .* got 0'),
  ],
)
def test_predictions_that_raise(change, options, message):
  batch = _batch()
  batch |= {name: batch['decoder_input_tokens'] for name, value in change.items() if value}
  batch = {name: array for name, array in batch.items() if change.get(name, 0) is not None}
  with pytest.raises(ConfigError, match=message):
    _model().predict_batch_with_aux(_params(), batch, **options)


def test_bidirectional_attention_needs_marked_inputs():
  batch = {name: array for name, array in _batch().items() if name != 'decoder_causal_attention'}
  with pytest.raises(
    ConfigError, match="inputs_bidirectional_attention` must be False .*length for 'inputs'"
  ):
    _model().eval_fn(_params(), batch)
