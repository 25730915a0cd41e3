"""Where a run starts from: its own newest sound checkpoint, else the configured one, else new parameters."""

from collections.abc import Mapping, Sequence
import dataclasses
import logging
import os
import re
import time
from typing import Any

import jax
import numpy as np
import optax

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import non_finite
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import state_init
from t5x_lite import summaries
from t5x_lite import train_step
from t5x_lite import trainer as trainer_lib
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks.stacks import StackNetwork
from t5x_lite.networks.t5_config import RELPOS_FIELDS, StackConfig
from t5x_lite.train_state import InferenceState, TrainState

# Fields of a network's configuration that say how it is computed, not what its parameters are.
_FIELDS_OF_A_RUN = frozenset({'dtype', 'dropout_rate', 'float32_attention_logits', 'remat_policy', 'scan_layers',
                              'param_layout', 'attention_kernel'})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingPoint:
  """What a run starts from.

  Attributes:
    path: the checkpoint, or None to start from scratch.
    resumes: whether it is one of the run's own, so that the run goes on rather than begins.
    restore_cfg: how to restore it.
    metadata: what was recorded with it.
  """

  path: str | None = None
  resumes: bool = False
  restore_cfg: checkpoints.RestoreCheckpointConfig | None = None
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def description(self) -> str:
    """What it is, for people."""
    if self.path is None:
      return 'new parameters'
    return f'{self.path} (this run)' if self.resumes else self.path

  @property
  def step(self) -> int:
    """The step that training begins at: that of the checkpoint, 0 where it says none or its step is left out."""
    if self.path is None:
      return 0
    if not self.resumes:
      for pattern, replacement in self.restore_cfg.assignment_map or ():
        if re.fullmatch(pattern, 'state/step'):
          if replacement is None:
            return 0
          break
    return checkpoints.open_source(self.path).step or 0


def check_model_dir(model_dir: str) -> None:
  """Refuses a model directory without a name, or with one that the file system's other users cannot spell.

  Raises:
    ConfigError: see above.
  """
  if not isinstance(model_dir, str) or not model_dir.strip():
    raise ConfigError(f'model_dir is {model_dir!r}; expected the path of a directory for this run. Set MODEL_DIR.')
  try:
    model_dir.encode('utf-8')
  except UnicodeEncodeError:  # bytes that the locale could not decode
    raise ConfigError(f'model_dir is {model_dir!r}; expected a path in the encoding of this locale. Set '
                      'LC_ALL=C.UTF-8, or use ASCII letters.') from None
  for name in summaries.WRITER_FOLDERS:
    path = os.path.join(model_dir, name)
    if os.path.lexists(path) and not os.path.isdir(path):
      raise ConfigError(f'model_dir must have room for the folder {path!r}, which is a file. Delete or move the file, '
                        'or choose another MODEL_DIR.')


def check_optimizer(model: models.BaseModel) -> None:
  """Refuses a model that has no optimizer.

  Raises:
    ConfigError: see above.
  """
  given = model.optimizer_def
  if isinstance(given, optimizers.OptimizerDef):
    return
  shown, remedy = repr(given), 'Set OPTIMIZER.'
  if isinstance(given, optax.GradientTransformation):
    shown = 'a bare optax transformation'
    remedy = 'Wrap it, optimizers.OptaxWrapper(transformation), or take the optimizer of that name from `optimizers`.'
  elif callable(given):
    shown = f'the {"class" if isinstance(given, type) else "function"} {getattr(given, "__name__", given)}'
    remedy = 'Call it, as in OPTIMIZER = @optimizers.adamw() with its parentheses.'
  raise ConfigError(f"The model's optimizer_def is {shown}; expected an OptimizerDef, such as what optimizers.adamw() "
                    f'makes. {remedy}')


