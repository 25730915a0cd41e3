"""Plots of metrics and the flags of `t5x_lite plot`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals(), {'t5x_lite.apps.plot.run': ('plot',)})
