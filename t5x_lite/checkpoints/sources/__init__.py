"""Stored states of all supported formats, one class per format.

`open_source` detects the format of a folder. The returned source has the names and shapes of the arrays and reads
values on demand, so that other modules do not depend on formats.
"""

from t5x_lite.checkpoints.sources.average import AverageSource, has_param_average
from t5x_lite.checkpoints.sources.base import StateSource, layout_of
from t5x_lite.checkpoints.sources.detect import (
  FORMATS,
  check_exists,
  check_readable,
  detect_format,
  open_source,
)
from t5x_lite.checkpoints.sources.hugging_face import HuggingFaceSource
from t5x_lite.checkpoints.sources.orbax import OrbaxSource, OwnSource
from t5x_lite.checkpoints.sources.t5x_native import T5xNativeSource, T5xNativeWriter

__all__ = (
  'AverageSource',
  'FORMATS',
  'HuggingFaceSource',
  'OrbaxSource',
  'OwnSource',
  'StateSource',
  'T5xNativeSource',
  'T5xNativeWriter',
  'check_exists',
  'check_readable',
  'detect_format',
  'has_param_average',
  'layout_of',
  'open_source',
)
