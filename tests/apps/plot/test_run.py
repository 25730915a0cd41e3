"""Plots of runs: drawn content, and errors."""

import builtins
import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite.apps.plot import run as plot_lib
from t5x_lite.command_line import cli
from t5x_lite.storage import files

_PNG = b'\x89PNG\r\n'


def _run(folder, *, scale=1.0):
  rows = {
    'train': [
      {'step': s, 'wall_time': 0.0, 'loss': scale / s, 'learning_rate': 0.1, 'timing/seconds': 1.0}
      for s in range(1, 6)
    ],
    'training_eval/task': [{'step': 5, 'wall_time': 0.0, 'loss': scale, 'accuracy': 'NaN'}],
    'inference_eval/task': [
      {'step': 5, 'wall_time': 0.0, 'exact_match': 0.5, 'timing/seconds': 1.0}
    ],
  }
  for writer, lines in rows.items():
    (folder / writer).mkdir(parents=True)
    whole = ''.join(json.dumps(line) + '\n' for line in lines)
    (folder / writer / 'metrics.jsonl').write_text(whole + '{"step": 6, "lo')  # as a kill leaves it
  return folder


def test_default_metrics_and_file(tmp_path):
  run = _run(tmp_path / 'a')
  path = plot_lib.plot([run])
  assert path == run / 'metrics.png' and path.read_bytes().startswith(_PNG)
  text = plot_lib.plot([run], tmp_path / 'a.svg').read_text()
  for title in (
    'Training loss',
    'Learning rate',
    'Evaluation loss',
    'Evaluation accuracy',
    'Exact match (inference)',
  ):
    assert f'>{title}<' in text
  assert 'econds' not in text


def test_a_plot_does_not_replace_the_target_of_a_link(tmp_path):
  run = _run(tmp_path / 'a')
  (tmp_path / 'photo.png').write_text('of the user')
  (run / 'metrics.png').symlink_to('../photo.png')
  with pytest.raises(errors.LinkedFileError, match="metrics.png' must be .*photo.png"):
    plot_lib.plot([run])
  assert (tmp_path / 'photo.png').read_text() == 'of the user'
  (run / 'metrics.png').unlink()
  assert plot_lib.plot([run]).read_bytes().startswith(_PNG)


@pytest.mark.parametrize(
  'config, unit',
  [
    (
      "LOSS = 'NUM_REAL_TARGET_TOKENS'\na.Model.loss_normalizing_factor = %LOSS\n",
      'nats per token',
    ),
    (
      "a.Model.loss_normalizing_factor = \\\n    'average_per_sequence'\n",
      'nats per token, mean of sequences',
    ),
    *(
      pytest.param(*case, marks=pytest.mark.full)
      for case in (
        ('a.Model.loss_normalizing_factor = None\n', 'nats per batch'),
        ('a.Model.loss_normalizing_factor = 1024\n', 'nats'),
        (None, 'nats'),
      )
    ),
  ],
)
def test_unit_of_the_loss_is_that_of_the_configuration(tmp_path, config, unit):
  run = _run(tmp_path / 'a')
  if config is not None:
    (run / 'config.gin').write_text(config)
  text = plot_lib.plot([run], tmp_path / 'a.svg', ['loss']).read_text()
  assert f'>loss ({unit})<' in text
  other = _run(tmp_path / 'b')
  (other / 'config.gin').write_text('a.Model.loss_normalizing_factor = "NUM_TOTAL_TARGET_TOKENS"\n')
  assert '>loss (nats)<' in plot_lib.plot([run, other], tmp_path / 'b.svg', ['loss']).read_text()


def test_runs_of_the_same_name_are_told_apart(tmp_path, monkeypatch):
  (tmp_path / 'x').mkdir()
  runs = [_run(tmp_path / 'x/a'), _run(tmp_path / 'y/a'), _run(tmp_path / 'b')]
  text = plot_lib.plot(runs, tmp_path / 'a.svg', ['loss']).read_text()
  for name in ('x/a', 'y/a', f'{tmp_path.name}/b', 'Comparison of 3 runs'):
    assert f'>{name}<' in text
  monkeypatch.chdir(runs[0])
  assert '>a<' in plot_lib.plot(['.'], tmp_path / 'b.svg').read_text()


def test_lines_are_the_numbers_of_the_files(tmp_path):
  read = plot_lib.read_run(_run(tmp_path / 'a', scale=6.0))
  assert read['train']['loss'].tolist() == [[1, 6.0], [2, 3.0], [3, 2.0], [4, 1.5], [5, 1.2]]


def _without_lines(folder):
  (folder / 'train').mkdir(parents=True)
  (folder / 'train/metrics.jsonl').touch()


