"""Command line `t5x_lite COMMAND ...`, the same program as `python -m t5x_lite` and the scripts of a checkout.

Packages that use t5x_lite have similar programs: they pass a `Program` to `main`.

Nothing heavy is imported before the command line and the gin files have been read and checked. Errors of this package
become one message and an exit status (`errors.ExitCode`), and so do errors of user code (`command_line.errors`); any
other exception keeps its traceback.
"""

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import gc
import io
import logging
import os
import shlex
import signal
import sys
import threading
import types
from typing import Any, NamedTuple, NoReturn
import warnings

import t5x_lite
from t5x_lite import compat
from t5x_lite import runtime
from t5x_lite.apps.commands import COMMANDS
from t5x_lite.apps.common.flags import Command
from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import add_shared_arguments
from t5x_lite.apps.common.flags import make_invocation
from t5x_lite.command_line import flags as cli_flags
from t5x_lite.command_line import standard_streams
from t5x_lite.configuration import masking
from t5x_lite.errors import ConfigError, Ending, ExitCode, StoppedOnSignalError, did_you_mean
from t5x_lite.formatting import capitalized
from t5x_lite.formatting import gin_flag
from t5x_lite.formatting import printable

# Third-party packages with log lines at start-up that users do not need; errors are still shown.
_NOISY_LOGGERS = (
  'absl',
  'h5py',
  'jax',
  'matplotlib',
  'orbax',
  'tensorboardX',
  'tensorflow',
  'tensorflow_datasets',
)
_NOISY_MODULES = (
  'absl',
  'clu',
  'etils',
  'flax',
  'google',
  'h5py',
  'jax',
  'keras',
  'numpy',
  'optax',
  'orbax',
  'seqio',
  't5',
  'tensorboardX',
  'tensorflow',
  'tensorflow_datasets',
  'tree',
)
# Environment variables that TensorFlow, XLA and gRPC read at their first import.
_QUIET_ENVIRONMENT = {
  'TF_CPP_MIN_LOG_LEVEL': '3',
  'GRPC_VERBOSITY': 'ERROR',
  'ABSL_MIN_LOG_LEVEL': '3',
  'TF_ENABLE_ONEDNN_OPTS': '0',
}
# First parts of the names of threads for which the program does not wait.
_ABANDONED_THREADS = ('t5x_lite-data', 't5x_lite-compilation', 't5x_lite-tracker')
# Commands that compute for long.
_COMPUTING = ('train', 'eval', 'infer')
_EPILOG = """\
commands (each has a --help):
{commands}

a first run, from files of t5x_lite:
  t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze

exit status: 0 done, 2 invalid configuration or input, 3 stopped on a non-finite number, 4 no progress for too long, 5
another run uses the directory, 74 a checkpoint or another file could not be saved, 75 saved on a signal or another
process was lost (rerun the command to resume), 1 an exception in code: in yours if the message says so, in t5x_lite if
there is a traceback.
"""


class Program(NamedTuple):
  """Program that `main` runs.

  Attributes:
    package: package of the program. Messages start with its name; errors of files that it opens are input errors.
    call: words before the command on a command line.
    commands: commands by name, in the order of `--help`.
    description: one sentence for `--help`.
    epilog: end of `--help`; `{commands}` is replaced by a table of the commands.
  """

  package: types.ModuleType
  call: str
  commands: Mapping[str, Command]
  description: str
  epilog: str

  @property
  def name(self) -> str:
    """Beginning of messages."""
    return self.package.__name__


T5X_LITE = Program(
  package=t5x_lite,
  call='t5x_lite',
  commands=COMMANDS,
  epilog=_EPILOG,
  description='Train T5-like models on JAX, configured by gin files.',
)


class _Parser(argparse.ArgumentParser):
  """Raises errors as `ConfigError`; argparse would print the usage and exit."""

  def error(self, message: str) -> NoReturn:
    """See base class."""
    raise ConfigError(f'{capitalized(message)}. See {self.prog} --help.')


class _ShowVersions(argparse.Action):
  """Prints the versions that a bug report needs, and ends the program."""

  def __call__(self, parser, namespace, values, option_string=None) -> NoReturn:
    """See base class."""
    from t5x_lite.command_line import (
      versions,  # Reading metadata takes longer than the rest of a start.
    )

    print(versions.describe())
    parser.exit()


