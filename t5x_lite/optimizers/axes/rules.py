"""How the states of optax transformations are laid out over a mesh.

An optax state is a nest of named tuples. For each class a rule says of every field what it is; the kinds are

* `params`: a tree shaped like the parameters; its axes are theirs;
* `leading_dims`: copies of the parameters, stacked: the parameters' axes after unnamed leading dims;
* `per_dim`: for each parameter a list of vectors, one for each of its dims, with the name of that dim;
* `per_parameter_scalar`: for each parameter one number, replicated;
* `nested`: a state, or a nest of states, of inner transformations, each by its own rule;
* `scalar`: counters, flags and the like, replicated; an array of any dims is refused;
* `matched`: anything; a part that is laid out like the parameters has their axes, all else is replicated;
* `replicated`: arrays of which every device holds a copy, whatever their size: random keys, short tables.

In trees laid out like the parameters `optax.MaskedNode`, or None, may stand for what a transformation leaves alone. The
classes of optax are in `rules_optax`; statistics that have lost or gained dims (`FactoredState`, `GaLoreState`) have
rules of their own in `reduced`.

A class without a rule is refused, since replicating a large state in silence costs the memory that sharding was to
save. `OptaxStatePartitionRules.register` adds a rule for a class of one's own.
"""

from collections.abc import Callable, Mapping
import dataclasses
import sys
from typing import Any, ClassVar

import jax
import numpy as np

from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.axes import names, kinds
from t5x_lite.optimizers.axes.kinds import ParamsLayout, StateRule
from t5x_lite.optimizers.axes.rules_optax import OPTAX_STATES
from t5x_lite.types import LogicalAxes, Params, PyTree

# From (state, logical axes of the parameters) to the state with a `PartitionSpec` in the place of each array.
PartitionRule = Callable[[Any, LogicalAxes], Any]
# The same for states whose layout depends on the parameters' shapes: from (state, logical axes, parameters).
ShapedPartitionRule = Callable[[Any, LogicalAxes, Params], Any]

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)


