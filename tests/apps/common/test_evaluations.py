"""Evaluations during training: periods, overlap with training, checkpoints, best checkpoint by name."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import threading
import time
import types

from clu import metrics as clu_metrics
import clu.values
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import multihost
from t5x_lite import runtime
from t5x_lite.apps.common import evaluations as train_evaluations
from t5x_lite.apps.common import plan as plan_lib
from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError, StoppedOnSignalError
from t5x_lite.trainer import summaries
from t5x_lite.trainer.actions import BaseAction
from tests.apps.common import cloze_run
from tests.apps.train import toy_run
from tests.models import toy_model


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A run of 12 steps that decodes every 4 of them and evaluates with given targets every 6."""
  model_dir = tmp_path_factory.mktemp('whole')
  _train(model_dir)
  return model_dir


def _train(model_dir, total_steps=12, **kwargs):
  return toy_run.train(
    model_dir,
    total_steps,
    **{'eval_period': 6, 'infer_eval_period': 4, 'save': {'period': 6}, **kwargs},
  )


def _judged_by(*metric_fns):
  task = dataclasses.replace(toy_run.TASK, metric_fns=metric_fns)
  return dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=task)


def test_each_kind_has_its_period(whole):
  lines = toy_run.lines(whole)
  assert [row['step'] for row in lines['training_eval/letters']] == [6, 12]
  assert [row['step'] for row in lines['inference_eval/letters']] == [4, 8, 12]
  assert {path.name for path in (whole / 'inference_eval/letters').glob('predictions-*')} == {
    'predictions-4.jsonl',
    'predictions-8.jsonl',
    'predictions-12.jsonl',
  }


@pytest.mark.parametrize(
  'kwargs', [{'concurrent_metrics': False}, pytest.param({}, marks=pytest.mark.full)]
)
def test_overlap_changes_nothing(whole, tmp_path, kwargs):
  _train(tmp_path, 5, **kwargs)
  _train(tmp_path, **kwargs)
  # Where the first part ended is a summary, an evaluation and a checkpoint; the rest is the same.
  at_5 = {
    name: [row for row in rows if row['step'] != 5]
    for name, rows in toy_run.lines(tmp_path).items()
  }
  expected = toy_run.lines(whole)
  assert at_5['inference_eval/letters'] == expected['inference_eval/letters']
  assert at_5['training_eval/letters'] == expected['training_eval/letters']
  (state, position), (expected_state, expected_position) = (
    toy_run.saved(tmp_path, 12),
    toy_run.saved(whole, 12),
  )
  for name in ('embedding', 'hidden', 'logits'):
    np.testing.assert_array_equal(state['target'][name], expected_state['target'][name])
  assert position == expected_position


def test_metrics_are_computed_while_training_continues(tmp_path):
  trained_on, waited = threading.Event(), []

  def open_iterator(*args, **kwargs):
    iterator = data.open_train_iterator(*args, **kwargs)
    start = type(iterator).__next__
    numbers = iter(range(100))

    class Counting(type(iterator)):
      def __next__(self):
        if next(numbers) == 9:  # far behind the evaluation at step 4
          trained_on.set()
        return start(self)

    iterator.__class__ = Counting
    return iterator

  def slow(targets, predictions):
    waited.append(trained_on.wait(20))
    return {'count': len(predictions)}

  _train(
    tmp_path,
    get_dataset_fn=open_iterator,
    infer_eval_dataset_cfg=_judged_by(slow),
    save={'period': 100},
    eval_period=100,
    stats_period=100,
  )
  assert waited == [True] * 3
  assert [row['step'] for row in toy_run.lines(tmp_path)['inference_eval/letters']] == [4, 8, 12]


def test_a_checkpoint_covers_evaluations_up_to_its_step(tmp_path):
  found = []

  def slow(targets, predictions):
    time.sleep(0.3)
    found.append(1)
    return {'number': float(len(found))}

  _train(tmp_path, infer_eval_dataset_cfg=_judged_by(slow), infer_eval_period=6)
  for step, number in ((6, 1.0), (12, 2.0)):
    metrics = checkpoints.read_manifest(tmp_path / f'checkpoint_{step}').metrics
    assert (
      metrics['inference_eval/letters/number'] == metrics['inference_eval/mean/number'] == number
    )
    assert 'training_eval/mean/loss' in metrics
  # An evaluation of an earlier step does not belong to the checkpoint.
  _train(tmp_path / 'b', infer_eval_dataset_cfg=_judged_by(slow), infer_eval_period=4)
  assert not any(
    name.startswith('inference_eval')
    for name in checkpoints.read_manifest(tmp_path / 'b/checkpoint_6').metrics
  )


