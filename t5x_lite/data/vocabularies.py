"""Vocabularies without TensorFlow, with the ids and texts of seqio's classes of the same names.

Models accept vocabularies of both packages: they use only `vocab_size`, `eos_id`, `pad_id` and `decode`.
`same_vocabulary` compares vocabularies of both packages.
"""

import abc
from collections.abc import Iterable, Sequence
import functools
import hashlib
import os
from typing import Any

from t5x_lite import checks
from t5x_lite.data.text import tokenizer_json
from t5x_lite.data.text.packages import sentencepiece_modules
from t5x_lite.errors import ConfigError, InvalidFileError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

# Largest number of sentinels, which take 3 seconds to add.
MAX_EXTRA_IDS = 2**17
# Largest sentencepiece model; that of 256,000 pieces has 4 MB.
MAX_MODEL_BYTES = 2**28

PAD_ID = 0
SENTINEL_PIECE = tokenizer_json.SENTINEL_PIECE


def required_eos_id(vocabulary: Any) -> int:
  """Return the end-of-sequence id of a vocabulary of either package.

  Raises:
    ConfigError: the vocabulary has none.
  """
  if vocabulary.eos_id is None:
    raise ConfigError(
      f'The vocabulary must have an end-of-sequence id, got {vocabulary!r}. Set its eos_id.'
    )
  return vocabulary.eos_id


class Vocabulary(abc.ABC):
  """Mapping between texts and ids. Id 0 is padding; the last `extra_ids` ids are sentinels."""

  @property
  def pad_id(self) -> int:
    """The padding id."""
    return PAD_ID

  @property
  @abc.abstractmethod
  def eos_id(self) -> int | None:
    """The end-of-sequence id, or None."""

  @property
  @abc.abstractmethod
  def unk_id(self) -> int | None:
    """The id of unknown text, or None."""

  @property
  @abc.abstractmethod
  def extra_ids(self) -> int:
    """The number of sentinels."""

  @property
  @abc.abstractmethod
  def vocab_size(self) -> int:
    """The number of ids, with padding and sentinels."""

  @property
  @abc.abstractmethod
  def identity(self) -> tuple[Any, ...]:
    """Values that are equal for equal vocabularies; the first is the class name, which is the same in seqio."""

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Return the ids of `text`, without an end-of-sequence id."""

  @abc.abstractmethod
  def _decode(self, ids: list[int]) -> str:
    """Return the text of `ids`, which end at the first end-of-sequence id."""

  @property
  def sentinel_id(self) -> int:
    """The id of `<extra_id_0>`, T5's first sentinel; the next sentinels have the ids below."""
    return self.vocab_size - 1

  @property
  def num_sentinels(self) -> int | None:
    """The number of ids from `sentinel_id` downwards that no text contains; None if it is unknown."""
    return self.extra_ids

  def encode_literally(self, text: str) -> list[int]:
    """Return the ids of `text`, in which `<extra_id_0>` is ordinary text."""
    return self.encode(text)

  def _num_decodable_ids(self) -> int:
    """Return the number of ids that can be decoded; larger and negative ids become `unk_id`."""
    return self.vocab_size

  def decode(self, ids: Iterable[int]) -> str:
    """Return the text of `ids` up to and including the first end-of-sequence id."""
    clean = [int(i) for i in ids]
    if self.unk_id is not None:
      clean = [i if 0 <= i < self._num_decodable_ids() else self.unk_id for i in clean]
    if self.eos_id is not None and self.eos_id in clean:
      clean = clean[: clean.index(self.eos_id) + 1]
    return self._decode(clean)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Vocabulary) and self.identity == other.identity

  def __hash__(self) -> int:
    return hash(self.identity)

  def __repr__(self) -> str:
    return _call_text(self.identity)


