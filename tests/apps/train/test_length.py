"""Length of a run: a number of steps, the end of the data, or no limit."""

import json
import math
import os
import signal
import types

import gin
import jax
import pytest

from t5x_lite import checkpoints
from t5x_lite import cli
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import runtime
from t5x_lite.actions import BaseAction
from t5x_lite.apps.common import waiting
from t5x_lite.apps.train import batches as train_batches
from t5x_lite.apps.train import run
from t5x_lite.errors import DataError, StoppedOnSignalError
from tests.apps.common import cloze_run
from tests.apps.train import toy_run

# 60 examples: 7 batches of 8 in one epoch, 15 in two.
_WAITS = waiting.DataWaits(runtime.StopSignals())
_OPTIONS = {'save': {'period': 6}, 'eval_period': 10}


def _train(model_dir, num_epochs, total_steps=None, **kwargs):
  return toy_run.train(
    model_dir,
    total_steps,
    train_dataset_cfg=toy_run.dataset('train', num_epochs=num_epochs),
    **{**_OPTIONS, **kwargs},
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run of 15 steps."""
  model_dir = tmp_path_factory.mktemp('whole')
  assert toy_run.train(model_dir, 15, **_OPTIONS)[0] == 15
  return model_dir


def _sends_sigterm(after):
  """Return a function that opens the training data, and sends this process a signal for the batch after `after`."""

  def open_iterator(*args, **kwargs):
    iterator, left = data.open_train_iterator(*args, **kwargs), [after + 1]

    class Signalling(type(iterator)):
      def __next__(self):
        left[0] -= 1
        if left[0] == 0:
          os.kill(os.getpid(), signal.SIGTERM)
        return super().__next__()

    iterator.__class__ = Signalling
    return iterator

  return open_iterator


def test_the_end_of_the_data_ends_a_run_as_the_same_number_of_steps_does(whole, tmp_path, capsys):
  assert _train(tmp_path, 2)[0] == 15
  toy_run.assert_same_run(tmp_path, whole, 15)
  assert checkpoints.all_steps(tmp_path) == checkpoints.all_steps(whole) == [6, 12, 15]
  err = capsys.readouterr().err
  assert 'at step 0, to the end of the data (num_epochs = 2).' in err
  assert 'The training data ended after step 15.' in err
  assert 'step 15  loss' in err and 'ETA' not in err and 'step 15/' not in err
  stop = next(
    event for event in runtime.read_events(tmp_path / runtime.EVENTS_FILE) if event.kind == 'stop'
  )
  assert stop.details == {'cause': 'completed'} and stop.step == 15
  # Once more: nothing is left. Then another epoch.
  lines = toy_run.lines(tmp_path)
  assert _train(tmp_path, 2)[0] == 15 and toy_run.lines(tmp_path) == lines
  err = capsys.readouterr().err
  assert (
    'Compiled' not in err
    and 'Loaded' not in err
    and 'at step 15, to step 15 or the end of the data' in err
  )
  assert _train(tmp_path, 3, infer_eval_dataset_cfg=None)[0] == 22
  assert [row['step'] for row in toy_run.lines(tmp_path)['training_eval/letters']] == [
    10,
    15,
    20,
    22,
  ]


def test_a_run_that_was_stopped_at_the_end_of_the_data_before_it_was_known_evaluates(
  whole, tmp_path
):
  # The steps are those of a run that ends at step 15; the data tells its end later.
  toy_run.train(
    tmp_path, 15, **{**_OPTIONS, 'train_eval_dataset_cfg': None, 'infer_eval_dataset_cfg': None}
  )
  assert _train(tmp_path, 2)[0] == 15
  assert [row['step'] for row in toy_run.lines(tmp_path)['training_eval/letters']] == [15]
  assert (
    toy_run.lines(tmp_path)['training_eval/letters']
    == toy_run.lines(whole)['training_eval/letters'][1:]
  )


@pytest.mark.parametrize('after', [9, 15])
def test_a_signal_before_and_at_the_end_of_the_data(whole, tmp_path, after):
  try:
    _train(tmp_path, 2, get_dataset_fn=_sends_sigterm(after), num_prefetched_batches=1)
  except StoppedOnSignalError as error:
    assert (
      'Stopped after step ' in str(error) and ' of ' not in str(error).partition(' by SIGTERM')[0]
    )
  assert _train(tmp_path, 2)[0] == 15
  rows, expected = toy_run.lines(tmp_path), toy_run.lines(whole)
  assert {k: v for k, v in rows.items() if k != 'train'} == {
    k: v for k, v in expected.items() if k != 'train'
  }
  assert toy_run.saved(tmp_path, 15)[1] == toy_run.saved(whole, 15)[1]


def test_the_number_of_steps_counts_if_it_comes_first(whole, tmp_path):
  assert _train(tmp_path, 9, 15)[0] == 15
  toy_run.assert_same_run(tmp_path, whole, 15)


def test_without_a_limit_a_run_continues_until_an_action_or_a_signal(tmp_path, capsys):
  class StopAt(BaseAction):
    def run(self, train_state, metrics_by_task):
      return int(train_state.step) >= 8

  kwargs = {**_OPTIONS, 'eval_period': None, 'infer_eval_dataset_cfg': None}
  assert _train(tmp_path, None, actions={'TRAIN': [StopAt()]}, **kwargs)[0] == 8
  assert [row['step'] for row in toy_run.lines(tmp_path)['training_eval/letters']] == [8]
  with pytest.raises(StoppedOnSignalError, match=r'Stopped after step \d+ by SIGTERM'):
    _train(tmp_path, None, get_dataset_fn=_sends_sigterm(4), **kwargs)
  assert 'at step 8, until the run is stopped.' in capsys.readouterr().err
  events = list(runtime.read_events(tmp_path / runtime.EVENTS_FILE))
  assert [event.details.get('cause') for event in events if event.kind == 'stop'] == [
    'action',
    'signal',
  ]


def _last_stop(model_dir):
  """Return step and cause of the last stop of a run."""
  events = runtime.read_events(model_dir / runtime.EVENTS_FILE)
  stop = [event for event in events if event.kind == 'stop'][-1]
  return stop.step, stop.details['cause']


_ENDED = 'Ended at step 15 of 99: data_ended, the training data has no further batch.'


@pytest.mark.parametrize('kind', ['num_epochs', 'undeclared', 'called_endless'])
def test_data_that_ends_before_the_number_of_steps_ends_the_run(whole, tmp_path, capsys, kind):
  def open_iterator(cfg, *args, **kwargs):
    iterator = data.open_train_iterator(toy_run.dataset('train', num_epochs=2), *args, **kwargs)
    iterator.is_endless = kind == 'called_endless'
    return iterator

  options = {}
  num_epochs = 2
  if kind != 'num_epochs':
    options = {'get_dataset_fn': open_iterator}
    num_epochs = None
  assert _train(tmp_path, num_epochs, 99, **options)[0] == 15
  toy_run.assert_same_run(tmp_path, whole, 15)
  assert checkpoints.all_steps(tmp_path) == [6, 12, 15]
  assert _last_stop(tmp_path) == (15, 'data_ended')
  assert capsys.readouterr().err.rstrip().endswith(_ENDED)
  # A restart ends at once with the same line, without compiling or evaluating.
  lines = toy_run.lines(tmp_path)
  assert _train(tmp_path, num_epochs, 99, **options)[0] == 15 and toy_run.lines(tmp_path) == lines
  err = capsys.readouterr().err
  assert err.rstrip().endswith(_ENDED) and _last_stop(tmp_path) == (15, 'data_ended')
  assert 'Compiled' not in err and 'Loaded' not in err


def test_data_that_ends_after_a_step_with_evaluation_is_not_evaluated_twice(tmp_path):
  def open_iterator(cfg, *args, **kwargs):
    iterator = data.open_train_iterator(toy_run.dataset('train', num_epochs=2), *args, **kwargs)
    iterator.is_endless = True
    return iterator

  _train(tmp_path, None, 99, get_dataset_fn=open_iterator, eval_period=5)
  rows = toy_run.lines(tmp_path)['training_eval/letters']
  assert [row['step'] for row in rows] == [5, 10, 15]
  assert _last_stop(tmp_path) == (15, 'data_ended')


def test_an_error_of_the_source_is_not_the_end_of_the_data(tmp_path):
  def open_iterator(*args, **kwargs):
    iterator, left = data.open_train_iterator(*args, **kwargs), [3]

    class Fails(type(iterator)):
      def __next__(self):
        left[0] -= 1
        if left[0] < 0:
          raise DataError('fewer records than recorded')
        return super().__next__()

    iterator.__class__ = Fails
    return iterator

  with pytest.raises(DataError, match='fewer records than recorded'):
    _train(tmp_path, 2, 99, get_dataset_fn=open_iterator)
  assert _last_stop(tmp_path)[1] == 'error' and checkpoints.all_steps(tmp_path) == [3]


def test_data_without_a_batch(tmp_path):
  with pytest.raises(
    DataError, match='at least one batch of 64 rows, got its end before the first step'
  ):
    toy_run.train(
      tmp_path, None, train_dataset_cfg=toy_run.dataset('train', batch_size=64, num_epochs=1)
    )


class _Batches:
  """Batches 1 to `num` of a process whose data does not end together with that of another one."""

  ends_together = False
  is_endless = False

  def __init__(self, num):
    self.left = num

  @property
  def has_ended(self):
    return self.left == 0

  def knows_next(self, timeout):
    return True

  def take(self, timeout):
    if not self.left:
      raise StopIteration
    self.left -= 1
    return {'x': self.left}


@pytest.mark.parametrize('other_ends_after', [2, 3, 4])
def test_processes_agree_on_the_end(monkeypatch, other_ends_after):
  """This process has 3 batches; the other one's answers are simulated."""
  asked = []

  def any_process(flag):
    # Before each step, and after every second one.
    asked.append(flag)
    return flag or num_taken[0] >= other_ends_after

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(train_batches.multihost, 'any_process', any_process)
  num_taken = [0]
  batches = train_batches.TrainBatches(
    _Batches(3), should_stop=lambda: False, facts={}, first_step=0, waits=_WAITS
  )
  while not batches.has_ended:
    if next(batches, None) is not None:
      num_taken[0] += 1
      if num_taken[0] % 2 == 0:
        batches.reached_end()
  assert (
    num_taken[0] == min(3, other_ends_after) and batches.should_stop() and batches.error is None
  )
  assert len(asked) == num_taken[0] + num_taken[0] // 2 + num_taken[0] % 2


def test_batches_of_bad_steps_at_the_end_are_left_out():
  facts = {'batch_number': 1, 'left_out_batches': [3, 4]}
  batches = train_batches.TrainBatches(
    _Batches(3), should_stop=lambda: False, facts=facts, first_step=1, waits=_WAITS
  )
  assert not batches.reached_end() and next(batches)
  assert batches.facts == {'batch_number': 2, 'left_out_batches': [3, 4]}
  assert batches.reached_end() and batches.facts == {
    'batch_number': 4,
    'left_out_batches': [3, 4],
    'data_ended_at': 4,
  }


def test_the_command_with_epochs(tmp_path, capsys):
  (tmp_path / 'one.gin').write_text(cloze_run.ONE_DEVICE)
  argv = [
    'train',
    '--gin_file=recipes/keyword_cloze.gin',
    f'--gin_file={tmp_path}/one.gin',
    f'--gin.MODEL_DIR={tmp_path}/run',
    '--gin.TRAIN_STEPS=None',
    '--gin.NUM_EPOCHS=2',
    '--gin.BATCH_SIZE=4000',
    '--gin.EVAL_STEPS=1',
    '--gin.train_script.train.infer_eval_dataset_cfg=None',
    *(f'--gin.{flag}' for flag in cloze_run.bindings("{'inputs': 8, 'targets': 2}")),
  ]
  # The schedule of the recipe needs the number of steps.
  assert cli.main(argv) == 2
  assert 'steps_per_cycle' in capsys.readouterr().err
  gin.clear_config()
  argv.append('--gin.schedules.create_learning_rate_scheduler.steps_per_cycle=5')
  assert cli.main([*argv, '--dry_run']) == 0
  assert (
    'steps        1 to the end of the data (num_epochs = 2)\nsummaries    25, 50, '
    in capsys.readouterr().out
  )
  gin.clear_config()
  assert cli.main(argv) == 0
  gin.clear_config()
  assert 'The training data ended after step 5.' in capsys.readouterr().err
  assert (
    json.loads((tmp_path / 'run/training_eval/python_keyword_cloze/metrics.jsonl').read_text())[
      'step'
    ]
    == 5
  )
  assert checkpoints.all_steps(tmp_path / 'run') == [5]


def test_evaluations_that_are_due_when_the_end_of_the_data_is_found_are_made():
  whens = {
    'periodic': evaluation.When(period=5),
    'last': evaluation.When(at_end=True),
    'other': evaluation.When(),
  }
  resumed = types.SimpleNamespace(
    cfg=types.SimpleNamespace(whens=whens),
    start=types.SimpleNamespace(resumes=True, step=15),
    facts={'start_step': 0, 'evaluation_due': ['periodic']},
    last_step=math.inf,
    batches=types.SimpleNamespace(reached_end=lambda: True),
  )
  assert run._find_end(resumed) == (15, ('periodic', 'last'))
