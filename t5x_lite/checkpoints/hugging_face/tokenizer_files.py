"""Tokenizer files of a folder, with which transformers' tokenizer classes give the ids of our vocabulary.

T5, mT5, umT5 and Switch: `spiece.model` and `tokenizer.json`, which has the same contents in the format that
transformers 5 prefers and that its `AutoTokenizer` requires for umT5. All, and for ByT5 only: `tokenizer_config.json`.
"""

import base64
from collections.abc import Iterable
import json
import os
import pathlib
from typing import Any

from t5x_lite.checkpoints.hugging_face.families import Family
from t5x_lite.data import tokenizer_folders
from t5x_lite.data import vocabularies
from t5x_lite.data.text.hugging_face import HuggingFaceVocabulary
from t5x_lite.data.vocabularies import ByteVocabulary
from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.data.vocabularies import Vocabulary
from t5x_lite.data.vocabularies import kind_of
from t5x_lite.errors import CheckpointError
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

TOKENIZER_CONFIG = 'tokenizer_config.json'
# Files of a tokenizer in a Hugging Face folder.
FILES = (
  TOKENIZER_CONFIG,
  tokenizer_folders.TOKENIZER_JSON,
  tokenizer_folders.MODEL_FILE,
  tokenizer_folders.TOKENIZER_MODEL,
  tokenizer_folders.VOCAB_JSON,
  tokenizer_folders.MERGES,
  tokenizer_folders.SPECIAL_TOKENS,
  tokenizer_folders.ADDED_TOKENS,
)
# Pieces 0, 1 and 2, which transformers' class for T5 requires.
_SPECIAL_PIECES = ('<pad>', '</s>', '<unk>')
_UNIGRAM = 1


def write(
  folder: str | os.PathLike[str], family: Family, tokenizer: Any, *, vocab_size: int | None = None
) -> tuple[str, ...]:
  """Write the tokenizer's files.

  Args:
    folder: the Hugging Face folder under construction.
    family: family of its model.
    tokenizer: a vocabulary of t5x_lite or seqio; or the path of a sentencepiece model, to which the sentinels of the
      family are added (or the number in `<path>.json`, which `t5x_lite vocab` writes); or the path of a Hugging Face
      folder, or the name of a model (hf://OWNER/NAME), whose tokenizer files are copied. None: the bytes of ByT5, if
      the embedding table has enough rows; no tokenizer for other families.
    vocab_size: rows of the model's embedding table; None to skip the comparison.

  Returns:
    Names of the files that were written; empty without a tokenizer.

  Raises:
    CheckpointError: the file or folder is missing; transformers has no equivalent tokenizer; or there are more ids than
      rows.
  """
  if tokenizer is None:
    tokenizer = ByteVocabulary(family.extra_ids)
    is_bytes = family.tokenizer_class.startswith('ByT5')
    # A model with fewer rows does not have the ids of ByT5.
    if not is_bytes or (vocab_size is not None and vocab_size < tokenizer.vocab_size):
      return ()
  root = pathlib.Path(folder)
  if isinstance(tokenizer, str | os.PathLike):
    path = files.path(tokenizer)
    if path.is_dir() and (path / TOKENIZER_CONFIG).is_file():
      if vocab_size is not None:
        _check_size(_num_ids(path), vocab_size, f'in {str(path)!r} ')
      return tuple(_copy(path, root))
    tokenizer = _open(path, family)
  match kind_of(tokenizer):
    case 'ByteVocabulary':
      _check_size(tokenizer.vocab_size, vocab_size)
      return (
        _write_config(
          root, 'ByT5Tokenizer', reversed(_sentinels(tokenizer.extra_ids)), tokenizer.extra_ids
        ),
      )
    case 'SentencePieceVocabulary':
      model = _read_model(tokenizer)
      remedy = (
        ' If it was trained with fewer sentinels, write their number to a file next to the model, '
        f'{tokenizer.sentencepiece_model_file}.json, e.g. {{"extra_ids": 0}}.'
      )
      _check_size(
        tokenizer.vocab_size,
        vocab_size,
        f'with {tokenizer.extra_ids} sentinels ',
        remedy
        if (vocab_size is not None and tokenizer.vocab_size - tokenizer.extra_ids <= vocab_size)
        else '',
      )
      sentinels = _sentinels(tokenizer.extra_ids)
      (root / tokenizer_folders.MODEL_FILE).write_bytes(
        vocabularies.read_model_file(tokenizer.sentencepiece_model_file)
      )
      _write_json(root / tokenizer_folders.TOKENIZER_JSON, _tokenizer_json(model, sentinels))
      # T5's class of transformers 5 drops the bytes of unknown characters.
      is_fallback = model.trainer_spec.byte_fallback
      tokenizer_class = 'PreTrainedTokenizerFast' if is_fallback else 'T5Tokenizer'
      name = _write_config(root, tokenizer_class, sentinels, tokenizer.extra_ids)
      return name, tokenizer_folders.TOKENIZER_JSON, tokenizer_folders.MODEL_FILE
    case 'HuggingFaceVocabulary':
      _check_size(tokenizer.vocab_size, vocab_size)
      return tuple(_copy(files.path(tokenizer.path).parent, root))
  raise CheckpointError(
    f'The tokenizer must be a ByteVocabulary or a SentencePieceVocabulary, which transformers '
    f'supports, got {tokenizer!r}. Omit it to write a folder without a tokenizer.'
  )


