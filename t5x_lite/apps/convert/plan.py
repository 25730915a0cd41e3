"""What a conversion writes: of each array of the result what it is made of, decided from names and shapes alone."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite.checkpoints import sources
from t5x_lite.errors import CheckpointError, ConfigError
from t5x_lite.networks import layout_plan
from t5x_lite.networks.layout_plan import PlannedArray

PARAMS, PARAM_STATES, AVERAGE, MUTABLES = 'target/', 'state/param_states/', 'param_average/', 'flax_mutables/'
STEP = 'state/step'
DTYPES = ('float32', 'bfloat16', 'float16')
# What --dtype speaks of; the optimizer's state keeps its own dtypes.
_CAST = (PARAMS, AVERAGE)
# Arrays are read together up to so many bytes: a call to Orbax costs as much as reading some megabytes.
_GROUP_BYTES = 2**25


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePlan:
  """The arrays of a result.

  Attributes:
    arrays: name in the state -> plan, in the order in which they are best made: those of one input follow each other.
    param_layout: of the parameters; None for a network that is none of ours.
    network: what is known of the network's configuration, by `T5Config`'s names.
    with_optimizer_state: whether it has the optimizer's state.
    notes: what a person should know of it, as sentences.
  """

  arrays: Mapping[str, PlannedArray]
  param_layout: str | None
  network: Mapping[str, Any]
  with_optimizer_state: bool
  notes: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """What the arrays take."""
    return sum(_num_elements(planned) * planned.dtype.itemsize for planned in self.arrays.values())

  @property
  def num_params(self) -> int:
    """Number of parameters."""
    return sum(_num_elements(planned) for name, planned in self.arrays.items() if name.startswith(PARAMS))

  def params(self) -> dict[str, PlannedArray]:
    """Returns the plans of the parameters by their paths, without `target/`."""
    return {name.removeprefix(PARAMS): planned for name, planned in self.arrays.items() if name.startswith(PARAMS)}


def _num_elements(planned: PlannedArray) -> int:
  return int(np.prod(planned.shape, dtype=np.int64))


class Reader:
  """Reads a source's arrays in the dtypes of a plan, small ones a few at a time, and makes those of the result."""

  def __init__(self, source: sources.StateSource, plan: StatePlan, dtype: str | None):
    """Reads nothing yet.

    Args:
      source: where the arrays are.
      plan: what is made of them, in this order (another order is slower).
      dtype: floating dtype of the parameters; None for the stored ones.
    """
    self._source, self._plan, self._dtype = source, plan, dtype
    self._order = list(dict.fromkeys(name for planned in plan.arrays.values() for name in planned.inputs))
    self._position = {name: i for i, name in enumerate(self._order)}
    self._held: dict[str, np.ndarray] = {}

  def make(self, name: str) -> np.ndarray:
    """Returns an array of the result.

    Raises:
      ConfigError: its values do not fit the dtype.
    """
    return self._plan.arrays[name].make(self._read)

  def _read(self, name: str) -> np.ndarray:
    if name not in self._held:
      self._held = {}  # before others take their place in memory
      shapes = self._source.shapes()
      values = self._source.read({each: (shapes[each].dtype, None) for each in self._group(name)})
      for each in list(values):
        self._held[each] = cast(each, values.pop(each), dtype_of(each, shapes[each].dtype, self._dtype))
    return self._held[name]

  def _group(self, first: str) -> list[str]:
    """Returns `first` and what follows it in the order, as long as that is little."""
    shapes, names, num_bytes = self._source.shapes(), [], 0
    for name in self._order[self._position[first]:]:
      num_bytes += int(np.prod(shapes[name].shape, dtype=np.int64)) * shapes[name].dtype.itemsize
      if names and num_bytes > _GROUP_BYTES:
        break
      names.append(name)
    return names


def dtype_of(name: str, stored: Any, wanted: str | None) -> np.dtype:
  """Returns the dtype that an array gets.

  Args:
    name: of the array.
    stored: its dtype in the source.
    wanted: the dtype that was asked for, if any.
  """
  is_cast = wanted is not None and name.startswith(_CAST) and jnp.issubdtype(stored, jnp.floating)
  return np.dtype(jnp.dtype(wanted)) if is_cast else np.dtype(stored)


def cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns `array` in `dtype`, rounded to nearest.

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
      largest = float(np.max(np.abs(array[lost].astype(np.float64))))
      raise ConfigError(f'--dtype={dtype.name}: {name} has {int(lost.sum())} values that {dtype.name} cannot hold, the '
                        f'largest {largest:.6g}; expected none above {float(jnp.finfo(dtype).max):.6g}. Choose '
                        '--dtype=bfloat16 or float32. Nothing is written.')
  return result


def plan_state(
    source: sources.StateSource, *, to: str, dtype: str | None = None, param_layout: str | None = None,
    relpos_per_layer: bool = False, optimizer_state: str | None = None, step: int | None = None) -> StatePlan:
  """Plans the state that a source becomes.

  Reads no values but, for a change of layout, the tables of relative position biases.

  Args:
    source: what is converted.
    to: form of the result; 'hugging_face' has a place for parameters in the layout 't5' alone.
    dtype: floating dtype of the parameters; None keeps the stored ones.
    param_layout: of the result; None for the source's own.
    relpos_per_layer: whether a result in the layout 't5' has a table of relative position biases in each layer even
      where they are equal; otherwise it then has one for each stack.
    optimizer_state: 'keep', 'drop', or None for what the form of the result suggests.
    step: number of training steps to record; None for the source's.

  Returns:
    The plan.

  Raises:
    CheckpointError: the source has no parameters.
    ConfigError: something of the source has no place in the result; the message says what to do.
  """
  shapes = {name: jax.ShapeDtypeStruct(leaf.shape, dtype_of(name, leaf.dtype, dtype))
            for name, leaf in source.shapes().items()}
  params = _section(shapes, PARAMS)
  if not params:
    raise CheckpointError(f'{source.path!r} holds no parameters: none of its {len(shapes)} names begins with '
                          f'{PARAMS!r}. Name a checkpoint of a train state.')
  layout = source.metadata.get('param_layout')
  wanted = 't5' if to == 'hugging_face' else param_layout
  if layout is None and wanted is not None:
    raise ConfigError(f'{source.path!r} is not of a T5 or decoder-only network of this package, as its names show '
                      f'(e.g. {next(iter(params))}); expected one for '
                      + ('--to=hugging_face.' if to == 'hugging_face' else '--param_layout.'))
  notes: list[str] = []
  _check_custom_blocks(source, to, notes)
  change = _no_change
  tables = None
  if wanted is not None and wanted != layout:
    tables = wanted != 't5' or relpos_per_layer or _tables_differ(source, params)
    change = functools.partial(
        layout_plan.plan, to_layout=wanted, relpos_per_layer=tables, heads=_recorded_heads(source, params))
  if source.manifest is not None and source.manifest.num_data_processes:
    notes.append('The position in the training data is left out.')
  arrays = _prefixed(PARAMS, change(params))
  if to != 'hugging_face':
    arrays |= _other_params(shapes, params, to, change, notes)
    arrays |= _mutables(shapes, layout, wanted, notes)
    arrays |= {name: layout_plan.unchanged(name, leaf) for name, leaf in shapes.items()
               if not name.startswith((PARAMS, PARAM_STATES, AVERAGE, MUTABLES))}
    arrays[STEP] = _step(source, shapes, step)
  else:
    _check_nothing_is_lost(source, shapes, notes)
  states = _optimizer_state(source, shapes, params, to, change, optimizer_state, notes)
  _note_what_is_missing(source, to, bool(states), notes)
  arrays |= states
  ordered = dict(sorted(arrays.items(), key=lambda item: (item[1].inputs, item[0])))
  return StatePlan(arrays=ordered, param_layout=wanted or layout, network=_network(source, wanted, tables),
                   with_optimizer_state=bool(states), notes=tuple(notes))


ChangeFn = Callable[[Mapping[str, Any]], dict[str, PlannedArray]]


