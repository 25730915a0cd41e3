"""Metrics: accumulation on devices, and steps and durations set by the host."""

import subprocess
import sys

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import metrics


def example_metrics(scale=1.0):
  """One metric of every class, as a step makes them."""
  values = scale * jnp.asarray([1.0, 2.0, 3.0])
  return {
    'sum': metrics.Sum.from_model_output(values),
    'per_step': metrics.AveragePerStep.from_model_output(values),
    'time': metrics.Time(),
    'rate': metrics.TimeRate.from_model_output(numerator=jnp.sum(values)),
    'steps_per_time': metrics.StepsPerTime.from_model_output(),
    'average': clu_metrics.Average.from_model_output(values),
  }


def merge(a, b):
  return {name: a[name].merge(b[name]) for name in a}


EXPECTED = {
  'sum': 36.0,
  'per_step': 12.0,
  'time': 4.0,
  'rate': 9.0,
  'steps_per_time': 0.75,
  'average': 4.0,
}


def finish(tree, duration, num_steps):
  tree = metrics.set_step_metrics_num_steps(
    metrics.set_time_metrics_duration(tree, duration), num_steps
  )
  return {name: float(metric.compute()) for name, metric in tree.items()}


def test_three_merged_steps_compute_sums_averages_and_rates():
  total = merge(merge(example_metrics(1.0), example_metrics(2.0)), example_metrics(3.0))
  assert finish(total, duration=4.0, num_steps=3) == EXPECTED


def test_merging_works_compiled_and_inside_a_loop():
  step = jax.jit(example_metrics)
  total = jax.jit(lambda a, b, c: merge(merge(a, b), c))(step(1.0), step(2.0), step(3.0))
  assert finish(total, 4.0, 3) == EXPECTED

  @jax.jit
  def looped(scales):
    zero = jax.tree.map(
      metrics.shape_obj_to_defined_obj,
      jax.eval_shape(example_metrics, 1.0),
      is_leaf=metrics.is_metric_obj,
    )
    return jax.lax.fori_loop(0, 3, lambda i, total: merge(total, example_metrics(scales[i])), zero)

  assert finish(looped(jnp.asarray([1.0, 2.0, 3.0])), 4.0, 3) == EXPECTED


def test_a_step_count_that_is_not_replaced_is_the_number_of_merged_parts():
  merged = merge(example_metrics(), example_metrics())
  assert float(merged['per_step'].compute()) == 6.0
  assert int(merged['steps_per_time'].steps) == 2
  assert metrics.AveragePerStep.from_model_output(jnp.asarray([6.0, 2.0]), steps=4).compute() == 2.0
  assert metrics.StepsPerTime.from_model_output(steps=6).replace_duration(3.0).compute() == 2.0
  assert metrics.Step(steps=5).compute() == 5


def test_weighted_averages_and_their_sums():
  average = metrics.WeightedAverage.from_model_output
  merged = average(2.0, 1.0).merge(average(5.0, 2.0)).merge(average(np.nan, 0.0))
  assert (float(merged.compute()), float(merged.weight)) == (4.0, 3.0)
  # Each term of a sum has its own weights: 4 + 10 * (1 * 1 + 2 * 3) / 4.
  first = average(2.0, 1.0).add_terms(average([1.0, 0.0], [1.0, 0.0]).scale(10.0))
  second = average(5.0, 2.0).add_terms(average([2.0, 7.0], [3.0, 0.0]).scale(10.0))
  assert float(jax.jit(lambda a, b: a.merge(b))(first, second).compute()) == 21.5
  assert float(first.total) == 12.0
  # One value is exact, also if its weight is not.
  value = np.float32(1) / 3
  assert average(value, 0.1).compute() == value
  zero = metrics.shape_obj_to_defined_obj(jax.eval_shape(lambda: average(value, 0.1)))
  assert zero.merge(average(value, 0.1)).compute() == value
  assert zero.merge(zero).compute() == 0.0


def test_averages_per_batch_count_batches_that_are_not_empty():
  def batch(total, steps=1.0):
    return metrics.AveragePerBatch(total=jnp.float32(total), steps=jnp.float32(steps))

  merged = {'a': batch(2.0).merge(batch(4.0)).merge(batch(0.0, 0.0))}
  # Three batches, one of which is empty; or two parts of one step.
  for num_steps, value in ((3, 3.0), (1, 6.0)):
    assert finish(merged, 1.0, num_steps) == {'a': value}
  assert finish({'a': batch(0.0, 0.0)}, 1.0, 1) == {'a': 0.0}


