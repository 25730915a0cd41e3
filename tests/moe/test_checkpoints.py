"""T5X's checkpointer for upcycling, with the options of T5X's gin file."""

import functools

import jax
import numpy as np
import pytest

import moe
from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import optimizers
from t5x_lite import tree_utils
from tests.moe import upcycling_cases as up

MAP = [
  (r'target(.*)mlp\/expert(.*)', r'target\1mlp\2'),
  (r'.*\/router\/.*', None),
  (r'state\/param_states.*', None),
]


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
def test_experts_are_copies_of_the_dense_blocks_and_the_rest_is_as_usual(tmp_path, layout):
  optimizer = optimizers.adamw(learning_rate=0.1)
  dense = up.state_of(up.dense_network(param_layout=layout), optimizer)
  path = up.save(dense, tmp_path)
  every = 1 if layout == 'scalable_t5' else 2
  wanted = up.state_shapes(
    up.sparse_network(num_experts=4, every=every, param_layout=layout), optimizer
  )
  new = jax.tree.map(lambda leaf: np.full(leaf.shape, 7, leaf.dtype), wanted).state_dict()
  cfg = checkpoints.RestoreCheckpointConfig(
    str(path),
    'specific',
    MAP,
    fallback_to_scratch=True,
    dtype='float32',
    checkpointer_cls=functools.partial(moe.UpcycleCheckpointer, num_experts=4),
  )
  restored = checkpoints.restore_checkpoint(
    path, wanted.state_dict(), restore_cfg=cfg, initial_state_fn=lambda: new
  )
  flat, stored = (
    tree_utils.flatten_dict(restored.state),
    tree_utils.flatten_dict(dense.state_dict()),
  )
  num_experts = 0
  for name, value in flat.items():
    value = np.asarray(value)
    if name.startswith('target/') and '/expert/' in name:
      source = np.asarray(stored[name.replace('/expert', '')])
      source = source if layout == 't5' else np.moveaxis(source, 1, 0)  # the layers come first
      num_experts += 1
      for copy in value:
        np.testing.assert_array_equal(copy, source, err_msg=name)
    elif '/router/' in name or name.startswith('state/param_states'):
      assert (value == 7).all(), name
    else:
      np.testing.assert_array_equal(value, stored[name], err_msg=name)
  assert num_experts and restored.step == 7


def test_errors(tmp_path):
  path = up.save(up.state_of(up.dense_network()), tmp_path)
  cfg = checkpoints.RestoreCheckpointConfig(
    str(path),
    'specific',
    MAP[:2],
    fallback_to_scratch=True,
    checkpointer_cls=functools.partial(moe.UpcycleCheckpointer, num_experts=8),
  )
  wanted = up.state_shapes(up.sparse_network(num_experts=4)).state_dict()
  with pytest.raises(
    errors.ConfigError, match='UpcycleCheckpointer.num_experts` must be 4, the number in .*, got 8'
  ):
    checkpoints.restore_checkpoint(path, wanted, restore_cfg=cfg, initial_state_fn=dict)
  with pytest.raises(errors.ConfigError, match='num_experts` must be an integer >= 1, got 0'):
    moe.UpcycleCheckpointer(None, None, '', 0)
