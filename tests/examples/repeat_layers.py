"""A builder that starts a deep model from a shallower one by repeating its layers."""

import dataclasses
import re

from t5x_lite.checkpoints import builders
from t5x_lite.errors import CheckpointError

LAYER = re.compile(r'(target/.*layers_)(\d+)(/.*)')


@dataclasses.dataclass(frozen=True)
class RepeatLayers(builders.StateBuilder):
  """Builder that repeats the layers of each stack: layer i of the model is layer i % n of the n that are built."""

  def build(self, state, target):
    matches = list(filter(None, map(LAYER.fullmatch, state.arrays)))
    if not matches:
      raise CheckpointError(
        "RepeatLayers must follow the restore of a model with the layout 't5', got no layers."
      )
    num_layers = {}
    for match in matches:
      num_layers[match[1]] = max(num_layers.get(match[1], 0), int(match[2]) + 1)
    repeated = {}
    for name in target.wanted:
      match = LAYER.fullmatch(name)
      if match and match[1] in num_layers:
        repeated[name] = state.arrays[f'{match[1]}{int(match[2]) % num_layers[match[1]]}{match[3]}']
    kept = state.without('state/param_states/', 'param_average/')  # which begin with the parameters
    return kept.replace(arrays={**kept.arrays, **repeated})
