"""Operations on the experts of a saved state: permute, prune, replicate, split and merge them.

Pure functions from a state dict of NumPy arrays (`FlaxOptimTrainState.state_dict()`, or the result of
`checkpoints.load`) to a state dict. `python -m moe surgery` applies them to checkpoints.

An operation changes the parameters and running averages of experts, the columns and biases of routers, the mutable
state of routers, and all optimizer state whose dim of experts is unambiguous: that of Adafactor, of SM3, and of every
optimizer that keeps arrays of the parameters' shape. It raises an error for other optimizer state, which mixes experts
(Shampoo's matrices, ScaledAdam's groups, GaLore's projections), unless `optimizer_state='drop'` omits all optimizer
state; a run from the new checkpoint then needs `fallback_to_scratch=True`. Soft routers with several slots for each
expert are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any
import zlib

import numpy as np

from moe import expert_state
from moe.expert_state import PARAM_STATES
from moe.expert_state import PARAM_TREES
from moe.expert_state import Change
from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import tree_utils

StateDict = Mapping[str, Any]
OPTIMIZER_STATES = ('follow', 'drop')
# Optimizer state that belongs to several parameters and depends on their sizes.
_GLOBAL_STATE = ('/groups/', '/global_stats/')


def expert_layers(state: StateDict) -> dict[str, int]:
  """Return the number of experts by path of sparse layer; a stack with stacked layers counts as one layer.

  Args:
    state: nested or flat state of arrays, or of other values with a shape.
  """
  layers = {}
  for path, leaf in expert_state.params_of(tree_utils.flatten_dict(state)).items():
    found = expert_state.split_path(path)
    if found is not None and found[1] == expert_state.EXPERT:
      layers.setdefault(found[0], int(leaf.shape[0]))
  return layers


def permute(
  state: StateDict,
  permutation: Sequence[int],
  layers: Sequence[str] | None = None,
  *,
  optimizer_state: str = 'follow',
) -> dict[str, Any]:
  """Return the state with experts in another order: the same function, up to the order of sums.

  Args:
    state: nested dict of NumPy arrays.
    permutation: number of the old expert at each new position.
    layers: paths of layers (`encoder/layers_1`); None for all.
    optimizer_state: 'follow' or 'drop', see the module.

  Raises:
    CheckpointError: unknown layers, an invalid permutation, an unsupported router or optimizer state.
    ConfigError: an unknown `optimizer_state`.
  """

  def change(layer, num_experts):
    _check(
      sorted(permutation) == list(range(num_experts)),
      'permute.permutation',
      layer,
      f'each number from 0 to {num_experts - 1} once',
      permutation,
    )
    return Change.of_index(permutation)

  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def prune(
  state: StateDict,
  experts: Sequence[int] | Mapping[str, Sequence[int]],
  layers: Sequence[str] | None = None,
  *,
  optimizer_state: str = 'follow',
) -> dict[str, Any]:
  """Return the state without some experts; the tokens of these experts choose the next best ones.

  Args:
    state: nested dict of NumPy arrays.
    experts: numbers of the experts to remove, for all layers or by path of layer; see `least_loaded`.
    layers: see `permute`.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`; or unknown experts, or all of them.
  """

  def change(layer, num_experts):
    if isinstance(experts, Mapping):
      removed = _of_layer('prune', experts, layer)
    else:
      removed = experts
    _check_experts('prune.experts', layer, num_experts, removed, at_most=num_experts - 1)
    return Change.of_index(i for i in range(num_experts) if i not in set(removed))

  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def replicate(
  state: StateDict,
  times: int,
  layers: Sequence[str] | None = None,
  *,
  noise_stddev: float = 0.0,
  seed: int = 0,
  optimizer_state: str = 'follow',
) -> dict[str, Any]:
  """Return the state with several replicas of each expert: those of old expert i begin at new expert i * times.

  The function is the same if tokens choose `times` as many experts and the router's probabilities are a softmax: all
  replicas of an expert are chosen together, each with its share of the gate and of the bias that balances loads.
  Without noise the replicas stay equal during training.

  Args:
    state: nested dict of NumPy arrays.
    times: number of replicas of each expert, including the expert itself.
    layers: see `permute`.
    noise_stddev: standard deviation of the noise on all replicas except the first, relative to the standard deviation
      of each kernel.
    seed: seed of the noise.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`.
    ConfigError: an invalid `times` or `noise_stddev`.
  """
  checks.check(
    'replicate',
    locals(),
    times=checks.number(at_least=1, integer=True),
    noise_stddev=checks.number(at_least=0),
  )

  def change(layer, num_experts):
    return Change.of_index(np.repeat(np.arange(num_experts), times))

  result = change_experts(state, change, layers, optimizer_state=optimizer_state)
  if not noise_stddev:
    return result
  flat = tree_utils.flatten_dict(result)
  changed = {(layer, expert_state.EXPERT) for layer in chosen_layers(state, layers)}
  names = expert_state.ArrayNames(expert_state.params_of(flat))
  for name, leaf in flat.items():
    parts = names.split(name)
    if parts is None or not name.endswith('/kernel'):
      continue
    found = expert_state.split_path(parts.param)
    if found is None or found[:2] not in changed:
      continue
    if not name.startswith(PARAM_TREES) and not parts.is_copy:
      continue
    # The same noise for all arrays that hold values of a parameter.
    rng = np.random.default_rng([seed, zlib.crc32(parts.param.encode())])
    noise = rng.standard_normal(leaf.shape, np.float32)
    noise[::times] = 0
    wide = leaf.astype(np.float32)
    stddev = noise_stddev * np.std(wide)
    flat[name] = (wide + noise * stddev).astype(leaf.dtype)
  return tree_utils.unflatten_dict(flat)


def split(
  state: StateDict,
  slices: int,
  layers: Sequence[str] | None = None,
  *,
  optimizer_state: str = 'follow',
) -> dict[str, Any]:
  """Return the state with each expert cut into slices of its hidden units; those of expert i begin at i * slices.

  The function is the same if tokens choose `slices` times as many experts and the router's probabilities are a softmax:
  the slices of an expert have equal router columns and are chosen together. Output kernels are multiplied by `slices`,
  because each slice gets its share of the gate.

  Args:
    state: nested dict of NumPy arrays.
    slices: number of slices of each expert; divides its hidden units.
    layers: see `permute`.
    optimizer_state: see `permute`. Statistics of output kernels are divided by the same power of `slices` as their
      gradients; statistics whose name does not determine the power are reset to zero.

  Raises:
    CheckpointError: see `permute`; or experts other than MLPs, or with a number of hidden units that is not a multiple.
    ConfigError: an invalid `slices`.
  """
  checks.check('split', locals(), slices=checks.number(at_least=1, integer=True))
  for path, leaf in expert_state.params_of(tree_utils.flatten_dict(state)).items():
    found = expert_state.split_path(path)
    if found is None or found[1] != expert_state.EXPERT:
      continue
    dims = expert_state.dims_of(path, leaf.ndim)
    is_custom = any(dim.startswith('x') for dim in dims)
    if is_custom or ('f' in dims and leaf.shape[dims.index('f')] % slices):
      raise errors.CheckpointError(
        f'Cannot split {path} of shape {tuple(leaf.shape)} with slices={slices}: only kernels and biases of '
        'moe.ExpertMlp can be split, and slices must divide their hidden units.'
      )

  def change(layer, num_experts):
    return Change.of_index(np.repeat(np.arange(num_experts), slices), slices)

  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def merge(
  state: StateDict,
  groups: Sequence[Sequence[int]] | int,
  layers: Sequence[str] | None = None,
  *,
  load: Mapping[str, Sequence[float]] | None = None,
  optimizer_state: str = 'follow',
) -> dict[str, Any]:
  """Return the state with each group of experts, and of router columns, replaced by its mean.

  New expert j is the mean of group j; the other experts follow, unchanged. Optimizer state is averaged in the same way.
  Merging the result of `replicate` gives the original experts.

  Args:
    state: nested dict of NumPy arrays.
    groups: numbers of the experts of each group; or the number of new experts, each the mean of the same number of
      consecutive ones.
    layers: see `permute`.
    load: weights of the experts by path of layer, e.g. their recorded load (`recorded_load`); None: equal weights.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`; or invalid groups or loads.
  """

  def change(layer, num_experts):
    if isinstance(groups, int):
      sources = _consecutive(layer, num_experts, groups)
    else:
      sources = [list(g) for g in groups]
    merged = list(itertools.chain.from_iterable(sources))
    _check_experts('merge.groups', layer, num_experts, merged)
    has_members = bool(sources) and all(sources)
    _check(has_members, 'merge.groups', layer, 'groups of at least one expert', sources)
    sources += [[i] for i in range(num_experts) if i not in merged]
    if load is None:
      weights = np.ones(num_experts)
    else:
      weights = np.asarray(_of_layer('merge', load, layer), np.float64)
    is_load = weights.shape == (num_experts,) and bool(
      np.all((weights >= 0) & np.isfinite(weights))
    )
    _check(
      is_load,
      'merge.load',
      layer,
      f'one finite number >= 0 for each of the {num_experts} experts',
      weights.tolist(),
    )
    shares = tuple(_shares(weights[group]) for group in sources)
    return Change(tuple(map(tuple, sources)), shares)

  return change_experts(state, change, layers, optimizer_state=optimizer_state)


def least_loaded(load: Mapping[str, Sequence[float]], number: int) -> dict[str, list[int]]:
  """Return the numbers of the experts with the least load, by path of layer.

  >>> least_loaded({'encoder/layers_1': [0.5, 0.1, 0.3, 0.1]}, 2)
  {'encoder/layers_1': [1, 3]}
  """
  result = {}
  for layer, values in load.items():
    in_order = np.argsort(np.asarray(values), kind='stable')
    result[layer] = sorted(in_order[:number].tolist())
  return result


def change_experts(
  state: StateDict,
  change_fn: Callable[[str, int], Change],
  layers: Sequence[str] | None = None,
  *,
  optimizer_state: str = 'follow',
) -> dict[str, Any]:
  """Return the state with changed experts in some layers.

  Args:
    state: nested dict of NumPy arrays.
    change_fn: returns the composition of the new experts, given the path of a layer and its number of experts.
    layers: see `permute`.
    optimizer_state: see `permute`.

  Raises:
    CheckpointError: see `permute`.
    ConfigError: an unknown `optimizer_state`.
  """
  checks.check('', locals(), optimizer_state=checks.one_of(OPTIMIZER_STATES))
  flat = tree_utils.flatten_dict(state)
  counts = expert_layers(state)
  changes = {layer: change_fn(layer, counts[layer]) for layer in chosen_layers(state, layers)}
  params = expert_state.params_of(flat)
  expert_state.check_routers('surgery', params, changes)
  of_experts = [path for path in params if expert_state.split_path(path) is not None]
  names = expert_state.ArrayNames(of_experts)
  result = {}
  stuck = []
  for name, leaf in flat.items():
    if name.startswith(PARAM_STATES) and optimizer_state == 'drop':
      continue
    parts = names.split(name)
    path = ''
    if parts is not None:
      path = parts.param
    elif name.startswith(expert_state.MUTABLES):
      path = name.split('/', 2)[-1]
    found = expert_state.split_path(path)
    change = None
    if found is not None:
      change = changes.get(found[0])
    if change is None:
      if name.startswith(PARAM_STATES) and any(part in f'/{name}' for part in _GLOBAL_STATE):
        stuck.append(name)
      result[name] = leaf
      continue
    array = np.asarray(leaf)
    if parts is None:
      new = expert_state.change_mutable(path, array, change)
    elif name.startswith(PARAM_STATES):
      new = expert_state.change_state(parts, array, params[path].shape, change)
    else:
      new = expert_state.change_param(path, array, change)
    if new is None:
      stuck.append(name)
    result[name] = new
  if stuck:
    raise errors.CheckpointError(
      f'{len(stuck)} arrays of the state have no unambiguous dim of experts, e.g. {stuck[0]} of shape '
      f"{tuple(flat[stuck[0]].shape)}. Pass optimizer_state='drop' (--optimizer_state=drop) to omit the optimizer's "
      'state, and start from the new checkpoint with RestoreCheckpointConfig.fallback_to_scratch=True.'
    )
  return tree_utils.unflatten_dict(result)


def chosen_layers(state: StateDict, layers: Sequence[str] | None) -> list[str]:
  """Return the paths of the sparse layers `layers`, whose names may omit the name of the block; None: all.

  Raises:
    CheckpointError: an unknown layer, or a state without sparse layers.
  """
  known = expert_layers(state)
  if not known:
    raise errors.CheckpointError(
      'The state has no experts. Give the checkpoint of a sparse model; moe.upcycle adds '
      'experts to a dense model.'
    )
  if layers is None:
    return list(known)
  by_name = {}
  for layer in known:
    by_name[layer] = layer
    by_name[layer.rpartition('/')[0]] = layer
  for name in layers:
    if name not in by_name:
      raise errors.CheckpointError(
        f'Unknown sparse layer {name!r}.{errors.did_you_mean(name, known)}'
      )
  return list(dict.fromkeys(by_name[name] for name in layers))


def _of_layer(owner: str, values: Mapping[str, Any], layer: str) -> Any:
  for name in (layer, layer.rpartition('/')[0]):
    if name in values:
      return values[name]
  raise errors.CheckpointError(
    f'{owner}: no value for the layer {layer}.{errors.did_you_mean(layer, values)}'
  )


def _check_experts(
  option: str, layer: str, num_experts: int, experts: Sequence[int], at_most: int | None = None
) -> None:
  if at_most is None:
    count = num_experts
  else:
    count = at_most
  valid = set(experts) & set(range(num_experts))
  _check(
    len(valid) == len(experts) <= count,
    option,
    layer,
    f'at most {count} different numbers from 0 to {num_experts - 1}',
    experts,
  )


def _consecutive(layer: str, num_experts: int, number: int) -> list[list[int]]:
  _check(
    1 <= number <= num_experts and num_experts % number == 0,
    'merge.groups',
    layer,
    f'a divisor of the number of experts {num_experts}, or groups',
    number,
  )
  size = num_experts // number
  return [list(range(start, start + size)) for start in range(0, num_experts, size)]


def _check(is_valid: bool, option: str, layer: str, expectation: str, value: Any) -> None:
  if not is_valid:
    raise checks.invalid(
      '', option, f'{expectation} in {layer}', value, error=errors.CheckpointError
    )


def _shares(weights: np.ndarray) -> tuple[float, ...]:
  total = float(weights.sum())
  # Experts that no token has chosen get equal weights.
  if total > 0:
    return tuple((weights / total).tolist())
  return (1.0 / len(weights),) * len(weights)
