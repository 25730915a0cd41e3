"""Logical axis rules: which mesh axis each named dim of a parameter or an activation is sharded over.

A model names the dims of its arrays (`embed`, `mlp`, `heads`, ...). A rule is a pair (logical axis, mesh axis), and an
ordered list of rules decides for every array; so a change of the sharding never touches the model. Resolution follows
Flax (`flax.linen.partitioning.logical_to_mesh_axes`), and `resolve` also says which rule decided, for reports.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools

import jax
from jax.sharding import PartitionSpec

from t5x_lite import errors
from t5x_lite.types import LogicalAxisRules

# A mesh axis, several of them (the dim is sharded over their product), or None (replicated).
MeshAxis = str | tuple[str, ...] | None

# Dims that no model has, only optimizers with arrays of their own (Shampoo's matrices): rules written for models do not
# mention them, and one that does comes first. Stacks of matrices are sharded over all devices that they divide over;
# the few numbers of one parameter are replicated.
STACK_AXIS = 'optimizer_stack'
BLOCKS_AXIS = 'optimizer_blocks'

# Logical axis to what to do if no rule mentions it; see `register_axis_remedy`.
_REMEDIES: dict[str, str] = {}


def register_axis_remedy(logical_axes: Iterable[str], remedy: str) -> None:
  """Register the remedy that the error for a logical axis without a rule names, for layers with their own rules.

  Args:
    logical_axes: the axes.
    remedy: sentences, with a full stop.
  """
  _REMEDIES.update(dict.fromkeys(logical_axes, remedy))


class AxisNames(tuple):
  """A tuple of logical axis names that JAX's tree functions take for one leaf.

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
    additional_rules: Sequence[tuple[str, MeshAxis]] | None = None) -> list[tuple[str, MeshAxis]]:
  """Returns the rules for T5-like models on a mesh with the axes `data` and `model`.

  The batch is always sharded over `data`, and `heads`, `joined_kv`, `mlp` and `vocab` over `model`. What becomes of
  `embed`, the width of the residual stream, is what the two numbers choose:

  | activation dims | parameter dims | `embed` of activations | `embed` of parameters |
  |---|---|---|---|
  | 1 | 1 | replicated | replicated: tensor parallelism alone |
  | 1 | 2 | replicated | `data`: parameters and optimizer state fully sharded (FSDP, ZeRO-3) |
  | 2 | 1 | `model` | `model`, where the other dim has not taken it |
  | 2 | 2 | `model` | `model` or, where that is taken, `data` |

  Args:
    activation_partitioning_dims: 1 or 2, the number of mesh axes that activations are sharded over.
    parameter_partitioning_dims: 1 or 2, the number of mesh axes that parameters are sharded over.
    additional_rules: rules appended at the end, so that the standard ones precede them.

  Returns:
    (logical axis, mesh axis or None) pairs in order of precedence.

  Raises:
    ConfigError: a number of dims other than 1 or 2, or a malformed additional rule.

  Reference: Xu et al. 2021, "GSPMD: General and Scalable Parallelization for ML Computation Graphs",
  https://arxiv.org/abs/2105.04663.
  """
  for name, dims in (('activation_partitioning_dims', activation_partitioning_dims),
                     ('parameter_partitioning_dims', parameter_partitioning_dims)):
    if dims not in (1, 2):
      raise errors.ConfigError(f'{name} is {dims!r}; expected 1 (shard over one mesh axis) or 2 (over both).')
  embed_rules: dict[tuple[int, int], list[tuple[str, MeshAxis]]] = {
      (1, 1): [],
      (1, 2): [('embed', 'data')],
      (2, 1): [('embed', 'model')],
      (2, 2): [('embed', 'model'), ('embed', 'data')],
  }
  rules: list[tuple[str, MeshAxis]] = [('batch', 'data'), ('vocab', 'model')]
  if activation_partitioning_dims == parameter_partitioning_dims == 1:
    rules.append(('embed', None))
  # `embed` comes after its partners: in an [embed, mlp] kernel `mlp` must get `model` first.
  rules += [('mlp', 'model'), ('heads', 'model'), ('kv', None), ('joined_kv', 'model')]
  rules += embed_rules[activation_partitioning_dims, parameter_partitioning_dims]
  rules += [(name, None) for name in
            ('relpos_buckets', 'abspos_buckets', 'length', 'layers', 'stack', 'mlp_activations')]
  return rules + list(freeze_rules(additional_rules or ()))


