"""`explain_sharding`: from gin files to the table, on this machine's devices and on supposed ones."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from t5x_lite import cli

_ROOT = pathlib.Path(__file__).parents[3]


def _explain(capsys, *argv):
  status = cli.main(['explain_sharding', *argv])
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def test_a_model_and_a_run_are_enough(capsys):
  """Neither data nor vocabulary nor model directory decide anything, so none of them is asked for."""
  status, out, err = _explain(capsys, '--gin_file=models/t5_1_1_small.gin', '--gin_file=runs/pretrain.gin')
  assert (status, err) == (0, '')
  assert out.startswith('Mesh   data=8 x model=1: 8 cpu device(s)')
  assert re.search(r'^parameters +\d+ +76,961,152 ', out, re.MULTILINE)


def test_tensor_parallelism_divides_the_memory_per_device(capsys):
  _, out, _ = _explain(capsys, '--gin_file=recipes/keyword_cloze.gin', '--gin_file=partitioning/tensor_parallel.gin',
                       '--gin.NUM_PARTITIONS=4', '--full')
  assert 'data=2 x model=4' in out
  row = next(line for line in out.splitlines() if line.startswith('encoder/layers_1/mlp/wi_0/kernel'))
  assert '64 x 128' in row and '64 x 32' in row and 'mlp->model' in row


@pytest.mark.parametrize('ici_mesh_shape', ['(1, 2, 2)', '[1, 2, 2]'])
def test_slices(capsys, ici_mesh_shape):
  status, out, err = _explain(
      capsys, '--gin_file=recipes/keyword_cloze.gin', '--gin_file=partitioning/tensor_parallel.gin',
      f'--gin.partitioning.PjitPartitioner.ici_mesh_shape={ici_mesh_shape}',
      '--gin.partitioning.PjitPartitioner.dcn_mesh_shape=(2, 1, 1)')
  assert (status, err) == (0, '')
  assert out.startswith('Mesh   replica=2 x data=2 x model=2: 8 cpu device(s)')


@pytest.mark.parametrize('flags, fragments', [
    (['--gin.NUM_PARTITIONS=3'], ['got 3']),
    (['--gin.NUM_PARTITIONS=8'], ['heads', '4']),
    (['--gin.BATCH_SIZE=3'], ['3', 'data']),
])
def test_rejected(capsys, flags, fragments):
  status, out, err = _explain(capsys, '--gin_file=recipes/keyword_cloze.gin',
                              '--gin_file=partitioning/tensor_parallel.gin', *flags)
  assert status == 2 and not out
  for fragment in fragments:
    assert fragment in err


def test_supposed_devices():
  environment = {key: value for key, value in os.environ.items() if key not in ('XLA_FLAGS', 'JAX_PLATFORMS')}
  done = subprocess.run(
      [sys.executable, 'scripts/explain_sharding.py', '--gin_file=models/t5_1_1_tiny.gin',
       '--gin_file=runs/pretrain.gin', '--num_devices=512', '--gin.BATCH_SIZE=1024'],
      cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0 and not done.stderr, done.stderr
  assert done.stdout.startswith('Mesh   data=512 x model=1: 512 cpu device(s)')
