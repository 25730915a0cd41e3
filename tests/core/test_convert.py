"""Conversion of weights: every way there and back is bitwise, what is refused is refused before anything is written."""

import dataclasses
import json
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite import tree_utils
from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert import report as convert_report
from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointDamagedError, CheckpointError, ConfigError
from t5x_lite.formatting import format_bytes
from t5x_lite.networks import param_layouts
from t5x_lite.networks import t5
from tests.core import hugging_face_cases as cases
from tests.core import t5x_samples

pytestmark = pytest.mark.filterwarnings('ignore:.*has no manifest')


def _folder(path, family='t5_1_1', dtype='float32', **changes):
  """Makes a Hugging Face folder with random weights; returns (its path, our arrays)."""
  architecture = dataclasses.replace(cases.BY_FAMILY[family], **changes)
  values = cases.values(architecture, dtype)
  config = cases.config_of(architecture, family, torch_dtype=dtype)
  cases.make_folder(path, cases.tensors(architecture, values), config)
  return str(path), values


def _bits(path):
  """Returns name -> (dtype, shape, bytes) of all that is stored in a folder, in whatever form."""
  source = sources.open_source(path)
  values = source.read({name: (leaf.dtype, None) for name, leaf in source.shapes().items()})
  return {name: (value.dtype.name, value.shape, value.tobytes()) for name, value in values.items()}


def _tensor_bits(folder):
  tensors = hugging_face.SafetensorsFolder(folder)
  return {name: (entry.dtype.name, entry.shape, tensors.read(name).tobytes())
          for name, entry in tensors.entries.items()}


def _save(directory, state, step=3, **metadata):
  """Saves a flat state as a training run would."""
  save_cfg = checkpoints.SaveCheckpointConfig(save_dataset=True)
  with checkpoints.CheckpointManager(directory, save_cfg=save_cfg) as manager:
    manager.save(step, tree_utils.unflatten_dict(state), metadata={'param_layout': 't5', **metadata},
                 data_state={'position': b'7'})
  return checkpoints.get_checkpoint_dir(directory, step)


def _state(architecture=cases.SMALL, **more):
  """Returns a flat state with the parameters of an architecture."""
  params = {f'target/{name}': value for name, value in cases.values(architecture).items()}
  return {**params, 'state/step': np.asarray(3, np.int32), **more}


def _trees_like_params(*prefixes, architecture=cases.SMALL):
  return {f'{prefix}{name}': value for seed, prefix in enumerate(prefixes, start=1)
          for name, value in cases.values(architecture, seed=seed).items()}


class FakeSource(sources.StateSource):
  """A state in memory; counts what is read together."""

  format = 't5x_orbax'

  def __init__(self, state, metadata=None):
    super().__init__('/somewhere')
    self.state, self.batches, self._metadata = state, [], metadata

  def shapes(self):
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in self.state.items()}

  @property
  def metadata(self):
    return {'param_layout': sources.layout_of(self.state), **(self._metadata or {})}

  def read_array(self, name):
    return self.state[name]

  def read(self, wanted):
    self.batches.append(list(wanted))
    return {name: self.state[name] for name in wanted}


# ----------------------------------------------------------------------------------------------------------------------
# There and back


@pytest.mark.parametrize('family, to, dtype', [
    ('t5_1_0', 't5x_lite', 'bfloat16'), ('t5_1_1', 't5x', 'float32'), ('mt5', 't5x_lite', 'float16'),
    ('umt5', 't5x', 'bfloat16'), ('switch', 't5x_lite', 'float32')])
