"""Validation of a `tokenizer.json` of Hugging Face before it is used: an error has the file and the field."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from t5x_lite.errors import CheckpointError
from t5x_lite.storage import untrusted

# Ids are below this number.
MAX_IDS = 2**24
# Of the size at the start of a table of normalization.
_SIZE_BYTES = 4
# float32, as in sentencepiece.
_MAX_SCORE = 3e38


def _error(path: str, problem: str) -> CheckpointError:
  return CheckpointError(f'In {path}, {problem}. Copy the file again.')


def check_model(tokenizer: Mapping[str, Any], path: str) -> None:
  """Raise CheckpointError if `model` is not an object with a type."""
  model = tokenizer.get('model')
  if not isinstance(model, Mapping):
    raise _error(path, f'`model` must be an object, got {untrusted.shorten(model)}')
  if not isinstance(model.get('type'), str):
    raise _error(path, f'`model.type` must be a name, got {untrusted.shorten(model.get("type"))}')


def check_unigram(tokenizer: Mapping[str, Any], path: str) -> None:
  """Raise if a field of a tokenizer of type 'Unigram' is invalid.

  Args:
    tokenizer: contents of the file, after `check_model`.
    path: name of the file, for the message.

  Raises:
    CheckpointError: the first invalid field.
  """
  problem = _problem_of_unigram(tokenizer['model']) or _problem_of_added(
    tokenizer.get('added_tokens')
  )
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
