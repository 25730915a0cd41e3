"""The last steps of a save, by which a directory of files becomes a checkpoint.

Everything is hashed into the manifest, and on disk, before one atomic rename gives the directory its name. A process
that dies before the rename leaves nothing that looks like a checkpoint, one that dies after it leaves a whole one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Any

import jax

from t5x_lite import errors, files
from t5x_lite.checkpoints import discovery, manifest

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingCheckpoint:
  """One save on its way to disk.

  Attributes:
    step: training step.
    temporary: the directory it is written to.
    final: the path that the commit gives it.
    arrays: name -> {'shape', 'dtype'}.
    metadata: what the caller wants recorded.
    metrics: metrics known at the save.
    has_data_state: whether each process wrote dataset state.
  """

  step: int
  temporary: pathlib.Path
  final: pathlib.Path
  arrays: Mapping[str, Any]
  metadata: Mapping[str, Any]
  metrics: Mapping[str, float]
  has_data_state: bool


def mark_part_written(pending: PendingCheckpoint) -> None:
  """Tells the lead process that this one has written its part; nothing to tell in a single process."""
  if jax.process_count() > 1:
    (pending.temporary / _mark(jax.process_index())).touch()


def commit(pending: PendingCheckpoint) -> None:
  """Turns what lies in `pending.temporary` into the checkpoint `pending.final`; for the lead process.

  Args:
    pending: all parts written, and marked so.

  A checkpoint that has the name already gives it up. It is deleted, but for one that is pinned or has no manifest: that
  is set aside under a name that says so.

  Raises:
    CheckpointError: a process has not written its part.
    OSError: the disk refuses; `pending.final` is then what it was before.
  """
  root = pending.temporary
  if jax.process_count() > 1:
    marks = [root / _mark(i) for i in range(jax.process_count())]
    missing = [i for i, mark in enumerate(marks) if not mark.exists()]
    if missing:
      raise errors.CheckpointError(f'process(es) {missing} could not write their part; see their messages')
    for mark in marks:
      mark.unlink()
  manifest.write(root, manifest.Manifest(
      step=pending.step, files=manifest.hash_files(root, manifest.list_files(root)), arrays=pending.arrays,
      metadata=pending.metadata, metrics=pending.metrics,
      num_data_processes=jax.process_count() if pending.has_data_state else 0, versions=manifest.library_versions()))
  files.fsync_tree(root)
  replaced = None
  if pending.final.exists():
    # Damaged, or of an earlier run that went another way. Two renames are not one: whoever finds the old checkpoint
    # set aside and nothing in its place gives it its name back (`discovery.clean_leftovers`).
    replaced = pending.final.with_name(f'{pending.final.name}{discovery.REPLACED_INFIX}{root.name}')
    pending.final.rename(replaced)
  try:
    root.rename(pending.final)
  except OSError:
    if replaced is not None:
      replaced.rename(pending.final)
    raise
  files.fsync(pending.final.parent)
  if replaced is not None and discovery.is_to_be_spared(replaced):
    _logger.warning('%s is kept as %s: it is pinned, or has no manifest because another program wrote it. The '
                    'checkpoint that this run has saved is in its place.', pending.final, replaced.name)
  elif replaced is not None:
    # What cannot be deleted now is tidied up when the directory is locked the next time.
    with contextlib.suppress(OSError):
      discovery.delete_under_other_name(replaced, pending.final.name)


def remove_dataset_checkpoint(ckpt_dir: discovery.PathLike) -> None:
  """Deletes a checkpoint's dataset state unless it is pinned; the checkpoint is whole at any instant of it."""
  if discovery.is_pinned_checkpoint(ckpt_dir):
    return
  root = pathlib.Path(ckpt_dir)
  found = manifest.read(root)
  if found is not None:
    # The manifest forgets the files before they go: without an entry they are not part of the checkpoint.
    kept = {name: entry for name, entry in found.files.items() if not name.startswith(f'{discovery.DATASET_DIRNAME}/')}
    manifest.write(root, dataclasses.replace(found, files=kept, num_data_processes=0))
  shutil.rmtree(root / discovery.DATASET_DIRNAME, ignore_errors=True)


def explain(error: BaseException) -> str:
  """Returns one line that says what went wrong while writing, with the remedy where it is known."""
  text = re.sub(r'\s+', ' ', f'{type(error).__name__}: {error}').strip()
  if errors.is_disk_full(error) or 'No space left' in text:
    return f'the disk is full ({text[:300]}); free some space, or keep fewer checkpoints (SaveCheckpointConfig.keep)'
  return text[:1000]  # TensorStore puts the cause after long paths


def _mark(process_index: int) -> str:
  return f'process_{process_index}.done'
