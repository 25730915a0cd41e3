"""Trains SentencePiece vocabularies with T5's ids; `vocab_check` looks at how one fits a task.

    t5x_lite vocab vocabs/docs.model --corpus=python_docs --vocab_size=900 --extra_ids=100 --task=python_keyword_cloze

Padding is id 0, the end of a sequence 1, unknown 2, there is no beginning of a sequence, and the sentinels stand behind
the pieces, `<extra_id_0>` last (Kudo 2018, https://arxiv.org/abs/1804.10959; Kudo and Richardson 2018,
https://arxiv.org/abs/1808.06226). The same text and options give the same bytes: one thread, one seed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import re
from typing import Any

from t5x_lite import files
from t5x_lite.data import corpora
from t5x_lite.errors import ConfigError, DataError, did_you_mean

# What `corpus_lines` knows: the embedded corpora.
CORPORA: dict[str, Callable[[str], Iterable[str]]] = {
    'python_docs': corpora.python_docs,
    'python_keyword_cloze': lambda split: (
        line.replace(corpora.SENTINEL_TEXT, keyword) for line, keyword in corpora.python_keyword_cloze(split)),
}
# Pad, end of sequence, unknown.
_NUM_SPECIAL_PIECES = 3
# T5X's: a vocabulary's size in the network is a multiple of it, so that it divides over many devices.
_NETWORK_MULTIPLE = 128
# Longer lines than any: sentencepiece would leave out those of more than 4192 bytes, its default, without a word.
_MAX_LINE_BYTES = 2**30


# --- Text to train on ------------------------------------------------------------------------------------------------


def text_lines(paths: Sequence[str]) -> Iterator[str]:
  """Yields the lines of plain text files in UTF-8, one file after another.

  Raises:
    DataError: a line is not UTF-8; it is named by number.
    ConfigError: there is no such file.
  """
  for path in paths:
    for number, line in _numbered_lines(path):
      try:
        yield line.decode('utf-8')
      except UnicodeDecodeError as error:
        raise DataError(f'{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file, '
                        'e.g. with iconv.') from None


def json_lines(paths: Sequence[str], key: str) -> Iterator[str]:
  """Yields the lines of the texts that stand under `key` in files of one JSON object a line.

  Raises:
    DataError: a line is no JSON object with a text there; it is named by number.
    ConfigError: there is no such file.
  """
  for path in paths:
    for number, line in _numbered_lines(path):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
      except ValueError as error:
        raise DataError(f'{path}, line {number}: not JSON ({error}). Correct or remove the line.') from None
      text = row.get(key) if isinstance(row, dict) else None
      if not isinstance(text, str):
        raise DataError(f'{path}, line {number}: expected an object with a text under {key!r}.'
                        + (did_you_mean(key, row) if isinstance(row, dict) else '')
                        + ' Name another key with --key, or correct the line.')
      yield from text.splitlines()


def corpus_lines(name: str, split: str) -> Iterator[str]:
  """Yields the lines of an embedded corpus.

  Raises:
    ConfigError: there is no such corpus or split.
  """
  if name not in CORPORA:
    raise ConfigError(f'There is no embedded corpus {name!r}.{did_you_mean(name, CORPORA)}')
  if split not in corpora.SPLITS:
    raise ConfigError(f'The corpus {name!r} has no split {split!r}.{did_you_mean(split, corpora.SPLITS)}')
  for text in CORPORA[name](split):
    yield from text.splitlines()


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
  if not os.path.isfile(path):
    raise ConfigError(f'There is no file {path!r}; expected a text to train the vocabulary on. Correct the path.')
  with open(path, 'rb') as file:
    for number, line in enumerate(file, start=1):
      yield number, line.rstrip(b'\r\n')


# --- Training --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedVocabulary:
  """What came of training; it is written beside the model as `<model>.json`.

  Attributes:
    model_file: path of the model.
    num_pieces: ids without sentinels.
    extra_ids: sentinels to be added when it is read; they are not in the file, as T5 has it.
    byte_fallback: whether what no piece covers is spelt in bytes.
    character_coverage: the share of the text's characters that got pieces of their own.
    max_lines: the number of lines that were drawn from the text, None for all.
    num_lines: lines that were read, empty ones apart.
    num_characters: of these lines.
    sources: where the text came from.
    sha256: of the model.
    sentencepiece_version: what trained it.
  """

  model_file: str
  num_pieces: int
  extra_ids: int
  byte_fallback: bool
  character_coverage: float
  max_lines: int | None
  num_lines: int
  num_characters: int
  sources: Sequence[str]
  sha256: str
  sentencepiece_version: str


def train_vocabulary(
    lines: Iterable[str],
    model_file: str,
    *,
    vocab_size: int,
    extra_ids: int = 100,
    byte_fallback: bool = False,
    character_coverage: float = 0.9995,
    max_lines: int | None = None,
    sources: Sequence[str] = (),
    overwrite: bool = False,
) -> TrainedVocabulary:
  """Trains a unigram SentencePiece model and writes it whole or not at all, with its parameters beside it.

  Args:
    lines: the text; in this order, which has a (small) effect on the result.
    model_file: what to write.
    vocab_size: number of pieces, padding, end of sequence and unknown included, sentinels not.
    extra_ids: number of sentinels that the vocabulary will be read with; recorded, and counted in the result.
    byte_fallback: spell what no piece covers in bytes (256 pieces of `vocab_size`), so that nothing is unknown.
    character_coverage: the share of the text's characters that get a piece of their own, from 0.98 to 1; the rarest
      rest is unknown, or spelt in bytes.
    max_lines: train on so many lines drawn at random, always the same ones; None for all.
    sources: names of where the text came from, for the record.
    overwrite: replace `model_file` if it exists.

  Raises:
    ConfigError: an option is out of range, the text is too small for `vocab_size` or has too many characters for it,
      or `model_file` exists.
    DataError: there is no text.
  """
  _check_options(vocab_size, extra_ids, character_coverage, max_lines)
  path = pathlib.Path(model_file)
  if path.is_dir() or (path.exists() and not overwrite):
    raise ConfigError(f'{model_file!r} exists: models that were trained with it would not be able to read their ids. '
                      'Choose another name, or pass --overwrite.')
  sentencepiece = _import_sentencepiece()
  counted = _CountedLines(lines)
  model = io.BytesIO()
  sampling = {} if max_lines is None else {'input_sentence_size': max_lines, 'shuffle_input_sentence': True}
  sentencepiece.set_random_generator_seed(0)
  try:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(counted), model_writer=model, model_type='unigram', vocab_size=vocab_size,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, byte_fallback=byte_fallback, character_coverage=character_coverage,
        max_sentence_length=_MAX_LINE_BYTES, num_threads=1, minloglevel=2, **sampling)
  except RuntimeError as error:
    if counted.error is not None:
      raise counted.error from None
    raise _readable(str(error), vocab_size, counted) from error
  if counted.error is not None:
    raise counted.error
  content = model.getvalue()
  result = TrainedVocabulary(
      model_file=model_file, num_pieces=vocab_size, extra_ids=extra_ids, byte_fallback=byte_fallback,
      character_coverage=character_coverage, max_lines=max_lines, num_lines=counted.num_lines,
      num_characters=counted.num_characters, sources=tuple(sources), sha256=hashlib.sha256(content).hexdigest(),
      sentencepiece_version=sentencepiece.__version__)
  path.parent.mkdir(parents=True, exist_ok=True)
  record = {name: value for name, value in dataclasses.asdict(result).items() if name != 'model_file'}
  files.write(path, content)
  files.write(parameters_file(path), json.dumps(record, indent=2) + '\n')
  return result


def parameters_file(model_file: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the path of the file with a model's parameters.

  >>> parameters_file('vocabs/docs.model').as_posix()
  'vocabs/docs.model.json'
  """
  path = pathlib.Path(model_file)
  return path.with_name(f'{path.name}.json')


