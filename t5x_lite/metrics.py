"""Metrics that accumulate on devices and are computed on the host.

Each is a `clu.metrics.Metric`: a pytree made in the compiled step (`from_model_output`), accumulated on devices
(`merge`) and converted to a number for the log (`compute`). Before `compute`, the host sets the duration and the number
of steps: see `set_time_metrics_duration` and `set_step_metrics_num_steps`.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from clu import metrics as clu_metrics
from clu import values as clu_values
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.types import Array, ArrayLike, PyTree

__all__ = [
  'ArrayAverage',
  'AveragePerBatch',
  'AveragePerStep',
  'OfLastStep',
  'Step',
  'StepsPerTime',
  'Sum',
  'Time',
  'TimeRate',
  'WeightedAverage',
  'create_metrics_dict',
  'is_metric_obj',
  'is_time_metric',
  'layer_prefixes',
  'merge_metrics',
  'report_worst_layer',
  'separate',
  'set_step_metrics_num_steps',
  'set_time_metrics_duration',
  'shape_obj_to_defined_obj',
  'worst_of_layers',
]

# `ArrayLike`, or None until the number is known.
MaybeNumber = Any
# Tree structure of metrics, and the shape and dtype of each leaf.
_Layout = tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]
# Prefix of layers' metrics to short name to metric; see `report_worst_layer`.
_WORST_OF_LAYERS: dict[str, Mapping[str, str]] = {}


@struct.dataclass
class Sum(clu_metrics.Metric):
  """Sum of all values.

  Attributes:
    total: sum so far, a scalar.
  """

  total: ArrayLike

  @classmethod
  def from_model_output(cls, values: ArrayLike, **_) -> 'Sum':
    """Return the sum of `values`, of any shape."""
    return cls(total=jnp.sum(jnp.asarray(values)))

  def merge(self, other: 'Sum') -> 'Sum':
    """Return the sum of both."""
    return type(self)(total=self.total + other.total)

  def compute(self) -> ArrayLike:
    """Return the sum, a scalar."""
    return self.total


@struct.dataclass
class Step(clu_metrics.Metric):
  """Metric with the number of steps over which it was accumulated.

  Merging adds the counts, also of micro-batches; the host replaces the count by `set_step_metrics_num_steps` before
  `compute`.

  Attributes:
    steps: number of steps, or of merged parts until it is replaced.
  """

  steps: MaybeNumber = 1

  def replace_steps(self, steps: int) -> 'Step':
    """Return this metric over `steps` steps."""
    return dataclasses.replace(self, steps=steps)

  def compute(self) -> ArrayLike:
    """Return the number of steps, an int or int32 scalar."""
    return _require(self, 'steps', self.steps, 'set_step_metrics_num_steps')


@struct.dataclass
class AveragePerStep(Step):
  """Sum of all values, divided by the number of steps.

  Attributes:
    total: sum so far, a scalar; or one for each of stacked layers, which `summaries` separates.
  """

  total: MaybeNumber = None

  @classmethod
  def from_model_output(cls, values: ArrayLike, steps: int | None = 1, **_) -> 'AveragePerStep':
    """Return the sum of `values`, of any shape, over `steps`."""
    return cls(total=jnp.sum(jnp.asarray(values)), steps=steps)

  def merge(self, other: 'AveragePerStep') -> 'AveragePerStep':
    """Return the metric of both parts: totals and steps are added."""
    return type(self)(total=self.total + other.total, steps=self.steps + other.steps)

  def compute(self) -> ArrayLike:
    """Return total / steps, a scalar."""
    return self.total / _require(self, 'steps', self.steps, 'set_step_metrics_num_steps')


@struct.dataclass
class AveragePerBatch(AveragePerStep):
  """Sum of all values, divided by the number of steps or batches that are not empty.

  `steps` counts these; `set_step_metrics_num_steps` only decreases it, for parts of one step.
  """

  def replace_steps(self, steps: int) -> 'AveragePerBatch':
    """Return this metric over at most `steps` steps: empty batches, such as skipped steps, do not count."""
    return dataclasses.replace(self, steps=jnp.minimum(self.steps, steps))

  def compute(self) -> ArrayLike:
    """Return total / steps, a scalar; 0 without steps."""
    return self.total / (self.steps + (self.steps == 0))


@struct.dataclass
class WeightedAverage(clu_metrics.Metric):
  """Mean of values by weights, such as losses per token by numbers of tokens; or a sum of such means.

  A single value is not changed by its weight, so that the loss of one step is exactly the minimized loss. Values of
  weight 0, even NaN, add nothing.

  Attributes:
    mean: float32 scalar, the mean so far; or one for each term of a sum, [terms].
    weight: sum of the weights, of the shape of `mean`.
  """

  mean: Array
  weight: Array

  @classmethod
  def from_model_output(cls, values: ArrayLike, weights: ArrayLike = 1.0, **_) -> 'WeightedAverage':
    """Return a metric of one value, a scalar or [terms], with its weight of the same shape or a scalar."""
    values = jnp.asarray(values, jnp.float32)
    weights = jnp.asarray(weights, jnp.float32)
    return cls(mean=values, weight=jnp.broadcast_to(weights, values.shape))

  @property
  def total(self) -> ArrayLike:
    """The mean, under the name that T5X's `AveragePerStep` has for the loss of one step."""
    return self.compute()

  def scale(self, factor: ArrayLike) -> 'WeightedAverage':
    """Return the metric of the values times `factor`, a scalar."""
    return dataclasses.replace(self, mean=self.mean * factor)

  def add_terms(self, *others: 'WeightedAverage') -> 'WeightedAverage':
    """Return the sum of this mean and others, each with its own weights."""
    metrics = (self, *others)
    means = [jnp.atleast_1d(jnp.asarray(metric.mean)) for metric in metrics]
    weights = [jnp.atleast_1d(jnp.asarray(metric.weight)) for metric in metrics]
    return type(self)(mean=jnp.concatenate(means), weight=jnp.concatenate(weights))

  def merge(self, other: 'WeightedAverage') -> 'WeightedAverage':
    """Return the mean over the values of both."""
    weight = self.weight + other.weight
    divisor = jnp.where(weight == 0, 1.0, weight)
    mean = self._part(divisor) + other._part(divisor)
    return type(self)(mean=mean, weight=weight)

  def _part(self, divisor: ArrayLike) -> Array:
    return jnp.where(self.weight == 0, 0.0, self.mean * (self.weight / divisor))

  def compute(self) -> ArrayLike:
    """Return the mean, or the sum of the means of the terms, a scalar; 0 without any weight."""
    return self.mean.sum()


