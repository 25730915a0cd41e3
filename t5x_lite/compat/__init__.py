"""T5X's names for users of T5X: in gin files always, in Python in commands and after `install()`."""

from collections.abc import Sequence
import contextlib
import sys
from typing import Any

from t5x_lite.compat import forks
from t5x_lite.compat import names
from t5x_lite.compat import views
from t5x_lite.errors import ConfigError


def install() -> None:
  """Make `import t5x`, `from t5x import utils` and so on give t5x_lite's objects in this process.

  T5X's package need not be installed; `names` is the table of all names. The commands of t5x_lite call this. Without
  this call, `sys.modules` has no module of T5X.

  Raises:
    ConfigError: T5X itself was imported before.
  """
  loaded = [
    name
    for name, module in sys.modules.items()
    if name.partition('.')[0] == 't5x'
    and names.has_module(name)
    and not isinstance(module, views.View)
  ]
  if loaded:
    raise ConfigError(
      f'compat.install() must be called before T5X itself is imported, and {loaded[0]} is imported '
      'already. Call it first, or start a new process.'
    )
  packages = {name.rpartition('.')[0] for name in names.MODULES}
  parents = {
    '.'.join(parts[:length])
    for parts in (package.split('.') for package in packages)
    for length in range(1, len(parts) + 1)
  }
  for name in sorted({*names.MODULES, *parents}):
    sys.modules[name] = views.module(name)


def is_installed() -> bool:
  """Return whether `import t5x` gives t5x_lite's objects in this process."""
  return isinstance(sys.modules.get('t5x'), views.View)


def set_up_process(folder: str = '', *, installs: bool = True) -> None:
  """Let this process find the modules of users as T5X's programs do.

  Args:
    folder: folder in which modules are found too, after all others; '' for none.
    installs: whether to call `install`; without effect if T5X itself is imported already.
  """
  if folder and folder not in forks.folders():
    sys.meta_path.append(forks.LastFolder(folder))
  if installs:
    with contextlib.suppress(ConfigError):
      install()


def leave_folders_without(modules: Sequence[str]) -> None:
  """Find no modules in the folders of `set_up_process`, except in those that have one of `modules`.

  A package that is not installed, and that other code imports if it is, would be taken from there.

  Args:
    modules: full names of modules.
  """
  for finder in forks.finders():
    tops = {module.partition('.')[0] for module in modules}
    if any(finder.find_spec(top) is not None for top in tops):
      continue
    finder.is_used = False
    # `python -m` finds this package itself there in a checkout.
    if sys.path[-1:] == [finder.folder] and finder.find_spec(__name__.partition('.')[0]) is None:
      sys.path.pop()


class SetUp:
  """The set-up of this process, which a process that unpickles it gets too. Pickle it before objects of users."""

  def __reduce__(self) -> tuple[Any, ...]:
    return _set_up_like, (forks.folders(), is_installed())


def _set_up_like(folders: Sequence[str], installs: bool) -> SetUp:
  for folder in ('', *folders):
    set_up_process(folder, installs=installs)
  return SetUp()
