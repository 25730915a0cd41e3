"""Parts of a run before its first step: configuration, data, evaluators and trainer.

`train` and `precompile` share them, so that precompiled programs are exactly those of a run.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import logging
import math
from typing import Any, Self

import jax

from t5x_lite import checks
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import layers
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import random_numbers
from t5x_lite.apps.common import starting_point
from t5x_lite.apps.common.evaluations import OpenEvaluation
from t5x_lite.errors import MissingSplitError
from t5x_lite.trainer import averaging
from t5x_lite.trainer import eval_steps
from t5x_lite.trainer import state_init
from t5x_lite.trainer import trainer as trainer_lib
from t5x_lite.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Options that `train` and `precompile` share; those without a default have one in `precompile`.

  Attributes:
    model: the model with its optimizer.
    train_dataset_cfg: training data.
    train_eval_dataset_cfg: data of teacher-forced evaluations, or None.
    infer_eval_dataset_cfg: data of evaluations by decoding, or None.
    partitioner: the mesh and the sharding rules.
    trainer_cls: constructor of the trainer, e.g. `trainer.Trainer` with its learning-rate schedule bound.
    model_dir: the run directory; only one running process may use it.
    eval_steps: maximum number of batches per teacher-forced evaluation; None for the entire split.
    random_seed: seed of parameters and dropout. None is 0, or the seed that a resumed run has recorded.
    use_hardware_rng: use a generator that is faster on accelerators; its numbers depend on the mesh.
    inference_evaluator_cls: None, or seqio.Evaluator; see `evaluation.InferenceEvaluator`.
    get_dataset_fn: opens the training data, like `data.open_train_iterator` or T5X's `data.get_dataset`.
    train_eval_get_dataset_fn: opens the evaluation data, like `data.open_eval_iterators` or T5X's
      `data.get_training_eval_datasets`.
    train_state_initializer_cls: class of the state initializer.
    verify_matching_vocabs_fn: raises if the vocabularies of data and model differ; None skips the check.
    infer_eval_cfg: options of evaluations by decoding.
    evaluations: further evaluations, each with its data, batch size, metrics and steps.
    param_ema: running average of the parameters, saved and by default used for evaluations; None keeps none.

  Raises:
    ConfigError: options are out of range or contradict each other.
  """

  model: models.BaseModel
  train_dataset_cfg: data.DatasetConfig
  train_eval_dataset_cfg: data.DatasetConfig | None
  infer_eval_dataset_cfg: data.DatasetConfig | None
  partitioner: partitioning.PjitPartitioner
  trainer_cls: trainer_lib.BaseTrainerConstructor
  model_dir: str
  eval_steps: int | None
  random_seed: int | None = 0
  use_hardware_rng: bool = False
  inference_evaluator_cls: Any = None
  get_dataset_fn: Callable[..., Any] = data.get_dataset
  train_eval_get_dataset_fn: Callable[..., Mapping[str, Any]] = data.get_training_eval_datasets
  train_state_initializer_cls: type[state_init.TrainStateInitializer] = (
    state_init.TrainStateInitializer
  )
  verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None = (
    data.verify_matching_vocabs
  )
  infer_eval_cfg: evaluation.InferenceEvalConfig = evaluation.InferenceEvalConfig()
  evaluations: Sequence[evaluation.Evaluation] = ()
  param_ema: averaging.ParamEma | None = None

  def __post_init__(self):
    starting_point.check_model_dir('train', 'model_dir', self.model_dir)
    for argument in ('train_dataset_cfg', 'train_eval_dataset_cfg', 'infer_eval_dataset_cfg'):
      dataset_cfg = getattr(self, argument)
      if dataset_cfg is not None:
        dataset_cfg.validated(argument)
    self.train_dataset_cfg.check_lengths_are_given('training', 'train_dataset_cfg')
    starting_point.check_optimizer(self.model)
    checks.check(
      'train',
      vars(self),
      eval_steps=checks.number(at_least=1, integer=True).or_none(),
      random_seed=starting_point.SEED,
      param_ema=checks.instance(
        (averaging.ParamEma, type(None)), 'a ParamEma or None', 'Use @averaging.ParamEma().'
      ),
    )
    checks.check(
      'train',
      vars(self),
      evaluations=checks.Expectation(
        'a list of Evaluations',
        lambda given: all(isinstance(each, evaluation.Evaluation) for each in given),
        'In gin: [@a/evaluation.Evaluation(), ...].',
      ),
    )
    checks.check(
      'train',
      {'evaluations': [each.name for each in self.evaluations]},
      evaluations=checks.Expectation(
        'Evaluations with different names',
        lambda names: len(names) == len(set(names)),
        'Set another `Evaluation.name`.',
      ),
    )
    for each in self.evaluations:
      each.dataset_cfg.check()
    evaluation.check_evaluator_cls(
      self.inference_evaluator_cls, self.infer_eval_dataset_cfg, self.infer_eval_cfg
    )
    for each in self.evaluations:
      if each.decode:
        evaluation.check_evaluator_cls(
          self.inference_evaluator_cls, each.dataset_cfg, each.infer_eval_cfg
        )

  def with_earlier_sentinels(self) -> Self:
    """Return the configuration of a run that an earlier version recorded; see `DatasetConfig.earlier_sentinels`."""

    def changed(dataset_cfg: Any) -> Any:
      return dataset_cfg and data.with_earlier_sentinels(dataset_cfg)

    return dataclasses.replace(
      self,
      train_dataset_cfg=changed(self.train_dataset_cfg),
      train_eval_dataset_cfg=changed(self.train_eval_dataset_cfg),
      infer_eval_dataset_cfg=changed(self.infer_eval_dataset_cfg),
      evaluations=[
        dataclasses.replace(each, dataset_cfg=changed(each.dataset_cfg))
        for each in self.evaluations
      ],
    )

  @property
  def rng_impl(self) -> str:
    """Name of JAX's random number generator."""
    if self.use_hardware_rng:
      return random_numbers.HARDWARE_IMPL
    return 'threefry2x32'


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """Data of a run.

  Attributes:
    batches: global training batches; nothing is read before the first batch is requested.
    evaluations: the evaluations, those of `train_eval_dataset_cfg` and `infer_eval_dataset_cfg` first.
    sample_truncation_fn: see `data.HostIterator.sample_truncation`.
  """

  batches: data.GlobalBatches
  evaluations: Sequence[OpenEvaluation]
  sample_truncation_fn: Callable[[], data.Truncation | None]

  @property
  def eval_batches(self) -> dict[str, data.EvalBatches]:
    """Batches of the teacher-forced evaluations, by the trainer's name of the task."""
    batches_by_task = {}
    for each in self.evaluations:
      for task, batches in each.batches.items():
        batches_by_task[each.task_of_run(task)] = batches
    return batches_by_task

  @property
  def eval_programs(self) -> list[tuple[list[str], eval_steps.MetricFns, Batch]]:
    """(trainer's names of the tasks, metric functions, shapes of a batch) of each teacher-forced evaluation step."""
    found: dict[Any, tuple[list[str], eval_steps.MetricFns, Batch]] = {}
    for each in self.evaluations:
      for task, batches in each.batches.items():
        program = found.setdefault(
          eval_steps.program_key(each.metric_fns, batches.element_spec),
          ([], each.metric_fns, batches.element_spec),
        )
        program[0].append(each.task_of_run(task))
    return list(found.values())

  @property
  def element_specs(self) -> dict[str, Batch]:
    """Shapes and dtypes of global batches, by dataset and feature name."""
    specs = {'training': self.batches.element_spec}
    for each in self.evaluations:
      for name, batches in each.batches.items():
        specs[f'{each.folder}/{name}'] = batches.element_spec
      if each.evaluator is not None:
        for task in each.evaluator.eval_tasks:
          specs[f'{each.folder}/{task.name}'] = task.element_spec
    return specs


