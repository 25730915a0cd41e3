"""Interface of optimizers: the definition, its state, and the pair of parameters and state that a step updates.

An `OptimizerDef` is configuration and pure functions; an `Optimizer` is the pytree of parameters and state that a
train state carries. All optimizers keep this contract:

* the structure, shapes and dtypes of the state do not change from `init_state` on, so a step compiles once;
* `step` is an int32 scalar array;
* parameters keep their dtype; statistics are float32;
* `derive_logical_axes` mirrors the state exactly, with a `PartitionSpec` of one entry per dim at each array;
* state dicts have no empty nodes, and are restored without them.

An optimizer lists in `extra_args` what an update needs in addition to the gradients; the train step computes only the
values listed.
"""

import abc
from collections.abc import Callable, Hashable, Mapping, Sequence
import copy
import dataclasses
from typing import Any, Self

from flax import struct
import flax.core
from flax.core import FrozenDict
import jax
from jax.sharding import PartitionSpec

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.axes.units import Units
from t5x_lite.optimizers.base import layouts
from t5x_lite.optimizers.base import rounding
from t5x_lite.optimizers.base import state_dicts
from t5x_lite.optimizers.base.param_scales import OWNER
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.base.param_scales import UpdateOptions
from t5x_lite.optimizers.base.scalars import check_learning_rate
from t5x_lite.optimizers.base.scalars import learning_rates_at
from t5x_lite.types import LogicalAxes, Params, PyTree

# Values of a step that an optimizer may need:
# * 'value': the loss that was differentiated, float32 scalar.
# * 'grad': the gradients as the optimizer gets them; line searches need them in addition to the direction.
# * 'value_fn': from parameters to that loss, on the same batch with the same dropout; may be differentiated.
# * 'obj_fn': the same function under the name that optax's sophia uses.
# * 'grad_fn': from (parameters, number of the call) to the gradients of that loss, as optax's sam calls it.
EXTRA_ARGS = ('value', 'grad', 'value_fn', 'obj_fn', 'grad_fn')


@struct.dataclass
class OptimizerState:
  """State of an optimizer.

  Attributes:
    step: int32 scalar, the number of updates made.
    param_states: arrays of the optimizer, often in a tree that mirrors the parameters.
  """

  step: jax.Array
  param_states: Any


def axes_of_state(param_states: LogicalAxes) -> OptimizerState:
  """Return the logical axes of a state: none for the step, a scalar, and those of `param_states`."""
  axes: dict[str, Any] = {'step': PartitionSpec(), 'param_states': param_states}
  return OptimizerState(**axes)


def _field_names(hyper_params: Any) -> list[str]:
  if not dataclasses.is_dataclass(hyper_params):
    return []
  return [field.name for field in dataclasses.fields(hyper_params)]


