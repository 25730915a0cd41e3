"""Checkpoints that tests of restoring share."""

import pytest

from t5x_lite import checkpoints
from tests.checkpoints import checkpoint_states as states


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A model directory with steps 1 and 2, not to be changed."""
  directory = tmp_path_factory.mktemp('run')
  with checkpoints.CheckpointManager(
    directory, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for step in (1, 2):
      manager.save(
        step,
        states.state(step),
        data_state={'position': b'%d' % step},
        metadata={'param_layout': 't5'},
      )
  return directory
