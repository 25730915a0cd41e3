"""Options of evaluations, and policies of when a run evaluates."""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import re
from typing import Any

from t5x_lite import checks
from t5x_lite import data
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite.evaluation import metric_names

_STEP = checks.number(at_least=0, integer=True)
_BOOL = checks.instance(bool, 'True or False')


@dataclasses.dataclass(frozen=True, kw_only=True)
class When:
  """Steps after which a run does something.

  Attributes:
    period: number of steps between two times, counted from step 0 of the model; None or 0 for no period.
    steps: additional steps.
    from_step: first step at which `period`, `steps` and `condition` apply.
    at_start: also before the first step of a new run.
    at_end: also after the last step.
    condition: function of (step, means of the training metrics since the last summary, by name). Where `period` or
      `steps` apply, it must return true; without both it is called after every training summary, every
      `train.stats_period` steps and at each other pause. `at_start` and `at_end` do not need it.

  Raises:
    ConfigError: an option is out of range.
  """

  period: int | None = None
  steps: Collection[int] = ()
  from_step: int = 0
  at_start: bool = False
  at_end: bool = False
  condition: Callable[[int, Mapping[str, float]], bool] | None = None

  def __post_init__(self):
    checks.check(
      'When',
      vars(self),
      period=checks.number(at_least=0, integer=True).or_none(),
      from_step=_STEP,
      steps=checks.Expectation('steps, integers >= 0', lambda steps: all(map(_STEP.holds, steps))),
      at_start=_BOOL,
      at_end=_BOOL,
      condition=checks.Expectation(
        'None or a function of (step, metrics)',
        lambda condition: condition is None or callable(condition),
      ),
    )

  @property
  def is_never(self) -> bool:
    """True if it is due at no step."""
    return not (self.period or self.steps or self.at_start or self.at_end or self.condition)

  def is_due(self, step: int, last_step: int | None) -> bool:
    """Return whether it is due after `step` of a run that ends at `last_step`, if the condition holds."""
    return self.is_due_at_end(step, last_step) or (
      step >= self.from_step
      and (
        bool(self.period)
        and step % self.period == 0
        or step in self.steps
        or self.condition is not None
        and not self.period
        and not self.steps
      )
    )

  def is_due_at_end(self, step: int, last_step: int | None) -> bool:
    """Return whether it is due at `step` because the run ends there."""
    return self.at_end and step == last_step

  def next_step(self, step: int) -> int | None:
    """Return the first step after `step` of `period` and `steps`, or None."""
    after = max(step, self.from_step - 1)
    steps = [s for s in self.steps if s > after]
    if self.period:
      steps.append((after // self.period + 1) * self.period)
    return min(steps, default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
  """Condition for `When`: a training metric is below or above a number.

  Attributes:
    metric: name of a training metric, e.g. 'loss'; a summary without it does not satisfy the condition.
    below: upper bound, exclusive; None for none.
    above: lower bound, exclusive; None for none.

  Raises:
    ConfigError: both bounds are None, a bound is not a number, or no number satisfies both.
  """

  metric: str
  below: float | None = None
  above: float | None = None

  def __post_init__(self):
    checks.check(
      'Threshold',
      vars(self),
      metric=checks.instance(str, 'the name of a metric'),
      below=checks.number().or_none(),
      above=checks.number(below=self.below).or_none(),
    )
    if self.below is None and self.above is None:
      raise checks.invalid(
        'Threshold', 'below', 'a number if `above` is None', None, 'Set one of them.'
      )

  def __call__(self, step: int, metrics: Mapping[str, float]) -> bool:
    """Return whether the condition holds for these training metrics."""
    del step
    value = metrics.get(self.metric)
    return (
      value is not None
      and (self.below is None or value < self.below)
      and (self.above is None or value > self.above)
    )


_COUNT = checks.number(at_least=1, integer=True)


_TaskMetricFn = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceEvalConfig:
  """Options of an evaluation by decoding.

  Attributes:
    num_examples: number of examples of each task, from the beginning; None for the entire split.
    num_examples_to_write: number of predictions to write at each evaluation; None for all.
    batch_by_length: group examples of similar length, and cut padding. Texts and metrics do not change, except with
      sampling, whose random numbers depend on the row. False keeps the order and the full length.
    max_num_lengths: maximum number of lengths of inputs to compile; fewer are used if more would save little.
    metric_fns: functions of (targets, predictions), lists after the task's postprocessing, or of (targets, scores),
      that return metrics by name; `data.metrics` has them by name. They replace all metrics of the tasks; None keeps
      those of the tasks.
    decode_fn: decoding algorithm of the predictions, e.g. `decoding.MinimumBayesRisk`; or
      `decoding.LabelScores`; None for that of the model.

  Raises:
    ConfigError: a number is out of range.
  """

  num_examples: int | None = None
  num_examples_to_write: int | None = 1000
  batch_by_length: bool = True
  max_num_lengths: int = 4
  metric_fns: Sequence[_TaskMetricFn] | None = None
  decode_fn: decoding.DecodeFnCallable | decoding.LabelScores | None = None

  def __post_init__(self):
    checks.check(
      'InferenceEvalConfig',
      vars(self),
      num_examples=_COUNT.or_none(),
      max_num_lengths=_COUNT,
      num_examples_to_write=checks.number(at_least=0, integer=True).or_none(),
      batch_by_length=checks.instance(bool, 'True or False'),
      metric_fns=checks.Expectation(
        'functions of (targets, predictions) or (targets, scores), or None',
        lambda fns: fns is None or (len(fns) > 0 and all(map(callable, fns))),
      ),
    )


def _none_with_decode(instead: str) -> checks.Expectation:
  return checks.Expectation(
    'None with decode=True', lambda value: value is None, f'Set InferenceEvalConfig.{instead}.'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """An evaluation of a run, with a name.

  Its results are in the folders `training_eval/<name>/<task>/` or, by decoding, `inference_eval/<name>/<task>/`, and
  these are the names of its metrics: `training_eval/<name>/<task>/<metric>`.

  Attributes:
    name: name, of letters, digits, '_' and '-'.
    dataset_cfg: data and batch size.
    when: when to evaluate.
    decode: evaluate by decoding, with the metrics of the tasks or of `infer_eval_cfg`; False is teacher-forced, with
      the metrics of the model and `metric_fns`.
    num_batches: maximum number of batches of a teacher-forced evaluation; None for the entire split.
    metric_fns: functions of (logits, batch) for a teacher-forced evaluation, that return `clu.metrics.Metric`s by name.
      They replace the `metric_fns` of the model, not its losses and accuracy; None keeps those of the model.
    infer_eval_cfg: options of an evaluation by decoding.

  Raises:
    ConfigError: an option is out of range or has no effect.
  """

  name: str
  dataset_cfg: data.DatasetConfig
  when: When = When(at_end=True)
  decode: bool = False
  num_batches: int | None = None
  metric_fns: Sequence[models.MetricFn] | None = None
  infer_eval_cfg: InferenceEvalConfig = InferenceEvalConfig()

  def __post_init__(self):
    kinds = (metric_names.TRAINING_EVAL, metric_names.INFERENCE_EVAL, metric_names.MEAN)
    num_batches = _COUNT.or_none()
    metric_fns = checks.Expectation(
      'a list of functions of (logits, batch), or None',
      lambda fns: fns is None or (isinstance(fns, (list, tuple)) and all(map(callable, fns))),
      'In gin, write metric_fns = [@my_module.my_metric] without parentheses.',
    )
    if self.decode:
      num_batches = _none_with_decode('num_examples')
      metric_fns = _none_with_decode('metric_fns')
    checks.check(
      'Evaluation',
      vars(self),
      name=checks.Expectation(
        f"a name of letters, digits, '_' and '-' other than {', '.join(kinds)}",
        lambda name: bool(re.fullmatch(r'[\w-]+', name, re.ASCII)) and name not in kinds,
      ),
      dataset_cfg=checks.instance(data.DatasetConfig, 'a DatasetConfig'),
      when=checks.Expectation(
        'a When that is due at some step',
        lambda when: isinstance(when, When) and not when.is_never,
        'Set its period, steps, at_start, at_end or condition.',
      ),
      num_batches=num_batches,
      metric_fns=metric_fns,
      infer_eval_cfg=checks.Expectation(
        'an InferenceEvalConfig, unset without decode=True',
        lambda cfg: (
          isinstance(cfg, InferenceEvalConfig) and (self.decode or cfg == InferenceEvalConfig())
        ),
      ),
    )

  @property
  def folder(self) -> str:
    """Folder of the results, below the run directory."""
    if self.decode:
      kind = metric_names.INFERENCE_EVAL
    else:
      kind = metric_names.TRAINING_EVAL
    return f'{kind}/{self.name}'