def main(argv: Sequence[str] | None = None, program: Program = T5X_LITE) -> int:
  """Run a command line and return the exit status.

  Args:
    argv: arguments without the program's name; default: those of the process.
    program: the program.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  standard_streams.open_closed_descriptors()
  standard_streams.escape_what_ascii_lacks()
  standard_streams.discard_unwritten_at_exit()
  # Standard error never has results; commands without results on standard output protect that too.
  with standard_streams.lossy_output('stderr'):
    try:
      with _plain_messages(argv) as handler, _interrupts_that_are_not_lost():
        status = int(_run(argv, program, handler))
      if sys.stdout is not None:
        sys.stdout.flush()  # A result that cannot be written is an error.
    except (Exception, KeyboardInterrupt, SystemExit) as error:
      status = _end(error, argv, program)
      if status is None:
        raise
    return status


def _end(error: BaseException, argv: Sequence[str], program: Program) -> int | None:
  """Print how an error ends the command, and return the exit status; None for an error that Python prints.

  Of errors that all processes of a run have, only one is printed.
  """
  monitor = sys.modules.get('t5x_lite.runtime.monitor')  # JAX need not be imported.
  monitor = monitor and monitor.current_monitor()
  if monitor is not None:
    if not isinstance(error, StoppedOnSignalError) or not monitor.stops.has_agreed:
      return monitor.report(error).status
    ending = monitor.describe_fn(error)
    if monitor.process == 0:
      ending.show()
    return ending.status
  # The broken pipe may be another one, e.g. of a data source.
  if isinstance(error, BrokenPipeError) and standard_streams.reader_is_gone(sys.stdout):
    return int(ExitCode.OK)
  ending = _ending(error, argv, program)
  if ending.is_defect or isinstance(error, SystemExit):
    return None
  ending.show()
  return ending.status


def _ending(
  error: BaseException, argv: Sequence[str], program: Program, process: int | None = None
) -> Ending:
  """Return how an error ends the command, in one of several processes of a run if it has an index."""
  from t5x_lite.command_line import errors as cli_errors

  return cli_errors.ending(
    error, name=program.name, own_paths=_own_paths(program), argv=argv, process=process
  )


@contextlib.contextmanager
def _interrupts_that_are_not_lost() -> Iterator[None]:
  """Context within which Ctrl-C always raises KeyboardInterrupt.

  Python discards exceptions in destructors and in callbacks of weak references and of the garbage collector, of which
  JAX has one. If it discards a KeyboardInterrupt there, the signal is sent again.
  """
  before = sys.unraisablehook

  def send_again(discarded: 'sys.UnraisableHookArgs') -> None:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not issubclass(discarded.exc_type, KeyboardInterrupt):
      before(discarded)
      return
    while True:
      try:
        _interrupt_soon()
        break
      except KeyboardInterrupt:
        continue  # The signal came already here, where it is discarded, too.
      except RuntimeError:
        break  # Python ends, and starts no more threads.

  sys.unraisablehook = send_again
  try:
    yield
  finally:
    if sys.unraisablehook is send_again:  # Orbax installs a hook that calls this one.
      sys.unraisablehook = before


def _interrupt_soon() -> None:
  """Send SIGINT to this thread, the main one, by another thread, until its handler is called.

  One signal may be too few. One that arrives while this thread passes Python's lock to the other is noticed only after
  the next call, and interrupts no call that waits.
  """
  handler = signal.getsignal(signal.SIGINT)
  if not callable(handler):  # It is ignored by now.
    return
  thread = threading.get_ident()
  is_noticed = threading.Event()

  def handle(number: int, frame: types.FrameType | None) -> object:
    is_noticed.set()
    signal.signal(number, handler)
    return handler(number, frame)

  def send() -> None:
    while not is_noticed.wait(0.1) and signal.getsignal(signal.SIGINT) is handle:
      signal.pthread_kill(thread, signal.SIGINT)

  signal.signal(signal.SIGINT, handle)
  threading.Thread(target=send, daemon=True).start()


def run_program(may_restart: bool = False) -> NoReturn:
  """Run the command line of this process and end the process, even if a stalled data source blocks a thread.

  Modules that a configuration names may be in the current folder, and may import `t5x`.

  Args:
    may_restart: True if the process has done nothing else; it then begins by `runtime.restart_in_utf8`, and commands
      that compute by `runtime.restart_with_huge_pages`.
  """
  if may_restart:
    runtime.restart_in_utf8()
    if sys.argv[1:2] and sys.argv[1] in _COMPUTING:
      runtime.restart_with_huge_pages()
  runtime.compile_faster()
  # Imports and traces create a million objects that stay; the default threshold is 700. Arrays that `convert` has read
  # are in reference cycles, of which the default keeps few.
  if sys.argv[1:2] != ['convert']:
    gc.set_threshold(50_000, 10, 10)
  folder = ''
  with contextlib.suppress(FileNotFoundError):  # The current folder was deleted.
    folder = '' if sys.flags.safe_path else os.getcwd()
  if (
    folder and sys.path[0] == folder and sys.modules['__main__'].__spec__ is not None
  ):  # of `python -m`
    sys.path.append(sys.path.pop(0))
  compat.set_up_process(folder)
  try:
    status = main()
  except Exception as error:  # Of this package's code.
    ending = _ending(error, sys.argv, T5X_LITE)
    ending.show()
    status = ending.status
  if 't5x_lite.runtime.cluster' in sys.modules:
    sys.modules['t5x_lite.runtime.cluster'].end(status)
  # Python would wait for threads of a stalled source, of a run that ended while its step was compiled, and for what a
  # tracker that does not answer has started. Everything else is closed.
  names = [thread.name for thread in threading.enumerate()]
  if any(name.startswith(_ABANDONED_THREADS) for name in names):
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()
    os._exit(status)
  sys.exit(status)


def _own_paths(program: Program) -> list[str]:
  """Return the files and folders of the program's code; other code that is not installed belongs to the user."""
  folder = os.path.dirname(t5x_lite.__file__)
  # Installed with t5x_lite, which never imports it.
  moe = os.path.join(os.path.dirname(folder), 'moe')
  paths = [folder, moe, os.path.dirname(str(program.package.__file__))]
  for command in program.commands.values():
    code = getattr(command.run, '__code__', None)
    if code is not None:
      paths.append(code.co_filename)
  return paths


