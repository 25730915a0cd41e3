"""Conversion of weights: bitwise round trips, and errors before anything is written."""

import dataclasses
import json
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert import report as convert_report
from t5x_lite.apps.convert import run as convert
from t5x_lite.errors import CheckpointDamagedError, CheckpointError, ConfigError
from tests import hub_cache
from tests import stores
from tests.apps.convert import convert_cases as given
from tests.checkpoints.hugging_face import hugging_face_cases as cases
from tests.checkpoints.sources import t5x_samples

pytestmark = pytest.mark.filterwarnings('ignore:.*has no manifest')


# Formats with all parameters.
_OF_MODELS = [name for name in convert.FORMATS if name != 'peft']


# There and back


@pytest.mark.parametrize(
  'family, to, dtype',
  [
    ('mt5', 't5x_lite', 'float16'),
    ('umt5', 't5x', 'bfloat16'),
    ('switch', 't5x_lite', 'float32'),
    pytest.param('t5_1_0', 't5x_lite', 'bfloat16', marks=pytest.mark.full),
    pytest.param('t5_1_1', 't5x', 'float32', marks=pytest.mark.full),
  ],
)
def test_hugging_face_and_back(tmp_path, family, to, dtype):
  folder, values = given.folder(tmp_path / 'folder', family, dtype)
  there = convert.convert(folder, str(tmp_path / 'there'), to=to)
  assert there.path == str(tmp_path / 'there' / 'checkpoint_0')
  stored = given.bits(there.path)
  assert {name for name in stored if name.startswith('target/')} == {
    f'target/{name}' for name in values
  }
  for name, value in values.items():
    assert stored[f'target/{name}'] == (dtype, value.shape, value.tobytes())
  assert (there.num_params, there.dtypes) == (
    sum(value.size for value in values.values()),
    {dtype: len(values)},
  )
  """A converted checkpoint records its family, which T5X's format cannot."""
  back = convert.convert(
    str(tmp_path / 'there'),
    str(tmp_path / 'back'),
    to='hugging_face',
    family=family if to == 't5x' else None,
  )
  assert given.tensor_bits(back.path) == given.tensor_bits(folder)
  assert back.num_arrays == len(given.tensor_bits(folder))

  def read(path):
    return json.loads((pathlib.Path(path) / 'config.json').read_text())

  assert read(back.path) == read(folder)


@pytest.mark.parametrize('form', ['t5x', pytest.param('t5x_orbax', marks=pytest.mark.full)])
def test_t5x_and_back_with_the_state_of_adafactor(tmp_path, form):
  sample = t5x_samples.unpack(tmp_path)[form]
  ours = convert.convert(str(sample), str(tmp_path / 'ours'), to='t5x_lite')
  assert (ours.source_format, ours.path) == (form, str(tmp_path / 'ours' / 'checkpoint_7'))
  back = convert.convert(ours.path, str(tmp_path / 'back'), to='t5x')
  bits = given.bits(sample / 'checkpoint_7')
  assert given.bits(ours.path) == given.bits(back.path) == bits
  assert len(bits) == ours.num_arrays == 261
  assert any(name.endswith('/v_row') for name in bits)
  assert checkpoints.verify_checkpoint(ours.path).step == 7


@stores.mostly('gcs')
def test_every_format_in_a_store(tmp_path, store):
  folder, _ = given.folder(tmp_path / 'folder', 'byt5')
  done = convert.convert(folder, f'{store.root}/published', to='hugging_face', max_shard_size=3000)
  assert given.tensor_bits(done.path) == given.tensor_bits(folder) and done.has_tokenizer
  assert (
    f'copy it to a disk:\n  {"aws" if store.kind == "s3" else "gcloud"}'
    in convert_report.describe(done)
  )
  expected = given.bits(folder)
  for source, to in (('published', 't5x'), ('t5x', 't5x_lite')):
    done = convert.convert(f'{store.root}/{source}', f'{store.root}/{to}', to=to)
    assert done.path == f'{store.root}/{to}/checkpoint_0' and given.bits(done.path) == expected
  back = convert.convert(
    f'{store.root}/t5x_lite', str(tmp_path / 'back'), to='hugging_face', family='byt5'
  )
  assert given.tensor_bits(back.path) == given.tensor_bits(folder)
  assert not [name for name in store.names() if 'tmp' in name or 'being-written' in name]
  for output, words in (('published', 'must be a new folder'), ('t5x_lite/x', 'outside of SOURCE')):
    with pytest.raises((CheckpointError, ConfigError), match=words):
      convert.convert(f'{store.root}/t5x_lite', f'{store.root}/{output}', to='hugging_face')


