"""Runs by their directory: which run and checkpoint a path names, and which gin files say what the run is."""

import argparse
from collections.abc import Sequence
import os
import pathlib
from typing import Any, NamedTuple

from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.errors import CheckpointError, ConfigError, did_you_mean

CONFIG_FILE = 'config.gin'
# The function that a run's config.gin configures.
ENTRY = 't5x_lite.apps.train.train'
# Read first where a run has no config.gin, since the gin files may say no more than what the model is.
_RUN_FILE = 'runs/train.gin'
# Values that a training run requires and that decide nothing about its model.
_STAND_INS = {'MIXTURE_OR_TASK_NAME': "'none'", 'TRAIN_STEPS': '1', 'MODEL_DIR': "'none'",
              'INITIAL_CHECKPOINT_PATH': "'none'", 'DROPOUT_RATE': '0.0'}


class FoundRun(NamedTuple):
  """A run, and which of its checkpoints was meant.

  Attributes:
    model_dir: the run's directory.
    checkpoint: the path to restore from.
    mode: of `RestoreCheckpointConfig`: 'latest' for the run's newest sound one, 'specific' for this one.
  """

  model_dir: str
  checkpoint: str
  mode: str


def find_run(path: str) -> FoundRun:
  """Returns the run that a path names: its directory, that of one of its checkpoints, or of weights under another name.

  Raises:
    ConfigError: there is nothing, or nothing of a run.
    CheckpointError: the run has no checkpoint.
  """
  folder = pathlib.Path(path)
  if not folder.is_dir():
    near = did_you_mean(folder.name, [entry.name for entry in folder.parent.glob('*') if entry.is_dir()])
    raise ConfigError(f'{path!r} is {"a file" if folder.exists() else "not there"}; expected the directory of a run '
                      '(MODEL_DIR), or a checkpoint in it, such as runs/keyword_cloze/checkpoint_500.'
                      + (near if near.startswith(' Did you mean') else ''))
  from t5x_lite import checkpoints
  from t5x_lite.checkpoints import discovery
  absolute = pathlib.Path(os.path.abspath(path))
  # One that was renamed still has its manifest; one of another program has at least the name.
  if (folder / discovery.MANIFEST_FILENAME).exists() or discovery.is_checkpoint_dir_name(path):
    return FoundRun(str(absolute.parent), path, 'specific')
  if checkpoints.latest_step(path) is None:
    if checkpoints.detect_format(path) is not None:
      return FoundRun(str(absolute), path, 'specific')  # Weights under a name of their own, as a Hugging Face folder.
    others = checkpoints.all_steps(path, require_manifest=False)
    if others:
      newest = checkpoints.get_checkpoint_dir(path, others[-1])
      raise CheckpointError(f'{path!r} has checkpoints of another program only, which cannot be verified. Name one to '
                            f'use it: {newest}.')
    raise CheckpointError(f'{path!r} holds no checkpoint; expected checkpoint_<step> in it. Name the directory of a '
                          'run that has saved one.')
  return FoundRun(str(absolute), path, 'latest')


def gin_files_of(run: FoundRun, named: Sequence[str]) -> list[str]:
  """Returns the gin files that say what a run is, in the order to read them: its config.gin, then those named.

  Files under runs/, which come with t5x_lite, are read before config.gin: what a run says is more than their defaults.
  A run without config.gin has the named files alone.

  Raises:
    ConfigError: there is no config.gin, and no file is named.
  """
  config = os.path.join(run.model_dir, CONFIG_FILE)
  if not os.path.isfile(config):
    if named:
      return list(named)
    from t5x_lite import checkpoints
    # The checkpoint's path is that of the folder's weights, which the recipe reads the sizes and vocabulary of.
    flags = '--gin_file=recipes/keyword_cloze.gin'
    if checkpoints.detect_format(run.checkpoint) == 'hugging_face':
      flags = f'--gin_file=recipes/finetune_from_hf.gin --gin.INITIAL_CHECKPOINT_PATH={run.checkpoint}'
    raise ConfigError(f'{run.model_dir!r} has no {CONFIG_FILE}, which would say what the model is. Say it by gin '
                      f'files, e.g. {flags}.')
  others = [name for name in named if os.path.realpath(name) != os.path.realpath(config)]
  return [*(name for name in others if name.startswith('runs/')), config,
          *(name for name in others if not name.startswith('runs/'))]


def take_run(arguments: argparse.Namespace) -> Any:
  """Returns the `FoundRun` that `arguments.run` names; puts its config.gin before each --gin_file.

  Raises:
    ConfigError: there is no such run, it does not say what its model is, or a flag names another checkpoint.
    CheckpointError: the run has no checkpoint.
  """
  named = next((flag for flag in arguments.gin_flags if flag.startswith('--gin.CHECKPOINT_')), None)
  if named is not None:
    raise ConfigError(f'{named} and {arguments.run!r} both say which checkpoint to use; expected one of them. Name the '
                      'checkpoint itself in the place of the run.')
  run = find_run(arguments.run)
  arguments.gin_file = gin_files_of(run, arguments.gin_file)
  return run


def load_run(run: FoundRun, arguments: argparse.Namespace) -> Any:
  """Returns the `gin_utils.Configuration` of a run: of its config.gin and, on top of it, the gin files that are given.

  Args:
    run: what `find_run` returned.
    arguments: of a command line with `add_gin_arguments`.

  Raises:
    ConfigError: there is no config.gin, or what the files and flags say is not sound.
  """
  files = gin_files_of(run, arguments.gin_file)
  has_config = os.path.isfile(os.path.join(run.model_dir, CONFIG_FILE))
  arguments.gin_file = files if has_config else [_RUN_FILE, *files]
  return load_configuration(arguments, _STAND_INS)
