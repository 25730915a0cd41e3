"""Bindings of base classes that apply to subclasses, e.g. those of a model file to a subclass of its model.

gin binds the parameters of one class. Here a subclass that the configuration names gets each parameter that it accepts
and that is not bound for it from the nearest base class for which it is bound, in the scope of that binding; the same
for its methods. In T5X such bindings do not apply, so in a configuration that was written for it a class of the user
gets only those of parameters without a default, whose absence would be an error. A class that declares
`INHERITS_BINDINGS = False` gets none. gin gets a value of the class `table.Inherited` in these places, so that scopes,
macros and references apply as for other values.
"""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import inspect
import itertools
import textwrap
import types
from typing import Any

from gin import config as gin_config

from t5x_lite.configuration.table import Row
from t5x_lite.configuration.table import Table
from t5x_lite.configuration.table import configurables
from t5x_lite.configuration.table import short_name
from t5x_lite.configuration.validation import Use

# Function of (class, name of a method) that returns the method's configurable; None if it cannot be bound.
MethodFn = Callable[[type, str], gin_config.Configurable | None]
_CONSTRUCTOR = '__init__'
# Packages whose classes T5X does not have, so that its rules do not apply to them.
_OURS = ('t5x_lite', 'moe')


@dataclasses.dataclass(frozen=True)
class Missing:
  """Binding of a base class that does not apply to a subclass.

  Attributes:
    selector: complete selector of the subclass.
    row: the binding.
    by: name of the function that does not accept the parameter, e.g. `mine.FocalModel.__init__`; '' if it is not
      applied since the configuration was written for T5X.
  """

  selector: str
  row: Row
  by: str


def inherit(
  table: Table, selectors: Collection[str], method_fn: MethodFn, is_for_t5x: bool = False
) -> list[Missing]:
  """Add rows to a table for parameters of base classes; a binding of the class itself has priority in any scope.

  Args:
    table: the bindings.
    selectors: complete selectors of the functions and classes that the configuration names.
    method_fn: function that registers a method of a class.
    is_for_t5x: whether the configuration was written for T5X.

  Returns:
    The bindings of base classes that do not apply to a subclass.
  """
  registry = configurables()
  dynamic: dict[type, str] = {}
  for selector in selectors:
    configurable = registry[selector]
    if configurable.is_method:
      configurable = registry[configurable.module]
    # gin itself applies bindings of the other classes, those that Python code registers, to their subclasses.
    if inspect.isclass(configurable.wrapped) and configurable.import_source is not None:
      dynamic[configurable.wrapped] = configurable.selector
  missing = []
  for cls in dynamic:
    for base in _bases(cls):
      if base in dynamic:
        missing += _inherit_from(table, cls, base, dynamic, method_fn, is_for_t5x)
  return missing


def _bases(cls: type) -> Iterator[type]:
  """Yield the base classes whose bindings apply to a class, the nearest first."""
  for kind, base in itertools.pairwise(cls.__mro__):
    if not vars(kind).get('INHERITS_BINDINGS', True):
      return
    yield base


def _inherit_from(
  table: Table,
  cls: type,
  base: type,
  selectors: Mapping[type, str],
  method_fn: MethodFn,
  is_for_t5x: bool,
) -> list[Missing]:
  """Add the bindings of a base class and its methods, and return the bindings that do not apply."""
  selector = selectors[cls]
  registry = configurables()
  is_users = cls.__module__.partition('.')[0] not in _OURS
  added = []
  missing = []
  for (scope, owner), rows in table.groups.items():
    name = _CONSTRUCTOR
    target: str | None = selector
    if registry[owner].is_method and registry[owner].module == selectors[base]:
      name = registry[owner].name
      target = f'{selector}.{name}'
    elif owner != selectors[base]:
      continue
    for parameter, row in rows.items():
      # What the class has from nearer base classes has priority in any scope, too.
      is_bound = any((outer, target, parameter) in table for outer in _outer_scopes(scope))
      if is_bound or row.base is not None:
        continue
      if is_for_t5x and is_users and _has_default(cls, name, parameter):
        missing.append(Missing(selector, row, ''))
        continue
      kind = rejecting_class(cls, base, parameter, name)
      if kind is None and name != _CONSTRUCTOR and method_fn(cls, name) is None:
        kind = cls
      if kind is None:
        added.append(Row((scope, target, parameter), row.value, base=row))
      else:
        path = f'{kind.__module__}.{kind.__qualname__}.{name}'
        missing.append(Missing(selector, row, '.'.join(path.split('.')[-3:])))
  for row in added:
    table.add(row)
  return missing