def test_hugging_face_and_back(tmp_path, family, to, dtype):
  folder, values = _folder(tmp_path / 'folder', family, dtype)
  there = convert.convert(folder, str(tmp_path / 'there'), to=to)
  assert there.path == str(tmp_path / 'there' / 'checkpoint_0')
  stored = _bits(there.path)
  assert {name for name in stored if name.startswith('target/')} == {f'target/{name}' for name in values}
  for name, value in values.items():
    assert stored[f'target/{name}'] == (dtype, value.shape, value.tobytes())
  assert (there.num_params, there.dtypes) == (sum(value.size for value in values.values()), {dtype: len(values)})
  # What was converted once knows its family; T5X's form has no place to say it.
  back = convert.convert(str(tmp_path / 'there'), str(tmp_path / 'back'), to='hugging_face',
                         family=family if to == 't5x' else None)
  assert _tensor_bits(back.path) == _tensor_bits(folder)
  assert back.num_arrays == len(_tensor_bits(folder))
  read = lambda path: json.loads((pathlib.Path(path) / 'config.json').read_text())
  assert read(back.path) == read(folder)


def test_tied_logits_that_are_not_scaled_stay_one_array(tmp_path):
  folder, values = _folder(tmp_path / 'folder', logits_via_embedding=True, scale_tied_logits=False)
  ours = convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite')
  assert ours.num_params == sum(value.size for value in values.values())
  text = convert_report.describe(ours)
  assert '--gin.network.T5Config.scale_tied_logits=False' in text and 'Careful' not in text
  back = convert.convert(ours.path, str(tmp_path / 'back'), to='hugging_face')
  assert _tensor_bits(back.path) == _tensor_bits(folder)
  read = lambda path: json.loads((pathlib.Path(path) / 'config.json').read_text())
  assert read(back.path) == read(folder) and read(folder)['scale_decoder_outputs'] is False
  # T5X's form has no place to say it: a reader takes it for scaled.
  theirs = convert.convert(ours.path, str(tmp_path / 't5x'), to='t5x', param_layout='scalable_t5')
  assert any('scale_tied_logits=False' in note and 'decoder_norm/scale by sqrt(emb_dim)' in note
             for note in theirs.notes)
  last = convert.convert(theirs.path, str(tmp_path / 'last'), to='hugging_face')
  assert any('set "scale_decoder_outputs": false' in note for note in last.notes)
  assert last.architecture.logits_via_embedding and last.architecture.scale_tied_logits


@pytest.mark.parametrize('form', ['t5x', 't5x_orbax'])
def test_t5x_and_back_with_the_state_of_adafactor(tmp_path, form):
  sample = t5x_samples.unpack(tmp_path)[form]
  ours = convert.convert(str(sample), str(tmp_path / 'ours'), to='t5x_lite')
  assert (ours.source_format, ours.path) == (form, str(tmp_path / 'ours' / 'checkpoint_7'))
  back = convert.convert(ours.path, str(tmp_path / 'back'), to='t5x')
  bits = _bits(sample / 'checkpoint_7')
  assert _bits(ours.path) == _bits(back.path) == bits
  assert len(bits) == ours.num_arrays == 261
  assert any(name.endswith('/v_row') for name in bits)
  assert checkpoints.verify_checkpoint(ours.path).step == 7


