"""Vocabularies: ids, texts, equality. seqio's own classes are compared with in test_seqio_data.py."""

import copy
import pathlib
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.data import vocabularies
from t5x_lite.data.text import examples as text_examples
from t5x_lite.errors import ConfigError
from t5x_lite.storage import files
from t5x_lite.storage import object_store
from tests.data.text.test_ids import train_model


def test_byte_ids():
  vocabulary = data.ByteVocabulary(extra_ids=125)
  assert (vocabulary.vocab_size, vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (
    384,
    0,
    1,
    2,
  )
  # The ids of ByT5: byte + 3.
  assert vocabulary.encode('Aé\n') == [68, 198, 172, 13]
  assert vocabularies.sentinel_id(vocabulary) == 383
  assert data.ByteVocabulary().vocab_size == 259


@pytest.mark.parametrize(
  'ids, text',
  [
    ([68, 1, 69], 'A'),  # up to the end of the sequence
    ([68, 383, 259, 69], 'AB'),  # sentinels leave no trace
    ([0, 2, 68, 0, 69], 'AB'),  # nor do special ids
    ([198, 68], 'A'),
    ([68, 198], 'A'),
    ([131, 258, 68], 'A'),  # nor bytes that are not UTF-8
    ([198, 172, 229, 133], 'é'),
    ([], ''),
    ([1], ''),
    ([-1, 68, -300], 'A'),
  ],
)
def test_byte_texts(ids, text):
  assert data.ByteVocabulary(extra_ids=125).decode(ids) == text


def test_byte_round_trip():
  vocabulary = data.ByteVocabulary()
  text = ''.join(chr(c) for c in [*range(32, 1000, 7), 0x4E2D, 0x1F600])
  assert vocabulary.decode(vocabulary.encode(text)) == text


def test_pass_through():
  vocabulary = data.PassThroughVocabulary(100, eos_id=1)
  assert vocabulary.encode([5, 6]) == [5, 6] and vocabulary.decode([5, 1, 6]) == [5, 1]
  assert (vocabulary.vocab_size, vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id) == (
    100,
    1,
    None,
    0,
  )
  assert data.PassThroughVocabulary(9).decode([5, 1, 6]) == [5, 1, 6]


def test_equality():
  assert data.ByteVocabulary(5) == data.ByteVocabulary(5) != data.ByteVocabulary(6)
  assert len({data.ByteVocabulary(5), data.ByteVocabulary(5), data.PassThroughVocabulary(264)}) == 2
  assert data.same_vocabulary(data.PassThroughVocabulary(9), data.PassThroughVocabulary(9))
  assert not data.same_vocabulary(
    data.PassThroughVocabulary(9), data.PassThroughVocabulary(9, eos_id=1)
  )
  assert not data.same_vocabulary(data.ByteVocabulary(5), object())


@pytest.mark.parametrize('base', [object, data.ByteVocabulary])
def test_a_class_of_another_package_is_not_taken_for_the_one_of_its_name(base):
  own = type(
    'ByteVocabulary',
    (base,),
    {'__module__': 'mine', 'extra_ids': 0, 'eos_id': 1, 'encode': lambda *_: [7]},
  )()
  assert vocabularies.kind_of(own) == 'mine.ByteVocabulary'
  assert text_examples.encode_text('<extra_id_0>', own) == [7]
  assert text_examples.encode_text('<extra_id_0>', data.ByteVocabulary(5)) == [263]
  if base is object:
    assert not data.same_vocabulary(own, data.ByteVocabulary(0))


def test_one_file_is_one_vocabulary_however_its_path_is_written(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('link').symlink_to(tmp_path)
  relative, others = (
    data.SentencePieceVocabulary('a.model', 3),
    [
      data.SentencePieceVocabulary(path, 3)
      for path in ('./a.model', str(tmp_path / 'a.model'), 'link/a.model')
    ],
  )
  assert all(data.same_vocabulary(relative, other) for other in others)
  assert not data.same_vocabulary(relative, data.SentencePieceVocabulary('b.model', 3))
  assert not data.same_vocabulary(relative, data.SentencePieceVocabulary('gs://a.model', 3))
  assert data.same_vocabulary(*(data.SentencePieceVocabulary('gs://a.model', 3) for _ in range(2)))
  assert repr(data.ByteVocabulary(5)) == 'ByteVocabulary(5)'


@pytest.mark.parametrize(
  'make',
  [
    lambda: data.ByteVocabulary(-1),
    lambda: data.PassThroughVocabulary(0),
    lambda: data.round_vocab_size_to_multiple(data.ByteVocabulary(), 0),
  ],
)
def test_rejected(make):
  with pytest.raises(ConfigError, match='must be an integer >= [01], got'):
    make()


@pytest.mark.parametrize('eos_id', [-1, 0, 9, 10])
def test_the_end_of_sequence_is_an_id_that_is_not_padding(eos_id):
  with pytest.raises(
    ConfigError, match=rf'eos_id` must be an integer in \(0, 9\) or None, got {eos_id}'
  ):
    data.PassThroughVocabulary(9, eos_id=eos_id)
  own = types.SimpleNamespace(eos_id=eos_id, vocab_size=9)
  with pytest.raises(ConfigError, match=rf'input.eos_id` must be None or .*, got {eos_id}'):
    vocabularies.check_ids('input', own)
  vocabularies.check_ids('input', types.SimpleNamespace(eos_id=None, vocab_size=9))


_TRAINS_AFTER_ENCODING = """
import io
import sys

import sentencepiece

from t5x_lite import data

vocabulary = data.SentencePieceVocabulary(sys.argv[1], 10)
vocabulary.decode(vocabulary.encode('fox <extra_id_0>'))
vocabulary.encode_literally('fox <extra_id_0>')
lines = iter(['the quick brown fox', 'pack my box'] * 20)
sentencepiece.SentencePieceTrainer.train(
  sentence_iterator=lines, model_writer=io.BytesIO(), vocab_size=30, hard_vocab_limit=False
)
"""


def test_the_log_of_sentencepiece_is_as_the_user_has_set_it(tmp_path):
  path = train_model(tmp_path / 'x.model')
  done = subprocess.run(
    [sys.executable, '-c', _TRAINS_AFTER_ENCODING, path],
    capture_output=True,
    text=True,
    check=True,
  )
  # Its level is that of the entire process; this is a message of the level info.
  assert '_trainer.cc:' in done.stderr


@pytest.mark.parametrize(
  'options, message',
  [
    ({'unk_id': 0, 'bos_id': 1, 'eos_id': 2, 'pad_id': -1}, 'eos_id = 2, unk_id = 0, id 0 = <unk>'),
    ({'eos_id': -1}, 'pad_id = 0, eos_id = -1'),
    ({'eos_id': 0, 'pad_id': 1}, 'eos_id = 0'),
    ({'pad_id': 3}, 'pad_id = 3'),
    # Accepted: bytes have pieces, so that nothing is unknown; id 0 begins sequences, which no text contains.
    (
      {
        'unk_id': 0,
        'bos_id': 1,
        'eos_id': 2,
        'pad_id': -1,
        'byte_fallback': True,
        'vocab_size': 330,
      },
      None,
    ),
    ({'bos_id': 0, 'pad_id': 3}, None),
  ],
)
def test_special_ids_of_sentencepiece(tmp_path, options, message):
  path = train_model(tmp_path / 'x.model', **options)
  vocabulary = data.SentencePieceVocabulary(path, 10)
  if message is None:
    assert 0 not in vocabulary.encode('fox \u4e2d') and vocabulary.eos_id > 0
    return
  examples = tmp_path / 'a.jsonl'
  examples.write_text('{"inputs": "fox", "targets": "dog"}\n')
  uses = [
    lambda: vocabulary.encode('a'),
    lambda: vocabulary.eos_id,
    lambda: data.text_task(
      name='t', texts_fn=lambda split: [], splits=('train',), vocabulary=vocabulary
    ),
    lambda: (
      data.file_task(
        name='f', splits={'train': str(examples)}, format='jsonl', vocabulary=vocabulary
      )
      .table('train', {'inputs': 8, 'targets': 8})
      .examples(0, np.arange(1))
    ),
  ]
  for use in uses:
    with pytest.raises(ConfigError, match=f'{message}.*t5x_lite vocab'):
      use()


@pytest.fixture(scope='module')
def model_file(tmp_path_factory):
  import sentencepiece

  prefix = tmp_path_factory.mktemp('sentencepiece') / 'tiny'
  from t5x_lite.data import corpora

  sentences = [
    line for text in corpora.python_docs('validation')[:20] for line in text.splitlines() if line
  ]
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(sentences),
    model_prefix=str(prefix),
    vocab_size=200,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    minloglevel=2,
  )
  return f'{prefix}.model'


def test_sentencepiece(model_file):
  vocabulary = data.SentencePieceVocabulary(model_file, extra_ids=10)
  assert (vocabulary.vocab_size, vocabulary.eos_id, vocabulary.unk_id) == (210, 1, 2)
  text = 'The statement is a name'
  ids = vocabulary.encode(text)
  assert vocabulary.decode([*ids, 1, 50]) == text and max(ids) < 200
  # The first sentinel is the last id, as span corruption wants it; numbered upwards on request.
  assert vocabulary.encode('<extra_id_0> <extra_id_9>')[-2:] == [209, 200]
  upwards = data.SentencePieceVocabulary(model_file, extra_ids=10, reverse_extra_ids=False)
  assert upwards.encode('<extra_id_0>')[-1] == 200
  assert vocabulary == data.SentencePieceVocabulary(model_file, extra_ids=10) != upwards
  for copied in (copy.deepcopy(vocabulary), pickle.loads(pickle.dumps(vocabulary))):
    assert copied == vocabulary and copied.encode(text) == ids


def test_sentencepiece_without_its_file_or_package(tmp_path, monkeypatch):
  with pytest.raises(ConfigError, match='a readable sentencepiece model .No such file'):
    _ = data.SentencePieceVocabulary(str(tmp_path / 'none.model')).vocab_size
  monkeypatch.setitem(__import__('sys').modules, 'sentencepiece', None)
  with pytest.raises(
    ConfigError, match=r'needs the packages sentencepiece.*pip install sentencepiece protobuf'
  ):
    data.SentencePieceVocabulary('x.model').encode('a')


def test_sentencepiece_in_a_store(store, model_file):
  files.write(f'{store.root}/x.model', pathlib.Path(model_file).read_bytes())
  vocabulary = data.SentencePieceVocabulary(f'{store.root}/x.model', extra_ids=10)
  assert vocabulary.encode('a dict') == data.SentencePieceVocabulary(
    model_file, extra_ids=10
  ).encode('a dict')
  assert data.same_vocabulary(vocabulary, pickle.loads(pickle.dumps(vocabulary)))
  with pytest.raises(
    ConfigError, match=r'readable sentencepiece model \(No such file.*Set --gin.VOCABULARY_FILE'
  ):
    _ = data.SentencePieceVocabulary(f'{store.root}/y.model').vocab_size


def test_a_store_without_its_package_names_the_extra(monkeypatch):
  def fail(*args, **kwargs):
    raise ImportError('No module named gcsfs')

  object_store.connection.cache_clear()
  monkeypatch.setattr(object_store.fsspec, 'filesystem', fail)
  with pytest.raises(
    ConfigError,
    match=r'needs gcsfs.*Install with.*(\[gcs\]|gcsfs>=).*Set --gin.VOCABULARY_FILE to a local copy',
  ):
    _ = data.SentencePieceVocabulary(
      'gs://t5-data/vocabs/cc_all.32000/sentencepiece.model'
    ).vocab_size
