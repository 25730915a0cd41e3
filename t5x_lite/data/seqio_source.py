"""Iterator over a seqio Task or Mixture, with an exact position.

seqio shards the data: process i of n reads the i-th part of the files or examples, so the order depends on n. The
position is TensorFlow's checkpoint of the iterator (with shuffle buffers, packing, mixture draws and epochs), and the
prefetched batches that were not used.
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
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import DataState, HostBatch, HostIterator
from t5x_lite.data.seqio_import import explained, quiet, reading, seqio, summary, tf
from t5x_lite.data.truncation import Truncation, sample_truncation
from t5x_lite.errors import ConfigError, DataError, DataUnavailableError

_TF_PREFIX = 'tf_iterator'
_UNDELIVERED_FILE = 'undelivered.npz'
# Errors of file systems and networks, after which reading again may succeed. UnknownError includes exceptions of Python
# functions in the pipeline, such as OSError.
_TRANSIENT_ERRORS = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError,
                     tf.errors.NotFoundError, tf.errors.PermissionDeniedError, tf.errors.UnknownError)


def task_dataset(provider: Any, cfg: DatasetConfig, *, num_epochs: int | None,
                 shard_info: Any = None, tell_lengths: bool = True) -> tf.data.Dataset:
  """Return seqio's dataset of task features, in an order that depends only on the seed.

  Args:
    provider: Task or Mixture.
    cfg: options of the dataset.
    num_epochs: number of epochs; None for an endless dataset.
    shard_info: seqio's shard of this process; None for all data.
    tell_lengths: whether seqio passes the feature lengths to preprocessors, which may trim texts to them.

  Raises:
    DataError: seqio cannot make the dataset; the message includes seqio's message.
  """
  failure = f'seqio cannot read the split {cfg.split!r} of {provider.name!r}'
  with explained(failure, ValueError, AssertionError, OSError):
    dataset = provider.get_dataset(
        sequence_length=dict(cfg.task_feature_lengths) if tell_lengths else None, split=cfg.split,
        use_cached=cfg.use_cached, shuffle=cfg.shuffle, seed=cfg.effective_seed, shard_info=shard_info,
        num_epochs=num_epochs, trim_output_features=cfg.trim_output_features,
        # tf.data would write a memory cache into every checkpoint.
        try_in_mem_cache=False)
  options = tf.data.Options()
  options.deterministic = True
  return dataset.with_options(options)


def _check_tasks(provider: Any, cfg: DatasetConfig, shard_info: Any) -> None:
  """Read one example of each task, since a task whose preprocessors drop all examples would be read forever.

  Raises:
    DataError: a task gives no example in one epoch.
  """
  where = f' to data shard {shard_info.index} of {shard_info.num_shards}' if shard_info else ''
  for task in seqio_features.subtasks_with_split(provider, cfg.split):
    dataset = task_dataset(task, dataclasses.replace(cfg, shuffle=False), num_epochs=1, shard_info=shard_info)
    with reading(cfg, task):
      check_not_empty(next(iter(dataset.take(1)), None), cfg.split, task.name, where)


def convert(converter: Any, dataset: tf.data.Dataset, cfg: DatasetConfig, provider: Any) -> tf.data.Dataset:
  """Return the dataset of model features.

  Raises:
    ConfigError: the converter does not accept the dataset.
  """
  with explained(f'{type(converter).__name__} cannot convert {provider.name!r}', ValueError, error_class=ConfigError):
    return converter(dataset, dict(cfg.task_feature_lengths))


def _lacks_part_of_pipeline(error: Exception) -> bool:
  """Return True if a saved position lacks a part of the pipeline; a missing file is a NotFoundError too."""
  return isinstance(error, tf.errors.NotFoundError) and 'from checkpoint: Iterator::' in error.message


class SeqioIterator(HostIterator):
  """Iterator of the batches of a seqio Task or Mixture, of this process's shard."""

  handles_process_count = True

  def __init__(self, cfg: DatasetConfig, layout: Any, feature_converter: Any):
    """Args:
      cfg: options of the dataset, with source 'seqio'.
      layout: the partitioner's `DataLayout`.
      feature_converter: name of a converter, or a converter class of seqio.

    Raises:
      ConfigError, DataError: see `iterators.open_train_iterator`.
    """
    provider = seqio_features.get_provider(cfg)
    seqio_features.check_split(provider, cfg.split)
    converter = seqio_features.get_converter(cfg, feature_converter, provider)
    task_rates = seqio_features.rates(provider)
    own = positions.shard_rows(layout)
    shard_info = seqio.ShardInfo(index=layout.shard_id, num_shards=layout.num_shards) if layout.num_shards > 1 else None
    _check_tasks(provider, cfg, shard_info)
    dataset = task_dataset(provider, cfg, num_epochs=cfg.num_epochs, shard_info=shard_info)
    # Shards may have different numbers of rows.
    self.ends_together = cfg.num_epochs is None or layout.num_shards == 1
    self._cfg, self._provider = cfg, provider
    self._num_rows = own.stop - own.start
    dataset = convert(converter, dataset, cfg, provider).batch(self._num_rows, drop_remainder=True)
    self._description = f'The split {cfg.split!r} of {provider.name!r}'
    self._spec = {name: jax.ShapeDtypeStruct((layout.batch_size, *spec.shape[1:]), spec.dtype.as_numpy_dtype)
                  for name, spec in dataset.element_spec.items()}
    with quiet():
      self._iterator = iter(dataset)
    # Batches before TensorFlow's position: those of a restored state, or one that was read to start the pipeline.
    self._waiting: collections.deque[HostBatch] = collections.deque()
    # Whether the pipeline has started, so that saving its position shows whether that is possible.
    self._is_started = False
    self._num_batches = 0
    self._sharding = {'num_shards': layout.num_shards, 'shard_id': layout.shard_id}
    self._identity = {
        'source': cfg.source, 'mixture_or_task_name': provider.name, 'split': cfg.split,
        'task_feature_lengths': dict(sorted(cfg.task_feature_lengths.items())), 'batch_size': cfg.batch_size,
        'seed': cfg.effective_seed, 'shuffle': cfg.shuffle, 'pack': cfg.pack,
        'use_custom_packing_ops': cfg.use_custom_packing_ops, 'use_cached': cfg.use_cached,
        'trim_output_features': cfg.trim_output_features, 'feature_converter': type(converter).__name__,
        'rates': task_rates,
        # TensorFlow reads ahead, so its position may already contain the end of the data.
        'num_epochs': cfg.num_epochs}

  def sample_truncation(self) -> Truncation | None:
    """See base class; the sample is the first examples in the order of the files.

    If preprocessors need lengths, they make examples of these lengths, and only trimming by seqio itself is counted.
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
        continue  # preprocessors may raise anything; the run continues without the sample
    return None

  @property
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
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
      if self._cfg.num_epochs is not None:
        raise
      raise DataError(f'{self._description} is exhausted after {self._num_batches} batches of {self._num_rows} rows '
                      'per process: its pipeline does not repeat. Train for fewer steps, or let it repeat.') from None
    except tf.errors.OpError as error:
      kind = DataUnavailableError if isinstance(error, _TRANSIENT_ERRORS) else DataError
      raise kind(f'{self._description} failed while reading: {summary(error)}') from error

  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    """See base class."""
    if not self._is_started:
      # TensorFlow starts some pipelines, e.g. with a shuffle buffer, with the first batch; before that, saving does not
      # show whether the position can be saved.
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
      except tf.errors.OpError as error:
        is_disk = isinstance(error, (tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError))
        remedy = (
            f'Free disk space in the temporary folder {folder!r}, or set TMPDIR to another folder.' if is_disk else
            'TensorFlow cannot save the position of from_generator, py_function and unseeded random numbers: build the '
            'pipeline from files or tensors, or set SaveCheckpointConfig.save_dataset = False, so that resumed runs '
            'restart the data.')
        raise DataError(f'{self._description}: the position cannot be saved: {summary(error)} {remedy}') from error
      files.update({path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()})
    return files

  def set_state(self, state: DataState) -> None:
    """See base class."""
    saved = positions.read_state(state)
    if saved['identity'].get('source') == 'seqio' and saved['sharding'] != self._sharding:
      raise self._sharding_error(saved['sharding'])
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
        is_transient = isinstance(error, _TRANSIENT_ERRORS) and not _lacks_part_of_pipeline(error)
        reason = summary(error).partition(' Make sure the dataset definition')[0]
        remedy = '' if is_transient else (
            '. The task, its preprocessors, or the version of TensorFlow have changed: undo the change, or '
            f'{positions.RESTART_REMEDY}.')
        raise (DataUnavailableError if is_transient else DataError)(
            f'{self._description} cannot be opened at the saved position: {reason}{remedy}') from error
    self._waiting = collections.deque(waiting)
    self._is_started = True
    self._num_batches = saved['num_batches']

  def _sharding_error(self, saved: dict[str, int]) -> DataError:
    if saved['num_shards'] == self._sharding['num_shards']:
      return DataError(f"This is the data position of shard {saved['shard_id']} of {saved['num_shards']}, but this "
                       f"process reads shard {self._sharding['shard_id']}: give each process its position.")
    return DataError(
        f"The data position was saved with {saved['num_shards']} data shards, this run has "
        f"{self._sharding['num_shards']}, and the order of seqio pipelines depends on this number. Run with "
        f"{saved['num_shards']} shards again, or {positions.RESTART_REMEDY}; with DatasetConfig.source = 'builtin' the "
        'order does not depend on the number.')

  def close(self) -> None:
    """See base class."""
    # TensorFlow stops the pipeline's threads when the iterator is collected.
    self._waiting.clear()
    self._iterator = iter(())
