"""States in Orbax's format: t5x_lite checkpoints with a manifest, and checkpoints of T5X and others."""

from __future__ import annotations

from collections.abc import Mapping
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.sources import base
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

# A manifest of t5x_lite shows in them what it is.
_FIRST_BYTES = 200


class OrbaxSource(base.StateSource):
  """An Orbax PyTree without a manifest, such as T5X writes."""

  format = 't5x_orbax'
  title = 'T5X Orbax checkpoint'
  description = 'an Orbax PyTree of T5X (a file _METADATA)'
  index_files = (state_io.INDEX_FILENAME,)

  @classmethod
  def is_stored_in(cls, root: files.Path) -> bool:
    """See `StateSource.is_stored_in`."""
    folders = (root / discovery.STATE_DIRNAME, root)
    return any((folder / state_io.INDEX_FILENAME).is_file() for folder in folders)

  def __init__(self, path: str | os.PathLike[str]):
    super().__init__(path)
    state_io.state_dir(path)

  @functools.cached_property
  def _directory(self) -> files.Path:
    return state_io.state_dir(self.path)

  def shapes(self) -> base.Shapes:
    """See `StateSource.shapes`."""
    return self._shapes

  @functools.cached_property
  def _shapes(self) -> base.Shapes:
    return state_io.read_shapes(self._directory)

  def weight_files(self) -> dict[str, int]:
    """See `StateSource.weight_files`."""
    root = files.path(self.path)
    folder = discovery.STATE_DIRNAME if (root / discovery.STATE_DIRNAME).is_dir() else ''
    return dict(sorted(untrusted.walk(root, folder).items()))

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource.read_array`."""
    return np.asarray(self.read({name: (self.shapes()[name].dtype, None)})[name])

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """Read the named arrays in parallel, in their stored shapes and the wanted dtypes.

    With several processes each reads only the parts of its devices.
    """
    stored = self.shapes()
    self._check_memory(
      {name: stored[name] for name, (_, sharding) in wanted.items() if sharding is None}
    )
    # Arrays without elements are not stored.
    empty = {
      name: np.zeros(stored[name].shape, dtype)
      for name, (dtype, _) in wanted.items()
      if 0 in stored[name].shape
    }
    how = {name: how for name, how in wanted.items() if name not in empty}
    if jax.process_count() == 1:
      # On a single host, reading entire arrays and one transfer take two thirds of the time of reading shards.
      how = {name: (dtype, None) for name, (dtype, _) in how.items()}
    values = state_io.read_arrays(self._directory, how) | empty
    dtypes = {
      name: jax.ShapeDtypeStruct(stored[name].shape, dtype) for name, (dtype, _) in wanted.items()
    }
    placed = state_io.place(
      values, dtypes, {name: sharding for name, (_, sharding) in wanted.items()}
    )
    return {name: placed[name] for name in wanted}

  def _check_memory(self, shapes: base.Shapes) -> None:
    """Raise CheckpointError if arrays are larger than the memory of this host."""
    num_bytes = sum(untrusted.num_bytes(leaf.shape, leaf.dtype) for leaf in shapes.values())
    available = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if num_bytes > available:
      largest = max(
        shapes, key=lambda name: untrusted.num_bytes(shapes[name].shape, shapes[name].dtype)
      )
      raise errors.CheckpointError(
        f'The arrays of {self.path!r} must fit into the {available:,} bytes of memory of this host, got '
        f'{num_bytes:,} bytes; the largest is {largest} of shape {shapes[largest].shape}. Read them on a larger '
        'host.'
      )


class OwnSource(OrbaxSource):
  """A checkpoint of t5x_lite: `state/` in Orbax's format and a manifest with the hash of every file."""

  format = 't5x_lite'
  title = 't5x_lite checkpoint'
  description = 'a checkpoint of t5x_lite (manifest.json and state/)'
  index_files = (discovery.MANIFEST_FILENAME,)

  @classmethod
  def is_stored_in(cls, root: files.Path) -> bool:
    """See `StateSource.is_stored_in`."""
    # An exported model has a manifest.json of another kind.
    manifest = root / discovery.MANIFEST_FILENAME
    if not manifest.is_file():
      return False
    if (root / discovery.STATE_DIRNAME).is_dir() or discovery.is_checkpoint_dir_name(root):
      return True
    with untrusted.check_file(root, manifest.name).open('rb', buffering=_FIRST_BYTES) as file:
      return b'"1_sha256"' in file.read(_FIRST_BYTES)

  def __init__(self, path: str | os.PathLike[str]):
    # Read only the manifest, so that `verify` reports all missing files.
    base.StateSource.__init__(self, path)  # pylint: disable=non-parent-init-called
    self._manifest = self._present(manifest_lib.read(path))

  @property
  def manifest(self) -> manifest_lib.Manifest:
    """The manifest, as it was when the checkpoint was opened or verified."""
    return self._manifest

  def verify(self) -> bool:
    """Compare the hash of every file with the manifest."""
    self._manifest = self._present(manifest_lib.verify(self.path))
    return True

  def _present(self, manifest: manifest_lib.Manifest | None) -> manifest_lib.Manifest:
    """Return the manifest; raise CheckpointDamagedError if another process has deleted it meanwhile."""
    if manifest is None:
      raise errors.CheckpointDamagedError(
        f'The checkpoint {self.path!r} was deleted while it was read. Restore another checkpoint.'
      )
    return manifest

  @functools.cached_property
  def _shapes(self) -> base.Shapes:
    # Equal to the shapes in Orbax's index, without opening each array.
    return {
      name: jax.ShapeDtypeStruct(tuple(entry['shape']), jnp.dtype(entry['dtype']))
      for name, entry in self._manifest.arrays.items()
    }

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """See `OrbaxSource.read`; raises CheckpointError if the stored shapes or dtypes differ from the manifest."""
    shapes = self.shapes()
    stored = state_io.read_shapes_of(self._directory, wanted)
    for name in wanted:
      found = stored.get(name)
      if 0 not in shapes[name].shape and found != shapes[name]:
        if found is None:
          got = 'nothing'
        else:
          got = f'{found.dtype} {found.shape}'
        raise errors.CheckpointError(
          f'The checkpoint {self.path!r} cannot be read: in manifest.json, `arrays[{name!r}]` must be as in the '
          f'files, {got}, got {shapes[name].dtype} {shapes[name].shape}. Restore another checkpoint.'
        )
    return super().read(wanted)

  @property
  def metadata(self) -> Mapping[str, Any]:
    """Values recorded by the caller of `save`."""
    return self._manifest.metadata

  @property
  def step(self) -> int:
    """The step in the manifest."""
    return self._manifest.step
