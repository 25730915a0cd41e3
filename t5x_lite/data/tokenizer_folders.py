"""Vocabularies of Hugging Face folders: sentencepiece models, the bytes of ByT5, and tokenizers of any other type.

A gin file needs only the path of the folder:

    from t5x_lite.data import tokenizer_folders
    VOCABULARY = @tokenizer_folders.hugging_face_vocabulary()
    tokenizer_folders.hugging_face_vocabulary.folder = '/path/to/flan-t5-small'

Sentinels are the last ids, `<extra_id_0>` the very last, as in seqio and transformers. ByT5 is the exception: in
transformers `<extra_id_0>` is its first sentinel, and the published weights were trained with neither order; see
`docs/weights.md`.

The files are tried in this order: `spiece.model`, `tokenizer.model`; `tokenizer.json`, of which a sentencepiece model
is made in memory if it gives the same ids, and which the package tokenizers reads otherwise; `vocab.json` with
`merges.txt`.
"""

from collections.abc import Iterable, Mapping
import functools
import json
import os
from typing import Any

from t5x_lite import checks
from t5x_lite.data import vocabularies
from t5x_lite.data.text import hugging_face
from t5x_lite.data.text import normalization as normalization_lib
from t5x_lite.data.text import tokenizer_json
from t5x_lite.data.text.added_tokens import AddedToken
from t5x_lite.data.text.added_tokens import AddedTokensVocabulary
from t5x_lite.data.text.hugging_face import HuggingFaceVocabulary
from t5x_lite.data.text.hugging_face import SpecialTokens
from t5x_lite.data.text.packages import sentencepiece_modules
from t5x_lite.data.vocabularies import ByteVocabulary
from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.errors import CheckpointError, ConfigError, T5xLiteError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

MODEL_FILE = 'spiece.model'
TOKENIZER_MODEL = 'tokenizer.model'
TOKENIZER_JSON = 'tokenizer.json'
VOCAB_JSON = 'vocab.json'
MERGES = 'merges.txt'
TOKENIZER_CONFIG = 'tokenizer_config.json'
ADDED_TOKENS = 'added_tokens.json'
SPECIAL_TOKENS = 'special_tokens_map.json'
LIBRARIES = ('t5x_lite', 'seqio')
# Default numbers of sentinels that transformers' tokenizer adds to the model's pieces, by `model_type`.
_EXTRA_IDS = {'t5': 100, 'mt5': 0, 'umt5': 300, 'switch_transformers': 100}
_BYT5_EXTRA_IDS = 125
_BYT5_VOCAB_SIZE = 384
_SENTINEL = vocabularies.SENTINEL_PIECE
_SPACE = '\u2581'
_EOS = '</s>'
_SPECIAL_KEYS = (
  'pad_token',
  'eos_token',
  'unk_token',
  'bos_token',
  'cls_token',
  'sep_token',
  'mask_token',
)
# Tokens of transformers' classes for T5 and RoBERTa, whose files need not name them.
_T5_TOKENS = {'pad_token': '<pad>', 'eos_token': _EOS, 'unk_token': '<unk>'}
_ROBERTA_TOKENS = {
  'pad_token': '<pad>',
  'eos_token': _EOS,
  'unk_token': '<unk>',
  'bos_token': '<s>',
  'mask_token': '<mask>',
}

# Part of messages: added tokens were not read in earlier versions, with which a model may have been trained.
_NO_ADDED_TOKENS = 'hugging_face_vocabulary.added_tokens=False to encode them like other texts, as earlier versions did'


