"""Opens runs in notebooks; see `t5x_lite.interactive`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.apps.common.runs': ('FoundRun', 'find_run'),
    't5x_lite.interactive.opening': ('open_run',),
  },
)
