"""T5X's checkpointers: they read T5X's checkpoints and save ours, and never overwrite."""

import shutil

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.trainer import summaries
from tests.checkpoints.sources import t5x_samples as samples


@pytest.fixture(scope='module')
def parts():
  partitioner = partitioning.PjitPartitioner(num_partitions=2)
  initializer = samples.initializer(samples.model(), partitioner)
  return initializer.global_train_state_shape, partitioner


@pytest.fixture(scope='module')
def t5x_run(tmp_path_factory):
  return samples.unpack(tmp_path_factory.mktemp('t5x'))['t5x']


@pytest.fixture(scope='module')
def state(parts, t5x_run):
  return checkpoints.Checkpointer(*parts, t5x_run).restore()


def assert_same(left, right):
  jax.tree.map(np.testing.assert_array_equal, left.state_dict(), right.state_dict())


def test_a_checkpoint_of_t5x_is_restored_with_the_shardings_of_the_partitioner(
  parts, t5x_run, state
):
  shape, partitioner = parts
  flat = tree_utils.flatten_dict(state.state_dict())
  for name, value in samples.read_chunks(t5x_run / 'checkpoint_7').items():
    np.testing.assert_array_equal(flat[name], value, err_msg=name)
  shardings = tree_utils.flatten_dict(
    partitioner.get_shardings(partitioner.get_mesh_axes(shape)).state_dict()
  )
  for name, leaf in flat.items():
    assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name
  checkpointer = checkpoints.Checkpointer(*parts, '')
  for path in (t5x_run / 'checkpoint_7', t5x_run / 'checkpoint_7' / 'checkpoint'):
    assert_same(checkpointer.restore(path=str(path)), state)


def test_save_keeps_what_exists_and_deletes_only_own_checkpoints(parts, t5x_run, state, tmp_path):
  run = tmp_path / 'run'
  shutil.copytree(t5x_run, run)
  index = (run / 'checkpoint_7' / 'checkpoint').read_bytes()
  checkpointer = checkpoints.Checkpointer(*parts, run, keep=2)
  checkpointer.save(state)
  assert not (run / 'checkpoint_7' / 'manifest.json').exists()
  for step in (8, 9, 10, 10):
    checkpointer.save(state.replace_step(step))
  assert checkpointer.all_steps() == [7, 9, 10] and checkpointer.latest_step() == 10
  assert (run / 'checkpoint_7' / 'checkpoint').read_bytes() == index
  assert checkpoints.all_steps(run) == [9, 10]  # with a manifest
  assert_same(checkpointer.restore(9), state.replace_step(9))
  assert int(checkpointer.restore().step) == 10


def test_functions_dtypes_and_missing_arrays(parts, state, tmp_path):
  def without_norm(state_dict, parameter_infos):
    params = {**state_dict['target'], 'decoder': {**state_dict['target']['decoder']}}
    del params['decoder']['decoder_norm']
    return {**state_dict, 'target': params}, parameter_infos

  checkpointer = checkpoints.Checkpointer(
    *parts, tmp_path, save_dtype='bfloat16', restore_dtype='bfloat16'
  )
  checkpointer.save(state, [without_norm])
  shapes = checkpoints.read_shapes(tmp_path / 'checkpoint_7')
  assert 'target/decoder/decoder_norm/scale' not in shapes
  assert {leaf.dtype.name for name, leaf in shapes.items() if name.startswith('target/')} == {
    'bfloat16'
  }
  with pytest.raises(errors.CheckpointError, match='1 missing from the checkpoint'):
    checkpointer.restore(7)
  cfg = checkpoints.RestoreCheckpointConfig(
    'x', assignment_map=[('target/decoder/decoder_norm/scale', None)]
  )
  restored = checkpointer.restore(
    7, state_transformation_fns=cfg.state_transformation_fns, fallback_state=state.state_dict()
  )
  np.testing.assert_array_equal(
    restored.params['decoder']['decoder_norm']['scale'],
    state.params['decoder']['decoder_norm']['scale'].astype('bfloat16'),
  )
  assert {leaf.dtype.name for leaf in jax.tree.leaves(restored.params)} == {'bfloat16'}


def test_the_best_checkpoints_by_the_events_of_the_run_are_kept(parts, state, tmp_path):
  writer = summaries.SummaryWriter(tmp_path / 'inference_eval' / 'task')
  for step, value in ((1, 0.9), (2, 0.1), (3, 0.8), (4, 0.2)):
    writer.write_scalars(step, {'match': value})
  writer.close()
  checkpointer = checkpoints.SaveBestCheckpointer(
    *parts,
    tmp_path,
    keep=1,
    metric_name_to_monitor='inference_eval/task/match',
    force_keep_period=4,
  )
  for step in range(1, 7):
    checkpointer.save(state.replace_step(step))
  # The best one, that of the period, the newest one, and step 5, whose metric is unknown.
  assert checkpointer.all_steps() == [1, 4, 5, 6]


@pytest.mark.parametrize(
  'fn, message',
  [
    (
      lambda c, s: c.save(s, concurrent_gb=2),
      'concurrent_gb` must be one of 128, got 2. The memory of a save',
    ),
    (lambda c, s: c.restore(1, 'a'), 'step` must be None if path is given, got 1'),
    (lambda c, s: c.restore(), 'There is no checkpoint in .*Give the path of one'),
    (lambda c, s: c.restore(lazy_parameters=True), 'lazy_parameters` must be False'),
    (
      lambda c, s: c.restore_from_tf_checkpoint('a/model.ckpt-1'),
      "'a/model.ckpt-1' cannot be restored.*Hugging Face",
    ),
    (lambda c, s: c.convert_from_tf_checkpoint('a/model.ckpt-1'), 'Mesh TensorFlow are not read'),
  ],
)
def test_unsupported_options_name_the_alternative(parts, state, tmp_path, fn, message):
  with pytest.raises((errors.ConfigError, errors.CheckpointError), match=message):
    fn(checkpoints.Checkpointer(*parts, tmp_path), state)


def test_an_iterator_without_a_position_is_rejected(parts, tmp_path):
  with pytest.raises(
    errors.ConfigError, match='Checkpointer.dataset_iterator` must be an iterator with get_state'
  ):
    checkpoints.Checkpointer(*parts, tmp_path, iter([1]))


@pytest.mark.parametrize(
  'options, message',
  [
    ({'metric_mode': 'best'}, "metric_mode` must be one of 'max', 'min', got 'best'"),
    ({'metric_name_to_monitor': 3}, 'metric_name_to_monitor` must be a name'),
    (
      {'keep_checkpoints_without_metrics': 'no'},
      'keep_checkpoints_without_metrics` must be True or False',
    ),
  ],
)
def test_invalid_options_of_the_best_are_rejected(parts, tmp_path, options, message):
  with pytest.raises(errors.ConfigError, match=message):
    checkpoints.SaveBestCheckpointer(*parts, tmp_path, **options)
