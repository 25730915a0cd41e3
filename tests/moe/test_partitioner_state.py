"""Experts and their optimizer states are on the devices of the experts, for every optimizer and mesh.

The optimizer state of an expert's parameter has the parameter's sharding of experts. New rows in the contract table of
optimizers are tested here too.
"""

import functools
import math
import re

from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from moe import rules as rules_lib
from moe import state_axes
from moe.partitioner import MoePjitPartitioner
from t5x_lite import optimizers
from t5x_lite import train_state as train_state_lib
from t5x_lite import tree_utils
from tests.optimizers.contract_rows import ROWS

_AXES = {
  'encoder/layers_0/mlp/wi/kernel': ('embed', 'mlp'),
  'encoder/layers_1/mlp/expert/wi/kernel': ('expert', 'embed', 'expert_mlp'),
  'encoder/layers_1/mlp/expert/wi/bias': ('expert', 'expert_mlp'),
  'encoder/layers_1/mlp/expert/wo/kernel': ('expert', 'expert_mlp', 'embed'),
  'encoder/stack/mlp/expert/wi/kernel': ('expert', 'layers', 'embed', 'expert_mlp'),
  'encoder/layers_1/mlp/router/router_weights/w/kernel': ('embed', None),
  'encoder/norm/scale': ('embed',),
  'decoder/norm/scale': ('embed',),
  'token_embedder/embedding': ('vocab', 'embed'),
}
_EXPERTS = tuple(path for path, names in _AXES.items() if names[0] == 'expert')
# Experts are the smallest dim, as they are in practice: optax's factored optimizers leave the two largest out.
_SIZES = {'embed': 24, 'mlp': 32, 'expert_mlp': 32, 'vocab': 48, 'layers': 2, None: 8}

# Large state that does not belong to one parameter.
_GLOBAL = {
  r'/global_stats/': 'Shampoo: all matrices in one stack over all devices.',
  r'/ns_coeffs$': 'Muon: three numbers for each iteration.',
  r'/groups/': 'ScaledAdam: four numbers for each parameter, and each expert of one, on every device.',
}
# (form, number of experts, model partitions): all that the first form can do, and all of the second.
_MESHES = [
  ('num_experts', experts, partitions)
  for experts in (2, 4, 8, 16)
  for partitions in (1, 2, 4)
  if (experts, partitions) != (2, 2)
]  # two experts do not divide over four devices
_MESHES += [
  ('num_expert_partitions', experts, partitions)
  for experts in (2, 4, 8, 16)
  for partitions in (1, 2, 4)
]


def _variables(num_experts, make):
  sizes = {**_SIZES, 'expert': num_experts}
  params = {path: make([sizes[name] for name in names]) for path, names in _AXES.items()}
  axes = {f'{path}_axes': flax_partitioning.AxisMetadata(names) for path, names in _AXES.items()}
  return {
    'params': tree_utils.unflatten_dict(params),
    'params_axes': tree_utils.unflatten_dict(axes),
  }


@functools.cache
def _shapes(row, num_experts):
  return jax.eval_shape(
    lambda: train_state_lib.FlaxOptimTrainState.create(
      ROWS[row].factory(), _variables(num_experts, jnp.zeros)
    )
  )


@functools.cache
def _partitioner(form, num_experts, num_partitions, parameter_dims):
  if form == 'num_experts':
    rules = rules_lib.standard_logical_axis_rules(
      num_experts, num_partitions, parameter_partitioning_dims=parameter_dims
    )
  else:
    rules = rules_lib.head_logical_axis_rules(1, parameter_dims)
  return MoePjitPartitioner(
    **{form: num_experts}, num_partitions=num_partitions, logical_axis_rules=rules
  )


@functools.cache
def _experts_by_device(mesh, spec, shape):
  """Return device id to the range of experts that it holds of an array whose first dim is experts."""
  dim = next(
    dim for dim, size in enumerate(shape) if dim == list(spec).index(_expert_mesh_axis(mesh))
  )
  indices = NamedSharding(mesh, spec).devices_indices_map(shape)
  return {
    device.id: indices[device][dim].indices(shape[dim])[:2] for device in mesh.devices.ravel()
  }


def _expert_mesh_axis(mesh):
  return 'expert' if 'expert' in mesh.axis_names else 'data'


def _owned_experts(mesh, num_experts):
  """Return device id to the range of experts that belongs to it, counted by hand."""
  axis = mesh.axis_names.index(_expert_mesh_axis(mesh))
  length = num_experts // mesh.devices.shape[axis]
  return {
    mesh.devices[place].id: (place[axis] * length, place[axis] * length + length)
    for place in np.ndindex(mesh.devices.shape)
  }


