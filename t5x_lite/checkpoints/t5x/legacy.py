"""T5X's functions and classes that restore by configurations and manage the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
import os
from typing import Any

import jax

from t5x_lite import checks
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import train_states
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.checkpoints.t5x import checkpointer
from t5x_lite.compat import names as t5x_names
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.storage import files
from t5x_lite.train_state import TrainState


class LegacyCheckpointer:
  """Checkpointer that saves by one `Checkpointer` and restores by another."""

  def __init__(
    self,
    *,
    save_checkpointer: checkpointer.Checkpointer | None = None,
    restore_checkpointer: checkpointer.Checkpointer | None,
    strict: bool | None = False,
  ):
    """Store the arguments.

    Args:
      save_checkpointer: checkpointer of `save`; None if it only restores.
      restore_checkpointer: checkpointer of `restore`; None if it only saves.
      strict: passed to `restore_from_tf_checkpoint`.
    """
    self._save_checkpointer = save_checkpointer
    self._restore_checkpointer = restore_checkpointer
    self._strict = strict

  def save(
    self,
    path: str,
    item: TrainState,
    force: bool = False,
    custom_metadata: Mapping[str, Any] | None = None,
    state_transformation_fns: Sequence[transforms.SaveStateTransformationFn] = (),
    *,
    concurrent_gb: int = 128,
  ) -> None:
    """Save a state to the directory of `save_checkpointer`; see `Checkpointer.save`.

    Args:
      path: not used, as in T5X: the directory is that of the checkpointer.
      item: the state.
      force: must be False: an existing checkpoint is kept.
      custom_metadata: must be None.
      state_transformation_fns: see `Checkpointer.save`.
      concurrent_gb: see `Checkpointer.save`.

    Raises:
      ConfigError: there is no `save_checkpointer`, or an unsupported option.
    """
    del path
    checks.check(
      'LegacyCheckpointer.save',
      locals(),
      force=checks.one_of(
        (False,), t5x_names.remedy('t5x.utils', 'LegacyCheckpointer.save.force=True')
      ),
      custom_metadata=checks.Expectation(
        'None',
        lambda value: value is None,
        t5x_names.remedy('t5x.utils', 'LegacyCheckpointer.save.custom_metadata={...}'),
      ),
    )
    if self._save_checkpointer is None:
      raise checks.invalid(
        'LegacyCheckpointer',
        'save_checkpointer',
        'a Checkpointer in order to save',
        None,
        'Pass one, or set SaveCheckpointConfig.',
      )
    self._save_checkpointer.save(item, state_transformation_fns, concurrent_gb=concurrent_gb)

  def restore(
    self,
    path: str,
    item: TrainState | None = None,
    state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    fallback_state: transforms.StateDict | None = None,
    lazy_parameters: bool = False,
  ) -> TrainState:
    """Restore a checkpoint by `restore_checkpointer`; see `Checkpointer.restore`.

    Args:
      path: path of the checkpoint.
      item: not used, as in T5X: the structure is that of the checkpointer.
      state_transformation_fns: see `Checkpointer.restore`.
      fallback_state: see `Checkpointer.restore`.
      lazy_parameters: see `Checkpointer.restore`.
    """
    del item
    if self._restore_checkpointer is None:
      raise checks.invalid(
        'LegacyCheckpointer',
        'restore_checkpointer',
        'a Checkpointer in order to restore',
        None,
        'Pass one, or set RestoreCheckpointConfig.',
      )
    if _is_tensorflow(path):
      return self._restore_checkpointer.restore_from_tf_checkpoint(path, strict=self._strict)
    return self._restore_checkpointer.restore(
      path=path,
      state_transformation_fns=state_transformation_fns,
      fallback_state=fallback_state,
      lazy_parameters=lazy_parameters,
    )


class LegacyCheckpointManager:
  """T5X's manager that uses the checkpointers of two configurations."""

  def __init__(
    self,
    *,
    save_cfg: config.SaveCheckpointConfig | None,
    restore_cfg: config.RestoreCheckpointConfig | None,
    train_state_shape: TrainState,
    partitioner: BasePartitioner,
    ds_iter: Any = None,
    model_dir: str | None = None,
  ):
    """Make the checkpointers.

    Args:
      save_cfg: options of saving; None if it only restores.
      restore_cfg: options of restoring; None if it only saves.
      train_state_shape: state of `jax.ShapeDtypeStruct`s.
      partitioner: partitioner of the state.
      ds_iter: data iterator whose position is saved and restored, if the configurations say so; None for none.
      model_dir: directory of `save`.
    """
    config.CheckpointConfig(save_cfg, restore_cfg).check()
    self._save_cfg = save_cfg
    self._model_dir = model_dir
    self._saving = None
    self._save_iterator = None
    if save_cfg is not None and save_cfg.save_dataset:
      self._save_iterator = ds_iter
    methods = ('save', '_get_state_dict_for_save')
    if save_cfg is not None and not config.is_standard(save_cfg.checkpointer_cls, *methods):
      self._saving = save_checkpointer(
        save_cfg, train_state_shape, partitioner, model_dir, self._save_iterator
      )
    self._restoring = None
    if restore_cfg is not None:
      self._restoring = restore_checkpointer(restore_cfg, train_state_shape, partitioner, ds_iter)

  def wait_until_finished(self) -> None:
    """Do nothing: every save is finished when `save` returns."""

  def close(self) -> None:
    """Do nothing: nothing is open between calls."""

  def save(
    self,
    train_state: TrainState,
    state_transformation_fns: Sequence[transforms.SaveStateTransformationFn] = (),
  ) -> None:
    """Save a state; see `Checkpointer.save`. The functions of `save_cfg` are not applied, as in T5X."""
    if self._save_cfg is None:
      raise checks.invalid(
        'LegacyCheckpointManager',
        'save_cfg',
        'a SaveCheckpointConfig in order to save',
        None,
        'Pass one.',
      )
    if self._saving is not None:
      self._saving.save(train_state, state_transformation_fns)
      return
    if self._model_dir is None:
      raise checks.invalid(
        'LegacyCheckpointManager', 'model_dir', 'a directory in order to save', None, 'Pass one.'
      )
    train_states.save_train_state(
      self._model_dir,
      train_state,
      self._save_cfg.changed(state_transformation_fns=()),
      dataset_iterator=self._save_iterator,
      state_transformation_fns=state_transformation_fns,
    )

  def restore(
    self,
    paths: Sequence[str],
    restore_cfg: config.RestoreCheckpointConfig | None = None,
    fallback_state: transforms.StateDict | None = None,
  ) -> TrainState | list[TrainState] | None:
    """Restore checkpoints.

    Args:
      paths: paths of the checkpoints.
      restore_cfg: options of the restore; path and mode are not used.
      fallback_state: see `Checkpointer.restore`.

    Returns:
      The state of a single path, otherwise a list of states; None without `restore_cfg` or `paths`.
    """
    return restore(self._restoring, paths, restore_cfg, fallback_state)


