"""Data of a seqio Task or Mixture: its `tf.data.Dataset`, and the iterator for training.

seqio shards the data: process i of n reads the i-th part of the files or examples, so the order depends on n.
"""

import functools
import logging
from typing import Any

from t5x_lite.data.batches import positions
from t5x_lite.data.batches.truncation import Truncation
from t5x_lite.data.batches.truncation import sample_truncation
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.seqio import features as seqio_features
from t5x_lite.data.seqio.packages import explained
from t5x_lite.data.seqio.packages import numpy_elements
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import reading
from t5x_lite.data.seqio.packages import seqio
from t5x_lite.data.seqio.packages import tf
from t5x_lite.data.seqio.tf_data import TfDatasetIterator
from t5x_lite.errors import ConfigError

_logger = logging.getLogger(__name__)


@functools.cache
def _warn_of_no_cache(name: str) -> None:
  _logger.warning(
    'use_cached has no effect on the task %r, which has no CacheDatasetPlaceholder: its examples are '
    'computed.',
    name,
  )


def task_dataset(
  provider: Any,
  cfg: DatasetConfig,
  *,
  num_epochs: int | None,
  shard_info: Any = None,
  tell_lengths: bool = True,
) -> tf.data.Dataset:
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
  for task in seqio_features.subtasks_with_split(provider, cfg.split) if cfg.use_cached else ():
    if not task.supports_caching:
      _warn_of_no_cache(task.name)
  failure = f'seqio cannot read the split {cfg.split!r} of {provider.name!r}'
  if cfg.use_cached:
    remedy = (
      ' Set --seqio_additional_cache_dirs to the folder with the caches, or USE_CACHED_TASKS=False to compute '
      'the examples.'
    )
  else:
    remedy = ''
  lengths = None
  if tell_lengths:
    lengths = dict(cfg.known_lengths)
  with explained(failure, ValueError, AssertionError, OSError, remedy=remedy):
    dataset = provider.get_dataset(
      sequence_length=lengths,
      split=cfg.split,
      use_cached=cfg.use_cached,
      shuffle=cfg.shuffle,
      seed=cfg.effective_seed,
      shard_info=shard_info,
      num_epochs=num_epochs,
      trim_output_features=cfg.trim_output_features,
      # tf.data would write a memory cache into every checkpoint.
      try_in_mem_cache=False,
    )
  options = tf.data.Options()
  options.deterministic = True
  return dataset.with_options(options)


def _check_tasks(provider: Any, cfg: DatasetConfig, shard_info: Any) -> None:
  """Read one example of each task, since a task whose preprocessors drop all examples would be read forever.

  Raises:
    DataError: a task gives no example in one epoch.
  """
  if shard_info:
    where = f' to data shard {shard_info.index} of {shard_info.num_shards}'
  else:
    where = ''
  for task in seqio_features.subtasks_with_split(provider, cfg.split):
    dataset = task_dataset(task, cfg.changed(shuffle=False), num_epochs=1, shard_info=shard_info)
    with reading(cfg, task):
      check_not_empty(next(iter(dataset.take(1)), None), cfg.split, task.name, where)


def convert(
  converter: Any, dataset: tf.data.Dataset, cfg: DatasetConfig, provider: Any
) -> tf.data.Dataset:
  """Return the dataset of model features.

  Raises:
    ConfigError: the converter does not accept the dataset.
  """
  with explained(
    f'{type(converter).__name__} cannot convert {provider.name!r}',
    ValueError,
    error_class=ConfigError,
  ):
    return converter(dataset, dict(cfg.known_lengths))


def open_dataset(
  cfg: DatasetConfig, layout: Any, feature_converter: Any
) -> tuple[tf.data.Dataset, Any, Any]:
  """Return (dataset of this process's rows of each batch, Task or Mixture, converter).

  Args:
    cfg: options of the dataset, with source 'seqio'.
    layout: the partitioner's `DataLayout`.
    feature_converter: name of a converter, or a converter class of seqio.

  Raises:
    ConfigError, DataError: see `iterators.open_train_iterator`.
  """
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  converter = seqio_features.get_converter(cfg, feature_converter, provider)
  seqio_features.rates(provider)
  own = positions.shard_rows(layout)
  if layout.num_shards > 1:
    shard_info = seqio.ShardInfo(index=layout.shard_id, num_shards=layout.num_shards)
  else:
    shard_info = None
  _check_tasks(provider, cfg, shard_info)
  dataset = task_dataset(provider, cfg, num_epochs=cfg.num_epochs, shard_info=shard_info)
  rows = convert(converter, dataset, cfg, provider).batch(own.stop - own.start, drop_remainder=True)
  return rows, provider, converter


class SeqioIterator(TfDatasetIterator):
  """Iterator of the batches of a seqio Task or Mixture, of this process's shard."""

  def __init__(self, cfg: DatasetConfig, layout: Any, feature_converter: Any):
    """See `open_dataset`."""
    dataset, provider, converter = open_dataset(cfg, layout, feature_converter)
    super().__init__(
      dataset,
      layout,
      f'The split {cfg.split!r} of {provider.name!r}',
      {
        'source': cfg.source,
        'mixture_or_task_name': provider.name,
        'split': cfg.split,
        'task_feature_lengths': dict(sorted(cfg.known_lengths.items())),
        'batch_size': cfg.batch_size,
        'seed': cfg.effective_seed,
        'shuffle': cfg.shuffle,
        'pack': cfg.pack,
        'use_custom_packing_ops': cfg.use_custom_packing_ops,
        'use_cached': cfg.use_cached,
        'trim_output_features': cfg.trim_output_features,
        'feature_converter': type(converter).__name__,
        'rates': seqio_features.rates(provider),
        # TensorFlow reads ahead, so its position may already contain the end of the data.
        'num_epochs': cfg.num_epochs,
      },
      may_end=cfg.num_epochs is not None,
    )
    self._cfg = cfg
    self._provider = provider

  def sample_truncation(self) -> Truncation | None:
    """See base class; the sample is the first examples in the order of the files.

    If preprocessors need lengths, they make examples of these lengths, and only trimming by seqio itself is counted.
    """
    cfg = self._cfg
    if not cfg.trim_output_features:
      return None
    sampled_cfg = cfg.changed(shuffle=False, trim_output_features=False)
    for tell_lengths in (False, True):
      try:
        dataset = task_dataset(
          self._provider, sampled_cfg, num_epochs=None, tell_lengths=tell_lengths
        )
        with quiet():
          return sample_truncation(numpy_elements(dataset), cfg.known_lengths)
      except Exception:  # pylint: disable=broad-exception-caught
        continue  # preprocessors may raise anything; the run continues without the sample
    return None