def test_layouts_and_back_with_moments_and_average(tmp_path):
  state = _state() | _trees_like_params('state/param_states/0/mu/', 'state/param_states/0/nu/', 'param_average/')
  state['state/param_states/0/count'] = np.asarray(3, np.int32)
  network = {'relpos_bias_tables': 'per_stack', 'mlp_activations': ['silu', 'linear']}
  run = _save(tmp_path / 'run', state, network=network)
  stacked = convert.convert(run, str(tmp_path / 'stacked'), to='t5x_lite', param_layout='scalable_t5')
  metadata = checkpoints.read_metadata(stacked.path)
  assert metadata['param_layout'] == 'scalable_t5'
  assert metadata['network'] == {'relpos_bias_tables': 'per_layer', 'mlp_activations': ['silu', 'linear']}
  loaded = checkpoints.load(stacked.path)
  config = t5.T5Config(param_layout='scalable_t5', **{
      name: value for name, value in cases.SMALL.network_config_kwargs().items() if name != 'relpos_bias_tables'})
  for own, path in (('target/', ('target',)), ('param_average/', ('param_average',)),
                    ('state/param_states/0/mu/', ('state', 'param_states', '0', 'mu'))):
    tree = tree_utils.unflatten_dict({k.removeprefix(own): v for k, v in state.items() if k.startswith(own)})
    found = loaded
    for key in path:
      found = found[key]
    jax.tree.map(np.testing.assert_array_equal, found, param_layouts.convert(tree, 't5', 'scalable_t5', config))
  back = convert.convert(stacked.path, str(tmp_path / 'back'), to='t5x_lite', param_layout='t5')
  assert _bits(back.path) == _bits(run)
  assert checkpoints.read_metadata(back.path)['network']['relpos_bias_tables'] == 'per_stack'
  assert stacked.notes == ('The position in the training data is left out.',) and back.notes == ()
  folder = convert.convert(stacked.path, str(tmp_path / 'folder'), to='hugging_face')
  assert folder.family.name == 't5_1_1'
  direct = convert.convert(run, str(tmp_path / 'direct'), to='hugging_face')
  assert _tensor_bits(folder.path) == _tensor_bits(direct.path)
  assert json.loads((tmp_path / 'folder' / 'config.json').read_text())['feed_forward_proj'] == 'gated-silu'


def test_tables_that_differ_stay_in_the_layers(tmp_path):
  folder, _ = _folder(tmp_path / 'folder', 'umt5')
  stacked = convert.convert(folder, str(tmp_path / 'stacked'), to='t5x', param_layout='scalable_t5')
  single = convert.convert(stacked.path, str(tmp_path / 'single'), to='t5x', param_layout='t5')
  assert single.architecture.relpos_per_layer
  back = convert.convert(single.path, str(tmp_path / 'back'), to='hugging_face')
  assert back.family.name == 'umt5' and _tensor_bits(back.path) == _tensor_bits(folder)
  with pytest.raises(CheckpointError, match="tables of relative position biases per layer; .*Choose family='umt5'"):
    convert.convert(stacked.path, str(tmp_path / 'no'), to='hugging_face', family='t5_1_1')
  assert not (tmp_path / 'no').exists()


def test_shards_and_tokenizer_of_byt5(tmp_path):
  folder, _ = _folder(tmp_path / 'folder', 'byt5')
  done = convert.convert(folder, str(tmp_path / 'again'), to='hugging_face', max_shard_size=3000)
  assert len(list((tmp_path / 'again').glob('model-*-of-*.safetensors'))) > 2
  assert _tensor_bits(done.path) == _tensor_bits(folder)
  assert done.has_tokenizer and 'AutoTokenizer' in convert_report.describe(done)
  assert json.loads((tmp_path / 'again' / 'tokenizer_config.json').read_text())['tokenizer_class'] == 'ByT5Tokenizer'


# ----------------------------------------------------------------------------------------------------------------------
# dtypes


def test_dtype_is_that_of_parameters_alone(tmp_path):
  state = _state() | _trees_like_params('state/param_states/0/mu/', 'param_average/')
  run = _save(tmp_path / 'run', state)
  done = convert.convert(run, str(tmp_path / 'half'), to='t5x_lite', dtype='bfloat16')
  loaded = tree_utils.flatten_dict(checkpoints.load(done.path))
  for name, value in state.items():
    is_cast = name.startswith(('target/', 'param_average/'))
    expected = value.astype(ml_dtypes.bfloat16) if is_cast else value
    assert loaded[name].dtype == expected.dtype and np.array_equal(loaded[name], expected), name


