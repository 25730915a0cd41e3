"""Functions whose arguments are the fields of a dataclass, the only definition of their options."""

from collections.abc import Callable
import functools
import inspect
import re
from typing import Any, ParamSpec, TypeVar

_Options = ParamSpec('_Options')
_Config = TypeVar('_Config')
_Result = TypeVar('_Result')

# Section of the docstring of a dataclass, without indentation.
_ATTRIBUTES = re.compile(r'^Attributes:\n((?:  .*\n)+)', re.MULTILINE)


def takes_options(
  config_cls: Callable[_Options, _Config],
) -> Callable[[Callable[[_Config], _Result]], Callable[_Options, _Result]]:
  """Return a decorator by which a function of a configuration takes the fields of the configuration by keyword.

  gin, `help`, type checkers and the documentation see the fields as arguments, those without a default first. The
  descriptions of the fields become the section `Args` of the docstring, before `Returns`.

  Args:
    config_cls: dataclass whose fields are keyword-only; its bases are dataclasses too.

  >>> import dataclasses
  >>> @dataclasses.dataclass(kw_only=True)
  ... class Greeting:
  ...   name: str = 'world'
  >>> @takes_options(Greeting)
  ... def greet(cfg: Greeting) -> str:
  ...   return f'Hello {cfg.name}'
  >>> inspect.signature(greet), greet(name='you')
  (<Signature (*, name: str = 'world') -> str>, 'Hello you')
  """
  fields = inspect.signature(config_cls).parameters.values()
  parameters = sorted(fields, key=lambda field: field.default is not field.empty)

  def decorate(function: Callable[[_Config], _Result]) -> Callable[_Options, _Result]:
    def call(*args: _Options.args, **options: _Options.kwargs) -> _Result:
      return function(config_cls(*args, **options))

    signature = inspect.signature(function).replace(parameters=parameters)
    made: Any = functools.update_wrapper(call, function)
    made.__signature__ = signature
    made.__annotations__ = {field.name: field.annotation for field in parameters}
    made.__annotations__['return'] = signature.return_annotation
    made.__doc__ = _with_arguments(inspect.getdoc(function) or '', config_cls)
    del made.__wrapped__  # gin would read the arguments of `function`
    return made

  return decorate


def _with_arguments(doc: str, config_cls: Any) -> str:
  """Return a docstring with the descriptions of the fields of a dataclass, those of its bases first."""
  descriptions = ''
  for each in reversed(config_cls.__mro__):
    section = _ATTRIBUTES.search(f'{inspect.cleandoc(each.__doc__ or "")}\n')
    if section is not None:
      descriptions += section[1]
  return doc.replace('\nReturns:\n', f'\nArgs:\n{descriptions}\nReturns:\n', 1)
