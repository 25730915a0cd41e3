"""State of the files, requests and locks of this process, one object for each folder in which a run writes.

A file or a request belongs to the nearest folder above it that is in the table, at last to the disk or the bucket. So
runs in different folders share no state, although their files and requests are known by their paths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import threading
from typing import Any


class OpenFolder:
  """State of this process for a folder and all that is below it, except below another open folder.

  Attributes:
    name: absolute path of the folder on a disk, or its path in an object store.
    guard: held while the folder is locked or released.
    lock: lock of the folder that this process holds, or None; see `checkpoints.locks.lock`.
    check_fn: function that raises if this process may not write below the folder, or None; see `files.fence`.
    retry_seconds: how long requests to a store are repeated, or None for the default.
    outage: times of the first and of the last failed request since one succeeded, or None.
    behind: path -> content of objects that `files.write` was told to write behind.
    behind_guard: held while they are written.
    appended: references to the `files.AppendedFile`s; not a WeakSet, which must not change while it is listed.
    parts: `files.AppendedParts` that are not closed.
    verified: path of a checkpoint -> state of its files when they were compared with their hashes.
  """

  def __init__(self, name: str):
    self.name = name
    self.guard = threading.Lock()
    self.lock: Any = None
    self.check_fn: Callable[[], None] | None = None
    self.retry_seconds: float | None = None
    self.outage: tuple[float, float] | None = None
    self.behind: dict[str, bytes] = {}
    self.behind_guard = threading.Lock()
    self.appended: set[Any] = set()
    self.parts: set[Any] = set()
    self.verified: dict[str, dict[str, Any]] = {}


# The one table that this process has: locks of the kernel belong to a process, and paths have no state.
_folders: dict[str, OpenFolder] = {}
# Notified when a limit of requests changes.
limit_changed = threading.Condition()


def open_folder(name: str) -> OpenFolder:
  """Return the object of a folder, which is made by the first call.

  Args:
    name: absolute path without links, or path in an object store.
  """
  return _folders.setdefault(name, OpenFolder(name))


def folders_above(name: str) -> Iterator[OpenFolder]:
  """Yield the open folders that are `name` or above it, the nearest first."""
  for above in _names_above(name):
    found = _folders.get(above)
    if found is not None:
      yield found


def folder_of(name: str) -> OpenFolder:
  """Return the nearest open folder that is `name` or above it, at last that of the disk or the bucket."""
  found = next(folders_above(name), None)
  if found is None:
    *_, root = _names_above(name)
    found = open_folder(root)
  return found


def folders_around(name: str) -> list[OpenFolder]:
  """Return the folder of `name`, see `folder_of`, and all that are above or below it."""
  nearest = folder_of(name)
  below = [
    folder for folder in all_folders() if folder is not nearest and _is_below(folder, nearest)
  ]
  return [*folders_above(nearest.name), *below]


def all_folders() -> list[OpenFolder]:
  """Return all open folders."""
  return list(_folders.values())


def clear() -> None:
  """Forget all folders, as if the process had begun now."""
  _folders.clear()


def _is_below(folder: OpenFolder, other: OpenFolder) -> bool:
  return other.name in _names_above(folder.name)


def _names_above(name: str) -> Iterator[str]:
  """Yield `name` and the folders above it, up to the root of the disk or the bucket."""
  scheme, separator, path = name.rpartition('://')
  parts = path.rstrip('/').split('/')
  for count in range(len(parts), 0, -1):
    above = '/'.join(parts[:count])
    yield f'{scheme}{separator}{above}' or '/'
