"""What the commands of the command line share: their form, and how a gin configuration is read from flags."""

import argparse
from collections.abc import Callable, Mapping
import dataclasses
import os
from typing import Any

from t5x_lite.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Command:
  """A command of the program.

  Modules of commands stay light, so that `t5x_lite --help` does not import JAX: `run` imports what it needs.

  Attributes:
    help: one line, without a full stop.
    add_arguments: adds the command's arguments to its parser.
    run: runs the command and returns its exit status.
    entry: dotted name of the function that gin configures, for `load_configuration`; None for a command that reads no
      gin configuration.
  """

  help: str
  add_arguments: Callable[[argparse.ArgumentParser], None]
  run: Callable[[argparse.Namespace], int]
  entry: str | None = None


def add_gin_arguments(parser: argparse.ArgumentParser, *, compiles: bool = True) -> None:
  """Adds the flags that `load_configuration` reads.

  Args:
    parser: of the command.
    compiles: whether the command compiles anything that is worth keeping.
  """
  group = parser.add_argument_group('configuration, applied in this order: files, then flags')
  group.add_argument('--gin_file', action='append', default=[], metavar='FILE',
                     help='a gin file; repeat the flag for more. Looked up here, in --gin_search_paths, and among the '
                     'files that come with t5x_lite, e.g. models/t5_1_1_small.gin')
  # Taken from the command line before argparse sees it; stands here for --help.
  group.add_argument('--gin.NAME=VALUE', dest='_', action='store_true',
                     help='set a macro (--gin.TRAIN_STEPS=1000, --gin.MODEL_DIR=runs/a) or a parameter '
                     '(--gin.train_script.train.eval_period=100)')
  group.add_argument('--gin_bindings', action='append', default=[], metavar='TEXT',
                     help="gin text, e.g. --gin_bindings='TRAIN_STEPS = 1000'")
  group.add_argument('--gin_search_paths', action='append', default=[], metavar='FOLDERS',
                     help='where to look for gin files, separated by commas')
  group.add_argument('--allowed_modules', metavar='MODULES',
                     help='what the configuration may import besides jax, flax, optax, seqio, t5x_lite and moe, '
                     'separated by commas; by default anything, with a log line. A guard, not a sandbox')
  parser.set_defaults(compilation_cache_dir=None)
  if compiles:
    parser.add_argument('--compilation_cache_dir', metavar='FOLDER',
                        help='load compiled programs from this folder, and keep there what is compiled: the next '
                        'process starts sooner. `t5x_lite precompile` fills it ahead of time')


def add_num_devices(parser: argparse.ArgumentParser) -> None:
  """Adds the flag that `suppose_devices` reads."""
  parser.add_argument('--num_devices', type=int, metavar='N',
                      help='suppose N devices (at most 2048) instead of those of this machine')


def suppose_devices(num_devices: int | None) -> None:
  """Gives JAX so many virtual CPU devices, where a number is given; call before JAX looks at its devices.

  Raises:
    ConfigError: the number is out of range.
  """
  if num_devices is None:
    return
  if not 1 <= num_devices <= 2048:
    raise ConfigError(f'--num_devices={num_devices}: expected 1 to 2048, the most that XLA simulates.')
  import jax
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)


def put_run_file_first(arguments: argparse.Namespace, run_file: str, function_name: str) -> None:
  """Has `run_file` read before the named files, so that a recipe is enough, unless they configure the function wholly.

  First, since what a recipe says is more than the run file's defaults.

  Args:
    arguments: the parsed command line; its `gin_file` may change.
    run_file: e.g. runs/export.gin.
    function_name: the name of the function that the run file configures, without its module.
  """
  from t5x_lite.configuration import syntax as gin_syntax
  folders = _search_folders(arguments)
  statements = [statement for name in arguments.gin_file for statement in gin_syntax.read_file(name, folders).walk()]
  if arguments.gin_file and not any(
      isinstance(statement, gin_syntax.Binding) and statement.arg_name == 'model'
      and statement.selector.rpartition('.')[2] == function_name for statement in statements):
    arguments.gin_file = [run_file, *arguments.gin_file]


def _search_folders(arguments: argparse.Namespace) -> list[str]:
  from t5x_lite.configuration import syntax as gin_syntax
  folders = [folder for text in arguments.gin_search_paths for folder in text.split(',') if folder]
  gin_syntax.check_search_paths(folders)
  return folders


def load_configuration(arguments: argparse.Namespace, stand_ins: Mapping[str, str] | None = None,
                       last_words: str = '') -> Any:
  """Returns the `gin_utils.Configuration` that the command line asks for.

  Args:
    arguments: the parsed command line, with `entry` and `gin_flags` as `cli` sets them. A `compilation_cache_dir` is
      put to use, before anything can be compiled.
    stand_ins: see `gin_utils.read`.
    last_words: gin text to apply after all.

  Raises:
    ConfigError: no file is named, or what the files and flags say is not sound.
  """
  from t5x_lite.configuration import syntax as gin_syntax
  from t5x_lite import gin_utils
  from t5x_lite import module_imports
  if not arguments.gin_file:
    raise ConfigError('No --gin_file is given. Recipes that run as they are: '
                      f'{", ".join(gin_syntax.packaged_files("recipes"))}.')
  if arguments.compilation_cache_dir is not None:
    from t5x_lite import runtime
    runtime.use_compilation_cache(arguments.compilation_cache_dir)
  module_imports.restrict(arguments.allowed_modules)
  flags = []
  for text in arguments.gin_bindings:
    key, equals, value = text.partition('=')
    one_line = equals and '\n' not in text and key.strip().replace('.', '').replace('/', '').isidentifier()
    flag = f'--gin_bindings={text}'
    flags.append(gin_syntax.read_flag(key.strip(), value, flag) if one_line else gin_syntax.read_text(text, flag))
  for flag in arguments.gin_flags:
    key, _, value = flag.removeprefix('--gin.').partition('=')
    flags.append(gin_syntax.read_flag(key, value, flag))
  folders = _search_folders(arguments)
  texts = gin_utils.read(arguments.gin_file, flags, folders, stand_ins=stand_ins)
  texts.append(gin_syntax.read_text(last_words, arguments.command, is_flag=False))
  return gin_utils.load(arguments.entry, texts)
