"""Sentinels in texts: one id in all sources of texts, and the same texts back."""

import io
import json
import logging

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import builtin_tasks
from t5x_lite.data.batches import positions
from t5x_lite.data.batches import table_iterator
from t5x_lite.data.sources import table
from t5x_lite.data.text import examples as text_examples
from t5x_lite.data.text import ids as text_ids
from t5x_lite.data.text import sources as text_sources
from t5x_lite.errors import DataError
from tests.data import builtin_cases as cases

_BYTES = data.ByteVocabulary(125)


def train_model(path, **options):
  """Write a sentencepiece model of T5's form, and return its path."""
  import sentencepiece

  lines = ['the quick brown fox jumps over the lazy dog (and f(x))', 'pack my box with five jugs.']
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines * 20),
    model_writer=model,
    minloglevel=2,
    hard_vocab_limit=False,
    **{'vocab_size': 60, 'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1, **options},
  )
  path.write_bytes(model.getvalue())
  return str(path)


@pytest.fixture(scope='module')
def pieces(tmp_path_factory):
  return data.SentencePieceVocabulary(
    train_model(tmp_path_factory.mktemp('pieces') / 'x.model'), 100
  )


def _ids_of_sources(tmp_path, vocabulary, text, **options):
  """Return the ids of a text by source, without the end of sequence."""
  lengths = {'inputs': 99, 'targets': 99}
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps({'inputs': text, 'targets': text}) + '\n')
  tasks = {
    'text_task': data.text_task(
      name='t',
      texts_fn=lambda split: [(text, text)],
      splits=('train',),
      vocabulary=vocabulary,
      **options,
    ),
    'file_task': data.file_task(
      name='f', splits={'train': str(path)}, format='jsonl', vocabulary=vocabulary, **options
    ),
  }
  found = {}
  for name, task in tasks.items():
    (example,) = task.table('train', lengths).examples(0, np.arange(1))
    found |= {f'{name} {feature}': ids.tolist() for feature, ids in example.items()}
  cfg = data.TextFileConfig(path=str(path), task_feature_lengths=lengths, batch_size=1, **options)
  source = text_sources.TextSource(
    cfg, 'encoder_decoder', vocabulary, vocabulary, needs_targets=True
  )
  (record,) = source.records()
  found |= {f'infer {feature}': ids.tolist() for feature, ids in source.prepare(record).row.items()}
  feature = text_examples.TextFeature(vocabulary=vocabulary, **options)
  reader = text_examples.ExampleReader(
    data.get_converter('encoder_decoder'), {'inputs': feature, 'targets': feature}, lengths
  )
  (example,) = reader.read([{'inputs': text, 'targets': text}])
  found |= {f'chat {name}': example[name].tolist() for name in lengths}
  assert {ids[-1] for ids in found.values()} == {1}
  return {name: ids[:-1] for name, ids in found.items()}


@pytest.mark.parametrize(
  'text',
  ['a <extra_id_0> b', '<extra_id_124>', 'f(<extra_id_3>)', '<extra_id_0><extra_id_1>.', 'plain'],
)
def test_all_sources_have_the_same_bytes(tmp_path, text):
  expected = []
  rest = text
  for number in (0, 1, 3, 124):
    rest = rest.replace(f'<extra_id_{number}>', chr(0xE000 + number))
  for c in rest:
    number = ord(c) - 0xE000
    expected += [383 - number] if 0 <= number < 125 else [byte + 3 for byte in c.encode()]
  for name, ids in _ids_of_sources(tmp_path, _BYTES, text).items():
    assert ids == expected, name
  assert text_ids.decode_ids(expected, _BYTES) == text
  literal = [byte + 3 for byte in text.encode()]
  for name, ids in _ids_of_sources(tmp_path, _BYTES, text, literal_sentinels=True).items():
    assert ids == literal, name


@pytest.mark.parametrize(
  'text, equal',
  [
    ('the <extra_id_0> fox', 'the <extra_id_0> fox'),  # sentencepiece alone finds it
    ('f(<extra_id_3>)', 'f( <extra_id_3>)'),
    ('<extra_id_0><extra_id_1>.', '<extra_id_0> <extra_id_1>.'),
    ('fox\n<extra_id_7>', 'fox <extra_id_7>'),
    ('x<extra_id_100>', 'x<extra_id_100>'),  # there are only 100
  ],
)
def test_all_sources_have_the_same_pieces(tmp_path, pieces, text, equal):
  expected = pieces.encode(equal)
  for name, ids in _ids_of_sources(tmp_path, pieces, text).items():
    assert ids == expected, name
  assert sum(i >= pieces.vocab_size - 100 for i in expected) == text.count('<extra_id_') * (
    '100' not in text
  )
  plain = data.SentencePieceVocabulary(pieces.sentencepiece_model_file, 0)
  for name, ids in _ids_of_sources(tmp_path, pieces, text, literal_sentinels=True).items():
    assert ids == plain.encode(text), name


