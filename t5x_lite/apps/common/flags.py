"""Commands and their invocations, and flags that several commands share: gin configuration, cluster, devices."""

import argparse
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import itertools
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from t5x_lite.errors import ConfigError, Ending, did_you_mean
from t5x_lite.runtime import cluster_environment as names

if TYPE_CHECKING:
  from t5x_lite import gin_utils


# Values of --decode, and the decoding functions as gin files write them.
DECODE_FNS = {'mbr': '@decoding.MinimumBayesRisk()'}
# Value of a command without --compilation_cache_dir: JAX's setting.
_CACHE_OF_JAX = ''
# Value of --compilation_cache_dir for no folder.
NO_CACHE = 'off'
_MOVED_BASE = '--gin.checkpoints.RestoreCheckpointConfig.base_path=%INITIAL_CHECKPOINT_PATH'


class Invocation(NamedTuple):
  """A command line, parsed. Nothing changes it: a command passes on a copy with other fields (`_replace`).

  Fields with the name of a flag have its value.

  Attributes:
    command: name of the command, for messages.
    flags: values of all flags and arguments of the command by attribute, as they were given.
    entry: dotted name of the function that gin configures; None for a command without gin configuration.
    gin_files: gin files in the order of application.
    gin_flags: flags of the forms `--gin.NAME=VALUE` and `--gin_bindings=TEXT`, in their order.
    gin_search_paths: lists of folders, separated by commas.
    allowed_modules: names of modules, separated by commas; None for any.
    mesh_selector: selector of the mesh rules; None for the hardware.
    compilation_cache_dir: folder of compiled programs; None for the default, `NO_CACHE` for none, '' for JAX's setting.
    distributed: one of `cluster_environment.MODES`; None for a command that does not compute, or if the process has
      joined its cluster.
    jax_flags: flags of the form `--jax_NAME=VALUE`.
    describe_error: function of (process, exception) that returns how the exception ends this one of several processes.
  """

  command: str
  flags: Any = None
  entry: str | None = None
  gin_files: Sequence[str] = ()
  gin_flags: Sequence[str] = ()
  gin_search_paths: Sequence[str] = ()
  allowed_modules: str | None = None
  mesh_selector: str | None = None
  compilation_cache_dir: str | None = _CACHE_OF_JAX
  distributed: str | None = None
  jax_flags: Sequence[str] = ()
  describe_error: Callable[[int, BaseException], Ending] | None = None


def make_invocation(flags: Mapping[str, Any], **fields: Any) -> Invocation:
  """Return the invocation with the values of flags.

  Args:
    flags: values of all flags and arguments of the command by name.
    **fields: other fields of the invocation.
  """
  shared = {name: value for name, value in flags.items() if name in Invocation._fields}
  record = collections.namedtuple('Flags', flags)
  return Invocation(**(shared | fields), flags=record(**flags))


class Command(NamedTuple):
  """Command of the program.

  Modules of commands import nothing heavy, so that `t5x_lite --help` does not import JAX; `run` imports the rest. It
  is a named tuple, because the import of dataclasses takes a tenth of the time of `t5x_lite --version`.

  Attributes:
    help: one line of help, without a full stop.
    add_arguments: adds the command's arguments to its parser.
    run: runs an invocation of the command and returns its exit status.
    entry: dotted name of the function that gin configures; None for a command without gin configuration.
    passes_on: whether the arguments after `--` are those of another command, its argument `others`.
  """

  help: str
  add_arguments: Callable[[argparse.ArgumentParser], None]
  run: Callable[[Invocation], int]
  entry: str | None = None
  passes_on: bool = False


