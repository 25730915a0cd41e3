"""Shampoo's inverse roots: recorded numbers of the original, a float64 reading of its padding, the plan over steps."""

import collections
import contextlib
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import numpy as np
import pytest

from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.shampoo import root_plan, roots

_GOLDEN = pathlib.Path(__file__).parent.parent / 'golden' / 'optimizers'
_ORDERS = (1, 2, 4, 6, 8)
# Tests compile more than they compute.
_FAST_COMPILE = {'xla_backend_optimization_level': 0}


def _load(name):
  with np.load(_GOLDEN / f'{name}.npz') as arrays:
    return dict(arrays)


@functools.cache
def _root_fn(method='coupled_newton', **options):
  """One compilation per shape: the order is traced."""
  return jax.jit(functools.partial(roots.inverse_pth_root, options=roots.RootOptions(method=method, **options)),
                 compiler_options=_FAST_COMPILE)


def _random_matrix(rng, size, condition):
  """Symmetric, float32, largest eigenvalue 1, eigenvalues spaced evenly in the logarithm."""
  basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
  matrix = (basis * np.logspace(0, -np.log10(condition), size)) @ basis.T
  return ((matrix + matrix.T) / 2).astype(np.float32)


def _exact_root(matrix, p, largest=0.0, ridge_epsilon=1e-6):
  values, vectors = np.linalg.eigh(np.asarray(matrix, np.float64))
  values = values + ridge_epsilon * max(values[-1], largest, 1e-6)
  return (vectors * values ** (-1 / p)) @ vectors.T


def _distance(x, y):
  return np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y)


# ---- coupled Newton: the recorded numbers


# Every size costs a compilation.
_SIZES = [size if size in (5, 64) else pytest.param(size, marks=pytest.mark.full)
          for size in (2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64)]


def _recorded(size):
  """Yields (p, row of the table, matrix, float32 root) of all recorded roots of matrices of a size."""
  matrices = _load('invroot_matrices')
  for p in _ORDERS:
    recorded = _load(f'invroot_out_p{p}')
    for row in recorded['table']:
      if row[0] == size:
        name = f'{size}_{int(row[1])}'
        yield p, row, matrices[f'A/{name}'], recorded[f'f32/{name}']


@pytest.mark.parametrize('size', _SIZES)
def test_coupled_newton_gives_the_recorded_roots(size):
  # By the compiler as users have it: its rounding decides which turn is the last, and here gives the recorded bits.
  root_fn = jax.jit(functools.partial(roots.inverse_pth_root, options=roots.RootOptions()))
  num_cases = 0
  for p, (_, condition, error, _, float32_error, *_), matrix, recorded in _recorded(size):
    root, reported = root_fn(matrix, jnp.int32(p))
    assert root.dtype == reported.dtype == jnp.float32
    assert _distance(root, recorded) <= max(1e-5, 10 * float32_error), (p, condition)
    np.testing.assert_allclose(reported, error, atol=1e-6)
    num_cases += 1
  assert num_cases >= 15


def test_a_static_order_gives_the_same_root_as_a_traced_one():
  matrix = _load('invroot_matrices')['A/8_2']
  for p in (6,):
    static, _ = jax.jit(functools.partial(roots.inverse_pth_root, p=p))(matrix)
    np.testing.assert_allclose(static, _root_fn()(matrix, jnp.int32(p))[0], rtol=1e-4, atol=1e-5)


def test_float64_roots_where_jax_allows_them():
  p = 2
  matrices, recorded = _load('invroot_matrices'), _load(f'invroot_out_p{p}')
  with jax.enable_x64(True):
    for name in ('2_4', '8_4', '8_6'):  # the first one stops after one iteration, far from converged
      matrix = matrices[f'A/{name}'].astype(np.float64)
      root, error = _root_fn()(matrix, jnp.int32(p))
      assert root.dtype == jnp.float64 and error.dtype == jnp.float32
      np.testing.assert_allclose(root, recorded[f'f64/{name}'], rtol=1e-7, atol=1e-9)


def test_power_iteration_gives_the_recorded_eigenvalues():
  arrays = _load('invroot_matrices')
  for (size, condition), eigenvalue in zip(arrays['index'], arrays['power_iter_f32'], strict=True):
    if size in (2, 5, 64):
      estimate = jax.jit(roots.power_iteration)(arrays[f'A/{size}_{condition}'])
      np.testing.assert_allclose(estimate, eigenvalue, rtol=2e-6)


