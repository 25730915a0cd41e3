"""T5X's functions that restore by configurations, and managers with the classes of configurations."""

import functools

import jax
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import partitioning
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints.t5x import legacy
from t5x_lite.trainer import state_init
from tests.checkpoints import test_train_states

Save, Restore = checkpoints.SaveCheckpointConfig, checkpoints.RestoreCheckpointConfig
DROP = [('target/kernel', None)]
make_state = test_train_states.make_state


@functools.cache
def partitioner():
  return partitioning.PjitPartitioner(num_partitions=2)


class OwnCheckpointer:
  """A user's checkpointer with T5X's arguments; it is no subclass."""

  def __init__(
    self,
    train_state,
    partitioner,
    checkpoints_dir,
    dataset_iterator=None,
    *,
    keep=None,
    save_dtype=np.float32,
    restore_dtype=None,
    keep_dataset_checkpoints=None,
  ):
    self.arguments = {'keep': keep, 'save_dtype': save_dtype, 'restore_dtype': restore_dtype}

  def save(self, train_state, state_transformation_fns=()):
    raise RuntimeError(f'saved with {self.arguments}')

  def restore(self, path, state_transformation_fns, fallback_state=None):
    return path, self.arguments['restore_dtype'], fallback_state


def make_manager(model_dir, save_cfg=Save(), restore_cfg=None, use_orbax=False, ds_iter=None):
  common = dict(
    save_cfg=save_cfg,
    restore_cfg=restore_cfg,
    partitioner=partitioner(),
    ds_iter=ds_iter,
    model_dir=str(model_dir),
  )
  if use_orbax:
    return checkpoints.create_orbax_checkpoint_manager(train_state=make_state(0), **common)
  return checkpoints.LegacyCheckpointManager(train_state_shape=make_state(0), **common)


@pytest.mark.parametrize('use_orbax', [False, True])
def test_both_managers_save_and_restore_with_the_options_of_configurations(tmp_path, use_orbax):
  iterator = test_train_states.OurIterator()
  iterator.position = 3
  cfg = Save(
    dtype='bfloat16',
    period=2,
    keep_best=1,
    metric_name_to_monitor='train/loss',
    keep=1,
    keep_checkpoints_without_metrics=False,
  )
  manager = make_manager(tmp_path, cfg, use_orbax=use_orbax, ds_iter=iterator)
  for step in (1, 2, 3):
    manager.save(make_state(step))
  assert (
    checkpoints.all_steps(tmp_path) == checkpoints.all_dataset_checkpoint_steps(tmp_path) == [3]
  )
  assert checkpoints.read_shapes(tmp_path / 'checkpoint_3')['target/kernel'].dtype == 'bfloat16'
  manager.save(make_state(4))
  restoring = Restore(str(tmp_path), builders=[checkpoints.builders.StartAtStep(9)])
  manager = make_manager(tmp_path, None, restoring, use_orbax, iterator)
  path, iterator.position = str(tmp_path / 'checkpoint_4'), 0
  one = (
    legacy.restore(manager, [path], restoring) if use_orbax else manager.restore([path], restoring)
  )
  # With our options of the configuration.
  assert int(one.step) == 9 and float(one.params['kernel'][0, 0]) == 4 and iterator.position == 3
  two = (
    legacy.restore(manager, [path, path], restoring)
    if use_orbax
    else manager.restore([path, path], restoring)
  )
  assert len(two) == 2


def test_fallback_state(tmp_path):
  make_manager(tmp_path).save(make_state(1))
  path = str(tmp_path / 'checkpoint_1')
  cfg = Restore(path, 'specific', DROP, fallback_to_scratch=True)
  with pytest.raises(
    errors.ConfigError, match='init_rng` must be a key with fallback_to_scratch=True'
  ):
    checkpoints.get_fallback_state(cfg, None, None)
  assert checkpoints.get_fallback_state(Restore(path), None, None) is None
  fallback = checkpoints.get_fallback_state(
    cfg, lambda key: make_state(8).state_dict(), jax.random.key(0)
  )
  restored = make_manager(tmp_path, None, cfg).restore([path], cfg, fallback)
  assert int(restored.step) == 1 and float(restored.params['kernel'][0, 0]) == 8


def test_custom_checkpointers_get_the_arguments_of_t5x(tmp_path):
  save = Save(keep=4, dtype='bfloat16', checkpointer_cls=OwnCheckpointer)
  restore = Restore(
    'some/path', dtype='float32', checkpointer_cls=functools.partial(OwnCheckpointer, keep=1)
  )
  manager = make_manager(tmp_path, save, restore)
  with pytest.raises(RuntimeError, match="saved with .*'keep': 4, 'save_dtype': 'bfloat16'"):
    manager.save(make_state(1))
  assert manager.restore(['some/path'], restore) == ('some/path', 'float32', None)
  # Commands cannot use it.
  with pytest.raises(
    errors.ConfigError, match='SaveCheckpointConfig.checkpointer_cls` must be a class whose `save`'
  ):
    checkpoints.check_supported(checkpoints.CheckpointConfig(save=save))
  with pytest.raises(
    errors.ConfigError, match='RestoreCheckpointConfig.checkpointer_cls.* Write a builder'
  ):
    checkpoints.check_supported(checkpoints.CheckpointConfig(restore=restore))
  checkpoints.check_supported(
    checkpoints.CheckpointConfig(Save(checkpointer_cls=None), Restore('a'))
  )


