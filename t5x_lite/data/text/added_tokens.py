"""Vocabularies with tokens that were added to a tokenizer of Hugging Face, with the ids of transformers.

Added tokens are found in a text before it is encoded; the texts between them are encoded separately, so that each
begins a new word.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import re
from typing import Any

from t5x_lite.data.text.packages import sentencepiece_modules
from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.data.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddedToken:
  """A token of Hugging Face's tokenizers; the attributes have their names and meanings.

  Attributes:
    id: its id.
    content: its text.
    lstrip: whether it includes the white space before it.
    rstrip: whether it includes the white space after it.
    single_word: whether it is not found within a word.
    normalized: whether it is found in the normalized text instead of the text itself.
  """

  id: int
  content: str
  lstrip: bool = False
  rstrip: bool = False
  single_word: bool = False
  normalized: bool = False


class AddedTokensVocabulary(Vocabulary):
  """A vocabulary with further tokens, whose ids follow its own or replace some of them."""

  def __init__(self, base: Vocabulary, tokens: Sequence[AddedToken]):
    """Make the vocabulary.

    Args:
      base: vocabulary of all other texts, a `SentencePieceVocabulary` or a `ByteVocabulary`.
      tokens: the added tokens.
    """
    self.base = base
    self.tokens = tuple(tokens)
    self._by_id = {token.id: token for token in tokens}
    self._plain: _Finder | None = None
    self._normalized: _Finder | None = None
    self._normalize: Callable[[str], str] | None = None

  def __getstate__(self) -> dict[str, Any]:
    # As in the base class: copies must not hold loaded objects.
    return {**self.__dict__, '_plain': None, '_normalized': None, '_normalize': None}

  @property
  def eos_id(self) -> int | None:
    """See base class."""
    return self.base.eos_id

  @property
  def unk_id(self) -> int | None:
    """See base class."""
    return self.base.unk_id

  @property
  def extra_ids(self) -> int:
    """See base class."""
    return self.base.extra_ids

  @property
  def sentinel_id(self) -> int:
    """See base class."""
    return self.base.sentinel_id

  @property
  def num_sentinels(self) -> int | None:
    """See base class."""
    return self.base.num_sentinels

  @property
  def vocab_size(self) -> int:
    """See base class; the ids of tokens may leave gaps, which are unknown text."""
    return max(self.base.vocab_size, *(token.id + 1 for token in self.tokens), 0)

  @property
  def identity(self) -> tuple[Any, ...]:
    """See base class."""
    return (
      'AddedTokensVocabulary',
      self.base.identity,
      tuple(dataclasses.astuple(token) for token in self.tokens),
    )

  def encode(self, text: str) -> list[int]:
    """See base class."""
    return self._encode(text, self.base.encode)

  def encode_literally(self, text: str) -> list[int]:
    """See base class."""
    return self._encode(text, self.base.encode_literally)

  def _encode(self, text: str, encode_fn: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of `text`, whose parts between added tokens `encode_fn` encodes."""
    if self._plain is None or self._normalized is None or self._normalize is None:
      self._normalize = self._normalizer()
      self._plain = _Finder([(t.content, t) for t in self.tokens if not t.normalized])
      self._normalized = _Finder(
        [(self._normalize(t.content), t) for t in self.tokens if t.normalized]
      )
    ids: list[int] = []
    for part in self._plain.split(text):
      if isinstance(part, int):
        ids.append(part)
        continue
      for inner in self._normalized.split(self._normalize(part)):
        if isinstance(inner, int):
          ids.append(inner)
        else:
          ids += encode_fn(inner)
    return ids

  def _normalizer(self) -> Callable[[str], str]:
    """Return the normalization of texts before normalized tokens are found; white space is kept."""
    if not isinstance(self.base, SentencePieceVocabulary):
      return str
    if not any(token.normalized for token in self.tokens):
      return str
    sentencepiece, model_pb2, _ = sentencepiece_modules()
    model = model_pb2.ModelProto.FromString(self.base.processor.serialized_model_proto())
    if not model.normalizer_spec.precompiled_charsmap:
      return str
    normalizer = sentencepiece.SentencePieceNormalizer(
      model_proto=model.SerializeToString(),
      add_dummy_prefix=False,
      escape_whitespaces=False,
      remove_extra_whitespaces=False,
    )
    return normalizer.normalize

  def _decode(self, ids: list[int]) -> str:
    parts: list[str] = []
    run: list[int] = []
    for i in [*ids, None]:
      token = self._by_id.get(i) if i is not None else None
      if i is not None and token is None:
        run.append(self._known(i))
        continue
      if run:
        parts.append(self._decode_run(run, is_first=not parts))
        run = []
      if token is not None:
        parts.append(token.content)
    return ''.join(parts)

  def _known(self, i: int) -> int:
    """Return `i`, or the unknown id for a gap between the ids."""
    if i < self.base.vocab_size or self.unk_id is None:
      return i
    return self.unk_id

  def _decode_run(self, ids: list[int], *, is_first: bool) -> str:
    """Return the text of ids of the base vocabulary, with the space of a word after an added token."""
    text = self.base.decode(ids)
    if is_first or not isinstance(self.base, SentencePieceVocabulary):
      return text
    processor = self.base.processor
    visible = [i for i in ids if not processor.IsControl(i)]
    if visible and processor.IdToPiece(visible[0]).startswith('\u2581'):
      return f' {text}'
    return text


class _Finder:
  """Finds added tokens in texts like Hugging Face's tokenizers: the leftmost, and of these the longest."""

  def __init__(self, tokens: Sequence[tuple[str, AddedToken]]):
    """Args:
    tokens: text to find, and token.
    """
    self._tokens = dict(reversed(tokens))
    contents = sorted(self._tokens, key=len, reverse=True)
    self._pattern = re.compile('|'.join(map(re.escape, contents)) or '(?!)')

  def split(self, text: str) -> Iterator[str | int]:
    """Yield the non-empty texts between tokens, and the ids of tokens, in order."""
    end = 0
    for match in self._pattern.finditer(text):
      token = self._tokens[match[0]]
      start, stop = match.span()
      neighbors = text[max(start - 1, 0) : start], text[stop : stop + 1]
      if token.single_word and any(map(_is_of_word, neighbors)):
        continue
      if token.lstrip:
        start = end + len(text[end:start].rstrip())
      if token.rstrip:
        stop = len(text) - len(text[stop:].lstrip())
      if end < start:
        yield text[end:start]
      yield token.id
      end = stop
    if end < len(text):
      yield text[end:]


def _is_of_word(character: str) -> bool:
  return re.fullmatch(r'\w', character) is not None
