"""The configuration of a training run: the arguments of `train`, validated."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from t5x_lite import actions as actions_lib
from t5x_lite import checkpoints
from t5x_lite.actions import ActionMode
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common.parts import RunConfig
from t5x_lite.apps.common.plan import When
from t5x_lite.errors import ConfigError
from t5x_lite.evaluation import INFERENCE_EVAL, TRAINING_EVAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
  """Arguments of `train`, under its names.

  Attributes:
    actions_by_mode: `actions`, by `ActionMode`.

  Raises:
    ConfigError: options that are out of range or contradict each other.
  """

  num_prefetched_batches: int
  num_retries: int
  concurrent_metrics: bool
  checkpoint_cfg: checkpoints.CheckpointConfig
  total_steps: int | None
  eval_period: int | None
  relative_steps: int | None
  stats_period: int | None
  summarize_config_fn: Callable[[str, Any, int], None] | None
  actions: Mapping[str | ActionMode, Sequence[actions_lib.BaseAction]] | None
  run_eval_before_training: bool
  gc_period: int
  max_batch_seconds: float | None
  max_step_seconds: float | None
  max_evaluation_seconds: float | None
  max_saving_seconds: float | None
  profile_steps: Sequence[int] | None
  infer_eval_period: int | None
  dry_run: bool
  actions_by_mode: Mapping[ActionMode, Sequence[actions_lib.BaseAction]] = dataclasses.field(init=False)

  def __post_init__(self):
    super().__post_init__()
    plan_lib.total_steps_of_run(self.total_steps, self.relative_steps, 0)
    plan_lib.check_period('eval_period', self.eval_period)
    plan_lib.check_period('infer_eval_period', self.infer_eval_period)
    plan_lib.check_period('stats_period', self.stats_period)
    plan_lib.check_period('gc_period', self.gc_period, zero_is_never=True)
    object.__setattr__(self, 'actions_by_mode', actions_lib.resolve_actions(self.actions))
    if self.run_eval_before_training and self.train_eval_dataset_cfg is None and self.infer_eval_dataset_cfg is None:
      raise ConfigError('run_eval_before_training is True, but there is nothing to evaluate: give '
                        'train_eval_dataset_cfg or infer_eval_dataset_cfg, or leave the option out.')
    if self.infer_eval_period is not None and self.infer_eval_dataset_cfg is None:
      raise ConfigError(f'infer_eval_period is {self.infer_eval_period}, but there is nothing to decode: give '
                        'infer_eval_dataset_cfg, or leave the option out.')

  @property
  def summary_period(self) -> int:
    """Number of steps from one summary to the next."""
    return self.stats_period or max(1, (self.eval_period or self.total_steps or self.relative_steps) // 10)

  def plan(self, first_step: int, *, last_step: int, kinds: Sequence[str],
           pause_steps: Sequence[int]) -> Iterator[plan_lib.Stretch]:
    """Yields the stretches of steps from a step on.

    Args:
      first_step: number of steps taken before.
      last_step: the step at which the run ends.
      kinds: kinds of evaluation that the run makes.
      pause_steps: further steps at which to pause.
    """
    save_cfg, never = self.checkpoint_cfg.save, When()
    infer_period = self.infer_eval_period or self.eval_period
    return plan_lib.plan_steps(
        first_step, last_step,
        evaluate=When(period=self.eval_period, at_end=True) if TRAINING_EVAL in kinds else never,
        infer=When(period=infer_period, at_end=True) if INFERENCE_EVAL in kinds else never,
        save=never if save_cfg is None else When(
            period=save_cfg.period, steps=save_cfg.checkpoint_steps or (), at_end=True),
        collect_garbage=When(period=self.gc_period), pause=When(period=self.summary_period, steps=pause_steps))
