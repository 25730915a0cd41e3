"""Memory in huge pages, for programs on a CPU.

XLA gives the temporaries of a program back to the system after each run, and the next run gets new memory, which the
kernel fills page by page. Training T5 small touches 240,000 pages of 4 KB a step; with pages of 2 MB it touches 2,000.
"""

import os
import pathlib

from t5x_lite.runtime.restart import restart

# The switch of the GNU C library (2.35 and later), in the environment of a process from its start.
_VARIABLE = 'GLIBC_TUNABLES'
_TUNABLE = 'glibc.malloc.hugetlb'
# The id of a process that has restarted.
_RESTARTED = 'T5X_LITE_RESTARTED_PROCESS'
_KERNEL = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')


def restart_with_huge_pages() -> None:
  """Replace this process by itself with memory in huge pages, where this has an effect.

  It has one on Linux if programs have to ask for huge pages (`madvise`, the default of many distributions) and the
  environment does not say whether to. `GLIBC_TUNABLES=glibc.malloc.hugetlb=0` disables it. See `restart.restart`.
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
