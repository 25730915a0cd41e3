"""A batch of the small model."""

import pytest

from tests.models import model_cases


@pytest.fixture(name='batch')
def batch_fixture():
  return model_cases.make_batch()
