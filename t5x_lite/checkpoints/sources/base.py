"""Interface of stored train states, independent of their format."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
import functools
import logging
import os
from typing import Any, ClassVar

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints import state_io
from t5x_lite.networks import param_layouts
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

_logger = logging.getLogger(__name__)

Shapes = dict[str, jax.ShapeDtypeStruct]
Wanted = Mapping[str, tuple[Any, jax.sharding.Sharding | None]]

_PARAMS = 'target/'
_OPTIMIZER_STATE = 'state/param_states/'


class StateSource(abc.ABC):
  """An opened stored state, which has the names and shapes of its arrays and reads values on demand.

  Names are '/'-joined: `target/<path of a parameter>`, `state/step`, `state/param_states/...`, `flax_mutables/...` and
  `param_average/...`. Opening reads only the index.

  A format is a subclass that is registered by `register_state_source`.

  Attributes:
    format: name of the format.
    title: name of the format in reports.
    description: the files by which people know the format, for messages.
    index_files: names of files by which programs name a checkpoint of the format.
    has_steps: whether a folder `checkpoint_<step>` of the format is one of several in a model directory.
    path: path of the folder.
  """

  format: str
  title: ClassVar[str]
  description: ClassVar[str]
  index_files: ClassVar[tuple[str, ...]] = ()
  has_steps: ClassVar[bool] = True

  def __init__(self, path: str | os.PathLike[str]):
    """Open the folder `path` and read its index.

    Raises:
      CheckpointError: the folder does not have this format, or its index cannot be read.
    """
    self.path = os.fspath(path)

  @classmethod
  def is_stored_in(cls, root: files.Path) -> bool:
    """Return True if a folder has the format, complete or damaged; reads little."""
    return False

  @abc.abstractmethod
  def shapes(self) -> Shapes:
    """Return the shape and dtype of each stored array by name; reads no values."""

  @abc.abstractmethod
  def read_array(self, name: str) -> np.ndarray:
    """Return one array in its stored shape and dtype.

    Raises:
      CheckpointDamagedError: the array cannot be read.
    """

  @property
  def own(self) -> StateSource:
    """The arrays that are stored in the folder itself; for the checkpoint of an adapter, those without the base."""
    return self

  def weight_files(self) -> dict[str, int]:
    """Return path relative to the folder -> size in bytes, of the files with the arrays, in order of the paths."""
    return dict(sorted(untrusted.walk(files.path(self.path)).items()))

  @property
  def manifest(self) -> manifest_lib.Manifest | None:
    """The manifest; None for checkpoints of other programs."""
    return None

  def verify(self) -> bool:
    """Check the files as far as the format allows; all processes must call it together.

    Returns:
      True if all files were compared with stored hashes.

    Raises:
      CheckpointDamagedError: a file is damaged or missing.
    """
    _logger.warning(
      'The checkpoint %s (%s) has no manifest with hashes, like all checkpoints of other programs: '
      'damage cannot be detected.',
      self.path,
      self.format,
    )
    return False

  @functools.cached_property
  def metadata(self) -> Mapping[str, Any]:
    """Known metadata of the state, of `param_layout`, `network` and `optimizer`."""
    layout = layout_of(self.shapes())
    if layout is None:
      return {}
    return {'param_layout': layout}

  @property
  def step(self) -> int | None:
    """The number of training steps of the state; None if unknown."""
    if 'state/step' not in self.shapes():
      return None
    step = self.read_array('state/step')
    if step.size != 1 or not 0 <= (number := int(step.item())) == step.item():
      raise errors.CheckpointDamagedError(
        f'The checkpoint {self.path!r} is damaged: its state/step must be an integer >= 0, got {str(step)[:80]}. '
        'Copy it again, or restore another checkpoint.'
      )
    return number

  @property
  def has_optimizer_state(self) -> bool:
    """True if the state of an optimizer is stored, in addition to the step."""
    return any(name.startswith(_OPTIMIZER_STATE) for name in self.shapes())

  def read(self, wanted: Wanted) -> dict[str, jax.Array | np.ndarray]:
    """Read the named arrays, from a disk one at a time.

    Args:
      wanted: name -> (dtype to return, sharding); without a sharding the result is an entire NumPy array. All processes
        pass the same names and shardings; each reads entire arrays and keeps the parts of its devices.

    Returns:
      name -> array, of the stored shape.

    Raises:
      CheckpointDamagedError: an array cannot be read.
    """
    arrays: Iterable[np.ndarray] = map(self.read_array, wanted)
    if files.is_remote(self.path):  # requests take long
      from t5x_lite.storage import object_store

      arrays = object_store.in_parallel(self.read_array, wanted)
    result = {}
    for (name, (dtype, sharding)), array in zip(wanted.items(), arrays, strict=True):
      spec = jax.ShapeDtypeStruct(self.shapes()[name].shape, dtype)
      result |= state_io.place({name: array}, {name: spec}, {name: sharding})
    return result


class WrappedSource(StateSource):
  """State of another source with other arrays.

  Attributes:
    LEFT_OUT: names of metadata of the other source that do not apply.
    source: the other source.
  """

  LEFT_OUT: ClassVar[tuple[str, ...]] = ('optimizer',)

  def __init__(self, source: StateSource):
    super().__init__(source.path)
    self.format = source.format
    self.source = source

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource`."""
    return np.asarray(self.read({name: (self.shapes()[name].dtype, None)})[name])

  def weight_files(self) -> dict[str, int]:
    """See `StateSource`."""
    return self.source.weight_files()

  @property
  def manifest(self) -> manifest_lib.Manifest | None:
    """See `StateSource`."""
    return self.source.manifest

  @property
  def step(self) -> int | None:
    """See `StateSource`."""
    return self.source.step

  def verify(self) -> bool:
    """See `StateSource`."""
    return self.source.verify()

  @functools.cached_property
  def metadata(self) -> Mapping[str, Any]:
    """See `StateSource`; without those in `LEFT_OUT`."""
    return {
      name: value for name, value in self.source.metadata.items() if name not in self.LEFT_OUT
    }


def layout_of(shapes: Mapping[str, Any]) -> str | None:
  """Return the parameter layout of a state, 't5' or 'scalable_t5', by its names; None for other networks."""
  params = tree_utils.unflatten_dict(
    {name.removeprefix(_PARAMS): name for name in shapes if name.startswith(_PARAMS)}
  )
  try:
    return param_layouts.param_layout(params)
  except errors.ConfigError:
    return None
