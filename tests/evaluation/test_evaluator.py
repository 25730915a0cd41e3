"""Evaluation by decoding: batches by length, devices and host, files, and names of metrics."""

import jax
import numpy as np
import pytest

from t5x_lite import evaluation
from t5x_lite.data.interfaces import IndexedBatches
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run
from tests.evaluation import evaluation_cases as cases
from tests.models import toy_model


@pytest.mark.parametrize(
  'kwargs',
  [
    {},
    {'batch_by_length': False},
    {'use_memory_cache': False},
    {'concurrent_metrics': True},
    {'max_num_lengths': 1},
  ],
)
def test_each_example_is_predicted_once_however_they_are_batched(tmp_path, kwargs):
  model, state, axes = cases.make_state()
  evaluator = cases.make_evaluator(cases.make_task(), tmp_path, **kwargs)
  notes = []
  metrics = evaluator.evaluate(state, axes, step=7, note_fn=notes.append).result()
  evaluator.flush()
  evaluator.close()
  assert evaluator.num_batches == len(notes) == 3 and notes[1] == 'decoding letters: batch 2 of 3'
  rows = cases.predictions(tmp_path)
  task = evaluator.eval_tasks[0]
  params = jax.device_get(state.params)
  for row, example in zip(rows, task.examples, strict=True):
    inputs = (
      np.pad(example['targets'], (1, 5 - len(example['targets'])))[None]
      if len(example['targets']) < 6
      else (np.pad(example['targets'][:-1], (1, 0))[None])
    )
    expected = model.predict_batch(params, {'decoder_input_tokens': inputs})
    assert row['prediction'] == toy_model.ToyVocabulary().decode(np.asarray(expected)[0].tolist())
    assert row['targets'] == example['targets_pretokenized']
  right = np.mean([row['prediction'] == row['targets'] for row in rows])
  assert {name: value.value for name, value in metrics['letters'].items()} == {'exact_match': right}
  (line,) = summaries.read_metrics(tmp_path / 'inference_eval/letters/metrics.jsonl')
  assert line['step'] == 7 and line['exact_match'] == right


def test_numbers_of_examples(tmp_path):
  _, state, axes = cases.make_state()
  seen = []

  def count(targets, predictions):
    seen.append(len(targets))
    return {'count': len(predictions)}

  evaluator = cases.make_evaluator(
    cases.make_task(metric_fns=[count]), tmp_path, num_examples=5, num_examples_to_write=2
  )
  assert evaluator.evaluate(state, axes, step=7).result()['letters']['count'].value == 5.0
  evaluator.close()
  assert seen == [5] and [row['index'] for row in cases.predictions(tmp_path)] == [0, 1]


def test_batches_that_are_not_in_memory_are_read_by_the_function_given():
  task, doing = cases.make_evaluator(cases.make_task()).eval_tasks[0], []
  _, state, axes = cases.make_state()
  runner = evaluation.OutputRunner(
    cases.make_state()[0], toy_run.partitioner(), evaluation.InferenceEvalConfig()
  )

  def read(batches, what):
    doing.append(what)
    return iter(batches)

  expected, found = (
    runner.run(t, state, axes, read_fn=read) for t in (task, cases.with_fns(task, rows=None))
  )
  assert doing == ["reading a batch of the evaluation data 'letters'"]
  np.testing.assert_array_equal(found['predict'], expected['predict'])


def test_batches_that_lack_examples_are_rejected():
  task = cases.make_evaluator(cases.make_task()).eval_tasks[0]
  short = IndexedBatches(lambda: iter(list(task.batches)[:1]), 1)
  _, state, axes = cases.make_state()
  runner = evaluation.OutputRunner(
    cases.make_state()[0], toy_run.partitioner(), evaluation.InferenceEvalConfig()
  )
  with pytest.raises(DataError, match='lack 12 of 20 examples; the first is number 8'):
    runner.run(cases.with_fns(task, rows=None, batches=short), state, axes)


def test_seqios_evaluator_needs_seqios_tasks():
  cfg = toy_run.dataset('validation')
  for cls, options, fragment in (
    (dict, {}, "it is 'builtin'"),
    ('seqio', {}, 'must be None or a class'),
  ):
    with pytest.raises(ConfigError, match=fragment):
      evaluation.check_evaluator_cls(cls, cfg, evaluation.InferenceEvalConfig(**options))
  with pytest.raises(ConfigError, match='Set seqio.Evaluator.num_examples'):
    evaluation.check_evaluator_cls(dict, None, evaluation.InferenceEvalConfig(num_examples=3))
