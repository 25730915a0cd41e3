"""Conversion of weights between formats, and the flags of `t5x_lite convert`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(), {'t5x_lite.apps.convert.run': ('FORMATS', 'OPTIMIZER_STATE', 'Conversion', 'convert')}
)
