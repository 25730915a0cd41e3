"""Logical axes of optax states: every class of optax, every kind of field, one's own classes, and what is refused."""

import dataclasses
import sys
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from optax import contrib
from optax._src import linesearch
import pytest

from t5x_lite import optimizers, tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.axes.rules_contrib import CONTRIB_STATES
from t5x_lite.optimizers.axes.rules_optax import OPTAX_STATES
from tests.core import partition_samples as samples

_AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}, 'scale': P()}
_PARAMS = {'dense': {'kernel': jnp.ones([4, 6]), 'bias': jnp.ones([6])}, 'scale': jnp.float32(1.5)}
_STACKED = P('embed', 'layers', 'mlp')

_derive = optimizers.OptaxStatePartitionRules.derive_optax_logical_axes


def _derive_tx(tx, params=None, axes=None):
  params = _PARAMS if params is None else params
  return _derive(jax.eval_shape(tx.init, params), _AXES if axes is None else axes, params)


# --- Every class of optax -------------------------------------------------------------------------------------------

# Classes of optax that look like states and are none, each with the reason.
_NO_STATES = {
    'optax._src.base.GradientTransformation': 'a pair of functions',
    'optax._src.base.GradientTransformationExtraArgs': 'a pair of functions',
    'optax._src.factorized._UpdateResult': 'lives within one update',
    'optax.contrib._complex_valued.SplitRealAndImaginaryArrays': 'stands for one parameter in a tree of them',
    'optax.contrib._galore.GaLoreDimensionNumbers': 'an option',
    'optax.contrib._muon.MuonDimensionNumbers': 'an option',
    'optax.experimental._aggregating.Aggregator': 'a pair of functions',
    'optax.microbatching._microbatching.Accumulator': 'a set of functions',
    'optax.microbatching._microbatching.Aux': 'the results of a function over micro-batches',
    'optax.transforms._masking.MaskedNode': 'stands for parameters in a tree of them; kept as it is',
    'optax.tree_utils._state_utils.NamedTupleKey': 'a key of a path',
    'optax.tree_utils._state_utils._ParamsPlaceholder': 'stands for the parameters while a state is searched for them',
}
# States that no optimizer carries from one update to the next, and one of older releases.
_NOT_MADE_BY_INIT = {
    'BacktrackingLineSearchState', 'InjectHyperparamsState', 'LookaheadParams', 'ZoomLinesearchState'}


def _without_rule(classes: dict[str, type]) -> list[str]:
  has_rule = optimizers.OptaxStatePartitionRules.has_rule
  return sorted(name for name, value in classes.items() if not has_rule(value) and name not in _NO_STATES)


def test_every_state_class_of_optax_has_a_rule():
  classes = samples.optax_classes()
  assert len(classes) > 60
  missing = _without_rule(classes)
  assert not missing, f'classes of optax {optax.__version__} without a partition rule: {missing}'
  assert not samples.local_classes()
  assert set(_NO_STATES) <= set(classes)
  # Nothing is both a state and none.
  assert not [name for name in _NO_STATES if optimizers.OptaxStatePartitionRules.has_rule(classes[name])]


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
  known = {known for known in optimizers.OptaxStatePartitionRules._RULES if known.__module__.startswith('optax')}
  assert {known.__name__ for known in known - met} == _NOT_MADE_BY_INIT


def test_no_row_of_the_tables_is_stale():
  classes = {f'{value.__module__}.{value.__qualname__}' for value in optimizers.OptaxStatePartitionRules._RULES}
  assert classes
  for table in (OPTAX_STATES, CONTRIB_STATES):
    for module, rows in table.items():
      for name in rows:
        state_class = getattr(sys.modules[module], name)
        assert f'{state_class.__module__}.{state_class.__qualname__}' in classes, name


