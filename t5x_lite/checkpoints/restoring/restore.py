"""Restoring a state into a target state, by a chain of builders over stored states of any format.

Checkpoints are verified, the result is compared with the target, and only the needed arrays are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import logging
from typing import Any
import urllib.parse

import jax
import jax.numpy as jnp

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite import tree_utils
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints import sources
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.builders import base
from t5x_lite.checkpoints.builders import chain
from t5x_lite.checkpoints.restoring import lazy_arrays
from t5x_lite.checkpoints.restoring import transforms
from t5x_lite.formatting import first_names
from t5x_lite.formatting import group_names
from t5x_lite.networks.t5_config import StackConfig
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)

# Arrays to which the dtype options apply; the optimizer's state keeps its dtypes.
_CAST_SECTIONS = ('target/', 'param_average/')
_WORDS_OF_SECTIONS = ("the optimizer's state", 'averages of parameters')
# Number of names that a log line lists without line breaks.
_MAX_NAMES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
  """Difference of a stored state from the state of a model.

  Attributes:
    new: names of arrays that are not restored and get new values.
    ignored: names of stored arrays that are not in the state of the model.
  """

  new: tuple[str, ...] = ()
  ignored: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
  """A restored checkpoint.

  Attributes:
    state: nested dict with the names of the target state.
    data_state: position of this process's data iterator; None if it was not stored or not requested. If the number of
      processes has changed, it is that of process 0: see `num_data_processes`.
    num_data_processes: number of processes that stored dataset state; 0 without dataset state.
    step: the training step.
    path: path of the checkpoint; None if builders made the state from other checkpoints.
    is_resuming: whether the checkpoint is one of the run's own.
    is_verified: whether the files were compared with their hashes; False without a manifest.
    metadata: values recorded by the caller of `save`; for other programs see `StateSource.metadata`.
    metrics: metrics known when the checkpoint was saved.
    format: stored format, one of `sources.FORMATS`.
  """

  state: dict[str, Any]
  data_state: dict[str, bytes] | None
  num_data_processes: int
  step: int
  path: str | None
  is_resuming: bool = False
  is_verified: bool = False
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  format: str = sources.OwnSource.format


def is_cast(name: str) -> bool:
  """Return True if the dtype options apply to the array `name`."""
  return name.startswith(_CAST_SECTIONS)


def restore_checkpoint(
  path: discovery.PathLike | None,
  target: transforms.StateDict,
  *,
  shardings: Any = None,
  restore_cfg: config.RestoreCheckpointConfig | None = None,
  transformation_fns: Sequence[base.StateBuilder | transforms.RestoreStateTransformationFn] = (),
  initial_state_fn: Callable[[], transforms.StateDict] | None = None,
  from_params_fn: Callable[[transforms.StateDict], transforms.StateDict] | None = None,
  is_resuming: bool = False,
  network: StackConfig | None = None,
  optional: Mapping[str, Mapping[str, Any]] | None = None,
) -> RestoredCheckpoint:
  """Restore a checkpoint into the structure of `target`. All processes must call this together.

  Arrays that no builder computes are read together; with several processes each reads only the parts of its devices if
  the format is Orbax's. Computed arrays are read and placed a few at a time. A function with T5X's signature gets the
  entire state in host memory.

  If no optimizer state is stored (Hugging Face folders), `from_params_fn` makes it from the restored parameters, and
  also the average of the parameters. If no mutable collections are stored, they come from `initial_state_fn`. A run
  that resumes (`is_resuming`) requires all arrays in the checkpoint.

  Args:
    path: path of the checkpoint, in any format; None if `restore_cfg.builders` read the checkpoints.
    target: nested dict of arrays or `jax.ShapeDtypeStruct`s with the names, shapes and dtypes of the result;
      `restore_cfg.dtype` overrides the dtypes of parameters.
    shardings: a sharding for all arrays, or a nested dict of shardings with the names of `target`. None: the sharding
      of each leaf of `target`, and a NumPy array for a leaf without a sharding.
    restore_cfg: renaming, strictness, dtype, dataset state, functions and builders; its path and mode are ignored.
    transformation_fns: further builders or functions, applied before those of `restore_cfg` and also when resuming,
      e.g. a change of parameter layout (`param_layout_fns`).
    initial_state_fn: function that returns an initialised state with the names of `target`, for `fallback_to_scratch`
      and for mutable collections; called only if an array is missing.
    from_params_fn: function from the restored state, as nested dict, to a state with initial `state/param_states` and
      `param_average`; called only if such an array is missing. With None, `fallback_to_scratch` applies to them.
    is_resuming: whether the checkpoint is the run's own; `assignment_map` and `builders` are then ignored.
    network: configuration of the network, whose parameter layout the result gets; None keeps the stored layout.
    optional: beginning of names to the initial values, by name, of arrays that the checkpoint may lack; arrays whose
      names begin so may also be only in the checkpoint.

  Returns:
    The restored state and the values stored with it.

  Raises:
    CheckpointDamagedError: a file differs from its hash in the manifest.
    CheckpointError: the checkpoint does not exist or does not fit.
    ConfigError: `fallback_to_scratch` needs `initial_state_fn`, or the path is remote.
  """
  name = None if path is None else sources.folder_of(path)
  cfg = restore_cfg or config.RestoreCheckpointConfig(path=name, mode='specific')
  cfg.check()
  builders = chain.chain_of(
    name, cfg, transformation_fns=transformation_fns, is_resuming=is_resuming
  )
  goal = base.TargetState(
    state_dict=target,
    wanted=_wanted_leaves(target, cfg.dtype),
    network=network,
    is_resuming=is_resuming,
  )
  flat_shardings = _flat_shardings(shardings, target, goal.wanted)
  optional = optional or {}
  stored, built = _build(
    builders,
    goal,
    cfg,
    name,
    begins=from_params_fn is not None,
    initializes=initial_state_fn is not None,
    optional=optional,
  )
  added = {}
  for values in optional.values():
    added |= {each: value for each, value in values.items() if each not in built.arrays}
  if added:
    _logger.info('New in this run, without values in the checkpoint: %s.', first_names(list(added)))
  fit = _fit_of(stored, built, goal)
  missing = [each for each in fit.new if each not in added]
  begun = []
  if from_params_fn is not None and not is_resuming:
    begun = [each for each in missing if each.startswith(base.FROM_PARAMS)]
  others = [each for each in missing if each not in begun]
  if fit.ignored:
    _logger.info('Not restored, since the model does not have them: %s.', _joined(fit.ignored))
  arrays = {each: array for each, array in built.arrays.items() if each in goal.wanted}
  state = _placed(arrays, others, goal, flat_shardings, initial_state_fn)
  state |= state_io.place(added, goal.wanted, flat_shardings)
  del arrays
  # This frees the results of functions.
  built = built.replace(arrays={}, initialized=built.initialized | set(missing))
  if from_params_fn is not None and begun:
    _logger.info('New, made from the restored parameters: %s.', _sections_or_names(begun, state))
    made = tree_utils.flatten_dict(from_params_fn(tree_utils.unflatten_dict(state)))
    state |= state_io.place({each: made[each] for each in begun}, goal.wanted, flat_shardings)
  if any(builder.INPUT == base.ARRAYS for builder in builders):
    complete = chain.run_on_arrays(builders, built.replace(arrays=state), goal)
    state = state_io.place(complete, goal.wanted, flat_shardings)
  if _has_builders(cfg, goal):
    _logger.info(
      'Built the state of step %d from %s: %d of %d arrays; the others are new.',
      built.step or 0,
      chain.describe(name, cfg),
      len(goal.wanted) - len(built.initialized),
      len(goal.wanted),
    )
  return _restored(state, built.step or 0, name, goal, cfg)


def check_fits(
  path: discovery.PathLike | None,
  target: transforms.StateDict,
  *,
  restore_cfg: config.RestoreCheckpointConfig | None = None,
  transformation_fns: Sequence[base.StateBuilder | transforms.RestoreStateTransformationFn] = (),
  is_resuming: bool = False,
  may_begin: bool = False,
  network: StackConfig | None = None,
  optional: Mapping[str, Mapping[str, Any]] | None = None,
) -> Fit:
  """Raise if a state cannot be restored into the structure of `target`; reads no values.

  Functions with T5X's signature are applied to shapes, see `transforms.transform_shapes`.

  Args:
    path: see `restore_checkpoint`.
    target: see `restore_checkpoint`.
    restore_cfg: see `restore_checkpoint`.
    transformation_fns: see `restore_checkpoint`.
    is_resuming: see `restore_checkpoint`.
    may_begin: whether the restore will have `initial_state_fn` and `from_params_fn`.
    network: see `restore_checkpoint`.
    optional: see `restore_checkpoint`.

  Returns:
    The names of the arrays that will be new, and of the stored arrays that will not be restored.

  Raises:
    CheckpointError: the checkpoint does not exist or does not fit.
    ValuesNeededError: a function needs values, so the result is unknown.
  """
  name = None if path is None else sources.folder_of(path)
  cfg = restore_cfg or config.RestoreCheckpointConfig(path=name, mode='specific')
  cfg.check()
  builders = chain.chain_of(
    name, cfg, transformation_fns=transformation_fns, is_resuming=is_resuming
  )
  goal = base.TargetState(
    state_dict=target,
    wanted=_wanted_leaves(target, cfg.dtype),
    network=network,
    is_resuming=is_resuming,
    has_values=False,
  )
  stored, built = _build(
    builders,
    goal,
    cfg,
    name,
    begins=may_begin,
    initializes=may_begin,
    optional=optional or {},
  )
  # An optimizer without state looks like an inference state, for which stored optimizer state is not an error.
  prefix = base.FROM_PARAMS[0]
  left = [each for each in built.arrays if each.startswith(prefix)]
  if is_resuming and left and not any(each.startswith(prefix) for each in goal.wanted):
    raise errors.CheckpointError(
      f'The checkpoint {name!r} holds the state of another optimizer ({left[0]}, ...), but the configured '
      'optimizer has no state. Use the optimizer of the checkpoint, or start a new run from the checkpoint in '
      'another MODEL_DIR.'
    )
  return _fit_of(stored, built, goal)


def _fit_of(stored: base.BuiltState, built: base.BuiltState, goal: base.TargetState) -> Fit:
  return Fit(
    new=tuple(name for name in goal.wanted if name not in built.arrays),
    ignored=tuple(transforms.surplus_names(stored.arrays, goal.wanted)),
  )


def _has_builders(cfg: config.RestoreCheckpointConfig, goal: base.TargetState) -> bool:
  return bool(cfg.builders) and not goal.is_resuming


def _build(
  builders: chain.Chain,
  goal: base.TargetState,
  cfg: config.RestoreCheckpointConfig,
  path: str | None,
  *,
  begins: bool,
  initializes: bool,
  optional: Mapping[str, Mapping[str, Any]],
) -> tuple[base.BuiltState, base.BuiltState]:
  """Compare the state that the builders on shapes build with the wanted one.

  Args:
    builders: the chain.
    goal: the wanted state.
    cfg: strictness.
    path: the checkpoint, None without one.
    begins: whether an optimizer and an average can begin from the parameters.
    initializes: whether missing arrays can be initialised.
    optional: see `restore_checkpoint`.

  Returns:
    (the state that the builders build, the same without parts that are replaced because they are incomplete).

  Raises:
    CheckpointError: the state does not fit.
  """
  built, absent = chain.run_on_shapes(builders, goal)
  surplus = [
    name for name in built.arrays if name.startswith(tuple(optional)) and name not in goal.wanted
  ]
  if surplus:
    _logger.info('In the checkpoint only, left out: %s.', first_names(surplus))
    built = built.without(*surplus)
  if path is None and not any(name.startswith(base.PARAMS) for name in built.arrays):
    raise errors.CheckpointError(
      f'`RestoreCheckpointConfig.builders` must build parameters, got {chain.describe(None, cfg)!r}, which builds '
      'none. Set RestoreCheckpointConfig.path, or begin with builders.Average.'
    )
  if _has_builders(cfg, goal) and base.STEP in goal.wanted and base.STEP not in built.arrays:
    built = built.at_step(built.step or 0)
  sections = ()
  if begins and not goal.is_resuming:
    sections += base.FROM_PARAMS
  if initializes and not goal.is_resuming:
    sections += base.FROM_SCRATCH
  complete = built
  fresh = tuple(section for section in sections if section in absent)
  # A part of which only some arrays are built is replaced.
  partial = {name for name in goal.wanted if name.startswith(fresh) and name not in built.arrays}
  for section in fresh:
    if any(name.startswith(section) for name in partial):
      built = built.without(section)
  # Builders without a checkpoint of the entire model may build some of the parameters, and nothing else.
  has_more = any(name.startswith(base.FROM_PARAMS) for name in built.arrays)
  is_partial = path is None and initializes and not has_more
  may_be_new = _names_that_may_be_new(cfg, goal.wanted)
  expected = {
    name: leaf
    for name, leaf in goal.wanted.items()
    if name in built.arrays or not (name.startswith((*fresh, *optional)) or name in may_be_new)
  }
  transforms.check_fit(
    built.arrays,
    expected,
    allow_surplus=bool(cfg.fallback_to_scratch) or not cfg.strict,
    allow_missing=cfg.fallback_to_scratch is True or is_partial,
    where=chain.describe(path, cfg),
    what='state built from' if _has_builders(cfg, goal) else 'checkpoint',
  )
  return complete, built


def _names_that_may_be_new(
  cfg: config.RestoreCheckpointConfig, wanted: Mapping[str, Any]
) -> frozenset[str]:
  """Return the parameters that the patterns of `fallback_to_scratch` match, and the state that belongs to them."""
  if isinstance(cfg.fallback_to_scratch, bool):
    return frozenset()
  owner = 'RestoreCheckpointConfig.fallback_to_scratch'
  params = base.matching_params(cfg.fallback_to_scratch, wanted, owner)
  return frozenset([*params, *_state_of(params, wanted)])


def _state_of(params: Iterable[str], names: Iterable[str]) -> list[str]:
  """Return the names, of optimizer state and averages, that have the path of one of the parameters."""
  paths = {tuple(name.removeprefix(base.PARAMS).split('/')) for name in params}
  lengths = {len(path) for path in paths}
  found = []
  for name in names:
    parts = tuple(name.split('/'))
    if name.startswith(base.FROM_PARAMS) and any(
      parts[i : i + length] in paths for length in lengths for i in range(len(parts))
    ):
      found.append(name)
  return found


def describe_names(names: Sequence[str]) -> list[str]:
  """Return texts for many arrays: groups of parameters, the number of arrays of their state, and the others."""
  params = [name for name in names if name.startswith(base.PARAMS)]
  theirs = _state_of(params, names)
  texts = group_names(params)
  if theirs:
    texts.append(f'their optimizer state and averages ({len(theirs)} arrays)')
  left = set(names).difference(params, theirs)
  for section, words in zip(base.FROM_PARAMS, _WORDS_OF_SECTIONS, strict=True):
    others = [name for name in names if name in left and name.startswith(section)]
    if len(others) > _MAX_NAMES:
      texts.append(f'{words} ({len(others)} arrays)')
      left.difference_update(others)
  return texts + group_names(name for name in names if name in left)


def _joined(names: Sequence[str]) -> str:
  texts = describe_names(names)
  if len(texts) <= _MAX_NAMES:
    return ', '.join(texts)
  return '\n  '.join([f'{len(names)} arrays:', *texts])


def _placed(
  arrays: Mapping[str, Any],
  missing: Sequence[str],
  goal: base.TargetState,
  shardings: Mapping[str, jax.sharding.Sharding | None],
  initial_state_fn: Callable[[], transforms.StateDict] | None,
) -> dict[str, Any]:
  """Return the built arrays, and the initial arrays that are `missing`, on their devices."""
  initial = _initial_arrays(missing, arrays, initial_state_fn)
  state = lazy_arrays.place(arrays, goal.wanted, shardings, initial)
  return state | state_io.place({name: initial[name] for name in missing}, goal.wanted, shardings)


def _restored(
  state: Mapping[str, Any],
  step: int,
  path: str | None,
  goal: base.TargetState,
  cfg: config.RestoreCheckpointConfig,
) -> RestoredCheckpoint:
  """Return a complete state with the values stored next to the checkpoint of `path`."""
  nested = _like_target(goal.state_dict, state)
  if path is None:
    return RestoredCheckpoint(
      state=nested, data_state=None, num_data_processes=0, step=step, path=None
    )
  source = goal.open(path)
  if not _has_builders(cfg, goal):
    step = _step(source, state)
  found = source.manifest
  data_state = None
  num_data_processes = 0
  if found is not None and cfg.restore_dataset:
    data_state = read_data_state(path, found)
    num_data_processes = found.num_data_processes
  return RestoredCheckpoint(
    state=nested,
    data_state=data_state,
    num_data_processes=num_data_processes,
    step=step,
    path=path,
    is_resuming=goal.is_resuming,
    is_verified=goal.is_verified(path),
    metadata=source.metadata,
    metrics=found.metrics if found else {},
    format=source.format,
  )


def _initial_arrays(
  missing: Sequence[str],
  arrays: Mapping[str, Any],
  initial_state_fn: Callable[[], transforms.StateDict] | None,
) -> dict[str, Any]:
  """Return the initial arrays that are missing, and those that `arrays` need; may be empty.

  Raises:
    ConfigError: some are needed, and there is no function for the initial state.
  """
  needed = lazy_arrays.initial_names(arrays)
  if not missing and not needed:
    return {}
  if initial_state_fn is None:
    if needed:
      raise errors.ConfigError(
        f'The builders need initial values of {first_names(sorted(needed))}, and there is no seed for them. Set '
        'fallback_init_rng, or use builders without initial values.'
      )
    raise errors.ConfigError(
      f'fallback_to_scratch: the checkpoint lacks {first_names(missing)}, and there is no function for the initial '
      'state. Restore through a command that initialises the model, or set fallback_to_scratch=False.'
    )
  if missing:
    _logger.info('New, initialised from scratch: %s.', _joined(missing))
  initial = tree_utils.flatten_dict(initial_state_fn())
  return {name: initial[name] for name in dict.fromkeys((*missing, *sorted(needed)))}


def _sections_or_names(missing: Sequence[str], state: Mapping[str, Any]) -> str:
  """Return the `missing` names for a message, with one entry for a section of which `state` has no array."""
  parts = []
  for section, words in zip(base.FROM_PARAMS, _WORDS_OF_SECTIONS, strict=True):
    names = [name for name in missing if name.startswith(section)]
    if names and not any(name.startswith(section) for name in state):
      parts.append(f'{words} ({len(names)} arrays)')
    elif names:
      parts.append(first_names(names))
  return '; '.join(parts)


def load(path: discovery.PathLike, *, dtype: Any = None) -> dict[str, Any]:
  """Return all arrays of a checkpoint, without a model.

  Args:
    path: path of the checkpoint.
    dtype: floating dtype for the parameters; None for the stored dtype.

  Returns:
    Nested dict of NumPy arrays, in their stored dtypes otherwise.

  Raises:
    CheckpointDamagedError: a file differs from its hash in the manifest.
    CheckpointError: the checkpoint does not exist.
  """
  source = sources.open_source(path)
  source.verify()
  flat = source.read({name: (leaf.dtype, None) for name, leaf in source.shapes().items()})
  if dtype is not None:
    flat = state_io.cast_floating(flat, is_cast, dtype)
  return tree_utils.unflatten_dict(flat)


def read_metadata(path: discovery.PathLike) -> Mapping[str, Any]:
  """Return the metadata of a checkpoint; reads no values.

  These are the values recorded by the caller of `save`; for other programs see `StateSource.metadata`.

  Raises:
    CheckpointDamagedError: the manifest or index is damaged.
    CheckpointError: the checkpoint does not exist.
  """
  return sources.open_source(path).metadata


def read_shapes(path: discovery.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the shape and dtype of each array of a checkpoint by name; reads no values.

  Raises:
    CheckpointDamagedError: the manifest or index is damaged; other files are not verified.
    CheckpointError: the checkpoint does not exist.
  """
  return sources.open_source(path).shapes()


