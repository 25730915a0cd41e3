"""Adafactor under T5X's module name; implemented in `t5x_lite.optimizers`."""

from t5x_lite.optimizers import (
  HEURISTIC_RULE,
  Adafactor,
  FactorDim,
  HeuristicRule,
  HParamMap,
  factor_name_to_factordim,
  relative_step,
  standard_logical_factor_rules,
)

__all__ = [
  'Adafactor',
  'FactorDim',
  'HEURISTIC_RULE',
  'HParamMap',
  'HeuristicRule',
  'factor_name_to_factordim',
  'relative_step',
  'standard_logical_factor_rules',
]
