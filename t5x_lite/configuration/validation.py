"""Validation of a configuration before anything of it runs: reachable configurables, and types of values.

gin evaluates lazily, so that a binding without effect and a value of the wrong type are reported late or never. Since
configurables are registered dynamically, parameters reach a function only through references (`@module.fn`), so that
following the references from the entry point finds exactly the bindings that have an effect.
"""

import collections.abc
from collections.abc import Callable, Collection, Mapping
import dataclasses
import difflib
import enum
import graphlib
import inspect
import re
import types
import typing
from typing import Any

from gin import config as gin_config

from t5x_lite import checks
from t5x_lite.configuration import module_imports
from t5x_lite.configuration.syntax import REQUIRED
from t5x_lite.configuration.syntax import Location
from t5x_lite.configuration.syntax import Macro
from t5x_lite.configuration.table import MACRO
from t5x_lite.configuration.table import Key
from t5x_lite.configuration.table import Row
from t5x_lite.configuration.table import Scope
from t5x_lite.configuration.table import Table
from t5x_lite.configuration.table import configurable_of
from t5x_lite.configuration.table import configurables
from t5x_lite.configuration.table import is_macro
from t5x_lite.configuration.table import references
from t5x_lite.configuration.table import short_name
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.formatting import gin_flag
from t5x_lite.formatting import short_repr

# Modules whose classes accept values of other types, e.g. int for float, or a list for an array.
_LOOSELY_TYPED = (
  'abc',
  'builtins',
  'collections',
  'enum',
  'jax',
  'jaxlib',
  'numpy',
  'os',
  'pathlib',
  'typing',
)
# Packages whose annotations values are checked against. Annotations of users are often not meant literally.
_CHECKED = module_imports.TRUSTED
# What the parameters need that read a macro which may be None for others.
_NEEDS = {'TRAIN_STEPS': 'the total number of steps'}
# Files that set macros whose values are objects.
_FILES_OF = {'MODEL': 'models/byt5_small.gin', 'OPTIMIZER': 'optimizers/adafactor.gin'}
_PLAIN = (int, float, str, bool, type(None), list, tuple, dict)


@dataclasses.dataclass(frozen=True)
class Use:
  """Configurable in one scope that the entry point reaches, and the bindings that apply there.

  Attributes:
    configurable: the configurable.
    scope: active scopes, outermost first.
    evaluated: whether gin calls it, so that every required parameter must be bound, or passes it as a callable.
    bound: rows of the bindings by parameter; of an inherited value, the row of the base class.
    is_of_macro: whether the scope is only active because a macro of that name is evaluated.
  """

  configurable: gin_config.Configurable
  scope: Scope
  evaluated: bool
  bound: Mapping[str, Row]
  is_of_macro: bool = False

  @property
  def name(self) -> str:
    """Name of the configurable as users write it, with its scope unless that is a macro's."""
    name = short_name(self.configurable)
    if self.is_of_macro:
      return name
    return '/'.join((*self.scope, name))


def reachable(entry: Callable[..., Any], table: Table) -> list[Use]:
  """Return all uses of configurables that calling `entry` through gin can reach, `entry` first.

  Args:
    entry: a registered function.
    table: the bindings.
  """
  registry = configurables()
  by_object = {id(configurable.wrapped): configurable for configurable in registry.values()}
  found: dict[tuple[str, Scope, bool], Use] = {}
  waiting: list[tuple[gin_config.Configurable, Scope, bool]] = [(by_object[id(entry)], (), True)]
  while waiting:
    configurable, scope, evaluated = waiting.pop(0)
    if (configurable.selector, scope, evaluated) in found:
      continue
    rows = table.in_scope(scope, configurable.selector)
    bound = {parameter: row.base or row for parameter, row in rows.items()}
    is_of_macro = table.is_macro('/'.join(scope))
    use = Use(configurable, scope, evaluated, bound, is_of_macro)
    found[configurable.selector, scope, evaluated] = use
    for row in bound.values():
      for reference in references(row.value):
        # A reference without a scope runs in the active one. Callables run later, without a scope.
        if reference.scopes:
          scopes = [tuple(reference.scopes)]
        elif reference.evaluate:
          scopes = [scope]
        else:
          scopes = [scope, ()]
        referenced = configurable_of(reference)
        waiting += [(referenced, inner, reference.evaluate) for inner in scopes]
    if inspect.isclass(configurable.wrapped):
      start = f'{configurable.selector}.'
      for method in registry.values():
        if method.is_method and method.selector.startswith(start):
          waiting += [(method, inner, False) for inner in {scope, ()}]
  return list(found.values())


