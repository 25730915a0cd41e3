"""What a folder must hold so that transformers' own tokenizer classes give the ids of our vocabulary.

T5, mT5, umT5 and Switch: `spiece.model`, and `tokenizer.json`, the same in the form that transformers 5 reads first
(its `AutoTokenizer` knows umT5 by no other). ByT5: no file but the configuration, which all have
(`tokenizer_config.json`).
"""

import base64
import json
import os
import pathlib
import shutil
from collections.abc import Iterable
from typing import Any

from t5x_lite import files, untrusted
from t5x_lite.checkpoints.hugging_face.families import Family
from t5x_lite.data import tokenizer_folders
from t5x_lite.data.vocabularies import ByteVocabulary, SentencePieceVocabulary, Vocabulary, kind_of
from t5x_lite.errors import CheckpointError

TOKENIZER_CONFIG = 'tokenizer_config.json'
# Files of a tokenizer in a Hugging Face folder.
FILES = (TOKENIZER_CONFIG, tokenizer_folders.TOKENIZER_JSON, tokenizer_folders.MODEL_FILE, 'special_tokens_map.json',
         'added_tokens.json')
# The ids and names that transformers' class for T5 takes for granted.
_SPECIAL_PIECES = ('<pad>', '</s>', '<unk>')
_UNIGRAM = 1


def write(folder: str | os.PathLike[str], family: Family, tokenizer: Any, *,
          vocab_size: int | None = None) -> tuple[str, ...]:
  """Writes the tokenizer's files.

  Args:
    folder: the Hugging Face folder that is being made.
    family: of its model.
    tokenizer: a vocabulary of this package or of seqio; or the path of a sentencepiece model, behind whose pieces stand
      the sentinels of the family (or as many as `<path>.json` says, which `t5x_lite vocab` writes); or of a Hugging
      Face folder, whose tokenizer files are copied. None: a ByT5's bytes, which need none, if the table has so many
      rows; for other families no tokenizer.
    vocab_size: rows of the model's embedding table; None does not compare.

  Returns:
    The names of the files that were written; none without a tokenizer.

  Raises:
    CheckpointError: there is no such file or folder; transformers' class has no such tokenizer; or there are more ids
      than rows.
  """
  if tokenizer is None:
    tokenizer = ByteVocabulary(family.extra_ids)
    is_bytes = family.tokenizer_class.startswith('ByT5')
    # A model with fewer rows has other ids than all ByT5s have, and nobody asked for these.
    if not is_bytes or (vocab_size is not None and vocab_size < tokenizer.vocab_size):
      return ()
  root = pathlib.Path(folder)
  if isinstance(tokenizer, str | os.PathLike):
    path = pathlib.Path(tokenizer)
    if path.is_dir() and (path / TOKENIZER_CONFIG).is_file():
      if vocab_size is not None and (number := _num_ids(path)) > vocab_size:
        raise CheckpointError(
            f'The tokenizer in {str(path)!r} has {number} ids, and the model vocab_size={vocab_size}: expected no more '
            'ids than rows. Give the folder of the model that this one was trained from, or leave it out.')
      return tuple(_copy(path, root))
    tokenizer = _open(path, family)
  match kind_of(tokenizer):
    case 'ByteVocabulary':
      _check_size(tokenizer, vocab_size)
      return (_write_config(root, 'ByT5Tokenizer', reversed(_sentinels(tokenizer.extra_ids)), tokenizer.extra_ids),)
    case 'SentencePieceVocabulary':
      model = _read_model(tokenizer)
      _check_size(tokenizer, vocab_size)
      sentinels = _sentinels(tokenizer.extra_ids)
      shutil.copyfile(tokenizer.sentencepiece_model_file, root / tokenizer_folders.MODEL_FILE)
      _write_json(root / tokenizer_folders.TOKENIZER_JSON, _tokenizer_json(model, sentinels))
      name = _write_config(root, 'T5Tokenizer', sentinels, tokenizer.extra_ids)
      return name, tokenizer_folders.TOKENIZER_JSON, tokenizer_folders.MODEL_FILE
  raise CheckpointError(f'got a tokenizer {tokenizer!r}; expected a ByteVocabulary or a SentencePieceVocabulary, of '
                        'which transformers has the like. Leave it out, and the folder has none.')


