"""The optimizer contract's base, the optax wrapper, and the partition rules of optax states."""

import dataclasses
import functools
import inspect

import flax.core
import gin
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import optimizers, tree_utils
from t5x_lite.errors import CheckpointError, ConfigError

_AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}, 'scale': P()}


def _params(seed=0):
  rng = np.random.default_rng(seed)
  return {
      'dense': {'kernel': rng.normal(size=[4, 6]).astype(np.float32), 'bias': rng.normal(size=[6]).astype(np.float32)},
      'scale': np.float32(1.5),
  }


def _assert_close(left, right, rtol=1e-6):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7), left, right)


_DECAY = optax.linear_schedule(0.1, 0.0, 10)
_SAME_AS_OPTAX = {
    'adam': (lambda: optimizers.adam(0.1, b2=0.9), lambda: optax.adam(0.1, b2=0.9)),
    'adamw': (lambda: optimizers.adamw(0.1, weight_decay=0.3), lambda: optax.adamw(0.1, weight_decay=0.3)),
    'adamw_schedule': (lambda: optimizers.adamw(learning_rate=_DECAY), lambda: optax.adamw(_DECAY)),
    'sgd': (lambda: optimizers.sgd(0.1, 0.9, nesterov=True), lambda: optax.sgd(0.1, 0.9, nesterov=True)),
    'chain': (lambda: optimizers.chain([optax.clip(0.1), optax.adamw(0.1)]),
              lambda: optax.chain(optax.clip(0.1), optax.adamw(0.1))),
    'chain_of_wrapped': (lambda: optimizers.chain(transformations=(optax.clip(0.1), optimizers.adamw(0.1))),
                         lambda: optax.chain(optax.clip(0.1), optax.adamw(0.1))),
}


@pytest.mark.parametrize('name', _SAME_AS_OPTAX)
def test_wrapped_optimizer_makes_the_updates_of_optax(name):
  wrapped, bare = (make() for make in _SAME_AS_OPTAX[name])
  optimizer, params = wrapped.create(_params()), _params()
  state = bare.init(params)
  for seed in range(1, 4):
    grads = _params(seed)
    optimizer = optimizer.apply_gradient(grads)
    updates, state = bare.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  _assert_close(optimizer.target, params)
  _assert_close(optimizer.state.param_states, state)
  assert optimizer.state.step == 3


@pytest.mark.parametrize('wrapped,bare', [
    (lambda: optimizers.adamw(weight_decay=0.3), lambda rate: optax.adamw(rate, weight_decay=0.3)),
    (lambda: optimizers.sgd(None, momentum=0.5), lambda rate: optax.sgd(rate, momentum=0.5)),
    (lambda: optimizers.chain([optax.clip(0.1), optimizers.adamw(b1=0.5), optimizers.sgd(2.0)]),
     lambda rate: optax.chain(optax.clip(0.1), optax.adamw(rate, b1=0.5), optax.sgd(2.0))),
])
def test_without_a_learning_rate_the_trainers_is_used(wrapped, bare):
  optimizer, params = wrapped().create(_params()), _params()
  assert optimizer.optimizer_def.uses_learning_rate and optimizer.optimizer_def.needs_learning_rate
  state = bare(0.0).init(params)
  step = jax.jit(lambda optimizer, grads, rate: optimizer.apply_gradient(grads, learning_rate=rate))
  for seed, rate in enumerate((0.1, 0.02, 0.5)):
    grads = _params(seed + 1)
    optimizer = step(optimizer, grads, rate)
    updates, state = bare(rate).update(grads, state, params)
    params = optax.apply_updates(params, updates)
  _assert_close(optimizer.target, params)


def test_the_bare_transformation_takes_the_rate_as_an_argument_through_wrappers():
  tx = optax.chain(optax.clip(0.1), optax.masked(optimizers.sgd().optax_optimizer, {'a': True, 'b': False}))
  params = {'a': jnp.ones([2]), 'b': jnp.ones([2])}
  updates, _ = tx.update(params, tx.init(params), params, learning_rate=0.5)
  np.testing.assert_allclose(updates['a'], -0.05, rtol=1e-6)
  np.testing.assert_allclose(updates['b'], 0.1, rtol=1e-6)


