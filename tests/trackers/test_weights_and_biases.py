"""wandb in its offline mode: values, and no key in its file that is not expected."""

import json
import os
import socket
import struct

import pytest

from t5x_lite import trackers
from tests.trackers.tracker_cases import GrowingRun

pytest.importorskip('wandb')

# Every field that a file may have. Those of `artifact` belong to tables: `local_path` is for `wandb sync`, which
# uploads the file at it. `telemetry` are the versions and options of wandb that it always reports.
_ALLOWED = {
  '_info.stream_id',
  'artifact.aliases',
  'artifact.client_id',
  'artifact.digest',
  'artifact.digest_algorithm',
  'artifact.finalize',
  'artifact.manifest.contents.digest',
  'artifact.manifest.contents.local_path',
  'artifact.manifest.contents.path',
  'artifact.manifest.contents.size',
  'artifact.manifest.storage_policy',
  'artifact.manifest.storage_policy_config.key',
  'artifact.manifest.storage_policy_config.value_json',
  'artifact.manifest.version',
  'artifact.name',
  'artifact.project',
  'artifact.run_id',
  'artifact.sequence_client_id',
  'artifact.type',
  'control.always_send',
  'control.local',
  'control.mailbox_slot',
  'exit.exit_code',
  'exit.runtime',
  'files.files.path',
  'header.version_info.min_consumer',
  'header.version_info.producer',
  'history.item.nested_key',
  'history.item.value_json',
  'history.step.num',
  'metric.glob_name',
  'metric.name',
  'metric.options.defined',
  'metric.options.step_sync',
  'metric.step_metric',
  'num',
  'run.config.update.key',
  'run.config.update.value_json',
  'run.display_name',
  'run.host',
  'run.project',
  'run.resume',
  'run.run_id',
  'run.start_time.nanos',
  'run.start_time.seconds',
  'summary.update.key',
  'summary.update.nested_key',
  'summary.update.value_json',
}
_ALLOWED_BELOW = ('telemetry.', 'run.telemetry.')
_TELEMETRY = {
  'cli_version',
  'platform',
  'python_version',
  'feature',
  'imports_init',
  'imports_finish',
}


def _records(path):
  """Yields the records of a .wandb file, which is a log of LevelDB of wandb's messages."""
  from wandb.proto import wandb_internal_pb2

  data = path.read_bytes()
  assert data[:4] == b':W&B'
  position = 7
  content = b''
  while position + 7 <= len(data):
    left = 32768 - position % 32768
    _, length, kind = struct.unpack('<IHB', data[position : position + 7])
    if left < 7 or kind == 0:
      position += left
      continue
    content += data[position + 7 : position + 7 + length]
    position += 7 + length
    if kind in (1, 4):
      record = wandb_internal_pb2.Record()
      record.ParseFromString(content)
      content = b''
      yield record


def _fields(message, prefix=''):
  """Yields (name, value) of all fields of a message that have a value."""
  for field, value in message.ListFields():
    name = f'{prefix}{field.name}'
    if field.type != field.TYPE_MESSAGE:
      yield name, value
      continue
    for each in value if hasattr(value, '__len__') else [value]:
      yield from _fields(each, f'{name}.')


def _history(folder):
  """Returns the rows of all files of a run."""
  rows = []
  for path in sorted(folder.glob('wandb/offline-run-*/*.wandb')):
    for record in _records(path):
      if record.WhichOneof('record_type') == 'history':
        rows.append(
          {'/'.join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        )
  return rows


@pytest.fixture
def run(tmp_path, monkeypatch):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('MY_PRIVATE_VARIABLE', 'value-of-a-variable')
  monkeypatch.delenv('WANDB_DATA_DIR', raising=False)
  monkeypatch.chdir(tmp_path)
  made = GrowingRun(tmp_path / 'runs/mine')
  (made.path / 'config.gin').write_text(
    f"TRAIN_STEPS = 30\nDATA = '{tmp_path}/private/file.txt'\nmine.load.api_key = 'secret-key'\n"
  )
  made.start()
  for step in (10, 20):
    made.line(step)
  made.line(20, 'inference_eval/a', bleu=2.0, **{'half\ud800': 1.0})
  example = {'index': 0, 'inputs': 'x', 'targets': 'y', 'prediction': 'z'}
  # wandb raises an error for a column with values of several types.
  made.predictions(20, 'a', [example, {**example, 'targets': None, 'prediction': ['\ud800']}])
  made.line(30, loss='NaN')
  made.checkpoint(20, random_seed=7)
  return made


def test_a_run_and_its_continuation_have_each_step_once_and_nothing_else(run, tmp_path):
  tracker = trackers.Wandb()
  follower = trackers.Follower(run.path, tracker)
  assert follower.send().status == 'running'
  follower.finish('running')
  run.line(40)
  run.stop()
  follower = trackers.Follower(run.path, trackers.Wandb())
  follower.finish(follower.send().status)
  folder = run.path / 'trackers'
  assert 'WANDB_DATA_DIR' not in os.environ
  rows = _history(folder)
  losses = [(row['step'], row['train/loss']) for row in rows if 'train/loss' in row]
  assert losses[:2] == [(10, 1 / 11), (20, 1 / 21)]
  assert losses[2][0] == 30 and losses[2][1] != losses[2][1]
  assert losses[3:] == [(40, 1 / 41)]
  assert [row['inference_eval/a/half?'] for row in rows if 'inference_eval/a/half?' in row] == [1.0]
  assert [row['inference_eval/a/bleu'] for row in rows if 'inference_eval/a/bleu' in row] == [2.0]

  paths = sorted(folder.glob('wandb/offline-run-*/*.wandb'))
  assert len(paths) == 2
  ids = set()
  config = set()
  for path in paths:
    for record in _records(path):
      for name, value in _fields(record):
        if name.startswith(_ALLOWED_BELOW):
          assert name.split('telemetry.')[1].split('.')[0] in _TELEMETRY, name
        else:
          assert name in _ALLOWED, f'{name} = {value!r}'
        if name == 'run.run_id':
          ids.add(value)
        if name == 'run.config.update.key':
          config.add(value)
        if name == 'run.host':
          assert value == 't5x_lite'
        if 'local_path' in name:
          assert value.startswith(f'{folder}/wandb/artifacts/')
        else:
          text = str(value)
          for private in (str(tmp_path), 'value-of-a-variable', 'secret-key', 'test_weights_and'):
            assert private not in text, (name, text)
          assert text != socket.gethostname()
  assert len(ids) == 1
  expected = {
    'TRAIN_STEPS',
    'DATA',
    'mine.load.api_key',
    'hardware',
    'num_processes',
    'random_seed',
  }
  assert expected <= config
  assert {name for name in config if '/' not in name} - expected == {'_wandb'}
  # Files that wandb would upload: only tables.
  for path in folder.rglob('files/**/*'):
    assert path.is_dir() or path.name.endswith('.table.json'), path
