"""Files of routing decisions, one for each step: who went where, layer by layer.

A record is what the layers write into the collection `routing`: `<stack>/layers_<i>/.../expert_index`, int32 [groups,
tokens, choices], and `gates`, float32 of that shape. `models.MoeEncoderDecoderModel.record_routing` makes one and
`with_replayed_routing` routes by one. A file is a NumPy archive with the values under '/'-joined names.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any
import zipfile

import jax
import numpy as np

from t5x_lite import errors
from t5x_lite import files
from t5x_lite import tree_utils
from t5x_lite.types import Array

# Collections of the layers that write, or read, routing decisions.
ROUTING, REPLAY = 'routing', 'routing_replay'
# The name of the weights in both; the other names are those of indices.
GATES = 'gates'
Record = Mapping[str, Any]

_FILE = re.compile(r'routing_(\d+)\.npz')


def as_record(collection: Mapping[str, Any]) -> dict[str, Any]:
  """Return the collection `routing` with each sown tuple replaced by its last value.

  Raises:
    ConfigError: it is empty.
  """
  tree = tree_utils.to_dict(collection)
  if not jax.tree.leaves(tree):
    raise errors.ConfigError('the network has recorded no routing; expected one with sparse layers. Give it a '
                             'moe.SparseFeedForward.')
  return jax.tree.map(lambda leaf: leaf[-1] if isinstance(leaf, tuple) else leaf, tree,
                      is_leaf=lambda leaf: isinstance(leaf, tuple))


class RoutingFiles:
  """The records of a run in a folder, `routing_<step>.npz` each."""

  def __init__(self, folder: str | os.PathLike[str]):
    """Make nothing on disk yet.

    Args:
      folder: where the files are; made by the first `write`.
    """
    self._folder = pathlib.Path(folder)

  def steps(self) -> list[int]:
    """Return the steps that there are records of, in order."""
    if not self._folder.is_dir():
      return []
    matches = (_FILE.fullmatch(path.name) for path in self._folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)

  def write(self, step: int, record: Record) -> pathlib.Path:
    """Write the record of a step, in place of an earlier one; a half-written file never has the final name.

    Args:
      step: number of the step, at least 0.
      record: see `as_record`; arrays of the device are fetched.

    Returns:
      The file.
    """
    if step < 0:
      raise errors.ConfigError(f'got step={step}; expected a number of at least 0.')
    arrays = {name: np.asarray(value) for name, value in tree_utils.flatten_dict(jax.device_get(dict(record))).items()}
    self._folder.mkdir(parents=True, exist_ok=True)
    path = self._path(step)

    def save(temporary: pathlib.Path) -> None:
      with open(temporary, 'wb') as f:  # a name alone would get the suffix .npz
        np.savez_compressed(f, **arrays)

    files.write(path, save)
    return path

  def read(self, step: int) -> dict[str, Any]:
    """Return the record of a step, nested dicts of NumPy arrays.

    Raises:
      DataError: there is none, or the file is damaged.
    """
    path = self._path(step)
    if not path.exists():
      found = self.steps()
      has = f'records of {len(found)} steps, {found[0]} to {found[-1]}' if found else 'no records'
      raise errors.DataError(f'no routing of step {step} in {str(self._folder)!r}, which holds {has}.')
    try:
      with np.load(path, allow_pickle=False) as archive:
        return tree_utils.unflatten_dict({name: archive[name] for name in archive.files})
    except (OSError, ValueError, zipfile.BadZipFile) as error:
      raise errors.DataError(f'{str(path)!r} is no record of routing that can be read ({error}). Record the step again.'
                             ) from error

  def _path(self, step: int) -> pathlib.Path:
    return self._folder / f'routing_{step:08d}.npz'


def check_record(record: Record, with_gates: bool = False) -> None:
  """Refuses what is no record, before it is compiled into a step.

  Args:
    record: what should be one.
    with_gates: every layer of it has to have gates.

  Raises:
    ConfigError: naming the value and what was expected.
  """
  flat = tree_utils.flatten_dict(record)
  if not flat:
    raise errors.ConfigError('got a record of routing without any layer; expected what record_routing returned.')
  for name, value in flat.items():
    last = name.rsplit('/', 1)[-1]
    if last not in ('expert_index', 'token_index', GATES):
      raise errors.ConfigError(f'got {name!r} in a record of routing; expected names that end in expert_index, '
                               'token_index or gates, as record_routing makes them.')
    is_index = last != GATES
    if np.issubdtype(value.dtype, np.integer) != is_index or np.ndim(value) < 3:
      raise errors.ConfigError(f'got {name!r} of shape {np.shape(value)} and type {value.dtype} in a record of routing'
                               f'; expected {"int32" if is_index else "float32"} of 3 dims.')
  lacking = [layer for layer, values in layers_of(record).items() if GATES not in values]
  if with_gates and lacking:
    raise errors.ConfigError(f'got a record of routing without gates for {lacking[0]!r}; expected them for every '
                             'layer, as record_routing makes them. Record again, or set replay_gates=False.')


def check_layers(record: Record, routing: Record) -> None:
  """Refuses a record that is not of the layers, or the kinds of routers, of a pass that was to repeat it.

  Args:
    record: the record.
    routing: what the pass has recorded itself.

  Raises:
    ConfigError: naming the first decisions that only one of them has.
  """
  recorded, made = (sorted(name for name in tree_utils.flatten_dict(tree) if name.rsplit('/', 1)[-1] != GATES)
                    for tree in (record, routing))
  if recorded != made:
    odd = sorted(set(recorded) ^ set(made))[0]
    raise errors.ConfigError(
        f'got a record of routing with {len(recorded)} layers for a network that routes in {len(made)}: only the '
        f'{"record" if odd in recorded else "network"} has {odd!r}; expected a record of this network. Record again, '
        'with the same layers, routers and form of parameters.')


def without_gates(record: Record) -> dict[str, Any]:
  """Return a record of who goes where alone, so that who replays it weighs with gates of its own."""
  flat = tree_utils.flatten_dict(record)
  return tree_utils.unflatten_dict({name: value for name, value in flat.items() if name.rsplit('/', 1)[-1] != GATES})


def layers_of(record: Record) -> dict[str, dict[str, Array]]:
  """Return name to values for each layer of a record, e.g. `encoder/layers_1/mlp` to {'expert_index': ..., ...}."""
  found: dict[str, dict[str, Array]] = {}
  for name, value in tree_utils.flatten_dict(record).items():
    layer, _, last = name.rpartition('/')
    found.setdefault(layer, {})[last] = value
  return found
