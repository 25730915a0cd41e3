"""Tokenizers of exported folders: transformers' own classes load them and give the ids of our vocabularies."""

import copy
import shutil

import pytest

from t5x_lite import data
from t5x_lite.data import corpora
from t5x_lite.data import tokenizer_folders
from tests.interop import folder_cases
from tests.interop import hf_models

_T5_LIKE = ('t5_1_0', 't5_1_1', 'mt5', 'umt5', 'switch')


@pytest.mark.parametrize('family', _T5_LIKE)
def test_sentencepiece(tmp_path, model_file, family):
  ours = data.SentencePieceVocabulary(model_file, 8)
  folder = tmp_path / 'x'
  assert set(folder_cases.write_tokenizer(folder, family, ours, 512)) == {
    'tokenizer_config.json',
    'tokenizer.json',
    'spiece.model',
  }
  texts = [*folder_cases.TEXTS, *corpora.python_docs('validation')[2].splitlines()]
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
  folder_cases.write_tokenizer(folder, 't5_1_1', data.SentencePieceVocabulary(model_file, 8), 512)
  (folder / 'tokenizer.json').unlink()
  ours = tokenizer_folders.hugging_face_vocabulary(str(folder))
  theirs = hf_models.HFTokenizer('old_folder', 'AutoTokenizer', folder)
  assert theirs.encode(folder_cases.TEXTS) == [
    [*ours.encode(text), 1] for text in folder_cases.TEXTS
  ]


def test_bytes_of_unknown_characters(tmp_path, bytes_file):
  """An exported vocabulary with byte_fallback has its ids in AutoTokenizer, and loses no character."""
  ours = data.SentencePieceVocabulary(bytes_file, 8)
  folder_cases.write_tokenizer(tmp_path / 'x', 'mt5', ours, 764)
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
  texts = folder_cases.two_hundred_texts()
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
  assert folder_cases.write_tokenizer(folder, 'byt5', None if extra_ids == 125 else ours, 384) == (
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
  folder_cases.write_tokenizer(tmp_path / 'x', 't5_1_1', ours, 512)
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
  folder_cases.write_tokenizer(tmp_path / 'x', 't5_1_1', ours, 512)
  theirs = hf_models.HFTokenizer('known_differences', 'AutoTokenizer', tmp_path / 'x')
  assert theirs.encode([text]) != [[*ours.encode(text), 1]]
