"""Start of a run from all formats; parts that a format lacks are made from the restored parameters."""

import dataclasses
import functools
import json
import os
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adafactor
from t5x_lite import checkpoints
from t5x_lite import errors
from t5x_lite import optimizers
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.apps.common import restore as restore_lib
from t5x_lite.apps.common import starting_point
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.networks import decoder_only
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from t5x_lite.train_state import FlaxOptimTrainState
from tests import golden_data
from tests.checkpoints.sources import t5x_samples as samples
from tests.networks import network_cases

FORMATS = ('t5x_lite', 't5x_orbax', 't5x', 'hugging_face')
_FULL = pytest.mark.full
# Orbax's forms among them in long runs only, where nothing depends on the form.
FEW_FORMATS = (
  pytest.param('t5x_lite', marks=_FULL),
  pytest.param('t5x_orbax', marks=_FULL),
  't5x',
  'hugging_face',
)
Restore = checkpoints.RestoreCheckpointConfig
DROP = dict(assignment_map=[('state/param_states/.*', None)])


def golden_params():
  arrays = golden_data.load(f't5x/{samples.NAME}')[1]
  return {
    name.removeprefix('params/'): value
    for name, value in arrays.items()
    if name.startswith('params/')
  }


def write_hugging_face(path, params, family='t5_1_1', **metadata):
  architecture = hugging_face.Architecture.from_shapes(params, metadata)
  hugging_face.write_folder(path, architecture, hugging_face.FAMILIES[family], params.__getitem__)


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
  """The same parameters in every form, by its name: (directory of checkpoints, or None; the folder itself)."""
  root = tmp_path_factory.mktemp('forms')
  found = {name: (folder, folder / 'checkpoint_7') for name, folder in samples.unpack(root).items()}
  state = checkpoints.load(found['t5x'][1])
  with checkpoints.CheckpointManager(
    root / 'ours', save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    model = samples.model()
    manager.save(
      7,
      state,
      metadata=starting_point.layout_metadata(model)
      | {'optimizer': {'name': 'adafactor', 'evaluates_other_params': False}},
    )
  write_hugging_face(root / 'published', golden_params())
  return found | {
    't5x_lite': (root / 'ours', root / 'ours/checkpoint_7'),
    'hugging_face': (root / 'published', root / 'published'),
  }


@functools.cache
def partitioner(**kwargs):
  return partitioning.PjitPartitioner(num_partitions=2, **kwargs)


@functools.cache
def initializer_of(layout='t5', optimizer='adafactor'):
  model = samples.model(OPTIMIZERS[optimizer](), param_layout=layout)
  return model, samples.initializer(model, partitioner())


OPTIMIZERS = {
  'adafactor': adafactor.Adafactor,
  'schedule_free': lambda: optimizers.schedule_free_adamw(learning_rate=0.1),
  'multi': lambda: optimizers.MultiOptimizer(
    [
      ('embedding$|kernel$', optimizers.schedule_free_adamw(learning_rate=0.1)),
      ('scale$', adafactor.Adafactor()),
    ]
  ),
}


def start_from(path, model_dir='/nowhere', **cfg):
  return starting_point.choose_start(
    str(model_dir),
    checkpoints.CheckpointConfig(restore=Restore(str(path), restore_dataset=False, **cfg)),
  )


def make_state(start, layout='t5', optimizer='adafactor'):
  """Return (flat state, restored checkpoint) after the checks of a run."""
  model, initializer = initializer_of(layout, optimizer)
  starting_point.check_start(start, initializer.global_train_state_shape, model)
  state, restored = starting_point.make_state(
    start, initializer, partitioner(), model, jax.random.key(1)
  )
  shardings = tree_utils.flatten_dict(
    partitioner().get_shardings(initializer.train_state_axes).state_dict()
  )
  flat = tree_utils.flatten_dict(state.state_dict())
  for name, leaf in flat.items():
    assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim), name
  return flat, restored


def fresh_state(params, optimizer):
  """Return the result of the optimizer's `create` for parameters, on one device."""
  model, _ = initializer_of('t5', optimizer)
  axes = jax.eval_shape(
    lambda: model.get_initial_variables(jax.random.key(0), samples.INPUT_SHAPES)
  )['params_axes']
  state = FlaxOptimTrainState.create(
    model.optimizer_def, {'params': tree_utils.unflatten_dict(params), 'params_axes': axes}
  )
  return tree_utils.flatten_dict(state.state_dict())


