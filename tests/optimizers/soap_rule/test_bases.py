"""Refreshes of SOAP's bases: eigenvectors, power iteration, order of the columns, shares of a period."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.optimizers.soap_rule import bases as bases_lib
from tests.optimizers.soap_rule import soap_cases


def _statistics(rng, count, size):
  """Return float32 [count, size, size]: positive definite, with eigenvalues from 1 to `size`, and their vectors."""
  vectors = np.linalg.qr(rng.normal(size=[count, size, size]))[0]
  values = np.arange(size, 0, -1.0)
  return np.float32(vectors * values @ np.swapaxes(vectors, 1, 2)), vectors


@pytest.mark.parametrize('matrix_dtype', ['float32', 'int16'])
def test_the_first_bases_are_eigenvectors_in_descending_order(matrix_dtype):
  rng = np.random.default_rng(0)
  cfg = soap_cases.config(matrix_dtype=matrix_dtype)
  stacks = [_statistics(rng, count, size) for count, size in ((2, 4), (1, 3), (3, 4))]
  statistics = [soap_cases.to_state(matrices, cfg) for matrices, _ in stacks]
  got = bases_lib.first_bases(statistics, statistics, cfg)
  for basis, (_, vectors) in zip(got, stacks, strict=True):
    products = np.einsum('kij,kil->kjl', vectors, soap_cases.to_float(basis))
    want = np.broadcast_to(np.eye(vectors.shape[-1]), products.shape)
    np.testing.assert_allclose(np.abs(products), want, atol=1e-3)


def test_columns_are_ordered_and_iterated():
  rng = np.random.default_rng(0)
  cfg = soap_cases.config(precondition_frequency=1)
  matrices, vectors = _statistics(rng, 3, 4)
  shuffle = np.array([[2, 0, 1, 3], [0, 1, 2, 3], [3, 2, 1, 0]])
  old = np.take_along_axis(vectors, shuffle[:, None], 2) + 0.01 * rng.normal(size=vectors.shape)
  old = np.float32(np.linalg.qr(old)[0])
  (new,), (order,) = bases_lib.next_bases(
    [jnp.asarray(matrices)], [jnp.asarray(old)], [np.arange(3)], jnp.int32(5), cfg
  )
  np.testing.assert_array_equal(order, np.argsort(shuffle, axis=1))
  sorted_columns = np.take_along_axis(old, np.asarray(order)[:, None], 2)
  want = np.linalg.qr(matrices @ sorted_columns)[0]
  np.testing.assert_allclose(np.abs(new), np.abs(want), atol=1e-5)


def test_shares_are_in_the_order_of_the_ranks():
  rng = np.random.default_rng(0)
  cfg = soap_cases.config(precondition_frequency=3, spread_refreshes=True)
  sizes = [(4, 3), (2, 2), (3, 3)]
  statistics = [jnp.asarray(_statistics(rng, count, size)[0]) for count, size in sizes]
  old = [jnp.broadcast_to(jnp.eye(size), (count, size, size)) for count, size in sizes]
  # 7 matrices of 3x3: 3 in each of the first two slots and 1 in the last; 2 of 2x2: none in the last.
  ranks = [np.array([6, 0, 5, 1]), np.array([9, 8]), np.array([4, 3, 2])]
  want = {
    0: [{1, 3}, {1}, {2}],
    1: [{2}, {0}, {0, 1}],
    2: [{0}, set(), set()],
  }
  for slot, rows in want.items():
    new, orders = bases_lib.next_bases(statistics, old, ranks, jnp.int32(6 + slot), cfg)
    for before, after, order, expected in zip(old, new, orders, rows, strict=True):
      changed = np.flatnonzero(np.any(before != after, axis=(1, 2)))
      assert set(changed.tolist()) == expected
      kept = sorted(set(range(len(before))) - expected)
      np.testing.assert_array_equal(
        order[np.array(kept, int)], np.arange(before.shape[-1])[None].repeat(len(kept), 0)
      )


def test_on_cpu_no_decomposition_has_a_batch():
  """Two batched ones wait for each other's threads, forever if there are no more cores than two."""
  cfg = soap_cases.config(precondition_frequency=1)
  stacks = [jnp.broadcast_to(jnp.eye(size), (3, size, size)) for size in (4, 5)]

  def refresh(stacks, count):
    first = bases_lib.first_bases(stacks, stacks, cfg)
    return first, bases_lib.next_bases(stacks, stacks, [np.arange(3)] * 2, count, cfg)

  text = jax.jit(refresh).lower(stacks, jnp.int32(1)).as_text()
  calls = re.findall(r'custom_call @lapack_\w+\(.*', text)
  assert len(calls) >= 6  # eigenvectors, and both halves of QR, of each size
  assert not [call for call in calls if re.search(r'tensor<3x\dx\dxf32>', call)]
