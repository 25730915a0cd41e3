"""A stored state with an adapter as the state of a model without adapters: merged kernels and no optimizer state."""

from __future__ import annotations

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
    adapter = source.metadata['adapter']
    kernels = {f'{_PARAMS}{path}': own for path, own in adapter['kernels'].items()}
    self._adapter = {**adapter, 'kernels': kernels}
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
      if not merging.is_leaf(name) and not name.startswith(_STATES):
        shapes[name] = leaf
    if self._dtype is not None:
      for name in self._adapter['kernels']:
        shapes[name] = jax.ShapeDtypeStruct(shapes[name].shape, np.dtype(self._dtype))
    return shapes

  def shapes(self) -> base.Shapes:
    """See `StateSource`."""
    return self._shapes

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """See `StateSource`; with several processes each reads entire arrays."""
    kernels = self._adapter['kernels']
    inputs = list(wanted)
    for name in wanted:
      if name in kernels:
        inputs += merging.leaves_of(name)
    stored = self.source.shapes()
    values = self.source.read({name: (stored[name].dtype, None) for name in inputs})
    result = {}
    for name, (dtype, sharding) in wanted.items():
      value = np.asarray(values[name])
      if name in kernels:
        value = merging.merged_kernel(self._adapter, name, values, self._shapes[name].dtype)
      spec = jax.ShapeDtypeStruct(value.shape, dtype)
      result |= state_io.place({name: value}, {name: spec}, {name: sharding})
    return result
