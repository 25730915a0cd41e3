"""What several processes decide together: evaluations, stops, retention, restarts, the checkpoint to resume from."""

import json
import pathlib
import re
import sys

import gin
import numpy as np
import pytest

from t5x_lite import checkpoints
from tests.apps.common import cloze_run
from tests.apps.infer import toy_infer
from tests.apps.train import toy_run
from tests.multiprocess import commands
from tests.multiprocess import runs

_FOUR = pytest.param(4, marks=pytest.mark.full)
_GIN_FILE = str(pathlib.Path(__file__).with_name('agreement.gin'))
_TEXTS = toy_infer.texts(21)


def _commands(folder):
  """Return commands that train, evaluate and infer, and at last train with a rate that diverges."""
  run = str(folder / 'run')
  train = [
    'train',
    f'--gin_file={_GIN_FILE}',
    f'--gin_search_paths={pathlib.Path(_GIN_FILE).parent}',
  ]
  infer = ['infer', run, f'--input={folder / "in.txt"}', '--gin.BATCH_SIZE=8']
  return [
    ([*train, f'--gin.MODEL_DIR={run}'], 0),
    (['eval', run, '--all'], 0),
    ([*infer, f'--output={folder / "out.jsonl"}'], 0),
    *[
      ([*infer, f'--output={folder / "shards.jsonl"}', '--num_shards=2', f'--shard_id={i}'], 0)
      for i in range(2)
    ],
    (
      [
        *train,
        f'--gin.MODEL_DIR={run}-diverging',
        '--gin.NON_FINITE_POLICY=roll_back',
        '--gin.schedules.create_learning_rate_scheduler.base_learning_rate=1e38',
        '--gin.trainer.NonFinitePolicy.max_roll_backs=1',
      ],
      3,
    ),
  ]


def _texts(folder):
  folder.mkdir()
  (folder / 'in.txt').write_text('\n'.join(_TEXTS))
  return folder


@pytest.mark.parametrize('num_processes', [2, _FOUR])
def test_all_commands_do_the_same_in_several_processes(tmp_path, num_processes):
  one, several = (_texts(tmp_path / name) for name in ('one', 'several'))
  with runs.Run(
    [sys.executable, '-m', 'tests.multiprocess.commands', json.dumps(_commands(several))],
    num_processes,
  ) as run:
    run.end()
  assert run.statuses == [3], run.output
  commands.run_all(_commands(one))
  gin.clear_config()
  # The lead alone calls actions, whose request ends all processes.
  others = '\n'.join(run.output_of(process) for process in range(1, num_processes))
  assert run.output_of(0).count('action called') == 6 and 'action called' not in others
  for name in ('run', 'run-diverging'):
    steps = checkpoints.all_steps(several / name)
    assert (
      list(steps) == list(checkpoints.all_steps(one / name)) == ([8, 9] if name == 'run' else [2])
    ), steps
  _assert_equal_metrics(one / 'run', several / 'run')
  _assert_equal_metrics(one / 'run/eval', several / 'run/eval')
  written = sorted(
    path.relative_to(one)
    for path in one.rglob('*.jsonl')
    if path.name.startswith(('predictions-', 'out', 'shards'))
  )
  assert len(written) > 8
  for path in written:
    assert (several / path).read_bytes() == (one / path).read_bytes(), path
  assert (one / 'shards.jsonl').read_bytes() == (one / 'out.jsonl').read_bytes()
  found = re.findall(
    r'(.*) ends because process (\d) failed after step 3: NonFiniteMetricError', run.output
  )
  assert len(found) == num_processes - 1, run.output
  # An error that all processes find is printed by one of them.
  assert run.output.count('error: Training stopped at step 3') == 1


