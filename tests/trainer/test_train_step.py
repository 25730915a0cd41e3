"""The training step: accumulation equals the large batch, mutables and seams are honoured, metrics are right."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax
import pytest

from t5x_lite import data
from t5x_lite import metrics as metrics_lib
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite import train_state as train_state_lib
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.networks import t5
from t5x_lite.optimizers.base import rounding
from t5x_lite.trainer import train_step
from tests.models import toy_model


def _values(metrics):
  metrics = metrics_lib.set_time_metrics_duration(jax.device_get(metrics), 2.0)
  return {name: float(metric.compute()) for name, metric in metrics.items()}


def _assert_close(got, expected, bar):
  """Compares trees to `bar` times each tensor's norm."""
  for (name, a), (_, b) in zip(
    tree_utils.named_leaves(got), tree_utils.named_leaves(expected), strict=True
  ):
    error, norm = (
      np.linalg.norm(np.asarray(a, np.float64) - b),
      np.linalg.norm(np.asarray(b, np.float64)),
    )
    assert error <= bar * norm, f'{name}: {error / norm:.2g} of its norm'


# Programs that run once are not worth optimising.
_FAST_COMPILE = {'xla_backend_optimization_level': 0}


@functools.partial(jax.jit, static_argnums=(0, 3), compiler_options=_FAST_COMPILE)
def _grads(model, state, batch, num_microbatches, rng=None):
  return train_step.accumulate_grads_microbatched(model, state, batch, rng, num_microbatches)


_make_state = functools.cache(toy_model.make_state)


def _step(model, state, batch, learning_rate, **kwargs):
  fn = functools.partial(
    train_step.train_with_lr, model=model, **{'num_microbatches': None, **kwargs}
  )
  return jax.jit(fn, compiler_options=_FAST_COMPILE)(state, batch, learning_rate, None)


@pytest.mark.parametrize(
  'factor, packed, num_microbatches',
  [
    *((factor, False, 8) for factor in (None, 'NUM_REAL_TARGET_TOKENS', 'AVERAGE_PER_SEQUENCE')),
    ('AVERAGE_PER_SEQUENCE', True, 2),
    *(
      pytest.param(*case, marks=pytest.mark.full)
      for case in (
        ('NUM_TOTAL_TARGET_TOKENS', False, 8),
        ('NUM_REAL_TARGET_TOKENS', True, 2),
        ('NUM_TOTAL_TARGET_TOKENS', True, 2),
      )
    ),
  ],
)
def test_accumulation_equals_the_large_batch(factor, packed, num_microbatches):
  model = toy_model.make_model(
    sows=True, z_loss=1e-2, label_smoothing=0.1, loss_normalizing_factor=factor
  )
  state, batch = _make_state(model), toy_model.make_batch(packed=packed)
  grads, metrics, _ = _grads(model, state, batch, num_microbatches)
  expected_grads, expected_metrics, _ = _grads(model, state, batch, None)
  _assert_close(grads, expected_grads, 3e-6)
  got, expected = _values(metrics), _values(expected_metrics)
  assert got.keys() == expected.keys() and 'activity' in got
  for name in expected:
    assert got[name] == pytest.approx(expected[name], rel=3e-6), name


@pytest.mark.full  # by default, the toy model above and those of tests/moe/test_microbatches.py
def test_accumulation_of_a_t5():
  vocabulary = data.PassThroughVocabulary(64, eos_id=1)
  network = t5.Transformer(
    t5.T5Config(
      vocab_size=64,
      emb_dim=16,
      num_heads=2,
      num_encoder_layers=1,
      num_decoder_layers=1,
      head_dim=8,
      mlp_dim=32,
      mlp_activations=('gelu', 'linear'),
      dropout_rate=0.0,
    )
  )
  model = models.EncoderDecoderModel(
    network,
    vocabulary,
    vocabulary,
    optimizers.adamw(),
    z_loss=1e-4,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )
  batch = toy_model.make_batch(length=8)
  state = jax.jit(
    lambda: train_state_lib.FlaxOptimTrainState.create(
      model.optimizer_def,
      model.get_initial_variables(jax.random.key(0), {k: v.shape for k, v in batch.items()}),
    )
  )()
  grads, metrics, _ = _grads(model, state, batch, 4)
  expected_grads, expected_metrics, _ = _grads(model, state, batch, None)
  _assert_close(grads, expected_grads, 3e-6)
  assert _values(metrics) == pytest.approx(_values(expected_metrics), rel=3e-6)


