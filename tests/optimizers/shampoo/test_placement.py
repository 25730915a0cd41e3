"""Placement of blocks on devices: each block reaches the devices of its matrices, and the results all devices."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
import numpy as np
import pytest

from t5x_lite.optimizers.shampoo import placement
from t5x_lite.optimizers.shampoo.blocks import make_layout

_SHAPES = [(9, 8), (3,), (4, 3, 8), (2, 2, 2, 2, 2), (), (4, 4)]


def _layouts():
  return [make_layout(shape, block_size=4, merge_dims=False, largest_dim=100) for shape in _SHAPES]


def _parameters(num_layers):
  """Return (parameters of `Placement`, number of matrices); layers of a parameter are not adjacent."""
  layouts = _layouts()
  per_layer = sum(layout.num_statistics for layout in layouts)
  offsets = np.cumsum([0, *(layout.num_statistics for layout in layouts)])
  starts = [[layer * per_layer + offset for layer in range(num_layers)] for offset in offsets]
  return list(zip(layouts, starts, strict=False)), num_layers * per_layer


def _in_context(num_devices):
  axis_types = (AxisType.Auto,) * 2
  shape = (num_devices // 2, 2) if num_devices > 1 else (1, 1)
  return jax.set_mesh(
    Mesh(np.reshape(jax.devices()[:num_devices], shape), ('data', 'model'), axis_types=axis_types)
  )


@pytest.mark.parametrize('num_devices,num_layers', [(1, 1), (8, 1), (8, 3)])
def test_spreading_collected_blocks_gives_the_parameters(num_devices, num_layers):
  parameters, num_matrices = _parameters(num_layers)
  rng = np.random.default_rng(0)
  grads = [rng.normal(size=(num_layers, *shape)).astype(np.float32) for shape in _SHAPES]
  num_rows = -(-num_matrices // num_devices)

  @jax.jit
  def round_trip(grads, count):
    placed = placement.Placement(parameters, placement.Devices.in_context(), num_rows)
    assert placed.devices.count == num_devices and (placed.halo > 0) == (num_devices > 1)
    blocks, never, results = placed.empty_blocks(), jnp.bool_(False), []
    for i, (layout, _) in enumerate(parameters):
      for layer in range(num_layers if layout.is_preconditioned else 0):
        tables = [table[layer] for table in placed.tables(i)]
        blocks, never = placed.collect(i, layout, grads[i][layer], tables, blocks, never, count)
    for i, (layout, _) in enumerate(parameters):
      for layer in range(num_layers if layout.is_preconditioned else 0):
        tables = [table[layer] for table in placed.tables(i)]
        groups, never = placed.spread(i, layout, blocks, tables, never, count)
        results.append((i, layer, layout.join(groups)))
    return jax.tree.map(jnp.asarray, results), never

  with _in_context(num_devices):
    results, never = round_trip(grads, jnp.int32(0))
  assert not never and len(results) == num_layers * (len(_SHAPES) - 1)
  for i, layer, value in results:
    np.testing.assert_array_equal(value, grads[i][layer])


@pytest.mark.parametrize('num_devices', [1, 3, 8, 40])
def test_each_matrix_is_on_one_device_and_each_block_with_its_matrices(num_devices):
  parameters, num_matrices = _parameters(num_layers=2)
  num_rows = -(-num_matrices // num_devices)
  placed = placement.Placement(
    parameters, placement.Devices(('x',) * (num_devices > 1), num_devices), num_rows
  )
  rows = []
  for each in placed.classes:
    assert each.rows.max() < num_rows + placed.halo
    for device in range(num_devices):
      own = each.rows[device]
      rows += list(own[(own >= 0) & (own < num_rows)] + device * num_rows)
      # All blocks but the missing ones have a matrix on the device.
      assert (((own >= 0) & (own < num_rows)).any(axis=1) | (own < 0).all(axis=1)).all()
  assert sorted(rows) == list(range(num_matrices))


def test_rows_of_a_stack_by_device():
  rows, positions = placement.local_rows(np.array([0, 1, 5, 6, 7]), num_devices=3, num_rows=3)
  np.testing.assert_array_equal(rows, [[0, 1], [2, 3], [0, 1]])
  np.testing.assert_array_equal(positions, [[0, 1], [2, -1], [3, 4]])


@pytest.mark.parametrize('rows', [np.arange(4), np.arange(1, 3), np.array([3, 0])])
def test_fixed_rows_are_those_of_traced_rows(rows):
  array, values = np.arange(8.0).reshape(4, 2), -np.ones([len(rows), 2])
  np.testing.assert_array_equal(placement.take_rows(jnp.asarray(array), rows), array[rows])
  np.testing.assert_array_equal(
    placement.take_rows(jnp.asarray(array), jnp.asarray(rows)), array[rows]
  )
  for indices in (rows, jnp.asarray(rows)):
    changed = placement.set_rows(jnp.asarray(array), indices, jnp.asarray(values))
    np.testing.assert_array_equal(changed[rows], values)
    np.testing.assert_array_equal(np.delete(changed, rows, axis=0), np.delete(array, rows, axis=0))
