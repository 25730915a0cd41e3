"""The optimizers of optax.contrib that take another rate of the trainer than 0.05, or arguments."""

import optax
import optax.contrib

from t5x_lite import optimizers
from tests.optimizers.contract_rows import Row


def _perturbation():
  return optax.chain(optax.contrib.normalize(), optax.sgd(0.01))


_CONTRIB = {
  'ademamix': 0.02,
  'cocob': 1.0,
  'dadapt_adamw': 1.0,
  'dog': 1.0,
  'dowg': 1.0,
  'dpsgd': Row(
    lambda: optimizers.dpsgd(l2_norm_clip=10.0, noise_multiplier=1e-6), 0.1, per_example=True
  ),
  'galore': Row(lambda: optimizers.galore(rank=2, update_proj_gap=5), 0.05),
  'madgrad': 0.02,
  'mechanize': Row(lambda: optimizers.mechanize(optimizers.adam()), 1.0),
  'momo': Row(optimizers.momo, 1.0, needs=('value',)),
  'momo_adam': Row(optimizers.momo_adam, 0.1, needs=('value',)),
  'prodigy': 1.0,
  'reduce_on_plateau': Row(
    lambda: optimizers.chain([optimizers.adam(), optimizers.reduce_on_plateau(patience=50)]),
    0.05,
    needs=('value',),
  ),
  'sam': Row(lambda: optimizers.sam(optimizers.sgd(), _perturbation()), 0.1),
  'sam_opaque': Row(
    lambda: optimizers.sam(optimizers.sgd(), _perturbation(), opaque_mode=True),
    0.1,
    needs=('grad_fn',),
  ),
  'schedule_free': Row(lambda: optimizers.schedule_free(optimizers.sgd()), 0.2),
  'schedule_free_own_rate': Row(lambda: optimizers.schedule_free(optax.sgd(0.2), 0.2)),
  'schedule_free_sgd': 0.2,
  'simplified_ademamix': Row(lambda: optimizers.simplified_ademamix(b1=0.9), 0.003),
  'sophia': Row(lambda: optimizers.sophia(update_interval=2), 0.02, needs=('obj_fn',)),
  'split_real_and_imaginary': Row(
    lambda: optimizers.split_real_and_imaginary(optimizers.adam()), 0.05
  ),
}

ROWS = {
  name: value if isinstance(value, Row) else Row(getattr(optimizers, name), value)
  for name, value in _CONTRIB.items()
}
