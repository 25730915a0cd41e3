"""Sparse upcycling: a sparse model starts from a dense checkpoint, by a builder of the state.

Komatsuzaki et al. 2022, "Sparse Upcycling", https://arxiv.org/abs/2212.05055, section 2; granular experts: He et
al. 2024, https://arxiv.org/abs/2410.07524, section 4.

  checkpoints.RestoreCheckpointConfig.builders = [@moe.upcycle()]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import copy
import dataclasses
import logging
import math
import re
from typing import Any
import zlib

import numpy as np

from moe import expert_state
from moe.expert_state import PARAM_STATES
from moe.expert_state import PARAM_TREES
from moe.expert_state import ArrayName
from moe.expert_state import Change
from moe.expert_state import Dims
from t5x_lite import checkpoints
from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import builders
from t5x_lite.checkpoints.restoring import lazy_arrays
from t5x_lite.formatting import first_names
from t5x_lite.layers import low_rank

_logger = logging.getLogger(__name__)

_ROUTER_STDDEV = 0.02
# Blocks other than experts that a sparse model may add: (expression, replacement that gives the dense block).
_EXTRA_BLOCKS = (
  (re.compile(r'/mlp/shared_mlp/'), '/mlp/'),
  (re.compile(r'/extra_mlp/'), '/mlp/'),
  (re.compile(r'/pre_extra_mlp_layer_norm/'), '/pre_mlp_layer_norm/'),
)


def upcycle(
  granularity: int = 1,
  noise_stddev: float = 0.0,
  router_init_stddev: float = _ROUTER_STDDEV,
  seed: int = 0,
) -> checkpoints.StateBuilder:
  """Return a builder that copies the feed-forward blocks of a dense model to experts of a sparse model.

  Each expert `<layer>/mlp/expert/wi/kernel` is a copy of `<layer>/mlp/wi/kernel`, or with `granularity` g the s-th of g
  slices of its hidden units: expert r * g + s is slice s of copy r. Routers are new; other parameters are unchanged.

  At step 0 the sparse model computes the dense one's function if nothing is dropped, there is no noise, and the gates
  of a token sum to 1 (`normalize_gates=True`). With g above 1 a token must choose a multiple of g experts: the routers
  of the g slices of a copy are equal, so that a token that chooses one of them chooses all, and output kernels are
  multiplied by g, because each slice gets 1/g of the gate. With soft routing experts receive means of tokens, so the
  function differs, and g must be 1 if an expert has several slots.

  Other new parameters of the sparse model contribute nothing at first: biases of experts are zero; a block for all
  tokens (`shared_expert_dim`) and a second block (`extra_mlp`) have the dense block's input kernels (repeated or cut to
  their number of hidden units) and output kernels of zero.

  The step, and the optimizer state of unchanged parameters, are kept bitwise. An expert starts with the statistics of
  the parameter of which it is a copy, because statistics of zero at a late step would cause large updates of adaptive
  optimizers; statistics of slices' output kernels are divided by the same power of g as their gradients. Routers, extra
  blocks, and statistics of other shapes start as in a new optimizer: at zero, or, if the optimizer keeps values of the
  parameter, as the parameter. The log lists both. State whose initial value cannot be inferred from its name (that of
  adagrad and Shampoo, for example) needs `RestoreCheckpointConfig.fallback_to_scratch=True`; the error says so. State
  of another optimizer raises an error, as in any restore.

  Args:
    granularity: number of slices of a dense block; each slice becomes an expert with that part of the hidden units.
    noise_stddev: standard deviation of the noise on all experts except those of the first copy, relative to the
      standard deviation of each kernel; 0 for exact copies.
    router_init_stddev: standard deviation of the new routers' kernels.
    seed: seed of noise and routers.

  Returns:
    A builder on shapes, which is also a function with T5X's signature, `fn(state_dict, target_state_dict, *,
    is_resuming) -> state_dict`, on nested dicts of NumPy arrays. It does nothing if a run resumes from its own
    checkpoint, and raises CheckpointError if the checkpoint does not fit the sparse model.

  Raises:
    ConfigError: an invalid option.
  """
  checks.check(
    'upcycle',
    locals(),
    granularity=checks.number(at_least=1, integer=True),
    noise_stddev=checks.number(at_least=0),
    router_init_stddev=checks.number(at_least=0),
    seed=checks.number(at_least=0, integer=True),
  )
  return _Upcycle(granularity, float(noise_stddev), float(router_init_stddev), seed)


@dataclasses.dataclass(frozen=True)
class _Upcycle(checkpoints.StateBuilder):
  """The builder that `upcycle` returns."""

  granularity: int
  noise_stddev: float
  router_init_stddev: float
  seed: int

  @property
  def description(self) -> str:
    """See `StateBuilder.description`."""
    return 'upcycling'

  def build(self, state: builders.BuiltState, target: builders.TargetState) -> builders.BuiltState:
    """See `StateBuilder.build`."""
    if target.is_resuming:
      return state
    upcycling = _Upcycling(self, state.arrays, target.wanted)
    result = state.replace(arrays=upcycling.run())
    if target.has_values:
      upcycling.log()
    return result

  def __call__(self, state_dict, target_state_dict, *, is_resuming=False):
    """See `upcycle`."""
    if is_resuming:
      return dict(state_dict)
    flat_target = tree_utils.flatten_dict(target_state_dict)
    wanted = {name: leaf for name, leaf in flat_target.items() if leaf is not None}
    target = builders.TargetState(state_dict=target_state_dict, wanted=wanted)
    state = builders.BuiltState(arrays=tree_utils.flatten_dict(state_dict))
    built = self.build(state, target)
    return tree_utils.unflatten_dict(lazy_arrays.read(built.arrays, {}))

  def rng(self, path: str) -> np.random.Generator:
    """Return the random generator of a parameter, the same for all arrays with values of it."""
    return np.random.default_rng([self.seed, zlib.crc32(path.encode())])


class _Upcycling:
  """One upcycling: the new arrays and their sources."""

  def __init__(self, options: _Upcycle, stored: Mapping[str, Any], wanted: Mapping[str, Any]):
    self._options = options
    self._stored = stored
    self._wanted = wanted
    # Values of dense arrays by name while a new array is computed; None while only shapes are computed.
    self._values: Mapping[str, np.ndarray] | None = None
    # Names of the dense arrays of which the shapes of a new array were computed.
    self._used: list[str] = []
    # Names of optimizer state.
    self._copied: list[str] = []
    self._new: list[str] = []
    self._left: list[str] = []
    self._dense = expert_state.params_of(stored)
    self._sparse = expert_state.params_of(wanted)
    # Path of each new parameter -> path of its dense source, None for routers and biases.
    self._sources = {path: self._source(path) for path in self._sparse if self._is_new(path)}
    self._experts: set[str] = set()
    # Parameters of dense blocks that experts replace.
    self._replaced: set[str] = set()
    for path, source in self._sources.items():
      found = expert_state.split_path(path)
      if found is None or found[1] != expert_state.EXPERT:
        continue
      self._experts.add(path)
      if source is not None:
        self._replaced.add(source)

  def _is_new(self, path: str) -> bool:
    if expert_state.split_path(path) is not None:
      return True
    if path in self._dense:
      return False
    return any(pattern.search(f'/{path}/') for pattern, _ in _EXTRA_BLOCKS)

  def _source(self, path: str) -> str | None:
    found = expert_state.split_path(path)
    if found is not None and found[1] == expert_state.ROUTER:
      return None
    if found is not None:
      dense = f'{found[0]}/{found[2]}'
    else:
      dense = path
      for pattern, replacement in _EXTRA_BLOCKS:
        dense = pattern.sub(replacement, dense)
    if path.endswith('/bias') and dense not in self._dense:
      return None
    return dense

  def run(self) -> dict[str, Any]:
    """Return the flat sparse state; its new arrays are lazy."""
    self._check()
    new_names = expert_state.ArrayNames(self._sources)
    dense_names = expert_state.ArrayNames(self._replaced)
    result = {}
    for name, leaf in self._stored.items():
      if name.startswith(PARAM_STATES):
        wanted = self._wanted.get(name)
        if wanted is None and dense_names.split(name) is not None:
          continue
        if wanted is not None and tuple(wanted.shape) != tuple(leaf.shape):
          self._left.append(name)  # For example one number for each parameter of the model.
          continue
      elif name.startswith(PARAM_TREES) and name.split('/', 1)[1] in self._replaced:
        continue
      result[name] = leaf
    for name, leaf in self._wanted.items():
      split = new_names.split(name)
      value = None
      if split is None:
        is_new = name not in self._stored and expert_state.split_path(name) is not None
        if is_new and name.startswith(expert_state.MUTABLES):
          value = _zeros(leaf)
      elif name.startswith(PARAM_TREES):
        value = self._lazy_param(name, split.param, leaf)
      elif name.startswith(PARAM_STATES):
        value = self._lazy_state(name, split, leaf)
      if value is not None:
        result[name] = value
    return result

  def _lazy_param(self, name: str, path: str, wanted: Any) -> lazy_arrays.ComputedArray | None:
    """Return a new array of one of the trees of parameters."""
    tree = name.split('/', 1)[0]
    return self._lazy(lambda each: each._param(path, f'{tree}/', wanted))

  def _lazy_state(
    self, name: str, split: ArrayName, wanted: Any
  ) -> lazy_arrays.ComputedArray | None:
    """Return new optimizer state, None if it is unknown; take note of its origin."""
    _, is_copied = self._state(split, wanted)
    value = self._lazy(lambda each: each._state(split, wanted)[0])
    if value is None:
      self._left.append(name)
    elif is_copied:
      self._copied.append(name)
    else:
      self._new.append(name)
    return value

  def _lazy(
    self, make_fn: Callable[[_Upcycling], np.ndarray | None]
  ) -> lazy_arrays.ComputedArray | None:
    """Return the array that `make_fn` makes; None if it makes none."""
    self._used.clear()
    blank = make_fn(self)
    if blank is None:
      return None
    names = tuple(dict.fromkeys(self._used))

    def compute(*arrays):
      with_values = copy.copy(self)
      with_values._values = dict(zip(names, arrays, strict=True))
      array = make_fn(with_values)
      assert array is not None  # Whether there is an array depends on shapes, as above.
      return array

    return lazy_arrays.ComputedArray(
      shape=blank.shape,
      dtype=blank.dtype,
      compute_fn=compute,
      inputs=tuple(self._stored[name] for name in names),
    )

  def _stored_array(self, name: str) -> np.ndarray:
    """Return a dense array, or a blank array while only shapes are computed."""
    if self._values is not None:
      return self._values[name]
    self._used.append(name)
    leaf = self._stored[name]
    return _blank(tuple(leaf.shape), leaf.dtype)

  def _param(self, path: str, prefix: str, wanted: Any) -> np.ndarray:
    """Return a new parameter, made of the arrays of the state whose names start with `prefix`."""
    shape = tuple(wanted.shape)
    source = self._sources[path]
    if source is None:
      if path.endswith('/kernel'):
        return self._router(path, shape, wanted.dtype)
      return np.zeros(shape, wanted.dtype)
    dense = self._stored_array(f'{prefix}{source}')
    if path in self._experts:
      return self._expert(path, dense, shape)
    return self._extra(path, dense, shape)

  def _expert(self, path: str, dense: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    granularity = self._options.granularity
    dims = expert_state.dims_of(path, len(shape))
    lifted = _lift(dense, _dense_dims(dims), dims, shape[0] // granularity)
    if lifted is None or shape != self._expert_shape(lifted, dims, shape[0]):
      raise self._other_shapes(
        path,
        dense.shape,
        shape,
        f"granularity={granularity} must divide the number of experts, and expert_dim must be the dense block's "
        f'divided by {granularity}. Change the sizes of the sparse model, or granularity.',
      )
    if self._values is None:
      return _blank(shape, dense.dtype)
    experts = lifted
    if granularity > 1:
      experts = expert_state.change_param(path, lifted, self._slices(shape[0]))
      assert experts is not None  # Slices are not averaged.
    experts = np.ascontiguousarray(experts)
    if self._options.noise_stddev:
      stddev = self._options.noise_stddev * np.std(dense.astype(np.float32))
      noise = self._options.rng(path).standard_normal(experts.shape, np.float32) * stddev
      noise[:granularity] = 0  # The first copy.
      experts = (experts.astype(np.float32) + noise).astype(dense.dtype)
    return experts

  def _expert_shape(
    self, lifted: np.ndarray, dims: Dims, num_experts: int
  ) -> tuple[int, ...] | None:
    """Return the shape of the experts; None if sizes are no multiples of the granularity."""
    granularity = self._options.granularity
    sizes = dict(zip(dims, lifted.shape, strict=True)) | {'e': num_experts}
    if num_experts % granularity or sizes.get('f', 0) % granularity:
      return None
    if 'f' in sizes:
      sizes['f'] //= granularity
    return tuple(sizes.values())

  def _slices(self, num_experts: int) -> Change:
    granularity = self._options.granularity
    copies = np.arange(num_experts // granularity)
    return Change.of_index(np.repeat(copies, granularity), granularity)

  def _extra(self, path: str, dense: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter of an additional block, which contributes nothing at first."""
    if '/wo/' in path:
      return np.zeros(shape, dense.dtype)
    if len(shape) != dense.ndim or shape[:-1] != dense.shape[:-1]:
      raise self._other_shapes(
        path,
        dense.shape,
        shape,
        'give the checkpoint of a dense model of the same width.',
      )
    if self._values is None:
      return _blank(shape, dense.dtype)
    columns = np.arange(shape[-1]) % dense.shape[-1]
    return np.take(dense, columns, axis=-1)

  def _other_shapes(
    self, path: str, dense_shape: tuple[int, ...], shape: tuple[int, ...], remedy: str
  ) -> errors.CheckpointError:
    return errors.CheckpointError(
      f'Cannot upcycle {self._sources[path]} of shape {dense_shape} to {path} of shape {shape}: {remedy}'
    )

  def _router(self, path: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return a new router; the slices of a copy have equal columns."""
    granularity = self._options.granularity
    if self._values is None:
      return _blank(shape, dtype)
    num_columns = shape[-1] // granularity
    columns = self._options.rng(path).standard_normal((*shape[:-1], num_columns), np.float32)
    columns = columns * self._options.router_init_stddev
    return np.repeat(columns, granularity, axis=-1).astype(dtype)

  def _state(self, name: ArrayName, wanted: Any) -> tuple[np.ndarray | None, bool]:
    """Return (optimizer state of a new parameter or None if unknown, whether it is copied from the dense block)."""
    shape = tuple(wanted.shape)
    source = self._sources[name.param]
    if name.is_copy and shape == tuple(self._sparse[name.param].shape):
      prefix = f'{"/".join(name.before)}/'
      if source is None or f'{prefix}{source}' in self._stored:
        return self._param(name.param, prefix, wanted), source is not None
    if name.param in self._experts and source is not None:
      statistics = self._statistics(name, source, shape)
      if statistics is not None:
        return statistics, True
    if name.starts_at_zero:
      return np.zeros(shape, wanted.dtype), False
    return None, False

  def _statistics(self, name: ArrayName, source: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the optimizer's statistics for experts, None if those of the dense block have other dims."""
    param_shape = tuple(self._sparse[name.param].shape)
    dims = expert_state.dims_of(name.param, len(param_shape))
    kept = expert_state.state_dims(name, shape, param_shape, dims)
    for after in _names_of_same(name.after):
      dense_name = '/'.join((*name.before, source, *after))
      if dense_name not in self._stored:
        continue
      dense = self._stored_array(dense_name)
      if math.prod(shape) <= 1:
        # A number for the parameter, or the placeholder of a statistic that is not kept.
        if dense.shape == shape:
          return dense
        return None
      dense_shape = self._dense[source].shape
      dense_dims = _dense_dims(dims)
      found = expert_state.state_dims(
        dataclasses.replace(name, after=after), dense.shape, dense_shape, dense_dims
      )
      if kept is None or found is None or 'e' not in kept or set(found) != set(kept) - {'e'}:
        continue
      num_copies = shape[0] // self._options.granularity
      experts = _lift(dense, found, kept, num_copies)
      assert experts is not None  # `found` are the dims of `dense`.
      change = self._slices(shape[0])
      if change.slices > 1:
        # Shape of the parameter before slicing.
        sizes = dict(zip(dense_dims, dense_shape, strict=True)) | {'e': experts.shape[0]}
        unsliced = [sizes[dim] for dim in dims]
        experts = expert_state.change_state(name, experts, unsliced, change)
      if experts is not None and experts.shape == shape:
        if self._values is None:
          return _blank(shape, experts.dtype)
        return np.ascontiguousarray(experts)
    return None

  def _check(self) -> None:
    """Raise unless the states belong to a dense and a sparse variant of the same network, without adapters."""
    already = [path for path in self._dense if expert_state.split_path(path) is not None]
    if already or not self._experts:
      if already:
        problem = f'the checkpoint already has experts ({already[0]}); `python -m moe surgery` changes their number'
      else:
        problem = 'the network has no experts; give it sparse layers (moe.SparseFeedForward)'
      raise errors.CheckpointError(
        f'Cannot upcycle: {problem}. To restore without upcycling, remove moe.upcycle '
        'from the builders of RestoreCheckpointConfig.'
      )
    with_adapter = [path for path in self._sparse if path.endswith(f'/{low_rank.LORA_A}')]
    if with_adapter:
      raise errors.ConfigError(
        f'Cannot upcycle a model with an adapter ({with_adapter[0]}). Upcycle without adapters/lora.gin first, then '
        'fine-tune the sparse checkpoint with it.'
      )
    if self._options.granularity > 1:
      expert_state.check_routers(
        f'upcycle with granularity={self._options.granularity}', self._sparse, self._layers()
      )
    kept = {path: leaf for path, leaf in self._sparse.items() if path not in self._sources}
    needed = dict.fromkeys((*kept, *filter(None, self._sources.values())))
    missing = [path for path in needed if path not in self._dense]
    surplus = [path for path in self._dense if path not in kept and path not in self._replaced]
    other = []
    for path, leaf in kept.items():
      if path not in self._dense:
        continue
      stored = tuple(self._dense[path].shape)
      wanted = tuple(leaf.shape)
      if stored != wanted:
        other.append(f'{path} (stored {stored}, wanted {wanted})')
    problems = []
    for what, names in (
      ('missing from the checkpoint', missing),
      ('in the checkpoint only', surplus),
      ('of another shape', other),
    ):
      if names:
        problems.append(f'{what}: {first_names(names)}')
    if problems:
      raise errors.CheckpointError(
        f'Cannot upcycle: the models differ not only in their experts; {"; ".join(problems)}. Give the checkpoint of '
        'a dense model with the same layers, sizes and activations; assignment_map renames or drops names.'
      )

  def _layers(self) -> set[str]:
    """Return the paths of the sparse blocks."""
    return {expert_state.parts_of(path)[0] for path in self._experts}

  def log(self) -> None:
    """Log what `run` has done."""
    num_layers = len(self._layers())
    plural = ''
    if num_layers > 1:
      plural = 's'
    _logger.info('Upcycled the feed-forward blocks of %d layer%s.', num_layers, plural)
    for what, names in (
      ('copied from the dense blocks', self._copied),
      ('new', self._new),
      ('unknown; fallback_to_scratch=True initialises it', self._left),
    ):
      if names:
        _logger.info('Optimizer state %s: %s.', what, first_names(names))


def _zeros(leaf: Any) -> lazy_arrays.ComputedArray:
  """Return zeros of the shape and dtype of `leaf`."""
  return lazy_arrays.ComputedArray(
    shape=tuple(leaf.shape),
    dtype=np.dtype(leaf.dtype),
    inputs=(),
    compute_fn=lambda: np.zeros(leaf.shape, leaf.dtype),
  )


def _blank(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Return zeros that take no memory, for computations of shapes."""
  return np.broadcast_to(np.zeros((), dtype), shape)


def _dense_dims(dims: Dims) -> Dims:
  """Return the dims of the dense parameter, given those of the experts."""
  own = tuple(dim for dim in dims if dim not in 'el')
  if 'l' in dims:
    return expert_state.with_layers(own)
  return own


def repeat_for_experts(dense: np.ndarray, dims: Dims, num_experts: int) -> np.ndarray | None:
  """Return a view of a dense parameter with the dims of experts, `expert_state.dims_of`; None for another rank."""
  return _lift(dense, _dense_dims(dims), dims, num_experts)


def _lift(dense: np.ndarray, dims: Dims, wanted_dims: Dims, num_copies: int) -> np.ndarray | None:
  """Return a view of `dense` with the dims `wanted_dims`, where 'e' counts copies; None for another rank."""
  if len(dims) != dense.ndim:
    return None
  order = [dims.index(dim) for dim in wanted_dims if dim != 'e']
  ordered = dense.transpose(order)
  copies = np.broadcast_to(ordered, (num_copies, *ordered.shape))
  return np.moveaxis(copies, 0, wanted_dims.index('e'))


def _names_of_same(after: tuple[str, ...]) -> list[tuple[str, ...]]:
  """Return the names that a statistic of the dense parameter may have.

  Adafactor names v_row and v_col by the sizes of the dims of a matrix, but by axes for more than two dims.
  """
  if after == ('v_row',):
    return [after, ('v_col',)]
  if after == ('v_col',):
    return [after, ('v_row',)]
  return [after]
