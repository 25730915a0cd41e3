"""Tokenizers of exported folders: transformers' own classes load them and give the ids of our vocabularies."""

import copy
import gzip
import json
import os
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
# Texts of the training of a byte-level BPE.
_CODE = tuple(text for text in corpora.python_docs('validation')[:20])
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


@pytest.fixture(scope='module')
def bytes_file(model_file, tmp_path_factory):
  """The stored model with a piece for each byte, by which it encodes unknown characters."""
  model = tokenizer_folders.read_sentencepiece_model(model_file)
  for byte in range(256):
    model.pieces.add(piece=f'<0x{byte:02X}>', score=-20.0, type=model.SentencePiece.BYTE)
  model.trainer_spec.byte_fallback = True
  model.trainer_spec.vocab_size = len(model.pieces)
  path = tmp_path_factory.mktemp('pieces') / 'bytes.model'
  path.write_bytes(model.SerializeToString())
  return str(path)


def _two_hundred_texts():
  """Returns texts and lines of documents, without underlined titles: a row of signs has several divisions."""
  lines = [line for text in corpora.python_docs('validation') for line in text.splitlines()]
  texts = [*_TEXTS, *(line for line in lines if line and '***' not in line and '===' not in line)][
    :200
  ]
  assert len(texts) == 200
  return texts


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
  """Version 5 saves tokenizer.json alone, of which the sentencepiece model is made in memory."""
  _make_folder(tmp_path / 'x', 't5_1_1', data.SentencePieceVocabulary(model_file, 8), 512)
  theirs = hf_models.HFTokenizer('t5_1_1_pieces', 'T5Tokenizer', tmp_path / 'x')
  theirs.save(tmp_path / 'saved')
  shutil.copy(tmp_path / 'x' / 'config.json', tmp_path / 'saved')
  assert not (tmp_path / 'saved' / 'spiece.model').exists()
  before = sorted(os.listdir(tmp_path / 'saved'))
  ours = tokenizer_folders.hugging_face_vocabulary(str(tmp_path / 'saved'))
  assert ours.extra_ids == 8
  texts = _two_hundred_texts()
  assert theirs.encode(texts) == [[*ours.encode(text), 1] for text in texts]
  assert sorted(os.listdir(tmp_path / 'saved')) == before


@pytest.fixture(scope='module')
def byte_level_bpe(tmp_path_factory):
  """A folder of CodeT5's form: vocab.json and merges.txt of a stored byte-level BPE, and 8 sentinels."""
  pytest.importorskip('tokenizers')
  stored = records.FOLDER / 'byte_level_bpe.json.gz'
  if records.get().mode is records.Mode.WRITE:
    stored.write_bytes(gzip.compress(hf_models.train_byte_level_bpe(_CODE), mtime=0))
  model = json.loads(gzip.decompress(stored.read_bytes()))
  folder = tmp_path_factory.mktemp('codet5') / 'x'
  folder.mkdir()
  merges = '\n'.join(['#version: 0.2', *(' '.join(pair) for pair in model['merges'])])
  (folder / 'merges.txt').write_text(f'{merges}\n', encoding='utf-8')
  sentinels = [f'<extra_id_{i}>' for i in reversed(range(8))]
  size = len(model['vocab'])
  jsons = {
    'vocab': model['vocab'],
    'added_tokens': {token: size + number for number, token in enumerate(sentinels)},
    'tokenizer_config': {
      'tokenizer_class': 'RobertaTokenizer',
      'additional_special_tokens': sentinels,
      'add_prefix_space': False,
    },
    'config': {'model_type': 't5', 'vocab_size': size + 8, 'eos_token_id': 2},
  }
  for name, value in jsons.items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  return folder


def test_bytes_of_unknown_characters(tmp_path, bytes_file):
  """An exported vocabulary with byte_fallback has its ids in AutoTokenizer, and loses no character."""
  ours = data.SentencePieceVocabulary(bytes_file, 8)
  _make_folder(tmp_path / 'x', 'mt5', ours, 764)
  theirs = hf_models.HFTokenizer('byte_fallback', 'AutoTokenizer', tmp_path / 'x')
  texts = ['caf\u00e9 \u2603 \U0001f600', 'The statement', '\u00e9', '\u4e2d']
  ids = theirs.encode(texts)
  assert ids == [[*ours.encode(text), 1] for text in texts]
  assert theirs.decode([each[:-1] for each in ids]) == texts


@pytest.mark.parametrize('is_saved', [False, True])
def test_byte_level_bpe(tmp_path, byte_level_bpe, is_saved):
  """A folder of CodeT5's form, and the folder that transformers saves of it, give AutoTokenizer's ids and texts."""
  theirs = hf_models.HFTokenizer('byte_level_bpe', 'AutoTokenizer', byte_level_bpe)
  folder = byte_level_bpe
  if is_saved:
    folder = tmp_path / 'saved'
    theirs.save(folder)
    shutil.copy(byte_level_bpe / 'config.json', folder)
    assert not (folder / 'vocab.json').exists()
  ours = tokenizer_folders.hugging_face_vocabulary(str(folder))
  assert (ours.pad_id, ours.eos_id, ours.unk_id, ours.kind) == (0, 2, 3, 'byte-level BPE')
  assert (ours.extra_ids, ours.sentinel_id, ours.vocab_size) == (8, 607, 608)
  # The known difference is in the next test.
  texts = _two_hundred_texts()
  ids = theirs.encode(texts)
  assert [[*ours.encode(text), 2] for text in texts] == ids and ids[0][0] == 1
  inner = [each[1:-1] for each in ids]
  assert [ours.decode(each) for each in ids] == theirs.decode(inner)
  assert ours.decode(ours.encode('a<extra_id_3> é')) == 'a<extra_id_3> é'


def test_no_text_has_the_padding_or_the_end_of_byte_level_bpe(byte_level_bpe):
  ours = tokenizer_folders.hugging_face_vocabulary(str(byte_level_bpe))
  ids = ours.encode('a </s> <pad> b<extra_id_0>')
  assert not {0, 2} & set(ids) and ids[-1] == ours.sentinel_id
  assert ours.decode(ids) == 'a </s> <pad> b<extra_id_0>'
  assert ours.sentinel_id not in ours.encode_literally('b<extra_id_0>')
  # A tool that copies gin's values, and equality by content.
  assert copy.deepcopy(ours) == ours and ours.identity[0] == 'HuggingFaceVocabulary'


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
