"""Reading arrays with Orbax; other modules get Orbax from `orbax()`.

A state is a flat dict, '/'-joined name -> array. On disk it is an Orbax PyTree of nested dicts (OCDBT, zarr 3), which
any program with Orbax can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import itertools
import json
import logging as py_logging
import os
import sys
import traceback
from typing import Any

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import array_io
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.storage import files
from t5x_lite.storage import plain_paths
from t5x_lite.storage import untrusted

_BARRIER_TIMEOUT_SECONDS = 1200
# Orbax's index of the names of arrays.
INDEX_FILENAME = '_METADATA'
_REMEDY = 'Copy the checkpoint again, or restore another one.'


class _QuietOrbax(py_logging.Filter):
  """Filter that drops log records of Orbax: many lines per restore, and errors of reads that run at the same time.

  Errors of Orbax are raised by the failing call and reported in one message.
  """

  def filter(self, record: py_logging.LogRecord) -> bool:
    paths = [record.pathname]
    if record.exc_info and record.exc_info[2] is not None:  # logged by the threading module
      paths += [frame.filename for frame in traceback.extract_tb(record.exc_info[2])]
    if record.name == 'asyncio' and record.exc_info and 'OCDBT' in str(record.exc_info[1]):
      return False  # Orbax raises the first error of several reads of TensorStore, and never asks for the others.
    return not any(f'{os.sep}orbax{os.sep}' in file for file in paths)


@functools.cache
def orbax():
  """Import Orbax on first use (0.3 s) and return its module, without its log records."""
  for name in ('absl', 'asyncio'):  # asyncio logs tasks of Orbax that fail after the first error
    py_logging.getLogger(name).addFilter(_QuietOrbax())
  sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)
  import orbax.checkpoint as ocp

  return ocp


def _report_unraisable(report_fn: Callable[[Any], None], unraisable: Any) -> None:
  """Report an error of a callback, except TensorStore's error about an event loop that a failed read has closed."""
  error = unraisable.exc_value
  if (
    unraisable.object is not None
    or not isinstance(error, RuntimeError)
    or str(error) != 'Event loop is closed'
  ):
    report_fn(unraisable)


def barrier(name: str) -> None:
  """Wait for all processes without using devices, so that training steps can run meanwhile."""
  if jax.process_count() > 1:
    ocp = orbax()
    ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=_BARRIER_TIMEOUT_SECONDS * 1000)


def state_dir(checkpoint_dir: files.PathLike) -> files.Path:
  """Return the folder at or below `checkpoint_dir` that holds an Orbax PyTree.

  Raises:
    CheckpointError: the folder does not exist, or it has names of, or links to, files outside of the checkpoint.
  """
  root = files.path(checkpoint_dir).absolute()
  problem = f"there is no Orbax PyTree (a file _METADATA) in it or in its folder '{discovery.STATE_DIRNAME}'"
  for name in itertools.chain((discovery.STATE_DIRNAME, ''), manifest.attempts(root)):
    candidate = root / name
    if (candidate / INDEX_FILENAME).is_file():
      problem = untrusted.tree_problem(root, name) or _problem_of_names(candidate)
      if problem is None:
        return candidate
      break
  raise errors.CheckpointError(f'The checkpoint {str(root)!r} cannot be read: {problem}. {_REMEDY}')


def _problem_of_names(directory: files.Path) -> str | None:
  """Return the first problem of the names of arrays, which are folder names without OCDBT; None if all are valid."""
  try:
    entries = json.loads(untrusted.read_limited(directory, INDEX_FILENAME))[
      'tree_metadata'
    ].values()
    names = ['.'.join(str(key['key']) for key in entry['key_metadata']) for entry in entries]
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
    return None  # Orbax reports the problem
  problems = (
    f'in {INDEX_FILENAME}, the name of an array {problem}'
    for name in names
    if (problem := untrusted.name_problem(name)) is not None
  )
  return next(problems, None)


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
  """Raise CheckpointError instead of the exceptions of Orbax and TensorStore for damaged files, of many types."""
  try:
    yield
  except errors.T5xLiteError:
    raise
  except Exception as e:
    if isinstance(e, OSError) and files.is_remote(str(e.filename)):
      raise  # not damaged, but denied or not reached
    raise errors.CheckpointError(
      f'The {what} cannot be read: _METADATA, manifest.ocdbt or a file below d/ is missing or damaged '
      f'({type(e).__name__}: {str(e)[:300]}). {_REMEDY}'
    ) from e


def read_shapes(directory: files.Path) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the shape and dtype of each array in `directory` (see `state_dir`) by name.

  Raises:
    CheckpointError: the index cannot be read, or has arrays or chunks that are larger than the files.
  """
  if files.is_remote(directory):
    with _explained(f'index of {str(directory)!r}'):
      shapes, chunks = array_io.read_shapes(directory)
    _check_sizes(directory, shapes, chunks)
    return shapes
  ocp = orbax()
  with (
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    _explained(f'index of {str(directory)!r}'),
  ):
    tree = checkpointer.metadata(plain_paths.plain_path(directory)).item_metadata.tree
  leaves = {
    name: leaf for name, leaf in tree_utils.flatten_dict(tree).items() if hasattr(leaf, 'shape')
  }
  shapes = {
    name: jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype))
    for name, leaf in leaves.items()
  }
  _check_sizes(
    directory,
    shapes,
    {
      name: {'chunk_shape': getattr(getattr(leaf, 'storage', None), 'chunk_shape', None) or ()}
      for name, leaf in leaves.items()
    },
  )
  return shapes


def read_shapes_of(directory: files.Path, names: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the stored shape and dtype of the named arrays of our own checkpoints, as far as these exist.

  `read_shapes` opens each array, which takes half of the time of a restore; this reads only its entry of the index.

  Raises:
    CheckpointError: see `read_shapes`.
  """
  with _explained(f'index of {str(directory)!r}'):
    shapes, chunks = array_io.read_shapes(directory, names)
  _check_sizes(directory, shapes, chunks)
  return shapes


