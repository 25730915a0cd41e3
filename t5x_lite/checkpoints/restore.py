"""Restoring a stored state of any format of `sources` into a target state.

The checkpoint is verified and compared with the target, and only the needed arrays are read.
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

from t5x_lite import errors, tree_utils
from t5x_lite.checkpoints import config as config_lib
from t5x_lite.checkpoints import discovery, manifest, sources, state_io, transforms
from t5x_lite.formatting import first_names

_logger = logging.getLogger(__name__)

# Arrays to which the dtype options apply; the optimizer's state keeps its dtypes.
_CAST_SECTIONS = ('target/', 'param_average/')
# Parts of a state that can be made from the parameters, and parts that come from a newly initialised state.
_FROM_PARAMS = ('state/param_states/', 'param_average/')
_FROM_SCRATCH = ('flax_mutables/',)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
  """A restored checkpoint.

  Attributes:
    state: nested dict with the names of the target state.
    data_state: position of this process's data iterator; None if it was not stored or not requested. If the number of
      processes has changed, it is that of process 0: see `num_data_processes`.
    num_data_processes: number of processes that stored dataset state; 0 without dataset state.
    step: the training step.
    path: path of the checkpoint.
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
  path: str
  is_resuming: bool = False
  is_verified: bool = False
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  format: str = sources.OwnSource.format


def is_cast(name: str) -> bool:
  """Return True if the dtype options apply to the array `name`."""
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
  """Restore a checkpoint into the structure of `target`. All processes must call this together.

  With several processes each reads only the parts of its devices. If there are transforms, or the format is not
  Orbax's, each process reads entire arrays into host memory, as a single process does.

  If no optimizer state is stored (Hugging Face folders), `from_params_fn` makes it from the restored parameters, and
  also the average of the parameters. If no mutable collections are stored, they come from `initial_state_fn`. A run
  that resumes (`is_resuming`) requires all arrays in the checkpoint.

  Args:
    path: path of the checkpoint, in any format.
    target: nested dict of arrays or `jax.ShapeDtypeStruct`s with the names, shapes and dtypes of the result;
      `restore_cfg.dtype` overrides the dtypes of parameters.
    shardings: a sharding for all arrays, or a nested dict of shardings with the names of `target`. None: the sharding
      of each leaf of `target`, and a NumPy array for a leaf without a sharding.
    restore_cfg: renaming, strictness, dtype, dataset state and transforms; its path and mode are ignored.
    transformation_fns: further transforms, applied before those of `restore_cfg` and also when resuming, e.g. a change
      of parameter layout (`transforms.convert_param_trees`).
    initial_state_fn: function that returns an initialised state with the names of `target`, for `fallback_to_scratch`
      and for mutable collections; called only if an array is missing.
    from_params_fn: function from the restored state, as nested dict, to a state with initial `state/param_states` and
      `param_average`; called only if such an array is missing. With None, `fallback_to_scratch` applies to them.
    is_resuming: whether the checkpoint is the run's own; `assignment_map` is then ignored.

  Returns:
    The restored state and the values stored with it.

  Raises:
    CheckpointDamagedError: a file differs from its hash in the manifest.
    CheckpointError: the checkpoint does not exist or does not fit.
    ConfigError: `fallback_to_scratch` needs `initial_state_fn`, or the path is remote.
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
    leaves = _without_partial_sections(tree_utils.flatten_dict(tree), wanted, fresh)
    del tree
    _check_fit(leaves, wanted, fresh, cfg, path)
    state = state_io.place({name: leaf for name, leaf in leaves.items() if name in wanted}, wanted, flat_shardings)
    del leaves
  else:
    _check_fit({name: stored[stored_name] for name, stored_name in names.items()}, wanted, fresh, cfg, path)
    names = {name: stored_name for name, stored_name in names.items() if name in wanted}
    state = _read_sharded(source, names, wanted, flat_shardings)
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
  """Raise if a checkpoint cannot be restored into the structure of `target`; reads no values.

  Transforms are applied to shapes, see `transforms.transform_shapes`.

  Args:
    path: path of the checkpoint.
    target: see `restore_checkpoint`.
    restore_cfg: see `restore_checkpoint`.
    transformation_fns: see `restore_checkpoint`.
    is_resuming: see `restore_checkpoint`.
    may_begin: whether the restore will have `initial_state_fn` and `from_params_fn`.

  Raises:
    CheckpointError: the checkpoint does not exist or does not fit.
    ValuesNeededError: a transform needs values, so the result is unknown.
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
    leaves = _without_partial_sections(tree_utils.flatten_dict(tree), wanted, fresh)
  _check_fit(leaves, wanted, fresh, cfg, path)
  # An optimizer without state looks like an inference state, for which stored optimizer state is not an error.
  prefix = 'state/param_states'
  left = [name for name in leaves if name.startswith(prefix)]
  if is_resuming and left and not any(name.startswith(prefix) for name in wanted):
    raise errors.CheckpointError(
        f'The checkpoint {os.fspath(path)!r} holds the state of another optimizer ({left[0]}, ...), but the configured '
        'optimizer has no state. Use the optimizer of the checkpoint, or start a new run from the checkpoint in '
        'another MODEL_DIR.')


