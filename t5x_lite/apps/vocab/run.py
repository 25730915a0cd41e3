"""Train SentencePiece vocabularies with T5's ids, and measure how one encodes a task.

    t5x_lite vocab vocabs/docs.model --corpus=python_docs --vocab_size=900 --extra_ids=100 --task=python_keyword_cloze

Id 0 is padding, 1 end of sequence, 2 unknown, without a beginning of sequence. Sentinels follow the pieces, with
`<extra_id_0>` last (Kudo 2018, https://arxiv.org/abs/1804.10959; Kudo and Richardson 2018,
https://arxiv.org/abs/1808.06226). The same text and options give the same bytes: one thread, fixed seed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import io
import json
import re

import numpy as np

from t5x_lite import checks
from t5x_lite.data import corpora
from t5x_lite.data.text.packages import sentencepiece_modules
from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.errors import ConfigError, DataError, did_you_mean
from t5x_lite.formatting import format_table
from t5x_lite.formatting import short_repr
from t5x_lite.storage import files

# Embedded corpora, by name.
CORPORA: dict[str, Callable[[str], Iterable[str]]] = {
  'python_docs': corpora.python_docs,
  'python_keyword_cloze': lambda split: (
    line.replace(corpora.SENTINEL_TEXT, keyword)
    for line, keyword in corpora.python_keyword_cloze(split)
  ),
}
# Padding, end of sequence, unknown.
_NUM_SPECIAL_PIECES = 3
# As in T5X, the network's vocabulary size is a multiple of this number, which many numbers of devices divide.
_NETWORK_MULTIPLE = 128
# Longer than any line: by default, sentencepiece silently skips lines of more than 4192 bytes.
_MAX_LINE_BYTES = 2**30


# --- Text to train on ------------------------------------------------------------------------------------------------


def text_lines(paths: Sequence[str]) -> Iterator[str]:
  """Yield the lines of plain text files in UTF-8, one file after another.

  Args:
    paths: paths of the files.

  Raises:
    DataError: a line is not UTF-8; the message has its number.
    ConfigError: a file does not exist.
  """
  for path in paths:
    for number, line in _numbered_lines(path):
      try:
        yield line.decode('utf-8')
      except UnicodeDecodeError as error:
        raise DataError(
          f'{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file, '
          'e.g. with iconv.'
        ) from None


def json_lines(paths: Sequence[str], key: str) -> Iterator[str]:
  """Yield the lines of the texts in `key` of JSONL files.

  Args:
    paths: paths of the files.
    key: key of the text in each object.

  Raises:
    DataError: a line is not a JSON object with a text in `key`; the message has its number.
    ConfigError: a file does not exist.
  """
  for path in paths:
    for number, line in _numbered_lines(path):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
        problem = f'the line must be an object with a text in {key!r}.'
      except ValueError as error:
        row = None
        problem = f'not JSON ({error}).'
      text = row.get(key) if isinstance(row, dict) else None
      if not isinstance(text, str):
        hint = did_you_mean(key, row) if isinstance(row, dict) else ''
        raise DataError(
          f'{path}, line {number}: {problem}{hint} Set --key, or correct or remove the line.'
        )
      yield from text.splitlines()


def corpus_lines(name: str, split: str) -> Iterator[str]:
  """Yield the lines of an embedded corpus.

  Args:
    name: one of `CORPORA`.
    split: one of `corpora.SPLITS`.

  Raises:
    ConfigError: the corpus or the split does not exist.
  """
  checks.check(
    '',
    {'--corpus': name, '--split': split},
    **{'--corpus': checks.one_of(CORPORA), '--split': checks.one_of(corpora.SPLITS)},
  )
  for text in CORPORA[name](split):
    yield from text.splitlines()


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
  with files.path(path).open('rb') as file:
    for number, line in enumerate(file, start=1):
      yield number, line.rstrip(b'\r\n')


# --- Training --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedVocabulary:
  """Result of training; written to `<model>.json`.

  Attributes:
    model_file: path of the model.
    num_pieces: number of ids without sentinels.
    extra_ids: number of sentinels, which are added when the model is loaded and are not in the file, as in T5.
    byte_fallback: whether characters without a piece are encoded as bytes.
    character_coverage: share of the text's characters that have pieces.
    max_lines: number of random lines to train on; None for all.
    num_lines: number of non-empty lines that were read.
    num_characters: number of characters of these lines.
    sources: names of the text sources.
    sha256: hash of the model.
    sentencepiece_version: version that trained the model.
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
  """Train a unigram SentencePiece model and write it atomically, with a JSON file of its parameters.

  Args:
    lines: text to train on; the order has a small effect on the result.
    model_file: path of the model.
    vocab_size: number of pieces, including padding, end of sequence and unknown, excluding sentinels.
    extra_ids: number of sentinels that will be added when the model is loaded; only recorded.
    byte_fallback: encode characters without a piece as bytes (256 pieces of `vocab_size`), so that none is unknown.
    character_coverage: share of the text's characters that get a piece, from 0.98 to 1; the rarest others are unknown,
      or encoded as bytes.
    max_lines: number of random lines to train on, with a fixed seed; None for all.
    sources: names of the text sources, recorded in the JSON file.
    overwrite: replace `model_file` if it exists.

  Raises:
    ConfigError: an option is out of range, the text has too few pieces or too many characters for `vocab_size`, or
      `model_file` exists.
    DataError: the text is empty.
  """
  checks.check(
    '',
    locals(),
    vocab_size=checks.number(above=_NUM_SPECIAL_PIECES, integer=True),
    extra_ids=checks.number(at_least=0, integer=True),
    character_coverage=checks.number(at_least=0.98, at_most=1),
    max_lines=checks.number(at_least=1, integer=True).or_none(),
  )
  path = files.path(model_file)
  if path.is_dir() or (path.exists() and not overwrite):
    raise ConfigError(
      f'{model_file!r} exists, and networks trained with it could not use another vocabulary. Choose '
      'another name, or pass --overwrite.'
    )
  sentencepiece, _, _ = sentencepiece_modules()
  counted = _CountedLines(lines)
  model = io.BytesIO()
  if max_lines is None:
    sampling = {}
  else:
    sampling = {'input_sentence_size': max_lines, 'shuffle_input_sentence': True}
  sentencepiece.set_random_generator_seed(0)
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(counted),
      model_writer=model,
      model_type='unigram',
      vocab_size=vocab_size,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      byte_fallback=byte_fallback,
      character_coverage=character_coverage,
      max_sentence_length=_MAX_LINE_BYTES,
      num_threads=1,
      minloglevel=2,
      **sampling,
    )
  except RuntimeError as error:
    if counted.error is not None:
      raise counted.error from None
    raise _readable(str(error), vocab_size, counted) from error
  if counted.error is not None:
    raise counted.error
  content = model.getvalue()
  result = TrainedVocabulary(
    model_file=model_file,
    num_pieces=vocab_size,
    extra_ids=extra_ids,
    byte_fallback=byte_fallback,
    character_coverage=character_coverage,
    max_lines=max_lines,
    num_lines=counted.num_lines,
    num_characters=counted.num_characters,
    sources=tuple(sources),
    sha256=hashlib.sha256(content).hexdigest(),
    sentencepiece_version=sentencepiece.__version__,
  )
  path.parent.mkdir(parents=True, exist_ok=True)
  record = {
    name: value for name, value in dataclasses.asdict(result).items() if name != 'model_file'
  }
  files.write(path, content)
  files.write(parameters_file(path), json.dumps(record, indent=2) + '\n')
  return result