# ---- which form it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FORMATS)
def test_the_form_is_found_by_content(stored, tmp_path, name):
  parent, path = stored[name]
  copy = shutil.copytree(path, tmp_path / 'of another name')
  assert checkpoints.detect_format(path) == checkpoints.detect_format(copy) == name
  source = checkpoints.open_source(copy)
  assert (source.format, source.path, source.step) == (
    name,
    str(copy),
    0 if name == 'hugging_face' else 7,
  )
  assert (
    source.has_optimizer_state == (name != 'hugging_face')
    and source.metadata['param_layout'] == 't5'
  )
  if path != parent:
    assert checkpoints.detect_format(parent) is None
  values = source.read({f'target/{param}': (np.float32, None) for param in golden_params()})
  for param, value in golden_params().items():
    np.testing.assert_array_equal(values[f'target/{param}'], value, err_msg=param)
  np.testing.assert_array_equal(
    source.read_array('target/decoder/decoder_norm/scale'),
    values['target/decoder/decoder_norm/scale'],
  )


def _touch(*names):
  def make(root):
    for name in names:
      (root / name).parent.mkdir(parents=True, exist_ok=True)
      (root / name).write_text('model_checkpoint_path: "model.ckpt-1"')

  return make


@pytest.mark.parametrize(
  'make, message',
  [
    (
      _touch('model.ckpt-1000000.index', 'model.ckpt-1000000.meta', 'checkpoint'),
      'a TensorFlow checkpoint of Mesh TensorFlow.*published in both',
    ),
    (
      _touch('pytorch_model.bin', 'config.json'),
      r'weights of PyTorch.*pytorch_model\.bin.*save_pretrained',
    ),
    (_touch('pytorch_model-00001-of-00002.bin', 'config.json'), 'weights of PyTorch'),
    (_touch('flax_model.msgpack', 'config.json'), "transformers' Flax models.*from_flax=True"),
    (_touch('tf_model.h5', 'config.json'), 'from_tf=True'),
    (_touch('model.safetensors'), 'safetensors without a config.json'),
    (
      _touch('adapter_config.json', 'adapter_model.safetensors'),
      'an adapter of PEFT.*INITIAL_ADAPTER_PATH.*--base=MODEL',
    ),
    (_touch('config.json', 'spiece.model'), 'a Hugging Face folder without weights'),
    (_touch('checkpoint'), 'must be a checkpoint of t5x_lite .*, got a folder with none of them'),
    (_touch('manifest.json', 'predict.stablehlo'), 'none of them'),
    (
      _touch('checkpoint_5/x', 'checkpoint_30/x'),
      "must be a single checkpoint, got a directory of checkpoints. .*the newest is .*_30'.*'latest'",
    ),
    (_touch(), 'none of them'),
  ],
)
def test_unreadable_sources_are_errors(tmp_path, make, message):
  make(tmp_path)
  assert checkpoints.detect_format(tmp_path) is None
  with pytest.raises(errors.CheckpointError, match=message):
    checkpoints.open_source(tmp_path)
  with pytest.raises(errors.CheckpointError, match=message):
    checkpoints.load(tmp_path)
  if 'none of them' not in message and 'directory of' not in message:
    with pytest.raises(
      errors.CheckpointError, match=message
    ):  # And so where a directory of checkpoints is expected.
      start_from(tmp_path)


def test_paths_that_are_not_folders(stored, tmp_path):
  (stored['t5x'][1] / 'notes.txt').touch()
  with pytest.raises(
    errors.CheckpointError, match=f'got a file. Give its folder, .*{stored["t5x"][1]}'
  ):
    checkpoints.open_source(stored['t5x'][1] / 'notes.txt')
  with pytest.raises(
    errors.CheckpointError, match="got a missing path. Did you mean 'checkpoint_7'"
  ):
    checkpoints.open_source(stored['t5x'][0] / 'checkpoint_8')
  with pytest.raises(errors.ConfigError, match='must be a path on a disk'):
    checkpoints.open_source('ftp://bucket/checkpoint_1')
  assert checkpoints.detect_format(tmp_path / 'none') is None


# ---- starting from it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FORMATS)
@pytest.mark.parametrize('mode', ['latest', 'specific'])
def test_one_binding_is_enough(stored, tmp_path, name, mode, caplog):
  """finetune.gin says 'specific' and takes the folder; 'latest' takes a directory of checkpoints too."""
  parent, path = stored[name]
  start = start_from(path if mode == 'specific' else parent, mode=mode)
  assert (start.path, start.resumes) == (str(path), False)
  if name in ('t5x', 't5x_orbax') and mode == 'latest':
    assert 'of step 7' in caplog.text and 'cannot be verified' in caplog.text
  with pytest.raises(errors.CheckpointError, match="must be one checkpoint to train from.*'all'"):
    start_from(parent, mode='all')


