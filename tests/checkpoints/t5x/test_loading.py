"""T5X's functions on checkpoints of T5X, which it wrote itself, and on ours."""

import logging
import shutil

from flax import serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints.t5x import loading
from tests.checkpoints import checkpoint_states as states
from tests.checkpoints.sources import t5x_samples as samples

Types = checkpoints.CheckpointTypes


@pytest.fixture(scope='module')
def t5x_runs(tmp_path_factory):
  return samples.unpack(tmp_path_factory.mktemp('t5x'))


def test_a_checkpoint_of_t5x_is_found_and_loaded_in_all_forms_of_its_path(t5x_runs):
  run = t5x_runs['t5x']
  index = run / 'checkpoint_7' / 'checkpoint'
  for args in ((run,), (run, 7), (run / 'checkpoint_7',), (index,)):
    assert checkpoints.find_checkpoint(*args) == str(index)
  loaded = checkpoints.load_t5x_checkpoint(str(run))
  assert set(loaded) == {'target', 'state'} and int(loaded['state']['step']) == 7
  flat = tree_utils.flatten_dict(loaded)
  chunks = samples.read_chunks(run / 'checkpoint_7')
  assert chunks
  for name, value in chunks.items():
    np.testing.assert_array_equal(flat[name], value, err_msg=name)
  same = checkpoints.load_t5x_checkpoint(str(t5x_runs['t5x_orbax']))
  jax.tree.map(np.testing.assert_array_equal, same['target'], loaded['target'])


def test_options_of_load(saved):
  def only_target(state_dict, target_state_dict, *, is_resuming=False):
    assert target_state_dict == {} and not is_resuming
    return {'target': state_dict['target']}

  assert checkpoints.find_checkpoint(saved) == str(saved / 'checkpoint_2')
  loaded = checkpoints.load_t5x_checkpoint(saved, 1, [only_target], restore_dtype='bfloat16')
  flat = tree_utils.flatten_dict(loaded)
  expected = {
    name: value for name, value in states.flat_numpy(1).items() if name.startswith('target/')
  }
  assert {name: leaf.dtype.name for name, leaf in flat.items()} == dict.fromkeys(
    expected, 'bfloat16'
  )
  with pytest.raises(
    errors.ConfigError, match='lazy_parameters` must be False, got True. To read .*read_array'
  ):
    checkpoints.load_t5x_checkpoint(saved, lazy_parameters=True)
  with pytest.raises(
    errors.ConfigError, match='state_transformation_fns` must be empty with remap=False'
  ):
    checkpoints.load_t5x_checkpoint(saved, state_transformation_fns=[only_target], remap=False)
  with pytest.raises(errors.CheckpointError, match='checkpoint_9'):
    checkpoints.find_checkpoint(saved, 9)


def test_types(t5x_runs, saved, tmp_path, caplog):
  assert (
    checkpoints.detect_checkpoint_type(t5x_runs['t5x'] / 'checkpoint_7' / 'checkpoint') is Types.T5X
  )
  assert checkpoints.detect_checkpoint_type(t5x_runs['t5x_orbax'] / 'checkpoint_7') is Types.ORBAX
  with caplog.at_level(logging.WARNING):
    assert (
      checkpoints.detect_checkpoint_type(saved / 'checkpoint_1' / 'checkpoint', Types.ORBAX)
      is Types.ORBAX
    )
    assert not caplog.messages
    checkpoints.detect_checkpoint_type(saved / 'checkpoint_1', Types.T5X)
  assert 'of the format ORBAX; expected T5X' in caplog.text
  (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1"')
  assert checkpoints.detect_checkpoint_type(tmp_path / 'checkpoint') is Types.T5X_TF
  (tmp_path / 'checkpoint').unlink()
  with pytest.raises(errors.CheckpointError, match='must be a checkpoint of T5X or t5x_lite'):
    checkpoints.detect_checkpoint_type(tmp_path)


def test_the_index_of_t5x_is_not_mistaken_for_a_folder_of_that_name(tmp_path, t5x_runs):
  copy = tmp_path / 'checkpoint'
  shutil.copytree(t5x_runs['t5x'] / 'checkpoint_7', copy)
  assert loading.folder_of(copy) == str(copy) and loading.folder_of(copy / 'checkpoint') == str(
    copy
  )
  assert checkpoints.detect_checkpoint_type(copy) is Types.T5X


def test_restore_parameters_are_those_of_orbax(tmp_path):
  tree = {'a': {'b': np.arange(4.0), 'empty': {}}, 'c': np.float32(2)}
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'tree', tree)
    metadata = checkpointer.metadata(tmp_path / 'tree').item_metadata.tree
  infos = checkpoints.get_restore_parameters(tmp_path / 'tree', metadata)
  assert (infos['a']['b'].name, infos['c'].name) == ('a.b', 'c') and infos['a']['empty'] == {}
  assert infos['c'].is_ocdbt_checkpoint and infos['c'].parent_dir.name == 'tree'


def test_specs_of_tensorstore_are_in_state_dicts():
  import tensorstore as ts

  spec = ts.Spec({'driver': 'zarr', 'kvstore': 'memory://', 'path': 'a'})
  loading.register_ts_spec_for_serialization()
  state = serialization.to_state_dict({'kernel': spec})
  assert state['kernel']['driver'] == 'zarr'
  assert serialization.from_state_dict({'kernel': spec}, state) == {'kernel': spec}


@pytest.mark.parametrize(
  'options, message',
  [
    ({'restore_dtype': 'int8'}, "restore_dtype` must be a floating dtype .*got 'int8'"),
    ({'restore_dtype': 'foo'}, "restore_dtype` must be a floating dtype .*got 'foo'"),
    (
      {'state_transformation_fns': 3},
      'state_transformation_fns` must be a sequence of functions, got 3',
    ),
    (
      {'state_transformation_fns': [lambda state: state]},
      'must be a function of .state_dict, target_state_dict',
    ),
  ],
)
def test_invalid_options_of_load_t5x_checkpoint(t5x_runs, options, message):
  with pytest.raises(errors.ConfigError, match=message):
    checkpoints.load_t5x_checkpoint(t5x_runs['t5x'], **options)
