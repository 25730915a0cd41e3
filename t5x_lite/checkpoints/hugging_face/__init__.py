"""Hugging Face folders (`config.json`, safetensors, tokenizer files), read and written without torch."""

from t5x_lite.checkpoints.hugging_face.architecture import Architecture
from t5x_lite.checkpoints.hugging_face.families import FAMILIES
from t5x_lite.checkpoints.hugging_face.families import Family
from t5x_lite.checkpoints.hugging_face.families import family_of
from t5x_lite.checkpoints.hugging_face.families import get_family
from t5x_lite.checkpoints.hugging_face.families import guess_family
from t5x_lite.checkpoints.hugging_face.folder import HuggingFaceFolder
from t5x_lite.checkpoints.hugging_face.folder import is_hugging_face_folder
from t5x_lite.checkpoints.hugging_face.gin_files import GinSuggestion
from t5x_lite.checkpoints.hugging_face.gin_files import suggest_gin
from t5x_lite.checkpoints.hugging_face.names import TensorRule
from t5x_lite.checkpoints.hugging_face.names import check_ours
from t5x_lite.checkpoints.hugging_face.names import tensor_table
from t5x_lite.checkpoints.hugging_face.tensor_files import SafetensorsFolder
from t5x_lite.checkpoints.hugging_face.writer import write_folder

__all__ = [
  'Architecture',
  'FAMILIES',
  'Family',
  'GinSuggestion',
  'HuggingFaceFolder',
  'SafetensorsFolder',
  'TensorRule',
  'check_ours',
  'family_of',
  'get_family',
  'guess_family',
  'is_hugging_face_folder',
  'suggest_gin',
  'tensor_table',
  'write_folder',
]
