"""Non-finite numbers in training: the test inside the compiled step, the test of a state, and the policy.

The step counts, in a metric of its own, whether its loss or its gradient norm was NaN or infinite. The trainer reads
that metric one step late, so the test costs one reduction over the gradients and no wait.
"""

import dataclasses
import logging
from typing import Any

import clu.metrics
import flax
import jax
import jax.numpy as jnp

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.types import Array, PyTree

ACTIONS = ('stop', 'skip', 'roll_back', 'ignore')
# The metric by which a step says that its loss or its gradient norm was not finite.
NON_FINITE_STEPS = 'non_finite_steps'

_MAX_SKIPS_IN_A_ROW = 10
_MAX_ROLL_BACKS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinitePolicy:
  """Reaction to a training step whose loss or gradient norm is NaN or infinite.

  Attributes:
    action: 'stop' ends the run with exit status 3, and nothing is saved after the step. 'skip' leaves parameters,
      optimizer state and mutable collections as they were, drops the metrics of the step that are not finite, and
      counts it; the batch is used up. 'roll_back' restores the newest sound checkpoint and leaves out the batch of the
      bad step. 'ignore' trains on and tests nothing.
    max_skips_in_a_row: with 'skip', the run stops at this many bad steps in a row; None is 10.
    max_roll_backs: with 'roll_back', the run stops when it would roll back once more than this; None is 3.
  """

  action: str = 'stop'
  max_skips_in_a_row: int | None = None
  max_roll_backs: int | None = None

  def __post_init__(self):
    if self.action not in ACTIONS:
      raise ConfigError(f'`NonFinitePolicy.action` must be one of {", ".join(ACTIONS)}, got {self.action!r}.'
                        f'{did_you_mean(str(self.action), ACTIONS)}')
    for name, action in (('max_skips_in_a_row', 'skip'), ('max_roll_backs', 'roll_back')):
      value = getattr(self, name)
      if value is None:
        continue
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f'`NonFinitePolicy.{name}` must be a whole number of at least 1 or None, got {value!r}.')
      if self.action != action:
        raise ConfigError(f'`NonFinitePolicy.{name}` has an effect only with action={action!r}, got action='
                          f'{self.action!r}. Leave {name} out, or set action={action!r}.')

  @property
  def tests(self) -> bool:
    """Whether steps and states are tested."""
    return self.action != 'ignore'

  @property
  def skip_limit(self) -> int:
    """Number of bad steps in a row at which the run stops or rolls back."""
    return (self.max_skips_in_a_row or _MAX_SKIPS_IN_A_ROW) if self.action == 'skip' else 1

  @property
  def roll_back_limit(self) -> int:
    """Number of times that the run may roll back."""
    return (self.max_roll_backs or _MAX_ROLL_BACKS) if self.action == 'roll_back' else 0


@flax.struct.dataclass
class NonFiniteSteps(clu.metrics.Metric):
  """Number of steps whose loss or gradient norm was not finite.

  Attributes:
    loss: float32 scalar, number of steps with a non-finite loss.
    gradient: float32 scalar, number of steps with a finite loss and a non-finite gradient norm.
  """

  loss: Array
  gradient: Array

  def merge(self, other: 'NonFiniteSteps') -> 'NonFiniteSteps':
    """Returns the sum of both counts."""
    return type(self)(loss=self.loss + other.loss, gradient=self.gradient + other.gradient)

  def compute(self) -> Array:
    """Returns the number of steps."""
    return self.loss + self.gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """A non-finite number that ends training or makes it roll back.

  Attributes:
    step: number of the first bad step (1 is the first step of the model).
    what: what was not finite, for people.
    condemns_params: whether the parameters that the step began with are suspect; False if only the state after it is
      bad.
  """

  step: int
  what: str
  condemns_params: bool


