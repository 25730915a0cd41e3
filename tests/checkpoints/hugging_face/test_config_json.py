"""Reading, checking and writing of config.json of all versions."""

import json

import pytest

from t5x_lite.checkpoints.hugging_face import FAMILIES
from t5x_lite.checkpoints.hugging_face import Architecture
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.checkpoints.hugging_face import family_of
from t5x_lite.checkpoints.hugging_face import guess_family
from t5x_lite.checkpoints.hugging_face import network
from t5x_lite.checkpoints.hugging_face import suggest_gin
from t5x_lite.errors import CheckpointError
from tests.checkpoints.hugging_face import hugging_face_cases as cases

# As the first release of T5 small has it: many later keys are not there.
_OLD_T5 = {
  'architectures': ['T5WithLMHeadModel'],
  'd_ff': 2048,
  'd_kv': 64,
  'd_model': 512,
  'decoder_start_token_id': 0,
  'dropout_rate': 0.1,
  'eos_token_id': 1,
  'initializer_factor': 1.0,
  'is_encoder_decoder': True,
  'layer_norm_epsilon': 1e-06,
  'model_type': 't5',
  'n_positions': 512,
  'num_heads': 8,
  'num_layers': 6,
  'output_past': True,
  'pad_token_id': 0,
  'relative_attention_num_buckets': 32,
  'task_specific_params': {'summarization': {'prefix': 'summarize: '}},
  'vocab_size': 32128,
}
_OLD_T5_1_1 = _OLD_T5 | {
  'architectures': ['T5ForConditionalGeneration'],
  'd_ff': 1024,
  'feed_forward_proj': 'gated-gelu',
  'num_heads': 6,
  'num_layers': 8,
  'num_decoder_layers': 8,
  'tie_word_embeddings': False,
}
_SWITCH = {
  'architectures': ['SwitchTransformersForConditionalGeneration'],
  'model_type': 'switch_transformers',
  'd_model': 768,
  'd_ff': 3072,
  'd_kv': 64,
  'num_heads': 12,
  'num_layers': 12,
  'num_decoder_layers': 12,
  'num_experts': 8,
  'num_sparse_encoder_layers': 6,
  'num_sparse_decoder_layers': 6,
  'vocab_size': 32128,
  'expert_capacity': 64,
  'router_dtype': 'float32',
  'router_type': 'tokens_masked',
  'is_gated_act': False,
  'feed_forward_proj': 'relu',
}


def test_the_oldest_files_are_read():
  arch = Architecture.from_config_json(_OLD_T5)
  assert arch == Architecture(
    vocab_size=32128,
    emb_dim=512,
    num_heads=8,
    head_dim=64,
    mlp_dim=2048,
    num_encoder_layers=6,
    num_decoder_layers=6,
    mlp_activations=('relu',),
    logits_via_embedding=True,
  )
  assert family_of(_OLD_T5).name == 't5_1_0'
  newer = Architecture.from_config_json(_OLD_T5_1_1)
  assert newer.mlp_activations == ('gelu', 'linear') and not newer.logits_via_embedding
  assert family_of(_OLD_T5_1_1).name == 't5_1_1'
  del (old := dict(_OLD_T5))['model_type']
  assert Architecture.from_config_json(old) == arch


@pytest.mark.parametrize(
  'config, ours',
  [
    ({'feed_forward_proj': 'relu'}, ('relu',)),
    ({'feed_forward_proj': 'gated-gelu'}, ('gelu', 'linear')),
    ({'feed_forward_proj': 'gated-silu'}, ('silu', 'linear')),
    ({'feed_forward_proj': 'gelu'}, ('gelu_exact',)),
    ({'feed_forward_proj': 'gelu_new'}, ('gelu',)),
    ({'feed_forward_proj': 'gated-gelu_python'}, ('gelu_exact', 'linear')),
    # The derived keys decide where they are said, as in transformers.
    ({'feed_forward_proj': 'gated-gelu', 'dense_act_fn': 'gelu'}, ('gelu_exact', 'linear')),
    (
      {'feed_forward_proj': 'relu', 'is_gated_act': True, 'dense_act_fn': 'swish'},
      ('silu', 'linear'),
    ),
    (
      {'feed_forward_proj': 'gated-gelu', 'is_gated_act': True, 'dense_act_fn': 'gelu_new'},
      ('gelu', 'linear'),
    ),
  ],
)
def test_activations(config, ours):
  assert Architecture.from_config_json(_OLD_T5 | config).mlp_activations == ours


