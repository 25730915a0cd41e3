"""Memory of devices: which of them report it, metrics, text, and warnings."""

import dataclasses
import logging

import jax
import pytest

from t5x_lite import runtime
from t5x_lite.errors import ConfigError


@dataclasses.dataclass
class _Device:
  """A device as JAX has it, with statistics, or an error, or neither."""

  id: int
  platform: str = 'gpu'
  stats: dict | Exception | None = None

  def memory_stats(self):
    if isinstance(self.stats, Exception):
      raise self.stats
    return self.stats


def _stats(in_use, peak, limit=80):
  return {
    'num_allocs': 7,
    'bytes_in_use': in_use << 30,
    'peak_bytes_in_use': peak << 30,
    'bytes_limit': limit << 30,
  }


def test_metrics_of_each_device_and_a_text_about_the_fullest():
  memory = runtime.DeviceMemory([_Device(4, stats=_stats(10, 12)), _Device(5, stats=_stats(9, 20))])
  metrics = memory.metrics()
  assert set(metrics) == {
    'memory/num_devices',
    *(
      f'memory/{name}/device_{i}'
      for name in ('bytes_in_use', 'peak_bytes_in_use', 'bytes_limit')
      for i in (4, 5)
    ),
  }
  assert (
    metrics['memory/num_devices'] == 2
    and metrics['memory/peak_bytes_in_use/device_5'] == 20 * 2**30
  )
  assert memory.describe() == 'memory 10.0 GiB, peak 20.0 GiB of 80.0 GiB'


@pytest.mark.parametrize(
  'devices, is_enabled',
  [
    (jax.local_devices(), None),
    ([_Device(0, 'cpu', _stats(1, 1))], None),
    ([_Device(0)], None),
    ([_Device(0, stats=_stats(1, 1))], False),
  ],
)
def test_nothing_on_cpus_and_without_statistics(devices, is_enabled):
  memory = runtime.DeviceMemory(devices, is_enabled=is_enabled)
  assert memory.metrics() == {} and memory.describe() == ''


def test_a_backend_without_limit_or_peak_has_fewer_metrics():
  memory = runtime.DeviceMemory([_Device(0, 'cpu', {'bytes_in_use': 2048})], is_enabled=True)
  assert memory.metrics() == {'memory/num_devices': 1, 'memory/bytes_in_use/device_0': 2048}
  assert memory.describe() == 'memory 2.00 KiB, peak 0 B'


def test_memory_that_is_not_reported_cannot_be_required():
  with pytest.raises(
    ConfigError, match=r"LogConfig.device_memory` must be False or None, .* got True. .*'gpu'"
  ):
    runtime.DeviceMemory([_Device(0, stats=_stats(1, 1)), _Device(1)], is_enabled=True)


def test_warnings_come_once(caplog):
  caplog.set_level(logging.WARNING, 't5x_lite')
  devices = [_Device(0, stats=_stats(10, 78)), _Device(1, stats=_stats(10, 12))]
  memory = runtime.DeviceMemory(devices)
  devices[1].stats = jax.errors.JaxRuntimeError('INTERNAL: the device is lost')
  for _ in range(3):
    assert memory.metrics()['memory/num_devices'] == 1
    assert memory.describe() == 'memory 10.0 GiB, peak 78.0 GiB of 80.0 GiB'
  texts = sorted(record.getMessage() for record in caplog.records)
  assert len(texts) == 2 and 'Device 0 has used 78.0 GiB of 80.0 GiB' in texts[0]
  assert texts[1] == 'Device 1 does not report its memory: INTERNAL: the device is lost'
