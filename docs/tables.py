"""Pages of the reference that are made of tables: flags, macros, gin files, parameters, T5X's names, measurements."""

import argparse
import importlib
import re
from typing import NamedTuple

from benchmarks import optimizer_records
from docs import api_pages
from docs.api_pages import in_cell
from docs.api_pages import one_line
from t5x_lite.apps import commands
from t5x_lite.apps.common.flags import add_shared_arguments
from t5x_lite.compat import names
from t5x_lite.configuration import configurable_names
from t5x_lite.configuration import syntax

# A flag or a macro in the text of `--help`.
_FLAG = re.compile(r"(?<![`\w])(--[\w.]+(?:='[^']*'|=[\w./]+)?|[A-Z]+_[A-Z_]+)(?![`\w])")
_MACRO = re.compile(r'^([A-Z][A-Z0-9_]*) = (.*?)(?:\s+# (.*))?$')
_INCLUDE = re.compile(r"^include '(.*)'", re.MULTILINE)
# Folders of files that set macros of others: a macro is listed there only if no other file describes it.
_EXAMPLES = re.compile(r'(recipes|t5x)/')


class Macro(NamedTuple):
  """A macro that a gin file sets.

  Attributes:
    name: name of the macro.
    value: value in gin's syntax.
    meaning: the comment on its line or above it; empty without a comment.
  """

  name: str
  value: str
  meaning: str


def flags(command: str) -> list[tuple[str, str]]:
  """Return (flag with its value, meaning) of each argument of a command, positional ones first."""
  parser = argparse.ArgumentParser(add_help=False)
  commands.COMMANDS[command].add_arguments(parser)
  add_shared_arguments(parser)
  actions = sorted(parser._actions, key=lambda action: bool(action.option_strings))
  return [
    (
      '='.join(filter(None, (', '.join(action.option_strings), _value_name(action)))),
      _FLAG.sub(r'`\1`', one_line((action.help or '') % vars(action))),
    )
    for action in actions
  ]


def flag_page() -> str:
  """Return the page of the flags of each command; the flags that `train` has with the same meaning are only named."""
  lines = ['# Flags', '', 'The flags of each command, from `t5x_lite COMMAND --help`.', '']
  of_train = flags('train')
  for command, entry in commands.COMMANDS.items():
    help_line = entry.help[0].upper() + entry.help[1:]
    lines += [f'## {command}', '', f'`t5x_lite {command}`: {in_cell(help_line)}.', '']
    found = flags(command)
    common = [row for row in found if row in of_train and command != 'train']
    rows = [row for row in found if row not in common]
    lines += _table(['flag', 'meaning'], [(f'`{flag}`', meaning) for flag, meaning in rows])
    if common:
      shown = ', '.join(f'`{flag}`' for flag, _ in common)
      lines += [f'Also {shown}, as for [train](#train).', '']
  return '\n'.join(lines)


def packaged_files() -> list[str]:
  """Return the names of the gin files that come with t5x_lite, those of T5X's paths last."""
  return [*syntax.packaged_files(), *syntax.packaged_files(syntax.T5X_FILES)]


def macros(file: str) -> list[Macro]:
  """Return the macros that a packaged gin file sets, in its order."""
  found = []
  comment: list[str] = []
  for line in (syntax.packaged_folder() / file).read_text(encoding='utf-8').splitlines():
    if match := _MACRO.match(line):
      name, value, meaning = match.groups()
      found.append(Macro(name, value, meaning or ' '.join(comment)))
    if line.startswith('# ') and not line.startswith('# --'):
      comment.append(line[2:])
    else:
      comment = []
  return found


def listed_macros() -> dict[str, list[Macro]]:
  """Return the macros with a meaning by packaged file: those of other files first, then of recipes and examples."""
  files = sorted(packaged_files(), key=lambda file: bool(_EXAMPLES.search(file)))
  known: set[str] = set()
  found = {}
  for file in files:
    is_example = _EXAMPLES.search(file)
    rows = [
      macro
      for macro in macros(file)
      if (macro.meaning or macro.value == '%gin.REQUIRED')
      and not (is_example and macro.name in known)
    ]
    known |= {macro.name for macro in rows}
    if rows:
      found[file] = rows
  return found


def macro_page() -> str:
  """Return the page of the macros of the packaged gin files."""
  lines = [
    '# Macros',
    '',
    'A macro is a name in capitals that gin files read as `%NAME`. Set it in a gin file, `BATCH_SIZE = 64`, or by a',
    'flag, `--gin.BATCH_SIZE=64`. The tables have the macros of each file with their defaults, from the comments in',
    'the files. A file has the macros of the files that it includes too. [Gin files](gin_files.md) lists all files.',
    '',
  ]
  for file, rows in listed_macros().items():
    included = _INCLUDE.findall((syntax.packaged_folder() / file).read_text(encoding='utf-8'))
    lines += [f'## {file}', '']
    if included:
      lines += [f'Includes {", ".join(f"`{name}`" for name in included)}.', '']
    lines += _table(
      ['macro', 'default', 'meaning'],
      [
        (
          f'`{macro.name}`',
          'required' if macro.value == '%gin.REQUIRED' else f'`{macro.value}`',
          macro.meaning,
        )
        for macro in rows
      ],
    )
  return '\n'.join(lines)