# ---- the identity padding, against a reading that really pads


def _padded_root(matrix, p, padded_size, pad_value, num_iters=100, tolerance=1e-6):
  """The original's root of a padded matrix, in float64 and numpy; also its error and number of turns."""
  size = len(matrix)
  padded = pad_value * np.eye(padded_size)
  padded[:size, :size] = matrix
  vector, estimate = np.random.RandomState(1729).uniform(-1, 1, padded_size), 0.0
  for _ in range(100):
    vector = vector / np.linalg.norm(vector)
    product = padded @ vector
    old, estimate = estimate, vector @ product
    vector = product
    if abs(estimate - old) <= 1e-6:
      break
  ridge = 1e-6 * max(estimate, 1e-6)
  if padded_size == 1:
    return (padded + ridge) ** (-1 / p), 0.0, 0
  padded = padded + ridge * np.eye(padded_size)
  scale = (1 + p) / (2 * np.linalg.norm(padded))
  m, h = padded * scale, np.eye(padded_size) * scale ** (1 / p)
  error, turns = np.abs(m - np.eye(padded_size)).max(), 0
  result = h
  while turns < num_iters and error > tolerance:
    factor = (1 + 1 / p) * np.eye(padded_size) - m / p
    m = np.linalg.matrix_power(factor, p) @ m
    old_h, h = h, h @ factor
    old_error, error, turns = error, np.abs(m - np.eye(padded_size)).max(), turns + 1
    result = h
    if not error < 1.2 * old_error:
      result = old_h
      break
  return result[:size, :size], error, turns


@pytest.mark.parametrize('size,padded_size,pad_value', [
    (1, 1, 1), (1, 7, 1), (3, 40, 1), (4, 4, 1), (9, 50, 1), (12, 13, 1), (1, 3, 0), (5, 9, 0)])
def test_padding_as_a_scalar_equals_padding(size, padded_size, pad_value):
  rng = np.random.default_rng([size, padded_size])
  num_turns = set()
  with jax.enable_x64(True):
    options = roots.RootOptions(padded_size=padded_size, pad_value=pad_value)
    root_fn = jax.jit(functools.partial(roots.inverse_pth_root, options=options),
                      compiler_options=_FAST_COMPILE)
    for p in (1, 2, 3, 4, 6, 8):
      for scale in (1e-6, 1e-2, 1.0, 30.0):
        matrix = scale * _random_matrix(rng, size, 10.0 ** rng.integers(0, 7)).astype(np.float64)
        expected, error, turns = _padded_root(matrix, p, padded_size, pad_value)
        root, reported = root_fn(matrix, jnp.int32(p))
        np.testing.assert_allclose(root, expected, rtol=1e-6, atol=1e-9 * np.abs(expected).max())
        np.testing.assert_allclose(reported, error, rtol=1e-4, atol=1e-9)
        num_turns.add(turns)
  assert size == padded_size == 1 or len(num_turns) > 3


def test_padding_as_a_scalar_equals_padding_in_float32():
  rng = np.random.default_rng(0)
  for size, padded_size in ((3, 8),):
    for p in (2, 4):
      matrix = 0.01 * _random_matrix(rng, size, 100.0)
      padded = np.eye(padded_size, dtype=np.float32)
      padded[:size, :size] = matrix
      root, _ = _root_fn(padded_size=padded_size)(matrix, jnp.int32(p))
      assert _distance(root, np.asarray(_root_fn()(padded, jnp.int32(p))[0])[:size, :size]) < 1e-5


# ---- eigendecomposition


@pytest.mark.parametrize('size', _SIZES)
def test_eigh_is_no_worse_than_the_original_on_any_recorded_matrix(size):
  """Where the original is good to the last bit, 3e-7 is good enough."""
  for p, (_, condition, _, _, float32_error, *_), matrix, _ in _recorded(size):
    root, error = _root_fn('eigh')(matrix, jnp.int32(p))
    assert _distance(root, _exact_root(matrix, p)) <= max(float32_error, 3e-7), (p, condition)
    assert error < 2e-5


