"""Commit of a save: turns a directory of files into a checkpoint.

All files are hashed into the manifest and flushed to disk before one atomic rename gives the directory its name. A
process that dies before the rename leaves no checkpoint; one that dies after it leaves a complete checkpoint.
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
  """A save that is not yet committed.

  Attributes:
    step: training step.
    temporary: directory to which the files are written.
    final: path of the checkpoint after the commit.
    arrays: name -> {'shape', 'dtype'}.
    metadata: values to record, as given to `save`.
    metrics: metrics known at the save.
    has_data_state: whether each process writes dataset state.
  """

  step: int
  temporary: pathlib.Path
  final: pathlib.Path
  arrays: Mapping[str, Any]
  metadata: Mapping[str, Any]
  metrics: Mapping[str, float]
  has_data_state: bool


def mark_part_written(pending: PendingCheckpoint) -> None:
  """Mark this process's part as written, for the lead process; does nothing in a single process."""
  if jax.process_count() > 1:
    (pending.temporary / _mark(jax.process_index())).touch()


def commit(pending: PendingCheckpoint) -> None:
  """Turn the directory `pending.temporary` into the checkpoint `pending.final`; only in the lead process.

  An existing checkpoint of that name is deleted; if it is pinned or has no manifest, it is renamed instead.

  Args:
    pending: the save, all of whose parts are written and marked.

  Raises:
    CheckpointError: a process has not written its part.
    OSError: a file cannot be written; `pending.final` is then unchanged.
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
    # Damaged, or of an earlier run. Between the two renames no checkpoint has the name: after a crash
    # `discovery.clean_leftovers` renames the old one back.
    replaced = pending.final.with_name(f'{pending.final.name}{discovery.REPLACED_INFIX}{root.name}')
    pending.final.rename(replaced)
  try:
    root.rename(pending.final)
  except OSError:
    if replaced is not None:
      replaced.rename(pending.final)
    raise
  files.fsync(pending.final.parent)
  if replaced is not None and discovery.is_protected(replaced):
    _logger.warning('The previous %s was renamed to %s and kept: it is pinned, or has no manifest because another '
                    'program wrote it.', pending.final, replaced.name)
  elif replaced is not None:
    # If this fails, the folder is deleted when the directory is locked the next time.
    with contextlib.suppress(OSError):
      discovery.rename_and_delete(replaced, pending.final.name)


def remove_dataset_checkpoint(ckpt_dir: discovery.PathLike) -> None:
  """Delete the dataset state of a checkpoint unless it is pinned; the checkpoint is valid at any time."""
  if discovery.is_pinned_checkpoint(ckpt_dir):
    return
  root = pathlib.Path(ckpt_dir)
  found = manifest.read(root)
  if found is not None:
    # First remove the files from the manifest: without an entry they are not part of the checkpoint.
    kept = {name: entry for name, entry in found.files.items() if not name.startswith(f'{discovery.DATASET_DIRNAME}/')}
    manifest.write(root, dataclasses.replace(found, files=kept, num_data_processes=0))
  shutil.rmtree(root / discovery.DATASET_DIRNAME, ignore_errors=True)


def explain(error: BaseException) -> str:
  """Return the cause of a failed write as one line, with the remedy if it is known."""
  text = re.sub(r'\s+', ' ', f'{type(error).__name__}: {error}').strip()
  if errors.is_disk_full(error) or 'No space left' in text:
    return f'the disk is full ({text[:300]}); free disk space, or keep fewer checkpoints (SaveCheckpointConfig.keep)'
  return text[:1000]  # TensorStore puts the cause after long paths


def _mark(process_index: int) -> str:
  return f'process_{process_index}.done'
