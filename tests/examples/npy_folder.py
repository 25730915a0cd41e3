"""Weights as NumPy files: a folder with one file per array, and an index that is written last."""

import json

import jax
import numpy as np

from t5x_lite import checkpoints
from t5x_lite import files
from t5x_lite.apps import convert

INDEX = 'npy_index.json'


@checkpoints.register_state_source
class NpySource(checkpoints.StateSource):
  """Reads the folder."""

  format = 'npy'
  title = 'NumPy folder'
  description = f'a folder of NumPy files ({INDEX} and *.npy)'

  @classmethod
  def is_stored_in(cls, root):
    return (root / INDEX).is_file()

  def __init__(self, path):
    super().__init__(path)
    self._folder = files.path(path)
    index = json.loads((self._folder / INDEX).read_text())
    self._shapes = {
      name: jax.ShapeDtypeStruct(tuple(shape), np.dtype(dtype))
      for name, (shape, dtype) in index.items()
    }

  def shapes(self):
    return self._shapes

  def read_array(self, name):
    with (self._folder / f'{name}.npy').open('rb') as file:
      # NumPy does not store the name of bfloat16.
      return np.load(file).view(self._shapes[name].dtype)


@convert.register_target
class NpyTarget(convert.StateTarget):
  """Writes the folder."""

  format = 'npy'
  title = 'NumPy folder'

  def write(self, folder, job, make):
    index = {}
    for name in job.plan.arrays:
      array = make(name)
      path = folder / f'{name}.npy'
      path.parent.mkdir(parents=True, exist_ok=True)
      with path.open('wb') as file:
        np.save(file, array)
      index[name] = array.shape, array.dtype.name
    (folder / INDEX).write_text(json.dumps(index))
