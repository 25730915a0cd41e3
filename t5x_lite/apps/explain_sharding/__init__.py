"""Report of the sharding of a model, and the flags of `t5x_lite explain_sharding`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(), {'t5x_lite.apps.explain_sharding.run': ('explain_sharding',)}
)