@pytest.mark.parametrize(
  'make, arguments, fragments',
  [
    (lambda path: None, {}, ['got no directory', 'train/metrics.jsonl']),
    (lambda path: path.mkdir(), {}, ['got a directory without metrics']),
    (_without_lines, {}, ['got a directory without metrics']),
    (
      _run,
      {'metrics': ['los']},
      ["`plot.metrics` must be names of recorded metrics, got 'los'. Did you mean 'loss'?"],
    ),
    (
      _run,
      {'out': 'no/such/folder/x.png'},
      ["Cannot write the plot to 'no/such/folder/x.png'", '--out'],
    ),
    (_run, {'out': 'x.docx'}, ["'x.docx'", 'png']),
  ],
)
def test_errors(tmp_path, make, arguments, fragments):
  make(tmp_path / 'a')
  with pytest.raises(errors.T5xLiteError) as caught:
    plot_lib.plot([tmp_path / 'a'], **arguments)
  for fragment in fragments:
    assert fragment in str(caught.value)


def test_steps_from_the_start_of_each_run(tmp_path):
  runs = [_run(tmp_path / 'scratch'), _run(tmp_path / 'tuned')]
  with pytest.raises(
    errors.DataError, match=r'`plot.from_start` requires a checkpoint .*scratch.*--from_start'
  ):
    plot_lib.plot(runs, from_start=True)
  for run, start_step in zip(runs, (0, 3), strict=True):
    manager = checkpoints.CheckpointManager(run, save_cfg=checkpoints.SaveCheckpointConfig())
    manager.save(5, {'x': np.zeros(1)}, metadata={'run': {'start_step': start_step}})
    manager.close()
  text = plot_lib.plot(runs, tmp_path / 'a.svg', metrics=['loss'], from_start=True).read_text()
  assert '>steps since the start of the run<' in text and '>-2<' in text


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
  real = builtins.__import__

  def without(name, *args, **kwargs):
    if name.split('.')[0] == 'matplotlib':
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, '__import__', without)
  with pytest.raises(errors.ConfigError, match=r"pip install 'matplotlib>="):
    plot_lib.plot([_run(tmp_path / 'a')])


def test_command(tmp_path, capsys):
  run = _run(tmp_path / 'a')
  assert cli.main(['plot', str(run), f'--out={tmp_path / "x.png"}', '--metric=loss']) == 0
  assert (
    capsys.readouterr().out.strip() == str(tmp_path / 'x.png') and (tmp_path / 'x.png').exists()
  )


def test_plot_of_a_run_in_a_store(store, tmp_path):
  local = _run(tmp_path / 'a')
  for path in local.rglob('*.jsonl'):
    files.write(
      files.path(store.root) / 'a' / path.relative_to(local).as_posix(), path.read_bytes()
    )
  path = plot_lib.plot([f'{store.root}/a', local])
  assert str(path) == f'{store.root}/a/metrics.png' and path.read_bytes().startswith(_PNG)
  assert repr(plot_lib.read_run(f'{store.root}/a')) == repr(plot_lib.read_run(local))


@pytest.mark.parametrize('kind', ['FIFO', 'device', 'large'])
def test_a_plot_reads_regular_files_only(tmp_path, kind):
  run = _run(tmp_path / 'a')
  path = run / 'train/metrics.jsonl'
  path.unlink()
  if kind == 'device':
    path.symlink_to('/dev/zero')
  elif kind == 'large':
    path.touch()
    os.truncate(path, 6 * 2**30)
  else:
    os.mkfifo(path)
  # In a process of its own, which would wait, or read without end.
  done = subprocess.run(
    [sys.executable, '-m', 't5x_lite', 'plot', str(run)],
    capture_output=True,
    text=True,
    timeout=100,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  assert done.returncode == 2, done.stderr
  assert f"{path}' must " in done.stderr and 'Traceback' not in done.stderr
  path.unlink()
  shutil.copy(run / 'training_eval/task/metrics.jsonl', path)  # The remedy: a file.
  assert plot_lib.plot([run]).exists()


_LIMITS = (1e308, -1e308, 1e290, -1e290, 5e-324, 0.0, 1.0, 'Infinity', 2**1000)


@pytest.mark.filterwarnings('error::RuntimeWarning')
def test_values_at_the_limits_of_floats_are_drawn(tmp_path):
  (tmp_path / 'train').mkdir()
  pairs = list(itertools.combinations(_LIMITS, 2))
  names = [f'{number}/loss' for number in range(len(pairs))]
  lines = [
    {'step': step} | dict(zip(names, values, strict=True))
    for step, values in enumerate(zip(*pairs, strict=True))
  ]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (tmp_path / 'train/metrics.jsonl').write_text(text)
  assert plot_lib.plot([tmp_path], metrics=names).read_bytes().startswith(_PNG)


def test_values_that_are_too_large_are_counted(tmp_path):
  (tmp_path / 'train').mkdir()
  lines = [{'step': i, 'loss': value} for i, value in enumerate((1.0, 1e308, -1e308, 2.0))]
  lines += [{'step': 2**31, 'loss': 1.0}, {'step': 10**400, 'loss': 1.0}]
  text = ''.join(json.dumps(line) + '\n' for line in lines) + '[' * 100_000
  (tmp_path / 'train/metrics.jsonl').write_text(text)
  drawn = plot_lib.plot([tmp_path], tmp_path / 'a.svg').read_text()
  assert '2 of 4 values are NaN, infinite or above 1e+290' in drawn
