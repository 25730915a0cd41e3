"""Learning-rate schedules: functions of the step count that can be traced.

A schedule here and a schedule of optax are the same thing, a callable from a step to a rate, and serve in each other's
place.
"""

from collections.abc import Callable, Iterable
import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from t5x_lite import errors
from t5x_lite.types import Array, ArrayLike

__all__ = ['LearningRateCallable', 'check_learning_rate_fn', 'check_learning_rate_values',
           'create_learning_rate_scheduler']


class LearningRateCallable(Protocol):
  """What serves as a schedule; every optax schedule does."""

  def __call__(self, step: ArrayLike) -> Array:
    """Returns the learning rate, a float32 scalar, of the update that follows `step` earlier ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
  """A product of factors, and the numbers that they read; see `create_learning_rate_scheduler`."""

  factors: str
  base_learning_rate: float
  warmup_steps: int
  decay_factor: float
  steps_per_decay: int
  steps_per_cycle: int
  step_offset: int
  min_learning_rate: float

  def __post_init__(self) -> None:
    for name in ('base_learning_rate', 'decay_factor', 'min_learning_rate'):
      if not 0 <= getattr(self, name) < math.inf:
        raise errors.ConfigError(f'Got {name}={getattr(self, name)}; expected a finite number, at least 0.')
    for name in self.names:
      if name not in _FACTORS:
        raise errors.ConfigError(
            f'Got the learning-rate factor {name!r} in factors={self.factors!r}; expected factors out of '
            f'{", ".join(_FACTORS)}, joined by "*".{errors.did_you_mean(name, _FACTORS)}')
      divisor = _DIVISORS.get(name)
      if divisor is not None and getattr(self, divisor) < 1:
        raise errors.ConfigError(
            f'Got {divisor}={getattr(self, divisor)}; the learning-rate factor {name!r} divides by it and expects at '
            f'least 1. Set {divisor}, or leave {name!r} out of factors={self.factors!r}.')

  @property
  def names(self) -> list[str]:
    """The factors."""
    return [name.strip() for name in self.factors.split('*')]

  def __call__(self, step: ArrayLike) -> Array:
    """Returns the learning rate, a float32 scalar, of the update that follows `step` earlier ones."""
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
  step_of_cycle = jnp.remainder(jnp.maximum(0.0, step - schedule.warmup_steps), schedule.steps_per_cycle)
  return jnp.maximum(0.0, 0.5 * (1.0 + jnp.cos(math.pi * (step_of_cycle / schedule.steps_per_cycle))))


def _decay_every(step, schedule):
  # Not floor(step / steps_per_decay), for the same reason.
  return schedule.decay_factor ** jnp.floor_divide(step, schedule.steps_per_decay)


# Name of a factor: its value at a (float32, offset) step.
_FACTORS: dict[str, Callable[[Array, _Schedule], ArrayLike]] = {
    'constant': lambda step, s: s.base_learning_rate,
    'linear_warmup': lambda step, s: jnp.minimum(1.0, step / s.warmup_steps),
    'linear_decay': _linear_decay,
    'rsqrt_decay': lambda step, s: 1.0 / jnp.sqrt(jnp.maximum(step, s.warmup_steps)),
    'rsqrt_normalized_decay': lambda step, s: jnp.sqrt(s.warmup_steps / jnp.maximum(step, s.warmup_steps)),
    'decay_every': _decay_every,
    'cosine_decay': _cosine_decay,
}
# Settings that a factor divides by, so that 0 would make the rate NaN or infinite.
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
  """Returns the schedule that is the product of the named factors, at least `min_learning_rate`.

  With n = max(0, step - step_offset), the factors are

  * `constant`: base_learning_rate
  * `linear_warmup`: min(1, n / warmup_steps)
  * `linear_decay`: base_learning_rate * min(n / warmup_steps, 1 + decay_factor * (warmup_steps - n)): rises to
    base_learning_rate at warmup_steps, then falls by decay_factor of it per step; it includes the base rate, so it is
    not combined with `constant`
  * `rsqrt_decay`: 1 / sqrt(max(n, warmup_steps))
  * `rsqrt_normalized_decay`: the same, scaled to start at 1
  * `decay_every`: decay_factor ** floor(n / steps_per_decay)
  * `cosine_decay`: a half cosine from 1 to 0 over steps_per_cycle steps after warmup_steps, then again from 1

  Args:
    factors: names of factors, joined by '*'.
    base_learning_rate: value of `constant` and `linear_decay`.
    warmup_steps: number of warm-up steps, or the start of the decay.
    decay_factor: factor of each decay of `decay_every`, or the slope of `linear_decay`.
    steps_per_decay: steps between decays of `decay_every`.
    steps_per_cycle: steps of a half cosine of `cosine_decay`.
    step_offset: number of steps to stay at the start, e.g. the last step of the run that is fine-tuned from.
    min_learning_rate: floor of the result.

  Returns:
    A function from a step (int or integer array) to a float32 scalar array.

  Raises:
    ConfigError: an unknown factor, or a number of steps below 1 that a factor divides by.

  >>> schedule = create_learning_rate_scheduler('constant * linear_warmup', base_learning_rate=0.1, warmup_steps=10)
  >>> print(schedule(5))
  0.05
  """
  return _Schedule(
      factors=factors, base_learning_rate=base_learning_rate, warmup_steps=warmup_steps, decay_factor=decay_factor,
      steps_per_decay=steps_per_decay, steps_per_cycle=steps_per_cycle, step_offset=step_offset,
      min_learning_rate=min_learning_rate)


def check_learning_rate_fn(learning_rate_fn: Any, what: str) -> None:
  """Refuses what is no schedule, by tracing it once; nothing is computed.

  Args:
    learning_rate_fn: what is to be a function from the step, an int32 scalar, to a real scalar.
    what: what it is called, for the error message.

  Raises:
    ConfigError: it cannot be called, fails for a traced step, or returns something else than a real scalar.
  """
  example = 'for instance schedules.create_learning_rate_scheduler() or an optax schedule'
  if not callable(learning_rate_fn):
    raise errors.ConfigError(f'{what} is {learning_rate_fn!r} of type {type(learning_rate_fn).__name__}; expected a '
                             f'function from the step to the learning rate, {example}.')
  try:
    rate = jax.eval_shape(learning_rate_fn, jax.ShapeDtypeStruct((), jnp.int32))
  except Exception as error:  # Whatever a user's function may raise.
    # Only the first line: JAX and gin add where and how it was called.
    reason = str(error).partition('\n')[0].rstrip('.')
    raise errors.ConfigError(f'{what} fails for a traced step ({type(error).__name__}: {reason}). Expected a function '
                             f'that takes the step alone, an int32 scalar, and computes with jax.numpy, {example}.'
                             ) from error
  leaves = jax.tree.leaves(rate)
  is_scalar = jax.tree_util.all_leaves([rate]) and len(leaves) == 1 and rate.shape == ()
  if not is_scalar or not (jnp.issubdtype(rate.dtype, jnp.floating) or jnp.issubdtype(rate.dtype, jnp.integer)):
    shown = repr(rate)
    if isinstance(rate, jax.ShapeDtypeStruct):
      shown = f'an array of shape {list(rate.shape)} and dtype {rate.dtype}'
    raise errors.ConfigError(f'{what} returns {shown}; expected one real number, a scalar of shape (), {example}.')


def check_learning_rate_values(learning_rate_fn: LearningRateCallable, what: str, steps: Iterable[int]) -> None:
  """Refuses a schedule that gives no learning rate at some steps; computes them on the host.

  Args:
    learning_rate_fn: the schedule, which `check_learning_rate_fn` has passed.
    what: what it is called, for the error message.
    steps: the steps to look at, such as the first and the last of a run.

  Raises:
    ConfigError: a rate that is negative or not finite, with its step.
  """
  steps = sorted(set(steps))
  with jax.default_device(jax.local_devices(backend='cpu')[0]):
    rates = jax.jit(lambda steps: [learning_rate_fn(step) for step in steps])([np.int32(step) for step in steps])
  for step, rate in zip(steps, rates, strict=True):
    if not 0 <= float(rate) < math.inf:
      raise errors.ConfigError(f'{what} is {float(rate):g} at step {step}; expected a finite number that is not '
                               'negative at all steps. Correct the schedule.')