def _check_extra_ids(owner: str, extra_ids: int) -> None:
  """Raise ConfigError if a vocabulary would have more sentinels than can be made in seconds."""
  checks.check(owner, {'extra_ids': extra_ids}, extra_ids=checks.number(at_most=MAX_EXTRA_IDS))


class ByteVocabulary(Vocabulary):
  """ByT5's vocabulary of UTF-8 bytes after three special ids (Xue et al., 2022, https://arxiv.org/abs/2105.13626).

  >>> vocabulary = ByteVocabulary(extra_ids=125)
  >>> vocabulary.vocab_size, vocabulary.encode('hé'), vocabulary.decode([107, 198, 172, 1, 107])
  (384, [107, 198, 172], 'hé')
  """

  _NUM_SPECIAL_IDS = 3
  _NUM_BYTES = 256

  def __init__(self, extra_ids: int = 0):
    """Make the vocabulary.

    Args:
      extra_ids: number of sentinels after the bytes; ByT5 has 125.
    """
    checks.check(
      'ByteVocabulary', {'extra_ids': extra_ids}, extra_ids=checks.number(at_least=0, integer=True)
    )
    _check_extra_ids('ByteVocabulary', extra_ids)
    self._extra_ids = extra_ids

  @property
  def eos_id(self) -> int:
    """See base class."""
    return 1

  @property
  def unk_id(self) -> int:
    """See base class."""
    return 2

  @property
  def extra_ids(self) -> int:
    """See base class."""
    return self._extra_ids

  @property
  def vocab_size(self) -> int:
    """See base class."""
    return self._num_decodable_ids() + self._extra_ids

  @property
  def identity(self) -> tuple[Any, ...]:
    """See base class."""
    return ('ByteVocabulary', self._extra_ids)

  def encode(self, text: str) -> list[int]:
    """See base class."""
    return [byte + self._NUM_SPECIAL_IDS for byte in text.encode('utf-8')]

  def _num_decodable_ids(self) -> int:
    return self._NUM_SPECIAL_IDS + self._NUM_BYTES

  def _decode(self, ids: list[int]) -> str:
    # Drop special ids, and bytes that are not UTF-8.
    kept = bytes(i - self._NUM_SPECIAL_IDS for i in ids if i >= self._NUM_SPECIAL_IDS)
    return kept.decode('utf-8', errors='ignore')


class PassThroughVocabulary(Vocabulary):
  """Vocabulary that returns ids unchanged, for data of ids."""

  def __init__(self, size: int, eos_id: int | None = None):
    """Make the vocabulary.

    Args:
      size: number of ids.
      eos_id: the end-of-sequence id, if any.
    """
    checks.check(
      'PassThroughVocabulary', {'size': size}, size=checks.number(at_least=1, integer=True)
    )
    checks.check(
      'PassThroughVocabulary',
      {'eos_id': eos_id},
      eos_id=checks.number(
        above=PAD_ID, below=size, integer=True, remedy='Id 0 is padding.'
      ).or_none(),
    )
    self._size = size
    self._eos_id = eos_id

  @property
  def eos_id(self) -> int | None:
    """See base class."""
    return self._eos_id

  @property
  def unk_id(self) -> None:
    """See base class."""
    return None

  @property
  def extra_ids(self) -> int:
    """See base class."""
    return 0

  @property
  def num_sentinels(self) -> None:
    """See base class; the ids may include sentinels."""
    return None

  @property
  def vocab_size(self) -> int:
    """See base class."""
    return self._size

  @property
  def identity(self) -> tuple[Any, ...]:
    """See base class."""
    return ('PassThroughVocabulary', self._size, self._eos_id)

  def encode(self, text: Sequence[int]) -> Sequence[int]:  # type: ignore[override]
    """Return `text`, a sequence of ids."""
    return text

  def _decode(self, ids: list[int]) -> list[int]:  # type: ignore[override]
    return ids


