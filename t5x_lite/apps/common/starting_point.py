"""Starting point of a run: its newest sound checkpoint, else the configured checkpoint, else new parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import logging
import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import data
from t5x_lite import layer_stacks
from t5x_lite import losses
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import schedules
from t5x_lite import tree_utils
from t5x_lite.adapters import merging
from t5x_lite.apps.common import output_folder
from t5x_lite.checkpoints import builders
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.formatting import first_names
from t5x_lite.formatting import format_number
from t5x_lite.formatting import gin_flag
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.networks.stacks import StackNetwork
from t5x_lite.networks.t5_config import RELPOS_FIELDS
from t5x_lite.networks.t5_config import StackConfig
from t5x_lite.storage import files
from t5x_lite.train_state import InferenceState
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import non_finite
from t5x_lite.trainer import state_init
from t5x_lite.trainer import summaries
from t5x_lite.trainer import train_step
from t5x_lite.trainer import trainer as trainer_lib
from t5x_lite.types import PyTree

# Prefix of the names of an optimizer's state.
OPTIMIZER_STATE = 'state/param_states/'
# Factors of schedules for runs without a planned end, which continue over several runs.
_ENDLESS_FACTORS = frozenset({'rsqrt_decay', 'rsqrt_normalized_decay', 'decay_every'})
# Beginnings of the names of transformations without a state.
_WITHOUT_STATE = ('clip', 'identity', 'keep_params', 'zero_nans', 'centralize')
# Share of the expected learning rate below which a schedule probably started too early.
_LOW_SHARE = 0.5
# The layer in the path of a parameter, in both parameter layouts.
_LAYER_RE = re.compile(r'(encoder|decoder)/(?:\1|layers_\d+)/')
# Seed of a run without one.
DEFAULT_SEED = 0
# Valid random seeds.
SEED = checks.number(at_least=0, below=2**32, integer=True).or_none()
# Fields of a network's configuration that do not change the meaning of its parameters.
_FIELDS_OF_A_RUN = frozenset(
  {
    'dtype',
    'dropout_rate',
    'float32_attention_logits',
    'remat_policy',
    'remat_offload',
    'scan_layers',
    'param_layout',
    'attention_kernel',
    'loss_chunk_size',
    'qk_clip_threshold',
  }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingPoint:
  """Starting point of a run.

  Attributes:
    path: the checkpoint; None to start from scratch, or from the checkpoints that builders read.
    resumes: whether the checkpoint was saved by this run.
    restore_cfg: how to restore it, with the builders of the state.
    metadata: metadata of the checkpoint.
  """

  path: str | None = None
  resumes: bool = False
  restore_cfg: checkpoints.RestoreCheckpointConfig | None = None
  metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_new(self) -> bool:
    """True if all parameters are new: there is neither a checkpoint nor a builder."""
    return self.path is None and (self.restore_cfg is None or not self.restore_cfg.builders)

  @property
  def is_custom(self) -> bool:
    """True if a class of a user restores the checkpoint."""
    cfg = self.restore_cfg
    return self.path is not None and checkpoints.is_custom(cfg and cfg.checkpointer_cls, 'restore')

  @property
  def description(self) -> str:
    """Text for the log."""
    if self.is_new:
      return 'new parameters'
    if self.resumes:
      return f'{self.path} (this run)'
    return builders.describe(self.path, self.restore_cfg)

  @property
  def chain(self) -> builders.Chain:
    """Builders of the state; empty for new parameters."""
    if self.is_new:
      return ()
    return builders.chain_of(self.path, self.restore_cfg, is_resuming=self.resumes)

  @property
  def paths_of_models(self) -> list[str]:
    """Paths of the models whose parameters the builders read."""
    paths = []
    for builder in self.chain:
      paths += builder.paths_of_model
    return list(dict.fromkeys(paths))

  @property
  def base(self) -> Mapping[str, str] | None:
    """Identity of the base, see `checkpoints.recorded_base`, if this run has saved the checkpoint without it."""
    if not self.resumes or self.restore_cfg is None:
      return None
    return checkpoints.recorded_base(self.path, self.restore_cfg.base_path)

  @property
  def step(self) -> int:
    """Step at which training begins: that of the chain of builders; 0 if no builder knows it."""
    return builders.first_step(self.chain) or 0


def check_model_dir(owner: str, option: str, model_dir: str) -> None:
  """Raise if a run cannot use `model_dir` as its directory.

  Args:
    owner: function or class that has the option, for the error message.
    option: name of the option.
    model_dir: path of the directory, which need not exist.

  Raises:
    ConfigError: the path is empty, is not encodable in UTF-8, or has a file where a metrics folder must be.
  """
  checks.check(
    owner,
    {option: model_dir},
    **{option: output_folder.directory('Set MODEL_DIR to the directory of this run.')},
  )
  if files.is_remote(model_dir):  # a store has no folders
    return
  for path in (os.path.join(model_dir, name) for name in summaries.WRITER_FOLDERS):
    if os.path.lexists(path) and not os.path.isdir(path):
      raise checks.invalid(
        owner,
        option,
        f'a directory in which {path!r} is not a file',
        model_dir,
        'Delete or move this file, or choose another MODEL_DIR.',
      )


def check_optimizer(model: models.BaseModel) -> None:
  """Raise if the model's optimizer is not an `OptimizerDef`.

  Raises:
    ConfigError: with the remedy for optax transformations and for functions that are not called.
  """
  given = model.optimizer_def
  if isinstance(given, optimizers.OptimizerDef):
    return
  import optax  # Only for this message: importing it takes long.

  shown = repr(given)
  remedy = f'Set OPTIMIZER, e.g. {gin_flag("OPTIMIZER", "@optimizers.adamw()")}.'
  if isinstance(given, optax.GradientTransformation):
    shown = 'a bare optax transformation'
    remedy = 'Wrap it, optimizers.OptaxWrapper(transformation), or use the optimizer of that name in `optimizers`.'
  elif callable(given):
    kind = 'class' if isinstance(given, type) else 'function'
    shown = f'the {kind} {getattr(given, "__name__", given)}'
    remedy = f'Call it with parentheses, e.g. {gin_flag("OPTIMIZER", "@optimizers.adamw()")}.'
  elif isinstance(given, str) and given.rpartition('.')[2].isidentifier():
    name = given.rpartition('.')[2]
    if callable(getattr(optimizers, name, None)):
      remedy = f'Set {gin_flag("OPTIMIZER", f"@optimizers.{name}()")} with @ and parentheses.'
  raise ConfigError(
    f'`{type(model).__name__}.optimizer_def` must be an OptimizerDef, e.g. the result of '
    f'optimizers.adamw(), got {shown}. {remedy}'
  )


def check_learning_rates(
  trainer: trainer_lib.BaseTrainer, optimizer_def: optimizers.OptimizerDef, steps: Sequence[int]
) -> None:
  """Raise if both the trainer and the optimizer have a learning rate, or if a schedule returns an invalid rate.

  Args:
    trainer: the trainer.
    optimizer_def: the optimizer.
    steps: steps at which schedules are checked.

  Raises:
    ConfigError: see above.
  """
  # The trainer logs that its learning rate replaces that of the optimizer, as in T5X.
  if trainer.has_two_learning_rates and not checks.is_written_for_t5x():
    raise ConfigError(
      'Exactly one of the optimizer and the trainer must have a learning rate, got both. Remove '
      'learning_rate from the optimizer, or set `Trainer.learning_rate_fn` to None.'
    )
  train_step.check_schedules(optimizer_def, trainer.learning_rate_fn, steps)


def choose_seed(random_seed: int | None) -> int:
  """Return `random_seed`, or `DEFAULT_SEED`, with a log line, if it is None."""
  if random_seed is None:
    logging.getLogger(__name__).info(
      'The random seed is None, which is %s here (in T5X, the clock).', DEFAULT_SEED
    )
  if random_seed is None:
    return DEFAULT_SEED
  return random_seed


def facts_of_run(start: StartingPoint, random_seed: int | None) -> dict[str, Any]:
  """Return the facts that a restart must know: start step, seed, and the facts recorded by the last save.

  Args:
    start: the starting point.
    random_seed: configured seed; None keeps the seed of the resumed run.
  """
  if start.resumes:
    recorded = start.metadata.get('run', {})
    if recorded.get('means_version', 1) != losses.MEANS_VERSION:
      logging.getLogger(__name__).info(
        'This run is continued from an earlier version: %s. Lines and best checkpoints up to step %d keep their '
        'values.',
        losses.MEANS_CHANGED,
        start.step,
      )
  else:
    recorded = {}
  if random_seed is None and 'random_seed' in recorded:
    random_seed = recorded['random_seed']
  return {
    'start_step': start.step,
    **recorded,
    'random_seed': choose_seed(random_seed),
    'means_version': losses.MEANS_VERSION,
  }


def choose_start(model_dir: str, checkpoint_cfg: checkpoints.CheckpointConfig) -> StartingPoint:
  """Find and verify the checkpoint to start from. All processes must call this together.

  Args:
    model_dir: the run directory; its own checkpoints have priority.
    checkpoint_cfg: checkpoint configuration; its `restore` is used if the run has no checkpoint.

  Raises:
    CheckpointError: none or several checkpoints are configured, or all checkpoints of the directory are damaged.
    ConfigError: the run directory was written by `convert`, or `checkpointer_cls` overrides a method that nothing
      calls; or the run would start with new parameters in a directory with checkpoints of T5X.
  """
  checkpoints.check_supported(checkpoint_cfg)
  configured = checkpoint_cfg.restore
  # Only checkpoints with a manifest are the run's own.
  own_step = checkpoints.newest_sound_step(model_dir)
  if own_step is not None:
    path = checkpoints.get_checkpoint_dir(model_dir, own_step)
    metadata = dict(checkpoints.read_metadata(path))
    if 'converted' in metadata:
      raise ConfigError(
        f'MODEL_DIR {model_dir!r} was written by `convert` ({os.path.basename(path)}) and cannot be resumed: it has '
        f'no position in the data. Train in another MODEL_DIR with INITIAL_CHECKPOINT_PATH={path!r}.'
      )
    base_path = None
    if configured is not None:
      base_path = configured.base_path or next(iter(configured.paths), None)
    own = checkpoints.RestoreCheckpointConfig(path=model_dir, mode='latest', base_path=base_path)
    save = checkpoint_cfg.save
    if save is not None and not checkpoints.is_standard(save.checkpointer_cls, 'restore'):
      own = own.changed(checkpointer_cls=save.checkpointer_cls)  # as in T5X
    return StartingPoint(path=path, resumes=True, restore_cfg=own, metadata=metadata)
  if configured is None or not configured.paths:
    _check_has_none_of_t5x(model_dir)
    return StartingPoint(restore_cfg=configured)
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([configured])
  if len(paths) != 1 or configured.mode == 'all':
    if paths:
      found = f'got {", ".join(paths)}'
    else:
      found = f'found none below {", ".join(configured.paths)}'
    raise CheckpointError(
      '`RestoreCheckpointConfig.path` must be one checkpoint to train from, a run directory with '
      f"checkpoint_<step> (mode='latest') or a Hugging Face folder, {found} "
      f'(mode={configured.mode!r}). Correct path or mode, or set CheckpointConfig.restore to None '
      'to start from scratch.'
    )
  return StartingPoint(path=paths[0], restore_cfg=configured)


def _check_has_none_of_t5x(model_dir: str) -> None:
  """Raise ConfigError if a directory has checkpoints of T5X, whose run is probably meant to continue."""
  paths = [
    checkpoints.get_checkpoint_dir(model_dir, step)
    for step in checkpoints.all_steps_of_any_program(model_dir)
  ]
  found = [path for path in paths if checkpoints.detect_format(path) in ('t5x', 't5x_orbax')]
  if found:
    raise ConfigError(
      f'MODEL_DIR {model_dir!r} has checkpoints of T5X, the newest {os.path.basename(found[-1])}, and the run would '
      'start with new parameters. To continue from the newest, set '
      f'--gin.checkpoints.RestoreCheckpointConfig.path={model_dir!r}; otherwise set another MODEL_DIR.'
    )


def check_start(
  start: StartingPoint,
  state_shape: TrainState,
  model: models.BaseModel,
  *,
  for_training: bool = True,
  applies_transforms: bool = False,
) -> checkpoints.Fit | None:
  """Raise if names or shapes of a checkpoint do not match the state.

  The builders run on shapes, and read no values.

  Args:
    start: the starting point.
    state_shape: shapes of the state.
    model: the model, whose parameter layout the state has.
    for_training: whether `make_state` may initialize missing state other than parameters.
    applies_transforms: apply functions of `state_transformation_fns` to shapes, for `--dry_run`, with a warning for
      functions that need values. Otherwise a state that such a function changes is checked when it is restored.

  Returns:
    The names of arrays that will be new, and of stored ones that will not be restored; None if they are unknown.

  Raises:
    CheckpointError: with the arrays that differ, and the optimizers if they differ.
  """
  if start.is_new:
    return checkpoints.Fit()
  if start.is_custom:  # its method may add what the checkpoint lacks
    return None
  config = state_init.stack_config(model)
  chain = start.chain
  for path in start.paths_of_models:
    network = checkpoints.read_metadata(path).get('network') or {}
    if config is not None:
      _check_unseen_fields(path, config, network)
    if network:
      _check_start_id(path, model, network.get('decoder_start_token_id', 0))
  if any(builder.needs_values for builder in chain) and not applies_transforms:
    _check_scales(chain, state_shape, model)
    return None
  saved_with = None
  own = None
  if start.path is not None and not isinstance(state_shape, InferenceState):
    saved_with = checkpoints.read_metadata(start.path).get('optimizer', {}).get('name')
    own = state_shape.optimizer_def.name
  is_other = saved_with is not None and own is not None and saved_with != own
  try:
    fit = checkpoints.check_fits(
      start.path,
      state_shape.state_dict(),
      restore_cfg=start.restore_cfg,
      is_resuming=start.resumes,
      may_begin=for_training,
      network=config,
      optional=optional_states(start, state_shape),
    )
  except checkpoints.ValuesNeededError as error:
    logging.getLogger(__name__).warning(
      '--dry_run cannot tell whether %s fits: this transform of RestoreCheckpointConfig.state_transformation_fns '
      'needs values: %s. The run checks its result before the first step.',
      start.description,
      error,
    )
    return None
  except CheckpointError as error:
    trained = _other_trained(start, model, state_shape)
    if trained is not None:
      raise CheckpointError(f'{error} {trained}') from error
    remedy = None
    if is_other:
      remedy = f'It was saved with the optimizer {saved_with}; this run uses {own}.'
    elif own is not None:
      stored = checkpoints.open_source(start.path).shapes()
      wanted = tree_utils.flatten_dict(state_shape.state_dict())
      remedy = state_shape.optimizer_def.restore_remedy(stored, wanted)
    if remedy is None:
      raise
    raise CheckpointError(f'{error} {remedy}') from error
  has_builders = start.restore_cfg is not None and bool(start.restore_cfg.builders)
  # Most builders drop the state of the optimizer.
  if is_other and not has_builders and not _drops_optimizer(start):
    logging.getLogger(__name__).warning(
      '%s was saved with the optimizer %s; this run continues from its state with %s.',
      start.path,
      saved_with,
      own,
    )
  _check_scales(start.chain, state_shape, model)
  return fit


def _other_trained(start: StartingPoint, model: models.BaseModel, shape: Any) -> str | None:
  """Return a sentence if a run that resumes trains other parameters next to its adapter than before, or None."""
  adapter = state_init.adapter_of(model)
  if adapter is None or not start.resumes or 'adapter' not in start.metadata:
    return None
  before = set(start.metadata['adapter']['also_train'])
  now = set(adapter.metadata(shape.params, shape.params_axes)['also_train'])
  if before == now:
    return None
  return (
    f'`Lora.also_train` selected {len(before)} parameters, and now {len(now)}: set it as before. They differ in '
    f'{first_names(sorted(before ^ now))}.'
  )


def without_other_optimizer(start: StartingPoint, state_shape: TrainState) -> StartingPoint:
  """Return the starting point without the stored state of another optimizer, if `fallback_to_scratch` is set.

  Arrays of two optimizers may have the same names and shapes, such as the first moments of AdamW and Lion, with other
  meanings. A rule of `assignment_map` for the state of the optimizer says that it is meant to be kept.

  Args:
    start: the starting point.
    state_shape: shapes of the state of the run.
  """
  cfg = start.restore_cfg
  if start.path is None or start.resumes or cfg is None or not cfg.fallback_to_scratch:
    return start
  source = checkpoints.open_source(start.path)
  if not any(name.startswith(OPTIMIZER_STATE) for name in source.shapes()):
    return start
  wanted = tree_utils.flatten_dict(state_shape.state_dict())
  names = [name for name in wanted if name.startswith(OPTIMIZER_STATE)]
  rules = tuple(cfg.assignment_map or ())
  if names and all(any(re.fullmatch(rule[0], name) for rule in rules) for name in names):
    return start
  saved_with = source.metadata.get('optimizer', {}).get('name')
  own = state_shape.optimizer_def.name
  if saved_with is None:
    # Other programs do not record the optimizer.
    is_other = _slots(source.shapes()) != _slots(wanted)
    saved_with = 'another optimizer'
  else:
    is_other = not _are_related(saved_with, own)
  if not is_other:
    return start
  logging.getLogger(__name__).info(
    'The state of the optimizer is new: %s was saved with %s, and this run uses %s.',
    start.path,
    saved_with,
    own,
  )
  kept = (*rules, (f'{OPTIMIZER_STATE}.*', None))
  return dataclasses.replace(start, restore_cfg=cfg.changed(assignment_map=kept))


def _drops_optimizer(start: StartingPoint) -> bool:
  rules = start.restore_cfg and start.restore_cfg.assignment_map
  return (f'{OPTIMIZER_STATE}.*', None) in (rules or ())


def _are_related(one: str, other: str) -> bool:
  """Return True if two names, such as 'chain of clip and adamw', have a part in common that keeps a state."""
  if one == other:
    return True
  return bool(_stateful_parts(one) & _stateful_parts(other))


def _stateful_parts(name: str) -> set[str]:
  """Return the names of transformations in the name of an optimizer, without those that keep no state."""
  words = set(re.findall(r'[\w.]+', name)) - {'chain', 'of', 'and'}
  return {word for word in words if not word.startswith(_WITHOUT_STATE)}


def _slots(names: Iterable[str]) -> set[str]:
  """Return the names of the arrays of an optimizer with `*` for the path of a parameter."""
  names = list(names)
  params = {tuple(name.split('/')[1:]) for name in names if name.startswith('target/')}
  lengths = sorted({len(param) for param in params}, reverse=True)
  found = set()
  for name in names:
    parts = name.split('/')
    places = (
      (i, length)
      for length in lengths
      for i in range(len(parts))
      if tuple(parts[i : i + length]) in params
    )
    i, length = next(places, (0, 0))
    if length:
      parts[i : i + length] = '*'
    if name.startswith(OPTIMIZER_STATE):
      found.add('/'.join(parts))
  return found


def _check_start_id(path: str, model: models.BaseModel, start_id: int) -> None:
  """Raise CheckpointError if the decoder of the checkpoint starts with another id than that of the model."""
  ours = getattr(model, 'decoder_start_id', start_id)
  if ours != start_id:
    owner = type(model).__name__
    raise CheckpointError(
      f'`{owner}.decoder_start_id` must be {start_id} for {path!r}, whose decoder starts with this id, got {ours}. '
      f'Set it to {start_id}.'
    )


def _check_scales(chain: builders.Chain, shape: Any, model: models.BaseModel) -> None:
  """Raise CheckpointError if a stored adapter has other factors than the model's, which no shape shows."""
  adapter = state_init.adapter_of(model)
  if adapter is None:
    return
  of_model = merging.scales_of(adapter.metadata(shape.params, shape.params_axes))
  found = {}
  for builder in chain:
    if isinstance(builder, builders.Adapter):
      found = {builder.path: builder.open(tree_utils.flatten_dict(shape.state_dict())).metadata}
    else:
      found |= {path: checkpoints.read_metadata(path) for path in builder.paths_of_model}
  for path, metadata in found.items():
    if 'adapter' not in metadata:
      continue
    stored = metadata['adapter']
    of_stored = merging.scales_of(stored)
    of_own = of_model
    if of_stored.keys() != of_own.keys():
      of_stored = _without_layers(of_stored)
      of_own = _without_layers(of_model)
    for kernel, scale in of_own.items():
      if of_stored.get(kernel, scale) != scale:
        alphas = sorted({each['alpha'] for each in stored['kernels'].values()})
        raise CheckpointError(
          f'The factor of the adapter of {kernel} must be {of_stored[kernel]} as in {path!r}, got {scale}. It is '
          'alpha / rank, or alpha / sqrt(rank) with `Lora.rank_stabilized`: set `Lora.alpha` (LORA_ALPHA), '
          '`Lora.alpha_pattern` and `Lora.rank_stabilized` to those of the adapter, which has alpha '
          f'{", ".join(map(str, alphas))} and rank_stabilized={stored["rank_stabilized"]}.'
        )


