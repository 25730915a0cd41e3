"""Temporary folders of `export` and `convert` when Ctrl-C comes while they are made."""

import functools
import os

import pytest

from t5x_lite.apps.common import output_folder


@pytest.mark.parametrize(
  'write', [functools.partial(output_folder.replacing, last='x'), output_folder.creating]
)
def test_ctrl_c_right_after_the_folder_is_made_leaves_nothing(tmp_path, monkeypatch, write):
  made = []

  def mkdir(path, *args, original=os.mkdir, **kwargs):
    original(path, *args, **kwargs)
    made.append(path)
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'mkdir', mkdir)
  with pytest.raises(KeyboardInterrupt), write(tmp_path / 'out'):
    pass
  assert len(made) == 1 and not list(tmp_path.iterdir())
