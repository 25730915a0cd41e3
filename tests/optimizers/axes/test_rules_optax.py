"""The samples have states of every class of optax, and the table of rules has no other class."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

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


def _without_sample(classes: dict[str, type]) -> list[str]:
  """Return the names of classes of which no sample has a state; see `test_rules` for what the samples are for."""
  met = set()
  for tx in samples.SAMPLES.values():
    met |= samples.classes_in(jax.eval_shape(tx.init, samples.SHAPES))
  without = {name: value for name, value in classes.items() if value not in met}
  return sorted(
    name
    for name, value in without.items()
    if name not in _NO_STATES and value.__name__ not in _NOT_MADE_BY_INIT
  )


def test_the_samples_are_of_every_state_class_of_optax():
  classes = samples.optax_classes()
  assert len(classes) > 60
  missing = _without_sample(classes)
  assert not missing, f'classes of optax {optax.__version__} without a sample: {missing}'
  assert not samples.local_classes()
  assert set(_NO_STATES) <= set(classes)


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
    assert _without_sample({f'optax.later.{new.__name__}': new}) == [f'optax.later.{new.__name__}']
  assert not samples.is_state_like(optax.MultiSteps)


def test_no_row_of_the_table_is_stale():
  # A row is found by the name of the class.
  names = {value.__name__: value for value in samples.optax_classes().values()}
  for name, row in OPTAX_STATES.items():
    assert name in names
    if not callable(row):
      assert set(row) <= set(names[name]._fields)
