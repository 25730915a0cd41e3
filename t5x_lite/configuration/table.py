"""The bindings of a configuration in one table: key, value, file and line.

`binding` fills the table and hands it to gin when it is complete and checked; all others read it, and not gin's.
"""

from collections.abc import Iterator, Mapping
import copy
import dataclasses
from typing import Any

import gin
from gin import config as gin_config

from t5x_lite.configuration import syntax
from t5x_lite.storage import files

# (scope, complete selector, parameter), as in gin.
Key = tuple[str, str, str]
# Active scopes, outermost first.
Scope = tuple[str, ...]
# Selector of macros.
MACRO = 'gin.macro'
# Text of bindings that no file or flag has.
_CODE = syntax.Text('code', ())


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """One binding.

  Attributes:
    key: scope, name and parameter that are bound.
    value: the value, in which names are references of gin.
    statement: the statement; None for a binding that code has made, or that of a base class.
    text: file or flag that has the statement.
    base: row of a base class whose value this is, see `inheritance`.
    former: row that this one replaces.
  """

  key: Key
  value: Any
  statement: syntax.Binding | None = None
  text: syntax.Text = _CODE
  base: 'Row | None' = None
  former: 'Row | None' = None

  @property
  def location(self) -> syntax.Location | None:
    """File and line, or flag; None for a row without a statement."""
    return self.statement and self.statement.location

  @property
  def path(self) -> files.Path | None:
    """Path of the file that has the statement; None for a flag, code, and text of a command."""
    return self.text.path

  @property
  def is_flag(self) -> bool:
    """True if the statement is on the command line."""
    return self.location is not None and self.location.on_command_line

  @property
  def where(self) -> str:
    """Location in words."""
    return str(self.location or 'set in code')

  def macros(self) -> set[str]:
    """Return the names of the macros in the statement's value."""
    if self.statement is None:
      return set()
    return set(syntax.macros_in(self.statement.value))


@dataclasses.dataclass(frozen=True)
class Inherited:
  """Value in gin of a parameter that a class gets from the binding of a base class.

  gin copies values when it uses them: the copy is the base's value, with its references called. It has no form in gin
  text, so that gin does not print it.

  Attributes:
    key: key of the base's binding.
  """

  key: Key

  def __deepcopy__(self, memo: dict[int, Any]) -> Any:
    scope, selector, parameter = self.key
    name = f'{selector}.{parameter}'
    return copy.deepcopy(gin.query_parameter(f'{scope}/{name}' if scope else name), memo)


class Table(dict[Key, Row]):
  """The row that applies by key, in the order in which the keys were first bound; `add` adds a row.

  Attributes:
    groups: rows by (scope, complete selector) and parameter.
    replaced: for each macro that lost a reader, the location of the binding that replaced it.
  """

  def __init__(self):
    super().__init__()
    self.groups: dict[tuple[str, str], dict[str, Row]] = {}
    self.replaced: dict[str, syntax.Location] = {}

  def add(self, row: Row) -> None:
    """Add a row, which replaces that of its key."""
    former = self.get(row.key)
    if former is not None:
      row = dataclasses.replace(row, former=former)
      if row.location is not None:
        self.replaced |= dict.fromkeys(former.macros() - row.macros(), row.location)
    scope, selector, parameter = row.key
    self[row.key] = row
    self.groups.setdefault((scope, selector), {})[parameter] = row

  def in_scope(self, scope: Scope, selector: str) -> dict[str, Row]:
    """Return the rows that apply to a function or class in a scope, by parameter."""
    found: dict[str, Row] = {}
    for length in range(len(scope) + 1):  # Inner scopes have priority, as in gin.
      found |= self.groups.get(('/'.join(scope[:length]), selector), {})
    return found

  def is_macro(self, name: str) -> bool:
    """Return whether a macro of this name is bound; a scope of its name is active while it is evaluated."""
    return (name, MACRO) in self.groups

  def path(self, row: Row) -> list[Row]:
    """Return a row and those of the macros through which it gets its value."""
    path = [row]
    while is_macro(path[-1].value):
      path.append(self['/'.join(path[-1].value.scopes), MACRO, 'value'])
    return path

  def value(self, row: Row) -> Any:
    """Return the value of a row, with a macro replaced by its value."""
    return self.path(row)[-1].value


def configurables() -> Mapping[str, gin_config.Configurable]:
  """Return gin's registry: configurables by complete selector."""
  return dict(gin_config._REGISTRY.items())  # pylint: disable=protected-access


def short_name(configurable: gin_config.Configurable) -> str:
  """Return the last two parts of the full name (three for a method), e.g. `data.DatasetConfig`."""
  num_parts = 3 if configurable.is_method else 2
  return '.'.join(configurable.selector.split('.')[-num_parts:])


def configurable_of(reference: gin_config.ConfigurableReference) -> gin_config.Configurable:
  """Return the configurable that a reference names."""
  configurable = reference.configurable
  assert configurable is not None  # gin sets it when it makes the reference
  return configurable


def references(value: Any) -> Iterator[gin_config.ConfigurableReference]:
  """Yield the references in a value, at any depth."""
  yield from gin_config.iterate_references({'value': value})


def is_macro(reference: Any) -> bool:
  """Return whether a value is `%NAME` for a macro, as opposed to a constant."""
  if not isinstance(reference, gin_config.ConfigurableReference):
    return False
  return configurable_of(reference).selector == MACRO