def _without_layers(scales: Mapping[str, Any]) -> dict[str, list[float]]:
  """Return the different factors of all layers of a stack, by a path that is the same in both parameter layouts."""
  found = {}
  for path, scale in scales.items():
    found.setdefault(_LAYER_RE.sub(r'\1/', path), set()).add(scale)
  return {path: sorted(different) for path, different in found.items()}


def _check_unseen_fields(path: str, config: StackConfig, network: Mapping[str, Any]) -> None:
  """Raise CheckpointError if the checkpoint records other values of fields that no shape shows."""
  owner = type(config).__name__
  # Older checkpoints lack the field, and other formats have no metadata of the network.
  epsilon = network.get('layer_norm_epsilon', StackConfig.layer_norm_epsilon)
  if network and epsilon != config.layer_norm_epsilon:
    raise CheckpointError(
      f'`{owner}.layer_norm_epsilon` must be {epsilon} for {path!r}, whose norms add this constant, got '
      f'{config.layer_norm_epsilon}. Set it to {epsilon}.'
    )
  if not (config.logits_via_embedding and network.get('logits_via_embedding')):
    return
  scaled = bool(network.get('scale_tied_logits', True))  # Older checkpoints lack the field.
  if scaled != config.scale_tied_logits:
    how = 'scaled' if scaled else 'not scaled'
    raise CheckpointError(
      f'`{owner}.scale_tied_logits` must be {scaled} for {path!r}, whose tied logits '
      f'are {how}, got {config.scale_tied_logits}. Set it to {scaled}.'
    )


