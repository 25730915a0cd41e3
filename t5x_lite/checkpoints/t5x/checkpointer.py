"""T5X's checkpointers and manager of checkpoints: one implementation under three names with T5X's signatures.

They restore checkpoints of every format and save those of t5x_lite. `CheckpointManager` saves while training continues;
these classes return when the files are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import os
from typing import Any, NoReturn

import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import train_states
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.checkpoints.saving import policies
from t5x_lite.checkpoints.t5x import loading
from t5x_lite.compat import names as t5x_names
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.storage import files
from t5x_lite.train_state import TrainState


class _CheckpointsOfRun(config.CheckpointerBase):
  """Saves and restores train states in one directory."""

  metric_name_to_monitor: str | None = None
  metric_mode: str = 'max'
  keep_checkpoints_without_metrics: bool = True
  force_keep_period: int | None = None
  _restore_cfg: config.RestoreCheckpointConfig | None = None

  def __init__(
    self,
    directory: discovery.PathLike,
    train_state: TrainState,
    partitioner: BasePartitioner,
    dataset_iterator: Any,
    restore_dtype: Any,
  ):
    train_states.check_iterator(type(self).__name__, dataset_iterator)
    self.restore_dtype = restore_dtype
    self._directory = directory
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator

  def all_steps(self) -> Sequence[int]:
    """Return the steps of the checkpoints in the directory, of any program, ascending."""
    return discovery.all_steps_of_any_program(self._directory)

  def latest_step(self) -> int | None:
    """Return the newest step, or None."""
    return discovery.latest_step_of_any_program(self._directory)

  def restore_from_tf_checkpoint(
    self, path_or_dir: discovery.PathLike, strict: bool | None = True, translator: Any = None
  ) -> NoReturn:
    """Raise CheckpointError, with the alternative: checkpoints of TensorFlow are not read."""
    del strict, translator
    raise loading.tensorflow_error(path_or_dir)

  def _best_retention(self) -> Mapping[str, Any]:
    """Return the options of `SaveCheckpointConfig` that keep the best checkpoints; without `keep` all are kept."""
    if self.keep is None:
      return {}
    if self.metric_name_to_monitor is None:
      return {'keep': self.keep, 'keep_period': self.force_keep_period}
    return {
      'keep': None,
      'keep_best': self.keep,
      'keep_period': self.force_keep_period,
      'metric_mode': self.metric_mode,
      'metric_name_to_monitor': self.metric_name_to_monitor,
      'keep_checkpoints_without_metrics': self.keep_checkpoints_without_metrics,
    }

  def _get_state_dict_for_save(
    self, state_dict: transforms.StateDict, lazy_load: bool = True
  ) -> transforms.StateDict:
    """Return the state dict that is saved; subclasses of `Checkpointer` may leave arrays out, as in T5X."""
    del lazy_load
    return state_dict

  def set_restore_cfg(self, restore_cfg: config.RestoreCheckpointConfig) -> None:
    """Let `restore` use further options, as in commands, which pass only T5X's arguments."""
    self._restore_cfg = restore_cfg

  def _save(
    self,
    train_state: TrainState,
    cfg: config.SaveCheckpointConfig,
    state_transformation_fns: Sequence[transforms.SaveStateTransformationFn],
  ) -> bool:
    return train_states.save_train_state(
      self._directory,
      train_state,
      cfg,
      state_dict_fn=self._get_state_dict_for_save,
      dataset_iterator=self._dataset_iterator,
      state_transformation_fns=state_transformation_fns,
    )

  def _restore(
    self,
    step: int | None,
    path: discovery.PathLike | None,
    state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn],
    fallback_state: transforms.StateDict | None,
    lazy_parameters: bool | None,
    restore_cfg: config.RestoreCheckpointConfig | None,
  ) -> TrainState:
    """Restore a checkpoint with T5X's options; see `Checkpointer.restore`."""
    loading.check_not_lazy(f'{type(self).__name__}.restore', lazy_parameters)
    chosen = self._choose_path(step, path)
    maps = [fn.rules for fn in state_transformation_fns if isinstance(fn, transforms.AssignmentMap)]
    given = restore_cfg or self._restore_cfg or config.RestoreCheckpointConfig(path=chosen)
    others = [each for each in given.builders if each not in self.builders]
    cfg = given.changed(
      path=chosen,
      mode='specific',
      assignment_map=maps[0] if maps else None,
      dtype=self.restore_dtype,
      fallback_to_scratch=fallback_state is not None,
      restore_dataset=True,
      state_transformation_fns=state_transformation_fns,
      builders=(*self.builders, *others),
    )
    return train_states.restore_train_state(
      chosen,
      self._train_state,
      self._partitioner,
      cfg,
      dataset_iterator=self._dataset_iterator,
      initial_state_fn=None if fallback_state is None else lambda: fallback_state,
    )

  def _choose_path(self, step: int | None, path: discovery.PathLike | None) -> str:
    """Return the checkpoint that `step` or `path` names, or the newest sound one of the directory without both.

    Raises:
      CheckpointError: the directory has no sound checkpoint.
      ConfigError: both are given.
    """
    if step is not None and path is not None:
      raise checks.invalid('restore', 'step', 'None if path is given', step, 'Give one of both.')
    if step is not None:
      path = discovery.get_checkpoint_dir(self._directory, step)
    elif path is None:
      path = train_states.newest_path(self._directory)
    if path is None:
      raise errors.CheckpointError(
        f'There is no checkpoint in {str(self._directory)!r} to restore. Give the path of one.'
      )
    return str(path)


