"""One table of every optimizer and mode; each row keeps the contract of `optimizers.OptimizerDef`.

The rows are in `optimizer_rows`. What shapes can tell is checked for every row; what takes a compilation for a few, and
for all of them by `make test-full`.
"""

import functools
import math
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from tests.optimizers import option_values
from tests.optimizers.contract_rows import CHECKS
from tests.optimizers.contract_rows import ROWS

_AXES = {
  'encoder': {
    'mlp': {'kernel': P('embed', 'mlp')},
    'attention': {'kernel': P('embed', 'heads', 'kv')},
    'stack': {'kernel': P('embed', 'layers', 'mlp'), 'scale': P('embed', 'layers')},
    'moe': {'kernel': P('expert', 'embed', 'expert_mlp')},
    'norm': {'scale': P('embed')},
    'temperature': P(),
  },
  'token_embedder': {'embedding': P('vocab', 'embed')},
}
_SIZES = {
  'embed': 16,
  'mlp': 24,
  'heads': 8,
  'kv': 4,
  'layers': 3,
  'vocab': 32,
  'expert': 4,
  'expert_mlp': 8,
}
_MESH_AXES = ('data', 'expert', 'model')
# Two-dim parameter sharding: everything that has a size to shard is sharded.
_MESH_AXIS = {
  'vocab': 'model',
  'mlp': 'model',
  'heads': 'model',
  'expert_mlp': 'model',
  'embed': 'data',
  'expert': 'expert',
}


# Shampoo takes a second to trace: by default one row for each part of its state, and both kinds of grafts.
_LONG = {row for row in ROWS if row.startswith('shampoo')} - {
  'shampoo_rmsprop_normalized',
  'shampoo_sharded_shared_momentum',
  'shampoo_quantized_intervals',
  'shampoo_sharded_intervals',
  'shampoo_spread',
  'shampoo_all_skipped',
  'shampoo_sharded_all_skipped',
}


# Every third row, for checks of shapes that take long.
_SOME = tuple(row for i, row in enumerate(ROWS) if i % 3 == 0 and row not in _LONG)


def _rows(check: str, by_default: tuple[str, ...] | None = None) -> list[Any]:
  """Return the rows as parameters of a test: those that take long marked `full`, exceptions expected to fail.

  Args:
    check: the name under which a row may be excepted.
    by_default: the rows that are checked in every run of the tests; None for all but `_LONG`.
  """
  assert check in CHECKS and set(by_default or ()) <= set(ROWS)
  params = []
  for name, row in ROWS.items():
    marks = (
      []
      if (name not in _LONG if by_default is None else name in by_default)
      else [pytest.mark.full]
    )
    if check in row.exceptions:
      marks.append(pytest.mark.xfail(reason=row.exceptions[check], strict=True))
    params.append(pytest.param(name, marks=marks))
  return params


def _is_axes(node: Any) -> bool:
  return isinstance(node, P)


def _random_params(seed: int, per_example: bool = False, step: int | None = None) -> Any:
  rng = np.random.default_rng(seed)
  lead = [2] if per_example else []
  lead = lead if step is None else [step, *lead]

  def draw(axes):
    return np.asarray(rng.normal(size=[*lead, *(_SIZES[name] for name in axes)]) * 0.3, np.float32)

  return jax.tree.map(draw, _AXES, is_leaf=_is_axes)


def _grads(row: str, seed: int = 1) -> Any:
  return _random_params(seed, ROWS[row].per_example)


@functools.cache
def _definition(row: str) -> optimizers.OptimizerDef:
  return ROWS[row].factory().with_param_axes(_AXES)