def optional_states(start: StartingPoint, state_shape: PyTree) -> dict[str, dict[str, Any]]:
  """Return the arrays that a run may have or lack when it resumes, see `OptimizerDef.optional_states`; {} otherwise."""
  if not start.resumes or isinstance(state_shape, InferenceState):
    return {}
  optimizer_def = state_shape.optimizer_def
  state = optimizers.OptimizerState(step=state_shape.step, param_states=state_shape.param_states)
  found = {}
  for beginning, added in optimizer_def.optional_states(state).items():
    values = {f'{OPTIMIZER_STATE}{name}': value for name, value in added.items()}
    found[f'{OPTIMIZER_STATE}{beginning}'] = values
  return found


def make_state(
  start: StartingPoint,
  initializer: state_init.TrainStateInitializer,
  partitioner: partitioning.PjitPartitioner,
  model: models.BaseModel,
  init_rng: jax.Array | None,
) -> tuple[PyTree, checkpoints.RestoredCheckpoint | None]:
  """Restore or initialize the state, with each array on its devices.

  The state is that of the chain of builders. If it has parameters alone, the optimizer starts with them.

  Args:
    start: the starting point.
    initializer: initializer of the state; provides its shapes.
    partitioner: partitioner of the run.
    model: the model, whose parameter layout the state gets.
    init_rng: key for new parameters and for missing mutable collections; None raises for a checkpoint without them.

  Returns:
    (state, restored checkpoint or None).
  """
  axes = initializer.train_state_axes
  restored = None
  config = state_init.stack_config(model)
  if start.is_new:
    assert init_rng is not None  # new parameters need a key
    state = initializer.from_scratch(init_rng)
  elif start.is_custom:
    state, restored = _restore_by_user(start, initializer, partitioner, init_rng)
  else:
    shapes = initializer.global_train_state_shape
    shardings = None
    if partitioner.params_on_devices:
      shardings = partitioner.get_shardings(axes).state_dict()

    def initial_state() -> Mapping[str, Any]:
      assert init_rng is not None  # otherwise it is not called
      return initializer.from_scratch(init_rng).state_dict()

    from_params_fn = None
    if not isinstance(shapes, InferenceState):
      from_params_fn = initializer.begin_from_params
    restored = checkpoints.restore_checkpoint(
      start.path,
      shapes.state_dict(),
      shardings=shardings,
      restore_cfg=start.restore_cfg,
      network=config,
      initial_state_fn=None if init_rng is None else initial_state,
      from_params_fn=from_params_fn,
      is_resuming=start.resumes,
      optional=optional_states(start, shapes),
    )
    state = shapes.restore_state(restored.state)
  if not partitioner.params_on_devices:
    state = partitioner.move_params_to_devices(state, axes)
  return state, restored


