"""The command line: `t5x_lite COMMAND ...`, the same program as `python -m t5x_lite` and `python scripts/COMMAND.py`.

Nothing heavy is imported before the command line and the gin files have been read and found sound. Every error that
this package raises on purpose becomes one message and its exit status (`errors.ExitCode`); anything else keeps its
traceback.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import logging
import os
import sys
import sysconfig
import traceback
from typing import Any, NoReturn
import warnings

import t5x_lite
from t5x_lite.errors import ConfigError, ExitCode, T5xLiteError, did_you_mean

# Third parties that say things at start-up which no user of ours needs; errors still show.
_NOISY_LOGGERS = ('absl', 'h5py', 'jax', 'matplotlib', 'orbax', 'tensorboardX', 'tensorflow',
                  'tensorflow_datasets')
_NOISY_MODULES = ('absl', 'clu', 'etils', 'flax', 'google', 'h5py', 'jax', 'keras', 'numpy', 'optax', 'orbax', 'seqio',
                  't5', 'tensorboardX', 'tensorflow', 'tensorflow_datasets', 'tree')
# Read by TensorFlow, XLA and gRPC when they are first imported.
_QUIET_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3', 'GRPC_VERBOSITY': 'ERROR', 'ABSL_MIN_LOG_LEVEL': '3'}
_EPILOG = """\
commands (each has a --help of its own):
{commands}

a first run, from the files that come with t5x_lite:
  t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze

exit status: 0 done, 2 configuration or input refused, 3 stopped on a number that is not finite, 4 the watchdog saw no
progress, 5 another run holds the directory, 75 saved on a signal (run the same command again), 1 an error in the code.
"""


@dataclasses.dataclass(frozen=True)
class _Command:
  """A command: one line of help, what adds its arguments, and what runs it and returns an exit status."""

  help: str
  add_arguments: Callable[[argparse.ArgumentParser], None]
  run: Callable[[argparse.Namespace], int]
  takes_gin: bool = True


class _Parser(argparse.ArgumentParser):
  """Reports errors as ours; argparse would print the usage and exit."""

  def error(self, message: str) -> NoReturn:
    """See base class."""
    raise ConfigError(f'{message[0].upper()}{message[1:]}. See {self.prog} --help.')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command line and returns the exit status.

  Args:
    argv: arguments without the program's name; None takes the process's.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  debug = '--debug' in argv or os.environ.get('T5X_LITE_DEBUG', '0') not in ('', '0')
  try:
    with _plain_messages():
      return int(_run(argv))
  except T5xLiteError as error:
    if debug:
      traceback.print_exc()
    kind = '' if error.exit_code == ExitCode.SAVED_ON_SIGNAL else 'error: '
    print(f't5x_lite: {kind}{_message(error)}', file=sys.stderr)
    return int(error.exit_code)
  except KeyboardInterrupt:
    print('t5x_lite: interrupted.', file=sys.stderr)
    return 130  # as shells report a process that SIGINT ended
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second complaint when Python flushes
    return int(ExitCode.OK)
  except OSError as error:
    if not _is_about_our_files(error):
      raise
    if debug:
      traceback.print_exc()
    where = f'{os.fspath(error.filename)!r}: ' if error.filename is not None else ''
    print(f't5x_lite: error: {where}{error.strerror}. Make room or change what stands there, and run the same command '
          'again; --debug shows more.', file=sys.stderr)
    return int(ExitCode.REFUSED)


def _is_about_our_files(error: OSError) -> bool:
  """Whether a file or a folder of the run, not one that a user's own code opens, is the matter."""
  ours = os.path.dirname(t5x_lite.__file__) + os.sep
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


def _run(argv: Sequence[str]) -> int:
  parser = _parser()
  if not argv:
    parser.print_help()
    return ExitCode.REFUSED
  if not argv[0].startswith('-') and argv[0] not in _COMMANDS:
    raise ConfigError(f'No command {argv[0]!r}.{did_you_mean(argv[0], _COMMANDS)}')
  gin_flags = [argument for argument in argv if argument.startswith(('--gin.', '--gin_bindings'))]
  try:
    arguments, unknown = parser.parse_known_args([a for a in argv if not a.startswith('--gin.')])
  except SystemExit as stop:  # --help and --version
    return int(stop.code or 0)
  command = _COMMANDS[arguments.command]
  if gin_flags and not command.takes_gin:
    raise ConfigError(f'{gin_flags[0]}: {arguments.command} reads no gin configuration. Leave the flag out.')
  if unknown:
    raise ConfigError(_unknown_argument(unknown[0], arguments.command))
  arguments.gin_flags = [argument for argument in argv if argument.startswith('--gin.')]
  return command.run(arguments)


