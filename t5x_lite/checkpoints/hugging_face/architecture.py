"""Architecture of a T5 network, independent of the program that wrote its checkpoint.

An `Architecture` is read from a `config.json`, or from the names and shapes of a checkpoint. It gives a `config.json`,
the arguments of our network's configuration, and (`names.tensor_table`) the names of the arrays in both formats.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any

from t5x_lite.adapters import merging
from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.checkpoints.hugging_face.families import Family
from t5x_lite.errors import CheckpointError
from t5x_lite.networks.t5_config import T5Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
  """A T5 encoder-decoder, dense or with the sparse layers of Switch Transformers.

  Attributes:
    vocab_size: rows of the embedding table.
    emb_dim: width of the residual stream.
    num_heads: attention heads.
    head_dim: size of a head.
    mlp_dim: hidden width of a feed-forward block, and of an expert.
    num_encoder_layers: layers of the encoder.
    num_decoder_layers: layers of the decoder.
    mlp_activations: activations of the input projections, by our names: one, or one and 'linear'.
    logits_via_embedding: True if the embedding table computes the logits.
    relpos_per_layer: True if every layer has a table of relative position biases, as in umT5.
    relpos_num_buckets: buckets of such a table.
    relpos_max_distance: tokens; all larger distances share the last bucket.
    layer_norm_epsilon: constant that norms add to the mean square.
    num_experts: experts of a sparse layer; 0 for a dense network.
    sparse_encoder_layers: indices of the sparse layers, ascending.
    sparse_decoder_layers: indices of the sparse layers, ascending.
    router_bias: True if the routers have biases.
    router_jitter_noise: noise on a router's inputs in training; stored in no array, only in `config.json`.
    expert_capacity: tokens of a sequence that an expert accepts in transformers; only in `config.json`.
    pad_token_id: id of padding in transformers; ours is always 0.
    eos_token_ids: ids that end a text.
    decoder_start_token_id: first input of the decoder.
    scale_tied_logits: True if logits computed by the embedding table are scaled by emb_dim**-0.5.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  num_encoder_layers: int
  num_decoder_layers: int
  mlp_activations: tuple[str, ...]
  logits_via_embedding: bool
  relpos_per_layer: bool = False
  relpos_num_buckets: int = 32
  relpos_max_distance: int = 128
  layer_norm_epsilon: float = 1e-6
  num_experts: int = 0
  sparse_encoder_layers: tuple[int, ...] = ()
  sparse_decoder_layers: tuple[int, ...] = ()
  router_bias: bool = False
  router_jitter_noise: float = 0.01
  expert_capacity: int = 64
  scale_tied_logits: bool = True
  pad_token_id: int = 0
  eos_token_ids: tuple[int, ...] = (1,)
  decoder_start_token_id: int = 0

  def __post_init__(self):
    sparse_layers = self.sparse_encoder_layers + self.sparse_decoder_layers
    activations = f'mlp_activations={self.mlp_activations!r}'
    problem = ''
    if not config_json.is_expressible(self.mlp_activations):
      problem = f'{activations}, only with one activation of transformers, or one and linear'
    elif self.num_experts and len(self.mlp_activations) != 1:
      problem = f'{activations} and {self.num_experts} experts: Switch Transformers are not gated'
    elif sparse_layers and not self.num_experts:
      problem = f'sparse layers {sparse_layers} and num_experts=0'
    elif self.num_experts and self.relpos_per_layer:
      problem = (
        'tables of relative position biases per layer and experts: Switch Transformers have one table per '
        'stack'
      )
    if problem:
      raise CheckpointError(f'transformers has no T5 with {problem}.')
    T5Config(**self.network_config_kwargs())  # checks the sizes

  @classmethod
  def from_config_json(
    cls, config: Mapping[str, Any], has_head: bool | None = None
  ) -> 'Architecture':
    """Return the architecture that a `config.json` describes.

    Args:
      config: contents of the file.
      has_head: whether the folder has an `lm_head.weight`, which is decisive where versions of transformers differ;
        None if unknown.

    Raises:
      CheckpointError: the type of model is not supported, or our networks cannot express it.
    """
    return cls(**config_json.fields_of_config(config, has_head))

  @classmethod
  def from_shapes(
    cls, shapes: Mapping[str, Any], network_metadata: Mapping[str, Any] | None = None
  ) -> 'Architecture':
    """Return the architecture of a checkpoint in the form of t5x_lite or T5X.

    Args:
      shapes: parameter name, with or without `target/`, to an object with a `shape`; in either layout. If there are
        names in `target/`, all others are ignored.
      network_metadata: recorded options of the network, by the names of `T5Config`. They supply what shapes do not show
        (activations, distances) and must otherwise agree with the shapes.

    Raises:
      CheckpointError: the arrays are not those of a T5 encoder-decoder that transformers supports, or the metadata
        contradict the shapes.
    """
    return cls(**_fields_of_shapes(shapes, network_metadata or {}))

  def to_config_json(self, family: Family, dtype: str | None = None) -> dict[str, Any]:
    """Return the contents of the `config.json` from which transformers builds this model.

    Args:
      family: family of the model, which has the type of the model and its special tokens.
      dtype: dtype of the weights: 'float32', 'bfloat16' or 'float16'.

    Raises:
      CheckpointError: the family's class in transformers cannot express the architecture.
    """
    family.check(self)
    result = {
      'architectures': [family.architecture],
      'd_ff': self.mlp_dim,
      'd_kv': self.head_dim,
      'd_model': self.emb_dim,
      'dropout_rate': 0.1,
      **self.special_ids(),
      'initializer_factor': 1.0,
      'is_encoder_decoder': True,
      'layer_norm_epsilon': self.layer_norm_epsilon,
      'model_type': family.model_type,
      'num_decoder_layers': self.num_decoder_layers,
      'num_heads': self.num_heads,
      'num_layers': self.num_encoder_layers,
      'relative_attention_max_distance': self.relpos_max_distance,
      'relative_attention_num_buckets': self.relpos_num_buckets,
      'tie_word_embeddings': self.logits_via_embedding,
      'tokenizer_class': family.tokenizer_class,
      'use_cache': True,
      'vocab_size': self.vocab_size,
    }
    result |= config_json.feed_forward_proj(self.mlp_activations)
    if not self.scale_tied_logits:
      # transformers 5 reads this key for a T5; for other types `config_json.output_head` reads it.
      result['scale_decoder_outputs'] = False
    if dtype is not None:
      result['torch_dtype'] = dtype  # all versions of transformers read this key
    if self.num_experts:
      result |= self._sparse_json()
    return dict(sorted(result.items()))

  def special_ids(self) -> dict[str, Any]:
    """Return the keys of special ids, of `config.json` and `generation_config.json`."""
    ends: Any = list(self.eos_token_ids)
    if len(ends) == 1:
      ends = ends[0]
    return {
      'decoder_start_token_id': self.decoder_start_token_id,
      'eos_token_id': ends,
      'pad_token_id': self.pad_token_id,
    }

  def _sparse_json(self) -> dict[str, Any]:
    result = {
      'num_experts': self.num_experts,
      'expert_capacity': self.expert_capacity,
      'router_bias': self.router_bias,
      'router_jitter_noise': self.router_jitter_noise,
      'router_dtype': 'float32',
      'add_router_probs': False,
    }
    for stack in ('encoder', 'decoder'):
      layers = self.sparse_layers_of(stack)
      result[f'num_sparse_{stack}_layers'] = len(layers)
      # transformers cannot derive every step from the number of layers, e.g. 0.
      result[f'{stack}_sparse_step'] = config_json.sparse_step(self.num_layers_of(stack), layers)
    return result

  def network_config_kwargs(self) -> dict[str, Any]:
    """Return the arguments of `networks.t5.T5Config` for this network, in the layout 't5', without its experts."""
    return dict(
      vocab_size=self.vocab_size,
      emb_dim=self.emb_dim,
      num_heads=self.num_heads,
      num_encoder_layers=self.num_encoder_layers,
      num_decoder_layers=self.num_decoder_layers,
      head_dim=self.head_dim,
      mlp_dim=self.mlp_dim,
      mlp_activations=self.mlp_activations,
      logits_via_embedding=self.logits_via_embedding,
      scale_tied_logits=self.scale_tied_logits,
      layer_norm_epsilon=self.layer_norm_epsilon,
      relpos_bias_tables='per_layer' if self.relpos_per_layer else 'per_stack',
      num_relpos_buckets=self.relpos_num_buckets,
      max_relpos_distance=self.relpos_max_distance,
    )

  def num_layers_of(self, stack: str) -> int:
    """Return the number of layers of `stack`, 'encoder' or 'decoder'."""
    if stack == 'encoder':
      return self.num_encoder_layers
    return self.num_decoder_layers

  def sparse_layers_of(self, stack: str) -> tuple[int, ...]:
    """Return the indices of the sparse layers of `stack`, 'encoder' or 'decoder'."""
    if stack == 'encoder':
      return self.sparse_encoder_layers
    return self.sparse_decoder_layers


# ---- From names and shapes -------------------------------------------------------------------------------------------
# Names show the form (tables per layer, a kernel for logits, experts), shapes the sizes; the table of relative position
# biases shows the number of heads. Activations, distances and the scale of tied logits are in no array: they come from
# the metadata of the checkpoint, or are those of T5.

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
    'pad_token_id',
    'eos_token_ids',
    'decoder_start_token_id',
  }
)
# Metadata have the names of `T5Config` or those of `Architecture`.
_CONFIG_NAMES = {
  'num_relpos_buckets': 'relpos_num_buckets',
  'max_relpos_distance': 'relpos_max_distance',
}


def _parameters(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
  """Return the shapes by name of the arrays in `target/`, or of all if `target/` is empty, without adapters."""
  inside = {
    name.removeprefix(_TARGET): value for name, value in shapes.items() if name.startswith(_TARGET)
  }
  params = inside or shapes
  return {name: tuple(value.shape) for name, value in params.items() if not merging.is_leaf(name)}


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


def _fields_of_shapes(shapes: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
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