def save_checkpointer(
  cfg: config.SaveCheckpointConfig,
  train_state: TrainState,
  partitioner: BasePartitioner,
  model_dir: str | None,
  ds_iter: Any = None,
) -> checkpointer.Checkpointer:
  """Return the checkpointer of a configuration, which saves to a directory."""
  make: Any = cfg.checkpointer_cls
  return make(
    train_state=train_state,
    partitioner=partitioner,
    checkpoints_dir=model_dir,
    dataset_iterator=ds_iter,
    save_dtype=cfg.dtype,
    keep=cfg.keep,
    keep_dataset_checkpoints=cfg.keep_dataset_checkpoints,
  )


def restore_checkpointer(
  cfg: config.RestoreCheckpointConfig,
  train_state: TrainState,
  partitioner: BasePartitioner,
  ds_iter: Any,
) -> checkpointer.Checkpointer:
  """Return the checkpointer of a configuration, which restores checkpoints by their paths."""
  make = cfg.checkpointer_cls or checkpointer.Checkpointer
  return make(
    train_state=train_state,
    partitioner=partitioner,
    checkpoints_dir='',
    dataset_iterator=ds_iter if cfg.restore_dataset else None,
    restore_dtype=cfg.dtype,
  )


def restore(
  checkpoint_manager: Any,
  paths: Sequence[str] | None,
  restore_cfg: config.RestoreCheckpointConfig | None,
  fallback_state: transforms.StateDict | None = None,
) -> TrainState | list[TrainState] | None:
  """Restore checkpoints by an `OrbaxCheckpointManagerInterface`, a `Checkpointer`, or a class with their `restore`.

  See `LegacyCheckpointManager.restore`.
  """
  if restore_cfg is None or paths is None:
    return None
  restored = []
  for path in paths:
    if _is_tensorflow(path):
      restored.append(
        checkpoint_manager.restore_from_tf_checkpoint(path, strict=restore_cfg.strict)
      )
      continue
    # Custom classes have T5X's arguments.
    more = {}
    if config.is_standard(type(checkpoint_manager), 'restore'):
      more['restore_cfg'] = restore_cfg
    restored.append(
      checkpoint_manager.restore(
        path=path,
        state_transformation_fns=restore_cfg.state_transformation_fns,
        fallback_state=fallback_state,
        **more,
      )
    )
  if len(restored) == 1:
    return restored[0]
  return restored


def get_fallback_state(
  restore_cfg: config.RestoreCheckpointConfig | None,
  init_fn: Callable[[jax.Array], transforms.StateDict],
  init_rng: jax.Array | None,
) -> transforms.StateDict | None:
  """Return a new state for arrays that a checkpoint lacks, or None without `fallback_to_scratch`.

  Args:
    restore_cfg: the configuration, or None.
    init_fn: function of a key that returns the state dict of a new state.
    init_rng: the key.

  Raises:
    ConfigError: `fallback_to_scratch` is set and there is no key.
  """
  if restore_cfg is None or not restore_cfg.fallback_to_scratch:
    return None
  if init_rng is None:
    raise checks.invalid(
      'get_fallback_state',
      'init_rng',
      'a key with fallback_to_scratch=True',
      None,
      'Pass a key, such as jax.random.key(0), or set fallback_to_scratch=False.',
    )
  return init_fn(init_rng)


