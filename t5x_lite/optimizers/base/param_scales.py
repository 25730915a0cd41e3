"""Scales of learning rates and weight decays by parameter, and the other options of `with_update_options`."""

from collections.abc import Callable, Collection
import dataclasses
import logging
import re

import jax
import jax.numpy as jnp

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.base import rounding
from t5x_lite.types import Array, Params

OWNER = 'with_update_options'
# Pairs (regular expression, factor); the first expression that is found in a parameter's path applies.
ScaleRules = tuple[tuple[str, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamScales:
  """Factors of the learning rate and of the weight decay by parameter.

  Attributes:
    learning_rates: rules for the learning rate; 1 if none applies.
    weight_decays: rules for the weight decay; 1 if none applies.
    path_fn: from the path of an array that the optimizer updates to that of the parameter.
  """

  learning_rates: ScaleRules = ()
  weight_decays: ScaleRules = ()
  path_fn: Callable[[str], str] | None = None
  # Texts that were logged; states are made, or traced, several times.
  _logged: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

  def __bool__(self) -> bool:
    return bool(self.learning_rates or self.weight_decays)

  def for_optimizer(self, has_weight_decay: bool) -> 'ParamScales':
    """Return the scales without those of the weight decay if the optimizer has none."""
    if has_weight_decay:
      return self
    return dataclasses.replace(self, weight_decays=())

  def of(self, path: str) -> tuple[float, float]:
    """Return (factor of the learning rate, factor of the weight decay) at a '/'-joined path.

    >>> ParamScales(learning_rates=(('^a/', 0.5), ('.*', 2.0))).of('a/kernel')
    (0.5, 1.0)
    """
    # Stacked layers have equal factors, see `OptimizerDef.stacking_key`.
    path = layer_stacks.paths_of(path)[0]
    if self.path_fn is not None:
      path = self.path_fn(path)
    rate = _first_match(self.learning_rates, path)
    decay = _first_match(self.weight_decays, path)
    rate_factor = 1.0
    decay_factor = 1.0
    if rate is not None:
      _, rate_factor = rate
    if decay is not None:
      _, decay_factor = decay
    return rate_factor, decay_factor

  def check(self, params: Params, decaying_paths: Collection[str]) -> None:
    """Raise if a rule is the first match of no parameter; log the effect of each rule once.

    Args:
      params: the parameters, or their shapes.
      decaying_paths: '/'-joined paths of the parameters with weight decay.

    Raises:
      ConfigError: names the rule.
    """
    paths = [path for path, _ in tree_utils.named_leaves(params)]
    decaying = [path for path in paths if path in decaying_paths]
    for what, option, rules, among in (
      ('learning rate', 'learning_rate_scales', self.learning_rates, paths),
      ('weight decay', 'weight_decay_scales', self.weight_decays, decaying),
    ):
      matched = {rule: [] for rule in rules}
      for path in among:
        rule = _first_match(rules, path)
        if rule is not None:
          matched[rule].append(path)
      for (pattern, scale), found in matched.items():
        if paths and not found:
          kind = ''
          if among is not paths:
            kind = ' with weight decay'
          raise ConfigError(
            f'`{OWNER}.{option}`: {pattern!r} is the first match of no parameter{kind}, such as '
            f'{(among or paths)[0]!r}. Correct it, move it up, or remove it.'
          )
        if found:
          self.log_once(
            f'The {what} is multiplied by {scale:g} for {len(found)} parameter(s), such as {found[0]}.'
          )

  def log_once(self, text: str) -> None:
    """Write a text to the log, unless it was written for these options before."""
    if text not in self._logged:
      self._logged.add(text)
      logging.getLogger(__name__).info(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateOptions:
  """Options of `with_update_options`, which describes them."""

  scales: ParamScales = ParamScales()
  param_dtype: str | None = None
  stochastic_rounding: bool = False

  def check_part(self, owner: str) -> None:
    """Raise if the options are not supported for an optimizer that is an argument of another one, the owner."""
    for option in ('param_dtype', 'stochastic_rounding'):
      if getattr(self, option):
        raise ConfigError(
          f'`{OWNER}.{option}` applies to all parameters and cannot be set for an argument of {owner}. '
          f'Apply {OWNER} to the result of {owner}.'
        )

  def rounding_key(self, step_key: Array | None) -> Array | None:
    """Return the key for stochastic rounding in a step, given the step's key for dropout; None without one."""
    return rounding.key_of_step(step_key)

  def prepare(self, params: Params) -> Params:
    """Return the parameters in `param_dtype`.

    Raises:
      ConfigError: stochastic rounding without bfloat16 parameters.
    """

    def cast(param):
      if jnp.issubdtype(param.dtype, jnp.floating):
        return param.astype(self.param_dtype)
      return param

    if self.param_dtype is not None:
      params = jax.tree.map(cast, params)
    if self.stochastic_rounding and not rounding.has_bfloat16(params):
      raise ConfigError(
        f'`{OWNER}.stochastic_rounding` has no effect: no parameter is bfloat16. Set '
        f"`{OWNER}.param_dtype` to 'bfloat16', or remove stochastic_rounding."
      )
    if self.param_dtype is not None or self.stochastic_rounding:
      dtype = self.param_dtype or 'bfloat16'
      how = 'to nearest'
      if self.stochastic_rounding:
        how = 'stochastically'
      self.scales.log_once(f'Parameters are {dtype}, rounded {how} in updates.')
    return params


def _first_match(rules: ScaleRules, path: str) -> tuple[str, float] | None:
  return next((rule for rule in rules if re.search(rule[0], path)), None)
