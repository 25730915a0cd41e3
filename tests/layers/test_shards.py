"""Functions on each device's rows and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import partitioning
from t5x_lite.layers.shards import on_each_device


def test_a_kernel_is_never_left_to_the_compiler():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)

  def run(x, is_kernel):
    return on_each_device(jnp.sin, (x,), ('bh.',), 'bh.', is_kernel=is_kernel)

  for is_kernel in (False, True):
    with jax.set_mesh(partitioner.mesh):
      assert (
        'shard_map' in str(jax.make_jaxpr(lambda x: run(x, is_kernel))(jnp.ones((3, 3, 2))))
      ) == is_kernel


@pytest.mark.parametrize(
  'batch,heads,local', [(8, 2, (2, 1)), (8, 3, (2, 3)), (6, 2, (6, 1)), (3, 3, (3, 3))]
)
def test_each_device_gets_its_part(batch, heads, local):
  """Dims that the devices do not divide are whole, and results without a dim are sums over it."""
  shapes = []

  def fn(x, scale):
    shapes.append(x.shape[:2])
    return x * scale[:, None], jnp.sum(x, axis=0)

  x = jnp.arange(batch * heads * 5, dtype=jnp.float32).reshape(batch, heads, 5)
  scale = jnp.arange(1.0, 1.0 + heads)

  def run(x, scale):
    return on_each_device(fn, (x, scale), ('bh.', 'h'), ('bh.', 'h.'))

  want = run(x, scale)
  assert shapes.pop() == (batch, heads)
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  got = partitioner.partition(run, None, None)(x, scale)
  jax.tree.map(np.testing.assert_allclose, got, want)
  assert set(shapes) == {local}
  # Inside of `shard_map` over some axes, only the others are divided.
  shapes.clear()

  def over_data(x, scale):
    return jax.shard_map(
      run, in_specs=(jax.P(), jax.P()), out_specs=jax.P(), axis_names={'data'}, check_vma=False
    )(x, scale)

  got = partitioner.partition(over_data, None, None)(x, scale)
  jax.tree.map(np.testing.assert_allclose, got, want)
  assert set(shapes) == {(batch, local[1])}
  shapes.clear()

  def inner(x, scale):
    return jax.shard_map(run, in_specs=(jax.P(), jax.P()), out_specs=jax.P(), check_vma=False)(
      x, scale
    )

  got = partitioner.partition(inner, None, None)(x, scale)
  jax.tree.map(np.testing.assert_allclose, got, want)
  assert set(shapes) == {(batch, heads)}
