"""Rules, meshes, layouts and axes equal those that T5X's MoE partitioner computed.

Three things were translated, since T5X does otherwise on CPU, or by decision:

* `num_partitions` on CPU: T5X ignores it and puts all devices on `model`. Here CPU devices behave as accelerators do,
  so those cases must equal the ones where T5X was told the same by a submesh.
* Meshes of 1 and 4 devices are made of the first of the 8 that a test has.
* T5X's Adafactor says nothing about `v_row` and `v_col`, and the partitioner prepends `expert`. Here Adafactor names
  their other dims too. Arrays without named dims have one None per dim here, and None there.
"""

import dataclasses
from unittest import mock

import flax.core
from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import pytest

from moe import rules as rules_lib
from moe import state_axes
from moe.partitioner import MoePjitPartitioner
from t5x_lite import adafactor
from t5x_lite import partitioning
from t5x_lite import train_state as train_state_lib
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from tests import golden_data
from tests.partitioning.fake_pods import fake_pod
from tests.partitioning.fake_pods import use_devices

GOLDEN, _ = golden_data.load('t5x/moe_partitioning')
PODS, POD_ARRAYS = golden_data.load('t5x/partitioning')
_POD_CASES = [
  (index, case) for index, case in enumerate(PODS['cases']) if case['moe_experts'] is not None
]


def _id(case):
  return '-'.join(
    str(case[name]) for name in ('num_devices', 'num_experts', 'num_partitions', 'mode')
  )


def _as_tuples(entries):
  return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)


# ---- Rules, meshes, layouts ------------------------------------------------------------------------------------------


def test_head_rules():
  def as_lists(rules):
    return [
      [name, list(axis) if isinstance(axis, tuple) else axis]
      for name, axis in rules
      if name != 'lora_rank'  # T5X has no adapters
    ]

  assert as_lists(rules_lib.head_logical_axis_rules()) == GOLDEN['rules']['default(2,1)']
  assert as_lists(rules_lib.head_logical_axis_rules(1, 1)) == GOLDEN['rules']['(1,1)']
  assert 'TypeError' in GOLDEN['rules']['(2,2)'] and rules_lib.head_logical_axis_rules(2, 2)


def _partitioner(case, mode):
  by_mode = {
    'num_partitions': {'num_partitions': case['num_partitions']},
    'submesh': {'model_parallel_submesh': (1, case['num_partitions'])},
  }
  return MoePjitPartitioner(num_expert_partitions=case['num_experts'], **by_mode[mode])


def _index_map(mesh, spec, shape):
  indices = NamedSharding(mesh, spec).devices_indices_map(shape)
  return {
    str(device.id): [[part.start, part.stop] for part in parts] for device, parts in indices.items()
  }


@pytest.mark.parametrize('case', GOLDEN['cases'], ids=_id)
def test_mesh_and_layout(case):
  # The result of T5X for this number of partitions, from a case that does not ignore it.
  golden = next(
    other
    for other in GOLDEN['cases']
    if other['mode'] == 'submesh'
    and all(other[name] == case[name] for name in ('num_devices', 'num_experts', 'num_partitions'))
  )
  devices = jax.devices()[: case['num_devices']]
  with mock.patch.multiple(
    jax, devices=lambda backend=None: devices, local_device_count=lambda: len(devices)
  ):
    partitioner = _partitioner(case, case['mode'])
    if 'error' in golden:
      with pytest.raises(
        ConfigError, match='does not (divide|tile)|extents that divide the grid|must be one of'
      ):
        _ = partitioner.mesh
      return
    mesh, spec = partitioner.mesh, partitioner.data_partition_spec
    assert (
      mesh.axis_names == tuple(golden['axis_names']) and dict(mesh.shape) == golden['mesh_shape']
    )
    assert [[[device.id for device in line] for line in plane] for plane in mesh.devices] == golden[
      'device_ids'
    ]
    assert tuple(spec) == _as_tuples(golden['data_partition_spec'])
    assert dataclasses.asdict(partitioner.get_data_layout(16)) == golden['data_layout_b16']
    default = partitioner.get_data_layout()
    assert {name: getattr(default, name) for name in golden['data_layout_default']} == golden[
      'data_layout_default'
    ]
    assert _index_map(mesh, spec, (16, 8)) == golden['batch_16x8_index_map']
    kernel = partitioning.logical_to_mesh_axes(
      ('expert', 'embed', 'expert_mlp'), partitioner.logical_axis_rules
    )
    assert tuple(kernel) == _as_tuples(golden['expert_kernel_spec'])
    assert (
      _index_map(mesh, kernel, (golden['num_experts'], 32, 64))
      == golden['expert_kernel_Ex32x64_index_map']
    )


def test_t5x_ignores_num_partitions_on_cpu():
  """The reason for the translation of the recorded cases."""
  assert all(
    case['mesh_shape'] == {'data': 1, 'expert': 1, 'model': case['num_devices']}
    for case in GOLDEN['cases']
    if case['mode'] == 'num_partitions'
  )


