"""Vocabularies of Hugging Face folders: sentencepiece models of T5, mT5, umT5 and Switch, and the bytes of ByT5.

A gin file needs only the path of the folder:

    from t5x_lite.data import tokenizer_folders
    VOCABULARY = @tokenizer_folders.hugging_face_vocabulary()
    tokenizer_folders.hugging_face_vocabulary.folder = '/path/to/flan-t5-small'

Sentinels are the last ids, `<extra_id_0>` the very last, as in seqio and transformers. ByT5 is the exception: in
transformers `<extra_id_0>` is its first sentinel, and the published weights were trained with neither order; see
`docs/weights.md`.
"""

from collections.abc import Mapping
import os
import re
from typing import Any

from t5x_lite import checks
from t5x_lite.data import vocabularies
from t5x_lite.data.text import normalization as normalization_lib
from t5x_lite.data.text import tokenizer_json
from t5x_lite.data.text.added_tokens import AddedToken
from t5x_lite.data.text.added_tokens import AddedTokensVocabulary
from t5x_lite.data.vocabularies import ByteVocabulary
from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.data.vocabularies import sentencepiece_modules
from t5x_lite.errors import CheckpointError, ConfigError, T5xLiteError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

MODEL_FILE = 'spiece.model'
TOKENIZER_JSON = 'tokenizer.json'
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
# Kinds of pieces in a sentencepiece model.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
_BYTE_PIECE = re.compile(r'<0x[0-9A-F]{2}>')

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
    folder: path of a folder with `spiece.model`, or of a ByT5, which has no such file.
    extra_ids: number of sentinels after the model's pieces; None for the number in the folder's files, or the default
      of the family (T5, Flan-T5 and Switch 100, umT5 300, ByT5 125, mT5 0, whose pieces include them).
    library: 't5x_lite', or 'seqio' for a vocabulary of seqio with the same ids.
    added_tokens: whether tokens that were added to the tokenizer have one id each, as in transformers. False gives the
      ids of earlier versions, which encoded them like other texts.

  Returns:
    A `SentencePieceVocabulary` or a `ByteVocabulary`, of t5x_lite or of seqio; with tokens that were added to the
    tokenizer, an `AddedTokensVocabulary`, which seqio does not have.

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
  config = _read_json(root / 'config.json')
  vocabulary = _make(root, config, extra_ids)
  if added_tokens:
    vocabulary = _with_added_tokens(root, vocabulary)
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


def _make(root: files.Path, config: Mapping[str, Any], extra_ids: int | None) -> Vocabulary:
  """Return the vocabulary of the folder."""
  tokenizer = _read_json(root / TOKENIZER_CONFIG)
  name = str(tokenizer.get('tokenizer_class') or config.get('tokenizer_class') or '')
  number = extra_ids
  if number is None:
    number = _recorded_extra_ids(root, tokenizer)
  if (root / MODEL_FILE).is_file():
    path = str(untrusted.check_file(root, MODEL_FILE))
    if number is None:
      if has_sentinels(path):
        number = 0
      else:
        number = _EXTRA_IDS.get(str(config.get('model_type')))
    if number is None:
      raise checks.invalid(
        'hugging_face_vocabulary',
        'extra_ids',
        f'set for model_type={config.get("model_type")!r} of {str(root)!r}',
        None,
        f'The types with defaults are {", ".join(_EXTRA_IDS)}; T5 has 100.',
      )
    return SentencePieceVocabulary(path, number)
  is_byt5 = config.get('model_type') == 't5' and config.get('vocab_size') == _BYT5_VOCAB_SIZE
  if name.startswith('ByT5') or (is_byt5 and not (root / TOKENIZER_JSON).is_file()):
    return ByteVocabulary(_BYT5_EXTRA_IDS if number is None else number)
  if (root / TOKENIZER_JSON).is_file():
    remedy = (
      f'Write it from {TOKENIZER_JSON}, once: python -c "from t5x_lite.data import tokenizer_folders; '
      f'tokenizer_folders.write_sentencepiece_model({str(root)!r})"'
    )
  else:
    remedy = 'Copy the tokenizer of the original model into the folder, or bind VOCABULARY to its vocabulary.'
  raise ConfigError(
    f'{str(root)!r} must contain {MODEL_FILE}, or the tokenizer_config.json of a ByT5, got neither. '
    f'{remedy}'
  )