@pytest.mark.parametrize('to', ['hugging_face', 't5x'])
def test_a_folder_in_a_store_is_complete_or_not_there(tmp_path, s3_store, to):
  folder, _ = given.folder(tmp_path / 'folder', 'byt5')
  last = {'hugging_face': '/config.json', 't5x': '/checkpoint'}[to]
  with s3_store.proxy.fault(status=403, operation='write', name=f'{last}$') as fault:
    with pytest.raises((PermissionError, CheckpointError)):
      convert.convert(folder, f'{s3_store.root}/out', to=to)
  assert fault.hits and s3_store.names() == []


def test_a_name_of_the_hub_is_converted(tmp_path, monkeypatch):
  folder, _ = given.folder(tmp_path / 'folder', 'byt5')
  cache = hub_cache.use(tmp_path / 'cache', monkeypatch)
  hub_cache.add(cache, 'google/byt5-tiny', pathlib.Path(folder))
  done = convert.convert('hf://google/byt5-tiny', str(tmp_path / 'out'), to='t5x_lite')
  assert given.bits(done.path) == given.bits(folder)
  assert (
    checkpoints.read_manifest(done.path).metadata['converted']['from'] == 'hf://google/byt5-tiny'
  )


def test_shards_and_tokenizer_of_byt5(tmp_path):
  folder, _ = given.folder(tmp_path / 'folder', 'byt5')
  done = convert.convert(folder, str(tmp_path / 'again'), to='hugging_face', max_shard_size=3000)
  assert len(list((tmp_path / 'again').glob('model-*-of-*.safetensors'))) > 2
  assert given.tensor_bits(done.path) == given.tensor_bits(folder)
  assert done.has_tokenizer and 'AutoTokenizer' in convert_report.describe(done)
  assert (
    json.loads((tmp_path / 'again' / 'tokenizer_config.json').read_text())['tokenizer_class']
    == 'ByT5Tokenizer'
  )


def test_overflow_names_the_tensor_and_leaves_nothing(tmp_path):
  state = given.make_state()
  state['target/decoder/layers_1/mlp/wo/kernel'][0, 0] = -65520.0
  state['target/encoder/layers_0/mlp/wo/kernel'][0, 0] = np.inf  # which float16 has, too
  run = given.save(tmp_path / 'run', state)
  for to in _OF_MODELS:
    with pytest.raises(
      ConfigError,
      match=r'float16 cannot represent 1 values of target/decoder/layers_1/mlp/wo/kernel, '
      r'the largest 65520; the maximum of float16 is 65504',
    ):
      convert.convert(run, str(tmp_path / 'half'), to=to, dtype='float16')
    assert [path.name for path in tmp_path.iterdir()] == ['run']
  assert (
    convert_plan.cast('x', np.float32([65519.0, np.nan, np.inf]), np.dtype('float16'))[0] == 65504.0
  )
  with pytest.raises(ConfigError, match='bfloat16 cannot represent'):
    convert_plan.cast('x', np.float32([3.4e38]), np.dtype(ml_dtypes.bfloat16))


# The plan


def _plan(state, metadata=None, to='t5x_lite', **options):
  return convert_plan.plan_state(given.FakeSource(state, metadata), to=to, **options)


def test_each_array_is_read_once_and_few_at_a_time():
  flat = {
    f'target/{name}': value
    for name, value in cases.values(
      dataclasses.replace(cases.SMALL, num_encoder_layers=6, num_decoder_layers=6)
    ).items()
  }
  for layout in ('t5', 'scalable_t5', 't5', 'scalable_t5'):
    source = given.FakeSource(flat)
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
  source = given.FakeSource(flat)
  plan = convert_plan.plan_state(source, to='t5x', param_layout='t5')
  with pytest.MonkeyPatch.context() as patch:
    # No option: data of the real size would make the test slow.
    patch.setattr(convert_plan, '_GROUP_BYTES', 500)
    reader = convert_plan.Reader(source, plan, None)
    for name in plan.arrays:
      reader.make(name)
  sizes = [sum(flat[name].nbytes for name in batch) for batch in source.batches]
  assert all(
    size <= 500 or len(batch) == 1 for size, batch in zip(sizes, source.batches, strict=True)
  )
  assert max(sizes) == largest > 500 and len(sizes) > 5


