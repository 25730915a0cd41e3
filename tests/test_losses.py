"""Losses: T5X's recorded numbers, gradients against plain implementations, and the residuals of the backward pass."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import losses
from tests import golden_data

GOLDEN, ARRAYS = golden_data.load('t5x/losses')


def plain_cross_entropy(logits, targets, z_loss):
  """Cross entropy and z-loss straight from their definitions, left to autodiff."""
  logits = logits.astype(jnp.float32)
  z = z_loss * jnp.square(jax.scipy.special.logsumexp(logits, axis=-1))
  return z - jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1), z


def smoothed_one_hot(ids, vocab_size, label_smoothing):
  one_hot = jax.nn.one_hot(ids, vocab_size)
  return one_hot * (1.0 - label_smoothing) + (1.0 - one_hot) * label_smoothing / (vocab_size - 1)


def random_case(shape=(3, 5), vocab_size=17, scale=3.0, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  logits = jnp.asarray(rng.normal(size=(*shape, vocab_size)) * scale, dtype)
  ids = jnp.asarray(rng.integers(0, vocab_size, shape), jnp.int32)
  weights = jnp.asarray(rng.uniform(size=shape), jnp.float32)
  return logits, ids, weights


# ---------------------------------------------------------------------------------------------------------------------
# T5X's numbers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('index', range(len(GOLDEN['cases'])))
def test_weighted_cross_entropy_equals_t5x(index):
  case = GOLDEN['cases'][index]
  batch = {'decoder_target_tokens': jnp.asarray(ARRAYS['targets'])}
  if case['weights_given']:
    batch['decoder_loss_weights'] = jnp.asarray(ARRAYS['weights'])
  if case['packed']:
    batch['decoder_segment_ids'] = jnp.asarray(ARRAYS['segment_ids'])
    batch['decoder_positions'] = jnp.asarray(ARRAYS['positions'])
  factor, weights = losses.get_loss_normalizing_factor_and_weights(case['lnf'], batch)
  if case['factor'] is None:
    assert factor is None
  else:
    np.testing.assert_allclose(factor, case['factor'], rtol=1e-6)
  if f'case{index}/weights' in ARRAYS:
    np.testing.assert_allclose(weights, ARRAYS[f'case{index}/weights'], rtol=1e-6)
  else:
    assert weights is None
  result = losses.compute_weighted_cross_entropy(
    jnp.asarray(ARRAYS['logits']),
    batch['decoder_target_tokens'],
    weights,
    GOLDEN['label_smoothing'],
    GOLDEN['z_loss'],
    factor,
  )
  expected = [case[name] for name in ('loss', 'z_loss', 'weight_sum')]
  np.testing.assert_allclose(result, expected, rtol=GOLDEN['tol']['rtol'])


def test_gradient_equals_t5x():
  gradient = jax.jit(
    jax.grad(
      lambda logits: losses.compute_weighted_cross_entropy(
        logits, jnp.asarray(ARRAYS['targets']), jnp.asarray(ARRAYS['weights']), 0.1, 1e-3
      )[0]
    )
  )
  np.testing.assert_allclose(
    gradient(jnp.asarray(ARRAYS['logits'])),
    ARRAYS['dlogits_ls0.1_z1e-3_weights'],
    rtol=1e-5,
    atol=1e-6,
  )


# ---------------------------------------------------------------------------------------------------------------------
# Values and gradients against definitions
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'shape, label_smoothing, z_loss',
  [
    ((3, 5), 0.0, 0.0),
    ((3, 5), 0.1, 0.0),
    ((3, 5), 0.0, 1e-2),
    ((3, 5), 0.1, 1e-2),
    ((4,), 0.9, 1e-2),
    ((), 0.1, 0.3),
  ],
)
def test_token_cross_entropy_equals_its_definition(shape, label_smoothing, z_loss):
  logits, ids, weights = random_case(shape)

  def ours(logits):
    loss, z = losses.token_cross_entropy(
      logits, ids, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return jnp.sum(loss * weights), (loss, z)

  def plain(logits):
    loss, z = plain_cross_entropy(
      logits, smoothed_one_hot(ids, logits.shape[-1], label_smoothing), z_loss
    )
    return jnp.sum(loss * weights), (loss, z)

  (_, values), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(logits)
  (_, expected_values), expected_gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(logits)
  np.testing.assert_allclose(values, expected_values, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  'which, z_loss', [('loss', 0.0), ('loss', 1e-2), ('z', 1e-2), ('both', 1e-2)]
)
def test_both_outputs_are_differentiable_in_logits_and_targets(which, z_loss):
  logits, ids, weights = random_case()
  rng = np.random.default_rng(1)
  # Neither one-hot nor normalised: the derivative must not assume a distribution.
  targets = jnp.asarray(rng.uniform(size=logits.shape), jnp.float32)
  pick = {'loss': (1.0, 0.0), 'z': (0.0, 1.0), 'both': (1.0, -0.5)}[which]

  def total(values):
    return sum(share * jnp.sum(value * weights) for share, value in zip(pick, values, strict=True))

  def gradients(fn):
    return jax.jit(jax.grad(lambda x, t: total(fn(x, t, z_loss)), argnums=(0, 1)))(logits, targets)

  for ours, expected in zip(
    gradients(losses.cross_entropy_with_logits), gradients(plain_cross_entropy), strict=True
  ):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)

  by_ids = jax.jit(
    jax.grad(
      lambda x: total(losses.token_cross_entropy(x, ids, label_smoothing=0.1, z_loss=z_loss))
    )
  )(logits)
  smoothed = smoothed_one_hot(ids, logits.shape[-1], 0.1)
  expected = jax.jit(jax.grad(lambda x: total(plain_cross_entropy(x, smoothed, z_loss))))(logits)
  np.testing.assert_allclose(by_ids, expected, rtol=1e-5, atol=1e-6)


def test_soft_targets_give_the_values_of_the_definition():
  logits, ids, _ = random_case()
  targets = smoothed_one_hot(ids, logits.shape[-1], 0.3)
  np.testing.assert_allclose(
    losses.cross_entropy_with_logits(logits, targets, 1e-3),
    plain_cross_entropy(logits, targets, 1e-3),
    rtol=1e-5,
  )


@pytest.mark.parametrize('ids', [-1, 17, 400])
def test_an_id_outside_of_the_vocabulary_counts_as_a_one_hot_row_of_zeros(ids):
  logits, _, _ = random_case(shape=(2,))
  ids = jnp.full((2,), ids, jnp.int32)
  fns = [
    lambda x: jnp.sum(losses.token_cross_entropy(x, ids, label_smoothing=0.2, z_loss=1e-2)[0]),
    lambda x: jnp.sum(plain_cross_entropy(x, smoothed_one_hot(ids, 17, 0.2), 1e-2)[0]),
  ]
  (ours, ours_gradient), (expected, expected_gradient) = (
    jax.jit(jax.value_and_grad(fn))(logits) for fn in fns
  )
  assert float(ours) == pytest.approx(float(expected), rel=1e-5)
  np.testing.assert_allclose(ours_gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_ids_of_a_narrow_dtype_reach_every_position_of_a_larger_vocabulary():
  logits = random_case(shape=(2,), vocab_size=300)[0]
  gradient = jax.jit(jax.grad(lambda x, ids: jnp.sum(losses.token_cross_entropy(x, ids)[0])))
  np.testing.assert_array_equal(
    gradient(logits, jnp.asarray([3, 200], jnp.uint8)),
    gradient(logits, jnp.asarray([3, 200], jnp.int32)),
  )


@pytest.mark.parametrize('soft', [True, False])
def test_bfloat16_logits_are_computed_in_float32(soft):
  logits, ids, weights = random_case(vocab_size=600, dtype=jnp.bfloat16)
  targets = smoothed_one_hot(ids, 600, 0.1)

  def fn(logits):
    if soft:
      loss, z = losses.cross_entropy_with_logits(logits, targets, 1e-3)
    else:
      loss, z = losses.token_cross_entropy(logits, ids, label_smoothing=0.1, z_loss=1e-3)
    assert loss.dtype == z.dtype == jnp.float32
    return jnp.sum(loss * weights), loss

  step = jax.jit(jax.value_and_grad(fn, has_aux=True))
  (_, loss), gradient = step(logits)
  (_, expected), expected_gradient = step(logits.astype(jnp.float32))
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  assert gradient.dtype == jnp.bfloat16
  np.testing.assert_array_equal(gradient, expected_gradient.astype(jnp.bfloat16))


def test_large_logits_stay_accurate():
  logits = jnp.asarray([[1e4, 1e4 - 1.0, -1e4], [3e38, 0.0, -3e38]], jnp.float32)
  ids = jnp.asarray([1, 0], jnp.int32)

  def fn(x):
    return jnp.sum(losses.token_cross_entropy(x, ids)[0])

  value, gradient = jax.jit(jax.value_and_grad(fn))(logits)
  assert float(value) == pytest.approx(float(np.log1p(np.e)), rel=1e-6)
  softmax = 1.0 / (1.0 + np.e)
  np.testing.assert_allclose(
    gradient, [[1 - softmax, softmax - 1, 0], [0, 0, 0]], rtol=1e-6, atol=1e-7
  )


def test_perfect_smoothed_prediction_has_loss_zero():
  vocab_size, label_smoothing = 9, 0.1
  ids = jnp.asarray([[2, 3, 4]], jnp.int32)
  logits = jnp.log(smoothed_one_hot(ids, vocab_size, label_smoothing))
  loss, _, weight_sum = losses.compute_weighted_cross_entropy(
    logits, ids, label_smoothing=label_smoothing
  )
  assert float(loss) == pytest.approx(0.0, abs=1e-5)
  assert float(weight_sum) == 3.0


# ---------------------------------------------------------------------------------------------------------------------
# Memory and sharding
# ---------------------------------------------------------------------------------------------------------------------


def num_logits_sized_residuals(fn, logits):
  """Count the arrays, apart from `logits`, of logits' size that wait for the backward pass."""
  _, backward = jax.vjp(fn, logits)
  residuals = [leaf for leaf in jax.tree.leaves(backward) if leaf.size >= logits.size]
  return sum(not np.array_equal(leaf, logits) for leaf in residuals), len(residuals)


