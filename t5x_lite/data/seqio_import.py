"""Import of seqio and TensorFlow, without log lines, for the CPU; no other module imports them.

The import takes about ten CPU-seconds, so modules that use this one are imported only when a run reads seqio data.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

from absl import logging

from t5x_lite.errors import ConfigError, DataError, install_command

# TensorFlow's C++ library reads these variables once, when it is loaded; values set by the user are kept.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# oneDNN writes to stderr and speeds up only matrix products, which an input pipeline does not have.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Suppress third-party warnings and log lines below errors."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      yield
  finally:
    logging.set_verbosity(verbosity)


with quiet():
  try:
    import seqio as seqio
    import tensorflow as tf
  except ImportError as error:
    raise ConfigError(
        f"DatasetConfig.source is 'seqio', but seqio or TensorFlow cannot be imported ({error}). Install both with "
        f"`{install_command('seqio')}`, or set --gin.DATA_SOURCE=builtin for the embedded tasks and those of "
        'data.text_task.'
    ) from error

try:
  # TensorFlow only reads data and must not allocate memory of accelerators.
  tf.config.set_visible_devices([], 'GPU')
except RuntimeError:
  # Custom code has started TensorFlow before.
  logging.warning('TensorFlow was in use before its devices could be hidden; it may hold accelerator memory.')


def summary(error: Exception) -> str:
  """Return the first line of TensorFlow's message, without names of graph nodes."""
  message = error.message if isinstance(error, tf.errors.OpError) else str(error)
  return re.sub(r'\{\{.*?\}\}\s*', '', message).strip().partition('\n')[0]


@contextlib.contextmanager
def reading(cfg: Any, task: Any, what: str = '') -> Iterator[None]:
  """Read a split without log lines, and raise DataError instead of errors of TensorFlow.

  Args:
    cfg: `DatasetConfig`, for messages.
    task: Task or Mixture, for messages.
    what: part of the split, for messages.

  Raises:
    DataError: TensorFlow failed; the message has the split and TensorFlow's message.
  """
  try:
    with quiet():
      yield
  except tf.errors.OpError as error:
    raise DataError(f'The split {cfg.split!r} of {task.name!r} failed while reading{what}: {summary(error)}') from error


def check_not_empty(found: Any, cfg: Any, task: Any, where: str = '') -> None:
  """Raise DataError if a split gave no example.

  Args:
    found: examples; empty or None without an example.
    cfg: `DatasetConfig`, for messages.
    task: Task, for messages.
    where: data shard, for messages.
  """
  if not found:
    raise DataError(f'The split {cfg.split!r} of {task.name!r} is empty: it gave no example{where}. Check its files, '
                    'the filters of its preprocessors, and the number of processes.')
