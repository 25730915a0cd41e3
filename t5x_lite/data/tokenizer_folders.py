"""Vocabularies of Hugging Face folders: T5's, mT5's, umT5's, Switch's sentencepiece models, ByT5's bytes.

A gin file names the folder, and the files in it say the rest:

    from t5x_lite.data import tokenizer_folders
    VOCABULARY = @tokenizer_folders.hugging_face_vocabulary()
    tokenizer_folders.hugging_face_vocabulary.folder = '/path/to/flan-t5-small'

Sentinels stand behind the pieces, `<extra_id_0>` last, as here, in seqio and in transformers alike. (ByT5 is the
exception: transformers begins with `<extra_id_0>` there, and the published weights know neither: `docs/weights.md`.)
"""

import base64
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from t5x_lite import files, untrusted
from t5x_lite.data.vocabularies import ByteVocabulary, SentencePieceVocabulary, Vocabulary
from t5x_lite.errors import CheckpointError, ConfigError, did_you_mean

MODEL_FILE = 'spiece.model'
TOKENIZER_JSON = 'tokenizer.json'
LIBRARIES = ('t5x_lite', 'seqio')
# Sentinels that transformers' tokenizer adds to the model's pieces, where no file of the folder says; by `model_type`.
_EXTRA_IDS = {'t5': 100, 'mt5': 0, 'umt5': 300, 'switch_transformers': 100}
_BYT5_EXTRA_IDS = 125
_BYT5_VOCAB_SIZE = 384
_SENTINEL = re.compile(r'\u2581?<extra_id_\d+>')
# Kinds of pieces in a sentencepiece model.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def hugging_face_vocabulary(folder: str, *, extra_ids: int | None = None, library: str = 't5x_lite') -> Any:
  """Returns the vocabulary of a Hugging Face folder, with the sentinels of its family.

  Args:
    folder: path of a folder with `spiece.model`, or of a ByT5, which has no such file.
    extra_ids: sentinels behind the model's pieces; None: what the folder's files say, or else its family's number (T5,
      Flan-T5 and Switch 100, umT5 300, ByT5 125; mT5 has them among its pieces: 0).
    library: 'seqio' gives seqio's vocabulary of the same ids, for a seqio Task.

  Returns:
    A `SentencePieceVocabulary` or a `ByteVocabulary`, of this package or of seqio.

  Raises:
    ConfigError: there is no such folder, it has no tokenizer or one that this package cannot read, or its vocabulary
      has more ids than its model has rows.
  """
  if library not in LIBRARIES:
    raise ConfigError(f'hugging_face_vocabulary: got library={library!r}, expected one of {LIBRARIES}.'
                      f'{did_you_mean(str(library), LIBRARIES)}')
  if extra_ids is not None and (isinstance(extra_ids, bool) or not isinstance(extra_ids, int) or extra_ids < 0):
    raise ConfigError(f'hugging_face_vocabulary: got extra_ids={extra_ids!r}, expected a whole number >= 0, or None.')
  root = pathlib.Path(folder)
  if not root.is_dir():
    raise ConfigError(f'There is no folder {os.fspath(folder)!r} to take a vocabulary from; expected a Hugging Face '
                      'folder on this machine. Copy it here, or bind VOCABULARY to another vocabulary.')
  config = _read_json(root / 'config.json')
  vocabulary = _make(root, config, extra_ids)
  num_rows = config.get('vocab_size')
  if isinstance(num_rows, int) and vocabulary.vocab_size > num_rows:
    raise ConfigError(
        f'The vocabulary of {os.fspath(folder)!r} has {vocabulary.vocab_size} ids, {vocabulary.extra_ids} of them '
        f'sentinels behind the pieces, and its model vocab_size={num_rows} (config.json): expected no more ids than '
        'rows. Set hugging_face_vocabulary.extra_ids, or take the tokenizer that belongs to the model.')
  if library == 'seqio':
    from t5x_lite.data import seqio_examples  # TensorFlow is needed here alone
    return seqio_examples.as_seqio_vocabulary(vocabulary)
  return vocabulary