def read_model_file(path: str) -> bytes:
  """Return a sentencepiece model.

  Args:
    path: path of the model; or of a `tokenizer.json` of type Unigram, of which it is made.

  Raises:
    InvalidFileError: it is not a regular file, or too large.
    OSError: it cannot be read.
    CheckpointError: a field of the `tokenizer.json` is damaged.
  """
  if not path.endswith('.json'):
    return untrusted.read_regular(files.path(path), MAX_MODEL_BYTES)
  return _sentencepiece_model(untrusted.read_regular(files.path(path)), path)


# A run makes equal vocabularies, of its model and of each task.
@functools.lru_cache(maxsize=1)
def _sentencepiece_model(content: bytes, path: str) -> bytes:
  return tokenizer_json.sentencepiece_model(untrusted.parse_object(content, path), path)


class SentencePieceVocabulary(Vocabulary):
  """Vocabulary of a sentencepiece model with sentinels as last ids, `<extra_id_0>` the very last.

  The model must have T5's special ids: id 0 is padding, so no text may contain it, and there is an end of sequence.
  """

  def __init__(
    self, sentencepiece_model_file: str, extra_ids: int = 0, *, reverse_extra_ids: bool = True
  ):
    """Make the vocabulary.

    Args:
      sentencepiece_model_file: path of the model; it is read at the first use.
      extra_ids: number of sentinels to add to the model's pieces.
      reverse_extra_ids: number the sentinels downwards from the end, as span corruption does.
    """
    _check_extra_ids('SentencePieceVocabulary', extra_ids)
    self._file = sentencepiece_model_file
    self._extra_ids = extra_ids
    self._reverse_extra_ids = reverse_extra_ids
    self._loaded: tuple[Any, str] | None = None
    self._literal: Any = None

  def __getstate__(self) -> dict[str, Any]:
    # gin copies the values of bindings; the copies must not hold the loaded processors.
    return {**self.__dict__, '_loaded': None, '_literal': None}

  def _load(self) -> tuple[Any, str]:
    """Return (processor, hash of the model with its sentinels)."""
    if self._loaded is None:
      sentencepiece, model_pb2, decode_error = sentencepiece_modules()
      processor = sentencepiece.SentencePieceProcessor()
      try:
        model = model_pb2.ModelProto.FromString(read_model_file(self._file))
        numbers = list(range(self._extra_ids))
        if self._reverse_extra_ids:
          numbers.reverse()
        for number in numbers:
          piece_type = model_pb2.ModelProto.SentencePiece.USER_DEFINED
          model.pieces.add(piece=f'\u2581<extra_id_{number}>', score=0.0, type=piece_type)
        serialized = model.SerializeToString()
        processor.LoadFromSerializedProto(serialized)
      except (
        OSError,
        RuntimeError,
        ConfigError,
        InvalidFileError,
        decode_error,
      ) as error:  # ConfigError: the store's.
        if isinstance(error, OSError):
          reason = error.strerror
        else:
          reason = ' '.join(str(error).split())
        raise checks.invalid(
          'SentencePieceVocabulary',
          'sentencepiece_model_file',
          f'a readable sentencepiece model ({reason})',
          self._file,
          'Set --gin.VOCABULARY_FILE to a local copy, or train a model with `t5x_lite vocab`.',
        ) from error
      check_special_ids('SentencePieceVocabulary', processor, self._file)
      self._loaded = processor, hashlib.sha256(serialized).hexdigest()
    return self._loaded

  @property
  def processor(self) -> Any:
    """The `SentencePieceProcessor` of the model with its sentinels."""
    return self._load()[0]

  @property
  def sentencepiece_model_file(self) -> str:
    """Path of the model."""
    return self._file

  @property
  def eos_id(self) -> int:
    """See base class."""
    return self._load()[0].eos_id()

  @property
  def unk_id(self) -> int:
    """See base class."""
    return self._load()[0].unk_id()

  @property
  def extra_ids(self) -> int:
    """See base class."""
    return self._extra_ids

  @property
  def vocab_size(self) -> int:
    """See base class."""
    return self._load()[0].GetPieceSize()

  @property
  def num_sentinels(self) -> int:
    """See base class; pieces that the model reserves count too, as in models whose file has the sentinels."""
    processor = self._load()[0]
    number = 0
    for i in reversed(range(processor.GetPieceSize())):
      is_reserved = processor.IsControl(i) or processor.IsUnused(i)
      if not is_reserved and not SENTINEL_PIECE.fullmatch(processor.IdToPiece(i)):
        break
      number += 1
    return number

  @property
  def byte_ids(self) -> frozenset[int]:
    """Ids of single bytes, if the model was trained with byte_fallback."""
    processor = self._load()[0]
    return frozenset(i for i in range(processor.GetPieceSize()) if processor.IsByte(i))

  @property
  def identity(self) -> tuple[Any, ...]:
    """See base class."""
    return ('SentencePieceVocabulary', self._file, self._extra_ids, self._reverse_extra_ids)

  def encode(self, text: str) -> list[int]:
    """See base class."""
    return self._load()[0].EncodeAsIds(text)

  def encode_literally(self, text: str) -> list[int]:
    """See base class."""
    if self._literal is None:
      sentencepiece, model_pb2, _ = sentencepiece_modules()
      model = model_pb2.ModelProto.FromString(self._load()[0].serialized_model_proto())
      for piece in model.pieces:
        if SENTINEL_PIECE.fullmatch(piece.piece):
          piece.type = model_pb2.ModelProto.SentencePiece.UNUSED
      self._literal = sentencepiece.SentencePieceProcessor()
      self._literal.LoadFromSerializedProto(model.SerializeToString())
    return self._literal.EncodeAsIds(text)

  def _decode(self, ids: list[int]) -> str:
    return self._load()[0].DecodeIds(ids)


