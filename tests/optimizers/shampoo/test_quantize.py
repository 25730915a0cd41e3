"""Quantized values against a NumPy reading of the original's rule: one scale per column, rounding half to even."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite.optimizers.shampoo.quantize import QuantizedValue

_LARGEST = {np.int8: 127, np.int16: 32767}


def _reading(value, dtype, extract_diagonal):
  """Return (integers, diagonal, bucket sizes) in float32 arithmetic."""
  diagonal = np.diagonal(value).copy() if extract_diagonal else None
  if extract_diagonal:
    value = value - np.diag(diagonal)
  bucket = (
    np.abs(value).max(axis=0) / np.float32(_LARGEST[dtype])
    if value.ndim
    else np.abs(value) / np.float32(_LARGEST[dtype])
  )
  return (
    np.round(value / np.where(bucket > 0, bucket, np.float32(1))).astype(dtype),
    diagonal,
    bucket,
  )


@pytest.mark.parametrize('dtype', [np.int8, np.int16])
@pytest.mark.parametrize(
  'shape,extract_diagonal',
  [
    ((), False),
    ((2, 3, 4), False),
    ((6, 6), True),
    *(
      pytest.param(*case, marks=pytest.mark.full)
      for case in (((7,), False), ((5, 4), False), ((6, 6), False), ((1, 1), True))
    ),
  ],
)
def test_integers_and_scales(dtype, shape, extract_diagonal):
  rng = np.random.default_rng(len(shape))
  for scale in (0.0, 1e-20, 3.0):
    value = np.asarray(scale * rng.standard_normal(shape), np.float32)
    if len(shape) > 1:
      value[:, 0] = 0  # a column of zeros has the scale 0
    quantized = QuantizedValue.from_float(value, dtype, extract_diagonal)
    integers, diagonal, bucket = _reading(value, dtype, extract_diagonal)
    assert quantized.quantized.dtype == dtype and quantized.bucket_size.dtype == jnp.float32
    assert np.abs(np.asarray(quantized.quantized, int) - integers).max(initial=0) <= (
      dtype == np.int16
    )
    np.testing.assert_allclose(quantized.bucket_size, bucket, rtol=1e-6)
    if extract_diagonal:
      np.testing.assert_array_equal(quantized.diagonal, diagonal)
    else:
      assert quantized.diagonal is None
    error = np.abs(quantized.to_float() - value)
    assert (error <= 0.5001 * bucket + 1e-6 * np.abs(value)).all()


def test_rounds_half_to_even():
  value = np.array([[127.0, -127.0], [0.5, 1.5], [2.5, -0.5]], np.float32)
  np.testing.assert_array_equal(
    QuantizedValue.from_float(value, np.int8).quantized, [[127, -127], [0, 2], [2, 0]]
  )


def test_float_dtypes_pass_through():
  value = jnp.array([1.0, 1 / 3], jnp.float32)
  same = QuantizedValue.from_float(value, jnp.float32)
  assert same.diagonal is None and same.bucket_size is None
  np.testing.assert_array_equal(same.to_float(), value)
  narrow = QuantizedValue.from_float(value, jnp.bfloat16)
  assert narrow.quantized.dtype == jnp.bfloat16 and narrow.to_float().dtype == jnp.float32
  np.testing.assert_array_equal(narrow.to_float(), value.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
  'shape',
  [
    pytest.param((0,), marks=pytest.mark.full),
    (0, 3),
    *(pytest.param(shape, marks=pytest.mark.full) for shape in ((3, 0), (2, 0, 3))),
  ],
)
def test_no_elements(shape):
  for dtype in (np.int8, np.int16, np.float32):
    value = QuantizedValue.from_float(jnp.zeros(shape), dtype)
    assert value.quantized.shape == value.to_float().shape == shape


def test_is_a_tree_of_its_arrays_alone():
  value = QuantizedValue.from_float(jnp.ones((8, 8)), np.int16, True)
  leaves, structure = jax.tree.flatten(value)
  assert sum(leaf.nbytes for leaf in leaves) == 2 * 64 + 4 * 8 + 4 * 8
  assert structure == jax.tree.structure(
    QuantizedValue.from_float(jnp.zeros((8, 8)), np.int16, True)
  )
  assert structure != jax.tree.structure(
    QuantizedValue.from_float(jnp.zeros((8, 8)), np.int8, True)
  )
  stack = jnp.arange(3 * 16, dtype=jnp.float32).reshape(3, 4, 4)
  quantized = jax.jit(jax.vmap(lambda m: QuantizedValue.from_float(m, np.int16, True)))(stack)
  np.testing.assert_allclose(jax.vmap(lambda v: v.to_float())(quantized), stack, atol=1e-3)


def test_invalid_arrays_are_rejected():
  with pytest.raises(KeyError, match='int32'):
    QuantizedValue.from_float(jnp.ones(3), np.int32)
  with pytest.raises(TypeError, match='incompatible shapes'):
    QuantizedValue.from_float(jnp.ones((3, 2)), np.int8, True)