# Options of JAX for functions that run without being compiled before, and the rest of the remedy.
_JAX_OPTIONS_WITHOUT_EFFECT = {
  'jax_disable_jit': '; to find a NaN use --jax_debug_nans, and to see values jax.debug.print',
  'jax_no_tracing': '',
  'jax_no_execution': '',
}


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the flags of all commands."""
  parser.add_argument('--debug', action='store_true', help='show the entire traceback of errors')
  parser.add_argument(
    '--log_level',
    choices=('debug', 'info', 'warning', 'error'),
    default='info',
    help='lowest level of log lines: debug adds '
    'the name and time of each compiled program; warning and error also hide progress. Default: info',
  )


def add_gin_arguments(
  parser: argparse.ArgumentParser, *, compiles: bool = True, computes: bool = True
) -> None:
  """Add the flags that `load_configuration` reads.

  Args:
    parser: parser of the command.
    compiles: whether to add `--compilation_cache_dir`, whose default is a folder of the user and machine.
    computes: whether to add the flags of a cluster.
  """
  group = parser.add_argument_group('configuration, applied in this order: files, then flags')
  group.add_argument(
    '--gin_file',
    action='append',
    dest='gin_files',
    default=[],
    metavar='FILE',
    help='gin file; repeat the flag for several. Search order: current directory, --gin_search_paths, '
    'files of t5x_lite, e.g. models/t5_1_1_small.gin',
  )
  # Parsed before argparse runs; listed here for --help.
  group.add_argument(
    '--gin.NAME=VALUE',
    dest=argparse.SUPPRESS,
    action='store_true',
    help='set a macro (--gin.TRAIN_STEPS=1000, --gin.MODEL_DIR=runs/a) or a parameter '
    '(--gin.train_script.train.eval_period=100)',
  )
  group.add_argument(
    '--gin_bindings',
    action='append',
    default=[],
    metavar='TEXT',
    help="gin text, e.g. --gin_bindings='TRAIN_STEPS = 1000'",
  )
  group.add_argument(
    '--gin_search_paths',
    action='append',
    default=[],
    metavar='FOLDERS',
    help='folders with gin files, separated by commas',
  )
  group.add_argument(
    '--allowed_modules',
    metavar='MODULES',
    help='modules that the configuration may import in addition to jax, flax, optax, seqio, t5x_lite '
    'and moe, separated by commas; it then reaches only what recipes need and what these modules define. '
    'Default: all modules, each with a log line. This is not a sandbox',
  )
  group.add_argument(
    '--mesh_selector',
    metavar='NAME',
    help='apply the first rule of the macro MESH_RULES that matches NAME, after the files and before '
    'the other flags. Default: the hardware, e.g. gpu-h100-8, tpu-v5e-256, cpu-8',
  )
  if compiles:
    parser.add_argument(
      '--compilation_cache_dir',
      metavar='FOLDER',
      help='save compiled programs in this folder and load them from it, so that the next process '
      "starts faster; 'off' for none, whatever JAX_COMPILATION_CACHE_DIR says. Default: "
      '~/.cache/t5x_lite/programs-HASH for the features of this CPU, up to 4 GiB, on a local disk of Linux. '
      '`t5x_lite precompile` fills the folder ahead of time',
    )
  else:
    parser.set_defaults(compilation_cache_dir=_CACHE_OF_JAX)
  if computes:
    _add_cluster_arguments(parser)
  else:
    parser.set_defaults(distributed=None)
  _add_absl_arguments(parser)


def _add_absl_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group(
    "flags of T5X's programs, in any syntax of absl (-flag, --flag=true, --noflag)"
  )
  group.add_argument(
    '--verbosity',
    type=_log_level,
    dest='log_level',
    default=argparse.SUPPRESS,
    metavar='N',
    help='the same as --log_level: 1 for debug, 0 for info, -1 for warning, -2 for error; also -v',
  )
  group.add_argument(
    '--log_dir',
    metavar='FOLDER',
    help='also write log lines, with time and level, to a file in this folder for each process',
  )
  group.add_argument(
    '--stderrthreshold',
    type=_stderr_threshold,
    default=logging.NOTSET,
    metavar='LEVEL',
    help='lowest level of log lines on standard error: debug, info, warning, error, or 0 for info to '
    '2 for error. As with --log_level, but the file of --log_dir has all lines',
  )
  group.add_argument(
    '--alsologtostderr',
    action='store_true',
    help='log lines always go to standard error; this flag cancels --stderrthreshold',
  )
  group.add_argument(
    '--logtostderr',
    action='store_true',
    dest='alsologtostderr',
    help='the same as --alsologtostderr',
  )
  group.add_argument(
    '--showprefixforinfo',
    action='store_true',
    help='accepted if false: lines have no prefix, except in the file of --log_dir',
  )
  group.add_argument(
    '--logger_levels',
    type=_logger_levels,
    default={},
    metavar='NAME:LEVEL,...',
    help='levels of Python loggers, also of other packages, e.g. jax:DEBUG,t5x_lite.data:WARNING',
  )
  # Parsed before argparse runs; listed here for --help.
  group.add_argument(
    '--jax_NAME=VALUE',
    action='store_true',
    dest=argparse.SUPPRESS,
    help='set an option of JAX, e.g. --jax_log_compiles or --jax_default_matmul_precision=highest',
  )
  group.add_argument(
    '--flagfile', metavar='FILE', help='read flags from this file, one a line, at this position'
  )
  group.add_argument(
    '--undefok',
    action='append',
    default=[],
    metavar='NAMES',
    help='flags to ignore if they do not exist, separated by commas',
  )


def _log_level(text: str) -> str:
  """Return the value of `--log_level` for a number or a name of absl's `--verbosity`."""
  names = {'fatal': 'error', **{name: name for name in ('error', 'warning', 'info', 'debug')}}
  try:
    return (
      names.get(text.lower())
      or ('error', 'warning', 'info', 'debug')[min(max(int(text), -2), 1) + 2]
    )
  except ValueError:
    raise argparse.ArgumentTypeError(
      f'must be a number from -2 (error) to 1 (debug), got {text!r}'
    ) from None


