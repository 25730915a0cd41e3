"""A Hugging Face folder as a train state at step 0, without optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
import functools
import json
import os
from typing import Any

import jax
import numpy as np

from t5x_lite.checkpoints.sources import base
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

_PREFIX = 'target/'


class HuggingFaceSource(base.StateSource):
  """The parameters of a folder with config.json and safetensors, under our names in the layout 't5'.

  Attributes:
    folder: the opened `HuggingFaceFolder`.
  """

  format = 'hugging_face'
  title = 'Hugging Face'
  description = 'a Hugging Face folder (config.json and *.safetensors)'
  has_steps = False

  @classmethod
  def is_stored_in(cls, root: files.Path) -> bool:
    """See `StateSource.is_stored_in`."""
    if not (root / 'config.json').is_file() or not any(root.glob('*.safetensors*')):
      return False
    try:
      return isinstance(json.loads(untrusted.read_limited(root, 'config.json')), dict)
    except (OSError, ValueError, RecursionError):  # CheckpointError is a ValueError.
      return True  # opening the folder reports the problem

  def __init__(self, path: str | os.PathLike[str]):
    super().__init__(path)
    from t5x_lite.checkpoints.hugging_face import folder  # only this format needs safetensors

    self.folder = folder.HuggingFaceFolder(self.path)

  def shapes(self) -> base.Shapes:
    """See `StateSource.shapes`."""
    return self._shapes

  @functools.cached_property
  def _shapes(self) -> base.Shapes:
    params = {
      f'{_PREFIX}{name}': jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype))
      for name, leaf in self.folder.shapes().items()
    }
    return params | {'state/step': jax.ShapeDtypeStruct((), np.dtype(np.int32))}

  def read_array(self, name: str) -> np.ndarray:
    """See `StateSource.read_array`."""
    if name == 'state/step':
      return np.asarray(0, np.int32)
    return self.folder.read_array(name.removeprefix(_PREFIX))

  def weight_files(self) -> dict[str, int]:
    """See `StateSource.weight_files`; texts next to the weights may change."""
    found = super().weight_files()
    return {name: size for name, size in found.items() if name.endswith('.safetensors')}

  def verify(self) -> bool:
    """See `StateSource.verify`; without a warning, since no folder of this format has hashes."""
    return False

  @functools.cached_property
  def metadata(self) -> Mapping[str, Any]:
    """The layout, and the options of the network in `network`."""
    architecture = self.folder.architecture
    # The special ids and those of experts are not options of our networks, but needed to write the folder again.
    network = architecture.network_config_kwargs()
    defaults = {'pad_token_id': 0, 'eos_token_ids': (1,), 'decoder_start_token_id': 0}
    for name, default in defaults.items():
      if getattr(architecture, name) != default:
        network[name] = getattr(architecture, name)
    if architecture.num_experts:
      network |= {
        name: getattr(architecture, name) for name in ('router_jitter_noise', 'expert_capacity')
      }
    return {
      'param_layout': 't5',
      'network': {
        'config': 'T5Config',
        **{
          name: list(value) if isinstance(value, tuple) else value
          for name, value in network.items()
        },
      },
    }
