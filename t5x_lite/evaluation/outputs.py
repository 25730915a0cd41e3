"""The device's half of an evaluation: what a model makes of every example, by decoding or by scoring."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import data
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import DataError
from t5x_lite.evaluation import batching
from t5x_lite.evaluation.config import InferenceEvalConfig
from t5x_lite.models import BaseModel
from t5x_lite.train_state import TrainState
from t5x_lite.types import Array, Batch, PyTree

_INDICES = 'example_indices'
# What is computed for several kinds of output at once, and the kind that is its first part.
_FIRST_PARTS = {'predict_with_aux': 'predict', 'score_with_intermediates': 'score'}


class OutputRunner:
  """Runs a model over tasks; compiles once for each kind of output and each length of inputs."""

  def __init__(self, model: BaseModel, partitioner: partitioning.BasePartitioner, cfg: InferenceEvalConfig):
    """Compiles and computes nothing yet.

    Args:
      model: the model.
      partitioner: compiles over the mesh.
      cfg: how to batch.
    """
    self._model = model
    self._partitioner = partitioner
    self._cfg = cfg
    self._steps: dict[str, Callable[..., tuple[Array, PyTree]]] = {}
    self._plans: dict[tuple[str, str], list[batching.PlannedBatch]] = {}
    # The kinds and shapes of batches that were computed, for which nothing is left to compile.
    self._compiled: set[tuple[Any, ...]] = set()

  def num_batches(self, task: data.EvalTask) -> int:
    """Returns how many batches `run` computes for a task."""
    return sum(len(self._plan(task, kind)) for kind in _to_compute(task))

  def programs(self, tasks: Sequence[data.EvalTask], train_state: TrainState,
               train_state_axes: PyTree) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns what `run` compiles for some tasks, to be compiled ahead of time: names to functions that lower.

    Args:
      tasks: the tasks.
      train_state: the state, or its shapes.
      train_state_axes: its mesh PartitionSpecs.
    """
    found: dict[tuple[Any, ...], tuple[list[str], Callable[[], jax.stages.Lowered]]] = {}
    for task in tasks:
      for kind in _to_compute(task):
        for spec in self._batch_specs(task, kind):
          key = _key(kind, spec)
          fn = functools.partial(self._lower, kind, spec, train_state, train_state_axes)
          found.setdefault(key, ([], fn))[0].append(task.name)
    names = [f'{key[0]} {_short_shape(key[1:])} ({", ".join(tasks)})' for key, (tasks, _) in found.items()]
    return dict(zip(names, (fn for _, fn in found.values()), strict=True))

  def _lower(self, kind: str, spec: Mapping[str, Any], train_state: TrainState,
             train_state_axes: PyTree) -> jax.stages.Lowered:
    return self._step(kind, train_state_axes).lower(
        train_state, _with_indices(spec), jax.ShapeDtypeStruct((), np.int32))

  def run(self, task: data.EvalTask, train_state: TrainState, train_state_axes: PyTree,
          note_fn: Callable[[str], None] = lambda text: None,
          compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
          read_fn: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, doing: batches) -> dict[str, PyTree]:
    """Returns what the metrics of a task ask for.

    Args:
      task: the task.
      train_state: training or inference state, sharded over the mesh.
      train_state_axes: its mesh PartitionSpecs.
      note_fn: told before each batch what is going on; what it raises ends the run.
      compiling_fn: makes the context in which programs are compiled.
      read_fn: called with the batches of a task that are not in memory, and what is done with them; iterates over them.

    Returns:
      Kind (see `data.interfaces.OUTPUT_KINDS`) to a tree of arrays [num_examples, ...] in the order of the examples,
      the same on every process.
    """
    outputs: dict[str, PyTree] = {}
    for kind in _to_compute(task):
      step_fn = self._step(kind, train_state_axes)
      batches = self._device_outputs(task, kind, step_fn, train_state, note_fn, compiling_fn, read_fn)
      outputs[kind] = _by_example(batches, task)
      if kind in _FIRST_PARTS:
        outputs[_FIRST_PARTS[kind]] = outputs[kind][0]
    return {kind: outputs[kind] for kind in task.kinds}

  def _plan(self, task: data.EvalTask, kind: str) -> list[batching.PlannedBatch]:
    """Returns the batches; in order, which is that of `task.batches`, where the rows are not in memory."""
    key = (task.name, kind)
    if key not in self._plans:
      batch_size = next(iter(task.element_spec.values())).shape[0]
      if self._cfg.batch_by_length and task.rows is not None:
        self._plans[key] = batching.by_length(
            task.rows, batch_size, kind, max_num_lengths=self._cfg.max_num_lengths)
      else:
        self._plans[key] = batching.in_order(len(task.examples), batch_size)
    return self._plans[key]

  def _host_batches(self, task, kind,
                    read_fn) -> Iterator[tuple[np.ndarray, Mapping[str, np.ndarray], Mapping[str, Any]]]:
    """Yields (this process's indices, its rows, shapes of the global batch)."""
    if task.rows is None:
      for indices, batch in read_fn(task.batches, f'reading a batch of the evaluation data {task.name!r}'):
        yield indices, batch, task.element_spec
      return
    for planned in self._plan(task, kind):
      indices = planned.indices[task.own]
      batch = data.take_rows(task.rows, indices)
      for name, length in planned.lengths.items():
        batch[name] = batch[name][:, :length]
      yield indices, batch, _cut(task.element_spec, planned.lengths)

  def _batch_specs(self, task: data.EvalTask, kind: str) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Returns the different shapes of the global batches."""
    if task.rows is None:
      return [dict(task.element_spec)]
    found = {tuple(sorted(planned.lengths.items())): planned.lengths for planned in self._plan(task, kind)}
    return [_cut(task.element_spec, lengths) for lengths in found.values()]

  def _device_outputs(self, task, kind, step_fn, train_state, note_fn, compiling_fn,
                      read_fn) -> Iterator[tuple[np.ndarray, PyTree]]:
    """Yields (indices, outputs) of each global batch; the device works on one batch while the host reads the last."""
    doing = 'scoring' if kind.startswith('score') else 'decoding'
    num_batches = len(self._plan(task, kind))
    waiting = None
    for number, (indices, batch, spec) in enumerate(self._host_batches(task, kind, read_fn)):
      note_fn(f'{doing} {task.name}: batch {number + 1} of {num_batches}')
      arrays = data.to_global_arrays({**batch, _INDICES: indices}, self._partitioner, _with_indices(spec))
      # The first call with these shapes compiles, and returns before the device is done.
      key = _key(kind, spec)
      with contextlib.nullcontext() if key in self._compiled else compiling_fn():
        # Indices travel with the rows: with several processes none has those of the whole batch otherwise.
        outputs = step_fn(train_state, arrays, np.int32(number))
      self._compiled.add(key)
      if waiting is not None:
        yield jax.device_get(waiting)
      waiting = outputs
    if waiting is not None:
      yield jax.device_get(waiting)

  def _step(self, kind: str, train_state_axes: PyTree):
    """Returns the compiled form of a model's method with (indices, outputs) as result on every process."""
    if kind not in self._steps:
      fn, data_spec = _model_fn(self._model, kind), self._partitioner.data_partition_spec

      def step_fn(train_state, batch, number):
        batch = dict(batch)
        indices = batch.pop(_INDICES)
        outputs = fn(train_state, batch, jax.random.fold_in(jax.random.key(0), number))
        _check_rows(kind, outputs, indices.shape[0])
        return indices, outputs

      self._steps[kind] = self._partitioner.partition(
          step_fn, in_axis_resources=(train_state_axes, data_spec, None), out_axis_resources=None)
    return self._steps[kind]


