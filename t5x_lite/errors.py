"""Errors for users, and the exit status of a command that ends with each of them.

Messages have the owner, the option, the expectation, the value and the remedy; `did_you_mean` returns the remedy for a
misspelt name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import enum
import errno
import pathlib
import re
import sys
from typing import Any, NamedTuple

from t5x_lite.formatting import printable
from t5x_lite.formatting import show


class ExitCode(enum.IntEnum):
  """Exit status of every t5x_lite command."""

  OK = 0
  # An exception other than `T5xLiteError`: an error of user code or of this package.
  ERROR = 1
  # The configuration or the input is invalid.
  INVALID_INPUT = 2
  # The loss, the gradient norm, the state or a watched metric was not finite.
  NAN = 3
  # A step, an evaluation, a save or the data took longer than the run allows.
  WATCHDOG = 4
  # Another running process uses the run directory.
  DIRECTORY_IN_USE = 5
  # The last checkpoint, several in a row, or another file could not be written, e.g. to a full disk: rerun the command
  # when there is free space (sysexits' EX_IOERR).
  SAVE_FAILED = 74
  # The run can continue: it was saved because of a signal, or a process of it was lost. Rerun the command on all
  # machines (sysexits' EX_TEMPFAIL).
  SAVED_ON_SIGNAL = 75
  RESTART = 75


class Ending(NamedTuple):
  """Ending of a program by an exception; `command_line.errors` makes that of a command.

  Attributes:
    text: what is printed; empty for nothing.
    status: exit status.
    is_defect: True for an exception in code that is not the user's, whose traceback the text has.
  """

  text: str
  status: int
  is_defect: bool = False

  def show(self) -> None:
    """Print the text to standard error."""
    if self.text:
      show(self.text, file=sys.stderr, flush=True)


class InvalidOptions:
  """Options that an error is about.

  Attributes:
    owner: class or function that has the options; may be empty.
    shown: the value of each option, by name, as the message shows it.
    end: length of the message without its remedy and the period before it.
    argument: argument of the command's function that has the owner; empty if unknown.
    locations: where files bind the options; shown in the message.
  """

  def __init__(self, owner: str, shown: Mapping[str, str], end: int):
    self.owner = owner
    self.shown = shown
    self.end = end
    self.argument = ''
    self.locations: Sequence[str] = ()


class T5xLiteError(Exception):
  """Base of all errors that this package raises for users; `exit_code` is the exit status of a command.

  The errors of `checks` about options have the attribute `options`.
  """

  exit_code: ExitCode = ExitCode.INVALID_INPUT
  # Without a value: gin looks up in the original error only what the class of its own error lacks.
  options: InvalidOptions | None

  def __str__(self) -> str:
    text = super().__str__()
    options = getattr(self, 'options', None)
    if options is None or not options.locations:
      return text
    locations = ', '.join(options.locations)
    return f'{text[: options.end]} ({locations}){text[options.end :]}'


class ConfigError(T5xLiteError, ValueError):
  """Error of a configuration value, or of a combination of values."""


class DataError(T5xLiteError, ValueError):
  """Error of data that is unknown, empty, exhausted, or inconsistent with the model."""


class MissingSplitError(DataError):
  """Error of a split that a task or mixture does not have.

  Attributes:
    split: the split.
  """

  def __init__(self, message: str, split: str):
    """Store the message and the split."""
    super().__init__(message)
    self.split = split

  def __reduce__(self):
    """Return how to copy the error, e.g. from another process."""
    return type(self), (str(self), self.split)


class DataUnavailableError(DataError):
  """Error of data that cannot be read now, although the same read may succeed later."""


class DataStalledError(DataError):
  """Error of data that gave no batch within the time that the run allows."""

  exit_code = ExitCode.WATCHDOG


class CheckpointError(T5xLiteError, ValueError):
  """Error of a checkpoint that is missing, does not match the model, or cannot be written."""


class CheckpointDamagedError(CheckpointError):
  """Error of a checkpoint whose bytes differ from the hashes in its manifest."""


class SaveError(CheckpointError):
  """Error of a checkpoint that could not be written, e.g. to a full disk; earlier checkpoints are complete.

  Attributes:
    kept_step: step of the checkpoint that a spool folder has instead; None for none.
  """

  exit_code = ExitCode.SAVE_FAILED
  kept_step: int | None = None


class DirectoryInUseError(T5xLiteError, RuntimeError):
  """Error of a run directory that another running process uses."""

  exit_code = ExitCode.DIRECTORY_IN_USE


class NonFiniteMetricError(T5xLiteError, ArithmeticError):
  """Error of a watched metric that became NaN or infinite."""

  exit_code = ExitCode.NAN


class PreemptionError(Exception):
  """Error to raise, e.g. from a data iterator, for the run to save a checkpoint and exit with status 75."""


class InvalidFileError(CheckpointError, DataError):
  """A file that is read is not a regular file, such as a FIFO or a device, or is larger than its format allows."""


class LinkedFileError(ConfigError, OSError):
  """A file that would be locked, appended or truncated is a link or a special file, whose target must not change."""


class StoppedOnSignalError(T5xLiteError, RuntimeError):
  """Error of a run that a signal has stopped, and that has saved the state needed to resume.

  Attributes:
    signal: name of the signal, such as 'SIGTERM'.
  """

  exit_code = ExitCode.SAVED_ON_SIGNAL

  def __init__(self, message: str, *, signal: str = ''):
    super().__init__(message)
    self.signal = signal


def of_other_process(error: Exception) -> Exception:
  """Return an error that this process raises because another one has failed, which reports the cause."""
  marked: Any = error
  marked.is_of_other_process = True
  return error


def is_of_other_process(error: BaseException) -> bool:
  """Return whether an error, or its cause, was made by `of_other_process`."""
  return getattr(error, 'is_of_other_process', False) or (
    error.__cause__ is not None and is_of_other_process(error.__cause__)
  )


def call_all(functions: Iterable[Callable[[], object]]) -> None:
  """Call all functions, also after one that raises, and raise the first exception afterwards.

  A function that is skipped would report its old error at the next call, when the cause may be gone.
  """
  first: Exception | None = None
  for function in functions:
    try:
      function()
    except Exception as error:  # pylint: disable=broad-except
      first = first or error
  if first is not None:
    raise first


def is_disk_full(error: BaseException) -> bool:
  """Return True if a file could not be written because of a full disk, a quota or a limit of the file system."""
  return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def did_you_mean(name: str, candidates: Iterable[str], *, lists_all: bool = True) -> str:
  """Return a sentence that proposes the most similar candidate, or lists all candidates if none is similar.

  Args:
    name: the misspelt name.
    candidates: the valid names.
    lists_all: False to list no candidates.

  Returns:
    A sentence starting with a space, for the end of an error message; empty without anything to say.

  >>> did_you_mean('adamW2', ['adamw', 'sgd'])
  " Did you mean 'adamw'?"
  >>> did_you_mean('xyzzy', ['sgd', 'adamw'])
  ' Known names: adamw, sgd.'
  """
  names = sorted(set(candidates))
  if not names:
    return ''
  import difflib  # only errors need it

  lowered = {candidate.lower(): candidate for candidate in names}
  close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
  if close:
    return f' Did you mean {lowered[close[0]]!r}?'
  if not lists_all:
    return ''
  shown = ', '.join(map(printable, names[:20]))
  if len(names) > 20:
    shown += ', ...'
  return f' Known names: {shown}.'


def install_command(extra: str) -> str:
  """Return the command that installs the packages of an extra, e.g. `pip install 'matplotlib>=3.9'`.

  The command names the packages, since t5x_lite is installed from a folder or a wheel instead of an index.

  Args:
    extra: an extra of t5x_lite, e.g. 'plot'.

  Returns:
    The command. For a checkout that is not installed, it installs the checkout with the extra.
  """
  import importlib.metadata  # Only needed for errors.

  requirements = []
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    requirements = importlib.metadata.requires('t5x_lite') or []
  names = []
  for requirement in requirements:
    if re.search(rf'extra\s*==\s*["\']{extra}["\']', requirement):
      names.append(requirement.partition(';')[0].strip())
  if not names:  # a checkout that is not installed
    return f"pip install -e '{pathlib.Path(__file__).resolve().parents[1]}[{extra}]'"
  return 'pip install ' + ' '.join(f"'{name}'" for name in names)


@contextlib.contextmanager
def needs_packages(
  use: str, packages: str, *, extra: str = '', command: str = '', otherwise: str = ''
) -> Iterator[None]:
  """Import optional packages within the context.

  Args:
    use: what needs the packages, the subject of the error message.
    packages: the packages.
    extra: extra of t5x_lite with the packages; empty if `command` installs them.
    command: command that installs the packages.
    otherwise: what to do without the packages, such as 'set x=y'; empty if there is nothing.

  Raises:
    ConfigError: an import in the context failed.
  """
  try:
    yield
  except ImportError as error:
    remedy = f'Install with `{command or install_command(extra)}`'
    if otherwise:
      remedy += f', or {otherwise}'
    raise ConfigError(
      f'{use} needs {packages}, which cannot be imported ({error}). {remedy}.'
    ) from error
