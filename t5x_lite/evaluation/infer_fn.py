"""T5X's function that predicts or scores an enumerated dataset, for code that calls it instead of a command."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import inspect
import itertools
from typing import Any, Protocol

import jax
import numpy as np

from t5x_lite import checks
from t5x_lite import data
from t5x_lite import partitioning
from t5x_lite.errors import DataError
from t5x_lite.train_state import EvaluationState
from t5x_lite.types import Batch, PyTree

_PAIR = checks.Expectation(
  'pairs (index, example)',
  lambda pair: isinstance(pair, (tuple, list)) and len(pair) == 2,
  'Pass dataset.enumerate().',
)


class InferStepWithRngCallable(Protocol):
  """Function that predicts a batch, with a key for sampling, such as `BaseModel.predict_batch_with_aux`."""

  def __call__(
    self,
    params: Mapping[str, Any],
    batch: Batch,
    rng: jax.Array | None = None,
    flax_mutables: Mapping[str, Any] | None = None,
  ) -> PyTree:
    """Return the outputs of a batch, arrays [batch, ...]; `flax_mutables` is passed only if it is a parameter."""


class InferStepWithoutRngCallable(Protocol):
  """Function that predicts or scores a batch, such as `BaseModel.score_batch`."""

  def __call__(
    self, params: Mapping[str, Any], batch: Batch, flax_mutables: Mapping[str, Any] | None = None
  ) -> PyTree:
    """Return the outputs of a batch, arrays [batch, ...]; `flax_mutables` is passed only if it is a parameter."""


class InferFnCallable(Protocol):
  """Function that predicts or scores a dataset: the result of `get_infer_fn`."""

  def __call__(
    self,
    ds: Iterable[tuple[int, Mapping[str, np.ndarray]]],
    train_state: EvaluationState,
    rng: jax.Array | None = None,
  ) -> Any:
    """Return the outputs of a dataset; see `get_infer_fn`."""


def get_infer_fn(
  infer_step: InferStepWithRngCallable | InferStepWithoutRngCallable,
  batch_size: int,
  train_state_axes: EvaluationState,
  partitioner: partitioning.BasePartitioner,
  keep_aux_as_numpy: bool = False,
) -> InferFnCallable:
  """Return a function of (dataset, state, key) that predicts or scores each example.

  The dataset is a `tf.data.Dataset` or another iterable of pairs (index, example), and an example a mapping of model
  feature to an array without a batch dim, the same on every process. The function returns a list of pairs (index,
  output) in the order of the dataset; if `infer_step` returns (outputs, auxiliary outputs), it returns that list and
  the auxiliary outputs, with a list of values by example for each. Batch k uses the k-th of the keys that are
  split from the given one; without a key, `infer_step` gets None.

  Args:
    infer_step: function of a batch that is compiled, such as a model's `predict_batch`, `predict_batch_with_aux` or
      `score_batch`.
    batch_size: number of rows of a global batch; zeros pad the last one.
    train_state_axes: mesh PartitionSpecs of the state.
    partitioner: partitioner of the program.
    keep_aux_as_numpy: auxiliary values are arrays; otherwise they are numbers and lists.

  Raises:
    ConfigError: the batch is not divisible by the data axes of the mesh.
    DataError: the function: the dataset has no examples, or examples of different shapes.
  """
  partitioner.get_data_layout(batch_size)
  parameters = inspect.signature(infer_step).parameters

  def step(params, batch, rng, flax_mutables):
    options = {'rng': rng, 'flax_mutables': flax_mutables}
    return infer_step(
      params, batch, **{name: value for name, value in options.items() if name in parameters}
    )

  program = partitioner.partition(
    step,
    in_axis_resources=(
      train_state_axes.params,
      partitioner.data_partition_spec,
      None,
      train_state_axes.flax_mutables,
    ),
    out_axis_resources=None,
  )

  def infer_fn(ds, train_state, rng=None):
    indices = []
    outputs = []
    for numbers, batch in _batches(ds, batch_size, partitioner):
      step_rng = None
      if rng is not None:
        step_rng, rng = jax.random.split(rng)
      found = program(train_state.params, batch, step_rng, train_state.flax_mutables)
      # Without the rows that pad the last batch.
      is_example = slice(len(numbers))
      outputs.append(_select(jax.device_get(found), is_example))
      indices += numbers
    if not indices:
      raise DataError(
        'The dataset has no examples. Pass pairs (index, example), e.g. dataset.enumerate().'
      )
    joined = jax.tree.map(lambda *rows: np.concatenate(rows), *outputs)
    if not isinstance(joined, tuple):
      return _pairs(indices, joined)
    predictions, aux = joined
    as_list = list if keep_aux_as_numpy else np.ndarray.tolist
    return _pairs(indices, predictions), jax.tree.map(as_list, aux)

  return infer_fn


def _batches(
  ds: Iterable[tuple[int, Mapping[str, np.ndarray]]],
  batch_size: int,
  partitioner: partitioning.BasePartitioner,
) -> Iterator[tuple[list[int], Batch]]:
  """Yield (indices of the examples, global arrays) of each batch."""
  examples = getattr(ds, 'as_numpy_iterator', lambda: iter(ds))()
  own = partitioner.get_rows(batch_size)
  shapes = None
  while chunk := list(itertools.islice(examples, batch_size)):
    rows = []
    for pair in chunk:
      checks.check('infer_fn', {'ds': pair}, DataError, ds=_PAIR)
      index, example = pair
      rows.append(example)
      found = {name: np.shape(value) for name, value in example.items()}
      shapes = shapes or found
      if found != shapes:
        raise DataError(
          f'Example {index} must have the shapes of the first one, {shapes}, got {found}. Pad the '
          'features to one length.'
        )
    padding = {name: np.zeros_like(value) for name, value in rows[0].items()}
    rows += [padding] * (batch_size - len(rows))
    spec = {}
    local = {}
    for name, value in padding.items():
      spec[name] = jax.ShapeDtypeStruct((batch_size, *value.shape), value.dtype)
      local[name] = np.stack([rows[row][name] for row in own])
    yield [int(index) for index, _ in chunk], data.to_global_arrays(local, partitioner, spec)


def _select(outputs: PyTree, rows: int | slice) -> PyTree:
  """Return rows of the arrays of a tree."""
  return jax.tree.map(lambda array: np.asarray(array)[rows], outputs)


def _pairs(indices: Sequence[int], outputs: PyTree) -> list[tuple[int, PyTree]]:
  return [(index, _select(outputs, i)) for i, index in enumerate(indices)]
