"""Train states: the state of a training run between steps, which is saved and restored.

A train state is a pytree: parameters, optimizer state, the model's mutable collections, and optionally a running
average of the parameters. `state_dict()` is its serialisable form; `as_logical_axes()` is the same tree with the
logical axes of each array, the input of a partitioner.
"""

from collections.abc import Callable, Mapping, Sequence
import operator
from typing import Any, ClassVar, Protocol

from flax import struct
import flax.core
from flax.linen import partitioning as flax_partitioning
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.optimizers import Optimizer
from t5x_lite.optimizers import OptimizerDef
from t5x_lite.optimizers import match_logical_axes
from t5x_lite.optimizers import restore_from_state_dict
from t5x_lite.optimizers import to_state_dict
from t5x_lite.optimizers import unnamed_axes
from t5x_lite.trainer import averaging
from t5x_lite.types import Array, LogicalAxes, Params, PyTree

# T5X's name for "no mutable collections".
EMPTY_DICT = flax.core.freeze({})

_AXES_SUFFIX = '_axes'


class EvaluationState(Protocol):
  """Interface of states for evaluation and decoding."""

  @property
  def step(self) -> Array | None:
    """Number of updates made, int32 scalar; None if it is unknown."""
    ...

  @property
  def params(self) -> Params:
    """Nested dict of parameters."""
    ...

  @property
  def eval_params(self) -> Params:
    """Parameters for evaluation, decoding and export; `params` for most optimizers."""
    ...

  @property
  def flax_mutables(self) -> Mapping[str, Any]:
    """Mutable collections of the model by name; empty for most models."""
    ...


class TrainState(EvaluationState, Protocol):
  """Interface of train states for the trainer and checkpoints."""

  @property
  def step(self) -> Array:
    """Number of updates made, int32 scalar."""
    ...

  @property
  def evaluates_other_params(self) -> bool:
    """True if `eval_params` are not `params`; computed from shapes, so leaves may be shapes."""
    ...

  @property
  def param_states(self) -> PyTree:
    """State of the optimizer without the step."""
    ...

  @property
  def optimizer_def(self) -> OptimizerDef:
    """Definition of the optimizer."""
    ...

  def state_dict(self) -> dict[str, Any]:
    """Return {'target', 'state', ...}: nested dicts whose leaves are the arrays."""
    ...

  def restore_state(self, state_dict: Mapping[str, Any]) -> 'TrainState':
    """Return a state like this one with the values of `state_dict`."""
    ...

  def replace_params(self, params: Params) -> 'TrainState':
    """Return a state with other parameters, a tree with the same structure, shapes and dtypes."""
    ...

  def replace_flax_mutables(self, flax_mutables: Mapping[str, Any]) -> 'TrainState':
    """Return a state with other mutable collections, nested dicts by name of the collection."""
    ...

  def replace_step(self, step: Array) -> 'TrainState':
    """Return a state with another step, an int or an int32 scalar."""
    ...

  def apply_gradient(
    self,
    grads: PyTree,
    learning_rate: Any,
    flax_mutables: Mapping[str, Any] | None = None,
    **extra_args: Any,
  ) -> 'TrainState':
    """Return the state after one update; see `FlaxOptimTrainState.apply_gradient` for `extra_args`."""
    ...

  def optimizer_metrics(self) -> dict[str, Array]:
    """Return scalars about the last update by name; see `OptimizerDef.metrics`."""
    ...

  def as_logical_axes(self) -> 'TrainState':
    """Return the same tree with a `PartitionSpec` of logical axis names for each array."""
    ...


