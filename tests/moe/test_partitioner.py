"""Rules, meshes, data layouts and partitioned functions of both forms of expert parallelism; errors."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from moe import mesh as mesh_lib
from moe import rules as rules_lib
from moe.partitioner import MoePjitPartitioner
from t5x_lite import adafactor
from t5x_lite import partitioning
from t5x_lite.errors import ConfigError
from tests.partitioning import test_mesh as topologies
from tests.partitioning.fake_pods import make_pod
from tests.partitioning.fake_pods import use_devices
from tests.partitioning.test_golden import FakeGpuDevice

_EXPERT_KERNEL = ('expert', 'embed', 'expert_mlp')


def _fake_gpus(num_processes, num_local):
  return [
    FakeGpuDevice(id=index, process_index=index // num_local, coords=(index % num_local,))
    for index in range(num_processes * num_local)
  ]


# ---- Rules -----------------------------------------------------------------------------------------------------------


def _seed_rules(num_devices, num_experts, num_partitions, dims, additional=()):
  """An independent reading of seed 002: dense rules, then those for experts, then what copies along `model` need."""
  rules = [
    *partitioning.standard_logical_axis_rules(dims, 1),
    ('expert', 'data'),
    ('expert_mlp', 'model'),
    ('expert_group', None),
    ('expert_replicas', None),
    ('unmodeled', None),
    *additional,
  ]
  if num_experts == 0 or num_devices <= num_experts or num_partitions > 1:
    return rules
  special = {'batch': ('data', 'model'), 'expert_replicas': 'model'}
  return [(name, special.get(name, None if axis == 'model' else axis)) for name, axis in rules]


@pytest.mark.parametrize('dims', [1, 2])
def test_standard_rules_are_those_of_t5x(dims):
  additional = [('head_dim', 'model'), ('mlp_embed', None), ('batch', 'data')]
  for num_devices, num_experts, num_partitions in itertools.product(
    (1, 4, 8), (0, 1, 2, 4, 8, 16), (1, 2, 4)
  ):
    with mock.patch.object(jax, 'devices', lambda backend=None, count=num_devices: [None] * count):
      expected = _seed_rules(num_devices, num_experts, num_partitions, dims, additional)
      assert (
        rules_lib.standard_logical_axis_rules(
          num_experts,
          num_partitions,
          activation_partitioning_dims=dims,
          additional_rules=additional,
        )
        == expected
      )
      assert (
        rules_lib.standard_logical_axis_rules(
          num_experts, None, (1, num_partitions), dims, 1, additional
        )
        == expected
      )


@pytest.mark.parametrize(
  'num_experts,num_partitions,activations,parameters,mesh_axes',
  [
    # Two data axes: copies of 4 experts along `model`.
    (
      4,
      1,
      1,
      1,
      {
        'kernel': (None, None),
        'expert': ('data', None, None),
        'batch': (('data', 'model'), None, None),
      },
    ),
    (
      4,
      1,
      1,
      2,
      {
        'kernel': (('data', 'model'), None),
        'expert': ('data', 'model', None),
        'batch': (('data', 'model'), None, None),
      },
    ),
    (
      4,
      1,
      2,
      2,
      {
        'kernel': (('data', 'model'), None),
        'expert': ('data', 'model', None),
        'batch': (('data', 'model'), None, None),
      },
    ),
    # One.
    (
      8,
      2,
      1,
      1,
      {'kernel': (None, 'model'), 'expert': ('data', None, 'model'), 'batch': ('data', None, None)},
    ),
    (
      8,
      2,
      1,
      2,
      {
        'kernel': ('data', 'model'),
        'expert': ('data', None, 'model'),
        'batch': ('data', None, None),
      },
    ),
    (
      8,
      2,
      2,
      1,
      {
        'kernel': (None, 'model'),
        'expert': ('data', 'model', None),
        'batch': ('data', None, 'model'),
      },
    ),
    (
      8,
      2,
      2,
      2,
      {
        'kernel': ('data', 'model'),
        'expert': ('data', None, 'model'),
        'batch': ('data', None, 'model'),
      },
    ),
  ],
)
def test_first_form_shards_parameters(
  num_experts, num_partitions, activations, parameters, mesh_axes
):
  rules = rules_lib.standard_logical_axis_rules(
    num_experts,
    num_partitions,
    activation_partitioning_dims=activations,
    parameter_partitioning_dims=parameters,
  )
  _check_mesh_axes(rules, mesh_axes)


@pytest.mark.parametrize(
  'activations,parameters,mesh_axes',
  [
    (
      1,
      1,
      {
        'kernel': (None, 'model'),
        'expert': ('expert', None, 'model'),
        'batch': (('expert', 'data'), None, None),
      },
    ),
    (
      2,
      1,
      {
        'kernel': (None, 'model'),
        'expert': ('expert', 'model', None),
        'batch': (('expert', 'data'), None, 'model'),
      },
    ),
    (
      1,
      2,
      {
        'kernel': (('expert', 'data'), 'model'),
        'expert': ('expert', 'data', 'model'),
        'batch': (('expert', 'data'), None, None),
      },
    ),
    (
      2,
      2,
      {
        'kernel': (('expert', 'data'), 'model'),
        'expert': ('expert', 'data', 'model'),
        'batch': (('expert', 'data'), None, 'model'),
      },
    ),
  ],
)
def test_second_form_shards_parameters(activations, parameters, mesh_axes):
  _check_mesh_axes(rules_lib.head_logical_axis_rules(activations, parameters), mesh_axes)


def _check_mesh_axes(rules, mesh_axes):
  names = {
    'kernel': ('embed', 'mlp'),
    'expert': _EXPERT_KERNEL,
    'batch': ('batch', 'length', 'embed'),
  }
  assert {
    name: tuple(partitioning.logical_to_mesh_axes(axes, rules)) for name, axes in names.items()
  } == mesh_axes
  # Buffers of tokens on their way to experts: neither their experts nor their copies lose an axis to `embed`.
  spec = partitioning.logical_to_mesh_axes(('expert', 'expert_replicas', 'embed'), rules)
  alone = partitioning.logical_to_mesh_axes(('expert', 'expert_replicas'), rules)
  assert tuple(spec)[:2] == tuple(alone)


def test_factor_rules_keep_experts_apart():
  rules = rules_lib.logical_factor_rules()
  assert (
    rules['expert'] is adafactor.FactorDim.BATCH
    and rules['expert_mlp'] is adafactor.FactorDim.COLUMN
  )
  assert (
    rules['mlp_embed'] is adafactor.FactorDim.ROW and rules['unmodeled'] is adafactor.FactorDim.NONE
  )
  assert {name: rules[name] for name in adafactor.standard_logical_factor_rules()} == dict(
    adafactor.standard_logical_factor_rules()
  )


def test_raw_specs_are_replaced_at_the_top_alone():
  state_axes = {'kernel': P('data')}
  resources = (state_axes, P('data'), P('model'), None, [P('data')], P('data', None))
  assert rules_lib.override_partition_specs(resources) == (
    state_axes,
    P(('expert', 'data')),
    P('model'),
    None,
    [P('data')],
    P('data', None),
  )
  assert rules_lib.override_partition_specs(P('data')) == P(('expert', 'data'))
  assert rules_lib.override_partition_specs([P('data')]) == [P(('expert', 'data'))]
  assert rules_lib.override_partition_specs(state_axes) is state_axes
  assert rules_lib.override_partition_specs(None) is None


# ---- Meshes and layouts ----------------------------------------------------------------------------------------------


def test_no_device_is_looked_at_before_the_mesh():
  def fail(*args, **kwargs):
    raise AssertionError('a device was looked at')

  with mock.patch.multiple(
    jax, devices=fail, device_count=fail, local_devices=fail, local_device_count=fail
  ):
    partitioners = [
      MoePjitPartitioner(num_experts=4, num_partitions=1),
      MoePjitPartitioner(num_experts=4, model_parallel_submesh=(1, 2)),
      MoePjitPartitioner(num_expert_partitions=4, num_partitions=2),
    ]
  assert [dict(partitioner.mesh.shape) for partitioner in partitioners] == [
    {'data': 4, 'model': 2},
    {'data': 4, 'model': 2},
    {'data': 1, 'expert': 4, 'model': 2},
  ]
  assert [partitioner.two_data_axes for partitioner in partitioners] == [True, False, False]


@pytest.mark.parametrize(
  'num_experts,options,shape,spec',
  [
    (2, {'num_partitions': 1}, (2, 4), P(('data', 'model'))),
    (4, {'model_parallel_submesh': (1, 1)}, (4, 2), P(('data', 'model'))),
    (1, {'num_partitions': 1}, (1, 8), P(('data', 'model'))),
    (8, {'num_partitions': 1}, (8, 1), P('data')),
    (16, {'num_partitions': 1}, (8, 1), P('data')),
    (0, {'num_partitions': 1}, (8, 1), P('data')),
    (8, {'num_partitions': 2}, (4, 2), P('data')),
    (2, {'model_parallel_submesh': (1, 4)}, (2, 4), P('data')),
  ],
)
def test_mesh_of_the_first_form(num_experts, options, shape, spec):
  partitioner = MoePjitPartitioner(num_experts, **options)
  assert (
    partitioner.mesh.axis_names == ('data', 'model') and partitioner.mesh.devices.shape == shape
  )
  assert [device.id for device in partitioner.mesh.devices.ravel()] == list(range(8))
  assert partitioner.data_partition_spec == spec
  num_rows = 8 if partitioner.two_data_axes else shape[0]
  assert partitioner.get_data_layout() == partitioning.DataLayout(num_rows, 0, 1, True)
  assert partitioner.get_data_layout(2 * num_rows, host_index=0).batch_size == 2 * num_rows


@pytest.mark.parametrize(
  'num_processes,num_local,num_experts,num_partitions',
  [(4, 4, 2, 1), (4, 4, 4, 1), (4, 4, 8, 1), (4, 4, 16, 2), (2, 8, 4, 4), (4, 2, 2, 1)],
)
@pytest.mark.parametrize('form', ['num_experts', 'num_expert_partitions'])
def test_processes_load_the_rows_that_their_devices_hold(
  form, num_processes, num_local, num_experts, num_partitions
):
  """Brute force over processes, in both forms; copies of an expert may be on several processes."""
  devices = _fake_gpus(num_processes, num_local)
  with use_devices(devices, 0):
    partitioner = MoePjitPartitioner(**{form: num_experts}, num_partitions=num_partitions)
    mesh, spec = partitioner.mesh, partitioner.data_partition_spec
    axes = spec[0] if isinstance(spec[0], tuple) else (spec[0],)
    batch_size = 2 * partitioner.data_mesh_size
    firsts, loaders = [], set()
    for process in range(num_processes):
      layout = partitioner.get_data_layout(batch_size, host_index=process)
      length = batch_size // layout.num_shards
      needed = set()
      for place in np.ndindex(mesh.devices.shape):
        if mesh.devices[place].process_index == process:
          where = dict(zip(mesh.axis_names, place, strict=True))
          row = 0
          for axis in axes:  # the first varies slowest
            row = row * mesh.shape[axis] + where[axis]
          needed |= {2 * row, 2 * row + 1}
      rows = partitioner.get_rows(batch_size, host_index=process)
      assert rows.tolist() == sorted(needed) and len(rows) == length
      # A shard is a set of rows: consecutive ones, but for processes that hold pieces of both data axes.
      loaders.add((layout.shard_id, tuple(rows)))
      if form == 'num_experts':
        assert rows.tolist() == list(
          range(layout.shard_id * length, (layout.shard_id + 1) * length)
        )
      firsts += [layout.shard_id] if layout.is_first_host_in_replica_set else []
    assert sorted(firsts) == list(range(layout.num_shards)) and len(loaders) == layout.num_shards
    assert sorted(row for _, rows in loaders for row in rows) == list(range(batch_size))
    if form == 'num_experts' and partitioner.two_data_axes:
      # As in the seed, wherever the copies of an expert do not leave a process.
      chunks = partitioning.LocalChunker(mesh, process_index=num_processes - 1)
      if chunks.num_chunks['model'] == 1:
        assert (layout.shard_id, layout.num_shards) == (
          chunks.chunk_ids['data'],
          chunks.num_chunks['data'],
        )


@pytest.mark.parametrize(
  'experts,num_partitions,shape',
  [
    (6, 1, (4, 2, 1)),
    (6, 2, (2, 2, 2)),
    (3, 1, (8, 1, 1)),
    (16, 1, (1, 8, 1)),
    (12, 2, (1, 4, 2)),
    (None, 1, (1, 8, 1)),
  ],
)
def test_an_expert_axis_fits_itself_to_experts_and_devices(experts, num_partitions, shape, caplog):
  caplog.set_level('INFO')
  partitioner = MoePjitPartitioner(
    num_expert_partitions='auto', experts_per_layer=experts, num_partitions=num_partitions
  )
  assert tuple(partitioner.mesh.shape.values()) == shape
  is_less = experts is not None and shape[1] < 8 // num_partitions
  text = f'Expert axis of {shape[1]} devices: the largest number up to {8 // num_partitions}'
  assert (text in caplog.text) == is_less
  assert partitioner.data_partition_spec == P(('expert', 'data'))


@pytest.mark.parametrize(
  'num_expert_partitions,num_partitions,shape',
  [
    (1, 1, (8, 1, 1)),
    (3, 1, (4, 2, 1)),
    (6, 1, (2, 4, 1)),
    (8, 1, (1, 8, 1)),
    (100, 1, (1, 8, 1)),
    (3, 2, (2, 2, 2)),
    (4, 2, (1, 4, 2)),
    (2, 8, (1, 1, 8)),
  ],
)
def test_mesh_of_the_second_form(num_expert_partitions, num_partitions, shape):
  mesh = mesh_lib.default_moe_mesh(num_expert_partitions, num_partitions)
  assert mesh.axis_names == ('data', 'expert', 'model') and mesh.devices.shape == shape
  assert [device.id for device in mesh.devices.ravel()] == list(range(8))
  assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
  assert mesh_lib.default_moe_mesh(num_expert_partitions, None, (1, num_partitions), 'cpu') == mesh
  assert (
    mesh_lib.default_moe_mesh(num_expert_partitions, num_partitions, (1, num_partitions)) == mesh
  )


def test_number_of_model_partitions():
  assert mesh_lib.compute_num_model_partitions(4, None) == 4
  assert mesh_lib.compute_num_model_partitions(None, (2, 2, 1, 2)) == 8
  assert mesh_lib.compute_num_model_partitions(2, (1, 2)) == 2
  for arguments, message in (
    ((None, None), 'num_model_partitions. must be .*and otherwise a number, got None'),
    ((4, (1, 2)), 'must be the number of devices of model_parallel_submesh .*got 4'),
  ):
    with pytest.raises(ConfigError, match=message):
      mesh_lib.compute_num_model_partitions(*arguments)


# ---- Functions -------------------------------------------------------------------------------------------------------


def _doubled(state, batch, key):
  return jax.tree.map(lambda x: 2 * x, state), batch + 1, key


@pytest.mark.parametrize(
  'options,rows,kernel',
  [
    ({'num_experts': 4}, P(('data', 'model')), P('data')),
    ({'num_experts': 8}, P('data'), P('data')),
    ({'num_expert_partitions': 4}, P(('expert', 'data')), P('data')),
  ],
)
def test_raw_data_specs_are_the_partitioner_s_data_axes(options, rows, kernel):
  partitioner = MoePjitPartitioner(**options, num_partitions=1)
  fn = partitioner.partition(
    _doubled,
    ({'kernel': P('data')}, P('data'), P('model')),
    ({'kernel': P('data')}, P('data'), P('model')),
    donate_argnums=(0,),
  )
  state = {'kernel': jnp.ones([8, 2])}
  key = np.ones([8], np.float32)
  state, batch, key = fn(state, np.zeros([16, 4], np.float32), key)

  def place(spec):
    return NamedSharding(partitioner.mesh, spec)

  assert state['kernel'].sharding == place(kernel) and batch.sharding == place(rows)
  # With two data axes nothing is parted by `model`.
  assert key.sharding.is_fully_replicated
  assert np.all(np.asarray(batch) == 1) and np.all(np.asarray(state['kernel']) == 2)
  compiled = partitioner.compile(fn, state, batch, key)
  assert compiled.input_shardings[0][1] == place(rows)


@pytest.mark.parametrize(
  'options,parameter_dims',
  [
    ({'num_experts': 4, 'num_partitions': 1}, 2),
    ({'num_expert_partitions': 2, 'num_partitions': 2}, 2),
    *(
      pytest.param(options, dims, marks=pytest.mark.full)
      for dims in (1, 2)
      for options in (
        {'num_experts': 4, 'num_partitions': 1},
        {'num_experts': 8, 'num_partitions': 2},
        {'num_expert_partitions': 4, 'num_partitions': 1},
        {'num_expert_partitions': 2, 'num_partitions': 2},
      )
    ),
  ],
)
def test_loss_and_gradients_do_not_depend_on_the_mesh(options, parameter_dims):
  """Four experts, every token at each of them; parameters as the rules say."""
  if 'num_experts' in options:
    num_experts = options['num_experts']
    rules = rules_lib.standard_logical_axis_rules(
      num_experts, options['num_partitions'], parameter_partitioning_dims=parameter_dims
    )
  else:
    num_experts = 4
    rules = rules_lib.head_logical_axis_rules(1, parameter_dims)
  rng = np.random.default_rng(0)
  params = {
    'dense': rng.normal(size=[16, 16]),
    'wi': rng.normal(size=[num_experts, 16, 8]),
    'wo': rng.normal(size=[num_experts, 8, 16]),
  }
  params = jax.tree.map(np.float32, params)
  x = rng.normal(size=[16, 16]).astype(np.float32)
  axes = {'dense': ('embed', 'mlp'), 'wi': _EXPERT_KERNEL, 'wo': ('expert', 'expert_mlp', 'embed')}

  def loss_fn(params, x):
    hidden = jnp.tanh(jnp.einsum('bd,edf->ebf', x @ params['dense'], params['wi']))
    return jnp.mean(jnp.square(jnp.einsum('ebf,efd->bd', hidden, params['wo'])))

  partitioner = MoePjitPartitioner(**options, logical_axis_rules=rules)
  specs = {name: partitioning.logical_to_mesh_axes(names, rules) for name, names in axes.items()}
  fn = partitioner.partition(jax.value_and_grad(loss_fn), (specs, P('data')), (None, specs))
  loss, grads = fn(params, x)
  expected_loss, expected = jax.value_and_grad(loss_fn)(params, x)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
  for name, grad in grads.items():
    assert grad.sharding == NamedSharding(partitioner.mesh, specs[name])
    assert np.linalg.norm(grad - expected[name]) < 1e-5 * np.linalg.norm(expected[name])
  if parameter_dims == 2:  # every device holds an eighth of every parameter
    for name, grad in grads.items():
      assert grad.addressable_shards[0].data.size * 8 == params[name].size


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'options,message',
  [
    (
      {'num_partitions': 1},
      'num_expert_partitions` must be None with num_experts, and otherwise .*, got None',
    ),
    (
      {'num_experts': 4, 'num_expert_partitions': 4, 'num_partitions': 1},
      'must be None with num_experts.*got 4',
    ),
    ({'num_experts': 4}, 'exactly one of num_partitions, model_parallel_submesh'),
    ({'num_expert_partitions': 4}, 'exactly one of num_partitions, model_parallel_submesh'),
    (
      {'num_experts': -1, 'num_partitions': 1},
      'num_experts` must be an integer >= 0 or None, got -1',
    ),
    ({'num_experts': 2.0, 'num_partitions': 1}, 'num_experts` .* got 2.0'),
    ({'num_expert_partitions': 0, 'num_partitions': 1}, 'otherwise an integer >= 1 .* got 0'),
    ({'num_expert_partitions': True, 'num_partitions': 1}, 'num_expert_partitions` .* got True'),
    (
      {'num_expert_partitions': 'most', 'num_partitions': 1},
      "num_expert_partitions` .* got 'most'",
    ),
    (
      {'num_experts': 4, 'experts_per_layer': 4, 'num_partitions': 1},
      'experts_per_layer` must be None with num_experts, got 4',
    ),
    (
      {'num_expert_partitions': 4, 'experts_per_layer': 0, 'num_partitions': 1},
      'experts_per_layer` must be an integer >= 1 or None, got 0',
    ),
    ({'num_experts': 4, 'num_partitions': 0}, 'num_partitions` must be an integer >= 1'),
    (
      {'num_experts': 4, 'num_partitions': 1, 'state_filter_fn': '.*expert.*'},
      'state_filter_fn` must be .*moe.match_fn',
    ),
    (
      {'num_experts': 4, 'num_partitions': 1, 'logical_axis_rules': [('expert', 3)]},
      'must be pairs such as',
    ),
  ],
)
def test_errors_of_the_constructor(options, message):
  with pytest.raises(ConfigError, match=message):
    MoePjitPartitioner(**options)


@pytest.mark.parametrize(
  'options,message',
  [
    # More experts than devices along `data`, or fewer: they have to divide.
    (
      {'num_experts': 12, 'num_partitions': 1},
      "multiple of 8, the devices along mesh axis 'data'.*got 12.*partitions=4 in",
    ),
    (
      {'num_experts': 2, 'num_partitions': 2},
      "multiple of 4, the devices along mesh axis 'data'.*got 2.*partitions=2 in",
    ),
    (
      {'num_experts': 6, 'num_partitions': 1},
      'a divisor or multiple of 8 devices, got 6.*num_expert_partitions=2 in',
    ),
    ({'num_experts': 8, 'num_partitions': 3}, 'num_partitions` must be one of .* got 3'),
    ({'num_expert_partitions': 8, 'num_partitions': 3}, 'num_partitions` must be one of .* got 3'),
    (
      {'num_expert_partitions': 8, 'num_partitions': 1, 'experts_per_layer': 6},
      "expert axis, now 8 of 8 devices, a divisor of the 6 experts .*Use num_expert_partitions=2 or 'auto'",
    ),
    (
      {'num_expert_partitions': 8, 'model_parallel_submesh': (2, 1)},
      'extents that divide the grid',
    ),
  ],
)
def test_errors_of_the_mesh(options, message):
  with pytest.raises(ConfigError, match=message):
    _ = MoePjitPartitioner(**options).mesh


def test_remedy_for_experts_that_do_not_divide_works():
  """The number that the messages above propose gives a mesh over which those experts divide."""
  for num_experts, num_partitions in ((12, 1), (2, 2), (6, 1)):
    with pytest.raises(ConfigError) as error:
      _ = MoePjitPartitioner(num_experts, num_partitions).mesh
    proposed = int(str(error.value).partition('num_expert_partitions=')[2].split()[0])
    mesh = MoePjitPartitioner(num_expert_partitions=proposed, num_partitions=num_partitions).mesh
    assert num_experts % mesh.shape['expert'] == 0 and mesh.shape['expert'] > 1


@pytest.mark.parametrize(
  'options,rules,message',
  [
    # The rules of another form, or of dense models, divide the batch otherwise.
    (
      {'num_experts': 8},
      rules_lib.head_logical_axis_rules(),
      r"must be \('data',\) for num_experts=8 on 8 devices \(one data axis\), got \('expert', 'data'\).*"
      r'moe.standard_logical_axis_rules\(num_experts=8, num_partitions=1',
    ),
    (
      {'num_experts': 4},
      partitioning.standard_logical_axis_rules(),
      r"must be \('data', 'model'\).*two data axes",
    ),
    (
      {'num_expert_partitions': 4},
      partitioning.standard_logical_axis_rules(),
      r"must be \('expert', 'data'\) for num_expert_partitions=4.*moe.head_logical_axis_rules",
    ),
    (
      {'num_expert_partitions': 4},
      [('batch', ('expert', 'data')), ('expert', 'experts')],
      "Did you mean 'expert'",
    ),
    (
      {'num_experts': 4},
      [('batch', ('data', 'model')), ('expert', 'expert')],
      "must be one of .*got 'expert'",
    ),
  ],
)
def test_rules_of_another_mesh(options, rules, message):
  with pytest.raises(ConfigError, match=message):
    _ = MoePjitPartitioner(**options, num_partitions=1, logical_axis_rules=rules).mesh


@pytest.mark.parametrize(
  'options,expected',
  [
    (
      {'num_experts': 4, 'num_partitions': 1},
      'Batch size 4 must be divisible by 8.*data.*model.*Use 8',
    ),
    ({'num_experts': 8, 'num_partitions': 2}, 'Batch size 6 must be divisible by 4.*Use 4 or 8'),
    (
      {'num_expert_partitions': 4, 'num_partitions': 1},
      "divisible by 8, .*'expert', 'data'.*Use 8 or 16",
    ),
  ],
)
def test_batch_that_does_not_divide(options, expected):
  size = {'num_expert_partitions': 12}.get(
    next(iter(options)), 4 if options['num_partitions'] == 1 else 6
  )
  with pytest.raises(ConfigError, match=expected):
    MoePjitPartitioner(**options).get_data_layout(size)


@pytest.mark.parametrize(
  'arguments,message',
  [
    ({'num_experts': 4}, '`num_partitions` must be None if and only if'),
    (
      {'num_experts': 4, 'num_partitions': 1, 'model_parallel_submesh': (1, 1)},
      'must be None if and only if',
    ),
    (
      {'num_experts': 4, 'num_partitions': 1, 'parameter_partitioning_dims': 3},
      'parameter_partitioning_dims` must be one of 1, 2, got 3',
    ),
    ({'num_experts': None, 'num_partitions': 1}, 'num_experts` must be an integer >= 0, got None'),
  ],
)
def test_errors_of_standard_rules(arguments, message):
  with pytest.raises(ConfigError, match=message):
    rules_lib.standard_logical_axis_rules(**arguments)


def test_default_rules_are_those_of_the_form():
  for options in (
    {'num_experts': 4, 'num_partitions': 1},
    {'num_experts': 8, 'model_parallel_submesh': (1, 2)},
  ):
    assert list(
      MoePjitPartitioner(**options).logical_axis_rules
    ) == rules_lib.standard_logical_axis_rules(**options)
  assert list(MoePjitPartitioner(num_expert_partitions=4, num_partitions=1).logical_axis_rules) == (
    rules_lib.head_logical_axis_rules()
  )
  given = rules_lib.head_logical_axis_rules(1, 2, [('extra', None)])
  partitioner = MoePjitPartitioner(
    num_expert_partitions=4, num_partitions=1, logical_axis_rules=given
  )
  assert list(partitioner.logical_axis_rules) == given
  # Experts that no rule shards may be of any number.
  replicated = MoePjitPartitioner(6, 2, logical_axis_rules=[('batch', 'data'), ('expert', None)])
  assert dict(replicated.mesh.shape) == {'data': 4, 'model': 2}


def test_a_tpu_without_a_default_tile_names_the_other_form():
  devices = make_pod('TPU v4', (4, 4, 4, 1))
  with use_devices(devices, 0):
    assert dict(MoePjitPartitioner(8, 1).mesh.shape) == {'data': 8, 'model': 8}
    with pytest.raises(ConfigError, match='No default mesh.*Set num_expert_partitions=2'):
      _ = MoePjitPartitioner(2, 1).mesh
    assert dict(MoePjitPartitioner(num_expert_partitions=2, num_partitions=1).mesh.shape) == {
      'data': 32,
      'expert': 2,
      'model': 1,
    }


@pytest.mark.parametrize(
  'devices,num_local',
  [
    (topologies.tpu_slices('TPU v5 lite', (16, 16, 1), (2, 2, 1), 2), 256),
    (topologies.tpu_slices('TPU v6 lite', (2, 4, 1), (2, 2, 1)), 8),
    (topologies.tpu_slices('TPU v5p', (4, 4, 8), (2, 2, 1)), 128),
    (topologies.tpu_slices('TPU7x', (4, 4, 4), (2, 2, 1), 2), 128),
    (topologies.gpu_nodes(16, 8, 1), 8),
    (topologies.gpu_nodes(36, 4, 18), 72),
  ],
)
def test_meshes_with_experts(devices, num_local):
  """Experts and the model axis are within a slice where they fit; both forms load batches by process."""
  with use_devices(devices, 0):
    for num_expert_partitions, num_partitions in ((8, 1), (4, 2), (1, 4), ('auto', 2)):
      partitioner = MoePjitPartitioner(
        num_expert_partitions=num_expert_partitions,
        num_partitions=num_partitions,
        experts_per_layer=8,
      )
      mesh = partitioner.mesh
      table = topologies.Table(mesh)
      table.check_devices(devices)
      assert (
        mesh.axis_names == ('data', 'expert', 'model') and mesh.shape['model'] == num_partitions
      )
      experts = table.slice.reshape(mesh.shape['data'], -1)
      assert (table.num_per_row(experts) == 1) == (
        mesh.shape['expert'] * num_partitions <= num_local
      )
      topologies.check_loading(partitioner, devices)
    for num_experts, num_partitions in ((4, 1), (len(devices), 1), (len(devices), 2)):
      partitioner = MoePjitPartitioner(num_experts, num_partitions)
      topologies.Table(partitioner.mesh).check_devices(devices)
      assert partitioner.two_data_axes == (num_experts == 4)
      topologies.check_loading(partitioner, devices)