def test_the_test_above_would_see_a_blind_sum():
  """Normalisers differ between the micro-batches of that batch: adding up their gradients as they are is far off."""
  model = toy_model.make_model(loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  state, batch = _make_state(model), toy_model.make_batch()
  expected, _, _ = _grads(model, state, batch, None)
  parts = [_grads(model, state, {k: v[i::2] for k, v in batch.items()}, None)[0] for i in range(2)]
  with pytest.raises(AssertionError, match='embedding: .* of its norm'):
    _assert_close(jax.tree.map(lambda a, b: (a + b) / 2, *parts), expected, 1e-3)


def test_mutables_pass_through_the_microbatches():
  model = toy_model.make_model(counts=True)
  state, batch = _make_state(model), toy_model.make_batch()
  total = float(batch['decoder_input_tokens'].sum())
  for num_microbatches in (None, 4):
    _, _, mutables = _grads(model, state, batch, num_microbatches)
    assert float(mutables['counters']['seen']) == total
  new_state, _ = _step(model, state, batch, jnp.float32(0.1), num_microbatches=4)
  assert float(new_state.flax_mutables['counters']['seen']) == total
  assert 'loss' in jax.jit(functools.partial(train_step.eval_step, model))(new_state, batch)


@pytest.mark.parametrize('counts', [False, True])
def test_evaluation_takes_the_parameters_to_evaluate(counts):
  model = toy_model.make_model(counts=counts)
  state, batch = _make_state(model), toy_model.make_batch()

  def evaluate(state):
    # A function for each class of states: for JAX 0.10.2, dataclasses with the same fields have equal tree structures,
    # so one function sometimes runs the program of the other class.
    step = jax.jit(functools.partial(train_step.eval_step, model), compiler_options=_FAST_COMPILE)
    return _values(step(state, batch))

  double = toy_model.evaluates_double(state)
  assert evaluate(double) == evaluate(state.replace_params(double.eval_params))


def test_microbatches_draw_different_dropout_and_repeat_exactly():
  model = toy_model.make_model(dropout_rate=0.5)
  state = toy_model.make_state(model)
  row = {name: np.repeat(x[-1:], 4, axis=0) for name, x in toy_model.make_batch().items()}
  first, _, _ = _grads(model, state, row, 4, jax.random.key(1))
  again, _, _ = _grads(model, state, row, 4, jax.random.key(1))
  other, _, _ = _grads(model, state, row, 4, jax.random.key(2))
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))
  assert not np.array_equal(first['hidden'], other['hidden'])
  # Micro-batch i has the masks of the key folded with i, and of no other.
  parts = [
    _grads(
      model,
      state,
      {k: x[:1] for k, x in row.items()},
      None,
      jax.random.fold_in(jax.random.key(1), i),
    )[0]
    for i in range(4)
  ]
  _assert_close(first, jax.tree.map(lambda *grads: sum(grads), *parts), 3e-6)
  assert not np.allclose(parts[0]['hidden'], parts[1]['hidden'], rtol=1e-2)
  value_fn = train_step.make_value_fn(model, state, row, jax.random.key(1), 4)
  _assert_close(
    jax.jit(jax.grad(value_fn), compiler_options=_FAST_COMPILE)(state.params), first, 3e-6
  )