def _parameter_of(name):
  return next((path for path in _AXES if f'/{path}/' in f'/{name}/'), None)


def _check_placement(row, form, num_experts, num_partitions, parameter_dims=1):
  partitioner = _partitioner(form, num_experts, num_partitions, parameter_dims)
  mesh = partitioner.mesh
  owned = _owned_experts(mesh, num_experts)
  num_shards = mesh.shape[_expert_mesh_axis(mesh)]
  bytes_of_experts = bytes_on_device = 0
  for array in partitioner.explain(_shapes(row, num_experts)).rows:
    where = (row, array.name, array.shape, array.logical_axes, array.mesh_axes)
    path, size = _parameter_of(array.name), math.prod(array.shape)
    excused = any(re.search(pattern, array.name) for pattern in _GLOBAL)
    if path is None:
      assert excused or size <= 8, where
      continue
    if path not in _EXPERTS:
      assert 'expert' not in array.logical_axes, where
      continue
    if 'expert' not in array.logical_axes:
      assert excused or size <= 1, where
      continue
    assert _experts_by_device(mesh, array.mesh_axes, array.shape) == owned, where
    shard = NamedSharding(mesh, array.mesh_axes).shard_shape(array.shape)
    itemsize = array.dtype.itemsize
    assert (
      math.prod(shard) * num_shards <= size
      and array.bytes_per_device == math.prod(shard) * itemsize
    ), where
    if array.name == path and array.section == 'parameters' and 'kernel' in path:
      # Hidden units on the model axis, if that holds parts and no copies; with two dims nothing has copies.
      parts = (
        8
        if parameter_dims == 2
        else num_shards * (1 if partitioner.two_data_axes else num_partitions)
      )
      assert math.prod(shard) * parts == size, where
    bytes_of_experts += size * itemsize
    bytes_on_device += array.bytes_per_device
  assert bytes_of_experts > 0 and bytes_on_device * num_shards <= bytes_of_experts, row


# The states of all optimizers are traced once for each number of experts: that is what costs. So every fourth optimizer
# has other numbers of experts.
@pytest.mark.parametrize(
  'mesh',
  [mesh if mesh[1] == 4 else pytest.param(mesh, marks=pytest.mark.full) for mesh in _MESHES],
  ids=lambda mesh: '-'.join(map(str, mesh)),
)
def test_every_optimizer_on_every_mesh(mesh):
  for row in ROWS if mesh[1] == 4 else list(ROWS)[::4]:
    _check_placement(row, *mesh)


@pytest.mark.parametrize(
  'mesh',
  [
    mesh
    if mesh in (('num_experts', 4, 1), ('num_expert_partitions', 4, 2))
    else pytest.param(mesh, marks=pytest.mark.full)
    for mesh in _MESHES
  ],
  ids=lambda mesh: '-'.join(map(str, mesh)),
)
def test_every_optimizer_with_two_dims_of_parameters(mesh):
  for row in ROWS:
    _check_placement(row, *mesh, parameter_dims=2)


def test_no_exception_is_idle():
  names = {
    array.name
    for row in ROWS
    for array in _partitioner('num_expert_partitions', 4, 1, 1).explain(_shapes(row, 4)).rows
    if math.prod(array.shape) > 1 and 'expert' not in array.logical_axes
  }
  for pattern in _GLOBAL:
    assert any(re.search(pattern, name) for name in names), pattern


@pytest.mark.parametrize(
  'form,num_experts', [('num_experts', 2), ('num_experts', 16), ('num_expert_partitions', 4)]
)
def test_the_mixed_parts_of_a_multi_optimizer(form, num_experts):
  """Adafactor for experts, Adam for matrices, the rest frozen."""
  matrices = optimizers.ModelParamTraversal(lambda path, p: p.ndim == 2 and 'expert' not in path)
  optimizer_def = optimizers.MultiOptimizer(
    [
      (
        'expert',
        optimizers.Adafactor(logical_factor_rules=rules_lib.logical_factor_rules(), beta1=0.9),
      ),
      (matrices, optimizers.adam()),
    ]
  )
  state = jax.eval_shape(
    lambda: train_state_lib.FlaxOptimTrainState.create(
      optimizer_def, _variables(num_experts, jnp.zeros)
    )
  )
  rows = {row.name: row for row in _partitioner(form, num_experts, 1, 1).explain(state).rows}
  kernel = 'param_states/parts/0/encoder/layers_1/mlp/expert/wi/kernel'
  assert rows[f'{kernel}/v_row'].logical_axes == P('expert', 'embed')
  assert rows[f'{kernel}/v_col'].logical_axes == P('expert', 'expert_mlp')
  assert rows[f'{kernel}/m'].mesh_axes == rows['encoder/layers_1/mlp/expert/wi/kernel'].mesh_axes
  assert rows['param_states/parts/1/0/mu/token_embedder/embedding'].logical_axes == P(
    'vocab', 'embed'
  )


