"""`t5x_lite vocab`: training SentencePiece models with T5's ids, and the check against tasks."""

import hashlib
import json

import pytest
import sentencepiece

from t5x_lite import data
from t5x_lite.apps.vocab import run as vocab
from t5x_lite.data import corpora
from t5x_lite.errors import ConfigError, DataError

_WORDS = [
  'the cat sat on the mat',
  'a dog ate the cat',
  'the dog sat',
  'mats and cats and dogs',
] * 5


def _train(path, lines=_WORDS, **kwargs):
  return vocab.train_vocabulary(lines, str(path), **{'vocab_size': 20, 'extra_ids': 4, **kwargs})


def test_ids_are_those_of_t5(tmp_path):
  trained = _train(tmp_path / 'new' / 'cats.model')
  vocabulary = data.SentencePieceVocabulary(trained.model_file, extra_ids=4)
  assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.vocab_size) == (
    0,
    1,
    2,
    24,
  )
  assert vocabulary.decode(vocabulary.encode('the cat ate')) == 'the cat ate'
  # Sentinels are the last ids, the first sentinel last, and are not in the file.
  assert vocabulary.encode('<extra_id_0> <extra_id_3>') == [23, 20]
  assert data.SentencePieceVocabulary(trained.model_file).vocab_size == 20
  processor = sentencepiece.SentencePieceProcessor(model_file=trained.model_file)
  assert (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id()) == (
    0,
    1,
    2,
    -1,
  )


def test_the_same_text_gives_the_same_bytes(tmp_path):
  lines = [line for text in corpora.python_docs('validation') for line in text.splitlines()]
  options = {'vocab_size': 300, 'max_lines': 200}
  hashes = {_train(tmp_path / name, lines, **options).sha256 for name in ('a.model', 'b.model')}
  assert len(hashes) == 1
  assert _train(tmp_path / 'c.model', lines, vocab_size=300).sha256 not in hashes
  assert (tmp_path / 'a.model').read_bytes() == (tmp_path / 'b.model').read_bytes()
  record = json.loads(vocab.parameters_file(tmp_path / 'a.model').read_text())
  assert record['sha256'] == hashlib.sha256((tmp_path / 'a.model').read_bytes()).hexdigest()
  assert (record['num_pieces'], record['max_lines'], record['byte_fallback']) == (300, 200, False)
  assert record['num_lines'] == len([line for line in lines if line.strip()])


def test_long_lines_are_not_left_out(tmp_path):
  vocabulary = data.SentencePieceVocabulary(
    _train(tmp_path / 'a.model', [' '.join(_WORDS * 100)]).model_file
  )
  assert vocabulary.unk_id not in vocabulary.encode('dogs and cats')


@pytest.mark.parametrize(
  'kwargs, fragments',
  [
    ({'vocab_size': 5000}, ['vocab_size` must be at most', 'got 5000', '--vocab_size']),
    ({'vocab_size': 5}, ['vocab_size` must be at least', 'got 5', '--character_coverage']),
    ({'vocab_size': 3}, ['an integer > 3']),
    ({'vocab_size': 20, 'character_coverage': 0.5}, ['a number in [0.98, 1]']),
    ({'vocab_size': 20, 'extra_ids': -1}, ['extra_ids` must be', 'got -1.']),
    ({'vocab_size': 20, 'max_lines': 0}, ['max_lines` must be', 'got 0.']),
    ({'lines': ['', ' ']}, ['No text']),
  ],
)
def test_rejected(tmp_path, kwargs, fragments):
  with pytest.raises((ConfigError, DataError)) as error:
    _train(tmp_path / 'a.model', **kwargs)
  for fragment in fragments:
    assert fragment in str(error.value)
  assert not list(tmp_path.iterdir())


def test_an_existing_model_stays(tmp_path):
  path = tmp_path / 'a.model'
  path.write_bytes(b'precious')
  with pytest.raises(ConfigError, match='exists.*--overwrite'):
    _train(path)
  with pytest.raises(ConfigError, match='at most'):
    _train(path, vocab_size=5000, overwrite=True)
  assert path.read_bytes() == b'precious'
  _train(path, overwrite=True)
  assert data.SentencePieceVocabulary(str(path)).vocab_size == 20


