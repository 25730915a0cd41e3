"""Adafactor under T5X's module name; implemented in `t5x_lite.optimizers`."""

from t5x_lite.optimizers import HEURISTIC_RULE
from t5x_lite.optimizers import Adafactor
from t5x_lite.optimizers import FactorDim
from t5x_lite.optimizers import HeuristicRule
from t5x_lite.optimizers import HParamMap
from t5x_lite.optimizers import factor_name_to_factordim
from t5x_lite.optimizers import relative_step
from t5x_lite.optimizers import standard_logical_factor_rules

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
