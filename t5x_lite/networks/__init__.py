"""Networks as Flax Linen modules.

`network` has the base class, `t5` the encoder-decoder, `decoder_only` the decoder-only network, `scan` and `segments`
the loops over layers, and `param_layouts` conversions of parameters.
"""

from t5x_lite.networks import decoder_only, param_layouts, scan, t5
from t5x_lite.networks.decoder_only import DecoderWrapper, TransformerConfig
from t5x_lite.networks.network import Network
from t5x_lite.networks.t5 import T5Config, Transformer

__all__ = [
    'DecoderWrapper', 'Network', 'T5Config', 'Transformer', 'TransformerConfig', 'decoder_only', 'param_layouts',
    'scan', 't5',
]
