"""One table of every optimizer and mode; each row keeps the contract of `optimizers.OptimizerDef`."""

import functools
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import adafactor, optimizers, tree_utils
from t5x_lite.errors import CheckpointError, ConfigError

_SCHEDULE = optax.linear_schedule(0.0, 0.05, 5)


def _adafactor(**options):
  return adafactor.Adafactor(
      **{'min_dim_size_to_factor': 4, 'logical_factor_rules': adafactor.standard_logical_factor_rules(), **options})


def _is_matrix(params):
  return jax.tree.map(lambda p: p.ndim >= 2, params)


# Name to (factory, the learning rate to pass at each update or None where the optimizer has its own).
_ROWS = {
    'adam': (lambda: optimizers.adam(0.05, nesterov=True), None),
    'adamw': (lambda: optimizers.adamw(0.05), None),
    'adamw_trainer_rate': (lambda: optimizers.adamw(weight_decay=1e-3), 0.05),
    'adamw_schedule': (lambda: optimizers.adamw(_SCHEDULE), None),
    'adamw_mask': (lambda: optimizers.adamw(mask=_is_matrix), 0.05),
    'sgd': (lambda: optimizers.sgd(0.1), None),
    'sgd_momentum': (lambda: optimizers.sgd(momentum=0.9), 0.02),
    'sgd_nesterov': (lambda: optimizers.sgd(momentum=0.9, nesterov=True), 0.02),
    'chain': (lambda: optimizers.chain([optax.clip_by_global_norm(1.0), optax.adamw(0.05)]), None),
    'chain_trainer_rate': (
        lambda: optimizers.chain([optax.clip(1.0), optax.zero_nans(), optimizers.adamw(), optax.ema(0.5)]), 0.05),
    'multi_steps': (
        lambda: optimizers.OptaxWrapper(optax.MultiSteps(
            optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite).gradient_transformation()), None),
    'masked': (lambda: optimizers.OptaxWrapper(
        optax.chain(optax.masked(optax.trace(0.9), _is_matrix), optax.scale_by_learning_rate(0.04))), None),
    'inject_hyperparams': (
        lambda: optimizers.OptaxWrapper(optax.inject_hyperparams(optax.adamw)(learning_rate=_SCHEDULE, b1=0.8)), None),
    'apply_if_finite': (lambda: optimizers.OptaxWrapper(optax.apply_if_finite(optax.adam(0.05), 3)), None),
    'partition': (
        lambda: optimizers.OptaxWrapper(optax.partition(
            {True: optax.adam(0.05), False: optax.sgd(0.1, momentum=0.5)}, _is_matrix)), None),
    'adafactor': (_adafactor, 0.05),
    'adafactor_own_rate': (lambda: _adafactor(learning_rate=0.05), None),
    'adafactor_schedule': (lambda: _adafactor(learning_rate=_SCHEDULE), None),
    'adafactor_momentum': (lambda: _adafactor(beta1=0.9, dtype_momentum=jnp.bfloat16), 0.05),
    'adafactor_unfactored': (lambda: _adafactor(factored=False, multiply_by_parameter_scale=False, beta1=0.5), 0.05),
    'adafactor_all_options': (
        lambda: _adafactor(
            weight_decay_rate=1e-3, weight_decay_rate_lr_exponent=1.0, global_norm_clip_threshold=5.0,
            max_parameter_scale=2.0, skip_nan_updates=True, clipping_threshold=0.5), 0.05),
}

_AXES = {
    'encoder': {
        'mlp': {'kernel': P('embed', 'mlp')},
        'attention': {'kernel': P('embed', 'heads', 'kv')},
        'stack': {'kernel': P('embed', 'layers', 'mlp'), 'scale': P('embed', 'layers')},
        'norm': {'scale': P('embed')},
        'temperature': P(),
    },
    'token_embedder': {'embedding': P('vocab', 'embed')},
}
_SIZES = {'embed': 16, 'mlp': 24, 'heads': 8, 'kv': 4, 'layers': 3, 'vocab': 32}
# Two-dim parameter sharding: everything that has a size to shard is sharded.
_MESH_AXIS = {'vocab': 'model', 'mlp': 'model', 'heads': 'model', 'embed': 'data'}