def hugging_face_vocabulary(
  folder: str,
  *,
  extra_ids: int | None = None,
  library: str = 't5x_lite',
  added_tokens: bool = True,
) -> Any:
  """Return the vocabulary of a Hugging Face folder, with the sentinels of its family.

  Args:
    folder: path of a folder with the files of a tokenizer (see above), or of a ByT5, which needs none.
    extra_ids: number of sentinels after the model's pieces; None for the number in the folder's files, or the default
      of the family (T5, Flan-T5 and Switch 100, umT5 300, ByT5 125, mT5 0, whose pieces include them).
    library: 't5x_lite', or 'seqio' for a vocabulary of seqio with the same ids.
    added_tokens: whether tokens that were added to the tokenizer have one id each, as in transformers. False gives the
      ids of earlier versions, which encoded them like other texts.

  Returns:
    A `SentencePieceVocabulary` or a `ByteVocabulary`, of t5x_lite or of seqio; with tokens that were added to the
    tokenizer, an `AddedTokensVocabulary`; for other types of tokenizers, a `HuggingFaceVocabulary`. seqio has neither.

  Raises:
    ConfigError: the folder does not exist, it has no supported tokenizer, its vocabulary has more ids than its model
      has rows, or an added token has the id of a sentinel.
    CheckpointError: a file of the folder is not a JSON object or does not list tokens with ids.
  """
  root = files.path(
    folder
  )  # downloads a model of the Hugging Face hub, or raises the error of that
  checks.check(
    'hugging_face_vocabulary',
    {'library': library, 'extra_ids': extra_ids, 'folder': os.fspath(folder)},
    library=checks.one_of(LIBRARIES),
    extra_ids=checks.number(at_least=0, integer=True).or_none(),
    folder=checks.Expectation(
      'an existing Hugging Face folder',
      lambda _: root.is_dir(),
      'Copy it to this path, or bind VOCABULARY to another vocabulary.',
    ),
  )
  found = _Folder(root)
  config = found.read('config.json')
  vocabulary = _make(found, extra_ids)
  if isinstance(vocabulary, HuggingFaceVocabulary):
    _check_without_effect(root, extra_ids=extra_ids, added_tokens=added_tokens)
  elif added_tokens:
    vocabulary = _with_added_tokens(found, vocabulary)
  ends = end_token_ids(root)
  if ends and vocabulary.eos_id not in ends:
    raise ConfigError(
      f'The end token of the tokenizer of {os.fspath(folder)!r} must be one of the ids {list(ends)} that end a text '
      f'(eos_token_id in generation_config.json or config.json), got {vocabulary.eos_id}. '
      "Copy the model's tokenizer to the folder, or correct eos_token_id."
    )
  num_rows = config.get('vocab_size')
  is_added = isinstance(vocabulary, AddedTokensVocabulary)
  if (
    is_added
    and isinstance(num_rows, int)
    and vocabulary.base.vocab_size <= num_rows < vocabulary.vocab_size
  ):
    raise ConfigError(
      f'The added tokens of {os.fspath(folder)!r} must have ids below vocab_size={num_rows} (config.json), got '
      f"{vocabulary.vocab_size - 1}. Copy the model's tokenizer to the folder, or set {_NO_ADDED_TOKENS}."
    )
  if isinstance(num_rows, int) and vocabulary.vocab_size > num_rows:
    raise ConfigError(
      f'The vocabulary of {os.fspath(folder)!r} must have at most vocab_size={num_rows} ids (config.json), got '
      f'{vocabulary.vocab_size}, {vocabulary.extra_ids} of them sentinels. Set hugging_face_vocabulary.extra_ids, or '
      "copy the model's tokenizer to the folder."
    )
  if library == 'seqio' and is_added:
    raise checks.invalid(
      'hugging_face_vocabulary',
      'library',
      f"'t5x_lite' for the added tokens of {os.fspath(folder)!r}",
      library,
      f'Set library to it, or set {_NO_ADDED_TOKENS}.',
    )
  if library == 'seqio':
    from t5x_lite.data.seqio import examples as seqio_examples  # only this branch needs TensorFlow

    return seqio_examples.as_seqio_vocabulary(vocabulary)
  return vocabulary


def end_token_ids(root: files.Path) -> tuple[int, ...]:
  """Return the ids that end a text, of generation_config.json or else config.json; empty if neither has any."""
  for name in ('generation_config.json', 'config.json'):
    ends = _read_json(root / name).get('eos_token_id')
    if ends is not None:
      break
  ends = ends if isinstance(ends, list) else [ends]
  return tuple(i for i in ends if isinstance(i, int) and not isinstance(i, bool))


class _Folder:
  """Files of a folder's tokenizer, each of which is read once."""

  def __init__(self, root: files.Path):
    self.root = root
    self.read = functools.cache(lambda name: _read_json(root / name))

  @functools.cached_property
  def tokens(self) -> list[AddedToken]:
    """The added tokens; see `_recorded_tokens`."""
    return _recorded_tokens(self)


