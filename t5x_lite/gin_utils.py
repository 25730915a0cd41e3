"""Applies gin files and flags, and writes down what they amount to.

`read` and `load` are the way in: `read` turns files and flags into statements (`gin_syntax`), `load` imports what they
import, binds each statement with its place remembered, and checks the result against the function that will run
(`gin_check`). gin's own parser does not apply them, because it forgets the places and cannot say what a misspelt name
should have been. T5X's functions of `gin_utils` stand at the end.

This is written against gin-config 0.5, the last release, of which a few private names are used.
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import sys
import tempfile
from typing import Any

import gin
from gin import config as gin_config

from t5x_lite import gin_check
from t5x_lite import gin_syntax
from t5x_lite.errors import ConfigError, T5xLiteError, did_you_mean

_HEADER = '# The configuration of a run, complete: --gin_file=THIS_FILE repeats it.\n'
# What to do about T5X's well-known macros when they are missing.
_REMEDIES = {
    'MODEL': 'add a model, e.g. --gin_file=models/t5_1_1_small.gin',
    'MODEL_DIR': 'set --gin.MODEL_DIR=runs/my_run',
    'TRAIN_STEPS': 'set --gin.TRAIN_STEPS=1000',
    'MIXTURE_OR_TASK_NAME': 'set --gin.MIXTURE_OR_TASK_NAME=my_task',
    'TASK_FEATURE_LENGTHS': 'set --gin.TASK_FEATURE_LENGTHS="{\'inputs\': 512, \'targets\': 114}"',
    'DROPOUT_RATE': 'set --gin.DROPOUT_RATE=0.1',
    'INITIAL_CHECKPOINT_PATH': 'set --gin.INITIAL_CHECKPOINT_PATH=runs/pretrain/checkpoint_1000',
    'OPTIMIZER': 'add an optimizer, e.g. --gin_file=optimizers/adafactor.gin',
}
# Packages that come with an extra of ours.
_EXTRAS = {
    'seqio': 'seqio', 'tensorflow': 'seqio', 'tensorflow_datasets': 'seqio', 'tensorflow_text': 'seqio',
    'sentencepiece': 'seqio', 'grain': 'grain', 'matplotlib': 'plot',
}


@dataclasses.dataclass(frozen=True)
class Configuration:
  """A loaded configuration.

  Attributes:
    entry: the function to run.
    text: the configuration as one gin text that stands alone.
    uses: what `entry` reaches, itself first.
  """

  entry: Callable[..., Any]
  text: str
  uses: Sequence[gin_check.Use]

  def call(self, **arguments: Any) -> Any:
    """Calls the entry point with what is bound to its parameters; `arguments` win.

    Raises:
      ConfigError: see `argument`.
    """
    # The arguments are made here, not by gin on the way, to tell what cannot be made from what fails when it runs.
    bound = {name: self.argument(name) for name in self.uses[0].bound if name not in arguments}
    with gin.unlock_config():  # a task module may register configurables when the run imports it
      return self.entry(**bound, **arguments)

  def argument(self, name: str) -> Any:
    """Returns what the entry point gets for its parameter `name`, newly made.

    Raises:
      ConfigError: nothing is bound to it, or something that it is made of refuses its own arguments.
    """
    if name not in self.uses[0].bound:
      raise ConfigError(f'Nothing binds {self.uses[0].name}.{name}, which this command needs. Add a run, e.g. '
                        '--gin_file=runs/train.gin.')
    try:
      with gin.unlock_config():
        # gin calls references when they are copied.
        return copy.deepcopy(gin_check.value_of(self.uses[0].bound[name]))
    except (TypeError, ValueError) as error:
      if isinstance(error, T5xLiteError):
        raise
      raise ConfigError(f'{plain_message(error)} (for {self.uses[0].name}.{name}; --debug shows more)') from error


def read(gin_files: Sequence[str], flags: Sequence[gin_syntax.Text] = (), search_paths: Sequence[str] = (), *,
         stand_ins: Mapping[str, str] | None = None) -> list[gin_syntax.Text]:
  """Reads files and flags and refuses what can be refused before anything of them is imported.

  Args:
    gin_files: names of gin files, see `gin_syntax.find_file`.
    flags: what stood on the command line, see `gin_syntax.read_flag`.
    search_paths: further folders for gin files.
    stand_ins: gin text of values for macros that are missing and that do not matter to the caller.

  Raises:
    ConfigError: a missing file, a syntax error, or a macro that is missing or that nothing reads.
  """
  texts = [gin_syntax.read_file(name, search_paths) for name in gin_files] + list(flags)
  unset = gin_syntax.missing_macros(texts)
  texts += [gin_syntax.read_text(f'{name} = {value}', name, is_flag=False)
            for name, value in (stand_ins or {}).items() if name in unset]
  gin_syntax.check_macros(texts, _REMEDIES)
  return texts


def load(entry: str, texts: Sequence[gin_syntax.Text]) -> Configuration:
  """Returns the configuration that `texts`, applied in order, make for one entry point.

  Args:
    entry: dotted name of the function to configure, e.g. `t5x_lite.apps.train.train`.
    texts: what `read` returned.

  Raises:
    ConfigError: anything that is misspelt, missing, without effect or of the wrong type.
  """
  locations = _apply(texts)
  module_name, _, function_name = entry.rpartition('.')
  function = getattr(importlib.import_module(module_name), function_name)
  if not any(configurable.wrapped is function for configurable in gin_check.configurables().values()):
    raise ConfigError(f'No file configures {entry}. Add a run, e.g. --gin_file=runs/pretrain.gin, or a recipe: '
                      f'{", ".join(gin_syntax.packaged_files("recipes"))}.')
  uses = gin_check.check(function, locations)
  text = get_gin_config_str()
  _finalize()
  return Configuration(function, text, uses)


def _finalize() -> None:
  try:
    gin.finalize()
  except ValueError as error:  # a hook of user code, or of gin
    raise ConfigError(str(error).splitlines()[0]) from error


# ----------------------------------------------------------------------------------------------------------------------
# Binding statements in gin's tables


def _apply(texts: Sequence[gin_syntax.Text]) -> dict[gin_check.Key, gin_syntax.Location]:
  """Binds everything in `texts` and returns where each binding was made."""
  gin.clear_config()
  locations: dict[gin_check.Key, gin_syntax.Location] = {}
  imports: dict[str, gin_syntax.Import] = {}
  for text in texts:
    on_command_line = all(statement.location.on_command_line for statement in text.walk())
    # A flag may use every name that a file imported.
    _apply_text(text, locations, imports, tuple(imports.values()) if on_command_line else ())
  return locations


def _apply_text(text: gin_syntax.Text, locations: dict[gin_check.Key, gin_syntax.Location],
                imports: dict[str, gin_syntax.Import], preamble: Sequence[gin_syntax.Import]) -> None:
  names = _Names(text.source)
  contexts = gin_config._PARSE_CONTEXTS  # pylint: disable=protected-access
  contexts.append(names)
  try:
    if preamble:
      names.enable_dynamic_registration()
      for statement in preamble:
        names.add_import(statement)
    for statement in text.statements:
      match statement:
        case gin_syntax.Text():
          _apply_text(statement, locations, imports, ())
        case gin_syntax.Import():
          names.add_import(statement)
          if not statement.statement.module.startswith('__gin__'):
            imports[statement.statement.bound_name()] = statement
        case gin_syntax.Block():
          names.configurable(statement.selector, statement.location)
        case gin_syntax.Binding():
          locations[names.bind(statement)] = statement.location
  finally:
    contexts.pop()
  gin_config._IMPORTS.update(names.imports)  # pylint: disable=protected-access


class _Names(gin_config.ParseContext):
  """The names that one file can use: those of its own imports, or, without dynamic registration, gin's registry."""

  def __init__(self, source: str):
    super().__init__()
    self._source = source

  def get_configurable(self, selector: str) -> gin_config.Configurable:
    """Looks a *complete* selector up: what gin asks for when a statement that is already resolved is bound."""
    return gin_check.configurables()[selector]

  def enable_dynamic_registration(self) -> None:
    """Does what the statement `from __gin__ import dynamic_registration` does."""
    self._enable_dynamic_registration()

  def add_import(self, statement: gin_syntax.Import) -> None:
    """Imports a module on behalf of the file."""
    module = statement.statement.module
    if module == '__main__':
      raise ConfigError(f'{statement.location}: the program is no module here. Write '
                        '`from t5x_lite.apps import train as train_script`.')
    try:
      self.process_import(statement.statement)
    except ModuleNotFoundError as error:
      raise ConfigError(f'{statement.location}: {_import_message(module, error)}') from error

  def configurable(self, selector: str, location: gin_syntax.Location) -> gin_config.Configurable:
    """Returns what `selector`, as written in the file, names, and registers it when it is met for the first time."""
    symbols = self._symbol_table
    root, *attributes = selector.split('.')
    if not symbols or (root not in symbols and location.on_command_line):
      return self._registered(selector, location)
    if root not in symbols:
      known = [name for name in symbols if name != 'gin']
      raise ConfigError(f'{location}: {root!r} in {selector!r} is not imported by this file.'
                        f'{did_you_mean(root, known)}')
    found, owner = root, symbols[root]
    for attribute in attributes:
      if not hasattr(owner, attribute):
        raise ConfigError(f'{location}: {found} has no {attribute!r}.{did_you_mean(attribute, _public_names(owner))}')
      found, owner = f'{found}.{attribute}', getattr(owner, attribute)
    if not callable(owner) or not attributes:
      raise ConfigError(f'{location}: {selector} is a {type(owner).__name__}; expected a function or a class'
                        f'{", such as one in it" if inspect.ismodule(owner) else ""}.')
    return super().get_configurable(selector)

  def _registered(self, selector: str, location: gin_syntax.Location) -> gin_config.Configurable:
    registry = gin_check.configurables()
    matches = [name for name in registry if name == selector or name.endswith('.' + selector)]
    if len(matches) == 1 or selector in matches:
      return registry[selector if selector in matches else matches[0]]
    if matches:
      raise ConfigError(f'{location}: {selector!r} may be any of {", ".join(sorted(matches))}. Write more of the name.')
    known = [gin_check.short_name(configurable) for configurable in registry.values()]
    hint = ''
    if not self._symbol_table and not location.on_command_line:
      hint = ' Files start with `from __gin__ import dynamic_registration` and import the modules they use.'
    raise ConfigError(f'{location}: nothing is called {selector!r}.{did_you_mean(selector, known)}{hint}')

  def bind(self, binding: gin_syntax.Binding) -> gin_check.Key:
    """Binds one statement and returns the key it is bound to."""
    value = self._value(binding.value, binding.location)
    if binding.macro_name is not None:
      key = (binding.macro_name, 'gin.macro', 'value')
      gin.bind_parameter(key, value)
      return key
    configurable = self.configurable(binding.selector, binding.location)
    key = (binding.scope, configurable.selector, binding.arg_name)
    try:
      gin.bind_parameter(key, value)
    except ValueError:
      known = gin_check.parameter_names(configurable.wrapped)
      raise ConfigError(f'{binding.location}: {binding.selector} has no parameter {binding.arg_name!r}.'
                        f'{did_you_mean(binding.arg_name, known)}') from None
    return key

  def _value(self, value: Any, location: gin_syntax.Location) -> Any:
    """Returns `value` with placeholders replaced by gin's references."""
    if isinstance(value, dict):
      return {self._value(key, location): self._value(item, location) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
      return type(value)(self._value(item, location) for item in value)
    if isinstance(value, gin_syntax.Macro):
      return gin_config.ParserDelegate().macro(value.name)
    if isinstance(value, gin_syntax.Reference):
      *scopes, selector = value.scoped_selector.split('/')
      configurable = self.configurable(selector, location)
      return gin_config.ConfigurableReference('/'.join((*scopes, configurable.selector)), value.evaluate)
    return value


def _import_message(module: str, error: ModuleNotFoundError) -> str:
  """Words a failed import: a misspelt module, or something that a module needs."""
  missing = error.name or ''
  if not (module == missing or module.startswith(missing + '.')):
    return f'importing {module} failed: it needs {missing!r}, which is not installed.{_extra(missing)}'
  parent, _, leaf = missing.rpartition('.')
  if not parent:
    return (f'no module {missing!r}.{_extra(missing)}' if missing in _EXTRAS else
            f'no module {missing!r}. Is it installed, or its folder in PYTHONPATH?'
            f'{_only_close(missing, ["t5x_lite", "seqio", "moe", "optax", "jax", "flax"])}')
  names = [found.name for found in pkgutil.iter_modules(getattr(sys.modules.get(parent), '__path__', []))]
  return f'no module {leaf!r} in {parent}.{did_you_mean(leaf, [n for n in names if not n.startswith("_")])}'


def _extra(package: str) -> str:
  extra = _EXTRAS.get(package.split('.')[0])
  return f" Install it with: pip install 't5x_lite[{extra}]'." if extra else ''


def _only_close(name: str, candidates: Sequence[str]) -> str:
  hint = did_you_mean(name, candidates)
  return hint if hint.startswith(' Did you mean') else ''


def _public_names(owner: Any) -> list[str]:
  """Returns the names in a module or class that could be meant: functions and classes."""
  return [name for name in dir(owner) if not name.startswith('_') and callable(getattr(owner, name, None))]


def plain_message(error: BaseException) -> str:
  """Returns an error's message without the lines that gin adds on its way through configurables.

  Of these the innermost is kept where it has a scope, or where the error is none of ours: "batch_size: got 0" does not
  say which dataset is meant, nor "could not convert" what was being made.
  """
  note = r"\n\s+In call to configurable '(\S+)' \(.*?\)(?: in scope '(\S+)')?(?=\n|$)"
  text = str(error)
  notes = re.findall(note, text)
  text = re.sub(note, '', text)
  if not notes:
    return text
  name, scope = notes[0]
  if not isinstance(error, T5xLiteError):
    return f'{name}: {text}'
  return f'{text} (in {scope}/{name})' if scope else text


# ----------------------------------------------------------------------------------------------------------------------
# T5X's functions


def rewrite_gin_args(args: Sequence[str]) -> list[str]:
  """Returns command-line arguments with every `--gin.NAME=VALUE` as T5X's `--gin_bindings=NAME = VALUE`.

  Bare strings are quoted as `read_flag` does.

  >>> rewrite_gin_args(['prog', '--gin.TRAIN_STEPS=5', '--gin.MODEL_DIR=runs/a'])
  ['prog', '--gin_bindings=TRAIN_STEPS = 5', "--gin_bindings=MODEL_DIR = 'runs/a'"]
  """
  rewritten = []
  for argument in args:
    if argument.startswith('--gin.'):
      key, equals, value = argument.removeprefix('--gin.').partition('=')
      if not equals:
        raise ConfigError(f'{argument}: a value is missing. Write --gin.{key}=VALUE.')
      binding = gin_syntax.read_flag(key, value, argument).statements[0]
      shown = repr(binding.value) if isinstance(binding.value, str) else value
      argument = f'--gin_bindings={key} = {shown}'
    rewritten.append(argument)
  return rewritten


def parse_gin_flags(gin_search_paths: Sequence[str], gin_files: Sequence[str], gin_bindings: Sequence[str],
                    finalize_config: bool = True) -> None:
  """Applies gin files and bindings to gin's tables, for programs that call their configurables themselves.

  Args:
    gin_search_paths: folders in which to look for gin files, before those that come with t5x_lite.
    gin_files: names of gin files.
    gin_bindings: gin text, applied after the files.
    finalize_config: whether to let gin check and lock the configuration.

  Raises:
    ConfigError: anything that is misspelt or missing.
  """
  flags = [gin_syntax.read_text(text, f'--gin_bindings={text}', gin_search_paths) for text in gin_bindings]
  texts = read(gin_files, flags, gin_search_paths)
  _apply(texts)
  if finalize_config:
    _finalize()


def get_gin_config_str() -> str:
  """Returns the configuration in force as gin text that stands alone: imports, macros, all bindings."""
  return _HEADER + gin.config_str()


def summarize_gin_config(model_dir: str, summary_writer: Any | None, step: int) -> None:
  """Writes the configuration in force to `model_dir/config.gin` and to the summaries.

  A former run's config.gin with another content stays, as `config-until-<step>.gin`.

  Args:
    model_dir: the run's folder.
    summary_writer: has `write_text(step, {name: markdown})`; None writes the file only.
    step: the step at which the run starts or goes on.
  """
  text = get_gin_config_str()
  write_config(pathlib.Path(model_dir), text, step)
  if summary_writer is not None:
    summary_writer.write_text(step, {'config': gin.markdown(text)})


def write_config(model_dir: pathlib.Path, text: str, step: int) -> pathlib.Path:
  """Writes `text` as `model_dir/config.gin`, atomically, and returns its path.

  Another text of a former run is kept as `config-until-<step>.gin`: it was in force until that step.
  """
  model_dir.mkdir(parents=True, exist_ok=True)
  path = model_dir / 'config.gin'
  if path.exists():
    former = path.read_text(encoding='utf-8')
    if former == text:
      return path
    kept, count = model_dir / f'config-until-{step}.gin', 1
    while kept.exists() and kept.read_text(encoding='utf-8') != former:
      count += 1
      kept = model_dir / f'config-until-{step}-{count}.gin'
    _write_atomically(kept, former)
  _write_atomically(path, text)
  return path


def _write_atomically(path: pathlib.Path, text: str) -> None:
  descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
  with os.fdopen(descriptor, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.chmod(name, 0o644)
  os.replace(name, path)


def sum_fn(var1: float, var2: float) -> float:
  """Returns `var1 + var2`, for gin files: `TOTAL = @gin_utils.sum_fn()`."""
  return var1 + var2


def bool_fn(var1: Any) -> bool:
  """Returns whether `var1` is true, for gin files."""
  return bool(var1)


def string_split_fn(text: str, separator: str, maxsplit: int = -1, index: int | None = None) -> list[str] | str:
  """Returns `text` split at `separator`, or one part of it, for gin files.

  Args:
    text: what to split.
    separator: where.
    maxsplit: the number of splits at most, -1 for no limit.
    index: which part to return; None returns all.
  """
  parts = text.split(separator, maxsplit)
  return parts if index is None else parts[index]
