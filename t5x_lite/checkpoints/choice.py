"""Which checkpoint a configuration means: the newest sound one of a run, or a folder in any form that is named."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np

from t5x_lite import errors, multihost
from t5x_lite.checkpoints import config as config_lib
from t5x_lite.checkpoints import discovery, manifest, sources

_logger = logging.getLogger(__name__)


def newest_sound_step(checkpoints_dir: discovery.PathLike) -> int | None:
  """Returns the newest step whose checkpoint has a manifest and is what was written.

  Newer ones that are damaged, marked unsound, or have no manifest, are named in a warning. All processes must call this
  together.

  Args:
    checkpoints_dir: a model directory.

  Returns:
    The step, or None when there is no checkpoint at all.

  Raises:
    CheckpointDamagedError: there are checkpoints and every one is damaged or marked unsound.
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
    if multihost.broadcast_from_lead(np.int32(discovery.is_marked_unsound(path))):
      problem = f'{path} is marked {discovery.UNSOUND_FILENAME}: training with it was not finite.'
      _logger.warning('%s Looking for an older one.', problem)
      problems.append(f'{problem} Delete the mark to use it.')
      steps = [s for s in steps if s < step]
      continue
    try:
      found = manifest.verify(path)
      if found is None or found.step != step:
        raise errors.CheckpointDamagedError(
            f'The checkpoint {path!r} is that of step {found and found.step}: it has been renamed or copied. Give it '
            "its name back, or name it (mode='specific') in another MODEL_DIR.")
      return step
    except errors.CheckpointDamagedError as e:
      _logger.warning('%s Looking for an older one.', e)
      problems.append(str(e))
    steps = [s for s in steps if s < step]
  if problems:
    raise errors.CheckpointDamagedError(
        f'All {len(problems)} checkpoint(s) in {os.fspath(checkpoints_dir)!r} are damaged or marked '
        f'{discovery.UNSOUND_FILENAME}; the newest: {problems[0]} To start from scratch, choose another MODEL_DIR.')
  return None


def get_first_valid_restore_config_and_paths(
    restore_cfgs: Sequence[config_lib.RestoreCheckpointConfig],
) -> tuple[config_lib.RestoreCheckpointConfig | None, Sequence[str]]:
  """Returns the first config whose checkpoints exist, and their paths.

  Mode 'latest' gives the newest checkpoint that is sound, so this reads whole checkpoints; restoring the result does
  not read them again for that purpose. Where a directory has only checkpoints of other programs, it gives the newest of
  those, unverified. A path that is no directory of checkpoints but a stored state itself, such as a Hugging Face
  folder, is taken as it is in every mode. All processes must call this together.

  Args:
    restore_cfgs: in order of precedence.

  Returns:
    (config, paths), or (None, []) when no config has a checkpoint.

  Raises:
    CheckpointError: a path given with mode 'specific' does not exist, one given with another mode is called like a
      checkpoint, or a folder holds weights in a form that cannot be read.
    CheckpointDamagedError: a directory holds damaged checkpoints only.
  """
  for cfg in restore_cfgs:
    if cfg.mode == 'specific':
      for path in cfg.paths:
        sources.check_exists(path)
      return cfg, list(cfg.paths)
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
  """Returns the checkpoint(s) that `path` stands for in the mode 'latest' or 'all'."""
  stored_as = sources.detect_format(path)
  if discovery.is_checkpoint_dir_name(path) and os.path.isdir(path):
    if stored_as == sources.HuggingFaceSource.format:
      return [path]
    raise errors.CheckpointError(
        f'RestoreCheckpointConfig: path {path!r} is a checkpoint, and mode={mode!r} expects a directory of '
        "checkpoints. Set mode='specific', or give the directory above it.")
  steps = discovery.all_steps(path, require_manifest=False)
  # The lead's view says which way all go, for they speak to each other on it: see `newest_sound_step`.
  has_steps, has_own = multihost.broadcast_from_lead(np.int32([len(steps) > 0, len(discovery.all_steps(path)) > 0]))
  if has_steps and mode == 'all':
    return [discovery.get_checkpoint_dir(path, step) for step in steps]
  if has_steps:
    step = newest_sound_step(path) if has_own else newest_of_others(path)
    return [] if step is None else [discovery.get_checkpoint_dir(path, step)]
  if stored_as is not None:
    _logger.info('%s is a stored state itself (%s), not a directory of checkpoints: it is taken as it is.', path,
                 stored_as)
    return [path]
  sources.check_readable(path)
  return []


def newest_of_others(checkpoints_dir: discovery.PathLike) -> int | None:
  """Returns the newest step whose checkpoint another program wrote, in a form that can be read; None without one.

  That it cannot be verified is said in a warning. All processes must call this together.
  """
  steps = [step for step in discovery.all_steps(checkpoints_dir, require_manifest=False)
           if sources.detect_format(discovery.get_checkpoint_dir(checkpoints_dir, step)) is not None]
  # The lead's view counts: on a shared file system directories may appear at different times.
  step = int(multihost.broadcast_from_lead(np.int32(max(steps, default=-1))))
  if step < 0:
    return None
  _logger.warning('Taking the newest checkpoint in %s, that of step %d. It has no manifest, since another program '
                  'wrote it: whether it is whole cannot be verified.', checkpoints_dir, step)
  return step
