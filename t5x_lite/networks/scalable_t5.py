"""T5 encoder-decoder in the parameter tree of T5X's `examples/scalable_t5`, with its configuration.

The network is that of `t5`; `t5.T5Config(param_layout='scalable_t5')` is the same with other defaults.
"""

import dataclasses

from t5x_lite import checks
from t5x_lite.compat import names as t5x_names
from t5x_lite.networks import t5_config
from t5x_lite.networks.t5 import Decoder
from t5x_lite.networks.t5 import DecoderLayer
from t5x_lite.networks.t5 import Encoder
from t5x_lite.networks.t5 import EncoderLayer
from t5x_lite.networks.t5 import Transformer

__all__ = ['Decoder', 'DecoderLayer', 'Encoder', 'EncoderLayer', 'T5Config', 'Transformer']


@dataclasses.dataclass(frozen=True)
class T5Config(t5_config.T5Config):
  """Hyper-parameters in the order of T5X's `scalable_t5`; see `StackConfig`.

  Attributes:
    remat_policy: see `StackConfig`.
    scan_layers: True, or None with the same loops. T5X gives other parameters to layers without loops, one subtree per
      layer; of these, this package has the layout 't5' in `t5.T5Config`.
    param_scan_axis: position of the dim over layers in the parameters, 1.
  """

  remat_policy: str = 'none'
  scan_layers: bool | None = True
  param_scan_axis: int = 1
  _: dataclasses.KW_ONLY
  float32_attention_logits: bool = False
  param_layout: str = 'scalable_t5'

  def __post_init__(self):
    checks.check(
      'scalable_t5.T5Config',
      {
        'scan_layers': self.scan_layers,
        'param_scan_axis': self.param_scan_axis,
        'param_layout': self.param_layout,
      },
      scan_layers=checks.one_of(
        (True, None),
        t5x_names.remedy('t5x.examples.scalable_t5.network', 'T5Config.scan_layers=False'),
      ),
      param_scan_axis=checks.one_of((1,), "This is T5X's default."),
      param_layout=checks.one_of(('scalable_t5',), "Use t5.T5Config for the layout 't5'."),
    )
    super().__post_init__()
