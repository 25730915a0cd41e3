"""Interfaces of data sources: host iterators, batches and tasks to evaluate on, examples to infer from."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
import logging
from typing import Any

import jax
import numpy as np

from t5x_lite.data.truncation import Truncation

# Model feature name to this process's rows: [rows, ...].
HostBatch = dict[str, np.ndarray]
# Files of a saved position: name to content.
DataState = dict[str, bytes]
# seqio's metric function: fn(targets, predictions) -> {metric name: value}.
MetricFn = Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]]


class HostIterator(abc.ABC):
  """An endless iterator of this process's rows of each global batch, with a position that can be saved and set.

  A source that is empty, or that ends against expectation, raises `DataError`; one that may have its data later
  (a network, another machine) raises `DataUnavailableError` or an `OSError`, and is read again at its last position.

  Attributes:
    has_cheap_state: `get_state` costs so little that it is called after every batch. The position of other sources is
      asked for when the run is saved; if they stall or fail then, batches are counted from the position before.
  """

  has_cheap_state = False

  @property
  @abc.abstractmethod
  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Feature name to the shape and dtype of the *global* batch."""

  @abc.abstractmethod
  def __next__(self) -> HostBatch:
    """Returns the next batch: this process's rows."""

  @abc.abstractmethod
  def get_state(self, undelivered: Sequence[HostBatch] = ()) -> DataState:
    """Returns the exact position; call between batches.

    Args:
      undelivered: the last batches that this iterator yielded but that nobody has used yet (a prefetcher holds them).
        The state is the one before them: after `set_state` they come again.
    """

  @abc.abstractmethod
  def set_state(self, state: DataState) -> None:
    """Goes to a saved position.

    Raises:
      DataError: the state is of another source or configuration, which the message names.
    """

  def __iter__(self) -> Iterator[HostBatch]:
    return self

  def sample_truncation(self) -> Truncation | None:
    """Returns how much of a sample of the examples is cut; None where it is not known. The position stays."""
    return None

  def close(self) -> None:
    """Frees threads and files. The iterator cannot be used afterwards."""


class EvalBatches:
  """A finite sequence of host batches that can be iterated again and again.

  The last batch is filled up with rows of zeros, whose loss weights are zero.
  """

  def __init__(self, batches_fn: Callable[[], Iterator[HostBatch]], element_spec: dict[str, jax.ShapeDtypeStruct],
               num_batches: int, num_examples: int):
    """Args:
      batches_fn: starts a new pass over the batches.
      element_spec: feature name to the shape and dtype of the global batch.
      num_batches: batches in one pass.
      num_examples: rows in one pass that are not filling.
    """
    self._batches_fn = batches_fn
    self.element_spec = element_spec
    self.num_batches = num_batches
    self.num_examples = num_examples

  def __len__(self) -> int:
    return self.num_batches

  def __iter__(self) -> Iterator[HostBatch]:
    return self._batches_fn()


def identity_postprocess(text: Any, *, example: Mapping[str, Any], is_target: bool) -> Any:
  """Returns `text`: the postprocessor of a task that has none."""
  del example, is_target
  return text


