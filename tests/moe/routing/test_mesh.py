"""Routing is the same on every mesh, noise included."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from moe import routing

_EXPERTS = 8
_ROUTERS = {
  'tokens': routing.TokensChooseRouter(
    _EXPERTS, num_selected=2, jitter_noise=0.1, batch_prioritized_routing=True, bias_update_rate=0.1
  ),
  'global': routing.TokensChooseRouter(
    _EXPERTS, num_selected=2, jitter_noise=0.1, capacity_scope='global'
  ),
  'sinkhorn': routing.SinkhornRouter(_EXPERTS, jitter_noise=0.1),
  'experts': routing.ExpertsChooseRouter(_EXPERTS, jitter_noise=0.1),
}
# Mesh (data, expert, model), sharding of the tokens [G, T, D], sharding of the kernel [D, E].
_MESHES = [
  ((8, 1, 1), PartitionSpec(('expert', 'data')), PartitionSpec()),
  ((2, 4, 1), PartitionSpec(('expert', 'data')), PartitionSpec()),
  ((2, 2, 2), PartitionSpec(('expert', 'data'), None, 'model'), PartitionSpec('model')),
  ((1, 1, 8), PartitionSpec(None, None, 'model'), PartitionSpec('model')),
  ((4, 1, 2), PartitionSpec('data', 'model'), PartitionSpec('data')),
  ((1, 8, 1), PartitionSpec(None, 'expert'), PartitionSpec('expert')),
]


def _inputs():
  x = jax.random.normal(jax.random.key(0), (8, 32, 64))
  x = x.at[:, 29:].set(0.0)
  kernel = 0.3 * jax.random.normal(jax.random.key(1), (64, _EXPERTS))
  return x, {'router_weights': {'w': {'kernel': kernel}}}


def _route(router, x, params):
  state = {'bias': jnp.zeros(_EXPERTS), 'counts': jnp.zeros(_EXPERTS), 'num_passes': jnp.int32(0)}

  def objective(x, params):
    routed, updates = router.apply(
      {'params': params, 'router_state': state},
      x,
      capacity=6,
      rngs={'jitter': jax.random.key(2)},
      mutable=['router_state'],
    )
    return jnp.sum(routed.gates**2) + routed.auxiliary_loss + routed.router_z_loss, (
      routed,
      updates,
    )

  return jax.grad(objective, argnums=(0, 1), has_aux=True)(x, params)


@functools.cache
def _on_one_device(name):
  return jax.device_get(jax.jit(functools.partial(_route, _ROUTERS[name]))(*_inputs()))


# All routers on all meshes; the short run has each router once, each with another mesh.
_CASES = [(name, number) for name in _ROUTERS for number in range(len(_MESHES))]
_SHORT = [('tokens', 4), ('experts', 5)]


@pytest.mark.parametrize(
  'name, number',
  [case if case in _SHORT else pytest.param(*case, marks=pytest.mark.full) for case in _CASES],
)
def test_routing_depends_on_no_mesh(name, number):
  shape, tokens_spec, kernel_spec = _MESHES[number]
  mesh = jax.make_mesh(shape, ('data', 'expert', 'model'), axis_types=(AxisType.Auto,) * 3)
  x, params = _inputs()
  with jax.set_mesh(mesh):
    x = jax.device_put(x, NamedSharding(mesh, tokens_spec))
    params = jax.device_put(params, NamedSharding(mesh, kernel_spec))
    got = jax.device_get(jax.jit(functools.partial(_route, _ROUTERS[name]))(x, params))
  expected = _on_one_device(name)
  for (path, a), (_, b) in zip(
    jax.tree_util.tree_leaves_with_path(got),
    jax.tree_util.tree_leaves_with_path(expected),
    strict=True,
  ):
    if not np.issubdtype(a.dtype, np.floating):
      np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    else:
      error, norm = np.linalg.norm(a - b), np.linalg.norm(b)
      assert error <= 2e-6 * norm, f'{jax.tree_util.keystr(path)}: {error / norm:.2g} of its norm'
  (_, (routed, _)), (_, (expected_routed, _)) = got, expected
  np.testing.assert_array_equal(routed.kept(), expected_routed.kept())
  # On some processors XLA's matrix products differ in their last bits with the number of rows that a device has.
  np.testing.assert_allclose(routed.probs, expected_routed.probs, rtol=1e-5, atol=1e-7)


def test_groups_are_routed_without_talk_between_devices():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
  x, params = _inputs()

  def route(x, params):
    routed = _ROUTERS['tokens'].apply(
      {'params': params}, x, capacity=6, deterministic=True, mutable=['router_state']
    )[0]
    return routed.expert_index, routed.gates, routed.position

  with jax.set_mesh(mesh):
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))
    program = jax.jit(route).lower(x, params).compile().as_text()
  talk = [
    line
    for line in program.splitlines()
    if re.search('(all-gather|all-reduce|all-to-all|collective-permute)\\(', line)
  ]
  assert not talk
