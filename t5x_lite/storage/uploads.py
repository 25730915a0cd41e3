"""Local temporary files whose contents go to object stores."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import pathlib
import tempfile

from t5x_lite import errors
from t5x_lite.storage import object_store


@contextlib.contextmanager
def uploaded_folder(target: object_store.StorePath, *, last: str) -> Iterator[pathlib.Path]:
  """Yield a temporary local folder, which replaces the folder `target` when the context ends without an error.

  Args:
    target: the folder in the store. Meanwhile it lacks `last`; an error, other than the death of this process, leaves
      no files in it.
    last: name of the file that makes the folder valid: it is removed first and uploaded last.
  """
  with tempfile.TemporaryDirectory(prefix='t5x_lite-') as folder:
    local = pathlib.Path(folder)
    with _naming(folder):
      yield local
    paths = [path for path in sorted(local.rglob('*')) if path.is_file()]
    names = [str(path.relative_to(local)) for path in paths]
    try:
      (target / last).unlink(missing_ok=True)
      surplus = sorted(set(target.find()) - set(names))
      object_store.in_parallel(lambda name: (target / name).unlink(missing_ok=True), surplus)
      others = [name for name in names if name != last]
      object_store.in_parallel(lambda name: (target / name).upload(local / name), others)
      (target / last).upload(local / last)
    except BaseException as error:
      if not isinstance(error, object_store.StoreUnavailableError):
        with contextlib.suppress(OSError):
          target.rmtree()
      raise


@contextlib.contextmanager
def local_file(suffix: str = '') -> Iterator[pathlib.Path]:
  """Yield the path of a temporary local file, which is removed afterwards."""
  handle, name = tempfile.mkstemp(prefix='t5x_lite-', suffix=suffix)
  os.close(handle)
  try:
    with _naming(name):
      yield pathlib.Path(name)
  finally:
    pathlib.Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
  """Add the path of a temporary file to the error of a full disk, which names none: TMPDIR may be elsewhere."""
  try:
    yield
  except OSError as error:
    if errors.is_disk_full(error) and error.filename is None:
      error.filename = path
    raise