def test_minimum_bayes_risk_in_two_processes_chooses_as_in_one(tmp_path):
  cloze_run.save(tmp_path / 'run', {'inputs': 16, 'targets': 8}, more='')
  (tmp_path / 'in.txt').write_text('\n'.join(_TEXTS))
  flags = ['--decode=mbr', '--gin.decoding.MinimumBayesRisk.num_samples=5', '--gin.BATCH_SIZE=8']
  infer = ['infer', str(tmp_path / 'run'), f'--input={tmp_path}/in.txt', *flags]
  infer.append('--gin.infer_script.infer.mode=predict_with_aux')
  evaluate = ['eval', str(tmp_path / 'run'), *flags]
  evaluate.append('--gin.evaluation.InferenceEvalConfig.num_examples=20')
  commands_by_folder = {
    name: [
      ([*infer, f'--output={tmp_path}/{name}.jsonl'], 0),
      ([*evaluate, f'--gin.EVAL_OUTPUT_DIR={tmp_path}/{name}'], 0),
    ]
    for name in ('one', 'two')
  }
  runs.run(
    [sys.executable, '-m', 'tests.multiprocess.commands', json.dumps(commands_by_folder['two'])]
  )
  commands.run_all(commands_by_folder['one'])
  gin.clear_config()
  _assert_equal_metrics(tmp_path / 'one', tmp_path / 'two')
  one, two = (_json_lines(tmp_path / f'{name}.jsonl') for name in ('one', 'two'))
  assert len(one) == len(_TEXTS)
  # The samples differ, so that a choice of another one would show.
  assert min(line['aux']['utility'] for line in one) < 99
  assert two == [{**line, 'aux': pytest.approx(line['aux'], rel=1e-4)} for line in one]
  (predictions,) = (tmp_path / 'one').rglob('predictions-*.jsonl')
  assert (tmp_path / 'two' / predictions.relative_to(tmp_path / 'one')).read_bytes() == (
    predictions.read_bytes()
  )


def _json_lines(path):
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def _assert_equal_metrics(one, several):
  rows_of_one, rows_of_several = toy_run.lines(one), toy_run.lines(several)
  assert rows_of_one.keys() == rows_of_several.keys() and rows_of_one
  for name, rows in rows_of_one.items():
    assert [row['step'] for row in rows] == [row['step'] for row in rows_of_several[name]], name
    for a, b in zip(rows, rows_of_several[name], strict=True):
      assert a == pytest.approx(b, rel=1e-3, abs=1e-6), name


def _losses(model_dir):
  return [row['loss'] for row in toy_run.lines(model_dir)['train']]


def _recorded(folder):
  """Return the global batches that the processes have read, by number."""
  batches = {}
  for path in sorted(folder.glob('*.npy')):
    batches.setdefault(path.name.partition('-')[0], []).append(np.load(path))
  return {number: np.concatenate(parts) for number, parts in batches.items()}


