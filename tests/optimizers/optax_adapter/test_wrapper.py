"""The optax wrapper: updates are optax's, rates, partial applications, containers, dtypes."""

import functools
import inspect

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError


def _params(seed=0):
  rng = np.random.default_rng(seed)
  return {
    'dense': {
      'kernel': rng.normal(size=[4, 6]).astype(np.float32),
      'bias': rng.normal(size=[6]).astype(np.float32),
    },
    'scale': np.float32(1.5),
  }


def _assert_close(left, right, rtol=1e-6):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7), left, right)


_DECAY = optax.linear_schedule(0.1, 0.0, 10)
_SAME_AS_OPTAX = {
  'adam': (lambda: optimizers.adam(0.1, b2=0.9), lambda: optax.adam(0.1, b2=0.9)),
  'adamw': (
    lambda: optimizers.adamw(0.1, weight_decay=0.3),
    lambda: optax.adamw(0.1, weight_decay=0.3),
  ),
  'adamw_schedule': (lambda: optimizers.adamw(learning_rate=_DECAY), lambda: optax.adamw(_DECAY)),
  'sgd': (
    lambda: optimizers.sgd(0.1, 0.9, nesterov=True),
    lambda: optax.sgd(0.1, 0.9, nesterov=True),
  ),
  'chain': (
    lambda: optimizers.chain([optax.clip(0.1), optax.adamw(0.1)]),
    lambda: optax.chain(optax.clip(0.1), optax.adamw(0.1)),
  ),
  'chain_of_wrapped': (
    lambda: optimizers.chain(transformations=(optax.clip(0.1), optimizers.adamw(0.1))),
    lambda: optax.chain(optax.clip(0.1), optax.adamw(0.1)),
  ),
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


@pytest.mark.parametrize(
  'wrapped,bare',
  [
    (lambda: optimizers.adamw(weight_decay=0.3), lambda rate: optax.adamw(rate, weight_decay=0.3)),
    (lambda: optimizers.sgd(None, momentum=0.5), lambda rate: optax.sgd(rate, momentum=0.5)),
    (
      lambda: optimizers.chain([optax.clip(0.1), optimizers.adamw(b1=0.5), optimizers.sgd(2.0)]),
      lambda rate: optax.chain(optax.clip(0.1), optax.adamw(rate, b1=0.5), optax.sgd(2.0)),
    ),
  ],
)
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
  tx = optax.chain(
    optax.clip(0.1), optax.masked(optimizers.sgd().optax_optimizer, {'a': True, 'b': False})
  )
  params = {'a': jnp.ones([2]), 'b': jnp.ones([2])}
  updates, _ = tx.update(params, tx.init(params), params, learning_rate=0.5)
  np.testing.assert_allclose(updates['a'], -0.05, rtol=1e-6)
  np.testing.assert_allclose(updates['b'], 0.1, rtol=1e-6)


def test_a_bare_transformation_without_a_rate_raises():
  optimizer = optimizers.OptaxWrapper(optimizers.adamw().optax_optimizer).create(
    {'p': jnp.ones([2])}
  )
  with pytest.raises(ConfigError, match=r'optimizers\.chain'):
    optimizer.apply_gradient({'p': jnp.ones([2])}, learning_rate=0.1)


def test_a_finished_transformation_ignores_the_trainers_rate():
  optimizer = optimizers.OptaxWrapper(optax.sgd(0.1)).create({'p': jnp.ones([2])})
  assert not optimizer.optimizer_def.uses_learning_rate
  updated = optimizer.apply_gradient({'p': jnp.ones([2])}, learning_rate=100.0)
  np.testing.assert_allclose(updated.target['p'], 0.9, rtol=1e-6)


def test_wrap_optax_optimizer_keeps_the_constructors_arguments():
  def make(rate, *, power=2.0):
    return optax.sgd(rate**power)

  wrapped = optimizers.wrap_optax_optimizer(make)
  optimizer = (
    wrapped(0.1, power=1.0).create({'p': jnp.ones([2])}).apply_gradient({'p': jnp.ones([2])})
  )
  np.testing.assert_allclose(optimizer.target['p'], 0.9, rtol=1e-6)
  assert (
    list(inspect.signature(wrapped).parameters) == ['rate', 'power'] and wrapped.__name__ == 'make'
  )
  signature = inspect.signature(optimizers.adamw)
  assert signature.parameters['learning_rate'].default is None
  assert list(signature.parameters) == list(inspect.signature(optax.adamw).parameters)


def test_wrapped_optimizers_in_lists_and_dicts_are_taken():
  params, grads = {'p': jnp.ones([2])}, {'p': jnp.ones([2])}
  for make, arguments in (
    (optax.chain, (optax.scale(2.0), optimizers.sgd())),
    (
      lambda transformations: optax.chain(*transformations),
      ([optax.scale(2.0), optimizers.sgd()],),
    ),
    (
      optax.partition,
      ({'a': optimizers.chain([optax.scale(2.0), optimizers.sgd()]), 'b': optax.sgd(0.1)}, 'a'),
    ),
  ):
    optimizer_def = optimizers.wrap_optax_optimizer(make)(*arguments)
    assert optimizer_def.needs_learning_rate
    updated = optimizer_def.create(params).apply_gradient(grads, learning_rate=0.25)
    np.testing.assert_allclose(updated.target['p'], 0.5, rtol=1e-6)


def test_the_rate_of_an_update_may_be_a_schedule():
  for optimizer_def in (optimizers.sgd(), optimizers.Adafactor(multiply_by_parameter_scale=False)):
    optimizer = optimizer_def.create({'p': jnp.ones([2])})
    for _ in range(2):
      optimizer = optimizer.apply_gradient(
        {'p': jnp.ones([2])}, learning_rate=optax.linear_schedule(0.5, 0.0, 2)
      )
    np.testing.assert_allclose(optimizer.target['p'], 0.25, rtol=1e-6)


@pytest.mark.parametrize(
  'make',
  [
    lambda: optimizers.sgd(0.5),
    lambda: optimizers.Adafactor(0.5, multiply_by_parameter_scale=False),
    lambda: optimizers.MultiOptimizer([('p', optimizers.sgd(0.5))]),
  ],
)
def test_gradients_may_be_frozen_where_parameters_are_not_and_the_other_way_round(make):
  plain = {'a': {'p': jnp.ones([2])}}
  frozen = flax.core.freeze(plain)
  for params, grads in ((plain, frozen), (frozen, plain)):
    updated = make().create(params).apply_gradient(grads)
    assert type(updated.target) is type(params)
    np.testing.assert_allclose(updated.target['a']['p'], 0.5, rtol=1e-6)


def test_partial_applications_are_wrapped_too():
  wrapped = optimizers.wrap_optax_optimizer(
    functools.partial(optax.nadam, b1=0.5), takes_learning_rate=True
  )
  assert wrapped.__name__ == 'adam' and wrapped().uses_learning_rate
  optimizer, bare = wrapped(0.1).create({'p': jnp.ones([2])}), optax.nadam(0.1, b1=0.5)
  updates, _ = bare.update(optimizer.target, bare.init(optimizer.target), optimizer.target)
  _assert_close(
    optimizer.apply_gradient(optimizer.target).target,
    optax.apply_updates(optimizer.target, updates),
  )


@pytest.mark.parametrize(
  'make',
  [
    lambda: optimizers.sgd(0.5),
    lambda: optimizers.Adafactor(0.5, multiply_by_parameter_scale=False),
    lambda: optimizers.MultiOptimizer([('a', optimizers.sgd(0.5)), ('b', optimizers.adam(0.5))]),
  ],
)
def test_parameters_may_be_python_numbers(make):
  optimizer = make().create({'a': 0.0, 'b': 2.0})
  updated = optimizer.apply_gradient({'a': -1.0, 'b': 1.0})
  np.testing.assert_allclose([updated.target['a'], updated.target['b']], [0.5, 1.5], rtol=1e-5)
  assert {leaf.dtype for leaf in jax.tree.leaves(updated.target)} == {jnp.dtype('float32')}
  axes = optimizer.optimizer_def.derive_logical_axes(optimizer, {'a': P(), 'b': P()})
  assert jax.tree.structure(axes) == jax.tree.structure(optimizer)


@pytest.mark.parametrize(
  'make',
  [
    optimizers.dog,
    optimizers.cocob,
    optimizers.lbfgs,
    lambda: optimizers.sam(optax.sgd(0.1), optax.sgd(0.1)),
  ],
)
def test_no_array_is_in_a_new_optimizer_twice(make):
  optimizer = make().create({'p': jnp.ones([3])})
  buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(optimizer)]
  assert len(set(buffers)) == len(buffers)


