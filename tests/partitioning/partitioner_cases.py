"""Devices of several processes, without coordinates."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FakeDevice:
  """A device without coordinates."""

  id: int
  process_index: int
  platform: str = 'gpu'
  device_kind: str = 'fake'


def fake_devices(num_processes, num_local):
  return [
    FakeDevice(id=process * num_local + local, process_index=process)
    for process in range(num_processes)
    for local in range(num_local)
  ]