def parameters_file(model_file: files.PathLike) -> files.Path:
  """Return the path of the file with a model's parameters.

  >>> parameters_file('vocabs/docs.model').as_posix()
  'vocabs/docs.model.json'
  """
  path = files.path(model_file)
  return path.with_name(f'{path.name}.json')


class _CountedLines:
  """Counts non-empty lines while iterating over them. Keeps their error, which C++ would replace by another one."""

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
  """Return sentencepiece's error with its remedy."""
  text = f'the text ({counted.num_lines:,} lines, {counted.num_characters:,} characters)'
  if counted.num_lines == 0:
    return DataError('No text to train a vocabulary on: all lines are empty. Pass another file.')
  too_high = re.search(r'Vocabulary size too high .*<= (\d+)', message)
  if too_high:
    return ConfigError(
      f'`vocab_size` must be at most {too_high[1]}, got {vocab_size}: {text} has no more pieces. '
      'Lower --vocab_size, or pass more text.'
    )
  too_low = re.search(r'smaller than required_chars\. \d+ vs (\d+)', message)
  if too_low:
    return ConfigError(
      f'`vocab_size` must be at least {too_low[1]}, got {vocab_size}: {text} has that many different '
      'characters and special pieces. Raise --vocab_size, or lower --character_coverage.'
    )
  return ConfigError(f'sentencepiece cannot train on {text}: {message}')