def _stderr_threshold(text: str) -> int:
  """Return the value of `--stderrthreshold`; errors are always shown, also for `fatal`."""
  names = ('info', 'warning', 'error', 'fatal')
  levels = {
    **{str(i): name for i, name in enumerate(names)},
    **{name: name for name in (*names, 'debug', 'warn')},
  }
  try:
    level = logging.getLevelNamesMapping()[levels[text.lower()].upper()]
    return min(level, logging.ERROR)
  except KeyError:
    raise argparse.ArgumentTypeError(
      'must be debug, info, warning, error, fatal or a number from 0 (info) to 3 '
      f'(fatal), got {text!r}'
    ) from None


def _logger_levels(text: str) -> dict[str, int]:
  """Return levels by name of the logger for the value of `--logger_levels`."""
  levels = {}
  for pair in filter(str.strip, text.split(',')):
    name, _, level = (part.strip() for part in pair.partition(':'))
    try:
      levels[name] = logging.getLevelNamesMapping()[level.upper()]
    except KeyError:
      raise argparse.ArgumentTypeError(
        'must be NAME:LEVEL with a level of Python such as DEBUG, separated by commas, '
        f'got {pair!r}'
      ) from None
  return levels


def add_decode_argument(parser: Any) -> None:
  """Add the flag `--decode` to a parser or a group of it; `DECODE_FNS` has its values."""
  parser.add_argument(
    '--decode',
    choices=tuple(DECODE_FNS),
    help='decoding algorithm instead of that of the model. mbr: minimum Bayes risk, the most typical of '
    'several samples; options: --gin.decoding.MinimumBayesRisk.num_samples=N (16), .utility (chrf), '
    '.temperature, .topk, .topp',
  )


