"""Parameters for the commands that do not train: evaluate, infer, chat and export restore through one function.

No optimizer state is read from the disk, unless the optimizer evaluates other parameters than it trains: then what was
stored is not what is to be evaluated, and the state says what is. Names, shapes and vocabulary sizes are compared
before anything is computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import logging
import os
from typing import Any, NamedTuple

import jax

from t5x_lite import checkpoints
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import state_init
from t5x_lite.apps.common import start as start_lib
from t5x_lite.errors import CheckpointDamagedError, CheckpointError, ConfigError
from t5x_lite.train_state import FlaxOptimTrainState, InferenceState
from t5x_lite.types import PyTree

_logger = logging.getLogger(__name__)


class RestoredModel(NamedTuple):
  """One set of parameters, ready on the devices.

  Attributes:
    train_state: step, parameters and mutable collections.
    train_state_axes: a tree of the same structure with the mesh PartitionSpec of each array.
    path: the checkpoint; None for random parameters.
    step: number of training steps behind the parameters; 0 for random ones.
  """

  train_state: InferenceState
  train_state_axes: PyTree
  path: str | None
  step: int


def restore_for_inference(
    model: models.BaseModel,
    restore_checkpoint_cfg: checkpoints.RestoreCheckpointConfig | None,
    partitioner: partitioning.PjitPartitioner,
    input_shapes: Mapping[str, Sequence[int]],
    input_types: Mapping[str, Any] | None = None,
    fallback_init_rng: int | None = None,
    *,
    train_state_initializer_cls: type[state_init.TrainStateInitializer] = state_init.TrainStateInitializer,
    is_done: Callable[[str, int], bool] = lambda path, step: False,
    applies_transforms: bool = False,
) -> Iterator[RestoredModel]:
  """Finds the checkpoints that a configuration names, checks them against the model, and restores one after another.

  The search and the checks happen in the call; each checkpoint is verified and read when the iterator is advanced. Let
  go of one result before asking for the next, so that the devices need not hold both. All processes call it together.

  With mode 'all' a checkpoint that is damaged is named in a warning and passed over; once the others have been given
  out, the iterator ends with an error. One that a training run deletes meanwhile is passed over.

  Args:
    model: the model; its parameter layout may differ from the checkpoint's.
    restore_checkpoint_cfg: which checkpoints, and how to fit them; None for random parameters.
    partitioner: lays parameters out over the mesh.
    input_shapes: model feature name to the shape of a global batch.
    input_types: model feature name to dtype; the model's defaults if None.
    fallback_init_rng: seed of random parameters, which are used when there is no checkpoint, and in the place of what a
      checkpoint lacks where the configuration says `fallback_to_scratch`. None refuses both.
    train_state_initializer_cls: makes the state.
    is_done: asked with (path, step); a checkpoint for which it is true is passed over.
    applies_transforms: apply transforms to shapes in the checks, for `--dry_run`; see `start.check_start`.

  Returns:
    An iterator, in ascending order of step for each path that the configuration names; empty when all are done.

  Raises:
    CheckpointError: there is no checkpoint, or one does not fit the model; the message names the arrays that differ.
    CheckpointDamagedError: the checkpoint that was asked for, or every one, is damaged.
    ConfigError: the seed is out of range, or it is missing where it is needed.
  """
  cfg = restore_checkpoint_cfg
  if fallback_init_rng is not None and (isinstance(fallback_init_rng, bool) or not isinstance(fallback_init_rng, int)
                                        or not 0 <= fallback_init_rng < 2**32):
    raise ConfigError(f'fallback_init_rng is {fallback_init_rng!r}; expected None, or a whole number from 0 to 2**32 - '
                      '1 that seeds random parameters.')
  if cfg is not None:
    # The position in the training data means nothing here.
    cfg = dataclasses.replace(cfg, restore_dataset=False)
    if cfg.fallback_to_scratch and fallback_init_rng is None:
      raise ConfigError('RestoreCheckpointConfig.fallback_to_scratch is True, but fallback_init_rng is None: give a '
                        'seed for what the checkpoint lacks, or set fallback_to_scratch to False.')
  initializer = train_state_initializer_cls(
      None, model.get_initial_variables, input_shapes, partitioner, input_types)
  starts = _find(cfg, fallback_init_rng is not None)
  # With the optimizer's state, for the checkpoints that need it.
  whole = functools.cache(lambda: train_state_initializer_cls(
      model.optimizer_def, model.get_initial_variables, input_shapes, partitioner, input_types))
  todo = []
  for start in starts:
    step = None if start.path is None else _known_step(start.path)
    if step is not None and is_done(start.path, step):
      continue
    its_initializer = initializer
    if cfg is not None and (cfg.mode != 'all' or (step is not None and os.path.isdir(start.path))):
      shape = initializer.global_train_state_shape
      if start.path is not None and _is_trained_on_other_params(start.path, model, shape):
        its_initializer = whole()
      start_lib.check_start(start, its_initializer.global_train_state_shape, model, begins=False,
                           applies_transforms=applies_transforms)
    todo.append((start, step, its_initializer))
  init_rng = None if fallback_init_rng is None else jax.random.key(fallback_init_rng)
  return _restore_each(todo, initializer.train_state_axes, partitioner, model, init_rng, cfg, is_done)


def _is_trained_on_other_params(path: str, model: models.BaseModel, shape: InferenceState) -> bool:
  """Whether the parameters to evaluate are not those that the checkpoint stores, but follow from its optimizer state.

  Raises:
    CheckpointError: they do, but the optimizer that knows how is not there.
  """
  source = checkpoints.open_source(path)
  recorded = source.metadata.get('optimizer')
  if recorded is not None and not recorded['evaluates_other_params']:
    return False
  # No optimizer of T5X evaluates others, and without an optimizer's state the parameters are those to evaluate.
  if recorded is None and (source.format == 't5x' or not source.has_optimizer_state):
    return False
  if not source.has_optimizer_state:
    raise CheckpointError(
        f'{path!r} was trained with the optimizer {recorded["name"]}, which evaluates other parameters than the stored '
        "ones, and the optimizer's state, from which they follow, is not there. Give the checkpoint with its state.")
  optimizer_def = model.optimizer_def
  knows_others = False
  if isinstance(optimizer_def, optimizers.OptimizerDef):
    variables = {'params': shape.params} | ({} if shape.params_axes is None else {'params_axes': shape.params_axes})
    knows_others = jax.eval_shape(
        lambda params: FlaxOptimTrainState.create(optimizer_def, {**variables, 'params': params}),
        shape.params).evaluates_other_params
  if recorded is not None and not knows_others:
    given = optimizer_def.name if isinstance(optimizer_def, optimizers.OptimizerDef) else 'none'
    raise CheckpointError(
        f'{path!r} was trained with the optimizer {recorded["name"]}, which evaluates other parameters than the stored '
        f"ones, and knows which from its state; the model's optimizer here is {given}. Configure the model with the "
        'optimizer of the run (OPTIMIZER, or the gin file that binds it).')
  return knows_others


def _find(cfg: checkpoints.RestoreCheckpointConfig | None, may_be_random: bool) -> list[start_lib.StartingPoint]:
  paths = []
  if cfg is not None:
    for path in cfg.paths:
      _check_path(path, cfg.mode)
    _, paths = checkpoints.get_first_valid_restore_config_and_paths([cfg])
  if paths:
    return [start_lib.StartingPoint(path=path, restore_cfg=cfg) for path in paths]
  where = 'No checkpoint is named' if cfg is None or not cfg.paths else (
      f'There is no checkpoint below {", ".join(cfg.paths)}; expected a model directory with checkpoint_<step> in it '
      f"(mode={cfg.mode!r}), or a Hugging Face folder")
  if not may_be_random:
    raise CheckpointError(f'{where}. Correct RestoreCheckpointConfig.path (CHECKPOINT_PATH), or give '
                          'fallback_init_rng, a seed, to use random parameters.')
  _logger.warning('%s: the parameters are random (fallback_init_rng).', where)
  return [start_lib.StartingPoint()]


def _check_path(path: str, mode: str) -> None:
  """Says more of a model directory that stands where a checkpoint is expected than that it holds no state."""
  if mode == 'specific' and os.path.isdir(path):
    steps = checkpoints.all_steps(path, require_manifest=False)
    if steps:
      raise CheckpointError(
          f'{path!r} is a directory of checkpoints, and mode={mode!r} expects one of them, e.g. '
          f'{checkpoints.get_checkpoint_dir(path, steps[-1])!r}. Name it, or set RestoreCheckpointConfig.mode to '
          "'latest' or 'all'.")


def _known_step(path: str) -> int | None:
  """Returns the step of a checkpoint; None where it cannot be known before it is restored."""
  try:
    return checkpoints.open_source(path).step
  except CheckpointError:  # Damaged: the restore has the last word.
    return None


def _restore_each(todo, axes, partitioner, model, init_rng, cfg, is_done) -> Iterator[RestoredModel]:
  damaged = []
  for start, known_step, initializer in todo:
    if cfg is not None and cfg.mode == 'all' and start.path is not None:
      if not multihost.broadcast_from_lead(os.path.isdir(start.path)):
        _logger.warning('The checkpoint %s has been deleted meanwhile: it is passed over.', start.path)
        continue
    # What is evaluated is stored, all of it, unless the configuration says otherwise.
    its_rng = init_rng if start.path is None or cfg.fallback_to_scratch else None
    try:
      state, restored = start_lib.make_state(start, initializer, partitioner, model, its_rng)
    except CheckpointDamagedError as error:
      if cfg.mode != 'all':
        raise
      _logger.warning('%s It is passed over.', error)
      damaged.append(start.path)
      continue
    step = 0 if restored is None else restored.step
    if known_step is None and restored is not None and is_done(start.path, step):
      continue
    if isinstance(state, FlaxOptimTrainState):
      state = partitioner.partition(
          FlaxOptimTrainState.for_inference, in_axis_resources=(initializer.train_state_axes,),
          out_axis_resources=axes)(state)
    result = RestoredModel(state, axes, start.path, step)
    del state, restored
    yield result
    del result
  if damaged:
    raise CheckpointDamagedError(f'{len(damaged)} of {len(todo)} checkpoint(s) are damaged and were passed over: '
                                 f'{", ".join(damaged)}. Delete them, or bring copies; the others are done.')
