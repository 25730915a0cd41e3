"""Texts to ids and ids to texts, with sentinels such as `<extra_id_0>`.

By T5's law, `<extra_id_N>` in a text is one id in all sources of texts: tasks, files, `infer` and `chat`.
"""

from collections.abc import Iterable
import functools
import re
from typing import Any

import numpy as np

from t5x_lite.data.text.added_tokens import AddedTokensVocabulary
from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.data.vocabularies import kind_of
from t5x_lite.data.vocabularies import sentinel_id
from t5x_lite.errors import DataError
from t5x_lite.formatting import short_repr

# Without leading zeros and other digits, which no vocabulary has in sentinels.
_SENTINEL_TEXT = re.compile(r'<extra_id_(0|[1-9][0-9]{0,8})>')


def num_sentinels(vocabulary: Any) -> int | None:
  """Return the number of ids from `sentinel_id` downwards that no text contains.

  Returns:
    The number; None if it is unknown: for vocabularies of ids, and of packages other than t5x_lite and seqio.
  """
  if isinstance(vocabulary, Vocabulary):
    return vocabulary.num_sentinels
  if kind_of(vocabulary) == 'ByteVocabulary':
    return vocabulary.extra_ids
  if kind_of(vocabulary) == 'SentencePieceVocabulary':
    return _ours(vocabulary.sentencepiece_model_file, vocabulary.extra_ids).num_sentinels
  return None


@functools.lru_cache(maxsize=4)
def _ours(path: str, extra_ids: int) -> SentencePieceVocabulary:
  """Return the vocabulary of t5x_lite with the ids of one of seqio."""
  return SentencePieceVocabulary(path, extra_ids)


def has_sentinel(value: Any) -> bool:
  """Return True if a value is a text with a sentinel such as `<extra_id_0>`, of any vocabulary."""
  return isinstance(value, str) and _SENTINEL_TEXT.search(value) is not None


def encode_with_sentinel(text: str, vocabulary: Any) -> list[int]:
  """Return the ids of `text`, with one id for each sentinel `<extra_id_0>`, `<extra_id_1>`... of the vocabulary.

  The texts between the sentinels are encoded separately.
  """
  ids = []
  start = 0
  for marker in _SENTINEL_TEXT.finditer(text):
    sentinel = sentinel_id(vocabulary) - int(marker[1])
    if int(marker[1]) < vocabulary.extra_ids or vocabulary.encode(marker[0]) == [sentinel]:
      ids += [*vocabulary.encode(text[start : marker.start()]), sentinel]
      start = marker.end()
  return ids + vocabulary.encode(text[start:])


def encode_text(text: Any, vocabulary: Any, *, literal_sentinels: bool = False) -> list[int]:
  """Return the ids of `text`, without an end-of-sequence id, with one id for each sentinel such as `<extra_id_0>`.

  A byte vocabulary alone would encode sentinels as bytes. A sentencepiece vocabulary finds them after a space only, and
  its pieces of sentinels include the space: a missing space changes no other id.

  Args:
    text: a text; or ids, for a vocabulary of ids.
    vocabulary: a vocabulary of t5x_lite, seqio or another package; the latter encode sentinels by themselves.
    literal_sentinels: encode `<extra_id_0>` like any other text, by bytes or pieces.
  """
  kind = kind_of(vocabulary)
  if _has_bytes(vocabulary):
    if literal_sentinels:
      return list(vocabulary.encode(text))
    return encode_with_sentinel(text, vocabulary)
  if has_sentinel(text):
    if literal_sentinels and isinstance(vocabulary, Vocabulary):
      return vocabulary.encode_literally(text)
    if literal_sentinels and kind == 'SentencePieceVocabulary':
      ours = _ours(vocabulary.sentencepiece_model_file, vocabulary.extra_ids)
      return ours.encode_literally(text)
    if spaces_sentinels(vocabulary):
      text = _with_spaces(text, vocabulary)
  return list(vocabulary.encode(text))


