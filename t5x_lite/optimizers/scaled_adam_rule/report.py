"""Clipping in ScaledAdam by the median of recent gradient norms, and its reports.

The norm of a group's gradient weights each parameter's gradient by the parameter's root mean square, because updates
are scaled by it. The state contains small arrays for the reports, so that no step waits for the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.optimizers.scaled_adam_rule.groups import GroupOptions
from t5x_lite.optimizers.scaled_adam_rule.groups import GroupPlan
from t5x_lite.types import Array

# A step whose gradient is scaled by less is reported with its dominant parameter.
STRONG_CLIPPING = 0.1

_PREFIX = 'scaled_adam/'
_QUARTILES = ('min', 'quartile_1', 'median', 'quartile_3', 'max')


class DominantParameter(NamedTuple):
  """Parameter with the largest share of a step's gradient norm.

  The step is the last one, or a step whose gradient was scaled by less than 0.1: it is kept for
  `clipping_update_period` steps, or until the next such step, so that a later summary shows it.

  Attributes:
    step: int32 scalar, index of the step, from 0; -1 before the first.
    parameter: int32 scalar, index of the parameter in the order in which JAX flattens the tree.
    layer: int32 scalar, index in the batched dims of the parameter; -1 without such dims.
    clip_scale: float32 scalar, factor of the group's gradient in the step.
    share: float32 scalar, share of the parameter in the sum of squares of the group's gradients.
    sumsq: float32 scalar, the parameter's part of this sum, grad_sumsq * rms_squared.
    grad_sumsq: float32 scalar, sum of squares of the parameter's gradient.
    rms_squared: float32 scalar, square of the parameter's root mean square; 1 for a scalar.
  """

  step: Array
  parameter: Array
  layer: Array
  clip_scale: Array
  share: Array
  sumsq: Array
  grad_sumsq: Array
  rms_squared: Array


class ScaledAdamClipState(NamedTuple):
  """Clipping of one group.

  Attributes:
    model_norms: float32 [clipping_update_period], latest norms; that of step t is at t % clipping_update_period. -1 for
      steps before a resumed run got its `clipping_scale`.
    threshold: float32 scalar, norm above which gradients are scaled down; 0 in the first period, -1 after clipping was
      added to a run until there are norms of a full period.
    num_clipped: int32 scalar, number of clipped steps since the threshold was set.
    clip_scale: float32 scalar, factor of the last gradient.
    norm: float32 scalar, norm of the last gradient.
    quartiles: float32 [5], minimum, quartiles and maximum of the norms when the threshold was set.
    percent_clipped: float32 scalar, percentage of clipped steps in the period before the threshold was set.
    dominant: see `DominantParameter`; None without `show_dominant_parameters`.
  """

  model_norms: Array
  threshold: Array
  num_clipped: Array
  clip_scale: Array
  norm: Array
  quartiles: Array
  percent_clipped: Array
  dominant: DominantParameter | None


def init_clip_state(options: GroupOptions) -> ScaledAdamClipState:
  """Return the initial clipping state of a group with these options."""

  def zero(dtype=jnp.float32):
    return jnp.zeros([], dtype)

  dominant = None
  if options.show_dominant_parameters:
    dominant = DominantParameter(
      step=jnp.full([], -1, jnp.int32),
      parameter=zero(jnp.int32),
      layer=jnp.full([], -1, jnp.int32),
      clip_scale=jnp.ones([], jnp.float32),
      share=zero(),
      sumsq=zero(),
      grad_sumsq=zero(),
      rms_squared=zero(),
    )
  return ScaledAdamClipState(
    model_norms=jnp.zeros([options.clipping_update_period], jnp.float32),
    threshold=zero(),
    num_clipped=zero(jnp.int32),
    clip_scale=jnp.ones([], jnp.float32),
    norm=zero(),
    quartiles=jnp.zeros([5], jnp.float32),
    percent_clipped=zero(),
    dominant=dominant,
  )


def added_clip_state(shapes: ScaledAdamClipState) -> ScaledAdamClipState:
  """Return the clipping state of a group whose run had no clipping before it was resumed.

  Args:
    shapes: arrays or shapes of the state.

  Returns:
    The state, with NumPy arrays; gradients are not clipped until norms of a full period are known.
  """

  def full(leaf: Any, value: float) -> np.ndarray:
    return np.full(leaf.shape, value, leaf.dtype)

  initial = jax.tree.map(lambda leaf: full(leaf, 0), shapes)
  dominant = initial.dominant
  if dominant is not None:
    dominant = dominant._replace(
      step=full(dominant.step, -1),
      layer=full(dominant.layer, -1),
      clip_scale=full(dominant.clip_scale, 1),
    )
  return initial._replace(
    model_norms=full(shapes.model_norms, -1),
    threshold=full(shapes.threshold, -1),
    clip_scale=full(shapes.clip_scale, 1),
    dominant=dominant,
  )


def clip(
  plan: GroupPlan,
  state: ScaledAdamClipState,
  count: Array,
  grad_sumsq_U: Array,
  rms_squared_U: Array,
) -> tuple[Array, ScaledAdamClipState]:
  """Return the factor of the gradients of a group.

  Args:
    plan: the group, with a `clipping_scale` and U units, at least one.
    state: clipping state of the group.
    count: int32 scalar, number of updates made before this one. The first is neither clipped nor recorded.
    grad_sumsq_U: float32 [U], sums of squares of the gradients.
    rms_squared_U: float32 [U], squares of the root mean squares; 1 for scalars.

  Returns:
    (factor of the gradients, float32 scalar of at most 1; new state).
  """
  options = plan.options
  period = options.clipping_update_period
  sumsq_U = grad_sumsq_U * rms_squared_U
  total = jnp.sum(sumsq_U)
  norm = jnp.sqrt(total)
  is_recorded = count > 0
  is_this_step = (jnp.arange(period) == count % period) & is_recorded
  model_norms = jnp.where(is_this_step, norm, state.model_norms)

  # ---- Once per period: sorted norms and threshold. ----
  has_period = ~jnp.any(model_norms < 0)
  is_report = is_recorded & (count % period == 0) & has_period
  indices = np.array([min(period - 1, (period // 4) * n) for n in range(5)])
  quartiles = jax.lax.cond(
    is_report, lambda: jnp.sort(model_norms)[indices], lambda: state.quartiles
  )
  threshold = jnp.where(is_report, options.clipping_scale * quartiles[2], state.threshold)
  percent_clipped = jnp.where(
    is_report, state.num_clipped.astype(jnp.float32) * (100.0 / period), state.percent_clipped
  )
  num_clipped = jnp.where(is_report, 0, state.num_clipped)

  ratio = threshold / (norm + 1e-20)
  is_clipped = (count >= period) & (threshold >= 0) & (ratio < 1.0)  # never for NaN
  scale = jnp.where(is_clipped, ratio, 1.0)
  dominant = state.dominant
  if dominant is not None:
    latest = _dominant(plan, count, scale, grad_sumsq_U, rms_squared_U, sumsq_U, total)
    is_held = (
      (dominant.clip_scale < STRONG_CLIPPING)
      & (count - dominant.step < period)
      & (scale >= STRONG_CLIPPING)
    )
    dominant = jax.tree.map(lambda new, old: jnp.where(is_held, old, new), latest, dominant)
  return scale, ScaledAdamClipState(
    model_norms=model_norms,
    threshold=threshold,
    num_clipped=num_clipped + is_clipped.astype(jnp.int32),
    clip_scale=scale,
    norm=norm,
    quartiles=quartiles,
    percent_clipped=percent_clipped,
    dominant=dominant,
  )


def _dominant(
  plan: GroupPlan,
  count: Array,
  scale: Array,
  grad_sumsq_U: Array,
  rms_squared_U: Array,
  sumsq_U: Array,
  total: Array,
) -> DominantParameter:
  """Return the dominant parameter of this step."""
  parameters = plan.constants(lambda member: member.parameter_of_unit, np.int32)
  layers = plan.constants(lambda member: member.layer_of_unit, np.int32)
  largest = jnp.argmax(sumsq_U)
  return DominantParameter(
    step=count,
    parameter=jnp.asarray(parameters)[largest],
    layer=jnp.asarray(layers)[largest],
    clip_scale=scale,
    share=sumsq_U[largest] / jnp.maximum(total, np.finfo(np.float32).tiny),
    sumsq=sumsq_U[largest],
    grad_sumsq=grad_sumsq_U[largest],
    rms_squared=rms_squared_U[largest],
  )


def metrics_of(groups: Mapping[str, Any], count: Array) -> dict[str, Array]:
  """Return the metrics of groups with clipping, `scaled_adam/<label>/<metric>`; see `optimizers.scaled_adam`.

  Args:
    groups: label to `ScaledAdamGroupState`.
    count: int32 scalar, number of updates made.

  Returns:
    Name to float32 scalar.
  """
  metrics = {}
  for label, group in groups.items():
    if (clipping := group.clipping) is None:
      continue
    values = {
      name: getattr(clipping, name)
      for name in ('norm', 'clip_scale', 'threshold', 'percent_clipped')
    }
    values['threshold'] = jnp.maximum(clipping.threshold, 0)
    quartiles = _quartiles_so_far(clipping, count)
    values |= {f'norm_{name}': quartiles[i] for i, name in enumerate(_QUARTILES)}
    if clipping.dominant is not None:
      values |= {f'dominant/{name}': value for name, value in clipping.dominant._asdict().items()}
    metrics |= {
      f'{_PREFIX}{label}/{name}': value.astype(jnp.float32) for name, value in values.items()
    }
  return metrics


def _quartiles_so_far(clipping: ScaledAdamClipState, count: Array) -> Array:
  """Return the quartiles of the last full period or, in the first period, of all norms so far.

  Args:
    clipping: the clipping state after an update.
    count: int32 scalar, number of updates made, including this one.

  Returns:
    Float32 [5].
  """
  period = clipping.model_norms.shape[0]

  def until_now():
    # The first norm is not recorded; it is used until there is another.
    num_recorded = jnp.clip(count - 1, 0, period)
    norms = jnp.where(
      jnp.arange(period) < num_recorded, jnp.roll(clipping.model_norms, -1), jnp.inf
    )
    norms = jnp.maximum(norms, 0)
    norms = jnp.where(num_recorded == 0, clipping.norm, jnp.sort(norms))
    last = jnp.maximum(num_recorded - 1, 0)
    return norms[(last * jnp.arange(5)) // 4]

  # The first report is made in the update after `period` others.
  return jax.lax.cond(count > period, lambda: clipping.quartiles, until_now)


def report_of(values: Mapping[str, float], paths: Sequence[str] = ()) -> list[str]:
  """Return lines for the log: the quartiles, and the dominant parameter of a strongly clipped step.

  Args:
    values: result of `metrics_of` on the host; other names are ignored.
    paths: paths of the parameters in the order in which JAX flattens their tree; () if they are unknown.
  """
  groups: dict[str, dict[str, float]] = {}
  for name, value in values.items():
    if name.startswith(_PREFIX):
      label, what = name.removeprefix(_PREFIX).split('/', 1)
      groups.setdefault(label, {})[what] = value
  lines = []
  for label, group in groups.items():
    if group['threshold'] > 0:
      norms = ' '.join(f'{group[f"norm_{name}"]:.3e}' for name in _QUARTILES)
      lines.append(
        f'scaled_adam, group {label}: quartiles of the gradient norm {norms}, clipped above '
        f'{group["threshold"]:.3e}; {group["percent_clipped"]:.1f} % of the previous steps were clipped'
      )
    if group.get('dominant/clip_scale', 1) < STRONG_CLIPPING:
      lines.append(_dominant_line(label, group, paths))
  return lines


def _dominant_line(label: str, group: Mapping[str, float], paths: Sequence[str]) -> str:
  """Return the line for the parameter with the largest share of the norm."""
  number = int(group['dominant/parameter'])
  layer = int(group['dominant/layer'])
  if number < len(paths):
    name = paths[number]
  else:
    name = f'parameter {number} of the tree'
  if layer >= 0:
    name += f', layer {layer}'
  return (
    f'scaled_adam, group {label}: the gradient of step {group["dominant/step"]:.0f} was scaled by '
    f'{group["dominant/clip_scale"]:.3g}, and had {100 * group["dominant/share"]:.0f} % of its squared norm in {name}'
    f': {group["dominant/sumsq"]:.3e}, the sum of squares '
    f'{group["dominant/grad_sumsq"]:.3e} times the mean square of the parameter {group["dominant/rms_squared"]:.3e}'
  )
