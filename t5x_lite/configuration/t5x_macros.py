"""Macros of our files under T5X's paths that T5X's files of these paths do not have, such as PACK.

T5X's files do not read a project's macro of such a name. Neither do ours: they read a macro of another name then.
"""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import logging
import pathlib
from typing import Any, NamedTuple

from t5x_lite.compat import names as t5x_names
from t5x_lite.configuration import syntax
from t5x_lite.formatting import gin_flag

_logger = logging.getLogger(__name__)

# Macros of T5X's files with those that they include, by path below `t5x/`.
_RECORD = pathlib.Path(t5x_names.__file__).parent / 'macros.json'
# Prefix of the names of our macros next to a project's macros of the same names.
_OURS = 'T5X_LITE_'


class _Binding(NamedTuple):
  """A binding.

  Attributes:
    statement: the binding.
    text: the file or flag that has it.
    theirs: the macros of T5X's file, if the binding belongs to our file of its path; None for other files, and flags.
  """

  statement: syntax.Binding
  text: syntax.Text
  theirs: frozenset[str] | None


@functools.cache
def macros_of_t5x() -> Mapping[str, frozenset[str]]:
  """Return the macros of T5X's files, with those of the files that they include, by path (`t5x/...`)."""
  record = json.loads(_RECORD.read_text(encoding='utf-8'))
  return {f'{syntax.T5X_FILES}/{path}': frozenset(macros) for path, macros in record.items()}


def separate(texts: Sequence[syntax.Text]) -> list[syntax.Text]:
  """Return texts in which no macro of our files under T5X's paths has the name of a project's macro.

  A flag means the macro of the project if the project or another flag reads it, otherwise ours. A macro that the
  project defines and nothing of it reads has no effect, about which a warning is logged.

  Args:
    texts: files and flags in the order of application.
  """
  bindings = [each for text in texts for each in _walk(text, None)]
  defined_here: set[str] = set()
  read_here: set[str] = set()
  read_there: set[str] = set()
  defined_there: dict[str, syntax.Binding] = {}
  for each in bindings:
    name = each.statement.macro_name
    if name and _is_ours(each, name):
      defined_here.add(name)
    elif name and each.text.path is not None:
      defined_there[name] = each.statement
    for read in syntax.macros_in(each.statement.value):
      if not _is_ours(each, read):
        read_there.add(read)
      elif each.theirs is not None:
        read_here.add(read)
  shared = read_here & defined_here & defined_there.keys()
  for name in sorted(shared - read_there):
    statement = defined_there[name]
    _logger.warning(
      "%s: the macro %r has no effect, since T5X's files do not read it. Pass %s, or bind %s after the include.",
      statement.location,
      name,
      gin_flag(name, _written(statement.value)),
      ' and '.join(dict.fromkeys(_parameters(name, bindings))),
    )

  def new_name(each: _Binding, name: str) -> str:
    is_of_flag = each.text.path is None and name not in read_there
    if name in shared and (is_of_flag or _is_ours(each, name)):
      return f'{_OURS}{name}'
    return name

  if not shared:
    return list(texts)
  return [_renamed(text, None, new_name) for text in texts]


def _parameters(name: str, bindings: Sequence[_Binding]) -> Iterator[str]:
  """Yield the parameters that read a macro of ours, also through others, with the lines that bind them."""
  for each in bindings:
    if each.theirs is None or not _is_ours(each, name):
      continue
    if name not in syntax.macros_in(each.statement.value):
      continue
    macro = each.statement.macro_name
    if not macro:
      yield f'{each.statement.key} ({each.statement.location})'
    elif macro != name:
      yield from _parameters(macro, bindings)


def _written(value: Any) -> str:
  """Return the gin text of a plain value, otherwise a placeholder."""
  try:
    return repr(ast.literal_eval(repr(value)))
  except (SyntaxError, ValueError):  # a reference or a macro
    return 'VALUE'


def _walk(text: syntax.Text, theirs: frozenset[str] | None) -> Iterator[_Binding]:
  theirs = _macros(text, theirs)
  for statement in text.statements:
    if isinstance(statement, syntax.Text):
      yield from _walk(statement, theirs)
    elif isinstance(statement, syntax.Binding):
      yield _Binding(statement, text, theirs)


def _macros(text: syntax.Text, theirs: frozenset[str] | None) -> frozenset[str] | None:
  """Return the macros of T5X's file for a text: those that it and all files that include it have.

  Args:
    text: a file or flag.
    theirs: the result for the file that includes it.
  """
  if not text.is_packaged(syntax.T5X_FILES):
    return theirs
  known = macros_of_t5x().get(_path(text))
  if theirs is None or known is None:
    return known or theirs
  return theirs & known


def _path(text: syntax.Text) -> str:
  """Return the path of a file of t5x_lite below `gin/`."""
  assert text.path is not None
  return str(text.path).removeprefix(f'{syntax.packaged_folder()}/')


def _is_ours(each: _Binding, name: str) -> bool:
  """Return whether a macro in a binding is ours: T5X's file does not have it."""
  if each.theirs is None:
    return each.text.is_packaged()
  return name not in each.theirs


def _renamed(
  text: syntax.Text,
  theirs: frozenset[str] | None,
  new_name: Callable[[_Binding, str], str],
) -> syntax.Text:
  """Return a text with other names of macros, which `new_name` gives for a binding and a name."""
  theirs = _macros(text, theirs)
  statements: list[syntax.Statement | syntax.Text] = []
  for statement in text.statements:
    if isinstance(statement, syntax.Text):
      statement = _renamed(statement, theirs, new_name)
    elif isinstance(statement, syntax.Binding):
      rename = functools.partial(new_name, _Binding(statement, text, theirs))
      value = _with_names(statement.value, rename)
      selector = statement.selector
      if statement.macro_name:
        selector = rename(statement.macro_name).rpartition('/')[2]
      statement = dataclasses.replace(statement, selector=selector, value=value)
    statements.append(statement)
  return dataclasses.replace(text, statements=tuple(statements))


def _with_names(value: Any, rename: Callable[[str], str]) -> Any:
  """Return a value with other names of its macros."""
  if isinstance(value, syntax.Macro):
    return syntax.Macro(rename(value.name))
  if isinstance(value, dict):
    return {_with_names(key, rename): _with_names(item, rename) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(_with_names(item, rename) for item in value)
  return value