@pytest.mark.parametrize('label_smoothing', [0.0, 0.1])
def test_backward_pass_keeps_nothing_of_the_logits_size_but_the_logits(label_smoothing):
  logits, ids, weights = random_case(vocab_size=50)

  def ours(x):
    return losses.compute_weighted_cross_entropy(x, ids, weights, label_smoothing, 1e-4)[0]

  targets = smoothed_one_hot(ids, 50, label_smoothing)

  def plain(x):
    return jnp.sum(plain_cross_entropy(x, targets, 1e-4)[0] * weights)

  assert num_logits_sized_residuals(ours, logits) == (0, 1)
  assert num_logits_sized_residuals(plain, logits)[0] >= 1


def test_compiled_memory_is_below_that_of_the_definition():
  logits = jax.ShapeDtypeStruct((4, 64, 4096), jnp.float32)
  ids = jax.ShapeDtypeStruct((4, 64), jnp.int32)

  def ours(x, ids):
    return jnp.sum(losses.token_cross_entropy(x, ids, label_smoothing=0.1, z_loss=1e-4)[0])

  def plain(x, ids):
    return jnp.sum(plain_cross_entropy(x, smoothed_one_hot(ids, 4096, 0.1), 1e-4)[0])

  def temporaries(fn):
    # A network's logits are themselves a temporary, so both start from one.
    step = jax.jit(jax.grad(lambda x, ids: fn(jnp.tanh(x), ids)))
    return step.lower(logits, ids).compile().memory_analysis().temp_size_in_bytes

  assert temporaries(ours) < temporaries(plain)


