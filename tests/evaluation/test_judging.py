"""The half of an evaluation on the host: metrics, means over tasks, files, errors."""

import json
import threading
import types

import clu.values
import jax
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite.errors import DataError
from t5x_lite.evaluation import judging
from t5x_lite.trainer import summaries
from tests.evaluation import evaluation_cases as cases


def test_means_over_tasks_are_those_of_the_tasks_that_have_the_metric(tmp_path):
  _, state, axes = cases.make_state()
  data_tasks = []
  for name, values in (
    ('a', {'f1': 0.5, 'em': 1.0}),
    ('b', {'f1': 1.0}),
    ('c', {'note': clu.values.Text('x')}),
  ):
    data_tasks.append(
      cases.make_task(
        f'mean_{name}', metric_fns=[lambda targets, predictions, values=values: values]
      )
    )
  for task in data_tasks:
    data.register_builtin_task(task)
  mixture = data.BuiltinMixture(name='mean_of_three', rates={task.name: 1.0 for task in data_tasks})
  evaluator = cases.make_evaluator(mixture, tmp_path)
  metrics = evaluator.evaluate(state, axes, step=7).result()
  evaluator.flush()
  evaluator.close()
  assert set(metrics) == {'mean_a', 'mean_b', 'mean_c'}
  (line,) = summaries.read_metrics(tmp_path / 'inference_eval/mean/metrics.jsonl')
  assert {k: v for k, v in line.items() if k != 'wall_time'} == {'step': 7, 'f1': 0.75, 'em': 1.0}
  assert evaluation.full_names('inference_eval', metrics) == {
    'inference_eval/mean_a/f1': 0.5,
    'inference_eval/mean_a/em': 1.0,
    'inference_eval/mean_b/f1': 1.0,
    'inference_eval/mean/f1': 0.75,
    'inference_eval/mean/em': 1.0,
  }


def test_the_host_computes_metrics_while_the_device_continues():
  _, state, axes = cases.make_state()
  may_continue, judged = threading.Event(), []

  def slow(targets, predictions):
    assert may_continue.wait(30)
    judged.append(threading.current_thread().name)
    return {'count': len(predictions)}

  evaluator = cases.make_evaluator(cases.make_task(metric_fns=[slow]), concurrent_metrics=True)
  future = evaluator.evaluate(state, axes, step=1)
  assert not future.done() and not judged
  jax.block_until_ready(jax.tree.map(lambda x: x + 1, state.params))  # the device is free meanwhile
  may_continue.set()
  assert future.result()['letters']['count'].value == 20.0
  assert judged[0].startswith('inference-eval')
  evaluator.close()


@pytest.mark.parametrize('owner', ['task', 'config'])
def test_metrics_by_name_of_predictions_and_scores(tmp_path, owner):
  _, state, axes = cases.make_state()
  fns = data.metrics('exact_match', 'chrf', 'perplexity')
  of_task = {'task': fns, 'config': [data.edit_similarity]}[owner]
  task = cases.make_task(count=20, metric_fns=of_task)
  cfg = {'task': {}, 'config': {'metric_fns': fns}}[owner]
  evaluator = cases.make_evaluator(task, tmp_path, **cfg)
  (opened,) = evaluator.eval_tasks
  assert opened.kinds == ['predict', 'score']
  assert evaluation.names_of_metrics(opened) == {'exact_match', 'chrf', 'perplexity'}
  found = evaluator.evaluate(state, axes, step=7).result()['letters']
  evaluator.flush()
  evaluator.close()
  rows = cases.predictions(tmp_path)
  num_ids = sum(len(row['targets']) + 1 for row in rows)
  assert len(rows) == 20 and found['perplexity'].value == pytest.approx(
    np.exp(-sum(row['score'] for row in rows) / num_ids), rel=1e-5
  )
  path = tmp_path / 'inference_eval/letters/metrics.jsonl'
  (line,) = [json.loads(line) for line in path.read_text().splitlines()]
  assert line['chrf'] == found['chrf'].value and 'nc:6' in line['chrf_signature']


