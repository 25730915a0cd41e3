"""Validator of options, with one wording for every option of the package.

"`Owner.option` must be EXPECTATION, got VALUE. REMEDY." An option is checked only if an invalid value would waste
compute, lose data or silently give wrong results; for other values Python, JAX and optax raise.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import contextvars
import copy
import functools
import inspect
import logging
import math
import numbers
import types
from typing import Any, ClassVar, NamedTuple, Self
import warnings

from t5x_lite.errors import ConfigError, InvalidOptions, T5xLiteError, did_you_mean

_MAX_SHOWN = 200  # characters of a value
# Sentences that `log_for_t5x` has logged; None outside of `written_for_t5x`.
_logged_for_t5x: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
  'logged_for_t5x', default=None
)


class Expectation(NamedTuple):
  """Condition on the value of an option.

  Attributes:
    text: completes the sentence "the option must be ...".
    holds: returns True for a valid value.
    remedy: sentence that ends the error message, or a function from the invalid value to this sentence.
  """

  text: str
  holds: Callable[[Any], bool]
  remedy: str | Callable[[Any], str] = ''

  def or_none(self) -> 'Expectation':
    """Return the same expectation of an option that may also be None."""

    def holds(value: Any) -> bool:
      return value is None or self.holds(value)

    return Expectation(f'{self.text} or None', holds, self.remedy)


def number(
  *,
  at_least: float | None = None,
  above: float | None = None,
  at_most: float | None = None,
  below: float | None = None,
  integer: bool = False,
  finite: bool = True,
  remedy: str = '',
) -> Expectation:
  """Expect a number in an interval. Booleans and NaN are invalid.

  Args:
    at_least: lower bound, included.
    above: lower bound, excluded.
    at_most: upper bound, included.
    below: upper bound, excluded.
    integer: accept only integer types.
    finite: reject infinities.
    remedy: see `Expectation`.

  >>> number(above=0, at_most=1).text
  'a number in (0, 1]'
  >>> number(at_least=1, integer=True).text
  'an integer >= 1'
  """
  kind: Any = numbers.Real
  noun = 'a number'
  if integer:
    kind = numbers.Integral
    noun = 'an integer'
  includes_low = at_least is not None
  includes_high = at_most is not None
  low = at_least if includes_low else above
  high = at_most if includes_high else below

  def holds(value: Any) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool) or value != value:
      return False
    if low is not None and not (value > low or (includes_low and value == low)):
      return False
    if high is not None and not (value < high or (includes_high and value == high)):
      return False
    return not finite or integer or math.isfinite(value)

  return Expectation(f'{noun}{_interval(low, high, includes_low, includes_high)}', holds, remedy)


def _interval(
  low: float | None, high: float | None, includes_low: bool, includes_high: bool
) -> str:
  """Return an interval as text, e.g. ' in (0, 1]' or ' >= 1'; empty without bounds."""
  if low is not None and high is not None:
    left = '[' if includes_low else '('
    right = ']' if includes_high else ')'
    return f' in {left}{low}, {high}{right}'
  if low is not None:
    above = '>=' if includes_low else '>'
    return f' {above} {low}'
  if high is not None:
    below = '<=' if includes_high else '<'
    return f' {below} {high}'
  return ''


def one_of(
  choices: Collection[Any],
  remedy: str = '',
  synonyms: Mapping[str, str] = types.MappingProxyType({}),
) -> Expectation:
  """Expect one of several values, usually names; the error message adds the most similar one.

  >>> one_of(['sum', 'mean']).text
  "one of 'sum', 'mean'"
  """

  def hint(value: Any) -> str:
    if not isinstance(value, str):
      return remedy.strip()
    names = [each for each in choices if isinstance(each, str)]
    if value.lower() in synonyms:
      return f'Did you mean {synonyms[value.lower()]!r}?'
    suggestion = did_you_mean(value, names, lists_all=False)
    return f'{suggestion} {remedy}'.strip()

  def holds(value: Any) -> bool:
    # Not `value in choices`: values such as arrays have no truth value, and lists have no hash.
    return any(type(value) is type(each) and value == each for each in choices)

  return Expectation(f'one of {", ".join(map(repr, choices))}', holds, hint)


def instance(types: type | tuple[type, ...], text: str, remedy: str = '') -> Expectation:
  """Expect an instance of a class; `text` names it, e.g. 'a string' or 'an optax transformation'."""
  return Expectation(text, lambda value: isinstance(value, types), remedy)


def check(
  owner: str,
  values: Mapping[str, Any],
  error: type[T5xLiteError] = ConfigError,
  /,
  **expectations: Expectation,
) -> None:
  """Raise for the first option whose value is not as expected.

  Args:
    owner: class or function that has the options, as users write it; empty for options of a command line.
    values: value of each option, by name; `vars(self)` of a dataclass, `locals()` at the start of a function.
    error: class of the error.
    **expectations: expectation for each option.

  Raises:
    ConfigError: or `error`, with owner, option, expectation, value and remedy.

  >>> check('Adafactor', {'decay_rate': 1.5}, decay_rate=number(above=0, at_most=1, remedy="0.8 is T5's default."))
  Traceback (most recent call last):
    ...
  t5x_lite.errors.ConfigError: `Adafactor.decay_rate` must be a number in (0, 1], got 1.5. 0.8 is T5's default.
  """
  for option, expectation in expectations.items():
    value = values[option]
    try:
      is_valid = expectation.holds(value)
    except (AttributeError, TypeError, ValueError):  # e.g. a number where a list is expected
      is_valid = False
    if not is_valid:
      remedy = expectation.remedy
      if callable(remedy):
        remedy = remedy(value)
      raise invalid(owner, option, expectation.text, value, remedy, error)


def invalid(
  owner: str,
  option: str,
  expectation: str,
  value: Any,
  remedy: str = '',
  error: type[T5xLiteError] = ConfigError,
) -> T5xLiteError:
  """Return an error in the wording of `check`, for a condition on several options.

  Args:
    owner: see `check`.
    option: name of the option.
    expectation: completes the sentence "the option must be ...".
    value: the invalid value.
    remedy: what to do instead, a sentence; may be empty.
    error: class of the error.
  """
  problem = f'`{_full_name(owner, option)}` must be {expectation}, got {_shown(value)}'
  return about(owner, {option: value}, problem, remedy, error)


def about(
  owner: str,
  values: Mapping[str, Any],
  problem: str,
  remedy: str,
  error: type[T5xLiteError] = ConfigError,
) -> T5xLiteError:
  """Return an error about options in another wording; commands add where files bind them.

  Args:
    owner: see `check`.
    values: value of each option, by name.
    problem: what is wrong, a sentence without the period.
    remedy: see `invalid`.
    error: class of the error.
  """
  message = f'{problem}.'
  if remedy:
    message += f' {remedy}'
  made = error(message)
  shown = {name: _shown(value) for name, value in values.items()}
  made.options = InvalidOptions(owner, shown, len(problem))
  return made


class MutableConfig:
  """Base of the configuration dataclasses of T5X: users derive dataclasses from them, and assign values at any time.

  So the values are checked where they are used: a run checks them when it is built, and functions when they are called.
  Instances are hashed by identity, also those of dataclasses that compare their fields.
  """

  __dataclass_fields__: ClassVar[dict[str, Any]]

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    if '__hash__' not in vars(cls):  # `dataclass` removes an inherited one.
      cls.__hash__ = object.__hash__

  def __post_init__(self) -> None:
    # An invalid value may be replaced before it is used, for example by the `__post_init__` of a subclass.
    with contextlib.suppress(AttributeError, TypeError, ValueError):
      self.check()

  def check(self) -> None:
    """Raise ConfigError for invalid values, and bring valid ones into the form in which they are read."""

  def validated(self, argument: str = '') -> Self:
    """Return the configuration after `check`.

    Args:
      argument: argument of the command's function whose value this is, for the error.

    Raises:
      ConfigError: a value is invalid.
    """
    try:
      self.check()
    except T5xLiteError as error:
      options = getattr(error, 'options', None)
      if options is not None and argument:
        options.argument = argument
      raise
    return self

  def changed(self, **changes: Any) -> Self:
    """Return a validated copy with other values, made without the constructor, which a subclass may have changed."""
    made = copy.copy(self)
    for name, value in changes.items():
      setattr(made, name, value)
    return made.validated()

  def _values(self) -> dict[str, Any]:
    """Return the values by name, also those that the constructor of a subclass does not set."""
    import dataclasses  # slow, and not needed by all commands

    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _full_name(owner: str, option: str) -> str:
  if owner:
    return f'{owner}.{option}'
  return option


def _shown(value: Any) -> str:
  shown = repr(value)
  if len(shown) > _MAX_SHOWN:
    return f'{shown[:_MAX_SHOWN]}...'
  return shown


def call_custom(
  owner: str, option: str, parameters: str, function: Any, *args: Any, **kwargs: Any
) -> Any:
  """Call a user's function; raise if it does not take these arguments.

  The signature alone does not tell: gin supplies arguments that a call leaves out.

  Args:
    owner: see `check`.
    option: name of the option that holds the function.
    parameters: the arguments, for the error message, such as 'logits, batch'.
    function: function to call.
    *args: positional arguments.
    **kwargs: keyword arguments.

  Returns:
    The result of the function.

  Raises:
    ConfigError: the function is not callable, or does not take the arguments. Errors inside the function pass.

  >>> call_custom('Model', 'metric_fn', 'logits, batch', lambda logits, batch: logits + batch, 1, 2)
  3
  """
  expectation = f'a function of ({parameters})'
  if not callable(function):
    raise invalid(owner, option, expectation, function, 'In gin, write @name without parentheses.')
  try:
    return function(*args, **kwargs)
  except TypeError as error:
    frame = error.__traceback__
    code = _code(function)
    while frame is not None and frame.tb_frame.f_code is not code:
      frame = frame.tb_next
    if code is None or frame is not None:  # raised inside the function
      raise
    reason = str(error).partition('\n')[0].rstrip('.')
    raise ConfigError(
      f'`{_full_name(owner, option)}` must be {expectation}, got {_describe(function)}: {reason}. '
      'Change its parameters, or bind them.'
    ) from error


def _code(function: Any) -> Any:
  """Return the code that a call of `function` runs, without partials and wrappers; None if it is not Python code."""
  while isinstance(function, functools.partial):
    function = function.func
  function = inspect.unwrap(function)
  if isinstance(function, type):
    function = function.__init__
  elif not hasattr(function, '__code__'):
    function = type(function).__call__
  return getattr(function, '__code__', None)


def _describe(function: Any) -> str:
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, '__qualname__', repr(function))


class _Required:
  """Default of an argument that is required although it follows an optional one."""

  def __repr__(self) -> str:
    return 'REQUIRED'


REQUIRED = _Required()


def bind_arguments(
  owner: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> inspect.BoundArguments:
  """Return the arguments of a factory or class, bound to its parameters.

  Args:
    owner: name of the factory or class, for the error message.
    signature: its signature; a parameter with the default `REQUIRED` has no default.
    args: positional arguments.
    kwargs: keyword arguments.

  Raises:
    ConfigError: an unknown argument, with the most similar name, or a missing one.
  """
  try:
    bound = signature.bind(*args, **kwargs)
    for key, parameter in signature.parameters.items():
      if parameter.default is REQUIRED and key not in bound.arguments:
        raise TypeError(f'missing a required argument: {key!r}')
  except TypeError as error:
    unknown = [key for key in kwargs if key not in signature.parameters]
    names = [name for name in signature.parameters if name != 'self']
    if unknown:
      hint = did_you_mean(unknown[0], names)
    else:
      hint = f' Its arguments are {", ".join(names)}.'
    raise ConfigError(f'{owner}: {error}.{hint}') from error
  return bound


def checks_arguments(owner: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Return a decorator that checks the arguments of a function, or of `__init__`, by `bind_arguments`.

  Args:
    owner: name of the function or class, for the error message.

  >>> @checks_arguments('mine')
  ... def mine(rate: float = 0.1):
  ...   return rate
  >>> mine(rat=0.2)
  Traceback (most recent call last):
    ...
  t5x_lite.errors.ConfigError: mine: got an unexpected keyword argument 'rat'. Did you mean 'rate'?
  """

  def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def checked(*args, **kwargs):
      bind_arguments(owner, signature, args, kwargs)
      return function(*args, **kwargs)

    wrapper: Any = functools.wraps(function)(checked)
    # gin reads this attribute, and not that of the wrapped function.
    wrapper.__signature__ = signature
    return wrapper

  return decorate


