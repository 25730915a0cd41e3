"""gin files written for T5X: its modules, its programs, its files, and what the log and the messages say."""

import logging

import pytest

from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from t5x_lite.errors import ConfigError

HEAD = """\
from __gin__ import dynamic_registration
import __main__ as train_script
from t5x import models
from t5x import utils
import t5x.partitioning
from t5x.examples.t5 import network as t5_network
include 'recipes/keyword_cloze.gin'
"""


def _load(tmp_path, text, *flags, entry='t5x_lite.apps.train.train', head=HEAD, name='mine.gin'):
  path = tmp_path / name
  path.write_text(head + text)
  texts = [
    gin_syntax.read_flag(*flag.split('=', 1), f'--gin.{flag}')
    for flag in ('MODEL_DIR=runs/a', *flags)
  ]
  return gin_utils.load(entry, gin_utils.read([str(path)], texts))


def _error(tmp_path, text, *flags, **kwargs):
  with pytest.raises(ConfigError) as caught:
    _load(tmp_path, text, *flags, **kwargs)
  return str(caught.value)


def test_all_import_forms_bind_our_objects_and_config_gin_has_our_names(tmp_path, caplog):
  with caplog.at_level(logging.INFO):
    configuration = _load(
      tmp_path,
      """
train/utils.DatasetConfig.batch_size = 16
train_script.train.eval_period = 7
models.EncoderDecoderModel.z_loss = 0.1
t5x.partitioning.PjitPartitioner.num_partitions = 2
t5_network.T5Config.dropout_rate = 0.25
""",
      'utils.SaveCheckpointConfig.keep=3',
      'train_script.train.eval_steps=2',
    )
  settings = configuration.settings(())
  assert settings['train/data.DatasetConfig.batch_size'] == '16'
  assert (
    settings['train_script.train.eval_period'] == '7'
    and settings['train_script.train.eval_steps'] == '2'
  )
  assert settings['checkpoints.SaveCheckpointConfig.keep'] == '3'
  assert 't5x.' not in configuration.text and '__main__' not in configuration.text
  lines = [record.getMessage() for record in caplog.records if 'T5X' in record.getMessage()]
  assert len(lines) == 1 and 'mine.gin mean those of t5x_lite. See docs/from_t5x.md.' in lines[0]
  # The recorded text opens alone, without the table, and gives the same.
  caplog.clear()
  again = _load(tmp_path, configuration.text, head='')
  assert again.text == configuration.text
  assert not [record for record in caplog.records if 'T5X' in record.getMessage()]


def test_a_class_of_the_user_with_the_name_of_a_former_class_of_t5x_is_itself(
  tmp_path, monkeypatch
):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'own_partitioning.py').write_text(
    'from t5x_lite.partitioning import PjitPartitioner\n'
    'class ModelBasedPjitPartitioner(PjitPartitioner): pass\n'
  )
  configuration = _load(
    tmp_path,
    'import own_partitioning\n'
    'own_partitioning.ModelBasedPjitPartitioner.num_partitions = 1\n'
    'train_script.train.partitioner = @own_partitioning.ModelBasedPjitPartitioner()\n',
  )
  name = type(configuration.argument('partitioner')).__qualname__
  assert name == 'ModelBasedPjitPartitioner'


