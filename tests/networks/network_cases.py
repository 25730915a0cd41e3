"""Networks and batches for the tests of layers and networks."""

from collections.abc import Callable
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import layers
from t5x_lite import losses
from t5x_lite import tree_utils
from t5x_lite.networks import t5
from tests import golden_data

GOLDEN_NETWORKS = (
  'net_t5_1_0_tiny',
  'net_t5_1_1_tiny',
  'net_t5_1_1_packed',
  'net_scalable_t5_1_1_tiny',
)


@functools.cache
def golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Return (description, arrays) of a golden network."""
  return golden_data.load(f't5x/{name}')


def golden_config(name: str, **overrides: Any) -> t5.T5Config:
  """Return the configuration of a golden network, without its `scan_layers`."""
  fields = dict(golden(name)[0]['config'])
  for left_out in ('scan_layers', 'param_scan_axis'):
    fields.pop(left_out, None)
  fields['mlp_activations'] = tuple(fields['mlp_activations'])
  if 'scalable' in name:
    fields['param_layout'] = 'scalable_t5'
  return t5.T5Config(**{**fields, **overrides})


def golden_batch(name: str) -> tuple[dict[str, jax.Array], jax.Array]:
  """Return (the network's inputs, the weights of the target tokens) of a golden network."""
  batch = {
    key: jnp.asarray(value) for key, value in golden_data.subtree(golden(name)[1], 'batch').items()
  }
  weights = batch.pop('decoder_loss_weights')
  return batch, weights


def golden_params(name: str) -> dict[str, Any]:
  """Return the parameters of a golden network."""
  return golden_data.subtree(golden(name)[1], 'params')


def tiny_config(**overrides: Any) -> t5.T5Config:
  """Return a configuration of a few thousand parameters."""
  fields = dict(
    vocab_size=40,
    emb_dim=16,
    num_heads=2,
    num_encoder_layers=2,
    num_decoder_layers=3,
    head_dim=8,
    mlp_dim=24,
    mlp_activations=('gelu', 'linear'),
    dropout_rate=0.0,
  )
  return t5.T5Config(**{**fields, **overrides})


def tiny_batch(
  batch: int = 4, encoder_length: int = 6, decoder_length: int = 5, seed: int = 0
) -> dict[str, jax.Array]:
  """Return inputs for a tiny network, with padding in some rows."""
  rng = np.random.default_rng(seed)
  inputs = rng.integers(1, 40, (batch, encoder_length))
  targets = rng.integers(1, 40, (batch, decoder_length))
  inputs[0, -2:] = 0
  targets[1, -1:] = 0
  shifted = np.concatenate([np.zeros((batch, 1), targets.dtype), targets[:, :-1]], axis=1)
  arrays = dict(
    encoder_input_tokens=inputs, decoder_input_tokens=shifted, decoder_target_tokens=targets
  )
  return {key: jnp.asarray(value, jnp.int32) for key, value in arrays.items()}


def norm_epsilons(module: nn.Module, batch: dict[str, jax.Array]) -> list[float]:
  """Return the epsilon of every norm that a network of T5's layers applies."""
  found = []

  def record(call, args, kwargs, context):
    if isinstance(context.module, layers.LayerNorm):
      found.append(context.module.epsilon)
    return call(*args, **kwargs)

  with nn.intercept_methods(record):
    jax.eval_shape(functools.partial(module.init, **batch, enable_dropout=False), jax.random.key(0))
  return found


def jit(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
  """Jit with the compiler's optimizations off: most of these tests' time is compilation."""
  return jax.jit(fn, compiler_options={'xla_backend_optimization_level': 0}, **options)


def init_params(
  config: t5.T5Config, batch: dict[str, jax.Array], seed: int = 0, **module_fields: Any
) -> dict[str, Any]:
  """Return initial parameters."""
  module = t5.Transformer(config, **module_fields)
  return jit(lambda key: module.init(key, **batch, enable_dropout=False)['params'])(
    jax.random.key(seed)
  )


def random_params(config: t5.T5Config, seed: int = 0) -> dict[str, Any]:
  """Return NumPy parameters with `config`'s tree, without compiling an initialization."""
  init = functools.partial(t5.Transformer(config).init, **tiny_batch(), enable_dropout=False)
  shapes = jax.eval_shape(init, jax.random.key(0))['params']
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32) * 0.3, shapes)


def forward(
  config: t5.T5Config, params: Any, batch: dict[str, jax.Array], rng: jax.Array | None = None
) -> jax.Array:
  """Return logits, with dropout if there is a key."""
  module = t5.Transformer(config)
  rngs = None if rng is None else {'dropout': rng}
  return jit(
    lambda params, rngs: module.apply(
      {'params': params}, **batch, enable_dropout=rng is not None, rngs=rngs
    )
  )(params, rngs)


def loss_and_grads(
  config: t5.T5Config,
  params: Any,
  batch: dict[str, jax.Array],
  weights: Any = None,
  rng: jax.Array | None = None,
  **loss_options: Any,
) -> tuple[jax.Array, Any, jax.Array, jax.Array]:
  """Return (summed loss, its gradients, logits, encoder output), with dropout if there is a key."""
  module = t5.Transformer(config)
  dropout = dict(enable_dropout=rng is not None, rngs=None if rng is None else {'dropout': rng})
  if weights is None:
    weights = (batch['decoder_target_tokens'] > 0).astype(jnp.float32)

  def loss_fn(params):
    encoded = module.apply(
      {'params': params},
      batch['encoder_input_tokens'],
      batch.get('encoder_segment_ids'),
      method='encode',
      **dropout,
    )
    logits = module.apply(
      {'params': params},
      encoded,
      **{k: v for k, v in batch.items() if k != 'encoder_positions'},
      method='decode',
      **dropout,
    )
    loss, _, _ = losses.compute_weighted_cross_entropy(
      logits, batch['decoder_target_tokens'], weights, **loss_options
    )
    return loss, (logits, encoded)

  (loss, (logits, encoded)), grads = jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
  return loss, grads, logits, encoded


def assert_trees_close(actual: Any, expected: Any, rtol: float) -> None:
  """Assert equal structures and, per array, a difference of at most `rtol` of the expected array's norm."""
  actual, expected = dict(tree_utils.named_leaves(actual)), dict(tree_utils.named_leaves(expected))
  assert actual.keys() == expected.keys()
  for name, want in expected.items():
    got = np.asarray(actual[name], np.float64)
    assert got.shape == want.shape, name
    scale = np.linalg.norm(np.asarray(want, np.float64))
    assert np.linalg.norm(got - want) <= rtol * scale + 1e-30, (
      name,
      np.linalg.norm(got - want) / max(scale, 1e-30),
    )
