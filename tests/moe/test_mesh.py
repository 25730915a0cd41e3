"""Meshes of experts over several slices, given meshes, and platforms."""

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from moe import mesh as mesh_lib
from moe import rules as rules_lib
from moe.partitioner import MoePjitPartitioner
from t5x_lite import partitioning
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import mesh as core_mesh_lib
from tests.partitioning import explain_cases
from tests.partitioning import test_mesh as topologies
from tests.partitioning.fake_pods import use_devices

_TWO_SLICES = {'ici_mesh_shape': (1, 4, 1), 'dcn_mesh_shape': (2, 1, 1)}


def _given(shape, names):
  return core_mesh_lib.make_mesh(np.array(jax.devices()).reshape(shape), names)


@pytest.mark.parametrize(
  'devices,ici,dcn',
  [
    (topologies.tpu_slices('TPU v6 lite', (4, 4, 1), (2, 2, 1), 3), (1, 8, 2), (3, 1, 1)),
    (topologies.tpu_slices('TPU v5 lite', (4, 4, 1), (2, 2, 1), 4), (1, 16, 1), (2, 2, 1)),
    (topologies.tpu_slices('TPU7x', (2, 2, 2), (2, 2, 1), 2), (2, 4, 2), (1, 2, 1)),
    (topologies.tpu_slices('TPU v5p', (2, 2, 2), (2, 2, 1), 2), (1, 4, 2), (1, 1, 2)),
    (topologies.gpu_nodes(4, 8, 1), (1, 4, 2), (4, 1, 1)),
  ],
)
def test_experts_are_within_a_slice(devices, ici, dcn):
  """Both forms: every device once, groups of experts in one slice, and batches loaded by process."""
  extents = dict(zip(('replica', 'data', 'model'), np.multiply(ici, dcn), strict=False))
  with use_devices(devices[::-1], 0):
    for num_expert_partitions in (1, 2, 3, 4, 8, 'auto'):
      partitioner = MoePjitPartitioner(
        num_expert_partitions=num_expert_partitions,
        experts_per_layer=8 if num_expert_partitions != 3 else 6,
        ici_mesh_shape=ici,
        dcn_mesh_shape=dcn,
      )
      mesh, table = partitioner.mesh, topologies.Table(partitioner.mesh)
      at_most = 8 if num_expert_partitions == 'auto' else num_expert_partitions
      expected = mesh_lib.largest_divisor(ici[1], at_most)
      assert dict(mesh.shape) == {
        **extents,
        'data': extents['data'] // expected,
        'expert': expected,
      }
      assert mesh.axis_names == ('replica', 'data', 'expert', 'model')
      table.check_devices(devices)
      assert table.num_per_row(table.slice, axis=2) == 1
      # The expert axis divides the data axis of the dense mesh.
      dense = partitioning.default_mesh(1, ici_mesh_shape=ici, dcn_mesh_shape=dcn)
      assert mesh.devices.ravel().tolist() == dense.devices.ravel().tolist()
      assert partitioner.data_partition_spec == P(('replica', 'expert', 'data'))
      topologies.check_loading(partitioner, devices)
    first = MoePjitPartitioner(int(extents['data']), ici_mesh_shape=ici, dcn_mesh_shape=dcn)
    assert dict(first.mesh.shape) == extents and not first.two_data_axes
    assert first.data_partition_spec == P(('replica', 'data'))
    topologies.check_loading(first, devices)


def test_an_expert_axis_over_slices_fits_the_experts(caplog):
  caplog.set_level('INFO')
  partitioner = MoePjitPartitioner(num_expert_partitions='auto', experts_per_layer=6, **_TWO_SLICES)
  assert dict(partitioner.mesh.shape) == {'replica': 2, 'data': 2, 'expert': 2, 'model': 1}
  assert (
    'Expert axis of 2 devices' in caplog.text and 'the data axis of 4 in a slice' in caplog.text
  )
  with pytest.raises(
    ConfigError, match='now 4 of 4 devices, a divisor of the 6 .*Use num_expert_partitions=2 or'
  ):
    _ = MoePjitPartitioner(num_expert_partitions=8, experts_per_layer=6, **_TWO_SLICES).mesh


