"""Looks at a parsed configuration before anything of it runs: what the entry point reaches, and whether values fit.

gin evaluates lazily, so a binding that nothing reads and a value of the wrong type show themselves late or never.
Because the core is registered dynamically, parameters reach a function only through a reference (`@module.fn`), and
following the references from the entry point finds exactly the bindings that have an effect.
"""

import collections.abc
from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import enum
import graphlib
import inspect
import re
import types
import typing
from typing import Any

from gin import config as gin_config

from t5x_lite.configuration.syntax import Location
from t5x_lite.errors import ConfigError, did_you_mean

# (scope, complete selector, parameter): how gin addresses a bound value.
Key = tuple[str, str, str]
_MACRO = 'gin.macro'
# Modules whose classes are annotated for things that are only like them: int for float, list for an array.
_LOOSELY_TYPED = ('abc', 'builtins', 'collections', 'enum', 'jax', 'jaxlib', 'numpy', 'os', 'pathlib', 'typing')
_PLAIN = (int, float, str, bool, type(None), list, tuple, dict)


@dataclasses.dataclass(frozen=True)
class Use:
  """One configurable, as reached from the entry point in one scope, with the bindings that apply there.

  `evaluated` tells whether gin calls it (so every required parameter must be bound) or hands it on as a callable.
  """

  configurable: gin_config.Configurable
  scope: tuple[str, ...]
  evaluated: bool
  bound: Mapping[str, Key]

  @property
  def name(self) -> str:
    """The configurable's name as a user writes it, with its scope unless that is a macro's."""
    scope = () if is_macro_scope('/'.join(self.scope)) else self.scope
    return '/'.join((*scope, short_name(self.configurable)))


def short_name(configurable: gin_config.Configurable) -> str:
  """Returns e.g. `data.DatasetConfig`: the last two parts of the full name (three for a method)."""
  return '.'.join(configurable.selector.split('.')[-3 if configurable.is_method else -2:])


def bindings() -> Mapping[tuple[str, str], Mapping[str, Any]]:
  """Returns gin's table of bound values: (scope, complete selector) to parameters. gin has no public reader of it."""
  return gin_config._CONFIG  # pylint: disable=protected-access


def configurables() -> Mapping[str, gin_config.Configurable]:
  """Returns gin's registry: complete selector to configurable."""
  return dict(gin_config._REGISTRY.items())  # pylint: disable=protected-access


def reachable(entry: Callable[..., Any]) -> list[Use]:
  """Returns every use of a configurable that `entry`, called through gin, can come to, `entry` first.

  Args:
    entry: a function that gin knows.
  """
  registry = configurables()
  by_object = {id(configurable.wrapped): configurable for configurable in registry.values()}
  found: dict[tuple[str, tuple[str, ...], bool], Use] = {}
  waiting = [(by_object[id(entry)], (), True)]
  while waiting:
    configurable, scope, evaluated = waiting.pop(0)
    if (configurable.selector, scope, evaluated) in found:
      continue
    bound: dict[str, Key] = {}
    for length in range(len(scope) + 1):  # inner scopes win, as in gin
      name = '/'.join(scope[:length])
      for parameter in bindings().get((name, configurable.selector), {}):
        bound[parameter] = (name, configurable.selector, parameter)
    use = Use(configurable, scope, evaluated, bound)
    found[configurable.selector, scope, evaluated] = use
    for key in bound.values():
      for reference in _references(value_of(key)):
        # A reference without a scope runs in the active one. What is handed on as a callable runs later, in none.
        scopes = [tuple(reference.scopes)] if reference.scopes else [scope] if reference.evaluate else [scope, ()]
        waiting += [(reference.configurable, inner, reference.evaluate) for inner in scopes]
    if inspect.isclass(configurable.wrapped):
      waiting += [(method, inner, False) for method in registry.values() for inner in {scope, ()}
                  if method.is_method and method.selector.startswith(configurable.selector + '.')]
  return list(found.values())


def value_of(key: Key) -> Any:
  """Returns what is bound to `key`."""
  scope, selector, parameter = key
  return bindings()[scope, selector][parameter]


def _references(value: Any) -> Iterator[gin_config.ConfigurableReference]:
  yield from gin_config.iterate_references({'value': value})


def is_macro(reference: Any) -> bool:
  """Whether a value is `%NAME` for a macro (not a constant)."""
  return isinstance(reference, gin_config.ConfigurableReference) and reference.configurable.selector == _MACRO


def is_macro_scope(scope: str) -> bool:
  """Whether a scope is active only because the value of a macro of that name is made in it."""
  return (scope, _MACRO) in bindings()


