"""Models: losses, metrics, collections, scores and predictions, through a small network."""

import functools

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import errors
from t5x_lite import losses
from t5x_lite import metrics as metrics_lib
from t5x_lite import models
from t5x_lite import networks
from tests.models import model_cases as cases


def compute(metrics, duration=2.0, num_steps=1):
  metrics = metrics_lib.set_step_metrics_num_steps(
    metrics_lib.set_time_metrics_duration(metrics, duration), num_steps
  )
  return {name: float(metric.compute()) for name, metric in metrics.items()}


@jax.jit
def run_network(params, inputs, decoder_inputs):
  return cases.TinySeq2Seq().apply(
    {'params': params}, inputs, decoder_inputs, decoder_inputs, enable_dropout=False
  )


def log_likelihoods(params, batch):
  """Return the log-probability of every target token, by the network's plain call."""
  logits = run_network(params, batch['encoder_input_tokens'], batch['decoder_input_tokens'])
  return np.take_along_axis(
    np.asarray(jax.nn.log_softmax(logits)),
    np.asarray(batch['decoder_target_tokens'])[..., None],
    -1,
  )[..., 0]


def test_loss_is_the_weighted_sum_of_token_losses_and_metrics_say_so(batch):
  loss, metrics = jax.jit(cases.make_model().loss_fn)(cases.initial_params(), batch, None)
  weights = np.asarray(batch['decoder_loss_weights'])
  expected = -np.sum(log_likelihoods(cases.initial_params(), batch) * weights)
  assert float(loss) == pytest.approx(expected, rel=1e-5)
  values = compute(metrics)
  assert values['loss'] == pytest.approx(expected, rel=1e-5)
  assert values['cross_ent_loss'] == pytest.approx(expected, rel=1e-5)
  assert values['z_loss'] == 0.0
  assert values['loss_per_nonpadding_target_token'] == pytest.approx(
    expected / weights.sum(), rel=1e-5
  )
  assert values['loss_per_all_target_tokens'] == pytest.approx(expected / weights.size, rel=1e-5)


def test_dropout_only_with_a_key(batch):
  model = cases.make_model(cases.TinySeq2Seq(dropout_rate=0.5))
  loss_fn = jax.jit(model.loss_fn)

  def loss(key):
    return float(loss_fn(cases.initial_params(), batch, key)[0])

  assert loss(jax.random.key(1)) == loss(jax.random.key(1))
  assert loss(jax.random.key(1)) != loss(jax.random.key(2))
  assert loss(None) == float(
    jax.jit(cases.make_model().loss_fn)(cases.initial_params(), batch, None)[0]
  )
  assert float(jax.jit(model.eval_fn)(cases.initial_params(), batch)[0]) == loss(None)


@pytest.mark.parametrize(
  'factor, weights',
  [
    pytest.param(None, False, marks=pytest.mark.full),
    pytest.param('num_real_target_tokens', False, marks=pytest.mark.full),
    pytest.param(
      losses.SpecialLossNormalizingFactor.NUM_TOTAL_TARGET_TOKENS, True, marks=pytest.mark.full
    ),
    ('AVERAGE_PER_SEQUENCE', True),
  ],
)
def test_micro_batch_losses_and_gradients_sum_to_those_of_the_batch(factor, weights):
  batch = cases.make_batch(weights=weights)
  model = cases.make_model(
    AuxiliaryLoss.Network(),
    AuxiliaryLoss,
    loss_normalizing_factor=factor,
    label_smoothing=0.1,
    z_loss=1e-3,
  )
  params = cases.initial_params()

  def loss_of(model):
    return jax.jit(jax.value_and_grad(lambda p, b: model.loss_fn(p, b, None)[0]))

  expected_loss, expected_grads = loss_of(model)(params, batch)

  _, whole, fixed = model.for_microbatches(batch, 2)
  # The model knows nothing of the batch: that of another one serves as well.
  part_model, *_ = model.for_microbatches(jax.tree.map(jnp.ones_like, batch), 2)
  step = loss_of(part_model)
  first, second = (
    step(params, {k: v[i : i + 2] for k, v in whole.items()} | fixed) for i in (0, 2)
  )
  total_loss, total_grads = jax.tree.map(jnp.add, first, second)
  assert float(total_loss) == pytest.approx(float(expected_loss), rel=1e-5)
  for ours, expected in zip(
    jax.tree.leaves(total_grads), jax.tree.leaves(expected_grads), strict=True
  ):
    assert np.linalg.norm(ours - expected) <= 3e-6 * np.linalg.norm(expected) + 1e-9
  # The model itself has not changed.
  assert float(jax.jit(model.eval_fn)(params, batch)[0]) == pytest.approx(
    float(expected_loss), rel=1e-6
  )


