"""Added tokens: the ids and texts of transformers, whose rules the expected parts state."""

import copy
import json

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import builtin_tasks
from t5x_lite.data.batches import table_iterator
from t5x_lite.data.text import ids as text_ids
from t5x_lite.data.text.added_tokens import AddedToken
from t5x_lite.data.text.added_tokens import AddedTokensVocabulary
from tests.data import builtin_cases as cases
from tests.data.text.test_ids import train_model


def _tokens(first):
  tokens = [
    dict(content='<sep>', normalized=True),
    dict(content='[L]', lstrip=True),
    dict(content='[R]', rstrip=True),
    dict(content='jump', single_word=True),
    dict(content='\n'),
    dict(content='\uff21\uff22', normalized=True),
    dict(content='<sepa>'),
  ]
  return [AddedToken(id=first + i, **token) for i, token in enumerate(tokens)]


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  base = data.SentencePieceVocabulary(
    train_model(tmp_path_factory.mktemp('pieces') / 'x.model'), 100
  )
  return AddedTokensVocabulary(base, _tokens(base.vocab_size))


# Text, and its parts: the number of a token, or a text that is encoded alone. Compared with transformers 5.23.
_PARTS = [
  ('fox <sep> dog', ['fox', 0, 'dog']),
  ('fox<sep>dog', ['fox', 0, 'dog']),
  ('<sep><sep>x', [0, 0, 'x']),
  ('fox  [L]  dog', ['fox', 1, 'dog']),
  ('fox  [R]  dog', ['fox', 2, 'dog']),
  ('jump jumps, _jump jump.', [3, 'jumps, _jump', 3, '.']),
  ('fox\ndog', ['fox', 4, 'dog']),
  ('[R] \n', [2, 4]),
  ('fox AB \uff21\uff22', ['fox', 5, 5]),
  ('fo\uff58 <sep>', ['fox', 0]),
  ('<sepa><sep', [6, '<sep']),
  ('  fox ', ['fox']),
  ('', []),
]


@pytest.mark.parametrize('text, parts', _PARTS)
def test_pieces(vocabulary, text, parts):
  size = vocabulary.base.vocab_size
  expected = []
  for part in parts:
    expected += [size + part] if isinstance(part, int) else vocabulary.base.encode(part)
  assert vocabulary.encode(text) == expected
  assert copy.deepcopy(vocabulary).encode(text) == expected


def test_texts(vocabulary):
  size = vocabulary.base.vocab_size
  assert vocabulary.vocab_size == size + 7
  assert vocabulary.decode(vocabulary.encode('fox <sep> dog')) == 'fox<sep> dog'  # as transformers
  assert vocabulary.decode([size + 1, *vocabulary.base.encode('dog'), 1, size]) == '[L] dog'
  assert vocabulary.decode([]) == ''
  unknown = vocabulary.base.decode([2])
  assert vocabulary.decode([size + 7]) == vocabulary.decode([-3]) == unknown


def test_sentinels_are_those_of_the_base(vocabulary):
  first = vocabulary.base.vocab_size - 1
  assert data.vocabularies.sentinel_id(vocabulary) == first
  assert text_ids.num_sentinels(vocabulary) == vocabulary.extra_ids == 100
  ids = text_ids.encode_text('fox<sep><extra_id_1>', vocabulary)
  assert ids[-2:] == [first + 1, first - 1]
  assert first - 1 not in text_ids.encode_text('<extra_id_1>', vocabulary, literal_sentinels=True)


def test_bytes():
  vocabulary = AddedTokensVocabulary(data.ByteVocabulary(125), _tokens(384))
  ids = text_ids.encode_text('a<sep><extra_id_0> b', vocabulary)
  assert ids == [100, 384, 383, 35, 101]
  assert text_ids.decode_ids(ids, vocabulary) == 'a<sep><extra_id_0> b'
  assert vocabulary.decode([100, 390, 391, 101]) == 'a<sepa>b'
  # The white space on the other side of a token stays.
  assert vocabulary.encode('a [L] b') == [100, 385, 35, 101]
  assert vocabulary.encode('a [R] b') == [100, 35, 386, 101]


def test_equality(vocabulary):
  tokens = _tokens(vocabulary.base.vocab_size)
  assert vocabulary == AddedTokensVocabulary(vocabulary.base, tokens)
  assert not data.same_vocabulary(vocabulary, AddedTokensVocabulary(vocabulary.base, tokens[1:]))
  assert not data.same_vocabulary(vocabulary, vocabulary.base)


def _added_task(kind, vocabulary, tmp_path):
  texts = [(f'the <sep> {i}', f'{i}<sep>') for i in range(9)]
  if kind == 'text_task':
    return data.text_task(
      name='t', texts_fn=lambda split: texts, splits=('train',), vocabulary=vocabulary
    )
  path = tmp_path / 'a.jsonl'
  rows = [json.dumps({'inputs': first, 'targets': second}) for first, second in texts]
  path.write_text('\n'.join(rows))
  return data.file_task(
    name='t', splits={'train': str(path)}, format='jsonl', vocabulary=vocabulary
  )


@pytest.mark.parametrize('kind', ['text_task', 'file_task'])
@pytest.mark.parametrize('is_bytes', [False, True])
def test_a_recorded_run_keeps_its_ids(tmp_path, vocabulary, caplog, kind, is_bytes):
  """Earlier versions encoded added tokens like other texts, so that their runs had the base vocabulary."""
  if is_bytes:
    vocabulary = AddedTokensVocabulary(data.ByteVocabulary(125), _tokens(384))
  table_iterator.log_earlier_sentinels.cache_clear()
  before = cases.open(cases.make_cfg(_added_task(kind, vocabulary.base, tmp_path), batch_size=4))
  cases.take(before, 3)
  state = before.get_state()
  task = _added_task(kind, vocabulary, tmp_path)
  new = cases.open(cases.make_cfg(task, batch_size=4))
  assert vocabulary.base.vocab_size in next(new)['encoder_input_tokens']
  # By the position, and by the record of the run, which has no `earlier_sentinels`.
  new.set_state(state)
  again = cases.open(cases.make_cfg(task, batch_size=4, earlier_sentinels=True))
  again.set_state(state)
  expected = next(before)
  cases.assert_equal(next(new), expected)
  cases.assert_equal(next(again), expected)
  assert caplog.text.count('keep the ids of the earlier version') == 1


def test_documents_of_a_recorded_run_keep_their_ids(vocabulary):
  lengths = {'inputs': 20, 'targets': 10}
  documents = ['the fox <sep> and the dog ' * 9]
  table = builtin_tasks.SpanCorruptionExamples(documents, vocabulary, lengths)
  before = builtin_tasks.SpanCorruptionExamples(documents, vocabulary.base, lengths)
  assert table.earlier.fingerprint == before.fingerprint != table.fingerprint
  assert table.earlier.earlier is None and before.earlier is None
  numbers = np.arange(3)
  for found, expected in zip(
    table.earlier.examples(5, numbers), before.examples(5, numbers), strict=True
  ):
    cases.assert_equal(found, expected)
