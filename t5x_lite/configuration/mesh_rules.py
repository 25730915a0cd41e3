"""Mesh rules: changes of a configuration that depend on the hardware.

The macro `MESH_RULES` is a list of pairs (regular expression, change). The first expression that matches the entire
selector decides; its change applies after the gin files and before the flags. By default the selector is the hardware,
e.g. 'gpu-h100-8'. The rules follow axlearn's trainer, whose rules change only the shape of the mesh.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import re
import textwrap
from typing import Any

import gin
from gin import config_parser

from t5x_lite import checks
from t5x_lite import files
from t5x_lite.configuration import binding as gin_apply
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.configuration.syntax import MESH_RULES
from t5x_lite.configuration.syntax import Binding
from t5x_lite.configuration.syntax import Import
from t5x_lite.configuration.syntax import Location
from t5x_lite.configuration.syntax import Text
from t5x_lite.configuration.table import MACRO
from t5x_lite.configuration.table import Key
from t5x_lite.configuration.table import Row
from t5x_lite.configuration.table import Table
from t5x_lite.configuration.table import configurables
from t5x_lite.errors import ConfigError, did_you_mean

_KEY = (MESH_RULES, MACRO, 'value')
_EXAMPLE = "Example: MESH_RULES = [('gpu-h100-.*', 'h100.gin'), ('cpu-.*', 'NUM_PARTITIONS = 2'), ('.*', None)]."
# Names of TPUs by the name in JAX, without "TPU", and words in JAX's names of GPUs that do not tell them apart.
_TPU_NAMES = {
  'v4 lite': 'v4i',
  'v5 lite': 'v5e',
  'v5': 'v5p',
  'v6 lite': 'v6e',
  '7': 'v7',
  '7x': 'v7x',
}
_GPU_WORDS = re.compile(
  r'nvidia|amd|tesla|geforce|quadro|instinct|radeon|graphics|pcie|nvl|oam|sxm\d*|hbm\w*|\d+gb'
)
_MOST_SHOWN = 6  # bindings in a log line


# ----------------------------------------------------------------------------------------------------------------------
# Selector


def hardware_selector(platform: str, device_kind: str, num_devices: int) -> str:
  """Return the selector of a kind of hardware.

  Args:
    platform: JAX's name of the platform.
    device_kind: JAX's name of the devices.
    num_devices: number of devices in all processes.

  >>> hardware_selector('gpu', 'NVIDIA H100 80GB HBM3', 8), hardware_selector('cpu', 'cpu', 2)
  ('gpu-h100-8', 'cpu-2')
  """
  kind = device_kind.lower()
  if platform == 'tpu':
    kind = kind.removeprefix('tpu').strip()
    kind = _TPU_NAMES.get(kind, kind)
  model = ''
  for word in re.findall(r'[a-z0-9]+', kind):
    if word != platform and not _GPU_WORDS.fullmatch(word):
      model += word
  if not model:
    return f'{platform}-{num_devices}'
  return f'{platform}-{model}-{num_devices}'


def detected_selector() -> str:
  """Return the selector of the devices of this job. This initializes JAX."""
  import jax  # Files are read before JAX is imported.

  devices = jax.devices()
  return hardware_selector(devices[0].platform, devices[0].device_kind, len(devices))


# ----------------------------------------------------------------------------------------------------------------------
# Rules


@dataclasses.dataclass(frozen=True)
class MeshRule:
  """One pair of `MESH_RULES`.

  Attributes:
    pattern: regular expression.
    changes: texts to bind, or None for an automatic mesh.
  """

  pattern: str
  changes: tuple[Text | None, ...]


@dataclasses.dataclass(frozen=True)
class MeshRules(Text):
  """The rules as a text without statements, at the position where those of the first matching rule apply."""

  rules: tuple[MeshRule, ...] = ()

  def __repr__(self) -> str:
    """Return the rules as gin text."""
    lines = ['[']
    for rule in self.rules:
      lines.append(f'  ({rule.pattern!r}, [')
      for change in rule.changes:
        text = 'None' if change is None else _as_string(change)
        lines.append(f'{textwrap.indent(text, "    ")},')
      lines.append('  ]),')
    return '\n'.join([*lines, ']'])

  def first_match(self, selector: str) -> MeshRule | None:
    """Return the first rule whose pattern matches the entire selector, or None."""
    return next((rule for rule in self.rules if re.fullmatch(rule.pattern, selector)), None)


def take(texts: Sequence[Text], search_paths: Sequence[str]) -> tuple[list[Text], MeshRules | None]:
  """Take the last binding of `MESH_RULES` out of texts.

  Args:
    texts: files and flags in the order of application.
    search_paths: additional folders for the gin files of rules.

  Returns:
    (texts without bindings of `MESH_RULES`, rules or None).

  Raises:
    ConfigError: the rules are invalid, or a gin file is missing.
  """
  found: list[tuple[Binding, files.Path | None]] = []
  remaining = [_without_rules(text, found) for text in texts]
  if not found or not found[-1][0].value:
    return remaining, None
  binding, path = found[-1]
  rules = []
  location = _shown(binding.location)
  expected = 'a list of pairs (regular expression, change)'
  if not isinstance(binding.value, (list, tuple)):
    raise _invalid(location, MESH_RULES, expected, binding.value)
  for index, pair in enumerate(binding.value):
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], str):
      raise _invalid(
        location, f'{MESH_RULES}[{index}]', 'a pair (regular expression, change)', pair
      )
    pattern, change = pair
    try:
      re.compile(pattern)
    except re.error as error:
      raise _invalid(
        location,
        f'{MESH_RULES}[{index}]',
        f'a regular expression and a change ({error})',
        pattern,
        "A wildcard is '.*'.",
      ) from error
    if not isinstance(change, (list, tuple)):
      change = (change,)
    label = f'{location} (mesh rule {pattern!r})'
    changes = tuple(_read_change(each, label, path, search_paths) for each in change)
    rules.append(MeshRule(pattern, changes))
  return remaining, MeshRules(MESH_RULES, (), rules=tuple(rules))


def _without_rules(text: Text, found: list[tuple[Binding, files.Path | None]]) -> Text:
  """Return a text without bindings of `MESH_RULES`, which are appended to `found` with the path of their file."""
  statements = []
  for statement in text.statements:
    if isinstance(statement, Text):
      statements.append(_without_rules(statement, found))
    elif isinstance(statement, Binding) and statement.macro_name == MESH_RULES:
      found.append((statement, text.path))
    else:
      statements.append(statement)
  return dataclasses.replace(text, statements=tuple(statements))


def _shown(location: Location) -> str:
  if location.on_command_line:
    return f'--gin.{MESH_RULES}'
  return str(location)


def _invalid(
  location: str, option: str, expectation: str, value: Any, remedy: str = _EXAMPLE
) -> ConfigError:
  return ConfigError(f'{location}: {checks.invalid("", option, expectation, value, remedy)}')


def _read_change(
  change: Any, label: str, path: files.Path | None, search_paths: Sequence[str]
) -> Text | None:
  if change is None:
    return None
  if not isinstance(change, str):
    raise _invalid(
      label,
      'change',
      'the name of a gin file, gin bindings as a string, None, or a list of these',
      change,
    )
  if '=' in change or '\n' in change:
    text = gin_syntax.read_text(textwrap.dedent(change), label, search_paths, is_flag=False)
  else:
    try:
      gin_syntax.find_file(change, search_paths, path)
    except ConfigError as error:
      raise ConfigError(
        f"{label}: {error} A change without '=' is the name of a gin file."
      ) from None
    try:
      text = gin_syntax.read_file(
        change, search_paths, included_from=path, source=f'{change} of {label}'
      )
    except ConfigError as error:
      raise ConfigError(f'{label}: {error}') from None
  for binding in gin_syntax.bindings_of([text]):
    if binding.macro_name == MESH_RULES:
      raise ConfigError(
        f'{label}: a rule cannot set {MESH_RULES}, which {binding.location} does. Name another file.'
      )
  return text


def check_macros(rules: MeshRules, texts: Sequence[Text]) -> None:
  """Raise for a macro that only a rule mentions.

  Files may set unused macros, and so may texts with imports, since these are written for any configuration.

  Args:
    rules: all rules of the configuration.
    texts: files and flags.

  Raises:
    ConfigError: with the rule and the most similar macro.
  """
  mentioned = gin_syntax.mentioned_macros(texts)
  for rule in rules.rules:
    texts_of_rule = [change for change in rule.changes if change is not None]
    known = mentioned | gin_syntax.mentioned_macros(texts_of_rule)
    for text in texts_of_rule:
      if _has_own_imports(text):
        continue
      for binding in gin_syntax.bindings_of([text]):
        if binding.macro_name is not None and binding.macro_name not in known:
          raise ConfigError(
            f'{binding.location}: the macro {binding.macro_name!r} is not used in the configuration.'
            f'{did_you_mean(binding.macro_name, known)}'
          )


# ----------------------------------------------------------------------------------------------------------------------
# Choice and application


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """The rule that applies to a configuration.

  Attributes:
    selector: the selector.
    is_detected: whether the selector is that of the hardware.
    rule: the matching rule, or None.
    texts: what the rule binds.
  """

  selector: str
  is_detected: bool
  rule: MeshRule | None
  texts: tuple[Text, ...]

  @property
  def description(self) -> str:
    """Selector and rule in words."""
    origin = 'detected' if self.is_detected else '--mesh_selector'
    if self.rule is None:
      rule = f'no rule of {MESH_RULES} matches'
    else:
      rule = f'rule {self.rule.pattern!r}'
    return f'Mesh selector {self.selector!r} ({origin}): {rule}'


def choose(
  rules: MeshRules, selector: str | None, imports: Mapping[str, Import], table: Table
) -> Choice:
  """Return the rule of a selector.

  Args:
    rules: the rules.
    selector: the selector; None detects the hardware, which initializes JAX.
    imports: import statements of the files, by the names that they define.
    table: bindings of the files.

  Raises:
    ConfigError: the rule has an automatic mesh, and no class that can choose one is configured.
  """
  chosen = detected_selector() if selector is None else selector
  rule = rules.first_match(chosen)
  texts = []
  if rule is not None:
    texts = _texts_of(rule, imports, table)
    if None in rule.changes and not any(text.statements for text in texts):
      raise ConfigError(
        f'Mesh rule {rule.pattern!r}: None requires a configured partitioner. Bind num_partitions of '
        'the partitioner, or replace None by bindings.'
      )
  return Choice(selector=chosen, is_detected=selector is None, rule=rule, texts=tuple(texts))


def _texts_of(rule: MeshRule, imports: Mapping[str, Import], table: Table) -> list[Text]:
  """Return what a rule binds, with the imports that it needs."""
  texts = []
  for change in _changes_with_imports(rule, imports):
    if change is None:
      change = _automatic_mesh(rule, table)
    texts.append(change)
  return texts


def _automatic_mesh(rule: MeshRule, table: Table) -> Text:
  """Return bindings with which the configured partitioners choose the mesh themselves."""
  from t5x_lite.types import ChoosesMesh  # Imports JAX, too.

  source = f'automatic mesh of mesh rule {rule.pattern!r}'
  classes = configurables()
  statements = []
  for scope, selector in table.groups:
    cls = classes[selector].wrapped
    if isinstance(cls, type) and issubclass(cls, ChoosesMesh):
      parts = tuple(scope.split('/')) if scope else ()
      rows = table.in_scope(parts, selector)
      configured = {name: row.value for name, row in rows.items()}
      for name, value in cls.automatic_mesh(configured).items():
        statements.append(Binding(scope, selector, name, value, Location(source, 1)))
  return Text(source, tuple(statements))


def _changes_with_imports(rule: MeshRule, imports: Mapping[str, Import]) -> list[Text | None]:
  """Return the changes of a rule; a text without imports may use those of the files and of earlier changes."""
  known = dict(imports)
  changes = []
  for change in rule.changes:
    if change is None:
      changes.append(None)
      continue
    changes.append(_with_imports(change, known))
    for statement in change.walk():
      if isinstance(statement, Import) and not statement.statement.module.startswith('__gin__'):
        known[statement.statement.bound_name()] = statement
  return changes


def _has_own_imports(text: Text) -> bool:
  """Return whether a text is a file or has import statements, and so uses only names that it imports."""
  if text.path is not None:
    return True
  return any(isinstance(statement, Import) for statement in text.statements)


def _with_imports(text: Text, imports: Mapping[str, Import]) -> Text:
  """Return a text without imports with the import statements of the names that it uses."""
  if _has_own_imports(text):
    return text
  bindings = [statement for statement in text.statements if isinstance(statement, Binding)]
  used = [binding.selector for binding in bindings if binding.macro_name is None]
  for binding in bindings:
    for part in gin_syntax.parts_of(binding.value):
      if isinstance(part, gin_syntax.Reference):
        used.append(part.scoped_selector)
  names = dict.fromkeys(selector.rpartition('/')[2].partition('.')[0] for selector in used)
  needed = [imports[name] for name in names if name in imports]
  if not needed:
    return text
  statements = (_dynamic_registration(text.source), *needed, *text.statements)
  return dataclasses.replace(text, statements=statements)


def _dynamic_registration(source: str) -> Import:
  location = config_parser.Location(source, 1, None, '')
  statement = config_parser.ImportStatement('__gin__.dynamic_registration', True, None, location)
  return Import(statement, Location(source, 1))


def changes(choice: Choice, table: Table) -> list[Row]:
  """Return the rows with which a rule changes a configuration, in the order of the rule.

  Args:
    choice: the rule.
    table: all bindings, among them those of the rule and of the flags, which override it.
  """
  rows = {id(row.statement): row for row in table.values()}
  found = []
  for statement in gin_syntax.bindings_of(choice.texts):
    row = rows.get(id(statement))
    if row is None:
      continue
    former = _without_rule(row, choice)
    # References to one function in two scopes are equal for gin, also two macros.
    if former is None or repr(former.value) != repr(row.value):
      found.append(row)
  return found


def _without_rule(row: Row, choice: Choice) -> Row | None:
  """Return the row that would apply without a rule; None if only the rule binds it."""
  of_rule = {id(statement) for statement in gin_syntax.bindings_of(choice.texts)}
  found: Row | None = row
  while found is not None and id(found.statement) in of_rule:
    found = found.former
  return found


# ----------------------------------------------------------------------------------------------------------------------
# The recorded configuration


class _Record:
  """Value of gin's macro `MESH_RULES`, by which gin prints the rules.

  Attributes:
    rules: the rules.
    text: the configuration without the changes of the rule that applied, with all rules.
  """

  def __init__(self, rules: MeshRules, text: str = ''):
    self.rules = rules
    self.text = text

  def __repr__(self) -> str:
    return repr(self.rules)


@dataclasses.dataclass(frozen=True)
class AppliedRule:
  """A rule in a table of bindings.

  Attributes:
    choice: the rule.
    changed: result of `changes`.
    rules: all rules as a run records them, see `recorded_rules`.
    imports: import statements without those that only the rule has.
  """

  choice: Choice
  changed: Sequence[Row]
  rules: MeshRules
  imports: Sequence[config_parser.ImportStatement]


def bind(
  applied: AppliedRule, table: Table, imports: Iterable[config_parser.ImportStatement]
) -> None:
  """Hand a configuration to gin: first without its rule, for the text that a run records, and then the rest.

  So a recorded configuration can be read on any hardware, where the rules apply again.

  Args:
    applied: the rule.
    table: the bindings, with those of the rule.
    imports: all import statements.
  """
  without_rule = []
  for row in table.values():
    former = _without_rule(row, applied.choice)
    if former is not None and former.base is None:
      without_rule.append(former)
  gin_apply.bind(without_rule, applied.imports)
  gin.bind_parameter(_KEY, _Record(applied.rules))
  text = f'{_comment(applied)}\n{gin.config_str()}'
  gin.bind_parameter(_KEY, _Record(applied.rules, text))
  gin_apply.bind(table.values(), imports)


def _comment(applied: AppliedRule) -> str:
  """Return the comment of a recorded configuration on the rule that applied."""
  description = applied.choice.description
  if not applied.changed:
    return f'# {description}.\n'
  lines = [f'# {description}, which changes these values of the configuration below:\n']
  lines += [f'#   {row.statement}\n' for row in applied.changed]
  return ''.join(lines)


def describe(applied: AppliedRule, read: Collection[Key]) -> str:
  """Return selector, rule and changes in one line.

  Args:
    applied: the rule.
    read: keys of the bindings that the command reads.
  """
  description = applied.choice.description
  if applied.choice.rule is None:
    return description
  if not applied.changed:
    return f'{description} changes nothing'
  shown = []
  for row in applied.changed:
    text = str(row.statement)
    if row.key not in read:
      text += ' (not used by this command)'
    shown.append(text)
  more = ''
  if len(shown) > _MOST_SHOWN:
    more = f', and {len(shown) - _MOST_SHOWN} more'
  return f'{description} sets {", ".join(shown[:_MOST_SHOWN])}{more}'


def configuration_text() -> str:
  """Return gin's configuration without the changes of the rule that applied, and with all rules."""
  with contextlib.suppress(ValueError):  # Without rules, the macro is not bound.
    record = gin.query_parameter(f'{MESH_RULES}/{MACRO}.value')
    if isinstance(record, _Record):
      return record.text
  return gin_apply.configuration_text()


