"""Random data of any shape, for benchmarks and for tests of a model without a dataset."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite.data.batches import philox
from t5x_lite.data.batches.features import FeatureConverter
from t5x_lite.data.batches.features import Row
from t5x_lite.data.builtin_tasks import ExampleTable
from t5x_lite.data.interfaces import HostBatch
from t5x_lite.data.vocabularies import PassThroughVocabulary

_EOS_ID = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticFeature:
  """A model feature of random numbers.

  Attributes:
    shape: shape of one example, without the batch dim.
    dtype: name of an integer or floating dtype.
    maximum: excluded upper bound of the numbers, whose lower bound is 0.
  """

  shape: tuple[int, ...]
  dtype: str = 'int32'
  maximum: float = 1.0

  def __post_init__(self) -> None:
    kind = np.dtype(self.dtype).kind
    if kind not in 'iu':
      maximum = checks.number(above=0)
    else:
      maximum = checks.number(at_least=1, at_most=min(2**32, int(np.iinfo(self.dtype).max) + 1))
    checks.check(
      'SyntheticFeature',
      vars(self),
      dtype=checks.Expectation('an integer or floating dtype', lambda _: kind in 'iuf'),
      maximum=maximum,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticSource:
  """Random data, for `DatasetConfig.mixture_or_task_name` with `DatasetConfig.source = 'synthetic'`.

  By default it has `inputs` and `targets` of random ids that end with id 1, of the lengths in
  `DatasetConfig.task_feature_lengths`, for the model's feature converter.

  Attributes:
    vocab_size: ids are in [2, vocab_size).
    shortest: minimal length as a fraction of the full length; lengths are uniform between the two.
    num_examples: number of examples in an epoch; all epochs are equal.
    features: model features of any shape, instead of ids; `task_feature_lengths` must then be {}.
    name: name of the folders of results.
  """

  vocab_size: int = 32128
  shortest: float = 1.0
  num_examples: int = 1024
  features: Mapping[str, SyntheticFeature] | None = None
  name: str = 'synthetic'

  def __post_init__(self) -> None:
    checks.check(
      'SyntheticSource',
      vars(self),
      vocab_size=checks.number(at_least=3, integer=True),
      shortest=checks.number(above=0, at_most=1),
      num_examples=checks.number(at_least=1, integer=True),
    )

  @property
  def vocabulary(self) -> PassThroughVocabulary:
    """Vocabulary of inputs and targets."""
    return PassThroughVocabulary(self.vocab_size, eos_id=_EOS_ID)


class SyntheticExamples(ExampleTable):
  """Table of random ids, or of random features of any shape."""

  def __init__(self, source: SyntheticSource, split: str, lengths: Mapping[str, int]):
    """Args:
    source: options of the data.
    split: any name, on which the numbers depend.
    lengths: task feature lengths, unused if the source has `features`.
    """
    self._source = source
    self._split = split
    ids = source.vocab_size - 2
    self._features = source.features or {
      feature: SyntheticFeature(shape=(length,), maximum=ids) for feature, length in lengths.items()
    }

  def __len__(self) -> int:
    return self._source.num_examples

  @property
  def fingerprint(self) -> str:
    """See base class."""
    return repr((self._source.vocab_size, self._source.shortest, sorted(self._features.items())))

  def examples(self, seed: int, numbers: np.ndarray) -> list[dict[str, Any]]:
    """See base class."""
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
    length_seed = philox.as_seeds(*philox.fold(seed, self._split, 'length').tolist())
    (cut,) = philox.uniform(length_seed[None], len(self))
    finished = []
    for example, fraction in zip(examples, cut[numbers], strict=True):
      finished.append(self._finish(example, float(fraction)))
    return finished

  def _finish(self, example: Mapping[str, np.ndarray], fraction: float) -> dict[str, np.ndarray]:
    """Return ids >= 2 of a random length, with the end-of-sequence id at the end."""
    finished = {}
    for name, values in example.items():
      shortest = int(np.ceil(len(values) * self._source.shortest))
      length = shortest + int(fraction * (len(values) - shortest + 1))
      finished[name] = values[:length] + 2
      finished[name][-1] = _EOS_ID
    return finished


class StackConverter(FeatureConverter):
  """Converter that passes the features of a `SyntheticSource` to the model unchanged."""

  TASK_FEATURES = ()

  def __init__(self, features: Mapping[str, SyntheticFeature]):
    """Args:
    features: model feature name to shape and dtype.
    """
    self._features = features

  def element_spec(
    self, lengths: Mapping[str, int], batch_size: int, pack: bool
  ) -> dict[str, jax.ShapeDtypeStruct]:
    """See base class."""
    return {
      name: jax.ShapeDtypeStruct((batch_size, *feature.shape), np.dtype(feature.dtype))
      for name, feature in self._features.items()
    }

  def convert(self, rows: Sequence[Row], lengths: Mapping[str, int], pack: bool) -> HostBatch:
    """See base class."""
    batch = {}
    for name, feature in self._features.items():
      padding = np.zeros(feature.shape, feature.dtype)
      batch[name] = np.stack([row[0][name] if row else padding for row in rows])
    return batch


def get_synthetic(source: Any) -> SyntheticSource:
  """Return the source of `DatasetConfig.mixture_or_task_name`, the default `SyntheticSource` for 'synthetic'.

  Raises:
    ConfigError: the value is neither 'synthetic' nor a `SyntheticSource`.
  """
  if isinstance(source, SyntheticSource):
    return source
  checks.check(
    'DatasetConfig',
    {'mixture_or_task_name': source},
    mixture_or_task_name=checks.Expectation(
      "'synthetic' or a SyntheticSource with source = 'synthetic'",
      lambda value: value == 'synthetic',
    ),
  )
  return SyntheticSource()
