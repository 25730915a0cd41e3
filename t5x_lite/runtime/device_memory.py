"""Memory of devices, as their backend reports it."""

from collections.abc import Mapping, Sequence
import logging
from typing import Any

import jax

from t5x_lite import checks
from t5x_lite.formatting import format_bytes

# Statistics of `jax.Device.memory_stats` that become metrics, in bytes.
_STATISTICS = ('bytes_in_use', 'peak_bytes_in_use', 'bytes_limit')
# Share of the limit above which a peak is close to an error for lack of memory.
_HIGH_SHARE = 0.95


class DeviceMemory:
  """Reads the memory of this process's devices; warns once of a device that is nearly full or stops to report.

  Reading does not wait for computations.
  """

  def __init__(self, devices: Sequence[Any], *, is_enabled: bool | None = None):
    """Read the memory once, to find out which devices report it.

    Args:
      devices: devices of this process (`jax.Device`).
      is_enabled: whether to read memory; None reads that of all devices that report it, except CPUs.

    Raises:
      ConfigError: `is_enabled` is True and a device does not report its memory.
    """
    self._warned: set[tuple[str, int]] = set()
    self._devices = []
    if is_enabled or (is_enabled is None and devices[0].platform != 'cpu'):
      self._devices = [device for device in devices if self._read(device)]
    if is_enabled and len(self._devices) < len(devices):
      raise checks.invalid(
        'LogConfig',
        'device_memory',
        'False or None, since not all devices report their memory',
        is_enabled,
        f'The backend is {devices[0].platform!r}.',
      )

  def metrics(self) -> dict[str, float]:
    """Return `memory/<statistic>/device_<id>` in bytes, and the number of devices that report, `memory/num_devices`.

    Returns:
      Metrics by name; {} if no memory is read.
    """
    if not self._devices:
      return {}
    found = self._read_all()
    metrics = {'memory/num_devices': float(len(found))}
    for device, stats in found.items():
      for name in _STATISTICS:
        if name in stats:
          metrics[f'memory/{name}/device_{device}'] = float(stats[name])
    return metrics

  def describe(self) -> str:
    """Return the largest numbers of all devices as text, e.g. 'memory 9.50 GiB, peak 12.0 GiB of 79.0 GiB', or ''."""
    found = self._read_all().values()
    if not found:
      return ''
    largest = [max(stats.get(name, 0) for stats in found) for name in _STATISTICS]
    in_use, peak, limit = largest
    text = f'memory {format_bytes(in_use)}, peak {format_bytes(peak)}'
    if limit:
      text += f' of {format_bytes(limit)}'
    return text

  def _read_all(self) -> dict[int, Mapping[str, int]]:
    """Return the statistics of each device that reports, by id."""
    found = {}
    for device in self._devices:
      stats = self._read(device)
      if stats:
        found[device.id] = stats
    for device, stats in found.items():
      peak = stats.get('peak_bytes_in_use', 0)
      limit = stats.get('bytes_limit', 0)
      if limit and peak > _HIGH_SHARE * limit:
        self._warn(
          'is full',
          device,
          'has used %s of %s: its memory is nearly full. Use smaller batches, more '
          'micro-batches or a remat_policy.',
          format_bytes(peak),
          format_bytes(limit),
        )
    return found

  def _read(self, device: Any) -> Mapping[str, int] | None:
    """Return the statistics of a device; None if it does not report any."""
    try:
      return device.memory_stats()
    except jax.errors.JaxRuntimeError as error:
      self._warn('fails', device.id, 'does not report its memory: %s', error)
      return None

  def _warn(self, kind: str, device: int, text: str, *args: Any) -> None:
    if (kind, device) not in self._warned:
      self._warned.add((kind, device))
      logging.getLogger(__name__).warning(f'Device %d {text}', device, *args)