def test_compiling_inside_an_evaluation_is_not_watched(tmp_path, monkeypatch):
  watched, traced = ['nothing'], []

  class Watchdog(runtime.Watchdog):
    @contextlib.contextmanager
    def watching(self, name='step'):
      watched.append(name)
      try:
        with super().watching(name):
          yield
      finally:
        watched.pop()

  class Model(
    toy_model.ToyModel
  ):  # Its functions are called while programs are compiled, and no more.
    def eval_fn(self, *args, **kwargs):
      traced.append(('training_eval', watched[-1]))
      return super().eval_fn(*args, **kwargs)

    def predict_batch(self, *args, **kwargs):
      traced.append(('inference_eval', watched[-1]))
      return super().predict_batch(*args, **kwargs)

  def metric(targets, predictions):
    traced.append(('metric', watched[-1]))
    return {'count': len(predictions)}

  monkeypatch.setattr(runtime, 'Watchdog', Watchdog)
  usual = toy_run.model()
  model = Model(
    usual.module,
    usual.input_vocabulary,
    usual.output_vocabulary,
    usual.optimizer_def,
    loss_normalizing_factor='NUM_REAL_TARGET_TOKENS',
  )
  _train(
    tmp_path,
    4,
    model=model,
    eval_period=2,
    infer_eval_period=2,
    concurrent_metrics=False,
    infer_eval_dataset_cfg=_judged_by(metric),
  )
  # 'nothing': decoding is traced before the run begins, to find invalid options.
  assert set(traced) == {
    ('training_eval', 'compiling'),
    ('inference_eval', 'nothing'),
    ('inference_eval', 'compiling'),
    ('metric', 'evaluation'),
  }
  assert traced.count(('metric', 'evaluation')) == 2


def test_a_run_that_rolls_back_forgets_the_last_evaluation(tmp_path):
  trainer = types.SimpleNamespace(step=6, train_state=None, train_state_axes=None)
  results = {'letters': {'number': clu.values.Scalar(0.5)}}
  future = concurrent.futures.Future()
  future.set_result(results)
  evaluator = types.SimpleNamespace(
    evaluate=lambda *args, **kwargs: future, flush=lambda: None, close_files=lambda: None
  )
  evaluations = train_evaluations.RunEvaluations(
    trainer=trainer,
    summary_dir=None,
    progress=runtime.Progress(enabled=False),
    note_fn=str,
    evaluations=[
      train_evaluations.OpenEvaluation(
        name='inference_eval', folder='inference_eval', evaluator=evaluator
      )
    ],
  )
  evaluations.evaluate(['inference_eval'])
  assert evaluations.numbers(6)['inference_eval/letters/number'] == 0.5
  evaluations.close_files()
  assert evaluations.numbers(6) == {}


def test_the_best_checkpoint_by_a_mean_over_tasks(tmp_path):
  values = iter([0.0, 0.1, 0.9, 0.5, 0.4])  # The first one for the check of the metric's name.
  other = dataclasses.replace(
    toy_run.TASK, name='other_letters', metric_fns=[lambda t, p: {'f1': 0.0, 'em': 1.0}]
  )
  first = dataclasses.replace(
    toy_run.TASK, name='first_letters', metric_fns=[lambda t, p: {'f1': next(values)}]
  )
  for task in (other, first):
    data.register_builtin_task(task)
  mixture = data.BuiltinMixture(
    name='letters_twice', rates={'first_letters': 1.0, 'other_letters': 1.0}
  )
  cfg = dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=mixture)
  _train(
    tmp_path,
    infer_eval_dataset_cfg=cfg,
    infer_eval_period=3,
    train_eval_dataset_cfg=cfg,
    save={
      'period': 3,
      'keep': 1,
      'keep_best': 1,
      'metric_name_to_monitor': 'inference_eval/mean/f1',
    },
  )
  assert checkpoints.all_steps(tmp_path) == [6, 12]
  lines = toy_run.lines(tmp_path)
  assert [row['f1'] for row in lines['inference_eval/mean']] == [0.05, 0.45, 0.25, 0.2]
  assert [row['em'] for row in lines['inference_eval/mean']] == [1.0] * 4
  expected = np.mean(
    [lines[f'training_eval/{name}'][-1]['loss'] for name in ('first_letters', 'other_letters')]
  )
  assert lines['training_eval/mean'][-1]['loss'] == pytest.approx(expected)


