"""The peer of the training-step benchmark computes what the package computes; otherwise its times would mean nothing."""

import importlib.util
import pathlib

import jax
import numpy as np

from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite.data import vocabularies
from t5x_lite.networks import t5

_PEER = pathlib.Path(__file__).parent.parent / 'benchmarks' / 'peer_t5.py'


def test_peer_has_the_same_loss_and_gradients():
  spec = importlib.util.spec_from_file_location('peer_t5', _PEER)
  peer_t5 = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(peer_t5)
  config = t5.T5Config(vocab_size=40, emb_dim=16, num_heads=2, num_encoder_layers=2, num_decoder_layers=2, head_dim=8,
                       mlp_dim=24, mlp_activations=('gelu', 'linear'), dropout_rate=0.0, logits_via_embedding=False)
  vocabulary = vocabularies.PassThroughVocabulary(40)
  model = models.EncoderDecoderModel(t5.Transformer(config), vocabulary, vocabulary, optimizers.sgd(0.1), z_loss=1e-4)
  rng = np.random.default_rng(0)
  batch = {'encoder_input_tokens': rng.integers(1, 40, (3, 9)), 'decoder_input_tokens': rng.integers(1, 40, (3, 6)),
           'decoder_target_tokens': rng.integers(1, 40, (3, 6))}
  batch['encoder_input_tokens'][:, 7:] = 0
  batch['decoder_target_tokens'][1, 4:] = 0
  batch['decoder_loss_weights'] = batch['decoder_target_tokens'] > 0
  batch = {name: value.astype(np.int32) for name, value in batch.items()}
  params = model.get_initial_variables(jax.random.key(0), {name: x.shape for name, x in batch.items()})['params']
  ours, our_grads = jax.jit(jax.value_and_grad(lambda p: model.loss_fn(p, batch, None)[0]))(params)
  peer, peer_grads = jax.jit(jax.value_and_grad(lambda p: peer_t5.loss_fn(p, batch, config, 1e-4)))(params)
  np.testing.assert_allclose(peer, ours, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(our_grads), jax.tree.leaves(peer_grads), strict=True):
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)
