"""Choice of the checkpoint to restore: the newest valid one of a run, or a named folder of any format."""

from __future__ import annotations

from collections.abc import Sequence
import logging
import os

import numpy as np

from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import config
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest
from t5x_lite.checkpoints import sources
from t5x_lite.storage import files

_logger = logging.getLogger(__name__)


def newest_sound_step(checkpoints_dir: discovery.PathLike) -> int | None:
  """Return the newest step whose checkpoint is intact and not marked unsound.

  A warning names newer checkpoints that are damaged, marked unsound, or without a manifest. All processes must call
  this together.

  Args:
    checkpoints_dir: a model directory.

  Returns:
    The step, or None without a checkpoint.

  Raises:
    CheckpointDamagedError: all checkpoints are damaged or marked unsound.
  """
  steps = discovery.all_steps(checkpoints_dir)
  newer = [
    s
    for s in discovery.all_steps(checkpoints_dir, require_manifest=False)
    if s > max(steps, default=-1)
  ]
  if newer:
    _logger.warning(
      'Ignoring checkpoint(s) %s in %s: they have no manifest, so they cannot be verified. To use one, give its path '
      "(mode='specific').",
      newer,
      checkpoints_dir,
    )
  problems = []
  while True:
    # All processes use the lead's view: on a shared file system directories may appear at different times.
    step = int(multihost.broadcast_from_lead(np.int32(max(steps, default=-1))))
    if step < 0:
      break
    path = discovery.get_checkpoint_dir(checkpoints_dir, step)
    if multihost.broadcast_from_lead(np.int32(discovery.is_marked_unsound(path))):
      problem = (
        f'{path} is marked {discovery.UNSOUND_FILENAME}: training with it was not finite. Delete the mark to '
        'use it.'
      )
    else:
      try:
        found = manifest.verify(path)
        if found is not None and found.step == step:
          return step
        problem = (
          f'The checkpoint {path!r} is that of step {found and found.step}: it was renamed or copied. Rename '
          "it, or give its path (mode='specific') in another MODEL_DIR."
        )
      except errors.CheckpointDamagedError as e:
        problem = str(e)
    _logger.warning('%s Trying an older checkpoint.', problem)
    problems.append(problem)
    steps = [s for s in steps if s < step]
  if problems:
    raise errors.CheckpointDamagedError(
      f'All {len(problems)} checkpoint(s) in {os.fspath(checkpoints_dir)!r} are damaged or marked '
      f'{discovery.UNSOUND_FILENAME}. The newest: {problems[0]} To start from scratch, choose another MODEL_DIR.'
    )
  return None


def get_first_valid_restore_config_and_paths(
  restore_cfgs: Sequence[config.RestoreCheckpointConfig],
) -> tuple[config.RestoreCheckpointConfig | None, Sequence[str]]:
  """Return the first configuration whose checkpoints exist, and their paths.

  Mode 'latest' selects the newest intact checkpoint, so this function reads entire checkpoints; a later restore does
  not verify them again. If a directory has only checkpoints of other programs, it selects the newest of them without
  verification. A path that is a stored state itself, such as a Hugging Face folder, is used in every mode. All
  processes must call this together.

  Args:
    restore_cfgs: configurations in order of precedence.

  Returns:
    (configuration, paths), or (None, []) without a checkpoint.

  Raises:
    CheckpointError: a path with mode 'specific' does not exist, a path with another mode is a single checkpoint, or a
      folder holds weights in an unsupported format.
    CheckpointDamagedError: all checkpoints of a directory are damaged.
  """
  for cfg in restore_cfgs:
    cfg.check()
    if cfg.mode == 'specific':
      paths = [sources.folder_of(path) for path in cfg.paths]
      for path in paths:
        sources.check_exists(path)
      return cfg, paths
    paths = []
    for path in cfg.paths:
      found = _below(path, cfg.mode)
      if found and cfg.mode == 'latest':
        return cfg, found
      paths += found
    if paths:
      return cfg, paths
  return None, []


def _below(path: str, mode: str) -> list[str]:
  """Return the checkpoints that mode 'latest' or 'all' selects for `path`."""
  path = sources.folder_of(path)
  stored_as = sources.detect_format(path)
  if discovery.is_checkpoint_dir_name(path) and files.path(path).is_dir():
    if stored_as is not None and not sources.source_class(stored_as).has_steps:
      return [path]
    raise errors.CheckpointError(
      f'RestoreCheckpointConfig: path {path!r} is a checkpoint, and mode={mode!r} expects a directory of '
      "checkpoints. Set mode='specific', or give the directory above it."
    )
  steps = discovery.all_steps(path, require_manifest=False)
  # All processes must take the same branch, since `newest_sound_step` communicates: use the lead's view.
  found = [len(steps) > 0, len(discovery.all_steps(path)) > 0]
  has_steps, has_own = multihost.broadcast_from_lead(np.array(found, np.int32))
  if has_steps and mode == 'all':
    return [discovery.get_checkpoint_dir(path, step) for step in steps]
  if has_steps:
    if has_own:
      step = newest_sound_step(path)
    else:
      step = newest_of_others(path)
    if step is None:
      return []
    return [discovery.get_checkpoint_dir(path, step)]
  if stored_as is not None:
    _logger.info('Restoring %s itself (%s): it is not a directory of checkpoints.', path, stored_as)
    return [path]
  sources.check_readable(path)
  return []


def newest_of(path: str) -> str:
  """Return the newest checkpoint of a run directory, the newest sound one of t5x_lite's; any other path unchanged.

  Args:
    path: a run directory, a stored state in any format, or an index file in it.
  """
  path = sources.folder_of(path)
  step = None
  if sources.detect_format(path) is None and discovery.all_steps(path):
    step = newest_sound_step(path)
  elif sources.detect_format(path) is None:
    step = newest_of_others(path)
  if step is None:
    return path
  return discovery.get_checkpoint_dir(path, step)


def newest_of_others(checkpoints_dir: discovery.PathLike) -> int | None:
  """Return the newest step of the readable checkpoints of other programs, or None.

  Logs a warning that the checkpoint cannot be verified. All processes must call this together.
  """
  steps = [
    step
    for step in discovery.all_steps(checkpoints_dir, require_manifest=False)
    if sources.detect_format(discovery.get_checkpoint_dir(checkpoints_dir, step)) is not None
  ]
  # See `newest_sound_step`.
  step = int(multihost.broadcast_from_lead(np.int32(max(steps, default=-1))))
  if step < 0:
    return None
  _logger.warning(
    'Using the newest checkpoint in %s, of step %d. Another program wrote it, without a manifest: it '
    'cannot be verified.',
    checkpoints_dir,
    step,
  )
  return step
