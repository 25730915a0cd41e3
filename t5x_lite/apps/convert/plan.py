"""Plan of a conversion: for each output array its inputs and its computation, from names and shapes alone."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.apps.convert import formats
from t5x_lite.apps.convert import targets
from t5x_lite.apps.convert.state_plan import AVERAGE
from t5x_lite.apps.convert.state_plan import MUTABLES
from t5x_lite.apps.convert.state_plan import PARAM_STATES
from t5x_lite.apps.convert.state_plan import PARAMS
from t5x_lite.apps.convert.state_plan import STEP
from t5x_lite.apps.convert.state_plan import StatePlan
from t5x_lite.apps.convert.state_plan import section
from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.formatting import first_names
from t5x_lite.networks import layout_plan
from t5x_lite.networks.layout_plan import PlannedArray

DTYPES = ('float32', 'bfloat16', 'float16')
# Arrays that --dtype applies to; the optimizer state keeps its dtypes.
_CAST = (PARAMS, AVERAGE)
# Arrays are read in groups of at most this size: a call to Orbax costs as much as reading some megabytes.
_GROUP_BYTES = 2**25


class Reader:
  """Reads a source's arrays in the dtypes of a plan, in groups, and computes the output arrays."""

  def __init__(self, source: sources.StateSource, plan: StatePlan, dtype: str | None):
    """Store the arguments; read nothing.

    Args:
      source: source of the arrays.
      plan: plan of the output; arrays are read fastest in its order.
      dtype: floating-point dtype of the parameters; None for the stored ones.
    """
    self._source = source
    self._plan = plan
    self._dtype = dtype
    inputs = itertools.chain.from_iterable(planned.inputs for planned in plan.arrays.values())
    self._order = list(dict.fromkeys(inputs))
    self._position = {name: i for i, name in enumerate(self._order)}
    self._held: dict[str, np.ndarray] = {}

  def make(self, name: str) -> np.ndarray:
    """Return an output array, in its planned shape and dtype.

    Args:
      name: its name in the state.

    Raises:
      ConfigError: its values are out of range for the dtype.
    """
    return self._plan.arrays[name].make(self._read)

  def _read(self, name: str) -> np.ndarray:
    if name not in self._held:
      self._held = {}  # Frees the memory of the previous group.
      shapes = self._source.shapes()
      todo = {each: (shapes[each].dtype, None) for each in self._group(name)}
      values: dict[str, Any] = self._source.read(todo)
      for each in list(values):
        dtype = dtype_of(each, shapes[each].dtype, self._dtype)
        self._held[each] = cast(each, values.pop(each), dtype)
    return self._held[name]

  def _group(self, first: str) -> list[str]:
    """Return `first` and the names that follow it in the order, up to a total size."""
    shapes = self._source.shapes()
    names = []
    num_bytes = 0
    for name in self._order[self._position[first] :]:
      leaf = shapes[name]
      num_bytes += math.prod(leaf.shape) * leaf.dtype.itemsize
      if names and num_bytes > _GROUP_BYTES:
        break
      names.append(name)
    return names


def dtype_of(name: str, stored: Any, wanted: str | None) -> np.dtype:
  """Return the dtype of an output array.

  Args:
    name: name of the array.
    stored: its dtype in the source.
    wanted: requested dtype, or None.
  """
  is_param = name.startswith(_CAST)
  is_cast = wanted is not None and is_param and jnp.issubdtype(stored, jnp.floating)
  if is_cast:
    return np.dtype(jnp.dtype(wanted))
  return np.dtype(stored)


def cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Return `array`, of any shape, in `dtype`, rounded to nearest.

  Raises:
    ConfigError: a finite value would become infinite.
  """
  if array.dtype == dtype:
    return array
  with np.errstate(over='ignore', invalid='ignore'):
    result = array.astype(dtype)
  if not np.isfinite(result).all():
    lost = np.isfinite(array) & ~np.isfinite(result)
    if lost.any():
      magnitudes = np.abs(array[lost].astype(np.float64))
      largest = float(np.max(magnitudes))
      raise ConfigError(
        f'--dtype={dtype.name} cannot represent {int(lost.sum())} values of {name}, the largest '
        f'{largest:.6g}; the maximum of {dtype.name} is {float(jnp.finfo(dtype).max):.6g}. Choose '
        '--dtype=bfloat16 or float32; nothing was written.'
      )
  return result


def plan_state(
  source: sources.StateSource,
  *,
  to: str,
  dtype: str | None = None,
  param_layout: str | None = None,
  relpos_per_layer: bool = False,
  optimizer_state: str | None = None,
  step: int | None = None,
) -> StatePlan:
  """Plan the state that a source is converted to.

  For a change of layout, values of relative position biases are read; no other values are.

  Args:
    source: the weights to convert.
    to: name of the format of the output.
    dtype: floating-point dtype of the parameters; None keeps the stored ones.
    param_layout: layout of the output; None for the source's.
    relpos_per_layer: whether an output in the layout 't5' has a table of relative position biases per layer even if
      they are equal; otherwise it has one per stack in this case.
    optimizer_state: 'keep', 'drop', or None to keep it if the output format stores it.
    step: number of training steps to record; None for the source's.

  Returns:
    The plan.

  Raises:
    CheckpointError: the source has no parameters.
    ConfigError: the output format does not support part of the source; the message has the remedy.
  """
  shapes = {}
  for name, leaf in source.shapes().items():
    out_dtype = dtype_of(name, leaf.dtype, dtype)
    shapes[name] = jax.ShapeDtypeStruct(leaf.shape, out_dtype)
  params = section(shapes, PARAMS)
  if not params:
    raise CheckpointError(
      f'{source.path!r} has no parameters: none of its {len(shapes)} array names begins with '
      f'{PARAMS!r}. Name a checkpoint of a train state.'
    )
  layout = source.metadata.get('param_layout')
  target = formats.target_class(to)
  network = source.metadata.get('network') or {}
  wanted = target.only_layout or param_layout
  if layout is None and wanted is not None:
    flag = f'--to={to}' if target.only_layout else '--param_layout'
    raise ConfigError(
      f'{flag} requires a T5 or decoder-only network of t5x_lite; the names of {source.path!r} differ '
      f'(e.g. {next(iter(params))}).'
    )
  notes = _check_network(source, network, target)
  change = _no_change
  tables = None
  if wanted is not None and wanted != layout:
    tables = (
      wanted != 't5'
      or relpos_per_layer
      or layout_plan.tables_differ(params, lambda name: source.read_array(f'{PARAMS}{name}'))
    )
    change = functools.partial(
      layout_plan.plan,
      to_layout=wanted,
      relpos_per_layer=tables,
      heads=_recorded_heads(source, params),
    )
  if source.manifest is not None and source.manifest.num_data_processes:
    notes.append('The position in the training data is not converted.')
  stored = _without(shapes, target, notes)
  arrays = _prefixed(PARAMS, change(params))
  average = section(stored, AVERAGE)
  if average:
    arrays |= _prefixed(AVERAGE, change(average))
  arrays |= _mutables(stored, layout, wanted, notes)
  for name, leaf in stored.items():
    if not name.startswith((PARAMS, PARAM_STATES, AVERAGE, MUTABLES)):
      arrays[name] = layout_plan.unchanged(name, leaf)
  if not STEP.startswith(tuple(target.left_out)):
    arrays[STEP] = _step(source, shapes, step)
  states = _optimizer_state(source, stored, params, change, optimizer_state, notes)
  notes += target.remarks(network, bool(states))
  notes += _optimizer_remarks(source, bool(states))
  arrays |= states
  # Arrays with the same inputs are next to each other, so that inputs are read once.
  names = sorted(arrays, key=lambda name: (arrays[name].inputs, name))
  ordered = {name: arrays[name] for name in names}
  return StatePlan(
    arrays=ordered,
    param_layout=wanted or layout,
    network=_network(network, wanted, tables),
    with_optimizer_state=bool(states),
    step=step,
    notes=tuple(notes),
  )


ChangeFn = Callable[[Mapping[str, Any]], dict[str, PlannedArray]]


def _no_change(shapes: Mapping[str, Any]) -> dict[str, PlannedArray]:
  return {name: layout_plan.unchanged(name, leaf) for name, leaf in shapes.items()}


def _check_network(
  source: sources.StateSource, network: Mapping[str, Any], target: type[targets.Target]
) -> list[str]:
  """Return remarks on a network; raise if the format does not support it."""
  unsupported = target.unsupported(source, network)
  if unsupported is not None:
    raise ConfigError(
      f'--to={target.format} does not support the {unsupported} of the network of {source.path!r}. '
      'Convert to t5x_lite or t5x.'
    )
  custom = ' and '.join(map(str, network.get('custom_blocks', ())))
  if not custom:
    return []
  return [
    f"The network has a custom {custom}: attention kernels are converted like T5's, and programs that "
    'read the result need the same option and code.'
  ]


def _optimizer_remarks(source: sources.StateSource, with_optimizer_state: bool) -> list[str]:
  """Return remarks on an optimizer that evaluates other parameters than the stored ones."""
  optimizer = source.metadata.get('optimizer') or {}
  if with_optimizer_state or not optimizer.get('evaluates_other_params'):
    return []
  return [
    f"Warning: the run's optimizer, {optimizer.get('name')}, derives the parameters to evaluate from its "
    'state. The output has the stored parameters instead.'
  ]


def _without(
  shapes: Mapping[str, Any], target: type[targets.Target], notes: list[str]
) -> dict[str, Any]:
  """Return the arrays that a format stores, and add its remarks on the others."""
  stored = dict(shapes)
  for prefix, remark in target.left_out.items():
    names = [name for name in stored if name.startswith(prefix)]
    for name in names:
      del stored[name]
    if names and remark:
      notes.append(remark.format(num=len(names)))
  return stored


def _network(
  recorded: Mapping[str, Any], layout: str | None, tables_per_layer: bool | None
) -> dict[str, Any]:
  """Return the recorded options of the network, updated for the new layout."""
  network = dict(recorded)
  if tables_per_layer is not None:
    tables = 'per_layer' if tables_per_layer else 'per_stack'
    changed = {'param_layout': layout, 'relpos_bias_tables': tables}
    network |= {key: value for key, value in changed.items() if key in network}
  return network


def _recorded_heads(source: sources.StateSource, params: Mapping[str, Any]) -> int | None:
  """Return the recorded number of heads if the network's arrays do not show it, else None."""
  if any(name.endswith('relpos_bias/rel_embedding') for name in params):
    return None
  return (source.metadata.get('network') or {}).get('num_heads')


