"""Metrics of predicted texts, in seqio's signature `fn(targets, predictions) -> {name: value}`, without TensorFlow.

`metrics` returns them by name. A target that is a list has several references. Values are those of the reference
implementations where there is one: sacrebleu, rouge-score, and T5's `t5.evaluation.metrics` (Raffel et al., 2020).
"""

import collections
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import contextlib
import functools
import itertools
import math
import re
import string
from typing import Any

import numpy as np

from t5x_lite import checks
from t5x_lite.data.interfaces import MetricFn
from t5x_lite.data.interfaces import ScoreWithSignature
from t5x_lite.errors import DataError, did_you_mean, needs_packages


def metrics(names: str | Sequence[str], *more: str) -> tuple[MetricFn, ...]:
  """Return metric functions by name, for the `metric_fns` of a task or of `InferenceEvalConfig`.

  In gin: `file_task.metric_fns = @data.metrics()` with `data.metrics.names = ['bleu', 'rougeL']`.

  Args:
    names: a name, several with commas between them, or a list of names: accuracy, bleu, bleu_t5, cer, chrf,
      exact_match, macro_f1, matthews, pearson, perplexity, rouge1, rouge2, rougeL, rougeLsum, spearman, squad,
      token_f1, wer.
    *more: further names.

  Returns:
    A function for each name. It returns the metric under its name, except that squad returns `em` and `f1`.

  Raises:
    ConfigError: a name is unknown, the list is empty, or sacrebleu or rouge-score is needed and not installed.

  >>> [metric(['a b', 'c'], ['a', 'c']) for metric in metrics('exact_match', 'wer')]
  [{'exact_match': 0.5}, {'wer': 0.3333333333333333}]
  """
  if isinstance(names, str):
    names = [names]
  return tuple(_FACTORIES[name]() for name in metric_names(','.join(map(str, [*names, *more]))))


def metric_names(text: str) -> tuple[str, ...]:
  """Return the names in a list with commas, such as 'bleu,chrf', each once.

  Raises:
    ConfigError: a name is unknown, or the list is empty.
  """
  names = [name.strip() for name in text.split(',')]
  for name in names:
    if name not in _FACTORIES:
      hint = did_you_mean(name, _FACTORIES).strip()
      raise checks.invalid('data.metrics', 'names', 'names of metrics', name, hint)
  return tuple(dict.fromkeys(names))


def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Return the fraction, 0 to 1, of predictions that equal their target, or one of the texts if it is a list.

  Raises:
    ValueError: the numbers of targets and predictions differ.

  >>> exact_match(['if', 'for'], ['if', 'while'])
  {'exact_match': 0.5}
  """
  num_equal = sum(
    target == prediction
    or (isinstance(prediction, str) and isinstance(target, (list, tuple)) and prediction in target)
    for target, prediction in zip(targets, predictions, strict=True)
  )
  return {'exact_match': num_equal / max(len(targets), 1)}


def edit_similarity(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Return the mean similarity, 0 to 1, of predictions to their target.

  It is 1 - distance / length of the longer text, with the distance of Levenshtein (1966): the least number of inserted,
  deleted and replaced characters. Two empty texts have 1.

  Raises:
    ValueError: the numbers of targets and predictions differ.

  >>> edit_similarity(['abcd', 'x'], ['abed', 'x'])
  {'edit_similarity': 0.875}
  """
  similarities = [
    1 - _edit_distance(target, prediction) / max(len(target), len(prediction), 1)
    for target, prediction in zip(targets, predictions, strict=True)
  ]
  return {'edit_similarity': sum(similarities) / max(len(similarities), 1)}


