"""`t5x_lite eval`: checkpoints of a run, resuming, T5X's gin files, kills, and errors."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import gin
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.command_line import cli
from tests.apps.common import cloze_run

_ROOT = pathlib.Path(__file__).parents[3]
_MODEL = [
  '--gin_file=recipes/keyword_cloze.gin',
  '--gin.network.T5Config.num_encoder_layers=1',
  '--gin.network.T5Config.num_decoder_layers=1',
  '--gin.network.T5Config.emb_dim=8',
  '--gin.network.T5Config.mlp_dim=8',
  '--gin.network.T5Config.head_dim=4',
  "--gin.TASK_FEATURE_LENGTHS={'inputs': 24, 'targets': 4}",
  '--gin.BATCH_SIZE=8',
  '--gin.DATA_SOURCE=builtin',
]
_FEW = '--gin.evaluation.InferenceEvalConfig.num_examples=20'


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A directory as a training run leaves it, with checkpoints of the steps 1 and 2; the parameters are random."""
  model_dir = tmp_path_factory.mktemp('run') / 'cloze'
  configuration = cloze_run.write_config(model_dir, _MODEL[1:])
  model, shapes = (
    configuration.argument('model'),
    {'encoder_input_tokens': (8, 24), 'decoder_input_tokens': (8, 4)},
  )
  params = jax.jit(lambda: model.get_initial_variables(jax.random.key(0), shapes)['params'])()
  np.save(model_dir / 'parameters.npy', jax.device_get(params), allow_pickle=True)
  _save(model_dir, 1)
  _save(model_dir, 2)
  gin.clear_config()
  return model_dir


def _save(model_dir, step):
  params = np.load(model_dir / 'parameters.npy', allow_pickle=True).item()
  state = {
    'target': jax.tree.map(lambda x: x * (1 + step / 10), params),
    'state': {'step': np.int32(step), 'param_states': {'0': {'count': np.int32(step)}}},
  }
  with checkpoints.CheckpointManager(
    model_dir, save_cfg=checkpoints.SaveCheckpointConfig(period=1)
  ) as manager:
    manager.save(step, state, metadata={'param_layout': 't5'})


def _main(capsys, *argv):
  status = cli.main(['eval', *map(str, argv)])
  captured = capsys.readouterr()
  gin.clear_config()
  return status, captured.out, captured.err


def test_all_checkpoints_of_a_run_and_those_that_come_later(run, tmp_path, capsys):
  flags = [
    run,
    '--all',
    _FEW,
    f'--gin.EVAL_OUTPUT_DIR={tmp_path / "out"}',
    '--gin.eval_script.evaluate.best_metric=inference_eval/mean/exact_match',
  ]
  status, out, _ = _main(capsys, *flags, '--dry_run')
  assert (
    status == 0 and 'will be evaluated on 3 batches each' in out and 'InferenceEvalConfig:' in out
  )
  assert not (tmp_path / 'out').exists()
  status, out, err = _main(capsys, *flags)
  assert (
    status == 0
    and f'Evaluating {run}/checkpoint_1: ' in err
    and f'Evaluating {run}/checkpoint_2: ' in err
  )
  assert 'step 2  inference_eval/python_keyword_cloze: exact_match' in err
  assert out.splitlines()[:3] == [
    'inference_eval',
    '  step  task                  exact_match',
    '  ----  --------------------  -----------',
  ]
  assert 'Best by inference_eval/mean/exact_match (max): step 2' in out and 'Results are in' in out
  names = {path.name for path in (tmp_path / 'out').iterdir()}
  assert names == {'.lock', 'config.gin', 'evaluated.json', 'best.json', 'inference_eval'}
  _save(run, 3)
  status, again, err = _main(capsys, *flags)
  assert status == 0 and '2 checkpoint(s) are already evaluated' in err
  assert 'checkpoint_3: ' in err and 'checkpoint_2: ' not in err
  assert again.splitlines()[3:5] == out.splitlines()[3:5] and again.splitlines()[5].startswith(
    '  3 '
  )
  # Another way to decode would give other results.
  status, _, err = _main(capsys, *flags, '--gin.vocabularies.ByteVocabulary.extra_ids=124')
  assert status == 2
  lines = (
    (tmp_path / 'out/inference_eval/python_keyword_cloze/metrics.jsonl').read_text().splitlines()
  )
  assert [json.loads(line)['step'] for line in lines] == [1, 2, 3]


