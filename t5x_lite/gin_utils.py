"""Loading of gin configurations, and T5X's functions of `gin_utils`.

`read` parses files and flags into statements (`configuration.syntax`); `load` binds them (`configuration.binding`) and
validates the result for the function that will run (`configuration.validation`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
import dataclasses
import importlib
import logging
import re
import shlex
import sys
from typing import Any, NamedTuple, NoReturn, Protocol

import gin
from gin import config as gin_config

from t5x_lite import checks
from t5x_lite.compat import names as t5x_names
from t5x_lite.compat import views as t5x_views
from t5x_lite.configuration import binding as gin_apply
from t5x_lite.configuration import inheritance
from t5x_lite.configuration import masking
from t5x_lite.configuration import mesh_rules
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.configuration import t5x_macros
from t5x_lite.configuration import table as gin_table
from t5x_lite.configuration import validation as gin_check
from t5x_lite.errors import ConfigError, T5xLiteError
from t5x_lite.formatting import gin_flag
from t5x_lite.storage import files

# File of a run with its configuration.
_CONFIG_FILE = 'config.gin'
# Part of config.gin, which is compared with that of earlier starts.
_HEADER = '# The configuration of a run, complete: --gin_file=THIS_FILE repeats it.\n'
# Line that gin adds to errors for each configurable.
_NOTE = r"\n\s+In call to configurable '(\S+)' \(.*?\)(?: in scope '(\S+)')?(?=\n|$)"
# Examples of the values of T5X's macros.
_EXAMPLES = {
  'MODEL_DIR': 'runs/my_run',
  'TRAIN_STEPS': '1000',
  'TASK_FEATURE_LENGTHS': "{'inputs': 512, 'targets': 114}",
  'DROPOUT_RATE': '0.1',
  'INITIAL_CHECKPOINT_PATH': 'runs/pretrain/checkpoint_1000',
  'CHECKPOINT_PATH': 'runs/my_run/checkpoint_1000',
}
# Remedies for missing macros of T5X.
_REMEDIES = {name: f'set {gin_flag(name, value)}' for name, value in _EXAMPLES.items()} | {
  'MIXTURE_OR_TASK_NAME': 'set --gin.MIXTURE_OR_TASK_NAME=my_task, or train on your own files with --train_file, '
  '--inputs and --targets',
  'MODEL': 'add a model, e.g. --gin_file=models/t5_1_1_small.gin',
  'INFER_OUTPUT_DIR': 'set --gin.INFER_OUTPUT_DIR=runs/my_run/answers, or --output=FILE',
  'OPTIMIZER': 'add an optimizer, e.g. --gin_file=optimizers/adafactor.gin',
}
# Run files by the function of a command; other commands configure a training.
_RUN_FILES = {'evaluate': 'runs/eval.gin', 'infer': 'runs/infer.gin', 'save': 'runs/export.gin'}
# Macro that records in config.gin that files of the configuration were written for T5X.
_FOR_T5X = 'WRITTEN_FOR_T5X'
# The function that trains.
_TRAINING = 't5x_lite.apps.train.train'
# The recipe that messages propose: it needs no data and no checkpoint from elsewhere.
_RECIPE = 'recipes/keyword_cloze.gin'
# gin's default of parameters that must be bound, for parameters of any type.
_REQUIRED: Any = gin.REQUIRED
# Sentences about macros that not all run files use.
_UNUSED = {
  'INITIAL_CHECKPOINT_PATH': 'runs/finetune.gin and runs/continue_pretrain.gin use it. With other files, add '
  "--gin.checkpoints.CheckpointConfig.restore='@checkpoints.RestoreCheckpointConfig()' "
  '--gin.checkpoints.RestoreCheckpointConfig.path=%INITIAL_CHECKPOINT_PATH '
  '--gin.checkpoints.RestoreCheckpointConfig.mode=specific.',
  'TRAIN_STEPS': 'Remove it.',
}


@dataclasses.dataclass(frozen=True)
class Configuration:
  """Loaded configuration.

  Attributes:
    entry: function to run.
    text: the entire configuration as gin text.
    uses: configurables that `entry` reaches, itself first.
    mesh_rule: selector, mesh rule and its changes in one line; empty for a configuration without mesh rules.
    table: the bindings.
    logged_for_t5x: what `checks.log_for_t5x` has logged; None if the configuration was not written for T5X.
  """

  entry: Callable[..., Any]
  text: str
  uses: Sequence[gin_check.Use]
  mesh_rule: str = ''
  table: gin_table.Table = dataclasses.field(default_factory=gin_table.Table)
  logged_for_t5x: set[str] | None = None

  def settings(self, left_out: Sequence[str]) -> dict[str, str]:
    """Return the values of all bindings that the entry point reaches, as text by name, for records: without secrets.

    Args:
      left_out: prefixes of modules whose bindings are omitted.
    """
    values = {}
    for use in self.uses:
      if use.configurable.wrapped.__module__.startswith(tuple(left_out)):
        continue
      for parameter, row in use.bound.items():
        value = masking.masked_value(parameter, repr(self.table.value(row)))
        values[f'{use.name}.{parameter}'] = masking.masked_text(value, sys.orig_argv)
    return values

  def arguments_of(self, cls: type) -> list[dict[str, Any]]:
    """Return the bound arguments of each use of a class or its subclasses, unevaluated, without macros."""
    found = []
    for use in self.uses:
      wrapped = use.configurable.wrapped
      if isinstance(wrapped, type) and issubclass(wrapped, cls):
        found.append({name: self.table.value(row) for name, row in use.bound.items()})
    return found

  def bound_in_scopes(self, cls: type, scopes: Sequence[str]) -> dict[str, Any]:
    """Return the evaluated arguments that are bound for a class, also if the entry point does not reach it.

    Args:
      cls: the class.
      scopes: scopes whose bindings apply, later ones first; '' for bindings without a scope.
    """
    values = {}
    registry = gin_table.configurables()
    for scope in scopes:
      for (bound_scope, selector), rows in self.table.groups.items():
        if bound_scope == scope and registry[selector].wrapped is cls:
          values |= {name: self.table.value(row) for name, row in rows.items()}
    with gin.unlock_config():
      return copy.deepcopy(values)

  def call(self, **arguments: Any) -> Any:
    """Call the entry point with the bound values; `arguments` override them.

    Args:
      **arguments: arguments of the entry point.

    Raises:
      ConfigError: see `argument`.
    """
    # Arguments are evaluated here instead of by gin, to distinguish their errors from those of the run.
    bound = {name: self.argument(name) for name in self.uses[0].bound if name not in arguments}
    # The run may import a task module that registers configurables.
    with self.locating_errors(), gin.unlock_config():
      return self.entry(**bound, **arguments)

  def argument(self, name: str) -> Any:
    """Evaluate and return the argument of the entry point for its parameter `name`.

    Args:
      name: name of the parameter.

    Raises:
      ConfigError: the parameter is not bound, or evaluating it raises TypeError or ValueError.
    """
    if name not in self.uses[0].bound:
      raise ConfigError(
        f'{self.uses[0].name}.{name} is not bound, which this command requires. Add a run file, e.g. '
        '--gin_file=runs/train.gin.'
      )
    try:
      with self.locating_errors(), gin.unlock_config():
        # gin calls references when they are copied.
        return copy.deepcopy(self.uses[0].bound[name].value)
    except (TypeError, ValueError) as error:
      if isinstance(error, T5xLiteError):
        raise
      raise ConfigError(
        f'{plain_message(error)} (for {self.uses[0].name}.{name}; --debug shows more)'
      ) from error

  @contextlib.contextmanager
  def locating_errors(self) -> Iterator[None]:
    """Context that adds to an error about options where files bind them, and in which `checks.log_for_t5x` logs."""
    try:
      with checks.written_for_t5x(self.logged_for_t5x):
        yield
    except T5xLiteError as error:
      options = getattr(error, 'options', None)
      if options is not None:
        scope = self._scope(str(error), options.argument)
        found = []
        for name, shown in options.shown.items():
          location = gin_check.location_of(options.owner, name, shown, self.uses, self.table, scope)
          if location is not None:
            found.append(str(location))
        if not found and options.argument and scope:
          found.append(f'in {"/".join(scope)}/{options.owner}')
        options.locations = found
      raise

  def _scope(self, message: str, argument: str) -> tuple[str, ...] | None:
    """Return the scope in which gin has made the argument, or else the object of an error; None if it is not known."""
    if argument in self.uses[0].bound:
      reference = self.table.value(self.uses[0].bound[argument])
      if isinstance(reference, gin_config.ConfigurableReference):
        return tuple(reference.scopes)
    innermost = re.search(_NOTE, message)
    if innermost is None:
      return None
    if innermost[2]:
      return tuple(innermost[2].split('/'))
    return ()


def read(
  gin_files: Sequence[str],
  flags: Sequence[gin_syntax.Text] = (),
  search_paths: Sequence[str] = (),
  *,
  placeholders: Mapping[str, str] | None = None,
  entry: str = '',
) -> list[gin_syntax.Text]:
  """Read files and flags, and check them as far as possible without importing their modules.

  Args:
    gin_files: names of gin files, see `gin_syntax.find_file`.
    flags: command-line flags, see `gin_syntax.read_flag`.
    search_paths: additional folders for gin files.
    placeholders: gin text of values for missing macros that the caller does not use.
    entry: dotted name of the function that `load` will configure, if known.

  Raises:
    ConfigError: a file is missing, gin syntax is invalid,
      the files configure no training but `entry` trains, or a macro is missing or not used. With mesh rules, `load`
      raises for missing and unused macros.
  """
  of_files = [gin_syntax.read_file(name, search_paths) for name in gin_files]
  separate = t5x_macros.separate([*of_files, *flags])
  texts, rules = mesh_rules.take(separate, search_paths)
  unset = gin_syntax.missing_macros(texts)
  if rules is not None:
    mesh_rules.check_macros(rules, texts)
  # Rules override files and placeholders, and flags override rules.
  additional: list[gin_syntax.Text] = []
  for name, value in (placeholders or {}).items():
    if name in unset:
      additional.append(gin_syntax.read_text(f'{name} = {value}', name, is_flag=False))
  if rules is not None:
    additional.append(rules)
  texts[len(gin_files) : len(gin_files)] = additional
  if entry == _TRAINING:
    _check_has_a_run(gin_files, texts)
  # The rule that applies, which may set macros, is known after the imports of the files.
  if rules is None:
    _check_macros(texts)
  return texts


def _check_has_a_run(gin_files: Sequence[str], texts: Sequence[gin_syntax.Text]) -> None:
  """Raise if no file configures the function that trains, e.g. for a file of a model alone.

  Raises:
    ConfigError: the message has all files and values that a run with them needs.
  """
  function_name = _TRAINING.rpartition('.')[2]
  bindings = gin_syntax.bindings_of(texts)
  for binding in bindings:
    is_of_run = binding.arg_name and binding.selector.rpartition('.')[2] == function_name
    # Flags alone configure a run if they bind everything that it requires.
    if is_of_run and (not binding.location.on_command_line or binding.arg_name == 'model'):
      return
  flags = [shlex.quote(f'--gin_file={name}') for name in (_RECIPE, *gin_files)]
  for name in sorted(gin_syntax.missing_macros([gin_syntax.read_file(_RECIPE), *texts])):
    flags.append(gin_flag(name, _EXAMPLES.get(name, 'VALUE')))
  raise ConfigError(
    f'The gin files configure no run: {", ".join(gin_files)}. Pass a recipe before them and set what is missing, e.g. '
    f'{" ".join(flags)}.'
  )


def _check_macros(texts: Sequence[gin_syntax.Text]) -> None:
  unused = _UNUSED
  if 'CHECKPOINT_PATH' in gin_syntax.mentioned_macros(texts):
    unused = {}  # An unused macro is then a misspelling of it.
  gin_syntax.check_macros(texts, _REMEDIES, unused)
  for sentence in gin_syntax.misspelt_macros(texts):
    logging.getLogger(__name__).warning(sentence)


def load(
  entry: str, texts: Sequence[gin_syntax.Text], mesh_selector: str | None = None
) -> Configuration:
  """Return the configuration of an entry point.

  Args:
    entry: dotted name of the function to configure, e.g. `t5x_lite.apps.train.train`.
    texts: result of `read`, in the order of application.
    mesh_selector: selector of the mesh rules; None detects the hardware if there are rules, which initializes JAX.

  Raises:
    ConfigError: a name is misspelt or missing, or a binding has no effect or the wrong type; or a selector is given
      without mesh rules.
  """
  resolved = _resolve(texts, mesh_selector)
  texts, binder, rule, _ = resolved
  table = binder.table
  logged = None
  if resolved.is_for_t5x:
    logged = set()
  _log_t5x(binder, texts)
  module_name, _, function_name = entry.rpartition('.')
  function = getattr(importlib.import_module(module_name), function_name)
  registry = gin_table.configurables()
  if not any(configurable.wrapped is function for configurable in registry.values()):
    raise ConfigError(
      f'No file configures {entry}. Add a run file, e.g. '
      f'--gin_file={_RUN_FILES.get(function_name, "runs/pretrain.gin")}, or use a recipe: '
      f'{", ".join(gin_syntax.packaged_files("recipes"))}.'
    )
  with checks.written_for_t5x(logged):
    uses = gin_check.check(function, table)
  for sentence in gin_check.misspelt_scopes(uses, table):
    logging.getLogger(__name__).warning(sentence)
  # T5X would not apply the bindings without a name in `by` either.
  lost = [each for each in binder.not_inherited if each.by]
  of_t5x = [each for each in binder.not_inherited if not each.by]
  for sentence in inheritance.describe_missing(lost, uses):
    logging.getLogger(__name__).warning(sentence)
  for sentence in inheritance.describe_missing(of_t5x, uses):
    logging.getLogger(__name__).info(sentence)
  for sentence in inheritance.describe_inherited(uses):
    logging.getLogger(__name__).info(sentence)
  resolved.bind()
  text = get_gin_config_str()
  _finalize()
  read_keys = {row.key for use in uses for row in use.bound.values()}
  # Files for training may be used for other commands too, which need less.
  if function_name == 'train':
    _log_unused(table, uses, texts)
  mesh_rule = ''
  if rule is not None:
    mesh_rule = mesh_rules.describe(rule, read_keys)
  return Configuration(function, text, uses, mesh_rule, table, logged)


class _Resolved(NamedTuple):
  """Texts whose names are resolved.

  Attributes:
    texts: all texts in the order of application, among them those of the mesh rule.
    binder: binder with the table.
    rule: the mesh rule; None for a configuration without rules.
    is_for_t5x: whether the configuration was written for T5X, see `checks.is_written_for_t5x`.
  """

  texts: Sequence[gin_syntax.Text]
  binder: gin_apply.Binder
  rule: mesh_rules.AppliedRule | None
  is_for_t5x: bool

  def bind(self) -> None:
    """Hand the table to gin."""
    imports = self.binder.import_statements.values()
    if self.rule is None:
      gin_apply.bind(self.binder.table.values(), imports)
    else:
      mesh_rules.bind(self.rule, self.binder.table, imports)


def _resolve(
  texts: Sequence[gin_syntax.Text], mesh_selector: str | None, **options: Any
) -> _Resolved:
  """Resolve the names in the result of `read`, with the mesh rule that applies; `options` are those of the binder."""
  binder = gin_apply.Binder(**options)
  rules = next((text for text in texts if isinstance(text, mesh_rules.MeshRules)), None)
  if rules is None:
    if mesh_selector is not None:
      raise ConfigError(
        f'--mesh_selector={mesh_selector} has no effect: the configuration has no '
        f'{gin_syntax.MESH_RULES}. Remove the flag, or add rules.'
      )
    binder.resolve(texts)
    return _Resolved(texts, binder, None, _inherit(binder, texts))
  position = texts.index(rules)
  files = texts[:position]
  rest = texts[position + 1 :]
  binder.resolve(files)
  files_imports = dict(binder.imports)
  statements = dict(binder.import_statements)
  choice = mesh_rules.choose(rules, mesh_selector, binder.imports, binder.table)
  texts = [*files, *choice.texts, *rest]
  _check_macros(texts)
  binder.resolve(choice.texts)
  of_rule = binder.import_statements.keys() - statements.keys()
  binder.resolve(rest)
  recorded = mesh_rules.recorded_rules(rules, files_imports, binder.imports, rest, binder.table)
  is_for_t5x = _inherit(binder, texts)
  imports = [each for key, each in binder.import_statements.items() if key not in of_rule]
  changed = mesh_rules.changes(choice, binder.table)
  rule = mesh_rules.AppliedRule(choice, changed, recorded, imports)
  return _Resolved(texts, binder, rule, is_for_t5x)


def _inherit(binder: gin_apply.Binder, texts: Sequence[gin_syntax.Text]) -> bool:
  """Add the bindings of base classes to the resolved ones, and return whether the configuration was written for T5X."""
  ours, users = _t5x_sources(binder, texts)
  if ours or users or binder.former_names:
    binder.resolve([gin_syntax.read_text(f'{_FOR_T5X} = True', 'T5X', is_flag=False)])
  recorded = binder.table.get((_FOR_T5X, gin_table.MACRO, 'value'))
  is_for_t5x = recorded is not None and bool(binder.table.value(recorded))
  binder.inherit(is_for_t5x)
  return is_for_t5x


def _t5x_sources(
  binder: gin_apply.Binder, texts: Sequence[gin_syntax.Text]
) -> tuple[list[str], list[str]]:
  """Return (files of T5X of which those of t5x_lite are used, other sources with names of T5X).

  Args:
    binder: binder that has resolved the texts.
    texts: files and flags in the order of application.
  """
  ours: list[str] = []
  for top in texts:
    ours += [text.source for text in _files_of_t5x(top) if text.source not in ours]
  users = [
    source
    for source in binder.t5x_sources
    if not source.startswith(f'gin/{gin_syntax.T5X_FILES}/') and source not in ours
  ]
  return ours, users


def _log_t5x(binder: gin_apply.Binder, texts: Sequence[gin_syntax.Text]) -> None:
  """Log once that names or files of T5X are read as ours, and which defaults are not those of T5X."""
  ours, users = _t5x_sources(binder, texts)
  sentences = []
  if users:
    sentences.append(f'Names of T5X in {", ".join(users)} mean those of t5x_lite.')
  if ours:
    sentences.append(f"Of T5X's files, those of t5x_lite are used: {', '.join(ours)}.")
    defaults = _other_defaults(binder.table)
    if defaults:
      sentences.append(f"Defaults that are not T5X's: {', '.join(defaults)}.")
  if binder.former_names:
    renamed = [f'{name} is now {new}' for name, new in binder.former_names.items()]
    sentences.append(f'Names of an earlier T5X: {", ".join(renamed)}.')
  if sentences:
    logging.getLogger(__name__).info('%s See docs/from_t5x.md.', ' '.join(sentences))
    unused = t5x_views.names_of_forks()
    if unused:
      logging.getLogger(__name__).warning(unused)


def _other_defaults(table: gin_table.Table) -> list[str]:
  """Return the macros whose values are defaults of t5x_lite that are not those of T5X, with both values."""
  defaults = []
  for name, theirs in t5x_names.DEFAULTS.items():
    row = table.get((name, gin_table.MACRO, 'value'))
    if row is None or row.statement is None or row.path is None:
      continue
    in_program = row.path.name in ('train.gin', 'precompile.gin')
    if in_program and row.text.is_packaged():
      defaults.append(f'{name} = {row.statement.value!r} (T5X: {theirs})')
  return defaults


def _log_unused(
  table: gin_table.Table, uses: Sequence[gin_check.Use], texts: Sequence[gin_syntax.Text]
) -> None:
  """Log which bindings of files, not T5X's or config.gin of a run, have no effect in training.

  Of the files of t5x_lite, these are the bindings of what a file uses and a later file or flag replaces: they include
  each other and know themselves what they replace. Bindings that a subclass gets from its base class have an effect.
  """
  read_keys = {row.key for use in uses for row in use.bound.values()}
  used = {use.configurable.selector for use in uses}
  mentioned = gin_syntax.mentioned_macros(texts)
  registry = gin_table.configurables()
  names_of_others = (_CONFIG_FILE, *gin_syntax.packaged_files(gin_syntax.T5X_FILES))
  others = tuple(f'/{name}' for name in names_of_others)
  given_up = {id(statement) for statement in _bindings_given_up(texts)}
  unused = []
  for row in table.values():
    statement = row.statement
    if statement is None:
      continue
    selector = row.key[1]
    if row.path is None or row.text.is_packaged() or f'/{row.path}'.endswith(others):
      is_given_up = id(statement) in given_up and selector not in used
      is_unused = is_given_up and row.key not in read_keys
    elif statement.macro_name:
      is_unused = statement.macro_name not in mentioned
    else:
      is_unused = row.key not in read_keys and registry[selector].import_source is not None
    if is_unused:
      unused.append(f'{statement.key} ({statement.location})')
  if unused:
    logging.getLogger(__name__).info('Not used for training: %s.', ', '.join(unused))


def _bindings_given_up(texts: Sequence[gin_syntax.Text]) -> Iterator[gin_syntax.Binding]:
  """Yield the bindings, in files of t5x_lite, of functions and classes to which a replaced binding refers.

  Args:
    texts: files and flags in the order of application. A file with its includes is one text, which replaces its own
      bindings on purpose. Texts that a command adds replace nothing for the user.
  """
  texts = [text for text in texts if text.is_of_user]
  last = {binding.target: binding for binding in gin_syntax.bindings_of(texts)}
  for top in texts:
    effective = {binding.target: binding for binding in gin_syntax.bindings_of([top])}.values()
    waiting = [binding for binding in effective if last[binding.target] is not binding]
    names: set[str] = set()
    while waiting:
      added = _names_in(waiting.pop().value) - names
      names |= added
      waiting += [each for each in effective if each.arg_name and _last_part(each) in added]
    for statement, text in top.walk_files():
      is_ours = text.is_packaged() and not text.is_packaged(gin_syntax.T5X_FILES)
      if not is_ours or not isinstance(statement, gin_syntax.Binding) or not statement.arg_name:
        continue
      if _last_part(statement) in names:
        yield statement


def _last_part(binding: gin_syntax.Binding) -> str:
  return binding.selector.rpartition('.')[2]


def _names_in(value: Any) -> set[str]:
  """Return the last parts of the names of the functions and classes in a value."""
  names = set()
  for part in gin_syntax.parts_of(value):
    if isinstance(part, gin_syntax.Reference):
      names.add(re.split('[/.]', part.scoped_selector)[-1])
  return names


def _files_of_t5x(text: gin_syntax.Text) -> Iterator[gin_syntax.Text]:
  """Yield the files of this package that are used by the names of T5X's."""
  if text.is_packaged(gin_syntax.T5X_FILES):
    yield text
  elif not text.is_packaged():
    for statement in text.statements:
      if isinstance(statement, gin_syntax.Text):
        yield from _files_of_t5x(statement)