def _no_change(shapes: Mapping[str, Any]) -> dict[str, PlannedArray]:
  return {name: layout_plan.unchanged(name, leaf) for name, leaf in shapes.items()}


def _network(source: sources.StateSource, layout: str | None, tables_per_layer: bool | None) -> dict[str, Any]:
  """Returns what was recorded of the network's configuration as it is after a change of layout, if there was one."""
  network = dict(source.metadata.get('network') or {})
  if tables_per_layer is not None:
    changed = {'param_layout': layout, 'relpos_bias_tables': 'per_layer' if tables_per_layer else 'per_stack'}
    network |= {key: value for key, value in changed.items() if key in network}
  return network


def _check_custom_blocks(source: sources.StateSource, to: str, notes: list[str]) -> None:
  """Raises ConfigError where the form of the result has none but T5's own attention and positions."""
  custom = ' and '.join(map(str, (source.metadata.get('network') or {}).get('custom_blocks', ())))
  if custom and to == 'hugging_face':
    raise ConfigError(f"--to=hugging_face: {source.path!r} is of a network with a custom {custom}, which transformers' "
                      'T5 does not have. Convert it to t5x_lite or t5x, which keep the parameters as they are.')
  if custom:
    notes.append(f'The network has a custom {custom}: kernels of attention are converted as those of T5 are, and '
                 'whatever reads the result must have the same.')


def _recorded_heads(source: sources.StateSource, params: Mapping[str, Any]) -> int | None:
  """Returns the recorded number of heads of a network whose arrays do not show it; None where they do."""
  if any(name.endswith('relpos_bias/rel_embedding') for name in params):
    return None
  return (source.metadata.get('network') or {}).get('num_heads')


