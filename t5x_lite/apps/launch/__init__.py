"""`t5x_lite launch`: start several processes of one run on this machine."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(globals(), {'t5x_lite.apps.launch.run': ('launch',)})