@pytest.mark.parametrize(
  'kind, activation', [('mt5', ('gelu', 'linear')), ('umt5', ('gelu', 'linear'))]
)
def test_defaults_depend_on_the_type_of_model(kind, activation):
  arch = Architecture.from_config_json(_OLD_T5 | {'model_type': kind, 'architectures': None})
  assert arch.mlp_activations == activation and not arch.logits_via_embedding
  assert arch.relpos_per_layer == (kind == 'umt5')
  assert Architecture.from_config_json(_SWITCH).logits_via_embedding


def test_depth_of_a_decoder_without_a_number():
  for config in (_OLD_T5, _SWITCH):
    assert (
      Architecture.from_config_json(
        config | {'num_layers': 4, 'num_decoder_layers': None}
      ).num_decoder_layers
      == 4
    )
  (without := _SWITCH | {'num_layers': 4}).pop('num_decoder_layers')
  assert Architecture.from_config_json(without).num_decoder_layers == 12


@pytest.mark.parametrize(
  'config, has_head, expected',
  [
    # transformers up to 4 says whether logits are tied, and T5 of version 5 whether they are scaled.
    ({'model_type': 't5'}, False, 'embedding'),
    ({'model_type': 't5'}, True, 'embedding'),
    ({'model_type': 't5', 'tie_word_embeddings': False}, True, 'own'),
    ({'model_type': 't5', 'tie_word_embeddings': False}, False, 'own'),
    (
      {'model_type': 't5', 'tie_word_embeddings': True, 'scale_decoder_outputs': False},
      True,
      'own',
    ),
    (
      {'model_type': 't5', 'tie_word_embeddings': True, 'scale_decoder_outputs': False},
      False,
      'unscaled',
    ),
    # Without the weights it may as well be an untied T5 1.1 that transformers 5 has saved, of which there are more.
    (
      {'model_type': 't5', 'tie_word_embeddings': True, 'scale_decoder_outputs': False},
      None,
      'own',
    ),
    (
      {'model_type': 't5', 'tie_word_embeddings': True, 'scale_decoder_outputs': True},
      False,
      'embedding',
    ),
    ({'model_type': 'mt5'}, True, 'own'),
    (
      {'model_type': 'mt5', 'tie_word_embeddings': True, 'transformers_version': '5.23.0'},
      True,
      'own',
    ),
    (
      {'model_type': 'mt5', 'tie_word_embeddings': True, 'transformers_version': '5.23.0'},
      False,
      'unscaled',
    ),
    (
      {'model_type': 'mt5', 'tie_word_embeddings': True, 'transformers_version': '10.0'},
      False,
      'unscaled',
    ),
    # Written here, where no version of transformers is said.
    (
      {'model_type': 'mt5', 'tie_word_embeddings': True, 'scale_decoder_outputs': False},
      False,
      'unscaled',
    ),
    (
      {'model_type': 'umt5', 'tie_word_embeddings': True, 'scale_decoder_outputs': False},
      None,
      'unscaled',
    ),
    ({'model_type': 'switch_transformers', 'scale_decoder_outputs': False}, False, 'unscaled'),
    ({'model_type': 'umt5', 'tie_word_embeddings': False}, True, 'own'),
    (
      {'model_type': 'umt5', 'tie_word_embeddings': True, 'transformers_version': '5.23.0'},
      True,
      'compare',
    ),
    (
      {'model_type': 'umt5', 'tie_word_embeddings': True, 'transformers_version': '5.23.0'},
      False,
      'embedding',
    ),
    ({'model_type': 'switch_transformers'}, False, 'embedding'),
    ({'model_type': 'switch_transformers', 'tie_word_embeddings': False}, True, 'own'),
  ],
)
def test_where_logits_come_from(config, has_head, expected):
  assert config_json.output_head(config, has_head) == expected


