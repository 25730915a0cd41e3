"""Two processes train on own files: their batches together are those of one process, and so is the training."""

import gzip
import json
import os
import pathlib

import gin
import numpy as np
import pytest

from t5x_lite import data
from t5x_lite.command_line import cli
from tests import processes
from tests.data import grain_cases as cases

_ROWS = [{'question': f'what is {i}?', 'answer': f'a{i}' * 2} for i in range(43)]
_BATCHES = 9  # more than an epoch of the training data
# Both convert the file, on one disk or each on its own; then they train.
_PROGRAM = """
    import os, sys
    from t5x_lite import runtime
    process = runtime.join(runtime.ClusterConfig()).process
    folder, path, homes, trains = sys.argv[1:]
    os.environ['HOME'] = homes.replace('PROCESS', str(process))
    import numpy as np
    from t5x_lite.command_line import cli
    from tests.data import test_two_processes as cases

    found = cases.batches(path, shard=process, num_shards=2)
    np.savez(f'{folder}/batches-{process}.npz', **found)
    if trains == 'True':
      assert cli.main(cases.command(path, f'{folder}/run')) == 0
"""


def _task(path):
  options = {'inputs': 'question', 'targets': 'answer', 'validation_fraction': 0.2}
  return data.FileTask(vocabulary=cases.VOCABULARY, train_file=path, **options)


def batches(path, shard=0, num_shards=1):
  """Returns the rows of a process in the first batches by feature."""
  cfg = cases.make_cfg(
    _task(path), split='train', batch_size=8, source='builtin', shuffle=True, pack=True
  )
  taken = cases.take(cases.open(cfg, shard, num_shards), _BATCHES)
  return {name: np.stack([batch[name] for batch in taken]) for name in taken[0]}


def command(path, model_dir):
  """Returns the command line of a training on a file."""
  return [
    'train',
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin.network.T5Config.num_encoder_layers=1',
    '--gin.network.T5Config.num_decoder_layers=1',
    '--gin.network.T5Config.emb_dim=8',
    '--gin.network.T5Config.mlp_dim=8',
    '--gin.network.T5Config.head_dim=4',
    '--gin.BATCH_SIZE=8',
    '--gin.TRAIN_STEPS=4',
    '--gin.EVAL_PERIOD=2',
    '--gin.TASK_FEATURE_LENGTHS=None',
    f'--gin.MODEL_DIR={model_dir}',
    f'--train_file={path}',
    '--validation_fraction=0.2',
    '--inputs=question',
    '--targets=answer',
    '--metrics=exact_match',
  ]


def _write(folder, kind):
  path = folder / f'train.{kind}'
  if kind == 'parquet':
    pa = pytest.importorskip('pyarrow')
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(_ROWS), path, row_group_size=9)
    return str(path)
  lines = ['question,answer', *(f'"{row["question"]}",{row["answer"]}' for row in _ROWS)]
  content = ('\n'.join(lines) + '\n').encode()
  path.write_bytes(gzip.compress(content) if kind.endswith('.gz') else content)
  return str(path)


def _metrics(model_dir):
  """Returns the rows of all files of metrics of a run, without times."""
  found = {}
  for path in sorted(pathlib.Path(model_dir).rglob('metrics.jsonl')):
    rows = map(json.loads, path.read_text(encoding='utf-8').splitlines())
    found[str(path.relative_to(model_dir))] = [
      {name: value for name, value in row.items() if not name.startswith(('timing/', 'wall'))}
      for row in rows
    ]
  return found


@pytest.mark.parametrize(
  'kind, homes, trains',
  [
    ('csv', 'home', True),
    ('csv.gz', 'home', False),
    ('csv.gz', 'PROCESS', False),
    ('parquet', 'home', False),
    ('parquet', 'PROCESS', True),
  ],
)
def test_two_processes_equal_one(tmp_path, monkeypatch, kind, homes, trains):
  monkeypatch.setenv('HOME', str(tmp_path / 'one'))
  path = _write(tmp_path, kind)
  expected = batches(path)
  processes.run(_PROGRAM, tmp_path, path, tmp_path / homes, trains, num_devices=1)
  for name, rows in expected.items():
    parts = [np.load(tmp_path / f'batches-{process}.npz')[name] for process in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), rows)
  if kind != 'csv':
    caches = {tmp_path / homes.replace('PROCESS', str(process)) for process in range(2)}
    for cache in caches:
      names = os.listdir(cache / '.cache' / 't5x_lite' / 'data')
      assert not [name for name in names if '.tmp-' in name]
      assert sum(name.endswith(('.csv', '.arrow')) for name in names) == 1
  if trains:
    assert cli.main(command(path, tmp_path / 'one')) == 0
    gin.clear_config()
    _assert_same_metrics(tmp_path / 'one', tmp_path / 'run')


def _assert_same_metrics(one, two):
  one, two = _metrics(one), _metrics(two)
  assert one.keys() == two.keys() and len(one) >= 2
  for name, rows in one.items():
    for row, other in zip(rows, two[name], strict=True):
      assert row.keys() == other.keys()
      for key, value in row.items():
        assert other[key] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), (name, key)