def check(entry: Callable[..., Any], locations: Mapping[Key, Location],
          macros_of_files: Collection[str] = (), replaced: Mapping[str, Location] = types.MappingProxyType({}),
          ) -> list[Use]:
  """Refuses flags without effect, parameters that are required and unbound, and values of the wrong type.

  Args:
    entry: the function that will be called through gin.
    locations: where each binding was made, for messages.
    macros_of_files: names of the macros that files set, whether a flag sets them too or not.
    replaced: macro name to the binding that replaced one that read the macro.

  Returns:
    What `reachable` found.

  Raises:
    ConfigError: naming the binding, where it was made, what was expected and the remedy.
  """
  uses = reachable(entry)
  _check_effect(entry, uses, locations, macros_of_files, replaced)
  for use in uses:
    if use.configurable.selector == _MACRO and not use.bound:
      raise ConfigError(f'The macro {"/".join(use.scope)!r} is defined nowhere.')
  _check_cycles(uses)
  signatures = [(use, parameters) for use in uses if use.configurable.selector != _MACRO
                and (parameters := _signature(use.configurable.wrapped)) is not None]
  for use, parameters in signatures:
    hints = _type_hints(use.configurable.wrapped)
    for name, key in use.bound.items():
      if name in hints and name in parameters:
        _check_type(use, parameters[name], hints[name], key, locations)
  for use, parameters in signatures:
    if use.evaluated:
      unbound = [name for name, parameter in parameters.items()
                 if parameter.default is parameter.empty and name not in use.bound
                 and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)]
      if unbound:
        raise ConfigError(f'{use.name} needs {", ".join(unbound)}, which nothing binds. Set '
                          f'--gin.{use.name}.{unbound[0]}=VALUE or add a file that does.')
  return uses


def _check_cycles(uses: list[Use]) -> None:
  """Refuses objects that are made of themselves."""
  by_object = {(use.configurable.selector, use.scope): use for use in uses if use.evaluated}
  graph = {}
  for node, use in by_object.items():
    references = [reference for key in use.bound.values() for reference in _references(value_of(key))]
    graph[node] = {(reference.configurable.selector, tuple(reference.scopes) or use.scope) for reference in references
                   if reference.evaluate}
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    names = [by_object[node].name if node[0] != _MACRO else f'%{"/".join(node[1])}' for node in error.args[1]]
    raise ConfigError(f'{names[0]} is made of itself: {" -> ".join(names)}. Bind something else to one of '
                      'them.') from None


def _check_effect(entry: Callable[..., Any], uses: list[Use], locations: Mapping[Key, Location],
                  macros_of_files: Collection[str], replaced: Mapping[str, Location]) -> None:
  """Refuses a flag whose binding no reached configurable reads."""
  read = {key for use in uses for key in use.bound.values()}
  registry = configurables()
  for key, location in locations.items():
    scope, selector, parameter = key
    configurable = registry[selector]
    if not location.on_command_line or key in read:
      continue
    if selector == _MACRO:
      if scope in replaced:
        raise ConfigError(f'{location} has no effect: {replaced[scope]} replaces the binding that reads {scope!r}. '
                          'Leave one of the two out.')
      if scope in macros_of_files:
        raise ConfigError(f'{location} has no effect: a file sets {scope!r} too, but {entry.__name__} does not use it. '
                          'Leave the flag out.')
      names = [name for name, used, _ in read if used == _MACRO]
      raise ConfigError(f'{location} has no effect: nothing that runs reads the macro {scope!r}.'
                        f'{did_you_mean(scope, names)}')
    if configurable.import_source is None:
      continue  # registered by user code, which may call it without a reference
    used = [use for use in uses if use.configurable.selector == selector]
    wanted = tuple(scope.split('/')) if scope else ()
    for use in used:
      if use.scope[:len(wanted)] == wanted:  # it applies here, so another binding must win
        by = use.bound[parameter]
        raise ConfigError(f'{location} has no effect: the narrower binding {use.name}.{parameter} = '
                          f'{_show(value_of(by))} ({locations.get(by, "set in code")}) wins. Set that one.')
    if used:
      names = ' or '.join(dict.fromkeys(f'{use.name}.{parameter}' for use in used))
      raise ConfigError(f'{location} has no effect: nothing runs in the scope {scope!r}. Set {names}.')
    raise ConfigError(f'{location} has no effect: nothing that runs uses {short_name(configurable)}.'
                      f'{did_you_mean(short_name(configurable), [u.name for u in uses if not _is_builtin(u)])}')


def _is_builtin(use: Use) -> bool:
  return use.configurable.selector.startswith('gin.')


# ----------------------------------------------------------------------------------------------------------------------
# Types


def _signature(fn_or_cls: Any) -> Mapping[str, inspect.Parameter] | None:
  try:
    return inspect.signature(fn_or_cls).parameters
  except (TypeError, ValueError):
    return None  # some built-in