# ---- Prepending ------------------------------------------------------------------------------------------------------


class SilentAdafactor(optimizers.Adafactor):
  """Says nothing about any statistic, as a user's optimizer may."""

  def derive_logical_axes(self, optimizer, param_logical_axes):
    axes = super().derive_logical_axes(optimizer, param_logical_axes)
    param_states = jax.tree.map(lambda spec: P(*(None,) * len(spec)), axes.state.param_states)
    return axes.replace(state=axes.state.replace(param_states=param_states))


def _logical_axes(optimizer_def, state_filter_fn=None, num_experts=4):
  state = jax.eval_shape(
    lambda: train_state_lib.FlaxOptimTrainState.create(
      optimizer_def, _variables(num_experts, jnp.zeros)
    )
  )
  partitioner = MoePjitPartitioner(
    num_expert_partitions=num_experts, num_partitions=2, state_filter_fn=state_filter_fn
  )
  axes = partitioner.get_logical_axes(state)
  partitioner.get_mesh_axes(state)  # they can be laid out
  return {name: tuple(spec) for name, spec in tree_utils.named_leaves(axes.param_states)}


def test_state_without_logical_axes_gets_those_of_experts():
  rules = rules_lib.logical_factor_rules()
  axes = _logical_axes(SilentAdafactor(logical_factor_rules=rules, beta1=0.9))
  kernel = 'encoder/layers_1/mlp/expert/wi/kernel'
  assert axes[f'{kernel}/v_row'] == ('expert', None) and axes[f'{kernel}/m'] == (
    'expert',
    None,
    None,
  )
  assert axes[f'{kernel}/v'] == (None,)  # a slot that is not in use
  assert axes['encoder/stack/mlp/expert/wi/kernel/v_col'] == ('expert', None, None)
  assert not any('expert' in spec for name, spec in axes.items() if '/expert/' not in name)
  # The optimizer's own names stay, and are not doubled.
  named = _logical_axes(optimizers.Adafactor(logical_factor_rules=rules, beta1=0.9))
  assert named[f'{kernel}/v_row'] == ('expert', 'embed') and named[f'{kernel}/m'] == (
    'expert',
    'embed',
    'expert_mlp',
  )


def test_a_filter_of_one_s_own_selects():
  rules = rules_lib.logical_factor_rules()
  kernel = 'encoder/layers_1/mlp/expert/wi/kernel'

  def silent(pattern):
    return _logical_axes(
      SilentAdafactor(logical_factor_rules=rules, beta1=0.9), state_axes.match_fn(pattern)
    )

  axes = silent('.*expert.*/kernel/v_.*')
  assert axes[f'{kernel}/v_row'] == ('expert', None) and axes[f'{kernel}/m'] == (None,) * 3
  assert not any('expert' in spec for spec in silent('').values())
  # Selected state without a dim of experts, or whose dim already has this name, is unchanged.
  for optimizer_def in (
    optimizers.Adafactor(logical_factor_rules=rules),
    optimizers.novograd(),
    optimizers.sm3(),
    optimizers.scaled_adam(),
    optimizers.distributed_shampoo(block_size=8),
  ):
    assert _logical_axes(optimizer_def, lambda name: True) == _logical_axes(
      optimizer_def, lambda name: False
    )


def test_experts_that_a_factor_rule_averages_over_are_not_prepended():
  """If `expert` is a column, `v_row` has no dim of experts; T5X then shards the width instead."""
  rules = rules_lib.logical_factor_rules().copy({'expert': optimizers.FactorDim.COLUMN})
  kernel = 'encoder/layers_1/mlp/expert/wi/kernel'
  for optimizer_cls, expected in ((optimizers.Adafactor, ('embed',)), (SilentAdafactor, (None,))):
    # The filter that T5X has selects it all the same.
    for state_filter_fn in (None, state_axes.match_fn('.*expert.*/kernel/v_.*')):
      axes = _logical_axes(optimizer_cls(logical_factor_rules=rules), state_filter_fn)
      assert axes[f'{kernel}/v_row'] == expected and axes[f'{kernel}/v_col'][0] == 'expert'


