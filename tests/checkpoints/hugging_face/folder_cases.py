"""Folders of Hugging Face with known arrays."""

import numpy as np

from t5x_lite.checkpoints.hugging_face import HuggingFaceFolder
from tests.checkpoints.hugging_face import hugging_face_cases as cases


def make(tmp_path, family='t5_1_1', arch=None, change=None, dtype='float32', **config):
  """Returns (path, our arrays) of a folder; `change` edits its tensors."""
  arch = arch or cases.BY_FAMILY[family]
  ours = cases.values(arch, dtype)
  theirs = cases.tensors(arch, ours)
  if change is not None:
    change(theirs)
  cases.make_folder(tmp_path / 'hf', theirs, cases.config_of(arch, family, **config))
  return tmp_path / 'hf', ours


def check(path, ours, arch):
  folder = HuggingFaceFolder(path)
  assert folder.architecture == arch
  assert {name: (leaf.shape, leaf.dtype) for name, leaf in folder.shapes().items()} == {
    name: (array.shape, array.dtype) for name, array in ours.items()
  }
  for name, array in ours.items():
    np.testing.assert_array_equal(folder.read_array(name).view(np.uint8), array.view(np.uint8))
  return folder
