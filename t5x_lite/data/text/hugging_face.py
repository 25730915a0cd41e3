"""Vocabularies of Hugging Face's tokenizers that sentencepiece does not compute, by the library tokenizers.

The tokenizer is a `tokenizer.json` of any type, or the byte-level BPE of `vocab.json` and `merges.txt`.
"""

from collections.abc import Container, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
from typing import Any

from t5x_lite.data.text.added_tokens import AddedToken
from t5x_lite.data.text.packages import tokenizers_module
from t5x_lite.data.text.tokenizer_json import SENTINEL_PIECE
from t5x_lite.data.vocabularies import PAD_ID
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.errors import CheckpointError, ConfigError

# Classes of transformers with byte-level BPE, and whether they put special tokens around a text.
BYTE_LEVEL_CLASSES = {'Roberta': True, 'Bart': True, 'GPT2': False, 'CodeGen': False}
# Around the id of a token that no text may have: Unicode has no character of this code.
_NO_CHARACTER = '\ufdd0'
# Fields that a written file may lack.
_TOKEN_DEFAULTS = dataclasses.asdict(AddedToken(id=0, content='')) | {'special': False}


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
  """Special tokens in the files of a tokenizer.

  Attributes:
    pad: the padding token, or None.
    eos: the end token.
    unk: the token of unknown text, or None.
    bos: the token at the beginning, or None.
    controls: all tokens that `decode` leaves out.
  """

  pad: str | None
  eos: str
  unk: str | None
  bos: str | None
  controls: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Loaded:
  """The tokenizer as it was loaded: `encoder` and `literal` encode, `decoder` decodes; `ids` by token.

  The other fields: the ids that `decode` leaves out, the number of ids, and the type of tokenizer, for people.
  """

  encoder: Any
  literal: Any
  decoder: Any
  ids: dict[str, int]
  control_ids: frozenset[int]
  vocab_size: int
  kind: str


class HuggingFaceVocabulary(Vocabulary):
  """Vocabulary of a tokenizer of Hugging Face, with the ids of transformers' `AutoTokenizer`.

  A text has the tokens that the tokenizer puts before it, such as `<s>`, and not the end token. The padding and the end
  token are not found in texts, so that no text ends early.
  """

  def __init__(self, path: str, tokenizer: str, special: SpecialTokens):
    """Make the vocabulary; `tokenizer_folders.hugging_face_vocabulary` does it from a folder.

    Args:
      path: the file of the tokenizer, for messages.
      tokenizer: contents of `tokenizer.json`.
      special: the special tokens.

    Raises:
      ConfigError: the package tokenizers is not installed, a special token is not among the tokens, or a text may
        have id 0, which is padding in batches.
      CheckpointError: the tokenizer is damaged.
    """
    self._path = path
    self._tokenizer = tokenizer
    self._special = special
    self._loaded: _Loaded | None = None
    self._load()

  def __getstate__(self) -> dict[str, Any]:
    # As in the base class: copies must not hold loaded objects.
    return {**self.__dict__, '_loaded': None}

  def _load(self) -> _Loaded:
    if self._loaded is None:
      self._loaded = _load(self._path, self._tokenizer, self._special)
    return self._loaded

  @property
  def eos_id(self) -> int:
    """See base class."""
    return self._load().ids[self._special.eos]

  @property
  def unk_id(self) -> int | None:
    """See base class."""
    return self._load().ids.get(self._special.unk or '')

  @property
  def extra_ids(self) -> int:
    """See base class; sentinels that the tokenizer has, with ids downwards from that of `<extra_id_0>`."""
    ids = self._load().ids
    first = ids.get('<extra_id_0>', -1)
    number = 0
    while first >= 0 and ids.get(f'<extra_id_{number}>') == first - number:
      number += 1
    return number

  @property
  def sentinel_id(self) -> int:
    """See base class."""
    return self._load().ids.get('<extra_id_0>', self.vocab_size - 1)

  @property
  def vocab_size(self) -> int:
    """See base class; the ids may have gaps."""
    return self._load().vocab_size

  @property
  def identity(self) -> tuple[Any, ...]:
    """See base class; the same for equal files in different places."""
    content = hashlib.sha256(self._tokenizer.encode()).hexdigest()
    return ('HuggingFaceVocabulary', content, dataclasses.astuple(self._special))

  @property
  def contents(self) -> str:
    """Contents of `tokenizer.json`."""
    return self._tokenizer

  @property
  def path(self) -> str:
    """The file of the tokenizer."""
    return self._path

  @property
  def kind(self) -> str:
    """The type of tokenizer, for people."""
    return self._load().kind

  def encode(self, text: str) -> list[int]:
    """See base class."""
    return self._encode(self._load().encoder, text)

  def encode_literally(self, text: str) -> list[int]:
    """See base class."""
    return self._encode(self._load().literal, text)

  def _encode(self, tokenizer: Any, text: str) -> list[int]:
    reserved = (PAD_ID, self.eos_id)
    return [i for i in tokenizer.encode(text).ids if i not in reserved]

  def _decode(self, ids: list[int]) -> str:
    loaded = self._load()
    kept = [i for i in ids if i not in loaded.control_ids]
    return loaded.decoder.decode(kept, skip_special_tokens=False)

  def __repr__(self) -> str:
    return f'HuggingFaceVocabulary({self._path})'