def check_learning_rates(
    trainer: trainer_lib.BaseTrainer, optimizer_def: optimizers.OptimizerDef, steps: Sequence[int]) -> None:
  """Refuses a learning rate of the trainer's beside one of the optimizer's, and schedules that give no rate.

  Args:
    trainer: the trainer.
    optimizer_def: the optimizer.
    steps: the steps at which to look at the schedules.

  Raises:
    ConfigError: see above.
  """
  if trainer.has_two_learning_rates:
    raise ConfigError('Both the optimizer and the trainer (Trainer.learning_rate_fn) have a learning rate, and only '
                      "one can rule. Leave learning_rate out of the optimizer to have the trainer's used, or set "
                      'Trainer.learning_rate_fn to None.')
  train_step.check_schedules(optimizer_def, trainer.learning_rate_fn, steps)


def choose_seed(random_seed: int | None) -> int:
  """Returns `random_seed`, or the clock of the lead process in its place.

  Raises:
    ConfigError: no whole number, or one of more than 32 bits.
  """
  if random_seed is None:
    return int(multihost.broadcast_from_lead(np.int32(time.time())))
  if isinstance(random_seed, bool) or not isinstance(random_seed, int) or not 0 <= random_seed < 2**32:
    raise ConfigError(f'random_seed is {random_seed!r}; expected None or a whole number from 0 to 2**32 - 1.')
  return random_seed


def facts_of_run(start: StartingPoint, random_seed: int | None) -> dict[str, Any]:
  """Returns what a restart must know of the run: where it began, its seed, and what its last save recorded.

  Args:
    start: the starting point.
    random_seed: the configured seed; None keeps that of the run that is resumed.
  """
  recorded = start.metadata.get('run', {}) if start.resumes else {}
  facts = {'start_step': start.step, 'random_seed': choose_seed(random_seed), **recorded}
  return facts if random_seed is None else {**facts, 'random_seed': random_seed}


def choose_start(model_dir: str, checkpoint_cfg: checkpoints.CheckpointConfig) -> StartingPoint:
  """Finds the checkpoint to start from, and verifies it. All processes must call this together.

  Args:
    model_dir: the run's own directory, which comes first.
    checkpoint_cfg: its `restore` comes second.

  Raises:
    CheckpointError: the configured checkpoint does not exist, or all of a directory are damaged.
    ConfigError: the configuration names several checkpoints, or the run's directory is one that `convert` made.
  """
  # Of its own making, which a manifest says: what else lies in the directory is nothing to go on with.
  own_step = checkpoints.newest_sound_step(model_dir)
  if own_step is not None:
    path = checkpoints.get_checkpoint_dir(model_dir, own_step)
    metadata = dict(checkpoints.read_metadata(path))
    if 'converted' in metadata:
      raise ConfigError(
          f'MODEL_DIR {model_dir!r} holds what `convert` made ({os.path.basename(path)}), not a run to go on with: the '
          f"position in the data is not in it. Train in another MODEL_DIR, from INITIAL_CHECKPOINT_PATH={path!r}.")
    own = checkpoints.RestoreCheckpointConfig(path=model_dir, mode='latest')
    return StartingPoint(path=path, resumes=True, restore_cfg=own, metadata=metadata)
  configured = checkpoint_cfg.restore
  if configured is None or not configured.paths:
    return StartingPoint()
  if configured.mode == 'all':
    raise ConfigError("RestoreCheckpointConfig.mode is 'all', which is for evaluating one checkpoint after another; "
                      "expected 'latest' or 'specific' to train from.")
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([configured])
  if not paths:
    raise CheckpointError(f'There is no checkpoint below {", ".join(configured.paths)}; expected a model directory '
                          "with checkpoint_<step> in it (mode='latest'), or a Hugging Face folder. Correct "
                          'RestoreCheckpointConfig.path, or set CheckpointConfig.restore to None to start from '
                          'scratch.')
  if len(paths) > 1:
    raise ConfigError(f'RestoreCheckpointConfig.path names {len(paths)} checkpoints ({", ".join(paths)}); expected one '
                      'to train from.')
  return StartingPoint(path=paths[0], restore_cfg=configured)


