"""A `tokenizer.json` of Hugging Face: its sentencepiece model, and validation with the file and the field.

A tokenizer of type Unigram is computed by sentencepiece if it splits texts as sentencepiece does (`is_sentencepiece`).
"""

import base64
import binascii
from collections.abc import Mapping
import re
from typing import Any

from t5x_lite.data.text import normalization as normalization_lib
from t5x_lite.data.text.packages import sentencepiece_modules
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.storage import untrusted

# Piece of a sentinel in a sentencepiece model.
SENTINEL_PIECE = re.compile(r'\u2581?<extra_id_\d+>')
# Kinds of pieces in a sentencepiece model.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
_BYTE_PIECE = re.compile(r'<0x[0-9A-F]{2}>')
# Ids are below this number.
MAX_IDS = 2**24
# Of the size at the start of a table of normalization.
_SIZE_BYTES = 4
# float32, as in sentencepiece.
_MAX_SCORE = 3e38


def _error(path: str, problem: str) -> CheckpointError:
  return CheckpointError(f'In {path}, {problem}. Copy the file again.')


def check_model(tokenizer: Mapping[str, Any], path: str) -> None:
  """Raise CheckpointError if `model` is not an object with a type, or `added_tokens` is not a list of tokens."""
  model = tokenizer.get('model')
  if not isinstance(model, Mapping):
    raise _error(path, f'`model` must be an object, got {untrusted.shorten(model)}')
  if not isinstance(model.get('type'), str):
    raise _error(path, f'`model.type` must be a name, got {untrusted.shorten(model.get("type"))}')
  problem = _problem_of_added(tokenizer.get('added_tokens'))
  if problem is not None:
    raise _error(path, problem)


def check_unigram(tokenizer: Mapping[str, Any], path: str) -> None:
  """Raise if a field of a tokenizer of type 'Unigram' is invalid.

  Args:
    tokenizer: contents of the file, after `check_model`.
    path: name of the file, for the message.

  Raises:
    CheckpointError: the first invalid field.
  """
  problem = _problem_of_unigram(tokenizer['model'])
  if problem is not None:
    raise _error(path, problem)


def _problem_of_unigram(model: Mapping[str, Any]) -> str | None:
  pieces = model.get('vocab')
  if not isinstance(pieces, list) or not 0 < len(pieces) < MAX_IDS:
    return f'`model.vocab` must be a list of pieces, got {untrusted.shorten(pieces)}'
  seen = set()
  for number, entry in enumerate(pieces):
    field = f'`model.vocab[{number}]`'
    if not isinstance(entry, list) or len(entry) != 2:
      return f'{field} must be a piece and its score, got {untrusted.shorten(entry)}'
    piece, score = entry
    if not isinstance(piece, str) or not piece or not _is_text(piece):
      return f'{field}[0] must be a text, got {untrusted.shorten(piece)}'
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if not is_number or not abs(score) <= _MAX_SCORE:  # NaN is not.
      return f'{field}[1] must be a finite number, got {untrusted.shorten(score)}'
    if piece in seen:
      return (
        f'{field}[0] must be a piece that is not in the list before, got {untrusted.shorten(piece)}'
      )
    seen.add(piece)
  unk_id = model.get('unk_id', 2)
  if not untrusted.is_count(unk_id, len(pieces) - 1):
    return f'`model.unk_id` must be from 0 to {len(pieces) - 1}, got {untrusted.shorten(unk_id)}'
  if not isinstance(model.get('byte_fallback') or False, bool):
    got = untrusted.shorten(model['byte_fallback'])
    return f'`model.byte_fallback` must be true or false, got {got}'
  return None


def _is_text(piece: str) -> bool:
  """Return False for halves of surrogate pairs, which are not in UTF-8."""
  try:
    piece.encode()
  except UnicodeEncodeError:
    return False
  return True