def check(
  entry: Callable[..., Any],
  table: Table,
) -> list[Use]:
  """Raise for flags without effect, required parameters without a value, and values of the wrong type.

  Args:
    entry: the function that will be called through gin.
    table: the bindings.

  Returns:
    Result of `reachable`.

  Raises:
    ConfigError: with the binding, its location, the expectation and the remedy.
  """
  uses = reachable(entry, table)
  _check_effect(entry, uses, table)
  for use in uses:
    if use.configurable.selector == MACRO and not use.bound:
      name = '/'.join(use.scope)
      raise ConfigError(
        f'{_reader_of(name, table)}: the macro {name!r} is not defined. Write a value, or a macro '
        'that a file sets.'
      )
  _check_cycles(uses)
  signatures = []
  for use in uses:
    if use.configurable.selector != MACRO:
      parameters = _signature(use.configurable.wrapped)
      if parameters is not None:
        signatures.append((use, parameters))
  checked = []
  for use, parameters in signatures:
    if not _is_checked(use.configurable.wrapped):
      continue
    hints = _type_hints(use.configurable.wrapped)
    for name, row in use.bound.items():
      if name in hints and name in parameters:
        checked.append((use, parameters[name], hints[name], row))
  without_effect = set()
  for use, _, hint, row in checked:
    without_effect |= _arguments_of_callers(use, hint, row, table)
  for use, parameter, hint, row in checked:
    if row.key not in without_effect:
      _check_type(use, parameter, hint, row, table)
  for use, parameters in signatures:
    if use.evaluated:
      unbound = _unbound(use, parameters)
      if unbound:
        raise ConfigError(
          f'{use.name} requires {", ".join(unbound)}, which is not bound. Set '
          f'--gin.{use.name}.{unbound[0]}=VALUE or add a file that binds it.'
        )
  return uses


def _reader_of(macro: str, table: Table) -> Location | str:
  """Return the location of the first binding that reads a macro."""
  for row in table.values():
    if row.location is None:
      continue
    for reference in references(row.value):
      if is_macro(reference) and '/'.join(reference.scopes) == macro:
        return row.location
  return 'The configuration'


def _unbound(use: Use, parameters: Mapping[str, inspect.Parameter]) -> list[str]:
  """Return the names of the required parameters that are not bound."""
  unbound = []
  for name, parameter in parameters.items():
    default = parameter.default
    is_required = default is parameter.empty or default is gin_config.REQUIRED
    if is_required and name not in use.bound and _can_be_bound(parameter):
      unbound.append(name)
  return unbound


def _check_cycles(uses: list[Use]) -> None:
  """Raise if an object is an argument of itself."""
  by_object = {(use.configurable.selector, use.scope): use for use in uses if use.evaluated}
  graph = {}
  for node, use in by_object.items():
    arguments = set()
    for row in use.bound.values():
      for reference in references(row.value):
        if reference.evaluate:
          scope = tuple(reference.scopes) or use.scope
          arguments.add((configurable_of(reference).selector, scope))
    graph[node] = arguments
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    names = []
    for node in error.args[1]:
      selector, scope = node
      if selector == MACRO:
        names.append(f'%{"/".join(scope)}')
      else:
        names.append(by_object[node].name)
    raise ConfigError(
      f'{names[0]} is an argument of itself: {" -> ".join(names)}. Bind something else to one of '
      'them.'
    ) from None


def _check_effect(
  entry: Callable[..., Any],
  uses: list[Use],
  table: Table,
) -> None:
  """Raise if no reached configurable reads the binding of a flag."""
  read = {row.key for use in uses for row in use.bound.values()}
  registry = configurables()
  for row in table.values():
    scope, selector, parameter = row.key
    configurable = registry[selector]
    if row.key in read or not row.is_flag:
      continue
    if _is_required_by_file(row) and scope not in table.replaced:
      continue
    # User code may call a function that it has registered itself without a reference.
    if selector != MACRO and configurable.import_source is None:
      continue
    used = [use for use in uses if use.configurable.selector == selector]
    wanted = tuple(scope.split('/')) if scope else ()
    narrower = next((use for use in used if use.scope[: len(wanted)] == wanted), None)
    if selector == MACRO:
      reason = _why_macro_has_no_effect(row, entry, read, table.replaced)
    elif narrower is not None:
      by = narrower.bound[parameter]
      reason = (
        f'the narrower binding {narrower.name}.{parameter} = {short_repr(by.value)} '
        f'({by.where}) has priority. Set that one.'
      )
    elif used:
      names = ' or '.join(dict.fromkeys(f'{use.name}.{parameter}' for use in used))
      reason = f'the scope {scope!r} is not used. Set {names}.'
    else:
      name = short_name(configurable)
      known = [each.name for each in uses if not _is_builtin(each)]
      reason = f'{name} is not used.{did_you_mean(name, known)}'
    raise ConfigError(f'{row.location} has no effect: {reason}')


