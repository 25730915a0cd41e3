"""The state dict of a `MultiOptimizer`: where each part's state stands, and what is wrong with one that does not fit.

A part that keeps its state parameter by parameter has it at the parameter's path, as in T5X; another has its own entry,
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
    description: what messages call it.
    optimizer_def: its optimizer.
    state: its state, with the step that all parts share.
    paths: the '/'-joined paths of its parameters.
  """

  name: str
  description: str
  optimizer_def: definition.OptimizerDef
  state: definition.OptimizerState
  paths: tuple[str, ...]

  @property
  def entry(self) -> str:
    """The name, in 'param_states', of what does not stand with the parameters."""
    return f'{_PREFIX}{self.name}'


def check_reserved_names(leaves: Mapping[str, Any]) -> None:
  """Refuses parameters whose path begins as the entries of parts do.

  Raises:
    ConfigError: there is such a parameter.
  """
  for path in leaves:
    if path.startswith(_PREFIX):
      raise ConfigError(
          f'MultiOptimizer keeps the state of its parts under names that begin with {_PREFIX!r}, so there can be no '
          f'parameter {path!r}; rename it.')


def param_states_dict(parts: Sequence[Part], leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the 'param_states' of a state dict: nested dicts, {} if no part keeps anything.

  Args:
    parts: the parts.
    leaves: all parameters by path.
  """
  flat = {}
  for part in parts:
    own = part.optimizer_def.state_dict(_paths.subtree(leaves, part.paths), part.state)['state'].get('param_states', {})
    if part.optimizer_def.has_param_wise_state:
      flat |= tree_utils.flatten_dict(own)
    elif isinstance(own, Mapping):
      flat |= {f'{part.entry}/{path}': value for path, value in tree_utils.flatten_dict(own).items()}
    else:
      flat[part.entry] = own
  return tree_utils.unflatten_dict(flat)


def restore_parts(
    parts: Sequence[Part], leaves: Mapping[str, Any], wanted: Mapping[str, Any],
    state_dict: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
  """Restores the state of each part.

  Args:
    parts: the parts, whose states give the structure.
    leaves: all parameters by path.
    wanted: the 'state' entry of the state dict of those parts.
    state_dict: the 'state' entry to restore from.

  Returns:
    (step, the `param_states` of each part).

  Raises:
    CheckpointError: a value that is missing or has no place; the message names its path and its part.
  """
  given = {path: value for path, value in tree_utils.flatten_dict(state_dict).items() if value is not None}
  _check_given(given, tree_utils.flatten_dict(wanted), parts)
  owners = {path: part for part in parts for path in (*part.paths, part.entry)}
  own: dict[str, dict[str, Any]] = {part.name: {} for part in parts}
  for name, value in given.items():
    if name.startswith(_ROOT):
      path = name.removeprefix(_ROOT)
      part = owners[_known_parent(path, owners)]
      own[part.name][path if part.optimizer_def.has_param_wise_state else path.removeprefix(part.entry)] = value
  restored = []
  for part in parts:
    target = _paths.subtree(leaves, part.paths)
    part_dict = {'target': target, 'state': {'step': given['step']}}
    entries = {path.removeprefix('/'): value for path, value in own[part.name].items()}
    if entries:
      # A state that is one array stands at the entry itself.
      part_dict['state']['param_states'] = entries[''] if '' in entries else tree_utils.unflatten_dict(entries)
    restored.append(part.optimizer_def.restore_state(target, part.state, part_dict)[1].param_states)
  return given['step'], tuple(restored)


def _known_parent(path: str, known: Mapping[str, Any]) -> str | None:
  """Returns the one of `known` that is `path` or stands above it."""
  ends = [i for i, letter in enumerate(path) if letter == '/'] + [len(path)]
  return next((path[:end] for end in ends if path[:end] in known), None)


def _check_given(given: Mapping[str, Any], wanted: Mapping[str, Any], parts: Sequence[Part]) -> None:
  """Compares the names of a given state with those that are wanted."""
  owners = {path: part for part in parts for path in (*part.paths, part.entry)}

  def part_of(name):
    return owners.get(_known_parent(name.removeprefix(_ROOT), owners))

  for name in given:
    if name not in wanted:
      part = part_of(name) if name.startswith(_ROOT) else None
      if part is None:
        reason = ' (no part trains such a parameter or has this name)' if name.startswith(_ROOT) else ''
      elif part.optimizer_def.has_param_wise_state or name.startswith(f'{_ROOT}{part.entry}'):
        reason = f' ({part.description} keeps no such value)'
      else:
        reason = f' ({part.description} trains this parameter and keeps its state at state/{_ROOT}{part.entry})'
      raise CheckpointError(
          f'Cannot restore the optimizer: nothing takes the value at state/{name}{reason}. Was it saved with another '
          'optimizer, or with other parts?')
  for name in wanted:
    if name not in given:
      part = part_of(name) if name.startswith(_ROOT) else None
      reason = '' if part is None else f' ({part.description})'
      raise CheckpointError(
          f'Cannot restore the optimizer: the value at state/{name} is missing{reason}. Was it saved with another '
          'optimizer, or with other parts?')
