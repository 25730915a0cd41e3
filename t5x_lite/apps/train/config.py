"""Options of a training run: their only definition, validated, from which the arguments of `train` are made."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, Literal, Self

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import runtime
from t5x_lite import trackers as trackers_lib
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common.trainer_setup import RunConfig
from t5x_lite.apps.train.step_log import LogConfig
from t5x_lite.compat import names as t5x_names
from t5x_lite.evaluation import INFERENCE_EVAL
from t5x_lite.evaluation import TRAINING_EVAL
from t5x_lite.evaluation import When
from t5x_lite.trainer import actions as actions_lib
from t5x_lite.trainer import state_init
from t5x_lite.trainer.actions import ActionMode

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

_TRACKERS = checks.Expectation(
  f'a list of different ones of {", ".join(map(repr, trackers_lib.TRACKERS))} and objects of trackers.Tracker',
  lambda given: (
    not isinstance(given, str) and len(set(map(_tracker_name, given))) == len(tuple(given))
  ),
  "In gin, write ['wandb'] or [@trackers.Wandb()].",
)


def _tracker_name(tracker: Any) -> str:
  """Return the name of a tracker; raise TypeError for anything else."""
  if isinstance(tracker, trackers_lib.Tracker):
    return getattr(tracker, 'name', '')  # an error of `make_tracker`
  if tracker in trackers_lib.TRACKERS:
    return tracker
  raise TypeError(f'{tracker!r} is not a tracker')


def _steps(at_least: int) -> checks.Expectation:
  return checks.number(at_least=at_least, below=2**31, integer=True, remedy=_STEPS_REMEDY).or_none()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
  """Options of `train`.

  Attributes:
    checkpoint_cfg: when to save checkpoints, and which one to start from.
    total_steps: step at which the run ends, counted from the model's first step; the step of the checkpoint, or 0,
      trains no step, e.g. to evaluate with `run_eval_before_training`. None with `relative_steps`, or to
      train until the data ends (`DatasetConfig.num_epochs`), an action ends the run, or a signal stops it. Data that
      ends before this step ends the run in the same way, with an evaluation and a save, and with the cause
      'data_ended' in the last log line and in `events.jsonl`.
    eval_period: number of steps between evaluations; None evaluates only after the last step, which is always
      evaluated. 0 evaluates at no step except with `run_eval_before_training` and `infer_eval_period`.
    relative_steps: number of steps after the checkpoint that the run first started from; replaces `total_steps`.
    stats_period: number of steps between training metrics; None for a tenth of `eval_period`. Metrics are also written
      whenever training pauses for another reason. With training actions, the run waits for the device before each
      write.
    summarize_config_fn: called with (model_dir, summary writer or None, step) to record the configuration.
    actions: actions that may stop the run, by 'TRAIN', 'TRAIN_EVAL' or 'INFER_EVAL'.
    run_eval_before_training: also evaluate before the first step of the run.
    use_orbax: True, since checkpoints are written in Orbax's format; False is accepted if no checkpoint is saved.
      Both formats of T5X are read with either value.
    gc_period: number of steps between garbage collections; 0 leaves them to Python.
    num_prefetched_batches: number of batches prepared in the background.
    num_retries: number of times in a row to reopen training data that raised OSError or DataUnavailableError, at the
      position of the failed batch or at the saved one, after 1, 2, 4, ... seconds.
    max_batch_seconds: save and end the run if a training batch takes longer; None only warns, with the stacks of all
      threads, every 5 minutes. The first batch, also after a rollback, has no limit.
    max_step_seconds: end the run, with the stacks of all threads of all processes, if a step takes longer. 'auto' is
      the larger of 1,800 s and 50 times the median of the last 101 steps, from the second step of the process on; with
      several processes, a step does not count while another process evaluates, saves or compiles. None only warns. In
      all cases there is a warning, once, if a step takes longer than 10 minutes and than 20 times the median.
    max_evaluation_seconds: the same limit for a batch of an evaluation; None warns after 30 minutes.
    max_saving_seconds: the same limit for the time that training waits for a save; None warns after 30 minutes.
    warn_every_seconds: warn with the stacks of all threads each time that this time passes without a completed step,
      whatever the run does, and never end the run; independent of the limits above. None for no such warnings.
    max_store_seconds: how long a request to an object store is repeated if it fails for a temporary reason.
    spool_dir: local folder outside of `model_dir` that keeps the newest checkpoint if it cannot be written to
      `model_dir`; the next run with this folder copies it there. With several processes, all must share it.
    profile_steps: `runtime.ProfileConfig` with the steps to profile into `model_dir/train`; or (first, last) for the
      steps after `first` up to `last`.
    log_cfg: log lines about batches, steps and the memory of devices.
    infer_eval_period: number of steps between evaluations by decoding; None for `eval_period`.
    concurrent_metrics: compute and write the metrics of decoded texts while training continues. The run waits for them
      before it saves, evaluates again or calls actions with them.
    event_fns: a function or a list of functions that are called with each event of the run, a `runtime.Event`, in every
      process; the lead process also writes it to `model_dir/events.jsonl`. Training waits for them, so they should
      return at once. Their exceptions do not end the run.
    trackers: trackers of experiments, to which a thread of the lead process sends metrics, configuration and
      predictions: 'wandb', 'mlflow', 'tensorboard', or objects such as `trackers.Wandb(project='mine')`. Training does
      not wait for them; after its end they have 30 s together, and a warning has the command that sends the rest.
    verify_base: compare all bytes of the base of the adapter with those that it was first trained with, when the run
      resumes; otherwise sizes, index and some blocks of each file.
    dry_run: print the plan of the run without training.

  Raises:
    ConfigError: options are out of range or contradict each other.
  """

  checkpoint_cfg: checkpoints.CheckpointConfig
  total_steps: int | None
  eval_period: int | None
  relative_steps: int | None = None
  stats_period: int | None = None
  summarize_config_fn: Callable[[str, Any, int], None] | None = None
  actions: Mapping[str | ActionMode, Sequence[actions_lib.BaseAction]] | None = None
  run_eval_before_training: bool = False
  use_orbax: bool = True
  gc_period: int = 0
  num_prefetched_batches: int = 2
  num_retries: int = 3
  max_batch_seconds: float | None = None
  max_step_seconds: float | Literal['auto'] | None = 'auto'
  max_evaluation_seconds: float | None = None
  max_saving_seconds: float | None = None
  warn_every_seconds: float | None = None
  max_store_seconds: float = 300.0
  spool_dir: str | None = None
  profile_steps: Sequence[int] | runtime.ProfileConfig | None = None
  log_cfg: LogConfig = LogConfig()
  infer_eval_period: int | None = None
  concurrent_metrics: bool = True
  event_fns: Callable[[runtime.Event], None] | Sequence[Callable[[runtime.Event], None]] | None = (
    None
  )
  trackers: Sequence[str | trackers_lib.Tracker] = ()
  verify_base: bool = False
  dry_run: bool = False

  def __post_init__(self):
    super().__post_init__()
    self.checkpoint_cfg.check()
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
      trackers=_TRACKERS,
      max_store_seconds=checks.number(above=0),
    )
    if state_init.adapter_of(self.model) is None:
      checks.check(
        'train',
        vars(self),
        verify_base=checks.Expectation('False without an adapter', lambda verify: not verify),
      )
    actions_lib.resolve_actions(self.actions)  # raises for invalid ones

  @functools.cached_property
  def actions_by_mode(self) -> Mapping[ActionMode, Sequence[actions_lib.BaseAction]]:
    """`actions`, by `ActionMode`."""
    return actions_lib.resolve_actions(self.actions)

  @property
  def event_hooks(self) -> tuple[Callable[[runtime.Event], None], ...]:
    """`event_fns` as a tuple."""
    if callable(self.event_fns):
      return (self.event_fns,)
    return tuple(self.event_fns or ())

  def without_missing_evaluations(self, names: Collection[str]) -> Self:
    """Return the configuration without the evaluations of the short form that are not in `names`.

    Args:
      names: names of the evaluations whose data was opened, see `trainer_setup.open_data`.
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

  @property
  def _save_times(self) -> plan_lib.Times:
    save_cfg = self.checkpoint_cfg.save
    if save_cfg is None:
      return When()
    return plan_lib.SaveTimes(checkpoints.save_policies_from_config(save_cfg))

  def before_first_step(self, step: int) -> list[plan_lib.Stretch]:
    """Return the evaluations and the save before the first step of a new run, as a stretch of no steps, if any."""
    due = tuple(name for name, when in self.whens.items() if when.at_start)
    save = self._save_times.is_due(step, math.inf)
    if not due and not save:
      return []
    return [plan_lib.Stretch(first=step, last=step, evaluations=due, save=save)]

  def plan(
    self, first_step: int, *, last_step: float, pause_steps: Sequence[int]
  ) -> Iterator[plan_lib.Stretch]:
    """Yield the stretches of steps after `first_step`.

    Args:
      first_step: number of completed steps.
      last_step: step at which the run ends; `math.inf` if no number of steps ends it.
      pause_steps: additional steps at which to pause.
    """
    return plan_lib.plan_steps(
      first_step,
      last_step,
      evaluations=self.whens,
      save=self._save_times,
      collect_garbage=When(period=self.gc_period),
      pause=When(period=self.summary_period, steps=pause_steps),
    )
