"""Choice of the arrays whose updates Muon orthogonalizes; AdamW updates all others."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import logging
import re
from typing import Any

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.formatting import first_names
from t5x_lite.optimizers.axes.units import Units
from t5x_lite.optimizers.axes.units import UnitsByPath
from t5x_lite.types import LogicalAxes, PyTree

OWNER = 'muon'
# Value of the option `matrices`: every array of two dims, as in optax.
TWO_DIMS = 'two_dims'
# Labels of the parts of the state.
MUON = 'muon'
ADAM = 'adam'
# Logical axes of dims whose indices are looked up, as in embeddings, or number classes, as in logits and routers. A
# matrix with such a dim is a list of vectors, and not a map between spaces of activations.
_LISTED_AXES = frozenset(('vocab', 'relpos_buckets', 'abspos_buckets', 'length', 'unmodeled'))
# Names of the momenta and of AdamW's moments in a state dict.
_MOMENTS = re.compile(rf'.*/inner_states/(?P<label>{MUON}|{ADAM})/inner_state/0/mu/(?P<path>.+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixChoice:
  """The arrays with orthogonalized updates, and their units.

  Attributes:
    rules: pairs (regular expression, bool); the first expression that is found in an array's path decides.
    units: units of the parameters.
  """

  rules: tuple[tuple[str, bool], ...]
  units: UnitsByPath
  # Texts that were logged; states are made, or traced, several times.
  _logged: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

  @classmethod
  def of(cls, matrices: Any, axes: LogicalAxes | None, logged: set[str]) -> 'MatrixChoice':
    """Return the choice for the option `matrices`.

    Args:
      matrices: see `optimizers.muon`.
      axes: `PartitionSpec` of logical names for each parameter; None if they are unknown.
      logged: texts that were logged.
    """
    if matrices == TWO_DIMS:
      return cls(rules=(), units=UnitsByPath(), _logged=logged)
    return cls(rules=tuple(map(tuple, matrices)), units=UnitsByPath(axes), _logged=logged)

  def label_of(self, path: str, array: Any) -> str:
    """Return `MUON` or `ADAM` for the array, or object with a shape, at a '/'-joined path."""
    _, is_matrix = self._rule_of(path) or ('', _is_kernel(self.units.of(path, array)))
    return MUON if is_matrix else ADAM

  def labels(self, params: PyTree) -> PyTree:
    """Return a tree like the parameters with the label of each array."""
    return tree_utils.map_with_names(self.label_of, params)

  def check(self, params: PyTree) -> None:
    """Raise if a rule has no effect or chooses an array that is not a matrix; log the choice once.

    Args:
      params: the parameters, with a subtree per layer.

    Raises:
      ConfigError: names the rule.
    """
    named = list(tree_utils.named_leaves(params))
    invalid = functools.partial(checks.invalid, OWNER, 'matrices')
    used = {self._rule_of(path) for path, _ in named}
    for rule in self.rules:
      if named and rule not in used:
        raise invalid(
          f'expressions of which each is the first match of a parameter such as {named[0][0]!r}',
          rule,
          'Correct it, move it up, or remove it.',
        )
    chosen = [each for each in named if self.label_of(*each) == MUON]
    for path, array in chosen:
      shape = self.units.of(path, array).unit_shape
      if len(shape) != 2:
        raise invalid(
          f'False for {path!r}, which consists of arrays of the shape {list(shape)}, and not of matrices',
          self._rule_of(path),
          "Correct the expression, or name the dims that number layers or experts: 'layers', 'expert'.",
        )
    share = tree_utils.num_elements(dict(chosen)) / max(tree_utils.num_elements(params), 1)
    names = ''
    if chosen:
      names = f' ({first_names([path for path, _ in chosen])})'
    text = (
      f'Muon orthogonalizes the updates of {len(chosen)} arrays{names} with {share:.1%} of the parameters; AdamW '
      f'updates {len(named) - len(chosen)} arrays.'
    )
    if text not in self._logged:
      self._logged.add(text)
      logging.getLogger(__name__).info(text)

  def _rule_of(self, path: str) -> tuple[str, bool] | None:
    # Stacked layers have equal labels, see `OptimizerDef.stacking_key`.
    first = layer_stacks.paths_of(path)[0]
    return next((rule for rule in self.rules if re.search(rule[0], first)), None)


def _is_kernel(units: Units) -> bool:
  """Return True if the units are matrices between spaces of activations."""
  return len(units.unit_shape) == 2 and _LISTED_AXES.isdisjoint(units.unit_axes)


def restore_remedy(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
  """Return how to resume a run whose choice of arrays differs, a sentence, or None if it does not.

  Args:
    stored: arrays of the checkpoint or their shapes, by name.
    wanted: arrays of the state of this run, by name.
  """
  before = _labels_by_path(stored)
  now = _labels_by_path(wanted)
  if all(now.get(path, label) == label for path, label in before.items()):
    return None
  remedy = f'Set `{OWNER}.matrices` as before'
  has_two_dims = {path for path in before if len(stored[f'target/{path}'].shape) == 2}
  if has_two_dims == {path for path, label in before.items() if label == MUON}:
    remedy = f"Set `{OWNER}.matrices` to '{TWO_DIMS}', which chooses them"
  return (
    f'Muon had other arrays. {remedy}, or start a new run from the parameters in another MODEL_DIR.'
  )


def _labels_by_path(names: Iterable[str]) -> dict[str, str]:
  """Return the label of each parameter with a momentum or AdamW's first moment among the names."""
  matches = filter(None, map(_MOMENTS.fullmatch, names))
  return {match['path']: match['label'] for match in matches}
