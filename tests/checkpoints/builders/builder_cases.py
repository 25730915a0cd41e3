"""States that tests of builders build, without files."""

import numpy as np

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.checkpoints import builders
from t5x_lite.checkpoints.restoring import lazy_arrays
from tests.checkpoints import checkpoint_states as states


def target(flat=None, **kwargs):
  """Return the wanted state, by default that of `checkpoint_states`."""
  flat = flat or dict(tree_utils.flatten_dict(states.target()).items())
  return builders.TargetState(state_dict=tree_utils.unflatten_dict(flat), wanted=flat, **kwargs)


def build(builder, state, goal):
  """Return (step, values) of the state that a builder builds; the initial values are 7."""
  built = builder.build(state, goal)
  initial = {name: np.full(leaf.shape, 7, leaf.dtype) for name, leaf in goal.wanted.items()}
  return built.step, lazy_arrays.read(built.arrays, initial)


def restore_with(chain, target_state, path=None, **kwargs):
  """Restore a chain of builders."""
  options = {
    name: kwargs.pop(name)
    for name in list(kwargs)
    if name in checkpoints.RestoreCheckpointConfig.__dataclass_fields__
  }
  cfg = checkpoints.RestoreCheckpointConfig(
    path=path and str(path), mode='specific', builders=chain, **options
  )
  return checkpoints.restore_checkpoint(path, target_state, restore_cfg=cfg, **kwargs)
