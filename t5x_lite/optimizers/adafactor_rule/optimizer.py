"""Adafactor with factor rules for the dims of parameters.

Reference: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
https://arxiv.org/abs/1804.04235 (numbers of algorithms and sections below are those of the paper).
"""

from collections.abc import Hashable, Mapping
import copy
import dataclasses
import functools
import re
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.adafactor_rule import factor_rules as rules_lib
from t5x_lite.optimizers.adafactor_rule import update as update_lib
from t5x_lite.optimizers.adafactor_rule.factor_rules import FactorDim
from t5x_lite.optimizers.adafactor_rule.factor_rules import HParamMap
from t5x_lite.optimizers.adafactor_rule.update import AdafactorHyperParams
from t5x_lite.optimizers.adafactor_rule.update import AdafactorParamState
from t5x_lite.optimizers.axes import names
from t5x_lite.optimizers.axes.units import Units
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.types import Array, LogicalAxes, Params

# Hyper-parameters that determine the structure of the state, which is fixed when the state is made.
_STRUCTURAL = ('factored', 'beta1', 'min_dim_size_to_factor', 'factor_map', 'logical_factor_rules')

_NOT_NEGATIVE = scalars.scalar(at_least=0)
_POSITIVE = scalars.scalar(above=0)
_OPTIONS = dict(
  multiply_by_parameter_scale=checks.instance((bool, HParamMap), 'a bool or an HParamMap'),
  beta1=scalars.scalar(at_least=0, below=1).or_none(),
  decay_rate=_NOT_NEGATIVE,
  step_offset=scalars.scalar(),
  clipping_threshold=_POSITIVE.or_none(),
  weight_decay_rate=_NOT_NEGATIVE.or_none(),
  min_dim_size_to_factor=scalars.scalar(at_least=0),
  epsilon1=_NOT_NEGATIVE,
  epsilon2=_NOT_NEGATIVE,
  dtype_momentum=scalars.FLOATING_DTYPE,
  factor_map=checks.instance((HParamMap, Mapping), 'an HParamMap').or_none(),
  weight_decay_rate_lr_exponent=_NOT_NEGATIVE.or_none(),
  global_norm_clip_threshold=_POSITIVE.or_none(),
  max_parameter_scale=_POSITIVE.or_none(),
)


