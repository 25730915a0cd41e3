"""Summaries: contents and order of the files, and lines that a restart finds and removes."""

import contextlib
import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time

import clu.metrics
import clu.values
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import metrics as metrics_lib
from t5x_lite.errors import DataError, LinkedFileError
from t5x_lite.storage import files
from t5x_lite.storage import object_store
from t5x_lite.trainer import summaries
from tests import event_files


def test_scalars_are_in_both_files(tmp_path):
  writer = summaries.SummaryWriter(tmp_path)
  writer.write_scalars(3, {'loss': np.float32(0.5), 'accuracy': jnp.asarray(0.25)})
  writer.write_scalars(6, {'loss': float('nan'), 'a/b': float('-inf')})
  writer.write_text(6, {'config': 'x = 1'})
  writer.close()
  rows = summaries.read_metrics(tmp_path / 'metrics.jsonl')
  assert [{k: v for k, v in row.items() if k != 'wall_time'} for row in rows[:1]] == [
    {'step': 3, 'loss': 0.5, 'accuracy': 0.25}
  ]
  assert math.isnan(rows[1]['loss']) and rows[1]['a/b'] == -math.inf
  assert abs(rows[0]['wall_time'] - os.path.getmtime(tmp_path / 'metrics.jsonl')) < 60
  for line in (
    (tmp_path / 'metrics.jsonl').read_text().splitlines()
  ):  # Strict JSON: other readers must not stumble.
    json.loads(line, parse_constant=lambda name: pytest.fail(f'{name} is not JSON'))
  assert event_files.scalars(tmp_path)[:2] == [(3, 'loss', 0.5), (3, 'accuracy', 0.25)]
  texts = [
    v.tensor.string_val[0]
    for e in event_files.read(tmp_path)
    for v in e.summary.value
    if v.tag.startswith('config')
  ]
  assert texts == [b'x = 1']