def test_sources(tmp_path):
  plain, rows = tmp_path / 'a.txt', tmp_path / 'a.jsonl'
  plain.write_bytes('ä\r\nb\n\n'.encode())
  rows.write_text('{"text": "x\\ny", "n": 1}\n\n{"text": "z"}\n')
  assert list(vocab.text_lines([str(plain), str(plain)])) == ['ä', 'b', ''] * 2
  assert list(vocab.json_lines([str(rows)], 'text')) == ['x', 'y', 'z']
  with pytest.raises(DataError, match="a.jsonl, line 1: .*'txt'.*Did you mean 'text'"):
    list(vocab.json_lines([str(rows)], 'txt'))
  assert not any(
    corpora.SENTINEL_TEXT in line
    for line in vocab.corpus_lines('python_keyword_cloze', 'validation')
  )
  plain.write_bytes(b'good\n\xff\xfe\n')
  rows.write_text('{"text": "x"}\n{"text": \n')
  for lines, place in (
    (vocab.text_lines([str(plain)]), 'a.txt, line 2'),
    (vocab.json_lines([str(rows)], 'text'), 'a.jsonl, line 2'),
  ):
    # The original error is raised through the code of the trainer.
    with pytest.raises(DataError, match=place):
      _train(tmp_path / 'a.model', lines)
  assert not (tmp_path / 'a.model').exists()
  for name, split in (('python_doc', 'train'), ('python_docs', 'trian')):
    with pytest.raises(ConfigError, match='Did you mean'):
      list(vocab.corpus_lines(name, split))


def test_byte_fallback_leaves_nothing_unknown(tmp_path):
  plain = _train(tmp_path / 'a.model')
  bytewise = _train(tmp_path / 'b.model', vocab_size=276, byte_fallback=True)
  text = 'the cat sat in Überlingen'
  by_model = {
    t.model_file: vocab.check_vocabulary(data.SentencePieceVocabulary(t.model_file, 4), [text], 12)
    for t in (plain, bytewise)
  }
  unknown, spelt = by_model[plain.model_file], by_model[bytewise.model_file]
  assert unknown.num_unknown >= 1 and unknown.num_bytes == 0 and unknown.num_round_trips == 0
  # The first letter is two bytes.
  assert spelt.num_unknown == 0 and spelt.num_bytes >= 2 and spelt.num_round_trips == 1


def test_check_counts(tmp_path):
  vocabulary = data.SentencePieceVocabulary(_train(tmp_path / 'a.model').model_file, 4)
  texts = ['the cat', 'the  cat\nsat', 'ZZZ']
  lengths = [len(vocabulary.encode(text)) for text in texts]
  found = vocab.check_vocabulary(vocabulary, texts, max_length=lengths[1])
  assert (found.num_texts, found.num_words, found.num_tokens) == (3, 6, sum(lengths))
  assert (
    found.length_percentiles[100] == max(lengths) + 1
    and found.length_percentiles[50] == sorted(lengths)[1] + 1
  )
  # Folded white space does not count as a difference; the end of sequence makes the second text one id too long.
  assert (found.num_unknown, found.num_round_trips, found.num_longer) == (1, 2, 1)
  assert found.first_difference[0] == 'ZZZ'
  text = vocab.describe_coverage('a task', {'inputs': found})
  assert (
    '66.67 %' in text
    and "'ZZZ'" in text
    and 'would be truncated' in text
    and '--byte_fallback' in text
  )
  with pytest.raises(DataError, match='no texts'):
    vocab.check_vocabulary(vocabulary, [])


def test_texts_of_tasks():
  lengths = {'inputs': 64, 'targets': 32}

  def read(name, lengths=lengths, max_examples=3, source='builtin'):
    cfg = data.DatasetConfig(name, lengths, 'validation', 1, False, 0, source=source)
    return data.read_task_texts(cfg, max_examples)

  lines, keywords = zip(*corpora.python_keyword_cloze('validation')[:3], strict=False)
  assert read('python_keyword_cloze') == {'inputs': list(lines), 'targets': list(keywords)}
  mixed = read('python_cloze_and_docs', max_examples=1)
  assert mixed['inputs'][0] == lines[0] and len(mixed['inputs']) == 2
  # Span corruption keeps the text only in the rest of the first document.
  assert mixed['inputs'][1][:6] in corpora.python_docs('validation')[0]
  with pytest.raises(ConfigError, match="'input'.*Did you mean 'inputs'"):
    read('python_keyword_cloze', {'input': 3})
  with pytest.raises(ConfigError, match="'synthetic'"):
    read('x', source='synthetic')
