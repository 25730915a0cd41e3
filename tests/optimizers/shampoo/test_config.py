"""Checks of the options of Shampoo."""

import jax
import jax.numpy as jnp
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError


@pytest.mark.parametrize(
  'options,message',
  [
    ({'block_size': 0}, 'block_size` must be an integer >= 1, got 0'),
    ({'block_size': 1.5}, 'block_size` must be .*, got 1.5'),
    ({'preconditioning_compute_steps': -1}, 'preconditioning_compute_steps` must be .*, got -1'),
    ({'statistics_compute_steps': 0}, 'statistics_compute_steps` must be .*, got 0'),
    ({'start_preconditioning_step': -1}, 'start_preconditioning_step` must be .*, got -1'),
    ({'beta1': 1.0}, 'beta1` must be .*, got 1.0'),
    ({'beta2': 1.1}, 'beta2` must be .*, got 1.1'),
    ({'weight_decay': -0.1}, 'weight_decay` must be .*, got -0.1'),
    ({'exponent_override': -2}, 'exponent_override` must be .*, got -2'),
    ({'inverse_failure_threshold': 0.0}, 'inverse_failure_threshold` must be .*, got 0.0'),
    ({'graft_type': 'RMSPROP_NORMALISED'}, "Did you mean 'RMSPROP_NORMALIZED'"),
    ({'graft_type': 7}, 'graft_type` must be .*, got 7'),
    ({'nesterov': 'yes'}, "nesterov` must be True or False, got 'yes'"),
    ({'precision': 'best'}, "precision` must be one of .*, got 'BEST'"),
    ({'root_method': 'newton'}, "root_method` must be one of .*, got 'newton'"),
    ({'batch_axis_name': 0}, 'must be the name of a mapped axis'),
    (
      {'batch_axis_name': 'batch', 'shard_optimizer_states': True},
      'batch_axis_name` cannot be used with shard_optimizer_states',
    ),
    ({'clip_by_scaled_gradient_norm': 1.0}, 'cannot be used with graft_type=SGD'),
    ({'spread_roots': True}, 'cannot be used with preconditioning_compute_steps=1'),
    (
      {'quantize_statistics': True, 'shard_optimizer_states': True},
      'quantize_statistics` cannot be used with shard_optimizer_states',
    ),
    ({'statistics_partition_spec': 'x'}, "statistics_partition_spec` must be .*, got 'x'"),
    ({'blok_size': 8}, 'block_size'),
  ],
)
def test_invalid_options_are_rejected_immediately(options, message):
  for rate in (None, 0.1):
    with pytest.raises(ConfigError, match=message):
      optimizers.distributed_shampoo(rate, **options)


def test_invalid_learning_rates_are_rejected():
  for rate in ('fast', -1.0, True):
    with pytest.raises(ConfigError, match='learning_rate` must be'):
      optimizers.distributed_shampoo(rate, 8)


def test_graft_types_are_given_by_member_name_or_number():
  grads = {'w': jnp.full([2, 2], 0.5)}
  states = [
    jax.eval_shape(
      optimizers.distributed_shampoo(0.1, 4, graft_type=kind).optax_optimizer.init, grads
    )
    for kind in (optimizers.GraftingType.RMSPROP, 'rmsprop', 3)
  ]
  assert states[0] == states[1] == states[2]
