"""Detection of a folder's format by its contents, and errors for formats that are not supported."""

from __future__ import annotations

from collections.abc import Mapping
import os
from typing import Any, TypeVar

from t5x_lite import errors
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints.sources import adapter
from t5x_lite.checkpoints.sources import base
from t5x_lite.checkpoints.sources import base_identity
from t5x_lite.checkpoints.sources import orbax
from t5x_lite.checkpoints.sources import t5x_index
from t5x_lite.lazy_names import LazyClasses
from t5x_lite.storage import files

_FOLDER = 't5x_lite.checkpoints.sources'
# The first format that a folder has is its format: a checkpoint of t5x_lite is an Orbax PyTree, too.
BUILT_IN = {
  't5x_lite': f'{_FOLDER}.orbax.OwnSource',
  't5x': f'{_FOLDER}.t5x_native.T5xNativeSource',
  't5x_orbax': f'{_FOLDER}.orbax.OrbaxSource',
  'hugging_face': f'{_FOLDER}.hugging_face.HuggingFaceSource',
}
FORMATS = tuple(BUILT_IN)
# Formats of adapters without their base, from which no run starts.
_ADAPTERS: LazyClasses[type[base.StateSource]] = LazyClasses({'peft': f'{_FOLDER}.peft.PeftSource'})
_SOURCES: LazyClasses[type[base.StateSource]] = LazyClasses(BUILT_IN)
_Source = TypeVar('_Source', bound=type[base.StateSource])

