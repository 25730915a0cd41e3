"""Building blocks of networks: Flax Linen modules with T5X's parameter and logical axis names."""

from t5x_lite.layers.attention import EncodePositionsFn, MultiHeadDotProductAttention
from t5x_lite.layers.attention_kernels import (
    ATTENTION_KERNELS,
    cudnn_refusal,
    cudnn_unsupported_reason,
    dot_product_attention,
    gpu_refusal,
    gpu_unsupported_reason,
    select_attention_kernel,
)
from t5x_lite.layers.beam_cache import share_beams
from t5x_lite.layers.dense import DenseGeneral
from t5x_lite.layers.embedding import Embed
from t5x_lite.layers.masks import (
    AttentionBias,
    causal_bias,
    combine_biases,
    combine_masks,
    make_attention_bias,
    make_attention_mask,
    make_causal_mask,
    make_decoder_mask,
    mask_to_bias,
)
from t5x_lite.layers.mlp import ACTIVATIONS, MlpBlock, activation_fn
from t5x_lite.layers.norm import LayerNorm
from t5x_lite.layers.platforms import PORTABLE, portable_programs, traced_platform
from t5x_lite.layers.relative_position import RelativePositionBiases, relative_position_bucket

__all__ = [
    'ACTIVATIONS',
    'ATTENTION_KERNELS',
    'AttentionBias',
    'DenseGeneral',
    'Embed',
    'EncodePositionsFn',
    'LayerNorm',
    'MlpBlock',
    'MultiHeadDotProductAttention',
    'PORTABLE',
    'RelativePositionBiases',
    'activation_fn',
    'causal_bias',
    'combine_biases',
    'combine_masks',
    'cudnn_refusal',
    'cudnn_unsupported_reason',
    'dot_product_attention',
    'gpu_refusal',
    'gpu_unsupported_reason',
    'make_attention_bias',
    'make_attention_mask',
    'make_causal_mask',
    'make_decoder_mask',
    'mask_to_bias',
    'portable_programs',
    'relative_position_bucket',
    'select_attention_kernel',
    'share_beams',
    'traced_platform',
]
