"""Commit of a save: turns a directory of files into a checkpoint.

On a disk, all files are hashed into the manifest and flushed before one atomic rename gives the directory its name. In
an object store they are written below the final name and hashed, and the manifest, written last, makes them a
checkpoint. A process that dies before the rename or the manifest leaves no checkpoint; one that dies after it leaves a
complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import json
import logging
import re
from typing import Any

import jax

from t5x_lite import errors
from t5x_lite import files
from t5x_lite import untrusted
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints import state_io

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingCheckpoint:
  """A save that is not yet committed.

  Attributes:
    step: training step.
    temporary: directory to which the files are written; in an object store the same as `final`.
    final: path of the checkpoint after the commit.
    arrays: name -> {'shape', 'dtype'}.
    metadata: values to record, as given to `save`.
    metrics: metrics known at the save.
    has_data_state: whether each process writes dataset state.
    attempt: text that no other save has.
  """

  step: int
  temporary: files.Path
  final: files.Path
  arrays: Mapping[str, Any]
  metadata: Mapping[str, Any]
  metrics: Mapping[str, float]
  has_data_state: bool
  attempt: str

  @property
  def own_folder(self) -> str:
    """Folder below those of arrays and of data states: of this attempt in a store, '' on a disk."""
    if files.is_remote(self.final):
      return f'{discovery.ATTEMPT_PREFIX}{self.attempt}'
    return ''

  @property
  def state(self) -> files.Path:
    """Folder of the arrays."""
    return self.temporary / discovery.STATE_DIRNAME / self.own_folder


def new_save(directory: files.Path, step: int, attempt: str, **fields: Any) -> PendingCheckpoint:
  """Return a save of `step` below a model directory; `attempt` distinguishes it from all others."""
  final = directory / f'{discovery.CHECKPOINT_PREFIX}_{step}'
  if files.is_remote(directory):
    temporary = final
  else:
    temporary = final.with_name(f'{final.name}{discovery.WRITING_INFIX}{attempt}')
  return PendingCheckpoint(step=step, temporary=temporary, final=final, attempt=attempt, **fields)


def begin(pending: PendingCheckpoint) -> None:
  """Make the directory to which the files are written; only in the lead process.

  In a store, an existing checkpoint of that name is moved away, and moved back if the save fails or the process dies.
  """
  if not files.is_remote(pending.final):
    pending.temporary.mkdir()
    return
  if discovery.is_incomplete(pending.final):
    discovery.delete(pending.final, pending.final.name)
  elif pending.final.is_dir():
    discovery.move(pending.final, _replaced(pending))
  discovery.mark_incomplete(pending.final, pending.attempt)


def has_begun(pending: PendingCheckpoint) -> bool:
  """Return True if the lead process has called `begin` for a save."""
  if not files.is_remote(pending.final):
    return pending.temporary.is_dir()
  mark = pending.final / discovery.INCOMPLETE_FILENAME
  return mark.is_file() and pending.attempt in mark.read_text()


def discard(pending: PendingCheckpoint) -> None:
  """Remove the files of a save in a store that failed; only in the lead process."""
  # A run that has taken the lease may have begun another one.
  if discovery.is_incomplete(pending.final) and has_begun(pending):
    discovery.delete(pending.final, pending.final.name)
    if _replaced(pending).is_dir():
      discovery.move(_replaced(pending), pending.final)


def is_unavailable(error: BaseException | None) -> bool:
  """Return True if an error says that an object store does not answer."""
  if not isinstance(error, OSError):
    return False
  from t5x_lite import object_store

  return isinstance(error, object_store.StoreUnavailableError)


def is_committed(pending: PendingCheckpoint) -> bool:
  """Return True if the save has become a checkpoint."""
  if not files.is_remote(pending.final):
    # It was renamed; without the second condition, a directory that is away would have all checkpoints.
    return not pending.temporary.exists() and pending.final.is_dir()
  return (pending.final / discovery.MANIFEST_FILENAME).is_file()


def _replaced(pending: PendingCheckpoint) -> files.Path:
  """Return the path of the checkpoint that a save replaces."""
  name = f'{discovery.CHECKPOINT_PREFIX}_{pending.step}'
  return pending.final.with_name(
    f'{name}{discovery.REPLACED_INFIX}{name}{discovery.WRITING_INFIX}{pending.attempt}'
  )


def mark_part_written(pending: PendingCheckpoint) -> None:
  """Mark this process's part as written, for the lead process; does nothing in a single process.

  In a store, the mark has the hashes of this process's arrays, so that the lead does not read the arrays of all.
  """
  if jax.process_count() > 1:
    mark = _mark(pending, jax.process_index())
    if files.is_remote(mark):
      part = array_io.part_of(pending.state, jax.process_index()).relative_to(pending.temporary)
      names = untrusted.walk(pending.temporary, str(part))
      files.write(mark, json.dumps(manifest.hash_files(pending.temporary, names)))
    else:
      mark.touch()


def commit(pending: PendingCheckpoint, check_fn: Callable[[], None] = lambda: None) -> None:
  """Turn the directory `pending.temporary` into the checkpoint `pending.final`; only in the lead process.

  An existing checkpoint of that name is deleted; if it is pinned or has no manifest, it is renamed instead.

  Args:
    pending: the save, all of whose parts are written and marked.
    check_fn: called right before the files become a checkpoint, in a store before each attempt; raises if the lock of
      the directory was lost, since the hashes of a large state, or a store that does not answer, take minutes.

  Raises:
    CheckpointError: a process has not written its part, or an array cannot be opened.
    OSError: a file cannot be written; `pending.final` is then unchanged.
  """
  root = pending.temporary
  in_store = files.is_remote(root)
  known: dict[str, dict[str, Any]] = {}
  if jax.process_count() > 1:
    marks = [_mark(pending, i) for i in range(jax.process_count())]
    missing = [i for i, mark in enumerate(marks) if not mark.exists()]
    if missing:
      raise errors.CheckpointError(
        f'process(es) {missing} could not write their part; see their messages'
      )
    if in_store:
      for mark in marks:
        known |= json.loads(mark.read_bytes())
    for mark in marks:
      mark.unlink()
  array_io.merge(pending.state)
  if in_store:
    listed = array_io.list_complete(root, pending.state)
    names = [name for name in listed if f'/{pending.own_folder}/' in name]
  else:
    names = manifest.list_files(root)
  unknown = [name for name in names if name not in known]
  hashed = known | manifest.hash_files(root, unknown)
  hashes = {name: hashed[name] for name in names}
  state_io.check_written(pending.state, pending.arrays)
  if not in_store:
    check_fn()
  manifest.write(
    root,
    manifest.Manifest(
      step=pending.step,
      files=hashes,
      arrays=pending.arrays,
      metadata=pending.metadata,
      metrics=pending.metrics,
      num_data_processes=jax.process_count() if pending.has_data_state else 0,
      versions=manifest.library_versions(),
    ),
    check_fn if in_store else None,
  )
  replaced = _replaced(pending)
  if in_store:
    # The save has succeeded. What is left is removed when the directory is locked the next time.
    with contextlib.suppress(OSError):
      files.remove(root / discovery.INCOMPLETE_FILENAME)
      _remove_replaced(pending, replaced.is_dir())
  else:
    _remove_replaced(pending, _rename(root, pending.final, replaced))


def _remove_replaced(pending: PendingCheckpoint, has_replaced: bool) -> None:
  replaced = _replaced(pending)
  if has_replaced and discovery.is_protected(replaced):
    _logger.warning(
      'The previous %s was renamed to %s and kept: it is pinned, or has no manifest because another '
      'program wrote it.',
      pending.final,
      replaced.name,
    )
  elif has_replaced:
    # If this fails, the folder is deleted when the directory is locked the next time.
    with contextlib.suppress(OSError):
      discovery.delete(replaced, pending.final.name)


def _rename(temporary: files.Path, final: files.Path, replaced: files.Path) -> bool:
  """Rename the directory of a save on a disk to `final`, after renaming a former `final` to `replaced`."""
  files.fsync_tree(temporary)
  is_replacing = final.exists()
  if is_replacing:
    # Damaged, or of an earlier run. Between the two renames no checkpoint has the name: after a crash
    # `discovery.clean_leftovers` renames the old one back.
    final.rename(replaced)
  try:
    temporary.rename(final)
  except OSError:
    if is_replacing:
      replaced.rename(final)
    raise
  files.fsync(final.parent)
  return is_replacing


def remove_dataset_checkpoint(
  ckpt_dir: discovery.PathLike, train_ds_prefix: str | None = None
) -> None:
  """Delete the dataset state of a checkpoint unless it is pinned; the checkpoint is valid at any time.

  Args:
    ckpt_dir: the checkpoint.
    train_ds_prefix: also delete the files whose names begin with it, T5X's 'train_ds'; None for none.
  """
  if discovery.is_pinned_checkpoint(ckpt_dir):
    return
  root = files.path(ckpt_dir)
  found = manifest.read(root)
  if found is not None:
    # First remove the files from the manifest: without an entry they are not part of the checkpoint.
    kept = {
      name: entry
      for name, entry in found.files.items()
      if not name.startswith(f'{discovery.DATASET_DIRNAME}/')
    }
    manifest.write(root, dataclasses.replace(found, files=kept, num_data_processes=0))
  if train_ds_prefix:
    for path in list(root.iterdir()):
      if path.name.startswith(train_ds_prefix):
        files.remove(path)
  files.remove_tree(root / discovery.DATASET_DIRNAME, ignore_errors=True)


def explain(error: BaseException) -> str:
  """Return the cause of a failed write as one line, with the remedy if it is known."""
  text = re.sub(r'\s+', ' ', f'{type(error).__name__}: {error}').strip()
  if errors.is_disk_full(error) or 'No space left' in text:
    return f'the disk is full ({text[:300]}); free disk space, or keep fewer checkpoints (SaveCheckpointConfig.keep)'
  return text[:1000]  # TensorStore puts the cause after long paths


def _mark(pending: PendingCheckpoint, process_index: int) -> files.Path:
  return pending.temporary / f'{pending.own_folder}process_{process_index}.done'