class AuxiliaryLoss(models.EncoderDecoderModel):
  """Model that adds a multiple of sown values to the loss."""

  Network = cases.TinySeq2Seq

  def auxiliary_losses(self, intermediates, batch):
    (value,) = intermediates['logit_square']
    return 0.1 * value, {'logit_square': clu_metrics.Average(total=value, count=1)}


def test_auxiliary_losses_are_added_to_the_loss_alone(batch):
  fns = (
    jax.jit(
      jax.value_and_grad(cases.make_model(model_cls=model_cls, z_loss=1e-3).loss_fn, has_aux=True)
    )
    for model_cls in (models.EncoderDecoderModel, AuxiliaryLoss)
  )
  ((plain_loss, plain), plain_grads), ((loss, metrics), grads) = (
    fn(cases.initial_params(), batch, None) for fn in fns
  )
  values, plain = compute(metrics), compute(plain)
  assert values['logit_square'] > 0
  assert float(loss) == pytest.approx(float(plain_loss) + 0.1 * values['logit_square'], rel=1e-6)
  assert values['loss'] == pytest.approx(float(loss))
  for name in ('cross_ent_loss', 'z_loss', 'loss_per_all_target_tokens'):
    assert values[name] == plain[name]
  assert not np.allclose(grads['out']['bias'], plain_grads['out']['bias'])


def test_auxiliary_losses_of_a_network_that_sows_nothing(batch):
  seen = []

  class Model(models.EncoderDecoderModel):
    def auxiliary_losses(self, intermediates, batch):
      seen.append(intermediates)
      return 0.0, {}

  class Silent(cases.TinySeq2Seq):
    def sow(self, *args, **kwargs):
      return False

  jax.eval_shape(cases.make_model(Silent(), Model).loss_fn, cases.initial_params(), batch, None)
  assert seen == [{}]


def test_mutable_collections_are_updated_in_training_and_read_elsewhere(batch):
  module = cases.TinySeq2Seq(with_statistics=True)
  model = cases.make_model(module)
  variables = cases.initialise(model)
  assert set(variables) == {'params', 'batch_stats'}
  params, mutables = variables['params'], {'batch_stats': variables['batch_stats']}
  assert mutables == {'batch_stats': {'statistics': {'mean': 0.0}}}

  loss_fn, eval_fn = jax.jit(model.loss_fn), jax.jit(model.eval_fn)
  loss, (metrics, new) = loss_fn(params, batch, None, mutables)
  assert set(new) == {'batch_stats'} and type(new['batch_stats']) is dict
  mean = float(new['batch_stats']['statistics']['mean'])
  assert mean != 0.0
  assert compute(metrics)['loss'] == pytest.approx(float(loss))

  _, (_, newer) = loss_fn(params, batch, None, new)
  assert float(newer['batch_stats']['statistics']['mean']) != mean

  # Evaluation, scores and predictions read the given statistics and do not change them.
  fixed = {'batch_stats': {'statistics': {'mean': jnp.float32(5.0)}}}
  eval_loss, eval_metrics = eval_fn(params, batch, fixed)
  assert isinstance(eval_metrics, dict)
  assert float(eval_loss) != pytest.approx(float(eval_fn(params, batch, mutables)[0]))
  scores = jax.jit(model.score_batch)(params, batch, flax_mutables=fixed)
  assert -float(jnp.sum(scores)) == pytest.approx(float(eval_loss), rel=1e-5)
  predict = jax.jit(model.predict_batch_with_aux)
  tokens, aux = predict(params, batch, flax_mutables=fixed)
  np.testing.assert_array_equal(
    tokens, jax.jit(model.predict_batch)(params, batch, flax_mutables=fixed)
  )
  unlike = predict(params, batch, flax_mutables=mutables)[1]
  assert not np.allclose(aux['scores'], unlike['scores'])


