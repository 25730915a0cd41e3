"""Meshes of CPU and GPU devices, argument checks, data layouts, and functions that run over a mesh."""

from flax import struct
from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.partitioning import mesh as mesh_lib
from tests.partitioning import partitioner_cases as cases


@struct.dataclass
class FakeState:
  """A train state of two arrays and a scalar."""

  params: dict
  step: jax.Array

  def as_logical_axes(self):
    axes = {'kernel': P('embed', 'mlp'), 'scale': P('embed')}
    return FakeState(params={name: axes[name] for name in self.params}, step=P())


def fake_state(embed=16, mlp=32):
  return FakeState(
    params={'kernel': jnp.ones([embed, mlp]), 'scale': jnp.ones([embed])}, step=jnp.int32(0)
  )


@pytest.mark.parametrize('dims', [(0, 1), (1, 3), ('1', 1)])
def test_bad_partitioning_dims(dims):
  with pytest.raises(errors.ConfigError, match='_partitioning_dims` must be one of 1, 2, got'):
    partitioning.standard_logical_axis_rules(*dims)


# Meshes.


@pytest.mark.parametrize(
  'num_processes,num_local,num_partitions',
  [(1, 8, 1), (1, 8, 2), (1, 8, 8), (4, 8, 4), (4, 8, 8), (4, 8, 16), (4, 8, 32), (3, 4, 12)],
)
def test_model_axis_fills_fast_links_first(num_processes, num_local, num_partitions):
  devices = cases.fake_devices(num_processes, num_local)
  mesh = mesh_lib.mesh_by_topology(devices, num_partitions)
  assert mesh.axis_names == ('data', 'model')
  assert mesh.devices.shape == (len(devices) // num_partitions, num_partitions)
  assert set(mesh.devices.ravel()) == set(devices)
  for row in mesh.devices:
    processes = [device.process_index for device in row]
    assert len(set(processes)) == max(1, num_partitions // num_local)
    # Each process's devices are neighbours on the model axis.
    assert processes == sorted(processes)
  for process in range(num_processes):
    partitioning.LocalChunker(mesh, process_index=process)


@pytest.mark.parametrize(
  'num_processes,num_local,num_partitions,expected',
  [
    (1, 8, 3, '[1, 2, 4, 8]'),
    (1, 8, 16, '[1, 2, 4, 8]'),
    (4, 8, 12, '[1, 2, 4, 8, 16, 32]'),
    (3, 4, 8, '[1, 2, 4, 12]'),
  ],
)
def test_partitions_that_do_not_divide(num_processes, num_local, num_partitions, expected):
  with pytest.raises(errors.ConfigError) as error:
    mesh_lib.mesh_by_topology(cases.fake_devices(num_processes, num_local), num_partitions)
  assert f'got {num_partitions}.' in str(error.value) and f'one of {expected}' in str(error.value)


@pytest.mark.parametrize('num_partitions', [1, 2, 4, 8])
def test_cpu_devices_behave_as_accelerators(num_partitions):
  mesh = partitioning.default_mesh(num_partitions)
  assert dict(mesh.shape) == {'data': 8 // num_partitions, 'model': num_partitions}
  assert mesh.axis_types == (AxisType.Auto,) * 2
  assert dict(partitioning.get_cpu_mesh(num_partitions).shape) == dict(mesh.shape)


def test_cpu_mesh_without_argument_is_t5x_s():
  assert dict(partitioning.get_cpu_mesh().shape) == {'data': 1, 'model': 8}


def test_submesh_of_devices_without_coordinates():
  partitioner = partitioning.PjitPartitioner(model_parallel_submesh=(1, 4))
  assert dict(partitioner.mesh.shape) == {'data': 2, 'model': 4}
  with pytest.raises(
    errors.ConfigError,
    match=r'divide the grid \(1, 8\) .*got \(2, 2, 1, 1\). Alternatively, set it',
  ):
    _ = partitioning.PjitPartitioner(model_parallel_submesh=(2, 2, 1, 1)).mesh
  assert dict(partitioning.PjitPartitioner(1, (1, 1, 1, 1)).mesh.shape) == {'data': 8, 'model': 1}


@pytest.mark.parametrize('num_partitions', [1, 4])
def test_number_of_partitions_next_to_a_submesh(num_partitions):
  partitioner = partitioning.PjitPartitioner(num_partitions, (1, 4))
  assert dict(partitioner.mesh.shape) == {'data': 2, 'model': 4}


def test_hybrid_mesh():
  partitioner = partitioning.PjitPartitioner(
    num_partitions=2, ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(2, 1, 1)
  )
  mesh = partitioner.mesh
  assert dict(mesh.shape) == {'replica': 2, 'data': 2, 'model': 2}
  # Slices (four consecutive devices each) are along the replica axis.
  assert [sorted(device.id for device in part.ravel()) for part in mesh.devices] == [
    [0, 1, 2, 3],
    [4, 5, 6, 7],
  ]
  assert partitioner.data_partition_spec == P(('replica', 'data'))
  assert dict(partitioner.logical_axis_rules)['batch'] == ('replica', 'data')
  assert partitioner.data_mesh_size == 4 and partitioner.get_data_layout().batch_size == 4
  doubled = partitioner.partition(
    lambda x: x * 2, partitioner.data_partition_spec, partitioner.data_partition_spec
  )
  y = doubled(np.ones([8, 3], np.float32))
  assert {shard.data.shape for shard in y.addressable_shards} == {(2, 3)}


@pytest.mark.parametrize(
  'ici,dcn,message',
  [
    ((1, 2, 2), (4, 1, 1), 'for 1 slice.s. of 8 device.s. or 2 slice.s. of 4'),
    ((1, 2, 2), (2, 1), 'three extents each'),
    ((1, 3, 1), (2, 1, 1), 'whose products are the devices of a slice'),
  ],
)
def test_bad_hybrid_mesh(ici, dcn, message):
  with pytest.raises(errors.ConfigError, match=message):
    _ = partitioning.PjitPartitioner(ici_mesh_shape=ici, dcn_mesh_shape=dcn).mesh


def cpu_mesh(shape, names):
  return Mesh(
    np.array(jax.devices()).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names)
  )


@pytest.mark.parametrize(
  'arguments,message',
  [
    ({}, 'exactly one of num_partitions, model_parallel_submesh'),
    (
      {'num_partitions': 0},
      '`BasePartitioner.num_partitions` must be an integer >= 1 or None, got 0',
    ),
    ({'num_partitions': 2, 'ici_mesh_shape': (1, 2, 2)}, 'ici_mesh_shape with dcn_mesh_shape'),
    (
      {'num_partitions': 4, 'ici_mesh_shape': (1, 2, 2), 'dcn_mesh_shape': (2, 1, 1)},
      'must be one of 2 or None, got 4. It is the size of the model axis',
    ),
    (
      {'model_parallel_submesh': (1, 2), 'ici_mesh_shape': (1, 2, 2), 'dcn_mesh_shape': (2, 1, 1)},
      'exactly one of',
    ),
    (
      {
        'num_partitions': 2,
        'model_parallel_submesh': (1, 2),
        'ici_mesh_shape': (1, 2, 2),
        'dcn_mesh_shape': (2, 1, 1),
      },
      'exactly one of',
    ),
    (
      {'num_partitions': 4, 'model_parallel_submesh': (1, 2)},
      r'one of 1, 2.*got 4.*submesh=\(1, 2\) sets',
    ),
  ],
)
def test_contradictory_arguments(arguments, message):
  with pytest.raises(errors.ConfigError, match=message):
    partitioning.PjitPartitioner(**arguments)


def test_mesh_and_data_axes_are_values():
  """Mesh of an expert-parallel partitioner: three axes, the batch over two of them in another order."""
  devices = np.array(cases.fake_devices(4, 4), dtype=object).reshape(2, 2, 2, 2)
  # Processes are along data and expert: shape (data 4, expert 4, model 1).
  mesh = mesh_lib.make_mesh(
    devices.transpose(0, 2, 1, 3).reshape(4, 4, 1), ('data', 'expert', 'model')
  )
  partitioner = partitioning.PjitPartitioner(
    mesh=mesh,
    data_axes=('expert', 'data'),
    logical_axis_rules=[('batch', ('expert', 'data')), ('expert', 'expert')],
  )
  assert partitioner.data_partition_spec == P(('expert', 'data'))
  assert partitioner.data_mesh_size == 16
  assert partitioner.data_shards == 4
  shard_ids = {}
  for process in range(4):
    chunker = partitioning.LocalChunker(mesh, process_index=process)
    shard_ids[chunker.chunk_ids['data'], chunker.chunk_ids['expert']] = partitioner.get_data_layout(
      32, host_index=process
    ).shard_id
  assert shard_ids == {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}


def test_subclass_may_give_its_own_data_partition_spec():
  class Partitioner(partitioning.PjitPartitioner):
    """Partitioner that shards batches over both axes."""

    @property
    def data_partition_spec(self):
      return P(('data', 'model'))

  partitioner = Partitioner(num_partitions=2)
  assert partitioner.data_mesh_size == 8
  assert partitioner.get_data_layout().batch_size == 8


# Mesh axes of a state.


def test_mesh_axes_and_shardings_of_a_state():
  partitioner = partitioning.PjitPartitioner(
    num_partitions=2, logical_axis_rules=partitioning.standard_logical_axis_rules(1, 2)
  )
  state = fake_state()
  axes = partitioner.get_mesh_axes(state)
  assert axes == FakeState(params={'kernel': P('data', 'model'), 'scale': P('data')}, step=P())
  shapes = jax.eval_shape(lambda: state)
  assert partitioner.get_mesh_axes(shapes) == axes
  placed = partitioner.move_params_to_devices(jax.tree.map(np.asarray, state), axes)
  assert {shard.data.shape for shard in placed.params['kernel'].addressable_shards} == {(4, 16)}
  np.testing.assert_array_equal(placed.params['kernel'], state.params['kernel'])
  assert placed.step.sharding.is_fully_replicated


def shapes_of_state(embed, mlp):
  return jax.eval_shape(lambda: fake_state(embed, mlp))


def test_dim_that_does_not_divide_names_the_array():
  partitioner = partitioning.PjitPartitioner(num_partitions=8, max_replicated_size=0)
  with pytest.raises(errors.ConfigError) as error:
    partitioner.get_mesh_axes(fake_state(mlp=20))
  for part in (
    'parameters: kernel',
    'dim 1',
    "'mlp'",
    '(16, 20)',
    'got 20',
    "'model'",
    'multiple of 8',
    "Round the size up to 24, choose a mesh with 4 devices along the axis, or append the rule ('mlp', N",
  ):
    assert part in str(error.value)


def test_the_remedies_of_a_dim_that_does_not_divide_work():
  rules = [('embed', ('model', 'data')), ('mlp', None)]
  shapes = shapes_of_state(20, 2**20)
  with pytest.raises(
    errors.ConfigError, match=r"Round the size up to 24, .* 4 devices .*\('embed', 'model'\)"
  ):
    partitioning.PjitPartitioner(num_partitions=4, logical_axis_rules=rules).get_mesh_axes(shapes)
  partitioner = partitioning.PjitPartitioner(
    num_partitions=4, logical_axis_rules=[*rules, ('embed', 'model')]
  )
  assert partitioner.get_mesh_axes(shapes).params == {
    'kernel': P('model', None),
    'scale': P('model'),
  }
  with pytest.raises(
    errors.ConfigError, match=r"choose a mesh with 1 devices .*the rule \('embed', None\)"
  ):
    partitioning.PjitPartitioner(num_partitions=4, logical_axis_rules=rules).get_mesh_axes(
      shapes_of_state(3, 2**20)
    )


def test_small_parameters_are_replicated_with_one_warning(caplog):
  partitioner = partitioning.PjitPartitioner(
    num_partitions=2, logical_axis_rules=partitioning.standard_logical_axis_rules(1, 2)
  )
  for _ in range(2):
    axes = partitioner.get_mesh_axes(shapes_of_state(6, 32))
    assert axes.params == {'kernel': P(None, 'model'), 'scale': P(None)}
    partitioner.explain(fake_state(6, 32))
  (warning,) = caplog.records
  assert warning.levelname == 'WARNING' and warning.getMessage() == (
    "2 parameter(s) have a dim that is not a multiple of its mesh axes in {'data': 4, 'model': 2}. The next rule for "
    'the dim applies, or the dim is replicated, also in the optimizer state:\n'
    '  kernel (6 x 32): embed 6 by data 4: replicated\n'
    '  scale (6): embed 6 by data 4: replicated'
  )
  partitioner.get_mesh_axes(fake_state(10, 32))
  assert len(caplog.records) == 2  # another model


def test_other_processes_do_not_warn(caplog, monkeypatch):
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  partitioning.PjitPartitioner(num_partitions=8).get_mesh_axes(fake_state(mlp=20))
  assert not caplog.records


def test_the_largest_size_that_is_replicated():
  partitioner = partitioning.PjitPartitioner(num_partitions=8)
  assert partitioner.get_mesh_axes(shapes_of_state(2**14, 4)).params['kernel'] == P(None, None)
  with pytest.raises(errors.ConfigError, match=r'kernel: .*\(16385, 4\) must be a multiple of 8'):
    partitioner.get_mesh_axes(shapes_of_state(2**14 + 1, 4))
  partitioner = partitioning.PjitPartitioner(num_partitions=8, max_replicated_size=2**17)
  assert partitioner.get_mesh_axes(shapes_of_state(2**14 + 1, 4)).params['kernel'] == P(None, None)
  for value in (-1, 2.0, None):
    with pytest.raises(
      errors.ConfigError, match=f'max_replicated_size` must be an integer >= 0, got {value}'
    ):
      partitioning.PjitPartitioner(num_partitions=8, max_replicated_size=value)


@pytest.mark.parametrize(
  'axes,message',
  [
    (
      FakeState(params={'kernel': P('embed', 'mpl'), 'scale': P('embed')}, step=P()),
      "parameters: kernel: no rule for logical axis 'mpl'.*Did you mean 'mlp'",
    ),
    (
      FakeState(params={'kernel': P('embed'), 'scale': P('embed')}, step=P()),
      'parameters: kernel: 1 logical axes .* for shape',
    ),
    (
      FakeState(params={'kernel': P('embed', 'mlp')}, step=P()),
      r'have its structure, got none at \[.params/scale.\]',
    ),
    (
      FakeState(params={'kernel': P('embed', 'mlp'), 'scale': P(), 'bias': P('mlp')}, step=P()),
      r'unknown ones at \[.params/bias.\]',
    ),
  ],
)
def test_wrong_logical_axes_of_a_state(axes, message):
  class Partitioner(partitioning.PjitPartitioner):
    """Partitioner that returns the given logical axes."""

    def get_logical_axes(self, train_state):
      return axes

  with pytest.raises(errors.ConfigError, match=message):
    Partitioner(num_partitions=2).get_mesh_axes(fake_state())


def test_none_and_empty_axes_mean_replicated():
  class Partitioner(partitioning.PjitPartitioner):
    """Partitioner without logical axes."""

    def get_logical_axes(self, train_state):
      return FakeState(params={'kernel': P(), 'scale': None}, step=None)

  axes = Partitioner(num_partitions=2).get_mesh_axes(fake_state())
  assert axes == FakeState(params={'kernel': P(), 'scale': P()}, step=P())


# Partitioned functions.


def logical_double(x):
  return flax_partitioning.with_sharding_constraint(x * 2, ('batch', 'mlp'))


def count_constraints(partitioned, *args):
  return partitioned.lower(*args).as_text().count('sdy.sharding_constraint')


def test_logical_constraints_hold_in_partitioned_functions():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  x = np.ones([8, 4], np.float32)
  double = partitioner.partition(logical_double, (P('data'),), P('data', 'model'))
  assert count_constraints(double, x) == 1
  assert double(x).sharding.spec == P('data', 'model')
  # The same function, unpartitioned, has none: this is what would pass unnoticed.
  assert jax.jit(logical_double).lower(x).as_text().count('sdy.sharding_constraint') == 0


def test_traces_of_two_partitioners_do_not_mix():
  """The cache of jit, by function, must not return the trace with the first partitioner's rules."""
  x = np.ones([8, 8], np.float32)
  texts = []
  for rules in ([('batch', 'data'), ('mlp', 'model')], [('batch', 'data'), ('mlp', None)]):
    partitioner = partitioning.PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
    texts.append(partitioner.partition(logical_double, (P('data'),), P('data')).lower(x).as_text())
  assert '{"model"}' in texts[0].split('sdy.sharding_constraint')[1].splitlines()[0]
  assert '{"model"}' not in texts[1].split('sdy.sharding_constraint')[1].splitlines()[0]


def test_calls_nest_and_leave_no_context_behind():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  other = partitioning.PjitPartitioner(
    num_partitions=4, logical_axis_rules=[('batch', None), ('mlp', 'model')]
  )
  x = np.ones([8, 8], np.float32)
  inner = partitioner.partition(logical_double, P('data'), P('data'))
  outer = partitioner.partition(lambda x: inner(x) + 1, P('data'), P('data'))
  np.testing.assert_array_equal(outer(x), 3 * np.ones([8, 8]))
  # The logical constraint is also present when traced inside the other function, where `jax.set_mesh` is not allowed.
  assert '[{"data"}, {"model"}]' in outer.lower(x).as_text()
  with jax.set_mesh(other.mesh):
    np.testing.assert_array_equal(inner(x), 2 * np.ones([8, 8]))
    assert jax.sharding.get_abstract_mesh() == other.mesh.abstract_mesh
  assert not partitioning.global_mesh_defined()
  assert flax_partitioning.get_axis_rules() == ()
  bad = partitioner.partition(lambda x: 1 // 0, None, None)
  with pytest.raises(ZeroDivisionError, match='by zero'):
    bad(x)
  assert not partitioning.global_mesh_defined()


def test_static_and_donated_arguments_and_compile():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)

  def scale(x, factor, y):
    return x * factor + y

  partitioned = partitioner.partition(
    scale, (P('data'), None), P('data'), static_argnums=(1,), donate_argnums=(0,)
  )
  x = jax.device_put(np.ones([8, 4], np.float32), NamedSharding(partitioner.mesh, P('data')))
  y = np.ones([8, 4], np.float32)
  compiled = partitioner.compile(
    partitioned,
    jax.ShapeDtypeStruct([8, 4], jnp.float32),
    3,
    jax.ShapeDtypeStruct([8, 4], jnp.float32),
  )
  replicated = jax.device_put(y, NamedSharding(partitioner.mesh, P()))
  result = compiled(x, replicated)
  assert x.is_deleted()
  np.testing.assert_array_equal(result, np.full([8, 4], 4.0))
  np.testing.assert_array_equal(partitioned(result, 2, y), np.full([8, 4], 9.0))


def test_prefixes_and_none_are_axis_resources():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  batch = {'a': np.ones([8, 2], np.float32), 'b': {'c': np.zeros([8], np.float32)}, 'd': None}
  identity = partitioner.partition(
    lambda batch, x: (batch, x), (P('data'), None), (P('data'), None)
  )
  out, x = identity(batch, np.ones([3], np.float32))
  assert out['b']['c'].sharding.spec == P('data') and out['d'] is None
  assert x.sharding.is_fully_replicated


@pytest.mark.parametrize(
  'resources,error,message',
  [
    (P('date'), ValueError, 'Resource axis: date .*is not found in mesh'),
    ({'x': 'data'}, errors.ConfigError, '`x` must be a PartitionSpec'),
    ((P('data'), 3), errors.ConfigError, 'got 3'),
  ],
)
def test_bad_axis_resources(resources, error, message):
  with pytest.raises(error, match=message):
    partitioning.PjitPartitioner(num_partitions=2).partition(lambda x: x, resources, None)


def test_sharding_constraint_without_a_mesh_is_the_identity():
  x = jnp.ones([8])
  assert partitioning.with_sharding_constraint(x, P('data')) is x
  partitioner = partitioning.PjitPartitioner(num_partitions=1)
  fn = partitioner.partition(
    lambda x: partitioning.with_sharding_constraint(x, P('data')), None, None
  )
  assert count_constraints(fn, x) == 1


def test_base_partitioner_is_abstract():
  with pytest.raises(TypeError, match='abstract'):
    partitioning.BasePartitioner(num_partitions=1)
  with pytest.raises(TypeError, match='abstract'):
    partitioning.BasePjitPartitioner(num_partitions=1)