def test_vocabulary_sharded_logits_are_not_gathered():
  mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
  logits, ids, weights = random_case(shape=(8, 6), vocab_size=64)
  fn = jax.value_and_grad(
    lambda x, ids: losses.compute_weighted_cross_entropy(x, ids, weights, 0.1, 1e-3)[0]
  )
  sharding = NamedSharding(mesh, P('data', None, 'model'))
  step = jax.jit(
    fn, in_shardings=(sharding, NamedSharding(mesh, P('data'))), out_shardings=(None, sharding)
  )
  hlo = step.lower(logits, ids).compile().as_text()
  collectives = re.findall(
    r'= (.*?) (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(', hlo
  )
  assert collectives
  for shape, name in collectives:
    assert name == 'all-reduce', (name, shape)
    # Two rows of six positions on each device: per-position numbers travel, logits do not.
    assert all(
      np.prod([int(n) for n in dims.split(',') if n]) <= 12
      for dims in re.findall(r'\[([\d,]*)\]', shape)
    )
  value, gradient = step(logits, ids)
  expected_value, expected_gradient = jax.jit(fn)(logits, ids)
  assert float(value) == pytest.approx(float(expected_value), rel=1e-6)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Normalising factors and errors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name',
  [
    'NUM_REAL_TARGET_TOKENS',
    'num_total_target_tokens',
    'Average_Per_Sequence',
    ' AVERAGE_PER_SEQUENCE ',
  ],
)
def test_names_of_special_factors_in_any_case(name):
  member = losses.convert_special_loss_normalizing_factor_to_enum(name)
  assert member is losses.SpecialLossNormalizingFactor[name.strip().upper()]
  batch = {'decoder_target_tokens': jnp.asarray([[3, 1, 0], [4, 5, 1]])}
  by_name, by_member = (
    losses.get_loss_normalizing_factor_and_weights(f, batch) for f in (name, member)
  )
  jax.tree.map(np.testing.assert_array_equal, by_name, by_member)