@pytest.mark.parametrize(
  'name', ['t5x_lite', pytest.param('t5x_orbax', marks=_FULL), 't5x', 'hugging_face']
)
def test_training_begins_with_it(stored, name):
  flat, restored = make_state(start_from(stored[name][1], mode='specific'))
  expected = {f'target/{name}': value for name, value in golden_params().items()}
  if name == 'hugging_face':
    expected = fresh_state(golden_params(), 'adafactor')
  else:
    expected = tree_utils.flatten_dict(checkpoints.load(stored['t5x'][1]))
  assert set(flat) == set(expected)
  for key, value in expected.items():
    np.testing.assert_array_equal(flat[key], value, err_msg=key)
  assert (restored.step, restored.format) == (0 if name == 'hugging_face' else 7, name)
  assert (
    restored.is_verified == (name == 't5x_lite')
    and not restored.is_resuming
    and restored.data_state is None
  )


@pytest.mark.parametrize(
  'name, form',
  [
    ('t5x', 'checkpoint'),
    ('t5x', './checkpoint'),
    ('t5x_lite', 'checkpoint'),  # has no such file
    ('t5x_lite', 'manifest.json'),
    ('t5x_lite', 'state'),
    ('t5x_lite', 'state/_METADATA'),
  ],
)
def test_a_checkpoint_may_be_named_by_a_file_in_it(stored, name, form):
  path = stored[name][1]
  start = start_from(f'{path}/{form}', mode='specific')
  assert start.path == str(path) == checkpoints.open_source(f'{path}/{form}').path
  assert checkpoints.open_source(f'{path}/').path == f'{path}/'  # Other paths stay.
  restored = make_state(start)[1]
  assert (restored.step, restored.is_verified) == (7, name == 't5x_lite')


@pytest.mark.parametrize('name', ['t5x_lite', 't5x'])
def test_a_step_that_is_left_out_is_0_for_the_run_too(stored, name):
  """The plan of the run and the state agree, or its checkpoints would be called after another step than they hold."""
  cfg = dict(assignment_map=[('state/step', None)], fallback_to_scratch=True)
  start = start_from(stored[name][1], mode='specific', **cfg)
  flat, _ = make_state(start)
  assert start.step == int(flat['state/step']) == 0
  np.testing.assert_array_equal(
    flat['target/token_embedder/embedding'], golden_params()['token_embedder/embedding']
  )
  assert (
    start_from(
      stored[name][1], mode='specific', assignment_map=[('state/param_states/.*', None)]
    ).step
    == 7
  )


@pytest.mark.parametrize(
  'name, optimizer',
  [
    pytest.param('hugging_face', 'schedule_free', marks=_FULL),
    pytest.param('hugging_face', 'multi', marks=_FULL),
    ('t5x', 'schedule_free'),
  ],
)
def test_an_optimizer_that_is_not_stored_begins_with_the_restored_parameters(
  stored, name, optimizer, caplog
):
  """Not with those that were drawn: Schedule-Free keeps a copy of the parameters."""
  cfg = {} if name == 'hugging_face' else DROP
  with caplog.at_level('INFO'):
    flat, restored = make_state(
      start_from(stored[name][1], mode='specific', **cfg), optimizer=optimizer
    )
  assert "made from the restored parameters: the optimizer's state (" in caplog.text
  assert ('has no manifest' in caplog.text) == (
    name != 'hugging_face'
  )  # where there is never one, it says nothing
  expected = fresh_state(golden_params(), optimizer)
  expected['state/step'] = restored.step
  assert set(flat) == set(expected)
  for key, value in expected.items():
    np.testing.assert_array_equal(flat[key], value, err_msg=key)
  copies = [key for key in flat if key.endswith('/z/token_embedder/embedding')]
  assert len(copies) == 1
  np.testing.assert_array_equal(flat[copies[0]], golden_params()['token_embedder/embedding'])


def test_another_optimizer_does_not_go_unnoticed(stored):
  """Stored parts are used or an error; only missing parts are made."""
  for name in ('t5x', 't5x_lite'):
    with pytest.raises(
      errors.CheckpointError, match='missing from the checkpoint(.|\n)*in the checkpoint only'
    ):
      make_state(start_from(stored[name][1], mode='specific'), optimizer='schedule_free')


