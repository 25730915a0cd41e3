"""Invalid inputs: each is rejected before any compute, with status 2 and one short message with the remedy."""

import re
import shlex

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import cli
from t5x_lite import errors
from t5x_lite.apps.common import report

_RECIPE = ['--gin_file=recipes/keyword_cloze.gin', '--gin.DATA_SOURCE=builtin']


def _error_of(capsys, tmp_path, *argv, command='train'):
  """Run the command and return its message."""
  status = cli.main([command, *argv, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  captured = capsys.readouterr()
  assert status == errors.ExitCode.INVALID_INPUT == 2
  # Bindings that a flag takes away from a recipe are logged before the error.
  err = re.sub(r'\ANot used for training: .*\n', '', captured.err)
  assert err.startswith('t5x_lite: error: ') and 'Traceback' not in err
  assert len(err) < 700 and len(err.splitlines()) <= 8
  assert not (tmp_path / 'run').exists()  # Rejected before anything was written.
  return err


@pytest.mark.parametrize(
  'what, flags, fragments',
  [
    (
      'a misspelt parameter',
      ['--gin.train_script.train.eval_perod=3'],
      ["'eval_perod'", "mean 'eval_period'?"],
    ),
    (
      'a misspelt configurable',
      ['--gin.models.EncoderDecoderModl.z_loss=1.0'],
      ["mean 'EncoderDecoderModel'?"],
    ),
    ('a misspelt macro', ['--gin.TRIAN_STEPS=5'], ["'TRIAN_STEPS'", "Did you mean 'TRAIN_STEPS'?"]),
    (
      'a misspelt file',
      ['--gin_file=recipes/keyword_clozelong.gin'],
      ["mean 'recipes/keyword_cloze_long.gin'?"],
    ),
    ('a misspelt flag', ['--dryrun'], ["Did you mean '--dry_run'?"]),
    ('a bare constant', ['--gin.PACK=true'], ['--gin.PACK=True']),
    ('a wrong type', ['--gin.TRAIN_STEPS=abc'], ['`TRAIN_STEPS` must be int', "got 'abc'"]),
    ('a fraction of rows', ['--gin.BATCH_SIZE=2.5'], ['`BATCH_SIZE` must be int', 'got 2.5']),
    (
      'a wrong type deep down',
      ['--gin.network.T5Config.emb_dim=wide'],
      ['emb_dim` must be int', "got 'wide'"],
    ),
    ('no rows', ['--gin.BATCH_SIZE=0'], ['batch_size', '0']),
    (
      'no number of steps for a schedule',
      ['--gin.TRAIN_STEPS=None'],
      [
        '`TRAIN_STEPS` must be int for schedules.create_learning_rate_scheduler.steps_per_cycle, got None',
        'schedules.create_learning_rate_scheduler needs the total number of steps: set TRAIN_STEPS, or '
        '--gin.schedules.create_learning_rate_scheduler.steps_per_cycle to a number.',
      ],
    ),
    ('fewer than no steps', ['--gin.TRAIN_STEPS=-1'], ['total_steps', '-1']),
    ('an evaluation every -1 steps', ['--gin.EVAL_PERIOD=-1'], ['eval_period', '-1']),
    ('rows that do not divide over the devices', ['--gin.BATCH_SIZE=12'], ['12', '8']),
    (
      'rows that do not divide over micro-batches',
      ['--gin.trainer.Trainer.num_microbatches=3'],
      ['64', '3'],
    ),
    ('a missing feature length', ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64}"], ['targets']),
    (
      'an unknown feature length',
      ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 12, 'target': 3}"],
      ["'target'"],
    ),
    (
      'a feature length of 0',
      ["--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 0}"],
      ["'targets'", '0'],
    ),
    (
      'an unknown task',
      ['--gin.MIXTURE_OR_TASK_NAME=python_keyword_close'],
      ["Did you mean 'python_keyword_cloze'?"],
    ),
    (
      'an unknown split',
      ['--gin.train/data.DatasetConfig.split=trian'],
      ["'trian'", "Did you mean 'train'?"],
    ),
    (
      'an unknown evaluation split',
      ['--gin.infer_eval/data.DatasetConfig.split=valid'],
      ["'valid'"],
    ),
    ('an unknown source', ['--gin.DATA_SOURCE=buildin'], ["Did you mean 'builtin'?"]),
    ('an unknown module', ['--gin.MIXTURE_OR_TASK_MODULE=my_absent_tasks'], ["'my_absent_tasks'"]),
    (
      'a vocabulary larger than the embedding',
      ['--gin.network.T5Config.vocab_size=256'],
      ['384', '256'],
    ),
    (
      'an initial checkpoint without its macro',
      ['--gin.INITIAL_CHECKPOINT_PATH=x'],
      ["'INITIAL_CHECKPOINT_PATH' is not used", 'runs/finetune.gin and'],
    ),
    (
      'an unknown restore path',
      [
        '--gin_file=runs/finetune.gin',
        '--gin.INITIAL_CHECKPOINT_PATH=no/such/checkpoint_5',
        '--gin.MIXTURE_OR_TASK_NAME=python_keyword_cloze',
        '--gin.TRAIN_STEPS=10',
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 12}",
        '--gin.BATCH_SIZE=64',
      ],
      ['no/such/checkpoint_5'],
    ),
    (
      'mesh options that contradict',
      [
        '--gin.partitioning.PjitPartitioner.model_parallel_submesh=(1, 4)',
        '--gin.partitioning.PjitPartitioner.num_partitions=2',
      ],
      ['num_partitions', 'model_parallel_submesh'],
    ),
    (
      'a mesh of more than the devices',
      ['--gin.partitioning.PjitPartitioner.num_partitions=3'],
      ['3', '8'],
    ),
    (
      'a policy and a binding that replaces it',
      ['--gin.NON_FINITE_POLICY=skip', '--gin.trainer.NonFinitePolicy.action=stop'],
      [
        '--gin.NON_FINITE_POLICY=skip has no effect: --gin.trainer.NonFinitePolicy.action=stop replaces'
      ],
    ),
    ('two learning rates', ['--gin.optimizers.adamw.learning_rate=0.1'], ['learning_rate']),
    ('use_cached without seqio', ['--gin.USE_CACHED_TASKS=True'], ['use_cached', 'source']),
    (
      'best checkpoints by no metric',
      ['--gin.checkpoints.SaveCheckpointConfig.keep_best=2'],
      ['keep_best', 'metric_name_to_monitor'],
    ),
    (
      'an unknown activation',
      ["--gin.network.T5Config.mlp_activations=('gelu', 'liner')"],
      ["'liner'"],
    ),
    ('an unknown dtype', ['--gin.network.T5Config.dtype=bfloat61'], ["'bfloat16'"]),
    ('an unknown remat policy', ['--gin.network.T5Config.remat_policy=minimum'], ["'minimal'"]),
    ('a constant in capitals', ['--gin.PACK=TRUE'], ['--gin.PACK=True']),
    ('two statements in a flag', ['--gin.TRAIN_STEPS=5\nBATCH_SIZE = 8'], ['2 statements']),
    (
      'a value nested too deeply',
      [f'--gin.TASK_FEATURE_LENGTHS={"[" * 500}{"]" * 500}'],
      ['nested too deeply'],
    ),
    ('a macro made of itself', ['--gin.TRAIN_STEPS=%TRAIN_STEPS'], ['TRAIN_STEPS -> TRAIN_STEPS']),
    (
      'two objects made of each other',
      [
        '--gin.OPTIMIZER=@optimizers.chain()',
        '--gin.optimizers.chain.transformations=[@optimizers.schedule_free()]',
        '--gin.optimizers.schedule_free.base_optimizer=@optimizers.chain()',
      ],
      ['is an argument of itself: ', 'optimizers.chain -> ', 'optimizers.schedule_free'],
    ),
    ('None for a required object', ['--gin.MODEL=None'], ['must be BaseModel', 'NoneType']),
    ('a string for an object', ['--gin.MODEL=t5'], ['must be BaseModel', "'t5'"]),
    (
      'an object of another kind',
      ['--gin.MODEL=@optimizers.adamw()'],
      ['must be of type BaseModel', 'OptaxWrapper'],
    ),
    (
      'a function instead of its result',
      ['--gin.trainer.Trainer.learning_rate_fn=@schedules.create_learning_rate_scheduler'],
      ['Write @schedules.create_learning_rate_scheduler().'],
    ),
    (
      'a number for a schedule',
      ['--gin.trainer.Trainer.learning_rate_fn=0.1'],
      ['LearningRateCallable', 'float'],
    ),
    (
      'an instance for its class',
      ['--gin.train_script.train.trainer_cls=@trainer.Trainer()'],
      ['Write @trainer.Trainer without ().'],
    ),
    (
      'another class for a trainer',
      ['--gin.train_script.train.trainer_cls=@data.DatasetConfig'],
      ['`trainer_cls` must be a function of (model=, train_state=, ', 'got DatasetConfig: '],
    ),
    ('no optimizer', ['--gin.OPTIMIZER=None'], ['optimizer_def', 'optimizers.adamw()']),
    (
      'an optimizer that is not called',
      ['--gin.OPTIMIZER=@optimizers.adamw'],
      ['optimizer_def', 'OptimizerDef'],
    ),
    (
      'no vocabulary',
      ['--gin.VOCABULARY=None'],
      ['`input_vocabulary` must be a vocabulary', 'ByteVocabulary'],
    ),
    ('no task', ['--gin.MIXTURE_OR_TASK_NAME=None'], ['mixture_or_task_name', 'None']),
    (
      'a file for a module',
      ['--gin.MIXTURE_OR_TASK_MODULE=tasks.py'],
      ['tasks.py', 'Omit the suffix .py'],
    ),
    ('an empty module', ['--gin.MIXTURE_OR_TASK_MODULE=""'], ['module` must be', "got ''"]),
    ('no lengths', ['--gin.TASK_FEATURE_LENGTHS={}'], ['task_feature_lengths` must be', 'got {}']),
    (
      'more positions than an array has',
      ['--gin.BATCH_SIZE=800000000000'],
      ['800000000000', '2**31 - 1'],
    ),
    (
      'more steps than a counter holds',
      ['--gin.TRAIN_STEPS=99999999999'],
      ['99999999999', '2147483648'],
    ),
    (
      'a vocabulary of no machine',
      ['--gin.network.T5Config.vocab_size=100000000000'],
      ['vocab_size'],
    ),
    ('a negative rate', ['--gin.LEARNING_RATE=-1.0'], ['base_learning_rate`', 'got -1.0']),
    ('an infinite rate', ['--gin.LEARNING_RATE=1e999'], ['base_learning_rate`', 'got inf']),
    ('a seed of too many bits', ['--gin.RANDOM_SEED=99999999999999'], ['random_seed']),
    (
      'a model of no layers',
      ['--gin.network.T5Config.num_encoder_layers=0'],
      ['num_encoder_layers', '0'],
    ),
  ],
)
def test_rejected(capsys, tmp_path, what, flags, fragments):
  del what
  message = _error_of(capsys, tmp_path, *_RECIPE, *flags)
  for fragment in fragments:
    assert fragment in message