def check_start(start: StartingPoint, state_shape: TrainState, model: models.BaseModel, *, begins: bool = True,
                applies_transforms: bool = False) -> None:
  """Refuses a checkpoint that does not fit the state, from names and shapes alone.

  Of one in the other layout only the parameters are checked here, unless it is transformed.

  Args:
    start: what to start from.
    state_shape: the state's shapes.
    model: the model, whose parameter layout the state has.
    begins: whether training may begin with it, for which `make_state` makes what it lacks beside parameters.
    applies_transforms: apply the transforms of the restore to shapes, for `--dry_run`: it warns of those that need
      values. Otherwise a checkpoint that is transformed is checked when it is restored.

  Raises:
    CheckpointError: naming the arrays that differ, and the optimizers if they do.
  """
  if start.path is None:
    return
  config, metadata = _stack_config(model), checkpoints.read_metadata(start.path)
  if config is not None:
    _check_tied_logits(start.path, config, metadata.get('network') or {})
  is_transformed = bool(start.restore_cfg.state_transformation_fns)
  if is_transformed and not applies_transforms:
    return
  if not is_transformed and config is not None and metadata.get('param_layout') != config.param_layout:
    if not start.resumes:  # Of a run that goes on, assignment_map and the like mean nothing: the restore has its say.
      checkpoints.check_other_layout_fits(start.path, state_shape.state_dict(), config, start.restore_cfg)
    return
  saved_with, own = metadata.get('optimizer', {}).get('name'), None
  if not isinstance(state_shape, InferenceState):
    own = state_shape.optimizer_def.name
  is_other = saved_with is not None and own is not None and saved_with != own
  try:
    checkpoints.check_fits(
        start.path, state_shape.state_dict(), restore_cfg=start.restore_cfg,
        transformation_fns=checkpoints.param_layout_fns(start.path, config) if is_transformed and config else (),
        is_resuming=start.resumes, may_begin=begins)
  except checkpoints.ValuesNeededError as error:
    logging.getLogger(__name__).warning(
        '--dry_run cannot tell whether %s fits: this transform of RestoreCheckpointConfig.state_transformation_fns '
        'needs values: %s. The run checks its result before the first step.', start.path, error)
    return
  except CheckpointError as error:
    if is_other:
      raise CheckpointError(f'{error} It was saved with the optimizer {saved_with}, and this run has {own}.') from error
    raise
  if is_other:
    logging.getLogger(__name__).warning(
        '%s was saved with the optimizer %s; this run goes on from its state with %s.', start.path, saved_with, own)


def _check_tied_logits(path: str, config: StackConfig, network: Mapping[str, Any]) -> None:
  """Raises CheckpointError if the checkpoint was recorded with another scale of tied logits: no shape shows it."""
  if not (config.logits_via_embedding and network.get('logits_via_embedding')):
    return
  scaled = bool(network.get('scale_tied_logits', True))  # Older checkpoints lack the field.
  if scaled != config.scale_tied_logits:
    raise CheckpointError(
        f'`{type(config).__name__}.scale_tied_logits` must be {scaled} for {path!r}, whose tied logits are '
        f'{"scaled" if scaled else "not scaled"}, got {config.scale_tied_logits}. Set it to {scaled}.')


def make_state(
    start: StartingPoint, initializer: state_init.TrainStateInitializer, partitioner: partitioning.PjitPartitioner,
    model: models.BaseModel, init_rng: jax.Array | None) -> tuple[TrainState, checkpoints.RestoredCheckpoint | None]:
  """Restores or initialises the state, every array on the devices that hold it.

  What to start from may have any of the forms of `checkpoints.open_source`; without an optimizer's state in it the
  optimizer begins with the parameters that are restored.

  Args:
    start: what to start from.
    initializer: knows the state's shapes and how to make a new one.
    partitioner: says where arrays go.
    model: the model, whose parameter layout the state gets.
    init_rng: key for new parameters, and for mutable collections of which nothing is stored; None, where there is a
      checkpoint, refuses one without them.

  Returns:
    (state, what was restored or None).
  """
  axes = initializer.train_state_axes
  restored = None
  config = _stack_config(model)
  if start.path is None:
    state = initializer.from_scratch(init_rng)
  else:
    shapes = initializer.global_train_state_shape
    on_devices = partitioner.params_on_devices
    restored = checkpoints.restore_checkpoint(
        start.path, shapes.state_dict(),
        shardings=partitioner.get_shardings(axes).state_dict() if on_devices else None,
        restore_cfg=start.restore_cfg,
        transformation_fns=() if config is None else checkpoints.param_layout_fns(start.path, config),
        initial_state_fn=None if init_rng is None else lambda: initializer.from_scratch(init_rng).state_dict(),
        from_params_fn=None if isinstance(shapes, InferenceState) else initializer.begin_from_params,
        is_resuming=start.resumes)
    state = shapes.restore_state(restored.state)
  if not partitioner.params_on_devices:
    state = partitioner.move_params_to_devices(state, axes)
  return state, restored


