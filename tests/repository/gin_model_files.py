"""Models as the packaged gin files make them, without data, a vocabulary's file or a run."""

from typing import Any

from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax

_ENTRY = 't5x_lite.apps.train.train'
_STAND_INS = {
  'MODEL_DIR': "'runs/x'",
  'MIXTURE_OR_TASK_NAME': "'x'",
  'TRAIN_STEPS': '3',
  'DROPOUT_RATE': '0.1',
  'TASK_FEATURE_LENGTHS': "{'inputs': 64, 'targets': 12}",
}
_NO_VOCABULARY = """
from __gin__ import dynamic_registration
from t5x_lite.data import vocabularies
VOCABULARY = @vocabularies.PassThroughVocabulary()
vocabularies.PassThroughVocabulary.size = 100
"""


def load_model(*names: str, optimizer: str | None = None, **macros: Any) -> Any:
  """Returns the model of `models/<name>.gin` for each name, with macros bound; gin stays configured."""
  texts = [gin_syntax.read_text(_NO_VOCABULARY, 'vocabulary', is_flag=False)]
  texts += [
    gin_syntax.read_flag(name, str(value), f'--gin.{name}={value}')
    for name, value in macros.items()
  ]
  files = [*(f'models/{name}.gin' for name in names), 'runs/train.gin']
  files += [f'optimizers/{optimizer}.gin'] if optimizer else []
  return gin_utils.load(_ENTRY, gin_utils.read(files, texts, placeholders=_STAND_INS)).argument(
    'model'
  )
