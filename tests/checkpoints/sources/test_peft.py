"""Adapters of PEFT: real names, each family, ranks and patterns, and folders that are rejected."""

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import tensor_table
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import adapter_cases as adapters
from tests.checkpoints.hugging_face import hugging_face_cases as cases

_Q = 'encoder.block.0.layer.0.SelfAttention.q'


def _open(path, arch=cases.SMALL):
  """Opens the adapter of a base with this architecture."""
  model = {f'target/{rule.ours}': rule for rule in tensor_table(arch)}
  return sources.open_peft(path, model, 'the base')


def _expected(arch, named, projections):
  """Returns our arrays of the tensors of an adapter."""
  found = {}
  for module, (kernel, expert, _, _) in adapters.modules(arch, projections).items():
    for letter in 'AB':
      ours = f'target/{kernel.removesuffix("kernel")}lora_{letter.lower()}'
      tensor = named[f'base_model.model.{module}.lora_{letter}.weight'].T
      found.setdefault(ours, {})[expert] = tensor
  return {
    name: parts[None] if None in parts else np.stack([parts[e] for e in range(len(parts))])
    for name, parts in found.items()
  }


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize('projections', [adapters.QUERY_VALUE, adapters.ALL], ids=['qv', 'all'])
@pytest.mark.parametrize('family', FAMILIES)
def test_each_family_is_read(tmp_path, family, projections, dtype):
  arch = cases.BY_FAMILY[family]
  named = adapters.tensors(arch, projections, dtype=dtype)
  ends = sorted({module.rpartition('.')[2] for module in adapters.modules(arch, projections)})
  source = _open(adapters.make(tmp_path / 'a', named, target_modules=ends), arch)
  want = _expected(arch, named, projections)
  shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in source.shapes().items()}
  assert shapes == {name: (value.shape, np.dtype(np.float32)) for name, value in want.items()}
  for name, value in want.items():
    np.testing.assert_array_equal(source.read_array(name), value.astype(np.float32))


# A folder next to the project with files that others have published.
_REAL = pathlib.Path(__file__).parents[4] / 'shared' / 'real'


@pytest.mark.skipif(not _REAL.is_dir(), reason='needs the names of a published adapter')
def test_the_names_of_a_published_adapter(tmp_path):
  config = json.loads((_REAL / 't5_large_adapter_config.json').read_text())
  named = {}
  for line in (_REAL / 't5_large_adapter_names.txt').read_text().splitlines():
    name, code, shape = line.split(' ', 2)
    assert code == 'F32'
    named[name] = np.zeros(json.loads(shape), np.float32)
  path = adapters.make(tmp_path / 'a', named)
  (path / 'adapter_config.json').write_text(json.dumps(config))
  large = dataclasses.replace(
    cases.TIED,
    vocab_size=32128,
    emb_dim=1024,
    num_heads=16,
    head_dim=64,
    mlp_dim=4096,
    num_encoder_layers=24,
    num_decoder_layers=24,
  )
  source = _open(path, large)
  shapes = {name: leaf.shape for name, leaf in source.shapes().items()}
  assert len(named) == 288 and len(shapes) == 288
  assert sum(np.prod(shape) for shape in shapes.values()) == 4_718_592
  assert shapes['target/decoder/layers_23/encoder_decoder_attention/value/lora_b'] == (16, 1024)
  described = source.metadata['adapter']
  assert described['dropout_rate'] == 0.1 and not described['rank_stabilized']
  kernels = described['kernels']
  assert len(kernels) == 144
  assert set(map(str, kernels.values())) == {str({'rank': 16, 'alpha': 32, 'dims': 'io'})}


@pytest.mark.parametrize(
  'targets',
  [
    pytest.param(['q', 'v'], id='ends'),
    pytest.param(['SelfAttention.q', 'EncDecAttention.q', 'v'], id='longer ends'),
    pytest.param(sorted(adapters.modules(cases.SMALL)), id='each module'),
    pytest.param(r'(encoder|decoder)\.block\.\d+\..*Attention\.(q|v)', id='expression'),
    pytest.param('all-linear', id='all-linear'),
  ],
)
def test_forms_of_target_modules(tmp_path, targets):
  named = adapters.tensors(cases.SMALL)
  path = adapters.make(tmp_path / 'a', named, target_modules=targets)
  assert len(_open(path).shapes()) == len(named)


def test_patterns_give_ranks_and_alphas(tmp_path):
  def rank(module):
    if module == _Q:
      return 3
    return 4 if module.endswith('.v') else 2

  path = adapters.make(
    tmp_path / 'a',
    adapters.tensors(cases.SMALL, rank=rank),
    rank_pattern={r'encoder\.block\.0\..*\.q': 3, 'v': 4},
    alpha_pattern={'SelfAttention.v': 1, 'v': 8},
    use_rslora=True,
  )
  described = _open(path).metadata['adapter']
  assert described['rank_stabilized']
  kernels = described['kernels']
  assert kernels['encoder/layers_0/attention/query/kernel'] == {'rank': 3, 'alpha': 6, 'dims': 'io'}
  assert kernels['encoder/layers_1/attention/query/kernel']['rank'] == 2
  assert kernels['encoder/layers_0/attention/value/kernel'] == {'rank': 4, 'alpha': 1, 'dims': 'io'}
  assert kernels['decoder/layers_0/encoder_decoder_attention/value/kernel'] == {
    'rank': 4,
    'alpha': 8,
    'dims': 'io',
  }


