"""Layout of a model directory: names and steps of checkpoints, pins, and leftovers of runs that died.

    MODEL_DIR/checkpoint_<step>/state/                        arrays, in Orbax's format
    MODEL_DIR/checkpoint_<step>/dataset/process_<i>-of-<n>/   position of the data iterator of each process
    MODEL_DIR/checkpoint_<step>/manifest.json                 names, shapes and the hash of every file
    MODEL_DIR/checkpoint_<step>/PINNED                        protects the checkpoint from deletion (optional)
    MODEL_DIR/checkpoint_<step>/UNSOUND                       its parameters give a non-finite loss (optional)
    MODEL_DIR/checkpoint_metrics.json                         metrics by step, for keeping the best
    MODEL_DIR/.lock                                           held by the run that writes to MODEL_DIR

On a disk, a directory named exactly `checkpoint_<step>` is complete: an atomic rename gives it the name when all files
are on disk. In an object store, which has no rename, the files are written below the final name, the manifest last: a
checkpoint exists while its manifest does. Before the first file of a save, and before the manifest is deleted, an
object INCOMPLETE is written, which distinguishes remains from checkpoints of other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import logging
import os
import pathlib
import re

from t5x_lite import checks
from t5x_lite import errors
from t5x_lite.storage import files
from t5x_lite.storage import untrusted

_logger = logging.getLogger(__name__)

CHECKPOINT_PREFIX = 'checkpoint'
MANIFEST_FILENAME = 'manifest.json'
METRICS_FILENAME = 'checkpoint_metrics.json'
PINNED_FILENAME = 'PINNED'
UNSOUND_FILENAME = 'UNSOUND'
# Prefix of folders below `state/` and `dataset/process_.../` in a store: each attempt of a save has separate ones,
# since a run that lost its lease may write late.
ATTEMPT_PREFIX = 'attempt-'
INCOMPLETE_FILENAME = 'INCOMPLETE'
STATE_DIRNAME = 'state'
DATASET_DIRNAME = 'dataset'
LOCK_FILENAME = '.lock'

# A directory with one of these infixes is not a checkpoint: it is incomplete, replaced or being deleted.
WRITING_INFIX = files.WRITING_INFIX
REPLACED_INFIX = '.replaced-'
DELETED_INFIX = '.deleted-'

_STEP_RE = re.compile(rf'{CHECKPOINT_PREFIX}_(0|[1-9]\d*)')
_INFIXES = '|'.join(map(re.escape, (WRITING_INFIX, REPLACED_INFIX, DELETED_INFIX)))
# Names of leftovers: (name of the checkpoint)(infix).
LEFTOVER_RE = re.compile(rf'({CHECKPOINT_PREFIX}_\d+)({_INFIXES}).*')

# Owner and name; a few old models have no owner.
_HUB_NAME_RE = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*|[\w.-]*t5-[\w.-]+|switch-[\w.-]+')

PathLike = str | os.PathLike[str]


def check_path(path: PathLike, what: str, *, may_be_model: bool = False) -> None:
  """Raise ConfigError if `path` has an unknown scheme or begins with `~`.

  Args:
    path: a path on a disk or in an object store.
    what: the option, for the message.
    may_be_model: whether it may be the name of a model of the Hugging Face hub, hf://OWNER/NAME.
  """
  text = os.fspath(path)
  scheme = text.partition('://')[0] if '://' in text else None
  if scheme in files.STORES or scheme == 'hf' and may_be_model:
    return
  if scheme == 'hf' or scheme and 'huggingface' in text:
    remedy = _download_remedy(
      '/'.join(
        [part for part in text.partition('://')[2].split('/') if 'huggingface' not in part][:2]
      )
    )
  elif scheme is not None:
    remedy = f'Object stores are {" and ".join(f"{name}://" for name in files.STORES)}.'
  elif text.startswith('~') and not os.path.exists(text):
    remedy = (
      f'The shell expands ~ only at the beginning of a word: write {os.path.expanduser(text)!r}.'
    )
  else:
    return
  raise checks.invalid('', what, 'a path on a disk or in an object store', text, remedy)


def check_free(path: files.Path) -> None:
  """Raise CheckpointError if `path` exists."""
  if path.exists() or path.is_symlink():
    raise errors.CheckpointError(
      f'{str(path)!r} must be a new folder, got an existing path. Give another name, or delete it.'
    )


def hint(path: PathLike) -> str:
  """Return a sentence, after a space, on the probable meaning of a `path` without weights; '' if unknown.

  The path may be the name of a model of the Hugging Face hub, or the local cache of the hub.
  """
  if files.is_remote(path):
    return ''
  root = pathlib.Path(path)
  for found in sorted([*root.glob('snapshots/*/config.json'), *root.glob('*/config.json')]):
    if found.parent.parent.name == 'snapshots':
      return f' It is a cache of the Hugging Face hub; a model in it is the folder {str(found.parent)!r}.'
  if (
    not root.exists()
    and _HUB_NAME_RE.fullmatch(os.fspath(path))
    and not is_checkpoint_dir_name(path)
  ) and ('/' not in os.fspath(path) or not root.parent.exists()):
    return f' If it is the name of a model: {_download_remedy(os.fspath(path))}'
  return ''


def _download_remedy(name: str) -> str:
  folder = name.rsplit('/', maxsplit=1)[-1]
  return (
    f"Name it 'hf://{name}', or run `hf download {name} --local-dir {folder}` (of the package huggingface_hub) "
    f'and give the path {folder!r}.'
  )


def get_checkpoint_prefix(prefix: str = CHECKPOINT_PREFIX) -> str:
  """Return the common prefix of the names of checkpoint directories; `prefix` must be 'checkpoint'."""
  checks.check(
    'get_checkpoint_prefix',
    {'prefix': prefix},
    prefix=checks.one_of((CHECKPOINT_PREFIX,), 'Checkpoints have no other prefix here.'),
  )
  return prefix


def get_checkpoint_dir(
  checkpoints_dir: PathLike, step: int, step_format_fixed_length: int | None = None
) -> str:
  """Return the path of the checkpoint of `step` below `checkpoints_dir`.

  Args:
    checkpoints_dir: a model directory.
    step: the step.
    step_format_fixed_length: number of digits in the name, for checkpoints of other programs; None for as many as the
      step has.

  >>> get_checkpoint_dir('runs/a', 30)
  'runs/a/checkpoint_30'
  >>> get_checkpoint_dir('runs/a', 30, step_format_fixed_length=8)
  'runs/a/checkpoint_00000030'
  """
  digits = str(step).zfill(step_format_fixed_length or 0)
  return os.path.join(os.fspath(checkpoints_dir), f'{CHECKPOINT_PREFIX}_{digits}')


def is_checkpoint_dir_name(path: PathLike) -> bool:
  """Return True if the last component of `path` is the name of a checkpoint.

  >>> is_checkpoint_dir_name('runs/a/checkpoint_30'), is_checkpoint_dir_name('runs/a/checkpoint_30.tmp-x')
  (True, False)
  """
  return _STEP_RE.fullmatch(files.path(path).name) is not None


def get_step_from_checkpoint_dir(checkpoints_dir: PathLike) -> tuple[str, int]:
  """Return (parent directory, step) of a checkpoint's path.

  Raises:
    CheckpointError: the last component of the path is not the name of a checkpoint.

  >>> get_step_from_checkpoint_dir('runs/a/checkpoint_30/')
  ('runs/a', 30)
  """
  path = files.path(checkpoints_dir)
  match = _STEP_RE.fullmatch(path.name)
  if match is None:
    raise errors.CheckpointError(
      f"The path of a checkpoint must end with '{CHECKPOINT_PREFIX}_<step>', got {os.fspath(checkpoints_dir)!r}."
    )
  return str(path.parent), int(match.group(1))


def all_steps(checkpoints_dir: PathLike, *, require_manifest: bool = True) -> Sequence[int]:
  """Return the steps of the checkpoints below `checkpoints_dir`, ascending.

  Args:
    checkpoints_dir: a model directory, which need not exist.
    require_manifest: whether to ignore checkpoints without a manifest (other programs write none).

  Returns:
    Steps >= 0, ascending. Folders with steps above `untrusted.MAX_STEP` are ignored with a warning.
  """
  root = files.path(checkpoints_dir)
  try:
    entries = [entry for entry in root.iterdir() if _STEP_RE.fullmatch(entry.name)]
  except (FileNotFoundError, NotADirectoryError):
    return []
  steps = []
  for entry, is_checkpoint in zip(
    entries,
    files.each(functools.partial(_is_checkpoint, require_manifest=require_manifest), entries),
    strict=True,
  ):
    if is_checkpoint and int(entry.name.rpartition('_')[2]) > untrusted.MAX_STEP:
      _warn_of_step(str(entry))
    elif is_checkpoint:
      steps.append(int(entry.name.rpartition('_')[2]))
  return sorted(steps)


def _is_checkpoint(path: files.Path, *, require_manifest: bool) -> bool:
  return (
    (path / MANIFEST_FILENAME).is_file()
    or not require_manifest
    and path.is_dir()
    and not is_incomplete(path)
  )


def is_incomplete(ckpt_dir: PathLike) -> bool:
  """Return True if a folder in an object store belongs to an unfinished save or deletion.

  It has the mark, or arrays of an attempt, which a run that lost its lease may write after the mark was deleted.
  """
  path = files.path(ckpt_dir)
  return (
    files.is_remote(path)
    and not (path / MANIFEST_FILENAME).is_file()
    and (
      (path / INCOMPLETE_FILENAME).is_file()
      or any((path / STATE_DIRNAME).glob(f'{ATTEMPT_PREFIX}*'))
    )
  )


@functools.cache  # Warn once for each folder: a run lists its checkpoints often.
def _warn_of_step(path: str) -> None:
  _logger.warning(
    'Ignoring %s: steps must be at most %d. Rename or move the folder.', path, untrusted.MAX_STEP
  )


def all_steps_of_any_program(checkpoints_dir: PathLike) -> Sequence[int]:
  """Return the steps of all checkpoints, ascending, with those of T5X; T5X's `all_steps`."""
  return all_steps(checkpoints_dir, require_manifest=False)