@pytest.mark.parametrize('is_for_t5x', [True, False])
def test_only_files_without_names_of_t5x_apply_all_bindings_to_subclasses(
  tmp_path, monkeypatch, caplog, is_for_t5x
):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'own_models.py').write_text(
    'from t5x_lite import models\n'
    'class Model(models.EncoderDecoderModel):\n'
    '  def __init__(self, *args, z_loss=0.0, **kwargs):\n'
    '    super().__init__(*args, z_loss=z_loss, **kwargs)\n'
    '    self.z_loss = z_loss\n'
  )
  head = """\
from __gin__ import dynamic_registration
from t5x_lite import models
from t5x_lite.apps import train as train_script
include 'recipes/keyword_cloze.gin'
"""
  if is_for_t5x:
    head += 'from t5x import utils\nutils.SaveCheckpointConfig.keep = 3\n'
  with caplog.at_level(logging.INFO):
    configuration = _load(
      tmp_path,
      'import own_models\n'
      'models.EncoderDecoderModel.z_loss = 0.5\n'
      'train_script.train.model = @own_models.Model()\n',
      head=head,
    )
  again = _load(tmp_path, configuration.text, head='')
  for each in (configuration, again):
    # `module` and other parameters without a default are bound for the base class only.
    model = each.argument('model')
    assert type(model).__name__ == 'Model' and model.module is not None
    assert (model.z_loss == 0.5) == (not is_for_t5x)
  lines = [record.getMessage() for record in caplog.records]
  is_said = any(
    line.startswith('As in T5X, ') and 'z_loss' in line and 'no effect on own_models.Model' in line
    for line in lines
  )
  assert is_said == is_for_t5x


def test_flags_may_use_the_end_of_a_name_of_t5x_that_no_file_imports(tmp_path):
  configuration = _load(
    tmp_path,
    '',
    'trainer.Trainer.num_microbatches=2',
    'utils.SaveCheckpointConfig.period=5',
    head="include 'recipes/keyword_cloze.gin'\n",
  )
  assert configuration.settings(())['checkpoints.SaveCheckpointConfig.period'] == '5'


@pytest.mark.parametrize(
  'text, fragments',
  [
    (
      'utils.DataConfig.split = 1',
      ['mine.gin:8: t5x.utils has no', "Did you mean 'DatasetConfig'?"],
    ),
    (
      'from t5x import export_lib\nx = @export_lib.ExportableModule',
      ['mine.gin:9: t5x.export_lib.ExportableModule', 'gin/t5x/configs/runs/export.gin'],
    ),
    (
      'from t5x.contrib.calm import models as calm',
      ['mine.gin:8: t5x.contrib.calm has no equivalent', 'CALM'],
    ),
    (
      'import t5x.fiddle_configs.base',
      ['mine.gin:8: t5x.fiddle_configs has no equivalent', 'gin files'],
    ),
    (
      'from __main__ import evaluate',
      ['mine.gin:8: Names of __main__', '`import __main__ as NAME`, and NAME.evalu'],
    ),
    (
      'train_script.trian.total_steps = 1',
      ["mine.gin:8: __main__ has no 'trian'", "Did you mean 'train'?"],
    ),
    (
      'train_script.train.use_jax_array = True',
      ['mine.gin:8: train_script.train.use_jax_array of T5X has no equivalent', 'always jax.Array'],
    ),
    (
      'utils.DatasetConfig.splitt = 1',
      ["mine.gin:8: utils.DatasetConfig has no parameter 'splitt'"],
    ),
  ],
)
def test_messages_name_line_t5x_name_and_equivalent(tmp_path, text, fragments):
  message = _error(tmp_path, text)
  for fragment in fragments:
    assert fragment in message, message


_DYNAMIC = 'from __gin__ import dynamic_registration\n'
_T5X = _DYNAMIC + 'from t5x import utils\n'
_OURS = _DYNAMIC + 'from t5x_lite import data\n'


