"""Optax transformations as optimizers of this package.

`OptaxWrapper` turns a gradient transformation into an `OptimizerDef`; the factories below it (`adamw`, `sgd`, ...) are
optax's constructors wrapped.

Who owns the learning rate: a factory that is given a `learning_rate` (a number or an optax schedule) uses that; one
that is not takes the `learning_rate` that `apply_gradient` receives, which is the trainer's. `OptaxWrapper(tx)` around
a finished transformation has its learning rate inside, so the trainer's has no effect, as in T5X.
"""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers import _axes, _base
from t5x_lite.optimizers._partition_rules import OptaxStatePartitionRules
from t5x_lite.types import LogicalAxes, Params, PyTree


@struct.dataclass
class OptaxHyperParams:
  """What an update of an `OptaxWrapper` may override.

  Attributes:
    learning_rate: the trainer's rate; it has an effect if and only if the definition's `uses_learning_rate` is True.
  """

  learning_rate: Any = None


class OptaxWrapper(_base.OptimizerDef):
  """An optax gradient transformation as an `OptimizerDef`.

  Parameters and gradients of fewer than 32 bits are widened to float32 before optax sees them, so that its statistics
  are float32 (an explicit dtype option such as adam's `mu_dtype` still rules); parameters come back in their own dtype.

  Attributes:
    optax_optimizer: the transformation. When the learning rate is the trainer's, its `update` takes it as the keyword
      argument `learning_rate`.
    learning_rate_factory: from a learning rate to the transformation, or None.
  """

  def __init__(
      self,
      optax_optimizer: optax.GradientTransformation | None = None,
      *,
      learning_rate_factory: Callable[[Any], optax.GradientTransformation] | None = None):
    """Wraps a transformation, or a function that builds one from the trainer's learning rate.

    Args:
      optax_optimizer: a transformation that has its learning rate inside.
      learning_rate_factory: from a learning rate (float32 scalar, a tracer in a compiled step) to the transformation.
        The structure of its state must not depend on the rate. Exactly one of the two arguments is to be given.

    Raises:
      ConfigError: both arguments or neither, or a first one that is no gradient transformation.
    """
    if (optax_optimizer is None) == (learning_rate_factory is None):
      raise ConfigError(
          'OptaxWrapper takes either a transformation or learning_rate_factory='
          f'..., got {"neither" if optax_optimizer is None else "both"}.')
    if learning_rate_factory is not None:
      optax_optimizer = _with_learning_rate_argument(learning_rate_factory)
    if not isinstance(optax_optimizer, optax.GradientTransformation):
      hint = ' Call it first: OptaxWrapper(optax.adamw(...)).' if callable(optax_optimizer) else ''
      hint = ' Pass its .gradient_transformation().' if isinstance(optax_optimizer, optax.MultiSteps) else hint
      raise ConfigError(
          f'OptaxWrapper takes an optax gradient transformation, got {type(optax_optimizer).__name__}.{hint}')
    self.optax_optimizer = optax_optimizer
    self.learning_rate_factory = learning_rate_factory
    super().__init__(OptaxHyperParams())

  @property
  def uses_learning_rate(self) -> bool:
    """Whether the trainer's learning rate has an effect; False when the transformation has its own inside."""
    return self.learning_rate_factory is not None

  def init_state(self, params: Params) -> _base.OptimizerState:
    """Returns step 0 and the transformation's initial state."""
    return _base.OptimizerState(
        step=jnp.zeros([], jnp.int32), param_states=self.optax_optimizer.init(_widened(params)))

  def apply_gradient(
      self, hyper_params: OptaxHyperParams, params: Params, state: _base.OptimizerState,
      grads: Params) -> tuple[Params, _base.OptimizerState]:
    """Makes one update with the transformation; see `OptimizerDef.apply_gradient`.

    Raises:
      ConfigError: the learning rate is the trainer's, and none was passed.
    """
    extra_args = {}
    if self.uses_learning_rate:
      if hyper_params.learning_rate is None:
        raise ConfigError(
            'This optimizer takes the learning rate of the trainer, but none was passed; give the trainer a '
            'learning_rate_fn, or the optimizer a learning_rate.')
      extra_args['learning_rate'] = jnp.asarray(hyper_params.learning_rate, jnp.float32)
    wide_params = _widened(params)
    updates, param_states = self.optax_optimizer.update(
        _widened(grads), state.param_states, wide_params, **extra_args)
    wide_params = optax.apply_updates(wide_params, updates)
    params = jax.tree.map(lambda wide, param: wide.astype(param.dtype), wide_params, params)
    return params, _base.OptimizerState(step=state.step + 1, param_states=param_states)

  def derive_logical_axes(
      self, optimizer: _base.Optimizer, param_logical_axes: LogicalAxes) -> _base.Optimizer:
    """Derives the axes of the state by `OptaxStatePartitionRules`; see `OptimizerDef.derive_logical_axes`."""
    target_axes = _axes.match_logical_axes(optimizer.target, param_logical_axes)
    state_axes = _base.OptimizerState(
        step=PartitionSpec(),
        param_states=OptaxStatePartitionRules.derive_optax_logical_axes(optimizer.state.param_states, target_axes))
    _axes.check_logical_axes(optimizer.state, state_axes, 'the optax state')
    return optimizer.replace(state=state_axes, target=target_axes)