def test_metrics_that_are_texts_are_in_both_files(tmp_path):
  writer = summaries.SummaryWriter(tmp_path)
  writer.write_values(
    3, {'bleu': clu.values.Scalar(27.5), 'bleu_signature': clu.values.Text('tok:13a')}
  )
  writer.close()
  (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(line)['bleu_signature'] == 'tok:13a'
  (row,) = summaries.read_metrics(tmp_path / 'metrics.jsonl')
  assert row == {'step': 3, 'wall_time': row['wall_time'], 'bleu': 27.5}
  texts = [
    v.tensor.string_val[0]
    for e in event_files.read(tmp_path)
    for v in e.summary.value
    if v.tag.startswith('bleu_signature')
  ]
  assert texts == [b'tok:13a']


def test_flushed_lines_survive_a_kill(tmp_path):
  writer = summaries.SummaryWriter(tmp_path)
  for step in range(1, 301):
    writer.write_scalars(step, {'loss': float(step)})
  writer.flush()  # And not closed, as after a kill that follows a checkpoint.
  expected = [(step, 'loss', float(step)) for step in range(1, 301)]
  assert event_files.scalars(tmp_path) == expected
  assert len(summaries.read_metrics(tmp_path / 'metrics.jsonl')) == 300
  writer.close()


def test_a_full_disk_is_told_and_does_not_hang(tmp_path):
  # As in a disk that fills up: files of this process may not grow.
  script = """
import resource, signal, sys
from t5x_lite.trainer import summaries
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
manager = summaries.MetricsManager('train', sys.argv[1])
manager.write_scalars(1, {'loss': 1.0})
manager.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
for step in range(200):
  manager.write_scalars(step, {f'metric_{i}': 1.0 for i in range(10)}, events_only=True)
try:
  manager.flush()
except OSError as e:
  print('told:', e)
# The disk has space again: no record is lost or incomplete.
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
manager.write_scalars(200, {'loss': 2.0})
manager.close_files()
"""
  done = subprocess.run(
    [sys.executable, '-c', script, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.stdout.startswith('told: '), done
  written = [(step, name) for step, name, _ in event_files.scalars(tmp_path / 'train')]
  assert written == [
    (1, 'loss'),
    *((step, f'metric_{i}') for step in range(200) for i in range(10)),
    (200, 'loss'),
  ]
  assert [row['step'] for row in summaries.read_metrics(tmp_path / 'train/metrics.jsonl')] == [
    1,
    200,
  ]


def test_a_first_write_waits_for_a_disk_with_free_space(tmp_path):
  manager = summaries.MetricsManager('train', tmp_path)
  manager.write_scalars(1, {'loss': 1.0})
  manager.close_files()
  folder = tmp_path / 'train'
  assert manager.summary_dir == str(folder)
  folder.rename(tmp_path / 'moved')
  folder.write_text('')  # No folder can be made, and no file opened.
  manager.write_scalars(2, {'loss': 2.0})
  manager.start_duration_timer()
  assert (
    float(manager.write_metrics_summary(_metrics(12.0), step=3, num_steps=4).result()['loss'].value)
    == 3.0
  )
  for _ in range(2):
    with pytest.raises(OSError, match='train'):
      manager.flush()
  folder.unlink()
  (tmp_path / 'moved').rename(folder)
  manager.write_scalars(4, {'loss': 4.0})
  manager.flush()
  assert [
    (row['step'], row['loss']) for row in summaries.read_metrics(folder / 'metrics.jsonl')
  ] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
  assert [(step, value) for step, name, value in event_files.scalars(folder) if name == 'loss'] == [
    (1, 1.0),
    (2, 2.0),
    (3, 3.0),
    (4, 4.0),
  ]
  manager.close()


def test_bytes_that_are_not_text_are_cut(tmp_path):
  path = tmp_path / 'train/metrics.jsonl'
  path.parent.mkdir()
  path.write_bytes(b'{"step": 5, "loss": 1.0}\n\xff\xfe\0\0\0{"st')
  assert summaries.read_metrics(path) == [{'step': 5, 'loss': 1.0}]
  summaries.discard_after(tmp_path, 5)
  assert path.read_bytes() == b'{"step": 5, "loss": 1.0}\n'


def test_discard_after_cuts_later_steps_and_half_lines(tmp_path):
  for folder in ('train', 'training_eval/task', 'inference_eval/task', 'elsewhere'):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / 'metrics.jsonl').write_text(
      '{"step": 5, "loss": 1.0}\n{"step": 10, "loss": 0.5}\n{"step": 11, "lo'
    )
  summaries.discard_after(tmp_path, 5)
  files = summaries.metrics_files(tmp_path)
  assert list(files) == ['train', 'training_eval/task', 'inference_eval/task']
  for path in files.values():
    assert path.read_text() == '{"step": 5, "loss": 1.0}\n'
  assert (tmp_path / 'elsewhere/metrics.jsonl').read_text().count('\n') == 2
  summaries.discard_after(tmp_path, -1)
  assert files['train'].read_text() == ''


def test_discard_after_changes_each_file_atomically(tmp_path, monkeypatch):
  before = '{"step": 5}\n{"step": 11}\n{"step": 4}\n'  # of two evaluations: not cut by truncation
  paths = [
    tmp_path / folder / 'metrics.jsonl'
    for folder in ('train', 'training_eval/a', 'training_eval/b')
  ]
  for path in paths:
    path.parent.mkdir(parents=True)
    path.write_text(before)
  rename, left = files.rename, [1]

  def fail_later(*args, **kwargs):
    if not left:
      raise OSError(28, 'No space left on device')
    left.pop()
    rename(*args, **kwargs)

  monkeypatch.setattr(files, 'rename', fail_later)
  with pytest.raises(OSError, match='No space'):
    summaries.discard_after(tmp_path, 5)
  after = '{"step": 5}\n{"step": 4}\n'
  assert [path.read_text() for path in paths] == [after, before, before]
  assert all(list(path.parent.iterdir()) == [path] for path in paths)
  monkeypatch.undo()
  summaries.discard_after(tmp_path, 5)
  assert {path.read_text() for path in paths} == {after}


def test_discard_after_deletes_later_predictions(tmp_path):
  folder = tmp_path / 'inference_eval/task'
  folder.mkdir(parents=True)
  (folder / 'metrics.jsonl').write_text('{"step": 5}\n{"step": 10}\n')
  (folder.parent / 'task-metrics.jsonl').write_text('{"step": 5}\n{"step": 10}\n')
  kept = [
    folder / 'predictions-5.jsonl',
    folder / 'predictions-final.jsonl',
    folder.parent / 'task-000005.jsonl',
    folder.parent / 'task-two-000010.jsonl',
    folder / 'task-10.jsonl',
  ]
  gone = [folder / 'predictions-10.jsonl', folder.parent / 'task-000010.jsonl']
  for path in kept + gone:
    path.write_text('{}\n')
  summaries.discard_after(tmp_path, 5)
  assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)
  summaries.discard_after(tmp_path, 5, redo_evaluation=True)
  assert not kept[0].exists() and not kept[2].exists()


def test_lines_are_cut_and_files_closed_on_a_full_disk(tmp_path, monkeypatch):
  def full(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')

  manager = summaries.MetricsManager('train', tmp_path)
  manager.write_scalars(5, {'loss': 1.0})
  manager.write_scalars(10, {'loss': 0.5})
  manager.flush()
  with monkeypatch.context() as patch:
    patch.setattr(summaries.os, 'write', full)
    patch.setattr(summaries.files.pathlib.Path, 'replace', full)
    manager.write_scalars(11, {'loss': 0.4})
    manager.close_files()
    summaries.discard_after(tmp_path, 5)
    manager.write_scalars(6, {'loss': 0.9})
  manager.flush()
  assert [row['step'] for row in summaries.read_metrics(tmp_path / 'train/metrics.jsonl')] == [5, 6]
  manager.close()


def test_reading_skips_a_line_cut_by_a_kill(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 5, "loss": 1.0}\n{"step": 10, "lo')
  assert summaries.read_metrics(tmp_path / 'metrics.jsonl') == [{'step': 5, 'loss': 1.0}]


def test_a_resumed_writer_purges_later_events(tmp_path):
  folder = tmp_path / 'train'
  writer = summaries.SummaryWriter(folder)
  for step in (5, 10, 15):
    writer.write_scalars(step, {'loss': 1.0})
  writer.close()
  summaries.discard_after(tmp_path, 5)
  writer = summaries.SummaryWriter(folder)
  writer.write_scalars(10, {'loss': 0.5})
  writer.close()
  assert len(list(folder.glob('events*'))) == 2
  assert [e.step for e in event_files.read(folder) if e.HasField('session_log')] == [6]
  assert [row['step'] for row in summaries.read_metrics(folder / 'metrics.jsonl')] == [5, 10]


def test_facts_of_a_process_stay_out_of_the_lines(tmp_path):
  manager = summaries.MetricsManager('train', tmp_path)
  assert not (tmp_path / 'train').exists()
  manager.write_scalars(0, {'timing/compilation_seconds': 1.5}, events_only=True)
  manager.close()
  assert event_files.scalars(tmp_path / 'train') == [(0, 'timing/compilation_seconds', 1.5)]
  assert summaries.read_metrics(tmp_path / 'train/metrics.jsonl') == []


def _metrics(total, steps=1):
  return {
    'loss': metrics_lib.AveragePerStep.from_model_output(jnp.asarray(total)),
    'accuracy': clu.metrics.Average.from_model_output(jnp.asarray([1.0, 0.0])),
    'timing/steps_per_second': metrics_lib.StepsPerTime.from_model_output(steps=steps),
  }


def test_timer_waits_for_no_array_that_was_donated():
  manager = summaries.MetricsManager('train')
  donated = jnp.ones([2])
  donated.delete()
  manager.start_duration_timer(block_on={'state': donated, 'step': jnp.ones([]), 'lr': 0.1})
  values = manager.write_metrics_summary(_metrics(1.0), step=1, num_steps=1).result()
  assert values['timing/steps_per_second'].value > 0
  manager.close()


def test_manager_divides_by_steps_and_seconds(tmp_path):
  manager = summaries.MetricsManager('train', tmp_path)
  before = time.perf_counter()
  manager.start_duration_timer()
  future = manager.write_metrics_summary(_metrics(12.0), step=4, num_steps=4)
  values = future.result()
  elapsed = time.perf_counter() - before
  assert isinstance(values['loss'], clu.values.Scalar)
  assert float(values['loss'].value) == 3.0 and float(values['accuracy'].value) == 0.5
  assert float(values['timing/steps_per_second'].value) >= 4 / elapsed
  manager.write_scalar('timing/compilation_seconds', 1.5, 4)
  manager.flush()
  rows = summaries.read_metrics(tmp_path / 'train/metrics.jsonl')
  assert rows[0]['loss'] == 3.0 and rows[1]['timing/compilation_seconds'] == 1.5
  manager.close()
  manager.close()


def test_manager_without_directory_still_computes():
  manager = summaries.MetricsManager('train')
  manager.start_duration_timer()
  assert float(manager.write_metrics_summary(_metrics(1.0), 1, 1).result()['loss'].value) == 1.0
  assert manager.summary_writer is None
  manager.close()


def test_errors_of_the_thread_surface(tmp_path):
  manager = summaries.MetricsManager('train', tmp_path)
  manager.write_values(1, {'image': clu.values.Image(np.zeros((1, 2, 2, 1)))})
  with pytest.raises(DataError, match='image.*Image'):
    manager.flush()
  with pytest.raises(RuntimeError, match='start_duration_timer'):
    manager.write_metrics_summary(_metrics(1.0), 1, 1)
  manager.close()


@pytest.mark.full  # by default, tests/repository/test_start_up.py imports it in a dry run
def test_summaries_import_no_tensorflow():
  code = (
    'import sys, t5x_lite.trainer.summaries; '
    "sys.exit(str([m for m in ('tensorflow', 'torch', 'tensorboard') if m in sys.modules] or ''))"
  )
  assert (
    subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=False
    ).stderr.strip()
    == ''
  )


def test_arrays_are_only_in_lines(tmp_path):
  writer = summaries.SummaryWriter(tmp_path)
  load = metrics_lib.ArrayAverage.from_model_output(jnp.asarray([1.0, 0.0, jnp.nan]))
  load = load.merge(metrics_lib.ArrayAverage.from_model_output(jnp.asarray([0.0, 0.5, 1.0])))
  values = {'load': load.compute_value(), 'loss': clu.values.Scalar(2.0)}
  writer.write_values(4, values)
  writer.write_values(5, {'loss': clu.values.Scalar(1.0)})
  writer.write_values(6, {'load': clu.values.Summary(np.ones([2, 1]), None)})
  writer.close()
  path = tmp_path / 'metrics.jsonl'
  first = json.loads(path.read_text().splitlines()[0])
  assert first['load'] == [0.5, 0.25, 'NaN'] and first['loss'] == 2.0
  assert [
    {k: v for k, v in row.items() if k != 'wall_time'} for row in summaries.read_metrics(path)
  ] == [{'step': 4, 'loss': 2.0}, {'step': 5, 'loss': 1.0}, {'step': 6}]
  arrays = summaries.read_arrays(path)
  assert [row['step'] for row in arrays] == [4, 6]
  np.testing.assert_array_equal(arrays[0]['load'], [0.5, 0.25, np.nan])
  np.testing.assert_array_equal(arrays[1]['load'], np.ones([2, 1]))
  assert {name for _, name, _ in event_files.scalars(tmp_path)} == {'loss'}


def test_a_resumed_run_in_a_store_has_the_lines_of_an_uninterrupted_one(store, monkeypatch):
  def write(first, last, folder):
    with contextlib.closing(summaries.MetricsManager('train', folder)) as manager:
      for step in range(first, last + 1):
        manager.write_scalars(step, {'loss': float(step)})
        if step % 2 == 0:
          manager.flush()
          files.write(f'{folder}/manifest', b'')

  monkeypatch.setattr(files, '_PART_BYTES', 60)
  write(1, 10, store.root)
  path = f'{store.root}/train/metrics.jsonl'
  assert len(files.parts(path)) == 5
  # A kill between two parts: the last ones are cut, and the next call cuts the others.
  keep, changed = files.write, []

  def killed(part, content):
    if changed:
      raise KeyboardInterrupt
    changed.append(part)
    keep(part, content)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(files, 'write', killed)
    summaries.keep_lines(files.path(path), lambda step: step in (1, 3, 5))
  assert [row['step'] for row in summaries.read_metrics(path)] == [1, 2, 3, 4, 5]
  summaries.discard_after(store.root, 3)
  assert [part.name for part in files.parts(path)] == ['metrics.jsonl', 'metrics.jsonl.part-00001']
  write(4, 12, store.root)
  assert [row['step'] for row in summaries.read_metrics(path)] == list(range(1, 13))
  # TensorBoard reads files in the order of their names, and each must begin with the version.
  events = sorted(files.path(f'{store.root}/train').glob('*tfevents*'))
  assert len(events) > 4 and all(b'brain.Event:2' in part.read_bytes()[:60] for part in events)
  scalars = [
    (e.step, v.simple_value)
    for part in events
    for e in event_files.records(part.read_bytes())
    for v in e.summary.value
  ]
  assert scalars == [(step, step) for step in [*range(1, 11), *range(4, 13)]]


def test_metrics_wait_in_memory_while_a_store_does_not_answer(s3_store, monkeypatch):
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.1)
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.01)
  with contextlib.closing(summaries.MetricsManager('train', s3_store.root)) as manager:
    with s3_store.proxy.fault(unreachable=True, operation='write'):
      manager.write_scalars(1, {'loss': 1.0})
      with pytest.raises(OSError, match='did not answer'):
        manager.flush()
        files.write(f'{s3_store.root}/manifest', b'')
      manager.write_scalars(2, {'loss': 2.0})
    manager.flush()
    files.write(f'{s3_store.root}/manifest', b'')
    assert [
      row['step'] for row in summaries.read_metrics(f'{s3_store.root}/train/metrics.jsonl')
    ] == [1, 2]


