"""Evaluation of checkpoints, and the flags of `t5x_lite eval`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.apps.evaluate.run': ('InferenceEvaluator', 'evaluate'),
    't5x_lite.gin_utils': ('SummarizeConfigFn',),
  },
)
