"""Learning rates: invalid schedules are rejected, configured ones are reported, and none is applied twice."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import optimizers
from t5x_lite import schedules
from t5x_lite.errors import ConfigError
from t5x_lite.trainer import train_step
from tests.apps.train import toy_run
from tests.models import toy_model

_PARAMS = {
  'w': np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
  'b': np.full([4], 0.5, np.float32),
}
_REQUIRED = {
  'dpsgd': {'l2_norm_clip': 1.0, 'noise_multiplier': 0.1},
  'schedule_free': {'base_optimizer': optax.sgd(0.1)},
}
_WITH_RATES = [
  name
  for name, factory in ((name, getattr(optimizers, name)) for name in dir(optimizers))
  if inspect.isfunction(factory)
  and 'learning_rate' in inspect.signature(factory).parameters
  and name not in ('rprop', 'relative_step')
]


def _schedule(step):
  """Return a learning rate that shows its step."""
  return 0.5 + jnp.asarray(step, jnp.float32)


# ---- invalid values of schedules -------------------------------------------------------------------------------------

_BAD = [
  (lambda step: jnp.where(step < 3, 0.1, jnp.nan), 'nan at step 9'),
  (lambda step: 1.0 / jnp.asarray(step, jnp.float32), 'inf at step 0'),
  (lambda step: 0.5 - 0.1 * jnp.asarray(step, jnp.float32), '-0.4 at step 9'),
  (optax.linear_schedule(0.0, -1.0, 9), '-1 at step 9'),
]


@pytest.mark.parametrize('schedule,message', _BAD)
def test_schedules_are_checked_in_the_first_and_the_last_step(schedule, message):
  state = jax.eval_shape(lambda: toy_model.make_state(toy_model.make_model(optimizers.adamw())))
  train_step.check_trainable(state, schedule)  # Shapes have no step, and nothing is computed.
  for optimizer_def, trainers, owner in (
    (optimizers.adamw(), schedule, 'Trainer.learning_rate_fn'),
    (optimizers.sgd(schedule), None, 'sgd.learning_rate'),
    (optimizers.Adafactor(schedule), None, 'Adafactor.learning_rate'),
    (
      optimizers.MultiOptimizer([('a', optimizers.sgd(0.1)), ('b', optimizers.lion(schedule))]),
      None,
      r'\.1/learning_rate',
    ),
  ):
    with pytest.raises(ConfigError, match=f'{owner}.* must be .*got {message}'):
      train_step.check_schedules(optimizer_def, trainers, [0, 9])


def test_a_rate_of_zero_and_numbers_are_valid():
  for schedule in (
    optax.linear_schedule(0.0, 1.0, 4),
    optax.linear_schedule(1.0, 0.0, 4),
    lambda step: 1,
  ):
    train_step.check_schedules(optimizers.adamw(0.1), schedule, [0, 4, 2**31 - 1])


def test_a_trainer_with_a_state_checks_its_step():
  state = jax.jit(lambda: toy_model.make_state(toy_model.make_model(optimizers.sgd())))()
  with pytest.raises(ConfigError, match='got nan at step 0'):
    train_step.check_trainable(state, lambda step: jnp.where(step < 1, jnp.nan, 0.1))


def test_the_run_is_rejected_before_its_first_step(tmp_path):
  model = toy_run.model(optimizers.sgd(_BAD[2][0]))
  with pytest.raises(
    ConfigError, match='`sgd.learning_rate` must be a finite number .*, got -0.4 at step 9'
  ):
    toy_run.train(tmp_path / 'run', 10, model=model, trainer_kwargs={'learning_rate_fn': None})
  assert not list((tmp_path / 'run').glob('checkpoint_*'))


# ---- configured learning rates are reported --------------------------------------------------------------------------


@pytest.mark.parametrize('name', _WITH_RATES)
def test_a_schedule_is_reported_where_the_update_takes_it(name):
  factory = getattr(optimizers, name)
  optimizer = jax.eval_shape(
    lambda: factory(learning_rate=_schedule, **_REQUIRED.get(name, {})).create(
      jax.tree.map(jnp.asarray, _PARAMS)
    )
  )
  # Parameters were restored at step 100 and the optimizer was not, so its schedule starts at 0.
  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), optimizer.state)
  rates = optimizer.optimizer_def.learning_rates(zeros.replace(step=jnp.int32(100)), is_passed=True)
  assert {key: float(rate) for key, rate in rates.items()} == {'learning_rate': 0.5}
  assert rates['learning_rate'].dtype == jnp.float32
  number = factory(learning_rate=0.25, **_REQUIRED.get(name, {}))
  assert number.configured_learning_rates == {'learning_rate': 0.25}
  assert factory(**_REQUIRED.get(name, {})).configured_learning_rates == {}


def test_the_rate_reported_is_the_rate_of_the_update():
  for make in (
    optimizers.sgd,
    lambda rate: optimizers.chain([optax.scale(1.0), optimizers.sgd(rate)]),
    lambda rate: optimizers.Adafactor(
      rate,
      multiply_by_parameter_scale=False,
      factored=False,
      decay_rate=0.0,
      clipping_threshold=None,
    ),
  ):
    optimizer = make(_schedule).create({'p': jnp.zeros([])})
    step = jax.jit(
      lambda optimizer: (
        optimizer.optimizer_def.learning_rates(optimizer.state, is_passed=False),
        optimizer.apply_gradient({'p': 1.0}),
      )
    )
    for _ in range(3):
      rates, updated = step(optimizer)
      rate = rates['learning_rate']
      np.testing.assert_allclose(optimizer.target['p'] - updated.target['p'], rate, rtol=1e-6)
      optimizer = updated


def _metrics(optimizer_def, learning_rate=None):
  """Return the learning rates among the metrics of one step."""

  @jax.jit  # The update itself is left out by the compiler: nothing depends on it.
  def rates():
    state = toy_model.make_state(toy_model.make_model(optimizer_def))
    grads = jax.tree.map(jnp.ones_like, state.params)
    _, metrics = train_step.apply_grads(state, grads, {}, learning_rate, None)
    return {name: metric.compute() for name, metric in metrics.items() if 'learning_rate' in name}

  return {name: round(float(rate), 6) for name, rate in rates().items()}


@pytest.mark.parametrize(
  'make,passed,expected',
  [
    (optimizers.sgd, 0.125, {'learning_rate': 0.125, 'learning_rate/current': 0.125}),
    (lambda: optimizers.sgd(_schedule), None, {'learning_rate': 0.5, 'learning_rate/current': 0.5}),
    (lambda: optimizers.sgd(0.25), None, {'learning_rate': 0.25, 'learning_rate/current': 0.25}),
    (
      lambda: optimizers.Adafactor(0.25),
      None,
      {'learning_rate': 0.25, 'learning_rate/current': 0.25},
    ),
    (
      lambda: optimizers.Adafactor(0.25),
      0.125,
      {'learning_rate': 0.125, 'learning_rate/current': 0.125},
    ),
    (
      lambda: optimizers.chain([optax.clip(1.0), optimizers.sgd(0.25)]),
      None,
      {'learning_rate': 0.25, 'learning_rate/current': 0.25},
    ),
    # Unknown, or of several optimizers.
    (lambda: optimizers.OptaxWrapper(optax.sgd(0.25)), None, {}),
    (lambda: optimizers.rprop(0.25), None, {}),
    (lambda: optimizers.sam(optimizers.sgd(0.25), optimizers.sgd(0.5)), None, {}),
    (
      lambda: optimizers.OptaxWrapper(optax.sgd(0.25), own_learning_rate=0.25),
      None,
      {'learning_rate': 0.25, 'learning_rate/current': 0.25},
    ),
    (
      lambda: optimizers.MultiOptimizer(
        [('embedding', optimizers.sgd(0.25)), ('logits', optimizers.sgd())]
      ),
      0.125,
      {'learning_rate': 0.125, 'learning_rate/current': 0.125, 'optimizer/0/learning_rate': 0.25},
    ),
    (
      lambda: optimizers.MultiOptimizer(
        [('embedding', optimizers.sgd(0.25)), ('logits', optimizers.Adafactor(0.5))]
      ),
      None,
      {'optimizer/0/learning_rate': 0.25, 'optimizer/1/learning_rate': 0.5},
    ),
    # The trainer's replaces Adafactor's where every part has one.
    (
      lambda: optimizers.MultiOptimizer(
        [('embedding', optimizers.sgd(0.25)), ('logits', optimizers.Adafactor(0.5))]
      ),
      0.125,
      {'learning_rate': 0.125, 'learning_rate/current': 0.125, 'optimizer/0/learning_rate': 0.25},
    ),
    (
      lambda: optimizers.scaled_adam(
        param_labels=[('logits', 'slow')], group_options={'slow': {'learning_rate': 0.5}}
      ),
      0.125,
      {
        'learning_rate': 0.125,
        'learning_rate/current': 0.125,
        'optimizer/scaled_adam/slow/learning_rate': 0.5,
      },
    ),
  ],
)
def test_metrics_of_rates(make, passed, expected):
  assert _metrics(make(), passed) == expected


def test_the_configured_rate_of_a_wrapper_is_checked():
  with pytest.raises(
    ConfigError, match='learning_rate` must be a number >= 0 or a schedule, got -1'
  ):
    optimizers.OptaxWrapper(optax.sgd(0.1), own_learning_rate=-1)
  with pytest.raises(ConfigError, match='learning_rate_factory and own_learning_rate'):
    optimizers.OptaxWrapper(learning_rate_factory=optax.sgd, own_learning_rate=0.1)


# ---- no rate is applied twice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'make',
  [
    lambda: optimizers.chain([optimizers.adamw(), optimizers.lion()]),
    lambda: optimizers.chain(
      [optimizers.chain([optimizers.adamw()]), optax.clip(1.0), optimizers.lion()]
    ),
  ],
)
def test_two_in_a_chain_do_not_both_take_the_trainers_rate(make):
  with pytest.raises(
    ConfigError, match='adamw and lion each take .* 2 times.*scale_by_lion.*MultiOptimizer'
  ):
    make()


def test_one_in_a_chain_takes_the_trainers_rate():
  optimizer = optimizers.chain(
    [optax.scale(2.0), optimizers.sgd(), optimizers.reduce_on_plateau()]
  ).create({'p': 1.0})
  assert (
    float(optimizer.apply_gradient({'p': 1.0}, learning_rate=0.25, value=1.0).target['p']) == 0.5
  )


# ---- optimizers that the trainer rejects -----------------------------------------------------------------------------


@pytest.mark.parametrize(
  'make,message',
  [
    (optimizers.reduce_on_plateau, 'only scales the updates.*last in a chain'),
    (lambda: optimizers.chain([optimizers.reduce_on_plateau()]), 'only scales the updates'),
    (lambda: optimizers.OptaxWrapper(optax.contrib.reduce_on_plateau()), 'only scales the updates'),
    (
      lambda: optimizers.distributed_shampoo(0.1, batch_axis_name='batch'),
      "batch_axis_name='batch' is for.*Leave it out",
    ),
    (
      lambda: optimizers.distributed_shampoo(0.1, num_devices_for_pjit=2),
      'no effect without shard_optimizer_states',
    ),
    (
      lambda: optimizers.chain(
        [optax.clip(1.0), optimizers.distributed_shampoo(0.1, num_devices_for_pjit=2)]
      ),
      'no effect without shard_optimizer_states',
    ),
    (
      lambda: optimizers.MultiOptimizer(
        [('.', optimizers.distributed_shampoo(0.1, num_devices_for_pjit=2))]
      ),
      'no effect without shard_optimizer_states',
    ),
    (
      lambda: optimizers.sam(optax.sgd(0.1), optax.sgd(0.1), batch_axis_name='batch'),
      "batch_axis_name='batch' is for",
    ),
  ],
)
def test_options_without_effect_are_rejected_by_the_trainer(make, message):
  state = jax.eval_shape(lambda: toy_model.make_state(toy_model.make_model(make())))
  with pytest.raises(ConfigError, match=f'The trainer cannot train with .*{message}'):
    train_step.check_trainable(state, None)


@pytest.mark.parametrize(
  'make',
  [
    lambda: optimizers.chain([optax.scale(-0.1), optimizers.reduce_on_plateau()]),
    lambda: optimizers.distributed_shampoo(
      0.1, num_devices_for_pjit=2, shard_optimizer_states=True
    ),
    lambda: optimizers.sam(optax.sgd(0.1), optax.sgd(0.1)),
  ],
)
def test_options_with_effect_are_accepted_by_the_trainer(make):
  state = jax.eval_shape(lambda: toy_model.make_state(toy_model.make_model(make())))
  train_step.check_trainable(state, None)


# ---- invalid updates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'update,message',
  [
    (lambda u: jnp.ones([]), r"shape \[\] .* 'a/p' of shape \[3\]"),
    (lambda u: jnp.ones([1]), r'shape \[1\]'),
    (lambda u: jnp.ones([2, 3]), r'shape \[2, 3\]'),
    (lambda u: u > 0, 'dtype bool'),
    (lambda u: u.astype(jnp.complex64), 'dtype complex64'),
  ],
)
def test_updates_of_another_shape_or_kind_are_rejected_when_traced(update, message):
  optimizer_def = optimizers.OptaxWrapper(
    optax.stateless(lambda updates, params: jax.tree.map(update, updates))
  )
  params = {'a': {'p': jnp.ones([3])}}
  with pytest.raises(ConfigError, match=f'The optimizer OptaxWrapper returned .*{message}'):
    jax.eval_shape(lambda: optimizer_def.create(params).apply_gradient(params))


def test_integers_and_narrow_updates_are_taken():
  for dtype in (jnp.int32, jnp.bfloat16, jnp.float16):
    optimizer_def = optimizers.OptaxWrapper(
      optax.stateless(
        lambda updates, params, dtype=dtype: jax.tree.map(lambda u: u.astype(dtype), updates)
      )
    )
    updated = optimizer_def.create({'p': jnp.ones([3])}).apply_gradient({'p': jnp.ones([3])})
    np.testing.assert_array_equal(updated.target['p'], 2.0)


def test_a_schedule_is_traced_once_for_all_checked_steps():
  calls = []
  schedules.check_learning_rate_values(
    lambda step: calls.append(step) or step * 0.1, 'mine', [3, 3, 5]
  )
  assert len(calls) == 2 and all(isinstance(step, jax.core.Tracer) for step in calls)


def test_the_seed_of_noise_has_two_names():
  def updated(**options):
    state = optimizers.noisy_sgd(0.1, **options).create(_PARAMS)
    return state.apply_gradient(_PARAMS).target['b']

  np.testing.assert_array_equal(updated(seed=3), updated(key=3))
  np.testing.assert_array_equal(updated(), updated(key=0))
  assert np.any(updated() != updated(seed=3))
  with pytest.raises(ConfigError, match='seed. must be None if key is given'):
    optimizers.noisy_sgd(0.1, key=0, seed=1)
