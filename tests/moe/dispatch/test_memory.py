"""Temporaries of dropless dispatch do not grow with the number of experts; buffers are right on any mesh."""

from flax.linen import partitioning as nn_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from moe import dispatch
from moe.dispatch import types
from t5x_lite.errors import ConfigError
from tests.moe.dispatch.test_apply import make_params
from tests.moe.dispatch.test_apply import make_token_choice


def _temporaries(num_experts, mlp_fn, num_rows=4096, width=32, hidden=64):
  """Bytes of temporaries of forward and backward."""
  params = types.MlpParams(
    wi=(jax.ShapeDtypeStruct((num_experts, width, hidden), jnp.float32),),
    wo=jax.ShapeDtypeStruct((num_experts, hidden, width), jnp.float32),
  )
  rows = jax.ShapeDtypeStruct((num_rows, width), jnp.float32)
  sizes = jax.ShapeDtypeStruct((num_experts,), jnp.int32)

  def loss(params, rows, sizes):
    return jnp.sum(mlp_fn(params, rows, sizes) ** 2)

  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, rows, sizes).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def _ragged(params, rows, sizes):
  return jax.lax.ragged_dot(
    jax.nn.gelu(jax.lax.ragged_dot(rows, params.wi[0], sizes)), params.wo, sizes
  )


def test_temporaries_are_flat_in_the_number_of_experts():
  spec = types.MlpSpec(('gelu',))

  def grouped(*args):
    return dispatch.grouped_mlp(*args, spec)

  few, many = _temporaries(4, grouped), _temporaries(64, grouped)
  assert many < 1.1 * few
  assert (
    many < 4096 * (64 + 2 * 32) * 4 * 1.5
  )  # Pre-activations and two buffers of rows, half as much again.
  assert 10 * many < _temporaries(64, _ragged)


_RULES = (
  ('batch', ('expert', 'data')),
  ('expert', 'expert'),
  ('expert_replicas', 'data'),
  ('expert_mlp', 'model'),
  ('embed', None),
)


@pytest.mark.parametrize(
  'method, shape',
  [
    ('einsum', (2, 2, 2)),
    *(
      pytest.param(method, shape, marks=pytest.mark.full)
      for method, shape in (
        ('einsum', (1, 8, 1)),
        ('capacity', (1, 8, 1)),
        ('capacity', (2, 2, 2)),
        ('grouped', (1, 8, 1)),
        ('grouped', (2, 2, 2)),
      )
    ),
  ],
)
def test_right_under_a_mesh(method, shape):
  num_experts = 8
  rng = np.random.default_rng(0)
  params = make_params(rng, num_experts, 8, 12, 1)
  x = jnp.asarray(rng.normal(size=(8, 16, 8)), jnp.float32)
  routing = make_token_choice(rng, 8, 16, 2, num_experts, capacity=6)
  spec = types.MlpSpec(('gelu',))

  def loss(x, params, gates):
    y = dispatch.apply_experts(x, routing.replace(gates=gates), params, spec, method=method)[0]
    return jnp.sum(y**2)

  fn = jax.value_and_grad(loss, argnums=(0, 1, 2))
  expected = jax.jit(fn)(x, params, routing.gates)
  mesh = jax.make_mesh(shape, ('data', 'expert', 'model'), axis_types=(AxisType.Auto,) * 3)
  batch = NamedSharding(mesh, PartitionSpec(('expert', 'data')))
  kernels = NamedSharding(mesh, PartitionSpec('expert'))
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(_RULES):
    got = jax.jit(fn)(
      jax.device_put(x, batch),
      jax.device_put(params, kernels),
      jax.device_put(routing.gates, batch),
    )
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_experts_that_do_not_divide_raise():
  mesh = jax.make_mesh((1, 8, 1), ('data', 'expert', 'model'), axis_types=(AxisType.Auto,) * 3)
  params = make_params(np.random.default_rng(0), 4, 8, 12, 1)
  routing = make_token_choice(np.random.default_rng(0), 8, 16, 2, 4, capacity=6)
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(_RULES):
    for method in ('einsum', 'capacity', 'grouped'):
      with pytest.raises(
        ConfigError, match='multiple of 8, the devices .*got 4. Alternatively, use 4 expert'
      ):
        jax.eval_shape(
          lambda x, method=method: dispatch.apply_experts(
            x, routing, params, types.MlpSpec(('gelu',)), method=method
          )[0],
          jnp.zeros((8, 16, 8)),
        )


def test_buffers_lie_on_their_experts_devices():
  """Nothing but constraints tells the compiler where a buffer goes: the hidden units are cut over all three axes."""
  mesh = jax.make_mesh((2, 2, 2), ('data', 'expert', 'model'), axis_types=(AxisType.Auto,) * 3)
  params = make_params(np.random.default_rng(0), 4, 8, 16, 1)
  x = jnp.zeros((4, 6, 8))
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(_RULES):
    text = (
      jax.jit(lambda x: dispatch.batched_mlp(params, x, types.MlpSpec(('tanh',))))
      .lower(x)
      .compile()
      .as_text()
    )
  # 4 experts, 6 places and 16 hidden units, each halved.
  assert 'f32[2,3,8]' in text and 'f32[4,6,16]' not in text, text
