"""Stored states with the average in place of the parameters; conversions of them are in tests/apps/convert."""

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError


def _save(path, **sections):
  state = {'target': {'w': np.zeros(2, np.float32)}, 'state': {'step': np.int32(3)}, **sections}
  with checkpoints.CheckpointManager(path, save_cfg=checkpoints.SaveCheckpointConfig()) as manager:
    manager.save(3, state)
  return checkpoints.open_source(path / 'checkpoint_3')


def test_names_and_values(tmp_path):
  opened = _save(
    tmp_path, param_average={'w': np.ones(2, np.float32)}, flax_mutables={'c': {'n': np.int32(5)}}
  )
  average = sources.AverageSource(opened)
  assert set(average.shapes()) == {'target/w', 'state/step', 'flax_mutables/c/n'}
  np.testing.assert_array_equal(average.read_array('target/w'), np.ones(2))
  assert (average.step, average.format, average.path) == (3, opened.format, opened.path)
  assert average.verify() and average.manifest is opened.manifest


def test_a_state_without_average(tmp_path):
  opened = _save(tmp_path)
  assert not sources.has_param_average(opened)
  with pytest.raises(CheckpointError, match='must have a running average'):
    sources.AverageSource(opened)
