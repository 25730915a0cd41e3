"""Metrics of steps: counts, accuracy, weights, packed batches."""

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import metrics as metrics_lib
from t5x_lite import models
from tests.models import model_cases as cases


def compute(metrics, duration=2.0, num_steps=1):
  metrics = metrics_lib.set_step_metrics_num_steps(
    metrics_lib.set_time_metrics_duration(metrics, duration), num_steps
  )
  return {name: float(metric.compute()) for name, metric in metrics.items()}


def test_timing_metrics_count_rows_examples_and_tokens(batch):
  values = compute(
    jax.jit(cases.make_model().eval_fn)(cases.initial_params(), batch)[1], duration=2.0, num_steps=3
  )
  num_devices = jax.device_count()
  assert values['timing/seconds'] == 2.0
  assert values['timing/seqs'] == 4
  assert values['timing/seqs_per_second'] == 2.0
  assert values['timing/seqs_per_second_per_core'] == 2.0 / num_devices
  assert values['timing/steps_per_second'] == 1.5
  assert values['timing/target_tokens_per_second'] == 4 * 6 / 2
  assert values['timing/target_tokens_per_second_per_core'] == 4 * 6 / 2 / num_devices
  assert values['timing/tokens_per_second'] == (4 * 6 + 4 * 7) / 2
  assert values['timing/examples_per_second'] == 2.0


def test_metrics_of_a_packed_batch_count_its_examples():
  logits = jnp.zeros((2, 5, cases.VOCAB_SIZE))
  targets = jnp.asarray([[2, 1, 3, 1, 0], [4, 4, 4, 4, 1]])
  segment_ids = {
    'encoder': jnp.asarray([[1, 1, 2], [1, 1, 0]]),
    'decoder': jnp.asarray([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]]),
  }
  mask = (targets > 0).astype(jnp.float32)
  metrics = jax.jit(models.compute_base_metrics)(
    logits, targets, mask, jnp.float32(9.0), segment_ids=segment_ids
  )
  values = compute(metrics, duration=1.0)
  assert 'z_loss' not in values and 'cross_ent_loss' not in values
  assert values['effective_batch_size/encoder'] == 3
  assert values['effective_batch_size/decoder'] == 3
  assert values['timing/examples_per_second'] == 3
  assert values['timing/seqs_per_second'] == 2
  assert values['non_padding_fraction/encoder'] == pytest.approx(5 / 6)
  assert values['non_padding_fraction/decoder'] == pytest.approx(0.9)
  assert values['non_padding_fraction/overall'] == pytest.approx(14 / 16)
  assert values['non_padding_fraction/loss_weights'] == pytest.approx(0.9)
  assert values['loss_per_nonpadding_target_token'] == pytest.approx(1.0)


@pytest.mark.parametrize(
  'rows, expected',
  [
    ([[0, 0, 0]], 0),
    ([[1, 1, 1]], 1),
    ([[1, 2, 3]], 3),
    ([[1, 1, 0], [1, 2, 0]], 3),
    ([[0, 0], [1, 0]], 1),
  ],
)
def test_count_packed_examples(rows, expected):
  assert int(models.count_packed_examples(jnp.asarray(rows))) == expected


def test_accuracy_is_that_of_argmax_ties_included():
  rng = np.random.default_rng(1)
  # Few distinct logits: most positions have ties.
  logits = jnp.asarray(rng.integers(0, 3, (5, 40, 4)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, 4, (5, 40)), jnp.int32)
  mask = jnp.asarray(rng.integers(0, 2, (5, 40)), jnp.float32) * 0.5
  ours = jax.jit(models.compute_base_metrics)(logits, targets, mask, jnp.float32(0.0))['accuracy']
  expected = clu_metrics.Accuracy.from_model_output(logits=logits, labels=targets, mask=mask)
  assert isinstance(ours, clu_metrics.Accuracy)
  assert (float(ours.total), int(ours.count)) == (float(expected.total), int(expected.count))
  assert 0 < float(ours.compute()) < 1