class Checkpointer(_CheckpointsOfRun):
  """Saves and restores train states in one directory, and returns when the files are complete.

  `CheckpointManager` saves while training continues. The constructor reads and writes nothing. Commands use `builders`
  and `retention` of a subclass, and `save`, `restore` and `_get_state_dict_for_save` that it overrides.

  Attributes:
    checkpoints_dir: the directory.
    keep: number of newest checkpoints to keep; None for all.
    save_dtype: floating dtype of the saved parameters; None for their own dtypes.
    restore_dtype: floating dtype of restored parameters; None for the dtypes of the train state.
    keep_dataset_checkpoints: number of newest checkpoints that keep the position in the data; None for all.
  """

  PLACEHOLDERS = {'train_state': None, 'partitioner': None, 'checkpoints_dir': ''}
  _write_fn: Callable[[transforms.StateDict, Sequence[Any]], None] | None = None

  def __init__(
    self,
    train_state: TrainState,
    partitioner: BasePartitioner,
    checkpoints_dir: discovery.PathLike,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ):
    """Store the arguments.

    Args:
      train_state: state of arrays or `jax.ShapeDtypeStruct`s with the structure of restored states.
      partitioner: partitioner that gives their sharding.
      checkpoints_dir: the model directory; checkpoints elsewhere are restored by their path.
      dataset_iterator: iterator whose position is saved and restored, of t5x_lite or clu; None for none.
      keep: see above.
      save_dtype: see above.
      restore_dtype: see above.
      keep_dataset_checkpoints: see above.

    Raises:
      ConfigError: an invalid option.
    """
    super().__init__(checkpoints_dir, train_state, partitioner, dataset_iterator, restore_dtype)
    self.checkpoints_dir = checkpoints_dir
    self.keep = keep
    self.keep_dataset_checkpoints = keep_dataset_checkpoints
    self.save_dtype = save_dtype

  @property
  def _save_dtype(self) -> Any:
    """T5X's name of `save_dtype`, for subclasses."""
    return self.save_dtype

  def set_writer(self, write_fn: Callable[[transforms.StateDict, Sequence[Any]], None]) -> None:
    """Let `save` pass the state dict and the functions that transform it to `write_fn`, as in `train`."""
    self._write_fn = write_fn

  def all_dataset_checkpoint_steps(self) -> Sequence[int]:
    """Return the steps of the checkpoints that hold a position in the data, ascending."""
    return discovery.all_dataset_checkpoint_steps(self.checkpoints_dir)

  def save(
    self,
    train_state: TrainState,
    state_transformation_fns: Sequence[transforms.SaveStateTransformationFn] = (),
    *,
    concurrent_gb: int = 128,
  ) -> None:
    """Save a state as the checkpoint of its step, unless there is one, and delete checkpoints that are not kept.

    Args:
      train_state: the state.
      state_transformation_fns: functions `(state_dict, parameter_infos) -> (state_dict, parameter_infos)`.
      concurrent_gb: must be 128; the memory of a save is not limited.

    Raises:
      SaveError: the checkpoint could not be written; earlier ones are complete.
      DirectoryInUseError: another run saves to the directory.
    """
    checks.check(
      type(self).__name__,
      locals(),
      concurrent_gb=checks.one_of(
        (128,), t5x_names.remedy('t5x.checkpoints', 'Checkpointer.save.concurrent_gb=64')
      ),
    )
    if self._write_fn is not None:
      state_dict = self._get_state_dict_for_save(train_state.state_dict())
      self._write_fn(state_dict, state_transformation_fns)
      return
    cfg = config.SaveCheckpointConfig(
      dtype=self.save_dtype,
      keep_dataset_checkpoints=self.keep_dataset_checkpoints,
      **self.retention,
    )
    self._save(train_state, cfg, state_transformation_fns)
    multihost.sync(f'saved to {self.checkpoints_dir}')

  def restore(
    self,
    step: int | None = None,
    path: discovery.PathLike | None = None,
    state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    fallback_state: transforms.StateDict | None = None,
    lazy_parameters: bool = False,
    *,
    restore_cfg: config.RestoreCheckpointConfig | None = None,
  ) -> TrainState:
    """Restore a checkpoint of any format.

    Args:
      step: step in the directory.
      path: path of a checkpoint, instead of `step`; without both the newest sound checkpoint of the directory.
      state_transformation_fns: functions `(state_dict, target_state_dict, *, is_resuming) -> state_dict`.
      fallback_state: state dict with values for arrays that the checkpoint lacks; stored arrays that the train state
        does not have are then ignored.
      lazy_parameters: must be False.
      restore_cfg: further options: `strict`, `builders` and `use_param_average`.

    Returns:
      A state like the constructor's `train_state`.

    Raises:
      CheckpointDamagedError: a file is damaged.
      CheckpointError: the checkpoint does not exist or does not fit.
      ConfigError: both `step` and `path`, or an unsupported option.
    """
    return self._restore(
      step, path, state_transformation_fns, fallback_state, lazy_parameters, restore_cfg
    )

  def convert_from_tf_checkpoint(
    self,
    path_or_dir: discovery.PathLike,
    *,
    state_transformation_fns: Sequence[transforms.SaveStateTransformationFn] = (),
    concurrent_gb: int = 16,
    translator: Any = None,
  ) -> NoReturn:
    """Raise CheckpointError, with the alternative: checkpoints of TensorFlow are not read."""
    del state_transformation_fns, concurrent_gb, translator
    raise loading.tensorflow_error(path_or_dir)