@pytest.mark.parametrize('options', [{'num_expert_partitions': 2}, {'num_experts': 8}])
def test_rules_shard_batches_and_copies_of_experts_over_replicas(options):
  shapes = {'ici_mesh_shape': (1, 2, 2), 'dcn_mesh_shape': (2, 1, 1)}
  is_first = 'num_experts' in options
  given = (
    rules_lib.standard_logical_axis_rules(8, two_data_axes=False)
    if is_first
    else rules_lib.head_logical_axis_rules()
  )
  for rules in (None, given):
    partitioner = MoePjitPartitioner(**options, **shapes, logical_axis_rules=rules)
    found, axes = dict(partitioner.logical_axis_rules), partitioner.data_partition_spec[0]
    assert found['batch'] == axes and axes[0] == 'replica'
    assert found['expert_replicas'] == (('replica',) if is_first else ('replica', 'data'))
    unchanged = {name: axis for name, axis in given if name not in ('batch', 'expert_replicas')}
    assert {
      name: axis for name, axis in partitioner.logical_axis_rules if name in unchanged
    } == unchanged


def test_given_meshes():
  names = ('replica', 'data', 'expert', 'model')
  mesh = MoePjitPartitioner(num_expert_partitions=2, **_TWO_SLICES).mesh
  for size in (2, 'auto'):
    partitioner = MoePjitPartitioner(num_expert_partitions=size, experts_per_layer=6, mesh=mesh)
    assert partitioner.mesh is mesh and partitioner.data_partition_spec == P(
      ('replica', 'expert', 'data')
    )
    assert dict(partitioner.logical_axis_rules)['batch'] == ('replica', 'expert', 'data')
  partitioner = MoePjitPartitioner(num_expert_partitions=4, mesh=_given((2, 4, 1), names[1:]))
  assert (
    partitioner.data_partition_spec == P(('expert', 'data')) and partitioner.data_mesh_size == 8
  )
  # Four experts on eight devices: without `mesh`, `model` would be a second data axis.
  partitioner = MoePjitPartitioner(4, mesh=_given((4, 2), ('data', 'model')))
  assert (
    partitioner.data_partition_spec == P('data')
    and dict(partitioner.logical_axis_rules)['mlp'] == 'model'
  )


@pytest.mark.parametrize(
  'options,message',
  [
    (
      {'num_expert_partitions': 4, 'ici_mesh_shape': (1, 4, 1)},
      'ici_mesh_shape with dcn_mesh_shape',
    ),
    (
      {'num_expert_partitions': 4, 'num_partitions': 2, **_TWO_SLICES},
      'partitions` must be one of 1 or None, got 2',
    ),
    (
      {'num_expert_partitions': 4, 'model_parallel_submesh': (1, 1), **_TWO_SLICES},
      'exactly one of',
    ),
    (
      {'num_expert_partitions': 4, 'mesh': ((8, 1), ('data', 'model'))},
      r"MoePjitPartitioner.mesh` must be a mesh with the axes \('data', 'expert', 'model'\), and .*got \('data', 'mod",
    ),
    (
      {'num_experts': 4, 'mesh': ((2, 4, 1), ('data', 'expert', 'model'))},
      r"the axes \('data', 'model'\), and .*got",
    ),
    (
      {'num_expert_partitions': 8, 'mesh': ((2, 4, 1), ('data', 'expert', 'model'))},
      "num_expert_partitions` must be one of 4, 'auto', got 8. The expert axis of mesh has the size 4",
    ),
    (
      {
        'num_expert_partitions': 4,
        'experts_per_layer': 6,
        'mesh': ((2, 4, 1), ('data', 'expert', 'model')),
      },
      'experts_per_layer` must be a multiple of 4, the size of the expert axis .*got 6. Choose another size',
    ),
    (
      {
        'num_expert_partitions': 4,
        'backend': 'cpu',
        'mesh': ((2, 4, 1), ('data', 'expert', 'model')),
      },
      'without backend',
    ),
  ],
)
def test_errors_of_the_constructor(options, message):
  if 'mesh' in options:
    options = {**options, 'mesh': _given(*options['mesh'])}
  with pytest.raises(ConfigError, match=message):
    MoePjitPartitioner(**options)


