"""Calls of optax's constructors whose arguments are wrapped optimizers, learning rates and weight decays.

A call is repeated with other arguments: with the trainer's learning rate in each update, with optimizers rebuilt for
logical axes, and with scales by parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import inspect
from typing import Any

import optax

from t5x_lite.errors import ConfigError, T5xLiteError
from t5x_lite.optimizers.axes.units import UnitsByPath
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.optax_adapter import param_scales
from t5x_lite.optimizers.optax_adapter.wrapper import OptaxWrapper

RATE = 'learning_rate'
# Function from a learning rate, None without the trainer's, to a transformation.
BuildFn = Callable[[Any], optax.GradientTransformation]
# See `Call.units_fn`.
UnitsFn = Callable[[optax.GradientTransformation, UnitsByPath], optax.GradientTransformation]
# See the argument `rebuild` of `OptaxWrapper`.
RebuildFn = Callable[..., OptaxWrapper]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """One call of a constructor of transformations.

  Attributes:
    constructor: the constructor.
    factory: the function that users call; it makes a `Call` and returns its wrapper.
    name: name of the factory.
    bound: arguments of the call, for the signature of the factory.
    scaling: how learning rate and weight decay are scaled by parameter.
    rate_owner: meaning of the argument `learning_rate`; see `factories`.
    options: arguments of `OptaxWrapper` that do not depend on learning rates, axes and scales.
    units_fn: function from (transformation, units of the parameters) to one of units, such as `per_unit`; None if the
      transformation updates arrays as they are.
    units: units of the parameters, single arrays until their axes are known.
  """

  constructor: Callable[..., optax.GradientTransformation]
  factory: Callable[..., OptaxWrapper]
  name: str
  bound: inspect.BoundArguments
  scaling: param_scales.Scaling
  rate_owner: str
  options: Mapping[str, Any]
  units_fn: UnitsFn | None = None
  units: UnitsByPath = UnitsByPath()

  def wrapper(self) -> OptaxWrapper:
    """Return the optimizer.

    Raises:
      ConfigError: invalid arguments.
    """
    return self._wrap(functools.partial(self._build, self.bound.arguments), self._rebuild)

  @functools.cached_property
  def _inner(self) -> tuple[OptaxWrapper, ...]:
    return tuple(wrapped_in(self.bound.arguments))

  @functools.cached_property
  def _complete(self) -> dict[str, Any]:
    """The arguments by name, defaults included."""
    complete = inspect.BoundArguments(self.bound.signature, dict(self.bound.arguments))
    complete.apply_defaults()
    return complete.arguments

  @functools.cached_property
  def _scaled_argument(self) -> OptaxWrapper:
    """The argument `scaling.inner`."""
    optimizer = self._complete[self.scaling.inner]
    if isinstance(optimizer, OptaxWrapper):
      return optimizer
    return OptaxWrapper(optimizer)

  @property
  def _takes_rate(self) -> bool:
    return self.rate_owner == 'trainer' and self.bound.arguments.get(RATE) is None

  @property
  def _rebuild(self) -> RebuildFn | None:
    if self.units_fn is not None:
      return lambda axes, params: dataclasses.replace(self, units=UnitsByPath(axes)).wrapper()
    return rebuild_fn(functools.partial(self._call, self.factory), self.bound.arguments)

  def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    bound = inspect.BoundArguments(self.bound.signature, dict(arguments))
    return function(*bound.args, **bound.kwargs)

  def _build(
    self,
    arguments: Mapping[str, Any],
    learning_rate: Any,
    rate_scale: float = 1.0,
    decay_scale: float = 1.0,
  ) -> optax.GradientTransformation:
    """Return the transformation for arguments by name, a learning rate, and factors of learning rate and decay."""
    arguments = unwrapped(arguments, learning_rate)
    if self._takes_rate:
      arguments = {**arguments, RATE: learning_rate}
    try:
      transformation = self._call(
        self.constructor, self.scaling.apply(arguments, rate_scale, decay_scale)
      )
    except (TypeError, ValueError, AttributeError) as error:
      if isinstance(error, T5xLiteError):
        raise
      message = str(error).partition('\n')[0].rstrip('.')
      raise ConfigError(f'The optimizer {self.name} has invalid options: {message}.') from error
    if self.units_fn is None:
      return transformation
    return self.units_fn(transformation, self.units)

  def _wrap(self, build_fn: BuildFn, rebuild: RebuildFn | None) -> OptaxWrapper:
    if self.scaling.inner:
      has_decay = self._scaled_argument.has_weight_decay
    else:
      has_decay = param_scales.has_weight_decay(self._complete)
    common = dict(
      self.options,
      parts=self._inner,
      rebuild=rebuild,
      name=self.name,
      scale_support=param_scales.ScaleSupport(self._scale, has_decay),
    )
    if self._takes_rate or any(part.uses_learning_rate for part in self._inner):
      build_fn(0.0)  # Raises now for invalid options, instead of in the first step.
      return OptaxWrapper(learning_rate_factory=build_fn, **common)
    given_rate = self.bound.arguments.get(RATE)
    if self.rate_owner in ('trainer', 'optimizer'):
      own_rate = given_rate
    else:
      own_rate = own_rate_of(self._inner)
    owns = self.rate_owner != 'unknown' and given_rate is not None
    owns = owns or any(part.owns_learning_rate for part in self._inner)
    return OptaxWrapper(
      build_fn(None), owns_learning_rate=owns, own_learning_rate=own_rate, **common
    )

  def _scale(self, scales: ParamScales) -> OptaxWrapper:
    """Return the optimizer with scales by parameter."""
    scaling = self.scaling
    scaling.check(self.name, scales)
    if scaling.inner:
      scales = dataclasses.replace(scales, path_fn=scaling.path_fn or scales.path_fn)
      inner = self._scaled_argument.with_param_scales(scales)
      return self._call(self.factory, {**self.bound.arguments, scaling.inner: inner})
    arguments = self._complete
    of_variants = scales
    if scaling.decay_by_path:
      arguments = {
        **arguments,
        'weight_decay': param_scales.DecayByPath(arguments['weight_decay'], scales),
      }
      of_variants = dataclasses.replace(scales, weight_decays=())

    state_fn = None
    if scaling.state_fn is not None:
      state_fn = functools.partial(_call_with, scaling.state_fn, self._complete)

    def build_scaled(learning_rate: Any) -> optax.GradientTransformation:
      return param_scales.scale_per_parameter(
        functools.partial(self._build, arguments, learning_rate),
        of_variants,
        multiplies_updates=not scaling.rate_options,
        state_fn=state_fn,
      )

    rebuild = self._rebuild
    if rebuild is None:
      return self._wrap(build_scaled, None)

    def rebuild_scaled(axes: Any, params: Any) -> OptaxWrapper:
      return rebuild(axes, params).with_param_scales(scales)

    return self._wrap(build_scaled, rebuild_scaled)


def _call_with(
  state_fn: Callable[..., Any], arguments: Mapping[str, Any], state: Any, rate: float
) -> Any:
  """Return the result of `Scaling.state_fn` with the arguments of a constructor."""
  return state_fn(state, rate, arguments)


def own_rate_of(parts: Sequence[OptaxWrapper]) -> Any:
  """Return the configured learning rate of `parts`; None unless exactly one has one."""
  rates = [rate for part in parts for rate in part.configured_learning_rates.values()]
  if len(rates) == 1:
    return rates[0]
  return None


def wrapped_in(value: Any) -> Iterator[OptaxWrapper]:
  """Yield the wrapped optimizers in an argument, which may be nested lists, tuples and dicts."""
  if isinstance(value, OptaxWrapper):
    yield value
  elif isinstance(value, Mapping):
    for child in value.values():
      yield from wrapped_in(child)
  elif isinstance(value, (list, tuple)):
    for child in value:
      yield from wrapped_in(child)


def map_wrapped(fn: Callable[[OptaxWrapper], Any], value: Any) -> Any:
  """Return an argument with `fn` applied to each wrapped optimizer; the argument itself if it has none."""
  if isinstance(value, OptaxWrapper):
    return fn(value)
  if not any(wrapped_in(value)):
    return value
  if isinstance(value, Mapping):
    return {key: map_wrapped(fn, child) for key, child in value.items()}
  return [map_wrapped(fn, child) for child in value]


def unwrapped(value: Any, learning_rate: Any) -> Any:
  """Return an argument with its wrapped optimizers as transformations, built for the learning rate if they take it."""

  def transformation_of(wrapper: OptaxWrapper) -> optax.GradientTransformation:
    factory = wrapper.learning_rate_factory
    if factory is not None:
      return factory(learning_rate)
    return wrapper.optax_optimizer

  return map_wrapped(transformation_of, value)


def rebuild_fn(
  make: Callable[[Any], OptaxWrapper], arguments: Any
) -> Callable[..., OptaxWrapper] | None:
  """Return the `rebuild` of a wrapper made by `make(arguments)`; None if no optimizer in them depends on the axes."""
  if not any(part.depends_on_axes for part in wrapped_in(arguments)):
    return None

  def rebuild(axes: Any, params: Any) -> OptaxWrapper:
    return make(map_wrapped(lambda part: part.with_param_axes(axes, params), arguments))

  return rebuild
