"""Model directory in an object store, which has no rename.

The files of a save are written below the final name and hashed, and the manifest, written last, makes them a
checkpoint. A process that dies before the manifest leaves no checkpoint; one that dies after it leaves a complete one.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import json
import logging
import pathlib
from typing import Any

import jax

from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.folders import base
from t5x_lite.checkpoints.locks import lease
from t5x_lite.storage import files
from t5x_lite.storage import object_store
from t5x_lite.storage import untrusted

_logger = logging.getLogger(__name__)


class StoreFolder(base.Folder):
  """See `base.Folder`."""

  path: object_store.StorePath
  answers_late = True

  def __init__(self, path: object_store.StorePath):
    super().__init__(path)
    self._has_rest = False

  # ---- saves --------------------------------------------------------------------------------------------------------

  def new_save(self, step: int, attempt: str, **fields: Any) -> base.PendingCheckpoint:
    """See `base.Folder.new_save`."""
    final = self.path / f'{discovery.CHECKPOINT_PREFIX}_{step}'
    return base.PendingCheckpoint(
      folder=self,
      step=step,
      temporary=final,
      final=final,
      own_folder=f'{discovery.ATTEMPT_PREFIX}{attempt}',
      attempt=attempt,
      **fields,
    )

  def begin(self, pending: base.PendingCheckpoint) -> None:
    """Mark the folder as incomplete.

    An existing checkpoint of that name is moved away, and moved back if the save fails or the process dies.
    """
    if discovery.is_incomplete(pending.final):
      self.delete(pending.final, pending.final.name)
    elif pending.final.is_dir():
      self.move(pending.final, pending.replaced)
    self.mark_incomplete(pending.final, pending.attempt)

  def has_begun(self, pending: base.PendingCheckpoint) -> bool:
    """See `base.Folder.has_begun`."""
    mark = pending.final / discovery.INCOMPLETE_FILENAME
    return mark.is_file() and pending.attempt in mark.read_text()

  def mark_written(self, pending: base.PendingCheckpoint) -> None:
    """See `base.Folder.mark_written`; the mark has the hashes, so that the lead does not read the arrays of all."""
    if jax.process_count() == 1:
      return
    part = array_io.part_of(pending.state, jax.process_index()).relative_to(pending.temporary)
    names = untrusted.walk(pending.temporary, str(part))
    hashes = manifest_lib.hash_files(pending.temporary, names)
    files.write(pending.mark(jax.process_index()), json.dumps(hashes))

  def commit(
    self, pending: base.PendingCheckpoint, check_fn: Callable[[], None] = lambda: None
  ) -> None:
    """See `base.Folder.commit`."""
    root = pending.final
    hashes: dict[str, dict[str, Any]] = {}
    marks = pending.marks()
    for mark in marks:
      hashes |= json.loads(mark.read_bytes())
    for mark in marks:
      mark.unlink()
    array_io.merge(pending.state)
    listed = array_io.list_complete(root, pending.state)
    names = [name for name in listed if f'/{pending.own_folder}/' in name]
    unknown = [name for name in names if name not in hashes]
    hashes |= manifest_lib.hash_files(root, unknown)
    state_io.check_written(pending.state, pending.arrays)
    manifest = pending.manifest({name: hashes[name] for name in names})
    manifest_lib.write(root, manifest, check_fn)
    # The save has succeeded. What is left is removed when the directory is locked the next time.
    with contextlib.suppress(OSError):
      files.remove(root / discovery.INCOMPLETE_FILENAME)
      if pending.replaced.is_dir():
        self._remove_replaced(pending)

  def is_committed(self, pending: base.PendingCheckpoint) -> bool:
    """See `base.Folder.is_committed`."""
    return (pending.final / discovery.MANIFEST_FILENAME).is_file()

  def discard(self, pending: base.PendingCheckpoint, error: BaseException) -> None:
    """See `base.Folder.discard`; after an outage `discard_rest` does it, since each removal would wait."""
    if isinstance(error, object_store.StoreUnavailableError):
      self._has_rest = True
      return
    with contextlib.suppress(OSError):
      # A run that has taken the lease may have begun another one.
      if discovery.is_incomplete(pending.final) and self.has_begun(pending):
        self.delete(pending.final, pending.final.name)
        if pending.replaced.is_dir():
          self.move(pending.replaced, pending.final)

  def discard_rest(self) -> None:
    """See `base.Folder.discard_rest`."""
    if self._has_rest:
      self.clean_leftovers()
      self._has_rest = False

  def close(self) -> None:
    """See `base.Folder.close`; what is left is removed when the directory is locked the next time."""

  # ---- checkpoints --------------------------------------------------------------------------------------------------

  def mark_incomplete(self, path: files.Path, attempt: str = '') -> None:
    """Mark a folder, in which a save (named `attempt`) or a deletion begins."""
    files.write(
      path / discovery.INCOMPLETE_FILENAME,
      f'A save or a deletion has begun here. Without manifest.json this is not a checkpoint. {attempt}\n',
    )

  def delete(self, path: files.Path, final_name: str) -> None:
    """Mark a folder as incomplete, delete its manifest, then the others, and the mark last."""
    del final_name
    self.mark_incomplete(path)
    files.remove(path / discovery.MANIFEST_FILENAME)
    names = untrusted.walk(path)
    others = [path / name for name in names if name != discovery.INCOMPLETE_FILENAME]
    files.each(files.remove, others)
    files.remove(path / discovery.INCOMPLETE_FILENAME)

  def move(self, source: Any, target: Any) -> None:
    """Copy a checkpoint and delete the source."""
    self.mark_incomplete(target)
    names = untrusted.walk(source)
    last = (discovery.MANIFEST_FILENAME, discovery.INCOMPLETE_FILENAME)
    copied = [source / name for name in names if name not in last]
    files.each(lambda path: path.copy_object(target / path.relative_to(source)), copied)
    if discovery.MANIFEST_FILENAME in names:
      (source / discovery.MANIFEST_FILENAME).copy_object(target / discovery.MANIFEST_FILENAME)
    files.remove(target / discovery.INCOMPLETE_FILENAME)
    self.delete(source, source.name)

  def upload(self, source: pathlib.Path, name: str) -> None:
    """See `base.Folder.upload`."""
    target = self.path / name
    if discovery.is_incomplete(target):
      self.delete(target, target.name)
    discovery.check_free(target)
    self.mark_incomplete(target)
    names = [name for name in untrusted.walk(source) if name != discovery.MANIFEST_FILENAME]
    targets = [target / name for name in names]
    files.each(lambda path: path.upload(source / path.relative_to(target)), targets)
    content = (source / discovery.MANIFEST_FILENAME).read_bytes()
    (target / discovery.MANIFEST_FILENAME).write_bytes(content, files.fence_of(target))
    files.remove(target / discovery.INCOMPLETE_FILENAME)

  def clean_leftovers(self) -> list[str]:
    """See `base.Folder.clean_leftovers`."""
    done = []
    for entry, match in base.leftovers(self.path):
      if match is None and not discovery.is_checkpoint_dir_name(entry):
        continue
      if discovery.is_incomplete(entry):
        _logger.info('Removing %s, left behind by a run that died.', entry)
        self.delete(entry, entry.name)
        done.append(entry.name)
        continue
      if (entry / discovery.INCOMPLETE_FILENAME).is_file():  # the run died right after the commit
        files.remove(entry / discovery.INCOMPLETE_FILENAME)
      if match is not None and self._clean(entry, match):
        done.append(entry.name)
    return done

  # ---- lock ---------------------------------------------------------------------------------------------------------

  def make(self) -> None:
    """Do nothing: a store has neither folders nor links."""

  def check_can_be_made(self, what: str, elsewhere: str) -> None:
    """Do nothing: only a request shows it."""

  def lock(self, what: str, elsewhere: str) -> lease.Lease:
    """Take the lease of the directory, see `lease`."""
    return lease.Lease(self.path, discovery.LOCK_FILENAME, in_use=self.in_use(what, elsewhere))

  def check_same(self) -> None:
    """Do nothing: the path leads nowhere else."""

  def read_holder(self) -> str:
    """See `base.Folder.read_holder`."""
    return lease.read_holder(self.path / discovery.LOCK_FILENAME)

  def unwritable(self, error: Exception, what: str, elsewhere: str) -> errors.T5xLiteError:
    """See `base.Folder.unwritable`."""
    del elsewhere
    kind = errors.CheckpointError
    # The status of an outage tells a scheduler to try again.
    if isinstance(error, object_store.StoreUnavailableError):
      kind = errors.SaveError
    cause = getattr(error, 'strerror', None) or error
    return kind(f'The {what} {str(self.path)!r} cannot be written: {cause}.')