def _copy(source: pathlib.Path, target: pathlib.Path) -> Iterable[str]:
  """Copies a folder's tokenizer as it is."""
  for name in FILES:
    if (source / name).is_file():
      shutil.copyfile(untrusted.check_file(source, name), target / name)
      yield name


def _num_ids(folder: pathlib.Path) -> int:
  """Returns how many ids the tokenizer of a folder has, the sentinels among them."""
  path = folder / tokenizer_folders.TOKENIZER_JSON
  if not path.is_file():
    return tokenizer_folders.hugging_face_vocabulary(str(folder)).vocab_size
  try:
    tokenizer = json.loads(untrusted.read_limited(folder, path.name))
    return max(len(tokenizer['model']['vocab']), *(token['id'] + 1 for token in tokenizer['added_tokens']), 0)
  except CheckpointError:
    raise
  except (ValueError, KeyError, TypeError) as error:
    raise CheckpointError(f'{path} is no tokenizer ({type(error).__name__}: {error}). Download it again.') from error


def _open(path: pathlib.Path, family: Family) -> Vocabulary:
  """Returns the vocabulary at `path`, a sentencepiece model or a folder with one."""
  if path.is_dir():
    return tokenizer_folders.hugging_face_vocabulary(str(path), extra_ids=None)
  if not path.is_file():
    raise CheckpointError(f'There is no tokenizer at {str(path)!r}; expected a sentencepiece model, or a folder with '
                          'the files of a tokenizer. Correct the path, or leave it out, and the folder has none.')
  if family.tokenizer_class.startswith('ByT5'):
    raise CheckpointError(f'got the tokenizer {str(path)!r} for family={family.name!r}, whose ids are bytes and which '
                          'has no file. Leave the tokenizer out, or choose the family that the model is of.')
  return SentencePieceVocabulary(str(path), _extra_ids(path, family))


def _extra_ids(path: pathlib.Path, family: Family) -> int:
  """Returns how many sentinels stand behind the pieces of a sentencepiece model."""
  parameters = path.with_name(f'{path.name}.json')
  if parameters.is_file():
    try:
      number = json.loads(parameters.read_text(encoding='utf-8')).get('extra_ids')
    except (ValueError, AttributeError) as error:
      raise CheckpointError(
          f'{parameters} is no JSON object: {error}. Remove it, or train the vocabulary anew.') from error
    if isinstance(number, int):
      return number
  return 0 if tokenizer_folders.has_sentinels(str(path)) else family.extra_ids


def _read_model(vocabulary: Any) -> Any:
  """Returns the sentencepiece model of a vocabulary, if transformers' class for T5 can encode as it does."""
  path = vocabulary.sentencepiece_model_file
  # seqio keeps the order of the sentinels to itself; it is part of the state that its own equality compares.
  if not vocabulary.__getstate__()['_reverse_extra_ids']:
    raise CheckpointError(f'got a vocabulary of {path!r} with reverse_extra_ids=False; expected <extra_id_0> to be the '
                          "last id: transformers' T5Tokenizer has no other order.")
  try:
    model = tokenizer_folders.read_sentencepiece_model(path)
  except OSError as error:
    raise CheckpointError(
        f'Cannot read the sentencepiece model {path!r}: {error.strerror}. Name a local file.') from error
  problem = _problem(model)
  if problem is not None:
    raise CheckpointError(f"The sentencepiece model {path!r} {problem}: transformers' T5Tokenizer would give other "
                          'ids. Leave the tokenizer out, and encode with sentencepiece itself.')
  return model


