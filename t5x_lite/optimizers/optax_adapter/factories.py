"""Factories of optax's optimizers, with optax's names and arguments; each returns an `OptaxWrapper`.

Learning rates:

* With `learning_rate`, a number or an optax schedule, an optimizer uses this, and the trainer must have none.
* Without it, or with None, the optimizer takes the trainer's, whatever optax's default is (1.0 for `prodigy`).
* `lbfgs` and `polyak_sgd` compute their step size; without a learning rate they ignore the trainer's.
* `rprop` requires a number: the initial step size, a part of its state.
* Factories with other optimizers as arguments (`chain`, `mechanize`, `sam`, `schedule_free`, ...) accept optax
  transformations and optimizers of this package; if one of them takes the trainer's learning rate, the result does too.

Optimizers that need the loss, or a function that computes it, get it from the trainer: see `OptimizerDef.extra_args`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import optax
import optax.contrib

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.base import scalars
from t5x_lite.optimizers.base.param_scales import OWNER
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.optax_adapter import calls
from t5x_lite.optimizers.optax_adapter import constructors
from t5x_lite.optimizers.optax_adapter import option_checks
from t5x_lite.optimizers.optax_adapter import param_scales
from t5x_lite.optimizers.optax_adapter.param_scales import Scaling
from t5x_lite.optimizers.optax_adapter.per_unit import norm_per_unit
from t5x_lite.optimizers.optax_adapter.per_unit import per_unit
from t5x_lite.optimizers.optax_adapter.wrapper import OptaxWrapper
from t5x_lite.optimizers.optax_adapter.wrapper import StackingKeyFn

_RATE = calls.RATE
# Function from arguments by name to the reason why the trainer cannot train with them, or None.
UnsupportedReasonFn = Callable[[Mapping[str, Any]], str | None]
# Function from arguments by name to True if updates with them depend on the layout of the parameters.
IsLayoutDependentFn = Callable[[Mapping[str, Any]], bool]
# Arguments of constructors that are optimizers.
_INNER_OPTIMIZERS = {'base_optimizer', 'inner', 'optimizer', 'adv_optimizer'}


def wrap_optax_optimizer(
  optax_optimizer: Callable[..., optax.GradientTransformation],
  *,
  takes_learning_rate: bool = False,
  unsupported_reason_fn: UnsupportedReasonFn | None = None,
  stacking_key_fn: StackingKeyFn | None = None,
  units_fn: calls.UnitsFn | None = None,
  is_layout_dependent_fn: IsLayoutDependentFn | None = None,
  scaling: Scaling = Scaling(),
) -> Callable[..., OptaxWrapper]:
  """Turn a constructor of optax transformations into one of `OptaxWrapper`s.

  Args:
    optax_optimizer: the constructor. Where it takes transformations, or lists or dicts of them, the wrapped one also
      takes `OptaxWrapper`s.
    takes_learning_rate: make the constructor's argument `learning_rate` optional; without it, or with None, the
      optimizer takes the trainer's.
    unsupported_reason_fn: from the arguments of a call, by name, to the reason why the trainer cannot train with them,
      with the remedy, or to None.
    stacking_key_fn: see `OptaxWrapper`.
    units_fn: `per_unit` if the update of an array depends on all of it, and on no other array, so that layers and
      experts in one array should be updated as arrays of their own; None if they are updated as they are.
    is_layout_dependent_fn: from the arguments of a call, by name, to True if the reason in `LAYOUT_DEPENDENT` holds for
      them; None if it applies to all calls of an optimizer in the table.
    scaling: how learning rate and weight decay are scaled by parameter; by default updates are multiplied for the one,
      and options with the names in `param_scales.WEIGHT_DECAYS` for the other.

  Returns:
    A function with the arguments and documentation of `optax_optimizer`. It raises ConfigError for unknown or missing
    arguments and for an invalid learning rate.

  Raises:
    ConfigError: `takes_learning_rate` is True, but the constructor has no argument `learning_rate`.

  >>> import optax
  >>> wrap_optax_optimizer(optax.sgd)(0.1).uses_learning_rate
  False
  >>> wrap_optax_optimizer(optax.sgd, takes_learning_rate=True)(momentum=0.9).uses_learning_rate
  True
  """
  name = _function_of(optax_optimizer).__name__
  parameters = inspect.signature(optax_optimizer).parameters
  if takes_learning_rate and _RATE not in parameters:
    raise ConfigError(
      f'takes_learning_rate=True needs an argument {_RATE!r}; {name} has {list(parameters)}.'
    )
  owner = 'unknown'
  if takes_learning_rate:
    owner = 'trainer'
  return _wrap(
    optax_optimizer,
    owner,
    unsupported_reason_fn=unsupported_reason_fn,
    stacking_key_fn=stacking_key_fn,
    units_fn=units_fn,
    is_layout_dependent_fn=is_layout_dependent_fn,
    checks_options=False,
    scaling=scaling,
  )


def _wrap(
  optax_optimizer: Callable[..., optax.GradientTransformation],
  owner: str,
  name: str | None = None,
  *,
  unsupported_reason_fn: UnsupportedReasonFn | None = None,
  checks_options: bool = True,
  is_elementwise: bool = False,
  stacking_key_fn: StackingKeyFn | None = None,
  units_fn: calls.UnitsFn | None = None,
  is_layout_dependent_fn: IsLayoutDependentFn | None = None,
  scaling: Scaling = Scaling(),
) -> Callable[..., OptaxWrapper]:
  """Wrap a constructor.

  Args:
    optax_optimizer: the constructor.
    owner: meaning of its argument `learning_rate`: 'trainer', None means the trainer's; 'optimizer', never the
      trainer's; 'start', the initial step size of the optimizer; 'unknown', an argument like all others.
    name: name of the factory; the constructor's by default.
    unsupported_reason_fn: see `wrap_optax_optimizer`.
    checks_options: check the options by `option_checks`, as is right for optax's own constructors.
    is_elementwise: see `OptaxWrapper`; ignored if the user gives a mask, which may depend on dims.
    stacking_key_fn: see `OptaxWrapper`.
    units_fn: see `wrap_optax_optimizer`; ignored if the user gives numbers of dims, which are those of arrays.
    is_layout_dependent_fn: see `wrap_optax_optimizer`.
    scaling: see `wrap_optax_optimizer`.
  """
  name = name or _function_of(optax_optimizer).__name__
  signature, annotations = _wrapped_signature(
    optax_optimizer,
    takes_learning_rate=owner == 'trainer',
  )
  if checks_options:
    # The errors of `option_checks` are clearer than gin's, which show annotations of all kinds of arrays.
    checked = {key for key in annotations if option_checks.has_check(name, key)}
    annotations = {key: value for key, value in annotations.items() if key not in checked}

  @functools.wraps(optax_optimizer)
  def wrapped(*args: Any, **kwargs: Any) -> OptaxWrapper:
    bound = checks.bind_arguments(name, signature, args, kwargs)
    given_rate = bound.arguments.get(_RATE)
    if owner != 'unknown':
      scalars.check_learning_rate(given_rate, name)
    if checks_options:
      option_checks.check_options(name, bound.arguments)
    for part in calls.wrapped_in(bound.arguments):
      part.update_options.check_part(name)
    for key in _INNER_OPTIMIZERS & set(bound.arguments):
      _check_inner(name, key, bound.arguments[key])
    reason = None
    if unsupported_reason_fn is not None:
      reason = unsupported_reason_fn(bound.arguments)
    units_fn_of_call = units_fn
    if bound.arguments.get('weight_dimension_numbers') is not None:
      units_fn_of_call = None
    may_depend_on_layout = is_layout_dependent_fn is None or is_layout_dependent_fn(bound.arguments)
    has_mask = any('mask' in key and value is not None for key, value in bound.arguments.items())
    return calls.Call(
      constructor=optax_optimizer,
      factory=wrapped,
      name=name,
      bound=bound,
      scaling=scaling,
      rate_owner=owner,
      options=dict(
        unsupported_reason=reason,
        is_elementwise=is_elementwise and not has_mask,
        stacking_key_fn=stacking_key_fn,
        may_depend_on_layout=may_depend_on_layout,
      ),
      units_fn=units_fn_of_call,
    ).wrapper()

  wrapped.__name__ = wrapped.__qualname__ = name
  # A constructor of a user stays the user's; those of optax are functions of this module.
  wrapped.__module__ = __name__ if checks_options else _function_of(optax_optimizer).__module__
  wrapped.__doc__ = _without_examples(optax_optimizer)
  # Shown by help() and gin: the constructor's arguments, with None as default of the learning rate.
  wrapped.__annotations__ = {**annotations, 'return': OptaxWrapper}
  function: Any = wrapped
  function.__signature__ = signature.replace(return_annotation=OptaxWrapper)
  return wrapped


def _function_of(constructor: Callable[..., Any]) -> Callable[..., Any]:
  """Return the function of a partial application (`optax.nadam`: adam), and any other constructor unchanged."""
  while isinstance(constructor, functools.partial):
    constructor = constructor.func
  return constructor


def _without_examples(constructor: Callable[..., Any]) -> str:
  """Return the constructor's documentation without its examples, which show a bare transformation."""
  paragraphs = (inspect.getdoc(constructor) or '').split('\n\n')
  return '\n\n'.join(paragraph for paragraph in paragraphs if '>>>' not in paragraph)


