"""How a vocabulary spells texts: what it does not know, how many ids it takes, and whether the texts come back."""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from t5x_lite.data.vocabularies import SentencePieceVocabulary
from t5x_lite.errors import DataError
from t5x_lite.formatting import format_table

_PERCENTILES = (50, 90, 99, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
  """How a vocabulary spells the texts of one task feature.

  Attributes:
    num_texts: texts looked at.
    num_words: stretches between white space.
    num_characters: of all texts.
    num_tokens: ids of all texts, ends of sequence apart.
    num_unknown: of these, unknown ones.
    num_bytes: of these, bytes that stand in for characters without a piece (`byte_fallback`).
    length_percentiles: percentile to ids per text, the end of sequence counted.
    max_length: what the task's examples are cut to; None if that is not known.
    num_longer: texts that would be cut.
    num_round_trips: texts that come back from their ids as they were, but for white space, which T5's vocabularies fold.
    first_difference: (text, what came back) of the first that did not.
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


def check_vocabulary(vocabulary: SentencePieceVocabulary, texts: Sequence[str],
                     max_length: int | None = None) -> Coverage:
  """Encodes and decodes texts, and counts.

  Args:
    vocabulary: the vocabulary.
    texts: of one task feature.
    max_length: the feature's length in ids, the end of sequence included; None if none is known.

  Raises:
    DataError: there are no texts.
  """
  if not texts:
    raise DataError('There are no texts to check the vocabulary with.')
  byte_ids = vocabulary.byte_ids
  lengths, counts, round_trips, difference = [], {'unknown': 0, 'bytes': 0}, 0, None
  for text in texts:
    ids = vocabulary.encode(text)
    lengths.append(len(ids) + 1)
    counts['unknown'] += ids.count(vocabulary.unk_id)
    counts['bytes'] += sum(i in byte_ids for i in ids)
    folded, back = ' '.join(text.split()), ' '.join(vocabulary.decode(ids).split())
    round_trips += back == folded
    if back != folded and difference is None:
      difference = (folded, back)
  percentiles = np.percentile(lengths, _PERCENTILES, method='inverted_cdf').astype(int)
  return Coverage(
      num_texts=len(texts), num_words=sum(len(text.split()) for text in texts), num_characters=sum(map(len, texts)),
      num_tokens=sum(lengths) - len(lengths), num_unknown=counts['unknown'], num_bytes=counts['bytes'],
      length_percentiles=dict(zip(_PERCENTILES, percentiles.tolist(), strict=True)), max_length=max_length,
      num_longer=0 if max_length is None else sum(length > max_length for length in lengths),
      num_round_trips=round_trips, first_difference=difference)


def describe_coverage(title: str, coverage: Mapping[str, Coverage]) -> str:
  """Returns a table of what `check_vocabulary` found, one line a feature, and advice where there is any.

  Args:
    title: what was looked at.
    coverage: task feature name to result.
  """
  percentiles = [f'p{p}' if p < 100 else 'longest' for p in _PERCENTILES]
  rows = [('feature', 'texts', 'unknown', 'bytes', 'ids/word', 'chars/id', *percentiles, 'length', 'cut', 'round trip')]
  notes = []
  for feature, c in coverage.items():
    rows.append((feature, f'{c.num_texts:,}', _share(c.num_unknown, c.num_tokens), _share(c.num_bytes, c.num_tokens),
                 f'{c.num_tokens / max(c.num_words, 1):.2f}', f'{c.num_characters / max(c.num_tokens, 1):.2f}',
                 *(f'{c.length_percentiles[p]:,}' for p in _PERCENTILES),
                 '-' if c.max_length is None else f'{c.max_length:,}',
                 '-' if c.max_length is None else _share(c.num_longer, c.num_texts),
                 _share(c.num_round_trips, c.num_texts)))
    if c.first_difference is not None:
      text, back = map(_shortened, _around_difference(*c.first_difference))
      notes.append(f'{feature}: the first text that does not come back:\n  {text}\n  {back}')
    if c.num_unknown:
      notes.append(f'{feature}: {c.num_unknown:,} ids are unknown. Train on text like this, raise --character_coverage, '
                   'or pass --byte_fallback.')
    if c.num_longer:
      notes.append(f'{feature}: {c.num_longer:,} of {c.num_texts:,} texts are longer than {c.max_length:,} ids and would '
                   "be cut. Raise the task's feature length, or --vocab_size.")
  return '\n'.join([title, format_table(rows), *notes])


def _share(part: int, whole: int) -> str:
  return '0' if not part else f'{100 * part / whole:.2f} %'


def _around_difference(text: str, back: str) -> tuple[str, str]:
  """Returns both from shortly before the place where they part."""
  place = next((i for i, (a, b) in enumerate(zip(text, back)) if a != b), min(len(text), len(back)))
  start = max(0, place - 20)
  return text[start:], back[start:]


def _shortened(text: str, limit: int = 80) -> str:
  shown = repr(text)
  return shown if len(shown) <= limit else f'{shown[:limit - 3]}...'
