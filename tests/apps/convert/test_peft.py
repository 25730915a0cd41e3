"""Adapters of runs as folders of PEFT and back, merged weights, and errors before anything is written."""

import json
import shlex

import ml_dtypes
import numpy as np
import pytest

from t5x_lite import checkpoints
from t5x_lite.apps.common import runs
from t5x_lite.apps.convert import plan as convert_plan
from t5x_lite.apps.convert import report as convert_report
from t5x_lite.apps.convert import run as convert
from t5x_lite.checkpoints import hugging_face
from t5x_lite.checkpoints import sources
from t5x_lite.command_line import cli
from t5x_lite.errors import CheckpointError, ConfigError
from tests import stores
from tests.apps.convert import convert_cases as given
from tests.checkpoints.hugging_face import adapter_cases as adapters
from tests.checkpoints.hugging_face import hugging_face_cases as cases

pytestmark = pytest.mark.filterwarnings('ignore:.*has no manifest')

_FAMILIES = list(cases.BY_FAMILY)


def _ends(arch, projections):
  return sorted({module.rpartition('.')[2] for module in adapters.modules(arch, projections)})


def _adapter(path, arch, projections=adapters.ALL, **changes):
  """Makes a folder of PEFT; returns (its path, its tensors)."""
  named = adapters.tensors(arch, projections)
  changes.setdefault('target_modules', _ends(arch, projections))
  return str(adapters.make(path, named, **changes)), named


def _run(tmp_path, family='t5_1_1', projections=adapters.ALL, also_train=(), **changes):
  """Saves a run with an adapter and all parameters; returns (its directory, the parameters, the adapter's tensors)."""
  arch = cases.BY_FAMILY[family]
  path, named = _adapter(tmp_path / 'made', arch, projections, **changes)
  state = given.make_state(arch)
  source = sources.open_peft(path, state, 'the base')
  values = {name.removeprefix('target/'): value for name, value in state.items()}
  del values['state/step']
  state |= {name: source.read_array(name) for name in source.shapes()}
  state |= {
    f'state/param_states/{name.removeprefix("target/")}/m': np.zeros(leaf.shape, np.float32)
    for name, leaf in source.shapes().items()
  }
  adapter = source.metadata['adapter'] | {'also_train': list(also_train)}
  given.save(str(tmp_path / 'run'), state, adapter=adapter, converted={'family': family})
  return str(tmp_path / 'run'), values, named


def _run_apart(tmp_path):
  """Saves a checkpoint with an adapter alone, and returns the directory of its run."""
  whole, _, named = _run(tmp_path)
  base = f'{whole}/checkpoint_3'
  identity = checkpoints.identify_base(checkpoints.open_source(base), base)
  state = {'target/decoder/lora_a': next(iter(named.values()))}
  given.save(str(tmp_path / 'apart'), state, base=identity)
  return str(tmp_path / 'apart')


def _assert_merged(found, want):
  """`found` is what `given.bits` returns of a checkpoint; `want` float64 by our names."""
  params = {name for name in found if name.startswith('target/')}
  assert params == {f'target/{name}' for name in want}
  for name, value in want.items():
    dtype, shape, content = found[f'target/{name}']
    got = np.frombuffer(content, np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape)
    eps = {'float32': 1e-6, 'bfloat16': 2**-8}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), value, rtol=eps, atol=2e-6)


@pytest.mark.parametrize('family', _FAMILIES)
def test_a_folder_and_its_base_are_merged(tmp_path, family):
  arch = cases.BY_FAMILY[family]
  base, values = given.folder(tmp_path / 'base', family)
  adapter, named = _adapter(tmp_path / 'adapter', arch)
  done = convert.convert(adapter, str(tmp_path / 'out'), to='hugging_face', base=base)
  assert (done.source_format, done.family.name) == ('peft', family)
  _assert_merged(
    given.bits(done.path), adapters.merged(arch, values, named, lambda _: 3, adapters.ALL)
  )
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert config == json.loads((tmp_path / 'base' / 'config.json').read_text())
  report = convert_report.describe(done)
  assert f'from {adapter} (PEFT adapter' in report and 'kernels is merged' in report
  assert 'is merged' in (tmp_path / 'out' / 'README.md').read_text()