def test_actions_see_the_results_at_once(tmp_path):
  seen = []

  class Look(BaseAction):
    def run(self, train_state, metrics_by_task):
      seen.append((int(train_state.step), sorted(metrics_by_task)))
      return False

  _train(tmp_path, actions={'INFER_EVAL': [Look()]}, save={'period': 100})
  assert seen == [(4, ['letters']), (8, ['letters']), (12, ['letters'])]


@pytest.mark.parametrize(
  'name, fragment',
  [
    ('inference_eval/letters/exact_mach', "mean 'inference_eval/letters/exact_match'"),
    ('training_eval/mean/acuracy', "mean 'training_eval/mean/accuracy'"),
    ('accuracy', 'must be the full name of a metric of this run'),
  ],
)
def test_an_unknown_metric_for_the_best_is_rejected_before_anything_is_computed(
  tmp_path, name, fragment
):
  with pytest.raises(ConfigError, match=fragment):
    _train(tmp_path / 'run', save={'period': 3, 'keep_best': 1, 'metric_name_to_monitor': name})
  assert not (tmp_path / 'run').exists()


def test_a_metric_that_fails_in_the_background_ends_the_run_before_the_next_checkpoint(tmp_path):
  def broken(targets, predictions):
    raise KeyError('mine')

  with pytest.raises(KeyError, match='mine'):
    _train(tmp_path, infer_eval_dataset_cfg=_judged_by(broken))
  assert checkpoints.latest_step(tmp_path) is None


def test_a_signal_while_only_decoding_is_due(whole, tmp_path):
  to_global_arrays, count = data.to_global_arrays, []

  def signalling(*args):
    count.append(1)
    if (
      len(count) == 3 + 2
    ):  # the second evaluation by decoding at 8, after the one at 4 and the other kind at 6
      os.kill(os.getpid(), signal.SIGTERM)
    return to_global_arrays(*args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data, 'to_global_arrays', signalling)
    with pytest.raises(StoppedOnSignalError, match='after step 8 of 12'):
      _train(tmp_path, eval_period=100)
  assert checkpoints.read_metadata(tmp_path / 'checkpoint_8')['run']['evaluation_due'] == [
    'inference_eval'
  ]
  _train(tmp_path, eval_period=100)
  assert (
    toy_run.lines(tmp_path)['inference_eval/letters']
    == toy_run.lines(whole)['inference_eval/letters']
  )


@pytest.mark.parametrize(
  'kwargs, fragment',
  [
    ({'infer_eval_period': 0}, 'infer_eval_period` must be .* got 0'),
    (
      {'infer_eval_dataset_cfg': None},
      'infer_eval_period` must be unset without `infer_eval_dataset_cfg`, got 4',
    ),
  ],
)
def test_invalid_periods(tmp_path, kwargs, fragment):
  with pytest.raises(ConfigError, match=fragment):
    _train(tmp_path, **kwargs)


def test_plans():
  def every(period):
    return plan_lib.When(period=period, at_end=True)

  evaluations = {'training_eval': every(6), 'inference_eval': every(4)}
  stretches = list(plan_lib.plan_steps(0, 12, evaluations=evaluations))
  assert [(s.last, s.evaluations) for s in stretches] == [
    (4, ('inference_eval',)),
    (6, ('training_eval',)),
    (8, ('inference_eval',)),
    (12, ('training_eval', 'inference_eval')),
  ]
  text = plan_lib.describe_plan(stretches, 12)
  assert 'evaluations  2: 6, 12\n' in text and 'decodings    3: 4, 8, 12\n' in text
  del evaluations['inference_eval']
  assert 'decodings' not in plan_lib.describe_plan(
    list(plan_lib.plan_steps(0, 12, evaluations=evaluations)), 12
  )