def test_a_bare_transformation_that_gets_no_rate_says_so():
  optimizer = optimizers.OptaxWrapper(optimizers.adamw().optax_optimizer).create({'p': jnp.ones([2])})
  with pytest.raises(ConfigError, match=r'optimizers\.chain'):
    optimizer.apply_gradient({'p': jnp.ones([2])}, learning_rate=0.1)


def test_a_finished_transformation_ignores_the_trainers_rate():
  optimizer = optimizers.OptaxWrapper(optax.sgd(0.1)).create({'p': jnp.ones([2])})
  assert not optimizer.optimizer_def.uses_learning_rate
  updated = optimizer.apply_gradient({'p': jnp.ones([2])}, learning_rate=100.0)
  np.testing.assert_allclose(updated.target['p'], 0.9, rtol=1e-6)


def test_wrap_optax_optimizer_keeps_the_constructors_arguments():
  def make(rate, *, power=2.0):
    return optax.sgd(rate ** power)

  wrapped = optimizers.wrap_optax_optimizer(make)
  optimizer = wrapped(0.1, power=1.0).create({'p': jnp.ones([2])}).apply_gradient({'p': jnp.ones([2])})
  np.testing.assert_allclose(optimizer.target['p'], 0.9, rtol=1e-6)
  assert list(inspect.signature(wrapped).parameters) == ['rate', 'power'] and wrapped.__name__ == 'make'
  signature = inspect.signature(optimizers.adamw)
  assert signature.parameters['learning_rate'].default is None
  assert list(signature.parameters) == list(inspect.signature(optax.adamw).parameters)


def test_wrapped_optimizers_in_lists_and_dicts_are_taken():
  params, grads = {'p': jnp.ones([2])}, {'p': jnp.ones([2])}
  for make, arguments in (
      (optax.chain, (optax.scale(2.0), optimizers.sgd())),
      (lambda transformations: optax.chain(*transformations), ([optax.scale(2.0), optimizers.sgd()],)),
      (optax.partition, ({'a': optimizers.chain([optax.scale(2.0), optimizers.sgd()]), 'b': optax.sgd(0.1)}, 'a'))):
    optimizer_def = optimizers.wrap_optax_optimizer(make)(*arguments)
    assert optimizer_def.needs_learning_rate
    updated = optimizer_def.create(params).apply_gradient(grads, learning_rate=0.25)
    np.testing.assert_allclose(updated.target['p'], 0.5, rtol=1e-6)


def test_the_rate_of_an_update_may_be_a_schedule():
  for optimizer_def in (optimizers.sgd(), optimizers.Adafactor(multiply_by_parameter_scale=False)):
    optimizer = optimizer_def.create({'p': jnp.ones([2])})
    for _ in range(2):
      optimizer = optimizer.apply_gradient({'p': jnp.ones([2])}, learning_rate=optax.linear_schedule(0.5, 0.0, 2))
    np.testing.assert_allclose(optimizer.target['p'], 0.25, rtol=1e-6)


@pytest.mark.parametrize('make', [
    lambda: optimizers.sgd(0.5), lambda: optimizers.Adafactor(0.5, multiply_by_parameter_scale=False),
    lambda: optimizers.MultiOptimizer([('p', optimizers.sgd(0.5))])])
def test_gradients_may_be_frozen_where_parameters_are_not_and_the_other_way_round(make):
  plain = {'a': {'p': jnp.ones([2])}}
  frozen = flax.core.freeze(plain)
  for params, grads in ((plain, frozen), (frozen, plain)):
    updated = make().create(params).apply_gradient(grads)
    assert type(updated.target) is type(params)
    np.testing.assert_allclose(updated.target['a']['p'], 0.5, rtol=1e-6)


def test_partial_applications_are_wrapped_too():
  wrapped = optimizers.wrap_optax_optimizer(functools.partial(optax.nadam, b1=0.5), takes_learning_rate=True)
  assert wrapped.__name__ == 'adam' and wrapped().uses_learning_rate
  optimizer, bare = wrapped(0.1).create({'p': jnp.ones([2])}), optax.nadam(0.1, b1=0.5)
  updates, _ = bare.update(optimizer.target, bare.init(optimizer.target), optimizer.target)
  _assert_close(optimizer.apply_gradient(optimizer.target).target, optax.apply_updates(optimizer.target, updates))


@pytest.mark.parametrize('make', [
    lambda: optimizers.sgd(0.5), lambda: optimizers.Adafactor(0.5, multiply_by_parameter_scale=False),
    lambda: optimizers.MultiOptimizer([('a', optimizers.sgd(0.5)), ('b', optimizers.adam(0.5))])])
