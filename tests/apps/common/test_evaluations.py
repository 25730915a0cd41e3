"""Evaluations during training: periods, overlap with training, checkpoints, best checkpoint by name."""

import concurrent.futures
import contextlib
import dataclasses
import os
import signal
import threading
import time
import types

import clu.values
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import runtime
from t5x_lite.actions import BaseAction
from t5x_lite.apps.common import evaluations as train_evaluations
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.errors import ConfigError, StoppedOnSignalError
from tests.apps.train import toy_run
from tests.models import toy_model


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run of 12 steps that decodes every 4 of them and evaluates with given targets every 6."""
  model_dir = tmp_path_factory.mktemp('whole')
  _train(model_dir)
  return model_dir


def _train(model_dir, total_steps=12, **kwargs):
  return toy_run.train(model_dir, total_steps, **{
      'eval_period': 6, 'infer_eval_period': 4, 'save': {'period': 6}, **kwargs})


def _judged_by(*metric_fns):
  task = dataclasses.replace(toy_run.TASK, metric_fns=metric_fns)
  return dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=task)


def test_each_kind_has_its_period(whole):
  lines = toy_run.lines(whole)
  assert [row['step'] for row in lines['training_eval/letters']] == [6, 12]
  assert [row['step'] for row in lines['inference_eval/letters']] == [4, 8, 12]
  assert {path.name for path in (whole / 'inference_eval/letters').glob('predictions-*')} == {
      'predictions-4.jsonl', 'predictions-8.jsonl', 'predictions-12.jsonl'}


@pytest.mark.parametrize('kwargs', [{'concurrent_metrics': False}, pytest.param({}, marks=pytest.mark.full)])
def test_overlap_changes_nothing(whole, tmp_path, kwargs):
  _train(tmp_path, 5, **kwargs)
  _train(tmp_path, **kwargs)
  # Where the first part ended is a summary, an evaluation and a checkpoint; the rest is the same.
  at_5 = {name: [row for row in rows if row['step'] != 5] for name, rows in toy_run.lines(tmp_path).items()}
  expected = toy_run.lines(whole)
  assert at_5['inference_eval/letters'] == expected['inference_eval/letters']
  assert at_5['training_eval/letters'] == expected['training_eval/letters']
  (state, position), (expected_state, expected_position) = toy_run.saved(tmp_path, 12), toy_run.saved(whole, 12)
  for name in ('embedding', 'hidden', 'logits'):
    np.testing.assert_array_equal(state['target'][name], expected_state['target'][name])
  assert position == expected_position


def test_metrics_are_computed_while_training_continues(tmp_path):
  trained_on, waited = threading.Event(), []

  def open_iterator(*args, **kwargs):
    iterator = data.open_train_iterator(*args, **kwargs)
    start = type(iterator).__next__
    numbers = iter(range(100))

    class Counting(type(iterator)):

      def __next__(self):
        if next(numbers) == 9:  # far behind the evaluation at step 4
          trained_on.set()
        return start(self)

    iterator.__class__ = Counting
    return iterator

  def slow(targets, predictions):
    waited.append(trained_on.wait(20))
    return {'count': len(predictions)}

  _train(tmp_path, get_dataset_fn=open_iterator, infer_eval_dataset_cfg=_judged_by(slow), save={'period': 100},
         eval_period=100, stats_period=100)
  assert waited == [True] * 3
  assert [row['step'] for row in toy_run.lines(tmp_path)['inference_eval/letters']] == [4, 8, 12]


def test_a_checkpoint_covers_evaluations_up_to_its_step(tmp_path):
  found = []

  def slow(targets, predictions):
    time.sleep(0.3)
    found.append(1)
    return {'number': float(len(found))}

  _train(tmp_path, infer_eval_dataset_cfg=_judged_by(slow), infer_eval_period=6)
  for step, number in ((6, 1.0), (12, 2.0)):
    metrics = checkpoints.read_manifest(tmp_path / f'checkpoint_{step}').metrics
    assert metrics['inference_eval/letters/number'] == metrics['inference_eval/mean/number'] == number
    assert 'training_eval/mean/loss' in metrics
  # An evaluation of an earlier step does not belong to the checkpoint.
  _train(tmp_path / 'b', infer_eval_dataset_cfg=_judged_by(slow), infer_eval_period=4)
  assert not any(name.startswith('inference_eval') for name in
                 checkpoints.read_manifest(tmp_path / 'b/checkpoint_6').metrics)


def test_compiling_inside_an_evaluation_is_not_watched(tmp_path, monkeypatch):
  watched, traced = ['nothing'], []

  class Watchdog(runtime.Watchdog):

    @contextlib.contextmanager
    def watching(self, name='step'):
      watched.append(name)
      try:
        with super().watching(name):
          yield
      finally:
        watched.pop()

  class Model(toy_model.ToyModel):  # Its functions are called while programs are compiled, and no more.

    def eval_fn(self, *args, **kwargs):
      traced.append(('training_eval', watched[-1]))
      return super().eval_fn(*args, **kwargs)

    def predict_batch(self, *args, **kwargs):
      traced.append(('inference_eval', watched[-1]))
      return super().predict_batch(*args, **kwargs)

  def metric(targets, predictions):
    traced.append(('metric', watched[-1]))
    return {'count': len(predictions)}

  monkeypatch.setattr(runtime, 'Watchdog', Watchdog)
  usual = toy_run.model()
  model = Model(usual.module, usual.input_vocabulary, usual.output_vocabulary, usual.optimizer_def,
                loss_normalizing_factor='NUM_REAL_TARGET_TOKENS')
  _train(tmp_path, 4, model=model, eval_period=2, infer_eval_period=2, concurrent_metrics=False,
         infer_eval_dataset_cfg=_judged_by(metric))
  assert set(traced) == {('training_eval', None), ('inference_eval', None), ('metric', 'evaluation')}
  assert traced.count(('metric', 'evaluation')) == 2


def test_a_run_that_rolls_back_forgets_the_last_evaluation(tmp_path):
  trainer = types.SimpleNamespace(step=6, train_state=None, train_state_axes=None)
  results = {'letters': {'number': clu.values.Scalar(0.5)}}
  future = concurrent.futures.Future()
  future.set_result(results)
  evaluator = types.SimpleNamespace(evaluate=lambda *args, **kwargs: future, flush=lambda: None,
                                    close_files=lambda: None)
  evaluations = train_evaluations.RunEvaluations(
      trainer=trainer, eval_batches={}, evaluator=evaluator, summary_dir=None,
      progress=runtime.Progress(enabled=False), note_fn=str)
  evaluations.evaluate(['inference_eval'])
  assert evaluations.numbers(6)['inference_eval/letters/number'] == 0.5
  evaluations.close_files()
  assert evaluations.numbers(6) == {}


def test_the_best_checkpoint_by_a_mean_over_tasks(tmp_path):
  values = iter([0.0, 0.1, 0.9, 0.5, 0.4])  # The first one for the check of the metric's name.
  other = dataclasses.replace(toy_run.TASK, name='other_letters', metric_fns=[lambda t, p: {'f1': 0.0, 'em': 1.0}])
  first = dataclasses.replace(toy_run.TASK, name='first_letters', metric_fns=[lambda t, p: {'f1': next(values)}])
  for task in (other, first):
    data.register_builtin_task(task)
  mixture = data.BuiltinMixture(name='letters_twice', rates={'first_letters': 1.0, 'other_letters': 1.0})
  cfg = dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=mixture)
  _train(tmp_path, infer_eval_dataset_cfg=cfg, infer_eval_period=3, train_eval_dataset_cfg=cfg, save={
      'period': 3, 'keep': 1, 'keep_best': 1, 'metric_name_to_monitor': 'inference_eval/mean/f1'})
  assert checkpoints.all_steps(tmp_path) == [6, 12]
  lines = toy_run.lines(tmp_path)
  assert [row['f1'] for row in lines['inference_eval/mean']] == [0.05, 0.45, 0.25, 0.2]
  assert [row['em'] for row in lines['inference_eval/mean']] == [1.0] * 4
  expected = np.mean([lines[f'training_eval/{name}'][-1]['loss'] for name in ('first_letters', 'other_letters')])
  assert lines['training_eval/mean'][-1]['loss'] == pytest.approx(expected)


def test_actions_see_the_results_at_once(tmp_path):
  seen = []

  class Look(BaseAction):

    def run(self, train_state, metrics_by_task):
      seen.append((int(train_state.step), sorted(metrics_by_task)))
      return False

  _train(tmp_path, actions={'INFER_EVAL': [Look()]}, save={'period': 100})
  assert seen == [(4, ['letters']), (8, ['letters']), (12, ['letters'])]


@pytest.mark.parametrize('name, fragment', [
    ('inference_eval/letters/exact_mach', "mean 'inference_eval/letters/exact_match'"),
    ('training_eval/mean/acuracy', "mean 'training_eval/mean/accuracy'"),
    ('accuracy', 'must be the full name of a metric of this run')])
def test_an_unknown_metric_for_the_best_is_rejected_before_anything_is_computed(tmp_path, name, fragment):
  with pytest.raises(ConfigError, match=fragment):
    _train(tmp_path / 'run', save={'period': 3, 'keep_best': 1, 'metric_name_to_monitor': name})
  assert not (tmp_path / 'run').exists()


def test_a_metric_that_fails_in_the_background_ends_the_run_before_the_next_checkpoint(tmp_path):
  def broken(targets, predictions):
    raise KeyError('mine')

  with pytest.raises(KeyError, match='mine'):
    _train(tmp_path, infer_eval_dataset_cfg=_judged_by(broken))
  assert checkpoints.latest_step(tmp_path) is None


def test_a_signal_while_only_decoding_is_due(whole, tmp_path):
  to_global_arrays, count = data.to_global_arrays, []

  def signalling(*args):
    count.append(1)
    if len(count) == 3 + 2:  # the second evaluation by decoding at 8, after the one at 4 and the other kind at 6
      os.kill(os.getpid(), signal.SIGTERM)
    return to_global_arrays(*args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data, 'to_global_arrays', signalling)
    with pytest.raises(StoppedOnSignalError, match='after step 8 of 12'):
      _train(tmp_path, eval_period=100)
  assert checkpoints.read_metadata(tmp_path / 'checkpoint_8')['run']['evaluation_due'] == ['inference_eval']
  _train(tmp_path, eval_period=100)
  assert toy_run.lines(tmp_path)['inference_eval/letters'] == toy_run.lines(whole)['inference_eval/letters']


@pytest.mark.parametrize('kwargs, fragment', [
    ({'infer_eval_period': 0}, 'infer_eval_period` must be .* got 0'),
    ({'infer_eval_dataset_cfg': None}, 'infer_eval_period` must be unset without `infer_eval_dataset_cfg`, got 4')])
def test_invalid_periods(tmp_path, kwargs, fragment):
  with pytest.raises(ConfigError, match=fragment):
    _train(tmp_path, **kwargs)


def test_plans():
  every = lambda period: plan_lib.When(period=period, at_end=True)
  stretches = list(plan_lib.plan_steps(0, 12, evaluate=every(6), infer=every(4)))
  assert [(s.last, s.evaluations) for s in stretches] == [
      (4, ('inference_eval',)), (6, ('training_eval',)), (8, ('inference_eval',)),
      (12, ('training_eval', 'inference_eval'))]
  text = plan_lib.describe_plan(stretches)
  assert 'evaluations  2: 6, 12\n' in text and 'decodings    3: 4, 8, 12\n' in text
  assert 'decodings' not in plan_lib.describe_plan(list(plan_lib.plan_steps(0, 12, evaluate=every(6))))