@contextlib.contextmanager
def written_for_t5x(logged: set[str] | None) -> Iterator[None]:
  """Context in which the configuration was written for T5X, see `is_written_for_t5x`.

  Args:
    logged: sentences that are not logged again; those that are logged are added. None if it was not written for T5X.
  """
  token = _logged_for_t5x.set(logged)
  try:
    yield
  finally:
    _logged_for_t5x.reset(token)


def is_written_for_t5x() -> bool:
  """Return whether the configuration was written for T5X, so that values that T5X accepts are accepted."""
  return _logged_for_t5x.get() is not None


def log_for_t5x(sentence: str) -> bool:
  """Return whether the configuration was written for T5X; if so, log the sentence once.

  Args:
    sentence: the meaning of a value, or a difference from T5X.
  """
  logged = _logged_for_t5x.get()
  if logged is None:
    return False
  if sentence not in logged:
    logged.add(sentence)
    logging.getLogger(__name__).info('%s', sentence)
  return True


def warn_of_float16(option: str) -> None:
  """Warn that the dtype of an option has a small range.

  Args:
    option: owner and name, such as 'T5Config.dtype'.
  """
  warnings.warn(
    f"`{option}`='float16' has no values above 65,504, which activations of T5 reach, and there is no loss scaling: "
    "losses may become NaN, and small gradients 0. Set 'bfloat16', which has the range of float32.",
    stacklevel=2,
  )