def _restore_by_user(
  start: StartingPoint,
  initializer: state_init.TrainStateInitializer,
  partitioner: partitioning.PjitPartitioner,
  init_rng: jax.Array | None,
) -> tuple[PyTree, checkpoints.RestoredCheckpoint]:
  """Restore a checkpoint by `restore` of the class of a user, with T5X's arguments; see `make_state`."""
  cfg = start.restore_cfg
  assert cfg is not None and start.path is not None  # see `StartingPoint.is_custom`
  shapes = initializer.global_train_state_shape
  checkpointer = checkpoints.restore_checkpointer(cfg, shapes, partitioner, None)
  checkpointer.set_restore_cfg(cfg)
  state = checkpointer.restore(
    path=start.path,
    state_transformation_fns=cfg.state_transformation_fns,
    fallback_state=checkpoints.get_fallback_state(
      cfg, lambda rng: initializer.from_scratch(rng).state_dict(), init_rng
    ),
  )
  _check_state(type(checkpointer).__name__, state, shapes)
  restored = checkpoints.RestoredCheckpoint(
    state={},
    data_state=None,
    num_data_processes=0,
    step=int(checkpoints.get_local_data(state.step)),
    path=start.path,
    is_resuming=start.resumes,
    metadata=start.metadata,
  )
  return state, restored


