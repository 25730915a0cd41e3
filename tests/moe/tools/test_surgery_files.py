"""Surgery on checkpoints: atomic, complete, the command; other numbers of partitions."""

import argparse
import json
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from moe.commands.surgery import COMMAND
from moe.partitioner import MoePjitPartitioner
from moe.tools import surgery
from moe.tools import surgery_files
from t5x_lite import checkpoints
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.apps.common.flags import make_invocation
from t5x_lite.checkpoints.folders import disk
from t5x_lite.errors import CheckpointError, ConfigError
from tests import stores
from tests.moe import upcycling_cases as up
from tests.networks import network_cases as cases

_LAYER = 'decoder/layers_0/mlp'
_KERNEL = f'target/{_LAYER}/expert/wi_0/kernel'


def _network(**options):
  return up.sparse_network(
    'decoder_only', num_layers=1, every=1, mlp_activations=('gelu', 'linear'), **options
  )


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  """A checkpoint of a run with a recorded load."""
  run = tmp_path_factory.mktemp('run')
  state = up.state_of(_network(), optimizers.adamw())
  path = up.save(state, run, data_state={'position': b'12'}, metadata={'param_layout': 't5'})
  (run / 'train').mkdir()
  lines = [
    {'step': step, 'wall_time': 0.0, 'loss': 1.0, 'experts/decoder/layers_0/load': load}
    for step, load in ((1, [0.1, 0.2, 0.3, 0.4]), (2, [0.1, 0.4, 0.1, 0.4]))
  ]
  (run / 'train' / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return path, up.flat(state)


def _run(*flags):
  parser = argparse.ArgumentParser(exit_on_error=False)
  COMMAND.add_arguments(parser)
  values = vars(parser.parse_args(list(map(str, flags))))
  return COMMAND.run(make_invocation(values, command='surgery'))


def test_a_checkpoint_is_rewritten(source, tmp_path, capsys):
  path, old = source
  assert _run('permute', path, tmp_path / 'new', '--permutation=3,1,0,2') == 0
  assert 'decoder/layers_0/mlp: 4 -> 4 experts' in capsys.readouterr().out
  new = str(tmp_path / 'new' / 'checkpoint_7')
  checkpoints.verify_checkpoint(new)
  flat = tree_utils.flatten_dict(checkpoints.load(new))
  for name, value in old.items():
    axis = -1 if 'router' in name else 0
    wanted = np.take(value, [3, 1, 0, 2], axis) if 'expert/' in name or 'router' in name else value
    np.testing.assert_array_equal(flat[name], wanted, err_msg=name)
  restored = checkpoints.restore_checkpoint(
    new, up.state_shapes(_network(), optimizers.adamw()).state_dict()
  )
  assert restored.step == 7 and restored.data_state == {'position': b'12'}
  assert restored.metadata['param_layout'] == 't5'
  assert restored.metadata['surgery'] == [
    {'of': path, 'what': 'permute --permutation=[3, 1, 0, 2]'}
  ]
  assert surgery_files.find_checkpoint(str(tmp_path / 'new')) == new


@stores.mostly('gcs')
def test_a_checkpoint_in_a_store_is_rewritten(source, store):
  path, old = source
  assert _run('permute', path, f'{store.root}/new', '--permutation=3,1,0,2') == 0
  assert _run('permute', f'{store.root}/new', f'{store.root}/back', '--permutation=2,1,3,0') == 0
  flat = tree_utils.flatten_dict(checkpoints.load(f'{store.root}/back/checkpoint_7'))
  for name, value in old.items():
    np.testing.assert_array_equal(flat[name], value, err_msg=name)
  with pytest.raises(CheckpointError, match='exists'):
    _run('permute', path, f'{store.root}/new', '--permutation=3,1,0,2')


def test_parameters_keep_their_dtype(tmp_path):
  state = {
    'target': {'mlp': {'expert': {'wi': {'kernel': np.ones((2, 4, 8), ml_dtypes.bfloat16)}}}},
    'state': {'step': np.int32(3)},
  }
  with checkpoints.CheckpointManager(
    tmp_path / 'a', save_cfg=checkpoints.SaveCheckpointConfig(dtype='bfloat16')
  ) as manager:
    manager.save(3, state)
  written = surgery_files.rewrite(
    str(tmp_path / 'a' / 'checkpoint_3'),
    str(tmp_path / 'b'),
    lambda s: surgery.split(s, 2),
    'split',
  )
  kernel = checkpoints.load(written)['target']['mlp']['expert']['wi']['kernel']
  assert kernel.dtype == ml_dtypes.bfloat16 and kernel.shape == (4, 4, 4)


def test_nothing_is_overwritten_and_no_partial_file_is_left(source, tmp_path, monkeypatch):
  path, _ = source
  with pytest.raises(CheckpointError, match='exists. Give'):
    _run('split', path, tmp_path, '--slices=2')

  def fail(*args):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(disk.DiskFolder, 'commit', fail)
  with pytest.raises(CheckpointError, match='could not be written'):
    _run('split', path, tmp_path / 'new', '--slices=2')
  assert checkpoints.all_steps(tmp_path / 'new', require_manifest=False) == []


def test_failed_surgery_writes_nothing(source, tmp_path):
  path, _ = source
  with pytest.raises(CheckpointError, match='slices=5'):
    _run('split', path, tmp_path / 'new', '--slices=5')
  assert not (tmp_path / 'new').exists()


def test_least_loaded_experts_are_pruned(source, tmp_path):
  path, old = source
  run = path.rpartition('/')[0]
  _run(
    'prune',
    run,
    tmp_path / 'new',
    '--least_loaded=2',
    '--load',
    run,
    '--layers',
    'decoder/layers_0',
  )
  # Means of the two lines: 0.1, 0.3, 0.2, 0.4.
  new = tree_utils.flatten_dict(checkpoints.load(tmp_path / 'new' / 'checkpoint_7'))
  np.testing.assert_array_equal(new[_KERNEL], old[_KERNEL][[1, 3]])
  load = surgery_files.recorded_load(run, {_LAYER: 4})
  np.testing.assert_allclose(load[_LAYER], [0.1, 0.3, 0.2, 0.4])
  with pytest.raises(CheckpointError, match='No recorded load of the 8 experts'):
    surgery_files.recorded_load(run, {_LAYER: 8})
  with pytest.raises(CheckpointError, match='No recorded load'):
    surgery_files.recorded_load(str(tmp_path), {_LAYER: 4})


@pytest.mark.parametrize(
  'flags, message',
  [
    (('permute',), 'exactly one of --permutation'),
    (('prune',), 'exactly one of --experts, --least_loaded'),
    (('prune', '--least_loaded=1'), '--least_loaded and --load need each other'),
    (('merge', '--to=2', '--groups', '0,1'), 'exactly one of --groups, --to'),
    (('split', '--slices=2', '--times=2'), '--times belongs to another operation'),
    (('replicate', '--times=2', '--seed=1'), 'no effect without --noise_stddev'),
  ],
)
def test_flags(source, tmp_path, flags, message):
  with pytest.raises(ConfigError, match=message):
    _run(flags[0], source[0], tmp_path / 'new', *flags[1:])


def test_show(source, capsys):
  assert _run('show', source[0]) == 0
  assert '  decoder/layers_0/mlp: 4 experts' in capsys.readouterr().out
  with pytest.raises(ConfigError, match='writes nothing'):
    _run('show', source[0], 'somewhere')
  with pytest.raises(ConfigError, match='OUTPUT is missing'):
    _run('split', source[0], '--slices=2')


@pytest.mark.full
def test_the_program_has_the_command(source, tmp_path):
  call = [sys.executable, '-m', 'moe', 'surgery']
  shown = subprocess.run([*call, '--help'], check=True, capture_output=True, text=True).stdout
  assert 'least_loaded' in shown and 'examples:' in shown
  call += ['split', source[0], str(tmp_path / 'new'), '--slices=5']
  done = subprocess.run(call, capture_output=True, text=True)
  assert done.returncode == 2 and 'expected a divisor' in done.stderr


# ---- Other numbers of partitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'counts',
  [
    (2, 4),
    pytest.param((4, 2), marks=pytest.mark.full),
    pytest.param((1, 8), marks=pytest.mark.full),
  ],
)
def test_a_checkpoint_goes_to_another_number_of_expert_partitions(tmp_path, counts):
  module = _network(num_experts=8)
  shapes = up.state_shapes(module, optimizers.adamw())

  def loss_fn(params, batch):
    return module.apply({'params': params}, **batch, enable_dropout=False).mean()

  results = []
  batch = up.batch_of(module, batch=8)
  for count in counts:
    partitioner = MoePjitPartitioner(num_expert_partitions=count, num_partitions=1)
    shardings = partitioner.get_shardings(partitioner.get_mesh_axes(shapes))
    if not results:
      state = up.state_of(module, optimizers.adamw())
      by_name = tree_utils.flatten_dict(shardings.state_dict())
      placed = {name: jax.device_put(leaf, by_name[name]) for name, leaf in up.flat(state).items()}
      state = shapes.restore_state(tree_utils.unflatten_dict(placed))
      up.save(state, tmp_path)
    else:
      restored = checkpoints.restore_checkpoint(
        tmp_path / 'checkpoint_7', shapes.state_dict(), shardings=shardings.state_dict()
      )
      state = shapes.restore_state(restored.state)
    kernel = state.params['decoder']['layers_0']['mlp']['expert']['wi_0']['kernel']
    assert kernel.sharding.shard_shape(kernel.shape)[0] == 8 // count
    with jax.set_mesh(partitioner.mesh):
      loss = cases.jit(loss_fn)(state.params, batch)
    results.append((up.flat(state), float(loss)))
  (before, old_loss), (after, new_loss) = results
  for name, value in before.items():
    np.testing.assert_array_equal(after[name], value, err_msg=name)
  np.testing.assert_allclose(new_loss, old_loss, rtol=1e-6)
