"""SOAP: closed forms, a NumPy reading of the paper, equal updates in every layout, on meshes and after a resume."""

import os

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.optimizers.soap_rule import triangle
from t5x_lite.partitioning.rules import resolve
from t5x_lite.partitioning.rules import with_optimizer_rules
from tests.optimizers.soap_rule import soap_reference

# Tests compile more than they compute.
_FAST_COMPILE = {'xla_backend_optimization_level': 0}
_ROOT = 2**-0.5


def _jit(fn):
  return jax.jit(fn, compiler_options=_FAST_COMPILE)


def _directions(grads, **options):
  """Return the directions of successive gradients of one array: negative updates at the rate 1."""
  transformation = optimizers.soap(1.0, **options).optax_optimizer
  params = {'w': jnp.zeros(np.shape(grads[0]))}
  state = transformation.init(params)
  update = _jit(transformation.update)
  directions = []
  for grad in grads:
    updates, state = update({'w': jnp.asarray(grad, jnp.float32)}, state, params)
    directions.append(-np.asarray(updates['w']))
  return directions


# Closed forms.

_SUMS = {
  'b1': 0.0,
  'b2': 1.0,
  'eps': 1e-30,
  'weight_decay': 0.0,
  'precondition_frequency': 1,
  'precondition_1d': True,
  'skip_first_step': False,
}


@pytest.mark.parametrize(
  'grads,options,want',
  [
    # From the tests of facebookresearch/optimizers.
    ([[1, 0], [0, 2]], {}, [0, 1]),
    ([1, 2], {}, 2 / 5**0.5),
    ([[[1, 0]], [[0, 2]]], {}, [[0, 1]]),
    ([[1, 0], [0, 2]], {'exponent': 1.0}, [0, 0.5]),
    # Adam, the same without a rotation, gives 0.894 [1, -1] / sqrt(2).
    ([[_ROOT, _ROOT], [2 * _ROOT, -2 * _ROOT]], {}, [_ROOT, -_ROOT]),
    (
      [[_ROOT, _ROOT], [2 * _ROOT, -2 * _ROOT]],
      {'precondition_1d': False},
      [0.8**0.5, -(0.8**0.5)],
    ),
  ],
)
def test_closed_forms(grads, options, want):
  got = _directions(grads, **_SUMS | options)[-1]
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_first_step_is_skipped():
  grads = np.random.default_rng(0).normal(size=[3, 4, 4])
  directions = _directions(grads, weight_decay=0.0)
  assert not directions[0].any()
  # The first gradient is in the bases and not in the moments: the second makes the first step of Adam, in these bases.
  left, _, right = np.linalg.svd(grads[0])
  want = left @ np.sign(left.T @ grads[1] @ right.T) @ right
  np.testing.assert_allclose(directions[1], want, atol=1e-4)


# Reference.


def _random_case(seed):
  """Return (shape, options) in which the statistics of the first gradient have full rank."""
  rng = np.random.default_rng(seed)
  options = {
    'b1': float(rng.choice([0.0, 0.5, 0.95])),
    'b2': float(rng.choice([0.9, 0.95, 1.0])),
    'weight_decay': float(rng.choice([0.0, 0.1])),
    'precondition_frequency': int(rng.choice([1, 2, 3, 10])),
    'exponent': float(rng.choice([0.5, 0.5, 0.25, 1.0])),
    'skip_first_step': bool(rng.random() < 0.6),
  }
  # The first gradient is diagonal in its bases: without a large eps, the rounding of its zeros would be in the result.
  options['eps'] = 1e-8 if options['skip_first_step'] else 1e-2
  if rng.random() < 0.3:
    options['shampoo_beta'] = float(rng.choice([0.8, 1.0]))
  if rng.random() < 0.2 and (options['b1'] or options['b2'] < 1):
    options['correct_bias'] = False
  kind = rng.choice(['square', 'blocks', 'one side', 'cube', 'merged', 'vector', 'rotated vector'])
  match kind:
    case 'square':
      return (4, 4), options
    case 'blocks':
      return (6, 9), options | {'block_size': 3}
    case 'one side':
      return (3, 8), options | {'max_precond_dim': 4}
    case 'cube':
      return (2, 3, 4), options
    case 'merged':
      return (2, 2, 4, 1), options | {'merge_dims': True, 'max_precond_dim': 5}
    case 'vector':
      return (5,), options
  return (2,), options | {'precondition_1d': True}