def _update(
  row: str,
  optimizer: optimizers.Optimizer,
  grads: Any,
  loss_fn: Any = None,
  overrides: dict[str, Any] | None = None,
) -> optimizers.Optimizer:
  """Make one update with the values of the step that the row needs, of `loss_fn` or by default of another loss."""

  def squares(params):
    return [jnp.sum(jnp.square(p.astype(jnp.float32))) for p in jax.tree.leaves(params)]

  loss_fn = loss_fn or (lambda params: sum(squares(params), start=jnp.float32(0)))
  known = {
    'value': lambda: loss_fn(optimizer.target),
    'grad': lambda: grads,
    'value_fn': lambda: loss_fn,
    'obj_fn': lambda: loss_fn,
    'grad_fn': lambda: lambda params, number: jax.grad(loss_fn)(params),
  }
  extra_args = {name: known[name]() for name in ROWS[row].needs}
  return optimizer.apply_gradient(
    grads, **(ROWS[row].overrides if overrides is None else overrides), **extra_args
  )


@functools.cache
def _shapes(row: str) -> tuple[optimizers.Optimizer, optimizers.Optimizer]:
  """Return the shapes of an optimizer before and after an update; half of the parameters are bfloat16."""

  def narrow(tree):
    return {
      **jax.tree.map(jnp.asarray, tree),
      'encoder': jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), tree['encoder']),
    }

  optimizer = jax.eval_shape(
    lambda params: _definition(row).create(narrow(params)), _random_params(0)
  )
  updated = jax.eval_shape(
    lambda optimizer, grads: _update(row, optimizer, narrow(grads)), optimizer, _grads(row)
  )
  return optimizer, updated


def _numbered(shapes: Any) -> Any:
  """Return NumPy arrays of the given shapes, each filled with another number."""
  leaves, structure = jax.tree.flatten(shapes)
  return jax.tree.unflatten(
    structure,
    [
      np.full(
        leaf.shape,
        number % {1: 2 if leaf.dtype == bool else 128}.get(leaf.dtype.itemsize, 2**15),
        leaf.dtype,
      )
      for number, leaf in enumerate(leaves)
    ],
  )


