"""Outputs of a model, batch by batch, for evaluations, `infer` and lists of texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import types
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.models import BaseModel
from t5x_lite.train_state import EvaluationState
from t5x_lite.types import Array, Batch, PyTree

T = TypeVar('T')
# Feature that the model does not get. It is returned with the outputs, since with several processes no process has the
# indices of the entire batch.
INDICES = 'example_indices'
_NO_OPTIONS: Mapping[str, Any] = types.MappingProxyType({})


class PredictRunner:
  """Computes outputs of a model, of the kinds `data.interfaces.OUTPUT_KINDS`.

  A program is compiled once per kind of output, options of the model's method and shapes of a batch.
  """

  def __init__(self, model: BaseModel, partitioner: partitioning.BasePartitioner):
    """Store the arguments; compile nothing.

    Args:
      model: the model.
      partitioner: partitioner of the programs.
    """
    self._model = model
    self._partitioner = partitioner
    self._programs: dict[tuple[Any, ...], jax.stages.Compiled] = {}

  def lower(
    self,
    kind: str,
    spec: Mapping[str, Any],
    train_state: EvaluationState,
    train_state_axes: PyTree,
    options: Mapping[str, Any] = _NO_OPTIONS,
  ) -> jax.stages.Lowered:
    """Return the lowered program of (state, batch, seed, number of the batch).

    Args:
      kind: kind of output.
      spec: array, or shape and dtype, of a global batch by feature.
      train_state: the state, or its shapes.
      train_state_axes: mesh PartitionSpecs of the state.
      options: further arguments of the model's method.

    Raises:
      ConfigError: the model does not support the batch or its decoding options.
      DataError: the number of rows of an output differs from that of the batch.
    """
    partitioned, arguments = self._program(kind, spec, train_state, train_state_axes, options)
    return partitioned.lower(*arguments)

  def trace(
    self,
    kind: str,
    spec: Mapping[str, Any],
    train_state: EvaluationState,
    train_state_axes: PyTree,
    options: Mapping[str, Any] = _NO_OPTIONS,
  ) -> None:
    """Raise the errors of `lower`; compile nothing. Arguments are those of `lower`."""
    partitioned, arguments = self._program(kind, spec, train_state, train_state_axes, options)
    partitioned.trace(*arguments)

  def _program(
    self,
    kind: str,
    spec: Mapping[str, Any],
    train_state: EvaluationState,
    train_state_axes: PyTree,
    options: Mapping[str, Any],
  ) -> tuple[Any, tuple[Any, ...]]:
    """Return the partitioned function of `lower` and the shapes of its arguments."""

    def outputs_fn(train_state, batch, seed, number):
      batch = dict(batch)
      indices = batch.pop(INDICES, None)
      rng = jax.random.fold_in(jax.random.key(seed), number)
      outputs = _call_model(self._model, kind, train_state, batch, rng, options)
      _check_rows(kind, outputs, next(iter(batch.values())).shape[0])
      if indices is None:
        return outputs
      return (indices, outputs)

    shapes = tree_utils.shapes(dict(spec))
    partitioned = self._partitioner.partition(
      outputs_fn,
      in_axis_resources=(train_state_axes, self._partitioner.data_partition_spec, None, None),
      out_axis_resources=None,
    )
    return partitioned, (
      train_state,
      shapes,
      jax.ShapeDtypeStruct((), np.uint32),
      jax.ShapeDtypeStruct((), np.int32),
    )

  def compile(
    self,
    kind: str,
    spec: Mapping[str, Any],
    train_state: EvaluationState,
    train_state_axes: PyTree,
    options: Mapping[str, Any] = _NO_OPTIONS,
    compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
  ) -> jax.stages.Compiled:
    """Return the compiled program of `lower`; compile it, in the context of `compiling_fn`, at the first call."""
    key = (kind, _options_key(kind, options), tree_utils.shapes_key(spec))
    if key not in self._programs:
      with compiling_fn():
        self._programs[key] = self.lower(
          kind, spec, train_state, train_state_axes, options
        ).compile()
    return self._programs[key]

  def run(
    self,
    kind: str,
    batches: Iterable[tuple[T, int, Batch]],
    train_state: EvaluationState,
    train_state_axes: PyTree,
    *,
    seed: int = 0,
    options: Mapping[str, Any] = _NO_OPTIONS,
    compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
  ) -> Iterator[tuple[T, PyTree]]:
    """Yield the outputs of each batch on the host, while the devices compute the next one.

    Args:
      kind: kind of output.
      batches: (any value, number, global arrays) of each batch.
      train_state: training or inference state, sharded over the mesh.
      train_state_axes: mesh PartitionSpecs of the state.
      seed: seed of sampling; batch k uses the key of `seed`, folded with k.
      options: further arguments of the model's method.
      compiling_fn: returns the context in which programs are compiled.

    Yields:
      (value of the batch, its outputs), the same on every process; if the batch has the feature `example_indices`, the
      outputs are (indices, outputs).
    """
    waiting = None
    for given, number, batch in batches:
      program = self.compile(kind, batch, train_state, train_state_axes, options, compiling_fn)
      outputs = program(train_state, batch, np.uint32(seed), np.int32(number))
      if waiting is not None:
        yield waiting[0], jax.device_get(waiting[1])
      waiting = given, outputs
    if waiting is not None:
      yield waiting[0], jax.device_get(waiting[1])


def _options_key(kind: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
  """Return a hashable key of options, which distinguishes 1 and True."""
  leaves, structure = jax.tree.flatten(dict(options))
  key = (structure, *((type(leaf), leaf) for leaf in leaves))
  try:
    hash(key)
  except TypeError:
    raise ConfigError(
      f'The options of {kind} must be numbers, strings or functions, because they are compiled into '
      f'the program as constants, got {dict(options)!r}.'
    ) from None
  return key


def _call_model(
  model: BaseModel,
  kind: str,
  train_state: EvaluationState,
  batch: Batch,
  rng: Array,
  options: Mapping[str, Any],
) -> PyTree:
  mutables = tree_utils.to_dict(train_state.flax_mutables)
  if mutables:
    options = {**options, 'flax_mutables': mutables}
  params = train_state.eval_params
  match kind:
    case 'predict':
      return model.predict_batch(params, batch, rng=rng, **options)
    case 'predict_with_aux':
      return model.predict_batch_with_aux(params, batch, rng=rng, **options)
    case 'score':
      return model.score_batch(params, batch, **options)
    case _:  # 'score_with_intermediates'
      return model.score_batch(params, batch, return_intermediates=True, **options)


def _check_rows(kind: str, outputs: PyTree, num_rows: int) -> None:
  """Raise if an output has not one row per example."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
    if jnp.ndim(leaf) < 1 or leaf.shape[0] != num_rows:
      raise DataError(
        f"The model's output {kind}{jax.tree_util.keystr(path)} must have {num_rows} rows, one per "
        f'example of the batch, got shape {jnp.shape(leaf)}. Add the batch dim as its first, or remove '
        'the output from the model.'
      )