def _make(folder: _Folder, extra_ids: int | None) -> Vocabulary:
  """Return the vocabulary of the folder."""
  root = folder.root
  config = folder.read('config.json')
  tokenizer = folder.read(TOKENIZER_CONFIG)
  name = str(tokenizer.get('tokenizer_class') or config.get('tokenizer_class') or '')
  number = extra_ids
  if number is None:
    number = _recorded_extra_ids(root, tokenizer)
  model_type = config.get('model_type')
  for file in (MODEL_FILE, TOKENIZER_MODEL):
    if (root / file).is_file():
      path = str(untrusted.check_file(root, file))
      return SentencePieceVocabulary(path, _number_of_sentinels(path, root, config, number))
  is_byt5 = model_type == 't5' and config.get('vocab_size') == _BYT5_VOCAB_SIZE
  has_json = (root / TOKENIZER_JSON).is_file()
  has_merges = (root / VOCAB_JSON).is_file() and (root / MERGES).is_file()
  if name.startswith('ByT5') or (is_byt5 and not has_json and not has_merges):
    return ByteVocabulary(_BYT5_EXTRA_IDS if number is None else number)
  if has_json:
    return _make_from_json(folder, number)
  if has_merges:
    return _make_from_merges(folder, name)
  raise ConfigError(
    f'{str(root)!r} must contain {MODEL_FILE}, {TOKENIZER_JSON}, or {VOCAB_JSON} with {MERGES}, or the '
    'tokenizer_config.json of a ByT5, got none of them. Copy the tokenizer of the original model into the folder, or '
    'bind VOCABULARY to its vocabulary.'
  )


def _number_of_sentinels(
  path: str, root: files.Path, config: Mapping[str, Any], number: int | None
) -> int:
  """Return the number of sentinels after the pieces of a sentencepiece model.

  Args:
    path: the model.
    root: the folder.
    config: contents of config.json.
    number: the number in the folder's files or of the user, or None.
  """
  if number is not None:
    return number
  pieces = read_sentencepiece_model(path).pieces
  if any(_SENTINEL.fullmatch(piece.piece) for piece in pieces):
    return 0
  default = _EXTRA_IDS.get(str(config.get('model_type')))
  if default is None:
    raise checks.invalid(
      'hugging_face_vocabulary',
      'extra_ids',
      f'set for model_type={config.get("model_type")!r} of {str(root)!r}',
      None,
      f'The types with defaults are {", ".join(_EXTRA_IDS)}; T5 has 100.',
    )
  num_rows = config.get('vocab_size')
  if isinstance(num_rows, int) and len(pieces) <= num_rows < len(pieces) + default:
    return 0  # A model of the type without sentinels, such as MADLAD-400.
  return default


def _make_from_json(folder: _Folder, number: int | None) -> Vocabulary:
  """Return the vocabulary of `tokenizer.json`."""
  root = folder.root
  path = str(root / TOKENIZER_JSON)
  contents = folder.read(TOKENIZER_JSON)
  tokenizer_json.check_model(contents, path)
  is_unigram = contents['model']['type'] == 'Unigram'
  special = _special_tokens(root, _T5_TOKENS if is_unigram else {})
  if special.eos == _EOS and tokenizer_json.is_sentencepiece(contents, special.eos):
    extra_ids = _number_of_sentinels(path, root, folder.read('config.json'), number)
    vocabulary = SentencePieceVocabulary(path, extra_ids)
    if _has_these_sentinels(vocabulary, folder.tokens):
      return vocabulary
  contents = hugging_face.with_tokens(contents, folder.tokens)
  return HuggingFaceVocabulary(path, json.dumps(contents), special)


def _has_these_sentinels(vocabulary: Vocabulary, tokens: Iterable[AddedToken]) -> bool:
  """Return True if sentinels among the tokens of a file have the ids of the vocabulary."""
  first = vocabulary.sentinel_id
  for token in tokens:
    number = token.content.removeprefix('<extra_id_').removesuffix('>')
    if _SENTINEL.fullmatch(token.content) and token.id != first - int(number):
      return False
  return True