def test_a_tied_mt5_of_old_is_rejected_as_versions_differ():
  config = {'model_type': 'mt5', 'tie_word_embeddings': True, 'transformers_version': '4.30.2'}
  with pytest.raises(CheckpointError, match='later versions do not'):
    config_json.output_head(config, False)


@pytest.mark.parametrize('value, expected', [(1e-5, 1e-5), (None, 1e-6), ('missing', 1e-6)])
def test_epsilon_of_the_norms(value, expected):
  config = _OLD_T5 | {'layer_norm_epsilon': value}
  if value == 'missing':
    del config['layer_norm_epsilon']
  arch = Architecture.from_config_json(config)
  assert arch.layer_norm_epsilon == expected
  assert arch.network_config_kwargs()['layer_norm_epsilon'] == expected
  assert arch.to_config_json(FAMILIES['t5_1_0'])['layer_norm_epsilon'] == expected


@pytest.mark.parametrize(
  'changes, encoder, decoder',
  [
    ({}, (1, 3, 5, 7, 9, 11), (1, 3, 5, 7, 9, 11)),
    (
      {'num_sparse_encoder_layers': 12, 'num_sparse_decoder_layers': 4},
      tuple(range(12)),
      (1, 4, 7, 10),
    ),
    # Without sparse layers transformers makes the second one sparse, unless the step says 0.
    ({'num_sparse_encoder_layers': 0, 'decoder_sparse_step': 0}, (1,), ()),
  ],
)
def test_which_layers_of_a_switch_transformer_are_sparse(changes, encoder, decoder):
  arch = Architecture.from_config_json(_SWITCH | changes)
  assert (arch.sparse_encoder_layers, arch.sparse_decoder_layers) == (encoder, decoder)
  assert arch.num_experts == 8 and family_of(_SWITCH).name == 'switch'


