"""Restoring of parameters for `eval`, `infer`, `chat` and `export`.

Optimizer state is read only if the optimizer evaluates parameters that it derives from its state. Names, shapes and
vocabulary sizes are compared before anything is computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import jax

from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import data
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite.apps.common import starting_point
from t5x_lite.errors import CheckpointDamagedError, CheckpointError
from t5x_lite.storage import files
from t5x_lite.train_state import FlaxOptimTrainState
from t5x_lite.train_state import InferenceState
from t5x_lite.trainer import state_init
from t5x_lite.types import Params, PyTree

_logger = logging.getLogger(__name__)


class RestoredModel(NamedTuple):
  """Restored parameters on the devices.

  Attributes:
    train_state: step, parameters and mutable collections.
    train_state_axes: tree of the same structure with the mesh PartitionSpec of each array.
    path: the checkpoint; None for random parameters, and for builders without a path.
    step: number of completed training steps; 0 for random parameters.
    origin: the checkpoint and the builders, for the log and reports; None for random parameters.
  """

  train_state: InferenceState
  train_state_axes: PyTree
  path: str | None
  step: int
  origin: str | None


def restore_for_inference(
  model: models.BaseModel,
  restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None,
  partitioner: partitioning.PjitPartitioner,
  input_shapes: Mapping[str, Sequence[int]],
  input_types: Mapping[str, Any] | None = None,
  fallback_init_rng: int | None = None,
  *,
  train_state_initializer_cls: type[
    state_init.TrainStateInitializer
  ] = state_init.TrainStateInitializer,
  is_done: Callable[[str, int], bool] = lambda path, step: False,
  applies_transforms: bool = False,
) -> Iterator[RestoredModel]:
  """Find the configured checkpoints and check them against the model; restore them one by one.

  Searching and checking happen in the call; each checkpoint is verified and read when the iterator advances. Delete
  each result before requesting the next, so that the devices need not hold both. All processes call this together.

  In mode 'all', damaged checkpoints are skipped with a warning, and the iterator ends with an error after the others.
  Checkpoints that a training run deletes in the meantime are skipped.

  Args:
    model: the model; its parameter layout may differ from the checkpoint's.
    restore_checkpoint_cfg: checkpoints to restore and how; None for random parameters.
    partitioner: partitioner of the parameters.
    input_shapes: shape of a global batch, by model feature.
    input_types: dtype by model feature; None for the model's defaults.
    fallback_init_rng: seed of random parameters, which are used without a checkpoint, and for missing parameters
      if the configuration sets `fallback_to_scratch`. None disables both.
    train_state_initializer_cls: class of the state initializer.
    is_done: predicate of (path, step); checkpoints for which it is true are skipped.
    applies_transforms: apply transforms to shapes in the checks, for `--dry_run`; see `starting_point.check_start`.

  Returns:
    Iterator in ascending order of step for each configured path; empty if all are done.

  Raises:
    CheckpointError: a checkpoint is missing, or arrays of a checkpoint do not match the model.
    CheckpointDamagedError: the requested checkpoint, or each of them, is damaged.
    ConfigError: the seed is missing or out of range.
  """
  cfg = restore_checkpoint_cfg
  if cfg is not None:
    cfg.validated('restore_checkpoint_cfg')
  checks.check('', locals(), fallback_init_rng=_seed(cfg))
  checkpoints.check_supported(checkpoints.CheckpointConfig(restore=cfg))
  cfg = None if cfg is None else for_inference(cfg)
  initializer = train_state_initializer_cls(
    None, model.get_initial_variables, input_shapes, partitioner, input_types
  )
  starts = _find(cfg, fallback_init_rng is not None)
  # For checkpoints whose evaluation parameters depend on the optimizer state.
  full_state_initializer = functools.cache(
    lambda: train_state_initializer_cls(
      model.optimizer_def, model.get_initial_variables, input_shapes, partitioner, input_types
    )
  )
  todo = []
  for start in starts:
    step = None
    if start.path is not None:
      step = _known_step(start.path)
      if step is not None and is_done(start.path, step):
        continue
    start_initializer = initializer
    is_there = start.path is None or (step is not None and files.path(start.path).is_dir())
    if cfg is not None and (cfg.mode != 'all' or is_there):
      shape = initializer.global_train_state_shape
      paths = start.paths_of_models
      if any(_needs_optimizer_state(path, model, shape) for path in paths):
        start_initializer = full_state_initializer()
      starting_point.check_start(
        start,
        start_initializer.global_train_state_shape,
        model,
        for_training=False,
        applies_transforms=applies_transforms,
      )
    todo.append((start, step, start_initializer))
  if fallback_init_rng is None:
    init_rng = None
  else:
    init_rng = jax.random.key(fallback_init_rng)
  return _restore_each(
    todo, initializer.train_state_axes, partitioner, model, init_rng, cfg, is_done
  )


def for_inference(cfg: checkpoints.RestoreCheckpointConfig) -> checkpoints.RestoreCheckpointConfig:
  """Return how inference restores: without the position in the training data, and by default the average."""
  averages = cfg.use_param_average is None and not cfg.builders
  use_param_average = averages or cfg.use_param_average
  return cfg.changed(restore_dataset=False, use_param_average=use_param_average)


def _seed(cfg: checkpoints.RestoreCheckpointConfig | None) -> checks.Expectation:
  """Expect a seed, which is required if missing parameters are initialised."""
  if cfg is None or not cfg.fallback_to_scratch:
    return starting_point.SEED
  return checks.Expectation(
    'an integer if `RestoreCheckpointConfig.fallback_to_scratch` is True',
    lambda seed: seed is not None and starting_point.SEED.holds(seed),
    'Set a seed for missing parameters, or set `fallback_to_scratch` to False.',
  )


def _needs_optimizer_state(path: str, model: models.BaseModel, shape: InferenceState) -> bool:
  """Return whether the parameters to evaluate are derived from the checkpoint's optimizer state.

  Raises:
    CheckpointError: they are, but the optimizer state or the optimizer is missing.
  """
  source = checkpoints.open_source(path).own  # the base has no state of this optimizer
  recorded = source.metadata.get('optimizer')
  if recorded is not None and not recorded['evaluates_other_params']:
    return False
  # No optimizer of T5X has separate evaluation parameters.
  if recorded is None and (source.format == 't5x' or not source.has_optimizer_state):
    return False
  optimizer_def = model.optimizer_def
  has_eval_params = False
  if source.has_optimizer_state and isinstance(optimizer_def, optimizers.OptimizerDef):
    variables = {}
    if shape.params_axes is not None:
      variables['params_axes'] = shape.params_axes

    def state_of(params: Params) -> FlaxOptimTrainState:
      return FlaxOptimTrainState.create(optimizer_def, {**variables, 'params': params})

    state_shape = jax.eval_shape(state_of, shape.params)
    has_eval_params = state_shape.evaluates_other_params
  if recorded is not None and not has_eval_params:
    if isinstance(optimizer_def, optimizers.OptimizerDef):
      given = optimizer_def.name
    else:
      given = 'none'
    if source.has_optimizer_state:
      remedy = (
        f"The model's optimizer is {given}: configure the optimizer of the run (OPTIMIZER, or the gin file that "
        'binds it).'
      )
    else:
      remedy = 'The optimizer state is missing: use a checkpoint that contains it.'
    raise CheckpointError(
      f'{path!r} was trained with the optimizer {recorded["name"]}, which derives the parameters '
      f'to evaluate from its state. {remedy}'
    )
  return has_eval_params


def _find(
  cfg: checkpoints.RestoreCheckpointConfig | None, may_be_random: bool
) -> list[starting_point.StartingPoint]:
  paths = []
  if cfg is not None:
    for path in cfg.paths:
      _check_path(path, cfg.mode)
    _, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  if paths:
    return [starting_point.StartingPoint(path=path, restore_cfg=cfg) for path in paths]
  if cfg is not None and cfg.builders and not cfg.paths:
    return [starting_point.StartingPoint(restore_cfg=cfg)]
  if cfg is None or not cfg.paths:
    where = 'No checkpoint is configured'
  else:
    where = f'No checkpoint found below {", ".join(cfg.paths)} (mode={cfg.mode!r})'
  if not may_be_random:
    raise CheckpointError(
      f'{where}. Set RestoreCheckpointConfig.path (CHECKPOINT_PATH) to a run directory with '
      'checkpoint_<step> or to a Hugging Face folder, or set fallback_init_rng, a seed, to '
      'use random parameters.'
    )
  _logger.warning('%s: using random parameters (fallback_init_rng).', where)
  return [starting_point.StartingPoint()]


def with_recorded_ids(dataset_cfg: Any, cfg: checkpoints.RestoreCheckpointConfig | None) -> Any:
  """Return options of data with the ids of sentinels and added tokens that the run was recorded with.

  Args:
    dataset_cfg: options of the data. Sentinels in text files have had one id each in all versions.
    cfg: the checkpoints; the first one decides. Checkpoints of other programs have no record, and the ids of today.
  """
  is_text = isinstance(dataset_cfg, data.TextFileConfig)
  if cfg is None or not (is_text or isinstance(dataset_cfg, data.DatasetConfig)):
    return dataset_cfg
  recorded = None
  # `restore_for_inference` raises the error of a missing or damaged checkpoint.
  with contextlib.suppress(CheckpointError):
    _, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
    for path in paths[:1]:
      recorded = checkpoints.read_metadata(path).get('run', {}).get('data')
  if recorded is None or not recorded.get('earlier_sentinels', True):
    return dataset_cfg
  if is_text:
    return dataclasses.replace(dataset_cfg, finds_added_tokens=False)
  return data.with_earlier_sentinels(dataset_cfg)


def _check_path(path: str, mode: str) -> None:
  """Raise if `mode` is 'specific' and `path` is a run directory."""
  if mode == 'specific' and files.path(path).is_dir():
    steps = checkpoints.all_steps(path, require_manifest=False)
    if steps:
      raise CheckpointError(
        f'{path!r} is a run directory, and mode={mode!r} expects a checkpoint, e.g. '
        f'{checkpoints.get_checkpoint_dir(path, steps[-1])!r}. Set the path of a checkpoint, or set '
        "RestoreCheckpointConfig.mode to 'latest' or 'all'."
      )


def _known_step(path: str) -> int | None:
  """Return the step of a checkpoint; None if it is unknown before the checkpoint is restored."""
  try:
    return checkpoints.open_source(path).step
  except CheckpointError:  # Damaged: restoring it raises the error.
    return None


def _exists(path: str) -> bool:
  """Return whether the lead process finds a checkpoint."""
  return bool(multihost.broadcast_from_lead(files.path(path).is_dir()))


def _restore_each(
  todo, axes, partitioner, model, init_rng, cfg, is_done
) -> Iterator[RestoredModel]:
  damaged = []
  for start, known_step, initializer in todo:
    is_of_all = cfg is not None and cfg.mode == 'all'
    if is_of_all and start.path is not None and not _exists(start.path):
      _logger.warning(
        'Skipping the checkpoint %s, which has been deleted in the meantime.', start.path
      )
      continue
    # Without `fallback_to_scratch`, all parameters must be restored; builders may initialise parts of them.
    may_begin = cfg is None or cfg.fallback_to_scratch or bool(cfg.builders)
    rng = None
    if start.is_new or may_begin:
      rng = init_rng
    try:
      state, restored = starting_point.make_state(start, initializer, partitioner, model, rng)
    except CheckpointDamagedError as error:
      if not is_of_all:
        raise
      _logger.warning('%s Skipping this checkpoint.', error)
      damaged.append(start.path)
      continue
    step = 0
    if restored is not None:
      step = restored.step
      if known_step is None and is_done(start.path, step):
        continue
    if isinstance(state, FlaxOptimTrainState):
      state = partitioner.partition(
        FlaxOptimTrainState.for_inference,
        in_axis_resources=(initializer.train_state_axes,),
        out_axis_resources=axes,
      )(state)
    description = None if start.is_new else start.description
    result = RestoredModel(state, axes, start.path, step, description)
    del state, restored
    yield result
    del result
  if damaged:
    raise CheckpointDamagedError(
      f'{len(damaged)} of {len(todo)} checkpoint(s) are damaged: {", ".join(damaged)}. '
      'Delete or replace these checkpoints; all others are done.'
    )
