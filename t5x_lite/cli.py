"""The command line: `t5x_lite COMMAND ...`, the same program as `python -m t5x_lite` and `python scripts/COMMAND.py`.

Packages on top of t5x_lite have programs of the same manners: they pass a `Program` to `main`.

Nothing heavy is imported before the command line and the gin files have been read and found sound. Every error that
this package raises on purpose becomes one message and its exit status (`errors.ExitCode`); anything else keeps its
traceback.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import logging
import os
import sys
import sysconfig
import traceback
import types
from typing import NoReturn
import warnings

import t5x_lite
from t5x_lite.commands import COMMANDS, Command
from t5x_lite.errors import ConfigError, ExitCode, T5xLiteError, did_you_mean

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
progress, 5 another run holds the directory, 75 saved on a signal (run the same command again), 1 an error in the code.
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
  debug = '--debug' in argv or os.environ.get('T5X_LITE_DEBUG', '0') not in ('', '0')
  try:
    with _plain_messages():
      return int(_run(argv, program))
  except T5xLiteError as error:
    if debug:
      traceback.print_exc()
    kind = '' if error.exit_code == ExitCode.SAVED_ON_SIGNAL else 'error: '
    print(f'{program.name}: {kind}{_message(error)}', file=sys.stderr)
    return int(error.exit_code)
  except KeyboardInterrupt:
    print(f'{program.name}: interrupted.', file=sys.stderr)
    return 130  # as shells report a process that SIGINT ended
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second complaint when Python flushes
    return int(ExitCode.OK)
  except OSError as error:
    if not _is_about_our_files(error, program):
      raise
    if debug:
      traceback.print_exc()
    where = f'{os.fspath(error.filename)!r}: ' if error.filename is not None else ''
    print(f'{program.name}: error: {where}{error.strerror}. Make room or change what stands there, and run the same '
          'command again; --debug shows more.', file=sys.stderr)
    return int(ExitCode.REFUSED)


def _is_about_our_files(error: OSError, program: Program) -> bool:
  """Whether a file or a folder of the run, not one that a user's own code opens, is the matter."""
  ours = tuple(os.path.dirname(package.__file__) + os.sep for package in (t5x_lite, program.package))
  theirs = (sysconfig.get_path('stdlib') + os.sep, sysconfig.get_path('purelib') + os.sep + 'tensorboardX', '<')
  files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
  while files and files[-1].startswith(theirs) and not files[-1].startswith(ours):
    files.pop()
  return error.strerror is not None and bool(files) and files[-1].startswith(ours)


def _message(error: T5xLiteError) -> str:
  if 'gin' not in sys.modules:
    return str(error)
  from t5x_lite import gin_utils
  return gin_utils.plain_message(error)


def _run(argv: Sequence[str], program: Program) -> int:
  if not argv:
    _parser(program).print_help()
    return ExitCode.REFUSED
  try:
    arguments = parse(argv, program)
  except SystemExit as stop:  # --help and --version
    return int(stop.code or 0)
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
  table = '\n'.join(f'  {name:<18}{command.help}' for name, command in program.commands.items())
  parser = _Parser(prog=program.call, usage=f'{program.call} COMMAND ...', description=program.description,
                   epilog=program.epilog.format(commands=table), **shape)
  parser.add_argument('--version', action='version', version=f't5x_lite {t5x_lite.__version__}')
  commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True, prog=program.call,
                                   help=argparse.SUPPRESS)
  for name, command in program.commands.items():
    description = command.help[0].upper() + command.help[1:] + '.'
    sub = commands.add_parser(name, description=description, **shape)
    command.add_arguments(sub)
    sub.add_argument('--debug', action='store_true', help='show the traceback of a refused configuration too')
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
      for logger, propagate in zip(ours, propagated):
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
