"""The checkpoints that T5X wrote, as fixtures."""

import shutil

import pytest

from tests.checkpoints.sources import t5x_samples as samples


@pytest.fixture(scope='module')
def unpacked(tmp_path_factory):
  """Directories of both samples by their form; see `t5x_samples.unpack`. Tests must not change them."""
  return samples.unpack(tmp_path_factory.mktemp('samples'))


@pytest.fixture
def copy(unpacked, tmp_path):
  """A copy of the native sample that a test may change."""
  return shutil.copytree(unpacked['t5x'] / 'checkpoint_7', tmp_path / 'checkpoint_7')
