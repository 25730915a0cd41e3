"""Reads gin text into statements that know their file and line; nothing is imported or bound here.

Reading is apart from applying (`gin_utils`) so that a misspelt file, a syntax error, a missing macro or a misspelt one
is refused in a fraction of a second, before JAX is imported. What a file is called and where it is looked for stands
here too.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import difflib
import graphlib
import io
import pathlib
import re
import tokenize
from typing import Any

from gin import config_parser

from t5x_lite.errors import ConfigError, did_you_mean

# A binding's left side: maybe/some/scope/module.Class.parameter, or a macro's name.
_KEY = re.compile(r'^[A-Za-z_][\w./]*$')
# Words that a shell user writes for Python's constants.
_LOWER_CASE_CONSTANTS = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None', 'nil': 'None'}
REQUIRED = 'gin.REQUIRED'


@dataclasses.dataclass(frozen=True)
class Location:
  """Where a statement stands: a file's name as the user would write it and a line, or a command-line flag (line 0)."""

  source: str
  line: int = 0

  @property
  def on_command_line(self) -> bool:
    """Whether the statement was a flag."""
    return self.line == 0

  def __str__(self) -> str:
    return f'{self.source}:{self.line}' if self.line else self.source


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%NAME` in a value."""

  name: str


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/module.Class` in a value, `evaluate` when followed by `()`."""

  scoped_selector: str
  evaluate: bool


@dataclasses.dataclass(frozen=True)
class Binding:
  """`scope/selector.arg_name = value`; a macro's definition has no `arg_name`. Values hold Macros and References."""

  scope: str
  selector: str
  arg_name: str
  value: Any
  location: Location

  @property
  def macro_name(self) -> str | None:
    """The macro that this binding defines, None for a parameter."""
    if self.arg_name:
      return None
    return f'{self.scope}/{self.selector}' if self.scope else self.selector

  @property
  def key(self) -> str:
    """The left side of the binding as it was written."""
    selector = f'{self.scope}/{self.selector}' if self.scope else self.selector
    return f'{selector}.{self.arg_name}' if self.arg_name else selector


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


@dataclasses.dataclass(frozen=True)
class Text:
  """One file (or the command line) as a sequence of statements; an included file is a nested Text."""

  source: str
  statements: tuple['Binding | Block | Import | Text', ...]

  def walk(self) -> Iterator[Binding | Block | Import]:
    """Yields all statements in the order in which they take effect."""
    for statement in self.statements:
      if isinstance(statement, Text):
        yield from statement.walk()
      else:
        yield statement


class _Delegate(config_parser.ParserDelegate):
  """Builds the placeholders above for what stands in values."""

  def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
    """See base class."""
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name: str) -> Macro:
    """See base class."""
    return Macro(macro_name)


# ----------------------------------------------------------------------------------------------------------------------
# Files


def packaged_folder() -> pathlib.Path:
  """Returns the folder of the gin files that come with t5x_lite, in a checkout (`gin/`) or in an installed wheel."""
  package = pathlib.Path(__file__).resolve().parent.parent
  installed = package / 'gin_files'
  return installed if installed.is_dir() else package.parent / 'gin'


def packaged_files(kind: str = '') -> list[str]:
  """Returns the names of the packaged files, e.g. `models/t5_1_1_small.gin`; `kind` restricts to one folder."""
  root = packaged_folder()
  return sorted(path.relative_to(root).as_posix() for path in (root / kind).rglob('*.gin'))


def check_search_paths(folders: Sequence[str]) -> None:
  """Raises ConfigError unless all of `folders` exist."""
  for folder in folders:
    if not pathlib.Path(folder).expanduser().is_dir():
      raise ConfigError(f'--gin_search_paths must name existing folders, separated by commas, got {folder!r}. Correct '
                        'the path, or leave the flag out.')


