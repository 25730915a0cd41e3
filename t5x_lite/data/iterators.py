"""Open what a `DatasetConfig` describes, whatever its source, and check what is the same for all sources."""

from typing import Any

from t5x_lite import checks
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import EvalBatches, EvalTask, ExampleSource, HostIterator
from t5x_lite.data.sources.base import DataSource, get_source
from t5x_lite.data.vocabularies import same_vocabulary
from t5x_lite.errors import ConfigError
from t5x_lite.partitioning import DataLayout


def open_train_iterator(cfg: DatasetConfig, layout: DataLayout, *,
                        feature_converter: Any = 'encoder_decoder') -> HostIterator:
  """Returns an endless iterator of this process's rows of each global batch.

  Args:
    cfg: what to read.
    layout: the partitioner's layout for `cfg.batch_size`.
    feature_converter: the name that the model gives (`FEATURE_CONVERTER`), or, for seqio, a converter class of seqio.

  Raises:
    ConfigError: the configuration contradicts itself, the layout or the model's features.
    DataError: unknown task, mixture or split, or a split without examples.
  """
  _check_layout(cfg, layout)
  source = get_source(cfg)
  return _checked(source, 'open_train_iterator', source.open_train_iterator(layout, feature_converter), HostIterator)


def open_eval_iterators(cfg: DatasetConfig, layout: DataLayout, eval_steps: int | None = None, *,
                        feature_converter: Any = 'encoder_decoder') -> dict[str, EvalBatches]:
  """Returns, per task, the batches for teacher-forced evaluation.

  A mixture is judged task by task. One pass over the split's examples, each once, at most `eval_steps` batches; the
  last batch is filled up with rows of zeros. Every process reads the whole split and takes its rows, so the result
  does not depend on their number.

  Args:
    cfg: what to read.
    layout: the partitioner's layout for `cfg.batch_size`.
    eval_steps: the most batches per task; None is the whole split.
    feature_converter: see `open_train_iterator`.

  Returns:
    Task name to re-iterable batches.

  Raises:
    ConfigError, DataError: as `open_train_iterator`.
  """
  _check_layout(cfg, layout)
  if eval_steps is not None and eval_steps < 1:
    raise ConfigError(f'eval_steps is {eval_steps}, expected 1 or more, or None for the whole split.')
  source = get_source(cfg)
  return _checked(source, 'open_eval_iterators', source.open_eval_iterators(layout, eval_steps, feature_converter),
                  EvalBatches, dict)


def open_eval_tasks(cfg: DatasetConfig, layout: DataLayout, *, feature_converter: Any = 'encoder_decoder',
                    num_examples: int | None = None) -> list[EvalTask]:
  """Returns the tasks that have metric functions, to be judged by decoding every example of the split once.

  Args:
    cfg: what to read; `pack` must be False.
    layout: the partitioner's layout for `cfg.batch_size`.
    feature_converter: see `open_train_iterator`.
    num_examples: the most examples of each task, the first ones; None is the whole split.

  Raises:
    ConfigError, DataError: as `open_train_iterator`; `pack` is True.
  """
  _check_layout(cfg, layout)
  if cfg.pack:
    raise ConfigError('Evaluation by decoding takes one example per row, but its DatasetConfig has pack = True: set it '
                      'to False.')
  source = get_source(cfg)
  return _checked(source, 'open_eval_tasks', source.open_eval_tasks(layout, feature_converter, num_examples), EvalTask,
                  list)


