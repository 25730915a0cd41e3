"""Checks of the options of optax's optimizers, by option name.

Optax checks few options: with b1=1.5 or a negative decay it trains, silently wrong. An option has the same meaning in
nearly all factories, so one table by name serves all of them; a second table has the exceptions.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax.contrib

from t5x_lite import checks
from t5x_lite.checks import Expectation
from t5x_lite.optimizers.base.scalars import FLOATING_DTYPE
from t5x_lite.optimizers.base.scalars import check_learning_rate
from t5x_lite.optimizers.base.scalars import scalar
from t5x_lite.schedules import check_learning_rate_fn
from t5x_lite.trainer import step_params


def check_options(factory: str, arguments: Mapping[str, Any]) -> None:
  """Raise if an option has a wrong type or is out of range.

  Args:
    factory: name of a factory of this package.
    arguments: its arguments by name.

  Raises:
    ConfigError: names the option, its value and the expected range.

  >>> check_options('adamw', {'b1': 0.9, 'weight_decay': 0.1})
  """
  expectations = {
    name: _EXCEPTIONS.get((factory, name)) or _EXPECTATIONS[name]
    for name in arguments
    if has_check(factory, name)
  }
  checks.check(factory, arguments, **expectations)
  for name, expected in expectations.items():
    if callable(arguments[name]) and expected.text.endswith(_SCHEDULE):
      check_learning_rate_fn(arguments[name], f'{factory}.{name}')
  check_learning_rate(arguments.get('adam_learning_rate'), factory, 'adam_learning_rate')


def has_check(factory: str, name: str) -> bool:
  """Return True if this module checks the option."""
  return (factory, name) in _EXCEPTIONS or name in _EXPECTATIONS


def _or_schedule(expected: Expectation) -> Expectation:
  return Expectation(
    f'{expected.text}{_SCHEDULE}', lambda value: callable(value) or expected.holds(value)
  )


def _dimension_numbers(kind: type) -> Expectation:
  return Expectation(
    f'optax.contrib.{kind.__name__} or None for each parameter, or a function that returns such a tree',
    lambda value: (
      callable(value)
      or all(
        isinstance(leaf, kind)
        for leaf in jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, kind))
      )
    ),
  )


def _are_coefficients(value: Any) -> bool:
  if isinstance(value, str):
    return value in ('standard', 'dion')
  coefficients = np.asarray(value)
  shape = coefficients.shape
  has_rows = len(shape) in (1, 2) and shape[-1] == 3
  return has_rows and coefficients.dtype != bool and bool(np.all(np.isfinite(coefficients)))


def _are_matrices(value: Any) -> bool:
  if isinstance(value, str):
    return value == 'two_dims'
  return step_params.are_rules(value, lambda is_matrix: isinstance(is_matrix, bool))


def _is_mask(value: Any) -> bool:
  return callable(value) or all(
    isinstance(leaf, (bool, np.bool_)) for leaf in jax.tree.leaves(value)
  )


_SCHEDULE = ' or a schedule'
_DECAY = scalar(at_least=0, below=1)
_POSITIVE = scalar(above=0)
_NOT_NEGATIVE = scalar(at_least=0)
_NUMBER = scalar()
_COUNT = checks.number(at_least=1, integer=True)
_COUNT_OR_ZERO = checks.number(at_least=0, integer=True)
_BOOL = checks.instance((bool, np.bool_), 'True or False')
_DTYPE = FLOATING_DTYPE.or_none()
_MASK = Expectation(
  'True, False, a tree of these like the parameters, or a function that returns one', _is_mask
)
_DECAY_PAIR = Expectation(
  'two numbers in [0, 1)',
  lambda value: (
    isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_DECAY.holds, value))
  ),
)
_INITIAL_STEP = Expectation(
  "a pair of 'distance', 'learning_rate' or 'heuristic' and a number > 0",
  lambda value: (
    isinstance(value, (list, tuple))
    and len(value) == 2
    and value[0] in ('distance', 'learning_rate', 'heuristic')
    and _POSITIVE.holds(value[1])
  ),
)

_EXPECTATIONS: dict[str, Expectation] = {
  # Decays of moving averages.
  **dict.fromkeys(('adam_b1', 'adam_b2', 'b1', 'b2', 'b3', 'beta', 'decay', 'rho'), _DECAY),
  **dict.fromkeys(('beta3', 'momentum'), _DECAY.or_none()),
  'betas': _DECAY_PAIR,
  # Terms and factors.
  **dict.fromkeys(
    (
      'adam_eps_root',
      'atol',
      'decay_offset',
      'decay_rate',
      'eps',
      'eps_root',
      'eta',
      'initial_accumulator_value',
      'initial_scale',
      'min_norm',
      'min_scale',
      'min_step_size',
      'noise_multiplier',
      'rtol',
    ),
    _NOT_NEGATIVE,
  ),
  # Optax accepts a schedule for a decay that is added to the updates.
  **dict.fromkeys(('adam_weight_decay', 'scaling', 'weight_decay'), _or_schedule(_NOT_NEGATIVE)),
  'weight_decay_rate': _or_schedule(_NOT_NEGATIVE.or_none()),
  **dict.fromkeys(
    (
      'estim_lr0',
      'estim_lr_coef',
      'gamma',
      'l2_norm_clip',
      'max_learning_rate',
      'max_step_size',
      's_init',
      'scale',
      'trust_coefficient',
    ),
    _POSITIVE,
  ),
  **dict.fromkeys(
    ('clip_threshold', 'clipping_threshold', 'consistent_rms', 'init_estim_sq_dist'),
    _POSITIVE.or_none(),
  ),
  **dict.fromkeys(('f_min', 'lower_bound', 'threshold', 'weight_lr_power'), _NUMBER),
  'optimism': _NUMBER.or_none(),
  'alpha': _or_schedule(_NUMBER),
  'factor': scalar(above=0, below=1),
  'eta_minus': scalar(above=0, at_most=1),
  'eta_plus': scalar(at_least=1),
  'init_step': _INITIAL_STEP,
  # Counts and intervals; 0 would mean never, or a division by 0.
  **dict.fromkeys(
    (
      'accumulation_size',
      'memory_size',
      'min_dim_size_to_factor',
      'ns_steps',
      'num_betas',
      'patience',
      'rank',
      'sync_period',
      'update_interval',
      'update_proj_gap',
    ),
    _COUNT,
  ),
  **dict.fromkeys(('cooldown', 'print_win_rate_every_n_steps'), _COUNT_OR_ZERO),
  'warmup_steps': _COUNT_OR_ZERO.or_none(),
  # Switches: any text is true in Python. Masks: so is any number.
  **dict.fromkeys(
    (
      'adapt_lower_bound',
      'adaptive',
      'bias_correction',
      'bias_correction_mu',
      'bias_correction_nu',
      'centered',
      'eps_in_sqrt',
      'factored',
      'multiply_by_parameter_scale',
      'nesterov',
      'opaque_mode',
      'reset_state',
      'safeguard_warmup',
      'scale_init_precond',
      'use_clipping',
      'verbose',
    ),
    _BOOL,
  ),
  **dict.fromkeys(('mask', 'trust_ratio_mask', 'weight_decay_mask'), _MASK),
  # Statistics of an integer dtype would be 0.
  **dict.fromkeys(('accumulator_dtype', 'dtype_momentum', 'mu_dtype', 'state_dtype'), _DTYPE),
  'matrices': Expectation(
    "'two_dims' or pairs (regular expression, True or False)",
    _are_matrices,
    "Write [('^decoder/', False)].",
  ),
  'muon_weight_dimension_numbers': Expectation(
    'None',
    lambda value: value is None,
    'The dims of matrices follow from the logical axes of the parameters; muon.matrices chooses arrays.',
  ),
  'ns_coeffs': Expectation(
    "'standard', 'dion', three numbers, or three numbers for each iteration", _are_coefficients
  ),
  'weight_dimension_numbers': _dimension_numbers(optax.contrib.GaLoreDimensionNumbers),
  'preconditioning': checks.one_of(('frobenius', 'spectral', 'aol', 'schatten')),
  'variant': checks.one_of(('sps', 'sps+')),
}

# Options with another meaning in one factory, by (factory, option).
_EXCEPTIONS: dict[tuple[str, str], Expectation] = {
  ('ademamix', 'alpha'): _or_schedule(_NOT_NEGATIVE),
  ('ademamix', 'b3'): _or_schedule(_DECAY),
  ('simplified_ademamix', 'alpha'): _or_schedule(_NOT_NEGATIVE),
  ('cocob', 'alpha'): _POSITIVE,
  ('optimistic_adam_v2', 'alpha'): _NUMBER,
  ('optimistic_adam_v2', 'beta'): _NUMBER,
  ('optimistic_gradient_descent', 'beta'): _or_schedule(_NUMBER),
  ('noisy_sgd', 'gamma'): _NOT_NEGATIVE,
  # The average is divided by b1.
  **{
    (name, 'b1'): scalar(above=0, at_most=1)
    for name in ('schedule_free', 'schedule_free_adamw', 'schedule_free_sgd')
  },
  # Multiplied with other numbers instead of added to the updates.
  **{
    (name, 'weight_decay'): _NOT_NEGATIVE
    for name in ('dadapt_adamw', 'mechanize', 'momo', 'momo_adam', 'prodigy')
  },
  **{
    (name, 'weight_decay'): _or_schedule(_NOT_NEGATIVE.or_none())
    for name in ('dog', 'dowg', 'schedule_free_sgd')
  },
}

# Options without a check in this module: learning rates and inner optimizers are checked elsewhere; for the others
# optax raises when the optimizer is made or its state is traced.
UNCHECKED = frozenset(
  (
    'learning_rate',
    'adam_learning_rate',
    'base_optimizer',
    'inner',
    'optimizer',
    'adv_optimizer',
    'batch_axis_name',
    'clip_value_fn',
    'hessian_diagonal_fn',
    'key',
    'linesearch',
    'seed',
  )
)