def spaces_sentinels(vocabulary: Any) -> bool:
  """Return True if `encode_text` adds spaces before sentinels that the vocabulary would not find."""
  if _has_bytes(vocabulary):
    return False
  return kind_of(vocabulary) in ('SentencePieceVocabulary', 'AddedTokensVocabulary')


def earlier_vocabulary(vocabulary: Any) -> Any:
  """Return a vocabulary with the ids of earlier versions, which did not find added tokens in texts."""
  if isinstance(vocabulary, AddedTokensVocabulary):
    return vocabulary.base
  return vocabulary


def _has_bytes(vocabulary: Any) -> bool:
  """Return True for a vocabulary of bytes, of t5x_lite or seqio, also with added tokens."""
  if isinstance(vocabulary, AddedTokensVocabulary):
    return _has_bytes(vocabulary.base)
  return kind_of(vocabulary) == 'ByteVocabulary'


def _with_spaces(text: str, vocabulary: Any) -> str:
  """Return `text` with a space before each sentinel that the vocabulary would not find."""

  def separate(marker: re.Match[str]) -> str:
    before = text[: marker.start()][-1:]
    separated = f' {marker[0]}'
    if vocabulary.encode(f'{before}{marker[0]}')[-1:] == vocabulary.encode(separated)[-1:]:
      return marker[0]
    return separated

  return _SENTINEL_TEXT.sub(separate, text)


def decode_ids(ids: Iterable[int], vocabulary: Any) -> Any:
  """Return the text of `ids` up to the first end-of-sequence id, with sentinels such as `<extra_id_0>`.

  This is the inverse of `encode_text`: a byte vocabulary alone would drop sentinels. A vocabulary of ids returns ids.
  """
  ids = [int(i) for i in ids]
  if not _has_bytes(vocabulary):
    return vocabulary.decode(ids)
  if vocabulary.eos_id in ids:
    ids = ids[: ids.index(vocabulary.eos_id)]
  first = sentinel_id(vocabulary)
  parts = []
  start = 0
  for index, i in enumerate(ids):
    if first - vocabulary.extra_ids < i <= first:
      parts += [vocabulary.decode(ids[start:index]), f'<extra_id_{first - i}>']
      start = index + 1
  return ''.join([*parts, vocabulary.decode(ids[start:])])


def as_ids(
  value: Any, vocabulary: Any, what: str, *, literal_sentinels: bool = False
) -> np.ndarray:
  """Return the ids of a text, without an end-of-sequence id, or ids unchanged, as int32[n].

  Args:
    value: a text, its UTF-8 bytes, or a sequence of ids.
    vocabulary: encodes the text, and has the largest id.
    what: name of the value, for the error message.
    literal_sentinels: see `encode_text`.

  Raises:
    DataError: the value is neither, an id is outside of the vocabulary, or the vocabulary encodes no texts.
  """
  ids = np.asarray(None)
  got = f'{short_repr(value)} of type {type(value).__name__}'
  try:
    if isinstance(value, bytes):
      value = value.decode('utf-8')
    if isinstance(value, str):
      value = encode_text(value, vocabulary, literal_sentinels=literal_sentinels)
    ids = np.asarray(value)
  except UnicodeError as error:  # not UTF-8, or half of a surrogate pair
    got = str(error)
  except (TypeError, ValueError):  # lists of unequal lengths
    pass
  is_ids = ids.ndim == 1 and (not ids.size or ids.dtype.kind in 'iu')
  if is_ids and ids.size:
    outside = ids[(ids < 0) | (ids >= vocabulary.vocab_size)]
    if len(outside):
      is_ids = False
      got = str(outside[0])
  if not is_ids:
    expected = 'a flat list of ids'
    if kind_of(vocabulary) != 'PassThroughVocabulary':
      expected = f'a text or {expected}'
    raise DataError(
      f'{what} must be {expected} from 0 to '
      f'{vocabulary.vocab_size - 1}, those of the vocabulary {vocabulary!r}, got '
      f'{got}. Correct it, or convert it in a preprocessor.'
    )
  return ids.astype(np.int32)
