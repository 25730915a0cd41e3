"""Traversals: selections of the parameters that a part of a `MultiOptimizer` trains.

A traversal selects some leaves of a tree. The protocol is that of `flax.traverse_util.Traversal`, whose deprecated
classes are supported; the classes of this module need no base class and give no warnings.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any, Protocol, runtime_checkable

import jax

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.types import PyTree


@runtime_checkable
class Traversal(Protocol):
  """Selection of leaves, or of entire subtrees, of nested dicts."""

  def iterate(self, inputs: PyTree) -> Iterator[Any]:
    """Yield the selected leaves or subtrees of `inputs`."""
    ...

  def update(self, fn: Callable[[Any], Any], inputs: PyTree) -> PyTree:
    """Return a copy of `inputs` with each selected x replaced by `fn(x)`."""
    ...


class SelectedLeaves(abc.ABC):
  """Base of traversals that select leaves by their path or value."""

  @abc.abstractmethod
  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Return the '/'-joined paths of the selected leaves of `inputs`."""

  def iterate(self, inputs: PyTree) -> Iterator[Any]:
    """Yield the selected leaves in the order in which JAX flattens `inputs`."""
    selected = self.paths(inputs)
    return (leaf for path, leaf in tree_utils.named_leaves(inputs) if path in selected)

  def update(self, fn: Callable[[Any], Any], inputs: PyTree) -> PyTree:
    """Return a tree like `inputs` with each selected leaf replaced by `fn(leaf)`."""
    selected = self.paths(inputs)

    def replaced(path, leaf):
      if path in selected:
        return fn(leaf)
      return leaf

    return tree_utils.map_with_names(replaced, inputs)


@dataclasses.dataclass(frozen=True)
class ModelParamTraversal(SelectedLeaves):
  """Selection of the parameters that a predicate accepts, with the arguments of Flax's class of this name.

  Attributes:
    filter_fn: function from (path of a parameter with a leading slash, such as '/encoder/mlp/wi/kernel'; its value) to
      bool. The value may be a `jax.ShapeDtypeStruct` or a tracer, so only its shape and dtype may be read.

  >>> import numpy as np
  >>> vectors = ModelParamTraversal(lambda path, value: value.ndim == 1)
  >>> list(vectors.iterate({'norm': {'scale': np.ones(3)}, 'kernel': np.ones([3, 2])}))
  [array([1., 1., 1.])]
  """

  filter_fn: Callable[[str, Any], bool]

  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Return the '/'-joined paths of the selected leaves of `inputs`."""
    return frozenset(
      path for path, leaf in tree_utils.named_leaves(inputs) if self.filter_fn(f'/{path}', leaf)
    )


@dataclasses.dataclass(frozen=True)
class PathTraversal(SelectedLeaves):
  """Selection of the parameters whose path matches a regular expression.

  Expressions are searched in the path without a leading slash, 'encoder/layers_0/mlp/wi/kernel'.

  Attributes:
    patterns: one or several regular expressions, at least one of which must match.
    exclude: expressions that must not match.

  >>> traversal = PathTraversal('/kernel$', exclude='^decoder/')
  >>> list(traversal.iterate({'encoder': {'kernel': 1, 'scale': 2}, 'decoder': {'kernel': 3}}))
  [1]
  """

  patterns: str | Sequence[str]
  exclude: str | Sequence[str] = ()

  def __post_init__(self):
    for name in ('patterns', 'exclude'):
      patterns = getattr(self, name)
      if isinstance(patterns, str):
        patterns = (patterns,)
      for pattern in patterns:
        try:
          re.compile(pattern)
        except (re.error, TypeError) as error:
          raise checks.invalid(
            'PathTraversal', name, f'regular expressions ({error})', pattern
          ) from error
      object.__setattr__(self, name, tuple(patterns))

  def __repr__(self) -> str:
    if self.exclude:
      exclude = f', exclude={list(self.exclude)}'
    else:
      exclude = ''
    return f'PathTraversal({list(self.patterns)}{exclude})'

  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Return the '/'-joined paths of the selected leaves of `inputs`."""
    return frozenset(
      path
      for path, _ in tree_utils.named_leaves(inputs)
      if _matches_any(self.patterns, path) and not _matches_any(self.exclude, path)
    )


def as_traversal(selection: Any, where: str) -> Traversal:
  """Return a selection as a traversal.

  Args:
    selection: a traversal, a regular expression of paths, or a list of such expressions.
    where: argument of `MultiOptimizer`, for the error message.

  Raises:
    ConfigError: another value.
  """
  if isinstance(selection, str) or (
    isinstance(selection, (list, tuple)) and not isinstance(selection, Traversal)
  ):
    return PathTraversal(selection)
  if isinstance(selection, type) or not isinstance(selection, Traversal):
    remedy = ''
    if callable(selection):
      remedy = 'Wrap a predicate in optimizers.ModelParamTraversal.'
    raise checks.invalid(
      'MultiOptimizer',
      where,
      'a traversal, a regular expression of parameter paths, or a list of these',
      selection,
      remedy,
    )
  return selection


def selected_paths(traversal: Traversal, params: Mapping[str, Any]) -> tuple[str, ...]:
  """Return the '/'-joined paths of the leaves that `traversal` selects, in the order in which JAX flattens `params`.

  Args:
    traversal: any traversal.
    params: nested plain dicts; the leaves may be arrays, tracers or `jax.ShapeDtypeStruct`s.

  Raises:
    ConfigError: the traversal does not return a tree with the leaves of `params`.
  """
  chosen = object()
  marked = traversal.update(lambda focus: jax.tree.map(lambda _: chosen, focus), params)
  marks = dict(tree_utils.named_leaves(marked, is_leaf=lambda node: node is chosen))
  paths = [path for path, _ in tree_utils.named_leaves(params)]
  if sorted(marks) != sorted(paths):
    raise ConfigError(
      f'The traversal {type(traversal).__name__} returned a tree of {len(marks)} leaves for one of {len(paths)}. '
      'Its update(fn, tree) must return the tree with each selected x replaced by fn(x), without other changes.'
    )
  return tuple(path for path in paths if marks[path] is chosen)


def _matches_any(patterns: Iterable[str], path: str) -> bool:
  return any(re.search(pattern, path) for pattern in patterns)
