"""Values of the step in updates: gradients, loss, functions, and errors for missing values."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from t5x_lite.trainer import train_step
from tests.models import toy_model
from tests.optimizers import toy_trainer


class _Recorder(optimizers.OptimizerDef):
  """Optimizer that records its arguments."""

  extra_args = optimizers.EXTRA_ARGS

  def __init__(self):
    super().__init__(hyper_params=None)
    self.given = None

  def update_hyper_params(self, **overrides):
    return None

  def init_state(self, params):
    return optimizers.OptimizerState(step=jnp.int32(0), param_states={})

  def apply_gradient(self, hyper_params, params, state, grads, **extra_args):
    assert set(extra_args) == set(optimizers.EXTRA_ARGS)
    value_fn, moved = extra_args['value_fn'], jax.tree.map(lambda p: p + 0.1, params)
    self.given = {
      'value': extra_args['value'],
      'value_here': value_fn(params),
      'value_elsewhere': value_fn(moved),
      'obj_elsewhere': extra_args['obj_fn'](moved),
      'grad': extra_args['grad'],
      'grads': grads,
      'grad_here': extra_args['grad_fn'](params, 0),
      'slope': jax.grad(value_fn)(params),
    }
    return params, state.replace(step=state.step + 1)


@pytest.mark.parametrize(
  'num_microbatches,sows,counts',
  [pytest.param(None, False, True, marks=pytest.mark.full), (4, True, True)],
)
def test_values_of_the_step_are_those_of_the_gradients(num_microbatches, sows, counts):
  recorder = _Recorder()
  model = toy_model.make_model(
    recorder,
    dropout_rate=0.2,
    sows=sows,
    counts=counts,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )
  state, batch, key = toy_model.make_state(model), toy_model.make_batch(), jax.random.key(3)

  def step(state):
    _, metrics = train_step.train_with_lr(
      state,
      batch,
      None,
      key,
      model,
      num_microbatches,
      gradient_transform=lambda g: jax.tree.map(jnp.negative, g),
    )
    moved = state.replace_params(jax.tree.map(lambda p: p + 0.1, state.params))
    metrics_elsewhere = train_step.accumulate_grads_microbatched(
      model, moved, batch, key, num_microbatches
    )[1]
    grads = train_step.accumulate_grads_microbatched(model, state, batch, key, num_microbatches)[0]
    return recorder.given, metrics['loss'], metrics_elsewhere['loss'], grads

  given, loss, loss_elsewhere, grads = jax.jit(step)(state)
  for name in ('value', 'value_here'):
    np.testing.assert_allclose(given[name], loss.compute(), rtol=1e-6)
  for name in ('value_elsewhere', 'obj_elsewhere'):
    np.testing.assert_allclose(given[name], loss_elsewhere.compute(), rtol=1e-6)
  assert not np.isclose(given['value'], given['value_elsewhere'], rtol=1e-3)
  for name in grads:
    np.testing.assert_allclose(given['slope'][name], grads[name], rtol=1e-4, atol=1e-6)
    for transformed in ('grad', 'grads', 'grad_here'):
      np.testing.assert_allclose(given[transformed][name], -grads[name], rtol=1e-4, atol=1e-6)


class _Halving(optimizers.OptimizerDef):
  """T5X's interface: `apply_gradient` with four arguments."""

  def init_state(self, params):
    return optimizers.OptimizerState(step=jnp.int32(0), param_states={})

  def apply_gradient(self, hyper_params, params, state, grads):
    return jax.tree.map(lambda p: p / 2, params), state.replace(step=state.step + 1)


def test_a_definition_with_four_arguments_trains():
  model = toy_model.make_model(_Halving(optimizers.adamw().hyper_params))
  state = toy_model.make_state(model)
  updated, metrics = jax.jit(
    functools.partial(train_step.train_with_lr, model=model, num_microbatches=None)
  )(state, toy_model.make_batch(), 0.1, None)
  np.testing.assert_array_equal(updated.params['hidden'], state.params['hidden'] / 2)
  assert not [name for name in metrics if name.startswith('optimizer/')]


class _Curious(_Halving):
  """Optimizer that requires an unknown value of the step."""

  extra_args = ('value_fun',)


