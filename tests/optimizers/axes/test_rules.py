"""Logical axes of optax states: every class of optax and every transformation."""

import flax.core
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from optax import contrib
from optax._src import linesearch
import pytest

from t5x_lite import optimizers
from t5x_lite import tree_utils
from tests.optimizers.axes import partition_samples as samples

_AXES = {'dense': {'kernel': P('embed', 'mlp'), 'bias': P('mlp')}, 'scale': P()}
_PARAMS = {'dense': {'kernel': jnp.ones([4, 6]), 'bias': jnp.ones([6])}, 'scale': jnp.float32(1.5)}
_derive = optimizers.OptaxStatePartitionRules.derive_optax_logical_axes


def _derive_tx(tx, params=None, axes=None):
  params = _PARAMS if params is None else params
  return _derive(jax.eval_shape(tx.init, params), _AXES if axes is None else axes, params)


@pytest.mark.parametrize('name', samples.SAMPLES)
def test_axes_mirror_the_state_and_name_all_that_is_large(name):
  state = jax.eval_shape(samples.SAMPLES[name].init, samples.SHAPES)
  axes = _derive(state, samples.AXES, samples.SHAPES)
  assert jax.tree.structure(axes) == jax.tree.structure(state)
  for (path, leaf), spec in zip(tree_utils.named_leaves(state), jax.tree.leaves(axes), strict=True):
    assert isinstance(spec, P) and len(spec) == leaf.ndim, path
    # Each named dim is as long as the dims of that name, or several of them that became one.
    for size, axis in zip(leaf.shape, spec, strict=True):
      assert axis is None or size % max(samples.SIZES[axis], 1) == 0, path
    if leaf.size >= 16:
      assert any(spec), f'{path}: {leaf.shape} is replicated'


def _random_tree(rng):
  """Return (shapes, axes, size by name) of parameters of any rank, with equal, empty and unnamed dims."""
  shapes, axes, sizes = {}, {}, {}
  for part in samples.AXES:
    shapes[part], axes[part] = {}, {}
    for index in range(rng.integers(1, 4)):
      shape = tuple(
        int(size) for size in rng.choice([0, 1, 2, 3, 4, 4, 8, 8, 16], size=rng.integers(0, 5))
      )
      names = [f'{part}_{index}_{dim}' for dim in range(len(shape))]
      sizes |= dict(zip(names, shape, strict=True))
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
    for (path, leaf), spec in zip(
      tree_utils.named_leaves(state), jax.tree.leaves(derived), strict=True
    ):
      assert len(spec) == leaf.ndim, f'{sample}: {path}'
      for size, axis in zip(leaf.shape, spec, strict=True):
        assert (
          axis is None or size == sizes[axis] or size % max(sizes[axis], 1) == 0 < sizes[axis]
        ), f'{sample}: {path}'


@pytest.mark.parametrize(
  'name', ['adamw', 'adafactor', 'sm3', 'novograd', 'contrib.galore', 'lbfgs', 'contrib.muon']
)
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
  assert (
    axes.params == axes.updates == axes.grad == axes.safe_grad == _AXES and axes.cubic_ref == P()
  )
  backtracking = linesearch.BacktrackingLineSearchState(
    jnp.ones([]), jnp.ones([]), _PARAMS, jnp.ones([]), jnp.ones([])
  )
  assert _derive(backtracking, _AXES, _PARAMS).new_grad == _AXES


def test_axes_of_complex_parameters():
  params = {'w': jnp.ones([4, 6], jnp.complex64), 'b': jnp.ones([6])}
  axes = {'w': P('embed', 'mlp'), 'b': P('mlp')}
  for inner, field in (
    (optax.scale_by_adam(), 'nu'),
    (optax.scale_by_factored_rms(min_dim_size_to_factor=4), 'v_row'),
  ):
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
  assert (
    alone == both
    and alone.fast_state.v_row['dense']['kernel'] == P('embed')
    and alone.steps_since_sync == P()
  )
  # Statistics of both trees, and a pair that a state holds.
  average = _derive(optax.ema(0.9).init(pair), pair_axes, pair)
  assert average.ema == pair_axes
  assert _derive((pair,), _AXES, _PARAMS) == (pair_axes,) == _derive((pair,), pair_axes, pair)


