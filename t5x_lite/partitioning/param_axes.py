"""Logical axes of parameters that replace those of the network."""

from collections.abc import Mapping, Sequence
import logging
import re
from typing import Any

from flax.linen import partitioning as flax_partitioning

from t5x_lite import tree_utils
from t5x_lite.errors import ConfigError


def override_params_axes_names(
  model_variables: Mapping[str, Any],
  params_axes_names_override: Sequence[tuple[str, tuple[str, ...]]] = (),
) -> dict[str, Any]:
  """Return variables of a model with other logical axes of parameters, for `get_initial_variables` of custom models.

  Args:
    model_variables: result of `module.init`, with the collection `params_axes`.
    params_axes_names_override: pairs (regular expression for the entire '/'-joined name of a parameter, logical name of
      each dim); the first that matches a parameter applies. A pair that applies to none is logged.

  Raises:
    ConfigError: no collection `params_axes`, or the number of names is not that of the dims.
  """
  if 'params_axes' not in model_variables:
    raise ConfigError(
      f'The variables must contain the collection params_axes, got {sorted(model_variables)}. Declare '
      'axes in the network, see flax.linen.partitioning.param_with_axes.'
    )
  axes = tree_utils.flatten_dict(tree_utils.to_dict(model_variables['params_axes']))
  used = set()
  for name, param in tree_utils.named_leaves(model_variables['params']):
    found = next((pair for pair in params_axes_names_override if re.fullmatch(pair[0], name)), None)
    if found is None:
      continue
    pattern, names = found
    used.add(pattern)
    if len(names) != param.ndim:
      raise ConfigError(
        f'`params_axes_names_override` of {name} must have {param.ndim} names, one for each dim of '
        f'{param.shape}, got {tuple(names)!r}.'
      )
    axes[f'{name}_axes'] = flax_partitioning.AxisMetadata(names=tuple(names))
  if unused := [pattern for pattern, _ in params_axes_names_override if pattern not in used]:
    logging.getLogger(__name__).warning(
      'params_axes_names_override: no parameter uses the names of %s.', str(unused).strip('[]')
    )
  return {**model_variables, 'params_axes': tree_utils.unflatten_dict(axes)}