@pytest.mark.parametrize('name', samples.SAMPLES)
def test_axes_mirror_the_state_and_name_all_that_is_large(name):
  state = jax.eval_shape(samples.SAMPLES[name].init, samples.SHAPES)
  axes = _derive(state, samples.AXES, samples.SHAPES)
  assert jax.tree.structure(axes) == jax.tree.structure(state)
  for (path, leaf), spec in zip(tree_utils.named_leaves(state), jax.tree.leaves(axes), strict=True):
    assert isinstance(spec, P) and len(spec) == leaf.ndim, path
    # Each named dim is as long as the dims of that name, or several of them that became one.
    for size, axis in zip(leaf.shape, spec):
      assert axis is None or size % max(samples.SIZES[axis], 1) == 0, path
    if leaf.size >= 16:
      assert any(spec), f'{path}: {leaf.shape} is replicated'


def _random_tree(rng):
  """Returns (shapes, axes, size by name) of parameters of any rank, with equal, empty and unnamed dims."""
  shapes, axes, sizes = {}, {}, {}
  for part in samples.AXES:
    shapes[part], axes[part] = {}, {}
    for index in range(rng.integers(1, 4)):
      shape = tuple(int(size) for size in rng.choice([0, 1, 2, 3, 4, 4, 8, 8, 16], size=rng.integers(0, 5)))
      names = [f'{part}_{index}_{dim}' for dim in range(len(shape))]
      sizes |= dict(zip(names, shape))
      shapes[part][f'p{index}'] = jax.ShapeDtypeStruct(shape, jnp.float32)
      axes[part][f'p{index}'] = P(*(name if rng.random() < 0.85 else None for name in names))
  return shapes, axes, sizes


@pytest.mark.full
@pytest.mark.parametrize('seed', range(4))
def test_axes_of_any_parameters(seed):
  shapes, axes, sizes = _random_tree(np.random.default_rng(seed))
  for sample, tx in samples.SAMPLES.items():
    state = jax.eval_shape(tx.init, shapes)
    derived = _derive(state, axes, shapes)
    assert jax.tree.structure(derived) == jax.tree.structure(state), sample
    for (path, leaf), spec in zip(tree_utils.named_leaves(state), jax.tree.leaves(derived), strict=True):
      assert len(spec) == leaf.ndim, f'{sample}: {path}'
      for size, axis in zip(leaf.shape, spec):
        assert axis is None or size == sizes[axis] or size % max(sizes[axis], 1) == 0 < sizes[axis], f'{sample}: {path}'


@pytest.mark.parametrize('name', ['adamw', 'adafactor', 'sm3', 'novograd', 'contrib.galore', 'lbfgs', 'contrib.muon'])
def test_axes_of_frozen_dicts_and_of_empty_trees(name):
  tx = samples.SAMPLES[name]
  frozen = flax.core.freeze(samples.SHAPES)
  state = jax.eval_shape(tx.init, frozen)
  axes = _derive(state, flax.core.freeze(samples.AXES), frozen)
  assert jax.tree.structure(axes) == jax.tree.structure(state)
  plain = _derive(jax.eval_shape(tx.init, samples.SHAPES), samples.AXES, samples.SHAPES)
  assert jax.tree.leaves(axes) == jax.tree.leaves(plain)
  # Names decide, not the type of the dicts.
  assert jax.tree.leaves(_derive(state, samples.AXES, samples.SHAPES)) == jax.tree.leaves(plain)
  if name != 'lbfgs':  # Its line search asks for the dtype of the first parameter.
    nothing = tx.init({})
    assert jax.tree.structure(_derive(nothing, {}, {})) == jax.tree.structure(nothing)


