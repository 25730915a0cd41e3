"""The architecture of a checkpoint of ours or of T5X's, from the names and shapes of its parameters.

Names decide the form (tables per layer, a kernel for logits, experts), shapes the sizes; the number of heads is in the
table of relative position biases. Activations, distances and the scale of tied logits are in no array: they come from
what was recorded with the checkpoint, or are those of T5.
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
    r'mlp/router/router_weights/w/(kernel|bias))')
# What transformers has no place for, by a part of the name.
_REFUSED = {
    r'/extra_mlp/|pre_extra_mlp': 'a second feed-forward block in a layer (extra_mlp)',
    r'/shared_mlp/': 'an expert for all tokens (shared_expert_dim)',
    r'/expert/.*bias': 'experts with biases (expert_bias)',
    r'/expert/wi_\d': 'experts that are gated',
    r'/(qkv|kv|q_wi|kv_fused|qkv_fused|q_wi_fused|o_wo_fused)(_fused)?/': 'fused projections',
    r'token_embedder/.+/|/token_embedder/': 'an embedding table of its own in a stack',
}
# Fields that no array shows.
_NOT_IN_SHAPES = frozenset({'mlp_activations', 'relpos_max_distance', 'layer_norm_epsilon', 'router_jitter_noise',
                            'expert_capacity', 'scale_tied_logits'})
# What was recorded may have the names of `T5Config` or those of `Architecture`.
_CONFIG_NAMES = {'num_relpos_buckets': 'relpos_num_buckets', 'max_relpos_distance': 'relpos_max_distance'}


def _parameters(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns name to shape of what stands in `target/`, or of all there is if there is no such name."""
  inside = {name.removeprefix(_TARGET): value for name, value in shapes.items() if name.startswith(_TARGET)}
  return {name: tuple(value.shape) for name, value in (inside or shapes).items()}