def _make(root: pathlib.Path, config: Mapping[str, Any], extra_ids: int | None) -> Vocabulary:
  """Returns our vocabulary of the folder."""
  tokenizer = _read_json(root / 'tokenizer_config.json')
  name = str(tokenizer.get('tokenizer_class') or config.get('tokenizer_class') or '')
  said = extra_ids
  if said is None:
    said = _said_extra_ids(tokenizer, _read_json(root / 'special_tokens_map.json'))
  if (root / MODEL_FILE).is_file():
    path = str(untrusted.check_file(root, MODEL_FILE))
    if said is None:
      said = 0 if has_sentinels(path) else _EXTRA_IDS.get(str(config.get('model_type')))
    if said is None:
      raise ConfigError(
          f'No file of {str(root)!r} says how many sentinels follow the pieces of {MODEL_FILE}: config.json has '
          f'model_type={config.get("model_type")!r}, of none of {", ".join(_EXTRA_IDS)}. Set '
          'hugging_face_vocabulary.extra_ids (T5 has 100).')
    return SentencePieceVocabulary(path, said)
  is_byt5 = config.get('model_type') == 't5' and config.get('vocab_size') == _BYT5_VOCAB_SIZE
  if name.startswith('ByT5') or (is_byt5 and not (root / TOKENIZER_JSON).is_file()):
    return ByteVocabulary(_BYT5_EXTRA_IDS if said is None else said)
  if (root / TOKENIZER_JSON).is_file():
    raise ConfigError(
        f'{str(root)!r} has its tokenizer as {TOKENIZER_JSON} alone (transformers 5 saves no other file); expected '
        f'{MODEL_FILE}. Write it from that file, once: python -c "from t5x_lite.data import tokenizer_folders; '
        f'tokenizer_folders.write_sentencepiece_model({str(root)!r})"')
  raise ConfigError(f'{str(root)!r} has no tokenizer: expected {MODEL_FILE}, or a tokenizer_config.json of a ByT5. '
                    'Copy the tokenizer of the model that this one comes from into it, or bind VOCABULARY to the '
                    'vocabulary that it was trained with.')


def _said_extra_ids(tokenizer: Mapping[str, Any], special_tokens: Mapping[str, Any]) -> int | None:
  """Returns the number of sentinels that the files of transformers' tokenizer say, None if they do not."""
  number = tokenizer.get('extra_ids')
  is_number = isinstance(number, int) and not isinstance(number, bool)
  # The class for ByT5 writes 0 and lists the sentinels all the same.
  if is_number and (number or not str(tokenizer.get('tokenizer_class', '')).startswith('ByT5')):
    return number
  for config in (tokenizer, special_tokens):
    for key in ('additional_special_tokens', 'extra_special_tokens'):
      tokens = config.get(key) or ()
      texts = [token.get('content', '') if isinstance(token, Mapping) else str(token) for token in tokens]
      if sentinels := {text for text in texts if _SENTINEL.fullmatch(text)}:
        return len(sentinels)
  return 0 if is_number and 'additional_special_tokens' in tokenizer else None


def has_sentinels(model_file: str) -> bool:
  """Whether sentinels are among the pieces of a sentencepiece model, as mT5's has them."""
  return any(_SENTINEL.fullmatch(piece.piece) for piece in read_sentencepiece_model(model_file).pieces)


def read_sentencepiece_model(model_file: str) -> Any:
  """Returns the `ModelProto` of a sentencepiece model.

  Raises:
    ConfigError: sentencepiece or protobuf is not installed, or the file is no such model.
    OSError: it cannot be read.
  """
  model = _model_proto()
  from google.protobuf.message import DecodeError
  with open(model_file, 'rb') as file:
    serialized = file.read()
  try:
    model.ParseFromString(serialized)
  except DecodeError as error:
    raise ConfigError(f'{model_file!r} is no sentencepiece model: {error}. Copy it again.') from error
  if not model.pieces:
    raise ConfigError(f'{model_file!r} is no sentencepiece model: it has no pieces. Copy it again.')
  return model


# ----------------------------------------------------------------------------------------------------------------------
# tokenizer.json


def write_sentencepiece_model(folder: str, output: str | None = None) -> str:
  """Writes the sentencepiece model that the `tokenizer.json` of a T5-like tokenizer was made from.

  Pieces, scores and the table of normalization are in that file; sentinels are left out, as they are in T5's own model
  file. What sentencepiece and transformers encode alike, the new model encodes alike too.

  Args:
    folder: with `tokenizer.json`.
    output: path of the new file; None: `spiece.model` in the folder.

  Returns:
    The path that was written.

  Raises:
    ConfigError: the tokenizer is of another kind, or the output exists.
  """
  source = pathlib.Path(folder) / TOKENIZER_JSON
  target = pathlib.Path(output) if output is not None else pathlib.Path(folder) / MODEL_FILE
  if not source.is_file():
    raise ConfigError(f'There is no file {str(source)!r}; expected the tokenizer of a T5-like model.')
  if target.exists():
    raise ConfigError(f'{str(target)!r} exists: name another output, or remove it.')
  serialized = _rebuild(_read_json(source), str(source)).SerializeToString()
  files.write(target, serialized)
  return str(target)