class OptimizerDef(abc.ABC):
  """Definition of an optimizer: hyper-parameters and pure functions, no arrays.

  Attributes:
    hyper_params: frozen dataclass with the defaults of the values that `update_hyper_params` may override.
    update_options: options that every optimizer has; see `with_update_options`.
    param_scales: factors of learning rate and weight decay by parameter, from these options or from those of an
      optimizer that has this one as a part.
  """

  update_options = UpdateOptions()
  param_scales = ParamScales()
  # The definition from which `with_param_axes` made this one, and the axes.
  _origin: tuple['OptimizerDef', Any] | None = None

  def __init__(self, hyper_params: Any):
    self.hyper_params = hyper_params

  def __eq__(self, other: Any) -> bool:
    # States made from one definition have equal definitions, so that their structures and compiled steps agree.
    return self is other or (
      isinstance(other, OptimizerDef) and self._origin is not None and self._origin == other._origin
    )

  def __hash__(self) -> int:
    return id(self if self._origin is None else self._origin[0])

  @property
  def name(self) -> str:
    """Name of this optimizer, recorded with checkpoints and used in messages."""
    return type(self).__name__

  @property
  def extra_args(self) -> tuple[str, ...]:
    """Names, out of `EXTRA_ARGS`, of the values that `apply_gradient` takes as keyword arguments."""
    return ()

  @property
  def uses_learning_rate(self) -> bool:
    """True if the trainer's `learning_rate`, passed to `apply_gradient`, has an effect on the update."""
    return True

  @property
  def needs_learning_rate(self) -> bool:
    """True if an update requires the trainer's `learning_rate`."""
    return self.uses_learning_rate

  @property
  def owns_learning_rate(self) -> bool:
    """True if the user gave this optimizer a learning rate, so that the trainer must have none."""
    return self.uses_learning_rate and not self.needs_learning_rate

  @property
  def parts_with_own_learning_rate(self) -> tuple[str, ...]:
    """Names of the parts that keep a learning rate which the user gave them, while others have the trainer's."""
    return ()

  @property
  def configured_learning_rates(self) -> dict[str, Any]:
    """Learning rates that the user gave this optimizer, numbers or schedules, as far as they are known.

    The names are 'learning_rate', or '<part>/learning_rate' for an optimizer with parts.
    """
    return {}

  @property
  def gradient_clipping(self) -> tuple[str, ...]:
    """Options and transformations by which this optimizer clips gradients, as far as they are known, for messages."""
    return ()

  @property
  def has_weight_decay(self) -> bool:
    """True if this optimizer decays parameters, so that factors of the weight decay have an effect."""
    return False

  def decaying_paths(self, params: Params) -> frozenset[str]:
    """Return the '/'-joined paths of the parameters, or of their shapes, whose optimizer has a weight decay."""
    if self.has_weight_decay:
      return frozenset(path for path, _ in tree_utils.named_leaves(params))
    return frozenset()

  @property
  def has_param_wise_state(self) -> bool:
    """True if `param_states` is a tree like the parameters, with the state of each parameter at its path."""
    return False

  @abc.abstractmethod
  def init_state(self, params: Params) -> OptimizerState:
    """Return the state before the first update.

    Args:
      params: tree of parameters, of which only shapes and dtypes matter in most optimizers.

    Returns:
      State with step 0; float32 statistics.
    """

  @abc.abstractmethod
  def apply_gradient(
    self, hyper_params: Any, params: Params, state: OptimizerState, grads: Params
  ) -> tuple[Params, OptimizerState]:
    """Make one update.

    Args:
      hyper_params: hyper-parameters of this update, the result of `update_hyper_params`.
      params: tree of parameters, arrays of any shape.
      state: state of the same structure as `init_state(params)`.
      grads: gradients, a tree like `params` with the same shapes.

    A definition with `extra_args` also takes these as optional keyword arguments.

    Returns:
      (new parameters, new state), of the same structure, shapes and dtypes as the old ones.
    """

  def learning_rates(self, state: OptimizerState, *, is_passed: bool) -> dict[str, jax.Array]:
    """Return the values of `configured_learning_rates` in the next update; traced in every train step.

    Args:
      state: the state before the update.
      is_passed: True if the update gets a `learning_rate`, so that the rates it replaces are left out.

    Returns:
      Name to float32 scalar.
    """
    if is_passed:
      return {}
    return learning_rates_at(self.configured_learning_rates, state.step)

  def metrics(self, state: OptimizerState) -> dict[str, jax.Array]:
    """Return metrics of the last update; traced in every train step, so they should be cheap.

    Args:
      state: the state after the update.

    Returns:
      Name to scalar array; the trainer reports it as `optimizer/<name>`.
    """
    del state
    return {}

  def optional_states(self, state: OptimizerState) -> dict[str, dict[str, Any]]:
    """Return the arrays that a run may have or lack when it resumes, because an option of the optimizer may change.

    Args:
      state: the state, or its shapes.

    Returns:
      Beginning of the arrays' names in 'param_states' of the state dict to the values of added arrays by name, NumPy
      arrays; {} for arrays that this state does not have.
    """
    del state
    return {}

  def restore_remedy(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return which option restores the state of a checkpoint that does not fit, a sentence; None if no option does.

    Args:
      stored: arrays of the checkpoint or their shapes, by name.
      wanted: arrays of the state of the run, by name.
    """
    del stored, wanted
    return None

  def gradient_evidence(self, grads: Params, new_state: OptimizerState) -> PyTree:
    """Return real or complex arrays that contain a non-finite number if and only if a gradient does.

    Each train step reduces the arrays. An optimizer whose statistics are smaller than the gradients returns these.

    Args:
      grads: the gradients.
      new_state: the state after the update with these gradients.
    """
    del new_state
    return grads

  def report(self, values: Mapping[str, float]) -> list[str]:
    """Return lines for the log.

    Args:
      values: values of `metrics` on the host, by name.
    """
    del values
    return []

  def eval_params(self, params: Params, state: OptimizerState) -> Params:
    """Return the parameters for evaluation, decoding and export; by default `params`.

    Args:
      params: trained parameters.
      state: state of the optimizer.

    Returns:
      Tree like `params`, with the same shapes and dtypes.
    """
    del state
    return params

  def stored_params(self, state: OptimizerState) -> dict[str, str]:
    """Return the parameters that updates compute from stored ones, so that a change after an update is lost.

    Args:
      state: the state; leaves may be shapes.

    Returns:
      '/'-joined path of a parameter to the name of its optimizer.
    """
    del state
    return {}

  def frozen_paths(self, params: Params, state: OptimizerState) -> frozenset[str]:
    """Return the '/'-joined paths of parameters that updates never change, so that no gradients are computed for them.

    Args:
      params: the parameters; leaves may be shapes.
      state: the state; leaves may be shapes.
    """
    del params, state
    return frozenset()

  def unsupported_reason(self, state: OptimizerState) -> str | None:
    """Return why the trainer cannot train with this optimizer, and the remedy; None if it can.

    Args:
      state: the state; its leaves may be `jax.ShapeDtypeStruct`s.
    """
    del state
    return None

  def derive_logical_axes(
    self, optimizer: 'Optimizer', param_logical_axes: LogicalAxes
  ) -> 'Optimizer':
    """Return the logical axes of parameters and state, derived from those of the parameters.

    Args:
      optimizer: the optimizer; its leaves may be arrays or `jax.ShapeDtypeStruct`s.
      param_logical_axes: tree like the parameters with a `PartitionSpec` of logical names at each leaf.

    Returns:
      An `Optimizer` of exactly the structure of `optimizer`; every leaf is a `PartitionSpec` with one entry per dim.

    Raises:
      ConfigError: the class does not implement this method.
    """
    raise ConfigError(
      f'{type(self).__name__} does not define the logical axes of its state. Implement '
      'derive_logical_axes(optimizer, param_logical_axes) in the class.'
    )

  def stacking_key(self, path: str, param: jax.Array, state: OptimizerState) -> Hashable | None:
    """Return a value that is equal for parameters of different layers whose arrays may be stacked for updates.

    An update of stacked arrays (see `layer_stacks`) must be the update of each layer. None, the default, says that
    `apply_gradient` does not support them. This is called only for a class that declares ACCEPTS_STACKED_LAYERS = True
    in its body.

    Args:
      path: '/'-joined path of the parameter.
      param: the parameter, or its shape.
      state: the state; its leaves may be shapes.
    """
    del path, param, state
    return None

  def rename_params(
    self, param_states: PyTree, rename_fn: Callable[[Sequence[str]], tuple[str, ...]]
  ) -> PyTree:
    """Return `param_states` whose static data has other paths of parameters; most states have no such data.

    Args:
      param_states: state of the optimizer without the step.
      rename_fn: from '/'-joined paths of parameters to their new paths.
    """
    del rename_fn
    return param_states

  def with_param_axes(
    self, param_logical_axes: LogicalAxes, params: Params | None = None
  ) -> 'OptimizerDef':
    """Return the definition for parameters with these logical axes; `self` is unchanged.

    A class that depends on the axes overrides `_for_param_axes`, or T5X's `set_param_axes`, which is called on a copy.

    Args:
      param_logical_axes: a `PartitionSpec` of logical names for each parameter.
      params: the parameters; None if they are not known yet.

    Returns:
      The definition; `self` if the axes do not matter. Definitions made from the same `self` and axes are equal.
    """
    origin = self if self._origin is None else self._origin[0]
    if type(self).set_param_axes is not OptimizerDef.set_param_axes:
      definition = copy.copy(origin)
      definition.set_param_axes(param_logical_axes)
    else:
      definition = origin._for_param_axes(param_logical_axes, params)
    if definition is not origin:
      definition.update_options = origin.update_options
      definition.param_scales = origin.param_scales
      definition._origin = (origin, tuple(tree_utils.named_leaves(param_logical_axes)))
    if self.depends_on_layout and params is not None:
      layouts.warn(self.name, param_logical_axes, params, definition._is_layout_dependent)
    return definition

  @property
  def depends_on_layout(self) -> bool:
    """True if updates may depend on the layout of the parameters, for the reason in `LAYOUT_DEPENDENT`."""
    return self.name in layouts.LAYOUT_DEPENDENT

  def _is_layout_dependent(self, path: str, units: Units) -> bool:
    """Return True if the update of a parameter is not that of its units, for an optimizer that `depends_on_layout`."""
    del path
    return not units.is_single

  def _for_param_axes(
    self, param_logical_axes: LogicalAxes, params: Params | None
  ) -> 'OptimizerDef':
    """Return a new definition for `with_param_axes`, or `self`."""
    del param_logical_axes, params
    return self

  def set_param_axes(self, param_logical_axes: LogicalAxes) -> None:
    """Change this definition into the result of `with_param_axes`: T5X's interface, not used by t5x_lite.

    Args:
      param_logical_axes: a `PartitionSpec` of logical names for each parameter.
    """
    vars(self).update(
      {**vars(copy.copy(self)._for_param_axes(param_logical_axes, None)), '_origin': None}
    )

  def update_hyper_params(self, **hyper_param_overrides: Any) -> Any:
    """Return the hyper-parameters with overrides; the trainer sets the learning rate of a step with it.

    Args:
      **hyper_param_overrides: new values by name; `hyper_params=...` replaces all of them first.

    Returns:
      Hyper-parameters for `apply_gradient`. The definition itself is unchanged.

    Raises:
      ConfigError: an unknown hyper-parameter or an invalid learning rate.
    """
    hyper_params = hyper_param_overrides.pop('hyper_params', self.hyper_params)
    if not hyper_param_overrides:
      return hyper_params
    names = _field_names(hyper_params)
    for name in hyper_param_overrides:
      if name not in names:
        raise ConfigError(
          f'{type(self).__name__} has no hyper-parameter {name!r}.{did_you_mean(name, names)}'
        )
    if 'learning_rate' in hyper_param_overrides:
      check_learning_rate(hyper_param_overrides['learning_rate'], type(self).__name__)
    return dataclasses.replace(hyper_params, **hyper_param_overrides)

  def with_update_options(self, options: UpdateOptions) -> 'OptimizerDef':
    """Return this definition with options that every optimizer has; see the function `with_update_options`.

    Raises:
      ConfigError: scales that are not supported or have no effect, or options that are set already.
    """
    if self.update_options != UpdateOptions():
      raise ConfigError(f'{self.name} has `{OWNER}` already. Set all options in one call.')
    if options.scales.weight_decays and not self.has_weight_decay:
      raise ConfigError(
        f'`{OWNER}.weight_decay_scales` has no effect: {self.name} has no known weight decay. Set '
        'the option of its weight decay, or remove the scales. The weight decay of a transformation '
        "that OptaxWrapper wraps is not known: use t5x_lite.optimizers' form of it."
      )
    if options.scales:
      definition = self.with_param_scales(options.scales)
    else:
      definition = copy.copy(self)
    definition.update_options = options
    definition._origin = None
    return definition

  def with_param_scales(self, scales: ParamScales) -> Self:
    """Return this definition with other learning rates and weight decays by parameter, see `_for_param_scales`."""
    if self.param_scales:
      raise ConfigError(f'{self.name} has scales by parameter already. Set them in one place.')
    definition = self._for_param_scales(scales)
    definition.param_scales = scales
    definition._origin = None
    return definition

  def _for_param_scales(self, scales: ParamScales) -> Self:
    """Return a new definition for `with_param_scales`, which updates a parameter as if its rates were `scales.of(path)`
    times those of this definition, with the same state."""
    del scales
    raise ConfigError(
      f'{self.name} does not support scales by parameter. Implement _for_param_scales(scales) in '
      f'{type(self).__name__}.'
    )

  def check_param_scales(self, params: Params) -> None:
    """Raise if a scale of the options has no effect for these parameters, and log the effect of scales."""
    if self.update_options.scales:
      self.update_options.scales.check(params, self.decaying_paths(params))

  def create(self, target: Params) -> 'Optimizer':
    """Return an `Optimizer` of the parameters `target`, in their dtype of the options, with an initial state."""
    self.check_param_scales(target)
    target = self.update_options.prepare(target)
    return Optimizer(optimizer_def=self, state=self.init_state(target), target=target)

  def state_dict(self, target: Params, state: OptimizerState) -> dict[str, Any]:
    """Return the serialisable form of parameters and state.

    Args:
      target: parameters.
      state: optimizer state.

    Returns:
      {'target': ..., 'state': {'step': ..., 'param_states': ...}}, nested plain dicts whose leaves are the arrays.
      Nodes without arrays (optax has many) are left out, because storage formats disagree about empty nodes.
    """
    return {
      'target': state_dicts.to_state_dict(target),
      'state': state_dicts.to_state_dict(state),
    }

  def restore_state(
    self, opt_target: Params, opt_state: OptimizerState, state_dict: Mapping[str, Any]
  ) -> tuple[Params, OptimizerState]:
    """Return parameters and state with the values of a state dict; inverse of `state_dict`.

    Args:
      opt_target: parameters, for their structure.
      opt_state: optimizer state, for its structure.
      state_dict: result of `state_dict` for an optimizer of that structure, with any values at its leaves.

    Returns:
      (parameters, state) with the values of `state_dict`.

    Raises:
      CheckpointError: the state dict lacks a value or has an unknown one; the message names its path.
    """
    return (
      state_dicts.restore_from_state_dict(opt_target, state_dict, 'target'),
      state_dicts.restore_from_state_dict(opt_state, state_dict, 'state'),
    )


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
    """Return the optimizer after one update.

    Args:
      grads: gradients, a tree like `target`; plain and frozen dicts are interchangeable.
      **overrides: hyper-parameters of this update, for instance `learning_rate=...`, and the values that the
        definition's `extra_args` name, for instance `value=loss`; with stochastic rounding, `rounding_key=...`.

    Returns:
      A new `Optimizer`.
    """
    extra_args = {
      name: overrides.pop(name) for name in self.optimizer_def.extra_args if name in overrides
    }
    rounds = self.optimizer_def.update_options.stochastic_rounding
    rounding_key = overrides.pop('rounding_key', None)
    hyper_params = self.optimizer_def.update_hyper_params(**overrides)
    grads = _in_containers_of(self.target, grads)
    target = self.target
    if rounds:
      target, extra_args = rounding.widen(target, extra_args)
    target, state = self.optimizer_def.apply_gradient(
      hyper_params, target, self.state, grads, **extra_args
    )
    if rounds:
      target = rounding.round_params(rounding_key, target, self.target)
    return self.replace(target=target, state=state)

  def state_dict(self) -> dict[str, Any]:
    """Return {'target': ..., 'state': ...}, see `OptimizerDef.state_dict`."""
    return self.optimizer_def.state_dict(self.target, self.state)

  def restore_state(self, state: Mapping[str, Any]) -> 'Optimizer':
    """Return an optimizer with the values of the state dict `state`, see `OptimizerDef.restore_state`."""
    target, opt_state = self.optimizer_def.restore_state(self.target, self.state, state)
    return self.replace(target=target, state=opt_state)


def _in_containers_of(target: PyTree, grads: PyTree) -> PyTree:
  """Return `grads` as a frozen dict if `target` is frozen, and as a plain dict otherwise."""
  if isinstance(target, FrozenDict) and isinstance(grads, dict):
    return flax.core.freeze(grads)
  if isinstance(target, dict) and isinstance(grads, FrozenDict):
    return flax.core.unfreeze(grads)
  return grads


# T5X's names for use in annotations.
OptimizerType = Optimizer
OptimizerDefType = OptimizerDef
OptimizerStateType = OptimizerState
