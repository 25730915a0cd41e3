"""Learning-rate schedules: functions of the step count that can be traced.

A schedule is a callable from a step to a learning rate, as in optax; schedules of both packages are interchangeable.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.types import Array, ArrayLike

__all__ = [
  'LearningRateCallable',
  'check_learning_rate_fn',
  'check_learning_rate_values',
  'create_learning_rate_scheduler',
  'linear_warmup_and_decay',
]


class LearningRateCallable(Protocol):
  """Type of a schedule; every optax schedule has it."""

  def __call__(self, step: ArrayLike) -> Array:
    """Return the learning rate, a float32 scalar, of the update that follows `step` earlier ones."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
  """Product of factors and their numbers; see `create_learning_rate_scheduler`."""

  factors: str
  base_learning_rate: float
  warmup_steps: int
  decay_factor: float
  steps_per_decay: int
  steps_per_cycle: int
  step_offset: int
  min_learning_rate: float

  def __post_init__(self) -> None:
    owner = 'create_learning_rate_scheduler'
    not_negative = checks.number(at_least=0)
    checks.check(
      owner,
      vars(self),
      base_learning_rate=not_negative,
      decay_factor=not_negative,
      min_learning_rate=not_negative,
      **{
        _DIVISORS[name]: checks.number(at_least=1, remedy=f'The factor {name!r} divides by it.')
        for name in self.names
        if name in _DIVISORS
      },
    )
    for name in self.names:
      checks.check(
        owner, {'factors': name}, factors=checks.one_of(_FACTORS, 'Join factors by "*".')
      )

  @property
  def names(self) -> list[str]:
    """Names of the factors."""
    return [name.strip() for name in self.factors.split('*')]

  def __call__(self, step: ArrayLike) -> Array:
    """Return the learning rate, a float32 scalar, of the update that follows `step` earlier ones."""
    elapsed = jnp.maximum(0.0, jnp.asarray(step - self.step_offset, jnp.float32))
    rate = jnp.asarray(1.0, jnp.float32)
    for name in self.names:
      rate = rate * _FACTORS[name](elapsed, self)
    return jnp.maximum(rate, self.min_learning_rate).astype(jnp.float32)


def _linear_decay(step, schedule):
  rise = step / schedule.warmup_steps
  fall = 1.0 + schedule.decay_factor * (schedule.warmup_steps - step)
  return schedule.base_learning_rate * jnp.minimum(rise, fall)


def _cosine_decay(step, schedule):
  # The remainder comes before the division: compiled, a division by a constant is a multiplication by its rounded
  # inverse, which would put the start of some cycles one step late.
  step_of_cycle = jnp.remainder(
    jnp.maximum(0.0, step - schedule.warmup_steps), schedule.steps_per_cycle
  )
  return jnp.maximum(
    0.0, 0.5 * (1.0 + jnp.cos(math.pi * (step_of_cycle / schedule.steps_per_cycle)))
  )


def _decay_every(step, schedule):
  # Not floor(step / steps_per_decay), for the same reason.
  return schedule.decay_factor ** jnp.floor_divide(step, schedule.steps_per_decay)


# Name of a factor: its value at a (float32, offset) step.
_FACTORS: dict[str, Callable[[Array, _Schedule], ArrayLike]] = {
  'constant': lambda step, s: s.base_learning_rate,
  'linear_warmup': lambda step, s: jnp.minimum(1.0, step / s.warmup_steps),
  'linear_decay': _linear_decay,
  'rsqrt_decay': lambda step, s: 1.0 / jnp.sqrt(jnp.maximum(step, s.warmup_steps)),
  'rsqrt_normalized_decay': lambda step, s: jnp.sqrt(
    s.warmup_steps / jnp.maximum(step, s.warmup_steps)
  ),
  'decay_every': _decay_every,
  'cosine_decay': _cosine_decay,
}
# Settings that a factor divides by, so that 0 would give a NaN or infinite learning rate.
_DIVISORS = {
  'linear_warmup': 'warmup_steps',
  'linear_decay': 'warmup_steps',
  'rsqrt_decay': 'warmup_steps',
  'rsqrt_normalized_decay': 'warmup_steps',
  'decay_every': 'steps_per_decay',
  'cosine_decay': 'steps_per_cycle',
}


def create_learning_rate_scheduler(
  factors: str = 'constant * linear_warmup * rsqrt_decay',
  base_learning_rate: float = 0.5,
  warmup_steps: int = 1000,
  decay_factor: float = 0.5,
  steps_per_decay: int = 20000,
  steps_per_cycle: int = 100000,
  step_offset: int = 0,
  min_learning_rate: float = 1e-8,
) -> LearningRateCallable:
  """Return the schedule that is the product of the named factors, at least `min_learning_rate`.

  With n = max(0, step - step_offset), the factors are

  * `constant`: base_learning_rate
  * `linear_warmup`: min(1, n / warmup_steps)
  * `linear_decay`: base_learning_rate * min(n / warmup_steps, 1 + decay_factor * (warmup_steps - n)): rises to
    base_learning_rate at warmup_steps, then falls by decay_factor of it per step; it includes the base rate, so do
    not combine it with `constant`
  * `rsqrt_decay`: 1 / sqrt(max(n, warmup_steps))
  * `rsqrt_normalized_decay`: the same, scaled to start at 1
  * `decay_every`: decay_factor ** floor(n / steps_per_decay)
  * `cosine_decay`: a half cosine from 1 to 0 over steps_per_cycle steps after warmup_steps, then again from 1

  Args:
    factors: names of factors, joined by '*'.
    base_learning_rate: value of `constant`, and peak of `linear_decay`.
    warmup_steps: number of warm-up steps, or the start of the decay.
    decay_factor: factor per period of `decay_every`, or the slope of `linear_decay`.
    steps_per_decay: number of steps per period of `decay_every`.
    steps_per_cycle: number of steps of a half cosine of `cosine_decay`.
    step_offset: step at which the schedule starts, e.g. the last step of the run whose checkpoint is fine-tuned.
    min_learning_rate: lower bound of the result.

  Returns:
    A function from a step (int or integer array) to a float32 scalar array.

  Raises:
    ConfigError: an unknown factor, a negative number, or a divisor of a factor below 1.

  >>> schedule = create_learning_rate_scheduler('constant * linear_warmup', base_learning_rate=0.1, warmup_steps=10)
  >>> print(schedule(5))
  0.05
  """
  return _Schedule(
    factors=factors,
    base_learning_rate=base_learning_rate,
    warmup_steps=warmup_steps,
    decay_factor=decay_factor,
    steps_per_decay=steps_per_decay,
    steps_per_cycle=steps_per_cycle,
    step_offset=step_offset,
    min_learning_rate=min_learning_rate,
  )