# ---- Evaluations by name ---------------------------------------------------------------------------------------------


def _count(targets, predictions):
  return {
    'count': float(len(predictions)),
    'same': float(np.mean([t == p for t, p in zip(targets, predictions, strict=False)])),
  }


def _named(asked=None, **options):
  """Return three evaluations, of which the condition of one appends what it is asked to `asked`."""

  def condition(step, metrics):
    if asked is not None:
      asked.append((step, metrics['loss']))
    return step >= 8

  return [
    evaluation.Evaluation(
      name='at_steps',
      dataset_cfg=toy_run.dataset('train', batch_size=4),
      num_batches=2,
      when=evaluation.When(steps=[3, 10], at_start=True),
    ),
    evaluation.Evaluation(
      name='judged',
      dataset_cfg=toy_run.dataset('validation', batch_size=12),
      decode=True,
      when=evaluation.When(period=4, from_step=5, at_end=True),
      infer_eval_cfg=evaluation.InferenceEvalConfig(metric_fns=[_count], num_examples=16),
    ),
    evaluation.Evaluation(
      name='on-condition',
      dataset_cfg=toy_run.dataset('validation'),
      when=evaluation.When(condition=condition, **options),
    ),
  ]


@pytest.fixture(scope='module')
def named(tmp_path_factory):
  """A run of 12 steps with the evaluations of the short form and three others, and what the condition was asked."""
  model_dir, asked = tmp_path_factory.mktemp('named'), []
  _train(model_dir, evaluations=_named(asked))
  return model_dir, asked


def test_each_evaluation_has_its_steps_data_and_metrics(named, whole):
  model_dir, asked = named
  lines, usual = toy_run.lines(model_dir), toy_run.lines(whole)
  steps = {name: [row['step'] for row in rows] for name, rows in lines.items()}
  pauses = [
    3,
    4,
    6,
    8,
    10,
    12,
  ]  # the steps of all evaluations and saves, and summaries every 4 steps
  assert steps == {
    'train': pauses,
    'training_eval/letters': [6, 12],
    'inference_eval/letters': [4, 8, 12],
    'training_eval/at_steps/letters': [0, 3, 10],
    'inference_eval/judged/letters': [8, 12],
    'training_eval/on-condition/letters': [8, 10, 12],
  }
  assert [step for step, _ in asked] == pauses
  assert dict(asked) == {row['step']: pytest.approx(row['loss']) for row in lines['train']}
  # Evaluations do not change training, nor each other.
  for name in ('training_eval/letters', 'inference_eval/letters'):
    assert lines[name] == usual[name]
  (state, _), (expected, _) = toy_run.saved(model_dir, 12), toy_run.saved(whole, 12)
  np.testing.assert_array_equal(state['target']['hidden'], expected['target']['hidden'])
  assert lines['training_eval/on-condition/letters'][-1] == lines['training_eval/letters'][-1]
  assert [row['count'] for row in lines['inference_eval/judged/letters']] == [16, 16]
  assert set(lines['inference_eval/judged/letters'][0]) == {'step', 'count', 'same'}
  rows = (model_dir / 'inference_eval/judged/letters/predictions-12.jsonl').read_text().splitlines()
  assert len(rows) == 16
  metrics = checkpoints.read_manifest(model_dir / 'checkpoint_12').metrics
  assert metrics['training_eval/on-condition/letters/loss'] == pytest.approx(
    metrics['training_eval/letters/loss']
  )
  assert metrics['inference_eval/judged/letters/count'] == 16


def test_a_resumed_run_evaluates_by_name_like_an_uninterrupted_one(named, tmp_path):
  for steps in (9, 12):
    _train(tmp_path, steps, evaluations=_named(), run_eval_before_training=False)
  lines, expected = toy_run.lines(tmp_path), toy_run.lines(named[0])
  for name in ('training_eval/at_steps/letters', 'training_eval/letters'):
    assert [row for row in lines[name] if row['step'] != 9] == expected[name]
  assert [row['step'] for row in lines['inference_eval/judged/letters']] == [8, 9, 12]


