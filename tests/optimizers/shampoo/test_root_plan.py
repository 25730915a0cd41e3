"""The plan of the roots: batches, devices, steps, failures."""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from t5x_lite.optimizers.shampoo import root_plan
from t5x_lite.optimizers.shampoo import roots
from tests.optimizers.shampoo import roots_cases as cases

# Stacks and single matrices; orders that are static, traced, and none at all.
_SHAPES = [(5, 4, 4), (1, 1), (6, 4, 4), (4, 4), (3, 3, 3), (0, 3, 3)]
_EXPONENTS = [4, 2, 4, 4, np.array([2, 6, 1], np.int32), 4]
_NUM_MATRICES, _NUM_BATCHES = 16, 3


def _random_statistics(seed):
  rng = np.random.default_rng(seed)
  grads = [rng.standard_normal(shape) for shape in _SHAPES]
  return [(g @ np.swapaxes(g, -1, -2) + np.eye(g.shape[-1])).astype(np.float32) for g in grads]


def _identities():
  return [np.broadcast_to(np.eye(shape[-1], dtype=np.float32), shape) for shape in _SHAPES]


def _one_by_one(statistics, method='coupled_newton'):
  """Roots and errors as nested lists, each matrix on its own."""
  results = []
  for matrices, exponents in zip(statistics, _EXPONENTS, strict=True):
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    pairs = zip(flat, np.broadcast_to(exponents, len(flat)), strict=True)
    results.append([cases.root_fn(method)(m, jnp.int32(p)) for m, p in pairs])
  return results


_num_traces = collections.Counter()


@functools.cache
def _jitted(**options):
  """`compute_roots` compiled; `_num_traces` counts how often, by options."""

  def fn(statistics, previous, count):
    _num_traces[tuple(options.items())] += 1
    return root_plan.compute_roots(statistics, _EXPONENTS, previous, count, **options)

  return jax.jit(fn, compiler_options=cases.FAST_COMPILE)


def _flat(arrays):
  """Every matrix, or every error, on its own."""
  return [
    np.asarray(row)
    for array, shape in zip(arrays, _SHAPES, strict=True)
    for row in np.reshape(array, (-1, *(shape[-2:] if np.ndim(array) == len(shape) else ())))
  ]


