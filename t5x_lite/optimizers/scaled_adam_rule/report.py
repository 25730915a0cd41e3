"""ScaledAdam's clipping by the median of recent gradient norms, and what it has to report.

The norm of a group's gradient counts each parameter's by that parameter's root mean square, since updates are scaled by
it. All that the reports need is kept in the state as small arrays, so that nothing waits for the device in a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.optimizers.scaled_adam_rule.groups import GroupOptions, GroupPlan
from t5x_lite.types import Array

# A step whose gradient is scaled by less is remembered for the report of the dominant parameter.
STRONG_CLIPPING = 0.1

_PREFIX = 'scaled_adam/'
_QUARTILES = ('min', 'quartile_1', 'median', 'quartile_3', 'max')


class DominantParameter(NamedTuple):
  """Which parameter had the largest share of a step's gradient norm.

  It is that of the last step; a step whose gradient was scaled by less than 0.1 is kept for `clipping_update_period`
  steps, or until the next such step, so that a summary written later still shows it.

  Attributes:
    step: int32 scalar, the step in question, from 0; -1 before the first.
    parameter: int32 scalar, its number in the order in which JAX flattens the tree of parameters.
    layer: int32 scalar, which of the parameters that its batched dims count; -1 if it has none.
    clip_scale: float32 scalar, by how much the gradient of the group was scaled in that step.
    share: float32 scalar, its share of the sum of squares of the group's gradients.
    sumsq: float32 scalar, what it adds to that sum, grad_sumsq * rms_squared.
    grad_sumsq: float32 scalar, sum of squares of its gradient.
    rms_squared: float32 scalar, square of its own root mean square; 1 for a scalar.
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
    model_norms: float32 [clipping_update_period], the latest norms; that of step t is at t % clipping_update_period.
    threshold: float32 scalar, the norm above which gradients are scaled down; 0 until there is one.
    num_clipped: int32 scalar, number of steps clipped since the threshold was set.
    clip_scale: float32 scalar, by how much the last gradient was scaled.
    norm: float32 scalar, norm of the last gradient.
    quartiles: float32 [5], the norms' least, quartiles and largest when the threshold was set.
    percent_clipped: float32 scalar, share of steps clipped in the period before that.
    dominant: see `DominantParameter`; None where it is not wanted.
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
  """Returns the clipping state of a group before its first step."""

  def zero(dtype=jnp.float32):
    return jnp.zeros([], dtype)

  dominant = None
  if options.show_dominant_parameters:
    dominant = DominantParameter(
        step=jnp.full([], -1, jnp.int32), parameter=zero(jnp.int32), layer=jnp.full([], -1, jnp.int32),
        clip_scale=jnp.ones([], jnp.float32), share=zero(), sumsq=zero(), grad_sumsq=zero(), rms_squared=zero())
  return ScaledAdamClipState(
      model_norms=jnp.zeros([options.clipping_update_period], jnp.float32), threshold=zero(),
      num_clipped=zero(jnp.int32), clip_scale=jnp.ones([], jnp.float32), norm=zero(),
      quartiles=jnp.zeros([5], jnp.float32), percent_clipped=zero(), dominant=dominant)