@pytest.mark.parametrize(
  'spec, rows_together',
  [(PartitionSpec('data'), 1), (PartitionSpec(('data', 'model')), 1), (PartitionSpec('data'), 2)],
)
def test_splitting_moves_no_row(spec, rows_together):
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  batch = {'x': jnp.arange(16 * 3).reshape(16, 3)}
  split = partitioner.partition(
    functools.partial(
      train_step.split_microbatches,
      num_microbatches=2,
      data_partition_spec=spec,
      rows_together=rows_together,
    ),
    in_axis_resources=(spec,),
    out_axis_resources=PartitionSpec(None, *spec),
  )
  text = split.lower(batch).compile().as_text()
  assert not any(
    op in text for op in ('all-to-all', 'all-gather', 'collective-permute', 'all-reduce')
  )
  out = split(batch)['x']
  rows = np.asarray(out)[..., 0] // 3
  assert sorted(rows.ravel().tolist()) == list(range(16))
  assert (rows // rows_together % 2 == np.arange(2)[:, None]).all()
  sharded = jax.device_put(batch['x'], partitioner.get_shardings(spec))
  for before, after in zip(sharded.addressable_shards, out.addressable_shards, strict=True):
    assert before.device == after.device
    assert set(np.asarray(before.data).ravel().tolist()) == set(
      np.asarray(after.data).ravel().tolist()
    )


def test_accumulation_over_a_mesh():
  model = toy_model.make_model(loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  state, batch = _make_state(model), toy_model.make_batch()
  expected, _, _ = _grads(model, state, batch, None)
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  step = partitioner.partition(
    lambda s, b: train_step.accumulate_grads_microbatched(
      model, s, b, None, 2, partitioner.data_partition_spec
    )[0],
    in_axis_resources=(partitioner.get_mesh_axes(state), partitioner.data_partition_spec),
    out_axis_resources=None,
  )
  _assert_close(jax.device_get(step(state, batch)), jax.device_get(expected), 3e-6)


def test_a_batch_that_does_not_divide_is_rejected():
  with pytest.raises(
    ConfigError,
    match='10 rows cannot be divided into 4 micro-batches on 2 .*multiple of 8.*8 or 16',
  ):
    train_step.check_microbatches(10, 4, 2)
  with pytest.raises(ZeroDivisionError):  # `Trainer` checks the number
    train_step.check_microbatches(8, 0, 2)
  train_step.check_microbatches(16, 4, 2)
  train_step.check_microbatches(16, None, 8)
  with pytest.raises((TypeError, ValueError), match='cannot reshape array'):
    train_step.split_microbatches(toy_model.make_batch(), 3)


def test_the_update_sees_transformed_gradients_and_the_rate():
  model = toy_model.make_model()
  state, batch = _make_state(model), toy_model.make_batch()
  seen = {}

  def zero_embedding(grads):
    seen['grads'] = grads
    return {**grads, 'embedding': jnp.zeros_like(grads['embedding'])}

  new_state, metrics = _step(
    model, state, batch, jnp.float32(0.25), gradient_transform=zero_embedding
  )
  grads, _, _ = _grads(model, state, batch, None)
  assert seen['grads'].keys() == grads.keys()
  assert int(new_state.step) == 1
  # Adam's first step is the rate, in the direction of the gradient, where there is one.
  used = np.abs(np.asarray(grads['hidden'])) > 1e-4
  np.testing.assert_allclose(
    np.abs(new_state.params['hidden'] - state.params['hidden'])[used], 0.25, rtol=1e-2
  )
  assert np.max(np.abs(new_state.params['embedding'] - state.params['embedding'])) < 1e-3
  assert (
    float(metrics['learning_rate'].compute())
    == float(metrics['learning_rate/current'].compute())
    == 0.25
  )


@pytest.mark.parametrize(
  'optimizer_def, reported',
  [
    (optimizers.sgd(0.5), 0.5),
    (
      optimizers.OptaxWrapper(optax.sgd(0.5)),
      None,
    ),  # The rate is inside optax.sgd and cannot be read.
  ],
)
def test_the_rate_of_an_optimizer_that_has_its_own(optimizer_def, reported):
  model = toy_model.make_model(optimizer_def)
  state, batch = _make_state(model), toy_model.make_batch()
  new_state, metrics = _step(model, state, batch, None)
  grads, _, _ = _grads(model, state, batch, None)
  np.testing.assert_allclose(
    new_state.params['hidden'], state.params['hidden'] - 0.5 * grads['hidden'], rtol=1e-5, atol=1e-6
  )
  rates = {
    name: float(metric.compute())
    for name, metric in metrics.items()
    if name.startswith('learning_rate')
  }
  assert rates == (
    {} if reported is None else {'learning_rate': reported, 'learning_rate/current': reported}
  )


# ---- Clipping by the global norm -------------------------------------------------------------------------------------


def _random_tree(dtype=np.float32):
  rng = np.random.default_rng(0)
  return {
    'a': {'kernel': rng.normal(size=(7, 5)).astype(dtype)},
    'b': rng.normal(size=300).astype(dtype),
    'c': np.asarray(rng.normal(), dtype),
    'empty': np.zeros((0, 3), dtype),
  }


@pytest.mark.parametrize('share_of_norm', [0.01, 1.0, 1.5])
@pytest.mark.parametrize('jits', [False, True])
def test_clipped_gradients_are_optaxs_bitwise(share_of_norm, jits):
  tree = _random_tree()
  norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))
  max_norm = float(share_of_norm * norm)
  clip = functools.partial(train_step.clip_by_global_norm, max_norm=max_norm)
  transformation = optax.clip_by_global_norm(max_norm)
  theirs = functools.partial(transformation.update, state=transformation.init(tree))
  if jits:
    clip, theirs = jax.jit(clip), jax.jit(theirs)
  clipped, found = clip(tree)
  np.testing.assert_allclose(found, norm, rtol=1e-6)
  expected, _ = theirs(tree)
  jax.tree.map(np.testing.assert_array_equal, clipped, expected)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16, np.complex64])
