"""Training, and the flags of `t5x_lite train`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.apps.train.run': ('TRAIN_METRIC_KEY', 'run_actions', 'train'),
    't5x_lite.apps.train.step_log': ('LogConfig',),
  },
)