def _finalize() -> None:
  try:
    gin.finalize()
  except ValueError as error:  # Raised by a hook of user code or of gin.
    raise ConfigError(str(error).splitlines()[0]) from error


def plain_message(error: BaseException) -> str:
  """Return an error's message without the lines that gin adds for each configurable.

  The innermost configurable is kept if its scope is a user's, or if the error is not of this package: "batch_size must
  be >= 1" does not tell the dataset, nor does "could not convert" tell the object.
  """
  text = str(error)
  notes = re.findall(_NOTE, text)
  text = re.sub(_NOTE, '', text)
  if not notes:
    return text
  name, scope = notes[0]
  if not isinstance(error, T5xLiteError):
    return f'{name}: {text}'
  if not scope:
    return text
  try:
    gin.query_parameter(f'{scope}/{gin_table.MACRO}.value')
  except ValueError:  # It is the user's, and not that of a macro.
    return f'{text} (in {scope}/{name})'
  return text


# ----------------------------------------------------------------------------------------------------------------------
# T5X's functions


def rewrite_gin_args(args: Sequence[str]) -> list[str]:
  """Return command-line arguments with every `--gin.NAME=VALUE` as T5X's `--gin_bindings=NAME = VALUE`.

  Bare strings are quoted as `read_flag` does.

  >>> rewrite_gin_args(['prog', '--gin.TRAIN_STEPS=5', '--gin.MODEL_DIR=runs/a'])
  ['prog', '--gin_bindings=TRAIN_STEPS = 5', "--gin_bindings=MODEL_DIR = 'runs/a'"]
  """
  rewritten = []
  for argument in args:
    if argument.startswith('--gin.'):
      key, equals, value = argument.removeprefix('--gin.').partition('=')
      if not equals:
        raise ConfigError(f'{argument} requires a value. Write --gin.{key}=VALUE.')
      binding = gin_syntax.read_flag(key, value, argument).statements[0]
      if isinstance(binding, gin_syntax.Binding) and isinstance(binding.value, str):
        value = repr(binding.value)
      argument = f'--gin_bindings={key} = {value}'
    rewritten.append(argument)
  return rewritten


