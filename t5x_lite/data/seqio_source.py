"""The iterator over a seqio Task or Mixture, with an exact position.

seqio's pipelines shard by reading: process i of n reads the i-th part of the files or examples, and its order holds
only as long as n stays. The position is TensorFlow's own checkpoint of the iterator (shuffle buffers, packing,
mixture draws and epochs included), together with the batches that were prefetched and not used.
"""

import collections
import dataclasses
import io
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from t5x_lite.data import positions
from t5x_lite.data import seqio_features
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import DataState, HostBatch, HostIterator
from t5x_lite.data.seqio_import import quiet, seqio, summary, tf
from t5x_lite.data.truncation import Truncation, sample_truncation
from t5x_lite.errors import ConfigError, DataError, DataUnavailableError

_TF_PREFIX = 'tf_iterator'
_UNDELIVERED_FILE = 'undelivered.npz'
# Of file systems and networks; reading again may succeed. An exception of a Python function in the pipeline, such as
# OSError, is an UnknownError here.
_TRANSIENT_ERRORS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError,
                     tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.UnknownError)


def task_dataset(provider: Any, cfg: DatasetConfig, *, num_epochs: int | None,
                 shard_info: Any = None, tell_lengths: bool = True) -> tf.data.Dataset:
  """Returns seqio's dataset of task features, in an order that depends on the seed alone.

  Preprocessors that are not told the feature lengths do not cut texts at them.

  Raises:
    DataError: seqio cannot make it; its own message is part of ours.
  """
  try:
    with quiet():
      dataset = provider.get_dataset(
          sequence_length=dict(cfg.task_feature_lengths) if tell_lengths else None, split=cfg.split,
          use_cached=cfg.use_cached, shuffle=cfg.shuffle, seed=cfg.effective_seed, shard_info=shard_info,
          num_epochs=num_epochs, trim_output_features=cfg.trim_output_features,
          # tf.data writes a memory cache into every checkpoint: read again instead.
          try_in_mem_cache=False)
  except (ConfigError, DataError):
    raise
  except (ValueError, AssertionError, OSError) as error:
    raise DataError(f'seqio cannot read the split {cfg.split!r} of {provider.name!r}: {error}') from error
  options = tf.data.Options()
  options.deterministic = True
  return dataset.with_options(options)


def _refuse_empty(provider: Any, cfg: DatasetConfig, shard_info: Any) -> None:
  """Reads one example of each task. Without this, a task whose preprocessors drop everything would be read forever.

  Raises:
    DataError: a task gives no example in one epoch.
  """
  for task in seqio_features.subtasks_with_split(provider, cfg.split):
    dataset = task_dataset(task, dataclasses.replace(cfg, shuffle=False), num_epochs=1, shard_info=shard_info)
    try:
      with quiet():
        found = next(iter(dataset.take(1)), None)
    except tf.errors.OpError as error:
      raise DataError(f'The split {cfg.split!r} of {task.name!r} failed while reading: {summary(error)}') from error
    if found is None:
      where = f' to data shard {shard_info.index} of {shard_info.num_shards}' if shard_info else ''
      raise DataError(f'The split {cfg.split!r} of {task.name!r} is empty: it gave no example{where}. Check its files, '
                      'the filters among its preprocessors, and the number of processes.')


def convert(converter: Any, dataset: tf.data.Dataset, cfg: DatasetConfig, provider: Any) -> tf.data.Dataset:
  """Returns the dataset of model features.

  Raises:
    ConfigError: the converter refuses the dataset.
  """
  try:
    with quiet():
      return converter(dataset, dict(cfg.task_feature_lengths))
  except ValueError as error:
    raise ConfigError(f'{type(converter).__name__} cannot convert {provider.name!r}: {error}') from error


def _lacks_part_of_pipeline(error: Exception) -> bool:
  """Returns True if a saved position lacks a part of the pipeline; a file that is missing is a NotFoundError too."""
  return isinstance(error, tf.errors.NotFoundError) and 'from checkpoint: Iterator::' in error.message


