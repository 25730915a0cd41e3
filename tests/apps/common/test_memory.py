"""Sizes that exceed the memory of a device: a warning, and an error from 10 times."""

import jax
import pytest

from t5x_lite import errors
from t5x_lite.apps.common import memory


@pytest.mark.parametrize(
  'needed, outcome', [(100, 'fits'), (101, 'warns'), (999, 'warns'), (1000, 'raises')]
)
def test_memory(needed, outcome, caplog):
  if outcome == 'raises':
    with pytest.raises(errors.ConfigError, match='must fit into 100 B of memory on each device'):
      memory.check(needed - 1, 1, 100)
    return
  memory.check(needed - 1, 1, 100)
  memory.check(10**30, 1, None)
  assert len(caplog.records) == (outcome == 'warns')
  total = memory.device_bytes(jax.devices()[:1])
  assert memory.device_bytes(jax.devices()[:4]) == total // 4
