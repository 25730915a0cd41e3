"""Type of a command, and flags that several commands share: gin configuration, cluster, number of devices."""

import argparse
from collections.abc import Callable, Mapping
import itertools
import json
import logging
from typing import Any, NamedTuple

from t5x_lite.errors import ConfigError
from t5x_lite.runtime import cluster_environment as names


class Command(NamedTuple):
  """Command of the program.

  Modules of commands import nothing heavy, so that `t5x_lite --help` does not import JAX; `run` imports the rest. It
  is a named tuple, because the import of dataclasses takes a tenth of the time of `t5x_lite --version`.

  Attributes:
    help: one line of help, without a full stop.
    add_arguments: adds the command's arguments to its parser.
    run: runs the command and returns its exit status.
    entry: dotted name of the function that gin configures; None for a command without gin configuration.
    passes_on: whether the arguments after `--` are those of another command, its argument `others`.
  """

  help: str
  add_arguments: Callable[[argparse.ArgumentParser], None]
  run: Callable[[argparse.Namespace], int]
  entry: str | None = None
  passes_on: bool = False


# Value of --compilation_cache_dir for no folder.
NO_CACHE = 'off'


def add_gin_arguments(parser: argparse.ArgumentParser, *, compiles: bool = True, computes: bool = True) -> None:
  """Add the flags that `load_configuration` reads.

  Args:
    parser: parser of the command.
    compiles: whether to add `--compilation_cache_dir`, whose default is a folder of the user and machine.
    computes: whether to add the flags of a cluster.
  """
  group = parser.add_argument_group('configuration, applied in this order: files, then flags')
  group.add_argument('--gin_file', action='append', default=[], metavar='FILE',
                     help='gin file; repeat the flag for several. Search order: current directory, --gin_search_paths, '
                     'files of t5x_lite, e.g. models/t5_1_1_small.gin')
  # Parsed before argparse runs; listed here for --help.
  group.add_argument('--gin.NAME=VALUE', dest='_', action='store_true',
                     help='set a macro (--gin.TRAIN_STEPS=1000, --gin.MODEL_DIR=runs/a) or a parameter '
                     '(--gin.train_script.train.eval_period=100)')
  group.add_argument('--gin_bindings', action='append', default=[], metavar='TEXT',
                     help="gin text, e.g. --gin_bindings='TRAIN_STEPS = 1000'")
  group.add_argument('--gin_search_paths', action='append', default=[], metavar='FOLDERS',
                     help='folders with gin files, separated by commas')
  group.add_argument('--allowed_modules', metavar='MODULES',
                     help='modules that the configuration may import in addition to jax, flax, optax, seqio, t5x_lite '
                     'and moe, separated by commas. Default: all modules, each with a log line. This is '
                     'not a sandbox')
  group.add_argument('--mesh_selector', metavar='NAME',
                     help='apply the first rule of the macro MESH_RULES that matches NAME, after the files and before '
                     'the other flags. Default: the hardware, e.g. gpu-h100-8, tpu-v5e-256, cpu-8')
  if compiles:
    parser.add_argument('--compilation_cache_dir', metavar='FOLDER',
                        help='save compiled programs in this folder and load them from it, so that the next process '
                        "starts faster; 'off' for none. Default: ~/.cache/t5x_lite/programs-HASH for the features of "
                        'this CPU, up to 4 GiB, on a local disk of Linux. `t5x_lite precompile` fills the folder ahead '
                        'of time')
  else:
    parser.set_defaults(compilation_cache_dir=NO_CACHE)
  if computes:
    _add_cluster_arguments(parser)
  else:
    parser.set_defaults(distributed=None)


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('several processes, one on each machine or for each GPU; see docs/cluster.md')
  group.add_argument('--distributed', choices=names.MODES, default='auto',
                     help='auto: several processes if `t5x_lite launch`, the environment, SLURM, Open MPI, Kubernetes '
                     'or a TPU pod says so; on: an error without a cluster; off: one process. Default: auto')
  group.add_argument('--multiprocess_gpu', action='store_true',
                     help='the same as --distributed=on (name of T5X)')
  group.add_argument('--coordinator_address', metavar='HOST:PORT',
                     help='address of process 0, the same on all processes; environment: JAX_COORDINATOR_ADDRESS')
  group.add_argument('--process_count', type=int, metavar='N', help='number of processes; environment: '
                     'JAX_NUM_PROCESSES')
  group.add_argument('--process_index', type=int, metavar='I',
                     help='index of this process, from 0; environment: JAX_PROCESS_ID')
  group.add_argument('--initialization_timeout', type=int, default=names.INITIALIZATION_TIMEOUT, metavar='SECONDS',
                     help='time until all processes must have started; default: %(default)s')
  group.add_argument('--heartbeat_timeout_seconds', type=int, default=names.HEARTBEAT_TIMEOUT, metavar='SECONDS',
                     help='silence after which a process counts as lost, and all others end with status 75; default: '
                     '%(default)s')


