"""Run directories that grow, and a tracker that appends to a file."""

import collections
import json
import os
import pathlib

from t5x_lite import trackers
from t5x_lite.checkpoints import manifest

FILE = 'tracked.jsonl'


class FileTracker(trackers.Tracker):
  """Appends what it gets to `FILE` in a folder; it cannot overwrite."""

  name = 'file'

  def __init__(self, folder):
    self.path = pathlib.Path(folder) / FILE
    self.run_info = None
    self.knows_last_step = True

  def start(self, run_info):
    self.run_info = run_info
    self._write({'start': run_info.run_id})

  def log(self, step, values, wall_time):
    self._write({'step': step, 'values': dict(values), 'wall_time': wall_time})

  def table(self, step, name, rows):
    self._write({'table': name, 'at': step, 'rows': list(rows)})

  def finish(self, status):
    self._write({'finish': status})

  def flush(self):
    pass

  def last_step(self):
    if not self.knows_last_step:
      return None
    return max((row['step'] for row in read(self.path) if 'step' in row), default=-1)

  def _write(self, row):
    line = json.dumps(row).encode() + b'\n'
    descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line)
    os.close(descriptor)


class OverwritingTracker(FileTracker):
  """Also forgets later steps."""

  name = 'overwriting'
  can_overwrite = True

  def discard_after(self, step):
    rows = [row for row in read(self.path) if row.get('step', -1) <= step]
    self.path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))


def read(path):
  """Returns the objects in the lines of a file; [] without one."""
  if not pathlib.Path(path).is_file():
    return []
  return [json.loads(line) for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines()]


def steps(tracker):
  """Returns the steps that a tracker has, in their order."""
  return [row['step'] for row in read(tracker.path) if 'step' in row]


def losses(tracker):
  """Returns step to the set of values of 'train/loss'."""
  found = collections.defaultdict(set)
  for row in read(tracker.path):
    if 'train/loss' in row.get('values', ()):
      found[row['step']].add(row['values']['train/loss'])
  return dict(found)


class GrowingRun:
  """A run directory that is written as a run does."""

  def __init__(self, path):
    self.path = pathlib.Path(path)
    self.path.mkdir(parents=True, exist_ok=True)
    self._wall_time = 1700000000.0
    (self.path / 'config.gin').write_text('TRAIN_STEPS = 5\n')

  def event(self, kind, **details):
    self._wall_time += 1
    row = {'event': kind, 'wall_time': self._wall_time, 'step': 0, 'process': 0, 'seconds': {}}
    self._append(self.path / 'events.jsonl', {**row, **details})

  def start(self):
    self.event(
      'start',
      host='machine',
      pid=1,
      version='0',
      num_processes=1,
      hardware='cpu-1',
      command='train',
    )

  def stop(self, cause='completed'):
    self.event('stop', cause=cause)

  def line(self, step, writer='train', **values):
    self._wall_time += 1
    values = values or {'loss': 1.0 / (1 + step)}
    self._append(
      self.path / writer / 'metrics.jsonl', {'step': step, 'wall_time': self._wall_time, **values}
    )

  def checkpoint(self, step, **run_facts):
    folder = self.path / f'checkpoint_{step}'
    folder.mkdir()
    manifest.write(
      folder, manifest.Manifest(step=step, files={}, arrays={}, metadata={'run': run_facts})
    )

  def predictions(self, step, task, rows):
    folder = self.path / 'inference_eval' / task
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    (folder / f'predictions-{step}.jsonl').write_text('\n'.join(lines) + '\n')

  @staticmethod
  def _append(path, row):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a') as file:
      file.write(json.dumps(row) + '\n')
