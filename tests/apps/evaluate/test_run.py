"""Evaluation of checkpoints: choice, records, results, best checkpoint, and errors."""

import dataclasses
import gc
import hashlib
import json
import os
import shutil
import signal
import threading

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import evaluation
from t5x_lite import trainer as trainer_lib
from t5x_lite.apps.evaluate import run as evaluate_app
from t5x_lite.errors import (
  CheckpointDamagedError,
  CheckpointError,
  ConfigError,
  DataError,
  StoppedOnSignalError,
)
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run
from tests.models import toy_model


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A training run with checkpoints of the steps 4, 8 and 12, evaluated at each in both ways."""
  model_dir = tmp_path_factory.mktemp('run')
  toy_run.train(model_dir, 12, save={'period': 4}, eval_period=4)
  return model_dir


def _evaluate(run, output_dir, mode='all', restore=None, **kwargs):
  arguments = {
    'model': toy_run.model(),
    'dataset_cfg': toy_run.dataset('validation'),
    'partitioner': toy_run.partitioner(),
    'training_evaluator_cls': trainer_lib.Trainer,
    'summarize_config_fn': None,
    **kwargs,
  }
  cfg = checkpoints.RestoreCheckpointConfig(str(run), mode=mode, **(restore or {}))
  return evaluate_app.evaluate(restore_checkpoint_cfg=cfg, output_dir=str(output_dir), **arguments)


def _lines(folder):
  return {
    name: [
      {k: v for k, v in row.items() if k != 'wall_time' and not k.startswith('timing/')}
      for row in rows
    ]
    for name, rows in (
      (name, summaries.read_metrics(path)) for name, path in summaries.metrics_files(folder).items()
    )
  }


def _of_training(run):
  return {name: rows for name, rows in _lines(run).items() if name != 'train'}


def test_all_checkpoints_as_in_training(run, tmp_path, capsys):
  results = _evaluate(
    run, tmp_path / 'out', best_metric='training_eval/letters/loss', best_metric_mode='min'
  )
  assert list(results) == [4, 8, 12]
  expected = _of_training(run)
  lines = _lines(tmp_path / 'out')
  assert set(lines) == set(expected) == {'training_eval/letters', 'inference_eval/letters'}
  for name, rows in lines.items():
    for row, other in zip(rows, expected[name], strict=True):
      assert row == pytest.approx(other, rel=1e-5)
  for step in (4, 8, 12):
    path = f'inference_eval/letters/predictions-{step}.jsonl'
    assert (tmp_path / 'out' / path).read_bytes() == (run / path).read_bytes()
  out = capsys.readouterr().out
  assert [line.split()[:2] for line in out.splitlines() if line.startswith('  ')].count(
    ['8', 'letters']
  ) == 2
  losses = {step: metrics['training_eval/letters/loss'] for step, metrics in results.items()}
  best = min(losses, key=losses.get)
  assert f'Best by training_eval/letters/loss (min): step {best}' in out
  assert json.loads((tmp_path / 'out/best.json').read_text()) == {
    'metric': 'training_eval/letters/loss',
    'mode': 'min',
    'step': best,
    'value': losses[best],
    'path': str(run / f'checkpoint_{best}'),
  }
  # Also of checkpoints that have all been finished before, by another metric.
  (tmp_path / 'out/best.json').unlink()
  _evaluate(run, tmp_path / 'out', best_metric='training_eval/letters/loss', best_metric_mode='max')
  worst = json.loads((tmp_path / 'out/best.json').read_text())
  assert worst['step'] == max(losses, key=losses.get) and worst['mode'] == 'max'
  assert set(os.listdir(tmp_path / 'out')) == {
    '.lock',
    'evaluated.json',
    'best.json',
    'inference_eval',
    'training_eval',
  }


def test_evaluated_checkpoints_are_skipped(run, tmp_path, capsys):
  first = _evaluate(run / 'checkpoint_8', tmp_path, 'specific')
  assert list(first) == [8]
  moved = tmp_path / 'moved'
  shutil.copytree(run, moved, ignore=shutil.ignore_patterns('.lock', 'train*', 'inference*'))
  capsys.readouterr()
  results = _evaluate(moved, tmp_path)
  err = capsys.readouterr().err
  assert list(results) == [4, 8, 12] and results[8] == first[8]
  assert '1 checkpoint(s) are already evaluated' in err and f'{moved}/checkpoint_12:' in err
  assert f'{moved}/checkpoint_8:' not in err
  assert [row['step'] for row in _lines(tmp_path)['inference_eval/letters']] == [8, 4, 12]
  assert _evaluate(moved, tmp_path) == results
  assert 'Evaluating' not in capsys.readouterr().err


@pytest.mark.parametrize(
  'count',
  [pytest.param(1, marks=pytest.mark.full), 7, pytest.param(6 + 6 + 4, marks=pytest.mark.full)],
)
def test_a_signal_stops_between_batches_and_the_same_command_resumes(run, tmp_path, capsys, count):
  to_global_arrays, left = data.to_global_arrays, [count]

  def signalling(*args):
    left[0] -= 1
    if left[0] == 0:
      os.kill(os.getpid(), signal.SIGTERM)
    return to_global_arrays(*args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(data, 'to_global_arrays', signalling)
    with pytest.raises(
      StoppedOnSignalError,
      match=f'by SIGTERM; {count // 6} .* evaluated, {3 - count // 6} are left',
    ) as stopped:
      _evaluate(run, tmp_path)
  assert 'To resume:\n' in str(stopped.value) and 'To resume' not in capsys.readouterr().err
  assert list(_evaluate(run, tmp_path)) == [4, 8, 12]
  for name, rows in _lines(tmp_path).items():
    assert [row['step'] for row in rows] == [4, 8, 12], name


def test_a_signal_while_the_data_is_opened(run, tmp_path):
  released = threading.Event()

  def stall(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    assert released.wait(60)

  try:
    with pytest.raises(
      StoppedOnSignalError,
      match='by SIGTERM while opening the evaluation data; nothing was evaluated',
    ):
      _evaluate(run, tmp_path, train_eval_get_dataset_fn=stall, infer_eval_cfg=None)
  finally:
    released.set()


def test_another_checkpoint_of_the_same_step_replaces_the_results(run, tmp_path, caplog):
  _evaluate(run / 'checkpoint_4', tmp_path / 'out', 'specific')
  with checkpoints.CheckpointManager(
    tmp_path / 'b', save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    state = checkpoints.load(run / 'checkpoint_8')
    manager.save(4, {**state, 'state': {**state['state'], 'step': np.int32(4)}})
  results = _evaluate(tmp_path / 'b', tmp_path / 'out')
  assert 'evaluated from another checkpoint' in caplog.text
  assert results[4]['inference_eval/letters/exact_match'] == pytest.approx(
    _of_training(run)['inference_eval/letters'][1]['exact_match']
  )
  assert [row['step'] for row in _lines(tmp_path / 'out')['inference_eval/letters']] == [4]


def test_a_changed_configuration_is_rejected(run, tmp_path):
  _evaluate(run, tmp_path, 'latest', settings={'decoding.beam_search.alpha': '0.6'})
  before = (tmp_path / 'evaluated.json').read_bytes()
  for kwargs, fragment in (
    ({'dataset_cfg': toy_run.dataset('train')}, r"dataset.split was 'validation' and is 'train'"),
    ({'settings': {'decoding.beam_search.alpha': '0.7'}}, "alpha was '0.6' and is '0.7'"),
    ({'training_evaluator_cls': None}, 'training_eval was'),
    (
      {'infer_eval_cfg': evaluation.InferenceEvalConfig(num_examples=3)},
      'num_examples was None and is 3',
    ),
    ({'restore': {'dtype': 'bfloat16'}}, "restore.dtype was None and is 'bfloat16'"),
  ):
    with pytest.raises(ConfigError, match=fragment):
      _evaluate(run, tmp_path, **{'settings': {'decoding.beam_search.alpha': '0.6'}, **kwargs})
  assert (tmp_path / 'evaluated.json').read_bytes() == before
  # Batching and the number of written predictions do not change results.
  other = dataclasses.replace(toy_run.dataset('validation'), batch_size=4)
  assert list(
    _evaluate(
      run,
      tmp_path,
      settings={'decoding.beam_search.alpha': '0.6'},
      dataset_cfg=other,
      infer_eval_cfg=evaluation.InferenceEvalConfig(num_examples_to_write=2),
    )
  ) == [4, 8, 12]


@pytest.mark.parametrize(
  'damage',
  [
    lambda text: text[:-9],
    lambda text: text.replace('"path"', '"pat"', 1),
    lambda text: text.replace('0.', '1.', 1),
    *(
      pytest.param(lambda text, empty=empty: empty, marks=pytest.mark.full) for empty in ('', '[]')
    ),
  ],
)
def test_a_damaged_record_is_set_aside(run, tmp_path, caplog, damage):
  results = _evaluate(run, tmp_path, 'latest')
  path = tmp_path / 'evaluated.json'
  damaged = damage(path.read_text())
  path.write_text(damaged)
  assert _evaluate(run, tmp_path, 'latest') == results
  assert (
    'is damaged' in caplog.text and (tmp_path / 'evaluated.json.damaged').read_text() == damaged
  )
  assert [row['step'] for row in _lines(tmp_path)['inference_eval/letters']] == [12]


def test_results_of_an_earlier_version_are_kept_with_a_warning(run, tmp_path, caplog):
  results = _evaluate(run, tmp_path, 'latest')
  assert 'by an earlier version' not in caplog.text
  path = tmp_path / 'evaluated.json'
  contents = json.loads(path.read_text())['contents']
  del contents['finished']['12']['means_version']
  digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
  path.write_text(json.dumps({'sha256': digest, 'contents': contents}))
  assert _evaluate(run, tmp_path, 'latest') == results
  assert caplog.text.count('results of 1 checkpoint(s) by an earlier version') == 1


def test_damaged_checkpoints_are_reported_at_the_end(run, tmp_path, capsys):
  model_dir = tmp_path / 'run'
  shutil.copytree(run, model_dir)
  (model_dir / 'checkpoint_8' / 'manifest.json').write_text('{')
  with pytest.raises(CheckpointDamagedError, match='1 of 3 .*checkpoint_8'):
    _evaluate(model_dir, tmp_path / 'out')
  assert [row['step'] for row in _lines(tmp_path / 'out')['inference_eval/letters']] == [4, 12]
  assert '12    letters' in capsys.readouterr().out


def test_one_kind_alone(run, tmp_path, capsys):
  _evaluate(run, tmp_path / 'a', 'latest', training_evaluator_cls=None)
  assert set(_lines(tmp_path / 'a')) == {'inference_eval/letters'}
  _evaluate(run, tmp_path / 'b', 'latest', infer_eval_cfg=None, eval_steps=1)
  assert set(_lines(tmp_path / 'b')) == {'training_eval/letters'}
  task = dataclasses.replace(toy_run.TASK, metric_fns=())
  unjudged = dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=task)
  _evaluate(run, tmp_path / 'c', 'latest', dataset_cfg=unjudged)
  assert 'Computing only the teacher-forced evaluation' in capsys.readouterr().err
  assert set(_lines(tmp_path / 'c')) == {'training_eval/letters'}


def test_random_parameters_and_a_dry_run(tmp_path, capsys):
  (tmp_path / 'empty').mkdir()
  with pytest.raises(CheckpointError, match='No checkpoint found below'):
    _evaluate(tmp_path / 'empty', tmp_path / 'out')
  assert not (tmp_path / 'out').exists()
  results = _evaluate(tmp_path / 'empty', tmp_path / 'out', fallback_init_rng=1)
  assert list(results) == [0] and 'random parameters' in capsys.readouterr().err
  again = _evaluate(tmp_path / 'empty', tmp_path / 'out', fallback_init_rng=1)
  assert again.keys() == results.keys()
  assert len(_lines(tmp_path / 'out')['inference_eval/letters']) == 1


def test_step_0_is_a_step_like_any_other(run, tmp_path):
  with checkpoints.CheckpointManager(
    tmp_path / 'b', save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    state = checkpoints.load(run / 'checkpoint_4')
    manager.save(0, {**state, 'state': {**state['state'], 'step': np.int32(0)}})
  for _ in range(2):
    assert list(_evaluate(tmp_path / 'b', tmp_path / 'out')) == [0]
    assert [row['step'] for row in _lines(tmp_path / 'out')['inference_eval/letters']] == [0]


def test_a_dry_run_writes_nothing(run, tmp_path, capsys):
  assert _evaluate(run, tmp_path / 'out', dry_run=True) == {}
  out = capsys.readouterr().out
  assert (
    '3 checkpoint(s) will be evaluated on 6 batches each' in out and f'{run}/checkpoint_12' in out
  )

  def drop(state, wanted, *, is_resuming):
    return {**state, 'target': {}}

  with pytest.raises(CheckpointError, match='target/'):
    _evaluate(run, tmp_path / 'out', dry_run=True, restore={'state_transformation_fns': (drop,)})
  assert not (tmp_path / 'out').exists()


def test_means_over_tasks(run, tmp_path, capsys):
  names = ('letters_once', 'letters_again')
  for name in names:
    data.register_builtin_task(dataclasses.replace(toy_run.TASK, name=name))
  mixture = data.BuiltinMixture(name='letters_once_and_again', rates=dict.fromkeys(names, 1.0))
  cfg = dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=mixture)
  results = _evaluate(
    run, tmp_path, 'latest', dataset_cfg=cfg, best_metric='inference_eval/mean/exact_match'
  )
  lines = _lines(tmp_path)
  for kind, name in (('inference_eval', 'exact_match'), ('training_eval', 'loss')):
    assert (
      lines[f'{kind}/mean'][0][name]
      == results[12][f'{kind}/mean/{name}']
      == pytest.approx(results[12][f'{kind}/letters_once/{name}'])
    )
  assert '12    mean' in capsys.readouterr().out


def test_a_metric_that_only_the_results_can_tell_to_be_unknown(run, tmp_path):
  def particular(targets, predictions):
    if targets == predictions:
      raise ValueError('judge predictions, please')
    return {'f1': 0.5}

  task = dataclasses.replace(toy_run.TASK, metric_fns=[particular])
  cfg = dataclasses.replace(toy_run.dataset('validation'), mixture_or_task_name=task)
  with pytest.raises(ConfigError, match="Did you mean 'inference_eval/letters/f1'"):
    _evaluate(run, tmp_path, dataset_cfg=cfg, best_metric='inference_eval/letters/f2')
  results = _evaluate(run, tmp_path, dataset_cfg=cfg, best_metric='inference_eval/letters/f1')
  assert list(results) == [4, 8, 12]
  assert json.loads((tmp_path / 'best.json').read_text())['step'] == 12  # of equal ones the newest


class _OtherVocabulary(toy_model.ToyVocabulary):
  pass


@pytest.mark.parametrize(
  'kwargs, error, fragment',
  [
    ({'output_dir': ''}, ConfigError, 'EVAL_OUTPUT_DIR'),
    ({'output_dir': '{run}'}, ConfigError, 'and not a run directory'),
    (
      {'output_dir': '{file}/out'},
      CheckpointError,
      r'folder of results .*cannot be written.*EVAL_OUTPUT_DIR',
    ),
    (
      {'best_metric': 'inference_eval/letters/exact_mach'},
      ConfigError,
      "mean 'inference_eval/letters/exact_match'",
    ),
    (
      {'best_metric': 'inference_eval/lettres/exact_match'},
      ConfigError,
      'must be the full name of a metric of this run',
    ),
    (
      {'best_metric': 'training_eval/letters/los'},
      ConfigError,
      "mean 'training_eval/letters/loss'",
    ),
    ({'best_metric_mode': 'maximum'}, ConfigError, "one of 'max', 'min'"),
    (
      {'infer_eval_cfg': None, 'training_evaluator_cls': None},
      ConfigError,
      'since infer_eval_cfg is None too',
    ),
    ({'training_evaluator_cls': None, 'eval_steps': 3}, ConfigError, 'with eval_steps=3'),
    ({'dataset_cfg': toy_run.dataset('validation', batch_size=5)}, ConfigError, '5'),
    ({'dataset_cfg': toy_run.dataset('validation', pack=True)}, ConfigError, 'pack` must be False'),
    (
      {'dataset_cfg': dataclasses.replace(toy_run.dataset('validation'), split='test')},
      DataError,
      "no split 'test'",
    ),
    (
      {
        'dataset_cfg': dataclasses.replace(
          toy_run.dataset('validation'), mixture_or_task_name='lettres'
        )
      },
      DataError,
      'Unknown builtin task',
    ),
    ({'model': toy_model.make_model(width=4)}, ConfigError, 'vocabulary'),
    (
      {'model': toy_model.make_model(width=4), 'verify_matching_vocabs_fn': None},
      CheckpointError,
      r'stored \(32, 8\), wanted \(32, 4\)',
    ),
    ({'mode': 'specific'}, CheckpointError, "'latest' or 'all'"),
    ({'inference_evaluator_cls': dict}, ConfigError, "it is 'builtin'"),
    ({'fallback_init_rng': -1}, ConfigError, 'fallback_init_rng'),
  ],
)
def test_rejected_before_anything_is_computed(run, tmp_path, kwargs, error, fragment):
  (tmp_path / 'file').write_text('a file')
  kwargs = dict(kwargs)
  output_dir = kwargs.pop('output_dir', '{out}').format(
    run=run, file=tmp_path / 'file', out=tmp_path / 'out'
  )
  with pytest.raises(error, match=fragment):
    _evaluate(run, output_dir, **kwargs)
  assert not (tmp_path / 'out').exists()


def test_checkpoints_of_one_step_from_two_runs(run, tmp_path):
  shutil.copytree(run / 'checkpoint_4', tmp_path / 'b/checkpoint_4')
  cfg = checkpoints.RestoreCheckpointConfig(
    [str(run / 'checkpoint_4'), str(tmp_path / 'b/checkpoint_4')], 'specific'
  )
  with pytest.raises(ConfigError, match='both have step 4'):
    evaluate_app.evaluate(
      model=toy_run.model(),
      dataset_cfg=toy_run.dataset('validation'),
      partitioner=toy_run.partitioner(),
      restore_checkpoint_cfg=cfg,
      output_dir=str(tmp_path / 'out'),
    )


def test_one_set_of_parameters_on_the_devices_at_a_time(run, tmp_path):
  alive = []

  class Counting(trainer_lib.Trainer):
    def eval(self, batch_iters):
      gc.collect()
      alive.append(sum(x.shape == (8, 16) for x in jax.live_arrays()))
      return super().eval(batch_iters)

  _evaluate(run, tmp_path, training_evaluator_cls=Counting)
  assert len(set(alive)) == 1, alive
