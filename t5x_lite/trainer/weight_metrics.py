"""Statistics of every parameter, its gradient and its update, as metrics of a training step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import layer_stacks
from t5x_lite import metrics as metrics_lib
from t5x_lite import reductions
from t5x_lite import tree_utils
from t5x_lite.layer_stacks import LayerStacks
from t5x_lite.types import Array, PyTree

Metrics = dict[str, metrics_lib.AveragePerStep]


class WeightMetricsComputer:
  """Metrics of every parameter, its gradient and its update, which the trainer logs if it gets one of these.

  The trainer computes them only in the last step before it writes metrics. (T5X computes them in every step and writes
  their averages.) Names are those of T5X: `weight_rms/<parameter>`, `weight_gradient_rms/<parameter>`,
  `weight_gradient_norm` (of the entire tree), `weight_update_rms/<parameter>`,
  `weight_update_divided_by_weight_rms/<parameter>` and `weight_max/<parameter>`. Each costs a reduction over the
  parameter, without gathering it.
  """

  def compute_metrics(
    self, gradients: PyTree, old_train_state: Any, new_train_state: Any
  ) -> Metrics:
    """Return the statistics of one update, computed in float32, as metrics that need no duration.

    Args:
      gradients: tree of the parameters' structure.
      old_train_state: state before the update.
      new_train_state: state after the update.

    Returns:
      Metric name to `AveragePerStep`. For trees in the form of `layer_stacks`, one metric has the values of all layers
      in its `total`, float32 [layers], and `summaries` writes them by layer.
    """
    old = _float32(old_train_state.params)
    new = _float32(new_train_state.params)
    gradients = _float32(gradients)
    updates = jax.tree.map(jnp.subtract, new, old)

    relative = jax.tree.map(_relative_update, updates, old)
    gradient_means, num_squares = _mean_squares(gradients)
    values = {
      **_rms('weight_rms', new, _mean_squares(new)[0]),
      **_rms('weight_gradient_rms', gradients, gradient_means),
      # From the means: XLA would compute a second sum of each parameter's squares by itself, and store the squares.
      'weight_gradient_norm': jnp.sqrt(jnp.sum(gradient_means * num_squares)),
      **_rms('weight_update_rms', updates, _mean_squares(updates)[0]),
      **_rms('weight_update_divided_by_weight_rms', relative, _mean_squares(relative)[0]),
    }
    for path, w in tree_utils.named_leaves(new):
      dims = _parameter_dims(path, w)
      values[f'weight_max/{path}'] = reductions.largest_magnitude(w, axis=dims)
    metrics = {}
    for name, value in values.items():
      metrics[name] = metrics_lib.AveragePerStep(total=value, steps=1)
    return metrics


def unstacking(computer: WeightMetricsComputer, stacks: LayerStacks) -> WeightMetricsComputer:
  """Return a computer of the same metrics for trees in the form of `layer_stacks`."""
  # A subclass may read single layers.
  if type(computer) is WeightMetricsComputer:
    return computer
  return _UnstackingComputer(computer, stacks)


class _UnstackingComputer(WeightMetricsComputer):
  """A computer that gets trees with a subtree per layer."""

  def __init__(self, computer: WeightMetricsComputer, stacks: LayerStacks):
    """Store the computer and what is stacked."""
    self._computer = computer
    self._stacks = stacks

  def compute_metrics(
    self, gradients: PyTree, old_train_state: Any, new_train_state: Any
  ) -> Metrics:
    """See base class."""
    return self._computer.compute_metrics(
      self._stacks.unstack(gradients),
      old_train_state.unstack_layers(self._stacks),
      new_train_state.unstack_layers(self._stacks),
    )


def _relative_update(u: Array, w: Array) -> Array:
  # Elements whose weight is zero (initial biases) have the relative update zero; T5X divides by zero.
  is_zero = w == 0
  return jnp.where(is_zero, 0, u / jnp.where(is_zero, 1, w))


def _float32(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree_utils.to_dict(tree))


def _parameter_dims(path: str, x: Array) -> tuple[int, ...]:
  """Return the dims of a parameter, without that over stacked layers."""
  return tuple(range(layer_stacks.is_stacked(path), x.ndim))


def _mean_squares(tree: PyTree) -> tuple[Array, np.ndarray]:
  """Return (means of the squares of each parameter or layer, float32 [n]; numbers of squares, float32 [n])."""
  sums = []
  num_squares = []
  for path, x in tree_utils.named_leaves(tree):
    # [] or [layers]: sum of squares of each parameter.
    total = jnp.sum(jnp.square(x), axis=_parameter_dims(path, x))
    sums.append(total.ravel())
    num_squares += [x.size // total.size] * total.size
  # Means of one array, instead of kernels for each parameter.
  counts = np.asarray(num_squares, np.float32)
  return jnp.concatenate(sums) / counts, counts


def _rms(name: str, tree: PyTree, means: Array) -> dict[str, Array]:
  """Return the root mean squares of parameters by the names of metrics, [] or [layers].

  Args:
    name: prefix of the names of metrics.
    tree: the parameters.
    means: first result of `_mean_squares` for them.
  """
  names = []
  shapes = []
  for path, x in tree_utils.named_leaves(tree):
    names.append(f'{name}/{path}')
    shapes.append(x.shape[: layer_stacks.is_stacked(path)])
  bounds = np.cumsum([math.prod(shape) for shape in shapes])
  roots = jnp.split(jnp.sqrt(means), bounds[:-1])
  found = {}
  for metric, root, shape in zip(names, roots, shapes, strict=True):
    found[metric] = root.reshape(shape)
  return found
