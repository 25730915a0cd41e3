"""Names of a package that are imported from their modules when they are first asked for.

`t5x_lite --help` imports every package of a command for its flags, and must not wait for JAX.
"""

from collections.abc import Callable, Mapping, Sequence
import importlib
from typing import Any


def lazy_names(
    package: dict[str, Any], modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
  """Returns `__getattr__`, `__dir__` and `__all__` for the `__init__` of a package (PEP 562).

  Args:
    package: the package's `globals()`, which keep what was imported.
    modules: full module name to the names that the package takes from it: attributes, or modules in it.
  """
  module_of = {name: module for module, names in modules.items() for name in names}

  def get_attribute(name: str) -> Any:
    if name not in module_of:
      raise AttributeError(f'module {package["__name__"]!r} has no attribute {name!r}')
    module = importlib.import_module(module_of[name])
    try:
      value = getattr(module, name)
    except AttributeError:  # a module of a package, which is no attribute before it is imported
      value = importlib.import_module(f'{module_of[name]}.{name}')
    package[name] = value
    return value

  return get_attribute, lambda: sorted({*package, *module_of}), list(module_of)
