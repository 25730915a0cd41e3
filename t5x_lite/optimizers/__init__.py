"""Optimizers with one interface, `OptimizerDef`.

The modules of this package are private; their public names are exported here: those that a configuration may call,
which `configurable_names` lists, and the others below. `t5x_lite.adafactor` has the names of Adafactor that T5X has.
"""

from t5x_lite.configuration import configurable_names
from t5x_lite.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
  globals(),
  configurable_names.called_in('t5x_lite.optimizers'),
  {
    't5x_lite.optimizers.adafactor_rule.factor_rules': ('HEURISTIC_RULE',),
    't5x_lite.optimizers.axes.names': ('match_logical_axes', 'unnamed_axes'),
    't5x_lite.optimizers.base.definition': (
      'EXTRA_ARGS',
      'Optimizer',
      'OptimizerDef',
      'OptimizerDefType',
      'OptimizerState',
      'OptimizerStateType',
      'OptimizerType',
    ),
    't5x_lite.optimizers.base.state_dicts': ('restore_from_state_dict', 'to_state_dict'),
    't5x_lite.optimizers.base.state_hooks': (
      'register_eval_params',
      'register_optional_field',
      'register_schedule_count',
      'register_state_metrics',
    ),
    't5x_lite.optimizers.multi.optimizer': ('MultiOptimizerState',),
    't5x_lite.optimizers.optax_adapter.per_unit': ('per_unit',),
    't5x_lite.optimizers.scaled_adam_rule.transformation': ('ScaledAdamState',),
    't5x_lite.optimizers.shampoo': ('ShampooState',),
  },
)