def _assert_same(left: Any, right: Any) -> None:
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for (name, a), b in zip(tree_utils.named_leaves(left), jax.tree.leaves(right), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def _signature(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
  return [
    (name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in tree_utils.named_leaves(tree)
  ]


# ---- what shapes can tell --------------------------------------------------------------------------------------------


@pytest.mark.parametrize('row', _rows('one_trace', _SOME))
def test_one_trace_serves_all_steps(row):
  optimizer, updated = _shapes(row)
  assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
  for (name, new), old in zip(
    tree_utils.named_leaves(updated), jax.tree.leaves(optimizer), strict=True
  ):
    # weak_type is part of what jit compiles for.
    assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, old.weak_type), name
  assert updated.state.step.shape == () and updated.state.step.dtype == jnp.int32


@pytest.mark.parametrize('row', _rows('bfloat16'))
def test_parameters_keep_their_dtype_and_statistics_are_float32(row):
  for optimizer in _shapes(row):
    assert {leaf.dtype for leaf in jax.tree.leaves(optimizer.target['encoder'])} == {
      jnp.dtype(jnp.bfloat16)
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(optimizer.target['token_embedder'])} == {
      jnp.dtype(jnp.float32)
    }
    for name, leaf in tree_utils.named_leaves(optimizer.state):
      assert leaf.dtype == jnp.float32 or not jnp.issubdtype(leaf.dtype, jnp.floating), name


@pytest.mark.parametrize('row', _rows('state_dict'))
def test_state_dict_has_no_empty_nodes_and_restores(row):
  optimizer, _ = _shapes(row)
  trained = _numbered(optimizer)
  state_dict = trained.state_dict()
  flat = tree_utils.flatten_dict(state_dict, keep_empty=True)
  assert not [name for name, value in flat.items() if value is None or isinstance(value, dict)]
  assert len(flat) == len(jax.tree.leaves(trained))
  assert {name.split('/')[0] for name in flat} == {'target', 'state'}
  _assert_same(optimizer.restore_state(state_dict), trained)

  for name in (*list(flat)[:1], *list(flat)[-1:]):
    damaged = dict(flat)
    del damaged[name]
    with pytest.raises(CheckpointError, match='is missing') as error:
      optimizer.restore_state(tree_utils.unflatten_dict(damaged))
    assert name in str(error.value)
  with pytest.raises(CheckpointError, match='state/surplus'):
    optimizer.restore_state(tree_utils.unflatten_dict({**flat, 'state/surplus': 1}))


@pytest.mark.parametrize('row', _rows('axes'))
def test_logical_axes_mirror_the_state(row):
  optimizer, _ = _shapes(row)
  axes = optimizer.optimizer_def.derive_logical_axes(optimizer, _AXES)
  assert jax.tree.structure(axes) == jax.tree.structure(optimizer)
  assert axes.target == _AXES
  mesh_size = dict(zip(_MESH_AXES, (2, 2, 2), strict=True))
  whole = sharded = 0
  for (name, leaf), spec in zip(
    tree_utils.named_leaves(optimizer), jax.tree.leaves(axes), strict=True
  ):
    assert isinstance(spec, P) and len(spec) == len(leaf.shape), name
    # Sharded by two axes of the mesh at most, each once, and evenly.
    mesh_axes = [_MESH_AXIS.get(axis) for axis in spec]
    used = [axis for axis in mesh_axes if axis is not None]
    assert len(used) == len(set(used)), f'{name}: {spec}'
    assert all(
      axis is None or size % mesh_size[axis] == 0
      for axis, size in zip(mesh_axes, leaf.shape, strict=True)
    ), name
    # Arrays as large as a parameter, or as a factor of one, have named axes.
    if leaf.size >= 16 and name.startswith('state'):
      assert any(spec), name
    # The sum excludes arrays whose axes the optimizer names (`partitioning.rules`).
    if name.startswith('state') and not any(str(axis).startswith('optimizer_') for axis in spec):
      whole += leaf.size * leaf.dtype.itemsize
      sharded += leaf.size * leaf.dtype.itemsize / math.prod(mesh_size[axis] for axis in used)
  # The parameters themselves take 0.25 of their bytes on each device, but for a few small ones, and factors of low rank
  # 0.5 of them.
  assert sharded <= 0.35 * whole + 512, f'{row}: {sharded} of {whole} bytes on each device'


@pytest.mark.parametrize('row', _rows('needs'))
def test_missing_values_of_the_step_are_named(row):
  needs = ROWS[row].needs
  optimizer, _ = _shapes(row)
  assert set(needs) <= set(optimizer.optimizer_def.extra_args)
  if needs:
    with pytest.raises(ConfigError, match=f'failed: .*{needs[0]}.*apply_gradient'):
      jax.eval_shape(
        lambda o, g: o.apply_gradient(g, **ROWS[row].overrides), optimizer, _grads(row)
      )


@pytest.mark.parametrize('dtype', ['float32', pytest.param('bfloat16', marks=pytest.mark.full)])
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.full] if name == 'distributed_shampoo' else [])
    for name in option_values.factories()
  ],
)
def test_every_option_is_stepped_twice(name, dtype):
  """With another value than the default, an update returns a state of the same structure, shapes and dtypes."""
  lead = [2] if name == 'dpsgd' else []
  params = {key: jnp.ones(shape, dtype) for key, shape in option_values.SHAPES.items()}
  grads = {key: jnp.ones([*lead, *shape], dtype) for key, shape in option_values.SHAPES.items()}

  def loss_fn(params):
    return sum(jnp.sum(jnp.square(param)) for param in jax.tree.leaves(params))

  for option, arguments in option_values.calls(name):
    optimizer_def = option_values.factories()[name](**arguments)
    optimizer_def = optimizer_def.with_param_axes(option_values.AXES)

    def step(optimizer, _):
      known = {
        'value': loss_fn(params),
        'grad': grads,
        'value_fn': loss_fn,
        'obj_fn': loss_fn,
        'grad_fn': lambda params, number: jax.grad(loss_fn)(params),
      }
      extra_args = {key: known[key] for key in optimizer.optimizer_def.extra_args}
      if optimizer.optimizer_def.needs_learning_rate:
        extra_args['learning_rate'] = 0.1
      return optimizer.apply_gradient(grads, **extra_args), None

    def train(params):
      # lax.scan raises for a carry whose structure, shapes or dtypes change.
      return jax.lax.scan(step, optimizer_def.create(params), length=2)[0]

    try:
      updated = jax.eval_shape(train, params)
    except Exception as error:
      raise AssertionError(f'{name}: {option}={arguments[option]!r}') from error
    assert _signature(updated) == _signature(jax.eval_shape(optimizer_def.create, params)), option


