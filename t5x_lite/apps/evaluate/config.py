"""The configuration of an evaluation: the arguments of `evaluate`, validated."""

from collections.abc import Callable, Mapping
import dataclasses
import os
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import state_init
from t5x_lite import trainer as trainer_lib
from t5x_lite.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
  """Arguments of `evaluate`, under its names.

  Raises:
    ConfigError: options that are out of range or contradict each other.
  """

  model: models.BaseTransformerModel
  dataset_cfg: data.DatasetConfig
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None
  partitioner: partitioning.PjitPartitioner
  output_dir: str
  inference_evaluator_cls: Any
  training_evaluator_cls: trainer_lib.BaseTrainerConstructor | None
  summarize_config_fn: Callable[[str, Any, int], None] | None
  train_state_initializer_cls: type[state_init.TrainStateInitializer]
  train_eval_get_dataset_fn: Callable[..., Mapping[str, data.EvalBatches]]
  fallback_init_rng: int | None
  infer_eval_cfg: evaluation.InferenceEvalConfig | None
  eval_steps: int | None
  best_metric: str | None
  best_metric_mode: str
  verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None
  settings: Mapping[str, str] | None
  dry_run: bool

  def __post_init__(self) -> None:
    _check_output_dir(self.output_dir)
    if self.best_metric_mode not in ('max', 'min'):
      raise ConfigError(f"best_metric_mode is {self.best_metric_mode!r}; expected 'max' or 'min'.")
    if self.infer_eval_cfg is None and self.training_evaluator_cls is None:
      raise ConfigError('infer_eval_cfg and training_evaluator_cls are both None, so there is nothing to do: give at '
                        'least one of them.')
    if self.eval_steps is not None and self.training_evaluator_cls is None:
      raise ConfigError(f'eval_steps is {self.eval_steps}, but only an evaluation with given targets counts in '
                        'batches: give training_evaluator_cls (in gin @trainer.Trainer), or limit '
                        'infer_eval_cfg.num_examples.')
    if self.infer_eval_cfg is not None:
      evaluation.check_evaluator_cls(self.inference_evaluator_cls, self.dataset_cfg, self.infer_eval_cfg)
    evaluation.check_eval_batch(self.dataset_cfg, self.partitioner)

  @property
  def summary_dir(self) -> str | None:
    """Where metrics are written; None in a dry run."""
    return None if self.dry_run else self.output_dir

  def identity(self, evaluator: evaluation.InferenceEvaluator | None,
               eval_batches: Mapping[str, data.EvalBatches]) -> dict[str, Any]:
    """Returns what the results depend on besides the checkpoint, as JSON values.

    Args:
      evaluator: what decodes, or None.
      eval_batches: task name to batches with given targets; empty for none.
    """
    dataset_cfg, restore_cfg = self.dataset_cfg, self.restore_checkpoint_cfg
    names = ('split', 'shuffle', 'use_cached', 'pack', 'trim_output_features', 'source')
    identity = {
        'dataset': {'mixture_or_task_name': dataset_cfg.name, 'seed': dataset_cfg.effective_seed,
                    'task_feature_lengths': dict(sorted(dataset_cfg.task_feature_lengths.items())),
                    **{name: getattr(dataset_cfg, name) for name in names}},
        'restore': {'fallback_init_rng': self.fallback_init_rng, **({} if restore_cfg is None else {
            'dtype': restore_cfg.dtype, 'assignment_map': repr(restore_cfg.assignment_map),
            'strict': restore_cfg.strict, 'fallback_to_scratch': restore_cfg.fallback_to_scratch})},
        'settings': dict(self.settings or {}),
    }
    if evaluator is not None:
      identity['inference_eval'] = {
          'tasks': {task.name: len(task.examples) for task in evaluator.eval_tasks},
          'num_examples': self.infer_eval_cfg.num_examples, 'by_seqio': self.inference_evaluator_cls is not None}
    if eval_batches:
      identity['training_eval'] = {
          'tasks': {name: batches.num_examples for name, batches in eval_batches.items()},
          'eval_steps': self.eval_steps}
    return identity


def _check_output_dir(output_dir: Any) -> None:
  if not isinstance(output_dir, str) or not output_dir.strip():
    raise ConfigError(f'output_dir is {output_dir!r}; expected the path of a folder for results. Set EVAL_OUTPUT_DIR.')
  is_run = os.path.isdir(os.path.join(output_dir, 'train')) or (
      os.path.isdir(output_dir) and checkpoints.all_steps(output_dir, require_manifest=False))
  if is_run:
    raise ConfigError(f'output_dir is {output_dir!r}, the directory of a training run, whose own results would be '
                      'mixed with these. Choose a folder of its own (EVAL_OUTPUT_DIR), e.g. '
                      f'{os.path.join(output_dir, "eval")!r}.')
