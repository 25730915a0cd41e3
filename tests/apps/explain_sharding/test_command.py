"""`explain_sharding`: from gin files to the table, on this machine's devices and on supposed ones."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from t5x_lite.command_line import cli

_ROOT = pathlib.Path(__file__).parents[3]


def _explain(capsys, *argv):
  status = cli.main(['explain_sharding', *argv])
  captured = capsys.readouterr()
  return status, captured.out, captured.err


def test_a_model_and_a_run_are_enough(capsys):
  """Neither data nor vocabulary nor model directory decide anything, so none of them is asked for."""
  status, out, err = _explain(
    capsys, '--gin_file=models/t5_1_1_small.gin', '--gin_file=runs/pretrain.gin'
  )
  assert (status, err) == (0, '')
  assert out.startswith('Mesh   data=8 x model=1: 8 cpu device(s)')
  assert re.search(r'^parameters +\d+ +76,961,152 ', out, re.MULTILINE)


def test_a_vocabulary_of_ids_of_the_files_is_not_built(capsys):
  status, out, err = _explain(
    capsys,
    '--gin_file=models/t5_1_1_small.gin',
    '--gin_file=runs/pretrain.gin',
    '--gin_file=data/synthetic.gin',
  )
  assert status == 0, err
  assert re.search(r'^parameters +\d+ +76,961,152 ', out, re.MULTILINE)


def test_tensor_parallelism_divides_the_memory_per_device(capsys):
  _, out, _ = _explain(
    capsys,
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin_file=partitioning/tensor_parallel.gin',
    '--gin.NUM_PARTITIONS=4',
    '--full',
  )
  assert 'data=2 x model=4' in out
  row = next(
    line for line in out.splitlines() if line.startswith('encoder/layers_1/mlp/wi_0/kernel')
  )
  assert '64 x 128' in row and '64 x 32' in row and 'mlp->model' in row


@pytest.mark.parametrize('ici_mesh_shape', ['(1, 2, 2)', '[1, 2, 2]'])
def test_slices(capsys, ici_mesh_shape):
  status, out, err = _explain(
    capsys,
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin_file=partitioning/tensor_parallel.gin',
    f'--gin.partitioning.PjitPartitioner.ici_mesh_shape={ici_mesh_shape}',
    '--gin.partitioning.PjitPartitioner.dcn_mesh_shape=(2, 1, 1)',
  )
  assert (status, err) == (0, '')
  assert out.startswith('Mesh   replica=2 x data=2 x model=2: 8 cpu device(s)')


@pytest.mark.parametrize(
  'flags, fragments',
  [
    (['--gin.NUM_PARTITIONS=3'], ['got 3']),
    (['--gin.BATCH_SIZE=3'], ['3', 'data']),
  ],
)
def test_rejected(capsys, flags, fragments):
  status, out, err = _explain(
    capsys,
    '--gin_file=recipes/keyword_cloze.gin',
    '--gin_file=partitioning/tensor_parallel.gin',
    *flags,
  )
  assert status == 2 and not out
  for fragment in fragments:
    assert fragment in err


def test_heads_that_do_not_divide(capsys):
  """12 heads on 8 model partitions: only the position tables are replicated."""
  status, out, err = _explain(
    capsys,
    '--gin_file=models/t5_1_1_base.gin',
    '--gin_file=runs/pretrain.gin',
    '--gin_file=partitioning/tensor_parallel.gin',
    '--gin.NUM_PARTITIONS=8',
  )
  assert status == 0 and 'data=1 x model=8' in out
  listed = out.partition('Parameters with a dim that its mesh axes do not divide\n')[2]
  assert listed.splitlines() == [
    f'  {stack}/relpos_bias/rel_embedding (12 x 32): heads 12 by model 8: replicated'
    for stack in ('decoder', 'encoder')
  ]
  assert (
    err.startswith('warning: 2 parameter(s) have a dim')
    and err.endswith(listed)
    and err.count('warning') == 1
  )
  _, out, err = _explain(
    capsys,
    '--gin_file=models/t5_1_1_base.gin',
    '--gin_file=runs/pretrain.gin',
    '--gin_file=partitioning/tensor_parallel.gin',
    '--gin.NUM_PARTITIONS=8',
    '--gin.partitioning.PjitPartitioner.max_replicated_size=383',
  )
  assert (
    not out
    and "decoder/relpos_bias/rel_embedding: dim 0 ('heads') of shape (12, 32) must be a multiple"
    in err
  )


def _explain_on(num_devices, *flags):
  environment = {
    key: value for key, value in os.environ.items() if key not in ('XLA_FLAGS', 'JAX_PLATFORMS')
  }
  return subprocess.run(
    [sys.executable, 'scripts/explain_sharding.py', *flags, f'--num_devices={num_devices}'],
    cwd=_ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_a_width_that_does_not_divide():
  """768 is no multiple of expert 64 x data 8: dense arrays take the second rule, `data`; experts' arrays fit."""
  done = _explain_on(
    2048,
    '--gin_file=models/switch_base.gin',
    '--gin_file=runs/pretrain.gin',
    '--gin_file=partitioning/moe_expert_partitions.gin',
    '--gin.NUM_EXPERT_PARTITIONS=64',
    '--gin.NUM_PARTITIONS=4',
    '--gin.BATCH_SIZE=2048',
    '--gin.rules.head_logical_axis_rules.parameter_partitioning_dims=2',
  )
  assert done.returncode == 0 and done.stdout.startswith('Mesh   data=8 x expert=64 x model=4'), (
    done.stderr
  )
  assert done.stderr.count('warning') == 1 and 'decoder/decoder_norm/scale (768)' in done.stderr
  listed = done.stdout.partition('Parameters with a dim that its mesh axes do not divide\n')[2]
  assert (
    'layers_{0-11}/pre_attention_layer_norm/scale (768): embed 768 by expert*data 512: data\n'
    in listed
  )
  assert '/expert/' not in listed and '/router/' in listed
  (expert,) = re.findall(
    'encoder/layers.*/expert/wi/kernel.*', done.stdout.partition('\nOptimizer state')[0]
  )
  assert '2 x 96 x 768' in expert


def test_supposed_devices():
  done = _explain_on(
    512,
    '--gin_file=models/t5_1_1_tiny.gin',
    '--gin_file=runs/pretrain.gin',
    '--gin.BATCH_SIZE=1024',
  )
  assert done.returncode == 0 and not done.stderr, done.stderr
  assert done.stdout.startswith('Mesh   data=512 x model=1: 512 cpu device(s)')
