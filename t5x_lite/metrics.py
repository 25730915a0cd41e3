"""Metrics that accumulate on device and are finished on the host.

Each is a `clu.metrics.Metric`: a pytree made inside the compiled step (`from_model_output`), added up on device
(`merge`) and turned into a number when it is logged (`compute`). What only the host knows, how long the steps took
and how many they were, is filled in between: see `set_time_metrics_duration` and `set_step_metrics_num_steps`.
"""

from collections.abc import Mapping
from typing import Any

from clu import metrics as clu_metrics
from clu import values as clu_values
import flax
import jax
import jax.numpy as jnp
import numpy as np
from t5x_lite.types import Array, ArrayLike, PyTree

__all__ = [
    'ArrayAverage',
    'AveragePerStep',
    'Step',
    'StepsPerTime',
    'Sum',
    'Time',
    'TimeRate',
    'create_metrics_dict',
    'is_metric_obj',
    'is_time_metric',
    'layer_prefixes',
    'report_worst_layer',
    'set_step_metrics_num_steps',
    'set_time_metrics_duration',
    'shape_obj_to_defined_obj',
    'worst_of_layers',
]

# Prefix of metrics of layers to short name to metric; see `report_worst_layer`.
_WORST_OF_LAYERS: dict[str, Mapping[str, str]] = {}


@flax.struct.dataclass
class Sum(clu_metrics.Metric):
  """The sum of all values.

  Attributes:
    total: the sum so far, a scalar.
  """

  total: ArrayLike

  @classmethod
  def from_model_output(cls, values: ArrayLike, **_) -> 'Sum':
    """Returns the sum of `values`, of any shape."""
    return cls(total=jnp.sum(jnp.asarray(values)))

  def merge(self, other: 'Sum') -> 'Sum':
    """Returns the sum of both."""
    return type(self)(total=self.total + other.total)

  def compute(self) -> ArrayLike:
    """Returns the sum."""
    return self.total


@flax.struct.dataclass
class Step(clu_metrics.Metric):
  """A metric that knows over how many steps it was accumulated.

  Merging adds the counts up, and with them micro-batches; the host, who knows the steps, replaces the count by
  `set_step_metrics_num_steps` before `compute`.

  Attributes:
    steps: number of steps, or of merged parts until it is replaced.
  """

  steps: ArrayLike | None = 1

  def replace_steps(self, steps: int) -> 'Step':
    """Returns this metric over `steps` steps."""
    return self.replace(steps=steps)

  def compute(self) -> ArrayLike:
    """Returns the number of steps."""
    return _require(self, 'steps', self.steps, 'set_step_metrics_num_steps')


@flax.struct.dataclass
class AveragePerStep(Step):
  """The sum of all values over the number of steps.

  Attributes:
    total: the sum so far, a scalar.
  """

  total: ArrayLike | None = None

  @classmethod
  def from_model_output(cls, values: ArrayLike, steps: int | None = 1, **_) -> 'AveragePerStep':
    """Returns the sum of `values`, of any shape, over `steps`."""
    return cls(total=jnp.sum(jnp.asarray(values)), steps=steps)

  def merge(self, other: 'AveragePerStep') -> 'AveragePerStep':
    """Returns the metric of both parts: totals and steps are added."""
    return type(self)(total=self.total + other.total, steps=self.steps + other.steps)

  def compute(self) -> ArrayLike:
    """Returns total / steps."""
    return self.total / _require(self, 'steps', self.steps, 'set_step_metrics_num_steps')


@flax.struct.dataclass
class ArrayAverage(clu_metrics.Metric):
  """The elementwise mean of arrays of one shape, such as the load of every expert.

  Summaries write it as a list; see `t5x_lite.summaries`.

  Attributes:
    total: float32 array, the sum so far.
    count: float32 scalar, the number of arrays.
  """

  total: ArrayLike
  count: ArrayLike

  @classmethod
  def from_model_output(cls, values: ArrayLike, **_) -> 'ArrayAverage':
    """Returns the mean of the one array `values`."""
    return cls(total=jnp.asarray(values, jnp.float32), count=jnp.ones([], jnp.float32))

  def merge(self, other: 'ArrayAverage') -> 'ArrayAverage':
    """Returns the mean over the arrays of both."""
    return type(self)(total=self.total + other.total, count=self.count + other.count)

  def compute(self) -> ArrayLike:
    """Returns the mean, an array."""
    return self.total / self.count

  def compute_value(self) -> clu_values.Summary:
    """Returns the mean as a value of CLU."""
    return clu_values.Summary(self.compute(), metadata=None)


@flax.struct.dataclass
class Time(clu_metrics.Metric):
  """The seconds that the accumulated steps took, filled in by the host.

  Attributes:
    duration: seconds, None until `set_time_metrics_duration`.
  """

  duration: ArrayLike | None = None

  def merge(self, other: 'Time') -> 'Time':
    """Returns this metric: durations do not add up, the host sets the whole one."""
    del other
    return self

  def compute(self) -> ArrayLike:
    """Returns the duration."""
    return _require(self, 'duration', self.duration, 'set_time_metrics_duration')

  def replace_duration(self, duration: ArrayLike) -> 'Time':
    """Returns this metric over `duration` seconds."""
    return self.replace(duration=duration)


