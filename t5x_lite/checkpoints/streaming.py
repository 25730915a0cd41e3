"""Writing a t5x_lite checkpoint one array at a time, for states that are larger than memory.

A custom handler gives Orbax the value of each leaf when it is written, so the files have Orbax's format. Training uses
`CheckpointManager` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import contextlib
import functools
import json
import threading
from typing import Any
import uuid

import numpy as np

from t5x_lite import errors
from t5x_lite import files
from t5x_lite import plain_paths
from t5x_lite import tree_utils
from t5x_lite.checkpoints import commit as commit_lib
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import lock
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints import store_io

# Small arrays are written together up to this size, which saves files; larger arrays are written separately.
_GROUP_BYTES = 2**24
_GROUP_ARRAYS = 32


class _Leaf:
  """Placeholder for an array that is read later; Orbax uses `shape` and `dtype`."""

  def __init__(self, name: str, order: int, shape: Any, read_fn: Callable[[str], np.ndarray]):
    self.name = name
    self.order = order
    self.shape = tuple(shape.shape)
    self.dtype = np.dtype(shape.dtype)
    self._read_fn = read_fn

  @property
  def num_bytes(self) -> int:
    """Size of the array in bytes."""
    return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

  def read(self) -> np.ndarray:
    """Return the array; raises CheckpointError if its shape or dtype differs."""
    array = np.asarray(self._read_fn(self.name))
    if array.shape != self.shape or array.dtype != self.dtype:
      raise errors.CheckpointError(
        f'{self.name} must be {self.dtype} {self.shape}, got {array.dtype} {array.shape}.'
      )
    return np.ascontiguousarray(array).reshape(self.shape)


@functools.cache
def _handler_class():
  """Return the class of the handler; defined on first use, since its base class is Orbax's."""
  ocp = state_io.orbax()

  class LeafHandler(ocp.type_handlers.NumpyHandler):
    """Handler that writes leaves as NumPy arrays in their order, a few at a time."""

    def __init__(self):
      super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Sequence[Any], infos, args=None):
      """See base class; all leaves are written on return."""
      del args
      group = []
      num_bytes = 0
      pairs = sorted(zip(values, infos, strict=True), key=lambda pair: pair[0].order)
      for leaf, info in pairs:
        if group and (len(group) == _GROUP_ARRAYS or num_bytes + leaf.num_bytes > _GROUP_BYTES):
          await self._write(group)
          group = []
          num_bytes = 0
        group.append((leaf.read(), info))
        num_bytes += leaf.num_bytes
      if group:
        await self._write(group)
      return []

    async def _write(self, group):
      # Wait for all futures: after an error of one, another would find a closed event loop.
      futures = []
      for array, info in group:
        futures += await super().serialize([array], [info])
      waits = [asyncio.to_thread(future.result) for future in futures]
      results = await asyncio.gather(*waits, return_exceptions=True)
      for error in results:
        if isinstance(error, BaseException):
          raise error

  return LeafHandler


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
    pending = commit_lib.new_save(
      held.directory,
      step,
      uuid.uuid4().hex[:8],
      arrays=manifest.describe_arrays(arrays),
      metadata=json.loads(json.dumps(dict(metadata or {}))),
      metrics={},
      has_data_state=False,
    )
    discovery.check_free(pending.final)
    try:
      commit_lib.begin(pending)
      _write_state(pending.state, arrays, read_fn)
      commit_lib.commit(pending, held.check)
    except BaseException:
      if files.is_remote(pending.final):
        with contextlib.suppress(OSError):
          commit_lib.discard(pending)
      else:
        files.remove_tree(pending.temporary, ignore_errors=True)
      raise
  return discovery.get_checkpoint_dir(directory, step)


def _write_state(
  directory: files.Path, arrays: Mapping[str, Any], read_fn: Callable[[str], np.ndarray]
) -> None:
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

  # Orbax does not store arrays without elements; the manifest has their shapes.
  if files.is_remote(directory):
    with_elements = {name: leaf for name, leaf in arrays.items() if 0 not in leaf.shape}
    store_io.write_one_by_one(
      directory, with_elements, lambda name: _Leaf(name, 0, arrays[name], read_fn).read()
    )
    return
  leaves = {
    name: _Leaf(name, i, leaf, read)
    for i, (name, leaf) in enumerate(arrays.items())
    if 0 not in leaf.shape
  }
  try:
    # Run Orbax's event loops in another thread: Ctrl-C could be lost in them, or leave them open.
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='checkpoint-stream') as pool:
      try:
        pool.submit(_save, directory, leaves).result()
      finally:
        stopped.set()
  except Exception as e:  # Orbax and TensorStore raise exceptions of many types
    if own:
      raise own[0] from None
    if isinstance(e, errors.T5xLiteError):
      raise
    raise errors.CheckpointError(
      f'The checkpoint could not be written to {str(directory.parent)!r}: {commit_lib.explain(e)}.'
    ) from e


def _save(directory: files.Path, leaves: Mapping[str, _Leaf]) -> None:
  ocp = state_io.orbax()
  registry = ocp.type_handlers.create_type_handler_registry((_Leaf, _handler_class()()))
  handler = ocp.PyTreeCheckpointHandler(**state_io.HANDLER_OPTIONS, type_handler_registry=registry)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(
      plain_paths.plain_path(directory),
      args=ocp.args.PyTreeSave(tree_utils.unflatten_dict(leaves)),
    )
