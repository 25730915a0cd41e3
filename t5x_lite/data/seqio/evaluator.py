"""seqio's Evaluator instead of ours: it reads the examples, computes the metrics and calls its loggers.

The outputs of the model are computed before and passed to the Evaluator by functions.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import inspect
import logging
import pathlib
import shutil
import tempfile
import threading
from typing import Any
import weakref

from absl import logging as absl_logging

from t5x_lite import checks
from t5x_lite.data.batches.positions import shard_rows
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import EvalTask
from t5x_lite.data.interfaces import warn_of_omitted_tasks
from t5x_lite.data.seqio import features as seqio_features
from t5x_lite.data.seqio.evaluation import KINDS
from t5x_lite.data.seqio.evaluation import make_eval_task
from t5x_lite.data.seqio.packages import explained
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import reading
from t5x_lite.data.seqio.packages import summary
from t5x_lite.data.seqio.packages import tf
from t5x_lite.errors import ConfigError
from t5x_lite.storage import files

# Interval of the lines about reading that takes long.
_SECONDS_PER_LINE = 30.0

_logger = logging.getLogger(__name__)


class SeqioEvaluator:
  """An Evaluator of seqio and its tasks."""

  def __init__(
    self,
    evaluator_cls: Callable[..., Any],
    cfg: DatasetConfig,
    layout: Any,
    feature_converter: Any,
    *,
    log_dir: files.Path | None,
    writes: bool,
  ):
    """Make the Evaluator, which reads all examples, and its loggers.

    Args:
      evaluator_cls: seqio.Evaluator, or a class with its arguments and attributes, possibly with bound options.
      cfg: options of the dataset.
      layout: the partitioner's layout of a batch.
      feature_converter: name of a converter, or a converter class of seqio.
      log_dir: folder of the loggers; None for no loggers.
      writes: whether this process writes files.

    Raises:
      ConfigError: seqio's Evaluator does not support the configuration.
      DataError: reading fails.
    """
    provider = seqio_features.get_provider(cfg)
    seqio_features.check_split(provider, cfg.split)
    checks.check(
      'DatasetConfig',
      {'mixture_or_task_name': cfg.mixture_or_task_name},
      mixture_or_task_name=checks.instance(
        str,
        "a registered name with seqio's Evaluator",
        'Register the Task and give its name, or set inference_evaluator_cls to None.',
      ),
    )
    options: dict[str, Any] = {'shuffle': True} if cfg.shuffle else {}
    cache = inspect.signature(evaluator_cls).parameters.get('use_memory_cache')
    if not cfg.use_memory_cache or (cache is not None and cache.default is inspect.Parameter.empty):
      options['use_memory_cache'] = (
        cfg.use_memory_cache
      )  # otherwise the option of the Evaluator decides
    self._log_dir: pathlib.Path | None = None
    self._remote_dir: files.Path | None = None
    self._uploaded: dict[pathlib.Path, int] = {}  # time of the last change
    if log_dir is None or not writes:
      options['logger_cls'] = ()
    elif files.is_remote(log_dir):  # TensorFlow writes, which has no s3://
      self._remote_dir = log_dir
      self._log_dir = pathlib.Path(tempfile.mkdtemp(prefix='t5x_lite-seqio-'))
      weakref.finalize(self, shutil.rmtree, self._log_dir, ignore_errors=True)
    else:
      self._log_dir = pathlib.Path(log_dir)
    lengths = None
    if cfg.task_feature_lengths is not None:
      lengths = dict(cfg.task_feature_lengths)
    if log_dir is not None:
      options['log_dir'] = str(self._log_dir or log_dir)
    else:
      options['log_dir'] = None
    failure = f"seqio's Evaluator does not accept {cfg.name!r}"
    with (
      explained(failure, AssertionError, TypeError, ValueError, error_class=ConfigError),
      reading(cfg, provider),
      _lines_about_reading(cfg),
    ):
      self._evaluator = evaluator_cls(
        mixture_or_task_name=cfg.mixture_or_task_name,
        feature_converter=seqio_features.get_converter(cfg, feature_converter, provider),
        eval_split=cfg.split,
        use_cached=cfg.use_cached,
        seed=cfg.effective_seed,
        sequence_length=lengths,
        **options,
      )
    if self._evaluator.eval_tasks:  # without tasks, the Evaluator makes no loggers
      self._evaluator._loggers = tuple(map(_LossyLogger, self._evaluator.loggers))  # pylint: disable=protected-access
    if cfg.task_feature_lengths is None and self._evaluator.eval_tasks:
      _logger.info(
        "task_feature_lengths of %r, split %r, by seqio's Evaluator: its longest examples make rows of %s.",
        cfg.name,
        cfg.split,
        self._evaluator.model_feature_shapes,
      )
    self.tasks: list[EvalTask] = []
    own = shard_rows(layout)
    for task in self._evaluator.eval_tasks:
      with quiet():
        examples = list(self._evaluator.cached_task_datasets[task.name].as_numpy_iterator())
        features = self._evaluator.cached_model_datasets[task.name].map(lambda index, row: row)
        rows = list(features.as_numpy_iterator())
      check_not_empty(rows, cfg.split, task.name)
      self.tasks.append(make_eval_task(task, examples, features, rows, layout, own, cfg))
    judged = {task.name for task in self.tasks}
    with_split = seqio_features.subtasks_with_split(provider, cfg.split)
    warn_of_omitted_tasks(self.tasks, [task.name for task in with_split if task.name not in judged])

  def judge(self, step: int, outputs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compute the metrics and pass them to the loggers.

    Args:
      step: the training step.
      outputs: task name to kind of output to an array [num_examples, ...], or (array, tree of further arrays).

    Returns:
      Task name to metric name to value.
    """
    if self._log_dir is not None:
      for task in self.tasks:
        # seqio's JSONLogger writes <task>-metrics.jsonl and <task>-<step>.jsonl without creating the folder.
        with contextlib.suppress(OSError):  # the logger reports the error
          files.make_folder_of(self._log_dir / f'{task.name}-')
        for name in (f'{task.name}-metrics.jsonl', f'{task.name}-{step}.jsonl'):
          # The logger would write to the target of a link.
          files.check_regular(self._log_dir / name)
    datasets = {
      id(dataset): name for name, dataset in self._evaluator.cached_model_datasets.items()
    }

    def model_fn(kind: str) -> Callable[..., Any]:
      def fn(dataset: Any, model_feature_shapes: Any = None) -> Any:
        del model_feature_shapes
        found = outputs[datasets[id(dataset)]][kind]
        if isinstance(found, tuple):
          return list(enumerate(found[0])), _as_lists(found[1])
        return list(enumerate(found))

      return fn

    can_write = self._download(step)
    with quiet(), _LogRelay():
      metrics, _ = self._evaluator.evaluate(
        compute_metrics=True,
        step=step,
        model_fns={output: model_fn(kind) for output, kind in KINDS.items()},
      )
      found = {name: dict(found) for name, found in metrics.result().items()}
    if can_write:
      self._upload(step)
    return found

  def _download(self, step: int) -> bool:
    """Copy the files to which JSONLogger adds lines from a store; return False if that fails, with a warning."""
    if self._remote_dir is None or self._log_dir is None:
      return False
    try:
      for task in self.tasks:
        name = f'{task.name}-metrics.jsonl'
        path = self._log_dir / name
        files.remove(path)
        with contextlib.suppress(FileNotFoundError):
          path.write_bytes((self._remote_dir / name).read_bytes())
    except OSError as error:
      _warn_of_loss(step, error)
      return False
    return True

  def _upload(self, step: int) -> None:
    """Copy the files of the loggers to a store."""
    assert self._log_dir is not None  # `_download` returned True.
    assert self._remote_dir is not None
    try:
      for path in self._log_dir.rglob('*'):
        changed = path.stat().st_mtime_ns
        if path.is_file() and self._uploaded.get(path) != changed:
          name = path.relative_to(self._log_dir).as_posix()
          files.write(self._remote_dir / name, path.read_bytes())
          self._uploaded[path] = changed
    except OSError as error:
      _warn_of_loss(step, error)


