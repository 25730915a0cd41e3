"""Options of Shampoo, checked when they are given."""

import jax
import jax.numpy as jnp
import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError

# What is refused, with or without a learning rate of its own.


@pytest.mark.parametrize('options,message', [
    ({'block_size': 0}, 'block_size is 0; expected an integer >= 1'),
    ({'block_size': 1.5}, 'block_size is 1.5'),
    ({'preconditioning_compute_steps': -1}, 'preconditioning_compute_steps is -1'),
    ({'statistics_compute_steps': 0}, 'statistics_compute_steps is 0'),
    ({'start_preconditioning_step': -1}, 'start_preconditioning_step is -1'),
    ({'beta1': 1.0}, 'beta1 is 1.0'),
    ({'beta2': 1.1}, 'beta2 is 1.1'),
    ({'weight_decay': -0.1}, 'weight_decay is -0.1'),
    ({'exponent_override': -2}, 'exponent_override is -2'),
    ({'inverse_failure_threshold': 0.0}, 'inverse_failure_threshold is 0.0'),
    ({'graft_type': 'RMSPROP_NORMALISED'}, "Did you mean 'RMSPROP_NORMALIZED'"),
    ({'graft_type': 7}, 'graft_type is 7'),
    ({'nesterov': 'yes'}, "nesterov is 'yes'; expected True or False"),
    ({'precision': 'best'}, "precision is 'best'"),
    ({'root_method': 'newton'}, "root_method is 'newton'"),
    ({'batch_axis_name': 0}, 'expected the name of a mapped axis'),
    ({'batch_axis_name': 'batch', 'shard_optimizer_states': True}, 'exclude each other'),
    ({'clip_by_scaled_gradient_norm': 1.0}, 'has no effect with graft_type=SGD'),
    ({'spread_roots': True}, 'set preconditioning_compute_steps above 1'),
    ({'quantize_statistics': True, 'shard_optimizer_states': True}, 'exclude each other'),
    ({'statistics_partition_spec': 'x'}, "statistics_partition_spec is 'x'"),
    ({'blok_size': 8}, 'block_size'),
])
def test_bad_options_are_refused_at_once(options, message):
  for rate in (None, 0.1):
    with pytest.raises(ConfigError, match=message):
      optimizers.distributed_shampoo(rate, **options)


def test_learning_rates_of_the_wrong_kind_are_refused():
  for rate in ('fast', -1.0, True):
    with pytest.raises(ConfigError, match='learning_rate is'):
      optimizers.distributed_shampoo(rate, 8)


def test_graft_types_are_given_by_member_name_or_number():
  grads = {'w': jnp.full([2, 2], 0.5)}
  states = [jax.eval_shape(optimizers.distributed_shampoo(0.1, 4, graft_type=kind).optax_optimizer.init, grads)
            for kind in (optimizers.GraftingType.RMSPROP, 'rmsprop', 3)]
  assert states[0] == states[1] == states[2]