def misspelt_scopes(uses: list[Use], table: Table) -> list[str]:
  """Return a warning for each binding of a file whose scope is not used and similar to a used one.

  Unused scopes are allowed, since a file may be used for several commands.
  """
  used: dict[str, set[str]] = {}
  for use in uses:
    scopes = used.setdefault(use.configurable.selector, set())
    for length in range(len(use.scope)):
      scope = '/'.join(use.scope[: length + 1])
      if not table.is_macro(scope):
        scopes.add(scope)
  sentences = []
  for row in table.values():
    scope, selector, parameter = row.key
    if row.location is None or row.is_flag:
      continue
    known = used.get(selector, set())
    if scope and selector != MACRO and scope not in known:
      near = difflib.get_close_matches(scope, known, n=1, cutoff=0.78)
      if near:
        name = f'{short_name(configurables()[selector])}.{parameter}'
        sentences.append(
          f'{row.location}: the scope of {scope}/{name} is not used. Did you mean {near[0]}/{name}?'
        )
  return sentences


def _of_file(row: Row) -> Row | None:
  """Return the binding of a file that a flag replaces, or None."""
  found = row.former
  while found is not None and found.is_flag:
    found = found.former
  return found


def _is_required_by_file(row: Row) -> bool:
  """Return True if a file requires the macro that a flag sets: without the flag, it would be missing."""
  found = _of_file(row)
  return (
    found is not None and found.statement is not None and found.statement.value == Macro(REQUIRED)
  )


def _why_macro_has_no_effect(
  row: Row,
  entry: Callable[..., Any],
  read: Collection[Key],
  replaced: Mapping[str, Location],
) -> str:
  name = row.key[0]
  if name in replaced:
    return f'{replaced[name]} replaces the binding that reads {name!r}. Remove one of the two.'
  if _of_file(row) is not None:
    return f'a file sets {name!r} too, but {entry.__name__} does not use it. Remove the flag.'
  names = [used_name for used_name, selector, _ in read if selector == MACRO]
  return f'the macro {name!r} is not used.{did_you_mean(name, names)}'


def _is_builtin(use: Use) -> bool:
  return use.configurable.selector.startswith('gin.')


def location_of(
  owner: str,
  name: str,
  shown: str,
  uses: Collection[Use],
  table: Table,
  scope: Scope | None,
) -> Location | None:
  """Return the line in a file that binds an invalid option; None if not exactly one binding can be meant.

  Args:
    owner: end of the name of the class or function that has the option, or of a base; empty for any.
    name: name of the option.
    shown: the invalid value as text; with an owner, a part of the bound value too.
    uses: result of `reachable`.
    table: the bindings.
    scope: scope in which the owner is called; None if unknown.
  """
  equal: set[Location | None] = set()
  similar: set[Location | None] = set()
  for use in uses:
    parameter = (_signature(use.configurable.wrapped) or {}).get(name)
    if parameter is None or scope not in (None, use.scope) or not _is_owner(use, owner):
      continue
    if name in use.bound:
      row = table.path(use.bound[name])[-1]
      value = row.value
      location = None if row.path is None else row.location
    else:
      value = parameter.default
      location = None
    if repr(value) == shown:
      equal.add(location)
    elif owner and (shown.strip('\'".') in repr(value) or [*references(value)]):
      similar.add(location)
  found, *others = equal or similar or (None,)
  if others:
    return None
  return found


def _is_owner(use: Use, owner: str) -> bool:
  """Return whether `owner` is the end of the name of a configurable or of a base; True if it is empty."""
  if not owner:
    return True
  wrapped = use.configurable.wrapped
  kinds = wrapped.__mro__ if inspect.isclass(wrapped) else (wrapped,)
  names = [use.configurable.selector]
  names += [f'{kind.__module__}.{kind.__qualname__}' for kind in kinds]
  return any(f'.{name}'.endswith(f'.{owner}') for name in names)


