"""Where a run starts: the choice of a checkpoint, and its parameters in the model's layout and on its mesh."""

import dataclasses
import functools
import types
import weakref

import jax
import numpy as np
import optax
import pytest

from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import layer_stacks
from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import trainer as trainer_lib
from t5x_lite import tree_utils
from t5x_lite.apps.common import starting_point
from t5x_lite.apps.convert import run as convert
from t5x_lite.errors import CheckpointDamagedError, CheckpointError, ConfigError
from t5x_lite.networks import t5
from t5x_lite.trainer import state_init
from tests.checkpoints.sources import t5x_samples

_SPEC = {
  'encoder_input_tokens': (4, 8),
  'decoder_input_tokens': (4, 6),
  'decoder_target_tokens': (4, 6),
}


def _model(layout, optimizer_def=None, **fields):
  vocabulary = data.PassThroughVocabulary(32, eos_id=1)
  network = t5.Transformer(
    t5.T5Config(
      vocab_size=32,
      emb_dim=8,
      num_heads=4,
      num_encoder_layers=2,
      num_decoder_layers=2,
      head_dim=2,
      mlp_dim=16,
      mlp_activations=('gelu', 'linear'),
      dropout_rate=0.0,
      param_layout=layout,
      **fields,
    )
  )
  return models.EncoderDecoderModel(
    network, vocabulary, vocabulary, optimizer_def or optimizers.adamw()
  )


@functools.cache
def _partitioner(num_partitions):
  return partitioning.PjitPartitioner(num_partitions=num_partitions)