def _check_state(owner: str, state: Any, shapes: PyTree) -> None:
  """Raise CheckpointError if `restore` of a class returns another state than one of these shapes."""
  found = _shapes_by_name(state)
  expected = _shapes_by_name(shapes)
  others = sorted(name for name, _ in found.items() ^ expected.items())
  if others:
    raise CheckpointError(
      f"{owner}.restore must return a state with the run's names and shapes of arrays, got others of "
      f'{first_names([*dict.fromkeys(others)])}. Change restore, or the model.'
    )


def _shapes_by_name(state: PyTree) -> dict[str, tuple[int, ...]]:
  flat = tree_utils.flatten_dict(state.state_dict())
  return {name: tuple(leaf.shape) for name, leaf in flat.items()}


def set_state(
  trainer: trainer_lib.BaseTrainer,
  start: StartingPoint,
  initializer: state_init.TrainStateInitializer,
  partitioner: partitioning.PjitPartitioner,
  model: models.BaseModel,
  init_rng: jax.Array,
) -> checkpoints.RestoredCheckpoint | None:
  """Give a trainer the state of `make_state`, and return the restored checkpoint without its state, or None.

  A new state has the layers stacked from the beginning that the trainer stacks.
  """
  stacks = initial_stacks(trainer, initializer, partitioner)
  if start.is_new and stacks:
    trainer.step_state = initializer.from_scratch(init_rng, stacks)
    return None
  trainer.train_state, restored = make_state(start, initializer, partitioner, model, init_rng)
  # The trainer alone holds the arrays, so that it can convert them one by one.
  return restored and dataclasses.replace(restored, state={})