def _run(argv: Sequence[str], program: Program, handler: logging.Handler) -> int:
  if not argv:
    _parser(argv, program).print_help()
    return ExitCode.INVALID_INPUT
  try:
    invocation = parse(argv, program)
  except SystemExit as stop:  # After --help and --version.
    return int(stop.code or 0)
  if os.environ.get('XLA_FLAGS'):
    from t5x_lite.command_line import platform as cli_platform

    cli_platform.check_xla_flags()
  flags = invocation.flags
  loggers = _set_log(handler, flags)
  with contextlib.ExitStack() as stack:
    if getattr(flags, 'log_dir', None):
      stack.enter_context(_log_file(flags.log_dir, invocation.command, loggers, argv))
    if flags.log_level == 'debug':
      stack.enter_context(runtime.log_compilations())
    return program.commands[invocation.command].run(invocation)


def parse(argv: Sequence[str], program: Program = T5X_LITE) -> Invocation:
  """Parse a command line.

  Args:
    argv: arguments without the program's name, beginning with a command.
    program: the program.

  Raises:
    ConfigError: the command, a flag or an argument is unknown.
    SystemExit: `--help` or `--version` was printed.
  """
  if not argv[0].startswith('-') and argv[0] not in program.commands:
    if argv[0] == 'moe' and argv[0] != program.name:
      hint = f' Did you mean `python -m {shlex.join(argv)}`?'
    elif argv[0].endswith('.gin'):
      call = shlex.join([*program.call.split(), 'train', f'--gin_file={argv[0]}', *argv[1:]])
      hint = f' Did you mean `{call}`?'
    else:
      hint = did_you_mean(argv[0], program.commands)
    raise ConfigError(f'{argv[0]!r} is not a command.{hint}')
  position = next((i for i, word in enumerate(argv) if word in program.commands), 0)
  if position and argv[0] not in ('-h', '--help', '--version'):
    call = shlex.join(
      [*program.call.split(), argv[position], *argv[:position], *argv[position + 1 :]]
    )
    raise ConfigError(
      f'{argv[0]} must be after the command {argv[position]}. Did you mean `{call}`?'
    )
  if argv[0].startswith('--gin') and 'train' in program.commands:
    call = shlex.join([*program.call.split(), 'train', *argv])
    raise ConfigError(f'The command is missing. Did you mean `{call}`?')
  whole = argv

  def describe_error(process: int, error: BaseException) -> Ending:
    return _ending(error, whole, program, process)

  command = program.commands.get(argv[0])
  others = []
  passes_on = command is not None and command.passes_on
  if passes_on and '--' in argv:
    end = argv.index('--')
    others = argv[end + 1 :]
    argv = argv[:end]
  jax_flags = []
  if command is not None and command.entry is not None:
    argv = [argv[0], *cli_flags.expand_flagfiles(argv[1:])]
    jax_flags = [argument for argument in argv if cli_flags.is_jax_flag(argument)]
  parser = _parser(argv, program)
  options = _options(parser, argv[0])
  argv = cli_flags.plain([argument for argument in argv if argument not in jax_flags], options)
  gin_flags = [argument for argument in argv if argument.startswith(('--gin.', '--gin_bindings'))]
  # Not parsed by argparse, which would lose the order of both kinds.
  arguments, unknown = parser.parse_known_args(
    [argument for argument in argv if not argument.startswith(('--gin.', '--gin_bindings='))]
  )
  ignored = []
  for text in getattr(arguments, 'undefok', ()):
    ignored += filter(None, text.split(','))
  unknown = [argument for argument in unknown if not cli_flags.is_named(argument, ignored)]
  command = program.commands[arguments.command]
  if passes_on and unknown and not others:
    raise ConfigError(
      f'{unknown[0]} is not a flag of {argv[0]}. Write -- before the command that it starts, e.g. '
      f'`{program.call} {argv[0]} -n 2 -- train {unknown[0]}`.'
    )
  incomplete = next((f for f in gin_flags if f.startswith('--gin.') and '=' not in f), None)
  if unknown:
    problem = _unknown_argument(unknown[0], argv, program, options)
  else:
    problem = ''
  if incomplete is not None:
    value = cli_flags.value_after(incomplete, argv) or 'VALUE'
    complete = gin_flag(incomplete.removeprefix('--gin.'), value)
    problem = f'{incomplete} requires a value. Write {complete}.'
  elif gin_flags and command.entry is None:
    problem = f'{gin_flags[0]}: {arguments.command} has no gin configuration. Remove the flag.'
  if problem:
    raise ConfigError(problem)
  if others and others[0] in program.commands:
    # A command of this program is started like this process.
    own = [sys.executable, '-m', program.name]
    if sys.flags.safe_path:
      own.insert(1, '-P')
    others = [*own, *others]
  values = dict(vars(arguments))
  if others:
    values['others'] = others
  return make_invocation(
    values,
    entry=command.entry,
    gin_flags=gin_flags,
    jax_flags=jax_flags,
    describe_error=describe_error,
  )


