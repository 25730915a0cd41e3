"""Networks as Flax Linen modules.

`network` has the base class, `t5` the encoder-decoder, `scalable_t5` its configuration in another parameter tree,
`decoder_only` the decoder-only network, `masked` layers with T5X's arguments, `scan` and `segments` the loops over
layers, and `param_layouts` conversions of parameters.
"""

from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  {
    't5x_lite.networks': ('decoder_only', 'param_layouts', 'scalable_t5', 'scan', 't5'),
    't5x_lite.networks.decoder_only': ('DecoderWrapper', 'TransformerConfig'),
    't5x_lite.networks.network': ('Network',),
    't5x_lite.networks.t5': ('T5Config', 'Transformer'),
  },
)
