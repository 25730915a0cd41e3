"""Default meshes of TPUs after v4 and of GPU clusters, from fake devices of all sizes up to 4096."""

import itertools
import math

from jax.experimental import mesh_utils
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from tests.partitioning.fake_pods import use_devices
from tests.partitioning.test_golden import FakeGpuDevice
from tests.partitioning.test_golden import SlicedTpuDevice


def tpu_slices(kind, chips, host, num_slices=1):
  """Return the devices of slices of `chips` (x, y, z), of which each process has a box of `host` (x, y, z)."""
  cores = 2 if kind == 'TPU7x' else 1
  hosts = [chip // extent for chip, extent in zip(chips, host, strict=True)]
  size, devices = math.prod(chips) * cores, []
  for number, (z, y, x, core) in itertools.product(
    range(num_slices), itertools.product(*map(range, reversed(chips)), range(cores))
  ):
    process = (
      (z // host[2] * hosts[1] + y // host[1]) * hosts[0] + x // host[0] + number * math.prod(hosts)
    )
    devices.append(
      SlicedTpuDevice(
        id=len(devices),
        process_index=process,
        coords=(x, y, z),
        core_on_chip=core,
        device_kind=kind,
        slice_index=number,
      )
    )
  assert len(devices) == size * num_slices
  return devices


def gpu_nodes(num_processes, num_local, processes_per_slice=None):
  """Return GPUs; slices are NVLink domains, all of one number where JAX does not know them."""
  return [
    FakeGpuDevice(
      id=index,
      process_index=index // num_local,
      coords=(index % num_local,),
      slice_index=index // num_local // processes_per_slice if processes_per_slice else 0,
    )
    for index in range(num_processes * num_local)
  ]


def divisors(number):
  return [n for n in range(1, number + 1) if number % n == 0]


_FLAT = [
  ((1, 1, 1), (1, 1, 1)),
  ((2, 2, 1), (2, 2, 1)),
  ((2, 4, 1), (2, 4, 1)),
  ((4, 2, 1), (2, 2, 1)),
  ((2, 4, 1), (2, 2, 1)),
  ((4, 4, 1), (2, 2, 1)),
  ((4, 8, 1), (2, 2, 1)),
  ((8, 8, 1), (2, 4, 1)),
  ((8, 16, 1), (2, 2, 1)),
  ((16, 16, 1), (2, 2, 1)),
]
_CUBES = [((2, 2, z), (2, 2, 1)) for z in (1, 2, 4)] + [
  (chips, (2, 2, 1))
  for chips in ((2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 4, 12), (4, 8, 8), (8, 8, 8), (8, 8, 12))
]
_TPUS = [
  *(('TPU v5 lite', *shape, 1) for shape in _FLAT),
  *(('TPU v6 lite', *shape, 1) for shape in _FLAT),
  *(('TPU v5p', *shape, 1) for shape in _CUBES),
  *(('TPU v5', *shape, 1) for shape in _CUBES[:5]),
  *(('TPU7x', *shape, 1) for shape in _CUBES),
  ('TPU v5p', (16, 16, 16), (2, 2, 1), 1),
  ('TPU7x', (8, 16, 16), (2, 2, 1), 1),
  ('TPU v5 lite', (16, 16, 1), (2, 2, 1), 16),
  ('TPU v6 lite', (16, 16, 1), (2, 2, 1), 16),
  ('TPU v6 lite', (4, 4, 1), (2, 2, 1), 3),
  ('TPU v5p', (2, 2, 2), (2, 2, 1), 2),
  ('TPU7x', (4, 4, 4), (2, 2, 1), 4),
]


class Table:
  """Facts about the devices of a mesh, as arrays in its shape."""

  def __init__(self, mesh):
    table = np.array([(d.id, d.process_index, d.slice_index) for d in mesh.devices.flat])
    self.id, self.process, self.slice = np.moveaxis(table.reshape(*mesh.devices.shape, 3), -1, 0)
    self.mesh = mesh

  def num_per_row(self, facts, axis=-1):
    """Return the number of different values along `axis`, the largest anywhere."""
    ordered = np.sort(facts, axis=axis)
    return int((np.diff(ordered, axis=axis) > 0).sum(axis=axis).max()) + 1

  def check_devices(self, devices):
    assert sorted(self.id.ravel()) == list(range(len(devices)))


def check_loading(partitioner, devices):
  """Brute force: processes load the rows that their devices hold, and all rows are loaded."""
  mesh, axes = partitioner.mesh, partitioner.data_partition_spec[0]
  axes = (axes,) if isinstance(axes, str) else axes
  order = [mesh.axis_names.index(axis) for axis in axes]
  rest = [axis for axis in range(mesh.devices.ndim) if axis not in order]
  owners = Table(mesh).process.transpose(order + rest).reshape(partitioner.data_mesh_size, -1)
  held = {}
  for row, processes in enumerate(owners.tolist()):
    for process in processes:
      held.setdefault(process, set()).add(row)
  processes = sorted(held) if len(held) <= 8 else sorted(held)[:: len(held) // 3]
  pieces = {}
  for process in processes:
    layout = partitioner.get_data_layout(host_index=process)
    assert layout.num_shards * len(held[process]) == layout.batch_size == len(owners)
    assert pieces.setdefault(layout.shard_id, held[process]) == held[process]
    assert set(partitioner.get_rows(layout.batch_size, process)) == held[process]
  assert len(set(map(frozenset, pieces.values()))) == len(pieces)
  if len(processes) == len(held):
    assert sorted(pieces) == list(range(layout.num_shards)) and set().union(
      *pieces.values()
    ) == set(range(len(owners)))
    first = [
      process
      for process in processes
      if partitioner.get_data_layout(host_index=process).is_first_host_in_replica_set
    ]
    assert len(first) == layout.num_shards and len(
      {frozenset(held[process]) for process in first}
    ) == len(first)


@pytest.mark.parametrize('kind,chips,host,num_slices', _TPUS)
def test_tpus(kind, chips, host, num_slices):
  """All sizes of the model axis: every device once, a box of neighbours within a slice, data over slices."""
  devices = tpu_slices(kind, chips, host, num_slices)
  size = len(devices) // num_slices
  places = np.array([(*device.coords, device.core_on_chip) for device in devices])
  with use_devices(devices[::-1], 0):
    for num_partitions in [*divisors(size), *(size * n for n in divisors(num_slices)[1:])]:
      partitioner = partitioning.PjitPartitioner(num_partitions=num_partitions)
      table = Table(partitioner.mesh)
      assert dict(partitioner.mesh.shape) == {
        'data': len(devices) // num_partitions,
        'model': num_partitions,
      }
      table.check_devices(devices)
      assert table.num_per_row(table.slice) == max(1, num_partitions // size)
      if num_partitions <= size:
        along_model = places[table.id]  # [data, model, (x, y, z, core)]
        extents = along_model.max(axis=1) - along_model.min(axis=1) + 1
        assert (extents.prod(axis=-1) == num_partitions).all()
        # Slices follow one another along the data axis.
        assert (np.diff(table.slice[:, 0]) >= 0).all()
      check_loading(partitioner, devices)


@pytest.mark.parametrize(
  'num_processes,num_local,processes_per_slice',
  [
    # H100 nodes of 8, one process per node: JAX calls a node a slice.
    *((nodes, 8, 1) for nodes in (1, 2, 3, 8, 64, 512)),
    (1, 1, 1),
    (1, 2, 1),
    (1, 4, 1),
    (4, 8, None),
    # One process per GPU.
    (8, 1, 8),
    (32, 1, 8),
    (4096, 1, 8),
    # GB200: processes of 4 GPUs, NVLink domains of 72 or 64.
    (1, 4, 1),
    (18, 4, 18),
    (36, 4, 18),
    (1024, 4, 16),
    (1008, 4, 18),
  ],
)
def test_gpus(num_processes, num_local, processes_per_slice):
  """The model axis fills a process, then an NVLink domain; the data axis goes over the network."""
  devices = gpu_nodes(num_processes, num_local, processes_per_slice)
  per_slice = (processes_per_slice or num_processes) * num_local
  made = []
  with use_devices(devices, 0):
    for num_partitions in divisors(len(devices)):
      partitioner = partitioning.PjitPartitioner(num_partitions=num_partitions)
      fits = any(
        size % num_partitions == 0 and num_partitions % unit == 0
        for unit, size in ((1, num_local), (num_local, per_slice), (per_slice, len(devices)))
      )
      if not fits:
        with pytest.raises(
          errors.ConfigError, match=f'`num_partitions` must be one of .*, got {num_partitions}.'
        ):
          _ = partitioner.mesh
        continue
      made.append(num_partitions)
      table = Table(partitioner.mesh)
      assert partitioner.mesh.devices.shape == (len(devices) // num_partitions, num_partitions)
      table.check_devices(devices)
      assert table.num_per_row(table.process) == max(1, num_partitions // num_local)
      assert table.num_per_row(table.slice) == max(1, num_partitions // per_slice)
      check_loading(partitioner, devices)
      for process in (0, num_processes - 1):
        partitioning.LocalChunker(partitioner.mesh, process_index=process)
    with pytest.raises(errors.ConfigError) as error:
      partitioning.default_mesh(2 * len(devices))
    assert f'must be one of {made} for' in str(error.value)


@pytest.mark.parametrize(
  'devices,ici,dcn',
  [
    (tpu_slices('TPU v6 lite', (4, 4, 1), (2, 2, 1), 3), (4, 4), (3, 1)),
    (tpu_slices('TPU7x', (2, 2, 2), (2, 2, 1), 2), (2, 8), (2, 1)),
    (gpu_nodes(4, 8, 1), (2, 4), (4, 1)),
    (gpu_nodes(4, 8, 1), (1, 8), (2, 2)),
  ],
)
def test_the_mesh_is_that_of_create_hybrid_device_mesh(devices, ici, dcn):
  expected = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
  with use_devices(devices[::-1], 0):
    assert partitioning.default_mesh(ici[1] * dcn[1]).devices.tolist() == expected.tolist()
    hybrid = partitioning.default_mesh(
      1, ici_mesh_shape=(1, *ici), dcn_mesh_shape=(dcn[0], 1, dcn[1])
    )
    assert hybrid.devices.shape == (dcn[0], ici[0], ici[1] * dcn[1])
    assert hybrid.devices.reshape(-1).tolist() == expected.reshape(-1).tolist()


@pytest.mark.parametrize(
  'kind,chips,submesh,num_slices',
  [
    ('TPU v5 lite', (4, 8, 1), (2, 2, 1, 1), 1),
    ('TPU v5 lite', (4, 4, 1), (4, 2, 1, 1), 3),
    ('TPU v5p', (4, 4, 4), (2, 2, 2, 1), 2),
    ('TPU7x', (2, 4, 4), (2, 2, 1, 2), 2),
    ('TPU v4', (2, 2, 4), (2, 2, 1, 1), 2),
    ('TPU v9', (4, 4, 1), (2, 1, 1, 1), 1),
  ],
)
def test_submesh_of_slices(kind, chips, submesh, num_slices):
  devices = tpu_slices(kind, chips, (2, 2, 1), num_slices)
  places = np.array([(*device.coords, device.core_on_chip) for device in devices])
  with use_devices(devices, 0):
    for options in ({'model_parallel_submesh': submesh}, {'num_partitions': math.prod(submesh)}):
      partitioner = partitioning.PjitPartitioner(**options)
      table = Table(partitioner.mesh)
      table.check_devices(devices)
      assert table.num_per_row(table.slice) == 1
      if 'model_parallel_submesh' in options:
        tiles = places[table.id]
        assert (tiles.max(axis=1) - tiles.min(axis=1) + 1 == submesh).all()
      check_loading(partitioner, devices)


def test_errors_of_unsupported_layouts():
  full = tpu_slices('TPU v5 lite', (4, 4, 1), (2, 2, 1))
  two = tpu_slices('TPU v5 lite', (2, 2, 1), (2, 2, 1), 2)
  cases = [
    (
      full,
      3,
      r'one of \[1, 2, 4, 8, 16\] for 1 slice.s. of 4 process.es. of 4 tpu device.s., got 3',
    ),
    (two, 16, r'one of \[1, 2, 4, 8\] for 2 slice.*got 16'),
    (full[:-1], 1, r'JAX has no layout for 15 TPU v5 lite devices .*Give model_parallel_submesh'),
    (
      two[:-1],
      1,
      r'The slices must have equal numbers of devices, got \[4, 3\]. Start every process',
    ),
    (gpu_nodes(4, 8, 1)[:-4], 1, r'The slices must have equal numbers of devices, got \[8, 4\]'),
    (
      gpu_nodes(2, 8),
      3,
      r'one of \[1, 2, 4, 8, 16\] for 1 slice.s. of 2 process.es. of 8 gpu .*got 3',
    ),
  ]
  for devices, num_partitions, message in cases:
    with use_devices(devices, 0), pytest.raises(errors.ConfigError, match=message):
      partitioning.default_mesh(num_partitions)
  with (
    use_devices(full[:-1], 0),
    pytest.raises(errors.ConfigError, match='JAX has no layout for 15'),
  ):
    partitioning.default_mesh(1, ici_mesh_shape=(1, 15, 1), dcn_mesh_shape=(1, 1, 1))
  # A model axis of 3 chips of 12, of which processes have 2.
  with use_devices(tpu_slices('TPU v5p', (12, 4, 4), (2, 2, 1)), 0):
    partitioner = partitioning.PjitPartitioner(num_partitions=3)
    with pytest.raises(
      errors.ConfigError, match='same shards or disjoint ones.*Choose another num_partitions'
    ):
      partitioner.get_data_layout()