def _with_added_tokens(root: files.Path, base: Vocabulary) -> Vocabulary:
  """Return `base` with the added tokens of the folder; `base` itself if it has all of them.

  Raises:
    ConfigError: an added token has the id of a sentinel.
    CheckpointError: a file of the folder does not list tokens with ids.
  """
  tokens = []
  for token in _recorded_tokens(root):
    content = token.content
    piece = _piece(base, token.id)
    if _SENTINEL.fullmatch(content) or piece in (content, f'\u2581{content}'):
      continue
    if piece is not None and _SENTINEL.fullmatch(piece):
      raise ConfigError(
        f'The added token {content!r} of {str(root)!r} must not have the id of a sentinel, got {token.id}, that of '
        f'{piece.removeprefix(_SPACE)} in a vocabulary with {base.extra_ids} extra_ids. Set '
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


def _recorded_tokens(root: files.Path) -> list[AddedToken]:
  """Return the tokens with ids in the files of a transformers tokenizer, by id.

  Raises:
    CheckpointError: a file does not list tokens with ids.
  """
  config = _read_json(root / TOKENIZER_CONFIG)
  found: dict[Any, Any] = {}
  path = root / TOKENIZER_CONFIG
  try:
    if 'added_tokens_decoder' in config:
      found = {int(i): entry for i, entry in config['added_tokens_decoder'].items()}
    elif (root / TOKENIZER_JSON).is_file():
      path = root / TOKENIZER_JSON
      entries = _read_json(path).get('added_tokens') or ()
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
  model = _rebuild(_read_json(source), str(source), normalization)
  serialized = model.SerializeToString()
  try:
    sentencepiece_modules()[0].SentencePieceProcessor().LoadFromSerializedProto(serialized)
  except RuntimeError as error:
    reason = ' '.join(str(error).split())
    raise CheckpointError(
      f'{source} gives a sentencepiece model that cannot be loaded ({reason}). Copy the file again.'
    ) from error
  files.write(target, serialized)
  return str(target)


def _rebuild(tokenizer: Mapping[str, Any], path: str, normalization: str) -> Any:
  """Return the sentencepiece model of a `tokenizer.json`."""
  tokenizer_json.check_model(tokenizer, path)
  unigram = tokenizer['model']
  if unigram.get('type') != 'Unigram':
    raise ConfigError(
      f"The tokenizer {path} must be of type 'Unigram', as in T5, got {untrusted.shorten(unigram.get('type'))}. Other "
      'types have no sentencepiece model.'
    )
  tokenizer_json.check_unigram(tokenizer, path)
  pieces = unigram['vocab']
  while pieces and _SENTINEL.fullmatch(pieces[-1][0]) and not pieces[-1][0].startswith('\u2581'):
    pieces = pieces[:-1]
  model = sentencepiece_modules()[1].ModelProto()
  unk_id = unigram.get('unk_id', 2)
  special = {token['id'] for token in tokenizer.get('added_tokens') or () if token.get('special')}
  for number, (piece, score) in enumerate(pieces):
    if number == unk_id:
      kind = _UNKNOWN
    elif _SENTINEL.fullmatch(piece):
      kind = _USER_DEFINED
    elif number in special:
      kind = _CONTROL
    elif unigram.get('byte_fallback') and _BYTE_PIECE.fullmatch(piece):
      kind = _BYTE
    else:
      kind = _NORMAL
    model.pieces.add(piece=piece, score=score, type=kind)
  model.trainer_spec.model_type = 1  # unigram
  model.trainer_spec.vocab_size = len(pieces)
  model.trainer_spec.byte_fallback = bool(unigram.get('byte_fallback'))
  ids = {piece: number for number, (piece, _) in enumerate(pieces)}
  model.trainer_spec.pad_id = ids.get('<pad>', -1)
  model.trainer_spec.eos_id = ids.get('</s>', -1)
  model.trainer_spec.unk_id = unk_id
  model.trainer_spec.bos_id = -1
  model.trainer_spec.pad_piece = '<pad>'
  model.trainer_spec.eos_piece = '</s>'
  model.trainer_spec.unk_piece = pieces[unk_id][0]
  model.normalizer_spec.name = 'from tokenizer.json'
  if tokenizer.get('normalizer') is None:
    charsmap = normalization_lib.charsmap(normalization)
  else:
    charsmap = _charsmap(tokenizer['normalizer'], path)
  model.normalizer_spec.precompiled_charsmap = charsmap
  model.normalizer_spec.add_dummy_prefix = True
  model.normalizer_spec.remove_extra_whitespaces = True
  model.normalizer_spec.escape_whitespaces = True
  return model


def _charsmap(normalizer: Mapping[str, Any], path: str) -> bytes:
  """Return sentencepiece's normalization table in a `normalizer` of `tokenizer.json`, empty without one."""
  parts = tokenizer_json.normalizers(normalizer, path)
  charsmap = b''
  for part in parts:
    if part.get('type') == 'Precompiled':
      charsmap = tokenizer_json.decode_charsmap(part.get('precompiled_charsmap'), path)
    elif (part.get('type'), part.get('content')) not in (
      ('Replace', ' '),
      ('Replace', '\u2581'),
      ('Strip', None),
    ):
      raise ConfigError(
        f'The normalizer of {path} must be only the table of a sentencepiece model (Precompiled), got '
        f'{part.get("type")!r}. Use spiece.model of the original model.'
      )
  return charsmap


def _read_json(path: files.Path) -> Mapping[str, Any]:
  """Return the JSON object in a file, empty if the file does not exist."""
  if path.is_file():
    return untrusted.parse_object(untrusted.read_limited(path.parent, path.name), str(path))
  return {}