def test_parameters_may_be_python_numbers(make):
  optimizer = make().create({'a': 0.0, 'b': 2.0})
  updated = optimizer.apply_gradient({'a': -1.0, 'b': 1.0})
  np.testing.assert_allclose([updated.target['a'], updated.target['b']], [0.5, 1.5], rtol=1e-5)
  assert {leaf.dtype for leaf in jax.tree.leaves(updated.target)} == {jnp.dtype('float32')}
  axes = optimizer.optimizer_def.derive_logical_axes(optimizer, {'a': P(), 'b': P()})
  assert jax.tree.structure(axes) == jax.tree.structure(optimizer)


@pytest.mark.parametrize('make', [
    optimizers.dog, optimizers.cocob, optimizers.lbfgs,
    lambda: optimizers.sam(optax.sgd(0.1), optax.sgd(0.1))])
def test_no_array_stands_in_a_new_optimizer_twice(make):
  optimizer = make().create({'p': jnp.ones([3])})
  buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(optimizer)]
  assert len(set(buffers)) == len(buffers)


def test_narrow_parameters_accumulate_small_updates_in_float32_statistics():
  # Kept in bfloat16, the average would have between two and three significant digits.
  optimizer = optimizers.OptaxWrapper(optax.ema(0.999, debias=False)).create({'p': jnp.zeros([1], jnp.bfloat16)})
  for _ in range(3):
    optimizer = optimizer.apply_gradient({'p': jnp.ones([1], jnp.bfloat16)})
  average = optimizer.state.param_states.ema['p']
  assert average.dtype == jnp.float32 and optimizer.target['p'].dtype == jnp.bfloat16
  np.testing.assert_allclose(average, 1 - 0.999 ** 3, rtol=1e-5)


def test_one_gin_line_binds_an_optimizer():
  gin.clear_config()
  try:
    gin.parse_config('\n'.join([
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
    ]))
    macro = lambda name: gin.query_parameter(f'{name}/macro.value').scoped_configurable_fn()
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
  assert optimizer_def.update_hyper_params(hyper_params=replaced, learning_rate=1.0).learning_rate == 1.0


class _Halving(optimizers.OptimizerDef):
  """The least that a definition of one's own needs."""

  def init_state(self, params):
    return optimizers.OptimizerState(step=jnp.int32(0), param_states={})

  def apply_gradient(self, hyper_params, params, state, grads):
    return jax.tree.map(lambda p: p / 2, params), state.replace(step=state.step + 1)


def test_a_definition_of_ones_own():
  optimizer = _Halving(hyper_params=None).create({'p': jnp.ones([2])})
  updated = optimizer.apply_gradient({'p': jnp.zeros([2])})
  np.testing.assert_array_equal(updated.target['p'], 0.5)
  assert updated.state_dict()['state'] == {'step': 1}
  assert optimizer.restore_state(updated.state_dict()).state.step == 1
  assert optimizer.optimizer_def.set_param_axes({'p': P('embed')}) is None
  with pytest.raises(ConfigError, match='_Halving does not say'):
    optimizer.optimizer_def.derive_logical_axes(optimizer, {'p': P('embed')})
  with pytest.raises(TypeError, match='abstract'):
    optimizers.OptimizerDef(hyper_params=None)  # pylint: disable=abstract-class-instantiated


def test_state_dict_of_an_optax_state_has_these_names():
  flat = tree_utils.flatten_dict(optimizers.adamw(0.1).create({'p': jnp.ones([2])}).state_dict())
  # A chain is a tuple; its members without state leave no entry.
  assert set(flat) == {'target/p', 'state/step', 'state/param_states/0/count', 'state/param_states/0/mu/p',
                       'state/param_states/0/nu/p'}


def test_restoring_what_another_optimizer_saved_is_refused():
  adam, sgd = (make(0.1).create(_params()) for make in (optimizers.adam, optimizers.sgd))
  with pytest.raises(CheckpointError, match='state/param_states/0/count is missing.*another optimizer'):
    adam.restore_state(sgd.state_dict())
  with pytest.raises(CheckpointError, match='nothing takes the value at state/param_states/0'):
    sgd.restore_state(adam.state_dict())
  with pytest.raises(CheckpointError, match="'target/dense' is a single value"):
    adam.restore_state({**adam.state_dict(), 'target': {'dense': 1.0, 'scale': 2.0}})
  with pytest.raises(CheckpointError, match='target/dense/kernel is missing'):
    adam.restore_state({'state': adam.state_dict()['state']})