@pytest.mark.parametrize(
  'head, text, remedy',
  [
    (_T5X, 'trainer.Trainer.num_microbatches = 1', '`from t5x import trainer`'),
    (_DYNAMIC, 'trainer.Trainer.num_microbatches = 1', '`from t5x import trainer`'),
    (_OURS, 'trainer.Trainer.num_microbatches = 1', '`from t5x_lite import trainer`'),
    (
      _OURS + 'from t5x import utils\n',
      'trainer.Trainer.num_microbatches = 1',
      '`from t5x import trainer`',
    ),
    (_T5X, 'trainer.Trainr.num_microbatches = 1', '`from t5x import trainer`'),
    (_T5X, 'A = @partitioning.MoePjitPartitioner()', '`from t5x.contrib.moe import partitioning`'),
    (
      _T5X,
      'A = @network.Transformer()',
      ' or '.join(f'`from t5x.examples.{name} import network`' for name in ('scalable_t5', 't5')),
    ),
    (_T5X, 'train_script.train.eval_period = 1', '`import __main__ as train_script`'),
    (_DYNAMIC, 'eval_script.evaluate.use_orbax = True', '`import __main__ as eval_script`'),
    (
      _OURS,
      'eval_script.evaluate.use_orbax = True',
      '`from t5x_lite.apps import evaluate as eval_script`',
    ),
    (_DYNAMIC, 'infer_script.infer.use_orbax = True', '`import __main__ as infer_script`'),
    (_T5X, 'data.DatasetConfig.seed = 1', '`from t5x_lite import data`'),
    (_OURS, 'utils.CheckpointConfig.restore = None', '`from t5x import utils`'),
    (_OURS, 'my_package.f.x = 1', '`from PACKAGE import my_package`'),
  ],
)
def test_the_import_that_a_file_lacks_is_proposed(tmp_path, head, text, remedy):
  path = tmp_path / 'mine.gin'
  path.write_text(head + text)
  with pytest.raises(ConfigError) as caught:
    gin_utils.load('t5x_lite.apps.train.train', gin_utils.read([str(path)]))
  message = str(caught.value)
  assert f"mine.gin:{len(head.splitlines()) + 1}: '" in message and message.endswith(
    f' Add {remedy}.'
  ), message


@pytest.mark.parametrize(
  'name',
  [
    't5x/configs/runs/pretrain.gin',
    't5x/t5x/configs/runs/pretrain.gin',
    '../no_such_folder/t5x/configs/runs/pretrain.gin',
    '/no_such_folder/t5x/configs/runs/pretrain.gin',
  ],
)
def test_files_of_t5x_are_ours_where_they_are_not_found(tmp_path, monkeypatch, name):
  monkeypatch.chdir(tmp_path)
  ours = gin_syntax.packaged_folder() / 't5x/configs/runs/pretrain.gin'
  assert gin_syntax.find_file(name) == ours
  with pytest.raises(ConfigError, match='does not exist'):
    gin_syntax.find_file(name.replace('pretrain', 'no_such'))


def test_a_file_of_t5x_that_is_found_has_priority(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 't5x/configs/runs').mkdir(parents=True)
  (tmp_path / 't5x/configs/runs/pretrain.gin').write_text('A = 1\n')
  assert gin_syntax.read_file('t5x/configs/runs/pretrain.gin').statements[0].macro_name == 'A'


def test_files_of_this_package_include_each_other(tmp_path, monkeypatch):
  """A folder `gin/` or `runs/` of a project does not replace them."""
  monkeypatch.chdir(tmp_path)
  for folder in ('runs', 'gin/runs'):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / 'finetune.gin').write_text('A = 1\n')
  assert gin_syntax.read_file('runs/finetune.gin').statements[0].macro_name == 'A'
  ours = gin_syntax.read_file('t5x/configs/runs/finetune.gin')
  assert 'A' not in {getattr(statement, 'macro_name', None) for statement in ours.walk()}