def add_seqio_arguments(parser: argparse.ArgumentParser) -> None:
  """Add the flags of a command that reads data of seqio."""
  group = parser.add_argument_group('data of seqio')
  group.add_argument(
    '--tfds_data_dir',
    metavar='FOLDER',
    help='folder of TensorFlow Datasets for all tasks, also for those that name another folder',
  )
  group.add_argument(
    '--seqio_additional_cache_dirs',
    action='append',
    default=[],
    metavar='FOLDERS',
    help="further folders with results of seqio's cache job, separated by commas, for "
    '--gin.USE_CACHED_TASKS=True',
  )


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group(
    'several processes, one on each machine or for each GPU; see docs/cluster.md'
  )
  group.add_argument(
    '--distributed',
    choices=names.MODES,
    default='auto',
    help='auto: several processes if `t5x_lite launch`, the environment, SLURM, Open MPI, Kubernetes '
    'or a TPU pod says so; on: an error without a cluster; off: one process. Default: auto',
  )
  group.add_argument(
    '--multiprocess_gpu',
    action='store_true',
    default=None,
    help='the same as --distributed=on (name of T5X)',
  )
  group.add_argument(
    '--nomultiprocess_gpu',
    action='store_false',
    dest='multiprocess_gpu',
    default=None,
    help='one process; --coordinator_address, --process_count and --process_index have no effect',
  )
  group.add_argument(
    '--coordinator_address',
    metavar='HOST:PORT',
    help='address of process 0, the same on all processes; environment: JAX_COORDINATOR_ADDRESS',
  )
  group.add_argument(
    '--process_count',
    type=int,
    metavar='N',
    help='number of processes; environment: JAX_NUM_PROCESSES',
  )
  group.add_argument(
    '--process_index',
    type=int,
    metavar='I',
    help='index of this process, from 0; environment: JAX_PROCESS_ID',
  )
  group.add_argument(
    '--cluster_secret_file',
    metavar='FILE',
    help='file with a secret that only you can read, the same on all processes; they then ignore what others '
    'send to their port. `t5x_lite launch` makes a secret itself',
  )
  group.add_argument(
    '--initialization_timeout',
    type=int,
    default=names.INITIALIZATION_TIMEOUT,
    metavar='SECONDS',
    help='time until all processes must have started; default: %(default)s',
  )
  group.add_argument(
    '--heartbeat_timeout_seconds',
    type=int,
    default=names.HEARTBEAT_TIMEOUT,
    metavar='SECONDS',
    help='silence after which a process counts as lost, and all others end with status 75; default: '
    '%(default)s',
  )


def join_cluster(invocation: Invocation) -> Invocation:
  """Join the cluster that a command line asks for, before JAX initializes its devices.

  Return the invocation of a process that has joined, for which this does nothing.

  Args:
    invocation: command line with the flags of `add_gin_arguments`.

  Raises:
    ConfigError: flags contradict each other.
  """
  mode = invocation.distributed
  if mode is None:
    return invocation
  from t5x_lite import runtime

  flags = invocation.flags
  if flags.multiprocess_gpu and mode == 'off':
    raise ConfigError(
      '--distributed=off starts one process, and --multiprocess_gpu asks for several. Remove one of '
      'them.'
    )
  if flags.multiprocess_gpu is False and mode == 'on':
    raise ConfigError(
      '--distributed=on asks for several processes, and --multiprocess_gpu=false starts one. Remove '
      'one of them.'
    )
  place = {
    'coordinator_address': flags.coordinator_address or None,
    'process_count': flags.process_count,
    'process_index': flags.process_index,
  }
  if flags.multiprocess_gpu:
    mode = 'on'
  elif flags.multiprocess_gpu is False:
    mode = 'off'
    given = [f'--{name}' for name, value in place.items() if value is not None]
    if given:
      logging.getLogger(__name__).info(
        'No effect of %s: --multiprocess_gpu=false starts one process.', ', '.join(given)
      )
    place = dict.fromkeys(place)
  monitor = runtime.join(
    runtime.ClusterConfig(
      mode=mode,
      **place,
      cluster_secret_file=flags.cluster_secret_file,
      initialization_timeout=flags.initialization_timeout,
      heartbeat_timeout_seconds=flags.heartbeat_timeout_seconds,
    )
  )
  if monitor is not None and invocation.describe_error is not None:
    monitor.describe_fn = functools.partial(invocation.describe_error, monitor.process)
  return invocation._replace(distributed=None)