def _check_options(vocab_size: int, extra_ids: int, character_coverage: float, max_lines: int | None) -> None:
  if vocab_size <= _NUM_SPECIAL_PIECES:
    raise ConfigError(f'vocab_size is {vocab_size}; expected more than {_NUM_SPECIAL_PIECES}: padding, end of sequence '
                      'and unknown, and the pieces of the text.')
  if extra_ids < 0:
    raise ConfigError(f'extra_ids is {extra_ids}; expected 0 or more. T5 has 100.')
  if not 0.98 <= character_coverage <= 1:
    raise ConfigError(f'character_coverage is {character_coverage}; expected a number from 0.98 to 1.')
  if max_lines is not None and max_lines < 1:
    raise ConfigError(f'max_lines is {max_lines}; expected 1 or more, or None for all.')


class _CountedLines:
  """Iterates over non-empty lines and counts them. Keeps an error: C++ would replace it by one of its own."""

  def __init__(self, lines: Iterable[str]):
    self._lines = lines
    self.num_lines = 0
    self.num_characters = 0
    self.error: BaseException | None = None

  def __iter__(self) -> Iterator[str]:
    try:
      for line in self._lines:
        if line.strip():
          self.num_lines += 1
          self.num_characters += len(line)
          yield line
    except Exception as error:
      self.error = error