def test_the_newest_checkpoint_goes_to_a_folder_of_the_run(run, capsys):
  status, out, _ = _main(capsys, run, _FEW)
  assert status == 0 and f'Results are in {run}/eval.' in out
  assert (run / 'eval/inference_eval/python_keyword_cloze/predictions-3.jsonl').exists()


def test_given_targets_and_another_setting_of_the_same_folder(run, tmp_path, capsys):
  (tmp_path / 'more.gin').write_text(
    'from __gin__ import dynamic_registration\nfrom t5x_lite import trainer\n'
    'TRAINING_EVALUATOR = @trainer.Trainer\n'
  )
  flags = [
    *_MODEL,
    f'--gin_file={tmp_path}/more.gin',
    f'--gin.CHECKPOINT_PATH={run}/checkpoint_2',
    _FEW,
    f'--gin.EVAL_OUTPUT_DIR={tmp_path}/out',
  ]
  status, out, _ = _main(capsys, *flags, '--gin.eval_script.evaluate.eval_steps=2')
  assert status == 0 and 'training_eval\n  step  task                  loss' in out
  status, _, err = _main(
    capsys,
    *flags,
    '--gin.eval_script.evaluate.eval_steps=2',
    '--gin.models.EncoderDecoderModel.z_loss=0.1',
  )
  assert (
    status == 2 and 'models.EncoderDecoderModel.z_loss was' in err and 'another output_dir' in err
  )


@pytest.mark.full  # by default, tests/data/seqio/test_evaluator.py compares metrics
def test_seqios_evaluator_as_t5x_binds_it(run, tmp_path, capsys):
  pytest.importorskip('seqio')
  (tmp_path / 'seqio.gin').write_text("""
from __gin__ import dynamic_registration
import seqio

DATA_SOURCE = 'seqio'
INFERENCE_EVALUATOR = @seqio.Evaluator
seqio.Evaluator:
  logger_cls = [@seqio.PyLoggingLogger, @seqio.TensorBoardLogger, @seqio.JSONLogger]
  num_examples = 20
  use_memory_cache = True
""")
  model = [flag for flag in _MODEL if 'DATA_SOURCE' not in flag]
  out_dir = tmp_path / 'out'
  status, out, err = _main(
    capsys,
    *model,
    f'--gin_file={tmp_path}/seqio.gin',
    f'--gin.EVAL_OUTPUT_DIR={out_dir}',
    f'--gin.CHECKPOINT_PATH={run}/checkpoint_2',
  )
  assert status == 0, err
  assert 'python_keyword_cloze/exact_match at step 2: ' in err
  theirs = json.loads((out_dir / 'inference_eval/python_keyword_cloze-metrics.jsonl').read_text())
  status, _, _ = _main(
    capsys, f'{run}/checkpoint_2', _FEW, f'--gin.EVAL_OUTPUT_DIR={tmp_path}/ours'
  )
  ours = json.loads(
    (tmp_path / 'ours/inference_eval/python_keyword_cloze/metrics.jsonl').read_text()
  )
  assert status == 0 and theirs['exact_match'] == ours['exact_match']