def parse_gin_flags(
  gin_search_paths: Sequence[str],
  gin_files: Sequence[str],
  gin_bindings: Sequence[str],
  skip_unknown: bool | Sequence[str] = False,
  finalize_config: bool = True,
) -> None:
  """Apply gin files and bindings to gin's configuration, for programs that call their configurables themselves.

  Bindings that the program made before are kept. A finalized configuration is replaced.

  Args:
    gin_search_paths: folders with gin files, searched before those of t5x_lite.
    gin_files: names of gin files.
    gin_bindings: gin text, applied after the files.
    skip_unknown: True to skip imports of modules that do not exist and bindings of unknown functions and classes; a
      list of functions and classes to skip these bindings only, and the imports. False raises.
    finalize_config: whether to call `gin.finalize`, which validates and locks the configuration.

  Raises:
    ConfigError: a name is misspelt or missing.
  """
  checks.check(
    'parse_gin_flags',
    {'skip_unknown': skip_unknown},
    skip_unknown=checks.instance((bool, list, tuple, set), 'True, False or a list of names'),
  )
  gin_syntax.check_search_paths(gin_search_paths)
  flags = [
    gin_syntax.read_text(text, f'--gin_bindings={text}', gin_search_paths) for text in gin_bindings
  ]
  resolved = _resolve(
    read(gin_files, flags, gin_search_paths),
    mesh_selector=None,
    main_is_t5x=False,
    skip_unknown=skip_unknown,
    clears=gin.config_is_locked(),
  )
  resolved.bind()
  if finalize_config:
    _finalize()


