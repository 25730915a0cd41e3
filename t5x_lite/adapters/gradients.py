"""Metric that counts adapters that get no gradient, such as those of experts without tokens."""

from collections.abc import Mapping
from typing import Any

import clu.metrics
from flax import struct
import jax.numpy as jnp

from t5x_lite import layer_stacks
from t5x_lite import tree_utils
from t5x_lite.layer_stacks import BATCH_AXES
from t5x_lite.layers.low_rank import LORA_A
from t5x_lite.layers.low_rank import LORA_B
from t5x_lite.types import Array, ArrayLike, PyTree

# Name of the metric.
WITHOUT_GRADIENT = 'adapter/without_gradient'
# Number of steps without a gradient after which an adapter counts.
_NUM_STEPS = 100


@struct.dataclass
class WithoutGradient(clu.metrics.Metric):
  """Number of adapters without a gradient in the last 100 of the merged steps.

  Attributes:
    steps_since: int32 [adapters], number of steps since the last gradient of each; all steps if it had none.
    num_steps: int32 [], number of steps.
  """

  steps_since: Array
  num_steps: Array

  def merge(self, other: 'WithoutGradient') -> 'WithoutGradient':
    """Return the metric of the steps of this metric, then those of `other`."""
    has_none = other.steps_since >= other.num_steps
    since = jnp.where(has_none, self.steps_since + other.steps_since, other.steps_since)
    return WithoutGradient(steps_since=since, num_steps=self.num_steps + other.num_steps)

  def compute(self) -> ArrayLike:
    """Return the number of adapters, int32."""
    limit = jnp.minimum(self.num_steps, _NUM_STEPS)
    return jnp.sum(self.steps_since >= limit, dtype=jnp.int32)


def metrics_of_gradients(grads: PyTree, params_axes: Mapping[str, Any]) -> dict[str, Any]:
  """Return the metric of a step by name.

  Args:
    grads: gradients, nested dicts like the parameters; equal layers may be stacked.
    params_axes: axes metadata of the parameters, in which they are not.
  """
  flat = tree_utils.flatten_dict(tree_utils.to_dict(grads))
  metadata = tree_utils.flatten_dict(tree_utils.to_dict(params_axes))
  has_gradient = []
  for path, grad_a in flat.items():
    parent, _, name = path.rpartition('/')
    if name != LORA_A:
      continue
    single = layer_stacks.paths_of(parent)[0]
    # [adapters of this kernel]: B of a new adapter is zero, so that A has no gradient in the first step.
    found = [
      _any_by_adapter(grad, metadata[f'{single}/{leaf}_axes'].names)
      for leaf, grad in ((LORA_A, grad_a), (LORA_B, flat[f'{parent}/{LORA_B}']))
    ]
    has_gradient.append(found[0] | found[1])
  steps_since = jnp.where(jnp.concatenate(has_gradient), 0, 1).astype(jnp.int32)
  metric = WithoutGradient(steps_since=steps_since, num_steps=jnp.ones([], jnp.int32))
  return {WITHOUT_GRADIENT: metric}


def _any_by_adapter(grad: Array, axes: tuple[str | None, ...]) -> Array:
  """Return bool [adapters], whether the array of each kernel has a number other than 0."""
  num_stacked = grad.ndim - len(axes)
  dims = [num_stacked + dim for dim, name in enumerate(axes) if name not in BATCH_AXES]
  return jnp.any(grad != 0, axis=dims).reshape(-1)