@pytest.mark.parametrize('index,case', _POD_CASES, ids=[f'case{index}' for index, _ in _POD_CASES])
def test_mesh_and_layout_of_a_pod(index, case):
  with use_devices(fake_pod(case), case['process_index']):
    partitioner = MoePjitPartitioner(
      num_expert_partitions=case['moe_experts'],
      num_partitions=case['num_partitions'],
      model_parallel_submesh=case['submesh'],
    )
    mesh = partitioner.mesh
    assert mesh.axis_names == tuple(case['axis_names']) and dict(mesh.shape) == case['shape']
    ids = POD_ARRAYS[f'case{index}/device_ids']
    assert [device.id for device in mesh.devices.ravel()] == ids.ravel().tolist()
    assert (
      dataclasses.asdict(partitioner.get_data_layout(case['data_layout']['batch_size']))
      == case['data_layout']
    )
    chunker = partitioning.LocalChunker(mesh)
    assert chunker.num_chunks == case['num_chunks'] and chunker.chunk_ids == case['chunk_ids']
    for shape, axes in (
      ((64, 32), ('data', 'model')),
      ((64, 32), ('data', None)),
      ((32, 16), (None, 'model')),
    ):
      info = partitioner.get_local_chunk_info(shape, axes)
      expected = case[f'chunk_info{shape}{axes}']
      assert [[part.start, part.stop] for part in info.slice] == expected['slice']
      assert info.replica_id == expected['replica_id']


# ---- Axes of a train state -------------------------------------------------------------------------------------------


class AdafactorOfT5x(adafactor.Adafactor):
  """Adafactor with the logical axes of T5X's: none for factored statistics, None for unnamed dims."""

  def derive_logical_axes(self, optimizer, param_logical_axes):
    axes = super().derive_logical_axes(optimizer, param_logical_axes)

    def silent(name, spec):
      return None if name.endswith(('/v_row', '/v_col')) or not any(spec) else spec

    param_states = tree_utils.map_with_names(silent, axes.state.param_states)
    return axes.replace(state=axes.state.replace(param_states=param_states))


def _state(name, optimizer_cls):
  """Return the shapes of the train state that T5X had in golden case `name`."""
  golden = GOLDEN['train_states'][name]
  optimizer_def = optimizer_cls(
    logical_factor_rules=rules_lib.logical_factor_rules(), factored=name.endswith('True')
  )
  params, axes = {}, {}
  for path, shape in golden['shapes'].items():
    if path.startswith('target/'):
      path_in_params = path.removeprefix('target/')
      params[path_in_params] = jax.ShapeDtypeStruct(shape, jnp.float32)
      axes[f'{path_in_params}_axes'] = flax_partitioning.AxisMetadata(
        tuple(golden['logical_axes'][path])
      )
  variables = {'params': tree_utils.unflatten_dict(params)}
  params_axes = flax.core.freeze(tree_utils.unflatten_dict(axes))
  return jax.eval_shape(
    lambda variables: train_state_lib.FlaxOptimTrainState.create(
      optimizer_def, {**variables, 'params_axes': params_axes}
    ),
    variables,
  )


def _flat(specs):
  """Return the list of axes, or None, by '/'-joined name, as in the golden file."""
  flat = tree_utils.flatten_dict(specs.state_dict())
  return {
    name: list(spec) if spec is not None and any(spec) else None for name, spec in flat.items()
  }


def _padded(axes, shape):
  return None if axes is None else list(axes) + [None] * (len(shape) - len(axes))


@pytest.mark.parametrize('name', GOLDEN['train_states'])
@pytest.mark.parametrize('optimizer_cls', [adafactor.Adafactor, AdafactorOfT5x])
def test_axes_of_a_train_state(name, optimizer_cls):
  golden = GOLDEN['train_states'][name]
  state = _state(name, optimizer_cls)
  shapes = {
    path: list(leaf.shape) for path, leaf in tree_utils.flatten_dict(state.state_dict()).items()
  }
  assert shapes == golden['shapes']
  rules = rules_lib.head_logical_axis_rules(additional_rules=[('mlp_embed', None)])
  filters = [None, state_axes.match_fn('.*expert.*/kernel/v_.*')]
  for state_filter_fn in filters:
    partitioner = MoePjitPartitioner(
      num_expert_partitions=4,
      num_partitions=2,
      logical_axis_rules=rules,
      state_filter_fn=state_filter_fn,
    )
    logical_axes = _flat(partitioner.get_logical_axes(state))
    mesh_axes = _flat(partitioner.get_mesh_axes(state))
    for path, shape in shapes.items():
      expected = _padded(golden['logical_axes'][path], shape)
      expected_mesh = _padded(golden['mesh_axes'][path], shape)
      if (
        '/expert/' in path
        and path.endswith(('v_row', 'v_col'))
        and optimizer_cls is adafactor.Adafactor
        and expected
      ):
        # T5X shards the experts alone.
        names = golden['logical_axes'][
          f'target/{path.removeprefix("state/param_states/").rpartition("/")[0]}'
        ]
        kept = 'mlp_embed' if path.endswith('v_row') else 'expert_mlp'
        assert expected == ['expert', None] and set(names) == {'expert', 'mlp_embed', 'expert_mlp'}
        expected, expected_mesh[1] = (
          ['expert', kept],
          {'mlp_embed': None, 'expert_mlp': 'model'}[kept],
        )
      assert logical_axes.get(path) == expected, path  # a spec of None has no place in a state dict
      assert mesh_axes[path] == (expected_mesh if expected_mesh and any(expected_mesh) else None), (
        path
      )


def test_axes_that_the_optimizer_omits_are_those_of_t5x():
  """Before the partitioner prepends anything, the imitation of T5X's Adafactor derives what T5X's does."""
  name = 'E4_factoredTrue'
  state = _state(name, AdafactorOfT5x)
  raw = _flat(state.as_logical_axes())
  golden = GOLDEN['train_states'][name]['raw_train_state_logical_axes']
  # A spec of None has no place in a state dict.
  assert raw == {
    path: axes for path, axes in golden.items() if axes is not None or path == 'state/step'
  }