@pytest.mark.parametrize(
  'config, match',
  [
    (_OLD_T5 | {'model_type': 'bert'}, "model_type` must be one of 't5', .*got 'bert'.*T5 family"),
    (_OLD_T5 | {'model_type': 'longt5'}, "model_type.*got 'longt5'"),
    (_OLD_T5 | {'model_type': None, 'architectures': ['LlamaForCausalLM']}, 'model_type.*got None'),
    (_OLD_T5 | {'is_encoder_decoder': False}, 'is_encoder_decoder.*got False'),
    (_OLD_T5 | {'is_decoder': True}, 'is_decoder.*got True'),
    (
      _OLD_T5 | {'architectures': ['T5EncoderModel'], 'is_encoder_decoder': False},
      r"`config.json.architectures` must be .*got \['T5EncoderModel'\].* heads, such as that of T5EncoderModel",
    ),
    (
      _OLD_T5 | {'architectures': ['MT5ForTokenClassification']},
      'must be a model ForConditionalGeneration.* such as that of MT5ForTokenClassification. Choose',
    ),
    (
      _OLD_T5 | {'architectures': ['ChronosBoltModelForForecasting']},
      'that of ChronosBoltModelFor',
    ),
    (_OLD_T5 | {'quantization_config': {'load_in_8bit': True}}, 'quantization_config.*Dequantize'),
    (_OLD_T5 | {'layer_norm_epsilon': '1e-5'}, "layer_norm_epsilon.*got '1e-5'"),
    (_OLD_T5 | {'layer_norm_epsilon': 0}, r'layer_norm_epsilon.*\[1e-12, 1\), got 0'),
    (_OLD_T5 | {'layer_norm_epsilon': True}, 'layer_norm_epsilon.*got True'),
    (_OLD_T5 | {'pad_token_id': -3}, 'pad_token_id.*got -3'),
    (
      _OLD_T5 | {'eos_token_id': 0},
      'eos_token_id` must be an id above 0, or a list of such ids, got 0',
    ),
    (_OLD_T5 | {'eos_token_id': [1, '2']}, 'eos_token_id.*got'),
    (_OLD_T5 | {'eos_token_id': []}, 'eos_token_id.*got'),
    (_OLD_T5 | {'decoder_start_token_id': -2}, 'decoder_start_token_id.*got -2'),
    (_OLD_T5 | {'feed_forward_proj': 'gated-mish'}, "got 'gated-mish', with dense_act_fn='mish'"),
    (_OLD_T5 | {'feed_forward_proj': 'double-gelu'}, "'double-gelu'"),
    (_OLD_T5 | {'feed_forward_proj': 'gated-gated-gelu'}, "'gated-gated-gelu'"),
    (_OLD_T5 | {'d_model': '512'}, "d_model.*got '512'"),
    (_OLD_T5 | {'num_layers': -1}, 'num_layers.*got -1'),
    (_OLD_T5 | {'num_layers': 10**12}, r'\[1, 10000\]'),
    (_OLD_T5 | {'d_ff': 2**40}, 'd_ff.*got 1099511627776'),
    (_OLD_T5 | {'dense_act_fn': ['relu']}, r"dense_act_fn=\['relu'\]"),
    (_SWITCH | {'router_jitter_noise': 'x'}, "router_jitter_noise.*got 'x'"),
    ({key: value for key, value in _OLD_T5.items() if key != 'vocab_size'}, 'vocab_size.*got None'),
    (_SWITCH | {'is_gated_act': True}, 'not gated'),
    (_SWITCH | {'dense_act_fn': 'gated-gelu'}, 'not gated'),
    (_SWITCH | {'router_dtype': 'bfloat16'}, 'router_dtype'),
    (_SWITCH | {'num_experts': 0}, 'num_experts.*got 0'),
  ],
)
def test_invalid_configurations(config, match):
  with pytest.raises(CheckpointError, match=match):
    Architecture.from_config_json(config)


@pytest.mark.parametrize(
  'config, generation, expected',
  [
    ({}, None, ((1,), 0)),
    ({'decoder_start_token_id': 2, 'eos_token_id': 3}, {}, ((3,), 2)),
    # As `generate` of transformers, which takes the end tokens of generation_config.json.
    ({'eos_token_id': 1}, {'eos_token_id': [1, 5], 'decoder_start_token_id': None}, ((1, 5), 0)),
    ({'decoder_start_token_id': 2}, {'decoder_start_token_id': 2}, ((1,), 2)),
    ({'decoder_start_token_id': None}, {'decoder_start_token_id': 4}, ((1,), 4)),
    (
      {'decoder_start_token_id': 0},
      {'decoder_start_token_id': 2},
      'generation_config.json.decoder_start_token_id` must be 0, as in config.json, got 2. Set both',
    ),
    ({}, {'eos_token_id': -1}, '`generation_config.json.eos_token_id` must be an id above 0'),
    ({}, {'decoder_start_token_id': 'x'}, "generation_config.json.decoder_start.* got 'x'"),
  ],
)
def test_special_ids_of_generation_config_json(tmp_path, config, generation, expected):
  (tmp_path / 'config.json').write_text(json.dumps(config))
  if generation is not None:
    (tmp_path / 'generation_config.json').write_text(json.dumps(generation))
  if isinstance(expected, str):
    with pytest.raises(CheckpointError, match=expected):
      config_json.read_config(tmp_path)
    with pytest.raises(CheckpointError, match=expected):
      network.decoder_start_id(tmp_path)
    return
  ids = config_json.special_ids(config_json.read_config(tmp_path))
  assert (ids['eos_token_ids'], ids['decoder_start_token_id']) == expected
  assert network.decoder_start_id(tmp_path) == expected[1]


