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

from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks import layout_plan
from t5x_lite.networks.layout_plan import PlannedArray

PARAMS = 'target/'
PARAM_STATES = 'state/param_states/'
AVERAGE = 'param_average/'
MUTABLES = 'flax_mutables/'
STEP = 'state/step'
DTYPES = ('float32', 'bfloat16', 'float16')
# Arrays that --dtype applies to; the optimizer state keeps its dtypes.
_CAST = (PARAMS, AVERAGE)
# Arrays are read in groups of at most this size: a call to Orbax costs as much as reading some megabytes.
_GROUP_BYTES = 2**25


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePlan:
  """Arrays of the output.

  Attributes:
    arrays: plan of each array by its name in the state, in an efficient order: arrays with the same input are adjacent.
    param_layout: layout of the parameters; None for a network of another package.
    network: known options of the network, by `T5Config`'s names.
    with_optimizer_state: whether the output has optimizer state.
    notes: remarks for the user, as sentences.
  """

  arrays: Mapping[str, PlannedArray]
  param_layout: str | None
  network: Mapping[str, Any]
  with_optimizer_state: bool
  notes: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """Total size of the arrays in bytes."""
    total = 0
    for planned in self.arrays.values():
      total += _num_elements(planned) * planned.dtype.itemsize
    return total

  @property
  def num_params(self) -> int:
    """Number of parameters."""
    return sum(map(_num_elements, self.params().values()))

  def params(self) -> dict[str, PlannedArray]:
    """Return the plans of the parameters by their paths, without `target/`."""
    return _section(self.arrays, PARAMS)


def _num_elements(planned: PlannedArray) -> int:
  return int(np.prod(planned.shape, dtype=np.int64))


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
    to: format of the output; 'hugging_face' supports only parameters, in the layout 't5'.
    dtype: floating-point dtype of the parameters; None keeps the stored ones.
    param_layout: layout of the output; None for the source's.
    relpos_per_layer: whether an output in the layout 't5' has a table of relative position biases per layer even if
      they are equal; otherwise it has one per stack in this case.
    optimizer_state: 'keep', 'drop', or None for the default of the output format.
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
  params = _section(shapes, PARAMS)
  if not params:
    raise CheckpointError(
      f'{source.path!r} has no parameters: none of its {len(shapes)} array names begins with '
      f'{PARAMS!r}. Name a checkpoint of a train state.'
    )
  layout = source.metadata.get('param_layout')
  wanted = 't5' if to == 'hugging_face' else param_layout
  if layout is None and wanted is not None:
    if to == 'hugging_face':
      flag = '--to=hugging_face'
    else:
      flag = '--param_layout'
    raise ConfigError(
      f'{flag} requires a T5 or decoder-only network of t5x_lite; the names of {source.path!r} differ '
      f'(e.g. {next(iter(params))}).'
    )
  notes: list[str] = []
  _check_hugging_face(source, shapes, to, notes)
  change = _no_change
  tables = None
  if wanted is not None and wanted != layout:
    tables = wanted != 't5' or relpos_per_layer or _tables_differ(source, params)
    change = functools.partial(
      layout_plan.plan,
      to_layout=wanted,
      relpos_per_layer=tables,
      heads=_recorded_heads(source, params),
    )
  if source.manifest is not None and source.manifest.num_data_processes:
    notes.append('The position in the training data is not converted.')
  arrays = _prefixed(PARAMS, change(params))
  if to != 'hugging_face':
    arrays |= _param_average(shapes, to, change, notes)
    arrays |= _mutables(shapes, layout, wanted, notes)
    for name, leaf in shapes.items():
      if not name.startswith((PARAMS, PARAM_STATES, AVERAGE, MUTABLES)):
        arrays[name] = layout_plan.unchanged(name, leaf)
    arrays[STEP] = _step(source, shapes, step)
  states = _optimizer_state(source, shapes, params, to, change, optimizer_state, notes)
  _note_missing_state(source, to, bool(states), notes)
  arrays |= states
  # Arrays with the same inputs are next to each other, so that inputs are read once.
  names = sorted(arrays, key=lambda name: (arrays[name].inputs, name))
  ordered = {name: arrays[name] for name in names}
  return StatePlan(
    arrays=ordered,
    param_layout=wanted or layout,
    network=_network(source, wanted, tables),
    with_optimizer_state=bool(states),
    notes=tuple(notes),
  )


ChangeFn = Callable[[Mapping[str, Any]], dict[str, PlannedArray]]


def _no_change(shapes: Mapping[str, Any]) -> dict[str, PlannedArray]:
  return {name: layout_plan.unchanged(name, leaf) for name, leaf in shapes.items()}


def _network(
  source: sources.StateSource, layout: str | None, tables_per_layer: bool | None
) -> dict[str, Any]:
  """Return the recorded options of the network, updated for the new layout."""
  network = dict(source.metadata.get('network') or {})
  if tables_per_layer is not None:
    tables = 'per_layer' if tables_per_layer else 'per_stack'
    changed = {'param_layout': layout, 'relpos_bias_tables': tables}
    network |= {key: value for key, value in changed.items() if key in network}
  return network


