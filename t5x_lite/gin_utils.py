"""Applies gin files and flags, and writes down what they amount to.

`read` and `load` are the way in: `read` turns files and flags into statements (`configuration.syntax`); `load` binds them with
their places remembered (`configuration.binding`) and checks the result against the function that will run (`configuration.checks`). T5X's
functions of `gin_utils` stand at the end.
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import importlib
import logging
import pathlib
import re
from typing import Any

import gin

from t5x_lite import files
from t5x_lite.configuration import binding as gin_apply
from t5x_lite.configuration import checks as gin_check
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError, T5xLiteError

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
    'CHECKPOINT_PATH': 'set --gin.CHECKPOINT_PATH=runs/my_run/checkpoint_1000',
    'INFER_OUTPUT_DIR': 'set --gin.INFER_OUTPUT_DIR=runs/my_run/answers, or --output=FILE',
    'OPTIMIZER': 'add an optimizer, e.g. --gin_file=optimizers/adafactor.gin',
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

  def settings(self, left_out: Sequence[str]) -> dict[str, str]:
    """Returns what is bound to everything that the entry point reaches, as text by name.

    Args:
      left_out: what the modules start with whose bindings are not to be told.
    """

    def resolve(value):
      while gin_check.is_macro(value):
        value = gin_check.value_of(('/'.join(value.scopes), 'gin.macro', 'value'))
      return value

    return {f'{use.name}.{parameter}': repr(resolve(gin_check.value_of(key)))
            for use in self.uses if not use.configurable.wrapped.__module__.startswith(tuple(left_out))
            for parameter, key in use.bound.items()}

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
  for sentence in gin_syntax.misspelt_macros(texts):
    logging.getLogger(__name__).warning(sentence)
  return texts


def load(entry: str, texts: Sequence[gin_syntax.Text]) -> Configuration:
  """Returns the configuration that `texts`, applied in order, make for one entry point.

  Args:
    entry: dotted name of the function to configure, e.g. `t5x_lite.apps.train.train`.
    texts: what `read` returned.

  Raises:
    ConfigError: anything that is misspelt, missing, without effect or of the wrong type.
  """
  locations, replaced = gin_apply.apply(texts)
  module_name, _, function_name = entry.rpartition('.')
  function = getattr(importlib.import_module(module_name), function_name)
  if not any(configurable.wrapped is function for configurable in gin_check.configurables().values()):
    raise ConfigError(f'No file configures {entry}. Add a run, e.g. --gin_file=runs/pretrain.gin, or a recipe: '
                      f'{", ".join(gin_syntax.packaged_files("recipes"))}.')
  macros_of_files = {statement.macro_name for text in texts for statement in text.walk()
                     if isinstance(statement, gin_syntax.Binding) and not statement.location.on_command_line}
  uses = gin_check.check(function, locations, macros_of_files, replaced)
  text = get_gin_config_str()
  _finalize()
  return Configuration(function, text, uses)


def _finalize() -> None:
  try:
    gin.finalize()
  except ValueError as error:  # a hook of user code, or of gin
    raise ConfigError(str(error).splitlines()[0]) from error


def plain_message(error: BaseException) -> str:
  """Returns an error's message without the lines that gin adds on its way through configurables.

  Of these the innermost is kept where it has a scope of the user's, or where the error is none of ours: "batch_size:
  got 0" does not say which dataset is meant, nor "could not convert" what was being made.
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
  return f'{text} (in {scope}/{name})' if scope and not gin_check.is_macro_scope(scope) else text


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
  gin_syntax.check_search_paths(gin_search_paths)
  flags = [gin_syntax.read_text(text, f'--gin_bindings={text}', gin_search_paths) for text in gin_bindings]
  texts = read(gin_files, flags, gin_search_paths)
  gin_apply.apply(texts)
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
  try:
    write_config(pathlib.Path(model_dir), text, step)
  except OSError as error:
    raise ConfigError(f'config.gin cannot be written in {model_dir!r}: {error.strerror}. Free disk space or '
                      'fix the path, then rerun the command.') from error
  if summary_writer is not None:
    summary_writer.write_text(step, {'config': gin.markdown(text)})


def write_config(model_dir: pathlib.Path, text: str, step: int) -> pathlib.Path:
  """Writes `text` as `model_dir/config.gin`, atomically, and returns its path.

  Another text of a former run is kept as `config-until-<step>.gin`: it was in force until that step.
  """
  model_dir.mkdir(parents=True, exist_ok=True)
  path = model_dir / 'config.gin'
  if path.exists():
    former = _read_any(path)
    if former == text:
      return path
    kept, count = model_dir / f'config-until-{step}.gin', 1
    while kept.exists() and _read_any(kept) != former:
      count += 1
      kept = model_dir / f'config-until-{step}-{count}.gin'
    _write(kept, former)
  _write(path, text)
  return path


def _read_any(path: pathlib.Path) -> str:
  return path.read_text(encoding='utf-8', errors='surrogateescape')  # whatever someone has made of it is kept as it is


def _write(path: pathlib.Path, text: str) -> None:
  files.write(path, text.encode('utf-8', errors='surrogateescape'))


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
