"""Modules that a configuration names: which are imported without a word, and which a command restricts them to.

A gin file, and thus a run's config.gin, decides what is imported and called. The restriction is a guard against
surprises, not a sandbox: an allowed module can do whatever its code does.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import Any

from t5x_lite.errors import ConfigError

_logger = logging.getLogger(__name__)

TRUSTED = ('jax', 'flax', 'optax', 'seqio', 't5x_lite', 'moe')
# Where objects of the packages above, and gin's own, say that they are defined.
_HOMES = (*TRUSTED, 'jaxlib', 'ml_dtypes', 'gin')

_allowed: tuple[str, ...] | None = None
_logged: set[str] = set()


def restrict(allowed: str | None) -> None:
  """Sets the modules that configurations of this process may import beside the trusted ones.

  Args:
    allowed: names separated by commas, each with what it contains; '' for none, None for any module.

  Raises:
    ConfigError: something is not the name of a module.
  """
  global _allowed
  names = None if allowed is None else tuple(name.strip() for name in allowed.split(',') if name.strip())
  for name in names or ():
    if not all(part.isidentifier() for part in name.split('.')):
      raise ConfigError(f'--allowed_modules must be names of modules separated by commas, got {name!r}. Write for '
                        'example --allowed_modules=my_tasks,my_models.')
  _allowed = names
  _logged.clear()


def check_import(module: str, where: str) -> None:
  """Says that a module outside the trusted packages is about to be imported, or rejects it. Call it before the import.

  Args:
    module: its full name.
    where: what names it, such as `config.gin:3`.

  Raises:
    ConfigError: it is not among the allowed ones.
  """
  if _is_in(module, TRUSTED):
    return
  if _allowed is not None and not _is_in(module, _allowed):
    raise ConfigError(f'{where}: `--allowed_modules` must contain {module!r}, which is to be imported, got '
                      f'{",".join(_allowed)!r}. Add it if you trust its code.')
  if module not in _logged and _exists(module.partition('.')[0]):
    _logged.add(module)
    _logger.info('%s: importing %s, which runs its code.', where, module)


def check_configurable(wrapped: Any, name: str, where: str) -> None:
  """Rejects a function or class that a configuration reaches through an allowed module, but that is not of one.

  Args:
    wrapped: the function or class.
    name: as the configuration writes it.
    where: see `check_import`.

  Raises:
    ConfigError: modules are restricted, and it is defined elsewhere.
  """
  if _allowed is None:
    return
  home = getattr(wrapped, '__module__', None) or type(wrapped).__module__
  if not _is_in(home, (*_HOMES, *_allowed)):
    raise ConfigError(f'{where}: `--allowed_modules` must contain {home!r}, where {name} is defined, got '
                      f'{",".join(_allowed)!r}. Add it if you trust its code.')


def _exists(top: str) -> bool:
  """Returns whether a top-level module can be found, without running its code."""
  try:
    return top in sys.modules or importlib.util.find_spec(top) is not None
  except (ImportError, ValueError):
    return False


def _is_in(module: str, packages: Sequence[str]) -> bool:
  return any(module == package or module.startswith(f'{package}.') for package in packages)
