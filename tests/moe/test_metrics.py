"""The metrics of experts that progress lines show."""

import jax.numpy as jnp
import pytest

import moe.metrics  # registers the shown metrics
from t5x_lite.apps.common import report


@pytest.mark.parametrize(
  'values,want',
  [
    (
      {
        'expert_usage': 1.0,
        'decoder/layers_1/max_over_mean_load': 1.5,
        'decoder/layers_3/max_over_mean_load': 2.5,
        'decoder/layers_1/dead_experts': 0.0,
      },
      'max_load 2.5',
    ),
    (
      {
        'encoder/layers_1/fraction_tokens_left_behind': 0.25,
        'encoder/layers_1/receive_drops': 0.125,
        'encoder/layers_1/dead_experts': 3.0,
        'encoder/layers_1/router_entropy': 1.0,
      },
      'dead_experts 3  left_behind 0.25  receive_drops 0.125',
    ),
    ({'max_over_mean_load': 1.5}, ''),
  ],
)
def test_the_worst_layer_is_shown_after_the_other_metrics(values, want):
  named = {f'{moe.metrics.PREFIX}/{name}': value for name, value in values.items()}
  assert report.format_metrics({**named, 'z': 1.0, 'loss': 2.0}) == f'loss 2  z 1  {want}'.rstrip()


def test_layers_of_flaxformer_sow_arrays_with_one_element_and_no_load():
  names = (
    'auxiliary_loss',
    'router_z_loss',
    'fraction_tokens_left_behind',
    'router_confidence',
    'expert_usage',
  )

  def layer(first):
    return {'mlp': {name: (jnp.full((1, 1), first + index),) for index, name in enumerate(names)}}

  intermediates = {'encoder': {'layers_0': layer(1.0)}, 'decoder': {'layers_1': layer(2.0)}}
  loss, metrics = moe.metrics.expert_losses_and_metrics(intermediates, 0.5, 0.25)
  assert float(loss) == 0.5 * 1.5 + 0.25 * 2.5
  assert float(metrics['experts/expert_usage'].compute()) == 5.5
  shares, sums = moe.metrics.microbatch_losses_and_sums(intermediates, 0.5, 0.25, 2, {})
  assert float(shares) == float(loss)
  merged = moe.metrics.metrics_of_sums(
    sums[moe.metrics.PREFIX].merge(sums[moe.metrics.PREFIX]), 0.5, 0.25
  )
  assert float(merged['experts/expert_usage'].compute()) == 5.5
