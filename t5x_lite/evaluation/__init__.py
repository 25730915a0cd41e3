"""Evaluation by decoding: predictions for every example of a split, and the metrics of the task.

`InferenceEvaluator` evaluates, with the options `InferenceEvalConfig`. `outputs` is the part that runs on devices,
`judging` the part that runs on the host, and `batching` groups examples into batches. `runner` computes outputs for
inference too. Teacher-forced evaluation is in `trainer`.
"""

from t5x_lite.evaluation.config import InferenceEvalConfig
from t5x_lite.evaluation.evaluator import (
    AllMetricsFuture,
    InferenceEvaluator,
    NoMetricsError,
    check_eval_batch,
    check_evaluator_cls,
)
from t5x_lite.evaluation.judging import EvaluationResult, as_number, compute_metrics, judge, write_predictions
from t5x_lite.evaluation.metric_names import (
    INFERENCE_EVAL,
    MEAN,
    TRAINING_EVAL,
    check_metric_name,
    check_task_names,
    full_names,
    mean_over_tasks,
    names_of_metrics,
)
from t5x_lite.evaluation.outputs import OutputRunner
from t5x_lite.evaluation.runner import PredictRunner
from t5x_lite.summaries import PREDICTIONS_PREFIX

__all__ = [
    'AllMetricsFuture', 'EvaluationResult', 'INFERENCE_EVAL', 'InferenceEvalConfig', 'InferenceEvaluator', 'MEAN',
    'NoMetricsError', 'OutputRunner', 'PREDICTIONS_PREFIX', 'PredictRunner', 'TRAINING_EVAL', 'as_number',
    'check_eval_batch', 'check_evaluator_cls', 'check_metric_name', 'check_task_names', 'compute_metrics', 'full_names',
    'judge', 'mean_over_tasks', 'names_of_metrics', 'write_predictions',
]
