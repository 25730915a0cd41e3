"""Export of models for serving, and the flags of `t5x_lite export`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(), {'t5x_lite.apps.export.run': ('describe', 'save')}
)
