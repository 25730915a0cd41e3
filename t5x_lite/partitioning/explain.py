"""Report on the sharding of a train state: mesh axes and bytes per device of every array, and the rule that decided.

`PjitPartitioner.get_mesh_axes` takes the shardings from `make_report`, so the report and the run always agree.
`--dry_run`, `model-info.txt` and `explain_sharding` print it.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re

from jax.sharding import Mesh
from jax.sharding import PartitionSpec
import numpy as np

from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.formatting import format_bytes
from t5x_lite.formatting import format_table
from t5x_lite.partitioning import rules as rules_lib
from t5x_lite.types import LogicalAxisRules, PyTree

# Prefix of a train state's leaf path -> section of the report.
_SECTIONS = {
  '_optimizer/target/': 'parameters',
  'params/': 'parameters',
  '_optimizer/state/': 'optimizer state',
  'flax_mutables/': 'mutable collections',
  'param_average/': 'parameter average',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRow:
  """One array of a train state.

  Attributes:
    name: '/'-joined path within its section.
    section: `parameters`, `optimizer state`, `mutable collections`, `parameter average` or `other`.
    shape: global shape.
    dtype: NumPy dtype.
    logical_axes: PartitionSpec of logical axis names.
    mesh_axes: PartitionSpec of mesh axes.
    shard_shape: shape of the piece on one device.
    bytes_total: bytes of one copy of the array.
    bytes_per_device: bytes of the piece on one device.
    num_copies: number of devices that hold the same piece.
    replicated_over: mesh axes (of size > 1) over which the array is replicated.
    decisions: for each dim, the rule that decided.
  """

  name: str
  section: str
  shape: tuple[int, ...]
  dtype: np.dtype
  logical_axes: PartitionSpec
  mesh_axes: PartitionSpec
  shard_shape: tuple[int, ...]
  bytes_total: int
  bytes_per_device: int
  num_copies: int
  replicated_over: tuple[str, ...]
  decisions: tuple[rules_lib.DimDecision, ...]

  @property
  def is_indivisible(self) -> bool:
    """True if a rule does not divide its dim, so that a later rule decided or the dim is replicated."""
    return any(decision.indivisible for decision in self.decisions)

  def format_rules(self) -> str:
    """Return the rule of each named dim, e.g. `embed->data, mlp->model`, and the mesh axes that it could not have."""
    texts = []
    for decision in self.decisions:
      if decision.logical_axis is None:
        continue
      axis = None
      if decision.rule:
        axis = decision.mesh_axis
      text = f'{decision.logical_axis}->{rules_lib.format_mesh_axis(axis)}'
      if decision.blocked:
        text += f' ({_format_mesh_axes(decision.blocked)} was taken)'
      if decision.indivisible:
        text += f' ({_format_mesh_axes(decision.indivisible)} does not divide)'
      texts.append(text)
    return ', '.join(texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionTotals:
  """Sums over rows: number of arrays, elements, bytes of one copy, and bytes on each device."""

  num_arrays: int
  num_elements: int
  bytes_total: int
  bytes_per_device: int
  num_devices: int

  @property
  def replicated_share(self) -> float:
    """Share of the memory of all devices that holds further copies of arrays; 0 is fully sharded."""
    in_use = self.bytes_per_device * self.num_devices
    if in_use:
      return 1.0 - self.bytes_total / in_use
    return 0.0

  def cells(self) -> tuple[str, str, str]:
    """Return bytes of one copy, bytes per device and the share of copies, as text for a table."""
    return (
      format_bytes(self.bytes_total),
      format_bytes(self.bytes_per_device),
      f'{self.replicated_share:.1%}',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingReport:
  """All arrays of a train state on a mesh.

  Attributes:
    rows: one per array, in the order in which JAX flattens the state.
    mesh: the mesh.
    rules: the logical axis rules.
    data_partition_spec: sharding of a batch.
  """

  rows: tuple[ShardingRow, ...]
  mesh: Mesh
  rules: LogicalAxisRules
  data_partition_spec: PartitionSpec

  def totals(self, section: str | None = None) -> SectionTotals:
    """Return the sums over a section, or over all rows if `section` is None."""
    return _sum_rows([row for row in self.rows if section in (None, row.section)], self.mesh.size)

  @property
  def sections(self) -> tuple[str, ...]:
    """Names of the sections with rows, parameters first."""
    order = [*dict.fromkeys(_SECTIONS.values()), 'other']
    present = {row.section for row in self.rows}
    return tuple(section for section in order if section in present)

  def to_text(self, fold: bool = True) -> str:
    """Return the report as text: the mesh and rules, a table per section, totals, and the largest copies.

    Args:
      fold: join arrays of different layers that differ only in the numbers in their names, and sum the optimizer state
        by slot.
    """
    parts = [self._header()]
    for section in self.sections:
      if fold and section == 'optimizer state':
        table = self._slot_table()
      else:
        table = self._table(section, fold)
      parts.append(f'{section.capitalize()}\n{table}')
    parts += ['Totals\n' + self._totals_table(), *self._largest_copies()]
    if self.num_indivisible:
      parts.append(
        'Parameters with a dim that its mesh axes do not divide\n' + self.indivisible_to_text()
      )
    return '\n\n'.join(parts) + '\n'

  @property
  def num_indivisible(self) -> int:
    """Number of parameters with a dim that is not sharded by its first rule, because this does not divide it."""
    return len(self._indivisible_parameters())

  def indivisible_to_text(self) -> str:
    """Return a line for each parameter with such a dim: the dim, its mesh axes, and how it is sharded instead."""
    lines = []
    for name, group in fold_rows(self._indivisible_parameters()):
      row = group[0]
      dims = []
      for decision, size in zip(row.decisions, row.shape, strict=False):
        if not decision.indivisible:
          continue
        axes = [axis for _, axis in decision.indivisible]
        shards = '/'.join(str(rules_lib.num_shards(axis, self.mesh.shape)) for axis in axes)
        instead = 'replicated'
        if decision.mesh_axis is not None:
          instead = rules_lib.format_mesh_axis(decision.mesh_axis)
        dims.append(
          f'{decision.logical_axis} {size} by {_format_mesh_axes(decision.indivisible)} '
          f'{shards}: {instead}'
        )
      joined = ', '.join(dims)
      lines.append(f'  {name} ({_format_shape(row.shape)}): {joined}')
    return '\n'.join(lines)

  def _indivisible_parameters(self) -> list[ShardingRow]:
    return [row for row in self.rows if row.section == 'parameters' and row.is_indivisible]

  def _header(self) -> str:
    devices = self.mesh.devices.ravel()
    processes = len({device.process_index for device in devices})
    axes = ' x '.join(f'{axis}={size}' for axis, size in self.mesh.shape.items())
    batch_axis = None
    if len(self.data_partition_spec):
      batch_axis = self.data_partition_spec[0]
    batch = rules_lib.format_mesh_axis(batch_axis)
    lines = [
      f'Mesh   {axes}: {devices.size} {devices[0].device_kind} device(s), {processes} process(es)',
      f'Batch  {batch}',
    ]
    by_mesh_axis: dict[rules_lib.MeshAxis, list[str]] = {}
    for logical_axis, mesh_axis in self.rules:
      by_mesh_axis.setdefault(mesh_axis, []).append(logical_axis)
    heading = 'Rules'
    for mesh_axis, names in by_mesh_axis.items():
      if mesh_axis is None:
        target = 'replicated'
      else:
        target = rules_lib.format_mesh_axis(mesh_axis)
      joined = ', '.join(names)
      lines.append(f'{heading:<5}  {target}: {joined}')
      heading = ''
    return '\n'.join(lines)

  def _table(self, section: str, fold: bool) -> str:
    rows = [row for row in self.rows if row.section == section]
    lines: list[tuple[str, ...]] = [
      (
        'name',
        'arrays',
        'dtype',
        'shape',
        'logical axes',
        'mesh axes',
        'on a device',
        'per device',
        'copies',
        'decided by',
      )
    ]
    if fold:
      groups = fold_rows(rows)
    else:
      groups = [(row.name, [row]) for row in rows]
    for name, group in groups:
      row = group[0]
      lines.append(
        (
          name,
          str(len(group)),
          row.dtype.name,
          _format_shape(row.shape),
          ', '.join(str(axis or '-') for axis in row.logical_axes),
          ', '.join(rules_lib.format_mesh_axis(axis) for axis in row.mesh_axes),
          _format_shape(row.shard_shape),
          format_bytes(sum(member.bytes_per_device for member in group)),
          str(row.num_copies),
          row.format_rules(),
        )
      )
    return format_table(lines, right_aligned=('arrays', 'per device', 'copies'))

  def _slot_table(self) -> str:
    """Return the optimizer state summed by slot, the name of a state array without the name of its parameter."""
    parameters = {row.name: row for row in self.rows if row.section == 'parameters'}
    slots: dict[str, list[tuple[ShardingRow, ShardingRow | None]]] = {}
    for row in self.rows:
      if row.section == 'optimizer state':
        slot, name = _split_slot(row.name, parameters)
        parameter = None
        if name is not None:
          parameter = parameters[name]
        slots.setdefault(slot, []).append((row, parameter))
    lines = [
      ('slot', 'arrays', 'like parameter', 'dtype', 'bytes once', 'per device', "copies' share")
    ]
    for slot, pairs in slots.items():
      alike = 0
      for row, parameter in pairs:
        if parameter is None or row.shape != parameter.shape:
          continue
        if row.mesh_axes == parameter.mesh_axes:
          alike += 1
      totals = _sum_rows([row for row, _ in pairs], self.mesh.size)
      lines.append(
        (
          slot,
          f'{len(pairs):,}',
          f'{alike:,}',
          '/'.join(sorted({row.dtype.name for row, _ in pairs})),
          *totals.cells(),
        )
      )
    return format_table(
      lines, right_aligned=[name for name in lines[0] if name not in ('slot', 'dtype')]
    )

  def _totals_table(self) -> str:
    lines = [('', 'arrays', 'elements', 'bytes once', 'per device', "copies' share")]
    for section in (*self.sections, None):
      totals = self.totals(section)
      lines.append(
        (
          section or 'whole state',
          f'{totals.num_arrays:,}',
          f'{totals.num_elements:,}',
          *totals.cells(),
        )
      )
    return format_table(lines, right_aligned=lines[0][1:])

  def _largest_copies(self) -> list[str]:
    """Return a paragraph about the arrays whose copies use the most memory; empty if all copies are small."""
    per_device = self.totals().bytes_per_device
    wasted = []
    for name, group in fold_rows(self.rows):
      row = group[0]
      surplus = sum(member.bytes_per_device for member in group) * (1 - 1 / row.num_copies)
      if surplus > 0.01 * per_device:
        wasted.append(
          (
            surplus,
            f'  {format_bytes(round(surplus)):>10}  {row.section}: {name} '
            f'({row.num_copies} copies over {", ".join(row.replicated_over)})',
          )
        )
    if not wasted:
      return []
    wasted.sort(reverse=True, key=lambda pair: pair[0])
    return [
      'Largest copies (bytes per device that sharding them fully would save)\n'
      + '\n'.join(line for _, line in wasted[:5])
    ]


def make_report(
  train_state: PyTree,
  logical_axes: PyTree,
  rules: LogicalAxisRules,
  mesh: Mesh,
  data_partition_spec: PartitionSpec,
  max_replicated_size: int,
) -> ShardingReport:
  """Determine the sharding of every array of a state.

  Args:
    train_state: a pytree of arrays or `jax.ShapeDtypeStruct`s.
    logical_axes: PartitionSpecs of logical axes at the same paths; None or an empty spec means replicated.
    rules: logical axis rules.
    mesh: the mesh.
    data_partition_spec: sharding of a batch, shown in the report.
    max_replicated_size: number of elements up to which an array is replicated along a dim that no rule divides. For an
      array of the optimizer state or of the average, the size of its parameter counts, so it is sharded alike.

  Returns:
    The report, with rows in the order of the state's leaves.

  Raises:
    ConfigError: an array without logical axes, logical axes without an array, a wrong number of axes, an axis without a
      rule, or a dim of a large array that is not divisible by its mesh axes.
  """
  rules_lib.check_rules(rules, mesh.axis_names)
  axes_of_leaf = dict(
    tree_utils.named_leaves(logical_axes, is_leaf=lambda node: node is None or _is_names(node))
  )
  leaves = [(path, leaf, *_section(path)) for path, leaf in tree_utils.named_leaves(train_state)]
  rows: dict[int, ShardingRow] = {}
  # Parameters first: an error in the axes of a parameter is also one in its statistics.
  order = sorted(range(len(leaves)), key=lambda index: leaves[index][2] != 'parameters')
  paths = dict.fromkeys(leaves[index][0] for index in order)
  missing = [path for path in paths if path not in axes_of_leaf]
  extra = [path for path, names in axes_of_leaf.items() if names is not None and path not in paths]
  if missing or extra:
    raise errors.ConfigError(
      f'The logical axes of a state must have its structure, got none at {missing[:3]} and unknown ones at '
      f"{extra[:3]}. Annotate the model's parameters (param_with_axes), or correct as_logical_axes or the "
      "optimizer's derive_logical_axes."
    )
  parameters: dict[str, ShardingRow] = {}
  for index in order:
    path, leaf, section, name = leaves[index]
    title = name
    if section != 'other':
      title = f'{section}: {name}'
    row = _make_row(title, name, section, leaf, axes_of_leaf[path] or (), rules, mesh)
    if section == 'parameters':
      parameters[name] = row
    if row.is_indivisible:
      # An array of a parameter's state is replicated where the parameter is, even if it is larger.
      parameter = None
      if section == 'optimizer state':
        _, parameter = _split_slot(name, parameters)
      elif section == 'parameter average':
        parameter = name
      shape = row.shape
      if parameter in parameters:
        shape = parameters[parameter].shape
      _check_size(title, row, shape, mesh, max_replicated_size)
    rows[index] = row
  return ShardingReport(
    rows=tuple(rows[index] for index in range(len(leaves))),
    mesh=mesh,
    rules=rules,
    data_partition_spec=data_partition_spec,
  )


def _is_names(node) -> bool:
  return isinstance(node, (PartitionSpec, rules_lib.AxisNames))


def _section(path: str) -> tuple[str, str]:
  for prefix, section in _SECTIONS.items():
    if path.startswith(prefix):
      return section, path.removeprefix(prefix)
  return 'other', path


def _make_row(
  title: str,
  name: str,
  section: str,
  leaf,
  names: Sequence[str | None],
  rules: LogicalAxisRules,
  mesh: Mesh,
) -> ShardingRow:
  shape = tuple(leaf.shape)
  dtype = np.dtype(leaf.dtype)
  logical_axes = tuple(names)
  if logical_axes and len(logical_axes) != len(shape):
    raise errors.ConfigError(
      f'{title}: {len(logical_axes)} logical axes {logical_axes} for shape {shape}, must be one name (or None) per '
      'dim. Correct the axes in the declaration of the array.'
    )
  rules = rules_lib.with_optimizer_rules(rules, logical_axes, shape, mesh.shape, title)
  decisions = rules_lib.resolve(logical_axes, rules, title, shape, mesh.shape)
  spec = PartitionSpec(*(decision.mesh_axis for decision in decisions))
  shard_shape = tuple(
    size // rules_lib.num_shards(entry, mesh.shape)
    for size, entry in zip(shape, tuple(spec) or (None,) * len(shape), strict=False)
  )
  used = {axis for entry in spec for axis in rules_lib.axes_of(entry)}
  free = tuple(axis for axis, size in mesh.shape.items() if axis not in used and size > 1)
  return ShardingRow(
    name=name,
    section=section,
    shape=shape,
    dtype=dtype,
    logical_axes=PartitionSpec(*logical_axes),
    mesh_axes=spec,
    shard_shape=shard_shape,
    bytes_total=math.prod(shape) * dtype.itemsize,
    bytes_per_device=math.prod(shard_shape) * dtype.itemsize,
    num_copies=math.prod(mesh.shape[axis] for axis in free),
    replicated_over=free,
    decisions=decisions,
  )


def _check_size(
  title: str, row: ShardingRow, shape: Sequence[int], mesh: Mesh, max_replicated_size: int
) -> None:
  """Raise ConfigError if no rule divides a dim of a row, and the array of `shape` is too large to be replicated."""
  if math.prod(shape) <= max_replicated_size:
    return
  for dim, (size, decision) in enumerate(zip(row.shape, row.decisions, strict=True)):
    if not decision.indivisible or decision.rule is not None:
      continue
    entry = decision.indivisible[0][1]
    pieces = rules_lib.num_shards(entry, mesh.shape)
    raise errors.ConfigError(
      f'{title}: dim {dim} ({decision.logical_axis!r}) of shape {row.shape} must be a multiple of {pieces}, the size '
      f'of mesh axis {entry!r} in {dict(mesh.shape)}, got {size}. Round the size up to '
      f'{-(-size // pieces) * pieces}, choose a mesh with {math.gcd(size, pieces)} devices along the axis, or append '
      f'the rule ({decision.logical_axis!r}, {_dividing_axis(size, entry, mesh)!r}), for instance by '
      'additional_rules.'
    )


def _dividing_axis(size: int, entry: rules_lib.MeshAxis, mesh: Mesh) -> str | None:
  """Return the largest mesh axis of `entry` that divides `size`, or None."""
  fitting = [
    axis
    for axis in rules_lib.axes_of(entry)
    if size % mesh.shape[axis] == 0 and mesh.shape[axis] > 1
  ]
  return max(fitting, key=lambda axis: mesh.shape[axis], default=None)


def _sum_rows(rows: Sequence[ShardingRow], num_devices: int) -> SectionTotals:
  return SectionTotals(
    num_arrays=len(rows),
    num_elements=sum(math.prod(row.shape) for row in rows),
    bytes_total=sum(row.bytes_total for row in rows),
    bytes_per_device=sum(row.bytes_per_device for row in rows),
    num_devices=num_devices,
  )


def _split_slot(name: str, parameters: Mapping[str, ShardingRow]) -> tuple[str, str | None]:
  """Split the name of an array of optimizer state into its slot and its parameter.

  >>> _split_slot('param_states/0/mu/mlp/kernel', {'mlp/kernel': None})
  ('0/mu', 'mlp/kernel')
  >>> _split_slot('step', {'mlp/kernel': None})
  ('step', None)
  """
  parts = name.split('/')
  for length in range(len(parts), 0, -1):
    for start in range(len(parts) - length + 1):
      parameter = '/'.join(parts[start : start + length])
      if parameter in parameters:
        rest = parts[:start] + parts[start + length :]
        if rest[0] == 'param_states':
          rest = rest[1:]
        return '/'.join(rest), parameter
  return name.removeprefix('param_states/'), None


def fold_rows(rows: Iterable[ShardingRow]) -> list[tuple[str, list[ShardingRow]]]:
  """Join rows whose names differ only in `_<number>` and that are equal in everything else.

  Returns:
    (name with the numbers as a range, e.g. `layers_{0-7}/mlp/wi/kernel`, rows) in order of first occurrence.
  """
  groups: dict[tuple, list[ShardingRow]] = {}
  for row in rows:
    key = (
      row.section,
      re.sub(r'_\d+(?=/|$)', '_#', row.name),
      row.shape,
      row.dtype,
      row.logical_axes,
      row.mesh_axes,
    )
    groups.setdefault(key, []).append(row)
  folded = []
  for key, group in groups.items():
    numbers = [re.findall(r'_(\d+)(?=/|$)', row.name) for row in group]
    name = key[1]
    for position in zip(*numbers, strict=True):
      name = name.replace(
        '_#', '_' + _format_numbers(sorted({int(number) for number in position})), 1
      )
    folded.append((name, group))
  return folded


def _format_numbers(numbers: list[int]) -> str:
  if len(numbers) == 1:
    return str(numbers[0])
  if numbers == list(range(numbers[0], numbers[-1] + 1)):
    return f'{{{numbers[0]}-{numbers[-1]}}}'
  return '{' + ','.join(map(str, numbers)) + '}'


def _format_mesh_axes(rules: Sequence[tuple[str, rules_lib.MeshAxis]]) -> str:
  return '/'.join(rules_lib.format_mesh_axis(mesh_axis) for _, mesh_axis in rules)


def _format_shape(shape: Sequence[int]) -> str:
  return ' x '.join(map(str, shape)) or 'scalar'