def _assert_all_computed(roots_, errors, expected):
  for shape, root, error in zip(_SHAPES, roots_, errors, strict=True):
    assert (
      root.shape == shape and error.shape == shape[:-2] and error.dtype == root.dtype == jnp.float32
    )
  expected = [pair for entry in expected for pair in entry]
  for root, error, (one_root, one_error) in zip(
    _flat(roots_), _flat(errors), expected, strict=True
  ):
    np.testing.assert_allclose(root, one_root, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(error, one_error, atol=2e-6)


_THRESHOLD = np.float32(0.1)
_MESH = ((2, 4), ('data', 'model'))


def _mesh():
  return jax.make_mesh(*_MESH, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize('num_devices', [pytest.param(1, marks=pytest.mark.full), 8])
def test_batches_equal_single_roots(num_devices):
  statistics = _random_statistics(0)
  with jax.set_mesh(_mesh()) if num_devices > 1 else contextlib.nullcontext():
    _assert_all_computed(*_jitted()(statistics, _identities(), 0), _one_by_one(statistics))


@pytest.mark.parametrize('axis_name', [pytest.param(None, marks=pytest.mark.full), 'data'])
def test_each_root_is_computed_by_one_device(axis_name):
  """By the sizes of the decompositions in the compiled program: over the mesh in context, and over a mapped axis."""
  statistics = [np.broadcast_to(np.eye(6, dtype=np.float32), (40, 6, 6))]

  def decomposed(num_devices):
    mesh = jax.make_mesh(
      (num_devices,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices]
    )
    options = roots.RootOptions(method='eigh')

    def fn(matrices):
      return root_plan.compute_roots(
        matrices, [4], matrices, 0, options=options, axis_name=axis_name
      )[0]

    if axis_name is not None:
      fn = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh):
      text = jax.jit(fn).lower(statistics).compile().as_text()
    return [
      re.search(r'f32\[(\d+),(\d+),\d+\]', line).groups()
      for line in text.splitlines()
      if 'custom-call' in line and 'syevd' in line
    ]

  for num_devices in (1, 8):
    # All of a matrix, then the half of its smallest eigenvalues.
    assert decomposed(num_devices) == [(str(40 // num_devices), size) for size in ('6', '3')]


@pytest.mark.parametrize(
  'every,num_devices',
  [(7, 1)]
  + [
    pytest.param(every, num_devices, marks=pytest.mark.full)
    for every, num_devices in ((3, 8), (2, 1), (4, 1), (30, 1), (2, 8), (30, 8))
  ],
)
def test_spread_roots(every, num_devices):
  """All at count 0; then over any interval each matrix once, of the statistics of its step, about as many a step."""
  with jax.set_mesh(_mesh()) if num_devices > 1 else contextlib.nullcontext():
    options = {'spread_over': every}
    fn = _jitted(**options)
    constant = _random_statistics(0)
    results, errors = fn(constant, _identities(), 0)
    _assert_all_computed(results, errors, _one_by_one(constant))
    results, _ = fn(constant, results, 0)
    num_traces = _num_traces[tuple(options.items())]
    expected = _flat(results)
    seen = np.zeros(len(expected), int)
    per_step = []
    for count in range(2 * every + 1, 3 * every + 1):
      statistics = _random_statistics(count)
      singles = [pair for entry in _one_by_one(statistics) for pair in entry]
      results, errors = fn(statistics, results, count)
      due = np.array([error != _THRESHOLD for error in _flat(errors)])
      for i, matrix in enumerate(_flat(results)):
        expected[i] = singles[i][0] if due[i] else expected[i]
        np.testing.assert_allclose(matrix, expected[i], rtol=1e-5, atol=1e-5)
      seen += due
      per_step.append(due.sum())
    np.testing.assert_array_equal(seen, 1)
    assert len(expected) == _NUM_MATRICES
    assert max(per_step) <= _NUM_MATRICES // every + _NUM_BATCHES
    # A full interval on unchanging statistics gives what one step does without spreading.
    for count in range(3 * every + 2, 4 * every + 2):
      results, _ = fn(constant, results, count)
    for spread, at_once in zip(
      _flat(results), _flat(_jitted()(constant, _identities(), 0)[0]), strict=True
    ):
      np.testing.assert_allclose(spread, at_once, rtol=1e-5, atol=1e-5)
  assert _num_traces[tuple(options.items())] == num_traces


def test_spread_roots_without_a_full_first_step():
  every = 7
  fn = _jitted(spread_over=every, all_at_first=False)
  statistics, results = _random_statistics(0), _identities()
  num_due = []
  for count in range(every):
    results, errors = fn(statistics, results, count)
    num_due.append(sum(error != _THRESHOLD for error in _flat(errors)))
  assert sum(num_due) == _NUM_MATRICES and max(num_due) <= _NUM_MATRICES // every + _NUM_BATCHES
  expected = [pair for entry in _one_by_one(statistics) for pair in entry]
  for matrix, (root, _) in zip(_flat(results), expected, strict=True):
    np.testing.assert_allclose(matrix, root, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
  jax.__version__.startswith('0.11.'),
  reason='its compiler crashes for `jax.shard_map` with an array of zero elements',
)
@pytest.mark.parametrize(
  'options',
  [
    pytest.param({'axis_name': 'batch'}, marks=pytest.mark.full),
    {'axis_name': 'batch', 'spread_over': 2},
  ],
)
def test_roots_are_distributed_over_a_mapped_axis(options):
  statistics = _random_statistics(0)
  mesh = jax.make_mesh((4,), ('batch',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

  def fn(statistics, previous, count):
    return root_plan.compute_roots(statistics, _EXPONENTS, previous, count, **options)

  mapped = jax.jit(
    jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False),
    compiler_options=cases.FAST_COMPILE,
  )
  _assert_all_computed(*mapped(statistics, _identities(), 0), _one_by_one(statistics))
  # Outside of an axis of that name, the mesh in context or one device does.
  alone = jax.jit(fn, compiler_options=cases.FAST_COMPILE)
  _assert_all_computed(*alone(statistics, _identities(), 0), _one_by_one(statistics))


@pytest.mark.parametrize(
  'method,spread', [('coupled_newton', False), pytest.param('eigh', True, marks=pytest.mark.full)]
)
def test_a_failed_root_keeps_the_old_one(method, spread):
  statistics, previous = _random_statistics(2), [3 * matrix for matrix in _identities()]
  statistics[0][2, 1, 0] = np.nan
  statistics[3][0, 0] = np.inf
  options = {'spread_over': 4} if spread else {}
  results, errors = _jitted(options=roots.RootOptions(method=method), **options)(
    statistics, previous, 0
  )
  np.testing.assert_array_equal(results[0][2], previous[0][2])
  np.testing.assert_array_equal(results[3], previous[3])
  assert np.isnan(errors[0][2]) and np.isnan(errors[3])
  expected = [pair for entry in _one_by_one(statistics, method) for pair in entry]
  bad = {2, 12}
  for i, (result, error, (root, one_error)) in enumerate(
    zip(_flat(results), _flat(errors), expected, strict=True)
  ):
    if i not in bad:
      np.testing.assert_allclose(result, root, rtol=1e-5, atol=1e-5)
      np.testing.assert_allclose(error, one_error, atol=2e-6)


def test_an_error_at_the_threshold_is_a_failure():
  """The recorded matrix on which the iteration gives up at once, with an error of 0.79."""
  matrix = cases.load('invroot_matrices')['A/2_4']
  error = cases.load('invroot_out_p2')['table'][2, 2]
  for threshold, is_kept in ((0.1, True), (float(np.float32(error)), True), (0.9, False)):
    (root,), (reported,) = jax.jit(
      functools.partial(root_plan.compute_roots, failure_threshold=threshold)
    )([matrix], [jnp.int32([2])], [np.eye(2, dtype=np.float32)], 0)
    assert np.array_equal(root, np.eye(2)) == is_kept
    np.testing.assert_allclose(reported, error, rtol=1e-5)


def test_one_root_function_for_all_matrices_of_a_size():
  """Program text grows with the number of stacks by little, with the number of matrices not at all."""

  def num_loops(num_stacks, num_matrices):
    stacks = [np.broadcast_to(np.eye(4, dtype=np.float32), (num_matrices, 4, 4))] * num_stacks
    fn = jax.jit(lambda stacks: root_plan.compute_roots(stacks, [4] * num_stacks, stacks, 0)[0])
    text = fn.lower(stacks).as_text()
    return text.count('stablehlo.while'), len(text.splitlines())

  loops, lines = num_loops(1, 2)
  assert num_loops(1, 700) == (loops, lines)
  more_loops, more_lines = num_loops(24, 30)
  assert more_loops == loops
  assert more_lines < lines + 24 * 40


def test_nothing_to_do():
  assert root_plan.compute_roots([], [], [], jnp.int32(0)) == ([], [])


def test_large_batches_go_in_pieces(monkeypatch):
  """Equal to single roots when a device takes them two at a time, the last piece filled up."""
  # No option: data of the real size would make the test slow.
  monkeypatch.setattr(root_plan, '_piece_bytes', lambda: 2 * 4 * 16)
  statistics = _random_statistics(4)
  compute = jax.jit(
    lambda statistics, previous: root_plan.compute_roots(statistics, _EXPONENTS, previous, 0)
  )
  with jax.set_mesh(
    jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  ):
    _assert_all_computed(*compute(statistics, _identities()), _one_by_one(statistics))


@pytest.mark.parametrize('spread_over,num_due,is_small', [(5, 4, True), (2, 10, False)])
def test_spread_roots_of_shares_are_computed_once(spread_over, num_due, is_small, monkeypatch):
  """By a function that counts its calls. Few matrices are not sent as one per device."""
  axes = ('data', 'model')
  calls = []

  def twice(matrix, p, options):
    jax.debug.callback(calls.append, matrix[0, 0])
    return matrix * p / 2, jnp.float32(0)

  monkeypatch.setattr(roots, 'inverse_pth_root', twice)
  statistics = np.random.default_rng(0).uniform(1, 2, [24, 4, 4]).astype(np.float32)
  positions = np.where(np.arange(24) < 20, np.arange(24), -1)

  def fn(statistics, previous, positions):
    shares = root_plan.Shares([positions], [20], 8)
    found, _ = root_plan.compute_roots(
      [statistics],
      [4],
      [previous],
      jnp.int32(0),
      spread_over=spread_over,
      all_at_first=False,
      axis_name=axes,
      shares=shares,
    )
    return found[0]

  mapped = jax.shard_map(fn, mesh=_mesh(), in_specs=P(axes), out_specs=P(axes), check_vma=False)
  compiled = jax.jit(mapped).lower(statistics, 0 * statistics, positions).compile()
  found = compiled(statistics, 0 * statistics, positions)
  jax.effects_barrier()
  expected = 0 * statistics
  expected[:num_due] = 2 * statistics[:num_due]
  np.testing.assert_array_equal(found, expected)
  assert sorted(calls) == sorted(statistics[:num_due, 0, 0])
  assert ('f32[8,4,4]' not in compiled.as_text()) == is_small