def _has_default(cls: type, method: str, parameter: str) -> bool:
  """Return whether a method of a class may be called without a parameter."""
  for kind in cls.__mro__:
    found: Any = vars(kind).get(method)
    function = inspect.unwrap(getattr(found, '__func__', found))
    if inspect.isfunction(function):
      parameters = inspect.signature(function).parameters
      if parameter in parameters:
        return parameters[parameter].default is not inspect.Parameter.empty
  return True


def _outer_scopes(scope: str) -> Iterator[str]:
  """Yield a scope and the scopes around it, to the empty one."""
  parts = scope.split('/') if scope else []
  for length in range(len(parts) + 1):
    yield '/'.join(parts[:length])


def rejecting_class(
  cls: type, base: type, parameter: str, method: str = _CONSTRUCTOR
) -> type | None:
  """Return the class whose method does not pass a parameter on to its base classes, or None if each one does.

  A method passes it on if it has the parameter, or if it has `**kwargs` and either does not name the parameter or reads
  it there. A method that names it otherwise, or calls `super()` with a value at its position, passes another value to
  its base class, which would get two.

  Args:
    cls: class.
    base: base class, which has the parameter.
    parameter: name of the parameter.
    method: name of the method that has the parameter.
  """
  for kind in cls.__mro__:
    if kind is base:
      return None
    found = vars(kind).get(method)
    if method == _CONSTRUCTOR:
      found = found or vars(kind).get('__new__')
    if found is None:
      continue
    function = inspect.unwrap(getattr(found, '__func__', found))
    try:
      parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a built-in class, or not a function
      return kind
    if parameter in parameters:
      return None
    others = [each.name for each in parameters.values() if each.kind is each.VAR_KEYWORD]
    if not others:
      return kind
    if parameter in _words(getattr(function, '__code__', None)) and not _reads(
      function, others[0], parameter
    ):
      return kind
    if parameter in _passed_by_position(cls, kind, method, _syntax_tree(function)):
      return kind
  return cls


def _passed_by_position(cls: type, kind: type, method: str, tree: ast.AST) -> set[str]:
  """Return the parameters that a method of a class gives a value by position in a call of `super()`.

  Args:
    cls: class.
    kind: this class or a base class of it, which has the method.
    method: name of the method.
    tree: source of the method.
  """
  names: list[str] = []
  for base in cls.__mro__[cls.__mro__.index(kind) + 1 :]:
    if method in vars(base):
      parameters = list(inspect.signature(vars(base)[method]).parameters.values())
      names = [each.name for each in parameters[1:]]  # without `self`
      if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        break
  passed = set()
  for node in ast.walk(tree):
    match node:
      case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id='super')), attr=attribute)):
        if attribute == method:
          by_position = itertools.takewhile(lambda x: not isinstance(x, ast.Starred), node.args)
          passed.update(names[: len(list(by_position))])
  return passed


def _syntax_tree(function: Any) -> ast.AST:
  """Return the syntax tree of a function; an empty one if the source does not exist or is a part of a line."""
  try:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))
  except (OSError, TypeError, SyntaxError):
    return ast.Module([], [])


def _words(code: types.CodeType | None) -> set[str]:
  """Return the strings in the code of a function, among them the names of arguments that it passes by name."""
  words = set()
  for constant in getattr(code, 'co_consts', ()):
    if isinstance(constant, str):
      words.add(constant)
    elif isinstance(constant, tuple):
      words |= {each for each in constant if isinstance(each, str)}
  return words


