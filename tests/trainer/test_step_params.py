"""Dtypes, noise and missing gradients of parameters in a step, also with stacked layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import errors
from t5x_lite import layer_stacks
from t5x_lite import optimizers
from t5x_lite import train_state as train_state_lib
from t5x_lite import trainer as trainer_lib
from t5x_lite.trainer import step_params as step_params_lib
from t5x_lite.trainer import train_step
from tests.models import toy_model

StepParams = step_params_lib.StepParams


def _grads(step_params, *, num_microbatches=None, model=None, optimizer_def=None):
  """Return (loss, gradients, jaxpr's text) of a step of the toy model."""
  model = model or toy_model.make_model(optimizer_def or optimizers.sgd(0.1))
  state = toy_model.make_state(model)
  step_params = train_step.step_params_of(state, step_params, layer_stacks.LayerStacks()).at_step(
    jax.random.key(3), state.step
  )

  def fn(state, batch):
    return train_step.accumulate_gradients(
      model, state, batch, None, num_microbatches, jax.sharding.PartitionSpec(None), step_params
    )[:2]

  batch = toy_model.make_batch(8)
  return *jax.jit(fn)(state, batch), jax.jit(fn).lower(state, batch)


def test_without_options_the_program_is_the_same():
  options = StepParams(train_dtype=None, noise=None)
  params, batch = {'w': jnp.ones(3)}, {'x': jnp.ones(2)}
  assert options.for_loss(params) is params and options.cast_batch(batch) is batch
  assert options.split(params)[0] is params and options.at_step(None, None) is options


@pytest.mark.parametrize('num_microbatches', [None, 2])
def test_dtype_of_the_step(num_microbatches):
  loss, grads, lowered = _grads(
    StepParams(train_dtype='bfloat16'), num_microbatches=num_microbatches
  )
  exact_loss, exact, _ = _grads(StepParams(), num_microbatches=num_microbatches)
  assert 'bf16' in lowered.as_text()
  assert 0 < abs(float(loss - exact_loss)) < 0.02
  for grad, other in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
    assert grad.dtype == jnp.float32
    np.testing.assert_allclose(grad, other, atol=0.02 * float(jnp.max(jnp.abs(other))))


def test_dtype_by_path():
  options = StepParams(
    train_dtype=[
      ('hidden', None),
      ('batch/weights', 'float16'),
      ('batch', None),
      ('.*', jnp.bfloat16),
    ]
  )
  params = {'hidden': jnp.ones(2), 'logits': jnp.ones(2), 'count': jnp.ones(2, jnp.int32)}
  assert {k: v.dtype for k, v in options.for_loss(params).items()} == {
    'hidden': jnp.float32,
    'logits': jnp.bfloat16,
    'count': jnp.int32,
  }
  batch = {'weights': jnp.ones(2), 'x': jnp.ones(2), 'ids': jnp.ones(2, jnp.int32)}
  assert {k: v.dtype for k, v in options.cast_batch(batch).items()} == {
    'weights': jnp.float16,
    'x': jnp.float32,
    'ids': jnp.int32,
  }
  assert options.dtype_of('encoder/layers_0,1/hidden') is None
  assert options.dtype_of('encoder/layers_0,1/mlp') == jnp.bfloat16


@pytest.mark.parametrize(
  'options',
  [
    {'train_dtype': 'int8'},
    {'train_dtype': 'float64'},
    {'train_dtype': [('(', 'bfloat16')]},
    {'train_dtype': ['bfloat16']},
  ],
)
def test_errors(options):
  with pytest.raises(
    errors.ConfigError,
    match="Trainer.train_dtype` must be None, 'float32', 'bfloat16' or 'float16', or pairs",
  ):
    step_params_lib.check_train_dtype(**options)


@pytest.mark.parametrize('stddevs', [[], [('x', -1.0)], 'x', [('(', 1.0)]])
def test_noise_errors(stddevs):
  with pytest.raises(errors.ConfigError, match='GaussianParamNoise.stddevs'):
    step_params_lib.GaussianParamNoise(stddevs)


@pytest.mark.parametrize(
  'stddevs, unused', [([('nothing', 0.1)], 'nothing'), ([('.*', 0.1), ('kernel$', 0.0)], 'kernel')]
)
def test_noise_without_effect_is_an_error(stddevs, unused):
  params = {'dense': {'kernel': jnp.ones((2, 2))}}
  with pytest.raises(
    errors.ConfigError, match=f"first match of a name, got '{unused}.*Names are 'dense/kernel'"
  ):
    StepParams(noise=step_params_lib.GaussianParamNoise(stddevs)).check(params, {})


def test_noise_has_its_deviation_by_path_and_depends_on_the_key_alone():
  noise = step_params_lib.GaussianParamNoise([('a/zero', 0.0), ('^a', 0.5), ('half', 2.0)])
  params = {
    'a': {'w': jnp.zeros([100, 100]), 'zero': jnp.zeros(3)},
    'b': jnp.zeros(3),
    'half': jnp.zeros([10_000], jnp.bfloat16),
    'n': jnp.arange(3),
  }
  made = noise(jax.random.key(0), params)
  assert (
    np.std(made['a']['w']) == pytest.approx(0.5, rel=0.03) and abs(np.mean(made['a']['w'])) < 0.02
  )
  assert made['half'].dtype == jnp.bfloat16 and np.std(
    made['half'].astype(jnp.float32)
  ) == pytest.approx(2, rel=0.05)
  for name in ('b', 'n'):
    np.testing.assert_array_equal(made[name], params[name])
  np.testing.assert_array_equal(made['a']['zero'], params['a']['zero'])
  alone = step_params_lib.GaussianParamNoise([('^a', 0.5)])(
    jax.random.key(0), {'a': {'w': params['a']['w']}}
  )
  np.testing.assert_array_equal(alone['a']['w'], made['a']['w'])
  assert np.any(noise(jax.random.key(1), params)['a']['w'] != made['a']['w'])


def test_noise_of_stacked_layers_is_that_of_each_layer():
  noise = step_params_lib.GaussianParamNoise([('layers_1', 1.0), ('.*', 0.1)])
  stacks = layer_stacks.LayerStacks((('encoder', (0, 1)),))
  params = {'encoder': {'layers_0': {'w': jnp.zeros(4)}, 'layers_1': {'w': jnp.zeros(4)}}}
  single = StepParams(noise=noise).at_step(jax.random.key(0), jnp.int32(7))
  stacked = StepParams(noise=noise, stacks=stacks).at_step(jax.random.key(0), jnp.int32(7))
  jax.tree.map(
    np.testing.assert_array_equal,
    stacked.for_loss(stacks.stack(params)),
    stacks.stack(single.for_loss(params)),
  )


@pytest.mark.parametrize('num_microbatches', [None, 2])
def test_noise_of_a_step(num_microbatches):
  """The gradient is that at the parameters with noise, the same noise in all micro-batches and another in each step."""
  noise = step_params_lib.GaussianParamNoise([('.*', 0.1)])
  _, grads, _ = _grads(StepParams(noise=noise), num_microbatches=num_microbatches)
  model = toy_model.make_model(optimizers.sgd(0.1))
  state = toy_model.make_state(model)
  at_step = StepParams(noise=noise).at_step
  moved = at_step(jax.random.key(3), jnp.int32(0)).for_loss(state.params)
  expected = train_step.accumulate_gradients(
    model,
    state.replace_params(moved),
    toy_model.make_batch(8),
    None,
    None,
    jax.sharding.PartitionSpec(None),
  )[1]
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads, expected)
  later = at_step(jax.random.key(3), jnp.int32(1)).for_loss(state.params)
  assert np.any(later['hidden'] != moved['hidden'])