class SaveBestCheckpointer(Checkpointer):
  """Checkpointer that keeps the newest checkpoint and the `keep` ones with the best value of a metric.

  Commands keep the best checkpoints too if this class is `SaveCheckpointConfig.checkpointer_cls`.

  Attributes:
    metric_name_to_monitor: full name of the metric, e.g. 'inference_eval/my_task/exact_match'. `save` reads its values
      from the TensorBoard events below the directory.
    metric_mode: 'max' if larger values are better, or 'min'.
    keep_checkpoints_without_metrics: whether checkpoints whose metric is unknown are kept.
    force_keep_period: also keep every checkpoint whose step is a multiple of this number.
  """

  def __init__(
    self,
    train_state: TrainState,
    partitioner: BasePartitioner,
    checkpoints_dir: discovery.PathLike,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    metric_name_to_monitor: str = 'train/accuracy',
    metric_mode: str = 'max',
    keep_checkpoints_without_metrics: bool = True,
    force_keep_period: int | None = None,
    keep_dataset_checkpoints: int | None = None,
  ):
    """Store the arguments; see the class and `Checkpointer`."""
    checks.check(
      type(self).__name__,
      locals(),
      metric_mode=checks.one_of(('max', 'min')),
      metric_name_to_monitor=checks.instance(
        str, "a name such as 'inference_eval/my_task/f1'"
      ).or_none(),
      keep_checkpoints_without_metrics=checks.instance(bool, 'True or False'),
    )
    super().__init__(
      train_state,
      partitioner,
      checkpoints_dir,
      dataset_iterator,
      keep=keep,
      save_dtype=save_dtype,
      restore_dtype=restore_dtype,
      keep_dataset_checkpoints=keep_dataset_checkpoints,
    )
    self.metric_name_to_monitor = metric_name_to_monitor
    self.metric_mode = metric_mode
    self.keep_checkpoints_without_metrics = keep_checkpoints_without_metrics
    self.force_keep_period = force_keep_period

  @property
  def retention(self) -> Mapping[str, Any]:
    """See `Checkpointer.retention`."""
    return self._best_retention()


