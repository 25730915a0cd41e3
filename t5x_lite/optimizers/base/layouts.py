"""Optimizers whose updates depend on the layout of the parameters, and the warning about them.

All others update a layer and an expert alike in each layout, see `axes.units`.
"""

from collections.abc import Callable, Mapping
import functools
import logging

from t5x_lite import tree_utils
from t5x_lite.optimizers.axes.units import Units
from t5x_lite.optimizers.axes.units import UnitsByPath
from t5x_lite.types import LogicalAxes, Params

# Name of an optimizer to the reason.
LAYOUT_DEPENDENT: Mapping[str, str] = {
  'Adafactor': "T5X's rules factor matrices without layers or experts only if both dims reach min_dim_size_to_factor",
  'distributed_shampoo': 'with spread_roots, the step in which a root is computed depends on the order of the arrays',
  'dpsgd': 'its random noise depends on the number and the shapes of the arrays',
  'noisy_sgd': 'its random noise depends on the number and the shapes of the arrays',
  'soap': 'with spread_refreshes, the step in which a basis is refreshed depends on the order of the arrays',
  'sophia': 'its random estimate of the curvature depends on the number and the shapes of the arrays',
}


def warn(
  name: str,
  param_logical_axes: LogicalAxes,
  params: Params,
  is_dependent: Callable[[str, Units], bool],
) -> None:
  """Log a warning, once per process, if an optimizer of the table updates parameters otherwise than single arrays.

  Args:
    name: name of the optimizer.
    param_logical_axes: `PartitionSpec` of logical names for each parameter.
    params: the parameters, or their shapes.
    is_dependent: function from (path, units) of a parameter to True if the update is another one.
  """
  by_path = UnitsByPath(param_logical_axes)
  paths = [
    path
    for path, param in tree_utils.named_leaves(params)
    if is_dependent(path, by_path.of(path, param))
  ]
  if paths:
    _warn_once(
      f'{name} updates {len(paths)} parameter(s), such as {paths[0]}, otherwise than it updates the arrays of single '
      f'layers and experts: {LAYOUT_DEPENDENT[name]}.'
    )


@functools.cache
def _warn_once(text: str) -> None:
  # Several parts of a program make the definition for the axes.
  logging.getLogger(__name__).warning('%s', text)
