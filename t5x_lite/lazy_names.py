"""Lazy imports: the names of a package, and classes that are registered by name.

`t5x_lite --help` imports the package of every command for its flags, and must not import JAX.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import importlib
import itertools
from typing import Any, TypeVar

from t5x_lite import checks

_Class = TypeVar('_Class', bound=type)


def lazy_names(
  package: dict[str, Any], *tables: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
  """Return `__getattr__`, `__dir__` and `__all__` for the `__init__` of a package (PEP 562).

  Args:
    package: `globals()` of the package, which caches imported names.
    *tables: names that the package exports, attributes or submodules, by full module name; `name as other` renames.
  """
  origin = {}
  for module, names in itertools.chain.from_iterable(table.items() for table in tables):
    for name in names:
      attribute, _, alias = name.partition(' as ')
      origin[alias or attribute] = module, attribute

  def get_attribute(name: str) -> Any:
    if name not in origin:
      raise AttributeError(f'module {package["__name__"]!r} has no attribute {name!r}')
    module, attribute = origin[name]
    if module == package['__name__']:
      return importlib.import_module(f'{module}.{attribute}')
    try:
      value = getattr(importlib.import_module(module), attribute)
    except AttributeError:  # A submodule that is not imported yet.
      value = importlib.import_module(f'{module}.{attribute}')
    package[name] = value
    return value

  return get_attribute, lambda: sorted({*package, *origin}), list(origin)


class LazyClasses(Mapping[str, _Class]):
  """Registry of subclasses of one class by name. Those of this package are imported when they are needed."""

  def __init__(self, built_in: Mapping[str, str]):
    """Store the classes of this package.

    Args:
      built_in: full name of each class by its name in the registry.
    """
    self._classes: dict[str, Any] = dict(built_in)

  def __getitem__(self, name: str) -> _Class:
    known = self._classes[name]
    if isinstance(known, str):
      module, _, class_name = known.rpartition('.')
      known = getattr(importlib.import_module(module), class_name)
    return known

  def __iter__(self) -> Iterator[str]:
    return iter(self._classes)

  def __len__(self) -> int:
    return len(self._classes)

  def __contains__(self, name: Any) -> bool:
    return name in self._classes

  def register(self, owner: str, name: Any, cls: Any, base: type) -> None:
    """Register a class; one of the same name and module replaces it, e.g. when a cell of a notebook is run again.

    Args:
      owner: name of the decorator, for messages.
      name: name of the class in the registry.
      cls: the class.
      base: the class from which it must derive.

    Raises:
      ConfigError: the name is not a text or is taken, or the class is not a subclass of `base`.
    """
    if not isinstance(name, str) or not name:
      raise checks.invalid(owner, 'name', 'a text', name)
    if not (isinstance(cls, type) and issubclass(cls, base)):
      raise checks.invalid(owner, 'cls', f'a subclass of {base.__name__}', cls)
    known = self._classes.get(name, cls)
    if not isinstance(known, str):
      known = _full_name(known)
    if known != _full_name(cls):
      remedy = f'{known} has this name already. Choose another one.'
      raise checks.invalid(owner, 'name', 'a new name', name, remedy)
    self._classes[name] = cls


def _full_name(cls: type) -> str:
  return f'{cls.__module__}.{cls.__qualname__}'