def linear_warmup_and_decay(
  base_learning_rate: float, total_steps: int, warmup_fraction: float = 0.1, step_offset: int = 0
) -> LearningRateCallable:
  """Return the schedule that rises linearly from 0 and falls linearly to 0, as is usual for fine-tuning.

  Args:
    base_learning_rate: rate after the warm-up.
    total_steps: step at which the rate is 0 again, e.g. the last step of the run.
    warmup_fraction: part of the steps from `step_offset` to `total_steps` that are the warm-up, at least 0, below 1.
    step_offset: step at which the schedule starts.

  Returns:
    See `create_learning_rate_scheduler`.

  Raises:
    ConfigError: an argument is out of its range.

  >>> schedule = linear_warmup_and_decay(0.1, total_steps=100)
  >>> [round(float(schedule(step)), 3) for step in (0, 5, 10, 55, 100)]
  [0.0, 0.05, 0.1, 0.05, 0.0]
  """
  checks.check(
    'linear_warmup_and_decay',
    locals(),
    base_learning_rate=checks.number(above=0),
    step_offset=checks.number(at_least=0, integer=True),
    total_steps=checks.number(above=step_offset, integer=True, remedy='Set TRAIN_STEPS.'),
    warmup_fraction=checks.number(at_least=0, below=1),
  )
  num_steps = total_steps - step_offset
  num_warmup_steps = warmup_fraction * num_steps

  def schedule(step: ArrayLike) -> Array:
    done = jnp.asarray(step, jnp.float32) - step_offset
    factor = (num_steps - done) / (num_steps - num_warmup_steps)
    if num_warmup_steps:
      factor = jnp.minimum(factor, done / num_warmup_steps)
    return base_learning_rate * jnp.clip(factor, 0, 1)

  return schedule


def check_learning_rate_fn(learning_rate_fn: Any, what: str) -> None:
  """Raise if a value is not a schedule; traces it once and computes nothing.

  Args:
    learning_rate_fn: expected to be a function from the step, an int32 scalar, to a real scalar.
    what: owner and name of the option, e.g. 'Trainer.learning_rate_fn', for the error message.

  Raises:
    ConfigError: the value is not callable, fails for a traced step, or does not return a real scalar.
  """
  cause = None
  if not callable(learning_rate_fn):
    got = f'{learning_rate_fn!r} of type {type(learning_rate_fn).__name__}'
  else:
    try:
      rate = jax.eval_shape(learning_rate_fn, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # users' functions may raise anything
      # JAX and gin append call sites in further lines.
      reason = str(error).partition('\n')[0].rstrip('.')
      got = f'a function that fails for a traced step ({type(error).__name__}: {reason})'
      cause = error
    else:
      got = f'a function that returns {rate!r}'
      if isinstance(rate, jax.ShapeDtypeStruct):
        is_real = jnp.issubdtype(rate.dtype, jnp.floating) or jnp.issubdtype(
          rate.dtype, jnp.integer
        )
        if rate.shape == () and is_real:
          return
        got = f'a function that returns an array of shape {list(rate.shape)} and dtype {rate.dtype}'
  raise errors.ConfigError(
    f'`{what}` must be a function from the step, an int32 scalar, to one real number, and traceable by JAX, got '
    f'{got}. Use schedules.create_learning_rate_scheduler() or an optax schedule.'
  ) from cause


def check_learning_rate_values(
  learning_rate_fn: Callable[..., Any], what: str, steps: Iterable[int]
) -> None:
  """Raise if a schedule gives an invalid learning rate at one of some steps; computes them on the host if possible.

  Args:
    learning_rate_fn: the schedule, which `check_learning_rate_fn` has accepted.
    what: owner and name of the option, for the error message.
    steps: steps to check, such as the first and the last of a run.

  Raises:
    ConfigError: a learning rate that is negative or not finite; the message has its step.
  """
  steps = sorted(set(steps))
  for step, rate in zip(steps, learning_rates_at(learning_rate_fn, steps), strict=True):
    if not 0 <= rate < math.inf:
      raise errors.ConfigError(
        f'`{what}` must be a finite number >= 0 at all steps, got {rate:g} at step {step}.'
      )


def learning_rates_at(learning_rate_fn: Callable[..., Any], steps: Sequence[int]) -> list[float]:
  """Return the learning rates of a schedule at some steps, computed on the host if JAX has its platform."""
  try:
    device = jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS=cuda leaves JAX without the CPU.
    device = jax.local_devices()[0]
  with jax.default_device(device):
    rates_of = jax.jit(lambda steps: [learning_rate_fn(step) for step in steps])
    return [float(rate) for rate in rates_of([np.int32(step) for step in steps])]
