"""Similarities between all pairs of some texts: sentence chrF and sentence BLEU, as `sacrebleu` defines them.

`sacrebleu` compares one pair at a time in Python. Here the n-grams of each text are counted once, and the common
n-grams of all pairs are products of matrices.
"""

from collections.abc import Sequence

import numpy as np

from t5x_lite.errors import needs_packages

_CHRF_ORDER = 6
_CHRF_BETA = 2.0
_BLEU_ORDER = 4


def pairwise_chrf(texts: Sequence[str]) -> np.ndarray:
  """Return <float64>[n, n], the sentence chrF2 in percent of text i as a candidate for text j as the reference.

  Characters are Unicode code points without whitespace, in n-grams of up to 6. See Popović 2015, "chrF: character
  n-gram F-score for automatic MT evaluation".

  Args:
    texts: n texts.

  >>> pairwise_chrf(['a b', 'ab', 'xy']).tolist()
  [[100.0, 100.0, 0.0], [100.0, 100.0, 0.0], [0.0, 0.0, 100.0]]
  """
  letters = []
  for text in texts:
    characters = ''.join(text.split()).encode('utf-32-le', errors='surrogatepass')
    letters.append(np.frombuffer(characters, np.uint32))
  num_texts = len(texts)
  precision = np.zeros((num_texts, num_texts))
  recall = np.zeros((num_texts, num_texts))
  # Number of orders of which both texts have n-grams; the others do not count.
  num_orders = np.zeros((num_texts, num_texts))
  for counts, matches in _common_ngrams(letters, _CHRF_ORDER):
    has_both = (counts[:, None] > 0) & (counts[None, :] > 0)
    precision += matches / np.maximum(counts, 1)[:, None]
    recall += matches / np.maximum(counts, 1)[None, :]
    num_orders += has_both
  precision /= np.maximum(num_orders, 1)
  recall /= np.maximum(num_orders, 1)
  weighted = _CHRF_BETA**2 * precision + recall
  f_score = (1 + _CHRF_BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1)
  return 100 * f_score


def pairwise_bleu(texts: Sequence[str]) -> np.ndarray:
  """Return <float64>[n, n], the sentence BLEU in percent of text i as a candidate for text j as the reference.

  Words are those of sacrebleu's tokenizer 13a, in n-grams of up to 4 or the candidate's length. Precisions of 0 are
  smoothed by powers of 2 (`exp`). See Papineni et al. 2002 and Chen and Cherry 2014.

  Args:
    texts: n texts.

  Raises:
    ConfigError: sacrebleu is not installed.
  """
  with needs_packages(
    "The utility 'bleu'", 'sacrebleu', extra='metrics', otherwise="set utility='chrf'"
  ):
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
  tokenize = Tokenizer13a()
  ids: dict[str, int] = {}
  words = []
  for text in texts:
    found = tokenize(text.rstrip()).split()
    words.append(np.array([ids.setdefault(word, len(ids)) for word in found], np.uint32))
  num_texts = len(texts)
  log_precision = np.zeros((num_texts, num_texts))
  smoothing = np.ones((num_texts, num_texts))
  has_match = np.zeros((num_texts, num_texts), bool)
  num_orders = np.zeros(num_texts)
  for counts, matches in _common_ngrams(words, _BLEU_ORDER):
    is_counted = (counts > 0)[:, None]
    smoothing = np.where(matches == 0, 2 * smoothing, smoothing)
    smoothed = np.where(matches > 0, matches, 1 / smoothing) / np.maximum(counts, 1)[:, None]
    log_precision += np.where(is_counted, np.log(smoothed), 0)
    has_match |= matches > 0
    num_orders += counts > 0
  lengths = np.array([max(len(each), 1) for each in words])
  brevity = np.minimum(0, 1 - lengths[None, :] / lengths[:, None])
  mean = log_precision / np.maximum(num_orders, 1)[:, None]
  return 100 * np.where(has_match, np.exp(brevity + mean), 0)


def _common_ngrams(
  tokens: Sequence[np.ndarray], max_order: int
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Return (<int64>[n] numbers of n-grams, <float64>[n, n] numbers of common n-grams) for each order from 1.

  Args:
    tokens: <uint32>[length] of each of the n texts.
    max_order: largest order.
  """
  num_texts = len(tokens)
  lengths = np.array([len(each) for each in tokens])
  ends = np.repeat(np.cumsum(lengths), lengths)
  text_of = np.repeat(np.arange(num_texts), lengths)
  # [total]: ids of the tokens of all texts, and of the n-grams that start at each position.
  _, ids = np.unique(np.concatenate(tokens), return_inverse=True)
  ngrams = np.zeros(len(ids), np.int64)
  starts = np.arange(len(ids))
  found = []
  for order in range(1, max_order + 1):
    starts = starts[starts + order <= ends[starts]]
    if not len(starts):
      found.append((np.zeros(num_texts, np.int64), np.zeros((num_texts, num_texts))))
      continue
    # An n-gram is the shorter one at its start and its last token.
    longer = ngrams[starts] * len(ids) + ids[starts + order - 1]
    names, ngrams[starts] = np.unique(longer, return_inverse=True)
    keys, repeats = np.unique(text_of[starts] * len(names) + ngrams[starts], return_counts=True)
    rows, columns = np.divmod(keys, len(names))
    counts = np.bincount(text_of[starts], minlength=num_texts)
    found.append((counts, _common(rows, columns, repeats, num_texts, len(names), counts)))
  return found


def _common(
  rows: np.ndarray,
  columns: np.ndarray,
  repeats: np.ndarray,
  num_texts: int,
  num_ngrams: int,
  counts: np.ndarray,
) -> np.ndarray:
  """Return <float64>[n, n], the sum over the n-grams of the smaller number of repeats in two texts.

  Args:
    rows: <int64>[k], texts.
    columns: <int64>[k], n-grams of these texts.
    repeats: <int64>[k], number of times that the text has the n-gram.
    num_texts: number n of texts.
    num_ngrams: number of different n-grams.
    counts: <int64>[n], number of n-grams of each text.
  """
  # N-grams of a single text are common with no other text.
  num_texts_with = np.bincount(columns, minlength=num_ngrams)
  is_shared = num_texts_with >= 2
  new_columns = np.cumsum(is_shared) - 1
  kept = is_shared[columns]
  table = np.zeros((num_texts, int(is_shared.sum())), np.float32)
  table[rows[kept], new_columns[columns[kept]]] = repeats[kept]
  common = np.zeros((num_texts, num_texts))
  repeat = 1
  while table.shape[1]:
    # min(a, b) is the number of r >= 1 with a >= r and b >= r.
    has_repeat = (table >= repeat).astype(np.float32)
    common += has_repeat @ has_repeat.T
    repeat += 1
    table = table[:, table.max(axis=0) >= repeat]
  np.fill_diagonal(common, counts)
  return common
