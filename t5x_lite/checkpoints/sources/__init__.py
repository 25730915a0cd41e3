"""Stored states of all supported formats, one class per format.

`open_source` detects the format of a folder. The returned source has the names and shapes of the arrays and reads
values on demand, so that other modules do not depend on formats.
"""

from t5x_lite.checkpoints.sources.adapter import AdapterSource
from t5x_lite.checkpoints.sources.average import AverageSource
from t5x_lite.checkpoints.sources.average import has_param_average
from t5x_lite.checkpoints.sources.base import StateSource
from t5x_lite.checkpoints.sources.base import layout_of
from t5x_lite.checkpoints.sources.base_identity import identify as identify_base
from t5x_lite.checkpoints.sources.base_identity import recorded_path
from t5x_lite.checkpoints.sources.detect import FORMATS
from t5x_lite.checkpoints.sources.detect import check_base
from t5x_lite.checkpoints.sources.detect import check_exists
from t5x_lite.checkpoints.sources.detect import check_readable
from t5x_lite.checkpoints.sources.detect import detect_format
from t5x_lite.checkpoints.sources.detect import folder_of
from t5x_lite.checkpoints.sources.detect import is_adapter
from t5x_lite.checkpoints.sources.detect import open_peft
from t5x_lite.checkpoints.sources.detect import open_source
from t5x_lite.checkpoints.sources.detect import recorded_base
from t5x_lite.checkpoints.sources.detect import register_state_source
from t5x_lite.checkpoints.sources.detect import source_class
from t5x_lite.checkpoints.sources.hugging_face import HuggingFaceSource
from t5x_lite.checkpoints.sources.merged import MergedSource
from t5x_lite.checkpoints.sources.orbax import OrbaxSource
from t5x_lite.checkpoints.sources.orbax import OwnSource
from t5x_lite.checkpoints.sources.t5x_native import T5xNativeSource
from t5x_lite.checkpoints.sources.t5x_native import T5xNativeWriter

__all__ = (
  'AdapterSource',
  'AverageSource',
  'FORMATS',
  'HuggingFaceSource',
  'MergedSource',
  'OrbaxSource',
  'OwnSource',
  'StateSource',
  'T5xNativeSource',
  'T5xNativeWriter',
  'check_base',
  'check_exists',
  'check_readable',
  'detect_format',
  'folder_of',
  'has_param_average',
  'identify_base',
  'is_adapter',
  'layout_of',
  'open_peft',
  'open_source',
  'recorded_base',
  'recorded_path',
  'register_state_source',
  'source_class',
)