def test_states_within_a_line_search():
  init, _, _ = linesearch.zoom_linesearch(3)
  state = init(_PARAMS, _PARAMS, value=jnp.float32(1.0), grad=_PARAMS)
  axes = _derive(state, _AXES, _PARAMS)
  assert axes.params == axes.updates == axes.grad == axes.safe_grad == _AXES and axes.cubic_ref == P()
  backtracking = linesearch.BacktrackingLineSearchState(jnp.ones([]), jnp.ones([]), _PARAMS, jnp.ones([]), jnp.ones([]))
  assert _derive(backtracking, _AXES, _PARAMS).new_grad == _AXES


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
      P('expert', 'embed'), P('expert', 'expert_mlp'), P(None))
  # Too small, too few dims, no factoring: the statistics are a copy of the parameter.
  assert _factored([3, 16], P('layers', 'embed')) == (P(None), P(None), P('layers', 'embed'))
  assert _factored([16], P('embed')) == (P(None), P(None), P('embed'))
  assert _factored([1], P('embed')) == (P(None), P(None), P('embed'))
  assert _factored([], P()) == (P(None), P(None), P())
  assert _factored([8, 16], P('embed', 'mlp'), factored=False) == (P(None), P(None), P('embed', 'mlp'))
  assert _factored([8, 16], P('embed', 'mlp'), min_dim_size_to_factor=9) == (P(None), P(None), P('embed', 'mlp'))
  assert _factored([0, 16], P('length', 'embed')) == (P(None), P(None), P('length', 'embed'))


def test_axes_of_optax_adafactor_with_dims_of_one_size():
  """Which of two equal dims is summed over is seen by gradients that differ along one dim at a time."""
  shapes = [(8, 8), (8, 8, 8), (4, 8, 8), (8, 4, 8), (8, 8, 4), (4, 4, 4, 4), (1, 1), (1, 8)]
  names = [f'dim{dim}' for dim in range(4)]
  tx = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
  params = [jnp.zeros(shape) for shape in shapes]
  state = tx.init(params)
  axes = _derive(state, [P(*names[:len(shape)]) for shape in shapes], params)
  update = jax.jit(tx.update)
  # The (field, parameter, place of a dim in the statistic, name of the dim) that are so.
  found, expected = set(), set()
  for dim, name in enumerate(names):
    grads = [np.ones(shape, np.float32) + (np.indices(shape)[dim] if dim < len(shape) else 0) for shape in shapes]
    _, updated = update(grads, state, params)
    for field in ('v_row', 'v_col'):
      for index, statistic in enumerate(getattr(updated, field)):
        for place in range(statistic.ndim):
          if np.ptp(np.asarray(statistic), axis=place).max() > 1e-3:
            found.add((field, index, place, name))
  for field in ('v_row', 'v_col'):
    for index, spec in enumerate(getattr(axes, field)):
      expected |= {(field, index, place, name) for place, name in enumerate(spec)
                   if shapes[index][names.index(name)] > 1}
  assert found == expected


def test_axes_of_sm3_novograd_and_lbfgs():
  sm3 = _derive_tx(optax.scale_by_sm3())
  assert sm3.mu == {'dense': {'kernel': [P('embed'), P('mlp')], 'bias': [P('mlp')]}, 'scale': []} and sm3.nu == _AXES
  novograd = _derive_tx(optax.scale_by_novograd())
  assert novograd.mu == _AXES and novograd.nu == jax.tree.map(lambda _: P(), _AXES)
  ldog = _derive_tx(optax.scale_by_distance_over_gradients())
  assert ldog.init_params == _AXES and ldog.grad_sum_of_squares == jax.tree.map(lambda _: P(None), _AXES)
  lbfgs = _derive_tx(optax.scale_by_lbfgs(3))
  assert lbfgs.diff_params_memory['dense'] == {'kernel': P(None, 'embed', 'mlp'), 'bias': P(None, 'mlp')}
  assert lbfgs.diff_updates_memory['scale'] == P(None) and lbfgs.weights_memory == P(None) and lbfgs.params == _AXES


