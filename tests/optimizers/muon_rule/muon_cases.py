"""A tiny T5 with experts in each layout, whose arrays are made of the same layers, heads and experts."""

import jax
from jax.sharding import PartitionSpec as P
import numpy as np

from t5x_lite import layer_stacks

NUM_LAYERS = 3
NUM_EXPERTS = 4
_HEADS, _KV = 2, 5

# Array of a layer to its shape and axes in the layout 't5', in which the dims of heads are one.
_LAYER = {
  'attention/query/kernel': ((6, _HEADS * _KV), ('embed', 'joined_kv')),
  'attention/out/kernel': ((_HEADS * _KV, 6), ('joined_kv', 'embed')),
  'mlp/wi/kernel': ((6, 10), ('embed', 'mlp')),
  'mlp/expert/wo/kernel': ((NUM_EXPERTS, 10, 6), ('expert', 'expert_mlp', 'embed')),
  'mlp/expert/wo/bias': ((NUM_EXPERTS, 6), ('expert', 'embed')),
  'mlp/router/kernel': ((6, NUM_EXPERTS), ('embed', 'unmodeled')),
  'norm/scale': ((6,), ('embed',)),
  'query_adapter/lora_a': ((6, 2), ('embed', 'lora_rank')),
}
_OTHERS = {
  'token_embedder/embedding': ((12, 6), ('vocab', 'embed')),
  'decoder/logits/kernel': ((6, 12), ('embed', 'vocab')),
  'decoder/relpos/embedding': ((_HEADS, 8), ('heads', 'relpos_buckets')),
}
# Arrays whose updates are orthogonalized.
KERNELS = frozenset(
  ('attention/query/kernel', 'attention/out/kernel', 'mlp/wi/kernel', 'mlp/expert/wo/kernel')
  + ('query_adapter/lora_a',)
)


def _nested(flat):
  tree = {}
  for path, leaf in flat.items():
    *parents, name = path.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = leaf
  return tree


def axes(layout):
  """Return the logical axes of the parameters in a layout, 't5' or 'scalable_t5'."""
  flat = {path: P(*names) for path, (_, names) in _OTHERS.items()}
  for path, (_, names) in _LAYER.items():
    if layout == 't5':
      for layer in range(NUM_LAYERS):
        flat[f'encoder/layers_{layer}/{path}'] = P(*names)
    else:
      flat[f'encoder/layers/{path}'] = P(*_scalable_axes(names))
  return _nested(flat)


def _scalable_axes(names):
  """Return the axes with a dim for layers in position 1 and one for each of heads and kv."""
  split = []
  for name in names:
    split += ['heads', 'kv'] if name == 'joined_kv' else [name]
  return (split[0], 'layers', *split[1:])


def random_params(seed, scale=0.3):
  """Return random NumPy parameters in the layout 't5'."""
  rng = np.random.default_rng(seed)

  def draw(shape):
    return (rng.normal(size=shape) * scale).astype(np.float32)

  flat = {path: draw(shape) for path, (shape, _) in _OTHERS.items()}
  for layer in range(NUM_LAYERS):
    for path, (shape, _) in _LAYER.items():
      flat[f'encoder/layers_{layer}/{path}'] = draw(shape)
  return _nested(flat)


def to_scalable(params):
  """Return parameters of the layout 't5' in 'scalable_t5'."""
  encoder = params['encoder']
  layers = [encoder[f'layers_{layer}'] for layer in range(NUM_LAYERS)]
  flat = {}
  for path, (shape, names) in _LAYER.items():
    arrays = [_leaf(layer, path) for layer in layers]
    full = []
    for size, name in zip(shape, names, strict=True):
      full += [_HEADS, _KV] if name == 'joined_kv' else [size]
    flat[path] = np.stack([np.reshape(array, full) for array in arrays], axis=1)
  return {**params, 'encoder': {'layers': _nested(flat)}}


def from_scalable(params):
  """Return the inverse of `to_scalable`."""
  stacked = params['encoder']['layers']
  encoder = {}
  for layer in range(NUM_LAYERS):
    flat = {
      path: np.take(_leaf(stacked, path), layer, axis=1).reshape(shape)
      for path, (shape, _) in _LAYER.items()
    }
    encoder[f'layers_{layer}'] = _nested(flat)
  return {**params, 'encoder': encoder}


def _leaf(tree, path):
  for name in path.split('/'):
    tree = tree[name]
  return tree


STACKS = layer_stacks.LayerStacks((('encoder', tuple(range(NUM_LAYERS))),))


def largest_error(actual, expected):
  """Return the largest difference of an array of two trees, relative to its largest expected entry."""
  errors = jax.tree.map(
    lambda a, b: float(np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))), actual, expected
  )
  return max(jax.tree.leaves(errors))
