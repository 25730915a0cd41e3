"""Which form a folder has, by what lies in it, and the words for those that cannot be read."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping

from t5x_lite import errors, untrusted
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.sources import base, hugging_face, orbax, t5x_native

_SOURCES: Mapping[str, type[base.StateSource]] = {
    source.format: source
    for source in (orbax.OwnSource, orbax.OrbaxSource, t5x_native.T5xNativeSource, hugging_face.HuggingFaceSource)}
FORMATS = tuple(_SOURCES)

_FORMS = ('a checkpoint of this package (manifest.json and state/), of T5X (a file `checkpoint` with folders target.*, '
          'or an Orbax PyTree with a file _METADATA) or a Hugging Face folder (config.json and *.safetensors)')
# Files of other programs, and what makes a readable form of them.
_OTHERS = (
    ('adapter_config.json', 'an adapter of peft, which is not a model',
     'Merge it with its model and write that: model.merge_and_unload().save_pretrained(path).'),
    ('model.ckpt-*.index', 'a TensorFlow checkpoint, as the T5 of Mesh TensorFlow wrote them',
     'Give the same model in the form of T5X or of Hugging Face: all T5 models are published in both.'),
    ('*.index', 'a TensorFlow checkpoint', 'Give the same model in the form of T5X or of Hugging Face.'),
    ('pytorch_model*.bin', 'weights of PyTorch, which are a program that runs when it is read',
     'Load the folder with transformers and write it anew: model.save_pretrained(path), which writes safetensors.'),
    ('flax_model*.msgpack', "weights of transformers' Flax models",
     'Load the folder with transformers (from_flax=True) and write it anew: model.save_pretrained(path).'),
    ('tf_model*.h5', "weights of transformers' TensorFlow models",
     'Load the folder with transformers (from_tf=True) and write it anew: model.save_pretrained(path).'),
    ('*.safetensors', 'safetensors without the config.json that says what they are',
     'Put the config.json of the model beside them.'),
    ('config.json', 'a Hugging Face folder without weights', 'Put its *.safetensors beside config.json.'),
)


def detect_format(path: discovery.PathLike) -> str | None:
  """Returns the form of what lies in the folder `path`, by content, whatever it is called.

  Args:
    path: a folder.

  Returns:
    One of `FORMATS`; None for anything else, a directory of checkpoints among it.
  """
  root = pathlib.Path(path)
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


def open_source(path: discovery.PathLike) -> base.StateSource:
  """Opens the state that lies in the folder `path`, in whatever form; reads its index only.

  Args:
    path: a folder.

  Returns:
    The source.

  Raises:
    CheckpointError: there is no such folder, or it holds nothing that can be read; the message says what it holds and
      what to do.
  """
  discovery.check_local_path(path, 'checkpoint')
  check_exists(path)
  found = detect_format(path)
  if found is None:
    raise errors.CheckpointError(_refusal(pathlib.Path(path)))
  return _SOURCES[found](path)


def check_readable(path: discovery.PathLike) -> None:
  """Raises CheckpointError if the folder `path` holds weights of another program that cannot be read."""
  if os.path.isdir(path) and detect_format(path) is None:
    words = _foreign(pathlib.Path(path))
    if words is not None:
      raise errors.CheckpointError(words)


def check_exists(path: discovery.PathLike) -> None:
  """Raises CheckpointError, with a proposal, unless `path` is a folder."""
  if os.path.isdir(path):
    return
  parent, name = os.path.split(os.path.normpath(path))
  if os.path.exists(path):
    raise errors.CheckpointError(
        f'{os.fspath(path)!r} is a file; expected the folder of a checkpoint. Give the folder it is in: '
        f'{parent or "."!r}.')
  siblings = [entry for entry in os.listdir(parent or '.')
              if discovery.is_checkpoint_dir_name(entry)] if os.path.isdir(parent or '.') else []
  raise errors.CheckpointError(
      f'There is no checkpoint at {os.fspath(path)!r}: expected a directory such as MODEL_DIR/checkpoint_1000.'
      + errors.did_you_mean(name, siblings) + discovery.hint(path))


def _is_own(root: pathlib.Path) -> bool:
  # A model that was exported has a manifest.json, too, of another kind.
  manifest = root / discovery.MANIFEST_FILENAME
  if not manifest.is_file():
    return False
  if (root / discovery.STATE_DIRNAME).is_dir() or discovery.is_checkpoint_dir_name(root):
    return True
  with untrusted.check_file(root, manifest.name).open('rb') as file:
    return b'"1_sha256"' in file.read(200)


def _is_hugging_face(root: pathlib.Path) -> bool:
  if not (root / 'config.json').is_file() or not any(root.glob('*.safetensors*')):
    return False
  try:
    return isinstance(json.loads(untrusted.read_limited(root, 'config.json')), dict)
  except (OSError, ValueError, RecursionError):  # CheckpointError is a ValueError.
    return True  # What is wrong with it is for the reader to say.


def _foreign(root: pathlib.Path) -> str | None:
  for pattern, what, remedy in _OTHERS:
    found = sorted(entry.name for entry in root.glob(pattern))
    if found:
      return f'{str(root)!r} holds {what} ({found[0]}); expected {_FORMS}. {remedy}'
  return None


def _refusal(root: pathlib.Path) -> str:
  words = _foreign(root)
  if words is not None:
    return words
  steps = discovery.all_steps(root, require_manifest=False)
  if steps:
    paths = [discovery.get_checkpoint_dir(root, step) for step in steps]
    newest = ([path for path in paths if not discovery.is_marked_unsound(path)] or paths)[-1]
    return (f"{str(root)!r} is a directory of checkpoints; expected a single checkpoint. Name one, the newest is "
            f"{newest!r}, or set RestoreCheckpointConfig.mode to 'latest'.")
  return (f'{str(root)!r} holds no state that can be read: expected {_FORMS}. Give the path of a checkpoint, such as '
          'MODEL_DIR/checkpoint_1000.' + discovery.hint(root))