def _galore(shape, axes, dim_nums=None, rank=2, **options):
  tx = contrib.scale_by_galore(
      rank=rank, weight_dimension_numbers=None if dim_nums is None else (lambda _: {'w': dim_nums}), **options)
  params = {'w': jax.ShapeDtypeStruct(shape, jnp.float32)}
  state = jax.eval_shape(tx.init, params)
  derived = _derive(state, {'w': axes}, params)
  assert [len(spec) for spec in jax.tree.leaves(derived)] == [leaf.ndim for leaf in jax.tree.leaves(state)]
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
  assert _galore([8, 4, 3], P('embed', 'heads', 'kv'), numbers(0, (1, 2))) == (P('heads', None), P('embed', None))
  assert _galore([4, 3, 8], P('heads', 'kv', 'embed'), numbers((0, 1), 2)) == (P('heads', None), P(None, 'embed'))
  assert _galore([1, 4, 8], P('layers', 'kv', 'embed'), numbers((0, 1), 2)) == (P('embed', None), P('kv', None))
  # Interleaved: rows are the middle dim.
  assert _galore([5, 3, 7], _STACKED, numbers(1, (0, 2))) == (P('embed', None), P('layers', None))
  # Not projected.
  assert _galore([8, 4, 3], P('embed', 'heads', 'kv')) == (P(None, None), P('embed', 'heads', 'kv'))
  assert _galore([8], P('embed')) == (P(None, None), P('embed'))
  assert _galore([0, 8], P('length', 'embed')) == (P('embed', None), P(None, None))
  # A matrix without rows or columns has the projector of what is not projected; the moments tell them apart.
  assert _galore([0, 4, 0], P('length', 'heads', 'kv'), numbers(0, (1, 2))) == (P(None, None), P(None, 'heads'))
  # A rank as large as the matrix.
  assert _galore([4, 8], P('embed', 'mlp'), rank=100) == (P('mlp', None), P('embed', None))


def test_axes_of_complex_parameters():
  params = {'w': jnp.ones([4, 6], jnp.complex64), 'b': jnp.ones([6])}
  axes = {'w': P('embed', 'mlp'), 'b': P('mlp')}
  for inner, field in ((optax.scale_by_adam(), 'nu'), (optax.scale_by_factored_rms(min_dim_size_to_factor=4), 'v_row')):
    tx = contrib.split_real_and_imaginary(inner)
    state = tx.init(params)
    for given in (params, jax.eval_shape(lambda: params)):
      derived = _derive(state, axes, given)
      assert jax.tree.structure(derived) == jax.tree.structure(state)
      halves = getattr(derived.inner_state, field)['w']
      assert tuple(halves) == ((axes['w'],) * 2 if field == 'nu' else (P('embed'),) * 2)


def test_axes_of_lookahead_with_and_without_a_pair_of_trees():
  tx = optax.lookahead(optax.scale_by_factored_rms(min_dim_size_to_factor=4), 3, 0.5)
  pair = optax.LookaheadParams.init_synced(_PARAMS)
  pair_axes = optax.LookaheadParams(_AXES, _AXES)
  alone, both = _derive(tx.init(_PARAMS), _AXES, _PARAMS), _derive(tx.init(pair), pair_axes, pair)
  assert alone == both and alone.fast_state.v_row['dense']['kernel'] == P('embed') and alone.steps_since_sync == P()
  # Statistics of both trees, and a pair that a state holds.
  average = _derive(optax.ema(0.9).init(pair), pair_axes, pair)
  assert average.ema == pair_axes
  assert _derive((pair,), _AXES, _PARAMS) == (pair_axes,) == _derive((pair,), pair_axes, pair)


def test_axes_of_masked_parameters_stay_masked():
  mask = {'dense': False, 'scale': True}
  assert _derive_tx(optax.masked(optax.scale_by_adam(), mask)).inner_state.mu == {
      'dense': optax.MaskedNode(), 'scale': P()}
  mask = {'dense': {'kernel': True, 'bias': False}, 'scale': False}
  sm3 = _derive_tx(optax.masked(optax.scale_by_sm3(), mask)).inner_state.mu
  assert sm3 == {'dense': {'kernel': [P('embed'), P('mlp')], 'bias': optax.MaskedNode()}, 'scale': optax.MaskedNode()}
  factored = _derive_tx(optax.masked(optax.scale_by_factored_rms(min_dim_size_to_factor=4), mask)).inner_state
  assert factored.v_col['dense'] == {'kernel': P('mlp'), 'bias': optax.MaskedNode()}
  galore = _derive_tx(optax.masked(contrib.scale_by_galore(rank=2), mask)).inner_state
  assert galore.base_optimizer_state.nu['dense'] == {'kernel': P('embed', None), 'bias': optax.MaskedNode()}