# Evaluations that the run files configure for each task, and their split.
_SHORT_FORMS = (evaluation.TRAINING_EVAL, evaluation.INFERENCE_EVAL)
_DEFAULT_SPLIT = 'validation'


def open_data(
  stack: contextlib.ExitStack,
  cfg: RunConfig,
  *,
  num_prefetched_batches: int = 2,
  num_retries: int = 0,
  concurrent_metrics: bool = False,
  log_dir: str | None = None,
  note_fn: Callable[[str], None] = lambda text: None,
  open_fn: Callable[..., Any] = lambda fn, doing, close_fn=None: fn(),
) -> RunData:
  """Check the data against mesh and model, then open the training and evaluation data.

  A task without a validation split is trained without the evaluations of the short form on this task, and one without
  metrics without the short form of the evaluation by decoding.

  Args:
    stack: exit stack that closes the data.
    cfg: configuration of the run.
    num_prefetched_batches: see `train`.
    num_retries: see `train`.
    concurrent_metrics: see `train`.
    log_dir: folder for the results of evaluations by decoding and for the lengths of their data; None writes nothing.
    note_fn: called with a description of the work.
    open_fn: calls a function that opens data; same arguments as `waiting.DataWaits.call`.

  Raises:
    ConfigError: a batch size is not divisible by the data axes of the mesh, or the vocabularies of data and model
      differ.
    DataError: the data is unknown or empty.
  """
  partitioner = cfg.partitioner
  converter = cfg.model.FEATURE_CONVERTER
  layout = partitioner.get_data_layout(cfg.train_dataset_cfg.batch_size)
  for _, _, each in _evaluations(cfg):
    evaluation.check_eval_batch(each.dataset_cfg, partitioner)
  note_fn(f'opening the data: {cfg.train_dataset_cfg.name}')

  def open_training() -> data.HostIterator:
    if cfg.verify_matching_vocabs_fn is not None:
      teacher_forced = [each.dataset_cfg for _, _, each in _evaluations(cfg) if not each.decode]
      for dataset_cfg in (cfg.train_dataset_cfg, *teacher_forced):
        cfg.verify_matching_vocabs_fn(dataset_cfg, cfg.model)
    return data.open_train_data(cfg.get_dataset_fn, cfg.train_dataset_cfg, layout, converter)

  host_iterator = open_fn(open_training, 'opening the training data', lambda opened: opened.close())
  # A user's `get_dataset_fn` may return an iterator of another class.
  knows_truncation = isinstance(host_iterator, data.HostIterator)
  batches = stack.enter_context(
    contextlib.closing(
      data.GlobalBatches(
        host_iterator, partitioner, num_prefetched_batches, num_retries=num_retries
      )
    )
  )
  opened = []

  def open_one(name: str, folder: str, each: evaluation.Evaluation) -> None:
    if each.decode:
      evaluator = open_fn(
        lambda: evaluation.InferenceEvaluator(
          each.dataset_cfg,
          cfg.inference_evaluator_cls,
          cfg.model,
          partitioner,
          log_dir=log_dir,
          verify_matching_vocabs_fn=cfg.verify_matching_vocabs_fn,
          cfg=each.infer_eval_cfg,
          concurrent_metrics=concurrent_metrics,
          folder=folder,
        ),
        f'opening the evaluation data of {name}',
        lambda opened: opened.close(),
      )
      stack.callback(evaluator.close)
      opened.append(OpenEvaluation(name=name, folder=folder, evaluator=evaluator))
    else:
      batches_by_task = open_fn(
        lambda: data.open_eval_data(
          cfg.train_eval_get_dataset_fn,
          each.dataset_cfg,
          partitioner.get_data_layout(each.dataset_cfg.batch_size),
          each.num_batches,
          converter,
          log_dir,
        ),
        f'opening the evaluation data of {name}',
      )
      for task, batches in batches_by_task.items():
        if batches.num_examples < (each.num_batches or 0) * each.dataset_cfg.batch_size:
          checks.log_for_t5x(
            f'{name} reads the {batches.num_examples} rows of {task!r} once per evaluation; T5X repeats them until '
            f'there are {each.num_batches} batches.'
          )
      opened.append(
        OpenEvaluation(
          name=name, folder=folder, batches=batches_by_task, metric_fns=each.metric_fns
        )
      )

  missing = []
  for name, folder, each in _evaluations(cfg):
    try:
      open_one(name, folder, each)
    except MissingSplitError as error:
      is_default = name in _SHORT_FORMS and error.split == _DEFAULT_SPLIT
      # An evaluation on another task was asked for by name.
      if not is_default or each.dataset_cfg.name != cfg.train_dataset_cfg.name:
        raise
      missing.append(name)
    except evaluation.NoMetricsError as error:
      if name not in _SHORT_FORMS:
        raise
      logging.getLogger(__name__).info('No %s during training: %s', name, error)
  if missing:
    logging.getLogger(__name__).info(
      'No %s during training: %r has no split %r.',
      ' and '.join(missing),
      cfg.train_dataset_cfg.name,
      _DEFAULT_SPLIT,
    )
  return RunData(
    batches=batches,
    evaluations=opened,
    sample_truncation_fn=host_iterator.sample_truncation if knows_truncation else lambda: None,
  )