@contextlib.contextmanager
def _lines_about_reading(cfg: DatasetConfig) -> Iterator[None]:
  """Log lines while seqio's Evaluator reads all examples, which it does silently."""
  has_read = threading.Event()

  def log() -> None:
    seconds = 0.0
    while not has_read.wait(_SECONDS_PER_LINE):
      seconds += _SECONDS_PER_LINE
      _logger.info(
        "seqio's Evaluator has been reading the split %r of %r for %.0f s.",
        cfg.split,
        cfg.name,
        seconds,
      )

  thread = threading.Thread(target=log, name='t5x_lite-data-lines', daemon=True)
  thread.start()
  try:
    yield
  finally:
    has_read.set()
    thread.join()


def _warn_of_loss(step: int, error: OSError) -> None:
  _logger.warning(
    "The results of seqio's loggers at step %s could not be written and are lost: %s. The run continues.",
    step,
    error,
  )


def _as_lists(tree: Any) -> Any:
  """Return a tree with a list of the values of each example instead of each array [num_examples, ...]."""
  if isinstance(tree, Mapping):
    return {name: _as_lists(branch) for name, branch in tree.items()}
  if isinstance(tree, tuple):
    return type(tree)(map(_as_lists, tree))
  return list(tree)


class _LossyLogger:
  """Logger of seqio that drops its output, with one warning, while it cannot be written."""

  def __init__(self, logger: Callable[..., None]):
    self._logger = logger
    self._has_failed = False

  def __call__(self, **kwargs: Any) -> None:
    try:
      self._logger(**kwargs)
      self._has_failed = False
    except (OSError, tf.errors.OpError) as error:
      if isinstance(error, tf.errors.InvalidArgumentError):  # the logger does not support a value
        raise
      if isinstance(error, tf.errors.OpError):
        reason = summary(error)
      else:
        reason = error.strerror or error
      if not self._has_failed:
        _logger.warning(
          "seqio's %s could not write the results of %s at step %s, which are lost: %s. The run "
          'continues.',
          type(self._logger).__name__,
          kwargs.get('task_name'),
          kwargs.get('step'),
          reason,
        )
      self._has_failed = True


class _LogRelay(logging.Filter):
  """Context manager that forwards records of seqio's PyLoggingLogger, and only errors among absl's other records."""

  def filter(self, record: logging.LogRecord) -> bool:
    """See base class."""
    # The origin of a record is not always known: the logger may be older than absl.
    if str(record.msg).startswith('%s/%s at step %d: '):
      _logger.info('%s', record.getMessage())
      return False
    return record.levelno >= logging.ERROR

  def __enter__(self) -> None:
    self._absl = absl_logging.get_absl_logger()
    self._level = self._absl.level
    self._absl.setLevel('INFO')
    self._absl.addFilter(self)

  def __exit__(self, *exc_info: object) -> None:
    self._absl.removeFilter(self)
    self._absl.setLevel(self._level)