@pytest.mark.parametrize('custom', ['feed_forward_fn', 'position_encoding'])
def test_custom_blocks_keep_their_parameters_and_have_no_hugging_face_folder(custom):
  state = {name: value for name, value in given.make_state().items() if 'relpos_bias' not in name}
  network = {'num_heads': cases.SMALL.num_heads, 'custom_blocks': [custom]}
  with pytest.raises(ConfigError, match=f'--to=hugging_face does not support the custom {custom}'):
    _plan(state, {'network': network}, to='hugging_face')
  with pytest.raises(ConfigError, match='The number of heads is not known'):
    _plan(state, param_layout='scalable_t5')
  for to in ('t5x', 't5x_lite'):
    plan = _plan(state, {'network': network}, to=to, param_layout='scalable_t5')
    assert f'custom {custom}' in plan.notes[0] and plan.network == network
    query = plan.arrays['target/encoder/encoder/attention/query/kernel'].shape
    assert query[2:] == (cases.SMALL.num_heads, cases.SMALL.head_dim)
  assert not any(
    'custom' in note for note in _plan(given.make_state(), {'network': {'num_heads': 3}}).notes
  )


def test_step():
  def make(plan):
    return plan.arrays['state/step'].make({'state/step': np.asarray(3, np.int32)}.__getitem__)

  assert make(_plan(given.make_state())) == 3
  assert (
    make(_plan(given.make_state(), step=12)) == 12
    and make(_plan(given.make_state(), step=12)).dtype == np.int32
  )
  without = given.make_state()
  del without['state/step']
  assert make(_plan(without)) == 0


def test_networks_of_others():
  state = {'target/dense/kernel': np.zeros((2, 3), np.float32), 'state/step': np.asarray(1)}
  assert set(_plan(state).arrays) == set(state)
  with pytest.raises(ConfigError, match=r'--param_layout requires a T5 or decoder-only network'):
    _plan(state, param_layout='t5')
  with pytest.raises(ConfigError, match=r'--to=hugging_face requires a T5 or decoder-only network'):
    _plan(state, to='hugging_face')
  with pytest.raises(CheckpointError, match='has no parameters'):
    _plan({'state/step': np.asarray(1)})


# Sources and outputs


def test_newest_sound_checkpoint_of_a_directory(tmp_path):
  for step in (1, 2):
    given.save(tmp_path / 'run', given.make_state() | {'state/step': np.asarray(step)}, step)
  damaged = next((tmp_path / 'run' / 'checkpoint_2').rglob('d/*'))
  damaged.write_bytes(damaged.read_bytes()[:-1] + b'x')
  done = convert.convert(str(tmp_path / 'run'), str(tmp_path / 'out'), to='t5x')
  assert done.path.endswith('out/checkpoint_1')
  with pytest.raises(CheckpointDamagedError, match='checkpoint_2'):
    convert.convert(str(tmp_path / 'run' / 'checkpoint_2'), str(tmp_path / 'no'), to='t5x')
  assert not (tmp_path / 'no').exists()


def test_invalid_sources(tmp_path):
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'file').write_text('x')
  for source, words in (
    ('empty', 'none of them'),
    ('file', 'got a file'),
    ('none', 'got a missing path'),
  ):
    with pytest.raises(CheckpointError, match=words):
      convert.convert(str(tmp_path / source), str(tmp_path / 'out'), to='t5x')
  assert sorted(path.name for path in tmp_path.iterdir()) == ['empty', 'file']


