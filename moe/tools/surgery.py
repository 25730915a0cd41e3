"""Operations on the experts of a saved state: permute, prune, replicate, split and merge them.

Pure functions from a state dict (`FlaxOptimTrainState.state_dict()`, as `checkpoints.load` reads it, of NumPy arrays)
to another. `python -m moe surgery` applies them to checkpoints.

What follows the experts: their parameters and running averages, the routers' columns and biases, the routers' mutable
state, and the optimizer's state wherever it is clear which of its dims counts experts: that of Adafactor, of whatever
keeps arrays of the parameters' shape, of SM3. Routers with several places for each expert (soft routing) are not
supported. What mixes experts (Shampoo's matrices, ScaledAdam's groups, GaLore's projections) cannot follow: then the
operation is refused, unless `optimizer_state='drop'` leaves out the state of the whole optimizer; a run from the new
checkpoint starts it afresh by `fallback_to_scratch=True`.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moe import expert_state
from moe.expert_state import PARAM_STATES, PARAM_TREES, Change
from t5x_lite import errors
from t5x_lite import tree_utils

_logger = logging.getLogger(__name__)

StateDict = Mapping[str, Any]
OPTIMIZER_STATES = ('follow', 'drop')
_NUM_NAMES_SHOWN = 3
# Optimizer state in no parameter's place whose size has to do with the parameters.
_GLOBAL_STATE = ('/groups/', '/global_stats/')


def expert_layers(state: StateDict) -> dict[str, int]:
  """Return path of each sparse layer to its number of experts; with stacked layers a stack is one.

  Args:
    state: nested or flat; anything with a shape may stand for arrays.
  """
  layers = {}
  for path, leaf in expert_state.params_of(tree_utils.flatten_dict(state)).items():
    found = expert_state.split_path(path)
    if found is not None and found[1] == expert_state.EXPERT:
      layers.setdefault(found[0], int(leaf.shape[0]))
  return layers


def permute(state: StateDict, permutation: Sequence[int], layers: Sequence[str] | None = None, *,
            optimizer_state: str = 'follow') -> dict[str, Any]:
  """Return the state with experts in another order: the same function, up to the order of sums.

  Args:
    state: nested dict of NumPy arrays.
    permutation: of each new expert, the number of the old one.
    layers: paths of layers (`encoder/layers_1`); None for all.
    optimizer_state: 'follow' or 'drop'.

  Raises:
    CheckpointError: no such layers, no permutation of their experts, a router whose columns are not its experts, or
      optimizer state that cannot follow.
    ConfigError: an unknown `optimizer_state`.
  """

  def change(layer, num_experts):
    if sorted(permutation) != list(range(num_experts)):
      raise errors.CheckpointError(f'permute: got {list(permutation)} for the {num_experts} experts of {layer}; '
                                   f'expected each number from 0 to {num_experts - 1} once.')
    return Change.of_index(permutation)

  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def prune(state: StateDict, experts: Sequence[int] | Mapping[str, Sequence[int]],
          layers: Sequence[str] | None = None, *, optimizer_state: str = 'follow') -> dict[str, Any]:
  """Return the state without some experts. Tokens that would choose them choose the next best.

  Args:
    state: nested dict of NumPy arrays.
    experts: numbers of the experts to remove, for all layers or by path of layer; see `least_loaded`.
    layers: see `permute`.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`; unknown experts, or none left.
  """

  def change(layer, num_experts):
    removed = _of_layer('prune', experts, layer) if isinstance(experts, Mapping) else experts
    _check_experts('prune', layer, num_experts, removed)
    if len(removed) >= num_experts:
      raise errors.CheckpointError(f'prune: got all {num_experts} experts of {layer}; expected fewer.')
    return Change.of_index(i for i in range(num_experts) if i not in set(removed))

  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def replicate(state: StateDict, times: int, layers: Sequence[str] | None = None, *, noise_stddev: float = 0.0,
              seed: int = 0, optimizer_state: str = 'follow') -> dict[str, Any]:
  """Return the state with each expert several times: old expert i is new i * times, i * times + 1 and so on.

  The same function if tokens choose `times` as many experts and the router's probabilities are a softmax: all
  replicas of an expert are chosen together, each with its part of the gate (and of the bias that balances loads).
  Without noise they stay equal for ever.

  Args:
    state: nested dict of NumPy arrays.
    times: replicas of an expert, itself included.
    layers: see `permute`.
    noise_stddev: standard deviation of the noise added to all replicas but the first, as a share of each kernel's own.
    seed: of the noise.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`.
    ConfigError: `times` below 1, or noise below 0.
  """
  _check_count('replicate', 'times', times)
  if not 0 <= noise_stddev < math.inf:
    raise errors.ConfigError(f'replicate: noise_stddev is {noise_stddev!r}; expected a finite number of at least 0.')
  change = lambda layer, num_experts: Change.of_index(np.repeat(np.arange(num_experts), times))
  result = change_experts(state, change, layers, optimizer_state=optimizer_state)
  if not noise_stddev:
    return result
  flat, changed = tree_utils.flatten_dict(result), chosen_layers(state, layers)
  places = expert_state.Places(expert_state.params_of(flat))
  for name, leaf in flat.items():
    place = places.find(name)
    found = expert_state.split_path(place.param) if place is not None else None
    if (found is not None and found[:2] in [(layer, expert_state.EXPERT) for layer in changed]
        and (name.startswith(PARAM_TREES) or place.is_copy) and name.endswith('/kernel')):
      # The same noise for all that holds values of a parameter.
      noise = np.random.default_rng([seed, zlib.crc32(place.param.encode())]).standard_normal(leaf.shape, np.float32)
      noise[::times] = 0
      wide = leaf.astype(np.float32)
      flat[name] = (wide + noise * (noise_stddev * np.std(wide))).astype(leaf.dtype)
  return tree_utils.unflatten_dict(flat)


def split(state: StateDict, slices: int, layers: Sequence[str] | None = None, *,
          optimizer_state: str = 'follow') -> dict[str, Any]:
  """Return the state with each expert cut into finer ones along its hidden units: expert i is new i * slices and on.

  The same function if tokens choose `slices` times as many experts and the router's probabilities are a softmax:
  the slices of an expert have equal routers and are chosen together, each with its part of the gate, for which output
  kernels are multiplied by `slices`.

  Args:
    state: nested dict of NumPy arrays.
    slices: parts of an expert; divides its hidden units.
    layers: see `permute`.
    optimizer_state: see `permute`. Statistics of output kernels are divided by the power of `slices` that their
      gradient is; where that is not known (the name of the state leaves it open) they start at zero.

  Raises:
    CheckpointError: see `permute`; hidden units that do not divide, or experts that are no MLPs.
    ConfigError: `slices` below 1.
  """
  _check_count('split', 'slices', slices)
  for path, leaf in expert_state.params_of(tree_utils.flatten_dict(state)).items():
    found = expert_state.split_path(path)
    if found is None or found[1] != expert_state.EXPERT:
      continue
    dims = expert_state.dims_of(path, leaf.ndim)
    if any(dim.startswith('x') for dim in dims):
      raise errors.CheckpointError(f'split: {path} is of an expert that is no MLP (moe.ExpertMlp), so that nothing is '
                                   'known of its hidden units. Only wi and wo can be split.')
    if 'f' in dims and leaf.shape[dims.index('f')] % slices:
      raise errors.CheckpointError(f'split: got slices={slices} for the {leaf.shape[dims.index("f")]} hidden units of '
                                   f'{path}; expected a divisor.')
  change = lambda layer, num_experts: Change.of_index(np.repeat(np.arange(num_experts), slices), slices)
  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def merge(state: StateDict, groups: Sequence[Sequence[int]] | int, layers: Sequence[str] | None = None, *,
          load: Mapping[str, Sequence[float]] | None = None, optimizer_state: str = 'follow') -> dict[str, Any]:
  """Return the state with the mean of some experts, and of their routers, in the place of each group.

  New expert j is the mean of group j; experts in no group stay as they are, behind the groups. Means of optimizer
  state are means of the statistics. Merging what `replicate` made gives the old experts back.

  Args:
    state: nested dict of NumPy arrays.
    groups: numbers of the experts of each group; or how many experts are to be left, each of as many consecutive ones.
    layers: see `permute`.
    load: weights of the experts by path of layer, such as their recorded load (`recorded_load`); None for equal ones.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`; unknown or repeated experts, or more than there are.
  """

  def change(layer, num_experts):
    sources = _consecutive(layer, num_experts, groups) if isinstance(groups, int) else [list(g) for g in groups]
    _check_experts('merge', layer, num_experts, [i for group in sources for i in group])
    if not sources or not all(sources):
      raise errors.CheckpointError(f'merge: got the groups {sources}; expected at least one expert in each, '
                                   'as in 0,1 2,3.')
    merged = {i for group in sources for i in group}
    sources += [[i] for i in range(num_experts) if i not in merged]
    weights = np.ones(num_experts) if load is None else np.asarray(_of_layer('merge', load, layer), np.float64)
    if weights.shape != (num_experts,) or not np.all(np.isfinite(weights)) or np.any(weights < 0):
      raise errors.CheckpointError(f'merge: got the load {weights.tolist()} for the {num_experts} experts of {layer}; '
                                   'expected one finite number of at least 0 for each.')
    return Change(tuple(map(tuple, sources)), tuple(_shares(weights[group]) for group in sources))

  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def least_loaded(load: Mapping[str, Sequence[float]], number: int) -> dict[str, list[int]]:
  """Return the numbers of the experts with the least load, by path of layer.

  >>> least_loaded({'encoder/layers_1': [0.5, 0.1, 0.3, 0.1]}, 2)
  {'encoder/layers_1': [1, 3]}
  """
  return {layer: sorted(np.argsort(np.asarray(values), kind='stable')[:number].tolist())
          for layer, values in load.items()}


def change_experts(state: StateDict, change_fn: Callable[[str, int], Change], layers: Sequence[str] | None = None, *,
                   optimizer_state: str = 'follow') -> dict[str, Any]:
  """Return the state with other experts in some layers.

  Args:
    state: nested dict of NumPy arrays.
    change_fn: returns what the new experts of a layer are made of, given its path and number of experts.
    layers: see `permute`.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`.
    ConfigError: an unknown `optimizer_state`.
  """
  if optimizer_state not in OPTIMIZER_STATES:
    raise errors.ConfigError(f'optimizer_state is {optimizer_state!r}; expected one of {", ".join(OPTIMIZER_STATES)}.'
                             f'{errors.did_you_mean(str(optimizer_state), OPTIMIZER_STATES)}')
  flat, counts = tree_utils.flatten_dict(state), expert_layers(state)
  changes = {layer: change_fn(layer, counts[layer]) for layer in chosen_layers(state, layers)}
  params = expert_state.params_of(flat)
  expert_state.check_routers('surgery', params, changes)
  places = expert_state.Places(path for path in params if expert_state.split_path(path) is not None)
  result, stuck = {}, []
  for name, leaf in flat.items():
    if name.startswith(PARAM_STATES) and optimizer_state == 'drop':
      continue
    place = places.find(name)
    path = name.split('/', 2)[-1] if place is None and name.startswith(expert_state.MUTABLES) else \
        place.param if place else ''
    found = expert_state.split_path(path)
    change = changes.get(found[0]) if found is not None else None
    if change is None:
      if name.startswith(PARAM_STATES) and any(part in f'/{name}' for part in _GLOBAL_STATE):
        stuck.append(name)
      result[name] = leaf
      continue
    array = np.asarray(leaf)
    if name.startswith(PARAM_STATES):
      new = expert_state.change_state(place, array, params[path].shape, change)
    elif place is None:
      new = expert_state.change_mutable(path, array, change)
    else:
      new = expert_state.change_param(path, array, change)
    if new is None:
      stuck.append(name)
    result[name] = new
  if stuck:
    raise errors.CheckpointError(
        f'{len(stuck)} arrays of the state cannot follow the experts, as {stuck[0]} of shape '
        f"{tuple(flat[stuck[0]].shape)}: which of their numbers belong to which expert is not known. Give "
        "optimizer_state='drop' (--optimizer_state=drop) to leave the optimizer's state out, and start from the new "
        'checkpoint with RestoreCheckpointConfig.fallback_to_scratch=True.')
  return tree_utils.unflatten_dict(result)


def chosen_layers(state: StateDict, layers: Sequence[str] | None) -> list[str]:
  """Return the paths of the sparse layers that `layers` names, with or without the block's own name; None: all.

  Raises:
    CheckpointError: there is no such layer, or no sparse layer at all.
  """
  known = expert_layers(state)
  if not known:
    raise errors.CheckpointError('The state has no experts. Give the checkpoint of a sparse model; moe.upcycle makes '
                                 'one of a dense one as it is restored.')
  if layers is None:
    return list(known)
  by_name = {name: layer for layer in known for name in (layer, layer.rpartition('/')[0])}
  for name in layers:
    if name not in by_name:
      raise errors.CheckpointError(f'There is no sparse layer {name!r}.{errors.did_you_mean(name, known)}')
  return list(dict.fromkeys(by_name[name] for name in layers))


def _of_layer(owner: str, values: Mapping[str, Any], layer: str) -> Any:
  for name in (layer, layer.rpartition('/')[0]):
    if name in values:
      return values[name]
  raise errors.CheckpointError(f'{owner}: nothing is given for the layer {layer}.{errors.did_you_mean(layer, values)}')


def _check_experts(owner: str, layer: str, num_experts: int, experts: Sequence[int]) -> None:
  wrong = [i for i in experts if not 0 <= i < num_experts]
  if wrong:
    raise errors.CheckpointError(f'{owner}: got expert {wrong[0]} for {layer}, which has the experts 0 to '
                                 f'{num_experts - 1}.')
  twice = [i for i in experts if list(experts).count(i) > 1]
  if twice:
    raise errors.CheckpointError(f'{owner}: got expert {twice[0]} more than once; expected each expert at most once.')


def _check_count(owner: str, name: str, value: Any) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise errors.ConfigError(f'{owner}: {name} is {value!r}; expected a whole number of at least 1.')


def _consecutive(layer: str, num_experts: int, number: int) -> list[list[int]]:
  if not 1 <= number <= num_experts or num_experts % number:
    raise errors.CheckpointError(f'merge: got {number} experts to be left of the {num_experts} of {layer}; expected a '
                                 'divisor. Give the groups themselves.')
  size = num_experts // number
  return [list(range(start, start + size)) for start in range(0, num_experts, size)]


def _shares(weights: np.ndarray) -> tuple[float, ...]:
  total = float(weights.sum())
  # Experts that nobody has chosen count alike.
  return tuple((weights / total).tolist()) if total > 0 else (1.0 / len(weights),) * len(weights)
