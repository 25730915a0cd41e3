"""The errors a user can meet, and the exit status each of them ends a command with.

Every message says what was got, what was expected and what to do; `did_you_mean` supplies the usual last clause for
a misspelt name.
"""

import contextlib
import difflib
import enum
import errno
import pathlib
import re
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
  """Exit status of every t5x_lite command."""

  OK = 0
  # An exception that is not a `T5xLiteError`: a defect, of a user's own code or of this package.
  ERROR = 1
  # A configuration or an input was refused before (or instead of) computing.
  REFUSED = 2
  # The loss, the gradient norm, the state or a watched metric was not finite.
  NAN = 3
  # A step, an evaluation, a save or the data took longer than the run allows.
  WATCHDOG = 4
  # Another live run holds the model directory.
  DIRECTORY_IN_USE = 5
  # The last checkpoint, several in a row, or another file could not be written, for instance to a full disk: run the
  # same command again when there is free space (the value is sysexits' EX_IOERR).
  SAVE_FAILED = 74
  # State was saved because of a signal: run the same command again to go on (the value is sysexits' EX_TEMPFAIL).
  SAVED_ON_SIGNAL = 75


class T5xLiteError(Exception):
  """Base of all errors raised on purpose by this package; `exit_code` is what a command ends with."""

  exit_code: ExitCode = ExitCode.REFUSED


class ConfigError(T5xLiteError, ValueError):
  """A configuration value, or a combination of values, that cannot be run."""


class DataError(T5xLiteError, ValueError):
  """A data source that is unknown, empty, exhausted, or inconsistent with the model."""


class DataUnavailableError(DataError):
  """A data source that cannot be read now, although the same read may succeed later."""


class DataStalledError(DataError):
  """A data source that gave no batch within the time that the run allows."""

  exit_code = ExitCode.WATCHDOG


class CheckpointError(T5xLiteError, ValueError):
  """A checkpoint that is missing, does not fit the model, or cannot be written."""


class CheckpointDamagedError(CheckpointError):
  """A checkpoint whose bytes differ from the hashes in its manifest."""


class SaveError(CheckpointError):
  """A checkpoint that could not be written, for instance to a full disk; those written before it are whole."""

  exit_code = ExitCode.SAVE_FAILED


class DirectoryInUseError(T5xLiteError, RuntimeError):
  """A model directory that another live process holds."""

  exit_code = ExitCode.DIRECTORY_IN_USE


class NonFiniteMetricError(T5xLiteError, ArithmeticError):
  """A watched metric became NaN or infinite."""

  exit_code = ExitCode.NAN


class StoppedOnSignalError(T5xLiteError, RuntimeError):
  """The run was asked to stop by a signal, and has saved what it must to go on: run the same command again."""

  exit_code = ExitCode.SAVED_ON_SIGNAL


def is_disk_full(error: BaseException) -> bool:
  """Return True if a file could not be written because of a full disk, a quota or a limit of the file system."""
  return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
  """Returns a clause that proposes the closest of `candidates`, or lists them all when none is close.

  Args:
    name: what the user wrote.
    candidates: the names that would have been accepted.

  Returns:
    A sentence starting with a space, fit to be appended to an error message; empty when there are no candidates.

  >>> did_you_mean('adamW2', ['adamw', 'sgd'])
  " Did you mean 'adamw'?"
  >>> did_you_mean('xyzzy', ['sgd', 'adamw'])
  ' Known names: adamw, sgd.'
  """
  names = sorted(set(candidates))
  if not names:
    return ''
  lowered = {candidate.lower(): candidate for candidate in names}
  close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
  if close:
    return f' Did you mean {lowered[close[0]]!r}?'
  shown = ', '.join(names[:20]) + (', ...' if len(names) > 20 else '')
  return f' Known names: {shown}.'


def install_command(extra: str) -> str:
  """Return the command that installs the packages of an extra, e.g. `pip install 'matplotlib>=3.9'`.

  It names the packages themselves, because t5x_lite comes from a folder or a wheel that may be gone, not from an index.

  Args:
    extra: one of the extras of t5x_lite, e.g. 'plot'.

  Returns:
    The command. For a checkout that runs without being installed, it installs the checkout with the extra.
  """
  import importlib.metadata  # only errors need it
  requirements = []
  with contextlib.suppress(importlib.metadata.PackageNotFoundError):
    requirements = importlib.metadata.requires('t5x_lite') or []
  names = [requirement.partition(';')[0].strip() for requirement in requirements
           if re.search(rf'extra\s*==\s*["\']{extra}["\']', requirement)]
  if not names:  # a checkout that is not installed
    return f"pip install -e '{pathlib.Path(__file__).resolve().parents[1]}[{extra}]'"
  return 'pip install ' + ' '.join(f"'{name}'" for name in names)