@struct.dataclass
class OfLastStep(clu_metrics.Metric):
  """Metrics of the last of the merged steps alone; the other steps need not compute them.

  Their numbers are a few arrays, since a program with thousands of scalar results is slow to compile and to call.

  Attributes:
    numbers: dtype to the numbers of this dtype of all metrics, [n].
    layout: (tree structure of the metrics, shape and dtype of each leaf).
  """

  numbers: dict[str, Array]
  layout: _Layout = struct.field(pytree_node=False)

  @classmethod
  def join(cls, metrics: Mapping[str, clu_metrics.Metric]) -> 'OfLastStep':
    """Return metrics by name as one metric."""
    leaves, structure = jax.tree.flatten(dict(metrics))
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    by_dtype: dict[str, list[Array]] = {}
    for leaf in leaves:
      by_dtype.setdefault(leaf.dtype.name, []).append(leaf.ravel())
    return cls(
      numbers={dtype: jnp.concatenate(parts) for dtype, parts in by_dtype.items()},
      layout=(structure, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)),
    )

  def separate(self) -> dict[str, clu_metrics.Metric]:
    """Return the metrics by name, the inverse of `join`."""
    structure, shapes = self.layout
    leaves = []
    ends = dict.fromkeys(self.numbers, 0)
    for shape, dtype in shapes:
      start = ends[dtype]
      ends[dtype] = start + math.prod(shape)
      leaves.append(self.numbers[dtype][start : ends[dtype]].reshape(shape))
    return jax.tree.unflatten(structure, leaves)

  def merge(self, other: 'OfLastStep') -> 'OfLastStep':
    """Return the later metrics, `other`."""
    return other

  def compute(self) -> dict[str, ArrayLike]:
    """Return the values of the metrics by name."""
    return {name: metric.compute() for name, metric in self.separate().items()}