def test_an_average_of_parameters_and_parameters_in_host_memory(stored):
  model, initializer = samples.model(), None
  its_partitioner = partitioner(params_on_devices=False)
  initializer = samples.initializer(model, its_partitioner)
  shape = initializer.global_train_state_shape
  initializer.global_train_state_shape = shape.replace(param_average=shape.params)
  initializer.train_state_axes = its_partitioner.get_mesh_axes(initializer.global_train_state_shape)
  start = start_from(stored['hugging_face'][1])
  starting_point.check_start(start, initializer.global_train_state_shape, model)
  state, _ = starting_point.make_state(
    start, initializer, its_partitioner, model, jax.random.key(1)
  )
  for name, leaf in tree_utils.flatten_dict(state.param_average).items():
    np.testing.assert_array_equal(leaf, golden_params()[name])
    assert len(leaf.sharding.device_set) == 8


def test_a_run_resumes_only_from_its_complete_state(stored, tmp_path):
  state = checkpoints.load(stored['t5x'][1])
  del state['state']['param_states']
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(7, state, metadata={'param_layout': 't5'})
  start = start_from(stored['hugging_face'][1], model_dir=tmp_path)
  assert (start.path, start.resumes) == (str(tmp_path / 'checkpoint_7'), True)
  with pytest.raises(
    errors.CheckpointError, match='missing from the checkpoint:\n    state/param_states'
  ):
    make_state(start)
  # Another run may begin with it.
  flat, restored = make_state(start_from(tmp_path))
  assert restored.step == 7 and flat['state/param_states/token_embedder/embedding/v'].shape == (
    64,
    16,
  )


def test_a_run_resumes_only_from_its_own_checkpoints(stored, tmp_path):
  """A model directory with checkpoints of T5X, or a Hugging Face folder, is not a run directory."""
  shutil.copytree(stored['t5x'][1], tmp_path / 'run/checkpoint_9')
  published = shutil.copytree(stored['hugging_face'][1], tmp_path / 'published')
  for model_dir in (tmp_path / 'run', published):
    start = start_from(stored['t5x_lite'][0], model_dir=model_dir)
    assert (start.path, start.resumes) == (str(stored['t5x_lite'][1]), False)


def test_the_newest_that_can_be_read_of_other_programs(stored, tmp_path, caplog):
  for step in (9, 100):
    shutil.copytree(stored['t5x'][1], tmp_path / f'checkpoint_{step}')
  (tmp_path / 'checkpoint_101').mkdir()
  assert start_from(tmp_path).path == str(tmp_path / 'checkpoint_100')
  # Only a checkpoint of t5x_lite among them can be verified.
  shutil.copytree(stored['t5x_lite'][1], tmp_path / 'checkpoint_7')
  assert start_from(tmp_path).path == str(tmp_path / 'checkpoint_7')
  assert 'Ignoring checkpoint(s) [9, 100, 101]' in caplog.text


def test_a_process_that_sees_the_directory_later_follows_the_lead(stored, tmp_path, monkeypatch):
  """Or it would leave the others waiting."""
  shutil.copytree(stored['t5x'][1], tmp_path / 'checkpoint_9')
  said = iter([np.int32([1, 0]), np.int32(9)])
  monkeypatch.setattr(checkpoints.discovery, 'all_steps', lambda *args, **kwargs: [])
  monkeypatch.setattr(
    checkpoints.restoring.choice.multihost, 'broadcast_from_lead', lambda value: next(said)
  )
  _, paths = checkpoints.get_first_valid_restore_config_and_paths([Restore(str(tmp_path))])
  assert paths == [str(tmp_path / 'checkpoint_9')] and next(said, None) is None


def test_a_folder_called_like_a_checkpoint(stored, tmp_path):
  named = shutil.copytree(stored['hugging_face'][1], tmp_path / 'checkpoint_500')
  assert start_from(named).path == str(named)
  with pytest.raises(errors.CheckpointError, match="is a checkpoint, and mode='latest' expects"):
    start_from(stored['t5x'][1])


@pytest.mark.parametrize('name', FORMATS)
def test_another_network_is_rejected_before_anything_is_computed(stored, name):
  model = samples.model(emb_dim=8, num_decoder_layers=3)
  initializer = samples.initializer(model, partitioner())
  with pytest.raises(errors.CheckpointError) as error:
    starting_point.check_start(
      start_from(stored[name][1], mode='specific'), initializer.global_train_state_shape, model
    )
  for words in (
    'target/decoder/layers_2',
    'missing from the checkpoint',
    'of another shape',
    'target/decoder/decoder_norm/scale: stored (16,), wanted (8,)',
  ):
    assert words in str(error.value)


