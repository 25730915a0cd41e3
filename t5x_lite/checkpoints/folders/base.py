"""Interface of a model directory, in which saves become checkpoints: `disk` and `store` implement it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import logging
import pathlib
import re
from typing import Any, Protocol

import jax

from t5x_lite import errors
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingCheckpoint:
  """A save that is not yet committed.

  Attributes:
    folder: the model directory.
    step: training step.
    temporary: directory to which the files are written; in an object store the same as `final`.
    final: path of the checkpoint after the commit.
    own_folder: folder below those of arrays and of data states: of this attempt in a store, '' on a disk.
    arrays: name -> {'shape', 'dtype'}.
    metadata: values to record, as given to `save`.
    metrics: metrics known at the save.
    has_data_state: whether each process writes dataset state.
    attempt: text that no other save has: a name of the run, '-', and a number.
  """

  folder: Folder
  step: int
  temporary: files.Path
  final: files.Path
  own_folder: str
  arrays: Mapping[str, Any]
  metadata: Mapping[str, Any]
  metrics: Mapping[str, float]
  has_data_state: bool
  attempt: str

  @property
  def state(self) -> files.Path:
    """Folder of the arrays."""
    return self.temporary / discovery.STATE_DIRNAME / self.own_folder

  @property
  def replaced(self) -> files.Path:
    """Path of the checkpoint that this one replaces."""
    name = f'{discovery.CHECKPOINT_PREFIX}_{self.step}'
    return self.final.with_name(
      f'{name}{discovery.REPLACED_INFIX}{name}{discovery.WRITING_INFIX}{self.attempt}'
    )

  def mark(self, process_index: int) -> files.Path:
    """Return the path of the mark of a process that has written its part."""
    return self.temporary / f'{self.own_folder}process_{process_index}.done'

  def marks(self) -> list[files.Path]:
    """Return the marks of all processes; [] for a single process, which writes none.

    Raises:
      CheckpointError: a process has not written its part.
    """
    if jax.process_count() == 1:
      return []
    found = [self.mark(i) for i in range(jax.process_count())]
    missing = [i for i, mark in enumerate(found) if not mark.exists()]
    if missing:
      raise errors.CheckpointError(
        f'process(es) {missing} could not write their part; see their messages'
      )
    return found

  def manifest(self, hashes: Mapping[str, Mapping[str, Any]]) -> manifest.Manifest:
    """Return the manifest, with the hashes of all files."""
    return manifest.Manifest(
      step=self.step,
      files=hashes,
      arrays=self.arrays,
      metadata=self.metadata,
      metrics=self.metrics,
      num_data_processes=jax.process_count() if self.has_data_state else 0,
      versions=manifest.library_versions(),
    )


class HeldLock(Protocol):
  """The lock of a model directory that this process holds.

  Attributes:
    holder: text that names this process and is read by the others.
  """

  holder: str

  @property
  def is_deleted(self) -> bool:
    """True if the directory was deleted on its disk."""
    ...

  def check(self) -> None:
    """Raise if another process has locked the directory too; before a save and a commit."""

  def check_writing(self) -> None:
    """Raise if nothing may be written below the directory; before each file, see `files.fence`."""

  def release(self) -> None:
    """Free the directory."""

  def abandon(self) -> None:
    """Forget the lock in a forked child: it is the parent's."""


