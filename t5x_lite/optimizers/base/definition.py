"""What an optimizer is to the rest of the package: a definition, its state, and the pair that a step updates.

An `OptimizerDef` is configuration and pure functions; an `Optimizer` is the pytree of parameters and state that a
train state carries. All members of the family keep this contract:

* the structure, shapes and dtypes of the state do not change from `init_state` on, so a step compiles once;
* `step` is an int32 scalar array;
* parameters keep their dtype; statistics are float32;
* `derive_logical_axes` mirrors the state exactly, with a `PartitionSpec` of one entry per dim at each array;
* state dicts have no empty nodes, and are restored without them.

What an update may need besides the gradients it asks for by name (`extra_args`); the train step computes what is asked
for and nothing else.
"""

import abc
from collections.abc import Mapping
import copy
import dataclasses
import math
from typing import Any

import flax.core
from flax.core import FrozenDict
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.base import state_dicts
from t5x_lite.schedules import check_learning_rate_fn
from t5x_lite.types import LogicalAxes, Params, PyTree

# The values of a step that an optimizer may ask for:
# * 'value': the loss that was differentiated, float32 scalar.
# * 'grad': the gradients as the optimizer gets them; line searches want them beside the direction they are given.
# * 'value_fn': from parameters to that loss, on the same batch with the same dropout; may be differentiated.
# * 'obj_fn': the same function under the name that optax's sophia uses.
# * 'grad_fn': from (parameters, number of the call) to the gradients of that loss, as optax's sam wants them.
EXTRA_ARGS = ('value', 'grad', 'value_fn', 'obj_fn', 'grad_fn')


@struct.dataclass
class OptimizerState:
  """State of an optimizer.

  Attributes:
    step: int32 scalar, the number of updates made.
    param_states: what the optimizer keeps; often a tree that mirrors the parameters.
  """

  step: jax.Array
  param_states: Any