def test_overflow_names_the_tensor_and_leaves_nothing(tmp_path):
  state = _state()
  state['target/decoder/layers_1/mlp/wo/kernel'][0, 0] = -65520.0
  state['target/encoder/layers_0/mlp/wo/kernel'][0, 0] = np.inf  # which float16 has, too
  run = _save(tmp_path / 'run', state)
  for to in convert.FORMATS:
    with pytest.raises(ConfigError, match=r'target/decoder/layers_1/mlp/wo/kernel has 1 values that float16 cannot '
                                          r'hold, the largest 65520; expected none above 65504'):
      convert.convert(run, str(tmp_path / 'half'), to=to, dtype='float16')
    assert [path.name for path in tmp_path.iterdir()] == ['run']
  assert convert_plan.cast('x', np.float32([65519.0, np.nan, np.inf]), np.dtype('float16'))[0] == 65504.0
  with pytest.raises(ConfigError, match='bfloat16 cannot hold'):
    convert_plan.cast('x', np.float32([3.4e38]), np.dtype(ml_dtypes.bfloat16))


# ----------------------------------------------------------------------------------------------------------------------
# The plan


def _plan(state, metadata=None, to='t5x_lite', **options):
  return convert_plan.plan_state(FakeSource(state, metadata), to=to, **options)


def test_each_array_is_read_once_and_few_at_a_time():
  flat = {f'target/{name}': value for name, value in cases.values(dataclasses.replace(
      cases.SMALL, num_encoder_layers=6, num_decoder_layers=6)).items()}
  for layout in ('t5', 'scalable_t5', 't5', 'scalable_t5'):
    source = FakeSource(flat)
    # The first look at tables of position biases is not counted.
    plan = convert_plan.plan_state(source, to='t5x', param_layout=layout)
    reader = convert_plan.Reader(source, plan, None)
    result = {name: reader.make(name) for name in plan.arrays}
    read = [name for batch in source.batches for name in batch]
    assert sorted(read) == sorted(flat)
    for name, planned in plan.arrays.items():
      assert (result[name].shape, result[name].dtype) == (planned.shape, planned.dtype)
    flat = {name: value for name, value in result.items() if name.startswith('target/')}
  largest = max(value.nbytes for value in flat.values())
  source = FakeSource(flat)
  plan = convert_plan.plan_state(source, to='t5x', param_layout='t5')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(convert_plan, '_GROUP_BYTES', 500)
    reader = convert_plan.Reader(source, plan, None)
    for name in plan.arrays:
      reader.make(name)
  sizes = [sum(flat[name].nbytes for name in batch) for batch in source.batches]
  assert all(size <= 500 or len(batch) == 1 for size, batch in zip(sizes, source.batches))
  assert max(sizes) == largest > 500 and len(sizes) > 5


def test_optimizer_state():
  state = _state(**{'state/param_states/encoder/encoder_norm/scale/v': np.ones(6, np.float32)})
  assert _plan(state).with_optimizer_state
  assert 'state/param_states/encoder/encoder_norm/scale/v' in _plan(state, to='t5x', optimizer_state='keep').arrays
  dropped = _plan(state, optimizer_state='drop')
  assert not dropped.with_optimizer_state and 'is left out, as asked' in dropped.notes[0]
  folder = _plan(state, to='hugging_face')
  assert set(folder.arrays) == {name for name in state if name.startswith('target/')}
  assert 'a Hugging Face folder has no place for it' in folder.notes[0]
  with pytest.raises(ConfigError, match='cannot follow a change of parameter layout: .*/v .*--optimizer_state=drop'):
    _plan(state, param_layout='scalable_t5')
  assert _plan(state, param_layout='scalable_t5', optimizer_state='drop').param_layout == 'scalable_t5'
  with pytest.raises(ConfigError, match='holds no state of an optimizer'):
    _plan(_state(), optimizer_state='keep')


