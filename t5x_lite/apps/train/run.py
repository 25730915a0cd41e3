"""Trains a model: the whole job, from configured objects to the last checkpoint, in one body.

    python -m t5x_lite train --gin_file=recipes/keyword_cloze.gin --gin.MODEL_DIR=runs/cloze

The same command goes on with a run that was stopped or killed, and such a run is bitwise the run that was not.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import logging
import os
import shlex
import sys
import time
from typing import Any

import jax
import numpy as np

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
from t5x_lite.actions import ActionMode, run_actions, Stop, TRAIN_METRIC_KEY
from t5x_lite.apps.common import parts as parts_lib
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.apps.common import report
from t5x_lite.apps.common import start as start_lib
from t5x_lite.apps.common import waiting
from t5x_lite.apps.common.evaluations import due_kinds, EvaluationInterrupted, TrainEvaluations
from t5x_lite.apps.train.batches import TrainBatches
from t5x_lite.apps.train.saves import TrainSaves
from t5x_lite.errors import CheckpointDamagedError, ConfigError, NonFiniteMetricError, StoppedOnSignalError
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
  # --------------------------------------------------------------------------------------------------------------------
  # Options
  # --------------------------------------------------------------------------------------------------------------------
  parts_lib.check_options(
      model=model, model_dir=model_dir, eval_steps=eval_steps, infer_eval_dataset_cfg=infer_eval_dataset_cfg,
      inference_evaluator_cls=inference_evaluator_cls, infer_eval_cfg=infer_eval_cfg)
  plan_lib.total_steps_of_run(total_steps, relative_steps, 0)
  plan_lib.check_period('eval_period', eval_period)
  plan_lib.check_period('infer_eval_period', infer_eval_period)
  plan_lib.check_period('stats_period', stats_period)
  plan_lib.check_period('gc_period', gc_period, zero_is_never=True)
  actions = actions_lib.resolve_actions(actions)
  watchdog = runtime.Watchdog(max_step_seconds, max_evaluation_seconds=max_evaluation_seconds,
                              max_saving_seconds=max_saving_seconds)
  profiler = runtime.StepProfiler(profile_steps, os.path.join(model_dir, 'train'))
  with_eval = train_eval_dataset_cfg is not None or infer_eval_dataset_cfg is not None
  if run_eval_before_training and not with_eval:
    raise ConfigError('run_eval_before_training is True, but there is nothing to evaluate: give train_eval_dataset_cfg '
                      'or infer_eval_dataset_cfg, or leave the option out.')
  if infer_eval_period is not None and infer_eval_dataset_cfg is None:
    raise ConfigError(f'infer_eval_period is {infer_eval_period}, but there is nothing to decode: give '
                      'infer_eval_dataset_cfg, or leave the option out.')
  if stats_period is None:
    stats_period = max(1, (eval_period or total_steps or relative_steps) // 10)

  with contextlib.ExitStack() as stack:
    if not dry_run:
      stack.enter_context(standard_streams.lossy_output('stdout', 'stderr'))
      stack.enter_context(checkpoints.lock_model_dir(model_dir))
    signals = stack.enter_context(runtime.StopSignals('ending before the first step'))
    opening = waiting.DataWaits(signals, lambda doing: StoppedOnSignalError(
        f'Stopped by {signals.name} before the first step, while {doing}; there is nothing new to save.'))
    is_lead = multihost.is_lead()
    progress = runtime.Progress(enabled=is_lead and not dry_run)
    stack.callback(progress.clear)

    # ------------------------------------------------------------------------------------------------------------------
    # Data: an iterator of global batches, divided over processes and devices, and finite batches to evaluate on
    # ------------------------------------------------------------------------------------------------------------------
    run_data = parts_lib.open_data(
        stack, model=model, partitioner=partitioner, train_dataset_cfg=train_dataset_cfg,
        train_eval_dataset_cfg=train_eval_dataset_cfg, infer_eval_dataset_cfg=infer_eval_dataset_cfg,
        eval_steps=eval_steps, inference_evaluator_cls=inference_evaluator_cls, infer_eval_cfg=infer_eval_cfg,
        get_dataset_fn=get_dataset_fn, train_eval_get_dataset_fn=train_eval_get_dataset_fn,
        verify_matching_vocabs_fn=verify_matching_vocabs_fn, num_prefetched_batches=num_prefetched_batches,
        num_retries=num_retries, concurrent_metrics=concurrent_metrics, log_dir=model_dir, note_fn=progress.note,
        open_fn=opening.call)
    batches, eval_batches, evaluator = run_data.batches, run_data.eval_batches, run_data.evaluator
    spec = batches.element_spec
    if checkpoint_cfg.save is not None and checkpoint_cfg.save.save_dataset:
      # A pipeline that does not know its position is an error now, rather than at the first save.
      opening.until(batches.open, 'reading the position in the training data')

    # ------------------------------------------------------------------------------------------------------------------
    # Starting point: this run's checkpoint, the configured one, or none; and the plan that follows from it
    # ------------------------------------------------------------------------------------------------------------------
    progress.note('looking for checkpoints')
    start = start_lib.choose_start(model_dir, checkpoint_cfg)
    first_step = start.step
    # What a restart must know of the run's beginning.
    run_facts = start.metadata.get('run', {}) if start.resumes else {}
    run_facts = {'start_step': first_step, 'random_seed': start_lib.choose_seed(random_seed), **run_facts}
    if random_seed is not None:
      run_facts['random_seed'] = random_seed
    last_step = plan_lib.total_steps_of_run(total_steps, relative_steps, run_facts['start_step'])
    if first_step > last_step:
      raise ConfigError(f'{start.path} is at step {first_step}, past the end of the run at step {last_step}: raise '
                        'total_steps (TRAIN_STEPS), which counts the steps of the checkpoint too, or choose another '
                        'model_dir.')
    profiler.check(run_facts['start_step'], last_step)
    save_cfg = checkpoint_cfg.save
    plan = functools.partial(
        plan_lib.plan_steps, last_step=last_step, stats_period=stats_period,
        eval_period=eval_period if eval_batches else None,
        infer_eval_period=(infer_eval_period or eval_period) if evaluator else None,
        save_period=save_cfg and save_cfg.period,
        save_steps=(save_cfg and save_cfg.checkpoint_steps) or (), gc_period=gc_period,
        pause_steps=profiler.pause_steps, evaluate_at_end=bool(eval_batches), infer_at_end=evaluator is not None,
        save_at_end=save_cfg is not None)

    # ------------------------------------------------------------------------------------------------------------------
    # Trainer: made from the state's shapes, so that everything is checked before anything is computed
    # ------------------------------------------------------------------------------------------------------------------
    made = parts_lib.make_trainer(
        stack, run_data, model=model, partitioner=partitioner, trainer_cls=trainer_cls,
        train_state_initializer_cls=train_state_initializer_cls, random_seed=run_facts['random_seed'],
        use_hardware_rng=use_hardware_rng or random_seed is None, summary_dir=None if dry_run else model_dir,
        first_step=first_step, last_step=last_step)
    trainer, initializer, init_rng = made.trainer, made.initializer, made.init_rng
    state_shape, state_axes = initializer.global_train_state_shape, initializer.train_state_axes
    start_lib.check_start(start, state_shape, model, applies_transforms=dry_run)

    def should_stop():
      # One process may stop after any step; several agree at the end of a stretch.
      return signals.requested and jax.process_count() == 1

    def note(text):
      if should_stop():
        raise EvaluationInterrupted
      watchdog.beat(trainer.step)
      progress.note(text)

    evaluations = stack.enter_context(contextlib.closing(TrainEvaluations(
        trainer=trainer, eval_batches=eval_batches, evaluator=evaluator, partitioner=partitioner,
        train_state_axes=state_axes, summary_dir=None if dry_run else model_dir, progress=progress, note_fn=note,
        compiling_fn=functools.partial(watchdog.watching, None), actions=actions,
        read_fn=waiting.DataWaits(signals, lambda doing: EvaluationInterrupted()).iterate)))
    if save_cfg is not None and save_cfg.keep_best is not None:
      evaluations.check_metric_name('SaveCheckpointConfig.metric_name_to_monitor', save_cfg.metric_name_to_monitor)
    if dry_run:
      parts_lib.trace_steps(made, run_data)
      specs = {'training': spec, **{f'training_eval/{name}': b.element_spec for name, b in eval_batches.items()}}
      if evaluator is not None:
        specs |= {f'inference_eval/{task.name}': task.element_spec for task in evaluator.eval_tasks}
      print(report.describe(
          train_state_shape=state_shape, partitioner=partitioner, specs=specs, start=start,
          stretches=list(plan(first_step)), num_microbatches=trainer.num_microbatches))
      return first_step, state_shape

    # ------------------------------------------------------------------------------------------------------------------
    # State: restored or new, before anything is written, since a checkpoint may not fit. What was written after its
    # step will be written again, so it is cut
    # ------------------------------------------------------------------------------------------------------------------
    progress.note(f'making the state: {start.description}')
    trainer.train_state, restored = start_lib.make_state(start, initializer, partitioner, model, init_rng)
    if restored is not None and trainer.non_finite.policy.tests:
      start_lib.check_finite(start, trainer.train_state)
    has_position = restored is not None and restored.data_state is not None
    if has_position:
      batches.set_state(restored.data_state)
      opening.until(batches.open, 'going to the saved position in the training data')
    elif start.resumes:
      logging.getLogger(__name__).warning(
          'The checkpoint holds no position in the data (save_dataset=False): the data starts from its beginning.')
    start_lib.record_data(start, run_facts, train_dataset_cfg)
    manager = stack.enter_context(checkpoints.CheckpointManager(model_dir, save_cfg=save_cfg)) if save_cfg else None
    progress.log(f'Training in {model_dir}: {report.run_header(state_shape, partitioner)}.')
    progress.log(f'Starting from {start.description} at step {first_step:,}, to step {last_step:,}.')
    # Was the run stopped while this step's evaluation was due? Then it is still to come.
    evaluation_due = due_kinds(run_facts.get('evaluation_due', False), evaluations.kinds)
    if is_lead:
      summaries.discard_after(model_dir, first_step if start.resumes else -1, redo_evaluation=bool(evaluation_due))
      partitioning.write_model_info(os.path.join(model_dir, 'model-info.txt'), state_shape, partitioner)
      if not start.resumes:
        report.report_truncation(
            run_data.sample_truncation_fn, progress.log, trainer.train_metrics_manager, first_step)
    if run_eval_before_training and not start.resumes:
      evaluation_due = evaluations.kinds
    if summarize_config_fn is not None and is_lead:
      summarize_config_fn(model_dir, trainer.train_metrics_manager.summary_writer, first_step)
    first_actions_state = actions_lib.get_actions_state(actions)
    actions_lib.set_actions_state(actions, run_facts.get('actions', {}))
    trainer.non_finite.bad_steps_in_a_row = run_facts.get('bad_steps_in_a_row', 0)
    train_batches = TrainBatches(
        batches, should_stop=should_stop, facts=run_facts if has_position else {}, first_step=first_step,
        max_batch_seconds=max_batch_seconds, on_wait=watchdog.beat)
    first_data_state = None
    if not start.resumes and trainer.non_finite.policy.roll_back_limit:
      opening.until(batches.open, 'reading the position in the training data')
      first_data_state = train_batches.get_state()
    saves = None
    if manager is not None:
      saves = TrainSaves(manager, save_cfg, trainer=trainer, evaluations=evaluations, batches=train_batches,
                         model=model, actions=actions, run_facts=run_facts, progress=progress)
    if should_stop():
      raise StoppedOnSignalError(f'Stopped by {signals.name} before the first step; there is nothing new to save.')
    if first_step < last_step:
      progress.note('compiling the training step')
      started = time.perf_counter()
      trainer.compile_train(spec)
      progress.log(f'Compiled the training step in {time.perf_counter() - started:.1f} s.')
    del restored, run_data, made, state_shape

    # ------------------------------------------------------------------------------------------------------------------
    # What happens at the pauses of the loop
    # ------------------------------------------------------------------------------------------------------------------
    def on_step(step, metrics):
      watchdog.beat(step)
      evaluations.poll()
      if saves is not None:
        saves.confirm()
      if progress.due:
        progress.update(step, _shown(metrics))

    def roll_back() -> int:
      """Restores the newest sound checkpoint, or else the run's start, and returns its step."""
      finding, bad_step_age = trainer.non_finite.finding, trainer.step - trainer.non_finite.finding.step
      try:
        point = start_lib.choose_start(model_dir, checkpoint_cfg)
      except CheckpointDamagedError:  # the first steps were bad: no checkpoint is sound yet
        if start.resumes:
          raise
        point = start
      if not point.resumes:
        point = start
      run_facts['num_roll_backs'] = run_facts.get('num_roll_backs', 0) + 1
      logging.getLogger(__name__).warning(
          '%s is not finite: rolling back to %s at step %d, to leave out the batch of this step (roll-back %d of %d).',
          finding.what.capitalize(), point.description, point.step, run_facts['num_roll_backs'],
          trainer.non_finite.policy.roll_back_limit)
      profiler.close()
      trainer.rewind(initializer.global_train_state_shape)  # frees the memory of the state
      evaluations.close_files()
      if is_lead:
        summaries.discard_after(model_dir, point.step)
      trainer.train_state, restored = start_lib.make_state(point, initializer, partitioner, model, init_rng)
      facts = point.metadata.get('run', {}) if point.resumes else {}
      actions_lib.set_actions_state(actions, facts.get('actions', first_actions_state))
      trainer.non_finite.bad_steps_in_a_row = facts.get('bad_steps_in_a_row', 0)
      data_state = first_data_state if point is start else restored and restored.data_state
      if data_state is None:
        logging.getLogger(__name__).warning(
            'Its position in the data is not known: the data continues after the bad step.')
      train_batches.rewind(data_state, facts, point.step, bad_step_age=bad_step_age)
      if saves is not None:
        saves.rewind(point.step)
      progress.begin(last_step, point.step, tokens_per_step=_tokens_per_step(spec))
      return point.step

    # ------------------------------------------------------------------------------------------------------------------
    # Loop: train, look, evaluate, save
    # ------------------------------------------------------------------------------------------------------------------
    stop, interrupted = Stop.CONTINUE, ''
    signals.doing = 'finishing the step' if saves is None else 'finishing the step and saving'
    collect_garbage = stack.enter_context(runtime.manual_gc(gc_period > 0))
    stack.callback(watchdog.close)
    stack.callback(profiler.close)
    if evaluation_due:
      with contextlib.suppress(EvaluationInterrupted), watchdog.watching('evaluation'):
        stop = evaluations.evaluate(evaluation_due)
        evaluation_due = ()
        if start.resumes and manager is not None:
          manager.record_metrics(first_step, _finite(evaluations.numbers(first_step)))
    if saves is not None and not start.resumes and manager.should_save(first_step):
      with watchdog.watching('saving'):
        saves.save(evaluation_due)
    progress.begin(last_step, first_step, tokens_per_step=_tokens_per_step(spec))

    is_hopeless = False
    stretches = plan(first_step)
    while not stop and (stretch := next(stretches, None)) is not None:
      summary = None
      profiler.before(stretch.first)
      with watchdog.watching():
        try:
          summary = trainer.train(
              train_batches, stretch.num_steps, stretch.first, on_step=on_step, should_stop=train_batches.should_stop)
        except trainer_lib.PreemptionError as error:
          interrupted = f'PreemptionError: {error}'
        if multihost.any_process(signals.requested):
          interrupted = signals.name or 'a signal to another process'
      profiler.after(trainer.step, trainer.train_state)
      complete = trainer.step == stretch.last
      if stretch.evaluations or stretch.save or interrupted or not complete:
        # A bad step is read one step late: nothing may be evaluated or saved before the last one is read.
        with watchdog.watching():
          trainer.finish_steps(on_step)
      is_finite = trainer.non_finite.finding is None
      if summary is not None and ActionMode.TRAIN in actions and (values := summary.result()):
        stop = max(stop, run_actions(ActionMode.TRAIN, actions, trainer.train_state, {TRAIN_METRIC_KEY: values}))
      if trainer.step > stretch.first:
        evaluation_due = () if not complete else evaluations.kinds if stop == Stop.EARLY else stretch.evaluations
      may_continue = is_finite and train_batches.error is None and stop != Stop.NON_FINITE
      if evaluation_due and may_continue and not interrupted:
        paused_at = progress.pause()
        with contextlib.suppress(EvaluationInterrupted), watchdog.watching('evaluation'):
          stop = max(stop, evaluations.evaluate(evaluation_due))
          evaluation_due = ()
        progress.resume(paused_at)
        if multihost.any_process(signals.requested):
          interrupted = signals.name or 'a signal to another process'
      trainer.stop_training |= bool(stop) or bool(interrupted) or train_batches.error is not None
      if saves is not None and is_finite and stop != Stop.NON_FINITE and trainer.step > first_step:
        if (complete and stretch.save) or trainer.stop_training:
          with watchdog.watching('saving'):
            saves.save(evaluation_due, is_last=not interrupted and (trainer.stop_training or trainer.step == last_step))
            watchdog.beat(trainer.step)
      if trainer.non_finite.finding is not None:
        if saves is not None:
          saves.condemn()
        is_hopeless = run_facts.get('num_roll_backs', 0) >= trainer.non_finite.policy.roll_back_limit
        if is_hopeless or trainer.stop_training:
          break
        first_step = roll_back()
        stretches, evaluation_due = plan(first_step), ()
        continue
      if complete and stretch.collect_garbage:
        collect_garbage()
      if trainer.stop_training:
        break

    # ------------------------------------------------------------------------------------------------------------------
    # End: wait for what is still being written, say what came of it
    # ------------------------------------------------------------------------------------------------------------------
    last_seen = []
    with watchdog.watching():
      trainer.finish_steps(lambda step, metrics: last_seen.append((step, metrics)))
    if last_seen:
      progress.update(last_seen[-1][0], _shown(last_seen[-1][1]), last=True)
    finding = trainer.non_finite.finding
    has_diverged = stop == Stop.NON_FINITE or is_hopeless or (finding is not None and not trainer.stop_training)
    progress.note('waiting for the checkpoint')
    with watchdog.watching('saving'):
      if saves is not None:
        saves.finish(must_succeed=not has_diverged)
      else:
        trainer.flush()
        evaluations.flush()
    progress.clear()
    step, train_state = trainer.step, trainer.train_state
    sound = saves.newest_sound_step() if saves is not None and (has_diverged or finding is not None) else None
    if has_diverged:
      what = 'a watched metric is not finite (see the lines above)'
      if finding is not None:
        what = f'{finding.what} is not finite'
        if is_hopeless and trainer.non_finite.policy.roll_back_limit:
          what += f', after {run_facts.get("num_roll_backs", 0)} roll-back(s)'
      newest = ('there is no sound checkpoint' if sound is None else
                f'the newest sound checkpoint is that of step {sound:,}, from which the same command resumes')
      raise NonFiniteMetricError(
          f'Training stopped at step {step:,} in {model_dir}: {what}. Nothing was saved after it; {newest}. Lower the '
          'learning rate, clip gradients, look at the data, or set `trainer.NonFinitePolicy.action`.')
    saved = sound if manager is None or finding is not None else manager.latest_step()
    where = f'step {saved:,} is saved in {model_dir}' if saved is not None else 'nothing is saved'
    where += f'. To resume:\n  {shlex.join(sys.orig_argv)}'
    if interrupted and (step < last_step or evaluation_due or finding is not None):
      raise StoppedOnSignalError(f'Stopped after step {step:,} of {last_step:,} by {interrupted}; {where}')
    if train_batches.error is not None:
      progress.log(f'The training data failed after step {step:,}; {where}')
      raise train_batches.error
    if is_lead:
      print(report.final_report(model_dir, bad_steps_in_a_row=trainer.non_finite.bad_steps_in_a_row), flush=True)
    return step, train_state


def _tokens_per_step(spec: Mapping[str, jax.ShapeDtypeStruct]) -> int:
  """Returns the number of positions of inputs and targets in a batch."""
  names = ('encoder_input_tokens', 'decoder_target_tokens')
  return sum(int(np.prod(spec[name].shape)) for name in names if name in spec)


def _shown(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Returns what the progress line shows of a step's metrics, which have been computed already."""
  names = [name for name in ('loss', 'accuracy') if name in metrics]
  return {name: float(jax.device_get(metrics[name]).compute()) for name in names}


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: value for name, value in metrics.items() if np.isfinite(value)}