class OptimizerDef(abc.ABC):
  """Definition of an optimizer: hyper-parameters and pure functions, no arrays.

  Attributes:
    hyper_params: a frozen dataclass with the defaults of what `update_hyper_params` may override.
  """

  # The definition that `with_param_axes` made this one from, and the axes.
  _origin: tuple['OptimizerDef', Any] | None = None

  def __init__(self, hyper_params: Any):
    self.hyper_params = hyper_params

  def __eq__(self, other: Any) -> bool:
    # States made from one definition have equal definitions, so that their structures and compiled steps agree.
    return self is other or (
        isinstance(other, OptimizerDef) and self._origin is not None and self._origin == other._origin)

  def __hash__(self) -> int:
    return id(self if self._origin is None else self._origin[0])

  @property
  def name(self) -> str:
    """What people call this optimizer; recorded with checkpoints and used in messages."""
    return type(self).__name__

  @property
  def extra_args(self) -> tuple[str, ...]:
    """Names out of `EXTRA_ARGS` of the values that `apply_gradient` takes as keyword arguments."""
    return ()

  @property
  def uses_learning_rate(self) -> bool:
    """Whether a `learning_rate` passed to `apply_gradient` (the trainer's) has an effect on the update."""
    return True

  @property
  def needs_learning_rate(self) -> bool:
    """Whether no update can be made without such a `learning_rate`."""
    return self.uses_learning_rate

  @property
  def owns_learning_rate(self) -> bool:
    """Whether the user gave this optimizer a learning rate, so that another one of the trainer's is a contradiction."""
    return self.uses_learning_rate and not self.needs_learning_rate

  @property
  def own_learning_rates(self) -> dict[str, Any]:
    """The learning rates that the user gave this optimizer and that it knows, numbers or schedules, by name.

    'learning_rate', or '<part>/learning_rate' where parts have their own.
    """
    return {}

  @property
  def has_param_wise_state(self) -> bool:
    """Whether `param_states` is a tree like the parameters, with what belongs to a parameter in its place."""
    return False

  @abc.abstractmethod
  def init_state(self, params: Params) -> OptimizerState:
    """Returns the state before the first update for parameters of the shapes and dtypes of `params`."""

  @abc.abstractmethod
  def apply_gradient(
      self, hyper_params: Any, params: Params, state: OptimizerState, grads: Params) -> tuple[Params, OptimizerState]:
    """Makes one update.

    Args:
      hyper_params: hyper-parameters for this update, as `update_hyper_params` returns them.
      params: tree of parameters.
      state: state of the same structure as `init_state(params)`.
      grads: gradients, a tree like `params`.

    A definition with `extra_args` takes those as keyword arguments too, each of which a caller may leave out.

    Returns:
      (new parameters, new state), of the same structure, shapes and dtypes as the old ones.
    """

  def learning_rates(self, state: OptimizerState, *, is_passed: bool) -> dict[str, jax.Array]:
    """Returns the values of `own_learning_rates` in the update that follows `state`; traced in every train step.

    Args:
      state: the state before the update.
      is_passed: whether that update is passed a `learning_rate`; the rates that it replaces are left out.

    Returns:
      Name to float32 scalar.
    """
    return {} if is_passed else learning_rates_at(self.own_learning_rates, state.step)

  def metrics(self, state: OptimizerState) -> dict[str, jax.Array]:
    """Returns what the state has to tell about the last update: name to scalar array; traced in every train step.

    The trainer reports the values as `optimizer/<name>`. Keep it cheap: a few reductions of what the state holds.
    """
    del state
    return {}

  def gradient_evidence(self, grads: Params, new_state: OptimizerState) -> PyTree:
    """Returns real or complex arrays of which one is not finite exactly if a gradient is not.

    Each train step reduces them. An optimizer with statistics that are smaller than the gradients returns those.

    Args:
      grads: the gradients.
      new_state: the state after the update with them.
    """
    del new_state
    return grads

  def report(self, values: Mapping[str, float]) -> list[str]:
    """Returns lines for the log from the values of `metrics`, by the same names, once they are on the host."""
    del values
    return []

  def eval_params(self, params: Params, state: OptimizerState) -> Params:
    """Returns the parameters to evaluate, decode and export with; `params` itself where they are the trained ones."""
    del state
    return params

  def trainer_refusal(self, state: OptimizerState) -> str | None:
    """Returns why the trainer cannot train with this optimizer, with what to do instead; None where it can.

    Args:
      state: the state; its leaves may be `jax.ShapeDtypeStruct`s.
    """
    del state
    return None

  def derive_logical_axes(self, optimizer: 'Optimizer', param_logical_axes: LogicalAxes) -> 'Optimizer':
    """Derives the logical axes of parameters and state from those of the parameters.

    Args:
      optimizer: the optimizer; its leaves may be arrays or `jax.ShapeDtypeStruct`s.
      param_logical_axes: tree like the parameters with a `PartitionSpec` of logical names at each leaf.

    Returns:
      An `Optimizer` of exactly the structure of `optimizer`; every leaf is a `PartitionSpec` with one entry per dim.
    """
    raise ConfigError(
        f'{type(self).__name__} does not say how its state is laid out over a mesh; implement '
        'derive_logical_axes(optimizer, param_logical_axes) in it.')

  def with_param_axes(self, param_logical_axes: LogicalAxes, params: Params | None = None) -> 'OptimizerDef':
    """Return the definition for parameters of these logical axes, from which a state is made; this one is unchanged.

    A class that depends on the axes overrides `_for_param_axes`, or T5X's `set_param_axes`, which changes a copy.

    Args:
      param_logical_axes: a `PartitionSpec` of logical names for each parameter.
      params: the parameters; None if they are not known yet.

    Returns:
      The definition; `self` if the axes do not matter. Those of the same `self` and axes are equal.
    """
    origin = self if self._origin is None else self._origin[0]
    if type(self).set_param_axes is not OptimizerDef.set_param_axes:
      told = copy.copy(origin)
      told.set_param_axes(param_logical_axes)
    else:
      told = origin._for_param_axes(param_logical_axes, params)
    if told is not origin:
      told._origin = (origin, tuple(tree_utils.named_leaves(param_logical_axes)))
    return told

  def _for_param_axes(self, param_logical_axes: LogicalAxes, params: Params | None) -> 'OptimizerDef':
    """Return a new definition for `with_param_axes`, or `self`."""
    del param_logical_axes, params
    return self

  def set_param_axes(self, param_logical_axes: LogicalAxes) -> None:
    """Change this definition into what `with_param_axes` returns: T5X's interface, not used by t5x_lite."""
    vars(self).update({**vars(copy.copy(self)._for_param_axes(param_logical_axes, None)), '_origin': None})

  def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
    """Returns the hyper-parameters with overrides applied; this is how the trainer sets the learning rate of a step.

    Args:
      **hyper_param_overrides: new values by name; `hyper_params=...` replaces all of them first.

    Returns:
      Hyper-parameters for `apply_gradient`. The definition itself is unchanged.

    Raises:
      ConfigError: a name that is not a hyper-parameter of this optimizer, or a learning rate that is no rate.
    """
    hyper_params = hyper_param_overrides.pop('hyper_params', self.hyper_params)
    if not hyper_param_overrides:
      return hyper_params
    names = [field.name for field in dataclasses.fields(hyper_params)] if dataclasses.is_dataclass(hyper_params) else []
    for name in hyper_param_overrides:
      if name not in names:
        raise ConfigError(
            f'{type(self).__name__} has no hyper-parameter {name!r} to override.{did_you_mean(name, names)}')
    if 'learning_rate' in hyper_param_overrides:
      check_learning_rate(hyper_param_overrides['learning_rate'], type(self).__name__)
    return dataclasses.replace(hyper_params, **hyper_param_overrides)

  def create(self, target: Params) -> 'Optimizer':
    """Returns an `Optimizer` of the parameters `target` with a fresh state."""
    return Optimizer(optimizer_def=self, state=self.init_state(target), target=target)

  def state_dict(self, target: Params, state: OptimizerState) -> dict[str, Any]:
    """Returns the serialisable form of parameters and state.

    Args:
      target: parameters.
      state: optimizer state.

    Returns:
      {'target': ..., 'state': {'step': ..., 'param_states': ...}}, nested plain dicts whose leaves are the arrays.
      Nodes without arrays (optax has many) are left out: storage formats disagree about empty nodes.
    """
    return {
        'target': state_dicts.to_state_dict(target),
        'state': state_dicts.to_state_dict(state),
    }

  def restore_state(
      self, opt_target: Params, opt_state: OptimizerState,
      state_dict: Mapping[str, Any]) -> tuple[Params, OptimizerState]:
    """Inverse of `state_dict`.

    Args:
      opt_target: parameters, for their structure.
      opt_state: optimizer state, for its structure.
      state_dict: what `state_dict` returned for an optimizer of that structure; any values may stand at its leaves.

    Returns:
      (parameters, state) with the values of `state_dict`.

    Raises:
      CheckpointError: the state dict lacks a value or has one too many; the message names its path.
    """
    return (state_dicts.restore_from_state_dict(opt_target, state_dict, 'target'),
            state_dicts.restore_from_state_dict(opt_state, state_dict, 'state'))