def data_file_name(key: str) -> str:
  """Return the name of the file for the entry `key` of a dataset state."""
  return urllib.parse.quote(key, safe='') + '.bin'


def data_dir_name(process_index: int, process_count: int) -> str:
  """Return the path of a process's dataset state, relative to the checkpoint."""
  return f'{discovery.DATASET_DIRNAME}/process_{process_index}-of-{process_count}'


def read_data_state(
  path: discovery.PathLike, found: manifest.Manifest | None
) -> dict[str, bytes] | None:
  """Return the stored dataset state of this process (of process 0 if the number of processes has changed), or None."""
  if found is None or not found.num_data_processes:
    return None
  count = found.num_data_processes
  process = 0
  if count == jax.process_count():
    process = jax.process_index()
  folder = f'{data_dir_name(process, count)}/'
  state = {}
  for name in found.files:
    if name.startswith(folder):
      key = urllib.parse.unquote(name.rpartition('/')[2].removesuffix('.bin'))
      state[key] = (files.path(path) / name).read_bytes()
  return state


def check_keeps_dtypes(
  target: transforms.StateDict, restore_cfg: config.RestoreCheckpointConfig
) -> None:
  """Raise if arrays would be restored in another dtype than in `target`, for which a training step is compiled.

  Args:
    target: nested dict of arrays or `jax.ShapeDtypeStruct`s.
    restore_cfg: options of the restore.

  Raises:
    ConfigError: with the name of the first such array.
  """
  flat = tree_utils.flatten_dict(target)
  for name, wanted in _wanted_leaves(target, restore_cfg.dtype).items():
    if wanted.dtype != flat[name].dtype:
      raise checks.invalid(
        'RestoreCheckpointConfig',
        'dtype',
        f'None or {flat[name].dtype.name!r} in training, the dtype of {name}',
        restore_cfg.dtype,
        'Set it to None; to compute in another dtype, set `Trainer.train_dtype`.',
      )


