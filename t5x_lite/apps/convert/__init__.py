"""Conversion of weights between formats, the flags of `t5x_lite convert`, and the registry of formats to write."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.apps.convert.formats': ('FORMATS', 'register_target'),
    't5x_lite.apps.convert.run': ('convert',),
    't5x_lite.apps.convert.state_plan': ('OPTIMIZER_STATE',),
    't5x_lite.apps.convert.targets': ('Conversion', 'Job', 'StateTarget', 'Target'),
  },
)
