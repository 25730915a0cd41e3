"""How the states of optax transformations are laid out over a mesh.

An optax state is a nest of named tuples. For each class a rule says of every field what it is:

* `params`: a tree shaped like the parameters; its axes are theirs (parameters masked out stay masked);
* `nested`: a state, or a nest of states, of inner transformations;
* `replicated`: counters, random keys, hyper-parameters and the like: every device holds a copy.

A class without a rule is refused, since replicating a large state in silence costs the memory that sharding was to
save. `OptaxStatePartitionRules.register` adds a rule for a class of one's own.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import optax

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers import _axes
from t5x_lite.types import LogicalAxes, PyTree

# From (state, logical axes of the parameters) to the state with a `PartitionSpec` in the place of each array.
PartitionRule = Callable[[Any, LogicalAxes], Any]

_FIELD_KINDS = ('params', 'nested', 'replicated')


def _is_masked(node: Any) -> bool:
  return isinstance(node, optax.MaskedNode)


def _fields_of(node_class: type) -> tuple[str, ...] | None:
  """Returns the field names of a named-tuple class, None for any other class."""
  return getattr(node_class, '_fields', None) if issubclass(node_class, tuple) else None


class OptaxStatePartitionRules:
  """The table from optax state class to the rule for its logical axes."""

  _RULES: ClassVar[dict[type, PartitionRule]] = {}

  @classmethod
  def register(cls, state_class: type, rule: PartitionRule | None = None, /, **field_kinds: str) -> None:
    """Adds the rule for a state class; a later rule for the same class replaces an earlier one.

    Args:
      state_class: the class of the state, a named tuple unless `rule` is given.
      rule: a function from (state, logical axes of the parameters) to the state with a `PartitionSpec` of one entry per
        dim in the place of each array, for states that the kinds below do not describe.
      **field_kinds: for every field of the class 'params', 'nested' or 'replicated'; see the module docstring.

    Raises:
      ConfigError: fields that are missing, unknown, or of an unknown kind.

    >>> from typing import NamedTuple
    >>> class MyState(NamedTuple):
    ...   count: Any
    ...   momentum: Any
    >>> OptaxStatePartitionRules.register(MyState, count='replicated', momentum='params')
    """
    name = state_class.__name__
    if rule is not None:
      if field_kinds:
        raise ConfigError(f'The rule for {name} is given twice: as a function and by fields; give one of them.')
      cls._RULES[state_class] = rule
      return
    fields = _fields_of(state_class)
    if fields is None:
      raise ConfigError(f'{name} is not a named tuple, so its rule must be a function: register({name}, rule).')
    if missing := [field for field in fields if field not in field_kinds]:
      raise ConfigError(f'The rule for {name} says nothing of {missing}; give a kind for every field.')
    for field, kind in field_kinds.items():
      if field not in fields:
        raise ConfigError(f'The rule for {name} names a field {field!r} it has not.{did_you_mean(field, fields)}')
      if kind not in _FIELD_KINDS:
        raise ConfigError(
            f'The rule for {name}.{field} is of the kind {kind!r}; expected one of {_FIELD_KINDS}.'
            f'{did_you_mean(kind, _FIELD_KINDS)}')

    def derive(state: Any, params_axes: LogicalAxes) -> Any:
      axes = {}
      for field in fields:
        value = getattr(state, field)
        match field_kinds[field]:
          case 'params':
            axes[field] = cls._derive_field_axes(value, params_axes, f'{name}.{field}')
          case 'nested':
            axes[field] = cls.derive_optax_logical_axes(value, params_axes)
          case 'replicated':
            axes[field] = jax.tree.map(_axes.unnamed_axes, value)
      return state_class(**axes)

    cls._RULES[state_class] = derive

  @classmethod
  def derive_optax_logical_axes(cls, optax_state: PyTree, params_axes: LogicalAxes) -> PyTree:
    """Derives the logical axes of an optax state.

    Args:
      optax_state: what `init` or `update` of an optax transformation returned; arrays or `jax.ShapeDtypeStruct`s.
      params_axes: a `PartitionSpec` of logical names for each parameter, in the structure of the parameters.

    Returns:
      The same structure with a `PartitionSpec` of one entry per dim at each array.

    Raises:
      ConfigError: a state class without a rule, or a rule that does not fit the state.
    """
    if optax_state is None or _is_masked(optax_state):
      return optax_state
    node_class = type(optax_state)
    if node_class in cls._RULES:
      return cls._RULES[node_class](optax_state, params_axes)
    fields = _fields_of(node_class)
    if fields is None and issubclass(node_class, (tuple, list)):
      return node_class(cls.derive_optax_logical_axes(child, params_axes) for child in optax_state)
    if isinstance(optax_state, Mapping):
      return node_class(
          {key: cls.derive_optax_logical_axes(child, params_axes) for key, child in optax_state.items()})
    if jax.tree_util.all_leaves([optax_state]):
      raise ConfigError(
          f'An optax state holds an array of shape {tuple(np.shape(optax_state))} outside of any state class, so there '
          'is no rule for its logical axes; wrap the state of that transformation in a named tuple and register it '
          'with optimizers.OptaxStatePartitionRules.register.')
    example = ', '.join(f"{field}='...'" for field in fields or ()) if fields else 'rule'
    raise ConfigError(
        f'There is no rule for the logical axes of the optax state {node_class.__module__}.{node_class.__name__}; add '
        f'one with optimizers.OptaxStatePartitionRules.register({node_class.__name__}, {example}), where each field is '
        "'params' (shaped like the parameters), 'nested' (states of inner transformations) or 'replicated'.")

  @classmethod
  def derive_params_axes(cls, optax_params: PyTree, params_axes: LogicalAxes) -> LogicalAxes:
    """Returns the parameters' axes in the structure of a copy of the parameters that an optax state holds.

    Args:
      optax_params: a tree shaped like the parameters, in which `optax.MaskedNode` may stand for any subtree.
      params_axes: a `PartitionSpec` of logical names for each parameter, in the structure of the parameters.

    Returns:
      `params_axes`, with `optax.MaskedNode` where `optax_params` has it.
    """
    return cls._derive_field_axes(optax_params, params_axes, 'an optax state')

  @classmethod
  def _derive_field_axes(cls, value: PyTree, params_axes: LogicalAxes, where: str) -> LogicalAxes:
    if value is None:
      return None

    def derive(path, array, axes):
      if _is_masked(array):
        return array
      if len(axes) != np.ndim(array):
        raise ConfigError(
            f'{where} has rank {np.ndim(array)} at {tree_utils.path_name(path)!r} where the parameter has the '
            f"{len(axes)} logical axes {tuple(axes)}: it is not a copy of the parameters; register a rule function for "
            "this state class instead of the kind 'params'.")
      return axes

    try:
      return jax.tree_util.tree_map_with_path(derive, value, params_axes, is_leaf=_is_masked)
    except ConfigError:
      raise
    except ValueError as error:
      raise ConfigError(
          f"{where} has not the structure of the parameters, so its axes cannot be theirs ({error}); register a rule "
          "function for this state class instead of the kind 'params'.") from error


def _register_optax_states() -> None:
  """Rules for the states of optax that are copies of the parameters, counters, or nests of such."""
  register = OptaxStatePartitionRules.register
  copy, inner, small = 'params', 'nested', 'replicated'
  # Transformations without state; several names of optax are aliases of this class.
  register(optax.EmptyState)
  # Statistics of gradients, one array per parameter.
  register(optax.EmaState, count=small, ema=copy)
  register(optax.TraceState, trace=copy)
  register(optax.ScaleByAdamState, count=small, mu=copy, nu=copy)
  register(optax.ScaleByAmsgradState, count=small, mu=copy, nu=copy, nu_max=copy)
  register(optax.ScaleByBeliefState, count=small, mu=copy, nu=copy)
  register(optax.ScaleByLionState, count=small, mu=copy)
  register(optax.ScaleByRssState, sum_of_squares=copy)
  register(optax.ScaleByRmsState, nu=copy)
  register(optax.ScaleByRStdDevState, mu=copy, nu=copy)
  register(optax.ScaleByAdaDeltaState, e_g=copy, e_x=copy)
  register(optax.ScaleByAdanState, m=copy, v=copy, n=copy, g=copy, t=small)
  register(optax.ScaleByRpropState, step_sizes=copy, prev_updates=copy)
  # Counters and flags. ZeroNansState has one flag per parameter, a scalar.
  register(optax.ScaleByScheduleState, count=small)
  register(optax.AddNoiseState, count=small, rng_key=small)
  register(optax.ZeroNansState, found_nan=small)
  # Wrappers. The states of hyper-parameter schedules are counters.
  register(optax.MaskedState, inner_state=inner)
  register(optax.PartitionState, inner_states=inner)
  register(optax.InjectHyperparamsState, count=small, hyperparams=small, inner_state=inner)
  register(
      optax.InjectStatefulHyperparamsState, count=small, hyperparams=small, hyperparams_states=small,
      inner_state=inner)
  register(
      optax.MultiStepsState, mini_step=small, gradient_step=small, inner_opt_state=inner, acc_grads=copy,
      skip_state=small)
  register(optax.ApplyIfFiniteState, notfinite_count=small, last_finite=small, total_notfinite=small, inner_state=inner)
  register(optax.ConditionallyTransformState, inner_state=inner, step=small)
  register(optax.ConditionallyMaskState, step=small, inner_state=inner)


_register_optax_states()
