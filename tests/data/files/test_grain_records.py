"""Array records: writing, reading, damage."""

import importlib
import json
import pathlib
import platform
import runpy
import sys

import msgpack
import numpy as np
import pytest

from t5x_lite.command_line import cli
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.storage import files

if (platform.system(), platform.machine()) != ('Linux', 'x86_64'):
  pytest.importorskip('grain')  # Not available for all machines.

from t5x_lite.data.files import grain_records  # noqa: E402
from tests.data import grain_cases as cases  # noqa: E402


def test_array_records_of_json_and_msgpack(tmp_path):
  path = tmp_path / 'new' / 'a.array_record'
  written = [
    {'inputs': 'é', 'targets': [5, 6]},
    msgpack.packb({'inputs': [7, 8, 1], 'targets': 'b'}),
    msgpack.packb({'inputs': b'c', 'targets': ''}),
    b'{"inputs": "d", "targets": "d"}',
  ]
  assert grain_records.write_array_records(str(path), written) == 4
  assert [p.name for p in path.parent.iterdir()] == ['a.array_record']
  batch = next(cases.open(cases.make_cfg(cases.make_task(str(path), 'array_record'), batch_size=4)))
  shown = [
    (cases.VOCABULARY.decode(i), [int(x) for x in t if x])
    for i, t in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True)
  ]
  assert shown == [
    ('é', [5, 6, 1]),
    (cases.VOCABULARY.decode([7, 8]), [101, 1]),
    ('c', [1]),
    ('d', [103, 1]),
  ]
  # An end that is there already is not put twice.
  np.testing.assert_array_equal(batch['encoder_input_tokens'][1, :4], [7, 8, 1, 0])
  with pytest.raises(DataError, match='must be a new file'):
    grain_records.write_array_records(str(path), [])
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='file'):
    grain_records.write_array_records(str(tmp_path / 'file' / 'a'), [])


def test_bad_array_records(tmp_path):
  path = tmp_path / 'a.array_record'
  path.write_text('{"inputs": "a", "targets": "b"}\n')
  with pytest.raises(DataError, match="not a complete array record file: .*format = 'jsonl'"):
    cases.open(cases.make_cfg(cases.make_task(str(path), 'array_record')))
  for number, content in enumerate([b'hello', b'\x93\x01\x02\x03', b'\xc1']):
    broken = str(tmp_path / f'{number}.array_record')
    grain_records.write_array_records(broken, [{'inputs': 'a', 'targets': 'b'}] * 4 + [content])
    iterator = cases.open(cases.make_cfg(cases.make_task(broken, 'array_record'), batch_size=5))
    with pytest.raises(DataError, match=f'{number}.array_record, record 4 .*msgpack'):
      next(iterator)
  path.unlink()
  rng = np.random.default_rng(0)
  grain_records.write_array_records(
    str(path), [{'inputs': rng.bytes(30).hex(), 'targets': 'b'} for _ in range(2000)]
  )
  content = bytearray(path.read_bytes())
  content[len(content) // 4] ^= 1
  path.write_bytes(content)
  iterator = cases.open(cases.make_cfg(cases.make_task(str(path), 'array_record'), batch_size=64))
  with pytest.raises(
    DataError, match=r'a.array_record, record \d+: cannot be read: .*hash mismatch'
  ):
    cases.take(iterator, 2000 // 64 + 1)


def test_without_grain_the_message_names_the_extra(cloze, monkeypatch):
  for name in ('t5x_lite.data.files.grain_records', 't5x_lite.data.sources.grain_source'):
    package, _, module = name.rpartition('.')
    monkeypatch.delattr(importlib.import_module(package), module, raising=False)
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.setitem(sys.modules, 'grain', None)
  with pytest.raises(ConfigError, match=r"pip install 'grain>=.*--gin.DATA_SOURCE=builtin"):
    cases.open(cases.make_cfg(cloze['jsonl']))
  with pytest.raises(ConfigError, match=r"pip install 'grain>="):
    cases.open(cases.make_cfg(cloze['array_record'], source='builtin'))
  assert next(cases.open(cases.make_cfg(cloze['jsonl'], source='builtin')))


def test_script_converts_json_lines(tmp_path, monkeypatch, capsys):
  examples = [{'inputs': f'é {i}', 'targets': str(i)} for i in range(20)]
  path = cases.write(tmp_path / 'a.jsonl', examples)
  converted = str(tmp_path / 'a.array_record')
  script = str(pathlib.Path(__file__).parents[3] / 'scripts' / 'jsonl_to_array_record.py')
  monkeypatch.setattr(sys, 'argv', [script, path, converted])
  with pytest.raises(SystemExit) as stop:
    runpy.run_path(script, run_name='__main__')
  assert not stop.value.code and '20 records' in capsys.readouterr().out
  found = grain_records.ArrayRecords([converted])
  assert [json.loads(content) for content in found.read(range(20))] == examples
  with pytest.raises(SystemExit) as stop:
    runpy.run_path(script, run_name='__main__')
  assert stop.value.code == 2 and 'must be a new file' in capsys.readouterr().err


def test_array_records_in_stores(store, capsys):
  files.write(f'{store.root}/d/a.jsonl', '{"inputs": "a", "targets": "b"}\n' * 70)
  argv = ['jsonl_to_array_record', f'{store.root}/d/a.jsonl', f'{store.root}/d/a.array_record']
  assert cli.main(argv) == 0 and 'Wrote 70 records' in capsys.readouterr().out
  assert store.names() == ['d/a.array_record', 'd/a.jsonl']
  assert cli.main(argv) == 2 and 'must be a new file' in capsys.readouterr().err
  tasks = [
    cases.make_task(f'{store.root}/d/a.{suffix}', format)
    for suffix, format in (('jsonl', 'jsonl'), ('array_record', 'array_record'))
  ]
  batches = [
    next(cases.open(cases.make_cfg(task, num_workers=workers)))
    for task, workers in zip(tasks, (0, 1), strict=False)
  ]
  for name in batches[0]:
    np.testing.assert_array_equal(batches[0][name], batches[1][name])
  with pytest.raises(
    DataError, match=f"'{store.root}/d/a.jsonl' is not a complete array record file"
  ):
    grain_records.ArrayRecords([f'{store.root}/d/a.jsonl'])
