"""Our arrays and those of Hugging Face folders: one to one, exact, and the architecture that names and shapes tell."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe
from tests.core import hugging_face_cases as cases
from t5x_lite import tree_utils
from t5x_lite.checkpoints.hugging_face import Architecture, check_ours, tensor_table
from t5x_lite.errors import CheckpointError
from t5x_lite.networks import decoder_only, t5
from t5x_lite.networks.t5_config import T5Config

_SEEDS = range(40)


def _shapes(network, *, decoder=False):
  tokens = jnp.ones([1, 2], jnp.int32)
  args = (tokens, tokens) if decoder else (tokens, tokens, tokens)
  variables = jax.eval_shape(lambda key: network.init(key, *args, enable_dropout=False), jax.random.key(0))
  return dict(tree_utils.named_leaves(variables['params']))


def _network(arch, **kwargs):
  config = T5Config(**(arch.network_config_kwargs() | kwargs))
  if not arch.num_experts:
    return t5.Transformer(config)
  block = moe.SparseBlock(
      num_experts=arch.num_experts, router=moe.TokensChooseRouter(arch.num_experts, use_bias=arch.router_bias))

  def feed_forward(stack, layer):
    return block if layer in arch.sparse_layers_of(stack) else t5.dense_feed_forward

  return t5.Transformer(config, feed_forward)


@pytest.mark.parametrize('seed', _SEEDS)
def test_each_array_of_either_side_stands_in_one_rule_and_comes_back_bitwise(seed):
  arch = cases.random_architecture(seed)
  rules = tensor_table(arch)
  ours, theirs = [rule.ours for rule in rules], [name for rule in rules for name in rule.theirs]
  assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
  values = cases.values(arch, ('float32', 'bfloat16', 'float16')[seed % 3], seed)
  tensors = cases.tensors(arch, values)
  assert set(tensors) == set(theirs)
  for rule in rules:
    assert all(tensors[name].shape == rule.their_shape and tensors[name].flags.c_contiguous for name in rule.theirs)
    back = rule.to_ours(tensors.__getitem__)
    assert back.dtype == values[rule.ours].dtype and back.flags.c_contiguous
    np.testing.assert_array_equal(back.view(np.uint8), values[rule.ours].view(np.uint8))


@pytest.mark.parametrize('arch', [cases.SMALL, cases.TIED, cases.UMT5, cases.SWITCH,
                                  dataclasses.replace(cases.SWITCH, router_bias=True)])
def test_our_names_and_shapes_are_those_of_the_network(arch):
  shapes = _shapes(_network(arch))
  assert {rule.ours: rule.shape for rule in tensor_table(arch)} == {name: leaf.shape for name, leaf in shapes.items()}
  check_ours(tensor_table(arch), shapes, 'it')


def test_their_names_are_those_of_the_first_layers_as_transformers_has_them():
  names = {rule.ours: rule.theirs for rule in tensor_table(cases.SWITCH)}
  block = 'decoder.block.1.layer'
  assert names['decoder/layers_1/pre_cross_attention_layer_norm/scale'] == (f'{block}.1.layer_norm.weight',)
  assert names['decoder/layers_1/encoder_decoder_attention/out/kernel'] == (f'{block}.1.EncDecAttention.o.weight',)
  assert names['decoder/layers_1/mlp/router/router_weights/w/kernel'] == (f'{block}.2.mlp.router.classifier.weight',)
  assert names['decoder/layers_1/mlp/expert/wo/kernel'] == tuple(
      f'{block}.2.mlp.experts.expert_{e}.wo.weight' for e in range(3))
  assert names['encoder/layers_0/mlp/wi/kernel'] == ('encoder.block.0.layer.1.mlp.wi.weight',)
  assert names['encoder/relpos_bias/rel_embedding'] == (
      'encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight',)
  dense = {rule.ours: rule.theirs for rule in tensor_table(cases.UMT5)}
  assert dense['decoder/layers_1/mlp/wi_1/kernel'] == ('decoder.block.1.layer.2.DenseReluDense.wi_1.weight',)
  assert dense['encoder/layers_2/relpos_bias/rel_embedding'] == (
      'encoder.block.2.layer.0.SelfAttention.relative_attention_bias.weight',)
  assert dense['decoder/logits_dense/kernel'] == ('lm_head.weight',)


def test_an_untied_switch_transformer_has_its_embedding_under_three_names():
  # transformers would make new tables for its stacks otherwise.
  arch = dataclasses.replace(cases.SWITCH, logits_via_embedding=False)
  assert tensor_table(arch)[0].theirs == (
      'shared.weight', 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
  values = cases.values(arch)
  tensors = cases.tensors(arch, values)
  for name in tensor_table(arch)[0].theirs:
    np.testing.assert_array_equal(tensors[name], values['token_embedder/embedding'])
  assert tensor_table(cases.SWITCH)[0].theirs == ('shared.weight',)


def test_kernels_and_tables_are_transposed_and_experts_are_stacked():
  arch, values = cases.SWITCH, cases.values(cases.SWITCH)
  tensors = cases.tensors(arch, values)
  wi = values['encoder/layers_3/mlp/expert/wi/kernel']
  np.testing.assert_array_equal(tensors['encoder.block.3.layer.1.mlp.experts.expert_2.wi.weight'], wi[2].T)
  np.testing.assert_array_equal(
      tensors['decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight'],
      values['decoder/relpos_bias/rel_embedding'].T)
  np.testing.assert_array_equal(tensors['shared.weight'], values['token_embedder/embedding'])


@pytest.mark.parametrize('seed', _SEEDS)
def test_names_and_shapes_tell_the_architecture(seed):
  arch = cases.random_architecture(seed)
  shapes = {f'target/{rule.ours}': jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in tensor_table(arch)}
  shapes['state/step'] = jax.ShapeDtypeStruct((), jnp.int32)
  network = {'config': 'T5Config', **arch.network_config_kwargs()}
  network['mlp_activations'] = list(network['mlp_activations'])
  found = Architecture.from_shapes(shapes, network)
  expected = arch
  if not (arch.sparse_encoder_layers or arch.sparse_decoder_layers):
    expected = dataclasses.replace(arch, num_experts=0, router_bias=False)
  assert found == expected
  # By the names of an Architecture, and without anything recorded.
  assert Architecture.from_shapes(shapes, dataclasses.asdict(expected)) == expected
  usual = ('relu',) if len(arch.mlp_activations) == 1 else ('gelu', 'linear')
  assert Architecture.from_shapes(shapes) == dataclasses.replace(
      expected, mlp_activations=usual, relpos_max_distance=128, scale_tied_logits=True)


@pytest.mark.parametrize('tied', [False, True])
def test_the_stacked_layout_tells_the_same(tied):
  arch = dataclasses.replace(cases.UMT5, logits_via_embedding=tied)
  shapes = _shapes(_network(arch, param_layout='scalable_t5', relpos_bias_tables=None))
  assert Architecture.from_shapes(shapes) == arch
  # A model with one table per stack has equal ones there.
  shared = dataclasses.replace(arch, relpos_per_layer=False)
  assert Architecture.from_shapes(shapes, shared.network_config_kwargs()) == shared


@pytest.mark.parametrize('change, named', [
    ({'vocab_size': 14}, 'vocab_size'), ({'num_heads': 2}, 'num_heads'), ({'num_decoder_layers': 9}, 'decoder_layers'),
    ({'mlp_activations': ['relu']}, 'mlp_activations'), ({'relpos_bias_tables': 'per_layer'}, 'relpos_per_layer'),
    ({'num_relpos_buckets': 64}, 'num_buckets'), ({'logits_via_embedding': True}, 'logits_via_embedding'),
])
def test_what_was_recorded_must_agree_with_the_arrays(change, named):
  shapes = {rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in tensor_table(cases.SMALL)}
  with pytest.raises(CheckpointError, match=f'recorded with .*{named}'):
    Architecture.from_shapes(shapes, cases.SMALL.network_config_kwargs() | change)


def _sparse_network(**kwargs):
  config = T5Config(**cases.TIED.network_config_kwargs())
  layout = {key: kwargs.pop(key) for key in ('extra_mlp',) if key in kwargs}
  activations = kwargs.pop('activations', None)
  config = dataclasses.replace(config, mlp_activations=activations) if activations else config
  block = moe.SparseBlock(num_experts=2, **kwargs)
  return moe.sparse_transformer(config, block, num_encoder_sparse_layers=1, **layout)


@pytest.mark.parametrize('kwargs, named', [
    (dict(extra_mlp=True), 'extra_mlp'), (dict(shared_expert_dim=4), 'shared_expert_dim'),
    (dict(expert_bias=True), 'expert_bias'), (dict(activations=('gelu', 'linear')), 'gated'),
    (dict(router=moe.HashRouter(2)), 'HashRouter'),
])
def test_sparse_networks_that_transformers_does_not_have_are_refused(kwargs, named):
  with pytest.raises(CheckpointError, match=named):
    Architecture.from_shapes(_shapes(_sparse_network(**kwargs)))


def test_other_networks_are_refused_by_name():
  kwargs = cases.SMALL.network_config_kwargs()
  num_layers = kwargs.pop('num_encoder_layers'), kwargs.pop('num_decoder_layers')
  decoder = decoder_only.DecoderWrapper(decoder_only.TransformerConfig(num_layers=num_layers[0], **kwargs))
  with pytest.raises(CheckpointError, match='without an encoder'):
    Architecture.from_shapes(_shapes(decoder, decoder=True))
  shapes = {rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in tensor_table(cases.SMALL)}
  for name, shape, match in (
      ('encoder/layers_0/attention/qkv/kernel', (6, 18), 'fused'),
      ('encoder/layers_0/attention/query/bias', (6,), 'query/bias.*no counterpart'),
      ('encoder/layers_7/mlp/wi/kernel', (6, 10), 'layers'),
  ):
    with pytest.raises(CheckpointError, match=match):
      Architecture.from_shapes(shapes | {name: jax.ShapeDtypeStruct(shape, jnp.float32)})
  three = {name.replace('wi_1', 'wi_2'): leaf for name, leaf in shapes.items() if 'wi_1' in name} | shapes
  with pytest.raises(CheckpointError, match=re.escape("('gelu', 'linear', 'linear')")):
    Architecture.from_shapes(three)
  with pytest.raises(CheckpointError, match='relpos_bias/rel_embedding'):
    Architecture.from_shapes({name: leaf for name, leaf in shapes.items() if 'relpos' not in name})


def test_experts_of_two_numbers_are_refused():
  shapes = {rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in tensor_table(cases.SWITCH)}
  shapes['encoder/layers_1/mlp/router/router_weights/w/kernel'] = jax.ShapeDtypeStruct((6, 5), jnp.float32)
  with pytest.raises(CheckpointError, match=r'\[3, 5\] experts'):
    Architecture.from_shapes(shapes)


def test_problems_name_both_sides():
  rules = tensor_table(cases.SMALL)
  shapes = {rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in rules}
  shapes['encoder/layers_0/mlp/wo/kernel'] = jax.ShapeDtypeStruct((10, 7), jnp.float32)
  shapes['extra'] = jax.ShapeDtypeStruct((2,), jnp.float32)
  del shapes['decoder/logits_dense/kernel']
  with pytest.raises(CheckpointError) as error:
    check_ours(rules, shapes, 'checkpoint_7')
  text = str(error.value)
  assert 'checkpoint_7' in text and 'missing decoder/logits_dense/kernel (6, 13) <-> lm_head.weight (13, 6)' in text
  assert 'surplus extra (2,)' in text
  assert ('encoder/layers_0/mlp/wo/kernel has shape (10, 7), expected encoder/layers_0/mlp/wo/kernel (10, 6) <-> '
          'encoder.block.0.layer.1.DenseReluDense.wo.weight (6, 10)') in text


@pytest.mark.parametrize('changes, match', [
    (dict(mlp_activations=('relu', 'gelu')), 'mlp_activations'), (dict(mlp_activations=('softplus',)), 'softplus'),
    (dict(sparse_encoder_layers=(1,)), 'num_experts=0'), (dict(num_experts=2), 'not gated'),
    (dict(num_experts=2, mlp_activations=('relu',), relpos_per_layer=True), 'per layer'),
    (dict(num_heads=0), 'num_heads'), (dict(relpos_num_buckets=6), 'num_relpos_buckets'),
    (dict(scale_tied_logits=False), 'scale_tied_logits'),
])
def test_architectures_that_cannot_be_are_refused(changes, match):
  with pytest.raises(ValueError, match=match):
    dataclasses.replace(cases.SMALL, **changes)
