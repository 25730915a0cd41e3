"""Restriction of the modules that a configuration may import.

A gin file, and thus the config.gin of a run, names modules to import and functions to call. With a restriction, it can
call only what recipes need (`configurable_names`) and what the allowed modules define. This protects against surprises
and is not a sandbox: an allowed module can execute any code.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import importlib
import logging
import re
import sys
import traceback
from typing import Any

from t5x_lite import checks
from t5x_lite import compat
from t5x_lite.compat import names as t5x_names
from t5x_lite.compat import views as t5x_views
from t5x_lite.configuration import configurable_names
from t5x_lite.errors import ConfigError

_logger = logging.getLogger(__name__)

TRUSTED = ('jax', 'flax', 'optax', 'seqio', 't5x_lite', 'moe')
# Packages that do not import TensorFlow; `data.seqio.packages` calls `import_triton_first` itself.
_WITHOUT_TENSORFLOW = ('jax', 'flax', 'optax', 't5x_lite', 'moe')

_allowed: tuple[str, ...] | None = None
_logged: set[str] = set()


def restrict(allowed: str | None) -> None:
  """Set the modules that configurations of this process may import in addition to the trusted ones.

  With a restriction, modules in the current folder are only found if one of the names is there.

  Args:
    allowed: names separated by commas, each including its submodules; '' for none, None for any module.

  Raises:
    ConfigError: an entry is not the name of a module.
  """
  global _allowed
  if allowed is None:
    names = None
  else:
    names = tuple(name.strip() for name in allowed.split(',') if name.strip())
  for name in names or ():
    if not all(part.isidentifier() for part in name.split('.')):
      raise checks.invalid('', '--allowed_modules', 'names of modules, separated by commas', name)
  _allowed = names
  _logged.clear()
  if names is not None:
    compat.leave_folders_without(names)


def check_import(module: str, where: str) -> None:
  """Log the import of a module outside the trusted packages, or raise if it is not allowed; call this before importing.

  Args:
    module: full name of the module.
    where: location of the import statement, such as `config.gin:3`.

  Raises:
    ConfigError: the module is not allowed.
  """
  if _is_in(module, TRUSTED):
    return
  _check_allowed(module, f'{where}: `--allowed_modules` must contain {module!r} to import it')
  found = _existing_part(module)
  if found and found not in _logged:
    _logged.add(found)
    _logger.info('%s: importing %s, which runs its code.', where, found)


def check_configurable(found: Any, name: str, where: str, *, is_called: bool = False) -> None:
  """Raise if modules are restricted, and recipes do not need a function or class, nor does an allowed module define it.

  Args:
    found: the function or class.
    name: its name in the configuration.
    where: see `check_import`.
    is_called: whether the configuration calls it to make a value.

  Raises:
    ConfigError: it is not allowed.
  """
  if _allowed is None or configurable_names.is_listed(found, is_called=is_called):
    return
  home = getattr(found, '__module__', None)
  if not isinstance(home, str):  # of a method of a builtin type
    home = type(found).__module__
  use = ''
  if is_called and configurable_names.is_listed(found, is_called=False):
    use = ', to call it in a value'
  _check_allowed(
    home, f'{where}: `--allowed_modules` must contain {home!r}, where {name} is defined{use}'
  )


def _check_allowed(module: str, expectation: str) -> None:
  if _allowed is not None and not _is_in(module, _allowed):
    raise ConfigError(f'{expectation}, got {",".join(_allowed)!r}. Add it if you trust its code.')


def exists(top: str) -> bool:
  """Return whether a top-level module exists, without executing it."""
  return bool(_existing_part(top))


def _existing_part(module: str) -> str:
  """Return a module, or its innermost package that exists, or '', without executing anything."""
  found = ''
  path: Sequence[str] | None = None
  for part in module.split('.'):
    name = f'{found}.{part}'.removeprefix('.')
    if name in sys.modules:
      path = getattr(sys.modules[name], '__path__', ())
    else:
      # `importlib.util.find_spec` imports the packages of a module.
      specs = (finder.find_spec(name, path) for finder in sys.meta_path)
      spec = next(filter(None, specs), None)
      if spec is None:
        break
      path = spec.submodule_search_locations or ()
    found = name
  return found


def import_triton_first(module: str = 'tensorflow') -> None:
  """Import triton's library before a module that may import TensorFlow.

  With TensorFlow 2.21 and triton 3.7.1, which CUDA builds of PyTorch bring, importing triton after TensorFlow ends the
  process by a segmentation fault; the other order works (tensorflow issue 124205). Without triton or TensorFlow, or if
  either is imported already, this does nothing. It takes 0.4 seconds and 93 MB, where `import torch` takes seconds.

  Args:
    module: full name of the module that is imported next.
  """
  if _is_in(module, _WITHOUT_TENSORFLOW) or 'tensorflow' in sys.modules:
    return
  if exists('triton') and exists('tensorflow'):
    # A triton that cannot be imported does not end the process later either.
    with contextlib.suppress(Exception):
      importlib.import_module('triton._C.libtriton')


def _is_in(module: str, packages: Sequence[str]) -> bool:
  return any(module == package or module.startswith(f'{package}.') for package in packages)


def import_module(module: str, *, what: str = 'Module') -> None:
  """Import a module, so that it registers its tasks or its source.

  Args:
    module: full name of the module.
    what: the option that names it, for messages.

  Raises:
    ConfigError: it cannot be imported, or `--allowed_modules` does not contain it.
  """
  check_import(module, what)
  import_triton_first(module)
  try:
    importlib.import_module(module)
  except (ImportError, AttributeError) as error:
    raise ConfigError(f'{what} {module!r} cannot be imported: {_problem(module, error)}') from error


def _problem(module: str, error: ImportError | AttributeError) -> str:
  if not isinstance(error, ModuleNotFoundError) or is_other_version(module, error):
    return why_import_fails(error)
  missing = error.name or ''
  remedy = remedy_for(missing, error)
  if not _is_view(missing):
    if f'{module}.'.startswith(f'{missing}.'):
      folder = 'run the command in its folder, or add the folder to PYTHONPATH'
    else:
      folder = 'correct the import'
    remedy = f' Install it, or {folder}.{" Omit the suffix .py." if module.endswith(".py") else ""}{remedy}'
  return f'there is no module {missing!r}.{remedy}'


def is_other_version(module: str, error: ModuleNotFoundError) -> bool:
  """Return True if another module than the imported one misses a part of a package that is imported already."""
  missing = error.name or ''
  is_own = f'{module}.'.startswith(f'{missing}.')
  return not is_own and '.' in missing and missing.partition('.')[0] in sys.modules


def why_import_fails(error: ImportError | AttributeError) -> str:
  """Return why a module cannot be imported: the line that fails, its error, and what to do.

  Such a line was mostly written for another version of a package, which had the name.
  """
  text = f'{type(error).__name__}: {error}'
  lines = [
    f'{frame.filename}:{frame.lineno}'
    for frame in traceback.extract_tb(error.__traceback__)
    if frame.name == '<module>'
  ]
  if lines:  # else a file of machine code fails
    text = f'{lines[-1]} raises {text}'
  text = text.removesuffix('.')
  if isinstance(error, ImportError):
    owner = error.name or ''
  else:
    owner = getattr(error.obj, '__name__', '')
  remedy = remedy_for(owner, error)
  if remedy:
    return f'{text}.{remedy}'
  if isinstance(error, AttributeError) and _is_view(owner):  # has the alternative
    return f'{text}.'
  package = owner.partition('.')[0]
  version = getattr(sys.modules.get(package), '__version__', None)
  if version is None:
    return f'{text}. Change this line.'
  return f'{text}. Change this line for {package} {version}, which is installed.'


def remedy_for(missing: str, error: BaseException | None = None) -> str:
  """Return a sentence after a space if a module of T5X is missing, or imports the missing one; otherwise ''."""
  if _is_view(missing):
    # `from t5x.utils import name`; Python 3.11 has the name in the message only.
    found = re.match("cannot import name '(\\w+)'", str(error))
    sentence = t5x_names.why_no_module(missing) or (
      found and t5x_views.why_no_name(missing, found[1])
    )
    if sentence:
      return f' {sentence}'
    return ''
  if error is None:
    frames = []
  else:
    frames = traceback.walk_tb(error.__traceback__)
  importers = [frame.f_globals.get('__name__', '') for frame, _ in frames]
  if not any(f'{name}.'.startswith('t5x.') for name in (missing, *importers)):
    return ''
  return ' After t5x_lite.compat.install(), t5x means t5x_lite, as in its commands.'


def _is_view(module: str | None) -> bool:
  """Return whether a name is that of a module of T5X, and these are views: not T5X itself or a folder t5x."""
  return f'{module}.'.startswith('t5x.') and compat.is_installed()