def _options(parser: argparse.ArgumentParser, command: str) -> Mapping[str, argparse.Action]:
  """Return argparse's actions of a command by flag; empty if there is no such command."""
  sub = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
  if command in sub.choices:
    return sub.choices[command]._option_string_actions
  return {}


def _unknown_argument(
  argument: str, argv: Sequence[str], program: Program, options: Collection[str]
) -> str:
  """Return the message for an argument that a command does not have.

  Args:
    argument: the argument.
    argv: the entire command line, beginning with the command.
    program: the program.
    options: flags of the command.
  """
  command = argv[0]
  has_gin = program.commands[command].entry is not None
  if not argument.startswith('-'):
    problem = f'{command} does not accept the argument {argument!r}.'
    remedy = ''
    if has_gin:
      remedy = cli_flags.with_dashes(argument, options)
    if remedy:
      problem += f' Did you mean {remedy}?'
    return problem
  flag, equals, value = argument.partition('=')
  if not equals:
    value = cli_flags.value_after(flag, argv)
  if command == 'export' and flag in ('--to', '--format'):
    from t5x_lite.apps.convert import formats  # Only errors need it.

    format_name = formats.other_names().get(value.lower(), value)
    if format_name not in formats.FORMATS:
      format_name = 'hugging_face'
    run = argv[1] if argv[1:2] and not argv[1].startswith('-') else 'runs/my_run'
    convert = [*program.call.split(), 'convert', run, f'{run.rstrip("/")}_{format_name}']
    return (
      f'export has no flag {flag}: it writes programs. To write parameters in another format, write '
      f'`{shlex.join([*convert, f"--to={format_name}"])}`.'
    )
  if flag.startswith(('-gin.', '--gin-', '-gin_')) or (flag.startswith('--gin') and '.' in flag):
    problem = f'{command} has no flag {flag}.'
    remedy = cli_flags.with_dashes(
      f'{flag.lstrip("-").replace("gin-", "gin.", 1)}={value}', options
    )
    if value and remedy:
      return f'{problem} Did you mean {remedy}?'
    return f'{problem} Write --gin.NAME=VALUE for a value and --gin_file=FILE for a file.'
  if has_gin and cli_flags.remedy(flag):
    return f'{command} has no flag {flag}. {cli_flags.remedy(flag)}'
  known = [name for name in options if name.startswith('--')]
  name = cli_flags.gin_name(flag) if has_gin else ''
  if name:
    hint = f' Did you mean {gin_flag(name, value or "VALUE")}?'
  else:
    hint = did_you_mean(flag, known, lists_all=not has_gin)
  if not hint:
    hint = f' Values are set by --gin.NAME=VALUE, files by --gin_file=FILE; {command} --help lists the flags.'
  return f'{command} has no flag {flag}.{hint}'