# ---- odd trees -------------------------------------------------------------------------------------------------------

_ODD_TREES = {
  'empty': ({}, {}),
  'sizes': (
    flax.core.freeze(
      {
        'scalar': np.float32(1.0),
        'sizes': {
          'void': np.zeros([0, 4], np.float32),
          'tall': np.zeros([3, 0, 8], np.float32),
          'one': np.ones([1], np.float32),
        },
        'a': {'kernel': np.ones([4, 6], np.float32)},
      }
    ),
    {
      'scalar': P(),
      'sizes': {'void': P('embed', 'mlp'), 'tall': P('layers', 'embed', 'mlp'), 'one': P('embed')},
      'a': {'kernel': P('embed', 'mlp')},
    },
  ),
}


def _odd_optimizer(row: str, tree: str):
  """Return (optimizer, gradients, its parameters' axes)."""
  params, axes = _ODD_TREES[tree]
  optimizer_def = ROWS[row].factory().with_param_axes(axes)
  grads = jax.tree.map(
    lambda p: jnp.ones([2, *p.shape]) if ROWS[row].per_example else jnp.ones_like(p), params
  )
  return optimizer_def.create(jax.tree.map(jnp.asarray, params)), grads, axes


def _check_odd_tree(optimizer, updated, axes) -> None:
  assert _signature(updated) == _signature(optimizer)
  assert jax.tree.structure(updated) == jax.tree.structure(optimizer)
  derived = optimizer.optimizer_def.derive_logical_axes(optimizer, axes)
  assert jax.tree.structure(derived) == jax.tree.structure(optimizer)


@pytest.mark.parametrize('row', _rows('odd_trees', _SOME))
def test_shapes_of_odd_trees(row):
  for tree, (_, axes) in _ODD_TREES.items():
    optimizer, grads = jax.eval_shape(lambda tree=tree: _odd_optimizer(row, tree)[:2])
    updated = jax.eval_shape(lambda o, g: _update(row, o, g), optimizer, grads)
    _check_odd_tree(optimizer, updated, axes)


@pytest.mark.parametrize('row', _rows('odd_trees', ('adamw', 'adafactor')))
@pytest.mark.parametrize('tree', _ODD_TREES)
def test_odd_trees(row, tree):
  optimizer, grads, axes = _odd_optimizer(row, tree)
  updated = jax.jit(lambda o, g: _update(row, o, g))(optimizer, grads)
  _check_odd_tree(optimizer, updated, axes)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(updated.target))
  _assert_same(optimizer.restore_state(updated.state_dict()), updated)