# Files of unsupported formats: pattern, contents, remedy.
_UNSUPPORTED = (
  (
    'adapter_config.json',
    'an adapter of PEFT, which is not a model',
    'To continue it, set INITIAL_ADAPTER_PATH to it and INITIAL_CHECKPOINT_PATH to its model. To merge them: t5x_lite '
    'convert ADAPTER OUTPUT --base=MODEL --to=hugging_face.',
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


def register_state_source(cls: _Source) -> _Source:
  """Register a subclass of `StateSource`, as a decorator: its format is then read wherever weights are read.

  Raises:
    ConfigError: see `LazyClasses.register`.
  """
  _SOURCES.register('register_state_source', getattr(cls, 'format', None), cls, base.StateSource)
  return cls


def source_class(name: str) -> type[base.StateSource]:
  """Return the class that reads a format."""
  if name in _SOURCES:
    return _SOURCES[name]
  return _ADAPTERS[name]


def is_adapter(path: discovery.PathLike) -> bool:
  """Return True if the folder `path` has only an adapter of PEFT."""
  root = files.path(path)
  return root.is_dir() and source_class('peft').is_stored_in(root)


def detect_format(path: discovery.PathLike) -> str | None:
  """Return the format of the folder `path`, by its contents.

  Args:
    path: a folder.

  Returns:
    The name of the format; None for other folders, such as a directory of checkpoints.
  """
  root = files.path(path)
  if not root.is_dir():
    return None
  for source in _SOURCES.values():
    if source.is_stored_in(root):
      return source.format
  return None


def folder_of(path: discovery.PathLike) -> str:
  """Return the folder of a checkpoint, given the folder, an index file in it, or its folder of arrays.

  T5X restores `checkpoint_<step>/checkpoint`. Other paths are returned unchanged.
  """
  discovery.check_path(path, 'checkpoint', may_be_model=True)
  root = files.path(path)
  # T5X's path of a checkpoint, also of one of ours, which has no such file.
  index_files = {name for source in _SOURCES.values() for name in source.index_files}
  is_name_of_t5x = (
    root.name == t5x_index.FILENAME
    and not root.exists()
    and orbax.OwnSource.is_stored_in(root.parent)
  )
  if is_name_of_t5x or (root.name in index_files and root.is_file()):
    root = root.parent
  if root.name == discovery.STATE_DIRNAME and orbax.OwnSource.is_stored_in(root.parent):
    root = root.parent
  return os.fspath(path) if root == files.path(path) else str(root)


def open_source(path: discovery.PathLike, *, base_path: str | None = None) -> base.StateSource:
  """Open the state in the folder `path`, of any supported format; reads only the index.

  Args:
    path: a folder, on a disk or in an object store, or the name of a model of the Hugging Face hub; see also
      `folder_of`.
    base_path: path of the base if this is the checkpoint of an adapter, see `recorded_base`.

  Returns:
    The opened state; of an adapter's checkpoint, its arrays and those of the base.

  Raises:
    CheckpointError: the folder does not exist or has no supported format; the message has its contents and the remedy.
  """
  path = folder_of(path)
  check_exists(path)
  found = detect_format(path)
  if found is None:
    check_readable(path)
    raise errors.CheckpointError(_not_a_state(files.path(path)))
  source = _SOURCES[found](path)
  recorded = _recorded_base(source, base_path)
  if recorded is None:
    return source
  return adapter.AdapterSource(source, lambda: check_base(recorded, source.path))


def open_peft(
  path: discovery.PathLike, model: Mapping[str, Any], model_path: str
) -> base.StateSource:
  """Open an adapter of PEFT; see `peft.PeftSource`."""
  from t5x_lite.checkpoints.sources import peft  # only this format needs safetensors

  return peft.PeftSource(path, model, model_path)


def recorded_base(
  path: discovery.PathLike, base_path: str | None = None
) -> Mapping[str, str] | None:
  """Return the identity of the base that a checkpoint records, see `identify_base`; None if it needs none.

  Args:
    path: path of the checkpoint.
    base_path: path of the base, or of the run directory with it; replaces the recorded path if it exists.
  """
  return _recorded_base(open_source(path).own, base_path)


def _recorded_base(source: base.StateSource, base_path: str | None) -> dict[str, str] | None:
  if source.manifest is None or base_identity.ENTRY not in source.manifest.metadata:
    return None
  recorded = dict(source.manifest.metadata[base_identity.ENTRY])
  # A model of the hub may have a newer commit now, and a run directory newer checkpoints.
  if base_path is None or base_path == recorded['path'].partition('@')[0]:
    return recorded
  given = folder_of(base_path)
  for path in (str(files.path(given) / os.path.basename(recorded['path'])), given):
    if files.path(path).is_dir():
      return recorded | {'path': base_identity.recorded_path(path)}
  return recorded


def check_base(
  recorded: Mapping[str, str], owner: str, *, all_bytes: bool = False
) -> base.StateSource:
  """Return the opened base of an adapter; raise CheckpointError if it is missing, and see `base_identity.check`."""
  path = recorded['path']
  if not files.path(path).is_dir():
    raise errors.CheckpointError(
      f'The base of the adapter {owner!r} must be in {path!r}, got a missing folder. Move it there, or '
      f'{base_identity.REMEDY}'
    )
  source = open_source(path)
  base_identity.check(source, recorded, owner, all_bytes=all_bytes)
  return source


def check_readable(path: discovery.PathLike) -> None:
  """Raise CheckpointError if the folder `path` holds weights in an unsupported format."""
  root = files.path(path)
  for pattern, contents, remedy in (
    _UNSUPPORTED if root.is_dir() and detect_format(path) is None else ()
  ):
    found = sorted(entry.name for entry in root.glob(pattern))
    if found:
      raise errors.CheckpointError(
        f'{str(root)!r} must be {_expected()}, got {contents} ({found[0]}). {remedy}'
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


def _expected() -> str:
  """Return the descriptions of all formats, joined for a sentence."""
  *others, last = [source.description for source in _SOURCES.values()]
  return f'{", ".join(others)} or {last}'


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
    f'{str(root)!r} must be {_expected()}, got a folder with none of them. Give the path of a checkpoint, such as '
    'MODEL_DIR/checkpoint_1000.' + discovery.hint(root)
  )
