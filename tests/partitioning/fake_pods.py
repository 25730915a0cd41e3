"""Fake devices of TPU pods and GPU clusters, and the layouts that T5X computed for them."""

import dataclasses
import itertools
from unittest import mock

import jax

from tests import golden_data

GOLDEN, ARRAYS = golden_data.load('t5x/partitioning')


@dataclasses.dataclass(frozen=True)
class FakeTpuDevice:
  """Attributes of a TPU core that the mesh code reads."""

  id: int
  process_index: int
  coords: tuple[int, int, int]
  core_on_chip: int
  device_kind: str
  platform: str = 'tpu'


def fake_pod(case):
  """Return the devices of a golden case."""
  key = '|'.join(
    str(part) for part in (tuple(case['bounds']), tuple(case['host_layout']), case['kind'])
  )
  return [
    FakeTpuDevice(
      id=row[0],
      process_index=row[1],
      coords=tuple(row[2:5]),
      core_on_chip=row[5],
      device_kind=case['kind'],
    )
    for row in ARRAYS[f'device_table/{key}'].tolist()
  ]


def make_pod(kind, bounds):
  """Return the devices of a pod whose processes own 2 x 2 x 1 chips."""
  x, y, _, cores = bounds
  devices = []
  for px, py, pz, core in itertools.product(*map(range, bounds)):
    process = (px // 2) + (py // 2) * (x // 2) + pz * (x // 2) * (y // 2)
    number = ((pz * y + py) * x + px) * cores + core
    devices.append(
      FakeTpuDevice(
        id=number, process_index=process, coords=(px, py, pz), core_on_chip=core, device_kind=kind
      )
    )
  return devices


def use_devices(devices, process_index):
  """Make JAX report `devices`, as seen by one process."""

  def local_devices(process=None, backend=None):
    del backend
    process = process_index if process is None else process
    return [device for device in devices if device.process_index == process]

  return mock.patch.multiple(
    jax,
    devices=lambda backend=None: devices,
    local_devices=local_devices,
    process_index=lambda: process_index,
    process_count=lambda: len({device.process_index for device in devices}),
    local_device_count=lambda: len(local_devices()),
  )