def _make_from_merges(folder: _Folder, name: str) -> Vocabulary:
  """Return the vocabulary of `vocab.json` and `merges.txt`, whose class in transformers is `name`."""
  root = folder.root
  kind = name.removesuffix('Fast').removesuffix('Tokenizer')
  if kind not in hugging_face.BYTE_LEVEL_CLASSES:
    classes = ', '.join(f'{known}Tokenizer' for known in hugging_face.BYTE_LEVEL_CLASSES)
    raise ConfigError(
      f'The tokenizer_class of {str(root)!r}, which has {VOCAB_JSON} and {MERGES}, must be one of {classes}, got '
      f'{name!r}. Save it as {TOKENIZER_JSON}: transformers.AutoTokenizer.from_pretrained({str(root)!r})'
      f'.save_pretrained({str(root)!r}).'
    )
  has_ends = hugging_face.BYTE_LEVEL_CLASSES[kind]
  special = _special_tokens(root, _ROBERTA_TOKENS if has_ends else {})
  contents = hugging_face.byte_level_bpe(
    _read_json(root / VOCAB_JSON),
    untrusted.read_limited(root, MERGES).decode('utf-8', errors='replace'),
    special,
    bos=special.bos if has_ends else None,
    has_prefix_space=bool(folder.read(TOKENIZER_CONFIG).get('add_prefix_space', False)),
  )
  named = [
    AddedToken(id=contents['model']['vocab'][token], content=token)
    for token in dict.fromkeys([*special.controls, *filter(None, [special.unk])])
    if token in contents['model']['vocab']
  ]
  contents = hugging_face.with_tokens(contents, [*named, *folder.tokens])
  return HuggingFaceVocabulary(str(root / VOCAB_JSON), json.dumps(contents), special)


def _special_tokens(root: files.Path, defaults: Mapping[str, str]) -> SpecialTokens:
  """Return the special tokens in the files of transformers' tokenizer.

  Raises:
    ConfigError: there is no end token.
  """
  tokens = dict(defaults)
  for name in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
    facts = _read_json(root / name)
    for key in _SPECIAL_KEYS:
      token = facts.get(key)
      if isinstance(token, Mapping):
        token = token.get('content')
      if isinstance(token, str):
        tokens[key] = token
  if 'eos_token' not in tokens:
    raise ConfigError(
      f'The tokenizer of {str(root)!r} must have an end token, got no eos_token in {TOKENIZER_CONFIG} or '
      f'{SPECIAL_TOKENS}. Copy these files of the original tokenizer into the folder.'
    )
  controls = [token for key, token in tokens.items() if key != 'unk_token']
  return SpecialTokens(
    pad=tokens.get('pad_token'),
    eos=tokens['eos_token'],
    unk=tokens.get('unk_token'),
    bos=tokens.get('bos_token'),
    controls=tuple(dict.fromkeys(controls)),
  )


def _check_without_effect(root: files.Path, *, extra_ids: int | None, added_tokens: bool) -> None:
  """Raise ConfigError if an option is set that tokenizers of other types than sentencepiece do not have."""
  for option, value, default in (
    ('extra_ids', extra_ids, None),
    ('added_tokens', added_tokens, True),
  ):
    if value != default:
      raise checks.invalid(
        'hugging_face_vocabulary',
        option,
        f'{default} for the tokenizer of {str(root)!r}, whose file has all tokens',
        value,
        'Remove the binding.',
      )


def _with_added_tokens(folder: _Folder, base: Vocabulary) -> Vocabulary:
  """Return `base` with the added tokens of the folder; `base` itself if it has all of them.

  Raises:
    ConfigError: an added token has the id of a sentinel.
    CheckpointError: a file of the folder does not list tokens with ids.
  """
  tokens = []
  for token in folder.tokens:
    content = token.content
    piece = _piece(base, token.id)
    if _SENTINEL.fullmatch(content) or piece in (content, f'\u2581{content}'):
      continue
    if piece is not None and _SENTINEL.fullmatch(piece):
      raise ConfigError(
        f'The added token {content!r} of {str(folder.root)!r} must not have the id of a sentinel, got {token.id}, that '
        f'of {piece.removeprefix(_SPACE)} in a vocabulary with {base.extra_ids} extra_ids. Set '
        'hugging_face_vocabulary.extra_ids to the number of sentinels that the model was trained with, or set '
        f'{_NO_ADDED_TOKENS}.'
      )
    tokens.append(token)
  if not tokens:
    return base
  return AddedTokensVocabulary(base, tokens)


