"""Restoring: choosing a checkpoint, renaming, filling in, casting, another mesh, converting."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints.restoring import transforms
from tests.checkpoints import checkpoint_states as states
from tests.checkpoints.restoring.restore_cases import Restore
from tests.checkpoints.restoring.restore_cases import flat_target
from tests.checkpoints.restoring.restore_cases import nested
from tests.checkpoints.restoring.restore_cases import restore
from tests.checkpoints.restoring.restore_cases import spec


def test_latest_specific_all(saved, tmp_path):
  get = checkpoints.get_first_valid_restore_config_and_paths
  newest, missing = str(saved / 'checkpoint_2'), str(tmp_path / 'none')
  latest, everything = Restore(str(saved)), Restore(str(saved), 'all')
  specific = Restore([str(saved / 'checkpoint_1'), newest], 'specific')
  assert get([latest]) == (latest, [newest])
  assert get([everything]) == (everything, [str(saved / 'checkpoint_1'), newest])
  assert get([specific]) == (specific, list(specific.path))
  # The run's own directory comes first; while it is empty the next one counts.
  own = Restore(missing)
  assert get([own, specific]) == (specific, list(specific.path))
  assert get([latest, specific]) == (latest, [newest])
  several = Restore([missing, str(saved)])
  assert get([several]) == (several, [newest])
  assert get([own]) == (None, []) and get([]) == (None, []) and get([Restore([])]) == (None, [])
  assert get([Restore(str(tmp_path), 'all')]) == (None, [])


def test_relative_paths_with_two_dots(saved, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = os.path.relpath(saved / 'checkpoint_2')
  assert '..' in path
  restored = checkpoints.restore_checkpoint(
    path, states.target(), restore_cfg=Restore(path, 'specific')
  )
  assert restored.step == 2


def test_unknown_paths_are_named(saved):
  get = checkpoints.get_first_valid_restore_config_and_paths
  with pytest.raises(
    errors.CheckpointError,
    match="checkpoint_3' must be .*, got a missing path. Did you mean 'check",
  ):
    get([Restore(str(saved / 'checkpoint_3'), 'specific')])
  with pytest.raises(
    errors.CheckpointError, match="is a checkpoint, and mode='latest' expects a directory.*specific"
  ):
    get([Restore(str(saved / 'checkpoint_2'))])
  with pytest.raises(errors.CheckpointError, match='got a missing path'):
    checkpoints.restore_checkpoint(saved / 'checkpoint_9', states.target())
  message = r"must be a single checkpoint, got a directory of checkpoints. .*newest is '.*checkpoint_2'\), or"
  with pytest.raises(errors.CheckpointError, match=message):
    checkpoints.restore_checkpoint(saved, states.target())
  with pytest.raises(errors.ConfigError, match='must be a path on a disk or in an object store'):
    checkpoints.load('az://bucket/checkpoint_1')


def test_is_resuming_only_from_its_own_directory(saved, tmp_path):
  manager = checkpoints.CheckpointManager(tmp_path)
  assert not manager.restore(saved / 'checkpoint_2', states.target()).is_resuming
  assert (
    checkpoints.CheckpointManager(saved)
    .restore(saved / 'checkpoint_2', states.target())
    .is_resuming
  )
  assert checkpoints.CheckpointManager(saved).restore(1, states.target()).step == 1


def test_paths_and_steps(saved):
  shapes = checkpoints.read_shapes(saved / 'checkpoint_2')
  assert {name: (leaf.shape, leaf.dtype) for name, leaf in shapes.items()} == {
    name: (leaf.shape, leaf.dtype) for name, leaf in states.flat_numpy(2).items()
  }
  assert checkpoints.read_shapes(saved / 'checkpoint_2/state') == shapes  # As Orbax says it.
  assert checkpoints.all_steps(saved) == [1, 2] and checkpoints.latest_step(saved) == 2
  assert (
    checkpoints.all_steps(saved / 'none') == [] and checkpoints.latest_step(saved / 'none') is None
  )
  with pytest.raises(errors.CheckpointError, match='The path of a checkpoint must end with'):
    checkpoints.get_step_from_checkpoint_dir('runs/model_3')
  with pytest.raises(FileNotFoundError, match='PINNED'):
    checkpoints.pin_checkpoint(saved / 'checkpoint_7')


@pytest.mark.parametrize('data, model', [(8, 1), (1, 8), (2, 4)])
def test_onto_another_mesh(saved, data, model):
  on = states.mesh(data, model)
  shardings = states.shardings(on)
  restored = restore(saved, shardings=shardings)
  states.assert_same(restored.state, states.flat_numpy(2))
  assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == shardings
  leaf = restored.state['target']['token_embedder']['embedding']
  assert leaf.addressable_shards[0].data.shape == (16 // data, 8 // model)


def test_the_targets_own_shardings(saved):
  wanted = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    states.target(),
    states.shardings(),
  )
  for target in (wanted, states.state(0)):
    restored = restore(saved, target)
    states.assert_same(restored.state, states.flat_numpy(2))
    assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == states.shardings()


def test_one_sharding_for_all_and_missing_shardings(saved):
  one_device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  restored = restore(saved, shardings=one_device)
  assert all(leaf.sharding == one_device for leaf in jax.tree.leaves(restored.state))
  with pytest.raises(KeyError, match='/'):
    restore(saved, shardings={'target': states.shardings()['target']})


@pytest.mark.parametrize('by_transform', [False, True])
def test_dtype_cast(saved, by_transform):
  fns = [lambda state, target, *, is_resuming: state] if by_transform else []
  restored = restore(
    saved, dtype='bfloat16', state_transformation_fns=fns, shardings=states.shardings()
  )
  for name, leaf in tree_utils.flatten_dict(restored.state).items():
    expected = states.flat_numpy(2)[name]
    if name.startswith('target/'):
      expected = expected.astype(jnp.bfloat16)
    assert leaf.dtype == expected.dtype and leaf.sharding == states.sharding(
      states.flat_specs()[name]
    )
    np.testing.assert_array_equal(np.asarray(leaf), expected)
  # Without the option the wanted state's dtype rules.
  wanted = flat_target(**{'target/decoder/decoder_norm/scale': spec(8, dtype=np.float16)})
  leaf = restore(saved, nested(wanted)).state['target']['decoder']['decoder_norm']['scale']
  np.testing.assert_array_equal(
    leaf, states.flat_numpy(2)['target/decoder/decoder_norm/scale'].astype(np.float16)
  )


def test_inference_state_from_a_training_checkpoint(saved):
  wanted = {'target': states.target()['target'], 'state': {'step': spec(dtype=np.int32)}}
  restored = restore(saved, wanted)
  assert set(restored.state) == {'target', 'state'} and set(restored.state['state']) == {'step'}
  assert restored.state['state']['step'] == 2


NORM, WI = 'target/decoder/decoder_norm/scale', 'target/encoder/layers_0/mlp/wi/kernel'


def test_mismatches_are_listed_in_one_error(saved):
  wanted = flat_target(
    **{
      NORM: None,
      'target/decoder/decoder_nrom/scale': spec(8),
      WI: spec(8, 32),
      'state/step': spec(dtype=np.float32),
    }
  )
  with pytest.raises(errors.CheckpointError) as e:
    restore(saved, nested(wanted))
  text = str(e.value)
  for part in (
    '1 missing from the checkpoint:\n    target/decoder/decoder_nrom/scale (8,) Did you mean '
    "'target/decoder/decoder_norm/scale'?",
    '1 in the checkpoint only:\n    target/decoder/decoder_norm/scale (8,)',
    '1 of another shape:\n    target/encoder/layers_0/mlp/wi/kernel: stored (8, 24), wanted (8, 32)',
    '1 of another kind of number:\n    state/step: stored int32, wanted float32',
    'assignment_map',
    'strict=False',
    'fallback_to_scratch=True',
    str(saved / 'checkpoint_2'),
  ):
    assert part in text, text


def test_a_dense_checkpoint_for_a_sparse_model_names_upcycling(saved):
  experts = 'target/encoder/layers_0/mlp/expert/wi/kernel'
  wanted = flat_target(**{WI: None, experts: spec(4, 8, 24)})
  with pytest.raises(
    errors.CheckpointError, match='of a dense model.*runs/sparse_upcycle.gin.*moe.upcycle'
  ):
    restore(saved, nested(wanted))


def test_experts_of_another_number_name_surgery():
  experts = 'target/encoder/layers_0/mlp/expert/wi/kernel'
  with pytest.raises(
    errors.CheckpointError, match='stored .8, 8, 24., wanted .4, 8, 24.(.|\n)*python -m moe surgery'
  ):
    transforms.check_fit(
      {experts: spec(8, 8, 24)},
      {experts: spec(4, 8, 24)},
      allow_surplus=False,
      allow_missing=False,
      where='runs/a',
    )


def test_many_mismatches_are_cut_short(saved):
  wanted = flat_target() | {f'target/new_{i}': spec(1) for i in range(50)}
  with pytest.raises(errors.CheckpointError) as e:
    restore(saved, nested(wanted))
  assert '50 missing' in str(e.value) and len(str(e.value).splitlines()) < 12


@pytest.mark.parametrize('section', ['flax_mutables', 'param_average'])
def test_a_training_state_must_have_all_parts_of_the_checkpoint(tmp_path, section):
  state = states.state(1) | {section: {'bias': jnp.ones(3)}}
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(1, state)
    restored = manager.restore(1, states.shapes(state))
    np.testing.assert_array_equal(restored.state[section]['bias'], np.ones(3))
    with pytest.raises(
      errors.CheckpointError, match=f'1 in the checkpoint only:\n    {section}/bias'
    ):
      manager.restore(1, states.target())
    manager.restore(1, {'target': states.target()['target']})  # One for inference need not.


def test_strict_false_lets_go_of_the_rest(saved):
  wanted = nested(flat_target(**{WI: None, NORM: None}))
  restored = restore(saved, wanted, strict=False)
  states.assert_same(
    restored.state,
    {name: leaf for name, leaf in states.flat_numpy(2).items() if name not in (WI, NORM)},
  )
  with pytest.raises(errors.CheckpointError, match='1 missing'):
    restore(saved, nested(flat_target(**{'target/new': spec(2)})), strict=False)


def test_fallback_to_scratch(saved):
  wanted = nested(flat_target(**{WI: None, 'target/new/kernel': spec(4, 4)}))
  calls = []

  def initial_state():
    calls.append(1)
    return jax.tree.map(lambda leaf: np.full(leaf.shape, 7, leaf.dtype), wanted)

  new_sharding = {'target': {'new': {'kernel': states.sharding(states.P('data'))}}}
  flat_shardings = tree_utils.flatten_dict(states.shardings()) | tree_utils.flatten_dict(
    new_sharding
  )
  restored = restore(
    saved,
    wanted,
    fallback_to_scratch=True,
    initial_state_fn=initial_state,
    shardings=nested(flat_shardings),
  )
  expected = {name: leaf for name, leaf in states.flat_numpy(2).items() if name != WI}
  states.assert_same(
    restored.state, expected | {'target/new/kernel': np.full((4, 4), 7, np.float32)}
  )
  assert (
    restored.state['target']['new']['kernel'].sharding == new_sharding['target']['new']['kernel']
  )
  assert calls == [1]
  restore(saved, fallback_to_scratch=True, initial_state_fn=initial_state)
  assert calls == [1]  # Nothing was missing.
  with pytest.raises(
    errors.ConfigError, match='fallback_to_scratch: the checkpoint lacks .*new/kernel'
  ):
    restore(saved, wanted, fallback_to_scratch=True)
  with pytest.raises(
    errors.CheckpointError, match='1 of another shape'
  ):  # Never filled in silently.
    restore(
      saved,
      nested(flat_target(**{WI: spec(8, 32)})),
      fallback_to_scratch=True,
      initial_state_fn=initial_state,
    )


def test_patterns_of_what_may_be_new(saved, caplog):
  state = {'state/param_states/mu/new/kernel': spec(4, 4), 'target/other': spec(2)}
  wanted = nested(flat_target(**{WI: None, 'target/new/kernel': spec(4, 4), **state}))

  def fit(*patterns):
    cfg = checkpoints.RestoreCheckpointConfig('x', 'specific', fallback_to_scratch=patterns)
    return checkpoints.check_fits(saved / 'checkpoint_2', wanted, restore_cfg=cfg)

  found = fit('new/.*', 'other')
  assert set(found.new) == {'target/new/kernel', *state} and found.ignored == (WI,)
  assert checkpoints.describe_names(found.new) == [
    'target/new/kernel',
    'target/other',
    'their optimizer state and averages (1 arrays)',
  ]
  with pytest.raises(
    errors.CheckpointError, match='1 missing from the checkpoint:\n    target/other'
  ):
    fit('new/.*')
  with pytest.raises(errors.CheckpointError, match='must match names of parameters in full'):
    fit('target/new/.*')
  with pytest.raises(errors.ConfigError, match='True, False or a list of regular expressions'):
    fit('(')
  with pytest.raises(errors.ConfigError, match='True, False or a list'):
    fit()


def test_load_and_plain_orbax_checkpoints(saved, tmp_path, caplog):
  states.assert_same(checkpoints.load(saved / 'checkpoint_1'), states.flat_numpy(1))
  # Checkpoints of other programs have no manifest: they are restored with a warning, and no run resumes from them.
  shutil.copytree(saved / 'checkpoint_1', tmp_path / 'checkpoint_5')
  os.remove(tmp_path / 'checkpoint_5/manifest.json')
  with caplog.at_level('WARNING'):
    restored = checkpoints.restore_checkpoint(tmp_path / 'checkpoint_5', states.target())
  assert 'has no manifest' in caplog.text
  states.assert_same(restored.state, states.flat_numpy(1))
  assert not restored.is_verified and restored.step == 1 and restored.data_state is None
  caplog.clear()
  assert checkpoints.newest_sound_step(tmp_path) is None
  assert 'Ignoring checkpoint(s) [5]' in caplog.text
  for mode in ('latest', 'all'):
    cfg = Restore(str(tmp_path), mode)
    assert checkpoints.get_first_valid_restore_config_and_paths([cfg]) == (
      cfg,
      [str(tmp_path / 'checkpoint_5')],
    )
  assert 'without a manifest: it cannot be verified' in caplog.text
  states.assert_same(checkpoints.load(tmp_path / 'checkpoint_5'), states.flat_numpy(1))
  # The folder of arrays itself will do as well.
  states.assert_same(checkpoints.load(tmp_path / 'checkpoint_5/state'), states.flat_numpy(1))