@pytest.mark.parametrize(
  'flags, fragments',
  [
    ([], ['RUN is missing', 't5x_lite eval runs/my_run']),
    (['--all'], ['--all requires a run directory, got no RUN']),
    (['{run}/checkpoint_1', '--all'], ['--all requires a run directory, got ', 'checkpoint_1']),
    (['{run}x'], ['got a missing path', 'Did you mean']),
    (['{run}', '--gin.CHECKPOINT_PATH=x'], ['must choose a checkpoint, got both']),
    (['{run}', '--gin.MIXTURE_OR_TASK_SPLIT=valid'], ["no split 'valid'", 'validation']),
    (
      ['{run}', '--gin.MIXTURE_OR_TASK_NAME=python_keyword_close'],
      ["Did you mean 'python_keyword_cloze'?"],
    ),
    (['{run}', '--gin.BATCH_SIZE=9'], ['9', '8']),
    (
      ['{run}', '--gin.evaluation.InferenceEvalConfig.num_examples=0'],
      ['num_examples` must be', 'got 0.'],
    ),
    (['{run}', '--gin.evaluation.InferenceEvalConfig.num_exampels=1'], ["mean 'num_examples'"]),
    (
      [
        '{run}',
        '--gin.eval_script.evaluate.best_metric=inference_eval/python_keyword_cloze/exact_mach',
      ],
      ["mean 'inference_eval/python_keyword_cloze/exact_match'"],
    ),
    (
      ['{run}', '--gin.eval_script.evaluate.best_metric_mode=maximum'],
      ["must be one of 'max', 'min'", "mean 'max'"],
    ),
    (['{run}', '--gin.network.T5Config.emb_dim=16'], ['does not fit', 'stored (8,), wanted (16,)']),
    (
      ['{run}', '--gin.vocabularies.ByteVocabulary.extra_ids=100'],
      ['ByteVocabulary(125), got ByteVocabulary(100)'],
    ),
    (['{run}', '--gin.EVAL_OUTPUT_DIR={run}'], ['not a run directory', 'EVAL_OUTPUT_DIR']),
    (['{run}', '--gin.EVAL_OUTPUT_DIR={run}/config.gin'], ['config.gin', 'cannot be written']),
    ([*_MODEL, '--gin.CHECKPOINT_PATH={run}'], ['EVAL_OUTPUT_DIR']),
    (
      [*_MODEL, '--gin.CHECKPOINT_PATH={run}', '--gin.EVAL_OUTPUT_DIR={tmp}/out'],
      ['is a run directory'],
    ),
    (
      [
        *_MODEL,
        '--gin.CHECKPOINT_MODE=al',
        '--gin.CHECKPOINT_PATH={run}',
        '--gin.EVAL_OUTPUT_DIR={tmp}/out',
      ],
      ["must be one of 'specific', 'latest', 'all', got 'al'"],
    ),
  ],
)
def test_rejected(run, tmp_path, capsys, flags, fragments):
  flags = [flag.format(run=run, tmp=tmp_path) if 'inputs' not in flag else flag for flag in flags]
  if (
    flags
    and not any('EVAL_OUTPUT_DIR' in flag for flag in flags)
    and fragments != ['EVAL_OUTPUT_DIR']
  ):
    flags.append(f'--gin.EVAL_OUTPUT_DIR={tmp_path}/out')
  status, out, err = _main(capsys, *flags)
  assert status == 2 and not out and 'Traceback' not in err
  assert err.startswith('t5x_lite: error: ') and len(err) < 800
  for fragment in fragments:
    assert fragment in err
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('name', ['exact_match', 'python_keyword_cloze/exact_mach'])
def test_the_proposed_metric_is_accepted(run, tmp_path, capsys, name):
  flag = '--gin.eval_script.evaluate.best_metric='
  # Rejected after the metric.
  others = [f'--gin.EVAL_OUTPUT_DIR={tmp_path}/out', '--gin.network.T5Config.emb_dim=16']
  _, _, message = _main(capsys, str(run), f'{flag}{name}', *others)
  assert 'best_metric` must be' in message
  metric = name.rpartition('/')[2]
  assert f"Did you mean 'inference_eval/python_keyword_cloze/{metric}'?" in message
  # The first message completes the name; the second knows the metrics of the task, and corrects it.
  for _ in range(2):
    proposed = re.search(r"Did you mean '(inference_eval/python_keyword_cloze/.+?)'", message)
    if proposed:
      _, _, message = _main(capsys, str(run), f'{flag}{proposed[1]}', *others)
  assert 'best_metric' not in message and 'stored (8,), wanted (16,)' in message


@pytest.mark.full
def test_train_and_kill_the_evaluation_at_any_moment(tmp_path, capsys):
  """The script is killed repeatedly, each time a little later, until it finishes."""
  run = tmp_path / 'run'
  assert (
    cli.main(
      [
        'train',
        *_MODEL,
        f'--gin.MODEL_DIR={run}',
        '--gin.TRAIN_STEPS=2',
        '--gin.SAVING_PERIOD=1',
        '--gin.EVAL_STEPS=1',
      ]
    )
    == 0
  )
  gin.clear_config()
  capsys.readouterr()
  out, num_examples = tmp_path / 'out', '--gin.evaluation.InferenceEvalConfig.num_examples=200'
  command = [
    sys.executable,
    _ROOT / 'scripts/eval.py',
    run,
    '--all',
    f'--gin.EVAL_OUTPUT_DIR={out}',
    num_examples,
  ]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  for seconds in range(4, 60):
    process = subprocess.Popen(
      [*map(str, command)],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    started = time.time()
    while process.poll() is None and time.time() - started < seconds / 2:
      time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    if process.returncode == 0:
      break
    assert process.returncode == -signal.SIGKILL, err
  status, plain, _ = _main(
    capsys, run, '--all', f'--gin.EVAL_OUTPUT_DIR={tmp_path}/plain', num_examples
  )
  assert status == 0 and plain

  def lines(folder):
    path = folder / 'inference_eval/python_keyword_cloze/metrics.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != 'wall_time'} for row in rows]

  assert lines(out) == lines(tmp_path / 'plain')