def _piece(vocabulary: Vocabulary, i: int) -> str | None:
  """Return the piece of an id that its vocabulary encodes by itself; None for any other id."""
  if i >= vocabulary.vocab_size:
    return None
  if isinstance(vocabulary, SentencePieceVocabulary):
    return vocabulary.processor.IdToPiece(i)
  special = ('<pad>', '</s>', '<unk>')
  if i < len(special):
    return special[i]
  if i > vocabulary.sentinel_id - vocabulary.extra_ids:
    return f'<extra_id_{vocabulary.sentinel_id - i}>'
  return ''


def _recorded_tokens(folder: _Folder) -> list[AddedToken]:
  """Return the tokens with ids in the files of a transformers tokenizer, by id.

  Raises:
    CheckpointError: a file does not list tokens with ids.
  """
  root = folder.root
  config = folder.read(TOKENIZER_CONFIG)
  found: dict[Any, Any] = {}
  path = root / TOKENIZER_CONFIG
  try:
    if 'added_tokens_decoder' in config:
      found = {int(i): entry for i, entry in config['added_tokens_decoder'].items()}
    else:
      path = root / TOKENIZER_JSON
      entries = folder.read(TOKENIZER_JSON).get('added_tokens') or ()
      found = {int(entry['id']): entry for entry in entries}
    tokens = {i: _added_token(i, entry) for i, entry in found.items()}
    path = root / ADDED_TOKENS
    # The file of older versions has no further facts.
    specials = {*_texts(root, TOKENIZER_CONFIG), *_texts(root, SPECIAL_TOKENS)}
    for content, i in _read_json(path).items():
      entry = {'content': content, 'special': content in specials}
      tokens.setdefault(int(i), _added_token(int(i), entry))
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    if isinstance(error, T5xLiteError):
      raise
    raise CheckpointError(
      f'{path} must list added tokens with their ids, got invalid contents ({type(error).__name__}: {error}). '
      'Copy the file again.'
    ) from error
  return [token for _, token in sorted(tokens.items())]


def _added_token(i: int, entry: Mapping[str, Any]) -> AddedToken:
  """Return the token of an entry of a tokenizer's file."""
  content = entry['content']
  if not isinstance(content, str) or not content:
    raise ValueError(f'content of {i} is {content!r}')
  if not 0 <= i < tokenizer_json.MAX_IDS:
    raise ValueError(f'the id of {content!r} is {i}')
  return AddedToken(
    id=i,
    content=content,
    lstrip=bool(entry.get('lstrip', False)),
    rstrip=bool(entry.get('rstrip', False)),
    single_word=bool(entry.get('single_word', False)),
    normalized=bool(entry.get('normalized', not entry.get('special', False))),
  )


def _texts(root: files.Path, name: str) -> list[str]:
  """Return the special tokens in a file of transformers' tokenizer.

  Raises:
    CheckpointError: they are not texts.
  """
  config = _read_json(root / name)
  texts = []
  for key in ('additional_special_tokens', 'extra_special_tokens'):
    tokens = config.get(key) or ()
    if not isinstance(tokens, str | list | tuple | Mapping):
      raise CheckpointError(
        f'In {root / name}, `{key}` must be a list of tokens, got {untrusted.shorten(tokens)}. Copy the file again.'
      )
    for token in tokens:
      if isinstance(token, Mapping):
        token = token.get('content', '')
      texts.append(str(token))
  return texts


def checked_extra_ids(config: Mapping[str, Any], path: files.Path) -> int | None:
  """Return `extra_ids` of a file, or None if it has none.

  Raises:
    CheckpointError: the number is negative or too large.
  """
  number = config.get('extra_ids')
  if not isinstance(number, int) or isinstance(number, bool):
    return None
  if not 0 <= number <= vocabularies.MAX_EXTRA_IDS:
    raise CheckpointError(
      f'In {path}, `extra_ids` must be from 0 to {vocabularies.MAX_EXTRA_IDS}, got {untrusted.shorten(number)}. Copy '
      'the file again.'
    )
  return number