@pytest.mark.parametrize(
  'numbers',
  [((2, 1), (1, 1)), pytest.param(((1, 1), (4, 1), (2, 2), (2, 1)), marks=pytest.mark.full)],
)
def test_a_restart_with_other_numbers_of_processes_and_devices_has_the_same_batches(
  tmp_path, numbers, monkeypatch
):
  one, several = tmp_path / 'one', tmp_path / 'several'

  def train(model_dir, num_steps, num_processes, num_devices):
    folder = tmp_path / f'{model_dir.name}-{num_steps}'
    folder.mkdir()
    monkeypatch.setenv('RECORD', str(folder))
    command = runs.train(model_dir, f'--gin.TRAIN_STEPS={num_steps}')
    if num_processes > 1:
      assert (
        'position of process 0'
        not in runs.run(command, num_processes, num_devices=num_devices).output
      )
    else:
      commands.run_all([(command, 0)])
    return _recorded(folder)

  batches, batches_of_several = train(one, 12, 1, 1), {}
  for i, processes_and_devices in enumerate(numbers):
    batches_of_several |= train(several, 12 * (i + 1) // len(numbers), *processes_and_devices)
  gin.clear_config()
  for number in range(1, 13):
    np.testing.assert_array_equal(batches[f'{number:04}'], batches_of_several[f'{number:04}'])
  assert _losses(several) == pytest.approx(_losses(one), rel=1e-3) and len(_losses(one)) == 12


def _saved(folder):
  """Return the directory of a run with the checkpoints 3, 6 and 9."""
  run = folder / 'run'
  commands.run_all(
    [
      (
        runs.train(
          run,
          '--gin.TRAIN_STEPS=9',
          '--gin.train_script.train.eval_period=None',
          '--gin.train_script.train.train_eval_dataset_cfg=None',
          '--gin.train_script.train.infer_eval_dataset_cfg=None',
        ),
        0,
      )
    ]
  )
  gin.clear_config()
  assert list(checkpoints.all_steps(run)) == [3, 6, 9]
  return run


@pytest.mark.parametrize('num_processes', [2, _FOUR])
def test_all_resume_from_a_checkpoint_that_is_sound_for_all(tmp_path, num_processes):
  """The lead does not see the newest one, and the next one is damaged for another process."""
  run = _saved(tmp_path)
  faults = [
    {'process': 0, 'at': 'listing', 'do': str(run / 'checkpoint_9')},
    {'process': 1, 'at': 'contents', 'do': str(run / 'checkpoint_6')},
  ]
  found = runs.run(runs.train(run, '--gin.TRAIN_STEPS=9'), num_processes, faults=faults)
  assert f'Starting from {run}/checkpoint_3 (this run) at step 3' in found.output, found.output
  assert 'is damaged here' in found.output_of(
    1
  ) and 'see the message of another process' in found.output_of(0)


@pytest.mark.full
def test_none_starts_if_all_checkpoints_are_damaged_for_one(tmp_path):
  run = _saved(tmp_path)
  faults = [
    {'process': 1, 'at': 'contents', 'do': str(run / f'checkpoint_{step}')} for step in (3, 6, 9)
  ]
  with runs.Run(runs.train(run, '--gin.TRAIN_STEPS=20'), faults=faults) as found:
    found.end()
  assert found.statuses == [2] and 'error: All 3 checkpoint(s)' in found.output, found.output


@pytest.mark.full
@pytest.mark.parametrize('process', [0, 1])
def test_infer_stops_on_a_signal_to_one_and_resumes(tmp_path, process):
  one = _texts(tmp_path / 'one')
  (one / 'in.txt').write_text('\n'.join(toy_infer.texts(80)))
  train, _, (infer, _), *_ = _commands(one)
  infer.append('--gin.infer_script.infer.checkpoint_period=1')
  commands.run_all([train, (infer, 0)])
  gin.clear_config()
  infer[infer.index(f'--output={one / "out.jsonl"}')] = f'--output={one / "two.jsonl"}'
  fault = {'process': process, 'at': 'encode', 'number': 10, 'do': 'SIGTERM'}
  with runs.Run(infer, seconds=0.05, faults=[fault]) as run:
    run.end()
  assert run.statuses == [75], run.output
  found = re.search(
    rf'Stopped after (\d+) examples .* by SIGTERM to process {process}; the results so far',
    run.output,
  )
  assert found and 0 < int(found[1]) < 80, run.output
  runs.run(infer)
  assert (one / 'two.jsonl').read_bytes() == (one / 'out.jsonl').read_bytes()


@pytest.mark.full
def test_eval_stops_on_a_signal_to_one_and_resumes(tmp_path):
  one = _texts(tmp_path / 'one')
  train, (evaluate, _), *_ = _commands(one)
  commands.run_all([train])
  gin.clear_config()
  with runs.Run(evaluate, faults=[{'process': 0, 'at': 'metric', 'do': 'SIGTERM'}]) as run:
    run.end()
  assert run.statuses == [75] and '1 checkpoint(s) are evaluated, 1 are left' in run.output, (
    run.output
  )
  assert 'already evaluated' in runs.run(evaluate).output_of(0)
  assert [row['step'] for row in toy_run.lines(one / 'run/eval')['inference_eval/letters']] == [
    8,
    9,
  ]


@pytest.mark.full
def test_a_seqio_task_reports_another_number_of_processes(tmp_path):
  flags = [
    f'--gin.{flag}'
    for flag in [
      *cloze_run.bindings({'inputs': 8, 'targets': 4}),
      'DATA_SOURCE=seqio',
      f'MODEL_DIR={tmp_path}/run',
      'BATCH_SIZE=4',
      'EVAL_PERIOD=None',
    ]
  ]
  train = ['train', '--gin_file=recipes/keyword_cloze.gin', *flags]
  runs.run([*train, '--gin.TRAIN_STEPS=3'])
  with runs.Run([*train, '--gin.TRAIN_STEPS=6'], 1) as found:
    found.end()
  assert found.statuses == [2], found.output
  assert (
    'was saved with 2 data shards, this run has 1, and the order of seqio pipelines depends'
    in found.output
  )
  assert 'Run with 2 shards again, or start another run from this checkpoint' in found.output
