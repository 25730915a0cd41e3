"""Floating-point operations that a training step needs by the definition of its model, for MFU.

Model FLOPs are those of matrix products (and convolutions), 2 for each multiplication with addition, forward and
backward. The convention is that of PaLM, https://arxiv.org/abs/2204.02311, appendix B: all scores of an attention
count, also those that a mask removes, a look-up of embeddings is free, and the recomputation of rematerialization does
not count (with it the share of the peak would be HFU). Positions of padding count, since they are computed.

They are counted in the program of the loss, traced for shapes alone. The backward pass has one more product of the same
size for each operand that depends on trained parameters: two for a layer in the middle of the network, one for a frozen
layer above a trained one or for the kernel of the first layer, none below all trained parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from t5x_lite import layers
from t5x_lite import tree_utils
from t5x_lite.partitioning import nan_search

# Operations that keep the ones of a mask apart, so that their result selects rows like the mask.
_KEEP_SELECTION = (
  'broadcast_in_dim',
  'convert_element_type',
  'copy',
  'reshape',
  'squeeze',
  'transpose',
)
# Operations that may have products which no program shows.
_OPAQUE = ('dot_product_attention_fwd_wrapper', 'ffi_call', 'pallas_call')


class UncountableError(Exception):
  """The program has products whose number or size is unknown before it runs."""


@dataclasses.dataclass(frozen=True)
class ModelFlops:
  """Model FLOPs of a training step on all devices.

  Attributes:
    by_dtype: dtype of the operands to FLOPs; 'float32_highest' for float32 that no hardware may round to fewer bits.
  """

  by_dtype: Mapping[str, int]

  @property
  def total(self) -> int:
    """FLOPs in all dtypes."""
    return sum(self.by_dtype.values())

  @property
  def dtype(self) -> str:
    """The dtype of most FLOPs, whose peak rate is that of the step."""
    return max(self.by_dtype, key=lambda dtype: self.by_dtype[dtype])


class _Value(NamedTuple):
  """What is known of an array in the forward pass.

  Attributes:
    is_trained: True if it depends on a trained parameter by a chain of derivatives.
    selects: True if it has zeros and ones that come from a comparison, such as a one-hot array.
  """

  is_trained: bool = False
  selects: bool = False


def count_step(loss_fn: Callable[..., Any], params: Any, *arguments: Any) -> ModelFlops:
  """Return the model FLOPs of a loss and its gradients with respect to float parameters.

  Args:
    loss_fn: function of parameters and other arguments to a scalar; `stop_gradient` of a parameter freezes it. It is
      traced on the default device, without a mesh.
    params: tree of arrays or shapes.
    *arguments: further trees of arrays or shapes, which have no gradients.

  Raises:
    UncountableError: a loop without a known number of iterations, a kernel or a call of a library has products.
  """
  # A function of its own, since JAX caches traces by the function, and this one is not that of the run.
  with layers.counted_products():
    program = jax.make_jaxpr(lambda *args: loss_fn(*args))(*tree_utils.shapes((params, *arguments)))
  num_params = len(jax.tree.leaves(params))
  inputs = [_Value(is_trained=i < num_params) for i in range(len(program.jaxpr.invars))]
  counts: dict[str, int] = {}
  _count(program, inputs, [True], counts)
  return ModelFlops(counts)


def _count(
  program: core.ClosedJaxpr,
  inputs: Sequence[_Value],
  results: Sequence[bool | None],
  counts: dict[str, int],
) -> list[_Value]:
  """Add the FLOPs of a program to `counts`.

  Args:
    program: the program.
    inputs: what is known of its arguments.
    results: for each result True if the loss has a derivative with respect to it, False if the loss depends on it
      without one, None if the loss does not depend on it; products for such results are not computed.
    counts: dtype to FLOPs.

  Returns:
    What is known of the results.
  """
  jaxpr = program.jaxpr
  uses = _uses(jaxpr, results)
  values = dict.fromkeys(jaxpr.constvars, _Value())
  values.update(zip(jaxpr.invars, inputs, strict=True))

  def value_of(atom: Any) -> _Value:
    if isinstance(atom, core.Literal):
      return _Value()
    return values[atom]

  for eqn in jaxpr.eqns:
    operands = [value_of(atom) for atom in eqn.invars]
    eqn_results = [uses.get(var) for var in eqn.outvars]
    if all(use is None for use in eqn_results):
      outputs = [_Value()] * len(eqn.outvars)
    else:
      outputs = _count_eqn(eqn, operands, eqn_results, counts)
    values.update(zip(eqn.outvars, outputs, strict=True))
  return [value_of(atom) for atom in jaxpr.outvars]


def _uses(jaxpr: Any, results: Sequence[bool | None]) -> dict[Any, bool]:
  """Return, for each variable on which the loss depends, whether it does so by a chain of derivatives."""
  uses: dict[Any, bool] = {}

  def use(atom: Any, is_differentiated: bool) -> None:
    if not isinstance(atom, core.Literal):
      is_differentiated = is_differentiated and _is_float(atom)
      uses[atom] = uses.get(atom, False) or is_differentiated

  for atom, is_differentiated in zip(jaxpr.outvars, results, strict=True):
    if is_differentiated is not None:
      use(atom, is_differentiated)
  for eqn in reversed(jaxpr.eqns):
    of_results = [uses[var] for var in eqn.outvars if var in uses]
    if of_results or eqn.effects:
      passes = any(of_results) and eqn.primitive.name != 'stop_gradient'
      for atom in eqn.invars:
        use(atom, passes)
  return uses


def _is_float(atom: Any) -> bool:
  return jnp.issubdtype(getattr(atom.aval, 'dtype', jnp.int32), jnp.inexact)


def _count_eqn(
  eqn: Any, operands: list[_Value], results: list[bool | None], counts: dict[str, int]
) -> list[_Value]:
  """Add the FLOPs of an operation to `counts`; see `_count`."""
  name = eqn.primitive.name
  if (flops := _PRODUCTS.get(name)) is not None:
    if not any(operand.selects for operand in operands):
      num_products = 1
      if any(results):
        num_products += sum(operand.is_trained for operand in operands)
      dtype = _operand_dtype(eqn)
      counts[dtype] = counts.get(dtype, 0) + num_products * flops(eqn)
  elif (called := nan_search.called_program(eqn)) is not None:
    return _count(called, operands, results, counts)
  elif (sizes := nan_search.scan_sizes(eqn)) is not None:
    return _count_scan(eqn, sizes, operands, results, counts)
  elif name == 'cond':
    return _count_branches(eqn, operands, results, counts)
  else:
    _check_has_no_products(eqn)
  passes = name != 'stop_gradient' and any(operand.is_trained for operand in operands)
  selects = name in _KEEP_SELECTION and operands[0].selects
  if name == 'convert_element_type':
    selects = selects or eqn.invars[0].aval.dtype == jnp.bool_
  return [_Value(passes and _is_float(var), selects) for var in eqn.outvars]


def _count_scan(
  eqn: Any,
  sizes: tuple[int, int],
  operands: list[_Value],
  results: list[bool | None],
  counts: dict[str, int],
) -> list[_Value]:
  """Add the FLOPs of all iterations of a `lax.scan`; see `_count`."""
  num_consts, num_carry = sizes
  program = eqn.params['jaxpr']
  operands = list(operands)
  # An iteration reads what another one writes, so all of them are like the one with most derivatives.
  is_differentiated = any(results)
  body_results = [is_differentiated] * num_carry + results[num_carry:]
  while True:
    body_counts: dict[str, int] = {}
    outputs = _count(program, operands, body_results, body_counts)
    carried = slice(num_consts, num_consts + num_carry)
    after = [
      _Value(old.is_trained or new.is_trained, old.selects and new.selects)
      for old, new in zip(operands[carried], outputs, strict=False)
    ]
    if after == operands[carried]:
      break
    operands[carried] = after
  for dtype, flops in body_counts.items():
    counts[dtype] = counts.get(dtype, 0) + eqn.params['length'] * flops
  return outputs


def _count_branches(
  eqn: Any, operands: list[_Value], results: list[bool | None], counts: dict[str, int]
) -> list[_Value]:
  """Add the FLOPs of the branch of a `lax.cond` that has most; see `_count`."""
  largest: dict[str, int] = {}
  found = []
  for branch in eqn.params['branches']:
    of_branch: dict[str, int] = {}
    found.append(_count(branch, operands[1:], results, of_branch))
    if sum(of_branch.values()) > sum(largest.values()):
      largest = of_branch
  for dtype, flops in largest.items():
    counts[dtype] = counts.get(dtype, 0) + flops
  return [_Value(any(each.is_trained for each in outputs)) for outputs in zip(*found, strict=True)]


def _check_has_no_products(eqn: Any) -> None:
  """Raise UncountableError if an operation has products in a program that it runs in an unknown way."""
  name = eqn.primitive.name
  counts: dict[str, int] = {}
  for program in _programs(eqn.params):
    inputs = [_Value()] * len(program.jaxpr.invars)
    _count(program, inputs, [False] * len(program.jaxpr.outvars), counts)
  if counts or name in _OPAQUE:
    raise UncountableError(f'{name!r} has products of unknown number or size')


def _programs(params: Mapping[str, Any]) -> Iterator[core.ClosedJaxpr]:
  """Yield the programs among the parameters of an operation."""
  for value in params.values():
    if isinstance(value, core.ClosedJaxpr):
      yield value
    elif isinstance(value, core.Jaxpr) and not value.constvars:
      yield core.ClosedJaxpr(value, ())


def _operand_dtype(eqn: Any) -> str:
  """Return the dtype of a product; see `ModelFlops`."""
  dtype = jnp.result_type(*(atom.aval.dtype for atom in eqn.invars[:2])).name
  precision = eqn.params.get('precision')
  is_default = precision in (None, (None, None)) or set(precision) == {jax.lax.Precision.DEFAULT}
  if dtype == 'float32' and not is_default:
    return 'float32_highest'
  return dtype


def _dot_flops(eqn: Any) -> int:
  (contracted, _), _ = eqn.params['dimension_numbers']
  lhs = eqn.invars[0].aval.shape
  return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[i] for i in contracted)


def _conv_flops(eqn: Any) -> int:
  kernel = eqn.invars[1].aval.shape
  num_outputs = kernel[eqn.params['dimension_numbers'].rhs_spec[0]]
  return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // num_outputs


def _ragged_flops(eqn: Any) -> int:
  """Return the FLOPs of rows of which each belongs to one group."""
  numbers = eqn.params['ragged_dot_dimension_numbers']
  (contracted, _), _ = numbers.dot_dimension_numbers
  if set(numbers.lhs_ragged_dimensions) & set(contracted):
    raise UncountableError("'ragged_dot_general' has products of unknown size")
  lhs = eqn.invars[0].aval.shape
  return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[i] for i in contracted)


_PRODUCTS: Mapping[str, Callable[[Any], int]] = {
  'dot_general': _dot_flops,
  'conv_general_dilated': _conv_flops,
  'ragged_dot_general': _ragged_flops,
}
