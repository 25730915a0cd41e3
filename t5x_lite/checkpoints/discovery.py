"""Where checkpoints are: their names, the steps below a model directory, pins, and what dead runs left behind.

    MODEL_DIR/checkpoint_<step>/state/                        arrays, in Orbax's form
    MODEL_DIR/checkpoint_<step>/dataset/process_<i>-of-<n>/   position of the data iterator of each process
    MODEL_DIR/checkpoint_<step>/manifest.json                 names, shapes and the hash of every file
    MODEL_DIR/checkpoint_<step>/PINNED                        never to be deleted (optional)
    MODEL_DIR/checkpoint_<step>/UNSOUND                       its parameters give a non-finite loss (optional)
    MODEL_DIR/checkpoint_metrics.json                         metrics by step, for keeping the best
    MODEL_DIR/.lock                                           held by the run that writes here

A directory named exactly `checkpoint_<step>` is whole: it gets its name in one atomic rename, when all is on disk.
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


from t5x_lite import errors, files, untrusted

_logger = logging.getLogger(__name__)

CHECKPOINT_PREFIX = 'checkpoint'
MANIFEST_FILENAME = 'manifest.json'
METRICS_FILENAME = 'checkpoint_metrics.json'
PINNED_FILENAME = 'PINNED'
UNSOUND_FILENAME = 'UNSOUND'
STATE_DIRNAME = 'state'
DATASET_DIRNAME = 'dataset'

# A checkpoint under any of these names is not one (yet, or any more).
WRITING_INFIX = files.WRITING_INFIX
REPLACED_INFIX = '.replaced-'
DELETED_INFIX = '.deleted-'

_STEP_RE = re.compile(rf'{CHECKPOINT_PREFIX}_(0|[1-9]\d*)')
_INFIXES = '|'.join(map(re.escape, (WRITING_INFIX, REPLACED_INFIX, DELETED_INFIX)))
_LEFTOVER_RE = re.compile(rf'({CHECKPOINT_PREFIX}_\d+)({_INFIXES}).*')

# Owner, which a few old models are without, and name.
_HUB_NAME_RE = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*|[\w.-]*t5-[\w.-]+|switch-[\w.-]+')

PathLike = str | os.PathLike[str]


def check_local_path(path: PathLike, what: str) -> None:
  """Raises ConfigError unless `path` is a path of this machine; `what` names it in the message."""
  text = os.fspath(path)
  if text.startswith('hf://') or '://' in text and 'huggingface' in text:
    name = '/'.join([part for part in text.partition('://')[2].split('/') if 'huggingface' not in part][:2])
    raise errors.ConfigError(f'{what}: got the remote path {text!r}, expected a local one. {_how_to_download(name)}')
  if '://' in text:
    raise errors.ConfigError(
        f'{what}: got the remote path {text!r}, expected a local one. Saving to and restoring from object '
        'stores is not tested here; use a local or mounted directory and copy from it.')
  if text.startswith('~') and not os.path.exists(text):
    raise errors.ConfigError(
        f'{what}: got {text!r}, in which the shell has not replaced ~, as it does at the beginning of a word alone; '
        f'expected a path. Write {os.path.expanduser(text)!r}.')


def hint(path: PathLike) -> str:
  """Returns a sentence, with a space before it, on what a `path` without weights may have been meant for; '' if none.

  It may be the name of a model of the Hugging Face hub, from which nothing is fetched here, or its cache on this disk.
  """
  root = pathlib.Path(path)
  for found in sorted([*root.glob('snapshots/*/config.json'), *root.glob('*/config.json')]):
    if found.parent.parent.name == 'snapshots':
      return f' It is a cache of the Hugging Face hub; a model in it is the folder {str(found.parent)!r}.'
  if not root.exists() and _HUB_NAME_RE.fullmatch(os.fspath(path)) and not is_checkpoint_dir_name(path):
    if '/' not in os.fspath(path) or not root.parent.exists():
      return f' If it is the name of a model: {_how_to_download(os.fspath(path))}'
  return ''


def _how_to_download(name: str) -> str:
  folder = name.rsplit('/', maxsplit=1)[-1]
  return (f'Nothing is downloaded here: run `hf download {name} --local-dir {folder}` (of the package '
          f'huggingface_hub), and give the path {folder!r}.')


def get_checkpoint_prefix() -> str:
  """Returns what the names of checkpoint directories start with."""
  return CHECKPOINT_PREFIX


def get_checkpoint_dir(checkpoints_dir: PathLike, step: int) -> str:
  """Returns the path of the checkpoint of `step` below `checkpoints_dir`.

  >>> get_checkpoint_dir('runs/a', 30)
  'runs/a/checkpoint_30'
  """
  return os.path.join(os.fspath(checkpoints_dir), f'{CHECKPOINT_PREFIX}_{step}')


def is_checkpoint_dir_name(path: PathLike) -> bool:
  """Returns whether the last component of `path` is the name of a checkpoint.

  >>> is_checkpoint_dir_name('runs/a/checkpoint_30'), is_checkpoint_dir_name('runs/a/checkpoint_30.tmp-x')
  (True, False)
  """
  return _STEP_RE.fullmatch(os.path.basename(os.path.normpath(path))) is not None


def get_step_from_checkpoint_dir(checkpoint_dir: PathLike) -> tuple[str, int]:
  """Returns (parent directory, step) of a checkpoint's path.

  >>> get_step_from_checkpoint_dir('runs/a/checkpoint_30/')
  ('runs/a', 30)
  """
  parent, name = os.path.split(os.path.normpath(checkpoint_dir))
  match = _STEP_RE.fullmatch(name)
  if match is None:
    raise errors.CheckpointError(
        f'{os.fspath(checkpoint_dir)!r} is not the path of a checkpoint: expected its last component to be '
        f"'{CHECKPOINT_PREFIX}_<step>'.")
  return parent, int(match.group(1))


def all_steps(checkpoints_dir: PathLike, *, require_manifest: bool = True) -> Sequence[int]:
  """Returns the steps of the checkpoints below `checkpoints_dir`, ascending.

  Args:
    checkpoints_dir: a model directory; one that does not exist has no checkpoints.
    require_manifest: leave out checkpoints without a manifest (other programs write none).

  Returns:
    Steps, ascending; 0 is a step like any other. Folders of later steps than this package counts to are left out, with
    a warning.
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


