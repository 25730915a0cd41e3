"""Log of batches and steps, and a run of the command with all that a run says about itself."""

import io
import re
import time
import types

import clu.metrics
import gin
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import metrics as metrics_lib
from t5x_lite import runtime
from t5x_lite.apps import train as train_script
from t5x_lite.apps.train.step_log import StepLog
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError
from t5x_lite.trainer import summaries
from t5x_lite.trainer.actions import BaseAction
from tests import event_files
from tests.apps.train import toy_run


@pytest.fixture
def clock():
  return types.SimpleNamespace(now=0.0)


@pytest.fixture
def make(tmp_path, clock):
  """Return a function that makes (log, its output, metrics manager of `tmp_path / 'train'`) of a configuration."""

  def build(first_step=0, devices=(), speed_fn=lambda seconds: '', **options):
    stream, manager = io.StringIO(), summaries.MetricsManager('train', tmp_path)
    memory = (
      runtime.DeviceMemory(devices)
      if devices
      else types.SimpleNamespace(metrics=dict, describe=str)
    )
    log = StepLog(
      train_script.LogConfig(**options),
      runtime.Progress(stream=stream, process=0),
      memory,
      manager,
      first_step,
      speed_fn=speed_fn,
      clock=lambda: clock.now,
    )
    return log, stream, manager

  return build


def _metrics(step):
  """Return the metrics of a step as the trainer passes them."""
  return {
    'loss': metrics_lib.AveragePerStep.from_model_output(jnp.float32(100 - step)),
    'accuracy': clu.metrics.LastValue.from_model_output(jnp.float32([0.5])),
    'router_z_loss': metrics_lib.AveragePerStep.from_model_output(jnp.float32(0.25)),
    'timing/seqs_per_second': metrics_lib.TimeRate.from_model_output(8.0),
    'statistics': metrics_lib.OfLastStep.join({'weight_rms/a': metrics_lib.Sum(jnp.float32(0))}),
  }


def _run(log, clock, steps, seconds=0.5):
  log.start_clock()
  for step in steps:
    clock.now += seconds
    log.on_step(step, _metrics(step))


def test_steps_after_the_start_and_then_every_period(make, clock, tmp_path):
  log, stream, manager = make(first_step=4, num_first_steps=2, period=10)
  _run(log, clock, range(5, 14))
  clock.now += 1000  # an evaluation
  _run(log, clock, range(14, 32), seconds=0.25)
  # After a rollback.
  _run(log, clock, [3, 4])
  manager.flush()
  lines = stream.getvalue().splitlines()
  assert lines == [
    f'[process 0] step {step}  loss {100 - step}  accuracy 0.5  router_z_loss 0.25  {seconds} s/step'
    for step, seconds in ((5, 0.5), (6, 0.5), (10, 0.5), (20, 0.325), (30, 0.25))
  ]
  assert [
    (step, round(value, 6))
    for step, name, value in event_files.scalars(tmp_path / 'train')
    if name == 'timing/average_step_seconds'
  ] == [(10, 0.5), (20, 0.325), (30, 0.25)]
  assert not summaries.read_metrics(tmp_path / 'train/metrics.jsonl')


def test_the_speed_of_steps_is_that_of_their_average_time(make, clock):
  log, stream, _ = make(
    num_first_steps=0, period=4, speed_fn=lambda seconds: f'{1 / seconds:g} per s'
  )
  _run(log, clock, [1, 2])
  _run(log, clock, [3, 4], seconds=0.25)
  assert '  0.375 s/step  2.66667 per s' in stream.getvalue()


