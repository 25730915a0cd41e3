"""T5X's functions that open datasets, and the use of functions with T5X's signatures for a run's data."""

from collections.abc import Callable, Iterator, Mapping
import inspect
from typing import Any, Protocol

import jax

from t5x_lite import checks
from t5x_lite.compat import names as t5x_names
from t5x_lite.data.batches.feature_lengths import with_feature_lengths
from t5x_lite.data.batches.sharded_iterator import as_host_iterator
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import EvalBatches
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.data.iterators import log_seed
from t5x_lite.data.iterators import open_eval_iterators
from t5x_lite.data.iterators import open_train_iterator
from t5x_lite.data.sources.base import get_source
from t5x_lite.partitioning import DataLayout


class GetDatasetCallable(Protocol):
  """Function that opens the training data, with T5X's signature; see `get_dataset`."""

  def __call__(
    self,
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    feature_converter_cls: Callable[..., Any],
    num_epochs: int | None = None,
    continue_from_last_checkpoint: bool = True,
  ) -> Any:
    """Return a `tf.data.Dataset`, an iterator of clu, or a `HostIterator`, of this process's rows."""
    ...


class GetEvalDatasetCallable(Protocol):
  """Function that opens evaluation data, with T5X's signature; see `get_training_eval_datasets`."""

  def __call__(
    self,
    cfg: DatasetConfig,
    shard_id: int,
    num_shards: int,
    eval_steps: int,
    feature_converter_cls: Callable[..., Any],
  ) -> Mapping[str, Any]:
    """Return task name to a `tf.data.Dataset` or another iterable of batches of this process's rows."""
    ...


def get_dataset(
  cfg: DatasetConfig,
  shard_id: int,
  num_shards: int,
  feature_converter_cls: Any,
  num_epochs: int | None = None,
  continue_from_last_checkpoint: bool = False,
) -> Any:
  """Return the batches of a shard, [batch_size / num_shards, ...] by feature name.

  Args:
    cfg: options of the dataset.
    shard_id: index of the shard.
    num_shards: number of shards.
    feature_converter_cls: class of seqio, or the name that a model gives (`FEATURE_CONVERTER`).
    num_epochs: number of times that each example is read; None for `cfg.num_epochs`, whose default is no end. In gin
      files, set `DatasetConfig.num_epochs`.
    continue_from_last_checkpoint: False; `train` restores the position in the data.

  Returns:
    A `tf.data.Dataset` with `cfg.source` 'seqio', otherwise a `HostIterator`.

  Raises:
    ConfigError: an option is not supported, or `cfg.task_feature_lengths` is None.
    DataError: see `open_train_iterator`.
  """
  checks.check(
    'get_dataset',
    {'continue_from_last_checkpoint': continue_from_last_checkpoint},
    continue_from_last_checkpoint=checks.Expectation(
      'False', lambda value: value is False, 'Set RestoreCheckpointConfig.restore_dataset = True.'
    ),
  )
  if num_epochs is not None:
    cfg = cfg.changed(num_epochs=num_epochs)
  cfg.validated().check_lengths_are_given('training')
  log_seed(cfg)
  return get_source(cfg).get_dataset(_layout(cfg, shard_id, num_shards), feature_converter_cls)


def get_dataset_inner(
  cfg: DatasetConfig,
  shard_info: Any,
  feature_converter_cls: Any,
  seed: int | None = None,
  num_epochs: int | None = None,
) -> Any:
  """Return the same as `get_dataset`, for another description of the shard and another seed.

  Args:
    cfg: options of the dataset, without its seed.
    shard_info: object with `index` and `num_shards`, e.g. a `seqio.ShardInfo`.
    feature_converter_cls: see `get_dataset`.
    seed: seed instead of `cfg.seed`; None is 0.
    num_epochs: see `get_dataset`.
  """
  return get_dataset(
    cfg.changed(seed=seed),
    shard_info.index,
    shard_info.num_shards,
    feature_converter_cls,
    num_epochs,
  )


def get_training_eval_datasets(
  cfg: DatasetConfig,
  shard_id: int,
  num_shards: int,
  eval_steps: int,
  feature_converter_cls: Any,
  deterministic: bool = False,
  model_dir: str | None = None,
  start_step: int = 0,
) -> dict[str, EvalBatches]:
  """Return task name to the batches of a shard for teacher-forced evaluation.

  Each example is read once, and the last batch is padded with rows of zeros: see `open_eval_iterators`. T5X repeats the
  examples until there are `eval_steps` full batches, and adds batches of the mixture itself.

  Args:
    cfg: options of the dataset.
    shard_id: index of the shard.
    num_shards: number of shards.
    eval_steps: maximal number of batches per task; None for the entire split.
    feature_converter_cls: see `get_dataset`.
    deterministic: False; the order of the data is always determined by the seed.
    model_dir: None; it belongs to `deterministic`.
    start_step: 0; it belongs to `deterministic`.

  Raises:
    ConfigError, DataError: see `open_eval_iterators`.
  """
  checks.check(
    'get_training_eval_datasets',
    {'deterministic': deterministic, 'model_dir': model_dir, 'start_step': start_step},
    deterministic=checks.Expectation(
      'False',
      lambda value: value is False,
      t5x_names.remedy('t5x.utils', 'get_training_eval_datasets.deterministic=True'),
    ),
    model_dir=checks.Expectation(
      'None',
      lambda value: value is None,
      t5x_names.remedy('t5x.utils', 'get_training_eval_datasets.model_dir=...'),
    ),
    start_step=checks.Expectation(
      '0',
      lambda value: value == 0,
      t5x_names.remedy('t5x.utils', 'get_training_eval_datasets.start_step=1'),
    ),
  )
  return open_eval_iterators(
    cfg, _layout(cfg, shard_id, num_shards), eval_steps, feature_converter=feature_converter_cls
  )