def test_the_norm_is_computed_in_float32(dtype):
  # Sums of squares in bfloat16 would stop at 256, in float16 they would be infinite.
  tree = {'a': jnp.full(4096, 2.0, dtype), 'b': jnp.full((3, 5), 40.0, dtype)}
  expected = np.sqrt(4096 * 4.0 + 15 * 1600.0)
  clipped, norm = jax.jit(functools.partial(train_step.clip_by_global_norm, max_norm=0.5))(tree)
  assert norm.dtype == jnp.float32 and norm.shape == ()
  np.testing.assert_allclose(norm, expected, rtol=1e-6)
  for name, array in clipped.items():
    assert array.dtype == dtype
    kept = tree[name].ravel()[0] * 0.5 / expected
    np.testing.assert_array_equal(array, jnp.asarray(kept).astype(dtype))


def test_gradients_of_zeros_and_without_arrays_are_kept():
  zeros = jax.tree.map(jnp.zeros_like, _random_tree())
  clipped, norm = train_step.clip_by_global_norm(zeros, 1.0)
  assert float(norm) == 0
  jax.tree.map(np.testing.assert_array_equal, clipped, zeros)
  assert train_step.clip_by_global_norm({}, 1.0)[0] == {}


@pytest.mark.parametrize('num_microbatches', [None, 4])
@pytest.mark.parametrize('max_norm, share', [(0.01, 1.0), (1e6, 0.0)])
def test_a_clipped_step_is_that_of_an_optimizer_that_clips(num_microbatches, max_norm, share):
  batch = toy_model.make_batch()
  # Its updates are proportional to the gradients, and adamw's state holds their scale.
  for optimizer_def in (optimizers.sgd(momentum=0.9), optimizers.adamw()):
    plain = toy_model.make_model(optimizer_def)
    clipping = toy_model.make_model(
      optimizers.chain([optax.clip_by_global_norm(max_norm), optimizer_def])
    )
    options = {'num_microbatches': num_microbatches}
    ours, metrics = _step(
      plain, _make_state(plain), batch, 0.25, gradient_clip_norm=max_norm, **options
    )
    theirs, _ = _step(clipping, _make_state(clipping), batch, 0.25, **options)
    for a, b in zip(
      jax.tree.leaves((ours.params, ours.param_states)),
      jax.tree.leaves((theirs.params, theirs.param_states)),
      strict=True,
    ):
      np.testing.assert_array_equal(a, b)
    # The norm before clipping, of all micro-batches together.
    grads, _, _ = _grads(plain, _make_state(plain), batch, None)
    values = _values(metrics)
    np.testing.assert_allclose(values['gradient_norm'], optax.tree.norm(grads), rtol=1e-5)
    assert values['gradient_norm/clipped_share'] == share