@pytest.mark.parametrize('text', ['<extra_id_00>', '<extra_id_007>', '<extra_id_\u0663>'])
def test_numbers_that_no_sentinel_has_are_text(text):
  assert text_ids.encode_text(text, _BYTES) == _BYTES.encode(text)
  assert text_ids.decode_ids(text_ids.encode_text(text, _BYTES), _BYTES) == text


def test_predictions_and_targets_with_sentinels_are_equal_texts():
  task = cases.make_task(metric_fns=[data.exact_match])
  text = '<extra_id_0> a <extra_id_1>'
  source = table.BuiltinSource(cases.make_cfg(task, split='train'))
  (found,) = source.open_eval_tasks(cases.layout(), 'encoder_decoder', 1)
  assert found.decode([*text_ids.encode_text(text, _BYTES), 1, 5]) == text


@pytest.mark.parametrize('ids', [[-1], [384], [5, 9000]])
def test_ids_outside_of_the_vocabulary_are_errors(ids):
  task = data.text_task(
    name='t',
    texts_fn=lambda split: [('a', 'b')],
    splits=('train',),
    vocabulary=_BYTES,
    encode_inputs_fn=lambda text: ids,
  )
  with pytest.raises(
    DataError, match=rf'example 1: the inputs must be .* to 383, .* got {ids[-1]}\.'
  ):
    task.table('train', {'inputs': 8, 'targets': 8})


def test_number_of_sentinels(pieces):
  assert text_ids.num_sentinels(_BYTES) == 125
  assert text_ids.num_sentinels(data.ByteVocabulary()) == 0
  assert text_ids.num_sentinels(pieces) == 100
  assert text_ids.num_sentinels(data.PassThroughVocabulary(9)) is None
  assert text_ids.num_sentinels(object()) is None


# --- Runs of earlier versions -------------------------------------------------------


def _sentinel_task(**options):
  texts = [(f'a <extra_id_0> {i}', str(i)) for i in range(9)]
  return data.text_task(
    name='t', texts_fn=lambda split: texts, splits=('train',), vocabulary=_BYTES, **options
  )


def test_a_recorded_run_keeps_its_ids(caplog):
  """Earlier versions saved positions in texts whose sentinels were bytes."""
  table_iterator.log_earlier_sentinels.cache_clear()
  before = cases.open(cases.make_cfg(_sentinel_task(literal_sentinels=True), batch_size=4))
  cases.take(before, 3)
  state = before.get_state()
  now = cases.open(cases.make_cfg(_sentinel_task(), batch_size=4))
  assert (383 in next(now)['encoder_input_tokens']) and not caplog.messages
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      now.set_state(state)
  assert len(caplog.messages) == 1
  assert "the texts of 't' keep the ids of the earlier version" in caplog.text
  cases.assert_equal(next(now), next(before))
  # The next position continues with them, also if the evaluations and the data are opened with the option.
  again = cases.open(cases.make_cfg(_sentinel_task(), batch_size=4, earlier_sentinels=True))
  again.set_state(now.get_state())
  cases.assert_equal(next(again), next(before))


def test_other_data_is_an_error_as_before():
  state = cases.open(cases.make_cfg(_sentinel_task(), batch_size=4)).get_state()
  saved = positions.read_state(state)
  saved['identity']['content']['t'][1] = 'another'
  with pytest.raises(DataError, match='position in other data'):
    cases.open(cases.make_cfg(_sentinel_task(), batch_size=4)).set_state(
      positions.write_state(saved['identity'], cursor=[0, 0], num_batches=0)
    )


def test_only_texts_with_other_ids_have_an_earlier_table(pieces):
  lengths = {'inputs': 64, 'targets': 12}
  for task, differs in (
    (_sentinel_task(), True),
    (_sentinel_task(literal_sentinels=True), False),
    (cases.make_task(), False),
    (data.get_builtin('python_keyword_cloze'), False),
    (builtin_tasks.keyword_cloze_task(vocabulary=pieces), True),
  ):
    assert (task.table(task.splits[0], lengths).earlier is not None) == differs, task.name


def test_a_recorded_run_over_files_keeps_the_ids_of_sentencepiece(tmp_path, pieces):
  text = 'f(<extra_id_3>)'
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps({'inputs': text, 'targets': text}) + '\n')
  task = data.file_task(name='f', splits={'train': str(path)}, format='jsonl', vocabulary=pieces)
  examples = task.table('train', {'inputs': 99, 'targets': 99})
  (now,) = examples.examples(0, np.array([0]))
  (before,) = examples.earlier.examples(0, np.array([0]))
  assert now['inputs'].tolist() == [*text_ids.encode_text(text, pieces), 1]
  assert before['inputs'].tolist() == [*pieces.encode(text), 1] != now['inputs'].tolist()
  assert examples.fingerprint != examples.earlier.fingerprint
  assert examples.earlier.earlier is None