@pytest.mark.parametrize('num_gradients', (1, 5, 60))
def test_eigh_on_statistics_of_low_rank(num_gradients):
  """A null space of 32 - k dims: the ridge is all that it has, and lies only ten float32 roundings above zero."""
  rng = np.random.default_rng(num_gradients)
  grads = rng.standard_normal((32, num_gradients)) * np.logspace(0, -2, 32)[:, None]
  matrix = (grads @ grads.T).astype(np.float32)
  for p in (1, 2, 4):
    root, error = _root_fn('eigh')(matrix, jnp.int32(p))
    assert error < 1e-2
    assert _distance(root, _exact_root(matrix, p)) < (1e-3 if p == 1 else 1e-4)


def test_eigh_takes_the_ridge_of_the_padded_matrix():
  rng = np.random.default_rng(0)
  for scale in (1e-3, 3.0):
    matrix = scale * _random_matrix(rng, 8, 1e4)
    root, _ = _root_fn('eigh', padded_size=9)(matrix, jnp.int32(4))
    assert _distance(root, _exact_root(matrix, 4, largest=1.0)) < 1e-5


@pytest.mark.parametrize('method', ['coupled_newton', 'auto', pytest.param('eigh', marks=pytest.mark.full)])
def test_odd_matrices(method):
  root_fn = _root_fn(method)
  for size in (1, 5):
    for p in (1, 4):
      root, error = root_fn(np.zeros((size, size), np.float32), jnp.int32(p))
      np.testing.assert_allclose(root, 1e12 ** (1 / p) * np.eye(size), rtol=1e-5)
      assert error < 1e-5
      for bad in (np.nan, np.inf):
        matrix = np.eye(size, dtype=np.float32)
        matrix[0, 0] = bad
        assert np.isnan(root_fn(matrix, jnp.int32(p))[1])
  negative = np.diag(np.array([1, 0.5, 0.1, -1e-8, -3e-8], np.float32))  # as rounding leaves a null space
  root, error = root_fn(negative, jnp.int32(2))
  np.testing.assert_allclose(np.diagonal(root), np.diagonal(_exact_root(negative, 2)), rtol=0.03)
  assert error < 1e-5


def test_auto_is_eigh_on_cpu():
  matrix = _random_matrix(np.random.default_rng(0), 5, 1e5)
  np.testing.assert_array_equal(_root_fn('auto')(matrix, jnp.int32(4))[0], _root_fn('eigh')(matrix, jnp.int32(4))[0])


def test_refusals():
  with pytest.raises(ConfigError, match="root_method is 'eig', expected one of .*eigh"):
    roots.RootOptions(method='eig')
  with pytest.raises(ConfigError, match='padded_size is 2, expected at least the size of the matrix, 3'):
    roots.inverse_pth_root(jnp.eye(3), 2, roots.RootOptions(padded_size=2))


# ---- the plan

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
    results.append([_root_fn(method)(m, jnp.int32(p)) for m, p in zip(flat, np.broadcast_to(exponents, len(flat)))])
  return results


_num_traces = collections.Counter()


@functools.cache
def _jitted(**options):
  """`compute_roots` compiled; `_num_traces` counts how often, by options."""
  def fn(statistics, previous, count):
    _num_traces[tuple(options.items())] += 1
    return root_plan.compute_roots(statistics, _EXPONENTS, previous, count, **options)

  return jax.jit(fn, compiler_options=_FAST_COMPILE)


def _flat(arrays):
  """Every matrix, or every error, on its own."""
  return [np.asarray(row) for array, shape in zip(arrays, _SHAPES) for row in np.reshape(array, (-1, *(
      shape[-2:] if np.ndim(array) == len(shape) else ())))]


def _assert_all_computed(roots_, errors, expected):
  for shape, root, error in zip(_SHAPES, roots_, errors, strict=True):
    assert root.shape == shape and error.shape == shape[:-2] and error.dtype == root.dtype == jnp.float32
  expected = [pair for entry in expected for pair in entry]
  for root, error, (one_root, one_error) in zip(_flat(roots_), _flat(errors), expected, strict=True):
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