@pytest.mark.parametrize(
  'method, others',
  [
    ('save', None),
    ('restore', None),
    ('_get_state_dict_for_save', None),
    ('own_helper', None),
    ('_remove_old_checkpoints', '_remove_old_checkpoints'),
    ('latest_step', 'latest_step'),
    ('_write_state_to_tensorstore', '_write_state_to_tensorstore'),
  ],
)
def test_commands_accept_the_methods_that_they_call(method, others):
  made = type('OfUser', (checkpoints.Checkpointer,), {method: lambda self: None})
  for cfg in (
    checkpoints.CheckpointConfig(save=Save(checkpointer_cls=made)),
    checkpoints.CheckpointConfig(restore=Restore('a', checkpointer_cls=functools.partial(made))),
  ):
    if others is None:
      checkpoints.check_supported(cfg)
      continue
    with pytest.raises(
      errors.ConfigError, match=f'checkpointer_cls` must be .* none of the methods {others}, which'
    ):
      checkpoints.check_supported(cfg)


@pytest.mark.parametrize('cls', [checkpoints.Checkpointer, checkpoints.SaveBestCheckpointer])
def test_each_public_method_is_called_or_listed(cls):
  """`make test-t5x` compares the lists with a checkout of T5X, whose private methods they have too."""
  public = {name for name in dir(cls) if name[0] != '_' and callable(getattr(cls, name))}
  assert public - {'set_restore_cfg', 'set_writer'} <= {*config.CALLED, *config.NOT_CALLED}


def test_a_subclass_filters_the_saved_state(tmp_path):
  class Filtered(checkpoints.Checkpointer):
    def _get_state_dict_for_save(self, state_dict, lazy_load=True):
      return {'state': state_dict['state']}

  manager = make_manager(tmp_path, Save(checkpointer_cls=Filtered), None)
  manager.save(make_state(1))
  assert {*checkpoints.load(tmp_path / 'checkpoint_1')} == {'state'}


def test_errors(tmp_path):
  other = Restore(
    'a',
    checkpoint_manager_cls=functools.partial(checkpoints.OrbaxCheckpointManagerInterface, keep=1),
  )
  with pytest.raises(
    errors.ConfigError, match='checkpoint_manager_cls` must be the same class in save_cfg and'
  ):
    make_manager(tmp_path, Save(), other, use_orbax=True)
  with pytest.raises(errors.ConfigError, match='LegacyCheckpointManager.save_cfg'):
    make_manager(tmp_path, None).save(make_state(1))
  checkpointer = checkpoints.Checkpointer(make_state(0), partitioner(), tmp_path)
  facade = checkpoints.LegacyCheckpointer(
    save_checkpointer=checkpointer, restore_checkpointer=checkpointer
  )
  facade.save('', make_state(1))
  assert int(facade.restore(str(tmp_path / 'checkpoint_1')).step) == 1
  with pytest.raises(errors.ConfigError, match='force` must be one of False, got True'):
    facade.save('', make_state(1), force=True)
  (tmp_path / 'model.ckpt.index').touch()
  with pytest.raises(errors.CheckpointError, match='Mesh TensorFlow'):
    facade.restore(str(tmp_path / 'model.ckpt'))


@pytest.mark.parametrize('use_orbax', [False, True])
def test_create_checkpoint_manager_and_restore(tmp_path, use_orbax):
  make_manager(tmp_path).save(make_state(5))
  initializer = state_init.TrainStateInitializer(
    None,
    lambda rng, input_shapes, input_types: {
      'params': {'kernel': jax.random.normal(rng, (8, 4))},
      'params_axes': make_state(0).params_axes,
    },
    {},
    partitioner(),
  )
  cfg = Restore(str(tmp_path))
  state, manager = checkpoints.create_checkpoint_manager_and_restore(
    initializer,
    partitioner(),
    cfg,
    str(tmp_path / 'checkpoint_5'),
    None,
    Save(),
    use_orbax=use_orbax,
  )
  assert int(state.step) == 5 and float(state.params['kernel'][0, 0]) == 5
  manager.save(make_state(6))
  assert checkpoints.all_steps(tmp_path) == [5, 6]
  state, _ = checkpoints.create_checkpoint_manager_and_restore(
    initializer, partitioner(), cfg, None, None, use_orbax=use_orbax
  )
  assert state is None
