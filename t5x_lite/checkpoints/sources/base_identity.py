"""Identity of the base of an adapter: where it is, and hashes by which another or a changed one is noticed."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import json
import os
from typing import Any

from t5x_lite import errors
from t5x_lite.checkpoints import discovery
from t5x_lite.checkpoints import manifest as manifest_lib
from t5x_lite.checkpoints.sources import base
from t5x_lite.storage import files
from t5x_lite.storage import hub
from t5x_lite.storage import untrusted

# Entry of the metadata of an adapter's checkpoint; the fields of `identify` are in it.
ENTRY = 'base'
# Blocks of this size are compared, of all files together about this number.
_BLOCK_BYTES = 4096
_NUM_BLOCKS = 512
_SHOWN_DIGITS = 16
# What to do if the base is not in the recorded folder.
REMEDY = 'if the base is in another folder, give its path: --gin.INITIAL_CHECKPOINT_PATH=PATH, for convert --base=PATH.'


def identify(source: base.StateSource, path: str) -> dict[str, str]:
  """Return the identity of a base; reads all bytes of a checkpoint of another program.

  Args:
    source: the opened base.
    path: path by which the base was given.

  Returns:
    'path' (absolute; a name of the hub with its commit), 'format', 'sha256' of the names, shapes and contents of the
    arrays' files, and 'index_sha256', for which only some blocks of each file are read. For a checkpoint of t5x_lite
    both are made of the hashes in its manifest.
  """
  return {
    'path': recorded_path(path),
    'format': source.format,
    **{name: hash_fn(source) for name, hash_fn in _HASHES.items()},
  }


def check(
  source: base.StateSource, recorded: Mapping[str, str], owner: str, *, all_bytes: bool = False
) -> None:
  """Raise if an opened base is not the recorded one.

  Args:
    source: the opened base.
    recorded: result of `identify`; 'path' may be another one.
    owner: the adapter's checkpoint or run, for messages.
    all_bytes: whether to read and compare all bytes, instead of sizes, index and some blocks of each file.

  Raises:
    CheckpointError: it is another one; the message has both hashes.
    CheckpointDamagedError: with `all_bytes`, a file differs from its hash in the manifest.
  """
  name = 'index_sha256'
  if all_bytes:
    source.verify()
    name = 'sha256'
  found = _HASHES[name](source)
  if found != recorded[name]:
    raise errors.CheckpointError(
      f'The base of the adapter {owner!r} must be the model that it was trained with, of {name} '
      f'{recorded[name][:_SHOWN_DIGITS]}, got {source.path!r} of {name} {found[:_SHOWN_DIGITS]}. '
      f'If this base was changed, restore its former files; {REMEDY}'
    )


def recorded_path(path: str) -> str:
  """Return the path of a base that is valid in every working directory, and for a name of the hub its commit."""
  if hub.is_name(path):
    commit = os.path.basename(hub.local_folder(path))
    return f'{path.rstrip("/").partition("@")[0]}@{commit}'
  if files.is_remote(path):
    return path
  # Links stay: a link may be corrected when its target moves, and the hash notices another base.
  return os.path.abspath(path)


def _content_hash(source: base.StateSource) -> str:
  if source.manifest is not None:
    return _index_hash(source)
  hashes = manifest_lib.hash_files(files.path(source.path), source.weight_files())
  return _hash(source, hashes)


def _index_hash(source: base.StateSource) -> str:
  sizes = source.weight_files()
  found = source.manifest
  if found is None:
    num_blocks = max(1, _NUM_BLOCKS // max(1, len(sizes)))
    root = files.path(source.path)
    paths = {untrusted.check_file(root, name): size for name, size in sizes.items()}
    blocks = files.each(lambda path: _hash_of_blocks(path, paths[path], num_blocks), list(paths))
    return _hash(source, [sizes, blocks])
  hashes = {}
  for name, entry in found.files.items():
    # Retention may drop the position in the data, and with it the entries of its files.
    if name.startswith(f'{discovery.STATE_DIRNAME}/'):
      hashes[name] = [entry['sha256'], sizes.get(name)]
  return _hash(source, {'files': hashes, 'base': found.metadata.get(ENTRY, {}).get('sha256')})


_HASHES = {'sha256': _content_hash, 'index_sha256': _index_hash}


def _hash(source: base.StateSource, contents: Any) -> str:
  arrays = manifest_lib.describe_arrays(source.shapes())
  text = json.dumps([arrays, contents], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _hash_of_blocks(path: files.Path, size: int, num_blocks: int) -> str:
  """Return the hash of blocks at equal distances; new values of a model of the same size change all of them."""
  found = hashlib.sha256()
  last = max(0, size - _BLOCK_BYTES)
  with path.open('rb', buffering=_BLOCK_BYTES) as file:
    for block in range(num_blocks):
      file.seek(last * block // max(1, num_blocks - 1))
      found.update(file.read(_BLOCK_BYTES))
  return found.hexdigest()
