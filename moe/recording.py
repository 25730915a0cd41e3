"""Files of routing decisions, one for each step: the experts of every token in every layer.

A record is the collection `routing` that the layers write: `<stack>/layers_<i>/.../expert_index`, int32 [groups,
tokens, choices], and `gates`, float32 of that shape. `models.MoeEncoderDecoderModel.record_routing` makes one and
`with_replayed_routing` routes by one. A file is a NumPy archive with the values under '/'-joined names.
"""

from collections.abc import Mapping
import io
import os
import re
from typing import Any
import zipfile

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.storage import files
from t5x_lite.storage import untrusted
from t5x_lite.types import Array

# Collections of the layers that write, or read, routing decisions.
ROUTING = 'routing'
REPLAY = 'routing_replay'
# Name of the weights in both; the other names are those of indices.
GATES = 'gates'
Record = Mapping[str, Any]

_MAX_BYTES = 2**31
_FILE = re.compile(r'routing_(\d+)\.npz')
# Whether the arrays of a record with this name are integers.
_IS_INTEGER = {'expert_index': True, 'token_index': True, GATES: False}


def as_record(collection: Mapping[str, Any]) -> dict[str, Any]:
  """Return the collection `routing` with each sown tuple replaced by its last value.

  Raises:
    ConfigError: it is empty.
  """
  tree = tree_utils.to_dict(collection)
  if not jax.tree.leaves(tree):
    raise errors.ConfigError(
      'The network has no sparse layers, so no routing was recorded. Give it a '
      'moe.SparseFeedForward.'
    )

  def is_sown(node):
    return isinstance(node, tuple)

  def last(node):
    if is_sown(node):
      return node[-1]
    return node

  return jax.tree.map(last, tree, is_leaf=is_sown)


class RoutingFiles:
  """Records of a run in a folder, one file `routing_<step>.npz` for each step."""

  def __init__(self, folder: str | os.PathLike[str]):
    """Create an object; `write` creates the folder.

    Args:
      folder: path of the folder.
    """
    self._folder = files.path(folder)

  def steps(self) -> list[int]:
    """Return the steps with a record, in increasing order."""
    if not self._folder.is_dir():
      return []
    matches = (_FILE.fullmatch(path.name) for path in self._folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)

  def write(self, step: int, record: Record) -> files.Path:
    """Write the record of a step, atomically; it replaces an earlier record of this step.

    Args:
      step: number of the step, at least 0.
      record: see `as_record`; device arrays are copied to the host.

    Returns:
      Path of the file.
    """
    checks.check('RoutingFiles.write', locals(), step=checks.number(at_least=0, integer=True))
    flat = tree_utils.flatten_dict(jax.device_get(dict(record)))
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in flat.items()}
    self._folder.mkdir(parents=True, exist_ok=True)
    path = self._path(step)

    def save(temporary: files.Path) -> None:
      with open(temporary, 'wb') as f:  # NumPy would append .npz to a file name.
        np.savez_compressed(f, **arrays)

    files.write(path, save)
    return path

  def read(self, step: int) -> dict[str, Any]:
    """Return the record of a step as nested dicts of NumPy arrays.

    Raises:
      DataError: the step has no record, or the file is damaged.
    """
    path = self._path(step)
    if not path.exists():
      found = self.steps()
      if found:
        has = f'records of {len(found)} steps, {found[0]} to {found[-1]}'
      else:
        has = 'no records'
      raise errors.DataError(
        f'Step {step} has no record in {str(self._folder)!r}, which holds {has}.'
      )
    try:
      content = untrusted.read_regular(path, _MAX_BYTES)
      with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return tree_utils.unflatten_dict({name: archive[name] for name in archive.files})
    except (OSError, ValueError, zipfile.BadZipFile) as error:
      raise errors.DataError(
        f'Cannot read the record of routing {str(path)!r}: {error}. Record the step again.'
      ) from error

  def _path(self, step: int) -> files.Path:
    return self._folder / f'routing_{step:08d}.npz'


def check_record(record: Record, with_gates: bool = False) -> None:
  """Raise ConfigError for an invalid record, before a step is compiled with it.

  Args:
    record: record to check.
    with_gates: whether every layer must have gates.

  Raises:
    ConfigError: the first problem, with the name of the array.
  """
  flat = tree_utils.flatten_dict(record)
  problems = []
  if not flat:
    problems.append('it has no layers')
  for name, value in flat.items():
    is_integer = _IS_INTEGER.get(_last_part(name))
    if np.issubdtype(value.dtype, np.integer) != is_integer or np.ndim(value) < 3:
      problems.append(
        f'{name!r} has shape {np.shape(value)} and type {value.dtype}; records have int32 arrays named '
        'expert_index or token_index and float32 arrays named gates, with at least 3 dims'
      )
  if with_gates:
    for layer, values in layers_of(record).items():
      if GATES not in values:
        problems.append(f'layer {layer!r} has no gates, which replay_gates=True needs')
  if problems:
    raise errors.ConfigError(
      f'Invalid record of routing: {problems[0]}. Use the result of record_routing.'
    )


def check_layers(record: Record, routing: Record) -> None:
  """Raise ConfigError if a record has other layers, or other kinds of routers, than the network that replays it.

  Args:
    record: record of an earlier pass.
    routing: record of the current pass.

  Raises:
    ConfigError: the first array that only one of them has.
  """
  recorded = set(tree_utils.flatten_dict(without_gates(record)))
  made = set(tree_utils.flatten_dict(without_gates(routing)))
  if recorded != made:
    odd = min(recorded ^ made)
    owner = 'network'
    if odd in recorded:
      owner = 'record'
    raise errors.ConfigError(
      f'The record of routing has {len(recorded)} layers, the network routes in {len(made)}: only the '
      f'{owner} has {odd!r}. Record again, with the same layers, routers and param_layout.'
    )


def without_gates(record: Record) -> dict[str, Any]:
  """Return a record without gates; a pass that replays it computes its gates from its parameters."""
  flat = tree_utils.flatten_dict(record)
  kept = {name: value for name, value in flat.items() if _last_part(name) != GATES}
  return tree_utils.unflatten_dict(kept)


def _last_part(name: str) -> str:
  return name.rsplit('/', 1)[-1]


def layers_of(record: Record) -> dict[str, dict[str, Array]]:
  """Return the arrays of each layer of a record by name, e.g. `encoder/layers_1/mlp` to {'expert_index': ..., ...}."""
  found: dict[str, dict[str, Array]] = {}
  for name, value in tree_utils.flatten_dict(record).items():
    layer, _, last = name.rpartition('/')
    found.setdefault(layer, {})[last] = value
  return found