@pytest.mark.parametrize('seeds', [range(start, start + 10) for start in range(0, 50, 10)])
def test_equals_the_reference_in_random_cases(seeds):
  for seed in seeds:
    shape, options = _random_case(seed)
    rng = np.random.default_rng(1000 + seed)
    reference = soap_reference.Reference(shape, **options)
    param = rng.normal(size=shape).astype(np.float32)
    transformation = optimizers.soap(1.0, **options).optax_optimizer
    state = transformation.init({'w': param})
    update = _jit(transformation.update)
    for step in range(10):
      grad = rng.normal(size=shape).astype(np.float32)
      updates, state = update({'w': grad}, state, {'w': param})
      want = reference.update(np.float64(grad), np.float64(param))
      error = np.abs(np.asarray(updates['w']) - want).max() / max(np.abs(want).max(), 1e-3)
      assert error < 1e-3, (seed, step, shape, options, error)
    assert reference.gap > 1e-4 or len(shape) == 1, (
      seed
    )  # the order of the columns is that of exact numbers


def test_without_rotation_it_is_adamw():
  options = {'b1': 0.9, 'b2': 0.99, 'eps': 1e-6, 'weight_decay': 0.1}
  rng = np.random.default_rng(0)
  params = {'w': rng.normal(size=[3, 5]).astype(np.float32), 's': np.float32(2.0)}
  soap = optimizers.soap(0.1, max_precond_dim=1, skip_first_step=False, **options).create(params)
  adamw = optimizers.adamw(0.1, **options).create(params)
  for _ in range(4):
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    soap, adamw = soap.apply_gradient(grads), adamw.apply_gradient(grads)
    for got, want in zip(jax.tree.leaves(soap.target), jax.tree.leaves(adamw.target), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-5)


def test_parameters_are_needed_for_weight_decay_alone():
  grads = {'w': jnp.full([4, 4], 0.5)}
  tx = optimizers.soap(0.1, weight_decay=0.0).optax_optimizer
  assert jax.eval_shape(tx.update, grads, tx.init(grads))[0]['w'].dtype == jnp.float32
  tx = optimizers.soap(0.1).optax_optimizer
  with pytest.raises(ConfigError, match='weight_decay` needs the parameters'):
    tx.update(grads, tx.init(grads))


# Layouts, meshes, options that change no result.

_LAYERS = (0, 1, 2)
_SIZES = {
  'embed': 8,
  'mlp': 12,
  'heads': 2,
  'kv': 3,
  'joined_kv': 6,
  'layers': len(_LAYERS),
  'expert': 2,
  'vocab': 10,
}
_OF_LAYER = {
  'query': P('embed', 'joined_kv'),
  'out': P('joined_kv', 'embed'),
  'wi': P('embed', 'mlp'),
  'moe': P('expert', 'embed', 'mlp'),
  'scale': P('embed'),
}
_SINGLE_AXES = {
  'encoder': {f'layers_{layer}': _OF_LAYER for layer in _LAYERS},
  'embedding': P('vocab', 'embed'),
}
_SCALABLE_AXES = {
  'encoder': {
    'query': P('embed', 'layers', 'heads', 'kv'),
    'out': P('heads', 'layers', 'kv', 'embed'),
    'wi': P('embed', 'layers', 'mlp'),
    'moe': P('expert', 'embed', 'layers', 'mlp'),
    'scale': P('embed', 'layers'),
  },
  'embedding': P('vocab', 'embed'),
}
# Steps at which the rotated gradients of small arrays have no tiny elements.
_LAYOUT_OPTIONS = {'precondition_frequency': 2, 'eps': 1e-3, 'b2': 0.9}


