"""Distributed Shampoo in every mode that has its own code path."""

from t5x_lite import optimizers
from tests.optimizers.contract_rows import Row


def _row(learning_rate: float = 0.05, **options) -> Row:
  # A large ridge: contract checks compare meshes to 1e-6, and roots of nearly singular matrices amplify rounding.
  defaults = {'block_size': 8, 'start_preconditioning_step': 3, 'matrix_epsilon': 1e-2}
  return Row(lambda: optimizers.distributed_shampoo(**defaults | options), learning_rate)


_RATES = {
  'SGD': 0.03,
  'ADAGRAD': 0.1,
  'RMSPROP': 0.01,
  'RMSPROP_NORMALIZED': 0.01,
  'SQRT_N': 0.01,
  'ADAGRAD_NORMALIZED': 0.1,
}

ROWS = {f'shampoo_{name.lower()}': _row(rate, graft_type=name) for name, rate in _RATES.items()}
ROWS |= {
  'shampoo_own_rate': Row(lambda: optimizers.distributed_shampoo(0.03, 8)),
  'shampoo_sharded': _row(0.03, shard_optimizer_states=True),
  'shampoo_sharded_shared_momentum': _row(
    0.01, shard_optimizer_states=True, graft_type='SQRT_N', best_effort_memory_usage_reduction=True
  ),
  'shampoo_quantized': _row(
    0.01,
    graft_type='RMSPROP',
    best_effort_memory_usage_reduction=True,
    batch_axis_name='batch',
    moving_average_for_momentum=True,
  ),
  'shampoo_quantized_intervals': _row(
    0.03, quantize_statistics=True, preconditioning_compute_steps=2, statistics_compute_steps=2
  ),
  'shampoo_intervals': _row(
    0.03, preconditioning_compute_steps=3, statistics_compute_steps=2, weight_decay=1e-3
  ),
  'shampoo_sharded_intervals': _row(
    0.03, preconditioning_compute_steps=3, statistics_compute_steps=2, shard_optimizer_states=True
  ),
  'shampoo_spread': _row(
    0.03, preconditioning_compute_steps=3, spread_roots=True, root_method='eigh'
  ),
  'shampoo_all_skipped': _row(0.03, skip_preconditioning_dim_size_gt=1),
  'shampoo_sharded_all_skipped': _row(
    0.03, skip_preconditioning_dim_size_gt=1, shard_optimizer_states=True
  ),
}
