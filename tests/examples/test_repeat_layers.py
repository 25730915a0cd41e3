"""The page's builder: a deeper model starts with the layers of a shallower one."""

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import optimizers
from t5x_lite.checkpoints import builders
from tests.examples import repeat_layers
from tests.moe import upcycling_cases as cases


def test_a_deeper_model_repeats_the_layers(tmp_path):
  shallow, optimizer = cases.dense_network('decoder_only'), optimizers.adamw(learning_rate=0.1)
  path = cases.save(cases.state_of(shallow, optimizer), tmp_path)
  deep = cases.state_shapes(cases.dense_network('decoder_only', num_layers=5), optimizer)
  cfg = checkpoints.RestoreCheckpointConfig(path, builders=[repeat_layers.RepeatLayers()])
  restored = checkpoints.restore_checkpoint(
    path,
    deep.state_dict(),
    restore_cfg=cfg,
    from_params_fn=lambda state: cases.state_of(
      cases.dense_network('decoder_only', num_layers=5), optimizer
    ).state_dict(),
  )
  stored, layers = checkpoints.load(path)['target']['decoder'], restored.state['target']['decoder']
  for i in range(5):
    np.testing.assert_array_equal(
      layers[f'layers_{i}']['mlp']['wi']['kernel'], stored[f'layers_{i % 2}']['mlp']['wi']['kernel']
    )
  assert restored.step == 7


def test_a_state_without_layers_is_an_error():
  with pytest.raises(errors.CheckpointError, match='RepeatLayers must follow'):
    repeat_layers.RepeatLayers().build(
      builders.BuiltState(), builders.TargetState(state_dict={}, wanted={})
    )
