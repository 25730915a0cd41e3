"""Flags in the syntax of absl, which T5X's programs have, and sentences about absl's flags that are not here."""

from collections.abc import Collection, Mapping, Sequence
import os
import re
import shlex
from typing import Any

from t5x_lite.errors import ConfigError
from t5x_lite.formatting import gin_flag

_BOOLEANS = {**dict.fromkeys(('true', 't', '1'), True), **dict.fromkeys(('false', 'f', '0'), False)}
_SHORT = {'-v': '--verbosity', '-?': '--help', '--helpshort': '--help', '--helpfull': '--help'}
_PROFILE = 'To profile Python, run `python -m cProfile -o FILE -m t5x_lite`'
_DEBUGGER = 'To debug, run `python -m pdb -c continue -m t5x_lite`'
# Remedy for each flag of T5X's or Hugging Face's programs, or prefix of flags, without an equivalent.
_REMEDIES = {
  'bf16': 'Set --gin.network.T5Config.dtype=bfloat16',
  'config': 'Write --gin_file=FILE',
  'fdl': 'Fiddle configurations are not supported: write a gin file',
  'fp16': 'Set --gin.network.T5Config.dtype=bfloat16, which needs no scaling of the loss',
  'helpxml': 'Write --help',
  'module_import': 'Set --gin.MIXTURE_OR_TASK_MODULE=MODULE, or import the module in a gin file',
  'num_devices': (
    'explain_sharding and precompile have it. For virtual devices in other commands set the environment variable '
    'XLA_FLAGS=--xla_force_host_platform_device_count=N'
  ),
  'only_check_args': 'Write --dry_run',
  'pdb': _DEBUGGER,
  'per_device_train_batch_size': 'BATCH_SIZE counts the rows of all devices: set --gin.BATCH_SIZE=N',
  'resume': 'A run resumes by itself: leave out the flag',
  'run_with_pdb': _DEBUGGER,
  'profile_file': _PROFILE,
  'run_with_profiling': _PROFILE,
  'use_cprofile_for_profiling': _PROFILE,
  'xla_': 'Set the environment variable XLA_FLAGS',
}

# Macros of the recipes and run files by themselves, and by other names that beginners use as flags.
_MACROS = {
  name: name
  for name in (
    'BATCH_SIZE',
    'DATA_SOURCE',
    'DROPOUT_RATE',
    'EVAL_PERIOD',
    'EVAL_STEPS',
    'INITIAL_CHECKPOINT_PATH',
    'LEARNING_RATE',
    'MIXTURE_OR_TASK_MODULE',
    'MIXTURE_OR_TASK_NAME',
    'MODEL_DIR',
    'NUM_EPOCHS',
    'RANDOM_SEED',
    'SAVING_PERIOD',
    'TASK_FEATURE_LENGTHS',
    'TRAIN_STEPS',
    'WARMUP_STEPS',
  )
} | {
  'EPOCHS': 'NUM_EPOCHS',
  'LR': 'LEARNING_RATE',
  'MAX_STEPS': 'TRAIN_STEPS',
  'MODULE': 'MIXTURE_OR_TASK_MODULE',
  'NUM_TRAIN_EPOCHS': 'NUM_EPOCHS',
  'OUTPUT_DIR': 'MODEL_DIR',
  'SAVE_STEPS': 'SAVING_PERIOD',
  'SEED': 'RANDOM_SEED',
  'STEPS': 'TRAIN_STEPS',
  'TASK': 'MIXTURE_OR_TASK_NAME',
}


def expand_flagfiles(arguments: Sequence[str], within: Sequence[str] = ()) -> list[str]:
  """Return arguments with each `--flagfile=FILE` replaced by the flags in the file.

  Args:
    arguments: arguments of a command.
    within: files that name these arguments, outermost first.

  Raises:
    ConfigError: a file is missing, not text, or contains itself.
  """
  expanded = []
  iterator = iter(arguments)
  for argument in iterator:
    flag, equals, path = argument.partition('=')
    if flag.removeprefix('-') not in ('-flagfile', 'flagfile') or not flag.startswith('-'):
      expanded.append(argument)
      continue
    if not equals:
      path = next(iterator, '')
    path = os.path.abspath(os.path.expanduser(path))
    try:
      if path in within:
        raise OSError('it contains itself')
      with open(path, encoding='utf-8') as file:
        lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
      if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
      else:
        reason = error
      raise ConfigError(
        f'--flagfile must name a text file with a flag in each line, got {path!r}: {reason}.'
      ) from None
    flags = [line for line in lines if line and not line.startswith(('#', '//'))]
    expanded += expand_flagfiles(flags, (*within, path))
  return expanded