@pytest.mark.parametrize(
  'options, words',
  [
    ({'to': 'huggingface'}, "`--to` must be .* got 'huggingface'. Did you mean 'hugging_face'"),
    ({'to': 't5x', 'dtype': 'float64'}, '--dtype'),
    ({'to': 't5x', 'param_layout': 'stacked'}, '--param_layout'),
    ({'to': 't5x', 'optimizer_state': 'leave'}, '--optimizer_state'),
    (
      {'to': 't5x', 'family': 't5_1_1'},
      '--family` must be absent with --to=t5x, .*requires --to=hugging_face',
    ),
    (
      {'to': 't5x_lite', 'tokenizer': 'spiece.model'},
      '--tokenizer` must be absent with --to=t5x_lite, .*requires --to=hugging_face',
    ),
    (
      {'to': 't5x', 'max_shard_size': 10},
      '--max_shard_size` must be absent with --to=t5x, .*requires --to=hugging_face',
    ),
    (
      {'to': 'hugging_face', 'param_layout': 't5'},
      '--param_layout` must be absent with --to=hugging_face, .*requires --to=t5x_lite',
    ),
    (
      {'to': 'hugging_face', 'step': 5},
      '--step` must be absent with --to=hugging_face, .*requires --to=t5x_lite',
    ),
    (
      {'to': 'hugging_face', 'optimizer_state': 'keep'},
      '--optimizer_state` must be absent with --to=hugging_face, .*requires --to=t5x_lite',
    ),
    ({'to': 't5x', 'step': -1}, '--step` must be .* got -1'),
    ({'to': 't5x', 'step': 2**31}, '--step` must be .* got 2147483648'),
    ({'to': 'hugging_face', 'max_shard_size': 0}, '--max_shard_size` must be .* got 0'),
    ({'to': 'hugging_face', 'family': 't5_2'}, "family` must be one of .*got 't5_2'"),
    (
      {'to': 'hugging_face', 'family': 'umt5'},
      "family 'umt5'.*must have relative position biases per layer",
    ),
    (
      {'to': 'hugging_face', 'tokenizer': '/nonexistent/spiece.model'},
      'The tokenizer must be the path',
    ),
  ],
)
def test_rejected_options(tmp_path, options, words):
  folder, _ = given.folder(tmp_path / 'folder')
  with pytest.raises((ConfigError, CheckpointError), match=words):
    convert.convert(folder, str(tmp_path / 'out'), **options)
  assert [path.name for path in tmp_path.iterdir()] == ['folder']


def test_rejected_outputs(tmp_path):
  folder, _ = given.folder(tmp_path / 'folder')
  (tmp_path / 'there').mkdir()
  os.symlink(tmp_path / 'nowhere', tmp_path / 'link')
  for output, error, words in (
    (tmp_path / 'there', CheckpointError, 'must be a new folder, got an existing path'),
    (tmp_path / 'link', CheckpointError, 'must be a new folder, got an existing path'),
    (tmp_path / 'folder' / 'in' / 'it', ConfigError, 'outside of SOURCE'),
    (folder, ConfigError, 'outside of SOURCE'),
    ('ftp://bucket/x', ConfigError, 'must be the path of a directory'),
    ('hf://bucket/x', ConfigError, 'must be the path of a directory'),
    ('', ConfigError, 'must be the path of a directory'),
  ):
    with pytest.raises(error, match=words):
      convert.convert(folder, str(output), to='t5x_lite')
  assert sorted(path.name for path in (tmp_path / 'folder').iterdir()) == [
    'config.json',
    'model.safetensors',
  ]


def test_a_full_disk(tmp_path, monkeypatch):
  folder, _ = given.folder(tmp_path / 'folder')
  usage = convert.shutil.disk_usage(tmp_path)
  monkeypatch.setattr(convert.shutil, 'disk_usage', lambda path: usage._replace(free=1000))
  with pytest.raises(CheckpointError, match=r'needs \d.* KiB, and the disk has 1000 B free'):
    convert.convert(folder, str(tmp_path / 'a' / 'out'), to='t5x')
  assert [path.name for path in tmp_path.iterdir()] == ['folder']


@pytest.mark.parametrize('to', _OF_MODELS)
def test_a_failed_conversion_leaves_no_files(tmp_path, monkeypatch, to):
  folder, _ = given.folder(tmp_path / 'folder')
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


def test_an_output_of_another_process_is_kept(tmp_path, monkeypatch):
  folder, _ = given.folder(tmp_path / 'folder')
  make = convert_plan.Reader.make

  def meanwhile(self, name):
    (tmp_path / 'out').mkdir(exist_ok=True)
    (tmp_path / 'out' / 'note').write_text('mine')
    return make(self, name)

  monkeypatch.setattr(convert_plan.Reader, 'make', meanwhile)
  with pytest.raises(CheckpointError, match='was created by another process in the meantime'):
    convert.convert(folder, str(tmp_path / 'out'), to='t5x_lite')
  assert [path.name for path in (tmp_path / 'out').iterdir()] == ['note']
