"""Losses, layers and our own optimizers say every cast: nothing is promoted where dtypes are mixed."""

import jax
import jax.numpy as jnp
import pytest

from t5x_lite import layers
from t5x_lite import losses
from t5x_lite import optimizers


@pytest.mark.parametrize('factor', [None, 7.0, *losses.SpecialLossNormalizingFactor])
def test_losses(factor):
  targets = jnp.ones((2, 4), jnp.int32)
  batch = {'decoder_target_tokens': targets, 'decoder_loss_weights': targets}

  def loss(logits):
    divisor, weights = losses.get_loss_normalizing_factor_and_weights(factor, batch)
    return losses.compute_weighted_cross_entropy(logits, targets, weights, 0.1, 1e-3, divisor)[0]

  with jax.numpy_dtype_promotion('strict'):
    value, grad = jax.eval_shape(jax.value_and_grad(loss), jnp.zeros((2, 4, 8), jnp.bfloat16))
  assert (value.dtype, grad.dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize(
  'layer',
  [
    layers.LayerNorm(dtype=jnp.bfloat16),
    layers.DenseGeneral(6, dtype=jnp.bfloat16, kernel_axes=('embed', 'mlp')),
    layers.MlpBlock(intermediate_dim=6, activations=('gelu', 'linear'), dtype=jnp.bfloat16),
  ],
)
def test_layers(layer):
  def apply(key, x):
    variables = layer.init({'params': key, 'dropout': key}, x)
    return layer.apply(variables, x, rngs={'dropout': key})

  with jax.numpy_dtype_promotion('strict'):
    y = jax.eval_shape(apply, jax.random.key(0), jnp.zeros((2, 4, 8), jnp.bfloat16))
  assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize(
  'make',
  [
    lambda: optimizers.Adafactor(beta1=0.9, weight_decay_rate=0.1),
    lambda: optimizers.scaled_adam(clipping_scale=2.0),
    lambda: optimizers.distributed_shampoo(
      block_size=64,
      graft_type='RMSPROP_NORMALIZED',
      clip_by_scaled_gradient_norm=1.0,
      weight_decay=0.1,
    ),
    lambda: optimizers.distributed_shampoo(block_size=64, shard_optimizer_states=True),
    lambda: optimizers.distributed_shampoo(
      block_size=64,
      root_method='eigh',
      spread_roots=True,
      preconditioning_compute_steps=4,
      best_effort_memory_usage_reduction=True,
      quantize_statistics=True,
    ),
    lambda: optimizers.soap(precondition_1d=True, symmetric_storage=True, exponent=0.4),
    lambda: optimizers.soap(
      block_size=64,
      momentum_dtype='int8',
      second_moment_dtype='bfloat16',
      matrix_dtype='int16',
      spread_refreshes=True,
    ),
  ],
)
def test_optimizers(make):
  """Parameters and gradients are bfloat16, statistics float32."""
  params = {'w': jnp.ones((256, 128), jnp.bfloat16), 'b': jnp.ones((3,), jnp.bfloat16)}

  def update(params, rate):
    optimizer = make().create(params)
    return optimizer, optimizer.apply_gradient(params, learning_rate=rate)

  with jax.numpy_dtype_promotion('strict'):
    before, after = jax.eval_shape(update, params, jnp.float32(0.1))

  # As lists: both have other definitions.
  def kinds(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

  assert kinds(before) == kinds(after)