def test_accuracy_of_ids_of_a_narrow_dtype():
  # Position 350 is 94 in eight bits, which would make it the first of two equal logits.
  logits = jnp.zeros((1, 1, 400)).at[0, 0, jnp.asarray([200, 350])].set(1.0)
  correct, _ = jax.jit(models.compute_weighted_accuracy)(logits, jnp.asarray([[200]], jnp.uint8))
  assert float(correct) == 1.0


def test_weighted_accuracy_sums_weights_of_correct_positions():
  logits = jnp.asarray([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [1.0, 1.0, 0.0]]])
  targets = jnp.asarray([[1, 2, 0]])
  assert [float(x) for x in models.compute_weighted_accuracy(logits, targets)] == [2.0, 3.0]
  weights = jnp.asarray([[0.5, 1.0, 0.0]])
  assert [float(x) for x in models.compute_weighted_accuracy(logits, targets, weights)] == [
    0.5,
    1.5,
  ]


def test_metrics_merge_under_jit_and_over_micro_batches(batch):
  model = cases.make_model()
  whole = compute(jax.jit(model.eval_fn)(cases.initial_params(), batch)[1])

  @jax.jit
  def merged(params, first, second):
    a, b = model.eval_fn(params, first)[1], model.eval_fn(params, second)[1]
    return {name: a[name].merge(b[name]) for name in a}

  halves = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
  parts = compute(merged(cases.initial_params(), *halves))
  assert set(parts) == set(whole)
  for name, value in whole.items():
    assert parts[name] == pytest.approx(value, rel=1e-5), name


def test_token_counts_of_many_steps_do_not_overflow(batch):
  merge = jax.jit(lambda a, b: {name: a[name].merge(b[name]) for name in a})
  _, metrics = jax.jit(cases.make_model().eval_fn)(cases.initial_params(), batch)
  once = compute(metrics)
  for _ in range(27):  # 4 x 6 tokens, 2**27 times: more than 2**31.
    metrics = merge(metrics, metrics)
  values = compute(metrics, num_steps=2**27)
  for name in ('accuracy', 'loss_per_all_target_tokens', 'non_padding_fraction/overall'):
    assert values[name] == pytest.approx(once[name], rel=1e-5), name
  for name in ('timing/target_tokens_per_second', 'timing/tokens_per_second'):
    assert values[name] == pytest.approx(once[name] * 2**27, rel=1e-5), name


def test_older_metrics_of_t5x_are_sums():
  logits = jnp.eye(3)[jnp.array([[0, 1, 2], [1, 1, 1]])]
  targets, weights = (
    jnp.array([[0, 1, 1], [1, 0, 1]]),
    jnp.array([[1.0, 0.5, 1.0], [1.0, 1.0, 0.0]]),
  )
  metrics = models.compute_metrics(
    logits, targets, weights, jnp.float32(2.0), jnp.sum(weights), {'more': metrics_lib.Sum(7)}
  )
  assert {name: float(metric.compute()) for name, metric in metrics.items()} == {
    'loss': 2.0,
    'accuracy': 2.5,
    'weight_sum': 4.5,
    'num_examples': 2,
    'num_tokens': 6,
    'more': 7,
  }


# ---- Means over batches ---------------------------------------------------------------------------------------------

_ROWS, _LENGTH, _Z_LOSS = 13, 6, 1e-2


def _evaluation_rows():
  """Return (logits, targets) of rows of very different lengths; the last has one token and a large loss."""
  rng = np.random.default_rng(0)
  logits = 2 * rng.standard_normal((_ROWS, _LENGTH, cases.VOCAB_SIZE)).astype(np.float32)
  targets = np.zeros((_ROWS, _LENGTH), np.int32)
  for row in targets:
    num = rng.integers(1, _LENGTH + 1)
    row[:num] = rng.integers(1, cases.VOCAB_SIZE, num)
  targets[-1] = [3, 0, 0, 0, 0, 0]
  logits[-1, 0] = 0
  logits[-1, 0, 3] = -9
  return logits, targets


def _padded_batches(array, batch_size, num_more=0):
  """Return the rows in batches, the last padded with zeros, and `num_more` batches of only padding."""
  num_batches = -(-len(array) // batch_size) + num_more
  missing = num_batches * batch_size - len(array)
  return np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)]).reshape(
    num_batches, batch_size, *array.shape[1:]
  )


