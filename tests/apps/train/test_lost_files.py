"""Files of a run that are deleted while it writes to them, or that are links to files of the user."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import runtime
from t5x_lite.trainer import summaries
from tests.apps.train import toy_run

_ROOT = pathlib.Path(__file__).parents[3]
_SCRIPT = """
import pathlib, shutil, sys
from t5x_lite.trainer.actions import BaseAction
from tests.apps.train import toy_run

class Delete(BaseAction):
  def run(self, train_state, metrics_by_task):
    if int(train_state.step) == 5:
      shutil.rmtree(pathlib.Path(sys.argv[1]) / 'train')
      (pathlib.Path(sys.argv[1]) / 'events.jsonl').unlink()

toy_run.train(sys.argv[1], 9, save={'period': 3}, actions={'TRAIN': [Delete()]}, stats_period=1, eval_period=None,
              train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None)
"""


def test_deleted_metrics_and_events_are_noticed_and_continued(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', _SCRIPT, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=300,
    env={**os.environ, 'PYTHONPATH': str(_ROOT)},
  )
  assert done.returncode == 0, done.stderr
  for name in ('train/metrics.jsonl', 'events.jsonl'):
    assert done.stderr.count(f'{tmp_path / name} was deleted or renamed') == 1
  first, *lines = map(json.loads, (tmp_path / 'train/metrics.jsonl').read_text().splitlines())
  assert first['missing']['after_step'] is None
  assert [line['step'] for line in lines] == [*range(first['missing']['to_step'] + 1, 10)]
  assert first['missing']['to_step'] in (4, 5)
  events = list(runtime.read_events(tmp_path / 'events.jsonl'))
  assert events[0].kind == 'missing' and events[-1].kind == 'summary'
  assert checkpoints.latest_step(tmp_path) == 9


@pytest.mark.parametrize('name', ['.lock', 'events.jsonl', 'train/metrics.jsonl'])
def test_a_run_does_not_write_to_the_target_of_a_link(name, tmp_path):
  other = tmp_path / 'notes'
  other.write_text('of the user')
  run = tmp_path / 'run'
  (tmp_path / 'elsewhere').mkdir()
  run.mkdir()
  (run / 'train').symlink_to(tmp_path / 'elsewhere')  # A link to a folder stays.
  (run / name).symlink_to(other)
  with pytest.raises(errors.LinkedFileError, match=f"{name}' must be .*notes.*Delete the link"):
    toy_run.train(run, 2)
  assert other.read_text() == 'of the user'
  if name == '.lock':
    (run / name).unlink()
    checkpoints.lock_model_dir(run).release()
  else:
    summaries.check_files(tmp_path / 'elsewhere')
