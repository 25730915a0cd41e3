"""Optax transformations as optimizers of this package.

`OptaxWrapper` turns a gradient transformation into an `OptimizerDef`. A transformation contains its learning rate, so
the trainer's has no effect on it, as in T5X; a function from a learning rate to a transformation takes the trainer's.
`factories` builds optax's optimizers from both forms.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import copy
import dataclasses
import functools
import logging
import re
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, T5xLiteError
from t5x_lite.optimizers.axes import names as _axes
from t5x_lite.optimizers.axes.rules import OptaxStatePartitionRules
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.base import state_hooks
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.optax_adapter import state_structure
from t5x_lite.optimizers.optax_adapter.param_scales import ScaleSupport
from t5x_lite.optimizers.optax_adapter.param_scales import scale_per_parameter
from t5x_lite.types import LogicalAxes, Params, PyTree

# Function with the arguments and result of `OptimizerDef.stacking_key`.
StackingKeyFn = Callable[[str, jax.Array, definition.OptimizerState], Hashable | None]


@struct.dataclass
class OptaxHyperParams:
  """Hyper-parameters of an update of an `OptaxWrapper`.

  Attributes:
    learning_rate: the trainer's rate; it has an effect only if the definition's `uses_learning_rate` is True.
  """

  learning_rate: Any = None


class OptaxWrapper(definition.OptimizerDef):
  """An optax gradient transformation as an `OptimizerDef`.

  Parameters and gradients of fewer than 32 bits are converted to float32 for optax, so that its statistics are float32
  (unless an option such as adam's `mu_dtype` sets the dtype); updated parameters keep their dtype. Parameters without
  elements are masked.

  Attributes:
    optax_optimizer: the transformation. When the learning rate is the trainer's, its `update` takes it as the keyword
      argument `learning_rate`.
    learning_rate_factory: function from a learning rate to the transformation, or None.
  """

  ACCEPTS_STACKED_LAYERS = True

  @checks.checks_arguments('OptaxWrapper')
  def __init__(
    self,
    optax_optimizer: optax.GradientTransformation | None = None,
    *,
    learning_rate_factory: Callable[[Any], optax.GradientTransformation] | None = None,
    owns_learning_rate: bool = False,
    own_learning_rate: Any = None,
    extra_args: Sequence[str] | None = None,
    parts: Sequence[definition.OptimizerDef] = (),
    clipping: Sequence[str] = (),
    rebuild: Callable[[LogicalAxes, Params | None], 'OptaxWrapper'] | None = None,
    unsupported_reason: str | None = None,
    is_elementwise: bool = False,
    stacking_key_fn: StackingKeyFn | None = None,
    scale_support: ScaleSupport | None = None,
    may_depend_on_layout: bool = True,
    name: str = 'OptaxWrapper',
  ):
    """Wrap a transformation, or a function that builds one from the trainer's learning rate.

    Args:
      optax_optimizer: transformation that contains its learning rate.
      learning_rate_factory: function from a learning rate (float32 scalar, a tracer in a compiled step) to the
        transformation. The structure of its state must not depend on the learning rate. Give exactly one of these two
        arguments.
      owns_learning_rate: True if the user gave `optax_optimizer` its learning rate, so that a second one in the trainer
        is an error. Otherwise the trainer's is ignored, with a warning in the log.
      own_learning_rate: learning rate in `optax_optimizer`, a number or a schedule, for the metrics and for checks by
        the trainer; None if it has none or if it is unknown.
      extra_args: names out of `EXTRA_ARGS` that the transformation's `update` takes. None means all of them for a
        `GradientTransformationExtraArgs`, which ignores unknown ones, and none of them for other transformations.
      parts: optimizers in the transformation.
      clipping: transformations in it that clip gradients, see `gradient_clipping`.
      rebuild: function from the logical axes of the parameters, and the parameters if they are known, to this optimizer
        for them, see `with_param_axes`; None if the axes do not matter.
      unsupported_reason: why the trainer cannot train with the optimizer, and the remedy; None if it can.
      is_elementwise: True if the update of an element of a parameter depends only on this element, its gradients and
        values of the entire tree such as a global norm. Then the parameters of equal layers may be stacked.
      stacking_key_fn: `stacking_key` of a transformation that updates stacked parameters layer by layer: a function of
        the same arguments. None means that such parameters are not supported, unless `is_elementwise` is True.
      scale_support: support of scales by parameter; None multiplies the updates, which is right if they are
        proportional to the learning rate and the state does not depend on it.
      may_depend_on_layout: False if the reason in `LAYOUT_DEPENDENT` does not apply to the options.
      name: name for messages.

    Raises:
      ConfigError: both transformation and factory or neither, or an invalid transformation.
    """
    given = {
      'optax_optimizer': optax_optimizer is not None,
      'owns_learning_rate': owns_learning_rate,
      'own_learning_rate': own_learning_rate is not None,
    }
    if learning_rate_factory is None:
      excluded = []
    else:
      excluded = [name for name in given if given[name]]
    if excluded or (learning_rate_factory is None and optax_optimizer is None):
      raise ConfigError(
        'OptaxWrapper takes either optax_optimizer, with its learning rate, or learning_rate_factory, got '
        f'{" and ".join(["learning_rate_factory", *excluded]) if excluded else "neither"}.'
      )
    if learning_rate_factory is not None:
      optax_optimizer = _with_learning_rate_argument(learning_rate_factory)
    if not isinstance(optax_optimizer, optax.GradientTransformation):
      if callable(optax_optimizer):
        remedy = 'Call the function first: OptaxWrapper(optax.adamw(...)).'
      else:
        remedy = ''
      if isinstance(optax_optimizer, OptaxWrapper):
        remedy = 'It is wrapped already.'
      else:
        remedy = remedy
      if isinstance(optax_optimizer, optax.MultiSteps):
        remedy = 'Pass its .gradient_transformation().'
      else:
        remedy = remedy
      raise checks.invalid(
        'OptaxWrapper',
        'optax_optimizer',
        'an optax gradient transformation',
        optax_optimizer,
        remedy,
      )
    self.optax_optimizer = optax_optimizer
    self.learning_rate_factory = learning_rate_factory
    self._owns_learning_rate = owns_learning_rate
    scalars.check_learning_rate(own_learning_rate, name)
    self._own_learning_rate = own_learning_rate
    self._unsupported_reason = unsupported_reason
    self._extra_args = _checked_extra_args(extra_args, optax_optimizer)
    self._parts = tuple(parts)
    self._clipping = tuple(clipping)
    self._rebuild = rebuild
    if is_elementwise:
      self._stacking_key_fn = lambda *_: 'elementwise'
    else:
      self._stacking_key_fn = stacking_key_fn
    self._scale_support = scale_support
    self._may_depend_on_layout = may_depend_on_layout
    self._name = name
    super().__init__(OptaxHyperParams())

  @property
  def name(self) -> str:
    """See base class; the name of the factory that made the optimizer."""
    return self._name

  @property
  def extra_args(self) -> tuple[str, ...]:
    """See base class. Most transformations take all values; a compiled step computes only those that are read."""
    return self._extra_args

  @property
  def uses_learning_rate(self) -> bool:
    """True if the trainer's learning rate has an effect; False if the transformation contains its learning rate."""
    return self.learning_rate_factory is not None

  @property
  def owns_learning_rate(self) -> bool:
    """See base class; False if it is unknown."""
    return self._owns_learning_rate

  @property
  def configured_learning_rates(self) -> dict[str, Any]:
    """See base class."""
    if self._own_learning_rate is None:
      return {}
    return {'learning_rate': self._own_learning_rate}

  def learning_rates(
    self, state: definition.OptimizerState, *, is_passed: bool
  ) -> dict[str, jax.Array]:
    """See base class; a schedule is evaluated at the transformation's own count of updates."""
    del is_passed  # no effect on the transformation's learning rate
    count = state_hooks.schedule_count_of(state.param_states)
    if count is None:
      count = state.step
    return scalars.learning_rates_at(self.configured_learning_rates, count)

  @property
  def unsupported_options(self) -> str | None:
    """Why the trainer cannot train with the options of this optimizer or of its parts; None if it can."""
    inner = (part.unsupported_options for part in self._parts if isinstance(part, OptaxWrapper))
    return self._unsupported_reason or next(filter(None, inner), None)

  def stacking_key(
    self, path: str, param: jax.Array, state: definition.OptimizerState
  ) -> Hashable | None:
    """See base class and the constructor."""
    if self._stacking_key_fn is None:
      return None
    if param.size == 0:  # masked, see `_Conversion`
      return 'empty'
    key = self._stacking_key_fn(path, param, state)
    if key is not None and self.param_scales:
      return (key, self.param_scales.of(path))
    return key

  @property
  def gradient_clipping(self) -> tuple[str, ...]:
    """See base class; those of the parts, and the argument `clipping` of the constructor."""
    of_parts = (name for part in self._parts for name in part.gradient_clipping)
    return tuple(dict.fromkeys([*self._clipping, *of_parts]))

  @property
  def has_weight_decay(self) -> bool:
    """See base class; False if it is unknown."""
    return self._scale_support is not None and self._scale_support.has_weight_decay

  def _for_param_scales(self, scales: ParamScales) -> 'OptaxWrapper':
    """See base class and the argument `scale_support` of the constructor."""
    if self._scale_support is not None:
      return self._scale_support.scale_fn(scales)

    def scaled(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
      return scale_per_parameter(lambda rate_scale, decay_scale: transformation, scales)

    new = copy.copy(self)
    factory = self.learning_rate_factory
    if factory is None:
      new.optax_optimizer = scaled(self.optax_optimizer)
    else:
      new.learning_rate_factory = lambda learning_rate: scaled(factory(learning_rate))
      new.optax_optimizer = _with_learning_rate_argument(new.learning_rate_factory)
    rebuild = self._rebuild
    if rebuild is not None:
      new._rebuild = lambda axes, params: rebuild(axes, params).with_param_scales(scales)
    return new

  def check_param_scales(self, params: Params) -> None:
    """See base class; optimizers in the transformation may have scales too."""
    super().check_param_scales(params)
    for part in self._parts:
      part.check_param_scales(params)

  @property
  def depends_on_axes(self) -> bool:
    """True if `with_param_axes` returns another definition, or warns."""
    overrides = type(self).set_param_axes is not OptaxWrapper.set_param_axes
    return self._rebuild is not None or overrides or self.depends_on_layout

  @property
  def depends_on_layout(self) -> bool:
    """See base class."""
    return self._may_depend_on_layout and super().depends_on_layout

  def _for_param_axes(
    self, param_logical_axes: LogicalAxes, params: Params | None
  ) -> 'OptaxWrapper':
    """Return the optimizer rebuilt for the axes."""
    if self._rebuild is None:
      return self
    return self._rebuild(param_logical_axes, params)

  def init_state(self, params: Params) -> definition.OptimizerState:
    """Return step 0 and the transformation's initial state; see `OptimizerDef.init_state`.

    Raises:
      ConfigError: the transformation does not fit the parameters, for instance because of a mask with another
        structure, or its updates change the structure of its state.
    """
    conversion = _Conversion(params)
    try:
      # Some transformations fail without parameters.
      if conversion.is_empty:
        param_states = optax.EmptyState()
      else:
        param_states = _as_state(self.optax_optimizer.init(conversion.to_optax(params)))
    except (TypeError, ValueError, AttributeError) as error:
      if isinstance(error, T5xLiteError):
        raise
      reason = str(error).partition('\n')[0].rstrip('.:')
      remedy = 'Correct its options; --debug shows the traceback.'
      if 'pytree' in reason:
        if isinstance(params, Mapping):
          names = f', which begins with {", ".join(map(str, params))}'
        else:
          names = ''
        remedy = (
          'A mask, labels or another tree in its options must have the structure of the parameters'
          f'{names}, or be a function from the parameters to such a tree.'
        )
      raise ConfigError(
        f'The optimizer {self.name} does not fit the parameters ({reason}). {remedy}'
      ) from error
    if not conversion.is_empty:
      param_states = state_structure.completed(
        param_states, params, self._update_for_shapes, self.name
      )
    # Copied, because dog, sam, lbfgs and others keep the given arrays, and no array can be donated twice.
    return definition.OptimizerState(
      step=jnp.zeros([], jnp.int32), param_states=jax.tree.map(jnp.copy, param_states)
    )

  def apply_gradient(
    self,
    hyper_params: OptaxHyperParams,
    params: Params,
    state: definition.OptimizerState,
    grads: Params,
    **extra_args: Any,
  ) -> tuple[Params, definition.OptimizerState]:
    """Make one update with the transformation; see `OptimizerDef.apply_gradient`.

    Raises:
      ConfigError: the learning rate or another value of the step that the transformation needs is missing, or an
        update has another shape or kind than its parameter.
    """
    conversion = _Conversion(params)
    next_step = state.step + 1
    if conversion.is_empty:
      return params, dataclasses.replace(state, step=next_step)
    optax_params = conversion.to_optax(params)
    optax_grads = conversion.to_optax(grads)
    updates, param_states = self._update(
      hyper_params, conversion, optax_params, state, optax_grads, extra_args
    )
    self._check_updates(optax_params, updates)
    state_structure.check(state.param_states, param_states, self.name)
    params = conversion.from_optax(optax.apply_updates(optax_params, updates))
    return params, definition.OptimizerState(step=next_step, param_states=param_states)

  def _update(
    self,
    hyper_params: OptaxHyperParams,
    conversion: '_Conversion',
    params: Params,
    state: definition.OptimizerState,
    grads: Params,
    extra_args: Mapping[str, Any],
  ) -> tuple[PyTree, PyTree]:
    """Return (updates, new `param_states`), given converted parameters and gradients."""
    passed = conversion.extra_args_to_optax(extra_args)
    rate = hyper_params.learning_rate
    if self.uses_learning_rate and rate is not None:
      value = scalars.value_at(rate, state.step)
      passed['learning_rate'] = jnp.asarray(value, jnp.float32)
    param_states = state_structure.keys_to_typed(state.param_states)
    try:
      updates, param_states = self.optax_optimizer.update(grads, param_states, params, **passed)
    except (TypeError, ValueError) as error:
      reason = str(error).partition('\n')[0].rstrip('.')
      if isinstance(error, T5xLiteError) or not re.search('keyword|must be provided', reason):
        raise
      raise ConfigError(
        f'The optimizer {self.name} failed: {reason}. Pass the values of the step that it needs to apply_gradient '
        '(such as value=loss), or list those that it accepts in OptaxWrapper(transformation, extra_args=...).'
      ) from error
    return updates, _as_state(param_states)

  def _update_for_shapes(self, params: Params, param_states: PyTree) -> tuple[Params, PyTree]:
    """Return the result of `_update` for tracing, with parameters as gradients and dummy values of the step."""

    def value_fn(params):
      return sum(jnp.sum(param.astype(jnp.float32)) for param in jax.tree.leaves(params))

    known = {
      'value': jnp.float32(0.0),
      'grad': params,
      'value_fn': value_fn,
      'obj_fn': value_fn,
      'grad_fn': lambda params, number: params,
    }
    conversion = _Conversion(params)
    step = jnp.zeros([], jnp.int32)
    optax_params = conversion.to_optax(params)
    return self._update(
      OptaxHyperParams(learning_rate=0.0),
      conversion,
      optax_params,
      definition.OptimizerState(step=step, param_states=param_states),
      optax_params,
      {name: known[name] for name in self.extra_args},
    )

  def _check_updates(self, params: Params, updates: Params) -> None:
    """Raise if an update has another shape than its parameter, which JAX would broadcast, or another kind of number."""

    def check(path: str, param: jax.Array, update: jax.Array) -> None:
      update = jnp.asarray(update)
      is_complex = jnp.issubdtype(update.dtype, jnp.complexfloating)
      kinds_differ = is_complex and not jnp.issubdtype(param.dtype, jnp.complexfloating)
      if update.shape != param.shape or kinds_differ or update.dtype == jnp.bool_:
        raise ConfigError(
          f'The optimizer {self.name} returned an update of shape {list(update.shape)} and dtype {update.dtype} for '
          f'the parameter {path!r} of shape {list(param.shape)} and dtype {param.dtype}. A transformation must '
          'return an update with the shape of the parameter, and real numbers for a real parameter.'
        )

    tree_utils.map_with_names(check, params, updates)

  def optional_states(self, state: definition.OptimizerState) -> dict[str, dict[str, Any]]:
    """See base class."""
    return state_hooks.optional_states(state.param_states)

  def restore_remedy(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """See base class; that of the first part with one."""
    remedies = (part.restore_remedy(stored, wanted) for part in self._parts)
    return next(filter(None, remedies), None)

  def metrics(self, state: definition.OptimizerState) -> dict[str, jax.Array]:
    """Return the metrics of the states of the transformation; see `register_state_metrics`."""
    return state_hooks.metrics_of(state.param_states)

  def report(self, values: Mapping[str, float]) -> list[str]:
    """See base class and `register_state_metrics`."""
    return state_hooks.report_of(values)

  def eval_params(self, params: Params, state: definition.OptimizerState) -> Params:
    """Return the parameters for evaluation; see `register_eval_params`."""
    return state_hooks.eval_params_of(params, state.param_states)

  def stored_params(self, state: definition.OptimizerState) -> dict[str, str]:
    """See base class."""
    return state_hooks.stored_params_of(state.param_states)

  def unsupported_reason(self, state: definition.OptimizerState) -> str | None:
    """See base class; the reason may be a part, for instance one that needs per-example gradients."""
    return self.unsupported_options or state_hooks.unsupported_reason_of(state.param_states)

  def derive_logical_axes(
    self, optimizer: definition.Optimizer, param_logical_axes: LogicalAxes
  ) -> definition.Optimizer:
    """Return the axes of the state by `OptaxStatePartitionRules`; see `OptimizerDef.derive_logical_axes`."""
    target_axes = _axes.match_logical_axes(optimizer.target, param_logical_axes)
    param_states = OptaxStatePartitionRules.derive_optax_logical_axes(
      optimizer.state.param_states, target_axes, optimizer.target
    )
    state_axes = definition.axes_of_state(param_states)
    _axes.check_logical_axes(optimizer.state, state_axes, 'the optax state')
    for line in state_hooks.descriptions_of(optimizer.state.param_states):
      log_once(line)
    return optimizer.replace(state=state_axes, target=target_axes)


@functools.cache
def log_once(message: str) -> None:
  """Log a message, but only once per process."""
  # Several parts of a program derive the axes of one state.
  logging.getLogger(__name__).info('%s', message)


def _with_learning_rate_argument(
  factory: Callable[[Any], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
  """Return a transformation that calls the factory in each update with the `learning_rate` of the update."""

  def init(params: PyTree) -> PyTree:
    return factory(0.0).init(params)

  def update(updates, state, params=None, *, learning_rate=None, **extra_args):
    if learning_rate is None:
      raise ConfigError(
        'An optimizer that uses the learning rate of the trainer was updated without a learning rate. Give the '
        'trainer a learning_rate_fn, or the optimizer a learning_rate. To join transformations use '
        'optimizers.chain([...]), which passes the learning rate on.'
      )
    transformation = optax.with_extra_args_support(factory(learning_rate))
    return transformation.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(init, update)


def _as_state(optax_state: PyTree) -> PyTree:
  """Return an optax state as arrays that can be saved, with dtypes that updates keep."""
  return jax.tree.map(_as_array, state_structure.keys_to_raw(optax_state))


def _as_array(leaf: Any) -> jax.Array:
  """Return an array or a number as an array without a weak dtype."""
  return jnp.asarray(leaf, jnp.asarray(leaf).dtype)


class _Conversion:
  """Conversion between the model's parameters and the parameters for optax.

  Optax gets float32 for narrower floats, and `optax.MaskedNode` for arrays without elements, on which some of its
  transformations fail.
  """

  def __init__(self, params: Params):
    self._params = jax.tree.map(_as_array, params)

  @property
  def is_empty(self) -> bool:
    """True if no parameter has elements."""
    return all(param.size == 0 for param in jax.tree.leaves(self._params))

  def to_optax(self, tree: PyTree) -> PyTree:
    """Return converted parameters, or a converted tree like them such as their gradients."""

    def convert(param, array):
      if param.size == 0:
        return optax.MaskedNode()
      array = _as_array(array)
      is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
      if is_narrow:
        return array.astype(jnp.float32)
      return array

    return jax.tree.map(convert, self._params, tree)

  def from_optax(self, tree: PyTree) -> PyTree:
    """Return the inverse of `to_optax`, in the dtypes of the parameters."""
    return jax.tree.map(
      lambda param, array: param if param.size == 0 else array.astype(param.dtype),
      self._params,
      tree,
    )

  def extra_args_to_optax(self, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return converted values of the step; functions take converted parameters and compute with the model's."""

    def value_of(fn):
      # Optax's line searches raise if `value_fn` does not accept these arguments.
      def value(params, *, obj_fn=None, grad_fn=None, learning_rate=None):
        del obj_fn, grad_fn, learning_rate
        return jnp.asarray(fn(self.from_optax(params)), jnp.float32)

      return value

    converted = {}
    for name, value in extra_args.items():
      match name:
        case 'value':
          converted[name] = jnp.asarray(value, jnp.float32)
        case 'grad':
          converted[name] = self.to_optax(value)
        case 'value_fn' | 'obj_fn':
          converted[name] = value_of(value)
        case 'grad_fn':
          converted[name] = lambda params, number, fn=value: self.to_optax(
            fn(self.from_optax(params), number)
          )
    return converted


def _checked_extra_args(
  names: Sequence[str] | None, transformation: optax.GradientTransformation
) -> tuple[str, ...]:
  if names is None:
    takes = isinstance(transformation, optax.GradientTransformationExtraArgs)
    if takes:
      return definition.EXTRA_ARGS
    return ()
  for name in names:
    checks.check(
      'OptaxWrapper', {'extra_args': name}, extra_args=checks.one_of(definition.EXTRA_ARGS)
    )
  return tuple(names)