def clip(
    plan: GroupPlan, state: ScaledAdamClipState, count: Array, grad_sumsq_U: Array,
    rms_squared_U: Array) -> tuple[Array, ScaledAdamClipState]:
  """Decides by how much the gradients of a group are scaled.

  Args:
    plan: the group, which has a `clipping_scale` and U units, one at least.
    state: its clipping state.
    count: int32 scalar, number of updates made before this one. The first is neither clipped nor recorded.
    grad_sumsq_U: float32 [U], sums of squares of the gradients.
    rms_squared_U: float32 [U], squares of the root mean squares; 1 for scalars.

  Returns:
    (float32 scalar of at most 1 by which the gradients are to be multiplied, new state).
  """
  options = plan.options
  period = options.clipping_update_period
  sumsq_U = grad_sumsq_U * rms_squared_U
  total = jnp.sum(sumsq_U)
  norm = jnp.sqrt(total)
  is_recorded = count > 0
  is_here = (jnp.arange(period) == count % period) & is_recorded
  model_norms = jnp.where(is_here, norm, state.model_norms)

  # ---- Once a period: the norms in order, and from them the threshold. ----
  is_report = is_recorded & (count % period == 0)
  places = np.array([min(period - 1, (period // 4) * n) for n in range(5)])
  quartiles = jax.lax.cond(is_report, lambda: jnp.sort(model_norms)[places], lambda: state.quartiles)
  threshold = jnp.where(is_report, options.clipping_scale * quartiles[2], state.threshold)
  percent_clipped = jnp.where(
      is_report, state.num_clipped.astype(jnp.float32) * (100.0 / period), state.percent_clipped)
  num_clipped = jnp.where(is_report, 0, state.num_clipped)

  ratio = threshold / (norm + 1e-20)
  is_clipped = (count >= period) & (ratio < 1.0)  # never for NaN
  scale = jnp.where(is_clipped, ratio, 1.0)
  dominant = state.dominant
  if dominant is not None:
    latest = _dominant(plan, count, scale, grad_sumsq_U, rms_squared_U, sumsq_U, total)
    is_held = (dominant.clip_scale < STRONG_CLIPPING) & (count - dominant.step < period) & (scale >= STRONG_CLIPPING)
    dominant = jax.tree.map(lambda new, old: jnp.where(is_held, old, new), latest, dominant)
  return scale, ScaledAdamClipState(
      model_norms=model_norms, threshold=threshold, num_clipped=num_clipped + is_clipped.astype(jnp.int32),
      clip_scale=scale, norm=norm, quartiles=quartiles, percent_clipped=percent_clipped, dominant=dominant)


def _dominant(
    plan: GroupPlan, count: Array, scale: Array, grad_sumsq_U: Array, rms_squared_U: Array, sumsq_U: Array,
    total: Array) -> DominantParameter:
  """Returns the record of this step."""
  parameters = np.array([member.index for member in plan.members for _ in range(member.num_units)], np.int32)
  layers = np.array([layer if member.batch_dims else -1
                     for member in plan.members for layer in range(member.num_units)], np.int32)
  largest = jnp.argmax(sumsq_U)
  return DominantParameter(
      step=count, parameter=jnp.asarray(parameters)[largest], layer=jnp.asarray(layers)[largest], clip_scale=scale,
      share=sumsq_U[largest] / jnp.maximum(total, np.finfo(np.float32).tiny), sumsq=sumsq_U[largest],
      grad_sumsq=grad_sumsq_U[largest], rms_squared=rms_squared_U[largest])


def metrics_of(groups: Mapping[str, Any], count: Array) -> dict[str, Array]:
  """Returns the metrics of the groups that are clipped, `scaled_adam/<label>/<what>`; see `optimizers.scaled_adam`.

  Args:
    groups: label to `ScaledAdamGroupState`.
    count: int32 scalar, number of updates made.
  """
  metrics = {}
  for label, group in groups.items():
    if (clipping := group.clipping) is None:
      continue
    values = {name: getattr(clipping, name) for name in ('norm', 'clip_scale', 'threshold', 'percent_clipped')}
    quartiles = _quartiles_so_far(clipping, count)
    values |= {f'norm_{name}': quartiles[i] for i, name in enumerate(_QUARTILES)}
    if clipping.dominant is not None:
      values |= {f'dominant/{name}': value for name, value in clipping.dominant._asdict().items()}
    metrics |= {f'{_PREFIX}{label}/{name}': value.astype(jnp.float32) for name, value in values.items()}
  return metrics


def _quartiles_so_far(clipping: ScaledAdamClipState, count: Array) -> Array:
  """Returns the quartiles of the last full period; before the first has ended, those of the norms until now.

  Args:
    clipping: the clipping state after an update.
    count: int32 scalar, number of updates made, that one included.

  Returns:
    Float32 [5].
  """
  period = clipping.model_norms.shape[0]

  def until_now():
    # The first norm is not recorded; without any other it stands for all.
    num_recorded = jnp.clip(count - 1, 0, period)
    norms = jnp.where(jnp.arange(period) < num_recorded, jnp.roll(clipping.model_norms, -1), jnp.inf)
    norms = jnp.where(num_recorded == 0, clipping.norm, jnp.sort(norms))
    last = jnp.maximum(num_recorded - 1, 0)
    return norms[(last * jnp.arange(5)) // 4]

  # The first report comes in the update that follows `period` others.
  return jax.lax.cond(count > period, lambda: clipping.quartiles, until_now)


def report_of(values: Mapping[str, float], paths: Sequence[str] = ()) -> list[str]:
  """Returns lines for the log: the quartiles, and the dominant parameter of a step that was clipped strongly.

  Args:
    values: what `metrics_of` returned, on the host; other names are passed over.
    paths: paths of the parameters in the order in which JAX flattens their tree; () if they are not known.
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
          f'{group["threshold"]:.3e}; {group["percent_clipped"]:.1f} % of the steps before were clipped')
    if group.get('dominant/clip_scale', 1) < STRONG_CLIPPING:
      lines.append(_dominant_line(label, group, paths))
  return lines


def _dominant_line(label: str, group: Mapping[str, float], paths: Sequence[str]) -> str:
  """Returns the line about the parameter with the largest share of the norm."""
  number, layer = int(group['dominant/parameter']), int(group['dominant/layer'])
  name = paths[number] if number < len(paths) else f'parameter {number} of the tree'
  return (
      f'scaled_adam, group {label}: the gradient of step {group["dominant/step"]:.0f} was scaled by '
      f'{group["dominant/clip_scale"]:.3g}, and had {100 * group["dominant/share"]:.0f} % of its squared norm in {name}'
      f'{f", layer {layer}" if layer >= 0 else ""}: {group["dominant/sumsq"]:.3e}, the sum of squares '
      f'{group["dominant/grad_sumsq"]:.3e} times the mean square of the parameter {group["dominant/rms_squared"]:.3e}')
