"""Evaluation by decoding: a model's answers to every example of a split, judged by the task's own metrics.

`InferenceEvaluator` does it; `InferenceEvalConfig` says how. `outputs` is the device's half, `judging` the host's, and
`batching` decides which examples share a batch. `runner` computes outputs for inference too. Teacher-forced evaluation
stands in `trainer`.
"""

from t5x_lite.evaluation.config import InferenceEvalConfig
from t5x_lite.evaluation.evaluator import (
    AllMetricsFuture,
    InferenceEvaluator,
    NoMetricsError,
    check_eval_batch,
    check_evaluator_cls,
)
from t5x_lite.evaluation.judging import EvaluationResult, as_number, judge, write_predictions
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
    'check_eval_batch', 'check_evaluator_cls', 'check_metric_name', 'check_task_names', 'full_names', 'judge',
    'mean_over_tasks', 'names_of_metrics', 'write_predictions',
]
