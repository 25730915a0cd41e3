"""State dict of a `MultiOptimizer`.

The per-parameter state of a part is at the parameters' paths, as in T5X; other state of a part is in the entry
'optimizer:<name of the part>'.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.multi import paths as _paths

_PREFIX = 'optimizer:'
_ROOT = 'param_states/'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """One part of a `MultiOptimizer` with its state.

  Attributes:
    name: name of the part.
    description: description for messages.
    optimizer_def: optimizer of the part.
    state: state of the part, with the step that all parts share.
    paths: '/'-joined paths of the part's parameters.
  """

  name: str
  description: str
  optimizer_def: definition.OptimizerDef
  state: definition.OptimizerState
  paths: tuple[str, ...]

  @property
  def entry(self) -> str:
    """Name, in 'param_states', of the entry for state that is not per-parameter."""
    return f'{_PREFIX}{self.name}'


def check_reserved_names(leaves: Mapping[str, Any]) -> None:
  """Raise if the path of a parameter begins like the entry of a part.

  Args:
    leaves: all parameters by path.

  Raises:
    ConfigError: names the parameter.
  """
  for path in leaves:
    if path.startswith(_PREFIX):
      raise ConfigError(
        f'MultiOptimizer reserves names that begin with {_PREFIX!r} for states. Rename the parameter {path!r}.'
      )


def param_states_dict(parts: Sequence[Part], leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Return the 'param_states' of a state dict: nested dicts, {} if no part has state.

  Args:
    parts: the parts.
    leaves: all parameters by path.
  """
  flat = {}
  for part in parts:
    part_dict = part.optimizer_def.state_dict(_paths.subtree(leaves, part.paths), part.state)
    states = part_dict['state'].get('param_states', {})
    if part.optimizer_def.has_param_wise_state:
      flat |= tree_utils.flatten_dict(states)
    elif isinstance(states, Mapping):
      for path, value in tree_utils.flatten_dict(states).items():
        flat[f'{part.entry}/{path}'] = value
    else:
      flat[part.entry] = states
  return tree_utils.unflatten_dict(flat)


def restore_parts(
  parts: Sequence[Part],
  leaves: Mapping[str, Any],
  expected: Mapping[str, Any],
  state_dict: Mapping[str, Any],
) -> tuple[Any, tuple[Any, ...]]:
  """Restore the state of each part.

  Args:
    parts: the parts, whose states give the structure.
    leaves: all parameters by path.
    expected: the 'state' entry of the state dict of these parts.
    state_dict: the 'state' entry to restore from.

  Returns:
    (step, the `param_states` of each part).

  Raises:
    CheckpointError: a missing or unknown value; the message names its path and its part.
  """
  flat = tree_utils.flatten_dict(state_dict)
  given = {path: value for path, value in flat.items() if value is not None}
  _check_given(given, tree_utils.flatten_dict(expected), parts)
  owners = _owners(parts)
  states: dict[str, dict[str, Any]] = {part.name: {} for part in parts}
  for name, value in given.items():
    if not name.startswith(_ROOT):
      continue
    path = name.removeprefix(_ROOT)
    part = _owner(path, owners)
    assert part is not None  # `_check_given` raises for unknown names.
    if not part.optimizer_def.has_param_wise_state:
      path = path.removeprefix(part.entry)
    states[part.name][path] = value
  restored = []
  for part in parts:
    target = _paths.subtree(leaves, part.paths)
    part_dict = {'target': target, 'state': {'step': given['step']}}
    entries = {path.removeprefix('/'): value for path, value in states[part.name].items()}
    if '' in entries:
      # A state of one array is the entry itself.
      part_dict['state']['param_states'] = entries['']
    elif entries:
      part_dict['state']['param_states'] = tree_utils.unflatten_dict(entries)
    _, state = part.optimizer_def.restore_state(target, part.state, part_dict)
    restored.append(state.param_states)
  return given['step'], tuple(restored)


def _owners(parts: Sequence[Part]) -> dict[str, Part]:
  """Return the parts by their entries and by the paths of their parameters."""
  owners = {}
  for part in parts:
    owners |= dict.fromkeys((*part.paths, part.entry), part)
  return owners


def _owner(path: str, owners: Mapping[str, Part]) -> Part | None:
  """Return the part of the path, or of a parent of it."""
  ends = [i for i, letter in enumerate(path) if letter == '/'] + [len(path)]
  for end in ends:
    if path[:end] in owners:
      return owners[path[:end]]
  return None


def _check_given(
  given: Mapping[str, Any], expected: Mapping[str, Any], parts: Sequence[Part]
) -> None:
  """Raise if the names of a given state differ from the expected names."""
  owners = _owners(parts)
  unknown = [name for name in given if name not in expected]
  missing = [name for name in expected if name not in given]
  for name in unknown + missing:
    if name in expected:
      problem = f'the value at state/{name} is missing'
    else:
      problem = f'unknown value at state/{name}'
    part = None
    reason = ''
    if name.startswith(_ROOT):
      part = _owner(name.removeprefix(_ROOT), owners)
      reason = ' (no part trains such a parameter or has this name)'
    if part is None:
      pass
    elif name in expected:
      reason = f' ({part.description})'
    elif part.optimizer_def.has_param_wise_state or name.startswith(f'{_ROOT}{part.entry}'):
      reason = f' ({part.description} has no such value)'
    else:
      reason = f' ({part.description} trains this parameter and has its state at state/{_ROOT}{part.entry})'
    raise CheckpointError(
      f'Cannot restore the optimizer: {problem}{reason}. Was it saved with another optimizer, or with '
      'other parts?'
    )