@pytest.mark.parametrize('name', ['t5x', 'hugging_face'])
def test_another_network_of_the_other_layout_is_rejected_before_values_are_read(
  stored, name, monkeypatch
):
  monkeypatch.setattr(sources.StateSource, 'read', None)
  attention = 'target/decoder/decoder/encoder_decoder_attention/key/kernel'
  for overrides, words in (
    (dict(num_decoder_layers=3), f'{attention}: stored (16, 2, 2, 8), wanted (16, 3, 2, 8)'),
    (
      dict(mlp_activations=('relu',)),
      'missing from the checkpoint:\n    target/decoder/decoder/mlp/wi/kernel',
    ),
  ):
    model = samples.model(OPTIMIZERS['schedule_free'](), param_layout='scalable_t5', **overrides)
    initializer = samples.initializer(model, partitioner())
    with pytest.raises(errors.CheckpointError) as error:
      starting_point.check_start(
        start_from(stored[name][1], mode='specific'), initializer.global_train_state_shape, model
      )
    assert words in str(error.value)


# ---- the other layout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FEW_FORMATS)
def test_into_the_stacked_layout(stored, name):
  flat, _ = make_state(
    start_from(stored[name][1], mode='specific', **({} if name == 'hugging_face' else DROP)),
    'scalable_t5',
    'schedule_free',
  )
  config = initializer_of('scalable_t5', 'schedule_free')[0].module.config
  expected = tree_utils.flatten_dict(
    param_layouts.convert(tree_utils.unflatten_dict(golden_params()), 't5', 'scalable_t5', config)
  )
  assert expected['encoder/encoder/attention/query/kernel'].shape == (16, 2, 2, 8)
  copies = {key.split('/z/')[1]: value for key, value in flat.items() if '/z/' in key}
  assert set(copies) == set(expected)
  for param, value in expected.items():
    np.testing.assert_array_equal(flat[f'target/{param}'], value, err_msg=param)
    np.testing.assert_array_equal(copies[param], value, err_msg=param)


def test_errors_of_unconvertible_statistics_name_the_remedy(stored):
  """The remedy is the one of `test_into_the_stacked_layout`: parameters that are missing stay errors with it."""
  with pytest.raises(errors.CheckpointError) as error:
    make_state(start_from(stored['t5x'][1], mode='specific'), 'scalable_t5', 'schedule_free')
  assert f'assignment_map = {[("state/param_states.*", None)]}' in str(error.value)
  assert 'fallback_to_scratch' not in str(error.value)


@pytest.mark.parametrize('layout', [pytest.param('t5', marks=_FULL), 'scalable_t5'])
def test_tables_in_every_layer(tmp_path, layout):
  """umT5's are different in each layer; the stacked layout keeps them apart, too."""
  fields = dict(relpos_bias_tables='per_layer')
  params = tree_utils.flatten_dict(
    network_cases.random_params(network_cases.golden_config(samples.NAME, **fields))
  )
  write_hugging_face(tmp_path / 'umt5', params, 'umt5', **fields)
  model = samples.model(OPTIMIZERS['schedule_free'](), param_layout=layout, **fields)
  initializer = samples.initializer(model, partitioner())
  start = start_from(tmp_path / 'umt5')
  starting_point.check_start(start, initializer.global_train_state_shape, model)
  state, _ = starting_point.make_state(start, initializer, partitioner(), model, jax.random.key(1))
  flat = tree_utils.flatten_dict(state.params)
  for layer in (0, 1):
    value = params[f'decoder/layers_{layer}/relpos_bias/rel_embedding']
    read = (
      flat[f'decoder/layers_{layer}/relpos_bias/rel_embedding']
      if layout == 't5'
      else flat['decoder/decoder/relpos_bias/rel_embedding'][:, layer]
    )
    np.testing.assert_array_equal(read, value)


