"""Options of an evaluation: their only definition, validated, from which the arguments of `evaluate` are made."""

from collections.abc import Callable, Mapping
import dataclasses
import json
from typing import Any

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import data
from t5x_lite import decoding
from t5x_lite import evaluation
from t5x_lite import gin_utils
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite.apps.common import output_folder
from t5x_lite.checkpoints import builders
from t5x_lite.storage import files
from t5x_lite.trainer import state_init
from t5x_lite.trainer import trainer as trainer_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
  """Options of `evaluate`.

  Attributes:
    model: the model; no optimizer is needed.
    dataset_cfg: evaluation data: a task, or each task of a mixture.
    restore_checkpoint_cfg: checkpoints; mode 'all' evaluates in ascending order of step. None for random parameters.
    partitioner: the mesh and the sharding rules.
    output_dir: folder of results; must not be a run directory.
    inference_evaluator_cls: None, or seqio.Evaluator; see `evaluation.InferenceEvaluator`.
    training_evaluator_cls: `trainer.Trainer` for teacher-forced evaluation, or None.
    summarize_config_fn: called with (output_dir, None, 0) to record the configuration.
    train_state_initializer_cls: class of the state initializer.
    train_eval_get_dataset_fn: opens the data for `training_evaluator_cls`, like `data.open_eval_iterators` or T5X's
      `data.get_training_eval_datasets`.
    fallback_init_rng: seed of random parameters, used without a checkpoint.
    use_orbax: True or False. The format of a checkpoint, Orbax's or T5X's former one, is detected.
    infer_eval_cfg: options of evaluations by decoding; None for none.
    eval_steps: maximum number of batches per teacher-forced evaluation; None for the entire split.
    best_metric: full name of the metric that selects the best checkpoint, e.g. 'inference_eval/mean/f1'.
    best_metric_mode: 'max' or 'min'.
    verify_matching_vocabs_fn: raises if the vocabularies of data and model differ; None skips the check.
    settings: further settings that the results depend on, by name; the command passes all gin bindings. Results of
      different settings are not mixed.
    dry_run: print the plan without evaluating.

  Raises:
    ConfigError: options are out of range or contradict each other.
  """

  model: models.BaseTransformerModel
  dataset_cfg: data.DatasetConfig
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None
  partitioner: partitioning.PjitPartitioner
  output_dir: str
  inference_evaluator_cls: Any = None
  training_evaluator_cls: trainer_lib.BaseTrainerConstructor | None = None
  summarize_config_fn: gin_utils.SummarizeConfigFn | None = gin_utils.summarize_gin_config
  train_state_initializer_cls: type[state_init.TrainStateInitializer] = (
    state_init.TrainStateInitializer
  )
  train_eval_get_dataset_fn: Callable[..., Mapping[str, Any]] = data.get_training_eval_datasets
  fallback_init_rng: int | None = None
  use_orbax: bool = True
  infer_eval_cfg: evaluation.InferenceEvalConfig | None = evaluation.InferenceEvalConfig()
  eval_steps: int | None = None
  best_metric: str | None = None
  best_metric_mode: str = 'max'
  verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None = (
    data.verify_matching_vocabs
  )
  settings: Mapping[str, str] | None = None
  dry_run: bool = False

  def __post_init__(self) -> None:
    self.dataset_cfg.validated('dataset_cfg')
    if self.restore_checkpoint_cfg is not None:
      self.restore_checkpoint_cfg.validated('restore_checkpoint_cfg')
    is_path = output_folder.directory('Set EVAL_OUTPUT_DIR, e.g. to the folder eval of the run.')
    is_needed = self.infer_eval_cfg is None or self.eval_steps is not None
    checks.check(
      'evaluate',
      vars(self),
      output_dir=checks.Expectation(
        f'{is_path.text}, and not a run directory',
        lambda path: is_path.holds(path) and not _is_run(path),
        is_path.remedy,
      ),
      best_metric_mode=checks.one_of(('max', 'min')),
      use_orbax=checks.instance(bool, 'True or False'),
      training_evaluator_cls=checks.Expectation(
        'a trainer class, such as trainer.Trainer, '
        + (
          f'with eval_steps={self.eval_steps}'
          if self.infer_eval_cfg
          else 'since infer_eval_cfg is None too'
        ),
        lambda cls: cls is not None or not is_needed,
        'To limit the examples to decode, set --gin.evaluation.InferenceEvalConfig.num_examples=1000.',
      ),
    )
    if self.infer_eval_cfg is not None:
      evaluation.check_evaluator_cls(
        self.inference_evaluator_cls, self.dataset_cfg, self.infer_eval_cfg
      )
    evaluation.check_eval_batch(self.dataset_cfg, self.partitioner)

  @property
  def summary_dir(self) -> str | None:
    """Folder of metrics; None in a dry run."""
    if self.dry_run:
      return None
    return self.output_dir

  def identity(
    self,
    evaluator: evaluation.InferenceEvaluator | None,
    eval_batches: Mapping[str, data.EvalBatches],
  ) -> dict[str, Any]:
    """Return everything that the results depend on except the checkpoint, as JSON values.

    Args:
      evaluator: evaluator by decoding, or None.
      eval_batches: teacher-forced batches by task name; may be empty.
    """
    dataset_cfg = self.dataset_cfg
    restore_cfg = self.restore_checkpoint_cfg
    lengths = dataset_cfg.task_feature_lengths
    if lengths:
      lengths = dict(sorted(lengths.items()))
    dataset = {
      'mixture_or_task_name': dataset_cfg.name,
      'seed': dataset_cfg.effective_seed,
      'task_feature_lengths': lengths,
    }
    for name in ('split', 'shuffle', 'use_cached', 'pack', 'trim_output_features', 'source'):
      dataset[name] = getattr(dataset_cfg, name)
    restore: dict[str, Any] = {'fallback_init_rng': self.fallback_init_rng}
    if restore_cfg is not None:
      restore |= {
        'dtype': restore_cfg.dtype,
        'assignment_map': repr(restore_cfg.assignment_map),
        'strict': restore_cfg.strict,
        # Recorded as JSON, which has no tuples.
        'fallback_to_scratch': json.loads(json.dumps(restore_cfg.fallback_to_scratch)),
        **builders.identity(restore_cfg),
      }
    identity: dict[str, Any] = {
      'dataset': dataset,
      'restore': restore,
      'settings': dict(self.settings or {}),
    }
    if self.model.constraints is not None:
      identity['constraints'] = self.model.constraints.identity
    if evaluator is not None and self.infer_eval_cfg is not None:
      identity['inference_eval'] = {
        'tasks': {task.name: len(task.examples) for task in evaluator.eval_tasks},
        'num_examples': self.infer_eval_cfg.num_examples,
        'by_seqio': self.inference_evaluator_cls is not None,
      }
      decode_fn = self.infer_eval_cfg.decode_fn or decoding.labels_of(self.model.decode_fn)
      if decode_fn is not None:
        identity['inference_eval']['decode_fn'] = decoding.identity_of(decode_fn)
    if eval_batches:
      identity['training_eval'] = {
        'tasks': {name: batches.num_examples for name, batches in eval_batches.items()},
        'eval_steps': self.eval_steps,
      }
    return identity


def _is_run(path: str) -> bool:
  folder = files.path(path)
  return folder.is_dir() and (
    (folder / 'train').is_dir() or bool(checkpoints.all_steps(path, require_manifest=False))
  )
