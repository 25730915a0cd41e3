"""Rules for the logical axes of optax states.

An optax state is a nest of named tuples. The rule of a class gives the kind of every field:

* `params`: a tree like the parameters, with the parameters' axes;
* `leading_dims`: stacked copies of the parameters: the parameters' axes after unnamed leading dims;
* `per_dim`: for each parameter a list of vectors, one for each dim, with the name of the dim;
* `per_parameter_scalar`: for each parameter one number, replicated;
* `nested`: a state, or a nest of states, of inner transformations, with the rules of their classes;
* `scalar`: counters, flags and other scalars, replicated; arrays with dims are an error;
* `matched`: anything; parts with the structure of the parameters have their axes, all other arrays are replicated;
* `replicated`: arrays of any size that every device has a copy of: random keys, short tables.

In trees like the parameters, `optax.MaskedNode` or None may replace parameters that a transformation does not update.
The rules for optax's classes are in `rules_optax`; those for statistics with fewer or more dims (`FactoredState`,
`GaLoreState`) are in `reduced`.

A class without a rule is an error, because silently replicating a large state would cost the memory that sharding
saves. `OptaxStatePartitionRules.register` adds a rule for a custom class.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.axes import kinds
from t5x_lite.optimizers.axes import names
from t5x_lite.optimizers.axes.kinds import ParamsLayout
from t5x_lite.optimizers.axes.kinds import StateRule
from t5x_lite.optimizers.axes.rules_optax import OPTAX_STATES
from t5x_lite.types import LogicalAxes, Params, PyTree

# Function from (state, logical axes of the parameters) to the state with a `PartitionSpec` for each array.
PartitionRule = Callable[[Any, LogicalAxes], Any]
# The same for states whose axes depend on the parameters' shapes: from (state, logical axes, parameters).
ShapedPartitionRule = Callable[[Any, LogicalAxes, Params], Any]

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)


class OptaxStatePartitionRules:
  """Table of the rules for the logical axes of optax states, by state class."""

  # Optax's classes are added when the first of them is looked up; see `_rule_of`.
  _RULES: ClassVar[dict[type, StateRule]] = {}

  @classmethod
  def register(
    cls, state_class: type, rule: PartitionRule | None = None, /, **field_kinds: str
  ) -> None:
    """Add the rule for a state class and its subclasses; a later rule replaces an earlier one.

    Args:
      state_class: class of the state: a named tuple or a dataclass that is a JAX pytree (`flax.struct`,
        `jax.tree_util.register_dataclass`, chex); with `rule` any class that is a pytree.
      rule: function from (state, logical axes of the parameters) to the state with a `PartitionSpec` of one entry per
        dim for each array, for states that the kinds do not describe. If it needs the parameters' shapes, use
        `register_with_params`.
      **field_kinds: kind of each field with arrays: 'params', 'leading_dims', 'per_dim', 'per_parameter_scalar',
        'nested', 'scalar', 'matched' or 'replicated', see the module docstring.

    Raises:
      ConfigError: missing or unknown fields, an unknown kind, or both a function and kinds.

    >>> from typing import NamedTuple
    >>> class MyState(NamedTuple):
    ...   count: Any
    ...   momentum: Any
    >>> OptaxStatePartitionRules.register(MyState, count='scalar', momentum='params')
    """
    if rule is None:
      _check_field_kinds(state_class, field_kinds)
      cls._RULES[state_class] = _rule_by_fields(state_class.__name__, field_kinds)
      return
    if field_kinds or not callable(rule):
      raise ConfigError(
        f'The rule for {state_class.__name__} must be either a function from (state, logical axes of the parameters) '
        f'or a kind for each field, got {rule!r} and {field_kinds}.'
      )
    cls._RULES[state_class] = _rule_by_function(
      state_class.__name__, lambda state, layout: rule(state, layout.axes)
    )

  @classmethod
  def register_with_params(cls, state_class: type, rule: ShapedPartitionRule, /) -> None:
    """Add a rule that needs the shapes of the parameters: factored, low-rank, blocked or flattened statistics.

    Args:
      state_class: see `register`.
      rule: function from (state, logical axes of the parameters, the parameters or `jax.ShapeDtypeStruct`s of them)
        to the state with a `PartitionSpec` of one entry per dim for each array.
    """
    name = state_class.__name__
    cls._RULES[state_class] = _rule_by_function(
      name, lambda state, layout: rule(state, layout.axes, layout.require_params(name))
    )

  @classmethod
  def has_rule(cls, state_class: type) -> bool:
    """Return True if states of this class have a rule."""
    return cls._rule_of(state_class) is not None

  @classmethod
  def derive_optax_logical_axes(
    cls, optax_state: PyTree, params_axes: LogicalAxes, params: Params | None = None
  ) -> PyTree:
    """Return the logical axes of an optax state.

    Args:
      optax_state: state of an optax transformation; arrays or `jax.ShapeDtypeStruct`s.
      params_axes: tree like the parameters with a `PartitionSpec` of logical names for each.
      params: the parameters or `jax.ShapeDtypeStruct`s of them. Few states need them (`FactoredState`, `GaLoreState`,
        `SplitRealAndImaginaryState`); if given, their shapes are compared with those of copies in the state.

    Returns:
      The same structure with a `PartitionSpec` of one entry per dim for each array.

    Raises:
      ConfigError: a state class without a rule, a rule that does not fit the state, or missing parameters.
    """
    return cls._derive(
      optax_state, ParamsLayout(axes=params_axes, params=params, derive=cls._derive)
    )

  @classmethod
  def derive_params_axes(cls, optax_params: PyTree, params_axes: LogicalAxes) -> LogicalAxes:
    """Return the parameters' axes in the structure of a copy of the parameters in an optax state.

    Args:
      optax_params: tree like the parameters, in which `optax.MaskedNode` may replace any subtree.
      params_axes: tree like the parameters with a `PartitionSpec` of logical names for each.

    Returns:
      `params_axes`, with `optax.MaskedNode` where `optax_params` has it.

    Raises:
      ConfigError: `optax_params` has another structure than the parameters.
    """
    layout = ParamsLayout(axes=params_axes, params=None, derive=cls._derive)
    return kinds.derive_params(optax_params, layout, 'an optax state')

  @classmethod
  def _derive(cls, state: Any, layout: ParamsLayout) -> Any:
    if state is None or kinds.is_masked(state):
      return state
    if kinds.is_array(state):
      raise _bare_leaf_error(state)
    if rule := cls._rule_of(type(state)):
      return rule(state, layout)
    # A chex dataclass is a mapping, but needs a rule.
    if _fields_with_arrays(type(state)) is None and isinstance(state, (tuple, list, Mapping)):
      children, treedef = kinds.children_of(state)
      return treedef.unflatten([cls._derive(child, layout) for child in children.values()])
    raise _no_rule_error(state, layout)

  @classmethod
  def _rule_of(cls, state_class: type) -> StateRule | None:
    """Return the rule for a class or for its nearest base class with a rule."""
    for known_class in state_class.__mro__:
      if known_class not in cls._RULES and known_class.__module__.partition('.')[0] == 'optax':
        cls._add_optax_rule(known_class)
      if known_class in cls._RULES:
        return cls._RULES[known_class]
    return None

  @classmethod
  def _add_optax_rule(cls, state_class: type) -> None:
    """Add the rule for a class of optax if the table has one for its name and fields."""
    name = state_class.__name__
    row = OPTAX_STATES.get(name)
    if callable(row):
      cls._RULES[state_class] = row
    elif row is not None and set(row) == set(kinds.fields_of(state_class) or ()):
      cls._RULES[state_class] = _rule_by_fields(name, row)


def _rule_by_fields(name: str, field_kinds: Mapping[str, str]) -> StateRule:

  def derive(state: Any, layout: ParamsLayout) -> Any:
    children, treedef = kinds.children_of(state)
    if missing := [field for field in children if field not in field_kinds]:
      raise ConfigError(
        f'{type(state).__name__} has arrays in {missing}, for which the rule for {name} has no kind. Register a rule '
        f'for {type(state).__name__} with a kind for each of {list(children)}.'
      )
    return treedef.unflatten(
      [
        kinds.KINDS[field_kinds[field]](value, layout, f'{name}.{field}')
        for field, value in children.items()
      ]
    )

  return derive


def _rule_by_function(name: str, rule: StateRule) -> StateRule:

  def derive(state: Any, layout: ParamsLayout) -> Any:
    axes = rule(state, layout)
    names.check_logical_axes(state, axes, f'{name} by its rule')
    return axes

  return derive


def _fields_with_arrays(state_class: type) -> tuple[str, ...] | None:
  """Return the fields with arrays of a named tuple or dataclass; None for any other class."""
  if dataclasses.is_dataclass(state_class):
    # flax.struct and JAX mark static fields in this way.
    return tuple(
      field.name
      for field in dataclasses.fields(state_class)
      if field.metadata.get('pytree_node', True) and not field.metadata.get('static', False)
    )
  return kinds.fields_of(state_class)


def _check_field_kinds(state_class: type, field_kinds: Mapping[str, str]) -> None:
  name = state_class.__name__
  found = _fields_with_arrays(state_class)
  fields = found or ()
  if found is None or set(fields) != set(field_kinds):
    unknown = [field for field in field_kinds if field not in fields]
    hint = ''
    if unknown and fields:
      hint = did_you_mean(unknown[0], fields)
    raise ConfigError(
      f'The rule for {name} must give a kind for each field with arrays, {list(fields)}, got one for '
      f'{list(field_kinds)}.{hint} For a state that the '
      f'kinds do not describe register a function: register({name}, rule).'
    )
  checks.check(name, field_kinds, **dict.fromkeys(field_kinds, checks.one_of(kinds.KINDS)))


def _bare_leaf_error(leaf: Any) -> ConfigError:
  if not isinstance(leaf, _ARRAY_TYPES):
    return ConfigError(
      f'An optax state has an object of type {type(leaf).__name__}, which is not a pytree. Register its class '
      'with JAX, for instance by flax.struct.dataclass, and its rule with '
      'optimizers.OptaxStatePartitionRules.register.'
    )
  return ConfigError(
    f'An optax state has an array of shape {tuple(np.shape(leaf))} outside of any state class, so that no rule gives '
    'its logical axes. Let the transformation return a named tuple as its state, and register this class '
    'with optimizers.OptaxStatePartitionRules.register.'
  )


def _no_rule_error(state: Any, layout: ParamsLayout) -> ConfigError:
  """Return the error for a class without a rule, with a proposed call that adds one."""
  state_class = type(state)
  name = state_class.__name__
  if _fields_with_arrays(state_class) is None:
    arguments = 'rule'
    remark = 'where rule is a function from (state, logical axes of the parameters).'
  else:
    children, _ = kinds.children_of(state)
    proposed = {field: kinds.propose_kind(value, layout) for field, value in children.items()}
    arguments = ', '.join(f'{field}={kind!r}' for field, kind in proposed.items())
    remark = (
      f'where the kinds, out of {tuple(kinds.KINDS)}, are guessed from the shapes. For a state that the kinds do not '
      'describe, give a function from (state, logical axes of the parameters) instead.'
    )
    unlike = [field for field, kind in proposed.items() if kind == 'replicated']
    if unlike:
      remark += (
        f' With this call, every device would have a copy of {unlike}, which fit no other kind.'
      )
  if arguments:
    arguments = f', {arguments}'
  call = f'optimizers.OptaxStatePartitionRules.register({name}{arguments})'
  return ConfigError(
    f'The optax state {state_class.__module__}.{state_class.__qualname__} has no rule for its logical axes. '
    f'Add one with {call} {remark}'
  )