def _evaluations(cfg: RunConfig) -> list[tuple[str, str, evaluation.Evaluation]]:
  """Return (name, folder, evaluation) of all evaluations; `when` is not set for those of the short form."""
  found = []
  if cfg.train_eval_dataset_cfg is not None:
    found.append(
      (
        evaluation.TRAINING_EVAL,
        evaluation.TRAINING_EVAL,
        evaluation.Evaluation(
          name='short_form', dataset_cfg=cfg.train_eval_dataset_cfg, num_batches=cfg.eval_steps
        ),
      )
    )
  if cfg.infer_eval_dataset_cfg is not None:
    found.append(
      (
        evaluation.INFERENCE_EVAL,
        evaluation.INFERENCE_EVAL,
        evaluation.Evaluation(
          name='short_form',
          dataset_cfg=cfg.infer_eval_dataset_cfg,
          decode=True,
          infer_eval_cfg=cfg.infer_eval_cfg,
        ),
      )
    )
  return found + [(each.name, each.folder, each) for each in cfg.evaluations]


def make_trainer(
  stack: contextlib.ExitStack,
  cfg: RunConfig,
  run_data: RunData,
  *,
  random_seed: int,
  summary_dir: str | None,
  first_step: int = 0,
  last_step: float = 0,
) -> tuple[trainer_lib.BaseTrainer, state_init.TrainStateInitializer, jax.Array]:
  """Return a trainer that holds shapes instead of arrays, so that everything is checked before computation starts.

  Args:
    stack: exit stack that closes the trainer.
    cfg: configuration of the run.
    run_data: data of the run.
    random_seed: seed of parameters and dropout.
    summary_dir: folder for training metrics; None writes nothing.
    first_step: number of steps before the run; schedules are checked at this step.
    last_step: number of steps at the end of the run; schedules are checked at its last step too, if it is finite.

  Returns:
    (trainer with shapes, state initializer, key for new parameters).

  Raises:
    ConfigError: the batch or the learning rates are not supported by the trainer, or a metric function of an evaluation
      is invalid.
  """
  spec = run_data.batches.element_spec
  init_rng, trainer_rng = jax.random.split(jax.random.key(random_seed, impl=cfg.rng_impl))
  initializer = cfg.train_state_initializer_cls(
    cfg.model.optimizer_def,
    cfg.model.get_initial_variables,
    {name: leaf.shape for name, leaf in spec.items()},
    cfg.partitioner,
    {name: leaf.dtype for name, leaf in spec.items()},
    **({} if cfg.param_ema is None else {'param_ema': cfg.param_ema}),
  )
  trainer = stack.enter_context(
    checks.call_custom(
      '',
      'trainer_cls',
      'model=, train_state=, partitioner=, eval_names=, summary_dir=, train_state_axes=, rng=',
      cfg.trainer_cls,
      model=cfg.model,
      train_state=initializer.global_train_state_shape,
      partitioner=cfg.partitioner,
      eval_names=list(run_data.eval_batches),
      summary_dir=summary_dir,
      train_state_axes=initializer.train_state_axes,
      rng=trainer_rng,
    )
  )
  steps = [first_step]
  if first_step < last_step < math.inf:
    steps.append(int(last_step) - 1)
  starting_point.check_learning_rates(trainer, cfg.model.optimizer_def, steps)
  if cfg.param_ema is not None:
    skips = trainer.non_finite.policy.action == 'skip'
    checks.check(
      'ParamEma',
      {'debias': cfg.param_ema.debias},
      debias=checks.Expectation(
        "False with NonFinitePolicy.action='skip'",
        lambda debias: not (debias and skips),
        'It counts skipped steps as updates. Set start_step or a schedule instead, or another action.',
      ),
    )
    cfg.param_ema.check_decay(steps)
    logging.getLogger(__name__).info(
      'An average of the parameters is kept%s: %s.',
      (' and evaluated' if cfg.param_ema.evaluate else ''),
      cfg.param_ema,
    )
  trainer.check_batch(spec)
  # Metric functions of evaluations run late; those of the model are traced with the training step.
  for _, metric_fns, eval_spec in run_data.eval_programs:
    if metric_fns is not None:
      trainer.eval_steps.make(metric_fns).trace(trainer.step_state, eval_spec)
  for each in run_data.evaluations:
    if each.evaluator is not None:
      each.evaluator.check(initializer.global_train_state_shape, initializer.train_state_axes)
  return trainer, initializer, init_rng


def trace_steps(trainer: trainer_lib.BaseTrainer, run_data: RunData) -> list[layers.KernelChoice]:
  """Trace the training and evaluation steps to find errors that only tracing shows; compile nothing.

  Args:
    trainer: trainer, which must not run steps afterwards.
    run_data: data of the run.

  Returns:
    The kernels that `attention_kernel='auto'` takes in the steps.
  """
  with layers.kernel_choices() as choices:
    trainer.make_train_step().trace(
      trainer.step_state, run_data.batches.element_spec, *trainer.step_arguments(is_last=False)
    )
    for _, metric_fns, spec in run_data.eval_programs:
      if metric_fns is None:  # `make_trainer` has traced the others.
        trainer.eval_steps.make().trace(trainer.step_state, spec)
  return choices
