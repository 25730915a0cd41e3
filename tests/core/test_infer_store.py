"""Results on the disk: whatever step a process dies at, the next one ends with every example once, in order."""

import contextlib
import dataclasses
import errno
import json
import os
import random

import pytest

from t5x_lite import errors
from t5x_lite import files
from t5x_lite.apps.infer import place as place_lib
from t5x_lite.apps.infer.merge import merge_shards
from t5x_lite.apps.infer.place import Place
from t5x_lite.apps.infer.store import ShardStore

_IDENTITY = {'mode': 'predict', 'checkpoint': {'step': 5}}
_BATCH_SIZE = 3


class Killed(BaseException):
  """What stands for the end of the process."""


class DyingDisk:
  """Ends the process at the n-th step of `files`; a file that is being written then holds half of what it should."""

  def __init__(self, num_steps=10**9):
    self._left = num_steps

  @contextlib.contextmanager
  def in_use(self):
    write, rename, remove = files.write, files.rename, files.remove

    def dying_write(path, content, **options):
      def half_way(temporary):
        self.step()
        content(temporary) if callable(content) else temporary.write_text(content)
        try:
          self.step()
        except Killed:
          with open(temporary, 'rb+') as file:
            file.truncate(os.path.getsize(temporary) // 2)
          raise

      write(path, half_way, **options)

    def dying_rename(source, target, **options):
      self.step()
      rename(source, target, **options)

    def dying_remove(path):  # that of the temporary file of a dead process too
      self.step()
      remove(path)

    def dying_fsync(path):
      self.step()
      assert path.exists()  # waiting for the disk itself is slow, and changes nothing that a process can see

    with pytest.MonkeyPatch.context() as patch:
      for name, function in (('write', dying_write), ('rename', dying_rename), ('remove', dying_remove),
                             ('fsync', dying_fsync)):
        patch.setattr(files, name, function)
      yield

  def step(self):
    if self._left <= 0:
      raise Killed
    self._left -= 1


def _lines(num_examples):
  return [f'{{"number": {i}}}\n' for i in range(num_examples)]


def _batches_of(num_examples, shard_id, num_shards):
  lines = _lines(num_examples)
  batches = [lines[start:start + _BATCH_SIZE] for start in range(0, num_examples, _BATCH_SIZE)]
  return batches[shard_id::num_shards]


def _work(folder, num_examples, *, shard_id=0, num_shards=1, period=2, disk=None, is_whole=True, identity=None,
          stop_after=None):
  """Does what the app does with a store; the results are the examples' numbers."""
  with (disk or DyingDisk()).in_use():
    place = Place(folder=folder, name='r.jsonl', shard_id=shard_id, num_shards=num_shards, is_whole=is_whole)
    place.shard_folder.mkdir(parents=True, exist_ok=True)
    store = ShardStore(place, identity or _IDENTITY, _BATCH_SIZE)
    if not store.has_all_chunks:
      store.begin()
      batches = _batches_of(num_examples, shard_id, num_shards)[:stop_after]
      for first in range(store.next_batch, len(batches), period):
        chunk = [line for batch in batches[first:first + period] for line in batch]
        store.write_chunk(first, len(batches[first:first + period]), len(chunk), 0,
                          lambda path, text=''.join(chunk): path.write_text(text))
      if stop_after is not None:
        return store
      store.end_chunks(num_examples)
    if not store.is_complete:
      store.finish()
    store.begin()
    if num_shards > 1:
      merge_shards(place)
    return store


def _only_results(folder, names):
  assert sorted(path.name for path in folder.iterdir()) == sorted([*names, 'r.jsonl.run'])
  for path in (folder / 'r.jsonl.run').rglob('*'):
    assert path.is_dir() or path.name in ('run.json', 'merged.json', 'merge.lock'), path


@pytest.mark.parametrize('num_examples', [13, 1])
def test_a_process_that_dies_at_any_step_loses_and_doubles_nothing(tmp_path, num_examples):
  num_steps = 0
  while True:
    folder = tmp_path / str(num_steps)
    disk = DyingDisk(num_steps)
    try:
      _work(folder, num_examples, disk=disk)
      break
    except Killed:
      pass
    _work(folder, num_examples, period=3)  # the period may change
    assert (folder / 'r.jsonl').read_text() == ''.join(_lines(num_examples)), num_steps
    _only_results(folder, ['r.jsonl'])
    num_steps += 1
  assert num_steps > (50 if num_examples == 13 else 30)


def test_the_last_shard_dies_at_any_step(tmp_path):
  num_steps, total = 0, 11
  while True:
    folder = tmp_path / str(num_steps)
    _work(folder, total, shard_id=0, num_shards=2)
    assert not (folder / 'r.jsonl').exists()
    try:
      _work(folder, total, shard_id=1, num_shards=2, disk=DyingDisk(num_steps))
      break
    except Killed:
      pass
    _work(folder, total, shard_id=1, num_shards=2)
    assert (folder / 'r.jsonl').read_text() == ''.join(_lines(total)), num_steps
    _only_results(folder, ['r.jsonl', 'r.jsonl-00000-of-00002', 'r.jsonl-00001-of-00002'])
    num_steps += 1
  assert num_steps > 40


def test_many_deaths_one_after_the_other(tmp_path):
  seed = int(os.environ.get('T5X_LITE_TEST_SEED', random.SystemRandom().randrange(2**31)))
  print(f'T5X_LITE_TEST_SEED={seed} chooses the steps.')
  rng = random.Random(seed)
  for number in range(20):
    folder, total, done = tmp_path / str(number), rng.randrange(1, 40), False
    while not done:
      try:
        _work(folder, total, disk=DyingDisk(rng.randrange(5, 60)), period=rng.randrange(1, 4))
        done = True
      except Killed:
        pass
    assert (folder / 'r.jsonl').read_text() == ''.join(_lines(total)), (seed, number)


@pytest.mark.parametrize('total, num_shards', [(14, 3), (3, 4), (12, 2)])
def test_shards_in_any_order_make_one_file_in_the_order_of_the_source(tmp_path, total, num_shards):
  for shard_id in reversed(range(num_shards)):
    store = _work(tmp_path, total, shard_id=shard_id, num_shards=num_shards)
    assert merge_shards(store.place) == list(range(shard_id))
  assert (tmp_path / 'r.jsonl').read_text() == ''.join(_lines(total))


def test_the_name_is_that_of_t5x_unless_one_is_given(tmp_path):
  _work(tmp_path, 5, is_whole=False)
  assert (tmp_path / 'r.jsonl-00000-of-00001').read_text() == ''.join(_lines(5))
  assert not (tmp_path / 'r.jsonl').exists()


def test_a_damaged_chunk_and_what_follows_is_made_again(tmp_path):
  _work(tmp_path, 20, stop_after=6, period=1)
  chunks = sorted((tmp_path / 'r.jsonl.run').rglob('chunk-*.jsonl'))
  assert len(chunks) == 6
  chunks[2].write_text(chunks[2].read_text().replace('7', '8'))
  assert _work(tmp_path, 20, stop_after=0).next_batch == 2
  _work(tmp_path, 20)
  assert (tmp_path / 'r.jsonl').read_text() == ''.join(_lines(20))


def test_a_chunk_after_one_that_could_not_be_written_is_refused(tmp_path):
  store = _work(tmp_path, 20, stop_after=2)
  with pytest.raises(RuntimeError, match='Got results from batch 4 on; expected those from 2 on'):
    store.write_chunk(4, 1, 3, 0, lambda path: path.write_text('{}\n' * 3))


@pytest.mark.parametrize('stop_after', [1, None])
def test_other_settings_are_refused_and_named(tmp_path, stop_after):
  _work(tmp_path, 7, stop_after=stop_after)
  before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  with pytest.raises(errors.ConfigError) as caught:
    _work(tmp_path, 7, identity={'mode': 'score', 'checkpoint': {'step': 6}})
  for text in ("mode: then 'predict', now 'score'", 'checkpoint.step: then 5, now 6', 'r.jsonl.run',
               'INFER_OUTPUT_DIR'):
    assert text in str(caught.value)
  assert before == {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}


def test_a_shard_with_other_settings_than_its_sisters_is_refused(tmp_path):
  _work(tmp_path, 7, shard_id=0, num_shards=2)
  with pytest.raises(errors.ConfigError, match="mode: then 'predict', now 'score'"):
    _work(tmp_path, 7, shard_id=1, num_shards=2, identity={**_IDENTITY, 'mode': 'score'})


@pytest.mark.parametrize('num_shards, name', [(1, 'r.jsonl'), (2, 'r.jsonl-00000-of-00002'), (2, 'r.jsonl')])
def test_a_file_of_somebody_else_is_never_replaced(tmp_path, num_shards, name):
  (tmp_path / name).write_text('mine')
  with pytest.raises(errors.ConfigError, match=f'{name} exists, and is not what this command has written'):
    _work(tmp_path, 7, num_shards=num_shards)
  assert (tmp_path / name).read_text() == 'mine'


@pytest.mark.parametrize('num_shards, name', [(1, 'r.jsonl'), (2, 'r.jsonl-00001-of-00002'), (2, 'r.jsonl')])
def test_nor_is_one_that_was_put_there_meanwhile(tmp_path, num_shards, name):
  for shard_id in range(num_shards - 1):
    _work(tmp_path, 7, num_shards=num_shards, shard_id=shard_id)
  store = _work(tmp_path, 7, num_shards=num_shards, shard_id=num_shards - 1, stop_after=3)
  (tmp_path / name).write_text('mine')
  store.end_chunks(7)
  with pytest.raises(errors.ConfigError, match=f'{name} has been put there by somebody else'):
    store.finish()
    merge_shards(store.place)
  assert (tmp_path / name).read_text() == 'mine'
  (tmp_path / name).unlink()
  _work(tmp_path, 7, num_shards=num_shards, shard_id=num_shards - 1)
  assert (tmp_path / 'r.jsonl').read_text() == ''.join(_lines(7))


def test_complete_results_that_were_changed_or_moved(tmp_path):
  _work(tmp_path, 7)
  (tmp_path / 'r.jsonl').rename(tmp_path / 'kept.jsonl')
  _work(tmp_path, 7)  # somebody wants them once more
  assert (tmp_path / 'r.jsonl').read_text() == (tmp_path / 'kept.jsonl').read_text() == ''.join(_lines(7))
  (tmp_path / 'r.jsonl').write_text('edited')
  with pytest.raises(errors.ConfigError, match='is not what this command has written'):
    _work(tmp_path, 7)


def test_a_source_that_has_changed_is_noticed(tmp_path):
  _work(tmp_path, 7, stop_after=2)
  with pytest.raises(errors.DataError, match='6 examples were worked on, but the source has 5'):
    _work(tmp_path, 5)
  _work(tmp_path / 'b', 7, shard_id=0, num_shards=2)
  with pytest.raises(errors.DataError, match='a source of 6 examples'):
    _work(tmp_path / 'b', 6, shard_id=1, num_shards=2)


def test_another_number_of_shards_has_the_same_settings(tmp_path):
  _work(tmp_path, 7, shard_id=0, num_shards=3)
  with pytest.raises(errors.ConfigError, match="00000-of-00003 was made with other settings .*now 'other'"):
    _work(tmp_path, 7, shard_id=0, num_shards=2, identity={**_IDENTITY, 'mode': 'other'})
  _work(tmp_path, 7, shard_id=1, num_shards=2)


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
  def write(path):
    path.write_text('half')
    raise OSError(errno.ENOSPC, 'No space left on device')

  store = _work(tmp_path, 7, stop_after=1)
  with pytest.raises(OSError, match=r"No space left on device: .*chunk-0000000001.jsonl'"):
    store.write_chunk(1, 1, 3, 0, write)
  assert not list(tmp_path.rglob('chunk-0000000001*'))


def test_shards_that_began_at_once_with_other_settings_are_not_merged(tmp_path):
  _work(tmp_path, 7, shard_id=0, num_shards=2)
  place = Place(folder=tmp_path, name='r.jsonl', shard_id=1, num_shards=2, is_whole=True)
  elsewhere = dataclasses.replace(place, folder=tmp_path / 'empty')
  stores = [ShardStore(elsewhere, {**_IDENTITY, 'mode': 'other'}, _BATCH_SIZE) for _ in range(2)]
  place.shard_folder.mkdir(parents=True)
  for store in stores:
    store.place = place  # as if shard 0 had begun after these were opened
  with pytest.raises(errors.ConfigError, match="mode: then .* now 'other'"):
    stores[0].begin()
  stores[1]._check_identities = lambda: None  # and in the very moment
  stores[1].begin()
  stores[1].write_chunk(0, 1, 3, 0, lambda path: path.write_text('x\n' * 3))
  stores[1].end_chunks(7)
  stores[1].finish()
  with pytest.raises(errors.ConfigError, match='made with other settings than .*00000-of-00002'):
    merge_shards(place)
  assert not (tmp_path / 'r.jsonl').exists()


def test_a_shard_changed_to_other_results_of_the_same_size_is_not_merged(tmp_path):
  _work(tmp_path, 7, shard_id=0, num_shards=2)
  store = _work(tmp_path, 7, shard_id=1, num_shards=2)
  merged = (tmp_path / 'r.jsonl').read_text()
  (tmp_path / 'r.jsonl').unlink()
  shard = tmp_path / 'r.jsonl-00000-of-00002'
  content = shard.read_text()
  shard.write_text(content[:-2] + ('0' if content[-2] != '0' else '1') + content[-1:])
  with pytest.raises(errors.DataError, match='00000-of-00002 is not what was written there'):
    merge_shards(store.place)
  assert not (tmp_path / 'r.jsonl').exists()
  shard.write_text(content)
  assert merge_shards(store.place) == [] and (tmp_path / 'r.jsonl').read_text() == merged


def test_shards_without_a_line_for_each_example_stay_apart(tmp_path):
  for shard_id in range(2):
    place = Place(folder=tmp_path, name='r.bin', shard_id=shard_id, num_shards=2)
    place.shard_folder.mkdir(parents=True)
    store = ShardStore(place, _IDENTITY, _BATCH_SIZE)
    store.begin()
    store.write_chunk(0, 1, 3, 0, lambda path: path.write_bytes(b'binary'))
    store.end_chunks(6)
    store.finish()
  with pytest.raises(errors.ConfigError, match='0 lines for 3 examples'):
    merge_shards(store.place)
  assert (tmp_path / 'r.bin-00001-of-00002').read_bytes() == b'binary'


def test_the_record_can_be_read(tmp_path):
  _work(tmp_path, 7)
  run = json.loads((tmp_path / 'r.jsonl.run/shard-00000-of-00001/run.json').read_text())
  assert run['identity'] == {'version': 1, 'batch_size': _BATCH_SIZE, **_IDENTITY}
  assert run['result']['lines'] == run['num_source_examples'] == 7


def test_differences_are_told_to_people():
  def told(step, path, content, source='a'):
    return place_lib.differences(
        {'checkpoint': {'step': 5, 'path': '/r/checkpoint_5', 'content': 'x'}, 'source': {'content': 'a'}},
        {'checkpoint': {'step': step, 'path': path, 'content': content}, 'source': {'content': source}})

  assert told(5, '/r/checkpoint_5', 'x') == []
  assert told(6, '/r/checkpoint_6', 'y', 'b') == ['checkpoint.step: then 5, now 6']
  assert told(5, '/r/checkpoint_5', 'y') == ["checkpoint.content: then 'x', now 'y'"]
  assert told(6, '/s/checkpoint_6', 'y') == [
      'checkpoint.step: then 5, now 6', "checkpoint.path: then '/r/checkpoint_5', now '/s/checkpoint_6'"]
