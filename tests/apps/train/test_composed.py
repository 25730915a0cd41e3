"""Options of training together, by the command: killed and resumed, a run equals an uninterrupted one bitwise."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import gin
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import gin_utils
from t5x_lite import runtime
from t5x_lite import tree_utils
from t5x_lite.apps.common import runs
from t5x_lite.command_line import cli
from t5x_lite.configuration import syntax as gin_syntax
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]
_TINY = {
  'network.T5Config.emb_dim': '8',
  'network.T5Config.num_heads': '2',
  'network.T5Config.head_dim': '4',
  'network.T5Config.mlp_dim': '8',
  'network.T5Config.num_encoder_layers': '1',
  'network.T5Config.num_decoder_layers': '1',
  'BATCH_SIZE': '8',
  'EVAL_STEPS': '2',
  'DATA_SOURCE': "'builtin'",
  'TASK_FEATURE_LENGTHS': "{'inputs': 16, 'targets': 4}",
  'EVAL_PERIOD': '30',
  'SAVING_PERIOD': '25',
}
_HEAD = """
from __gin__ import dynamic_registration

from t5x_lite.trainer import averaging
from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite import schedules
from t5x_lite.trainer import step_params
from t5x_lite import trainer
from t5x_lite.apps import train as train_script
from t5x_lite.checkpoints import builders
"""
# A mesh rule, a chain of builders, two evaluations by name, an average, saves of the best.
_FIRST = (
  _HEAD
  + """
MESH_RULES = [('gpu-.*', None), ('cpu-8', '''
    partitioning.PjitPartitioner.num_partitions = 2
    trainer.Trainer.num_microbatches = 2
''')]
checkpoints.CheckpointConfig.restore = @checkpoints.RestoreCheckpointConfig()
checkpoints.RestoreCheckpointConfig.builders = [@builders.Average(), @builders.Subtree(), @builders.StartAtStep()]
builders.Average.path = {sources}
builders.Subtree.prefix = 'wrapped'
builders.StartAtStep.step = 10

train_script.train.infer_eval_dataset_cfg = None
train_script.train.evaluations = [@seen/evaluation.Evaluation(), @texts/evaluation.Evaluation()]
seen/evaluation.Evaluation:
  name = 'seen'
  dataset_cfg = @seen/data.DatasetConfig()
  num_batches = 1
  when = @seen/evaluation.When()
seen/data.DatasetConfig:
  split = 'train'
  shuffle = False
  seed = 1
  pack = False
seen/evaluation.When:
  period = 20
  at_start = True
  condition = @evaluation.Threshold()
evaluation.Threshold:
  metric = 'loss'
  above = 0.0
texts/evaluation.Evaluation:
  name = 'texts'
  dataset_cfg = @infer_eval/data.DatasetConfig()
  decode = True
  infer_eval_cfg = @texts/evaluation.InferenceEvalConfig()
  when = @texts/evaluation.When()
texts/evaluation.InferenceEvalConfig.num_examples = 8
texts/evaluation.When:
  steps = [50]
  at_end = True

train_script.train.param_ema = @averaging.ParamEma()
averaging.ParamEma:
  decay = 0.9
  debias = True
  start_step = 20
checkpoints.SaveCheckpointConfig:
  policies = [@checkpoints.WhenBest()]
  keep = 3
checkpoints.WhenBest:
  metric_name = 'training_eval/seen/python_keyword_cloze/loss'
  mode = 'min'
trainer.Trainer.param_noise = @step_params.GaussianParamNoise()
step_params.GaussianParamNoise.stddevs = [('kernel$', 0.001)]
"""
)
# The end of the data, frozen parameters, bfloat16 parameters with stochastic rounding, the dtype of the step, clipped
# gradients.
_SECOND = (
  _HEAD
  + """
MESH_RULES = [('cpu-.*', None)]
TRAIN_STEPS = None
NUM_EPOCHS = 1
schedules.create_learning_rate_scheduler.steps_per_cycle = 171
train_script.train.infer_eval_dataset_cfg = None
train_script.train.param_ema = @averaging.ParamEma()
averaging.ParamEma.decay = @averaging.Warmup()
averaging.Warmup.decay = 0.99
trainer.Trainer.train_dtype = [('layer_norm', 'float32'), ('.*', 'bfloat16')]
GRADIENT_CLIP_NORM = 0.5
OPTIMIZER = @optimizers.with_update_options()
optimizers.with_update_options:
  optimizer = @optimizers.MultiOptimizer()
  learning_rate_scales = [('logits', 0.5)]
  weight_decay_scales = [('scale$', 0.0)]
  param_dtype = 'bfloat16'
  stochastic_rounding = True
