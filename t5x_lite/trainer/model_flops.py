"""Floating-point operations that a training step needs by the definition of its model, for MFU.

Model FLOPs are those of matrix products (and convolutions), 2 for each multiplication with addition, forward and
backward. The convention is that of PaLM, https://arxiv.org/abs/2204.02311, appendix B: all scores of an attention
count, also those that a mask removes, a look-up of embeddings is free, and the recomputation of rematerialization does
not count (with it the share of the peak would be HFU). Positions of padding count, since they are computed.

They are counted in the program of the loss, traced for shapes alone. The backward pass has one more product of the same
size for each operand that depends on trained parameters: two for a layer in the middle of the network, one for a frozen
layer above a trained one or for the kernel of the first layer, none below all trained parameters.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from t5x_lite import layers
from t5x_lite import tree_utils
from t5x_lite.partitioning import nan_search

# Operations whose result selects rows like their operand.
_RESHAPES = ('convert_element_type', 'reshape', 'squeeze', 'transpose')
# Operations that may have products which no program shows.
_OPAQUE = ('dot_product_attention_fwd_wrapper', 'ffi_call', 'ragged_dot_general')

# For each result True if the loss has a derivative with respect to it, False if the loss depends on it without one, and
# None if the loss does not depend on it.
_Uses = Sequence[bool | None]
# Dtype of the operands to FLOPs.
_Counts = collections.Counter[str]


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
  """Properties of an array of the forward pass.

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
  return ModelFlops(_count(program, inputs, [True])[1])


def _count(
  program: core.ClosedJaxpr, inputs: Sequence[_Value], results: _Uses
) -> tuple[list[_Value], _Counts]:
  """Count the products of a program.

  Args:
    program: the program.
    inputs: properties of its arguments.
    results: how the loss depends on its results; products on which it does not depend are not computed.

  Returns:
    (properties of the results, FLOPs).
  """
  jaxpr = program.jaxpr
  uses = _uses(jaxpr, results)
  counts = _Counts()
  values = dict.fromkeys(jaxpr.constvars, _Value())
  values.update(zip(jaxpr.invars, inputs, strict=True))

  def value_of(atom: Any) -> _Value:
    if isinstance(atom, core.Literal):
      return _Value()
    return values[atom]

  for eqn in jaxpr.eqns:
    outputs = [_Value()] * len(eqn.outvars)
    eqn_results = [uses.get(var) for var in eqn.outvars]
    if any(use is not None for use in eqn_results):
      operands = [value_of(atom) for atom in eqn.invars]
      outputs, of_eqn = _count_eqn(eqn, operands, eqn_results)
      counts.update(of_eqn)
    values.update(zip(eqn.outvars, outputs, strict=True))
  return [value_of(atom) for atom in jaxpr.outvars], counts


def _uses(jaxpr: Any, results: _Uses) -> dict[Any, bool]:
  """Return how the loss depends on the variables on which it does; see `_Uses`."""
  uses: dict[Any, bool] = {}

  def use(atom: Any, is_differentiated: bool) -> None:
    if not isinstance(atom, core.Literal):
      uses[atom] = uses.get(atom, False) or (is_differentiated and _is_float(atom))

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


def _count_eqn(eqn: Any, operands: list[_Value], results: _Uses) -> tuple[list[_Value], _Counts]:
  """Count the products of an operation; see `_count`."""
  name = eqn.primitive.name
  called = nan_search.called_program(eqn)
  sizes = nan_search.scan_sizes(eqn)
  if called is not None:
    return _count(called, operands, results)
  if sizes is not None:
    return _count_scan(eqn, *sizes, operands, results)
  if name == 'cond':
    branches = [_count(each, operands[1:], results) for each in eqn.params['branches']]
    return max(branches, key=lambda counted: counted[1].total())
  counts = _Counts()
  if name in _PRODUCTS:
    if not any(operand.selects for operand in operands):
      num_products = 1
      if any(results):
        num_products += sum(operand.is_trained for operand in operands)
      counts[_operand_dtype(eqn)] = num_products * _PRODUCTS[name](eqn)
  else:
    _check_has_no_products(eqn)
  passes = name != 'stop_gradient' and any(operand.is_trained for operand in operands)
  selects = name in _RESHAPES and operands[0].selects
  if name == 'convert_element_type':
    selects = selects or eqn.invars[0].aval.dtype == jnp.bool_
  return [_Value(passes and _is_float(var), selects) for var in eqn.outvars], counts


def _count_scan(
  eqn: Any, num_consts: int, num_carry: int, operands: list[_Value], results: _Uses
) -> tuple[list[_Value], _Counts]:
  """Count the products of all iterations of a `lax.scan`; see `_count`."""
  carried = slice(num_consts, num_consts + num_carry)
  operands = list(operands)
  # An iteration reads what another one writes, so all of them are like the one with most derivatives.
  body_results = [any(results)] * num_carry + list(results[num_carry:])
  before = None
  while before != operands:
    before = list(operands)
    outputs, counts = _count(eqn.params['jaxpr'], operands, body_results)
    operands[carried] = [
      _Value(old.is_trained or new.is_trained, old.selects and new.selects)
      for old, new in zip(before[carried], outputs, strict=False)
    ]
  return outputs, _Counts({dtype: eqn.params['length'] * n for dtype, n in counts.items()})


def _check_has_no_products(eqn: Any) -> None:
  """Raise UncountableError if an operation has products in a program that it runs in an unknown way."""
  programs = [str(v) for v in eqn.params.values() if isinstance(v, (core.Jaxpr, core.ClosedJaxpr))]
  if eqn.primitive.name in _OPAQUE or _PRODUCT_IN_TEXT.search(' '.join(programs)):
    raise UncountableError(f'{eqn.primitive.name!r} has products of unknown number or size')


def _operand_dtype(eqn: Any) -> str:
  """Return the dtype of a product; see `ModelFlops`."""
  dtype = jnp.result_type(*(atom.aval.dtype for atom in eqn.invars[:2])).name
  precision = eqn.params.get('precision')
  is_default = precision in (None, (None, None), (jax.lax.Precision.DEFAULT,) * 2)
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


_PRODUCTS = {'dot_general': _dot_flops, 'conv_general_dilated': _conv_flops}
_PRODUCT_IN_TEXT = re.compile(r'\b(dot_general|conv_general_dilated|ragged_dot_general)\b')