@pytest.mark.parametrize(
  'options,message',
  [
    (
      {'num_expert_partitions': 4, 'ici_mesh_shape': (1, 2, 2), 'dcn_mesh_shape': (4, 1, 1)},
      'for 1 slice.s. of 8 device.s. or 2 slice.s. of 4',
    ),
    (
      {'num_experts': 6, **_TWO_SLICES},
      "multiple of 4, the devices along mesh axis 'data'.*num_expert_partitions=2",
    ),
    (
      {'num_experts': 6, 'mesh': ((4, 2), ('data', 'model'))},
      'a multiple of 4, .*Choose another size of the axis',
    ),
    (
      {'num_experts': 8, **_TWO_SLICES, 'logical_axis_rules': rules_lib.head_logical_axis_rules()},
      r'two_data_axes=False\)',
    ),
  ],
)
def test_errors_of_the_mesh(options, message):
  if 'mesh' in options:
    options = {**options, 'mesh': _given(*options['mesh'])}
  with pytest.raises(ConfigError, match=message):
    _ = MoePjitPartitioner(**options).mesh


@pytest.mark.parametrize(
  'options',
  [
    {'num_experts': 4, 'num_partitions': 1},
    {'num_experts': 8, 'num_partitions': 2},
    {'num_expert_partitions': 2, 'num_partitions': 2},
    {'num_expert_partitions': 'auto', **_TWO_SLICES},
  ],
)
def test_devices_of_a_platform(options):
  assert MoePjitPartitioner(**options, backend='cpu').mesh == MoePjitPartitioner(**options).mesh
  with pytest.raises(ConfigError, match="`backend` must be a platform .*, got 'tpo'"):
    _ = MoePjitPartitioner(**options, backend='tpo').mesh


def test_the_devices_of_the_platform_count():
  """Four experts on the two devices of another platform have no copies; on the eight of the default one they have."""
  devices = jax.devices()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      jax, 'devices', lambda backend=None: devices[:2] if backend == 'other' else devices
    )
    partitioner = MoePjitPartitioner(4, 1, backend='other')
    assert not partitioner.two_data_axes and dict(partitioner.mesh.shape) == {'data': 2, 'model': 1}
    assert MoePjitPartitioner(4, 1).two_data_axes
    assert MoePjitPartitioner(1, 1, backend='other').mesh.devices.tolist() == [devices[:2]]


def test_the_size_up_to_which_parameters_are_replicated():
  shapes = jax.eval_shape(
    lambda: explain_cases.make_state(
      mutables=False,
      layers_0={'mlp': {'wi': np.ones([16, 30], np.float32)}, 'norm': np.ones([16], np.float32)},
    )
  )
  options = {
    'num_expert_partitions': 2,
    'num_partitions': 4,
    'logical_axis_rules': rules_lib.head_logical_axis_rules(1),
  }
  specs = MoePjitPartitioner(**options).get_mesh_axes(shapes)
  assert specs._optimizer.target['layers_0']['mlp']['wi'] == P(None, None)
  with pytest.raises(ConfigError, match='layers_0/mlp/wi: dim 1 .*must be a multiple of 4'):
    MoePjitPartitioner(**options, max_replicated_size=0).get_mesh_axes(shapes)


def test_two_data_axes_replace_the_arguments_of_the_model_axis():
  assert rules_lib.standard_logical_axis_rules(
    4, two_data_axes=False
  ) == rules_lib.standard_logical_axis_rules(8, 1)
  assert rules_lib.standard_logical_axis_rules(
    4, two_data_axes=True
  ) == rules_lib.standard_logical_axis_rules(4, 1)
  with pytest.raises(ConfigError, match='num_partitions` must be None with two_data_axes, got 1'):
    rules_lib.standard_logical_axis_rules(4, 1, two_data_axes=False)


def test_t5xs_meshes_of_cpus_and_gpus():
  assert dict(mesh_lib.get_cpu_mesh().shape) == {
    'data': 1,
    'expert': len(jax.devices()),
    'model': 1,
  }
  with use_devices(topologies.gpu_nodes(2, 4, 1), 0):
    mesh = mesh_lib.get_gpu_mesh()
    assert dict(mesh.shape) == {'data': 2, 'expert': 4, 'model': 1}
    assert [[device.process_index for device in row] for row in mesh.devices[..., 0]] == [
      [0] * 4,
      [1] * 4,
    ]