@pytest.mark.parametrize('seed', range(40))
def test_a_written_config_is_read_as_the_same_architecture(seed):
  arch = cases.random_architecture(seed)
  family = guess_family(arch)
  config = arch.to_config_json(family, 'bfloat16')
  if arch.scale_tied_logits or config['model_type'] != 't5':
    assert Architecture.from_config_json(config) == arch
  assert Architecture.from_config_json(config, has_head=not arch.logits_via_embedding) == arch
  assert (
    config['tie_word_embeddings'] is arch.logits_via_embedding
    and config['torch_dtype'] == 'bfloat16'
  )
  assert (
    config['architectures'] == [family.architecture] and config['model_type'] == family.model_type
  )
  assert list(config) == sorted(config)


@pytest.mark.parametrize(
  'arch, family, flags',
  [
    (Architecture.from_config_json(_OLD_T5), 't5_1_0', ('--gin_file=models/t5_1_0_small.gin',)),
    (Architecture.from_config_json(_OLD_T5_1_1), 't5_1_1', ('--gin_file=models/t5_1_1_small.gin',)),
    (
      Architecture.from_config_json(_OLD_T5_1_1 | {'vocab_size': 32100, 'd_ff': 1000}),
      't5_1_1',
      (
        '--gin_file=models/t5_1_1_small.gin',
        '--gin.network.T5Config.vocab_size=32100',
        '--gin.network.T5Config.mlp_dim=1000',
      ),
    ),
    (
      Architecture.from_config_json(
        _OLD_T5_1_1 | {'tie_word_embeddings': True, 'scale_decoder_outputs': False}, False
      ),
      't5_1_1',
      (
        '--gin_file=models/t5_1_1_small.gin',
        '--gin.network.T5Config.logits_via_embedding=True',
        '--gin.network.T5Config.scale_tied_logits=False',
      ),
    ),
    (
      Architecture.from_config_json(_OLD_T5 | {'layer_norm_epsilon': 1e-5}),
      't5_1_0',
      (
        '--gin_file=models/t5_1_0_small.gin',
        '--gin.network.T5Config.layer_norm_epsilon=1e-05',
      ),
    ),
    (
      Architecture.from_config_json(
        _OLD_T5 | {'eos_token_id': [1, 5], 'decoder_start_token_id': 2}
      ),
      't5_1_0',
      (
        '--gin_file=models/t5_1_0_small.gin',
        '--gin.models.EncoderDecoderModel.stop_token_ids=(1, 5)',
        '--gin.models.EncoderDecoderModel.decoder_start_id=2',
      ),
    ),
    # No file has this end token.
    (
      Architecture.from_config_json(_OLD_T5 | {'eos_token_id': 7}),
      't5_1_0',
      ('--gin_file=models/t5_1_0_small.gin',),
    ),
    (
      Architecture.from_config_json(_SWITCH),
      'switch',
      ('--gin_file=models/switch_base.gin', '--gin.NUM_EXPERTS=8'),
    ),
    (
      Architecture.from_config_json(_SWITCH | {'num_layers': 6, 'num_sparse_encoder_layers': 3}),
      'switch',
      (
        '--gin_file=models/switch_base.gin',
        '--gin.NUM_ENCODER_LAYERS=6',
        '--gin.NUM_EXPERTS=8',
        '--gin.NUM_ENCODER_SPARSE_LAYERS=3',
      ),
    ),
  ],
)
def test_gin_files_are_suggested(arch, family, flags):
  suggestion = suggest_gin(arch, FAMILIES[family])
  assert suggestion.flags == flags and suggestion.problem is None


def test_a_problem_is_named_where_no_layout_fits():
  arch = Architecture.from_config_json(_SWITCH | {'num_sparse_decoder_layers': 4})
  assert (
    'layers [1, 4, 7, 10] of 12 in the decoder' in suggest_gin(arch, FAMILIES['switch']).problem
  )
