"""The command line: `t5x_lite COMMAND ...`, the same program as `python -m t5x_lite` and the scripts of a checkout.

Packages on top of t5x_lite have programs of the same manners: they pass a `Program` to `main`.

Nothing heavy is imported before the command line and the gin files have been read and found sound. Every error that
this package raises on purpose becomes one message and its exit status (`errors.ExitCode`), as does what a user's own
code raises (`cli_errors`); anything else keeps its traceback.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import traceback
import types
from typing import NoReturn
import warnings

import t5x_lite
from t5x_lite import cli_errors
from t5x_lite import cli_platform
from t5x_lite import standard_streams
from t5x_lite.apps.commands import COMMANDS
from t5x_lite.apps.common.flags import Command
from t5x_lite.errors import ConfigError, ExitCode, did_you_mean

# Third parties that say things at start-up which no user of ours needs; errors still show.
_NOISY_LOGGERS = ('absl', 'h5py', 'jax', 'matplotlib', 'orbax', 'tensorboardX', 'tensorflow',
                  'tensorflow_datasets')
_NOISY_MODULES = ('absl', 'clu', 'etils', 'flax', 'google', 'h5py', 'jax', 'keras', 'numpy', 'optax', 'orbax', 'seqio',
                  't5', 'tensorboardX', 'tensorflow', 'tensorflow_datasets', 'tree')
# Read by TensorFlow, XLA and gRPC when they are first imported.
_QUIET_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3', 'GRPC_VERBOSITY': 'ERROR', 'ABSL_MIN_LOG_LEVEL': '3',
                      'TF_ENABLE_ONEDNN_OPTS': '0'}
_EPILOG = """\
commands (each has a --help of its own):
{commands}

a first run, from the files that come with t5x_lite:
  t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze

exit status: 0 done, 2 configuration or input refused, 3 stopped on a number that is not finite, 4 the watchdog saw no
progress, 5 another run holds the directory, 74 the newest state or another file could not be saved, 75 saved on a
signal (run the same command again), 1 an exception in code: yours where the message shows it, ours where a traceback
does.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """What tells one program from another; all else of a command line is the same.

  Attributes:
    package: whose program it is. Messages start with its name; errors of files that it opens are the user's to mend.
    call: what a person types before the command.
    commands: name to command, in the order in which `--help` lists them.
    description: one sentence for `--help`.
    epilog: what `--help` ends with; `{commands}` in it becomes a table of the commands.
  """

  package: types.ModuleType
  call: str
  commands: Mapping[str, Command]
  description: str
  epilog: str

  @property
  def name(self) -> str:
    """What messages start with."""
    return self.package.__name__


T5X_LITE = Program(package=t5x_lite, call='t5x_lite', commands=COMMANDS, epilog=_EPILOG,
                   description='Train T5-like models on JAX, configured by gin files.')


class _Parser(argparse.ArgumentParser):
  """Reports errors as ours; argparse would print the usage and exit."""

  def error(self, message: str) -> NoReturn:
    """See base class."""
    raise ConfigError(f'{message[0].upper()}{message[1:]}. See {self.prog} --help.')


