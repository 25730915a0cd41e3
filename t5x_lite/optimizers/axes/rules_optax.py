"""Rules for those states of optax, `optax.contrib` and `optax.experimental` whose axes their shapes do not tell.

A row of the table names a class, of any module of optax, and gives the kinds of fields, see `OptaxStatePartitionRules`.
Rows for classes or fields that the installed optax does not have are ignored. Statistics that lack a dim of their
parameter (factored) or have an additional one (low rank), and complex parameters that are split in two, have functions:
the names of their dims follow from the names and the shapes of the parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
from jax.sharding import PartitionSpec
import numpy as np
import optax

from t5x_lite.errors import ConfigError
from t5x_lite.optimizers.axes import kinds
from t5x_lite.optimizers.axes.kinds import ParamsLayout
from t5x_lite.optimizers.axes.kinds import StateRule
from t5x_lite.types import PyTree

# Shape of the unused one of a factored and an unfactored statistic.
_PLACEHOLDER_SHAPE = (1,)


def derive_factored(state: Any, layout: ParamsLayout) -> Any:
  """Return the axes of `optax.FactoredState` (optax's Adafactor): the names of the dims that the statistics have.

  Optax sums the squares of a gradient over its largest dim into `v_row` and over the second largest into `v_col`;
  all other dims remain. `v` has the statistics of parameters that are not factored.

  Reference: Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", section 3,
  https://arxiv.org/abs/1804.04235.

  Args:
    state: the state, fields `count` (scalar), `v_row`, `v_col` and `v` (an array per parameter, [1] where unused).
    layout: the parameters; their shapes are needed.

  Returns:
    The state with a `PartitionSpec` of logical names for each array.

  Raises:
    ConfigError: the layout has no shapes, or an array has another shape.
  """
  layout.require_params('FactoredState')
  axes = {
    field: kinds.map_params(
      _factored_axes(field, removed), getattr(state, field), layout, f'FactoredState.{field}'
    )
    for field, removed in (('v_row', -1), ('v_col', -2), ('v', None))
  }
  return type(state)(count=PartitionSpec(), **axes)


def _factored_axes(field: str, removed: int | None) -> kinds.PerParam:
  """Return the rule of a field; `removed` is the index, in the order of sizes, of the dim it lacks, None for `v`."""

  def derive(path: str, array: Any, axes: PartitionSpec, param: Any) -> PartitionSpec:
    shape = np.shape(param)
    names = tuple(axes)
    if removed is not None and len(shape) >= 2:
      # The same call as in optax, because the order of equal dims depends on NumPy's sort.
      dim = int(np.argsort(shape)[removed])
      shape = shape[:dim] + shape[dim + 1 :]
      names = names[:dim] + names[dim + 1 :]
    if np.shape(array) == shape and (removed is None or len(axes) >= 2):
      return PartitionSpec(*names)
    if np.shape(array) == _PLACEHOLDER_SHAPE:
      return PartitionSpec(None)
    raise ConfigError(
      f'FactoredState.{field} must have the shape {shape} or {_PLACEHOLDER_SHAPE} at {path!r} for a parameter of '
      f'shape {tuple(np.shape(param))}, got {tuple(np.shape(array))}. Does the state belong to these parameters?'
    )

  return derive


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LowRank:
  """Projection of one parameter in GaLore.

  Attributes:
    projector_axes: names of the projector's two dims.
    proxy_axes: names of the dims of the projected gradient.
    proxy_shape: shape of the projected gradient.
  """

  projector_axes: PartitionSpec
  proxy_axes: PartitionSpec
  proxy_shape: tuple[int, ...]


def derive_galore(state: Any, layout: ParamsLayout) -> Any:
  """Return the axes of `optax.contrib.GaLoreState`: the long dims of projectors and projected gradients have names.

  A parameter, reshaped to a matrix [m, n], is projected to the rank r along its longer dim: the projector is
  [max(m, n), r], and the base optimizer gets [r, n] or [m, r]. The rank is not sharded. If a dim of the matrix consists
  of several dims of the parameter, it has the name of the first named one.

  Reference: Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", section 3,
  https://arxiv.org/abs/2403.03507.

  Args:
    state: the state, fields `count` (scalar), `projector` (per parameter [max(m, n), r], or [0, 0] where it is not
      projected) and `base_optimizer_state` (the state of an optimizer of the projected parameters).
    layout: the parameters; their shapes are needed.

  Returns:
    The state with a `PartitionSpec` of logical names for each array.

  Raises:
    ConfigError: the layout has no shapes, or no matrix of the parameter's dims gives the projector's shape.
  """
  layout.require_params('GaLoreState')
  # Which dims are rows follows from the shapes of the base optimizer's copies of projected gradients.
  copies = [
    jax.tree.leaves(node) for node in _nodes_like(state.projector, state.base_optimizer_state)
  ]
  if copies:
    proxies_by_param = iter(zip(*copies, strict=True))
  else:
    proxies_by_param = itertools.repeat(())

  def describe(path: str, projector: Any, axes: PartitionSpec, param: Any) -> _LowRank:
    proxy_shapes = {np.shape(proxy) for proxy in next(proxies_by_param)}
    readings = list(_readings(np.shape(param), axes, np.shape(projector)))
    if np.shape(projector) == (0, 0):
      unprojected = _LowRank(
        projector_axes=PartitionSpec(None, None),
        proxy_axes=axes,
        proxy_shape=tuple(np.shape(param)),
      )
      readings.insert(0, unprojected)
    if not readings:
      raise ConfigError(
        f'GaLoreState.projector must have a shape that follows from the shape {tuple(np.shape(param))} of the '
        f'parameter {path!r}, got {tuple(np.shape(projector))}. Does the state belong to these parameters?'
      )
    return next(
      (reading for reading in readings if reading.proxy_shape in proxy_shapes), readings[0]
    )

  low_ranks = kinds.map_params(describe, state.projector, layout, 'GaLoreState.projector')
  proxies = dataclasses.replace(
    layout,
    axes=jax.tree.map(lambda low_rank: low_rank.proxy_axes, low_ranks),
    params=jax.tree.map(
      lambda low_rank: jax.ShapeDtypeStruct(low_rank.proxy_shape, np.float32), low_ranks
    ),
  )
  return type(state)(
    count=PartitionSpec(),
    base_optimizer_state=layout.derive(state.base_optimizer_state, proxies),
    projector=jax.tree.map(lambda low_rank: low_rank.projector_axes, low_ranks),
  )


def _nodes_like(tree: PyTree, node: Any) -> Iterator[PyTree]:
  """Yield the subtrees of `node` that have the structure of `tree`."""
  if jax.tree.structure(node) == jax.tree.structure(tree):
    yield node
  elif node is not None and not kinds.is_array(node):
    for child in kinds.children_of(node)[0].values():
      yield from _nodes_like(tree, child)


def _readings(
  shape: Sequence[int], axes: PartitionSpec, projector_shape: Sequence[int]
) -> Iterator[_LowRank]:
  """Yield the reshapings of a parameter to a matrix whose projector has the given shape, the usual ones first."""
  dims = range(len(shape))
  long_size, rank = projector_shape
  contiguous = [tuple(dims[:split]) for split in dims[1:]]
  scattered = []
  for size in dims[1:]:
    for rows in itertools.combinations(dims, size):
      if rows not in contiguous:
        scattered.append(rows)
  for rows in contiguous + scattered:
    columns = tuple(dim for dim in dims if dim not in rows)
    for first, second in ((rows, columns), (columns, rows)):
      m = math.prod(shape[dim] for dim in first)
      n = math.prod(shape[dim] for dim in second)
      if max(m, n) != long_size:
        continue
      m_name = _merged_name(shape, axes, first)
      n_name = _merged_name(shape, axes, second)
      if m >= n:
        yield _LowRank(
          projector_axes=PartitionSpec(m_name, None),
          proxy_axes=PartitionSpec(None, n_name),
          proxy_shape=(rank, n),
        )
      else:
        yield _LowRank(
          projector_axes=PartitionSpec(n_name, None),
          proxy_axes=PartitionSpec(m_name, None),
          proxy_shape=(m, rank),
        )


def _merged_name(shape: Sequence[int], axes: PartitionSpec, dims: Sequence[int]) -> str | None:
  """Return the name of merged dims: the first name of a dim with more than one element."""
  return next((axes[dim] for dim in dims if axes[dim] is not None and shape[dim] > 1), None)


def derive_split_complex(state: Any, layout: ParamsLayout) -> Any:
  """Return the axes of `optax.contrib.SplitRealAndImaginaryState`: both parts of a complex parameter have its axes.

  Args:
    state: the state, with the field `inner_state` of a transformation of pairs of real arrays.
    layout: the parameters; their dtypes are needed.

  Returns:
    The state with a `PartitionSpec` of logical names for each array.

  Raises:
    ConfigError: the layout has no parameters.
  """
  params = layout.require_params('SplitRealAndImaginaryState')

  def init(params: PyTree) -> PyTree:
    return params

  def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
    return updates, state

  # A transformation that returns its parameters as its state shows how optax splits them.
  revealing = optax.GradientTransformation(init, update)
  split = jax.eval_shape(optax.contrib.split_real_and_imaginary(revealing).init, params).inner_state
  split_axes = kinds.map_params(
    lambda path, halves, axes, param: jax.tree.map(lambda half: axes, halves),
    split,
    layout,
    'SplitRealAndImaginaryState',
  )
  inner = dataclasses.replace(layout, axes=split_axes, params=split)
  return type(state)(inner_state=layout.derive(state.inner_state, inner))


def derive_lookahead(state: Any, layout: ParamsLayout) -> Any:
  """Return the axes of `optax.LookaheadState`: the fast optimizer has the fast one of two parameter trees.

  Args:
    state: the state, fields `fast_state` and `steps_since_sync` (scalar).
    layout: the parameters: `optax.LookaheadParams`, or only the fast ones.

  Returns:
    The state with a `PartitionSpec` of logical names for each array.
  """
  return type(state)(
    fast_state=layout.derive(state.fast_state, _fast(layout)), steps_since_sync=PartitionSpec()
  )


def derive_lookahead_params(state: Any, layout: ParamsLayout) -> Any:
  """Return the axes of a pair of parameter trees in a state: the parameters' axes for both."""
  fast = _fast(layout)
  return type(state)(
    fast=kinds.derive_params(state.fast, fast, 'LookaheadParams.fast'),
    slow=kinds.derive_params(state.slow, fast, 'LookaheadParams.slow'),
  )


def _fast(layout: ParamsLayout) -> ParamsLayout:
  if not isinstance(layout.axes, optax.LookaheadParams):
    return layout
  params = layout.params
  if params is not None:
    params = params.fast
  return dataclasses.replace(layout, axes=layout.axes.fast, params=params)


# Class name to the kinds of its fields, or to a rule if fields depend on each other.
StateTable = Mapping[str, Mapping[str, str] | StateRule]

OPTAX_STATES: StateTable = {
  # Random keys.
  'AddNoiseState': {'rng_key': 'replicated'},
  'DifferentiallyPrivateAggregateState': {'rng_key': 'replicated'},
  'HutchinsonState': {'key': 'replicated'},
  # Short tables: one number for each of the tuner's betas; the coefficients, or those of each iteration.
  'MechanicState': dict.fromkeys(('r', 'm', 'v', 's'), 'replicated'),
  'MuonState': {'ns_coeffs': 'replicated'},
  # Results of users' functions: a number, a table, a copy of the updates. The first class is of older releases.
  'InjectHyperparamsState': {'hyperparams': 'matched'},
  'InjectStatefulHyperparamsState': {'hyperparams': 'matched', 'hyperparams_states': 'matched'},
  'MonitorState': {'measurements': 'matched', 'measure_states': 'matched'},
  'MultiStepsState': {'skip_state': 'matched'},
  'SnapshotState': {'measurement': 'matched'},
  # Copies of the parameters, and one number for each: [m, *shape], where m may be the size of a dim.
  'ScaleByLBFGSState': {
    'diff_params_memory': 'leading_dims',
    'diff_updates_memory': 'leading_dims',
    'weights_memory': 'replicated',
  },
  # States of other trees of parameters than the trained ones, and statistics that the sizes do not tell apart.
  'FactoredState': derive_factored,
  'GaLoreState': derive_galore,
  'LookaheadParams': derive_lookahead_params,
  'LookaheadState': derive_lookahead,
  'SplitRealAndImaginaryState': derive_split_complex,
}