def test_average_mutables_and_other_parameters():
  state = _state(**_trees_like_params('param_average/'), **{'flax_mutables/router_state/bias': np.zeros(3, np.float32)})
  kept = _plan(state)
  assert {'flax_mutables/router_state/bias', 'param_average/token_embedder/embedding'} < set(kept.arrays)
  assert any('mutable arrays' in note for note in kept.notes)
  t5x = _plan(state, to='t5x')
  assert not any(name.startswith('param_average') for name in t5x.arrays)
  assert any('T5X has no place' in note for note in t5x.notes)
  assert any('fallback_to_scratch' in note for note in t5x.notes)
  with pytest.raises(ConfigError, match="flax_mutables/router_state/bias, .*transformers' models have no place"):
    _plan(state, to='hugging_face')
  with pytest.raises(ConfigError, match='cannot follow a change of layout'):
    _plan(state, param_layout='scalable_t5')
  del state['flax_mutables/router_state/bias']
  assert any('running average' in note for note in _plan(state, to='hugging_face').notes)
  optimizer = {'optimizer': {'name': 'schedule_free', 'evaluates_other_params': True}}
  assert any('schedule_free, evaluates other parameters' in note
             for note in _plan(_state(), optimizer, to='hugging_face').notes)


def test_step():
  make = lambda plan: plan.arrays['state/step'].make({'state/step': np.asarray(3, np.int32)}.__getitem__)
  assert make(_plan(_state())) == 3
  assert make(_plan(_state(), step=12)) == 12 and make(_plan(_state(), step=12)).dtype == np.int32
  without = _state()
  del without['state/step']
  assert make(_plan(without)) == 0


def test_networks_of_others():
  state = {'target/dense/kernel': np.zeros((2, 3), np.float32), 'state/step': np.asarray(1)}
  assert set(_plan(state).arrays) == set(state)
  with pytest.raises(ConfigError, match=r'expected one for --param_layout'):
    _plan(state, param_layout='t5')
  with pytest.raises(ConfigError, match=r'expected one for --to=hugging_face'):
    _plan(state, to='hugging_face')
  with pytest.raises(CheckpointError, match='holds no parameters'):
    _plan({'state/step': np.asarray(1)})


# ----------------------------------------------------------------------------------------------------------------------
# Sources and outputs


def test_newest_sound_checkpoint_of_a_directory(tmp_path):
  for step in (1, 2):
    _save(tmp_path / 'run', _state() | {'state/step': np.asarray(step)}, step)
  damaged = next((tmp_path / 'run' / 'checkpoint_2').rglob('d/*'))
  damaged.write_bytes(damaged.read_bytes()[:-1] + b'x')
  done = convert.convert(str(tmp_path / 'run'), str(tmp_path / 'out'), to='t5x')
  assert done.path.endswith('out/checkpoint_1')
  with pytest.raises(CheckpointDamagedError):
    convert.convert(str(tmp_path / 'run' / 'checkpoint_2'), str(tmp_path / 'no'), to='t5x')
  assert not (tmp_path / 'no').exists()


def test_what_is_no_source(tmp_path):
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'file').write_text('x')
  for source, words in (('empty', 'holds no state that can be read'), ('file', 'is a file'), ('none', 'no checkpoint')):
    with pytest.raises(CheckpointError, match=words):
      convert.convert(str(tmp_path / source), str(tmp_path / 'out'), to='t5x')
  assert sorted(path.name for path in tmp_path.iterdir()) == ['empty', 'file']


