"""Small functions of T5X: their results, and those of its private names through the views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite.compat import functions
from t5x_lite.compat import views


def test_slices_of_one_array():
  operand = jnp.arange(24).reshape(2, 4, 3)
  found = functions.slice_vectors(operand, jnp.asarray([0, 2, 9]), 2, 1)
  # The last start is outside, and gives the last slice.
  expected = np.stack([operand[:, start : start + 2] for start in (0, 2, 2)])
  np.testing.assert_array_equal(found, expected)


def test_slices_are_replaced_in_each_array_of_a_batch():
  operand = jnp.zeros([2, 3, 4], jnp.int32)
  update = jnp.asarray([[[1], [2], [3]], [[4], [5], [6]]])
  found = functions.update_vector_slices(operand, update, jnp.asarray([1, 3]), 1)
  expected = np.zeros([2, 3, 4], np.int32)
  expected[0, :, 1] = 1, 2, 3
  expected[1, :, 3] = 4, 5, 6
  np.testing.assert_array_equal(found, expected)


def test_values_are_traced_in_compiled_functions_only():
  seen = []
  jax.jit(lambda x: seen.append(functions.is_traced(x)))(1.0)
  assert seen == [True] and not functions.is_traced(jnp.ones([])) and not functions.is_traced(1)


def test_axes_and_tuples():
  assert functions.normalize_axes([-1, 0, -3], 3) == (2, 0, 0)
  assert functions.as_tuple(range(2)) == (0, 1) and functions.as_tuple(5) == (5,)


def test_no_array_is_lazy():
  assert not isinstance(np.ones(2), functions.LazyArray)
  with pytest.raises(errors.ConfigError, match='read_array'):
    functions.LazyArray([2], np.float32, lambda: None)


@pytest.mark.parametrize(
  'module, name, arguments, expected',
  [
    ('decoding', '_is_tracer', (1,), False),
    ('examples.t5.layers', '_normalize_axes', ((-1,), 2), (1,)),
    ('examples.scalable_t5.layers', '_canonicalize_tuple', (3,), (3,)),
    ('examples.decoder_only.layers', '_convert_to_activation_function', ('linear',), None),
    ('utils', 'get_local_data', (4,), 4),
  ],
)
def test_names_of_t5x_are_these_functions(module, name, arguments, expected):
  result = getattr(views.module(f't5x.{module}'), name)(*arguments)
  if expected is None:
    result = result(expected)
  assert result == expected