class FlaxOptimTrainState(struct.PyTreeNode):
  """Train state of a Flax model and an optimizer of `t5x_lite.optimizers`.

  Attributes:
    _optimizer: parameters and optimizer state.
    params_axes: the model's `params_axes` collection (metadata without arrays), or None.
    flax_mutables: the model's other collections by name; plain dicts.
    flax_mutables_axes: axes metadata by collection name, of collections with axes, or None.
    param_average: running average of the parameters, a tree like them, or None. It is saved, restored, and sharded like
      the parameters.
    param_ema: how updates change `param_average`; None keeps it.
  """

  ACCEPTS_STACKED_LAYERS: ClassVar[bool] = True

  _optimizer: Optimizer
  params_axes: Mapping[str, Any] | None = None
  flax_mutables: Mapping[str, Any] = struct.field(default_factory=dict)
  flax_mutables_axes: Mapping[str, Any] | None = None
  param_average: PyTree | None = None
  param_ema: averaging.ParamEma | None = struct.field(pytree_node=False, default=None)

  @classmethod
  def create(
    cls,
    optimizer_def: OptimizerDef,
    model_variables: Mapping[str, Any],
    param_ema: averaging.ParamEma | None = None,
  ) -> 'FlaxOptimTrainState':
    """Return the state before the first step.

    Args:
      optimizer_def: the optimizer; if the model has axes, the state has its `with_param_axes`.
      model_variables: result of `module.init`: `params`, `params_axes` if the model has axes, and any other collection
        `x`, with its axes in `x_axes`.
      param_ema: average of the parameters to keep, or None.

    Raises:
      ConfigError: no `params`, or axes that do not fit the variables; or an average of the parameters for an optimizer
        that evaluates other parameters than it trains.
    """
    variables, axes = _split_variables(model_variables)
    params = variables.pop('params')
    params_axes = axes.pop('params', None)
    if params_axes is not None:
      optimizer_def = optimizer_def.with_param_axes(
        _axis_names(params_axes, params, 'parameter'), params
      )
    state = cls(
      optimizer_def.create(params),
      params_axes=params_axes,
      flax_mutables=tree_utils.prune_empty(variables),
      flax_mutables_axes=axes or None,
    )
    if param_ema is None:
      return state
    if state.evaluates_other_params:
      raise ConfigError(
        f'`train.param_ema` must be None with the optimizer {optimizer_def.name}, which has its own '
        'average of the parameters for evaluation. Remove one of them.'
      )
    return state.replace(param_average=param_ema.init(params), param_ema=param_ema)

  @property
  def step(self) -> Array:
    """Number of updates made, int32 scalar."""
    return self._optimizer.state.step

  @property
  def params(self) -> Params:
    """Nested dict of parameters."""
    return self._optimizer.target

  @property
  def eval_params(self) -> Params:
    """Parameters for evaluation, decoding and export: the average if there is one, else `OptimizerDef.eval_params`."""
    if self.param_average is not None and (self.param_ema is None or self.param_ema.evaluate):
      return jax.tree.map(
        lambda average, param: average.astype(param.dtype), self.param_average, self.params
      )
    return self.optimizer_def.eval_params(self._optimizer.target, self._optimizer.state)

  @property
  def evaluates_other_params(self) -> bool:
    """True if `eval_params` are not `params`; computed from shapes, so leaves may be shapes."""
    is_other = False

    def compare(state):
      nonlocal is_other
      evaluated = jax.tree.leaves(state.eval_params)
      trained = jax.tree.leaves(state.params)
      is_other = any(map(operator.is_not, evaluated, trained))

    jax.eval_shape(compare, self)
    return is_other

  @property
  def param_states(self) -> PyTree:
    """State of the optimizer without the step."""
    return self._optimizer.state.param_states

  @property
  def optimizer_def(self) -> OptimizerDef:
    """Definition of the optimizer."""
    return self._optimizer.optimizer_def

  def state_dict(self) -> dict[str, Any]:
    """Return {'target', 'state': {'step', 'param_states'}}, with 'flax_mutables' and 'param_average' if they exist."""
    state_dict = self._optimizer.state_dict()
    if self.flax_mutables:
      state_dict['flax_mutables'] = to_state_dict(self.flax_mutables)
    if self.param_average is not None:
      state_dict['param_average'] = to_state_dict(self.param_average)
    return state_dict

  def restore_state(self, state_dict: Mapping[str, Any]) -> 'FlaxOptimTrainState':
    """Return a state of this structure with the values of `state_dict`.

    Args:
      state_dict: result of `state_dict()` for a state of this structure, with any values at its leaves.

    Raises:
      CheckpointError: a missing or unknown value.
    """
    has_entry = {
      'target': True,
      'state': True,
      'flax_mutables': bool(self.flax_mutables),
      'param_average': self.param_average is not None,
    }
    for key in state_dict:
      if not has_entry.get(key, False):
        raise CheckpointError(
          f'Cannot restore: the state dict has an entry {key!r}, but this train state has none. Remove the '
          'entry, or restore with the model and options that it was saved with.'
        )
    restored = self.replace(_optimizer=self._optimizer.restore_state(state_dict))
    if self.flax_mutables:
      restored = restored.replace(
        flax_mutables=restore_from_state_dict(self.flax_mutables, state_dict, 'flax_mutables')
      )
    if self.param_average is not None:
      restored = restored.replace(
        param_average=restore_from_state_dict(self.param_average, state_dict, 'param_average')
      )
    return restored

  def replace_params(self, params: Params) -> 'FlaxOptimTrainState':
    """Return a state with other parameters, a tree like `params`, and the same optimizer state and step."""
    return self.replace(_optimizer=self._optimizer.replace(target=_plain(params)))

  def replace_flax_mutables(self, flax_mutables: Mapping[str, Any]) -> 'FlaxOptimTrainState':
    """Return a state with other mutable collections, nested dicts by name of the collection."""
    return self.replace(flax_mutables=_plain(flax_mutables))

  def replace_step(self, step: Array) -> 'FlaxOptimTrainState':
    """Return a state with another step, an int or an int32 scalar, and the same counters in optax states."""
    return self.replace(
      _optimizer=self._optimizer.replace(state=self._optimizer.state.replace(step=_as_step(step)))
    )

  def apply_gradient(
    self,
    grads: PyTree,
    learning_rate: Any = None,
    flax_mutables: Mapping[str, Any] | None = None,
    constraint_fn: Callable[[Params], Params] | None = None,
    **extra_args: Any,
  ) -> 'FlaxOptimTrainState':
    """Return the state after one update.

    Args:
      grads: gradients, a tree like the parameters.
      learning_rate: learning rate of this update; None for the optimizer's.
      flax_mutables: new mutable collections; None keeps the current ones. (T5X drops them.)
      constraint_fn: function from the optimizer's new parameters to those of the state, before they are averaged.
      **extra_args: values of the step that the optimizer needs, e.g. `value`; see `OptimizerDef.extra_args`.

    Returns:
      A new state, also with the new `param_average`.
    """
    if learning_rate is not None:
      extra_args['learning_rate'] = learning_rate
    optimizer = self._optimizer.apply_gradient(grads, **extra_args)
    if constraint_fn is not None:
      optimizer = optimizer.replace(target=constraint_fn(optimizer.target))
    state = self.replace(_optimizer=optimizer)
    if self.param_ema is not None:
      assert self.param_average is not None  # `create` makes both
      state = state.replace(
        param_average=self.param_ema.update(self.param_average, state.params, state.step)
      )
    if flax_mutables is None:
      return state
    return state.replace_flax_mutables(flax_mutables)

  def optimizer_metrics(self) -> dict[str, Array]:
    """Return scalars about the last update by name; see `OptimizerDef.metrics`."""
    return self.optimizer_def.metrics(self._optimizer.state)

  def for_inference(self) -> 'InferenceState':
    """Return a state with the parameters for evaluation, step and mutable collections, without the optimizer."""
    return InferenceState(
      step=self.step,
      params=self.eval_params,
      params_axes=self.params_axes,
      flax_mutables=self.flax_mutables,
      flax_mutables_axes=self.flax_mutables_axes,
    )

  def find_layer_stacks(
    self,
    loops: Mapping[str, Sequence[tuple[int, ...]]],
    axes: 'FlaxOptimTrainState',
    min_layers: int = 2,
    option_fn: Callable[[str], Any] = lambda path: None,
  ) -> LayerStacks:
    """Return the layers whose arrays can be stacked: those with equal shapes, dtypes, mesh axes and options.

    Nothing is stacked if the optimizer does not support it for a parameter of these layers.

    Args:
      loops: candidates by stack, see `Network.scanned_layers`.
      axes: this state with a PartitionSpec of mesh axes for each array.
      min_layers: least number of layers that are stacked.
      option_fn: from the '/'-joined path of a parameter to a value that must be equal for stacked layers.
    """
    if not layer_stacks.is_accepted_by(self, self.optimizer_def):
      return LayerStacks()
    # Facts by layer, (stack, name of the layer), and by path without the layer.
    facts: dict[tuple[str, str], dict[tuple[str, ...], Any]] = {}
    for stack, groups in loops.items():
      for group in groups:
        for layer in group:
          facts[stack, layer_stacks.layer_name(layer)] = {}

    def add(path, fact):
      names = path.split('/')
      for i, pair in enumerate(zip(names, names[1:], strict=False)):
        if pair in facts:
          others = (*names[:i], *names[i + 2 :])
          facts[pair][others] = fact
          return True
      return False

    arrays = tree_utils.named_leaves((self._optimizer, self.param_average))
    specs = jax.tree.leaves((axes._optimizer, axes.param_average))
    for (name, array), spec in zip(arrays, specs, strict=True):
      add(name, (array.shape, array.dtype, spec))
    for path, param in tree_utils.named_leaves(self.params):
      key = self.optimizer_def.stacking_key(path, param, self._optimizer.state)
      if add(f'stacking_key/{path}', (key, option_fn(path))) and key is None:
        return LayerStacks()
    stacks = []
    for stack, groups in loops.items():
      for group in groups:
        while group:  # divide the group into layers with equal facts
          facts_of = [facts[stack, layer_stacks.layer_name(layer)] for layer in group]
          equal = []
          others = []
          for layer, found in zip(group, facts_of, strict=True):
            if found == facts_of[0]:
              equal.append(layer)
            else:
              others.append(layer)
          if len(equal) >= min_layers:
            stacks.append((stack, tuple(equal)))
          group = others
    return LayerStacks(tuple(stacks))

  def stack_layers(self, stacks: LayerStacks) -> 'FlaxOptimTrainState':
    """Return the state with parameters, their average and the optimizer's state in the form of `layer_stacks`."""
    return self._convert_layers(stacks.stack, stacks.stack_paths)

  def unstack_layers(self, stacks: LayerStacks) -> 'FlaxOptimTrainState':
    """Return the inverse of `stack_layers`."""
    return self._convert_layers(stacks.unstack, stacks.unstack_paths)

  def _convert_layers(
    self, convert: Callable[[PyTree], PyTree], rename: Callable[[Sequence[str]], tuple[str, ...]]
  ):
    optimizer, average = convert((self._optimizer, self.param_average))
    param_states = self.optimizer_def.rename_params(optimizer.state.param_states, rename)
    optimizer = optimizer.replace(state=optimizer.state.replace(param_states=param_states))
    return self.replace(_optimizer=optimizer, param_average=average)

  def as_logical_axes(self) -> 'FlaxOptimTrainState':
    """Return the same tree with a `PartitionSpec` of logical names, one per dim, for each array.

    Mutable collections whose module declares no axes (`variable_with_axes`) have no names and are replicated.

    Raises:
      ConfigError: the model declares no axes for its parameters.
    """
    param_axes = _required_axis_names(self.params_axes, self.params)
    average_axes = None
    if self.param_average is not None:
      average_axes = match_logical_axes(self.param_average, param_axes, 'averaged parameter')
    return self.replace(
      _optimizer=self._optimizer.optimizer_def.derive_logical_axes(self._optimizer, param_axes),
      flax_mutables=_mutables_axes(self.flax_mutables, self.flax_mutables_axes),
      param_average=average_axes,
    )