def _reads(function: Any, kwargs: str, parameter: str) -> bool:
  """Return whether a function uses the value of a parameter in its keyword arguments, e.g. by `setdefault` or `pop`.

  Args:
    function: the function.
    kwargs: name of its keyword arguments.
    parameter: name of the parameter.
  """
  tree = _syntax_tree(function)
  # The value of `kwargs.pop(NAME)` alone in a statement is discarded.
  discarded = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}

  def is_kwargs(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name) and node.id == kwargs

  def is_name(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == parameter

  def sets_default(node: ast.AST) -> bool:
    """Return whether a dictionary has the name, to be replaced by the value in `kwargs`."""
    return isinstance(node, ast.Dict) and any(map(is_name, node.keys))

  for node in ast.walk(tree):
    match node:
      case ast.Call(func=ast.Attribute(value=owner, attr=method), args=[name, *_]):
        is_used = method == 'setdefault' or (method in ('get', 'pop') and id(node) not in discarded)
        if is_used and is_kwargs(owner) and is_name(name):
          return True
      case ast.Subscript(value=owner, slice=name, ctx=ast.Load()):
        if is_kwargs(owner) and is_name(name):
          return True
      case ast.Compare(left=name, ops=[ast.NotIn()], comparators=[owner]):
        if is_kwargs(owner) and is_name(name):
          return True
      case ast.BinOp(left=left, op=ast.BitOr(), right=right):
        if sets_default(left) and is_kwargs(right):
          return True
      case ast.Dict(keys=keys, values=values) if sets_default(node):
        first = next(i for i, key in enumerate(keys) if is_name(key))
        if any(
          key is None and is_kwargs(value)
          for key, value in zip(keys[first:], values[first:], strict=True)
        ):
          return True
  return False


def describe_missing(
  missing: Collection[Missing],
  uses: Collection[Use],
) -> list[str]:
  """Return a sentence for each class that is used instead of a base class some of whose bindings do not apply to it.

  Args:
    missing: result of `inherit`.
    uses: result of `validation.reachable`.
  """
  used = {use.configurable.selector: use.configurable for use in uses}
  registry = configurables()
  lost: dict[tuple[str, str], list[Row]] = {}
  for each in missing:
    owner = registry[each.row.key[1]]
    # The base class, and not its method: a method is in use wherever the method of a subclass is.
    base = owner.module if owner.is_method else owner.selector
    if each.selector in used and base not in used:
      lost.setdefault((each.selector, each.by), []).append(each.row)
  sentences = []
  for (selector, by), rows in lost.items():
    name = short_name(used[selector])
    shown = []
    for row in rows:
      scope, owner, parameter = row.key
      base = short_name(registry[owner])
      prefix = f'{scope}/' if scope else ''
      shown.append(f'{prefix}{base}.{parameter} ({row.where})')
    if not by:
      sentences.append(
        f'As in T5X, {", ".join(shown)} have no effect on {name}. Bind the parameters of {name} to set them.'
      )
      continue
    sentences.append(
      f'{", ".join(shown)} must be accepted by {by} to apply to {name}, which has no such parameter or passes '
      f'another value. To apply it, add the parameter to {by} and pass its value to the base class.'
    )
  return sentences


def describe_inherited(uses: Collection[Use]) -> list[str]:
  """Return a sentence for each used class that has bindings of base classes.

  Args:
    uses: result of `validation.reachable`.
  """
  parameters: dict[tuple[str, str], dict[str, None]] = {}
  for use in uses:
    for parameter, row in use.bound.items():
      owner = row.key[1]
      if owner != use.configurable.selector:
        names = (short_name(use.configurable), owner)
        parameters.setdefault(names, {})[parameter] = None
  sentences = []
  for (name, owner), bound in parameters.items():
    base = short_name(configurables()[owner])
    sentences.append(f'Bindings of {base} apply to {name}: {", ".join(bound)}.')
  return sentences
