"""Results on the disk: whatever step a process is killed at, the next one writes every example once, in order."""

import errno
import json
import os
import random

import pytest

from t5x_lite import errors
from t5x_lite.storage import files
from tests.apps.infer import store_cases as cases


def _only_results(folder, names):
  assert sorted(path.name for path in folder.iterdir()) == sorted([*names, 'r.jsonl.run'])
  for path in (folder / 'r.jsonl.run').rglob('*'):
    assert path.is_dir() or path.name in ('run.json', 'merged.json', 'merge.lock'), path


@pytest.mark.parametrize('num_examples', [13, 1])
def test_a_process_that_dies_at_any_step_loses_and_doubles_nothing(tmp_path, num_examples):
  num_steps = 0
  while True:
    folder = tmp_path / str(num_steps)
    disk = cases.DyingDisk(num_steps)
    try:
      cases.work(folder, num_examples, disk=disk)
      break
    except cases.Killed:
      pass
    cases.work(folder, num_examples, period=3)  # the period may change
    assert (folder / 'r.jsonl').read_text() == ''.join(cases.make_lines(num_examples)), num_steps
    _only_results(folder, ['r.jsonl'])
    num_steps += 1
  assert num_steps > (50 if num_examples == 13 else 30)


def test_many_deaths_one_after_the_other(tmp_path):
  seed = int(os.environ.get('T5X_LITE_TEST_SEED', random.SystemRandom().randrange(2**31)))
  print(f'T5X_LITE_TEST_SEED={seed} chooses the steps.')
  rng = random.Random(seed)
  for number in range(20):
    folder, total, done = tmp_path / str(number), rng.randrange(1, 40), False
    while not done:
      try:
        cases.work(
          folder, total, disk=cases.DyingDisk(rng.randrange(5, 60)), period=rng.randrange(1, 4)
        )
        done = True
      except cases.Killed:
        pass
    assert (folder / 'r.jsonl').read_text() == ''.join(cases.make_lines(total)), (seed, number)


def test_a_damaged_chunk_and_later_ones_are_computed_again(tmp_path):
  cases.work(tmp_path, 20, stop_after=6, period=1)
  chunks = sorted((tmp_path / 'r.jsonl.run').rglob('chunk-*.jsonl'))
  assert len(chunks) == 6
  chunks[2].write_text(chunks[2].read_text().replace('7', '8'))
  assert cases.work(tmp_path, 20, stop_after=0).next_batch == 2
  cases.work(tmp_path, 20)
  assert (tmp_path / 'r.jsonl').read_text() == ''.join(cases.make_lines(20))


def test_results_of_earlier_versions_resume(tmp_path):
  store = cases.work(tmp_path, 20, stop_after=4)
  for path in store.paths.shard_folder.glob('chunk-*.json'):
    facts = json.loads(path.read_text())
    del facts['num_unended']
    path.write_text(json.dumps(facts))
  store = cases.work(tmp_path, 20, stop_after=0)
  assert store.next_batch == 4 and store.totals['num_unended'] == 0
  path = cases.work(tmp_path, 20).paths.shard_folder / 'run.json'
  facts = json.loads(path.read_text())
  del facts['result']['num_unended']
  path.write_text(json.dumps(facts))
  assert cases.work(tmp_path, 20).totals == {'num_examples': 20, 'num_cut': 0, 'num_unended': 0}


def test_a_chunk_after_one_that_could_not_be_written_is_rejected(tmp_path):
  store = cases.work(tmp_path, 20, stop_after=2)
  with pytest.raises(RuntimeError, match='`first` must be 2, .* got 4'):
    store.write_chunk(4, 1, 3, 0, 0, lambda path: path.write_text('{}\n' * 3))


def test_complete_results_that_were_changed_or_moved(tmp_path):
  cases.work(tmp_path, 7)
  (tmp_path / 'r.jsonl').rename(tmp_path / 'kept.jsonl')
  cases.work(tmp_path, 7)  # somebody wants them once more
  assert (
    (tmp_path / 'r.jsonl').read_text()
    == (tmp_path / 'kept.jsonl').read_text()
    == ''.join(cases.make_lines(7))
  )
  (tmp_path / 'r.jsonl').write_text('edited')
  with pytest.raises(errors.ConfigError, match='was not written by this command'):
    cases.work(tmp_path, 7)


def test_a_source_that_has_changed_is_noticed(tmp_path):
  cases.work(tmp_path, 7, stop_after=2)
  with pytest.raises(errors.DataError, match='results have 6 examples, but the source now has 5'):
    cases.work(tmp_path, 5)
  cases.work(tmp_path / 'b', 7, shard_id=0, num_shards=2)
  with pytest.raises(errors.DataError, match='a source of 6 examples'):
    cases.work(tmp_path / 'b', 6, shard_id=1, num_shards=2)


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
  def write(path):
    path.write_text('half')
    raise OSError(errno.ENOSPC, 'No space left on device')

  store = cases.work(tmp_path, 7, stop_after=1)
  with pytest.raises(OSError, match=r"No space left on device: .*chunk-0000000001.jsonl'"):
    store.write_chunk(1, 1, 3, 0, 0, write)
  assert not list(tmp_path.rglob('chunk-0000000001*'))


def test_deaths_with_results_in_a_store(store):
  lines = ''.join(cases.make_lines(13))
  for num_steps in range(1, 24, 4):
    folder = files.path(store.root) / str(num_steps)
    with pytest.raises(cases.Killed):
      cases.work(folder, 13, disk=cases.DyingDisk(num_steps))
    assert not (folder / 'r.jsonl').exists() or (folder / 'r.jsonl').read_text() == lines
    cases.work(folder, 13, period=3)
    assert (folder / 'r.jsonl').read_text() == lines, num_steps
    assert sorted(folder.find()) == ['r.jsonl', 'r.jsonl.run/shard-00000-of-00001/run.json']


def test_a_store_that_cannot_be_read_is_not_an_empty_one(store):
  folder = files.path(store.root) / 'out'
  cases.work(folder, 13, stop_after=2)
  names = store.names()
  with store.proxy.fault(name='run.json', status=403), pytest.raises(PermissionError):
    cases.work(folder, 13)
  assert store.names() == names
