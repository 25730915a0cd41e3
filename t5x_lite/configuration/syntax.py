"""Reading of gin text into statements with file and line; nothing is imported or bound here.

Reading is separate from applying (`gin_utils`), so that a missing file, a syntax error, or a missing or misspelt macro
is reported in a fraction of a second, before JAX is imported. The search for gin files is here too.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import difflib
import functools
import graphlib
import io
import pathlib
import re
import sys
import tokenize
from typing import Any

from gin import config_parser

from t5x_lite import checks
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.formatting import gin_flag
from t5x_lite.storage import files

# Left side of a binding: maybe/some/scope/module.Class.parameter, or the name of a macro.
_KEY = re.compile(r'^[A-Za-z_][\w./]*$')
# A function or class of a module that is called without arguments, without the @ that gin requires.
_CALL = re.compile(r'^(?:[A-Za-z_]\w*/)*[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\(\)$')
# Names of macros are in capitals by convention.
_MACRO_NAME = re.compile(r'^[A-Z][A-Z0-9_]*$')
# Words of other languages for Python's constants.
_LOWER_CASE_CONSTANTS = {
  'true': 'True',
  'false': 'False',
  'none': 'None',
  'null': 'None',
  'nil': 'None',
}
REQUIRED = 'gin.REQUIRED'
# Macro with the rules of `mesh_rules`.
MESH_RULES = 'MESH_RULES'
# Folder of the files that have the names of T5X's.
T5X_FILES = 't5x'
# Types of the token after a value that is alone in its line.
_ENDS = (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.COMMENT)
# First characters of values in gin's syntax.
_OPENING = '\'"([{@%'
# Python's tokenizer, from 3.12 on, of more than 200 open brackets.
_TOO_MANY_BRACKETS = 'too many nested parentheses'


@dataclasses.dataclass(frozen=True)
class Location:
  """Location of a statement: a file name as users write it and a line, or a command-line flag (line 0)."""

  source: str
  line: int = 0

  @property
  def on_command_line(self) -> bool:
    """True if the statement is a flag."""
    return self.line == 0

  def __str__(self) -> str:
    if self.line:
      return f'{self.source}:{self.line}'
    return self.source


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME` in a value."""

  name: str

  def __repr__(self) -> str:
    return f'%{self.name}'


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/module.Class` in a value, `evaluate` when followed by `()`."""

  scoped_selector: str
  evaluate: bool

  def __repr__(self) -> str:
    if self.evaluate:
      return f'@{self.scoped_selector}()'
    return f'@{self.scoped_selector}'


@dataclasses.dataclass(frozen=True)
class Binding:
  """`scope/selector.arg_name = value`; a macro has no `arg_name`. The value may contain Macros and References."""

  scope: str
  selector: str
  arg_name: str
  value: Any
  location: Location

  @property
  def macro_name(self) -> str | None:
    """Name of the macro that this binding defines; None for a parameter."""
    if self.arg_name:
      return None
    if self.scope:
      return f'{self.scope}/{self.selector}'
    return self.selector

  @property
  def key(self) -> str:
    """Left side of the binding as written."""
    if self.scope:
      selector = f'{self.scope}/{self.selector}'
    else:
      selector = self.selector
    if self.arg_name:
      return f'{selector}.{self.arg_name}'
    return selector

  @property
  def target(self) -> str | tuple[str, str, str]:
    """Value that two bindings share if they bind the same: files may import a module under several names."""
    return self.macro_name or (self.scope, self.selector.rpartition('.')[2], self.arg_name)

  def __str__(self) -> str:
    return f'{self.key} = {self.value!r}'


@dataclasses.dataclass(frozen=True)
class Block:
  """`scope/selector:`, the head of an indented group of bindings."""

  selector: str
  location: Location


@dataclasses.dataclass(frozen=True)
class Import:
  """An import statement, as gin's parser understands it."""

  statement: config_parser.ImportStatement
  location: Location


Statement = Binding | Block | Import


@dataclasses.dataclass(frozen=True)
class Text:
  """One file (or the command line) as a sequence of statements; an included file is a nested Text."""

  source: str
  statements: tuple['Statement | Text', ...]
  path: files.Path | None = None

  @property
  def is_of_user(self) -> bool:
    """Whether it is a file or a flag, not text that a command adds."""
    return self.path is not None or all(
      statement.location.on_command_line for statement in self.walk()
    )

  def walk(self) -> Iterator[Statement]:
    """Yield all statements in the order in which they take effect."""
    for statement, _ in self.walk_files():
      yield statement

  def walk_files(self) -> Iterator[tuple[Statement, 'Text']]:
    """Yield all statements in the order in which they take effect, each with the text that has it."""
    for statement in self.statements:
      if isinstance(statement, Text):
        yield from statement.walk_files()
      else:
        yield statement, self

  def is_packaged(self, folder: str = '') -> bool:
    """Return whether it is a file of t5x_lite, in a subfolder of `gin/`."""
    return self.path is not None and packaged_folder() / folder in self.path.parents


class _Delegate(config_parser.ParserDelegate):
  """Returns the placeholders above for macros and references in values."""

  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
    """See base class."""
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name: str) -> Macro:
    """See base class."""
    return Macro(macro_name)


# ----------------------------------------------------------------------------------------------------------------------
# Files


@functools.cache  # asked for each binding
def packaged_folder() -> pathlib.Path:
  """Return the folder of the gin files of t5x_lite, in a checkout (`gin/`) or in an installed wheel."""
  package = pathlib.Path(__file__).resolve().parent.parent
  installed = package / 'gin_files'
  if installed.is_dir():
    return installed
  return package.parent / 'gin'


def packaged_files(kind: str = '') -> list[str]:
  """Return the names of the packaged files, e.g. `models/t5_1_1_small.gin`; `kind` restricts to one folder.

  Files with names of T5X's are only those of the kind T5X_FILES.
  """
  root = packaged_folder()
  names = sorted(path.relative_to(root).as_posix() for path in (root / kind).rglob('*.gin'))
  return [name for name in names if kind or not name.startswith(f'{T5X_FILES}/')]


def check_search_paths(folders: Sequence[str]) -> None:
  """Raise ConfigError unless all of `folders` exist."""
  for folder in folders:
    if not files.path(folder).expanduser().is_dir():
      raise checks.invalid(
        '', '--gin_search_paths', 'existing folders, separated by commas', folder
      )


def find_file(
  name: str, search_paths: Sequence[str] = (), included_from: files.Path | None = None
) -> files.Path:
  """Return the path of the gin file called `name`.

  Search order: the current folder, the folder of the including file, `search_paths`, the files of t5x_lite, whose names
  may begin with `gin/`, and the Python package of the first folder; files of t5x_lite include each other first. For
  T5X's own files, e.g. `t5x/configs/runs/finetune.gin` below any folder, that are not found, ours of the same meaning.

  Args:
    name: name, absolute path, or path in an object store.
    search_paths: additional folders.
    included_from: the file with the include statement, or None.

  Raises:
    ConfigError: the file does not exist.
  """
  wanted = files.path(name).expanduser()
  if files.is_remote(wanted):
    folders: list[files.Path] = []
    candidates: list[files.Path] = [wanted]
  else:
    folders = [pathlib.Path('.')]
    if included_from is not None:
      folders.append(included_from.parent)
    folders += [files.path(folder).expanduser() for folder in search_paths]
    candidates = _candidates(wanted, folders, included_from)
  for candidate in candidates:
    if files.is_remote(candidate):  # Stores have no '..'.
      candidate = candidate.resolve()
    if candidate.is_file():
      # In a checkout, `gin/` is in the current folder too.
      resolved = candidate.resolve()
      if packaged_folder() in resolved.parents:
        return resolved
      return candidate
  for candidate in candidates:
    broken = files.broken_link(candidate)
    if broken is not None:
      raise ConfigError(f'The gin file {name!r} cannot be read: {broken}. Replace the link.')
  searched = [*folders, packaged_folder()] if folders else [wanted.parent]
  names = dict.fromkeys(map(str, searched))
  raise ConfigError(
    f'The gin file {name!r} does not exist in {", ".join(names)}.{_hint(name, wanted, folders)}'
  )


def _candidates(
  wanted: pathlib.Path, folders: Sequence[files.Path], included_from: files.Path | None
) -> list[files.Path]:
  """Return the paths that a name on the disk may mean, in the order of `find_file`."""
  packaged = packaged_folder()
  parts = wanted.parts
  ours = [packaged / wanted]
  if parts[:1] == ('gin',):
    ours.append(packaged.joinpath(*parts[1:]))
  for start, part in enumerate(parts):
    if part == T5X_FILES:
      ours.append(packaged.joinpath(*parts[start:]))
  if wanted.is_absolute():
    theirs = [wanted]
  else:
    theirs = [folder / wanted for folder in folders]
  # Files of t5x_lite include each other, whatever is in the current folder.
  if included_from is not None and packaged in included_from.parents:
    return [*ours, *theirs, *_in_package(wanted)]
  return [*theirs, *ours, *_in_package(wanted)]


def _hint(name: str, wanted: files.Path, folders: Sequence[files.Path]) -> str:
  """Return a sentence about a missing file: a similar name, the recipes, or a package to install."""
  is_in_store = files.is_remote(wanted)
  first = ''
  if len(wanted.parts) > 1:
    first = wanted.parts[0]
  roots = [*folders, packaged_folder()]
  if first.isidentifier() and not any((root / first).exists() for root in roots):
    return f' If it belongs to a package, install the package {first}, or add its parent folder to --gin_search_paths.'
  known = packaged_files(T5X_FILES if T5X_FILES in wanted.parts else '')
  for folder in [*folders[1:], wanted.parent]:
    known += [path.name for path in folder.glob('*.gin')]
  hint = did_you_mean(wanted.name if is_in_store else name, known, lists_all=False)
  if hint:
    return hint
  # The folder may be missing: models/t5_1_1_small.gin.
  for file in known:
    if pathlib.PurePath(file).name == wanted.name:
      return f' Did you mean {file!r}?'
  return f' Recipes: {", ".join(packaged_files("recipes"))}.'


def _in_package(name: pathlib.Path) -> list[pathlib.Path]:
  """Return the paths of a file in the Python package that its first folder names, without importing the package."""
  first, *rest = name.parts or ('',)
  if not rest or not first.isidentifier():
    return []
  # `importlib.util.find_spec` knows of an installed T5X only the views that are imported instead.
  for finder in sys.meta_path:
    spec = finder.find_spec(first, None)
    if spec is not None:
      folders = spec.submodule_search_locations or ()
      return [pathlib.Path(folder).joinpath(*rest) for folder in folders]
  return []


def read_file(
  name: str,
  search_paths: Sequence[str] = (),
  *,
  included_from: files.Path | None = None,
  source: str | None = None,
) -> Text:
  """Return the statements of a gin file and of the files that it includes.

  Args:
    name: name of the file, see `find_file`.
    search_paths: additional folders for this file and its includes.
    included_from: the file that names this file, or None.
    source: name of the file in messages; default: `name`.

  Raises:
    ConfigError: a file is missing, not UTF-8 or not gin; the message has file and line.
  """
  return _read_path(find_file(name, search_paths, included_from), source or name, search_paths, ())


def _read_path(
  path: files.Path, name: str, search_paths: Sequence[str], stack: tuple[files.Path, ...]
) -> Text:
  if path.resolve() in stack:
    chain = ' -> '.join(each.name for each in (*stack, path))
    raise ConfigError(f'{name} includes itself: {chain}. Remove one of these includes.')
  try:
    text = path.read_text(encoding='utf-8-sig')  # Some editors write a byte order mark.
  except (OSError, UnicodeDecodeError) as error:
    remedy = ' Save it as UTF-8.' if isinstance(error, UnicodeDecodeError) else ''
    raise ConfigError(f'Cannot read the gin file {str(path)!r}: {error}.{remedy}') from error
  return _read(text, name, search_paths, path, (*stack, path.resolve()))


def read_text(
  text: str, source: str, search_paths: Sequence[str] = (), *, is_flag: bool = True
) -> Text:
  """Return the statements of gin text that is not in a file.

  Args:
    text: gin text.
    source: name of the text in messages.
    search_paths: additional folders for its includes.
    is_flag: whether it is a command-line flag, which must have an effect.
  """
  return _read(text, source, search_paths, None, (), is_flag)


def _read(
  text: str,
  source: str,
  search_paths: Sequence[str],
  path: files.Path | None,
  stack: tuple[files.Path, ...],
  is_flag: bool = False,
) -> Text:
  statements: list[Binding | Block | Import | Text] = []
  try:
    for statement in config_parser.ConfigParser(io.StringIO(text), _Delegate()):
      location = Location(source, 0 if is_flag else statement.location.line_num)
      match statement:
        case config_parser.BindingStatement(scope, selector, arg_name, value):
          statements.append(Binding(scope, selector, arg_name, value, location))
        case config_parser.BlockDeclaration():
          statements.append(Block(statement.selector, location))
        case config_parser.ImportStatement():
          statements.append(Import(statement, location))
        case config_parser.IncludeStatement():
          try:
            included = find_file(statement.filename, search_paths, path)
          except ConfigError as error:
            raise ConfigError(f'{location}: {error}') from None
          statements.append(_read_path(included, statement.filename, search_paths, stack))
  except (SyntaxError, tokenize.TokenError, RecursionError) as error:
    raise ConfigError(_syntax_message(error, text, source, not is_flag)) from None
  return Text(source, tuple(statements), path)


def _syntax_message(
  error: SyntaxError | tokenize.TokenError | RecursionError, text: str, source: str, in_file: bool
) -> str:
  """Return the message of a syntax error: `file:line: error (text)`."""
  # Python 3.12 counts brackets before it reads a value; 3.11 reads it as deeply as its stack allows.
  if isinstance(error, RecursionError) or _TOO_MANY_BRACKETS in str(error):
    return f'{source[:80]}: a value is nested too deeply. Close brackets earlier.'
  if isinstance(error, tokenize.TokenError):
    what, (line, _) = error.args
    if 'EOF' in what or 'unterminated' in what:
      what = f'{what}: a bracket or a quotation mark is not closed'
  else:
    what = error.msg
    line = error.lineno or 0
  shown = ''
  lines = text.splitlines()
  if 0 < line <= len(lines):
    shown = lines[line - 1].strip()
  elif lines:
    shown = lines[-1].strip()
  where = f'{source}:{line}' if in_file else source
  what = re.sub(r'malformed node or string.*?: <.*?>', 'names in values need quotes.', what)
  what = ' '.join(what.split())
  hint = ''
  key, _, value = (part.strip() for part in shown.partition('='))
  quoted = re.sub(r'([{,]\s*)([A-Za-z_]\w*)(\s*:)', r"\1'\2'\3", value)

  def written(value: str) -> str:
    if in_file:
      return f'{key} = {value}'
    return gin_flag(key, value)

  if _CALL.match(value):
    hint = f' Write {written(f"@{value}")}, and set its arguments by other bindings.'
  elif quoted != value:
    hint = f' Write {written(quoted)}.'
  elif value.lower() in _LOWER_CASE_CONSTANTS:
    hint = f' Write {_LOWER_CASE_CONSTANTS[value.lower()]}.'
  elif _MACRO_NAME.match(value):
    # The macro may be defined in a file that has not been read yet, so the name alone decides.
    hint = f' Write {written(f"%{value}")} for the macro, or {value!r} for a string.'
  elif re.match(r'^[A-Za-z_/.][\w/.:-]*$', value):
    hint = f' Strings need quotes: {value!r}.'
  return f'{where}: not gin syntax: {what.rstrip(".")}, in `{shown}`.{hint}'


# ----------------------------------------------------------------------------------------------------------------------
# The command line


def read_flag(key: str, value: str, flag: str) -> Text:
  """Return the binding of one `--gin.KEY=VALUE` flag.

  Args:
    key: name of a macro or `module.Class.parameter`, possibly with scopes.
    value: gin value, e.g. `5`, `"runs/a"`, `@optimizers.adamw()`; or a string without quotes, e.g. `runs/a`.
    flag: the flag as written, for messages.

  Raises:
    ConfigError: the key or the value is invalid, or the value is true, false or none without quotes.

  >>> read_flag('MODEL_DIR', 'runs/a', '--gin.MODEL_DIR=runs/a').statements[0].value
  'runs/a'
  >>> read_flag('MODEL_DIR', r'\\"runs/a\\"', '--gin.MODEL_DIR=...').statements[0].value
  'runs/a'
  """
  value = value.strip()
  if re.match(r'^\\(["\']).*\\\1$', value, re.DOTALL):  # \"runs/a\" with backslashes.
    value = value[1:-2] + value[-1]
  constant = _LOWER_CASE_CONSTANTS.get(value.lower())
  string = gin_flag(key, f'"{value}"')
  if not _KEY.match(key):
    problem = (
      f'{key!r} is not the name of a macro or parameter. Write --gin.NAME=VALUE or '
      '--gin.module.Class.parameter=VALUE'
    )
  elif not value:
    problem = f'the value is missing. For an empty string, write --gin.{key}=\'""\''
  elif constant is not None and value not in _LOWER_CASE_CONSTANTS.values():
    problem = (
      f'{value} is not a valid gin value. Write {gin_flag(key, constant)}, or {string} for a string'
    )
  else:
    if _CALL.match(value):
      raise ConfigError(
        f'{flag}: a call must begin with @. Write {gin_flag(key, f"@{value}")}, or {string} for a string.'
      )
    # A value in gin's syntax with an error is read as it is, to raise gin's error.
    if not _is_value(value) and value[0] not in _OPENING:
      value = repr(value)
    read = read_text(f'{key} = {value}', flag)
    if len(read.statements) == 1:
      return read
    problem = (
      f'the flag must have one value, got {len(read.statements)} statements. Write one flag each, or '
      '--gin_bindings=TEXT'
    )
  raise ConfigError(f'{flag}: {problem}.')


def _is_value(text: str) -> bool:
  """Return whether gin reads the entire text as one value."""
  try:
    parser = config_parser.ConfigParser(text, _Delegate())
    parser.parse_value()
  except (SyntaxError, tokenize.TokenError):
    return False
  except RecursionError:
    return True  # Reading it raises the error.
  token = parser.current_token
  return token is not None and token.type in _ENDS


# ----------------------------------------------------------------------------------------------------------------------
# Checks before anything is imported


def macros_in(value: Any) -> Iterator[str]:
  """Yield the names of the macros in `value`, at any depth."""
  for part in parts_of(value):
    if isinstance(part, Macro):
      yield part.name


def mentioned_macros(texts: Sequence[Text]) -> set[str]:
  """Return the names of the macros in the values of all bindings."""
  return {name for binding in bindings_of(texts) for name in macros_in(binding.value)}


def parts_of(value: Any) -> Iterator[Any]:
  """Yield the leaves of nested lists, tuples and dicts, including keys."""
  if isinstance(value, dict):
    for key, item in value.items():
      yield from parts_of(key)
      yield from parts_of(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from parts_of(item)
  else:
    yield value


def check_macros(
  texts: Sequence[Text], remedies: Mapping[str, str] = {}, unused: Mapping[str, str] = {}
) -> None:
  """Raise for missing and undefined macros, and for macros of flags that are not used.

  Args:
    texts: files and flags in the order of application.
    remedies: remedies for missing macros, by name.
    unused: sentences about macros that are not used, by name.

  Raises:
    ConfigError: with all missing macros.
  """
  bindings = bindings_of(texts)
  definitions = {binding.macro_name: binding for binding in bindings if binding.macro_name}
  mentioned = mentioned_macros(texts) - {REQUIRED}
  missing = missing_macros(texts)
  problems = []
  for name, binding in definitions.items():
    if binding.location.on_command_line and name not in mentioned:
      if name in unused:
        hint = f' {unused[name]}'
      elif files_with := _packaged_files_that_set(name):
        hint = f' Add a file that uses it, e.g. --gin_file={files_with[0]}.'
      else:
        hint = did_you_mean(name, mentioned)
      problems.append(
        f'{binding.location}: the macro {name!r} is not used in the configuration.{hint}'
      )
  for name, location in missing.items():
    near = did_you_mean(name, definitions.keys() - missing.keys(), lists_all=False)
    if near and name not in definitions and name not in remedies:
      problems.append(f'{location}: the macro {name!r} is not defined.{near}')
  if missing:
    problems.append(_missing_message(missing, texts, remedies))
  if problems:
    raise ConfigError(problems[0])
  _check_cycles(definitions)


def _packaged_files_that_set(macro: str) -> list[str]:
  """Return the partial files of t5x_lite that define and use a macro; a complete recipe is not an addition."""
  found = []
  for name in packaged_files('partitioning') + packaged_files('optimizers'):
    text = (packaged_folder() / name).read_text(encoding='utf-8')
    if re.search(rf'^{re.escape(macro)} = ', text, re.MULTILINE) and f'%{macro}' in text:
      found.append(name)
  return found


def misspelt_macros(texts: Sequence[Text]) -> list[str]:
  """Return a warning for each unused macro of a file whose name is similar to that of a used one.

  Unused macros are allowed, since a file may be used for several commands.
  """
  mentioned = mentioned_macros(texts) | {MESH_RULES}
  unread: dict[str, Location] = {}
  for binding in bindings_of(texts):
    name = binding.macro_name
    if name and name not in mentioned and not binding.location.on_command_line:
      unread[name] = binding.location
  sentences = []
  for name, location in unread.items():
    near = difflib.get_close_matches(name, mentioned, n=1, cutoff=0.85)
    if near:
      sentences.append(f'{location}: the macro {name!r} is not used. Did you mean {near[0]!r}?')
  return sentences


def _check_cycles(definitions: Mapping[str, Binding]) -> None:
  """Raise if macros are defined by each other."""
  graph = {name: set(macros_in(binding.value)) for name, binding in definitions.items()}
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    first, *others = error.args[1]
    raise ConfigError(
      f'{definitions[first].location}: the macro {first!r} is defined by itself: '
      f'{" -> ".join((first, *others))}. Set one of them to a value.'
    ) from None


def missing_macros(texts: Sequence[Text]) -> dict[str, Location]:
  """Return the macros without a value, with the location that requires each."""
  bindings = bindings_of(texts)
  definitions = {binding.macro_name: binding for binding in bindings if binding.macro_name}
  # The last binding of a parameter applies.
  effective = {binding.target: binding for binding in bindings}
  missing: dict[str, Location] = {}
  for name, binding in definitions.items():
    if binding.value == Macro(REQUIRED):
      missing[name] = binding.location
  for binding in effective.values():
    for name in macros_in(binding.value):
      if name not in definitions and '.' not in name:  # A name with a dot is a constant.
        missing.setdefault(name, binding.location)
  return missing


def bindings_of(texts: Sequence[Text]) -> list[Binding]:
  """Return all bindings in the order in which they take effect."""
  found = []
  for text in texts:
    found += [statement for statement in text.walk() if isinstance(statement, Binding)]
  return found


def _set_in_an_earlier_text(
  name: str, required_at: Location, texts: Sequence[Text]
) -> Location | None:
  """Return where a macro is set by a text before the one that requires it, None without any.

  A file that the latter includes belongs to it, since another order of files on the command line does not move it.
  """
  found = None
  for text in texts:
    bindings = [each for each in bindings_of([text]) if each.macro_name == name]
    if any(binding.location == required_at for binding in bindings):
      return found
    for binding in bindings:
      if binding.value != Macro(REQUIRED):
        found = binding.location
  return found


def _missing_message(
  missing: Mapping[str, Location], texts: Sequence[Text], remedies: Mapping[str, str]
) -> str:
  names = sorted(missing)
  if len(names) > 1:
    lines = [f'{len(names)} required values are missing: {", ".join(names)}.']
  else:
    lines = [f'A required value is missing: {names[0]}.']
  for name in names:
    remedy = remedies.get(name, f'set --gin.{name}=VALUE')
    earlier = _set_in_an_earlier_text(name, missing[name], texts)
    if earlier is not None:
      remedy = (
        f'{earlier} sets it, but {missing[name]}, which is read later, requires it again: pass that file first, or '
        f'repeat the value with --gin.{name}=VALUE'
      )
    lines.append(f'  {name}: {remedy} (required by {missing[name]})')
  return '\n'.join(lines)
