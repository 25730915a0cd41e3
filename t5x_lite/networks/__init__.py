"""Networks as Flax Linen modules: `t5`, the encoder-decoder; `scan`, how stacks run; `param_layouts`, conversions."""

from t5x_lite.networks import param_layouts, scan, t5
from t5x_lite.networks.t5 import T5Config, Transformer

__all__ = ['T5Config', 'Transformer', 'param_layouts', 'scan', 't5']