def _recorded_extra_ids(root: files.Path, tokenizer: Mapping[str, Any]) -> int | None:
  """Return the number of sentinels in the files of transformers' tokenizer, or None."""
  number = checked_extra_ids(tokenizer, root / TOKENIZER_CONFIG)
  # The class for ByT5 writes 0 although it lists the sentinels.
  if number is not None and (
    number or not str(tokenizer.get('tokenizer_class', '')).startswith('ByT5')
  ):
    return number
  for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
    sentinels = {text for text in _texts(root, name) if _SENTINEL.fullmatch(text)}
    if sentinels:
      return len(sentinels)
  if number is not None and 'additional_special_tokens' in tokenizer:
    return 0
  return None


def has_sentinels(model_file: str) -> bool:
  """Return True if the pieces of a sentencepiece model include sentinels, as in mT5."""
  return any(
    _SENTINEL.fullmatch(piece.piece) for piece in read_sentencepiece_model(model_file).pieces
  )


def read_sentencepiece_model(model_file: str) -> Any:
  """Return the `ModelProto` of a sentencepiece model.

  Raises:
    ConfigError: sentencepiece or protobuf is not installed, or the file is not a sentencepiece model.
    OSError: the file cannot be read.
  """
  _, model_pb2, decode_error = sentencepiece_modules()
  model = model_pb2.ModelProto()
  problem = 'it has no pieces'
  serialized = vocabularies.read_model_file(model_file)
  try:
    model.ParseFromString(serialized)
  except decode_error as error:
    problem = str(error)
    model.Clear()
  if not model.pieces:
    raise ConfigError(f'{model_file!r} is not a sentencepiece model: {problem}. Copy it again.')
  return model


# ----------------------------------------------------------------------------------------------------------------------
# tokenizer.json


def write_sentencepiece_model(
  folder: str, output: str | None = None, *, normalization: str = normalization_lib.T5
) -> str:
  """Write the sentencepiece model from which the `tokenizer.json` of a T5-like tokenizer was made.

  The file has the pieces, scores and the normalization table; sentinels are omitted, as in T5's model file. The new
  model encodes texts like the original one.

  Args:
    folder: path of a folder with `tokenizer.json`.
    output: path of the new file; None for `spiece.model` in the folder.
    normalization: normalization of texts for a file without its table, as transformers 5 saves it: 't5' for T5's
      table, or the rule of sentencepiece with which the model was trained, such as 'nmt_nfkc' or 'identity'.

  Returns:
    Path of the new file.

  Raises:
    ConfigError: the type of tokenizer is not supported, or the output exists.
    CheckpointError: the file is damaged; the message has the field.
  """
  source = files.path(folder) / TOKENIZER_JSON
  if output is not None:
    target = files.path(output)
  else:
    target = files.path(folder) / MODEL_FILE
  if not source.is_file():
    raise ConfigError(f'{str(source)!r} must be the tokenizer of a T5-like model, got no file.')
  if target.exists():
    raise ConfigError(
      f'{str(target)!r} must be a new file, got an existing one. Give another output, or delete it.'
    )
  checks.check(
    'write_sentencepiece_model',
    {'normalization': normalization},
    normalization=checks.one_of(normalization_lib.NAMES),
  )
  serialized = tokenizer_json.sentencepiece_model(_read_json(source), str(source), normalization)
  try:
    sentencepiece_modules()[0].SentencePieceProcessor().LoadFromSerializedProto(serialized)
  except RuntimeError as error:
    reason = ' '.join(str(error).split())
    raise CheckpointError(
      f'{source} gives a sentencepiece model that cannot be loaded ({reason}). Copy the file again.'
    ) from error
  files.write(target, serialized)
  return str(target)


def _read_json(path: files.Path) -> Mapping[str, Any]:
  """Return the JSON object in a file, empty if the file does not exist."""
  if path.is_file():
    return untrusted.parse_object(untrusted.read_limited(path.parent, path.name), str(path))
  return {}
