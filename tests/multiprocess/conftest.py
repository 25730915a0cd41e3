"""One run that all tests of a file continue, each with another fault."""

import pytest


@pytest.fixture(scope='module')
def model_dir(tmp_path_factory):
  """Return the directory of the run."""
  return tmp_path_factory.mktemp('runs') / 'run'