def _evaluate(
  factor, batch_size, num_more=0, weights=True, packed=False, z_loss=_Z_LOSS, trains=False
):
  """Return the metrics of all rows by `eval_fn`, or by `loss_fn` for training."""
  logits, targets = _evaluation_rows()
  arrays = {'decoder_input_tokens': targets, 'decoder_target_tokens': targets}
  if weights:
    arrays['decoder_loss_weights'] = (targets > 0).astype(np.int32)
  if packed:
    ids = np.where(targets > 0, 1 + (np.arange(_LENGTH) > 1), 0).astype(np.int32)
    arrays |= {'decoder_segment_ids': ids, 'encoder_segment_ids': ids}
  model = cases.make_model(loss_normalizing_factor=factor, z_loss=z_loss)

  @jax.jit
  def evaluate(logits, batch):
    model.module = cases.Recorded(logits)
    batch = {'encoder_input_tokens': batch['decoder_target_tokens'], **batch}
    if trains:
      return model.loss_fn({}, batch, None)[1]
    return model.eval_fn({}, batch)[1]

  batches = {name: _padded_batches(x, batch_size, num_more) for name, x in arrays.items()}
  all_logits = _padded_batches(logits, batch_size, num_more)
  merged = None
  for k, of_batch in enumerate(all_logits):
    metrics = evaluate(of_batch, {name: x[k] for name, x in batches.items()})
    merged = metrics if merged is None else metrics_lib.merge_metrics(merged, metrics)
  return compute(jax.device_get(merged), num_steps=len(all_logits))


def _reference(z_loss_weight=_Z_LOSS):
  """Return (losses, z-losses, tokens), <float64>[rows, length] and bool, by NumPy."""
  logits, targets = _evaluation_rows()
  log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
  z_loss = z_loss_weight * log_z**2
  own = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return log_z - own + z_loss, z_loss, targets > 0


def _mean(values, factor, batch_size, packed):
  """Return the mean over batches of losses of positions, from their definition."""
  real = _reference()[2]
  total = np.sum(values * real)
  if factor == 'NUM_REAL_TARGET_TOKENS':
    return total / real.sum()
  if factor == 'NUM_TOTAL_TARGET_TOKENS':
    return total / real.size
  if factor == 'AVERAGE_PER_SEQUENCE':
    parts = [real]
    if packed:
      is_first = np.arange(_LENGTH) <= 1
      parts = [real & is_first, real & ~is_first]
    # [parts * rows]: sums and numbers of tokens of each sequence.
    sums = np.concatenate([np.sum(values * part, 1) for part in parts])
    counts = np.concatenate([part.sum(1) for part in parts])
    return np.mean(sums[counts > 0] / counts[counts > 0])
  return total / (factor or 1.0) / -(-_ROWS // batch_size)


@pytest.mark.parametrize('batch_size', [13, 4, 1])
@pytest.mark.parametrize(
  'factor, packed',
  [
    ('NUM_REAL_TARGET_TOKENS', False),
    ('NUM_TOTAL_TARGET_TOKENS', False),
    ('AVERAGE_PER_SEQUENCE', False),
    ('AVERAGE_PER_SEQUENCE', True),
    (None, False),
    (7.0, False),
  ],
)
def test_losses_of_an_evaluation_are_means_over_all_rows(factor, packed, batch_size):
  loss, z_loss, real = _reference()
  values = _evaluate(factor, batch_size, packed=packed)
  for name, of_positions in (('loss', loss), ('z_loss', z_loss), ('cross_ent_loss', loss - z_loss)):
    expected = _mean(of_positions, factor, batch_size, packed)
    assert values[name] == pytest.approx(expected, rel=1e-5), name
  _check_losses_per_token(values, loss, z_loss, real)
  # A batch of only padding adds nothing.
  more = _evaluate(factor, batch_size, num_more=2, packed=packed)
  names = [name for name in values if 'loss' in name and 'fraction' not in name] + ['accuracy']
  assert len(names) == 8
  assert [more[name] for name in names] == [values[name] for name in names]


def _check_losses_per_token(values, loss, z_loss, real):
  """Check sums over all tokens per token, which depend on no factor and no batch size."""
  expected = {
    'loss_per_nonpadding_target_token': np.sum(loss * real) / real.sum(),
    'loss_per_all_target_tokens': np.sum(loss * real) / real.size,
    'z_loss_per_all_target_tokens': np.sum(z_loss * real) / real.size,
    'cross_ent_loss_per_all_target_tokens': np.sum((loss - z_loss) * real) / real.size,
  }
  assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
  'factor',
  ['NUM_REAL_TARGET_TOKENS', 'NUM_TOTAL_TARGET_TOKENS', 'AVERAGE_PER_SEQUENCE', None, 7.0],
)
@pytest.mark.parametrize('batch_size', [13, 4, 1])
def test_losses_per_token_of_training_depend_on_no_factor(factor, batch_size):
  for z_loss_weight in (0.0, _Z_LOSS):
    values = _evaluate(factor, batch_size, z_loss=z_loss_weight, trains=True)
    _check_losses_per_token(values, *_reference(z_loss_weight))
  _check_losses_per_token(_evaluate(factor, batch_size, z_loss=0.0), *_reference(0.0))