# Rejected after all other values, so that a command whose remedy works ends quickly with this message.
_LATE_ERROR = '--gin.EVAL_PERIOD=-1'


@pytest.mark.parametrize(
  'flag, remedy, is_added',
  [
    # (flag, expression of the flag that the message proposes, whether it is added or replaces the invalid flag)
    (
      "--gin.schedules.create_learning_rate_scheduler.factors=['constant', 'cosine_decay']",
      r'Write (--gin\S+="constant \* cosine_decay")',
      False,
    ),
    ('--gin.schedules.create_learning_rate_scheduler.factors=3', r'Write (--gin\S+)\.$', None),
    (
      '--gin.OPTIMIZER=optimizers.adamw()',
      r'Write (--gin\.OPTIMIZER=@optimizers.adamw\(\)),',
      False,
    ),
    ('--gin.MODEL=models.EncoderDecoderModel()', r'Write (--gin\.MODEL=@\S+\(\)),', False),
    ('--TRAIN_STEPS=5', r'Did you mean (--gin.TRAIN_STEPS=5)\?', False),
    ('--learning_rate=0.1', r'Did you mean (--gin.LEARNING_RATE=0.1)\?', False),
    ('--lr=0.1', r'Did you mean (--gin.LEARNING_RATE=0.1)\?', False),
    ('--batch-size=8', r'Did you mean (--gin.BATCH_SIZE=8)\?', False),
    ('--optimizers.adamw.b1=0.8', r'Did you mean (--gin.optimizers.adamw.b1=0.8)\?', False),
    ('--gin.NUM_PARTITIONS=2', r'(--gin_file=partitioning/\w+.gin)\.', True),
    (
      '--gin.TASK_FEATURE_LENGTHS={inputs: 64, targets: 12}',
      r'Write (--gin.TASK_FEATURE_LENGTHS=.*})\W*$',
      False,
    ),
    ('--gin.TASK_FEATURE_LENGTHS={inputs:64,targets:12}', r'Write (--gin\S+=.*})\W*$', False),
    ('--gin.PACK=true', r'(--gin.PACK=True)', False),
    ('--gin.PACK=FALSE', r'(--gin.PACK=False)', False),
    ('--gin.NUM_EPOCHS=null', r'(--gin.NUM_EPOCHS=None)', False),
    (
      '--gin.checkpoints.SaveCheckpointConfig.period=2.0',
      r'Write 2',
      None,
    ),
  ],
)
def test_remedies_work(capsys, tmp_path, flag, remedy, is_added):
  recipe = _RECIPE
  message = _error_of(capsys, tmp_path, *recipe, flag, _LATE_ERROR)
  found = re.search(remedy, message.strip())
  assert found, message
  if is_added is None:  # No flag to execute.
    return
  quoted = found[0].removeprefix('Write ').rstrip('.,') if '{' in flag else found[1]
  proposed = shlex.split(quoted)
  kept = [flag] if is_added else []
  after = _error_of(capsys, tmp_path, *recipe, *proposed, *kept, _LATE_ERROR)
  assert 'eval_period' in after and 'got -1' in after