def _wrapped_signature(
  optax_optimizer: Callable[..., Any], *, takes_learning_rate: bool
) -> tuple[inspect.Signature, dict[str, Any]]:
  """Return (signature, annotations) of a wrapped constructor: optional learning rate, `OptaxWrapper` as optimizers."""
  signature = inspect.signature(optax_optimizer)
  parameters = dict(signature.parameters)
  annotations = dict(getattr(optax_optimizer, '__annotations__', {}))
  if takes_learning_rate:
    rate = parameters[_RATE]
    annotations[_RATE] = Any
    if rate.annotation is not rate.empty:
      annotations[_RATE] = rate.annotation | None
    parameters[_RATE] = rate.replace(default=None, annotation=annotations[_RATE])
  for key in _INNER_OPTIMIZERS & set(annotations):
    # gin rejects values that do not match the annotation.
    annotations[key] |= OptaxWrapper
    parameters[key] = parameters[key].replace(annotation=annotations[key])
  return _with_parameters(signature, parameters), annotations


def _with_parameters(
  signature: inspect.Signature, parameters: dict[str, inspect.Parameter]
) -> inspect.Signature:
  """Return `signature` with other parameters; required ones after an optional one get the default `REQUIRED`."""
  ordered = []
  has_default = False
  for parameter in parameters.values():
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
      if has_default and parameter.default is parameter.empty:
        # Still required, as in dpsgd(learning_rate=None, *, l2_norm_clip, ...); `bind_arguments` checks this.
        parameter = parameter.replace(default=checks.REQUIRED)
      has_default = has_default or parameter.default is not parameter.empty
    ordered.append(parameter)
  return signature.replace(parameters=ordered)