def find_file(name: str, search_paths: Sequence[str] = (), included_from: pathlib.Path | None = None) -> pathlib.Path:
  """Returns the path of the gin file called `name`.

  Looked up in this order: the current folder, the folder of the file that includes it, `search_paths`, and the files
  that come with t5x_lite (which may be written with or without a leading `gin/`).

  Args:
    name: what the user wrote; an absolute path is taken as it is.
    search_paths: further folders.
    included_from: the file that holds the include statement.

  Raises:
    ConfigError: there is no such file.
  """
  folders = [pathlib.Path('.')]
  if included_from is not None:
    folders.append(included_from.parent)
  folders += [pathlib.Path(folder).expanduser() for folder in search_paths]
  packaged = packaged_folder()
  wanted = pathlib.Path(name).expanduser()
  candidates = [folder / wanted for folder in folders] + [packaged / wanted]
  if wanted.parts[:1] == ('gin',):
    candidates.append(packaged.joinpath(*wanted.parts[1:]))
  for candidate in candidates:
    if candidate.is_file():
      return candidate
  near = [path.name for folder in folders[1:] + [pathlib.Path('.') / wanted.parent] for path in folder.glob('*.gin')]
  known = [*packaged_files(), *near]
  hint = did_you_mean(name, known)
  if not hint.startswith(' Did you mean'):  # perhaps the folder was left out: models/t5_1_1_small.gin
    same_name = [file for file in known if pathlib.PurePath(file).name == wanted.name]
    hint = f' Did you mean {same_name[0]!r}?' if same_name else f' Recipes: {", ".join(packaged_files("recipes"))}.'
  searched = ', '.join(dict.fromkeys(str(folder) for folder in [*folders, packaged]))
  raise ConfigError(f'No gin file {name!r} in {searched}.{hint}')


def read_file(name: str, search_paths: Sequence[str] = ()) -> Text:
  """Returns the statements of a gin file and of the files that it includes.

  Args:
    name: the file, see `find_file`.
    search_paths: further folders to look in, for the file and for what it includes.

  Raises:
    ConfigError: a file is missing, not UTF-8 or not gin; the message names file and line.
  """
  return _read_path(find_file(name, search_paths), name, search_paths, ())


def _read_path(path: pathlib.Path, name: str, search_paths: Sequence[str], stack: tuple[pathlib.Path, ...]) -> Text:
  if path.resolve() in stack:
    raise ConfigError(f'{name} includes itself: {" -> ".join(p.name for p in (*stack, path))}.')
  try:
    text = path.read_text(encoding='utf-8-sig')  # some editors write a byte order mark
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f'Cannot read the gin file {str(path)!r}: {error}.') from error
  return _read(text, name, search_paths, path, (*stack, path.resolve()))


def read_text(text: str, source: str, search_paths: Sequence[str] = (), *, is_flag: bool = True) -> Text:
  """Returns the statements of gin text that stands in no file.

  Args:
    text: gin text.
    source: names it in messages.
    search_paths: where to look for files that it includes.
    is_flag: whether a person gave it on the command line, where values must have an effect.
  """
  return _read(text, source, search_paths, None, (), is_flag)


def _read(text: str, source: str, search_paths: Sequence[str], path: pathlib.Path | None,
          stack: tuple[pathlib.Path, ...], is_flag: bool = False) -> Text:
  statements: list[Binding | Block | Import | Text] = []
  try:
    for statement in config_parser.ConfigParser(io.StringIO(text), _Delegate()):
      location = Location(source, 0 if is_flag else statement.location.line_num)
      match statement:
        case config_parser.BindingStatement():
          statements.append(Binding(statement.scope, statement.selector, statement.arg_name, statement.value, location))
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
  except (SyntaxError, tokenize.TokenError) as error:
    raise ConfigError(_syntax_message(error, text, source, not is_flag)) from None
  except RecursionError:
    raise ConfigError(f'{source[:80]}: a value is nested too deeply to be read. Close brackets earlier.') from None
  return Text(source, tuple(statements))