def check_special_ids(owner: str, processor: Any, path: str) -> None:
  """Raise if a sentencepiece model lacks an id that is only padding, or an end of sequence.

  Unknown text is never id 0 if all bytes have pieces (byte_fallback).

  Args:
    owner: class of the vocabulary, for the message.
    processor: the `SentencePieceProcessor`.
    path: path of the model, for the message.

  Raises:
    ConfigError: the message has the special ids.
  """
  has_bytes = any(processor.IsByte(i) for i in range(processor.GetPieceSize()))
  is_padding = (
    processor.IsControl(PAD_ID)
    or processor.IsUnused(PAD_ID)
    or (processor.IsUnknown(PAD_ID) and has_bytes)
  )
  if is_padding and processor.eos_id() > PAD_ID:
    return
  raise checks.invalid(
    owner,
    'sentencepiece_model_file',
    "a model with T5's special ids: id 0 is padding, not text, and eos_id >= 1",
    f'{path} with pad_id = {processor.pad_id()}, eos_id = {processor.eos_id()}, '
    f'unk_id = {processor.unk_id()}, id 0 = {processor.IdToPiece(PAD_ID)}',
    'Train a model with `t5x_lite vocab`, or with pad_id=0, eos_id=1, unk_id=2, bos_id=-1 of sentencepiece.',
  )


def check_ids(name: str, vocabulary: Any) -> None:
  """Raise if the special ids of a vocabulary of any package collide with padding or are not among its ids.

  Args:
    name: name of the option.
    vocabulary: the vocabulary; only the attributes that it has are checked.

  Raises:
    ConfigError: the message has the ids.
  """
  # First, since its message has all special ids.
  is_seqio = not isinstance(vocabulary, Vocabulary)
  if is_seqio and kind_of(vocabulary) == 'SentencePieceVocabulary':
    check_special_ids(name, vocabulary.tokenizer, vocabulary.sentencepiece_model_file)
  eos_id = getattr(vocabulary, 'eos_id', None)
  size = getattr(vocabulary, 'vocab_size', None)
  if eos_id is not None and size is not None and not PAD_ID < eos_id < size:
    raise checks.invalid(
      name,
      'eos_id',
      f'None or an id from 1 to {size - 1}; id 0 is padding',
      eos_id,
      "Use a vocabulary with T5's ids.",
    )


