"""Device meshes: the position of each device in the (`data`, `model`) grid.

The model axis carries most of the traffic, so it uses the fastest links: neighbours in the TPU torus, or the devices
of one process and then of one NVLink domain on GPU, before the data-centre network (DCN). TPU v2 to v4 have T5X's
tiles; `jax.experimental.mesh_utils` arranges all other devices. Virtual CPU devices are arranged like GPUs, so that a
CPU test sees the mesh of an accelerator.
"""

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from jax.sharding import Mesh
import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.partitioning import tiles
from t5x_lite.partitioning.tiles import HardwareMesh
from t5x_lite.partitioning.tiles import is_in_torus
from t5x_lite.types import Device

# Axes of a mesh that spans several slices (ICI within a slice, DCN between slices).
HYBRID_AXIS_NAMES = ('replica', 'data', 'model')


def make_mesh(devices: np.ndarray, axis_names: Sequence[str]) -> Mesh:
  """Return a mesh whose axes all have type Auto: the compiler propagates shardings from constraints.

  Args:
    devices: array of devices [size of axis 0, size of axis 1, ...].
    axis_names: name of each axis.
  """
  return Mesh(devices, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def devices_of(backend: str | None) -> list[Device]:
  """Return all devices of a platform, by default of JAX's default platform.

  Raises:
    ConfigError: JAX does not have the platform.
  """
  try:
    return jax.devices(backend)
  except RuntimeError as error:
    raise checks.invalid(
      '', 'backend', 'a platform of this machine or None', backend, f'JAX says: {error}.'
    ) from error


def get_mesh(
  model_parallel_submesh: HardwareMesh,
  input_devices: Sequence[Device] = (),
  input_local_devices: Sequence[Device] = (),
  tile_by_host_if_needed: bool = True,
  backend: str | None = None,
) -> Mesh:
  """Return the (`data`, `model`) mesh whose model axis runs over one tile of the hardware grid.

  Every process must own a block of the mesh (see `LocalChunker`), and the order of devices within both axes is chosen
  accordingly: if a tile spans two hardware axes, swapping their order may suffice; otherwise tiles are arranged process
  by process, which may lengthen the paths of some collectives. Several slices follow one another along the data axis.

  Args:
    model_parallel_submesh: extents of the tile: (x, y, z, core) for devices with coordinates, else (processes, local
      devices). Each must divide the extent of the grid.
    input_devices: devices to arrange, by default all devices of `backend`.
    input_local_devices: devices of one process, by default of the process at the grid's origin.
    tile_by_host_if_needed: arrange tiles process by process where needed.
    backend: name of the platform; None for JAX's default.

  Returns:
    A mesh of shape (devices / tile size, tile size).

  Raises:
    ConfigError: the tile does not fit the grid or the processes' blocks, or the grid is not complete.
  """
  tile = tuple(int(extent) for extent in model_parallel_submesh)
  devices = list(input_devices) or devices_of(backend)
  if is_in_torus(devices[0]):
    slices = _by_slice(devices)
  else:
    slices = [devices]
  blocks = [
    tiles.tile_slice(tile, members, input_local_devices, tile_by_host_if_needed)
    for members in slices
  ]
  return make_mesh(np.concatenate(blocks), ('data', 'model'))


def get_cpu_mesh(num_partitions: int | None = None) -> Mesh:
  """Return a (`data`, `model`) mesh of the CPU devices.

  Args:
    num_partitions: size of the model axis. None, T5X's default, makes the devices of each process its model axis.

  Raises:
    ConfigError: see `mesh_by_topology`.
  """
  devices = devices_of('cpu')
  return mesh_by_topology(devices, num_partitions or len(devices) // len(_by_process(devices)))


def get_gpu_mesh(num_partitions: int) -> Mesh:
  """Return a (`data`, `model`) mesh of the GPUs; the model axis fills each process first.

  Args:
    num_partitions: size of the model axis.

  Raises:
    ConfigError: see `mesh_by_topology`.
  """
  return mesh_by_topology(devices_of('gpu'), num_partitions)


def _in_order(devices: Sequence[Device]) -> list[Device]:
  """Return the devices in the order that `mesh_utils` expects: by z, y, x and core, or by process and number."""

  def key(device):
    if is_in_torus(device):
      return (*reversed(device.coords), device.core_on_chip)
    return (device.process_index, device.id)

  return sorted(devices, key=key)


def _by_process(devices: Sequence[Device]) -> list[list[Device]]:
  """Return the devices of each process, both levels sorted."""
  devices = _in_order(devices)
  return _group(devices, [device.process_index for device in devices])


def _by_slice(devices: Sequence[Device]) -> list[list[Device]]:
  """Return the devices of each slice, both levels sorted; devices without `slice_index` form one slice."""
  devices = _in_order(devices)
  return _group(devices, [getattr(device, 'slice_index', None) or 0 for device in devices])


def num_slices(mesh: Mesh) -> int:
  """Return the number of slices that the devices of a mesh are in."""
  return len(_by_slice(mesh.devices.ravel().tolist()))


def _group(devices: Sequence[Device], numbers: Sequence[int]) -> list[list[Device]]:
  """Return the devices grouped by their `numbers`, in ascending order of the numbers."""
  groups: dict[int, list[Device]] = {}
  for device, number in zip(devices, numbers, strict=True):
    groups.setdefault(number, []).append(device)
  return [groups[number] for number in sorted(groups)]


def mesh_by_topology(devices: Sequence[Device], num_partitions: int) -> Mesh:
  """Return a (`data`, `model`) mesh whose model axis uses the fastest links first.

  The fastest links are those within a process, for devices without coordinates, then those within a slice (ICI between
  TPUs, NVLink between GPUs). The model axis fills these first; the rest of the model axis, and then of the data axis,
  spans the network. Within a slice, `mesh_utils` chooses the positions.

  Args:
    devices: all devices; slices have equal numbers of devices, and so have processes if devices have no coordinates.
    num_partitions: size of the model axis.

  Returns:
    A mesh of shape (devices / num_partitions, num_partitions).

  Raises:
    ConfigError: `num_partitions` does not divide the devices of a process, then of a slice, then over slices; groups
      are unequal; or `mesh_utils` has no mesh for a slice.
  """
  slices = _by_slice(devices)
  processes = _by_process(devices)
  # Devices with coordinates have fast links across processes.
  if is_in_torus(devices[0]):
    levels = {'slices': slices}
  else:
    levels = {'slices': slices, 'processes': processes}
  for name, groups in levels.items():
    sizes = sorted({len(group) for group in groups}, reverse=True)
    if len(sizes) > 1:
      raise errors.ConfigError(
        f'The {name} must have equal numbers of devices, got {sizes}. Start every process with '
        'the same devices, on slices of one size.'
      )
  possible = _model_axis_sizes(
    [*(len(groups[0]) for groups in reversed(levels.values())), len(devices)]
  )
  if num_partitions not in possible:
    remedy = ''
    if devices[0].platform == 'cpu':
      remedy = 'XLA_FLAGS=--xla_force_host_platform_device_count=N makes virtual CPU devices.'
    raise checks.invalid(
      '',
      'num_partitions',
      f'one of {possible} for {len(slices)} slice(s) of {len(processes) // len(slices)} '
      f'process(es) of {len(processes[0])} {devices[0].platform} device(s)',
      num_partitions,
      remedy,
    )
  local_model = math.gcd(
    num_partitions, len(slices[0])
  )  # the entire model axis, or all devices of a slice
  dcn_model = num_partitions // local_model
  return make_mesh(
    _join_slices(
      slices, (len(slices[0]) // local_model, local_model), (len(slices) // dcn_model, dcn_model)
    ),
    ('data', 'model'),
  )


def _model_axis_sizes(sizes: Sequence[int]) -> list[int]:
  """Return the valid sizes of a model axis that fills each group of devices before it spans the next larger group.

  Args:
    sizes: devices of a group, from the smallest kind of groups to all devices; each divides the next.

  >>> _model_axis_sizes([4, 12])
  [1, 2, 4, 12]
  """
  possible = {1}
  inner = 1
  for size in sizes:
    possible |= {
      inner * number for number in range(1, size // inner + 1) if size // inner % number == 0
    }
    inner = size
  return sorted(possible)


def _join_slices(
  slices: Sequence[Sequence[Device]], ici_shape: Sequence[int], dcn_shape: Sequence[int]
) -> np.ndarray:
  """Return devices as `mesh_utils.create_hybrid_device_mesh` does; the slices are arguments, not read from devices.

  Args:
    slices: the devices of each slice, in the order of `_in_order`.
    ici_shape: extents of the mesh within a slice; the last axis has the most traffic.
    dcn_shape: extents over slices.

  Raises:
    ConfigError: `mesh_utils` has no mesh for a slice.
  """
  blocks = np.empty(len(slices), dtype=object)
  for index, members in enumerate(slices):
    try:
      blocks[index] = mesh_utils.create_device_mesh(
        ici_shape, members, allow_split_physical_axes=True
      )
    except (AssertionError, NotImplementedError, ValueError) as error:
      # The message of JAX lists all devices.
      bounds = tiles.bounds_from_last_device(max(members, key=tiles.get_coords))
      raise errors.ConfigError(
        f'JAX has no layout for {len(members)} {members[0].device_kind} devices in a grid of {bounds}, only for full '
        'boxes of chips. Give model_parallel_submesh, the (x, y, z, core) extents of a tile, or mesh.'
      ) from error
  return np.block(blocks.reshape(dcn_shape).tolist())


def hybrid_mesh(
  ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], backend: str | None = None
) -> Mesh:
  """Return a (`replica`, `data`, `model`) mesh over several slices.

  A slice is a set of devices with fast links: devices with the same `slice_index`; except on TPU, the devices of a
  process if the numbers fit; on CPU also virtual devices with consecutive ids, so that the layout of a pod can be
  tested on one machine.

  Args:
    ici_mesh_shape: (replica, data, model) extents within a slice.
    dcn_mesh_shape: (replica, data, model) extents over slices.
    backend: name of the platform; None for JAX's default.

  Returns:
    A mesh whose extents are the products of the two shapes.

  Raises:
    ConfigError: the shapes do not have three extents or do not match the numbers of slices and devices, or `mesh_utils`
      has no mesh for a slice.
  """
  ici = tuple(ici_mesh_shape)
  dcn = tuple(dcn_mesh_shape)
  devices = _in_order(devices_of(backend))
  slice_numbers: list[list[Any]] = [[getattr(device, 'slice_index', None) for device in devices]]
  if devices[0].platform != 'tpu':
    slice_numbers.append([device.process_index for device in devices])
  if devices[0].platform == 'cpu':
    slice_numbers.append([index // math.prod(ici) for index in range(len(devices))])
  # Devices without `slice_index` cannot be grouped by it.
  candidates = [_group(devices, numbers) for numbers in slice_numbers if None not in numbers]
  sizes = [sorted({len(members) for members in slices}) for slices in candidates]
  fitting = []
  for slices, size in zip(candidates, sizes, strict=True):
    if len(slices) == math.prod(dcn) and size == [math.prod(ici)]:
      fitting.append(slices)
  if not fitting or len(ici) != 3 or len(dcn) != 3:
    got = (
      ' or '.join(
        f'{len(slices)} slice(s) of {"/".join(map(str, size))} device(s)'
        for slices, size in zip(candidates, sizes, strict=True)
      )
      or 'devices without slice_index'
    )
    raise errors.ConfigError(
      f'`ici_mesh_shape` and `dcn_mesh_shape` must be three extents each, of {HYBRID_AXIS_NAMES}, whose products are '
      f'the devices of a slice and the slices, got {ici} and {dcn} for {got}.'
    )
  return make_mesh(_join_slices(fitting[0], ici, dcn), HYBRID_AXIS_NAMES)


def default_mesh(
  num_partitions: int,
  model_parallel_submesh: HardwareMesh | None = None,
  backend: str | None = None,
  ici_mesh_shape: Sequence[int] | None = None,
  dcn_mesh_shape: Sequence[int] | None = None,
) -> Mesh:
  """Return the mesh for the devices of this job.

  Args:
    num_partitions: size of the model axis, if no other argument decides.
    model_parallel_submesh: hardware tile of the model axis, see `get_mesh`.
    backend: name of the platform; None for JAX's default.
    ici_mesh_shape: extents within a slice, see `hybrid_mesh`; needs `dcn_mesh_shape`.
    dcn_mesh_shape: extents over slices; needs `ici_mesh_shape`.

  Returns:
    A (`replica`, `data`, `model`) mesh if the two shapes are given, else a (`data`, `model`) mesh.

  Raises:
    ConfigError: the arguments do not fit the devices, or there is no default mesh for them.
  """
  if ici_mesh_shape and dcn_mesh_shape:
    return hybrid_mesh(ici_mesh_shape, dcn_mesh_shape, backend)
  if model_parallel_submesh:
    return get_mesh(model_parallel_submesh, backend=backend)
  devices = devices_of(backend)
  if not (is_in_torus(devices[0]) and devices[0].device_kind in tiles.T5X_KINDS):
    return mesh_by_topology(devices, num_partitions)
  last_device = max(devices, key=tiles.get_coords)
  bounds = tiles.bounds_from_last_device(last_device)
  tile = tiles.default_tile(last_device.device_kind, bounds, num_partitions)
  if tile is None:
    raise errors.ConfigError(
      f'No default mesh for num_partitions={num_partitions} on {last_device.device_kind} devices in a grid of '
      f'{bounds}. Give model_parallel_submesh, the (x, y, z, core) extents of the model-parallel tile.'
    )
  return get_mesh(tile, backend=backend)