def _layer_shapes(name: str, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
  """Returns (number of layers, shape for one layer in the layout 't5') of an array of the layout 'scalable_t5'."""
  kernel = _KERNEL.fullmatch(name)
  if len(shape) < 2 or (kernel and len(shape) != 4):
    raise CheckpointError(f'got {name!r} of shape {shape}; expected layers in dim 1, and dims for heads.')
  rest = (shape[0], *shape[2:])
  if not kernel:
    return shape[1], rest
  return shape[1], (rest[0] * rest[1], rest[2]) if kernel[1] == 'out' else (rest[0], rest[1] * rest[2])


def to_t5_layout(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Returns name to shape in the layout 't5', without `target/`, of a checkpoint in either layout."""
  result = {}
  for name, shape in _parameters(shapes).items():
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
      result[name] = shape
      continue
    stack, inner = stacked[1] or stacked[3], stacked[2] or stacked[4]
    number, one = _layer_shapes(inner, shape)
    result.update({f'{stack}/layers_{i}/{inner}': one for i in range(number)})
  return result


def _need(shapes: Mapping[str, tuple[int, ...]], name: str, rank: int) -> tuple[int, ...]:
  shape = shapes.get(name)
  if shape is None or len(shape) != rank:
    found = 'no such array' if shape is None else f'shape {shape}'
    raise CheckpointError(f'got {found} for {name!r}; expected {rank} dims, as in a T5 encoder-decoder.')
  return shape


def _num_layers(shapes: Mapping[str, tuple[int, ...]], stack: str) -> int:
  found = {int(match[2]) for match in map(_LAYER.fullmatch, shapes) if match and match[1] == stack}
  if found != set(range(len(found))) or not found:
    raise CheckpointError(f'got layers {sorted(found)} in {stack!r}; expected 0, 1, 2 and so on. The checkpoint of a '
                          'T5 encoder-decoder has them; other networks cannot be exported.')
  return len(found)


def _refuse_others(shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Refuses arrays that no T5 of transformers has."""
  if not any(name.startswith('encoder/') for name in shapes):
    raise CheckpointError('got a network without an encoder; expected an encoder-decoder. transformers has no class '
                          "for T5X's decoder-only network, which cannot be exported.")
  for pattern, what in _REFUSED.items():
    names = [name for name in shapes if re.search(pattern, name)]
    if names:
      raise CheckpointError(f'got {names[0]!r} ({len(names)} such arrays): {what}; expected a network that '
                            'transformers has. It cannot be exported.')
  unknown = sorted(name for name in shapes if not _KNOWN.fullmatch(name))
  if unknown:
    raise CheckpointError(f'got {unknown[0]!r} of shape {shapes[unknown[0]]} ({len(unknown)} such arrays), of which '
                          "transformers' T5 has no counterpart; expected the parameters of a T5 encoder-decoder. It "
                          'cannot be exported.')


def _heads(shapes: Mapping[str, tuple[int, ...]]) -> tuple[bool, int, int]:
  """Returns (tables per layer, heads, buckets)."""
  per_layer = f'encoder/layers_0/{_RELPOS}' in shapes
  name = f'encoder/layers_0/{_RELPOS}' if per_layer else f'encoder/{_RELPOS}'
  return per_layer, *_need(shapes, name, 2)


def _sparse(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
  """Returns the fields of an `Architecture` that sparse networks have."""
  layers = {'encoder': [], 'decoder': []}
  kernels = []
  for name, shape in shapes.items():
    match = _LAYER.fullmatch(name)
    if match and match[3] == f'{_ROUTER}/kernel':
      layers[match[1]].append(int(match[2]))
      kernels.append((name, shape))
    elif match and match[3].startswith(_EXPERT) and f'{name.partition(_EXPERT)[0]}{_ROUTER}/kernel' not in shapes:
      raise CheckpointError(f'got {name!r} and no router beside it ({_ROUTER}/kernel); expected one. Experts without '
                            'a router of that kind (HashRouter) cannot be exported.')
  if not kernels:
    return {}
  numbers = {shape[-1] for _, shape in kernels}
  if len(numbers) != 1:
    raise CheckpointError(f'got layers with {sorted(numbers)} experts; expected one number: config.json has no place '
                          'for more. It cannot be exported.')
  return {'num_experts': numbers.pop(), 'router_bias': kernels[0][0].replace('kernel', 'bias') in shapes,
          'sparse_encoder_layers': tuple(sorted(layers['encoder'])),
          'sparse_decoder_layers': tuple(sorted(layers['decoder']))}


def _hidden(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
  """Returns (number of projections, hidden width) of the feed-forward blocks, from the first layer of the encoder."""
  block = 'encoder/layers_0/mlp'
  if f'{block}/expert/wi/kernel' in shapes:
    return 1, _need(shapes, f'{block}/expert/wi/kernel', 3)[-1]
  if f'{block}/wi/kernel' in shapes:
    return 1, _need(shapes, f'{block}/wi/kernel', 2)[-1]
  number = 0
  while f'{block}/wi_{number}/kernel' in shapes:
    number += 1
  return number, _need(shapes, f'{block}/wi_0/kernel', 2)[-1]


def fields_of_shapes(shapes: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the fields of an `Architecture`; see `Architecture.from_shapes`."""
  said = _normalize(metadata)
  params = to_t5_layout(shapes)
  _refuse_others(params)
  vocab_size, emb_dim = _need(params, 'token_embedder/embedding', 2)
  per_layer, num_heads, num_buckets = _heads(params)
  if any(map(_STACKED.fullmatch, _parameters(shapes))):
    # That layout has a table in every layer, of models with one per stack too: then they are equal.
    per_layer = said.get('relpos_per_layer', per_layer)
  joined = _need(params, 'encoder/layers_0/attention/query/kernel', 2)[1]
  num_projections, mlp_dim = _hidden(params)
  fields = {
      'vocab_size': vocab_size, 'emb_dim': emb_dim, 'num_heads': num_heads, 'head_dim': joined // max(num_heads, 1),
      'mlp_dim': mlp_dim, 'num_encoder_layers': _num_layers(params, 'encoder'),
      'num_decoder_layers': _num_layers(params, 'decoder'),
      'mlp_activations': ('relu',) if num_projections == 1 else ('gelu',) + ('linear',) * (num_projections - 1),
      'logits_via_embedding': 'decoder/logits_dense/kernel' not in params, 'relpos_per_layer': per_layer,
      'relpos_num_buckets': num_buckets, **_sparse(params),
  }
  if len(said.get('mlp_activations', fields['mlp_activations'])) != num_projections:
    raise CheckpointError(f'the checkpoint was recorded with mlp_activations={said["mlp_activations"]!r}, but has '
                          f'{num_projections} projections in a feed-forward block; expected as many.')
  for name in fields.keys() & said.keys() - _NOT_IN_SHAPES:
    if said[name] != fields[name]:
      raise CheckpointError(f'the checkpoint was recorded with {name}={said[name]!r}, but its arrays have '
                            f'{fields[name]!r}; expected the same. What was recorded is of another network.')
  return fields | {name: said[name] for name in _NOT_IN_SHAPES & said.keys()}


def _normalize(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what was recorded by the names and in the types of an `Architecture`, without what says nothing."""
  said = {_CONFIG_NAMES.get(name, name): tuple(value) if isinstance(value, list) else value
          for name, value in metadata.items() if value is not None}
  tables = said.pop('relpos_bias_tables', None)
  if tables is not None:
    said['relpos_per_layer'] = tables == 'per_layer'
  if not said.get('num_experts'):
    for name in ('num_experts', 'sparse_encoder_layers', 'sparse_decoder_layers', 'router_bias'):
      said.pop(name, None)
  return said
