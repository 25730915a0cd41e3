"""Coverage of texts by a vocabulary."""

import pytest

from t5x_lite import data
from t5x_lite.apps.vocab import check as vocab_check
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


def test_byte_fallback_leaves_nothing_unknown(tmp_path):
  plain = _train(tmp_path / 'a.model')
  bytewise = _train(tmp_path / 'b.model', vocab_size=276, byte_fallback=True)
  text = 'the cat sat in Überlingen'
  by_model = {
    t.model_file: vocab_check.check_vocabulary(
      data.SentencePieceVocabulary(t.model_file, 4), [text], 12
    )
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
  found = vocab_check.check_vocabulary(vocabulary, texts, max_length=lengths[1])
  assert (found.num_texts, found.num_words, found.num_tokens) == (3, 6, sum(lengths))
  assert (
    found.length_percentiles[100] == max(lengths) + 1
    and found.length_percentiles[50] == sorted(lengths)[1] + 1
  )
  # Folded white space does not count as a difference; the end of sequence makes the second text one id too long.
  assert (found.num_unknown, found.num_round_trips, found.num_longer) == (1, 2, 1)
  assert found.first_difference[0] == 'ZZZ'
  text = vocab_check.describe_coverage('a task', {'inputs': found})
  assert (
    '66.67 %' in text
    and "'ZZZ'" in text
    and 'would be truncated' in text
    and '--byte_fallback' in text
  )
  with pytest.raises(DataError, match='no texts'):
    vocab_check.check_vocabulary(vocabulary, [])


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