class OptaxStatePartitionRules:
  """The table from optax state class to the rule for its logical axes."""

  # The classes of optax are added when the first of them is met; see `_rule_of`.
  _RULES: ClassVar[dict[type, StateRule]] = {}

  @classmethod
  def register(cls, state_class: type, rule: PartitionRule | None = None, /, **field_kinds: str) -> None:
    """Adds the rule for a state class and its subclasses; a later rule replaces an earlier one.

    Args:
      state_class: the class of the state: a named tuple or a dataclass that JAX takes for a tree (`flax.struct`,
        `jax.tree_util.register_dataclass`, chex), or any other such class if `rule` is given.
      rule: a function from (state, logical axes of the parameters) to the state with a `PartitionSpec` of one entry per
        dim in the place of each array, for states that the kinds below do not describe. If it needs the parameters'
        shapes, use `register_with_params`.
      **field_kinds: for every field of the class that holds arrays 'params', 'leading_dims', 'per_dim',
        'per_parameter_scalar', 'nested', 'scalar', 'matched' or 'replicated': what that field is, see the module
        docstring.

    Raises:
      ConfigError: fields that are missing, unknown, or of an unknown kind.

    >>> from typing import NamedTuple
    >>> class MyState(NamedTuple):
    ...   count: Any
    ...   momentum: Any
    >>> OptaxStatePartitionRules.register(MyState, count='scalar', momentum='params')
    """
    if not isinstance(state_class, type):
      raise ConfigError(f'register takes the class of a state, got {state_class!r}; give the class itself.')
    if rule is None:
      _check_field_kinds(state_class, field_kinds)
      cls._RULES[state_class] = _rule_by_fields(state_class.__name__, field_kinds)
      return
    if field_kinds:
      raise ConfigError(
          f'The rule for {state_class.__name__} is given twice: as a function and by fields; give one of them.')
    if not callable(rule):
      raise ConfigError(
          f'The rule for {state_class.__name__} is {rule!r}; expected a function from (state, logical axes of the '
          'parameters), or kinds of fields by name.')
    cls._RULES[state_class] = _rule_by_function(state_class.__name__, lambda state, layout: rule(state, layout.axes))

  @classmethod
  def register_with_params(cls, state_class: type, rule: ShapedPartitionRule, /) -> None:
    """Adds a rule that needs the shapes of the parameters: factored, low-rank, blocked or flattened statistics.

    Args:
      state_class: as for `register`.
      rule: a function from (state, logical axes of the parameters, the parameters or `jax.ShapeDtypeStruct`s of them)
        to the state with a `PartitionSpec` of one entry per dim in the place of each array.

    Raises:
      ConfigError: `rule` is no function.
    """
    if not isinstance(state_class, type) or not callable(rule):
      raise ConfigError(
          f'register_with_params takes the class of a state and a function, got {state_class!r} and {rule!r}.')
    name = state_class.__name__
    cls._RULES[state_class] = _rule_by_function(
        name, lambda state, layout: rule(state, layout.axes, layout.require_params(name)))

  @classmethod
  def has_rule(cls, state_class: type) -> bool:
    """Whether there is a rule for states of this class."""
    return cls._rule_of(state_class) is not None

  @classmethod
  def derive_optax_logical_axes(
      cls, optax_state: PyTree, params_axes: LogicalAxes, params: Params | None = None) -> PyTree:
    """Derives the logical axes of an optax state.

    Args:
      optax_state: what `init` or `update` of an optax transformation returned; arrays or `jax.ShapeDtypeStruct`s.
      params_axes: a `PartitionSpec` of logical names for each parameter, in the structure of the parameters.
      params: the parameters or `jax.ShapeDtypeStruct`s of them. Few states need them (`FactoredState`, `GaLoreState`,
        `SplitRealAndImaginaryState`); given, they are compared with what claims to be a copy of them.

    Returns:
      The same structure with a `PartitionSpec` of one entry per dim at each array.

    Raises:
      ConfigError: a state class without a rule, a rule that does not fit the state, or parameters that are needed and
        not given.
    """
    return cls._derive(optax_state, ParamsLayout(axes=params_axes, params=params, derive=cls._derive))

  @classmethod
  def derive_params_axes(cls, optax_params: PyTree, params_axes: LogicalAxes) -> LogicalAxes:
    """Returns the parameters' axes in the structure of a copy of the parameters that an optax state holds.

    Args:
      optax_params: a tree shaped like the parameters, in which `optax.MaskedNode` may stand for any subtree.
      params_axes: a `PartitionSpec` of logical names for each parameter, in the structure of the parameters.

    Returns:
      `params_axes`, with `optax.MaskedNode` where `optax_params` has it.

    Raises:
      ConfigError: `optax_params` is not laid out like the parameters.
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
    # A chex dataclass is a mapping too, but a class of its own.
    if _fields_with_arrays(type(state)) is None and isinstance(state, (tuple, list, Mapping)):
      children, treedef = kinds.children_of(state)
      return treedef.unflatten([cls._derive(child, layout) for child in children.values()])
    raise _no_rule_error(state, layout)

  @classmethod
  def _rule_of(cls, state_class: type) -> StateRule | None:
    """Returns the rule for a class, or for the nearest of its base classes that has one."""
    for known_class in state_class.__mro__:
      if known_class not in cls._RULES and known_class.__module__.partition('.')[0] == 'optax':
        cls._add_optax_rules()
      if known_class in cls._RULES:
        return cls._RULES[known_class]
    return None

  @classmethod
  def _add_optax_rules(cls) -> None:
    """Adds the tables' rules for the classes of optax that are imported; rules of the user's stay."""
    for module_name, rows in OPTAX_STATES.items():
      for name, row in rows.items():
        state_class = getattr(sys.modules.get(module_name), name, None)
        if state_class is None or state_class in cls._RULES:
          continue
        if callable(row):
          cls._RULES[state_class] = row
        elif set(row) == set(kinds.fields_of(state_class) or ()):
          cls._RULES[state_class] = _rule_by_fields(name, row)


def _rule_by_fields(name: str, field_kinds: Mapping[str, str]) -> StateRule:

  def derive(state: Any, layout: ParamsLayout) -> Any:
    children, treedef = kinds.children_of(state)
    if missing := [field for field in children if field not in field_kinds]:
      raise ConfigError(
          f'{type(state).__name__} holds arrays in {missing}, of which the rule for {name} says nothing; register a '
          f'rule for {type(state).__name__} with a kind for each of {list(children)}.')
    return treedef.unflatten([
        kinds.KINDS[field_kinds[field]](value, layout, f'{name}.{field}') for field, value in children.items()])

  return derive


def _rule_by_function(name: str, rule: StateRule) -> StateRule:

  def derive(state: Any, layout: ParamsLayout) -> Any:
    axes = rule(state, layout)
    names.check_logical_axes(state, axes, f'{name} by its rule')
    return axes

  return derive


def _fields_with_arrays(state_class: type) -> tuple[str, ...] | None:
  """Returns the fields that a rule must speak of; None for a class that has no fields to speak of."""
  if dataclasses.is_dataclass(state_class):
    # The marks of flax.struct and of JAX for fields that are part of the structure.
    return tuple(
        field.name for field in dataclasses.fields(state_class)
        if field.metadata.get('pytree_node', True) and not field.metadata.get('static', False))
  return kinds.fields_of(state_class)


def _check_field_kinds(state_class: type, field_kinds: Mapping[str, str]) -> None:
  name = state_class.__name__
  fields = _fields_with_arrays(state_class)
  if fields is None:
    raise ConfigError(
        f'{name} is neither a named tuple nor a dataclass, so its rule must be a function: register({name}, rule).')
  if functions := [field for field, kind in field_kinds.items() if callable(kind)]:
    raise ConfigError(f'The rule for {name} has a function as {functions[0]!r}; a rule function has no name: '
                      f'register({name}, rule).')
  if missing := [field for field in fields if field not in field_kinds]:
    raise ConfigError(f'The rule for {name} says nothing of {missing}; give a kind for every field.')
  for field, kind in field_kinds.items():
    if field not in fields:
      raise ConfigError(
          f'The rule for {name} names a field {field!r} it has not, or that holds no arrays.'
          f'{did_you_mean(field, fields)}')
    if kind not in kinds.KINDS:
      raise ConfigError(
          f'The rule for {name}.{field} is of the kind {kind!r}; expected one of {tuple(kinds.KINDS)}.'
          f'{did_you_mean(str(kind), kinds.KINDS)}')


def _bare_leaf_error(leaf: Any) -> ConfigError:
  if not isinstance(leaf, _ARRAY_TYPES):
    return ConfigError(
        f'An optax state holds an object of type {type(leaf).__name__}, which JAX takes for no tree of arrays; '
        'register its class with JAX first, for instance by flax.struct.dataclass, then its rule with '
        'optimizers.OptaxStatePartitionRules.register.')
  return ConfigError(
      f'An optax state holds an array of shape {tuple(np.shape(leaf))} outside of any state class, so there '
      'is no rule for its logical axes; wrap the state of that transformation in a named tuple and register it '
      'with optimizers.OptaxStatePartitionRules.register.')


def _no_rule_error(state: Any, layout: ParamsLayout) -> ConfigError:
  """Returns the error for a class without a rule, with the call that adds one, as far as the state shows it."""
  state_class = type(state)
  name = state_class.__name__
  if _fields_with_arrays(state_class) is None:
    arguments, remark = 'rule', 'where rule is a function from (state, logical axes of the parameters).'
  else:
    proposed = {field: kinds.propose_kind(value, layout) for field, value in kinds.children_of(state)[0].items()}
    arguments = ', '.join(f'{field}={kind!r}' for field, kind in proposed.items())
    remark = (
        f'where the kinds are what the shapes suggest, each one of {tuple(kinds.KINDS)}. A state that they do not '
        'describe has a function from (state, logical axes of the parameters) instead.')
    if unlike := [field for field, kind in proposed.items() if kind == 'replicated']:
      remark += f' As written, every device would hold a copy of {unlike}, which fit no other kind.'
  call = f'optimizers.OptaxStatePartitionRules.register({name}{", " if arguments else ""}{arguments})'
  return ConfigError(
      f'There is no rule for the logical axes of the optax state {state_class.__module__}.{state_class.__qualname__}; '
      f'add one with {call} {remark}')