def test_keys_without_effect_are_accepted(tmp_path):
  keys = {
    'a_key_of_next_year': None,
    'another_key': False,
    'third_key': {},
    'fourth_key': [],
    'megatron_core': 'megatron.core',
    'qalora_group_size': 16,
    'init_lora_weights': 'gaussian',
    'peft_version': '0.18.1',
    'layers_to_transform': [0, 1, 2],
    'auto_mapping': {'base_model_class': 'T5ForConditionalGeneration'},
  }
  path = adapters.make(tmp_path / 'a', adapters.tensors(cases.SMALL), **keys)
  assert len(_open(path).shapes()) == 28


@pytest.mark.parametrize(
  'key, value',
  [
    ('peft_type', 'IA3'),
    ('use_dora', True),
    ('bias', 'all'),
    ('bias', 'lora_only'),
    ('modules_to_save', ['lm_head']),
    ('target_parameters', ['mlp.experts.gate_up_proj']),
    ('trainable_token_indices', [1, 2]),
    ('layer_replication', [[0, 4], [2, 5]]),
    ('alora_invocation_tokens', [1, 2]),
    *(
      ('init_lora_weights', value)
      for value in ('pissa', 'pissa_niter_16', 'olora', 'corda', 'loftq', 'lora_ga', 'mica')
    ),
    ('lora_bias', True),
    ('use_qalora', True),
    ('qalora_group_size', 32),
    ('a_key_of_next_year', 'on'),
    ('r', 0),
    ('r', '8'),
    ('lora_alpha', None),
    ('target_modules', None),
    ('target_modules', []),
    ('target_modules', '(q'),
    ('rank_pattern', {'q': 0}),
    ('rank_pattern', {'(q': 4}),
    ('alpha_pattern', [1]),
  ],
)
def test_each_unsupported_key_is_named(tmp_path, key, value):
  path = adapters.make(tmp_path / 'a', adapters.tensors(cases.SMALL), **{key: value})
  with pytest.raises(CheckpointError) as error:
    _open(path)
  assert f'adapter_config.json.{key}` must be ' in str(error.value)
  assert str(error.value).endswith('.')


def _without(name):
  return lambda named: named.pop(name)


def _also(name, shape):
  return lambda named: named.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
  'change, message',
  [
    pytest.param(
      _also('base_model.model.lm_head.lora_A.weight', (2, 6)), 'of their own', id='lm_head'
    ),
    pytest.param(
      _also('base_model.model.shared.lora_embedding_A', (2, 13)), 'of their own', id='shared'
    ),
    pytest.param(
      _also(
        'base_model.model.encoder.block.0.layer.0.SelfAttention.relative_attention_bias.lora_embedding_A',
        (2, 32),
      ),
      'of their own',
      id='relative_attention_bias',
    ),
    pytest.param(
      _also(f'base_model.model.{_Q}.lora_magnitude_vector', (6,)),
      'is not next to a kernel',
      id='dora',
    ),
    pytest.param(
      _also('base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight', (2, 6)),
      'is not next to a kernel',
      id='another network',
    ),
    pytest.param(
      _also(f'base_model.model.{_Q[:-1]}k.lora_A.weight', (2, 6)), 'target_modules', id='no target'
    ),
    pytest.param(
      _without(f'base_model.model.{_Q}.lora_B.weight'),
      r'must have floats .*, got none',
      id='without B',
    ),
    pytest.param(
      _also(f'base_model.model.{_Q}.lora_A.weight', (3, 6)),
      r'\(2, 6\), got float32 \(3, 6\)',
      id='rank',
    ),
    pytest.param(
      _also(
        'base_model.model.encoder.block.99999999.layer.0.SelfAttention.q.lora_A.weight', (2, 6)
      ),
      'is not next to a kernel',
      id='layer',
    ),
  ],
)
def test_unsupported_tensors_are_named(tmp_path, change, message):
  named = adapters.tensors(cases.SMALL)
  change(named)
  with pytest.raises(CheckpointError, match=message):
    _open(adapters.make(tmp_path / 'a', named))


def test_experts_without_an_adapter_or_with_others_are_rejected(tmp_path):
  options = {'target_modules': ['wi']}
  named = adapters.tensors(cases.SWITCH, ('wi',))
  module = 'encoder.block.1.layer.1.mlp.experts.expert_1.wi'
  some = {name: value for name, value in named.items() if module not in name}
  with pytest.raises(CheckpointError, match='expert_1.wi.lora_A.weight .2, 6., got none'):
    _open(adapters.make(tmp_path / 'a', some, **options), cases.SWITCH)
  path = adapters.make(tmp_path / 'b', named, **options, alpha_pattern={'expert_1.wi': 3})
  with pytest.raises(CheckpointError, match='one rank and alpha for all experts'):
    _open(path, cases.SWITCH)


def test_a_folder_without_tensors_is_rejected(tmp_path):
  with pytest.raises(CheckpointError, match='must have the tensors of an adapter .* got none'):
    _open(adapters.make(tmp_path / 'a', {}))


def test_weights_of_pytorch_are_rejected(tmp_path):
  path = adapters.make(tmp_path / 'a', adapters.tensors(cases.SMALL))
  (path / 'adapter_model.safetensors').rename(path / 'adapter_model.bin')
  with pytest.raises(CheckpointError, match='save it again'):
    _open(path)