@pytest.mark.parametrize(
  'optimizer_fn',
  [
    lambda: optimizers.MultiOptimizer([('logits', optimizers.sgd(0.1))]),
    lambda: optimizers.partition(
      {'trained': optimizers.sgd(0.1), 'frozen': None}, [('logits', 'trained'), ('.*', 'frozen')]
    ),
  ],
)
@pytest.mark.parametrize('num_microbatches', [None, 2])
def test_frozen_parameters_get_no_gradients(optimizer_fn, num_microbatches):
  loss, grads, lowered = _grads(
    StepParams(), optimizer_def=optimizer_fn(), num_microbatches=num_microbatches
  )
  exact_loss, exact, whole = _grads(StepParams(), num_microbatches=num_microbatches)
  np.testing.assert_array_equal(loss, exact_loss)
  np.testing.assert_allclose(grads['logits'], exact['logits'], rtol=1e-6, atol=1e-8)
  for name in ('embedding', 'hidden'):
    np.testing.assert_array_equal(grads[name], np.zeros_like(exact[name]))
  # Backward, one product remains of four: that for the gradient of the logits.
  products, all_products = (
    text.count('dot_general') for text in (lowered.as_text(), whole.as_text())
  )
  assert (products, all_products) == (3, 6)
  compiled = lowered.compile()
  assert (
    compiled.memory_analysis().temp_size_in_bytes
    < whole.compile().memory_analysis().temp_size_in_bytes
  )


def test_frozen_parameters_of_parts_and_value_functions():
  inner = optimizers.MultiOptimizer([('logits', optimizers.sgd(0.1))])
  outer = optimizers.MultiOptimizer([('logits|hidden', inner)])
  model = toy_model.make_model(outer)
  state = toy_model.make_state(model)
  options = train_step.step_params_of(state, StepParams(), layer_stacks.LayerStacks())
  assert options.frozen == {'embedding', 'hidden'}
  value_fn = train_step.make_value_fn(
    model, state, toy_model.make_batch(8), None, None, step_params=options
  )
  grads = jax.grad(value_fn)(state.params)
  assert not np.any(grads['hidden']) and np.any(grads['logits'])