def run(main: Callable[[list[str]], Any]) -> NoReturn:
  """Run `main` by `absl.app.run`, with every `--gin.NAME=VALUE` of the command line as `--gin_bindings=NAME = VALUE`.

  For programs with flags of absl that call `parse_gin_flags`, among them those written for T5X. Ends the process.

  Args:
    main: called with the command line without its flags.
  """
  from absl import app

  run_main(main, lambda arguments: app.parse_flags_with_usage(rewrite_gin_args(arguments)))


def run_main(
  main: Callable[[list[str]], Any], flags_parser: Callable[[list[str]], list[str]]
) -> NoReturn:
  """Run `main` by `absl.app.run`, and end the process.

  Args:
    main: called with the command line without its flags.
    flags_parser: called with the command line; defines the values of flags and returns the other arguments.
  """
  from absl import app

  app.run(main, flags_parser=flags_parser)


def get_gin_config_str(show_provenance: bool = False) -> str:
  """Return the current configuration as complete gin text: imports, macros, and all bindings.

  Of a configuration with mesh rules, it is the text to which the rules apply, with all rules.

  Args:
    show_provenance: must be False.

  Raises:
    ConfigError: `show_provenance` is True.
  """
  if show_provenance:
    raise ConfigError(
      '`gin_utils.get_gin_config_str.show_provenance` must be False, got True. '
      f'{t5x_names.remedy("t5x.gin_utils", "get_gin_config_str.show_provenance=True")}'
    )
  return _HEADER + mesh_rules.configuration_text()


