"""Trains a model: the whole job, from configured objects to the last checkpoint, in one body.

    python -m t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze

The same command goes on with a run that was stopped or killed, and such a run is bitwise the run that was not.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import logging
import os
from typing import Any

import jax

from t5x_lite import actions as actions_lib
from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import models
from t5x_lite import multihost
from t5x_lite import partitioning
from t5x_lite import runtime
from t5x_lite import standard_streams
from t5x_lite import state_init
from t5x_lite import summaries
from t5x_lite import trainer as trainer_lib
from t5x_lite.actions import ActionMode, run_actions, TRAIN_METRIC_KEY
from t5x_lite.apps.common import parts as parts_lib
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common import report
from t5x_lite.apps.common import start as start_lib
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.evaluations import due_kinds, EvaluationInterrupted, RunEvaluations
from t5x_lite.apps.train.batches import TrainBatches
from t5x_lite.apps.train.config import TrainConfig
from t5x_lite.apps.train.loop import TrainLoop
from t5x_lite.apps.train.saves import TrainSaves
from t5x_lite.errors import ConfigError, StoppedOnSignalError
from t5x_lite.train_state import TrainState

# T5X's names for what stands in `actions`.
__all__ = ['TRAIN_METRIC_KEY', 'run_actions', 'train']


def train(
    *,
    model: models.BaseModel,
    train_dataset_cfg: data.DatasetConfig,
    train_eval_dataset_cfg: data.DatasetConfig | None,
    infer_eval_dataset_cfg: data.DatasetConfig | None,
    checkpoint_cfg: checkpoints.CheckpointConfig,
    partitioner: partitioning.PjitPartitioner,
    trainer_cls: trainer_lib.BaseTrainerConstructor,
    model_dir: str,
    total_steps: int | None,
    eval_steps: int | None,
    eval_period: int | None,
    relative_steps: int | None = None,
    stats_period: int | None = None,
    random_seed: int | None = 0,
    use_hardware_rng: bool = False,
    summarize_config_fn: Callable[[str, Any, int], None] | None = None,
    inference_evaluator_cls: Any = None,
    get_dataset_fn: Callable[..., data.HostIterator] = data.open_train_iterator,
    actions: Mapping[str | ActionMode, Sequence[actions_lib.BaseAction]] | None = None,
    train_eval_get_dataset_fn: Callable[..., Mapping[str, data.EvalBatches]] = data.open_eval_iterators,
    run_eval_before_training: bool = False,
    train_state_initializer_cls: type[state_init.TrainStateInitializer] = state_init.TrainStateInitializer,
    verify_matching_vocabs_fn: Callable[[data.DatasetConfig, Any], None] | None = data.verify_matching_vocabs,
    gc_period: int = 0,
    num_prefetched_batches: int = 2,
    num_retries: int = 3,
    max_batch_seconds: float | None = None,
    max_step_seconds: float | None = None,
    max_evaluation_seconds: float | None = None,
    max_saving_seconds: float | None = None,
    profile_steps: Sequence[int] | None = None,
    infer_eval_period: int | None = None,
    infer_eval_cfg: evaluation.InferenceEvalConfig = evaluation.InferenceEvalConfig(),
    concurrent_metrics: bool = True,
    dry_run: bool = False,
) -> tuple[int, TrainState]:
  """Trains a model, evaluates it on the way, and saves it.

  The run starts from its own newest sound checkpoint in `model_dir`, else from the one that `checkpoint_cfg.restore`
  names, else from scratch. At one and the same step evaluation comes before saving, so that a checkpoint stands for
  everything that was written up to its step.

  Args:
    model: the model with its optimizer.
    train_dataset_cfg: what to train on.
    train_eval_dataset_cfg: what to evaluate on with given targets (teacher forcing), or None.
    infer_eval_dataset_cfg: what to evaluate on by decoding, or None.
    checkpoint_cfg: what to save when, and what to start from.
    partitioner: the mesh and what is sharded over it.
    trainer_cls: makes the trainer, e.g. `trainer.Trainer` with its learning-rate schedule bound.
    model_dir: the run's directory; one live run may hold it.
    total_steps: the step at which the run ends, counted from the model's first; None with `relative_steps`.
    eval_steps: the most batches of a teacher-forced evaluation; None is the whole split.
    eval_period: evaluate every so many steps; None only at the end. The last step is always evaluated.
    relative_steps: instead of `total_steps`, the number of steps after the checkpoint that the run first started from.
    stats_period: write training metrics every so many steps; None is a tenth of `eval_period`. They are also written
      wherever the run pauses for something else. With actions for training, the run waits for the device there.
    random_seed: of parameters and dropout. None takes the clock once and keeps it over restarts, and like T5X uses the
      hardware's generator.
    use_hardware_rng: use a generator that is faster on accelerators; its numbers depend on the mesh.
    summarize_config_fn: called with (model_dir, summary writer or None, step) to record the configuration.
    inference_evaluator_cls: None, or seqio.Evaluator; see `evaluation.InferenceEvaluator`.
    get_dataset_fn: opens the training data, as `data.open_train_iterator`.
    actions: 'TRAIN', 'TRAIN_EVAL' or 'INFER_EVAL' to actions that may stop the run.
    train_eval_get_dataset_fn: opens the evaluation data, as `data.open_eval_iterators`.
    run_eval_before_training: evaluate also before the first step of the run.
    train_state_initializer_cls: makes the state.
    verify_matching_vocabs_fn: refuses data whose vocabulary is not the model's; None does not look.
    gc_period: collect garbage every so many steps only; 0 leaves it to Python.
    num_prefetched_batches: batches prepared in the background.
    num_retries: how many times in a row to reopen training data that raised an OSError or a DataUnavailableError, at
      the position of the batch that failed or at the saved one, after 1, 2, 4, ... seconds.
    max_batch_seconds: save and end the run when the training data gives no batch for so long; None only warns, with the
      stacks of all threads, every 5 minutes. The first batch, also after a roll-back, may take as long as it needs.
    max_step_seconds: end the run, with the stacks of all threads, when a step takes longer; None only warns, once, with
      the stacks, when a step takes longer than 10 minutes and than 20 times the median.
    max_evaluation_seconds: the same limit for a batch of an evaluation; None warns after 30 minutes.
    max_saving_seconds: the same limit for the time that training waits for a save; None warns after 30 minutes.
    profile_steps: (first, last); the steps after `first` up to `last` are traced into `model_dir/train`.
    infer_eval_period: evaluate by decoding every so many steps; None is `eval_period`.
    infer_eval_cfg: how to evaluate by decoding.
    concurrent_metrics: compute the metrics of decoded texts, and write them, while training goes on. The run waits for
      them before it saves, evaluates again, or lets actions look at them.
    dry_run: print what would be done, and do nothing.

  Returns:
    (number of steps taken, state); with `dry_run` the state's shapes.

  Raises:
    ConfigError: options that are out of range or contradict each other; before any compute.
    DataError: unknown or empty data.
    CheckpointError: a checkpoint is missing, damaged or does not fit.
    DirectoryInUseError: another run holds `model_dir`.
    DataStalledError: the training data gave no batch within `max_batch_seconds`; the state is saved.
    Exception: of the training data's own; the state is saved before it is raised, except with several processes.
    NonFiniteMetricError: a loss, a gradient norm, the state or a watched metric was not finite, and the policy of the
      trainer (`trainer.NonFinitePolicy`) does not continue; nothing is saved after it.
    SaveError: the last save failed, or several in a row.
    StoppedOnSignalError: stopped by SIGINT, SIGTERM or SIGHUP; the state is saved, and the message has the command to
      resume.
  """
  cfg = TrainConfig(**locals())
  watchdog = runtime.Watchdog(cfg.max_step_seconds, max_evaluation_seconds=cfg.max_evaluation_seconds,
                              max_saving_seconds=cfg.max_saving_seconds)
  profiler = runtime.StepProfiler(cfg.profile_steps, os.path.join(cfg.model_dir, 'train'))
  with contextlib.ExitStack() as stack:
    if not cfg.dry_run:
      stack.enter_context(standard_streams.lossy_output('stdout', 'stderr'))
      stack.enter_context(checkpoints.lock_model_dir(cfg.model_dir))
    signals = stack.enter_context(runtime.StopSignals('ending before the first step'))
    opening = waiting.DataWaits(signals, lambda doing: StoppedOnSignalError(
        f'Stopped by {signals.name} before the first step, while {doing}; there is nothing new to save.'))
    progress = runtime.Progress(enabled=multihost.is_lead() and not cfg.dry_run)
    stack.callback(progress.clear)

    # Data: an iterator of global batches, divided over processes and devices, and finite batches to evaluate on.
    run_data = parts_lib.open_data(
        stack, cfg, num_prefetched_batches=cfg.num_prefetched_batches, num_retries=cfg.num_retries,
        concurrent_metrics=cfg.concurrent_metrics, log_dir=cfg.model_dir, note_fn=progress.note, open_fn=opening.call)
    batches, save_cfg = run_data.batches, cfg.checkpoint_cfg.save
    if save_cfg is not None and save_cfg.save_dataset:
      # A pipeline that does not know its position is an error now, rather than at the first save.
      opening.until(batches.open, 'reading the position in the training data')

    # Starting point: this run's checkpoint, the configured one, or none; and the plan that follows from it.
    progress.note('looking for checkpoints')
    start = start_lib.choose_start(cfg.model_dir, cfg.checkpoint_cfg)
    first_step, facts = start.step, start_lib.facts_of_run(start, cfg.random_seed)
    last_step = plan_lib.total_steps_of_run(cfg.total_steps, cfg.relative_steps, facts['start_step'])
    if first_step > last_step:
      raise ConfigError(f'{start.path} is at step {first_step}, past the end of the run at step {last_step}: raise '
                        'total_steps (TRAIN_STEPS), which counts the steps of the checkpoint too, or choose another '
                        'model_dir.')
    profiler.check(facts['start_step'], last_step)

    # Trainer: made from the state's shapes, so that everything is checked before anything is computed.
    trainer, initializer, init_rng = parts_lib.make_trainer(
        stack, cfg, run_data, random_seed=facts['random_seed'], summary_dir=None if cfg.dry_run else cfg.model_dir,
        first_step=first_step, last_step=last_step)
    state_shape = initializer.global_train_state_shape
    start_lib.check_start(start, state_shape, cfg.model, applies_transforms=cfg.dry_run)

    def should_stop() -> bool:
      # One process may stop after any step; several agree at the end of a stretch.
      return signals.requested and jax.process_count() == 1

    def note(text: str) -> None:
      if should_stop():
        raise EvaluationInterrupted
      watchdog.beat(trainer.step)
      progress.note(text)

    evaluations = stack.enter_context(contextlib.closing(RunEvaluations(
        trainer=trainer, eval_batches=run_data.eval_batches, evaluator=run_data.evaluator,
        summary_dir=None if cfg.dry_run else cfg.model_dir, progress=progress, note_fn=note,
        compiling_fn=functools.partial(watchdog.watching, None), actions=cfg.actions_by_mode,
        read_fn=waiting.DataWaits(signals, lambda doing: EvaluationInterrupted(), on_wait=watchdog.beat).iterate)))
    if save_cfg is not None and save_cfg.keep_best is not None:
      evaluations.check_metric_name('SaveCheckpointConfig.metric_name_to_monitor', save_cfg.metric_name_to_monitor)
    plan_fn = functools.partial(cfg.plan, last_step=last_step, kinds=evaluations.kinds, pause_steps=profiler.pause_steps)
    if cfg.dry_run:
      parts_lib.trace_steps(trainer, state_shape, run_data)
      print(report.describe(
          train_state_shape=state_shape, partitioner=cfg.partitioner, specs=run_data.element_specs, start=start,
          stretches=list(plan_fn(first_step)), num_microbatches=trainer.num_microbatches))
      return first_step, state_shape

    # State: restored or new, before anything is written, since a checkpoint may not fit.
    progress.note(f'making the state: {start.description}')
    trainer.train_state, restored = start_lib.make_state(start, initializer, cfg.partitioner, cfg.model, init_rng)
    if restored is not None and trainer.non_finite.policy.tests:
      start_lib.check_finite(start, trainer.train_state)
    has_position = restored is not None and restored.data_state is not None
    if has_position:
      batches.set_state(restored.data_state)
      opening.until(batches.open, 'going to the saved position in the training data')
    elif start.resumes:
      logging.getLogger(__name__).warning(
          'The checkpoint holds no position in the data (save_dataset=False): the data starts from its beginning.')
    start_lib.record_data(start, facts, cfg.train_dataset_cfg)
    manager = None
    if save_cfg is not None:
      manager = stack.enter_context(checkpoints.CheckpointManager(cfg.model_dir, save_cfg=save_cfg))

    # Files: what was written after the starting point will be written again, so it is cut.
    progress.log(f'Training in {cfg.model_dir}: {report.run_header(state_shape, cfg.partitioner)}.')
    progress.log(f'Starting from {start.description} at step {first_step:,}, to step {last_step:,}.')
    # Was the run stopped while this step's evaluation was due? Then it is still to come.
    evaluation_due = due_kinds(facts.get('evaluation_due', False), evaluations.kinds)
    if multihost.is_lead():
      _begin_files(cfg, start, run_data, trainer, progress, redo_evaluation=bool(evaluation_due))
    if cfg.run_eval_before_training and not start.resumes:
      evaluation_due = evaluations.kinds

    # Loop: train, evaluate, save; roll back where the policy for numbers that are not finite says so.
    train_batches = TrainBatches(
        batches, should_stop=should_stop, facts=facts if has_position else {}, first_step=first_step,
        max_batch_seconds=cfg.max_batch_seconds, on_wait=watchdog.beat)
    first_data_state = None
    if not start.resumes and trainer.non_finite.policy.roll_back_limit:
      opening.until(batches.open, 'reading the position in the training data')
      first_data_state = train_batches.get_state()
    saves = None
    if manager is not None:
      saves = TrainSaves(manager, cfg, trainer=trainer, evaluations=evaluations, batches=train_batches, run_facts=facts,
                         progress=progress)
    if should_stop():
      raise StoppedOnSignalError(f'Stopped by {signals.name} before the first step; there is nothing new to save.')
    del restored, run_data, state_shape  # their memory is the loop's
    collect_garbage = stack.enter_context(runtime.manual_gc(cfg.gc_period > 0))
    stack.callback(watchdog.close)
    stack.callback(profiler.close)
    loop = TrainLoop(
        cfg=cfg, trainer=trainer, initializer=initializer, init_rng=init_rng, batches=train_batches,
        evaluations=evaluations, saves=saves, start=start, plan_fn=plan_fn, last_step=last_step, facts=facts,
        first_data_state=first_data_state, progress=progress, watchdog=watchdog, profiler=profiler, signals=signals,
        collect_garbage_fn=collect_garbage, evaluation_due=evaluation_due)
    loop.begin()
    while (stretch := loop.next_stretch()) is not None:
      loop.train(stretch)
      loop.evaluate()
      loop.save()
      loop.recover()
    step, train_state = loop.end()
    if multihost.is_lead():
      print(report.final_report(cfg.model_dir, bad_steps_in_a_row=trainer.non_finite.bad_steps_in_a_row), flush=True)
    return step, train_state


def _begin_files(cfg: TrainConfig, start: start_lib.StartingPoint, run_data: parts_lib.RunData,
                 trainer: trainer_lib.BaseTrainer, progress: runtime.Progress, *, redo_evaluation: bool) -> None:
  """Cuts what was written after the starting point, and writes what is known before the first step.

  Args:
    cfg: the run's configuration.
    start: the starting point.
    run_data: its texts are sampled once, to report how many are cut.
    trainer: holds the state.
    progress: told of the texts that are cut.
    redo_evaluation: whether the evaluations at the starting point are made again.
  """
  summaries.discard_after(cfg.model_dir, start.step if start.resumes else -1, redo_evaluation=redo_evaluation)
  partitioning.write_model_info(os.path.join(cfg.model_dir, 'model-info.txt'), trainer.train_state, cfg.partitioner)
  if not start.resumes:
    report.report_truncation(
        run_data.sample_truncation_fn, progress.log, trainer.train_metrics_manager, start.step)
  if cfg.summarize_config_fn is not None:
    cfg.summarize_config_fn(cfg.model_dir, trainer.train_metrics_manager.summary_writer, start.step)