def _check_hugging_face(
  source: sources.StateSource, shapes: Mapping[str, Any], to: str, notes: list[str]
) -> None:
  """Raise if a Hugging Face folder does not support parts of the network; add notes on other parts."""
  network = source.metadata.get('network') or {}
  custom = ' and '.join(map(str, network.get('custom_blocks', ())))
  mutables = [name for name in shapes if name.startswith(MUTABLES)]
  if custom:
    unsupported = f'custom {custom}'
  elif mutables:
    unsupported = f'mutable collections ({mutables[0]}, ...)'
  else:
    unsupported = ''
  if unsupported and to == 'hugging_face':
    raise ConfigError(
      f'--to=hugging_face does not support the {unsupported} of the network of {source.path!r}. '
      'Convert to t5x_lite or t5x.'
    )
  if custom:
    notes.append(
      f"The network has a custom {custom}: attention kernels are converted like T5's, and programs that "
      'read the result need the same custom code.'
    )
  if to == 'hugging_face' and any(name.startswith(AVERAGE) for name in shapes):
    notes.append(
      'The folder has the trained parameters. For their running average, add --param_average.'
    )


def _recorded_heads(source: sources.StateSource, params: Mapping[str, Any]) -> int | None:
  """Return the recorded number of heads if the network's arrays do not show it, else None."""
  if any(name.endswith('relpos_bias/rel_embedding') for name in params):
    return None
  return (source.metadata.get('network') or {}).get('num_heads')


def _section(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  """Return the values whose names begin with `prefix`, by the rest of their names."""
  section = {}
  for name, value in values.items():
    if name.startswith(prefix):
      section[name.removeprefix(prefix)] = value
  return section


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


def _tables_differ(source: sources.StateSource, params: Mapping[str, Any]) -> bool:
  for name in layout_plan.layer_tables(params):
    if not layout_plan.tables_are_equal(source.read_array(f'{PARAMS}{name}')):
      return True
  return False


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


def _param_average(shapes, to: str, change: ChangeFn, notes: list[str]) -> dict[str, PlannedArray]:
  """Plan the running average of the parameters."""
  average = _section(shapes, AVERAGE)
  if not average:
    return {}
  if to == 't5x':
    notes.append(
      'The running average of the parameters (param_average) is not converted: T5X does not support it. To '
      'convert it instead of the parameters, add --param_average.'
    )
    return {}
  return _prefixed(AVERAGE, change(average))


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


def _note_missing_state(
  source: sources.StateSource, to: str, with_states: bool, notes: list[str]
) -> None:
  if to == 't5x' and not with_states:
    notes.append(
      'The output has no optimizer state: to train from it, T5X needs RestoreCheckpointConfig with '
      "fallback_to_scratch = True and assignment_map = ((r'state/param_states.*', None),)."
    )
  network = source.metadata.get('network') or {}
  if to == 't5x' and network.get('scale_tied_logits') is False:
    notes.append(
      'Warning: the tied logits of this network are not scaled (scale_tied_logits=False), which this format '
      "does not record. T5X's networks divide tied logits by sqrt(emb_dim): for them, multiply "
      'decoder/decoder_norm/scale by sqrt(emb_dim).'
    )
  optimizer = source.metadata.get('optimizer') or {}
  if optimizer.get('evaluates_other_params') and (to == 'hugging_face' or not with_states):
    notes.append(
      f"Warning: the run's optimizer, {optimizer.get('name')}, derives the parameters to evaluate from its "
      'state. The output has the stored parameters instead.'
    )


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer state


def _optimizer_state(
  source, shapes, params, to: str, change: ChangeFn, wanted: str | None, notes: list[str]
) -> dict[str, PlannedArray]:
  """Plan the optimizer state, or add a note why it is missing."""
  states = {name: leaf for name, leaf in shapes.items() if name.startswith(PARAM_STATES)}
  if not states:
    if wanted == 'keep':
      raise ConfigError(
        f'--optimizer_state=keep: {source.path!r} has no optimizer state. Remove the flag.'
      )
    return {}
  if to == 'hugging_face' or wanted == 'drop':
    if to == 'hugging_face':
      why = ': a Hugging Face folder has no optimizer state'
    else:
      why = ' (--optimizer_state=drop)'
    notes.append(f'The optimizer state, {len(states)} arrays, is not converted{why}.')
    return {}
  if change is _no_change:
    return _no_change(states)
  param_shapes = {name: _stored_shape(leaf) for name, leaf in params.items()}
  result = {}
  left = dict(states)
  for prefix in _tree_prefixes(states, next(iter(params))):
    tree = _section(states, prefix)
    if {name: _stored_shape(leaf) for name, leaf in tree.items()} == param_shapes:
      result |= _prefixed(prefix, change(tree))
      taken = [name for name in left if name.startswith(prefix)]
      for name in taken:
        del left[name]
  stuck = [name for name, leaf in left.items() if leaf.shape]
  if stuck:
    raise ConfigError(
      f'The optimizer state cannot be converted to another parameter layout: {stuck[0]} '
      f'{tuple(left[stuck[0]].shape)}, and {len(stuck) - 1} more, differ in shape from the parameters. '
      'Set --optimizer_state=drop, or keep the layout.'
    )
  return result | _no_change(left)


def _stored_shape(leaf: Any) -> tuple[int, ...]:
  return tuple(leaf.shape)


def _tree_prefixes(states: Mapping[str, Any], param: str) -> list[str]:
  """Return the prefixes of trees with an entry for the parameter `param`."""
  return [name.removesuffix(param) for name in states if name.endswith(f'/{param}')]
