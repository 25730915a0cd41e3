"""Examples cut to the task feature lengths, as `DatasetConfig.trim_output_features` says; tables give whole ones."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x_lite.data.builtin_tasks import ExampleTable
from t5x_lite.data.features import trim


class TrimmedExamples(ExampleTable):
  """The examples of another table, cut to the task feature lengths."""

  def __init__(self, table: ExampleTable, lengths: Mapping[str, int], trim_output_features: bool):
    """Args:
      table: gives the whole examples.
      lengths: task feature name to the most ids; empty keeps everything.
      trim_output_features: cut longer features instead of raising an error.
    """
    self.whole = table
    self._lengths = dict(lengths)
    self._trim_output_features = trim_output_features

  def __len__(self) -> int:
    return len(self.whole)

  @property
  def fingerprint(self) -> str:
    return self.whole.fingerprint

  @property
  def end_ids(self) -> Mapping[str, int]:
    return self.whole.end_ids

  def trim(self, example: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns one whole example after the cut.

    Raises:
      DataError: a feature is longer and `trim_output_features` is False.
    """
    return trim(example, self._lengths, self._trim_output_features, self.end_ids)

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    return [self.trim(example) for example in self.whole.examples(seed, numbers)]

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    return self.whole.texts(number, seed)
