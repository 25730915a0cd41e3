"""MultiOptimizer: mixes of optimizers, with frozen parameters, by label, and one in another."""

import jax
import optax

from t5x_lite import adafactor
from t5x_lite import optimizers
from tests.optimizers.contract_rows import Row

_RULES = adafactor.standard_logical_factor_rules().copy(
  {'expert': adafactor.FactorDim.BATCH, 'expert_mlp': adafactor.FactorDim.COLUMN}
)


def _adafactor(**options):
  return adafactor.Adafactor(
    **{'min_dim_size_to_factor': 4, 'logical_factor_rules': _RULES, **options}
  )


_MATRICES = optimizers.ModelParamTraversal(lambda _, p: p.ndim >= 2)
_REST = optimizers.ModelParamTraversal(lambda _, p: p.ndim < 2)
# In every tree of the table, one parameter is frozen.
_SOME_OF_THE_REST = optimizers.ModelParamTraversal(
  lambda path, p: p.ndim < 2 and path not in ('/regression/b', '/encoder/norm/scale', '/scalar')
)
_NOT_MATRICES_OF_ONE = {
  'learning_rate': 'The check has one parameter, and a part without parameters is rejected.'
}


def _nested():
  inner = optimizers.MultiOptimizer(
    [(_MATRICES, optimizers.adam()), (_REST, _adafactor(beta1=0.5))]
  )
  return optimizers.MultiOptimizer([('.', inner)])


def _by_rank(params):
  return jax.tree.map(lambda p: 'matrix' if p.ndim >= 2 else 'rest', params)


ROWS = {
  'multi_adafactors': Row(
    lambda: optimizers.MultiOptimizer(
      [
        (_MATRICES, _adafactor()),
        (_REST, _adafactor(factored=False, multiply_by_parameter_scale=False, beta1=0.9)),
      ]
    ),
    0.05,
    _NOT_MATRICES_OF_ONE,
  ),
  'multi_adafactor_and_adamw': Row(
    lambda: optimizers.MultiOptimizer(
      [(_MATRICES, _adafactor(beta1=0.9)), (_REST, optimizers.adamw())]
    ),
    0.05,
    _NOT_MATRICES_OF_ONE,
  ),
  'multi_own_rates': Row(
    lambda: optimizers.MultiOptimizer(
      [
        (_MATRICES, optimizers.adamw(0.05)),
        (_REST, optimizers.sgd(optax.constant_schedule(0.02), momentum=0.9)),
      ]
    ),
    None,
    _NOT_MATRICES_OF_ONE,
  ),
  'multi_frozen': Row(
    lambda: optimizers.MultiOptimizer(
      [(_MATRICES, _adafactor()), (_SOME_OF_THE_REST, optimizers.adam(0.05))]
    ),
    0.05,
    _NOT_MATRICES_OF_ONE,
  ),
  'multi_scaled': Row(
    lambda: optimizers.with_update_options(
      optimizers.MultiOptimizer(
        [(_MATRICES, _adafactor(weight_decay_rate=1e-4)), (_REST, optimizers.adamw())]
      ),
      learning_rate_scales=[('kernel|w', 0.5)],
      weight_decay_scales=[('scal|b$', 0.0), ('kernel|w', 0.5)],
    ),
    0.05,
    _NOT_MATRICES_OF_ONE,
  ),
  'multi_whole': Row(lambda: optimizers.MultiOptimizer([('', optimizers.adam())]), 0.05),
  'multi_nested': Row(_nested, 0.05, _NOT_MATRICES_OF_ONE),
  'multi_scaled_adam_and_adamw': Row(
    lambda: optimizers.MultiOptimizer(
      [(_MATRICES, optimizers.scaled_adam()), (_REST, optimizers.adamw())]
    ),
    0.05,
    _NOT_MATRICES_OF_ONE,
  ),
  'multi_shampoo_and_adafactor': Row(
    lambda: optimizers.MultiOptimizer(
      [
        (
          _MATRICES,
          optimizers.distributed_shampoo(
            block_size=8, matrix_epsilon=1e-2, shard_optimizer_states=True
          ),
        ),
        (_REST, _adafactor()),
      ]
    ),
    0.05,
    _NOT_MATRICES_OF_ONE,
  ),
  'multi_by_label': Row(
    lambda: optimizers.partition(
      {
        'matrix': optimizers.chain([optax.clip_by_global_norm(1.0), optimizers.adam()]),
        'rest': _adafactor(),
      },
      _by_rank,
    ),
    0.05,
    _NOT_MATRICES_OF_ONE,
  ),
}
