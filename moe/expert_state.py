"""What a saved state holds of experts: which arrays, what their dims are, and what becomes of them as experts change.

States are flat dicts, '/'-joined name to NumPy array, of the form of `train_state.FlaxOptimTrainState.state_dict()`.
Dims have names here: 'e' experts, 'l' layers (where a stack's layers are one array), 'd' the width of the model, 'f'
hidden units of an expert, and 'x0', 'x1', ... of experts that are no MLPs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x_lite.errors import CheckpointError

EXPERT, ROUTER = 'expert', 'router'
TARGET, PARAM_STATES, MUTABLES = 'target/', 'state/param_states/', 'flax_mutables/'
# Parts of a state that are trees of parameters.
PARAM_TREES = (TARGET, 'param_average/')

Dims = tuple[str, ...]

# Optimizer state by the name that it has beside the path of its parameter. What is here starts at zero.
_STARTS_AT_ZERO = frozenset({
    'm', 'v', 'v_row', 'v_col', 'mu', 'nu', 'nu_max', 'trace', 'ema', 'm1', 'm2', 'n', 'g', 'e_g', 'e_x', 'delta',
    'exp_avg', 'exp_avg_sq', 'grad_sum', 'grad_sum_sq', 'acc_grads', 'previous_gradient', 'prev_updates', 'found_nan'})
# What holds the values of its parameter, of now or of another time.
_COPIES = frozenset({'z', 'x0', 'init_params', 'params0', 'init_particles', 'cache'})
# The power of the gradient that a mean is taken of, where the name leaves no doubt.
_POWERS = {'mu': 1, 'nu': 2, 'nu_max': 2, 'v_row': 2, 'v_col': 2}
# Parts of names of state that mixes experts, or that is in no order of dims.
_MIXED = frozenset({'statistics', 'preconditioners', 'training_metrics', 'projector'})


@dataclasses.dataclass(frozen=True)
class Place:
  """Where in a state an array stands that belongs to a parameter.

  Attributes:
    param: path of the parameter.
    before: parts of the name before the path.
    after: parts behind it.
  """

  param: str
  before: tuple[str, ...]
  after: tuple[str, ...]

  @property
  def kind(self) -> str:
    """The name that tells what of its parameter the optimizer keeps."""
    return self.after[0] if self.after else self.before[-1]

  @property
  def starts_at_zero(self) -> bool:
    """True if such an array is zero before the first step."""
    return self.kind in _STARTS_AT_ZERO and len(self.after) <= 1

  @property
  def is_copy(self) -> bool:
    """True if such an array holds values of the parameter."""
    return not self.after and self.kind in _COPIES

  @property
  def power(self) -> int | None:
    """The power of the gradient that the array is a mean of; None where that cannot be told."""
    if self.after == ('v',):  # Adafactor's; that of other optimizers may be anything.
      return 2
    return _POWERS.get(self.kind) if len(self.after) <= 1 else None


class Places:
  """Finds the parameter that an array belongs to."""

  def __init__(self, params: Iterable[str]):
    self._params = frozenset(params)
    self._lengths = sorted({path.count('/') + 1 for path in self._params}, reverse=True)

  def find(self, name: str) -> Place | None:
    """Return where the array `name` stands, None if in no parameter's place."""
    parts = tuple(name.split('/'))
    for length in self._lengths:
      for start in range(1, len(parts) - length + 1):
        path = '/'.join(parts[start:start + length])
        if path in self._params:
          return Place(path, parts[:start], parts[start + length:])
    return None


def params_of(state: Mapping[str, Any]) -> dict[str, Any]:
  """Return the parameters of a flat state by their paths."""
  return {name.removeprefix(TARGET): leaf for name, leaf in state.items() if name.startswith(TARGET)}


def split_path(path: str) -> tuple[str, str, str] | None:
  """Return (path of the layer's block, 'expert' or 'router', the rest) of what belongs to a sparse block, else None.

  >>> split_path('encoder/layers_1/mlp/expert/wi/kernel')
  ('encoder/layers_1/mlp', 'expert', 'wi/kernel')
  """
  parts = path.split('/')
  found = [i for i, part in enumerate(parts) if part in (EXPERT, ROUTER)]
  if not found:
    return None
  at = found[0]
  return '/'.join(parts[:at]), parts[at], '/'.join(parts[at + 1:])