def latest_step_of_any_program(checkpoints_dir: PathLike) -> int | None:
  """Return the newest step that has a checkpoint, of T5X too, or None; T5X's `latest_step`."""
  return max(all_steps_of_any_program(checkpoints_dir), default=None)


def latest_step(checkpoints_dir: PathLike) -> int | None:
  """Return the newest step that has a checkpoint with a manifest, or None; verifies nothing."""
  return max(all_steps(checkpoints_dir), default=None)


def all_dataset_checkpoint_steps(checkpoints_dir: PathLike) -> Sequence[int]:
  """Return the steps of the checkpoints that hold dataset state, ascending."""
  return [
    step
    for step in all_steps(checkpoints_dir)
    if (files.path(get_checkpoint_dir(checkpoints_dir, step)) / DATASET_DIRNAME).is_dir()
  ]


def pinned_checkpoint_filepath(ckpt_dir: PathLike) -> str:
  """Return the path of the file that pins the checkpoint."""
  return os.path.join(os.fspath(ckpt_dir), PINNED_FILENAME)


def is_pinned_checkpoint(ckpt_dir: PathLike) -> bool:
  """Return True if the checkpoint is pinned: no retention policy deletes it."""
  return files.path(pinned_checkpoint_filepath(ckpt_dir)).is_file()