def add_num_devices(parser: argparse.ArgumentParser) -> None:
  """Add the flag that `simulate_devices` reads."""
  parser.add_argument(
    '--num_devices',
    type=int,
    metavar='N',
    help='simulate N devices (at most 2048) instead of using the devices of this machine',
  )


def simulate_devices(num_devices: int | None) -> None:
  """Make JAX simulate devices on the CPU; call this before JAX initializes its devices.

  Args:
    num_devices: number of devices; None keeps the devices of this machine.

  Raises:
    ConfigError: the number is not in [1, 2048].
  """
  if num_devices is None:
    return
  from t5x_lite import checks

  checks.check(
    '',
    {'--num_devices': num_devices},
    **{
      '--num_devices': checks.number(
        at_least=1, at_most=2048, integer=True, remedy='XLA simulates at most 2048 devices.'
      )
    },
  )
  import jax

  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)


def with_moved_base(invocation: Invocation) -> Invocation:
  """Return an invocation in which a flag INITIAL_CHECKPOINT_PATH is also the path of the base of an adapter."""
  for flag in invocation.gin_flags:
    text = flag.removeprefix('--gin.').removeprefix('--gin_bindings=')
    if text.partition('=')[0].strip() == 'INITIAL_CHECKPOINT_PATH':
      return invocation._replace(gin_flags=[*invocation.gin_flags, _MOVED_BASE])
  return invocation


def with_run_file(invocation: Invocation, run_file: str, function_name: str) -> Invocation:
  """Return an invocation with `run_file` before its gin files, unless these bind the function's `model` already.

  A recipe alone is then enough, and it overrides the defaults of the run file. See also `with_moved_base`.

  Args:
    invocation: the command line.
    run_file: e.g. runs/export.gin.
    function_name: name of the function that the run file configures, without its module.
  """
  invocation = with_moved_base(invocation)
  if not invocation.gin_files or binds_model(invocation, function_name):
    return invocation
  return invocation._replace(gin_files=[run_file, *invocation.gin_files])


def binds_model(invocation: Invocation, function_name: str) -> bool:
  """Return whether one of the gin files binds the argument `model` of a function, with any module."""
  from t5x_lite.configuration import syntax as gin_syntax

  folders = _folders(invocation.gin_search_paths)
  statements = []
  for name in invocation.gin_files:
    statements += gin_syntax.read_file(name, folders).walk()
  bindings = [each for each in statements if isinstance(each, gin_syntax.Binding)]
  names = [each.selector.rpartition('.')[2] for each in bindings if each.arg_name == 'model']
  return function_name in names


def _folders(texts: Iterable[str]) -> list[str]:
  """Return the folders of a flag with lists, which absl reads as lines of CSV."""
  import csv  # Not needed for --help.

  rows = csv.reader(texts, skipinitialspace=True)
  folders = [folder.strip() for row in rows for folder in row]
  return list(filter(None, folders))