def initial_stacks(
  trainer: trainer_lib.BaseTrainer,
  initializer: state_init.TrainStateInitializer,
  partitioner: partitioning.PjitPartitioner,
) -> LayerStacks:
  """Return the layers that a new state has stacked; none in host memory or if the initializer's class is a user's."""
  accepts = layer_stacks.is_accepted_by(initializer) and partitioner.params_on_devices
  if accepts:
    return trainer.stacked_layers
  return LayerStacks()


def read_position(start: StartingPoint) -> tuple[dict[str, bytes] | None, int]:
  """Return the position in the data that a run starts from, or None, and the number of processes that saved it.

  Raises:
    CheckpointDamagedError: a file of the checkpoint differs from its hash.
  """
  if start.path is None or start.restore_cfg is None or not start.restore_cfg.restore_dataset:
    return None, 0
  source = checkpoints.open_source(start.path).own
  if source.manifest is None or not source.manifest.num_data_processes:
    return None, 0
  source.verify()
  state = checkpoints.read_data_state(start.path, source.manifest)
  return state, source.manifest.num_data_processes


def check_values(start: StartingPoint, state_shape: TrainState, *, requires_finite: bool) -> None:
  """Raise if the checkpoints of a starting point are damaged; reads their values, for `--dry_run`.

  Args:
    start: the starting point.
    state_shape: shapes of the state of the run.
    requires_finite: whether NaN and infinite values are errors too, in arrays that are restored unchanged.

  Raises:
    CheckpointDamagedError: a file differs from its hash.
    CheckpointError: an array has such values.
  """
  cfg = start.restore_cfg
  for path in start.paths_of_models:
    checkpoints.open_source(path, base_path=cfg and cfg.base_path).verify()
  if not requires_finite or start.path is None or cfg is None or len(start.chain) > 1:
    return
  rules = () if start.resumes else tuple(cfg.assignment_map or ())
  source = checkpoints.open_source(start.path, base_path=cfg.base_path)
  wanted = tree_utils.flatten_dict(state_shape.state_dict())
  for name in source.shapes():
    if name in wanted and not any(re.fullmatch(rule[0], name) for rule in rules):
      values = source.read_array(name)
      if jnp.issubdtype(values.dtype, jnp.inexact) and non_finite.is_bad_array(name, values):
        _raise_for_non_finite(start, [name])