class SeqioIterator(HostIterator):
  """Batches of a seqio Task or Mixture, read by this process's shard."""

  def __init__(self, cfg: DatasetConfig, layout: Any, feature_converter: Any):
    """Args:
      cfg: what to read, with source 'seqio'.
      layout: the partitioner's `DataLayout`.
      feature_converter: a name, or a converter class of seqio.

    Raises:
      ConfigError, DataError: see `iterators.open_train_iterator`.
    """
    provider = seqio_features.get_provider(cfg)
    seqio_features.check_split(provider, cfg.split)
    converter = seqio_features.get_converter(cfg, feature_converter, provider)
    task_rates = seqio_features.rates(provider)
    own = positions.shard_rows(layout)
    shard_info = seqio.ShardInfo(index=layout.shard_id, num_shards=layout.num_shards) if layout.num_shards > 1 else None
    _refuse_empty(provider, cfg, shard_info)
    dataset = task_dataset(provider, cfg, num_epochs=None, shard_info=shard_info)
    self._cfg, self._provider = cfg, provider
    self._num_rows = own.stop - own.start
    dataset = convert(converter, dataset, cfg, provider).batch(self._num_rows, drop_remainder=True)
    self._description = f'The split {cfg.split!r} of {provider.name!r}'
    self._spec = {name: jax.ShapeDtypeStruct((layout.batch_size, *spec.shape[1:]), spec.dtype.as_numpy_dtype)
                  for name, spec in dataset.element_spec.items()}
    with quiet():
      self._iterator = iter(dataset)
    # Batches that TensorFlow's position is ahead: those a restored state holds beside it, or one read to try it.
    self._waiting: collections.deque[HostBatch] = collections.deque()
    # Whether TensorFlow's position is known to be one that can be saved.
    self._is_started = False
    self._num_batches = 0
    self._sharding = {'num_shards': layout.num_shards, 'shard_id': layout.shard_id}
    self._identity = {
        'source': cfg.source, 'mixture_or_task_name': provider.name, 'split': cfg.split,
        'task_feature_lengths': dict(sorted(cfg.task_feature_lengths.items())), 'batch_size': cfg.batch_size,
        'seed': cfg.effective_seed, 'shuffle': cfg.shuffle, 'pack': cfg.pack,
        'use_custom_packing_ops': cfg.use_custom_packing_ops, 'use_cached': cfg.use_cached,
        'trim_output_features': cfg.trim_output_features, 'feature_converter': type(converter).__name__,
        'rates': task_rates}

  def sample_truncation(self) -> Truncation | None:
    """See base class; of the first examples in the order of the files.

    Preprocessors that cannot do without lengths make examples of those lengths: then only what seqio itself cuts is
    counted.
    """
    cfg = self._cfg
    if not cfg.trim_output_features:
      return None
    sampled_cfg = dataclasses.replace(cfg, shuffle=False, trim_output_features=False)
    for tell_lengths in (False, True):
      try:
        dataset = task_dataset(self._provider, sampled_cfg, num_epochs=None, tell_lengths=tell_lengths)
        with quiet():
          return sample_truncation(dataset.as_numpy_iterator(), cfg.task_feature_lengths)
      except Exception:  # pylint: disable=broad-exception-caught
        continue  # A sample is not worth a run: preprocessors may raise anything.
    return None

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(self._spec)

  def __next__(self) -> HostBatch:
    batch = self._waiting.popleft() if self._waiting else self._read()
    self._num_batches += 1
    return batch

  def _read(self) -> HostBatch:
    self._is_started = True
    try:
      return {name: value.numpy() for name, value in next(self._iterator).items()}
    except StopIteration:
      if self._num_batches:
        raise DataError(f'{self._description} is exhausted after {self._num_batches} batches: its pipeline ends by '
                        'itself although it is read for any number of epochs. Train for fewer steps, or let it '
                        'repeat.') from None
      raise DataError(f'{self._description} is too small: it has fewer rows than the {self._num_rows} that this '
                      'process takes of each batch, and its pipeline does not repeat.') from None
    except _TRANSIENT_ERRORS as error:
      raise DataUnavailableError(f'{self._description} failed while reading: {summary(error)}') from error
    except tf.errors.OpError as error:
      raise DataError(f'{self._description} failed while reading: {summary(error)}') from error

  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    if not self._is_started:
      # TensorFlow opens some pipelines (a shuffle buffer's) with the first batch: before it, even one that cannot be
      # saved looks as if it could.
      self._waiting.append(self._read())
    files = positions.write_state(self._identity, sharding=self._sharding,
                                  num_batches=self._num_batches - len(undelivered))
    waiting = [*undelivered, *self._waiting]
    if waiting:
      buffer = io.BytesIO()
      np.savez(buffer, **{f'{i}/{name}': rows for i, batch in enumerate(waiting) for name, rows in batch.items()})
      files[_UNDELIVERED_FILE] = buffer.getvalue()
    with tempfile.TemporaryDirectory(prefix='t5x_lite_data_') as folder:
      try:
        with quiet():
          tf.train.Checkpoint(iterator=self._iterator).write(str(pathlib.Path(folder) / _TF_PREFIX))
      except (tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError) as error:
        raise DataError(
            f'{self._description}: its position cannot be written to the temporary folder {folder!r}: {summary(error)} '
            'Free some space there, or set TMPDIR to a folder with more.') from error
      except tf.errors.OpError as error:
        raise DataError(
            f'{self._description} cannot be saved with the model: {summary(error)} Its pipeline holds a step whose '
            'position TensorFlow does not know, such as from_generator, py_function or unseeded random numbers. Build '
            'it from files or tensors, or set SaveCheckpointConfig.save_dataset = False; resumed runs then start the '
            'data afresh.') from error
      files.update({path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()})
    return files

  def set_state(self, state: DataState) -> None:
    saved = positions.read_state(state)
    if saved['identity'].get('source') == 'seqio' and saved['sharding'] != self._sharding:
      self._refuse_sharding(saved['sharding'])
    positions.check_identity(saved['identity'], self._identity)
    waiting: list[HostBatch] = []
    if _UNDELIVERED_FILE in state:
      with np.load(io.BytesIO(state[_UNDELIVERED_FILE])) as arrays:
        for key in arrays.files:
          index, _, name = key.partition('/')
          if int(index) == len(waiting):
            waiting.append({})
          waiting[int(index)][name] = arrays[key]
    with tempfile.TemporaryDirectory(prefix='t5x_lite_data_') as folder:
      for name, content in state.items():
        if name.startswith(_TF_PREFIX):
          (pathlib.Path(folder) / name).write_bytes(content)
      try:
        with quiet():
          tf.train.Checkpoint(iterator=self._iterator).read(str(pathlib.Path(folder) / _TF_PREFIX)).assert_consumed()
      except (tf.errors.OpError, AssertionError) as error:
        if isinstance(error, _TRANSIENT_ERRORS) and not _lacks_part_of_pipeline(error):
          reason = summary(error).partition(' Make sure the dataset definition')[0]
          raise DataUnavailableError(
              f'{self._description} cannot be opened at the saved position now: {reason}') from error
        raise DataError(
            f'{self._description} cannot go on at the saved position ({summary(error)}): the task, its preprocessors, '
            f'or the version of TensorFlow have changed. Undo the change, or {positions.RESTART_REMEDY}.') from error
    self._waiting = collections.deque(waiting)
    self._is_started = True
    self._num_batches = saved['num_batches']

  def _refuse_sharding(self, saved: dict[str, int]) -> None:
    if saved['num_shards'] == self._sharding['num_shards']:
      raise DataError(f"This is the data position of shard {saved['shard_id']} of {saved['num_shards']}, but this "
                      f"process reads shard {self._sharding['shard_id']}: give each process its own.")
    raise DataError(
        f"The data position was saved with {saved['num_shards']} data shards, this run has "
        f"{self._sharding['num_shards']}. seqio pipelines shard by reading and keep their order only at an unchanged "
        'count of processes. Run with '
        f"{saved['num_shards']} shards again; or, next time, read a source whose order does not depend on the count "
        f"(DatasetConfig.source = 'builtin'); or {positions.RESTART_REMEDY}.")

  def close(self) -> None:
    # TensorFlow stops the pipeline's threads when the iterator is collected.
    self._waiting.clear()
    self._iterator = iter(())
