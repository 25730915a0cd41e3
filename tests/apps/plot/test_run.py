"""Plots of runs: what is drawn, and what is refused."""

import builtins
import json

import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import cli
from t5x_lite import errors
from t5x_lite.apps.plot import run as plot_lib

_PNG = b'\x89PNG\r\n'


def _run(folder, *, scale=1.0):
  rows = {
      'train': [{'step': s, 'wall_time': 0.0, 'loss': scale / s, 'learning_rate': 0.1, 'timing/seconds': 1.0}
                for s in range(1, 6)],
      'training_eval/task': [{'step': 5, 'wall_time': 0.0, 'loss': scale, 'accuracy': 'NaN'}],
      'inference_eval/task': [{'step': 5, 'wall_time': 0.0, 'exact_match': 0.5, 'timing/seconds': 1.0}],
  }
  for writer, lines in rows.items():
    (folder / writer).mkdir(parents=True)
    whole = ''.join(json.dumps(line) + '\n' for line in lines)
    (folder / writer / 'metrics.jsonl').write_text(whole + '{"step": 6, "lo')  # as a kill leaves it
  return folder


def _titles(monkeypatch, *args, **kwargs):
  """Return title to line labels of each panel that `plot` draws."""
  drawn = {}
  real = plot_lib.draw

  def draw(*arguments):
    figure = real(*arguments)
    drawn.update({axes.get_title(): [line.get_label() for line in axes.get_lines()] for axes in figure.axes})
    return figure

  monkeypatch.setattr(plot_lib, 'draw', draw)
  path = plot_lib.plot(*args, **kwargs)
  return path, drawn


def test_one_run(tmp_path, monkeypatch):
  run = _run(tmp_path / 'a')
  path, drawn = _titles(monkeypatch, [run])
  assert path == run / 'metrics.png' and path.read_bytes().startswith(_PNG)
  assert drawn == {'loss': ['train', 'training_eval/task'], 'accuracy': ['training_eval/task'],
                   'learning_rate': ['train'], 'exact_match': ['inference_eval/task']}


def test_several_runs_share_the_panels(tmp_path, monkeypatch):
  runs = [_run(tmp_path / 'a'), _run(tmp_path / 'b', scale=2.0)]
  path, drawn = _titles(monkeypatch, runs, tmp_path / 'both.svg', ['loss'])
  assert path.read_text().startswith('<?xml')
  assert drawn == {'loss': ['a: train', 'a: training_eval', 'b: train', 'b: training_eval']}
  assert _titles(monkeypatch, runs, tmp_path / 'one.svg', ['exact_match'])[1] == {'exact_match': ['a', 'b']}


def test_tasks_are_told_apart(tmp_path, monkeypatch):
  runs = [_run(tmp_path / 'a'), _run(tmp_path / 'b')]
  (tmp_path / 'a/training_eval/task').rename(tmp_path / 'a/training_eval/other')
  _, drawn = _titles(monkeypatch, runs, tmp_path / 'both.svg', ['loss'])
  assert drawn == {'loss': ['a: train', 'a: training_eval/other', 'b: train', 'b: training_eval/task']}


@pytest.mark.parametrize('scale, is_logarithmic', [(6.0, True), (-1.0, False)])
def test_losses_have_a_logarithmic_axis(tmp_path, scale, is_logarithmic):
  runs = {'a': plot_lib.read_run(_run(tmp_path / 'a', scale=scale))}
  loss, rate = plot_lib.draw(runs, ['loss', 'learning_rate'], 'step').axes
  assert (loss.get_yscale() == 'log') == is_logarithmic and rate.get_yscale() == 'linear'


def test_lines_are_the_numbers_of_the_files(tmp_path):
  read = plot_lib.read_run(_run(tmp_path / 'a', scale=6.0))
  assert read['train']['loss'] == [(1, 6.0), (2, 3.0), (3, 2.0), (4, 1.5), (5, 1.2)]


@pytest.mark.parametrize('make, arguments, fragments', [
    (lambda path: None, {}, ['is no directory']),
    (lambda path: path.mkdir(), {}, ['holds no metrics yet']),
    (_run, {'metrics': ['los']}, ["No metric 'los'", "Did you mean 'loss'?"]),
    (_run, {'out': 'no/such/folder/x.png'}, ["Cannot write the plot to 'no/such/folder/x.png'", '--out']),
    (_run, {'out': 'x.docx'}, ["'x.docx'", 'png']),
])
def test_refused(tmp_path, make, arguments, fragments):
  make(tmp_path / 'a')
  with pytest.raises(errors.T5xLiteError) as caught:
    plot_lib.plot([tmp_path / 'a'], **arguments)
  for fragment in fragments:
    assert fragment in str(caught.value)


def test_steps_from_the_start_of_each_run(tmp_path, monkeypatch):
  runs = [_run(tmp_path / 'scratch'), _run(tmp_path / 'tuned')]
  with pytest.raises(errors.DataError, match='no checkpoint of its own.*from_start'):
    plot_lib.plot(runs, from_start=True)
  for run, start_step in zip(runs, (0, 3), strict=True):
    manager = checkpoints.CheckpointManager(run, save_cfg=checkpoints.SaveCheckpointConfig())
    manager.save(5, {'x': np.zeros(1)}, metadata={'run': {'start_step': start_step}})
    manager.close()
  seen = {}
  real = plot_lib.draw

  def draw(drawn, *arguments):
    seen.update({name: [step for step, _ in writers['train']['loss']] for name, writers in drawn.items()})
    return real(drawn, *arguments)

  monkeypatch.setattr(plot_lib, 'draw', draw)
  plot_lib.plot(runs, metrics=['loss'], from_start=True)
  assert seen == {str(runs[0]): [1, 2, 3, 4, 5], str(runs[1]): [-2, -1, 0, 1, 2]}


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
  assert capsys.readouterr().out.strip() == str(tmp_path / 'x.png') and (tmp_path / 'x.png').exists()