def test_a_writer_that_is_made_while_a_store_does_not_answer(s3_store, monkeypatch):
  monkeypatch.setattr(object_store, 'RETRY_SECONDS', 0.1)
  monkeypatch.setattr(object_store, '_FIRST_PAUSE', 0.01)
  for step in (1, 2):  # the second one is a resumed run
    with contextlib.closing(summaries.MetricsManager('training_eval/a', s3_store.root)) as manager:
      with s3_store.proxy.fault(unreachable=True):
        manager.write_scalars(step, {'loss': float(step)})
        manager.flush()
      files.write(f'{s3_store.root}/manifest', b'')
      assert [
        row['step']
        for row in summaries.read_metrics(f'{s3_store.root}/training_eval/a/metrics.jsonl')
      ] == [*range(1, step + 1)]


def test_metrics_that_are_deleted_continue_in_new_files_which_say_what_is_missing(tmp_path, caplog):
  manager = summaries.MetricsManager('train', tmp_path)
  path = tmp_path / 'train/metrics.jsonl'
  for step in (1, 2, 3):
    manager.write_scalars(step, {'loss': float(step)})
  manager.flush()
  shutil.rmtree(tmp_path / 'train')
  for step in (4, 5):
    manager.write_scalars(step, {'loss': float(step)})
    manager.flush()
  assert [record.levelname for record in caplog.records] == ['WARNING']
  assert f'{path} was deleted or renamed' in caplog.text
  first, *lines = map(json.loads, path.read_text().splitlines())
  assert first['missing'] == {
    'after_step': None,
    'to_step': 3,
    'cause': 'was deleted or renamed',
  }
  assert [line['step'] for line in lines] == [4, 5]
  assert [row['step'] for row in summaries.read_metrics(path)] == [4, 5]
  assert [step for step, name, _ in event_files.scalars(tmp_path / 'train')] == [4, 5]
  # Truncated after step 4: the line of step 5 is missing.
  os.truncate(path, len(b''.join(path.read_bytes().splitlines(keepends=True)[:2])) + 5)
  manager.write_scalars(6, {'loss': 6.0})
  manager.close()
  second = json.loads(path.read_text().splitlines()[3])['missing']
  assert (second['after_step'], second['to_step']) == (4, 5)
  # A run that resumes writes the lines after its step again.
  for last, expected in ((6, [(None, 3), (4, 5)]), (4, [(None, 3)]), (2, [(None, 2)]), (-1, [])):
    summaries.discard_after(tmp_path, last)
    found = [json.loads(line).get('missing') for line in path.read_text().splitlines()]
    assert [(each['after_step'], each['to_step']) for each in found if each] == expected


