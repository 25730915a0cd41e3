"""Batch inference: the loop over a source, the files of results, and the flags of `t5x_lite infer`."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.apps.infer.executors': ('FailFastThreadPoolExecutor',),
    't5x_lite.apps.infer.run': (
      'AUTOTUNE',
      'create_task_from_tfexample_file',
      'infer',
      'merge_chunks_to_file',
      'merge_chunks_to_table',
      'update_measurement_series',
      'write_inferences_to_file',
    ),
    't5x_lite.gin_utils': ('SummarizeConfigFn',),
  },
)