# ---- what takes a compilation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('row', _rows('minimises', ('adamw', 'adafactor', 'sgd_momentum', 'lion')))
def test_minimises_two_functions_within_scan(row):
  x = jnp.asarray(np.random.default_rng(0).normal(size=[32, 6]), jnp.float32)
  target = jnp.asarray(np.random.default_rng(1).normal(size=[6, 5]), jnp.float32)

  def regression(params):
    return jnp.mean((x @ params['w'] + params['b'] - x @ target - 1.0) ** 2)

  def valley(params):
    return jnp.mean((1.0 - params['w']) ** 2) + 2.0 * jnp.mean(
      (params['b'] ** 2 - params['w'][0]) ** 2
    )

  def losses_of(params):
    return jnp.stack([regression(params['regression']), valley(params['valley'])])

  start = {'w': jnp.full([6, 5], 0.5), 'b': jnp.full([5], 0.3)}
  axes = {'w': P('embed', 'mlp'), 'b': P('mlp')}
  optimizer_def = ROWS[row].factory().with_param_axes({'regression': axes, 'valley': axes})
  optimizer = optimizer_def.create({'regression': start, 'valley': start})

  def total(params):
    return jnp.sum(losses_of(params))

  def step(optimizer, _):
    grads = jax.grad(total)(optimizer.target)
    if ROWS[row].per_example:
      grads = jax.tree.map(lambda g: jnp.stack([g, g]), grads)
    losses = losses_of(optimizer_def.eval_params(optimizer.target, optimizer.state))
    return _update(row, optimizer, grads, total), losses

  # lax.scan raises for a carry whose structure, shapes or dtypes change.
  last, losses = jax.jit(lambda optimizer: jax.lax.scan(step, optimizer, length=300))(optimizer)
  assert np.all(np.isfinite(losses))
  assert np.all(losses[-1] < 0.1 * losses[0]), f'{row}: {losses[0]} -> {losses[-1]}'
  assert last.state.step == 300 and last.state.step.dtype == jnp.int32


@pytest.mark.parametrize('row', ['adamw', 'adamw_schedule', 'adafactor', 'adafactor_schedule'])
def test_compiles_once_over_changing_steps_and_rates(row):
  optimizer, rate = (
    _definition(row).create(jax.tree.map(jnp.asarray, _random_params(0))),
    ROWS[row].learning_rate,
  )
  num_traces = 0

  @jax.jit
  def step(optimizer, grads, overrides):
    nonlocal num_traces
    num_traces += 1
    return _update(row, optimizer, grads, overrides=overrides)

  for seed in range(3):
    optimizer = step(
      optimizer, _grads(row, seed), {} if rate is None else {'learning_rate': rate * (seed + 1)}
    )
  assert num_traces == 1


@pytest.mark.parametrize('row', _rows('checkpoint', ('adamw', 'adafactor', 'noisy_sgd')))
def test_is_saved_and_restored_by_a_checkpoint(row, tmp_path):
  optimizer = jax.tree.map(jnp.asarray, _numbered(_shapes(row)[0]))
  with checkpoints.CheckpointManager(
    str(tmp_path), save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(1, optimizer.state_dict())
  shapes = _shapes(row)[0]
  restored = checkpoints.restore_checkpoint(
    checkpoints.get_checkpoint_dir(str(tmp_path), 1), shapes.state_dict()
  )
  _assert_same(shapes.restore_state(restored.state), optimizer)


def _shardings(specs: Any, mesh: Mesh, *leading: None) -> Any:
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, P(*leading, *(_MESH_AXIS.get(name) for name in spec))),
    specs,
    is_leaf=_is_axes,
  )


def _train(row, optimizer, recorded):
  """Return the optimizer after an update by each of the recorded gradients, or else towards each recorded target."""

  def step(optimizer, grads):
    if not ROWS[row].needs:
      return _update(row, optimizer, grads), None

    # An objective, which a line search evaluates elsewhere too, cannot be recorded as numbers.
    def loss_fn(params):
      pairs = zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True)
      return 0.1 * sum(jnp.sum(jnp.square(p - t)) for p, t in pairs)

    return _update(row, optimizer, jax.grad(loss_fn)(optimizer.target), loss_fn), None

  return jax.lax.scan(step, optimizer, recorded)[0]


