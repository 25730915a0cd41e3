"""What a `MultiOptimizer` is given, read and checked: pairs of traversal and optimizer, names, and what they select."""

from collections.abc import Mapping, Sequence
import re
from typing import Any

import optax

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.multi import traversals as _traversals


def read_pairs(pairs: Any) -> tuple[list[_traversals.Traversal], list[definition.OptimizerDef]]:
  """Returns the traversal and the optimizer of each part.

  Args:
    pairs: what `MultiOptimizer` takes as `traversals_and_optimizers`.

  Raises:
    ConfigError: it is no sequence of such pairs, or has none.
  """
  if not isinstance(pairs, Sequence) or isinstance(pairs, str):
    raise ConfigError(
        f'MultiOptimizer takes a sequence of (traversal, optimizer) pairs, got {type(pairs).__name__}. For optimizers '
        'by label use optimizers.partition.')
  if not pairs:
    raise ConfigError('MultiOptimizer got no (traversal, optimizer) pair; it needs one at least.')
  traversals, optimizer_defs = [], []
  for index, pair in enumerate(pairs):
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
      raise ConfigError(f'MultiOptimizer: entry {index} is {pair!r}; expected a pair (traversal, optimizer).')
    traversals.append(_traversals.as_traversal(pair[0], f'MultiOptimizer, entry {index}'))
    optimizer_defs.append(_as_optimizer_def(pair[1], f'entry {index}'))
  return traversals, optimizer_defs


def check_names(names: Sequence[Any], num_parts: int) -> None:
  """Checks the names of the parts.

  Raises:
    ConfigError: there are not as many as parts, two are the same, or one cannot stand in a path.
  """
  if len(names) != num_parts or len(set(names)) != num_parts:
    raise ConfigError(f'MultiOptimizer: part_names is {names}; expected {num_parts} different names.')
  for name in names:
    if not isinstance(name, str) or not re.fullmatch(r'[\w:+-]+', name):
      raise ConfigError(
          f'MultiOptimizer: a part cannot have the name or label {name!r}; expected a text of letters, digits and any '
          'of _:+- since it stands in paths of checkpoints.')


def select(
    traversals: Sequence[_traversals.Traversal], descriptions: Sequence[str],
    tree: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
  """Returns the paths of the parameters of each part.

  Args:
    traversals: what selects them.
    descriptions: what messages call the parts.
    tree: nested dicts of parameters, or of what stands for them.

  Raises:
    ConfigError: a parameter that several parts select, or a part that selects none.
  """
  paths = tuple(_traversals.selected_paths(traversal, tree) for traversal in traversals)
  owner: dict[str, int] = {}
  for index, part_paths in enumerate(paths):
    if tree and not part_paths:
      known = [path for path, _ in tree_utils.named_leaves(tree)]
      raise ConfigError(
          f'MultiOptimizer: {descriptions[index]} selects none of the {len(known)} parameters, such as {known[0]!r} and '
          f'{known[-1]!r}; correct the selection, or remove the part.')
    for path in part_paths:
      if path in owner:
        raise ConfigError(
            f'MultiOptimizer: the parameter {path!r} is selected by {descriptions[owner[path]]} and by '
            f'{descriptions[index]}; expected one part at most. Narrow one of them (PathTraversal has exclude=...), or '
            'use optimizers.partition, where each parameter has one label.')
      owner[path] = index
  return paths


def _as_optimizer_def(optimizer_def: Any, where: str) -> definition.OptimizerDef:
  if not isinstance(optimizer_def, definition.OptimizerDef):
    shown, hint = repr(optimizer_def), ''
    if isinstance(optimizer_def, optax.GradientTransformation):
      shown, hint = 'a bare optax transformation', ' Wrap it in optimizers.OptaxWrapper.'
    elif isinstance(optimizer_def, (_traversals.Traversal, str)):
      hint = ' The traversal comes first.'
    elif optimizer_def is None:
      hint = ' To freeze parameters leave the pair out: what no part selects keeps its values.'
    elif callable(optimizer_def):
      shown, hint = getattr(optimizer_def, '__name__', shown), ' Call it first.'
    raise ConfigError(f'MultiOptimizer: {where} has {shown} for an optimizer; expected an OptimizerDef such as '
                      f'optimizers.adamw().{hint}')
  return optimizer_def
