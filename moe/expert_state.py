"""Arrays of experts and routers in a saved state: their names, their dims, and their values after a change of experts.

States are flat dicts, '/'-joined name to NumPy array, of the form of `train_state.FlaxOptimTrainState.state_dict()`.
Dims have names here: 'e' experts, 'l' layers (where a stack's layers are one array), 'd' the width of the model, 'f'
hidden units of an expert, and 'x0', 'x1', ... those of experts other than MLPs.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from t5x_lite.errors import CheckpointError

EXPERT = 'expert'
ROUTER = 'router'
TARGET = 'target/'
PARAM_STATES = 'state/param_states/'
MUTABLES = 'flax_mutables/'
# Parts of a state that are trees of parameters.
PARAM_TREES = (TARGET, 'param_average/')

Dims = tuple[str, ...]

# Optimizer state, by its name next to the path of the parameter, that is zero at first.
_STARTS_AT_ZERO = frozenset(
  {
    'm',
    'v',
    'v_row',
    'v_col',
    'mu',
    'nu',
    'nu_max',
    'trace',
    'ema',
    'm1',
    'm2',
    'n',
    'g',
    'e_g',
    'e_x',
    'delta',
    'exp_avg',
    'exp_avg_sq',
    'grad_sum',
    'grad_sum_sq',
    'acc_grads',
    'previous_gradient',
    'prev_updates',
    'found_nan',
  }
)
# Optimizer state that holds values of the parameter: the current ones or earlier ones.
_COPIES = frozenset({'z', 'x0', 'init_params', 'params0', 'init_particles', 'cache'})
# Power of the gradient whose mean the state is, where the name determines it.
_POWERS = {'mu': 1, 'nu': 2, 'nu_max': 2, 'v_row': 2, 'v_col': 2}
# Parts of the names of state that mixes experts, or whose dims are not those of the parameter.
_MIXED = frozenset({'statistics', 'preconditioners', 'training_metrics', 'projector'})


@dataclasses.dataclass(frozen=True)
class ArrayName:
  """Name of an array of a state, split at the path of the parameter that it contains.

  Attributes:
    param: path of the parameter.
    before: parts of the name before the path.
    after: parts after it.
  """

  param: str
  before: tuple[str, ...]
  after: tuple[str, ...]

  @property
  def kind(self) -> str:
    """The name that the optimizer has given to this kind of state."""
    if self.after:
      return self.after[0]
    return self.before[-1]

  @property
  def starts_at_zero(self) -> bool:
    """True if arrays of this kind are zero before the first step."""
    return self.kind in _STARTS_AT_ZERO and len(self.after) <= 1

  @property
  def is_copy(self) -> bool:
    """True if arrays of this kind hold values of the parameter."""
    return not self.after and self.kind in _COPIES

  @property
  def power(self) -> int | None:
    """Power of the gradient whose mean the array is; None if the name does not determine it."""
    if self.after == ('v',):  # Adafactor's; other optimizers use the name differently.
      return 2
    if len(self.after) <= 1:
      return _POWERS.get(self.kind)
    return None


class ArrayNames:
  """Finds the path of a parameter in the names of arrays."""

  def __init__(self, params: Iterable[str]):
    self._params = frozenset(params)
    self._lengths = sorted({path.count('/') + 1 for path in self._params}, reverse=True)

  def split(self, name: str) -> ArrayName | None:
    """Return `name` split at the path of a parameter; None if it contains none."""
    parts = tuple(name.split('/'))
    for length in self._lengths:
      for start in range(1, len(parts) - length + 1):
        path = '/'.join(parts[start : start + length])
        if path in self._params:
          return ArrayName(path, parts[:start], parts[start + length :])
    return None


def params_of(state: Mapping[str, Any]) -> dict[str, Any]:
  """Return the parameters of a flat state by their paths."""
  return {
    name.removeprefix(TARGET): leaf for name, leaf in state.items() if name.startswith(TARGET)
  }


def split_path(path: str) -> tuple[str, str, str] | None:
  """Return (path of the sparse block, 'expert' or 'router', the rest), or None for parameters of other blocks.

  >>> split_path('encoder/layers_1/mlp/expert/wi/kernel')
  ('encoder/layers_1/mlp', 'expert', 'wi/kernel')
  """
  parts = path.split('/')
  found = [i for i, part in enumerate(parts) if part in (EXPERT, ROUTER)]
  if not found:
    return None
  at = found[0]
  return '/'.join(parts[:at]), parts[at], '/'.join(parts[at + 1 :])


def parts_of(path: str) -> tuple[str, str, str]:
  """Return `split_path` of a parameter of an expert or a router."""
  found = split_path(path)
  assert found is not None, path
  return found


def dims_of(path: str, ndim: int) -> Dims:
  """Return the names of the dims of a parameter of an expert or a router, or of a router's mutable state.

  >>> dims_of('layers_0/mlp/expert/wo/kernel', 3), dims_of('decoder/mlp/router/router_weights/w/kernel', 3)
  (('e', 'f', 'd'), ('d', 'l', 'e'))
  """
  _, part, rest = parts_of(path)
  first = rest.split('/', 1)[0]
  is_bias = rest.endswith('bias')
  own: Dims
  layers_at = 1
  if part == ROUTER and first == 'router_weights':
    own = ('d', 'e')
    bias = ('e',)
  elif part == ROUTER:  # Mutable state.
    own = ('e',)
    bias = ('e',)
    layers_at = 0
    if first == 'num_passes':
      own = ()
  elif first == 'wo':
    own = ('e', 'f', 'd')
    bias = ('e', 'd')
  elif first.startswith('wi'):
    own = ('e', 'd', 'f')
    bias = ('e', 'f')
  else:
    return ('e', *(f'x{i}' for i in range(ndim - 1)))
  if is_bias:
    own = bias
  if ndim <= len(own):
    return own
  return with_layers(own, layers_at)


def check_routers(operation: str, params: Mapping[str, Any], layers: Iterable[str]) -> None:
  """Raise CheckpointError for routers without exactly one number for each expert: soft routers with several slots.

  Args:
    operation: name of the operation, for the message.
    params: all parameters of a sparse model: path to an array or anything else with a shape.
    layers: paths of the blocks to check.
  """
  layers = set(layers)
  counts = {}
  routers = {}
  for path, param in params.items():
    found = split_path(path)
    if found is None or found[0] not in layers:
      continue
    layer, part, _ = found
    if part == EXPERT:
      counts[layer] = int(param.shape[0])
    else:
      routers[path] = layer
  for path, layer in routers.items():
    shape = tuple(params[path].shape)
    if layer not in counts:
      continue
    dims = dims_of(path, len(shape))
    if 'e' not in dims or shape[dims.index('e')] != counts[layer]:
      raise CheckpointError(
        f'{operation}: {path} must have one column for each of the {counts[layer]} experts of {layer}, got the shape '
        f'{shape}. Soft routing with several slots for each expert is not supported.'
      )


def with_layers(dims: Dims, at: int = 1) -> Dims:
  """Return the dims of an array of stacked layers; in parameters T5X has the dim of layers second.

  >>> with_layers(('e', 'd', 'f'))
  ('e', 'l', 'd', 'f')
  """
  at = min(at, len(dims))
  return (*dims[:at], 'l', *dims[at:])


def kept_dims(shape: Sequence[int], param_shape: Sequence[int], dims: Dims) -> set[Dims]:
  """Return the subsets of a parameter's dims whose sizes are the shape of an array.

  >>> kept_dims((4, 16), (4, 16, 32), ('e', 'd', 'f')), len(kept_dims((8,), (8, 8), ('d', 'e')))
  ({('e', 'd')}, 2)
  """
  found = set()
  for kept in itertools.combinations(range(len(param_shape)), len(shape)):
    if tuple(param_shape[i] for i in kept) == tuple(shape):
      found.add(tuple(dims[i] for i in kept))
  return found


def state_dims(
  name: ArrayName,
  shape: Sequence[int],
  param_shape: Sequence[int],
  dims: Dims,
  matter: str = 'delfx',
) -> Dims | None:
  """Return the dims of the parameter that an array of optimizer state keeps; None if they are ambiguous.

  Args:
    name: name of the array.
    shape: shape of the array.
    param_shape: shape of the parameter.
    dims: dims of the parameter.
    matter: dims whose confusion is an ambiguity.
  """
  if any(part in _MIXED for part in (*name.before, *name.after)):
    return None
  if name.after and name.after[0].isdigit():  # One array for each dim.
    number = int(name.after[0])
    if number < len(dims) and tuple(shape) == (param_shape[number],):
      return (dims[number],)
    return None
  found = kept_dims(shape, param_shape, dims)
  alike = {tuple(dim if dim[0] in matter else '' for dim in kept) for kept in found}
  if len(alike) == 1:
    return min(found)
  return None


@dataclasses.dataclass(frozen=True)
class Change:
  """Composition of the new experts of a layer.

  Attributes:
    sources: for each new expert, the numbers of the old experts whose weighted mean it is.
    weights: weights of these means; those of a new expert sum to 1.
    slices: new expert j has slice `j % slices` of the hidden units of its source.
  """

  sources: tuple[tuple[int, ...], ...]
  weights: tuple[tuple[float, ...], ...]
  slices: int = 1

  @classmethod
  def of_index(cls, index: Iterable[int], slices: int = 1) -> Change:
    """Return a change whose new expert j is old expert `index`[j], or one of `slices` slices of it."""
    index = [int(i) for i in index]
    return cls(tuple((i,) for i in index), ((1.0,),) * len(index), slices)

  @property
  def mixes(self) -> bool:
    """True if a new expert is the mean of several old ones."""
    return any(len(group) > 1 for group in self.sources)

  def apply(self, array: np.ndarray, dims: Dims) -> np.ndarray | None:
    """Return `array` for the new experts; None for integers and booleans that would have to be averaged.

    Args:
      array: array with the dims `dims`; without 'e' among them it is returned unchanged.
      dims: names of its dims.
    """
    if 'e' not in dims:
      return array
    axis = dims.index('e')
    if not self.mixes:
      taken = np.take(array, [group[0] for group in self.sources], axis)
      if self.slices == 1 or 'f' not in dims:
        return taken
      return self._slice(taken, axis, dims.index('f'))
    if array.dtype.kind in 'iub':
      return None
    wide = array.astype(np.float64)
    means = []
    for group, weights in zip(self.sources, self.weights, strict=True):
      terms = [np.take(wide, i, axis) * w for i, w in zip(group, weights, strict=True)]
      means.append(sum(terms))
    return np.stack(means, axis).astype(array.dtype)

  def share(self, array: np.ndarray, axis: int) -> np.ndarray:
    """Return numbers of new experts: an old expert's number is divided among its copies; a mean of several has a sum.

    Args:
      array: <float>[..., old experts, ...], one number for each old expert along `axis`.
      axis: dim of experts.
    """
    uses = collections.Counter(i for group in self.sources for i in group)
    wide = array.astype(np.float64)
    sums = []
    for group in self.sources:
      shares = [np.take(wide, i, axis) / uses[i] for i in group]
      sums.append(sum(shares))
    return np.stack(sums, axis).astype(array.dtype)

  def _slice(self, array: np.ndarray, expert_axis: int, hidden_axis: int) -> np.ndarray:
    size = array.shape[hidden_axis] // self.slices
    rows = np.moveaxis(array, (expert_axis, hidden_axis), (0, 1))
    parts = []
    for j, row in enumerate(rows):
      start = (j % self.slices) * size
      parts.append(row[start : start + size])
    sliced = np.moveaxis(np.stack(parts), (0, 1), (expert_axis, hidden_axis))
    return np.ascontiguousarray(sliced)


def is_output(path: str) -> bool:
  """Return whether a parameter belongs to the output projection of an expert."""
  found = split_path(path)
  return found is not None and found[1] == EXPERT and found[2].startswith('wo/')


def change_param(path: str, array: np.ndarray, change: Change) -> np.ndarray | None:
  """Return a parameter for the new experts.

  Output kernels of slices are multiplied by the number of slices, because each slice gets only its share of the gate.

  Args:
    path: path of a parameter of an expert or a router.
    array: value of the parameter, in the shape for the old experts and any float dtype, which the result keeps.
    change: composition of the new experts.
  """
  changed = change.apply(array, dims_of(path, array.ndim))
  if changed is not None and change.slices > 1 and is_output(path) and path.endswith('/kernel'):
    return scaled(changed, change.slices)
  return changed


def change_mutable(path: str, array: np.ndarray, change: Change) -> np.ndarray | None:
  """Return a router's mutable state for the new experts.

  The bias that balances loads is divided among the replicas or slices of an expert, as the probability to which it is
  added.

  Args:
    path: path of the variable, without its collection.
    array: value of the variable, in the shape for the old experts and any float dtype, which the result keeps.
    change: composition of the new experts.
  """
  dims = dims_of(path, array.ndim)
  if parts_of(path)[1:] == (ROUTER, 'bias'):
    return change.share(array, dims.index('e'))
  return change.apply(array, dims)


def change_state(
  name: ArrayName, array: np.ndarray, param_shape: Sequence[int], change: Change
) -> np.ndarray | None:
  """Return the optimizer state of an expert or a router for the new experts; None if its dims are ambiguous.

  The gradient of a slice's output projection is the gradient of the unsliced projection divided by the number of
  slices. Means of powers of the gradient are therefore divided by the same power of this number; if the power is
  unknown, state that is zero at first is reset to zero.

  Args:
    name: name of the array.
    array: value of the array.
    param_shape: shape of the parameter before the change.
    change: composition of the new experts.
  """
  if array.size <= 1:
    # One number for the parameter, or the placeholder of a statistic that is not kept.
    return array
  if name.is_copy and array.shape == tuple(param_shape):
    return change_param(name.param, array, change)
  matter = 'e'
  if change.slices > 1:
    matter = 'ef'
  param_dims = dims_of(name.param, len(param_shape))
  dims = state_dims(name, array.shape, param_shape, param_dims, matter)
  if dims is None or (change.slices > 1 and 'f' in dims and 'e' not in dims):
    return None
  changed = change.apply(array, dims)
  if changed is None or change.slices == 1 or not is_output(name.param):
    return changed
  if name.power is not None:
    return scaled(changed, float(change.slices) ** -name.power)
  if name.starts_at_zero:
    return np.zeros_like(changed)
  return None


def scaled(array: np.ndarray, factor: float) -> np.ndarray:
  """Return `array` * `factor`, in the shape and dtype of `array`."""
  return (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)