# ---- without training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name, mode',
  [
    ('t5x_lite', 'latest'),
    ('hugging_face', 'latest'),
    *(
      pytest.param(*case, marks=_FULL)
      for case in (
        ('t5x', 'latest'),
        ('t5x_orbax', 'all'),
        ('t5x', 'specific'),
        ('hugging_face', 'all'),
      )
    ),
  ],
)
def test_evaluation_and_all_that_restores_like_it(stored, name, mode):
  parent, path = stored[name]
  # An optimizer that evaluates other parameters needs its state, which is not stored.
  model, _ = initializer_of(
    't5', 'schedule_free' if name in ('hugging_face', 't5x') else 'adafactor'
  )
  results = restore_lib.restore_for_inference(
    model,
    Restore(str(path if mode == 'specific' else parent), mode=mode),
    partitioner(),
    samples.INPUT_SHAPES,
  )
  (result,) = list(results)
  assert (result.path, result.step) == (str(path), 0 if name == 'hugging_face' else 7)
  for param, value in tree_utils.flatten_dict(result.train_state.params).items():
    np.testing.assert_array_equal(value, golden_params()[param])


def test_other_parameters_cannot_be_evaluated_without_the_state_that_says_them(stored, tmp_path):
  state = checkpoints.load(stored['t5x'][1])
  del state['state']['param_states']
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(
      7,
      state,
      metadata={
        'param_layout': 't5',
        'optimizer': {'name': 'schedule_free_adamw', 'evaluates_other_params': True},
      },
    )
  with pytest.raises(
    errors.CheckpointError, match='derives the parameters to evaluate from its state.*is missing'
  ):
    restore_lib.restore_for_inference(
      initializer_of('t5', 'schedule_free')[0],
      Restore(str(tmp_path)),
      partitioner(),
      samples.INPUT_SHAPES,
    )


def test_mutable_collections_are_not_made_up_for_an_evaluation(tmp_path):
  """Nor does the want of a seed show as an error of Flax."""
  from moe import models as moe_models
  from moe import networks
  from moe import partitioner as moe_partitioner
  from moe import routing

  block = networks.SparseBlock(
    num_experts=4,
    expert_dim=32,
    router=routing.TokensChooseRouter(4, num_selected=1, bias_update_rate=0.1),
  )
  network = networks.sparse_transformer(
    network_cases.tiny_config(vocab_size=64, num_encoder_layers=1, num_decoder_layers=1),
    block,
    encoder_layout='every_1',
    decoder_layout='every_1',
  )
  model = moe_models.MoeEncoderDecoderModel(
    network, samples.vocabulary(), samples.vocabulary(), optimizers.sgd(learning_rate=0.1)
  )
  its_partitioner = moe_partitioner.MoePjitPartitioner(num_expert_partitions=4, num_partitions=1)
  shape = samples.initializer(model, its_partitioner).global_train_state_shape
  state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shape.state_dict())
  assert state.pop('flax_mutables')
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(7, state, metadata=starting_point.layout_metadata(model))

  def evaluate(seed, **cfg):
    return next(
      restore_lib.restore_for_inference(
        model,
        Restore(str(tmp_path), **cfg),
        its_partitioner,
        samples.INPUT_SHAPES,
        fallback_init_rng=seed,
      )
    )

  for seed, mode in ((None, 'latest'), (0, 'all')):
    with pytest.raises(
      errors.CheckpointError, match='missing from the checkpoint:\n    flax_mutables/'
    ):
      evaluate(seed, mode=mode)
  found = evaluate(0, mode='latest', fallback_to_scratch=True).train_state
  assert jax.tree.leaves(found.flax_mutables) and not np.any(
    found.params['token_embedder']['embedding']
  )


# ---- experts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FEW_FORMATS)
def test_a_sparse_model_begins_with_any_form(stored, name, caplog):
  """Upcycled on the way; its router's mutable state and the optimizer's are initialised if they are not stored."""
  from moe import networks
  from moe import routing
  from moe import upcycling
  from tests.moe import upcycling_cases

  config = network_cases.golden_config(samples.NAME)
  block = networks.SparseBlock(
    num_experts=4,
    expert_dim=32,
    router=routing.TokensChooseRouter(4, num_selected=1, bias_update_rate=0.1),
  )
  sparse = networks.sparse_transformer(
    config, block, encoder_layout='every_2', decoder_layout='every_2'
  )
  wanted = upcycling_cases.state_shapes(sparse, optimizers.schedule_free_adamw(learning_rate=0.1))
  made_of = []

  def begin(state):
    made_of.append(tree_utils.flatten_dict(state))
    return jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), wanted.state_dict())

  cfg = Restore(
    str(stored[name][1]),
    mode='specific',
    state_transformation_fns=[upcycling.upcycle()],
    **({} if name == 'hugging_face' else DROP),
  )
  restored = checkpoints.restore_checkpoint(
    stored[name][1], wanted.state_dict(), restore_cfg=cfg, from_params_fn=begin
  )
  flat = tree_utils.flatten_dict(restored.state)
  expert = flat['target/encoder/layers_1/mlp/expert/wi_0/kernel']
  for i in range(4):
    np.testing.assert_array_equal(expert[i], golden_params()['encoder/layers_1/mlp/wi_0/kernel'])
  assert made_of[0]['target/encoder/layers_1/mlp/expert/wi_0/kernel'] is expert
  assert all(
    (value == 3).all() for key, value in flat.items() if key.startswith('state/param_states/')
  )
  assert any(key.startswith('flax_mutables/') for key in flat)


