"""The table of state classes knows every class of optax, and no other."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from t5x_lite import optimizers
from t5x_lite.optimizers.axes.rules_optax import OPTAX_STATES
from tests.optimizers.axes import partition_samples as samples

# --- Every class of optax -------------------------------------------------------------------------------------------

# Classes of optax that look like states, each with the reason why it is not one.
_NO_STATES = {
  'optax._src.base.GradientTransformation': 'a pair of functions',
  'optax._src.base.GradientTransformationExtraArgs': 'a pair of functions',
  'optax._src.factorized._UpdateResult': 'only within an update',
  'optax.contrib._complex_valued.SplitRealAndImaginaryArrays': 'replaces one parameter in a tree',
  'optax.contrib._galore.GaLoreDimensionNumbers': 'an option',
  'optax.contrib._muon.MuonDimensionNumbers': 'an option',
  'optax.experimental._aggregating.Aggregator': 'a pair of functions',
  'optax.microbatching._microbatching.Accumulator': 'a set of functions',
  'optax.microbatching._microbatching.Aux': 'the results of a function over micro-batches',
  'optax.transforms._masking.MaskedNode': 'replaces parameters in a tree; kept unchanged',
  'optax.tree_utils._state_utils.NamedTupleKey': 'a key of a path',
  'optax.tree_utils._state_utils._ParamsPlaceholder': 'replaces the parameters during a search in a state',
}
# States within an update, and one of older releases.
_NOT_MADE_BY_INIT = {
  'BacktrackingLineSearchState',
  'InjectHyperparamsState',
  'LookaheadParams',
  'ZoomLinesearchState',
}


def _without_rule(classes: dict[str, type]) -> list[str]:
  has_rule = optimizers.OptaxStatePartitionRules.has_rule
  return sorted(
    name for name, value in classes.items() if not has_rule(value) and name not in _NO_STATES
  )


def test_every_state_class_of_optax_has_a_rule():
  classes = samples.optax_classes()
  assert len(classes) > 60
  missing = _without_rule(classes)
  assert not missing, f'classes of optax {optax.__version__} without a partition rule: {missing}'
  assert not samples.local_classes()
  assert set(_NO_STATES) <= set(classes)
  # Nothing is both a state and none.
  assert not [
    name for name in _NO_STATES if optimizers.OptaxStatePartitionRules.has_rule(classes[name])
  ]


def test_a_new_class_would_be_named():

  class NewState(NamedTuple):
    count: Any

  @dataclasses.dataclass
  class NewDataclass:
    count: Any

  class NewNode:
    def tree_flatten(self):
      return (), None

  for new in (NewState, NewDataclass, NewNode):
    assert samples.is_state_like(new)
    assert _without_rule({f'optax.later.{new.__name__}': new}) == [f'optax.later.{new.__name__}']
  assert not samples.is_state_like(optax.MultiSteps)


def test_the_samples_are_of_every_class_that_has_a_rule():
  met = set()
  for tx in samples.SAMPLES.values():
    met |= samples.classes_in(jax.eval_shape(tx.init, samples.SHAPES))
  assert set(OPTAX_STATES) - {state_class.__name__ for state_class in met} == _NOT_MADE_BY_INIT


def test_no_row_of_the_table_is_stale():
  classes = [value for name, value in samples.optax_classes().items() if name not in _NO_STATES]
  # A row is found by the name of the class.
  names = [state_class.__name__ for state_class in classes]
  assert sorted(names) == sorted(OPTAX_STATES)