def test_initial_variables_are_those_of_the_module(batch):
  model = cases.make_model()
  rng = jax.random.key(3)
  variables = model.get_initial_variables(rng, cases.shapes_of(batch))
  assert set(variables) == {'params'} and type(variables['params']) is dict
  expected = cases.TinySeq2Seq().init(
    rng, *(jnp.ones((1, 2), jnp.int32),) * 3, enable_dropout=False
  )['params']
  jax.tree.map(np.testing.assert_array_equal, variables['params'], expected)
  shapes = jax.eval_shape(lambda r: model.get_initial_variables(r, cases.shapes_of(batch)), rng)
  assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, variables)


def test_initial_variables_see_packing_features_and_types():
  seen = {}

  class Spy(cases.TinySeq2Seq):
    def __call__(self, encoder_input_tokens, *args, **kwargs):
      seen.update(kwargs, encoder_input_tokens=encoder_input_tokens)
      return super().__call__(encoder_input_tokens, *args, **kwargs)

  names = ('encoder_segment_ids', 'decoder_segment_ids', 'encoder_positions', 'decoder_positions')
  shapes = {'encoder_input_tokens': (2, 3), 'decoder_input_tokens': (2, 5)}
  shapes |= {name: (2, 3 if name.startswith('encoder') else 5) for name in names}
  jax.eval_shape(
    lambda rng: cases.make_model(Spy()).get_initial_variables(
      rng, shapes, {'encoder_input_tokens': np.int16, 'decoder_positions': np.int8}
    ),
    jax.random.key(0),
  )
  assert {name: seen[name].shape for name in names} == {name: shapes[name] for name in names}
  assert seen['encoder_input_tokens'].dtype == np.int16
  assert seen['decoder_positions'].dtype == np.int8
  assert seen['encoder_positions'].dtype == np.int32
  assert seen['enable_dropout'] is False and seen['decode'] is False


@pytest.mark.parametrize(
  'shapes, message',
  [
    ({'encoder_inputs_tokens': (2, 3), 'decoder_input_tokens': (2, 3)}, "'encoder_input_tokens'"),
    ({'encoder_input_tokens': (2, 3), 'decoder_input_tokens': (4, 3)}, 'shapes'),
  ],
)
def test_initial_variables_raise_for_wrong_shapes(shapes, message):
  with pytest.raises((KeyError, TypeError, ValueError), match=message):
    cases.make_model().get_initial_variables(jax.random.key(0), shapes)


@pytest.mark.parametrize('weights', [True, False])
def test_score_batch_sums_log_likelihoods_whatever_the_training_loss(weights):
  batch = cases.make_batch(weights=weights)
  model = cases.make_model(label_smoothing=0.2, z_loss=0.1, loss_normalizing_factor=7.0)
  mask = np.asarray(batch['decoder_target_tokens']) > 0
  expected = np.sum(log_likelihoods(cases.initial_params(), batch) * mask, axis=1)
  np.testing.assert_allclose(
    jax.jit(model.score_batch)(cases.initial_params(), batch), expected, rtol=1e-5
  )
  scores, intermediates = jax.jit(functools.partial(model.score_batch, return_intermediates=True))(
    cases.initial_params(), batch
  )
  np.testing.assert_allclose(scores, expected, rtol=1e-5)
  assert intermediates['logit_square'][0] > 0


