"""States of transformations of units."""

import functools
import re

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
from t5x_lite import tree_utils
from tests.optimizers import layout_cases as cases


@pytest.mark.parametrize('stem', ['lamb', 'novograd', 'sm3', 'galore', 'distributed_shampoo'])
def test_states_of_single_arrays_are_those_without_units(stem):
  optimizer, _ = cases.created(cases.definition(stem), 'single')
  plain = cases.definition(stem).create(optimizer.target)
  assert jax.tree.structure(optimizer.state) == jax.tree.structure(plain.state)
  jax.tree.map(np.testing.assert_array_equal, optimizer.state, plain.state)


def test_states_keep_batch_axes_and_share_counts():
  optimizer, axes = cases.created(optimizers.novograd(), 'scalable')
  derived = optimizer.optimizer_def.derive_logical_axes(optimizer, axes)
  arrays = dict(tree_utils.named_leaves(optimizer.state))
  specs = dict(tree_utils.named_leaves(derived.state))
  start = 'param_states/of_units/0'
  assert arrays[f'{start}/count'].shape == ()
  nu = f'{start}/nu/encoder/encoder/{cases.EXPERT_NAME}'
  assert arrays[nu].shape == (cases.NUM_EXPERTS, cases.NUM_LAYERS)
  assert specs[nu] == P('expert', 'layers')
  mu = f'{start}/mu/encoder/encoder/attention/query/kernel'
  assert arrays[mu].shape == (8, cases.NUM_LAYERS, 2, 6)
  assert specs[mu] == P('embed', 'layers', 'heads', 'kv')
  # A state of copies alone is that of earlier versions in each layout.
  lamb, _ = cases.created(optimizers.lamb(), 'scalable')
  plain = optimizers.lamb().create(lamb.target)
  assert jax.tree.structure(lamb.state) == jax.tree.structure(plain.state)


def test_shampoo_keeps_blocks_of_experts_apart():
  optimizer, axes = cases.created(cases.definition('distributed_shampoo'), 'scalable')
  derived = optimizer.optimizer_def.derive_logical_axes(optimizer, axes)
  stats = optimizer.state.param_states.of_units.stats['encoder']['encoder']['mlp']['expert']['wi']
  specs = derived.state.param_states.of_units.stats['encoder']['encoder']['mlp']['expert']['wi']
  # A matrix [8, 9] in blocks of 8: one block [8, 8] and one [8, 1].
  stack = stats['kernel'].statistics.stacks[0]
  assert stack.shape == (cases.NUM_EXPERTS, cases.NUM_LAYERS, 1, 8, 8)
  assert specs['kernel'].statistics.stacks[0][:2] == ('expert', 'layers')
  assert stats['kernel'].momentum.quantized.shape == (cases.NUM_EXPERTS, 8, cases.NUM_LAYERS, 9)
  assert specs['kernel'].momentum.quantized == P('expert', 'embed', 'layers', 'expert_mlp')


_ON_MESH = {
  'lamb': optimizers.lamb,
  'novograd': optimizers.novograd,
  'sm3': optimizers.sm3,
  'adafactor': lambda: optimizers.adafactor(min_dim_size_to_factor=8),
  'galore': lambda: optimizers.galore(rank=3),
}


@pytest.mark.parametrize('name', _ON_MESH)
def test_experts_stay_on_their_devices(name):
  """Each device updates its experts alone: the compiled update has no communication."""
  axes = {'kernel': P('expert', 'embed', 'mlp')}
  params = {'kernel': jnp.ones([8, 16, 24])}
  optimizer = _ON_MESH[name]().with_param_axes(axes, params).create(params)
  derived = optimizer.optimizer_def.derive_logical_axes(optimizer, axes)
  mesh = Mesh(np.array(jax.devices()[:8]), ('expert',), axis_types=(AxisType.Auto,))

  def sharding(spec):
    return NamedSharding(mesh, P(*(name if name == 'expert' else None for name in spec)))

  shardings = jax.tree.map(sharding, derived, is_leaf=lambda node: isinstance(node, P))
  update = jax.jit(
    lambda optimizer, grads: optimizer.apply_gradient(grads, learning_rate=0.1),
    in_shardings=(shardings, shardings.target),
    out_shardings=shardings,
  )
  program = update.lower(optimizer, params).compile().as_text()
  assert not re.findall('all-gather|all-to-all|all-reduce|collective-permute', program)


@pytest.mark.parametrize('name', ['fromage', 'lamb', 'lars', 'novograd'])
def test_norms_of_layers_need_no_transposed_copies(name):
  optimizer, _ = cases.created(getattr(optimizers, name)(), 'scalable')
  update = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads, learning_rate=0.1))
  program = update.lower(optimizer, optimizer.target).compile().as_text()
  assert ' transpose(' not in program


def test_a_constructor_of_a_user_may_update_units():
  def normalized(learning_rate, strength=1.0):
    """Steps of one length for each array."""

    def update(updates, state, params=None):
      del params
      return jax.tree.map(
        lambda g: -learning_rate * strength * g / jnp.linalg.norm(g), updates
      ), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

  wrap = functools.partial(optimizers.wrap_optax_optimizer, normalized, takes_learning_rate=True)
  per_unit = wrap(units_fn=optimizers.per_unit)()
  expected = cases.train(per_unit, 'single')
  assert cases.difference(cases.train(per_unit, 'scalable'), expected) < 1e-6
  assert cases.difference(cases.train(wrap()(), 'scalable'), expected) > 1e-2
