"""Numbers among the options of optimizers: expectations, and learning rates."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.schedules import check_learning_rate_fn


def scalar(**bounds: Any) -> checks.Expectation:
  """Expect a number or a scalar array; see `checks.number` for the bounds.

  Args:
    **bounds: arguments of `checks.number`. Arrays on a device are not compared with them: reading one would wait for
      the device.
  """
  expected = checks.number(**bounds)

  def holds(value: Any) -> bool:
    if isinstance(value, jax.Array):
      is_floating = jnp.issubdtype(value.dtype, jnp.floating)
      is_number = is_floating or jnp.issubdtype(value.dtype, jnp.integer)
      return value.ndim == 0 and is_number
    if isinstance(value, np.ndarray) and value.ndim == 0:
      value = value.item()
    return expected.holds(value)

  return expected._replace(holds=holds)


def _is_floating_dtype(value: Any) -> bool:
  try:
    return jnp.issubdtype(jnp.dtype(value), jnp.floating)
  except TypeError:
    return False


FLOATING_DTYPE = checks.Expectation("a floating-point dtype such as 'bfloat16'", _is_floating_dtype)
_LEARNING_RATE = scalar(at_least=0).or_none()._replace(text='a number >= 0 or a schedule')


def check_learning_rate(learning_rate: Any, owner: str, option: str = 'learning_rate') -> None:
  """Raise if a value is not a learning rate.

  Args:
    learning_rate: None, a number, a scalar array, a tracer, or a schedule (a function of the step).
    owner: optimizer that takes the learning rate, for the error message.
    option: name of its option.

  Raises:
    ConfigError: a negative or non-finite number, an invalid schedule, or a value of another type.
  """
  if callable(learning_rate):
    check_learning_rate_fn(learning_rate, f'{owner}.{option}')
  else:
    checks.check(owner, {option: learning_rate}, **{option: _LEARNING_RATE})


def learning_rates_at(rates: Mapping[str, Any], step: jax.Array) -> dict[str, jax.Array]:
  """Return the values of learning rates at a step.

  Args:
    rates: numbers or schedules by name.
    step: int32 scalar.

  Returns:
    Float32 scalars by the same names.
  """
  return {name: jnp.asarray(value_at(rate, step), jnp.float32) for name, rate in rates.items()}


def value_at(rate: Any, step: jax.Array) -> Any:
  """Return the value of a schedule at a step; a number itself."""
  if callable(rate):
    schedule: Callable[[jax.Array], Any] = rate
    return schedule(step)
  return rate
