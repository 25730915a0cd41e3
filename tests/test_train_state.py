"""Train states: creation from Flax variables, updates, state dicts, logical axes."""

import flax.core
import flax.linen as nn
from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from t5x_lite import adafactor
from t5x_lite import optimizers
from t5x_lite import train_state as train_state_lib
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.train_state import FlaxOptimTrainState
from t5x_lite.train_state import InferenceState


class _Layer(nn.Module):
  """A projection with a counter of its calls, one collection with and one without axes."""

  with_mutables: bool = True

  @nn.compact
  def __call__(self, x):
    kernel = flax_partitioning.param_with_axes(
      'kernel', nn.initializers.ones, (4, 6), axes=('embed', 'mlp')
    )
    scale = flax_partitioning.param_with_axes('scale', nn.initializers.ones, (), axes=())
    if self.with_mutables:
      mean = flax_partitioning.variable_with_axes(
        'statistics', 'mean', jnp.zeros, (6,), axes=('mlp',)
      )
      mean.value = jnp.mean(x @ kernel, axis=0)
      self.variable('calls', 'count', jnp.zeros, [2]).value += 1.0
    return x @ kernel * scale


class _Model(nn.Module):
  with_mutables: bool = True

  @nn.compact
  def __call__(self, x):
    return _Layer(self.with_mutables, name='layer')(x)


def _variables(with_mutables=True):
  return _Model(with_mutables).init(jax.random.key(0), jnp.ones([2, 4]))


_PARAM_AXES = {'layer': {'kernel': P('embed', 'mlp'), 'scale': P()}}


def _create(optimizer_def=None, with_mutables=True, average=False):
  state = FlaxOptimTrainState.create(optimizer_def or optimizers.adamw(), _variables(with_mutables))
  return (
    state.replace(param_average=jax.tree.map(lambda p: p + 1, state.params)) if average else state
  )


