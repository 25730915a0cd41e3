"""T5X's model-parallel tiles: boxes of the hardware grid, whose devices form the model axis."""

from collections.abc import Sequence
import math

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.types import Device

# (x, y, z, core) on TPU, (process, local device) elsewhere.
HardwareMesh = tuple[int, ...]
# Model-parallel tiles (x, y, z, core) of TPU v2 and v3 (two cores a chip) by number of partitions.
_TWO_CORE_TILES = {
  1: (1, 1, 1, 1),
  2: (1, 1, 1, 2),
  4: (2, 1, 1, 2),
  8: (2, 2, 1, 2),
  16: (4, 2, 1, 2),
}
_TWO_CORE_KINDS = ('TPU v2', 'TPU v3')
# TPU kinds whose default tiles are T5X's.
T5X_KINDS = (*_TWO_CORE_KINDS, 'TPU v4', 'TPU v4 lite')


def is_in_torus(device: Device) -> bool:
  """Return whether the device has coordinates (x, y, z, core) in a torus. The `coords` of a GPU are its local id."""
  return device.platform == 'tpu'


def get_coords(device: Device) -> HardwareMesh:
  """Return the coordinates of a device: (x, y, z, core) on TPU, else (process, local index)."""
  if is_in_torus(device):
    return (*device.coords, device.core_on_chip)
  return (device.process_index, device.id % jax.local_device_count())


def bounds_from_last_device(last_device: Device) -> HardwareMesh:
  """Return the extents of the hardware grid, given the device with the largest coordinates."""
  if is_in_torus(last_device):
    return tuple(coordinate + 1 for coordinate in get_coords(last_device))
  return (jax.process_count(), jax.local_device_count())


def tile_slice(
  tile: HardwareMesh,
  devices: Sequence[Device],
  local_devices: Sequence[Device],
  tile_by_host_if_needed: bool,
) -> np.ndarray:
  """Return the devices of one slice as an array [data, model]; see `mesh.get_mesh`.

  Args:
    tile: extents of the tile.
    devices: devices of the slice.
    local_devices: devices of one process.
    tile_by_host_if_needed: arrange tiles process by process where needed.

  Raises:
    ConfigError: the tile does not divide the grid or the processes' blocks, or the grid is not complete.
  """
  devices = sorted(devices, key=get_coords)
  grid_shape = bounds_from_last_device(devices[-1])
  if all(extent == 1 for extent in tile):  # T5X's four extents on other devices than TPUs
    tile = (1,) * len(grid_shape)
  fits = len(tile) == len(grid_shape)
  for extent, bound in zip(tile, grid_shape, strict=False):
    if extent < 1 or bound % extent:
      fits = False
  if not fits:
    raise checks.invalid(
      '',
      'model_parallel_submesh',
      f'{len(grid_shape)} extents that divide the grid {grid_shape} of '
      f'{devices[-1].platform} devices',
      tile,
      f'Alternatively, set it to None, and num_partitions to '
      f'{math.prod(tile)} or another number that divides the number of devices.',
    )
  if math.prod(grid_shape) != len(devices):
    raise errors.ConfigError(
      f'{len(devices)} devices do not fill the grid {grid_shape} of {math.prod(grid_shape)}. Use a full block of '
      'devices, or give num_partitions instead.'
    )
  grid = np.empty(grid_shape, dtype=object)
  for device in devices:
    grid[get_coords(device)] = device

  process_devices = list(local_devices)
  if not process_devices:
    first_process = devices[0].process_index
    process_devices = [device for device in devices if device.process_index == first_process]
  coordinates = np.array([get_coords(device) for device in process_devices])
  extents = coordinates.max(axis=0) - coordinates.min(axis=0) + 1
  block = tuple(extents.tolist())

  order = _order_without_tiling(tile, grid_shape)
  if order is not None:
    grid = grid.transpose(order)
    tile = tuple(tile[axis] for axis in order)
  elif tile_by_host_if_needed:
    return _tile_by_process(grid, tile, block)
  # Split each hardware axis into (tile, position in the tile), then gather the former as data, the latter as model.
  parts = []
  for bound, extent in zip(grid.shape, tile, strict=True):
    parts += [bound // extent, extent]
  data_axes = range(0, len(parts), 2)
  model_axes = range(1, len(parts), 2)
  gathered = grid.reshape(parts).transpose([*data_axes, *model_axes])
  return gathered.reshape(-1, math.prod(tile))


def _order_without_tiling(tile: HardwareMesh, grid_shape: HardwareMesh) -> tuple[int, ...] | None:
  """Return the order of the hardware axes in which processes own blocks without tiling; None if no order works.

  Processes of a TPU torus are plates in x and y (z extent 1). If one of the axes y and x is fully inside the tile and
  the rest of the plane is fully outside (or vice versa), Z-major order of that plane suffices.
  """
  if len(grid_shape) != 4:
    return None
  (gx, gy, gz, _) = grid_shape
  (mx, my, mz, _) = tile
  if (mx == gx > 1 and my == mz == 1) or (mx == 1 and my == gy > 1 and mz == gz > 1):
    return (0, 2, 1, 3)
  if (my == gy > 1 and mx == mz == 1) or (my == 1 and mx == gx > 1 and mz == gz > 1):
    return (2, 1, 0, 3)
  return None


def _tile_by_process(grid: np.ndarray, tile: HardwareMesh, block: HardwareMesh) -> np.ndarray:
  """Return the devices as [data, model], each axis ordered by process and then by device within the process."""
  parts = []
  for bound, extent, local in zip(grid.shape, tile, block, strict=True):
    # Extents of this hardware axis: data over processes, data within one, model over processes, model within one.
    if extent % local == 0:
      parts += [bound // extent, 1, extent // local, local]
    elif local % extent == 0:
      parts += [bound // local, local // extent, 1, extent]
    else:
      raise checks.invalid(
        '',
        'model_parallel_submesh',
        f'extents that divide, or are multiples of, the blocks of {block} devices of the processes',
        tile,
        'Alternatively, set num_partitions instead.',
      )
  order = []
  for part in range(4):
    order += range(part, len(parts), 4)
  gathered = grid.reshape(parts).transpose(order)
  return gathered.reshape(-1, math.prod(tile))


def default_tile(
  device_kind: str, bounds: HardwareMesh, num_partitions: int
) -> HardwareMesh | None:
  """Return T5X's model-parallel tile: a long ring where the torus closes, else a compact plate.

  Args:
    device_kind: `device_kind` of the devices.
    bounds: extents of the hardware grid.
    num_partitions: size of the model axis.

  Returns:
    (x, y, z, core) extents, None if there is no default.
  """
  if device_kind in _TWO_CORE_KINDS:
    return _TWO_CORE_TILES.get(num_partitions)
  if bounds[3] != 1:
    return None
  x, _, z, _ = bounds
  if num_partitions in (8, 16) and z >= num_partitions:
    return (1, 1, num_partitions, 1)
  if num_partitions == 16:
    if x >= 8:
      return (8, 2, 1, 1)
    if x >= 4:
      return (4, 4, 1, 1)
    return (2, 2, 4, 1)
  if num_partitions == 4:
    if x >= 4:
      return (4, 1, 1, 1)
    return (2, 2, 1, 1)
  return {1: (1, 1, 1, 1), 2: (1, 2, 1, 1), 8: (4, 2, 1, 1)}.get(num_partitions)
