"""The form of results: T5X's keys, values that JSON and its readers can bear."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import errors
from t5x_lite.apps import infer as inference
from t5x_lite.storage import json_lines

_BYTES = data.ByteVocabulary(extra_ids=125)
_EXAMPLES = [
  {
    'inputs_pretokenized': 'a',
    'targets_pretokenized': 'x',
    'inputs': np.array([100, 1]),
    'id': 7,
    'raw': b'h\xc3\xa9',
  },
  {'inputs_pretokenized': 'é\u2028\x85', 'inputs': np.array([5, 1]), 'half': '\ud800'},
]


def _ids(*texts, length=6):
  rows = np.zeros((len(texts), length), np.int32)
  for row, text in zip(rows, texts, strict=True):
    ids = [*_BYTES.encode(text), 1]
    row[: len(ids)] = ids
  return rows


def _write(tmp_path, inferences, mode='predict', **options):
  inference.write_inferences_to_file(
    str(tmp_path / 'f'), inferences, _EXAMPLES, mode, _BYTES, **options
  )
  text = (tmp_path / 'f').read_text(encoding='utf-8')
  assert (
    len(text.splitlines()) == 2
  )  # also by Python's notion of lines, of which JSON knows nothing
  return [json.loads(line) for line in text.splitlines()]


def test_predictions(tmp_path):
  assert _write(tmp_path, (_ids('ü', 'b'), {})) == [
    {'inputs': {'inputs_pretokenized': 'a', 'targets_pretokenized': 'x'}, 'prediction': 'ü'},
    {'inputs': {'inputs_pretokenized': 'é\u2028\x85'}, 'prediction': 'b'},
  ]


def test_several_decodes_with_auxiliary_outputs(tmp_path):
  decodes = np.stack([_ids('a', 'b'), _ids('c', 'd')])
  aux = {
    'scores': np.array([[-2.0, -1.0], [-4.0, -3.0]], np.float32),
    'more': {'dots': [1, 2]},
    'half': np.asarray(jnp.array([1.5, 2.5], jnp.bfloat16)),
  }
  rows = _write(tmp_path, (decodes, aux), 'predict_with_aux', output_ids=True)
  assert [row['prediction'] for row in rows] == [['a', 'b'], ['c', 'd']]
  assert rows[0]['prediction_tokens'] == [[100, 1], [101, 1]]
  assert [row['aux'] for row in rows] == [
    {'scores': [-2.0, -1.0], 'more': {'dots': 1}, 'half': 1.5},
    {'scores': [-4.0, -3.0], 'more': {'dots': 2}, 'half': 2.5},
  ]


def test_scores(tmp_path):
  rows = _write(tmp_path, (np.array([-1.5, -2.0], np.float32), {}), 'score')
  assert (
    [row['score'] for row in rows] == [-1.5, -2.0]
    and 'aux' not in rows[0]
    and 'prediction' not in rows[0]
  )
  rows = _write(tmp_path, (jnp.array([-1.5, -2.0]), {'loss': np.array([3.0, 4.0])}), 'score')
  assert rows[1]['aux'] == {'loss': 4.0}


def test_fields_of_the_example(tmp_path):
  inferences = (_ids('a', 'b'), {})
  first, second = [row['inputs'] for row in _write(tmp_path, inferences, include_all_inputs=True)]
  assert first == {**_EXAMPLES[0], 'inputs': [100, 1], 'raw': 'hé'} and second['half'] == '\ud800'
  rows = _write(tmp_path, inferences, input_fields_to_include=['id', 'targets'])
  assert [row['inputs'] for row in rows] == [{'targets_pretokenized': 'x', 'id': 7}, {}]
  with pytest.raises(errors.ConfigError, match='include_all_inputs and input_fields_to_include'):
    _write(tmp_path, inferences, include_all_inputs=True, input_fields_to_include=['id'])


def test_ids_without_padding_and_ids_of_numbers(tmp_path):
  full = np.full((2, 3), 5)
  inference.write_inferences_to_file(
    str(tmp_path / 'f'),
    (full, {}),
    _EXAMPLES,
    'predict',
    data.PassThroughVocabulary(9),
    output_ids=True,
  )
  row = json.loads((tmp_path / 'f').read_text(encoding='utf-8').split('\n')[0])
  assert row['prediction'] == row['prediction_tokens'] == [5, 5, 5]


def test_results_for_other_examples_are_rejected(tmp_path):
  with pytest.raises(ValueError, match='zip'):
    inference.write_inferences_to_file(
      str(tmp_path / 'f'), (_ids('a'), {}), _EXAMPLES, 'predict', _BYTES
    )


def test_a_file_in_a_store(tmp_path, store):
  rows = _write(tmp_path, (_ids('ü', 'b'), {}))
  inference.write_inferences_to_file(
    f'{store.root}/f', (_ids('ü', 'b'), {}), _EXAMPLES, 'predict', _BYTES
  )
  assert [row for _, row in json_lines.read(f'{store.root}/f')] == rows