def _edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
  """Return the least number of inserted, deleted and replaced elements."""
  numbers: dict[Hashable, int] = {}
  for element in itertools.chain(first, second):
    numbers.setdefault(element, len(numbers))
  columns = np.arange(len(second) + 1)
  wanted = np.array([numbers[element] for element in second], np.int64)
  distances = columns
  for row, element in enumerate(first, start=1):
    replaced = distances[:-1] + (wanted != numbers[element])
    distances = np.concatenate([[row], np.minimum(replaced, distances[1:] + 1)])
    # Insertions: the least of the distances to the left, plus one for each step from there.
    distances = np.minimum.accumulate(distances - columns) + columns
  return int(distances[-1])


def _references(name: str, target: Any) -> Sequence[Any]:
  """Return the references of a target."""
  if not isinstance(target, (list, tuple)):
    return [target]
  if not target:
    raise DataError(
      f'The metric {name!r} needs a reference for each prediction, got an empty list as target. '
      'Remove such examples, or let the postprocessor return an empty text.'
    )
  return target


def _texts(
  name: str, targets: Sequence[Any], predictions: Sequence[Any]
) -> Iterator[tuple[Sequence[str], str]]:
  """Yield (references, prediction) of each example; raise if one of them is not a text."""
  for target, prediction in zip(targets, predictions, strict=True):
    references = _references(name, target)
    for text in (*references, prediction):
      if not isinstance(text, str):
        raise DataError(
          f'The metric {name!r} needs texts, got {text!r} of type {type(text).__name__}. Let the postprocessor '
          'of the task return texts, and decode one prediction for each example.'
        )
    yield references, prediction


def _mean_percent(name: str, values: Sequence[float]) -> dict[str, float]:
  """Return 100 times the mean under a name; 0 for no values."""
  return {name: 100.0 * sum(values) / max(len(values), 1)}


def _sacrebleu_score(
  name: str, make_fn: Callable[[], Any], targets: Sequence[Any], predictions: Sequence[Any]
) -> dict[str, float]:
  """Return the score of a metric of sacrebleu over all examples, in percent, with its signature."""
  pairs = list(_texts(name, targets, predictions))
  if not pairs:
    return {name: 0.0}
  # sacrebleu reads a list for each number of a reference, with None where an example has fewer.
  streams = list(itertools.zip_longest(*(references for references, _ in pairs)))
  metric = make_fn()
  score = metric.corpus_score([prediction for _, prediction in pairs], streams).score
  return {name: ScoreWithSignature(score, str(metric.get_signature()))}


def _make_bleu(name: str, tokenizer: str) -> MetricFn:
  with needs_packages(f'The metric {name!r}', 'sacrebleu', extra='metrics'):
    from sacrebleu.metrics.bleu import BLEU
  # `force` only suppresses a warning about texts that look tokenized.
  make_fn = functools.partial(BLEU, tokenize=tokenizer, force=True)
  return functools.partial(_sacrebleu_score, name, make_fn)


def _make_chrf() -> MetricFn:
  with needs_packages("The metric 'chrf'", 'sacrebleu', extra='metrics'):
    from sacrebleu.metrics.chrf import CHRF
  return functools.partial(_sacrebleu_score, 'chrf', CHRF)


def _make_rouge(name: str) -> MetricFn:
  with needs_packages(f'The metric {name!r}', 'rouge-score', extra='metrics'):
    from rouge_score import rouge_scorer
  return functools.partial(_rouge, name, rouge_scorer.RougeScorer([name]))


def _rouge(
  name: str, scorer: Any, targets: Sequence[Any], predictions: Sequence[Any]
) -> dict[str, float]:
  """Return the mean F-measure of ROUGE in percent, with the best reference of each example."""

  def split(text: str) -> str:
    # rougeLsum compares lines; T5 makes a line of each sentence of tokenized texts.
    return text.replace(' . ', ' .\n')

  values = [
    max(scorer.score(split(each), split(prediction))[name].fmeasure for each in references)
    for references, prediction in _texts(name, targets, predictions)
  ]
  return _mean_percent(name, values)


_ARTICLES = re.compile(r'\b(a|an|the)\b')
_WITHOUT_PUNCTUATION = str.maketrans('', '', string.punctuation)