class InferenceState(struct.PyTreeNode):
  """State for evaluation and inference: parameters without an optimizer.

  It can be restored from the state dict of any training state, of which it reads step, parameters and mutables.

  Attributes:
    step: int32 scalar, number of updates of these parameters, or None.
    params: nested dict of parameters.
    params_axes: the model's `params_axes` collection (metadata without arrays), or None.
    flax_mutables: the model's other collections by name; plain dicts.
    flax_mutables_axes: axes metadata by collection name, of collections with axes, or None.
  """

  step: Array | None
  params: Params
  params_axes: Mapping[str, Any] | None = None
  flax_mutables: Mapping[str, Any] = struct.field(default_factory=dict)
  flax_mutables_axes: Mapping[str, Any] | None = None

  @classmethod
  def create(cls, model_variables: Mapping[str, Any]) -> 'InferenceState':
    """Return a state at step 0 with the result of `module.init`; see `FlaxOptimTrainState.create`.

    Raises:
      ConfigError: no `params`, or axes that do not fit the variables.
    """
    variables, axes = _split_variables(model_variables)
    params = variables.pop('params')
    return cls(
      step=_as_step(0),
      params=params,
      params_axes=axes.pop('params', None),
      flax_mutables=tree_utils.prune_empty(variables),
      flax_mutables_axes=axes or None,
    )

  @property
  def eval_params(self) -> Params:
    """Parameters for evaluation, decoding and export: `params`."""
    return self.params

  @property
  def param_states(self) -> PyTree:
    """Raises ConfigError: there is no optimizer."""
    raise _no_optimizer('param_states')

  def apply_gradient(self, *args: Any, **kwargs: Any) -> 'InferenceState':
    """Raise ConfigError: there is no optimizer."""
    raise _no_optimizer('apply_gradient')

  def state_dict(self) -> dict[str, Any]:
    """Return {'target', 'state': {'step'}}, with 'flax_mutables' if they exist."""
    state_dict = {'target': to_state_dict(self.params), 'state': {}}
    if self.step is not None:
      state_dict['state']['step'] = self.step
    if self.flax_mutables:
      state_dict['flax_mutables'] = to_state_dict(self.flax_mutables)
    return state_dict

  def restore_state(self, state_dict: Mapping[str, Any]) -> 'InferenceState':
    """Return a state of this structure with the values of a training or inference state dict.

    Raises:
      CheckpointError: a parameter, the step or a mutable variable is missing.
    """
    restored = self.replace(params=restore_from_state_dict(self.params, state_dict, 'target'))
    if self.step is not None:
      if 'step' not in state_dict.get('state', {}):
        raise CheckpointError('Cannot restore: the value at state/step is missing.')
      restored = restored.replace(step=state_dict['state']['step'])
    if self.flax_mutables:
      restored = restored.replace(
        flax_mutables=restore_from_state_dict(self.flax_mutables, state_dict, 'flax_mutables')
      )
    return restored

  def replace_params(self, params: Params) -> 'InferenceState':
    """Return a state with other parameters, a tree with the same structure, shapes and dtypes."""
    return self.replace(params=_plain(params))

  def replace_flax_mutables(self, flax_mutables: Mapping[str, Any]) -> 'InferenceState':
    """Return a state with other mutable collections, nested dicts by name of the collection."""
    return self.replace(flax_mutables=_plain(flax_mutables))

  def replace_step(self, step: Array) -> 'InferenceState':
    """Return a state with another step, an int or an int32 scalar."""
    return self.replace(step=_as_step(step))

  def as_logical_axes(self) -> 'InferenceState':
    """Return the same tree with a `PartitionSpec` of logical names for each array.

    Raises:
      ConfigError: the model declares no axes for its parameters.
    """
    step_axes = None
    if self.step is not None:
      step_axes = PartitionSpec()
    return self.replace(
      step=step_axes,
      params=_required_axis_names(self.params_axes, self.params),
      flax_mutables=_mutables_axes(self.flax_mutables, self.flax_mutables_axes),
    )