def _parser(argv: Sequence[str], program: Program) -> argparse.ArgumentParser:
  shape = {
    'formatter_class': lambda prog: argparse.RawDescriptionHelpFormatter(
      prog, max_help_position=30, width=110
    ),
    'allow_abbrev': False,
  }
  # argparse's table breaks lines after long names.
  width = max(map(len, program.commands)) + 2
  rows = [f'  {name:<{width}}{command.help}' for name, command in program.commands.items()]
  table = '\n'.join(rows)
  parser = _Parser(
    prog=program.call,
    usage=f'{program.call} COMMAND ...',
    description=program.description,
    epilog=program.epilog.format(commands=table),
    **shape,
  )
  parser.add_argument(
    '--version',
    action=_ShowVersions,
    nargs=0,
    help='show the versions of t5x_lite and its libraries',
  )
  commands = parser.add_subparsers(
    dest='command', metavar='COMMAND', required=True, prog=program.call, help=argparse.SUPPRESS
  )
  for name, command in program.commands.items():
    description = f'{capitalized(command.help)}.'
    sub = commands.add_parser(name, description=description, **shape)
    if argv and argv[0] == name:
      command.add_arguments(sub)
    add_shared_arguments(sub)
  return parser


# ----------------------------------------------------------------------------------------------------------------------
# Log lines and warnings


@contextlib.contextmanager
def _plain_messages(argv: Sequence[str]) -> Iterator[logging.Handler]:
  """Show log lines and warnings of this package as plain lines, and suppress those of third parties.

  Environment variables of the user are kept. Afterwards, logging and warnings are as before.

  Args:
    argv: command line, whose secrets are masked.

  Yields:
    The handler that writes the log lines to standard error.
  """
  for name, value in _QUIET_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  handler = logging.StreamHandler()
  handler.setFormatter(_Formatter(argv))
  ours = _our_loggers()
  propagated = [logger.propagate for logger in ours]
  levels = _logger_levels()
  root_level = logging.root.level
  last_resort, logging.lastResort = logging.lastResort, handler  # for packages that set up no log
  with warnings.catch_warnings():
    warnings.showwarning = _show_warning
    if not sys.warnoptions:
      warnings.filterwarnings('ignore', module=rf'({"|".join(_NOISY_MODULES)})(\.|$)')
    for name in _NOISY_LOGGERS:
      if logging.getLogger(name).level == logging.NOTSET:
        logging.getLogger(name).setLevel(logging.ERROR)
    for logger in ours:
      logger.setLevel(logging.INFO)
      logger.propagate = False
      logger.addHandler(handler)
    try:
      yield handler
    finally:
      for logger, propagate in zip(ours, propagated, strict=True):
        logger.removeHandler(handler)
        logger.propagate = propagate
      logging.root.removeHandler(handler)
      logging.root.setLevel(root_level)
      logging.lastResort = last_resort
      for name in _logger_levels():
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


