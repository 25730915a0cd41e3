"""T5X's model-parallel tiles: every submesh, default tiles, grids with holes."""

import jax
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from tests.partitioning import fake_pods


@pytest.mark.parametrize(
  'submesh', [(4, 2, 4, 1), (2, 4, 1, 1), (1, 1, 4, 1), (4, 1, 1, 1), (1, 4, 4, 1), (2, 1, 2, 1)]
)
def test_every_submesh_gives_tiles_and_process_blocks(submesh):
  """Tiles are boxes of the torus of the given extents, and each process owns a block of the mesh."""
  case = next(case for case in fake_pods.GOLDEN['cases'] if case['bounds'] == [4, 4, 4, 1])
  devices = fake_pods.fake_pod(case)
  with fake_pods.use_devices(devices, 3):
    mesh = partitioning.get_mesh(submesh)
    assert sorted(device.id for device in mesh.devices.ravel()) == sorted(
      device.id for device in devices
    )
    for tile in mesh.devices:
      places = [partitioning.get_coords(device) for device in tile]
      assert (
        tuple(max(column) - min(column) + 1 for column in zip(*places, strict=False)) == submesh
      )
    for process in range(16):
      partitioning.LocalChunker(mesh, process_index=process)


@pytest.mark.parametrize(
  'kind,bounds,num_partitions,tile',
  [
    ('TPU v2', (4, 4, 1, 2), 1, (1, 1, 1, 1)),
    ('TPU v3', (4, 4, 1, 2), 2, (1, 1, 1, 2)),
    ('TPU v3', (8, 8, 1, 2), 16, (4, 2, 1, 2)),
    ('TPU v4', (4, 4, 4, 1), 1, (1, 1, 1, 1)),
    ('TPU v4', (4, 4, 4, 1), 2, (1, 2, 1, 1)),
    ('TPU v4', (4, 4, 4, 1), 4, (4, 1, 1, 1)),
    ('TPU v4', (2, 2, 4, 1), 4, (2, 2, 1, 1)),
    ('TPU v4', (4, 4, 8, 1), 8, (1, 1, 8, 1)),
    ('TPU v4', (4, 4, 16, 1), 16, (1, 1, 16, 1)),
    ('TPU v4', (8, 8, 8, 1), 16, (8, 2, 1, 1)),
    ('TPU v4', (4, 4, 8, 1), 16, (4, 4, 1, 1)),
    ('TPU v4', (2, 2, 4, 1), 16, (2, 2, 4, 1)),
  ],
)
def test_default_tile(kind, bounds, num_partitions, tile):
  """The tile that T5X's table gives for a number of partitions."""
  with fake_pods.use_devices(fake_pods.make_pod(kind, bounds), 0):
    mesh = partitioning.default_mesh(num_partitions)
    expected = partitioning.get_mesh(tile)
    assert mesh.devices.tolist() == expected.devices.tolist()
    coordinates = [partitioning.get_coords(device) for device in mesh.devices[0]]
    assert tuple(max(column) + 1 for column in zip(*coordinates, strict=False)) == tile


@pytest.mark.parametrize('kind,num_partitions', [('TPU v3', 3), ('TPU v4', 32), ('TPU v9', 2)])
def test_no_default_tile(kind, num_partitions):
  with fake_pods.use_devices(fake_pods.make_pod(kind, (4, 4, 1, 2)), 0):
    with pytest.raises(errors.ConfigError, match='Give model_parallel_submesh'):
      partitioning.default_mesh(num_partitions)


def test_grid_with_a_hole():
  devices = fake_pods.make_pod('TPU v3', (4, 4, 1, 2))
  with (
    fake_pods.use_devices(devices, 0),
    pytest.raises(errors.ConfigError, match='31 devices do not fill the grid'),
  ):
    partitioning.get_mesh((1, 1, 1, 2), input_devices=devices[1:])


def test_bounds_and_coords():
  device = fake_pods.FakeTpuDevice(
    id=7, process_index=1, coords=(3, 1, 0), core_on_chip=1, device_kind='TPU v3'
  )
  assert partitioning.get_coords(device) == (3, 1, 0, 1)
  assert partitioning.bounds_from_last_device(device) == (4, 2, 1, 2)
  cpu = jax.devices()[5]
  assert partitioning.get_coords(cpu) == (0, 5)
  assert partitioning.bounds_from_last_device(cpu) == (1, 8)
