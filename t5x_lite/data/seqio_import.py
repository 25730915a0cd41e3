"""The one place where seqio and TensorFlow are imported: quietly, on the CPU, and with a clear message where they lack.

The import costs some ten CPU-seconds, so the modules that use this one are imported only when a run reads seqio data.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator

from absl import logging

from t5x_lite.errors import ConfigError, install_command

# TensorFlow's C++ side reads these once, when it is loaded; what a user has set stays.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# Announces itself on stderr; it speeds up matrix products, of which an input pipeline has none.
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Holds back third-party warnings and log lines below errors; exceptions pass."""
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
        f"DatasetConfig.source is 'seqio', but seqio or TensorFlow cannot be imported ({error}). Set "
        "--gin.DATA_SOURCE=builtin for the embedded tasks and those of data.text_task, which need neither, or install "
        f"both with `{install_command('seqio')}`."
    ) from error

try:
  # TensorFlow only reads data here: it must not take the accelerators' memory from JAX.
  tf.config.set_visible_devices([], 'GPU')
except RuntimeError:
  # The user's own code has started TensorFlow already, with devices of its choice.
  logging.warning('TensorFlow was in use before its devices could be hidden; it may hold accelerator memory.')


def summary(error: Exception) -> str:
  """Returns the first line of TensorFlow's message without names of graph nodes; the rest stays in the exception."""
  message = error.message if isinstance(error, tf.errors.OpError) else str(error)
  return re.sub(r'\{\{.*?\}\}\s*', '', message).strip().partition('\n')[0]