def open_train_data(
  fn: Callable[..., Any], cfg: DatasetConfig, layout: DataLayout, feature_converter: str
) -> HostIterator:
  """Return the training data that a user's function opens.

  Args:
    fn: function with the signature of `open_train_iterator`, or T5X's: a `GetDatasetCallable`.
    cfg: options of the dataset.
    layout: the partitioner's layout for `cfg.batch_size`.
    feature_converter: name that the model gives.
  """
  # The same batches, with the sources' own positions; gin wraps the function.
  if inspect.unwrap(fn) is get_dataset:
    fn = open_train_iterator
  if not _has_shards(fn):
    return checks.call_custom(
      'train',
      'get_dataset_fn',
      'cfg, layout, feature_converter=',
      fn,
      cfg,
      layout,
      feature_converter=feature_converter,
    )
  found = checks.call_custom(
    'train',
    'get_dataset_fn',
    'cfg, shard_id, num_shards, feature_converter_cls',
    fn,
    cfg,
    layout.shard_id,
    layout.num_shards,
    get_source(cfg).get_converter_cls(feature_converter),
  )
  return as_host_iterator(
    found,
    layout,
    {
      'mixture_or_task_name': cfg.name,
      'split': cfg.split,
      'batch_size': cfg.batch_size,
      'seed': cfg.effective_seed,
      'task_feature_lengths': dict(sorted(cfg.known_lengths.items())),
    },
    may_end=True,
  )


def open_eval_data(
  fn: Callable[..., Any],
  cfg: DatasetConfig,
  layout: DataLayout,
  eval_steps: int | None,
  feature_converter: str,
  folder: str | None = None,
) -> dict[str, EvalBatches]:
  """Return task name to the batches that a user's function opens; `cfg` may have no lengths.

  Args:
    fn: function with the signature of `open_eval_iterators`, or T5X's: a `GetEvalDatasetCallable`.
    cfg: options of the dataset.
    layout: the partitioner's layout for `cfg.batch_size`.
    eval_steps: maximal number of batches per task; None for the entire split.
    feature_converter: name that the model gives.
    folder: see `with_feature_lengths`.
  """
  cfg = with_feature_lengths(
    cfg,
    feature_converter=feature_converter,
    folder=folder,
    num_examples=eval_steps and eval_steps * cfg.batch_size,
  )
  if not _has_shards(fn):
    return checks.call_custom(
      'train',
      'train_eval_get_dataset_fn',
      'cfg, layout, eval_steps, feature_converter=',
      fn,
      cfg,
      layout,
      eval_steps,
      feature_converter=feature_converter,
    )
  found = checks.call_custom(
    'train',
    'train_eval_get_dataset_fn',
    'cfg, shard_id, num_shards, eval_steps, feature_converter_cls',
    fn,
    cfg,
    layout.shard_id,
    layout.num_shards,
    eval_steps,
    get_source(cfg).get_converter_cls(feature_converter),
  )
  return {name: _as_eval_batches(name, batches, cfg, layout) for name, batches in found.items()}


def _as_eval_batches(
  name: str, batches: Any, cfg: DatasetConfig, layout: DataLayout
) -> EvalBatches:
  """Return batches that a user's function opened, after counting them.

  Raises:
    ConfigError: they can be read only once.
    DataError: the function returned no batches.
  """
  if isinstance(batches, EvalBatches):
    return batches
  # Counting would use up the batches of an iterator, and evaluations would have none.
  if isinstance(batches, Iterator):
    raise checks.invalid(
      '',
      'train_eval_get_dataset_fn',
      'a function that returns tf.data.Datasets, or iterables that can be read several times',
      batches,
      'Return the dataset instead of its iterator.',
    )
  start_fn = getattr(batches, 'as_numpy_iterator', lambda: iter(batches))
  number = 0
  first = None
  for each in start_fn():
    number += 1
    if first is None:
      first = each
  first = check_not_empty(first, cfg.split, name)
  spec = {}
  for feature, rows in first.items():
    shape = (layout.batch_size, *rows.shape[1:])
    spec[feature] = jax.ShapeDtypeStruct(shape, rows.dtype)
  return EvalBatches(start_fn, spec, number, number * layout.batch_size)


def _has_shards(fn: Callable[..., Any]) -> bool:
  """Return whether a function has T5X's signature: T5X passes all arguments by position, so any names are allowed."""
  parameters = inspect.signature(fn).parameters
  if 'num_shards' in parameters:
    return True
  if 'feature_converter' in parameters:
    return False
  return not any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _layout(cfg: DatasetConfig, shard_id: int, num_shards: int) -> DataLayout:
  checks.check('', {'num_shards': num_shards}, num_shards=checks.number(at_least=1, integer=True))
  checks.check(
    '', {'shard_id': shard_id}, shard_id=checks.number(at_least=0, below=num_shards, integer=True)
  )
  return DataLayout(
    batch_size=cfg.batch_size,
    shard_id=shard_id,
    num_shards=num_shards,
    is_first_host_in_replica_set=True,
  )
