"""Shards become one file, in the order of the source."""

import dataclasses
import json

import pytest

from t5x_lite import errors
from t5x_lite.apps.infer.merge import merge_chunks_to_file
from t5x_lite.apps.infer.merge import merge_chunks_to_table
from t5x_lite.apps.infer.merge import merge_shards
from t5x_lite.apps.infer.merge import merged_totals
from t5x_lite.apps.infer.paths import ResultPaths
from t5x_lite.apps.infer.store import ShardStore
from t5x_lite.storage import files
from tests.apps.infer import store_cases as cases


def _only_results(folder, names):
  assert sorted(path.name for path in folder.iterdir()) == sorted([*names, 'r.jsonl.run'])
  for path in (folder / 'r.jsonl.run').rglob('*'):
    assert path.is_dir() or path.name in ('run.json', 'merged.json', 'merge.lock'), path


def test_the_last_shard_dies_at_any_step(tmp_path):
  num_steps, total = 0, 11
  while True:
    folder = tmp_path / str(num_steps)
    cases.work(folder, total, shard_id=0, num_shards=2)
    assert not (folder / 'r.jsonl').exists()
    try:
      cases.work(folder, total, shard_id=1, num_shards=2, disk=cases.DyingDisk(num_steps))
      break
    except cases.Killed:
      pass
    cases.work(folder, total, shard_id=1, num_shards=2)
    assert (folder / 'r.jsonl').read_text() == ''.join(cases.make_lines(total)), num_steps
    _only_results(folder, ['r.jsonl', 'r.jsonl-00000-of-00002', 'r.jsonl-00001-of-00002'])
    num_steps += 1
  assert num_steps > 40


