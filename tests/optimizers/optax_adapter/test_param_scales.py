"""Transformations whose options differ by parameter: the values they take, and that unused ones are not computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.optax_adapter import param_scales

_PARAMS = {
  'mu': {'kernel': np.full([4, 6], 0.5, np.float32)},
  'kernel': np.full([6], 0.25, np.float32),
}
_SCALES = ParamScales(learning_rates=(('^mu/', 0.5),), weight_decays=(('^kernel', 0.25),))


def _decayed(rate_scale, decay_scale):
  """Return momentum of decayed gradients, whose state depends on the weight decay."""
  return optax.chain(
    optax.add_decayed_weights(0.4 * decay_scale), optax.trace(0.9), optax.scale(-0.1 * rate_scale)
  )


def _trained(transformation, params=None, num_steps=3):
  params = jax.tree.map(jnp.asarray, _PARAMS if params is None else params)
  state = transformation.init(params)
  for step in range(num_steps):
    updates, state = transformation.update(
      jax.tree.map(lambda p, s=step: jnp.cos(p + s), params), state, params
    )
    params = optax.apply_updates(params, updates)
  return params, state


@pytest.mark.parametrize('multiplies_updates', [True, False])
def test_each_parameter_has_the_values_and_the_state_of_its_factors(multiplies_updates):
  transformation = param_scales.scale_per_parameter(
    _decayed, _SCALES, multiplies_updates=multiplies_updates
  )
  params, state = _trained(transformation)
  for path, factors in ((('mu', 'kernel'), (0.5, 1.0)), (('kernel',), (1.0, 0.25))):
    expected, expected_state = _trained(_decayed(*factors))
    found, found_state = params, state[1].trace
    wanted, wanted_state = expected, expected_state[1].trace
    for name in path:
      found, found_state, wanted, wanted_state = (
        tree[name] for tree in (found, found_state, wanted, wanted_state)
      )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(found_state, wanted_state, rtol=1e-6)
  assert jax.tree.structure(state) == jax.tree.structure(_trained(_decayed(1.0, 1.0))[1])


def test_values_of_the_whole_tree_are_those_without_factors():
  def make(rate_scale, decay_scale):
    del rate_scale

    def update(updates, state, params=None):
      del params
      total = state['total'] + decay_scale
      state = {'total': total, 'of': jax.tree.map(lambda u: u + total, updates)}
      return jax.tree.map(lambda u: u * total, updates), state

    return optax.GradientTransformation(
      lambda params: {'total': jnp.zeros([]), 'of': jax.tree.map(jnp.zeros_like, params)}, update
    )

  _, state = _trained(param_scales.scale_per_parameter(make, _SCALES), num_steps=1)
  assert float(state['total']) == 1.0
  expected = jax.tree.map(
    lambda p, factor: np.cos(p) + factor, _PARAMS, {'mu': {'kernel': 1.0}, 'kernel': 0.25}
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state['of'], expected)


def test_results_that_no_parameter_takes_are_not_computed():
  layer = {'kernel': np.ones([64, 64], np.float32), 'scale': np.ones([64], np.float32)}
  params = {f'layers_{i}': layer for i in range(4)}

  def cost(optimizer_def):
    optimizer = jax.eval_shape(lambda: optimizer_def.create(jax.tree.map(jnp.asarray, params)))
    compiled = (
      jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0).lower(optimizer, params).compile()
    )
    return compiled.cost_analysis()['flops'], compiled.memory_analysis().temp_size_in_bytes

  plain = cost(optimizers.lamb(0.1, weight_decay=0.1))
  scaled = cost(
    optimizers.with_update_options(
      optimizers.lamb(0.1, weight_decay=0.1),
      learning_rate_scales=[('layers_0', 0.1)],
      weight_decay_scales=[('scale', 0.0), ('layers_3', 0.5), ('layers_2', 0.25)],
    )
  )
  assert scaled[0] < 1.1 * plain[0] and scaled[1] < 1.1 * plain[1] + 1024


def test_complex_parameters_are_named_without_their_parts():
  params = {'w': jnp.asarray([1.0 + 2.0j], jnp.complex64), 'x': jnp.ones([1])}
  optimizer_def = optimizers.with_update_options(
    optimizers.split_real_and_imaginary(optimizers.sgd(0.5)), learning_rate_scales=[('^w$', 0.5)]
  )
  grads = {'w': jnp.asarray([1.0 + 1.0j], jnp.complex64), 'x': jnp.ones([1])}
  updated = optimizer_def.create(params).apply_gradient(grads)
  assert complex(updated.target['w'][0]) == 0.75 + 1.75j and float(updated.target['x'][0]) == 0.5
