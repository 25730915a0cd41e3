"""Tokenizers of exported folders: transformers' own classes load them and give the ids of our vocabularies."""

import gzip
import json
import shutil

import pytest

from t5x_lite import data
from t5x_lite.apps.vocab import run as vocab
from t5x_lite.checkpoints.hugging_face import families
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.data import corpora
from t5x_lite.data import tokenizer_folders
from tests.interop import hf_models
from tests.interop import records

_TEXTS = [
  'The statement is a name',
  '<extra_id_0> x in numbers:',
  'if x <extra_id_1> None: <extra_id_2>',
  'a  b\n\tc',
  '',
  ' leading and trailing ',
  'é ü ﬁ ½ 中文 \U0001f600',
  "it's `code` (with, brackets) [1] 100%",
  'x <extra_id_7>',
]
_T5_LIKE = ('t5_1_0', 't5_1_1', 'mt5', 'umt5', 'switch')


@pytest.fixture(scope='module')
def model_file(tmp_path_factory):
  """A stored sentencepiece model: other versions of sentencepiece may train another one."""
  path, stored = tmp_path_factory.mktemp('pieces') / 'docs.model', records.FOLDER / 'docs.model.gz'
  if records.get().mode is records.Mode.WRITE:
    records.FOLDER.mkdir(exist_ok=True)
    vocab.train_vocabulary(
      vocab.corpus_lines('python_docs', 'validation'), str(path), vocab_size=500, extra_ids=8
    )
    stored.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
  path.write_bytes(gzip.decompress(stored.read_bytes()))
  return str(path)


def _make_folder(path, family, tokenizer, vocab_size):
  """Writes a folder of the family without weights; returns the names of its tokenizer's files."""
  path.mkdir()
  (path / 'config.json').write_text(
    json.dumps(
      {'model_type': families.get_family(family).model_type, 'vocab_size': vocab_size, 'd_model': 8}
    )
  )
  return tokenizer_files.write(path, families.get_family(family), tokenizer, vocab_size=vocab_size)


@pytest.mark.parametrize('family', _T5_LIKE)
def test_sentencepiece(tmp_path, model_file, family):
  ours = data.SentencePieceVocabulary(model_file, 8)
  folder = tmp_path / 'x'
  assert set(_make_folder(folder, family, ours, 512)) == {
    'tokenizer_config.json',
    'tokenizer.json',
    'spiece.model',
  }
  texts = [*_TEXTS, *corpora.python_docs('validation')[2].splitlines()]
  for loader in ('T5Tokenizer', 'AutoTokenizer'):
    theirs = hf_models.HFTokenizer(f'{family}_pieces', loader, folder)
    assert theirs.special_ids() == (0, 1, 2, ours.vocab_size)
    ids = [ours.encode(text) for text in texts]
    for text, expected, found in zip(texts, ids, theirs.encode(texts), strict=True):
      assert found == [*expected, 1], (loader, text)
    known = [
      each
      for text, each in zip(texts, ids, strict=True)
      if 'extra_id' not in text and ours.unk_id not in each
    ]
    assert len(known) > len(texts) // 2
    assert theirs.decode(known) == [ours.decode(each) for each in known]
  # The folder gives our vocabulary again.
  again = tokenizer_folders.hugging_face_vocabulary(str(folder))
  assert again == data.SentencePieceVocabulary(str(folder / 'spiece.model'), 8)
  assert [again.encode(text) for text in texts] == [ours.encode(text) for text in texts]


def test_old_folders_have_no_tokenizer_json(tmp_path, model_file):
  folder = tmp_path / 'x'
  _make_folder(folder, 't5_1_1', data.SentencePieceVocabulary(model_file, 8), 512)
  (folder / 'tokenizer.json').unlink()
  ours = tokenizer_folders.hugging_face_vocabulary(str(folder))
  theirs = hf_models.HFTokenizer('old_folder', 'AutoTokenizer', folder)
  assert theirs.encode(_TEXTS) == [[*ours.encode(text), 1] for text in _TEXTS]