def test_a_threshold_on_an_unknown_metric_warns_once(tmp_path, caplog):
  when = evaluation.When(period=2, condition=evaluation.Threshold(metric='los', below=100.0))
  _train(
    tmp_path,
    evaluations=[
      evaluation.Evaluation(name='never', dataset_cfg=toy_run.dataset('validation'), when=when)
    ],
  )
  found = [
    record.getMessage() for record in caplog.records if 'Threshold.metric' in record.getMessage()
  ]
  assert found == [
    "`Threshold.metric` is 'los', and training has no metric of that name: the evaluation is left out. "
    "Did you mean 'loss'?"
  ]


def test_an_evaluation_by_name_selects_and_stops(tmp_path):
  seen = []

  class StopAt8(BaseAction):
    def run(self, train_state, metrics_by_task):
      seen.append((int(train_state.step), *metrics_by_task))
      return int(train_state.step) == 8

  _train(
    tmp_path,
    evaluations=_named(),
    actions={'TRAIN_EVAL': [StopAt8()]},
    save={
      'period': 3,
      'keep': 1,
      'keep_best': 1,
      'metric_name_to_monitor': 'training_eval/at_steps/letters/accuracy',
    },
  )
  assert seen == [
    (0, 'at_steps/letters'),
    (3, 'at_steps/letters'),
    (6, 'letters'),
    (8, 'on-condition/letters'),
    (8, 'letters'),
  ]  # the last one at the end of the run
  assert 8 in checkpoints.all_steps(tmp_path)


@pytest.mark.parametrize(
  'evaluations, fragment',
  [
    (
      lambda: [_named()[0], _named()[0]],
      r'evaluations` must be Evaluations with different names, got \[',
    ),
    (lambda: ['x'], 'evaluations` must be a list of Evaluations'),
    (lambda: _named()[0], 'evaluations` must be a list of Evaluations'),
    (
      lambda: [dataclasses.replace(_named()[0], when=evaluation.When(from_step=3))],
      'Evaluation.when` must be a When',
    ),
    (
      lambda: [dataclasses.replace(_named()[0], metric_fns=_count)],
      'Evaluation.metric_fns` must be a list of funct',
    ),
    (
      lambda: [dataclasses.replace(_named()[1], metric_fns=[_count])],
      'Set InferenceEvalConfig.metric_fns.',
    ),
    (
      lambda: [
        dataclasses.replace(_named()[0], dataset_cfg=toy_run.dataset('train', batch_size=3))
      ],
      '3 rows',
    ),
  ],
)
def test_invalid_evaluations(tmp_path, evaluations, fragment):
  with pytest.raises(ConfigError, match=fragment):
    _train(tmp_path, evaluations=evaluations())


def _largest_logit(logits, batch):
  return {'largest_logit': clu_metrics.Average(total=jnp.max(logits), count=jnp.float32(1))}


def _with_metrics(*metric_fns, **options):
  return [
    evaluation.Evaluation(
      name='own',
      dataset_cfg=toy_run.dataset('validation'),
      metric_fns=metric_fns,
      when=evaluation.When(period=6),
      **options,
    )
  ]


def test_a_teacher_forced_evaluation_chooses_its_metrics(whole, tmp_path):
  best = checkpoints.WhenBest('training_eval/own/letters/largest_logit')
  _train(tmp_path, evaluations=_with_metrics(_largest_logit), save={'policies': [best]})
  lines, usual = toy_run.lines(tmp_path), toy_run.lines(whole)
  rows = lines['training_eval/own/letters']
  assert [row['step'] for row in rows] == [6, 12] and rows[0]['largest_logit'] < rows[1][
    'largest_logit'
  ]
  without = [
    {name: value for name, value in row.items() if name != 'largest_logit'} for row in rows
  ]
  assert without == usual['training_eval/letters']
  assert lines['training_eval/letters'] == usual['training_eval/letters']
  assert checkpoints.all_steps(tmp_path) == [6, 12]
  metrics = checkpoints.read_manifest(tmp_path / 'checkpoint_12').metrics
  assert metrics['training_eval/own/mean/largest_logit'] == pytest.approx(rows[1]['largest_logit'])


