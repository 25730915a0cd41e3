"""Parts of a `MultiOptimizer`: checks of its arguments, the parameters that a part selects, and the state dict.

In a state dict, the per-parameter state of a part is at the parameters' paths, as in T5X; other state of a part is in
the entry 'optimizer:<name of the part>'.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re
from typing import Any

import optax

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.multi import traversals as _traversals
from t5x_lite.types import Params, PyTree


def by_path(tree: PyTree) -> dict[str, Any]:
  """Return the leaves of `tree` by their '/'-joined paths.

  Raises:
    ConfigError: two leaves have the same path.
  """
  leaves = {}
  for path, leaf in tree_utils.named_leaves(tree):
    if path in leaves:
      raise ConfigError(
        f'MultiOptimizer: two parameters have the path {path!r}. Rename one of them.'
      )
    leaves[path] = leaf
  return leaves


def subtree(leaves: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
  """Return nested plain dicts of the leaves at `paths`."""
  return tree_utils.unflatten_dict({path: leaves[path] for path in paths})


def like(tree: PyTree, leaves: Mapping[str, Any]) -> PyTree:
  """Return a tree with the containers of `tree` and the leaves given by path."""
  return tree_utils.map_with_names(lambda path, _: leaves[path], tree)


def part_extra_args(
  extra_args: Mapping[str, Any], params: Params, leaves: Mapping[str, Any], paths: Sequence[str]
) -> dict[str, Any]:
  """Return the extra arguments of an update for a part; the parameters of other parts are constants in them.

  Args:
    extra_args: values by the names of `EXTRA_ARGS`.
    params: all parameters.
    leaves: all parameters by path.
    paths: paths of the part's parameters.
  """

  def all_params(part_params: Params) -> Params:
    return like(params, {**leaves, **by_path(part_params)})

  def of_part(tree: Params) -> dict[str, Any]:
    return subtree(by_path(tree), paths)

  def convert_value_fn(value_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda part_params: value_fn(all_params(part_params))

  def convert_grad_fn(grad_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda part_params, number: of_part(grad_fn(all_params(part_params), number))

  converters = {
    'value': lambda value: value,
    'grad': of_part,
    'value_fn': convert_value_fn,
    'obj_fn': convert_value_fn,
    'grad_fn': convert_grad_fn,
  }
  return {name: converters[name](value) for name, value in extra_args.items()}


_PAIRS = checks.Expectation(
  'a list of at least one pair (traversal, optimizer)',
  lambda pairs: (
    isinstance(pairs, (list, tuple))
    and len(pairs) > 0
    and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs)
  ),
  'For optimizers by label use optimizers.partition.',
)


def read_pairs(pairs: Any) -> tuple[list[_traversals.Traversal], list[definition.OptimizerDef]]:
  """Return the traversal and the optimizer of each part.

  Args:
    pairs: argument `traversals_and_optimizers` of `MultiOptimizer`.

  Raises:
    ConfigError: not a list of at least one valid pair.
  """
  checks.check(
    'MultiOptimizer', {'traversals_and_optimizers': pairs}, traversals_and_optimizers=_PAIRS
  )
  traversals = []
  optimizer_defs = []
  for index, (traversal, optimizer_def) in enumerate(pairs):
    traversals.append(_traversals.as_traversal(traversal, f'traversals_and_optimizers[{index}][0]'))
    optimizer_defs.append(
      _as_optimizer_def(optimizer_def, f'traversals_and_optimizers[{index}][1]')
    )
  return traversals, optimizer_defs


def check_names(names: Sequence[Any], num_parts: int) -> None:
  """Raise unless there are `num_parts` different names that can be a part of a path.

  Raises:
    ConfigError: another number of names, equal names, or invalid characters.
  """
  is_valid = all(isinstance(name, str) and re.fullmatch(r'[\w:+-]+', name) for name in names)
  if not is_valid or len(names) != num_parts or len(set(names)) != num_parts:
    raise checks.invalid(
      'MultiOptimizer',
      'part_names',
      f'{num_parts} different names (or labels) of letters, digits and _:+-',
      names,
      'The names are parts of paths in checkpoints.',
    )


def select(
  traversals: Sequence[_traversals.Traversal], descriptions: Sequence[str], tree: Mapping[str, Any]
) -> tuple[tuple[str, ...], ...]:
  """Return the paths of the parameters of each part.

  Args:
    traversals: selection of each part.
    descriptions: description of each part for messages.
    tree: nested dicts of parameters, or of their shapes, axes or shardings.

  Raises:
    ConfigError: several parts select one parameter, or a part selects no parameter.
  """
  paths = tuple(_traversals.selected_paths(traversal, tree) for traversal in traversals)
  owner: dict[str, int] = {}
  for index, part_paths in enumerate(paths):
    if tree and not part_paths:
      known = [path for path, _ in tree_utils.named_leaves(tree)]
      raise ConfigError(
        f'MultiOptimizer: {descriptions[index]} selects no parameter out of {len(known)}, such as {known[0]!r} and '
        f'{known[-1]!r}. Correct the selection, or remove the part.'
      )
    for path in part_paths:
      if path in owner:
        raise ConfigError(
          f'MultiOptimizer: the parameter {path!r} must be selected by at most one part, got '
          f'{descriptions[owner[path]]} and {descriptions[index]}. Narrow one of them (PathTraversal has '
          'exclude=...), or use optimizers.partition, with one label per parameter.'
        )
      owner[path] = index
  return paths


def _as_optimizer_def(optimizer_def: Any, where: str) -> definition.OptimizerDef:
  if not isinstance(optimizer_def, definition.OptimizerDef):
    if callable(optimizer_def):
      remedy = 'Call the function first.'
    else:
      remedy = ''
    if isinstance(optimizer_def, optax.GradientTransformation):
      remedy = 'Wrap the optax transformation in optimizers.OptaxWrapper.'
    elif isinstance(optimizer_def, (_traversals.Traversal, str)):
      remedy = 'The traversal is the first element of a pair.'
    elif optimizer_def is None:
      remedy = 'To freeze parameters, omit the pair.'
    raise checks.invalid(
      'MultiOptimizer', where, 'an optimizer such as optimizers.adamw()', optimizer_def, remedy
    )
  optimizer_def.update_options.check_part('MultiOptimizer')
  return optimizer_def


# ---- State dict ------------------------------------------------------------------------------------------------------

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
    part_dict = part.optimizer_def.state_dict(subtree(leaves, part.paths), part.state)
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
    target = subtree(leaves, part.paths)
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
