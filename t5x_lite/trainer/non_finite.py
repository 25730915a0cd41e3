"""Non-finite numbers in training: the test in the compiled step, the test of a state, and the policy.

A metric of the step records whether the loss or the gradient norm was NaN or infinite. The trainer reads this metric
one step late, so the test costs one reduction over the gradients and no wait.
"""

import dataclasses
import logging
from typing import Any

import clu.metrics
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import metrics as metrics_lib
from t5x_lite import tree_utils
from t5x_lite.types import Array, PyTree

ACTIONS = ('stop', 'skip', 'roll_back', 'ignore')
# Name of the metric that counts steps with a non-finite loss or gradient norm.
NON_FINITE_STEPS = 'non_finite_steps'

_MAX_SKIPS_IN_A_ROW = 10
_MAX_ROLL_BACKS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonFinitePolicy:
  """Reaction to a training step whose loss or gradient norm is NaN or infinite.

  Attributes:
    action: 'stop' ends the run with exit status 3, without saving. 'skip' keeps parameters, optimizer state and mutable
      collections, drops the non-finite metrics of the step, and counts the step; the batch is consumed. 'roll_back'
      restores the newest sound checkpoint and skips the batch of the bad step. 'ignore' continues training without
      checks.
    max_skips_in_a_row: with 'skip', the number of consecutive bad steps at which the run stops; None means 10.
    max_roll_backs: with 'roll_back', the number of restores after which the run stops; None means 3.
  """

  action: str = 'stop'
  max_skips_in_a_row: int | None = None
  max_roll_backs: int | None = None

  def __post_init__(self):
    checks.check(
      'NonFinitePolicy',
      vars(self),
      action=checks.one_of(ACTIONS),
      max_skips_in_a_row=self._limit_of('skip'),
      max_roll_backs=self._limit_of('roll_back'),
    )

  def _limit_of(self, action: str) -> checks.Expectation:
    """Return the expectation on the limit of an action."""
    if self.action == action:
      return checks.number(at_least=1, integer=True).or_none()
    return checks.Expectation(
      f'None with action={self.action!r}',
      lambda value: value is None,
      f'Or set action={action!r}.',
    )

  @property
  def tests(self) -> bool:
    """True if steps and states are tested."""
    return self.action != 'ignore'

  @property
  def skip_limit(self) -> int:
    """Number of consecutive bad steps at which the run stops or rolls back."""
    if self.action == 'skip':
      return self.max_skips_in_a_row or _MAX_SKIPS_IN_A_ROW
    return 1

  @property
  def roll_back_limit(self) -> int:
    """Number of times that the run may roll back."""
    if self.action == 'roll_back':
      return self.max_roll_backs or _MAX_ROLL_BACKS
    return 0


@struct.dataclass
class NonFiniteSteps(clu.metrics.Metric):
  """Number of steps whose loss or gradient norm was not finite.

  Attributes:
    loss: float32 scalar, number of steps with a non-finite loss.
    gradient: float32 scalar, number of steps with a finite loss and a non-finite gradient norm.
  """

  loss: Array
  gradient: Array

  def merge(self, other: 'NonFiniteSteps') -> 'NonFiniteSteps':
    """Return the sum of both counts."""
    return type(self)(loss=self.loss + other.loss, gradient=self.gradient + other.gradient)

  def compute(self) -> Array:
    """Return the number of steps, a float32 scalar."""
    return self.loss + self.gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """A non-finite number that ends training or makes it roll back.

  Attributes:
    step: number of the first bad step (1 is the first step of the model).
    what: description of the non-finite number, for messages.
    params_may_be_bad: True if the parameters before the step may be bad; False if only the state after it is bad.
  """

  step: int
  what: str
  params_may_be_bad: bool


class Monitor:
  """Application of a policy to completed steps, in order.

  Attributes:
    policy: the policy.
    finding: reason to end or roll back training, or None.
    newest_finite_step: newest step with finite loss and gradient norm; the parameters before it are sound.
    bad_steps_in_a_row: number of consecutive bad steps, up to the newest completed step.
  """

  def __init__(self, policy: NonFinitePolicy):
    self.policy = policy
    self.reset()

  def reset(self) -> None:
    """Forget all steps."""
    self.finding: Finding | None = None
    self.newest_finite_step = 0
    self.bad_steps_in_a_row = 0

  def observe(self, step: int, metrics: Any) -> None:
    """Read the metrics of a completed step, without waiting.

    Args:
      step: number of the step, from 1.
      metrics: metrics of the step; without `non_finite_steps` if the step function does not test its loss.
    """
    count = metrics.get(NON_FINITE_STEPS)
    loss = 0
    gradient = 0
    if count is not None:
      loss, gradient = jax.device_get((count.loss, count.gradient))
    if not loss and not gradient:
      self.newest_finite_step = step
      self.bad_steps_in_a_row = 0
      return
    self.bad_steps_in_a_row += 1
    what = 'loss' if loss else 'gradient norm'
    if self.finding is None and self.bad_steps_in_a_row >= self.policy.skip_limit:
      first = step - self.bad_steps_in_a_row + 1
      in_a_row = ''
      if self.bad_steps_in_a_row > 1:
        in_a_row = f' (the first of {self.bad_steps_in_a_row} bad steps in a row)'
      self.finding = Finding(
        step=first, what=f'the {what} of step {first:,}{in_a_row}', params_may_be_bad=True
      )
    elif self.policy.action == 'skip' and self.finding is None:
      logging.getLogger(__name__).warning(
        'step %d: the %s is not finite; the update is skipped (%d in a row).',
        step,
        what,
        self.bad_steps_in_a_row,
      )

  def test_state(self, step: int, state_dict: PyTree) -> bool:
    """Return True if a state may be saved; otherwise record a finding. See `find_in_state`."""
    names = find_in_state(state_dict) if self.policy.tests else []
    if names and self.finding is None:
      more = ''
      if len(names) > 1:
        more = f' and {len(names) - 1} more'
      self.finding = Finding(
        step=step, what=f'the state after step {step:,} ({names[0]}{more})', params_may_be_bad=False
      )
    return not names