def test_an_unknown_value_of_the_step_is_rejected_at_start():
  message = "`_Curious.extra_args` must be one of .*, got 'value_fun'. Did you mean 'value_fn'"
  with pytest.raises(ConfigError, match=message):
    train_step.check_trainable(toy_model.make_state(toy_model.make_model(_Curious(None))), None)


_NEED_THE_LOSS = {
  'lbfgs': lambda: optimizers.lbfgs(memory_size=3),
  'sophia': lambda: optimizers.sophia(update_interval=2),
  'sam': lambda: optimizers.sam(
    optimizers.sgd(), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), opaque_mode=True
  ),
  'momo': optimizers.momo,
  'momo_adam': optimizers.momo_adam,
  'polyak_sgd': optimizers.polyak_sgd,
  'reduce_on_plateau': lambda: optimizers.chain(
    [optimizers.adam(), optimizers.reduce_on_plateau(patience=2)]
  ),
}


@pytest.mark.full  # by default, the values that an update gets are compared
@pytest.mark.parametrize(
  'name',
  [
    name if name == 'sophia' else pytest.param(name, marks=pytest.mark.full)
    for name in _NEED_THE_LOSS
  ],
)
def test_optimizers_that_need_the_loss_train(name):
  optimizer_def = _NEED_THE_LOSS[name]()
  rate = toy_trainer.RATE if optimizer_def.uses_learning_rate else None
  with toy_trainer.make(optimizer_def, rate, num_microbatches=2) as trainer:
    batch = toy_model.make_batch()
    first = trainer.train(itertools.repeat(batch), 1).result()['loss'].value
    trainer.train(itertools.repeat(batch), 8)
    last = trainer.train(itertools.repeat(batch), 1).result()['loss'].value
  assert last < first


def test_missing_and_unknown_values_are_named():
  params = {'p': jnp.ones([3])}
  for make, names in (
    (optimizers.lbfgs, "'value', 'grad', and 'value_fn'"),
    (optimizers.polyak_sgd, 'value'),
    (_NEED_THE_LOSS['sophia'], 'obj_fn'),
    (_NEED_THE_LOSS['sam'], 'grad_fn'),
  ):
    optimizer = make().create(params)
    overrides = {'learning_rate': 0.1} if optimizer.optimizer_def.uses_learning_rate else {}
    with pytest.raises(ConfigError, match=f'failed: .*{names}.*Pass the values of the step'):
      optimizer.apply_gradient(params, **overrides)
  with pytest.raises(ConfigError, match="no hyper-parameter 'value'"):
    optimizers.Adafactor(0.1).create(params).apply_gradient(params, value=1.0)
  # Optax's sam raises for unknown arguments.
  bare = optimizers.OptaxWrapper(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))).create(params)
  with pytest.raises(ConfigError, match=r"unexpected keyword argument 'value'.*extra_args="):
    bare.apply_gradient(params, value=1.0)
  told = optimizers.OptaxWrapper(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), extra_args=())
  assert told.extra_args == () and told.create(params).apply_gradient(params).state.step == 1
  with pytest.raises(ConfigError, match="Did you mean 'value_fn'"):
    optimizers.OptaxWrapper(optax.sgd(0.1), extra_args=['value_fun'])


def test_differential_privacy_is_rejected_by_the_trainer_and_works_in_custom_loops():
  wrapped = optimizers.dpsgd(l2_norm_clip=1.0, noise_multiplier=0.0)
  aggregate = optax.contrib.differentially_private_aggregate(1.0, 0.0, 0)
  bare = optimizers.OptaxWrapper(optax.chain(aggregate, optax.sgd(1.0)))
  for optimizer_def in (wrapped, optimizers.chain([wrapped]), bare):
    with pytest.raises(ConfigError, match='per-example gradients'):
      toy_trainer.make_with_shapes(optimizer_def)
  # Two examples, the first longer than the clipping norm.
  optimizer = wrapped.create({'p': jnp.zeros([2])})
  updated = optimizer.apply_gradient({'p': jnp.array([[3.0, 4.0], [0.0, 0.5]])}, learning_rate=1.0)
  np.testing.assert_allclose(updated.target['p'], [-0.3, -0.65], rtol=1e-5)


def test_lookahead_is_rejected_by_the_trainer():
  lookahead = optimizers.OptaxWrapper(optax.lookahead(optax.sgd(0.1), 5, 0.5))
  with pytest.raises(ConfigError, match='pair of parameter trees'):
    toy_trainer.make_with_shapes(lookahead, None)
