"""Names of types, and contracts, that all layers share."""

import abc
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# A device array, or a tracer of one.
Array = jax.Array
# Arguments of functions that accept arrays of the device and of the host.
ArrayLike = jax.Array | np.ndarray | float | int
# Feature name to array; every array has the batch dim first.
Batch = Mapping[str, jax.Array]
# Any nested structure of arrays.
PyTree = Any
# Nested dicts of parameters with Flax's names.
Params = Mapping[str, Any]
# A tree of `jax.sharding.PartitionSpec` whose entries are *logical* axis names (`embed`, `mlp`, ...).
LogicalAxes = PyTree
# A tree of `jax.sharding.PartitionSpec` whose entries are *mesh* axis names (`data`, `model`, ...).
MeshAxes = PyTree
# Ordered pairs (logical axis, mesh axis or axes or None); the first applicable rule wins.
LogicalAxisRules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


class ChoosesMesh(abc.ABC):
  """Contract of a class that gin configures with a device mesh and that can choose one itself."""

  @classmethod
  @abc.abstractmethod
  def automatic_mesh(cls, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the constructor with which the class chooses the mesh for any number of devices.

    Args:
      configured: the configured arguments by name; values may be references of gin.

    Returns:
      Arguments that replace those about the mesh in `configured`; all others are kept.
    """
