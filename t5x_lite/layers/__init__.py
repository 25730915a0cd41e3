"""Building blocks of networks: Flax Linen modules with T5X's parameter and logical axis names."""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.layers.attention': ('EncodePositionsFn', 'MultiHeadDotProductAttention'),
    't5x_lite.layers.attention_kernels': (
      'ATTENTION_KERNELS',
      'KernelChoice',
      'dot_product_attention',
      'kernel_choices',
      'select_attention_kernel',
      'uses_arrays',
    ),
    't5x_lite.layers.beam_cache': ('share_beams',),
    't5x_lite.layers.blockwise': ('blockwise_attention',),
    't5x_lite.layers.dense': ('DenseGeneral', 'operand_dtype'),
    't5x_lite.layers.embedding': ('Embed',),
    't5x_lite.layers.fused_attention': (
      'cudnn_unsupported_reason',
      'gpu_unsupported_reason',
      'splash_unsupported_reason',
    ),
    't5x_lite.layers.logits': ('LogitsDense', 'OutputProjection'),
    't5x_lite.layers.masks': (
      'AttentionBias',
      'DistanceBias',
      'causal_bias',
      'combine_biases',
      'combine_masks',
      'make_attention_bias',
      'make_attention_mask',
      'make_causal_mask',
      'make_decoder_mask',
      'mask_to_bias',
      'rows_at',
    ),
    't5x_lite.layers.mlp': ('ACTIVATIONS', 'MlpBlock', 'activation_fn'),
    't5x_lite.layers.nd': ('nd_dense_init',),
    't5x_lite.layers.norm': ('LayerNorm',),
    't5x_lite.layers.platforms': (
      'PORTABLE',
      'counted_products',
      'counts_products',
      'portable_programs',
      'traced_platform',
    ),
    't5x_lite.layers.relative_position': (
      'CachedRelativePositionBiases',
      'RelativePositionBiases',
      'relative_position_bucket',
    ),
  },
)