class OrbaxCheckpointManagerInterface(_CheckpointsOfRun):
  """T5X's interface to the checkpoints of a run, which are t5x_lite's.

  `save` returns when the checkpoint is complete, and the directory is locked only meanwhile. `CheckpointManager` saves
  while training continues.
  """

  PLACEHOLDERS = {'directory': '', 'train_state': None, 'partitioner': None}

  def __init__(
    self,
    directory: discovery.PathLike,
    train_state: TrainState,
    partitioner: BasePartitioner,
    dataset_iterator: Any = None,
    save_dtype: Any = None,
    restore_dtype: Any = None,
    keep: int | None = None,
    period: int | None = 1,
    checkpoint_steps: Sequence[int] | None = None,
    keep_dataset_checkpoints: int | None = None,
    force_keep_period: int | None = None,
    metric_name_to_monitor: str | None = None,
    metric_mode: str = 'max',
    keep_checkpoints_without_metrics: bool = True,
    *,
    save_cfg: config.SaveCheckpointConfig | None = None,
  ):
    """Check and store the arguments; read and write nothing.

    Args:
      directory: the model directory, or a checkpoint in it.
      train_state: state of arrays or `jax.ShapeDtypeStruct`s with the structure of restored states.
      partitioner: partitioner that gives their sharding.
      dataset_iterator: iterator whose position is saved and restored, of t5x_lite or clu; None for none.
      save_dtype: floating dtype of the saved parameters; None for their own dtypes.
      restore_dtype: floating dtype of restored parameters; None for the dtypes of the train state.
      keep: number of checkpoints to keep, the newest or the best; None for all.
      period: number of steps between two saves, for `should_save` and `save` without `force`.
      checkpoint_steps: further steps at which to save.
      keep_dataset_checkpoints: number of newest checkpoints that keep the position in the data; None for all.
      force_keep_period: also keep every checkpoint whose step is a multiple of this number.
      metric_name_to_monitor: full name of a metric; with it, `keep` counts the best instead of the newest checkpoints.
      metric_mode: 'max' if larger values are better, or 'min'.
      keep_checkpoints_without_metrics: whether checkpoints whose metric is unknown are kept.
      save_cfg: all options of saving, instead of those above.

    Raises:
      ConfigError: an invalid option.
    """
    path = os.fspath(directory)
    if discovery.is_checkpoint_dir_name(path):
      path = str(files.path(path).parent)
    super().__init__(path, train_state, partitioner, dataset_iterator, restore_dtype)
    self.keep = keep
    self.metric_name_to_monitor = metric_name_to_monitor
    self.metric_mode = metric_mode
    self.keep_checkpoints_without_metrics = keep_checkpoints_without_metrics
    self.force_keep_period = force_keep_period
    self._save_cfg = save_cfg or config.SaveCheckpointConfig(
      dtype=save_dtype,
      period=period,
      checkpoint_steps=checkpoint_steps,
      keep_dataset_checkpoints=keep_dataset_checkpoints,
      **self.retention,
    )
    self._policy = policies.save_policies_from_config(self._save_cfg.validated())

  @property
  def retention(self) -> Mapping[str, Any]:
    """See `Checkpointer.retention`."""
    return self._best_retention()

  @property
  def directory(self) -> files.Path:
    """The model directory."""
    return files.path(self._directory)

  def should_save(self, step: int) -> bool:
    """Return True if `period` or `checkpoint_steps` asks for a save after `step` steps."""
    return self._policy.should_save(step)

  def wait_until_finished(self) -> None:
    """Do nothing: every save is finished when `save` returns."""

  def close(self) -> None:
    """Do nothing: nothing is open between calls."""

  def save(
    self,
    train_state: TrainState,
    state_transformation_fns: Sequence[transforms.SaveStateTransformationFn] = (),
    force: bool = True,
  ) -> bool:
    """Save a state as the checkpoint of its step, unless there is one, and delete checkpoints that are not kept.

    Args:
      train_state: the state.
      state_transformation_fns: functions `(state_dict, parameter_infos) -> (state_dict, parameter_infos)`.
      force: save also if `should_save` is False.

    Returns:
      True if the state was saved.

    Raises:
      SaveError: the checkpoint could not be written; earlier ones are complete.
      DirectoryInUseError: another run saves to the directory.
    """
    if not force and not self.should_save(int(train_states.get_local_data(train_state.step))):
      return False
    return self._save(train_state, self._save_cfg, state_transformation_fns)

  def restore(
    self,
    step: int | None = None,
    path: discovery.PathLike | None = None,
    fallback_state: transforms.StateDict | None = None,
    state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    lazy_parameters: bool | None = False,
    *,
    restore_cfg: config.RestoreCheckpointConfig | None = None,
  ) -> TrainState:
    """Restore a checkpoint of any format; see `Checkpointer.restore`."""
    return self._restore(
      step, path, state_transformation_fns, fallback_state, lazy_parameters, restore_cfg
    )
