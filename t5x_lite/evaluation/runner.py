"""Outputs of a model, batch by batch: for evaluations, for `infer`, and for the texts that a person types."""

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
from t5x_lite.train_state import TrainState
from t5x_lite.types import Array, Batch, PyTree

T = TypeVar('T')
# A feature that the model does not see. It comes back beside the outputs: with several processes, none has the indices
# of the whole batch otherwise.
INDICES = 'example_indices'
_NO_OPTIONS: Mapping[str, Any] = types.MappingProxyType({})


class PredictRunner:
  """Computes outputs of a model, of the kinds that `data.interfaces.OUTPUT_KINDS` names.

  A program is compiled once for a kind of output, options of the model's method and the shapes of a batch.
  """

  def __init__(self, model: BaseModel, partitioner: partitioning.BasePartitioner):
    """Compiles and computes nothing yet.

    Args:
      model: the model.
      partitioner: compiles over the mesh.
    """
    self._model = model
    self._partitioner = partitioner
    self._programs: dict[tuple[Any, ...], jax.stages.Compiled] = {}

  def lower(self, kind: str, spec: Mapping[str, Any], train_state: TrainState, train_state_axes: PyTree,
            options: Mapping[str, Any] = _NO_OPTIONS) -> jax.stages.Lowered:
    """Returns the program of (state, batch, seed, number of the batch), not yet compiled.

    Args:
      kind: kind of output.
      spec: feature name to an array, or shape and dtype, of a global batch.
      train_state: the state, or its shapes.
      train_state_axes: its mesh PartitionSpecs.
      options: further arguments of the model's method.

    Raises:
      DataError: an output has another number of rows than the batch.
    """
    def outputs_fn(train_state, batch, seed, number):
      batch = dict(batch)
      indices = batch.pop(INDICES, None)
      rng = jax.random.fold_in(jax.random.key(seed), number)
      outputs = _call_model(self._model, kind, train_state, batch, rng, options)
      _check_rows(kind, outputs, next(iter(batch.values())).shape[0])
      return outputs if indices is None else (indices, outputs)

    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in spec.items()}
    partitioned = self._partitioner.partition(
        outputs_fn, in_axis_resources=(train_state_axes, self._partitioner.data_partition_spec, None, None),
        out_axis_resources=None)
    return partitioned.lower(
        train_state, shapes, jax.ShapeDtypeStruct((), np.uint32), jax.ShapeDtypeStruct((), np.int32))

  def compile(self, kind: str, spec: Mapping[str, Any], train_state: TrainState, train_state_axes: PyTree,
              options: Mapping[str, Any] = _NO_OPTIONS,
              compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
              ) -> jax.stages.Compiled:
    """Returns the program of `lower`, compiled in the context that `compiling_fn` makes, unless it was before."""
    key = (kind, _options_key(kind, options), shapes_of(spec))
    if key not in self._programs:
      with compiling_fn():
        self._programs[key] = self.lower(kind, spec, train_state, train_state_axes, options).compile()
    return self._programs[key]

  def run(self, kind: str, batches: Iterable[tuple[T, int, Batch]], train_state: TrainState, train_state_axes: PyTree,
          *, seed: int = 0, options: Mapping[str, Any] = _NO_OPTIONS,
          compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
          ) -> Iterator[tuple[T, PyTree]]:
    """Yields the outputs of each batch on the host; meanwhile the devices work on the next one.

    Args:
      kind: kind of output.
      batches: (anything, number, global arrays) of each batch.
      train_state: training or inference state, sharded over the mesh.
      train_state_axes: its mesh PartitionSpecs.
      seed: of what is drawn; batch k draws with the key of `seed`, folded with k.
      options: further arguments of the model's method.
      compiling_fn: makes the context in which programs are compiled.

    Yields:
      (what came with the batch, its outputs), the same on every process; where the batch has a feature
      `example_indices`, the outputs are (indices, outputs).
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


def shapes_of(spec: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
  """Returns name, shape and dtype of the features of a batch, which tell programs apart."""
  return tuple(sorted((name, leaf.shape, str(leaf.dtype)) for name, leaf in spec.items()))


def _options_key(kind: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns what tells options apart, 1 and True too."""
  leaves, structure = jax.tree.flatten(dict(options))
  key = (structure, *((type(leaf), leaf) for leaf in leaves))
  try:
    hash(key)
  except TypeError:
    raise ConfigError(f'Got the options {dict(options)!r} of {kind}; expected plain numbers, names and functions, '
                      'which become part of the compiled program. Take arrays out.') from None
  return key


def _call_model(model: BaseModel, kind: str, train_state: TrainState, batch: Batch, rng: Array,
                options: Mapping[str, Any]) -> PyTree:
  mutables = tree_utils.to_dict(train_state.flax_mutables)
  options = {**options, **({'flax_mutables': mutables} if mutables else {})}
  params = train_state.eval_params
  match kind:
    case 'predict':
      return model.predict_batch(params, batch, rng=rng, **options)
    case 'predict_with_aux':
      return model.predict_batch_with_aux(params, batch, rng=rng, **options)
    case 'score':
      return model.score_batch(params, batch, **options)
    case 'score_with_intermediates':
      return model.score_batch(params, batch, return_intermediates=True, **options)
  raise ValueError(kind)


def _check_rows(kind: str, outputs: PyTree, num_rows: int) -> None:
  """Refuses outputs that cannot be told apart by example."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
    if jnp.ndim(leaf) < 1 or leaf.shape[0] != num_rows:
      raise DataError(f"The model's output {kind}{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; expected "
                      f'{num_rows} rows, one for each example of the batch. Give it the batch dim first, let the model '
                      'leave it out, or take metrics that do not ask for it.')
