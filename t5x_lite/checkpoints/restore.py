"""From a checkpoint to a state: choose one, verify it, fit it to what is wanted, read only what is needed."""

from __future__ import annotations

import dataclasses
import logging
import os
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x_lite import errors, multihost, tree_utils
from t5x_lite.checkpoints import config as config_lib
from t5x_lite.checkpoints import discovery, manifest, state_io, transforms

_logger = logging.getLogger(__name__)

# Which arrays the dtype options of the configs speak of; the optimizer's state keeps its own dtypes.
_CAST_SECTIONS = ('target/', 'param_average/')


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
    metadata: what the caller of `save` recorded; empty for a checkpoint without a manifest.
    metrics: metrics known when it was saved.
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


def is_cast(name: str) -> bool:
  """Returns whether the array `name` is one that the dtype options of the configs speak of."""
  return name.startswith(_CAST_SECTIONS)


def newest_sound_step(checkpoints_dir: discovery.PathLike) -> int | None:
  """Returns the newest step whose checkpoint has a manifest and is what was written.

  Newer ones that are damaged, or have no manifest, are named in a warning. All processes must call this together.

  Args:
    checkpoints_dir: a model directory.

  Returns:
    The step, or None when there is no checkpoint at all.

  Raises:
    CheckpointDamagedError: there are checkpoints and every one is damaged.
  """
  steps = discovery.all_steps(checkpoints_dir)
  newer = [s for s in discovery.all_steps(checkpoints_dir, require_manifest=False) if s > max(steps, default=-1)]
  if newer:
    _logger.warning(
        'Not looking at checkpoint(s) %s in %s: they have no manifest, so they cannot be verified. To use one, name it '
        "(mode='specific').", newer, checkpoints_dir)
  problems = []
  while True:
    # The lead's view counts: on a shared file system directories may appear at different times.
    step = int(multihost.broadcast_from_lead(np.int32(max(steps, default=-1))))
    if step < 0:
      break
    path = discovery.get_checkpoint_dir(checkpoints_dir, step)
    try:
      found = manifest.verify(path)
      if found is None or found.step != step:
        raise errors.CheckpointDamagedError(
            f'The checkpoint {path!r} is that of step {found and found.step}: it has been renamed or copied. Give it its '
            "name back, or name it (mode='specific') in another MODEL_DIR.")
      return step
    except errors.CheckpointDamagedError as e:
      _logger.warning('%s Looking for an older one.', e)
      problems.append(str(e))
    steps = [s for s in steps if s < step]
  if problems:
    raise errors.CheckpointDamagedError(
        f'All {len(problems)} checkpoint(s) in {os.fspath(checkpoints_dir)!r} are damaged; the newest: {problems[0]} '
        'Bring copies of them; a training run starts from scratch in another MODEL_DIR.')
  return None


def get_first_valid_restore_config_and_paths(
    restore_cfgs: Sequence[config_lib.RestoreCheckpointConfig],
) -> tuple[config_lib.RestoreCheckpointConfig | None, Sequence[str]]:
  """Returns the first config whose checkpoints exist, and their paths.

  Mode 'latest' gives the newest checkpoint that is sound, so this reads whole checkpoints; restoring the result does
  not read them again for that purpose. All processes must call this together.

  Args:
    restore_cfgs: in order of precedence; usually the run's own directory first.

  Returns:
    (config, paths), or (None, []) when no config has a checkpoint.

  Raises:
    CheckpointError: a path given with mode 'specific' does not exist, or one given with another mode is a checkpoint
      itself.
    CheckpointDamagedError: a directory holds damaged checkpoints only.
  """
  for cfg in restore_cfgs:
    if cfg.mode == 'specific':
      for path in cfg.paths:
        _check_exists(path)
      return cfg, list(cfg.paths)
    paths = []
    for path in cfg.paths:
      if discovery.is_checkpoint_dir_name(path) and os.path.isdir(path):
        raise errors.CheckpointError(
            f'RestoreCheckpointConfig: path {path!r} is a checkpoint, and mode={cfg.mode!r} expects a directory of '
            "checkpoints. Set mode='specific', or give the directory above it.")
      if cfg.mode == 'all':
        paths += [discovery.get_checkpoint_dir(path, s) for s in discovery.all_steps(path, require_manifest=False)]
      else:
        step = newest_sound_step(path)
        if step is not None:
          return cfg, [discovery.get_checkpoint_dir(path, step)]
    if paths:
      return cfg, paths
  return None, []


