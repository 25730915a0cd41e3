"""From a stored state to the one that is wanted: verify it, fit it, read only what is needed.

What is stored may have any of the forms of `sources`. Which checkpoint it is to be, `choice` says.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors, tree_utils
from t5x_lite.checkpoints import config as config_lib
from t5x_lite.checkpoints import discovery, manifest, sources, state_io, transforms

_logger = logging.getLogger(__name__)

# Which arrays the dtype options of the configs speak of; the optimizer's state keeps its own dtypes.
_CAST_SECTIONS = ('target/', 'param_average/')
# Parts of a state that follow from the parameters, and those that only a fresh state has.
_FROM_PARAMS = ('state/param_states/', 'param_average/')
_FROM_SCRATCH = ('flax_mutables/',)
_NUM_NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
  """What came out of a checkpoint.

  Attributes:
    state: nested dict with the names of the wanted state (all stored names where none was given).
    data_state: position of this process's data iterator; None when there is none or it was not asked for. When the
      number of processes has changed it is that of process 0: see `num_data_processes`.
    num_data_processes: how many processes stored dataset state, 0 for none.
    step: the training step.
    path: where it was read from.
    is_resuming: whether it is one of the run's own checkpoints.
    is_verified: whether its bytes are known to be those that were written; False for one without a manifest.
    metadata: what the caller of `save` recorded; of other programs' checkpoints what is known, see `StateSource`.
    metrics: metrics known when it was saved.
    format: the form it was stored in, one of `sources.FORMATS`.
  """

  state: dict[str, Any]
  data_state: dict[str, bytes] | None
  num_data_processes: int
  step: int
  path: str
  is_resuming: bool = False
  is_verified: bool = False
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  format: str = sources.OwnSource.format


def is_cast(name: str) -> bool:
  """Returns whether the array `name` is one that the dtype options of the configs speak of."""
  return name.startswith(_CAST_SECTIONS)


def restore_checkpoint(
    path: discovery.PathLike,
    target: transforms.StateDict,
    *,
    shardings: Any = None,
    restore_cfg: config_lib.RestoreCheckpointConfig | None = None,
    transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    initial_state_fn: Callable[[], transforms.StateDict] | None = None,
    from_params_fn: Callable[[transforms.StateDict], transforms.StateDict] | None = None,
    is_resuming: bool = False,
) -> RestoredCheckpoint:
  """Restores one checkpoint into the form of `target`. All processes must call this together.

  Of several processes each reads only the parts that its devices hold, straight into their layout, unless there are
  transforms that look at values, or the checkpoint is in another form than Orbax's: then it reads whole arrays into
  host memory, as a single process does.

  What is stored without any optimizer state (Hugging Face folders) begins a new one, made of the restored parameters by
  `from_params_fn`, and so does an average of the parameters. Likewise mutable collections come from
  `initial_state_fn` where none are stored. A run that goes on (`is_resuming`) has all of it, or is refused.

  Args:
    path: of the checkpoint, in any form.
    target: nested dict of arrays or `jax.ShapeDtypeStruct`s: the names, shapes and dtypes that are wanted. A restored
      array has the target's dtype unless `restore_cfg.dtype` says otherwise.
    shardings: a sharding for all arrays or a nested dict of them, with the names of `target`. None lays each array out
      as its leaf of `target` says, and returns a NumPy array where that has no sharding.
    restore_cfg: renaming, strictness, dtype, dataset state and transforms; its path and mode are not looked at.
    transformation_fns: further transforms, applied before those of `restore_cfg` and also when resuming; the place for
      a change of parameter layout (`transforms.convert_param_trees`).
    initial_state_fn: returns a fresh state with the names of `target`, for `fallback_to_scratch` and for mutable
      collections; called only if an array is missing.
    from_params_fn: given the restored state as nested dict, returns one with `state/param_states` and `param_average`
      as they are when training begins with its parameters; called only if such an array is missing. None leaves them to
      `fallback_to_scratch`.
    is_resuming: whether the checkpoint is the run's own, which turns `assignment_map` off.

  Returns:
    The restored state, and what was stored with it.

  Raises:
    CheckpointDamagedError: the bytes on disk are not those that were written.
    CheckpointError: there is no such checkpoint, or it does not fit.
    ConfigError: `fallback_to_scratch` without `initial_state_fn`, or a remote path.
  """
  cfg = restore_cfg or config_lib.RestoreCheckpointConfig(path=os.fspath(path), mode='specific')
  source = sources.open_source(path)
  is_verified = source.verify()
  stored = source.shapes()
  wanted = _wanted_leaves(target, cfg.dtype)
  flat_shardings = _flat_shardings(shardings, target, wanted)
  names = _sources(stored, wanted, cfg, is_resuming)
  fresh = _fresh_sections(names, is_resuming, from_params_fn is not None, initial_state_fn is not None)
  fns = (*transformation_fns, *cfg.state_transformation_fns)
  if fns:
    values = source.read({stored_name: (stored[stored_name].dtype, None) for stored_name in names.values()})
    tree = tree_utils.unflatten_dict({name: values[stored_name] for name, stored_name in names.items()})
    del values
    for fn in fns:
      tree = fn(tree, target, is_resuming=is_resuming)
    leaves = _without_halves(tree_utils.flatten_dict(tree), wanted, fresh)
    del tree
    _check_fit(leaves, wanted, fresh, cfg, path)
    state = state_io.place({name: leaf for name, leaf in leaves.items() if name in wanted}, wanted, flat_shardings)
    del leaves
  else:
    _check_fit({name: stored[stored_name] for name, stored_name in names.items()}, wanted, fresh, cfg, path)
    names = {name: stored_name for name, stored_name in names.items() if name in wanted}
    state = _read_into_place(source, names, wanted, flat_shardings)
  state = _completed(state, wanted, flat_shardings, initial_state_fn, None if is_resuming else from_params_fn)
  found = source.manifest
  data_state = read_data_state(path, found) if cfg.restore_dataset else None
  return RestoredCheckpoint(
      state=_like_target(target, state), data_state=data_state,
      num_data_processes=found.num_data_processes if found and cfg.restore_dataset else 0,
      step=_step(source, state), path=os.fspath(path), is_resuming=is_resuming, is_verified=is_verified,
      metadata=source.metadata, metrics=found.metrics if found else {}, format=source.format)


def check_fits(path: discovery.PathLike, target: transforms.StateDict, *,
               restore_cfg: config_lib.RestoreCheckpointConfig | None = None,
               transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (), is_resuming: bool = False,
               may_begin: bool = False) -> None:
  """Refuses a checkpoint that cannot be restored into the form of `target`; reads no values, so it is cheap.

  Transforms are applied to shapes, see `transforms.transform_shapes`.

  Args:
    path: of the checkpoint.
    target: see `restore_checkpoint`.
    restore_cfg: see `restore_checkpoint`.
    transformation_fns: see `restore_checkpoint`.
    is_resuming: see `restore_checkpoint`.
    may_begin: whether the restore will have the functions that make what training begins with.

  Raises:
    CheckpointError: there is no such checkpoint, or it does not fit.
    ValuesNeededError: a transform looks at values, so that nothing can be said.
  """
  cfg = restore_cfg or config_lib.RestoreCheckpointConfig(path=os.fspath(path), mode='specific')
  stored, wanted = read_shapes(path), _wanted_leaves(target, cfg.dtype)
  names = _sources(stored, wanted, cfg, is_resuming)
  fresh = _fresh_sections(names, is_resuming, may_begin, may_begin)
  leaves = {name: stored[stored_name] for name, stored_name in names.items()}
  if fns := (*transformation_fns, *cfg.state_transformation_fns):
    tree = tree_utils.unflatten_dict(leaves)
    for fn in fns:
      tree = transforms.transform_shapes(fn, tree, target, is_resuming=is_resuming)
    leaves = _without_halves(tree_utils.flatten_dict(tree), wanted, fresh)
  _check_fit(leaves, wanted, fresh, cfg, path)
  # An optimizer without state of its own looks like an inference state, which may leave the optimizer's state behind.
  prefix = 'state/param_states'
  left = [name for name in leaves if name.startswith(prefix)]
  if is_resuming and left and not any(name.startswith(prefix) for name in wanted):
    raise errors.CheckpointError(
        f'The checkpoint {os.fspath(path)!r} holds the state of another optimizer ({left[0]}, ...), and the configured '
        'one has none. Use the optimizer that wrote it, or start another run from it in another MODEL_DIR.')


def _sources(stored, wanted, cfg: config_lib.RestoreCheckpointConfig, is_resuming: bool) -> dict[str, str]:
  if cfg.assignment_map and not is_resuming:
    return transforms.assignment(list(stored), list(wanted), cfg.assignment_map)
  return {name: name for name in stored}


def _fresh_sections(stored: Iterable[str], is_resuming: bool, from_params: bool, from_scratch: bool) -> tuple[str, ...]:
  """Returns the parts of a state that nothing is stored of, and that may be made in its place."""
  if is_resuming:
    return ()
  stored = list(stored)
  sections = (_FROM_PARAMS if from_params else ()) + (_FROM_SCRATCH if from_scratch else ())
  return tuple(section for section in sections if not any(name.startswith(section) for name in stored))


def _without_halves(leaves: Mapping[str, Any], wanted: Iterable[str], fresh: tuple[str, ...]) -> dict[str, Any]:
  """Returns `leaves` without those parts that a transform has made for some of the wanted names only."""
  halves = tuple(section for section in fresh
                 if any(name.startswith(section) and name not in leaves for name in wanted))
  return {name: leaf for name, leaf in leaves.items() if not name.startswith(halves)}


def _check_fit(leaves, wanted, fresh, cfg: config_lib.RestoreCheckpointConfig, path: discovery.PathLike) -> None:
  wanted = {name: leaf for name, leaf in wanted.items() if name in leaves or not name.startswith(fresh)}
  transforms.check_fit(
      leaves, wanted, allow_surplus=not cfg.strict or cfg.fallback_to_scratch, allow_missing=cfg.fallback_to_scratch,
      where=os.fspath(path))


def _completed(state, wanted, shardings, initial_state_fn, from_params_fn) -> dict[str, Any]:
  """Returns `state` with what it lacks of `wanted`."""
  missing = [name for name in wanted if name not in state]
  made = [name for name in missing if from_params_fn is not None and name.startswith(_FROM_PARAMS)]
  rest = [name for name in missing if name not in made]
  if rest:
    state = state | _from_scratch(rest, initial_state_fn, wanted, shardings)
  if made:
    _logger.info('Begun anew with the restored parameters, since the checkpoint lacks them: %s.',
                 _sections_or_names(made, state))
    fresh = tree_utils.flatten_dict(from_params_fn(tree_utils.unflatten_dict(state)))
    state = state | state_io.place({name: fresh[name] for name in made}, wanted, shardings)
  return state


def _sections_or_names(missing: Sequence[str], state: Mapping[str, Any]) -> str:
  """Returns what is `missing` beside `state`, in words where all of a section is: its hundreds of names say no more."""
  told = []
  for section, words in zip(_FROM_PARAMS, ("the optimizer's state", 'averages of parameters'), strict=True):
    names = [name for name in missing if name.startswith(section)]
    if names and not any(name.startswith(section) for name in state):
      told.append(f'{words} ({len(names)} arrays)')
    elif names:
      told.append(_shorten(names))
  return '; '.join(told)


def load(path: discovery.PathLike, *, dtype: Any = None) -> dict[str, Any]:
  """Returns everything that a checkpoint stores, without a model.

  Args:
    path: of the checkpoint.
    dtype: floating dtype for the parameters; None for the stored one.

  Returns:
    Nested dict of NumPy arrays.

  Raises:
    CheckpointDamagedError: the bytes on disk are not those that were written.
    CheckpointError: there is no such checkpoint.
  """
  source = sources.open_source(path)
  source.verify()
  flat = source.read({name: (leaf.dtype, None) for name, leaf in source.shapes().items()})
  if dtype is not None:
    flat = state_io.cast_floating(flat, is_cast, dtype)
  return tree_utils.unflatten_dict(flat)


def read_metadata(path: discovery.PathLike) -> Mapping[str, Any]:
  """Returns what is known about a checkpoint besides its arrays (cheap: reads no values).

  Of our own it is what the caller of `save` recorded; of others see `StateSource.metadata`.

  Raises:
    CheckpointDamagedError: the manifest or index is not what was written.
    CheckpointError: there is no such checkpoint.
  """
  return sources.open_source(path).metadata


def read_shapes(path: discovery.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the name, shape and dtype of each array of a checkpoint (cheap: reads no values).

  Raises:
    CheckpointDamagedError: the manifest or index is not what was written; nothing else is verified.
    CheckpointError: there is no such checkpoint.
  """
  return sources.open_source(path).shapes()


