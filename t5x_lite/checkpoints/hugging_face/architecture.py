"""What of a network decides its arrays and its numbers, whoever wrote the checkpoint: transformers, T5X or we.

An `Architecture` comes from a `config.json`, or from the names and shapes of a checkpoint; it gives a `config.json`,
the arguments of our network's configuration, and (`names.tensor_table`) the names on both sides.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from t5x_lite.checkpoints.hugging_face import config_json, shape_fields
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
    mlp_activations: activations of its projections by our names: one, or one and 'linear'.
    logits_via_embedding: the embedding table gives the logits.
    relpos_per_layer: every layer has a table of relative position biases, as in umT5.
    relpos_num_buckets: buckets of such a table.
    relpos_max_distance: distances from here on share a bucket.
    layer_norm_epsilon: added to the mean square; ours is 1e-6 always.
    num_experts: experts of a sparse layer; 0 is a dense network.
    sparse_encoder_layers: which layers are sparse, in rising order.
    sparse_decoder_layers: likewise.
    router_bias: the routers have biases.
    router_jitter_noise: noise on a router's inputs in training; in no array, and kept for `config.json` alone.
    expert_capacity: tokens of a sequence that transformers lets an expert have; kept likewise.
    scale_tied_logits: logits that the embedding table gives are scaled by emb_dim**-0.5.
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
    if not config_json.is_expressible(self.mlp_activations):
      raise CheckpointError(
          f'got mlp_activations={self.mlp_activations!r}; expected one activation, or one and linear, among those that '
          "transformers has too: T5's feed-forward blocks there have no other form. Only networks of that form can be "
          'exported.')
    for stack in ('encoder', 'decoder'):
      layers = self.sparse_layers_of(stack)
      if layers and not self.num_experts:
        raise CheckpointError(f'got sparse {stack} layers {layers} and num_experts=0; expected experts.')
    if self.num_experts and len(self.mlp_activations) != 1:
      raise CheckpointError(f'got mlp_activations={self.mlp_activations!r} and {self.num_experts} experts; expected '
                            "one activation: transformers' Switch Transformers are not gated.")
    if self.num_experts and self.relpos_per_layer:
      raise CheckpointError("got tables of relative position biases per layer and experts; transformers' Switch "
                            'Transformers have one table per stack.')
    T5Config(**self.network_config_kwargs())  # refuses sizes that no network has

  @classmethod
  def from_config_json(cls, config: Mapping[str, Any], has_head: bool | None = None) -> 'Architecture':
    """Returns what a `config.json` says.

    Args:
      config: the file.
      has_head: whether the folder has an `lm_head.weight`, which decides where transformers' versions differ; None if
        it is not known.

    Raises:
      CheckpointError: another type of model, or one that our networks cannot express.
    """
    return cls(**config_json.fields_of_config(config, has_head))

  @classmethod
  def from_shapes(
      cls, shapes: Mapping[str, Any], network_metadata: Mapping[str, Any] | None = None) -> 'Architecture':
    """Returns the architecture of a checkpoint of ours or of T5X's.

    Args:
      shapes: parameter name, with or without `target/`, to anything with a `shape`; in either layout. Names outside of
        `target/` are ignored if there are any in it.
      network_metadata: what was recorded of the network's configuration, by `T5Config`'s names. It says what shapes do
        not (activations, distances) and must agree with them otherwise.

    Raises:
      CheckpointError: arrays that make up no T5 encoder-decoder that transformers has, named; or metadata that the
        shapes contradict.
    """
    return cls(**shape_fields.fields_of_shapes(shapes, network_metadata or {}))

  def to_config_json(self, family: Family, dtype: str | None = None) -> dict[str, Any]:
    """Returns the `config.json` from which transformers builds this model.

    Args:
      family: gives the type of the model and its special tokens.
      dtype: of the weights, 'float32', 'bfloat16' or 'float16'.

    Raises:
      CheckpointError: the family's class of transformers cannot express the architecture.
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
      # transformers 5 reads it of a T5. Of other types it keeps it for `config_json.output_head`.
      result['scale_decoder_outputs'] = False
    if dtype is not None:
      result['torch_dtype'] = dtype  # the key that transformers of all ages read
    if self.num_experts:
      result |= self._sparse_json()
    return dict(sorted(result.items()))

  def _sparse_json(self) -> dict[str, Any]:
    result = {
        'num_experts': self.num_experts, 'expert_capacity': self.expert_capacity, 'router_bias': self.router_bias,
        'router_jitter_noise': self.router_jitter_noise, 'router_dtype': 'float32', 'add_router_probs': False,
    }
    for stack in ('encoder', 'decoder'):
      layers = self.sparse_layers_of(stack)
      result[f'num_sparse_{stack}_layers'] = len(layers)
      # Said beside the number, from which transformers cannot derive every step (0 among them).
      result[f'{stack}_sparse_step'] = config_json.sparse_step(self.num_layers_of(stack), layers)
    return result

  def network_config_kwargs(self) -> dict[str, Any]:
    """Returns the arguments of `networks.t5.T5Config` that make this network, in the layout 't5'.

    What a sparse network has beyond them is in `num_experts`, `sparse_encoder_layers` and so on.
    """
    return dict(
        vocab_size=self.vocab_size, emb_dim=self.emb_dim, num_heads=self.num_heads,
        num_encoder_layers=self.num_encoder_layers, num_decoder_layers=self.num_decoder_layers,
        head_dim=self.head_dim, mlp_dim=self.mlp_dim, mlp_activations=self.mlp_activations,
        logits_via_embedding=self.logits_via_embedding, scale_tied_logits=self.scale_tied_logits,
        relpos_bias_tables='per_layer' if self.relpos_per_layer else 'per_stack',
        num_relpos_buckets=self.relpos_num_buckets, max_relpos_distance=self.relpos_max_distance)

  def num_layers_of(self, stack: str) -> int:
    """Returns the number of layers of `stack`, 'encoder' or 'decoder'."""
    return self.num_encoder_layers if stack == 'encoder' else self.num_decoder_layers

  def sparse_layers_of(self, stack: str) -> tuple[int, ...]:
    """Returns which layers of `stack`, 'encoder' or 'decoder', are sparse."""
    return self.sparse_encoder_layers if stack == 'encoder' else self.sparse_decoder_layers