def _is_axes(node):
  return isinstance(node, P)


def _draw(seed):
  """Return arrays of the layout 't5': a subtree per layer."""
  rng = np.random.default_rng(seed)

  def draw(axes):
    return rng.normal(size=[_SIZES[name] for name in axes]).astype(np.float32)

  return jax.tree.map(draw, _SINGLE_AXES, is_leaf=_is_axes)


def _to_scalable(single):
  """Return the arrays of the layout 'scalable_t5' with those of the layout 't5'."""
  layers = [single['encoder'][f'layers_{layer}'] for layer in _LAYERS]
  arrays = {}
  for name, axes in _SCALABLE_AXES['encoder'].items():
    dim = tuple(axes).index('layers')
    others = [_SIZES[each] for each in axes if each != 'layers']
    arrays[name] = np.stack([layer[name].reshape(others) for layer in layers], dim)
  return {'encoder': arrays, 'embedding': single['embedding']}


def _to_experts(single):
  """Return the arrays of the layout 't5' with an array per expert."""
  experts = {}
  for layer, arrays in single['encoder'].items():
    of_layer = {f'moe_{i}': each for i, each in enumerate(arrays['moe'])}
    experts[layer] = {**arrays, **of_layer}
    del experts[layer]['moe']
  return {'encoder': experts, 'embedding': single['embedding']}


def _experts_axes():
  of_layer = {**_OF_LAYER, 'moe_0': P('embed', 'mlp'), 'moe_1': P('embed', 'mlp')}
  del of_layer['moe']
  return {
    'encoder': dict.fromkeys(_SINGLE_AXES['encoder'], of_layer),
    'embedding': P('vocab', 'embed'),
  }


_STACKS = LayerStacks((('encoder', _LAYERS),))


def _train(definition, convert, num_steps=5):
  """Return the optimizer after updates by random gradients, `convert` of those in the layout 't5'."""
  optimizer = definition.create(jax.tree.map(jnp.asarray, convert(_draw(0))))
  step = _jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
  for seed in range(1, 1 + num_steps):
    optimizer = step(optimizer, convert(_draw(seed)))
  return optimizer


def _assert_close(got, want, tolerance):
  for (path, a), b in zip(tree_utils.named_leaves(got), jax.tree.leaves(want), strict=True):
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert error < tolerance, (path, error)


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'block_size': 4, 'merge_dims': True},
    {'max_precond_dim': 8, 'precondition_1d': True},
  ],
)
def test_layouts_give_equal_updates(options):
  definition = optimizers.soap(0.01, **_LAYOUT_OPTIONS, **options)
  want = _train(definition.with_param_axes(_SINGLE_AXES), lambda tree: tree).target
  single = jax.tree.map(np.asarray, want)
  got = _train(definition.with_param_axes(_SCALABLE_AXES), _to_scalable).target
  _assert_close(got, _to_scalable(single), 1e-6)
  got = _train(definition.with_param_axes(_experts_axes()), _to_experts).target
  _assert_close(got, _to_experts(single), 1e-6)


@pytest.mark.parametrize(
  'options',
  [
    {'spread_refreshes': True},
    {'momentum_dtype': 'int8', 'matrix_dtype': 'int16'},
    {'symmetric_storage': True, 'second_moment_dtype': 'bfloat16', 'block_size': 4},
  ],
)
def test_layers_in_stacked_arrays_train_as_single_layers(options):
  options = {**_LAYOUT_OPTIONS, 'precondition_frequency': 3, **options}
  definition = optimizers.soap(0.01, **options).with_param_axes(_SINGLE_AXES)
  single = definition.create(_draw(0))
  stacked = _STACKS.stack(single)
  step = _jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
  for seed in range(1, 6):
    single = step(single, _draw(seed))
    stacked = step(stacked, _STACKS.stack(_draw(seed)))
  got = _STACKS.unstack(stacked)
  assert jax.tree.structure(got) == jax.tree.structure(single)
  _assert_close(got.target, single.target, 1e-6)