def test_average_per_sequence_averages_segments_and_ignores_empty_rows():
  batch = {
    'decoder_target_tokens': jnp.asarray([[3, 1, 4, 5, 6, 1], [7, 1, 0, 0, 0, 0], [0] * 6]),
    'decoder_segment_ids': jnp.asarray([[1, 1, 2, 2, 2, 2], [1, 1, 0, 0, 0, 0], [0] * 6]),
  }
  factor, weights = losses.get_loss_normalizing_factor_and_weights('AVERAGE_PER_SEQUENCE', batch)
  expected = [[0.5, 0.5, 0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0, 0, 0], [0] * 6]
  np.testing.assert_allclose(weights, expected)
  assert float(factor) == 3.0
  del batch['decoder_segment_ids']
  factor, weights = losses.get_loss_normalizing_factor_and_weights('AVERAGE_PER_SEQUENCE', batch)
  np.testing.assert_allclose(weights[0], [1 / 6] * 6)
  assert float(factor) == pytest.approx(2.0)


def test_average_per_sequence_counts_no_padding_that_has_weights():
  rng = np.random.default_rng(0)
  # Two and one sequences with padding behind them, a full row, a row of padding alone: 4 sequences.
  segment_ids = np.asarray([[1, 1, 1, 2, 2, 0, 0], [1, 1, 0, 0, 0, 0, 0], [1] * 7, [0] * 7])
  targets, given = (
    np.where(segment_ids > 0, 5, 0),
    rng.uniform(0.5, 2.0, segment_ids.shape).astype(np.float32),
  )
  batch = {
    'decoder_target_tokens': targets,
    'decoder_loss_weights': given,
    'decoder_segment_ids': segment_ids,
  }
  batch = jax.tree.map(jnp.asarray, batch)
  factor, weights = losses.get_loss_normalizing_factor_and_weights('AVERAGE_PER_SEQUENCE', batch)
  expected = np.zeros_like(given)
  for row, segment in {
    (row, segment) for row, ids in enumerate(segment_ids) for segment in ids if segment
  }:
    places = segment_ids[row] == segment
    expected[row, places] = given[row, places] / given[row, places].sum()
  np.testing.assert_allclose(weights, expected, rtol=1e-6)
  assert float(factor) == pytest.approx(4.0)
  # By hand: T5X divides by 3 here, and by 4 if the padding of the second row were a sequence.
  batch = {
    'decoder_target_tokens': jnp.asarray([[3, 1, 4, 1], [5, 1, 0, 0]]),
    'decoder_segment_ids': jnp.asarray([[1, 1, 2, 2], [1, 1, 0, 0]]),
    'decoder_loss_weights': jnp.full([2, 4], 2.0),
  }
  factor, weights = losses.get_loss_normalizing_factor_and_weights('AVERAGE_PER_SEQUENCE', batch)
  np.testing.assert_array_equal(weights, [[0.5] * 4, [0.5, 0.5, 0, 0]])
  assert float(factor) == 3.0


