"""The files and the entry of the small program that gin binds in these tests."""

import gin
import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError

ENTRY = 'tests.configuration.gin_program.train'
RUN = """\
from __gin__ import dynamic_registration

from tests.configuration import gin_program as script
from tests.configuration import gin_program as data

STEPS = %gin.REQUIRED
MODEL_DIR = %gin.REQUIRED
BATCH_SIZE = 8

script.train:
  model = %MODEL
  model_dir = %MODEL_DIR
  total_steps = %STEPS
  train_cfg = @train/data.DatasetConfig()
  eval_cfg = @eval/data.DatasetConfig()
  trainer_cls = @script.Trainer

script.Trainer.learning_rate_fn = @script.schedule()
data.DatasetConfig.lengths = {'inputs': 16, 'targets': 4}
data.DatasetConfig.batch_size = %BATCH_SIZE
train/data.DatasetConfig.name = 'rows'
eval/data.DatasetConfig:
  name = 'rows'
  shuffle = False
"""
MODEL = """\
from __gin__ import dynamic_registration
from tests.configuration import gin_program as models
WIDTH = 32
MODEL = @models.Model()
models.Model:
  width = %WIDTH
"""


@pytest.fixture(autouse=True)
def program_files(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'run.gin').write_text(RUN)
  (tmp_path / 'model.gin').write_text(MODEL)
  yield
  gin.clear_config()


def load(
  *flags, files=('run.gin', 'model.gin'), defaults=('STEPS=10', 'MODEL_DIR=runs/a'), search_paths=()
):
  texts = []
  for flag in (*defaults, *flags):
    key, _, value = flag.partition('=')
    texts.append(gin_syntax.read_flag(key, value, f'--gin.{flag}'))
  return gin_utils.load(ENTRY, gin_utils.read(files, texts, search_paths))


def error_of(*flags, **kwargs):
  with pytest.raises(ConfigError) as caught:
    load(*flags, **kwargs)
  return str(caught.value)