@pytest.mark.parametrize('concurrent_metrics', [False, True])
def test_errors_of_metrics_are_raised(concurrent_metrics):
  def broken(targets, predictions):
    raise KeyError('mine')

  _, state, axes = cases.make_state()
  evaluator = cases.make_evaluator(
    cases.make_task(metric_fns=[broken]), concurrent_metrics=concurrent_metrics
  )
  with pytest.raises(KeyError, match='mine'):
    evaluator.evaluate(state, axes, step=1).result()
  if concurrent_metrics:
    with pytest.raises(KeyError, match='mine'):
      evaluator.flush()
  evaluator.close()


@pytest.mark.parametrize('concurrent_metrics', [False, True])
def test_results_wait_for_a_disk_with_free_space(tmp_path, concurrent_metrics):
  _, state, axes = cases.make_state()
  evaluator = cases.make_evaluator(
    cases.make_task(), tmp_path, concurrent_metrics=concurrent_metrics
  )
  blocker = tmp_path / 'inference_eval'
  blocker.write_text('')  # No folder can be made.
  found = [
    evaluator.evaluate(state, axes, step=step).result()['letters']['exact_match'].value
    for step in (7, 8)
  ]
  for _ in range(2):
    with pytest.raises(OSError, match='inference_eval'):
      evaluator.flush()
  blocker.unlink()
  # Room for the folder, but not for the file of one step: no partial file remains, and nothing is written out of order.
  (blocker / 'letters/predictions-7.jsonl').mkdir(parents=True)
  with pytest.raises(OSError, match='predictions-7'):
    evaluator.flush()
  assert [path.name for path in (blocker / 'letters').glob('predictions*')] == [
    'predictions-7.jsonl'
  ]
  (blocker / 'letters/predictions-7.jsonl').rmdir()
  found.append(evaluator.evaluate(state, axes, step=9).result()['letters']['exact_match'].value)
  evaluator.flush()
  assert [
    (row['step'], row['exact_match'])
    for row in summaries.read_metrics(blocker / 'letters/metrics.jsonl')
  ] == [(step, number) for step, number in zip((7, 8, 9), found, strict=True)]
  assert (
    cases.predictions(tmp_path, step=7)
    == cases.predictions(tmp_path, step=8)
    == cases.predictions(tmp_path, step=9)
    != []
  )
  evaluator.close()


def test_an_exception_of_the_note_ends_the_evaluation():
  _, state, axes = cases.make_state()

  def note(text):
    if 'batch 2' in text:
      raise KeyboardInterrupt

  evaluator = cases.make_evaluator(cases.make_task())
  with pytest.raises(KeyboardInterrupt):
    evaluator.evaluate(state, axes, step=1, note_fn=note)
  evaluator.close()


def test_values_of_every_kind():
  class Text:  # Neither clu's nor seqio's, whatever its name.
    textdata = value = 'x'

  values = {
    'a': 1,
    'b': np.float32(0.5),
    'c': np.array([2.0]),
    'd': clu.values.Scalar(3.0),
    'e': jax.numpy.ones(()),
  }
  assert [judging.as_value(name, value).value for name, value in values.items()] == [
    1.0,
    0.5,
    2.0,
    3.0,
    1.0,
  ]
  assert [judging.as_number(name, values[name]) for name in 'abd'] == [1.0, 0.5, 3.0]
  assert judging.as_value('t', clu.values.Text('x')).value == 'x'
  for value in (Text(), 'x', np.ones(2)):
    with pytest.raises(DataError, match="The metric 't' must be a number, .* got a "):
      judging.as_value('t', value)


def test_predictions_show_all_texts_of_a_target_that_has_several():
  examples = [
    {'targets_pretokenized': 'x'},
    {'targets_pretokenized': 'y', 'targets_references': ['y', 'z']},
  ]
  rows = judging.prediction_rows(types.SimpleNamespace(examples=examples), {}, ['z', 'z'], None)
  assert rows == [
    {'index': 0, 'targets': 'x', 'prediction': 'z'},
    {'index': 1, 'targets': 'y', 'references': ['y', 'z'], 'prediction': 'z'},
  ]