def dims_of(path: str, ndim: int) -> Dims:
  """Return the names of the dims of a parameter of an expert or a router, or of a router's mutable state.

  >>> dims_of('layers_0/mlp/expert/wo/kernel', 3), dims_of('decoder/mlp/router/router_weights/w/kernel', 3)
  (('e', 'f', 'd'), ('d', 'l', 'e'))
  """
  _, part, rest = split_path(path)
  first, is_bias = rest.split('/', 1)[0], rest.endswith('bias')
  layers_at = 1
  if part == ROUTER and first == 'router_weights':
    own = ('e',) if is_bias else ('d', 'e')
  elif part == ROUTER:  # Mutable state.
    own, layers_at = () if first == 'num_passes' else ('e',), 0
  elif first == 'wo':
    own = ('e', 'd') if is_bias else ('e', 'f', 'd')
  elif first.startswith('wi'):
    own = ('e', 'f') if is_bias else ('e', 'd', 'f')
  else:
    return ('e', *(f'x{i}' for i in range(ndim - 1)))
  return own if ndim <= len(own) else with_layers(own, layers_at)


def check_routers(operation: str, params: Mapping[str, Any], layers: Iterable[str]) -> None:
  """Raise CheckpointError if a router has not one number for each expert, as soft routers with several places have.

  Args:
    operation: what needs that, for the message.
    params: path to anything with a shape, of all parameters of a sparse model.
    layers: paths of blocks whose routers are looked at.
  """
  sparse = {path: found for path in params if (found := split_path(path)) is not None and found[0] in set(layers)}
  counts = {found[0]: int(params[path].shape[0]) for path, found in sparse.items() if found[1] == EXPERT}
  for path, (layer, part, _) in sparse.items():
    shape = tuple(params[path].shape)
    if part != ROUTER or layer not in counts:
      continue
    dims = dims_of(path, len(shape))
    if 'e' not in dims or shape[dims.index('e')] != counts[layer]:
      raise CheckpointError(
          f'{operation}: {path} has the shape {shape}; expected one column for each of the {counts[layer]} experts of '
          f'{layer}. Routers with several places for each expert, as soft routing has them, are not supported.')


def with_layers(dims: Dims, at: int = 1) -> Dims:
  """Return the dims of an array whose layers are stacked: T5X has the dim over layers second in parameters.

  >>> with_layers(('e', 'd', 'f'))
  ('e', 'l', 'd', 'f')
  """
  at = min(at, len(dims))
  return (*dims[:at], 'l', *dims[at:])


def kept_dims(shape: Sequence[int], param_shape: Sequence[int], dims: Dims) -> set[Dims]:
  """Return which dims of a parameter an array may have kept, by their sizes.

  >>> kept_dims((4, 16), (4, 16, 32), ('e', 'd', 'f')), len(kept_dims((8,), (8, 8), ('d', 'e')))
  ({('e', 'd')}, 2)
  """
  return {tuple(dims[i] for i in kept) for kept in itertools.combinations(range(len(param_shape)), len(shape))
          if tuple(param_shape[i] for i in kept) == tuple(shape)}


def state_dims(place: Place, shape: Sequence[int], param_shape: Sequence[int], dims: Dims,
               matter: str = 'delfx') -> Dims | None:
  """Return which dims of its parameter an array of optimizer state keeps; None where that cannot be told.

  Args:
    place: where the array stands.
    shape: its shape.
    param_shape: the parameter's.
    dims: the parameter's.
    matter: dims that are to be told apart.
  """
  if any(part in _MIXED for part in (*place.before, *place.after)):
    return None
  if place.after and place.after[0].isdigit():  # One array for each dim.
    number = int(place.after[0])
    fits = number < len(dims) and tuple(shape) == (param_shape[number],)
    return (dims[number],) if fits else None
  found = kept_dims(shape, param_shape, dims)
  alike = {tuple(dim if dim[0] in matter else '' for dim in kept) for kept in found}
  return min(found) if len(alike) == 1 else None


