"""The sharding report: its numbers equal the arrays on the devices, and its text shows them."""

import collections
import dataclasses
import pathlib
import textwrap

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.partitioning import explain
from tests.partitioning import explain_cases as cases


def make_partitioner(num_partitions, dims):
  return partitioning.PjitPartitioner(
    num_partitions=num_partitions,
    logical_axis_rules=partitioning.standard_logical_axis_rules(*dims),
  )


@pytest.mark.parametrize(
  'num_partitions,dims', [(1, (1, 1)), (2, (1, 1)), (4, (1, 2)), (2, (2, 2)), (8, (2, 1))]
)
def test_figures_are_those_of_the_arrays_on_devices(num_partitions, dims):
  partitioner = make_partitioner(num_partitions, dims)
  state = cases.make_state()
  report = partitioner.explain(jax.eval_shape(lambda: state))
  placed = jax.device_put(state, partitioner.get_shardings(partitioner.get_mesh_axes(state)))
  leaves = jax.tree.leaves(placed)
  assert len(report.rows) == len(leaves)
  bytes_of_device = collections.Counter()
  for row, array in zip(report.rows, leaves, strict=True):
    assert (row.shape, row.dtype) == (array.shape, array.dtype)
    pieces = collections.Counter(str(shard.index) for shard in array.addressable_shards)
    assert set(pieces.values()) == {row.num_copies}
    for shard in array.addressable_shards:
      assert shard.data.shape == row.shard_shape
      assert shard.data.nbytes == row.bytes_per_device
      bytes_of_device[shard.device] += shard.data.nbytes
    assert array.nbytes == row.bytes_total
    assert NamedSharding(partitioner.mesh, row.mesh_axes).is_equivalent_to(
      array.sharding, array.ndim
    )
  totals = report.totals()
  assert set(bytes_of_device.values()) == {totals.bytes_per_device}
  assert totals.num_arrays == len(leaves)
  # Of all memory in use, the share that is not needed to hold everything once.
  unique = sum(array.nbytes for array in leaves)
  assert totals.replicated_share == pytest.approx(1 - unique / sum(bytes_of_device.values()))
  assert (
    sum(report.totals(section).bytes_total for section in report.sections) == totals.bytes_total
  )


def test_rows_name_the_deciding_rule():
  report = make_partitioner(2, (2, 2)).explain(cases.make_state())
  row = next(row for row in report.rows if row.name == 'embedding')
  assert row.section == 'parameters'
  assert row.logical_axes == P('vocab', 'embed') and row.mesh_axes == P('model', 'data')
  assert [decision.rule for decision in row.decisions] == [('vocab', 'model'), ('embed', 'data')]
  assert row.format_rules() == 'vocab->model, embed->data (model was taken)'
  scale = next(row for row in report.rows if row.name == 'layers_0/norm')
  assert scale.replicated_over == ('data',) and scale.num_copies == 4


def test_sections_and_names():
  report = make_partitioner(1, (1, 1)).explain(cases.make_state())
  assert report.sections == ('parameters', 'optimizer state', 'mutable collections')
  names = {
    section: {row.name for row in report.rows if row.section == section}
    for section in report.sections
  }
  assert 'layers_1/mlp/wi' in names['parameters']
  assert {'step', 'param_states/mu/layers_0/norm'} <= names['optimizer state']
  assert names['mutable collections'] == {'counts/seen'}


def test_text():
  text = make_partitioner(2, (1, 2)).explain(cases.make_state(mutables=False)).to_text()
  expected = pathlib.Path(__file__).parents[1] / 'golden' / 'explain' / 'report.txt'
  assert text == expected.read_text()


def test_text_names_the_largest_copies():
  text = make_partitioner(2, (1, 1)).explain(cases.make_state(mutables=False)).to_text()
  assert text.endswith(
    textwrap.dedent("""
      Largest copies (bytes per device that sharding them fully would save)
          1.50 KiB  parameters: embedding (4 copies over data)
          1.50 KiB  parameters: layers_{0-1}/mlp/wi (4 copies over data)
             768 B  optimizer state: param_states/mu/embedding (4 copies over data)
             768 B  optimizer state: param_states/mu/layers_{0-1}/mlp/wi (4 copies over data)
             112 B  parameters: layers_{0-1}/norm (8 copies over data, model)
      """)
  )


