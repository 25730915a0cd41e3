"""Stored states in every form that can be read: one class for each, found by what lies in a folder.

`open_source` is the way in. What it returns says the names and shapes of the arrays at once, and reads values when they
are asked for, so that checkpoints, conversion and inspection need not know of forms.
"""

from t5x_lite.checkpoints.sources.base import StateSource, layout_of
from t5x_lite.checkpoints.sources.detect import FORMATS, check_exists, check_readable, detect_format, open_source
from t5x_lite.checkpoints.sources.hugging_face import HuggingFaceSource
from t5x_lite.checkpoints.sources.orbax import OrbaxSource, OwnSource
from t5x_lite.checkpoints.sources.t5x_native import T5xNativeSource, T5xNativeWriter

__all__ = (
    'FORMATS', 'HuggingFaceSource', 'OrbaxSource', 'OwnSource', 'StateSource', 'T5xNativeSource', 'T5xNativeWriter',
    'check_exists', 'check_readable', 'detect_format', 'layout_of',
    'open_source',
)