@functools.cache
def _updates_of_one_device(row: str):
  """Return (optimizer, 20 gradients stacked, the parameters after those updates)."""
  optimizer = _definition(row).create(jax.tree.map(jnp.asarray, _random_params(0)))
  recorded = _random_params(1, ROWS[row].per_example, 20)
  if ROWS[row].needs:  # One objective for all updates, or secants across two of them make no sense.
    recorded = jax.tree.map(lambda targets: np.broadcast_to(targets[:1], targets.shape), recorded)
  return optimizer, recorded, jax.jit(functools.partial(_train, row))(optimizer, recorded).target


def _check_sharded_updates(row: str, mesh_shape: tuple[int, int, int]) -> None:
  """20 updates by the same gradients, unsharded and sharded, give the same parameters."""
  optimizer, recorded, expected = _updates_of_one_device(row)
  mesh = Mesh(
    np.reshape(jax.devices()[:8], mesh_shape), _MESH_AXES, axis_types=(AxisType.Auto,) * 3
  )
  shardings = _shardings(optimizer.optimizer_def.derive_logical_axes(optimizer, _AXES), mesh)
  leading = [None, None] if ROWS[row].per_example else [None]
  with jax.set_mesh(mesh):
    sharded = jax.jit(functools.partial(_train, row), out_shardings=shardings)(
      jax.device_put(optimizer, shardings),
      jax.device_put(recorded, _shardings(_AXES, mesh, *leading)),
    )
  for (name, got), want in zip(
    tree_utils.named_leaves(sharded.target), jax.tree.leaves(expected), strict=True
  ):
    error = np.linalg.norm(np.asarray(got) - np.asarray(want)) / np.linalg.norm(np.asarray(want))
    assert error < 1e-6, f'{name}: {error}'
  experts = sharded.target['encoder']['moe']['kernel']
  data, expert, model = mesh_shape
  assert experts.addressable_shards[0].data.shape == (4 // expert, 16 // data, 8 // model)


@pytest.mark.parametrize(
  'mesh_shape',
  [
    (2, 2, 2),
    *(pytest.param(shape, marks=pytest.mark.full) for shape in ((8, 1, 1), (1, 2, 4), (1, 1, 8))),
  ],
)
def test_sharded_updates_on_every_kind_of_mesh(mesh_shape):
  _check_sharded_updates('adafactor', mesh_shape)


@pytest.mark.parametrize('row', _rows('sharded', ('adamw', 'sm3', 'momo')))
def test_sharded_updates_equal_those_of_one_device(row):
  _check_sharded_updates(row, (2, 2, 2))


@pytest.mark.parametrize(
  'row', _rows('learning_rate', ('adamw', 'adamw_own_rate', 'adafactor_own_rate'))
)
def test_learning_rate_has_one_owner(row):
  optimizer_def, learning_rate = (
    ROWS[row].factory().with_param_axes({'w': P('embed')}),
    ROWS[row].learning_rate,
  )
  shape = [2, 4] if ROWS[row].per_example else [4]
  # Small, so that first steps of optimizers that compute their step size are not lost in rounding.
  optimizer, grads = optimizer_def.create({'w': jnp.full([4], 1e-3)}), {'w': jnp.full(shape, 0.3)}

  def loss_fn(params):
    return 100.0 + jnp.sum(jnp.square(params['w']))

  if optimizer_def.needs_learning_rate:
    assert learning_rate is not None
    with pytest.raises(ConfigError, match='learning_rate_fn'):
      _update(row, optimizer, grads, overrides={})
  step = jax.jit(
    lambda optimizer, rate: _update(row, optimizer, grads, loss_fn, {'learning_rate': rate})
  )
  # Not the first updates, in which schedules are 0 and multi_steps only accumulates.
  for _ in range(3):
    optimizer = step(optimizer, 0.05)
  moved = not np.array_equal(step(optimizer, 1e-4).target['w'], step(optimizer, 1e-2).target['w'])
  assert moved == optimizer_def.uses_learning_rate
