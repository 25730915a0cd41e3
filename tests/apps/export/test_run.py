"""Export: programs that run without this package and give the results of the model."""

import ast
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_lite import adapters
from t5x_lite import checkpoints
from t5x_lite import data
from t5x_lite import decoding
from t5x_lite import models
from t5x_lite import partitioning
from t5x_lite import tree_utils
from t5x_lite.apps.common import output_folder
from t5x_lite.apps.export import functions as export_functions
from t5x_lite.apps.export import run as export
from t5x_lite.command_line import cli
from t5x_lite.data.batches.features import get_converter
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks import decoder_only as decoder_only_network
from t5x_lite.networks import t5 as network
from t5x_lite.storage import files
from tests import stores
from tests.layers.test_attention_kernels import H100
from tests.layers.test_attention_kernels import use_gpu
from tests.networks import network_cases as cases

_HAS_TENSORFLOW = importlib.util.find_spec('tensorflow') is not None
_LENGTHS = {'inputs': 10, 'targets': 6}
_VOCABULARY = data.ByteVocabulary(125)
_SIZES = dict(
  vocab_size=384,
  emb_dim=8,
  num_heads=2,
  head_dim=4,
  mlp_dim=16,
  mlp_activations=('gelu', 'linear'),
  dropout_rate=0.0,
)
# Modules that users of an export may import; t5x_lite and its other requirements count as not installed.
_FORBID = textwrap.dedent("""
    import runpy, sys
    class Forbidden:
      def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('t5x_lite', 'flax', 'optax', 'orbax', 'clu', 'gin'):
          raise ImportError(f'{name} is forbidden here')
    sys.meta_path.insert(0, Forbidden())
    runpy.run_path(sys.argv[1], run_name='__main__')
""")


def _encoder_decoder(**kwargs):
  config = network.T5Config(num_encoder_layers=1, num_decoder_layers=1, **_SIZES)
  return models.EncoderDecoderModel(
    network.Transformer(config), _VOCABULARY, _VOCABULARY, None, **kwargs
  )


def _decoder_only(**kwargs):
  config = decoder_only_network.TransformerConfig(num_layers=1, **_SIZES)
  return models.DecoderOnlyModel(
    decoder_only_network.DecoderWrapper(config), _VOCABULARY, None, **kwargs
  )


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
  """Return (checkpoint of step 7, parameters) of an encoder-decoder or of a decoder-only model."""
  found = {}
  for name, model in (('encoder_decoder', _encoder_decoder()), ('decoder_only', _decoder_only())):
    spec = get_converter(model.FEATURE_CONVERTER).element_spec(_LENGTHS, 8, False)
    variables = jax.eval_shape(
      lambda m=model, s=spec: m.get_initial_variables(
        jax.random.key(0), {feature: leaf.shape for feature, leaf in s.items()}
      )
    )
    rng = np.random.default_rng(3)
    params = jax.tree.map(
      lambda x: (rng.standard_normal(x.shape) / 3).astype(np.float32), variables['params']
    )
    folder = tmp_path_factory.mktemp(name)
    with checkpoints.CheckpointManager(
      folder, save_cfg=checkpoints.SaveCheckpointConfig()
    ) as manager:
      manager.save(7, {'target': params, 'state': {'step': np.int32(7)}})
    found[name] = (str(folder / 'checkpoint_7'), params)
  return found


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_adapter_is_merged(tmp_path, dtype):
  """The sum is rounded once, from the float32 weights of the base, which the model has in bfloat16."""
  adapter = adapters.Lora(rank=2, targets='all', base_dtype='bfloat16')
  model = _encoder_decoder(adapter=adapter)
  shapes = {
    name: leaf.shape
    for name, leaf in get_converter(model.FEATURE_CONVERTER)
    .element_spec(_LENGTHS, 2, False)
    .items()
  }
  variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))
  rng = np.random.default_rng(3)
  params = jax.tree.map(
    lambda leaf: (rng.standard_normal(leaf.shape) / 3).astype(np.float32), variables['params']
  )
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(7, {'target': params, 'state': {'step': np.int32(7)}})
  cfg = _restore_cfg(str(tmp_path / 'checkpoint_7'), dtype=dtype)
  folder = pathlib.Path(_save(tmp_path, model, cfg, batch_size=2, inference_mode='score'))
  flat = tree_utils.flatten_dict(params)
  want = {}
  for path, value in flat.items():
    if not path.endswith(('lora_a', 'lora_b')):
      module = path.removesuffix('kernel')
      if f'{module}lora_a' in flat:
        value = value + 8.0 * (flat[f'{module}lora_a'] @ flat[f'{module}lora_b'])
      want[path] = jnp.asarray(value, dtype)
  described = json.loads((folder / 'manifest.json').read_text())['variables']
  stored = np.load(folder / 'params.npz')
  assert {name.removeprefix('params/') for name in stored.files} == set(want)
  for path, value in want.items():
    name = f'params/{path}'
    got = stored[name].view(jnp.dtype(described[name]['dtype']))
    assert got.dtype == value.dtype
    np.testing.assert_allclose(
      got.astype(np.float32),
      np.asarray(value, np.float32),
      rtol=2**-7 if dtype == 'bfloat16' else 1e-5,
      atol=1e-5,
    )
    # A rounded base would give another neighbour for many numbers.
    assert np.mean(got == np.asarray(value)) > (0.98 if dtype == 'bfloat16' else 0.3)


