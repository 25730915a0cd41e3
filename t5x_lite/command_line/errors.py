"""Ending of a command by an exception: message with the frames of user code, and exit status."""

from collections.abc import Iterator, Sequence
import errno
import os
import pathlib
import signal
import sys
import sysconfig
import traceback

from t5x_lite.command_line import platform as cli_platform
from t5x_lite.configuration.masking import masked_text
from t5x_lite.errors import Ending, ExitCode, StoppedOnSignalError, T5xLiteError, is_disk_full
from t5x_lite.runtime.failure import describe_error
from t5x_lite.storage import files

# Exit status that shells report after SIGINT.
_INTERRUPTED = 128 + signal.SIGINT
_STANDARD_LIBRARY = tuple(
  {os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ('stdlib', 'platstdlib')}
)
_INSTALLED = ('site-packages', 'dist-packages')
# File names of code compiled from text, and of TensorFlow's versions of user functions.
_GENERATED = ('<', '__autograph_generated_file')


def ending(
  error: BaseException,
  *,
  name: str,
  own_paths: Sequence[str],
  argv: Sequence[str],
  process: int | None = None,
) -> Ending:
  """Return how an exception ends a command.

  Args:
    error: the exception.
    name: name of the program.
    own_paths: files and folders of the program's code.
    argv: the command line, whose secrets are masked; with --debug, the text has the traceback of every error.
    process: index of this process in a run of several; their log is one, and needs a line after a traceback.
  """
  who = f'{name}: '
  if process is not None:
    who += f'[process {process}] '
  found = _found(error, name, own_paths)
  lines = []
  if found.is_defect or (isinstance(error, Exception) and _shows_tracebacks(argv)):
    lines.append(describe_error(error).text)
  if process is not None or not found.is_defect:
    lines.append(f'{who}{found.text}')
  text = masked_text('\n'.join(lines), argv)
  return found._replace(text=text, status=int(found.status))


def _shows_tracebacks(argv: Sequence[str]) -> bool:
  return '--debug' in argv or os.environ.get('T5X_LITE_DEBUG', '0') not in ('', '0')


def _found(error: BaseException, name: str, own_paths: Sequence[str]) -> Ending:
  """Return the message of an exception without the program's name, and the status."""
  if isinstance(error, KeyboardInterrupt):
    return Ending('interrupted.', _INTERRUPTED)
  if isinstance(error, SystemExit):
    return Ending(
      f'error: your code called sys.exit({error.code!r}).', describe_error(error).status
    )
  frames, called = _user_frames(error, own_paths)
  if isinstance(error, T5xLiteError):
    return _of_our_error(error, frames)
  if isinstance(error, SyntaxError) and _is_users_file(error.filename, own_paths):
    line = f': `{error.text.strip()}`' if error.text else ''
    return Ending(
      f'error: {error.filename}:{error.lineno}: {error.msg}{line}. Correct this file.',
      ExitCode.INVALID_INPUT,
    )
  platform = cli_platform.platform_message(error)
  if platform is not None:
    return Ending(f'error: {platform}', ExitCode.INVALID_INPUT)
  of_option = cli_platform.option_message(error)
  if of_option is not None:
    message, status = of_option
    return Ending(f'error: {message}{_shown(frames)}', status)
  is_full = is_disk_full(error) and not frames
  if isinstance(error, OSError) and (is_full or _is_about_our_files(error, own_paths)):
    return _of_file(error, is_full)
  if frames:
    notes = ''
    for note in getattr(error, '__notes__', ()):
      if 'JAX has removed' not in note:
        notes += f'\n{note}'
    remedy = 'Correct this code'
    # A statement `raise` of the program says what is wrong with the call.
    if called is not None and not (called.line or '').startswith('raise '):
      frames = [*frames, called]
      remedy += f', or report a defect of {name} if the call of {called.name} is right'
    return Ending(
      f'error: your code raised {type(error).__name__}: {_text(error)}{notes}{_shown(frames)}\n'
      f'{remedy}, then rerun the command; --debug shows all frames.',
      ExitCode.ERROR,
    )
  return Ending(
    f'error: an exception in the code of {name}, see above.', ExitCode.ERROR, is_defect=True
  )


