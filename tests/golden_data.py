"""Recorded numbers of the original implementations, loaded from `tests/golden/`."""

import json
import pathlib
from typing import Any

import numpy as np

_ROOT = pathlib.Path(__file__).parent / 'golden'


def load(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Return (description, arrays) of the golden case `name`, e.g. `t5x/net_t5_1_1_tiny`; `{}` if it has no arrays."""
  description = json.loads((_ROOT / f'{name}.json').read_text())
  archive = _ROOT / f'{name}.npz'
  if not archive.exists():
    return description, {}
  with np.load(archive) as arrays:
    return description, {key: arrays[key] for key in arrays.files}


def subtree(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, Any]:
  """Returns the nested dict of the arrays whose keys start with `prefix/`."""
  tree: dict[str, Any] = {}
  for key, value in arrays.items():
    if key.startswith(prefix + '/'):
      *parents, last = key[len(prefix) + 1 :].split('/')
      node = tree
      for parent in parents:
        node = node.setdefault(parent, {})
      node[last] = value
  return tree
