"""What a run is made of before its first step: its data, its evaluators, its initializer and its trainer.

`train` goes on from here; `precompile` compiles what it finds here. One room makes the parts for both, so that what is
compiled ahead of time is what a run runs, to the last constant.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
from typing import Any

import jax

from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import state_init
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common import start as start_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """What a run reads.

  Attributes:
    batches: global batches to train on; nothing is read before the first is taken.
    eval_batches: name of a task to finite batches to evaluate on with given targets.
    evaluator: evaluates by decoding; None where a run does not.
    sample_truncation_fn: see `data.HostIterator.sample_truncation`.
  """

  batches: data.GlobalBatches
  eval_batches: Mapping[str, data.EvalBatches]
  evaluator: evaluation.InferenceEvaluator | None
  sample_truncation_fn: Callable[[], data.Truncation | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTrainer:
  """What a run trains with; no parameter is made yet.

  Attributes:
    trainer: made from the state's shapes.
    initializer: knows the state's shapes, and how to make a state.
    init_rng: key for new parameters.
  """

  trainer: trainer_lib.BaseTrainer
  initializer: state_init.TrainStateInitializer
  init_rng: jax.Array


def check_options(
    *, model: models.BaseModel, model_dir: str, eval_steps: int | None,
    infer_eval_dataset_cfg: data.DatasetConfig | None, inference_evaluator_cls: Any,
    infer_eval_cfg: evaluation.InferenceEvalConfig) -> None:
  """Refuses what can be refused before anything is opened; the arguments are those of `train`.

  Raises:
    ConfigError: see above.
  """
  start_lib.check_model_dir(model_dir)
  start_lib.check_optimizer(model)
  plan_lib.check_period('eval_steps', eval_steps)
  evaluation.check_evaluator_cls(inference_evaluator_cls, infer_eval_dataset_cfg, infer_eval_cfg)


def open_data(
    stack: contextlib.ExitStack, *, model: models.BaseModel, partitioner: partitioning.BasePartitioner,
    train_dataset_cfg: data.DatasetConfig, train_eval_dataset_cfg: data.DatasetConfig | None,
    infer_eval_dataset_cfg: data.DatasetConfig | None, eval_steps: int | None, inference_evaluator_cls: Any,
    infer_eval_cfg: evaluation.InferenceEvalConfig, get_dataset_fn: Callable[..., data.HostIterator],
    train_eval_get_dataset_fn: Callable[..., Mapping[str, data.EvalBatches]],
    verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None, num_prefetched_batches: int = 2,
    num_retries: int = 0, concurrent_metrics: bool = False, log_dir: str | None = None,
    note_fn: Callable[[str], None] = lambda text: None,
    open_fn: Callable[[Callable[[], Any], str], Any] = lambda fn, doing: fn()) -> RunData:
  """Opens the data to train on and to evaluate on, after it has been compared with the mesh and the model.

  Args:
    stack: closes what is opened.
    log_dir: where evaluations by decoding are written; None writes nothing.
    note_fn: told what is going on.
    open_fn: calls a function that opens data, e.g. `waiting.DataWaits.call`; its second argument says what is done.
    model, partitioner, and all others: see `train`.

  Raises:
    ConfigError: a batch that does not divide over the mesh, or data of another vocabulary than the model's.
    DataError: unknown or empty data.
  """
  layout = partitioner.get_data_layout(train_dataset_cfg.batch_size)
  evaluation.check_eval_batch(train_eval_dataset_cfg, partitioner)
  evaluation.check_eval_batch(infer_eval_dataset_cfg, partitioner)
  note_fn(f'opening the data: {train_dataset_cfg.name}')

  def open_training() -> data.HostIterator:
    if verify_matching_vocabs_fn is not None:
      for cfg in (train_dataset_cfg, train_eval_dataset_cfg):
        if cfg is not None:
          verify_matching_vocabs_fn(cfg, model)
    return get_dataset_fn(train_dataset_cfg, layout, feature_converter=model.FEATURE_CONVERTER)

  host_iterator = open_fn(open_training, 'opening the training data')
  # `get_dataset_fn` may be a user's, and what it returns of another class.
  knows_truncation = isinstance(host_iterator, data.HostIterator)
  batches = stack.enter_context(contextlib.closing(data.GlobalBatches(
      host_iterator, partitioner, num_prefetched_batches, num_retries=num_retries)))
  eval_batches: Mapping[str, data.EvalBatches] = {}
  if train_eval_dataset_cfg is not None:
    eval_layout = partitioner.get_data_layout(train_eval_dataset_cfg.batch_size)
    eval_batches = open_fn(lambda: train_eval_get_dataset_fn(
        train_eval_dataset_cfg, eval_layout, eval_steps, feature_converter=model.FEATURE_CONVERTER),
        'opening the evaluation data')
  evaluator = None
  if infer_eval_dataset_cfg is not None:
    evaluator = open_fn(lambda: evaluation.InferenceEvaluator(
        infer_eval_dataset_cfg, inference_evaluator_cls, model, partitioner, log_dir=log_dir,
        verify_matching_vocabs_fn=verify_matching_vocabs_fn, cfg=infer_eval_cfg, concurrent_metrics=concurrent_metrics),
        'opening the data to evaluate by decoding')
    stack.callback(evaluator.close)
  return RunData(
      batches=batches, eval_batches=eval_batches, evaluator=evaluator,
      sample_truncation_fn=host_iterator.sample_truncation if knows_truncation else lambda: None)


def make_trainer(
    stack: contextlib.ExitStack, run_data: RunData, *, model: models.BaseModel,
    partitioner: partitioning.BasePartitioner, trainer_cls: trainer_lib.BaseTrainerConstructor,
    train_state_initializer_cls: type[state_init.TrainStateInitializer], random_seed: int, use_hardware_rng: bool,
    summary_dir: str | None, first_step: int = 0, last_step: int = 0) -> RunTrainer:
  """Makes the trainer from the state's shapes, so that everything is checked before anything is computed.

  Args:
    stack: closes the trainer.
    run_data: what it reads.
    model: the model with its optimizer.
    partitioner: the mesh and what is sharded over it.
    trainer_cls: makes the trainer.
    train_state_initializer_cls: makes the state.
    random_seed: of parameters and dropout.
    use_hardware_rng: use the hardware's generator.
    summary_dir: where training is written; None writes nothing.
    first_step: number of steps made before the run, where schedules are looked at.
    last_step: number of steps made after it; they are looked at in its last step too.

  Raises:
    ConfigError: the batch or the learning rates do not fit the trainer.
  """
  spec = run_data.batches.element_spec
  rng_impl = 'unsafe_rbg' if use_hardware_rng else 'threefry2x32'
  init_rng, trainer_rng = jax.random.split(jax.random.key(random_seed, impl=rng_impl))
  initializer = train_state_initializer_cls(
      model.optimizer_def, model.get_initial_variables, {name: leaf.shape for name, leaf in spec.items()},
      partitioner, {name: leaf.dtype for name, leaf in spec.items()})
  trainer = stack.enter_context(trainer_cls(
      model=model, train_state=initializer.global_train_state_shape, partitioner=partitioner,
      eval_names=list(run_data.eval_batches), summary_dir=summary_dir, train_state_axes=initializer.train_state_axes,
      rng=trainer_rng))
  start_lib.check_learning_rates(trainer, model.optimizer_def, [first_step, max(first_step, last_step - 1)])
  trainer.check_batch(spec)
  return RunTrainer(trainer=trainer, initializer=initializer, init_rng=init_rng)


def trace_steps(made: RunTrainer, run_data: RunData) -> None:
  """Traces the steps of training and evaluation, so that what shows only there is refused; compiles nothing.

  Args:
    made: the trainer, which runs no step after this.
    run_data: what it reads.
  """
  state = made.initializer.global_train_state_shape
  made.trainer.partitioned_train_step().trace(state, run_data.batches.element_spec)
  eval_specs = [batches.element_spec for batches in run_data.eval_batches.values()]
  eval_step = made.trainer.partitioned_eval_step()
  # Evaluations whose batches look alike share a step.
  for i, spec in enumerate(eval_specs):
    if spec not in eval_specs[:i]:
      eval_step.trace(state, spec)
