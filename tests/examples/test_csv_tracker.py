"""A tracker of one's own: the files and the command of docs/trackers.md."""

import pathlib
import re
import sys

import pytest

from t5x_lite.command_line import cli
from tests.trackers.tracker_cases import GrowingRun

_PAGE = pathlib.Path(__file__).parents[2] / 'docs/trackers.md'


@pytest.fixture
def page(tmp_path, monkeypatch):
  """Makes a folder with the page's files the current one."""
  text = _PAGE.read_text(encoding='utf-8')
  for name, content in re.findall(r'`(csv_tracker\.\w+)`:\n\n```\w+\n(.*?)```', text, re.DOTALL):
    (tmp_path / name).write_text(content)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'csv_tracker', raising=False)
  return tmp_path


def test_the_tracker_of_the_page_gets_a_run_once(page, capsys):
  run = GrowingRun(page / 'runs/cloze')
  run.start()
  run.line(10, loss=1.0)
  run.stop()
  command = ['track', 'runs/cloze', '--gin_file=csv_tracker.gin']
  command.append('--gin.TRACKER=@csv_tracker.CsvTracker()')
  for num_sent in (1, 0):
    assert cli.main(command) == 0
    assert f'Sent {num_sent} steps of runs/cloze to csv' in capsys.readouterr().out
  assert (page / 'cloze.csv').read_text().split() == ['10,train/loss,1.0']