def test_every_layer_and_expert_has_its_own_bases():
  definition = optimizers.soap(0.01).with_param_axes(_SCALABLE_AXES)
  optimizer = jax.eval_shape(lambda: definition.create(_to_scalable(_draw(0))))
  params = optimizer.state.param_states.of_units.params['encoder']
  shapes = jax.tree.map(lambda stack: stack.shape, params['moe'].bases)
  # [expert, layer, K, n, n], or in the order of the dims of the parameter.
  assert shapes == ((2, 3, 1, 8, 8), (2, 3, 1, 12, 12))
  assert params['query'].bases[1].shape == (3, 1, 6, 6)
  assert params['scale'].bases == ()


def test_a_spread_refresh_renews_each_basis_once_a_period():
  period = 4
  definition = optimizers.soap(0.01, precondition_frequency=period, spread_refreshes=True)
  optimizer = definition.with_param_axes(_SINGLE_AXES).create(_draw(0))
  step = _jit(lambda optimizer, grads: optimizer.apply_gradient(grads))

  def bases(optimizer):
    stacks = [
      stack
      for node in jax.tree.leaves(
        optimizer.state.param_states.of_units.params, is_leaf=lambda node: hasattr(node, 'bases')
      )
      for stack in node.bases
    ]
    return [matrix for x in stacks for matrix in np.asarray(x).reshape(-1, *x.shape[-2:])]

  optimizer = step(optimizer, _draw(1))
  counts = np.zeros([period, len(bases(optimizer))], int)
  for i in range(period):
    before = bases(optimizer)
    optimizer = step(optimizer, _draw(2 + i))
    counts[i] = [(a != b).any() for a, b in zip(before, bases(optimizer), strict=True)]
  assert (counts.sum(axis=0) == 1).all()
  assert (
    counts.sum(axis=1).max() <= -(-counts.shape[1] // period) + 3
  )  # rounded up for each of 4 sizes


def test_symmetric_storage_changes_no_bit():
  # As a run is compiled: with optimizations, compilers choose which products are rounded before a sum.
  options = {'xla_backend_optimization_level': 2, 'xla_llvm_disable_expensive_passes': False}
  if 'xla_cpu_use_fusion_emitters=false' in os.environ.get('XLA_FLAGS', ''):
    options['xla_cpu_use_fusion_emitters'] = True
  axes = dict.fromkeys(('a', 'b'), P('expert', 'embed', 'mlp'))
  shape = (2, 8, 12)

  def train(**soap_options):
    definition = optimizers.soap(0.01, precondition_frequency=2, **soap_options)
    optimizer = definition.with_param_axes(axes).create(dict.fromkeys(axes, jnp.ones(shape)))
    step = jax.jit(
      lambda optimizer, grads: optimizer.apply_gradient(grads), compiler_options=options
    )
    for seed in range(4):
      grad = jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
      optimizer = step(optimizer, dict.fromkeys(axes, grad))
    return optimizer.target, optimizer.state.param_states.of_units.params

  want, want_states = train()
  got, got_states = train(symmetric_storage=True)
  for name in axes:
    np.testing.assert_array_equal(got[name], want[name])
    packed, stacks = got_states[name].statistics, want_states[name].statistics
    for a, b in zip(packed, stacks, strict=True):
      np.testing.assert_array_equal(triangle.unpack(a), triangle.symmetric(b))


@pytest.mark.parametrize(
  'options,tolerance',
  [
    ({'momentum_dtype': 'bfloat16'}, 0.02),
    ({'momentum_dtype': 'int8'}, 0.05),
    ({'second_moment_dtype': 'bfloat16'}, 0.02),
    ({'matrix_dtype': 'int16'}, 0.02),
  ],
)
def test_narrow_states_give_almost_the_same_updates(options, tolerance):
  def train(**options):
    # Blocks whose statistics have no null space, the basis of which would depend on rounding.
    definition = optimizers.soap(1.0, weight_decay=0.0, block_size=2, **_LAYOUT_OPTIONS, **options)
    return _train(definition.with_param_axes(_SINGLE_AXES), lambda tree: tree).target

  start = _draw(0)
  want = jax.tree.map(np.subtract, train(), start)
  got = jax.tree.map(np.subtract, train(**options), start)
  _assert_close(got, want, tolerance)
  assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True))


