"""Metrics of runs as points: their order and exactness, whatever names the lines have."""

import json

import pytest

from t5x_lite.apps.common import metric_points


def test_points_are_in_the_order_of_lines_that_have_different_names(tmp_path):
  rows = [
    {'step': 5, 'loss': 0.1, 'learning_rate': 1},
    {'step': 10, 'loss': 0.2},
    {'step': 15, 'learning_rate': 0.5, 'loss': 'NaN'},
    {'step': 12, 'loss': 0.3},  # as after a rollback
    {'step': 20, 'loss': 2**60, 'learning_rate': 0.25, 'note': 'text', 'load': [0.5, 0.5]},
  ]
  path = tmp_path / 'train/metrics.jsonl'
  path.parent.mkdir()
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  found = metric_points.read_run(tmp_path)['train']
  assert found.points['learning_rate'].tolist() == [[5, 1.0], [15, 0.5], [20, 0.25]]
  losses = [[5, 0.1], [10, 0.2], [15, pytest.approx(float('nan'), nan_ok=True)], [12, 0.3]]
  assert found.points['loss'].tolist() == [*losses, [20, 2.0**60]]
  assert found.arrays == {'load': (20, [0.5, 0.5])}