def test_losses_and_predictions_on_a_mesh_equal_those_of_one_device():
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  batch, params = cases.make_batch(rows=8), cases.initial_params()
  model = cases.make_model(loss_normalizing_factor='AVERAGE_PER_SEQUENCE', label_smoothing=0.1)

  def fns(params, batch):
    return (
      model.eval_fn(params, batch)[0],
      *model.predict_batch_with_aux(params, batch),
    )

  with jax.set_mesh(mesh):
    sharded = jax.jit(fns, in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P('data'))))
    loss, tokens, aux = sharded(params, batch)
  expected_loss, expected_tokens, expected_aux = jax.jit(fns)(params, batch)
  assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
  np.testing.assert_array_equal(tokens, expected_tokens)
  np.testing.assert_allclose(aux['scores'], expected_aux['scores'], rtol=1e-5)


class Sized(cases.TinySeq2Seq, networks.Network):
  """Network with `vocab_size`."""

  vocab_size = cases.VOCAB_SIZE


@pytest.mark.parametrize('which', ['input_vocabulary', 'output_vocabulary'])
def test_a_vocabulary_larger_than_the_network_raises(which):
  vocabularies = {
    'input_vocabulary': cases.Vocabulary(),
    'output_vocabulary': cases.Vocabulary(),
    which: cases.Vocabulary(384),
  }
  with pytest.raises(
    errors.ConfigError, match=f'{which}` must be a vocabulary with vocab_size <= 11, .* got 384'
  ):
    models.EncoderDecoderModel(module=Sized(), optimizer_def=None, **vocabularies)
  models.EncoderDecoderModel(
    Sized(), cases.Vocabulary(10), cases.Vocabulary(cases.VOCAB_SIZE), None
  )


def test_any_other_network_is_checked_by_its_logits(batch):
  model = models.EncoderDecoderModel(
    cases.TinySeq2Seq(), cases.Vocabulary(), cases.Vocabulary(12), None
  )
  with pytest.raises(errors.ConfigError, match='vocab_size <= 11, .* got 12'):
    jax.eval_shape(
      lambda rng: model.get_initial_variables(rng, cases.shapes_of(batch)), jax.random.key(0)
    )


def test_feature_converter_and_accessors():
  assert cases.make_model().FEATURE_CONVERTER == 'encoder_decoder'
  assert cases.make_model(feature_converter_cls='prefix_lm').FEATURE_CONVERTER == 'prefix_lm'
  assert models.EncoderDecoderModel.FEATURE_CONVERTER == 'encoder_decoder'
  first, second = cases.Vocabulary(5), cases.Vocabulary(6)
  model = models.EncoderDecoderModel(cases.TinySeq2Seq(), first, second, 'optimizer')
  assert (
    models.get_input_vocabulary(model) is first and models.get_output_vocabulary(model) is second
  )
  assert model.optimizer_def == 'optimizer' and model.decode_fn is decoding.beam_search


def test_a_metric_function_with_other_parameters_raises():
  model = cases.make_model(metric_fns=[lambda logits: {}])
  with pytest.raises(
    errors.ConfigError, match=r'`EncoderDecoderModel.metric_fns` must be .*\(logits, batch\), got'
  ):
    jax.eval_shape(
      lambda params, batch: model.eval_fn(params, batch), cases.initial_params(), cases.make_batch()
    )


def test_other_metric_functions():
  def count(logits, batch):
    return {'one': clu_metrics.Average(total=jnp.float32(1), count=jnp.float32(1))}

  model = cases.make_model(metric_fns=[count])

  def names(model):
    return set(
      jax.eval_shape(
        lambda params, batch: model.eval_fn(params, batch),
        cases.initial_params(),
        cases.make_batch(),
      )[1]
    )

  assert names(model) - names(model.with_metric_fns([], 'Evaluation')) == {'one'}
  with pytest.raises(
    errors.ConfigError, match='of `Evaluation.metric_fns` must return a dict of clu'
  ):
    names(model.with_metric_fns([lambda logits, batch: 1.0], 'Evaluation'))
  with pytest.raises(
    errors.ConfigError, match='^`Evaluation.metric_fns` must be None for the model'
  ):
    models.BaseModel.with_metric_fns(model, [count], 'Evaluation')
