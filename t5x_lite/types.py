"""Names of types that all layers share."""

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
