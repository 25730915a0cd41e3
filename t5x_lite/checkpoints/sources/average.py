"""A stored state with the running average of its parameters in place of the parameters."""

from __future__ import annotations

import functools

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite.checkpoints.sources import base

_PARAMS = 'target/'
_AVERAGE = 'param_average/'
_OPTIMIZER_STATE = 'state/param_states/'


def has_param_average(source: base.StateSource) -> bool:
  """Return whether a stored state has a running average of the parameters."""
  return any(name.startswith(_AVERAGE) for name in source.shapes())


class AverageSource(base.WrappedSource):
  """State of another source whose parameters are the average; it has no average and no optimizer state.

  With an adapter, only the trained parameters have an average, and the others are those of the base.
  """

  def __init__(self, source: base.StateSource):
    """Wrap a source.

    Raises:
      CheckpointError: it has no average of the parameters.
    """
    super().__init__(source)
    if not has_param_average(source):
      raise errors.CheckpointError(
        f'{source.path!r} must have a running average of the parameters (param_average), '
        'got a state without it. Use its parameters, or another checkpoint.'
      )

  @functools.cached_property
  def _stored_names(self) -> dict[str, str]:
    names = {}
    with_adapter = 'adapter' in self.source.metadata
    for name in self.source.shapes():
      if name.startswith(_AVERAGE):
        names[_PARAMS + name.removeprefix(_AVERAGE)] = name
      elif name.startswith(_PARAMS) and with_adapter:
        names.setdefault(name, name)
      elif not name.startswith((_PARAMS, _OPTIMIZER_STATE)):
        names[name] = name
    return names

  def shapes(self) -> base.Shapes:
    """See `StateSource`."""
    shapes = self.source.shapes()
    return {name: shapes[stored_name] for name, stored_name in self._stored_names.items()}

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """See `StateSource`."""
    values = self.source.read({self._stored_names[name]: how for name, how in wanted.items()})
    return {name: values[self._stored_names[name]] for name in wanted}