def test_axes_of_measurements_and_hyper_parameters():
  norms = _derive_tx(optax.snapshot('norm', optax.tree.norm))
  assert norms.measurement == {'norm': P()}
  assert _derive_tx(optax.snapshot('updates', samples.measure_tree)).measurement == {'updates': _AXES}
  part = _derive_tx(optax.snapshot('part', lambda updates: {'dense': updates['dense']}))
  assert part.measurement == {'part': {'dense': {'kernel': P(None, None), 'bias': P(None)}}}
  monitor = optax.monitor({
      'mean': optax.measure_with_ema(samples.measure_tree, 0.9), 'norm': optax.measure_with_ema(optax.tree.norm, 0.9)})
  state = monitor.init(_PARAMS)
  _, state = monitor.update(_PARAMS, state)
  axes = _derive(state, _AXES, _PARAMS)
  assert axes.measurements == {'mean': _AXES, 'norm': P()}
  assert axes.measure_states[0][1].ema == _AXES and axes.measure_states[1][1].ema == P()
  tx = optax.inject_hyperparams(optax.scale_by_adam)(b1=jnp.ones([3]), b2=optax.constant_schedule(0.9))
  injected = _derive_tx(tx)
  assert injected.hyperparams['b1'] == P(None) and injected.hyperparams_states['b2'].count == P()
  older = optax.InjectHyperparamsState(jnp.zeros([]), {'b1': jnp.ones([3])}, optax.EmaState(jnp.zeros([]), _PARAMS))
  assert _derive(older, _AXES, _PARAMS) == (P(), {'b1': P(None)}, (P(), _AXES))
  # Where the parameters are one array, so may a hyper-parameter be.
  tx = optax.inject_hyperparams(optax.scale_by_adam)(b1=jnp.ones([4, 6]))
  assert _derive(tx.init(jnp.ones([4, 6])), P('embed', 'mlp'), jnp.ones([4, 6])).hyperparams['b1'] == P('embed', 'mlp')
  skip = optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=lambda updates, *_: (True, {'last': updates}))
  state = skip.init(_PARAMS)
  assert _derive(state._replace(skip_state={'last': _PARAMS}), _AXES, _PARAMS).skip_state == {'last': _AXES}


def test_without_the_parameters_most_states_have_axes_and_the_others_say_what_they_need():
  assert _derive(optax.adam(0.1).init(_PARAMS), _AXES)[0].mu == _AXES
  assert _derive(optax.scale_by_lbfgs(2).init(_PARAMS), _AXES).updates == _AXES
  assert _derive(optax.scale_by_sm3().init(_PARAMS), _AXES).mu['dense']['bias'] == [P('mlp')]
  for tx in (optax.scale_by_factored_rms(), contrib.galore(0.1), contrib.split_real_and_imaginary(optax.adam(0.1))):
    with pytest.raises(ConfigError, match='depend on the shapes of the parameters; pass the parameters'):
      _derive(tx.init(_PARAMS), _AXES)


@pytest.mark.parametrize('make,name', [
    (lambda: optax.adafactor(0.1, min_dim_size_to_factor=2), 'FactoredState'),
    (lambda: optax.contrib.galore(0.1, rank=2), 'GaLoreState'),
    (lambda: optax.contrib.split_real_and_imaginary(optax.sgd(0.1, 0.9)), 'SplitRealAndImaginaryState'),
])
def test_states_that_need_the_shapes_of_the_parameters_say_so(make, name):
  params, axes = {'w': jnp.ones([4, 6])}, {'w': P('embed', 'mlp')}
  state = jax.eval_shape(make().init, params)
  rules = optimizers.OptaxStatePartitionRules
  with pytest.raises(ConfigError, match=f'{name} depend on the shapes of the parameters; pass .* as the third argument'):
    rules.derive_optax_logical_axes(state, axes)
  assert jax.tree.structure(rules.derive_optax_logical_axes(state, axes, params)) == jax.tree.structure(state)
