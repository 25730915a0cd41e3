"""Import of seqio and TensorFlow, without log lines, for the CPU; no other module imports them.

The import takes about ten CPU-seconds, so modules that use this one are imported only when a run reads seqio data.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
import re
from typing import Any
import warnings

from absl import logging

from t5x_lite.configuration import module_imports
from t5x_lite.errors import DataError, T5xLiteError, needs_packages
from t5x_lite.storage import files
from t5x_lite.storage import plain_paths

# TensorFlow's C++ library reads these variables once, when it is loaded; values set by the user are kept.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# oneDNN writes to stderr and speeds up only matrix products, which an input pipeline does not have.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Suppress third-party warnings and log lines below errors."""
  logger = logging.get_absl_logger()
  level = logger.level
  logger.setLevel('ERROR')
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      yield
  finally:
    logger.setLevel(level)


with (
  quiet(),
  needs_packages(
    "DatasetConfig.source = 'seqio'",
    'seqio and TensorFlow',
    extra='seqio',
    otherwise='set --gin.DATA_SOURCE=builtin for the embedded tasks and those of data.text_task',
  ),
):
  # A task's module may import PyTorch later.
  module_imports.import_triton_first()
  import seqio as seqio
  import tensorflow as tf

try:
  # TensorFlow only reads data and must not allocate memory of accelerators.
  tf.config.set_visible_devices([], 'GPU')
except RuntimeError:
  # Custom code has started TensorFlow before.
  logging.warning(
    'TensorFlow was in use before its devices could be hidden; it may hold accelerator memory.'
  )


def numpy_elements(dataset: 'tf.data.Dataset') -> Iterator[Any]:
  """Return an iterator of a dataset's elements, dicts of NumPy arrays and bytes or tuples of them."""
  return dataset.as_numpy_iterator()


def element_specs(dataset: 'tf.data.Dataset') -> Mapping[str, Any]:
  """Return feature name to `tf.TensorSpec` of a dataset whose elements are dicts."""
  specs: Any = dataset.element_spec  # TensorFlow's annotation allows any structure.
  return specs


def as_text(value: Any) -> Any:
  """Return bytes as a text, and other values unchanged."""
  if isinstance(value, bytes):
    return value.decode('utf-8', errors='replace')
  return value


def dataset_of(columns: Any) -> 'tf.data.Dataset':
  """Return the dataset of the rows of `columns`, feature name to values of all rows."""
  return tf.data.Dataset.from_tensor_slices(columns)


def summary(error: Any) -> str:
  """Return the first line of TensorFlow's message, without names of graph nodes; the last one for code in a graph."""
  if isinstance(error, tf.errors.OpError):
    message = error.message
  else:
    message = str(error)
  if found := re.search(
    r"File system scheme '(\w+)' not implemented(?: \(file: '(.*?)'\))?", message
  ):
    return (
      f'TensorFlow reads gs:// but not {found[1]}:// ({found[2]}). Copy the files to a disk or to gs://, or read '
      'JSON lines with data.file_task'
    )
  first, *others = re.sub(r'\{\{.*?\}\}\s*', '', message).strip().split('\n')
  if others and first == 'in user code:':
    return others[-1].strip()
  return first


@contextlib.contextmanager
def explained(
  failure: str,
  *kinds: type[Exception],
  error_class: type[T5xLiteError] = DataError,
  remedy: str = '',
) -> Iterator[None]:
  """Run without log lines, and raise an error of t5x_lite instead of errors of TensorFlow and seqio.

  Args:
    failure: what failed, for the message.
    *kinds: classes of exceptions in addition to TensorFlow's `OpError`.
    error_class: class of the error.
    remedy: sentence at the end of the message.

  Raises:
    DataError: or `error_class`, with the message of TensorFlow or seqio.
  """
  try:
    with quiet():
      yield
  except T5xLiteError:
    raise
  except (tf.errors.OpError, *kinds) as error:
    raise error_class(f'{failure}: {summary(error) or type(error).__name__}{remedy}') from error


def reading(cfg: Any, task: Any, what: str = '') -> contextlib.AbstractContextManager[None]:
  """Read a split without log lines, and raise DataError instead of errors of TensorFlow.

  Args:
    cfg: `DatasetConfig`, for messages.
    task: Task or Mixture, for messages.
    what: part of the split, for messages.

  Raises:
    DataError: TensorFlow failed; the message has the split and TensorFlow's message.
  """
  return explained(f'The split {cfg.split!r} of {task.name!r} failed while reading{what}')


def use_folders(tfds_data_dir: str, cache_dirs: Sequence[str]) -> None:
  """Set the folder of TensorFlow Datasets for all tasks, and add folders in which cached tasks are searched.

  Args:
    tfds_data_dir: replaces `tfds_data_dir` of every `seqio.TfdsDataSource`; empty for no change.
    cache_dirs: folders with results of seqio's cache job, searched after those that seqio has already.
  """
  if tfds_data_dir:
    seqio.set_tfds_data_dir_override(tfds_data_dir)
  # seqio makes patterns of these paths.
  seqio.add_global_cache_dirs([_plain(folder) for folder in cache_dirs])


def _plain(folder: str) -> str:
  if files.is_remote(folder):
    return folder
  return str(plain_paths.plain_path(folder))
