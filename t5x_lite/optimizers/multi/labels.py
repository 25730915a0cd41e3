"""Optimizers by label: every parameter has one label, every label its optimizer, as in `optax.partition`."""

from collections.abc import Hashable, Mapping
import dataclasses
import re
from typing import Any

from t5x_lite import checks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.base import definition
from t5x_lite.optimizers.multi import optimizer, traversals
from t5x_lite.types import PyTree

_NO_LABEL = object()


@checks.checks_arguments('partition')
def partition(
    transforms: Mapping[Hashable, definition.OptimizerDef | None], param_labels: Any) -> optimizer.MultiOptimizer:
  """Returns a `MultiOptimizer` whose parts are chosen by a label of each parameter, as in `optax.partition`.

  Args:
    transforms: label to optimizer; None keeps the parameters of that label as they are. The labels name the parts.
    param_labels: a tree of labels like the parameters, of which a label may stand for a whole subtree; or a function
      from the parameters (nested dicts) to such a tree; or a list of (regular expression, label), of which the first
      that matches anywhere in a parameter's path decides.

  Raises:
    ConfigError: not a mapping to optimizers, or pairs that are none. Labels without an optimizer show when the state is
      made.

  >>> from t5x_lite.optimizers import Adafactor
  >>> optimizer_def = partition(
  ...     {'matrix': Adafactor(), 'vector': Adafactor(factored=False, beta1=0.9), 'frozen': None},
  ...     [('^encoder/', 'frozen'), ('scale$', 'vector'), ('.*', 'matrix')])
  >>> optimizer_def.part_names
  ('matrix', 'vector')
  """
  if not isinstance(transforms, Mapping) or not transforms:
    raise ConfigError(f'partition: transforms is {transforms!r}; expected a mapping from label to optimizer.')
  if isinstance(param_labels, (list, tuple)):
    for entry in param_labels:
      if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        raise ConfigError(f'partition: param_labels holds {entry!r}; expected (regular expression, label) pairs.')
      traversals.PathTraversal(entry[0])  # refuses what is no regular expression
      if entry[1] not in transforms:
        raise ConfigError(
            f'partition: param_labels gives the label {entry[1]!r}, for which transforms has no optimizer.'
            f'{did_you_mean(str(entry[1]), [str(label) for label in transforms])}')
  known = tuple(transforms)
  pairs, names = [], []
  for label, optimizer_def in transforms.items():
    if optimizer_def is not None:
      pairs.append((LabelTraversal(param_labels, label, known), optimizer_def))
      names.append(str(label))
  if not pairs:
    raise ConfigError('partition: transforms has an optimizer for no label, so nothing would be trained.')
  return optimizer.MultiOptimizer(pairs, part_names=names)


@dataclasses.dataclass(frozen=True, eq=False)
class LabelTraversal(traversals.SelectedLeaves):
  """The parameters that carry a label.

  Attributes:
    param_labels: see `labels_by_path`.
    label: the label to select.
    known_labels: every label that may occur; another one is an error.
  """

  param_labels: Any
  label: Hashable
  known_labels: tuple[Hashable, ...]

  def __repr__(self) -> str:
    return f'label {self.label!r}'

  def paths(self, inputs: PyTree) -> frozenset[str]:
    """Returns the '/'-joined paths of the selected leaves of `inputs`."""
    labels = labels_by_path(self.param_labels, inputs)
    for path, label in labels.items():
      if label not in self.known_labels:
        raise ConfigError(
            f'The parameter {path!r} has the label {label!r}, for which there is no optimizer.'
            f'{did_you_mean(str(label), [str(known) for known in self.known_labels])} Give each label one, or None to '
            'keep its parameters as they are.')
    return frozenset(path for path, label in labels.items() if label == self.label)


def labels_by_path(param_labels: Any, params: PyTree) -> dict[str, Hashable]:
  """Returns the label of each parameter by its '/'-joined path.

  Args:
    param_labels: a tree of labels like the parameters, of which a label may stand for a whole subtree; or a function
      from the parameters to such a tree; or a sequence of (regular expression, label), of which the first that matches
      anywhere in the path decides.
    params: the parameters.

  Raises:
    ConfigError: a parameter without a label.
  """
  if isinstance(param_labels, (list, tuple)):
    rules = param_labels

    def label_of(path):
      return next((label for pattern, label in rules if re.search(pattern, path)), _NO_LABEL)
  else:
    tree = param_labels(params) if callable(param_labels) else param_labels
    labels = dict(tree_utils.named_leaves(tree))

    def label_of(path):
      prefixes = [path, *(path[:i] for i in range(len(path) - 1, 0, -1) if path[i] == '/'), '']
      return next((labels[prefix] for prefix in prefixes if prefix in labels), _NO_LABEL)

  found = {path: label_of(path) for path, _ in tree_utils.named_leaves(params)}
  for path, label in found.items():
    if label is _NO_LABEL:
      raise ConfigError(
          f'param_labels gives the parameter {path!r} no label; every parameter needs one (the last of a list of '
          "(regular expression, label) pairs may be '.*').")
  return found
