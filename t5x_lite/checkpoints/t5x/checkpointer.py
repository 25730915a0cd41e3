"""T5X's checkpointers: they restore checkpoints of every format and save those of t5x_lite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, NoReturn, Protocol

import numpy as np

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import options
from t5x_lite.checkpoints import train_states
from t5x_lite.checkpoints import transforms
from t5x_lite.checkpoints.builders import base
from t5x_lite.checkpoints.t5x import loading
from t5x_lite.compat import names as t5x_names
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.train_state import TrainState


class CheckpointerConstructor(Protocol):
  """Function or class that makes a `Checkpointer`."""

  def __call__(
    self,
    train_state: TrainState,
    partitioner: BasePartitioner,
    checkpoints_dir: str,
    dataset_iterator: Any = None,
    *,
    keep: int | None = None,
    save_dtype: Any = np.float32,
    restore_dtype: Any = None,
    keep_dataset_checkpoints: int | None = None,
  ) -> Checkpointer:
    """Return the checkpointer; see `Checkpointer`."""
    ...


class Checkpointer:
  """Saves and restores train states in one directory, and returns when the files are complete.

  `CheckpointManager` saves while training continues. The constructor reads and writes nothing. Commands use `builders`
  and `retention` of a subclass; its `save` and `restore` are used by the functions with T5X's names.

  Attributes:
    checkpoints_dir: the directory.
    keep: number of newest checkpoints to keep; None for all.
    save_dtype: floating dtype of the saved parameters; None for their own dtypes.
    restore_dtype: floating dtype of restored parameters; None for the dtypes of the train state.
    keep_dataset_checkpoints: number of newest checkpoints that keep the position in the data; None for all.
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
    train_states.check_iterator(type(self).__name__, dataset_iterator)
    self.checkpoints_dir = checkpoints_dir
    self.keep = keep
    self.keep_dataset_checkpoints = keep_dataset_checkpoints
    self.save_dtype = save_dtype
    self.restore_dtype = restore_dtype
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator

  @property
  def builders(self) -> Sequence[base.StateBuilder]:
    """Builders that change a restored state; commands add them to `RestoreCheckpointConfig.builders`."""
    return ()

  @property
  def retention(self) -> Mapping[str, Any]:
    """Options of `SaveCheckpointConfig` that decide which checkpoints are kept; commands set them."""
    return {'keep': self.keep}

  def all_steps(self) -> Sequence[int]:
    """Return the steps of the checkpoints in the directory, of any program, ascending."""
    return discovery.all_steps_of_any_program(self.checkpoints_dir)

  def all_dataset_checkpoint_steps(self) -> Sequence[int]:
    """Return the steps of the checkpoints that hold a position in the data, ascending."""
    return discovery.all_dataset_checkpoint_steps(self.checkpoints_dir)

  def latest_step(self) -> int | None:
    """Return the newest step, or None."""
    return discovery.latest_step_of_any_program(self.checkpoints_dir)

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
    saving = options.SaveOptions(
      dtype=self.save_dtype,
      keep_dataset_checkpoints=self.keep_dataset_checkpoints,
      **self.retention,
    )
    train_states.save_train_state(
      self.checkpoints_dir,
      train_state,
      saving,
      dataset_iterator=self._dataset_iterator,
      state_transformation_fns=state_transformation_fns,
    )
    multihost.sync(f'saved to {self.checkpoints_dir}')

  def restore(
    self,
    step: int | None = None,
    path: discovery.PathLike | None = None,
    state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    fallback_state: transforms.StateDict | None = None,
    lazy_parameters: bool = False,
    *,
    restore_cfg: options.RestoreOptions | None = None,
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
    loading.check_not_lazy(f'{type(self).__name__}.restore', lazy_parameters)
    return restore_with_fallback(
      choose_path(self.checkpoints_dir, step, path),
      self._train_state,
      self._partitioner,
      fallback_state,
      state_transformation_fns,
      restore_dtype=self.restore_dtype,
      dataset_iterator=self._dataset_iterator,
      builders=self.builders,
      restore_cfg=restore_cfg,
    )

  def restore_from_tf_checkpoint(
    self, path_or_dir: discovery.PathLike, strict: bool | None = True, translator: Any = None
  ) -> NoReturn:
    """Raise CheckpointError, with the alternative: checkpoints of TensorFlow are not read."""
    del strict, translator
    raise loading.tensorflow_error(path_or_dir)

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
    return best_retention(
      self.keep,
      self.metric_name_to_monitor,
      self.metric_mode,
      self.keep_checkpoints_without_metrics,
      self.force_keep_period,
    )


def best_retention(
  keep: int | None,
  metric_name_to_monitor: str | None,
  metric_mode: str,
  keep_checkpoints_without_metrics: bool,
  force_keep_period: int | None,
) -> dict[str, Any]:
  """Return the options of `SaveCheckpointConfig` for T5X's options of keeping the best; without `keep` all are kept."""
  if keep is None:
    return {}
  if metric_name_to_monitor is None:
    return {'keep': keep, 'keep_period': force_keep_period}
  return {
    'keep': None,
    'keep_best': keep,
    'keep_period': force_keep_period,
    'metric_mode': metric_mode,
    'metric_name_to_monitor': metric_name_to_monitor,
    'keep_checkpoints_without_metrics': keep_checkpoints_without_metrics,
  }


def choose_path(
  directory: discovery.PathLike, step: int | None, path: discovery.PathLike | None
) -> str:
  """Return the checkpoint that `step` or `path` names, or the newest sound one of the directory without both.

  Raises:
    CheckpointError: the directory has no sound checkpoint.
    ConfigError: both are given.
  """
  if step is not None and path is not None:
    raise checks.invalid('restore', 'step', 'None if path is given', step, 'Give one of both.')
  if path is None and step is not None:
    path = discovery.get_checkpoint_dir(directory, step)
  if path is None:
    path = train_states.newest_path(directory)
  if path is None:
    raise errors.CheckpointError(
      f'There is no checkpoint in {str(directory)!r} to restore. Give the path of one.'
    )
  return str(path)


def restore_with_fallback(
  path: str,
  train_state: TrainState,
  partitioner: BasePartitioner,
  fallback_state: transforms.StateDict | None,
  state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn],
  *,
  restore_dtype: Any,
  dataset_iterator: Any,
  builders: Sequence[base.StateBuilder] = (),
  restore_cfg: options.RestoreOptions | None = None,
) -> TrainState:
  """Restore a checkpoint with T5X's options; see `Checkpointer.restore`."""
  maps = [fn.rules for fn in state_transformation_fns if isinstance(fn, transforms.AssignmentMap)]
  given = restore_cfg or options.RestoreOptions(path=path)
  restoring = dataclasses.replace(
    given,
    path=path,
    mode='specific',
    assignment_map=maps[0] if maps else None,
    dtype=restore_dtype,
    fallback_to_scratch=fallback_state is not None,
    restore_dataset=True,
    state_transformation_fns=state_transformation_fns,
    builders=(*builders, *(each for each in given.builders if each not in builders)),
  )
  return train_states.restore_train_state(
    path,
    train_state,
    partitioner,
    restoring,
    dataset_iterator=dataset_iterator,
    initial_state_fn=None if fallback_state is None else lambda: fallback_state,
  )
