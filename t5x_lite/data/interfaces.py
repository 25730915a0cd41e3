"""Interfaces of data sources: host iterators, batches and tasks for evaluation, examples for inference."""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import inspect
import logging
from typing import Any

import jax
import numpy as np

from t5x_lite.data.batches.truncation import Truncation
from t5x_lite.data.text.ids import decode_ids
from t5x_lite.data.vocabularies import Vocabulary

# Model feature name to this process's rows: [rows, ...].
HostBatch = dict[str, np.ndarray]
# Files of a saved position by name.
DataState = dict[str, bytes]
# seqio's metric function: fn(targets, predictions) -> {metric name: value}.
MetricFn = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]]
# Field of an example with all texts of a target that has several; training uses the first.
REFERENCES = 'targets_references'


class ScoreWithSignature(float):
  """A value of a metric with a text that says how it is computed, such as sacrebleu's signature.

  Attributes:
    signature: the text. Log and `metrics.jsonl` have it as `<metric>_signature`.
  """

  signature: str

  def __new__(cls, value: float, signature: str = '') -> 'ScoreWithSignature':
    """Return the number `value` with a signature."""
    score = super().__new__(cls, value)
    score.signature = signature
    return score


def metric_parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
  """Return the names of a metric function's parameters, which say what it gets, as in seqio; () if unknown."""
  try:
    return tuple(inspect.signature(fn).parameters)
  except (TypeError, ValueError):  # not a function of Python
    return ()


class HostIterator(abc.ABC):
  """An iterator of this process's rows of each global batch, with a position that can be saved and set.

  It is endless, or raises `StopIteration` after its last batch, which ends the run. A source that is empty, or has
  fewer records than when its position was saved, raises `DataError`. A source whose data may be available later
  (network, other machines) raises `DataUnavailableError` or an `OSError` and is read again at its last position.

  Attributes:
    has_cheap_state: True if `get_state` is fast enough to be called after every batch. Other sources are asked for
      their position when the run saves; if they then stall or fail, batches are counted from the last position.
    is_endless: True if the data does not end. Otherwise a run waits after each stretch of steps, such as before an
      evaluation, until it is known whether another batch follows.
    ends_together: True if all processes have the same number of batches, or endless data. Otherwise processes agree
      before each step whether the data of one of them has ended, which costs time.
    handles_process_count: True if `set_state` continues correctly from the position of process 0 of a run with another
      number of processes, or raises an error. Otherwise a run that resumes with another number warns.
  """

  has_cheap_state = False
  is_endless = False
  ends_together = False
  handles_process_count = False

  @property
  @abc.abstractmethod
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Feature name to the shape and dtype of the *global* batch, [batch, ...]."""

  @abc.abstractmethod
  def __next__(self) -> HostBatch:
    """Return this process's rows of the next batch, [rows of the process, ...] by feature name."""

  @abc.abstractmethod
  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    """Return the exact position; call between batches.

    Args:
      undelivered: the last batches yielded by this iterator that are not used yet, e.g. those in a prefetch queue. The
        position is the one before them, so that they are read again after `set_state`.
    """

  @abc.abstractmethod
  def set_state(self, state: DataState) -> None:
    """Go to a saved position.

    Raises:
      DataError: the state belongs to another source or configuration; the message has the differences.
    """

  def __iter__(self) -> Iterator[HostBatch]:
    return self

  def sample_truncation(self) -> Truncation | None:
    """Return statistics of trimmed ids in a sample of examples, or None; does not change the position."""
    return None

  def close(self) -> None:  # noqa: B027  # Most iterators have nothing to free.
    """Free threads and files; the iterator cannot be used afterwards."""


class EvalBatches:
  """A finite sequence of host batches that can be iterated several times.

  The last batch is padded with rows of zeros, whose loss weights are zero.
  """

  def __init__(
    self,
    batches_fn: Callable[[], Iterator[HostBatch]],
    element_spec: dict[str, jax.ShapeDtypeStruct],
    num_batches: int,
    num_examples: int,
  ):
    """Args:
    batches_fn: function that starts a new pass over the batches.
    element_spec: feature name to the shape and dtype of the global batch.
    num_batches: number of batches in one pass.
    num_examples: number of rows in one pass, without padding rows.
    """
    self._batches_fn = batches_fn
    self.element_spec = element_spec
    self.num_batches = num_batches
    self.num_examples = num_examples

  def __len__(self) -> int:
    return self.num_batches

  def __iter__(self) -> Iterator[HostBatch]:
    return self._batches_fn()

  def as_numpy_iterator(self) -> Iterator[HostBatch]:
    """Start a new pass; the name of a `tf.data.Dataset`, which T5X's functions return."""
    return iter(self)


def identity_postprocess(text: Any, *, example: Mapping[str, Any], is_target: bool) -> Any:
  """Return `text`; the default postprocessor."""
  del example, is_target
  return text


