"""The network of an architecture."""

import moe
from t5x_lite.networks import t5
from t5x_lite.networks.t5_config import T5Config


def network(arch, **kwargs):
  config = T5Config(**(arch.network_config_kwargs() | kwargs))
  if not arch.num_experts:
    return t5.Transformer(config)
  block = moe.SparseBlock(
      num_experts=arch.num_experts, router=moe.TokensChooseRouter(arch.num_experts, use_bias=arch.router_bias))

  def feed_forward(stack, layer):
    return block if layer in arch.sparse_layers_of(stack) else t5.dense_feed_forward

  return t5.Transformer(config, feed_forward)