def test_metrics_in_a_link_are_not_changed(tmp_path):
  (tmp_path / 'train').mkdir()
  other = tmp_path / 'other.jsonl'
  other.write_text('{"step": 5}\n{"step": 6}\n')
  path = tmp_path / 'train/metrics.jsonl'
  path.symlink_to(other)
  manager = summaries.MetricsManager('train', tmp_path)
  manager.write_scalars(1, {'loss': 1.0})
  for fn in (
    lambda: summaries.check_files(tmp_path),
    lambda: summaries.discard_after(tmp_path, 5),
    manager.flush,
  ):
    with pytest.raises(LinkedFileError, match="metrics.jsonl' must be .* a link to .*other.jsonl"):
      fn()
  assert other.read_text().count('\n') == 2
  path.unlink()
  manager.close()
  assert [row['step'] for row in summaries.read_metrics(path)] == [1]


def test_rows_wait_until_the_files_can_be_opened(tmp_path, monkeypatch):
  opened = files.appended
  attempts = []

  def fail_twice(*args, **kwargs):
    attempts.append(args)
    if len(attempts) < 3:
      raise OSError(errno.EMFILE, 'Too many open files')
    return opened(*args, **kwargs)

  monkeypatch.setattr(files, 'appended', fail_twice)
  manager = summaries.MetricsManager('train', tmp_path)
  manager.write_scalars(5, {'loss': 2.0})
  with pytest.raises(OSError, match='Too many open files'):
    manager.flush()
  manager.write_scalars(10, {'loss': 1.0})
  manager.flush()
  manager.close()
  rows = summaries.read_metrics(tmp_path / 'train' / summaries.METRICS_FILE)
  assert [row['step'] for row in rows] == [5, 10]
