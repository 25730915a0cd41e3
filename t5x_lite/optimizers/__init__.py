"""Optimizers under one contract: see `OptimizerDef`.

The modules of this package are private; what they offer is here. `t5x_lite.adafactor` holds Adafactor's names as T5X
users know them.
"""

from t5x_lite.optimizers._adafactor import Adafactor
from t5x_lite.optimizers._adafactor_rules import (
    HEURISTIC_RULE,
    FactorDim,
    HeuristicRule,
    HParamMap,
    factor_name_to_factordim,
    standard_logical_factor_rules,
)
from t5x_lite.optimizers._axes import match_logical_axes, unnamed_axes
from t5x_lite.optimizers._base import (
    Optimizer,
    OptimizerDef,
    OptimizerDefType,
    OptimizerState,
    OptimizerType,
    restore_from_state_dict,
)
from t5x_lite.optimizers._optax_wrapper import OptaxWrapper, adam, adamw, chain, sgd, wrap_optax_optimizer
from t5x_lite.optimizers._partition_rules import OptaxStatePartitionRules

__all__ = [
    'Adafactor',
    'FactorDim',
    'HEURISTIC_RULE',
    'HParamMap',
    'HeuristicRule',
    'OptaxStatePartitionRules',
    'OptaxWrapper',
    'Optimizer',
    'OptimizerDef',
    'OptimizerDefType',
    'OptimizerState',
    'OptimizerType',
    'adam',
    'adamw',
    'chain',
    'factor_name_to_factordim',
    'match_logical_axes',
    'restore_from_state_dict',
    'sgd',
    'standard_logical_factor_rules',
    'unnamed_axes',
    'wrap_optax_optimizer',
]