def _problem_of_added(tokens: Any) -> str | None:
  if tokens is None:
    return None
  if not isinstance(tokens, list):
    return f'`added_tokens` must be a list, got {untrusted.shorten(tokens)}'
  for number, token in enumerate(tokens):
    field = f'`added_tokens[{number}]`'
    if not isinstance(token, Mapping):
      return f'{field} must be an object, got {untrusted.shorten(token)}'
    if not untrusted.is_count(token.get('id'), MAX_IDS - 1):
      return f'{field}.id must be an integer >= 0, got {untrusted.shorten(token.get("id"))}'
    if not isinstance(token.get('content'), str):
      return f'{field}.content must be a text, got {untrusted.shorten(token.get("content"))}'
    if not isinstance(token.get('special') or False, bool):
      return f'{field}.special must be true or false, got {untrusted.shorten(token["special"])}'
  return None


def normalizers(normalizer: Any, path: str) -> list[Mapping[str, Any]]:
  """Return the parts of `normalizer`.

  Raises:
    CheckpointError: it is not an object, or its parts are not.
  """
  if not isinstance(normalizer, Mapping):
    raise _error(path, f'`normalizer` must be an object, got {untrusted.shorten(normalizer)}')
  parts = normalizer.get('normalizers', [normalizer])
  if not isinstance(parts, list):
    raise _error(path, f'`normalizer.normalizers` must be a list, got {untrusted.shorten(parts)}')
  for number, part in enumerate(parts):
    if not isinstance(part, Mapping):
      field = f'`normalizer.normalizers[{number}]`'
      raise _error(path, f'{field} must be an object, got {untrusted.shorten(part)}')
  return parts


def decode_charsmap(value: Any, path: str) -> bytes:
  """Return sentencepiece's table of normalization from its base64; empty for None.

  Raises:
    CheckpointError: the table is damaged.
  """
  field = '`precompiled_charsmap` of `normalizer`'
  if value is None:
    return b''
  if not isinstance(value, str):
    raise _error(path, f'{field} must be a text in base64, got {untrusted.shorten(value)}')
  try:
    table = base64.b64decode(value, validate=True)
  except (binascii.Error, ValueError) as error:
    raise _error(path, f'{field} must be a text in base64 ({error})') from error
  size = int.from_bytes(table[:_SIZE_BYTES], 'little')
  # The size of a trie, the trie, and texts that each end with a zero.
  is_table = 0 < size < len(table) - _SIZE_BYTES and size % 4 == 0 and table.endswith(b'\0')
  if table and not is_table:
    raise _error(path, f'{field} must be a table of sentencepiece, got {len(table)} other bytes')
  return table


def is_sentencepiece(tokenizer: Mapping[str, Any], eos_token: str) -> bool:
  """Return True if a tokenizer divides texts as a sentencepiece model does, so that one gives its ids.

  This is the case for type Unigram, if words are separated by any white space and begin with '\u2581', and if nothing
  but the end token is added to a text.

  Args:
    tokenizer: contents of the file.
    eos_token: the end token.
  """
  model = tokenizer.get('model')
  if not isinstance(model, Mapping) or model.get('type') != 'Unigram':
    return False
  parts = _parts(tokenizer.get('normalizer'), 'normalizers')
  has_table_only = all(
    _type(part) in ('Precompiled', 'Strip') or _joins_spaces(part) for part in parts
  )
  splits = _parts(tokenizer.get('pre_tokenizer'), 'pretokenizers')
  if not has_table_only or not splits or not _begins_words(splits[-1]):
    return False
  # What comes before the sign of a space: white space that is left out, or spaces that the normalizer has joined.
  before = [_type(part) for part in splits[:-1]]
  is_joined = any(map(_joins_spaces, parts)) and 'Strip' in map(_type, parts)
  if before != ['WhitespaceSplit'] and not (before == [] and is_joined):
    return False
  if model.get('byte_fallback') and not _has_all_bytes(model):
    return False
  return _added_around_a_text(tokenizer) in ([], [eos_token])


def _parts(component: Any, key: str) -> list[Any]:
  """Return the parts of a component of a tokenizer, which may be a sequence of them; empty for None."""
  if component is None:
    return []
  parts = component.get(key, [component]) if isinstance(component, Mapping) else None
  return parts if isinstance(parts, list) else [component]


