"""The gin files of released sizes against the `config.json` of the published models.

The numbers were taken down from the sources that a row names, none of which is read here. Published models of one form
share a row: the LM-adapted T5 1.1 and Flan-T5 have the config.json of T5 1.1 but for special cases that are named.
"""

import dataclasses

import gin
import pytest

from moe import networks as moe_networks
from t5x_lite.checkpoints import hugging_face
from t5x_lite.configuration import syntax as gin_syntax
from tests.repository.gin_model_files import load_model


@dataclasses.dataclass(frozen=True)
class _Row:
  """A published model.

  Attributes:
    gin_file: our file, without `models/` and `.gin`.
    published: names on the hub.
    dims: d_model, num_heads, d_kv, d_ff, num_layers, num_decoder_layers.
    source: where the numbers are published.
    macros: of our file, where it serves several models.
    config: keys of config.json beyond those of the family.
  """

  gin_file: str
  published: str
  dims: tuple[int, ...]
  source: str
  macros: dict = dataclasses.field(default_factory=dict)
  config: dict = dataclasses.field(default_factory=dict)


_T5_PAPER = (
  'Raffel et al. 2020, section 3.7; text-to-text-transfer-transformer, t5/models/gin/models'
)
_T5_1_1 = 'text-to-text-transfer-transformer, released_checkpoints.md; t5x/examples/t5/t5_1_1'
_MT5 = 'Xue et al. 2021; t5x/examples/t5/mt5'
_UMT5 = 'Chung et al. 2023; t5x/examples/scalable_t5/umt5; config.json of umt5-base and umt5-xxl in public repositories'
_BYT5 = 'Xue et al. 2022, table 1; t5x/examples/t5/byt5; config.json of byt5-small and -large in public repositories'
_SWITCH = 'Fedus et al. 2021; transformers, convert_switch_transformersx_checkpoint_to_flax.py'
# Not of the models themselves, but of models that were trained from them, which have their sizes.
_CODET5_BASE = 'config.json of codet5-base-codexglue-*, fine-tuned from codet5-base'
_CODET5_LARGE = 'config.json of codet5-large-ntp-py, trained further from codet5-large'
_CODET5P = 'config.json of models that were fine-tuned from codet5p-220m and codet5p-770m'
_MADLAD = 'config.json of google/madlad400-3b-mt, -7b-mt-bt and -10b-mt'
_UL2 = 'config.json of google/ul2 and google/flan-ul2; Tay et al. 2022'
_SPARSE = {'num_sparse_encoder_layers': 6, 'num_sparse_decoder_layers': 6, 'expert_capacity': 64}
_SPARSE_LARGE = {**_SPARSE, 'num_sparse_encoder_layers': 12, 'num_sparse_decoder_layers': 12}

# Keys that all models of a family have. 'tie_word_embeddings' as it was published: T5's files leave it out (True).
_FAMILIES = {
  't5_1_0': {'model_type': 't5', 'vocab_size': 32128},
  't5_1_1': {
    'model_type': 't5',
    'vocab_size': 32128,
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
    'tokenizer_class': 'T5Tokenizer',
  },
  'mt5': {
    'model_type': 'mt5',
    'vocab_size': 250112,
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
  },
  'umt5': {
    'model_type': 'umt5',
    'vocab_size': 256384,
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
  },
  'byt5': {
    'model_type': 't5',
    'vocab_size': 384,
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
    'tokenizer_class': 'ByT5Tokenizer',
  },
  'switch': {
    'model_type': 'switch_transformers',
    'vocab_size': 32128,
    'feed_forward_proj': 'relu',
    'dense_act_fn': 'relu',
    'is_gated_act': False,
    'router_bias': False,
  },
  'codet5': {'model_type': 't5', 'vocab_size': 32100, 'feed_forward_proj': 'relu'},
  'madlad400': {
    'model_type': 't5',
    'vocab_size': 256000,
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
  },
  'flan_ul2': {
    'model_type': 't5',
    'vocab_size': 32128,
    'feed_forward_proj': 'gated-silu',
    'dense_act_fn': 'silu',
    'is_gated_act': True,
  },
}
# Files with the sizes of another one.
_SAME = {'codet5p_220m': 'codet5_base', 'codet5p_770m': 'codet5_large'}
# Families of models with a file of another name.
_FORMS = {'codet5': 't5_1_0', 'madlad400': 't5_1_1', 'flan_ul2': 't5_1_0'}