def _key(kind: str, spec: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[Any, ...]:
  """Returns what tells apart the programs of an evaluation."""
  return (kind, *sorted((name, leaf.shape, str(leaf.dtype)) for name, leaf in spec.items()))


def _with_indices(spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
  num_rows = next(iter(spec.values())).shape[0]
  return {**spec, _INDICES: jax.ShapeDtypeStruct((num_rows,), np.int32)}


def _cut(spec: Mapping[str, jax.ShapeDtypeStruct], lengths: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the shapes of a batch of which some features are cut to lengths."""
  cut = {name: jax.ShapeDtypeStruct((spec[name].shape[0], length), spec[name].dtype)
         for name, length in lengths.items()}
  return {**spec, **cut}


def _short_shape(features: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
  """Returns the rows of a batch and the different lengths of its features, e.g. '64 x 40, 12'."""
  shapes = [shape for _, shape, _ in features]
  lengths = sorted({shape[1] for shape in shapes if len(shape) > 1}, reverse=True)
  return f'{shapes[0][0]} x {", ".join(map(str, lengths))}'


def _to_compute(task: data.EvalTask) -> list[str]:
  """Returns the kinds to compute: what is the first part of another wanted one is not computed twice."""
  contained = {_FIRST_PARTS[kind] for kind in task.kinds if kind in _FIRST_PARTS}
  return [kind for kind in task.kinds if kind not in contained]


def _model_fn(model: BaseModel, kind: str) -> Callable[[TrainState, Batch, Array], PyTree]:
  """Returns the function of (state, batch, key) for a kind of output."""

  def fn(train_state, batch, rng):
    mutables = tree_utils.to_dict(train_state.flax_mutables)
    options = {'flax_mutables': mutables} if mutables else {}
    match kind:
      case 'predict':
        return model.predict_batch(train_state.eval_params, batch, rng=rng, **options)
      case 'predict_with_aux':
        return model.predict_batch_with_aux(train_state.eval_params, batch, rng=rng, **options)
      case 'score':
        return model.score_batch(train_state.eval_params, batch, **options)
      case 'score_with_intermediates':
        return model.score_batch(train_state.eval_params, batch, return_intermediates=True, **options)
    raise ValueError(kind)

  return fn


def _check_rows(kind: str, outputs: PyTree, num_rows: int) -> None:
  """Refuses outputs that cannot be told apart by example."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
    if jnp.ndim(leaf) < 1 or leaf.shape[0] != num_rows:
      raise DataError(f"The model's output {kind}{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; expected "
                      f'{num_rows} rows, one for each example of the batch. Let the model leave it out, or give the '
                      'task metrics that do not ask for it.')


def _by_example(batches: Iterator[tuple[np.ndarray, PyTree]], task: data.EvalTask) -> PyTree:
  """Returns the outputs in the order of the task's examples; rows of index -1 are filling."""
  num_examples = len(task.examples)
  seen = np.zeros(num_examples, bool)
  collected: list[np.ndarray] | None = None
  treedef = None
  for indices, outputs in batches:
    leaves, treedef = jax.tree.flatten(outputs)
    if collected is None:
      collected = [np.zeros((num_examples, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    real = indices >= 0
    for array, leaf in zip(collected, leaves, strict=True):
      array[indices[real]] = leaf[real]
    seen[indices[real]] = True
  if not seen.all():
    missing = np.flatnonzero(~seen)
    raise DataError(f'The batches of {task.name!r} left out {len(missing)} of {num_examples} examples, the first '
                    f'number {missing[0]}. Evaluate an unpacked split without filters that depend on the batch.')
  return jax.tree.unflatten(treedef, collected)