def test_log_says_once_which_files_and_defaults_are_ours(tmp_path, caplog, monkeypatch):
  monkeypatch.chdir(tmp_path)
  text = "include '../t5x/t5x/configs/runs/pretrain.gin'\ninclude 't5x/examples/t5/byt5/tiny.gin'\n"
  flags = (
    'MIXTURE_OR_TASK_NAME=a',
    "TASK_FEATURE_LENGTHS={'inputs': 8, 'targets': 8}",
    'DROPOUT_RATE=0.0',
  )
  with caplog.at_level(logging.INFO):
    _load(tmp_path, text, 'TRAIN_STEPS=1', *flags, head='')
  (line,) = [record.getMessage() for record in caplog.records if 'T5X' in record.getMessage()]
  assert line == (
    "Of T5X's files, those of t5x_lite are used: ../t5x/t5x/configs/runs/pretrain.gin, "
    "t5x/examples/t5/byt5/tiny.gin. Defaults that are not T5X's: RANDOM_SEED = 0 (T5X: the clock), "
    'USE_CACHED_TASKS = False (T5X: True). See docs/from_t5x.md.'
  )
  caplog.clear()
  with caplog.at_level(logging.INFO):
    _load(
      tmp_path,
      text + 'USE_CACHED_TASKS = True\n',
      'TRAIN_STEPS=1',
      'RANDOM_SEED=3',
      *flags,
      head='',
      name='train.gin',  # as one of ours
    )
  assert 'Defaults' not in ' '.join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize('name, entry', [('eval', 'evaluate.evaluate'), ('infer', 'infer.infer')])
def test_log_omits_defaults_that_equal_those_of_t5x(tmp_path, caplog, name, entry):
  text = f"include 't5x/examples/t5/byt5/tiny.gin'\ninclude 't5x/configs/runs/{name}.gin'\nDROPOUT_RATE = 0.0\n"
  text += f"MIXTURE_OR_TASK_NAME = 'a'\nCHECKPOINT_PATH = 'b'\n{name.upper()}_OUTPUT_DIR = 'c'\n"
  (tmp_path / 'mine.gin').write_text(text + "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}\n")
  with caplog.at_level(logging.INFO):
    gin_utils.load(f't5x_lite.apps.{entry}', gin_utils.read([str(tmp_path / 'mine.gin')], []))
  (line,) = [record.getMessage() for record in caplog.records if 'T5X' in record.getMessage()]
  assert 'Defaults' not in line


def test_a_misspelt_scope_of_a_file_is_a_warning(tmp_path, caplog):
  _load(
    tmp_path, 'trian/utils.DatasetConfig.batch_size = 4\nother/utils.DatasetConfig.batch_size = 4\n'
  )
  (warning,) = [record.getMessage() for record in caplog.records if 'scope' in record.getMessage()]
  assert warning.endswith(
    'mine.gin:8: the scope of trian/data.DatasetConfig.batch_size is not used. Did you mean '
    'train/data.DatasetConfig.batch_size?'
  )


def test_undefined_constants_and_imports_of_names_are_explained(tmp_path):
  message = _error(tmp_path, 'train_script.train.total_steps = %t5x.utils.STEPS\n')
  assert "mine.gin:8: the macro 't5x.utils.STEPS' is not defined. Write a value" in message
  message = _error(tmp_path, 'from t5x.utils import DatasetConfig\n')
  assert message.endswith(
    "no module 't5x.utils.DatasetConfig'. Import t5x.utils, and write utils.DatasetConfig."
  )


def test_a_flag_means_what_the_files_use_if_two_modules_have_its_name(tmp_path, monkeypatch):
  folder = tmp_path / 'dual_encoders'
  folder.mkdir()
  (folder / 'models.py').write_text(
    'from t5x_lite import models\nclass DualEncoderModel(models.EncoderDecoderModel):\n  pass\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  theirs = tmp_path / 'theirs.gin'
  theirs.write_text('from __gin__ import dynamic_registration\nfrom t5x import models\n')
  head = 'from __gin__ import dynamic_registration\nfrom dual_encoders import models\n'
  text = f"""\
include 'recipes/keyword_cloze.gin'
MODEL = @models.DualEncoderModel()
models.DualEncoderModel.z_loss = 0.1
include '{theirs}'
"""
  flag = 'models.DualEncoderModel.z_loss=0.5'
  configuration = _load(tmp_path, text, flag, head=head)
  assert configuration.argument('model')._z_loss == 0.5
