"""Sparse blocks in use that a network by `SparseFeedForward` does not show: two in a layer, and what names no layer."""

import jax
import pytest

from moe import networks, routing
from t5x_lite.errors import ConfigError
from t5x_lite.networks import t5
from tests.networks import network_cases as cases


def test_two_blocks_of_a_layer_have_routers_of_their_own():
  block = networks.SparseBlock(num_experts=4, router=routing.TokensChooseRouter(4, num_selected=2))
  module = t5.Transformer(cases.tiny_config(), lambda stack, layer: (block, block))
  shapes = jax.eval_shape(lambda key: module.init(key, **cases.tiny_batch()), jax.random.key(0))['params']
  layer = shapes['encoder']['layers_0']
  assert layer['mlp']['router'] and jax.tree.structure(layer['mlp']) == jax.tree.structure(layer['extra_mlp'])


@pytest.mark.parametrize('num_layers', [0, 4])
def test_a_period_that_makes_no_layer_sparse_is_refused(num_layers):
  with pytest.raises(ConfigError, match=f"'every_5' for a stack of {num_layers} layers"):
    networks.SparseFeedForward(block=networks.SparseBlock(num_experts=4), num_encoder_layers=num_layers,
                               encoder_layout='every_5')


def test_a_router_that_is_none_is_refused():
  with pytest.raises(ConfigError, match='expected a Router.*parentheses'):
    networks.SparseBlock(num_experts=4, router=routing.TokensChooseRouter)


def test_a_dispatch_that_computes_densely_is_refused():
  with pytest.raises(ConfigError, match="dispatch='ragged_dot'.*every row with every expert.*Use 'auto'"):
    networks.SparseBlock(num_experts=4, dispatch='ragged_dot')
