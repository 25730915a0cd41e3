"""Networks as Flax Linen modules.

`network`, what models know of one; `t5`, the encoder-decoder; `decoder_only`; `scan`, how stacks run (in `segments`);
`param_layouts`, conversions.
"""

from t5x_lite.networks import decoder_only, param_layouts, scan, t5
from t5x_lite.networks.decoder_only import DecoderWrapper, TransformerConfig
from t5x_lite.networks.network import Network
from t5x_lite.networks.t5 import T5Config, Transformer

__all__ = [
    'DecoderWrapper', 'Network', 'T5Config', 'Transformer', 'TransformerConfig', 'decoder_only', 'param_layouts',
    'scan', 't5',
]