@pytest.mark.parametrize(
  'platforms',
  [
    ('cpu', 'cuda'),
    *(pytest.param(platforms, marks=pytest.mark.full) for platforms in (('cpu', 'tpu'), ('cuda',))),
  ],
)
def test_on_a_gpu_with_cudnn_programs_lower_for_all_their_platforms(
  monkeypatch, tmp_path, platforms
):
  """'auto' takes the fused kernel for this model there, which lowers for CUDA alone and cannot be serialized."""
  sizes = {**_SIZES, 'head_dim': 8, 'dtype': 'bfloat16', 'mlp_activations': ('relu',)}

  def make(kernel):
    config = network.T5Config(
      num_encoder_layers=1, num_decoder_layers=1, **sizes, attention_kernel=kernel
    )
    return models.EncoderDecoderModel(network.Transformer(config), _VOCABULARY, _VOCABULARY, None)

  model = make('auto')
  shapes = {
    name: leaf.shape
    for name, leaf in get_converter(model.FEATURE_CONVERTER)
    .element_spec(_LENGTHS, 2, False)
    .items()
  }
  variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))[
    'params'
  ]
  params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), variables)
  with checkpoints.CheckpointManager(
    tmp_path, save_cfg=checkpoints.SaveCheckpointConfig()
  ) as manager:
    manager.save(7, {'target': params, 'state': {'step': np.int32(7)}})

  def save(model):
    return _save(
      tmp_path,
      model,
      _restore_cfg(str(tmp_path / 'checkpoint_7')),
      batch_size=2,
      inference_mode='score',
      native_lowering_platforms=platforms,
      overwrite=True,
    )

  use_gpu(monkeypatch, H100, 90800)
  # Without the export, it is taken.
  batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
  assert 'dot_product_attention_fwd' in str(jax.make_jaxpr(model.score_batch)(params, batch))

  program = jax.export.deserialize(bytearray((save(model) / 'score.stablehlo').read_bytes()))
  assert program.platforms == platforms and '__cudnn$' not in program.mlir_module()
  with pytest.raises(
    ConfigError,
    match="attention_kernel='cudnn' is not supported: .*cannot serialize programs.*'auto'",
  ):
    save(make('cudnn'))


def _restore_cfg(path, **kwargs):
  return checkpoints.RestoreCheckpointConfig(path=path, mode='specific', **kwargs)


def _save(tmp_path, model, cfg, **kwargs):
  defaults = dict(
    restore_checkpoint_cfg=cfg,
    partitioner=partitioning.PjitPartitioner(num_partitions=2),
    task_feature_lengths=_LENGTHS,
    output_dir=str(tmp_path),
    model_name='model',
  )
  return pathlib.Path(export.save(model=model, **{**defaults, **kwargs}))


def _ids(num_rows, length, seed=0):
  """Rows of random ids of random lengths, the last of them the end of the sequence, filled up with 0."""
  rng = np.random.default_rng(seed)
  ids = np.zeros((num_rows, length), np.int32)
  for row in ids:
    count = rng.integers(1, length + 1)
    row[:count] = [*rng.integers(3, 259, count - 1), 1]
  return ids


def _batch(model, inputs, targets):
  """The model's features, by the converter that training uses."""
  rows = [
    ({'inputs': a[a > 0], 'targets': b[b > 0]},) for a, b in zip(inputs, targets, strict=True)
  ]
  return get_converter(model.FEATURE_CONVERTER).convert(rows, _LENGTHS, False)


