"""Muon with its options, and with the arrays that optax's Muon has."""

import optax

from t5x_lite import optimizers
from tests.optimizers.contract_rows import Row

ROWS = {
  'muon': Row(optimizers.muon, 0.05),
  'muon_all_options': Row(
    lambda: optimizers.muon(
      optax.linear_schedule(0.05, 0.01, 300),
      'dion',
      weight_decay=1e-3,
      adam_weight_decay=1e-3,
      adam_learning_rate=optax.constant_schedule(0.05),
      consistent_rms=0.2,
      preconditioning='aol',
    )
  ),
  'muon_two_dims': Row(lambda: optimizers.muon(matrices='two_dims'), 0.05),
}
