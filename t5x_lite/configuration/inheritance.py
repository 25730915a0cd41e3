"""Bindings of base classes that apply to subclasses, e.g. those of a model file to a subclass of its model.

gin binds the parameters of one class. Here a subclass that the configuration names gets each parameter that it accepts
and that is not bound for it from the nearest base class for which it is bound, in the scope of that binding. gin's
table holds an `Inherited` value in these places, so that scopes, macros and references apply as for other values.
"""

from collections.abc import Collection, Iterator, Mapping
import dataclasses
import inspect
import types
from typing import Any

import gin

from t5x_lite.configuration import checks
from t5x_lite.configuration.syntax import Location


@dataclasses.dataclass(frozen=True)
class Missing:
  """Binding of a base class that does not apply to a subclass.

  Attributes:
    selector: complete selector of the subclass.
    key: key of the binding.
  """

  selector: str
  key: checks.Key


def own_bindings() -> dict[tuple[str, str], dict[str, Any]]:
  """Return a copy of gin's table of bindings, without inherited values."""
  table = {}
  for name, bound in checks.bindings().items():
    own = {key: value for key, value in bound.items() if not isinstance(value, checks.Inherited)}
    if own:
      table[name] = own
  return table


def inherit(selectors: Collection[str]) -> list[Missing]:
  """Bind the parameters of classes as their base classes; a binding of the class itself has priority in any scope.

  Args:
    selectors: complete selectors of the functions and classes that the configuration names.

  Returns:
    The bindings of base classes that a subclass does not accept.
  """
  registry = checks.configurables()
  dynamic: dict[type, str] = {}
  for selector in selectors:
    configurable = registry[selector]
    # gin itself applies bindings of the other classes, those that Python code registers, to their subclasses.
    if inspect.isclass(configurable.wrapped) and configurable.import_source is not None:
      dynamic[configurable.wrapped] = selector
  missing = []
  for cls in dynamic:
    for base in cls.__mro__[1:]:
      if base in dynamic:
        missing += _inherit_from(cls, base, dynamic)
        missing += _of_methods(dynamic[cls], dynamic[base])
  return missing


def _of_methods(selector: str, base: str) -> list[Missing]:
  """Return the bindings of methods of a base class, which gin applies to no other class."""
  missing = []
  for (scope, owner), bound in own_bindings().items():
    if owner.startswith(f'{base}.'):
      missing += [Missing(selector, (scope, owner, name)) for name in bound]
  return missing


def _inherit_from(cls: type, base: type, selectors: Mapping[type, str]) -> list[Missing]:
  """Bind the parameters of a class that are bound for a base class, and return the bindings that do not apply."""
  selector = selectors[cls]
  # With what the class has from nearer base classes, which have priority in any scope, too.
  before = {name: dict(bound) for name, bound in checks.bindings().items()}
  missing = []
  for (scope, owner), bound in own_bindings().items():
    if owner != selectors[base]:
      continue
    for parameter in bound:
      key = (scope, owner, parameter)
      if any(parameter in before.get((outer, selector), {}) for outer in _outer_scopes(scope)):
        continue
      if accepts(cls, base, parameter):
        gin.bind_parameter((scope, selector, parameter), checks.Inherited(key))
      else:
        missing.append(Missing(selector, key))
  return missing


def _outer_scopes(scope: str) -> Iterator[str]:
  """Yield a scope and the scopes around it, to the empty one."""
  parts = scope.split('/') if scope else []
  for length in range(len(parts) + 1):
    yield '/'.join(parts[:length])


def accepts(cls: type, base: type, parameter: str) -> bool:
  """Return whether the constructor of `cls` passes a parameter of its base class on.

  It does if it has the parameter, or if it has `**kwargs` and does not name the parameter: a constructor that names it
  passes another value to its base class, which would get two.

  Args:
    cls: class.
    base: base class, which has the parameter.
    parameter: name of the parameter.
  """
  for kind in cls.__mro__:
    if kind is base:
      return True
    constructor = vars(kind).get('__init__') or vars(kind).get('__new__')
    if constructor is None:
      continue
    function = inspect.unwrap(getattr(constructor, '__func__', constructor))
    try:
      parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a built-in class
      return False
    if parameter in parameters:
      return True
    has_others = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not has_others or parameter in _words(getattr(function, '__code__', None)):
      return False
  return False


def _words(code: types.CodeType | None) -> set[str]:
  """Return the strings in the code of a function, among them the names of arguments that it passes by name."""
  words = set()
  for constant in getattr(code, 'co_consts', ()):
    if isinstance(constant, str):
      words.add(constant)
    elif isinstance(constant, tuple):
      words |= {each for each in constant if isinstance(each, str)}
  return words


def describe_missing(
  missing: Collection[Missing],
  uses: Collection[checks.Use],
  locations: Mapping[checks.Key, Location],
) -> list[str]:
  """Return a warning for each class that is used instead of a base class some of whose bindings do not apply to it.

  Args:
    missing: result of `inherit`.
    uses: result of `checks.reachable`.
    locations: locations of bindings.
  """
  used = {use.configurable.selector: use.configurable for use in uses}
  lost: dict[str, list[checks.Key]] = {}
  for each in missing:
    if each.selector in used and each.key[1] not in used:
      lost.setdefault(each.selector, []).append(each.key)
  sentences = []
  for selector, keys in lost.items():
    name = checks.short_name(used[selector])
    shown = []
    for key in keys:
      scope, owner, parameter = key
      base = checks.short_name(checks.configurables()[owner])
      prefix = f'{scope}/' if scope else ''
      shown.append(f'{prefix}{base}.{parameter} ({locations.get(key, "set in code")})')
    sentences.append(
      f'{", ".join(shown)} must be accepted by {name} to apply to it, which has no such parameter or passes '
      f'another value. To apply it, accept **kwargs in {name}.__init__ and pass them to the base class.'
    )
  return sentences


def describe_inherited(uses: Collection[checks.Use]) -> list[str]:
  """Return a sentence for each used class that has bindings of base classes.

  Args:
    uses: result of `checks.reachable`.
  """
  parameters: dict[tuple[str, str], dict[str, None]] = {}
  for use in uses:
    for parameter, (_, owner, _) in use.bound.items():
      if owner != use.configurable.selector:
        names = (checks.short_name(use.configurable), owner)
        parameters.setdefault(names, {})[parameter] = None
  sentences = []
  for (name, owner), bound in parameters.items():
    base = checks.short_name(checks.configurables()[owner])
    sentences.append(f'Bindings of {base} apply to {name}: {", ".join(bound)}.')
  return sentences
