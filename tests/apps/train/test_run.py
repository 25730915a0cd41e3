"""Training runs: files, errors, starting points, and reasons to stop."""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import signal

import clu.values
import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import runtime
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import report
from t5x_lite.apps.train import step_log
from t5x_lite.errors import ConfigError, DataError, DirectoryInUseError, NonFiniteMetricError
from t5x_lite.trainer import summaries
from t5x_lite.trainer.actions import BaseAction
from t5x_lite.trainer.actions import EarlyStoppingAction
from t5x_lite.trainer.actions import TerminateOnNanAction
from tests.apps.train import toy_run
from tests.models import toy_model


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run of 20 steps with all options, its output, and the arguments of its hooks."""
  model_dir, told, events = tmp_path_factory.mktemp('finished'), [], []

  def fail(event):
    raise ValueError(event.kind)

  def summarize_config(where, writer, step):
    told.append((where, step))
    writer.write_text(step, {'config': 'x = 1'})

  class Look(BaseAction):
    def run(self, train_state, metrics_by_task):
      told.append(
        (int(train_state.step), {task: set(metrics) for task, metrics in metrics_by_task.items()})
      )
      return False

  with pytest.MonkeyPatch.context() as patch:
    printed = []
    patch.setattr(
      'builtins.print', lambda *args, **kwargs: printed.append(' '.join(map(str, args)))
    )
    step, state = toy_run.train(
      model_dir,
      save={'period': 6, 'checkpoint_steps': [0, 7]},
      summarize_config_fn=summarize_config,
      run_eval_before_training=True,
      gc_period=8,
      event_fns=[fail, events.append],
      actions={'TRAIN': [Look()], 'TRAIN_EVAL': [Look()], 'INFER_EVAL': [Look()]},
    )
  assert step == int(state.step) == 20
  assert list(runtime.read_events(model_dir / 'events.jsonl')) == [
    dataclasses.replace(
      event,
      wall_time=round(event.wall_time, 3),
      seconds={phase: round(seconds, 6) for phase, seconds in event.seconds.items()},
    )
    for event in events
  ]
  return model_dir, '\n'.join(printed), told


def test_layout(finished):
  model_dir, _, _ = finished
  names = {path.name for path in model_dir.iterdir()} - {'.lock'}
  assert names == {
    'model-info.txt',
    'trainer_state_tree.txt',
    'events.jsonl',
    'train',
    'training_eval',
    'inference_eval',
    *(f'checkpoint_{step}' for step in (0, 6, 7, 12, 18, 20)),
  }
  for folder in ('train', 'training_eval/letters', 'inference_eval/letters'):
    found = [path.name for path in (model_dir / folder).iterdir()]
    assert (
      'metrics.jsonl' in found
      and sum(name.startswith('events.out.tfevents') for name in found) == 1
    )
  assert 'embedding' in (model_dir / 'model-info.txt').read_text()


def test_lines(finished):
  lines = toy_run.lines(finished[0])
  # Every 4 steps (summaries), at 6, 7, 12, 18 (saves), 10 and 20 (evaluations), 8 and 16 (collections).
  assert [row['step'] for row in lines['train']] == [4, 6, 7, 8, 10, 12, 16, 18, 20]
  assert [row['step'] for row in lines['training_eval/letters']] == [0, 10, 20]
  assert [row['step'] for row in lines['inference_eval/letters']] == [0, 10, 20]
  assert lines['train'][0]['learning_rate'] == pytest.approx(0.05 * (0 + 1 + 2 + 3) / 4 / 4)
  assert lines['train'][0]['learning_rate/current'] == pytest.approx(0.05 * 3 / 4)
  for name in ('loss', 'accuracy', 'non_padding_fraction/overall'):
    assert all(math.isfinite(row[name]) for row in lines['train'])
  assert {'exact_match', 'step'} == set(lines['inference_eval/letters'][0])


def test_decoding_is_judged_by_the_task(finished):
  model_dir = finished[0]
  lines = (model_dir / 'inference_eval/letters/predictions-20.jsonl').read_text().splitlines()
  predictions = [json.loads(line) for line in lines]
  assert [row['index'] for row in predictions] == list(range(20))
  for row in predictions:
    assert row['inputs'] == row['targets'][::-1]
  right = sum(row['prediction'] == row['targets'] for row in predictions) / 20
  assert toy_run.lines(model_dir)['inference_eval/letters'][-1]['exact_match'] == right
  # The same predictions, one example at a time and by hand.
  params = jax.tree.map(np.asarray, checkpoints.load(model_dir / 'checkpoint_20')['target'])
  table = toy_run.TASK.table('validation', {})
  for row, example in zip(predictions[::7], table.examples(0, np.arange(20))[::7], strict=True):
    inputs = np.zeros((1, toy_run.LENGTH), np.int32)
    inputs[0, 1 : len(example['targets'])] = example['targets'][:-1]
    tokens = toy_run.model().predict_batch(params, {'decoder_input_tokens': inputs})
    assert row['prediction'] == toy_model.ToyVocabulary().decode(np.asarray(tokens)[0].tolist())


def test_teacher_forced_evaluation_counts_each_example_once(finished):
  model_dir = finished[0]
  params = jax.tree.map(np.asarray, checkpoints.load(model_dir / 'checkpoint_20')['target'])
  correct = total = 0
  for example in toy_run.TASK.table('validation', {}).examples(0, np.arange(20)):
    targets = example['targets'][None]
    inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    logits, _ = toy_run.model().compute_logits(params, {'decoder_input_tokens': inputs})
    correct += int((np.argmax(logits, -1) == targets).sum())
    total += targets.size
  assert toy_run.lines(model_dir)['training_eval/letters'][-1]['accuracy'] == pytest.approx(
    correct / total
  )


def test_hooks(finished):
  model_dir, _, told = finished
  assert told[0] == (str(model_dir), 0)
  looks = told[1:]
  assert [step for step, tasks in looks if 'train' in tasks] == [4, 6, 7, 8, 10, 12, 16, 18, 20]
  assert [step for step, tasks in looks if 'train' not in tasks] == [0, 0, 10, 10, 20, 20]
  assert 'loss' in looks[2][1]['train'] and 'exact_match' in looks[1][1]['letters']


def test_events(finished):
  model_dir, printed, _ = finished
  events = list(runtime.read_events(model_dir / 'events.jsonl'))
  events = events[: [event.kind for event in events].index('summary') + 1]
  shown = [
    (event.kind, event.step)
    for event in events
    if event.kind not in ('save_committed', 'warning', 'progress')
  ]  # the last on a slow machine
  evaluation = ['evaluation_begun', 'evaluation_ended']
  assert shown == [
    ('start', None),
    ('restored', 0),
    ('data_sampled', 0),
    ('compiled', 0),
    *((kind, 0) for kind in evaluation),
    ('save_begun', 0),
    ('first_step', 1),
    ('save_begun', 6),
    ('save_begun', 7),
    *((kind, 10) for kind in evaluation),
    ('save_begun', 12),
    ('save_begun', 18),
    *((kind, 20) for kind in evaluation),
    ('save_begun', 20),
    ('stop', 20),
    ('summary', 20),
  ]
  assert [event.details['checkpoint'] for event in events if event.kind == 'save_committed'] == [
    0,
    6,
    7,
    12,
    18,
    20,
  ]
  by_kind = {event.kind: event for event in events}
  assert by_kind['stop'].details == {'cause': 'completed'} and by_kind[
    'evaluation_ended'
  ].details == {'evaluations': ['training_eval', 'inference_eval'], 'is_interrupted': False}
  assert 'ValueError: start' in by_kind['warning'].details['message']  # of the hook that fails
  # The time of the run is all of the time between its first and its last event.
  total = by_kind['summary'].details['total_seconds']
  assert sum(total.values()) == pytest.approx(events[-1].wall_time - events[0].wall_time, abs=0.05)
  assert all(
    total[share] > 0 for share in ('step', 'evaluation', 'saving', 'compiling', 'starting')
  )
  assert total['repeated'] == total['down'] == 0
  shown = float(re.search(r'([\d.]+)% training steps', printed)[1])
  assert shown == pytest.approx(100 * total['step'] / sum(total.values()), abs=0.2)


def test_final_report(finished):
  model_dir, printed, _ = finished
  final = printed[printed.index('Outputs are in') :]
  assert str(model_dir) in final and 'checkpoints' in final
  last = toy_run.lines(model_dir)
  assert f'train, step 20: loss {last["train"][-1]["loss"]:.4g}' in final
  exact_match = last['inference_eval/letters'][-1]['exact_match']
  assert f'inference_eval/letters, step 20: exact_match {exact_match:.4g}' in final
  table = final[final.index('Predictions of letters at step 20') :].splitlines()
  assert table[1].split() == ['target', 'prediction', 'inputs'] and len(table) == 3 + 10


def test_a_complete_run_is_not_trained_again(finished, capsys):
  model_dir = finished[0]
  before = {
    path: path.stat().st_mtime_ns
    for path in model_dir.rglob('*')
    if path.is_file() and path.name != '.lock'
  }
  assert toy_run.train(model_dir)[0] == 20
  out = capsys.readouterr()
  assert 'Compiled' not in out.err and 'Predictions of letters at step 20' in out.out
  changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
  assert changed - {'model-info.txt', 'trainer_state_tree.txt'} == {'events.jsonl'}
  # The time since the run was complete does not count.
  events = list(runtime.read_events(model_dir / 'events.jsonl'))
  assert [event.kind for event in events][-4:] == ['start', 'restored', 'stop', 'summary']
  assert events[-1].details['num_starts'] == 2 and events[-1].details['total_seconds']['down'] == 0


def test_the_runs_own_checkpoint_comes_before_the_configured_one(finished, tmp_path, capsys):
  restore = checkpoints.RestoreCheckpointConfig(str(finished[0]), restore_dataset=False)
  for total, steps in ((21, [21]), (22, [21, 22])):
    assert toy_run.train(tmp_path, total, restore=restore, infer_eval_dataset_cfg=None)[0] == total
    assert checkpoints.all_steps(tmp_path) == steps
    # One line for the last step, with the time of the run, although the step was read before its evaluation.
    (line,) = [
      line
      for line in capsys.readouterr().err.splitlines()
      if line.startswith(f'[process 0] step {total}/{total} (100%)')
    ]
    assert 'loss' in line and 'took' in line
  (a, _), (b, _) = toy_run.saved(tmp_path, 21), toy_run.saved(finished[0], 20)
  assert (
    np.max(np.abs(a['target']['embedding'] - b['target']['embedding'])) < 0.1
  )  # one step away, not a new start


def test_relative_steps_count_from_where_the_run_began(finished, tmp_path):
  restore = checkpoints.RestoreCheckpointConfig(
    str(finished[0] / 'checkpoint_18'), 'specific', restore_dataset=False
  )
  kwargs = {
    'restore': restore,
    'relative_steps': 3,
    'infer_eval_dataset_cfg': None,
    'train_eval_dataset_cfg': None,
  }
  assert toy_run.train(tmp_path, None, **kwargs)[0] == 21
  assert toy_run.train(tmp_path, None, **kwargs)[0] == 21
  assert toy_run.train(tmp_path, None, **{**kwargs, 'relative_steps': 5})[0] == 23


def test_relative_steps_replace_total_steps(tmp_path, caplog):
  kwargs = {'infer_eval_dataset_cfg': None, 'train_eval_dataset_cfg': None}
  with caplog.at_level('INFO', 't5x_lite'):
    assert toy_run.train(tmp_path, 9, relative_steps=1, **kwargs)[0] == 1
  assert 'relative_steps=1 replaces total_steps=9: the run ends at step 1' in caplog.text


@pytest.mark.parametrize('eval_period', [0, 10])
def test_without_steps_a_run_only_evaluates(tmp_path, eval_period):
  step, state = toy_run.train(tmp_path, 0, eval_period=eval_period, run_eval_before_training=True)
  assert step == int(state.step) == 0
  found = toy_run.lines(tmp_path)
  assert [row['step'] for row in found['training_eval/letters']] == [0]
  assert [row['step'] for row in found['inference_eval/letters']] == [0]


def test_eval_period_0_evaluates_at_no_step(tmp_path):
  toy_run.train(tmp_path, 2, eval_period=0)
  assert not {name for name in toy_run.lines(tmp_path) if 'eval' in name}


def test_the_seed_decides_and_none_is_the_default(tmp_path, caplog):
  def first_loss(name, **kwargs):
    toy_run.train(
      tmp_path / name, 2, train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None, **kwargs
    )
    return toy_run.lines(tmp_path / name)['train'][0]['loss']

  def seed(name, step):
    return checkpoints.read_metadata(tmp_path / name / f'checkpoint_{step}')['run']['random_seed']

  losses = [
    first_loss('0'),
    first_loss('0 again'),
    first_loss('1', random_seed=1),
    first_loss('rbg', use_hardware_rng=True),
  ]
  assert losses[0] == losses[1] and len(set(losses)) == 3
  with caplog.at_level('INFO', 't5x_lite'):
    assert first_loss('none', random_seed=None) == losses[0]
  assert caplog.text.count('seed is None, which is 0 here') == 1
  toy_run.train(
    tmp_path / '1', 4, train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None, random_seed=None
  )
  assert seed('none', 2) == 0 and seed('1', 4) == 1  # a resumed run keeps its seed


@pytest.mark.full  # by default, tests/apps/common/test_evaluations.py keeps the best
def test_best_checkpoints_are_kept_by_a_metric_of_the_evaluation(tmp_path):
  toy_run.train(
    tmp_path,
    20,
    eval_period=4,
    infer_eval_dataset_cfg=None,
    save={
      'period': 4,
      'keep': 1,
      'keep_best': 1,
      'metric_name_to_monitor': 'training_eval/letters/loss',
      'metric_mode': 'min',
    },
  )
  losses = {row['step']: row['loss'] for row in toy_run.lines(tmp_path)['training_eval/letters']}
  assert checkpoints.all_steps(tmp_path) == sorted({min(losses, key=losses.get), 20})


def _exhausting(*args, **kwargs):
  iterator = data.open_train_iterator(*args, **kwargs)
  batches = itertools.islice(iterator, 2)

  class Ends(type(iterator)):
    def __next__(self):
      return next(batches)

  iterator_that_ends = object.__new__(Ends)
  iterator_that_ends.__dict__ = iterator.__dict__
  return iterator_that_ends


def test_a_checkpoint_past_the_end_is_rejected(finished):
  with pytest.raises(ConfigError, match='at step 20, past the end of the run at step 5'):
    toy_run.train(finished[0], 5)


def test_a_directory_in_use_is_rejected(tmp_path):
  import subprocess
  import sys
  import textwrap

  holder = subprocess.Popen(
    [
      sys.executable,
      '-c',
      textwrap.dedent(f"""
      import time
      from t5x_lite import checkpoints
      lock = checkpoints.lock_model_dir({str(tmp_path)!r})
      print('held', flush=True)
      time.sleep(60)"""),
    ],
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert holder.stdout.readline() == 'held\n'
    with pytest.raises(DirectoryInUseError, match=str(holder.pid)) as raised:
      toy_run.train(tmp_path)
    assert raised.value.exit_code == 5
  finally:
    holder.kill()
    holder.communicate()


def test_data_that_ends(tmp_path):
  # A clean end, as in axlearn: the state is evaluated and saved; see test_length.py.
  assert toy_run.train(tmp_path, get_dataset_fn=_exhausting)[0] == 2


def test_data_without_a_position_is_rejected_before_anything_is_computed(tmp_path, monkeypatch):
  def without_position(*args, **kwargs):
    iterator = data.open_train_iterator(*args, **kwargs)
    iterator.get_state = lambda undelivered=(): (_ for _ in ()).throw(DataError('no position'))
    return iterator

  monkeypatch.setattr(
    trainer_lib.BaseTrainer, 'compile_train', lambda *args: pytest.fail('compiled')
  )
  with pytest.raises(DataError, match='no position'):
    toy_run.train(tmp_path, get_dataset_fn=without_position)


@pytest.mark.full  # by default, tests/trainer/test_non_finite.py and tests/trainer/test_actions.py
def test_stop_on_nan_saves_nothing_spoilt(tmp_path):
  # The rate is infinite at step 7 only: an infinite first or last rate is rejected at the start.
  def rate(step):
    return jax.numpy.where(step == 7, jax.numpy.inf, 0.01)

  with pytest.raises(
    NonFiniteMetricError, match='resumes from step 6, the newest sound checkpoint'
  ) as raised:
    toy_run.train(
      tmp_path,
      trainer_kwargs={'learning_rate_fn': rate},
      stats_period=1,
      save={'period': 3},
      actions={'TRAIN': [TerminateOnNanAction('train')]},
    )
  assert raised.value.exit_code == 3
  assert checkpoints.all_steps(tmp_path) == [3, 6]
  last = summaries.read_metrics(tmp_path / 'train/metrics.jsonl')[-1]
  assert last['step'] == 9 and math.isnan(last['loss'])


@pytest.mark.full  # by default, test_two_processes.py stops early
def test_early_stopping_saves_evaluates_and_remembers(tmp_path):
  actions = {'TRAIN': [EarlyStoppingAction(('train', 'loss'), 'max', patience=3, atol=100.0)]}
  step, _ = toy_run.train(
    tmp_path, 10, stats_period=2, infer_eval_dataset_cfg=None, actions=actions
  )
  assert step == 6 and checkpoints.latest_step(tmp_path) == 6
  assert [row['step'] for row in toy_run.lines(tmp_path)['training_eval/letters']] == [6]
  # The three values are part of the checkpoint: a fresh action stops again at the next one.
  actions = {'TRAIN': [EarlyStoppingAction(('train', 'loss'), 'max', patience=3, atol=100.0)]}
  assert (
    toy_run.train(tmp_path, 10, stats_period=2, infer_eval_dataset_cfg=None, actions=actions)[0]
    == 8
  )


def test_preemption_error_saves(tmp_path):
  from t5x_lite.errors import StoppedOnSignalError

  class Preempted(trainer_lib.Trainer):
    def train(self, *args, **kwargs):
      if self.step >= 8:
        raise trainer_lib.PreemptionError('maintenance')
      return super().train(*args, **kwargs)

  trainer_cls = functools.partial(Preempted, learning_rate_fn=toy_run.RATE)
  with pytest.raises(
    StoppedOnSignalError, match='after step 8 of 20 by PreemptionError: maintenance'
  ):
    toy_run.train(tmp_path, trainer_cls=trainer_cls, infer_eval_dataset_cfg=None)
  assert checkpoints.latest_step(tmp_path) == 8


def test_a_trainer_with_the_method_of_t5x_stops_at_a_signal_and_calls_callbacks(
  tmp_path, monkeypatch
):
  from t5x_lite.errors import StoppedOnSignalError

  class OfT5x(trainer_lib.Trainer):
    def batches(self, batch_iter):
      for batch in batch_iter:
        if self.step == 5:
          os.kill(os.getpid(), signal.SIGTERM)
        yield batch

    def train(self, batch_iter, num_steps, start_step=None):
      return super().train(self.batches(batch_iter), num_steps, start_step)

  class Derived(OfT5x):
    def train(self, batch_iter, num_steps, start_step=None):
      return super().train(batch_iter, num_steps, start_step)

  seen = []
  log_step = step_log.StepLog.on_step
  monkeypatch.setattr(
    step_log.StepLog,
    'on_step',
    lambda self, step, metrics: (seen.append(step), log_step(self, step, metrics)),
  )
  trainer_cls = functools.partial(Derived, learning_rate_fn=toy_run.RATE)
  with pytest.raises(StoppedOnSignalError, match='after step 6 of 20'):
    toy_run.train(tmp_path, trainer_cls=trainer_cls, infer_eval_dataset_cfg=None)
  assert checkpoints.latest_step(tmp_path) == 6
  assert seen == [1, 2, 3, 4, 5, 6]


def test_dry_run_shows_everything_and_does_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(
    trainer_lib.Trainer, 'compile_train', lambda *a: pytest.fail('it was compiled')
  )
  model_dir = tmp_path / 'run'
  step, state = toy_run.train(model_dir, 20, dry_run=True)
  assert step == 0 and isinstance(state.params['embedding'], jax.ShapeDtypeStruct)
  assert not model_dir.exists()
  out = capsys.readouterr().out
  for text in (
    'embedding',
    'vocab, embed',
    'Optimizer state',
    'state per device',
    'decoder_target_tokens',
    '8 x 6',
    '4 x 6',
    'split into 2 micro-batches',
    'new parameters',
    '1 to 20',
    '2: 10, 20',
    '4: 6, 12, 18, 20',
  ):
    assert text in out, text
  with pytest.raises(ConfigError, match='3 micro-batches'):
    toy_run.train(model_dir, dry_run=True, trainer_kwargs={'num_microbatches': 3})


def test_metrics_are_formatted_for_people():
  values = {
    'z': clu.values.Scalar(1.0),
    'loss': clu.values.Scalar(np.float32(0.5)),
    'signature': clu.values.Text('tok:13a'),
    'long': clu.values.Text('x' * 101),
    'table': clu.values.Text('a\nb'),
    'timing/seconds': clu.values.Scalar(1.0),
    'optimizer/scaled_adam/default/norm': clu.values.Scalar(1.0),
  }
  assert report.format_metrics(values) == 'loss 0.5  z 1  signature tok:13a'
