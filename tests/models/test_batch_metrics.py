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