def report_learning_rates(
  start: StartingPoint,
  trainer: trainer_lib.BaseTrainer,
  state_shape: TrainState,
  last_step: float,
  *,
  fit: checkpoints.Fit | None,
) -> None:
  """Log the learning rates of the first and the last step of a run that starts from a foreign checkpoint.

  A warning follows if the run has less than half of the rate that its schedule would have from step 0 on.

  Args:
    start: the starting point.
    trainer: the trainer.
    state_shape: shapes of the state of the run.
    last_step: number of completed steps at the end of the run.
    fit: result of `check_start`; the optimizer counts its updates from 0 if a count or its entire state is new. If it
      is unknown, only rates of the trainer are logged.
  """
  if start.is_new or start.resumes or not start.step < last_step:
    return
  if fit is None and trainer.learning_rate_fn is None:
    return
  rates: dict[str, Any] = dict(state_shape.optimizer_def.configured_learning_rates)
  state = {
    n for n in tree_utils.flatten_dict(state_shape.state_dict()) if n.startswith(OPTIMIZER_STATE)
  }
  new = state.intersection(fit.new if fit else ())
  # Schedules of an optimizer count its updates.
  begins_count = new == state or any(name.endswith(('/count', '/step_count')) for name in new)
  first = 0 if begins_count else start.step
  if trainer.learning_rate_fn is not None:
    rates = {'learning_rate': trainer.learning_rate_fn}
    first = start.step
  num_steps = None if last_step == math.inf else int(last_step) - start.step
  for name, rate in rates.items():
    steps = [first] if num_steps is None else [first, first + num_steps - 1]
    values = schedules.learning_rates_at(rate, steps) if callable(rate) else [rate] * len(steps)
    text = f'{format_number(values[0])} at the first step ({start.step + 1:,})'
    if num_steps is not None:
      text += f', {format_number(values[-1])} at the last ({int(last_step):,})'
    owner = '' if name == 'learning_rate' else f' of {name}'
    logging.getLogger(__name__).info('Learning rate%s: %s.', owner, text)
    if callable(rate) and num_steps is not None and first:
      _warn_of_late_schedule(rate, first, num_steps)


def _warn_of_late_schedule(schedule: Any, first: int, num_steps: int) -> None:
  """Warn if a schedule was probably meant to start at the first step of a run, which is step `first` for it."""
  factors = getattr(schedule, 'names', ())
  if set(factors) & _ENDLESS_FACTORS:
    return
  offsets = sorted({round(i * (num_steps - 1) / 63) for i in range(64)})
  values = schedules.learning_rates_at(schedule, [*offsets, *(first + k for k in offsets)])
  expected = max(values[: len(offsets)])
  found = max(values[len(offsets) :])
  if found >= _LOW_SHARE * expected:
    return
  if factors:
    remedy = f'set --gin.schedules.create_learning_rate_scheduler.step_offset={first}'
  else:
    remedy = 'set RestoreCheckpointConfig.builders = [@builders.StartAtStep()]'
  logging.getLogger(__name__).warning(
    'The learning rate of this run is at most %s, since its schedule counts the %s steps of the checkpoint too; from '
    'step 0 on it reaches %s. To start the schedule with this run, %s.',
    format_number(found),
    f'{first:,}',
    format_number(expected),
    remedy,
  )