def _set_log(handler: logging.Handler, flags: Any) -> list[logging.Logger]:
  """Set levels of log lines by flags, and return the loggers whose lines are shown.

  Raises:
    ConfigError: `--showprefixforinfo` is true.
  """
  loggers = _our_loggers()
  for logger in loggers:
    logger.setLevel(flags.log_level.upper())
  if getattr(flags, 'showprefixforinfo', False):
    raise ConfigError(
      '--showprefixforinfo must be false. Write --log_dir for a file of lines with time and place.'
    )
  if not getattr(flags, 'alsologtostderr', False):
    handler.setLevel(getattr(flags, 'stderrthreshold', logging.NOTSET))
  if levels := getattr(flags, 'logger_levels', {}):
    logging.root.addHandler(handler)
    loggers.append(logging.root)
  for name, level in levels.items():
    logging.getLogger(name).setLevel(level)
  return loggers


class _LogFile(logging.FileHandler):
  """Handler that writes to a file, and not through a link."""

  def _open(self) -> io.TextIOWrapper:
    from t5x_lite.storage import files

    return open(
      self.baseFilename,
      'a',
      encoding=self.encoding,
      errors=self.errors,
      opener=files.open_regular,
    )


@contextlib.contextmanager
def _log_file(
  folder: str, command: str, loggers: Sequence[logging.Logger], argv: Sequence[str]
) -> Iterator[None]:
  """Also write log lines, and the exception that ends the command, to a file in `folder` for each process.

  Secrets of the command line `argv` are masked.

  Raises:
    ConfigError: the file cannot be written.
  """
  path = os.path.join(
    os.path.expanduser(folder), f'{command}.{os.uname().nodename}.{os.getpid()}.log'
  )
  try:
    if '://' in folder:
      raise OSError('it is in an object store')
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handler = _LogFile(path, encoding='utf-8', errors='surrogateescape')
  except OSError as error:
    raise ConfigError(
      f'--log_dir must be a local folder that can be written, got {folder!r}: '
      f'{error.strerror or error}.'
    ) from error
  handler.setFormatter(
    _PrintableFormatter(argv, '%(asctime)s %(levelname)s %(filename)s:%(lineno)d] %(message)s')
  )
  for logger in loggers:
    logger.addHandler(handler)
  try:
    yield
  except BaseException as error:
    handler.handle(
      logging.LogRecord(
        't5x_lite',
        logging.ERROR,
        __file__,
        0,
        'The command ended with %s.',
        (type(error).__name__,),
        (type(error), error, error.__traceback__),
      )
    )
    raise
  finally:
    for logger in loggers:
      logger.removeHandler(handler)
    handler.close()


def _our_loggers() -> list[logging.Logger]:
  return [logging.getLogger('t5x_lite'), logging.getLogger('moe')]


def _logger_levels() -> dict[str, int]:
  loggers = logging.root.manager.loggerDict.items()
  return {
    name: logger.level for name, logger in list(loggers) if isinstance(logger, logging.Logger)
  }


class _PrintableFormatter(logging.Formatter):
  """Escapes control characters in records, whose texts may come from files and processes, and masks secrets."""

  def __init__(self, argv: Sequence[str], layout: str | None = None):
    """Store the command line, whose secrets are masked, and the layout of a line."""
    super().__init__(layout)
    self._argv = argv

  def format(self, record: logging.LogRecord) -> str:
    """See base class."""
    return printable(masking.masked_text(super().format(record), self._argv), keeps_lines=True)


class _Formatter(_PrintableFormatter):
  """Formats records as plain lines; warnings and errors have their level in front.

  In a run, `runtime.Progress` sets the attribute `prefix` of records.
  """

  def format(self, record: logging.LogRecord) -> str:
    """See base class."""
    if record.levelno < logging.WARNING:
      level = ''
    else:
      level = f'{record.levelname.lower()}: '
    return f'{getattr(record, "prefix", "")}{level}{super().format(record)}'


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
  del category, file, line
  logging.getLogger('t5x_lite').warning('%s (%s:%d)', message, os.path.basename(filename), lineno)