@pytest.mark.parametrize('axis_name', [None, 'data'])
def test_each_root_is_computed_by_one_device(axis_name):
  """By the sizes of the decompositions in the compiled program: over the mesh in context, and over a mapped axis."""
  statistics = [np.broadcast_to(np.eye(6, dtype=np.float32), (40, 6, 6))]

  def decomposed(num_devices):
    mesh = jax.make_mesh((num_devices,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])
    options = roots.RootOptions(method='eigh')
    fn = lambda matrices: root_plan.compute_roots(
        matrices, [4], matrices, 0, options=options, axis_name=axis_name)[0]
    if axis_name is not None:
      fn = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.set_mesh(mesh):
      text = jax.jit(fn).lower(statistics).compile().as_text()
    return [re.search(r'f32\[(\d+),(\d+),\d+\]', line).groups()
            for line in text.splitlines() if 'custom-call' in line and 'syevd' in line]

  for num_devices in (1, 8):
    # All of a matrix, then the half of its smallest eigenvalues.
    assert decomposed(num_devices) == [(str(40 // num_devices), size) for size in ('6', '3')]


@pytest.mark.parametrize('every,num_devices', [(7, 1)] + [
    pytest.param(every, num_devices, marks=pytest.mark.full)
    for every, num_devices in ((3, 8), (2, 1), (4, 1), (30, 1), (2, 8), (30, 8))])
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
    for spread, at_once in zip(_flat(results), _flat(_jitted()(constant, _identities(), 0)[0]), strict=True):
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
  for matrix, (root, _) in zip(_flat(results), [pair for entry in _one_by_one(statistics) for pair in entry]):
    np.testing.assert_allclose(matrix, root, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('options', [
    pytest.param({'axis_name': 'batch'}, marks=pytest.mark.full), {'axis_name': 'batch', 'spread_over': 2}])
def test_roots_are_dealt_out_over_a_mapped_axis(options):
  statistics = _random_statistics(0)
  mesh = jax.make_mesh((4,), ('batch',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

  def fn(statistics, previous, count):
    return root_plan.compute_roots(statistics, _EXPONENTS, previous, count, **options)

  mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False),
                   compiler_options=_FAST_COMPILE)
  _assert_all_computed(*mapped(statistics, _identities(), 0), _one_by_one(statistics))
  # Outside of an axis of that name, the mesh in context or one device does.
  alone = jax.jit(fn, compiler_options=_FAST_COMPILE)
  _assert_all_computed(*alone(statistics, _identities(), 0), _one_by_one(statistics))


@pytest.mark.parametrize('method,spread', [
    ('coupled_newton', False), pytest.param('eigh', True, marks=pytest.mark.full)])
def test_a_failed_root_keeps_the_old_one(method, spread):
  statistics, previous = _random_statistics(2), [3 * matrix for matrix in _identities()]
  statistics[0][2, 1, 0] = np.nan
  statistics[3][0, 0] = np.inf
  options = {'spread_over': 4} if spread else {}
  results, errors = _jitted(options=roots.RootOptions(method=method), **options)(statistics, previous, 0)
  np.testing.assert_array_equal(results[0][2], previous[0][2])
  np.testing.assert_array_equal(results[3], previous[3])
  assert np.isnan(errors[0][2]) and np.isnan(errors[3])
  expected = [pair for entry in _one_by_one(statistics, method) for pair in entry]
  bad = {2, 12}
  for i, (result, error, (root, one_error)) in enumerate(zip(_flat(results), _flat(errors), expected, strict=True)):
    if i not in bad:
      np.testing.assert_allclose(result, root, rtol=1e-5, atol=1e-5)
      np.testing.assert_allclose(error, one_error, atol=2e-6)


def test_an_error_at_the_threshold_is_a_failure():
  """The recorded matrix on which the iteration gives up at once, with an error of 0.79."""
  matrix = _load('invroot_matrices')['A/2_4']
  error = _load('invroot_out_p2')['table'][2, 2]
  for threshold, is_kept in ((0.1, True), (float(np.float32(error)), True), (0.9, False)):
    (root,), (reported,) = jax.jit(functools.partial(root_plan.compute_roots, failure_threshold=threshold))(
        [matrix], [jnp.int32([2])], [np.eye(2, dtype=np.float32)], 0)
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
  monkeypatch.setattr(root_plan, '_piece_bytes', lambda: 2 * 4 * 16)
  statistics = _random_statistics(4)
  compute = jax.jit(lambda statistics, previous: root_plan.compute_roots(statistics, _EXPONENTS, previous, 0))
  with jax.set_mesh(jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])):
    _assert_all_computed(*compute(statistics, _identities()), _one_by_one(statistics))
