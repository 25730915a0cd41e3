"""Arrays to and from disk by way of Orbax, of which other modules know what `orbax()` gives them.

A state is a flat dict, '/'-joined name -> array. On disk it is an Orbax PyTree of nested dicts (OCDBT, zarr 3), which
any program that uses Orbax can read.
"""

from __future__ import annotations

import functools
import json
import logging as py_logging
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from t5x_lite import errors, tree_utils, untrusted
from t5x_lite.checkpoints import discovery

# Weights are noise to a compressor: zstd made these files 8 % smaller and the write half as slow again.
HANDLER_OPTIONS = {'use_ocdbt': True, 'use_zarr3': True, 'use_compression': False}
_BARRIER_TIMEOUT_SECONDS = 1200
_INDEX = '_METADATA'
# More than the files that Orbax writes beside the arrays of a state.
_MAX_EARLIER_ERRORS = 100
_REMEDY = 'Copy the checkpoint anew from where it comes from, or restore another one.'


class _QuietOrbax(py_logging.Filter):
  """Drops what Orbax logs: many lines per save and restore, and for an error its traceback once per thread it passes.

  Nothing is lost by it: an error of Orbax is raised by the call that it spoils, and told of in one message of ours.
  """

  def filter(self, record: py_logging.LogRecord) -> bool:
    files = [record.pathname]
    if record.exc_info and record.exc_info[2] is not None:  # told of through the threading module
      files += [frame.filename for frame in traceback.extract_tb(record.exc_info[2])]
    return not any(f'{os.sep}orbax{os.sep}' in file for file in files)


@functools.cache
def orbax():
  """Imports Orbax on first use (0.3 s that `--help` need not pay) and returns its module, made quiet."""
  for name in ('absl', 'asyncio'):  # asyncio tells of tasks of Orbax that failed after the first error
    py_logging.getLogger(name).addFilter(_QuietOrbax())
  sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)
  import orbax.checkpoint as ocp
  return ocp


def _report_unraisable(report_fn: Callable[[Any], None], unraisable: Any) -> None:
  """Reports an error of a callback unless it is TensorStore's answer to an event loop that a failed save has closed."""
  error = unraisable.exc_value
  if unraisable.object is not None or not isinstance(error, RuntimeError) or str(error) != 'Event loop is closed':
    report_fn(unraisable)


def barrier(name: str) -> None:
  """Waits for all processes without using devices, so that it is safe beside a running training step."""
  if jax.process_count() > 1:
    ocp = orbax()
    ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=_BARRIER_TIMEOUT_SECONDS * 1000)


def is_on_host(leaf: Any) -> bool:
  """Returns whether an array lies in host memory, as NumPy's and those of CPU "devices" do."""
  return not isinstance(leaf, jax.Array) or next(iter(leaf.sharding.device_set)).platform == 'cpu'


def snapshot(flat_state: Mapping[str, Any]) -> dict[str, jax.Array | np.ndarray]:
  """Returns arrays with the values of now, whatever the caller does to its own.

  In host memory Orbax would write from the very buffers that the next training step wants donated to it, so they are
  copied. Elsewhere Orbax's transfer to the host, which ends before `StateWriter.start` returns, is the copy.

  Args:
    flat_state: name -> array or number.

  Returns:
    name -> array.
  """
  result = {}
  for name, leaf in flat_state.items():
    if isinstance(leaf, jax.Array):
      result[name] = jax.device_put(leaf, leaf.sharding, may_alias=False) if is_on_host(leaf) else leaf
    else:
      result[name] = np.array(leaf)
  return jax.block_until_ready(result)


def may_start_later(snapshot_of_state: Mapping[str, jax.Array | np.ndarray]) -> bool:
  """Returns whether `StateWriter.start` may run in another thread than the one that trains.

  It may where the snapshot is a copy already, and where Orbax, alone, does not meet other processes on the devices.
  """
  return jax.process_count() == 1 and all(map(is_on_host, snapshot_of_state.values()))


