"""A stored state with the running average of its parameters in place of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints.sources import base

_PARAMS = 'target/'
_AVERAGE = 'param_average/'
_OPTIMIZER_STATE = 'state/param_states/'


def has_param_average(source: base.StateSource) -> bool:
  """Return whether a stored state has a running average of the parameters."""
  return any(name.startswith(_AVERAGE) for name in source.shapes())


class AverageSource(base.StateSource):
  """State of another source whose parameters are the average; it has no average and no optimizer state."""

  def __init__(self, source: base.StateSource):
    """Wrap a source.

    Raises:
      CheckpointError: it has no average of the parameters.
    """
    super().__init__(source.path)
    if not has_param_average(source):
      raise errors.CheckpointError(
        f'{source.path!r} must have a running average of the parameters (param_average), '
        'got a state without it. Use its parameters, or another checkpoint.'
      )
    self.format = source.format
    self._source = source

  @functools.cached_property
  def _stored_names(self) -> dict[str, str]:
    names = {}
    for name in self._source.shapes():
      if name.startswith(_AVERAGE):
        names[_PARAMS + name.removeprefix(_AVERAGE)] = name
      elif not name.startswith((_PARAMS, _OPTIMIZER_STATE)):
        names[name] = name
    return names

  def shapes(self) -> base.Shapes:
    """See `StateSource`."""
    shapes = self._source.shapes()
    return {name: shapes[stored_name] for name, stored_name in self._stored_names.items()}

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource`."""
    return self._source.read_array(self._stored_names[name])

  def read(self, wanted: base.Wanted) -> dict[str, jax.Array | np.ndarray]:
    """See `StateSource`."""
    values = self._source.read({self._stored_names[name]: how for name, how in wanted.items()})
    return {name: values[self._stored_names[name]] for name in wanted}

  @property
  def manifest(self) -> manifest_lib.Manifest | None:
    """See `StateSource`."""
    return self._source.manifest

  def verify(self) -> bool:
    """See `StateSource`."""
    return self._source.verify()

  @functools.cached_property
  def metadata(self) -> Mapping[str, Any]:
    """See `StateSource`; without the optimizer."""
    return {name: value for name, value in self._source.metadata.items() if name != 'optimizer'}