@flax.struct.dataclass
class TimeRate(Time):
  """A count per second.

  Attributes:
    numerator: the count so far, a scalar.
  """

  numerator: ArrayLike | None = None

  @classmethod
  def from_model_output(cls, numerator: ArrayLike, **_) -> 'TimeRate':
    """Returns `numerator` (a scalar) over a duration that is yet to be set."""
    return cls(numerator=numerator)

  def merge(self, other: 'TimeRate') -> 'TimeRate':
    """Returns the metric of both counts.

    Raises:
      ValueError: one of them already has its duration.
    """
    _require_no_duration(self, other)
    return type(self)(numerator=self.numerator + other.numerator)

  def compute(self) -> ArrayLike:
    """Returns numerator / duration."""
    return self.numerator / _require(self, 'duration', self.duration, 'set_time_metrics_duration')


@flax.struct.dataclass
class StepsPerTime(Step, Time):
  """Steps per second."""

  @classmethod
  def from_model_output(cls, steps: int | None = 1, **_) -> 'StepsPerTime':
    """Returns `steps` over a duration that is yet to be set."""
    return cls(steps=steps)

  def merge(self, other: 'StepsPerTime') -> 'StepsPerTime':
    """Returns the metric of both counts of steps.

    Raises:
      ValueError: one of them already has its duration.
    """
    _require_no_duration(self, other)
    return type(self)(steps=self.steps + other.steps)

  def compute(self) -> ArrayLike:
    """Returns steps / duration."""
    steps = _require(self, 'steps', self.steps, 'set_step_metrics_num_steps')
    return steps / _require(self, 'duration', self.duration, 'set_time_metrics_duration')


def _require(metric: clu_metrics.Metric, name: str, value: Any, setter: str) -> Any:
  if value is None:
    raise ValueError(f'{type(metric).__name__}.compute needs `{name}`, which is None. Call {setter} first.')
  return value


def _require_no_duration(*metrics: Time) -> None:
  for metric in metrics:
    if metric.duration is not None:
      raise ValueError(
          f'Got a {type(metric).__name__} whose duration is set ({metric.duration} s); metrics are merged first, then '
          'set_time_metrics_duration sets the duration of all.')


def is_metric_obj(obj: Any) -> bool:
  """Returns whether `obj` is a metric; serves as `is_leaf` of tree functions."""
  return isinstance(obj, clu_metrics.Metric)


def is_time_metric(obj: Any) -> bool:
  """Returns whether `obj` is a metric that needs a duration."""
  return isinstance(obj, Time)


def create_metrics_dict(float_metrics_dict: Mapping[str, ArrayLike]) -> dict[str, Sum]:
  """Returns the given scalars as `Sum` metrics."""
  return {name: Sum(value) for name, value in float_metrics_dict.items()}


def shape_obj_to_defined_obj(obj: clu_metrics.Metric) -> clu_metrics.Metric:
  """Returns `obj`, a metric of `jax.ShapeDtypeStruct`s, filled with zeros: a neutral start for merging."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), obj)


def set_time_metrics_duration(metrics: PyTree, duration: float | np.ndarray | Array) -> PyTree:
  """Returns `metrics`, any tree of metrics, with `duration` (seconds) set in every time metric."""
  return jax.tree.map(
      lambda metric: metric.replace_duration(duration) if is_time_metric(metric) else metric,
      metrics, is_leaf=is_metric_obj)


def set_step_metrics_num_steps(metrics: PyTree, num_steps: int) -> PyTree:
  """Returns `metrics`, any tree of metrics, with `num_steps` set in every metric that counts steps."""
  return jax.tree.map(
      lambda metric: metric.replace_steps(num_steps) if isinstance(metric, Step) else metric,
      metrics, is_leaf=is_metric_obj)


def report_worst_layer(prefix: str, names: Mapping[str, str]) -> None:
  """Register metrics `<prefix>/<layer>/<metric>` of which log lines show the largest over the layers.

  All other metrics of this prefix are left to the files.

  Args:
    prefix: of the metrics' names.
    names: short name to metric, in the order to be shown.
  """
  _WORST_OF_LAYERS[prefix] = dict(names)


def layer_prefixes() -> tuple[str, ...]:
  """Return the prefixes of metrics of which log lines show only `worst_of_layers`."""
  return tuple(f'{prefix}/' for prefix in _WORST_OF_LAYERS)


def worst_of_layers(values: Mapping[str, Any]) -> dict[str, float]:
  """Returns the largest value over the layers by short name, for what is registered and not 0.

  Args:
    values: metric name to number.
  """
  found = {}
  for prefix, names in _WORST_OF_LAYERS.items():
    for short, metric in names.items():
      layers = [value for name, value in values.items()
                if name.startswith(f'{prefix}/') and name.count('/') > 1 and name.endswith(f'/{metric}')]
      if worst := max((float(np.asarray(layer)) for layer in layers), default=0.0):
        found[short] = worst
  return found