def _initializer(model, num_partitions=2):
  return state_init.TrainStateInitializer(
    model.optimizer_def, model.get_initial_variables, _SPEC, _partitioner(num_partitions)
  )


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Save random numbers as a state at step 1 of a model in the layout t5; return its directory and the numbers."""
  model, model_dir = _model('t5'), tmp_path_factory.mktemp('saved')
  rng = np.random.default_rng(0)

  def draw(leaf):
    floating = np.issubdtype(leaf.dtype, np.floating)
    return (
      0.3 * np.abs(rng.standard_normal(leaf.shape)) if floating else np.ones(leaf.shape)
    ).astype(leaf.dtype)

  state = jax.tree.map(draw, _initializer(model).global_train_state_shape.state_dict())
  with checkpoints.CheckpointManager(
    model_dir, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(
      1, state, metadata={'run': {'start_step': 0}, **starting_point.layout_metadata(model)}
    )
  return model_dir, state


def _start(model_dir, **kwargs):
  restore = checkpoints.RestoreCheckpointConfig(str(model_dir), restore_dataset=False, **kwargs)
  return starting_point.choose_start('/nowhere', checkpoints.CheckpointConfig(restore=restore))


def test_a_custom_checkpointer_is_rejected(tmp_path):
  with pytest.raises(
    ConfigError, match='checkpointer_cls` must be a class whose `restore` is that of Checkpoint'
  ):
    _start(tmp_path, checkpointer_cls=lambda **kwargs: None)
  save = checkpoints.SaveCheckpointConfig(checkpointer_cls=lambda **kwargs: None)
  with pytest.raises(
    ConfigError, match='`state_transformation_fns`, and choose steps by `policies`'
  ):
    starting_point.choose_start(str(tmp_path), checkpoints.CheckpointConfig(save))


def _logits(model, params):
  batch = {
    name: np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % 32
    for name, shape in _SPEC.items()
  }
  return np.asarray(jax.jit(model.compute_logits)(params, batch)[0])


@pytest.mark.parametrize('num_partitions', [pytest.param(1, marks=pytest.mark.full), 4])
def test_the_same_layout_on_another_mesh(saved, num_partitions):
  model_dir, stored = saved
  model = _model('t5')
  initializer = _initializer(model, num_partitions)
  partitioner = _partitioner(num_partitions)
  state, restored = starting_point.make_state(
    _start(model_dir), initializer, partitioner, model, jax.random.key(1)
  )
  assert int(state.step) == restored.step == 1
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.state_dict()), stored)
  shardings = partitioner.get_shardings(initializer.train_state_axes)
  shardings = tree_utils.flatten_dict(shardings.state_dict())
  for name, x in tree_utils.flatten_dict(state.state_dict()).items():
    assert x.sharding.is_equivalent_to(shardings[name], x.ndim), name


def test_another_layout_gives_the_same_model(saved):
  model_dir, stored = saved
  model = _model('scalable_t5')
  initializer = _initializer(model)
  state, _ = starting_point.make_state(
    _start(model_dir), initializer, _partitioner(2), model, jax.random.key(1)
  )
  assert int(state.step) == 1 and 'encoder' in state.params['encoder']
  expected = _logits(_model('t5'), stored['target'])
  np.testing.assert_allclose(_logits(model, state.params), expected, rtol=1e-5, atol=1e-5)
  # Adam's moments follow.
  moment = state.state_dict()['state']['param_states']['0']['mu']['encoder']['encoder']['mlp'][
    'wo'
  ]['kernel']
  stored_moment = stored['state']['param_states']['0']['mu']['encoder']['layers_1']['mlp']['wo'][
    'kernel'
  ]
  np.testing.assert_array_equal(moment[:, 1], stored_moment)


def test_factored_moments_cannot_follow_and_say_so(saved, tmp_path):
  model = _model(
    't5', optimizers.Adafactor(logical_factor_rules=optimizers.standard_logical_factor_rules())
  )
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    shapes = _initializer(model).global_train_state_shape.state_dict()
    manager.save(0, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
  other = _model(
    'scalable_t5',
    optimizers.Adafactor(logical_factor_rules=optimizers.standard_logical_factor_rules()),
  )
  with pytest.raises(CheckpointError, match='assignment_map'):
    starting_point.make_state(
      _start(tmp_path), _initializer(other), _partitioner(2), other, jax.random.key(1)
    )


def test_a_restored_state_is_held_once(saved):
  model, partitioner, initializer = (
    _model('t5', scan_layers=True),
    _partitioner(2),
    _initializer(_model('t5')),
  )
  trainer = trainer_lib.Trainer(
    model,
    initializer.global_train_state_shape,
    partitioner,
    [],
    None,
    initializer.train_state_axes,
    jax.random.key(0),
    lambda step: 1e-3,
  )
  restored = starting_point.set_state(
    trainer, _start(saved[0]), initializer, partitioner, model, jax.random.key(1)
  )
  assert restored.step == trainer.step == 1 and not restored.state
  single = [
    weakref.ref(x)
    for path, x in tree_utils.named_leaves(trainer.train_state.params)
    if 'layers_' in path
  ]
  assert trainer.step_state and not any(reference() for reference in single)


class _OwnInitializer(state_init.TrainStateInitializer):
  """A user's initializer, which knows nothing of stacked layers."""

  def from_scratch(self, init_rng):
    return super().from_scratch(init_rng).replace_step(7)


@pytest.mark.parametrize(
  'initializer_cls, is_stacked',
  [(state_init.TrainStateInitializer, True), (_OwnInitializer, False)],
)
def test_a_new_state_is_stacked_from_the_beginning_by_our_initializer(initializer_cls, is_stacked):
  model, partitioner, key = _model('t5', scan_layers=True), _partitioner(2), jax.random.key(1)
  initializer = initializer_cls(
    model.optimizer_def, model.get_initial_variables, _SPEC, partitioner
  )
  trainer = trainer_lib.Trainer(
    model,
    initializer.global_train_state_shape,
    partitioner,
    [],
    None,
    initializer.train_state_axes,
    key,
    lambda step: 1e-3,
  )
  assert starting_point.initial_stacks(trainer, initializer, partitioner) == (
    trainer.stacked_layers if is_stacked else layer_stacks.LayerStacks()
  )
  in_host_memory = partitioning.PjitPartitioner(num_partitions=2, params_on_devices=False)
  assert not starting_point.initial_stacks(trainer, initializer, in_host_memory)
  made = starting_point.set_state(
    trainer, starting_point.StartingPoint(), initializer, partitioner, model, key
  )
  assert made is None and trainer.stacked_layers and trainer.step == (0 if is_stacked else 7)
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(trainer.train_state),
    jax.device_get(initializer.from_scratch(key)),
  )


