"""Outputs of a model in an evaluation: predictions, scores, auxiliary and intermediate values."""

import jax
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite.errors import DataError
from tests.apps.train import toy_run
from tests.evaluation import evaluation_cases as cases
from tests.models import toy_model


def test_metrics_of_predictions_scores_and_auxiliary_values():
  def aux(targets, predictions, aux_values):
    assert aux_values['number'].dtype == np.int64 and len(predictions) == 20
    return {'aux': aux_values['number'].sum()}

  def score(targets, scores):
    assert scores.dtype == np.float64 and scores.shape == (20,)
    return {'mean_score': scores.mean()}

  task, outputs = cases.outputs(
    score_metric_fns=[score],
    predict_with_aux_metric_fns=[aux],
    output_metrics=[
      data.OutputMetric(
        kind='predict_with_aux', compute_fn=lambda found: {'raw': found[1]['number'].max()}
      )
    ],
  )
  assert set(outputs) == {'predict', 'score', 'predict_with_aux'}
  result = evaluation.compute_metrics(task, outputs, 3)
  numbers = [int(example['targets'].sum()) for example in task.examples]
  assert result.metrics['aux'].value == sum(numbers) and result.metrics['raw'].value == max(numbers)
  assert [row['aux'] for row in result.predictions] == [{'number': n} for n in numbers[:3]]
  model, state, _ = cases.make_state()
  params = jax.device_get(state.params)
  for row, example in zip(result.predictions, task.examples[:3], strict=True):
    targets = np.pad(example['targets'], (0, 6 - len(example['targets'])))[None]
    batch = {
      'decoder_target_tokens': targets,
      'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    }
    assert row['score'] == pytest.approx(float(model.score_batch(params, batch)[0]), rel=1e-5)


@pytest.mark.parametrize(
  'kinds', [('predict', 'score'), ('predict_with_aux', 'score_with_intermediates')]
)
def test_outputs_are_those_of_the_parameters_to_evaluate(kinds):
  metrics = dict(
    metric_fns=(), output_metrics=[data.OutputMetric(kind=kind, compute_fn=len) for kind in kinds]
  )
  _, outputs = cases.outputs(change_state=toy_model.evaluates_double, **metrics)
  _, expected = cases.outputs(
    change_state=lambda state: state.replace_params(
      jax.tree.map(lambda x: 2 * x if isinstance(x, jax.Array) else x, state.params)
    ),
    **metrics,
  )
  assert set(outputs) == set(kinds)
  jax.tree.map(np.testing.assert_array_equal, outputs, expected)


def test_a_task_of_scores_alone_is_not_decoded(tmp_path):
  _, state, axes = cases.make_state()
  notes = []
  task = cases.make_task(
    metric_fns=(), score_metric_fns=[lambda targets, scores: {'best': scores.max()}]
  )
  evaluator = cases.make_evaluator(task, tmp_path)
  metrics = evaluator.evaluate(state, axes, step=7, note_fn=notes.append).result()
  evaluator.close()
  assert notes[0] == 'scoring letters: batch 1 of 3' and len(notes) == 3
  rows = cases.predictions(tmp_path)
  assert metrics['letters']['best'].value == pytest.approx(max(row['score'] for row in rows))
  assert 'prediction' not in rows[0]


def test_several_decodes_are_lists_of_texts():
  def first(targets, predictions):
    return {'num_decodes': len(predictions[0])}

  task, outputs = cases.outputs('decodes', metric_fns=[first])
  result = evaluation.compute_metrics(task, outputs)
  assert result.metrics['num_decodes'].value == 2.0
  assert (
    len(result.predictions) == 20
    and result.predictions[0]['prediction'][0] == result.predictions[0]['prediction'][1]
  )


def test_intermediate_values_come_with_scores():
  opened = cases.make_evaluator(cases.make_task()).eval_tasks[0]
  task = cases.with_fns(
    opened,
    metric_fns=(),
    output_metrics=[
      data.OutputMetric(
        kind='score_with_intermediates',
        compute_fn=lambda found: {'sown': found[1]['x'][0].shape[0]},
      )
    ],
  )

  class Sowing(toy_model.ToyModel):
    def score_batch(self, params, batch, return_intermediates=False, *, flax_mutables=None):
      scores = super().score_batch(params, batch)
      return (scores, {'x': (scores[:, None],)}) if return_intermediates else scores

  vocabulary = toy_model.ToyVocabulary()
  _, state, axes = cases.make_state()
  runner = evaluation.OutputRunner(
    Sowing(toy_model.ToyNetwork(), vocabulary, vocabulary, None),
    toy_run.partitioner(),
    evaluation.InferenceEvalConfig(),
  )
  outputs = runner.run(task, state, axes)
  result = evaluation.compute_metrics(task, outputs)
  assert result.metrics['sown'].value == 20.0 and 'score' in result.predictions[0]


def test_outputs_without_rows_are_rejected():
  with pytest.raises(
    DataError, match=r"predict_with_aux\[1\]\['number'\] must have 8 rows, .* got shape \(\)"
  ):
    cases.outputs(
      'scalar', predict_with_aux_metric_fns=[lambda targets, predictions, aux_values: {}]
    )