def class_name(folder: files.Path, tokenizer: Any) -> str | None:
  """Return the class in transformers of a tokenizer that `write` has written, or None if no file names it."""
  paths = [folder / TOKENIZER_CONFIG]
  if isinstance(tokenizer, HuggingFaceVocabulary):
    tokenizer = files.path(tokenizer.path).parent
  if isinstance(tokenizer, str | os.PathLike):
    paths.append(files.path(tokenizer) / 'config.json')
  for path in paths:
    if path.is_file():
      content = untrusted.read_limited(path.parent, path.name)
      name = untrusted.parse_object(content, str(path)).get('tokenizer_class')
      if isinstance(name, str):
        return name
  return None


def _copy(source: files.Path, target: pathlib.Path) -> Iterable[str]:
  """Copy a folder's tokenizer files unchanged; yields their names."""
  for name in FILES:
    if (source / name).is_file():
      path = untrusted.check_file(source, name)
      (target / name).write_bytes(untrusted.read_regular(path, vocabularies.MAX_MODEL_BYTES))
      yield name


def _num_ids(folder: files.Path) -> int:
  """Return the number of ids of a folder's tokenizer, including sentinels."""
  path = folder / tokenizer_folders.TOKENIZER_JSON
  if not path.is_file():
    return tokenizer_folders.hugging_face_vocabulary(str(folder)).vocab_size
  try:
    tokenizer = json.loads(untrusted.read_limited(folder, path.name))
    return max(
      len(tokenizer['model']['vocab']), *(token['id'] + 1 for token in tokenizer['added_tokens']), 0
    )
  except CheckpointError:
    raise
  except (ValueError, KeyError, TypeError) as error:
    raise CheckpointError(
      f'{path} is not a valid tokenizer ({type(error).__name__}: {error}). Download it again.'
    ) from error


def _open(path: files.Path, family: Family) -> Vocabulary:
  """Return the vocabulary at `path`, a sentencepiece model or a folder with one."""
  if path.is_dir():
    return tokenizer_folders.hugging_face_vocabulary(str(path), extra_ids=None)
  is_byt5 = family.tokenizer_class.startswith('ByT5')
  if is_byt5 or not path.is_file():
    if is_byt5:
      expected = f'omitted for family={family.name!r}, whose ids are bytes'
    else:
      expected = 'the path of a sentencepiece model, or of a folder with tokenizer files'
    raise CheckpointError(
      f'The tokenizer must be {expected}, got {str(path)!r}. Correct the path or the family, or '
      'omit the tokenizer.'
    )
  return SentencePieceVocabulary(str(path), _extra_ids(path, family))


def _extra_ids(path: files.Path, family: Family) -> int:
  """Return the number of sentinels after the pieces of a sentencepiece model."""
  parameters = path.with_name(f'{path.name}.json')
  if parameters.is_file():
    remedy = 'Delete it, or train the vocabulary again.'
    facts = untrusted.parse_object(untrusted.read_regular(parameters), str(parameters), remedy)
    number = tokenizer_folders.checked_extra_ids(facts, parameters)
    if number is not None:
      return number
  if tokenizer_folders.has_sentinels(str(path)):
    return 0
  return family.extra_ids


def _read_model(vocabulary: Any) -> Any:
  """Return the sentencepiece model of a vocabulary if transformers' class for T5 gives the same ids."""
  path = vocabulary.sentencepiece_model_file
  model = tokenizer_folders.read_sentencepiece_model(path)
  # seqio has no public attribute for the order of the sentinels; its own equality compares this state.
  is_reversed = vocabulary.__getstate__()['_reverse_extra_ids']
  if is_reversed:
    problem = _problem(model)
  else:
    problem = 'has reverse_extra_ids=False'
  if problem is not None:
    raise CheckpointError(
      f"The sentencepiece model {path!r} {problem}: transformers' T5Tokenizer would give different "
      'ids. Omit the tokenizer, and encode with sentencepiece.'
    )
  return model


