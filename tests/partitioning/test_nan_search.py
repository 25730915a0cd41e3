"""The operation that gives the first NaN of a compiled program is named, with its line."""

import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import partitioning
from t5x_lite.errors import NonFiniteMetricError
from t5x_lite.trainer import NonFinitePolicy
from tests.apps.train import toy_run


@pytest.fixture
def options():
  """Function that sets options of JAX; they are restored at the end."""
  before = {name: jax.config.values[name] for name in ('jax_debug_nans', 'jax_debug_infs')}
  yield jax.config.update
  for name, value in before.items():
    jax.config.update(name, value)


def _plain(x):
  return x + 1.0, jnp.log(x)  # log


def _masked(x):
  # The first NaN is replaced.
  return jnp.where(x > 0, jnp.log(x), 0.0) + jnp.sqrt(x)  # sqrt


def _call(x):
  return jax.jit(jax.checkpoint(lambda x: jnp.sin(x) * jnp.log(x)))(x)  # log


def _loop(x):
  def step(carry, x):
    return jnp.sqrt(carry - 1.0), x  # sqrt

  return jax.lax.scan(step, jnp.float32(2.5), x)


def _masked_in_loop(x):
  def step(carry, y):
    replaced = jnp.where(y > 0, jnp.log(y), 0.0)
    return carry + replaced, jnp.sqrt(y - 100)  # sqrt

  return jax.lax.scan(step, 0.0, x)


def _loops(x):
  def outer(carry, x):
    def inner(carry, number):
      return carry + number, jnp.log(x - number)  # log

    return jax.lax.scan(inner, carry, jnp.arange(3.0))

  return jax.lax.scan(outer, 0.0, x + 2.0)


def _gradient(x):
  return jax.grad(lambda x: jnp.sum(jnp.where(x > 9, jnp.sqrt(x - x), 0.0)))(x)  # mul


def _condition(x):
  return jax.lax.cond(x[0] < 0, jnp.log, jnp.sin, x)  # cond


_X = np.array([-1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], np.float32)


@pytest.mark.parametrize(
  'fn', [_plain, _masked, _call, _loop, _masked_in_loop, _loops, _gradient, _condition]
)
@pytest.mark.parametrize('num_devices', [1, 8])
def test_the_operation_is_named_with_its_line(options, fn, num_devices):
  lines, first = inspect.getsourcelines(fn)
  (found,) = [(first + i, line) for i, line in enumerate(lines) if re.search(r'  # \w+$', line)]
  options('jax_debug_nans', True)
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:num_devices]).reshape(-1, 1),
    ('data', 'model'),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  partitioner = partitioning.PjitPartitioner(mesh=mesh)
  partitioned = partitioner.partition(
    fn, (jax.sharding.PartitionSpec('data'),), None, donate_argnums=(0,)
  )
  program = partitioner.compile(partitioned, _X)
  with pytest.raises(NonFiniteMetricError) as error:
    program(_X)
  line, name = found[0], found[1].rpartition('# ')[2].strip()
  assert f"the operation '{name}' at {__file__}:{line}:" in str(error.value)
  if num_devices == 1:
    good = partitioner.partition(lambda x: (jnp.where(x > 0, jnp.log(x), 0.0), x), None, None)
    np.testing.assert_array_equal(partitioner.compile(good, _X)(_X)[1], _X)


def test_modules_arguments_and_infinities_are_named(options):
  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(2, name='dense')(jnp.sqrt(x))

  partitioner = partitioning.PjitPartitioner(1)
  root = Root()
  params = root.init(jax.random.key(0), jnp.ones((8,)))
  options('jax_debug_nans', True)
  partitioned = partitioner.partition(root.apply, None, None)
  program = partitioner.compile(partitioned, params, _X)
  with pytest.raises(NonFiniteMetricError, match="'sqrt'.*, in .*Root"):
    program(params, _X)
  with pytest.raises(NonFiniteMetricError, match="operation 'argument' at its call"):
    program(params, np.full((8,), np.nan, np.float32))
  options('jax_debug_nans', False)
  options('jax_debug_infs', True)
  # An infinity of an argument is a value, such as the first minimum in the state of an optimizer.
  infinite = partitioner.partition(lambda x, y: (x, 1 / y), None, None, donate_argnums=(0,))
  program = partitioner.compile(infinite, np.float32(np.inf), _X)
  program(np.float32(np.inf), _X)
  with pytest.raises(NonFiniteMetricError, match="first infinite number or NaN of.*'div'"):
    program(jnp.float32(1), jnp.zeros(8))
  # The infinity is no result: the derivative of a root at 0, times 0, is a NaN.
  root = partitioner.partition(jax.grad(lambda x: jnp.sum(0.0 * jnp.sqrt(x))), None, None)
  with pytest.raises(NonFiniteMetricError, match="number or NaN of.*'div'"):
    partitioner.compile(root, jnp.zeros(8))(jnp.zeros(8))
  options('jax_debug_infs', False)
  options('jax_debug_nans', True)
  with pytest.raises(NonFiniteMetricError, match="'mul'.*, in the backward pass, in transpose"):
    partitioner.compile(root, jnp.zeros(8))(jnp.zeros(8))


@pytest.mark.parametrize('action', ['stop', 'skip'])
def test_a_run_ends_at_its_first_nan(options, tmp_path, action):
  """Also where steps with a NaN would be skipped, and not without the option."""
  options('jax_debug_nans', True)

  def spoil(grads):
    return jax.tree.map(lambda grad: jnp.log(-jnp.abs(grad) - 1.0), grads)

  with pytest.raises(NonFiniteMetricError, match=f"operation 'log' at {__file__}"):
    toy_run.train(
      tmp_path,
      trainer_kwargs={
        'gradient_transform': spoil,
        'non_finite_policy': NonFinitePolicy(action=action),
      },
    )
