"""Vocabularies of Hugging Face folders. transformers' own tokenizers are compared with in tests/interop."""

import copy
import importlib.util
import json
import os
import re
import shutil
import sys

import numpy as np
import pytest

from t5x_lite import data
from t5x_lite import errors
from t5x_lite.checkpoints.hugging_face import get_family
from t5x_lite.checkpoints.hugging_face import tokenizer_files
from t5x_lite.data import builtin_tasks
from t5x_lite.data import corpora
from t5x_lite.data import tokenizer_folders
from t5x_lite.errors import CheckpointError, ConfigError, InvalidFileError
from t5x_lite.storage import files

_SENTINELS = [f'<extra_id_{i}>' for i in range(7)]


def _train(path, **options):
  """Writes a sentencepiece model of 200 pieces of T5's form."""
  import sentencepiece

  lines = [
    line for text in corpora.python_docs('validation')[:20] for line in text.splitlines() if line
  ]
  with open(path, 'wb') as file:
    sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(lines),
      model_writer=file,
      minloglevel=2,
      **{'vocab_size': 200, 'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1, **options},
    )
  return path


@pytest.fixture(scope='module')
def model_file(tmp_path_factory):
  return _train(tmp_path_factory.mktemp('pieces') / 'x.model')


@pytest.fixture(scope='module')
def model_file_with_sentinels(tmp_path_factory):
  """Like mT5's, which has its sentinels among the pieces."""
  pieces = [f'\u2581<extra_id_{i}>' for i in reversed(range(5))]
  return _train(tmp_path_factory.mktemp('pieces') / 'y.model', user_defined_symbols=pieces)


def _folder(path, model_file=None, **json_files):
  """Makes a folder of the model file and of JSON files by the names of their stems."""
  path.mkdir(exist_ok=True)
  if model_file is not None:
    shutil.copy(model_file, path / 'spiece.model')
  for stem, value in json_files.items():
    (path / f'{stem}.json').write_text(value if isinstance(value, str) else json.dumps(value))
  return str(path)


@pytest.mark.parametrize(
  'files, expected',
  [
    (dict(config={'model_type': 't5', 'vocab_size': 32128}), 100),
    (dict(config={'model_type': 'switch_transformers'}), 100),
    (dict(config={'model_type': 'umt5'}), 300),
    (dict(config={'model_type': 'mt5'}), 0),
    # The tokenizer's files come before the family.
    (dict(config={'model_type': 't5'}, tokenizer_config={'extra_ids': 7}), 7),
    (dict(config={'model_type': 't5'}, tokenizer_config={'extra_ids': 0}), 0),
    (dict(tokenizer_config={'additional_special_tokens': [*_SENTINELS, '<sep>']}), 7),
    (dict(tokenizer_config={'extra_special_tokens': ['<pad>', '</s>', *_SENTINELS]}), 7),
    (
      dict(
        special_tokens_map={'additional_special_tokens': [{'content': text} for text in _SENTINELS]}
      ),
      7,
    ),
  ],
)
def test_number_of_sentinels(tmp_path, model_file, files, expected):
  folder = _folder(tmp_path / 'x', model_file, **files)
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  assert vocabulary == data.SentencePieceVocabulary(f'{folder}/spiece.model', expected)
  assert vocabulary.vocab_size == 200 + expected
  assert tokenizer_folders.hugging_face_vocabulary(folder, extra_ids=3).extra_ids == 3


def test_sentinels_among_the_pieces(tmp_path, model_file_with_sentinels):
  # A folder without a tokenizer_config.json, whatever its type.
  folder = _folder(tmp_path / 'x', model_file_with_sentinels, config={'model_type': 't5'})
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  assert vocabulary.extra_ids == 0
  # The trainer puts them before the other pieces; what counts is that they are found and one id each.
  assert vocabulary.encode('a <extra_id_1> b')[1] == vocabulary.encode('<extra_id_0>')[0] - 1


