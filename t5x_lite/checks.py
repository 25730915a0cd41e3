"""Checks of options: what is refused when an object is built, in the same words for all."""

from collections.abc import Callable
import functools
import inspect
import numbers
from typing import Any

from t5x_lite.errors import ConfigError, did_you_mean


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


class _Required:
  """Default of an argument that must be given although it follows one that need not be."""

  def __repr__(self) -> str:
    return 'REQUIRED'


REQUIRED = _Required()


def bind_arguments(
    owner: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
  """Binds the arguments of a factory or class.

  Args:
    owner: what takes them, for the error message.
    signature: what it takes; a default of `REQUIRED` is none.
    args: the positional ones.
    kwargs: the others.

  Raises:
    ConfigError: an argument that is not taken, with the name that may be meant, or one that is missing.
  """
  try:
    bound = signature.bind(*args, **kwargs)
    for key, parameter in signature.parameters.items():
      if parameter.default is REQUIRED and key not in bound.arguments:
        raise TypeError(f'missing a required argument: {key!r}')
  except TypeError as error:
    unknown = [key for key in kwargs if key not in signature.parameters]
    names = [name for name in signature.parameters if name != 'self']
    hint = did_you_mean(unknown[0], names) if unknown else f' Its arguments are {", ".join(names)}.'
    raise ConfigError(f'{owner}: {error}.{hint}') from error
  return bound


def checks_arguments(owner: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Returns a decorator of functions, and of `__init__`, that has them refuse arguments as `bind_arguments` does.

  Args:
    owner: what takes the arguments, for the error message.

  >>> @checks_arguments('Optimizer mine')
  ... def mine(rate: float = 0.1):
  ...   return rate
  >>> mine(rat=0.2)
  Traceback (most recent call last):
    ...
  t5x_lite.errors.ConfigError: Optimizer mine: got an unexpected keyword argument 'rat'. Did you mean 'rate'?
  """

  def decorate(function):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args, **kwargs):
      bind_arguments(owner, signature, args, kwargs)
      return function(*args, **kwargs)

    # For what looks at a function without following its wrappers, as gin does.
    checked.__signature__ = signature
    return checked

  return decorate
