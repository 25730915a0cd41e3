"""Optimizer definitions: hyper-parameters, custom definitions, options of wrapped optimizers."""

import dataclasses

import gin
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError


def test_one_gin_line_binds_an_optimizer():
  gin.clear_config()
  try:
    gin.parse_config(
      '\n'.join(
        [
          'from __gin__ import dynamic_registration',
          'import optax',
          'from t5x_lite import adafactor',
          'from t5x_lite import optimizers',
          'OPTIMIZER = @optimizers.adamw()',
          'optimizers.adamw.b2 = 0.98',
          'CHAIN = @optimizers.chain()',
          'optimizers.chain.transformations = [@optax.clip_by_global_norm(), @optimizers.adamw()]',
          'optax.clip_by_global_norm.max_norm = 1.0',
          'ADAFACTOR = @adafactor.Adafactor()',
          'adafactor.Adafactor.logical_factor_rules = @adafactor.standard_logical_factor_rules()',
        ]
      )
    )

    def macro(name):
      return gin.query_parameter(f'{name}/macro.value').scoped_configurable_fn()

    for name in ('OPTIMIZER', 'CHAIN', 'ADAFACTOR'):
      optimizer_def = macro(name)
      assert isinstance(optimizer_def, optimizers.OptimizerDef) and optimizer_def.uses_learning_rate
    assert macro('ADAFACTOR').hyper_params.logical_factor_rules['embed'] is optimizers.FactorDim.ROW
  finally:
    gin.clear_config()


def test_hyper_params_are_overridden_without_touching_the_definition():
  optimizer_def = optimizers.adamw()
  changed = optimizer_def.update_hyper_params(learning_rate=0.5)
  assert changed.learning_rate == 0.5 and optimizer_def.hyper_params.learning_rate is None
  replaced = dataclasses.replace(optimizer_def.hyper_params, learning_rate=0.25)
  assert optimizer_def.update_hyper_params(hyper_params=replaced) is replaced
  assert (
    optimizer_def.update_hyper_params(hyper_params=replaced, learning_rate=1.0).learning_rate == 1.0
  )


class _Halving(optimizers.OptimizerDef):
  """Minimal custom definition."""

  def init_state(self, params):
    return optimizers.OptimizerState(step=jnp.int32(0), param_states={})

  def apply_gradient(self, hyper_params, params, state, grads):
    return jax.tree.map(lambda p: p / 2, params), state.replace(step=state.step + 1)


def test_a_custom_definition():
  optimizer = _Halving(hyper_params=None).create({'p': jnp.ones([2])})
  updated = optimizer.apply_gradient({'p': jnp.zeros([2])})
  np.testing.assert_array_equal(updated.target['p'], 0.5)
  assert updated.state_dict()['state'] == {'step': 1}
  assert optimizer.restore_state(updated.state_dict()).state.step == 1
  assert optimizer.optimizer_def.set_param_axes({'p': P('embed')}) is None
  with pytest.raises(ConfigError, match='_Halving does not define'):
    optimizer.optimizer_def.derive_logical_axes(optimizer, {'p': P('embed')})
  with pytest.raises(TypeError, match='abstract'):
    optimizers.OptimizerDef(hyper_params=None)  # pylint: disable=abstract-class-instantiated


@pytest.mark.parametrize(
  'make,message',
  [
    (
      lambda: optimizers.adamw(-0.1),
      '`adamw.learning_rate` must be a number >= 0 or a schedule, got -0.1',
    ),
    (lambda: optimizers.adamw('0.1'), "got '0.1'"),
    (lambda: optimizers.adamw(True), 'got True'),
    (lambda: optimizers.sgd(float('inf')), 'got inf'),
    (lambda: optimizers.adamw(wieght_decay=0.1), "Did you mean 'weight_decay'"),
    (lambda: optimizers.sgd(0.1, 0.9, True, None, 1), 'sgd: too many positional arguments'),
    (
      lambda: optimizers.adamw().update_hyper_params(lerning_rate=0.1),
      "Did you mean 'learning_rate'",
    ),
    (lambda: optimizers.adamw().update_hyper_params(learning_rate=-1), 'must be a number >= 0'),
    (
      lambda: optimizers.adamw().create({'p': jnp.ones([1])}).apply_gradient({'p': jnp.ones([1])}),
      'learning_rate_fn',
    ),
    (lambda: optimizers.chain(optax.adam(0.1)), r'Write chain\(\[a, b\]\)'),
    (
      lambda: optimizers.chain([optax.clip(1.0), optax.adam]),
      r'transformations\[1\]` must be an optax transformation',
    ),
    (lambda: optimizers.chain([]), 'at least one transformation'),
    (lambda: optimizers.adamw(jnp.ones([3])), 'must be a number'),
    (
      lambda: optimizers.Adafactor().update_hyper_params(learning_rate=jnp.ones([1])),
      'must be a number',
    ),
    (lambda: optimizers.OptaxWrapper(optimizers.adamw()), 'wrapped already'),
    (lambda: optimizers.OptaxWrapper(optax.adam), 'Call the function first'),
    (
      lambda: optimizers.OptaxWrapper(optax.MultiSteps(optax.adam(0.1), 2)),
      'gradient_transformation',
    ),
    (lambda: optimizers.OptaxWrapper(), 'got neither'),
    (
      lambda: optimizers.OptaxWrapper(optax.sgd(0.1), learning_rate_factory=optax.sgd),
      'got learning_rate_factory and optax_optimizer',
    ),
    (lambda: optimizers.wrap_optax_optimizer(optax.clip, takes_learning_rate=True), "'max_delta'"),
  ],
)
def test_invalid_definitions_are_rejected(make, message):
  with pytest.raises(ConfigError, match=message):
    make()