def test_without_clipping_the_program_is_that_of_gradients_and_update():
  model = toy_model.make_model()
  state, batch = _make_state(model), toy_model.make_batch()

  def bare(state, batch, rate):
    _, grads, metrics, _ = train_step.accumulate_gradients(
      model, state, batch, None, None, PartitionSpec('data')
    )
    return train_step.apply_grads(state, grads, metrics, rate, None)

  def step(clip_norm):
    return functools.partial(
      train_step.train_with_lr,
      dropout_rng=None,
      model=model,
      num_microbatches=None,
      gradient_clip_norm=clip_norm,
    )

  programs = [
    str(jax.make_jaxpr(fn)(state, batch, jnp.float32(0.1))) for fn in (bare, step(None), step(1.0))
  ]
  assert programs[0] == programs[1] != programs[2]


@pytest.mark.parametrize('num_microbatches', [None, 2])
def test_frozen_parameters_do_not_count(num_microbatches):
  model = toy_model.make_model(
    optimizers.MultiOptimizer([('hidden', optimizers.sgd()), ('logits', optimizers.sgd())])
  )
  state, batch = _make_state(model), toy_model.make_batch()
  step_params = train_step.step_params_of(state, train_step.StepParams(), train_step.LayerStacks())
  assert step_params.frozen == {'embedding'}

  def spoil(grads):
    return {**grads, 'embedding': jnp.full_like(grads['embedding'], 1e6)}

  after, metrics = _step(
    model,
    state,
    batch,
    1.0,
    num_microbatches=num_microbatches,
    step_params=step_params,
    gradient_transform=spoil,
    gradient_clip_norm=0.01,
  )
  grads, _, _ = _grads(model, state, batch, None)
  # One norm over both parts of the optimizer.
  trained = {name: grads[name] for name in ('hidden', 'logits')}
  norm = optax.tree.norm(trained)
  np.testing.assert_allclose(_values(metrics)['gradient_norm'], norm, rtol=1e-5)
  for name, grad in trained.items():
    np.testing.assert_allclose(
      after.params[name], state.params[name] - grad / norm * 0.01, rtol=1e-5, atol=1e-7
    )
  np.testing.assert_array_equal(after.params['embedding'], state.params['embedding'])


@pytest.mark.parametrize('num_partitions', [1, 2, 4])
def test_clipping_on_eight_devices_is_that_on_one(num_partitions):
  model = toy_model.make_model(optimizers.sgd(), width=16)
  state, batch = _make_state(model), toy_model.make_batch(32)
  options = {'num_microbatches': 2, 'gradient_clip_norm': 0.01}
  expected, metrics = _step(model, state, batch, jnp.float32(1.0), **options)
  partitioner = partitioning.PjitPartitioner(num_partitions=num_partitions)
  axes = partitioner.get_mesh_axes(state)
  step = partitioner.partition(
    lambda s, b: train_step.train_with_lr(
      s,
      b,
      jnp.float32(1.0),
      None,
      model,
      data_partition_spec=partitioner.data_partition_spec,
      **options,
    ),
    in_axis_resources=(axes, partitioner.data_partition_spec),
    out_axis_resources=(axes, None),
  )
  found, sharded_metrics = step(state, batch)
  for a, b, before in zip(
    *map(jax.tree.leaves, (found.params, expected.params, state.params)), strict=True
  ):
    np.testing.assert_allclose(a - before, b - before, rtol=1e-3, atol=3e-7)
  assert np.isclose(
    _values(sharded_metrics)['gradient_norm'], _values(metrics)['gradient_norm'], rtol=1e-5
  )