def _plain(tree: Any) -> dict[str, Any]:
  """Return nested mappings, which may be frozen, as nested dicts."""
  return flax.core.unfreeze(tree)


def _no_optimizer(name: str) -> ConfigError:
  return ConfigError(
    f'InferenceState has no optimizer, so it has no {name}. Create a FlaxOptimTrainState to train.'
  )


def _as_step(step: Any) -> Any:
  """Return `step` as an int32 array, or unchanged if it is a spec or a shape."""
  if isinstance(step, (int, np.integer, np.ndarray, jax.Array)):
    return jnp.asarray(step, jnp.int32)
  return step


def _split_variables(model_variables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return the result of `module.init` as (collections by name, axes metadata by collection name).

  Raises:
    ConfigError: no `params`, or axes that do not fit the variables.
  """
  collections = _plain(model_variables)
  axes = {}
  for name in list(collections):
    if name.endswith(_AXES_SUFFIX):
      axes[name.removesuffix(_AXES_SUFFIX)] = collections.pop(name)
  if missing := {'params', *axes} - set(collections):
    raise ConfigError(
      f"The model's variables must have the collections {sorted(missing)}, got {sorted(collections)}. "
      'Pass the result of module.init.'
    )
  for name in axes:
    if name == 'params':
      what = 'parameter'
    else:
      what = f'variable of the collection {name}'
    _axis_names(axes[name], collections[name], what)
  return collections, axes


def _axis_names(axes_metadata: Mapping[str, Any], variables: PyTree, what: str) -> LogicalAxes:
  """Return the logical axes in Flax's metadata in the structure of `variables`; raise if ranks differ."""
  return match_logical_axes(variables, flax_partitioning.get_axis_names(axes_metadata), what)


def _required_axis_names(params_axes: Mapping[str, Any] | None, params: Params) -> LogicalAxes:
  if params_axes is None:
    raise ConfigError(
      "The model declares no logical axes for its parameters (it has no 'params_axes' collection). Create parameters "
      'with flax.linen.partitioning.param_with_axes, as the modules of t5x_lite.layers do.'
    )
  return _axis_names(params_axes, params, 'parameter')


def _mutables_axes(
  mutables: Mapping[str, Any], mutables_axes: Mapping[str, Any] | None
) -> dict[str, Any]:
  """Return the logical axes of the mutable collections; a collection without axes metadata has unnamed dims."""
  declared = mutables_axes or {}
  axes = {}
  for name, collection in mutables.items():
    if name in declared:
      what = f'variable of the collection {name}'
      axes[name] = _axis_names(declared[name], collection, what)
    else:
      axes[name] = jax.tree.map(unnamed_axes, collection)
  return axes
