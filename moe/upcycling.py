"""Sparse upcycling: a dense checkpoint becomes the start of a sparse model, by one option of the restore.

Komatsuzaki et al. 2022, "Sparse Upcycling", https://arxiv.org/abs/2212.05055, section 2; granular experts: He et
al. 2024, https://arxiv.org/abs/2410.07524, section 4.

  checkpoints.RestoreCheckpointConfig.state_transformation_fns = [@moe.upcycle()]
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5x_lite import errors
from t5x_lite import tree_utils

_logger = logging.getLogger(__name__)

_EXPERT, _ROUTER = 'expert', 'router'
_PARAM_STATES = 'state/param_states/'
# Parts of a state that are trees of parameters.
_PARAM_TREES = ('target/', 'param_average/')
_ROUTER_STDDEV = 0.02


def upcycle(granularity: int = 1, noise_stddev: float = 0.0, router_init_stddev: float = _ROUTER_STDDEV,
            seed: int = 0) -> Callable[..., dict[str, Any]]:
  """Returns a restore transform that makes the experts of a sparse model of the feed-forward blocks of a dense one.

  Each expert `<layer>/mlp/expert/wi/kernel` is a copy of `<layer>/mlp/wi/kernel`, or with `granularity` g the s-th of g
  slices of its hidden units: expert r * g + s is slice s of copy r. Routers are new. Everything else is kept as it is.

  At step 0 the sparse model computes the dense one's function if nothing is dropped, there is no noise, and the gates
  of a token sum to 1 (`normalize_gates=True`). With g above 1 a token must choose a multiple of g experts: the routers
  of the g slices of a copy are equal, so that a token that chooses one of them chooses all, and output kernels are
  multiplied by g, since each slice has a gate of a g-th.

  Of the optimizer's state, what belongs to kept parameters is kept, and so is the step. An expert starts with the
  statistics of the parameter that it is a copy of (statistics of zero beside a late step would make adaptive optimizers
  jump). What has no counterpart starts at zero and is logged: the routers' state, the state of granular experts, whose
  gradients have another scale, and factored statistics of other dims.

  Args:
    granularity: slices of a dense block, each an expert with a g-th of the hidden units.
    noise_stddev: standard deviation of the noise added to every expert but the first copy's, as a share of each
      kernel's own. 0 for exact copies.
    router_init_stddev: standard deviation of the new routers' kernels.
    seed: of noise and routers.

  Returns:
    `fn(state_dict, target_state_dict, *, is_resuming) -> state_dict`, on nested dicts of NumPy arrays; a run that
    resumes from its own checkpoint is left alone.

  Raises:
    ConfigError: an option out of its range.
  """
  if isinstance(granularity, bool) or not isinstance(granularity, int) or granularity < 1:
    raise errors.ConfigError(f'upcycle.granularity: got {granularity!r}, expected a whole number above 0.')
  for name, value in (('noise_stddev', noise_stddev), ('router_init_stddev', router_init_stddev)):
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
      raise errors.ConfigError(f'upcycle.{name}: got {value!r}, expected a finite number of at least 0.')
  if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
    raise errors.ConfigError(f'upcycle.seed: got {seed!r}, expected a whole number of at least 0.')
  plan = _Plan(granularity, float(noise_stddev), float(router_init_stddev), seed)

  def transform(state_dict, target_state_dict, *, is_resuming=False):
    if is_resuming:
      return dict(state_dict)
    return plan.apply(state_dict, target_state_dict)

  return transform


@dataclasses.dataclass(frozen=True)
class _Plan:
  """The options, and what is done with one array at a time."""

  granularity: int
  noise_stddev: float
  router_init_stddev: float
  seed: int

  def apply(self, state_dict: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sparse state."""
    stored, wanted = tree_utils.flatten_dict(state_dict), tree_utils.flatten_dict(target)
    new = {name: leaf for name, leaf in wanted.items() if _part(name) is not None}
    _check(stored, new)
    sources = {name: _dense_name(name) for name in new if _part(name) == _EXPERT}
    result = {name: leaf for name, leaf in stored.items() if name not in set(sources.values())}
    copied, afresh = [], []
    for name, leaf in new.items():
      if name.startswith(_PARAM_TREES):
        result[name] = self._router(name, leaf) if name not in sources else self._experts(name, leaf, stored)
        continue
      value = self._statistics(name, leaf, stored) if name in sources else None
      (afresh if value is None else copied).append(name)
      result[name] = np.zeros(leaf.shape, leaf.dtype) if value is None else value
    _log(new, copied, afresh)
    return tree_utils.unflatten_dict(result)

  def _experts(self, name: str, wanted: Any, stored: Mapping[str, Any]) -> np.ndarray:
    """Returns the stacked parameters of the experts."""
    dense = np.asarray(stored[_dense_name(name)])
    copies = self._stack(name, dense, tuple(wanted.shape))
    if copies is None:
      raise errors.CheckpointError(
          f'Cannot upcycle: {_dense_name(name)} of shape {dense.shape} does not make {name} of shape '
          f'{tuple(wanted.shape)}; expected experts of {self._expert_shape(name, dense)}, and a number of experts that '
          f'granularity={self.granularity} divides. Change the sizes of the sparse model, or granularity.')
    if self.noise_stddev:
      rng = np.random.default_rng([self.seed, zlib.crc32(_without_part(name).encode())])
      noise = rng.standard_normal(copies.shape, np.float32) * (self.noise_stddev * np.std(dense.astype(np.float32)))
      noise[:self.granularity] = 0  # The first copy.
      copies = (copies.astype(np.float32) + noise).astype(dense.dtype)
    return copies

  def _statistics(self, name: str, wanted: Any, stored: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the optimizer's statistics for the experts, None if the dense block's do not serve them."""
    if self.granularity > 1:
      return None
    source = _dense_name(name)
    # Adafactor calls the statistics of the larger dim v_row or v_col by rules that depend on the rank.
    swapped = {'v_row': 'v_col', 'v_col': 'v_row'}.get(source.rsplit('/', 1)[-1])
    candidates = [source] + ([f'{source.rsplit("/", 1)[0]}/{swapped}'] if swapped else [])
    for candidate in candidates:
      if candidate in stored:
        dense = np.asarray(stored[candidate])
        if dense.shape == tuple(wanted.shape):
          return dense  # A number for the whole parameter, or the placeholder of a statistic that is not kept.
        copies = self._stack(name, dense, tuple(wanted.shape))
        if copies is not None:
          return copies
    return None

  def _stack(self, name: str, dense: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns copies (or slices of copies) of `dense` in an array of `shape`, None if they do not fit it."""
    slices = self._slices(name, dense)
    if slices is None or not shape or shape[0] % len(slices):
      return None
    slices *= shape[0] // len(slices)
    # Kernels of three dims have one over layers; of other arrays the shape tells.
    forms = (_layers_second, np.stack) if dense.ndim > 2 else (np.stack, _layers_second)
    for stack in forms:
      stacked = stack(slices)
      if stacked is not None and stacked.shape == shape:
        return np.ascontiguousarray(stacked)
    return None

  def _slices(self, name: str, dense: np.ndarray) -> list[np.ndarray] | None:
    if self.granularity == 1:
      return [dense]
    is_output, is_bias = '/wo/' in name, name.endswith('/bias')
    if is_output and is_bias:
      # Every slice adds it with a gate of a g-th.
      return [dense] * self.granularity
    axis = dense.ndim - 1 if not is_output else 0
    if dense.shape[axis] % self.granularity:
      return None
    slices = np.split(dense, self.granularity, axis)
    return [s * np.asarray(self.granularity, s.dtype) for s in slices] if is_output else slices

  def _expert_shape(self, name: str, dense: np.ndarray) -> str:
    slices = self._slices(name, dense)
    return (f'shape {slices[0].shape}' if slices is not None
            else f'a {self.granularity}th of its hidden units, which {self.granularity} does not divide')

  def _router(self, name: str, wanted: Any) -> np.ndarray:
    """Returns a new router; biases are zero, and the slices of a copy share their column."""
    shape = tuple(wanted.shape)
    if not name.endswith('/kernel'):
      return np.zeros(shape, wanted.dtype)
    if shape[-1] % self.granularity:
      raise errors.CheckpointError(f'Cannot upcycle: {name} is for {shape[-1]} experts, which granularity='
                                   f'{self.granularity} does not divide. Change num_experts or granularity.')
    rng = np.random.default_rng([self.seed, zlib.crc32(_without_part(name).encode())])
    columns = rng.standard_normal((*shape[:-1], shape[-1] // self.granularity), np.float32) * self.router_init_stddev
    return np.repeat(columns, self.granularity, axis=-1).astype(wanted.dtype)


def _layers_second(slices: list[np.ndarray]) -> np.ndarray | None:
  """Returns stacked slices of arrays whose dim 1 is over layers with that dim in place 1 again, None without it."""
  if slices[0].ndim < 2:
    return None
  return np.stack([np.moveaxis(s, 1, 0) for s in slices])


def _part(name: str) -> str | None:
  """Returns 'expert' or 'router' for what belongs to a sparse block, else None."""
  parts = name.split('/')
  if _ROUTER in parts:
    return _ROUTER
  return _EXPERT if _EXPERT in parts else None


def _dense_name(name: str) -> str:
  """Returns the name of the dense parameter (or of its state) that an expert's is made of."""
  return '/'.join(part for part in name.split('/') if part != _EXPERT)


def _without_part(name: str) -> str:
  """Returns the name without the part of the state, so that a running average gets the noise of its parameter."""
  return name.split('/', 1)[1]


def _check(stored: Mapping[str, Any], new: Mapping[str, Any]) -> None:
  """Refuses states that are not a dense one and a sparse one of the same network."""
  if not any(_part(name) == _EXPERT for name in new):
    raise errors.CheckpointError('Cannot upcycle: the wanted model has no experts. Give its network sparse layers '
                                 '(moe.SparseFeedForward), or leave moe.upcycle out of state_transformation_fns.')
  already = [name for name in stored if _part(name) == _EXPERT]
  if already:
    raise errors.CheckpointError(f'Cannot upcycle: the checkpoint has experts already ({already[0]}). Leave '
                                 'moe.upcycle out of state_transformation_fns; python -m moe surgery changes their number.')
  for name in new:
    if name.startswith(_PARAM_TREES[0]) and _part(name) == _EXPERT and _dense_name(name) not in stored:
      dense = _dense_name(name)
      raise errors.CheckpointError(f'Cannot upcycle: {name} is made of {dense}, which the checkpoint does not hold.'
                                   f'{errors.did_you_mean(dense, stored)} Give the checkpoint of a dense model with '
                                   'the same layers and activations.')


def _log(new: Mapping[str, Any], copied: list[str], afresh: list[str]) -> None:
  layers = {name.rsplit(f'/{_EXPERT}/', 1)[0] for name in new
            if name.startswith(_PARAM_TREES[0]) and _part(name) == _EXPERT}
  _logger.info('Upcycled the feed-forward blocks of %d layers. Optimizer state of experts: %d arrays are copies, %d of '
               'experts and routers start at zero%s.', len(layers), len(copied), len(afresh),
               f' ({", ".join(afresh[:3])}{", ..." if len(afresh) > 3 else ""})' if afresh else '')
