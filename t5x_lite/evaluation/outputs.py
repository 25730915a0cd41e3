"""Part of an evaluation that runs on devices: predictions and scores of every example."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
from typing import Any

import jax
import numpy as np

from t5x_lite import data
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import DataError
from t5x_lite.evaluation import batching
from t5x_lite.evaluation import runner
from t5x_lite.evaluation.config import InferenceEvalConfig
from t5x_lite.formatting import printable
from t5x_lite.models import BaseModel
from t5x_lite.train_state import EvaluationState
from t5x_lite.types import Batch, PyTree

# Kinds of output that include another kind as their first part.
_FIRST_PARTS = {'predict_with_aux': 'predict', 'score_with_intermediates': 'score'}


class OutputRunner:
  """Runs a model over tasks; compiles once per kind of output and length of inputs."""

  def __init__(
    self, model: BaseModel, partitioner: partitioning.BasePartitioner, cfg: InferenceEvalConfig
  ):
    """Store the arguments; compile nothing.

    Args:
      model: the model.
      partitioner: partitioner of the programs.
      cfg: options of the evaluation.
    """
    self._partitioner = partitioner
    self._cfg = cfg
    self._runner = runner.PredictRunner(model, partitioner)
    self._plans: dict[tuple[str, str], list[batching.PlannedBatch]] = {}

  def num_batches(self, task: data.EvalTask) -> int:
    """Return the number of batches that `run` computes for a task."""
    return sum(len(self._plan(task, kind)) for kind in _to_compute(task))

  def programs(
    self, tasks: Sequence[data.EvalTask], train_state: EvaluationState, train_state_axes: PyTree
  ) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Return the programs that `run` compiles for some tasks: functions that lower, by name.

    Args:
      tasks: the tasks.
      train_state: the state, or its shapes.
      train_state_axes: mesh PartitionSpecs of the state.
    """
    # By kind and shapes of a batch: names of the tasks with such batches, and the shapes.
    task_names: dict[tuple[Any, ...], list[str]] = {}
    specs = {}
    for task in tasks:
      for kind in _to_compute(task):
        for spec in self._batch_specs(task, kind):
          key = (kind, tree_utils.shapes_key(spec))
          task_names.setdefault(key, []).append(task.name)
          specs.setdefault(key, spec)
    programs = {}
    for (kind, shapes), spec in specs.items():
      names = ', '.join(map(printable, task_names[kind, shapes]))
      programs[f'{kind} {_short_shape(shapes)} ({names})'] = functools.partial(
        self._runner.lower, kind, _with_indices(spec), train_state, train_state_axes
      )
    return programs

  def check(
    self, tasks: Sequence[data.EvalTask], train_state: EvaluationState, train_state_axes: PyTree
  ) -> None:
    """Raise if the model does not support a task or its decoding options, by tracing a program of each kind.

    Args:
      tasks: see `programs`.
      train_state: see `programs`.
      train_state_axes: see `programs`.

    Raises:
      ConfigError, DataError: see `PredictRunner.lower`.
    """
    first = {}
    for task in tasks:
      for kind in _to_compute(task):
        first.setdefault(kind, task.element_spec)
    for kind, spec in first.items():
      self._runner.trace(kind, _with_indices(spec), train_state, train_state_axes)

  def run(
    self,
    task: data.EvalTask,
    train_state: EvaluationState,
    train_state_axes: PyTree,
    note_fn: Callable[[str], None] = lambda text: None,
    compiling_fn: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    read_fn: Callable[[Iterable[Any], str], Iterable[Any]] = lambda batches, doing: batches,
  ) -> dict[str, PyTree]:
    """Compute the outputs for the metrics of a task.

    Args:
      task: the task.
      train_state: training or inference state, sharded over the mesh.
      train_state_axes: mesh PartitionSpecs of the state.
      note_fn: called before each batch with a description of the work; its errors end the run.
      compiling_fn: returns the context in which programs are compiled.
      read_fn: iterates over its first argument, the batches of a task that are not in memory; the second argument
        describes the work.

    Returns:
      Tree of arrays [num_examples, ...] in the order of the examples, the same on every process, by kind of output (see
      `data.interfaces.OUTPUT_KINDS`).
    """
    outputs: dict[str, PyTree] = {}
    for kind in _to_compute(task):
      found = self._runner.run(
        kind,
        self._global_batches(task, kind, note_fn, read_fn),
        train_state,
        train_state_axes,
        compiling_fn=compiling_fn,
      )
      outputs[kind] = _by_example((indexed for _, indexed in found), task)
      if kind in _FIRST_PARTS:
        outputs[_FIRST_PARTS[kind]] = outputs[kind][0]
    return {kind: outputs[kind] for kind in task.kinds}

  def _plan(self, task: data.EvalTask, kind: str) -> list[batching.PlannedBatch]:
    """Return the batches of a task; in the order of `task.batches` if its rows are not in memory."""
    key = (task.name, kind)
    if key not in self._plans:
      batch_size = next(iter(task.element_spec.values())).shape[0]
      if self._cfg.batch_by_length and task.rows is not None:
        self._plans[key] = batching.by_length(
          task.rows, batch_size, kind, max_num_lengths=self._cfg.max_num_lengths
        )
      else:
        self._plans[key] = batching.in_order(len(task.examples), batch_size)
    return self._plans[key]

  def _host_batches(
    self, task, kind, read_fn
  ) -> Iterator[tuple[np.ndarray, Mapping[str, np.ndarray], Mapping[str, Any]]]:
    """Yield (indices of this process, its rows, shapes of the global batch)."""
    if task.rows is None:
      for indices, batch in read_fn(
        task.batches, f'reading a batch of the evaluation data {task.name!r}'
      ):
        yield indices, batch, task.element_spec
      return
    for planned in self._plan(task, kind):
      indices = planned.indices[task.own]
      batch = data.take_rows(task.rows, indices)
      for name, length in planned.lengths.items():
        batch[name] = batch[name][:, :length]
      yield indices, batch, _cut(task.element_spec, planned.lengths)

  def _batch_specs(self, task: data.EvalTask, kind: str) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Return the different shapes of the global batches."""
    if task.rows is None:
      return [dict(task.element_spec)]
    found = {}
    for planned in self._plan(task, kind):
      key = tuple(sorted(planned.lengths.items()))
      found[key] = planned.lengths
    return [_cut(task.element_spec, lengths) for lengths in found.values()]

  def _global_batches(self, task, kind, note_fn, read_fn) -> Iterator[tuple[None, int, Batch]]:
    """Yield (None, number, arrays) of each batch, with the indices of its examples as a feature."""
    doing = 'scoring' if kind.startswith('score') else 'decoding'
    num_batches = len(self._plan(task, kind))
    for number, (indices, batch, spec) in enumerate(self._host_batches(task, kind, read_fn)):
      note_fn(f'{doing} {task.name}: batch {number + 1} of {num_batches}')
      yield (
        None,
        number,
        data.to_global_arrays(
          {**batch, runner.INDICES: indices}, self._partitioner, _with_indices(spec)
        ),
      )


def _with_indices(spec: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
  num_rows = next(iter(spec.values())).shape[0]
  return {**spec, runner.INDICES: jax.ShapeDtypeStruct((num_rows,), np.int32)}


def _cut(
  spec: Mapping[str, jax.ShapeDtypeStruct], lengths: Mapping[str, int]
) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the shapes of a batch with some features cut to lengths."""
  cut = dict(spec)
  for name, length in lengths.items():
    num_rows = spec[name].shape[0]
    cut[name] = jax.ShapeDtypeStruct((num_rows, length), spec[name].dtype)
  return cut


