"""Tables of the documentation that are made of code: parameters by signature and docstring, flags by `--help`.

A page has a block ```` ```{parameters} ```` with the dotted name of a class or function, and optionally `without` and
the names of parameters to leave out; a block ```` ```{flags} ```` with the name of a command; a block
```` ```{t5x} ```` with one of `modules`, `names` and `left_out`: T5X's names by the table of `t5x_lite.compat.names`;
or a block ```` ```{measurements} ```` with the file of the optimizers' records.
`conf.py` replaces these blocks when the pages are built, and `tests/repository/test_docs.py` checks that every
parameter has a description.
"""

import argparse
import enum
import inspect
import pkgutil
import re

from benchmarks import optimizer_records
from t5x_lite.apps import commands
from t5x_lite.compat import names

# A flag or a macro in the text of `--help`.
_FLAG = re.compile(r"(?<![`\w])(--[\w.]+(?:='[^']*'|=[\w./]+)?|[A-Z]+_[A-Z_]+)(?![`\w])")
BLOCK = re.compile(
  r'^```\{(?P<kind>parameters|flags|t5x|measurements)\}\n(?P<what>[^`]*?)\n```$', re.MULTILINE
)
# A section of a docstring in Google style, up to the next line that is not indented.
_SECTION = re.compile(r'^(?:Args|Attributes):\n((?:[ \t].*\n|\n)*)', re.MULTILINE)
_ENTRY = re.compile(r'^  (\w+): (.*(?:\n(?:    .*|(?=\n)))*)', re.MULTILINE)


def expand(text: str) -> str:
  """Return a Markdown page with its blocks replaced by tables."""
  tables = {
    'parameters': _parameter_table,
    'flags': _flag_table,
    't5x': t5x_table,
    'measurements': measurement_table,
  }
  return BLOCK.sub(lambda block: tables[block['kind']](block['what']), text)


def parameters(what: str) -> list[tuple[str, str, str]]:
  """Return (name, default, meaning) of each parameter; an empty meaning where the docstring has none.

  Args:
    what: dotted name, optionally followed by `without` and names of parameters to leave out.
  """
  path, _, omitted = what.partition(' without ')
  described = pkgutil.resolve_name(path)
  meanings = _meanings(described)
  return [
    (
      name,
      'required' if parameter.default is parameter.empty else f'`{_as_written(parameter.default)}`',
      meanings.get(name, ''),
    )
    for name, parameter in inspect.signature(described).parameters.items()
    if name not in omitted.replace(',', ' ').split() and parameter.kind is not parameter.VAR_KEYWORD
  ]


def flags(command: str) -> list[tuple[str, str]]:
  """Return (flag with its value, meaning) of each argument of a command, positional ones first."""
  parser = argparse.ArgumentParser(add_help=False)
  commands.COMMANDS[command].add_arguments(parser)
  actions = sorted(parser._actions, key=lambda action: bool(action.option_strings))
  return [
    (
      '='.join(filter(None, (*action.option_strings, _value_name(action)))),
      _FLAG.sub(r'`\1`', _one_line(action.help or '')),
    )
    for action in actions
  ]


def t5x_table(what: str) -> str:
  """Return the table of T5X's modules, of its names in other places here, or of those that are left out."""
  rows = names.MODULES.items()
  if what == 'modules':
    head, lines = (
      ('in T5X', 'here'),
      [(f'`{module}`', f'`{row.here}`') for module, row in rows if row.here],
    )
  elif what == 'names':
    head = ('in T5X', 'here')
    lines = [
      (f'`{module}.{name}`', f'`{place.replace(":", ".")}`')
      for module, row in rows
      for name, place in sorted(row.names.items())
    ]
  else:
    head = ('in T5X', 'instead')
    lines = [
      (f'`{module}.{name}`', sentence)
      for module, row in rows
      for name, sentence in sorted(row.left_out.items())
    ]
    lines += [(f'`{module}`', sentence) for module, sentence in names.LEFT_OUT_MODULES.items()]
  return '\n'.join(
    [
      f'| {head[0]} | {head[1]} |',
      '|---|---|',
      *(f'| {left} | {_cell(right)} |' for left, right in lines),
    ]
  )


def measurement_table(file: str) -> str:
  """Return the table of the records of a file, the one of the optimizers."""
  if file != optimizer_records.FILE:
    raise ValueError(f'{{measurements}} must be {optimizer_records.FILE}, got {file!r}.')
  return optimizer_records.table(optimizer_records.read())


def _parameter_table(what: str) -> str:
  path = what.partition(' without ')[0]
  rows = [
    f'| `{name}` | {_cell(default)} | {_cell(meaning)} |'
    for name, default, meaning in parameters(what)
  ]
  return '\n'.join(
    ['| parameter | default | meaning |', '|---|---|---|', *rows, '', f'API: {{py:obj}}`{path}`']
  )


def _flag_table(command: str) -> str:
  """Return the table of a command; the flags that `train` has with the same meaning are only named."""
  common = [] if command == 'train' else [row for row in flags(command) if row in flags('train')]
  rows = [
    f'| {_cell(f"`{flag}`")} | {_cell(meaning)} |'
    for flag, meaning in flags(command)
    if (flag, meaning) not in common
  ]
  also = (
    ['Also ' + ', '.join(f'`{flag}`' for flag, _ in common) + ', as for [train](#flags).']
    if common
    else []
  )
  return '\n'.join(['| flag | meaning |', '|---|---|', *rows, '', *also])


def _meanings(described: object) -> dict[str, str]:
  """Return the descriptions of parameters by name, from the docstrings of a class, its `__init__` and its bases."""
  meanings = {}
  for owner in inspect.getmro(described) if inspect.isclass(described) else (described,):
    for doc in (
      owner.__doc__,
      getattr(vars(owner).get('__init__'), '__doc__', None) if inspect.isclass(owner) else None,
    ):
      for section in _SECTION.finditer(inspect.cleandoc(doc or '') + '\n'):
        for name, meaning in _ENTRY.findall(section[1]):
          if name not in meanings or meanings[name].startswith(
            'see `'
          ):  # a base class describes it
            meanings[name] = _one_line(re.sub(r':\w+:`', '`', meaning))
  return meanings


def _as_written(value: object) -> str:
  if isinstance(value, enum.Enum):
    return value.name
  return value.__name__ if inspect.isfunction(value) or inspect.isclass(value) else repr(value)


def _value_name(action: argparse.Action) -> str | None:
  if action.nargs == 0:
    return None
  return action.metavar or '|'.join(action.choices or ()) or action.dest


def _one_line(text: str) -> str:
  return re.sub(r'\s+', ' ', text).strip()


def _cell(text: str) -> str:
  """Return a text in which signs of Markdown and tables outside backquotes are only signs."""
  parts = re.split(r'(`[^`]*`)', text)
  parts[::2] = [re.sub(r'([<*_\\])', r'\\\1', part) for part in parts[::2]]
  return ''.join(parts).replace('|', r'\|')