def test_axes_of_masked_parameters_stay_masked():
  mask = {'dense': False, 'scale': True}
  assert _derive_tx(optax.masked(optax.scale_by_adam(), mask)).inner_state.mu == {
    'dense': optax.MaskedNode(),
    'scale': P(),
  }
  mask = {'dense': {'kernel': True, 'bias': False}, 'scale': False}
  sm3 = _derive_tx(optax.masked(optax.scale_by_sm3(), mask)).inner_state.mu
  assert sm3 == {
    'dense': {'kernel': [P('embed'), P('mlp')], 'bias': optax.MaskedNode()},
    'scale': optax.MaskedNode(),
  }
  factored = _derive_tx(
    optax.masked(optax.scale_by_factored_rms(min_dim_size_to_factor=4), mask)
  ).inner_state
  assert factored.v_col['dense'] == {'kernel': P('mlp'), 'bias': optax.MaskedNode()}
  galore = _derive_tx(optax.masked(contrib.scale_by_galore(rank=2), mask)).inner_state
  assert galore.base_optimizer_state.nu['dense'] == {
    'kernel': P('embed', None),
    'bias': optax.MaskedNode(),
  }


def test_axes_of_measurements_and_hyper_parameters():
  norms = _derive_tx(optax.snapshot('norm', optax.tree.norm))
  assert norms.measurement == {'norm': P()}
  assert _derive_tx(optax.snapshot('updates', samples.measure_tree)).measurement == {
    'updates': _AXES
  }
  part = _derive_tx(optax.snapshot('part', lambda updates: {'dense': updates['dense']}))
  assert part.measurement == {'part': {'dense': {'kernel': P(None, None), 'bias': P(None)}}}
  monitor = optax.monitor(
    {
      'mean': optax.measure_with_ema(samples.measure_tree, 0.9),
      'norm': optax.measure_with_ema(optax.tree.norm, 0.9),
    }
  )
  state = monitor.init(_PARAMS)
  _, state = monitor.update(_PARAMS, state)
  axes = _derive(state, _AXES, _PARAMS)
  assert axes.measurements == {'mean': _AXES, 'norm': P()}
  assert axes.measure_states[0][1].ema == _AXES and axes.measure_states[1][1].ema == P()
  tx = optax.inject_hyperparams(optax.scale_by_adam)(
    b1=jnp.ones([3]), b2=optax.constant_schedule(0.9)
  )
  injected = _derive_tx(tx)
  assert injected.hyperparams['b1'] == P(None) and injected.hyperparams_states['b2'].count == P()
  older = optax.InjectHyperparamsState(
    jnp.zeros([]), {'b1': jnp.ones([3])}, optax.EmaState(jnp.zeros([]), _PARAMS)
  )
  assert _derive(older, _AXES, _PARAMS) == (P(), {'b1': P(None)}, (P(), _AXES))
  # Where the parameters are one array, so may a hyper-parameter be.
  tx = optax.inject_hyperparams(optax.scale_by_adam)(b1=jnp.ones([4, 6]))
  assert _derive(tx.init(jnp.ones([4, 6])), P('embed', 'mlp'), jnp.ones([4, 6])).hyperparams[
    'b1'
  ] == P('embed', 'mlp')
  skip = optax.MultiSteps(
    optax.sgd(0.1), 2, should_skip_update_fn=lambda updates, *_: (True, {'last': updates})
  )
  state = skip.init(_PARAMS)
  assert _derive(state._replace(skip_state={'last': _PARAMS}), _AXES, _PARAMS).skip_state == {
    'last': _AXES
  }