@pytest.mark.full  # by default, tests/checkpoints/sources/test_sources.py restores into it
def test_parameters_in_host_memory_come_to_the_devices(saved):
  model_dir, stored = saved
  model = _model('t5')
  partitioner = partitioning.PjitPartitioner(num_partitions=2, params_on_devices=False)
  initializer = state_init.TrainStateInitializer(
    model.optimizer_def, model.get_initial_variables, _SPEC, partitioner
  )
  for start in (_start(model_dir), starting_point.StartingPoint()):
    state, _ = starting_point.make_state(start, initializer, partitioner, model, jax.random.key(1))
    assert all(
      isinstance(x, jax.Array) and len(x.sharding.device_set) == 8 for x in jax.tree.leaves(state)
    )
    if start.path is not None:
      jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), stored['target'])


def test_the_runs_own_checkpoint_comes_first_and_a_damaged_one_is_passed_over(saved, tmp_path):
  configured = checkpoints.CheckpointConfig(
    restore=checkpoints.RestoreCheckpointConfig(str(saved[0]))
  )
  assert starting_point.choose_start(str(tmp_path), configured).path == str(
    saved[0] / 'checkpoint_1'
  )
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    for step in (3, 5):
      manager.save(
        step,
        {'target': {'w': np.ones(3, np.float32)}, 'state': {'step': np.int32(step)}},
        metadata={'run': {'start_step': 1}},
      )
  start = starting_point.choose_start(str(tmp_path), configured)
  assert (
    start.path == str(tmp_path / 'checkpoint_5')
    and start.resumes
    and start.metadata['run'] == {'start_step': 1}
  )
  _damage(tmp_path / 'checkpoint_5')
  assert starting_point.choose_start(str(tmp_path), configured).path == str(
    tmp_path / 'checkpoint_3'
  )
  _damage(tmp_path / 'checkpoint_3')
  with pytest.raises(CheckpointDamagedError, match='All 2 checkpoint'):
    starting_point.choose_start(str(tmp_path), configured)


def test_a_converted_checkpoint_cannot_be_resumed(saved, tmp_path):
  convert.convert(str(saved[0] / 'checkpoint_1'), str(tmp_path / 'made'), to='t5x_lite')
  assert 'run' not in checkpoints.read_metadata(tmp_path / 'made' / 'checkpoint_1')
  with pytest.raises(
    ConfigError,
    match='was written by `convert` .checkpoint_1. and cannot be resumed.*another MODEL_DIR',
  ):
    starting_point.choose_start(str(tmp_path / 'made'), checkpoints.CheckpointConfig())
  configured = checkpoints.CheckpointConfig(
    restore=checkpoints.RestoreCheckpointConfig(str(tmp_path / 'made'))
  )
  assert starting_point.choose_start(str(tmp_path / 'run'), configured).path == str(
    tmp_path / 'made' / 'checkpoint_1'
  )


def _damage(path):
  largest = max(
    (p for p in (path / 'state').rglob('*') if p.is_file()), key=lambda p: p.stat().st_size
  )
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)


@pytest.mark.parametrize(
  'given,message',
  [
    (None, 'got None. Set OPTIMIZER'),
    (optax.adamw(0.1), 'got a bare optax transformation. .*optimizers.OptaxWrapper'),
    (optimizers.adamw, 'got the function adamw. Call it'),
    (optimizers.Adafactor, 'got the class Adafactor. Call it'),
    ('optimizers.lion', 'got .*Set --gin.OPTIMIZER=.@optimizers.lion\\(\\). with'),
    ('adamw', 'got .*Set --gin.OPTIMIZER=.@optimizers.adamw\\(\\). with'),
    ('my adam', 'got .my adam.. Set OPTIMIZER'),
  ],
)
def test_other_objects_than_optimizers_are_rejected(given, message):
  with pytest.raises(ConfigError, match=message):
    starting_point.check_optimizer(types.SimpleNamespace(optimizer_def=given))