@pytest.mark.parametrize('total, num_shards', [(14, 3), (3, 4), (12, 2)])
def test_shards_in_any_order_make_one_file_in_the_order_of_the_source(tmp_path, total, num_shards):
  for shard_id in reversed(range(num_shards)):
    store = cases.work(tmp_path, total, shard_id=shard_id, num_shards=num_shards)
    assert merge_shards(store.paths) == list(range(shard_id))
  # One for each of the chunks, which have at most two batches.
  num_chunks = sum(-(-len(cases.batches_of(total, i, num_shards)) // 2) for i in range(num_shards))
  assert merged_totals(store.paths) == {
    'num_examples': total,
    'num_cut': 0,
    'num_unended': num_chunks,
  }
  assert (tmp_path / 'r.jsonl').read_text() == ''.join(cases.make_lines(total))


def test_shards_that_began_at_once_with_other_settings_are_not_merged(tmp_path):
  cases.work(tmp_path, 7, shard_id=0, num_shards=2)
  paths = ResultPaths(
    folder=tmp_path, name='r.jsonl', shard_id=1, num_shards=2, has_plain_name=True
  )
  elsewhere = dataclasses.replace(paths, folder=tmp_path / 'empty')
  stores = [
    ShardStore(elsewhere, {**cases.IDENTITY, 'mode': 'other'}, cases.BATCH_SIZE) for _ in range(2)
  ]
  stores[0].paths = paths  # as if shard 0 had begun after this one was opened
  with pytest.raises(errors.ConfigError, match="mode: was .* now 'other'"):
    stores[0].begin()
  # As if both had begun at the same time: neither has seen the other.
  elsewhere.shard_folder.mkdir(parents=True)
  stores[1].begin()
  paths.shard_folder.parent.mkdir(parents=True, exist_ok=True)
  elsewhere.shard_folder.rename(paths.shard_folder)
  stores[1].paths = paths
  stores[1].write_chunk(0, 1, 3, 0, 0, lambda path: path.write_text('x\n' * 3))
  stores[1].end_chunks(7)
  stores[1].finish()
  with pytest.raises(errors.ConfigError, match='has other settings than .*00000-of-00002'):
    merge_shards(paths)
  assert not (tmp_path / 'r.jsonl').exists()


def test_a_shard_changed_to_other_results_of_the_same_size_is_not_merged(tmp_path):
  cases.work(tmp_path, 7, shard_id=0, num_shards=2)
  store = cases.work(tmp_path, 7, shard_id=1, num_shards=2)
  merged = (tmp_path / 'r.jsonl').read_text()
  (tmp_path / 'r.jsonl').unlink()
  shard = tmp_path / 'r.jsonl-00000-of-00002'
  content = shard.read_text()
  shard.write_text(content[:-2] + ('0' if content[-2] != '0' else '1') + content[-1:])
  with pytest.raises(errors.DataError, match='00000-of-00002 was modified'):
    merge_shards(store.paths)
  assert not (tmp_path / 'r.jsonl').exists()
  shard.write_text(content)
  assert merge_shards(store.paths) == [] and (tmp_path / 'r.jsonl').read_text() == merged


def test_shards_without_a_line_for_each_example_stay_apart(tmp_path):
  for shard_id in range(2):
    paths = ResultPaths(folder=tmp_path, name='r.bin', shard_id=shard_id, num_shards=2)
    paths.shard_folder.mkdir(parents=True)
    store = ShardStore(paths, cases.IDENTITY, cases.BATCH_SIZE)
    store.begin()
    store.write_chunk(0, 1, 3, 0, 0, lambda path: path.write_bytes(b'binary'))
    store.end_chunks(6)
    store.finish()
  with pytest.raises(errors.ConfigError, match='0 lines for 3 examples'):
    merge_shards(store.paths)
  assert (tmp_path / 'r.bin-00001-of-00002').read_bytes() == b'binary'


def test_chunks_are_concatenated_in_order_and_all_of_them(tmp_path):
  for number in range(11):
    (tmp_path / f'r[1]-chunk{number:05}').write_text(f'{number}\n')
  merge_chunks_to_file(str(tmp_path), 'r[1]', str(tmp_path), None)
  assert (tmp_path / 'r[1]').read_text() == ''.join(f'{number}\n' for number in range(11))
  (tmp_path / 'r[1]-chunk00004').unlink()
  with pytest.raises(errors.DataError, match='chunk00000'):
    merge_chunks_to_file(str(tmp_path), 'r[1]', str(tmp_path), None)


def test_a_table_is_complete_or_absent(tmp_path):
  line = '{"id": 1, "inputs": {"inputs_pretokenized": "x, y"}, "prediction": "a"}\n'
  (tmp_path / 'r.csv-chunk00000').write_text(line)
  (tmp_path / 'r.csv-chunk00001').write_text('{"prediction": "a"}\n')  # invalid, ends the function
  with pytest.raises(KeyError):
    merge_chunks_to_table(str(tmp_path), 'r.csv', str(tmp_path), None)
  assert not (tmp_path / 'r.csv').exists()
  (tmp_path / 'r.csv-chunk00001').write_text(line)
  merge_chunks_to_table(str(tmp_path), 'r.csv', str(tmp_path), None)
  rows = '1,a,"x, y"\n'
  assert (tmp_path / 'r.csv').read_text() == f'id,prediction,inputs\n{rows}{rows}'


def test_shards_in_a_store(store):
  folder = files.path(store.root) / 'out'
  cases.work(folder, 11, shard_id=0, num_shards=2)
  with pytest.raises(cases.Killed):
    cases.work(folder, 11, shard_id=1, num_shards=2, disk=cases.DyingDisk(14))
  cases.work(folder, 11, shard_id=1, num_shards=2)
  cases.work(folder, 11, shard_id=0, num_shards=2)
  assert (folder / 'r.jsonl').read_text() == ''.join(cases.make_lines(11))
  assert sorted(path.name for path in folder.iterdir()) == [
    'r.jsonl',
    'r.jsonl-00000-of-00002',
    'r.jsonl-00001-of-00002',
    'r.jsonl.run',
  ]
  files.write(folder / 'r.jsonl', 'of another program')
  with pytest.raises(errors.ConfigError, match='was not written by this command'):
    cases.work(folder, 11, shard_id=0, num_shards=2)


def test_a_table_has_all_fields_of_a_record_and_of_its_result(tmp_path):
  lines = [
    {'id': 1, 'inputs': {'inputs_pretokenized': 'x', 'targets_pretokenized': 'y'}, 'score': 0.5},
    {'targets': 'raw', 'inputs': {'inputs_pretokenized': 'z'}, 'score': 1.0},
  ]
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (tmp_path / 'r.csv-chunk00000').write_text(text)
  merge_chunks_to_table(str(tmp_path), 'r.csv', str(tmp_path), None)
  assert (tmp_path / 'r.csv').read_text().splitlines() == [
    'id,score,inputs,targets_pretokenized,targets',
    '1,0.5,x,y,',
    ',1.0,z,,raw',
  ]


def test_a_field_keeps_its_column_next_to_the_scores_of_labels(tmp_path):
  line = {
    'scores.a,b': 'own',
    'inputs': {'inputs_pretokenized': 'x'},
    'prediction': 'no',
    'aux': {'scores': {'a,b': -1.5, 'no': -0.5}},
  }
  (tmp_path / 'r.csv-chunk00000').write_text(json.dumps(line) + '\n')
  merge_chunks_to_table(str(tmp_path), 'r.csv', str(tmp_path), None)
  assert (tmp_path / 'r.csv').read_text().splitlines() == [
    '"scores.a,b",prediction,"aux.scores.a,b",scores.no,inputs',
    'own,no,-1.5,-0.5,x',
  ]