def _readable(message: str, vocab_size: int, counted: _CountedLines) -> Exception:
  """Returns sentencepiece's error in words that say what to do."""
  text = f'the text ({counted.num_lines:,} lines, {counted.num_characters:,} characters)'
  if counted.num_lines == 0:
    return DataError('There is no text to train a vocabulary on: all lines are empty. Name another source.')
  too_high = re.search(r'Vocabulary size too high .*<= (\d+)', message)
  if too_high:
    return ConfigError(f'vocab_size is {vocab_size}; expected at most {too_high[1]}: {text} holds no more pieces. Lower '
                       '--vocab_size, or give more text.')
  too_low = re.search(r'smaller than required_chars\. \d+ vs (\d+)', message)
  if too_low:
    return ConfigError(f'vocab_size is {vocab_size}; expected at least {too_low[1]}: {text} has so many characters to '
                       'cover, with the special pieces. Raise --vocab_size, or lower --character_coverage.')
  return ConfigError(f'sentencepiece cannot train on {text}: {message}')


def _import_sentencepiece() -> Any:
  try:
    import sentencepiece
  except ImportError as error:
    raise ConfigError(f'Training a vocabulary needs the package sentencepiece, but: {error}. Install it with `pip '
                      'install sentencepiece`.') from error
  return sentencepiece


def describe_training(trained: TrainedVocabulary) -> str:
  """Returns what was trained, and what to write into a configuration to use it."""
  num_ids = trained.num_pieces + trained.extra_ids
  size = -(-num_ids // _NETWORK_MULTIPLE) * _NETWORK_MULTIPLE
  return '\n'.join([
      f'Trained {trained.model_file} on {trained.num_lines:,} lines ({trained.num_characters:,} characters): '
      f'{trained.num_pieces:,} pieces, {num_ids:,} ids with {trained.extra_ids} sentinels.',
      f'Its parameters are in {parameters_file(trained.model_file)}. To use it:',
      '  VOCABULARY = @vocabularies.SentencePieceVocabulary()',
      f'  vocabularies.SentencePieceVocabulary.sentencepiece_model_file = {trained.model_file!r}',
      f'  vocabularies.SentencePieceVocabulary.extra_ids = {trained.extra_ids}',
      f'  network.T5Config.vocab_size = {size}  # of a decoder-only model network.TransformerConfig.vocab_size',
  ])