def test_parts_of_a_loss_are_shown_if_it_has_several(make):
  log, stream, _ = make()
  parts = {
    'cross_ent_loss': 2.0,
    'z_loss': 0.0,
    'experts/auxiliary_loss': 0.5,
    'experts/encoder/layers_0/router_loss': 1.0,
  }
  log.on_step(
    1,
    {
      'loss': metrics_lib.Sum(2.5),
      **{name: metrics_lib.Sum(value) for name, value in parts.items()},
    },
  )
  parts.update({'experts/auxiliary_loss': 0.0})
  log.on_step(
    2,
    {
      'loss': metrics_lib.Sum(2.5),
      **{name: metrics_lib.Sum(value) for name, value in parts.items()},
    },
  )
  first, second = stream.getvalue().splitlines()
  # `moe` decides whether metrics of experts are among those that are always shown.
  assert sorted(first.split('  ')) == [
    '0 s/step',
    '[process 0] step 1',
    'cross_ent_loss 2',
    'experts/auxiliary_loss 0.5',
    'loss 2.5',
  ]
  assert second.startswith('[process 0] step 2  loss 2.5  ') and 'cross_ent' not in second


def test_no_lines_on_request(make, clock, tmp_path):
  log, stream, manager = make(num_first_steps=0, period=None, num_batches=0)
  batches = iter([{'x': np.zeros((2, 3))}] * 4)
  assert log.logged(batches) is batches
  _run(log, clock, range(1, 201))
  manager.flush()
  assert not stream.getvalue() and not (tmp_path / 'train').exists()


def test_shapes_of_the_first_batches(make):
  log, stream, _ = make()
  batches = [
    {'y': np.zeros((2, rows), np.int32), 'x': np.zeros(2, np.float32)} for rows in (3, 3, 4, 5)
  ]
  # Each stretch of steps has its own iterator; no batch is read ahead.
  source = iter(batches)
  assert next(log.logged(source)) is batches[0] and next(source) is batches[1]
  assert [id(batch) for batch in log.logged(iter(batches[1:]))] == [
    id(batch) for batch in batches[1:]
  ]
  assert stream.getvalue().splitlines() == [
    '[process 0] Batch 1: x float32[2]  y int32[2, 3]',
    '[process 0] Batch 2: the same shapes',
    '[process 0] Batch 3: x float32[2]  y int32[2, 4]',
  ]


def test_memory_joins_the_metrics_and_the_lines(make, clock, tmp_path):
  device = types.SimpleNamespace(
    id=0, platform='gpu', memory_stats=lambda: {'bytes_in_use': 1024 * int(clock.now)}
  )
  log, stream, manager = make(devices=[device], num_first_steps=0, period=2)
  _run(log, clock, range(1, 5), seconds=1.0)
  manager.start_duration_timer()
  manager.write_metrics_summary({'loss': _metrics(4)['loss']}, 4, 1).result()
  manager.flush()
  assert [line.partition('s/step')[2] for line in stream.getvalue().splitlines()] == [
    '  memory 2.00 KiB, peak 0 B',
    '  memory 4.00 KiB, peak 0 B',
  ]
  (row,) = summaries.read_metrics(tmp_path / 'train' / 'metrics.jsonl')
  assert (
    row['loss'] == 96
    and row['memory/bytes_in_use/device_0'] == 4096
    and row['memory/num_devices'] == 1
  )


def test_the_time_of_a_step_excludes_evaluations(tmp_path):
  slept = []

  class Sleep(BaseAction):
    def run(self, train_state, metrics_by_task):
      if not slept:
        slept.append(time.sleep(4))
      return False

  toy_run.train(
    tmp_path,
    6,
    eval_period=5,
    infer_eval_dataset_cfg=None,
    actions={'TRAIN_EVAL': [Sleep()]},
    log_cfg=train_script.LogConfig(num_first_steps=0, period=6),
  )
  ((step, seconds),) = [
    (step, value)
    for step, name, value in event_files.scalars(tmp_path / 'train')
    if name == 'timing/average_step_seconds'
  ]
  assert step == 6 and 0 < seconds < 4 / 6


@pytest.mark.parametrize('options', [{'period': 0}, {'num_batches': -1}, {'num_first_steps': 1.5}])
def test_options_out_of_range(options):
  with pytest.raises(ConfigError, match=f'LogConfig.{next(iter(options))}` must be an integer >= '):
    train_script.LogConfig(**options)


