"""Detection of a folder's format by its contents, and errors for formats that are not supported."""

from __future__ import annotations

from collections.abc import Mapping
import json
import os

from t5x_lite import errors
from t5x_lite import files
from t5x_lite import untrusted
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import state_io
from t5x_lite.checkpoints.sources import base
from t5x_lite.checkpoints.sources import hugging_face
from t5x_lite.checkpoints.sources import orbax
from t5x_lite.checkpoints.sources import t5x_index
from t5x_lite.checkpoints.sources import t5x_native

_SOURCES: Mapping[str, type[base.StateSource]] = {
  source.format: source
  for source in (
    orbax.OwnSource,
    orbax.OrbaxSource,
    t5x_native.T5xNativeSource,
    hugging_face.HuggingFaceSource,
  )
}
FORMATS = tuple(_SOURCES)

_EXPECTED = (
  'a checkpoint of t5x_lite (manifest.json and state/), of T5X (a file `checkpoint` with folders target.*, '
  'or an Orbax PyTree with a file _METADATA) or a Hugging Face folder (config.json and *.safetensors)'
)
# Files by which programs name the checkpoint that has them.
_INDEX_FILES = (t5x_index.FILENAME, discovery.MANIFEST_FILENAME, state_io.INDEX_FILENAME)
# A manifest of t5x_lite shows in them what it is.
_FIRST_BYTES = 200
# Files of unsupported formats: pattern, contents, remedy.
_UNSUPPORTED = (
  (
    'adapter_config.json',
    'an adapter of peft, which is not a model',
    'Merge it with its model and save the result: model.merge_and_unload().save_pretrained(path).',
  ),
  (
    'model.ckpt-*.index',
    'a TensorFlow checkpoint of Mesh TensorFlow',
    'Use the same model in the format of T5X or of Hugging Face: all T5 models are published in both.',
  ),
  (
    '*.index',
    'a TensorFlow checkpoint',
    'Use the same model in the format of T5X or of Hugging Face.',
  ),
  (
    'pytorch_model*.bin',
    'weights of PyTorch, which execute code when they are read',
    'Load the folder with transformers and save it again: model.save_pretrained(path), which writes safetensors.',
  ),
  (
    'flax_model*.msgpack',
    "weights of transformers' Flax models",
    'Load the folder with transformers (from_flax=True) and save it again: model.save_pretrained(path).',
  ),
  (
    'tf_model*.h5',
    "weights of transformers' TensorFlow models",
    'Load the folder with transformers (from_tf=True) and save it again: model.save_pretrained(path).',
  ),
  (
    '*.safetensors',
    'safetensors without a config.json',
    'Copy the config.json of the model to the folder.',
  ),
  ('config.json', 'a Hugging Face folder without weights', 'Copy its *.safetensors to the folder.'),
)


def detect_format(path: discovery.PathLike) -> str | None:
  """Return the format of the folder `path`, by its contents.

  Args:
    path: a folder.

  Returns:
    One of `FORMATS`; None for other folders, such as a directory of checkpoints.
  """
  root = files.path(path)
  if not root.is_dir():
    return None
  if _is_own(root):
    return orbax.OwnSource.format
  if t5x_native.is_native(root):
    return t5x_native.T5xNativeSource.format
  if any((folder / '_METADATA').is_file() for folder in (root / discovery.STATE_DIRNAME, root)):
    return orbax.OrbaxSource.format
  if _is_hugging_face(root):
    return hugging_face.HuggingFaceSource.format
  return None


def folder_of(path: discovery.PathLike) -> str:
  """Return the folder of a checkpoint, given the folder, an index file in it, or its folder of arrays.

  T5X restores `checkpoint_<step>/checkpoint`. Other paths are returned unchanged.
  """
  discovery.check_path(path, 'checkpoint', may_be_model=True)
  root = files.path(path)
  # T5X's path of a checkpoint, also of one of ours, which has no such file.
  is_name_of_t5x = root.name == t5x_index.FILENAME and not root.exists() and _is_own(root.parent)
  if is_name_of_t5x or (root.name in _INDEX_FILES and root.is_file()):
    root = root.parent
  if root.name == discovery.STATE_DIRNAME and _is_own(root.parent):
    root = root.parent
  return os.fspath(path) if root == files.path(path) else str(root)