# ----------------------------------------------------------------------------------------------------------------------
# Types


def _signature(fn_or_cls: Any) -> Mapping[str, inspect.Parameter] | None:
  try:
    return inspect.signature(fn_or_cls).parameters
  except (TypeError, ValueError):
    return None  # A built-in function.


def _is_checked(fn_or_cls: Any) -> bool:
  """Return whether a function, or the constructor of a class, is of a package whose annotations are checked."""
  if inspect.isclass(fn_or_cls):
    fn_or_cls = fn_or_cls.__init__
  module = getattr(fn_or_cls, '__module__', None) or ''
  return module.partition('.')[0] in _CHECKED


def parameter_names(fn_or_cls: Any) -> list[str]:
  """Return the names that can be bound for a function or class, for suggestions."""
  parameters = _signature(fn_or_cls) or {}
  return [
    name for name, parameter in parameters.items() if name != 'self' and _can_be_bound(parameter)
  ]


def _can_be_bound(parameter: inspect.Parameter) -> bool:
  return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _type_hints(fn_or_cls: Any) -> Mapping[str, Any]:
  try:
    if inspect.isclass(fn_or_cls):
      return typing.get_type_hints(fn_or_cls.__init__)
    return typing.get_type_hints(fn_or_cls)
  except (NameError, TypeError, AttributeError):
    return {}  # Only a type checker can resolve the annotations.


def _check_type(use: Use, parameter: inspect.Parameter, hint: Any, row: Row, table: Table) -> None:
  path = table.path(row)
  value = path[-1].value
  location = path[-1].location
  if value is None and parameter.default is None:
    return
  if isinstance(value, gin_config.ConfigurableReference):
    _check_reference(use, parameter, hint, value, path[-1], table)
  if fits(value, hint):
    return
  option = f'{use.name}.{parameter.name}'
  if len(path) > 1:  # through a macro
    name = path[-1].key[0]
    for_what = f' for {option}'
  else:
    name = option
    for_what = ''
  where = ''
  if location is not None and not location.on_command_line:
    where = f' ({location})'
  remedy = ''
  if value is None and name in _NEEDS:
    remedy = f' {use.name} needs {_NEEDS[name]}: set {name}, or --gin.{option} to a number.'
  elif isinstance(value, float) and value.is_integer() and fits(int(value), hint):
    remedy = f' Write {int(value)}.'
  elif name.endswith('.factors') and isinstance(value, (list, tuple)):
    remedy = f' Write {gin_flag(name, " * ".join(map(str, value)))}.'
  elif _is_schedule(hint) and isinstance(value, (int, float)) and not isinstance(value, bool):
    schedule = 'schedules.create_learning_rate_scheduler'
    flags = [
      gin_flag(name, f'@{schedule}()'),
      gin_flag(f'{schedule}.factors', 'constant'),
      gin_flag(f'{schedule}.base_learning_rate', repr(value)),
    ]
    remedy = f' For a constant rate, write {" ".join(flags)}.'
  elif name in _FILES_OF:
    remedy = f' Remove it and add a file that sets it, e.g. --gin_file={_FILES_OF[name]}.'
  elif isinstance(value, (bool, int, float)) and fits('', hint):
    text = f'"{value}"'
    remedy = f' Write {gin_flag(name, text)}.'
  raise ConfigError(
    f'`{name}` must be {describe(hint)}{for_what}, got {short_repr(value)} of type '
    f'{type(value).__name__}{where}.{remedy}'
  )


def _is_schedule(hint: Any) -> bool:
  """Return whether an annotation is that of a schedule of learning rates."""
  return any(
    getattr(kind, '__name__', '') == 'LearningRateCallable' for kind in _alternatives(hint)
  )


