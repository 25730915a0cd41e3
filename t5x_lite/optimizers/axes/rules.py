"""Rules for the logical axes of optax states.

An optax state is a nest of named tuples. The shapes of its arrays tell their axes (`kinds.derive_inferred`): a copy
of a parameter, or a part of one, has the axes of the parameter, a scalar has none. Only states that shapes do not
describe have rules: random keys and short tables, of which every device has a copy, results of users' functions, and
statistics with fewer or more dims. `rules_optax` is the table of optax's; `OptaxStatePartitionRules.register` adds a
user's, with a function or with kinds of fields:

* `inferred`, the default: by the shapes of the arrays;
* `params`: a tree like the parameters, with the parameters' axes;
* `leading_dims`: stacked copies of the parameters: the parameters' axes after unnamed leading dims;
* `per_dim`: for each parameter a list of vectors, one for each dim, with the name of the dim;
* `reduced`: for each parameter an array that has only some of its dims, with their names;
* `per_parameter_scalar`: for each parameter one number, replicated;
* `nested`: a state, or a nest of states, of inner transformations, by the rules of their classes;
* `scalar`: counters, flags and other scalars, replicated; arrays with dims are an error;
* `matched`: as `inferred`, but all other arrays are replicated;
* `replicated`: arrays of any size that every device has a copy of: random keys, short tables.

In trees like the parameters, `optax.MaskedNode` or None may replace parameters that a transformation does not update.

An array that is like no parameter is an error unless it has a rule, because silently replicating a large state would
cost the memory that sharding saves.
"""

from collections.abc import Callable, Mapping
import contextvars
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

# Layout of the state for which a rule written for T5X is called, which does not pass on the parameters.
_layout_of_rule: contextvars.ContextVar[ParamsLayout | None] = contextvars.ContextVar(
  'layout_of_rule', default=None
)


class OptaxStatePartitionRules:
  """Table of the rules for the logical axes of optax states, by state class."""

  # T5X's table, to which users assign a `PartitionRule`, whose None stands for no axes.
  _RULES: ClassVar[dict[type, PartitionRule]] = {}
  # Optax's classes are added when the first of them is looked up; see `_rule_of`.
  _rules: ClassVar[dict[type, StateRule]] = {}

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
      **field_kinds: kind of a field with arrays: 'params', 'leading_dims', 'per_dim', 'reduced',
        'per_parameter_scalar', 'nested', 'scalar', 'matched' or 'replicated', see the module docstring; 'inferred' for
        fields that are not given.

    Raises:
      ConfigError: an unknown field, an unknown kind, or both a function and kinds.

    >>> from typing import NamedTuple
    >>> class MyState(NamedTuple):
    ...   momentum: Any
    ...   random_key: Any
    >>> OptaxStatePartitionRules.register(MyState, random_key='replicated')
    """
    if rule is None:
      _check_field_kinds(state_class, field_kinds)
      cls._rules[state_class] = _rule_by_fields(field_kinds)
      return
    if field_kinds or not callable(rule):
      raise ConfigError(
        f'The rule for {state_class.__name__} must be either a function from (state, logical axes of the parameters) '
        f'or a kind for each field, got {rule!r} and {field_kinds}.'
      )
    cls._rules[state_class] = _rule_by_function(
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
    cls._rules[state_class] = _rule_by_function(
      name, lambda state, layout: rule(state, layout.axes, layout.require_params(name))
    )

  @classmethod
  def derive_optax_logical_axes(
    cls, optax_state: PyTree, params_axes: LogicalAxes, params: Params | None = None
  ) -> PyTree:
    """Return the logical axes of an optax state.

    Args:
      optax_state: state of an optax transformation; arrays or `jax.ShapeDtypeStruct`s.
      params_axes: tree like the parameters with a `PartitionSpec` of logical names for each.
      params: the parameters or `jax.ShapeDtypeStruct`s of them. Few states need them (`FactoredState`, `GaLoreState`,
        `SplitRealAndImaginaryState`, and arrays with some of the dims of a parameter); if given, shapes are compared,
        else only ranks.

    Returns:
      The same structure with a `PartitionSpec` of one entry per dim for each array.

    Raises:
      ConfigError: an array whose axes its shape does not tell and no rule gives, a rule that does not fit the state, or
        missing parameters.
    """
    layout = ParamsLayout(axes=params_axes, params=params, derive=cls._derive)
    known = _layout_of_rule.get()
    if params is None and known is not None and known.axes is params_axes:
      layout = known
    try:
      return cls._derive(optax_state, layout)
    except kinds.UnlikeParamsError as error:
      raise _bare_array_error(error) from None

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
  def _derive(cls, node: Any, layout: ParamsLayout) -> Any:
    """Return the axes of a state, or of a nest of states: by the rules of their classes, else by the arrays' shapes."""
    derive = cls._rule_of(type(node)) or kinds.derive_inferred
    try:
      return derive(node, layout)
    except kinds.UnlikeParamsError as error:
      if not error.path or not _fields_with_arrays(type(node)):
        raise
      raise _unlike_error(type(node), error, layout) from None

  @classmethod
  def _rule_of(cls, state_class: type) -> StateRule | None:
    """Return the rule for a class or for its nearest base class with a rule."""
    for known_class in state_class.__mro__:
      if known_class in cls._RULES:
        return _rule_of_t5x(known_class.__name__, cls._RULES[known_class])
      if known_class not in cls._rules and known_class.__module__.partition('.')[0] == 'optax':
        cls._add_optax_rule(known_class)
      if known_class in cls._rules:
        return cls._rules[known_class]
    return None

  @classmethod
  def _add_optax_rule(cls, state_class: type) -> None:
    """Add the rule for a class of optax if the table has one for its name and fields."""
    name = state_class.__name__
    row = OPTAX_STATES.get(name)
    if callable(row):
      cls._rules[state_class] = row
    elif row is not None and set(row) <= set(kinds.fields_of(state_class) or ()):
      cls._rules[state_class] = _rule_by_fields(row)