def freeze_rules(rules: Iterable[Sequence]) -> LogicalAxisRules:
  """Returns `rules` as a tuple of (str, str | tuple | None) pairs, lists (as gin gives them) included.

  Raises:
    ConfigError: an entry is not a pair of a name and a mesh axis, a sequence of mesh axes, or None.
  """
  frozen = []
  for rule in rules:
    is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)
    mesh_axis = rule[1] if is_pair else None
    if isinstance(mesh_axis, (tuple, list)):
      mesh_axis = tuple(mesh_axis)
    if not is_pair or not all(isinstance(axis, str) for axis in axes_of(mesh_axis)):
      raise errors.ConfigError(
          f'{rule!r} is not a logical axis rule; expected a pair such as (\'embed\', \'data\'), (\'batch\', '
          '(\'expert\', \'data\')) or (\'length\', None).')
    frozen.append((rule[0], mesh_axis))
  return tuple(frozen)


def axes_of(entry: MeshAxis) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a PartitionSpec as a tuple.

  >>> axes_of(None), axes_of('data'), axes_of(('expert', 'data'))
  ((), ('data',), ('expert', 'data'))
  """
  if entry is None:
    return ()
  return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def num_shards(entry: MeshAxis, mesh_shape: Mapping[str, int]) -> int:
  """Returns into how many pieces a dim with this PartitionSpec entry is cut."""
  count = 1
  for axis in axes_of(entry):
    count *= mesh_shape[axis]
  return count


def check_rules(rules: LogicalAxisRules, mesh_axis_names: Sequence[str]) -> None:
  """Raises ConfigError if a rule names a mesh axis that the mesh does not have."""
  for logical_axis, mesh_axis in rules:
    for axis in axes_of(mesh_axis):
      if axis not in mesh_axis_names:
        raise errors.ConfigError(
            f'The logical axis rule ({logical_axis!r}, {mesh_axis!r}) names mesh axis {axis!r}, which the mesh with '
            f'axes {tuple(mesh_axis_names)} lacks. Change logical_axis_rules, or build the mesh with that axis.'
            + errors.did_you_mean(axis, mesh_axis_names))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DimDecision:
  """How one dim of an array got its mesh axis.

  Attributes:
    logical_axis: the dim's logical axis, None if it has none.
    mesh_axis: what the dim is sharded over, None if it is replicated.
    rule: the rule that decided, None if no rule could (the dim has no name, or all its rules were blocked).
    blocked: earlier rules for this dim whose mesh axes another dim of the same array had taken already.
  """

  logical_axis: str | None
  mesh_axis: MeshAxis
  rule: tuple[str, MeshAxis] | None
  blocked: tuple[tuple[str, MeshAxis], ...]


def resolve(logical_axes: Sequence[str | None], rules: LogicalAxisRules,
            name: str = 'array') -> tuple[DimDecision, ...]:
  """Applies `rules` in order to the dims of one array: the first rule whose mesh axes are still free decides a dim.

  Args:
    logical_axes: one logical axis name, or None, per dim.
    rules: (logical axis, mesh axis or axes or None) pairs in order of precedence.
    name: the array's name, for errors.

  Returns:
    One decision per dim.

  Raises:
    ConfigError: a logical axis that no rule mentions, or one that occurs twice.
  """
  logical_axes = tuple(logical_axes)
  known = {logical_axis for logical_axis, _ in rules}
  for axis in logical_axes:
    if axis is None:
      continue
    if axis not in known:
      remedy = _REMEDIES.get(axis) or (
          f'Add (\'{axis}\', MESH_AXIS or None) to logical_axis_rules.{errors.did_you_mean(str(axis), known)}')
      raise errors.ConfigError(
          f'{name}: no rule for logical axis {axis!r} of {logical_axes}. {remedy} Rules: {format_rules(rules)}.')
    if logical_axes.count(axis) > 1:
      raise errors.ConfigError(
          f'{name}: logical axis {axis!r} occurs more than once in {logical_axes}; expected distinct names, since two '
          'dims of one array cannot be sharded over the same mesh axis. Rename one of them.')
  decided: dict[int, tuple[str, MeshAxis]] = {}
  blocked: dict[int, list[tuple[str, MeshAxis]]] = {}
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
    decided[dim] = rule
    taken.update(axes_of(mesh_axis))
  return tuple(
      DimDecision(logical_axis=axis, mesh_axis=decided[dim][1] if dim in decided else None, rule=decided.get(dim),
                  blocked=tuple(blocked.get(dim, ())))
      for dim, axis in enumerate(logical_axes))


def with_optimizer_rules(rules: LogicalAxisRules, logical_axes: Sequence[str | None], shape: Sequence[int],
                         mesh_shape: Mapping[str, int]) -> LogicalAxisRules:
  """Returns `rules`, with those for the optimizer's own dims of one array appended where no rule mentions them.

  Args:
    rules: (logical axis, mesh axis or axes or None) pairs.
    logical_axes: one logical axis name, or None, per dim of the array.
    shape: the array's shape.
    mesh_shape: mesh axis name to size.

  >>> with_optimizer_rules((), ['optimizer_stack', None], [12, 8], {'data': 4, 'model': 2})
  (('optimizer_stack', ('data',)),)
  """
  known = {logical_axis for logical_axis, _ in rules}
  for axis, size in zip(logical_axes, shape):
    if axis == STACK_AXIS and axis not in known:
      choices = [axes for count in range(len(mesh_shape), 0, -1) for axes in itertools.combinations(mesh_shape, count)
                 if size % num_shards(axes, mesh_shape) == 0]
      # The first of equals has the most axes.
      rules = (*rules, (axis, max(choices, key=lambda axes: num_shards(axes, mesh_shape), default=None)))
    elif axis == BLOCKS_AXIS and axis not in known:
      rules = (*rules, (axis, None))
  return rules


def logical_to_mesh_axes(logical_axes: Sequence[str | None], rules: LogicalAxisRules,
                         name: str = 'array') -> PartitionSpec:
  """Returns the PartitionSpec of mesh axes of an array with these logical axes.

  >>> logical_to_mesh_axes(('embed', 'mlp'), standard_logical_axis_rules(1, 2))
  P('data', 'model')

  Raises:
    ConfigError: see `resolve`.
  """
  return PartitionSpec(*(decision.mesh_axis for decision in resolve(logical_axes, rules, name)))


def check_divisible(name: str, shape: Sequence[int], spec: PartitionSpec, mesh_shape: Mapping[str, int],
                    logical_axes: Sequence[str | None] | None = None) -> None:
  """Raises ConfigError unless an array of `shape` can be cut evenly as `spec` says.

  Args:
    name: the array's name, for errors.
    shape: the array's global shape.
    spec: mesh axes, at most one entry per dim.
    mesh_shape: mesh axis name to size.
    logical_axes: the logical axes that led to `spec`, for errors.
  """
  if len(spec) > len(shape):
    raise errors.ConfigError(
        f'{name}: {spec} has {len(spec)} entries for an array of shape {tuple(shape)}; expected at most {len(shape)}. '
        'Give its dims as many logical axis names as there are dims.')
  for dim, (size, entry) in enumerate(zip(shape, spec)):
    for axis in axes_of(entry):
      if axis not in mesh_shape:
        raise errors.ConfigError(f'{name}: {spec} names mesh axis {axis!r}; the mesh has {dict(mesh_shape)}.'
                                 + errors.did_you_mean(axis, mesh_shape))
    pieces = num_shards(entry, mesh_shape)
    if size % pieces:
      called = ''
      if logical_axes is not None and logical_axes[dim] is not None:
        called = f' ({logical_axes[dim]!r})'
      raise errors.ConfigError(
          f'{name}: dim {dim}{called} of shape {tuple(shape)} has size {size}, which does not divide by {pieces}, the '
          f'size of mesh axis {entry!r} in {dict(mesh_shape)}. Choose a size that is a multiple of {pieces} (for a '
          'vocabulary: round the embedding up), fewer partitions, or a rule that leaves this dim replicated.')


def format_mesh_axis(entry: MeshAxis) -> str:
  """Returns a mesh axis for reading: `data`, `expert*data`, or `-` for replicated."""
  return '*'.join(axes_of(entry)) or '-'


def format_rules(rules: LogicalAxisRules) -> str:
  """Returns rules on one line for reading: `batch->data, embed->-`."""
  return ', '.join(f'{logical_axis}->{format_mesh_axis(mesh_axis)}' for logical_axis, mesh_axis in rules)


def global_mesh_defined() -> bool:
  """Whether a mesh is in context (`jax.set_mesh`), inside a traced function too."""
  return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x, axis_resources):
  """Constrains the sharding of `x` to mesh axes, where a mesh is in context; elsewhere returns `x`.

  Unlike T5X's, it holds on CPU too. Model code constrains *logical* axes instead, through
  `flax.linen.partitioning.with_sharding_constraint`.

  Args:
    x: pytree of arrays.
    axis_resources: PartitionSpec of mesh axes, or a pytree (prefix) of them; None leaves `x` as it is.

  Returns:
    `x`, constrained.
  """
  if axis_resources is None or not global_mesh_defined():
    return x
  return jax.lax.with_sharding_constraint(x, axis_resources)
