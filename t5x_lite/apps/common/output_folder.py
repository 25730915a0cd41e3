"""The folder of an export or a conversion: written under another name, whole from the moment it has its own."""

from collections.abc import Iterator
import contextlib
import fcntl
import logging
import os
import pathlib
import shutil
import tempfile

from t5x_lite import files
from t5x_lite.errors import CheckpointError

_logger = logging.getLogger(__name__)

# In the names of temporary folders.
INFIX = '-being-written-'
_FORMER = '-replaced'


@contextlib.contextmanager
def writing(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a temporary folder beside `target`, which gets that name when the context ends without an error.

  A former folder of that name loses it only then. What processes have left that were killed meanwhile is removed; the
  kernel's lock on a folder, which ends with its process, tells them from those that are at work.

  Args:
    target: the folder to write; its parent must exist.
  """
  with _temporary_folder(target) as temporary:
    yield temporary
    os.chmod(temporary, 0o755)
    files.fsync_tree(temporary)
    _put_in_place(temporary, target)


@contextlib.contextmanager
def making(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives the path of a folder to make, in a temporary one; it becomes `target` when the context ends without an error.

  For writers that make a folder of their own. What processes have left that were killed meanwhile is removed, and told.

  Args:
    target: the path to be, which must not exist; nor need its parents.

  Raises:
    CheckpointError: something has got the name `target` meanwhile.
  """
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
          raise CheckpointError(f'{str(target)!r} has come into being meanwhile, and nothing is overwritten. Give '
                                'another name, or remove it.') from error
        raise
      shutil.rmtree(temporary, ignore_errors=True)
      files.fsync(target.parent)
  except BaseException:
    for folder in parents:
      with contextlib.suppress(OSError):  # someone else has put something there
        folder.rmdir()
    raise


@contextlib.contextmanager
def _temporary_folder(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a folder beside `target` that this process holds; it is removed at an error."""
  clean(target)
  temporary = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=f'.{target.name}{INFIX}'))
  try:
    with _locked(temporary):
      yield temporary
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise


def clean(target: pathlib.Path) -> None:
  """Removes what exports to `target` have left that were killed; gives a folder back that was about to be replaced."""
  prefix = f'.{target.name}{INFIX}'
  left = [path for path in target.parent.iterdir() if path.name.startswith(prefix)] if target.parent.is_dir() else []
  # A former folder before the one that was to replace it, whose lock is that of both.
  for folder in sorted(left, reverse=True):
    is_former = folder.name.endswith(_FORMER)
    lock = folder.with_name(folder.name.removesuffix(_FORMER))
    with contextlib.suppress(OSError), _locked(lock if lock.exists() else folder):
      if is_former and not target.exists():
        folder.rename(target)
      else:
        _logger.info('Removing %s, left behind by a process that died.', folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
  """Holds a folder; raises OSError where another process does."""
  descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
  finally:
    os.close(descriptor)


def _put_in_place(temporary: pathlib.Path, target: pathlib.Path) -> None:
  """Gives the new export its name; a former one loses it only now."""
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
