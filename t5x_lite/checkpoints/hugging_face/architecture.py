"""Architecture of a T5 network, independent of the program that wrote its checkpoint.

An `Architecture` is read from a `config.json`, or from the names and shapes of a checkpoint. It gives a `config.json`,
the arguments of our network's configuration, and (`names.tensor_table`) the names of the arrays in both formats.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from t5x_lite.checkpoints.hugging_face import config_json
from t5x_lite.checkpoints.hugging_face import shape_fields
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
    layer_norm_epsilon: added to the mean square; always 1e-6 in our networks.
    num_experts: experts of a sparse layer; 0 for a dense network.
    sparse_encoder_layers: indices of the sparse layers, ascending.
    sparse_decoder_layers: indices of the sparse layers, ascending.
    router_bias: True if the routers have biases.
    router_jitter_noise: noise on a router's inputs in training; stored in no array, only in `config.json`.
    expert_capacity: tokens of a sequence that an expert accepts in transformers; only in `config.json`.
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
    return cls(**shape_fields.fields_of_shapes(shapes, network_metadata or {}))

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
      'decoder_start_token_id': family.decoder_start_token_id,
      'dropout_rate': 0.1,
      'eos_token_id': family.eos_token_id,
      'initializer_factor': 1.0,
      'is_encoder_decoder': True,
      'layer_norm_epsilon': self.layer_norm_epsilon,
      'model_type': family.model_type,
      'num_decoder_layers': self.num_decoder_layers,
      'num_heads': self.num_heads,
      'num_layers': self.num_encoder_layers,
      'pad_token_id': family.pad_token_id,
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
