"""Runs by their directory: the run and checkpoint that a path names, and the gin files of a run."""

from collections.abc import Sequence
import os
import shlex
from typing import TYPE_CHECKING, NamedTuple

from t5x_lite.apps.common.flags import Invocation
from t5x_lite.apps.common.flags import load_configuration
from t5x_lite.apps.common.flags import with_moved_base
from t5x_lite.errors import CheckpointError, ConfigError, did_you_mean
from t5x_lite.storage import files

if TYPE_CHECKING:
  from t5x_lite import gin_utils

CONFIG_FILE = 'config.gin'
# The function that a run's config.gin configures.
ENTRY = 't5x_lite.apps.train.train'
# Read first if a run has no config.gin: the given gin files may only define the model.
_RUN_FILE = 'runs/train.gin'
# Values of macros that a training run requires and that do not affect its model.
_PLACEHOLDERS = {
  'MIXTURE_OR_TASK_NAME': "'none'",
  'TRAIN_STEPS': '1',
  'MODEL_DIR': "'none'",
  'INITIAL_CHECKPOINT_PATH': "'none'",
  'DROPOUT_RATE': '0.0',
}


class FoundRun(NamedTuple):
  """Run directory and the checkpoint to use.

  Attributes:
    model_dir: the run directory.
    checkpoint: path to restore from.
    mode: mode of `RestoreCheckpointConfig`: 'latest' for the newest sound checkpoint, 'specific' for this one.
  """

  model_dir: str
  checkpoint: str
  mode: str


def find_run(path: str) -> FoundRun:
  """Return the run of a path: a run directory, one of its checkpoints or an index file in it, or a folder of weights.

  Raises:
    ConfigError: the path is not a folder.
    CheckpointError: the folder has no checkpoint.
  """
  from t5x_lite import checkpoints
  from t5x_lite.checkpoints import discovery
  from t5x_lite.checkpoints import sources
  from t5x_lite.checkpoints.sources.peft import PeftSource

  path = sources.folder_of(path)
  folder = files.path(path)
  if not folder.is_dir():
    broken = files.broken_link(path)
    if broken is not None:
      raise ConfigError(
        f'{path!r} must be a run directory (MODEL_DIR) or a checkpoint in it: {broken}. Replace the '
        'link.'
      )
    near = did_you_mean(
      folder.name,
      [entry.name for entry in folder.parent.glob('*') if entry.is_dir()],
      lists_all=False,
    )
    found = 'file' if folder.exists() else 'missing path'
    raise ConfigError(
      f'{path!r} must be a run directory (MODEL_DIR) or a checkpoint in it, such as runs/keyword_cloze/'
      f'checkpoint_500, got a {found}.{near}'
    )
  absolute = folder
  if not files.is_remote(path):
    absolute = files.path(os.path.abspath(path))
  # A renamed checkpoint has a manifest; a checkpoint of T5X has the name.
  if (folder / discovery.MANIFEST_FILENAME).exists() or discovery.is_checkpoint_dir_name(path):
    return FoundRun(str(absolute.parent), path, 'specific')
  if checkpoints.latest_step(path) is None:
    if checkpoints.detect_format(path) is not None:
      # Weights in a folder with another name, e.g. of Hugging Face.
      return FoundRun(str(absolute), path, 'specific')
    others = checkpoints.all_steps(path, require_manifest=False)
    remedy = 'Name the directory of a run that has saved a checkpoint.'
    if others:
      remedy = (
        'It has checkpoints of another program, which cannot be verified: to use one, name it, e.g. '
        f'{checkpoints.get_checkpoint_dir(path, others[-1])}.'
      )
    elif PeftSource.is_stored_in(folder):
      remedy = (
        'It is an adapter of PEFT. Name the run that it is from, or merge it into its base: t5x_lite convert '
        f'{shlex.quote(path)} merged --to=hugging_face --base=BASE'
      )
    raise CheckpointError(f'{path!r} has no checkpoint_<step> of t5x_lite. {remedy}')
  return FoundRun(str(absolute), path, 'latest')


def gin_files_of(run: FoundRun, named: Sequence[str]) -> list[str]:
  """Return the gin files of a run in reading order: its config.gin, then the given files.

  Files below runs/, which are part of t5x_lite, are read before config.gin, which overrides their defaults. For a run
  without config.gin, only the given files are read.

  Raises:
    ConfigError: config.gin is missing, and no file is given.
  """
  config = os.path.join(run.model_dir, CONFIG_FILE)
  if not files.path(config).is_file():
    if named:
      return list(named)
    from t5x_lite import checkpoints

    # The recipe reads sizes and vocabulary from the folder of the weights.
    flags = '--gin_file=recipes/keyword_cloze.gin'
    if checkpoints.detect_format(run.checkpoint) == 'hugging_face':
      # The lengths of the recipe would cut texts of other data.
      flags = (
        f'--gin_file=recipes/finetune_from_hf.gin --gin.INITIAL_CHECKPOINT_PATH={run.checkpoint} '
        """--gin.TASK_FEATURE_LENGTHS="{'inputs': 512, 'targets': 128}\""""
      )
    raise ConfigError(
      f'{run.model_dir!r} has no {CONFIG_FILE}, which defines the model. Name the run that it is from, or pass gin '
      f'files that define it, e.g. {flags}'
    )
  packaged = []
  others = []
  for name in named:
    if name.startswith('runs/'):
      packaged.append(name)
    elif files.real_path(name) != files.real_path(config):
      others.append(name)
  return [*packaged, config, *others]


def resolve_run(invocation: Invocation) -> tuple[FoundRun, Invocation]:
  """Return the run that a command line names, and the invocation with its config.gin before the given gin files.

  Raises:
    ConfigError: the run does not exist, its model is not configured, or a flag names another checkpoint.
    CheckpointError: the run has no checkpoint.
  """
  path = invocation.flags.run
  for flag in invocation.gin_flags:
    if not flag.startswith('--gin.CHECKPOINT_'):
      continue
    raise ConfigError(
      f'Exactly one of {flag} and {path!r} must choose a checkpoint, got both. Remove the '
      'flag, and pass the path of the checkpoint instead of the run directory.'
    )
  run = find_run(path)
  return run, invocation._replace(gin_files=gin_files_of(run, invocation.gin_files))


def load_run(
  run: FoundRun, invocation: Invocation, overrides: str = ''
) -> 'gin_utils.Configuration':
  """Return the configuration of a run: its config.gin, then the given gin files.

  Args:
    run: result of `find_run`.
    invocation: command line with the flags of `add_gin_arguments`.
    overrides: gin text that is applied last.

  Raises:
    ConfigError: config.gin is missing, or the configuration is invalid.
  """
  gin_files = gin_files_of(run, invocation.gin_files)
  if not files.path(os.path.join(run.model_dir, CONFIG_FILE)).is_file():
    gin_files = [_RUN_FILE, *gin_files]
  invocation = with_moved_base(invocation._replace(gin_files=gin_files))
  return load_configuration(invocation, _PLACEHOLDERS, overrides)


def moved_base(configuration: 'gin_utils.Configuration') -> str | None:
  """Return `RestoreCheckpointConfig.base_path` of the configuration of a run."""
  restore = configuration.argument('checkpoint_cfg').restore
  if restore is None:
    return None
  return restore.base_path
