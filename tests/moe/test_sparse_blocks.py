"""Sparse blocks in use that a network by `SparseFeedForward` does not show: two in a layer, and what names no layer."""

import jax
import pytest

from moe import networks
from moe import routing
from t5x_lite.errors import ConfigError
from t5x_lite.networks import t5
from tests.networks import network_cases as cases


def test_two_blocks_of_a_layer_have_separate_routers():
  block = networks.SparseBlock(num_experts=4, router=routing.TokensChooseRouter(4, num_selected=2))
  module = t5.Transformer(cases.tiny_config(), lambda stack, layer: (block, block))
  shapes = jax.eval_shape(lambda key: module.init(key, **cases.tiny_batch()), jax.random.key(0))[
    'params'
  ]
  layer = shapes['encoder']['layers_0']
  assert layer['mlp']['router'] and jax.tree.structure(layer['mlp']) == jax.tree.structure(
    layer['extra_mlp']
  )


@pytest.mark.parametrize('num_layers', [0, 4])
def test_a_period_without_sparse_layers_raises(num_layers):
  with pytest.raises(
    ConfigError, match=f"num_layers` must be an integer >= 5, got {num_layers}. .*'every_5'"
  ):
    networks.SparseFeedForward(
      block=networks.SparseBlock(num_experts=4),
      num_encoder_layers=num_layers,
      encoder_layout='every_5',
    )


def test_an_invalid_router_raises():
  with pytest.raises(
    ConfigError, match=r'`SparseBlock.router` must be a router, .*@moe.TokensChooseRouter\(\)'
  ):
    networks.SparseBlock(num_experts=4, router=routing.TokensChooseRouter)


def test_a_dispatch_with_dense_computation_raises():
  with pytest.raises(
    ConfigError, match="`MoeLayer.dispatch` must be one of 'auto', .*got 'ragged_dot'"
  ):
    networks.SparseBlock(num_experts=4, dispatch='ragged_dot')