def main(argv: Sequence[str] | None = None, program: Program = T5X_LITE) -> int:
  """Runs a command line and returns the exit status.

  Args:
    argv: arguments without the program's name; None takes the process's.
    program: whose command line it is.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  standard_streams.open_closed_descriptors()
  standard_streams.discard_unwritten_at_exit()
  # Standard error is never a result; commands whose standard output is none either protect it too.
  with standard_streams.lossy_output('stderr'):
    try:
      with _plain_messages(), _interrupts_that_are_not_lost():
        status = int(_run(argv, program))
      if sys.stdout is not None:
        sys.stdout.flush()  # a result that cannot be written is an error
    except KeyboardInterrupt:
      print(f'{program.name}: interrupted.', file=sys.stderr)
      status = 130  # as shells report a process that SIGINT ended
    except Exception as error:
      status = _report(error, argv, program)
      if status is None:
        raise
    return status


@contextlib.contextmanager
def _interrupts_that_are_not_lost() -> Iterator[None]:
  """Context within which Ctrl-C always raises KeyboardInterrupt.

  Python discards exceptions of destructors and of callbacks of weak references and of the garbage collector, of which
  JAX has one: where it discards a KeyboardInterrupt, the signal is sent again.
  """
  before = sys.unraisablehook

  def send_again(discarded: 'sys.UnraisableHookArgs') -> None:
    if issubclass(discarded.exc_type, KeyboardInterrupt):
      threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
      before(discarded)

  sys.unraisablehook = send_again
  try:
    yield
  finally:
    if sys.unraisablehook is send_again:  # Orbax, once imported, has a hook of its own that calls this one
      sys.unraisablehook = before


def run_program() -> NoReturn:
  """Runs the command line of this process and ends the process, also if a stalled data source holds a thread."""
  try:
    status = main()
  except Exception:  # an error of our own code
    traceback.print_exc()
    status = 1
  # Python would wait for the threads of the source, which wait for ever. The run has closed everything else.
  if any(thread.name.startswith('t5x_lite-data') for thread in threading.enumerate()):
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(AttributeError, OSError, ValueError):
        stream.flush()
    os._exit(status)
  sys.exit(status)


def _report(error: Exception, argv: Sequence[str], program: Program) -> int | None:
  """Prints what an error means for people and returns the exit status; None for an error of our own code."""
  # The pipe may be another one, e.g. of a data source.
  if isinstance(error, BrokenPipeError) and standard_streams.reader_is_gone(sys.stdout):
    return int(ExitCode.OK)
  report = cli_errors.report(error, _own_paths(program))
  if report is None:
    return None
  if '--debug' in argv or os.environ.get('T5X_LITE_DEBUG', '0') not in ('', '0'):
    traceback.print_exc()
  print(f'{program.name}: {report.message}', file=sys.stderr)
  return int(report.exit_code)


def _own_paths(program: Program) -> list[str]:
  """Return the files and folders of the program's code; any other code that is not installed is the user's."""
  folder = os.path.dirname(t5x_lite.__file__)
  moe = os.path.join(os.path.dirname(folder), 'moe')  # comes with t5x_lite, which never imports it
  codes = [getattr(command.run, '__code__', None) for command in program.commands.values()]
  files = [code.co_filename for code in codes if code is not None]
  return [folder, moe, os.path.dirname(program.package.__file__), *files]


def _run(argv: Sequence[str], program: Program) -> int:
  if not argv:
    _parser(program).print_help()
    return ExitCode.REFUSED
  try:
    arguments = parse(argv, program)
  except SystemExit as stop:  # --help and --version
    return int(stop.code or 0)
  cli_platform.check_xla_flags()
  return program.commands[arguments.command].run(arguments)


def parse(argv: Sequence[str], program: Program = T5X_LITE) -> argparse.Namespace:
  """Parses a command line.

  Args:
    argv: arguments without the program's name, a command first.
    program: whose command line it is.

  Returns:
    The command's own arguments, with `command`, `entry` (see `commands.Command`) and `gin_flags`, the flags of the form
    `--gin.NAME=VALUE`.

  Raises:
    ConfigError: an unknown command, flag or argument.
    SystemExit: after `--help` or `--version` has been printed.
  """
  if not argv[0].startswith('-') and argv[0] not in program.commands:
    raise ConfigError(f'No command {argv[0]!r}.{did_you_mean(argv[0], program.commands)}')
  gin_flags = [argument for argument in argv if argument.startswith(('--gin.', '--gin_bindings'))]
  arguments, unknown = _parser(program).parse_known_args([a for a in argv if not a.startswith('--gin.')])
  command = program.commands[arguments.command]
  incomplete = next((f for f in gin_flags if f.startswith('--gin.') and '=' not in f), None)
  if incomplete is not None:
    raise ConfigError(f'{incomplete}: a value is missing. Write {incomplete}=VALUE.')
  if gin_flags and command.entry is None:
    raise ConfigError(f'{gin_flags[0]}: {arguments.command} reads no gin configuration. Leave the flag out.')
  if unknown:
    raise ConfigError(_unknown_argument(unknown[0], arguments.command, program))
  arguments.entry = command.entry
  arguments.gin_flags = [argument for argument in argv if argument.startswith('--gin.')]
  return arguments


def _unknown_argument(argument: str, command: str, program: Program) -> str:
  if not argument.startswith('-'):
    name, equals, _ = argument.partition('=')
    remedy = (f'--gin_file={argument}' if argument.endswith('.gin') else
              f'--gin.{argument}' if equals and name.isidentifier() else '')
    return f'{command} takes no argument {argument!r}.' + (f' Did you mean {remedy}?' if remedy else '')
  flag = argument.partition('=')[0]
  sub = next(action for action in _parser(program)._actions if isinstance(action, argparse._SubParsersAction))
  known = [name for name in sub.choices[command]._option_string_actions if name.startswith('--')]
  if flag.startswith(('-gin.', '--gin-', '-gin_')) or (flag.startswith('--gin') and '.' in flag):
    return f'{command} has no flag {flag}. Write --gin.NAME=VALUE for a value and --gin_file=FILE for a file.'
  return f'{command} has no flag {flag}.{did_you_mean(flag, known)}'


def _parser(program: Program) -> argparse.ArgumentParser:
  shape = {'formatter_class': lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=110),
           'allow_abbrev': False}
  # argparse's own listing breaks lines after long names.
  width = max(map(len, program.commands)) + 2
  table = '\n'.join(f'  {name:<{width}}{command.help}' for name, command in program.commands.items())
  parser = _Parser(prog=program.call, usage=f'{program.call} COMMAND ...', description=program.description,
                   epilog=program.epilog.format(commands=table), **shape)
  parser.add_argument('--version', action='version', version=f't5x_lite {t5x_lite.__version__}')
  commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True, prog=program.call,
                                   help=argparse.SUPPRESS)
  for name, command in program.commands.items():
    description = command.help[0].upper() + command.help[1:] + '.'
    sub = commands.add_parser(name, description=description, **shape)
    command.add_arguments(sub)
    sub.add_argument('--debug', action='store_true', help='show the whole traceback of every error')
  return parser


# ----------------------------------------------------------------------------------------------------------------------
# What a person sees


@contextlib.contextmanager
def _plain_messages() -> Iterator[None]:
  """Shows log lines and warnings of ours plainly, one line each, and no chatter of third parties.

  What the user has set in the environment stays. On leaving, logging and warnings are as before.
  """
  for name, value in _QUIET_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  handler = logging.StreamHandler()
  handler.setFormatter(_Formatter())
  ours = [logging.getLogger('t5x_lite'), logging.getLogger('moe')]
  propagated = [logger.propagate for logger in ours]
  levels = _logger_levels()
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
      yield
    finally:
      for logger, propagate in zip(ours, propagated, strict=True):
        logger.removeHandler(handler)
        logger.propagate = propagate
      for name in _logger_levels():
        logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))


def _logger_levels() -> dict[str, int]:
  loggers = logging.root.manager.loggerDict.items()
  return {name: logger.level for name, logger in list(loggers) if isinstance(logger, logging.Logger)}


class _Formatter(logging.Formatter):
  """Plain lines; what is more than information says so."""

  def format(self, record: logging.LogRecord) -> str:
    """See base class."""
    text = super().format(record)
    return text if record.levelno < logging.WARNING else f'{record.levelname.lower()}: {text}'


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
  del category, line
  print(f'warning: {message} ({os.path.basename(filename)}:{lineno})', file=file or sys.stderr)