def separate(metrics: Mapping[str, clu_metrics.Metric]) -> dict[str, clu_metrics.Metric]:
  """Return metrics by name, with the metrics of an `OfLastStep` instead of itself."""
  separated = {}
  for name, metric in metrics.items():
    if isinstance(metric, OfLastStep):
      separated.update(metric.separate())
    else:
      separated[name] = metric
  return separated


@struct.dataclass
class ArrayAverage(clu_metrics.Metric):
  """Elementwise mean of arrays of one shape by weights, such as the load of every expert.

  Summaries write it as a list; see `t5x_lite.trainer.summaries`.

  Attributes:
    total: float32 array, sum of the arrays times their weights so far.
    count: float32 scalar or array, sum of the weights; without weights, the number of arrays.
  """

  total: Array
  count: Array

  @classmethod
  def from_model_output(
    cls, values: ArrayLike, weights: ArrayLike | None = None, **_
  ) -> 'ArrayAverage':
    """Return the mean of one array, `values` of any shape, with a scalar weight or one for each element."""
    total = jnp.asarray(values, jnp.float32)
    if weights is None:
      return cls(total=total, count=jnp.ones([], jnp.float32))
    count = jnp.asarray(weights, jnp.float32)
    return cls(total=total * count, count=count)

  def merge(self, other: 'ArrayAverage') -> 'ArrayAverage':
    """Return the mean over the arrays of both."""
    return type(self)(total=self.total + other.total, count=self.count + other.count)

  def compute(self) -> Array:
    """Return the mean, float32 of the shape of the arrays; 0 for an element without weight."""
    return self.total / (self.count + (self.count == 0))

  def compute_value(self) -> clu_values.Summary:
    """Return the mean as a value of CLU."""
    return clu_values.Summary(self.compute(), metadata=None)


@struct.dataclass
class Time(clu_metrics.Metric):
  """Duration of the accumulated steps in seconds, set by the host.

  Attributes:
    duration: seconds, None until `set_time_metrics_duration`.
  """

  duration: ArrayLike | None = None

  def merge(self, other: 'Time') -> 'Time':
    """Return this metric: the host sets the duration of all steps."""
    del other
    return self

  def compute(self) -> ArrayLike:
    """Return the duration, a scalar in seconds."""
    return _require(self, 'duration', self.duration, 'set_time_metrics_duration')

  def replace_duration(self, duration: ArrayLike) -> 'Time':
    """Return this metric over `duration` seconds, a scalar."""
    return dataclasses.replace(self, duration=duration)


@struct.dataclass
class TimeRate(Time):
  """Count per second.

  Attributes:
    numerator: count so far, a scalar.
  """

  numerator: MaybeNumber = None

  @classmethod
  def from_model_output(cls, numerator: ArrayLike, **_) -> 'TimeRate':
    """Return `numerator` (a scalar) over a duration that is set later."""
    return cls(numerator=numerator)

  def merge(self, other: 'TimeRate') -> 'TimeRate':
    """Return the metric of both counts.

    Raises:
      ValueError: one of them already has its duration.
    """
    _require_no_duration(self, other)
    return type(self)(numerator=self.numerator + other.numerator)

  def compute(self) -> ArrayLike:
    """Return numerator / duration, a scalar."""
    return self.numerator / _require(self, 'duration', self.duration, 'set_time_metrics_duration')


@struct.dataclass
class StepsPerTime(Step, Time):
  """Steps per second."""

  @classmethod
  def from_model_output(cls, steps: int | None = 1, **_) -> 'StepsPerTime':
    """Return `steps` over a duration that is set later."""
    return cls(steps=steps)

  def merge(self, other: 'StepsPerTime') -> 'StepsPerTime':
    """Return the metric of both counts of steps.

    Raises:
      ValueError: one of them already has its duration.
    """
    _require_no_duration(self, other)
    return type(self)(steps=self.steps + other.steps)

  def compute(self) -> ArrayLike:
    """Return steps / duration, a scalar."""
    steps = _require(self, 'steps', self.steps, 'set_step_metrics_num_steps')
    return steps / _require(self, 'duration', self.duration, 'set_time_metrics_duration')