def load_configuration(
  invocation: Invocation,
  placeholders: Mapping[str, str] | None = None,
  overrides: str = '',
  defaults: str = '',
) -> 'gin_utils.Configuration':
  """Return the configuration of a command line.

  Args:
    invocation: the command line. Its `compilation_cache_dir` is activated before anything of the configuration is
      compiled.
    placeholders: see `gin_utils.read`.
    overrides: gin text that is applied last.
    defaults: gin text that is applied after the files and before the flags.

  Raises:
    ConfigError: no gin file is given, or the configuration is invalid.
  """
  from t5x_lite.configuration import module_imports

  # Before other imports, which try optional packages.
  module_imports.restrict(invocation.allowed_modules)
  from t5x_lite import gin_utils
  from t5x_lite.configuration import syntax as gin_syntax

  if not invocation.gin_files or invocation.entry is None:
    raise ConfigError(
      '--gin_file is missing. Recipes that run without further flags: '
      f'{", ".join(gin_syntax.packaged_files("recipes"))}.'
    )
  cache = invocation.compilation_cache_dir
  if cache:
    from t5x_lite import runtime

    if cache == NO_CACHE:
      runtime.disable_compilation_cache()
    else:
      runtime.use_compilation_cache(cache)
  flags = [gin_syntax.read_text(defaults, invocation.command, is_flag=False)]
  for flag in invocation.gin_flags:
    text = flag.removeprefix('--gin.').removeprefix('--gin_bindings=')
    key, equals, value = text.partition('=')
    name = key.strip()
    is_name = name.replace('.', '').replace('/', '').isidentifier()
    if equals and is_name and '\n' not in text:
      flags.append(gin_syntax.read_flag(name, value, flag))
    elif flag.startswith('--gin.'):
      flags.append(gin_syntax.read_flag(key, value, flag))
    else:
      flags.append(gin_syntax.read_text(text, flag))
  folders = _search_folders(invocation)
  texts = gin_utils.read(
    invocation.gin_files, flags, folders, placeholders=placeholders, entry=invocation.entry
  )
  texts.append(gin_syntax.read_text(overrides, invocation.command, is_flag=False))
  levels = getattr(invocation.flags, 'logger_levels', {})
  _set_jax_options(invocation.jax_flags, shows_warnings='jax' not in levels)
  _check_jax_options()
  join_cluster(invocation)
  configuration = gin_utils.load(invocation.entry, texts, invocation.mesh_selector)
  _set_seqio_folders(invocation.flags, configuration)
  if cache is None:
    # After the imports of the configuration, since a module may have initialized several processes.
    from t5x_lite import runtime

    runtime.use_default_compilation_cache()
  _check_same_on_all_processes(invocation.command, configuration.text)
  if configuration.mesh_rule:
    _log_mesh(configuration)
  return configuration


def _search_folders(invocation: Invocation) -> list[str]:
  """Return the folders of `--gin_search_paths`.

  A folder that does not exist is only a warning if gin files of T5X are replaced by files of t5x_lite: scripts of T5X
  name their checkout of T5X, which is not needed here.

  Raises:
    ConfigError: a folder does not exist.
  """
  from t5x_lite.configuration import syntax as gin_syntax

  folders = _folders(invocation.gin_search_paths)
  try:
    gin_syntax.check_search_paths(folders)
  except ConfigError as problem:
    try:
      texts = [gin_syntax.read_file(name, folders) for name in invocation.gin_files]
    except ConfigError:  # The missing folder may be the reason.
      raise problem from None
    if not any(
      file.is_packaged(gin_syntax.T5X_FILES) for text in texts for _, file in text.walk_files()
    ):
      raise
    logging.getLogger(__name__).warning('%s All gin files were found without it.', problem)
  return folders


def _set_jax_options(flags: Sequence[str], shows_warnings: bool = True) -> None:
  """Set JAX's options by flags such as `--jax_log_compiles`, before JAX initializes its devices.

  Args:
    flags: flags of the form `--jax_NAME=VALUE`.
    shows_warnings: whether to show JAX's warnings, as which JAX logs what some options ask for.

  Raises:
    ConfigError: an option does not exist, or its value is invalid.
  """
  if not flags:
    return
  import jax

  from t5x_lite import checks

  if shows_warnings:
    logging.getLogger('jax').setLevel(logging.WARNING)
  for flag in flags:
    name, equals, text = flag.lstrip('-').partition('=')
    if name.startswith('no') and not equals:
      name = name.removeprefix('no')
      text = 'false'
    if name not in jax.config.values:
      raise ConfigError(
        f'JAX has no option {name}.{did_you_mean(name, jax.config.values, lists_all=False)}'
      )
    kind = type(jax.config.values[name])
    try:
      if kind is bool:
        value = {
          '': True,
          'true': True,
          't': True,
          '1': True,
          'false': False,
          'f': False,
          '0': False,
        }[text.lower()]
      else:
        value = kind(text) if kind in (int, float) else text
      jax.config.update(name, value)
    except (KeyError, TypeError, ValueError) as error:
      if kind is bool:
        expectation = 'true or false'
      else:
        expectation = f'a value that JAX accepts ({error})'
      raise checks.invalid('', f'--{name}', expectation, text) from error


