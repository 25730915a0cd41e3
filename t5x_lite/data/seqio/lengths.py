"""Lengths of the examples of seqio Tasks, as seqio's Evaluator finds them for `sequence_length=None`."""

from collections.abc import Iterator
import contextlib
import functools
import hashlib
import inspect
import os
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data.builtin_tasks import check_not_empty
from t5x_lite.data.config import DatasetConfig
from t5x_lite.data.interfaces import SplitLengths
from t5x_lite.data.seqio import features as seqio_features
from t5x_lite.data.seqio.packages import explained
from t5x_lite.data.seqio.packages import numpy_elements
from t5x_lite.data.seqio.packages import quiet
from t5x_lite.data.seqio.packages import reading
from t5x_lite.data.seqio.packages import tf
from t5x_lite.data.seqio.source import task_dataset
from t5x_lite.errors import ConfigError

# Largest number of files of a split whose lengths are kept.
_MAX_FILES = 64


def measure(
  cfg: DatasetConfig, feature_converter: Any, num_examples: int | None, decodes: bool
) -> SplitLengths:
  """Return the lengths of the examples; see `DataSource.measure`.

  Raises:
    ConfigError: a preprocessor needs the lengths.
    DataError: the task or split is unknown, or the split is empty.
  """
  provider = seqio_features.get_provider(cfg)
  seqio_features.check_split(provider, cfg.split)
  tasks = seqio_features.subtasks_with_split(provider, cfg.split)
  with quiet():
    tasks = [task for task in tasks if task.metric_objs or not decodes] or tasks
  for task in tasks:
    _check_needs_no_lengths(task)
  converter = seqio_features.get_converter(cfg, feature_converter, provider)
  dims = {
    name: getattr(converter.TASK_FEATURES.get(name), 'sequence_dim', 0)
    for name in seqio_features.features_of(converter, provider)
  }

  def measured() -> Iterator[dict[str, int]]:
    for task in tasks:
      dataset = _dataset(task, cfg)
      with reading(cfg, task):
        if num_examples is not None:
          dataset = dataset.take(num_examples)
        for example in numpy_elements(dataset):
          yield {name: np.shape(example[name])[dim] for name, dim in dims.items()}

  content = {task.name: _content(task, cfg) for task in tasks}
  # Without files, e.g. of a FunctionDataSource, other examples may have the same count and the same first one.
  is_known = all(0 < len(each['files']) <= _MAX_FILES for each in content.values())
  return SplitLengths(examples=measured(), identity={'content': content} if is_known else None)


def _dataset(task: Any, cfg: DatasetConfig) -> tf.data.Dataset:
  """Return the examples of one epoch, made without lengths."""
  with explained(
    f'The preprocessors of {task.name!r} failed with sequence_length=None',
    Exception,
    error_class=ConfigError,
    remedy='. Set TASK_FEATURE_LENGTHS if they need the lengths.',
  ):
    return task_dataset(task, cfg, num_epochs=1, tell_lengths=False)


def _check_needs_no_lengths(task: Any) -> None:
  for preprocessor in task.preprocessors:
    parameter = inspect.signature(preprocessor).parameters.get('sequence_length')
    if parameter is not None and parameter.default is inspect.Parameter.empty:
      name = getattr(_function(preprocessor), '__name__', type(preprocessor).__name__)
      raise checks.invalid(
        'DatasetConfig',
        'task_feature_lengths',
        f'a mapping for {task.name!r}, since its preprocessor {name} needs the lengths',
        None,
        'Set TASK_FEATURE_LENGTHS.',
      )


def _function(preprocessor: Any) -> Any:
  if isinstance(preprocessor, functools.partial):
    return preprocessor.func
  return preprocessor


def _content(task: Any, cfg: DatasetConfig) -> dict[str, Any]:
  """Return JSON values that change with the files, the preprocessors or the vocabularies of a task."""
  number = None
  with contextlib.suppress(Exception), quiet():  # A source may know it for other splits only.
    number = task.num_input_examples(cfg.split)
  with quiet():
    vocabularies = {
      name: [type(feature.vocabulary).__name__, feature.vocabulary.vocab_size, feature.add_eos]
      for name, feature in task.output_features.items()
    }
  with reading(cfg, task):
    first = next(numpy_elements(_dataset(task, cfg).take(1)), None)
  first = check_not_empty(first, cfg.split, task.name)
  digest = hashlib.sha256()
  for name in task.output_features:
    digest.update(f'{name} {np.shape(first[name])}'.encode())
    digest.update(np.ascontiguousarray(first[name]).tobytes())
  return {
    'num_input_examples': number,
    'vocabularies': vocabularies,
    'first_example': digest.hexdigest()[:16],
    'files': _stats(_data_files(task, cfg)),
    'code': _stats(_code_files(task)),
  }


def _data_files(task: Any, cfg: DatasetConfig) -> list[str]:
  """Return the files of a split, as far as its source names them."""
  with contextlib.suppress(Exception), quiet():  # A user's source may raise anything.
    if cfg.use_cached:
      names = tf.io.gfile.listdir(task.cache_dir)  # A pattern would misread `[` in the path.
      return sorted(os.path.join(task.cache_dir, name) for name in names if cfg.split in name)
    return list(task.source.list_shards(cfg.split))
  return []


def _code_files(task: Any) -> list[str]:
  """Return the Python files that define the preprocessors."""
  found = set()
  for preprocessor in task.preprocessors:
    function = inspect.unwrap(_function(preprocessor))
    with contextlib.suppress(TypeError):  # A built-in function.
      found.add(inspect.getsourcefile(function if inspect.isfunction(function) else type(function)))
  return sorted(found - {None})


def _stats(paths: list[str]) -> list[list[Any]]:
  """Return [path, bytes, time of the last change] of the files that exist."""
  found: list[list[Any]] = []
  for path in paths[: _MAX_FILES + 1]:
    with contextlib.suppress(tf.errors.OpError):
      stat = tf.io.gfile.stat(path)
      found.append([path, stat.length, stat.mtime_nsec])
  return found