def _require(metric: clu_metrics.Metric, name: str, value: Any, setter: str) -> Any:
  if value is None:
    raise ValueError(
      f'{type(metric).__name__}.compute needs `{name}`, which is None. Call {setter} first.'
    )
  return value


def _require_no_duration(*metrics: Time) -> None:
  for metric in metrics:
    if metric.duration is not None:
      raise ValueError(
        f'Cannot merge a {type(metric).__name__} with a duration ({metric.duration} s). Merge metrics before '
        'set_time_metrics_duration.'
      )


def is_metric_obj(obj: Any) -> bool:
  """Return True if `obj` is a metric; can be used as `is_leaf` of tree functions."""
  return isinstance(obj, clu_metrics.Metric)


def is_time_metric(obj: Any) -> bool:
  """Return True if `obj` is a metric that needs a duration."""
  return isinstance(obj, Time)


def create_metrics_dict(float_metrics_dict: Mapping[str, ArrayLike]) -> dict[str, Sum]:
  """Return the given scalars as `Sum` metrics."""
  return {name: Sum(value) for name, value in float_metrics_dict.items()}


def shape_obj_to_defined_obj(obj: clu_metrics.Metric) -> clu_metrics.Metric:
  """Return a metric of zeros, the neutral element of merging, with the shapes of `obj` (`jax.ShapeDtypeStruct`s)."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), obj)


def set_time_metrics_duration(metrics: PyTree, duration: float | np.ndarray | Array) -> PyTree:
  """Return `metrics`, any tree of metrics, with `duration` (seconds, a scalar) set in every time metric."""
  return jax.tree.map(
    lambda metric: metric.replace_duration(duration) if is_time_metric(metric) else metric,
    metrics,
    is_leaf=is_metric_obj,
  )


@jax.jit
def merge_metrics(
  a: Mapping[str, clu_metrics.Metric], b: Mapping[str, clu_metrics.Metric]
) -> dict[str, clu_metrics.Metric]:
  """Return the metrics of `a` merged with those of `b` by name, on the device."""
  return {name: a[name].merge(b[name]) for name in a}


def set_step_metrics_num_steps(metrics: PyTree, num_steps: int) -> PyTree:
  """Return `metrics`, any tree of metrics, with `num_steps` set in every metric that counts steps."""
  return jax.tree.map(
    lambda metric: metric.replace_steps(num_steps) if isinstance(metric, Step) else metric,
    metrics,
    is_leaf=is_metric_obj,
  )


def report_worst_layer(prefix: str, names: Mapping[str, str]) -> None:
  """Register metrics `<prefix>/<layer>/<metric>` whose largest value over the layers is in log lines.

  Other metrics with this prefix are only in the files of metrics.

  Args:
    prefix: prefix of the metrics' names.
    names: short name to metric, in the order of log lines.
  """
  _WORST_OF_LAYERS[prefix] = dict(names)


def layer_prefixes() -> tuple[str, ...]:
  """Return the prefixes of metrics for which log lines have only `worst_of_layers`."""
  return tuple(f'{prefix}/' for prefix in _WORST_OF_LAYERS)


def worst_of_layers(values: Mapping[str, Any]) -> dict[str, float]:
  """Return the largest value over the layers by short name, for registered metrics that are not 0.

  Args:
    values: metric name to number.
  """
  found = {}
  for prefix, names in _WORST_OF_LAYERS.items():
    for short, metric in names.items():
      layers = []
      for name, value in values.items():
        is_of_layer = name.startswith(f'{prefix}/') and name.count('/') > 1
        if is_of_layer and name.endswith(f'/{metric}'):
          layers.append(float(np.asarray(value)))
      if worst := max(layers, default=0.0):
        found[short] = worst
  return found
