"""Loss-free balancing in training steps: one move of the bias a step, however the batch is cut."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import models
from moe import networks
from moe import routing
from t5x_lite.data import vocabularies
from t5x_lite.trainer import train_step
from tests.networks import network_cases as cases


def _case(**fields):
  """Return (model, train state as the step reads it, batch) of four layers, all or every second one sparse."""
  router = routing.TokensChooseRouter(4, num_selected=2, bias_update_rate=0.01)
  block = networks.SparseBlock(num_experts=4, router=router, expert_dim=12, group_size=6)
  config = cases.tiny_config(num_encoder_layers=2, num_decoder_layers=2, **fields)
  depth = 2 if config.param_layout == 'scalable_t5' else 1
  module = networks.sparse_transformer(
    config, block, num_encoder_sparse_layers=depth, num_decoder_sparse_layers=depth
  )
  model = models.MoeEncoderDecoderModel(module, *[vocabularies.PassThroughVocabulary(40)] * 2, None)
  batch = cases.tiny_batch()
  shapes = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, shapes['params']
  )
  state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes['router_state'])
  batch['decoder_loss_weights'] = (batch['decoder_target_tokens'] > 0).astype(jnp.float32)
  return model, types.SimpleNamespace(params=params, flax_mutables={'router_state': state}), batch


@pytest.mark.full  # by default, routing/test_token_routers.py and test_microbatches.py do this
@pytest.mark.parametrize(
  'fields',
  [
    {},
    *(
      pytest.param(fields, marks=pytest.mark.full)
      for fields in (dict(scan_layers=True), dict(scan_layers=True, param_layout='scalable_t5'))
    ),
  ],
)
def test_micro_batches_change_the_bias_like_the_full_batch(fields):
  model, state, batch = _case(**fields)

  def two_steps(num_microbatches):
    def step(params, mutables):
      state = types.SimpleNamespace(params=params, flax_mutables=mutables)
      return train_step.accumulate_grads_microbatched(
        model, state, batch, jax.random.key(0), num_microbatches
      )[2]

    step = cases.jit(step)
    first = step(state.params, state.flax_mutables)
    return first, step(state.params, first)

  whole = two_steps(None)
  moved = jax.tree.leaves(whole[0])
  assert max(np.abs(leaf).max() for leaf in moved) == np.float32(0.01)
  for got, expected in zip(two_steps(4), whole, strict=True):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