@pytest.mark.parametrize('options, words', [
    ({'to': 'huggingface'}, "got --to='huggingface'.*Did you mean 'hugging_face'"),
    ({'to': 't5x', 'dtype': 'float64'}, '--dtype'),
    ({'to': 't5x', 'param_layout': 'stacked'}, '--param_layout'),
    ({'to': 't5x', 'optimizer_state': 'leave'}, '--optimizer_state'),
    ({'to': 't5x', 'family': 't5_1_1'}, '--family=t5_1_1 has no effect with --to=t5x'),
    ({'to': 't5x_lite', 'tokenizer': 'spiece.model'}, '--tokenizer=spiece.model has no effect'),
    ({'to': 't5x', 'max_shard_size': 10}, '--max_shard_size=10 has no effect'),
    ({'to': 'hugging_face', 'param_layout': 't5'}, '--param_layout=t5 has no effect with --to=hugging_face'),
    ({'to': 'hugging_face', 'step': 5}, '--step=5 has no effect'),
    ({'to': 'hugging_face', 'optimizer_state': 'keep'}, 'no place for an optimizer'),
    ({'to': 't5x', 'step': -1}, '--step=-1: expected'),
    ({'to': 't5x', 'step': 2**31}, '--step=2147483648: expected'),
    ({'to': 'hugging_face', 'max_shard_size': 0}, '--max_shard_size=0: expected'),
    ({'to': 'hugging_face', 'family': 't5_2'}, "unknown family 't5_2'"),
    ({'to': 'hugging_face', 'family': 'umt5'}, "family 'umt5'.*tables of relative position biases"),
    ({'to': 'hugging_face', 'tokenizer': '/nonexistent/spiece.model'}, 'no tokenizer at'),
])
def test_refused_options(tmp_path, options, words):
  folder, _ = _folder(tmp_path / 'folder')
  with pytest.raises((ConfigError, CheckpointError), match=words):
    convert.convert(folder, str(tmp_path / 'out'), **options)
  assert [path.name for path in tmp_path.iterdir()] == ['folder']


def test_outputs_that_are_refused(tmp_path):
  folder, _ = _folder(tmp_path / 'folder')
  (tmp_path / 'there').mkdir()
  os.symlink(tmp_path / 'nowhere', tmp_path / 'link')
  for output, error, words in (
      (tmp_path / 'there', CheckpointError, 'exists already'), (tmp_path / 'link', CheckpointError, 'exists already'),
      (tmp_path / 'folder' / 'in' / 'it', ConfigError, 'is in SOURCE'), (folder, ConfigError, 'is in SOURCE'),
      ('gs://bucket/x', ConfigError, 'remote'), ('', ConfigError, 'expected the path of a new folder')):
    with pytest.raises(error, match=words):
      convert.convert(folder, str(output), to='t5x_lite')
  assert sorted(path.name for path in (tmp_path / 'folder').iterdir()) == ['config.json', 'model.safetensors']


def test_a_full_disk(tmp_path, monkeypatch):
  folder, _ = _folder(tmp_path / 'folder')
  usage = convert.shutil.disk_usage(tmp_path)
  monkeypatch.setattr(convert.shutil, 'disk_usage', lambda path: usage._replace(free=1000))
  with pytest.raises(CheckpointError, match=r"will take \d.* KiB, and the disk has 1000 B free"):
    convert.convert(folder, str(tmp_path / 'a' / 'out'), to='t5x')
  assert [path.name for path in tmp_path.iterdir()] == ['folder']


@pytest.mark.parametrize('to', convert.FORMATS)
def test_what_fails_halfway_leaves_nothing(tmp_path, monkeypatch, to):
  folder, _ = _folder(tmp_path / 'folder')
  made = []

  def fail(self, name):
    made.append(name)
    if len(made) == 20:
      raise OSError(28, 'No space left on device')
    return make(self, name)

  make = convert_plan.Reader.make
  monkeypatch.setattr(convert_plan.Reader, 'make', fail)
  output = tmp_path / 'new' / 'out'
  with pytest.raises(CheckpointError, match='No space left on device') as caught:
    convert.convert(folder, str(output), to=to)
  assert str(output) in str(caught.value) and 'being-written' not in str(caught.value)
  assert [path.name for path in tmp_path.iterdir()] == ['folder']
  monkeypatch.undo()
  convert.convert(folder, str(output), to=to)