def wrap_optax_optimizer(
    optax_optimizer: Callable[..., optax.GradientTransformation], *,
    takes_learning_rate: bool = False) -> Callable[..., OptaxWrapper]:
  """Turns a constructor of optax transformations into one of `OptaxWrapper`s.

  Args:
    optax_optimizer: the constructor.
    takes_learning_rate: the constructor's first argument is `learning_rate`, and the wrapped one may be called
      without it, or with None, to take the trainer's.

  Returns:
    A function with the arguments and documentation of `optax_optimizer`. It raises ConfigError for arguments that the
    constructor does not take.

  >>> import optax
  >>> wrap_optax_optimizer(optax.sgd)(0.1).uses_learning_rate
  False
  """
  signature = inspect.signature(optax_optimizer)
  name = optax_optimizer.__name__

  def check_arguments(*args: Any, **kwargs: Any) -> None:
    try:
      signature.bind(*args, **kwargs)
    except TypeError as error:
      unknown = [key for key in kwargs if key not in signature.parameters]
      hint = did_you_mean(unknown[0], signature.parameters) if unknown else f' Its arguments are {signature}.'
      raise ConfigError(f'Optimizer {name}: {error}.{hint}') from error

  if not takes_learning_rate:

    @functools.wraps(optax_optimizer)
    def wrapped(*args: Any, **kwargs: Any) -> OptaxWrapper:
      check_arguments(*args, **kwargs)
      return OptaxWrapper(optax_optimizer(*args, **kwargs))

    wrapped.__annotations__ = {**optax_optimizer.__annotations__, 'return': OptaxWrapper}
    wrapped.__signature__ = signature.replace(return_annotation=OptaxWrapper)
    return wrapped

  @functools.wraps(optax_optimizer)
  def wrapped_with_rate(learning_rate: Any = None, *args: Any, **kwargs: Any) -> OptaxWrapper:
    # Arguments are checked now, not when the trainer first hands over a rate.
    check_arguments(learning_rate, *args, **kwargs)
    _base.check_learning_rate(learning_rate, f'Optimizer {name}')
    if learning_rate is None:
      return OptaxWrapper(learning_rate_factory=lambda rate: optax_optimizer(rate, *args, **kwargs))
    return OptaxWrapper(optax_optimizer(learning_rate, *args, **kwargs))

  first, *rest = signature.parameters.values()
  if first.name != 'learning_rate':
    raise ConfigError(f'The first argument of {name} is {first.name!r}; takes_learning_rate=True needs learning_rate.')
  # What help() and gin see: the constructor's arguments, with None as default of the first.
  rate_type = Any if first.annotation is first.empty else first.annotation | None
  wrapped_with_rate.__annotations__ = {
      **optax_optimizer.__annotations__, 'learning_rate': rate_type, 'return': OptaxWrapper}
  wrapped_with_rate.__signature__ = signature.replace(
      parameters=[first.replace(default=None, annotation=rate_type), *rest], return_annotation=OptaxWrapper)
  return wrapped_with_rate


def chain(transformations: Sequence[optax.GradientTransformation | OptaxWrapper]) -> OptaxWrapper:
  """Returns an optimizer that applies several transformations one after the other.

  Args:
    transformations: optax transformations, or optimizers of this package that wrap one; those that take the trainer's
      learning rate make the whole chain take it.

  Returns:
    The wrapped chain.

  Raises:
    ConfigError: an element that is neither.

  >>> import optax
  >>> chain([optax.clip_by_global_norm(1.0), adamw(weight_decay=0.1)]).uses_learning_rate
  True
  """
  # A GradientTransformation is itself a tuple, of two functions.
  if isinstance(transformations, optax.GradientTransformation) or not isinstance(transformations, Sequence):
    raise ConfigError(
        f'chain takes one sequence of transformations, got {type(transformations).__name__}; write chain([a, b]).')
  for index, element in enumerate(transformations):
    if not isinstance(element, (OptaxWrapper, optax.GradientTransformation)):
      raise ConfigError(
          f'chain: element {index} is of type {type(element).__name__}; expected an optax transformation or a wrapped '
          'one such as optimizers.adamw().')

  def build(learning_rate: Any) -> optax.GradientTransformation:
    parts = []
    for element in transformations:
      if not isinstance(element, OptaxWrapper):
        parts.append(element)
      elif element.learning_rate_factory is not None:
        parts.append(element.learning_rate_factory(learning_rate))
      else:
        parts.append(element.optax_optimizer)
    return optax.chain(*parts)

  if any(isinstance(element, OptaxWrapper) and element.uses_learning_rate for element in transformations):
    return OptaxWrapper(learning_rate_factory=build)
  return OptaxWrapper(build(None))


adam = wrap_optax_optimizer(optax.adam, takes_learning_rate=True)
adamw = wrap_optax_optimizer(optax.adamw, takes_learning_rate=True)
sgd = wrap_optax_optimizer(optax.sgd, takes_learning_rate=True)


def _with_learning_rate_argument(
    factory: Callable[[Any], optax.GradientTransformation]) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that builds itself anew at each update from the `learning_rate` it is passed."""

  def init(params: Params) -> PyTree:
    return factory(0.0).init(params)

  def update(updates, state, params=None, *, learning_rate=None, **extra_args):
    if learning_rate is None:
      raise ConfigError(
          'A transformation that takes the learning rate of the trainer was wrapped without it; give it a learning_rate '
          'of its own, or join it with others by optimizers.chain([...]), which passes the rate on.')
    return optax.with_extra_args_support(factory(learning_rate)).update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(init, update)


def _widened(tree: PyTree) -> PyTree:
  """Returns `tree` with floating-point arrays of fewer than 32 bits as float32."""

  def widen(array):
    is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if is_narrow else array

  return jax.tree.map(widen, tree)