def test_unfolded_text_has_every_array():
  report = make_partitioner(2, (1, 2)).explain(cases.make_state())
  lines = report.to_text(fold=False).splitlines()
  for row in report.rows:
    assert any(line.startswith(row.name + ' ') for line in lines), row.name


def test_folding_joins_only_equal_rows():
  state = cases.make_state(layers_1={'mlp': {'wi': jnp.ones([16, 64])}, 'norm': jnp.ones([16])})
  rows = [
    row for row in make_partitioner(2, (1, 1)).explain(state).rows if row.section == 'parameters'
  ]
  folded = {name: len(group) for name, group in explain.fold_rows(rows)}
  assert folded == {
    'embedding': 1,
    'layers_0/mlp/wi': 1,
    'layers_1/mlp/wi': 1,
    'layers_{0-1}/norm': 2,
  }


def test_folded_names_show_gaps_and_several_numbers():
  rows = make_partitioner(1, (1, 1)).explain(cases.make_state()).rows[:1]
  names = [f'layers_{layer}/wi_{gate}/kernel' for layer in (0, 1, 3) for gate in (0, 1)]
  rows = [dataclasses.replace(rows[0], name=name) for name in names]
  ((name, group),) = explain.fold_rows(rows)
  assert name == 'layers_{0,1,3}/wi_{0-1}/kernel' and len(group) == 6


def _make_partitioner_of_small_arrays(num_partitions, max_replicated_size):
  return partitioning.PjitPartitioner(
    num_partitions=num_partitions, max_replicated_size=max_replicated_size
  )


def test_what_belongs_to_a_parameter_follows_it():
  """Momentum of a parameter that is replicated is replicated, whatever its size; other arrays are not."""
  layer = {'mlp': {'wi': jnp.ones([16, 30])}, 'norm': jnp.ones([16])}
  state = cases.make_state(mutables=False, layers_0=layer, layers_1=layer)
  axes = state.as_logical_axes()
  history = {'layers_0': {'mlp': {'wi': jnp.ones([4, 16, 30])}}}
  history_axes = {'layers_0': {'mlp': {'wi': P(None, 'embed', 'mlp')}}}

  def explain_history(max_replicated_size, history, history_axes):
    partitioner = _make_partitioner_of_small_arrays(4, max_replicated_size)
    both = []
    for tree, slot in ((state, history), (axes, history_axes)):
      optimizer = tree._optimizer
      both.append(
        tree.replace(
          _optimizer=optimizer.replace(
            state={
              **optimizer.state,
              'param_states': {**optimizer.state['param_states'], 'history': slot},
            }
          )
        )
      )
    partitioner.get_logical_axes = lambda train_state: both[1]
    return {
      row.name: row for row in partitioner.explain(both[0]).rows if row.section == 'optimizer state'
    }

  rows = explain_history(480, history, history_axes)
  assert rows['param_states/history/layers_0/mlp/wi'].mesh_axes == P(None, None, None)
  with pytest.raises(
    errors.ConfigError, match='optimizer state: param_states/history/other: dim 2'
  ):
    explain_history(480, {'other': jnp.ones([4, 16, 30])}, {'other': P(None, 'embed', 'mlp')})
  with pytest.raises(errors.ConfigError, match='parameters: layers_0/mlp/wi: dim 1'):
    explain_history(479, history, history_axes)


def test_text_lists_parameters_that_do_not_divide(caplog):
  layer = {'mlp': {'wi': jnp.ones([16, 30])}, 'norm': jnp.ones([16])}
  report = make_partitioner(4, (1, 2)).explain(
    cases.make_state(mutables=False, layers_0=layer, layers_1=layer)
  )
  text = report.to_text()
  assert text.endswith(
    textwrap.dedent("""
      Parameters with a dim that its mesh axes do not divide
        layers_{0-1}/mlp/wi (16 x 30): mlp 30 by model 4: replicated
      """)
  )
  assert 'embed->data, mlp->- (model does not divide)' in text and report.num_indivisible == 2
  assert len(caplog.records) == 1


def test_report_of_numpy_state():
  report = make_partitioner(2, (1, 1)).explain(jax.tree.map(np.asarray, cases.make_state()))
  assert report.totals('parameters').num_elements == 2080
