"""Page about runs and the flags of `t5x_lite report`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals(), {'t5x_lite.apps.report.run': ('report',)})
