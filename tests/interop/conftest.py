"""Environment of the tests that compare with other libraries: by default with their recorded results."""

import gzip
import json
import os

import pytest

from t5x_lite import data
from t5x_lite.apps.vocab import run as vocab
from t5x_lite.data import corpora
from t5x_lite.data import tokenizer_folders
from tests.interop import folder_cases
from tests.interop import hf_models
from tests.interop import records

# Nothing is asked of the network, and two cores serve two workers.
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

# Doctests would import the libraries.
collect_ignore = ['libraries.py']


@pytest.fixture(scope='session', autouse=True)
def finish_records(request):
  """Write the records after all tests, or check that none is left over; not with `-k` or `-m`."""
  yield
  known = records.get()
  if (
    known.mode is records.Mode.READ
    or request.config.option.keyword
    or request.config.option.markexpr
  ):
    return
  if known.mode is records.Mode.WRITE:
    assert not request.session.testsfailed, 'The records are only written if all tests pass.'
    from tests.interop import libraries

    known.write(libraries.versions())
  else:
    unused = sorted(known.names - known.asked)
    assert not unused, f'No test asks for these records; write them again: {unused}'


# ---- Tokenizers: sentencepiece models, and folders with the name of their form ---------------------------------------


@pytest.fixture(scope='session')
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


def _with_bytes(model_file, path, special=None):
  """Write the model with a piece for each byte, by which it encodes unknown characters; return its path.

  Args:
    model_file: the model, whose special pieces are the padding, the end and the unknown token.
    path: new file.
    special: names of the ids 0 (unknown), 1 and 2 (control pieces) if they are others.
  """
  model = tokenizer_folders.read_sentencepiece_model(model_file)
  for byte in range(256):
    model.pieces.add(piece=f'<0x{byte:02X}>', score=-20.0, type=model.SentencePiece.BYTE)
  trainer = model.trainer_spec
  if special is not None:
    for number, name in enumerate(special):
      model.pieces[number].piece = name
      model.pieces[number].type = model.SentencePiece.CONTROL
    model.pieces[0].type = model.SentencePiece.UNKNOWN
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 0, 1, 2, -1
  trainer.byte_fallback = True
  trainer.vocab_size = len(model.pieces)
  path.write_bytes(model.SerializeToString())
  return str(path)


@pytest.fixture(scope='session')
def bytes_file(model_file, tmp_path_factory):
  """The stored model with a piece for each byte."""
  return _with_bytes(model_file, tmp_path_factory.mktemp('pieces') / 'bytes.model')


@pytest.fixture(scope='session')
def pieces(model_file, tmp_path_factory):
  """Folder of a T5 as `convert` writes it."""
  folder = tmp_path_factory.mktemp('t5') / 'x'
  folder_cases.write_tokenizer(
    folder, 't5_1_1', data.SentencePieceVocabulary(model_file, 8), vocab_size=512
  )
  return folder


@pytest.fixture(scope='session')
def saved_pieces(pieces, tmp_path_factory):
  """Folder of a T5 as transformers 5 saves it, with tokenizer.json alone."""
  folder = tmp_path_factory.mktemp('t5') / 'saved'
  hf_models.HFTokenizer('t5_1_1_pieces', 'T5Tokenizer', pieces).save(folder)
  folder_cases.write_json(folder / 'config.json', {'model_type': 't5', 'vocab_size': 512})
  assert not (folder / 'spiece.model').exists()
  return folder


@pytest.fixture(scope='session')
def byte_pieces(bytes_file, tmp_path_factory):
  """Folder of a model with a piece for each byte, as `convert` writes it."""
  folder = tmp_path_factory.mktemp('mt5') / 'x'
  folder_cases.write_tokenizer(
    folder, 'mt5', data.SentencePieceVocabulary(bytes_file, 8), vocab_size=768
  )
  return folder


@pytest.fixture(scope='session')
def madlad_pieces(model_file, tmp_path_factory):
  """Folder of MADLAD-400's form: id 0 is the unknown token, 1 the padding, 2 the end; a piece for each byte."""
  folder = tmp_path_factory.mktemp('madlad400') / 'x'
  folder.mkdir()
  _with_bytes(model_file, folder / 'spiece.model', special=('<unk>', '<s>', '</s>'))
  folder_cases.write_json(
    folder / 'tokenizer_config.json',
    {
      'tokenizer_class': 'T5Tokenizer',
      'additional_special_tokens': [],
      'extra_ids': 0,
      'pad_token': '<s>',
      'eos_token': '</s>',
      'unk_token': '<unk>',
    },
  )
  folder_cases.write_json(
    folder / 'config.json',
    {'model_type': 't5', 'vocab_size': 756, 'pad_token_id': 1, 'eos_token_id': 2},
  )
  return folder


@pytest.fixture(scope='session')
def byte_level_bpe(tmp_path_factory):
  """Folder of CodeT5's form: vocab.json and merges.txt of a stored byte-level BPE, and 8 sentinels."""
  pytest.importorskip('tokenizers')
  stored = records.FOLDER / 'byte_level_bpe.json.gz'
  if records.get().mode is records.Mode.WRITE:
    texts = tuple(corpora.python_docs('validation')[:20])
    stored.write_bytes(gzip.compress(hf_models.train_byte_level_bpe(texts), mtime=0))
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
    folder_cases.write_json(folder / f'{name}.json', value)
  return folder


@pytest.fixture(scope='session')
def utf8_bytes(tmp_path_factory):
  """Folder of a ByT5 as `convert` writes it."""
  folder = tmp_path_factory.mktemp('byt5') / 'x'
  folder_cases.write_tokenizer(folder, 'byt5', None, vocab_size=384)
  return folder


@pytest.fixture(scope='session')
def published_bytes(tmp_path_factory):
  """Folder of a ByT5 as transformers saves it."""
  folder = tmp_path_factory.mktemp('byt5') / 'saved'
  hf_models.HFTokenizer('published_byt5', 'ByT5Tokenizer').save(folder)
  folder_cases.write_json(folder / 'config.json', {'model_type': 't5', 'vocab_size': 384})
  return folder