def _syntax_message(error: SyntaxError | tokenize.TokenError, text: str, source: str, in_file: bool) -> str:
  """Words gin's or the tokenizer's complaint as `file:line: what (line)`."""
  if isinstance(error, tokenize.TokenError):
    what, (line, _) = error.args
    what = f'{what}: a bracket or a quotation mark is not closed'
  else:
    what, line = error.msg, error.lineno or 0
  lines = text.splitlines()
  shown = lines[line - 1].strip() if 0 < line <= len(lines) else (lines[-1].strip() if lines else '')
  where = f'{source}:{line}' if in_file else source
  what = ' '.join(what.split())
  hint = ''
  value = shown.partition('=')[2].strip()
  if value.lower() in _LOWER_CASE_CONSTANTS:
    hint = f' Write {_LOWER_CASE_CONSTANTS[value.lower()]}.'
  elif re.match(r'^[A-Za-z_/.][\w/.-]*$', value):
    hint = f' A string stands in quotes: {value!r}.'
  return f'{where}: not gin syntax: {what.rstrip(".")}, in `{shown}`.{hint}'


# ----------------------------------------------------------------------------------------------------------------------
# The command line


def read_flag(key: str, value: str, flag: str) -> Text:
  """Returns the binding of one `--gin.KEY=VALUE` flag.

  Args:
    key: a macro's name or `module.Class.parameter`, maybe with scopes.
    value: a gin value, e.g. `5`, `"runs/a"`, `@optimizers.adamw()`; or a bare string, e.g. `runs/a`.
    flag: the flag as the user wrote it, for messages.

  Raises:
    ConfigError: the key or the value is not gin, or the value is a bare true, false or none.

  >>> read_flag('MODEL_DIR', 'runs/a', '--gin.MODEL_DIR=runs/a').statements[0].value
  'runs/a'
  >>> read_flag('MODEL_DIR', r'\\"runs/a\\"', '--gin.MODEL_DIR=...').statements[0].value
  'runs/a'
  """
  if not _KEY.match(key):
    raise ConfigError(f'{flag}: {key!r} is not the name of a macro or of a parameter. Write --gin.NAME=VALUE or '
                      '--gin.module.Class.parameter=VALUE.')
  value = value.strip()
  if re.match(r'^\\(["\']).*\\\1$', value, re.DOTALL):  # \"runs/a\" reached us with its backslashes
    value = value[1:-2] + value[-1]
  if not value:
    raise ConfigError(f'{flag}: the value is missing. An empty string is written --gin.{key}=\'""\'.')
  if value.lower() in _LOWER_CASE_CONSTANTS and value not in _LOWER_CASE_CONSTANTS.values():
    constant = _LOWER_CASE_CONSTANTS[value.lower()]
    raise ConfigError(f'{flag}: got a bare {value}, which gin does not know. Write --gin.{key}={constant}, or '
                      f'--gin.{key}=\'"{value}"\' if a string is meant.')
  text = f'{key} = {value}'
  if not _is_value(value):
    if value[0] in '\'"([{@%':
      return read_text(text, flag)  # gin's syntax was meant: raises with gin's complaint
    text = f'{key} = {value!r}'
  read = read_text(text, flag)
  if len(read.statements) != 1:
    raise ConfigError(f'{flag}: got {len(read.statements)} statements, expected one value. Write a flag for each, or '
                      '--gin_bindings=TEXT.')
  return read


def _is_value(text: str) -> bool:
  """Whether gin reads all of `text` as one value."""
  parser = config_parser.ConfigParser(text, _Delegate())
  try:
    parser.parse_value()
  except (SyntaxError, tokenize.TokenError):
    return False
  except RecursionError:
    return True  # complained about where it is read
  return parser.current_token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER, tokenize.COMMENT)


# ----------------------------------------------------------------------------------------------------------------------
# What can be refused without importing anything


def macros_in(value: Any) -> Iterator[str]:
  """Yields the names of the macros that `value` mentions, at any depth."""
  for part in parts_of(value):
    if isinstance(part, Macro):
      yield part.name