@dataclasses.dataclass(frozen=True)
class Change:
  """What the new experts of a layer are made of.

  Attributes:
    sources: of each new expert the old ones that it is made of.
    weights: their weights, which sum to 1.
    slices: new expert j has slice `j % slices` of the hidden units of its source.
  """

  sources: tuple[tuple[int, ...], ...]
  weights: tuple[tuple[float, ...], ...]
  slices: int = 1

  @classmethod
  def of_index(cls, index: Iterable[int], slices: int = 1) -> Change:
    """Return a change by which each new expert is an old one, or a slice of one."""
    index = [int(i) for i in index]
    return cls(tuple((i,) for i in index), ((1.0,),) * len(index), slices)

  @property
  def mixes(self) -> bool:
    """True if an expert is made of several."""
    return any(len(group) > 1 for group in self.sources)

  def apply(self, array: np.ndarray, dims: Dims) -> np.ndarray | None:
    """Return `array` for the new experts; None if it is of numbers that cannot be averaged.

    Args:
      array: with the dims `dims`; without 'e' it is returned as it is.
      dims: names of its dims.
    """
    if 'e' not in dims:
      return array
    axis = dims.index('e')
    if not self.mixes:
      taken = np.take(array, [group[0] for group in self.sources], axis)
      return taken if self.slices == 1 or 'f' not in dims else self._slice(taken, axis, dims.index('f'))
    if array.dtype.kind in 'iub':
      return None
    wide = array.astype(np.float64)
    means = [sum(np.take(wide, i, axis) * w for i, w in zip(group, weights, strict=True))
             for group, weights in zip(self.sources, self.weights, strict=True)]
    return np.stack(means, axis).astype(array.dtype)

  def share(self, array: np.ndarray, axis: int) -> np.ndarray:
    """Return numbers of experts such that the new experts made of one share its number, and that of several is a sum.

    Args:
      array: one number for each expert along `axis`.
      axis: the dim of experts.
    """
    uses = collections.Counter(i for group in self.sources for i in group)
    wide = array.astype(np.float64)
    sums = [sum(np.take(wide, i, axis) / uses[i] for i in group) for group in self.sources]
    return np.stack(sums, axis).astype(array.dtype)

  def _slice(self, array: np.ndarray, expert_axis: int, hidden_axis: int) -> np.ndarray:
    size = array.shape[hidden_axis] // self.slices
    rows = np.moveaxis(array, (expert_axis, hidden_axis), (0, 1))
    parts = [row[(j % self.slices) * size:(j % self.slices + 1) * size] for j, row in enumerate(rows)]
    return np.ascontiguousarray(np.moveaxis(np.stack(parts), (0, 1), (expert_axis, hidden_axis)))


def is_output(path: str) -> bool:
  """Return whether a parameter is of an expert's output projection."""
  found = split_path(path)
  return found is not None and found[1] == EXPERT and found[2].startswith('wo/')


def change_param(path: str, array: np.ndarray, change: Change) -> np.ndarray | None:
  """Return a parameter for the new experts.

  Output kernels of slices are multiplied by their number: each slice has a gate of one part of the old one.

  Args:
    path: of the parameter, of an expert or a router.
    array: its value.
    change: what the new experts are made of.
  """
  changed = change.apply(array, dims_of(path, array.ndim))
  if changed is not None and change.slices > 1 and is_output(path) and path.endswith('/kernel'):
    return scaled(changed, change.slices)
  return changed


def change_mutable(path: str, array: np.ndarray, change: Change) -> np.ndarray | None:
  """Return a router's mutable state for the new experts.

  The bias that balances loads is added to probabilities, which replicas and slices of an expert share, and so do they
  share its bias.

  Args:
    path: of the variable, without its collection.
    array: its value.
    change: what the new experts are made of.
  """
  dims = dims_of(path, array.ndim)
  is_bias = split_path(path)[1:] == (ROUTER, 'bias')
  return change.share(array, dims.index('e')) if is_bias else change.apply(array, dims)


def change_state(place: Place, array: np.ndarray, param_shape: Sequence[int], change: Change) -> np.ndarray | None:
  """Return optimizer state of an expert's or a router's parameter for the new experts; None where it cannot follow.

  The gradient of a slice's output projection is that of the whole divided by the number of slices, and so its means
  are. Where the power is not known, what starts at zero starts again.

  Args:
    place: where the array stands.
    array: the state.
    param_shape: shape of the parameter before the change.
    change: what the new experts are made of.
  """
  if array.size <= 1:
    return array  # One number for the whole parameter, or the placeholder of what is not kept.
  if place.is_copy and array.shape == tuple(param_shape):
    return change_param(place.param, array, change)
  dims = state_dims(place, array.shape, param_shape, dims_of(place.param, len(param_shape)),
                    'ef' if change.slices > 1 else 'e')
  if dims is None or (change.slices > 1 and 'f' in dims and 'e' not in dims):
    return None
  changed = change.apply(array, dims)
  if changed is None or change.slices == 1 or not is_output(place.param):
    return changed
  if place.power is not None:
    return scaled(changed, float(change.slices)**-place.power)
  return np.zeros_like(changed) if place.starts_at_zero else None


def scaled(array: np.ndarray, factor: float) -> np.ndarray:
  """Return `array * factor` in the dtype of `array`."""
  return (array.astype(np.float32) * np.float32(factor)).astype(array.dtype)
