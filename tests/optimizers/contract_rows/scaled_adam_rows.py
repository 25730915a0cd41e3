"""ScaledAdam: rates, clipping, groups, and parameters of stacked layers each for itself or as one."""

import jax
import optax

from t5x_lite import optimizers
from tests.optimizers.contract_rows import Row

_CLIPPED = {'clipping_scale': 2.0, 'clipping_update_period': 10}


def _by_rank(params):
  return jax.tree.map(lambda p: 'matrices' if p.ndim >= 2 else 'default', params)


ROWS = {
  'scaled_adam': Row(lambda: optimizers.scaled_adam(0.05)),
  'scaled_adam_trainer_rate': Row(
    lambda: optimizers.scaled_adam(scalar_lr_scale=0.2, size_update_period=3), 0.05
  ),
  'scaled_adam_schedule': Row(lambda: optimizers.scaled_adam(optax.linear_schedule(0.0, 0.05, 5))),
  'scaled_adam_clipping': Row(lambda: optimizers.scaled_adam(**_CLIPPED), 0.05),
  'scaled_adam_clipping_sizes_only': Row(
    lambda: optimizers.scaled_adam(
      0.05,
      **_CLIPPED,
      clip_scale_gradient_only=True,
      show_dominant_parameters=False,
      size_update_period=1,
    )
  ),
  'scaled_adam_groups': Row(
    lambda: optimizers.scaled_adam(
      **_CLIPPED,
      param_labels=_by_rank,
      group_options={
        'matrices': {'clipping_update_period': 5, 'betas': (0.8, 0.95), 'size_update_period': 2}
      },
    ),
    0.05,
  ),
  'scaled_adam_stack_is_one': Row(lambda: optimizers.scaled_adam(0.05, **_CLIPPED, batch_axes=())),
  'scaled_adam_chain': Row(
    lambda: optimizers.chain([optax.zero_nans(), optimizers.scaled_adam(**_CLIPPED)]), 0.05
  ),
}
