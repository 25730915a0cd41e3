"""Distributed Shampoo, plain mode: recorded runs of the original, a NumPy reading of it, odd trees, errors, bytes."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.optimizers.shampoo import Preconditioner
from t5x_lite.optimizers.shampoo import update
from tests import golden_data
from tests.optimizers.shampoo import shampoo_reference

_SHAPES = [
  (6, 4),
  (9, 5),
  (7,),
  (3,),
  (1,),
  (1, 1),
  (4, 3, 6),
  (2, 3, 2, 5),
  (),
  (5, 1, 4),
  (8, 8),
  (0, 3),
  (12, 8),
]
# Tests compile more than they compute.
_FAST_COMPILE = {'xla_backend_optimization_level': 0}


def _relative(got, want):
  return float(np.linalg.norm(np.asarray(got) - want) / max(np.linalg.norm(want), 1e-12))


# The original's recorded runs.


@pytest.mark.parametrize(
  'name',
  [
    'graft_SGD_b4',
    'graft_RMSPROP_NORMALIZED_b4',
    pytest.param('graft_ADAGRAD_b4', marks=pytest.mark.full),
  ],
)
def test_equals_the_recorded_run(name):
  description, arrays = golden_data.load(f'optimizers/shampoo_{name}')
  options = dict(description['hyper'])
  options['statistics_partition_spec'] = options['preconditioner_partition_spec'] = P(
    'x', None, None
  )
  tx = optimizers.distributed_shampoo(**options).optax_optimizer
  params = golden_data.subtree(arrays, 'init')
  state = tx.init(params)
  step = jax.jit(tx.update, compiler_options=_FAST_COMPILE)
  for t in range(description['steps']):
    updates, state = step({name: arrays[f'grad/{name}'][t] for name in params}, state, params)
    for name, got in updates.items():
      assert _relative(got, arrays[f'update/{name}'][t]) < 1e-5, (name, t)
      errors = state.stats[name].training_metrics.inverse_pth_root_errors
      np.testing.assert_allclose(errors, arrays[f'error/{name}'][t], atol=2e-6, err_msg=name)
    params = jax.tree.map(np.add, params, updates)
    if t in (0, description['steps'] - 1):
      _check_matrices(state, arrays, 'final' if t else 'step0')
  for key in ('momentum', 'diagonal_momentum'):
    for name, want in golden_data.subtree(arrays, f'final/{key}').items():
      assert _relative(getattr(state.stats[name], key).to_float(), want) < 1e-5


@pytest.mark.parametrize(
  'first,second,beta2,want',
  [
    # From the tests of facebookresearch/optimizers; sums, then means from zero without bias correction.
    ([1, 0], [0, 1], 1.0, [0, 1]),
    (np.eye(2) / 2**0.5, np.eye(2) / 2**0.5, 1.0, np.eye(2) / 2**0.5),
    ([[1, 0]], [[0, 1]], 1.0, [[0, 2**-0.25]]),
    ([1, 0], [0, 1], 0.9, [0, 3.162278]),
    (np.eye(2) / 2**0.5, np.eye(2) / 2**0.5, 0.9, 2.294157 * np.eye(2)),
    ([[1, 0]], [[0, 1]], 0.9, [[0, 2.693467]]),
  ],
)
def test_closed_forms_before_grafting(first, second, beta2, want):
  first = jnp.asarray(first, jnp.float32)
  second = jnp.asarray(second, jnp.float32)
  tx = optimizers.distributed_shampoo(
    1.0,
    beta2=beta2,
    matrix_epsilon=1e-12,
    best_effort_shape_interpretation=False,
    root_method='eigh',
  ).optax_optimizer
  state = tx.init({'w': first})
  for grad in (first, second):
    _, state = tx.update({'w': grad}, state)
  preconditioner = Preconditioner(second, 128, False)
  got = preconditioner.preconditioned_grad(second, list(state.stats['w'].preconditioners))
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def _check_matrices(state, arrays, when):
  for key in ('statistics', 'preconditioners'):
    for name, matrices in golden_data.subtree(arrays, f'{when}/{key}').items():
      got = getattr(state.stats[name], key)
      assert len(got) == len(matrices) and len(list(got)) == len(matrices)
      for i, matrix in matrices.items():
        assert _relative(got[int(i)], matrix) < 1e-4, (key, name, i)


# A second reading of the original.


def _random_case(seed):
  """Return (options, parameters) drawn at random."""
  rng = np.random.default_rng(seed)

  def pick(*values):
    return values[rng.integers(len(values))]

  options = {
    'graft_type': list(optimizers.GraftingType.__members__)[seed % 6],
    'block_size': pick(1, 2, 3, 4, 5, 8, 16),
    'beta1': pick(0.0, 0.5, 0.9),
    'beta2': pick(0.9, 0.999, 1.0),
    'weight_decay': pick(0.0, 0.1),
    'start_preconditioning_step': pick(0, 1, 3),
    'preconditioning_compute_steps': pick(1, 1, 2, 3),
    'statistics_compute_steps': pick(1, 1, 2, 3),
    'best_effort_shape_interpretation': pick(True, False),
    'nesterov': pick(True, False),
    'exponent_override': pick(0, 0, 0, 1, 3),
    'shard_optimizer_states': pick(True, False),
    'moving_average_for_momentum': pick(True, False),
    'skip_preconditioning_dim_size_gt': pick(4096, 4096, 7),
    'inverse_failure_threshold': pick(0.1, 0.5),
    # Nearly singular matrices have no well-defined root in float32: the recorded runs are the test of those.
    'matrix_epsilon': pick(1e-2, 1e-3),
    'learning_rate': pick(0.1, lambda count: 0.1 / (1.0 + count)),
  }
  if options['graft_type'].startswith('RMSPROP'):
    options['clip_by_scaled_gradient_norm'] = pick(None, 0.5)
  shapes = [_SHAPES[i] for i in rng.choice(len(_SHAPES), size=rng.integers(2, 6), replace=False)]
  return options, {f'p{shape}': np.asarray(rng.normal(size=shape), np.float32) for shape in shapes}


def _compare(options, params, *, tolerance, num_steps=7, seed=0):
  """Run both; returns the last state."""
  rng = np.random.default_rng(seed)
  reference = shampoo_reference.Reference(params, **options)
  tx = optimizers.distributed_shampoo(**options).optax_optimizer
  state = tx.init(params)
  step = jax.jit(tx.update, compiler_options=_FAST_COMPILE)
  means = {name: rng.normal(size=param.shape) * 0.3 for name, param in params.items()}
  for t in range(num_steps):
    grads = {
      name: np.asarray(rng.normal(size=mean.shape) * 0.3 + mean, np.float32)
      for name, mean in means.items()
    }
    now = {name: np.asarray(param, np.float32) for name, param in reference.params.items()}
    updates, state = step(grads, state, now)
    for name, want in reference.step(grads).items():
      assert _relative(updates[name], want) < tolerance, (name, t, options)
  stats = state.stats.local_stats if options.get('shard_optimizer_states') else state.stats
  for name, want in reference.errors.items():
    np.testing.assert_allclose(
      stats[name].training_metrics.inverse_pth_root_errors, want, atol=2e-5, rtol=1e-2, err_msg=name
    )
  return state


@pytest.mark.parametrize(
  'seed', [seed if seed == 2 else pytest.param(seed, marks=pytest.mark.full) for seed in range(48)]
)
def test_equals_the_reference_for_random_options(seed):
  _compare(*_random_case(seed), tolerance=1e-4, seed=seed)


@pytest.mark.parametrize(
  'options',
  [
    {
      'best_effort_memory_usage_reduction': True,
      'batch_axis_name': 'batch',
      'graft_type': 'RMSPROP',
    },
    pytest.param(
      {'best_effort_memory_usage_reduction': True, 'graft_type': 'SQRT_N'}, marks=pytest.mark.full
    ),
    pytest.param(
      {'best_effort_memory_usage_reduction': True, 'shard_optimizer_states': True},
      marks=pytest.mark.full,
    ),
    pytest.param(
      {'quantize_statistics': True, 'preconditioning_compute_steps': 2}, marks=pytest.mark.full
    ),
  ],
)
def test_equals_the_reference_quantized(options):
  params = {f'p{shape}': np.ones(shape, np.float32) for shape in [(6, 4), (3,), ()]}
  # A value next to the middle between two integers may be rounded either way: one bucket of 127.
  _compare(
    {
      'learning_rate': 0.1,
      'block_size': 4,
      'start_preconditioning_step': 1,
      'matrix_epsilon': 1e-2,
      **options,
    },
    params,
    tolerance=2e-2 if options.get('best_effort_memory_usage_reduction') else 1e-3,
  )


@pytest.mark.parametrize(
  'options',
  [
    {},
    {'quantize_statistics': True},
    pytest.param({'shard_optimizer_states': True}, marks=pytest.mark.full),
  ],
)
def test_roots_are_taken_at_the_interval_only(options):
  """Inside a scan, where structure, shapes and dtypes cannot change."""
  params = {'w': np.ones((6, 4), np.float32)}
  tx = optimizers.distributed_shampoo(
    0.1, 4, preconditioning_compute_steps=3, matrix_epsilon=1e-2, **options
  ).optax_optimizer
  grads = {'w': np.random.default_rng(0).normal(size=(5, 6, 4)).astype(np.float32)}

  def body(state, grad):
    _, state = tx.update(grad, state, params)
    stats = state.stats.global_stats if 'shard_optimizer_states' in options else state.stats['w']
    return state, jax.tree.leaves((stats.preconditioners, stats.statistics))

  start = tx.init(params)
  _, history = jax.jit(lambda: jax.lax.scan(body, start, grads), compiler_options=_FAST_COMPILE)()
  half = len(history) // 2
  for count in range(1, 5):
    is_same = [np.array_equal(leaf[count], leaf[count - 1]) for leaf in history]
    assert all(is_same[:half]) == (count != 3) and not all(is_same[half:])


def test_one_cpu_holds_the_products_of_one_parameter_at_a_time(monkeypatch):
  size, num_arrays = 256, 16

  def temporary_arrays():
    def accumulate(sums, arrays, count):
      results, done = [], []
      for old, array in zip(sums, arrays, strict=True):
        array = update.in_sequence(array, done, count)
        product = array @ array.T
        done = [product[0, 0]]
        results.append(0.9 * old + product)
      return results

    arrays = [jax.ShapeDtypeStruct((size, size), np.float32)] * num_arrays
    compiled = jax.jit(accumulate, donate_argnums=0).lower(arrays, arrays, 0).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * size * size)

  in_sequence = temporary_arrays()
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert in_sequence < 4 < num_arrays <= temporary_arrays()


@pytest.mark.full  # by default, test_root_plan.py compares batches of roots with single ones
@pytest.mark.parametrize(
  'options',
  [
    {},
    *(
      pytest.param({name: True}, marks=pytest.mark.full)
      for name in ('shard_optimizer_states', 'quantize_statistics')
    ),
  ],
)
def test_the_order_of_the_parameters_changes_no_number(options, monkeypatch):
  params = {
    name: np.ones(shape, np.float32)
    for name, shape in {'a': (6, 4), 'b': (5,), 'c': (), 'd': (8, 8)}.items()
  }
  rng = np.random.default_rng(0)
  grads = [
    {name: rng.normal(size=param.shape).astype(np.float32) for name, param in params.items()}
    for _ in range(3)
  ]
  grads[1]['a'][0, 0] = np.nan
  results = []
  for backend in ('cpu', 'gpu'):
    monkeypatch.setattr(jax, 'default_backend', lambda backend=backend: backend)
    tx = optimizers.distributed_shampoo(
      0.1,
      4,
      start_preconditioning_step=0,
      preconditioning_compute_steps=3,
      root_method='eigh',
      **options,
    )
    tx = tx.optax_optimizer
    state = tx.init(params)
    step = jax.jit(lambda *args, tx=tx: tx.update(*args), compiler_options=_FAST_COMPILE)
    for grad in grads:
      updates, state = step(grad, state, params)
    results.append((updates, state))
  # A NaN in one parameter does not affect the others.
  assert np.isnan(updates['a']).any() and all(np.isfinite(updates[name]).all() for name in 'bcd')
  for got, want in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'options',
  [
    {
      'spread_roots': True,
      'preconditioning_compute_steps': 3,
      'graft_type': 'RMSPROP',
      'weight_decay': 0.1,
      'clip_by_scaled_gradient_norm': 0.5,
    },
    {'shard_optimizer_states': True, 'preconditioning_compute_steps': 2, 'graft_type': 'SQRT_N'},
    *(
      pytest.param({'graft_type': 'ADAGRAD_NORMALIZED', **options}, marks=pytest.mark.full)
      for options in (
        {},
        {'shard_optimizer_states': True, 'spread_roots': True, 'preconditioning_compute_steps': 4},
        {'quantize_statistics': True, 'statistics_compute_steps': 2},
      )
    ),
  ],
)
def test_layers_in_stacked_arrays_train_as_single_layers(options):
  rng = np.random.default_rng(0)
  stacks = LayerStacks((('encoder', (2, 10)),))

  def draw():
    def layer():
      return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in {'kernel': (6, 4), 'scale': (3,)}.items()
      }

    return {'encoder': {f'layers_{i}': layer() for i in (2, 3, 10)}}

  single = optimizers.distributed_shampoo(
    0.1, 4, start_preconditioning_step=2, matrix_epsilon=1e-2, **options
  ).create(draw())
  stacked = stacks.stack(single)
  assert set(stacked.target['encoder']) == {'layers_2,10', 'layers_3'}
  update = jax.jit(
    lambda optimizer, grads: optimizer.apply_gradient(grads), compiler_options=_FAST_COMPILE
  )
  for step in range(6):
    grads = draw()
    if step == 5:  # the other layers do not get the NaN
      grads['encoder']['layers_2']['kernel'] = jnp.full([6, 4], jnp.nan)
    single, stacked = update(single, grads), update(stacked, stacks.stack(grads))
    got = stacks.unstack(stacked)
    assert jax.tree.structure(got) == jax.tree.structure(single)
    for (path, a), b in zip(tree_utils.named_leaves(got), jax.tree.leaves(single), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f'{path} after step {step}')
  assert np.isfinite(got.target['encoder']['layers_10']['kernel']).all()
  metrics = [optimizer.optimizer_def.metrics(optimizer.state) for optimizer in (single, stacked)]
  np.testing.assert_allclose(*(list(values.values()) for values in metrics), rtol=1e-5)


def test_parameters_are_needed_for_weight_decay_alone():
  grads = {'w': jnp.full([4, 4], 0.5)}
  tx = optimizers.distributed_shampoo(0.1, 4).optax_optimizer
  assert jax.eval_shape(tx.update, grads, tx.init(grads))[0]['w'].dtype == jnp.float32
  tx = optimizers.distributed_shampoo(0.1, 4, weight_decay=0.1).optax_optimizer
  with pytest.raises(ConfigError, match='weight_decay` needs the parameters'):
    tx.update(grads, tx.init(grads))


def test_metrics_are_those_of_the_preconditioned_parameters():
  params = {'w': jnp.ones([4, 6]), 's': jnp.float32(1.0)}
  optimizer = optimizers.distributed_shampoo(0.1, 4).create(params)
  stats = optimizer.state.param_states.stats
  errors = jnp.array([1e-6, 0.5, 2e-6, 0.0])
  stats = {
    **stats,
    'w': stats['w']._replace(
      training_metrics=stats['w'].training_metrics.replace(inverse_pth_root_errors=errors)
    ),
  }
  state = optimizer.state.replace(param_states=optimizer.state.param_states._replace(stats=stats))
  values = optimizer.optimizer_def.metrics(state)
  np.testing.assert_allclose(
    [values['root_error_max'], values['root_error_mean']], [0.5, 0.1250008], rtol=1e-5
  )
  assert '0.5 at most' in optimizer.optimizer_def.report(values)[0]
  scalars = optimizers.distributed_shampoo(0.1, 4).create({'s': jnp.float32(1.0)})
  assert (
    scalars.optimizer_def.metrics(scalars.state) == {} and scalars.optimizer_def.report({}) == []
  )