def _wanted_leaves(target: transforms.StateDict, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
  leaves = {}
  for name, leaf in tree_utils.flatten_dict(target).items():
    if leaf is None:
      continue
    leaf_dtype = leaf.dtype
    if dtype is not None and is_cast(name) and jnp.issubdtype(leaf_dtype, jnp.floating):
      leaf_dtype = jnp.dtype(dtype)
    leaves[name] = jax.ShapeDtypeStruct(leaf.shape, leaf_dtype)
  return leaves


def _flat_shardings(
  shardings: Any,
  target: transforms.StateDict,
  wanted: Mapping[str, Any],
) -> dict[str, jax.sharding.Sharding | None]:
  if isinstance(shardings, jax.sharding.Sharding):
    return dict.fromkeys(wanted, shardings)
  if shardings is None:
    leaves = tree_utils.flatten_dict(target)
    found: dict[str, jax.sharding.Sharding | None] = dict.fromkeys(wanted)
    for name in wanted:
      leaf = leaves[name]
      if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        found[name] = leaf.sharding
    return found
  flat = tree_utils.flatten_dict(shardings)
  return {name: flat[name] for name in wanted}


def _like_target(target: transforms.StateDict, flat_state: Mapping[str, Any]) -> dict[str, Any]:
  flat_target = tree_utils.flatten_dict(target, keep_empty=True)
  flat = {name: flat_state.get(name, leaf) for name, leaf in flat_target.items()}
  return tree_utils.unflatten_dict(flat)


def _step(source: sources.StateSource, flat_state: Mapping[str, Any]) -> int:
  if source.manifest is None and 'state/step' in flat_state:
    return int(flat_state['state/step'])
  if source.step is not None:
    return source.step
  return discovery.get_step_from_checkpoint_dir(source.path)[1]