def _load(folder, name):
  manifest = json.loads((folder / 'manifest.json').read_text())
  with np.load(folder / 'params.npz') as arrays:
    variables = {
      key: arrays[key].view(leaf['dtype']) for key, leaf in manifest['variables'].items()
    }
  return (
    manifest,
    variables,
    jax.export.deserialize(bytearray((folder / f'{name}.stablehlo').read_bytes())),
  )


@pytest.mark.parametrize(
  'converter', ['encoder_decoder', 'prefix_lm', 'decoder_only', 'prefix_lm_with_loss_on_inputs']
)
def test_batches_are_those_of_the_feature_converter(converter):
  model = _encoder_decoder(feature_converter_cls=converter)
  inputs, targets = _ids(12, _LENGTHS['inputs']), _ids(12, _LENGTHS['targets'], seed=1)
  expected = _batch(model, inputs, targets)
  made = jax.jit(export_functions.batch_fn(model))(jnp.asarray(inputs), jnp.asarray(targets))
  assert set(made) == set(expected)
  for name, array in expected.items():
    np.testing.assert_array_equal(made[name], array, err_msg=name)
    assert made[name].dtype == array.dtype


@pytest.fixture(scope='module')
def exported(tmp_path_factory, stored):
  """Return (folder of an export, inputs, targets, outputs of the model)."""
  path, params = stored['encoder_decoder']
  model = _encoder_decoder(
    decode_fn=decoding.beam_search, default_decoder_params=models.DecoderParams(num_decodes=2)
  )
  folder = _save(
    tmp_path_factory.mktemp('exports'), model, _restore_cfg(path), saved_model=_HAS_TENSORFLOW
  )
  inputs, targets = _ids(5, 10), _ids(5, 6, seed=1)

  @cases.jit
  def reference(batch):
    tokens, aux = model.predict_batch_with_aux(params, batch)
    return {
      'tokens': tokens,
      'prediction_scores': aux['scores'],
      'scores': model.score_batch(params, batch),
    }

  return folder, inputs, targets, reference(_batch(model, inputs, targets))


