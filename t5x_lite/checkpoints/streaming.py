"""A checkpoint of our own form, written array by array: what is larger than memory need never be there as a whole.

Orbax asks a handler of ours for each leaf's value when its turn has come, so the files are Orbax's own and anything
that reads other checkpoints reads these. For what trains there is `CheckpointManager`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import os
import pathlib
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5x_lite import errors, tree_utils
from t5x_lite.checkpoints import commit as commit_lib
from t5x_lite.checkpoints import discovery, lock, manifest, state_io

# Small arrays are written together up to so many bytes, which saves files; a larger one stands alone.
_GROUP_BYTES = 2**24
_GROUP_ARRAYS = 32


class _Leaf:
  """Stands for an array that is not there yet; Orbax looks at `shape` and `dtype`."""

  def __init__(self, name: str, order: int, shape: Any, read_fn: Callable[[str], np.ndarray]):
    self.name, self.order = name, order
    self.shape, self.dtype = tuple(shape.shape), np.dtype(shape.dtype)
    self._read_fn = read_fn

  @property
  def num_bytes(self) -> int:
    """What it takes."""
    return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

  def read(self) -> np.ndarray:
    """Returns the array; raises CheckpointError where it is not what was announced."""
    array = np.asarray(self._read_fn(self.name))
    if array.shape != self.shape or array.dtype != self.dtype:
      raise errors.CheckpointError(f'{self.name}: got {array.dtype} {array.shape}, expected {self.dtype} {self.shape}.')
    return np.ascontiguousarray(array).reshape(self.shape)


@functools.cache
def _handler_class():
  """Returns the class of the handler, whose base is Orbax's: defined when that is needed."""
  ocp = state_io.orbax()

  class LeafHandler(ocp.type_handlers.NumpyHandler):
    """Writes leaves as NumPy arrays, in their order, a few at a time."""

    def __init__(self):
      super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values, infos, args=None):
      """See base class; on return all is written."""
      del args
      group, num_bytes = [], 0
      for leaf, info in sorted(zip(values, infos, strict=True), key=lambda pair: pair[0].order):
        if group and (len(group) == _GROUP_ARRAYS or num_bytes + leaf.num_bytes > _GROUP_BYTES):
          await self._write(group)
          group, num_bytes = [], 0
        group.append((leaf.read(), info))
        num_bytes += leaf.num_bytes
      if group:
        await self._write(group)
      return []

    async def _write(self, group):
      # Each with a future of its own, and all are waited for: what ends after another has failed would meet a closed
      # event loop.
      futures = []
      for array, info in group:
        futures += await super().serialize([array], [info])
      results = await asyncio.gather(*(asyncio.to_thread(future.result) for future in futures), return_exceptions=True)
      for error in results:
        if isinstance(error, BaseException):
          raise error

  return LeafHandler


def write_checkpoint(directory: discovery.PathLike, step: int, arrays: Mapping[str, Any],
                     read_fn: Callable[[str], np.ndarray], *, metadata: Mapping[str, Any] | None = None) -> str:
  """Writes a checkpoint, one array after another, whole or not at all.

  Args:
    directory: the model directory, which is made where it is missing and locked meanwhile. It must have no checkpoint
      of this step.
    step: number of training steps taken.
    arrays: name in the state -> anything with `shape` and `dtype`; they are read and written in this order.
    read_fn: function from a name to the array of that shape and dtype.
    metadata: anything that JSON can hold; given back at restore.

  Returns:
    Path of the checkpoint.

  Raises:
    CheckpointError: there is such a checkpoint already, or it could not be written. What `read_fn` raises passes.
    DirectoryInUseError: another process holds the directory.
  """
  with lock.lock_model_dir(directory) as held:
    final = pathlib.Path(discovery.get_checkpoint_dir(held.directory, step))
    if os.path.lexists(final):
      raise errors.CheckpointError(f'{str(final)!r} exists already; expected a directory without a checkpoint of step '
                                   f'{step}. Give another directory.')
    temporary = final.with_name(f'{final.name}{discovery.WRITING_INFIX}{uuid.uuid4().hex[:8]}')
    pending = commit_lib.PendingCheckpoint(
        step=step, temporary=temporary, final=final, arrays=manifest.describe_arrays(arrays),
        metadata=json.loads(json.dumps(dict(metadata or {}))), metrics={}, has_data_state=False)
    try:
      temporary.mkdir()
      _write_state(temporary / discovery.STATE_DIRNAME, arrays, read_fn)
      commit_lib.commit(pending)
    except BaseException:
      shutil.rmtree(temporary, ignore_errors=True)
      raise
  return discovery.get_checkpoint_dir(directory, step)


def _write_state(directory: pathlib.Path, arrays: Mapping[str, Any], read_fn: Callable[[str], np.ndarray]) -> None:
  own: list[BaseException] = []
  stopped = threading.Event()

  def read(name):
    try:
      if stopped.is_set():
        raise InterruptedError(f'stopped before {name}')
      return read_fn(name)
    except BaseException as e:
      own.append(e)
      raise

  # Orbax stores no arrays without elements; the manifest says of what shape they are, and that is all of them.
  leaves = {name: _Leaf(name, i, leaf, read) for i, (name, leaf) in enumerate(arrays.items()) if 0 not in leaf.shape}
  try:
    # Ctrl-C in the midst of Orbax's event loops may be lost, or leave them open: it meets this thread, not theirs.
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint-stream') as pool:
      try:
        pool.submit(_save, directory, leaves).result()
      finally:
        stopped.set()
  except Exception as e:  # Orbax and TensorStore raise many kinds.
    if own:
      raise own[0]  # pylint: disable=raise-missing-from
    if isinstance(e, errors.T5xLiteError):
      raise
    raise errors.CheckpointError(
        f'The checkpoint could not be written to {str(directory.parent)!r}: {commit_lib.explain(e)}.') from e


def _save(directory: pathlib.Path, leaves: Mapping[str, _Leaf]) -> None:
  ocp = state_io.orbax()
  registry = ocp.type_handlers.create_type_handler_registry((_Leaf, _handler_class()()))
  handler = ocp.PyTreeCheckpointHandler(**state_io.HANDLER_OPTIONS, type_handler_registry=registry)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(directory, args=ocp.args.PyTreeSave(tree_utils.unflatten_dict(leaves)))
