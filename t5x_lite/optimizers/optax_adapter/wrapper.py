"""Optax transformations as optimizers of this package.

`OptaxWrapper` turns a gradient transformation into an `OptimizerDef`. A finished transformation has its learning rate
inside, so the trainer's has no effect on it, as in T5X; a function from a learning rate to a transformation takes the
trainer's. The factories of `factories` are made of the two.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, T5xLiteError, did_you_mean
from t5x_lite.optimizers.axes import names as _axes
from t5x_lite.optimizers.axes.rules import OptaxStatePartitionRules
from t5x_lite.optimizers.base import definition, state_hooks
from t5x_lite.optimizers.optax_adapter import state_structure, step_values
from t5x_lite.types import LogicalAxes, Params, PyTree


@struct.dataclass
class OptaxHyperParams:
  """What an update of an `OptaxWrapper` may override.

  Attributes:
    learning_rate: the trainer's rate; it has an effect if and only if the definition's `uses_learning_rate` is True.
  """

  learning_rate: Any = None


class OptaxWrapper(definition.OptimizerDef):
  """An optax gradient transformation as an `OptimizerDef`.

  Parameters and gradients of fewer than 32 bits are widened to float32 before optax sees them, so that its statistics
  are float32 (an explicit dtype option such as adam's `mu_dtype` still rules); parameters come back in their own dtype.
  Parameters without elements are kept from optax, as if masked.

  Attributes:
    optax_optimizer: the transformation. When the learning rate is the trainer's, its `update` takes it as the keyword
      argument `learning_rate`.
    learning_rate_factory: from a learning rate to the transformation, or None.
  """

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
      rebuild: Callable[[LogicalAxes, Params | None], 'OptaxWrapper'] | None = None,
      trainer_refusal: str | None = None,
      name: str = 'OptaxWrapper'):
    """Wraps a transformation, or a function that builds one from the trainer's learning rate.

    Args:
      optax_optimizer: a transformation that has its learning rate inside.
      learning_rate_factory: from a learning rate (float32 scalar, a tracer in a compiled step) to the transformation.
        The structure of its state must not depend on the rate. Exactly one of these two arguments is to be given.
      owns_learning_rate: whether the user gave `optax_optimizer` its learning rate by an option of that name, so that
        another one of the trainer's is refused at start. If not, the trainer's is ignored, and the log says so.
      own_learning_rate: the learning rate that `optax_optimizer` has inside, a number or a schedule, for the metrics
        and for the trainer to check; None if there is none or it is not known.
      extra_args: which of `EXTRA_ARGS` the transformation's `update` takes. None for all where it is a
        `GradientTransformationExtraArgs`, which takes what it needs and ignores the rest, and for none where it is not.
      parts: the optimizers that the transformation was made of.
      rebuild: from the logical axes of the parameters, and the parameters if they are known, to this optimizer for
        them, see `with_param_axes`; None if the axes do not matter.
      trainer_refusal: why the trainer cannot train with it, and what to do instead; None if it can.
      name: what people call it.

    Raises:
      ConfigError: both transformation and factory or neither, or a transformation that is none.
    """
    if (optax_optimizer is None) == (learning_rate_factory is None):
      raise ConfigError(
          'OptaxWrapper takes either a transformation or learning_rate_factory='
          f'..., got {"neither" if optax_optimizer is None else "both"}.')
    if learning_rate_factory is not None:
      if owns_learning_rate:
        raise ConfigError('OptaxWrapper got learning_rate_factory, which takes the learning rate of the trainer, and '
                          'owns_learning_rate=True, which says that there is one already; leave one of them out.')
      if own_learning_rate is not None:
        raise ConfigError('OptaxWrapper got learning_rate_factory, which takes the learning rate of the trainer, and '
                          'own_learning_rate; leave one of them out.')
      optax_optimizer = _with_learning_rate_argument(learning_rate_factory)
    if not isinstance(optax_optimizer, optax.GradientTransformation):
      hint = ' Call it first: OptaxWrapper(optax.adamw(...)).' if callable(optax_optimizer) else ''
      hint = ' It is wrapped already.' if isinstance(optax_optimizer, OptaxWrapper) else hint
      hint = ' Pass its .gradient_transformation().' if isinstance(optax_optimizer, optax.MultiSteps) else hint
      raise ConfigError(
          f'OptaxWrapper takes an optax gradient transformation, got {type(optax_optimizer).__name__}.{hint}')
    self.optax_optimizer = optax_optimizer
    self.learning_rate_factory = learning_rate_factory
    self._owns_learning_rate = owns_learning_rate
    definition.check_learning_rate(own_learning_rate, f'Optimizer {name}')
    self._own_learning_rate = own_learning_rate
    self._trainer_refusal = trainer_refusal
    self._extra_args = _checked_extra_args(extra_args, optax_optimizer)
    self._parts = tuple(parts)
    self._rebuild = rebuild
    self._name = name
    super().__init__(OptaxHyperParams())

  @property
  def name(self) -> str:
    """See base class; for a factory's product the factory's name."""
    return self._name

  @property
  def extra_args(self) -> tuple[str, ...]:
    """See base class. Most transformations take all and ignore what they do not need; a compiled step computes none."""
    return self._extra_args

  @property
  def uses_learning_rate(self) -> bool:
    """Whether the trainer's learning rate has an effect; False when the transformation has its own inside."""
    return self.learning_rate_factory is not None

  @property
  def owns_learning_rate(self) -> bool:
    """See base class; False for a transformation of which it is not known."""
    return self._owns_learning_rate

  @property
  def own_learning_rates(self) -> dict[str, Any]:
    """See base class."""
    return {} if self._own_learning_rate is None else {'learning_rate': self._own_learning_rate}

  def learning_rates(self, state: definition.OptimizerState, *, is_passed: bool) -> dict[str, jax.Array]:
    """See base class; a schedule is taken at the count of updates that the transformation itself keeps."""
    del is_passed  # It has no effect on a rate inside.
    count = state_hooks.schedule_count_of(state.param_states)
    return definition.learning_rates_at(self.own_learning_rates, state.step if count is None else count)

  @property
  def options_refusal(self) -> str | None:
    """Why the trainer cannot train with the options of this optimizer, or of one inside; None if it can."""
    inner = (part.options_refusal for part in self._parts if isinstance(part, OptaxWrapper))
    return self._trainer_refusal or next(filter(None, inner), None)

  @property
  def depends_on_axes(self) -> bool:
    """True if `with_param_axes` returns another definition."""
    return self._rebuild is not None or type(self).set_param_axes is not OptaxWrapper.set_param_axes

  def _for_param_axes(self, param_logical_axes: LogicalAxes, params: Params | None) -> 'OptaxWrapper':
    """Builds the transformation anew with the axes."""
    return self if self._rebuild is None else self._rebuild(param_logical_axes, params)

  def init_state(self, params: Params) -> definition.OptimizerState:
    """Returns step 0 and the transformation's initial state.

    Raises:
      ConfigError: the transformation does not fit the parameters, for instance a mask of another structure, or its
        updates change the structure of its state.
    """
    conversion = _Conversion(params)
    try:
      # Some transformations fail where there is nothing to update.
      param_states = optax.EmptyState() if conversion.is_empty else _as_state(
          self.optax_optimizer.init(conversion.to_optax(params)))
    except (TypeError, ValueError) as error:
      if isinstance(error, T5xLiteError):
        raise
      reason = str(error).partition('\n')[0].rstrip('.:')
      remedy = 'Correct its options; --debug shows where it fails.'
      if 'pytree' in reason:
        names = f', which begins with {", ".join(map(str, params))}' if isinstance(params, Mapping) else ''
        remedy = ('A mask, labels or another tree among its options must have the structure of the parameters'
                  f'{names}, or be a function that makes such a tree of them.')
      raise ConfigError(
          f'The optimizer {self.name} does not fit the parameters ({reason}). {remedy}') from error
    if not conversion.is_empty:
      param_states = state_structure.completed(param_states, params, self._update_for_shapes, self.name)
    # Copied: dog, sam, lbfgs and others keep the very arrays they were given, and no array can be donated twice.
    return definition.OptimizerState(step=jnp.zeros([], jnp.int32), param_states=jax.tree.map(jnp.copy, param_states))

  def apply_gradient(
      self, hyper_params: OptaxHyperParams, params: Params, state: definition.OptimizerState, grads: Params,
      **extra_args: Any) -> tuple[Params, definition.OptimizerState]:
    """Makes one update with the transformation; see `OptimizerDef.apply_gradient`.

    Raises:
      ConfigError: the learning rate is the trainer's, and none was passed; or the transformation needs a value of the
        step that was not passed.
    """
    if self.uses_learning_rate and hyper_params.learning_rate is None:
      raise ConfigError(
          f'The optimizer {self.name} takes the learning rate of the trainer, but none was passed; give the trainer a '
          'learning_rate_fn, or the optimizer a learning_rate.')
    conversion = _Conversion(params)
    next_step = state.step + 1
    if conversion.is_empty:
      return params, state.replace(step=next_step)
    optax_params, optax_grads = conversion.to_optax(params), conversion.to_optax(grads)
    updates, param_states = self._update(
        hyper_params, conversion, optax_params, state, optax_grads, extra_args)
    self._check_updates(optax_params, updates)
    state_structure.check(state.param_states, param_states, self.name)
    params = conversion.from_optax(optax.apply_updates(optax_params, updates))
    return params, definition.OptimizerState(step=next_step, param_states=param_states)

  def _update(
      self, hyper_params: OptaxHyperParams, conversion: '_Conversion', params: Params, state: definition.OptimizerState,
      grads: Params, extra_args: Mapping[str, Any]) -> tuple[Params, PyTree]:
    """Returns (updates, new `param_states`) of an update; parameters and gradients are converted already."""
    passed = conversion.extra_args_to_optax(extra_args)
    if self.uses_learning_rate:
      rate = hyper_params.learning_rate
      passed['learning_rate'] = jnp.asarray(rate(state.step) if callable(rate) else rate, jnp.float32)
    param_states = state_structure.keys_to_typed(state.param_states)
    try:
      updates, param_states = self.optax_optimizer.update(grads, param_states, params, **passed)
    except (TypeError, ValueError) as error:
      if not isinstance(error, T5xLiteError):
        self._explain_arguments(error, grads, param_states, params, passed)
      raise
    return updates, _as_state(param_states)

  def _update_for_shapes(self, params: Params, param_states: PyTree) -> tuple[Params, PyTree]:
    """Returns `_update` with stand-ins for gradients and values of the step, for tracing."""
    value_fn = lambda params: sum(jnp.sum(param.astype(jnp.float32)) for param in jax.tree.leaves(params))
    known = {'value': jnp.float32(0.0), 'grad': params, 'value_fn': value_fn, 'obj_fn': value_fn,
             'grad_fn': lambda params, number: params}
    conversion, step = _Conversion(params), jnp.zeros([], jnp.int32)
    optax_params = conversion.to_optax(params)
    return self._update(
        OptaxHyperParams(learning_rate=0.0), conversion, optax_params,
        definition.OptimizerState(step=step, param_states=param_states), optax_params,
        {name: known[name] for name in self.extra_args})

  def _explain_arguments(
      self, error: Exception, grads: Params, param_states: PyTree, params: Params, passed: Mapping[str, Any]) -> None:
    """Raises what helps if the update failed for a value of the step that is missing, or that it does not take."""
    fixed = {name: value for name, value in passed.items() if name not in definition.EXTRA_ARGS}
    given = {name: value for name, value in passed.items() if name in definition.EXTRA_ARGS}

    def try_update(**values):
      return self.optax_optimizer.update(grads, param_states, params, **fixed, **values)[0]

    if missing := step_values.missing_values(try_update, given, definition.EXTRA_ARGS, grads):
      values = {'value': 'loss', 'grad': 'grads', 'value_fn': 'loss_fn', 'obj_fn': 'loss_fn', 'grad_fn': 'grad_fn'}
      call = ', '.join(f'{name}={values[name]}' for name in missing)
      raise ConfigError(
          f'The optimizer {self.name} needs {" and ".join(missing)} at every update, and did not get it. The trainer '
          f'passes it of its own; in a loop of your own write optimizer.apply_gradient(grads, {call}), with the loss '
          'that the gradients are of, or a function from the parameters to it. Optimizers that combine several must '
          'pass it on.') from error
    if surplus := step_values.surplus_value(try_update, given):
      raise ConfigError(
          f'A transformation in the optimizer {self.name} does not take {surplus}, which it ought to take and '
          'ignore; say what it takes, for instance OptaxWrapper(transformation, extra_args=()).') from error

  def _check_updates(self, params: Params, updates: Params) -> None:
    """Refuses updates of other shapes than the parameters', which JAX would broadcast, or of numbers they cannot take.

    Raises:
      ConfigError: naming the parameter.
    """
    if jax.tree.structure(params) != jax.tree.structure(updates):
      raise ConfigError(
          f'The optimizer {self.name} returned updates of the structure {jax.tree.structure(updates)}, but the '
          f'parameters have {jax.tree.structure(params)}. A transformation must return one update for each parameter.')
    for (path, param), update in zip(
        tree_utils.named_leaves(params), map(jnp.asarray, jax.tree.leaves(updates)), strict=True):
      is_complex = jnp.issubdtype(update.dtype, jnp.complexfloating)
      kinds_differ = is_complex and not jnp.issubdtype(param.dtype, jnp.complexfloating)
      if update.shape != param.shape or kinds_differ or update.dtype == jnp.bool_:
        raise ConfigError(
            f'The optimizer {self.name} returned an update of shape {list(update.shape)} and dtype {update.dtype} for '
            f'the parameter {path!r} of shape {list(param.shape)} and dtype {param.dtype}. A transformation must '
            'return one number of the same kind for each element; the gradients that it got may have another shape.')

  def metrics(self, state: definition.OptimizerState) -> dict[str, jax.Array]:
    """Returns what the states inside have to tell; see `register_state_metrics`."""
    return state_hooks.metrics_of(state.param_states)

  def report(self, values: Mapping[str, float]) -> list[str]:
    """See base class and `register_state_metrics`."""
    return state_hooks.report_of(values)

  def eval_params(self, params: Params, state: definition.OptimizerState) -> Params:
    """Returns the parameters to evaluate with; see `register_eval_params`."""
    return state_hooks.eval_params_of(params, state.param_states)

  def trainer_refusal(self, state: definition.OptimizerState) -> str | None:
    """See base class; a transformation inside may be the reason, for instance one that wants other gradients."""
    return self.options_refusal or state_hooks.trainer_refusal_of(state.param_states)

  def derive_logical_axes(
      self, optimizer: definition.Optimizer, param_logical_axes: LogicalAxes) -> definition.Optimizer:
    """Derives the axes of the state by `OptaxStatePartitionRules`; see `OptimizerDef.derive_logical_axes`."""
    target_axes = _axes.match_logical_axes(optimizer.target, param_logical_axes)
    state_axes = definition.OptimizerState(
        step=PartitionSpec(),
        param_states=OptaxStatePartitionRules.derive_optax_logical_axes(
            optimizer.state.param_states, target_axes, optimizer.target))
    _axes.check_logical_axes(optimizer.state, state_axes, 'the optax state')
    return optimizer.replace(state=state_axes, target=target_axes)


def _with_learning_rate_argument(
    factory: Callable[[Any], optax.GradientTransformation]) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that builds itself anew at each update from the `learning_rate` it is passed."""

  def init(params: Params) -> PyTree:
    return factory(0.0).init(params)

  def update(updates, state, params=None, *, learning_rate=None, **extra_args):
    if learning_rate is None:
      raise ConfigError(
          'A transformation that takes the learning rate of the trainer was wrapped without it; give it a '
          'learning_rate of its own, or join it with others by optimizers.chain([...]), which passes the rate on.')
    return optax.with_extra_args_support(factory(learning_rate)).update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(init, update)


def _as_state(optax_state: PyTree) -> PyTree:
  """Returns an optax state as arrays that can be saved, and whose types stay the same from the first update on."""

  def convert(name: str, leaf: Any) -> jax.Array:
    try:
      return _as_array(leaf)
    except (TypeError, ValueError):
      raise ConfigError(
          f'An optax state holds a {type(leaf).__name__} at {name!r}, which is not an array and not a container of '
          'arrays for JAX. Use a dict or a named tuple, or register its class with jax.tree_util.') from None

  return tree_utils.map_with_names(convert, state_structure.keys_to_raw(optax_state))


def _as_array(leaf: Any) -> jax.Array:
  """Returns an array or a number as an array whose dtype is no weak one."""
  return jnp.asarray(leaf, jnp.asarray(leaf).dtype)


class _Conversion:
  """Between parameters as the model has them and as optax gets them.

  Optax sees float32 in the place of narrower floats, and nothing of arrays without elements, over which some of its
  transformations stumble: there `optax.MaskedNode` stands, as behind a mask.
  """

  def __init__(self, params: Params):
    self._params = jax.tree.map(_as_array, params)

  @property
  def is_empty(self) -> bool:
    """Whether there is nothing to update."""
    return all(param.size == 0 for param in jax.tree.leaves(self._params))

  def to_optax(self, tree: PyTree) -> PyTree:
    """Converts parameters, or a tree like them such as their gradients."""

    def convert(param, array):
      if param.size == 0:
        return optax.MaskedNode()
      array = _as_array(array)
      is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
      return array.astype(jnp.float32) if is_narrow else array

    return jax.tree.map(convert, self._params, tree)

  def from_optax(self, tree: PyTree) -> PyTree:
    """Inverse of `to_optax`, in the dtypes of the parameters."""
    return jax.tree.map(lambda param, array: param if param.size == 0 else array.astype(param.dtype),
                        self._params, tree)

  def extra_args_to_optax(self, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Converts values of the step; functions then take converted parameters, and compute with the model's."""

    def value_of(fn):
      # Optax's line searches refuse arguments beside their own that `value_fn` does not take.
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
          converted[name] = lambda params, number, fn=value: self.to_optax(fn(self.from_optax(params), number))
    return converted


def _checked_extra_args(names: Sequence[str] | None, transformation: optax.GradientTransformation) -> tuple[str, ...]:
  if names is None:
    takes = isinstance(transformation, optax.GradientTransformationExtraArgs)
    return definition.EXTRA_ARGS if takes else ()
  for name in names:
    if name not in definition.EXTRA_ARGS:
      raise ConfigError(f'OptaxWrapper: extra_args names {name!r}; expected names out of {definition.EXTRA_ARGS}.'
                        f'{did_you_mean(name, definition.EXTRA_ARGS)}')
  return tuple(names)
