"""Device meshes: which device sits at which place of the (`data`, `model`) grid.

The model axis carries the heaviest traffic, so it takes the fastest links: a compact tile of the TPU torus, or the
devices of one process on GPU (NVLink), before anything crosses the data-centre network (DCN). Virtual CPU devices are
laid out as GPUs are, so that a CPU test sees the mesh that an accelerator would.
"""

from collections.abc import Sequence
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
import numpy as np

from t5x_lite import errors

# (x, y, z, core) on TPU, (process, local device) elsewhere.
HardwareMesh = tuple[int, int, int, int] | tuple[int, int]
# Axes of a mesh that spans several slices (ICI within a slice, DCN between slices).
HYBRID_AXIS_NAMES = ('replica', 'data', 'model')

# Model-parallel tiles (x, y, z, core) of TPU v2 and v3 (two cores a chip) by number of partitions.
_TWO_CORE_TILES = {1: (1, 1, 1, 1), 2: (1, 1, 1, 2), 4: (2, 1, 1, 2), 8: (2, 2, 1, 2), 16: (4, 2, 1, 2)}


def make_mesh(devices: np.ndarray, axis_names: Sequence[str]) -> Mesh:
  """Returns a mesh whose axes are all of type Auto: the compiler propagates shardings from the constraints given."""
  return Mesh(devices, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def _devices_of(backend: str | None) -> list[jax.Device]:
  """Returns all devices of a platform, of the default one if None.

  Raises:
    ConfigError: JAX has no such platform here.
  """
  try:
    return jax.devices(backend)
  except RuntimeError as error:
    raise errors.ConfigError(f'Got backend={backend!r}, which JAX cannot use here ({error}); expected one of the '
                             'platforms that it lists, or None for the default one.') from error


def _is_in_torus(device: jax.Device) -> bool:
  """Whether the device has a place (x, y, z, core) in a torus. GPUs have `coords` too: one number, their local id."""
  return device.platform == 'tpu'


def get_coords(device: jax.Device) -> HardwareMesh:
  """Returns a device's place: (x, y, z, core) on TPU, else (process, local index)."""
  if _is_in_torus(device):
    return (*device.coords, device.core_on_chip)
  return (device.process_index, device.id % jax.local_device_count())


def bounds_from_last_device(last_device: jax.Device) -> HardwareMesh:
  """Returns the extents of the hardware grid, given the device with the largest coordinates."""
  if _is_in_torus(last_device):
    return tuple(place + 1 for place in get_coords(last_device))
  return (jax.process_count(), jax.local_device_count())


def get_mesh(model_parallel_submesh: HardwareMesh,
             input_devices: Sequence[jax.Device] = (),
             input_local_devices: Sequence[jax.Device] = (),
             tile_by_host_if_needed: bool = True,
             backend: str | None = None) -> Mesh:
  """Returns the (`data`, `model`) mesh whose model axis runs over one tile of the hardware grid.

  Every process must own a block of the mesh (see `LocalChunker`). The order of devices within both axes is chosen for
  that: if a tile spans two hardware axes, their order is swapped where that is enough; otherwise the
  tiles are laid out process by process, which may lengthen the way of some collectives.

  Args:
    model_parallel_submesh: extents of the tile: (x, y, z, core) for devices with coordinates, else (processes, local
      devices). Each must divide the extent of the grid.
    input_devices: devices to lay out, all of `backend` by default.
    input_local_devices: the devices of one process, by default those of the process at the grid's origin.
    tile_by_host_if_needed: lay tiles out process by process where needed.
    backend: platform name, the default one if None.

  Returns:
    A mesh of shape (devices / tile size, tile size).

  Raises:
    ConfigError: the tile does not fit the grid or the processes' blocks, or the grid has holes.
  """
  tile = tuple(int(extent) for extent in model_parallel_submesh)
  devices = sorted(input_devices or _devices_of(backend), key=get_coords)
  grid_shape = bounds_from_last_device(devices[-1])
  if len(tile) != len(grid_shape):
    raise errors.ConfigError(
        f'model_parallel_submesh={tile} has {len(tile)} extents; expected {len(grid_shape)} for the grid of '
        f'{devices[-1].platform} devices {grid_shape}. On devices without coordinates give num_partitions='
        f'{math.prod(tile)} instead, or (processes, local devices).')
  if any(extent < 1 or bound % extent for extent, bound in zip(tile, grid_shape)):
    raise errors.ConfigError(
        f'model_parallel_submesh={tile} does not tile the device grid {grid_shape}; expected extents that divide those '
        'of the grid. Choose such a tile, or give num_partitions.')
  if math.prod(grid_shape) != len(devices):
    raise errors.ConfigError(
        f'{len(devices)} devices do not fill the grid {grid_shape}; expected {math.prod(grid_shape)}. Pass a full '
        'block of devices, or give num_partitions.')
  grid = np.empty(grid_shape, dtype=object)
  for device in devices:
    grid[get_coords(device)] = device

  process_devices = list(input_local_devices) or [d for d in devices if d.process_index == devices[0].process_index]
  places = np.array([get_coords(device) for device in process_devices])
  block = tuple(int(extent) for extent in places.max(axis=0) - places.min(axis=0) + 1)

  order = _order_without_tiling(tile, grid_shape)
  if order is not None:
    grid = grid.transpose(order)
    tile = tuple(tile[axis] for axis in order)
  elif tile_by_host_if_needed:
    return make_mesh(_tile_by_process(grid, tile, block), ('data', 'model'))
  # Split each hardware axis into (which tile, place in tile), then gather the former as data, the latter as model.
  split = grid.reshape([part for bound, extent in zip(grid.shape, tile) for part in (bound // extent, extent)])
  ndim = len(tile)
  gathered = split.transpose([2 * axis for axis in range(ndim)] + [2 * axis + 1 for axis in range(ndim)])
  return make_mesh(gathered.reshape(-1, math.prod(tile)), ('data', 'model'))


def _order_without_tiling(tile: HardwareMesh, grid_shape: HardwareMesh) -> tuple[int, ...] | None:
  """Returns the order of the hardware axes in which processes own blocks without tiling, None if there is none.

  Processes of a TPU torus are plates in x and y (z extent 1). If one of the axes y and x is fully inside the tile and
  the rest of the plane is fully outside (or the other way round), Z-major order of that plane suffices.
  """
  if len(grid_shape) != 4:
    return None
  (gx, gy, gz, _), (mx, my, mz, _) = grid_shape, tile
  if (mx == gx > 1 and my == mz == 1) or (mx == 1 and my == gy > 1 and mz == gz > 1):
    return (0, 2, 1, 3)
  if (my == gy > 1 and mx == mz == 1) or (my == 1 and mx == gx > 1 and mz == gz > 1):
    return (2, 1, 0, 3)
  return None


def _tile_by_process(grid: np.ndarray, tile: HardwareMesh, block: HardwareMesh) -> np.ndarray:
  """Returns the devices as [data, model], each axis ordered by process first and by device within it second."""
  parts = []
  for bound, extent, local in zip(grid.shape, tile, block):
    # Extents of this hardware axis: data over processes, data within one, model over processes, model within one.
    if extent % local == 0:
      parts += [bound // extent, 1, extent // local, local]
    elif local % extent == 0:
      parts += [bound // local, local // extent, 1, extent]
    else:
      raise errors.ConfigError(
          f'model_parallel_submesh={tile} cuts the blocks of {block} devices that processes have at odd places; '
          'expected extents that divide those of a block, or are multiples of them. Choose such a tile, or give '
          'num_partitions.')
  ndim = len(tile)
  gathered = grid.reshape(parts).transpose([4 * axis + part for part in range(4) for axis in range(ndim)])
  return gathered.reshape(-1, math.prod(tile))


def get_cpu_mesh(num_partitions: int | None = None) -> Mesh:
  """Returns a (`data`, `model`) mesh of the CPU devices.

  Args:
    num_partitions: size of the model axis. None, as T5X has it: the devices of each process are its model axis.

  Raises:
    ConfigError: see `mesh_by_process`.
  """
  devices = _devices_of('cpu')
  return mesh_by_process(devices, num_partitions or len(devices) // len(_by_process(devices)))


def get_gpu_mesh(num_partitions: int) -> Mesh:
  """Returns a (`data`, `model`) mesh of the GPUs, the model axis within one process as far as it goes.

  Args:
    num_partitions: size of the model axis.

  Raises:
    ConfigError: see `mesh_by_process`.
  """
  return mesh_by_process(_devices_of('gpu'), num_partitions)


def _by_process(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
  """Returns the devices of each process, both levels sorted."""
  devices = sorted(devices, key=lambda device: device.id)
  return _group(devices, [device.process_index for device in devices])


def _group(devices: Sequence[jax.Device], numbers: Sequence[int]) -> list[list[jax.Device]]:
  """Returns the devices with equal `numbers`, groups in order of their number."""
  groups: dict[int, list[jax.Device]] = {}
  for device, number in zip(devices, numbers, strict=True):
    groups.setdefault(number, []).append(device)
  return [groups[number] for number in sorted(groups)]


def mesh_by_process(devices: Sequence[jax.Device], num_partitions: int) -> Mesh:
  """Returns a (`data`, `model`) mesh whose model axis stays within a process as far as it goes.

  The links between the devices of one process are the fast ones. The model axis fills them first; the remainder of
  it, and then of the data axis, goes over the network.

  Args:
    devices: all devices, the same number on each process.
    num_partitions: size of the model axis.

  Returns:
    A mesh of shape (devices / num_partitions, num_partitions).

  Raises:
    ConfigError: `num_partitions` does not divide the devices, within a process first and then over processes.
  """
  groups = _by_process(devices)
  num_local, num_processes = len(groups[0]), len(groups)
  if any(len(group) != num_local for group in groups):
    raise errors.ConfigError(f'The processes have {[len(group) for group in groups]} devices; expected equal numbers. '
                             'Start every process with the same devices.')
  # Whole divisors of a process, then whole processes.
  possible = [n for n in range(1, num_local + 1) if num_local % n == 0]
  possible += [num_local * n for n in range(2, num_processes + 1) if num_processes % n == 0]
  if num_partitions not in possible:
    raise errors.ConfigError(
        f'num_partitions={num_partitions} does not divide {num_processes} process(es) of {num_local} '
        f'{devices[0].platform} device(s); expected one of {possible}. Choose one of these, or another number of '
        'devices' + (' (XLA_FLAGS=--xla_force_host_platform_device_count=N makes virtual CPU devices).'
                     if devices[0].platform == 'cpu' else '.'))
  local_model = min(num_partitions, num_local)
  network_model = num_partitions // local_model
  blocks = np.empty((num_processes // network_model, network_model), dtype=object)
  for index, group in enumerate(groups):
    block = np.empty(num_local, dtype=object)
    block[:] = group
    blocks[divmod(index, network_model)] = block.reshape(num_local // local_model, local_model)
  return make_mesh(np.block(blocks.tolist()), ('data', 'model'))


def hybrid_mesh(ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], backend: str | None = None) -> Mesh:
  """Returns a (`replica`, `data`, `model`) mesh over several slices.

  A slice is a set of devices with fast links among them: what the devices say (`slice_index`); elsewhere than on TPU,
  if the numbers fit, the devices of a process; on CPU also virtual devices with consecutive ids, so that the layout of
  a pod can be tried on one machine.

  Args:
    ici_mesh_shape: (replica, data, model) extents within a slice.
    dcn_mesh_shape: (replica, data, model) extents over slices.
    backend: platform name, the default one if None.

  Returns:
    A mesh whose extents are the products of the two shapes.

  Raises:
    ConfigError: the shapes do not have three extents, or do not match the number of slices or devices.
  """
  ici, dcn = tuple(ici_mesh_shape), tuple(dcn_mesh_shape)
  for name, shape in (('ici_mesh_shape', ici), ('dcn_mesh_shape', dcn)):
    if len(shape) != 3 or not all(isinstance(extent, int) and extent > 0 for extent in shape):
      raise errors.ConfigError(f'{name}={shape}; expected three positive numbers, the extents of {HYBRID_AXIS_NAMES}.')
  devices = sorted(_devices_of(backend), key=lambda device: device.id)
  slice_numbers = [[getattr(device, 'slice_index', None) for device in devices]]
  if devices[0].platform != 'tpu':
    slice_numbers.append([device.process_index for device in devices])
  if devices[0].platform == 'cpu':
    slice_numbers.append([index // math.prod(ici) for index in range(len(devices))])
  # Devices that do not say which slice they are in are no candidates.
  candidates = [_group(devices, numbers) for numbers in slice_numbers if None not in numbers]
  sizes = [sorted({len(members) for members in slices}) for slices in candidates]
  fitting = [slices for slices, size in zip(candidates, sizes)
             if len(slices) == math.prod(dcn) and size == [math.prod(ici)]]
  if not fitting:
    got = ' or '.join(f'{len(slices)} slice(s) of {"/".join(map(str, size))} device(s)'
                      for slices, size in zip(candidates, sizes)) or 'devices that do not tell their slice'
    raise errors.ConfigError(
        f'ici_mesh_shape={ici} needs {math.prod(ici)} devices in each slice and dcn_mesh_shape={dcn} needs '
        f'{math.prod(dcn)} slices; got {got}. Choose shapes with these products.')
  slices = fitting[0]
  blocks = np.empty(len(slices), dtype=object)
  for index, members in enumerate(slices):
    blocks[index] = mesh_utils.create_device_mesh(ici, members)
  return make_mesh(np.block(blocks.reshape(dcn).tolist()), HYBRID_AXIS_NAMES)


def default_mesh(num_partitions: int,
                 model_parallel_submesh: HardwareMesh | None = None,
                 backend: str | None = None,
                 ici_mesh_shape: HardwareMesh | None = None,
                 dcn_mesh_shape: HardwareMesh | None = None) -> Mesh:
  """Returns the mesh for the devices at hand.

  Args:
    num_partitions: size of the model axis, where no other argument decides.
    model_parallel_submesh: hardware tile of the model axis, see `get_mesh`.
    backend: platform name, the default one if None.
    ici_mesh_shape: extents within a slice, see `hybrid_mesh`; needs `dcn_mesh_shape`.
    dcn_mesh_shape: extents over slices; needs `ici_mesh_shape`.

  Returns:
    A (`replica`, `data`, `model`) mesh if the two shapes are given, else a (`data`, `model`) mesh.

  Raises:
    ConfigError: the arguments do not fit the devices, or no default tile is known for them.
  """
  if ici_mesh_shape and dcn_mesh_shape:
    return hybrid_mesh(ici_mesh_shape, dcn_mesh_shape, backend)
  if model_parallel_submesh:
    return get_mesh(model_parallel_submesh, backend=backend)
  devices = _devices_of(backend)
  last_device = max(devices, key=get_coords)
  if not _is_in_torus(last_device):
    return mesh_by_process(devices, num_partitions)
  bounds = bounds_from_last_device(last_device)
  tile = _default_tile(last_device.device_kind, bounds, num_partitions)
  if tile is None:
    raise errors.ConfigError(
        f'No default mesh for num_partitions={num_partitions} on {last_device.device_kind} devices in a grid of '
        f'{bounds}. Give model_parallel_submesh, the (x, y, z, core) extents of the model-parallel tile.')
  return get_mesh(tile, backend=backend)


def _default_tile(device_kind: str, bounds: HardwareMesh, num_partitions: int) -> HardwareMesh | None:
  """Returns the model-parallel tile for a kind of TPU: a long ring where the torus closes, else a compact plate."""
  if device_kind in ('TPU v2', 'TPU v3'):
    return _TWO_CORE_TILES.get(num_partitions)
  if device_kind not in ('TPU v4', 'TPU v4 lite') or bounds[3] != 1:
    return None
  x, _, z, _ = bounds
  if num_partitions in (8, 16) and z >= num_partitions:
    return (1, 1, num_partitions, 1)
  if num_partitions == 16:
    return (8, 2, 1, 1) if x >= 8 else (4, 4, 1, 1) if x >= 4 else (2, 2, 4, 1)
  if num_partitions == 4:
    return (4, 1, 1, 1) if x >= 4 else (2, 2, 1, 1)
  return {1: (1, 1, 1, 1), 2: (1, 2, 1, 1), 8: (4, 2, 1, 1)}.get(num_partitions)