class Optimizer(struct.PyTreeNode):
  """Parameters together with the state of the optimizer that trains them; immutable.

  Attributes:
    optimizer_def: the definition (static metadata of the pytree).
    state: optimizer state.
    target: parameters.
  """

  optimizer_def: OptimizerDef = struct.field(pytree_node=False)
  state: Any
  target: Any

  def apply_gradient(self, grads: PyTree, **overrides: Any) -> 'Optimizer':
    """Returns the optimizer after one update.

    Args:
      grads: gradients, a tree like `target`; a plain dict may stand for a frozen one and the other way round.
      **overrides: hyper-parameters of this update, for instance `learning_rate=...`, and the values that the
        definition's `extra_args` name, for instance `value=loss`.

    Returns:
      A new `Optimizer`.
    """
    extra_args = {name: overrides.pop(name) for name in self.optimizer_def.extra_args if name in overrides}
    hyper_params = self.optimizer_def.update_hyper_params(**overrides)
    grads = _in_containers_of(self.target, grads)
    target, state = self.optimizer_def.apply_gradient(hyper_params, self.target, self.state, grads, **extra_args)
    return self.replace(target=target, state=state)

  def state_dict(self) -> dict[str, Any]:
    """Returns {'target': ..., 'state': ...}, see `OptimizerDef.state_dict`."""
    return self.optimizer_def.state_dict(self.target, self.state)

  def restore_state(self, state: Mapping[str, Any]) -> 'Optimizer':
    """Returns an optimizer with the values of the state dict `state`, see `OptimizerDef.restore_state`."""
    target, opt_state = self.optimizer_def.restore_state(self.target, self.state, state)
    return self.replace(target=target, state=opt_state)


def _in_containers_of(target: PyTree, grads: PyTree) -> PyTree:
  """Returns `grads` as a frozen dict where `target` is one, and as a plain one where it is not."""
  if isinstance(target, FrozenDict) and isinstance(grads, dict):
    return flax.core.freeze(grads)
  if isinstance(target, dict) and isinstance(grads, FrozenDict):
    return flax.core.unfreeze(grads)
  return grads


# T5X's names for use in annotations.
OptimizerType = Optimizer
OptimizerDefType = OptimizerDef


def check_learning_rate(learning_rate: Any, owner: str) -> None:
  """Refuses what cannot be a learning rate.

  Args:
    learning_rate: None, a number, an array, a tracer, or a schedule (a function of the step). Values on a device are
      not looked at: that would wait for them.
    owner: who takes it, for the error message.

  Raises:
    ConfigError: a negative or non-finite number, a schedule that is none, or something of another type.
  """
  if callable(learning_rate):
    check_learning_rate_fn(learning_rate, f'{owner}: the schedule learning_rate')
    return
  if learning_rate is None or (isinstance(learning_rate, jax.Array) and learning_rate.ndim == 0):
    return
  is_number = isinstance(learning_rate, (int, float, np.ndarray, np.generic)) and not isinstance(learning_rate, bool)
  if not is_number or np.ndim(learning_rate) != 0:
    raise ConfigError(
        f'{owner}: learning_rate is {learning_rate!r} of type {type(learning_rate).__name__}; expected a number, or a '
        'schedule from the step to a number.')
  if not math.isfinite(learning_rate) or learning_rate < 0:
    raise ConfigError(f'{owner}: learning_rate is {learning_rate}; expected a finite number that is not negative.')


def learning_rates_at(rates: Mapping[str, Any], step: jax.Array) -> dict[str, jax.Array]:
  """Returns the values of learning rates, numbers or schedules, at a step; float32 scalars by the same names."""
  return {name: jnp.asarray(rate(step) if callable(rate) else rate, jnp.float32) for name, rate in rates.items()}