@pytest.mark.parametrize('factor', losses.SpecialLossNormalizingFactor)
@pytest.mark.parametrize('given_weights', [True, False])
def test_a_batch_of_padding_has_loss_and_gradient_zero(factor, given_weights):
  batch = {'decoder_target_tokens': jnp.zeros((2, 3), jnp.int32)}
  if given_weights:
    batch['decoder_loss_weights'] = jnp.zeros((2, 3), jnp.float32)

  def loss_fn(logits):
    resolved, weights = losses.get_loss_normalizing_factor_and_weights(factor, batch)
    return losses.compute_weighted_cross_entropy(
      logits, batch['decoder_target_tokens'], weights, 0.1, 1e-3, resolved
    )[0]

  loss, gradient = jax.jit(jax.value_and_grad(loss_fn))(random_case((2, 3))[0])
  assert float(loss) == 0.0
  np.testing.assert_array_equal(gradient, 0.0)


def test_factor_may_be_traced():
  logits, ids, weights = random_case()
  fn = jax.jit(
    lambda factor: losses.compute_weighted_cross_entropy(logits, ids, weights, 0.0, 1e-3, factor)[
      :2
    ]
  )
  whole = losses.compute_weighted_cross_entropy(logits, ids, weights, 0.0, 1e-3)[:2]
  np.testing.assert_allclose(fn(4.0), np.asarray(whole) / 4.0, rtol=1e-6)


def test_targets_that_are_not_ids_are_rejected():
  with pytest.raises(errors.ConfigError, match='dtype float32.*cross_entropy_with_logits'):
    losses.token_cross_entropy(jnp.zeros((2, 3)), jnp.zeros((2,)))


def test_an_unknown_factor_is_rejected_with_the_nearest_name():
  with pytest.raises(errors.ConfigError, match="Did you mean 'AVERAGE_PER_SEQUENCE'"):
    losses.convert_special_loss_normalizing_factor_to_enum('average_per_sequense')


@pytest.mark.parametrize(
  'targets, weights, message',
  [
    ((2, 3, 7), (2, 3), 'For one-hot targets'),
    ((2, 4), None, r'\(2, 3, 7\)'),
    ((2, 3), (2,), r'got the shapes .*, \(2,\)'),
  ],
)
def test_shapes_that_do_not_match_are_rejected(targets, weights, message):
  with pytest.raises(errors.ConfigError, match=message):
    losses.compute_weighted_cross_entropy(
      jnp.zeros((2, 3, 7)),
      jnp.zeros(targets, jnp.int32),
      None if weights is None else jnp.ones(weights),
    )