def file_page() -> str:
  """Return the page of the packaged gin files, by folder."""
  lines = [
    '# Gin files',
    '',
    'The gin files that come with t5x_lite, each with the first sentence of its comment. `--gin_file` finds them by',
    'these names in any folder. [Macros](macros.md) has the values that they read.',
    '',
  ]
  folders: dict[str, list[str]] = {}
  for file in packaged_files():
    folders.setdefault(file.partition('/')[0], []).append(file)
  for folder, files in folders.items():
    lines += [f'## {folder}', '']
    lines += _table(['file', 'content'], [(f'`{file}`', summary(file)) for file in files])
  return '\n'.join(lines)


def summary(file: str) -> str:
  """Return the first sentence of the comment at the top of a packaged gin file."""
  comment = []
  for line in (syntax.packaged_folder() / file).read_text(encoding='utf-8').splitlines():
    if not line.startswith('# '):
      break
    comment.append(line[2:])
  return re.split(r'(?<=(?<!et al)\.) (?=[A-Z])', ' '.join(comment))[0]


def parameter_page() -> str:
  """Return the page of the parameters that gin files and flags can bind, by class and function."""
  lines = [
    '# Parameters',
    '',
    'The parameters that gin files and flags can bind, by class and function, such as',
    '`--gin.data.DatasetConfig.pack=False`. Each name is a link to its defaults and meanings. A gin file imports the',
    'module of a table first, such as `from t5x_lite import data`.',
    '',
  ]
  for modules in api_pages.MODULES.values():
    for module in modules:
      rows = []
      for name, value in api_pages.described(module).items():
        if name in configurables().get(module, ()):
          keys = ', '.join(f'`{row.name}`' for row in api_pages.parameters(value))
          rows.append((f'[`{name}`](api/{api_pages.Place(module, name).link()})', keys))
      if rows:
        lines += [f'## {module}', '', *_table(['name', 'parameters'], rows)]
  return '\n'.join(lines)


def t5x_page() -> str:
  """Return the page of T5X's names, from the table of `t5x_lite.compat.names`."""
  rows = names.MODULES.items()
  moved = [
    (f'`{module}.{name}`', f'`{place.replace(":", ".")}`')
    for module, row in rows
    for name, place in sorted(row.names.items())
  ]
  left_out = [
    (f'`{module}.{name}`', sentence)
    for module, row in rows
    for name, sentence in sorted(row.left_out.items())
  ]
  left_out += [(f'`{module}`', sentence) for module, sentence in names.LEFT_OUT_MODULES.items()]
  return '\n'.join(
    [
      '# Names of T5X',
      '',
      'Where the modules and names of T5X are here, from `t5x_lite/compat/names.py`. How to use them is in',
      '[Move from T5X](../from_t5x.md#names).',
      '',
      '## Modules',
      '',
      *_table(
        ['in T5X', 'here'], [(f'`{module}`', f'`{row.here}`') for module, row in rows if row.here]
      ),
      '## Names in other places',
      '',
      *_table(['in T5X', 'here'], moved),
      '## Without an equivalent',
      '',
      'These names, parameters and values of T5X have no equivalent.',
      '',
      *_table(['in T5X', 'instead'], left_out),
    ]
  )


def measurement_page() -> str:
  """Return the page of all optimizers: their files, and the recorded measurements of them."""
  records = optimizer_records.read()
  return '\n'.join(
    [
      '# All optimizers',
      '',
      'Each row is a file `optimizers/<file>.gin`. [Optimizers](../optimizers.md) helps to choose one.',
      '',
      '- *optimizer*: the comment in the file.',
      '- *rate*: the learning rate to start with.',
      '- *state*: bytes per parameter of the optimizer state, for matrices 512x512 and 512x1024 in float32. The',
      '  parameter itself, 4 bytes, is not included.',
      '- *step*: time of an update divided by that of `optax.adam` in the same run, for 6.3 million parameters on 2',
      '  CPU cores ([method](../benchmarks.md#optimizers)). In a training step the gradients dominate, so most of',
      '  these differences are small there.',
      '- *T5 small*: the same ratio for the 77 million parameters of T5 1.1 small.',
      '',
      optimizer_records.overview(records),
      '',
      '## Measurements',
      '',
      f'The records of `{optimizer_records.FILE}`. [Benchmarks](../benchmarks.md#optimizers) has the method and the',
      'machine.',
      '',
      optimizer_records.table(records),
    ]
  )


def configurables() -> dict[str, set[str]]:
  """Return the names that configurations may use, by the public module that describes them."""
  found: dict[str, set[str]] = {}
  for table in (configurable_names.CALLED, configurable_names.PASSED):
    for module, listed in table.items():
      if module.startswith(('t5x_lite', 'moe')):
        for name in listed.split():
          value = getattr(importlib.import_module(module), name.partition('.')[0])
          home = api_pages.home(value)
          if home is not None:
            found.setdefault(home.page, set()).add(home.name)
  return found


def _table(head: list[str], rows: list[tuple[str, ...]]) -> list[str]:
  """Return the lines of a table and an empty one."""
  return [
    f'| {" | ".join(head)} |',
    '|---' * len(head) + '|',
    *(f'| {" | ".join(map(in_cell, row))} |' for row in rows),
    '',
  ]


def _value_name(action: argparse.Action) -> str | None:
  if action.nargs == 0:
    return None
  return action.metavar or '|'.join(action.choices or ()) or action.dest