def test_weight_decay_is_decoupled_and_scaled_by_path():
  params = _draw(0)
  zeros = jax.tree.map(np.zeros_like, params)
  definition = optimizers.soap(0.1, weight_decay=0.5, skip_first_step=False)
  definition = optimizers.with_update_options(
    definition, weight_decay_scales=[('scale$', 0.0)]
  ).with_param_axes(_SINGLE_AXES, params)
  got = definition.create(params).apply_gradient(zeros).target
  np.testing.assert_allclose(got['embedding'], 0.95 * params['embedding'], rtol=1e-6)
  layer = 'layers_1'
  np.testing.assert_array_equal(got['encoder'][layer]['scale'], params['encoder'][layer]['scale'])


def test_a_resumed_state_continues_bitwise():
  definition = optimizers.soap(0.01, precondition_frequency=2).with_param_axes(_SINGLE_AXES)
  whole = _train(definition, lambda tree: tree, 6)
  stopped = _train(definition, lambda tree: tree, 3)
  resumed = definition.create(_draw(9)).restore_state(
    jax.tree.map(np.asarray, stopped.state_dict())
  )
  step = _jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
  for seed in range(4, 7):
    resumed = step(resumed, _draw(seed))
  for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_mesh_of_devices_gives_the_updates_of_one():
  axes = {'a': P('embed', 'mlp'), 'b': P('expert', 'embed', 'mlp'), 's': P('embed')}
  sizes = {'embed': 8, 'mlp': 16, 'expert': 4}
  rng = np.random.default_rng(0)
  draws = [
    {
      name: rng.normal(size=[sizes[axis] for axis in spec]).astype(np.float32)
      for name, spec in axes.items()
    }
    for _ in range(5)
  ]
  mesh = Mesh(
    np.reshape(jax.devices()[:8], (2, 4)), ('data', 'model'), axis_types=(AxisType.Auto,) * 2
  )
  rules = (('mlp', 'model'), ('expert', 'data'), ('embed', None))
  definition = optimizers.soap(0.01, block_size=4, **_LAYOUT_OPTIONS).with_param_axes(axes)
  one = definition.create(draws[0])
  specs = definition.derive_logical_axes(one, axes)
  params_specs = specs.state.param_states.of_units.params
  assert params_specs['a'].bases == (P('optimizer_stack', 'optimizer_rows', None),) * 2
  assert params_specs['b'].bases == (P('expert', 'optimizer_stack', 'optimizer_rows', None),) * 2

  def sharding(spec, array):
    own = with_optimizer_rules(rules, spec, array.shape, mesh.shape)
    decisions = resolve(spec, own, shape=array.shape, mesh_shape=mesh.shape)
    return NamedSharding(mesh, P(*(decision.mesh_axis for decision in decisions)))

  step = _jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
  for grads in draws[1:]:
    one = step(one, grads)
  with jax.set_mesh(mesh):
    several = definition.create(draws[0])
    shardings = jax.tree.map(sharding, specs, several)
    params_shardings = shardings.state.param_states.of_units.params
    # [8, 4, 4] over all devices; two experts [2, 8, 4, 4] on each of two groups of devices, and their blocks on each.
    assert params_shardings['a'].bases[0].spec == P(('data', 'model'), None, None)
    assert params_shardings['b'].bases[0].spec == P('data', ('model',), None, None)
    several = jax.device_put(several, shardings)
    step = jax.jit(
      lambda optimizer, grads: optimizer.apply_gradient(grads), out_shardings=shardings
    )
    for grads in draws[1:]:
      several = jax.block_until_ready(step(several, grads))
  _assert_close(several.target, one.target, 1e-6)
