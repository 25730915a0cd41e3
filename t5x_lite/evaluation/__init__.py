"""Evaluation by decoding: predictions for every example of a split, and the metrics of the task.

`InferenceEvaluator` evaluates, with the options `InferenceEvalConfig`. An `Evaluation` of a run has data, options and
`When` it is due. `outputs` is the part that runs on devices,
`judging` the part that runs on the host, and `batching` groups examples into batches. `runner` computes outputs for
inference too, and `infer_fn` has T5X's function for it. Teacher-forced evaluation is in `trainer`.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.evaluation.config': (
      'Evaluation',
      'InferenceEvalConfig',
      'Threshold',
      'When',
    ),
    't5x_lite.evaluation.evaluator': (
      'AllMetricsFuture',
      'EvaluatorConstructor',
      'InferenceEvaluator',
      'NoMetricsError',
      'check_eval_batch',
      'check_evaluator_cls',
    ),
    't5x_lite.evaluation.infer_fn': (
      'InferFnCallable',
      'InferStepWithRngCallable',
      'InferStepWithoutRngCallable',
      'get_infer_fn',
    ),
    't5x_lite.evaluation.judging': (
      'EvaluationResult',
      'as_number',
      'compute_metrics',
      'write_predictions',
    ),
    't5x_lite.evaluation.metric_names': (
      'INFERENCE_EVAL',
      'MEAN',
      'TRAINING_EVAL',
      'check_metric_name',
      'check_task_names',
      'full_names',
      'mean_over_tasks',
      'names_of_metrics',
    ),
    't5x_lite.evaluation.outputs': ('OutputRunner',),
    't5x_lite.evaluation.runner': ('PredictRunner',),
    't5x_lite.trainer.summaries': ('PREDICTIONS_PREFIX',),
  },
)
