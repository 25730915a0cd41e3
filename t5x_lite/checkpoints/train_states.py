"""Saves and restores of train states with the position of a data iterator, for the classes with T5X's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import logging
import math
import os
import pathlib
import tempfile
from typing import Any, Protocol, runtime_checkable

import jax
from jax import core
import numpy as np

from t5x_lite import checks
from t5x_lite import multihost
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.restoring import choice
from t5x_lite.checkpoints.restoring import restore
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.checkpoints.saving import event_metrics
from t5x_lite.checkpoints.saving import manager
from t5x_lite.networks.t5_config import StackConfig
from t5x_lite.partitioning import BasePartitioner
from t5x_lite.storage import files
from t5x_lite.train_state import TrainState
from t5x_lite.types import PyTree

_logger = logging.getLogger(__name__)


@runtime_checkable
class HasPosition(Protocol):
  """Data iterator of t5x_lite, such as `data.HostIterator`."""

  def get_state(self) -> Mapping[str, bytes]:
    """Return the position."""
    ...

  def set_state(self, state: Mapping[str, bytes]) -> None:
    """Go to a position."""


@runtime_checkable
class SavesPosition(Protocol):
  """Data iterator that keeps its position in a file, such as `clu.data.DatasetIterator`."""

  def save(self, filename: str) -> None:
    """Write the position to a file, or to several files whose names begin with `filename`."""

  def restore(self, filename: str) -> None:
    """Go to the position in a file that `save` wrote."""


_ITERATOR = checks.instance(
  (HasPosition, SavesPosition),
  'an iterator with get_state and set_state, or with save and restore',
  'Pass an iterator of data.open_train_iterator, or a DatasetIterator of clu.',
).or_none()
_POSITION_FILE = 'position'


def check_iterator(owner: str, dataset_iterator: Any) -> None:
  """Raise ConfigError unless the position of an iterator can be saved; `owner` is the class that has the option."""
  checks.check(owner, {'dataset_iterator': dataset_iterator}, dataset_iterator=_ITERATOR)


def get_local_data(x: Any) -> Any:
  """Return the first shard of a `jax.Array` on this process, and any other value unchanged."""
  if isinstance(x, jax.Array) and not isinstance(x, core.Tracer):
    return x.addressable_data(0)
  return x


def save_train_state(
  directory: discovery.PathLike,
  train_state: TrainState,
  save_options: config.SaveCheckpointConfig,
  *,
  dataset_iterator: HasPosition | SavesPosition | None = None,
  state_transformation_fns: Sequence[transforms.SaveStateTransformationFn] = (),
  state_dict_fn: Callable[[transforms.StateDict], transforms.StateDict] = lambda state: state,
) -> bool:
  """Save a state as the checkpoint of its step, and return when it is committed.

  An existing checkpoint of this step is kept, whatever program wrote it. All processes must call this together.

  Args:
    directory: the model directory.
    train_state: the state.
    save_options: options of saving and keeping.
    dataset_iterator: iterator whose position is saved, or None.
    state_transformation_fns: further functions, after those of `save_options`.
    state_dict_fn: function from the state dict of the state to the one that is saved.

  Returns:
    True if the state was saved, False if there was a checkpoint of its step.

  Raises:
    SaveError: the checkpoint could not be written.
    DirectoryInUseError: another run, or another manager of this process, saves to the directory.
  """
  step = int(get_local_data(train_state.step))
  path = discovery.get_checkpoint_dir(directory, step)
  is_there = files.path(path).exists() and not discovery.is_incomplete(path)
  if multihost.broadcast_from_lead(np.int32(is_there)):
    _logger.warning('Step %d is not saved, because %s exists.', step, path)
    return False
  save_options = save_options.changed(
    state_transformation_fns=(*save_options.state_transformation_fns, *state_transformation_fns),
  )
  with manager.CheckpointManager(directory, save_cfg=save_options) as writer:
    name = save_options.metric_name_to_monitor
    if name:
      values = event_metrics.populate_metrics_for_steps(directory, name, writer.all_steps())
      for known, value in values.items():
        if math.isfinite(value):
          writer.record_metrics(known, {name: value})
    position = None
    if dataset_iterator is not None:
      position = _position(dataset_iterator)
    writer.save(step, state_dict_fn(train_state.state_dict()), data_state=position)
  return True


def restore_train_state(
  path: discovery.PathLike,
  train_state: TrainState,
  partitioner: BasePartitioner,
  restore_options: config.RestoreCheckpointConfig,
  *,
  train_state_axes: PyTree | None = None,
  dataset_iterator: HasPosition | SavesPosition | None = None,
  initial_state_fn: Callable[[], transforms.StateDict] | None = None,
  from_params_fn: Callable[[transforms.StateDict], transforms.StateDict] | None = None,
  network: StackConfig | None = None,
) -> TrainState:
  """Restore a checkpoint of any format into the structure of a state. All processes must call this together.

  Args:
    path: path of the checkpoint; of a T5X checkpoint also that of its file `checkpoint`.
    train_state: state of arrays or `jax.ShapeDtypeStruct`s.
    partitioner: partitioner that gives the sharding. With `params_on_devices=False` the result has NumPy arrays.
    restore_options: options of the restore.
    train_state_axes: mesh axes of `train_state`; None for those of the partitioner.
    dataset_iterator: iterator that goes to the saved position, if `restore_dataset` is set; a checkpoint without a
      position leaves it where it is, with a warning.
    initial_state_fn: see `restore.restore_checkpoint`.
    from_params_fn: see `restore.restore_checkpoint`.
    network: see `restore.restore_checkpoint`.

  Returns:
    A state like `train_state`, of arrays.

  Raises:
    CheckpointDamagedError: a file differs from its hash in the manifest.
    CheckpointError: the checkpoint does not exist or does not fit.
    DataError: the position belongs to other data.
  """
  target = train_state.state_dict()
  shardings = None
  if partitioner.params_on_devices:
    if train_state_axes is None:
      axes = partitioner.get_mesh_axes(train_state)
    else:
      axes = train_state_axes
    shardings = partitioner.get_shardings(axes).state_dict()
  restored = restore.restore_checkpoint(
    sources.folder_of(path),
    target,
    shardings=shardings,
    restore_cfg=restore_options,
    initial_state_fn=initial_state_fn,
    from_params_fn=from_params_fn,
    network=network,
  )
  if dataset_iterator is not None and restore_options.restore_dataset:
    if restored.data_state is None:
      _logger.warning(
        '%s has no position in the data that can be read: the iterator stays where it is.', path
      )
    else:
      _set_position(dataset_iterator, restored.data_state)
  return train_state.restore_state(restored.state)


def newest_path(directory: discovery.PathLike) -> str | None:
  """Return the newest sound checkpoint in a directory, also of T5X, or None."""
  _, paths = choice.get_first_valid_restore_config_and_paths(
    [config.RestoreCheckpointConfig(os.fspath(directory))]
  )
  if paths:
    return paths[0]
  return None


def _position(iterator: HasPosition | SavesPosition) -> dict[str, bytes]:
  """Return the position of an iterator, as files by name."""
  if isinstance(iterator, HasPosition):
    return dict(iterator.get_state())
  with tempfile.TemporaryDirectory() as folder:
    iterator.save(os.path.join(folder, _POSITION_FILE))
    return {
      str(path.relative_to(folder)): path.read_bytes()
      for path in sorted(pathlib.Path(folder).rglob('*'))
      if path.is_file()
    }


def _set_position(iterator: HasPosition | SavesPosition, state: Mapping[str, bytes]) -> None:
  if isinstance(iterator, HasPosition):
    iterator.set_state(dict(state))
    return
  with tempfile.TemporaryDirectory() as folder:
    for name, data in state.items():
      path = pathlib.Path(folder, name)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(data)
    iterator.restore(os.path.join(folder, _POSITION_FILE))
