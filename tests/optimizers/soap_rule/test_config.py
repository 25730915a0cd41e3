"""Checks of the options of SOAP."""

import pytest

from t5x_lite import optimizers
from t5x_lite.errors import ConfigError


@pytest.mark.parametrize(
  'options,message',
  [
    ({'b1': 1.0}, r'`soap.b1` must be a number in \[0, 1\), got 1.0'),
    ({'b2': 1.1}, 'b2` must be .*, got 1.1'),
    ({'shampoo_beta': -1}, 'shampoo_beta` must be .* or None, got -1'),
    ({'eps': 0.0}, 'eps` must be a number > 0, got 0.0'),
    ({'weight_decay': -0.1}, 'weight_decay` must be .*, got -0.1'),
    ({'precondition_frequency': 0}, 'precondition_frequency` must be an integer >= 1, got 0'),
    ({'max_precond_dim': 0}, 'max_precond_dim` must be .*, got 0'),
    ({'block_size': 1}, 'block_size` must be .*, got 1. .* use optimizers.adamw'),
    ({'merge_dims': 1}, 'merge_dims` must be True or False, got 1'),
    ({'precondition_1d': 'no'}, 'precondition_1d` must be .*'),
    ({'exponent': 0}, 'exponent` must be a number > 0, got 0'),
    ({'correct_bias': None}, 'correct_bias` must be .*, got None'),
    ({'skip_first_step': 2}, 'skip_first_step` must be .*, got 2'),
    ({'spread_refreshes': 'yes'}, 'spread_refreshes` must be .*'),
    ({'momentum_dtype': 'int16'}, "momentum_dtype` must be one of .*, got 'int16'"),
    ({'second_moment_dtype': 'int8'}, "second_moment_dtype` must be one of .*, got 'int8'"),
    ({'matrix_dtype': 'int8'}, "matrix_dtype` must be one of .*, got 'int8'"),
    ({'symmetric_storage': 0}, 'symmetric_storage` must be .*, got 0'),
    ({'symetric_storage': True}, "Did you mean 'symmetric_storage'"),
    ({'learning_rate': 'fast'}, 'learning_rate` must be'),
  ],
)
def test_invalid_options_are_rejected_immediately(options, message):
  with pytest.raises(ConfigError, match=message):
    optimizers.soap(**options)


@pytest.mark.parametrize(
  'options,other',
  [
    ({'block_size': 64, 'max_precond_dim': 64}, 'max_precond_dim=64'),
    ({'spread_refreshes': True, 'precondition_frequency': 1}, 'precondition_frequency=1'),
    ({'momentum_dtype': 'bfloat16', 'b1': 0.0}, 'b1=0'),
    ({'correct_bias': False, 'b1': 0.0, 'b2': 1}, 'b1=0 and b2=1'),
    ({'symmetric_storage': True, 'matrix_dtype': 'int16'}, "matrix_dtype='int16'"),
    ({'second_moment_dtype': 'bfloat16', 'b2': 0.999}, 'b2=0.999'),
  ],
)
def test_options_without_effect_are_rejected_with_the_remedy(options, other):
  (option, value), *rest = options.items()
  with pytest.raises(ConfigError, match=f'`soap.{option}` cannot be used with {other}.*Leave out'):
    optimizers.soap(**options)
  assert optimizers.soap(**dict(rest)).uses_learning_rate
  if option != 'block_size':  # the default of `max_precond_dim` is larger
    optimizers.soap(**{option: value})


def test_axes_are_no_option_of_users():
  with pytest.raises(ConfigError, match="unexpected keyword argument 'param_axes'"):
    optimizers.soap(param_axes={})