@pytest.mark.parametrize('value', [np.nan, -np.inf, 1e25])
@pytest.mark.parametrize('action', ['skip', 'stop'])
def test_a_norm_that_is_not_finite_keeps_the_policy(value, action):
  """Finite gradients of 1e25 have a norm beyond float32, and would be clipped to zeros."""
  model = toy_model.make_model()
  state, batch = _make_state(model), toy_model.make_batch()

  def spoil(grads):
    return {**grads, 'hidden': grads['hidden'].at[0, 0].set(value)}

  after, metrics = _step(
    model,
    state,
    batch,
    0.25,
    gradient_transform=spoil,
    gradient_clip_norm=1.0,
    non_finite_action=action,
  )
  count = metrics['non_finite_steps']
  assert (float(count.loss), float(count.gradient)) == (0, 1)
  if action == 'skip':
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    assert int(after.step) == 1
    # Merged metrics pass over the step.
    assert float(metrics['gradient_norm'].total) == float(metrics['gradient_norm'].count) == 0


def test_an_optimizer_that_calls_for_gradients_gets_clipped_ones():

  def update(updates, state, params=None, *, grad, grad_fn, **extra_args):
    return jax.tree.map(lambda g, at: -(g + at), grad, grad_fn(params, 0)), state

  transformation = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  model = toy_model.make_model(optimizers.OptaxWrapper(transformation))
  state, batch = _make_state(model), toy_model.make_batch()
  after, _ = _step(model, state, batch, None, gradient_clip_norm=0.01)
  difference = jax.tree.map(jnp.subtract, state.params, after.params)
  np.testing.assert_allclose(optax.tree.norm(difference), 0.02, rtol=1e-4)


def test_weight_metrics():
  model = toy_model.make_model()
  state, batch = _make_state(model), toy_model.make_batch()
  state = state.replace_params({**state.params, 'hidden': state.params['hidden'].at[0].set(0.0)})
  schedule = schedules.create_learning_rate_scheduler('constant', base_learning_rate=0.1)
  new_state, metrics = _step(
    model, state, batch, schedule(0), weight_metrics_computer=train_step.WeightMetricsComputer()
  )
  grads, _, _ = _grads(model, state, batch, None)
  got = _values(metrics)

  def rms(x):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64))))

  squares = 0.0
  for name in state.params:
    old, new, grad = (
      np.asarray(s[name], np.float64) for s in (state.params, new_state.params, grads)
    )
    update = new - old
    with np.errstate(divide='ignore', invalid='ignore'):
      relative = np.where(old == 0, 0, update / old)
    squares += np.sum(grad**2)
    for metric, expected in (
      ('weight_rms', rms(new)),
      ('weight_gradient_rms', rms(grad)),
      ('weight_update_rms', rms(update)),
      ('weight_update_divided_by_weight_rms', rms(relative)),
      ('weight_max', np.abs(new).max()),
    ):
      assert got[f'{metric}/{name}'] == pytest.approx(expected, rel=1e-4), metric
  assert got['weight_gradient_norm'] == pytest.approx(np.sqrt(squares), rel=1e-5)


def test_stochastic_rounding_depends_on_the_key_of_the_step_but_not_on_dropout():
  optimizer_def = optimizers.with_update_options(
    optimizers.sgd(), param_dtype='bfloat16', stochastic_rounding=True
  )
  model = toy_model.make_model(optimizer_def)
  state, batch = toy_model.make_state(model), toy_model.make_batch()
  step = jax.jit(
    lambda key: train_step.train_with_lr(state, batch, jnp.float32(0.1), key, model, None)[0].params
  )
  first, again, other = (step(jax.random.key(seed)) for seed in (1, 1, 2))
  grads, _, _ = _grads(model, state, batch, None)
  expected = jax.jit(
    lambda key: state.apply_gradient(grads, 0.1, rounding_key=rounding.key_of_step(key)).params
  )(jax.random.key(1))
  jax.tree.map(np.testing.assert_array_equal, first, again)
  jax.tree.map(np.testing.assert_array_equal, first, expected)
  assert first['logits'].dtype == jnp.bfloat16 and np.any(first['logits'] != other['logits'])
  # Dropout folds the numbers of micro-batches into the same key.
  keys = [
    rounding.key_of_step(jax.random.key(1)),
    jax.random.key(1),
    *(jax.random.fold_in(jax.random.key(1), i) for i in range(8)),
  ]
  assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == len(keys)
  with pytest.raises(ConfigError, match='rounding_key'):
    train_step.train_with_lr(state, batch, jnp.float32(0.1), None, model, None)