def record_data(start: StartingPoint, run_facts: dict[str, Any], cfg: data.DatasetConfig) -> None:
  """Notes the batch size and what the order of the data depends on, and warns of changes since the last save.

  Args:
    start: the starting point.
    run_facts: facts of the run that its checkpoints carry; those about the data are replaced.
    cfg: the training data.
  """
  now = {'batch_size': cfg.batch_size, 'mixture_or_task_name': cfg.name, 'seed': cfg.effective_seed,
         'task_feature_lengths': dict(cfg.task_feature_lengths)}
  now |= {name: getattr(cfg, name) for name in ('split', 'shuffle', 'pack', 'source', 'trim_output_features')}
  before = run_facts.get('data', {}) if start.resumes else {}
  changes = [f'{name} was {before[name]!r} and is {now[name]!r}' for name in now
             if name in before and before[name] != now[name]]
  if changes:
    logging.getLogger(__name__).warning(
        'The training data differs from that of %s: %s. Set the `DatasetConfig` back, unless you want the change.',
        start.path, ', '.join(changes))
  run_facts['data'] = now


def check_finite(start: StartingPoint, state: TrainState) -> None:
  """Rejects a restored state with numbers that are not finite.

  Args:
    start: where the state comes from.
    state: the state.

  Raises:
    CheckpointError: naming the first array.
  """
  names = non_finite.find_in_state(state.state_dict())
  if names:
    more = f' and {len(names) - 1} more arrays' if len(names) > 1 else ''
    raise CheckpointError(f'{start.path} holds numbers that are not finite, in {names[0]}{more}. Start from another '
                          'checkpoint, or set NON_FINITE_POLICY to ignore to train with it all the same.')


def optimizer_metadata(train_state: TrainState) -> dict[str, Any]:
  """Returns what to record with a checkpoint about the optimizer; the leaves of `train_state` may be shapes."""
  return {'optimizer': {'name': train_state.optimizer_def.name,
                        'evaluates_other_params': train_state.evaluates_other_params}}


def layout_metadata(model: models.BaseModel) -> dict[str, Any]:
  """Returns what to record with a checkpoint about its parameters, as JSON can hold it; nothing for networks of others.

  Returns:
    `param_layout`, the form of the parameter tree, and `network`: the name of the configuration's class, its fields
    that say what the parameters mean, and `custom_blocks` where these are not all T5's own.
  """
  config = _stack_config(model)
  if config is None:
    return {}
  fields = [field.name for field in dataclasses.fields(config) if field.name not in _FIELDS_OF_A_RUN]
  network = {name: list(value) if isinstance(value := getattr(config, name), tuple) else value for name in fields}
  network['relpos_bias_tables'] = 'per_layer' if config.relpos_per_layer else 'per_stack'
  if isinstance(model.module, StackNetwork):
    if not model.module.has_position_biases:
      network = {name: value for name, value in network.items() if name not in RELPOS_FIELDS}
    if model.module.custom_blocks:
      network['custom_blocks'] = list(model.module.custom_blocks)
  return {'param_layout': config.param_layout, 'network': {'config': type(config).__name__, **network}}


def _stack_config(model: models.BaseModel) -> StackConfig | None:
  """Returns the network's configuration: its field `config`, if that is a `StackConfig`.

  A module of any class declares by such a field that its parameters are T5's. Other networks, for which this is None,
  have one parameter layout only.
  """
  config = getattr(model.module, 'config', None) if isinstance(model, models.BaseTransformerModel) else None
  return config if isinstance(config, StackConfig) else None
