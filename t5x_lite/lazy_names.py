"""Lazy imports of the names of a package.

`t5x_lite --help` imports the package of every command for its flags, and must not import JAX.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib
from typing import Any


def lazy_names(
  package: dict[str, Any], modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
  """Return `__getattr__`, `__dir__` and `__all__` for the `__init__` of a package (PEP 562).

  Args:
    package: `globals()` of the package, which caches imported names.
    modules: names that the package exports, attributes or submodules, by full module name; `name as other` renames.
  """
  origin = {}
  for module, names in modules.items():
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
