"""Vocabularies without TensorFlow: the ids and texts of seqio's classes of the same names.

A vocabulary of seqio may be used wherever one of these may, and the other way round: the models read `vocab_size`,
`eos_id`, `pad_id` and `decode` only. `same_vocabulary` compares across the two families.
"""

import abc
import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

from t5x_lite.errors import ConfigError

PAD_ID = 0


class Vocabulary(abc.ABC):
  """Text to ids and back. Id 0 is padding; `extra_ids` sentinels stand at the end."""

  @property
  def pad_id(self) -> int:
    """The padding id."""
    return PAD_ID

  @property
  @abc.abstractmethod
  def eos_id(self) -> int | None:
    """The end-of-sequence id, None if there is none."""

  @property
  @abc.abstractmethod
  def unk_id(self) -> int | None:
    """The id of what cannot be expressed, None if there is none."""

  @property
  @abc.abstractmethod
  def extra_ids(self) -> int:
    """The number of sentinels."""

  @property
  @abc.abstractmethod
  def vocab_size(self) -> int:
    """The number of ids, padding and sentinels included."""

  @property
  @abc.abstractmethod
  def identity(self) -> tuple[Any, ...]:
    """What two equal vocabularies have in common; the first entry is the class name that seqio uses too."""

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without an end-of-sequence id."""

  @abc.abstractmethod
  def _decode(self, ids: list[int]) -> str:
    """Returns the text of `ids`, which end at the first end-of-sequence id."""

  def _num_decodable_ids(self) -> int:
    """Ids from here on become `unk_id` before decoding."""
    return self.vocab_size

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of `ids` up to and including the first end-of-sequence id."""
    clean = [int(i) for i in ids]
    if self.unk_id is not None:
      clean = [self.unk_id if i >= self._num_decodable_ids() else i for i in clean]
    if self.eos_id is not None and self.eos_id in clean:
      clean = clean[:clean.index(self.eos_id) + 1]
    return self._decode(clean)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Vocabulary) and self.identity == other.identity

  def __hash__(self) -> int:
    return hash(self.identity)

  def __repr__(self) -> str:
    name, *details = self.identity
    return f"{name}({', '.join(map(repr, details))})"