def has_earlier_sentinels(start: StartingPoint) -> bool:
  """Return True if an earlier version recorded the run, with other ids for sentinels in the texts of its tasks."""
  if not start.resumes:
    return False
  return start.metadata.get('run', {}).get('data', {}).get('earlier_sentinels', True)


def record_data(start: StartingPoint, run_facts: dict[str, Any], cfg: data.DatasetConfig) -> None:
  """Record the facts that the order of the data depends on, and warn of changes since the last save.

  Args:
    start: the starting point.
    run_facts: facts that checkpoints of the run record; those about the data are replaced.
    cfg: the training data.
  """
  now = {
    'batch_size': cfg.batch_size,
    'mixture_or_task_name': cfg.name,
    'seed': cfg.effective_seed,
    'task_feature_lengths': dict(cfg.task_feature_lengths),
  }
  for name in (
    'split',
    'shuffle',
    'pack',
    'source',
    'trim_output_features',
    'earlier_sentinels',
  ):
    now[name] = getattr(cfg, name)
  before = run_facts.get('data', {}) if start.resumes else {}
  changes = []
  for name, value in now.items():
    if name in before and before[name] != value:
      changes.append(f'{name} was {before[name]!r} and is {value!r}')
  if changes:
    logging.getLogger(__name__).warning(
      'The training data differs from that of %s: %s. If this is not intended, set the former values of '
      '`DatasetConfig`.',
      start.description,
      ', '.join(changes),
    )
  run_facts['data'] = now


def warn_of_process_count(
  start: StartingPoint, num_saved: int, batches: data.GlobalBatches
) -> None:
  """Warn if another number of processes saved the position in the data, and the source does not handle that.

  Args:
    start: the starting point.
    num_saved: number of processes that saved their position.
    batches: the training data.
  """
  now = jax.process_count()
  if num_saved == now or batches.handles_process_count or not multihost.is_lead():
    return
  logging.getLogger(__name__).warning(
    'The training data of %s has the positions of %d process(es), and this run has %d: all continue at the position '
    'of process 0, so that examples may be repeated or omitted. Run with %d process(es) for the same data; a source '
    'whose position does not depend on the number declares `handles_process_count = True`.',
    start.description,
    num_saved,
    now,
    num_saved,
  )


def check_finite(start: StartingPoint, state: TrainState) -> None:
  """Raise if a restored state has NaN or infinite values.

  Args:
    start: the starting point.
    state: the state.

  Raises:
    CheckpointError: with the name of the first such array.
  """
  _raise_for_non_finite(start, non_finite.find_in_state(state.state_dict()))


def _raise_for_non_finite(start: StartingPoint, names: Sequence[str]) -> None:
  if names:
    if len(names) > 1:
      more = f' and {len(names) - 1} more arrays'
    else:
      more = ''
    raise CheckpointError(
      f'{start.description} has non-finite values in {names[0]}{more}. Start from another '
      "checkpoint, or set NON_FINITE_POLICY='ignore' to train with these values."
    )


def optimizer_metadata(train_state: TrainState) -> dict[str, Any]:
  """Return the checkpoint metadata about the optimizer; the leaves of `train_state` may be shapes."""
  without_average: Any = train_state
  without_average = without_average.replace(param_average=None)
  return {
    'optimizer': {
      'name': train_state.optimizer_def.name,
      'evaluates_other_params': without_average.evaluates_other_params,
    }
  }


def layout_metadata(model: models.BaseModel) -> dict[str, Any]:
  """Return the checkpoint metadata about the parameters, JSON-serializable; {} for networks without `StackConfig`.

  Returns:
    `param_layout`, the layout of the parameter tree, and `network`: the class name of the configuration, its fields
    that affect the meaning of parameters, and `custom_blocks`, see `StackNetwork`, if there are any.
  """
  config = state_init.stack_config(model)
  if config is None:
    return {}
  network = {}
  for field in dataclasses.fields(config):
    if field.name not in _FIELDS_OF_A_RUN:
      value = getattr(config, field.name)
      if isinstance(value, tuple):
        value = list(value)
      network[field.name] = value
  ends = [model.output_vocabulary.eos_id, *getattr(model, 'stop_token_ids', ())]
  if None not in ends and {*ends} != {1}:  # T5's is not recorded, as in earlier versions.
    network['eos_token_ids'] = list(dict.fromkeys(ends))
  if getattr(model, 'decoder_start_id', 0) != 0:
    network['decoder_start_token_id'] = model.decoder_start_id
  network['relpos_bias_tables'] = 'per_layer' if config.relpos_per_layer else 'per_stack'
  if isinstance(model.module, StackNetwork):
    if not model.module.has_position_biases:
      network = {name: value for name, value in network.items() if name not in RELPOS_FIELDS}
    if model.module.custom_blocks:
      network['custom_blocks'] = list(model.module.custom_blocks)
  return {
    'param_layout': config.param_layout,
    'network': {'config': type(config).__name__, **network},
  }