def _sum_of_magnitudes(x: Array) -> Array:
  """Return a scalar that is finite only if all numbers of an array are."""
  magnitudes = _magnitude(x)
  if x.ndim:
    return jnp.sum(jnp.sum(magnitudes, axis=-1))
  return magnitudes


def count_of_step(loss: Array, evidence: PyTree) -> NonFiniteSteps:
  """Return the metric of one step.

  Args:
    loss: scalar.
    evidence: tree of gradients or of `OptimizerDef.gradient_evidence`, of any real or complex dtype.

  Returns:
    The metric, with a count of 0 or 1.
  """
  # Rows first: XLA's CPU compiler splits this reduction over threads, but not a reduction to a scalar.
  sums = map(_sum_of_magnitudes, jax.tree.leaves(evidence))
  loss_is_finite = jnp.isfinite(loss)
  norm_is_finite = jnp.isfinite(sum(sums, jnp.float32(0)))
  return NonFiniteSteps(
    loss=(~loss_is_finite).astype(jnp.float32),
    gradient=(loss_is_finite & ~norm_is_finite).astype(jnp.float32),
  )


def skip_update(count: NonFiniteSteps, new_state: Any, old_state: Any) -> Any:
  """Return `new_state`, or `old_state` with the step of `new_state` if the step was not finite."""
  is_bad = count.compute() > 0
  kept = jax.tree.map(lambda new, old: jnp.where(is_bad, old, new), new_state, old_state)
  return kept.replace_step(new_state.step)


def drop_non_finite(
  count: NonFiniteSteps, metrics: dict[str, clu.metrics.Metric]
) -> dict[str, clu.metrics.Metric]:
  """Return `metrics`, in a bad step with zeros for non-finite ones, so that merging ignores them."""
  is_bad = count.compute() > 0

  def drop(metric):
    numbers = list(filter(_is_inexact, jax.tree.leaves(metric)))
    if numbers:
      are_finite = jnp.stack([jnp.isfinite(x).all() for x in numbers])
      is_spoilt = is_bad & ~are_finite.all()
    else:
      is_spoilt = False
    return jax.tree.map(lambda x: jnp.where(is_spoilt, jnp.zeros_like(x), x), metric)

  def drop_parts(metric):
    if isinstance(metric, metrics_lib.OfLastStep):
      return metrics_lib.OfLastStep.join(drop_non_finite(count, metric.separate()))
    return drop(metric)

  return {name: drop_parts(metric) for name, metric in metrics.items()}


def find_in_state(state_dict: PyTree) -> list[str]:
  """Return the names of the arrays of a train state with a non-finite number.

  Scalars of the optimizer's state may be infinite, which is the initial value of a minimum in several optimizers.

  Args:
    state_dict: nested dict of global arrays, the result of `TrainState.state_dict`; layers may be stacked. All
      processes call this together.
  """
  flat = {}
  for name, leaf in tree_utils.flatten_dict(state_dict).items():
    if isinstance(leaf, jax.Array) and _is_inexact(leaf) and leaf.size:
      flat[name] = leaf
  if not flat:
    return []
  bad = jax.device_get(_bad_arrays(flat))
  names = []
  for name in flat:
    paths = layer_stacks.paths_of(name)
    for path, is_bad in zip(paths, np.atleast_1d(bad[name]), strict=True):
      if is_bad:
        names.append(path)
  return names


def is_bad_array(name: str, values: np.ndarray) -> bool:
  """Return whether `find_in_state` would name an array of a state, in host memory and without stacked layers."""
  if name.startswith('state/') and values.ndim == 0:
    return bool(np.isnan(values))
  return not np.isfinite(values).all()


def _is_inexact(x: Any) -> bool:
  """Return whether numbers have a floating or complex dtype."""
  return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


@jax.jit
def _bad_arrays(flat: dict[str, Array]) -> dict[str, Array]:
  def is_bad(name, x):
    num_layer_dims = int(layer_stacks.is_stacked(name))
    if name.startswith('state/') and x.ndim == num_layer_dims:
      return jnp.isnan(x)
    if x.ndim > num_layer_dims:
      is_finite = jnp.all(jnp.isfinite(x), axis=-1)
    else:
      is_finite = jnp.isfinite(x)
    return ~jnp.all(is_finite, axis=range(num_layer_dims, is_finite.ndim))

  return {name: is_bad(name, x) for name, x in flat.items()}


def _magnitude(x: Array) -> Array:
  """Return the magnitude, or the sum of magnitudes of real and imaginary part, float32."""
  if jnp.iscomplexobj(x):
    return _magnitude(jnp.real(x)) + _magnitude(jnp.imag(x))
  return jnp.abs(x.astype(jnp.float32))
