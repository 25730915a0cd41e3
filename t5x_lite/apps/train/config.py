"""Configuration of a training run: the validated arguments of `train`."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
from typing import Any, Literal, Self

from t5x_lite import actions as actions_lib
from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import runtime
from t5x_lite.actions import ActionMode
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common.parts import RunConfig
from t5x_lite.apps.train.step_log import LogConfig
from t5x_lite.compat import names as t5x_names
from t5x_lite.evaluation import INFERENCE_EVAL
from t5x_lite.evaluation import TRAINING_EVAL
from t5x_lite.evaluation import When

_STEPS_REMEDY = (
  'Steps are int32. total_steps counts from step 0 of the model; relative_steps counts from the '
  'checkpoint that the run starts from.'
)
_PERIOD = checks.number(at_least=1, integer=True).or_none()
# Number of steps between two summaries if nothing else tells it.
_SUMMARY_PERIOD = 100
_ONLY_ORBAX = checks.Expectation(
  "True, since T5X's former format of checkpoints is not written",
  lambda use: use is True,
  t5x_names.remedy('t5x.train', 'train.use_orbax=False'),
)
_SECONDS = checks.number(above=0).or_none()
_EVENT_FNS = checks.Expectation(
  'a function of an Event, or a list of them',
  lambda fns: callable(fns) or (isinstance(fns, (list, tuple)) and all(map(callable, fns))),
  'In gin, write [@name] without parentheses.',
).or_none()


def _steps(at_least: int) -> checks.Expectation:
  return checks.number(at_least=at_least, below=2**31, integer=True, remedy=_STEPS_REMEDY).or_none()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
  """Arguments of `train`, with the same names.

  Attributes:
    actions_by_mode: `actions`, by `ActionMode`.
    event_hooks: `event_fns` as a tuple.

  Raises:
    ConfigError: options are out of range or contradict each other.
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
  use_orbax: bool
  gc_period: int
  max_batch_seconds: float | None
  max_step_seconds: float | Literal['auto'] | None
  max_evaluation_seconds: float | None
  max_saving_seconds: float | None
  warn_every_seconds: float | None
  max_store_seconds: float
  spool_dir: str | None
  profile_steps: Sequence[int] | runtime.ProfileConfig | None
  log_cfg: LogConfig
  infer_eval_period: int | None
  event_fns: Callable[[runtime.Event], None] | Sequence[Callable[[runtime.Event], None]] | None
  dry_run: bool
  actions_by_mode: Mapping[ActionMode, Sequence[actions_lib.BaseAction]] = dataclasses.field(
    init=False
  )
  event_hooks: Sequence[Callable[[runtime.Event], None]] = dataclasses.field(init=False)

  def __post_init__(self):
    super().__post_init__()
    has_infer_eval = self.infer_eval_dataset_cfg is not None
    has_eval = has_infer_eval or self.train_eval_dataset_cfg is not None
    use_orbax = checks.instance(bool, 'True or False')
    if self.checkpoint_cfg.save is not None:
      use_orbax = _ONLY_ORBAX
    infer_eval_period = _PERIOD
    if not has_infer_eval:
      infer_eval_period = checks.Expectation(
        'unset without `infer_eval_dataset_cfg`', lambda period: not period
      )
    checks.check(
      'train',
      vars(self),
      relative_steps=_steps(1),
      total_steps=_steps(0),
      stats_period=_PERIOD,
      eval_period=checks.number(at_least=0, integer=True).or_none(),
      use_orbax=use_orbax,
      infer_eval_period=infer_eval_period,
      run_eval_before_training=checks.Expectation(
        'unset without `train_eval_dataset_cfg` or `infer_eval_dataset_cfg`',
        lambda run: has_eval or not run,
      ),
      gc_period=checks.number(at_least=0, integer=True),
      max_batch_seconds=_SECONDS,
      event_fns=_EVENT_FNS,
      max_store_seconds=checks.number(above=0),
    )
    event_hooks = self.event_fns or ()
    if callable(event_hooks):
      event_hooks = (event_hooks,)
    object.__setattr__(self, 'event_hooks', tuple(event_hooks))
    object.__setattr__(self, 'actions_by_mode', actions_lib.resolve_actions(self.actions))

  def without_missing_evaluations(self, names: Collection[str]) -> Self:
    """Return the configuration without the evaluations of the short form that are not in `names`.

    Args:
      names: names of the evaluations whose data was opened, see `parts.open_data`.
    """
    changes: dict[str, Any] = {}
    if TRAINING_EVAL not in names:
      changes['train_eval_dataset_cfg'] = None
    if INFERENCE_EVAL not in names:
      changes['infer_eval_dataset_cfg'] = None
      changes['infer_eval_period'] = None
    if TRAINING_EVAL not in names and INFERENCE_EVAL not in names:
      changes['run_eval_before_training'] = False
    return dataclasses.replace(self, **changes)

  @property
  def summary_period(self) -> int:
    """Number of steps between two summaries."""
    return self.stats_period or max(
      1, (self.eval_period or self.total_steps or self.relative_steps or 10 * _SUMMARY_PERIOD) // 10
    )

  @property
  def whens(self) -> dict[str, When]:
    """When each evaluation is due, by its name."""

    def when(period):
      return When(period=period, at_start=bool(self.run_eval_before_training), at_end=period != 0)

    found = {}
    if self.train_eval_dataset_cfg is not None:
      found[TRAINING_EVAL] = when(self.eval_period)
    if self.infer_eval_dataset_cfg is not None:
      found[INFERENCE_EVAL] = when(self.infer_eval_period or self.eval_period)
    return found | {each.name: each.when for each in self.evaluations}

  @property
  def longest_period(self) -> int:
    """Largest number of steps between two pauses of the same kind."""
    save_cfg = self.checkpoint_cfg.save
    if save_cfg is None:
      saving = None
    else:
      saving = checkpoints.save_policies_from_config(save_cfg).next_step(0)
    periods = [
      self.summary_period,
      self.gc_period,
      saving,
      *(when.period for when in self.whens.values()),
    ]
    return max(period or 1 for period in periods)

  def plan(
    self, first_step: int, *, last_step: float, pause_steps: Sequence[int]
  ) -> Iterator[plan_lib.Stretch]:
    """Yield the stretches of steps after `first_step`.

    Args:
      first_step: number of completed steps.
      last_step: step at which the run ends; `math.inf` if no number of steps ends it.
      pause_steps: additional steps at which to pause.
    """
    save_cfg = self.checkpoint_cfg.save
    save: plan_lib.Times = When()
    if save_cfg is not None:
      save = plan_lib.SaveTimes(checkpoints.save_policies_from_config(save_cfg))
    return plan_lib.plan_steps(
      first_step,
      last_step,
      evaluations=self.whens,
      save=save,
      collect_garbage=When(period=self.gc_period),
      pause=When(period=self.summary_period, steps=pause_steps),
    )
