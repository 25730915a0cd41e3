"""Averages of parameters: equal to their definition, in states, on meshes and in whole runs."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import errors
from t5x_lite import optimizers
from t5x_lite import train_state as train_state_lib
from t5x_lite import trainer
from t5x_lite.trainer import averaging
from t5x_lite.trainer import state_init
from tests.apps.train import toy_run
from tests.models import toy_model


def _expected(ema, params):
  """Return the average of `params`, one value per update and that of step 0 first, in float64."""
  start, average = ema.start_step, params[min(ema.start_step, len(params) - 1)].astype(np.float64)
  later = params[start + 1 :]
  if ema.debias and later:
    weights = np.float64(ema.decay) ** np.arange(len(later))[::-1]
    return np.average(np.stack(later).astype(np.float64), axis=0, weights=weights)
  for count, value in enumerate(later):
    decay = float(ema.decay(count)) if callable(ema.decay) else ema.decay
    average = decay * average + (1 - decay) * value
  return average


@pytest.mark.parametrize(
  'options',
  [
    {'decay': 0.9},
    {'decay': 0.0},
    {'decay': 0.9, 'start_step': 3},
    {'decay': 0.9, 'debias': True},
    {'decay': 0.0, 'debias': True},
    {'decay': 0.999, 'debias': True, 'start_step': 3},
    {'decay': averaging.Warmup(decay=0.5), 'start_step': 2},
  ],
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_definition(options, dtype):
  ema = averaging.ParamEma(**options)
  params = [jnp.asarray(x, dtype) for x in np.random.default_rng(0).normal(size=(9, 5))]
  average = ema.init({'w': params[0]})
  update = jax.jit(ema.update)
  for step, value in enumerate(params):
    if step:
      average = update(average, {'w': value}, jnp.int32(step))
    assert average['w'].dtype == jnp.float32
    expected = _expected(ema, [np.asarray(p, np.float32) for p in params[: step + 1]])
    np.testing.assert_allclose(average['w'], expected, rtol=3e-5, atol=1e-6)
    if step <= ema.start_step:
      np.testing.assert_array_equal(average['w'], value.astype(jnp.float32))


def test_arrays_that_are_no_floats_are_copied():
  ema = averaging.ParamEma(decay=0.5)
  average = ema.update(ema.init({'n': jnp.int32(3)}), {'n': jnp.int32(4)}, jnp.int32(1))
  assert average['n'] == 4 and average['n'].dtype == jnp.int32


@pytest.mark.parametrize(
  'options, message',
  [
    ({'decay': 1.0}, r'ParamEma.decay` must be .* got 1.0'),
    ({'decay': 0.9, 'start_step': -1}, 'start_step'),
    ({'decay': 0.9, 'start_step': 2**31}, 'start_step'),
    ({'decay': 0.9, 'debias': 'no'}, 'debias'),
    ({'decay': 0.9, 'evaluate': None}, 'evaluate'),
    (
      {'decay': averaging.Warmup(decay=0.9), 'debias': True},
      r'averaging.Warmup\(decay=0.999\), needs no correction',
    ),
  ],
)
def test_errors(options, message):
  with pytest.raises(errors.ConfigError, match=message):
    averaging.ParamEma(**options)


def test_a_schedule_out_of_range_is_found_before_the_run():
  ema = averaging.ParamEma(decay=lambda count: 0.001 * count, start_step=100)
  ema.check_decay([0, 1099])
  with pytest.raises(errors.ConfigError, match=r'in \[0, 1\) after 1000 updates, got 1.0'):
    ema.check_decay([0, 1100])
  for decay in ('a', None, np.zeros(3)):
    with pytest.raises(errors.ConfigError, match='ParamEma.decay` must be in'):
      averaging.ParamEma(decay=lambda count, decay=decay: decay).check_decay([0])


def test_optimizers_with_their_own_average_are_an_error():
  variables = toy_model.make_model().get_initial_variables(
    jax.random.key(0), {'decoder_input_tokens': (8, 6)}
  )
  with pytest.raises(
    errors.ConfigError, match='`train.param_ema` must be None with the optimizer schedule_free'
  ):
    train_state_lib.FlaxOptimTrainState.create(
      optimizers.schedule_free_sgd(0.1), variables, averaging.ParamEma(decay=0.9)
    )


def test_state():
  model, ema = toy_run.model(optimizers.sgd(0.1)), averaging.ParamEma(decay=0.9)
  make = functools.partial(
    state_init.TrainStateInitializer,
    model.optimizer_def,
    model.get_initial_variables,
    {'decoder_input_tokens': (8, 6)},
    toy_run.partitioner(),
  )
  initializer = make(param_ema=ema)
  state = initializer.from_scratch(jax.random.key(1))
  grads = jax.tree.map(jnp.ones_like, state.params)
  stepped = jax.jit(lambda state: state.apply_gradient(grads))(state)
  assert set(stepped.state_dict()) == {'target', 'state', 'param_average'}
  for average, param, before in zip(
    *map(jax.tree.leaves, (stepped.param_average, stepped.params, state.params)), strict=True
  ):
    np.testing.assert_allclose(average, before - 0.01, rtol=1e-5, atol=1e-7)
    assert average.sharding == param.sharding
  assert initializer.train_state_axes.param_average == initializer.train_state_axes.params
  assert stepped.evaluates_other_params and stepped.eval_params is not stepped.params
  jax.tree.map(np.testing.assert_array_equal, stepped.eval_params, stepped.param_average)
  only_saved = make(
    param_ema=averaging.ParamEma(decay=0.9, evaluate=False)
  ).global_train_state_shape
  assert not only_saved.evaluates_other_params
  # A start from parameters alone begins with their copies, in buffers of their own.
  begun = initializer.begin_from_params(state.state_dict())
  jax.tree.map(np.testing.assert_array_equal, begun['param_average'], state.state_dict()['target'])
  jax.tree.map(lambda x: x.delete(), begun['param_average'])
  jax.block_until_ready(jax.tree.map(lambda x: x + 1, state.params))


@pytest.fixture(scope='module')
def averaged(tmp_path_factory):
  """A run of 20 steps with an average."""
  model_dir = tmp_path_factory.mktemp('averaged')
  toy_run.train(model_dir, param_ema=averaging.ParamEma(decay=0.8))
  return model_dir


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
  """A run of 6 steps without an average."""
  model_dir = tmp_path_factory.mktemp('plain')
  toy_run.train(model_dir, 6)
  return model_dir


def test_a_run_evaluates_its_average(averaged, tmp_path):
  saved = toy_run.saved(averaged, 20)[0]
  toy_run.train(tmp_path)
  plain, rows = toy_run.saved(tmp_path, 20)[0], toy_run.lines(averaged)
  jax.tree.map(np.testing.assert_array_equal, saved['target'], plain['target'])
  assert rows['train'] == toy_run.lines(tmp_path)['train']
  # The model with the saved average has the losses of the last evaluation.
  model, batches = (
    toy_run.model(),
    data.open_eval_iterators(
      toy_run.dataset('validation'),
      toy_run.partitioner().get_data_layout(8),
      None,
      feature_converter='encoder_decoder',
    )['letters'],
  )
  totals = [
    model.eval_fn(saved['param_average'], jax.tree.map(jnp.asarray, dict(batch)))[1]['loss']
    for batch in batches
  ]
  merged = functools.reduce(lambda a, b: a.merge(b), totals)
  assert rows['training_eval/letters'][-1]['loss'] == pytest.approx(
    float(merged.compute()), rel=1e-5
  )
  assert rows['training_eval/letters'] != toy_run.lines(tmp_path)['training_eval/letters']
  assert not checkpoints.read_metadata(averaged / 'checkpoint_20')['optimizer'][
    'evaluates_other_params'
  ]


def test_ten_and_ten_steps_equal_twenty(averaged, tmp_path):
  for steps in (10, 20):
    toy_run.train(tmp_path, steps, param_ema=averaging.ParamEma(decay=0.8))
  toy_run.assert_same_run(tmp_path, averaged, 20)


def test_a_run_that_starts_from_a_checkpoint_without_average_begins_one(plain, tmp_path):
  restore = checkpoints.RestoreCheckpointConfig(path=str(plain))
  toy_run.train(
    tmp_path / 'new',
    12,
    restore=restore,
    param_ema=averaging.ParamEma(decay=0.0),
    save={'period': 6},
  )
  saved = toy_run.saved(tmp_path / 'new', 12)[0]
  jax.tree.map(np.testing.assert_array_equal, saved['target'], saved['param_average'])


@pytest.mark.parametrize(
  'options', [{'decay': 0.9, 'debias': True}, {'decay': averaging.Warmup(decay=0.9)}]
)
def test_an_average_that_begins_after_its_start_step_is_an_error(options, plain, tmp_path):
  restore = checkpoints.RestoreCheckpointConfig(path=str(plain))
  with pytest.raises(
    errors.ConfigError, match='ParamEma.start_step` must be at least 6 with .*, got 0. Set it to 6.'
  ):
    toy_run.train(tmp_path / 'early', 12, restore=restore, param_ema=averaging.ParamEma(**options))
  # A run that resumes is not affected.
  ema = averaging.ParamEma(**options, start_step=6)
  for steps in (10, 12):
    toy_run.train(tmp_path / 'new', steps, restore=restore, param_ema=ema)
  toy_run.train(tmp_path / 'resumed', 6, param_ema=averaging.ParamEma(**options))
  toy_run.train(tmp_path / 'resumed', 8, param_ema=averaging.ParamEma(**options))


def test_errors_about_an_average_only_name_its_options(averaged, plain, tmp_path):
  with pytest.raises(
    errors.CheckpointError, match='A run that resumes must keep it: set `train.param_ema` as before'
  ):
    toy_run.train(
      tmp_path / 'new', 22, restore=checkpoints.RestoreCheckpointConfig(path=str(averaged))
    )
  shutil.copytree(plain, tmp_path / 'plain')
  with pytest.raises(errors.CheckpointError, match='A run cannot add an average when it resumes'):
    toy_run.train(tmp_path / 'plain', 12, param_ema=averaging.ParamEma(decay=0.9))
  # The remedies.
  for name, options in {
    'as_parameters': {'use_param_average': True},
    'dropped': {'assignment_map': [('param_average/.*', None)]},
  }.items():
    restore = checkpoints.RestoreCheckpointConfig(path=str(averaged), **options)
    toy_run.train(tmp_path / name, 22, restore=restore)
    assert 'param_average' not in toy_run.saved(tmp_path / name, 22)[0]


def test_debias_cannot_count_skipped_updates(tmp_path):
  policy = {'non_finite_policy': trainer.NonFinitePolicy(action='skip')}
  with pytest.raises(
    errors.ConfigError, match="ParamEma.debias` must be False with NonFinitePolicy.action='skip'"
  ):
    toy_run.train(
      tmp_path, 2, param_ema=averaging.ParamEma(decay=0.9, debias=True), trainer_kwargs=policy
    )
