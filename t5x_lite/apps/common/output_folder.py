"""Atomic writing of output folders of `export` and `convert`: a temporary folder that is renamed when complete.

An object store has no rename: there, the file that makes a folder valid is written last.
"""

from collections.abc import Iterator
import contextlib
import logging
import os
import pathlib
import secrets
import shutil
from typing import Any

from t5x_lite import checks
from t5x_lite.errors import CheckpointError
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)

# Part of the names of temporary folders.
INFIX = '-being-written-'
_FORMER = '-replaced'


def directory(remedy: str) -> checks.Expectation:
  """Expect the path of a directory, which need not exist; `remedy` ends the error message."""
  stores = tuple(f'{scheme}://' for scheme in files.STORES)

  def is_path(value: Any) -> bool:
    try:
      return (
        isinstance(value, str)
        and bool(value.strip().encode())
        and ('://' not in value or value.startswith(stores))
      )
    except UnicodeEncodeError:  # The locale could not decode the bytes of the path.
      return False

  return checks.Expectation(
    f'the path of a directory on a disk or in an object store ({" or ".join(stores)}), encodable in UTF-8',
    is_path,
    remedy,
  )


@contextlib.contextmanager
def replacing(target: files.Path, *, last: str) -> Iterator[pathlib.Path]:
  """Yield a temporary folder that replaces `target` when the context ends without an error.

  It is next to `target`. Leftovers of killed processes are removed; a lock that ends with its process distinguishes
  them from the folders of running processes. For an object store it is in the folder of temporary files; the former
  files are removed before the new ones are uploaded.

  Args:
    target: folder to write; its parent must exist.
    last: name of the file that makes the folder valid.
  """
  if not isinstance(target, pathlib.Path):  # in a store
    from t5x_lite.storage import uploads

    with uploads.uploaded_folder(target, last=last) as temporary:
      yield temporary
    return
  with _temporary_folder(target) as temporary:
    yield temporary
    os.chmod(temporary, 0o755)
    files.fsync_tree(temporary)
    _rename_into_place(temporary, target)


@contextlib.contextmanager
def creating(target: files.Path) -> Iterator[files.Path]:
  """Yield the path of a folder to create; it is renamed to `target` when the context ends without an error.

  For writers that create the folder themselves. Leftovers of killed processes are removed. In an object store it is
  `target` itself: the writers write the file that makes a folder valid last, and remove everything after an error.

  Args:
    target: final path, which must not exist; missing parents are created.

  Raises:
    CheckpointError: another process has created `target` in the meantime.
  """
  if not isinstance(target, pathlib.Path):  # in a store
    yield target
    return
  parents = [folder for folder in target.parents if not folder.exists()]
  target.parent.mkdir(parents=True, exist_ok=True)
  try:
    with _temporary_folder(target) as temporary:
      made = temporary / target.name
      yield made
      files.fsync_tree(made)
      try:
        if os.path.lexists(target):
          raise FileExistsError
        made.rename(target)
      except OSError as error:
        if os.path.lexists(target):
          raise CheckpointError(
            f'{str(target)!r} was created by another process in the meantime; existing folders are '
            'not overwritten. Choose another name, or remove the folder.'
          ) from error
        raise
      shutil.rmtree(temporary, ignore_errors=True)
      files.fsync(target.parent)
  except BaseException:
    for folder in parents:
      with contextlib.suppress(OSError):  # The folder is not empty: another process uses it.
        folder.rmdir()
    raise


@contextlib.contextmanager
def _temporary_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yield a locked folder next to `target`; remove it after an error."""
  remove_leftovers(target)
  temporary = target.with_name(f'.{target.name}{INFIX}{secrets.token_hex(8)}')
  try:
    # Within the block, which removes it even if Ctrl-C comes right after its creation.
    temporary.mkdir(mode=0o700)
    with _locked(temporary):
      yield temporary
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise


def remove_leftovers(target: files.Path) -> None:
  """Remove temporary folders of killed writers of `target`; restore a folder that was about to be replaced."""
  if files.is_remote(target):  # they were in folders of temporary files
    return
  prefix = f'.{target.name}{INFIX}'
  if target.parent.is_dir():
    left = [path for path in target.parent.iterdir() if path.name.startswith(prefix)]
  else:
    left = []
  # In reverse order, the replaced folder comes before its replacement, whose lock covers both.
  for folder in sorted(left, reverse=True):
    is_former = folder.name.endswith(_FORMER)
    lock = folder.with_name(folder.name.removesuffix(_FORMER))
    if not lock.exists():
      lock = folder
    with contextlib.suppress(OSError), _locked(lock):
      if is_former and not target.exists():
        folder.rename(target)
      else:
        _logger.info('Removing %s, which a killed process has left.', folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: files.Path) -> Iterator[None]:
  """Lock a folder; raise OSError if another process has locked it."""
  descriptor = files.lock_folder(folder)
  try:
    yield
  finally:
    os.close(descriptor)


def _rename_into_place(temporary: pathlib.Path, target: pathlib.Path) -> None:
  """Rename the new folder to `target`; remove the folder that it replaces."""
  former = None
  if target.exists():
    former = temporary.with_name(f'{temporary.name}{_FORMER}')
    target.rename(former)
  try:
    temporary.rename(target)
  except OSError:
    if former is not None:
      former.rename(target)
    raise
  if former is not None:
    shutil.rmtree(former, ignore_errors=True)