def _check_jax_options() -> None:
  """Raise if an option of JAX, of a flag or the environment, cannot have an effect here.

  Raises:
    ConfigError: names the option.
  """
  import jax

  from t5x_lite import checks

  for name, remedy in _JAX_OPTIONS_WITHOUT_EFFECT.items():
    if jax.config.values.get(name):
      raise checks.invalid(
        '',
        f'--{name}',
        'false, because all programs are compiled before they run',
        True,
        f'Leave out the flag and unset {name.upper()}{remedy}.',
      )


def _set_seqio_folders(flags: Any, configuration: Any) -> None:
  """Set seqio's folders by `--tfds_data_dir` and `--seqio_additional_cache_dirs`.

  Raises:
    ConfigError: the configuration reads no data of seqio.
  """
  # Scripts of T5X have quoted folders, e.g. --tfds_data_dir=\"${TFDS_DATA_DIR}\".
  data_dir = (getattr(flags, 'tfds_data_dir', None) or '').strip('\'"')
  cache_dirs = _folders(getattr(flags, 'seqio_additional_cache_dirs', ()))
  if not data_dir and not cache_dirs:
    return
  from t5x_lite import checks
  from t5x_lite import data

  datasets = configuration.arguments_of(data.DatasetConfig)
  if (
    not any(dataset.get('source', 'seqio') == 'seqio' for dataset in datasets)
    and 'seqio' not in sys.modules
  ):
    flag, value = (
      ('--tfds_data_dir', data_dir) if data_dir else ('--seqio_additional_cache_dirs', cache_dirs)
    )
    raise checks.invalid(
      '', flag, 'unset for a configuration that reads no data of seqio', value, 'Remove the flag.'
    )
  if cache_dirs and not any(dataset.get('use_cached') for dataset in datasets):
    logging.getLogger(__name__).warning(
      '--seqio_additional_cache_dirs=%s has no effect: no dataset reads cached tasks. Set '
      '--gin.USE_CACHED_TASKS=True.',
      ','.join(cache_dirs),
    )
  named = [
    ('--tfds_data_dir', data_dir),
    *(('--seqio_additional_cache_dirs', folder) for folder in cache_dirs),
  ]
  for flag, folder in named:
    if folder and '://' not in folder and not os.path.isdir(folder):
      logging.getLogger(__name__).warning('%s: the folder %r does not exist.', flag, folder)
  from t5x_lite.data.seqio import packages as seqio_import

  seqio_import.use_folders(data_dir, cache_dirs)


def _check_same_on_all_processes(command: str, text: str) -> None:
  """Raise if this process has another command or configuration than the lead: the results would be wrong.

  Raises:
    ConfigError: with the first line that differs.
  """
  from t5x_lite import runtime

  monitor = runtime.current_monitor()
  if monitor is None:
    return
  own = [f'{command}, {monitor.num_processes} processes', *text.splitlines()]
  lead = json.loads(monitor.value_of_lead(json.dumps(own)))
  pairs = itertools.zip_longest(own, lead, fillvalue='(nothing)')
  different = next(((mine, theirs) for mine, theirs in pairs if mine != theirs), None)
  if different is not None:
    raise ConfigError(
      f'All processes of a run must have the same command and configuration, got {different[0]!r} in '
      f'process {monitor.process} and {different[1]!r} in process 0. Start all with the same flags.'
    )


def _log_mesh(configuration: Any) -> None:
  """Log the mesh rule of a configuration, its changes and the mesh in one line.

  Raises:
    ConfigError: the devices have no such mesh.
  """
  from t5x_lite import multihost

  try:
    mesh = configuration.argument('partitioner').mesh
  except ConfigError as error:
    raise ConfigError(f'{error} ({configuration.mesh_rule})') from error
  if multihost.is_lead():
    axes = ', '.join(f'{name}={size}' for name, size in mesh.shape.items())
    logging.getLogger(__name__).info('%s. Mesh: %s.', configuration.mesh_rule, axes)