def join_cluster(arguments: argparse.Namespace) -> None:
  """Join the cluster that a command line asks for, before JAX initializes its devices.

  Args:
    arguments: parsed command line with the flags of `add_gin_arguments`; `distributed` is None for a command that does
      not compute.

  Raises:
    ConfigError: flags contradict each other.
  """
  if arguments.distributed is None:
    return
  from t5x_lite import runtime
  if arguments.multiprocess_gpu and arguments.distributed == 'off':
    raise ConfigError('--distributed=off starts one process, and --multiprocess_gpu asks for several. Remove one of '
                      'them.')
  mode = 'on' if arguments.multiprocess_gpu else arguments.distributed
  monitor = runtime.join(runtime.ClusterConfig(mode=mode, **{name: getattr(arguments, name) for name in (
      'coordinator_address', 'process_count', 'process_index', 'initialization_timeout',
      'heartbeat_timeout_seconds')}))
  if monitor is not None:
    monitor.describe_fn = lambda error: arguments.describe_error(monitor.process, error)


def add_num_devices(parser: argparse.ArgumentParser) -> None:
  """Add the flag that `simulate_devices` reads."""
  parser.add_argument('--num_devices', type=int, metavar='N',
                      help='simulate N devices (at most 2048) instead of using the devices of this machine')


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
  checks.check('', {'--num_devices': num_devices}, **{'--num_devices': checks.number(
      at_least=1, at_most=2048, integer=True, remedy='XLA simulates at most 2048 devices.')})
  import jax
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)


def prepend_run_file(arguments: argparse.Namespace, run_file: str, function_name: str) -> None:
  """Read `run_file` before the given gin files, unless these bind the function's `model` already.

  A recipe alone is then enough, and it overrides the defaults of the run file.

  Args:
    arguments: parsed command line; its `gin_file` may change.
    run_file: e.g. runs/export.gin.
    function_name: name of the function that the run file configures, without its module.
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


def load_configuration(arguments: argparse.Namespace, placeholders: Mapping[str, str] | None = None,
                       overrides: str = '') -> Any:
  """Return the `gin_utils.Configuration` of a command line.

  Args:
    arguments: parsed command line, with `entry` and `gin_flags` as `cli` sets them. Activates its
      `compilation_cache_dir` before anything of the configuration is compiled.
    placeholders: see `gin_utils.read`.
    overrides: gin text that is applied last.

  Raises:
    ConfigError: no gin file is given, or the configuration is invalid.
  """
  from t5x_lite.configuration import syntax as gin_syntax
  from t5x_lite import gin_utils
  from t5x_lite import module_imports
  if not arguments.gin_file:
    raise ConfigError('--gin_file is missing. Recipes that run without further flags: '
                      f'{", ".join(gin_syntax.packaged_files("recipes"))}.')
  cache = arguments.compilation_cache_dir
  if cache not in (None, NO_CACHE):
    from t5x_lite import runtime
    runtime.use_compilation_cache(cache)
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
  texts = gin_utils.read(arguments.gin_file, flags, folders, placeholders=placeholders)
  texts.append(gin_syntax.read_text(overrides, arguments.command, is_flag=False))
  join_cluster(arguments)
  configuration = gin_utils.load(arguments.entry, texts, arguments.mesh_selector)
  if cache is None:
    # After the imports of the configuration, since a module may have initialized several processes.
    from t5x_lite import runtime
    runtime.use_default_compilation_cache()
  _check_same_on_all_processes(arguments.command, configuration.text)
  if configuration.mesh_rule:
    _log_mesh(configuration)
  return configuration


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
    raise ConfigError(f'All processes of a run must have the same command and configuration, got {different[0]!r} in '
                      f'process {monitor.process} and {different[1]!r} in process 0. Start all with the same flags.')


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
