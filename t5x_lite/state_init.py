"""Initialisation of train states, with every array on the devices of its sharding."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from t5x_lite import averaging
from t5x_lite import errors
from t5x_lite import train_state as train_state_lib
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.optimizers import OptimizerDef
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.types import PyTree


class InitFnCallable(Protocol):
  """Function that returns a model's variables, e.g. `model.get_initial_variables`."""

  def __call__(self, rng: jax.Array, input_shapes: Mapping[str, Sequence[int]],
               input_types: Mapping[str, Any] | None = None) -> Mapping[str, PyTree]:
    """Return variable collections: `params`, `params_axes`, and other collections with their `_axes`."""


class TrainStateInitializer:
  """Shapes, shardings and initialisation of a train state.

  Attributes:
    global_train_state_shape: the state with a `jax.ShapeDtypeStruct` for each array.
    train_state_axes: the state with a PartitionSpec of mesh axes for each array.
  """

  ACCEPTS_STACKED_LAYERS = True

  def __init__(self,
               optimizer_def: OptimizerDef | None,
               init_fn: InitFnCallable,
               input_shapes: Mapping[str, Sequence[int]],
               partitioner: BasePartitioner,
               input_types: Mapping[str, Any] | None = None,
               param_ema: averaging.ParamEma | None = None):
    """Trace the initialisation; compute nothing.

    Args:
      optimizer_def: the optimizer; None for an `InferenceState`, without optimizer state.
      init_fn: function that returns the model's variables.
      input_shapes: feature name to the shape of a global batch.
      partitioner: partitioner with the rules of the sharding.
      input_types: feature name to dtype; None for the model's defaults.
      param_ema: average of the parameters in the state, or None.

    Raises:
      ConfigError: the state cannot be sharded by the rules; see `PjitPartitioner.get_mesh_axes`.
    """

    def init_train_state(rng):
      variables = init_fn(rng=rng, input_shapes=input_shapes, input_types=input_types)
      if optimizer_def is None:
        return train_state_lib.InferenceState.create(variables)
      return train_state_lib.FlaxOptimTrainState.create(optimizer_def, variables, param_ema)

    self.global_train_state_shape = jax.eval_shape(init_train_state, jax.random.key(0))
    self._partitioner = partitioner
    self.train_state_axes = partitioner.get_mesh_axes(self.global_train_state_shape)
    self._init_train_state = init_train_state
    self._init_fns: dict[LayerStacks, Callable[[jax.Array], PyTree]] = {}
    self._params_on_devices = partitioner.params_on_devices

  def _init_fn(self, stacks: LayerStacks) -> Callable[[jax.Array], PyTree]:
    if stacks not in self._init_fns:
      init_train_state, axes = self._init_train_state, self.train_state_axes
      if stacks:
        axes = axes.stack_layers(stacks)

        def init_train_state(rng):
          return self._init_train_state(rng).stack_layers(stacks)

      self._init_fns[stacks] = self._partitioner.partition(
          init_train_state, in_axis_resources=None, out_axis_resources=axes)
    return self._init_fns[stacks]

  def lower(self, init_rng: jax.Array, stacks: LayerStacks = LayerStacks()) -> jax.stages.Lowered:
    """Return the program of `from_scratch` for ahead-of-time compilation; compute nothing."""
    return self._init_fn(stacks).lower(init_rng)

  def from_scratch(self, init_rng: jax.Array, stacks: LayerStacks = LayerStacks()) -> PyTree:
    """Return a newly initialised state.

    One program computes each array directly as the shards of the devices, without communication. The values depend on
    `init_rng`, not on the mesh, if its generator is JAX's default (threefry2x32); with hardware generators (rbg,
    unsafe_rbg) they also depend on the mesh.

    Args:
      init_rng: a PRNG key, typed or raw.
      stacks: layers whose arrays are stacked in the result, with the same values.

    Returns:
      The state: sharded arrays, or NumPy arrays in host memory if the partitioner has `params_on_devices=False`.

    Raises:
      ConfigError: JAX's random numbers depend on the mesh, or arrays in host memory would be split over several hosts.
    """
    if not jax.config.jax_threefry_partitionable:
      raise errors.ConfigError('With jax_threefry_partitionable off, initial values depend on the mesh. Unset '
                               'JAX_THREEFRY_PARTITIONABLE.')
    if self._params_on_devices:
      return self._init_fn(stacks)(init_rng)
    if jax.process_count() > 1:
      raise errors.ConfigError(f'params_on_devices=False needs one process, got {jax.process_count()}. Set '
                               'params_on_devices=True.')
    return jax.tree.map(np.asarray, self._init_fn(stacks)(init_rng))

  def begin_from_params(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the initial optimizer state, and average of the parameters, for given parameters.

    Optimizers with copies of the parameters (schedule_free, lookahead) copy the given ones.

    Args:
      state_dict: `state_dict()` of a state of this structure. `target` is read, and 'state/step' if it has no average.

    Returns:
      'state' with 'param_states', and 'param_average' if the state has one, as in `state_dict()`, with the shardings of
      `from_scratch`.

    Raises:
      ConfigError: the options of the average do not fit the step at which it begins.
    """
    shape = self.global_train_state_shape
    if 'param_average' not in state_dict and shape.param_ema is not None:
      shape.param_ema.check_begin(int(state_dict.get('state', {}).get('step', 0)))
    keys = {'state', 'param_average'} & set(shape.state_dict())

    def only(tree):
      return {key: {name: leaf for name, leaf in tree[key].items() if key != 'state' or name != 'step'} for key in keys}

    def begin(params):
      variables = {'params': params} | ({} if shape.params_axes is None else {'params_axes': shape.params_axes})
      state = train_state_lib.FlaxOptimTrainState.create(shape.optimizer_def, variables, shape.param_ema)
      if shape.param_average is not None and state.param_average is None:  # an average that updates do not change
        state = state.replace(param_average=params)
      return only(state.state_dict())

    axes = self.train_state_axes.state_dict()
    begin = self._partitioner.partition(
        begin, in_axis_resources=(axes['target'],), out_axis_resources=only(axes))
    made = begin(state_dict['target'])
    return made if self._params_on_devices else jax.tree.map(np.asarray, made)
