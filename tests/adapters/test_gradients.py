"""The metric counts adapters without a gradient: those of single experts and of stacked layers."""

from flax.linen import partitioning as nn_partitioning
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.adapters import gradients


def _metric(a, b):
  """Return the metric of an array of 3 experts, given whether each of A and B has a gradient."""
  grads = {
    'layers_0,1': {
      'wi': {
        'lora_a': jnp.asarray(a, jnp.float32)[..., None, None] * jnp.ones([2, 3, 4, 2]),
        'lora_b': jnp.asarray(b, jnp.float32)[..., None, None] * jnp.ones([2, 3, 2, 5]),
        'kernel': jnp.zeros([2, 3, 4, 5]),
      }
    }
  }
  axes = {
    f'layers_{i}': {
      'wi': {
        'lora_a_axes': nn_partitioning.AxisMetadata(names=('expert', 'embed', 'lora_rank')),
        'lora_b_axes': nn_partitioning.AxisMetadata(names=('expert', 'lora_rank', 'expert_mlp')),
      }
    }
    for i in range(2)
  }
  return gradients.metrics_of_gradients(grads, axes)[gradients.WITHOUT_GRADIENT]


def test_each_expert_of_each_layer_counts():
  metric = _metric([[0, 0, 1], [0, 0, 0]], [[0, 1, 0], [0, 1, 1]])
  np.testing.assert_array_equal(metric.steps_since, [1, 0, 0, 1, 0, 0])
  assert metric.compute() == 2


@pytest.mark.parametrize('first, num_between, expected', [(1, 98, 3), (1, 99, 4), (0, 10, 4)])
def test_adapters_count_after_a_hundred_steps(first, num_between, expected):
  none = np.zeros([2, 3])
  some = np.asarray([[first, 0, 0], [1, 0, 0]])
  metric = _metric(none, some)
  last = _metric(none, [[0, 0, 1], [1, 0, 0]])
  for _ in range(num_between):
    metric = metric.merge(_metric(none, none))
  metric = metric.merge(last)
  assert metric.num_steps == num_between + 2
  assert metric.compute() == expected