class SummarizeConfigFn(Protocol):
  """Function that records the configuration of a run, such as `summarize_gin_config`."""

  def __call__(self, model_dir: str, summary_writer: Any | None, step: int) -> None:
    """Record the configuration.

    Args:
      model_dir: folder of the run.
      summary_writer: object with `write_text(step, {name: markdown})`, or None.
      step: step at which the run starts or resumes.
    """


def summarize_gin_config(model_dir: str, summary_writer: Any | None, step: int) -> None:
  """Write the current configuration to `model_dir/config.gin` and to the summaries.

  If config.gin of an earlier start differs, it is kept as `config-until-<step>.gin`.

  Args:
    model_dir: the run directory.
    summary_writer: object with `write_text(step, {name: markdown})`; None writes only the file.
    step: step at which the run starts or resumes.
  """
  text = get_gin_config_str()
  write_config(files.path(model_dir), text, step)
  if summary_writer is not None:
    summary_writer.write_text(step, {'config': gin.markdown(text)})


def write_config(model_dir: files.Path, text: str, step: int) -> files.Path:
  """Write `text` as `model_dir/config.gin`, atomically, and return its path.

  If config.gin of an earlier start differs, it is kept as `config-until-<step>.gin`, since it applied until that step.
  """
  model_dir.mkdir(parents=True, exist_ok=True)
  path = model_dir / _CONFIG_FILE
  if path.exists():
    former = _read_any(path)
    if former == text:
      return path
    kept = model_dir / f'config-until-{step}.gin'
    count = 1
    while kept.exists() and _read_any(kept) != former:
      count += 1
      kept = model_dir / f'config-until-{step}-{count}.gin'
    _write(kept, former)
  _write(path, text)
  return path


