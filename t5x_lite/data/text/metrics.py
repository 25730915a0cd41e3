"""Metrics of decoded text, in seqio's signature `fn(targets, predictions) -> {name: value}`, without TensorFlow."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
  """Return the fraction, 0 to 1, of predictions that equal their target.

  Raises:
    ValueError: the numbers of targets and predictions differ.

  >>> exact_match(['if', 'for'], ['if', 'while'])
  {'exact_match': 0.5}
  """
  num_equal = sum(
    target == prediction for target, prediction in zip(targets, predictions, strict=True)
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


def _edit_distance(first: str, second: str) -> int:
  columns = np.arange(len(second) + 1)
  characters = np.array([ord(character) for character in second], np.int64)
  distances = columns
  for number, character in enumerate(first, start=1):
    replaced = distances[:-1] + (characters != ord(character))
    distances = np.concatenate([[number], np.minimum(replaced, distances[1:] + 1)])
    # Insertions: the least of the distances to the left, plus one for each step from there.
    distances = np.minimum.accumulate(distances - columns) + columns
  return int(distances[-1])