def _sources(stored, wanted, cfg: config_lib.RestoreCheckpointConfig, is_resuming: bool) -> dict[str, str]:
  if cfg.assignment_map and not is_resuming:
    return transforms.assignment(list(stored), list(wanted), cfg.assignment_map)
  return {name: name for name in stored}


def _fresh_sections(stored: Iterable[str], is_resuming: bool, from_params: bool, from_scratch: bool) -> tuple[str, ...]:
  """Return the parts of a state that are not stored and may be made instead."""
  if is_resuming:
    return ()
  stored = list(stored)
  sections = (_FROM_PARAMS if from_params else ()) + (_FROM_SCRATCH if from_scratch else ())
  return tuple(section for section in sections if not any(name.startswith(section) for name in stored))


def _without_partial_sections(
    leaves: Mapping[str, Any], wanted: Iterable[str], fresh: tuple[str, ...]) -> dict[str, Any]:
  """Return `leaves` without the sections of which a transform has made only some of the wanted names."""
  partial = tuple(section for section in fresh
                  if any(name.startswith(section) and name not in leaves for name in wanted))
  return {name: leaf for name, leaf in leaves.items() if not name.startswith(partial)}


def _check_fit(leaves, wanted, fresh, cfg: config_lib.RestoreCheckpointConfig, path: discovery.PathLike) -> None:
  wanted = {name: leaf for name, leaf in wanted.items() if name in leaves or not name.startswith(fresh)}
  transforms.check_fit(
      leaves, wanted, allow_surplus=not cfg.strict or cfg.fallback_to_scratch, allow_missing=cfg.fallback_to_scratch,
      where=os.fspath(path))


def _completed(state, wanted, shardings, initial_state_fn, from_params_fn) -> dict[str, Any]:
  """Return `state` with the missing arrays of `wanted`."""
  missing = [name for name in wanted if name not in state]
  made = [name for name in missing if from_params_fn is not None and name.startswith(_FROM_PARAMS)]
  rest = [name for name in missing if name not in made]
  if rest:
    state = state | _from_scratch(rest, initial_state_fn, wanted, shardings)
  if made:
    _logger.info('Missing in the checkpoint and made from the restored parameters: %s.',
                 _sections_or_names(made, state))
    fresh = tree_utils.flatten_dict(from_params_fn(tree_utils.unflatten_dict(state)))
    state = state | state_io.place({name: fresh[name] for name in made}, wanted, shardings)
  return state


def _sections_or_names(missing: Sequence[str], state: Mapping[str, Any]) -> str:
  """Return the `missing` names for a message, with one entry for a section of which `state` has no array."""
  parts = []
  for section, words in zip(_FROM_PARAMS, ("the optimizer's state", 'averages of parameters'), strict=True):
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


def read_data_state(path: discovery.PathLike, found: manifest.Manifest | None) -> dict[str, bytes] | None:
  """Return the stored dataset state of this process (of process 0 if the number of processes has changed), or None."""
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
  return {name: flat[name] for name in wanted}


def _read_sharded(source: sources.StateSource, names, wanted, shardings) -> dict[str, Any]:
  # A stored array that several names need is read with the sharding of the first name and copied for the others.
  first: dict[str, str] = {}
  for name, stored_name in names.items():
    first.setdefault(stored_name, name)
  arrays = source.read({stored_name: (wanted[name].dtype, shardings[name]) for stored_name, name in first.items()})
  return state_io.place({name: arrays[stored_name] for name, stored_name in names.items()}, wanted, shardings)


def _from_scratch(missing, initial_state_fn, wanted, shardings) -> dict[str, Any]:
  if initial_state_fn is None:
    raise errors.ConfigError(
        f'fallback_to_scratch: the checkpoint lacks {first_names(missing)}, and there is no function for the initial '
        'state. Restore through a command that initialises the model, or set fallback_to_scratch=False.')
  _logger.info('Missing in the checkpoint and initialised from scratch: %s.', first_names(missing))
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