def plain(arguments: Sequence[str], options: Mapping[str, Any]) -> list[str]:
  """Return arguments in argparse's syntax: two dashes, boolean flags without a value, one argument for gin text.

  Args:
    arguments: arguments of a command.
    options: argparse's actions of the command, by flag.

  Raises:
    ConfigError: the value of a boolean flag is invalid.
  """
  result: list[str] = []
  iterator = iter(arguments)
  for argument in iterator:
    flag, equals, value = argument.partition('=')
    if flag.startswith('-') and f'-{flag}' in options:
      flag = f'-{flag}'
    if flag not in options:
      flag = _SHORT.get(flag, flag)
    if flag in options or not flag.startswith('--no'):
      name = flag
    else:
      name = f'--{flag.removeprefix("--no")}'
    if not _is_boolean(options.get(name)):
      if flag == '--gin_bindings' and not equals:
        value = next(iterator, '')
        equals = '=' if value else ''
      result.append(f'{flag}{equals}{value}')
      continue
    is_negated = name != flag
    if equals and (is_negated or value.lower() not in _BOOLEANS):
      from t5x_lite import checks  # Only errors need it.

      raise checks.invalid(
        '',
        name,
        'true or false',
        value if not is_negated else argument,
        f'Write {name} or leave it out.',
      )
    result = [each for each in result if each != name]  # The last one counts.
    if not is_negated and _BOOLEANS.get(value.lower(), True):
      result.append(name)
    elif f'--no{name[2:]}' in options:  # False differs from a flag that is not there.
      result.append(f'--no{name[2:]}')
  return result


def _is_boolean(action: Any) -> bool:
  return getattr(action, 'const', None) is True


def is_jax_flag(argument: str) -> bool:
  """Return True for `--jax_NAME`, `--jax_NAME=VALUE` and `--nojax_NAME`, with one or two dashes."""
  return argument.startswith('-') and argument.lstrip('-').startswith(('jax_', 'nojax_'))


def remedy(flag: str) -> str:
  """Return the sentence for a flag of T5X's programs that is not supported; empty for any other flag."""
  name = flag.lstrip('-')
  if name == 'run_mode':
    from t5x_lite.compat import names  # Only errors need it.

    return names.LEFT_OUT_MODULES['t5x.main']
  for start, sentence in _REMEDIES.items():
    if name.startswith(start) or name.removeprefix('no').startswith(start):
      return f'{sentence}.'
  return ''


def gin_name(flag: str) -> str:
  """Return the name of gin that a flag means, e.g. a macro without `gin.`; '' if it is unknown.

  >>> gin_name('--TRAIN_STEPS'), gin_name('--learning_rate'), gin_name('--lr'), gin_name('--models.Model.z_loss')
  ('TRAIN_STEPS', 'LEARNING_RATE', 'LEARNING_RATE', 'models.Model.z_loss')
  """
  name = flag.lstrip('-').replace('-', '_')
  macro = name.upper()
  macro = _MACROS.get(macro, macro)
  if name.isupper() or macro in _MACROS.values():
    return macro
  if '.' in name:
    return name
  return ''


def with_dashes(argument: str, options: Collection[str]) -> str:
  """Return the flag that an argument without dashes means, quoted for a shell; '' if it means none.

  Args:
    argument: argument such as `TRAIN_STEPS=5`, `gin.TRAIN_STEPS=5` or `recipes/mine.gin`.
    options: flags of the command.
  """
  name, equals, value = argument.partition('=')
  if equals and f'--{name}' in options:
    return shlex.quote(f'--{argument}')
  if argument.endswith('.gin'):
    return shlex.quote(f'--gin_file={argument}')
  # A name, perhaps with a module and a scope.
  if equals and re.fullmatch(r'(\w+/)*[A-Za-z_]\w*(\.\w+)*', name):
    return gin_flag(name.removeprefix('gin.'), value)
  return ''


def value_after(flag: str, arguments: Sequence[str]) -> str:
  """Return the value of a flag that a command line has with a space instead of `=`; '' without one."""
  if flag not in arguments:
    return ''
  following = arguments[arguments.index(flag) + 1 :]
  is_value = following and (
    not following[0].startswith('-') or re.match(r'-[\d.]', following[0]) is not None
  )
  return following[0] if is_value else ''


def is_named(argument: str, flags: Sequence[str]) -> bool:
  """Return True if an argument is one of `flags`, which are named without dashes."""
  name = argument.lstrip('-').partition('=')[0]
  return (
    bool(name) and argument.startswith('-') and (name in flags or name.removeprefix('no') in flags)
  )