def test_array_averages_by_weights_of_elements():
  average = metrics.ArrayAverage.from_model_output
  merged = average([1.0, 2.0, 3.0], [1.0, 1.0, 0.0]).merge(
    average([4.0, 8.0, 9.0], [2.0, 0.0, 0.0])
  )
  np.testing.assert_array_equal(merged.compute(), [3.0, 2.0, 0.0])
  np.testing.assert_array_equal(
    average([1.0]).merge(average([2.0])).merge(average([np.float32(3)], 2.0)).compute(), [2.25]
  )


def test_merging_keeps_time_and_rejects_durations_that_are_set():
  assert metrics.Time(duration=2.0).merge(metrics.Time(duration=5.0)).compute() == 2.0
  for metric in (metrics.TimeRate(numerator=1.0), metrics.StepsPerTime()):
    for pair in ((metric, metric.replace_duration(2.0)), (metric.replace_duration(2.0), metric)):
      with pytest.raises(ValueError, match='set_time_metrics_duration'):
        pair[0].merge(pair[1])


@pytest.mark.parametrize(
  'metric, setter',
  [
    (metrics.Time(), 'set_time_metrics_duration'),
    (metrics.TimeRate(numerator=1.0), 'set_time_metrics_duration'),
    (metrics.StepsPerTime(), 'set_time_metrics_duration'),
    (metrics.AveragePerStep(steps=None, total=1.0), 'set_step_metrics_num_steps'),
    (metrics.Step(steps=None), 'set_step_metrics_num_steps'),
    (metrics.StepsPerTime(steps=None, duration=1.0), 'set_step_metrics_num_steps'),
  ],
)
def test_computing_without_steps_or_duration_names_the_function_to_call(metric, setter):
  with pytest.raises(ValueError, match=setter):
    metric.compute()


def test_setters_touch_only_their_own_metrics_in_any_tree():
  tree = [example_metrics(), {'nested': metrics.TimeRate(numerator=8.0)}]
  timed = metrics.set_time_metrics_duration(tree, 2.0)
  assert float(timed[1]['nested'].compute()) == 4.0
  assert timed[0]['sum'] is tree[0]['sum']
  assert tree[1]['nested'].duration is None
  stepped = metrics.set_step_metrics_num_steps(timed, 5)
  assert stepped[0]['steps_per_time'] == metrics.StepsPerTime(duration=2.0, steps=5)
  assert [name for name, metric in tree[0].items() if metrics.is_time_metric(metric)] == [
    'time',
    'rate',
    'steps_per_time',
  ]


def test_metrics_of_the_last_step_are_joined_and_separated():
  parts = {
    **example_metrics(),
    'layers': metrics.AveragePerStep(total=jnp.arange(3.0), steps=1),
    'none': metrics.ArrayAverage.from_model_output(jnp.ones((2, 0))),
  }
  joined = jax.jit(metrics.OfLastStep.join)(parts)
  assert len(jax.tree.leaves(joined)) == 2  # float32 and int32
  for found in (
    joined.separate(),
    jax.device_get(joined).separate(),
    metrics.separate({'a': joined}),
  ):
    assert list(found) == sorted(parts)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(parts), strict=True):
      np.testing.assert_array_equal(a, b)
      assert a.shape == jnp.shape(b) and a.dtype == jnp.result_type(b)
  later = metrics.OfLastStep.join(example_metrics(2.0))
  assert joined.merge(later) is later
  assert (
    metrics.separate({'sum': metrics.Sum(1), 'a': later})['sum'].total == 12
  )  # the last of a name
  assert metrics.OfLastStep.join({'a': metrics.Sum(3), 'b': metrics.Sum(4)}).compute() == {
    'a': 3,
    'b': 4,
  }


def test_helpers():
  made = metrics.create_metrics_dict({'a': 1.5, 'b': jnp.float32(2.0)})
  assert {name: float(metric.compute()) for name, metric in made.items()} == {'a': 1.5, 'b': 2.0}
  assert all(type(metric) is metrics.Sum for metric in made.values())
  assert metrics.is_metric_obj(made['a']) and not metrics.is_metric_obj(1.5)
  shape = jax.eval_shape(lambda: metrics.AveragePerStep.from_model_output(jnp.ones(3)))
  zero = metrics.shape_obj_to_defined_obj(shape)
  assert type(zero) is metrics.AveragePerStep
  assert (float(zero.total), int(zero.steps), zero.total.dtype) == (0.0, 0, np.float32)


@pytest.mark.full  # by default, tests/repository/test_start_up.py imports it in a dry run
def test_no_tensorflow_is_imported():
  code = 'import sys, t5x_lite.metrics; sys.exit(any(m.split(".")[0] == "tensorflow" for m in sys.modules))'
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