def test_a_model_file_alone_leads_to_a_command_that_trains(capsys, tmp_path):
  argv = ['--gin_file=models/byt5_small.gin']
  message = _error_of(capsys, tmp_path, *argv)
  argv += re.findall(r'e\.g\. (--gin_file=\S+)\.', message)
  message = _error_of(capsys, tmp_path, *argv)
  argv += [shlex.split(each)[0] for each in re.findall(r'set (--gin\..*?) \(required', message)]
  message = _error_of(capsys, tmp_path, *argv, _LATE_ERROR)
  assert 'is not used' not in message and 'required' not in message


@pytest.mark.parametrize(
  'argv, fragment',
  [
    (['moe', 'report', 'runs/x'], 'Did you mean `python -m moe report runs/x`?'),
    (['train', '--frobnicate'], 'Values are set by --gin.NAME=VALUE'),
    (['convert', 'a', 'b', '--to=hf'], "Did you mean 'hugging_face'?"),
    (['convert', 'a', 'b', '--to=HuggingFace'], "Did you mean 'hugging_face'?"),
  ],
)
def test_proposed_commands(capsys, argv, fragment):
  assert cli.main(argv) == 2
  assert fragment in capsys.readouterr().err


def test_missing_required_values_are_named_all_at_once(capsys, tmp_path):
  message = _error_of(capsys, tmp_path, '--gin_file=runs/pretrain.gin')
  for name in ('MIXTURE_OR_TASK_NAME', 'MODEL', 'TASK_FEATURE_LENGTHS', 'TRAIN_STEPS'):
    assert f'\n  {name}: ' in message


