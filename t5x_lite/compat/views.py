"""T5X's modules as views: modules whose attributes are our objects, by the table `names`.

Nothing is imported before an attribute is asked for.
"""

from collections.abc import Sequence
import functools
import importlib
import importlib.machinery
import logging
import sys
import types
from typing import Any

from t5x_lite.compat import forks
from t5x_lite.compat import names
from t5x_lite.errors import ConfigError, did_you_mean

# Remedy for names in files that are not run.
_MOVE = 'Move what you need to a module with another name.'


class View(types.ModuleType):
  """Module of T5X, or `__main__` of its programs."""

  def __init__(self, name: str):
    super().__init__(name, f'View of t5x_lite under the name of {name}; see docs/from_t5x.md.')
    is_package = bool(names.submodules(name))
    if is_package:
      self.__path__ = []  # Python imports submodules of packages only.
    self.__file__ = names.__file__  # Python names it where a name cannot be imported.
    self.__spec__ = importlib.machinery.ModuleSpec(
      name, None, is_package=is_package
    )  # `find_spec` requires it.

  def __getattr__(self, name: str) -> Any:
    if name == '__all__':
      return [
        each
        for each in dir(self)
        if each in names.submodules(self.__name__) or find(self.__name__, each)
      ]
    if name.startswith('_') and not names.lists(self.__name__, name):
      # Python asks all modules for such names; the search would import all modules of ours.
      raise AttributeError(
        f'{self.__name__} of t5x_lite has no {name!r}: docs/from_t5x.md lists the private names of T5X that it has. '
        'Use a public name, or define the function in a module of your own.'
      )
    _log_use()
    if name in names.submodules(self.__name__):
      return module(f'{self.__name__}.{name}')
    place = find(self.__name__, name)
    if place is None:
      raise AttributeError(why_no_name(self.__name__, name))
    return _get(place)

  def __dir__(self) -> list[str]:
    return sorted({*names.submodules(self.__name__), *_known(self.__name__)})


@functools.cache
def module(name: str) -> View:
  """Return the view of one of T5X's modules or packages, e.g. 't5x.utils'.

  Raises:
    ConfigError: T5X has no such module, or it has no equivalent here; the message names the alternative.
  """
  problem = names.why_no_module(name)
  if problem:
    raise ConfigError(problem)
  if name in names.MODULE_ALIASES:
    return module(names.MODULE_ALIASES[name])
  return View(name)


def find(module_name: str, name: str) -> names.Place | None:
  """Return the place of a name of one of T5X's modules; None if it is not here."""
  for place in names.places(module_name, name):
    if hasattr(importlib.import_module(place.module), place.name):
      return place
  return None


def resolve(view: View, attributes: Sequence[str]) -> tuple[names.Place | None, str]:
  """Return the place of the object that a selector of a gin file names.

  Args:
    view: the imported module.
    attributes: parts of the selector after it, such as ['utils', 'DatasetConfig'].

  Returns:
    Place, with dots in its name for attributes of classes; and why there is none, as a sentence.
  """
  for position, attribute in enumerate(attributes):
    if attribute in names.submodules(view.__name__):
      view = module(f'{view.__name__}.{attribute}')
      continue
    if f'{view.__name__}.{attribute}' in sys.modules:
      return _resolve_in_fork(view.__name__, attributes[position:])
    place = find(view.__name__, attribute)
    if place is None:
      return None, why_no_name(view.__name__, attribute)
    value = _get(place)
    path = place.name
    for inner in attributes[position + 1 :]:
      if not hasattr(value, inner):
        return (
          None,
          f'{view.__name__}.{path} has no {inner!r}.{did_you_mean(inner, _public(value), lists_all=False)}',
        )
      value = getattr(value, inner)
      path = f'{path}.{inner}'
    return names.Place(place.module, path), ''
  return None, f'{view.__name__} is a module. Name a function or class in it.'


def _resolve_in_fork(module_name: str, attributes: Sequence[str]) -> tuple[names.Place | None, str]:
  """Return the place of an object of an imported module of a fork; see `resolve`."""
  while attributes and f'{module_name}.{attributes[0]}' in sys.modules:
    module_name = f'{module_name}.{attributes[0]}'
    attributes = attributes[1:]
  value: Any = sys.modules[module_name]
  for attribute in attributes:
    if not hasattr(value, attribute):
      near = did_you_mean(attribute, _public(value), lists_all=False)
      return None, f'{module_name} has no {attribute!r}.{near}'
    value = getattr(value, attribute)
  if not attributes:
    return None, f'{module_name} is a module. Name a function or class in it.'
  return names.Place(module_name, '.'.join(attributes)), ''


def why_no_name(module_name: str, name: str) -> str:
  """Return why one of T5X's modules or packages has no such name here, as a sentence with the alternative."""
  if not names.rows(module_name):
    return names.why_no_module(f'{module_name}.{name}')
  sentence = names.sentence(module_name, name)
  if sentence:
    return f'{module_name}.{name} has no equivalent in t5x_lite. {sentence}'
  for path, defined in forks.definitions(module_name).items():
    if name in defined:
      return f'{module_name} has no {name!r}. {path} defines it, and is not run. {_MOVE}'
  return f'{module_name} has no {name!r}.{did_you_mean(name, _known(module_name), lists_all=False)}'


def names_of_forks() -> str:
  """Return a warning about files that are not run and define names that neither T5X nor t5x_lite has; or ''."""
  found = []
  for module_name in forks.modules():
    for path, defined in forks.definitions(module_name).items():
      unknown = [
        name
        for name in defined
        if find(module_name, name) is None and not names.sentence(module_name, name)
      ]
      if unknown:
        found.append(f'{path} ({", ".join(unknown)})')
  if not found:
    return ''
  return (
    "Files of the folder t5x with the names of T5X's are not run: t5x_lite has their functions. These define names "
    f'that it does not have: {", ".join(found)}. {_MOVE}'
  )


@functools.cache
def _log_use() -> None:
  """Log once that Python code uses T5X's names, with its module: T5X may be installed too."""
  frame = sys._getframe()  # pylint: disable=protected-access
  while frame.f_back is not None and _module_of(frame).startswith((__name__, 'importlib.')):
    frame = frame.f_back
  logging.getLogger(__name__).info(
    'Names of T5X in the module %s mean those of t5x_lite. See docs/from_t5x.md.', _module_of(frame)
  )


def _module_of(frame: types.FrameType) -> str:
  return frame.f_globals.get('__name__', '')


def _get(place: names.Place) -> Any:
  return getattr(importlib.import_module(place.module), place.name)


def _known(module_name: str) -> list[str]:
  rows = names.rows(module_name)
  here = [name for row in rows if row.here for name in _public(importlib.import_module(row.here))]
  return [*(name for row in rows for name in row.names), *here]


def _public(owner: Any) -> list[str]:
  return [name for name in dir(owner) if not name.startswith('_')]
