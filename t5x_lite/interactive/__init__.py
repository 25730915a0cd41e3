"""Models in notebooks: `InteractiveModel`, opening a run by its directory, and inference for lists of texts."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.interactive.model': ('InferenceType', 'InteractiveModel'),
    't5x_lite.apps.common.runs': ('FoundRun', 'find_run'),
    't5x_lite.interactive.opening': ('open_run',),
  },
)