def test_gin_syntax_error_names_file_and_line(capsys, tmp_path):
  (tmp_path / 'mine.gin').write_text("include 'recipes/keyword_cloze.gin'\n\nTRAIN_STEPS == 5\n")
  path = tmp_path / 'mine.gin'
  assert f'{path}:3: not gin syntax' in _error_of(capsys, tmp_path, f'--gin_file={path}')


@pytest.mark.parametrize(
  'text, fragment',
  [
    ("include 'mine.gin'\n", 'includes itself'),
    ('from __gin__ import dynamic_registrations\n', 'from __gin__ import dynamic_registration`'),
    (
      'from __gin__ import dynamic_registration\nfrom __main__ import train\n',
      '`import __main__ as NAME`',
    ),
    (
      'from __gin__ import dynamic_registration\nnetwork.T5Config.emb_dim = 8\n',
      'not imported by this file',
    ),
    ('A = %B\nB = %A\nTRAIN_STEPS = %A\n', 'is defined by itself'),
    ('TRAIN_STEPS = 5 \xff', "can't decode byte"),
  ],
)
def test_bad_files(capsys, tmp_path, text, fragment):
  (tmp_path / 'mine.gin').write_bytes(text.encode('latin-1'))
  assert fragment in _error_of(capsys, tmp_path, *_RECIPE, f'--gin_file={tmp_path / "mine.gin"}')


