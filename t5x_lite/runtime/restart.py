"""A process that replaces itself, with an environment that Python or the C library reads at the start only."""

import codecs
from collections.abc import Mapping
import os
import sys


def restart(variables: Mapping[str, str]) -> None:
  """Replace this process by itself with more environment variables; return if that is impossible.

  The process keeps its id, arguments and open files. A program that is not a file, such as one from a pipe, does not
  restart, since it could not be read again. To be called before anything is read, written or imported that takes time.

  Args:
    variables: environment variables that are added or replaced. The caller must see from them, after the restart, that
      no other is needed.
  """
  program = getattr(sys.modules['__main__'], '__file__', None)
  if not sys.executable or program is None or not os.path.isfile(program):
    return
  try:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **variables})
  except (OSError, ValueError):  # ValueError: an odd name in the environment
    return


def restart_in_utf8() -> None:
  """Replace this process by itself in Python's UTF-8 mode if it reads names of files and arguments as ASCII.

  It does in a locale of ASCII if `PYTHONUTF8=0` disables the mode, or if the locale is not `C` or `POSIX`, for which
  Python chooses UTF-8 itself. Names with other letters, in flags, folders and output, would then be errors.
  """
  variable = 'PYTHONUTF8'
  encoding = codecs.lookup(sys.getfilesystemencoding()).name
  if encoding == 'ascii' and os.environ.get(variable) != '1':
    restart({variable: '1'})