def test_layers_of_different_dtypes_are_stacked_apart():
  variables = {'params': {'encoder': {f'layers_{i}': {'w': jnp.zeros([2])} for i in range(4)}}}
  state = train_state_lib.FlaxOptimTrainState.create(optimizers.sgd(0.1), variables)
  axes = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), state)
  options = StepParams(train_dtype=[('layers_[01]/', 'bfloat16')])
  stacks = state.find_layer_stacks({'encoder': [(0, 1, 2, 3)]}, axes, option_fn=options.dtype_of)
  assert stacks.groups == (('encoder', (0, 1)), ('encoder', (2, 3)))


def test_empty_collections_of_a_model_are_pruned():
  """A module may return a collection with empty subtrees, which the state does not have."""

  class Model(type(toy_model.make_model(counts=True))):
    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
      loss, (metrics, mutables) = super().loss_fn(params, batch, dropout_rng, flax_mutables)
      return loss, (
        metrics,
        {**mutables, 'counters': {**mutables['counters'], 'none': {'inner': {}}}, 'cache': {}},
      )

  model = toy_model.make_model(optimizers.sgd(0.1), counts=True)
  model.__class__ = Model
  state = toy_model.make_state(model)
  new_state, _ = train_step.train_with_lr(state, toy_model.make_batch(8), None, None, model, None)
  assert jax.tree.structure(new_state) == jax.tree.structure(state)
  assert float(new_state.flax_mutables['counters']['seen']) > 0
  variables = {'params': {'w': jnp.zeros(2)}, 'cache': {'empty': {}}}
  assert (
    train_state_lib.FlaxOptimTrainState.create(optimizers.sgd(0.1), variables).flax_mutables == {}
  )


def test_trainer_options():
  """The options of the trainer reach its step, and are deterministic."""
  model = toy_model.make_model(optimizers.sgd(0.1))
  batch = toy_model.make_batch(8)

  def step(**options):
    from t5x_lite import partitioning  # pylint: disable=import-outside-toplevel

    mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:1]), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    partitioner = partitioning.PjitPartitioner(
      mesh=mesh, logical_axis_rules=[(name, None) for name in ('vocab', 'embed', 'mlp')]
    )
    state = toy_model.make_state(model)
    trainer = trainer_lib.Trainer(
      model,
      state,
      partitioner,
      [],
      None,
      partitioner.get_mesh_axes(state),
      jax.random.key(0),
      **options,
    )
    return trainer.partitioned_train_step()(state, batch)[0].params

  plain, noise = step(), step_params_lib.GaussianParamNoise([('.*', 0.1)])
  noisy, again, half = (
    step(param_noise=noise),
    step(param_noise=noise),
    step(train_dtype='bfloat16'),
  )
  jax.tree.map(np.testing.assert_array_equal, noisy, again)
  assert np.any(noisy['hidden'] != plain['hidden']) and np.any(half['hidden'] != plain['hidden'])
  assert half['hidden'].dtype == jnp.float32


@pytest.mark.parametrize(
  'noise',
  [
    lambda key, params: None,
    lambda key, params: jax.tree.map(lambda x: x.astype('float16'), params),
    lambda key, params: jax.tree.map(lambda x: x[None], params),
    lambda key: key,
  ],
)
def test_noise_must_keep_the_tree(noise):
  with pytest.raises(errors.ConfigError, match='Trainer.param_noise` must be a function'):
    StepParams(noise=noise).at_step(jax.random.key(0), jnp.int32(7)).for_loss({'w': jnp.ones(3)})


@pytest.mark.parametrize(
  'options, name',
  [
    ({'train_dtype': [('nothing', 'bfloat16')]}, 'Trainer.train_dtype'),
    ({'train_dtype': [('.*', None), ('hidden', 'bfloat16')]}, 'Trainer.train_dtype'),
    (
      {'noise': step_params_lib.GaussianParamNoise([('nothing', 0.1)])},
      'GaussianParamNoise.stddevs',
    ),
  ],
)
def test_rules_without_effect_are_errors(options, name):
  with pytest.raises(
    errors.ConfigError, match=f'`{name}` must be rules that each are the first match of a name'
  ):
    StepParams(**options).check({'hidden': jnp.ones(3)}, {'inputs': jnp.ones(3, jnp.int32)})
  StepParams(train_dtype=[('batch/inputs', None), ('hidden', 'bfloat16')]).check(
    {'hidden': jnp.ones(3)}, {'inputs': jnp.ones(3, jnp.int32)}
  )


def test_training_in_float16_is_warned_of():
  with pytest.warns(UserWarning, match="Trainer.train_dtype`='float16' .* Set 'bfloat16'"):
    step_params_lib.StepParams(train_dtype='float16')
  # Warnings are errors in tests. A choice of arrays is the user's.
  step_params_lib.StepParams(train_dtype=[('w$', 'float16')])
