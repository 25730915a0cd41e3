"""State of SOAP, its initial value, the forms in which it is stored, and its logical axes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.optimizers.axes.rules import OptaxStatePartitionRules
from t5x_lite.optimizers.base.state_hooks import register_schedule_count
from t5x_lite.optimizers.shampoo.blocks import BlockLayout
from t5x_lite.optimizers.shampoo.config import ROWS_AXIS
from t5x_lite.optimizers.shampoo.config import STACK_AXIS
from t5x_lite.optimizers.shampoo.quantize import QuantizedValue
from t5x_lite.optimizers.shampoo.state import axes_of_quantized
from t5x_lite.optimizers.soap_rule import triangle
from t5x_lite.optimizers.soap_rule.config import SoapConfig
from t5x_lite.types import Array, LogicalAxes, PyTree


class SoapParameterState(NamedTuple):
  """State of one parameter.

  Attributes:
    momentum: mean of the gradients, in the basis of the parameter and shaped like it; None with b1 = 0.
    second_moment: mean of the squared gradients in the bases, shaped like the parameter.
    statistics: means of G G^T along the rotated dims of the blocks, one stack float32 [K, n, n] per group of equal
      blocks and dim; packed (`triangle`), or `QuantizedValue`s, by the options.
    bases: stacks [K, n, n] of the same matrices, whose columns are the vectors of a basis; float32 or quantized.
  """

  momentum: QuantizedValue | None
  second_moment: Array
  statistics: tuple[Any, ...]
  bases: tuple[Any, ...]


class SoapState(NamedTuple):
  """State of SOAP.

  Attributes:
    count: int32 scalar, number of updates made.
    params: tree like the parameters with a `SoapParameterState` for each.
  """

  count: Array
  params: PyTree


def init_parameter(layout: BlockLayout, cfg: SoapConfig) -> SoapParameterState:
  """Return the initial state of a parameter with these blocks: zeros, and identities as bases."""
  momentum = None
  if cfg.b1:
    momentum = momentum_to_state(jnp.zeros(layout.shape, jnp.float32), cfg)
  statistics = []
  bases = []
  for count, size in layout.stack_shapes:
    zero = jnp.zeros([1, size, size], jnp.float32)
    if cfg.symmetric_storage:
      zero = triangle.pack(zero)
    else:
      zero = matrices_to_state(zero, cfg)
    identity = matrices_to_state(jnp.eye(size, dtype=jnp.float32)[None], cfg)
    statistics.append(_repeated(zero, count))
    bases.append(_repeated(identity, count))
  second_moment = jnp.zeros(layout.shape, cfg.second_moment_dtype)
  return SoapParameterState(momentum, second_moment, tuple(statistics), tuple(bases))


def _repeated(stack: Any, count: int) -> Any:
  """Return [count, ...], given [1, ...]: compilers would slowly fold the constants of all matrices."""
  return jax.tree.map(lambda array: jnp.broadcast_to(array[0], [count, *array.shape[1:]]), stack)


def momentum_to_state(momentum: Array, cfg: SoapConfig) -> QuantizedValue:
  """Return float32 momentum in the form of the state."""
  return QuantizedValue.from_float(momentum, cfg.momentum_dtype)


def matrices_to_state(stack: Array, cfg: SoapConfig) -> Any:
  """Return matrices float32 [K, n, n] in the form of the state, except for packed statistics."""
  if cfg.matrix_dtype == 'float32':
    return stack
  return jax.vmap(lambda matrix: QuantizedValue.from_float(matrix, jnp.int16, True))(stack)


def to_float(stack: Any) -> Array:
  """Return matrices of the state, if these are not packed, as float32 [K, n, n]."""
  if isinstance(stack, QuantizedValue):
    return jax.vmap(lambda value: value.to_float())(stack)
  return stack


def symmetric_statistics(stack: Any, cfg: SoapConfig) -> Array:
  """Return statistics of the state as float32 [K, n, n], exactly symmetric whether they are packed or not."""
  if cfg.symmetric_storage:
    return triangle.unpack(stack)
  return triangle.symmetric(to_float(stack))


def derive_axes(state: SoapState, params_axes: LogicalAxes) -> SoapState:
  """Return a `SoapState` with a `PartitionSpec` for each array.

  Arrays shaped like a parameter have its axes; the first dims of stacks of matrices are 'optimizer_stack' and
  'optimizer_rows'.

  Args:
    state: arrays or `jax.ShapeDtypeStruct`s.
    params_axes: `PartitionSpec` for each parameter.
  """

  def of_stack(array: Any) -> PartitionSpec:
    return PartitionSpec(STACK_AXIS, ROWS_AXIS, *(None,) * (np.ndim(array) - 2))

  def of_parameter(own: Any, axes: PartitionSpec) -> Any:
    if isinstance(own, optax.MaskedNode):
      return own
    return own._replace(
      momentum=axes_of_quantized(own.momentum, axes),
      second_moment=axes,
      statistics=jax.tree.map(of_stack, own.statistics),
      bases=jax.tree.map(of_stack, own.bases),
    )

  axes = jax.tree.map(of_parameter, state.params, params_axes, is_leaf=_is_parameter_state)
  return state._replace(count=PartitionSpec(), params=axes)


def _is_parameter_state(node: Any) -> bool:
  return isinstance(node, (SoapParameterState, optax.MaskedNode))


OptaxStatePartitionRules.register(SoapState, derive_axes)
register_schedule_count(SoapState, lambda state: state.count)