def _squad_words(text: str) -> list[str]:
  """Return the words in lower case, without punctuation and articles (Rajpurkar et al., 2016)."""
  return _ARTICLES.sub(' ', text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _words_f1(target: Sequence[str], prediction: Sequence[str]) -> float:
  """Return the F1 score of the words of a prediction; 0 if both are empty, as in SQuAD 1.1."""
  common = collections.Counter(target) & collections.Counter(prediction)
  return 2 * common.total() / max(len(target) + len(prediction), 1)


def _squad(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Return exact match and F1 score of SQuAD in percent, each with the best reference of an example."""
  equal = []
  overlaps = []
  for references, prediction in _texts('squad', targets, predictions):
    words = _squad_words(prediction)
    wanted = [_squad_words(text) for text in references]
    equal.append(float(words in wanted))
    overlaps.append(max(_words_f1(each, words) for each in wanted))
  return {**_mean_percent('em', equal), **_mean_percent('f1', overlaps)}


def _token_f1(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  return {'token_f1': _squad(targets, predictions)['f1']}


def _error_rate(
  name: str,
  split_fn: Callable[[str], Sequence[str]],
  targets: Sequence[Any],
  predictions: Sequence[Any],
) -> dict[str, float]:
  """Return the number of errors of all predictions, divided by the length of their best references."""
  num_errors = 0
  length = 0
  for references, prediction in _texts(name, targets, predictions):
    found = []
    for reference in map(split_fn, references):
      found.append((_edit_distance(reference, split_fn(prediction)), len(reference)))
    best = min(found, key=lambda each: each[0] / max(each[1], 1))
    num_errors += best[0]
    length += best[1]
  return {name: num_errors / max(length, 1)}


def _labels(
  name: str, targets: Sequence[Any], predictions: Sequence[Any]
) -> list[tuple[Hashable, Hashable]]:
  """Return (label, predicted label) of each example; of several labels, the predicted one or the first."""
  pairs = []
  for target, prediction in zip(targets, predictions, strict=True):
    if not isinstance(prediction, Hashable):
      raise DataError(
        f'The metric {name!r} needs one label as prediction, got {prediction!r}. Decode one prediction per example.'
      )
    label, *others = _references(name, target)
    if prediction in others:
      label = prediction
    pairs.append((label, prediction))
  return pairs


def _accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Return the percentage of predicted labels that equal the label."""
  pairs = _labels('accuracy', targets, predictions)
  return _mean_percent('accuracy', [label == predicted for label, predicted in pairs])


def _macro_f1(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Return the mean over the labels of the targets of their F1 scores, in percent."""
  pairs = _labels('macro_f1', targets, predictions)
  num_targets = collections.Counter(label for label, _ in pairs)
  num_predictions = collections.Counter(predicted for _, predicted in pairs)
  num_equal = collections.Counter(label for label, predicted in pairs if label == predicted)
  values = [
    2 * num_equal[label] / (count + num_predictions[label]) for label, count in num_targets.items()
  ]
  return _mean_percent('macro_f1', values)


def _matthews(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Return the correlation of Matthews (1975) for any number of labels (Gorodkin, 2004), in percent."""
  pairs = _labels('matthews', targets, predictions)
  num_targets = collections.Counter(label for label, _ in pairs)
  num_predictions = collections.Counter(predicted for _, predicted in pairs)
  num_equal = sum(label == predicted for label, predicted in pairs)
  num_pairs = len(pairs)
  chance = sum(count * num_predictions[label] for label, count in num_targets.items())
  spread_of_targets = num_pairs**2 - sum(count**2 for count in num_targets.values())
  spread_of_predictions = num_pairs**2 - sum(count**2 for count in num_predictions.values())
  product = spread_of_targets * spread_of_predictions
  if not product:  # one label only
    return {'matthews': 0.0}
  return {'matthews': 100.0 * (num_equal * num_pairs - chance) / math.sqrt(product)}


def _scaled_numbers(values: Sequence[Any]) -> np.ndarray:
  """Return the values, divided by the largest, float64[n] from -1 to 1, with NaN for what is not a finite number."""
  numbers = np.full(len(values), np.nan)
  for i, value in enumerate(values):
    with contextlib.suppress(TypeError, ValueError, OverflowError):
      numbers[i] = float(value)
  numbers[np.isinf(numbers)] = np.nan
  # Sums and squares of the scaled numbers neither overflow nor vanish.
  largest = np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0)
  if largest:
    numbers /= largest
  return numbers


def _correlation(
  name: str,
  transform_fn: Callable[[np.ndarray], np.ndarray],
  targets: Sequence[Any],
  predictions: Sequence[Any],
) -> dict[str, float]:
  """Return the correlation of Pearson of transformed numbers, in percent; 0 if one side is constant.

  A prediction that is not a finite number counts as the mean of the others, which says nothing about its target.
  """
  wanted = _scaled_numbers(targets)
  found = _scaled_numbers(predictions)
  for target, number in zip(targets, wanted, strict=True):
    if math.isnan(number):
      raise DataError(
        f'The metric {name!r} needs a finite number as target, got {target!r}. Correct the data or the postprocessor.'
      )
  is_number = np.isfinite(found)
  if is_number.any():
    found = np.where(is_number, found, found[is_number].mean())
  else:
    found = np.zeros_like(found)
  unit_vectors = []
  for column in (transform_fn(wanted), transform_fn(found)):
    if not column.size or column.min() == column.max():
      return {name: 0.0}
    column = column - column.mean()
    unit_vectors.append(column / np.linalg.norm(column))
  return {name: 100.0 * float(np.clip(unit_vectors[0] @ unit_vectors[1], -1, 1))}


def _ranks(values: np.ndarray) -> np.ndarray:
  """Return the rank of each value, float64[n]; equal values have the mean of their ranks."""
  _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _perplexity(
  targets: Sequence[Any], scores: Sequence[float], *, num_tokens: Sequence[int] | None = None
) -> dict[str, float]:
  """Return exp of the mean negative log-likelihood of a target id, with the end-of-sequence id.

  Args:
    targets: not used; the name is part of seqio's signature.
    scores: log-likelihood of each target.
    num_tokens: number of ids of each target.

  Raises:
    DataError: `num_tokens` is missing.
  """
  del targets
  if num_tokens is None:
    raise DataError(
      "The metric 'perplexity' needs the number of ids of each target, which seqio's Evaluator does not pass. "
      'Set inference_evaluator_cls = None.'
    )
  mean = -np.sum(np.asarray(scores, np.float64)) / max(sum(num_tokens), 1)
  with np.errstate(over='ignore'):  # infinite
    return {'perplexity': float(np.exp(mean))}


# Name to a function that makes the metric.
_FACTORIES: Mapping[str, Callable[[], MetricFn]] = {
  'accuracy': lambda: _accuracy,
  'bleu': functools.partial(_make_bleu, 'bleu', '13a'),
  'bleu_t5': functools.partial(_make_bleu, 'bleu_t5', 'intl'),
  'cer': lambda: functools.partial(_error_rate, 'cer', str),
  'chrf': _make_chrf,
  'exact_match': lambda: exact_match,
  'macro_f1': lambda: _macro_f1,
  'matthews': lambda: _matthews,
  'pearson': lambda: functools.partial(_correlation, 'pearson', np.asarray),
  'perplexity': lambda: _perplexity,
  'rouge1': functools.partial(_make_rouge, 'rouge1'),
  'rouge2': functools.partial(_make_rouge, 'rouge2'),
  'rougeL': functools.partial(_make_rouge, 'rougeL'),
  'rougeLsum': functools.partial(_make_rouge, 'rougeLsum'),
  'spearman': lambda: functools.partial(_correlation, 'spearman', _ranks),
  'squad': lambda: _squad,
  'token_f1': lambda: _token_f1,
  'wer': lambda: functools.partial(_error_rate, 'wer', str.split),
}