class StateWriter:
  """Writes states one after the other; the second half of each write happens in Orbax's own thread."""

  def __init__(self):
    ocp = orbax()
    self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(**HANDLER_OPTIONS))

  def start(self, directory: pathlib.Path, flat_state: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Begins to write `flat_state` to `directory`; on return the arrays' values are safe from later changes."""
    ocp = orbax()
    # Orbax raises what went wrong in a write one error at a time, also in later writes, which may be whole.
    for _ in range(_MAX_EARLIER_ERRORS):
      try:
        self._checkpointer.wait_until_finished()
        break
      except Exception as e:  # pylint: disable=broad-exception-caught
        py_logging.getLogger(__name__).debug('An error of an earlier write: %s', e)
    self._checkpointer.save(directory, args=ocp.args.PyTreeSave(tree_utils.unflatten_dict(flat_state)))

  def finish(self) -> None:
    """Waits until the write is complete; raises what went wrong in the background."""
    self._checkpointer.wait_until_finished()

  def close(self) -> None:
    """Frees the threads."""
    self._checkpointer.close()


def state_dir(checkpoint_dir: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the folder below (or at) `checkpoint_dir` that holds an Orbax PyTree.

  Raises:
    CheckpointError: there is none, or it names, or links to, files outside the checkpoint.
  """
  root = pathlib.Path(checkpoint_dir).absolute()
  for name in (discovery.STATE_DIRNAME, ''):
    candidate = root / name
    if (candidate / _INDEX).is_file():
      problem = untrusted.tree_problem(root, name) or _problem_of_names(candidate)
      if problem is not None:
        raise errors.CheckpointError(f'The checkpoint {str(root)!r} cannot be read: {problem}. {_REMEDY}')
      return candidate
  raise errors.CheckpointError(
      f'{str(root)!r} holds no state that can be read: expected an Orbax PyTree (a file _METADATA) in it or in its '
      f"folder '{discovery.STATE_DIRNAME}'. Give the path of a checkpoint, such as MODEL_DIR/checkpoint_1000.")


def _problem_of_names(directory: pathlib.Path) -> str | None:
  """Returns what is wrong with the names of arrays, which without OCDBT are names of folders; None if nothing is."""
  try:
    entries = json.loads(untrusted.read_limited(directory, _INDEX))['tree_metadata'].values()
    names = ['.'.join(str(key['key']) for key in entry['key_metadata']) for entry in entries]
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
    return None  # Orbax says what is wrong with it.
  problems = (f'in {_INDEX}, the name of an array {problem}' for name in names
              if (problem := untrusted.name_problem(name)) is not None)
  return next(problems, None)


def read_shapes(directory: pathlib.Path) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the name, shape and dtype of each array that `directory` (see `state_dir`) holds.

  Raises:
    CheckpointError: the index cannot be read, or claims arrays or chunks that the files cannot hold.
  """
  ocp = orbax()
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    try:
      tree = checkpointer.metadata(directory).item_metadata.tree
    except Exception as e:  # Orbax and TensorStore raise many kinds for a file that is not what it should be.
      raise errors.CheckpointError(
          f'The index of {str(directory)!r} cannot be read: _METADATA, manifest.ocdbt or a file below d/ is missing or '
          f'damaged ({type(e).__name__}: {str(e)[:300]}). {_REMEDY}') from e
  leaves = {name: leaf for name, leaf in tree_utils.flatten_dict(tree).items() if hasattr(leaf, 'shape')}
  shapes = {name: jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in leaves.items()}
  most = untrusted.tree_bytes(directory) * untrusted.MAX_COMPRESSION['zstd']  # the most that Orbax compresses by
  for name, leaf in shapes.items():
    chunk = getattr(getattr(leaves[name], 'storage', None), 'chunk_shape', None) or ()
    for what, shape in (('shape', leaf.shape), ('chunk_shape', chunk)):
      if untrusted.num_bytes(shape, leaf.dtype) > most:
        raise errors.CheckpointError(
            f'The checkpoint {str(directory)!r} cannot be read: the {what} of {name} must fit into its files, got '
            f'{untrusted.shorten(tuple(shape))}. {_REMEDY}')
  return shapes


def read_arrays(directory: pathlib.Path, wanted: Mapping[str, tuple[Any, jax.sharding.Sharding | None]],
                ) -> dict[str, jax.Array | np.ndarray]:
  """Reads arrays; those that are not wanted are not touched.

  Args:
    directory: see `state_dir`.
    wanted: stored name -> (dtype to return, sharding), where no sharding means a NumPy array of the whole. All
      processes pass the same names and shardings.

  Returns:
    name -> array.

  Raises:
    CheckpointError: the arrays cannot be read.
  """
  ocp = orbax()

  def restore_args(dtype, sharding):
    if sharding is None:
      return ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype(dtype))
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, dtype=np.dtype(dtype), sharding=sharding)

  item = tree_utils.unflatten_dict({name: 0 for name in wanted})
  args = tree_utils.unflatten_dict({name: restore_args(*how) for name, how in wanted.items()})
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    try:
      tree = checkpointer.restore(
          directory, args=ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True))
    except Exception as e:  # See `read_shapes`.
      raise errors.CheckpointError(
          f'The arrays of {str(directory)!r} cannot be read ({type(e).__name__}: {str(e)[:300]}). {_REMEDY}') from e
  return tree_utils.flatten_dict(tree)


def place(flat_values: Mapping[str, Any], wanted: Mapping[str, jax.ShapeDtypeStruct],
          shardings: Mapping[str, jax.sharding.Sharding | None]) -> dict[str, jax.Array | np.ndarray]:
  """Returns values in the dtypes and layouts that are wanted.

  Args:
    flat_values: name -> array; the same on each process.
    wanted: name -> dtype, for these names and possibly more.
    shardings: name -> sharding, likewise; None for a NumPy array.

  Returns:
    name -> array.
  """
  placed, to_devices = {}, {}
  for name, value in flat_values.items():
    sharding, dtype = shardings[name], wanted[name].dtype
    if sharding is None:
      placed[name] = np.asarray(value).astype(dtype, copy=False)
    elif isinstance(value, jax.Array) or jax.process_count() == 1:
      to_devices[name] = value.astype(dtype) if value.dtype != dtype else value
    else:
      value = np.asarray(value).astype(dtype, copy=False)
      placed[name] = jax.make_array_from_callback(value.shape, sharding, functools.partial(_part, value))
  return placed | jax.device_put(to_devices, {name: shardings[name] for name in to_devices})


def _part(value: np.ndarray, index: Any) -> np.ndarray:
  return value[index]


def cast_floating(flat_state: Mapping[str, Any], is_cast_fn: Callable[[str], bool], dtype: Any) -> dict[str, Any]:
  """Returns `flat_state` with the floating arrays whose names `is_cast_fn` accepts in `dtype`."""
  dtype = jax.numpy.dtype(dtype)
  return {
      name: leaf.astype(dtype) if is_cast_fn(name) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) else leaf
      for name, leaf in flat_state.items()}