@pytest.mark.parametrize('dry_run', [False, True])
@pytest.mark.parametrize(
  'metric_fn, fragment',
  [
    (
      lambda logits, batch: {
        'loss': clu_metrics.Average(total=jnp.max(logits), count=jnp.float32(1))
      },
      r"must return .* with names that no other metric has, got \['loss'\]",
    ),
    (lambda logits: {}, r'^`Evaluation.metric_fns` must be a function of \(logits, batch\), got'),
  ],
)
def test_invalid_metric_functions_are_an_error_before_the_first_step(
  tmp_path, metric_fn, fragment, dry_run
):
  with pytest.raises(ConfigError, match=fragment):
    _train(tmp_path / 'run', evaluations=_with_metrics(metric_fn), dry_run=dry_run)
  assert not list(tmp_path.glob('run/*/metrics.jsonl'))


def test_the_name_of_a_metric_of_an_evaluation_is_checked(tmp_path):
  best = checkpoints.WhenBest('training_eval/own/letters/largest_logits')
  with pytest.raises(ConfigError, match="Did you mean 'training_eval/own/letters/largest_logit'"):
    _train(tmp_path / 'run', evaluations=_with_metrics(_largest_logit), save={'policies': [best]})


def test_metric_functions_of_evaluations_by_command(tmp_path, monkeypatch, capsys):
  root = pathlib.Path(__file__).parents[3]
  monkeypatch.syspath_prepend(str(tmp_path))
  page = (root / 'docs/training.md').read_text(encoding='utf-8')
  for name, shown in re.findall(r'`(confidence.\w+)`:\n\n```\w+\n(.*?)```', page, re.DOTALL):
    # Another module: gin keeps the functions of the one that the test of the page may have imported.
    (tmp_path / name.replace('.py', '_here.py')).write_text(
      re.sub(r'(import |@)confidence', r'\1confidence_here', shown)
    )
  flags = [
    '--gin_file=recipes/keyword_cloze.gin',
    f'--gin_file={tmp_path}/confidence.gin',
    *(
      f'--gin.{binding}'
      for binding in [
        *cloze_run.bindings({'inputs': 64, 'targets': 16}),
        f'MODEL_DIR={tmp_path}/run',
        'BATCH_SIZE=8',
        'TRAIN_STEPS=2',
        'EVAL_STEPS=1',
      ]
    ),
  ]
  assert cli.main(['train', *flags, '--dry_run']) == 0
  assert cli.main(['precompile', *flags]) == 0
  assert 'evaluation step (sure/python_keyword_cloze)' in capsys.readouterr().out
  assert cli.main(['train', *flags]) == 0
  rows = summaries.read_metrics(
    tmp_path / 'run/training_eval/sure/python_keyword_cloze/metrics.jsonl'
  )
  assert [row['step'] for row in rows] == [2] and 0 < rows[0]['confidence'] < 1
  (other,) = summaries.read_metrics(
    tmp_path / 'run/training_eval/python_keyword_cloze/metrics.jsonl'
  )[-1:]
  assert 'confidence' not in other and 'accuracy' in other


# ---- Saving by what evaluations and clocks say -----------------------------------------------------------------------


def _saved_by(tmp_path, policies, values=(0.1, 0.5, 0.2, 0.7), **kwargs):
  """Return the steps that a run saves, whose evaluations every 3 steps have the metric `values` in turn."""
  given = iter(values)
  _train(
    tmp_path,
    infer_eval_period=3,
    infer_eval_dataset_cfg=_judged_by(lambda t, p: {'f1': next(given)}),
    save={'policies': policies},
    **kwargs,
  )
  return checkpoints.all_steps(tmp_path)


