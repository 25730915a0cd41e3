"""T5X's module of this name; see `t5x_lite.interactive`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.interactive.model': (
      'InferenceType',
      'InteractiveModel',
      'T5XScriptType',
      'get_batches_from_seqio',
      'get_dataset_from_natural_text_examples',
      'get_gin_config_from_interactive_model',
      'get_seqio_task_from_examples',
      'map_over_examples',
      'over_examples',
    )
  },
)
