"""Restoring for evaluation and inference: choice and order of checkpoints, arrays that are read, and errors."""

import logging
import shutil

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.checkpoints import builders
from t5x_lite.errors import CheckpointDamagedError, CheckpointError, ConfigError
from t5x_lite.train_state import InferenceState
from tests.apps.train import toy_run
from tests.models import toy_model

_SHAPES = {'decoder_input_tokens': (8, 6)}


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A model directory with the steps 2, 10 and 4 of made-up parameters, by step."""
  model_dir = tmp_path_factory.mktemp('run')
  shapes = jax.eval_shape(lambda: toy_model.make_state(toy_run.model())).state_dict()
  rng, params = np.random.default_rng(0), {}
  with checkpoints.CheckpointManager(
    model_dir, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for step in (2, 10, 4):
      state = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
      state['state']['step'] = np.int32(step)
      manager.save(step, state, data_state={'position': b'x'})
      params[step] = state['target']
  return model_dir, params


def _restore(
  path,
  mode='latest',
  seed=None,
  model=None,
  partitioner=None,
  is_done=lambda path, step: False,
  **kwargs,
):
  cfg = (
    None
    if path is None
    else checkpoints.RestoreCheckpointConfig([] if path == [] else str(path), mode=mode, **kwargs)
  )
  return list(
    restore_lib.restore_for_inference(
      model or toy_run.model(),
      cfg,
      partitioner or toy_run.partitioner(),
      _SHAPES,
      fallback_init_rng=seed,
      is_done=is_done,
    )
  )


def _assert_params(result, params, partitioner=None):
  assert (
    isinstance(result.train_state, InferenceState) and int(result.train_state.step) == result.step
  )
  for name, x in tree_utils.flatten_dict(result.train_state.params).items():
    np.testing.assert_array_equal(x, tree_utils.flatten_dict(params)[name])
  shardings = (partitioner or toy_run.partitioner()).get_shardings(result.train_state_axes)
  for name, x in tree_utils.flatten_dict(result.train_state.state_dict()).items():
    assert x.sharding.is_equivalent_to(
      tree_utils.flatten_dict(shardings.state_dict())[name], x.ndim
    ), name


@pytest.mark.parametrize(
  'mode, name, steps',
  [('latest', '', [10]), ('all', '', [2, 4, 10]), ('specific', 'checkpoint_4', [4])],
)
def test_which_checkpoints(run, mode, name, steps):
  model_dir, params = run
  results = _restore(model_dir / name, mode)
  assert [r.step for r in results] == steps
  assert [r.path for r in results] == [str(model_dir / f'checkpoint_{step}') for step in steps]
  for result in results:
    _assert_params(result, params[result.step])


class _Doubled(checkpoints.Checkpointer):
  """Checkpointer of a user, with T5X's arguments."""

  def restore(
    self,
    step=None,
    path=None,
    state_transformation_fns=(),
    fallback_state=None,
    lazy_parameters=False,
  ):
    state = super().restore(step, path, state_transformation_fns, fallback_state, lazy_parameters)
    return state.replace_params(jax.tree.map(lambda value: 2 * value, state.params))


def test_a_checkpointer_of_a_user_restores(run):
  model_dir, params = run
  (result,) = _restore(model_dir / 'checkpoint_4', 'specific', checkpointer_cls=_Doubled)
  assert result.step == 4
  _assert_params(result, jax.tree.map(lambda value: 2 * value, params[4]))


def test_one_device_and_another_dtype(run):
  model_dir, params = run
  partitioner = partitioning.PjitPartitioner(
    mesh=jax.sharding.Mesh(
      np.array(jax.devices()[:1]).reshape(1, 1),
      ('data', 'model'),
      axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )
  )
  (result,) = _restore(model_dir, partitioner=partitioner, dtype='bfloat16')
  assert {x.dtype.name for x in jax.tree.leaves(result.train_state.params)} == {'bfloat16'}
  _assert_params(
    result, jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), params[10]), partitioner
  )


def test_any_name_takes_its_step_from_the_manifest(run, tmp_path):
  shutil.copytree(run[0] / 'checkpoint_4', tmp_path / 'my model')
  (result,) = _restore(tmp_path / 'my model', 'specific')
  assert (result.path, result.step) == (str(tmp_path / 'my model'), 4)
  asked = []
  assert not _restore(
    tmp_path / 'my model', 'specific', is_done=lambda path, step: asked.append(step) or True
  )
  assert asked == [4]
  # Without a manifest only the state itself knows.
  (tmp_path / 'my model' / 'manifest.json').unlink()
  assert [r.step for r in _restore(tmp_path / 'my model', 'specific')] == [4]
  assert not _restore(tmp_path / 'my model', 'specific', is_done=lambda path, step: step == 4)