class Monitor:
  """Applies a policy to completed steps, one after the other.

  Attributes:
    policy: the policy.
    finding: why training must end or roll back; None while there is no reason.
    newest_finite_step: the newest step whose loss and gradient norm were finite; the parameters before it are sound.
    bad_steps_in_a_row: number of bad steps in a row, up to the newest completed step.
  """

  def __init__(self, policy: NonFinitePolicy):
    self.policy = policy
    self.reset()

  def reset(self) -> None:
    """Forgets all steps."""
    self.finding: Finding | None = None
    self.newest_finite_step = 0
    self.bad_steps_in_a_row = 0

  def observe(self, step: int, metrics: Any) -> None:
    """Reads the metrics of a completed step, without waiting.

    Args:
      step: number of the step, from 1.
      metrics: its metrics; a step function that does not test its loss has no `non_finite_steps` among them.
    """
    count = metrics.get(NON_FINITE_STEPS)
    loss, gradient = (0, 0) if count is None else jax.device_get((count.loss, count.gradient))
    if not loss and not gradient:
      self.newest_finite_step, self.bad_steps_in_a_row = step, 0
      return
    self.bad_steps_in_a_row += 1
    what = 'loss' if loss else 'gradient norm'
    if self.finding is None and self.bad_steps_in_a_row >= self.policy.skip_limit:
      first, in_a_row = step - self.bad_steps_in_a_row + 1, ''
      if self.bad_steps_in_a_row > 1:
        in_a_row = f' (the first of {self.bad_steps_in_a_row} bad steps in a row)'
      self.finding = Finding(step=first, what=f'the {what} of step {first:,}{in_a_row}', condemns_params=True)
    elif self.policy.action == 'skip' and self.finding is None:
      logging.getLogger(__name__).warning(
          'step %d: the %s is not finite; the update is skipped (%d in a row).', step, what, self.bad_steps_in_a_row)

  def test_state(self, step: int, state_dict: PyTree) -> bool:
    """Returns whether a state is fit to be saved; records a finding if it is not. See `find_in_state`."""
    names = find_in_state(state_dict) if self.policy.tests else []
    if names and self.finding is None:
      more = f' and {len(names) - 1} more' if len(names) > 1 else ''
      self.finding = Finding(step=step, what=f'the state after step {step:,} ({names[0]}{more})', condemns_params=False)
    return not names


def count_of_step(loss: Array, evidence: PyTree) -> NonFiniteSteps:
  """Returns the metric of one step.

  Args:
    loss: scalar.
    evidence: tree of gradients, or what stands for them (`OptimizerDef.gradient_evidence`), of any real or complex
      dtype.
  """
  # By rows first: XLA's CPU compiler splits such a reduction over threads, and one to a scalar not.
  sums = (jnp.sum(jnp.sum(_magnitude(x), axis=-1)) if x.ndim else _magnitude(x) for x in jax.tree.leaves(evidence))
  loss_is_finite = jnp.isfinite(loss)
  norm_is_finite = jnp.isfinite(sum(sums, jnp.float32(0)))
  return NonFiniteSteps(loss=(~loss_is_finite).astype(jnp.float32),
                        gradient=(loss_is_finite & ~norm_is_finite).astype(jnp.float32))


def skip_update(count: NonFiniteSteps, new_state: Any, old_state: Any) -> Any:
  """Returns `new_state`, or `old_state` with the step of `new_state` where the step was not finite."""
  is_bad = count.compute() > 0
  kept = jax.tree.map(lambda new, old: jnp.where(is_bad, old, new), new_state, old_state)
  return kept.replace_step(new_state.step)


def drop_non_finite(count: NonFiniteSteps, metrics: dict[str, clu.metrics.Metric]) -> dict[str, clu.metrics.Metric]:
  """Returns `metrics` with zeros for those that are not finite in a bad step, so that merging passes over them."""
  is_bad = count.compute() > 0

  def drop(metric):
    numbers = [x for x in jax.tree.leaves(metric) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    is_spoilt = is_bad & ~jnp.stack([jnp.isfinite(x).all() for x in numbers]).all() if numbers else False
    return jax.tree.map(lambda x: jnp.where(is_spoilt, jnp.zeros_like(x), x), metric)

  return {name: drop(metric) for name, metric in metrics.items()}


def find_in_state(state_dict: PyTree) -> list[str]:
  """Returns the names of the arrays of a train state that hold a number that is not finite.

  Scalars of the optimizer's state may be infinite: several optimizers begin a minimum that way.

  Args:
    state_dict: nested dict of global arrays, as `TrainState.state_dict` returns it. With several processes all of
      them call this together.
  """
  flat = {name: leaf for name, leaf in tree_utils.flatten_dict(state_dict).items()
          if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size}
  if not flat:
    return []
  bad = jax.device_get(_bad_arrays(flat))
  return [name for name in flat if bad[name]]


@jax.jit
def _bad_arrays(flat: dict[str, Array]) -> dict[str, Array]:
  def is_bad(name, x):
    if name.startswith('state/') and x.ndim == 0:
      return jnp.isnan(x)
    return ~jnp.all(jnp.all(jnp.isfinite(x), axis=-1) if x.ndim else jnp.isfinite(x))

  return {name: is_bad(name, x) for name, x in flat.items()}


def _magnitude(x: Array) -> Array:
  """Returns the sum of the magnitudes of real and imaginary part, float32."""
  if jnp.iscomplexobj(x):
    return _magnitude(jnp.real(x)) + _magnitude(jnp.imag(x))
  return jnp.abs(x.astype(jnp.float32))
