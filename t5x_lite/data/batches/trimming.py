"""Examples trimmed to the task feature lengths, according to `DatasetConfig.trim_output_features`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x_lite.data.batches.features import trim
from t5x_lite.data.builtin_tasks import ExampleTable


class TrimmedExamples(ExampleTable):
  """The examples of another table, trimmed to the task feature lengths."""

  def __init__(self, table: ExampleTable, lengths: Mapping[str, int], trim_output_features: bool):
    """Args:
    table: table of untrimmed examples.
    lengths: task feature name to the maximal number of ids; empty for no trimming.
    trim_output_features: whether longer features are trimmed; otherwise they are an error.
    """
    self.whole = table
    self._lengths = dict(lengths)
    self._trim_output_features = trim_output_features

  def __len__(self) -> int:
    return len(self.whole)

  @property
  def fingerprint(self) -> str:
    """See base class."""
    return self.whole.fingerprint

  @property
  def num_skipped(self) -> int:
    """See base class."""
    return self.whole.num_skipped

  def record(self, number: int) -> Mapping[str, Any]:
    """See base class."""
    return self.whole.record(number)

  @property
  def earlier(self) -> 'TrimmedExamples | None':
    """See base class."""
    if self.whole.earlier is None:
      return None
    return TrimmedExamples(self.whole.earlier, self._lengths, self._trim_output_features)

  @property
  def end_ids(self) -> Mapping[str, int]:
    """See base class."""
    return self.whole.end_ids

  def trim(self, example: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a trimmed example, features int32[<= length].

    Raises:
      DataError: a feature is too long and `trim_output_features` is False.
    """
    return trim(example, self._lengths, self._trim_output_features, self.end_ids)

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    """See base class."""
    return [self.trim(example) for example in self.whole.examples(seed, numbers)]

  def texts(self, number: int, seed: int = 0) -> dict[str, Any]:
    """See base class."""
    return self.whole.texts(number, seed)
