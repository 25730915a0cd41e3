"""Checkpointers of a project that trains few parameters.

In T5X, `train` makes an instance of `SaveCheckpointConfig.checkpointer_cls`, calls its `save`, and restores by its
`restore` when a run resumes. `Checkpointer.save` writes what `_get_state_dict_for_save` returns.
"""

import os
import re

import jax
import numpy as np
from t5x import checkpoints


class NumpyCheckpointer(checkpoints.Checkpointer):
  """Also writes some parameters as files of NumPy, and keeps one checkpoint."""

  def __init__(self, *args, save_paths, **kwargs):
    super().__init__(*args, **{**kwargs, 'keep': 1})
    self._matches = re.compile(save_paths).fullmatch

  def save(self, train_state, state_transformation_fns=(), *, concurrent_gb=128):
    folder = os.path.join(self.checkpoints_dir, 'numpy', f'checkpoint_{int(train_state.step)}')
    os.makedirs(folder)
    for path, value in jax.tree_util.tree_leaves_with_path(train_state.params):
      name = '/'.join(key.key for key in path)
      if self._matches(name):
        np.save(
          os.path.join(folder, name.replace('/', '.')), np.array(value).astype(self._save_dtype)
        )
    super().save(train_state, state_transformation_fns, concurrent_gb=concurrent_gb)


class TrainedOnlyCheckpointer(checkpoints.Checkpointer):
  """Leaves out parameters, and fills them with ones when a run resumes."""

  def _get_state_dict_for_save(self, state_dict, lazy_load=True):
    state_dict = super()._get_state_dict_for_save(state_dict, lazy_load)
    target = {name: value for name, value in state_dict['target'].items() if name != 'encoder'}
    return {**state_dict, 'target': target}

  def restore(
    self,
    step=None,
    path=None,
    state_transformation_fns=(),
    fallback_state=None,
    lazy_parameters=False,
  ):
    assert fallback_state is None
    shapes = self._train_state.state_dict()
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    return super().restore(step, path, state_transformation_fns, ones, lazy_parameters)


class SavesNothing(checkpoints.Checkpointer):
  """Does not call the method of T5X."""

  def save(self, train_state, state_transformation_fns=(), *, concurrent_gb=128):
    del train_state, state_transformation_fns, concurrent_gb


class RestoresAll(checkpoints.Checkpointer):
  """Restores as T5X does."""

  def restore(self, *args, **kwargs):
    return super().restore(*args, **kwargs)


class RestoresLess(checkpoints.Checkpointer):
  """Returns a state without parameters of the run."""

  def restore(self, *args, **kwargs):
    state = super().restore(*args, **kwargs)
    params = {name: value for name, value in state.params.items() if name != 'encoder'}
    return state.replace_params(params)


class KeepsAll(checkpoints.Checkpointer):
  """Overrides a private method of T5X that only T5X calls."""

  def _remove_old_checkpoints(self):
    pass
