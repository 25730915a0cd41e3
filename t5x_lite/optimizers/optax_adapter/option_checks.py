"""Checks of the options of optax's optimizers, by their names; optax checks few of them, and trains with the others.

An option means the same in nearly all factories, so a table by name serves them all; a second one names the exceptions.
An option in neither is checked elsewhere, or takes anything (`UNCHECKED`); a test walks the factories for new ones.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from t5x_lite import checks
from t5x_lite.errors import ConfigError, did_you_mean
from t5x_lite.optimizers.base import definition

# From (owner, name of the option, value) to nothing, or a ConfigError.
_Check = Callable[[str, str, Any], None]


def check_options(factory: str, arguments: Mapping[str, Any]) -> None:
  """Refuses values of options that are of a wrong type or out of range.

  Args:
    factory: name of a factory of this package.
    arguments: what it was given, by name.

  Raises:
    ConfigError: naming the option, what was got and what is expected.

  >>> check_options('adamw', {'b1': 0.9, 'weight_decay': 0.1})
  """
  for name, value in arguments.items():
    check = _EXCEPTIONS.get((factory, name)) or _CHECKS.get(name)
    if check is not None:
      check(f'Optimizer {factory}', name, value)


def has_check(factory: str, name: str) -> bool:
  """Whether the option is looked at here."""
  return (factory, name) in _EXCEPTIONS or name in _CHECKS


# ---- Kinds of options. -----------------------------------------------------------------------------------------------


def _number(owner: str, name: str, value: Any, *, schedule: bool = False, **bounds: Any) -> None:
  """Refuses what is no finite number within `bounds`, which are those of `checks.check_number`.

  Arrays on a device are scalars of numbers, at which nobody looks: that would wait for them.
  """
  if schedule and callable(value):
    definition.check_learning_rate_fn(value, f'{owner}: the schedule {name}')
    return
  if isinstance(value, jax.Array):
    if value.ndim or not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
      raise ConfigError(f'{owner}: {name} is an array of shape {list(value.shape)} and dtype {value.dtype}; expected a '
                        'number.')
    return
  if isinstance(value, np.ndarray) and value.ndim == 0:
    value = value.item()
  checks.check_number(owner, name, value, **bounds)
  if value is not None and not math.isfinite(value):
    raise ConfigError(f'{owner}: {name} is {value!r}; expected a finite number.')


def _pair_of_decays(owner: str, name: str, value: Any) -> None:
  if not isinstance(value, (list, tuple)) or len(value) != 2:
    raise ConfigError(f'{owner}: {name} is {value!r}; expected two numbers >= 0 and < 1.')
  for i, decay in enumerate(value):
    _decay(owner, f'{name}[{i}]', decay)


def _initial_step(owner: str, name: str, value: Any) -> None:
  tags = ('distance', 'learning_rate', 'heuristic')
  if not isinstance(value, (list, tuple)) or len(value) != 2:
    raise ConfigError(f'{owner}: {name} is {value!r}; expected a pair of one of {tags} and a number.')
  _one_of(owner, f'{name}[0]', value[0], choices=tags)
  _positive(owner, f'{name}[1]', value[1])


def _one_of(owner: str, name: str, value: Any, *, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise ConfigError(f'{owner}: {name} is {value!r}; expected one of {", ".join(map(repr, choices))}.'
                      f'{did_you_mean(str(value), choices)}')


def _bool(owner: str, name: str, value: Any) -> None:
  if not isinstance(value, (bool, np.bool_)):
    raise ConfigError(f'{owner}: {name} is {value!r} of type {type(value).__name__}; expected True or False.')


def _dtype(owner: str, name: str, value: Any) -> None:
  try:
    is_floating = value is None or jnp.issubdtype(jnp.dtype(value), jnp.floating)
  except TypeError:
    is_floating = False
  if not is_floating:
    raise ConfigError(f"{owner}: {name} is {value!r}; expected a floating-point dtype such as 'bfloat16', or None.")


def _function(owner: str, name: str, value: Any) -> None:
  if not callable(value):
    raise ConfigError(f'{owner}: {name} is {value!r} of type {type(value).__name__}; expected a function.')


def _mask(owner: str, name: str, value: Any) -> None:
  """A tree of booleans, of which one may stand for a subtree; or a function that makes it; None for all."""
  if value is None or callable(value):
    return
  for leaf in jax.tree.leaves(value):
    if not isinstance(leaf, (bool, np.bool_)):
      raise ConfigError(
          f'{owner}: {name} holds {leaf!r} of type {type(leaf).__name__}; expected True or False for each parameter, '
          'in a tree like theirs, or a function from the parameters to such a tree.')


def _dimension_numbers(owner: str, name: str, value: Any, *, kind: type) -> None:
  """A tree of a class of optax, which says what the dims of a parameter are, or of None; or a function to it."""
  if value is None or callable(value):
    return
  for leaf in jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, kind)):
    if not isinstance(leaf, kind):
      raise ConfigError(f'{owner}: {name} holds {leaf!r}; expected optax.contrib.{kind.__name__} or None for each '
                        'parameter, in a tree like theirs, or a function from the parameters to such a tree.')


def _transformation(owner: str, name: str, value: Any) -> None:
  if value is not None and not isinstance(value, optax.GradientTransformation):
    raise ConfigError(f'{owner}: {name} is {value!r}; expected an optax transformation.')


def _rate(owner: str, name: str, value: Any) -> None:
  try:
    definition.check_learning_rate(value, owner)
  except ConfigError as error:
    raise ConfigError(str(error).replace('learning_rate', name, 1)) from error


_any_number = _number
_decay = functools.partial(_number, at_least=0, below=1)
_decay_or_none = functools.partial(_number, at_least=0, below=1, optional=True)
_positive = functools.partial(_number, above=0)
_positive_or_none = functools.partial(_number, above=0, optional=True)
_not_negative = functools.partial(_number, at_least=0)
_not_negative_or_none = functools.partial(_number, at_least=0, optional=True)
_not_negative_or_schedule = functools.partial(_number, at_least=0, schedule=True)
_count = functools.partial(_number, at_least=1, integer=True)
_count_or_zero = functools.partial(_number, at_least=0, integer=True)

# ---- Which option is what. -------------------------------------------------------------------------------------------

_CHECKS: dict[str, _Check] = {
    # Decays of running means.
    **dict.fromkeys(('adam_b1', 'adam_b2', 'b1', 'b2', 'b3', 'beta', 'decay', 'rho'), _decay),
    **dict.fromkeys(('beta3', 'momentum'), _decay_or_none),
    'betas': _pair_of_decays,
    # What is added, subtracted or multiplied.
    **dict.fromkeys((
        'adam_eps_root', 'atol', 'decay_offset', 'decay_rate', 'eps', 'eps_root', 'eta', 'initial_accumulator_value',
        'initial_scale', 'min_norm', 'min_scale', 'min_step_size', 'noise_multiplier', 'rtol'), _not_negative),
    # A schedule of decay is optax's where it is added to the updates.
    **dict.fromkeys(('adam_weight_decay', 'scaling', 'weight_decay'), _not_negative_or_schedule),
    'weight_decay_rate': functools.partial(_number, at_least=0, schedule=True, optional=True),
    **dict.fromkeys((
        'estim_lr0', 'estim_lr_coef', 'gamma', 'l2_norm_clip', 'max_learning_rate', 'max_step_size', 's_init', 'scale',
        'trust_coefficient'), _positive),
    **dict.fromkeys(
        ('clip_threshold', 'clipping_threshold', 'consistent_rms', 'init_estim_sq_dist'), _positive_or_none),
    **dict.fromkeys(('f_min', 'lower_bound', 'threshold', 'weight_lr_power'), _any_number),
    'optimism': functools.partial(_number, optional=True),
    'alpha': functools.partial(_number, schedule=True),
    'factor': functools.partial(_number, above=0, below=1),
    'eta_minus': functools.partial(_number, above=0, at_most=1),
    'eta_plus': functools.partial(_number, at_least=1),
    'init_step': _initial_step,
    'adam_learning_rate': _rate,
    # Numbers of things, and intervals: optax divides by some, and 0 would mean never, or NaN.
    **dict.fromkeys((
        'accumulation_size', 'memory_size', 'min_dim_size_to_factor', 'ns_steps', 'num_betas', 'patience', 'rank',
        'sync_period', 'update_interval', 'update_proj_gap'), _count),
    **dict.fromkeys(('cooldown', 'print_win_rate_every_n_steps'), _count_or_zero),
    'warmup_steps': functools.partial(_number, at_least=0, integer=True, optional=True),
    # Switches, dtypes, functions, names.
    **dict.fromkeys((
        'adapt_lower_bound', 'adaptive', 'bias_correction', 'bias_correction_mu', 'bias_correction_nu', 'centered',
        'eps_in_sqrt', 'factored', 'multiply_by_parameter_scale', 'nesterov', 'opaque_mode', 'reset_state',
        'safeguard_warmup', 'scale_init_precond', 'use_clipping', 'verbose'), _bool),
    **dict.fromkeys(('accumulator_dtype', 'dtype_momentum', 'mu_dtype', 'state_dtype'), _dtype),
    **dict.fromkeys(('mask', 'trust_ratio_mask', 'weight_decay_mask'), _mask),
    'clip_value_fn': _function,
    **dict.fromkeys(('hessian_diagonal_fn', 'linesearch'), _transformation),
    'muon_weight_dimension_numbers': functools.partial(_dimension_numbers, kind=optax.contrib.MuonDimensionNumbers),
    'weight_dimension_numbers': functools.partial(_dimension_numbers, kind=optax.contrib.GaLoreDimensionNumbers),
    'preconditioning': functools.partial(_one_of, choices=('frobenius', 'spectral', 'aol', 'schatten')),
    'variant': functools.partial(_one_of, choices=('sps', 'sps+')),
}

# (factory, option): what is something else there.
_EXCEPTIONS: dict[tuple[str, str], _Check] = {
    ('ademamix', 'alpha'): _not_negative_or_schedule,
    ('ademamix', 'b3'): functools.partial(_number, at_least=0, below=1, schedule=True),
    ('simplified_ademamix', 'alpha'): _not_negative_or_schedule,
    ('cocob', 'alpha'): _positive,
    ('optimistic_adam_v2', 'alpha'): _any_number,
    ('optimistic_adam_v2', 'beta'): _any_number,
    ('optimistic_gradient_descent', 'beta'): functools.partial(_number, schedule=True),
    ('noisy_sgd', 'gamma'): _not_negative,
    # The average is divided by it.
    **{(name, 'b1'): functools.partial(_number, above=0, at_most=1)
       for name in ('schedule_free', 'schedule_free_adamw', 'schedule_free_sgd')},
    # Not added to the updates, but multiplied with other numbers.
    **{(name, 'weight_decay'): _not_negative
       for name in ('dadapt_adamw', 'mechanize', 'momo', 'momo_adam', 'prodigy')},
    **{(name, 'weight_decay'): functools.partial(_number, at_least=0, schedule=True, optional=True)
       for name in ('dog', 'dowg', 'schedule_free_sgd')},
}

# Options that are not looked at here: rates and optimizers inside have checks of their own; seeds, and what optax
# says itself when the optimizer is made.
UNCHECKED = frozenset((
    'learning_rate', 'base_optimizer', 'inner', 'optimizer', 'adv_optimizer', 'batch_axis_name', 'key', 'ns_coeffs',
    'seed'))