def test_a_run_folder_instead_of_a_checkpoint(saved):
  start = _start(saved[0], mode='specific')
  with pytest.raises(
    CheckpointError, match=r"got a directory of checkpoints. .*the newest is '.*/checkpoint_1'"
  ):
    _ = start.step


def test_nothing_to_restore(tmp_path):
  for restore in (None, checkpoints.RestoreCheckpointConfig([])):
    start = starting_point.choose_start(
      str(tmp_path), checkpoints.CheckpointConfig(restore=restore)
    )
    assert start.path is None and start.description == 'new parameters'


# ---- Transforms of a dry run ----------------------------------------------------------------------------------------


def _renamed(state, wanted, *, is_resuming):
  """A transform by NumPy functions of shapes and jax.numpy: it can be traced."""
  del wanted, is_resuming
  target = dict(state['target'])
  target['token_embedder'] = {
    'embedding': jax.numpy.concatenate([target['token_embedder']['embedding']] * 2)
  }
  return {**state, 'target': target}


def _by_values(state, wanted, *, is_resuming):
  del wanted, is_resuming
  return jax.tree.map(lambda leaf: np.where(np.isfinite(leaf), leaf, 0).astype(leaf.dtype), state)


def _by_a_method_of_arrays(state, wanted, *, is_resuming):
  del wanted, is_resuming
  return jax.tree.map(
    lambda leaf: np.frombuffer(leaf.tobytes(), leaf.dtype).reshape(leaf.shape), state
  )


def test_a_dry_run_applies_transforms_to_shapes(saved):
  model = _model('t5')
  shape = _initializer(model).global_train_state_shape

  def check(*fns):
    return starting_point.check_start(
      _start(saved[0], state_transformation_fns=fns), shape, model, applies_transforms=True
    )

  check(lambda state, wanted, *, is_resuming: state)
  with pytest.raises(CheckpointError, match=r'embedding: stored \(64, 8\), wanted \(32, 8\)'):
    check(_renamed)
  # A run leaves the check to its restore.
  starting_point.check_start(_start(saved[0], state_transformation_fns=(_renamed,)), shape, model)


@pytest.mark.parametrize(
  'fn', [_by_values, pytest.param(_by_a_method_of_arrays, marks=pytest.mark.full)]
)
def test_a_dry_run_says_which_transform_it_cannot_check(saved, fn, caplog):
  model = _model('t5')
  start = _start(saved[0], state_transformation_fns=(fn,))
  starting_point.check_start(
    start, _initializer(model).global_train_state_shape, model, applies_transforms=True
  )
  (record,) = [record for record in caplog.records if 'cannot tell whether' in record.getMessage()]
  assert record.levelname == 'WARNING' and f'{fn.__module__}.{fn.__name__} (' in record.getMessage()
  restored, _ = starting_point.make_state(start, _initializer(model), _partitioner(2), model, None)
  assert int(restored.step) == 1


def test_a_dry_run_transforms_the_other_layout_too(saved, caplog):
  model = _model('scalable_t5')
  starting_point.check_start(
    _start(saved[0], state_transformation_fns=(lambda state, wanted, *, is_resuming: state,)),
    _initializer(model).global_train_state_shape,
    model,
    applies_transforms=True,
  )
  assert 'cannot tell' not in caplog.text