def test_padding_rows_of_a_batch_without_weights_have_no_loss():
  # Without weights, the padding of real rows counts.
  expected = np.sum(_reference()[0])
  for batch_size in (13, 4):
    values = _evaluate(None, batch_size, weights=False)
    assert values['loss'] * -(-_ROWS // batch_size) == pytest.approx(expected, rel=1e-5)
    assert values['loss_per_nonpadding_target_token'] == pytest.approx(
      expected / _ROWS / _LENGTH, rel=1e-5
    )


def test_a_loss_of_unknown_factor_is_averaged_per_batch():
  """As in T5X, whose `compute_base_metrics` gets a number."""

  def metrics(loss, weight):
    ones = jnp.ones((2, 3), jnp.int32)
    return models.compute_base_metrics(jnp.zeros((2, 3, 5)), ones, weight * ones, loss)

  merged = metrics_lib.merge_metrics(metrics(3.0, 1), metrics(5.0, 1))
  assert compute(metrics_lib.merge_metrics(merged, metrics(0.0, 0)), num_steps=3)['loss'] == 4.0


@pytest.mark.parametrize('factor', ['NUM_TOTAL_TARGET_TOKENS', None, 7.0])
def test_a_row_without_loss_weights_counts_for_any_batch_size(batch, factor):
  weights = np.ones(batch['decoder_target_tokens'].shape, np.float32)
  weights[1] = 0
  batch = {**batch, 'decoder_loss_weights': weights}
  model = cases.make_model(loss_normalizing_factor=factor)
  evaluate = jax.jit(model.eval_fn)
  params = cases.initial_params()
  num_rows = len(weights)
  merged = None
  for row in range(num_rows):
    metrics = evaluate(params, {name: x[row : row + 1] for name, x in batch.items()})[1]
    metrics = {'loss': metrics['loss']}
    merged = metrics if merged is None else {'loss': merged['loss'].merge(metrics['loss'])}
  padding = {name: np.zeros_like(x[:1]) for name, x in batch.items()}
  merged = {'loss': merged['loss'].merge(evaluate(params, padding)[1]['loss'])}
  expected = compute(evaluate(params, batch)[1])['loss']
  if factor != 'NUM_TOTAL_TARGET_TOKENS':
    expected /= num_rows
  assert compute(merged, num_steps=num_rows + 1)['loss'] == pytest.approx(expected, rel=1e-5)


def test_metrics_of_a_classifier_have_one_target_per_row():
  # A dual encoder's targets are the indices of the rows in the batch.
  found = models.compute_base_metrics(
    logits=jnp.eye(4)[jnp.array([0, 1, 2, 2])],
    targets=jnp.arange(4),
    mask=None,
    loss=jnp.array(8.0),
    z_loss=0.0,
  )
  values = {name: metric.compute() for name, metric in found.items() if '/' not in name}
  assert values['accuracy'] == 0.75
  assert values['loss'] == 8
  assert values['loss_per_all_target_tokens'] == 2