def test_saving_when_a_metric_is_best(tmp_path):
  best = checkpoints.WhenBest('inference_eval/letters/f1')
  check = 0.0  # the first value is asked for the name of the metric
  assert _saved_by(tmp_path / 'max', [best], (check, 0.1, 0.5, 0.2, 0.7)) == [3, 6, 12]
  lowest = checkpoints.WhenBest('inference_eval/letters/f1', 'min', from_step=4)
  assert _saved_by(tmp_path / 'min', [lowest], (check, 0.3, 0.5, 0.2, 0.7)) == [9, 12]
  # A resumed run knows the best value of before.
  assert _saved_by(tmp_path / 'again', [best], (check, 0.1, 0.5), total_steps=6) == [3, 6]
  assert _saved_by(tmp_path / 'again', [best], (check, 0.4, 0.3)) == [3, 6, 12]


def test_the_best_value_of_an_interrupted_evaluation_is_known_after_the_restart(tmp_path):
  best, begun = checkpoints.WhenBest('inference_eval/letters/f1'), []

  def stop_in_the_second(event):
    begun.extend([event] if event.kind == 'evaluation_begun' else [])
    if event.kind == 'evaluation_begun' and len(begun) == 2:
      os.kill(os.getpid(), signal.SIGTERM)

  with pytest.raises(StoppedOnSignalError):
    _saved_by(tmp_path, [best], (0.0, 0.1, 0.5), event_fns=stop_in_the_second)
  assert checkpoints.all_steps(tmp_path) == [3, 6]
  assert _saved_by(tmp_path, [best], (0.0, 0.5, 0.3, 0.4)) == [3, 6, 12]


def test_saving_by_the_clock_and_at_step_0(tmp_path, monkeypatch):
  now = [0.0]
  monkeypatch.setattr(
    't5x_lite.apps.train.saves.time', types.SimpleNamespace(monotonic=lambda: now[0])
  )

  class Clock(BaseAction):
    def run(self, train_state, metrics_by_task):
      now[0] += 25.0  # per pause: every 4 steps, and for evaluations at 3, 6, 9
      return False

  policies = [checkpoints.EveryNMinutes(1), checkpoints.AtSteps([0])]
  steps = _saved_by(tmp_path, policies, [0.0] * 9, actions={'TRAIN': [Clock()]})
  assert steps == [0, 6, 12]  # pauses at 3, 4, 6, 8, 9, 12


@pytest.mark.parametrize(
  'options, message',
  [
    (
      {'when': evaluation.When(period=3, condition=lambda step, metrics: np.array([True, False]))},
      'When.condition` must be a function that returns True or False',
    ),
    (
      {'when': evaluation.When(period=3, condition=lambda step, metrics: None)},
      'When.condition` .* got None',
    ),
  ],
)
def test_results_of_conditions(tmp_path, options, message):
  with pytest.raises(ConfigError, match=message):
    _train(tmp_path, evaluations=[dataclasses.replace(_named()[0], **options)])


def test_the_metric_of_a_save_policy_must_exist(tmp_path):
  with pytest.raises(ConfigError, match='got .inference_eval/letters/f2'):
    _saved_by(
      tmp_path,
      [
        checkpoints.WhenBest('inference_eval/letters/f2'),
        checkpoints.WhenBest('inference_eval/letters/f1'),
      ],
    )
  with pytest.raises(ConfigError, match='`WhenBest.metric_name` must be the full name of a metric'):
    _saved_by(tmp_path, [checkpoints.WhenBest('inference_eval/letters/f2')])


class _StopAt10(BaseAction):
  """Stops after step 10, and remembers the tasks of each call."""

  def __init__(self):
    self.calls = []

  def run(self, train_state, metrics_by_task):
    self.calls.append([int(train_state.step), *metrics_by_task])
    return int(train_state.step) == 10


def _stopped_by(action, tmp_path, mode):
  """Return the steps of evaluations of a run that an action stops, with two evaluations by name."""
  evaluations = [
    evaluation.Evaluation(
      name='periodic', dataset_cfg=toy_run.dataset('validation'), when=evaluation.When(period=5)
    ),
    evaluation.Evaluation(name='last', dataset_cfg=toy_run.dataset('validation')),
  ]
  assert (
    toy_run.train(
      tmp_path,
      20,
      stats_period=5,
      eval_period=5,
      infer_eval_dataset_cfg=None,
      evaluations=evaluations,
      actions={mode: [action]},
    )[0]
    == 10
  )
  return {
    name.removeprefix('training_eval/'): [row['step'] for row in rows]
    for name, rows in toy_run.lines(tmp_path).items()
    if name.startswith('training_eval/')
  }


