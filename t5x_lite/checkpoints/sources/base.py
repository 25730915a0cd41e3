"""What every stored form of a train state offers, whatever lies on the disk."""

from __future__ import annotations

import abc
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from t5x_lite import errors, tree_utils
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints import state_io
from t5x_lite.networks import param_layouts

_logger = logging.getLogger(__name__)

Shapes = dict[str, jax.ShapeDtypeStruct]
Wanted = Mapping[str, tuple[Any, jax.sharding.Sharding | None]]

_PARAMS = 'target/'
_OPTIMIZER_STATE = 'state/param_states/'


class StateSource(abc.ABC):
  """A stored state, opened: names and shapes at once, values when they are asked for.

  Names are '/'-joined: `target/<path of a parameter>`, `state/step`, `state/param_states/...`, `flax_mutables/...` and
  `param_average/...`. Opening one reads its index only.

  Attributes:
    format: name of the form, one of `FORMATS`.
    path: the folder that was opened.
  """

  format: ClassVar[str]

  def __init__(self, path: str | os.PathLike[str]):
    """Opens the folder `path`; a class that reads an index does so here.

    Raises:
      CheckpointError: the folder has not this form, or its index cannot be read.
    """
    self.path = os.fspath(path)

  @abc.abstractmethod
  def shapes(self) -> Shapes:
    """Returns the shape and dtype of each stored array by name; reads no values."""

  @abc.abstractmethod
  def read_array(self, name: str) -> np.ndarray:
    """Returns one array in its stored dtype.

    Raises:
      CheckpointDamagedError: it cannot be read.
    """

  @property
  def manifest(self) -> manifest_lib.Manifest | None:
    """The manifest; None for what another program wrote."""
    return None

  def verify(self) -> bool:
    """Looks for damage as well as this form allows; all processes must call it together.

    Returns:
      Whether the bytes are known to be those that were written.

    Raises:
      CheckpointDamagedError: they are not, or something is missing.
    """
    _logger.warning('The checkpoint %s (%s) has no manifest: it is restored as asked, but damage would go unnoticed.',
                    self.path, self.format)
    return False

  @functools.cached_property
  def metadata(self) -> Mapping[str, Any]:
    """What is known about the state: `param_layout`, `network` and `optimizer`, each only where it is known."""
    layout = layout_of(self.shapes())
    return {} if layout is None else {'param_layout': layout}

  @property
  def step(self) -> int | None:
    """The number of training steps behind the state; None where nothing says it."""
    if 'state/step' not in self.shapes():
      return None
    step = self.read_array('state/step')
    if step.size != 1 or not 0 <= (number := int(step.item())) == step.item():
      raise errors.CheckpointDamagedError(
          f'The checkpoint {self.path!r} is damaged: its state/step is {str(step)[:80]}; expected a whole number from '
          '0 up. Copy it anew, or restore another checkpoint.')
    return number

  @property
  def has_optimizer_state(self) -> bool:
    """Whether the state of an optimizer is stored, besides the step."""
    return any(name.startswith(_OPTIMIZER_STATE) for name in self.shapes())

  def read(self, wanted: Wanted) -> dict[str, jax.Array | np.ndarray]:
    """Reads arrays, one after the other; those that are not wanted are not touched.

    Args:
      wanted: name -> (dtype to return, sharding), where no sharding means a NumPy array of the whole. All processes
        pass the same names and shardings; each reads whole arrays and keeps the parts of its devices.

    Returns:
      name -> array.

    Raises:
      CheckpointDamagedError: an array cannot be read.
    """
    result = {}
    for name, (dtype, sharding) in wanted.items():
      spec = jax.ShapeDtypeStruct(self.shapes()[name].shape, dtype)
      result |= state_io.place({name: self.read_array(name)}, {name: spec}, {name: sharding})
    return result


def layout_of(shapes: Mapping[str, Any]) -> str | None:
  """Returns the parameter layout, 't5' or 'scalable_t5', of a state by its names; None for other networks."""
  params = tree_utils.unflatten_dict(
      {name.removeprefix(_PARAMS): name for name in shapes if name.startswith(_PARAMS)})
  try:
    return param_layouts.param_layout(params)
  except errors.ConfigError:
    return None