def data_file_name(key: str) -> str:
  """Returns the name of the file that holds the entry `key` of a dataset state."""
  return urllib.parse.quote(key, safe='') + '.bin'


def data_dir_name(process_index: int, process_count: int) -> str:
  """Returns the path, relative to a checkpoint, of one process's dataset state."""
  return f'{discovery.DATASET_DIRNAME}/process_{process_index}-of-{process_count}'


def read_data_state(path: discovery.PathLike, found: manifest.Manifest | None) -> dict[str, bytes] | None:
  """Returns this process's stored dataset state (process 0's, if the number of processes has changed), or None."""
  if found is None or not found.num_data_processes:
    return None
  count = found.num_data_processes
  folder = data_dir_name(jax.process_index() if count == jax.process_count() else 0, count) + '/'
  state = {}
  for name in found.files:
    if name.startswith(folder):
      key = urllib.parse.unquote(name.removeprefix(folder).removesuffix('.bin'))
      with open(os.path.join(path, name), 'rb') as f:
        state[key] = f.read()
  return state


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


def _flat_shardings(shardings: Any, target: transforms.StateDict, wanted: Mapping[str, Any],
                    ) -> dict[str, jax.sharding.Sharding | None]:
  if isinstance(shardings, jax.sharding.Sharding):
    return dict.fromkeys(wanted, shardings)
  if shardings is None:
    leaves = tree_utils.flatten_dict(target)
    return {name: leaves[name].sharding if isinstance(leaves[name], jax.Array | jax.ShapeDtypeStruct) else None
            for name in wanted}
  flat = tree_utils.flatten_dict(shardings)
  without = [name for name in wanted if name not in flat]
  if without:
    raise ValueError(f'restore: shardings lack {without[:5]}; expected one for each array of the wanted state.')
  return {name: flat[name] for name in wanted}


