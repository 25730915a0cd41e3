"""Recorded routing, replayed by a whole model: losses to the bit, and who gets gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import models
from moe import networks
from moe import recording
from moe import routing
from t5x_lite import errors
from t5x_lite.data import vocabularies
from t5x_lite.errors import ConfigError
from t5x_lite.networks import decoder_only
from tests.networks import network_cases as cases


@functools.cache
def _case():
  """Return (model, parameters, batch): noise, capacities that drop, and places by gates."""
  router = routing.TokensChooseRouter(
    4, num_selected=2, jitter_noise=0.1, batch_prioritized_routing=True
  )
  block = networks.SparseBlock(
    num_experts=4,
    router=router,
    expert_dim=12,
    train_capacity_factor=0.75,
    eval_capacity_factor=0.75,
    min_expert_capacity=1,
  )
  config = decoder_only.TransformerConfig(
    vocab_size=40, emb_dim=16, num_heads=2, num_layers=1, head_dim=8, mlp_dim=24, dropout_rate=0.1
  )
  module = networks.sparse_decoder_only(config, block, num_decoder_sparse_layers=1)
  model = models.MoeDecoderOnlyModel(module, vocabularies.PassThroughVocabulary(40), None)
  batch = cases.tiny_batch()
  del batch['encoder_input_tokens']
  shapes = jax.eval_shape(
    lambda key: module.init(key, **batch, enable_dropout=False), jax.random.key(0)
  )['params']
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, shapes
  )
  batch['decoder_loss_weights'] = (batch['decoder_target_tokens'] > 0).astype(jnp.float32)
  return model, params, batch


@pytest.mark.full  # by default, test_layers.py and routing/test_token_routers.py replay
def test_losses_replay_to_the_bit_and_gates_decide_who_gets_gradients(tmp_path):
  model, params, batch = _case()
  key = jax.random.key(5)
  files = recording.RoutingFiles(tmp_path)
  files.write(0, cases.jit(lambda params: model.record_routing(params, batch, key))(params))
  record = files.read(0)
  layer = record['decoder']['layers_0']['mlp']
  assert np.any(layer['gates'] == 0)  # Some choices are dropped.

  def run(model):
    return cases.jit(jax.value_and_grad(lambda params: model.loss_fn(params, batch, key)[0]))(
      params
    )

  loss, grads = run(model)
  by_index_loss, by_index = run(model.with_replayed_routing(record))
  by_gates_loss, by_gates = run(model.with_replayed_routing(record, replay_gates=True))
  assert loss == by_index_loss == by_gates_loss
  cases.assert_trees_close(by_index, grads, 1e-5)

  def kernel(grads):
    return grads['decoder']['layers_0']['mlp']['router']['router_weights']['w']['kernel']

  assert np.linalg.norm(kernel(grads)) > 1e-3 and not np.any(kernel(by_gates))

  def experts(grads):
    return grads['decoder']['layers_0']['mlp']['expert']

  cases.assert_trees_close(experts(by_gates), experts(grads), 1e-5)


def test_replayed_gates_must_be_in_the_record():
  model = _case()[0]
  index = np.zeros([1, 20, 2], np.int32)
  record = {'decoder': {'layers_0': {'mlp': {'expert_index': index}}}}
  model.with_replayed_routing(record)
  with pytest.raises(
    ConfigError, match="layer 'decoder/layers_0/mlp' has no gates.*replay_gates=True"
  ):
    model.with_replayed_routing(record, replay_gates=True)
  whole = {'mlp': {'expert_index': index, 'gates': np.zeros([1, 20, 2], np.float32)}}
  assert list(recording.without_gates(whole)['mlp']) == ['expert_index']


@pytest.mark.parametrize(
  'record, message',
  [
    (
      {'decoder': {'layers_1': {'mlp': {'expert_index': np.zeros((1, 1, 2), np.int32)}}}},
      'network has .*layers_0/mlp',
    ),
    (
      {'decoder': {'layers_0': {'mlp': {'token_index': np.zeros((1, 4, 2), np.int32)}}}},
      'expert_index',
    ),
  ],
)
def test_a_record_of_other_layers_or_routers_raises(record, message):
  model, params, batch = _case()
  replaying = model.with_replayed_routing(record)
  with pytest.raises(ConfigError, match=message):
    jax.eval_shape(lambda params: replaying.loss_fn(params, batch, jax.random.key(0))[0], params)


def test_records_in_a_store(gcs_store):
  records = recording.RoutingFiles(f'{gcs_store.root}/routing')
  assert records.steps() == []
  with pytest.raises(errors.DataError, match='holds no records'):
    records.read(3)
  records.write(3, {'a': {'expert_index': np.arange(6, dtype=np.int32).reshape(1, 2, 3)}})
  assert records.steps() == [3]
  np.testing.assert_array_equal(records.read(3)['a']['expert_index'], np.arange(6).reshape(1, 2, 3))