def _derive(optimizer_def, params=None, axes=None):
  optimizer = optimizer_def.create(_params() if params is None else params)
  return optimizer_def.derive_logical_axes(optimizer, _AXES if axes is None else axes)


def test_axes_of_adamw():
  axes = _derive(optimizers.adamw(0.1))
  adam_axes = axes.state.param_states[0]
  assert axes.target == _AXES and adam_axes.mu == _AXES and adam_axes.nu == _AXES
  assert adam_axes.count == P() and axes.state.step == P()


def test_axes_of_masked_parameters_stay_masked():
  mask = {'dense': False, 'scale': True}
  axes = _derive(optimizers.OptaxWrapper(optax.masked(optax.adam(0.1), mask)))
  mu = axes.state.param_states.inner_state[0].mu
  assert mu == {'dense': optax.MaskedNode(), 'scale': P()}


def test_axes_are_found_in_frozen_and_plain_dicts_and_none_means_no_names():
  given = flax.core.freeze({'dense': {'kernel': None, 'bias': P('mlp')}, 'scale': P()})
  axes = _derive(optimizers.adam(0.1), axes=given)
  assert axes.state.param_states[0].mu['dense']['kernel'] == P(None, None)


@pytest.mark.parametrize('axes,message', [
    ({'dense': {'kernel': P('embed', 'mlp')}, 'scale': P()}, "'dense/bias' has no logical axes"),
    ({**_AXES, 'dense': {'kernel': P('embed'), 'bias': P('mlp')}}, r"'dense/kernel' has rank 2 \(shape \(4, 6\)\)"),
    ({**_AXES, 'more': P('embed')}, "'more', but there is no such parameter"),
])
def test_axes_that_do_not_fit_the_parameters_are_refused(axes, message):
  for optimizer_def in (optimizers.adamw(), optimizers.Adafactor()):
    with pytest.raises(ConfigError, match=message):
      _derive(optimizer_def, axes=axes)


@pytest.mark.parametrize('make,message', [
    (lambda: optimizers.adamw(-0.1), 'Optimizer adamw: learning_rate is -0.1'),
    (lambda: optimizers.adamw('0.1'), 'type str'),
    (lambda: optimizers.adamw(True), 'type bool'),
    (lambda: optimizers.sgd(float('inf')), 'finite'),
    (lambda: optimizers.adamw(wieght_decay=0.1), "Did you mean 'weight_decay'"),
    (lambda: optimizers.sgd(0.1, 0.9, True, None, 1), 'Optimizer sgd: too many positional arguments'),
    (lambda: optimizers.adamw().update_hyper_params(lerning_rate=0.1), "Did you mean 'learning_rate'"),
    (lambda: optimizers.adamw().update_hyper_params(learning_rate=-1), 'not negative'),
    (lambda: optimizers.adamw().create({'p': jnp.ones([1])}).apply_gradient({'p': jnp.ones([1])}), 'learning_rate_fn'),
    (lambda: optimizers.chain(optax.adam(0.1)), r'write chain\(\[a, b\]\)'),
    (lambda: optimizers.chain([optax.clip(1.0), optax.adam]), 'element 1 is of type function'),
    (lambda: optimizers.chain([]), 'no transformation'),
    (lambda: optimizers.adamw(jnp.ones([3])), 'expected a number'),
    (lambda: optimizers.Adafactor().update_hyper_params(learning_rate=jnp.ones([1])), 'expected a number'),
    (lambda: optimizers.OptaxWrapper(optimizers.adamw()), 'wrapped already'),
    (lambda: optimizers.OptaxWrapper(optax.adam), 'Call it first'),
    (lambda: optimizers.OptaxWrapper(optax.MultiSteps(optax.adam(0.1), 2)), 'gradient_transformation'),
    (lambda: optimizers.OptaxWrapper(), 'got neither'),
    (lambda: optimizers.OptaxWrapper(optax.sgd(0.1), learning_rate_factory=optax.sgd), 'got both'),
    (lambda: optimizers.wrap_optax_optimizer(optax.clip, takes_learning_rate=True), "'max_delta'"),
])
def test_refusals(make, message):
  with pytest.raises(ConfigError, match=message):
    make()