def _problem(model: Any) -> str | None:
  """Returns what in a sentencepiece model transformers' class for T5 cannot express, None if there is nothing."""
  trainer, normalizer = model.trainer_spec, model.normalizer_spec
  names = tuple(piece.piece for piece in model.pieces[:len(_SPECIAL_PIECES)])
  if trainer.model_type != _UNIGRAM:
    return 'is of another kind than unigram'
  if trainer.byte_fallback:
    return 'spells what no piece covers in bytes (byte_fallback)'
  if names != _SPECIAL_PIECES:
    return f'begins with the pieces {names}, expected {_SPECIAL_PIECES}'
  if not (normalizer.add_dummy_prefix and normalizer.remove_extra_whitespaces and normalizer.escape_whitespaces):
    return 'keeps spaces as they are (add_dummy_prefix, remove_extra_whitespaces or escape_whitespaces is off)'
  if any('\u2581' in piece.piece[1:] for piece in model.pieces):
    return 'has pieces of several words'
  return None


def _check_size(vocabulary: Any, vocab_size: int | None) -> None:
  if vocab_size is not None and vocabulary.vocab_size > vocab_size:
    remedy = ''
    is_file = kind_of(vocabulary) == 'SentencePieceVocabulary'
    if is_file and vocabulary.vocab_size - vocabulary.extra_ids <= vocab_size:
      remedy = (' If it was trained with fewer sentinels, say how many in a file beside the model: '
                f'{vocabulary.sentencepiece_model_file}.json with {{"extra_ids": 0}} for none.')
    raise CheckpointError(
        f'The tokenizer has {vocabulary.vocab_size} ids, {vocabulary.extra_ids} of them sentinels behind the pieces, '
        f'and the model vocab_size={vocab_size}: expected no more ids than rows. Give the vocabulary that the model '
        'was trained with, or leave it out.' + remedy)


def _sentinels(number: int) -> list[str]:
  return [f'<extra_id_{i}>' for i in range(number)]


def _write_config(root: pathlib.Path, tokenizer_class: str, sentinels: Iterable[str], extra_ids: int) -> str:
  """Writes tokenizer_config.json; returns its name.

  Args:
    root: the folder.
    tokenizer_class: of transformers.
    sentinels: for ByT5 in the order of their ids, which its class gives in this order; T5's class knows its own.
    extra_ids: their number.
  """
  pad, eos, unk = _SPECIAL_PIECES
  _write_json(root / TOKENIZER_CONFIG, {
      'additional_special_tokens': list(sentinels), 'clean_up_tokenization_spaces': False, 'eos_token': eos,
      'extra_ids': extra_ids, 'pad_token': pad, 'tokenizer_class': tokenizer_class, 'unk_token': unk})
  return TOKENIZER_CONFIG


def _tokenizer_json(model: Any, sentinels: list[str]) -> dict[str, Any]:
  """Returns the contents of tokenizer.json: what transformers makes of T5's sentencepiece model and its sentinels."""
  pieces = [[piece.piece, piece.score] for piece in model.pieces] + [[text, 0.0] for text in reversed(sentinels)]
  charsmap = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
  metaspace = {'type': 'Metaspace', 'replacement': '\u2581', 'prepend_scheme': 'always', 'split': True}
  eos = _SPECIAL_PIECES[1]
  a, b, end = ({'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 0}},
               {'SpecialToken': {'id': eos, 'type_id': 0}})
  return {
      'version': '1.0',
      'truncation': None,
      'padding': None,
      'added_tokens': [
          {'id': number, 'content': pieces[number][0], 'single_word': False, 'lstrip': False, 'rstrip': False,
           'normalized': False, 'special': True}
          for number in (*range(len(_SPECIAL_PIECES)), *range(len(model.pieces), len(pieces)))],
      'normalizer': {'type': 'Precompiled', 'precompiled_charsmap': charsmap} if charsmap else None,
      'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': [{'type': 'WhitespaceSplit'}, metaspace]},
      'post_processor': {
          'type': 'TemplateProcessing', 'single': [a, end], 'pair': [a, end, b, end],
          'special_tokens': {eos: {'id': eos, 'ids': [1], 'tokens': [eos]}}},
      'decoder': metaspace,
      'model': {'type': 'Unigram', 'unk_id': 2, 'vocab': pieces, 'byte_fallback': False},
  }


def _write_json(path: pathlib.Path, value: Any) -> None:
  files.write(path, json.dumps(value, ensure_ascii=False, indent=1) + '\n', durable=False)