@functools.cache  # Once for each folder: a run looks for its checkpoints again and again.
def _warn_of_step(path: str) -> None:
  _logger.warning('%s is not looked at: steps must be at most %d. Rename or move the folder.', path, untrusted.MAX_STEP)


def latest_step(checkpoints_dir: PathLike) -> int | None:
  """Returns the newest step that has a checkpoint with a manifest, or None; nothing is verified."""
  return max(all_steps(checkpoints_dir), default=None)


def all_dataset_checkpoint_steps(checkpoints_dir: PathLike) -> Sequence[int]:
  """Returns the steps of the checkpoints that hold dataset state, ascending."""
  return [step for step in all_steps(checkpoints_dir)
          if os.path.isdir(os.path.join(get_checkpoint_dir(checkpoints_dir, step), DATASET_DIRNAME))]


def pinned_checkpoint_filepath(ckpt_dir: PathLike) -> str:
  """Returns the path of the file whose existence pins the checkpoint."""
  return os.path.join(os.fspath(ckpt_dir), PINNED_FILENAME)


def is_pinned_checkpoint(ckpt_dir: PathLike) -> bool:
  """Returns whether the checkpoint is pinned, that is never deleted by a retention policy."""
  return os.path.exists(pinned_checkpoint_filepath(ckpt_dir))


def pin_checkpoint(ckpt_dir: PathLike, txt: str = '1') -> None:
  """Pins the checkpoint; `txt` is written to the pin as a note for people."""
  if not os.path.isdir(ckpt_dir):
    raise errors.CheckpointError(f'There is no checkpoint {os.fspath(ckpt_dir)!r} to pin.')
  files.write(pinned_checkpoint_filepath(ckpt_dir), txt)


def unpin_checkpoint(ckpt_dir: PathLike) -> None:
  """Takes the pin away, where there is one."""
  pathlib.Path(pinned_checkpoint_filepath(ckpt_dir)).unlink(missing_ok=True)


def mark_unsound(ckpt_dir: PathLike, reason: str) -> None:
  """Marks a checkpoint as one that no run resumes from; `reason` is written to the mark as a note for people."""
  files.write(pathlib.Path(ckpt_dir) / UNSOUND_FILENAME, f'{reason}\n')


def is_marked_unsound(ckpt_dir: PathLike) -> bool:
  """Returns whether the checkpoint has the mark of `mark_unsound`."""
  return os.path.exists(os.path.join(os.fspath(ckpt_dir), UNSOUND_FILENAME))


def is_to_be_spared(ckpt_dir: PathLike) -> bool:
  """Returns whether a checkpoint is never deleted: it is pinned, or is not of this package's making (no manifest)."""
  return is_pinned_checkpoint(ckpt_dir) or not os.path.isfile(os.path.join(os.fspath(ckpt_dir), MANIFEST_FILENAME))


def remove_checkpoint_dir(ckpt_dir: PathLike) -> None:
  """Deletes a checkpoint unless it is pinned.

  It loses its name first, in one atomic rename, so that a process that dies half-way leaves no half checkpoint.
  """
  if not is_pinned_checkpoint(ckpt_dir):
    path = pathlib.Path(ckpt_dir)
    delete_under_other_name(path, path.name)


def delete_under_other_name(path: pathlib.Path, final_name: str) -> None:
  """Deletes a folder that first, in one atomic rename, gets a name which says that it is to go.

  A folder half-deleted under its own name could be taken for a checkpoint that another program wrote: its manifest may
  be the first file to go.

  Args:
    path: the folder.
    final_name: name of the checkpoint that it is, or was before it was set aside.
  """
  doomed = path.with_name(f'{final_name}{DELETED_INFIX}{uuid.uuid4().hex[:8]}')
  path.rename(doomed)
  shutil.rmtree(doomed)


def clean_leftovers(checkpoints_dir: PathLike) -> list[str]:
  """Removes what runs that died while saving or deleting left behind; call it only while holding the directory's lock.

  A checkpoint that was set aside to be replaced gets its name back where its successor never got it, and stays where it
  is if it `is_to_be_spared`.

  Args:
    checkpoints_dir: the model directory.

  Returns:
    Names of what was removed or renamed.
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
    if is_replaced and final.exists() and is_to_be_spared(entry):
      continue
    done.append(entry.name)
    if is_replaced and not final.exists():
      _logger.warning('Giving %s its name back: the run that was replacing it died.', final)
      entry.rename(final)
    else:
      _logger.info('Removing %s, left behind by a run that died.', entry)
      delete_under_other_name(entry, final.name)
  return done
