"""Small models with adapters, of which both arrays have random values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import models
from t5x_lite import optimizers
from t5x_lite import tree_utils
from t5x_lite.data import vocabularies
from t5x_lite.layers.low_rank import LORA_B
from t5x_lite.networks import t5
from tests.networks import network_cases

VOCABULARY = vocabularies.PassThroughVocabulary(40, eos_id=1)
BATCH = {name: np.asarray(x) for name, x in network_cases.tiny_batch(batch=8).items()}


def make_model(adapter: Any, optimizer_def: Any = None, feed_forward: Any = None, **fields: Any):
  """Return a T5 1.1 of a few thousand parameters; `fields` are those of its configuration."""
  options = {}
  if feed_forward is not None:
    options['feed_forward_fn'] = feed_forward
  return models.EncoderDecoderModel(
    t5.Transformer(network_cases.tiny_config(**fields), **options),
    VOCABULARY,
    VOCABULARY,
    optimizer_def or optimizers.adamw(0.01),
    adapter=adapter,
  )


def initial_variables(model: Any) -> dict[str, Any]:
  """Return new variables of a model."""
  shapes = {name: x.shape for name, x in BATCH.items()}
  return jax.jit(lambda rng: model.get_initial_variables(rng, shapes))(jax.random.key(0))


def random_b(params: Any) -> dict[str, Any]:
  """Return the parameters with random values of every B."""
  rng = np.random.default_rng(1)

  def fill(path, leaf):
    if path.endswith(LORA_B):
      return jnp.asarray(0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
    return leaf

  return tree_utils.map_with_names(fill, params)


def merged(params: Any, scale_fn: Any) -> dict[str, Any]:
  """Return the parameters of the network without adapters, with W + s A B in place of each kernel, by NumPy.

  Args:
    params: parameters with adapters: matrices, with a leading dim of experts if there is one.
    scale_fn: function from the path of a kernel to s.
  """
  flat = tree_utils.flatten_dict(params)
  result = {path: leaf for path, leaf in flat.items() if '/lora_' not in path}
  for path in flat:
    if path.endswith('/lora_a'):
      parent = path.rpartition('/')[0]
      a = np.asarray(flat[path], np.float64)
      b = np.asarray(flat[f'{parent}/lora_b'], np.float64)
      kernel = np.asarray(flat[f'{parent}/kernel'], np.float64)
      result[f'{parent}/kernel'] = jnp.asarray(
        kernel + scale_fn(f'{parent}/kernel') * (a @ b), jnp.float32
      )
  return tree_utils.unflatten_dict(result)
