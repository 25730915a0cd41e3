"""Balance of roots over devices: shares of the cost, the loops of each device, transfers, failures."""

import collections
import types

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite.optimizers.shampoo import root_balance

_AXES = ('data', 'model')


def _batches(sizes):
  """Return the batches of matrices of these sizes; exponents are 4."""
  sizes = np.asarray(sizes)
  return [(np.flatnonzero(sizes == size), int(size), 4) for size in np.unique(sizes)]


def _t5_small_sizes():
  """Return the sizes of the matrices of T5 1.1 small in blocks of 1024, in the order of the parameters."""
  attention = [384, 512] + 3 * [512, 384]
  mlp = 2 * [512, 1024] + [1024, 512]
  encoder_layer = attention + mlp + 2 * [512]
  decoder_layer = 2 * attention + mlp + 3 * [512]
  final_norm = [512]
  positions = [192]
  return 8 * decoder_layer + final_norm + positions + 8 * encoder_layer + final_norm + positions


def _balance(sizes, num_devices):
  """Return (balance, rows of a device)."""
  num_rows = -(-len(sizes) // num_devices)
  return root_balance.RootBalance(_batches(sizes), num_devices, num_rows), num_rows


def _num_computed(table, num_pieces):
  """Return the number of roots that each device computes, with those that fill up pieces."""
  return num_pieces * table.shape[-1]


@pytest.mark.parametrize(
  'sizes,num_devices',
  [
    (_t5_small_sizes(), 8),
    (_t5_small_sizes(), 64),
    # Large matrices on one device, and those of two sizes on different devices.
    ([1024] * 40 + [128] * 500, 8),
    ([32, 16] * 64, 64),
  ],
)
@pytest.mark.parametrize('piece_bytes', [2**19, 2**26])
def test_no_device_has_much_more_than_its_share(sizes, num_devices, piece_bytes, monkeypatch):
  # Sizes of pieces on CPU and on others.
  monkeypatch.setattr(root_balance.root_plan, '_piece_bytes', lambda: piece_bytes)
  balance, _ = _balance(sizes, num_devices)
  costs = sum(
    _num_computed(table, num_pieces) * float(size) ** 3
    for size, _, num_pieces, table in balance.classes
  )
  share = np.sum(np.float64(sizes) ** 3) / num_devices
  assert costs.max() <= 1.5 * share


@pytest.mark.parametrize('num_devices', [2, 3, 8, 64])
def test_each_root_is_computed_by_one_device(num_devices):
  sizes = _t5_small_sizes()
  balance, num_rows = _balance(sizes, num_devices)
  found = []
  for size, _, num_pieces, table in balance.classes:
    for device, rows in enumerate(table):
      assert (rows[num_pieces[device] :] >= num_rows + balance.num_slots).all()
      for row in rows[rows < num_rows + balance.num_slots]:
        owner = device
        if row >= num_rows:
          received = balance.transfers[:, device]
          ((number,),) = np.nonzero(received[:, 3] == row - num_rows)
          owner = received[number, 4]
          row, target, slot, _, _ = balance.transfers[number, owner]
          assert (target, slot) == (device, received[number, 3])
        assert sizes[owner * num_rows + row] == size
        found.append(owner * num_rows + row)
  assert sorted(found) == list(range(len(sizes)))


def test_matrices_move_only_from_devices_with_more_than_their_share():
  balance, _ = _balance([128] * 801, 8)
  assert not len(balance.transfers)
  # The number of transfers has a limit, and so has the memory of a device.
  balance, _ = _balance([256] * 100 + [8] * 700, 8)
  assert len(balance.transfers) == 64
  assert balance.num_slots == 10


def test_each_device_computes_its_own_number_of_roots(monkeypatch):
  """By a function that counts its calls: roots are twice the matrices, and those of negative ones fail."""
  sizes = [8] * 9 + [4] * 20 + [2] * 2
  balance, num_rows = _balance(sizes, 8)
  assert len(balance.transfers) >= 2
  calls = collections.Counter()

  def twice(matrix, p, options):
    assert options.padded_size == 8
    jax.debug.callback(lambda device, _: calls.update([int(device)]), _device(), matrix)
    error = jnp.where(matrix[0, 0] < 0, jnp.nan, matrix[0, 0] / 100)
    return matrix * p / 2, error

  monkeypatch.setattr(root_balance, 'inverse_pth_root', twice)
  rng = np.random.default_rng(0)
  statistics = np.broadcast_to(np.eye(8, dtype=np.float32), [8 * num_rows, 8, 8]).copy()
  for matrix, size in zip(statistics, sizes, strict=False):
    matrix[:size, :size] = rng.uniform(1, 2, [size, size])
  # One that moves and one that does not.
  source = balance.transfers[0, :, 1].argmin()
  failed = [source * num_rows + balance.transfers[0, source, 0], 20]
  statistics[failed, 0, 0] = -1
  old = np.full_like(statistics, 7)
  cfg = types.SimpleNamespace(
    inverse_failure_threshold=0.1,
    statistics_are_quantized=False,
    root_method='eigh',
    matrix_epsilon=0.0,
    precision=None,
  )

  def of_device(statistics, old):
    return balance.compute(_device(), statistics, old, jnp.int32(0), _AXES, cfg)

  mesh = Mesh(np.reshape(jax.devices()[:8], (4, 2)), _AXES, axis_types=(AxisType.Auto,) * 2)
  roots, errors = jax.jit(
    jax.shard_map(of_device, mesh=mesh, in_specs=P(_AXES), out_specs=P(_AXES), check_vma=False)
  )(statistics, old)
  jax.effects_barrier()
  for i, size in enumerate(sizes):
    own = roots[i, :size, :size]
    if i in failed:
      np.testing.assert_array_equal(own, 7)
      assert np.isnan(errors[i])
    else:
      np.testing.assert_array_equal(own, 2 * statistics[i, :size, :size])
      np.testing.assert_allclose(errors[i], statistics[i, 0, 0] / 100, rtol=1e-6)
  np.testing.assert_array_equal(errors[len(sizes) :], np.float32(0.1))
  wanted = sum(_num_computed(table, num_pieces) for _, _, num_pieces, table in balance.classes)
  assert [calls[device] for device in range(8)] == list(wanted)
  assert max(wanted) > min(wanted)


def _device():
  return jax.lax.axis_index(_AXES)
