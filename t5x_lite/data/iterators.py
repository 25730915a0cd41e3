"""Functions that open the data of a `DatasetConfig` with any source, with the checks common to all sources."""

import functools
import logging
from typing import Any

from t5x_lite import checks
from t5x_lite.data.batches.feature_lengths import with_feature_lengths
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import EvalBatches
from t5x_lite.data.interfaces import EvalTask
from t5x_lite.data.interfaces import ExampleSource
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.data.sources.base import DataSource
from t5x_lite.data.sources.base import get_source
from t5x_lite.data.sources.base import supports_option
from t5x_lite.data.vocabularies import check_ids
from t5x_lite.data.vocabularies import describe
from t5x_lite.data.vocabularies import same_vocabulary
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import DataLayout

_logger = logging.getLogger(__name__)


def open_train_iterator(
  cfg: DatasetConfig, layout: DataLayout, *, feature_converter: Any = 'encoder_decoder'
) -> HostIterator:
  """Return an iterator of this process's rows of each global batch, which is endless without `cfg.num_epochs`.

  Args:
    cfg: options of the dataset.
    layout: the partitioner's layout for `cfg.batch_size`.
    feature_converter: name that the model gives (`FEATURE_CONVERTER`), or a converter class of seqio.

  Raises:
    ConfigError: the options contradict each other, the layout or the model's features.
    DataError: the task, mixture or split is unknown, or the split is empty.
  """
  cfg.validated()
  _check_layout(cfg, layout)
  cfg.check_lengths_are_given('training')
  source = _open_source(cfg)
  return _checked(
    source,
    'open_train_iterator',
    source.open_train_iterator(layout, feature_converter),
    HostIterator,
  )


def open_eval_iterators(
  cfg: DatasetConfig,
  layout: DataLayout,
  eval_steps: int | None = None,
  *,
  feature_converter: Any = 'encoder_decoder',
) -> dict[str, EvalBatches]:
  """Return, for each task of a mixture, the batches for teacher-forced evaluation.

  A pass has each example of the split once, in at most `eval_steps` batches; the last batch is padded with rows of
  zeros. Every process reads the entire split and uses its rows, so the result does not depend on the number of
  processes.

  Args:
    cfg: options of the dataset.
    layout: the partitioner's layout for `cfg.batch_size`.
    eval_steps: maximal number of batches per task; None for the entire split.
    feature_converter: see `open_train_iterator`.

  Returns:
    Task name to re-iterable batches.

  Raises:
    ConfigError, DataError: see `open_train_iterator`.
  """
  cfg.validated()
  _check_layout(cfg, layout)
  _check_reads_once(cfg, 'for evaluation')
  checks.check(
    '', {'eval_steps': eval_steps}, eval_steps=checks.number(at_least=1, integer=True).or_none()
  )
  source = _open_source(
    with_feature_lengths(
      cfg,
      feature_converter=feature_converter,
      num_examples=eval_steps and eval_steps * cfg.batch_size,
    )
  )
  return _checked(
    source,
    'open_eval_iterators',
    source.open_eval_iterators(layout, eval_steps, feature_converter),
    EvalBatches,
    dict,
  )


def open_eval_tasks(
  cfg: DatasetConfig,
  layout: DataLayout,
  *,
  feature_converter: Any = 'encoder_decoder',
  num_examples: int | None = None,
) -> list[EvalTask]:
  """Return the tasks with metric functions, for evaluation by decoding each example of the split once.

  Args:
    cfg: options of the dataset; `pack` must be False.
    layout: the partitioner's layout for `cfg.batch_size`.
    feature_converter: see `open_train_iterator`.
    num_examples: maximal number of examples of each task, the first ones; None for the entire split.

  Raises:
    ConfigError, DataError: see `open_train_iterator`; `pack` is True.
  """
  cfg.validated()
  _check_layout(cfg, layout)
  _check_false(cfg, ('pack',), 'for evaluation by decoding')
  _check_reads_once(cfg, 'for evaluation by decoding')
  source = _open_source(
    with_feature_lengths(
      cfg, feature_converter=feature_converter, num_examples=num_examples, decodes=True
    )
  )
  return _checked(
    source,
    'open_eval_tasks',
    source.open_eval_tasks(layout, feature_converter, num_examples),
    EvalTask,
    list,
  )


def open_example_sources(
  cfg: Any, model: Any, *, needs_targets: bool = False
) -> list[ExampleSource]:
  """Return the examples of a task, of each task of a mixture that has the split, or of a file of texts.

  Args:
    cfg: a `TextFileConfig`, or a `DatasetConfig` without `shuffle` and `pack`.
    model: the model, with `FEATURE_CONVERTER` and, for texts, its vocabularies.
    needs_targets: whether targets are required, e.g. for scoring.

  Raises:
    ConfigError: an option is not supported for inference or does not fit the model.
    DataError: the task, mixture or split is unknown, or the split is empty.
  """
  if not isinstance(cfg, DatasetConfig):
    from t5x_lite.data.text.sources import TextSource  # training reads no texts of users

    return [
      TextSource(
        cfg,
        model.FEATURE_CONVERTER,
        model.input_vocabulary,
        model.output_vocabulary,
        needs_targets=needs_targets,
      )
    ]
  cfg.validated()
  _check_false(cfg, ('shuffle', 'pack'), 'for inference')
  _check_reads_once(cfg, 'for inference')
  reader = _open_source(with_feature_lengths(cfg, feature_converter=model.FEATURE_CONVERTER))
  sources = _checked(
    reader,
    'open_example_sources',
    reader.open_example_sources(model.FEATURE_CONVERTER),
    ExampleSource,
    list,
  )
  for source in sources:
    if needs_targets and not source.has_targets:
      raise ConfigError(
        f'Scoring needs targets, and {source.name!r} has none: set '
        'create_task_from_tfexample_file.targets_key, or choose another mode.'
      )
  return sources


