"""Random data of any shape, for benchmarks and for trying a model without a dataset."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from t5x_lite.data import philox
from t5x_lite.data.builtin_tasks import ExampleTable
from t5x_lite.data.features import FeatureConverter, Row
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.vocabularies import PassThroughVocabulary
from t5x_lite.errors import ConfigError

_EOS_ID = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticFeature:
  """A model feature of random numbers.

  Attributes:
    shape: of one example, without the batch dim.
    dtype: an integer or floating type's name.
    maximum: integers lie in [0, maximum), floating numbers in [0, maximum).
  """

  shape: tuple[int, ...]
  dtype: str = 'int32'
  maximum: float = 1.0

  def __post_init__(self) -> None:
    if np.dtype(self.dtype).kind not in 'iuf':
      raise ConfigError(f'SyntheticFeature.dtype is {self.dtype!r}, expected an integer or floating type.')
    if not self.maximum > 0:
      raise ConfigError(f'SyntheticFeature.maximum is {self.maximum!r}, expected a positive number.')
    if np.dtype(self.dtype).kind != 'f' and not 1 <= self.maximum <= min(2**32, int(np.iinfo(self.dtype).max) + 1):
      raise ConfigError(f'SyntheticFeature.maximum is {self.maximum!r}, expected 1 or more for the integers of '
                        f'{self.dtype}, and no more than these hold or 2**32.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSource:
  """`DatasetConfig.mixture_or_task_name` of random data; set `DatasetConfig.source = 'synthetic'`.

  By default it gives `inputs` and `targets` of random ids that end with id 1, with the lengths that
  `DatasetConfig.task_feature_lengths` says, and the model's feature converter does the rest.

  Attributes:
    vocab_size: ids lie in [2, vocab_size).
    shortest: the shortest example as a fraction of the full length; lengths are uniform from there to the full length.
    num_examples: examples in an epoch, the same in each.
    features: model features of any shape instead, given to the model as they are; `task_feature_lengths` is then {}.
    name: names the folders of results.
  """

  vocab_size: int = 32128
  shortest: float = 1.0
  num_examples: int = 1024
  features: Mapping[str, SyntheticFeature] | None = None
  name: str = 'synthetic'

  def __post_init__(self) -> None:
    if self.vocab_size < 3:
      raise ConfigError(f'SyntheticSource.vocab_size is {self.vocab_size}, expected at least 3.')
    if not 0 < self.shortest <= 1:
      raise ConfigError(f'SyntheticSource.shortest is {self.shortest}, expected a fraction above 0, at most 1.')
    if self.num_examples < 1:
      raise ConfigError(f'SyntheticSource.num_examples is {self.num_examples}, expected at least 1.')

  @property
  def vocabulary(self) -> PassThroughVocabulary:
    """Of inputs and targets."""
    return PassThroughVocabulary(self.vocab_size, eos_id=_EOS_ID)


class SyntheticExamples(ExampleTable):
  """Random ids, or random features of any shape."""

  def __init__(self, source: SyntheticSource, split: str, lengths: Mapping[str, int]):
    """Args:
      source: what to make.
      split: any name; each has its own numbers.
      lengths: task feature lengths, unused where the source has features of its own.
    """
    self._source = source
    self._split = split
    ids = source.vocab_size - 2
    self._features = source.features or {
        feature: SyntheticFeature(shape=(length,), maximum=ids) for feature, length in lengths.items()}

  def __len__(self) -> int:
    return self._source.num_examples

  @property
  def fingerprint(self) -> str:
    return repr((self._source.vocab_size, self._source.shortest, sorted(self._features.items())))

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    numbers = np.asarray(numbers) % len(self)
    arrays = {}
    for name, feature in self._features.items():
      key, counter = philox.fold(seed, self._split, name)
      seeds = philox.as_seeds(np.full(len(numbers), key), numbers.astype(np.uint64) + counter)
      words = philox.random_words(seeds, int(np.prod(feature.shape, dtype=np.int64)))
      if np.dtype(feature.dtype).kind == 'f':
        values = words.astype(np.float64) * (feature.maximum / 2**32)
      else:
        values = words % np.uint64(feature.maximum)
      arrays[name] = values.astype(feature.dtype).reshape(len(numbers), *feature.shape)
    examples = [{name: array[i] for name, array in arrays.items()} for i in range(len(numbers))]
    if self._source.features:
      return examples
    cut = philox.uniform(philox.as_seeds(*philox.fold(seed, self._split, 'length').tolist())[None], len(self))[0]
    return [self._finish(example, float(fraction)) for example, fraction in zip(examples, cut[numbers], strict=True)]

  def _finish(self, example: Mapping[str, np.ndarray], fraction: float) -> dict[str, np.ndarray]:
    """Returns ids from 2 on, of a random length, the last one ending the sequence."""
    finished = {}
    for name, values in example.items():
      shortest = int(np.ceil(len(values) * self._source.shortest))
      length = shortest + int(fraction * (len(values) - shortest + 1))
      finished[name] = values[:length] + 2
      finished[name][-1] = _EOS_ID
    return finished


class StackConverter(FeatureConverter):
  """Gives the features of a `SyntheticSource` to the model as they are."""

  TASK_FEATURES = ()

  def __init__(self, features: Mapping[str, SyntheticFeature]):
    """Args:
      features: model feature name to its shape and dtype.
    """
    self._features = features

  def element_spec(self, lengths: Mapping[str, int], batch_size: int, pack: bool) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((batch_size, *feature.shape), np.dtype(feature.dtype))
            for name, feature in self._features.items()}

  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    return {name: np.stack([row[0][name] if row else np.zeros(feature.shape, feature.dtype) for row in rows])
            for name, feature in self._features.items()}


def get_synthetic(source: Any) -> SyntheticSource:
  """Returns the source that `DatasetConfig.mixture_or_task_name` says: itself, or the default one for 'synthetic'.

  Raises:
    ConfigError: it is neither.
  """
  if isinstance(source, SyntheticSource):
    return source
  if source == 'synthetic':
    return SyntheticSource()
  raise ConfigError(f"With DatasetConfig.source 'synthetic', mixture_or_task_name is {source!r}, expected 'synthetic' "
                    'or a SyntheticSource.')