def test_custom_blocks_are_recorded_and_options_without_effect_are_not():
  model = _model('t5')
  own = starting_point.layout_metadata(model)['network']
  assert own['num_relpos_buckets'] == 32 and 'custom_blocks' not in own

  def attention_fn(stack, layer):
    return (
      functools.partial(t5.t5_attention) if (stack, layer) == ('decoder', 1) else t5.t5_attention
    )

  def own_in_the_last_layer(stack, layer):
    if (stack, layer) == ('decoder', 1):
      return (t5.dense_feed_forward, functools.partial(t5.dense_feed_forward))
    return t5.dense_feed_forward

  wrapped = functools.wraps(t5.t5_attention_everywhere)(
    lambda *args: t5.t5_attention_everywhere(*args)
  )
  rotary = t5.PositionEncoding(encode_positions_fn=lambda x, positions: x)
  relpos = {'relpos_bias_tables', 'num_relpos_buckets', 'max_relpos_distance'}
  for fields, custom, left_out in (
    (dict(attention_fn=attention_fn), ['attention_fn'], set()),
    (dict(attention_fn=wrapped), None, set()),
    (dict(feed_forward_fn=own_in_the_last_layer), ['feed_forward_fn'], set()),
    (dict(feed_forward_fn=lambda stack, layer: (t5.dense_feed_forward,) * 2), None, set()),
    (dict(position_encoding=rotary), ['position_encoding'], relpos),
    (
      dict(attention_fn=attention_fn, position_encoding=rotary),
      ['attention_fn', 'position_encoding'],
      relpos,
    ),
  ):
    model.module = t5.Transformer(model.module.config, **fields)
    recorded = starting_point.layout_metadata(model)['network']
    assert recorded.get('custom_blocks') == custom and set(own) - set(recorded) == left_out


@pytest.mark.parametrize(
  'num_saved, handles, warns', [(1, False, False), (2, True, False), (2, False, True)]
)
def test_another_number_of_processes_is_reported_unless_the_source_handles_it(
  num_saved, handles, warns, caplog
):
  start = starting_point.StartingPoint(path='runs/a/checkpoint_3', resumes=True)
  starting_point.warn_of_process_count(
    start, num_saved, types.SimpleNamespace(handles_process_count=handles)
  )
  text = (
    'The training data of runs/a/checkpoint_3 (this run) has the positions of 2 process(es), and this run has '
    '1: all continue at the position of process 0, so that examples may be repeated or omitted.'
  )
  assert (text in caplog.text) == warns == bool(caplog.text)


@pytest.mark.parametrize('form', ['t5x', 't5x_orbax'])
def test_a_directory_of_t5x_is_not_taken_for_a_new_run(tmp_path, form):
  run = str(t5x_samples.unpack(tmp_path)[form])
  for restore in (None, checkpoints.RestoreCheckpointConfig(path=[])):
    with pytest.raises(
      ConfigError,
      match='has checkpoints of T5X, the newest checkpoint_7, .* continue from the newest',
    ):
      starting_point.choose_start(run, checkpoints.CheckpointConfig(restore=restore))
  start = starting_point.choose_start(
    run,
    checkpoints.CheckpointConfig(
      restore=checkpoints.RestoreCheckpointConfig(path=run, mode='latest')
    ),
  )
  assert start.path.endswith('checkpoint_7') and not start.resumes


def test_a_run_of_an_earlier_version_is_told_once_that_losses_are_defined_anew(saved, caplog):
  path = str(saved[0] / 'checkpoint_1')
  start = starting_point.StartingPoint(
    path=path, resumes=True, restore_cfg=checkpoints.RestoreCheckpointConfig(path)
  )
  with caplog.at_level('INFO'):
    facts = starting_point.facts_of_run(start, 0)
    assert caplog.text.count('continued from an earlier version: losses over several batches') == 1
    start = dataclasses.replace(start, metadata={'run': facts})
    assert starting_point.facts_of_run(start, 0) == facts
    starting_point.facts_of_run(starting_point.StartingPoint(), 0)
  assert caplog.text.count('earlier version') == 1


@pytest.mark.parametrize(
  'resumes, recorded, expected',
  [
    (True, {'run': {'data': {'seed': 0}}}, True),  # an earlier version recorded it
    (True, {}, True),
    (True, {'run': {'data': {'earlier_sentinels': True}}}, True),  # and it was resumed
    (True, {'run': {'data': {'earlier_sentinels': False}}}, False),
    (False, {'run': {'data': {}}}, False),  # a new run from its checkpoint
  ],
)
def test_runs_of_earlier_versions_keep_the_ids_of_sentinels(resumes, recorded, expected):
  start = starting_point.StartingPoint(path='x', resumes=resumes, metadata=recorded)
  assert starting_point.has_earlier_sentinels(start) == expected