def test_finished_checkpoints_are_not_read(run, tmp_path, caplog):
  model_dir = tmp_path / 'run'
  shutil.copytree(run[0], model_dir)
  _damage(model_dir / 'checkpoint_2')
  with caplog.at_level(logging.WARNING, 't5x_lite'):
    assert [
      r.step for r in _restore(model_dir, 'all', is_done=lambda path, step: step in (2, 4))
    ] == [10]
  assert not caplog.records


def test_damaged_checkpoints_are_skipped_and_reported_at_the_end(run, tmp_path, caplog):
  model_dir = tmp_path / 'run'
  shutil.copytree(run[0], model_dir)
  _damage(model_dir / 'checkpoint_2')
  (model_dir / 'checkpoint_4' / 'manifest.json').write_text('{')
  steps = []
  iterator = restore_lib.restore_for_inference(
    toy_run.model(),
    checkpoints.RestoreCheckpointConfig(str(model_dir), mode='all'),
    toy_run.partitioner(),
    _SHAPES,
  )
  with pytest.raises(
    CheckpointDamagedError, match='2 of 3 .* damaged: .*checkpoint_2, .*checkpoint_4'
  ):
    for result in iterator:
      steps.append(result.step)
  assert steps == [10] and 'checkpoint_2' in caplog.text


def test_latest_passes_over_damage(run, tmp_path):
  model_dir = tmp_path / 'run'
  shutil.copytree(run[0], model_dir)
  _damage(model_dir / 'checkpoint_10')
  assert [r.step for r in _restore(model_dir)] == [4]
  with pytest.raises(CheckpointDamagedError, match='checkpoint_10'):
    _restore(model_dir / 'checkpoint_10', 'specific')


def test_a_checkpoint_that_is_deleted_in_the_meantime(run, tmp_path, caplog):
  model_dir = tmp_path / 'run'
  shutil.copytree(run[0], model_dir)
  iterator = restore_lib.restore_for_inference(
    toy_run.model(),
    checkpoints.RestoreCheckpointConfig(str(model_dir), mode='all'),
    toy_run.partitioner(),
    _SHAPES,
  )
  assert next(iterator).step == 2
  shutil.rmtree(model_dir / 'checkpoint_4')
  assert [r.step for r in iterator] == [10] and 'deleted in the meantime' in caplog.text


@pytest.mark.parametrize('path', [None, [], 'empty'])
def test_random_parameters(tmp_path, path):
  path = tmp_path / path if path else path
  with pytest.raises(CheckpointError, match='fallback_init_rng'):
    _restore(path)
  (one,) = _restore(path, seed=3)
  assert one.path is None and one.step == 0
  expected = toy_run.model().get_initial_variables(jax.random.key(3), _SHAPES)['params']
  for name, x in tree_utils.flatten_dict(expected).items():
    np.testing.assert_allclose(tree_utils.flatten_dict(one.train_state.params)[name], x, rtol=1e-6)


def test_another_model_is_rejected_with_the_differences(run):
  with pytest.raises(
    CheckpointError, match=r'(?s)of another shape.*target/hidden: stored \(8, 16\), wanted \(4, 8\)'
  ):
    restore_lib.restore_for_inference(
      toy_model.make_model(width=4),
      checkpoints.RestoreCheckpointConfig(str(run[0]), mode='all'),
      toy_run.partitioner(),
      _SHAPES,
    )


def test_missing_parameters_are_initialized_from_the_seed(run):
  cfg = {'mode': 'latest', 'assignment_map': [('target/hidden', None)], 'fallback_to_scratch': True}
  with pytest.raises(ConfigError, match='fallback_init_rng'):
    _restore(run[0], **cfg)
  (result,) = _restore(run[0], seed=3, **cfg)
  expected = toy_run.model().get_initial_variables(jax.random.key(3), _SHAPES)['params']
  np.testing.assert_allclose(result.train_state.params['hidden'], expected['hidden'], rtol=1e-6)
  np.testing.assert_array_equal(result.train_state.params['logits'], run[1][10]['logits'])


def _restore_built(chain, path=None, **kwargs):
  cfg = checkpoints.RestoreCheckpointConfig(path and str(path), builders=chain)
  return list(
    restore_lib.restore_for_inference(
      toy_run.model(), cfg, toy_run.partitioner(), _SHAPES, **kwargs
    )
  )