def restore_checkpoint(
    path: discovery.PathLike,
    target: transforms.StateDict,
    *,
    shardings: Any = None,
    restore_cfg: config_lib.RestoreCheckpointConfig | None = None,
    transformation_fns: Sequence[transforms.RestoreStateTransformationFn] = (),
    initial_state_fn: Callable[[], transforms.StateDict] | None = None,
    is_resuming: bool = False,
) -> RestoredCheckpoint:
  """Restores one checkpoint into the form of `target`. All processes must call this together.

  Of several processes each reads only the parts that its devices hold, straight into their layout, unless there are
  transforms that look at values: then it reads whole arrays into host memory, as a single process does.

  Args:
    path: of the checkpoint.
    target: nested dict of arrays or `jax.ShapeDtypeStruct`s: the names, shapes and dtypes that are wanted. A restored
      array has the target's dtype unless `restore_cfg.dtype` says otherwise.
    shardings: a sharding for all arrays or a nested dict of them, with the names of `target`. None lays each array out
      as its leaf of `target` says, and returns a NumPy array where that has no sharding.
    restore_cfg: renaming, strictness, dtype, dataset state and transforms; its path and mode are not looked at.
    transformation_fns: further transforms, applied before those of `restore_cfg` and also when resuming; the place for
      a change of parameter layout (`transforms.convert_param_trees`).
    initial_state_fn: returns a fresh state with the names of `target`, for `fallback_to_scratch`; called only if an
      array is missing.
    is_resuming: whether the checkpoint is the run's own, which turns `assignment_map` off.

  Returns:
    The restored state, and what was stored with it.

  Raises:
    CheckpointDamagedError: the bytes on disk are not those that were written.
    CheckpointError: there is no such checkpoint, or it does not fit.
    ConfigError: `fallback_to_scratch` without `initial_state_fn`, or a remote path.
  """
  cfg = restore_cfg or config_lib.RestoreCheckpointConfig(path=os.fspath(path), mode='specific')
  discovery.check_local_path(path, 'checkpoint to restore')
  _check_exists(path)
  found = _verify_or_warn(path)
  directory = state_io.state_dir(path)
  stored = _stored_shapes(directory, found)
  wanted = _wanted_leaves(target, cfg.dtype)
  flat_shardings = _flat_shardings(shardings, target, wanted)
  names = _sources(stored, wanted, cfg, is_resuming)
  fns = (*transformation_fns, *cfg.state_transformation_fns)

  def check(leaves):
    _check_fit(leaves, wanted, cfg, path)

  if fns:
    values = _read(directory, stored, {source: (stored[source].dtype, None) for source in names.values()})
    tree = tree_utils.unflatten_dict({name: values[source] for name, source in names.items()})
    for fn in fns:
      tree = fn(tree, target, is_resuming=is_resuming)
    leaves = tree_utils.flatten_dict(tree)
    check(leaves)
    state = state_io.place({name: leaf for name, leaf in leaves.items() if name in wanted}, wanted, flat_shardings)
  else:
    check({name: stored[source] for name, source in names.items()})
    names = {name: source for name, source in names.items() if name in wanted}
    state = _read_into_place(directory, stored, names, wanted, flat_shardings)

  missing = [name for name in wanted if name not in state]
  if missing:
    state |= _from_scratch(missing, initial_state_fn, wanted, flat_shardings)
  data_state = read_data_state(path, found) if cfg.restore_dataset else None
  return RestoredCheckpoint(
      state=_like_target(target, state), data_state=data_state,
      num_data_processes=found.num_data_processes if found and cfg.restore_dataset else 0,
      step=_step(path, found, state), path=os.fspath(path), is_resuming=is_resuming, is_verified=found is not None,
      metadata=found.metadata if found else {}, metrics=found.metrics if found else {})


def check_fits(path: discovery.PathLike, target: transforms.StateDict, *,
               restore_cfg: config_lib.RestoreCheckpointConfig | None = None, is_resuming: bool = False) -> None:
  """Refuses a checkpoint that cannot be restored into the form of `target`; reads no values, so it is cheap.

  Transforms, which look at values, are not considered: use it where there are none.

  Args:
    path: of the checkpoint.
    target: see `restore_checkpoint`.
    restore_cfg: see `restore_checkpoint`.
    is_resuming: see `restore_checkpoint`.

  Raises:
    CheckpointError: there is no such checkpoint, or it does not fit.
  """
  cfg = restore_cfg or config_lib.RestoreCheckpointConfig(path=os.fspath(path), mode='specific')
  stored, wanted = read_shapes(path), _wanted_leaves(target, cfg.dtype)
  names = _sources(stored, wanted, cfg, is_resuming)
  _check_fit({name: stored[source] for name, source in names.items()}, wanted, cfg, path)
  # An optimizer without state of its own looks like an inference state, which may leave the optimizer's state behind.
  prefix = 'state/param_states'
  left = [name for name in names if name.startswith(prefix)]
  if is_resuming and left and not any(name.startswith(prefix) for name in wanted):
    raise errors.CheckpointError(
        f'The checkpoint {os.fspath(path)!r} holds the state of another optimizer ({left[0]}, ...), and the configured '
        'one has none. Use the optimizer that wrote it, or start another run from it in another MODEL_DIR.')


def _sources(stored, wanted, cfg: config_lib.RestoreCheckpointConfig, is_resuming: bool) -> dict[str, str]:
  if cfg.assignment_map and not is_resuming:
    return transforms.assignment(list(stored), list(wanted), cfg.assignment_map)
  return {name: name for name in stored}


