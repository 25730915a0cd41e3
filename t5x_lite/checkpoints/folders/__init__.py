"""Model directories on disks and in object stores, one class each with the same interface, see `base.Folder`."""

from __future__ import annotations

import dataclasses

from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints.folders import base
from t5x_lite.checkpoints.folders import disk
from t5x_lite.storage import files


def model_folder(path: files.PathLike) -> base.Folder:
  """Return the object of a model directory, which need not exist."""
  found = files.path(path)
  if files.is_remote(found):
    from t5x_lite.checkpoints.folders import store  # imports the libraries of stores

    return store.StoreFolder(found)
  return disk.DiskFolder(found)


def remove_checkpoint_dir(ckpt_dir: files.PathLike) -> None:
  """Delete a checkpoint unless it is pinned; a process that dies meanwhile leaves no partial checkpoint."""
  if not discovery.is_pinned_checkpoint(ckpt_dir):
    path = files.path(ckpt_dir)
    model_folder(path.parent).delete(path, path.name)


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
