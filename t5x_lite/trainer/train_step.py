"""Training step: gradients (optionally accumulated over micro-batches), the update, and metrics.

All functions are pure and traced in the compiled step; `t5x_lite.trainer` has the compilation and the loop. Names and
argument order are those of T5X.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import logging
from typing import Any, Protocol

import clu.metrics
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x_lite import adapters
from t5x_lite import checks
from t5x_lite import metrics as metrics_lib
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.formatting import first_names
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.optimizers import EXTRA_ARGS
from t5x_lite.optimizers import OptimizerDef
from t5x_lite.optimizers import OptimizerState
from t5x_lite.schedules import check_learning_rate_fn
from t5x_lite.schedules import check_learning_rate_values
from t5x_lite.train_state import TrainState
from t5x_lite.trainer import non_finite
from t5x_lite.trainer.step_params import StepParams
from t5x_lite.trainer.weight_metrics import WeightMetricsComputer
from t5x_lite.types import Array, ArrayLike, Batch, PyTree

Metrics = dict[str, clu.metrics.Metric]
# Prefix of the names of an optimizer's metrics.
OPTIMIZER_METRICS = 'optimizer'
# Name of the metric of the global norm, and prefix of the metric of clipping.
GRADIENT_NORM = 'gradient_norm'
# Name of the statistics of parameters of steps that may omit them.
WEIGHT_METRICS = 'weight_metrics'


class PartitionedTrainCallable(Protocol):
  """A training step compiled over the mesh."""

  def __call__(
    self, train_state: TrainState, batch: Batch, *arguments: ArrayLike
  ) -> tuple[TrainState, Metrics]:
    """Return the new state and the metrics of the step; the old state's buffers are consumed.

    Args:
      train_state: state before the step.
      batch: feature name to array `[batch, ...]`.
      *arguments: those of `BaseTrainer.step_arguments`.
    """
    ...

  def trace(self, *arguments: Any) -> Any:
    """Return the traced step, as `jax.jit(...).trace` does; arguments may be shapes."""
    ...

  def lower(self, *arguments: Any) -> jax.stages.Lowered:
    """Return the lowered step, as `jax.jit(...).lower` does; arguments may be shapes."""
    ...


class PartitionedEvalCallable(Protocol):
  """A teacher-forced evaluation step compiled over the mesh."""

  def __call__(self, train_state: TrainState, batch: Batch) -> Metrics:
    """Return the metrics of a batch."""
    ...


def check_microbatches(batch_size: int, num_microbatches: int | None, data_mesh_size: int) -> None:
  """Raise if a global batch does not divide evenly over micro-batches and the data axes of the mesh.

  Args:
    batch_size: number of rows of the global batch.
    num_microbatches: number of micro-batches that a step accumulates, which `Trainer` checks; None means one.
    data_mesh_size: number of devices over which the rows of a batch are divided.

  Raises:
    ConfigError: `batch_size` is not a multiple of `num_microbatches * data_mesh_size`.
  """
  if num_microbatches is None:
    num_microbatches = 1
  divisor = num_microbatches * data_mesh_size
  if batch_size % divisor:
    below = batch_size - batch_size % divisor
    above = batch_size - batch_size % divisor + divisor
    nearest = f'{below} or {above}' if below else f'{above}'
    raise ConfigError(
      f'A batch of {batch_size} rows cannot be divided into {num_microbatches} micro-batches on {data_mesh_size} '
      f'device(s) of the data axes. Set BATCH_SIZE to a multiple of {divisor}, for instance {nearest}.'
    )


def batch_size(batch: Mapping[str, Any]) -> int:
  """Return the number of rows of a batch of arrays or shapes."""
  return next(iter(batch.values())).shape[0]


def step_params_of(
  train_state: TrainState,
  step_params: StepParams,
  stacks: LayerStacks,
  adapter: adapters.Lora | None = None,
) -> StepParams:
  """Return `step_params` for the parameters of a state, of which the optimizer's frozen ones get no gradients.

  Args:
    train_state: the state as steps take it; its leaves may be shapes.
    step_params: options.
    stacks: layers that are stacked in the state.
    adapter: the adapter of the model.

  Raises:
    ConfigError: the optimizer freezes parameters that the adapter selects.
  """
  optimizer_def = train_state.optimizer_def
  optimizer_state = OptimizerState(train_state.step, train_state.param_states)
  frozen = optimizer_def.frozen_paths(train_state.params, optimizer_state)
  if adapter is not None:
    untrained = sorted(filter(adapter.is_trained, frozen))
    if untrained:
      raise checks.invalid(
        'Lora',
        'targets',
        f'kernels whose adapters the optimizer {optimizer_def.name} trains',
        adapter.targets,
        f'It freezes {first_names(untrained)}. Set `optimizer_def` of the model to an optimizer of all parameters, '
        'such as optimizers.adamw(), or narrow the targets.',
      )
  notes = []
  if step_params.train_dtype is not None:
    notes.append(f'train_dtype = {step_params.train_dtype}')
  if step_params.noise is not None:
    notes.append(f'param_noise = {step_params.noise}')
  if frozen:
    num_arrays = len(jax.tree.leaves(train_state.params))
    notes.append(f'no gradients for {len(frozen)} of {num_arrays} arrays of parameters')
  if notes:
    logging.getLogger(__name__).info('Training step: %s.', '; '.join(notes))
  return dataclasses.replace(step_params, frozen=frozen, stacks=stacks)


def check_trainable(train_state: Any, learning_rate_fn: Any) -> None:
  """Raise if the optimizer or the schedule is not supported by `train_with_lr`.

  Args:
    train_state: the state; its leaves may be shapes.
    learning_rate_fn: schedule of the trainer, or None.

  Raises:
    ConfigError: the optimizer needs other gradients or values, or a learning rate that is missing; or the schedule is
      invalid, or gives an invalid learning rate at the step of the state.
  """
  optimizer_def = train_state.optimizer_def
  for name in optimizer_def.extra_args:
    checks.check(optimizer_def.name, {'extra_args': name}, extra_args=checks.one_of(EXTRA_ARGS))
  if learning_rate_fn is not None:
    check_learning_rate_fn(learning_rate_fn, 'Trainer.learning_rate_fn')
  elif optimizer_def.needs_learning_rate:
    raise ConfigError(
      f'{optimizer_def.name} takes its learning rate from the trainer, and the trainer has none. Set '
      'Trainer.learning_rate_fn (e.g. schedules.create_learning_rate_scheduler), or the learning_rate '
      'of the optimizer.'
    )
  if not isinstance(train_state.step, jax.ShapeDtypeStruct):
    check_schedules(optimizer_def, learning_rate_fn, [int(train_state.step)])
  reason = optimizer_def.unsupported_reason(
    OptimizerState(train_state.step, train_state.param_states)
  )
  if reason is not None:
    raise ConfigError(
      f'The trainer cannot train with the optimizer {optimizer_def.name}: {reason}.'
    )


def check_schedules(
  optimizer_def: OptimizerDef, learning_rate_fn: Any, steps: Sequence[int]
) -> None:
  """Raise if a schedule of the trainer or the optimizer is negative or not finite at one of some steps.

  Args:
    optimizer_def: the optimizer.
    learning_rate_fn: schedule of the trainer, or None.
    steps: steps to check.

  Raises:
    ConfigError: names the schedule, the learning rate and the step.
  """
  schedules: dict[str, Any] = {'Trainer.learning_rate_fn': learning_rate_fn}
  for name, rate in optimizer_def.configured_learning_rates.items():
    schedules[f'{optimizer_def.name}.{name}'] = rate
  for what, schedule in schedules.items():
    if callable(schedule):
      check_learning_rate_values(schedule, what, steps)


def split_microbatches(
  batch: Batch,
  num_microbatches: int,
  data_partition_spec: PartitionSpec = PartitionSpec('data'),
  rows_together: int = 1,
) -> dict[str, Array]:
  """Return the arrays of `batch` with a leading micro-batch dim, without communication if possible.

  Micro-batch k has the blocks of rows whose index is k modulo `num_microbatches`. Rows are sharded in order, so each
  device splits only its rows if it has a multiple of `num_microbatches` blocks; contiguous global slices, as in T5X,
  would be on a fraction of the devices.

  Args:
    batch: arrays `[batch, ...]`.
    num_microbatches: a divisor of `batch`.
    data_partition_spec: sharding of dim 0 of the batch.
    rows_together: number of rows of a block, a divisor of `batch / num_microbatches`.

  Returns:
    Arrays `[num_microbatches, batch / num_microbatches, ...]`.

  Raises:
    TypeError, ValueError: the batch does not divide.
  """
  spec = PartitionSpec(None, *data_partition_spec)

  def split(x_B):
    features = x_B.shape[1:]
    # [blocks, micro-batches, rows of a block, ...]: consecutive blocks belong to different micro-batches.
    x_bMr = x_B.reshape(-1, num_microbatches, rows_together, *features)
    # [micro-batches, rows, ...]
    x_Mb = jnp.moveaxis(x_bMr, 1, 0).reshape(num_microbatches, -1, *features)
    return partitioning.with_sharding_constraint(x_Mb, spec)

  return {name: split(x) for name, x in batch.items()}


def accumulate_grads_microbatched(
  model: Any,
  train_state: Any,
  batch: Batch,
  dropout_rng: Array | None,
  num_microbatches: int | None,
  data_partition_spec: PartitionSpec = PartitionSpec('data'),
) -> tuple[PyTree, Metrics, PyTree | None]:
  """Return the gradients of `model.loss_fn` over `batch`, computed at once or accumulated over micro-batches.

  Without dropout, gradients and metrics are the same up to rounding, also if the loss is divided by a property of the
  batch such as its number of target tokens: `model.for_microbatches` returns values that depend on the entire batch,
  and the loss of each micro-batch gets them, so that the losses add up to the loss of the batch.

  Args:
    model: a `BaseModel`.
    train_state: parameters and mutable collections; mutables pass through the micro-batches in order.
    batch: feature name to array `[batch, ...]`.
    dropout_rng: key for dropout, folded with the micro-batch number; None switches dropout off.
    num_microbatches: None or 1 for one pass.
    data_partition_spec: sharding of dim 0 of the batch.

  Returns:
    (gradients, float32 if accumulated; metrics of the batch; new mutable collections, or None if the state has none).
  """
  _, gradients, metrics, flax_mutables = accumulate_gradients(
    model, train_state, batch, dropout_rng, num_microbatches, data_partition_spec
  )
  return gradients, metrics, flax_mutables


def make_value_fn(
  model: Any,
  train_state: Any,
  batch: Batch,
  dropout_rng: Array | None,
  num_microbatches: int | None,
  data_partition_spec: PartitionSpec = PartitionSpec('data'),
  step_params: StepParams = StepParams(),
) -> Callable[[PyTree], Array]:
  """Return the function from parameters to the loss whose gradients `accumulate_grads_microbatched` computes.

  It is for optimizers with a line search or curvature estimates. Micro-batches are computed in sequence, and their
  activations are recomputed for derivatives.

  Args:
    model: a `BaseModel`.
    train_state: mutable collections; their updates are discarded.
    batch: feature name to array `[batch, ...]`.
    dropout_rng: key for dropout, the same in each call.
    num_microbatches: None or 1 for one pass.
    data_partition_spec: sharding of dim 0 of the batch.
    step_params: what the loss gets for parameters and batch.

  Returns:
    A function from parameters to a float32 scalar. Nothing is traced before it is called.
  """
  mutables = tree_utils.to_dict(train_state.flax_mutables)
  batch = step_params.cast_batch(batch)

  def value_fn(params):
    trained, merge = step_params.split(params)
    params = step_params.for_loss(merge(trained, jax.lax.stop_gradient))
    if num_microbatches is None or num_microbatches <= 1:
      return _loss(model, params, batch, dropout_rng, mutables)[0].astype(jnp.float32)
    part_model, parts, fixed = model.for_microbatches(batch, num_microbatches)
    parts = split_microbatches(
      parts, num_microbatches, data_partition_spec, part_model.rows_together
    )

    @jax.checkpoint
    def add(carry, indexed_microbatch):
      total, mutables = carry
      index, microbatch = indexed_microbatch
      loss, (_, mutables) = _loss(
        part_model, params, {**microbatch, **fixed}, _fold_in(dropout_rng, index), mutables
      )
      return (total + loss.astype(jnp.float32), mutables), None

    carry = (jnp.zeros([], jnp.float32), mutables)
    return jax.lax.scan(add, carry, (jnp.arange(num_microbatches), parts))[0][0]

  return value_fn


def _loss(model, params, batch, rng, mutables):
  """Return (loss, (metrics, mutable collections after the pass))."""
  if mutables:
    loss, (metrics, mutables) = model.loss_fn(params, batch, rng, mutables)
    return loss, (metrics, tree_utils.prune_empty(mutables))
  loss, metrics = model.loss_fn(params, batch, rng)
  return loss, (metrics, mutables)


def _fold_in(rng: Array | None, index: Array) -> Array | None:
  if rng is None:
    return None
  return jax.random.fold_in(rng, index)


def accumulate_gradients(
  model: Any,
  train_state: Any,
  batch: Batch,
  dropout_rng: Array | None,
  num_microbatches: int | None,
  data_partition_spec: Any,
  step_params: StepParams = StepParams(),
) -> tuple[Array, PyTree, Metrics, PyTree | None]:
  """Return (loss, float32 scalar, *results of `accumulate_grads_microbatched`); see there for the arguments.

  Args:
    model, train_state, batch, dropout_rng, num_microbatches, data_partition_spec: see above.
    step_params: what the loss gets for parameters and batch. Gradients of frozen parameters are zeros that are not
      computed.
  """
  # Only parameters with gradients are differentiated, so that nothing is computed or accumulated for the others.
  trained, merge = step_params.split(train_state.params)

  def loss_of(trained, model, batch, rng, mutables):
    params = merge(trained, lambda param: param)
    return _loss(model, step_params.for_loss(params), batch, rng, mutables)

  grads_of = jax.value_and_grad(loss_of, has_aux=True)
  mutables = tree_utils.to_dict(train_state.flax_mutables)
  batch = step_params.cast_batch(batch)
  if num_microbatches is None or num_microbatches <= 1:
    (loss, (metrics, mutables)), grads = grads_of(trained, model, batch, dropout_rng, mutables)
    return loss.astype(jnp.float32), merge(grads, jnp.zeros_like), metrics, mutables or None

  # Only the micro-batch forms of model and batch are used from here.
  model, batch, fixed = model.for_microbatches(batch, num_microbatches)
  batch = split_microbatches(batch, num_microbatches, data_partition_spec, model.rows_together)

  def accumulate(carry, indexed_microbatch):
    total, mutables = carry
    index, microbatch = indexed_microbatch
    (loss, (metrics, mutables)), grads = grads_of(
      trained, model, {**microbatch, **fixed}, _fold_in(dropout_rng, index), mutables
    )
    # Sums in float32: a sum of many bfloat16 gradients would lose the small ones.
    total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
    return (total, mutables), (loss.astype(jnp.float32), metrics)

  zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
  (grads, mutables), (losses, stacked) = jax.lax.scan(
    accumulate, (zeros, mutables), (jnp.arange(num_microbatches), batch)
  )
  metrics = jax.tree.map(
    lambda metric: merge_stacked(metric, num_microbatches),
    stacked,
    is_leaf=metrics_lib.is_metric_obj,
  )
  # All micro-batches are one step in averages over steps.
  metrics = metrics_lib.set_step_metrics_num_steps(model.metrics_of_microbatches(metrics), 1)
  grads = merge(grads, lambda param: jnp.zeros(param.shape, jnp.float32))
  return jnp.sum(losses), grads, metrics, mutables or None


def apply_grads(
  train_state: Any,
  grad_accum: PyTree,
  metrics: Metrics,
  learning_rate: Array | None,
  weight_metrics_computer: WeightMetricsComputer | None,
  other_state_variables: Mapping[str, Any] | None = None,
) -> tuple[Any, Metrics]:
  """Return the state updated with the gradients, and the complete metrics of the step.

  Args:
    train_state: state before the update.
    grad_accum: gradients, of the parameters' structure.
    metrics: metrics of the model.
    learning_rate: float32 scalar, or None for the optimizer's, which is reported if it is known.
    weight_metrics_computer: adds statistics per parameter, or None.
    other_state_variables: further arguments of `train_state.apply_gradient`, e.g. `flax_mutables`.

  Returns:
    (new state, metrics with `learning_rate`, its mean over the summary period, `learning_rate/current`, and the
    optimizer's metrics as `optimizer/<name>`, see `OptimizerDef.metrics` and `OptimizerDef.configured_learning_rates`).
  """
  new_train_state = train_state.apply_gradient(
    grad_accum, learning_rate=learning_rate, **(other_state_variables or {})
  )
  metrics = dict(metrics)
  optimizer_rates = train_state.optimizer_def.learning_rates(
    OptimizerState(train_state.step, train_state.param_states), is_passed=learning_rate is not None
  )
  if learning_rate is None:
    learning_rate = optimizer_rates.pop('learning_rate', None)
  if learning_rate is not None:
    rate = jnp.asarray(learning_rate, jnp.float32).reshape(1)
    metrics['learning_rate'] = clu.metrics.Average.from_model_output(rate)
    metrics['learning_rate/current'] = clu.metrics.LastValue.from_model_output(rate)
  for name, value in {**optimizer_rates, **new_train_state.optimizer_metrics()}.items():
    value = jnp.asarray(value, jnp.float32).reshape(1)
    metrics[f'{OPTIMIZER_METRICS}/{name}'] = clu.metrics.LastValue.from_model_output(value)
  if weight_metrics_computer is not None:
    metrics.update(
      weight_metrics_computer.compute_metrics(grad_accum, train_state, new_train_state)
    )
  return new_train_state, metrics


def clip_by_global_norm(grads: PyTree, max_norm: float) -> tuple[PyTree, Array]:
  """Scale gradients by one factor to a global norm of at most `max_norm`.

  In float32 the result is bitwise that of `optax.clip_by_global_norm`. The norm is float32, and gradients of fewer bits
  are scaled in float32.

  Args:
    grads: tree of arrays of any real or complex dtype. If one is not finite, some results are NaN.
    max_norm: positive number.

  Returns:
    (gradients in their dtypes, float32 scalar: the Euclidean norm of all given gradients together).
  """
  squares = [
    jnp.sum(jnp.square(jnp.abs(grad).astype(jnp.float32))) for grad in jax.tree.leaves(grads)
  ]
  norm = jnp.sqrt(sum(squares, jnp.zeros([], jnp.float32)))

  def scale(grad: Array) -> Array:
    # Divided first, as optax does: multiplying by the quotient would round differently.
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    scaled = ((wide / norm) * max_norm).astype(grad.dtype)
    return jnp.where(norm < max_norm, grad, scaled)

  return jax.tree.map(scale, grads), norm


def train_with_lr(
  train_state: Any,
  batch: Batch,
  learning_rate: Array | None,
  dropout_rng: Array | None,
  model: Any,
  num_microbatches: int | None,
  weight_metrics_computer: WeightMetricsComputer | None = None,
  data_partition_spec: PartitionSpec = PartitionSpec('data'),
  *,
  gradient_transform: Callable[[PyTree], PyTree] | None = None,
  gradient_clip_norm: float | None = None,
  non_finite_action: str = 'ignore',
  computes_weight_metrics: Array | None = None,
  step_params: StepParams = StepParams(),
) -> tuple[Any, Metrics]:
  """Return the result of one training step: gradients of the batch, then the update.

  The optimizer gets the values of the step in its `OptimizerDef.extra_args`: the loss, the gradients after
  `gradient_transform` and clipping, and the loss and these gradients as functions of the parameters.

  Args:
    train_state: state before the step.
    batch: feature name to array `[batch, ...]`.
    learning_rate: see `apply_grads`.
    dropout_rng: key for dropout and, folded, for stochastic rounding; different in each step.
    model: a `BaseModel`.
    num_microbatches: see `accumulate_grads_microbatched`.
    weight_metrics_computer: see `apply_grads`.
    data_partition_spec: sharding of dim 0 of the batch.
    gradient_transform: function from the gradients of the batch to those for the optimizer, or None.
    gradient_clip_norm: largest global norm of the gradients that the optimizer gets, those of `gradient_transform`
      without frozen parameters; None does not clip. It adds the metrics `gradient_norm`, the mean norm before clipping,
      and `gradient_norm/clipped_share`, the share of steps that are clipped.
    non_finite_action: see `non_finite.NonFinitePolicy.action`. All values except 'ignore' add the metric
      `non_finite_steps`; 'skip' also keeps the state if the loss or the norm of the gradients after
      `gradient_transform` is not finite. With `gradient_clip_norm`, this includes a norm beyond the range of float32.
    computes_weight_metrics: bool scalar. If it is False, the metrics of `weight_metrics_computer` are zeros, which cost
      nothing; with either value they are one `metrics.OfLastStep` named 'weight_metrics'. None computes them in every
      step.
    step_params: what the loss gets for parameters and batch, and which parameters get no gradients.

  Returns:
    (new state, metrics).
  """

  def transform(grads: PyTree) -> tuple[PyTree, Any]:
    """Return the gradients for the optimizer, and their norm before clipping or None."""
    if gradient_transform is not None:
      grads = gradient_transform(grads)
    if gradient_clip_norm is None:
      return grads, None
    trained, merge = step_params.split(grads)
    clipped, norm = clip_by_global_norm(trained, gradient_clip_norm)
    return merge(clipped, lambda grad: grad), norm

  arguments = (
    model,
    train_state,
    batch,
    dropout_rng,
    num_microbatches,
    data_partition_spec,
    step_params,
  )
  loss, grads, metrics, mutables = accumulate_gradients(*arguments)
  grads, norm = transform(grads)
  metrics = {**metrics, **model.gradient_metrics(grads, train_state.params_axes)}
  value_fn = make_value_fn(*arguments)
  known = {
    'value': loss,
    'grad': grads,
    'value_fn': value_fn,
    'obj_fn': value_fn,
    'grad_fn': lambda params, number: transform(jax.grad(value_fn)(params))[0],
  }
  others = {name: known[name] for name in train_state.optimizer_def.extra_args}
  if mutables:
    others['flax_mutables'] = mutables
  stored = train_state.optimizer_def.stored_params(
    OptimizerState(train_state.step, train_state.param_states)
  )
  constraint_fn = model.params_constraint(metrics, step_params.frozen, stored)
  if constraint_fn is not None:
    others['constraint_fn'] = constraint_fn
  if (options := train_state.optimizer_def.update_options).stochastic_rounding:
    others['rounding_key'] = options.rounding_key(dropout_rng)

  is_optional = computes_weight_metrics is not None
  new_state, metrics = apply_grads(
    train_state,
    grads,
    metrics,
    learning_rate,
    None if is_optional else weight_metrics_computer,
    others,
  )
  if is_optional and weight_metrics_computer is not None:

    def compute():
      return metrics_lib.OfLastStep.join(
        weight_metrics_computer.compute_metrics(grads, train_state, new_state)
      )

    zeros = metrics_lib.shape_obj_to_defined_obj(jax.eval_shape(compute))
    metrics[WEIGHT_METRICS] = jax.lax.cond(computes_weight_metrics, compute, lambda: zeros)
  if gradient_clip_norm is not None:
    is_clipped = (norm >= gradient_clip_norm).astype(jnp.float32)
    for name, value in ((GRADIENT_NORM, norm), (f'{GRADIENT_NORM}/clipped_share', is_clipped)):
      metrics[name] = clu.metrics.Average.from_model_output(value.reshape(1))
  if non_finite_action == 'ignore':
    return new_state, metrics
  if gradient_clip_norm is not None:
    # Finite gradients whose norm overflows are clipped to zeros, which look sound.
    evidence = norm
  else:
    new_optimizer_state = OptimizerState(new_state.step, new_state.param_states)
    evidence = train_state.optimizer_def.gradient_evidence(grads, new_optimizer_state)
  count = non_finite.count_of_step(loss, evidence)
  if non_finite_action == 'skip':
    new_state = non_finite.skip_update(count, new_state, train_state)
    metrics = non_finite.drop_non_finite(count, metrics)
  return new_state, {**metrics, non_finite.NON_FINITE_STEPS: count}


def log_optimizer_report(
  optimizer_def: OptimizerDef, step: int, summary: concurrent.futures.Future
) -> None:
  """Log an optimizer's report of its metrics when they are on the host, in the thread that copies them.

  Args:
    optimizer_def: the optimizer.
    step: number of steps made.
    summary: future of metric name to value.
  """
  prefix = f'{OPTIMIZER_METRICS}/'

  def log(summary):
    if summary.exception() is not None:  # raised by `summary.result()` elsewhere
      return
    values = {}
    for name, metric in summary.result().items():
      if name.startswith(prefix):
        values[name.removeprefix(prefix)] = float(metric.value)
    if values:
      for line in optimizer_def.report(values):
        logging.getLogger(__name__).info('step %d  optimizer: %s', step, line)

  summary.add_done_callback(log)


def eval_step(model: Any, train_state: Any, batch: Batch) -> Metrics:
  """Return the teacher-forced metrics of `batch` without dropout; mutable collections are not updated.

  Args:
    model: a `BaseModel`.
    train_state: parameters for evaluation and mutable collections.
    batch: feature name to array `[batch, ...]`.
  """
  mutables = tree_utils.to_dict(train_state.flax_mutables)
  if mutables:
    return model.eval_fn(train_state.eval_params, batch, mutables)[1]
  return model.eval_fn(train_state.eval_params, batch)[1]


def merge_stacked(metric: clu.metrics.Metric, num: int) -> clu.metrics.Metric:
  """Return the merged metric of `num` partial results in the leading dim of its arrays, in order."""

  def part(i: int) -> clu.metrics.Metric:
    return jax.tree.map(lambda x: x[i], metric)

  merged = part(0)
  for i in range(1, num):
    merged = merged.merge(part(i))
  return merged
