"""Facts of a run that its files have."""

import pytest

from t5x_lite.apps.common import run_files
from t5x_lite.storage import files
from t5x_lite.trainer import summaries
from tests.trackers.tracker_cases import GrowingRun


@pytest.fixture
def run(tmp_path):
  return GrowingRun(tmp_path / 'runs/mine')


def _steps(reader, **options):
  return [line.step for line in reader.read(**options)]


def test_a_reader_continues_where_it_ended_and_waits_for_the_end_of_a_line(run):
  reader = run_files.MetricsReader(run.path / 'train/metrics.jsonl')
  assert _steps(reader) == []
  run.line(1)
  run.line(2)
  assert _steps(reader) == [1, 2]
  path = run.path / 'train/metrics.jsonl'
  complete = path.read_text()
  path.write_text(complete + '{"step": 3')
  assert _steps(reader) == []
  path.write_text(complete + '{"step": 3}\n')
  assert _steps(reader) == [3]
  assert reader.lines.num_restarts == 0 and reader.damaged == []


@pytest.mark.parametrize('num_new', [0, 1, 5])
def test_a_file_that_a_resumed_run_has_truncated_is_read_again(run, num_new):
  reader = run_files.MetricsReader(run.path / 'train/metrics.jsonl')
  for step in range(1, 4):
    run.line(step)
  assert _steps(reader) == [1, 2, 3]
  summaries.discard_after(run.path, 2)
  for step in range(3, 3 + num_new):
    run.line(step)
  assert _steps(reader) == [1, 2, *range(3, 3 + num_new)]
  assert reader.lines.num_restarts == 1


def test_lines_of_an_object_store_are_read_part_by_part(s3_store, monkeypatch):
  monkeypatch.setattr(files, '_PART_BYTES', 100)
  writer = summaries.SummaryWriter(f'{s3_store.root}/train')
  reader = run_files.MetricsReader(f'{s3_store.root}/train/metrics.jsonl')
  for step in range(1, 12):
    writer.write_scalars(step, {'loss': 1.0})
    writer.flush()
    files.flush(s3_store.root)
    if step in (1, 5, 11):
      first = {1: 1, 5: 2, 11: 6}[step]
      assert _steps(reader) == list(range(first, step + 1))
  writer.close()
  assert len(files.parts(f'{s3_store.root}/train/metrics.jsonl')) > 3
  assert run_files.last_line(files.path(f'{s3_store.root}/train/metrics.jsonl')).step == 11
  summaries.discard_after(s3_store.root, 7)
  assert _steps(reader) == list(range(1, 8))


def test_the_log_names_a_limited_number_of_damaged_lines(tmp_path, caplog):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('no JSON\n' * 1000)
  reader = run_files.MetricsReader(path)
  assert list(reader.read()) == []
  reader.lines.rewind()
  assert list(reader.read()) == []
  assert len(reader.damaged) == 1000
  assert len(caplog.messages) == 20
  assert caplog.messages[-1].endswith('Further damaged lines of this file are not shown.')


def test_lines_have_exact_numbers_and_damaged_and_missing_lines(run):
  run.line(1, loss=0.1, norm='Infinity', load=[[1.0], [2.0]], signature='text')
  path = run.path / 'train/metrics.jsonl'
  path.write_text(path.read_text() + '{"loss": 1}\n{"missing": {"after_step": 1}}\n[1]\n')
  reader = run_files.MetricsReader(path)
  (line,) = reader.read()
  assert line.numbers == {'loss': 0.1, 'norm': float('inf')}
  assert line.arrays == {'load': [[1.0], [2.0]]}
  assert line.texts == {'signature': 'text'}
  assert reader.damaged == [f'{path}:2', f'{path}:4']
  assert reader.missing == [{'after_step': 1}]


def test_the_status_is_that_of_the_newest_start(run):
  reader = run_files.StatusReader(run.path)
  assert reader.read().status == 'unknown'
  run.start()
  first = reader.read()
  assert (first.status, first.num_starts, first.has_ended) == ('running', 1, False)
  run.stop('error')
  assert reader.read().status == 'failed'
  run.start()
  found = reader.read()
  assert (found.status, found.cause, found.num_starts) == ('running', '', 2)
  assert found.identity == first.identity
  run.stop('signal')
  assert reader.read().status == 'interrupted'
  assert run_files.StatusReader(run.path).read() == reader.read()


@pytest.mark.parametrize(
  'value, expected',
  [
    ("'/home/me/data/train.csv'", "'train.csv'"),
    ("'~/data/train.csv'", "'train.csv'"),
    ("'../data/'", "'data'"),
    ("'gs://bucket/data/a'", "'a'"),
    ("{'a': ['/x/y', 'b'], '/p/q': 1}", "{'a': ['y', 'b'], 'q': 1}"),
    ("'hf://owner/model'", "'hf://owner/model'"),
    ("'encoder/.*/kernel'", "'encoder/.*/kernel'"),
    ('@data.FileTask()', '@data.FileTask()'),
    ('%BATCH_SIZE', '%BATCH_SIZE'),
    ("'https://me:pass@host/x?token=abc'", "'x?token=***'"),
    ("{'api_key': 'abc'}", "{'api_key': '***'}"),
  ],
)
def test_the_configuration_has_no_paths_and_secrets(run, value, expected):
  (run.path / 'config.gin').write_text(f'from t5x_lite import data\ndata.Thing.value = {value}\n')
  assert run_files.configuration(run.path) == {'data.Thing.value': expected}


def test_options_with_names_of_paths_and_secrets(run):
  text = "MODEL_DIR = 'runs/a'\nTASK = 'wmt/de'\nPASSWORD = 'x y'\nOUT = '{run}/eval/b'\n"
  (run.path / 'config.gin').write_text(text.replace('{run}', str(run.path)))
  assert run_files.configuration(run.path) == {
    'MODEL_DIR': "'a'",
    'TASK': "'wmt/de'",
    'PASSWORD': '***',
    'OUT': "'eval/b'",
  }


def test_an_invalid_configuration_is_unknown(run, caplog):
  (run.path / 'config.gin').write_text('a = (')
  assert run_files.configuration(run.path) == {}
  assert 'is unknown' in caplog.text


def test_facts_name_neither_the_machine_nor_its_paths(run):
  assert run_files.facts(run.path) == {}
  run.start()
  (run.path / 'model-info.txt').write_text(
    'Totals\nparameters           47   189,440     740 KiB\n'
  )
  run.checkpoint(
    5, random_seed=3, data={'mixture_or_task_name': '/home/me/a.csv', 'lengths': {'inputs': 8}}
  )
  folder = run.path / 'checkpoint_5/dataset/process_0-of-1'
  folder.mkdir(parents=True)
  (folder / 'data_state.json.bin').write_text('{"identity": {"content": {"a": [500, "daa5"]}}}')
  assert run_files.facts(run.path) == {
    'num_parameters': 189440,
    'hardware': 'cpu-1',
    'num_processes': 1,
    'versions/t5x_lite': '0',
    'data/mixture_or_task_name': 'a.csv',
    'data/lengths/inputs': 8,
    'data/content/a': '[500, "daa5"]',
    'random_seed': 3,
  }
