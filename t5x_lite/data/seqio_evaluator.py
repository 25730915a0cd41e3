"""seqio's Evaluator in the place of our own judge: it reads the examples, computes the metrics and calls its loggers.

The model's outputs are computed before and elsewhere; the Evaluator is handed them when it asks.
"""

from collections.abc import Callable, Mapping
import contextlib
import logging
import os
import pathlib
from typing import Any

from absl import logging as absl_logging

from t5x_lite.data import seqio_features
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import EvalTask, note_left_out
from t5x_lite.data.positions import shard_rows
from t5x_lite.data.seqio_evaluation import KINDS, make_eval_task
from t5x_lite.data.seqio_import import quiet, seqio, summary, tf
from t5x_lite.errors import ConfigError, DataError

_logger = logging.getLogger(__name__)


class SeqioEvaluator:
  """An Evaluator of seqio and the tasks that it has read."""

  def __init__(self, evaluator_cls: Callable[..., Any], cfg: DatasetConfig, layout: Any, feature_converter: Any, *,
               log_dir: pathlib.Path | None, writes: bool):
    """Makes the Evaluator, which reads all examples, and its loggers.

    Args:
      evaluator_cls: seqio.Evaluator or a class with its arguments and attributes, possibly with options bound.
      cfg: what to read.
      layout: the partitioner's layout of a batch.
      feature_converter: a name or a converter class of seqio.
      log_dir: folder for the loggers; None for no loggers.
      writes: whether this process writes.

    Raises:
      ConfigError: the configuration is none for seqio's Evaluator.
      DataError: reading fails.
    """
    provider = seqio_features.get_provider(cfg)
    seqio_features.check_split(provider, cfg.split)
    if not isinstance(cfg.mixture_or_task_name, str):
      raise ConfigError(f"seqio's Evaluator finds tasks by their names, but DatasetConfig.mixture_or_task_name is the "
                        f'{type(provider).__name__} {provider.name!r} itself: register it and give its name, or set '
                        'inference_evaluator_cls to None.')
    options: dict[str, Any] = {'shuffle': True} if cfg.shuffle else {}
    self._log_dir = log_dir if writes else None
    if self._log_dir is None:
      options['logger_cls'] = ()
    try:
      with quiet():
        self._evaluator = evaluator_cls(
            mixture_or_task_name=cfg.mixture_or_task_name,
            feature_converter=seqio_features.get_converter(cfg, feature_converter, provider),
            eval_split=cfg.split, use_cached=cfg.use_cached, seed=cfg.effective_seed,
            sequence_length=dict(cfg.task_feature_lengths), log_dir=None if log_dir is None else str(log_dir),
            **options)
    except (ConfigError, DataError):
      raise
    except tf.errors.OpError as error:
      raise DataError(f'The split {cfg.split!r} of {cfg.name!r} failed while reading: {summary(error)}') from error
    except (AssertionError, TypeError, ValueError) as error:
      raise ConfigError(f"seqio's Evaluator refuses {cfg.name!r}: {error}") from error
    if self._evaluator.eval_tasks:  # Without any, the Evaluator makes no loggers.
      self._evaluator._loggers = tuple(map(_LossyLogger, self._evaluator.loggers))  # pylint: disable=protected-access
    self.tasks: list[EvalTask] = []
    own = shard_rows(layout)
    for task in self._evaluator.eval_tasks:
      with quiet():
        examples = list(self._evaluator.cached_task_datasets[task.name].as_numpy_iterator())
        features = self._evaluator.cached_model_datasets[task.name].map(lambda index, row: row)
        rows = list(features.as_numpy_iterator())
      if not rows:
        raise DataError(f'The split {cfg.split!r} of {task.name!r} is empty: it gave no example.')
      self.tasks.append(make_eval_task(task, examples, features, rows, layout, own, cfg))
    judged = {task.name for task in self.tasks}
    note_left_out(self.tasks, [task.name for task in seqio_features.subtasks_with_split(provider, cfg.split)
                               if task.name not in judged])

  def judge(self, step: int, outputs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Computes the metrics and hands them to the loggers.

    Args:
      step: the training step.
      outputs: task name to kind of output to arrays [num_examples, ...]; where more comes with an array, (array, tree
        of arrays).

    Returns:
      Task name to metric name to value.
    """
    if self._log_dir is not None:
      for task in self.tasks:
        # seqio's JSONLogger writes <task>-metrics.jsonl and <task>-<step>.jsonl without making the folder.
        with contextlib.suppress(OSError):  # The logger tells.
          os.makedirs((self._log_dir / f'{task.name}-').parent, exist_ok=True)
    datasets = {id(dataset): name for name, dataset in self._evaluator.cached_model_datasets.items()}

    def model_fn(kind: str) -> Callable[..., Any]:
      def fn(dataset: Any, model_feature_shapes: Any = None) -> Any:
        del model_feature_shapes
        found = outputs[datasets[id(dataset)]][kind]
        if isinstance(found, tuple):
          return list(enumerate(found[0])), _as_lists(found[1])
        return list(enumerate(found))
      return fn

    with quiet(), _LogRelay():
      metrics, _ = self._evaluator.evaluate(
          compute_metrics=True, step=step, model_fns={output: model_fn(kind) for output, kind in KINDS.items()})
      return {name: dict(found) for name, found in metrics.result().items()}


def _as_lists(tree: Any) -> Any:
  """Returns a tree with a list of what belongs to each example in the place of each array."""
  if isinstance(tree, Mapping):
    return {name: _as_lists(branch) for name, branch in tree.items()}
  return type(tree)(map(_as_lists, tree)) if isinstance(tree, tuple) else list(tree)


class _LossyLogger:
  """Logger of seqio whose output is lost, with one warning, while it cannot be written."""

  def __init__(self, logger: Callable[..., None]):
    self._logger = logger
    self._has_failed = False

  def __call__(self, **kwargs: Any) -> None:
    try:
      self._logger(**kwargs)
      self._has_failed = False
    except (OSError, tf.errors.OpError) as error:
      if isinstance(error, tf.errors.InvalidArgumentError):  # A value that the logger cannot take.
        raise
      if not self._has_failed:
        _logger.warning("seqio's %s could not write the results of %s at step %s, which are lost: %s. The run "
                        'continues.', type(self._logger).__name__, kwargs.get('task_name'), kwargs.get('step'),
                        summary(error) if isinstance(error, tf.errors.OpError) else error.strerror or error)
      self._has_failed = True


class _LogRelay(logging.Filter):
  """While entered: hands on what seqio's PyLoggingLogger writes; of the rest that absl logs, only errors show."""

  def filter(self, record: logging.LogRecord) -> bool:
    """See base class."""
    # Where a record comes from is not always known: the logger may be older than absl.
    if str(record.msg).startswith('%s/%s at step %d: '):
      _logger.info('%s', record.getMessage())
      return False
    return record.levelno >= logging.ERROR

  def __enter__(self) -> None:
    self._verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.INFO)
    absl_logging.get_absl_logger().addFilter(self)

  def __exit__(self, *exc_info: object) -> None:
    absl_logging.get_absl_logger().removeFilter(self)
    absl_logging.set_verbosity(self._verbosity)
