"""Examples of a report: their order, and texts of all forms of predictions."""

import json

import pytest

from t5x_lite.apps.report import examples
from t5x_lite.apps.report import run_record


def _examples(folder, rows):
  """Returns the examples of a run with these predictions."""
  (folder / 'inference_eval/task').mkdir(parents=True)
  lines = {'metrics': [{'step': 5, 'f1': 0.5}], 'predictions-5': rows, 'predictions-4': []}
  for name, found in lines.items():
    path = folder / f'inference_eval/task/{name}.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in found))
  return list(examples.newest(run_record.read('a', folder)))


@pytest.mark.parametrize(
  'rows, order, inputs',
  [
    (
      [
        {'inputs': 'same', 'targets': 'abc', 'prediction': 'abc'},
        {'inputs': 'other', 'targets': 'abc', 'prediction': 'xyz'},
        {'inputs': 'near', 'targets': 'abc', 'prediction': 'abd'},
        {'inputs': 'both empty', 'targets': '', 'prediction': ''},
        {'inputs': 'empty', 'targets': 'abc', 'prediction': ''},
      ],
      'those with the lowest chrF first',
      ['other', 'empty', 'near', 'same', 'both empty'],
    ),
    (
      [
        {'inputs': 'reference', 'targets': 'no', 'references': ['no', 'abc'], 'prediction': 'abc'},
        {'inputs': 'best last', 'targets': 'abc', 'prediction': ['abc', 'xyz']},
      ],
      'those with the lowest chrF first',
      ['best last', 'reference'],
    ),
    (
      [
        {'inputs': 'good', 'score': -1.0},
        {'inputs': 'bad', 'score': -5.0},
        {'inputs': 'NaN', 'score': float('nan')},
      ],
      'those with the lowest score first',
      ['NaN', 'bad', 'good'],
    ),
    (
      [{'inputs': 'a', 'prediction': 'x'}, {'inputs': 'b', 'prediction': {'y': 1}}],
      'in the order of the file',
      ['a', 'b'],
    ),
  ],
)
def test_the_worst_examples_come_first(tmp_path, rows, order, inputs):
  (found,) = _examples(tmp_path, rows)
  assert (found.task, found.step, found.order) == ('task', 5, order)
  assert [example.texts['input'] for example in found.examples] == inputs
  predictions = {
    example.texts['input']: example.texts.get('prediction') for example in found.examples
  }
  assert predictions.get('empty', '(empty)') == '(empty)' and predictions.get('NaN') is None


def test_long_texts_are_cut(tmp_path):
  (found,) = _examples(tmp_path, [{'inputs': 'x' * 5000, 'targets': ['a', 1], 'prediction': None}])
  (example,) = found.examples
  text = example.texts.pop('input')
  assert len(text) < 1100 and text.endswith('(5,000 characters)')
  assert example.texts == {'target': 'a\n1'}


def test_an_evaluation_without_predictions_has_no_examples(tmp_path):
  assert not _examples(tmp_path, [])