def _read_into_place(source: sources.StateSource, names, wanted, shardings) -> dict[str, Any]:
  # One stored array may serve several names: it is read in the layout of the first, and copied for the others.
  first: dict[str, str] = {}
  for name, stored_name in names.items():
    first.setdefault(stored_name, name)
  arrays = source.read({stored_name: (wanted[name].dtype, shardings[name]) for stored_name, name in first.items()})
  return state_io.place({name: arrays[stored_name] for name, stored_name in names.items()}, wanted, shardings)


def _from_scratch(missing, initial_state_fn, wanted, shardings) -> dict[str, Any]:
  if initial_state_fn is None:
    raise errors.ConfigError(
        f'fallback_to_scratch: the checkpoint lacks {missing[:5]}, and the caller gave no initial state to take them '
        'from. Restore through a command that initialises the model, or set fallback_to_scratch=False.')
  _logger.info('Initialised from scratch, since the checkpoint lacks them: %s.', _shorten(missing))
  initial = tree_utils.flatten_dict(initial_state_fn())
  return state_io.place({name: initial[name] for name in missing}, wanted, shardings)


def _like_target(target: transforms.StateDict, flat_state: Mapping[str, Any]) -> dict[str, Any]:
  flat_target = tree_utils.flatten_dict(target, keep_empty=True)
  return tree_utils.unflatten_dict({name: flat_state.get(name, leaf) for name, leaf in flat_target.items()})


def _step(source: sources.StateSource, flat_state: Mapping[str, Any]) -> int:
  if source.manifest is None and 'state/step' in flat_state:
    return int(flat_state['state/step'])
  if source.step is not None:
    return source.step
  return discovery.get_step_from_checkpoint_dir(source.path)[1]


def _shorten(names: Sequence[str]) -> str:
  return ', '.join(names[:_NUM_NAMES_SHOWN]) + (f' and {len(names) - _NUM_NAMES_SHOWN} more'
                                                if len(names) > _NUM_NAMES_SHOWN else '')
