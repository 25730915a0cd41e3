"""Compiled steps of teacher-forced evaluations."""

from collections.abc import Callable, Sequence
import functools
import time
from typing import Any

from t5x_lite import checks
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.models import MetricFn
from t5x_lite.types import Batch, PyTree

MetricFns = Sequence[MetricFn] | None


def program_key(metric_fns: MetricFns, batch: Batch) -> tuple[Any, ...]:
  """Return a key that is equal for evaluations with the same metric functions and shapes of batches.

  Args:
    metric_fns: `evaluation.Evaluation.metric_fns`.
    batch: arrays or shapes by feature.
  """
  functions = None
  if metric_fns is not None:
    functions = tuple(map(id, metric_fns))
  return functions, tree_utils.shapes_key(tree_utils.shapes(batch))


class EvalSteps:
  """Steps of the evaluations of a trainer; evaluations with an equal `program_key` have one program."""

  def __init__(
    self, owner: str, make_step_fn: Callable[..., Any], partitioner: partitioning.BasePartitioner
  ):
    """Store the arguments; compile nothing.

    Args:
      owner: class of the trainer, for error messages.
      make_step_fn: `partitioned_eval_step` of the trainer.
      partitioner: partitioner that compiles the steps.
    """
    self._owner = owner
    self._make_step = make_step_fn
    self._partitioner = partitioner
    self._programs: dict[tuple[Any, ...], Any] = {}
    self._program_of: dict[str, Any] = {}

  def make(self, metric_fns: MetricFns = None) -> Any:
    """Return a new partitioned step.

    Args:
      metric_fns: see `program_key`.

    Raises:
      ConfigError: the step of a custom trainer does not take metric functions.
    """
    if metric_fns is None:
      return self._make_step()
    return checks.call_custom(
      self._owner, 'partitioned_eval_step', 'metric_fns', self._make_step, metric_fns
    )

  def compile(
    self, name: str, state: PyTree, batch: Batch, metric_fns: MetricFns = None
  ) -> float | None:
    """Compile the step of an evaluation, unless another evaluation has the same program.

    Args:
      name: name of the evaluation.
      state: shapes of the state.
      batch: arrays or shapes by feature.
      metric_fns: see `program_key`.

    Returns:
      Seconds of the compilation; None if nothing was compiled.
    """
    key = program_key(metric_fns, batch)
    seconds = None
    if key not in self._programs:
      start = time.perf_counter()
      if metric_fns is None:
        step = self._step_of_model
      else:
        step = self.make(metric_fns)
      self._programs[key] = self._partitioner.compile(step, state, tree_utils.shapes(batch))
      seconds = time.perf_counter() - start
    self._program_of[name] = self._programs[key]
    return seconds

  def __getitem__(self, name: str) -> Any:
    """Return the step of an evaluation; if it was not compiled, the one with the metrics of the model."""
    return self._program_of.get(name) or self._step_of_model

  @functools.cached_property
  def _step_of_model(self) -> Any:
    return self.make()
