"""ScaledAdam: Adam with steps relative to the size of each parameter, which also learns this size.

Reference: Yao et al. 2023, "Zipformer: A faster and better encoder for automatic speech recognition",
https://arxiv.org/abs/2310.11230, section on ScaledAdam. The method is Daniel Povey's, from the icefall toolkit, whose
results this module reproduces.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.layer_stacks import BATCH_AXES
from t5x_lite.optimizers.axes import names
from t5x_lite.optimizers.axes.rules import OptaxStatePartitionRules
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.base.state_hooks import register_optional_field
from t5x_lite.optimizers.base.state_hooks import register_schedule_count
from t5x_lite.optimizers.base.state_hooks import register_state_metrics
from t5x_lite.optimizers.optax_adapter.wrapper import OptaxWrapper
from t5x_lite.optimizers.scaled_adam_rule import groups as groups_lib
from t5x_lite.optimizers.scaled_adam_rule import report as report_lib
from t5x_lite.optimizers.scaled_adam_rule import sizes as sizes_lib
from t5x_lite.optimizers.scaled_adam_rule.groups import GroupOptions
from t5x_lite.types import Array, LogicalAxes, PyTree


class ScaledAdamState(NamedTuple):
  """State of ScaledAdam.

  Attributes:
    count: int32 scalar, number of updates made.
    delta: float32, tree like the parameters: last change of each, which contains the momentum.
    exp_avg_sq: float32, tree like the parameters: running mean of squared gradients.
    groups: label to `ScaledAdamGroupState`: sizes of parameters, and the state of clipping.
  """

  count: Array
  delta: PyTree
  exp_avg_sq: PyTree
  groups: dict[str, sizes_lib.ScaledAdamGroupState]


@checks.checks_arguments('scaled_adam')
def scaled_adam(
  learning_rate: Any = None,
  clipping_scale: float | None = None,
  betas: tuple[float, float] = (0.9, 0.98),
  scalar_lr_scale: float = 0.1,
  eps: float = 1e-8,
  param_min_rms: float = 1e-5,
  param_max_rms: float = 3.0,
  scalar_max: float = 10.0,
  size_update_period: int = 4,
  clipping_update_period: int = 100,
  show_dominant_parameters: bool = True,
  *,
  clip_scale_gradient_only: bool = False,
  param_labels: Any = None,
  group_options: Mapping[str, Mapping[str, Any]] | None = None,
  batch_axes: Sequence[str] = BATCH_AXES,
  batch_dims: Sequence[tuple[str, Any]] = (),
) -> OptaxWrapper:
  """Return ScaledAdam (Yao et al. 2023, https://arxiv.org/abs/2310.11230; Daniel Povey's, from the icefall toolkit).

  With g the gradient, rms(p) the root mean square of a parameter p, updated in the last step of each period of
  `size_update_period` steps, and t the number of steps from 1, an update is

    v = beta2 v + (1 - beta2) g ** 2
    a = -learning_rate * max(rms(p), param_min_rms) * g / (sqrt(v / (1 - beta2 ** t)) + eps)
    delta = beta1 delta + (1 - beta1) (a + s p)
    p = p + delta

  s, the step of the logarithm of the size, is 0 except in the last step of a period. In that step it is computed from
  the gradients h = sum(p * g) of the period, like Adam's step, with the rate learning_rate * scalar_lr_scale:

    w = beta2 ** period w + (1 - beta2 ** period) mean(h ** 2)
    s = -learning_rate * scalar_lr_scale * sqrt(1 - beta2 ** t) * sum(h) / (sqrt(w) + eps)

  except that s is 0 if rms(p) < param_min_rms, and -learning_rate * scalar_lr_scale * period if rms(p) is above
  param_max_rms. In a, 1 - beta2 ** t is replaced by 1 once it reaches 0.99. The update of a parameter of one element is
  a with the rate learning_rate * scalar_lr_scale and without rms; the parameter is clamped to
  [-scalar_max, scalar_max] before delta is added. All computations and states are float32.

  The update needs the parameters: `optax_optimizer.update(grads, state, params)`. A gradient of None means zero.
  Parameters are named by their paths instead of the original's `parameters_names`; parameters of equal shapes are not
  stacked, because this is slower on CPU.

  Args:
    learning_rate: number or schedule of the step (from 0); None means the trainer's. It is relative to the size of the
      parameters and much higher than for other optimizers: 0.03, the original's default, and decreasing.
    clipping_scale: gradients are scaled down to a norm of at most this times the median of recent norms (2.0 is usual);
      the norm weights each gradient by its parameter's root mean square. None means no clipping and no report. A
      resumed run may add, change or remove it; if it is added, clipping starts after a full period of norms.
    betas: decay per step of momentum and of squared gradients, 0 < betas[0] <= betas[1] < 1.
    scalar_lr_scale: factor on the learning rate for the sizes of parameters and for parameters of one element.
    eps: added to the roots in denominators.
    param_min_rms: root mean square below which a parameter's size is not changed, and lower bound of the scale of
      steps. The parameter itself may be smaller.
    param_max_rms: root mean square above which a parameter's size is decreased.
    scalar_max: upper bound of the absolute value of parameters of one element.
    size_update_period: number of steps between changes of sizes.
    clipping_update_period: number of norms in a median, and of steps between medians. Steps before step
      `clipping_update_period` are not clipped.
    show_dominant_parameters: report the parameter with the largest share of the norm, in metrics and log.
    clip_scale_gradient_only: use the clipped gradient only for the sizes of parameters, and the unclipped one for the
      rest of the update, like a bug in some versions of the original.
    param_labels: group of each parameter; every group is clipped separately. Either pairs (regular expression, label),
      of which the first that matches in a parameter's '/'-joined path applies ('default' if none does); or a tree of
      labels, where a label may replace a subtree; or a function from the parameters to such a tree.
    group_options: label to options of the group, with the names of the arguments from `learning_rate` to
      `clip_scale_gradient_only`; other options have the values given here. A group's learning rate replaces the
      trainer's.
    batch_axes: logical axes along which an array is a stack of separate parameters, so that stacked layers train like
      unstacked ones. The trainer passes the axes (`with_param_axes`); without them a stack is one parameter.
    batch_dims: the same by path, for parameters without logical axes: pairs (regular expression, dim or dims). If one
      matches, `batch_axes` is ignored.

  Returns:
    The optimizer; its `optax_optimizer` is the optax transformation. For each group with clipping it reports the
    metrics `optimizer/scaled_adam/<label>/<metric>`: `norm` and `clip_scale` of the last step; `threshold`,
    `norm_min`, `norm_quartile_1`, `norm_median`, `norm_quartile_3`, `norm_max` and `percent_clipped` of the last full
    period; `dominant/...`, the fields of `DominantParameter`. In the first period the norms are those of all steps so
    far, and `threshold` is 0. The log has the quartiles, and the dominant parameter of a step whose gradient was scaled
    by less than 0.1.

  Raises:
    ConfigError: a value out of range, an unknown option of a group, or an unknown or unused label.

  >>> optimizer = scaled_adam(0.03, clipping_scale=2.0, param_labels=(('bias$', 'biases'),),
  ...                         group_options={'biases': {'clipping_scale': 4.0}})
  >>> state = optimizer.optax_optimizer.init({'kernel': jnp.ones([2, 3]), 'bias': jnp.zeros([3])})
  >>> sorted(state.groups), state.delta['kernel'].shape, state.groups['biases'].param_rms.shape
  (['biases', 'default'], (2, 3), (1,))
  """
  defaults = GroupOptions(
    learning_rate=learning_rate,
    clipping_scale=clipping_scale,
    betas=betas,
    scalar_lr_scale=scalar_lr_scale,
    eps=eps,
    param_min_rms=param_min_rms,
    param_max_rms=param_max_rms,
    scalar_max=scalar_max,
    size_update_period=size_update_period,
    clipping_update_period=clipping_update_period,
    show_dominant_parameters=show_dominant_parameters,
    clip_scale_gradient_only=clip_scale_gradient_only,
  )
  groups = groups_lib.Groups(defaults, param_labels, group_options)
  return _ScaledAdamWrapper(groups, functools.partial(groups_lib.BatchDims, batch_axes, batch_dims))


class _ScaledAdamWrapper(OptaxWrapper):
  """ScaledAdam's transformation, with the paths of the parameters for the log."""

  ACCEPTS_STACKED_LAYERS = True

  def __init__(
    self,
    groups: groups_lib.Groups,
    make_batched: Callable[[LogicalAxes | None], groups_lib.BatchDims],
    param_logical_axes: LogicalAxes | None = None,
    scales: ParamScales = ParamScales(),
  ):
    batched = make_batched(param_logical_axes)
    self._make_scaled = lambda scales: _ScaledAdamWrapper(
      groups, make_batched, param_logical_axes, scales
    )
    # For `report`, whose values have only the indices of parameters.
    self._paths = tuple(path for path, _ in tree_utils.named_leaves(param_logical_axes or {}))
    self._reported: list[str] = []
    defaults = groups.options[groups_lib.DEFAULT_LABEL]

    def stacking_key(path: str, param: Array, state: definition.OptimizerState) -> Hashable:
      return groups.label_of(state.param_states.delta, path), batched.of(path, param.ndim)

    common = dict(
      rebuild=lambda axes, _: _ScaledAdamWrapper(groups, make_batched, axes, scales),
      name='scaled_adam',
      stacking_key_fn=stacking_key,
    )
    if defaults.learning_rate is None:
      super().__init__(
        learning_rate_factory=lambda rate: _transformation(rate, groups, batched, scales),
        extra_args=(),
        **common,
      )
    else:
      super().__init__(
        _transformation(defaults.learning_rate, groups, batched, scales),
        owns_learning_rate=True,
        own_learning_rate=defaults.learning_rate,
        **common,
      )
    self._clips = any(options.clipping_scale is not None for options in groups.options.values())
    self._group_rates = {
      f'scaled_adam/{label}/learning_rate': options.learning_rate
      for label, options in groups.options.items()
      if options.learning_rate is not defaults.learning_rate
    }

  @property
  def gradient_clipping(self) -> tuple[str, ...]:
    """See base class."""
    if self._clips:
      return ('scaled_adam.clipping_scale',)
    return ()

  def _for_param_scales(self, scales: ParamScales) -> '_ScaledAdamWrapper':
    """See base class; the learning rate is also that of a parameter's size."""
    return self._make_scaled(scales)

  @property
  def configured_learning_rates(self) -> dict[str, Any]:
    """See base class; learning rates of groups are `scaled_adam/<label>/learning_rate`."""
    return {**super().configured_learning_rates, **self._group_rates}

  def report(self, values: Mapping[str, float]) -> list[str]:
    """See base class; omits lines of the last call, because summaries may be more frequent than periods."""
    lines = report_lib.report_of(values, self._paths)
    new_lines = [line for line in lines if line not in self._reported]
    self._reported = lines
    return new_lines


def _transformation(
  learning_rate: Any, groups: groups_lib.Groups, batched: groups_lib.BatchDims, scales: ParamScales
) -> optax.GradientTransformation:
  """Return the transformation with `learning_rate` for the groups without one, and `scales` of all learning rates."""

  def zeros_like(params: PyTree) -> PyTree:
    return jax.tree.map(lambda param: jnp.zeros(param.shape, jnp.float32), params)

  def init(params: PyTree) -> PyTree:
    leaves = jax.tree.leaves(params)
    group_states = {}
    for plan in groups_lib.make_plans(params, groups, batched):
      group_states[plan.label] = sizes_lib.init_group(plan, leaves)
    return ScaledAdamState(
      count=jnp.zeros([], jnp.int32),
      delta=zeros_like(params),
      exp_avg_sq=zeros_like(params),
      groups=group_states,
    )

  def update(
    grads: PyTree, state: ScaledAdamState, params: PyTree | None = None
  ) -> tuple[PyTree, ScaledAdamState]:
    if params is None:
      raise ConfigError('scaled_adam needs the parameters. Call update(grads, state, params).')
    leaves, treedef = jax.tree.flatten(params)
    rate_scales = [scales.of(path)[0] for path, _ in tree_utils.named_leaves(params)]
    wide_params = [param.astype(jnp.float32) for param in leaves]
    wide_grads = []
    for grad, param in zip(treedef.flatten_up_to(grads), wide_params, strict=True):
      if grad is None:
        wide_grads.append(jnp.zeros_like(param))
      else:
        wide_grads.append(grad.astype(jnp.float32))
    updates = list(leaves)
    delta = treedef.flatten_up_to(state.delta)
    exp_avg_sq = treedef.flatten_up_to(state.exp_avg_sq)
    group_states = {}
    for plan in groups_lib.make_plans(params, groups, batched):
      rate = plan.options.learning_rate
      if rate is None:
        rate = learning_rate
      rate = scalars.value_at(rate, state.count)
      group_states[plan.label], factors = sizes_lib.update_group(
        plan, state.groups[plan.label], state.count, rate, wide_params, wide_grads
      )
      for member, of_member in zip(plan.members, factors, strict=True):
        i = member.index
        scale = rate_scales[i]
        if scale != 1.0:
          of_member = of_member._replace(adam=scale * of_member.adam, size=scale * of_member.size)
        update, delta[i], exp_avg_sq[i] = _update_param(
          plan.options,
          member.is_scalar,
          of_member,
          wide_params[i],
          wide_grads[i],
          delta[i],
          exp_avg_sq[i],
        )
        updates[i] = update.astype(leaves[i].dtype)
    new_state = ScaledAdamState(
      count=jnp.asarray(optax.safe_increment(state.count)),
      delta=treedef.unflatten(delta),
      exp_avg_sq=treedef.unflatten(exp_avg_sq),
      groups=group_states,
    )
    return treedef.unflatten(updates), new_state

  # Gradients are `updates` in optax's protocol.
  return optax.GradientTransformation(init, cast(optax.TransformUpdateFn, update))


def _update_param(
  options: GroupOptions,
  is_scalar: bool,
  factors: sizes_lib.UpdateFactors,
  param: Array,
  grad: Array,
  delta: Array,
  exp_avg_sq: Array,
) -> tuple[Array, Array, Array]:
  """Return (update, new delta, new mean of squared gradients) of one parameter, all float32 and of its shape."""
  beta1, beta2 = options.betas
  if factors.grad is not None:
    grad = factors.grad * grad
  # The parameter's shape: Adam's second moment; the factors have dims of size 1 where a unit has several elements.
  exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
  adam_step = factors.adam * grad / (jnp.sqrt(factors.correction * exp_avg_sq) + options.eps)
  if is_scalar:
    delta = beta1 * delta - adam_step
    clipped = jnp.clip(param, -options.scalar_max, options.scalar_max)
    return clipped - param + delta, delta, exp_avg_sq
  delta = beta1 * delta + factors.size * param - adam_step
  return delta, delta, exp_avg_sq


def _derive_axes(state: ScaledAdamState, params_axes: LogicalAxes) -> ScaledAdamState:
  """Return the parameters' axes for trees; the small states of groups are replicated."""
  axes = OptaxStatePartitionRules.derive_params_axes(state.delta, params_axes)
  return state._replace(
    count=PartitionSpec(),
    delta=axes,
    exp_avg_sq=axes,
    groups=jax.tree.map(names.unnamed_axes, state.groups),
  )


OptaxStatePartitionRules.register(ScaledAdamState, _derive_axes)
register_optional_field(sizes_lib.ScaledAdamGroupState, 'clipping', report_lib.added_clip_state)
register_schedule_count(ScaledAdamState, lambda state: state.count)
register_state_metrics(
  ScaledAdamState,
  lambda state: report_lib.metrics_of(state.groups, state.count),
  report=report_lib.report_of,
)
