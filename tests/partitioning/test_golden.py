"""Rules, meshes, layouts and chunks equal those that T5X computed for fake TPU pods."""

import dataclasses

import jax
from jax.sharding import PartitionSpec
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from tests.partitioning import fake_pods

# The cases with experts belong to moe/partitioning and are tested there.
CASES = [
  (index, case)
  for index, case in enumerate(fake_pods.GOLDEN['cases'])
  if case['moe_experts'] is None
]


@dataclasses.dataclass(frozen=True)
class SlicedTpuDevice(fake_pods.FakeTpuDevice):
  """A core of one of several slices."""

  slice_index: int = 0


def make_partitioner(case):
  return partitioning.PjitPartitioner(
    num_partitions=case['num_partitions'], model_parallel_submesh=case['submesh']
  )


def as_jsonable(slices):
  return [[piece.start, piece.stop] for piece in slices]


@pytest.mark.parametrize('name', fake_pods.GOLDEN['rules'])
def test_rules(name):
  dims, _, additional = name.partition('+')
  activation, parameter = (int(digit) for digit in dims.strip('()').split(','))
  rules = partitioning.standard_logical_axis_rules(
    activation,
    parameter,
    additional_rules=[('relpos_buckets', 'model'), ('foo', None)] if additional else None,
  )
  # T5X has no adapters.
  assert ('lora_rank', None) in rules
  common = [list(rule) for rule in rules if rule[0] != 'lora_rank']
  assert common == fake_pods.GOLDEN['rules'][name]


@pytest.mark.parametrize('name', fake_pods.GOLDEN['logical_to_mesh_examples'])
def test_logical_to_mesh(name):
  rules_name, _, axes = name.partition(':')
  spec = partitioning.logical_to_mesh_axes(
    axes.split(','), [tuple(rule) for rule in fake_pods.GOLDEN['rules'][rules_name]]
  )
  assert spec == PartitionSpec(*fake_pods.GOLDEN['logical_to_mesh_examples'][name])


def test_cases_left_out_are_those_with_experts():
  left_out = [
    case for index, case in enumerate(fake_pods.GOLDEN['cases']) if index not in dict(CASES)
  ]
  assert left_out and all(case['moe_experts'] for case in left_out)


@pytest.mark.parametrize('index,case', CASES, ids=[f'case{index}' for index, _ in CASES])
def test_mesh_and_layout(index, case):
  with fake_pods.use_devices(fake_pods.fake_pod(case), case['process_index']):
    partitioner = make_partitioner(case)
    if 'error' in case:
      with pytest.raises(errors.ConfigError, match='extents that divide the grid'):
        _ = partitioner.mesh
      return
    mesh = partitioner.mesh
    assert mesh.axis_names == tuple(case['axis_names'])
    assert dict(mesh.shape) == case['shape']
    assert [[device.id for device in row] for row in mesh.devices] == fake_pods.ARRAYS[
      f'case{index}/device_ids'
    ].tolist()
    assert [[device.process_index for device in row] for row in mesh.devices] == fake_pods.ARRAYS[
      f'case{index}/device_process'
    ].tolist()
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)

    layout = partitioner.get_data_layout(case['data_layout']['batch_size'])
    assert dataclasses.asdict(layout) == case['data_layout']
    assert partitioner.data_shards == layout.num_shards
    assert partitioner.data_shard_id == layout.shard_id
    chunker = partitioning.LocalChunker(mesh)
    assert chunker.num_chunks == case['num_chunks']
    assert chunker.chunk_ids == case['chunk_ids']
    for shape, axes in (
      ((64, 32), ('data', 'model')),
      ((64, 32), ('data', None)),
      ((32, 16), (None, 'model')),
    ):
      info = partitioner.get_local_chunk_info(shape, axes)
      expected = case[f'chunk_info{shape}{axes}']
      assert as_jsonable(info.slice) == expected['slice']
      assert info.replica_id == expected['replica_id']