_ROWS = [
  _Row('t5_1_0_small', 't5-small', (512, 8, 64, 2048, 6, 6), _T5_PAPER),
  _Row('t5_1_0_base', 't5-base', (768, 12, 64, 3072, 12, 12), _T5_PAPER),
  _Row('t5_1_0_large', 't5-large', (1024, 16, 64, 4096, 24, 24), _T5_PAPER),
  # Their width is that of large; heads and hidden units are wider together than it.
  _Row('t5_1_0_xl', 't5-3b', (1024, 32, 128, 16384, 24, 24), _T5_PAPER),
  _Row('t5_1_0_xxl', 't5-11b', (1024, 128, 128, 65536, 24, 24), _T5_PAPER),
  _Row(
    't5_1_1_small',
    't5-v1_1-small t5-small-lm-adapt flan-t5-small',
    (512, 6, 64, 1024, 8, 8),
    _T5_1_1,
  ),
  _Row(
    't5_1_1_base',
    't5-v1_1-base t5-base-lm-adapt flan-t5-base',
    (768, 12, 64, 2048, 12, 12),
    _T5_1_1,
  ),
  _Row(
    't5_1_1_large',
    't5-v1_1-large t5-large-lm-adapt flan-t5-large',
    (1024, 16, 64, 2816, 24, 24),
    _T5_1_1,
  ),
  _Row('t5_1_1_xl', 't5-v1_1-xl t5-xl-lm-adapt flan-t5-xl', (2048, 32, 64, 5120, 24, 24), _T5_1_1),
  _Row(
    't5_1_1_xxl', 't5-v1_1-xxl t5-xxl-lm-adapt flan-t5-xxl', (4096, 64, 64, 10240, 24, 24), _T5_1_1
  ),
  _Row('mt5_small', 'mt5-small', (512, 6, 64, 1024, 8, 8), _MT5),
  _Row('mt5_base', 'mt5-base', (768, 12, 64, 2048, 12, 12), _MT5),
  _Row('mt5_large', 'mt5-large', (1024, 16, 64, 2816, 24, 24), _MT5),
  _Row('mt5_xl', 'mt5-xl', (2048, 32, 64, 5120, 24, 24), _MT5),
  _Row('mt5_xxl', 'mt5-xxl', (4096, 64, 64, 10240, 24, 24), _MT5),
  _Row('umt5_small', 'umt5-small', (512, 6, 64, 1024, 8, 8), _UMT5),
  # As a model that includes it quotes its file, that says tie_word_embeddings: true; the folder has both tables.
  _Row(
    'umt5_base',
    'umt5-base',
    (768, 12, 64, 2048, 12, 12),
    _UMT5,
    config={'tie_word_embeddings': True, 'transformers_version': '5.3.0'},
  ),
  _Row('umt5_xl', 'umt5-xl', (2048, 32, 64, 5120, 24, 24), _UMT5),
  _Row('umt5_xxl', 'umt5-xxl', (4096, 64, 64, 10240, 24, 24), _UMT5),
  _Row('byt5_small', 'byt5-small', (1472, 6, 64, 3584, 12, 4), _BYT5),
  _Row('byt5_base', 'byt5-base', (1536, 12, 64, 3968, 18, 6), _BYT5),
  _Row('byt5_large', 'byt5-large', (1536, 16, 64, 3840, 36, 12), _BYT5),
  _Row('byt5_xl', 'byt5-xl', (2560, 32, 64, 6720, 36, 12), _BYT5),
  _Row('byt5_xxl', 'byt5-xxl', (4672, 64, 64, 12352, 36, 12), _BYT5),
  _Row('codet5_small', 'codet5-small', (512, 8, 64, 2048, 6, 6), 'config.json of codet5-small'),
  _Row('codet5_base', 'codet5-base', (768, 12, 64, 3072, 12, 12), _CODET5_BASE),
  _Row('codet5_large', 'codet5-large', (1024, 16, 64, 4096, 24, 24), _CODET5_LARGE),
  _Row('codet5p_220m', 'codet5p-220m', (768, 12, 64, 3072, 12, 12), _CODET5P),
  _Row('codet5p_770m', 'codet5p-770m', (1024, 16, 64, 4096, 24, 24), _CODET5P),
  _Row('madlad400_3b', 'madlad400-3b-mt', (1024, 16, 128, 8192, 32, 32), _MADLAD),
  _Row('madlad400_7b', 'madlad400-7b-mt', (2048, 16, 128, 8192, 48, 48), _MADLAD),
  _Row('madlad400_10b', 'madlad400-10b-mt', (2048, 32, 128, 16384, 32, 32), _MADLAD),
  _Row('flan_ul2', 'flan-ul2 ul2', (4096, 16, 256, 16384, 32, 32), _UL2),
  *(
    _Row(
      'switch_base',
      f'switch-base-{number}',
      (768, 12, 64, 3072, 12, 12),
      _SWITCH,
      {'NUM_EXPERTS': number},
      {**_SPARSE, 'num_experts': number},
    )
    for number in (8, 16, 32, 64, 128, 256)
  ),
  _Row(
    'switch_large',
    'switch-large-128',
    (1024, 16, 64, 4096, 24, 24),
    _SWITCH,
    {},
    {**_SPARSE_LARGE, 'num_experts': 128},
  ),
]


