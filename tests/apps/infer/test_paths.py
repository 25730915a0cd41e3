"""Places of results: names, settings, records."""

import json

import pytest

from t5x_lite import errors
from t5x_lite.apps.infer import paths as paths_lib
from t5x_lite.apps.infer.merge import merge_shards
from tests.apps.infer import store_cases as cases


def test_the_name_is_that_of_t5x_unless_one_is_given(tmp_path):
  cases.work(tmp_path, 5, has_plain_name=False)
  assert (tmp_path / 'r.jsonl-00000-of-00001').read_text() == ''.join(cases.make_lines(5))
  assert not (tmp_path / 'r.jsonl').exists()


@pytest.mark.parametrize('stop_after', [1, None])
def test_other_settings_are_rejected_by_name(tmp_path, stop_after):
  cases.work(tmp_path, 7, stop_after=stop_after)
  before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  with pytest.raises(errors.ConfigError) as caught:
    cases.work(tmp_path, 7, identity={'mode': 'score', 'checkpoint': {'step': 6}})
  for text in (
    "mode: was 'predict', now 'score'",
    'checkpoint.step: was 5, now 6',
    'r.jsonl.run',
    'INFER_OUTPUT_DIR',
  ):
    assert text in str(caught.value)
  assert before == {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}


def test_a_shard_with_other_settings_than_other_shards_is_rejected(tmp_path):
  cases.work(tmp_path, 7, shard_id=0, num_shards=2)
  with pytest.raises(errors.ConfigError, match="mode: was 'predict', now 'score'"):
    cases.work(tmp_path, 7, shard_id=1, num_shards=2, identity={**cases.IDENTITY, 'mode': 'score'})


@pytest.mark.parametrize(
  'num_shards, name', [(1, 'r.jsonl'), (2, 'r.jsonl-00000-of-00002'), (2, 'r.jsonl')]
)
def test_a_file_of_another_program_is_never_replaced(tmp_path, num_shards, name):
  (tmp_path / name).write_text('mine')
  with pytest.raises(
    errors.ConfigError, match=f'{name} exists and was not written by this command'
  ):
    cases.work(tmp_path, 7, num_shards=num_shards)
  assert (tmp_path / name).read_text() == 'mine'


@pytest.mark.parametrize(
  'num_shards, name', [(1, 'r.jsonl'), (2, 'r.jsonl-00001-of-00002'), (2, 'r.jsonl')]
)
def test_a_file_written_by_another_program_in_the_meantime_is_kept(tmp_path, num_shards, name):
  for shard_id in range(num_shards - 1):
    cases.work(tmp_path, 7, num_shards=num_shards, shard_id=shard_id)
  store = cases.work(tmp_path, 7, num_shards=num_shards, shard_id=num_shards - 1, stop_after=3)
  (tmp_path / name).write_text('mine')
  store.end_chunks(7)
  with pytest.raises(errors.ConfigError, match=f'{name} was written by another program'):
    store.finish()
    merge_shards(store.paths)
  assert (tmp_path / name).read_text() == 'mine'
  (tmp_path / name).unlink()
  cases.work(tmp_path, 7, num_shards=num_shards, shard_id=num_shards - 1)
  assert (tmp_path / 'r.jsonl').read_text() == ''.join(cases.make_lines(7))


def test_another_number_of_shards_has_the_same_settings(tmp_path):
  cases.work(tmp_path, 7, shard_id=0, num_shards=3)
  with pytest.raises(errors.ConfigError, match="00000-of-00003 has other settings .*now 'other'"):
    cases.work(tmp_path, 7, shard_id=0, num_shards=2, identity={**cases.IDENTITY, 'mode': 'other'})
  cases.work(tmp_path, 7, shard_id=1, num_shards=2)


def test_the_record_can_be_read(tmp_path):
  cases.work(tmp_path, 7)
  run = json.loads((tmp_path / 'r.jsonl.run/shard-00000-of-00001/run.json').read_text())
  assert run['identity'] == {'version': 1, 'batch_size': cases.BATCH_SIZE, **cases.IDENTITY}
  assert run['result']['lines'] == run['num_source_examples'] == 7


def test_differences_are_readable():
  def told(step, path, content, source='a'):
    return paths_lib.differences(
      {
        'checkpoint': {'step': 5, 'path': '/r/checkpoint_5', 'content': 'x'},
        'source': {'content': 'a'},
      },
      {
        'checkpoint': {'step': step, 'path': path, 'content': content},
        'source': {'content': source},
      },
    )

  assert told(5, '/r/checkpoint_5', 'x') == []
  assert told(6, '/r/checkpoint_6', 'y', 'b') == ['checkpoint.step: was 5, now 6']
  assert told(5, '/r/checkpoint_5', 'y') == ["checkpoint.content: was 'x', now 'y'"]
  assert told(6, '/s/checkpoint_6', 'y') == [
    'checkpoint.step: was 5, now 6',
    "checkpoint.path: was '/r/checkpoint_5', now '/s/checkpoint_6'",
  ]
