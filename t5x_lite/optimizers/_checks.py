"""Checks of the options of an optimizer: what is refused when a definition is built, in the same words for all."""

import numbers
from typing import Any

from t5x_lite.errors import ConfigError


def check_number(
    owner: str, name: str, value: Any, *, at_least: float | None = None, above: float | None = None,
    at_most: float | None = None, below: float | None = None, integer: bool = False, optional: bool = False) -> None:
  """Refuses an option that is no number or out of its range.

  Args:
    owner: the optimizer, for the error message.
    name: name of the option.
    value: what was given. NaN is in no range.
    at_least: smallest value allowed.
    above: the value must be larger than this.
    at_most: largest value allowed.
    below: the value must be smaller than this.
    integer: whether only whole numbers of an integer type are allowed.
    optional: whether None is allowed.

  Raises:
    ConfigError: the value is refused.

  >>> check_number('my_optimizer', 'beta1', 0.9, at_least=0, below=1)
  """
  if value is None and optional:
    return
  bounds = [(sign, bound) for sign, bound in (('>=', at_least), ('>', above), ('<=', at_most), ('<', below))
            if bound is not None]
  number_type = numbers.Integral if integer else numbers.Real
  is_number = isinstance(value, number_type) and not isinstance(value, bool)
  if is_number and value == value and all(_HOLDS[sign](value, bound) for sign, bound in bounds):
    return
  words = ['expected an integer' if integer else 'expected a number']
  words += [' and '.join(f'{sign} {bound}' for sign, bound in bounds)] if bounds else []
  words += ['or None'] if optional else []
  raise ConfigError(f'{owner}: {name} is {value!r}; {" ".join(words)}.')


_HOLDS = {
    '>=': lambda value, bound: value >= bound,
    '>': lambda value, bound: value > bound,
    '<=': lambda value, bound: value <= bound,
    '<': lambda value, bound: value < bound,
}
