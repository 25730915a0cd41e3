"""The bad input table: each is refused before any compute, with status 2 and one short message that says the remedy."""

import pytest

from t5x_lite import cli
from t5x_lite import errors

_RECIPE = ['--gin_file=recipes/keyword_cloze.gin', '--gin.DATA_SOURCE=builtin']


def _refuse(capsys, tmp_path, *argv, command='train'):
  """Runs the command and returns its message."""
  status = cli.main([command, *argv, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  captured = capsys.readouterr()
  assert status == errors.ExitCode.REFUSED == 2
  assert captured.err.startswith('t5x_lite: error: ') and 'Traceback' not in captured.err
  assert len(captured.err) < 700 and len(captured.err.splitlines()) <= 8
  assert not list((tmp_path / 'run').glob('checkpoint_*'))
  return captured.err


@pytest.mark.parametrize('what, flags, fragments', [
    ('a misspelt parameter', ['--gin.train_script.train.eval_perod=3'], ["'eval_perod'", "mean 'eval_period'?"]),
    ('a misspelt configurable', ['--gin.models.EncoderDecoderModl.z_loss=1.0'], ["mean 'EncoderDecoderModel'?"]),
    ('a misspelt macro', ['--gin.TRIAN_STEPS=5'], ["'TRIAN_STEPS'", "Did you mean 'TRAIN_STEPS'?"]),
    ('a misspelt file', ['--gin_file=recipes/keyword_clozelong.gin'], ["mean 'recipes/keyword_cloze_long.gin'?"]),
    ('a misspelt flag', ['--dryrun'], ["Did you mean '--dry_run'?"]),
    ('a bare constant', ['--gin.PACK=true'], ['--gin.PACK=True']),
    ('a wrong type', ['--gin.TRAIN_STEPS=abc'], ["TRAIN_STEPS = 'abc'", 'expected int']),
    ('a fraction of rows', ['--gin.BATCH_SIZE=2.5'], ['BATCH_SIZE = 2.5', 'expected int']),
    ('a wrong type deep down', ['--gin.network.T5Config.emb_dim=wide'], ["emb_dim = 'wide'", 'expected int']),
    ('no rows', ['--gin.BATCH_SIZE=0'], ['batch_size', '0']),
    ('no steps', ['--gin.TRAIN_STEPS=0'], ['total_steps', '0']),
    ('an evaluation every 0 steps', ['--gin.EVAL_PERIOD=0'], ['eval_period', '0']),
    ('rows that do not divide over the devices', ['--gin.BATCH_SIZE=12'], ['12', '8']),
    ('rows that do not divide over micro-batches', ['--gin.trainer.Trainer.num_microbatches=3'], ['64', '3']),
    ('a missing feature length', ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64}"], ['targets']),
    ('an unknown feature length', ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 12, 'target': 3}"],
     ["'target'"]),
    ('a feature length of 0', ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 0}"], ["'targets'", '0']),
    ('an unknown task', ['--gin.MIXTURE_OR_TASK_NAME=python_keyword_close'], ["Did you mean 'python_keyword_cloze'?"]),
    ('an unknown split', ['--gin.train/data.DatasetConfig.split=trian'], ["'trian'", "Did you mean 'train'?"]),
    ('an unknown evaluation split', ['--gin.infer_eval/data.DatasetConfig.split=valid'], ["'valid'"]),
    ('an unknown source', ['--gin.DATA_SOURCE=buildin'], ["Did you mean 'builtin'?"]),
    ('an unknown module', ['--gin.MIXTURE_OR_TASK_MODULE=my_absent_tasks'], ["'my_absent_tasks'"]),
    ('a vocabulary larger than the embedding', ['--gin.network.T5Config.vocab_size=256'], ['384', '256']),
    ('an unknown restore path', ['--gin_file=runs/finetune.gin', '--gin.INITIAL_CHECKPOINT_PATH=no/such/checkpoint_5',
                                 '--gin.MIXTURE_OR_TASK_NAME=python_keyword_cloze', '--gin.TRAIN_STEPS=10',
                                 "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 12}", '--gin.BATCH_SIZE=64'],
     ['no/such/checkpoint_5']),
    ('mesh options that contradict', ['--gin.partitioning.PjitPartitioner.model_parallel_submesh=(1, 1, 1, 1)'],
     ['num_partitions', 'model_parallel_submesh']),
    ('a mesh of more than the devices', ['--gin.partitioning.PjitPartitioner.num_partitions=3'], ['3', '8']),
    ('two learning rates', ['--gin.optimizers.adamw.learning_rate=0.1'], ['learning_rate']),
    ('use_cached without seqio', ['--gin.USE_CACHED_TASKS=True'], ['use_cached', 'source']),
    ('best checkpoints by no metric', ['--gin.checkpoints.SaveCheckpointConfig.keep_best=2'],
     ['keep_best', 'metric_name_to_monitor']),
    ('an unknown activation', ["--gin.network.T5Config.mlp_activations=('gelu', 'liner')"], ["'liner'"]),
    ('an unknown dtype', ['--gin.network.T5Config.dtype=bfloat61'], ["'bfloat16'"]),
    ('an unknown remat policy', ['--gin.network.T5Config.remat_policy=minimum'], ["'minimal'"]),
    ('a model of no layers', ['--gin.network.T5Config.num_encoder_layers=0'], ['num_encoder_layers', '0']),
])
def test_refused(capsys, tmp_path, what, flags, fragments):
  del what
  message = _refuse(capsys, tmp_path, *_RECIPE, *flags)
  for fragment in fragments:
    assert fragment in message


def test_missing_required_values_are_named_all_at_once(capsys, tmp_path):
  message = _refuse(capsys, tmp_path, '--gin_file=runs/pretrain.gin')
  for name in ('MIXTURE_OR_TASK_NAME', 'MODEL', 'TASK_FEATURE_LENGTHS', 'TRAIN_STEPS'):
    assert f'\n  {name}: ' in message


def test_gin_syntax_error_names_file_and_line(capsys, tmp_path):
  (tmp_path / 'mine.gin').write_text("include 'recipes/keyword_cloze.gin'\n\nTRAIN_STEPS == 5\n")
  path = tmp_path / 'mine.gin'
  assert f'{path}:3: not gin syntax' in _refuse(capsys, tmp_path, f'--gin_file={path}')


@pytest.mark.parametrize('below', [False, True])
def test_a_model_directory_that_cannot_be_one(capsys, tmp_path, below):
  file = tmp_path / 'file'
  file.write_text('a file')
  path = file / 'below' if below else file
  status = cli.main(['train', *_RECIPE, f'--gin.MODEL_DIR={path}'])
  err = capsys.readouterr().err
  assert status == 2 and 'Traceback' not in err and str(path) in err


def test_remote_model_directory_is_refused(capsys):
  status = cli.main(['train', *_RECIPE, '--gin.MODEL_DIR=gs://bucket/run'])
  err = capsys.readouterr().err
  assert status == 2 and 'gs://bucket/run' in err