def recorded_rules(
  rules: MeshRules,
  files_imports: Mapping[str, Import],
  imports: Mapping[str, Import],
  rest: Sequence[Text],
  table: Table,
) -> MeshRules:
  """Return rules that hold their gin files as texts, and at the end the flags that override them.

  The recorded configuration has no flags: without the latter, its rules would override values of flags.

  Args:
    rules: the rules.
    files_imports: import statements of the files, by the names that they define.
    imports: those of the rule and the flags too.
    rest: texts that override the rules.
    table: all bindings.
  """
  flags = {
    binding.target: binding
    for binding in gin_syntax.bindings_of(rest)
    if binding.location.on_command_line
  }
  recorded = []
  for rule in rules.rules:
    changes: list[Text | None] = []
    targets = []
    for change in _changes_with_imports(rule, files_imports):
      if change is None:
        targets += gin_syntax.bindings_of([_automatic_mesh(rule, table)])
        changes.append(None)
      else:
        targets += gin_syntax.bindings_of([change])
        changes += _pieces(change)
    overriding = {}
    for binding in targets:
      if binding.target in flags:
        overriding[binding.target] = flags[binding.target]
    if overriding:
      text = Text(MESH_RULES, tuple(overriding.values()))
      changes.append(_with_imports(text, imports))
    recorded.append(MeshRule(rule.pattern, tuple(changes)))
  return MeshRules(MESH_RULES, (), rules=tuple(recorded))


def _pieces(text: Text) -> list[Text]:
  """Return a text as texts without includes, each with the imports of its file."""
  pieces = []
  imports = []
  bindings = []

  def end_piece() -> None:
    if bindings:
      pieces.append(Text(text.source, (*imports, *bindings)))
      bindings.clear()

  for statement in text.statements:
    match statement:
      case Text():
        end_piece()
        pieces.extend(_pieces(statement))
      case Import():
        imports.append(statement)
      case Binding():
        bindings.append(statement)
  end_piece()
  return pieces or [Text(text.source, tuple(imports))]


def _as_string(text: Text) -> str:
  """Return the statements of a text without includes as a string literal."""
  lines = [
    statement.statement.format() if isinstance(statement, Import) else str(statement)
    for statement in text.statements
  ]
  if all(isinstance(statement, Binding) and statement.macro_name for statement in text.statements):
    # A text with imports may set macros that the configuration does not use, as the file of this text may have done.
    lines.insert(0, _dynamic_registration(text.source).statement.format())
  escaped = '\n'.join(lines).replace('\\', '\\\\').replace("'''", "\\'\\'\\'")
  return f"'''\n{escaped}\n'''"