def test_a_misspelt_macro_of_a_file_is_warned_of(capsys, tmp_path):
  (tmp_path / 'mine.gin').write_bytes(
    b'\xef\xbb\xbfTRIAN_STEPS = 5\n'
  )  # also: a byte order mark does no harm
  message = _error_of_any(
    capsys,
    [
      *_RECIPE,
      f'--gin_file={tmp_path / "mine.gin"}',
      '--gin.TRAIN_STEPS=0',
      f'--gin.MODEL_DIR={tmp_path / "run"}',
    ],
  )
  assert 'warning: ' in message
  assert "mine.gin:1: the macro 'TRIAN_STEPS' is not used. Did you mean 'TRAIN_STEPS'?" in message


def _error_of_any(capsys, argv):
  assert cli.main(['train', *argv]) == 2
  err = capsys.readouterr().err
  assert 'Traceback' not in err
  return err


@pytest.mark.parametrize('path', ['', 'a\0b', 'a\udcff'])
def test_model_directories_with_no_name(capsys, tmp_path, monkeypatch, path):
  monkeypatch.chdir(tmp_path)
  _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={path!r}'])
  assert not list(tmp_path.iterdir())


def test_a_rejected_run_leaves_no_parent_folder(capsys, tmp_path):
  _error_of_any(
    capsys,
    [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "a" / "b"}', '--gin.MIXTURE_OR_TASK_NAME=none_such'],
  )
  assert not list(tmp_path.iterdir())


def _save_a_run(tmp_path):
  """Write a checkpoint as a run of the recipe's optimizer with another model would."""
  state = {
    'target': {'decoder': {'decoder_norm': {'scale': np.ones(8, np.float32)}}},
    'state': {'step': np.int32(2), 'param_states': {'0': {'count': np.int32(2)}}},
  }
  with checkpoints.CheckpointManager(
    tmp_path / 'run', save_cfg=checkpoints.SaveCheckpointConfig(period=2)
  ) as manager:
    manager.save(2, state, metadata={'param_layout': 't5'})
    manager.wait()


def test_the_directory_of_another_model_is_rejected_before_compiling(capsys, tmp_path):
  _save_a_run(tmp_path)
  before = sorted(path.name for path in (tmp_path / 'run').iterdir())
  message = _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  assert 'stored (8,), wanted (64,)' in message and 'another MODEL_DIR' in message
  assert (
    'ompil' not in message and sorted(path.name for path in (tmp_path / 'run').iterdir()) == before
  )


def test_fewer_steps_than_were_taken_are_rejected(capsys, tmp_path):
  _save_a_run(tmp_path)
  message = _error_of_any(
    capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}', '--gin.TRAIN_STEPS=1']
  )
  assert 'checkpoint_2 is at step 2, past the end of the run at step 1' in message


def test_a_damaged_checkpoint_is_named_to_the_user(capsys, tmp_path):
  _save_a_run(tmp_path)
  (tmp_path / 'run' / 'checkpoint_2' / 'manifest.json').write_text('{')
  message = _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  assert 'checkpoint_2' in message and 'damaged' in message and 'another MODEL_DIR' in message


def test_a_file_with_the_name_of_a_folder_of_the_run(capsys, tmp_path):
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / 'train').write_text('a file')
  message = _error_of_any(capsys, [*_RECIPE, f'--gin.MODEL_DIR={tmp_path / "run"}'])
  assert str(tmp_path / 'run' / 'train') in message


def test_control_characters_do_not_break_the_table_of_predictions():
  lines = report.prediction_table([{'targets': 'if', 'prediction': 'a\x00\x1b[2J\r\n\udc80'}])
  assert all(line.isprintable() for line in lines) and r'a\x00\x1b[2J\r\n\udc80' in lines[-1]


@pytest.mark.parametrize('below', [False, True])
def test_a_model_directory_that_cannot_be_one(capsys, tmp_path, below):
  file = tmp_path / 'file'
  file.write_text('a file')
  path = file / 'below' if below else file
  status = cli.main(['train', *_RECIPE, f'--gin.MODEL_DIR={path}'])
  err = capsys.readouterr().err
  assert status == 2 and 'Traceback' not in err and str(path) in err
  assert 'it is a file, or in one' in err and 'Choose another MODEL_DIR' in err


def test_a_model_directory_of_another_scheme_is_rejected(capsys):
  status = cli.main(['train', *_RECIPE, '--gin.MODEL_DIR=ftp://bucket/run'])
  err = capsys.readouterr().err
  assert status == 2 and 'ftp://bucket/run' in err
