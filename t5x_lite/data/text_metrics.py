"""Metrics of decoded text, in seqio's signature `fn(targets, predictions) -> {name: value}`, without TensorFlow."""

from collections.abc import Sequence
from typing import Any


def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Return the fraction, 0 to 1, of predictions that equal their target.

  Raises:
    ValueError: the numbers of targets and predictions differ.

  >>> exact_match(['if', 'for'], ['if', 'while'])
  {'exact_match': 0.5}
  """
  num_equal = sum(target == prediction for target, prediction in zip(targets, predictions, strict=True))
  return {'exact_match': num_equal / max(len(targets), 1)}