def _check_reference(
  use: Use,
  parameter: inspect.Parameter,
  hint: Any,
  value: gin_config.ConfigurableReference,
  row: Row,
  table: Table,
) -> None:
  """Raise for `@Class` instead of an instance, `@Class()` instead of a class, and classes of the wrong type."""
  configurable = configurable_of(value)
  fn_or_cls = configurable.wrapped
  made = _made(fn_or_cls)
  kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
  location = row.location
  if made is None:
    return
  written = f'@{short_name(configurable)}'
  all_classes = bool(kinds) and all(map(_is_known_class, kinds))
  problem = ''
  if not value.evaluate:
    if any(kind in made.__mro__ and kind is not object for kind in kinds):
      problem = (
        f'must be an instance, got a factory of it. Write {_as_bound(location, f"{written}()")}'
      )
    elif all_classes and not isinstance(fn_or_cls, tuple(kinds)):
      problem = f'must be of type {describe(hint)}, got {written}, a factory of {_full_name(made)}'
  elif (
    fn_or_cls is made and not _defines_call(made) and kinds and all(map(_takes_a_callable, kinds))
  ):
    problem = (
      f'must be {written} itself, got an instance. Write {_as_bound(location, written)} without ()'
    )
  elif all_classes and not _is_protocol(made) and not any(_related(made, kind) for kind in kinds):
    problem = f'must be of type {describe(hint)}, got {written}() of type {_full_name(made)}'
  if problem:
    remedy = ''
    if made.__module__.partition('.')[0] == 't5x':
      remedy = (
        ' It is of T5X itself. Call t5x_lite.compat.install() before the module that imports t5x, so that it '
        'gets the classes of t5x_lite.'
      )
    raise ConfigError(f'{location or use.name}: {use.name}.{parameter.name} {problem}.{remedy}')


def _as_bound(location: Location | None, value: str) -> str:
  """Return a value as users write it where it is bound: as a flag, or without its name as in a file."""
  name = ''
  if location is not None and location.source.startswith('--gin.'):
    name = location.source.removeprefix('--gin.').partition('=')[0]
  return gin_flag(name, value) if name else value


def _full_name(made: type) -> str:
  """Return the name of a class with its module: classes of several packages have the same name."""
  return f'{made.__module__}.{made.__qualname__}'


def _arguments_of_callers(use: Use, hint: Any, row: Row, table: Table) -> set[Key]:
  """Return the bindings of a function for parameters that its caller passes, so that they have no effect.

  They are the keyword-only parameters of a protocol, and the first ones of a `Callable` with types of its arguments.

  Raises:
    ConfigError: there are any, and the configuration was not written for T5X, which accepts them.
  """
  value = table.path(row)[-1].value
  if not isinstance(value, gin_config.ConfigurableReference) or value.evaluate:
    return set()
  configurable = configurable_of(value)
  own = list(_signature(configurable.wrapped) or ())
  passed = set()
  for kind in _alternatives(hint):
    if typing.get_origin(kind) is collections.abc.Callable:
      types_of_arguments = typing.get_args(kind)[0]
      if isinstance(types_of_arguments, list):
        passed.update(own[: len(types_of_arguments)])
    if _is_protocol(kind) and '__call__' in vars(kind):
      for parameter in inspect.signature(kind.__call__).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
          passed.add(parameter.name)
  keys = set()
  for length in range(len(value.scopes) + 1):
    scope = '/'.join(value.scopes[:length])
    bound = table.groups.get((scope, configurable.selector), {})
    for name in sorted(passed & set(bound)):
      problem = f'{short_name(configurable)}.{name} has no effect: {use.name} passes {name} itself.'
      if not checks.log_for_t5x(problem):
        raise ConfigError(f'{problem} Remove the binding, and set {name} in {use.name}.')
      keys.add((scope, configurable.selector, name))
  return keys


def _made(fn_or_cls: Any) -> type | None:
  """Return the class of the instances of a class or of a function's annotated results; None if unknown."""
  made = fn_or_cls
  if not inspect.isclass(made):  # One annotation that cannot be resolved hides the others.
    made = _type_hints(made).get('return') or getattr(made, '__annotations__', {}).get('return')
  if not inspect.isclass(made) or typing.get_origin(made) is not None:
    return None
  if made in (type(None), Any):
    return None
  return made


def _is_union(hint: Any) -> bool:
  return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _alternatives(hint: Any) -> tuple[Any, ...]:
  if _is_union(hint):
    return typing.get_args(hint)
  return (hint,)


def _is_protocol(kind: Any) -> bool:
  # typing has a public function for this from Python 3.13 on.
  return getattr(kind, '_is_protocol', False)


def _is_known_class(kind: Any) -> bool:
  """Return whether `kind` is a class for which no value of another type, such as a list, is accepted."""
  if not inspect.isclass(kind) or typing.get_origin(kind) is not None or _is_protocol(kind):
    return False
  return not issubclass(kind, enum.Enum) and kind.__module__.split('.')[0] not in _LOOSELY_TYPED


def _defines_call(kind: type) -> bool:
  return any('__call__' in vars(base) for base in kind.__mro__)


