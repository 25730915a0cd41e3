"""Words that may stand at the cursor of a command line of t5x_lite.

Names that a shell would have to quote, and what lies in folders of such names, are left out: a shell would run `$(...)`
of a file's name.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
import os
import pathlib
import re
import shlex

from t5x_lite.apps.commands import COMMANDS
from t5x_lite.apps.common.flags import add_shared_arguments
from t5x_lite.configuration import syntax as gin_syntax

# At the beginning of a word, `~` and zsh's `=` stand for other paths, and `-` for a flag.
_PLAIN = re.compile(r'[\w@%+:,.][\w@%+=:,.-]*')
# The word at the cursor, without its quotes: a shell may replace it with an unquoted one.
_TYPED = re.compile(r'[\w@%+=:,./~-]*')
_MACRO = re.compile(r'^([A-Z][A-Z0-9_]*)\s*=\s*(\S*)', re.MULTILINE)
_INCLUDE = re.compile(r'^include\s+[\'"](.+)[\'"]', re.MULTILINE)


def candidates(line: str) -> list[str]:
  """Return the words that may replace the last one of `line`, a command line up to the cursor, in their order.

  The last word is empty if the line ends with a space. After `--`, the command of `launch` is completed.
  """
  words = _split(line)
  while '--' in words[:-1]:
    words = words[words.index('--') + 1 :]
  if not words:
    return []
  *before, word = words
  if not _TYPED.fullmatch(word):
    return []
  if not before:
    return _starting_with(word, [*COMMANDS, '--help', '--version'])
  if before[0] not in COMMANDS:
    return _paths(word)
  parser = argparse.ArgumentParser(allow_abbrev=False)
  COMMANDS[before[0]].add_arguments(parser)
  add_shared_arguments(parser)
  options = parser._option_string_actions
  flag, equals, value = word.partition('=')
  if word.startswith('-') and equals:
    return [f'{flag}={each}' for each in _values(flag, value, options, before)]
  if word.startswith('--gin.') and '--gin_file' in options:
    return _starting_with(word, [f'--gin.{name}=' for name in _macros(before)])
  if word.startswith('-'):
    return _starting_with(word, map(_as_typed, options.values()))
  if before[-1] in options and options[before[-1]].nargs != 0:
    return _values(before[-1], word, options, before)
  positional = [action for action in parser._actions if not action.option_strings]
  choices = [choice for action in positional for choice in action.choices or ()]
  return _starting_with(word, choices) or _paths(word)


def _split(line: str) -> list[str]:
  """Return the words of a line after the program, without variables before it; a quotation may be open."""
  for end in ('', '"', "'"):
    try:
      words = shlex.split(f'{line}|{end}')
    except ValueError:
      continue
    words[-1] = words[-1].removesuffix('|')  # the cursor
    while words and re.fullmatch(r'\w+=.*', words[0]):
      words.pop(0)
    return words[1:]
  return []


def _starting_with(start: str, words: Iterable[str]) -> list[str]:
  return [word for word in words if word.startswith(start)]


def _as_typed(action: argparse.Action) -> str:
  """Return the longest name of a flag as it is typed, e.g. `--gin_file=` and `--gin.` of `--gin.NAME=VALUE`."""
  name = max(action.option_strings, key=len)
  if name.endswith('NAME=VALUE'):
    return name.removesuffix('NAME=VALUE')
  if action.nargs == 0:
    return name
  return f'{name}='


def _values(
  flag: str, value: str, options: Mapping[str, argparse.Action], before: Sequence[str]
) -> list[str]:
  """Return values of a flag that begin with `value`."""
  if flag == '--gin_file':
    # The next folder of a name, as for paths.
    names = (re.match(rf'{re.escape(value)}[^/]*/?', name) for name in gin_syntax.packaged_files())
    packaged = {name[0] for name in names if name}
    return sorted(packaged.union(_paths(value, '.gin')))
  if flag.startswith('--gin.'):
    if _macros(before).get(flag.removeprefix('--gin.')) in ('True', 'False'):
      return _starting_with(value, ['False', 'True'])
    return _paths(value)
  action = options.get(flag)
  if action is None or action.nargs == 0:
    return []
  if action.choices:
    return _starting_with(value, map(str, action.choices))
  if action.type is None:
    return _paths(value)
  return []


def _macros(before: Sequence[str]) -> dict[str, str]:
  """Return the macros of the gin files on a command line, or of all packaged files, with their first values."""
  root = gin_syntax.packaged_folder()
  named = re.findall(r'^--gin_file(?:=|\n)(.+)$', '\n'.join(before), re.MULTILINE)
  names = named or gin_syntax.packaged_files()
  macros = {}
  read = set()
  while names:
    name = names.pop(0)
    for path in (pathlib.Path(name).expanduser(), root / name):
      if path not in read and path.is_file():
        read.add(path)
        text = path.read_text(encoding='utf-8', errors='replace')
        names += _INCLUDE.findall(text)
        for macro, value in _MACRO.findall(text):
          macros.setdefault(macro, value)
        break
  return dict(sorted(macros.items()))


def _paths(start: str, suffix: str = '') -> list[str]:
  """Return paths that begin with `start`: folders, with `/` at their end, and files whose names end with `suffix`."""
  folder, slash, name = start.rpartition('/')
  found = []
  try:
    entries = list(os.scandir(os.path.expanduser(folder + slash) or '.'))
  except OSError:
    return []
  for entry in entries:
    is_hidden = entry.name.startswith('.') and not name
    if is_hidden or not entry.name.startswith(name) or not _PLAIN.fullmatch(entry.name):
      continue
    if entry.is_dir():
      found.append(f'{folder}{slash}{entry.name}/')
    elif entry.name.endswith(suffix):
      found.append(f'{folder}{slash}{entry.name}')
  return sorted(found)
