"""Checks of the arguments of a `MultiOptimizer`, and the parameters that its parts select."""

from collections.abc import Mapping, Sequence
import re
from typing import Any

import optax

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.multi import traversals as _traversals

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