# What a metric can ask a model for, by T5X's names. 'predict' is decoded ids, 'score' log likelihoods of the targets;
# with 'predict_with_aux' and 'score_with_intermediates' come further arrays.
OUTPUT_KINDS = ('predict', 'score', 'predict_with_aux', 'score_with_intermediates')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputMetric:
  """A metric that decodes and postprocesses by itself, as seqio's metric objects do.

  Attributes:
    kind: which output it judges, one of `OUTPUT_KINDS`.
    compute_fn: maps the outputs of all examples, in order, to {metric name: value}: an array [num_examples, ...], or
      (array, tree of arrays) where more comes with it.
  """

  kind: str
  compute_fn: Callable[[Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTask:
  """One task to be judged by decoding: every example of a split once.

  Attributes:
    name: the task's name, which names its folder of results.
    batches: re-iterable of (indices int32[rows], host batch); index i is `examples[i]`, -1 marks a filling row.
      Iterating it gives this process's rows; `len` is the number of batches, the same on every process.
    examples: every example of the split, the same list on every process: `inputs` and `targets` ids, and the texts
      `inputs_pretokenized` and `targets_pretokenized` where the task keeps them.
    metric_fns: functions of (targets, predictions), both after `postprocess`.
    postprocess: `fn(text, example=..., is_target=...)`, of a decoded prediction or of a target's text.
    output_vocabulary: decodes predictions and targets.
    element_spec: feature name to shape and dtype of the global batch.
    score_metric_fns: functions of (targets, scores) that the task has besides, for log likelihoods of its targets.
    predict_with_aux_metric_fns: functions of (targets, predictions, aux_values) that the task has besides.
    output_metrics: metrics of raw outputs that the task has besides.
    rows: feature name to [num_examples, ...], the model features of `examples` in full length, where they are kept in
      memory; None where `batches` prepares them anew. Every process has all of them.
    own: which rows of a global batch are this process's.
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

  def targets(self) -> list[Any]:
    """Returns what the metric functions compare with: every example's target text after `postprocess`."""
    targets = []
    for example in self.examples:
      text = example.get('targets_pretokenized')
      if text is None:
        text = self.output_vocabulary.decode(example['targets'])
      targets.append(self.postprocess(text, example=example, is_target=True))
    return targets

  @property
  def kinds(self) -> list[str]:
    """The outputs that the task's metrics ask for, in the order of `OUTPUT_KINDS`."""
    wanted = {metric.kind for metric in self.output_metrics}
    wanted |= {kind for kind, fns in (('predict', self.metric_fns), ('score', self.score_metric_fns),
                                      ('predict_with_aux', self.predict_with_aux_metric_fns)) if fns}
    return [kind for kind in OUTPUT_KINDS if kind in wanted]


class IndexedBatches:
  """A finite, re-iterable sequence of (indices, host batch)."""

  def __init__(self, batches_fn: Callable[[], Iterator[tuple[np.ndarray, HostBatch]]], num_batches: int):
    """Args:
      batches_fn: starts a new pass.
      num_batches: batches in one pass.
    """
    self._batches_fn = batches_fn
    self.num_batches = num_batches

  def __len__(self) -> int:
    return self.num_batches

  def __iter__(self) -> Iterator[tuple[np.ndarray, HostBatch]]:
    return self._batches_fn()


@dataclasses.dataclass(frozen=True)
class Example:
  """One example, ready for a batch.

  Attributes:
    fields: what may be shown of it: texts (`inputs_pretokenized`), ids, and what else the source has of it.
    row: what `ExampleSource.convert` makes a row of.
    is_cut: whether its inputs or targets were longer than the model reads.
  """

  fields: Mapping[str, Any]
  row: Mapping[str, np.ndarray]
  is_cut: bool = False


class ExampleSource(abc.ABC):
  """A finite sequence of examples for inference, each once, in the source's order, again and again.

  A pass may start anywhere, and what is passed over is not tokenized, so that resuming is cheap and several workers can
  share a source.

  Attributes:
    name: names the files of results.
    identity: everything that decides which examples come, in which order; fit for JSON.
    num_examples: how many there are, None where that is known only at the end.
    is_exact: whether `num_examples` is a count rather than an estimate.
    num_skipped: how many entries of the source are no examples and are left out.
    has_targets: whether there are targets that could be scored.
  """

  name: str
  identity: dict[str, Any]
  num_examples: int | None
  is_exact: bool = True
  num_skipped: int = 0
  has_targets: bool = True

  @abc.abstractmethod
  def records(self, first: int = 0) -> Iterator[Any]:
    """Yields the examples from number `first` on, in a raw form that costs little."""

  @abc.abstractmethod
  def prepare(self, record: Any) -> Example:
    """Returns the example that `records` yielded; here is where tokenization takes place."""

  @abc.abstractmethod
  def element_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns model feature name to the shape and dtype of a batch."""

  @abc.abstractmethod
  def convert(self, examples: Sequence[Example], num_rows: int) -> HostBatch:
    """Returns a batch of `num_rows` rows, of which the first hold `examples` and the others zeros."""

  def close(self) -> None:
    """Frees files. The source cannot be used afterwards."""


def take_rows(rows: Mapping[str, np.ndarray], indices: np.ndarray) -> HostBatch:
  """Returns the rows of these numbers, rows of zeros for -1.

  >>> take_rows({'x': np.array([[1, 2], [3, 4]])}, np.array([1, -1]))['x'].tolist()
  [[3, 4], [0, 0]]
  """
  batch = {}
  for name, array in rows.items():
    batch[name] = array[np.maximum(indices, 0)]
    batch[name][indices < 0] = 0
  return batch


def batches_of_rows(rows: Mapping[str, np.ndarray], batch_size: int, own: slice) -> IndexedBatches:
  """Returns all rows in order, this process's part of each batch; the last batch is filled up with zeros, index -1.

  Args:
    rows: feature name to [num_examples, ...].
    batch_size: rows of a global batch.
    own: which of them are this process's.
  """
  num_examples = len(next(iter(rows.values())))

  def batches() -> Iterator[tuple[np.ndarray, HostBatch]]:
    for start in range(0, num_examples, batch_size):
      indices = np.arange(start, start + batch_size, dtype=np.int32)[own]
      indices[indices >= num_examples] = -1
      yield indices, take_rows(rows, indices)

  return IndexedBatches(batches, -(-num_examples // batch_size))


def note_left_out(tasks: Sequence[EvalTask], names: Sequence[str]) -> None:
  """Says which tasks have no metrics, where others have; a dataset in which none has is the caller's to refuse."""
  for name in names if tasks else ():
    logging.getLogger(__name__).warning('%s has no metrics: left out of the evaluation by decoding.', name)