def _short_shape(features: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
  """Return the number of rows and the different lengths of a batch, e.g. '64 x 40, 12'."""
  shapes = [shape for _, shape, _ in features]
  lengths = {shape[1] for shape in shapes if len(shape) > 1}
  lengths = ', '.join(map(str, sorted(lengths, reverse=True)))
  num_rows = shapes[0][0]
  return f'{num_rows} x {lengths}'


def _to_compute(task: data.EvalTask) -> list[str]:
  """Return the kinds of output to compute, without those that are the first part of another."""
  contained = {_FIRST_PARTS[kind] for kind in task.kinds if kind in _FIRST_PARTS}
  return [kind for kind in task.kinds if kind not in contained]


def _by_example(batches: Iterator[tuple[np.ndarray, PyTree]], task: data.EvalTask) -> PyTree:
  """Return the outputs in the order of the task's examples; rows of index -1 are padding."""
  num_examples = len(task.examples)
  seen = np.zeros(num_examples, bool)
  collected: list[np.ndarray] = []
  treedef: Any = None
  for indices, outputs in batches:
    leaves, treedef = jax.tree.flatten(outputs)
    if not collected:
      for leaf in leaves:
        shape = (num_examples, *leaf.shape[1:])
        collected.append(np.zeros(shape, leaf.dtype))
    is_real = indices >= 0
    positions = indices[is_real]
    for array, leaf in zip(collected, leaves, strict=True):
      array[positions] = leaf[is_real]
    seen[positions] = True
  if not seen.all():
    missing = np.flatnonzero(~seen)
    raise DataError(
      f'The batches of {task.name!r} lack {len(missing)} of {num_examples} examples; the first is '
      f'number {missing[0]}. Evaluate an unpacked split without filters that depend on the batch.'
    )
  return jax.tree.unflatten(treedef, collected)