def test_mutable_collections_of_which_nothing_is_stored(stored):
  params = tree_utils.unflatten_dict(golden_params())
  wanted = {
    'target': params,
    'state': {'step': np.int32(0)},
    'flax_mutables': {'router': {'bias': np.zeros(3)}},
  }
  initial = jax.tree.map(np.ones_like, wanted)
  for name in ('t5x_lite', 'hugging_face'):
    restored = checkpoints.restore_checkpoint(
      stored[name][1], wanted, initial_state_fn=lambda: initial
    )
    np.testing.assert_array_equal(restored.state['flax_mutables']['router']['bias'], np.ones(3))
    np.testing.assert_array_equal(
      restored.state['target']['token_embedder']['embedding'], params['token_embedder']['embedding']
    )
    with pytest.raises(
      errors.CheckpointError, match='missing from the checkpoint:\n    flax_mutables/router/bias'
    ):
      checkpoints.restore_checkpoint(stored[name][1], wanted)
    with pytest.raises(errors.CheckpointError, match='flax_mutables/router/bias'):
      checkpoints.restore_checkpoint(
        stored[name][1], wanted, initial_state_fn=lambda: initial, is_resuming=True
      )


def test_parameters_that_are_missing_are_never_made_up(stored):
  params = tree_utils.unflatten_dict(golden_params())
  params['encoder']['new'] = {'kernel': np.zeros(3, np.float32)}
  wanted = {'target': params, 'state': {'step': np.int32(0)}}
  for name in ('t5x', 'hugging_face'):
    with pytest.raises(
      errors.CheckpointError, match='1 missing from the checkpoint:\n    target/encoder/new/kernel'
    ):
      checkpoints.restore_checkpoint(
        stored[name][1],
        wanted,
        initial_state_fn=lambda: wanted,
        from_params_fn=lambda state: wanted,
      )


# ---- recorded options of the network -------------------------------------------------------------------------------


@pytest.mark.parametrize('layout', ['t5', 'scalable_t5'])
def test_the_network_is_recorded(tmp_path, layout):
  metadata = starting_point.layout_metadata(
    samples.model(param_layout=layout, dtype='bfloat16', num_relpos_buckets=16)
  )
  assert (
    json.loads(json.dumps(metadata))
    == metadata
    == {
      'param_layout': layout,
      'network': {
        'config': 'T5Config',
        'vocab_size': 64,
        'emb_dim': 16,
        'num_heads': 2,
        'num_encoder_layers': 2,
        'num_decoder_layers': 2,
        'head_dim': 8,
        'mlp_dim': 32,
        'mlp_activations': ['gelu', 'linear'],
        'logits_via_embedding': False,
        'relpos_bias_tables': 'per_stack' if layout == 't5' else 'per_layer',
        'num_relpos_buckets': 16,
        'max_relpos_distance': 128,
        'scale_tied_logits': True,
        'layer_norm_epsilon': 1e-6,
      },
    }
  )


def test_the_recorded_network_is_restored(stored):
  ours, theirs = (
    checkpoints.read_metadata(stored[name][1])['network'] for name in ('t5x_lite', 'hugging_face')
  )
  assert ours == theirs
  fields = {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in ours.items()
    if name != 'config'
  }
  assert t5.T5Config(**fields) == network_cases.golden_config(
    samples.NAME, dropout_rate=0.1, relpos_bias_tables='per_stack', dtype=jnp.float32
  )


