"""Initialisation of train states, with every array on the devices of its sharding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import models
from t5x_lite import train_state as train_state_lib
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.networks.t5_config import StackConfig
from t5x_lite.optimizers import OptimizerDef
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.trainer import averaging
from t5x_lite.types import PyTree


class InitFnCallable(Protocol):
  """Function that returns a model's variables, e.g. `model.get_initial_variables`."""

  def __call__(
    self,
    rng: jax.Array,
    input_shapes: Mapping[str, Sequence[int]],
    input_types: Mapping[str, Any] | None = None,
  ) -> Mapping[str, PyTree]:
    """Return variable collections: `params`, `params_axes`, and other collections with their `_axes`."""
    ...


class TrainStateInitializer:
  """Shapes, shardings and initialisation of a train state.

  Attributes:
    global_train_state_shape: the state with a `jax.ShapeDtypeStruct` for each array.
    train_state_axes: the state with a PartitionSpec of mesh axes for each array.
  """

  ACCEPTS_STACKED_LAYERS = True

  def __init__(
    self,
    optimizer_def: OptimizerDef | None,
    init_fn: InitFnCallable,
    input_shapes: Mapping[str, Sequence[int]],
    partitioner: BasePartitioner,
    input_types: Mapping[str, Any] | None = None,
    param_ema: averaging.ParamEma | None = None,
  ):
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
    self._network = stack_config(getattr(init_fn, '__self__', None))  # of a model's method
    self._init_fns: dict[LayerStacks, Callable[[jax.Array], PyTree]] = {}
    self._params_on_devices = partitioner.params_on_devices

  def _init_fn(self, stacks: LayerStacks) -> Callable[[jax.Array], PyTree]:
    if stacks not in self._init_fns:
      axes = self.train_state_axes
      if stacks:
        axes = axes.stack_layers(stacks)

      def init_train_state(rng: jax.Array) -> PyTree:
        state: Any = self._init_train_state(rng)
        if stacks:
          state = state.stack_layers(stacks)
        return state

      self._init_fns[stacks] = self._partitioner.partition(
        init_train_state, in_axis_resources=None, out_axis_resources=axes
      )
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
    if not jax.config.values['jax_threefry_partitionable']:
      raise errors.ConfigError(
        'With jax_threefry_partitionable off, initial values depend on the mesh. Unset '
        'JAX_THREEFRY_PARTITIONABLE.'
      )
    if self._params_on_devices:
      return self._init_fn(stacks)(init_rng)
    if jax.process_count() > 1:
      raise errors.ConfigError(
        f'params_on_devices=False needs one process, got {jax.process_count()}. Set '
        'params_on_devices=True.'
      )
    return jax.tree.map(np.asarray, self._init_fn(stacks)(init_rng))

  def from_checkpoints(
    self,
    restore_cfgs: Sequence[checkpoints.RestoreCheckpointConfig],
    ds_iter: Any = None,
    init_rng: jax.Array | None = None,
  ) -> Iterator[tuple[PyTree, str]]:
    """Yield the state of each checkpoint of the first configuration that has any.

    Args:
      restore_cfgs: configurations, searched in order.
      ds_iter: data iterator that goes to the saved position if `restore_dataset` is set; None for none.
      init_rng: key of arrays that a checkpoint lacks, for `fallback_to_scratch`.

    Yields:
      (state with the shardings of `from_scratch`, path of the checkpoint).

    Raises:
      CheckpointError: a checkpoint is missing, damaged or does not fit.
      ConfigError: `fallback_to_scratch` needs `init_rng`.
    """
    cfg, paths = checkpoints.get_first_valid_restore_config_and_paths(restore_cfgs)
    yield from self._restore_each(cfg, paths, ds_iter, init_rng)

  def from_checkpoint(
    self,
    ckpt_cfgs: Sequence[checkpoints.RestoreCheckpointConfig],
    *,
    ds_iter: Any = None,
    init_rng: jax.Array | None = None,
  ) -> PyTree | None:
    """Return the state of the only checkpoint, or None without one; see `from_checkpoints`.

    Raises:
      CheckpointError: several checkpoints, and the errors of `from_checkpoints`.
    """
    cfg, paths = checkpoints.get_first_valid_restore_config_and_paths(ckpt_cfgs)
    if len(paths) > 1:
      raise errors.CheckpointError(
        'RestoreCheckpointConfig must select at most one checkpoint, got '
        f"{', '.join(paths)}. Set mode='latest', or use from_checkpoints."
      )
    return next((state for state, _ in self._restore_each(cfg, paths, ds_iter, init_rng)), None)

  def from_checkpoint_or_scratch(
    self,
    ckpt_cfgs: Sequence[checkpoints.RestoreCheckpointConfig],
    *,
    init_rng: jax.Array,
    ds_iter: Any = None,
  ) -> PyTree:
    """Return the state of the only checkpoint, or a newly initialised state without one."""
    state = self.from_checkpoint(ckpt_cfgs, ds_iter=ds_iter, init_rng=init_rng)
    if state is None:
      return self.from_scratch(init_rng)
    return state

  def _restore_each(
    self,
    cfg: checkpoints.RestoreCheckpointConfig | None,
    paths: Sequence[str],
    ds_iter: Any,
    init_rng: Any,
  ) -> Iterator[tuple[PyTree, str]]:

    def initial_state():
      assert init_rng is not None  # otherwise it is not called
      return self.from_scratch(init_rng).state_dict()

    shape = self.global_train_state_shape
    for path in paths:
      assert cfg is not None  # paths are those of a configuration
      if checkpoints.is_standard(cfg.checkpointer_cls, 'restore'):
        is_inference = isinstance(shape, train_state_lib.InferenceState)
        state = checkpoints.restore_train_state(
          path,
          shape,
          self._partitioner,
          cfg,
          train_state_axes=self.train_state_axes,
          dataset_iterator=ds_iter,
          initial_state_fn=None if init_rng is None else initial_state,
          from_params_fn=None if is_inference else self.begin_from_params,
          network=self._network,
        )
      else:  # a class of a user, with T5X's arguments
        state = checkpoints.restore_checkpointer(cfg, shape, self._partitioner, ds_iter).restore(
          path=path,
          state_transformation_fns=cfg.state_transformation_fns,
          fallback_state=checkpoints.get_fallback_state(cfg, lambda _: initial_state(), init_rng),
        )
      yield state, path

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
      return {
        key: {name: leaf for name, leaf in tree[key].items() if key != 'state' or name != 'step'}
        for key in keys
      }

    def begin(params):
      variables = {'params': params}
      if shape.params_axes is not None:
        variables['params_axes'] = shape.params_axes
      state = train_state_lib.FlaxOptimTrainState.create(
        shape.optimizer_def, variables, shape.param_ema
      )
      # An average that updates do not change.
      if shape.param_average is not None and state.param_average is None:
        state = state.replace(param_average=params)
      return only(state.state_dict())

    axes = self.train_state_axes.state_dict()
    begin = self._partitioner.partition(
      begin, in_axis_resources=(axes['target'],), out_axis_resources=only(axes)
    )
    made = begin(state_dict['target'])
    if self._params_on_devices:
      return made
    return jax.tree.map(np.asarray, made)


def adapter_of(model: Any) -> adapters.Lora | None:
  """Return the adapter of a model, or None."""
  if isinstance(model, models.BaseTransformerModel):
    return model.adapter
  return None


def stack_config(model: Any) -> StackConfig | None:
  """Return the network's configuration if its field `config` is a `StackConfig`, else None.

  This field declares that the parameters of a module are T5's. Other networks have one parameter layout only.
  """
  if isinstance(model, models.BaseTransformerModel):
    config = getattr(model.module, 'config', None)
  else:
    config = None
  if isinstance(config, StackConfig):
    return config
  return None
