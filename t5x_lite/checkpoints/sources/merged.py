"""A stored state with an adapter as the state of a model without adapters: merged kernels and no optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import jax
import numpy as np

from t5x_lite.adapters import merging
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.sources import base

_PARAMS = 'target/'
# States of the parameters of the adapter.
_STATES = ('state/param_states/', 'param_average/')


class MergedSource(base.WrappedSource):
  """State of another source, whose kernels have the adapter of the source merged into them."""

  LEFT_OUT = ('adapter', 'optimizer')

  def __init__(self, source: base.StateSource, dtype: Any = None):
    """Wrap a source whose metadata describe an adapter.

    Args:
      source: the state, with the arrays of the base and of the adapter.
      dtype: dtype of merged kernels; None for that of each kernel in the base. Sums are computed in float32 and
        rounded once.
    """
    super().__init__(source)
    self._adapter = source.metadata['adapter']
    self._dtype = dtype

  @property
  def note(self) -> str:
    """Remark on the adapter, as sentences."""
    note = f'The adapter of {len(self._adapter["kernels"])} kernels is merged into the weights.'
    dtype = self._adapter['base_dtype']
    if dtype is not None:
      note += f' It was trained with weights rounded to {dtype}, and is added to the stored ones.'
    return note

  @functools.cached_property
  def _shapes(self) -> base.Shapes:
    shapes = {}
    for name, leaf in self.source.shapes().items():
      dtype = leaf.dtype
      if self._adapted(name) and self._dtype is not None:
        dtype = np.dtype(self._dtype)
      if not merging.is_leaf(name) and not name.startswith(_STATES):
        shapes[name] = jax.ShapeDtypeStruct(leaf.shape, dtype)
    return shapes

  def _adapted(self, name: str) -> Mapping[str, Any] | None:
    return self._adapter['kernels'].get(name.removeprefix(_PARAMS))

  def shapes(self) -> base.Shapes:
    """See `StateSource`."""
    return self._shapes

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """See `StateSource`; with several processes each reads entire arrays."""
    inputs = []
    for name in wanted:
      inputs.append(name)
      if self._adapted(name):
        inputs += merging.leaves_of(name)
    stored = self.source.shapes()
    values = self.source.read({name: (stored[name].dtype, None) for name in inputs})
    result = {}
    for name, (dtype, sharding) in wanted.items():
      value = np.asarray(values.pop(name))
      adapted = self._adapted(name)
      if adapted:
        a, b = (np.asarray(values.pop(each)) for each in merging.leaves_of(name))
        scale = merging.scale_of(
          adapted['rank'], adapted['alpha'], self._adapter['rank_stabilized']
        )
        value = merging.merge(value, a, b, adapted['dims'], scale).astype(self._shapes[name].dtype)
      spec = jax.ShapeDtypeStruct(value.shape, dtype)
      result |= state_io.place({name: value}, {name: spec}, {name: sharding})
    return result