# Outputs of a model for metrics, by T5X's names: 'predict' is decoded ids, 'score' log likelihoods of the targets;
# 'predict_with_aux' and 'score_with_intermediates' have further arrays.
OUTPUT_KINDS = ('predict', 'score', 'predict_with_aux', 'score_with_intermediates')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputMetric:
  """A metric that includes decoding and postprocessing, like seqio's metric objects.

  Attributes:
    kind: output of the model that it uses, one of `OUTPUT_KINDS`.
    compute_fn: function from the outputs of all examples, in order, to {metric name: value}. The outputs are an array
      [num_examples, ...], or (array, tree of further arrays).
  """

  kind: str
  compute_fn: Callable[[Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTask:
  """A task for evaluation by decoding, with every example of a split once.

  Attributes:
    name: name of the task and of its folder of results.
    batches: re-iterable of (indices int32[rows], this process's rows of a batch); index i is `examples[i]`, -1 a
      padding row. `len` is the number of batches, equal on all processes.
    examples: all examples of the split, equal on all processes: `inputs` and `targets` ids, and if available the texts
      `inputs_pretokenized` and `targets_pretokenized`.
    metric_fns: functions of (targets, predictions), both after `postprocess`. Those whose second parameter is called
      `scores` become `score_metric_fns`.
    postprocess: `fn(text, example=..., is_target=...)`, for a decoded prediction or the text of a target.
    output_vocabulary: vocabulary of predictions and targets.
    element_spec: feature name to shape and dtype of the global batch.
    score_metric_fns: functions of (targets, scores), for log likelihoods of the targets.
    predict_with_aux_metric_fns: functions of (targets, predictions, aux_values).
    output_metrics: metrics of raw outputs.
    rows: feature name to [num_examples, ...], the untrimmed model features of all `examples` on every process, if they
      are kept in memory; None if `batches` prepares them again.
    own: this process's rows of a global batch.
  """

  name: str
  batches: 'IndexedBatches'
  examples: Sequence[Mapping[str, Any]]
  metric_fns: Sequence[MetricFn]
  postprocess: Callable[..., Any]
  output_vocabulary: Any
  element_spec: dict[str, jax.ShapeDtypeStruct]
  score_metric_fns: Sequence[MetricFn] = ()
  predict_with_aux_metric_fns: Sequence[Callable[..., Mapping[str, Any]]] = ()
  output_metrics: Sequence[OutputMetric] = ()
  rows: Mapping[str, np.ndarray] | None = None
  own: slice = dataclasses.field(default_factory=lambda: slice(None))

  def __post_init__(self) -> None:
    # `data.metrics` returns functions of both kinds in one list, as the tasks of seqio take them.
    functions = {'metric_fns': [], 'score_metric_fns': [*self.score_metric_fns]}
    for fn in self.metric_fns:
      if metric_parameters(fn)[1:2] == ('scores',):
        functions['score_metric_fns'].append(fn)
      else:
        functions['metric_fns'].append(fn)
    for name, fns in functions.items():
      object.__setattr__(self, name, tuple(fns))

  def call_score_metric(
    self, fn: Callable[..., Any], targets: Sequence[Any], scores: Sequence[float]
  ) -> Any:
    """Return the result of one of `score_metric_fns`.

    Args:
      fn: the function. If it has a parameter `num_tokens`, it gets the number of target ids of each example.
      targets: result of `targets`.
      scores: log likelihoods of the targets.
    """
    if 'num_tokens' not in metric_parameters(fn):
      return fn(targets, scores)
    return fn(targets, scores, num_tokens=count_tokens(self.examples))

  def targets(self) -> list[Any]:
    """Return the targets for the metric functions: each example's target text after `postprocess`."""
    targets = []
    for example in self.examples:
      text = example.get('targets_pretokenized')
      if text is None:
        text = self.decode(example['targets'])
      targets.append(self.postprocess(text, example=example, is_target=True))
    return targets

  def decode(self, ids: Sequence[int]) -> Any:
    """Return the text of `ids`, with sentinels as in the texts of the task; seqio's tasks drop those of bytes."""
    if isinstance(self.output_vocabulary, Vocabulary):
      return decode_ids(ids, self.output_vocabulary)
    return self.output_vocabulary.decode(ids)

  @property
  def kinds(self) -> list[str]:
    """Outputs that the task's metrics need, in the order of `OUTPUT_KINDS`."""
    wanted = {metric.kind for metric in self.output_metrics}
    if self.metric_fns:
      wanted.add('predict')
    if self.score_metric_fns:
      wanted.add('score')
    if self.predict_with_aux_metric_fns:
      wanted.add('predict_with_aux')
    return [kind for kind in OUTPUT_KINDS if kind in wanted]


def count_tokens(examples: Sequence[Mapping[str, Any]]) -> list[int]:
  """Return the number of target ids of each example, without padding."""
  return [int(np.count_nonzero(example['targets'])) for example in examples]


class IndexedBatches:
  """A finite, re-iterable sequence of (indices, host batch)."""

  def __init__(
    self, batches_fn: Callable[[], Iterator[tuple[np.ndarray, HostBatch]]], num_batches: int
  ):
    """Args:
    batches_fn: function that starts a new pass.
    num_batches: number of batches in one pass.
    """
    self._batches_fn = batches_fn
    self.num_batches = num_batches

  def __len__(self) -> int:
    return self.num_batches

  def __iter__(self) -> Iterator[tuple[np.ndarray, HostBatch]]:
    return self._batches_fn()


@dataclasses.dataclass(frozen=True)
class Example:
  """A prepared example.

  Attributes:
    fields: fields for the results: texts (`inputs_pretokenized`), ids, and further fields of the source.
    row: arrays from which `ExampleSource.convert` makes a row.
    is_cut: whether the inputs or targets were trimmed.
  """

  fields: Mapping[str, Any]
  row: Mapping[str, np.ndarray]
  is_cut: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitLengths:
  """Lengths of the examples of a split.

  Attributes:
    identity: JSON values that determine the examples, such as a hash of the files; kept lengths are used while they are
      the same. None if nothing identifies them: the lengths are not kept.
    examples: task feature name to number of ids, with the end-of-sequence id and not trimmed, for each example.
  """

  identity: Mapping[str, Any] | None
  examples: Iterator[Mapping[str, int]]


class ExampleSource(abc.ABC):
  """A finite, re-iterable sequence of examples for inference, in the source's order.

  A pass may start anywhere without tokenizing the skipped examples, so that resuming is fast and several workers can
  share a source.

  Attributes:
    name: name of the result files.
    identity: JSON values that determine the examples and their order.
    num_examples: number of examples; None if unknown before the end.
    is_exact: False if `num_examples` is an estimate.
    num_skipped: number of unusable entries, which are skipped.
    has_targets: whether the examples have targets, which scoring needs.
  """

  name: str
  identity: dict[str, Any]
  num_examples: int | None
  is_exact: bool = True
  num_skipped: int = 0
  has_targets: bool = True

  @abc.abstractmethod
  def records(self, first: int = 0) -> Iterator[Any]:
    """Yield the examples from number `first` on in a raw form, without tokenizing them."""

  @abc.abstractmethod
  def prepare(self, record: Any) -> Example:
    """Return the tokenized example of a value that `records` yielded."""

  @abc.abstractmethod
  def element_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return model feature name to the shape and dtype of a batch, [batch_size, ...]."""

  @abc.abstractmethod
  def convert(self, examples: Sequence[Example], num_rows: int) -> HostBatch:
    """Return a batch of `num_rows` rows: the rows of `examples`, then rows of zeros."""

  def close(self) -> None:  # noqa: B027  # Most sources have nothing to free.
    """Free files; the source cannot be used afterwards."""


def take_rows(rows: Mapping[str, np.ndarray], indices: np.ndarray) -> HostBatch:
  """Return rows by number, with zeros for the number -1.

  Args:
    rows: feature name to [num_examples, ...].
    indices: int[n], numbers of rows, or -1.

  Returns:
    Feature name to [n, ...].

  >>> take_rows({'x': np.array([[1, 2], [3, 4]])}, np.array([1, -1]))['x'].tolist()
  [[3, 4], [0, 0]]
  """
  batch = {}
  for name, array in rows.items():
    batch[name] = array[np.maximum(indices, 0)]
    batch[name][indices < 0] = 0
  return batch


def batches_of_rows(rows: Mapping[str, np.ndarray], batch_size: int, own: slice) -> IndexedBatches:
  """Return batches of this process's rows, in order; the last batch is padded with zeros of index -1.

  Args:
    rows: feature name to [num_examples, ...].
    batch_size: rows of a global batch.
    own: this process's rows of a global batch.
  """
  num_examples = len(next(iter(rows.values())))

  def batches() -> Iterator[tuple[np.ndarray, HostBatch]]:
    for start in range(0, num_examples, batch_size):
      indices = np.arange(start, start + batch_size, dtype=np.int32)[own]
      indices[indices >= num_examples] = -1
      yield indices, take_rows(rows, indices)

  return IndexedBatches(batches, -(-num_examples // batch_size))


def warn_of_omitted_tasks(tasks: Sequence[EvalTask], names: Sequence[str]) -> None:
  """Warn of tasks without metrics if other tasks have metrics; otherwise the caller raises an error."""
  if not tasks:
    return
  for name in names:
    logging.getLogger(__name__).warning(
      '%s has no metrics: omitted from the evaluation by decoding.', name
    )