def _rule_by_fields(field_kinds: Mapping[str, str]) -> StateRule:
  """Return the rule of a class: the kind of each field, 'inferred' for the others."""

  def derive(state: Any, layout: ParamsLayout) -> Any:
    children, treedef = kinds.children_of(state)
    axes = []
    for field, value in children.items():
      kind = kinds.KINDS[field_kinds.get(field, 'inferred')]
      try:
        axes.append(kind(value, layout, f'{type(state).__name__}.{field}'))
      except kinds.UnlikeParamsError as error:
        raise error.below(field) from None
    return treedef.unflatten(axes)

  return derive


def _rule_by_function(name: str, rule: StateRule) -> StateRule:

  def derive(state: Any, layout: ParamsLayout) -> Any:
    axes = rule(state, layout)
    names.check_logical_axes(state, axes, f'{name} by its rule')
    return axes

  return derive


def _rule_of_t5x(name: str, rule: PartitionRule) -> StateRule:
  """Return the rule of a class that users assign to `_RULES`."""

  def derive(state: Any, layout: ParamsLayout) -> Any:
    token = _layout_of_rule.set(layout)
    try:
      axes = rule(state, layout.axes)
    finally:
      _layout_of_rule.reset(token)
    return kinds.name_dims(state, axes)

  return _rule_by_function(name, derive)


def _fields_with_arrays(state_class: type) -> tuple[str, ...]:
  """Return the fields with arrays of a named tuple or dataclass; none for any other class."""
  if dataclasses.is_dataclass(state_class):
    # flax.struct and JAX mark static fields in this way.
    return tuple(
      field.name
      for field in dataclasses.fields(state_class)
      if field.metadata.get('pytree_node', True) and not field.metadata.get('static', False)
    )
  return kinds.fields_of(state_class) or ()


def _check_field_kinds(state_class: type, field_kinds: Mapping[str, str]) -> None:
  name = state_class.__name__
  fields = _fields_with_arrays(state_class)
  unknown = [field for field in field_kinds if field not in fields]
  if unknown or not fields:
    hint = ''
    if unknown and fields:
      hint = did_you_mean(unknown[0], fields)
    raise ConfigError(
      f'The rule for {name} must give kinds of its fields with arrays, {list(fields)}, got kinds of '
      f'{list(field_kinds)}.{hint} For a state that the kinds do not describe register a function: '
      f'register({name}, rule).'
    )
  checks.check(name, field_kinds, **dict.fromkeys(field_kinds, checks.one_of(kinds.KINDS)))


def _unlike_error(
  state_class: type, error: kinds.UnlikeParamsError, layout: ParamsLayout
) -> ConfigError:
  """Return the error for a field with an array that is like no parameter, with a call that gives it a rule."""
  name = state_class.__name__
  field = error.path[0]
  where = f'{name}.{"/".join(error.path)}'
  shape = tuple(np.shape(error.array))
  if _is_vector_of_all_parameters(shape, layout):
    return ConfigError(
      f'{where} is one vector of all parameters, as in optax.flatten, which cannot be sharded: remove optax.flatten.'
    )
  return ConfigError(
    f'The logical axes of {where} do not follow from its shape {shape}: {error.reason}. If every device may have a '
    f'copy of it, call optimizers.OptaxStatePartitionRules.register({name}, {field}={"replicated"!r}); else register a '
    f'function from (state, logical axes of the parameters): register({name}, rule).'
  )


def _is_vector_of_all_parameters(shape: tuple[int, ...], layout: ParamsLayout) -> bool:
  if layout.params is None:
    return False
  num_parameters = sum(np.size(param) for param in jax.tree.leaves(layout.params))
  return shape == (num_parameters,)


def _bare_array_error(error: kinds.UnlikeParamsError) -> ConfigError:
  """Return the error for an array that is like no parameter and in no field of a state class."""
  if not isinstance(error.array, kinds.ARRAY_TYPES):
    return ConfigError(
      f'An optax state has an object of type {type(error.array).__name__}, which is not a pytree. Register its class '
      'with JAX, for instance by flax.struct.dataclass.'
    )
  return ConfigError(
    f'The logical axes of an array of shape {tuple(np.shape(error.array))} outside of any state class do not follow '
    f'from its shape: {error.reason}. Let the transformation return a named tuple as its state, and register a rule '
    'for this class with optimizers.OptaxStatePartitionRules.register.'
  )