def parameter_names(fn_or_cls: Any) -> list[str]:
  """Returns the names that can be bound for a function or class, for suggestions."""
  return [name for name, parameter in (_signature(fn_or_cls) or {}).items()
          if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != 'self']


def _type_hints(fn_or_cls: Any) -> Mapping[str, Any]:
  try:
    return typing.get_type_hints(fn_or_cls.__init__ if inspect.isclass(fn_or_cls) else fn_or_cls)
  except (NameError, TypeError, AttributeError):  # annotations that only a type checker can resolve: nothing to say
    return {}


def _check_type(use: Use, parameter: inspect.Parameter, hint: Any, key: Key, locations: Mapping[Key, Location]) -> None:
  path, value = [key], value_of(key)
  while is_macro(value):
    path.append(('/'.join(value.scopes), _MACRO, 'value'))
    value = value_of(path[-1])
  if value is None and parameter.default is None:
    return
  if isinstance(value, gin_config.ConfigurableReference):
    _check_reference(use, parameter, hint, value, locations.get(path[-1]))
  if fits(value, hint):
    return
  name = path[-1][0] if len(path) > 1 else f'{use.name}.{parameter.name}'
  for_what = f' for {use.name}.{parameter.name}' if len(path) > 1 else ''
  location = locations.get(path[-1])
  where = '' if location is None or location.on_command_line else f' ({location})'
  remedy = ''
  if isinstance(value, float) and value.is_integer() and fits(int(value), hint):
    remedy = f' Write {int(value)}.'
  elif value is not None and not isinstance(value, str) and fits('', hint):
    remedy = f' Write --gin.{name}=\'"{value}"\'.'
  raise ConfigError(f'{name} = {_show(value)}{where}: expected {describe(hint)}{for_what}, got '
                    f'{type(value).__name__}.{remedy}')


def _check_reference(use: Use, parameter: inspect.Parameter, hint: Any, value: gin_config.ConfigurableReference,
                     location: Location | None) -> None:
  """Refuses `@Class` where an instance is annotated, `@Class()` where a class is, and classes that cannot fit."""
  fn_or_cls = value.configurable.wrapped
  made, kinds = _made(fn_or_cls), [kind for kind in _alternatives(hint) if kind is not type(None)]
  _check_protocol(use, kinds, value)
  if made is None:
    return
  wanted, written = f'{location or use.name}: {use.name}.{parameter.name}', f'@{short_name(value.configurable)}'
  all_classes = bool(kinds) and all(map(_is_known_class, kinds))
  if not value.evaluate:
    if any(kind in made.__mro__ and kind is not object for kind in kinds):
      raise ConfigError(f'{wanted} takes what {written} makes. Write {written}().')
    if all_classes and not isinstance(fn_or_cls, tuple(kinds)):
      raise ConfigError(f'{wanted} = {written}: expected {describe(hint)}, got what makes a {made.__name__}.')
    return
  if fn_or_cls is made and not _defines_call(made) and kinds and all(map(_takes_a_callable, kinds)):
    raise ConfigError(f'{wanted} takes {written} itself. Write {written} without ().')
  if all_classes and not _is_protocol(made) and not any(_related(made, kind) for kind in kinds):
    raise ConfigError(f'{wanted} = {written}(): expected {describe(hint)}, got {made.__name__}.')