def _type(part: Any) -> Any:
  return part.get('type') if isinstance(part, Mapping) else None


def _begins_words(part: Any) -> bool:
  """Return True for a pre-tokenizer that puts sentencepiece's sign of a space before each word."""
  if _type(part) != 'Metaspace' or part.get('replacement', '\u2581') != '\u2581':
    return False
  # Files of older versions have `add_prefix_space` instead.
  default = 'always' if part.get('add_prefix_space', True) else 'never'
  return part.get('prepend_scheme', default) == 'always'


def _joins_spaces(part: Any) -> bool:
  """Return True for a normalizer that makes one space of several."""
  if _type(part) != 'Replace' or part.get('content') not in (' ', '\u2581'):
    return False
  return part.get('pattern') == {'Regex': ' {2,}'}


def _has_all_bytes(model: Mapping[str, Any]) -> bool:
  pieces = {entry[0] for entry in model['vocab'] if isinstance(entry, list) and entry}
  return all(f'<0x{byte:02X}>' in pieces for byte in range(256))


def _added_around_a_text(tokenizer: Mapping[str, Any]) -> list[str | None]:
  """Return the tokens that are added to a text; with None if the form of the file is not known."""
  processor = tokenizer.get('post_processor')
  if processor is None:
    return []
  if not isinstance(processor, Mapping) or processor.get('type') != 'TemplateProcessing':
    return [None]
  template = processor.get('single')
  if not isinstance(template, list):
    return [None]
  tokens: list[str | None] = []
  for part in template:
    special = part.get('SpecialToken') if isinstance(part, Mapping) else None
    if isinstance(special, Mapping):
      tokens.append(str(special.get('id')))
  return tokens


def sentencepiece_model(
  tokenizer: Mapping[str, Any], path: str, normalization: str | None = None
) -> bytes:
  """Return the sentencepiece model of a tokenizer of type 'Unigram', without the sentinels at its end.

  Args:
    tokenizer: contents of `tokenizer.json`.
    path: name of the file, for messages.
    normalization: table of texts if the file has none: 't5' or a rule of sentencepiece; None for the file's own
      behaviour, which is that white space separates words and other characters stay.

  Raises:
    ConfigError: the type of tokenizer is not supported.
    CheckpointError: a field is invalid.
  """
  check_model(tokenizer, path)
  unigram = tokenizer['model']
  if unigram.get('type') != 'Unigram':
    raise ConfigError(
      f"The tokenizer {path} must be of type 'Unigram', as in T5, got {untrusted.shorten(unigram.get('type'))}. Other "
      'types have no sentencepiece model.'
    )
  check_unigram(tokenizer, path)
  pieces = unigram['vocab']
  while (
    pieces and SENTINEL_PIECE.fullmatch(pieces[-1][0]) and not pieces[-1][0].startswith('\u2581')
  ):
    pieces = pieces[:-1]
  model = sentencepiece_modules()[1].ModelProto()
  unk_id = unigram.get('unk_id', 2)
  special = {token['id'] for token in tokenizer.get('added_tokens') or () if token.get('special')}
  for number, (piece, score) in enumerate(pieces):
    if number == unk_id:
      kind = _UNKNOWN
    elif SENTINEL_PIECE.fullmatch(piece):
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
    charsmap = normalization_lib.charsmap(normalization or normalization_lib.WHITE_SPACE)
  else:
    charsmap = _charsmap(tokenizer['normalizer'], path)
  model.normalizer_spec.precompiled_charsmap = charsmap
  model.normalizer_spec.add_dummy_prefix = True
  model.normalizer_spec.remove_extra_whitespaces = True
  model.normalizer_spec.escape_whitespaces = True
  return model.SerializeToString()


def _charsmap(normalizer: Mapping[str, Any], path: str) -> bytes:
  """Return sentencepiece's normalization table in a `normalizer` of `tokenizer.json`, empty without one."""
  parts = normalizers(normalizer, path)
  charsmap = b''
  for part in parts:
    if part.get('type') == 'Precompiled':
      charsmap = decode_charsmap(part.get('precompiled_charsmap'), path)
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
