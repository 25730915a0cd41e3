"""Optax transformations whose learning rate and weight decay differ by parameter, with the state of one of them.

Optax takes numbers that are the same for all parameters. Hence an update is computed for each pair of factors that
occurs, and each parameter takes its result of one of them. Compiled, this costs nothing: the compiler joins equal
computations and removes those whose results are not taken.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.base.param_scales import OWNER
from t5x_lite.optimizers.base.param_scales import ParamScales
from t5x_lite.optimizers.optax_adapter.per_unit import param_path
from t5x_lite.types import PyTree, PyTreeDef

# Names of the options that are weight decays of single parameters.
WEIGHT_DECAYS = ('weight_decay', 'weight_decay_rate', 'adam_weight_decay')
# States of transformations whose updates lead to a computed point: a part of the way is not a lower learning rate.
_STATES_OF_POINTS = (
  optax.contrib.COCOBState,
  optax.contrib.MadgradState,
  optax.contrib.MechanicState,
  optax.contrib.SAMState,
  optax.contrib.ScheduleFreeState,
)

# Function from (factor of the learning rate, factor of the weight decay) to a transformation.
VariantFn = Callable[[float, float], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
  """Scaling of a constructor's learning rate and weight decay by parameter.

  Attributes:
    inner: name of the argument, an optimizer, that is scaled instead, or ''.
    path_fn: see `ParamScales.path_fn`, for `inner`.
    rate_options: options that are multiplied by the factor of the learning rate; () if updates are multiplied, which is
      the same if they are proportional to the learning rate and the state does not depend on it.
    state_fn: function from (state, factor of the learning rate, arguments of the constructor) to the state with which
      an update at this factor is computed; None for the same state.
    rate_reason: why the learning rate cannot be scaled by parameter; '' if it can.
    decay_reason: the same for the weight decay.
    decay_by_path: True if the constructor also takes a `DecayByPath` as weight decay.
  """

  inner: str = ''
  path_fn: Callable[[str], str] | None = None
  rate_options: tuple[str, ...] = ()
  state_fn: Callable[[Any, float, Mapping[str, Any]], Any] | None = None
  rate_reason: str = ''
  decay_reason: str = ''
  decay_by_path: bool = False

  def check(self, name: str, scales: ParamScales) -> None:
    """Raise if the optimizer `name` does not support the scales."""
    for option, rules, reason in (
      ('learning_rate_scales', scales.learning_rates, self.rate_reason),
      ('weight_decay_scales', scales.weight_decays, self.decay_reason),
    ):
      if rules and reason:
        raise ConfigError(
          f'`{OWNER}.{option}` cannot be used with {name}: {reason}. Remove the scales, or choose '
          'another optimizer.'
        )

  def apply(
    self, arguments: Mapping[str, Any], rate_scale: float, decay_scale: float
  ) -> dict[str, Any]:
    """Return the arguments of a constructor with multiplied learning rates and weight decays.

    Args:
      arguments: arguments by name, defaults included.
      rate_scale: factor of the learning rates.
      decay_scale: factor of the weight decays.
    """
    factors = {
      **dict.fromkeys(self.rate_options, rate_scale),
      **dict.fromkeys(WEIGHT_DECAYS, decay_scale),
    }
    return {name: _times(value, factors.get(name, 1.0)) for name, value in arguments.items()}


class ScaleSupport(NamedTuple):
  """Support of scales by parameter of an optimizer.

  Attributes:
    scale_fn: function from `ParamScales` to the optimizer with them.
    has_weight_decay: True if the optimizer has a weight decay that it scales.
  """

  scale_fn: Callable[[ParamScales], Any]
  has_weight_decay: bool


@dataclasses.dataclass(frozen=True)
class DecayByPath:
  """Weight decay by parameter, for constructors that know the paths.

  Attributes:
    weight_decay: weight decay at the factor 1.
    scales: factors by parameter.
  """

  weight_decay: float
  scales: ParamScales

  def of(self, path: str) -> float:
    """Return the weight decay at a '/'-joined path of a parameter, or of an array of `units_as_layers`."""
    return self.weight_decay * self.scales.of(param_path(path))[1]


def has_weight_decay(arguments: Mapping[str, Any]) -> bool:
  """Return True if an argument of a constructor, by name and defaults included, is a weight decay other than 0."""
  return any(
    callable(value) or (value is not None and value != 0)
    for value in (arguments.get(name) for name in WEIGHT_DECAYS)
  )


def scale_per_parameter(
  make_variant: VariantFn,
  scales: ParamScales,
  *,
  multiplies_updates: bool = True,
  state_fn: Callable[[Any, float], Any] | None = None,
) -> optax.GradientTransformation:
  """Return the transformation that updates each parameter as the variant with the parameter's factors does.

  Values of the entire tree, such as norms and estimated learning rates, are those of the variant with the factors 1.

  Args:
    make_variant: the variants; their states have the same structure.
    scales: factors by parameter.
    multiplies_updates: multiply updates by the factor of the learning rate, and call `make_variant` with 1 instead.
    state_fn: see `Scaling.state_fn`, without the arguments.
  """
  base = make_variant(1.0, 1.0)
  takes_extra_args = isinstance(base, optax.GradientTransformationExtraArgs)

  def init(params: PyTree) -> Any:
    state = base.init(params)
    if multiplies_updates and scales.learning_rates:
      _check_updates_are_steps(state)
    return state

  def update(
    updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, Any]:
    factors = [scales.of(path) for path, _ in tree_utils.named_leaves(updates)]
    keys = factors
    if multiplies_updates:
      keys = [(1.0, decay) for _, decay in factors]
    results = {}
    for rate, decay in [(1.0, 1.0), *keys]:
      if (rate, decay) in results:
        continue
      variant_state = state
      if state_fn is not None and rate != 1.0:
        variant_state = state_fn(state, rate)
      variant = make_variant(rate, decay)
      results[rate, decay] = variant.update(updates, variant_state, params, **extra_args)
    treedef = jax.tree.structure(updates)
    variants = list(results)
    chosen = [variants.index(key) for key in keys]
    new_updates = _choose(treedef, chosen, [updates for updates, _ in results.values()])
    new_state = _choose(treedef, chosen, [state for _, state in results.values()])
    if multiplies_updates:
      leaves = treedef.flatten_up_to(new_updates)
      for i, (rate, _) in enumerate(factors):
        if rate != 1.0:
          leaves[i] = leaves[i] * rate
      new_updates = treedef.unflatten(leaves)
    return new_updates, new_state

  if takes_extra_args:
    return optax.GradientTransformationExtraArgs(init, update)
  return optax.GradientTransformation(
    init, lambda updates, state, params=None: update(updates, state, params)
  )


def decay_weights(decay: Any, mask: Any, scales: ParamScales) -> optax.GradientTransformation:
  """Return `optax.add_decayed_weights` with the factors of the weight decay by parameter, and the same state."""
  return scale_per_parameter(
    lambda _, factor: optax.add_decayed_weights(_times(decay, factor), mask),
    scales,
    multiplies_updates=False,
  )


def scale_by_rate(rate: Any, scales: ParamScales) -> optax.GradientTransformation:
  """Return `optax.scale_by_learning_rate` with the factors of the learning rate by parameter, and the same state."""
  return scale_per_parameter(lambda *_: optax.scale_by_learning_rate(rate), scales)


def _choose(treedef: PyTreeDef, chosen: Sequence[int], nodes: Sequence[PyTree]) -> PyTree:
  """Return a tree like each of `nodes`, whose values for a parameter are those of its chosen node.

  Args:
    treedef: structure of the parameters; every subtree with this structure has values of single parameters.
    chosen: index of a node for each parameter. All other values are those of the first node.
    nodes: trees of the same structure.
  """
  if len(nodes) == 1:
    return nodes[0]
  try:
    columns = [treedef.flatten_up_to(node) for node in nodes]
  except ValueError:  # not a tree like the parameters
    below, structure = zip(
      *(jax.tree.flatten(node, is_leaf=lambda x, node=node: x is not node) for node in nodes),
      strict=False,
    )
    if structure[0] == jax.tree.structure(0):
      return nodes[0]
    return structure[0].unflatten(
      [_choose(treedef, chosen, children) for children in zip(*below, strict=True)]
    )
  return treedef.unflatten([columns[index][i] for i, index in enumerate(chosen)])


def _check_updates_are_steps(state: PyTree) -> None:
  """Raise if updates cannot be multiplied by a factor of the learning rate."""
  found: list[type] = []

  def visit(node: PyTree) -> bool:
    found.extend(kind for kind in _STATES_OF_POINTS if isinstance(node, kind))
    return False

  jax.tree.flatten(state, is_leaf=visit)
  if found:
    raise ConfigError(
      f'`{OWNER}.learning_rate_scales` cannot be used with this optax transformation: the updates of '
      f'the one with {found[0].__name__} are not proportional to the learning rate. Use the optimizer '
      'of its name in t5x_lite.optimizers, for instance optimizers.schedule_free.'
    )


def _times(value: Any, factor: float) -> Any:
  if value is None or factor == 1.0:
    return value
  if callable(value):
    schedule: Callable[[Any], Any] = value
    return lambda step: factor * schedule(step)
  return factor * value
