"""Optax's own optimizers, and its wrappers around them."""

import jax
import optax

from t5x_lite import optimizers
from tests.optimizers.contract_rows import Row

_SCHEDULE = optax.linear_schedule(0.0, 0.05, 5)


def _is_matrix(params):
  return jax.tree.map(lambda p: p.ndim >= 2, params)


# Factories that take another rate of the trainer than 0.05, or arguments.
_ALIASES = {
  'adadelta': 6.0,
  'adafactor_of_optax': Row(lambda: optimizers.adafactor(min_dim_size_to_factor=4), 0.05),
  'adagrad': 0.3,
  'fromage': 0.02,
  'lamb': 0.02,
  'lars': Row(lambda: optimizers.lars(trust_coefficient=0.1), 0.1),
  'lbfgs': Row(lambda: optimizers.lbfgs(memory_size=4), needs=('value', 'grad', 'value_fn')),
  'lion': 0.01,
  'noisy_sgd': Row(lambda: optimizers.noisy_sgd(eta=1e-6), 0.1),
  'optimistic_adam': 0.02,
  'optimistic_adam_v2': 0.02,
  'polyak_sgd': Row(lambda: optimizers.polyak_sgd(max_learning_rate=0.5), needs=('value',)),
  'rmsprop': 0.01,
  'rprop': Row(lambda: optimizers.rprop(0.01)),
  'sgd': 0.1,
  'sign_sgd': 0.01,
  'signum': 0.01,
  'sm3': 0.3,
}

ROWS = {
  name: value if isinstance(value, Row) else Row(getattr(optimizers, name), value)
  for name, value in _ALIASES.items()
}
ROWS |= {
  'adam_own_rate': Row(lambda: optimizers.adam(0.05, nesterov=True)),
  'adamw_own_rate': Row(lambda: optimizers.adamw(0.05)),
  'adamw_schedule': Row(lambda: optimizers.adamw(_SCHEDULE)),
  'adamw_mask': Row(lambda: optimizers.adamw(mask=_is_matrix), 0.05),
  'rmsprop_centered': Row(lambda: optimizers.rmsprop(centered=True, momentum=0.5), 0.01),
  'sgd_own_rate': Row(lambda: optimizers.sgd(0.1)),
  'sgd_momentum': Row(lambda: optimizers.sgd(momentum=0.9), 0.02),
  'sgd_nesterov': Row(lambda: optimizers.sgd(momentum=0.9, nesterov=True), 0.02),
  'chain': Row(lambda: optimizers.chain([optax.clip_by_global_norm(1.0), optax.adamw(0.05)])),
  'chain_trainer_rate': Row(
    lambda: optimizers.chain(
      [optax.clip(1.0), optax.zero_nans(), optimizers.adamw(), optax.ema(0.5)]
    ),
    0.05,
  ),
  'multi_steps': Row(
    lambda: optimizers.OptaxWrapper(
      optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
      ).gradient_transformation()
    )
  ),
  'masked': Row(
    lambda: optimizers.OptaxWrapper(
      optax.chain(optax.masked(optax.trace(0.9), _is_matrix), optax.scale_by_learning_rate(0.04))
    )
  ),
  'inject_hyperparams': Row(
    lambda: optimizers.OptaxWrapper(
      optax.inject_hyperparams(optax.adamw)(learning_rate=_SCHEDULE, b1=0.8)
    )
  ),
  'apply_if_finite': Row(
    lambda: optimizers.OptaxWrapper(optax.apply_if_finite(optax.adam(0.05), 3))
  ),
  'partition_of_optax': Row(
    lambda: optimizers.OptaxWrapper(
      optax.partition({True: optax.adam(0.05), False: optax.sgd(0.1, momentum=0.5)}, _is_matrix)
    )
  ),
}
