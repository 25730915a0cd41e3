"""Models around the T5 networks reproduce what T5X recorded: losses, metrics, gradients, scores, greedy decoding."""

import jax
import numpy as np
import pytest

from t5x_lite import decoding
from t5x_lite import tree_utils
from tests import golden_models
from tests.models import model_cases

NETWORKS = golden_models.ENCODER_DECODERS
UNPACKED = tuple(name for name in NETWORKS if 'packed' not in name)


def values_of(metrics):
  return {name: float(m.compute()) for name, m in metrics.items() if not name.startswith('timing/')}


@pytest.mark.parametrize('name', NETWORKS)
def test_losses_by_normalizing_factor_and_scores(name):
  golden, arrays, _, batch = golden_models.load(name)

  @jax.jit
  def evaluate(logits):
    by_factor = {
      key: golden_models.make_model(golden, golden_models.parse_factor(key))
      for key in golden['losses_by_normalizing_factor']
    }
    for model in by_factor.values():
      model.module = model_cases.Recorded(logits)
    return {key: model.eval_fn({}, batch) for key, model in by_factor.items()}, model.score_batch(
      {}, batch
    )

  losses, scores = evaluate(arrays['out/logits'])
  if 'out/score_batch' in arrays:
    np.testing.assert_allclose(scores, arrays['out/score_batch'], rtol=1e-5)
  for key, (loss, metrics) in losses.items():
    expected, values = golden['losses_by_normalizing_factor'][key], values_of(metrics)
    assert float(loss) == values['loss'] == pytest.approx(expected['loss'], rel=1e-5), key
    assert values['z_loss'] == pytest.approx(expected['z_loss'], rel=1e-4), key
    assert values['accuracy'] == expected['accuracy'], key
    # T5X divides the loss, which is divided by the factor, by the number of tokens. Ours is the loss per token, for any
    # factor that of the sum.
    per_token = golden['losses_by_normalizing_factor']['none']
    assert values['loss_per_nonpadding_target_token'] == pytest.approx(
      per_token['loss_per_nonpadding'], rel=1e-5
    ), key
    assert values['loss_per_all_target_tokens'] == pytest.approx(
      per_token['loss_per_all'], rel=1e-5
    ), key
    assert values['non_padding_fraction/loss_weights'] == pytest.approx(
      expected['nonpad_frac'], rel=1e-5
    ), key


def gradients(name, factor):
  """Return ((loss, metrics), gradients) through the network."""
  golden, _, params, batch = golden_models.load(name)
  model = golden_models.make_model(golden, factor)
  return jax.jit(jax.value_and_grad(lambda p: model.loss_fn(p, batch, None), has_aux=True))(params)


# The gradients of all networks are compared in the tests of networks.
@pytest.mark.parametrize(
  'name',
  [
    name if name == 'net_t5_1_1_packed' else pytest.param(name, marks=pytest.mark.full)
    for name in NETWORKS
  ],
)
def test_metrics_and_gradients_of_the_summed_loss(name):
  golden, arrays, _, _ = golden_models.load(name)
  (_, metrics), grads = gradients(name, None)
  values, expected_values = values_of(metrics), golden['metrics_no_lnf']
  assert {name: values[name] for name in expected_values} == pytest.approx(
    expected_values, rel=1e-4
  )
  ours, norms = tree_utils.flatten_dict(grads), golden['grad_norms_no_lnf']
  assert set(ours) == set(norms)
  for path, gradient in ours.items():
    assert np.linalg.norm(gradient) == pytest.approx(norms[path], rel=1e-4), path
    assert np.linalg.norm(gradient - arrays[f'grad/{path}']) <= 1e-4 * norms[path], path
  expected = golden['losses_by_normalizing_factor']['none']['grad_global_norm']
  assert golden_models.global_norm(ours) == pytest.approx(expected, rel=1e-5)


def test_gradient_norm_of_averages_per_packed_sequence():
  # The factor that changes the weights of tokens; the others divide the gradients above by a number.
  name, factor = 'net_t5_1_1_packed', 'AVERAGE_PER_SEQUENCE'
  expected = golden_models.load(name)[0]['losses_by_normalizing_factor'][factor]
  (loss, _), grads = gradients(name, factor)
  assert float(loss) == pytest.approx(expected['loss'], rel=1e-5)
  assert golden_models.global_norm(grads) == pytest.approx(expected['grad_global_norm'], rel=1e-5)


def test_scores_through_the_network():
  golden, arrays, params, batch = golden_models.load('net_t5_1_1_tiny')
  scores = jax.jit(golden_models.make_model(golden).score_batch)(params, batch)
  np.testing.assert_allclose(scores, arrays['out/score_batch'], **golden['tol'])


@pytest.mark.parametrize(
  'name',
  [
    name if name == 'net_t5_1_0_tiny' else pytest.param(name, marks=pytest.mark.full)
    for name in UNPACKED
  ],
)
def test_greedy_decoding_and_beam_search(name):
  golden, arrays, params, batch = golden_models.load(name)
  greedy, beam = (
    golden_models.make_model(golden, decode_fn=decoding.greedy_search),
    golden_models.make_model(golden),
  )
  (tokens, aux), (beam_tokens, beam_aux) = jax.jit(
    lambda params, batch: (
      greedy.predict_batch_with_aux(params, batch),
      beam.predict_batch_with_aux(params, batch, num_decodes=3, return_all_decodes=True),
    )
  )(params, batch)
  np.testing.assert_array_equal(tokens, arrays['out/greedy_tokens'])
  np.testing.assert_allclose(aux['scores'], arrays['out/greedy_scores'], rtol=1e-4)
  np.testing.assert_array_equal(beam_tokens, arrays['out/beam3_tokens'])
  np.testing.assert_allclose(beam_aux['scores'], arrays['out/beam3_scores'], rtol=1e-4)


def test_initial_variables_have_the_recorded_tree_and_axes():
  golden, _, params, batch = golden_models.load('net_t5_1_1_tiny')
  shapes = {name: value.shape for name, value in batch.items()}
  variables = jax.eval_shape(
    lambda rng: golden_models.make_model(golden).get_initial_variables(rng, shapes)['params'],
    jax.random.key(0),
  )
  assert jax.tree.map(lambda x: (x.shape, x.dtype), variables) == jax.tree.map(
    lambda x: (x.shape, x.dtype), params
  )
