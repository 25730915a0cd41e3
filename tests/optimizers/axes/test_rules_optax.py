"""The samples have states of every class of optax, and the table of rules has no other class."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from optax import contrib
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError
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


_AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}, 'scale': P()}
_PARAMS = {'dense': {'kernel': jnp.ones([4, 6]), 'bias': jnp.ones([6])}, 'scale': jnp.float32(1.5)}
_STACKED = P('embed', 'layers', 'mlp')
_derive = optimizers.OptaxStatePartitionRules.derive_optax_logical_axes


def _derive_tx(tx, params=None, axes=None):
  params = _PARAMS if params is None else params
  return _derive(jax.eval_shape(tx.init, params), _AXES if axes is None else axes, params)


# --- Axes, by hand --------------------------------------------------------------------------------------------------


def _factored(shape, axes, **options):
  tx = optax.scale_by_factored_rms(**{'min_dim_size_to_factor': 4, **options})
  params = {'w': jax.ShapeDtypeStruct(shape, jnp.float32)}
  state = jax.eval_shape(tx.init, params)
  derived = _derive(state, {'w': axes}, params)
  # One update leaves everything where it is.
  _, state = jax.eval_shape(tx.update, params, state, params)
  assert _derive(state, {'w': axes}, params) == derived
  return derived.v_row['w'], derived.v_col['w'], derived.v['w']


def test_axes_of_optax_adafactor():
  # v_row lacks the largest dim, v_col the second largest; all others stay.
  assert _factored([8, 16], P('embed', 'mlp')) == (P('embed'), P('mlp'), P(None))
  assert _factored([16, 8], P('vocab', 'embed')) == (P('embed'), P('vocab'), P(None))
  assert _factored([16, 3, 8], _STACKED) == (P('layers', 'mlp'), P('embed', 'layers'), P(None))
  assert _factored([4, 8, 16], P('expert', 'embed', 'expert_mlp')) == (
    P('expert', 'embed'),
    P('expert', 'expert_mlp'),
    P(None),
  )
  # Too small, too few dims, no factoring: the statistics are a copy of the parameter.
  assert _factored([3, 16], P('layers', 'embed')) == (P(None), P(None), P('layers', 'embed'))
  assert _factored([16], P('embed')) == (P(None), P(None), P('embed'))
  assert _factored([1], P('embed')) == (P(None), P(None), P('embed'))
  assert _factored([], P()) == (P(None), P(None), P())
  assert _factored([8, 16], P('embed', 'mlp'), factored=False) == (
    P(None),
    P(None),
    P('embed', 'mlp'),
  )
  assert _factored([8, 16], P('embed', 'mlp'), min_dim_size_to_factor=9) == (
    P(None),
    P(None),
    P('embed', 'mlp'),
  )
  assert _factored([0, 16], P('length', 'embed')) == (P(None), P(None), P('length', 'embed'))


def test_axes_of_optax_adafactor_with_dims_of_one_size():
  """Which of two equal dims is summed over is seen by gradients that differ along one dim at a time."""
  shapes = [(8, 8), (8, 8, 8), (4, 8, 8), (8, 4, 8), (8, 8, 4), (4, 4, 4, 4), (1, 1), (1, 8)]
  names = [f'dim{dim}' for dim in range(4)]
  tx = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
  params = [jnp.zeros(shape) for shape in shapes]
  state = tx.init(params)
  axes = _derive(state, [P(*names[: len(shape)]) for shape in shapes], params)
  update = jax.jit(tx.update)
  # The (field, parameter, place of a dim in the statistic, name of the dim) that are so.
  found, expected = set(), set()
  for dim, name in enumerate(names):
    grads = [
      np.ones(shape, np.float32) + (np.indices(shape)[dim] if dim < len(shape) else 0)
      for shape in shapes
    ]
    _, updated = update(grads, state, params)
    for field in ('v_row', 'v_col'):
      for index, statistic in enumerate(getattr(updated, field)):
        for place in range(statistic.ndim):
          if np.ptp(np.asarray(statistic), axis=place).max() > 1e-3:
            found.add((field, index, place, name))
  for field in ('v_row', 'v_col'):
    for index, spec in enumerate(getattr(axes, field)):
      expected |= {
        (field, index, place, name)
        for place, name in enumerate(spec)
        if shapes[index][names.index(name)] > 1
      }
  assert found == expected


def test_axes_of_sm3_novograd_and_lbfgs():
  sm3 = _derive_tx(optax.scale_by_sm3())
  assert (
    sm3.mu == {'dense': {'kernel': [P('embed'), P('mlp')], 'bias': [P('mlp')]}, 'scale': []}
    and sm3.nu == _AXES
  )
  novograd = _derive_tx(optax.scale_by_novograd())
  assert novograd.mu == _AXES and novograd.nu == jax.tree.map(lambda _: P(), _AXES)
  ldog = _derive_tx(optax.scale_by_distance_over_gradients())
  assert ldog.init_params == _AXES and ldog.grad_sum_of_squares == jax.tree.map(
    lambda _: P(None), _AXES
  )
  lbfgs = _derive_tx(optax.scale_by_lbfgs(3))
  assert lbfgs.diff_params_memory['dense'] == {
    'kernel': P(None, 'embed', 'mlp'),
    'bias': P(None, 'mlp'),
  }
  assert (
    lbfgs.diff_updates_memory['scale'] == P(None)
    and lbfgs.weights_memory == P(None)
    and lbfgs.params == _AXES
  )


def _galore(shape, axes, dim_nums=None, rank=2, **options):
  tx = contrib.scale_by_galore(
    rank=rank,
    weight_dimension_numbers=None if dim_nums is None else (lambda _: {'w': dim_nums}),
    **options,
  )
  params = {'w': jax.ShapeDtypeStruct(shape, jnp.float32)}
  state = jax.eval_shape(tx.init, params)
  derived = _derive(state, {'w': axes}, params)
  assert [len(spec) for spec in jax.tree.leaves(derived)] == [
    leaf.ndim for leaf in jax.tree.leaves(state)
  ]
  return derived.projector['w'], derived.base_optimizer_state.mu['w']


def test_axes_of_galore():
  numbers = contrib.GaLoreDimensionNumbers
  # Projected along the longer dim, which the projector keeps; the base optimizer keeps the other.
  assert _galore([16, 8], P('vocab', 'embed')) == (P('vocab', None), P(None, 'embed'))
  assert _galore([8, 16], P('embed', 'mlp')) == (P('mlp', None), P('embed', None))
  assert _galore([8, 8], P('embed', 'joined_kv')) == (P('embed', None), P(None, 'joined_kv'))
  assert _galore([8, 16], P('embed', 'mlp'), numbers(1, 0)) == (P('mlp', None), P(None, 'embed'))
  # A square shows not which of its dims are the rows: it is read as usual.
  assert _galore([8, 8], P('embed', 'mlp'), numbers(1, 0)) == _galore([8, 8], P('embed', 'mlp'))
  # Dims that are one in the matrix have the name of the first of them.
  assert _galore([8, 4, 3], P('embed', 'heads', 'kv'), numbers(0, (1, 2))) == (
    P('heads', None),
    P('embed', None),
  )
  assert _galore([4, 3, 8], P('heads', 'kv', 'embed'), numbers((0, 1), 2)) == (
    P('heads', None),
    P(None, 'embed'),
  )
  assert _galore([1, 4, 8], P('layers', 'kv', 'embed'), numbers((0, 1), 2)) == (
    P('embed', None),
    P('kv', None),
  )
  # Interleaved: rows are the middle dim.
  assert _galore([5, 3, 7], _STACKED, numbers(1, (0, 2))) == (P('embed', None), P('layers', None))
  # Not projected.
  assert _galore([8, 4, 3], P('embed', 'heads', 'kv')) == (P(None, None), P('embed', 'heads', 'kv'))
  assert _galore([8], P('embed')) == (P(None, None), P('embed'))
  assert _galore([0, 8], P('length', 'embed')) == (P('embed', None), P(None, None))
  # A matrix without rows or columns has the projector of an unprojected parameter; the moments differ.
  assert _galore([0, 4, 0], P('length', 'heads', 'kv'), numbers(0, (1, 2))) == (
    P(None, None),
    P(None, 'heads'),
  )
  # A rank as large as the matrix.
  assert _galore([4, 8], P('embed', 'mlp'), rank=100) == (P('mlp', None), P('embed', None))


def test_without_the_parameters_most_states_have_axes_and_the_others_raise():
  assert _derive(optax.adam(0.1).init(_PARAMS), _AXES)[0].mu == _AXES
  assert _derive(optax.scale_by_lbfgs(2).init(_PARAMS), _AXES).updates == _AXES
  assert _derive(optax.scale_by_sm3().init(_PARAMS), _AXES).mu['dense']['bias'] == [P('mlp')]
  for tx in (
    optax.scale_by_factored_rms(),
    contrib.galore(0.1),
    contrib.split_real_and_imaginary(optax.adam(0.1)),
  ):
    with pytest.raises(
      ConfigError, match='depend on the shapes of the parameters. Pass the parameters'
    ):
      _derive(tx.init(_PARAMS), _AXES)


@pytest.mark.parametrize(
  'make,name',
  [
    (lambda: optax.adafactor(0.1, min_dim_size_to_factor=2), 'FactoredState'),
    (lambda: optax.contrib.galore(0.1, rank=2), 'GaLoreState'),
    (
      lambda: optax.contrib.split_real_and_imaginary(optax.sgd(0.1, 0.9)),
      'SplitRealAndImaginaryState',
    ),
  ],
)
def test_states_that_need_the_shapes_of_the_parameters_raise_without(make, name):
  params, axes = {'w': jnp.ones([4, 6])}, {'w': P('embed', 'mlp')}
  state = jax.eval_shape(make().init, params)
  rules = optimizers.OptaxStatePartitionRules
  with pytest.raises(
    ConfigError,
    match=f'{name} depend on the shapes of the parameters. Pass .* as the third argument',
  ):
    rules.derive_optax_logical_axes(state, axes)
  assert jax.tree.structure(
    rules.derive_optax_logical_axes(state, axes, params)
  ) == jax.tree.structure(state)
