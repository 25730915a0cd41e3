"""Names of metrics, known before anything is predicted."""

import dataclasses

import clu.values
import pytest

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite.errors import ConfigError, DataError
from tests.evaluation import evaluation_cases as cases


@pytest.mark.parametrize(
  'fns, fragment',
  [
    ([lambda targets, predictions: 0.5], 'must return a mapping'),
    ([lambda targets, predictions: {'x': [1, 2]}], "'x' must be a number, .* got a list"),
    ([lambda targets, predictions: {'x': clu.values.Histogram([1], 2)}], 'seqio.Evaluator'),
    ([data.exact_match, data.exact_match], "have the name 'exact_match'"),
  ],
)
def test_bad_metrics(fns, fragment):
  task, outputs = cases.outputs(metric_fns=fns)
  with pytest.raises(DataError, match=fragment):
    evaluation.compute_metrics(task, outputs)


def test_a_task_of_the_means_name():
  task = cases.make_task('mean')
  for name in ('mean', 'no_mean'):
    data.register_builtin_task(dataclasses.replace(task, name=name))
  with pytest.raises(ConfigError, match="called 'mean'"):
    cases.make_evaluator(data.BuiltinMixture(name='x', rates={'mean': 1.0, 'no_mean': 1.0}))
  cases.make_evaluator(cases.make_task('mean')).close()


def test_names_of_metrics_before_anything_is_predicted():
  task = cases.make_evaluator(cases.make_task()).eval_tasks[0]
  assert evaluation.names_of_metrics(task) == {'exact_match'}
  scored = cases.with_fns(task, score_metric_fns=[lambda targets, scores: {'s': scores[0]}])
  assert evaluation.names_of_metrics(scored) == {'exact_match', 's'}
  particular = cases.with_fns(
    task, metric_fns=[lambda targets, predictions: {'x': predictions[0]['a']}]
  )
  assert evaluation.names_of_metrics(particular) is None


_KNOWN = {
  'training_eval': {'a': {'loss', 'accuracy'}},
  'inference_eval': {'a': {'exact_match'}, 'b': {'f1'}},
  'training_eval/held_out': {'a': {'loss'}},
}


@pytest.mark.parametrize(
  'name',
  [
    'training_eval/a/loss',
    'training_eval/mean/accuracy',
    'inference_eval/mean/f1',
    'inference_eval/a/exact_match',
    'training_eval/held_out/mean/loss',
  ],
)
def test_known_metrics_pass(name):
  evaluation.check_metric_name('best_metric', name, _KNOWN)


@pytest.mark.parametrize(
  'name, fragment',
  [
    ('inference_eval/a/exact_mach', "Did you mean 'inference_eval/a/exact_match'"),
    ('f1', 'inference_eval/b/f1'),
    ('inference_eval/b/exact_match', 'Did you mean'),
    ('train/loss', 'must be the full name of a metric of this run'),
    (3, 'full name'),
    ('training_eval/held_out/a/accuracy', 'Did you mean'),
  ],
)
def test_unknown_metrics_are_rejected(name, fragment):
  with pytest.raises(ConfigError, match=fragment):
    evaluation.check_metric_name('best_metric', name, _KNOWN)


def test_a_task_whose_metrics_are_not_known_beforehand():
  known = {'inference_eval': {'a': None}}
  for name in ('inference_eval/a/anything', 'inference_eval/mean/anything'):
    evaluation.check_metric_name('best_metric', name, known)
  for name in ('inference_eval/b/anything', 'training_eval/a/loss'):
    with pytest.raises(ConfigError, match='inference_eval/a'):
      evaluation.check_metric_name('best_metric', name, known)
  with pytest.raises(ConfigError, match='Nothing is evaluated'):
    evaluation.check_metric_name('best_metric', 'inference_eval/b/anything', {})
