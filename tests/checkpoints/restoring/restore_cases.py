"""Restores of step 2 of the fixture `saved`, and target states for them."""

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from tests.checkpoints import checkpoint_states as states

Restore = checkpoints.RestoreCheckpointConfig


def restore(saved, target=None, **kwargs):
  """Restore step 2 with the config arguments among `kwargs`."""
  cfg = Restore(
    str(saved), **{k: kwargs.pop(k) for k in list(kwargs) if k in Restore.__dataclass_fields__}
  )
  return checkpoints.restore_checkpoint(
    saved / 'checkpoint_2', states.target() if target is None else target, restore_cfg=cfg, **kwargs
  )


def flat_target(**changes):
  """Return the target state as a flat dict, with `changes` (None removes)."""
  flat = tree_utils.flatten_dict(states.target())
  for name, leaf in changes.items():
    flat.pop(name) if leaf is None else flat.update({name: leaf})
  return flat


def nested(flat):
  return tree_utils.unflatten_dict(flat)


def spec(*shape, dtype=np.float32):
  return jax.ShapeDtypeStruct(shape, dtype)