class Adafactor(definition.OptimizerDef):
  """Adafactor (algorithms 4 and 5 of the paper) with factor rules, momentum, weight decay and clipping options.

  With g the gradient and t = step - step_offset + 1 (at least 1), one update of a parameter p is

    beta2 = 1 - t ** -decay_rate
    v = beta2 v + (1 - beta2) (g ** 2 + epsilon1)              kept as row and column means where factored
    u = g / sqrt(v)
    u = u / max(1, rms(u) / clipping_threshold)
    u = learning_rate * min(max(epsilon2, rms(p)), max_parameter_scale) * u
    m = beta1 m + (1 - beta1) u;  u = m
    p = p - u - weight_decay_rate * learning_rate ** weight_decay_rate_lr_exponent * p

  where rms is taken over all dims but the BATCH dims of a factor rule. Everything is computed in float32; the parameter
  keeps its dtype.

  A `learning_rate` passed to `apply_gradient` (the trainer's) replaces the configured one. T5X computes the same
  numbers, with these exceptions: before `step_offset`, where T5X has NaN, t is 1; `skip_nan_updates` treats infinities
  like NaN; `v_row` and `v_col` are sharded by the axes of their dims (T5X replicates them).
  """

  ACCEPTS_STACKED_LAYERS = True

  @checks.checks_arguments('Adafactor')
  def __init__(
    self,
    learning_rate: Any = None,
    factored: bool = True,
    multiply_by_parameter_scale: bool | HParamMap = True,
    beta1: float | None = None,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    clipping_threshold: float | None = 1.0,
    weight_decay_rate: float | None = None,
    min_dim_size_to_factor: int = 128,
    epsilon1: float = 1e-30,
    epsilon2: float = 1e-3,
    dtype_momentum: Any = jnp.float32,
    factor_map: HParamMap | Mapping[str, Any] | None = None,
    logical_factor_rules: Mapping[str, FactorDim | str] | None = None,
    weight_decay_rate_lr_exponent: float | None = None,
    global_norm_clip_threshold: float | None = None,
    max_parameter_scale: float | None = None,
    skip_nan_updates: bool | None = False,
  ):
    """Configure the optimizer.

    Args:
      learning_rate: number or schedule of the step, used if `apply_gradient` gets none. With
        `multiply_by_parameter_scale` it is relative to the parameters: 1e-2 to 1e-3 is usual. The paper's schedule of
        relative steps is `relative_step()`.
      factored: keep the second moments of matrices as row and column means; False keeps one number per element,
        whatever rules are given.
      multiply_by_parameter_scale: multiply the learning rate by the parameter's root mean square (section 8); a bool,
        or one per parameter path.
      beta1: momentum, in [0, 1); None means no momentum, which saves an array per parameter.
      decay_rate: exponent of the second moment's decay (section 7.2).
      step_offset: step at which the second moment's decay restarts, for fine-tuning.
      clipping_threshold: upper bound of the root mean square of an update before scaling (section 6), or None.
      weight_decay_rate: fraction of a parameter that each update subtracts; not multiplied by the learning rate.
      min_dim_size_to_factor: a matrix is factored if both of its dims have at least this size.
      epsilon1: added to squared gradients.
      epsilon2: lower bound for the parameter scale.
      dtype_momentum: dtype of the momentum.
      factor_map: factor rule by parameter path: a sequence of roles; `HEURISTIC_RULE`, or 'heuristic', for a rule by
        the sizes of the dims; or None for not factored.
      logical_factor_rules: role of a dim by its logical axis name; `with_param_axes` replaces `factor_map` by these
        rules.
      weight_decay_rate_lr_exponent: multiply `weight_decay_rate` (1 if it is None) by this power of the learning rate.
      global_norm_clip_threshold: upper bound of the Euclidean norm of all gradients, or None.
      max_parameter_scale: upper bound for the parameter scale, which keeps parameters from growing without bound.
      skip_nan_updates: keep the old value of each element of parameters and statistics whose new value is not finite.

    Raises:
      ConfigError: a value out of range or of the wrong type, or an option without effect.
    """
    options = dict(locals())
    scalars.check_learning_rate(learning_rate, 'Adafactor')
    checks.check('Adafactor', options, **_OPTIONS)
    has_momentum_dtype = jnp.dtype(dtype_momentum) != jnp.float32
    if not factored and factor_map is not None:
      raise ConfigError(
        '`Adafactor.factor_map` has no effect with factored=False. Remove one of them.'
      )
    for option, condition, other in (
      (
        'max_parameter_scale',
        multiply_by_parameter_scale is False and max_parameter_scale is not None,
        'multiply_by_parameter_scale=False',
      ),
      ('dtype_momentum', beta1 is None and has_momentum_dtype, 'beta1=None'),
    ):
      sentence = f'`Adafactor.{option}` has no effect with {other}.'
      if condition and not checks.log_for_t5x(sentence):
        raise ConfigError(f'{sentence} Remove one of them.')
    if logical_factor_rules is not None:
      logical_factor_rules = flax.core.freeze(
        {
          name: rules_lib.factor_name_to_factordim(role)
          for name, role in logical_factor_rules.items()
        }
      )
    if isinstance(factor_map, Mapping):
      factor_map = flax.core.freeze(dict(factor_map))
    self.dtype_momentum = jnp.dtype(dtype_momentum)
    super().__init__(
      AdafactorHyperParams(
        learning_rate=learning_rate,
        factored=factored,
        multiply_by_parameter_scale=multiply_by_parameter_scale,
        beta1=beta1,
        decay_rate=decay_rate,
        step_offset=step_offset,
        clipping_threshold=clipping_threshold,
        weight_decay_rate=weight_decay_rate,
        min_dim_size_to_factor=min_dim_size_to_factor,
        epsilon1=epsilon1,
        epsilon2=epsilon2,
        factor_map=factor_map,
        logical_factor_rules=logical_factor_rules,
        weight_decay_rate_lr_exponent=weight_decay_rate_lr_exponent,
        global_norm_clip_threshold=global_norm_clip_threshold,
        max_parameter_scale=max_parameter_scale,
        skip_nan_updates=skip_nan_updates,
      )
    )

  def __eq__(self, other: Any) -> bool:
    if self is other:
      return True
    return (
      type(other) is type(self)
      and self.hyper_params == other.hyper_params
      and self.dtype_momentum == other.dtype_momentum
      and self.update_options == other.update_options
      and self.param_scales == other.param_scales
    )

  def __hash__(self) -> int:
    hp = self.hyper_params
    return hash(
      (
        type(self),
        hp.factored,
        hp.beta1,
        hp.decay_rate,
        hp.step_offset,
        hp.min_dim_size_to_factor,
        hp.multiply_by_parameter_scale,
        self.dtype_momentum,
      )
    )

  @property
  def has_param_wise_state(self) -> bool:
    """True: the state has an `AdafactorParamState` at the path of each parameter."""
    return True

  @property
  def gradient_clipping(self) -> tuple[str, ...]:
    """See base class."""
    if self.hyper_params.global_norm_clip_threshold is None:
      return ()
    return ('Adafactor.global_norm_clip_threshold',)

  @property
  def has_weight_decay(self) -> bool:
    """True if parameters are decayed at a rate other than 0."""
    rate = self.hyper_params.weight_decay_rate
    if rate is None:
      return bool(self.hyper_params.weight_decay_rate_lr_exponent)
    return rate != 0

  @property
  def needs_learning_rate(self) -> bool:
    """True if no learning rate is configured."""
    return self.hyper_params.learning_rate is None

  @property
  def configured_learning_rates(self) -> dict[str, Any]:
    """See base class."""
    rate = self.hyper_params.learning_rate
    if rate is None:
      return {}
    return {'learning_rate': rate}

  def update_hyper_params(self, **hyper_param_overrides: Any) -> AdafactorHyperParams:
    """See base class; hyper-parameters that determine the structure of the state cannot be overridden."""
    hyper_params = super().update_hyper_params(**hyper_param_overrides)
    for name in _STRUCTURAL:
      if getattr(hyper_params, name) != getattr(self.hyper_params, name):
        raise ConfigError(
          f'`Adafactor.{name}` determines the structure of the state and cannot be overridden for an update. Set it '
          'in the definition of the optimizer.'
        )
    return hyper_params

  def init_param_state(self, param: Array, path: str) -> AdafactorParamState:
    """Return the zero statistics of one parameter.

    Args:
      param: the parameter, of which only the shape matters.
      path: its '/'-joined path.

    Returns:
      Float32 statistics of the shapes that the factor rule gives.
    """
    shape = np.shape(param)
    plan = self._plan(shape, path)
    v_row, v_col, v, m = (
      jnp.zeros([1], jnp.float32) for _ in range(4)
    )  # one array could be donated only once
    if plan.is_factored:
      v_row = jnp.zeros([shape[dim] for dim in plan.row_state_dims(len(shape))], jnp.float32)
      v_col = jnp.zeros([shape[dim] for dim in plan.col_state_dims(len(shape))], jnp.float32)
    else:
      v = jnp.zeros(shape, jnp.float32)
    if self.hyper_params.beta1 is not None:
      m = jnp.zeros(shape, self.dtype_momentum)
    return AdafactorParamState(v_row=v_row, v_col=v_col, v=v, m=m)

  def init_state(self, params: Params) -> definition.OptimizerState:
    """Return step 0 and an `AdafactorParamState` for each parameter."""
    return definition.OptimizerState(
      step=jnp.zeros([], jnp.int32),
      param_states=tree_utils.map_with_names(
        lambda path, param: self.init_param_state(param, path), params
      ),
    )

  def apply_param_gradient(
    self,
    step: Array,
    hyper_params: AdafactorHyperParams,
    param: Array,
    state: AdafactorParamState,
    grad: Array,
    path: str,
  ) -> tuple[Array, AdafactorParamState]:
    """Update one parameter.

    Args:
      step: int32 scalar, the number of updates made before this one.
      hyper_params: hyper-parameters of this update.
      param: the parameter, of any floating dtype.
      state: its statistics.
      grad: its gradient, of the same shape.
      path: its '/'-joined path.

    Returns:
      (new parameter, new statistics).

    Raises:
      ConfigError: neither this update nor the definition has a learning rate.
    """
    hp = hyper_params
    param = jnp.asarray(param)
    grad = jnp.asarray(grad)
    learning_rate = scalars.value_at(hp.learning_rate, step)
    if learning_rate is None:
      raise ConfigError(
        'Adafactor has no learning rate. Give the trainer a learning_rate_fn, or Adafactor a learning_rate.'
      )
    rate_scale, decay_scale = self.param_scales.of(path)
    if rate_scale != 1.0:
      learning_rate = learning_rate * rate_scale
    if decay_scale != 1.0:
      decay_rate = hp.weight_decay_rate
      if decay_rate is None:
        decay_rate = 1.0
      hp = dataclasses.replace(hp, weight_decay_rate=decay_scale * decay_rate)
    use_parameter_scale = hp.multiply_by_parameter_scale
    if isinstance(use_parameter_scale, HParamMap):
      use_parameter_scale = use_parameter_scale[path]
    return update_lib.update_param_traced_once(
      step,
      hp,
      learning_rate,
      param,
      state,
      grad,
      plan=self._plan(tuple(param.shape), path),
      use_parameter_scale=bool(use_parameter_scale),
    )

  def apply_gradient(
    self,
    hyper_params: AdafactorHyperParams,
    params: Params,
    state: definition.OptimizerState,
    grads: Params,
  ) -> tuple[Params, definition.OptimizerState]:
    """Make one update of all parameters; see `OptimizerDef.apply_gradient`."""
    named_params = list(tree_utils.named_leaves(params))
    treedef = jax.tree.structure(params)
    grad_leaves = treedef.flatten_up_to(grads)
    param_states = treedef.flatten_up_to(state.param_states)
    if hyper_params.global_norm_clip_threshold is not None:
      grad_leaves = update_lib.clip_by_global_norm(
        grad_leaves, hyper_params.global_norm_clip_threshold
      )
    updated = []
    for (path, param), param_state, grad in zip(
      named_params, param_states, grad_leaves, strict=True
    ):
      # All layers of a stacked parameter have the options of the first one, see `stacking_key`.
      first_path = layer_stacks.paths_of(path)[0]
      update = functools.partial(
        self.apply_param_gradient, state.step, hyper_params, path=first_path
      )
      if layer_stacks.is_stacked(path):
        update = jax.vmap(update)
      updated.append(update(param, param_state, grad))
    new_params = treedef.unflatten([param for param, _ in updated])
    new_param_states = treedef.unflatten([param_state for _, param_state in updated])
    return new_params, definition.OptimizerState(step=state.step + 1, param_states=new_param_states)

  def stacking_key(self, path: str, param: Array, state: definition.OptimizerState) -> Hashable:
    """See base class; the update of a parameter depends on its factorization and on whether its scale is used."""
    del state
    use_parameter_scale = self.hyper_params.multiply_by_parameter_scale
    if isinstance(use_parameter_scale, HParamMap):
      use_parameter_scale = use_parameter_scale[path]
    return (
      self._plan(tuple(param.shape), path),
      bool(use_parameter_scale),
      self.param_scales.of(path),
    )

  def _for_param_scales(self, scales: ParamScales) -> 'Adafactor':
    """See base class; updates read `param_scales`."""
    del scales
    return copy.copy(self)

  def gradient_evidence(self, grads: Params, new_state: definition.OptimizerState) -> Any:
    """See base class; returns the means of squared gradients over the columns, which are smaller than the gradients."""
    if self.hyper_params.skip_nan_updates:  # the means are always finite
      return grads
    # Sums over the layers: reductions of each array would be an eighth of the kernels of T5 small's step.
    sums: dict[Hashable, Array] = {}
    param_states = tree_utils.named_leaves(
      new_state.param_states, is_leaf=lambda x: isinstance(x, AdafactorParamState)
    )
    for path, param_state in param_states:
      for v in (param_state.v_row, param_state.v):
        key = re.sub(r'\d+', '', path), v.shape
        if key in sums:
          sums[key] = sums[key] + v
        else:
          sums[key] = v
    return list(sums.values())

  def _for_param_axes(self, param_logical_axes: LogicalAxes, params: Params | None) -> 'Adafactor':
    """Return the definition with the factor map for the logical axes, given `logical_factor_rules`.

    Raises:
      ConfigError: an axis name without a rule, or rules that do not define a factorisation.
    """
    del params
    rules = self.hyper_params.logical_factor_rules
    if rules is None or not self.hyper_params.factored:
      return self
    factor_map = {}
    for path, axes in tree_utils.named_leaves(param_logical_axes):
      factor_map[path] = rules_lib.factor_rule_of_axes(tuple(axes), rules, path)
    new = copy.copy(self)
    new.hyper_params = self.hyper_params.replace(factor_map=flax.core.freeze(factor_map))
    return new

  def _is_layout_dependent(self, path: str, units: Units) -> bool:
    """See base class; of other parameters the matrices and the root mean squares are those of the units."""
    if units.is_single:
      return False
    plan = self._plan(units.shape, path)
    hp = self.hyper_params
    # T5X's rule for a single matrix: its sizes decide.
    rule = None
    if hp.factored:
      rule = (FactorDim.NONE,) * len(units.unit_shape)
    unit_plan = rules_lib.plan_factorization(
      rule, units.unit_shape, path, hp.min_dim_size_to_factor
    )
    dims_of_units = tuple(sorted(dim for group in units.groups for dim in group))
    return plan.averaging_dims != dims_of_units or plan.is_factored != unit_plan.is_factored

  def derive_logical_axes(
    self,
    optimizer_state: definition.Optimizer | None = None,
    param_logical_axes: LogicalAxes | None = None,
    *,
    optimizer: definition.Optimizer | None = None,
  ) -> definition.Optimizer:
    """See `OptimizerDef.derive_logical_axes`; each statistic has the axes of its dims of the parameter.

    Args:
      optimizer_state: the optimizer, under the name that T5X has in this class.
      param_logical_axes: see `OptimizerDef.derive_logical_axes`.
      optimizer: the optimizer, under the name of all other classes; exactly one of the two.

    Raises:
      ConfigError: both or neither.
    """
    given = [value for value in (optimizer, optimizer_state) if value is not None]
    if len(given) != 1:
      raise ConfigError(
        '`Adafactor.derive_logical_axes` must get exactly one of optimizer and optimizer_state, which '
        'are two names of the same argument.'
      )
    (optimizer,) = given
    target_axes = names.match_logical_axes(optimizer.target, param_logical_axes)

    def derive(path: str, param: Array, axes: PartitionSpec) -> AdafactorParamState:
      plan = self._plan(np.shape(param), path)
      # Statistics that a plan does not use are empty arrays of one dim.
      state: dict[str, Any] = dict.fromkeys(('v_row', 'v_col', 'v', 'm'), PartitionSpec(None))
      if plan.is_factored:
        state['v_row'] = PartitionSpec(*(axes[dim] for dim in plan.row_state_dims(len(axes))))
        state['v_col'] = PartitionSpec(*(axes[dim] for dim in plan.col_state_dims(len(axes))))
      else:
        state['v'] = axes
      if self.hyper_params.beta1 is not None:
        state['m'] = axes
      return AdafactorParamState(**state)

    param_states = tree_utils.map_with_names(derive, optimizer.target, target_axes)
    state_axes = definition.axes_of_state(param_states)
    names.check_logical_axes(optimizer.state, state_axes, 'the Adafactor state')
    return optimizer.replace(state=state_axes, target=target_axes)

  def _plan(self, shape: tuple[int, ...], path: str) -> rules_lib.FactorPlan:
    """Return the factorisation of the parameter of this shape and path."""
    hp = self.hyper_params
    if not hp.factored:
      rule = None
    elif hp.factor_map is None:
      rule = rules_lib.HEURISTIC_RULE
    elif isinstance(hp.factor_map, HParamMap) or path in hp.factor_map:
      rule = hp.factor_map[path]
    else:
      raise ConfigError(
        f'Adafactor has no factor rule for the parameter {path!r}.{did_you_mean(path, hp.factor_map)} Call '
        '`with_param_axes` with the axes of all parameters and use the definition that it returns, or add the path '
        'to factor_map.'
      )
    return rules_lib.plan_factorization(rule, shape, path, hp.min_dim_size_to_factor)