class Folder(abc.ABC):
  """A model directory.

  Attributes:
    path: the directory.
    answers_late: whether requests take so long that training does not wait for them.
  """

  answers_late = False

  def __init__(self, path: files.Path):
    self.path = path

  # ---- saves; all but `new_save`, `has_begun`, `mark_written` and `is_committed` only in the lead process -----------

  @abc.abstractmethod
  def new_save(self, step: int, attempt: str, **fields: Any) -> PendingCheckpoint:
    """Return a save of `step`; `attempt` distinguishes it from all others."""

  @abc.abstractmethod
  def begin(self, pending: PendingCheckpoint) -> None:
    """Make the directory to which the files are written."""

  @abc.abstractmethod
  def has_begun(self, pending: PendingCheckpoint) -> bool:
    """Return True if the lead process has called `begin` for a save."""

  @abc.abstractmethod
  def mark_written(self, pending: PendingCheckpoint) -> None:
    """Mark this process's part as written, for the lead process; does nothing in a single process."""

  @abc.abstractmethod
  def commit(self, pending: PendingCheckpoint, check_fn: Callable[[], None] = lambda: None) -> None:
    """Turn the files of a save into the checkpoint `pending.final`.

    An existing checkpoint of that name is deleted; if it is pinned or has no manifest, it is renamed instead.

    Args:
      pending: the save, all of whose parts are written and marked.
      check_fn: called right before the files become a checkpoint, in a store before each attempt; raises if the lock of
        the directory was lost, since the hashes of a large state, or a store that does not answer, take minutes.

    Raises:
      CheckpointError: a process has not written its part, or an array cannot be opened.
      OSError: a file cannot be written; `pending.final` is then unchanged.
    """

  @abc.abstractmethod
  def is_committed(self, pending: PendingCheckpoint) -> bool:
    """Return True if the save has become a checkpoint."""

  @abc.abstractmethod
  def discard(self, pending: PendingCheckpoint, error: BaseException) -> None:
    """Remove the files of a save that failed with `error`."""

  @abc.abstractmethod
  def discard_rest(self) -> None:
    """Remove what `discard` could not, before the next save begins."""

  @abc.abstractmethod
  def close(self) -> None:
    """End the use of the directory for saves."""

  def _remove_replaced(self, pending: PendingCheckpoint) -> None:
    replaced = pending.replaced
    if discovery.is_protected(replaced):
      _logger.warning(
        'The previous %s was renamed to %s and kept: it is pinned, or has no manifest because another '
        'program wrote it.',
        pending.final,
        replaced.name,
      )
      return
    # If this fails, the folder is deleted when the directory is locked the next time.
    with contextlib.suppress(OSError):
      self.delete(replaced, pending.final.name)

  # ---- checkpoints --------------------------------------------------------------------------------------------------

  @abc.abstractmethod
  def delete(self, path: files.Path, final_name: str) -> None:
    """Delete a folder so that a partially deleted one is never mistaken for a checkpoint, also of another program.

    Args:
      path: the folder.
      final_name: name of the checkpoint that the folder is or was.
    """

  @abc.abstractmethod
  def move(self, source: files.Path, target: files.Path) -> None:
    """Rename a checkpoint; the source or the target is complete at any time."""

  @abc.abstractmethod
  def upload(self, source: pathlib.Path, name: str) -> None:
    """Copy a checkpoint from a disk; that of this name is complete or does not exist.

    Raises:
      CheckpointError: there is something of that name that another program wrote.
    """

  @abc.abstractmethod
  def clean_leftovers(self) -> list[str]:
    """Remove leftovers of runs that died while saving or deleting; the caller must hold the lock.

    A checkpoint that was renamed to be replaced gets its name back if the new checkpoint was not committed; otherwise
    it is deleted unless it is protected.

    Returns:
      Names of the removed and renamed files and folders.
    """

  def _clean(self, entry: files.Path, match: re.Match[str]) -> bool:
    """Remove or rename a folder that is not a checkpoint; return False if it is kept."""
    if not entry.is_dir():
      return False
    final = entry.with_name(match.group(1))
    is_replaced = match.group(2) == discovery.REPLACED_INFIX
    if is_replaced and not final.exists():
      _logger.warning(
        'Renaming a checkpoint back to %s: the run that was replacing it died.', final
      )
      self.move(entry, final)
      return True
    if is_replaced and discovery.is_protected(entry):
      return False
    _logger.info('Removing %s, left behind by a run that died.', entry)
    self.delete(entry, final.name)
    return True

  # ---- lock ---------------------------------------------------------------------------------------------------------

  @abc.abstractmethod
  def make(self) -> None:
    """Make the directory if it is missing, and find its path without links."""

  @abc.abstractmethod
  def check_can_be_made(self, what: str, elsewhere: str) -> None:
    """Raise what `make` and `lock` would raise for the path; make nothing."""

  @abc.abstractmethod
  def lock(self, what: str, elsewhere: str) -> HeldLock:
    """Lock the directory.

    Args:
      what: name of the directory's kind, for messages.
      elsewhere: alternative to the directory, for messages.

    Raises:
      DirectoryInUseError: another process holds the lock.
      CheckpointError: the file system has no locks.
      OSError: the directory cannot be written.
    """

  @abc.abstractmethod
  def check_same(self) -> None:
    """Raise OSError if the path leads to another folder than the one of `make`, or to none.

    It does after a rename or an unmount. What is written there would go into the folder of another run, or into a new
    folder that nobody has locked. Does nothing in an object store.
    """

  @abc.abstractmethod
  def read_holder(self) -> str:
    """Return the text `HeldLock.holder` of the process that has locked the directory; raises OSError without one."""

  @abc.abstractmethod
  def unwritable(self, error: Exception, what: str, elsewhere: str) -> errors.T5xLiteError:
    """Return the error to raise for one of `make`, `lock` or `clean_leftovers`."""

  def in_use(self, what: str, elsewhere: str) -> str:
    """Return the message about the directory that `{holder}` uses."""
    name = repr(str(self.path)).replace('{', '{{').replace('}', '}}')
    return f'The {what} {name} is in use by {{holder}}. Wait for that run or stop it, or choose {elsewhere}.'


def leftovers(path: files.Path) -> Sequence[tuple[files.Path, re.Match[str] | None]]:
  """Return (entry, match of its name as that of a leftover) of all entries of a model directory."""
  entries = sorted(path.iterdir())
  return [(entry, discovery.LEFTOVER_RE.fullmatch(entry.name)) for entry in entries]


def explain(error: BaseException) -> str:
  """Return the cause of a failed write as one line, with the remedy if it is known."""
  text = re.sub(r'\s+', ' ', f'{type(error).__name__}: {error}').strip()
  if errors.is_disk_full(error) or 'No space left' in text:
    return f'the disk is full ({text[:300]}); free disk space, or keep fewer checkpoints (SaveCheckpointConfig.keep)'
  return text[:1000]  # TensorStore puts the cause after long paths