def describe_training(trained: TrainedVocabulary) -> str:
  """Return a description of the result, with the gin bindings to use it."""
  num_ids = trained.num_pieces + trained.extra_ids
  size = -(-num_ids // _NETWORK_MULTIPLE) * _NETWORK_MULTIPLE
  return '\n'.join(
    [
      f'Trained {trained.model_file} on {trained.num_lines:,} lines ({trained.num_characters:,} characters): '
      f'{trained.num_pieces:,} pieces, {num_ids:,} ids with {trained.extra_ids} sentinels.',
      f'The options of the training are in {parameters_file(trained.model_file)}. Gin bindings to use the '
      'vocabulary:',
      '  VOCABULARY = @vocabularies.SentencePieceVocabulary()',
      f'  vocabularies.SentencePieceVocabulary.sentencepiece_model_file = {trained.model_file!r}',
      f'  vocabularies.SentencePieceVocabulary.extra_ids = {trained.extra_ids}',
      f'  network.T5Config.vocab_size = {size}  # for a decoder-only model: network.TransformerConfig.vocab_size',
    ]
  )


# ---- Coverage of a task ----------------------------------------------------------------------------------------------

_PERCENTILES = (50, 90, 99, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
  """Coverage of the texts of one task feature by a vocabulary.

  Attributes:
    num_texts: number of texts.
    num_words: number of words, separated by white space.
    num_characters: number of characters.
    num_tokens: number of ids without ends of sequence.
    num_unknown: number of unknown ids.
    num_bytes: number of byte ids, which replace characters without a piece (`byte_fallback`).
    length_percentiles: number of ids per text by percentile, including the end of sequence.
    max_length: length to which the task's examples are truncated; None if unknown.
    num_longer: number of texts that would be truncated.
    num_round_trips: number of texts that decode to themselves, up to white space, which T5's vocabularies fold.
    first_difference: (text, decoded text) of the first other one.
  """

  num_texts: int
  num_words: int
  num_characters: int
  num_tokens: int
  num_unknown: int
  num_bytes: int
  length_percentiles: Mapping[int, int]
  max_length: int | None
  num_longer: int
  num_round_trips: int
  first_difference: tuple[str, str] | None


def check_vocabulary(
  vocabulary: SentencePieceVocabulary, texts: Sequence[str], max_length: int | None = None
) -> Coverage:
  """Encode and decode texts, and count ids, unknown ids and differences.

  Args:
    vocabulary: the vocabulary.
    texts: texts of one task feature.
    max_length: length of the feature in ids, including the end of sequence; None if unknown.

  Raises:
    DataError: there are no texts.
  """
  if not texts:
    raise DataError('There are no texts for checking the vocabulary.')
  byte_ids = vocabulary.byte_ids
  lengths = []
  counts = {'unknown': 0, 'bytes': 0}
  round_trips = 0
  difference = None
  for text in texts:
    ids = vocabulary.encode(text)
    lengths.append(len(ids) + 1)
    counts['unknown'] += ids.count(vocabulary.unk_id)
    counts['bytes'] += sum(i in byte_ids for i in ids)
    folded = ' '.join(text.split())
    back = ' '.join(vocabulary.decode(ids).split())
    round_trips += back == folded
    if back != folded and difference is None:
      difference = (folded, back)
  percentiles = np.percentile(lengths, _PERCENTILES, method='inverted_cdf').astype(int)
  num_longer = 0
  if max_length is not None:
    num_longer = sum(length > max_length for length in lengths)
  return Coverage(
    num_texts=len(texts),
    num_words=sum(len(text.split()) for text in texts),
    num_characters=sum(map(len, texts)),
    num_tokens=sum(lengths) - len(lengths),
    num_unknown=counts['unknown'],
    num_bytes=counts['bytes'],
    length_percentiles=dict(zip(_PERCENTILES, percentiles.tolist(), strict=True)),
    max_length=max_length,
    num_longer=num_longer,
    num_round_trips=round_trips,
    first_difference=difference,
  )


def describe_coverage(title: str, coverage: Mapping[str, Coverage]) -> str:
  """Return a table of coverages, one row per feature, followed by advice.

  Args:
    title: title of the table.
    coverage: result of `check_vocabulary` by task feature.
  """
  percentiles = [f'p{p}' if p < 100 else 'longest' for p in _PERCENTILES]
  rows = [
    (
      'feature',
      'texts',
      'unknown',
      'bytes',
      'ids/word',
      'chars/id',
      *percentiles,
      'length',
      'truncated',
      'round trip',
    )
  ]
  notes = []
  for feature, c in coverage.items():
    max_length = '-'
    share_longer = '-'
    if c.max_length is not None:
      max_length = f'{c.max_length:,}'
      share_longer = _share(c.num_longer, c.num_texts)
    rows.append(
      (
        feature,
        f'{c.num_texts:,}',
        _share(c.num_unknown, c.num_tokens),
        _share(c.num_bytes, c.num_tokens),
        f'{c.num_tokens / max(c.num_words, 1):.2f}',
        f'{c.num_characters / max(c.num_tokens, 1):.2f}',
        *(f'{c.length_percentiles[p]:,}' for p in _PERCENTILES),
        max_length,
        share_longer,
        _share(c.num_round_trips, c.num_texts),
      )
    )
    if c.first_difference is not None:
      texts = _around_difference(*c.first_difference)
      text, back = (short_repr(each, limit=80) for each in texts)
      notes.append(
        f'{feature}: the first text that differs after encoding and decoding:\n  {text}\n  {back}'
      )
    if c.num_unknown:
      notes.append(
        f'{feature}: {c.num_unknown:,} ids are unknown. Train on similar text, raise --character_coverage, '
        'or pass --byte_fallback.'
      )
    if c.num_longer:
      notes.append(
        f'{feature}: {c.num_longer:,} of {c.num_texts:,} texts are longer than {c.max_length:,} ids and '
        "would be truncated. Raise the task's feature length, or --vocab_size."
      )
  return '\n'.join([title, format_table(rows), *notes])


def _share(part: int, total: int) -> str:
  if not part:
    return '0'
  return f'{100 * part / total:.2f} %'


def _around_difference(text: str, back: str) -> tuple[str, str]:
  """Return both texts from shortly before the first difference."""
  first = next(
    (i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b),
    min(len(text), len(back)),
  )
  start = max(0, first - 20)
  return text[start:], back[start:]