def read_task_texts(cfg: DatasetConfig, max_examples: int | None = None) -> dict[str, list[str]]:
  """Return the texts of a task's examples in the order of the split; a mixture gives those of one task after another.

  This is for uses of texts instead of ids, such as training a vocabulary. If a task does not keep texts (span
  corruption), its vocabulary decodes the ids, without sentinels.

  Args:
    cfg: options of the dataset; the source must have texts.
    max_examples: maximal number of examples of each task; None for all.

  Returns:
    Task feature name to texts.

  Raises:
    ConfigError, DataError: see `open_train_iterator`; or the source has no texts.
  """
  cfg.validated().check_lengths_are_given('reading texts')
  return get_source(cfg).read_task_texts(max_examples)


def get_vocabulary(cfg: DatasetConfig) -> tuple[Any, Any]:
  """Return the (input, output) vocabularies of the task or mixture, equal if the task has only targets.

  Raises:
    ConfigError, DataError: the task or mixture is unknown.
  """
  of_inputs, of_targets = get_source(cfg).get_vocabulary()
  return of_inputs, of_targets


def verify_matching_vocabs(cfg: DatasetConfig, model: Any) -> None:
  """Raise if the vocabularies of a model differ from those of its data.

  Args:
    cfg: options of the dataset.
    model: model with `input_vocabulary` and `output_vocabulary`.

  Raises:
    ConfigError: the message has both vocabularies, or the special ids of the data's vocabulary if they are invalid.
  """
  for side, of_data, of_model in zip(
    ('input', 'output'),
    get_vocabulary(cfg),
    (model.input_vocabulary, model.output_vocabulary),
    strict=True,
  ):
    check_ids(f'{side} vocabulary', of_data)
    if not same_vocabulary(of_data, of_model):
      raise ConfigError(
        f'The {side} vocabulary of the model must be that of the data {cfg.name!r}, {describe(of_data)}, got '
        f'{describe(of_model)}. Bind VOCABULARY to the vocabulary of the data, or choose other data.'
      )


def with_earlier_sentinels(cfg: DatasetConfig) -> DatasetConfig:
  """Return `cfg` with `earlier_sentinels`, if its source reads texts by itself; otherwise `cfg`."""
  if not supports_option(cfg, 'earlier_sentinels'):
    return cfg
  return cfg.changed(earlier_sentinels=True)


def log_seed(cfg: DatasetConfig) -> None:
  """Log once that None is the seed 0."""
  if cfg.seed is None:
    _log_seed(cfg.name, cfg.split)


def _open_source(cfg: DatasetConfig) -> DataSource:
  log_seed(cfg)
  return get_source(cfg)


@functools.cache
def _log_seed(name: str, split: str) -> None:
  _logger.info(
    'DatasetConfig.seed of %r, split %r, is None: the seed is 0, so that a run can be repeated (T5X uses '
    'the clock).',
    name,
    split,
  )


def _check_false(cfg: DatasetConfig, options: tuple[str, ...], use: str) -> None:
  checks.check(
    'DatasetConfig',
    {option: getattr(cfg, option) for option in options},
    **dict.fromkeys(options, checks.Expectation(f'False {use}', lambda value: value is False)),
  )


def _check_reads_once(cfg: DatasetConfig, use: str) -> None:
  checks.check(
    'DatasetConfig',
    {'num_epochs': cfg.num_epochs},
    num_epochs=checks.Expectation(
      f'None {use}',
      lambda value: value is None,
      'Each example is read once. In gin, bind it with the scope `train/`.',
    ),
  )


def _checked(
  source: DataSource, method: str, result: Any, cls: type, container: type | None = None
) -> Any:
  """Return what a method of a source returned; raise if it is not a `cls`, or a list or dict of them."""
  if container is None:
    values = [result]
  elif isinstance(result, dict):
    values = list(result.values())
  else:
    values = result
  if (container is not None and not isinstance(result, container)) or not all(
    isinstance(value, cls) for value in values
  ):
    kind = {None: 'a', list: 'a list of', dict: 'a dict from task name to'}[container]
    raise checks.invalid(
      type(source).__name__,
      f'{method}()',
      f'{kind} data.{cls.__name__}',
      result,
      f'See `data.DataSource.{method}`.',
    )
  return result


def _check_layout(cfg: DatasetConfig, layout: DataLayout) -> None:
  if layout.batch_size != cfg.batch_size:
    raise checks.invalid(
      'DatasetConfig',
      'batch_size',
      f'that of the layout, {layout.batch_size}',
      cfg.batch_size,
      'Make the layout with partitioner.get_data_layout(cfg.batch_size).',
    )