def _prefixed(prefix: str, plans: Mapping[str, PlannedArray]) -> dict[str, PlannedArray]:
  """Return plans with a prefix on the names of inputs and outputs."""

  def make(planned, read):
    return planned.make(lambda name: read(f'{prefix}{name}'))

  prefixed = {}
  for name, planned in plans.items():
    inputs = tuple(f'{prefix}{each}' for each in planned.inputs)
    prefixed[f'{prefix}{name}'] = dataclasses.replace(
      planned, inputs=inputs, make=functools.partial(make, planned)
    )
  return prefixed


def _step(source: sources.StateSource, shapes: Mapping[str, Any], step: int | None) -> PlannedArray:
  leaf = shapes.get(STEP, jax.ShapeDtypeStruct((), np.dtype(np.int32)))
  if step is None and STEP in shapes:
    return layout_plan.unchanged(STEP, leaf)
  if step is None:
    step = source.step or 0
  value = np.full(leaf.shape, step, leaf.dtype)
  return PlannedArray(
    inputs=(), shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype), make=lambda read: value
  )


def _mutables(
  shapes, layout: str | None, wanted: str | None, notes: list[str]
) -> dict[str, PlannedArray]:
  mutables = [name for name in shapes if name.startswith(MUTABLES)]
  if mutables and wanted is not None and wanted != layout:
    raise ConfigError(
      f'--param_layout={wanted} does not support mutable collections ({mutables[0]}, ...). Keep '
      f'--param_layout={layout}.'
    )
  if mutables:
    notes.append(
      f"The network's {len(mutables)} mutable arrays (flax_mutables) are copied unchanged."
    )
  return {name: layout_plan.unchanged(name, shapes[name]) for name in mutables}


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer state


def _optimizer_state(
  source, shapes, params, change: ChangeFn, wanted: str | None, notes: list[str]
) -> dict[str, PlannedArray]:
  """Plan the optimizer state, or add a note why it is missing."""
  states = {name: leaf for name, leaf in shapes.items() if name.startswith(PARAM_STATES)}
  if not states:
    if wanted == 'keep':
      raise ConfigError(
        f'--optimizer_state=keep: {source.path!r} has no optimizer state. Remove the flag.'
      )
    return {}
  if wanted == 'drop':
    notes.append(
      f'The optimizer state, {len(states)} arrays, is not converted (--optimizer_state=drop).'
    )
    return {}
  if change is _no_change:
    return _no_change(states)
  param_shapes = {name: _stored_shape(leaf) for name, leaf in params.items()}
  result = {}
  left = dict(states)
  for prefix in _tree_prefixes(states, params):
    tree = section(states, prefix)
    shapes_of_tree = {name: _stored_shape(leaf) for name, leaf in tree.items()}
    if not shapes_of_tree.items() <= param_shapes.items():
      continue
    try:
      planned = layout_plan.plan_part(tree, params, change)
    except ConfigError:
      continue
    result |= _prefixed(prefix, planned)
    for name in tree:
      del left[f'{prefix}{name}']
  stuck = [
    name for name, leaf in left.items() if not layout_plan.is_independent(name, leaf.shape, params)
  ]
  if stuck:
    raise ConfigError(
      f'The optimizer state cannot be converted to another parameter layout: {first_names(stuck)}. It must '
      'consist of arrays with the shapes of parameters, for all layers of each, and of counters. '
      'Set --optimizer_state=drop, or keep the layout.'
    )
  return result | _no_change(left)


def _stored_shape(leaf: Any) -> tuple[int, ...]:
  return tuple(leaf.shape)


def _tree_prefixes(states: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
  """Return the prefixes of trees with an entry for a parameter."""
  prefixes = []
  for name in states:
    parts = name.split('/')
    suffixes = ['/'.join(parts[i:]) for i in range(len(parts))]
    param = next((suffix for suffix in suffixes if suffix in params), None)
    if param is not None:
      prefixes.append(name.removesuffix(param))
  return list(dict.fromkeys(prefixes))