def parts_of(value: Any) -> Iterator[Any]:
  """Yields the leaves of nested lists, tuples and dicts, keys included."""
  if isinstance(value, dict):
    for key, item in value.items():
      yield from parts_of(key)
      yield from parts_of(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from parts_of(item)
  else:
    yield value


def check_macros(texts: Sequence[Text], remedies: Mapping[str, str] | None = None) -> None:
  """Refuses macros that are missing, undefined, or set on the command line without anything to read them.

  Args:
    texts: files and flags in the order in which they take effect.
    remedies: for the names of well-known macros, what to do when they are missing.

  Raises:
    ConfigError: naming all missing macros at once.
  """
  remedies = remedies or {}
  bindings = _bindings(texts)
  definitions = {binding.macro_name: binding for binding in bindings if binding.macro_name}
  mentioned = {name for binding in bindings for name in macros_in(binding.value) if name != REQUIRED}
  for name, binding in definitions.items():
    if binding.location.on_command_line and name not in mentioned:
      raise ConfigError(f'{binding.location}: nothing in the configuration reads a macro {name!r}.'
                        f'{did_you_mean(name, mentioned)}')
  missing = missing_macros(texts)
  for name, location in missing.items():
    near = did_you_mean(name, definitions.keys() - missing.keys())
    if near.startswith(' Did you mean') and name not in definitions and name not in remedies:
      raise ConfigError(f'{location}: the macro {name!r} is defined nowhere.{near}')
  if missing:
    raise ConfigError(_missing_message(missing, bindings, remedies))
  _check_cycles(definitions)


def misspelt_macros(texts: Sequence[Text]) -> list[str]:
  """Returns a sentence for each macro of a file that nothing reads and whose name is nearly that of one that is read.

  A file may define more than one run reads, so this is no error.
  """
  bindings = _bindings(texts)
  mentioned = {name for binding in bindings for name in macros_in(binding.value)}
  unread = {binding.macro_name: binding.location for binding in bindings
            if binding.macro_name and binding.macro_name not in mentioned and not binding.location.on_command_line}
  sentences = []
  for name, location in unread.items():
    near = difflib.get_close_matches(name, mentioned, n=1, cutoff=0.85)
    if near:
      sentences.append(f'{location}: nothing reads the macro {name!r}. Did you mean {near[0]!r}?')
  return sentences


def _check_cycles(definitions: Mapping[str, Binding]) -> None:
  """Refuses macros that are defined by each other."""
  graph = {name: set(macros_in(binding.value)) for name, binding in definitions.items()}
  try:
    graphlib.TopologicalSorter(graph).prepare()
  except graphlib.CycleError as error:
    first, *others = error.args[1]
    raise ConfigError(f'{definitions[first].location}: the macro {first!r} is defined by itself: '
                      f'{" -> ".join((first, *others))}. Give one of them a value.') from None


def missing_macros(texts: Sequence[Text]) -> dict[str, Location]:
  """Returns the macros that have no value, each with the place that asks for it."""
  bindings = _bindings(texts)
  definitions = {binding.macro_name: binding for binding in bindings if binding.macro_name}
  # The last binding of a parameter counts. Files may import one module under several names, so the class decides.
  effective = {}
  for binding in bindings:
    effective[binding.macro_name or (binding.scope, binding.selector.rpartition('.')[2], binding.arg_name)] = binding
  missing = {name: binding.location for name, binding in definitions.items() if binding.value == Macro(REQUIRED)}
  for binding in effective.values():
    for name in macros_in(binding.value):
      if name not in definitions and '.' not in name:  # a dot: a constant, gin.REQUIRED or one of user code
        missing.setdefault(name, binding.location)
  return missing


def _bindings(texts: Sequence[Text]) -> list[Binding]:
  return [statement for text in texts for statement in text.walk() if isinstance(statement, Binding)]


def _missing_message(missing: Mapping[str, Location], bindings: Sequence[Binding], remedies: Mapping[str, str]) -> str:
  names = sorted(missing)
  many = len(names) > 1
  lines = [f'{len(names)} required values are missing: {", ".join(names)}.' if many
           else f'A required value is missing: {names[0]}.']
  for name in names:
    remedy = remedies.get(name, f'set --gin.{name}=VALUE')
    earlier = [b for b in bindings if b.macro_name == name and b.value != Macro(REQUIRED)]
    if earlier:
      remedy = (f'{earlier[-1].location} sets it, but {missing[name]}, read later, requires it anew: '
                'give that file first')
    lines.append(f'  {name}: {remedy} (asked for in {missing[name]})')
  return '\n'.join(lines)
