"""Arrays that are read or computed when they are placed on their devices.

A flat state, '/'-joined name -> array, may hold these next to NumPy arrays, JAX arrays and `jax.ShapeDtypeStruct`s. All
have `shape` and `dtype`, so that a state is compared with another one before values are read.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints import state_io
from t5x_lite.storage import untrusted

# Bytes of arrays that are in host memory at a time while they are read, computed and placed.
_BATCH_BYTES = 2**28


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LazyArray:
  """Array whose values are not in memory.

  Attributes:
    shape: shape of the array.
    dtype: NumPy dtype of the array.
  """

  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def ndim(self) -> int:
    """Number of dims."""
    return len(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredArray(LazyArray):
  """Array of a stored state.

  Attributes:
    source: the opened state.
    name: name of the array in `source`.
  """

  source: sources.StateSource
  name: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class InitialArray(LazyArray):
  """Array of a newly initialised state.

  Attributes:
    name: name of the array in that state.
  """

  name: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ComputedArray(LazyArray):
  """Array that a function computes in host memory.

  Attributes:
    inputs: arrays of any kind.
    compute_fn: function from a NumPy array for each of `inputs` to a NumPy array of `shape` and `dtype`. It must not
      change its arguments.
  """

  inputs: tuple[Any, ...]
  compute_fn: Callable[..., np.ndarray]


def stored(source: sources.StateSource) -> dict[str, StoredArray]:
  """Return all arrays of a stored state by name; reads no values."""
  return {
    name: StoredArray(source=source, name=name, shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype))
    for name, leaf in source.shapes().items()
  }


def initial_names(arrays: Mapping[str, Any]) -> set[str]:
  """Return the names of the initial arrays that are needed to read `arrays`."""
  names = set()
  for array in arrays.values():
    names |= {leaf.name for leaf in _inputs(array) if isinstance(leaf, InitialArray)}
  return names


def read(arrays: Mapping[str, Any], initial: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Return entire NumPy arrays in host memory; all processes must call this together.

  Args:
    arrays: name -> array with values, of any kind.
    initial: initial array by name, for at least `initial_names(arrays)`.

  Raises:
    CheckpointDamagedError: a stored array cannot be read.
  """
  wanted: dict[sources.StateSource, dict[str, Any]] = collections.defaultdict(dict)
  for array in arrays.values():
    for leaf in _inputs(array):
      if isinstance(leaf, StoredArray):
        wanted[leaf.source][leaf.name] = (leaf.dtype, None)
  values = {source: source.read(names) for source, names in wanted.items()}
  computed: dict[int, np.ndarray] = {}

  def value(leaf: Any) -> np.ndarray:
    if isinstance(leaf, StoredArray):
      return np.asarray(values[leaf.source][leaf.name])  # an entire array without a sharding
    if isinstance(leaf, InitialArray):
      return _to_host(initial[leaf.name])
    if not isinstance(leaf, ComputedArray):
      return _to_host(leaf)
    if id(leaf) not in computed:
      computed[id(leaf)] = leaf.compute_fn(*map(value, leaf.inputs))
    return computed[id(leaf)]

  return {name: value(array) for name, array in arrays.items()}


def place(
  arrays: Mapping[str, Any],
  wanted: Mapping[str, jax.ShapeDtypeStruct],
  shardings: Mapping[str, jax.sharding.Sharding | None],
  initial: Mapping[str, Any],
) -> dict[str, Any]:
  """Return arrays cast to dtypes and placed with shardings; all processes must call this together.

  Arrays are read, computed and placed in groups of limited size, so that the host holds no second copy of a large
  state. With several processes each reads only the parts of its devices of an array that is not computed, if the format
  allows it.

  Args:
    arrays: name -> array with values, of any kind.
    wanted: name -> struct with the dtype, for at least these names.
    shardings: name -> sharding, for at least these names; None for a NumPy array.
    initial: see `read`.

  Returns:
    name -> array, of the same shape.
  """
  result: dict[str, Any] = {}
  by_source: dict[sources.StateSource, dict[str, StoredArray]] = collections.defaultdict(dict)
  computed = {}
  others = {}
  for name, array in arrays.items():
    if isinstance(array, StoredArray):
      by_source[array.source][name] = array
    elif isinstance(array, ComputedArray):
      computed[name] = array
    elif isinstance(array, InitialArray):
      others[name] = initial[array.name]
    else:
      others[name] = array
  for source, stored_arrays in by_source.items():
    for group in _groups(stored_arrays):
      names = {name: array.name for name, array in group.items()}
      result |= _read_sharded(source, names, wanted, shardings)
  result |= state_io.place(others, wanted, shardings)
  for group in _groups(computed):
    result |= state_io.place(read(group, initial), wanted, shardings)
  return {name: result[name] for name in arrays}


def _inputs(array: Any) -> Iterator[Any]:
  """Yield the arrays from which `array` is computed; `array` itself if it is not computed."""
  if isinstance(array, ComputedArray):
    for each in array.inputs:
      yield from _inputs(each)
  else:
    yield array


def _groups(arrays: Mapping[str, LazyArray]) -> Iterator[dict[str, Any]]:
  """Yield `arrays` in groups, each of at most `_BATCH_BYTES` with its inputs unless it is a single array."""
  group = {}
  size = 0
  for name, array in arrays.items():
    leaves = {id(leaf): leaf for leaf in (array, *_inputs(array))}
    num_bytes = 0
    for leaf in leaves.values():
      num_bytes += untrusted.num_bytes(leaf.shape, np.dtype(leaf.dtype))
    if group and size + num_bytes > _BATCH_BYTES:
      yield group
      group = {}
      size = 0
    group[name] = array
    size += num_bytes
  if group:
    yield group


def _read_sharded(
  source: sources.StateSource,
  names: Mapping[str, str],
  wanted: Mapping[str, jax.ShapeDtypeStruct],
  shardings: Mapping[str, Any],
) -> dict[str, Any]:
  """Read stored arrays; `names` has the stored name by name."""
  # A stored array that several names need is read with the sharding of the first name and copied for the others.
  first: dict[str, str] = {}
  for name, stored_name in names.items():
    first.setdefault(stored_name, name)
  how = {stored: (wanted[name].dtype, shardings[name]) for stored, name in first.items()}
  values = source.read(how)
  arrays = {name: values[stored] for name, stored in names.items()}
  return state_io.place(arrays, wanted, shardings)


def _to_host(value: Any) -> np.ndarray:
  if isinstance(value, jax.Array) and not value.is_fully_addressable:
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(value, tiled=True)
  return np.asarray(value)
