"""T5X's manager of checkpoints of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import os
from typing import Any, NoReturn, Protocol

from t5x_lite import files
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import options
from t5x_lite.checkpoints import policies
from t5x_lite.checkpoints import train_states
from t5x_lite.checkpoints import transforms
from t5x_lite.checkpoints.t5x import checkpointer
from t5x_lite.checkpoints.t5x import loading
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.train_state import TrainState


class CheckpointManagerConstructor(Protocol):
  """Function or class that makes an `OrbaxCheckpointManagerInterface`."""

  def __call__(
    self,
    directory: str,
    train_state: TrainState,
    partitioner: BasePartitioner,
    dataset_iterator: Any = None,
    save_dtype: Any = None,
    restore_dtype: Any = None,
    keep: int | None = None,
    period: int | None = None,
    force_keep_period: int | None = None,
    checkpoint_steps: Sequence[int] | None = None,
  ) -> OrbaxCheckpointManagerInterface:
    """Return the manager; see `OrbaxCheckpointManagerInterface`."""
    ...


class OrbaxCheckpointManagerInterface:
  """T5X's interface to the checkpoints of a run, which are t5x_lite's.

  `save` returns when the checkpoint is complete, and the directory is locked only meanwhile. `CheckpointManager` saves
  while training continues.
  """

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
    save_cfg: options.SaveOptions | None = None,
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
    train_states.check_iterator('OrbaxCheckpointManagerInterface', dataset_iterator)
    self.retention: Mapping[str, Any] = checkpointer.best_retention(
      keep, metric_name_to_monitor, metric_mode, keep_checkpoints_without_metrics, force_keep_period
    )
    self._options = save_cfg or options.SaveOptions(
      dtype=save_dtype,
      period=period,
      checkpoint_steps=checkpoint_steps,
      keep_dataset_checkpoints=keep_dataset_checkpoints,
      **self.retention,
    )
    self._policy = policies.save_policies_from_config(self._options)
    path = os.fspath(directory)
    if discovery.is_checkpoint_dir_name(path):
      self._directory = str(files.path(path).parent)
    else:
      self._directory = path
    self._train_state = train_state
    self._partitioner = partitioner
    self._dataset_iterator = dataset_iterator
    self._restore_dtype = restore_dtype

  @property
  def directory(self) -> files.Path:
    """The model directory."""
    return files.path(self._directory)

  def all_steps(self) -> Sequence[int]:
    """Return the steps of the checkpoints in the directory, of any program, ascending."""
    return discovery.all_steps_of_any_program(self._directory)

  def latest_step(self) -> int | None:
    """Return the newest step, or None."""
    return discovery.latest_step_of_any_program(self._directory)

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
    return train_states.save_train_state(
      self._directory,
      train_state,
      self._options,
      dataset_iterator=self._dataset_iterator,
      state_transformation_fns=state_transformation_fns,
    )

  def restore(
    self,
    step: int | None = None,
    path: discovery.PathLike | None = None,
    fallback_state: transforms.StateDict | None = None,
    state_transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    lazy_parameters: bool | None = False,
    *,
    restore_cfg: options.RestoreOptions | None = None,
  ) -> TrainState:
    """Restore a checkpoint of any format; see `Checkpointer.restore`."""
    loading.check_not_lazy('OrbaxCheckpointManagerInterface.restore', lazy_parameters)
    return checkpointer.restore_with_fallback(
      checkpointer.choose_path(self._directory, step, path),
      self._train_state,
      self._partitioner,
      fallback_state,
      state_transformation_fns,
      restore_dtype=self._restore_dtype,
      dataset_iterator=self._dataset_iterator,
      restore_cfg=restore_cfg,
    )

  def restore_from_tf_checkpoint(
    self, path_or_dir: discovery.PathLike, strict: bool = True, translator: Any = None
  ) -> NoReturn:
    """Raise CheckpointError, with the alternative: checkpoints of TensorFlow are not read."""
    del strict, translator
    raise loading.tensorflow_error(path_or_dir)
