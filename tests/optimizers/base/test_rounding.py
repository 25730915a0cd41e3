"""Stochastic rounding: unbiased, exact where it can be, the same on every mesh, and better than rounding to nearest."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.optimizers.base import rounding


def _neighbours(value):
  """Return the largest bfloat16 number <= value and the smallest >= value, as float64."""
  bits = np.asarray(value, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
  ends = np.array([bits, bits + np.uint32(0x10000)], np.uint32).view(np.float32).astype(np.float64)
  return ends.min(), ends.max()


@pytest.mark.parametrize('value', [1.0 + 2**-9, 1.0 + 2**-15, -3.1416, 1.9999, 1e-3, -1e30, 1e-39])
def test_the_mean_of_rounded_numbers_is_the_number(value):
  value, num = np.float32(value), 100_000
  rounded = jax.jit(rounding.round_to_bfloat16)(jax.random.key(3), jnp.full([num], value))
  assert rounded.dtype == jnp.bfloat16
  rounded = np.asarray(rounded).astype(np.float64)
  low, high = _neighbours(value)
  assert set(np.unique(rounded)) <= {low, high}
  share = (np.float64(value) - low) / (high - low)
  standard_error = (high - low) * np.sqrt(share * (1 - share) / num)
  assert abs(rounded.mean() - np.float64(value)) < 4 * standard_error


def test_random_numbers_are_uniform_and_not_correlated():
  shape = (8, 256, 128)
  # pylint: disable=protected-access
  draw = jax.jit(
    lambda key: jnp.stack(
      [
        rounding._hashes(seed, shape) >> 16
        for seed in rounding._seeds(key, ['a/kernel', 'b/kernel'])
      ]
    )
  )
  numbers = np.concatenate([draw(jax.random.key(seed)) for seed in (0, 1, 2)])
  counts = np.stack([np.bincount(each.reshape(-1) >> 8, minlength=256) for each in numbers])
  expected = numbers[0].size / 256
  chi_squares = ((counts - expected) ** 2 / expected).sum(axis=1)  # of 255 degrees of freedom
  assert np.all(np.abs(chi_squares - 255) < 5 * np.sqrt(2 * 255)), chi_squares
  centred = numbers.astype(np.float64) / 2**16 - 0.5 + 2**-17
  for axis in range(4):  # keys and paths, then the dims
    for distance in (1, 2, 3):
      size = centred.shape[axis]
      pairs = centred.take(range(distance, size), axis) * centred.take(range(size - distance), axis)
      assert abs(pairs.mean()) < 5 * (1 / 12) / np.sqrt(pairs.size), (axis, distance)


def test_numbers_of_bfloat16_infinities_and_nan_are_kept():
  numbers = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(jnp.bfloat16)
  rounded = np.asarray(
    rounding.round_to_bfloat16(jax.random.key(0), jnp.asarray(numbers).astype(jnp.float32))
  )
  is_nan = np.isnan(numbers.astype(np.float32))
  np.testing.assert_array_equal(np.isnan(rounded.astype(np.float32)), is_nan)
  np.testing.assert_array_equal(rounded.view(np.uint16)[~is_nan], numbers.view(np.uint16)[~is_nan])
  # NaN whose bits would overflow, in the half that bfloat16 does not have.
  odd = jnp.asarray(np.array([0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32))
  assert np.isnan(
    np.asarray(rounding.round_to_bfloat16(jax.random.key(0), odd)).astype(np.float32)
  ).all()


def _stochastic(optimizer_def, **options):
  return optimizers.with_update_options(
    optimizer_def, param_dtype='bfloat16', stochastic_rounding=True, **options
  )


def _params(seed=0):
  def draw(*shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)

  return {
    'encoder': {f'layers_{i}': {'kernel': draw(8, 16) + i} for i in range(3)},
    'embedding': draw(16, 8),
  }


def _update(optimizer, grads, key=jax.random.key(1)):
  return jax.jit(lambda o, g: o.apply_gradient(g, rounding_key=key))(optimizer, grads)


def test_random_numbers_depend_on_the_path_alone_not_on_other_parameters_stacks_or_meshes():
  optimizer, grads = (
    _stochastic(optimizers.sgd(0.1)).create(jax.tree.map(jnp.asarray, _params())),
    _params(1),
  )
  whole = jax.device_get(_update(optimizer, grads).target)
  arrays = [whole['embedding'], *(layer['kernel'] for layer in whole['encoder'].values())]
  assert all(array.dtype == jnp.bfloat16 for array in arrays)

  part = _stochastic(optimizers.sgd(0.1)).create({'embedding': jnp.asarray(_params()['embedding'])})
  np.testing.assert_array_equal(
    _update(part, {'embedding': grads['embedding']}).target['embedding'], arrays[0]
  )

  stacks = LayerStacks((('encoder', (0, 1, 2)),))
  stacked = _update(stacks.stack(jax.device_get(optimizer)), stacks.stack(grads))
  jax.tree.map(np.testing.assert_array_equal, stacks.unstack(jax.device_get(stacked.target)), whole)

  mesh = Mesh(
    np.reshape(jax.devices()[:8], (2, 4)), ('data', 'model'), axis_types=(AxisType.Auto,) * 2
  )
  sharded = jax.device_put((optimizer, grads), NamedSharding(mesh, P()))

  def place(tree):
    return jax.tree.map(
      lambda x: jax.device_put(x, NamedSharding(mesh, P('data', 'model') if x.ndim == 2 else P())),
      tree,
    )

  jax.tree.map(
    np.testing.assert_array_equal, jax.device_get(_update(*map(place, sharded)).target), whole
  )

  # Equal numbers of different parameters are not rounded alike.
  equal = {'a': jnp.full([8, 16], 1.0), 'b': jnp.full([8, 16], 1.0)}
  rounded = _update(
    _stochastic(optimizers.sgd(0.01)).create(equal), jax.tree.map(jnp.cos, equal)
  ).target
  assert np.any(np.asarray(rounded['a'] != rounded['b']))

  other = jax.device_get(_update(optimizer, grads, jax.random.key(2)).target)
  nearest = jax.tree.map(
    lambda param, grad: (param.astype(jnp.float32) - 0.1 * grad).astype(jnp.bfloat16),
    optimizer.target,
    grads,
  )
  for result in (other, nearest):
    assert np.mean(np.asarray(result['embedding']) != arrays[0]) > 0.1


def test_updates_are_those_of_float32_for_every_kind_of_optimizer():
  params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), _params())
  wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)

  def loss(params):
    return sum(jnp.sum(jnp.square(param.astype(jnp.float32))) for param in jax.tree.leaves(params))

  def value_fn(params):
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} <= {jnp.dtype(jnp.bfloat16)}, (
      'the dtype of the model'
    )
    return loss(params)

  for make in (
    lambda: optimizers.adamw(0.1),
    lambda: optimizers.Adafactor(0.1, min_dim_size_to_factor=4),
    lambda: optimizers.sophia(0.1),
    lambda: optimizers.MultiOptimizer([('kernel', optimizers.lion(0.1))]),
  ):
    plain, rounded = make().create(wide), _stochastic(make()).create(params)
    extra_args = {'obj_fn': value_fn} if 'obj_fn' in plain.optimizer_def.extra_args else {}
    wide_args = {'obj_fn': loss} if extra_args else {}
    plain, rounded = jax.jit(
      lambda plain, rounded: (
        plain.apply_gradient(_params(1), **wide_args),
        rounded.apply_gradient(_params(1), rounding_key=jax.random.key(0), **extra_args),
      )
    )(plain, rounded)
    for left, right in zip(
      jax.tree.leaves(plain.state), jax.tree.leaves(rounded.state), strict=True
    ):
      assert left.dtype == right.dtype
      np.testing.assert_allclose(left, right, rtol=2e-2, atol=1e-5)
    for before, left, right in zip(
      *map(jax.tree.leaves, (params, plain.target, rounded.target)), strict=True
    ):
      assert right.dtype == jnp.bfloat16
      low, high = np.vectorize(_neighbours)(left)
      right = np.asarray(right).astype(np.float64)
      assert np.mean((right == low) | (right == high)) > 0.99
      assert (
        make().name.startswith('Multi')
        or np.mean(right != np.asarray(before).astype(np.float64)) > 0.9
      )


def _final_losses(rounds, make, num_steps=400):
  """Return the first and the last loss of a regression whose updates are small compared to the parameters."""
  rng = np.random.default_rng(0)
  inputs, target = (
    rng.normal(size=[256, 16]).astype(np.float32),
    rng.normal(size=[16, 4]).astype(np.float32),
  )

  def loss(params):
    return jnp.mean((inputs @ (params['w'].astype(jnp.float32) - 1.0) - inputs @ target * 0.2) ** 2)

  optimizer = optimizers.with_update_options(
    make(), param_dtype='bfloat16', stochastic_rounding=rounds
  ).create({'w': jnp.ones([16, 4])})

  def step(optimizer, key):
    value, grads = jax.value_and_grad(loss)(optimizer.target)
    return optimizer.apply_gradient(grads, **({'rounding_key': key} if rounds else {})), value

  losses = jax.jit(lambda o: jax.lax.scan(step, o, jax.random.split(jax.random.key(0), num_steps)))(
    optimizer
  )[1]
  return float(losses[0]), float(losses[-1])


@pytest.mark.parametrize(
  'make',
  [lambda: optimizers.adamw(1e-3), lambda: optimizers.Adafactor(1e-3, min_dim_size_to_factor=4)],
  ids=['adamw', 'adafactor'],
)
def test_small_updates_train_where_rounding_to_nearest_stalls(make):
  first, nearest = _final_losses(False, make)
  assert (
    nearest > 0.98 * first
  )  # steps of 0.001 next to parameters of 1, whose neighbours are 0.004 below
  assert _final_losses(True, make)[1] < 0.2 * first


def test_off_it_leaves_the_compiled_update_as_it_is():
  def text(optimizer_def):
    return (
      jax.jit(lambda o, g: o.apply_gradient(g).target)
      .lower(optimizer_def.create(_params()), _params())
      .as_text()
    )

  plain = optimizers.adamw(0.1)
  assert text(plain) == text(optimizers.with_update_options(plain)) and 'threefry' not in text(
    plain
  )


@pytest.mark.parametrize(
  'make, message',
  [
    (
      lambda: _stochastic(optimizers.sgd(0.1)).create(_params()).apply_gradient(_params()),
      'Pass rounding_key=',
    ),
    (
      lambda: optimizers.with_update_options(optimizers.sgd(0.1), stochastic_rounding=True).create(
        _params()
      ),
      'stochastic_rounding` has no effect: no parameter is bfloat16.*param_dtype',
    ),
    (
      lambda: optimizers.MultiOptimizer([('kernel', _stochastic(optimizers.sgd(0.1)))]),
      'set for an argument of Multi',
    ),
    (
      lambda: optimizers.chain([optax.clip(1.0), _stochastic(optimizers.sgd(0.1))]),
      'argument of chain',
    ),
    (lambda: optimizers.mechanize(_stochastic(optimizers.sgd(0.1))), 'argument of mechanize'),
    (
      lambda: optimizers.with_update_options(optimizers.sgd(0.1), param_dtype='float16'),
      'one of .bfloat16. or None',
    ),
  ],
)
def test_options_without_effect_are_rejected(make, message):
  with pytest.raises(ConfigError, match=message):
    make()