_GIN = """
from __gin__ import dynamic_registration
from t5x_lite import runtime
from t5x_lite.apps import train as train_script
from t5x_lite.networks import t5 as network
include 'recipes/keyword_cloze.gin'
train_script.train:
  log_cfg = @train_script.LogConfig()
  profile_steps = @runtime.ProfileConfig()
  infer_eval_dataset_cfg = None
train_script.LogConfig:
  num_first_steps = 2
  period = 4
runtime.ProfileConfig:
  start_steps = (2, 6)
  num_steps = 2
network.T5Config:
  emb_dim = 8
  num_heads = 2
  head_dim = 4
  mlp_dim = 8
  num_encoder_layers = 1
  num_decoder_layers = 1
TASK_FEATURE_LENGTHS = {'inputs': 24, 'targets': 4}
BATCH_SIZE = 8
EVAL_STEPS = 1
TRAIN_STEPS = 9
"""


def test_log_and_files_of_a_run_of_the_command(tmp_path, capsys):
  model_dir = tmp_path / 'run'
  (tmp_path / 'small.gin').write_text(_GIN)
  command = ['train', f'--gin_file={tmp_path}/small.gin', f'--gin.MODEL_DIR={model_dir}']
  status = cli.main([*command, '--log_level=debug'])
  gin.clear_config()
  lines = capsys.readouterr().err.splitlines()
  assert status == 0, lines
  assert all(re.match(r'\[process 0\] ', line) for line in lines)
  after_start = lines[next(i for i, line in enumerate(lines) if 'Starting from' in line) :]
  assert all(re.match(r'\[process 0\] step +\d+', line) for line in after_start)
  text = '\n'.join(lines)
  for step in (1, 2, 4, 8):
    assert re.search(
      rf'^\[process 0\] step {step}  loss \S+  accuracy \S+  learning_rate \S+  '
      r'cross_ent_loss \S+  z_loss \S+  \S+ s/step  \S+ tokens/s  \S+ TFLOP/s per device$',
      text,
      re.M,
    )
  assert text.count('s/step') == 4
  assert re.search(r' Batch 1: decoder_input_tokens int32\[8, 4\]  .*\n.* Batch 2: the same', text)
  for line in (
    r'the training step .*; step and state: \d+ programs in \S+ s, \w+ from the',
    r'State: \d+ arrays of ',
    r'step 0  (Compiled|Loaded) \S*step_fn\S* in \S+ s\.',
    r'Prepared the evaluation training_eval: 1 program in ',
  ):
    assert re.search(line, text), line

  num_params = int(re.search(r'([\d,]+) parameters on', text)[1].replace(',', ''))
  scalars = {(step, name): value for step, name, value in event_files.scalars(model_dir / 'train')}
  assert scalars[0, 'state/num_params'] == num_params and scalars[0, 'state/bytes'] > 4 * num_params
  assert (
    scalars[4, 'timing/average_step_seconds'] > 0 and scalars[8, 'timing/average_step_seconds'] > 0
  )

  # The lines of the tree are the arrays of the checkpoint.
  header, _, *rows = (model_dir / 'trainer_state_tree.txt').read_text().splitlines()
  assert header.split() == ['name', 'dtype', 'shape', 'mesh', 'axes']
  found = {
    name: (dtype, shape)
    for name, dtype, shape in (re.match(r'(\S+) +(\S+) +(\[.*?\])', row).groups() for row in rows)
  }
  saved = checkpoints.read_shapes(model_dir / 'checkpoint_9')
  assert found == {
    name: (np.dtype(leaf.dtype).name, str(list(leaf.shape))) for name, leaf in saved.items()
  }
  (row,) = (row for row in rows if row.startswith('target/encoder/layers_0/mlp/wi_0/kernel '))
  assert row.endswith('  (None, model)')
  assert {path.name for path in (model_dir / 'train/plugins/profile').iterdir()} == {
    'step_2',
    'step_6',
  }

  # Without debug, compiled programs have no names; at the level of warnings nothing is said.
  assert cli.main([*command, '--gin.TRAIN_STEPS=10', '--log_level=warning']) == 0
  gin.clear_config()
  assert not capsys.readouterr().err