@pytest.mark.parametrize(
  'files, expected',
  [
    (dict(config={'model_type': 't5', 'vocab_size': 384}), 125),
    (dict(config={'model_type': 't5', 'tokenizer_class': 'ByT5Tokenizer', 'vocab_size': 384}), 125),
    (dict(tokenizer_config={'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 0}), 125),
    (dict(tokenizer_config={'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 9}), 9),
    (
      dict(
        tokenizer_config={
          'tokenizer_class': 'ByT5Tokenizer',
          'extra_ids': 0,
          'additional_special_tokens': _SENTINELS,
        }
      ),
      7,
    ),
  ],
)
def test_bytes_need_no_file(tmp_path, files, expected):
  vocabulary = tokenizer_folders.hugging_face_vocabulary(_folder(tmp_path / 'x', **files))
  assert vocabulary == data.ByteVocabulary(expected)


def test_for_seqio(tmp_path, model_file):
  seqio = pytest.importorskip('seqio')
  folder = _folder(tmp_path / 'x', model_file, config={'model_type': 't5'})
  theirs = tokenizer_folders.hugging_face_vocabulary(folder, library='seqio')
  assert isinstance(theirs, seqio.SentencePieceVocabulary)
  ours = tokenizer_folders.hugging_face_vocabulary(folder)
  assert data.same_vocabulary(ours, theirs)
  text = 'Return the <extra_id_0> of a <extra_id_99>'
  assert (
    ours.encode(text) == theirs.encode(text) and max(ours.encode(text)) == theirs.vocab_size - 1
  )
  byt5 = _folder(tmp_path / 'y', config={'model_type': 't5', 'vocab_size': 384})
  assert tokenizer_folders.hugging_face_vocabulary(byt5, library='seqio') == seqio.ByteVocabulary(
    125
  )


@pytest.mark.parametrize(
  'files, options, message',
  [
    ({}, {}, 'must contain spiece.model, tokenizer.json, or .*, got none of them'),
    (dict(config={'model_type': 'bert'}), {}, 'must contain spiece.model'),
    (dict(tokenizer='{}'), {}, 'tokenizer.json, `model` must be an object, got None'),
    (
      dict(tokenizer={'model': {'type': 'BPE'}}),
      {},
      'must have an end token, got no eos_token in tokenizer_config.json or special_tokens_map.json',
    ),
    (dict(tokenizer_config='{'), {}, 'tokenizer_config.json must hold a JSON object, got invalid'),
    (dict(config='[]'), {}, 'config.json must hold a JSON object, got a list'),
    ({}, dict(library='seqoi'), "library` must be one of .*Did you mean 'seqio'"),
    ({}, dict(extra_ids=-1), 'extra_ids` must be .*got -1'),
    (
      dict(tokenizer_config={'tokenizer_class': 'ByT5Tokenizer'}, config={'vocab_size': 300}),
      {},
      r'at most vocab_size=300 ids .*, got 384, 125 of them sentinels\.',
    ),
  ],
)
def test_rejected(tmp_path, files, options, message):
  with pytest.raises((CheckpointError, ConfigError), match=message):
    tokenizer_folders.hugging_face_vocabulary(_folder(tmp_path / 'x', **files), **options)


def _merges_folder(path, **tokenizer_config):
  """Makes a folder with a BPE of single letters, whose end token is `</s>` (id 2)."""
  tokens = ['<pad>', '<s>', '</s>', '<unk>', *'abc']
  folder = _folder(
    path,
    vocab={token: i for i, token in enumerate(tokens)},
    tokenizer_config={'tokenizer_class': 'RobertaTokenizer', **tokenizer_config},
    config={'vocab_size': 8},
  )
  (path / 'merges.txt').write_text('#version: 0.2\n')
  return folder


def test_without_the_package_the_message_names_the_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokenizers', None)
  command = re.escape(errors.install_command('tokenizers'))  # another one for an installed package
  with pytest.raises(
    ConfigError,
    match=rf'needs the package tokenizers.* Install with `{command}`, or copy spiece.model',
  ):
    tokenizer_folders.hugging_face_vocabulary(_merges_folder(tmp_path / 'x'))


@pytest.mark.parametrize(
  'tokenizer_config, options, message',
  [
    (
      {'eos_token': '<end>'},
      {},
      "end token of .* must be one of its tokens, got eos_token='<end>'",
    ),
    (
      {'pad_token': '<unk>', 'unk_token': '<pad>'},
      {},
      "padding as id 0.*got '<pad>' as id 0 and pad_token='<unk>'",
    ),
    (
      {'tokenizer_class': 'BertTokenizer'},
      {},
      r"one of RobertaTokenizer, .*, got 'BertTokenizer'.*save_pretrained",
    ),
    ({}, {'extra_ids': 3}, r'extra_ids` must be None .*got 3\. Remove the binding'),
    ({}, {'added_tokens': False}, 'added_tokens` must be True'),
    ({}, {'library': 'seqio'}, 'seqio has no vocabulary equal'),
  ],
)
def test_rejected_byte_level_bpe(tmp_path, tokenizer_config, options, message):
  pytest.importorskip('tokenizers')
  if 'library' in options:
    pytest.importorskip('seqio')
  with pytest.raises(ConfigError, match=message):
    tokenizer_folders.hugging_face_vocabulary(
      _merges_folder(tmp_path / 'x', **tokenizer_config), **options
    )


@pytest.mark.parametrize(
  'config, generation_config, is_rejected',
  [
    ({'eos_token_id': 2}, {}, False),
    ({'eos_token_id': 1}, {'eos_token_id': [2, 5]}, False),
    ({'eos_token_id': 2}, {'eos_token_id': [1, 5]}, True),
    ({'eos_token_id': 1}, {}, True),
    ({}, {}, False),
  ],
)
def test_the_end_token_of_the_tokenizer_ends_texts_of_the_model(
  tmp_path, config, generation_config, is_rejected
):
  pytest.importorskip('tokenizers')
  folder = _merges_folder(tmp_path / 'x')
  _folder(tmp_path / 'x', config=config, generation_config=generation_config)
  if is_rejected:
    with pytest.raises(
      ConfigError, match=r'must be one of the ids \[1.*\] that end a text .*, got 2'
    ):
      tokenizer_folders.hugging_face_vocabulary(folder)
    return
  assert tokenizer_folders.hugging_face_vocabulary(folder).eos_id == 2


def test_a_tokenizer_of_madlads_form(tmp_path):
  """Id 0 is the unknown token, which no text has, since each byte has a piece; the end is 2, and nothing is added."""
  model = _train(
    tmp_path / 'x.model',
    pad_id=-1,
    unk_id=0,
    bos_id=1,
    eos_id=2,
    byte_fallback=True,
    vocab_size=500,
  )
  folder = _folder(
    tmp_path / 'x',
    model,
    config={'model_type': 't5', 'vocab_size': 500, 'pad_token_id': 1, 'eos_token_id': 2},
  )
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  assert (vocabulary.eos_id, vocabulary.extra_ids, vocabulary.vocab_size) == (2, 0, 500)
  for text in ('caf\u00e9 \u2603', '\U0001f600\x00', 'The name'):
    assert 0 not in vocabulary.encode(text)
  # Without pieces of bytes, unknown text would be padding.
  model = _train(tmp_path / 'y.model', pad_id=-1, unk_id=0, bos_id=1, eos_id=2)
  shutil.copy(model, tmp_path / 'x' / 'spiece.model')
  with pytest.raises(ConfigError, match='id 0 is padding, not text'):
    _ = tokenizer_folders.hugging_face_vocabulary(folder).vocab_size


def test_byte_level_bpe_must_fit_the_rows(tmp_path):
  pytest.importorskip('tokenizers')
  folder = _merges_folder(tmp_path / 'x')
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  assert vocabulary.encode('abca') == [1, 4, 5, 6, 4] and vocabulary.decode([1, 4, 6, 2, 5]) == 'ac'
  _folder(tmp_path / 'x', config={'vocab_size': 6})
  with pytest.raises(ConfigError, match='at most vocab_size=6 ids .*, got 7'):
    tokenizer_folders.hugging_face_vocabulary(folder)


def test_tokens_after_an_added_end_token_keep_their_ids(tmp_path):
  """The library numbers added tokens in their order, so none may be left out to hide it from texts."""
  pytest.importorskip('tokenizers')
  folder = _merges_folder(
    tmp_path / 'x', tokenizer_class='GPT2Tokenizer', pad_token='<pad>', eos_token='<end>'
  )
  _folder(
    tmp_path / 'x',
    added_tokens={'<end>': 7, '<sep>': 8, '<extra_id_0>': 9, '<last>': 10},
    config={},
  )
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  assert (vocabulary.eos_id, vocabulary.sentinel_id, vocabulary.vocab_size) == (7, 9, 11)
  assert vocabulary.encode('a<sep>b<extra_id_0>c<last>') == [4, 8, 5, 9, 6, 10]
  assert vocabulary.encode_literally('a<sep><last>') == [4, 8, 10]
  assert 7 not in vocabulary.encode('a<end>')
  assert 9 not in vocabulary.encode_literally('a<extra_id_0>')
  assert vocabulary.decode([4, 8, 5, 9, 7, 6]) == 'a<sep>b<extra_id_0>'


def test_equal_vocabularies_load_their_tokenizer_once(tmp_path, monkeypatch):
  tokenizers = pytest.importorskip('tokenizers')
  folder = _merges_folder(tmp_path / 'x')
  texts = []

  class Tokenizer:
    def from_str(text):
      texts.append(text)
      return original.from_str(text)

  original = tokenizers.Tokenizer
  monkeypatch.setattr(tokenizers, 'Tokenizer', Tokenizer)
  vocabularies = [tokenizer_folders.hugging_face_vocabulary(folder) for _ in range(3)]
  vocabularies.append(copy.deepcopy(vocabularies[0]))
  assert [each.encode('abc') for each in vocabularies] == [[1, 4, 5, 6]] * 4
  # One that encodes, one that encodes sentinels as text, and one that decodes.
  assert len(texts) == 3
  # Another content at the same path is another tokenizer.
  (tmp_path / 'x' / 'merges.txt').write_text('#version: 0.2\n')
  vocab = json.loads((tmp_path / 'x' / 'vocab.json').read_text())
  _folder(tmp_path / 'x', vocab={**vocab, 'a': 5, 'b': 4})
  assert tokenizer_folders.hugging_face_vocabulary(folder).encode('abc') == [1, 5, 4, 6]


def test_rejected_without_folder_or_number(tmp_path, model_file):
  with pytest.raises(ConfigError, match='folder` must be an existing Hugging Face folder'):
    tokenizer_folders.hugging_face_vocabulary(str(tmp_path / 'none'))
  with pytest.raises(ConfigError, match="extra_ids` must be set for model_type='bert'"):
    tokenizer_folders.hugging_face_vocabulary(
      _folder(tmp_path / 'x', model_file, config={'model_type': 'bert'})
    )


@pytest.mark.parametrize(
  'line', ['é ü ﬁ ½ 中文 \U0001f600', ' a  b\n\tc ', '', '</s> <unk>', 'x <extra_id_0> y']
)
def test_model_from_tokenizer_json(tmp_path, model_file, line):
  """The model rebuilt from `tokenizer.json` gives the same ids."""
  folder = _folder(
    tmp_path / 'x', tokenizer=_tokenizer_json(model_file), tokenizer_config={'extra_ids': 7}
  )
  tokenizer_folders.write_sentencepiece_model(folder)
  rebuilt = tokenizer_folders.hugging_face_vocabulary(folder)
  original = data.SentencePieceVocabulary(str(model_file), 7)
  assert (rebuilt.vocab_size, rebuilt.eos_id, rebuilt.unk_id) == (207, 1, 2)
  for text in (line, *corpora.python_docs('validation')[3].splitlines()):
    assert rebuilt.encode(text) == original.encode(text)
    assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text))
  with pytest.raises(ConfigError, match='must be a new file'):
    tokenizer_folders.write_sentencepiece_model(folder)


def _tokenizer_json(model_file):
  """Returns a `tokenizer.json` of the model and 7 sentinels, as transformers makes it."""
  import base64

  from sentencepiece import sentencepiece_model_pb2

  model = sentencepiece_model_pb2.ModelProto.FromString(model_file.read_bytes())
  vocab = [[piece.piece, piece.score] for piece in model.pieces] + [
    [text, 0.0] for text in reversed(_SENTINELS)
  ]
  charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
  return {
    'added_tokens': [
      {'id': i, 'content': vocab[i][0], 'special': True} for i in (0, 1, 2, *range(200, 207))
    ],
    'normalizer': {
      'type': 'Sequence',
      'normalizers': [{'type': 'Precompiled', 'precompiled_charsmap': charsmap}, {'type': 'Strip'}],
    },
    'model': {'type': 'Unigram', 'unk_id': 2, 'vocab': vocab},
  }


@pytest.mark.parametrize(
  'change, message',
  [
    ({'model': {'type': 'BPE', 'vocab': {}}}, "must be of type 'Unigram', .*, got 'BPE'"),
    ({'normalizer': {'type': 'Lowercase'}}, "normalizer of .* must be .*, got 'Lowercase'"),
  ],
)
def test_other_tokenizer_json(tmp_path, model_file, change, message):
  folder = _folder(tmp_path / 'x', tokenizer=_tokenizer_json(model_file) | change)
  with pytest.raises(ConfigError, match=message):
    tokenizer_folders.write_sentencepiece_model(folder)
  assert not (tmp_path / 'x' / 'spiece.model').exists()


def test_sentinels_in_texts(tmp_path, model_file):
  """They are one id, after the pieces or, as in mT5, among them."""
  model = tokenizer_folders.read_sentencepiece_model(str(model_file))
  for text in ('\u2581<extra_id_1>', '\u2581<extra_id_0>'):  # the last pieces, in mT5's order
    model.pieces.add(piece=text, score=0.0, type=4)
  (tmp_path / 'like_mt5.model').write_bytes(model.SerializeToString())
  for vocabulary, among in (
    (data.SentencePieceVocabulary(str(model_file), 2), False),
    (data.SentencePieceVocabulary(str(tmp_path / 'like_mt5.model')), True),
  ):
    assert (vocabulary.vocab_size, vocabulary.extra_ids) == (202, 0 if among else 2)
    assert builtin_tasks.encode_with_sentinel('(<extra_id_0>) <extra_id_1>.', vocabulary) == [
      *vocabulary.encode('('),
      201,
      *vocabulary.encode(')'),
      200,
      *vocabulary.encode('.'),
    ]
    assert (
      199 < max(builtin_tasks.encode_with_sentinel('<extra_id_2> <extra_id_0>', vocabulary)) == 201
    )
  assert tokenizer_folders.has_sentinels(str(tmp_path / 'like_mt5.model'))
  assert not tokenizer_folders.has_sentinels(str(model_file))


def test_cloze_task_with_the_vocabulary(tmp_path, model_file):
  vocabulary = tokenizer_folders.hugging_face_vocabulary(
    _folder(tmp_path / 'x', model_file, config={'model_type': 't5'})
  )
  task = builtin_tasks.keyword_cloze_task(vocabulary=vocabulary)
  example = task.table_fn('validation', {'inputs': 64, 'targets': 8}).examples(0, np.array([0]))[0]
  assert vocabulary.vocab_size - 1 in example['inputs'] and example['inputs'][-1] == 1
  (_, keyword), *_ = corpora.python_keyword_cloze('validation')
  assert re.fullmatch(keyword, vocabulary.decode(example['targets']))


def test_tokenizer_json_without_a_table_has_t5s(tmp_path, model_file):
  """transformers 5 saves no table; T5's, which can be written, maps full-width forms and zero-width joiners."""
  folder = _folder(
    tmp_path / 'x',
    tokenizer=_tokenizer_json(model_file) | {'normalizer': None},
    tokenizer_config={'extra_ids': 7},
  )
  tokenizer_folders.write_sentencepiece_model(folder)
  rebuilt = tokenizer_folders.hugging_face_vocabulary(folder)
  for text in (
    '\ttab\nnew',
    'a\x0bb\x1f\u00a0c',
    '\uff41\uff42',
    'a\u200db',
    'e\u0301 \ufb01',
    ' a  b ',
  ):
    plain = text.replace('\u200d', ' ').replace('\x1f', '')
    original = data.SentencePieceVocabulary(str(model_file), 7)
    assert rebuilt.encode(text) == original.encode(plain), text
  identity = tmp_path / 'identity.model'
  tokenizer_folders.write_sentencepiece_model(folder, str(identity), normalization='identity')
  assert data.SentencePieceVocabulary(str(identity)).encode('\uff41')[-1] == 2
  with pytest.raises(ConfigError, match="normalization` must be one of 't5'"):
    tokenizer_folders.write_sentencepiece_model(folder, str(tmp_path / 'y'), normalization='T6')


def _exported_json(tmp_path, model_file, extra_ids=7):
  """Returns the tokenizer.json that an export writes for a sentencepiece model."""
  (tmp_path / 'exported').mkdir()
  vocabulary = data.SentencePieceVocabulary(str(model_file), extra_ids)
  tokenizer_files.write(tmp_path / 'exported', get_family('t5_1_1'), vocabulary)
  return json.loads((tmp_path / 'exported' / 'tokenizer.json').read_text())


def test_tokenizer_json_is_read_as_it_is(tmp_path, model_file):
  """Without a table, white space of any kind separates words and other characters stay, as in its own library."""
  contents = _exported_json(tmp_path, model_file) | {'normalizer': None}
  folder = _folder(tmp_path / 'x', tokenizer=contents, tokenizer_config={'extra_ids': 7})
  os.chmod(folder, 0o500)
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  assert vocabulary == data.SentencePieceVocabulary(f'{folder}/tokenizer.json', 7)
  original = data.SentencePieceVocabulary(str(model_file), 7)
  assert vocabulary.vocab_size == original.vocab_size
  for text in (
    '\ttab\nnew',
    'a\x0bb\u00a0c',
    'a\u3000 b\u2028\x85',
    ' a  b ',
    'x <extra_id_3>',
    'The name',
  ):
    plain = ' '.join(text.split())
    assert vocabulary.encode(text) == original.encode(plain), text
  assert vocabulary.encode('\uff41')[-1] == vocabulary.unk_id
  if 'tokenizers' in sys.modules or importlib.util.find_spec('tokenizers'):
    import tokenizers

    theirs = tokenizers.Tokenizer.from_file(f'{folder}/tokenizer.json')
    for text in ('\ttab\nnew', 'a\u3000b\u2028', 'caf\u00e9 \u2603', '\ufb01ne', 'a\u2581b'):
      assert vocabulary.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


def test_byte_fallback_of_tokenizer_json(tmp_path):
  """Characters without a piece become bytes, which give the text again."""
  trained = _train(tmp_path / 'bytes.model', byte_fallback=True, vocab_size=500)
  contents = _exported_json(tmp_path, trained, 0)
  assert contents['model']['byte_fallback'] is True
  folder = _folder(tmp_path / 'x', tokenizer=contents, tokenizer_config={'extra_ids': 0})
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  original = data.SentencePieceVocabulary(str(trained), 0)
  for text in ('caf\u00e9 \u2603', 'The name'):
    assert vocabulary.encode(text) == original.encode(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text


@pytest.mark.parametrize(
  'change',
  [
    {'normalizer': {'type': 'Lowercase'}},
    {'pre_tokenizer': {'type': 'Whitespace'}},
    # Without WhitespaceSplit, two spaces are two pieces, as in no model of sentencepiece that we make.
    {
      'pre_tokenizer': {
        'type': 'Metaspace',
        'replacement': '\u2581',
        'prepend_scheme': 'always',
        'split': True,
      }
    },
    {
      'post_processor': {
        'type': 'TemplateProcessing',
        'single': [
          {'SpecialToken': {'id': '<unk>', 'type_id': 0}},
          {'Sequence': {'id': 'A', 'type_id': 0}},
        ],
        'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 0}}],
        'special_tokens': {'<unk>': {'id': '<unk>', 'ids': [2], 'tokens': ['<unk>']}},
      }
    },
  ],
)
def test_other_unigram_tokenizers_are_read_by_their_library(tmp_path, model_file, change):
  tokenizers = pytest.importorskip('tokenizers')
  contents = _exported_json(tmp_path, model_file) | change
  folder = _folder(
    tmp_path / 'x',
    tokenizer=contents,
    tokenizer_config={'extra_ids': 7, 'eos_token': '</s>', 'pad_token': '<pad>'},
  )
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  theirs = tokenizers.Tokenizer.from_file(f'{folder}/tokenizer.json')
  assert vocabulary.identity[0] == 'HuggingFaceVocabulary'
  for text in ('The Name', 'a  b', ' \ttab.'):
    assert vocabulary.encode(text) == [i for i in theirs.encode(text).ids if i != 1], text


_TOKEN = {'content': '<sep>', 'special': False, 'lstrip': False}


@pytest.mark.parametrize(
  'files, expected',
  [
    ({'tokenizer_config': {'extra_ids': 7, 'added_tokens_decoder': {'207': _TOKEN}}}, 207),
    ({'tokenizer_config': {'extra_ids': 7}, 'added_tokens': {'<sep>': 209}}, 209),
    (
      {
        'tokenizer_config': {'extra_ids': 7},
        'tokenizer': {'added_tokens': [{'id': 207, **_TOKEN}]},
      },
      207,
    ),
    ({'tokenizer_config': {'extra_ids': 0}, 'added_tokens': {'<sep>': 200}}, 200),
    (
      {'tokenizer_config': {'tokenizer_class': 'ByT5Tokenizer'}, 'added_tokens': {'<sep>': 384}},
      384,
    ),
  ],
)
def test_added_tokens(tmp_path, model_file, files, expected):
  is_bytes = 'tokenizer_class' in files['tokenizer_config']
  folder = _folder(tmp_path / 'x', None if is_bytes else model_file, **files)
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder)
  base = data.ByteVocabulary(125)
  if not is_bytes:
    base = data.SentencePieceVocabulary(
      f'{folder}/spiece.model', files['tokenizer_config']['extra_ids']
    )
  assert vocabulary.vocab_size == expected + 1
  middle = base.encode('a') if not is_bytes else base.encode('a ')
  assert vocabulary.encode('a <sep>b') == [*middle, expected, *base.encode('b')]
  assert '<sep>' in vocabulary.decode([5, expected])
  assert data.vocabularies.sentinel_id(vocabulary) == base.vocab_size - 1


@pytest.mark.parametrize(
  'files, options, message',
  [
    (
      {'config': {'vocab_size': 208}, 'added_tokens': {'<sep>': 208}},
      {},
      'must have ids below vocab_size=208 .*, got 208',
    ),
    ({'added_tokens': {'<sep>': 203}}, {}, 'must not have the id of a sentinel, got 203'),
    (
      {'added_tokens': {'<sep>': 208}},
      {'library': 'seqio'},
      "must be 't5x_lite' for the added tokens of .*, got 'seqio'",
    ),
  ],
)
def test_the_option_of_a_message_encodes_added_tokens_as_before(
  tmp_path, model_file, files, options, message
):
  if options:
    pytest.importorskip('seqio')
  folder = _folder(tmp_path / 'x', model_file, tokenizer_config={'extra_ids': 7}, **files)
  with pytest.raises(ConfigError, match=f'{message}.*hugging_face_vocabulary.added_tokens=False'):
    tokenizer_folders.hugging_face_vocabulary(folder, **options)
  vocabulary = tokenizer_folders.hugging_face_vocabulary(folder, added_tokens=False, **options)
  before = data.SentencePieceVocabulary(f'{folder}/spiece.model', 7)
  assert list(vocabulary.encode('a <sep>b')) == before.encode('a <sep>b')
  assert data.same_vocabulary(vocabulary, before)


def test_tokens_that_the_vocabulary_has_are_not_added(tmp_path, model_file):
  listed = {'0': '<pad>', '1': '</s>', '2': '<unk>'} | {
    str(206 - i): text for i, text in enumerate(_SENTINELS)
  }
  decoder = {i: {'content': text, 'special': True} for i, text in listed.items()}
  folder = _folder(
    tmp_path / 'x', model_file, tokenizer_config={'extra_ids': 7, 'added_tokens_decoder': decoder}
  )
  assert tokenizer_folders.hugging_face_vocabulary(folder) == data.SentencePieceVocabulary(
    f'{folder}/spiece.model', 7
  )


@pytest.mark.parametrize(
  'tokens, message',
  [
    (
      {'<sep>': 203},
      "'<sep>' of .* must not have the id of a sentinel, got 203, that of <extra_id_3>",
    ),
    ({'<sep>': -1}, 'added_tokens.json must list added tokens'),
    ({'<sep>': 'x'}, 'added_tokens.json must list added tokens'),
    ({'': 207}, 'added_tokens.json must list added tokens'),
  ],
)
def test_invalid_added_tokens(tmp_path, model_file, tokens, message):
  folder = _folder(
    tmp_path / 'x', model_file, tokenizer_config={'extra_ids': 7}, added_tokens=tokens
  )
  with pytest.raises((CheckpointError, ConfigError), match=message):
    tokenizer_folders.hugging_face_vocabulary(folder)
  if tokens.get('<sep>') == 203:  # The remedy.
    assert tokenizer_folders.hugging_face_vocabulary(folder, extra_ids=3).encode('<sep>') == [203]


# ----------------------------------------------------------------------------------------------------------------------
# Files of an exported folder


@pytest.mark.parametrize(
  'family, sidecar, expected',
  [('t5_1_1', None, 100), ('umt5', None, 300), ('mt5', None, 0), ('t5_1_1', {'extra_ids': 9}, 9)],
)
def test_written_from_a_model_file(tmp_path, model_file, family, sidecar, expected):
  path = tmp_path / 'docs.model'
  shutil.copy(model_file, path)
  if sidecar is not None:
    (tmp_path / 'docs.model.json').write_text(json.dumps(sidecar))
  folder = tmp_path / 'x'
  folder.mkdir()
  written = tokenizer_files.write(folder, get_family(family), path, vocab_size=200 + expected)
  assert (
    set(written)
    == {file.name for file in folder.iterdir()}
    == {'spiece.model', 'tokenizer.json', 'tokenizer_config.json'}
  )
  assert tokenizer_folders.hugging_face_vocabulary(str(folder)).extra_ids == expected
  assert (
    len(json.loads((folder / 'tokenizer.json').read_text())['model']['vocab']) == 200 + expected
  )
  with pytest.raises(
    CheckpointError, match=f'with {expected} sentinels must have .*, got {200 + expected}'
  ) as caught:
    tokenizer_files.write(folder, get_family(family), path, vocab_size=199 + expected)
  # Without sentinels there would be enough rows, so the message names the file that sets their number.
  assert (f'{path}.json' in str(caught.value)) == (expected > 0)


def test_sentinels_among_the_pieces_are_not_doubled(tmp_path, model_file_with_sentinels):
  assert tokenizer_files.write(
    tmp_path, get_family('t5_1_1'), model_file_with_sentinels, vocab_size=200
  )
  assert tokenizer_folders.hugging_face_vocabulary(str(tmp_path)).extra_ids == 0


def test_a_folder_is_copied(tmp_path, model_file):
  source = _folder(
    tmp_path / 'x',
    model_file,
    tokenizer_config={'extra_ids': 7},
    special_tokens_map={'a': 1},
    config={'model_type': 't5'},
  )
  target = tmp_path / 'y'
  target.mkdir()
  written = tokenizer_files.write(target, get_family('t5_1_1'), source)
  assert written == ('tokenizer_config.json', 'spiece.model', 'special_tokens_map.json')
  for name in written:
    assert (target / name).read_bytes() == (tmp_path / 'x' / name).read_bytes()
  assert len(list(target.iterdir())) == 3
  # Without a configuration, the defaults of the family are used.
  (tmp_path / 'x' / 'tokenizer_config.json').unlink()
  assert 'tokenizer.json' in tokenizer_files.write(target, get_family('t5_1_1'), source)
  assert tokenizer_folders.hugging_face_vocabulary(str(target)).extra_ids == 100


@pytest.mark.parametrize('has_json', [False, True])
def test_files_of_other_tokenizers_are_exported_unchanged(tmp_path, has_json):
  """By the folder and by the vocabulary; spaces and the order of keys are as in no file that we write."""
  pytest.importorskip('tokenizers')
  source = _merges_folder(tmp_path / 'x', add_prefix_space=False)
  _folder(
    tmp_path / 'x',
    special_tokens_map='{ "pad_token":"<pad>" ,"eos_token" : "</s>"}\n\n',
    added_tokens='{"<extra_id_0>":7 }',
    config={'vocab_size': 8},
  )
  names = {'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json'}
  if has_json:
    contents = tokenizer_folders.hugging_face_vocabulary(source).contents
    (tmp_path / 'x' / 'tokenizer.json').write_text(
      json.dumps(json.loads(contents), indent=3, sort_keys=True) + ' \n'
    )
    for name in ('vocab.json', 'merges.txt'):
      (tmp_path / 'x' / name).unlink()
    names |= {'tokenizer.json'}
  else:
    names |= {'vocab.json', 'merges.txt'}
  vocabulary = tokenizer_folders.hugging_face_vocabulary(source)
  for number, tokenizer in enumerate((source, vocabulary)):
    target = tmp_path / f'out_{number}'
    target.mkdir()
    written = tokenizer_files.write(target, get_family('t5_1_0'), tokenizer, vocab_size=8)
    assert set(written) == names == {path.name for path in target.iterdir()}
    for name in names:
      assert (target / name).read_bytes() == (tmp_path / 'x' / name).read_bytes()
    assert tokenizer_folders.hugging_face_vocabulary(str(target)) == vocabulary
  with pytest.raises(CheckpointError, match='at most vocab_size=7 ids'):
    tokenizer_files.write(tmp_path, get_family('t5_1_0'), vocabulary, vocab_size=7)


@pytest.mark.parametrize('with_json', [False, True])
def test_a_folder_with_more_ids_than_rows_is_not_copied(tmp_path, model_file, with_json):
  """An id without a row in the embedding table may give an error of transformers, or none."""
  _folder(tmp_path / 'x', model_file, tokenizer_config={'extra_ids': 7})
  source, target = tmp_path / 'x', tmp_path / 'y'
  target.mkdir()
  if with_json:
    (source / 'tokenizer.json').write_text(
      json.dumps(
        {
          'model': {'vocab': [['a', 0.0]] * 200},
          'added_tokens': [{'id': 206, 'content': '<extra_id_0>'}],
        }
      )
    )
  with pytest.raises(CheckpointError, match='must have at most vocab_size=206 ids, .*, got 207'):
    tokenizer_files.write(target, get_family('t5_1_1'), source, vocab_size=206)
  assert not list(target.iterdir())
  assert tokenizer_files.write(target, get_family('t5_1_1'), source, vocab_size=207)
  (source / 'tokenizer.json').write_text('{}')
  with pytest.raises(CheckpointError, match='is not a valid tokenizer'):
    tokenizer_files.write(target, get_family('t5_1_1'), source, vocab_size=207)


def test_without_a_tokenizer(tmp_path):
  assert tokenizer_files.write(tmp_path, get_family('t5_1_1'), None) == ()
  assert not list(tmp_path.iterdir())
  assert tokenizer_files.write(tmp_path, get_family('byt5'), None, vocab_size=384) == (
    'tokenizer_config.json',
  )
  assert tokenizer_folders.hugging_face_vocabulary(str(tmp_path)) == data.ByteVocabulary(125)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(model_type='bpe'), 'not a unigram model'),
    (dict(remove_extra_whitespaces=False), 'keeps spaces'),
    (dict(pad_piece='[PAD]'), r"begins with .*'\[PAD\]'"),
    (dict(split_by_whitespace=False), 'pieces of several words'),
  ],
)
def test_models_that_transformers_reads_otherwise(tmp_path, options, message):
  path = _train(tmp_path / 'x.model', **options)
  with pytest.raises(CheckpointError, match=f'{message}.*would give different ids'):
    tokenizer_files.write(
      tmp_path, get_family('t5_1_1'), data.SentencePieceVocabulary(str(path), 3)
    )
  assert not (tmp_path / 'spiece.model').exists()


def test_invalid_tokenizers(tmp_path, model_file):
  def write(tokenizer, family='t5_1_1', **options):
    tokenizer_files.write(tmp_path, get_family(family), tokenizer, **options)

  with pytest.raises(CheckpointError, match='The tokenizer must be '):
    write(tmp_path / 'none')
  with pytest.raises(CheckpointError, match='whose ids are bytes'):
    write(model_file, 'byt5')
  with pytest.raises(CheckpointError, match='reverse_extra_ids=False'):
    write(data.SentencePieceVocabulary(str(model_file), 3, reverse_extra_ids=False))
  with pytest.raises(
    CheckpointError, match='must be a ByteVocabulary or a SentencePieceVocabulary'
  ):
    write(data.PassThroughVocabulary(5))
  with pytest.raises(CheckpointError, match='got 384'):
    write(data.ByteVocabulary(125), vocab_size=300)
  with pytest.raises(ConfigError, match='not a sentencepiece model'):
    (tmp_path / 'bad.model').write_bytes(b'{"a": 1}')
    write(tmp_path / 'bad.model')
  with pytest.raises(ConfigError, match='must contain spiece.model'):
    (tmp_path / 'empty').mkdir()
    write(tmp_path / 'empty')


def test_a_folder_in_a_store(store, tmp_path, model_file):
  for name, content in {
    'spiece.model': model_file.read_bytes(),
    'config.json': '{"model_type": "umt5"}',
  }.items():
    files.write(f'{store.root}/sp/{name}', content)
  vocabulary = tokenizer_folders.hugging_face_vocabulary(f'{store.root}/sp')
  assert vocabulary == data.SentencePieceVocabulary(f'{store.root}/sp/spiece.model', 300)
  assert vocabulary.vocab_size == 500
  files.write(f'{store.root}/json/tokenizer.json', json.dumps(_tokenizer_json(model_file)))
  files.write(f'{store.root}/json/tokenizer_config.json', '{"extra_ids": 7}')
  tokenizer_folders.write_sentencepiece_model(f'{store.root}/json')
  assert tokenizer_folders.hugging_face_vocabulary(f'{store.root}/json').vocab_size == 207
  with pytest.raises(ConfigError, match='must be an existing Hugging Face folder'):
    tokenizer_folders.hugging_face_vocabulary(f'{store.root}/none')
  if store.kind == 's3':
    with pytest.raises(ConfigError, match='TensorFlow has no s3://'):
      tokenizer_folders.hugging_face_vocabulary(f'{store.root}/sp', library='seqio')


def _set(*keys, value):
  """Return a change that sets the field at `keys` of a tokenizer.json."""

  def change(tokenizer):
    for key in keys[:-1]:
      tokenizer = tokenizer[key]
    tokenizer[keys[-1]] = value

  return change


def _without(*keys):
  def change(tokenizer):
    for key in keys[:-1]:
      tokenizer = tokenizer[key]
    del tokenizer[keys[-1]]

  return change


_TABLE = ('normalizer', 'normalizers', 0, 'precompiled_charsmap')
_DAMAGES = [
  (_without('model'), '`model` must be an object, got None'),
  (_set('model', value=[1]), r'`model` must be an object, got \[1\]'),
  (_without('model', 'type'), '`model.type` must be a name, got None'),
  (_set('model', 'type', value=['Unigram']), '`model.type` must be a name'),
  (_without('model', 'vocab'), '`model.vocab` must be a list of pieces, got None'),
  (_set('model', 'vocab', value={'a': 1}), '`model.vocab` must be a list'),
  (_set('model', 'vocab', value=[]), '`model.vocab` must be a list'),
  (_set('model', 'vocab', 5, value='a'), r'`model.vocab\[5\]` must be a piece and its score'),
  (_set('model', 'vocab', 5, value=['a']), r'`model.vocab\[5\]` must be a piece and its score'),
  (_set('model', 'vocab', 5, value=[1, 0.0]), r'`model.vocab\[5\]`\[0\] must be a text, got 1'),
  (_set('model', 'vocab', 5, value=['', 0.0]), r'`model.vocab\[5\]`\[0\] must be a text'),
  (_set('model', 'vocab', 5, value=['\ud800', 0.0]), r'`model.vocab\[5\]`\[0\] must be a text'),
  (_set('model', 'vocab', 5, value=['a', '0']), r'`model.vocab\[5\]`\[1\] must be a finite number'),
  (_set('model', 'vocab', 5, value=['a', 10**400]), r'`model.vocab\[5\]`\[1\] must be a finite'),
  (
    _set('model', 'vocab', 5, value=['a', float('nan')]),
    r'`model.vocab\[5\]`\[1\] must be a finite',
  ),
  (_set('model', 'vocab', 5, value=['</s>', 0.0]), r"`model.vocab\[5\]`\[0\] .*, got '</s>'"),
  (_set('model', 'vocab', -1, value=None), r'`model.vocab\[206\]` must be a piece'),
  (_set('model', 'unk_id', value=None), '`model.unk_id` must be from 0 to 206, got None'),
  (_set('model', 'unk_id', value=207), '`model.unk_id` must be from 0 to 206, got 207'),
  (_set('model', 'unk_id', value='2'), "`model.unk_id` must be from 0 to 206, got '2'"),
  (_set('model', 'byte_fallback', value='no'), '`model.byte_fallback` must be true or false'),
  (_set('added_tokens', value={'a': 1}), '`added_tokens` must be a list'),
  (_set('added_tokens', 1, value=7), r'`added_tokens\[1\]` must be an object, got 7'),
  (_without('added_tokens', 1, 'id'), r'`added_tokens\[1\]`.id must be an integer >= 0, got None'),
  (_set('added_tokens', 1, 'id', value=-3), r'`added_tokens\[1\]`.id must be an integer >= 0'),
  (_without('added_tokens', 1, 'content'), r'`added_tokens\[1\]`.content must be a text'),
  (_set('added_tokens', 1, 'special', value='x'), r'`added_tokens\[1\]`.special must be true'),
  (_set('normalizer', value='NFKC'), "`normalizer` must be an object, got 'NFKC'"),
  (_set('normalizer', 'normalizers', value=None), '`normalizer.normalizers` must be a list'),
  (_set('normalizer', 'normalizers', 0, value=3), r'`normalizer.normalizers\[0\]` must be an obj'),
  (
    _set(*_TABLE, value=4),
    '`precompiled_charsmap` of `normalizer` must be a text in base64, got 4',
  ),
  (_set(*_TABLE, value='#'), '`precompiled_charsmap` of `normalizer` must be a text in base64'),
  (
    _set(*_TABLE, value='AAAAAAAA'),
    '`precompiled_charsmap` of .* must be a table of sentencepiece',
  ),
]


@pytest.mark.parametrize('number', range(len(_DAMAGES)))
def test_a_damaged_tokenizer_json_is_rejected_with_its_field(tmp_path, model_file, number):
  change, message = _DAMAGES[number]
  tokenizer = _tokenizer_json(model_file)
  change(tokenizer)
  folder = _folder(tmp_path / 'x', tokenizer=tokenizer)
  with pytest.raises(CheckpointError, match=f'In .*x/tokenizer.json, {message}'):
    tokenizer_folders.write_sentencepiece_model(folder)
  assert not (tmp_path / 'x/spiece.model').exists()


@pytest.mark.parametrize('cut', [0, 1, 40, 3000])
def test_a_tokenizer_json_that_is_cut_is_rejected(tmp_path, model_file, cut):
  folder = _folder(tmp_path / 'x', tokenizer=_tokenizer_json(model_file))
  os.truncate(tmp_path / 'x/tokenizer.json', cut)
  with pytest.raises(CheckpointError, match='tokenizer.json must hold a JSON object'):
    tokenizer_folders.write_sentencepiece_model(folder)


@pytest.mark.parametrize(
  'files, message',
  [
    ({'tokenizer_config': {'extra_ids': 30_000_000}}, '`extra_ids` must be from 0 to 131072, got'),
    ({'tokenizer_config': {'extra_ids': -1}}, '`extra_ids` must be from 0 to 131072, got -1'),
    (
      {'tokenizer_config': {'additional_special_tokens': 5}},
      '`additional_special_tokens` must be a list of tokens, got 5',
    ),
    (
      {'special_tokens_map': {'extra_special_tokens': 5}},
      'special_tokens_map.json, `extra_special_tokens` must be a list of tokens',
    ),
    ({'added_tokens': {'<sep>': 10**30}}, 'added_tokens.json must list added tokens'),
  ],
)
def test_invalid_numbers_of_tokens(tmp_path, model_file, files, message):
  config = {'model_type': 't5'}
  folder = _folder(tmp_path / 'x', model_file, **{'config': config, **files})
  with pytest.raises(CheckpointError, match=message):
    tokenizer_folders.hugging_face_vocabulary(folder)


def test_vocabularies_have_a_limit_of_sentinels(tmp_path, model_file):
  for make in (lambda n: data.SentencePieceVocabulary(str(model_file), n), data.ByteVocabulary):
    assert make(2**17).extra_ids == 2**17
    with pytest.raises(ConfigError, match='extra_ids` must be .*131072.*, got 30000000'):
      make(30_000_000)


@pytest.mark.parametrize('kind', ['FIFO', 'device', 'large'])
def test_a_model_must_be_a_regular_file(tmp_path, kind):
  path = tmp_path / 'spiece.model'
  if kind == 'FIFO':
    os.mkfifo(path)
  elif kind == 'device':
    path.symlink_to('/dev/zero')
  else:
    path.touch()
    os.truncate(path, 2**29)
  message = 'regular file, got a pipe' if kind != 'large' else 'at most 268,435,456 bytes'
  with pytest.raises(ConfigError, match=message):
    _ = data.SentencePieceVocabulary(str(path)).vocab_size
  with pytest.raises(InvalidFileError, match=message):
    tokenizer_folders.read_sentencepiece_model(str(path))
