"""Which parameters an optimizer of a `MultiOptimizer` trains: traversals, by predicate or by path.

A traversal selects some leaves of a tree. The protocol is that of `flax.traverse_util.Traversal`, whose deprecated
classes serve as well; those here need no base class and give no warnings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any, Protocol, runtime_checkable

import jax

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import PyTree


@runtime_checkable
class Traversal(Protocol):
  """A selection of leaves, or of whole subtrees, of nested dicts."""

  def iterate(self, inputs: PyTree) -> Iterator[Any]:
    """Yields what is selected of `inputs`."""

  def update(self, fn: Callable[[Any], Any], inputs: PyTree) -> PyTree:
    """Returns `inputs` with `fn(x)` in the place of each selected x; `inputs` itself is not changed."""


class SelectedLeaves:
  """A traversal made of one decision on all leaves: subclasses say which paths they take."""

  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Returns the '/'-joined paths of the selected leaves of `inputs`."""
    raise NotImplementedError

  def iterate(self, inputs: PyTree) -> Iterator[Any]:
    """Yields the selected leaves in the order in which JAX flattens `inputs`."""
    selected = self.paths(inputs)
    return (leaf for path, leaf in tree_utils.named_leaves(inputs) if path in selected)

  def update(self, fn: Callable[[Any], Any], inputs: PyTree) -> PyTree:
    """Returns a tree like `inputs` with `fn(leaf)` in the place of each selected leaf."""
    selected = self.paths(inputs)
    return tree_utils.map_with_names(lambda path, leaf: fn(leaf) if path in selected else leaf, inputs)


@dataclasses.dataclass(frozen=True)
class ModelParamTraversal(SelectedLeaves):
  """The parameters that a predicate accepts; takes what Flax's class of this name takes.

  Attributes:
    filter_fn: from (path of a parameter with a leading slash, such as '/encoder/mlp/wi/kernel'; its value) to bool.
      While the optimizer is set up the value may be a `jax.ShapeDtypeStruct` or a tracer: look at shape and dtype only.

  >>> import numpy as np
  >>> vectors = ModelParamTraversal(lambda path, value: value.ndim == 1)
  >>> list(vectors.iterate({'norm': {'scale': np.ones(3)}, 'kernel': np.ones([3, 2])}))
  [array([1., 1., 1.])]
  """

  filter_fn: Callable[[str, Any], bool]

  def __post_init__(self):
    if not callable(self.filter_fn):
      raise ConfigError(
          f'ModelParamTraversal takes a function of a path and a value, got {self.filter_fn!r}; to select by a regular '
          'expression use optimizers.PathTraversal.')

  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Returns the '/'-joined paths of the selected leaves of `inputs`."""
    return frozenset(path for path, leaf in tree_utils.named_leaves(inputs) if self.filter_fn(f'/{path}', leaf))


@dataclasses.dataclass(frozen=True)
class PathTraversal(SelectedLeaves):
  """The parameters whose path some regular expression matches.

  An expression may match anywhere in the path, which has no leading slash: 'encoder/layers_0/mlp/wi/kernel'.

  Attributes:
    patterns: one regular expression or several, of which one must match.
    exclude: expressions none of which may match.

  >>> traversal = PathTraversal('/kernel$', exclude='^decoder/')
  >>> list(traversal.iterate({'encoder': {'kernel': 1, 'scale': 2}, 'decoder': {'kernel': 3}}))
  [1]
  """

  patterns: str | Sequence[str]
  exclude: str | Sequence[str] = ()

  def __post_init__(self):
    for name in ('patterns', 'exclude'):
      value = getattr(self, name)
      patterns = (value,) if isinstance(value, str) else value
      if not isinstance(patterns, (list, tuple)) or (name == 'patterns' and not patterns):
        raise ConfigError(
            f'PathTraversal: {name} is {value!r}; expected a regular expression or a sequence of them.')
      for pattern in patterns:
        try:
          re.compile(pattern)
        except (re.error, TypeError) as error:
          raise ConfigError(f'PathTraversal: {pattern!r} in {name} is not a regular expression: {error}.') from error
      # A frozen dataclass sets its normal form this way.
      object.__setattr__(self, name, tuple(patterns))

  def __repr__(self) -> str:
    exclude = f', exclude={list(self.exclude)}' if self.exclude else ''
    return f'PathTraversal({list(self.patterns)}{exclude})'

  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Returns the '/'-joined paths of the selected leaves of `inputs`."""
    return frozenset(
        path for path, _ in tree_utils.named_leaves(inputs)
        if _matches_any(self.patterns, path) and not _matches_any(self.exclude, path))


def as_traversal(selection: Any, where: str) -> Traversal:
  """Returns what a user gave for a traversal as one.

  Args:
    selection: a traversal, a regular expression of paths, or a sequence of such expressions.
    where: what it belongs to, for the error message.

  Raises:
    ConfigError: it is something else.
  """
  if isinstance(selection, str) or (isinstance(selection, (list, tuple)) and not isinstance(selection, Traversal)):
    return PathTraversal(selection)
  if isinstance(selection, type) or not isinstance(selection, Traversal):
    hint = ' Wrap a predicate in optimizers.ModelParamTraversal.' if callable(selection) else ''
    raise ConfigError(
        f'{where}: {selection!r} selects no parameters; expected a traversal with iterate(tree) and update(fn, tree), '
        f'or one or several regular expressions of parameter paths.{hint}')
  return selection


def selected_paths(traversal: Traversal, params: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the '/'-joined paths of the leaves that `traversal` selects, in the order in which JAX flattens `params`.

  Args:
    traversal: any traversal.
    params: nested plain dicts; the leaves may be arrays, tracers or `jax.ShapeDtypeStruct`s.

  Raises:
    ConfigError: the traversal does not give back a tree with the leaves of `params`.
  """
  chosen = object()
  try:
    marked = traversal.update(lambda focus: jax.tree.map(lambda _: chosen, focus), params)
  except LookupError as error:
    raise ConfigError(
        f'The traversal {traversal!r} asks for {error}, which the parameters do not have; they begin with '
        f'{sorted(params)}.') from error
  marks = dict(tree_utils.named_leaves(marked, is_leaf=lambda node: node is chosen))
  paths = [path for path, _ in tree_utils.named_leaves(params)]
  if sorted(marks) != sorted(paths):
    raise ConfigError(
        f'The traversal {type(traversal).__name__} gave back a tree of {len(marks)} leaves for one of {len(paths)}; '
        'its update(fn, tree) must return the tree with fn(x) in the place of each selected x, and nothing else '
        'changed.')
  return tuple(path for path in paths if marks[path] is chosen)


def _matches_any(patterns: Iterable[str], path: str) -> bool:
  return any(re.search(pattern, path) for pattern in patterns)

