"""Loop around the compiled step: feeds batches, merges metrics on the device, and reads metrics late.

`BaseTrainer` loops and evaluates with the steps of a subclass; `Trainer` is the standard one.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import functools
import logging
import time
from typing import Any, Protocol

import clu.metrics
import clu.values
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import checks
from t5x_lite import layer_stacks
from t5x_lite import partitioning
from t5x_lite import subclassing
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError, DataError, PreemptionError
from t5x_lite.metrics import OfLastStep
from t5x_lite.metrics import TimeRate
from t5x_lite.metrics import merge_metrics
from t5x_lite.models import BaseModel
from t5x_lite.models import qk_clip
from t5x_lite.schedules import LearningRateCallable
from t5x_lite.train_state import FlaxOptimTrainState
from t5x_lite.train_state import InferenceState
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import eval_steps
from t5x_lite.trainer import model_flops
from t5x_lite.trainer import non_finite
from t5x_lite.trainer import state_init
from t5x_lite.trainer import train_step as train_step_lib
from t5x_lite.trainer.actions import TRAIN_METRIC_KEY
from t5x_lite.trainer.actions import ActionMode
from t5x_lite.trainer.actions import BaseAction
from t5x_lite.trainer.actions import EarlyStoppingAction
from t5x_lite.trainer.actions import Stop
from t5x_lite.trainer.actions import TerminateOnNanAction
from t5x_lite.trainer.actions import run_actions
from t5x_lite.trainer.non_finite import NonFinitePolicy
from t5x_lite.trainer.step_params import ParamNoise
from t5x_lite.trainer.step_params import StepParams
from t5x_lite.trainer.summaries import MetricsManager
from t5x_lite.trainer.summaries import MetricValueMapFuture
from t5x_lite.trainer.train_step import PartitionedEvalCallable
from t5x_lite.trainer.train_step import PartitionedTrainCallable
from t5x_lite.trainer.train_step import accumulate_grads_microbatched
from t5x_lite.trainer.train_step import apply_grads
from t5x_lite.trainer.train_step import eval_step
from t5x_lite.trainer.train_step import train_with_lr
from t5x_lite.trainer.weight_metrics import WeightMetricsComputer
from t5x_lite.trainer.weight_metrics import unstacking
from t5x_lite.types import (
  Array,
  ArrayLike,
  ArrayMapFuture,
  Batch,
  PyTree,
  SummarizeMetricsCallable,
  TimeFuture,
)

__all__ = [
  'ActionMode',
  'ArrayMapFuture',
  'BaseAction',
  'BaseTrainer',
  'BaseTrainerConstructor',
  'EarlyStoppingAction',
  'LearningRateCallable',
  'MetricValueMapFuture',
  'MetricsManager',
  'NonFinitePolicy',
  'PartitionedEvalCallable',
  'PartitionedTrainCallable',
  'PreemptionError',
  'Stop',
  'SummarizeMetricsCallable',
  'TRAIN_METRIC_KEY',
  'TerminateOnNanAction',
  'TimeFuture',
  'Trainer',
  'WeightMetricsComputer',
  'accumulate_grads_microbatched',
  'apply_grads',
  'eval_step',
  'merge_metrics',
  'run_actions',
  'train_with_lr',
]

Metrics = Mapping[str, clu.metrics.Metric]
# Number of steps in flight besides the one being dispatched. One keeps the device busy; more keep more batches alive.
_MAX_STEPS_AHEAD = 1


class BaseTrainer(subclassing.WithMethodsOfT5x, contextlib.AbstractContextManager):
  """Loops for training and teacher-forced evaluation around the steps of a subclass.

  Attributes:
    stop_training: set it to True to end `train` before its next step; the trainer never resets it.
    stacked_layers: layers whose arrays are stacked in `step_state`.
    non_finite: monitor of non-finite steps; `train` ends if it has a `finding`.
    has_two_learning_rates: True if both the trainer and the optimizer have a learning rate, so that one has no effect.
    eval_steps: steps of the evaluations.
    step_flops: model FLOPs of a step for the metrics of training, e.g. `count_flops`; None writes no metrics of them.
    peak_flops: largest rate of a device in FLOP/s, e.g. `runtime.peak_flops`; None writes no MFU.
    train_metrics_manager: writer of MODEL_DIR/train.
    eval_metrics_managers: writers of MODEL_DIR/training_eval/<name>, by evaluation name.
  """

  # Arguments `on_step` and `should_stop` of `train` for a subclass whose `train` has the arguments of T5X.
  train_callbacks: tuple[Callable[[int, Metrics], None] | None, Callable[[], bool] | None] = (
    None,
    None,
  )

  def __init__(
    self,
    model: BaseModel,
    train_state: TrainState,
    partitioner: partitioning.BasePartitioner,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: PyTree,
    rng: Array,
  ):
    """Construct the trainer; nothing is compiled, computed or written.

    Args:
      model: the model to train.
      train_state: initial state, or its shapes (`jax.ShapeDtypeStruct`s) for checking and compiling; then
        `train_state` must be set before training.
      partitioner: partitioner of the steps.
      eval_names: names of the evaluations for `eval`.
      summary_dir: the run directory, or None to write no summaries.
      train_state_axes: mesh PartitionSpecs of the state.
      rng: base key; step t uses this key folded with t, so that a resumed run uses the same random numbers.
    """
    self._model = model
    self._partitioner = partitioner
    self._train_state_axes = train_state_axes
    self._base_rng = rng
    self.stop_training = False
    self._learning_rate_fn: LearningRateCallable | None = None
    self._learning_rate_is_ignored = False
    self.has_two_learning_rates = False
    self.step_flops: model_flops.ModelFlops | None = None
    self.peak_flops: float | None = None
    self.stacked_layers = self.find_layer_stacks(train_state)
    self.train_state = train_state  # sets `_step` too
    self.non_finite = non_finite.Monitor(NonFinitePolicy())
    self._compiled_train_step: Callable[..., tuple[TrainState, Metrics]] | None = None
    self._compilation_seconds: float | None = None  # until they are written
    self.eval_steps = eval_steps.EvalSteps(
      type(self).__name__, self.partitioned_eval_step, partitioner
    )
    # Metrics of steps that are not read yet, oldest first.
    self._in_flight: list[tuple[int, Metrics]] = []
    self._made_at = time.time()
    self.train_metrics_manager = MetricsManager('train', summary_dir)
    self.eval_metrics_managers = {
      name: MetricsManager(f'training_eval/{name}', summary_dir) for name in eval_names
    }

  @property
  def partitioner(self) -> partitioning.BasePartitioner:
    """Partitioner of steps and batches."""
    return self._partitioner

  @property
  def learning_rate_fn(self) -> LearningRateCallable | None:
    """Learning-rate schedule of the trainer; None if the optimizer gets no rate from it."""
    if self._learning_rate_is_ignored:
      return None
    return self._learning_rate_fn

  @learning_rate_fn.setter
  def learning_rate_fn(self, learning_rate_fn: LearningRateCallable | None) -> None:
    self._learning_rate_fn = learning_rate_fn

  @property
  def train_state_axes(self) -> PyTree:
    """Mesh PartitionSpecs of `train_state`."""
    return self._train_state_axes

  @property
  def step_state_axes(self) -> PyTree:
    """Mesh PartitionSpecs of `step_state`."""
    if self.stacked_layers:
      return self._train_state_axes.stack_layers(self.stacked_layers)
    return self._train_state_axes

  # ---- Methods of subclasses -----------------------------------------------------------------------------------------

  @abc.abstractmethod
  def partitioned_train_step(self) -> PartitionedTrainCallable:
    """Return the training step, partitioned over the mesh, donating the state; called once."""

  @abc.abstractmethod
  def partitioned_eval_step(
    self, metric_fns: eval_steps.MetricFns = None
  ) -> PartitionedEvalCallable:
    """Return the evaluation step, partitioned over the mesh.

    Args:
      metric_fns: metric functions that replace those of the model; passed only for an evaluation that has them.
    """

  def _get_step_rng(self, step: ArrayLike) -> Array:
    """Return the key of a step: T5X's method."""
    return jax.random.fold_in(self._base_rng, step)

  def step_arguments(self, is_last: bool) -> tuple[ArrayLike, ...]:
    """Return the arguments of the training step after state and batch.

    Args:
      is_last: True in the last step of a call of `train`, after which metrics are written.
    """
    del is_last
    return ()

  def count_flops(self, batch: Mapping[str, Any]) -> model_flops.ModelFlops | None:
    """Return the model FLOPs of a training step; None if the trainer does not know the program of its loss.

    Args:
      batch: array or `jax.ShapeDtypeStruct` of a global batch, by feature.

    Raises:
      UncountableError: see `model_flops.count_step`.
    """
    del batch
    return None

  def find_layer_stacks(self, train_state: TrainState) -> layer_stacks.LayerStacks:
    """Return the layers whose arrays the steps take stacked; by default none."""
    del train_state
    return layer_stacks.LayerStacks()

  @property
  def num_microbatches(self) -> int:
    """Number of micro-batches per step."""
    return 1

  def check_batch(self, element_spec: Mapping[str, Any]) -> None:
    """Raise if the batch size is not divisible by the micro-batches and the data axes of the mesh.

    Args:
      element_spec: array or shape of a global batch, by feature.

    Raises:
      ConfigError: the batch size is not divisible.
    """
    train_step_lib.check_microbatches(
      train_step_lib.batch_size(element_spec),
      self.num_microbatches,
      self._partitioner.data_mesh_size,
    )

  # ---- state -------------------------------------------------------------------------------------------------------

  @property
  def train_state(self) -> TrainState:
    """State after the last dispatched step. The next step consumes its buffers."""
    return self._held.single

  @property
  def step_state(self) -> TrainState:
    """`train_state` as the steps take it: the arrays of equal layers may be stacked, see `layer_stacks`.

    The trainer holds one of both and converts it when the other is asked for, by all processes.
    """
    return self._held.stacked

  @train_state.setter
  def train_state(self, train_state: TrainState) -> None:
    self._hold(train_state, is_stacked=False)

  @step_state.setter
  def step_state(self, step_state: TrainState) -> None:
    self._hold(step_state, is_stacked=True)

  def _hold(self, state: TrainState, *, is_stacked: bool) -> None:
    self._held = layer_stacks.HeldState(state, self.stacked_layers, is_stacked=is_stacked)
    self._step_shapes = self._held.stacked_shapes
    if isinstance(state.step, jax.ShapeDtypeStruct):
      self._step = None
    else:
      self._step = int(state.step)

  @property
  def step(self) -> int:
    """Number of dispatched steps since the model's first one, known without waiting for the device.

    Raises:
      ConfigError: the trainer has only the shapes of a state.
    """
    if self._step is None:
      raise ConfigError(
        'The trainer has only the shapes of a state. Set trainer.train_state before training.'
      )
    return self._step

  def __exit__(self, *exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Finish pending summaries and end their threads."""
    for manager in self._managers():
      manager.close()

  def flush(self) -> None:
    """Wait for all steps and until their summaries are on disk; raise errors of background threads."""
    jax.block_until_ready([metrics for _, metrics in self._in_flight])
    for manager in self._managers():
      manager.flush()

  def _managers(self) -> list[MetricsManager]:
    return [self.train_metrics_manager, *self.eval_metrics_managers.values()]

  # ---- training ----------------------------------------------------------------------------------------------------

  def make_train_step(self) -> PartitionedTrainCallable:
    """Return `partitioned_train_step()`, for callers of the trainer."""
    return self.partitioned_train_step()

  @functools.cached_property
  def _train_step(self) -> PartitionedTrainCallable:
    return self.make_train_step()

  def compile_train(self, batch: Mapping[str, Any]) -> None:
    """Compile the training step ahead of time, otherwise the first step compiles; see `lower_train`."""
    self.lower_train(batch)()

  def lower_train(self, batch: Mapping[str, Any]) -> Callable[[], None]:
    """Trace the training step, and return a function that compiles it, for any thread.

    Args:
      batch: array or `jax.ShapeDtypeStruct` of a global batch, by feature.
    """
    self.check_batch(batch)
    start = time.perf_counter()
    lowered = self._train_step.lower(
      self._step_shapes, tree_utils.shapes(batch), *self.step_arguments(is_last=False)
    )

    def compile_step() -> None:
      self._compiled_train_step = lowered.compile()
      self._compilation_seconds = time.perf_counter() - start

    return compile_step

  def train(
    self,
    batch_iter: Iterator[Batch],
    num_steps: int,
    start_step: int | None = None,
    *,
    on_step: Callable[[int, Metrics], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
  ) -> MetricValueMapFuture:
    """Train for `num_steps` steps, unless stopped earlier, and write their metrics to the summaries.

    The host is one step ahead of the device: while step t is computed, step t + 1 is dispatched and the metrics of step
    t - 1 are read.

    Args:
      batch_iter: iterator of global batches.
      num_steps: number of steps.
      start_step: number of completed steps before; default: `step`.
      on_step: called with (number of completed steps, metrics of the last of them) for each step, one step late;
        reading these metrics does not wait.
      should_stop: called between steps and at the end of the iterator; true ends the loop. All processes must return
        the same.

    Returns:
      Future of the metrics over these steps, written at `self.step`; empty if no step was trained.

    Raises:
      DataError: the iterator ended.
      ConfigError: the trainer has only the shapes of a state.
    """
    on_step = on_step or self.train_callbacks[0]
    should_stop = should_stop or self.train_callbacks[1]
    first = self.step
    if start_step is not None:
      first = start_step
    end = first + num_steps
    step_fn = self._compiled_train_step or self._train_step
    metrics = None
    num_done = 0
    if self._compilation_seconds is not None:  # Files are written by the thread that trains.
      self.train_metrics_manager.write_scalars(
        first, {'timing/compilation_seconds': self._compilation_seconds}, events_only=True
      )
      self._compilation_seconds = None
    self.train_metrics_manager.start_duration_timer()
    for step in range(first, end):
      if (
        self.stop_training or self.non_finite.finding or (should_stop is not None and should_stop())
      ):
        break
      with jax.profiler.StepTraceAnnotation('train', step_num=step):
        batch = next(batch_iter, None)
        if batch is None:
          if should_stop is not None and should_stop():
            break
          raise DataError(
            f'The training data must repeat, got the end of the data after {num_done} of {num_steps} '
            f'steps (step {step} of the run). Let the iterator repeat its data.'
          )
        self._held.stacked, step_metrics = step_fn(
          self._held.stacked, batch, *self.step_arguments(is_last=step + 1 == end)
        )
        if metrics is None:
          metrics = step_metrics
        else:
          metrics = merge_metrics(metrics, step_metrics)
      num_done += 1
      self._step = step + 1
      self._in_flight.append((self._step, step_metrics))
      self._observe(_MAX_STEPS_AHEAD, on_step)
    if metrics is None:
      empty = concurrent.futures.Future()
      empty.set_result({})
      return empty
    if num_done < num_steps:  # Its last step was not known to be the last.
      metrics = {
        name: metric for name, metric in metrics.items() if not isinstance(metric, OfLastStep)
      }
    uptime: Any = np.asarray([time.time() - self._made_at], np.float32)
    metrics = {
      **metrics,
      **self._rates(metrics, num_done),
      'timing/uptime': clu.metrics.LastValue.from_model_output(uptime),
    }
    summary = self.train_metrics_manager.write_metrics_summary(metrics, self.step, num_done)
    train_step_lib.log_optimizer_report(self._held.stacked.optimizer_def, self.step, summary)
    return summary

  def _rates(self, metrics: Metrics, num_steps: int) -> Metrics:
    """Return metrics of the speed of steps that the host knows, without effect on the compiled step."""
    rates = {}
    tokens: Any = metrics.get('non_padding_fraction/overall')
    if isinstance(tokens, clu.metrics.Average):
      rates['timing/non_padding_tokens_per_second'] = TimeRate.from_model_output(tokens.total)
    if self.step_flops is not None:
      flops = self.step_flops.total * num_steps / self._partitioner.mesh.size
      rates['timing/model_tflops_per_second_per_core'] = TimeRate.from_model_output(flops / 1e12)
      if self.peak_flops is not None:
        rates['timing/mfu'] = TimeRate.from_model_output(flops / self.peak_flops)
    return rates

  def _observe(self, max_in_flight: int, on_step: Callable[[int, Metrics], None] | None) -> None:
    """Wait for all but the newest `max_in_flight` steps and report them."""
    while len(self._in_flight) > max_in_flight:
      step, metrics = self._in_flight.pop(0)
      jax.block_until_ready(metrics)
      self.non_finite.observe(step, metrics)
      if on_step is not None:
        on_step(step, metrics)

  def rewind(self, train_state: TrainState) -> None:
    """Continue from an earlier state; close the files of summaries, so that later lines can be deleted."""
    self.finish_steps()
    for manager in self._managers():
      manager.close_files()
    self.non_finite.reset()
    self.train_state = train_state

  def finish_steps(self, on_step: Callable[[int, Metrics], None] | None = None) -> None:
    """Wait for the steps in flight and pass them to `on_step`, as `train` does."""
    self._observe(0, on_step)

  # ---- teacher-forced evaluation -----------------------------------------------------------------------------------

  def compile_eval(
    self, batches: Mapping[str, Mapping[str, Any]], metric_fns: eval_steps.MetricFns = None
  ) -> None:
    """Compile the evaluation steps ahead of time, once for equal batch shapes and metric functions.

    Args:
      batches: batch of global arrays or `jax.ShapeDtypeStruct`s by evaluation name.
      metric_fns: metric functions of these evaluations, which replace those of the model; None keeps those.
    """
    for name, batch in batches.items():
      train_step_lib.check_microbatches(
        train_step_lib.batch_size(batch), None, self._partitioner.data_mesh_size
      )
      seconds = self.eval_steps.compile(name, self._step_shapes, batch, metric_fns)
      if seconds is not None:
        self.eval_metrics_managers[name].write_scalars(
          self._step or 0, {'timing/compilation_seconds': seconds}, events_only=True
        )

  def eval(
    self, batch_iters: Mapping[str, Iterable[Batch]]
  ) -> dict[str, Mapping[str, clu.values.Value]]:
    """Evaluate the current state on the given datasets, and wait for the results.

    Args:
      batch_iters: global batches by evaluation name; with several processes, the same number on each.

    Returns:
      Metrics by evaluation and name, as written to the summaries.

    Raises:
      DataError: a dataset is empty.
    """
    futures = {}
    state = self.step_state
    for name, batches in batch_iters.items():
      step_fn = self.eval_steps[name]
      manager = self.eval_metrics_managers[name]
      metrics = None
      previous = None
      num_batches = 0
      manager.start_duration_timer(state.step)
      for batch in batches:
        batch_metrics = step_fn(state, batch)
        if metrics is None:
          metrics = batch_metrics
        else:
          metrics = merge_metrics(metrics, batch_metrics)
        # One batch ahead of the device, as in training.
        jax.block_until_ready(previous)
        previous = batch_metrics
        num_batches += 1
      if metrics is None:
        raise DataError(
          f'The evaluation data of {name!r} is empty. Check its split and eval_steps.'
        )
      futures[name] = manager.write_metrics_summary(metrics, self.step, num_batches)
    return {name: future.result() for name, future in futures.items()}


def _on_single_layers(
  transform: Callable[[PyTree], PyTree] | None, stacks: layer_stacks.LayerStacks
) -> Callable[[PyTree], PyTree] | None:
  """Return a transformation of gradients that is called with a subtree per layer."""
  if transform is None:
    return None
  return lambda grads: stacks.stack(transform(stacks.unstack(grads)))


class BaseTrainerConstructor(Protocol):
  """Constructor of a trainer: a subclass of `BaseTrainer` with its further arguments bound, e.g. by gin."""

  def __call__(
    self,
    model: BaseModel,
    train_state: TrainState,
    partitioner: partitioning.BasePartitioner,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: PyTree,
    rng: Array,
  ) -> BaseTrainer:
    """Return the trainer."""
    ...


class Trainer(BaseTrainer):
  """Trainer with the step `train_step.train_with_lr`."""

  ACCEPTS_STACKED_LAYERS = True

  def __init__(
    self,
    model: BaseModel,
    train_state: TrainState,
    partitioner: partitioning.BasePartitioner,
    eval_names: Sequence[str],
    summary_dir: str | None,
    train_state_axes: PyTree,
    rng: Array,
    learning_rate_fn: LearningRateCallable | None = None,
    num_microbatches: int | None = None,
    weight_metrics_computer: WeightMetricsComputer | None = None,
    *,
    gradient_transform: Callable[[PyTree], PyTree] | None = None,
    gradient_clip_norm: float | None = None,
    non_finite_policy: NonFinitePolicy = NonFinitePolicy(),
    train_dtype: Any = None,
    param_noise: ParamNoise | None = None,
  ):
    """Construct the trainer; see `BaseTrainer` for the first seven arguments.

    Args:
      model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng: see `BaseTrainer`.
      learning_rate_fn: learning-rate schedule. If the optimizer has a learning rate too, only one of them has an
        effect: the trainer warns which one, and the command `train` raises an error (see `has_two_learning_rates`).
      num_microbatches: number of micro-batches whose gradients a step accumulates; None, 0 or 1 for none. Loss,
        gradients and metrics are those of the entire batch up to rounding, except that dropout and noise differ per
        micro-batch.
      weight_metrics_computer: a `WeightMetricsComputer`, which adds statistics of every parameter to the metrics: those
        of the last step before metrics are written. A call of `train` that is stopped earlier writes none.
      gradient_transform: function applied to the gradients before the optimizer.
      gradient_clip_norm: largest Euclidean norm of all gradients of a step together, without frozen parameters. Longer
        gradients are scaled down, after micro-batches, devices and `gradient_transform`, and before the optimizer. None
        does not clip.
      non_finite_policy: reaction to a step whose loss or gradient norm is not finite; default: stop the run.
      train_dtype: floating dtype to which parameters and float inputs are cast for the loss; or pairs (regular
        expression, dtype or None), of which the first that is found in a parameter's path, or in 'batch/<feature>',
        applies. The update uses the parameters themselves, and gradients in their dtype.
      param_noise: adds noise to the parameters for the loss, after the cast, e.g. `step_params.GaussianParamNoise`.

    Raises:
      ConfigError: see `train_step.check_trainable`, or `num_microbatches`, `gradient_clip_norm` or `train_dtype` is
        invalid.
    """
    self._step_params = StepParams(train_dtype=train_dtype, noise=param_noise)
    super().__init__(
      model, train_state, partitioner, eval_names, summary_dir, train_state_axes, rng
    )
    checks.check(
      'Trainer',
      locals(),
      num_microbatches=checks.number(at_least=0, integer=True).or_none(),
      gradient_clip_norm=checks.number(
        above=0, remedy='1.0 is usual; None does not clip.'
      ).or_none(),
    )
    # A state without an optimizer is only evaluated, without a learning rate.
    trains = not isinstance(train_state, InferenceState)
    if trains:
      train_step_lib.check_trainable(train_state, learning_rate_fn)
    has_rate = trains and learning_rate_fn is not None
    self.has_two_learning_rates = has_rate and train_state.optimizer_def.owns_learning_rate
    self._learning_rate_is_ignored = has_rate and not train_state.optimizer_def.uses_learning_rate
    # Subclasses written for T5X replace it; their steps call it also if the optimizer ignores the result.
    self._learning_rate_fn = learning_rate_fn
    self._num_microbatches = num_microbatches or None
    self._weight_metrics_computer = weight_metrics_computer
    self._gradient_transform = gradient_transform
    self._gradient_clip_norm = gradient_clip_norm
    self.non_finite = non_finite.Monitor(non_finite_policy)
    self._makes_own_step = True  # until `partitioned_train_step` of this class is called

  def check_batch(self, element_spec: Mapping[str, Any]) -> None:
    """See base class; raise also for a rule of `train_dtype` that applies to no parameter or feature."""
    super().check_batch(element_spec)
    # From shapes: `train_state` would convert the arrays of stacked layers.
    self._step_params.check(layer_stacks.single_shapes(self._step_shapes.params), element_spec)

  def find_layer_stacks(self, train_state: TrainState) -> layer_stacks.LayerStacks:
    """See base class; none in a subclass, whose steps may read single layers."""
    loops = self._model.scanned_layers
    if not loops or not layer_stacks.is_accepted_by(self):
      return layer_stacks.LayerStacks()
    if not isinstance(train_state, FlaxOptimTrainState):
      return layer_stacks.LayerStacks()
    stacks = train_state.find_layer_stacks(
      loops, self._train_state_axes, self._model.min_stacked_layers, self._step_params.dtype_of
    )
    if stacks:
      logging.getLogger(__name__).info('Equal layers are compiled as loops: %s.', stacks)
    return stacks

  @property
  def num_microbatches(self) -> int:
    """See base class."""
    return self._num_microbatches or 1

  @functools.cached_property
  def _params_of_steps(self) -> StepParams:
    """Options of the parameters in a step, with the frozen ones, which are logged once."""
    return train_step_lib.step_params_of(
      self._step_shapes, self._step_params, self.stacked_layers, state_init.adapter_of(self._model)
    )

  def count_flops(self, batch: Mapping[str, Any]) -> model_flops.ModelFlops:
    """See base class."""

    def loss_fn(params, state, batch, rng):
      step_params = self._params_of_steps.at_step(rng, state.step)
      # Micro-batches have the same products.
      arguments = (self._model, state, batch, rng, None)
      return train_step_lib.make_value_fn(*arguments, step_params=step_params)(params)

    shapes = self._step_shapes
    return model_flops.count_step(loss_fn, shapes.params, shapes, batch, self._base_rng)

  def step_arguments(self, is_last: bool) -> tuple[ArrayLike, ...]:
    """See base class: (bool scalar, True to compute the statistics of parameters), or () if none are computed.

    A step of T5X, `_partitioned_train_step`, has no such argument.
    """
    is_of_t5x = subclassing.has_train_step_of_t5x(type(self))
    if self._weight_metrics_computer is None or is_of_t5x:
      return ()
    computes: Any = np.bool_(is_last)
    return (computes,)

  def make_train_step(self) -> PartitionedTrainCallable:
    """See base class; raise for options that have no effect, since a subclass does not call the step of this class."""
    step = super().make_train_step()
    if self._makes_own_step:
      self._check_own_step()
    return step

  def _check_own_step(self) -> None:
    none = checks.Expectation(
      f'None next to the training step of {type(self).__name__}, which does not apply it',
      lambda value: value is None,
      'Remove it, or let the step call super().',
    )
    options = {
      'gradient_transform': self._gradient_transform,
      'gradient_clip_norm': self._gradient_clip_norm,
      'train_dtype': self._step_params.train_dtype,
      'param_noise': self._step_params.noise,
    }
    checks.check('Trainer', options, **dict.fromkeys(options, none))
    clip = qk_clip.config_of(getattr(self._model, 'module', None))
    if clip is not None:
      threshold = {'qk_clip_threshold': clip.qk_clip_threshold}
      checks.check(type(clip).__name__, threshold, qk_clip_threshold=none)
    # The other actions are those of states too, which are tested when they are saved.
    if self.non_finite.policy.action == 'skip':
      raise checks.invalid(
        'NonFinitePolicy',
        'action',
        f"another one than 'skip' next to the training step of {type(self).__name__}, which does not skip updates",
        'skip',
        "Set 'stop', or let the step call super().",
      )

  def partitioned_train_step(self) -> PartitionedTrainCallable:
    """See base class."""
    self._makes_own_step = False
    if self._learning_rate_is_ignored:
      logging.getLogger(__name__).warning(
        'The optimizer has a learning-rate schedule: Trainer.learning_rate_fn has no effect.'
      )
    elif self.has_two_learning_rates:
      logging.getLogger(__name__).warning(
        'Trainer.learning_rate_fn overrides the learning rate of the optimizer, which has no effect.'
      )
    own = self._step_shapes.optimizer_def.parts_with_own_learning_rate
    if own:
      logging.getLogger(__name__).info(
        'MultiOptimizer: Trainer.learning_rate_fn has no effect on parts with a learning rate of their own (%s). In '
        'T5X it replaces the learning rates of all parts.',
        ', '.join(own),
      )
    clipping = self._step_shapes.optimizer_def.gradient_clipping
    if self._gradient_clip_norm is not None and clipping:
      logging.getLogger(__name__).info(
        'Gradients are clipped to the norm %s by Trainer.gradient_clip_norm, and then again by the optimizer: %s.',
        self._gradient_clip_norm,
        ', '.join(clipping),
      )
    data_spec = self._partitioner.data_partition_spec
    stacks = self.stacked_layers
    transform = self._gradient_transform
    computer = self._weight_metrics_computer
    if stacks:  # functions of users get a subtree per layer
      transform = _on_single_layers(transform, stacks)
      computer = computer and unstacking(computer, stacks)

    step_params = self._params_of_steps
    action = self.non_finite.policy.action
    if action == 'skip' and partitioning.searches_nan():
      action = 'stop'  # The search begins at results, and a skipped step has none that are bad.

    def step_fn(train_state, batch, computes_weight_metrics=None):
      learning_rate = None
      if self.learning_rate_fn is not None:
        learning_rate = jnp.asarray(self.learning_rate_fn(train_state.step), jnp.float32)
      return train_with_lr(
        train_state,
        batch,
        learning_rate=learning_rate,
        dropout_rng=self._get_step_rng(train_state.step),
        model=self._model,
        num_microbatches=self._num_microbatches,
        weight_metrics_computer=computer,
        data_partition_spec=data_spec,
        gradient_transform=transform,
        gradient_clip_norm=self._gradient_clip_norm,
        non_finite_action=action,
        computes_weight_metrics=computes_weight_metrics,
        step_params=step_params.at_step(self._base_rng, train_state.step),
      )

    argument_axes = [None for _ in self.step_arguments(is_last=False)]
    return self._partitioner.partition(
      step_fn,
      in_axis_resources=(self.step_state_axes, data_spec, *argument_axes),
      out_axis_resources=(self.step_state_axes, None),
      donate_argnums=(0,),
    )

  def partitioned_eval_step(
    self, metric_fns: eval_steps.MetricFns = None
  ) -> PartitionedEvalCallable:
    """See base class."""
    model = self._model
    if metric_fns is not None:
      model = model.with_metric_fns(metric_fns, 'Evaluation')
    return self._partitioner.partition(
      functools.partial(eval_step, model),
      in_axis_resources=(self.step_state_axes, self._partitioner.data_partition_spec),
      out_axis_resources=None,
    )
