"""Dropless dispatch on meshes against one device: results, gradients, drops, and what the programs move."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import partitioning as nn_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe import dispatch, rules
from moe.dispatch import exchange, expert_parallel
from moe.dispatch.types import MlpSpec
from t5x_lite.errors import ConfigError
from tests.moe.test_dispatch import assert_close, make_expert_choice, make_params, make_token_choice

pytestmark = pytest.mark.usefixtures('fast_compilation')

_HEAD = tuple(rules.head_logical_axis_rules(activation_partitioning_dims=1))
# Rules of the first form; with two data axes, and with one.
_TWO_DATA = (('batch', ('data', 'model')), ('expert', 'data'), ('expert_mlp', None), ('expert_replicas', 'model'))
_ONE_DATA = (('batch', 'data'), ('expert', 'data'), ('expert_mlp', 'model'))


def _mesh(shape, names=('data', 'expert', 'model')):
  return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def _case(seed=0, *, num_experts=8, num_selected=2, groups=4, tokens=16, width=8, hidden=12, **options):
  rng = np.random.default_rng(seed)
  params = make_params(rng, num_experts, width, hidden, 2, biases=True)
  x = jnp.asarray(rng.normal(size=(groups, tokens, width)), jnp.float32)
  routing = make_token_choice(rng, groups, tokens, num_selected, num_experts, **options)
  return x, routing, params


def _run(x, routing, params, spec=MlpSpec(('gelu', 'linear')), **options):
  """Returns (y, drops), and gradients of x, gates and parameters."""
  weights = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), jnp.float32)

  def loss(x, gates, params, routing):
    y, stats = dispatch.apply_experts(x, routing.replace(gates=gates), params, spec, **options)
    y32 = y.astype(jnp.float32)
    return jnp.sum(weights * y32 + 0.5 * y32**2), (y, stats.receive_drops)

  (_, outputs), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
      x, routing.gates, params, routing)
  return outputs, grads


def _on_mesh(mesh, axis_rules, *args, **options):
  with jax.set_mesh(mesh), nn_partitioning.axis_rules(axis_rules):
    return jax.device_get(_run(*args, **options))


_MESHES = {
    'data': ((8, 1, 1), _HEAD),
    'expert': ((1, 8, 1), _HEAD),
    'data and expert': ((2, 4, 1), _HEAD),
    'all three': ((2, 2, 2), _HEAD),
    'model': ((1, 1, 8), _HEAD),
    'experts along data': ((4, 1, 2), _ONE_DATA),
    'two data axes': ((4, 1, 2), _TWO_DATA),
}


@pytest.mark.parametrize('name', _MESHES)
def test_mesh_makes_no_difference(name):
  shape, axis_rules = _MESHES[name]
  x, routing, params = _case(ignored=0.1, skew=[5, 1, 1, 1, 1, 1, 1, 0.1], hidden=16)
  key = jax.random.key(3)
  spec = MlpSpec(('gelu', 'linear'), dropout_rate=0.3)
  expected = _run(x, routing, params, spec, dropout_rng=key)
  got = _on_mesh(_mesh(shape), axis_rules, x, routing, params, spec, dropout_rng=key)
  assert_close(got, expected, tol=3e-6)
