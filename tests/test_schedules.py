"""Schedules: T5X's recorded tables, formulas, tracing, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_lite import errors
from t5x_lite import schedules
from tests import golden_data

GOLDEN, ARRAYS = golden_data.load('t5x/lr_schedules')


@pytest.mark.parametrize('index', range(len(GOLDEN['cases'])))
def test_tables_of_t5x(index):
  schedule = schedules.create_learning_rate_scheduler(**GOLDEN['cases'][index])
  eager = [schedule(int(step)) for step in ARRAYS['steps']]
  np.testing.assert_allclose(eager, ARRAYS[f'lr/{index}'], rtol=1e-6)
  traced = jax.jit(jax.vmap(schedule))(jnp.asarray(ARRAYS['steps']))
  np.testing.assert_allclose(traced, ARRAYS[f'lr/{index}'], rtol=1e-6)
  assert traced.dtype == jnp.float32


SETTINGS = dict(
  base_learning_rate=0.3, warmup_steps=8, decay_factor=0.25, steps_per_decay=5, steps_per_cycle=20
)
FORMULAS = {
  'constant': lambda n: 0.3,
  'linear_warmup': lambda n: min(1.0, n / 8),
  'linear_decay': lambda n: 0.3 * min(n / 8, 1 + 0.25 * (8 - n)),
  'rsqrt_decay': lambda n: max(n, 8) ** -0.5,
  'rsqrt_normalized_decay': lambda n: (8 / max(n, 8)) ** 0.5,
  'decay_every': lambda n: 0.25 ** (n // 5),
  'cosine_decay': lambda n: 0.5 * (1 + np.cos(np.pi * (max(0, n - 8) / 20 % 1))),
}
STEPS = (0, 1, 4, 5, 7, 8, 9, 10, 15, 17, 18, 27, 28, 29, 48, 1000)


@pytest.mark.parametrize('name', FORMULAS)
def test_each_factor_is_its_formula(name):
  schedule = schedules.create_learning_rate_scheduler(name, **SETTINGS)
  expected = [max(1e-8, FORMULAS[name](n)) for n in STEPS]
  np.testing.assert_allclose([schedule(n) for n in STEPS], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize('period', [41, 55, 61, 82, 83, 97, 1000, 20000])
def test_periods_end_at_their_step_compiled_or_not(period):
  # 1 / 41 rounded to float32, times 41, is below 1.
  decay = schedules.create_learning_rate_scheduler(
    'decay_every', steps_per_decay=period, decay_factor=0.5
  )
  cosine = schedules.create_learning_rate_scheduler(
    'cosine_decay', steps_per_cycle=period, warmup_steps=1
  )
  for wrap in (lambda fn: fn, jax.jit):
    for k in range(1, 6):
      before, at = wrap(decay)(k * period - 1), wrap(decay)(k * period)
      assert (float(before), float(at)) == (0.5 ** (k - 1), 0.5**k)
      before, at = wrap(cosine)(k * period), wrap(cosine)(k * period + 1)
      assert float(before) < 0.01 and float(at) == 1.0


def test_factors_multiply_with_offset_and_floor():
  schedule = schedules.create_learning_rate_scheduler(
    'constant*linear_warmup * decay_every', step_offset=100, min_learning_rate=0.01, **SETTINGS
  )
  for n in STEPS:
    expected = max(0.01, 0.3 * FORMULAS['linear_warmup'](n) * FORMULAS['decay_every'](n))
    assert float(schedule(100 + n)) == pytest.approx(expected, rel=1e-5)
  assert float(schedule(3)) == pytest.approx(0.01)


def test_serves_as_an_optax_schedule_and_traces_as_one():
  schedule = schedules.create_learning_rate_scheduler('linear_warmup', warmup_steps=4)
  optimizer = optax.sgd(schedule)
  params = jnp.zeros(())
  state = optimizer.init(params)
  step = jax.jit(lambda state: optimizer.update(jnp.ones(()), state, params))
  rates = []
  for _ in range(4):
    update, state = step(state)
    rates.append(-float(update))
  np.testing.assert_allclose(rates, [1e-8, 0.25, 0.5, 0.75], rtol=1e-6)
  joined = optax.join_schedules([schedule, optax.constant_schedule(0.5)], [4])
  assert [float(joined(n)) for n in (2, 9)] == [0.5, 0.5]
  # The protocol requires only a learning rate for a step, traced or not.
  fn: schedules.LearningRateCallable = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 4)
  assert float(jax.jit(fn)(2)) == 1.0


@pytest.mark.parametrize(
  'options, message',
  [
    ({'factors': 'constant * linear_warmpu'}, "Did you mean 'linear_warmup'"),
    ({'factors': ''}, "one of 'constant'"),
    ({'factors': 'constant * '}, "one of 'constant'"),
    ({'factors': 'linear_warmup', 'warmup_steps': 0}, 'warmup_steps` must be a number >= 1, got 0'),
    ({'factors': 'linear_decay', 'warmup_steps': 0}, 'warmup_steps` must be a number >= 1, got 0'),
    ({'factors': 'rsqrt_decay', 'warmup_steps': 0}, 'warmup_steps` must be a number >= 1, got 0'),
    (
      {'factors': 'rsqrt_normalized_decay', 'warmup_steps': 0},
      'warmup_steps` must be a number >= 1, got 0',
    ),
    (
      {'factors': 'decay_every', 'steps_per_decay': 0},
      'steps_per_decay` must be a number >= 1, got 0',
    ),
    (
      {'factors': 'cosine_decay', 'steps_per_cycle': 0},
      'steps_per_cycle` must be a number >= 1, got 0',
    ),
  ],
)
def test_invalid_schedules_are_rejected(options, message):
  with pytest.raises(errors.ConfigError, match=message):
    schedules.create_learning_rate_scheduler(**options)


def test_settings_that_no_factor_reads_are_not_checked():
  schedule = schedules.create_learning_rate_scheduler(
    'constant * cosine_decay', warmup_steps=0, steps_per_decay=0
  )
  assert float(schedule(0)) == 0.5


def test_the_reason_why_a_schedule_fails_is_one_line():
  def schedule(step):
    raise RuntimeError(f'no more\nand where, after {step}')

  with pytest.raises(
    errors.ConfigError, match='fails for a traced step \\(RuntimeError: no more\\). '
  ) as error:
    schedules.check_learning_rate_fn(schedule, 'The rate of the step')
  assert '\n' not in str(error.value) and 'and where' not in str(error.value)


def test_rates_are_checked_without_a_cpu_backend(monkeypatch):
  """With JAX_PLATFORMS=cuda JAX has no platform 'cpu'."""
  local_devices = jax.local_devices

  def fake_local_devices(backend=None):
    if backend == 'cpu':
      raise RuntimeError('Unknown backend cpu')
    return local_devices()

  monkeypatch.setattr(jax, 'local_devices', fake_local_devices)
  schedule = schedules.create_learning_rate_scheduler()
  schedules.check_learning_rate_values(schedule, 'Trainer.learning_rate_fn', [0, 10])
  with pytest.raises(errors.ConfigError, match='got -10 at step 10'):
    schedules.check_learning_rate_values(lambda step: -1.0 * step, 'rate', [0, 10])