class ByteVocabulary(Vocabulary):
  """UTF-8 bytes, shifted by three special ids: ByT5's vocabulary (Xue et al., 2022).

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
    if extra_ids < 0:
      raise ConfigError(f'ByteVocabulary(extra_ids={extra_ids}): expected 0 or more.')
    self._extra_ids = extra_ids

  @property
  def eos_id(self) -> int:
    return 1

  @property
  def unk_id(self) -> int:
    return 2

  @property
  def extra_ids(self) -> int:
    return self._extra_ids

  @property
  def vocab_size(self) -> int:
    return self._num_decodable_ids() + self._extra_ids

  @property
  def identity(self) -> tuple[Any, ...]:
    return ('ByteVocabulary', self._extra_ids)

  def encode(self, text: str) -> list[int]:
    return [byte + self._NUM_SPECIAL_IDS for byte in text.encode('utf-8')]

  def _num_decodable_ids(self) -> int:
    return self._NUM_SPECIAL_IDS + self._NUM_BYTES

  def _decode(self, ids: list[int]) -> str:
    # Special ids leave no trace, and neither do bytes that are not UTF-8.
    kept = bytes(i - self._NUM_SPECIAL_IDS for i in ids if i >= self._NUM_SPECIAL_IDS)
    return kept.decode('utf-8', errors='ignore')


class PassThroughVocabulary(Vocabulary):
  """Ids that stand for themselves: for data that is already numbers."""

  def __init__(self, size: int, eos_id: int | None = None):
    """Make the vocabulary.

    Args:
      size: number of ids.
      eos_id: the end-of-sequence id, if any.
    """
    if size < 1:
      raise ConfigError(f'PassThroughVocabulary(size={size}): expected 1 or more.')
    self._size = size
    self._eos_id = eos_id

  @property
  def eos_id(self) -> int | None:
    return self._eos_id

  @property
  def unk_id(self) -> None:
    return None

  @property
  def extra_ids(self) -> int:
    return 0

  @property
  def vocab_size(self) -> int:
    return self._size

  @property
  def identity(self) -> tuple[Any, ...]:
    return ('PassThroughVocabulary', self._size, self._eos_id)

  def encode(self, text: Sequence[int]) -> Sequence[int]:  # type: ignore[override]
    """Returns `text`, which is ids already."""
    return text

  def _decode(self, ids: list[int]) -> list[int]:  # type: ignore[override]
    return ids


class SentencePieceVocabulary(Vocabulary):
  """A sentencepiece model with sentinels at its end, `<extra_id_0>` having the highest id (needs `sentencepiece`)."""

  def __init__(self, sentencepiece_model_file: str, extra_ids: int = 0, *, reverse_extra_ids: bool = True):
    """Make the vocabulary.

    Args:
      sentencepiece_model_file: path of the model on this machine; it is read at the first use.
      extra_ids: number of sentinels to add to the model's pieces.
      reverse_extra_ids: number the sentinels downwards from the end, as span corruption does.
    """
    self._file = sentencepiece_model_file
    self._extra_ids = extra_ids
    self._reverse_extra_ids = reverse_extra_ids
    self._loaded: tuple[Any, str] | None = None

  def __getstate__(self) -> dict[str, Any]:
    # Gin copies the values of bindings: keep the loaded processor out of the copies.
    return {**self.__dict__, '_loaded': None}

  def _load(self) -> tuple[Any, str]:
    """Returns (processor, hash of the model with its sentinels)."""
    if self._loaded is None:
      try:
        import sentencepiece
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
      except ImportError as error:
        raise ConfigError(
            f'SentencePieceVocabulary({self._file!r}) needs the packages sentencepiece and protobuf, but: {error}. '
            'Install them with `pip install sentencepiece protobuf`, or use ByteVocabulary, which needs neither.'
        ) from error
      try:
        with open(self._file, 'rb') as stream:
          model = sentencepiece_model_pb2.ModelProto.FromString(stream.read())
      except DecodeError as error:
        raise self._no_model(error) from error
      except OSError as error:
        raise ConfigError(f'Cannot read the sentencepiece model {self._file!r}: {error.strerror}. Copy the '
                          'model to a local file and name that: --gin.VOCABULARY_FILE=path/to/spiece.model. '
                          '`t5x_lite vocab` trains one.') from error
      numbers = range(self._extra_ids)
      for number in reversed(numbers) if self._reverse_extra_ids else numbers:
        piece_type = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
        model.pieces.add(piece=f'\u2581<extra_id_{number}>', score=0.0, type=piece_type)
      serialized = model.SerializeToString()
      processor = sentencepiece.SentencePieceProcessor()
      try:
        processor.LoadFromSerializedProto(serialized)
      except RuntimeError as error:
        raise self._no_model(error) from error
      self._loaded = processor, hashlib.sha256(serialized).hexdigest()
    return self._loaded

  def _no_model(self, error: Exception) -> ConfigError:
    reason = ' '.join(str(error).split())
    return ConfigError('SentencePieceVocabulary.sentencepiece_model_file must be a sentencepiece model such as '
                       f'spiece.model, got {self._file!r}, which cannot be read as one ({reason}). Copy the model '
                       'again, or train one with `t5x_lite vocab`.')

  @property
  def sentencepiece_model_file(self) -> str:
    """Path of the model."""
    return self._file

  @property
  def eos_id(self) -> int:
    return self._load()[0].eos_id()

  @property
  def unk_id(self) -> int:
    return self._load()[0].unk_id()

  @property
  def extra_ids(self) -> int:
    return self._extra_ids

  @property
  def vocab_size(self) -> int:
    return self._load()[0].GetPieceSize()

  @property
  def byte_ids(self) -> frozenset[int]:
    """The ids that stand for single bytes, of a model trained with byte_fallback; empty for another."""
    processor = self._load()[0]
    return frozenset(i for i in range(processor.GetPieceSize()) if processor.IsByte(i))

  @property
  def identity(self) -> tuple[Any, ...]:
    return ('SentencePieceVocabulary', self._file, self._extra_ids, self._reverse_extra_ids)

  def encode(self, text: str) -> list[int]:
    return self._load()[0].EncodeAsIds(text)

  def _decode(self, ids: list[int]) -> str:
    return self._load()[0].DecodeIds(ids)


def kind_of(vocabulary: Any) -> str:
  """Returns the name of a vocabulary's class, which ours and seqio's have in common, without importing seqio.

  A class of another package, which may have the same name and different ids, has that package in its name.

  >>> kind_of(ByteVocabulary()), kind_of(object())
  ('ByteVocabulary', 'builtins.object')
  """
  cls = type(vocabulary)
  is_known = cls.__module__.partition('.')[0] in ('t5x_lite', 'seqio')
  return cls.__name__ if is_known else f'{cls.__module__}.{cls.__qualname__}'


def _identity(vocabulary: Any) -> tuple[Any, ...]:
  """Returns the `identity` of a vocabulary of ours or of seqio."""
  if isinstance(vocabulary, Vocabulary):
    return vocabulary.identity
  name = kind_of(vocabulary)
  if name == 'ByteVocabulary':
    return (name, vocabulary.extra_ids)
  if name == 'PassThroughVocabulary':
    return (name, vocabulary.vocab_size, vocabulary.eos_id)
  if name == 'SentencePieceVocabulary':
    # seqio keeps the order of the sentinels to itself; it is part of the state that its own equality compares.
    reverse = vocabulary.__getstate__()['_reverse_extra_ids']
    return (name, vocabulary.sentencepiece_model_file, vocabulary.extra_ids, reverse)
  return (name, id(vocabulary))


def same_vocabulary(first: Any, second: Any) -> bool:
  """Returns whether two vocabularies, of seqio or of this package, give the same ids.

  Files are compared by where they lie, however their paths are written; copies in two places are not the same.

  >>> same_vocabulary(ByteVocabulary(125), ByteVocabulary(extra_ids=125))
  True
  """
  return first == second or _where(_identity(first)) == _where(_identity(second))


def _where(identity: tuple[Any, ...]) -> tuple[Any, ...]:
  """Returns `identity` with the path of a local file as the file system knows it."""
  name, *details = identity
  if name == 'SentencePieceVocabulary' and '://' not in os.fspath(details[0]):
    details[0] = os.path.realpath(details[0])
  return (name, *details)


def sentinel_id(vocabulary: Any) -> int:
  """Returns the id of `<extra_id_0>`, T5's first sentinel: the last id of `vocabulary`."""
  return vocabulary.vocab_size - 1
