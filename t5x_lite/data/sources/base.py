"""Interface of data sources, and the registry for `DatasetConfig.source`."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, TypeVar

from t5x_lite import checks
from t5x_lite.data.interfaces import EvalBatches
from t5x_lite.data.interfaces import EvalTask
from t5x_lite.data.interfaces import ExampleSource
from t5x_lite.data.interfaces import HostIterator
from t5x_lite.data.interfaces import SplitLengths
from t5x_lite.errors import ConfigError
from t5x_lite.lazy_names import LazyClasses

# Options of `DatasetConfig` that only some sources support, and the remedy if another source is used.
SPECIAL_OPTIONS = {
  'use_cached': 'Set use_cached = False',
  'use_custom_packing_ops': 'Set use_custom_packing_ops = False',
  'num_prefetch_threads': 'Omit it',
  'num_workers': 'Omit it',
  'num_epochs': 'Omit it',
  'earlier_sentinels': 'Set earlier_sentinels = False',
}


class DataSource(abc.ABC):
  """Base of sources that read the data of a `DatasetConfig` for all commands.

  An object is made each time that data is opened, so the constructor must be fast. Methods raise ConfigError for
  options that contradict each other or the model, and DataError for data that is unknown or empty. A method that a
  class does not override raises ConfigError: the source does not support that use.

  Attributes:
    options: options of `SPECIAL_OPTIONS` that the source supports.
    supports_seqio_evaluator: whether `inference_evaluator_cls` may be seqio's Evaluator, which reads seqio's tasks.
    cfg: options of the dataset.
  """

  options: ClassVar[tuple[str, ...]] = ()
  supports_seqio_evaluator: ClassVar[bool] = False

  def __init__(self, cfg: Any):
    """Args:
    cfg: a `DatasetConfig`.
    """
    self.cfg = cfg

  @classmethod
  def check(cls, cfg: Any) -> None:
    """Raise ConfigError if the source does not support a `DatasetConfig`; called by its constructor, reads no data."""
    measures = cls.measure is not DataSource.measure
    checks.check(
      'DatasetConfig',
      {'task_feature_lengths': cfg.task_feature_lengths},
      task_feature_lengths=(
        checks.Expectation(
          "a mapping such as {'inputs': 512, 'targets': 114}",
          lambda lengths: measures if lengths is None else bool(lengths),
        )
      ),
    )

  @abc.abstractmethod
  def get_vocabulary(self) -> tuple[Any, Any]:
    """Return the (input, output) vocabularies, which are compared with those of the model."""

  def open_train_iterator(self, layout: Any, feature_converter: Any) -> HostIterator:
    """Return an iterator of this process's rows of each global batch, with a position.

    It is endless, unless the source supports `num_epochs` and it is set.

    Args:
      layout: the partitioner's `DataLayout` for `cfg.batch_size`.
      feature_converter: name of the model's converter (`FEATURE_CONVERTER`), or a converter class of seqio.
    """
    self._raise_unsupported('training', 'open_train_iterator')

  def open_eval_iterators(
    self, layout: Any, eval_steps: int | None, feature_converter: Any
  ) -> dict[str, EvalBatches]:
    """Return task name to the batches for teacher-forced evaluation, with each example of the split once.

    Args:
      layout: see `open_train_iterator`.
      eval_steps: maximal number of batches per task; None for the entire split.
      feature_converter: see `open_train_iterator`.
    """
    self._raise_unsupported('evaluation with given targets', 'open_eval_iterators')

  def open_eval_tasks(
    self, layout: Any, feature_converter: Any, num_examples: int | None
  ) -> list[EvalTask]:
    """Return the tasks with metric functions, for evaluation by decoding; `cfg.pack` is False.

    Args:
      layout: see `open_train_iterator`.
      feature_converter: see `open_train_iterator`.
      num_examples: maximal number of examples of each task, the first ones; None for the entire split.
    """
    self._raise_unsupported('evaluation by decoding', 'open_eval_tasks')

  def open_example_sources(self, feature_converter: Any) -> list[ExampleSource]:
    """Return the examples of each task for `infer`; `cfg.shuffle` and `cfg.pack` are False.

    Args:
      feature_converter: see `open_train_iterator`.
    """
    self._raise_unsupported('inference', 'open_example_sources')

  def measure(
    self, feature_converter: Any, num_examples: int | None, decodes: bool
  ) -> SplitLengths:
    """Return the lengths of the examples of the split, for `task_feature_lengths = None`.

    Args:
      feature_converter: see `open_train_iterator`; the lengths are those of the task features that it uses.
      num_examples: maximal number of examples of each task, the first ones; None for the entire split.
      decodes: whether only tasks with metrics count, if there are any.
    """
    self._raise_unsupported('task_feature_lengths = None', 'measure')

  def get_dataset(self, layout: Any, feature_converter: Any) -> Any:
    """Return what `data.get_dataset` returns; by default the iterator for training."""
    return self.open_train_iterator(layout, feature_converter)

  def get_converter_cls(self, feature_converter: str) -> Any:
    """Return what functions with T5X's signature get as `feature_converter_cls`; by default the converter's name."""
    return feature_converter

  def read_task_texts(self, max_examples: int | None) -> dict[str, list[str]]:
    """Return task feature name to texts, in the order of the split, for `t5x_lite vocab`.

    Args:
      max_examples: maximal number of examples of each task; None for all.
    """
    self._raise_unsupported('reading texts', 'read_task_texts')

  def _raise_unsupported(self, use: str, method: str) -> NoReturn:
    raise ConfigError(
      f'DatasetConfig.source must be a source that supports {use}, got {self.cfg.source!r}. Choose '
      f'another one, or implement {type(self).__name__}.{method}.'
    )


BUILT_IN = {
  'seqio': 't5x_lite.data.sources.seqio.SeqioSource',
  'builtin': 't5x_lite.data.sources.table.BuiltinSource',
  'grain': 't5x_lite.data.sources.table.GrainSource',
  'synthetic': 't5x_lite.data.sources.table.RandomTableSource',
}
_SOURCES: LazyClasses[type[DataSource]] = LazyClasses(BUILT_IN)
_Source = TypeVar('_Source', bound=type[DataSource])


def register_source(name: str) -> Callable[[_Source], _Source]:
  """Return a decorator that registers a class for `DatasetConfig.source = name`.

  A class of the same name and module replaces the previous one, e.g. when a cell of a notebook is run again.

  Raises:
    ConfigError: the name is not a text or is taken, or the class is not a subclass of `DataSource`.
  """

  def register(cls: _Source) -> _Source:
    _SOURCES.register('register_source', name, cls, DataSource)
    return cls

  return register


def source_names() -> list[str]:
  """Return the registered names."""
  return list(_SOURCES)


def check_source(cfg: Any) -> None:
  """Raise if the source of a `DatasetConfig` is unknown or does not support its options.

  Raises:
    ConfigError: the source is unknown, or does not support an option.
  """
  checks.check(
    'DatasetConfig',
    {'source': cfg.source},
    source=checks.one_of(
      _SOURCES, 'A custom source needs the module that registers it (DatasetConfig.module).'
    ),
  )
  cls = _SOURCES[cfg.source]
  cls.check(cfg)
  for option, remedy in SPECIAL_OPTIONS.items():
    if getattr(cfg, option) and option not in cls.options:
      having = ' or '.join(repr(name) for name in _SOURCES if option in _SOURCES[name].options)
      raise checks.invalid(
        'DatasetConfig',
        option,
        f'unset with source = {cfg.source!r}',
        getattr(cfg, option),
        f'{remedy}. It works with source = {having} only.',
      )


def supports_option(cfg: Any, option: str) -> bool:
  """Return True if the source of a `DatasetConfig` supports an option of `SPECIAL_OPTIONS`."""
  return option in _SOURCES[cfg.source].options


def get_source(cfg: Any) -> DataSource:
  """Return the source of a `DatasetConfig`, which is validated."""
  return _SOURCES[cfg.validated().source](cfg)