optimizers.MultiOptimizer.traversals_and_optimizers = [('decoder/', @optimizers.adamw())]
optimizers.adamw.weight_decay = 0.01
"""
)


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


def _make_sources(folder):
  """Save two checkpoints of a model inside another one, and return their paths."""
  flags = [
    gin_syntax.read_flag(name, value, f'--gin.{name}={value}')
    for name, value in {**_TINY, 'MODEL_DIR': "'x'"}.items()
  ]
  model = gin_utils.load(runs.ENTRY, gin_utils.read(['recipes/keyword_cloze.gin'], flags)).argument(
    'model'
  )
  gin.clear_config()
  batch = {
    'encoder_input_tokens': (1, 8),
    'decoder_input_tokens': (1, 4),
    'decoder_target_tokens': (1, 4),
  }
  shapes = jax.eval_shape(
    lambda key: model.get_initial_variables(key, batch)['params'], jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  with checkpoints.CheckpointManager(
    folder, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for step in (1, 2):
      tree = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype) / 4, shapes
      )
      manager.save(step, {'target': {'wrapped': tree}, 'state': {'step': np.int32(step)}})
  return [str(folder / f'checkpoint_{step}') for step in (1, 2)]


def _arguments(gin_file, run, options):
  return [
    'train',
    '--gin_file=recipes/keyword_cloze.gin',
    f'--gin_file={gin_file}',
    f'--gin.MODEL_DIR={run}',
    *(f'--gin.{name}={value}' for name, value in {**_TINY, **options}.items()),
  ]


def _kill_after(arguments, run, step):
  """Start the command in another process, and kill it when the checkpoint of `step` or a later one exists."""
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(_ROOT)}
  process = subprocess.Popen(
    [sys.executable, '-m', 't5x_lite', *arguments],
    cwd=_ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  while process.poll() is None and (checkpoints.latest_step(run) or 0) < step:
    time.sleep(0.005)
  process.send_signal(signal.SIGKILL)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == -signal.SIGKILL, output


def _assert_same(a, b, step):
  toy_run.assert_same_run(a, b, step)
  assert checkpoints.all_steps(a) == checkpoints.all_steps(b)


def test_mesh_rule_builders_evaluations_average_and_best(tmp_path, capsys):
  gin_file, whole, killed = tmp_path / 'run.gin', tmp_path / 'whole', tmp_path / 'killed'
  gin_file.write_text(_FIRST.format(sources=_make_sources(tmp_path / 'sources')))
  options = {'TRAIN_STEPS': '160'}
  assert cli.main(_arguments(gin_file, whole, options)) == 0
  log = capsys.readouterr().err
  for words in (
    "rule 'cpu-8' sets",
    'the average of 2 checkpoints',
    'then a new first step at step 10, to step 160',
    'An average of the parameters is kept and evaluated',
    'param_noise = GaussianParamNoise',
  ):
    assert words in log
  _kill_after(_arguments(gin_file, killed, options), killed, 50)
  assert cli.main(_arguments(gin_file, killed, options)) == 0
  assert '(this run) at step' in capsys.readouterr().err
  _assert_same(whole, killed, 160)
  rows = toy_run.lines(whole)
  assert [row['step'] for row in rows['training_eval/seen/python_keyword_cloze']] == [
    10,
    20,
    40,
    60,
    80,
    100,
    120,
    140,
    160,
  ]
  assert [row['step'] for row in rows['inference_eval/texts/python_keyword_cloze']] == [50, 160]
  kinds = [event.kind for event in runtime.read_events(killed / 'events.jsonl')]
  assert kinds.count('start') == 2 and kinds[-1] == 'summary'
  assert cli.main(['eval', str(whole), f'--gin.EVAL_OUTPUT_DIR={tmp_path}/out', '--dry_run']) == 0
  assert 'checkpoint_160, then param_average as parameters' in capsys.readouterr().out


def test_end_of_data_frozen_parameters_and_dtypes(tmp_path, capsys):
  gin_file, whole, killed = tmp_path / 'run.gin', tmp_path / 'whole', tmp_path / 'killed'
  gin_file.write_text(_SECOND)
  options = {'BATCH_SIZE': '64'}
  assert cli.main(_arguments(gin_file, whole, options)) == 0
  log = capsys.readouterr().err
  assert 'The training data ended after step' in log and 'no gradients for' in log
  last = checkpoints.latest_step(whole)
  _kill_after(_arguments(gin_file, killed, options), killed, 25)
  assert cli.main(_arguments(gin_file, killed, options)) == 0
  _assert_same(whole, killed, last)
  state = tree_utils.flatten_dict(checkpoints.load(whole / f'checkpoint_{last}'))
  assert not any(
    'encoder/layers' in name for name in state if name.startswith('state/param_states')
  )
  assert [event.kind for event in runtime.read_events(whole / 'events.jsonl')][-1] == 'summary'