def _takes_a_callable(kind: Any) -> bool:
  """Return whether an annotation requires a function or a class instead of an instance."""
  if typing.get_origin(kind) is type:
    return any(map(_is_known_class, typing.get_args(kind)))
  plain = typing.get_origin(kind) or kind
  return plain is collections.abc.Callable or (
    inspect.isclass(kind) and _is_protocol(kind) and _defines_call(kind)
  )


def _related(made: type, kind: type) -> bool:
  """Return whether two classes share a user-defined base, so that one may replace the other."""
  for base in made.__mro__:
    package = base.__module__.split('.')[0]
    if base in kind.__mro__ and package not in (*_LOOSELY_TYPED, 'flax'):
      return True
  return issubclass(made, kind)


def fits(value: Any, hint: Any) -> bool:
  """Return whether a gin value matches an annotation; True if that cannot be decided.

  >>> fits(3, int), fits('abc', int), fits(3, float), fits(True, int), fits(None, int | None)
  (True, False, True, False, True)
  >>> fits({'inputs': 64}, Mapping[str, int]), fits({'inputs': 'long'}, Mapping[str, int])
  (True, False)
  """
  if not isinstance(value, _PLAIN):
    return True  # A reference, whose type is known when it is called.
  kinds = _kinds(hint)
  return kinds is None or any(_fits_one(value, kind) for kind in kinds)


# Accepted types of scalars; True and False, which are integers in Python, are only accepted as bool.
_SCALARS = {bool: bool, int: int, float: (int, float), str: str}


def _fits_one(value: Any, hint: Any) -> bool:
  origin = typing.get_origin(hint)
  arguments = typing.get_args(hint)
  plain = origin or hint
  if origin is typing.Literal:
    return any(value == choice and type(value) is type(choice) for choice in arguments)
  if plain is type(None) or hint is None:
    return value is None
  if plain in _SCALARS:
    if isinstance(value, bool):
      return plain is bool
    return isinstance(value, _SCALARS[plain])
  if plain in (dict, collections.abc.Mapping):
    if not isinstance(value, dict):
      return False
    if len(arguments) != 2:
      return True
    key_hint, item_hint = arguments
    return all(fits(key, key_hint) and fits(item, item_hint) for key, item in value.items())
  if _is_known_class(hint) or _takes_a_callable(hint) or not isinstance(value, (list, tuple)):
    return False
  return _items_fit(value, plain, arguments)


def _items_fit(value: list[Any] | tuple[Any, ...], plain: Any, arguments: tuple[Any, ...]) -> bool:
  if plain is tuple and arguments and arguments[-1] is not Ellipsis:
    return len(value) == len(arguments) and all(map(fits, value, arguments))
  return not arguments or all(fits(item, arguments[0]) for item in value)


_CONTAINERS = (
  dict,
  list,
  tuple,
  collections.abc.Mapping,
  collections.abc.Sequence,
  collections.abc.Iterable,
  collections.abc.Collection,
)


def _kinds(hint: Any) -> list[Any] | None:
  """Return the alternatives of `hint`; None if one of them accepts any plain value."""
  if _is_union(hint):
    alternatives = []
    for argument in typing.get_args(hint):
      kinds = _kinds(argument)
      if kinds is None:
        return None
      alternatives += kinds
    return alternatives
  if typing.get_origin(hint) in (typing.Annotated, typing.ClassVar, typing.Final):
    return _kinds(typing.get_args(hint)[0])
  plain = typing.get_origin(hint) or hint
  decidable = (
    plain in (int, float, str, bool, None, type(None), typing.Literal) or plain in _CONTAINERS
  )
  if decidable or _is_known_class(hint) or _takes_a_callable(hint):
    return [hint]
  return None


def describe(hint: Any) -> str:
  """Return the text of an annotation.

  >>> describe(int | None), describe(Mapping[str, int])
  ('int or None', 'Mapping[str, int]')
  """
  kinds = _kinds(hint)
  if kinds is None:
    kinds = [hint]
  names = []
  for kind in kinds:
    if kind is type(None):
      names.append('None')
    elif typing.get_origin(kind) is typing.Literal:
      names += [repr(choice) for choice in typing.get_args(kind)]
    elif typing.get_origin(kind) is not None:
      names.append(re.sub(r'\w+\.', '', str(kind)))  # Without module names.
    else:
      names.append(getattr(kind, '__name__', str(kind)))
  return ' or '.join(names)