def pin_checkpoint(ckpt_dir: PathLike, txt: str = '1') -> None:
  """Pin the checkpoint; `txt` is written to the pin as a note for people.

  Raises:
    FileNotFoundError: the checkpoint does not exist.
  """
  files.write(pinned_checkpoint_filepath(ckpt_dir), txt)


def unpin_checkpoint(ckpt_dir: PathLike) -> None:
  """Remove the pin, if there is one."""
  files.remove(files.path(pinned_checkpoint_filepath(ckpt_dir)))


def mark_unsound(ckpt_dir: PathLike, reason: str) -> None:
  """Mark a checkpoint so that no run resumes from it; `reason` is written to the mark as a note for people."""
  files.write(files.path(ckpt_dir) / UNSOUND_FILENAME, f'{reason}\n')


def is_marked_unsound(ckpt_dir: PathLike) -> bool:
  """Return True if the checkpoint has the mark of `mark_unsound`."""
  return (files.path(ckpt_dir) / UNSOUND_FILENAME).is_file()


def is_protected(ckpt_dir: PathLike) -> bool:
  """Return True if a checkpoint is never deleted: it is pinned, or another program wrote it (no manifest)."""
  if is_pinned_checkpoint(ckpt_dir):
    return True
  has_manifest = (files.path(ckpt_dir) / MANIFEST_FILENAME).is_file()
  return not (has_manifest or is_incomplete(ckpt_dir))
