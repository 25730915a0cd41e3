"""Options of updates that every optimizer has: scales by parameter, dtype and rounding of the parameters."""

from collections.abc import Iterable
import re

from t5x_lite import checks
from t5x_lite.optimizers.base.definition import OptimizerDef
from t5x_lite.optimizers.base.param_scales import OWNER
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.base.param_scales import ScaleRules
from t5x_lite.optimizers.base.param_scales import UpdateOptions

_SCALE = checks.number(at_least=0)
_RULES = checks.Expectation(
  'a list of pairs (regular expression, number >= 0)',
  lambda rules: (
    isinstance(rules, (list, tuple))
    and all(
      isinstance(rule, (list, tuple))
      and len(rule) == 2
      and isinstance(rule[0], str)
      and _SCALE.holds(rule[1])
      for rule in rules
    )
  ),
  "Write [('embedding$', 0.1), ('scale$', 0.0)].",
)


@checks.checks_arguments(OWNER)
def with_update_options(
  optimizer: OptimizerDef,
  *,
  learning_rate_scales: Iterable[tuple[str, float]] = (),
  weight_decay_scales: Iterable[tuple[str, float]] = (),
  param_dtype: str | None = None,
  stochastic_rounding: bool = False,
) -> OptimizerDef:
  """Return an optimizer with options that all optimizers of the package have; its state and checkpoints are the same.

  Args:
    optimizer: the optimizer, an `OptimizerDef`.
    learning_rate_scales: ordered pairs (regular expression, factor). The learning rate of a parameter is multiplied by
      the factor of the first expression that is found in its path, such as 'encoder/layers_0/mlp/wi/kernel', or by 1
      without a match. If an optimizer estimates its rate, it does so for all parameters together, and the factor
      multiplies the steps of the parameter.
    weight_decay_scales: the same for the weight decay. Where the learning rate multiplies the weight decay, as in
      AdamW, both factors apply.
    param_dtype: 'bfloat16' stores the parameters in bfloat16, without a float32 copy; None keeps the model's dtype.
      Updates are computed in float32 and rounded to nearest when they are stored, unless `stochastic_rounding` is True.
    stochastic_rounding: round bfloat16 parameters up or down at random, such that the mean is exact. Otherwise updates
      that are small compared to a parameter have no effect. The random numbers depend on the run's seed and the step,
      and not on the mesh.

  Raises:
    ConfigError: an invalid or ineffective option, for instance weight-decay scales for an optimizer without weight
      decay, or learning-rate scales for one whose learning rate is not that of single parameters.

  >>> import jax.numpy as jnp
  >>> from t5x_lite import optimizers
  >>> optimizer_def = with_update_options(optimizers.sgd(0.5), learning_rate_scales=[('bias$', 0.5)])
  >>> params = {'kernel': jnp.ones([]), 'bias': jnp.ones([])}
  >>> updated = optimizer_def.create(params).apply_gradient(params)
  >>> float(updated.target['kernel']), float(updated.target['bias'])
  (0.5, 0.75)
  """
  checks.check(
    OWNER,
    locals(),
    optimizer=checks.instance(
      OptimizerDef,
      'an optimizer such as optimizers.adamw()',
      'Call the function first, or wrap an optax transformation in OptaxWrapper.',
    ),
    learning_rate_scales=_RULES,
    weight_decay_scales=_RULES,
    param_dtype=checks.one_of(('bfloat16',)).or_none(),
    stochastic_rounding=checks.instance(bool, 'True or False'),
  )
  scales = ParamScales(
    learning_rates=_as_rules('learning_rate_scales', learning_rate_scales),
    weight_decays=_as_rules('weight_decay_scales', weight_decay_scales),
  )
  return optimizer.with_update_options(
    UpdateOptions(scales=scales, param_dtype=param_dtype, stochastic_rounding=stochastic_rounding)
  )


def _as_rules(option: str, pairs: Iterable[tuple[str, float]]) -> ScaleRules:
  rules = []
  for pattern, scale in pairs:
    try:
      re.compile(pattern)
    except re.error as error:
      raise checks.invalid(
        OWNER, option, f'regular expressions with factors ({error})', pattern
      ) from error
    rules.append((pattern, float(scale)))
  return tuple(rules)
