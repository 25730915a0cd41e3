"""Our gin files under T5X's paths: complete, and bindings in T5X's names have the effect that they have in T5X.

`t5x_gin` compares them with a checkout of T5X.
"""

import logging

import gin
import pytest

from t5x_lite import errors
from t5x_lite import gin_utils
from t5x_lite.configuration import syntax as gin_syntax
from tests.compat import t5x_gin

_NO_VOCABULARY = """
from __gin__ import dynamic_registration
from t5x_lite.data import vocabularies
VOCABULARY = @vocabularies.PassThroughVocabulary()
vocabularies.PassThroughVocabulary.size = 100
"""
_TRAIN_ARGUMENTS = (
  'train_dataset_cfg',
  'train_eval_dataset_cfg',
  'infer_eval_dataset_cfg',
  'checkpoint_cfg',
  'trainer_cls',
)
_OTHER_ARGUMENTS = {
  'train': _TRAIN_ARGUMENTS,
  'eval': ('dataset_cfg', 'restore_checkpoint_cfg'),
  'infer': ('dataset_cfg', 'restore_checkpoint_cfg'),
  'export': ('restore_checkpoint_cfg',),
  'precompile': ('train_dataset_cfg',),
}
# One size of each kind of model; the others differ in numbers that t5x_gin compares.
_LARGE = (
  '/large.gin',
  '/xl.gin',
  '/xxl.gin',
  '3B.gin',
  '11B.gin',
  'pretrain_large.gin',
  'pretrain_xl.gin',
)


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


@pytest.mark.parametrize(
  'path',
  [
    pytest.param(path, marks=pytest.mark.full) if path.endswith(_LARGE) else path
    for path in [*t5x_gin.t5x_paths(), 'configs/runs/pretrain_deterministic.gin']
  ],
)
def test_resolves_and_repeats_itself(path, tmp_path):
  configuration = t5x_gin.load(path)
  recorded = gin_utils.write_config(tmp_path, configuration.text, 0)
  command = t5x_gin.command(path)
  again = gin_utils.load(t5x_gin.ENTRIES[command], gin_utils.read([str(recorded)]))
  assert again.text == configuration.text
  for name in _OTHER_ARGUMENTS[command]:
    if (
      'create_task_from_tfexample_file' not in again.text or name != 'dataset_cfg'
    ):  # it reads the vocabulary
      again.argument(name)
  no_vocabulary = gin_syntax.read_text(_NO_VOCABULARY, 'vocabulary', is_flag=False)
  gin_utils.load(
    t5x_gin.ENTRIES[command], [*gin_utils.read([str(recorded)]), no_vocabulary]
  ).argument('model')


def test_every_file_of_t5x_is_there():
  sizes = ('tiny', 'small', 'base', 'large', 'xl', 'xxl')
  models = {
    f'examples/t5/{family}/{size}.gin' for family in ('t5_1_1', 'mt5', 'byt5') for size in sizes
  }
  models |= {
    f'examples/t5/t5_1_0/{size}.gin' for size in ('tiny', 'small', 'base', 'large', '3B', '11B')
  }
  models |= {
    f'examples/scalable_t5/{family}/{size}.gin'
    for family in ('t5_1_1', 'mt5')
    for size in sizes[1:]
  }
  models |= {f'examples/decoder_only/models/{size}.gin' for size in sizes[2:]}
  runs = {
    f'{folder}configs/runs/{name}.gin'
    for folder in ('', 'contrib/moe/')
    for name in (
      'eval',
      'export',
      'finetune',
      'infer',
      'infer_from_tfexample_file',
      'precompile',
      'pretrain',
    )
  }
  assert models | runs <= set(t5x_gin.t5x_paths())
  assert len(t5x_gin.t5x_paths()) == 85


