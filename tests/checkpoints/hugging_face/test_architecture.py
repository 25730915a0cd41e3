"""Architectures that cannot be, and those that names and shapes of arrays tell."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import moe
from t5x_lite.checkpoints.hugging_face import Architecture
from t5x_lite.checkpoints.hugging_face import tensor_table
from t5x_lite.errors import CheckpointError
from t5x_lite.networks import decoder_only
from t5x_lite.networks.t5_config import T5Config
from tests.checkpoints.hugging_face import hugging_face_cases as cases
from tests.checkpoints.hugging_face import names_cases as networks


@pytest.mark.parametrize(
  'changes, match',
  [
    (dict(mlp_activations=('relu', 'gelu')), 'mlp_activations'),
    (dict(mlp_activations=('softplus',)), 'softplus'),
    (dict(sparse_encoder_layers=(1,)), 'num_experts=0'),
    (dict(num_experts=2), 'not gated'),
    (dict(num_experts=2, mlp_activations=('relu',), relpos_per_layer=True), 'per layer'),
    (dict(num_heads=0), 'num_heads'),
    (dict(relpos_num_buckets=6), 'num_relpos_buckets'),
    (dict(scale_tied_logits=False), 'scale_tied_logits'),
  ],
)
def test_architectures_that_cannot_be_are_rejected(changes, match):
  with pytest.raises(ValueError, match=match):
    dataclasses.replace(cases.SMALL, **changes)


_SEEDS = range(40)


@pytest.mark.parametrize('seed', _SEEDS)
def test_names_and_shapes_tell_the_architecture(seed):
  arch = cases.random_architecture(seed)
  shapes = {
    f'target/{rule.ours}': jax.ShapeDtypeStruct(rule.shape, jnp.float32)
    for rule in tensor_table(arch)
  }
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
    expected,
    mlp_activations=usual,
    relpos_max_distance=128,
    layer_norm_epsilon=1e-6,
    scale_tied_logits=True,
  )


@pytest.mark.parametrize('tied', [False, True])
def test_the_stacked_layout_tells_the_same(tied):
  arch = dataclasses.replace(cases.UMT5, logits_via_embedding=tied)
  shapes = networks.shapes(
    networks.network(arch, param_layout='scalable_t5', relpos_bias_tables=None)
  )
  assert Architecture.from_shapes(shapes) == arch
  # A model with one table per stack has equal ones there.
  shared = dataclasses.replace(arch, relpos_per_layer=False)
  assert Architecture.from_shapes(shapes, shared.network_config_kwargs()) == shared


@pytest.mark.parametrize(
  'change, named',
  [
    ({'vocab_size': 14}, 'vocab_size'),
    ({'num_heads': 2}, 'num_heads'),
    ({'num_decoder_layers': 9}, 'decoder_layers'),
    ({'mlp_activations': ['relu']}, 'mlp_activations'),
    ({'relpos_bias_tables': 'per_layer'}, 'relpos_per_layer'),
    ({'num_relpos_buckets': 64}, 'num_buckets'),
    ({'logits_via_embedding': True}, 'logits_via_embedding'),
  ],
)
def test_the_recorded_network_must_agree_with_the_arrays(change, named):
  shapes = {
    rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in tensor_table(cases.SMALL)
  }
  with pytest.raises(CheckpointError, match=f'{named}` in the metadata of the checkpoint must be'):
    Architecture.from_shapes(shapes, cases.SMALL.network_config_kwargs() | change)


def _sparse_network(**kwargs):
  config = T5Config(**cases.TIED.network_config_kwargs())
  layout = {key: kwargs.pop(key) for key in ('extra_mlp',) if key in kwargs}
  activations = kwargs.pop('activations', None)
  config = dataclasses.replace(config, mlp_activations=activations) if activations else config
  block = moe.SparseBlock(num_experts=2, **kwargs)
  return moe.sparse_transformer(config, block, num_encoder_sparse_layers=1, **layout)


@pytest.mark.parametrize(
  'kwargs, named',
  [
    (dict(extra_mlp=True), 'extra_mlp'),
    (dict(shared_expert_dim=4), 'shared_expert_dim'),
    (dict(expert_bias=True), 'expert_bias'),
    (dict(activations=('gelu', 'linear')), 'gated'),
    (dict(router=moe.HashRouter(2)), 'HashRouter'),
  ],
)
def test_sparse_networks_that_transformers_does_not_have_are_rejected(kwargs, named):
  with pytest.raises(CheckpointError, match=named):
    Architecture.from_shapes(networks.shapes(_sparse_network(**kwargs)))


def test_other_networks_are_rejected_by_name():
  kwargs = cases.SMALL.network_config_kwargs()
  num_layers = kwargs.pop('num_encoder_layers'), kwargs.pop('num_decoder_layers')
  decoder = decoder_only.DecoderWrapper(
    decoder_only.TransformerConfig(num_layers=num_layers[0], **kwargs)
  )
  with pytest.raises(CheckpointError, match='without an encoder'):
    Architecture.from_shapes(networks.shapes(decoder, decoder=True))
  shapes = {
    rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in tensor_table(cases.SMALL)
  }
  for name, shape, match in (
    ('encoder/layers_0/attention/qkv/kernel', (6, 18), 'fused'),
    ('encoder/layers_0/attention/query/bias', (6,), 'query/bias.*unknown'),
    ('encoder/layers_7/mlp/wi/kernel', (6, 10), 'layers'),
  ):
    with pytest.raises(CheckpointError, match=match):
      Architecture.from_shapes(shapes | {name: jax.ShapeDtypeStruct(shape, jnp.float32)})
  three = {
    name.replace('wi_1', 'wi_2'): leaf for name, leaf in shapes.items() if 'wi_1' in name
  } | shapes
  with pytest.raises(CheckpointError, match=re.escape("('gelu', 'linear', 'linear')")):
    Architecture.from_shapes(three)
  with pytest.raises(CheckpointError, match='relpos_bias/rel_embedding'):
    Architecture.from_shapes({name: leaf for name, leaf in shapes.items() if 'relpos' not in name})


def test_experts_of_two_numbers_are_rejected():
  shapes = {
    rule.ours: jax.ShapeDtypeStruct(rule.shape, jnp.float32) for rule in tensor_table(cases.SWITCH)
  }
  shapes['encoder/layers_1/mlp/router/router_weights/w/kernel'] = jax.ShapeDtypeStruct(
    (6, 5), jnp.float32
  )
  with pytest.raises(CheckpointError, match=r'\[3, 5\] experts'):
    Architecture.from_shapes(shapes)