def _reason_against_mapped_axis(arguments: Mapping[str, Any]) -> str | None:
  """`unsupported_reason_fn` of optimizers that average over a mapped axis."""
  if arguments.get('batch_axis_name') is None:
    return None
  return (
    f'batch_axis_name={arguments["batch_axis_name"]!r} is for an update in jax.shard_map over an axis of '
    'that name; the trainer runs it in jax.jit, with gradients of the entire batch. Leave it out'
  )


def _check_inner(owner: str, option: str, value: Any) -> None:
  if value is not None and not isinstance(value, (OptaxWrapper, optax.GradientTransformation)):
    remedy = ''
    if callable(value):
      remedy = 'Call the function first.'
    raise checks.invalid(
      owner,
      option,
      'an optax transformation or an optimizer such as optimizers.adamw()',
      value,
      remedy,
    )


@checks.checks_arguments('chain')
def chain(transformations: Sequence[optax.GradientTransformation | OptaxWrapper]) -> OptaxWrapper:
  """Return an optimizer that applies several transformations in sequence.

  Args:
    transformations: optax transformations, or optimizers of this package that wrap one; at most one of them takes the
      trainer's learning rate.

  Returns:
    The wrapped chain; it takes the trainer's learning rate if an element does.

  Raises:
    ConfigError: no element, an invalid one, or two that take the trainer's learning rate.

  >>> import optax
  >>> chain([optax.clip_by_global_norm(1.0), adamw(weight_decay=0.1)]).uses_learning_rate
  True
  """
  # A GradientTransformation is a tuple of two functions.
  is_one = isinstance(transformations, (optax.GradientTransformation, OptaxWrapper))
  if is_one or not transformations:
    raise checks.invalid(
      'chain',
      'transformations',
      'a list of at least one transformation',
      transformations,
      'Write chain([a, b]).',
    )
  for index, element in enumerate(transformations):
    _check_inner('chain', f'transformations[{index}]', element if element is not None else ())

  def build(learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(*calls.unwrapped(list(transformations), learning_rate))

  wrapped = [element for element in transformations if isinstance(element, OptaxWrapper)]
  for element in wrapped:
    element.update_options.check_part('chain')
  takers = [element.name for element in wrapped if element.uses_learning_rate]
  if len(takers) > 1:
    names = ' and '.join(takers)
    raise ConfigError(
      f'chain: {names} each take the learning rate of the trainer, so updates would be multiplied '
      f'by it {len(takers)} times. Keep one of them and replace the others by transformations without a learning '
      'rate, such as optax.scale_by_lion(), or train different parameters with each: see optimizers.MultiOptimizer.'
    )

  def stacking_key(
    path: str, param: jax.Array, state: definition.OptimizerState
  ) -> Hashable | None:
    keys = []
    for element, param_states in zip(transformations, state.param_states, strict=True):
      own_state = dataclasses.replace(state, param_states=param_states)
      keys.append(_stacking_key(element, path, param, own_state))
    if None in keys:
      return None
    return tuple(keys)

  # The elements whose rates are scaled by parameter; without any, the updates of the chain are.
  with_rate = [
    element for element in wrapped if element.uses_learning_rate or element.owns_learning_rate
  ]
  name = 'chain'
  if wrapped:
    names = ' and '.join(element.name for element in wrapped)
    name = f'chain of {names}'
  common = dict(
    parts=wrapped,
    clipping=[name for name in map(_clipping_name, transformations) if name is not None],
    rebuild=calls.rebuild_fn(chain, list(transformations)),
    name=name,
    stacking_key_fn=stacking_key,
    scale_support=_scale_support(transformations, with_rate),
  )
  if any(element.uses_learning_rate for element in wrapped):
    return OptaxWrapper(learning_rate_factory=build, **common)
  owns = any(element.owns_learning_rate for element in wrapped)
  return OptaxWrapper(
    build(None), owns_learning_rate=owns, own_learning_rate=calls.own_rate_of(wrapped), **common
  )


def _scale_support(
  transformations: Sequence[Any], with_rate: Sequence[OptaxWrapper]
) -> param_scales.ScaleSupport | None:
  """Return the support of scales by parameter of a chain, of which some elements have a learning rate."""

  def scale(scales: ParamScales) -> OptaxWrapper:
    if len(with_rate) > 1:
      names = ' and '.join(element.name for element in with_rate)
      raise ConfigError(f'`{OWNER}` needs a chain with one learning rate, got {names}.')
    (scaled,) = with_rate
    elements = []
    for element in transformations:
      if element is scaled:
        element = scaled.with_param_scales(scales)
      elements.append(element)
    return chain(elements)

  has_decay = any(element.has_weight_decay for element in with_rate)
  if with_rate:
    return param_scales.ScaleSupport(scale, has_decay)
  return None


def _stacking_key(
  transformation: optax.GradientTransformation | OptaxWrapper,
  path: str,
  param: jax.Array,
  state: definition.OptimizerState,
) -> Hashable | None:
  """Return the `stacking_key` of an element of a chain with this state."""
  if isinstance(transformation, OptaxWrapper):
    if layer_stacks.is_accepted_by(transformation):
      return transformation.stacking_key(path, param, state)
    return None
  if _clipping_name(transformation) == 'optax.clip_by_global_norm':
    return 'elementwise'
  return None


_CLIPPING: dict[str, optax.GradientTransformation] = {
  'optax.adaptive_grad_clip': optax.adaptive_grad_clip(1.0),
  'optax.clip': optax.clip(1.0),
  'optax.clip_by_block_rms': optax.clip_by_block_rms(1.0),
  'optax.clip_by_global_norm': optax.clip_by_global_norm(1.0),
}


def _clipping_name(transformation: optax.GradientTransformation | OptaxWrapper) -> str | None:
  """Return the name of optax's function that made a clipping transformation; None for others."""
  if isinstance(transformation, OptaxWrapper):
    return None
  # Optax's transformations are anonymous pairs of functions; those of one constructor share their code.
  code = getattr(transformation.update, '__code__', None)
  for name, clipping in _CLIPPING.items():
    if code is getattr(clipping.update, '__code__', clipping):
      return name
  return None


# ---- Scales by parameter where multiplied updates are not those of a multiplied learning rate ------------------------


def _with_weights_at(
  state: optax.contrib.ScheduleFreeState, rate_scale: float, arguments: Mapping[str, Any]
) -> Any:
  """Return a state with the weights of a multiplied learning rate, so that averages have the same proportions."""
  return state._replace(
    max_lr=rate_scale * state.max_lr,
    weight_sum=rate_scale ** arguments['weight_lr_power'] * state.weight_sum,
  )


_BY_ARGUMENT = Scaling(rate_options=(_RATE,))
_SCHEDULE_FREE = Scaling(rate_options=(_RATE,), state_fn=_with_weights_at)
_JOINT_DECAY = Scaling(
  decay_reason='the weight decay of all parameters is part of the step that it estimates'
)

# ---- optax -----------------------------------------------------------------------------------------------------------

adabelief = _wrap(optax.adabelief, 'trainer', is_elementwise=True)
adadelta = _wrap(optax.adadelta, 'trainer', is_elementwise=True)
# Its decay does not depend on the rate.
adafactor = _wrap(optax.adafactor, 'trainer', units_fn=per_unit, scaling=_BY_ARGUMENT)
adagrad = _wrap(optax.adagrad, 'trainer', is_elementwise=True)
adam = _wrap(optax.adam, 'trainer', is_elementwise=True)
adamax = _wrap(optax.adamax, 'trainer', is_elementwise=True)
adamaxw = _wrap(optax.adamaxw, 'trainer', is_elementwise=True)
adamw = _wrap(optax.adamw, 'trainer', is_elementwise=True)
adan = _wrap(optax.adan, 'trainer', is_elementwise=True)
amsgrad = _wrap(optax.amsgrad, 'trainer', is_elementwise=True)
fromage = _wrap(optax.fromage, 'trainer', units_fn=norm_per_unit, scaling=_BY_ARGUMENT)
lamb = _wrap(optax.lamb, 'trainer', units_fn=norm_per_unit)
lars = _wrap(optax.lars, 'trainer', units_fn=norm_per_unit)
lbfgs = _wrap(
  optax.lbfgs,
  'optimizer',
  scaling=Scaling(rate_reason='a line search finds one step for all parameters'),
)
lion = _wrap(optax.lion, 'trainer', is_elementwise=True)
nadam = _wrap(optax.nadam, 'trainer', 'nadam', is_elementwise=True)
nadamw = _wrap(optax.nadamw, 'trainer', 'nadamw', is_elementwise=True)
noisy_sgd = _wrap(constructors.noisy_sgd, 'trainer')
novograd = _wrap(constructors.novograd, 'trainer', units_fn=norm_per_unit)
optimistic_adam = _wrap(constructors.optimistic_adam, 'trainer', is_elementwise=True)
optimistic_adam_v2 = _wrap(optax.optimistic_adam_v2, 'trainer', is_elementwise=True)
optimistic_gradient_descent = _wrap(
  optax.optimistic_gradient_descent, 'trainer', is_elementwise=True
)
polyak_sgd = _wrap(optax.polyak_sgd, 'optimizer')
radam = _wrap(optax.radam, 'trainer', is_elementwise=True)
rmsprop = _wrap(optax.rmsprop, 'trainer', is_elementwise=True)
rprop = _wrap(
  constructors.rprop,
  'start',
  is_elementwise=True,
  scaling=Scaling(
    rate_reason='its learning rate is the initial step size, which the signs of gradients change'
  ),
)
sgd = _wrap(optax.sgd, 'trainer', is_elementwise=True)
sign_sgd = _wrap(optax.sign_sgd, 'trainer', is_elementwise=True)
signum = _wrap(optax.signum, 'trainer', is_elementwise=True)
sm3 = _wrap(constructors.sm3, 'trainer', units_fn=per_unit)
yogi = _wrap(optax.yogi, 'trainer', is_elementwise=True)

# ---- optax.contrib ---------------------------------------------------------------------------------------------------

acprop = _wrap(optax.contrib.acprop, 'trainer', is_elementwise=True)
ademamix = _wrap(constructors.ademamix, 'trainer', is_elementwise=True)
adopt = _wrap(optax.contrib.adopt, 'trainer', is_elementwise=True)
cocob = _wrap(
  optax.contrib.cocob,
  'trainer',
  scaling=Scaling(
    rate_reason='its steps do not depend on the size of gradients, which its learning rate multiplies'
  ),
)
dadapt_adamw = _wrap(optax.contrib.dadapt_adamw, 'trainer')
dog = _wrap(optax.contrib.dog, 'trainer', scaling=_JOINT_DECAY)
dowg = _wrap(optax.contrib.dowg, 'trainer', scaling=_JOINT_DECAY)
dpsgd = _wrap(constructors.dpsgd, 'trainer')
galore = _wrap(optax.contrib.galore, 'trainer', units_fn=per_unit)
madgrad = _wrap(optax.contrib.madgrad, 'trainer', is_elementwise=True, scaling=_BY_ARGUMENT)
mechanize = _wrap(optax.contrib.mechanize, 'unknown', scaling=Scaling(inner='base_optimizer'))
momo = _wrap(optax.contrib.momo, 'trainer', scaling=_JOINT_DECAY)
momo_adam = _wrap(optax.contrib.momo_adam, 'trainer', scaling=_JOINT_DECAY)
prodigy = _wrap(optax.contrib.prodigy, 'trainer')
reduce_on_plateau = _wrap(optax.contrib.reduce_on_plateau, 'unknown')
sam = _wrap(
  constructors.sam,
  'unknown',
  unsupported_reason_fn=_reason_against_mapped_axis,
  scaling=Scaling(inner='optimizer'),
)
schedule_free = _wrap(
  optax.contrib.schedule_free, 'trainer', scaling=Scaling(inner='base_optimizer')
)
schedule_free_adamw = _wrap(optax.contrib.schedule_free_adamw, 'trainer', scaling=_SCHEDULE_FREE)
schedule_free_sgd = _wrap(optax.contrib.schedule_free_sgd, 'trainer', scaling=_SCHEDULE_FREE)
simplified_ademamix = _wrap(optax.contrib.simplified_ademamix, 'trainer', is_elementwise=True)
sophia = _wrap(optax.contrib.sophia, 'trainer')
split_real_and_imaginary = _wrap(
  optax.contrib.split_real_and_imaginary,
  'unknown',
  scaling=Scaling(inner='inner', path_fn=functools.partial(re.sub, '/(real|imaginary)$', '')),
)
