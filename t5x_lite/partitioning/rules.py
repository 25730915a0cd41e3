"""Logical axis rules: the mesh axis over which each named dim of a parameter or an activation is sharded.

A model names the dims of its arrays (`embed`, `mlp`, `heads`, ...). A rule is a pair (logical axis, mesh axis), and an
ordered list of rules decides for every array, so the sharding can change without changing the model. `resolve` follows
Flax (`flax.linen.partitioning.logical_to_mesh_axes`) and also returns the rule that decided, for reports.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools

import jax
from jax.sharding import PartitionSpec

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.types import LogicalAxisRules

# A mesh axis, a tuple of mesh axes (the dim is sharded over their product), or None (replicated).
MeshAxis = str | tuple[str, ...] | None

# Dims of optimizer state that no model has: those of Shampoo's and SOAP's matrices. A rule of the user has precedence.
# By default stacks of matrices are sharded over as many devices as divide them, then rows over those that are left; the
# few numbers of one parameter are replicated.
STACK_AXIS = 'optimizer_stack'
ROWS_AXIS = 'optimizer_rows'
BLOCKS_AXIS = 'optimizer_blocks'

# Remedy in the error for each logical axis without a rule; see `register_axis_remedy`.
_REMEDIES: dict[str, str] = {}


def register_axis_remedy(logical_axes: Iterable[str], remedy: str) -> None:
  """Register a remedy, shown in the error for a logical axis without a rule, of layers that need additional rules.

  Args:
    logical_axes: the axes.
    remedy: one or more complete sentences.
  """
  _REMEDIES.update(dict.fromkeys(logical_axes, remedy))


class AxisNames(tuple):
  """Tuple of logical axis names that JAX's tree functions treat as one leaf.

  >>> import jax
  >>> jax.tree.leaves({'kernel': AxisNames('embed', 'mlp')})
  [AxisNames('embed', 'mlp')]
  """

  def __new__(cls, *names: str | None):
    return tuple.__new__(cls, names)

  def __repr__(self) -> str:
    return f'AxisNames{tuple(self)!r}'


def standard_logical_axis_rules(
  activation_partitioning_dims: int = 1,
  parameter_partitioning_dims: int = 1,
  additional_rules: Sequence[tuple[str, MeshAxis]] | None = None,
) -> list[tuple[str, MeshAxis]]:
  """Return the rules for T5-like models on a mesh with the axes `data` and `model`.

  The batch is always sharded over `data`, and `heads`, `joined_kv`, `mlp` and `vocab` over `model`. The first two
  arguments decide the sharding of `embed`, the width of the residual stream:

  | activation dims | parameter dims | `embed` of activations | `embed` of parameters |
  |---|---|---|---|
  | 1 | 1 | replicated | replicated: only tensor parallelism |
  | 1 | 2 | replicated | `data`: parameters and optimizer state fully sharded (FSDP, ZeRO-3) |
  | 2 | 1 | `model` | `model`, except for parameters with another dim that is sharded over `model` |
  | 2 | 2 | `model` | `model`; `data` for parameters with another dim that is sharded over `model` |

  Args:
    activation_partitioning_dims: 1 or 2, the number of mesh axes that activations are sharded over.
    parameter_partitioning_dims: 1 or 2, the number of mesh axes that parameters are sharded over.
    additional_rules: rules appended to the standard ones, which have precedence.

  Returns:
    (logical axis, mesh axis or None) pairs in order of precedence.

  Raises:
    ConfigError: a number of dims other than 1 or 2, or an invalid additional rule.

  Reference: Xu et al. 2021, "GSPMD: General and Scalable Parallelization for ML Computation Graphs",
  https://arxiv.org/abs/2105.04663.
  """
  checks.check(
    'standard_logical_axis_rules',
    locals(),
    activation_partitioning_dims=checks.one_of((1, 2)),
    parameter_partitioning_dims=checks.one_of((1, 2)),
  )
  embed_rules: dict[tuple[int, int], list[tuple[str, MeshAxis]]] = {
    (1, 1): [],
    (1, 2): [('embed', 'data')],
    (2, 1): [('embed', 'model')],
    (2, 2): [('embed', 'model'), ('embed', 'data')],
  }
  rules: list[tuple[str, MeshAxis]] = [('batch', 'data'), ('vocab', 'model')]
  if activation_partitioning_dims == parameter_partitioning_dims == 1:
    rules.append(('embed', None))
  # `mlp` precedes `embed`: in an [embed, mlp] kernel `mlp` must get `model` first.
  rules += [('mlp', 'model'), ('heads', 'model'), ('kv', None), ('joined_kv', 'model')]
  rules += embed_rules[activation_partitioning_dims, parameter_partitioning_dims]
  rules += [
    (name, None)
    for name in (
      'relpos_buckets',
      'abspos_buckets',
      'length',
      'layers',
      'stack',
      'mlp_activations',
      'lora_rank',
    )
  ]
  return rules + list(freeze_rules(additional_rules or ()))


def freeze_rules(rules: Iterable[Sequence]) -> LogicalAxisRules:
  """Return `rules` as a tuple of (str, str | tuple | None) pairs; rules may be lists, as gin gives them.

  Raises:
    ConfigError: an entry is not a pair of a name and a mesh axis, a sequence of mesh axes, or None.
  """
  frozen = []
  for rule in rules:
    is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)
    mesh_axis = None
    if is_pair:
      mesh_axis = rule[1]
    if isinstance(mesh_axis, (tuple, list)):
      mesh_axis = tuple(mesh_axis)
    if not is_pair or not all(isinstance(axis, str) for axis in axes_of(mesh_axis)):
      raise checks.invalid(
        '',
        'logical_axis_rules',
        "pairs such as ('embed', 'data'), ('batch', ('expert', 'data')) or ('length', None)",
        rule,
      )
    frozen.append((rule[0], mesh_axis))
  return tuple(frozen)


def axes_of(entry: MeshAxis) -> tuple[str, ...]:
  """Return the mesh axes of one entry of a PartitionSpec as a tuple.

  >>> axes_of(None), axes_of('data'), axes_of(('expert', 'data'))
  ((), ('data',), ('expert', 'data'))
  """
  if entry is None:
    return ()
  if isinstance(entry, (tuple, list)):
    return tuple(entry)
  return (entry,)


def num_shards(entry: MeshAxis, mesh_shape: Mapping[str, int]) -> int:
  """Return the number of pieces of a dim with this PartitionSpec entry.

  Args:
    entry: mesh axis or axes of the dim.
    mesh_shape: size of each mesh axis.
  """
  count = 1
  for axis in axes_of(entry):
    count *= mesh_shape[axis]
  return count


def check_mesh_axes(owner: str, spec: Iterable[MeshAxis], mesh_axis_names: Iterable[str]) -> None:
  """Raise ConfigError if an entry of `spec` names a mesh axis that the mesh does not have.

  Args:
    owner: name of the option or array, for the error.
    spec: PartitionSpec, or other mesh axes.
    mesh_axis_names: axes of the mesh.
  """
  for axis in itertools.chain.from_iterable(map(axes_of, spec)):
    if axis not in mesh_axis_names:
      raise checks.invalid(
        '',
        owner,
        f'one of the mesh axes {tuple(mesh_axis_names)}',
        axis,
        errors.did_you_mean(str(axis), mesh_axis_names).strip(),
      )


def check_rules(rules: LogicalAxisRules, mesh_axis_names: Sequence[str]) -> None:
  """Raise ConfigError if a rule names a mesh axis that the mesh does not have."""
  for logical_axis, mesh_axis in rules:
    check_mesh_axes(f'logical_axis_rules[{logical_axis!r}]', [mesh_axis], mesh_axis_names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DimDecision:
  """Mesh axis of one dim of an array, and the rule that decided it.

  Attributes:
    logical_axis: the dim's logical axis, None if it has none.
    mesh_axis: mesh axis or axes of the dim, None if it is replicated.
    rule: the rule that decided; None if the dim has no name or all its rules are blocked or indivisible.
    blocked: earlier rules for this dim whose mesh axes another dim of the same array has.
    indivisible: earlier rules for this dim whose mesh axes do not divide it.
  """

  logical_axis: str | None
  mesh_axis: MeshAxis
  rule: tuple[str, MeshAxis] | None
  blocked: tuple[tuple[str, MeshAxis], ...]
  indivisible: tuple[tuple[str, MeshAxis], ...] = ()


def resolve(
  logical_axes: Sequence[str | None],
  rules: LogicalAxisRules,
  name: str = 'array',
  shape: Sequence[int] | None = None,
  mesh_shape: Mapping[str, int] | None = None,
) -> tuple[DimDecision, ...]:
  """Apply `rules` in order to the dims of one array.

  The first rule decides whose mesh axes are free and, if the shape is given, divide the dim.

  Args:
    logical_axes: one logical axis name, or None, per dim.
    rules: (logical axis, mesh axis or axes or None) pairs in order of precedence.
    name: name of the array, for errors.
    shape: the array's global shape, or None; needs `mesh_shape`.
    mesh_shape: mesh axis name to size.

  Returns:
    One decision per dim.

  Raises:
    ConfigError: a logical axis without a rule, or one that occurs twice.
  """
  logical_axes = tuple(logical_axes)
  known = {logical_axis for logical_axis, _ in rules}
  for axis in filter(None, logical_axes):
    problem = ''
    if axis not in known:
      remedy = _REMEDIES.get(axis) or (
        f"Add ('{axis}', MESH_AXIS or None) to logical_axis_rules.{errors.did_you_mean(str(axis), known)}"
      )
      problem = f'no rule for logical axis {axis!r} of {logical_axes}. {remedy} Rules: {format_rules(rules)}'
    elif logical_axes.count(axis) > 1:
      problem = f'logical axes must be distinct, got {axis!r} more than once in {logical_axes}'
    if problem:
      raise errors.ConfigError(f'{name}: {problem}.')
  decided: dict[int, tuple[str, MeshAxis]] = {}
  blocked: dict[int, list[tuple[str, MeshAxis]]] = {}
  indivisible: dict[int, list[tuple[str, MeshAxis]]] = {}
  taken: set[str] = set()
  for rule in rules:
    logical_axis, mesh_axis = rule
    if logical_axis not in logical_axes:
      continue
    dim = logical_axes.index(logical_axis)
    if dim in decided:
      continue
    if taken.intersection(axes_of(mesh_axis)):
      blocked.setdefault(dim, []).append(rule)
      continue
    if shape is None or mesh_shape is None:
      is_divisible = True
    else:
      is_divisible = shape[dim] % num_shards(mesh_axis, mesh_shape) == 0
    if not is_divisible:
      indivisible.setdefault(dim, []).append(rule)
      continue
    decided[dim] = rule
    taken.update(axes_of(mesh_axis))
  decisions = []
  for dim, axis in enumerate(logical_axes):
    mesh_axis = None
    if dim in decided:
      _, mesh_axis = decided[dim]
    decisions.append(
      DimDecision(
        logical_axis=axis,
        mesh_axis=mesh_axis,
        rule=decided.get(dim),
        blocked=tuple(blocked.get(dim, ())),
        indivisible=tuple(indivisible.get(dim, ())),
      )
    )
  return tuple(decisions)


def with_optimizer_rules(
  rules: LogicalAxisRules,
  logical_axes: Sequence[str | None],
  shape: Sequence[int],
  mesh_shape: Mapping[str, int],
  name: str = 'array',
) -> LogicalAxisRules:
  """Return `rules` with rules appended for dims that only optimizer state has, unless `rules` mentions these dims.

  Args:
    rules: (logical axis, mesh axis or axes or None) pairs.
    logical_axes: one logical axis name, or None, per dim of the array.
    shape: the array's shape.
    mesh_shape: mesh axis name to size.
    name: name of the array, for errors.

  Raises:
    ConfigError: see `resolve`.

  >>> with_optimizer_rules((), ['optimizer_stack', 'optimizer_rows', None], [12, 8, 8], {'data': 4, 'model': 2})
  (('optimizer_stack', ('data',)), ('optimizer_rows', ('model',)))
  """
  known = {logical_axis for logical_axis, _ in rules}
  own = {STACK_AXIS, ROWS_AXIS, BLOCKS_AXIS}.intersection(logical_axes) - known
  if not own:
    return rules
  # The other dims, such as that of experts, have precedence.
  others = [None if axis in own else axis for axis in logical_axes]
  taken = set()
  for decision in resolve(others, rules, name, shape, mesh_shape):
    taken.update(axes_of(decision.mesh_axis))
  for axis, size in zip(logical_axes, shape, strict=False):
    if axis not in own:
      continue
    mesh_axis = None
    if axis != BLOCKS_AXIS:
      free = {each: number for each, number in mesh_shape.items() if each not in taken}
      mesh_axis = _most_shards(size, free)
    taken.update(axes_of(mesh_axis))
    rules = (*rules, (axis, mesh_axis))
  return rules


def _most_shards(size: int, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
  """Return the mesh axes that divide a dim of this size into the most shards; None if no axis divides it.

  Of equal choices it is the one with the most axes.
  """
  best = None
  largest = 0
  for count in range(len(mesh_shape), 0, -1):
    for axes in itertools.combinations(mesh_shape, count):
      shards = num_shards(axes, mesh_shape)
      if size % shards == 0 and shards > largest:
        best = axes
        largest = shards
  return best


def logical_to_mesh_axes(
  logical_axes: Sequence[str | None], rules: LogicalAxisRules, name: str = 'array'
) -> PartitionSpec:
  """Return the PartitionSpec of mesh axes of an array with these logical axes.

  Args:
    logical_axes: one logical axis name, or None, per dim.
    rules: (logical axis, mesh axis or axes or None) pairs in order of precedence.
    name: name of the array, for errors.

  >>> logical_to_mesh_axes(('embed', 'mlp'), standard_logical_axis_rules(1, 2))
  P('data', 'model')

  Raises:
    ConfigError: see `resolve`.
  """
  return PartitionSpec(*(decision.mesh_axis for decision in resolve(logical_axes, rules, name)))


def check_divisible(
  name: str,
  shape: Sequence[int],
  spec: Sequence[MeshAxis],
  mesh_shape: Mapping[str, int],
  logical_axes: Sequence[str | None] | None = None,
) -> None:
  """Raise ConfigError unless an array of `shape` can be divided evenly as `spec` says.

  Args:
    name: name of the array, for errors.
    shape: the array's global shape.
    spec: mesh axes, at most one entry per dim.
    mesh_shape: mesh axis name to size.
    logical_axes: the logical axes that led to `spec`, for errors.
  """
  check_mesh_axes(name, spec, mesh_shape)
  for dim, (size, entry) in enumerate(zip(shape, spec, strict=False)):
    pieces = num_shards(entry, mesh_shape)
    if size % pieces:
      called = ''
      if logical_axes is not None and logical_axes[dim] is not None:
        called = f' ({logical_axes[dim]!r})'
      raise errors.ConfigError(
        f'{name}: dim {dim}{called} of shape {tuple(shape)} must be a multiple of {pieces}, the size of mesh axis '
        f'{entry!r} in {dict(mesh_shape)}, got {size}. Change the size (round a vocabulary up), use fewer '
        'partitions, or replicate the dim by a rule.'
      )


def format_mesh_axis(entry: MeshAxis) -> str:
  """Return a mesh axis as text: `data`, `expert*data`, or `-` for replicated."""
  return '*'.join(axes_of(entry)) or '-'


def format_rules(rules: LogicalAxisRules) -> str:
  """Return rules as one line of text: `batch->data, embed->-`."""
  return ', '.join(
    f'{logical_axis}->{format_mesh_axis(mesh_axis)}' for logical_axis, mesh_axis in rules
  )


def global_mesh_defined() -> bool:
  """Return True if a mesh is in context (`jax.set_mesh`), including inside a traced function."""
  return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x, axis_resources):
  """Constrain the sharding of `x` to mesh axes if a mesh is in context, else return `x`.

  Unlike T5X's function, this has an effect on CPU too. Model code constrains *logical* axes instead, through
  `flax.linen.partitioning.with_sharding_constraint`.

  Args:
    x: pytree of arrays.
    axis_resources: PartitionSpec of mesh axes, or a pytree (prefix) of them; None returns `x` unchanged.

  Returns:
    `x`, constrained; same shapes and dtypes.
  """
  if axis_resources is None or not global_mesh_defined():
    return x
  return jax.lax.with_sharding_constraint(x, axis_resources)
