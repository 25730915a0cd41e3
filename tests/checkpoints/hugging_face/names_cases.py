"""The network of an architecture, and the shapes of a network's parameters."""

import jax
import jax.numpy as jnp

import moe
from t5x_lite import tree_utils
from t5x_lite.networks import t5
from t5x_lite.networks.t5_config import T5Config


def network(arch, **kwargs):
  config = T5Config(**(arch.network_config_kwargs() | kwargs))
  if not arch.num_experts:
    return t5.Transformer(config)
  block = moe.SparseBlock(
    num_experts=arch.num_experts,
    router=moe.TokensChooseRouter(arch.num_experts, use_bias=arch.router_bias),
  )

  def feed_forward(stack, layer):
    return block if layer in arch.sparse_layers_of(stack) else t5.dense_feed_forward

  return t5.Transformer(config, feed_forward)


def shapes(network, *, decoder=False):
  """Return name -> shape of the parameters; a `decoder` takes two arrays of tokens, other networks three."""
  tokens = jnp.ones([1, 2], jnp.int32)
  args = (tokens, tokens) if decoder else (tokens, tokens, tokens)
  variables = jax.eval_shape(
    lambda key: network.init(key, *args, enable_dropout=False), jax.random.key(0)
  )
  return dict(tree_utils.named_leaves(variables['params']))
