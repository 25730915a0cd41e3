"""Architecture of a t5x_lite or T5X checkpoint, from the names and shapes of its parameters.

Names show the form (tables per layer, a kernel for logits, experts), shapes the sizes; the table of relative position
biases shows the number of heads. Activations, distances and the scale of tied logits are in no array: they come from
the metadata of the checkpoint, or are those of T5.
"""

from collections.abc import Mapping
import re
from typing import Any

from t5x_lite.errors import CheckpointError

_TARGET = 'target/'
_LAYER = re.compile(r'(encoder|decoder)/layers_(\d+)/(.+)')
_STACKED = re.compile(r'(encoder)/encoder/(.+)|(decoder)/decoder/(.+)')
_KERNEL = re.compile(r'(?:self_|encoder_decoder_)?attention/(query|key|value|out)/kernel')
_RELPOS = 'relpos_bias/rel_embedding'
_ROUTER = 'mlp/router/router_weights/w'
_EXPERT = 'mlp/expert'
_KNOWN = re.compile(
  r'token_embedder/embedding|(encoder/encoder|decoder/decoder)_norm/scale|(en|de)coder/relpos_bias/rel_embedding|'
  r'decoder/logits_dense/kernel|(en|de)coder/layers_\d+/(pre_(self_|cross_)?(attention|mlp)_layer_norm/scale|'
  rf'{_KERNEL.pattern}|relpos_bias/rel_embedding|mlp/(wi|wi_\d|wo)/kernel|mlp/expert/(wi|wo)/kernel|'
  r'mlp/router/router_weights/w/(kernel|bias))'
)
# Parameters that transformers does not support, by a part of the name.
_UNSUPPORTED = {
  r'/extra_mlp/|pre_extra_mlp': 'a second feed-forward block in a layer (extra_mlp)',
  r'/shared_mlp/': 'an expert for all tokens (shared_expert_dim)',
  r'/expert/.*bias': 'experts with biases (expert_bias)',
  r'/expert/wi_\d': 'experts that are gated',
  r'/(qkv|kv|q_wi|kv_fused|qkv_fused|q_wi_fused|o_wo_fused)(_fused)?/': 'fused projections',
  r'token_embedder/.+/|/token_embedder/': 'a separate embedding table in a stack',
}
# Fields that the shapes do not show.
_NOT_IN_SHAPES = frozenset(
  {
    'mlp_activations',
    'relpos_max_distance',
    'layer_norm_epsilon',
    'router_jitter_noise',
    'expert_capacity',
    'scale_tied_logits',
  }
)
# Metadata have the names of `T5Config` or those of `Architecture`.
_CONFIG_NAMES = {
  'num_relpos_buckets': 'relpos_num_buckets',
  'max_relpos_distance': 'relpos_max_distance',
}