def open_source(path: discovery.PathLike) -> base.StateSource:
  """Open the state in the folder `path`, of any supported format; reads only the index.

  Args:
    path: a folder, on a disk or in an object store, or the name of a model of the Hugging Face hub; see also
      `folder_of`.

  Returns:
    The opened state.

  Raises:
    CheckpointError: the folder does not exist or has no supported format; the message has its contents and the remedy.
  """
  path = folder_of(path)
  check_exists(path)
  found = detect_format(path)
  if found is None:
    check_readable(path)
    raise errors.CheckpointError(_not_a_state(files.path(path)))
  return _SOURCES[found](path)


def check_readable(path: discovery.PathLike) -> None:
  """Raise CheckpointError if the folder `path` holds weights in an unsupported format."""
  root = files.path(path)
  for pattern, contents, remedy in (
    _UNSUPPORTED if root.is_dir() and detect_format(path) is None else ()
  ):
    found = sorted(entry.name for entry in root.glob(pattern))
    if found:
      raise errors.CheckpointError(
        f'{str(root)!r} must be {_EXPECTED}, got {contents} ({found[0]}). {remedy}'
      )


def check_exists(path: discovery.PathLike) -> None:
  """Raise CheckpointError, with a suggestion, if `path` is not a folder."""
  root = files.path(path)
  if root.is_dir():
    return
  broken = files.broken_link(path)
  if broken is not None:
    raise errors.CheckpointError(
      f'{os.fspath(path)!r} must be a directory such as MODEL_DIR/checkpoint_1000: {broken}. Replace '
      'the link, or give another path.'
    )
  parent = root.parent
  if root.exists():
    kind = 'file'
    remedy = f' Give its folder, {str(parent)!r}.'
  else:
    if parent.is_dir():
      entries = [entry.name for entry in parent.iterdir()]
    else:
      entries = []
    kind = 'missing path'
    remedy = errors.did_you_mean(
      root.name, filter(discovery.is_checkpoint_dir_name, entries)
    ) + discovery.hint(path)
  raise errors.CheckpointError(
    f'{os.fspath(path)!r} must be a directory such as MODEL_DIR/checkpoint_1000, got a '
    f'{kind}.{remedy}'
  )


def _is_own(root: files.Path) -> bool:
  # An exported model has a manifest.json of another kind.
  manifest = root / discovery.MANIFEST_FILENAME
  if not manifest.is_file():
    return False
  if (root / discovery.STATE_DIRNAME).is_dir() or discovery.is_checkpoint_dir_name(root):
    return True
  with untrusted.check_file(root, manifest.name).open('rb', buffering=_FIRST_BYTES) as file:
    return b'"1_sha256"' in file.read(_FIRST_BYTES)


def _is_hugging_face(root: files.Path) -> bool:
  if not (root / 'config.json').is_file() or not any(root.glob('*.safetensors*')):
    return False
  try:
    return isinstance(json.loads(untrusted.read_limited(root, 'config.json')), dict)
  except (OSError, ValueError, RecursionError):  # CheckpointError is a ValueError.
    return True  # opening the folder reports the problem


def _not_a_state(root: files.Path) -> str:
  steps = discovery.all_steps(root, require_manifest=False)
  if steps:
    paths = [discovery.get_checkpoint_dir(root, step) for step in steps]
    newest = ([path for path in paths if not discovery.is_marked_unsound(path)] or paths)[-1]
    return (
      f'{str(root)!r} must be a single checkpoint, got a directory of checkpoints. Give the path of one (the '
      f"newest is {newest!r}), or set RestoreCheckpointConfig.mode to 'latest'."
    )
  return (
    f'{str(root)!r} must be {_EXPECTED}, got a folder with none of them. Give the path of a checkpoint, such as '
    'MODEL_DIR/checkpoint_1000.' + discovery.hint(root)
  )