def test_a_network_with_another_scale_of_tied_logits_is_rejected(tmp_path):
  """Every shape fits, so the recorded options decide."""
  architecture = hugging_face.Architecture.from_shapes(golden_params())
  models = {
    scaled: samples.model(logits_via_embedding=True, scale_tied_logits=scaled)
    for scaled in (True, False)
  }
  for scaled, other in ((True, False), (False, True)):
    tied = dataclasses.replace(architecture, logits_via_embedding=True, scale_tied_logits=scaled)
    hugging_face.write_folder(
      tmp_path / f'hf_{scaled}', tied, hugging_face.FAMILIES['t5_1_1'], golden_params().__getitem__
    )
    network = starting_point.layout_metadata(models[scaled])['network']
    if scaled:
      del network['scale_tied_logits']  # as checkpoints from before this option
    with checkpoints.CheckpointManager(
      tmp_path / f'run_{scaled}', save_cfg=checkpoints.SaveCheckpointConfig()
    ) as manager:
      manager.save(
        1, {'target': {'x': np.zeros(1)}}, metadata={'param_layout': 't5', 'network': network}
      )
    for path, options in (
      (f'hf_{scaled}', {}),
      (f'run_{scaled}', {}),
      (f'hf_{scaled}', {'state_transformation_fns': [lambda state, saved: state]}),
    ):
      start = start_from(tmp_path / path, mode='latest', **options)
      message = rf'`T5Config.scale_tied_logits` must be {scaled} for .*{path}.*, got {other}\. Set it to {scaled}'
      with pytest.raises(errors.CheckpointError, match=message):
        starting_point.check_start(start, None, models[other])


def test_a_network_with_another_epsilon_is_rejected(stored, tmp_path):
  models = {epsilon: samples.model(layer_norm_epsilon=epsilon) for epsilon in (1e-6, 1e-5)}
  for epsilon, other in ((1e-6, 1e-5), (1e-5, 1e-6)):
    write_hugging_face(tmp_path / f'hf_{epsilon}', golden_params(), layer_norm_epsilon=epsilon)
    network = starting_point.layout_metadata(models[epsilon])['network']
    if epsilon == 1e-6:
      del network['layer_norm_epsilon']  # as checkpoints from before this option
    with checkpoints.CheckpointManager(
      tmp_path / f'run_{epsilon}', save_cfg=checkpoints.SaveCheckpointConfig()
    ) as manager:
      manager.save(
        1, {'target': {'x': np.zeros(1)}}, metadata={'param_layout': 't5', 'network': network}
      )
    for path in (f'hf_{epsilon}', f'run_{epsilon}'):
      message = rf'`T5Config.layer_norm_epsilon` must be {epsilon} for .*{path}.*, got {other}\. Set it to {epsilon}'
      with pytest.raises(errors.CheckpointError, match=message):
        starting_point.check_start(start_from(tmp_path / path, mode='latest'), None, models[other])
  # T5X's form does not say it.
  model = models[1e-5]
  initializer = samples.initializer(model, partitioner())
  shape = initializer.global_train_state_shape
  starting_point.check_start(start_from(stored['t5x'][1], mode='specific'), shape, model)


class Tower(nn.Module):
  """A user's network of T5's parameters that does not derive from a class of this package."""

  config: t5.T5Config


def test_any_network_with_a_configuration_of_stacks_is_recorded():
  model = samples.model(param_layout='scalable_t5')
  of_t5 = starting_point.layout_metadata(model)
  model.module = Tower(model.module.config)
  assert starting_point.layout_metadata(model) == of_t5 and of_t5['param_layout'] == 'scalable_t5'
  model.module = Tower({'vocab_size': 8})
  assert starting_point.layout_metadata(model) == {}


def test_networks_of_others_record_nothing():
  other = decoder_only.DecoderWrapper(decoder_only.TransformerConfig(vocab_size=8, num_layers=3))
  model = samples.model()
  model.module = other
  assert starting_point.layout_metadata(model)['network']['num_layers'] == 3
  model.module = object()
  assert starting_point.layout_metadata(model) == {}


# ---- several processes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', FORMATS)
def test_of_several_processes_each_keeps_its_part(stored, name, monkeypatch):
  source = checkpoints.open_source(stored[name][1])
  sharding = jax.sharding.NamedSharding(
    partitioner().mesh, jax.sharding.PartitionSpec('data', 'model')
  )
  table = 'target/token_embedder/embedding'
  reads = []
  if not isinstance(
    source, sources.OrbaxSource
  ):  # Orbax asks the other processes; see test_two_processes.py.
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    read_array = source.read_array
    monkeypatch.setattr(source, 'read_array', lambda name: reads.append(name) or read_array(name))
  array = source.read({table: (np.float32, sharding)})[table]
  assert array.sharding == sharding and reads in ([], [table])
  np.testing.assert_array_equal(array, golden_params()['token_embedder/embedding'])
  assert os.path.isdir(source.path)