def kind_of(vocabulary: Any) -> str:
  """Return the name of a vocabulary's class, which is the same in t5x_lite and seqio, without importing seqio.

  For classes of other packages, the name includes the module.

  >>> kind_of(ByteVocabulary()), kind_of(object())
  ('ByteVocabulary', 'builtins.object')
  """
  cls = type(vocabulary)
  is_known = cls.__module__.partition('.')[0] in ('t5x_lite', 'seqio')
  if is_known:
    return cls.__name__
  return f'{cls.__module__}.{cls.__qualname__}'


def _identity(vocabulary: Any) -> tuple[Any, ...]:
  """Return the `identity` of a vocabulary of t5x_lite or seqio."""
  if isinstance(vocabulary, Vocabulary):
    return vocabulary.identity
  name = kind_of(vocabulary)
  if name == 'ByteVocabulary':
    return (name, vocabulary.extra_ids)
  if name == 'PassThroughVocabulary':
    return (name, vocabulary.vocab_size, vocabulary.eos_id)
  if name == 'SentencePieceVocabulary':
    # seqio has no public attribute for the order of the sentinels; its own equality compares this state.
    reverse = vocabulary.__getstate__()['_reverse_extra_ids']
    return (name, vocabulary.sentencepiece_model_file, vocabulary.extra_ids, reverse)
  return (name, id(vocabulary))


def _call_text(identity: tuple[Any, ...]) -> str:
  name, *details = identity
  return f'{name}({", ".join(map(repr, details))})'


def describe(vocabulary: Any) -> str:
  """Return class and arguments of a vocabulary without reading its file, as `str` of seqio's does.

  >>> describe(ByteVocabulary(5))
  'ByteVocabulary(5)'
  """
  identity = _identity(vocabulary)
  if identity[1:] == (id(vocabulary),):
    return repr(vocabulary)
  return _call_text(identity)


def same_vocabulary(first: Any, second: Any) -> bool:
  """Return True if two vocabularies, of seqio or t5x_lite, give the same ids.

  Local files are compared by their real paths; two copies of a file are different.

  >>> same_vocabulary(ByteVocabulary(125), ByteVocabulary(extra_ids=125))
  True
  """
  return first == second or _with_real_path(_identity(first)) == _with_real_path(_identity(second))


def _with_real_path(identity: tuple[Any, ...]) -> tuple[Any, ...]:
  """Return `identity` with the real path of a local file."""
  name, *details = identity
  if name == 'AddedTokensVocabulary':
    base, tokens = details
    return (name, _with_real_path(base), tokens)
  if name == 'SentencePieceVocabulary' and not files.is_remote(details[0]):
    details[0] = os.path.realpath(details[0])
  return (name, *details)


def sentinel_id(vocabulary: Any) -> int:
  """Return the id of `<extra_id_0>`, T5's first sentinel: the last id of `vocabulary`, without added tokens."""
  if isinstance(vocabulary, Vocabulary):
    return vocabulary.sentinel_id
  return vocabulary.vocab_size - 1


def round_vocab_size_to_multiple(vocabulary: Any, divisor: int = 128) -> int:
  """Return the smallest multiple of `divisor` that is at least the vocabulary's size.

  >>> round_vocab_size_to_multiple(ByteVocabulary(extra_ids=0))
  384
  """
  checks.check(
    'round_vocab_size_to_multiple',
    {'divisor': divisor},
    divisor=checks.number(at_least=1, integer=True),
  )
  return -(-vocabulary.vocab_size // divisor) * divisor