def test_an_output_that_comes_into_being_meanwhile_stays(tmp_path, monkeypatch):
  folder, _ = _folder(tmp_path / 'folder')
  make = convert_plan.Reader.make

  def meanwhile(self, name):
    (tmp_path / 'out').mkdir(exist_ok=True)
    (tmp_path / 'out' / 'note').write_text('mine')
    return make(self, name)

  monkeypatch.setattr(convert_plan.Reader, 'make', meanwhile)
  with pytest.raises(CheckpointError, match='has come into being meanwhile'):
    convert.convert(folder, str(tmp_path / 'out'), to='t5x_lite')
  assert [path.name for path in (tmp_path / 'out').iterdir()] == ['note']


def test_missing_and_surplus_arrays_are_named_on_both_sides(tmp_path):
  state = _state()
  del state['target/decoder/layers_1/mlp/wo/kernel']
  run = _save(tmp_path / 'run', state)
  with pytest.raises(CheckpointError) as caught:
    convert.convert(run, str(tmp_path / 'out'), to='hugging_face')
  assert 'decoder/layers_1/mlp/wo/kernel (10, 6) <-> decoder.block.1.layer.2.DenseReluDense.wo.weight (6, 10)' in str(
      caught.value)
  run = _save(tmp_path / 'other', _state(**{'target/encoder/layers_0/mlp/extra/kernel': np.zeros((2, 2), np.float32)}))
  with pytest.raises(CheckpointError, match=r'encoder/layers_0/mlp/extra/kernel.*\(2, 2\)'):
    convert.convert(run, str(tmp_path / 'out'), to='hugging_face')


# ----------------------------------------------------------------------------------------------------------------------
# What is said


def test_report_of_each_form(tmp_path):
  folder, values = _folder(tmp_path / 'folder', 'umt5')
  (tmp_path / 'folder' / 'spiece.model').write_bytes(b'')
  size = sum(value.nbytes for value in values.values())
  text = convert_report.describe(convert.convert(folder, str(tmp_path / 'ours'), to='t5x_lite'))
  assert f'Wrote {tmp_path}/ours/checkpoint_0' in text and 'Hugging Face, umT5' in text
  assert f'{len(values) + 1} arrays, {format_bytes(size + 4)}; {size // 4:,} parameters, float32' in text
  assert '--gin_file=models/umt5_small.gin' in text and '--gin.network.T5Config.num_decoder_layers=2' in text
  assert f'--gin.INITIAL_CHECKPOINT_PATH={tmp_path}/ours/checkpoint_0' in text
  assert f'--gin.VOCABULARY_FILE={tmp_path}/folder/spiece.model' in text
  done = convert.convert(str(tmp_path / 'ours'), str(tmp_path / 'back'), to='hugging_face')
  text = convert_report.describe(done)
  assert f"UMT5ForConditionalGeneration.from_pretrained('{tmp_path}/back')" in text
  assert 'model.config.tie_word_embeddings = False' in text and '--tokenizer=PATH' in text
  stacked = convert.convert(str(tmp_path / 'ours'), str(tmp_path / 'stacked'), to='t5x', param_layout='scalable_t5')
  assert '--gin.network.T5Config.param_layout=scalable_t5' in convert_report.describe(stacked)
  assert 'moe_expert_partitions' not in text
  switch, _ = _folder(tmp_path / 'switch', 'switch')
  text = convert_report.describe(convert.convert(switch, str(tmp_path / 'sparse'), to='t5x_lite'))
  assert '--gin_file=partitioning/moe_expert_partitions.gin' in text.partition('runs/finetune.gin')[2]
  mixed = dataclasses.replace(done, dtypes={'float32': 3, 'bfloat16': 2})
  assert 'parameters, 2 in bfloat16 and 3 in float32' in convert_report.describe(mixed)


def test_activations_that_nothing_says_are_said():
  source = FakeSource(_state())
  plan = convert_plan.plan_state(source, to='hugging_face')
  from t5x_lite.apps.convert import hugging_face as convert_hugging_face
  target = convert_hugging_face.prepare(source, plan, family=None, tokenizer=None)
  assert any('gelu, linear and 128 are written to config.json' in note for note in target.notes)
