"""Paths of local folders for Orbax, TensorStore and seqio, which misread some characters.

Orbax and seqio list folders by glob patterns made of their paths, so they do not find the files below `run[1]`.
TensorStore reads a backslash as `/`, so it writes the files of the folder `a\\b` below the folder `a`.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import pathlib
import shutil
import tempfile

_MISREAD = frozenset('[]*?\\')


def plain_path(path: str | os.PathLike[str]) -> pathlib.Path:
  """Return a path of the same file or folder without characters that these libraries misread.

  It is `path` itself, or a path below a symbolic link to the innermost folder with such a name. The links are in a
  temporary folder that is removed at the end of the process.

  Args:
    path: local path. The folders up to the innermost one with such a name exist.
  """
  path = pathlib.Path(path)
  if not _MISREAD & set(str(path.absolute())):
    return path
  path = path.absolute()
  last = max(i for i, part in enumerate(path.parts) if _MISREAD & set(part))
  linked = pathlib.Path(*path.parts[: last + 1])
  return _link(linked).joinpath(*path.parts[last + 1 :])


def _link(target: pathlib.Path) -> pathlib.Path:
  link = _folder() / hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
  if not link.is_symlink():  # Some machines delete old temporary files while a run continues.
    link.parent.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):  # Made by another thread.
      link.symlink_to(target)
  return link


@functools.cache
def _folder() -> pathlib.Path:
  """Return the folder of the links of this process."""
  parent = tempfile.gettempdir()
  if _MISREAD & set(parent):
    parent = '/tmp'
  return pathlib.Path(tempfile.mkdtemp(prefix='t5x_lite-links-', dir=parent))


def _remove_folder(process: int) -> None:
  """Remove the folder of the links, in the process that has made it."""
  if _folder.cache_info().currsize and os.getpid() == process:
    shutil.rmtree(_folder(), ignore_errors=True)


# Functions that are registered later run earlier: they may still wait for saves.
atexit.register(_remove_folder, os.getpid())