@pytest.mark.parametrize('mode', ['TRAIN', 'TRAIN_EVAL'])
def test_a_run_that_actions_stop_makes_all_evaluations_that_are_due(tmp_path, mode):
  assert _stopped_by(_StopAt10(), tmp_path, mode) == {
    'letters': [5, 10],
    'periodic/letters': [5, 10],
    'last/letters': [10],
  }
  metrics = checkpoints.read_manifest(tmp_path / 'checkpoint_10').metrics
  assert {'training_eval/letters/loss', 'training_eval/last/letters/loss'} <= set(metrics)


def test_actions_get_the_results_of_all_evaluations_of_a_step_together(tmp_path):
  action = _StopAt10()
  _stopped_by(action, tmp_path, 'TRAIN_EVAL')
  assert action.calls[:2] == [
    [5, 'letters', 'periodic/letters'],
    [10, 'letters', 'periodic/letters'],
  ]


def test_processes_decide_together_about_a_condition(tmp_path, monkeypatch):
  when = evaluation.When(period=5, condition=lambda step, metrics: metrics['timing/uptime'] > 0)
  monkeypatch.setattr(  # the lead process says no
    multihost,
    'broadcast_from_lead',
    lambda value: np.bool_(False) if isinstance(value, np.bool_) else value,
  )
  _train(
    tmp_path,
    5,
    train_eval_dataset_cfg=None,
    infer_eval_dataset_cfg=None,
    eval_period=None,
    infer_eval_period=None,
    evaluations=[
      evaluation.Evaluation(name='x', dataset_cfg=toy_run.dataset('validation'), when=when)
    ],
  )
  assert 'training_eval/x/letters' not in toy_run.lines(tmp_path)


def test_a_request_is_saved_once(tmp_path):
  request = checkpoints.OnRequest()
  request.request()
  _train(
    tmp_path,
    12,
    train_eval_dataset_cfg=None,
    infer_eval_dataset_cfg=None,
    infer_eval_period=None,
    save={'policies': [request]},
  )
  assert checkpoints.all_steps(tmp_path) == [0, 12]


@pytest.mark.parametrize('where', ['condition', 'policy'])
def test_an_error_of_a_users_function_ends_the_run_after_a_save(tmp_path, where):

  def raise_at_8(step, unused):
    if step == 8:
      raise ValueError('my error')
    return False

  class Policy:
    next_step = staticmethod(lambda step: None)
    should_save = staticmethod(
      lambda step, point=None: point is not None and raise_at_8(step, None)
    )

  options = {
    'evaluations': [
      evaluation.Evaluation(
        name='x',
        dataset_cfg=toy_run.dataset('validation'),
        when=evaluation.When(condition=raise_at_8),
      )
    ]
  }
  if where == 'policy':
    options = {'save': {'policies': [Policy()]}}
  with pytest.raises(Exception, match='my error'):
    _train(tmp_path, **{'save': {}, **options})
  assert checkpoints.latest_step(tmp_path) == 8
  assert _train(tmp_path)[0] == 12


def test_the_best_loss_does_not_wait_for_decoding(tmp_path, monkeypatch):
  """The metrics of texts are computed while training continues, although a save policy reads those of the loss."""
  waits = []
  numbers = train_evaluations.RunEvaluations.numbers

  def count(self, step, needed=None):
    before = len(self._pending)
    found = numbers(self, step, needed)
    waits.append((needed, before - len(self._pending)))
    return found

  monkeypatch.setattr(train_evaluations.RunEvaluations, 'numbers', count)
  release = threading.Event()

  def slow(targets, predictions):
    release.wait(0.5)
    return {'f1': 0.5}

  best = checkpoints.WhenBest('training_eval/letters/loss', 'min')
  _train(
    tmp_path,
    infer_eval_period=6,
    infer_eval_dataset_cfg=_judged_by(slow),
    save={'period': 100, 'policies': [best, checkpoints.EveryNMinutes(1000)]},
  )
  release.set()
  assert [waited for needed, waited in waits if needed] and not any(
    waited for needed, waited in waits if needed
  )
