"""Distributed Shampoo's sharded mode: its three functions, its layout by the partitioner, equal numbers on a mesh."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.optimizers.optax_adapter import wrapper
from t5x_lite.optimizers.shampoo import InitFnState
from tests.optimizers.shampoo import compiled_memory

_PARAMS = {
  'a': {'kernel': (16, 8)},
  'b': {'kernel': (4, 8), 'scale': (8,)},
  'c': (),
  'd': (4, 3, 8),
}
_AXES = {
  'a': {'kernel': P('embed', 'mlp')},
  'b': {'kernel': P(None, 'embed'), 'scale': P('mlp')},
  'c': P(),
  'd': P(None, None, 'mlp'),
}
# Tests compile more than they compute.
_FAST_COMPILE = {'xla_backend_optimization_level': 0}


def _draw(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda shape: np.asarray(rng.normal(size=shape) * 0.3, np.float32),
    _PARAMS,
    is_leaf=lambda node: isinstance(node, tuple),
  )


def _mesh(data, model):
  return Mesh(
    np.reshape(jax.devices()[: data * model], (data, model)),
    ('data', 'model'),
    axis_types=(AxisType.Auto,) * 2,
  )


@pytest.mark.parametrize(
  'options',
  [
    {'graft_type': name, 'best_effort_memory_usage_reduction': quantized}
    for name in optimizers.GraftingType.__members__
    for quantized in (False, True)
  ],
)
def test_the_three_functions_agree(options):
  params = _draw(0)
  tx = optimizers.distributed_shampoo(
    0.1, 4, shard_optimizer_states=True, **options
  ).optax_optimizer
  functions = tx.init(None)
  assert isinstance(functions, InitFnState)
  state = tx.init(params)
  assert jax.tree.structure(functions.init_fn(params)) == jax.tree.structure(state)
  shapes = functions.shape_and_dtype_fn(params)
  assert jax.tree.structure(shapes) == jax.tree.structure(state)
  for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
    assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
  axes = _AXES | {'c': None, 'd': P(None, None, 'mlp'), 'b': {'kernel': P(), 'scale': P('mlp')}}
  specs = functions.pspec_fn(params, axes, P('x', None, None))
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  assert all(
    len(spec) <= leaf.ndim
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True)
  )
  assert (
    specs.stats.global_stats.statistics
    == specs.stats.global_stats.preconditioners
    == P('x', None, None)
  )
  momentum = specs.stats.local_stats['a']['kernel'].momentum
  assert momentum.quantized == P('embed', 'mlp')
  assert momentum.bucket_size == (
    P('mlp') if options['best_effort_memory_usage_reduction'] else None
  )


def test_the_stack_is_padded_to_the_devices_and_starts_as_the_original_does():
  params = _draw(0)
  state = optimizers.distributed_shampoo(
    0.1, 4, shard_optimizer_states=True, num_devices_for_pjit=5, matrix_epsilon=0.5
  ).optax_optimizer.init(params)
  stats = state.stats.global_stats
  # 8 blocks of a, 2 of b/kernel, 2 of b/scale, 2 of d (4, 3, 8): 16 + 4 + 2 + 6 matrices.
  assert stats.statistics.shape == stats.preconditioners.shape == (30, 4, 4)
  np.testing.assert_array_equal(
    stats.statistics, [(0.5 if i < 28 else 1.0) * np.eye(4) for i in range(30)]
  )
  np.testing.assert_array_equal(stats.preconditioners, [np.eye(4)] * 30)
  np.testing.assert_array_equal(stats.exponents, [4] * 20 + [2] * 2 + [6] * 6 + [1] * 2)
  local = tree_utils.named_leaves(
    state.stats.local_stats, is_leaf=lambda node: hasattr(node, 'sizes')
  )
  assert {name: len(node.sizes) for name, node in local} == {
    'a/kernel': 16,
    'b/kernel': 4,
    'b/scale': 2,
    'c': 0,
    'd': 6,
  }
  by_default = optimizers.distributed_shampoo(
    0.1, 4, shard_optimizer_states=True
  ).optax_optimizer.init(params)
  assert by_default.stats.global_stats.statistics.shape[0] == 32


class _State:
  """As much of a train state as a partitioner looks at."""

  def __init__(self, optimizer):
    self.optimizer = optimizer

  def as_logical_axes(self):
    return _State(self.optimizer.optimizer_def.derive_logical_axes(self.optimizer, _AXES))


jax.tree_util.register_pytree_with_keys(
  _State,
  lambda state: (((jax.tree_util.GetAttrKey('optimizer'), state.optimizer),), None),
  lambda _, children: _State(*children),
)


def _mesh_axes(optimizer, mesh, dims=(1, 2), **kwargs):
  rules = partitioning.standard_logical_axis_rules(*dims, **kwargs)
  return (
    partitioning.PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    .get_mesh_axes(_State(optimizer))
    .optimizer
  )


@pytest.mark.parametrize(
  'shape,options,want',
  [
    ((4, 2), {}, ('data', 'model')),
    ((8, 1), {}, ('data', 'model')),
    # 28 rows divide by 4 and 2, not by 8; 29 by neither.
    ((4, 2), {'num_devices_for_pjit': 1}, ('data',)),
    ((2, 4), {'num_devices_for_pjit': 1}, ('model',)),
    ((4, 2), {'num_devices_for_pjit': 29}, None),
  ],
)
def test_partitioners_shard_the_stack_over_all_devices_it_divides_over(shape, options, want):
  definition = optimizers.distributed_shampoo(block_size=4, shard_optimizer_states=True, **options)
  optimizer = jax.eval_shape(lambda: definition.create(_draw(0)))
  axes = _mesh_axes(optimizer, _mesh(*shape))
  assert jax.tree.structure(axes) == jax.tree.structure(optimizer)
  stats = axes.state.param_states.stats
  assert stats.global_stats.statistics == stats.global_stats.preconditioners == P(want, None, None)
  assert stats.local_stats['a']['kernel'].momentum.quantized == P('data', 'model')


@pytest.mark.parametrize(
  'shape,options,is_told',
  [
    ((24, 4), {}, True),
    ((32, 4), {}, False),
    ((24, 4), {'shard_optimizer_states': True}, False),
    ((24, 4), {'statistics_partition_spec': [None]}, False),
  ],
)
def test_copies_of_the_plain_mode_are_logged_once(shape, options, is_told, caplog):
  wrapper.log_once.cache_clear()
  definition = optimizers.distributed_shampoo(block_size=4, **options)
  params = {'w': jnp.ones(shape), 'b': jnp.ones([3])}
  optimizer = jax.eval_shape(lambda: definition.create(params))
  with caplog.at_level('INFO'):
    for _ in range(2):
      definition.derive_logical_axes(optimizer, {'w': P('embed', 'mlp'), 'b': P('mlp')})
  lines = [record.getMessage() for record in caplog.records if 'Shampoo' in record.getMessage()]
  # Six blocks over eight devices.
  assert len(lines) == is_told and all('99%' in line or '100%' in line for line in lines), lines
  assert all('8 devices' in line and 'shard_optimizer_states=True' in line for line in lines)


def test_copies_of_all_layers_and_experts_are_counted(caplog):
  wrapper.log_once.cache_clear()
  axes = {'experts': P('expert', 'embed', 'layers', 'mlp'), 'single': P('embed', 'mlp')}
  # Two matrices [8, 8] for each block, in stacks of three for each of 32 units, and in stacks of eight.
  params = {'experts': jnp.ones([8, 24, 4, 8]), 'single': jnp.ones([64, 8])}
  definition = optimizers.distributed_shampoo(block_size=8).with_param_axes(axes, params)
  optimizer = jax.eval_shape(lambda: definition.create(params))
  with caplog.at_level('INFO'):
    definition.derive_logical_axes(optimizer, axes)
  (line,) = [record.getMessage() for record in caplog.records if 'Shampoo' in record.getMessage()]
  copied = 32 * 6
  total = copied + 16
  num_bytes = 2 * total * 8 * 8 * 4  # statistics and preconditioners
  assert f'{copied / total:.0%} of the matrices ({num_bytes / 2**30:.3g} GiB)' in line


def test_a_rule_of_the_user_and_a_spec_of_the_user_come_first():
  optimizer = jax.eval_shape(
    lambda: optimizers.distributed_shampoo(block_size=4, shard_optimizer_states=True).create(
      _draw(0)
    )
  )
  axes = _mesh_axes(optimizer, _mesh(4, 2), additional_rules=[('optimizer_stack', 'model')])
  assert axes.state.param_states.stats.global_stats.statistics == P('model', None, None)
  optimizer = jax.eval_shape(
    lambda: optimizers.distributed_shampoo(
      block_size=4,
      shard_optimizer_states=True,
      statistics_partition_spec=['mine'],
      preconditioner_partition_spec=[None],
    ).create(_draw(0))
  )
  axes = _mesh_axes(optimizer, _mesh(4, 2), additional_rules=[('mine', 'data')])
  stats = axes.state.param_states.stats.global_stats
  assert (stats.statistics, stats.preconditioners) == (P('data', None, None), P(None, None, None))


def _train(optimizer, grads):
  return jax.lax.scan(lambda o, g: (o.apply_gradient(g), None), optimizer, grads)[0]


@functools.cache
def _grads(num_steps):
  return jax.tree.map(
    lambda *leaves: np.stack(leaves), *[_draw(seed) for seed in range(1, num_steps + 1)]
  )


@pytest.mark.full  # by default, placements here, and roots on devices in test_root_plan.py
@pytest.mark.parametrize(
  'options',
  [
    {'shard_optimizer_states': True},
    pytest.param({'best_effort_memory_usage_reduction': True}, marks=pytest.mark.full),
    pytest.param(
      {
        'shard_optimizer_states': True,
        'preconditioning_compute_steps': 3,
        'statistics_compute_steps': 2,
        'graft_type': 'SQRT_N',
        'root_method': 'eigh',
      },
      marks=pytest.mark.full,
    ),
    pytest.param(
      {
        'shard_optimizer_states': True,
        'preconditioning_compute_steps': 3,
        'spread_roots': True,
        'best_effort_memory_usage_reduction': True,
      },
      marks=pytest.mark.full,
    ),
    pytest.param({}, marks=pytest.mark.full),
  ],
)
def test_a_mesh_changes_no_number(options):
  definition = optimizers.distributed_shampoo(
    0.1,
    4,
    start_preconditioning_step=1,
    matrix_epsilon=1e-2,
    **{'graft_type': 'RMSPROP', **options},
  )
  optimizer = definition.create(_draw(0))
  grads = _grads(5)
  expected = jax.jit(_train, compiler_options=_FAST_COMPILE)(optimizer, grads)
  mesh = _mesh(4, 2)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), _mesh_axes(optimizer, mesh))
  with jax.set_mesh(mesh):
    got = jax.jit(_train, out_shardings=shardings, compiler_options=_FAST_COMPILE)(
      jax.device_put(optimizer, shardings), grads
    )
  # int8 momentum: the sum over shards may round to the next integer.
  tolerance = 1e-2 if options.get('best_effort_memory_usage_reduction') else 1e-6
  for (name, value), want in zip(
    tree_utils.named_leaves(got.target), jax.tree.leaves(expected.target), strict=True
  ):
    assert np.linalg.norm(value - want) <= tolerance * np.linalg.norm(want), name
  if options.get('shard_optimizer_states'):
    statistics = got.state.param_states.stats.global_stats.statistics
    assert {shard.data.shape for shard in statistics.addressable_shards} == {(4, 4, 4)}


@pytest.mark.full  # by default, stacked layers on one device in test_update.py
@pytest.mark.parametrize(
  'options',
  [{'shard_optimizer_states': True}, {'spread_roots': True, 'preconditioning_compute_steps': 3}],
)
def test_a_mesh_changes_no_number_of_stacked_layers(options):
  stacks = LayerStacks((('encoder', (2, 10)),))

  def draw(seed):
    return {'encoder': {f'layers_{i}': _draw(10 * seed + i)['a'] for i in (2, 3, 10)}}

  single = optimizers.distributed_shampoo(
    0.1, 4, start_preconditioning_step=1, matrix_epsilon=1e-2, **options
  ).create(draw(0))
  specs = jax.tree.map(
    lambda x: P(*{2: ('data', 'model'), 3: (('data', 'model'), None, None)}.get(x.ndim, ())), single
  )
  mesh = _mesh(4, 2)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), stacks.stack(specs))
  update = jax.jit(
    lambda optimizer, grads: optimizer.apply_gradient(grads), compiler_options=_FAST_COMPILE
  )
  with jax.set_mesh(mesh):
    stacked = jax.device_put(stacks.stack(single), shardings)
    on_mesh = jax.jit(
      lambda optimizer, grads: optimizer.apply_gradient(grads),
      out_shardings=shardings,
      compiler_options=_FAST_COMPILE,
    )
  for seed in range(1, 5):
    single = update(single, draw(seed))
    with jax.set_mesh(mesh):
      stacked = on_mesh(stacked, stacks.stack(draw(seed)))
  for (name, value), want in zip(
    tree_utils.named_leaves(stacks.unstack(jax.device_get(stacked))),
    jax.tree.leaves(single),
    strict=True,
  ):
    np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_updates_use_the_roots_of_the_step_before():
  grads = {'w': jnp.asarray(np.random.default_rng(0).normal(size=[4, 4]), jnp.float32)}
  updates = {}
  for sharded in (False, True):
    tx = optimizers.distributed_shampoo(
      0.1, 4, start_preconditioning_step=0, shard_optimizer_states=sharded, root_method='eigh'
    ).optax_optimizer
    updates[sharded] = jax.jit(
      lambda g, tx=tx: tx.update(g, tx.init(g), g)[0]['w'], compiler_options=_FAST_COMPILE
    )(grads)
  # The first roots are identities: the update is that of Nesterov's method.
  np.testing.assert_allclose(updates[True], -0.1 * 1.9 * grads['w'], rtol=1e-5)
  assert not np.allclose(updates[False], updates[True], rtol=0.1)


@pytest.mark.parametrize(
  'options',
  [
    {'spread_roots': True, 'preconditioning_compute_steps': 3},
    # 31 rows do not divide by 8.
    pytest.param(
      {'num_devices_for_pjit': 31, 'statistics_compute_steps': 2}, marks=pytest.mark.full
    ),
  ],
)
def test_devices_change_no_matrix(options):
  """Blocks of three dims have matrices on two devices."""
  tx = optimizers.distributed_shampoo(
    0.1,
    4,
    start_preconditioning_step=1,
    matrix_epsilon=1e-2,
    graft_type='SQRT_N',
    shard_optimizer_states=True,
    **{'num_devices_for_pjit': 8, **options},
  ).optax_optimizer

  def step(grads, state):
    return tx.update(grads, state)

  state = tx.init(_draw(0))
  expected = state
  with jax.set_mesh(_mesh(4, 2)):
    on_mesh = jax.jit(step, compiler_options=_FAST_COMPILE)
  for seed in range(1, 6):
    expected_updates, expected = jax.jit(step, compiler_options=_FAST_COMPILE)(
      _draw(seed), expected
    )
    with jax.set_mesh(_mesh(4, 2)):
      updates, state = on_mesh(_draw(seed), state)
    for (name, value), want in zip(
      tree_utils.named_leaves((updates, state)),
      jax.tree.leaves((expected_updates, expected)),
      strict=True,
    ):
      np.testing.assert_allclose(
        value, want, rtol=1e-4, atol=1e-5, err_msg=f'{name} after step {seed}'
      )


@pytest.mark.parametrize(
  'spec,num_layers',
  [
    (P(('data', 'model')), None),
    (P(), None),
    pytest.param(P(None, 'model'), 4, marks=pytest.mark.full),
  ],
)
def test_devices_share_the_matrices(spec, num_layers):
  shape = (128, 256)
  figures = compiled_memory.measure(
    8,
    spec,
    shape,
    num_kernels=12,
    num_layers=num_layers,
    block_size=32,
    root_method='coupled_newton',
  )
  assert figures['collective'] == 4 * shape[0] * shape[1]
  assert figures['temporaries'] < 2 * figures['state'] + 2 * figures['matrices'], figures


def test_64_devices_need_the_memory_of_the_state_and_one_parameter():
  folder = pathlib.Path(__file__).parents[3]
  environment = {
    **os.environ,
    'XLA_FLAGS': '--xla_force_host_platform_device_count=64',
    'PYTHONPATH': str(folder),
  }
  result = subprocess.run(
    [sys.executable, '-m', 'tests.optimizers.shampoo.compiled_memory', '64', 'sharded'],
    check=True,
    capture_output=True,
    text=True,
    cwd=folder,
    env=environment,
  )
  figures = json.loads(result.stdout)
  assert figures['collective'] == 4 * 1024 * 2048
  assert figures['temporaries'] <= figures['state'] + 2 * figures['matrices'], figures