def _assert_equal(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_create_splits_the_variables():
  state = _create()
  assert state.step == 0 and state.step.dtype == jnp.int32
  assert set(tree_utils.flatten_dict(state.params)) == {'layer/kernel', 'layer/scale'}
  assert set(state.flax_mutables) == {'statistics', 'calls'}
  assert set(state.params_axes['layer']) == {'kernel_axes', 'scale_axes'}
  assert set(state.flax_mutables_axes) == {'statistics'}
  assert state.param_states[0].mu.keys() == state.params.keys()
  plain = _create(with_mutables=False)
  assert plain.flax_mutables == {} and plain.flax_mutables_axes is None
  assert set(plain.state_dict()) == {'target', 'state'} and set(plain.state_dict()['state']) == {
    'step',
    'param_states',
  }


def test_frozen_variables_become_plain_dicts():
  state = FlaxOptimTrainState.create(optimizers.sgd(), flax.core.freeze(_variables()))
  assert type(state.params) is dict and type(state.params['layer']) is dict
  assert type(state.flax_mutables['statistics']) is dict
  assert jax.tree.structure(state) == jax.tree.structure(
    FlaxOptimTrainState.create(state.optimizer_def, _variables())
  )


def test_the_optimizer_gets_the_axes_before_it_initialises_its_state():
  optimizer_def = optimizers.Adafactor(
    logical_factor_rules=optimizers.standard_logical_factor_rules(), min_dim_size_to_factor=2
  )
  state = _create(optimizer_def)
  assert [role.name for role in state.optimizer_def.hyper_params.factor_map['layer/kernel']] == [
    'ROW',
    'COLUMN',
  ]
  assert state.param_states['layer']['kernel'].v_row.shape == (4,)


def test_apply_gradient_uses_the_learning_rate_and_carries_the_rest():
  state = _create(optimizers.sgd(), average=True)
  grads = jax.tree.map(jnp.ones_like, state.params)
  step = jax.jit(lambda state, rate: state.apply_gradient(grads, rate))
  new = step(step(state, 0.25), 0.5)
  assert new.step == 2
  np.testing.assert_allclose(new.params['layer']['kernel'], 0.25)
  _assert_equal(new.flax_mutables, state.flax_mutables)
  _assert_equal(new.param_average, state.param_average)
  assert jax.tree.structure(new) == jax.tree.structure(state)

  mutables = jax.tree.map(lambda x: x + 3, state.flax_mutables)
  _assert_equal(state.apply_gradient(grads, 0.1, mutables).flax_mutables, mutables)
  assert state.apply_gradient(grads, 0.1, train_state_lib.EMPTY_DICT).flax_mutables == {}
  own_rate = _create(optimizers.sgd(0.5)).apply_gradient(grads, learning_rate=None)
  np.testing.assert_allclose(own_rate.params['layer']['kernel'], 0.5)


@pytest.mark.parametrize('with_mutables', [True, False])
@pytest.mark.parametrize('average', [True, False])
def test_state_dict_round_trip(with_mutables, average):
  state = _create(optimizers.adamw(), with_mutables, average)
  state_dict = state.state_dict()
  assert set(state_dict) == {'target', 'state'} | (
    {'flax_mutables'} if with_mutables else set()
  ) | ({'param_average'} if average else set())
  flat = tree_utils.flatten_dict(state_dict, keep_empty=True)
  assert len(flat) == len(jax.tree.leaves(state))
  changed = jax.tree.map(lambda leaf: leaf + 1, state)
  _assert_equal(state.restore_state(changed.state_dict()), changed)
  for name in flat:
    damaged = {key: value for key, value in flat.items() if key != name}
    with pytest.raises(CheckpointError, match=f'{name} is missing'):
      state.restore_state(tree_utils.unflatten_dict(damaged))


def test_restoring_unknown_entries_is_rejected():
  full = _create(average=True).state_dict()
  with pytest.raises(CheckpointError, match="'flax_mutables', but this train state has none"):
    _create(with_mutables=False, average=True).restore_state(full)
  with pytest.raises(CheckpointError, match="'param_average', but this train state has none"):
    _create().restore_state(full)
  with pytest.raises(CheckpointError, match="'params', but this train state has none"):
    _create().restore_state({**_create().state_dict(), 'params': {}})


def test_replacements():
  state = _create()
  params = jax.tree.map(lambda p: p * 2, state.params)
  _assert_equal(state.replace_params(flax.core.freeze(params)).params, params)
  _assert_equal(state.replace_params(params).param_states, state.param_states)
  stepped = state.replace_step(jnp.array(7))
  assert stepped.step == 7 and stepped.step.dtype == jnp.int32 and state.step == 0
  assert jax.tree.structure(stepped) == jax.tree.structure(state)
  for step in (9, np.int64(9), np.array(9)):
    stepped = state.replace_step(step)
    # Another dtype would make an ahead-of-time compiled step reject the state.
    assert (
      stepped.step == 9 and stepped.step.dtype == jnp.int32 and isinstance(stepped.step, jax.Array)
    )
  mutables = {'statistics': {'layer': {'mean': jnp.ones([6])}}}
  assert (
    state.replace_flax_mutables(flax.core.freeze(mutables)).flax_mutables.keys() == mutables.keys()
  )


@pytest.mark.parametrize(
  'make',
  [
    lambda: optimizers.adamw(),
    lambda: optimizers.sgd(0.1, momentum=0.9),
    lambda: optimizers.Adafactor(beta1=0.9),
    lambda: optimizers.OptaxWrapper(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
  ],
)
def test_logical_axes_have_the_structure_of_the_state(make):
  optimizer_def = make()
  state = _create(optimizer_def, average=True)
  shapes = jax.eval_shape(lambda: _create(optimizer_def, average=True))
  for tree in (state, shapes):
    axes = tree.as_logical_axes()
    assert jax.tree.structure(axes) == jax.tree.structure(tree)
    for (name, leaf), spec in zip(
      tree_utils.named_leaves(tree), jax.tree.leaves(axes), strict=True
    ):
      assert isinstance(spec, P) and len(spec) == leaf.ndim, name
    assert axes.params == _PARAM_AXES and axes.param_average == _PARAM_AXES
    assert axes.flax_mutables == {
      'statistics': {'layer': {'mean': P('mlp')}},
      'calls': {'layer': {'count': P(None)}},
    }
    assert axes.step == P()


def test_a_state_is_a_carry_of_scan():
  state = _create(average=True)
  grads = jax.tree.map(jnp.ones_like, state.params)
  last, _ = jax.lax.scan(lambda s, _: (s.apply_gradient(grads, 0.1), None), state, length=3)
  assert last.step == 3 and jax.tree.structure(last) == jax.tree.structure(state)


def test_inference_state():
  trained = jax.tree.map(lambda leaf: leaf + 1, _create(average=True))
  state = InferenceState.create(_variables())
  assert state.step == 0 and set(state.state_dict()) == {'target', 'state', 'flax_mutables'}
  restored = state.restore_state(trained.state_dict())
  assert restored.step == 1
  _assert_equal(restored.params, trained.params)
  _assert_equal(restored.flax_mutables, trained.flax_mutables)
  _assert_equal(state.restore_state(restored.state_dict()), restored)
  axes = restored.as_logical_axes()
  assert jax.tree.structure(axes) == jax.tree.structure(restored)
  assert axes.params == _PARAM_AXES and axes.step == P()
  assert restored.replace_step(5).step == 5
  assert restored.replace_flax_mutables({}).state_dict().keys() == {'target', 'state'}
  doubled = restored.replace_params(jax.tree.map(lambda p: p * 2, restored.params))
  np.testing.assert_allclose(doubled.params['layer']['kernel'], 4.0)
  stepless = InferenceState(step=None, params=restored.params, params_axes=restored.params_axes)
  assert stepless.as_logical_axes().step is None
  assert stepless.restore_state(trained.state_dict()).step is None
  with pytest.raises(CheckpointError, match='state/step is missing'):
    state.restore_state({**restored.state_dict(), 'state': {}})
  # Without an optimizer, the message names the model.
  words = 'Cannot restore the parameters: the value at target/layer/kernel is missing.* saved with another model'
  with pytest.raises(CheckpointError, match=words):
    state.restore_state({'target': {'layer': {'scale': 1.0}}, 'state': {'step': 1}})
  words = 'Cannot restore the mutable collections: .* flax_mutables/calls/other.* saved with another model'
  with pytest.raises(CheckpointError, match=words):
    state.restore_state(
      {
        **restored.state_dict(),
        'flax_mutables': {**restored.state_dict()['flax_mutables'], 'calls': {'other': 1}},
      }
    )


def test_invalid_variables_are_rejected():
  variables = flax.core.unfreeze(_variables())
  with pytest.raises(
    ConfigError, match=r"must have the collections \['params'\], got \['calls', 'statistics'\]"
  ):
    FlaxOptimTrainState.create(
      optimizers.sgd(), {k: v for k, v in variables.items() if not k.startswith('params')}
    )
  with pytest.raises(ConfigError, match="'layer/scale' has no logical axes"):
    axes = {'layer': {'kernel_axes': variables['params_axes']['layer']['kernel_axes']}}
    FlaxOptimTrainState.create(optimizers.sgd(), {**variables, 'params_axes': axes})
  with pytest.raises(ConfigError, match="'layer/scale' has no logical axes"):
    InferenceState.create({**variables, 'params_axes': axes})
  with pytest.raises(
    ConfigError, match="'other/mean', but no such variable of the collection statistics"
  ):
    InferenceState.create(
      {
        **variables,
        'statistics_axes': {
          **variables['statistics_axes'],
          'other': variables['statistics_axes']['layer'],
        },
      }
    )
  with pytest.raises(ConfigError, match=r"must have the collections \['cache'\]"):
    FlaxOptimTrainState.create(optimizers.sgd(), {**variables, 'cache_axes': {}})
  without_axes = {name: value for name, value in variables.items() if name != 'params_axes'}
  state = FlaxOptimTrainState.create(optimizers.sgd(), without_axes)
  with pytest.raises(ConfigError, match='param_with_axes'):
    state.as_logical_axes()
  with pytest.raises(ConfigError, match='param_with_axes'):
    InferenceState.create(without_axes).as_logical_axes()


class _ToldByAxes(optimizers.OptaxWrapper):
  """A user's optimizer with T5X's method, which changes the definition."""

  axes = None

  def set_param_axes(self, param_logical_axes):
    self.axes = param_logical_axes


_BY_AXES = {
  'adafactor': lambda: adafactor.Adafactor(
    logical_factor_rules=adafactor.standard_logical_factor_rules()
  ),
  'scaled_adam': lambda: optimizers.scaled_adam(0.1, batch_axes=('mlp',)),
  'chain': lambda: optimizers.chain(
    [optax.zero_nans(), optimizers.scaled_adam(batch_axes=('mlp',))]
  ),
  'mechanize': lambda: optimizers.mechanize(optimizers.scaled_adam(0.1, batch_axes=('mlp',))),
  'several': lambda: optimizers.MultiOptimizer(
    [('scale', optimizers.sgd(0.1)), ('kernel', optimizers.scaled_adam(batch_axes=('mlp',)))]
  ),
  'set_param_axes': lambda: _ToldByAxes(optax.sgd(0.1)),
}


def _named(*axes):
  variables = flax.core.unfreeze(_variables(with_mutables=False))
  variables['params_axes']['layer']['kernel_axes'] = flax_partitioning.AxisMetadata(names=axes)
  return variables


@pytest.mark.parametrize('make', _BY_AXES.values(), ids=_BY_AXES)
def test_states_of_one_definition_do_not_influence_each_other(make):
  optimizer_def = make()
  attributes = dict(vars(optimizer_def))
  first = FlaxOptimTrainState.create(optimizer_def, _named('embed', 'mlp'))
  shapes = jax.tree.map(jnp.shape, first)
  second = FlaxOptimTrainState.create(optimizer_def, _named('mlp', 'embed'))
  assert vars(optimizer_def) == attributes
  assert first.optimizer_def != second.optimizer_def
  # Equal axes give equal definitions: the structures agree, and a compiled step serves both.
  again = FlaxOptimTrainState.create(second.optimizer_def, _named('embed', 'mlp'))
  assert again.optimizer_def == first.optimizer_def and hash(again.optimizer_def) == hash(
    first.optimizer_def
  )
  assert jax.tree.structure(again) == jax.tree.structure(first)
  assert jax.tree.map(jnp.shape, again) == shapes
  traced = []
  step = jax.jit(
    lambda state, grads: (traced.append(1), state.apply_gradient(grads, learning_rate=0.1))[1]
  )
  updated = [step(state, jax.tree.map(jnp.ones_like, state.params)) for state in (first, again)]
  _assert_equal(*updated)
  assert len(traced) == 1
