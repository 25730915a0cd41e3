"""Checkpoints and folders to convert."""

import dataclasses

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from tests.checkpoints.hugging_face import hugging_face_cases as cases


def folder(path, family='t5_1_1', dtype='float32', **changes):
  """Make a Hugging Face folder with random weights; return (its path, our arrays)."""
  architecture = dataclasses.replace(cases.BY_FAMILY[family], **changes)
  values = cases.values(architecture, dtype)
  config = cases.config_of(architecture, family, torch_dtype=dtype)
  cases.make_folder(path, cases.tensors(architecture, values), config)
  return str(path), values


def save(directory, state, step=3, **metadata):
  """Save a flat state as a training run would."""
  save_cfg = checkpoints.SaveCheckpointConfig(save_dataset=True)
  with checkpoints.CheckpointManager(directory, save_cfg=save_cfg) as manager:
    manager.save(
      step,
      tree_utils.unflatten_dict(state),
      metadata={'param_layout': 't5', **metadata},
      data_state={'position': b'7'},
    )
  return checkpoints.get_checkpoint_dir(directory, step)


def make_state(architecture=cases.SMALL, **more):
  """Return a flat state with the parameters of an architecture."""
  params = {f'target/{name}': value for name, value in cases.values(architecture).items()}
  return {**params, 'state/step': np.asarray(3, np.int32), **more}


def bits(path):
  """Return name -> (dtype, shape, bytes) of all arrays stored in a folder of any supported format."""
  source = sources.open_source(path)
  values = source.read({name: (leaf.dtype, None) for name, leaf in source.shapes().items()})
  return {name: (value.dtype.name, value.shape, value.tobytes()) for name, value in values.items()}


def tensor_bits(folder):
  """Return name -> (dtype, shape, bytes) of the tensors of a Hugging Face folder."""
  tensors = hugging_face.SafetensorsFolder(folder)
  return {
    name: (entry.dtype.name, entry.shape, tensors.read(name).tobytes())
    for name, entry in tensors.entries.items()
  }


class FakeSource(sources.StateSource):
  """State in memory that counts arrays that are read together."""

  format = 't5x_orbax'

  def __init__(self, state, metadata=None):
    super().__init__('/somewhere')
    self.state, self.batches, self._metadata = state, [], metadata

  def shapes(self):
    return {
      name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in self.state.items()
    }

  @property
  def metadata(self):
    return {'param_layout': sources.layout_of(self.state), **(self._metadata or {})}

  def read_array(self, name):
    return self.state[name]

  def read(self, wanted):
    self.batches.append(list(wanted))
    return {name: self.state[name] for name in wanted}
