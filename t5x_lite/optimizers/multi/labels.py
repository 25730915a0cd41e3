"""Optimizers by label: each parameter has a label and each label an optimizer, as in `optax.partition`."""

from collections.abc import Hashable, Mapping, Sequence
import dataclasses
import re
from typing import Any

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.multi import optimizer
from t5x_lite.optimizers.multi import traversals
from t5x_lite.types import PyTree

_NO_LABEL = object()
_TRANSFORMS = checks.Expectation(
  'a mapping from label to optimizer, not all of them None',
  lambda transforms: (
    isinstance(transforms, Mapping) and any(each is not None for each in transforms.values())
  ),
)


@checks.checks_arguments('partition')
def partition(
  transforms: Mapping[Hashable, definition.OptimizerDef | None], param_labels: Any
) -> optimizer.MultiOptimizer:
  """Return a `MultiOptimizer` whose parts are chosen by a label of each parameter, as in `optax.partition`.

  Args:
    transforms: label to optimizer; None freezes the parameters with this label. The labels are the parts' names.
    param_labels: tree of labels like the parameters, where one label may replace a subtree; or a function from the
      parameters (nested dicts) to such a tree; or a list of pairs (regular expression, label), of which the first that
      matches in a parameter's path applies.

  Raises:
    ConfigError: no optimizer, or an invalid regular expression. Labels without an optimizer are found when the state is
      made.

  >>> from t5x_lite.optimizers import Adafactor
  >>> optimizer_def = partition(
  ...     {'matrix': Adafactor(), 'vector': Adafactor(factored=False, beta1=0.9), 'frozen': None},
  ...     [('^encoder/', 'frozen'), ('scale$', 'vector'), ('.*', 'matrix')])
  >>> optimizer_def.part_names
  ('matrix', 'vector')
  """
  checks.check('partition', {'transforms': transforms}, transforms=_TRANSFORMS)
  if isinstance(param_labels, (list, tuple)):
    traversals.PathTraversal([pattern for pattern, _ in param_labels])  # checks the expressions
  known = tuple(transforms)
  pairs = []
  names = []
  for label, optimizer_def in transforms.items():
    if optimizer_def is not None:
      pairs.append((LabelTraversal(param_labels, label, known), optimizer_def))
      names.append(str(label))
  return optimizer.MultiOptimizer(pairs, part_names=names)


@dataclasses.dataclass(frozen=True, eq=False)
class LabelTraversal(traversals.SelectedLeaves):
  """Selection of the parameters with a label.

  Attributes:
    param_labels: see `labels_by_path`.
    label: the label to select.
    known_labels: all labels that have an entry in `transforms`.
  """

  param_labels: Any
  label: Hashable
  known_labels: tuple[Hashable, ...]

  def __repr__(self) -> str:
    return f'label {self.label!r}'

  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Return the '/'-joined paths of the selected leaves of `inputs`."""
    labels = labels_by_path(self.param_labels, inputs)
    for path, label in labels.items():
      if label not in self.known_labels:
        if label is _NO_LABEL:
          found = 'no label'
        else:
          found = f'the label {label!r}, which transforms does not have'
        raise ConfigError(
          f'partition: the parameter {path!r} has {found}.'
          f'{did_you_mean(str(label), [str(known) for known in self.known_labels])} Add the label to param_labels or '
          'transforms, with None to freeze its parameters.'
        )
    return frozenset(path for path, label in labels.items() if label == self.label)


def labels_by_path(param_labels: Any, params: PyTree) -> dict[str, Hashable]:
  """Return the label of each parameter by its '/'-joined path.

  Args:
    param_labels: see `partition`.
    params: the parameters.

  Returns:
    Labels; `_NO_LABEL` for a parameter without one.
  """
  paths = [path for path, _ in tree_utils.named_leaves(params)]
  if isinstance(param_labels, (list, tuple)):
    return {path: _label_by_patterns(param_labels, path) for path in paths}
  if callable(param_labels):
    tree = param_labels(params)
  else:
    tree = param_labels
  labels = dict(tree_utils.named_leaves(tree))
  return {path: _label_of_parent(labels, path) for path in paths}


def _label_by_patterns(rules: Sequence[tuple[str, Hashable]], path: str) -> Hashable:
  """Return the label of the first regular expression that matches a part of the path."""
  for pattern, label in rules:
    if re.search(pattern, path):
      return label
  return _NO_LABEL


def _label_of_parent(labels: Mapping[str, Hashable], path: str) -> Hashable:
  """Return the label of the path, or of its closest parent with one."""
  while path and path not in labels:
    path = path.rpartition('/')[0]
  return labels.get(path, _NO_LABEL)