def _unknown_argument(argument: str, command: str) -> str:
  if not argument.startswith('-'):
    name, equals, _ = argument.partition('=')
    remedy = (f'--gin_file={argument}' if argument.endswith('.gin') else
              f'--gin.{argument}' if equals and name.isidentifier() else '')
    return f'{command} takes no argument {argument!r}.' + (f' Did you mean {remedy}?' if remedy else '')
  flag = argument.partition('=')[0]
  sub = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
  known = [name for name in sub.choices[command]._option_string_actions if name.startswith('--')]
  if flag.startswith(('-gin.', '--gin-', '-gin_')) or (flag.startswith('--gin') and '.' in flag):
    return f'{command} has no flag {flag}. Write --gin.NAME=VALUE for a value and --gin_file=FILE for a file.'
  return f'{command} has no flag {flag}.{did_you_mean(flag, known)}'


def _parser() -> argparse.ArgumentParser:
  shape = {'formatter_class': lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=110),
           'allow_abbrev': False}
  # argparse's own listing breaks lines after long names.
  table = '\n'.join(f'  {name:<18}{command.help}' for name, command in _COMMANDS.items())
  parser = _Parser(prog='t5x_lite', usage='t5x_lite COMMAND ...', epilog=_EPILOG.format(commands=table), **shape,
                   description='Train T5-like models on JAX, configured by gin files.')
  parser.add_argument('--version', action='version', version=f't5x_lite {t5x_lite.__version__}')
  commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True, prog='t5x_lite',
                                   help=argparse.SUPPRESS)
  for name, command in _COMMANDS.items():
    description = command.help[0].upper() + command.help[1:] + '.'
    sub = commands.add_parser(name, description=description, **shape)
    command.add_arguments(sub)
    sub.add_argument('--debug', action='store_true', help='show the traceback of a refused configuration too')
  return parser


# ----------------------------------------------------------------------------------------------------------------------
# Commands


