"""Names of types, and contracts, that all layers share."""

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

if TYPE_CHECKING:
  # These classes of JAX are compiled, without types.
  Device = Any
  PyTreeDef = Any
else:
  Device = jax.Device
  PyTreeDef = jax.tree_util.PyTreeDef

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


class ArrayMapFuture(Protocol):
  """A mapping of names to arrays that is still being computed."""

  def result(self) -> Mapping[str, ArrayLike]:
    """Wait for the arrays and return them, or raise the exception of the computation."""
    ...


class TimeFuture(Protocol):
  """A duration that is still being measured."""

  def result(self) -> float:
    """Wait for the end and return the seconds."""
    ...


class SummarizeMetricsCallable(Protocol):
  """Function that turns the metrics of several steps into values."""

  def __call__(
    self, metrics: Mapping[str, Any], duration: float, num_steps: int
  ) -> Mapping[str, jax.Array]:
    """Return values by name.

    Args:
      metrics: merged `clu.metrics.Metric`s by name.
      duration: seconds of the steps.
      num_steps: number of steps.
    """
    ...


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
