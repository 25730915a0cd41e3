"""Arrays of the output of a conversion, by the prefixes of their names in a train state."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from t5x_lite.networks.layout_plan import PlannedArray

PARAMS = 'target/'
PARAM_STATES = 'state/param_states/'
AVERAGE = 'param_average/'
MUTABLES = 'flax_mutables/'
STEP = 'state/step'
OPTIMIZER_STATE = ('keep', 'drop')


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePlan:
  """Arrays of the output.

  Attributes:
    arrays: plan of each array by its name in the state, in an efficient order: arrays with the same input are adjacent.
    param_layout: layout of the parameters; None for a network of another package.
    network: known options of the network, by `T5Config`'s names.
    with_optimizer_state: whether the output has optimizer state.
    step: number of training steps to record; None for the source's.
    notes: remarks for the user, as sentences.
  """

  arrays: Mapping[str, PlannedArray]
  param_layout: str | None
  network: Mapping[str, Any]
  with_optimizer_state: bool
  step: int | None
  notes: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """Total size of the arrays in bytes."""
    total = 0
    for planned in self.arrays.values():
      total += _num_elements(planned) * planned.dtype.itemsize
    return total

  @property
  def num_params(self) -> int:
    """Number of parameters."""
    return sum(map(_num_elements, self.params().values()))

  def params(self) -> dict[str, PlannedArray]:
    """Return the plans of the parameters by their paths, without `target/`."""
    return section(self.arrays, PARAMS)


def _num_elements(planned: PlannedArray) -> int:
  return int(np.prod(planned.shape, dtype=np.int64))


def section(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  """Return the values whose names begin with `prefix`, by the rest of their names."""
  section = {}
  for name, value in values.items():
    if name.startswith(prefix):
      section[name.removeprefix(prefix)] = value
  return section