def create_orbax_checkpoint_manager(
  *,
  save_cfg: config.SaveCheckpointConfig | None = None,
  restore_cfg: config.RestoreCheckpointConfig | None = None,
  train_state: TrainState,
  partitioner: BasePartitioner,
  ds_iter: Any = None,
  model_dir: str | None = None,
) -> checkpointer.OrbaxCheckpointManagerInterface:
  """Return the manager of `checkpoint_manager_cls`.

  Args:
    save_cfg: options of saving, or None.
    restore_cfg: options of restoring, or None.
    train_state: state with the structure of restored states.
    partitioner: partitioner of the state.
    ds_iter: data iterator whose position is saved and restored, if a configuration says so; None for none.
    model_dir: the model directory.

  Raises:
    ConfigError: the configurations have different classes, or neither is given.
  """
  cfgs = [cfg.validated() for cfg in (save_cfg, restore_cfg) if cfg is not None]
  classes = [cfg.checkpoint_manager_cls for cfg in cfgs]
  if not cfgs or any(each is not classes[0] for each in classes):
    raise checks.invalid(
      'create_orbax_checkpoint_manager',
      'checkpoint_manager_cls',
      'the same class in save_cfg and restore_cfg, of which one is given',
      classes,
      'Set it in both, or in neither.',
    )
  make: Any = classes[0] or checkpointer.OrbaxCheckpointManagerInterface
  kwargs = {}
  if save_cfg is not None and config.is_standard(make, 'save', '__init__'):
    kwargs['save_cfg'] = save_cfg.changed(state_transformation_fns=())
  elif save_cfg is not None:
    kwargs |= dict(save_dtype=save_cfg.dtype, keep=save_cfg.keep, period=save_cfg.period)
  saves_data = save_cfg is not None and save_cfg.save_dataset
  restores_data = restore_cfg is not None and restore_cfg.restore_dataset
  if not (saves_data or restores_data):
    ds_iter = None
  return make(
    directory=model_dir,
    train_state=train_state,
    partitioner=partitioner,
    dataset_iterator=ds_iter,
    restore_dtype=restore_cfg and restore_cfg.dtype,
    **kwargs,
  )


def create_checkpoint_manager_and_restore(
  train_state_initializer: Any,
  partitioner: BasePartitioner,
  restore_checkpoint_cfg: config.RestoreCheckpointConfig,
  restore_path: str | None,
  fallback_init_rng: jax.Array | None,
  save_checkpoint_cfg: config.SaveCheckpointConfig | None = None,
  model_dir: str | None = None,
  ds_iter: Any = None,
  use_orbax: bool = False,
) -> tuple[
  TrainState | None, LegacyCheckpointManager | checkpointer.OrbaxCheckpointManagerInterface
]:
  """Return the state of one checkpoint and the manager of further ones.

  Args:
    train_state_initializer: the `TrainStateInitializer` of the model.
    partitioner: partitioner of the state.
    restore_checkpoint_cfg: options of restoring.
    restore_path: path of the checkpoint; None restores nothing.
    fallback_init_rng: key of new arrays, for `fallback_to_scratch`.
    save_checkpoint_cfg: options of saving, or None.
    model_dir: the model directory; None for the path of `restore_checkpoint_cfg`.
    ds_iter: data iterator whose position is saved and restored, if the configurations say so; None for none.
    use_orbax: make the manager of `checkpoint_manager_cls` instead of a `LegacyCheckpointManager`.

  Returns:
    (the restored state or None, the manager).
  """
  shape = train_state_initializer.global_train_state_shape
  common: dict[str, Any] = dict(
    save_cfg=save_checkpoint_cfg,
    restore_cfg=restore_checkpoint_cfg,
    partitioner=partitioner,
    ds_iter=ds_iter,
    model_dir=model_dir or restore_checkpoint_cfg.path,
  )
  if use_orbax:
    manager = create_orbax_checkpoint_manager(train_state=shape, **common)
    restore_fn = functools.partial(restore, manager)
  else:
    manager = LegacyCheckpointManager(train_state_shape=shape, **common)
    restore_fn = manager.restore
  if not restore_path:
    return None, manager
  fallback = get_fallback_state(
    restore_checkpoint_cfg,
    lambda rng: train_state_initializer.from_scratch(rng).state_dict(),
    fallback_init_rng,
  )
  state: Any = restore_fn([restore_path], restore_checkpoint_cfg, fallback)
  return state, manager


def _is_tensorflow(path: discovery.PathLike) -> bool:
  return files.path(f'{os.fspath(path)}.index').is_file()
