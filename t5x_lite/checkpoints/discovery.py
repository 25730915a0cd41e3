"""Layout of a model directory: names and steps of checkpoints, pins, and leftovers of runs that died.

    MODEL_DIR/checkpoint_<step>/state/                        arrays, in Orbax's format
    MODEL_DIR/checkpoint_<step>/dataset/process_<i>-of-<n>/   position of the data iterator of each process
    MODEL_DIR/checkpoint_<step>/manifest.json                 names, shapes and the hash of every file
    MODEL_DIR/checkpoint_<step>/PINNED                        protects the checkpoint from deletion (optional)
    MODEL_DIR/checkpoint_<step>/UNSOUND                       its parameters give a non-finite loss (optional)
    MODEL_DIR/checkpoint_metrics.json                         metrics by step, for keeping the best
    MODEL_DIR/.lock                                           held by the run that writes to MODEL_DIR

A directory named exactly `checkpoint_<step>` is complete: an atomic rename gives it the name when all files are
on disk.
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Sequence

from t5x_lite import checks, errors, files, untrusted

_logger = logging.getLogger(__name__)

CHECKPOINT_PREFIX = 'checkpoint'
MANIFEST_FILENAME = 'manifest.json'
METRICS_FILENAME = 'checkpoint_metrics.json'
PINNED_FILENAME = 'PINNED'
UNSOUND_FILENAME = 'UNSOUND'
STATE_DIRNAME = 'state'
DATASET_DIRNAME = 'dataset'

# A directory with one of these infixes is not a checkpoint: it is incomplete, replaced or being deleted.
WRITING_INFIX = files.WRITING_INFIX
REPLACED_INFIX = '.replaced-'
DELETED_INFIX = '.deleted-'

_STEP_RE = re.compile(rf'{CHECKPOINT_PREFIX}_(0|[1-9]\d*)')
_INFIXES = '|'.join(map(re.escape, (WRITING_INFIX, REPLACED_INFIX, DELETED_INFIX)))
_LEFTOVER_RE = re.compile(rf'({CHECKPOINT_PREFIX}_\d+)({_INFIXES}).*')

# Owner and name; a few old models have no owner.
_HUB_NAME_RE = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*|[\w.-]*t5-[\w.-]+|switch-[\w.-]+')

PathLike = str | os.PathLike[str]


def check_local_path(path: PathLike, what: str) -> None:
  """Raise ConfigError if `path` is remote or begins with `~`; `what` names the option in the message."""
  text = os.fspath(path)
  if text.startswith('hf://') or '://' in text and 'huggingface' in text:
    remedy = _download_remedy(
        '/'.join([part for part in text.partition('://')[2].split('/') if 'huggingface' not in part][:2]))
  elif '://' in text:
    remedy = 'Object stores are not supported: use a local or mounted directory and copy from it.'
  elif text.startswith('~') and not os.path.exists(text):
    remedy = f'The shell expands ~ only at the beginning of a word: write {os.path.expanduser(text)!r}.'
  else:
    return
  raise checks.invalid('', what, 'a local path', text, remedy)


def check_free(path: pathlib.Path) -> None:
  """Raise CheckpointError if `path` exists."""
  if os.path.lexists(path):
    raise errors.CheckpointError(
        f'{str(path)!r} must be a new folder, got an existing path. Give another name, or delete it.')


def hint(path: PathLike) -> str:
  """Return a sentence, after a space, on the probable meaning of a `path` without weights; '' if unknown.

  The path may be the name of a model of the Hugging Face hub, or the local cache of the hub.
  """
  root = pathlib.Path(path)
  for found in sorted([*root.glob('snapshots/*/config.json'), *root.glob('*/config.json')]):
    if found.parent.parent.name == 'snapshots':
      return f' It is a cache of the Hugging Face hub; a model in it is the folder {str(found.parent)!r}.'
  if not root.exists() and _HUB_NAME_RE.fullmatch(os.fspath(path)) and not is_checkpoint_dir_name(path):
    if '/' not in os.fspath(path) or not root.parent.exists():
      return f' If it is the name of a model: {_download_remedy(os.fspath(path))}'
  return ''


def _download_remedy(name: str) -> str:
  folder = name.rsplit('/', maxsplit=1)[-1]
  return (f'Models are not downloaded automatically: run `hf download {name} --local-dir {folder}` (of the package '
          f'huggingface_hub), and give the path {folder!r}.')


def get_checkpoint_prefix() -> str:
  """Return the common prefix of the names of checkpoint directories."""
  return CHECKPOINT_PREFIX


def get_checkpoint_dir(checkpoints_dir: PathLike, step: int) -> str:
  """Return the path of the checkpoint of `step` below `checkpoints_dir`.

  >>> get_checkpoint_dir('runs/a', 30)
  'runs/a/checkpoint_30'
  """
  return os.path.join(os.fspath(checkpoints_dir), f'{CHECKPOINT_PREFIX}_{step}')


def is_checkpoint_dir_name(path: PathLike) -> bool:
  """Return True if the last component of `path` is the name of a checkpoint.

  >>> is_checkpoint_dir_name('runs/a/checkpoint_30'), is_checkpoint_dir_name('runs/a/checkpoint_30.tmp-x')
  (True, False)
  """
  return _STEP_RE.fullmatch(os.path.basename(os.path.normpath(path))) is not None


def get_step_from_checkpoint_dir(checkpoint_dir: PathLike) -> tuple[str, int]:
  """Return (parent directory, step) of a checkpoint's path.

  Raises:
    CheckpointError: the last component of the path is not the name of a checkpoint.

  >>> get_step_from_checkpoint_dir('runs/a/checkpoint_30/')
  ('runs/a', 30)
  """
  parent, name = os.path.split(os.path.normpath(checkpoint_dir))
  match = _STEP_RE.fullmatch(name)
  if match is None:
    raise errors.CheckpointError(
        f"The path of a checkpoint must end with '{CHECKPOINT_PREFIX}_<step>', got {os.fspath(checkpoint_dir)!r}.")
  return parent, int(match.group(1))


def all_steps(checkpoints_dir: PathLike, *, require_manifest: bool = True) -> Sequence[int]:
  """Return the steps of the checkpoints below `checkpoints_dir`, ascending.

  Args:
    checkpoints_dir: a model directory, which need not exist.
    require_manifest: whether to ignore checkpoints without a manifest (other programs write none).

  Returns:
    Steps >= 0, ascending. Folders with steps above `untrusted.MAX_STEP` are ignored with a warning.
  """
  root = pathlib.Path(checkpoints_dir)
  if not root.is_dir():
    return []
  steps = []
  for entry in root.iterdir():
    match = _STEP_RE.fullmatch(entry.name)
    if match and entry.is_dir() and (not require_manifest or (entry / MANIFEST_FILENAME).is_file()):
      if int(match.group(1)) > untrusted.MAX_STEP:
        _warn_of_step(str(entry))
      else:
        steps.append(int(match.group(1)))
  return sorted(steps)


@functools.cache  # Warn once for each folder: a run lists its checkpoints often.
def _warn_of_step(path: str) -> None:
  _logger.warning('Ignoring %s: steps must be at most %d. Rename or move the folder.', path, untrusted.MAX_STEP)


def latest_step(checkpoints_dir: PathLike) -> int | None:
  """Return the newest step that has a checkpoint with a manifest, or None; verifies nothing."""
  return max(all_steps(checkpoints_dir), default=None)


def all_dataset_checkpoint_steps(checkpoints_dir: PathLike) -> Sequence[int]:
  """Return the steps of the checkpoints that hold dataset state, ascending."""
  return [step for step in all_steps(checkpoints_dir)
          if os.path.isdir(os.path.join(get_checkpoint_dir(checkpoints_dir, step), DATASET_DIRNAME))]


def pinned_checkpoint_filepath(ckpt_dir: PathLike) -> str:
  """Return the path of the file that pins the checkpoint."""
  return os.path.join(os.fspath(ckpt_dir), PINNED_FILENAME)


def is_pinned_checkpoint(ckpt_dir: PathLike) -> bool:
  """Return True if the checkpoint is pinned: no retention policy deletes it."""
  return os.path.exists(pinned_checkpoint_filepath(ckpt_dir))


def pin_checkpoint(ckpt_dir: PathLike, txt: str = '1') -> None:
  """Pin the checkpoint; `txt` is written to the pin as a note for people.

  Raises:
    FileNotFoundError: the checkpoint does not exist.
  """
  files.write(pinned_checkpoint_filepath(ckpt_dir), txt)


def unpin_checkpoint(ckpt_dir: PathLike) -> None:
  """Remove the pin, if there is one."""
  pathlib.Path(pinned_checkpoint_filepath(ckpt_dir)).unlink(missing_ok=True)


def mark_unsound(ckpt_dir: PathLike, reason: str) -> None:
  """Mark a checkpoint so that no run resumes from it; `reason` is written to the mark as a note for people."""
  files.write(pathlib.Path(ckpt_dir) / UNSOUND_FILENAME, f'{reason}\n')


def is_marked_unsound(ckpt_dir: PathLike) -> bool:
  """Return True if the checkpoint has the mark of `mark_unsound`."""
  return os.path.exists(os.path.join(os.fspath(ckpt_dir), UNSOUND_FILENAME))


def is_protected(ckpt_dir: PathLike) -> bool:
  """Return True if a checkpoint is never deleted: it is pinned, or another program wrote it (no manifest)."""
  return is_pinned_checkpoint(ckpt_dir) or not os.path.isfile(os.path.join(os.fspath(ckpt_dir), MANIFEST_FILENAME))


def remove_checkpoint_dir(ckpt_dir: PathLike) -> None:
  """Delete a checkpoint unless it is pinned; a process that dies meanwhile leaves no partial checkpoint."""
  if not is_pinned_checkpoint(ckpt_dir):
    path = pathlib.Path(ckpt_dir)
    rename_and_delete(path, path.name)


def rename_and_delete(path: pathlib.Path, final_name: str) -> None:
  """Rename a folder atomically, then delete it.

  A partially deleted folder without a manifest could otherwise be mistaken for a checkpoint of another program.

  Args:
    path: the folder.
    final_name: name of the checkpoint that the folder is or was.
  """
  doomed = path.with_name(f'{final_name}{DELETED_INFIX}{uuid.uuid4().hex[:8]}')
  path.rename(doomed)
  shutil.rmtree(doomed)


def clean_leftovers(checkpoints_dir: PathLike) -> list[str]:
  """Remove leftovers of runs that died while saving or deleting; the caller must hold the directory's lock.

  A checkpoint that was renamed to be replaced gets its name back if the new checkpoint was not committed; otherwise it
  is deleted unless it is protected.

  Args:
    checkpoints_dir: the model directory.

  Returns:
    Names of the removed and renamed files and folders.
  """
  done = []
  for entry in sorted(pathlib.Path(checkpoints_dir).iterdir()):
    match = _LEFTOVER_RE.fullmatch(entry.name)
    if entry.name.startswith(f'{METRICS_FILENAME}{WRITING_INFIX}'):
      entry.unlink()
      done.append(entry.name)
    if match is None or not entry.is_dir():
      continue
    final = entry.with_name(match.group(1))
    is_replaced = match.group(2) == REPLACED_INFIX
    if is_replaced and final.exists() and is_protected(entry):
      continue
    done.append(entry.name)
    if is_replaced and not final.exists():
      _logger.warning('Renaming a checkpoint back to %s: the run that was replacing it died.', final)
      entry.rename(final)
    else:
      _logger.info('Removing %s, left behind by a run that died.', entry)
      rename_and_delete(entry, final.name)
  return done