def test_a_folder_that_is_named_as_a_run_is_merged_by_the_command_of_the_error(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  given.folder(tmp_path / 'base', 't5_1_1')
  _adapter(tmp_path / 'adapter', cases.SMALL)
  with pytest.raises(CheckpointError, match='It is an adapter of PEFT. Name the run') as error:
    runs.find_run('adapter')
  command = str(error.value).rpartition(': t5x_lite ')[2].replace('BASE', 'base')
  assert cli.main(shlex.split(command)) == 0
  assert runs.find_run('merged').mode == 'specific'


def test_merging_rounds_once(tmp_path):
  """A sum in bfloat16, or one that is rounded before it is cast, differs."""
  base, values = given.folder(tmp_path / 'base', 't5_1_1', 'bfloat16')
  adapter, named = _adapter(tmp_path / 'adapter', cases.SMALL)
  want = adapters.merged(cases.SMALL, values, named, lambda _: 3, adapters.ALL)
  for dtype in (None, 'float32', 'float16'):
    done = convert.convert(
      adapter, str(tmp_path / f'{dtype}'), to='t5x_lite', base=base, merge=True, dtype=dtype
    )
    stored = given.bits(done.path)
    num_near = 0
    for name, value in want.items():
      got, _, content = stored[f'target/{name}']
      assert got == (dtype or 'bfloat16')
      kind = np.dtype(getattr(ml_dtypes, got, got))
      found = np.frombuffer(content, kind).reshape(value.shape)
      num_near += np.sum(value.astype(np.float32).astype(kind) == found)
      np.testing.assert_allclose(
        found.astype(np.float64), value, rtol=float(ml_dtypes.finfo(kind).eps) * 0.51, atol=2e-6
      )
    # The last bit of a sum in float32 moves few numbers to another neighbour.
    assert num_near / done.num_params > (0.6 if dtype == 'float32' else 0.99)


def test_a_sum_beyond_float16_raises_and_the_remedy_works(tmp_path):
  base, values = given.folder(tmp_path / 'base', 't5_1_1', 'float16')
  adapter, named = _adapter(tmp_path / 'adapter', cases.SMALL, lora_alpha=2e6)
  options = {'to': 'hugging_face', 'base': base}
  with pytest.raises(ConfigError, match='/kernel with its adapter .* `convert --dtype=bfloat16`'):
    convert.convert(adapter, str(tmp_path / 'out'), **options)
  assert not (tmp_path / 'out').exists()
  done = convert.convert(adapter, str(tmp_path / 'out'), dtype='bfloat16', **options)
  want = adapters.merged(cases.SMALL, values, named, lambda _: 1e6, adapters.ALL)
  stored = given.bits(done.path)
  for name, value in want.items():
    dtype, shape, content = stored[f'target/{name}']
    assert dtype == 'bfloat16'
    got = np.frombuffer(content, ml_dtypes.bfloat16).reshape(shape)
    np.testing.assert_allclose(got.astype(np.float64), value, rtol=2**-8, atol=1)


@pytest.mark.parametrize('family', [name for name in _FAMILIES if name != 'switch'])
def test_a_base_in_the_other_layout(tmp_path, family):
  """The number of tables of position biases is that of the family, which an adapter of PEFT does not record."""
  base, _ = given.folder(tmp_path / 'base', family)
  adapter, _ = _adapter(tmp_path / 'adapter', cases.BY_FAMILY[family])
  stacked = convert.convert(
    base, str(tmp_path / 'stacked'), to='t5x_lite', param_layout='scalable_t5'
  )
  found = [
    convert.convert(adapter, f'{tmp_path}/{i}', to='hugging_face', base=path)
    for i, path in enumerate((base, stacked.path))
  ]
  assert given.bits(found[0].path) == given.bits(found[1].path)
  assert found[0].family == found[1].family


@pytest.mark.parametrize('family', _FAMILIES)
@pytest.mark.parametrize('projections', [adapters.QUERY_VALUE, adapters.ALL], ids=['qv', 'all'])
def test_a_run_becomes_a_folder_of_peft(tmp_path, family, projections):
  run, _, named = _run(tmp_path, family, projections)
  done = convert.convert(run, str(tmp_path / 'out'), to='peft')
  stored = hugging_face.SafetensorsFolder(done.path, file='adapter_model.safetensors')
  found = {name: stored.read(name) for name in stored.entries}
  assert {name: value.tobytes() for name, value in found.items()} == {
    name: value.tobytes() for name, value in named.items()
  }
  config = json.loads((tmp_path / 'out' / 'adapter_config.json').read_text())
  ends = _ends(cases.BY_FAMILY[family], projections)
  assert config == adapters.CONFIG | {'target_modules': ends, 'base_model_name_or_path': None}
  assert (done.num_arrays, done.num_params) == (
    len(named),
    sum(value.size for value in named.values()),
  )
  report = convert_report.describe(done)
  assert 'PeftModel.from_pretrained' in report and 'names no base' in report
  assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [
    'adapter_config.json',
    'adapter_model.safetensors',
  ]


def test_a_run_is_merged_and_then_converted_to_every_format(tmp_path):
  run, values, named = _run(tmp_path)
  want = adapters.merged(cases.SMALL, values, named, lambda _: 3, adapters.ALL)
  done = convert.convert(run, str(tmp_path / 'full'), to='t5x_lite', merge=True)
  _assert_merged(given.bits(done.path), want)
  metadata = checkpoints.read_metadata(done.path)
  assert 'adapter' not in metadata and metadata['converted']['family'] == 't5_1_1'
  assert not sources.open_source(done.path).has_optimizer_state
  back = convert.convert(done.path, str(tmp_path / 't5x'), to='t5x')
  _assert_merged(given.bits(back.path), want)
  folder = convert.convert(run, str(tmp_path / 'hf'), to='hugging_face')
  _assert_merged(given.bits(folder.path), want)


@pytest.mark.parametrize('projections', [adapters.QUERY_VALUE, adapters.ALL], ids=['qv', 'all'])
def test_an_adapter_in_another_layout_is_merged(tmp_path, projections):
  """Its kernels have other names and dims there, and back."""
  run, values, named = _run(tmp_path, projections=projections)
  want = adapters.merged(cases.SMALL, values, named, lambda _: 3, projections)
  path = run
  for layout in ('scalable_t5', 't5'):
    done = convert.convert(
      path, str(tmp_path / layout), to='t5x_lite', param_layout=layout, optimizer_state='drop'
    )
    path = done.path
    folder = convert.convert(path, str(tmp_path / f'{layout}_hf'), to='hugging_face')
    _assert_merged(given.bits(folder.path), want)


def test_without_merge_the_adapter_is_kept(tmp_path):
  run, _, _ = _run(tmp_path)
  done = convert.convert(run, str(tmp_path / 'copy'), to='t5x_lite')
  assert given.bits(done.path) == given.bits(f'{run}/checkpoint_3')
  assert (
    checkpoints.read_metadata(done.path)['adapter']
    == (checkpoints.read_metadata(f'{run}/checkpoint_3')['adapter'])
  )
  text = convert_report.describe(done)
  num_kernels = len(checkpoints.read_metadata(done.path)['adapter']['kernels'])
  assert f'The adapter of {num_kernels} kernels is kept.' in text and 'add --merge' in text
  assert '--gin_file=adapters/lora.gin' in text.partition('--gin_file=runs/finetune.gin')[2]
  merged = convert.convert(run, str(tmp_path / 'merged'), to='t5x_lite', merge=True)
  text = convert_report.describe(merged)
  assert 'is kept' not in text and 'adapters/lora.gin' not in text


def test_an_average_is_merged(tmp_path):
  run, values, named = _run(tmp_path)
  source = sources.open_source(f'{run}/checkpoint_3')
  state = {name: source.read_array(name) for name in source.shapes()}
  for name in source.shapes():
    if name.endswith(('/lora_a', '/lora_b')) and name.startswith('target/'):
      state[f'param_average/{name.removeprefix("target/")}'] = state[name] * 2
  given.save(str(tmp_path / 'averaged'), state, adapter=source.metadata['adapter'])
  done = convert.convert(
    str(tmp_path / 'averaged'), str(tmp_path / 'out'), to='hugging_face', param_average=True
  )
  want = adapters.merged(cases.SMALL, values, named, lambda _: 4 * 3, adapters.ALL)
  _assert_merged(given.bits(done.path), want)
  assert '--param_average' not in ' '.join(done.notes)
  for to, options in (('hugging_face', {}), ('t5x_lite', {'merge': True})):
    done = convert.convert(str(tmp_path / 'averaged'), str(tmp_path / to), to=to, **options)
    assert 'running average of the parameters, add --param_average' in ' '.join(done.notes)


def _with_own_kernel(tmp_path):
  run, _, _ = _run(tmp_path)
  source = sources.open_source(f'{run}/checkpoint_3')
  state = {name: source.read_array(name) for name in source.shapes()}
  gate = 'target/encoder/layers_0/attention/gate'
  state |= {
    f'{gate}/{leaf}': np.zeros(shape, np.float32)
    for leaf, shape in (('kernel', (6, 6)), ('lora_a', (6, 2)), ('lora_b', (2, 6)))
  }
  adapter = dict(source.metadata['adapter'])
  kernel = f'{gate.removeprefix("target/")}/kernel'
  adapter['kernels'] = adapter['kernels'] | {kernel: {'rank': 2, 'alpha': 6, 'dims': 'io'}}
  given.save(str(tmp_path / 'own'), state, adapter=adapter)
  return str(tmp_path / 'own')


def _other_base(tmp_path):
  given.folder(tmp_path / 'other', 't5_1_1', emb_dim=8)
  return _adapter(tmp_path / 'adapter', cases.SMALL)[0]


def _deeper_adapter(tmp_path):
  given.folder(tmp_path / 'other', 't5_1_1', num_encoder_layers=1)
  return _adapter(tmp_path / 'adapter', cases.SMALL)[0]


@pytest.mark.parametrize(
  'make, options, message',
  [
    pytest.param(
      _other_base,
      {'to': 'hugging_face', 'base': 'other'},
      r"an adapter of 'other': next to encoder/layers_0/attention/query/kernel \(8, 6\) .* floats .*SelfAttention.q"
      r'.lora_A.weight \(2, 8\), got float32 \(2, 6\)',
      id='another width',
    ),
    pytest.param(
      _deeper_adapter,
      {'to': 'hugging_face', 'base': 'other'},
      r"in the layers of 'other', got base_model.model.encoder.block.1.layer.0.SelfAttention.k.lora_A.weight",
      id='another depth',
    ),
    pytest.param(
      lambda path: _adapter(path / 'a', cases.SMALL)[0],
      {'to': 'hugging_face'},
      '`--base` must be the folder or run directory of the model',
      id='no base',
    ),
    pytest.param(
      lambda path: given.folder(path / 'hf')[0],
      {'to': 't5x', 'base': 'hf'},
      '`--base` must be absent',
      id='base of a model',
    ),
    pytest.param(
      _run_apart,
      {'to': 'hugging_face', 'base': 'missing'},
      '`--base` must be the folder or run directory of the base, got .missing.. Correct the path',
      id='missing base',
    ),
    pytest.param(
      lambda path: _run(path)[0],
      {'to': 't5x'},
      '`--to` must be a format with adapters, got .t5x.*--to=t5x_lite --merge',
      id='t5x',
    ),
    pytest.param(
      lambda path: _run(path, alpha_pattern={'encoder.block.1.*': 3})[0],
      {'to': 't5x_lite', 'param_layout': 'scalable_t5', 'optimizer_state': 'drop'},
      '`--param_layout` must be that of the source for an adapter whose layers have different alphas .*layers_1',
      id='alphas of layers',
    ),
    pytest.param(
      lambda path: _run(path, also_train=['decoder/decoder_norm/scale'])[0],
      {'to': 'peft'},
      'also trained decoder/decoder_norm/scale. Merge the adapter: --to=t5x_lite --merge',
      id='also_train',
    ),
    pytest.param(
      _with_own_kernel,
      {'to': 'peft'},
      'encoder/layers_0/attention/gate/kernel',
      id='own kernel',
    ),
    pytest.param(
      lambda path: given.folder(path / 'hf')[0],
      {'to': 'peft'},
      'must be of a run with an adapter',
      id='no adapter',
    ),
    pytest.param(
      lambda path: given.folder(path / 'hf')[0],
      {'to': 't5x_lite', 'merge': True},
      '`--merge` must be absent',
      id='nothing to merge',
    ),
    pytest.param(
      lambda path: _run(path)[0],
      {'to': 'peft', 'merge': True},
      '`--merge` must be absent with --to=peft',
      id='merge without effect',
    ),
  ],
)
def test_errors_before_anything_is_written(tmp_path, monkeypatch, make, options, message):
  monkeypatch.chdir(tmp_path)
  source = make(tmp_path)
  with pytest.raises((CheckpointError, ConfigError), match=message):
    convert.convert(source, str(tmp_path / 'out'), **options)
  assert not (tmp_path / 'out').exists()


def test_a_custom_network_is_rejected(tmp_path):
  run, _, _ = _run(tmp_path)
  source = sources.open_source(f'{run}/checkpoint_3')
  state = {name: source.read_array(name) for name in source.shapes()}
  network = {'custom_blocks': ['attention_fn']}
  given.save(str(tmp_path / 'own'), state, adapter=source.metadata['adapter'], network=network)
  with pytest.raises(ConfigError, match='does not support the custom attention_fn'):
    convert.convert(str(tmp_path / 'own'), str(tmp_path / 'out'), to='peft')


def test_a_failed_conversion_leaves_no_files(tmp_path, monkeypatch):
  run, _, _ = _run(tmp_path)
  before = sorted(path.name for path in tmp_path.iterdir())

  def fail(self, name):
    if name.endswith('encoder/layers_1/attention/out/lora_b'):
      raise OSError(28, 'No space left on device')
    return make(self, name)

  make = convert_plan.Reader.make
  monkeypatch.setattr(convert_plan.Reader, 'make', fail)
  with pytest.raises(CheckpointError, match='No space left on device'):
    convert.convert(run, str(tmp_path / 'out'), to='peft')
  assert sorted(path.name for path in tmp_path.iterdir()) == before
  monkeypatch.undo()
  convert.convert(run, str(tmp_path / 'out'), to='peft')


@stores.mostly('gcs')
def test_an_adapter_is_written_to_an_object_store(tmp_path, store):
  run, _, named = _run(tmp_path)
  done = convert.convert(run, f'{store.root}/out', to='peft')
  base, _ = given.folder(tmp_path / 'base')
  merged = convert.convert(done.path, str(tmp_path / 'merged'), to='hugging_face', base=base)
  there = convert.convert(
    str(tmp_path / 'made'), str(tmp_path / 'again'), to='hugging_face', base=base
  )
  assert given.bits(merged.path) == given.bits(there.path)