def _section(shapes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
  return {name.removeprefix(prefix): leaf for name, leaf in shapes.items() if name.startswith(prefix)}


def _prefixed(prefix: str, plans: Mapping[str, PlannedArray]) -> dict[str, PlannedArray]:
  """Returns plans of a tree like the parameters for where it stands in the state, on both sides."""

  def make(planned, read):
    return planned.make(lambda name: read(f'{prefix}{name}'))

  return {f'{prefix}{name}': dataclasses.replace(
      planned, inputs=tuple(f'{prefix}{name}' for name in planned.inputs), make=functools.partial(make, planned))
      for name, planned in plans.items()}


def _tables_differ(source: sources.StateSource, params: Mapping[str, Any]) -> bool:
  return not all(layout_plan.tables_are_equal(source.read_array(f'{PARAMS}{name}'))
                 for name in layout_plan.layer_tables(params))


def _step(source: sources.StateSource, shapes: Mapping[str, Any], step: int | None) -> PlannedArray:
  leaf = shapes.get(STEP, jax.ShapeDtypeStruct((), np.dtype(np.int32)))
  if step is None and STEP in shapes:
    return layout_plan.unchanged(STEP, leaf)
  value = np.full(leaf.shape, (source.step or 0) if step is None else step, leaf.dtype)
  return PlannedArray(inputs=(), shape=tuple(leaf.shape), dtype=np.dtype(leaf.dtype), make=lambda read: value)


def _other_params(shapes, params, to: str, change: ChangeFn, notes: list[str]) -> dict[str, PlannedArray]:
  """Plans the running average of the parameters."""
  average = _section(shapes, AVERAGE)
  if not average:
    return {}
  if to == 't5x':
    notes.append('The running average of the parameters (param_average) is left out: T5X has no place for it.')
    return {}
  if set(average) != set(params):
    raise ConfigError('param_average has other names than the parameters, so that it cannot be converted with them.')
  return _prefixed(AVERAGE, change(average))


def _mutables(shapes, layout: str | None, wanted: str | None, notes: list[str]) -> dict[str, PlannedArray]:
  mutables = [name for name in shapes if name.startswith(MUTABLES)]
  if mutables and wanted is not None and wanted != layout:
    raise ConfigError(f"--param_layout={wanted}: the network's mutable collections ({mutables[0]}, ...) cannot follow "
                      f'a change of layout. Keep --param_layout={layout}.')
  if mutables:
    notes.append(f"The network's {len(mutables)} mutable arrays (flax_mutables) are passed on as they are.")
  return {name: layout_plan.unchanged(name, shapes[name]) for name in mutables}


def _check_nothing_is_lost(source: sources.StateSource, shapes, notes: list[str]) -> None:
  """Refuses or tells of what a Hugging Face folder has no place for."""
  mutables = [name for name in shapes if name.startswith(MUTABLES)]
  if mutables:
    raise ConfigError(f'--to=hugging_face: {source.path!r} has mutable collections of the network ({mutables[0]}, ...'
                      "), which decide what it computes, and transformers' models have no place for them. Convert to "
                      't5x_lite or t5x.')
  if any(name.startswith(AVERAGE) for name in shapes):
    notes.append('The folder has the trained parameters; their running average (param_average) is left out.')


def _note_what_is_missing(source: sources.StateSource, to: str, with_states: bool, notes: list[str]) -> None:
  if to == 't5x' and not with_states:
    notes.append('It has no state of an optimizer: to train from it, T5X needs RestoreCheckpointConfig with '
                 "fallback_to_scratch = True and assignment_map = ((r'state/param_states.*', None),).")
  network = source.metadata.get('network') or {}
  if to == 't5x' and network.get('scale_tied_logits') is False:
    notes.append('Careful: the logits of this network are tied and not scaled (scale_tied_logits=False), which no file '
                 "of this form records. T5X's networks divide tied logits by sqrt(emb_dim): for them, multiply "
                 'decoder/decoder_norm/scale by sqrt(emb_dim).')
  optimizer = source.metadata.get('optimizer') or {}
  if optimizer.get('evaluates_other_params') and (to == 'hugging_face' or not with_states):
    notes.append(f'Careful: the run\'s optimizer, {optimizer.get("name")}, evaluates other parameters than those it '
                 'stores, and knows which from its state. The stored ones are what is written here.')


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer's state


def _optimizer_state(source, shapes, params, to: str, change: ChangeFn, wanted: str | None,
                     notes: list[str]) -> dict[str, PlannedArray]:
  """Plans the optimizer's state, or says why there is none."""
  states = {name: leaf for name, leaf in shapes.items() if name.startswith(PARAM_STATES)}
  if not states:
    if wanted == 'keep':
      raise ConfigError(f'--optimizer_state=keep: {source.path!r} holds no state of an optimizer. Leave the flag out.')
    return {}
  if to == 'hugging_face' or wanted == 'drop':
    why = ': a Hugging Face folder has no place for it' if to == 'hugging_face' else ', as asked'
    notes.append(f"The optimizer's state, {len(states)} arrays, is left out{why}.")
    return {}
  if change is _no_change:
    return _no_change(states)
  param_shapes = {name: _stored_shape(leaf) for name, leaf in params.items()}
  result, left = {}, dict(states)
  for prefix in _tree_prefixes(states, next(iter(params))):
    tree = _section(states, prefix)
    if {name: _stored_shape(leaf) for name, leaf in tree.items()} == param_shapes:
      result |= _prefixed(prefix, change(tree))
      left = {name: leaf for name, leaf in left.items() if not name.startswith(prefix)}
  stuck = [name for name, leaf in left.items() if leaf.shape]
  if stuck:
    raise ConfigError(f"The optimizer's state cannot follow a change of parameter layout: {stuck[0]} "
                      f'{tuple(left[stuck[0]].shape)}, and {len(stuck) - 1} more, are not shaped like the parameters. '
                      'Give --optimizer_state=drop, with which the optimizer starts afresh, or keep the layout.')
  return result | _no_change(left)


def _stored_shape(leaf: Any) -> tuple[int, ...]:
  return tuple(leaf.shape)


def _tree_prefixes(states: Mapping[str, Any], param: str) -> list[str]:
  """Returns where trees with an entry for the parameter `param` begin."""
  return [name.removesuffix(param) for name in states if name.endswith(f'/{param}')]
