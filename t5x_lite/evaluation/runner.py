"""Outputs of a model, batch by batch, for evaluations, `infer` and lists of texts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
import concurrent.futures
import contextlib
import os
import types
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import decoding
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.data.text import ids as text_ids
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

  A program is compiled once per kind of output, options of the model's method and shapes of a batch. If the model's
  `decode_fn` is `decoding.MinimumBayesRisk`, a program samples, and the host chooses while the devices compute the next
  batch.
  """

  def __init__(self, model: BaseModel, partitioner: partitioning.BasePartitioner):
    """Store the arguments; compile nothing.

    Args:
      model: the model.
      partitioner: partitioner of the programs.
    """
    self._model = model
    self._partitioner = partitioner
    self._rule = decoding.minimum_bayes_risk_of(getattr(model, 'decode_fn', None))
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
    if self._rule is not None and self._chooses(kind):
      # The choice needs all samples, and an output without them has no scores to select.
      kind = 'predict_with_aux'
      options = {'num_decodes': self._rule.num_samples, **options, 'return_all_decodes': True}

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
    # Threads instead of processes: JAX must not be forked, a user's utility need not be picklable, and chrF and BLEU of
    # an example take a few milliseconds, less than to send its samples to a process.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count(), 't5x_lite-choose') as pool:

      def on_host(has_indices, outputs):
        outputs = jax.device_get(outputs)
        if not self._chooses(kind):
          return outputs
        if has_indices:
          return outputs[0], self._choose(kind, outputs[1], pool)
        return self._choose(kind, outputs, pool)

      for given, number, batch in batches:
        program = self.compile(kind, batch, train_state, train_state_axes, options, compiling_fn)
        outputs = program(train_state, batch, np.uint32(seed), np.int32(number))
        if waiting is not None:
          yield waiting[0], on_host(*waiting[1:])
        waiting = given, INDICES in batch, outputs
      if waiting is not None:
        yield waiting[0], on_host(*waiting[1:])

  def _chooses(self, kind: str) -> bool:
    """Return whether the host chooses one of several samples."""
    return self._rule is not None and kind.startswith('predict')

  def _choose(
    self,
    kind: str,
    outputs: tuple[np.ndarray, Mapping[str, Any]],
    pool: concurrent.futures.Executor,
  ) -> PyTree:
    """Return the output of the chosen samples; each process chooses for a part of the examples.

    Args:
      kind: 'predict' or 'predict_with_aux'.
      outputs: samples <int32>[batch, num_samples, length], the most probable last, and auxiliary outputs.
      pool: threads.
    """
    samples, aux = outputs
    num_rows = samples.shape[0]
    # [rows], indices of the choices and their mean utilities.
    best = np.zeros(num_rows, np.int32)
    utility = np.zeros(num_rows, np.float32)
    own = range(jax.process_index(), num_rows, jax.process_count())
    for row, found in zip(
      own, pool.map(self._choose_one, (samples[row] for row in own)), strict=True
    ):
      best[row], utility[row] = found
    best, utility = multihost.sum_over_processes((best, utility))
    rows = np.arange(num_rows)
    chosen = samples[rows, best]
    if kind == 'predict':
      return chosen
    return chosen, {**aux, 'scores': aux['scores'][rows, best], 'utility': utility}

  def _choose_one(self, samples: np.ndarray) -> tuple[int, float]:
    """Return (index, mean utility) of the choice out of samples <int32>[num_samples, length] of an example."""
    vocabulary = self._model.output_vocabulary
    texts = []
    for ids in samples[::-1]:  # The most probable first, which wins between equal utilities.
      text = text_ids.decode_ids(ids, vocabulary)
      if not isinstance(text, str):  # of a vocabulary of ids
        text = ' '.join(map(str, text))
      texts.append(text)
    index, utility = self._rule.choose(texts)
    return len(samples) - 1 - index, utility


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
