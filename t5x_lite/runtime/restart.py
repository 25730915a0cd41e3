"""A process that replaces itself, with an environment that Python or the C library reads at the start only."""

import codecs
from collections.abc import Mapping
import os
import pathlib
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


# XLA gives the temporaries of a program on a CPU back to the system after each run, and the next run gets new memory,
# which the kernel fills page by page. Training T5 small touches 240,000 pages of 4 KB a step; with pages of 2 MB it
# touches 2,000. The GNU C library (2.35 and later) reads its switch from the environment of a process at its start.
_VARIABLE = 'GLIBC_TUNABLES'
_TUNABLE = 'glibc.malloc.hugetlb'
# The id of a process that has restarted.
_RESTARTED = 'T5X_LITE_RESTARTED_PROCESS'
_KERNEL = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')


def restart_with_huge_pages() -> None:
  """Replace this process by itself with memory in huge pages, where this has an effect.

  It has one on Linux if programs have to ask for huge pages (`madvise`, the default of many distributions) and the
  environment does not say whether to. `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` disables it. See `restart`.
  """
  tunables = os.environ.get(_VARIABLE, '')
  # Something may drop the tunable in each start: the system for a program with capabilities, or a `sitecustomize`.
  process = str(os.getpid())
  if _TUNABLE in tunables or os.environ.get(_RESTARTED) == process or not _programs_must_ask():
    return
  restart({_VARIABLE: f'{tunables}:{_TUNABLE}=1'.lstrip(':'), _RESTARTED: process})


def _programs_must_ask() -> bool:
  try:
    return '[madvise]' in _KERNEL.read_text(encoding='ascii')
  except OSError:  # not Linux, or a kernel without huge pages
    return False
