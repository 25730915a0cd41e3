"""T5X's Adafactor."""

import jax.numpy as jnp
import optax

from t5x_lite import adafactor
from tests.optimizers.contract_rows import Row

_RULES = adafactor.standard_logical_factor_rules().copy(
  {'expert': adafactor.FactorDim.BATCH, 'expert_mlp': adafactor.FactorDim.COLUMN}
)


def _adafactor(**options):
  return adafactor.Adafactor(
    **{'min_dim_size_to_factor': 4, 'logical_factor_rules': _RULES, **options}
  )


ROWS = {
  'adafactor': Row(_adafactor, 0.05),
  'adafactor_own_rate': Row(lambda: _adafactor(learning_rate=0.05)),
  'adafactor_schedule': Row(lambda: _adafactor(learning_rate=optax.linear_schedule(0.0, 0.05, 5))),
  'adafactor_momentum': Row(
    lambda: _adafactor(beta1=0.9, dtype_momentum=jnp.bfloat16),
    0.05,
    {
      'bfloat16': 'dtype_momentum=bfloat16 is a wish of the user: the momentum is kept as asked for.'
    },
  ),
  'adafactor_unfactored': Row(
    lambda: _adafactor(factored=False, multiply_by_parameter_scale=False, beta1=0.5), 0.05
  ),
  'adafactor_all_options': Row(
    lambda: _adafactor(
      weight_decay_rate=1e-3,
      weight_decay_rate_lr_exponent=1.0,
      global_norm_clip_threshold=5.0,
      max_parameter_scale=2.0,
      skip_nan_updates=True,
      clipping_threshold=0.5,
    ),
    0.05,
  ),
}