@pytest.mark.parametrize('options', [{'num_experts': 4}, {'num_expert_partitions': 4}])
def test_inference_states_are_as_they_are(options):
  partitioner = MoePjitPartitioner(**options, num_partitions=1, state_filter_fn=lambda name: True)
  state = jax.eval_shape(lambda: train_state_lib.InferenceState.create(_variables(4, jnp.zeros)))
  assert partitioner.get_logical_axes(state) == state.as_logical_axes()
  experts = partitioner.get_mesh_axes(state).params['encoder']['layers_1']['mlp']['expert']['wi'][
    'bias'
  ]
  assert experts[0] == _expert_mesh_axis(partitioner.mesh)


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def _check_updates(row, form, num_experts, num_partitions, parameter_dims):
  """Three sharded updates by recorded gradients equal those of one device, and leave everything where it was."""
  optimizer_def = ROWS[row].factory()
  rng = np.random.default_rng(0)

  def draw(shape):
    return (rng.normal(size=shape) * 0.3).astype(np.float32)

  state = train_state_lib.FlaxOptimTrainState.create(optimizer_def, _variables(num_experts, draw))
  grads = [_variables(num_experts, draw)['params'] for _ in range(3)]

  def update(state, *grads):
    for grad in grads:
      state = state.apply_gradient(grad, learning_rate=ROWS[row].learning_rate)
    return state

  partitioner = _partitioner(form, num_experts, num_partitions, parameter_dims)
  axes = partitioner.get_mesh_axes(state)
  # On both sides in one program: each update alone would only compile longer.
  sharded = partitioner.partition(update, (axes, *(axes.params,) * 3), axes)(state, *grads)
  expected = jax.jit(update)(state, *grads)
  for (name, got), want in zip(
    tree_utils.named_leaves(sharded.params), jax.tree.leaves(expected.params), strict=True
  ):
    error = np.linalg.norm(np.asarray(got) - np.asarray(want)) / np.linalg.norm(np.asarray(want))
    assert error < 1e-5, (name, error)
  owned = _owned_experts(partitioner.mesh, num_experts)
  for name, array in tree_utils.named_leaves(sharded.params):
    if _parameter_of(name) in _EXPERTS:
      held = {
        shard.device.id: shard.index[0].indices(num_experts)[:2]
        for shard in array.addressable_shards
      }
      assert held == owned, name
  assert axes == jax.tree.map(
    lambda array, spec: P(*array.sharding.spec, *(None,) * (len(spec) - len(array.sharding.spec))),
    sharded,
    axes,
  )


_NUMERIC = [('scaled_adam_clipping', 'num_expert_partitions', 4, 2, 1)]
_NUMERIC_FULL = [('adafactor', 'num_experts', 4, 1, 2)]
_NUMERIC_FULL += [
  (row, *mesh, dims)
  for row in (
    'adafactor_momentum',
    'adamw',
    'multi_nested',
    'scaled_adam',
    'shampoo_sgd',
    'shampoo_sharded',
    'lamb',
    'muon',
  )
  for mesh, dims in (
    (('num_experts', 2, 1), 2),
    (('num_experts', 8, 2), 1),
    (('num_expert_partitions', 4, 1), 2),
  )
]


@pytest.mark.full  # by default, tests/optimizers/test_contract.py updates on meshes
@pytest.mark.parametrize(
  'case',
  _NUMERIC + [pytest.param(case, marks=pytest.mark.full) for case in _NUMERIC_FULL],
  ids=lambda case: '-'.join(map(str, case)),
)
def test_sharded_updates_equal_those_of_one_device(case):
  _check_updates(*case)


def test_scaled_adam_counts_every_expert_as_a_parameter():
  """The gradient of one expert does not affect another, and each has a separate size."""
  optimizer_def = optimizers.scaled_adam(0.05, size_update_period=2)
  rng = np.random.default_rng(0)

  def draw(shape):
    return rng.normal(size=shape).astype(np.float32)

  state = train_state_lib.FlaxOptimTrainState.create(optimizer_def, _variables(4, draw))
  num_units = sum(
    math.prod(4 if name == 'expert' else 2 for name in names if name in ('expert', 'layers'))
    for names in _AXES.values()
  )
  assert state.param_states.groups['default'].param_rms.shape == (num_units,)
  grads = _variables(4, draw)['params']
  other = jax.tree.map(np.copy, grads)
  other['encoder']['layers_1']['mlp']['expert']['wi']['kernel'][3] *= -7
  step = jax.jit(lambda state, grads: state.apply_gradient(grads).apply_gradient(grads))
  kernels = [
    step(state, g).params['encoder']['layers_1']['mlp']['expert']['wi']['kernel']
    for g in (grads, other)
  ]
  np.testing.assert_array_equal(kernels[0][:3], kernels[1][:3])
  assert not np.array_equal(kernels[0][3], kernels[1][3])