def _problem(model: Any) -> str | None:
  """Return the property of a sentencepiece model that transformers' class for T5 does not support, or None."""
  trainer = model.trainer_spec
  normalizer = model.normalizer_spec
  names = tuple(piece.piece for piece in model.pieces[: len(_SPECIAL_PIECES)])
  if trainer.model_type != _UNIGRAM:
    return 'is not a unigram model'
  if names != _SPECIAL_PIECES:
    return f'begins with the pieces {names} instead of {_SPECIAL_PIECES}'
  if not (
    normalizer.add_dummy_prefix
    and normalizer.remove_extra_whitespaces
    and normalizer.escape_whitespaces
  ):
    return 'keeps spaces unchanged (add_dummy_prefix, remove_extra_whitespaces or escape_whitespaces is off)'
  if any('\u2581' in piece.piece[1:] for piece in model.pieces):
    return 'has pieces of several words'
  return None


def _check_size(num_ids: int, vocab_size: int | None, which: str = '', remedy: str = '') -> None:
  if vocab_size is not None and num_ids > vocab_size:
    raise CheckpointError(
      f'The tokenizer {which}must have at most vocab_size={vocab_size} ids, the rows of the embedding table, got '
      f'{num_ids}. Use the tokenizer that the model was trained with, or omit it.{remedy}'
    )


def _sentinels(number: int) -> list[str]:
  return [f'<extra_id_{i}>' for i in range(number)]


def _write_config(
  root: pathlib.Path, tokenizer_class: str, sentinels: Iterable[str], extra_ids: int
) -> str:
  """Write tokenizer_config.json and return its name.

  Args:
    root: the folder.
    tokenizer_class: class of transformers.
    sentinels: sentinels, for ByT5 in the order of their ids; T5's class ignores the order.
    extra_ids: number of the sentinels.
  """
  pad, eos, unk = _SPECIAL_PIECES
  _write_json(
    root / TOKENIZER_CONFIG,
    {
      'additional_special_tokens': list(sentinels),
      'clean_up_tokenization_spaces': False,
      'eos_token': eos,
      'extra_ids': extra_ids,
      'pad_token': pad,
      'tokenizer_class': tokenizer_class,
      'unk_token': unk,
    },
  )
  return TOKENIZER_CONFIG


def _tokenizer_json(model: Any, sentinels: list[str]) -> dict[str, Any]:
  """Return the contents of tokenizer.json, equal to transformers' conversion of T5's sentencepiece model."""
  pieces = [[piece.piece, piece.score] for piece in model.pieces] + [
    [text, 0.0] for text in reversed(sentinels)
  ]
  charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
  metaspace = {
    'type': 'Metaspace',
    'replacement': '\u2581',
    'prepend_scheme': 'always',
    'split': True,
  }
  decoder: dict[str, Any] = metaspace
  if model.trainer_spec.byte_fallback:
    decoder = {'type': 'Sequence', 'decoders': [{'type': 'ByteFallback'}, metaspace]}
  eos = _SPECIAL_PIECES[1]
  a = {'Sequence': {'id': 'A', 'type_id': 0}}
  b = {'Sequence': {'id': 'B', 'type_id': 0}}
  end = {'SpecialToken': {'id': eos, 'type_id': 0}}
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': [
      {
        'id': number,
        'content': pieces[number][0],
        'single_word': False,
        'lstrip': False,
        'rstrip': False,
        'normalized': False,
        'special': True,
      }
      for number in (*range(len(_SPECIAL_PIECES)), *range(len(model.pieces), len(pieces)))
    ],
    'normalizer': {'type': 'Precompiled', 'precompiled_charsmap': charsmap} if charsmap else None,
    'pre_tokenizer': {
      'type': 'Sequence',
      'pretokenizers': [{'type': 'WhitespaceSplit'}, metaspace],
    },
    'post_processor': {
      'type': 'TemplateProcessing',
      'single': [a, end],
      'pair': [a, end, b, end],
      'special_tokens': {eos: {'id': eos, 'ids': [1], 'tokens': [eos]}},
    },
    'decoder': decoder,
    'model': {
      'type': 'Unigram',
      'unk_id': 2,
      'vocab': pieces,
      'byte_fallback': model.trainer_spec.byte_fallback,
    },
  }


def _write_json(path: pathlib.Path, value: Any) -> None:
  files.write(path, json.dumps(value, ensure_ascii=False, indent=1) + '\n', durable=False)