def _check_fit(leaves, wanted, cfg: config_lib.RestoreCheckpointConfig, path: discovery.PathLike) -> None:
  transforms.check_fit(
      leaves, wanted, allow_surplus=not cfg.strict or cfg.fallback_to_scratch, allow_missing=cfg.fallback_to_scratch,
      where=os.fspath(path))


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
  discovery.check_local_path(path, 'checkpoint to load')
  _check_exists(path)
  directory = state_io.state_dir(path)
  stored = _stored_shapes(directory, _verify_or_warn(path))
  flat = _read(directory, stored, {name: (leaf.dtype, None) for name, leaf in stored.items()})
  if dtype is not None:
    flat = state_io.cast_floating(flat, is_cast, dtype)
  return tree_utils.unflatten_dict(flat)


def read_metadata(path: discovery.PathLike) -> Mapping[str, Any]:
  """Returns what the caller of `save` recorded with a checkpoint (cheap: reads the manifest only)."""
  found = manifest.read(path)
  return found.metadata if found else {}


def read_shapes(path: discovery.PathLike) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the name, shape and dtype of each array of a checkpoint (cheap: reads no values).

  Raises:
    CheckpointDamagedError: the manifest is not what was written; nothing else is verified.
    CheckpointError: there is no such checkpoint.
  """
  _check_exists(path)
  return _stored_shapes(state_io.state_dir(path), manifest.read(path))


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


def _check_exists(path: discovery.PathLike) -> None:
  if os.path.isdir(path):
    return
  parent, name = os.path.split(os.path.normpath(path))
  siblings = [entry for entry in os.listdir(parent or '.')
              if discovery.is_checkpoint_dir_name(entry)] if os.path.isdir(parent or '.') else []
  raise errors.CheckpointError(
      f'There is no checkpoint at {os.fspath(path)!r}: expected a directory such as MODEL_DIR/checkpoint_1000.'
      + errors.did_you_mean(name, siblings))


def _verify_or_warn(path: discovery.PathLike) -> manifest.Manifest | None:
  found = manifest.verify(path)
  if found is None:
    _logger.warning('The checkpoint %s has no manifest: it is restored as asked, but damage would go unnoticed.', path)
  return found


def _stored_shapes(directory, found: manifest.Manifest | None) -> dict[str, jax.ShapeDtypeStruct]:
  if found is None:
    return state_io.read_shapes(directory)
  # The same as Orbax would say, without opening each array for it.
  return {name: jax.ShapeDtypeStruct(tuple(entry['shape']), jnp.dtype(entry['dtype']))
          for name, entry in found.arrays.items()}


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


def _read(directory, stored, wanted) -> dict[str, Any]:
  """Does as `state_io.read_arrays`; arrays without elements, which are in no file, are made."""
  values = state_io.read_arrays(directory, {name: how for name, how in wanted.items() if 0 not in stored[name].shape})
  return values | {name: np.zeros(stored[name].shape, dtype)
                   for name, (dtype, _) in wanted.items() if 0 in stored[name].shape}


def _read_into_place(directory, stored, names, wanted, shardings) -> dict[str, Any]:
  if jax.process_count() == 1:
    # All of it is for this host: whole arrays and one transfer of all take two thirds of the time of reading shards.
    values = _read(directory, stored, {source: (wanted[name].dtype, None) for name, source in names.items()})
    return state_io.place({name: values[source] for name, source in names.items()}, wanted, shardings)
  # One stored array may serve several names: it is read in the layout of the first, and copied for the others.
  first: dict[str, str] = {}
  for name, source in names.items():
    first.setdefault(source, name)
  arrays = _read(directory, stored, {source: (wanted[name].dtype, shardings[name]) for source, name in first.items()})
  return state_io.place({name: arrays[source] for name, source in names.items()}, wanted, shardings)


def _from_scratch(missing, initial_state_fn, wanted, shardings) -> dict[str, Any]:
  if initial_state_fn is None:
    raise errors.ConfigError(
        f'fallback_to_scratch: the checkpoint lacks {missing[:5]}, and the caller gave no initial state to take them '
        'from. Restore through a command that initialises the model, or set fallback_to_scratch=False.')
  _logger.info('Initialised from scratch, since the checkpoint lacks them: %s', ', '.join(missing))
  initial = tree_utils.flatten_dict(initial_state_fn())
  return state_io.place({name: initial[name] for name in missing}, wanted, shardings)


def _like_target(target: transforms.StateDict, flat_state: Mapping[str, Any]) -> dict[str, Any]:
  flat_target = tree_utils.flatten_dict(target, keep_empty=True)
  return tree_utils.unflatten_dict({name: flat_state.get(name, leaf) for name, leaf in flat_target.items()})


def _step(path: discovery.PathLike, found: manifest.Manifest | None, flat_state: Mapping[str, Any]) -> int:
  if found is not None:
    return found.step
  if 'state/step' in flat_state:
    return int(flat_state['state/step'])
  return discovery.get_step_from_checkpoint_dir(path)[1]