def _load(tmp_path, head, body, command='train', flags=()):
  path = tmp_path / 'mine.gin'
  path.write_text(
    f'from __gin__ import dynamic_registration\nimport seqio\nfrom t5x import utils\n{head}\n{body}\n'
  )
  return gin_utils.load(
    t5x_gin.ENTRIES[command], gin_utils.read([str(path)], flags, placeholders=t5x_gin.VALUES)
  )


_MODEL = "include 't5x/examples/t5/t5_1_1/tiny.gin'\n"


@pytest.mark.parametrize(
  'body, setting, value',
  [
    ('BATCH_SIZE = 7', 'train_eval/data.DatasetConfig.batch_size', '7'),
    (
      'utils.DatasetConfig.batch_size = 7',
      'train/data.DatasetConfig.batch_size',
      '128',
    ),  # a scope has priority
    ('EVALUATOR_NUM_EXAMPLES = 7', 'seqio.Evaluator.num_examples', '7'),
    ('JSON_WRITE_N_RESULTS = 7', 'seqio.JSONLogger.write_n_results', '7'),
    (
      "seqio.SentencePieceVocabulary.sentencepiece_model_file = 'a'",
      'seqio.SentencePieceVocabulary.sentencepiece_model_file',
      "'a'",
    ),
    (
      'utils.create_learning_rate_scheduler.base_learning_rate = 7.0',
      'schedules.create_learning_rate_scheduler.base_learning_rate',
      '7.0',
    ),
  ],
)
def test_bindings_after_a_run_file(tmp_path, body, setting, value):
  settings = _load(tmp_path, _MODEL + "include 't5x/configs/runs/finetune.gin'", body).settings(())
  assert settings[setting] == value


@pytest.mark.parametrize('command', ['eval', 'infer'])
def test_the_remedy_for_a_missing_split_has_an_effect(tmp_path, command):
  head = f"{_MODEL}include 't5x/configs/runs/{command}.gin'"
  assert _load(tmp_path, head, '', command).argument('dataset_cfg').split == 'test'
  flag = gin_syntax.read_flag('MIXTURE_OR_TASK_SPLIT', 'validation', '--gin.MIXTURE_OR_TASK_SPLIT')
  changed = _load(tmp_path, head, '', command, [flag])
  assert changed.argument('dataset_cfg').split == 'validation'


@pytest.mark.parametrize('command', ['eval', 'infer'])
def test_evaluation_and_inference_have_no_scopes(tmp_path, command):
  configuration = _load(
    tmp_path,
    f"{_MODEL}include 't5x/configs/runs/{command}.gin'",
    """
utils.DatasetConfig.split = 'train'
utils.DatasetConfig.batch_size = 7
utils.RestoreCheckpointConfig.mode = 'latest'
""",
    command,
  )
  dataset_cfg = configuration.argument('dataset_cfg')
  assert (dataset_cfg.split, dataset_cfg.batch_size) == ('train', 7)
  assert configuration.argument('restore_checkpoint_cfg').mode == 'latest'


@pytest.mark.parametrize('order', [1, -1])
def test_sparse_models_with_t5x_macros_in_either_order(tmp_path, order):
  includes = [
    "include 'models/tokens_choose_tiny.gin'",
    "include 't5x/contrib/moe/configs/runs/finetune.gin'",
  ]
  configuration = _load(
    tmp_path,
    '\n'.join(includes[::order]),
    """
from t5x.contrib.moe import models as moe_models
NUM_EXPERTS = 8
NUM_MODEL_PARTITIONS = 2
moe_models.MoeEncoderDecoderModel.predict_batch_with_aux.num_decodes = 7
""",
  )
  settings = configuration.settings(())
  assert settings['moe.MoeTrainer.num_expert_partitions'] == '8'
  assert settings['moe_models.MoeEncoderDecoderModel.predict_batch_with_aux.num_decodes'] == '7'
  assert dict(configuration.argument('partitioner').mesh.shape) == {
    'data': 1,
    'expert': 4,
    'model': 2,
  }


