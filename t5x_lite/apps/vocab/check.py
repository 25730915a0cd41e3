"""Coverage of texts by a vocabulary: unknown ids, numbers of ids, and round trips."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.errors import DataError
from t5x_lite.formatting import format_table
from t5x_lite.formatting import short_repr

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
