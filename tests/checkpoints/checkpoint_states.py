"""States for the checkpoint tests: small, sharded over the 8 virtual devices, and recognisable by their step."""

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import tree_utils

P = jax.sharding.PartitionSpec


def mesh(data=4, model=2):
  return jax.make_mesh(
    (data, model), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


def sharding(spec=P(), on=None):
  return jax.sharding.NamedSharding(on or mesh(), spec)


def flat_numpy(step, seed=0):
  """A training state in the names that the train state gives, as NumPy; different at each step."""
  rng = np.random.default_rng([seed, step])
  params = {
    'token_embedder/embedding': rng.standard_normal((16, 8), np.float32),
    'encoder/layers_0/mlp/wi/kernel': rng.standard_normal((8, 24), np.float32),
    'decoder/decoder_norm/scale': rng.standard_normal((8,), np.float32),
  }
  state = {f'target/{name}': value for name, value in params.items()}
  for moment in ('mu', 'nu'):
    state |= {f'state/param_states/0/{moment}/{name}': value * 2 for name, value in params.items()}
  state['state/param_states/0/count'] = np.int32(step)
  state['state/step'] = np.int32(step)
  return {name: np.asarray(value) for name, value in state.items()}


def flat_specs():
  specs = {}
  for name, value in flat_numpy(0).items():
    specs[name] = P('data', 'model') if value.ndim == 2 else P('model') if value.ndim == 1 else P()
  return specs


def shardings(on=None):
  on = on or mesh()
  return tree_utils.unflatten_dict(
    {name: sharding(spec, on) for name, spec in flat_specs().items()}
  )


def state(step, seed=0, on=None):
  """The same as nested dict of sharded arrays."""
  return jax.device_put(tree_utils.unflatten_dict(flat_numpy(step, seed)), shardings(on))


def shapes(tree):
  return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def target():
  return shapes(tree_utils.unflatten_dict(flat_numpy(0)))


def assert_same(tree, flat_expected):
  flat = tree_utils.flatten_dict(tree)
  assert set(flat) == set(flat_expected)
  for name, expected in flat_expected.items():
    assert flat[name].dtype == expected.dtype, name
    np.testing.assert_array_equal(np.asarray(flat[name]), expected, err_msg=name)


def big_state(value, num=4, size=512):
  """Arrays of one value, for tests in which a save should take a while."""
  return {
    'target': {f'w{i}': jnp.full((size, size), value, jnp.float32) for i in range(num)},
    'state': {'step': jnp.int32(value)},
  }