def test_narrow_parameters_accumulate_small_updates_in_float32_statistics():
  # Kept in bfloat16, the average would have between two and three significant digits.
  optimizer = optimizers.OptaxWrapper(optax.ema(0.999, debias=False)).create(
    {'p': jnp.zeros([1], jnp.bfloat16)}
  )
  for _ in range(3):
    optimizer = optimizer.apply_gradient({'p': jnp.ones([1], jnp.bfloat16)})
  average = optimizer.state.param_states.ema['p']
  assert average.dtype == jnp.float32 and optimizer.target['p'].dtype == jnp.bfloat16
  np.testing.assert_allclose(average, 1 - 0.999**3, rtol=1e-5)


def test_ademamix_has_narrow_averages_and_a_second_moment_in_float32():
  """In bfloat16 a second moment would stay where it is, since a change of one thousandth is rounded away."""
  params = {'w': jnp.ones((3,))}
  exact, narrow = (
    optimizers.ademamix(0.1, mu_dtype=dtype).create(params) for dtype in (None, 'bfloat16')
  )
  for grad in (3.0, 0.0, 0.0):
    exact, narrow = (
      optimizer.apply_gradient({'w': jnp.full((3,), grad)}) for optimizer in (exact, narrow)
    )
  state = narrow.state.param_states[0]
  assert (state.m1['w'].dtype, state.m2['w'].dtype) == (jnp.bfloat16, jnp.bfloat16)
  np.testing.assert_allclose(state.nu['w'], 9 * 0.001 * 0.999**2, rtol=1e-6)
  np.testing.assert_allclose(narrow.target['w'], exact.target['w'], rtol=0.01)
