"""Running averages of the parameters, for evaluation."""

from collections.abc import Callable, Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite.types import Array, ArrayLike, Params

_DECAY = checks.number(at_least=0, below=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamEma:
  """Exponential moving average (EMA) of the parameters.

  After each update of the parameters, `average = decay * average + (1 - decay) * params`. Up to `start_step` the
  average is a copy of the parameters. It has at least the precision of float32.

  With `debias`, the average has no part of the parameters at `start_step`: it is the mean of the parameters after each
  later update, weighted by powers of the decay (Adam, https://arxiv.org/abs/1412.6980, section 3, for moments).

  Attributes:
    decay: a number in [0, 1), or a schedule: a function, which can be traced, from the number of updates that the
      average contains to such a number.
    debias: see above; needs a constant decay.
    start_step: number of updates of the model before the first one that is averaged. In a run that starts from another
      checkpoint, `debias` and schedules need at least the step of the checkpoint.
    evaluate: whether evaluations during training use the average; else it is only saved.

  Raises:
    ConfigError: options are out of range or contradict each other.
  """

  decay: float | Callable[[ArrayLike], ArrayLike]
  debias: bool = False
  start_step: int = 0
  evaluate: bool = True

  def __post_init__(self):
    checks.check(
      'ParamEma',
      vars(self),
      decay=checks.Expectation(
        f'{_DECAY.text}, or a schedule', lambda decay: callable(decay) or _DECAY.holds(decay)
      ),
      debias=checks.Expectation(
        'False if decay is a schedule, else True or False',
        lambda debias: isinstance(debias, bool) and not (debias and callable(self.decay)),
        'A schedule that begins at 0, such as averaging.Warmup(decay=0.999), needs no correction.',
      ),
      start_step=checks.number(at_least=0, below=2**31, integer=True, remedy='Steps are int32.'),
      evaluate=checks.instance(bool, 'True or False'),
    )

  def check_decay(self, steps: Sequence[int]) -> None:
    """Raise ConfigError if the schedule leaves [0, 1) when some numbers of updates have been made."""
    if not callable(self.decay):
      return
    for step in steps:
      count = max(0, step - self.start_step)
      decay = checks.call_custom('ParamEma', 'decay', 'count', self.decay, np.int32(count))
      is_array = isinstance(decay, (np.generic, np.ndarray, jax.Array))
      if is_array and not np.shape(decay):
        decay = decay.item()
      if not isinstance(decay, (float, int)) or not 0 <= decay < 1:
        raise checks.invalid('ParamEma', 'decay', f'in [0, 1) after {count} updates', decay)

  def check_begin(self, step: int) -> None:
    """Raise ConfigError if the options do not describe an average that begins with the parameters of `step`.

    `debias` and schedules count updates from `start_step`. For an average that begins later, the count is too large.
    """
    if step > self.start_step and (self.debias or callable(self.decay)):
      option = 'debias' if self.debias else 'a schedule as decay'
      raise checks.invalid(
        'ParamEma',
        'start_step',
        f'at least {step} with {option}, since the average begins with the parameters of step '
        f'{step}',
        self.start_step,
        f'Set it to {step}.',
      )

  def init(self, params: Params) -> Params:
    """Return the average before the first update: copies of `params`, in float32 at least."""

    def copied(p: Array) -> Array:
      return jnp.array(p, _average_dtype(p.dtype), copy=True)

    return jax.tree.map(copied, params)

  def update(self, average: Params, params: Params, step: Array) -> Params:
    """Return the average after an update of the parameters.

    Args:
      average: average before the update, a tree like the parameters.
      params: parameters after the update.
      step: number of updates with this one, int32 scalar.
    """
    count = step - self.start_step
    if callable(self.decay):
      num_before = jnp.maximum(count - 1, 0)
      decay = jnp.asarray(self.decay(num_before), jnp.float32)
      weight = 1 - decay
    else:
      decay = np.float32(self.decay)
      weight = np.float32(1 - self.decay)
      if self.debias:
        # The parts of the updates add up to 1 - decay ** count.
        log_decay = np.float32(np.log(max(self.decay, 1e-30)))
        weight = weight / -jnp.expm1(count.astype(jnp.float32) * log_decay)
        decay = 1 - weight
    # Up to `start_step`, the average is a copy of the parameters.
    decay = jnp.where(count < 1, 0, decay)
    weight = jnp.where(count < 1, 1, weight)

    def average_of(a: Array, p: Array) -> Array:
      if jnp.issubdtype(a.dtype, jnp.inexact):
        return decay * a + weight * p.astype(a.dtype)
      return p

    return jax.tree.map(average_of, average, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warmup:
  """Schedule `min(decay, (1 + n) / (10 + n))` of the number n of updates, for `ParamEma.decay`.

  It forgets the first parameters quickly, as TensorFlow's ExponentialMovingAverage does with `num_updates`.

  Attributes:
    decay: final decay, in [0, 1).
  """

  decay: float

  def __post_init__(self):
    checks.check('Warmup', vars(self), decay=_DECAY)

  def __call__(self, count: ArrayLike) -> Array:
    """Return the decay, a float32 scalar, after `count` updates."""
    return jnp.minimum(self.decay, (1.0 + count) / (10.0 + count))


def _average_dtype(dtype) -> np.dtype:
  if jnp.issubdtype(dtype, jnp.inexact):
    return jnp.promote_types(dtype, jnp.float32)
  return dtype