def test_settings_without_effect_are_logged(tmp_path, monkeypatch, caplog):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'own_function_of_gin.py').write_text(
    'import gin\n@gin.configurable\ndef trim(size=3):\n  pass\n'
  )
  body = (
    "include 't5x/configs/runs/pretrain.gin'\nINITIAL_CHECKPOINT_PATH = 'x'\nEVALUATOR_NUM_EXAMPLES = 3\n"
    'infer_eval/utils.DatasetConfig.batch_size = 3\nown_function_of_gin.trim.size = 4\n'
  )
  with caplog.at_level(logging.INFO, 't5x_lite'):
    _load(
      tmp_path, 'import own_function_of_gin\n' + _MODEL, body
    )  # user code may call its function
  assert [message for message in caplog.messages if message.startswith('Not used')] == [
    f'Not used for training: infer_eval/utils.DatasetConfig.batch_size ({tmp_path}/mine.gin:10), '
    f'INITIAL_CHECKPOINT_PATH ({tmp_path}/mine.gin:8), EVALUATOR_NUM_EXAMPLES ({tmp_path}/mine.gin:9).'
  ]


@pytest.mark.parametrize(
  'body, problem',
  [
    ('train_script.train.use_orbax = False', '`train.use_orbax` must be True'),
    (
      'utils.DatasetConfig.runtime_preprocessors = [1]',
      '`DatasetConfig.runtime_preprocessors` must be None or empty',
    ),
    (
      'utils.DatasetConfig.num_prefetch_threads = 4',
      '`DatasetConfig.num_prefetch_threads` must be unset',
    ),
    ("partitioning.PjitPartitioner.backend = 'tpu'", '`backend` must be a platform'),
    ('partitioning.PjitPartitioner.num_partitions = 3', '`num_partitions` must be '),
    (
      'partitioning.PjitPartitioner.num_partitions = 0',
      '`BasePartitioner.num_partitions` must be ',
    ),
    (
      'partitioning.PjitPartitioner.max_replicated_size = -1',
      '`PjitPartitioner.max_replicated_size` must be ',
    ),
    (
      'TASK_FEATURE_LENGTHS = None\ninfer_eval/utils.DatasetConfig.task_feature_lengths = None',
      '`DatasetConfig.task_feature_lengths` must be ',
    ),
  ],
)
def test_errors_of_the_run_name_the_line_of_the_binding(tmp_path, body, problem):
  head = """
import __main__ as train_script
from t5x import partitioning
include 't5x/examples/t5/byt5/small.gin'
include 't5x/configs/runs/finetune.gin'
# The next line is invalid."""
  configuration = _load(tmp_path, head, body)
  with pytest.raises(errors.ConfigError) as caught:
    configuration.call(model_dir=str(tmp_path / 'run'), dry_run=True)
  message = str(caught.value)
  assert message.startswith(problem) and f'{tmp_path / "mine.gin"}:10)' in message, message


def test_rules_of_models_without_experts_do_not_apply_to_those_with_experts(tmp_path):
  """T5X's files bind `PjitPartitioner` in the run file of all models and `MoePjitPartitioner` in those of experts."""
  body = """
from t5x.contrib.moe import partitioning as moe_partitioning
import __main__ as train_script
include 'models/tokens_choose_tiny.gin'
include 't5x/configs/runs/pretrain.gin'
partitioning.PjitPartitioner:
  backend = 'tpu'
  logical_axis_rules = @partitioning.standard_logical_axis_rules()
train_script.train.partitioner = @moe_partitioning.MoePjitPartitioner()
moe_partitioning.MoePjitPartitioner:
  num_expert_partitions = 4
  num_partitions = 1
"""
  configuration = _load(tmp_path, 'from t5x import partitioning', body)
  partitioner = configuration.argument('partitioner')
  assert dict(partitioner.logical_axis_rules)['expert'] == 'expert'