def check_written(directory: files.Path, arrays: Mapping[str, Mapping[str, Any]]) -> None:
  """Raise unless the arrays that were just written to `directory` can be opened; reads their metadata only.

  Args:
    directory: folder of the arrays.
    arrays: name -> {'shape', 'dtype'}, as in a manifest; arrays without elements are not stored.

  Raises:
    CheckpointError: an array is missing, or has another shape or dtype.
  """
  with _explained(f'state that was just written to {str(directory)!r}'):
    found, _ = array_io.read_shapes(directory)
  for name, entry in arrays.items():
    if 0 in entry['shape']:
      continue
    got = 'none'
    if name in found:
      got = f'{list(found[name].shape)} {found[name].dtype.name}'
    expected = f'{list(entry["shape"])} {entry["dtype"]}'
    if got != expected:
      raise errors.CheckpointError(
        f'The state that was just written to {str(directory)!r} must have the array {name} of shape and dtype '
        f'{expected}, got {got}. Install the versions of orbax-checkpoint and tensorstore that t5x_lite requires.'
      )


def _check_sizes(
  directory: files.Path,
  shapes: Mapping[str, jax.ShapeDtypeStruct],
  chunks: Mapping[str, Mapping[str, Sequence[int]]],
) -> None:
  """Raise CheckpointError if an array, or a chunk of it by name, is larger than the files."""
  max_bytes = untrusted.tree_bytes(directory) * untrusted.MAX_COMPRESSION['zstd']
  for name, leaf in shapes.items():
    for what, shape in {'shape': leaf.shape, **chunks[name]}.items():
      if untrusted.num_bytes(shape, leaf.dtype) > max_bytes:
        raise errors.CheckpointError(
          f'The checkpoint {str(directory)!r} cannot be read: the {what} of {name} must fit into its files, got '
          f'{untrusted.shorten(tuple(shape))}. {_REMEDY}'
        )


def read_arrays(
  directory: files.Path,
  wanted: Mapping[str, tuple[Any, jax.sharding.Sharding | None]],
) -> dict[str, jax.Array | np.ndarray]:
  """Read the named arrays.

  Args:
    directory: see `state_dir`.
    wanted: stored name -> (dtype to return, sharding); without a sharding the result is an entire NumPy array. All
      processes pass the same names and shardings.

  Returns:
    name -> array, of the stored shape.

  Raises:
    CheckpointError: the arrays cannot be read.
  """
  if files.is_remote(directory):
    with _explained(f'data of {str(directory)!r}'):
      return array_io.read_arrays(directory, wanted)
  ocp = orbax()

  def restore_args(dtype, sharding):
    if sharding is None:
      return ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.dtype(dtype))
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, dtype=np.dtype(dtype), sharding=sharding)

  item = tree_utils.unflatten_dict(dict.fromkeys(wanted, 0))
  args = tree_utils.unflatten_dict({name: restore_args(*how) for name, how in wanted.items()})
  with (
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    _explained(f'data of {str(directory)!r}'),
  ):
    tree = checkpointer.restore(
      plain_paths.plain_path(directory),
      args=ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True),
    )
  return tree_utils.flatten_dict(tree)


def place(
  flat_values: Mapping[str, Any],
  wanted: Mapping[str, jax.ShapeDtypeStruct],
  shardings: Mapping[str, jax.sharding.Sharding | None],
) -> dict[str, jax.Array | np.ndarray]:
  """Return arrays cast to dtypes and placed with shardings.

  Args:
    flat_values: name -> array of any shape; equal on all processes.
    wanted: name -> struct with the dtype, for at least these names.
    shardings: name -> sharding, for at least these names; None for a NumPy array.

  Returns:
    name -> array, of the same shape.
  """
  placed = {}
  to_devices = {}
  for name, value in flat_values.items():
    sharding = shardings[name]
    dtype = wanted[name].dtype
    if sharding is None:
      placed[name] = np.asarray(value).astype(dtype, copy=False)
    elif isinstance(value, jax.Array) or jax.process_count() == 1:
      to_devices[name] = value.astype(dtype) if value.dtype != dtype else value
    else:
      value = np.asarray(value).astype(dtype, copy=False)
      placed[name] = jax.make_array_from_callback(
        value.shape, sharding, functools.partial(_part, value)
      )
  return placed | jax.device_put(to_devices, {name: shardings[name] for name in to_devices})


def _part(value: np.ndarray, index: Any) -> np.ndarray:
  return value[index]


def cast_floating(
  flat_state: Mapping[str, Any], is_cast_fn: Callable[[str], bool], dtype: Any
) -> dict[str, Any]:
  """Return `flat_state` with the floating-point arrays whose names `is_cast_fn` accepts cast to `dtype`."""
  dtype = jax.numpy.dtype(dtype)
  return {
    name: leaf.astype(dtype)
    if is_cast_fn(name) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    else leaf
    for name, leaf in flat_state.items()
  }