def test_eleven_lines_run_it_without_this_package(tmp_path, exported, stored):
  folder, inputs, targets, expected = exported
  script = (folder / 'run.py').read_text()
  assert len(script.splitlines()) == 11 and 't5x_lite' not in script
  assert script in (folder / 'README.md').read_text()
  done = subprocess.run(
    [sys.executable, '-c', _FORBID, str(folder / 'run.py')],
    input=json.dumps([row[row > 0].tolist() for row in inputs]),
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  found = ast.literal_eval(done.stdout)
  too_long = subprocess.run(
    [sys.executable, '-c', _FORBID, str(folder / 'run.py')],
    input=json.dumps([[5] * 11]),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert too_long.returncode == 1
  assert too_long.stderr == 'A row of inputs may have 10 ids at most.\n'
  np.testing.assert_array_equal(found['tokens'], expected['tokens'])
  np.testing.assert_allclose(found['scores'], expected['prediction_scores'], rtol=1e-5)
  # A call may have any number of rows.
  manifest, variables, score = _load(folder, 'score')
  found = cases.jit(score.call)(variables, inputs[:3], targets[:3])['scores']
  np.testing.assert_allclose(found, expected['scores'][:3], rtol=1e-5)
  # The manifest.
  assert manifest['functions']['predict']['inputs'] == {
    'inputs': {'shape': ['batch', 10], 'dtype': 'int32'}
  }
  assert manifest['functions']['score']['outputs'] == {
    'scores': {'shape': ['batch'], 'dtype': 'float32'}
  }
  assert (
    manifest['functions']['predict']['platforms'] == ['cpu', 'cuda', 'tpu'] == list(score.platforms)
  )
  assert manifest['vocabularies']['inputs'] == {
    'kind': 'ByteVocabulary',
    'size': 384,
    'pad_id': 0,
    'eos_id': 1,
    'unk_id': 2,
    'extra_ids': 125,
  }
  path, params = stored['encoder_decoder']
  assert (manifest['batch_size'], manifest['checkpoint'], manifest['step']) == (None, path, 7)
  for name, value in tree_utils.flatten_dict({'params': params}).items():
    np.testing.assert_array_equal(variables[name], value)
  assert [path.name for path in folder.parent.iterdir()] == ['model']
  text = export.describe(str(folder))
  assert f'Exported {path} (step 7, ' in text and 'tokens int32[batch, 6]' in text


@pytest.mark.skipif(not _HAS_TENSORFLOW, reason='TensorFlow is not installed')
def test_saved_model(exported):
  import tensorflow as tf

  folder, inputs, targets, expected = exported
  loaded = tf.saved_model.load(str(folder / 'saved_model'))
  assert set(loaded.signatures) == {'serving_default', 'predict', 'score'}
  found = loaded.signatures['serving_default'](inputs=tf.constant(inputs))
  np.testing.assert_array_equal(found['tokens'].numpy(), expected['tokens'])
  np.testing.assert_allclose(found['scores'].numpy(), expected['prediction_scores'], rtol=1e-5)
  found = loaded.signatures['score'](
    inputs=tf.constant(inputs[:2]), targets=tf.constant(targets[:2])
  )
  np.testing.assert_allclose(found['scores'].numpy(), expected['scores'][:2], rtol=1e-5)


def test_decoder_only_with_a_seed_in_bfloat16(tmp_path, stored):
  path, params = stored['decoder_only']
  model = _decoder_only(
    inputs_bidirectional_attention=True,
    decode_fn=functools.partial(decoding.temperature_sample, topk=0),
  )
  folder = _save(
    tmp_path,
    model,
    _restore_cfg(path, dtype='bfloat16'),
    inference_mode='predict',
    seed_input=True,
    batch_size=4,
    native_lowering_platforms=('cpu',),
  )
  manifest, variables, predict = _load(folder, 'predict')
  assert {value.dtype.name for value in variables.values()} == {'bfloat16'} and manifest[
    'step'
  ] == 7
  assert {leaf['dtype'] for leaf in manifest['variables'].values()} == {'bfloat16'}
  assert manifest['functions']['predict']['inputs'] == {
    'inputs': {'shape': [4, 10], 'dtype': 'int32'},
    'seed': {'shape': [], 'dtype': 'int32'},
  }
  assert 'np.zeros((4, 10), np.int32)' in (folder / 'run.py').read_text()
  inputs = _ids(4, 10)
  call, reference = cases.jit(predict.call), cases.jit(model.predict_batch)
  tokens = {seed: np.asarray(call(variables, inputs, np.int32(seed))['tokens']) for seed in (0, 5)}
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
  batch = _batch(model, inputs, np.zeros((4, 6), np.int32))
  for seed, found in tokens.items():
    np.testing.assert_array_equal(
      found, reference(params, batch, rng=jax.random.key(seed)), err_msg=str(seed)
    )
  assert (tokens[0] != tokens[5]).any()
  with pytest.raises(ValueError, match='shape'):
    predict.call(variables, inputs[:3], np.int32(0))


@pytest.fixture(scope='module')
def sentencepiece_model(tmp_path_factory):
  from t5x_lite.apps.vocab import run as vocab

  path = tmp_path_factory.mktemp('vocab') / 'a.model'
  return vocab.train_vocabulary(
    ['the cat sat on the mat'] * 9, str(path), vocab_size=13, extra_ids=2
  ).model_file


def test_the_vocabulary_is_copied_and_exports_replace_each_other(
  tmp_path, stored, sentencepiece_model
):
  def save(file=sentencepiece_model, dtype=None, **kwargs):
    vocabulary = data.SentencePieceVocabulary(file, extra_ids=2)
    model = models.EncoderDecoderModel(_encoder_decoder().module, vocabulary, vocabulary, None)
    if file != sentencepiece_model:
      pathlib.Path(file).unlink()
    return _save(
      tmp_path / 'exports',
      model,
      _restore_cfg(stored['encoder_decoder'][0], dtype=dtype),
      inference_mode='score',
      native_lowering_platforms=('cpu',),
      **kwargs,
    )

  folder = save()
  facts = json.loads((folder / 'manifest.json').read_text())['vocabularies']['targets']
  assert facts == {
    'kind': 'SentencePieceVocabulary',
    'size': 15,
    'pad_id': 0,
    'eos_id': 1,
    'unk_id': 2,
    'extra_ids': 2,
    'file': 'targets.sentencepiece',
  }
  assert (folder / facts['file']).read_bytes() == pathlib.Path(sentencepiece_model).read_bytes()
  script = (folder / 'run.py').read_text()
  assert (
    len(script.splitlines()) == 11
    and 'score.stablehlo' in script
    and '[[[5, 6, 7, 1], [5, 6, 7, 1]]]' in (folder / 'README.md').read_text()
  )
  content = {path.name: path.read_bytes() for path in folder.iterdir()}
  with pytest.raises(ConfigError, match='exists.*--overwrite'):
    save()
  # A failed export leaves the former one and no other files.
  gone = tmp_path / 'gone.model'
  gone.write_bytes(pathlib.Path(sentencepiece_model).read_bytes())
  with pytest.raises(OSError, match='gone.model'):
    save(str(gone), overwrite=True)
  assert content == {path.name: path.read_bytes() for path in folder.iterdir()}
  assert [path.name for path in folder.parent.iterdir()] == ['model']
  save(overwrite=True, dtype='bfloat16')
  assert (folder / 'params.npz').stat().st_size < len(content['params.npz'])
  assert [path.name for path in folder.parent.iterdir()] == ['model']


@stores.mostly('gcs')
def test_an_export_in_a_store(tmp_path, stored, store):
  def save(model='encoder_decoder', where=None, **kwargs):
    return export.save(
      model=_encoder_decoder(),
      restore_checkpoint_cfg=_restore_cfg(stored[model][0]),
      output_dir=where or store.root,
      partitioner=partitioning.PjitPartitioner(num_partitions=2),
      task_feature_lengths=_LENGTHS,
      model_name='model',
      inference_mode='score',
      native_lowering_platforms=('cpu',),
      **kwargs,
    )

  local = pathlib.Path(save(where=str(tmp_path)))
  folder = save()
  assert folder == f'{store.root}/model' and export.describe(folder) == export.describe(
    str(local)
  ).replace(str(local), folder).replace('to run it.', 'to run it from a copy on a disk.')
  assert store.names() == sorted(f'model/{path.name}' for path in local.iterdir())
  assert files.path(f'{folder}/params.npz').read_bytes() == (local / 'params.npz').read_bytes()
  files.write(f'{folder}/former', b'')
  with pytest.raises(ConfigError, match='exists.*--overwrite'):
    save()
  # An error before the upload leaves the former export, one in it no export.
  with pytest.raises(CheckpointError):
    save('decoder_only', overwrite=True)
  assert 'model/former' in store.names()
  with (
    store.proxy.fault(status=403, operation='write', name='manifest.json'),
    pytest.raises(PermissionError),
  ):
    save(overwrite=True)
  assert store.names() == []
  save(overwrite=True)
  assert store.names() == sorted(f'model/{path.name}' for path in local.iterdir())


def test_leftovers_of_a_killed_export_are_removed_by_the_next(tmp_path):
  target = tmp_path / 'model'
  code = textwrap.dedent("""
      import os, pathlib, signal, sys
      from t5x_lite.apps.common import output_folder
      with output_folder.replacing(pathlib.Path(sys.argv[1]), last='x') as folder:
        (folder / 'half').write_text('')
        os.kill(os.getpid(), signal.SIGKILL)
      """)
  done = subprocess.run(
    [sys.executable, '-c', code, str(target)], cwd=pathlib.Path(__file__).parents[3], timeout=300
  )
  assert done.returncode == -9
  (left,) = tmp_path.iterdir()
  with output_folder.replacing(target, last='x') as at_work:
    assert not left.exists()
    output_folder.remove_leftovers(target)
    assert at_work.exists()  # Its process is still running.
    (at_work / 'whole').write_text('')
  assert [path.name for path in tmp_path.iterdir()] == ['model'] and (target / 'whole').exists()
  # Killed between two renames: the former one is not lost.
  target.rename(tmp_path / '.model-being-written-x-replaced')
  (tmp_path / '.model-being-written-x').mkdir()
  output_folder.remove_leftovers(target)
  assert [path.name for path in tmp_path.iterdir()] == ['model'] and (target / 'whole').exists()


@pytest.mark.parametrize(
  'kwargs, fragments',
  [
    (
      {'inference_mode': 'predicts'},
      ['inference_mode', "got ['predicts']", 'list of predict, score'],
    ),
    ({'inference_mode': ()}, ['inference_mode', 'predict, score']),
    ({'native_lowering_platforms': ('gpu',)}, ["'gpu'", 'cuda']),
    ({'native_lowering_platforms': 'cpu'}, ['must be a list of cpu', "got 'cpu'"]),
    ({'native_lowering_platforms': ('cpu', 'cpu')}, ['without duplicates']),
    ({'task_feature_lengths': {'targets': 6}}, ["mapping of 'inputs' and 'targets'"]),
    ({'task_feature_lengths': {'inputs': 0, 'targets': 6}}, ['integers >= 1', "'inputs': 0"]),
    ({'batch_size': 0}, ['batch_size` must be', 'got 0.']),
    ({'seed_input': True, 'inference_mode': 'score'}, ['Only predictions are sampled']),
    ({'output_dir': ''}, ['MODEL_OUTPUT_DIR']),
    ({'model_name': '../x'}, ["'../x'", 'plain folder name']),
    ({'restore_checkpoint_cfg': None}, ['checkpoint', 'CHECKPOINT_PATH']),
    (
      {'restore_checkpoint_cfg': checkpoints.RestoreCheckpointConfig(path='x', mode='all')},
      ["'all'"],
    ),
  ],
)
def test_rejected(tmp_path, kwargs, fragments):
  with pytest.raises((ConfigError, CheckpointError)) as error:
    _save(tmp_path, _encoder_decoder(), _restore_cfg(str(tmp_path / 'none')), **kwargs)
  for fragment in fragments:
    assert fragment in str(error.value)
  assert not list(tmp_path.iterdir())


def test_other_folders_and_models_are_rejected(tmp_path):
  (tmp_path / 'model').mkdir()
  with pytest.raises(ConfigError, match='is not an export'):
    _save(tmp_path, _encoder_decoder(), None, overwrite=True)
  with pytest.raises(ConfigError, match='feature_converter_cls'):
    _save(tmp_path / 'other', _encoder_decoder(feature_converter_cls=object), None)
  (tmp_path / 'file').write_text('')
  with pytest.raises(NotADirectoryError, match="Not a directory: '.*file/x'"):
    _save(tmp_path / 'file' / 'x', _encoder_decoder(), None)


def test_tracing_errors_have_a_remedy(tmp_path, stored):
  def impossible(inputs, cache, tokens_to_logits, eos_id, num_decodes, **kwargs):
    return jnp.zeros((inputs.shape[0], 1, int(inputs.shape[0]))), jnp.zeros((inputs.shape[0], 1))

  with pytest.raises(
    ConfigError, match="exported for 'predict'.*batch_size.*native_lowering_platforms"
  ):
    _save(
      tmp_path, _encoder_decoder(decode_fn=impossible), _restore_cfg(stored['encoder_decoder'][0])
    )
  assert not list(tmp_path.iterdir())


def test_command(tmp_path, capsys, stored):
  path = stored['encoder_decoder'][0]
  run = pathlib.Path(path).parent
  sizes = {**_SIZES, 'num_encoder_layers': 1, 'num_decoder_layers': 1}
  model = [
    '--gin_file=recipes/keyword_cloze.gin',
    "--gin.export_lib.save.inference_mode='score'",
    *(f'--gin.network.T5Config.{name}={value!r}' for name, value in sizes.items()),
  ]
  where = [
    f'--gin.MODEL_OUTPUT_DIR={tmp_path}/exports',
    '--gin.MODEL_NAME=a',
    f'--gin.CHECKPOINT_PATH={path}',
  ]

  def error_of(*flags):
    assert cli.main(['export', *flags]) == 2
    return capsys.readouterr().err

  for name in ('MODEL_NAME', 'CHECKPOINT_PATH'):
    assert name in error_of(*model, *[flag for flag in where if name not in flag])
  assert 'does not fit' in error_of(*model, *where, '--gin.network.T5Config.emb_dim=4')
  assert 'must choose a checkpoint, got both' in error_of(str(run), *model, *where)
  assert 'config.gin' in error_of(str(run)) and 'RUN is missing' in error_of()
  assert not list(tmp_path.glob('exports/*'))
  # A run is enough, and its name is the default of where the export goes.
  assert cli.main(['export', str(run), *model]) == 0
  out = capsys.readouterr().out
  assert (
    f'Exported {path} (step 7, ' in out
    and 'inputs int32[batch, 64], targets int32[batch, 12]' in out
  )
  assert (run / 'exports' / 'checkpoint_7' / 'score.stablehlo').is_file()
