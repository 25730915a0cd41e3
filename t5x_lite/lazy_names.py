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
    modules: names that the package exports, attributes or submodules, by full module name.
  """
  module_of = {name: module for module, names in modules.items() for name in names}

  def get_attribute(name: str) -> Any:
    if name not in module_of:
      raise AttributeError(f'module {package["__name__"]!r} has no attribute {name!r}')
    module = importlib.import_module(module_of[name])
    try:
      value = getattr(module, name)
    except AttributeError:  # A submodule that is not imported yet.
      value = importlib.import_module(f'{module_of[name]}.{name}')
    package[name] = value
    return value

  return get_attribute, lambda: sorted({*package, *module_of}), list(module_of)
