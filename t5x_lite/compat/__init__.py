"""T5X's names for users of T5X: in gin files always, in Python in commands and after `install()`."""

import sys

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
  loaded = [name for name, module in sys.modules.items()
            if name.partition('.')[0] == 't5x' and not isinstance(module, views.View)]
  if loaded:
    raise ConfigError(f'compat.install() must be called before T5X itself is imported, and {loaded[0]} is imported '
                      'already. Call it first, or start a new process.')
  packages = {name.rpartition('.')[0] for name in names.MODULES}
  parents = {'.'.join(parts[:length]) for parts in (package.split('.') for package in packages)
             for length in range(1, len(parts) + 1)}
  for name in sorted({*names.MODULES, *parents}):
    sys.modules[name] = views.module(name)
