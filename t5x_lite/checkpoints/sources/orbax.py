"""States in Orbax's form: our own checkpoints, which a manifest vouches for, and those of T5X and others."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors, untrusted
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.sources import base


class OrbaxSource(base.StateSource):
  """An Orbax PyTree without a manifest, such as T5X writes."""

  format = 't5x_orbax'

  def __init__(self, path: str | os.PathLike[str]):
    super().__init__(path)
    state_io.state_dir(path)

  @functools.cached_property
  def _directory(self) -> pathlib.Path:
    return state_io.state_dir(self.path)

  def shapes(self) -> base.Shapes:
    """See `StateSource.shapes`."""
    return self._shapes

  @functools.cached_property
  def _shapes(self) -> base.Shapes:
    return state_io.read_shapes(self._directory)

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource.read_array`."""
    return self.read({name: (self.shapes()[name].dtype, None)})[name]

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """Reads all at once, in parallel; of several processes each reads only the parts that its devices hold."""
    stored = self.shapes()
    self._check_memory({name: stored[name] for name, (_, sharding) in wanted.items() if sharding is None})
    # Arrays without elements are in no file: they are made.
    empty = {name: np.zeros(stored[name].shape, dtype)
             for name, (dtype, _) in wanted.items() if 0 in stored[name].shape}
    how = {name: how for name, how in wanted.items() if name not in empty}
    if jax.process_count() == 1:
      # All of it is for this host: whole arrays and one transfer of all take two thirds of the time of reading shards.
      how = {name: (dtype, None) for name, (dtype, _) in how.items()}
    values = state_io.read_arrays(self._directory, how) | empty
    dtypes = {name: jax.ShapeDtypeStruct(stored[name].shape, dtype) for name, (dtype, _) in wanted.items()}
    placed = state_io.place(values, dtypes, {name: sharding for name, (_, sharding) in wanted.items()})
    return {name: placed[name] for name in wanted}


  def _check_memory(self, whole: base.Shapes) -> None:
    """Raises CheckpointError if arrays to be read as a whole are larger than the memory of this host."""
    num_bytes = sum(untrusted.num_bytes(leaf.shape, leaf.dtype) for leaf in whole.values())
    available = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if num_bytes > available:
      largest = max(whole, key=lambda name: untrusted.num_bytes(whole[name].shape, whole[name].dtype))
      raise errors.CheckpointError(
          f'The arrays of {self.path!r} must fit into the {available:,} bytes of memory of this host, got {num_bytes:,} '
          f'bytes; the largest is {largest} of shape {whole[largest].shape}. Read them on a larger host.')


class OwnSource(OrbaxSource):
  """A checkpoint of this package: `state/` in Orbax's form and a manifest with the hash of every file."""

  format = 't5x_lite'

  def __init__(self, path: str | os.PathLike[str]):
    # Only the manifest is looked at, so that whoever verifies first learns of all that is missing.
    base.StateSource.__init__(self, path)  # pylint: disable=non-parent-init-called
    self._manifest = manifest_lib.read(path)

  @property
  def manifest(self) -> manifest_lib.Manifest:
    """The manifest, as it was when the checkpoint was opened or verified."""
    return self._manifest

  def verify(self) -> bool:
    """Reads every file and compares its hash with the manifest's."""
    self._manifest = manifest_lib.verify(self.path)
    return True

  @functools.cached_property
  def _shapes(self) -> base.Shapes:
    # The same as Orbax would say, without opening each array for it.
    return {name: jax.ShapeDtypeStruct(tuple(entry['shape']), jnp.dtype(entry['dtype']))
            for name, entry in self._manifest.arrays.items()}

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """See `OrbaxSource.read`; the files must hold the arrays that the manifest names."""
    shapes = self.shapes()
    for name in wanted:
      found = self._stored_shapes.get(name)
      if 0 not in shapes[name].shape and found != shapes[name]:
        got = 'nothing' if found is None else f'{found.dtype} {found.shape}'
        raise errors.CheckpointError(
            f'The checkpoint {self.path!r} cannot be read: in manifest.json, `arrays[{name!r}]` must be what the files '
            f'hold, {got}, got {shapes[name].dtype} {shapes[name].shape}. Restore another checkpoint.')
    return super().read(wanted)

  @functools.cached_property
  def _stored_shapes(self) -> base.Shapes:
    return state_io.read_shapes(self._directory)

  @property
  def metadata(self) -> Mapping[str, Any]:
    """What the caller of `save` recorded."""
    return self._manifest.metadata

  @property
  def step(self) -> int:
    """The step that the manifest says."""
    return self._manifest.step