# A run makes equal vocabularies, of its model and of each task, and gin copies them.
@functools.lru_cache(maxsize=4)
def _load(path: str, tokenizer: str, special: SpecialTokens) -> _Loaded:
  """Return the loaded tokenizer; see `HuggingFaceVocabulary`."""
  contents = json.loads(tokenizer) | {'truncation': None, 'padding': None}
  decoder = _open(path, contents)
  hidden = {special.pad, special.eos}
  encoder = _open(path, contents, hidden)
  sentinels = {*filter(SENTINEL_PIECE.fullmatch, _added(contents))}
  ids = decoder.get_vocab(with_added_tokens=True)
  if special.eos not in ids:
    raise ConfigError(
      f'The end token of {path} must be one of its tokens, got eos_token={special.eos!r}, which it does not '
      'have. Copy tokenizer_config.json and the tokenizer of the same model.'
    )
  names = {i: token for token, i in ids.items()}
  model = contents['model']
  unknown_is_bytes = names.get(PAD_ID) == special.unk and model.get('byte_fallback')
  in_texts = PAD_ID in encoder.encode('').ids
  is_free = names.get(PAD_ID) in (special.pad, *special.controls) or unknown_is_bytes
  if in_texts or not is_free or ids[special.eos] == PAD_ID:
    raise ConfigError(
      f'The tokenizer {path} must have its padding as id 0, which is padding in batches, or no text with id '
      f'0, got {names.get(PAD_ID)!r} as id 0 and pad_token={special.pad!r}. Its models cannot be trained here.'
    )
  is_byte_level = '"ByteLevel"' in json.dumps(contents.get('pre_tokenizer'))
  return _Loaded(
    encoder=encoder,
    literal=_open(path, contents, hidden | sentinels),
    decoder=decoder,
    ids=ids,
    control_ids=frozenset(ids[token] for token in special.controls if token in ids),
    vocab_size=max(ids.values()) + 1,
    kind='byte-level BPE' if model['type'] == 'BPE' and is_byte_level else model['type'],
  )


def _open(path: str, contents: Mapping[str, Any], hidden: Container[str | None] = ()) -> Any:
  """Return the tokenizer of the library, which does not find the tokens `hidden` in texts."""
  tokenizers = tokenizers_module(path)
  tokens = []
  try:
    in_model = dict(contents['model']['vocab'])
    for token in contents.get('added_tokens') or []:
      if token['content'] not in hidden:
        tokens.append(token)
      elif token['content'] not in in_model:
        # The library numbers tokens that the model lacks in their order: without this one, later ids would be lower.
        tokens.append({**token, 'content': f'{_NO_CHARACTER}{token["id"]}{_NO_CHARACTER}'})
    return tokenizers.Tokenizer.from_str(json.dumps({**contents, 'added_tokens': tokens}))
  except Exception as error:  # The library has no class of its own for this.
    raise CheckpointError(
      f'{path} cannot be read by the package tokenizers ({error}). Copy the file again, or update the package: '
      'pip install -U tokenizers.'
    ) from error


def _added(contents: Mapping[str, Any]) -> list[str]:
  """Return the contents of the added tokens."""
  return [token['content'] for token in contents.get('added_tokens') or []]


def with_tokens(contents: Mapping[str, Any], tokens: Sequence[AddedToken]) -> dict[str, Any]:
  """Return contents of `tokenizer.json` with the added tokens of further files that it lacks."""
  known = {*_added(contents)}
  added = [*(contents.get('added_tokens') or [])]
  for token in tokens:
    if token.content not in known:
      added.append({**dataclasses.asdict(token), 'special': not token.normalized})
  added = [{**_TOKEN_DEFAULTS, **token} for token in added]
  added.sort(key=lambda token: token['id'])
  return {**contents, 'added_tokens': added}


def byte_level_bpe(
  vocab: Mapping[str, int],
  merges: str,
  special: SpecialTokens,
  *,
  bos: str | None,
  has_prefix_space: bool,
) -> dict[str, Any]:
  """Return `tokenizer.json` of the byte-level BPE of `vocab.json` and `merges.txt`.

  Args:
    vocab: id of each token.
    merges: contents of merges.txt, a pair of tokens in each line after comments.
    special: the special tokens.
    bos: the token before a text, which the end token follows; None for neither.
    has_prefix_space: whether a text begins with a space (`add_prefix_space`).
  """
  pairs = [
    line.split(' ') for line in merges.splitlines() if line and not line.startswith('#version')
  ]
  byte_level = {
    'type': 'ByteLevel',
    'add_prefix_space': has_prefix_space,
    'trim_offsets': True,
    'use_regex': True,
  }
  # A missing end token is an error of the vocabulary that is made of the result.
  processor: dict[str, Any] = byte_level
  if bos is not None:
    processor = {
      'type': 'RobertaProcessing',
      'sep': [special.eos, vocab.get(special.eos, 0)],
      'cls': [bos, vocab.get(bos, 0)],
      'trim_offsets': True,
      'add_prefix_space': has_prefix_space,
    }
  return {
    'version': '1.0',
    'added_tokens': [],
    'normalizer': None,
    'pre_tokenizer': byte_level,
    'post_processor': processor,
    'decoder': byte_level,
    'model': {
      'type': 'BPE',
      'unk_token': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'vocab': dict(vocab),
      'merges': pairs,
    },
  }
