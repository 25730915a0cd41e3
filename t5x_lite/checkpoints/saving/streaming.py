"""Writing a t5x_lite checkpoint one array at a time, for states that are larger than memory.

The files have Orbax's format. Training uses `CheckpointManager` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
from typing import Any
import uuid

import numpy as np

from t5x_lite import errors
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import folders
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints.folders import base
from t5x_lite.checkpoints.locks import lock
from t5x_lite.storage import files


def write_checkpoint(
  directory: discovery.PathLike,
  step: int,
  arrays: Mapping[str, Any],
  read_fn: Callable[[str], np.ndarray],
  *,
  metadata: Mapping[str, Any] | None = None,
) -> str:
  """Write a checkpoint atomically, one array at a time.

  Args:
    directory: the model directory, created if it is missing and locked meanwhile; must have no checkpoint of this step.
    step: number of training steps taken.
    arrays: name in the state -> object with `shape` and `dtype`, in the order of reading and writing.
    read_fn: function from a name to the array of that shape and dtype; its exceptions are raised unchanged.
    metadata: JSON values, returned at restore.

  Returns:
    Path of the checkpoint.

  Raises:
    CheckpointError: the checkpoint exists or cannot be written.
    DirectoryInUseError: another process holds the directory.
  """
  with lock.lock_model_dir(directory) as held:
    folder = folders.model_folder(held.directory)
    pending = folder.new_save(
      step,
      f'{uuid.uuid4().hex[:8]}-1',
      arrays=manifest.describe_arrays(arrays),
      metadata=json.loads(json.dumps(dict(metadata or {}))),
      metrics={},
      has_data_state=False,
    )
    discovery.check_free(pending.final)
    try:
      folder.begin(pending)
      _write_state(pending.state, arrays, read_fn)
      folder.commit(pending, held.check)
    except BaseException as e:
      folder.discard(pending, e)
      raise
  return discovery.get_checkpoint_dir(directory, step)


def _write_state(
  directory: files.Path, arrays: Mapping[str, Any], read_fn: Callable[[str], np.ndarray]
) -> None:
  own: list[BaseException] = []

  def read(name: str) -> np.ndarray:
    try:
      return _checked(name, arrays[name], read_fn(name))
    except BaseException as e:
      own.append(e)
      raise

  # Arrays without elements are not stored; the manifest has their shapes.
  with_elements = {name: leaf for name, leaf in arrays.items() if 0 not in leaf.shape}
  try:
    array_io.write_one_by_one(directory, with_elements, read)
  except OSError as e:
    if own or files.is_remote(directory):
      raise
    raise errors.CheckpointError(
      f'The checkpoint could not be written to {str(directory.parent)!r}: {base.explain(e)}.'
    ) from e


def _checked(name: str, leaf: Any, value: Any) -> np.ndarray:
  """Return `value` as an array; raise CheckpointError if it has another shape or dtype than `leaf`."""
  array = np.asarray(value)
  shape = tuple(leaf.shape)
  dtype = np.dtype(leaf.dtype)
  if array.shape != shape or array.dtype != dtype:
    raise errors.CheckpointError(
      f'{name} must be {dtype} {shape}, got {array.dtype} {array.shape}.'
    )
  return np.ascontiguousarray(array).reshape(shape)