def _add_gin_arguments(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('configuration, applied in this order: files, then flags')
  group.add_argument('--gin_file', action='append', default=[], metavar='FILE',
                     help='a gin file; repeat the flag for more. Looked up here, in --gin_search_paths, and among the '
                     'files that come with t5x_lite, e.g. models/t5_1_1_small.gin')
  # Taken from the command line before argparse sees it; stands here for --help.
  group.add_argument('--gin.NAME', dest='_', metavar='VALUE',
                     help='set a macro (--gin.TRAIN_STEPS=1000, --gin.MODEL_DIR=runs/a) or a parameter '
                     '(--gin.train_script.train.eval_period=100)')
  group.add_argument('--gin_bindings', action='append', default=[], metavar='TEXT',
                     help="gin text, e.g. --gin_bindings='TRAIN_STEPS = 1000'")
  group.add_argument('--gin_search_paths', action='append', default=[], metavar='FOLDERS',
                     help='where to look for gin files, separated by commas')


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
  _add_gin_arguments(parser)
  parser.add_argument('--dry_run', action='store_true',
                      help='show the configuration, the parameters and how they are sharded, memory, batches and the '
                      'plan of the run; train nothing')


def _train(arguments: argparse.Namespace) -> int:
  configuration = _load('t5x_lite.apps.train.train', arguments)
  if arguments.dry_run:
    print(configuration.text)
    configuration.call(dry_run=True)
  else:
    configuration.call()
  return ExitCode.OK


def _add_plot_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('runs', nargs='+', metavar='RUN', help='model directory; several are drawn together')
  parser.add_argument('--out', metavar='FILE', help='what to write, .png, .svg or .pdf; by default RUN/metrics.png')
  parser.add_argument('--metric', action='append', metavar='NAME',
                      help='a name as in metrics.jsonl; repeat the flag for more. By default loss, accuracy, learning '
                      'rate and what decoding measured')


def _plot(arguments: argparse.Namespace) -> int:
  from t5x_lite.apps import plot
  print(plot.plot(arguments.runs, arguments.out, arguments.metric))
  return ExitCode.OK


def _add_explain_sharding_arguments(parser: argparse.ArgumentParser) -> None:
  _add_gin_arguments(parser)
  parser.add_argument('--num_devices', type=int, metavar='N',
                      help='suppose N devices (at most 2048) instead of those of this machine')
  parser.add_argument('--full', action='store_true', help='one line per array; otherwise equal layers share a line')


# Required values that decide nothing about shardings.
_SHARDING_STAND_INS = {
    'MIXTURE_OR_TASK_NAME': "'none'", 'TASK_FEATURE_LENGTHS': "{'inputs': 512, 'targets': 114}", 'TRAIN_STEPS': '1',
    'MODEL_DIR': "'none'", 'INITIAL_CHECKPOINT_PATH': "'none'", 'DROPOUT_RATE': '0.0',
}
# Nor does the vocabulary, whose file may be far away.
_NO_VOCABULARY = """
from __gin__ import dynamic_registration
from t5x_lite.data import vocabularies
VOCABULARY = @vocabularies.PassThroughVocabulary()
vocabularies.PassThroughVocabulary.size = 1
"""


def _explain_sharding(arguments: argparse.Namespace) -> int:
  if arguments.num_devices is not None:
    if not 1 <= arguments.num_devices <= 2048:
      raise ConfigError(f'--num_devices={arguments.num_devices}: expected 1 to 2048, the most that XLA simulates.')
    import jax
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', arguments.num_devices)
  configuration = _load('t5x_lite.apps.train.train', arguments, _SHARDING_STAND_INS, _NO_VOCABULARY)
  from t5x_lite.apps import explain_sharding
  parts = {name: configuration.argument(name) for name in ('model', 'partitioner', 'train_dataset_cfg')}
  print(explain_sharding.explain_sharding(**parts).to_text(fold=not arguments.full), end='')
  return ExitCode.OK


def _load(entry: str, arguments: argparse.Namespace, stand_ins: Mapping[str, str] | None = None,
          last_words: str = '') -> Any:
  """Returns the `gin_utils.Configuration` that the command line asks for.

  Args:
    entry: dotted name of the function to configure.
    arguments: the parsed command line.
    stand_ins: see `gin_utils.read`.
    last_words: gin text to apply after all.
  """
  from t5x_lite import gin_syntax
  from t5x_lite import gin_utils
  if not arguments.gin_file:
    raise ConfigError('No --gin_file is given. Recipes that run as they are: '
                      f'{", ".join(gin_syntax.packaged_files("recipes"))}.')
  flags = []
  for text in arguments.gin_bindings:
    key, equals, value = text.partition('=')
    one_line = equals and '\n' not in text and key.strip().replace('.', '').replace('/', '').isidentifier()
    flag = f'--gin_bindings={text}'
    flags.append(gin_syntax.read_flag(key.strip(), value, flag) if one_line else gin_syntax.read_text(text, flag))
  for flag in arguments.gin_flags:
    key, equals, value = flag.removeprefix('--gin.').partition('=')
    if not equals:
      raise ConfigError(f'{flag}: a value is missing. Write --gin.{key}=VALUE.')
    flags.append(gin_syntax.read_flag(key, value, flag))
  folders = [folder for text in arguments.gin_search_paths for folder in text.split(',') if folder]
  texts = gin_utils.read(arguments.gin_file, flags, folders, stand_ins=stand_ins)
  texts.append(gin_syntax.read_text(last_words, 'explain_sharding', is_flag=False))
  return gin_utils.load(entry, texts)


_COMMANDS = {
    'train': _Command('train a model, or go on training it', _add_train_arguments, _train),
    'plot': _Command('draw the metrics of runs', _add_plot_arguments, _plot, takes_gin=False),
    'explain_sharding': _Command('show where each array of a model and its optimizer goes, and what it costs',
                                 _add_explain_sharding_arguments, _explain_sharding),
}


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