def _of_our_error(error: T5xLiteError, frames: Sequence[traceback.FrameSummary]) -> Ending:
  if isinstance(error, StoppedOnSignalError):
    kind = ''
  else:
    kind = 'error: '
  # With any error class: the same command works with free disk space.
  status = error.exit_code
  if status == ExitCode.INVALID_INPUT and any(map(is_disk_full, _chain(error))):
    status = ExitCode.SAVE_FAILED
  return Ending(f'{kind}{_text(error)}{_shown(frames)}', status)


def _of_file(error: OSError, is_full: bool) -> Ending:
  where = ''
  is_remote = False
  if error.filename is not None:
    where = f'{os.fspath(error.filename)!r}: '
    is_remote = files.is_remote(os.fsdecode(error.filename))
  status = ExitCode.SAVE_FAILED
  if is_full:
    remedy = 'Free disk space'
  elif error.errno != errno.EIO:
    remedy = 'Correct the path or its permissions'
    status = ExitCode.INVALID_INPUT
  elif is_remote:
    remedy = 'Check the network'
  else:
    remedy = 'Check the disk'
  message = f'error: {where}{error.strerror}. {remedy}, then rerun the command; --debug shows more.'
  return Ending(message, status)


def _text(error: BaseException) -> str:
  if 'gin' not in sys.modules:
    return str(error)
  from t5x_lite import gin_utils

  return gin_utils.plain_message(error)


def _shown(frames: Sequence[traceback.FrameSummary]) -> str:
  lines = ''.join(traceback.StackSummary.from_list(frames).format()).rstrip('\n')
  if lines:
    return f'\n{lines}'
  return ''


def _user_frames(
  error: BaseException, own_paths: Sequence[str]
) -> tuple[list[traceback.FrameSummary], traceback.FrameSummary | None]:
  """Return the frames of user code, neither the program's nor installed, of the error or else of its causes.

  The second value is the frame of the program that raised in a call by the last of these; None if user code raised.
  """
  for exception in _chain(error):
    frames = []
    called = None
    for frame in traceback.extract_tb(exception.__traceback__):
      if _is_own(frame.filename, own_paths):
        called = frame
      elif not _is_installed(frame.filename):
        frames.append(frame)
        called = None
    if frames:
      return frames, called
  return [], None


def _chain(error: BaseException) -> Iterator[BaseException]:
  """Yield an exception, its cause, the cause of that, and so on."""
  seen: set[int] = set()
  cause: BaseException | None = error
  while cause is not None and id(cause) not in seen:
    yield cause
    seen.add(id(cause))
    cause = cause.__cause__


def _is_users_file(filename: str | None, own_paths: Sequence[str]) -> bool:
  return filename is not None and os.path.isfile(filename) and not _is_own(filename, own_paths)


def _is_own(filename: str, own_paths: Sequence[str]) -> bool:
  return any(filename == path or filename.startswith(path + os.sep) for path in own_paths)


def _is_installed(filename: str) -> bool:
  """Return True for the standard library, installed packages and generated code."""
  path = pathlib.PurePath(filename)
  return (
    filename.startswith(_GENERATED)
    or path.name.startswith(_GENERATED)
    or any(part in _INSTALLED for part in path.parts)
    or os.path.realpath(filename).startswith(_STANDARD_LIBRARY)
  )


def _is_about_our_files(error: OSError, own_paths: Sequence[str]) -> bool:
  """Return True if the error is about a file or folder of the run, as opposed to one that user code opens."""
  theirs = (
    sysconfig.get_path('stdlib') + os.sep,
    sysconfig.get_path('purelib') + os.sep + 'tensorboardX',
    '<',
  )
  files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
  while files and files[-1].startswith(theirs) and not _is_own(files[-1], own_paths):
    files.pop()
  return error.strerror is not None and bool(files) and _is_own(files[-1], own_paths)