def test_builders_make_the_parameters(run, tmp_path):
  model_dir, params = run
  two = [str(model_dir / f'checkpoint_{step}') for step in (2, 10)]
  (result,) = _restore_built([builders.Average(two)])
  mean = jax.tree.map(
    lambda a, b: ((a.astype(np.float64) + b) / 2).astype(a.dtype), params[2], params[10]
  )
  assert (result.step, result.path) == (10, None)
  assert result.origin == f'the average of 2 checkpoints ({two[0]}, {two[1]})'
  _assert_params(result, mean)
  # The running average of a checkpoint, whose step names the results.
  average = jax.tree.map(lambda x: x + 1, params[4])
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(4, {**checkpoints.load(model_dir / 'checkpoint_4'), 'param_average': average})
  (result,) = _restore_built([builders.ParamAverage()], tmp_path)
  assert (result.step, result.path) == (4, str(tmp_path / 'checkpoint_4'))
  assert result.origin == f'{tmp_path}/checkpoint_4, then param_average as parameters'
  _assert_params(result, average)


def test_the_average_of_a_checkpoint_is_the_default(run, tmp_path):
  average = jax.tree.map(lambda x: x + 1, run[1][4])
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(4, {**checkpoints.load(run[0] / 'checkpoint_4'), 'param_average': average})
  for option, params in ((None, average), (True, average), (False, run[1][4])):
    (result,) = _restore(tmp_path, use_param_average=option)
    _assert_params(result, params)
    assert result.origin.endswith(
      'checkpoint_4' if option is False else 'param_average as parameters'
    )
  (result,) = _restore(run[0], use_param_average=True)  # a checkpoint without an average
  _assert_params(result, run[1][10])


def test_builders_must_make_all_parameters_for_inference(run):
  chain = [builders.Subtree('', path=str(run[0] / 'checkpoint_2'), into='other')]
  for seed in (None, 3):
    with pytest.raises(CheckpointError, match='missing from the checkpoint'):
      _restore_built(chain, fallback_init_rng=seed)


@pytest.mark.parametrize('seed', [-1, 2**32, True, 'x'])
def test_bad_seeds(run, seed):
  with pytest.raises(ConfigError, match='fallback_init_rng'):
    _restore(run[0], seed=seed)


@pytest.mark.parametrize(
  'name, mode, fragment',
  [
    ('none', 'specific', 'got a missing path'),
    ('', 'specific', "'latest' or 'all'"),
    ('checkpoint_2', 'latest', "mode='specific'"),
    ('checkpoint_2', 'all', "mode='specific'"),
    ('checkpoint_5', 'specific', 'Did you mean'),
  ],
)
def test_bad_paths(run, name, mode, fragment):
  with pytest.raises(CheckpointError, match=fragment):
    _restore(run[0] / name, mode)


def _damage(path):
  largest = max(
    (p for p in (path / 'state').rglob('*') if p.is_file()), key=lambda p: p.stat().st_size
  )
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)


@pytest.mark.parametrize(
  'run, expected',
  [
    ({'run': {'data': {'seed': 0}}}, True),  # of an earlier version
    ({'run': {'data': {'earlier_sentinels': True}}}, True),
    ({'run': {'data': {'earlier_sentinels': False}}}, False),
    ({}, False),  # of another program
  ],
)
def test_data_has_the_ids_of_sentinels_that_the_run_was_recorded_with(tmp_path, run, expected):
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(3, {'state': {'step': np.int32(3)}, 'target': {'x': np.zeros(2)}}, metadata=run)
  task = data.DatasetConfig(
    't', {'inputs': 4, 'targets': 4}, 'train', 1, False, 0, source='builtin'
  )
  texts = data.TextFileConfig(path='in.txt', task_feature_lengths={'inputs': 4}, batch_size=1)
  for path, mode in ((tmp_path, 'latest'), (tmp_path / 'checkpoint_3', 'specific')):
    cfg = checkpoints.RestoreCheckpointConfig(str(path), mode=mode)
    assert restore_lib.with_recorded_ids(task, cfg).earlier_sentinels == expected
    assert restore_lib.with_recorded_ids(texts, cfg).finds_added_tokens != expected
  missing = checkpoints.RestoreCheckpointConfig(str(tmp_path / 'none'), mode='specific')
  assert restore_lib.with_recorded_ids(task, missing) is task
  assert restore_lib.with_recorded_ids(task, None) is task
