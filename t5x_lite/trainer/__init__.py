"""The trainer: the loop around compiled steps, and its parts. The package has T5X's names.

`trainer` has the loop, `train_step` and `eval_steps` what it compiles, `state_init` the first state, `step_params` the
parameters that a step computes with, `non_finite` what happens after a number that is not finite, `averaging` the
average of the parameters, `actions` what may end a run, `weight_metrics` and `summaries` the metrics and their files.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.trainer.trainer': (
      'ActionMode',
      'ArrayMapFuture',
      'BaseAction',
      'BaseTrainer',
      'BaseTrainerConstructor',
      'EarlyStoppingAction',
      'LearningRateCallable',
      'MetricValueMapFuture',
      'MetricsManager',
      'NonFinitePolicy',
      'PartitionedEvalCallable',
      'PartitionedTrainCallable',
      'PreemptionError',
      'Stop',
      'SummarizeMetricsCallable',
      'TRAIN_METRIC_KEY',
      'TerminateOnNanAction',
      'TimeFuture',
      'Trainer',
      'WeightMetricsComputer',
      'accumulate_grads_microbatched',
      'apply_grads',
      'eval_step',
      'merge_metrics',
      'run_actions',
      'train_with_lr',
    ),
  },
)