def _form(row):
  return next(name for name in _FAMILIES if row.gin_file.startswith(name))


def _family(row):
  return _FORMS.get(_form(row), _form(row))


def _config_json(row):
  keys = ('d_model', 'num_heads', 'd_kv', 'd_ff', 'num_layers', 'num_decoder_layers')
  return {
    **_FAMILIES[_form(row)],
    **dict(zip(keys, row.dims, strict=True)),
    'layer_norm_epsilon': 1e-6,
    'relative_attention_num_buckets': 32,
    'is_encoder_decoder': True,
    **row.config,
  }


@pytest.fixture(autouse=True)
def _clear():
  yield
  gin.clear_config()


@pytest.mark.parametrize('row', _ROWS, ids=[row.published.split()[0] for row in _ROWS])
def test_the_file_has_the_published_dims(row):
  module = load_model(row.gin_file, **row.macros).module
  published = hugging_face.Architecture.from_config_json(
    _config_json(row), has_head=_family(row) not in ('t5_1_0', 'switch')
  )
  wanted = published.network_config_kwargs()
  assert {
    name: tuple(value) if isinstance(value, (list, tuple)) else value
    for name, value in vars(module.config).items()
    if name in wanted
  } | {
    'relpos_bias_tables': 'per_layer' if module.config.relpos_per_layer else 'per_stack'
  } == wanted
  sparse = dict.fromkeys(('encoder', 'decoder'), ())
  if published.num_experts:
    blocks = module.feed_forward_fn
    assert blocks.block.num_experts == published.num_experts
    sparse = {
      stack: moe_networks.sparse_layers(
        getattr(blocks, f'{stack}_layout'),
        getattr(blocks, f'num_{stack}_layers'),
        getattr(blocks, f'num_{stack}_sparse_layers'),
      )
      for stack in sparse
    }
  assert sparse == {stack: published.sparse_layers_of(stack) for stack in sparse}
  assert hugging_face.family_of(_config_json(row)).name == _family(row)
  # The file that conversion proposes is this one.
  end = 2 if _form(row) in ('codet5', 'madlad400') else 1
  published = dataclasses.replace(published, eos_token_ids=(end,))
  suggested = hugging_face.suggest_gin(published, hugging_face.get_family(_family(row)))
  assert suggested.file == f'models/{_SAME.get(row.gin_file, row.gin_file)}.gin'
  assert suggested.problem is None
  assert set(suggested.bindings) <= {f'{name}={value}' for name, value in row.macros.items()}


def test_every_released_size_has_a_row():
  files = {
    name.removeprefix('models/').removesuffix('.gin')
    for name in gin_syntax.packaged_files('models')
  }
  released = {name for name in files if name.startswith(tuple(_FAMILIES))}
  assert {row.gin_file for row in _ROWS} == released - {'t5_1_0_tiny', 't5_1_1_tiny'}