def _random_params(seed: int) -> Any:
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda axes: np.asarray(rng.normal(size=[_SIZES[name] for name in axes]) * 0.3, np.float32), _AXES)


@functools.cache
def _definition(row: str) -> optimizers.OptimizerDef:
  optimizer_def = _ROWS[row][0]()
  optimizer_def.set_param_axes(_AXES)
  return optimizer_def


def _create(row: str, params: Any) -> tuple[optimizers.Optimizer, dict[str, Any]]:
  learning_rate = _ROWS[row][1]
  overrides = {} if learning_rate is None else {'learning_rate': jnp.float32(learning_rate)}
  return _definition(row).create(params), overrides


def _assert_same(left: Any, right: Any) -> None:
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for (name, a), b in zip(tree_utils.named_leaves(left), jax.tree.leaves(right)):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def _signature(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
  return [(name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in tree_utils.named_leaves(tree)]


@pytest.mark.parametrize('row', _ROWS)
def test_minimises_two_functions_within_scan(row):
  x = jnp.asarray(np.random.default_rng(0).normal(size=[32, 6]), jnp.float32)
  target = jnp.asarray(np.random.default_rng(1).normal(size=[6, 5]), jnp.float32)

  def regression(params):
    return jnp.mean((x @ params['w'] + params['b'] - x @ target - 1.0) ** 2)

  def valley(params):
    return jnp.mean((1.0 - params['w']) ** 2) + 2.0 * jnp.mean((params['b'] ** 2 - params['w'][0]) ** 2)

  def both(params):
    losses = jnp.stack([regression(params['regression']), valley(params['valley'])])
    return jnp.sum(losses), losses

  start = {'w': jnp.full([6, 5], 0.5), 'b': jnp.full([5], 0.3)}
  axes = {'w': P('embed', 'mlp'), 'b': P('mlp')}
  factory, learning_rate = _ROWS[row]
  optimizer_def = factory()
  optimizer_def.set_param_axes({'regression': axes, 'valley': axes})
  optimizer = optimizer_def.create({'regression': start, 'valley': start})
  overrides = {} if learning_rate is None else {'learning_rate': learning_rate}

  def step(optimizer, _):
    (_, losses), grads = jax.value_and_grad(both, has_aux=True)(optimizer.target)
    return optimizer.apply_gradient(grads, **overrides), losses

  # lax.scan refuses a carry whose structure, shapes or dtypes change.
  last, losses = jax.jit(lambda optimizer: jax.lax.scan(step, optimizer, length=300))(optimizer)
  assert np.all(np.isfinite(losses))
  assert np.all(losses[-1] < 0.1 * losses[0]), f'{row}: {losses[0]} -> {losses[-1]}'
  assert last.state.step == 300 and last.state.step.dtype == jnp.int32


@pytest.mark.parametrize('row', _ROWS)
def test_one_trace_serves_all_steps(row):
  optimizer, overrides = _create(row, jax.tree.map(jnp.asarray, _random_params(0)))
  updated = jax.eval_shape(lambda o, g, hp: o.apply_gradient(g, **hp), optimizer, _random_params(1), overrides)
  assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
  for (name, new), old in zip(tree_utils.named_leaves(updated), jax.tree.leaves(optimizer)):
    # weak_type is part of what jit compiles for.
    assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, old.weak_type), name


@pytest.mark.parametrize('row', ['adamw_trainer_rate', 'adamw_schedule', 'adafactor', 'adafactor_schedule'])
def test_compiles_once_over_changing_steps_and_rates(row):
  optimizer, overrides = _create(row, jax.tree.map(jnp.asarray, _random_params(0)))
  num_traces = 0

  @jax.jit
  def step(optimizer, grads, overrides):
    nonlocal num_traces
    num_traces += 1
    return optimizer.apply_gradient(grads, **overrides)

  for seed in range(3):
    rate = {name: value * (seed + 1) for name, value in overrides.items()}
    optimizer = step(optimizer, _random_params(seed), rate)
  assert num_traces == 1


@pytest.mark.parametrize('row', _ROWS)
def test_state_dict_has_no_empty_nodes_and_restores(row):
  optimizer, _ = _create(row, _random_params(0))
  trained = jax.tree.map(lambda leaf: ~leaf if leaf.dtype == bool else leaf + 1, optimizer)
  state_dict = trained.state_dict()
  flat = tree_utils.flatten_dict(state_dict, keep_empty=True)
  assert not [name for name, value in flat.items() if value is None or isinstance(value, dict)]
  assert len(flat) == len(jax.tree.leaves(trained))
  assert {name.split('/')[0] for name in flat} == {'target', 'state'}
  _assert_same(optimizer.restore_state(state_dict), trained)

  for name in flat:
    damaged = dict(flat)
    del damaged[name]
    with pytest.raises(CheckpointError, match='is missing') as error:
      optimizer.restore_state(tree_utils.unflatten_dict(damaged))
    assert name in str(error.value)
  with pytest.raises(CheckpointError, match='state/param_states/surplus'):
    optimizer.restore_state(tree_utils.unflatten_dict({**flat, 'state/param_states/surplus': 1}))


@pytest.mark.parametrize('row', _ROWS)
def test_logical_axes_mirror_the_state(row):
  optimizer, _ = _create(row, _random_params(0))
  shapes = jax.eval_shape(lambda: _create(row, _random_params(0))[0])
  for tree in (optimizer, shapes):
    axes = tree.optimizer_def.derive_logical_axes(tree, _AXES)
    assert jax.tree.structure(axes) == jax.tree.structure(tree)
    for (name, leaf), spec in zip(tree_utils.named_leaves(tree), jax.tree.leaves(axes)):
      assert isinstance(spec, P) and len(spec) == leaf.ndim, name
    assert axes.target == _AXES
  # Whatever is as large as a parameter, or as a factor of one, has names to be sharded by.
  for (name, leaf), spec in zip(tree_utils.named_leaves(optimizer.state), jax.tree.leaves(axes.state)):
    if leaf.size >= 16:
      assert any(spec), name


def _shardings(specs: Any, mesh: Mesh, *leading: None) -> Any:
  return jax.tree.map(lambda spec: NamedSharding(mesh, P(*leading, *(_MESH_AXIS.get(name) for name in spec))), specs)


def _train(optimizer, grads, overrides):
  return jax.lax.scan(lambda o, g: (o.apply_gradient(g, **overrides), None), optimizer, grads)[0]


@functools.cache
def _updates_of_one_device(row: str):
  """Returns (optimizer, 20 gradients stacked, overrides, the parameters after those updates)."""
  optimizer, overrides = _create(row, _random_params(0))
  grads = jax.tree.map(lambda *leaves: np.stack(leaves), *[_random_params(seed) for seed in range(1, 21)])
  return optimizer, grads, overrides, jax.jit(_train)(optimizer, grads, overrides).target


def _check_sharded_updates(row: str, mesh_shape: tuple[int, int]) -> None:
  """20 updates by the same gradients, unsharded and sharded, give the same parameters."""
  optimizer, grads, overrides, expected = _updates_of_one_device(row)
  mesh = Mesh(np.reshape(jax.devices()[:8], mesh_shape), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  shardings = _shardings(optimizer.optimizer_def.derive_logical_axes(optimizer, _AXES), mesh)
  with jax.set_mesh(mesh):
    sharded = jax.jit(_train, out_shardings=shardings)(
        jax.device_put(optimizer, shardings), jax.device_put(grads, _shardings(_AXES, mesh, None)), overrides)
  for (name, got), want in zip(tree_utils.named_leaves(sharded.target), jax.tree.leaves(expected)):
    error = np.linalg.norm(np.asarray(got) - np.asarray(want)) / np.linalg.norm(np.asarray(want))
    assert error < 1e-6, f'{name}: {error}'
  kernel = sharded.target['encoder']['mlp']['kernel']
  assert kernel.addressable_shards[0].data.shape == (16 // mesh_shape[0], 24 // mesh_shape[1])


_MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize('row,mesh_shape', [
    *[('adamw', shape) for shape in _MESHES], *[('adafactor', shape) for shape in _MESHES], ('sgd_momentum', (2, 4))])
def test_sharded_updates_equal_those_of_one_device(row, mesh_shape):
  _check_sharded_updates(row, mesh_shape)


_REPRESENTATIVE = ('chain_trainer_rate', 'adafactor_all_options')


@pytest.mark.parametrize(
    'row', [row if row in _REPRESENTATIVE else pytest.param(row, marks=pytest.mark.full) for row in _ROWS])
def test_sharded_updates_of_every_mode_equal_those_of_one_device(row):
  _check_sharded_updates(row, (4, 2))


@pytest.mark.parametrize('row', _ROWS)
def test_bfloat16_parameters_keep_their_dtype_and_statistics_are_float32(row):
  params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), _random_params(0))
  optimizer, overrides = _create(row, params)
  form = _signature(optimizer)
  grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.bfloat16), _random_params(1))
  updated = jax.eval_shape(lambda o, g: o.apply_gradient(g, **overrides), optimizer, grads)
  assert _signature(updated) == form
  assert {leaf.dtype for leaf in jax.tree.leaves(updated.target)} == {jnp.dtype(jnp.bfloat16)}
  # An explicit momentum dtype is the user's word.
  allowed = {jnp.float32} | ({jnp.bfloat16} if row == 'adafactor_momentum' else set())
  floating = {leaf.dtype.type for leaf in jax.tree.leaves(updated.state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
  assert floating <= allowed


@pytest.mark.parametrize('row', _ROWS)
def test_odd_trees(row):
  factory, learning_rate = _ROWS[row]
  overrides = {} if learning_rate is None else {'learning_rate': learning_rate}
  trees = [
      ({}, {}),
      (flax.core.freeze({
          'scalar': jnp.float32(1.0),
          'sizes': {'void': jnp.zeros([0, 4]), 'tall': jnp.zeros([3, 0, 8]), 'one': jnp.ones([1])},
          'a': {'kernel': jnp.ones([4, 6])},
      }), {
          'scalar': P(),
          'sizes': {'void': P('embed', 'mlp'), 'tall': P('layers', 'embed', 'mlp'), 'one': P('embed')},
          'a': {'kernel': P('embed', 'mlp')},
      }),
  ]
  for params, axes in trees:
    optimizer_def = factory()
    optimizer_def.set_param_axes(axes)
    optimizer = optimizer_def.create(params)
    updated = jax.jit(lambda o, g: o.apply_gradient(g, **overrides))(optimizer, jax.tree.map(jnp.ones_like, params))
    assert _signature(updated) == _signature(optimizer)
    assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(updated))
    derived = optimizer_def.derive_logical_axes(optimizer, axes)
    assert jax.tree.structure(derived) == jax.tree.structure(optimizer)
    _assert_same(optimizer.restore_state(updated.state_dict()), updated)


@pytest.mark.parametrize('row', _ROWS)
def test_learning_rate_has_one_owner(row):
  factory, learning_rate = _ROWS[row]
  optimizer_def = factory()
  optimizer_def.set_param_axes({'w': P('embed')})
  optimizer, grads = optimizer_def.create({'w': jnp.full([4], 0.5)}), {'w': jnp.full([4], 0.3)}
  if optimizer_def.needs_learning_rate:
    assert learning_rate is not None
    with pytest.raises(ConfigError, match='learning_rate_fn'):
      optimizer.apply_gradient(grads)
  step = jax.jit(lambda optimizer, rate: optimizer.apply_gradient(grads, learning_rate=rate))
  # Not the first updates: there schedules are at 0 and multi_steps only gathers.
  for _ in range(3):
    optimizer = step(optimizer, 0.05)
  moved = not np.array_equal(step(optimizer, 1e-4).target['w'], step(optimizer, 1e-2).target['w'])
  assert moved == optimizer_def.uses_learning_rate
