"""The metrics of experts that progress lines show."""

import pytest

import moe.metrics  # registers the shown metrics
from t5x_lite.apps.common import report


@pytest.mark.parametrize('values,want', [
    ({'expert_usage': 1.0, 'decoder/layers_1/max_over_mean_load': 1.5, 'decoder/layers_3/max_over_mean_load': 2.5,
      'decoder/layers_1/dead_experts': 0.0}, 'max_load 2.5'),
    ({'encoder/layers_1/fraction_tokens_left_behind': 0.25, 'encoder/layers_1/receive_drops': 0.125,
      'encoder/layers_1/dead_experts': 3.0, 'encoder/layers_1/router_entropy': 1.0},
     'dead_experts 3  left_behind 0.25  receive_drops 0.125'),
    ({'max_over_mean_load': 1.5}, ''),
])
def test_the_worst_layer_is_shown_after_the_other_metrics(values, want):
  named = {f'{moe.metrics.PREFIX}/{name}': value for name, value in values.items()}
  assert report.format_metrics({**named, 'z': 1.0, 'loss': 2.0}) == f'loss 2  z 1  {want}'.rstrip()