def _parameters(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Return the shapes by name of the arrays in `target/`, or of all arrays if `target/` is empty."""
  inside = {
    name.removeprefix(_TARGET): value for name, value in shapes.items() if name.startswith(_TARGET)
  }
  return {name: tuple(value.shape) for name, value in (inside or shapes).items()}


def _layer_shapes(name: str, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
  """Return (number of layers, shape of one layer in the layout 't5') of an array of the layout 'scalable_t5'."""
  kernel = _KERNEL.fullmatch(name)
  if len(shape) < 2 or (kernel and len(shape) != 4):
    raise CheckpointError(
      f'The array {name!r} must have a dim of layers, dim 1, and dims of heads, got shape {shape}.'
    )
  rest = (shape[0], *shape[2:])
  if not kernel:
    return shape[1], rest
  return shape[1], (rest[0] * rest[1], rest[2]) if kernel[1] == 'out' else (
    rest[0],
    rest[1] * rest[2],
  )


def to_t5_layout(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Return the shapes by name in the layout 't5', without `target/`, of a checkpoint in either layout."""
  result = {}
  for name, shape in _parameters(shapes).items():
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
      result[name] = shape
      continue
    stack = stacked[1] or stacked[3]
    inner = stacked[2] or stacked[4]
    number, one = _layer_shapes(inner, shape)
    result.update({f'{stack}/layers_{i}/{inner}': one for i in range(number)})
  return result


def _required_shape(shapes: Mapping[str, tuple[int, ...]], name: str, rank: int) -> tuple[int, ...]:
  shape = shapes.get(name)
  if shape is None or len(shape) != rank:
    found = 'no such array' if shape is None else f'shape {shape}'
    raise CheckpointError(
      f'The array {name!r} must have {rank} dims, as in a T5 encoder-decoder, got {found}.'
    )
  return shape


def _layers(shapes: Mapping[str, tuple[int, ...]], stack: str) -> set[int]:
  return {int(match[2]) for match in map(_LAYER.fullmatch, shapes) if match and match[1] == stack}


def _check_form(shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Raise if the arrays are not those of a T5 encoder-decoder in transformers."""
  if any(name.startswith('encoder/') for name in shapes):
    found = []
  else:
    found = ['a network without an encoder']
  found += [
    f'{name!r} ({reason})'
    for pattern, reason in _UNSUPPORTED.items()
    for name in shapes
    if re.search(pattern, name)
  ]
  found += [
    f'{name!r} of shape {shapes[name]} (unknown)'
    for name in sorted(shapes)
    if not _KNOWN.fullmatch(name)
  ]
  for stack in ('encoder', 'decoder'):
    layers = _layers(shapes, stack)
    if not layers or layers != set(range(len(layers))):
      found.append(f'layers {sorted(layers)} in {stack!r}')
  found += [
    f'{name!r} without {_ROUTER}/kernel (e.g. HashRouter)'
    for name in shapes
    if _EXPERT in name and f'{name.partition(_EXPERT)[0]}{_ROUTER}/kernel' not in shapes
  ]
  num_experts = {shape[-1] for name, shape in shapes.items() if name.endswith(f'{_ROUTER}/kernel')}
  if len(num_experts) > 1:
    found.append(f'layers with {sorted(num_experts)} experts')
  if found:
    more = f' and {len(found) - 1} more' if len(found) > 1 else ''
    raise CheckpointError(
      f'The parameters must be those of a T5 encoder-decoder of transformers, got '
      f'{found[0]}{more}. Other networks cannot be exported.'
    )


def _heads(shapes: Mapping[str, tuple[int, ...]]) -> tuple[bool, int, int]:
  """Return (tables per layer, heads, buckets)."""
  per_layer = f'encoder/layers_0/{_RELPOS}' in shapes
  name = f'encoder/{_RELPOS}'
  if per_layer:
    name = f'encoder/layers_0/{_RELPOS}'
  num_heads, num_buckets = _required_shape(shapes, name, 2)
  return per_layer, num_heads, num_buckets


def _sparse(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
  """Return the fields of an `Architecture` that only sparse networks have."""
  kernels = {name: shape for name, shape in shapes.items() if name.endswith(f'{_ROUTER}/kernel')}
  if not kernels:
    return {}
  first, shape = next(iter(kernels.items()))
  return {
    'num_experts': shape[-1],
    'router_bias': first.replace('kernel', 'bias') in shapes,
    'sparse_encoder_layers': tuple(sorted(_layers(kernels, 'encoder'))),
    'sparse_decoder_layers': tuple(sorted(_layers(kernels, 'decoder'))),
  }


def _hidden(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
  """Return (number of input projections, hidden width) of the feed-forward block of the encoder's first layer."""
  block = 'encoder/layers_0/mlp'
  if f'{block}/expert/wi/kernel' in shapes:
    return 1, _required_shape(shapes, f'{block}/expert/wi/kernel', 3)[-1]
  if f'{block}/wi/kernel' in shapes:
    return 1, _required_shape(shapes, f'{block}/wi/kernel', 2)[-1]
  number = 0
  while f'{block}/wi_{number}/kernel' in shapes:
    number += 1
  return number, _required_shape(shapes, f'{block}/wi_0/kernel', 2)[-1]


def fields_of_shapes(shapes: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Return the fields of an `Architecture`; see `Architecture.from_shapes`."""
  recorded = _normalize(metadata)
  params = to_t5_layout(shapes)
  _check_form(params)
  vocab_size, emb_dim = _required_shape(params, 'token_embedder/embedding', 2)
  per_layer, num_heads, num_buckets = _heads(params)
  if any(map(_STACKED.fullmatch, _parameters(shapes))):
    # The layout 'scalable_t5' has a table in every layer, equal ones if the model has one table per stack.
    per_layer = recorded.get('relpos_per_layer', per_layer)
  joined = _required_shape(params, 'encoder/layers_0/attention/query/kernel', 2)[1]
  num_projections, mlp_dim = _hidden(params)
  if num_projections == 1:
    activations = ('relu',)
  else:
    activations = ('gelu',) + ('linear',) * (num_projections - 1)
  fields = {
    'vocab_size': vocab_size,
    'emb_dim': emb_dim,
    'num_heads': num_heads,
    'head_dim': joined // max(num_heads, 1),
    'mlp_dim': mlp_dim,
    'num_encoder_layers': len(_layers(params, 'encoder')),
    'num_decoder_layers': len(_layers(params, 'decoder')),
    'mlp_activations': activations,
    'logits_via_embedding': 'decoder/logits_dense/kernel' not in params,
    'relpos_per_layer': per_layer,
    'relpos_num_buckets': num_buckets,
    **_sparse(params),
  }
  different = [
    name
    for name in fields.keys() & recorded.keys() - _NOT_IN_SHAPES
    if recorded[name] != fields[name]
  ]
  if len(recorded.get('mlp_activations', fields['mlp_activations'])) != num_projections:
    different.append('mlp_activations')
  for name in different:
    raise CheckpointError(
      f'`{name}` in the metadata of the checkpoint must be {fields[name]!r}, as in its arrays, got '
      f'{recorded[name]!r}. The metadata are of another network.'
    )
  return fields | {name: recorded[name] for name in _NOT_IN_SHAPES & recorded.keys()}


def _normalize(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Return the metadata by the names and in the types of an `Architecture`, without None."""
  recorded = {
    _CONFIG_NAMES.get(name, name): tuple(value) if isinstance(value, list) else value
    for name, value in metadata.items()
    if value is not None
  }
  tables = recorded.pop('relpos_bias_tables', None)
  if tables is not None:
    recorded['relpos_per_layer'] = tables == 'per_layer'
  if not recorded.get('num_experts'):
    for name in ('num_experts', 'sparse_encoder_layers', 'sparse_decoder_layers', 'router_bias'):
      recorded.pop(name, None)
  return recorded