def _check_protocol(use: Use, kinds: list[Any], value: gin_config.ConfigurableReference) -> None:
  """Refuses bindings of what callers of a protocol pass themselves: its keyword-only parameters."""
  protocols = [] if value.evaluate else [kind for kind in kinds if _is_protocol(kind) and '__call__' in vars(kind)]
  passed = {parameter.name for kind in protocols for parameter in inspect.signature(kind.__call__).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
  for length in range(len(value.scopes) + 1):
    bound = bindings().get(('/'.join(value.scopes[:length]), value.configurable.selector), {})
    for name in sorted(passed & set(bound)):
      raise ConfigError(f'{short_name(value.configurable)}.{name} has no effect: {use.name} passes {name} itself. '
                        f'Leave the binding out, and set {name} where {use.name} takes it from.')


def _made(fn_or_cls: Any) -> type | None:
  """Returns the class of what a class, or a function with an annotated result, makes; None where that is not known."""
  made = fn_or_cls
  if not inspect.isclass(made):  # one annotation that cannot be resolved hides the others
    made = _type_hints(made).get('return') or getattr(made, '__annotations__', {}).get('return')
  known = inspect.isclass(made) and typing.get_origin(made) is None and made not in (type(None), Any)
  return made if known else None


def _alternatives(hint: Any) -> tuple[Any, ...]:
  is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  return typing.get_args(hint) if is_union else (hint,)


def _is_protocol(kind: Any) -> bool:
  return getattr(kind, '_is_protocol', False)  # typing has a public test of it from Python 3.13 on


def _is_known_class(kind: Any) -> bool:
  """Whether `kind` is a class whose instances are its own, not such as a list stands in for."""
  if not inspect.isclass(kind) or typing.get_origin(kind) is not None or _is_protocol(kind):
    return False
  return not issubclass(kind, enum.Enum) and kind.__module__.split('.')[0] not in _LOOSELY_TYPED


def _defines_call(kind: type) -> bool:
  return any('__call__' in vars(base) for base in kind.__mro__)


def _takes_a_callable(kind: Any) -> bool:
  """Whether an annotation asks for a function or a class, not for an instance."""
  if typing.get_origin(kind) is type:
    return any(map(_is_known_class, typing.get_args(kind)))
  plain = typing.get_origin(kind) or kind
  return plain is collections.abc.Callable or (inspect.isclass(kind) and _is_protocol(kind) and _defines_call(kind))


def _related(made: type, kind: type) -> bool:
  """Whether two classes share a base of somebody's own: a sibling may be meant to stand in."""
  return any(base.__module__.split('.')[0] not in (*_LOOSELY_TYPED, 'flax') for base in made.__mro__
             if base in kind.__mro__) or issubclass(made, kind)


def fits(value: Any, hint: Any) -> bool:
  """Whether a gin value may be passed where `hint` is annotated; whatever cannot be decided fits.

  >>> fits(3, int), fits('abc', int), fits(3, float), fits(True, int), fits(None, int | None)
  (True, False, True, False, True)
  >>> fits({'inputs': 64}, Mapping[str, int]), fits({'inputs': 'long'}, Mapping[str, int])
  (True, False)
  """
  if not isinstance(value, _PLAIN):
    return True  # a reference: its type is known when it is called
  kinds = _kinds(hint)
  return kinds is None or any(_fits_one(value, kind) for kind in kinds)


# What a value of a plain type may be; True and False, which Python counts as integers, are of bool alone.
_SCALARS = {bool: bool, int: int, float: (int, float), str: str}


def _fits_one(value: Any, hint: Any) -> bool:
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  plain = origin or hint
  if origin is typing.Literal:
    return any(value == choice and type(value) is type(choice) for choice in arguments)
  if plain is type(None) or hint is None:
    return value is None
  if plain in _SCALARS:
    return isinstance(value, _SCALARS[plain]) and (plain is bool or not isinstance(value, bool))
  if plain in (dict, collections.abc.Mapping):
    return isinstance(value, dict) and (len(arguments) != 2 or all(
        fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()))
  if _is_known_class(hint) or _takes_a_callable(hint) or not isinstance(value, (list, tuple)):
    return False
  return _items_fit(value, plain, arguments)


def _items_fit(value: list[Any] | tuple[Any, ...], plain: Any, arguments: tuple[Any, ...]) -> bool:
  if plain is tuple and arguments and arguments[-1] is not Ellipsis:
    return len(value) == len(arguments) and all(map(fits, value, arguments))
  return not arguments or all(fits(item, arguments[0]) for item in value)


_CONTAINERS = (dict, list, tuple, collections.abc.Mapping, collections.abc.Sequence, collections.abc.Iterable,
               collections.abc.Collection)


def _kinds(hint: Any) -> list[Any] | None:
  """Returns the alternatives that `hint` allows, None when one of them says nothing about plain values."""
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    kinds = [_kinds(argument) for argument in typing.get_args(hint)]
    return None if any(kind is None for kind in kinds) else [one for kind in kinds for one in kind]
  if typing.get_origin(hint) in (typing.Annotated, typing.ClassVar, typing.Final):
    return _kinds(typing.get_args(hint)[0])
  plain = typing.get_origin(hint) or hint
  decidable = plain in (int, float, str, bool, None, type(None), typing.Literal) or plain in _CONTAINERS
  return [hint] if decidable or _is_known_class(hint) or _takes_a_callable(hint) else None


def describe(hint: Any) -> str:
  """Returns words for an annotation.

  >>> describe(int | None), describe(Mapping[str, int])
  ('int or None', 'Mapping[str, int]')
  """
  kinds = _kinds(hint)
  names = []
  for kind in kinds if kinds is not None else [hint]:
    if kind is type(None):
      names.append('None')
    elif typing.get_origin(kind) is typing.Literal:
      names += [repr(choice) for choice in typing.get_args(kind)]
    elif typing.get_origin(kind) is not None:
      names.append(re.sub(r'\w+\.', '', str(kind)))  # without the modules
    else:
      names.append(getattr(kind, '__name__', str(kind)))
  return ' or '.join(names)


def _show(value: Any) -> str:
  """Returns a short text of a value, as gin would write it."""
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