def open_example_sources(cfg: Any, model: Any, *, needs_targets: bool = False) -> list[ExampleSource]:
  """Returns the examples of a task, of each task of a mixture that has the split, or of a file of texts.

  Args:
    cfg: a `TextFileConfig`, or a `DatasetConfig` that is neither shuffled nor packed.
    model: the model that will read them, with `FEATURE_CONVERTER` and, for texts, its vocabularies.
    needs_targets: whether inference is of no use without targets, as when they are scored.

  Raises:
    ConfigError: options that inference cannot honour, or that do not fit the model.
    DataError: unknown task, mixture or split, or a split without examples.
  """
  if not isinstance(cfg, DatasetConfig):
    from t5x_lite.data.text_sources import TextSource  # training reads no texts of users
    return [TextSource(cfg, model.FEATURE_CONVERTER, model.input_vocabulary, model.output_vocabulary,
                       needs_targets=needs_targets)]
  for option, why in (('shuffle', 'results are written in the order of the source'), ('pack', 'a row is one example')):
    if getattr(cfg, option):
      raise ConfigError(f'DatasetConfig.{option} is True, but in inference {why}: set it to False.')
  reader = get_source(cfg)
  sources = _checked(reader, 'open_example_sources', reader.open_example_sources(model.FEATURE_CONVERTER),
                     ExampleSource, list)
  for source in sources:
    if needs_targets and not source.has_targets:
      raise ConfigError(f'Scoring needs targets, and {source.name!r} has none: set '
                        'create_task_from_tfexample_file.targets_key, or choose another mode.')
  return sources


def read_task_texts(cfg: DatasetConfig, max_examples: int | None = None) -> dict[str, list[str]]:
  """Returns the texts of a task's examples in the order of the split; those of a mixture task by task.

  For what looks at texts rather than ids, such as the check of a vocabulary that the task does not have yet. A task
  that keeps no text (span corruption makes its examples out of ids) gives what its vocabulary decodes from the ids, in
  which sentinels leave no trace.

  Args:
    cfg: what to read, with a source that has texts.
    max_examples: how many of each task; None for all.

  Returns:
    Task feature name to texts.

  Raises:
    ConfigError, DataError: as `open_train_iterator`; or the source has no texts.
  """
  return get_source(cfg).read_task_texts(max_examples)


def get_vocabulary(cfg: DatasetConfig) -> tuple[Any, Any]:
  """Returns the (input, output) vocabularies of the task or mixture; they are one where the task has only targets.

  Raises:
    ConfigError, DataError: unknown task or mixture.
  """
  source = get_source(cfg)
  vocabularies = source.get_vocabulary()
  if not isinstance(vocabularies, (tuple, list)) or len(vocabularies) != 2:
    raise checks.invalid(type(source).__name__, 'get_vocabulary()', 'a pair of vocabularies, of inputs and targets',
                         vocabularies, 'Return the vocabulary twice if it is the same.')
  return tuple(vocabularies)


def verify_matching_vocabs(cfg: DatasetConfig, model: Any) -> None:
  """Refuses a model whose vocabularies are not those of its data.

  Args:
    cfg: the data.
    model: has `input_vocabulary` and `output_vocabulary`.

  Raises:
    ConfigError: naming both.
  """
  for side, of_data, of_model in zip(('input', 'output'), get_vocabulary(cfg),
                                     (model.input_vocabulary, model.output_vocabulary), strict=True):
    if not same_vocabulary(of_data, of_model):
      raise ConfigError(f'The {side} vocabulary of the data {cfg.name!r} is {of_data}, the model has {of_model}: bind '
                        "the model's vocabulary (VOCABULARY) to that of the data, or choose other data.")


def _checked(source: DataSource, method: str, result: Any, cls: type, container: type | None = None) -> Any:
  """Return what a method of a source returned; raise if it is not a `cls`, or a list or dict of them."""
  values = [result] if container is None else list(result.values()) if isinstance(result, dict) else result
  if (container is not None and not isinstance(result, container)) or not all(
      isinstance(value, cls) for value in values):
    kind = {None: 'a', list: 'a list of', dict: 'a dict from task name to'}[container]
    raise checks.invalid(type(source).__name__, f'{method}()', f'{kind} data.{cls.__name__}', result,
                         f'See `data.DataSource.{method}`.')
  return result


def _check_layout(cfg: DatasetConfig, layout: DataLayout) -> None:
  if layout.batch_size != cfg.batch_size:
    raise ConfigError(f'DatasetConfig.batch_size is {cfg.batch_size}, but the layout is for batches of '
                      f'{layout.batch_size}: make it with partitioner.get_data_layout(cfg.batch_size).')