def _rebuild(tokenizer: Mapping[str, Any], path: str) -> Any:
  """Returns the sentencepiece model of a `tokenizer.json`."""
  unigram = tokenizer.get('model') or {}
  pieces = unigram.get('vocab')
  if unigram.get('type') != 'Unigram' or not isinstance(pieces, list):
    raise ConfigError(f'{path} has a tokenizer of the kind {unigram.get("type")!r}; expected Unigram, T5\'s. Other '
                      'kinds have no sentencepiece model.')
  while pieces and _SENTINEL.fullmatch(pieces[-1][0]) and not pieces[-1][0].startswith('\u2581'):
    pieces = pieces[:-1]
  model, unk_id = _model_proto(), unigram.get('unk_id', 2)
  special = {token['id'] for token in tokenizer.get('added_tokens', ()) if token.get('special')}
  for number, (piece, score) in enumerate(pieces):
    if number == unk_id:
      kind = _UNKNOWN
    elif _SENTINEL.fullmatch(piece):
      kind = _USER_DEFINED
    else:
      kind = _CONTROL if number in special else _NORMAL
    model.pieces.add(piece=piece, score=score, type=kind)
  model.trainer_spec.model_type = 1  # unigram
  model.trainer_spec.vocab_size = len(pieces)
  ids = {piece: number for number, (piece, _) in enumerate(pieces[:10])}
  model.trainer_spec.pad_id, model.trainer_spec.eos_id = ids.get('<pad>', -1), ids.get('</s>', -1)
  model.trainer_spec.unk_id, model.trainer_spec.bos_id = unk_id, -1
  model.trainer_spec.pad_piece, model.trainer_spec.eos_piece = '<pad>', '</s>'
  model.trainer_spec.unk_piece = pieces[unk_id][0]
  model.normalizer_spec.name = 'from tokenizer.json'
  model.normalizer_spec.precompiled_charsmap = _charsmap(tokenizer.get('normalizer'), path)
  model.normalizer_spec.add_dummy_prefix = True
  model.normalizer_spec.remove_extra_whitespaces = True
  model.normalizer_spec.escape_whitespaces = True
  return model


def _charsmap(normalizer: Mapping[str, Any] | None, path: str) -> bytes:
  """Returns sentencepiece's table of normalization in a `normalizer` of `tokenizer.json`; empty for none."""
  parts = [] if normalizer is None else normalizer.get('normalizers', [normalizer])
  charsmap = b''
  for part in parts:
    if part.get('type') == 'Precompiled':
      charsmap = base64.b64decode(part['precompiled_charsmap'] or '')
    elif (part.get('type'), part.get('content')) not in (('Replace', ' '), ('Replace', '\u2581'), ('Strip', None)):
      raise ConfigError(f'{path} has a normalizer of the kind {part.get("type")!r}; expected the table of a '
                        'sentencepiece model (Precompiled) alone. Take spiece.model from the original model.')
  return charsmap


def _model_proto() -> Any:
  try:
    from sentencepiece import sentencepiece_model_pb2
  except ImportError as error:
    raise ConfigError(f'Vocabularies of sentencepiece need the packages sentencepiece and protobuf, but: {error}. '
                      'Install them with `pip install sentencepiece protobuf`.') from error
  return sentencepiece_model_pb2.ModelProto()


def _read_json(path: pathlib.Path) -> Mapping[str, Any]:
  """Returns the object in a file, empty if there is none."""
  if not path.is_file():
    return {}
  try:
    value = json.loads(untrusted.read_limited(path.parent, path.name))
  except CheckpointError:
    raise
  except (ValueError, RecursionError) as error:
    raise ConfigError(f'{path} is no JSON ({error}); expected an object. Download it again.') from error
  if not isinstance(value, dict):
    raise ConfigError(f'{path} holds a {type(value).__name__}; expected a JSON object. Download it again.')
  return value