def test_folders_that_transformers_saves(tmp_path, model_file):
  """Version 5 saves tokenizer.json alone, of which the sentencepiece model is made again."""
  _make_folder(tmp_path / 'x', 't5_1_1', data.SentencePieceVocabulary(model_file, 8), 512)
  theirs = hf_models.HFTokenizer('t5_1_1_pieces', 'T5Tokenizer', tmp_path / 'x')
  theirs.save(tmp_path / 'saved')
  shutil.copy(tmp_path / 'x' / 'config.json', tmp_path / 'saved')
  assert not (tmp_path / 'saved' / 'spiece.model').exists()
  tokenizer_folders.write_sentencepiece_model(str(tmp_path / 'saved'))
  ours = tokenizer_folders.hugging_face_vocabulary(str(tmp_path / 'saved'))
  assert ours.extra_ids == 8
  texts = [*_TEXTS, *corpora.python_docs('validation')[4].splitlines()]
  assert theirs.encode(texts) == [[*ours.encode(text), 1] for text in texts]


@pytest.mark.parametrize('extra_ids', [125, 0, 3])
def test_bytes(tmp_path, extra_ids):
  ours = data.ByteVocabulary(extra_ids)
  folder = tmp_path / 'x'
  assert _make_folder(folder, 'byt5', None if extra_ids == 125 else ours, 384) == (
    'tokenizer_config.json',
  )
  texts = ['The statement', 'é 中文 \U0001f600\n\t', '']
  for loader in ('ByT5Tokenizer', 'AutoTokenizer'):
    theirs = hf_models.HFTokenizer(f'bytes_{extra_ids}', loader, folder)
    assert theirs.special_ids()[:3] == (0, 1, 2)
    ids = [ours.encode(text) for text in texts]
    assert theirs.encode(texts) == [[*each, 1] for each in ids]
    assert theirs.decode(ids) == texts
  assert tokenizer_folders.hugging_face_vocabulary(str(folder)) == ours


# Ids of the first and the last sentinel: in a vocabulary of 500 pieces, or 259 bytes and special ids, and 8 sentinels.
@pytest.mark.parametrize('kind, first, last', [('sentencepiece', 507, 500), ('bytes', 266, 259)])
def test_order_of_sentinels(tmp_path, model_file, kind, first, last):
  """<extra_id_0> is the last id: ours, in the folders that we write transformers', and seqio's (core tests)."""
  ours = (
    data.SentencePieceVocabulary(model_file, 8)
    if kind == 'sentencepiece'
    else data.ByteVocabulary(8)
  )
  assert data.vocabularies.sentinel_id(ours) == first
  _make_folder(tmp_path / 'x', 't5_1_1', ours, 512)
  theirs = hf_models.HFTokenizer(f'sentinels_{kind}', 'AutoTokenizer', tmp_path / 'x')
  assert theirs.token_ids(['<extra_id_0>', '<extra_id_7>']) == [first, last]
  assert theirs.encode(['a <extra_id_0> b'])[0].count(first) == 1
  if kind == 'sentencepiece':
    assert ours.encode('<extra_id_0> <extra_id_7>') == [first, last]


def test_published_byt5_has_another_order():
  """As `docs/weights.md` says: in transformers' own tokenizer the first sentinel is the first id behind the bytes."""
  theirs = hf_models.HFTokenizer('published_byt5', 'ByT5Tokenizer')
  assert theirs.token_ids(['<extra_id_0>', '<extra_id_124>']) == [259, 383]


# Where the two tokenizers differ, which `docs/weights.md` says: text, what ours gives, what theirs gives.
@pytest.mark.parametrize('text', ['x <extra_id_2>.', 'f(<extra_id_3>)', '</s> in text', '<unk>'])
def test_known_differences(tmp_path, model_file, text):
  ours = data.SentencePieceVocabulary(model_file, 8)
  _make_folder(tmp_path / 'x', 't5_1_1', ours, 512)
  theirs = hf_models.HFTokenizer('known_differences', 'AutoTokenizer', tmp_path / 'x')
  assert theirs.encode([text]) != [[*ours.encode(text), 1]]