@pytest.mark.parametrize(
  'index,case',
  [pair for pair in CASES if 'error' not in pair[1]],
  ids=[f'case{index}' for index, case in CASES if 'error' not in case],
)
def test_processes_cover_the_batch(index, case):
  """Brute force: the layouts of all processes agree with where the mesh places the rows of a batch."""
  devices = fake_pods.fake_pod(case)
  with fake_pods.use_devices(devices, 0):
    partitioner = make_partitioner(case)
    mesh = partitioner.mesh
    batch_size = 2 * partitioner.data_mesh_size
    rows_of_device = {
      device: range(2 * row, 2 * row + 2)
      for row, line in enumerate(mesh.devices)
      for device in line
    }
    first_of_shard = set()
    for process in sorted({device.process_index for device in devices}):
      layout = partitioner.get_data_layout(batch_size, host_index=process)
      length = batch_size // layout.num_shards
      loaded = set(range(layout.shard_id * length, (layout.shard_id + 1) * length))
      needed = {
        row
        for device in devices
        if device.process_index == process
        for row in rows_of_device[device]
      }
      assert loaded == needed
      if layout.is_first_host_in_replica_set:
        assert layout.shard_id not in first_of_shard
        first_of_shard.add(layout.shard_id)
    assert first_of_shard == set(range(layout.num_shards))


def test_hybrid_mesh_of_tpu_slices():
  """Slices are along the axes of the DCN shape; links within a tile of the model axis do not leave a slice."""
  one_slice = fake_pods.make_pod('TPU v3', (4, 4, 1, 2))
  devices = [
    SlicedTpuDevice(
      **{
        **dataclasses.asdict(device),
        'id': device.id + 32 * index,
        'process_index': device.process_index + 4 * index,
        'slice_index': index,
      }
    )
    for index in (1, 0)
    for device in one_slice
  ]
  with fake_pods.use_devices(devices, 0):
    partitioner = partitioning.PjitPartitioner(ici_mesh_shape=(1, 8, 4), dcn_mesh_shape=(2, 1, 1))
    mesh = partitioner.mesh
    assert dict(mesh.shape) == {'replica': 2, 'data': 8, 'model': 4}
    for index, part in enumerate(mesh.devices):
      assert {device.slice_index for device in part.ravel()} == {index}
    mesh = partitioning.default_mesh(1, ici_mesh_shape=(1, 8, 4), dcn_mesh_shape=(1, 2, 1))
    assert [{device.slice_index for device in row.ravel()} for row in mesh.devices[0]] == [
      {0}
    ] * 8 + [{1}] * 8
    with pytest.raises(errors.ConfigError, match='for 2 slice.s. of 32 device'):
      partitioning.default_mesh(1, ici_mesh_shape=(1, 4, 2), dcn_mesh_shape=(8, 1, 1))


@dataclasses.dataclass(frozen=True)
class FakeGpuDevice:
  """A GPU as JAX describes it: `coords` is its local id alone, and there is no `core_on_chip`."""

  id: int
  process_index: int
  coords: tuple[int]
  platform: str = 'gpu'
  device_kind: str = 'fake'
  slice_index: int = 0


@pytest.mark.parametrize('options', [{'num_partitions': 4}, {'model_parallel_submesh': (1, 4)}])
def test_gpus_have_coords_but_no_torus(options):
  devices = [
    FakeGpuDevice(id=index, process_index=index // 8, coords=(index % 8,)) for index in range(16)
  ]
  with fake_pods.use_devices(devices, 1):
    assert partitioning.get_coords(devices[9]) == (1, 1)
    assert partitioning.bounds_from_last_device(devices[-1]) == (2, 8)
    mesh = partitioning.PjitPartitioner(**options).mesh
    assert [[device.id for device in row] for row in mesh.devices] == [
      list(range(start, start + 4)) for start in (0, 4, 8, 12)
    ]
    assert partitioning.get_gpu_mesh(4).devices.tolist() == mesh.devices.tolist()


def test_unknown_backend():
  for options in (
    {'num_partitions': 1},
    {'model_parallel_submesh': (1, 1)},
    {'ici_mesh_shape': (1, 8, 1), 'dcn_mesh_shape': (1, 1, 1)},
  ):
    with pytest.raises(
      errors.ConfigError, match="`backend` must be a platform .*, got 'tpo'. JAX says"
    ):
      _ = partitioning.PjitPartitioner(backend='tpo', **options).mesh