def _read_any(path: files.Path) -> str:
  # The user may have edited it in any encoding.
  return path.read_text(encoding='utf-8', errors='surrogateescape')


def _write(path: files.Path, text: str) -> None:
  files.write(path, text.encode('utf-8', errors='surrogateescape'))


def sum_fn(var1: float = _REQUIRED, var2: float = _REQUIRED) -> float:
  """Return `var1 + var2`, e.g. for gin files: `TOTAL = @gin_utils.sum_fn()`.

  Raises:
    ConfigError: an argument is missing.
  """
  _check_given('sum_fn', var1=var1, var2=var2)
  return var1 + var2


def bool_fn(var1: Any = _REQUIRED) -> bool:
  """Return `bool(var1)`, for gin files.

  Raises:
    ConfigError: the argument is missing.
  """
  _check_given('bool_fn', var1=var1)
  return bool(var1)


def string_split_fn(
  text: str = _REQUIRED,
  separator: str = _REQUIRED,
  maxsplit: int = -1,
  index: int | None = None,
) -> list[str] | str:
  """Return the parts of `text` between separators, or one part, for gin files.

  Args:
    text: text to split.
    separator: separator of the parts.
    maxsplit: maximum number of splits, -1 for no limit.
    index: index of the part to return; None returns all.

  Raises:
    ConfigError: an argument is missing.
  """
  _check_given('string_split_fn', text=text, separator=separator)
  parts = text.split(separator, maxsplit)
  if index is None:
    return parts
  return parts[index]


def _check_given(function: str, **arguments: Any) -> None:
  for name, value in arguments.items():
    if value is gin.REQUIRED:
      raise ConfigError(f'`{function}.{name}` must be set. Bind it in a gin file, or pass it.')
