"""Manifest of a checkpoint: its arrays, a hash of every file, and the verification of the files.

Orbax restores flipped bits without an error; the manifest detects them. The hash is SHA-256: OpenSSL computes it with
SHA instructions of the processor (2.0 GB/s on one core, against 1.25 for BLAKE2b and 0.6 for MD5), `hashlib` releases
the interpreter lock meanwhile, and `sha256sum` can check a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
from typing import Any

import jax
import numpy as np

from t5x_lite import __version__
from t5x_lite import errors
from t5x_lite import multihost
from t5x_lite.checkpoints import discovery
from t5x_lite.formatting import printable
from t5x_lite.storage import files
from t5x_lite.storage import open_folders
from t5x_lite.storage import untrusted

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """Contents of `manifest.json`.

  Attributes:
    step: the training step of the state.
    files: path relative to the checkpoint -> {'sha256': hex digest, 'bytes': size}.
    arrays: name -> {'shape': list of int, 'dtype': name}, for each stored array.
    metadata: values recorded by the caller of `save`, such as the parameter layout.
    metrics: metrics known when the state was saved.
    num_data_processes: number of processes with dataset state; 0 without dataset state.
    versions: versions of the libraries that wrote the checkpoint.
    format_version: version of this format.
  """

  step: int
  files: Mapping[str, Mapping[str, Any]]
  arrays: Mapping[str, Mapping[str, Any]]
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  num_data_processes: int = 0
  versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
  format_version: int = FORMAT_VERSION


def library_versions() -> dict[str, str]:
  """Return the versions of the libraries that determine the bytes and the meaning of a checkpoint."""
  names = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore', 'numpy')
  return {
    't5x_lite': __version__,
    'python': platform.python_version(),
    **{name: importlib.metadata.version(name) for name in names},
  }


def hash_files(root: files.Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
  """Return {'sha256', 'bytes'} of each file `names`, relative to `root`; reads the files in parallel."""

  def one(name):
    try:
      with (root / name).open('rb') as f:
        return {
          'sha256': hashlib.file_digest(f, 'sha256').hexdigest(),
          'bytes': f.seek(0, os.SEEK_END),
        }
    except OSError as e:
      e.filename = name  # errors of reading, unlike those of opening, have no file name
      raise

  names = list(names)
  with concurrent.futures.ThreadPoolExecutor(
    files.NUM_THREADS, thread_name_prefix='checkpoint-hash'
  ) as pool:
    return dict(zip(names, pool.map(one, names), strict=True))


def list_files(root: files.Path) -> list[str]:
  """Return the sorted paths of all files below `root`, relative to it."""
  if files.is_remote(root):
    return list(root.find())
  return sorted(str(path.relative_to(root)) for path in root.rglob('*') if path.is_file())


def to_text(manifest: Manifest) -> str:
  """Return the canonical text of `manifest`; its second line is the hash of the contents."""
  body = dataclasses.asdict(manifest)
  text = json.dumps(body, indent=1, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()
  return json.dumps({'1_sha256': digest, '2_contents': body}, indent=1, sort_keys=True) + '\n'


def write(root: files.Path, manifest: Manifest, check_fn: Callable[[], None] | None = None) -> None:
  """Write `manifest` below `root`, replacing an older one atomically, and flush it to disk.

  Args:
    root: folder of the checkpoint.
    manifest: what to write.
    check_fn: called before each attempt to write it to a store; only for a store.

  Raises:
    CheckpointError: `read` would reject the manifest.
    OSError: the file cannot be written.
  """
  text = to_text(manifest)
  problem = _problem(dataclasses.asdict(manifest))
  if problem is None and len(text) > untrusted.MAX_TEXT_BYTES:
    problem = f'the file must have at most {untrusted.MAX_TEXT_BYTES:,} bytes, got {len(text):,}'
  if problem is not None:
    raise errors.CheckpointError(f'{discovery.MANIFEST_FILENAME} cannot be written: {problem}.')
  if check_fn is None:
    files.write(root / discovery.MANIFEST_FILENAME, text)
  else:
    assert files.is_remote(root)
    files.flush(root)
    (root / discovery.MANIFEST_FILENAME).write_bytes(text.encode(), check_fn)


def read(checkpoint_dir: str | os.PathLike[str]) -> Manifest | None:
  """Read the manifest of a checkpoint and check it; does not read the files that it lists.

  Args:
    checkpoint_dir: path of the checkpoint.

  Returns:
    The manifest, or None if the checkpoint has no manifest.

  Raises:
    CheckpointDamagedError: the manifest differs from the written one, or cannot be read.
    CheckpointError: the format version or a field is unknown, or a value is invalid.
  """
  damage = None
  try:
    data = untrusted.read_limited(files.path(checkpoint_dir), discovery.MANIFEST_FILENAME)
    document = json.loads(data)
    canonical = json.dumps(document, indent=1, sort_keys=True) + '\n'
    body_text = json.dumps(document['2_contents'], indent=1, sort_keys=True)
    if (
      canonical.encode() != data
      or document['1_sha256'] != hashlib.sha256(body_text.encode()).hexdigest()
    ):
      damage = 'differs from the written one'
  except FileNotFoundError:
    return None
  except errors.CheckpointError:
    raise
  except OSError as e:
    if files.is_remote(checkpoint_dir):
      raise  # denied or not reached, which says nothing about the checkpoint
    damage = f'cannot be read ({e.strerror})'
  except (ValueError, KeyError, TypeError, RecursionError):
    damage = 'differs from the written one'
  if damage is not None:
    raise errors.CheckpointDamagedError(
      f'The checkpoint {os.fspath(checkpoint_dir)!r} is damaged: {discovery.MANIFEST_FILENAME} {damage}. Restore '
      'another checkpoint, or a copy of this one.'
    )
  body = document['2_contents']
  surplus = sorted(set(document) - {'1_sha256', '2_contents'})
  if isinstance(body, dict):
    version = body.get('format_version')
  else:
    version = None
  if (
    untrusted.is_count(version) and version != FORMAT_VERSION
  ):  # before fields that are unknown in this version
    problem = (
      f'`format_version` must be {FORMAT_VERSION}, got {version}; it was written with '
      f'{untrusted.shorten(body.get("versions"))}'
    )
  else:
    if surplus:
      problem = f'`{surplus[0]}` is unknown'
    else:
      problem = _problem(body)
  if problem is not None:
    raise errors.CheckpointError(
      f'The checkpoint {os.fspath(checkpoint_dir)!r} cannot be read: in {discovery.MANIFEST_FILENAME}, {problem}. '
      'Restore another checkpoint, or use the version of t5x_lite that wrote this one.'
    )
  return Manifest(**body)


# ---- Validation ------------------------------------------------------------------------------------------------------

_MAX_COUNT = 2**32 - 1
_MAX_PROCESSES = 2**20
_SHA256_RE = re.compile('[0-9a-f]{64}')
_DATA_FILE_RE = re.compile(rf'{discovery.DATASET_DIRNAME}/process_(\d{{1,7}})-of-(\d{{1,7}})/.+')
# Orbax, which wrote earlier checkpoints, stores smaller arrays in its index, which it compresses.
_MAX_INLINE_BYTES = 1024

# Returns why a value is invalid, as the end of a sentence, or None.
_Expectation = Callable[[Any], str | None]


def _must(text: str, holds: Callable[[Any], bool]) -> _Expectation:
  def problem(value: Any) -> str | None:
    if holds(value):
      return None
    return f'must {text}, got {untrusted.shorten(value)}'

  return problem


def _must_be(*kinds: type | None) -> _Expectation:
  """Expect an instance of one of several types; None among them accepts None."""
  names = ' or '.join(kind.__name__ for kind in kinds if kind)
  accepted = tuple(kind or type(None) for kind in kinds)
  return _must(f'be of type {names}', lambda value: isinstance(value, accepted))


def _must_have_only(first: str, second: str) -> _Expectation:
  return _must(
    f'have only the fields {first!r} and {second!r}',
    lambda value: isinstance(value, dict) and set(value) == {first, second},
  )


def _must_count(at_most: int | None, text: str = 'from 0 up') -> _Expectation:
  return _must(f'be an integer {text}', lambda value: untrusted.is_count(value, at_most))


def _is_small_count(value: Any) -> bool:
  return untrusted.is_count(value, _MAX_COUNT)


def _are_small_counts(value: Any) -> bool:
  return isinstance(value, list) and all(map(_is_small_count, value))


def _holds_lists(value: Any) -> bool:
  return isinstance(value, dict) and all(isinstance(each, list) for each in value.values())


def _is_dtype(value: Any) -> bool:
  return untrusted.parse_dtype(value) is not None


def _is_sha256(value: Any) -> bool:
  return isinstance(value, str) and _SHA256_RE.fullmatch(value) is not None


def _is_base(value: Any) -> bool:
  return isinstance(value, dict) and {'path', 'format', 'sha256', 'index_sha256'} <= set(value)


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


_OBJECT = _must('be an object', lambda value: isinstance(value, dict))
_SMALL_COUNT = _must('be of type integer >= 0', _is_small_count)
# Field -> expectation, in the order in which they are checked. `[]` is each entry of an object, which an earlier row
# has found to be one. Fields below `metadata` may be absent, and callers may record further ones of any type.
_FIELDS: Mapping[str, _Expectation] = {
  'files': _OBJECT,
  'arrays': _OBJECT,
  'metadata': _OBJECT,
  'metrics': _OBJECT,
  'versions': _OBJECT,
  'step': _must_count(untrusted.MAX_STEP, f'from 0 to {untrusted.MAX_STEP}'),
  'num_data_processes': _must_count(_MAX_PROCESSES, f'from 0 to {_MAX_PROCESSES}'),
  'format_version': _must_count(None),
  'files[]': _must_have_only('sha256', 'bytes'),
  'files[].sha256': _must('be 64 hexadecimal digits', _is_sha256),
  'files[].bytes': _must_count(2**63 - 1),
  'arrays[]': _must_have_only('shape', 'dtype'),
  'arrays[].shape': untrusted.shape_problem,
  'arrays[].dtype': _must('be the name of a dtype of numbers', _is_dtype),
  'metadata.param_layout': _must_be(str, None),
  'metadata.network': _must_be(dict, None),
  'metadata.network.config': _must_be(str),
  'metadata.network.logits_via_embedding': _must_be(bool),
  'metadata.network.scale_tied_logits': _must_be(bool),
  'metadata.network.layer_norm_epsilon': _must('be a number', _is_number),
  'metadata.network.pad_token_id': _SMALL_COUNT,
  'metadata.network.decoder_start_token_id': _SMALL_COUNT,
  'metadata.network.eos_token_ids': _must('be a list of integers >= 0', _are_small_counts),
  'metadata.network.num_heads': _SMALL_COUNT,
  'metadata.network.custom_blocks': _must_be(list),
  'metadata.optimizer': _must_be(dict, None),
  'metadata.optimizer.name': _must_be(str),
  'metadata.optimizer.evaluates_other_params': _must_be(bool),
  'metadata.run': _must_be(dict, None),
  'metadata.run.start_step': _SMALL_COUNT,
  'metadata.run.random_seed': _SMALL_COUNT,
  'metadata.run.batch_number': _SMALL_COUNT,
  'metadata.run.bad_steps_in_a_row': _SMALL_COUNT,
  'metadata.run.num_roll_backs': _SMALL_COUNT,
  'metadata.run.left_out_batches': _must('be a list of integers >= 0', _are_small_counts),
  'metadata.run.evaluation_due': _must_be(bool, list),
  'metadata.run.actions': _must('hold lists by name', _holds_lists),
  'metadata.run.data': _must_be(dict),
  'metadata.run.means_version': _SMALL_COUNT,
  'metadata.base': _must('have path, format, sha256 and index_sha256', _is_base),
  'metadata.base.path': _must('be a path', lambda value: isinstance(value, str) and bool(value)),
  'metadata.base.sha256': _must('be 64 hexadecimal digits', _is_sha256),
  'metadata.base.index_sha256': _must('be 64 hexadecimal digits', _is_sha256),
  'metadata.converted': _must_be(dict, None),
  'metadata.converted.family': _must_be(str),
  'metadata.surgery': _must_be(list, None),
  'metrics[]': _must('be a number', _is_number),
  'versions[]': _must('be a string', lambda value: isinstance(value, str)),
}


def _problem(body: Any) -> str | None:
  """Return the first problem of the fields of a manifest; None if it is valid."""
  if not isinstance(body, dict):
    return f'`2_contents` must be an object, got {untrusted.shorten(body)}'
  fields = {field.name: field for field in dataclasses.fields(Manifest)}
  for name in sorted(set(body) - set(fields)):
    return f'`{name}` is unknown'
  for name, field in fields.items():
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if name not in body and (required or name == 'format_version'):
      return f'`{name}` is missing'
  for field, expectation in _FIELDS.items():
    for place, value in _values(body, field):
      problem = expectation(value)
      if problem is not None:
        return f'{place} {problem}'
  return _problem_of_file_names(
    body['files'], body.get('num_data_processes', 0)
  ) or _problem_of_arrays(body['arrays'], body['files'])


def _values(body: Mapping[str, Any], field: str) -> Iterator[tuple[str, Any]]:
  """Yield (place, value) of each value of a field of the table; nothing if it is absent."""
  path, each, name = field.partition('[]')
  value: Any = body
  for part in path.split('.'):
    if value is None or part not in value:
      return
    value = value[part]
  if not each:
    yield f'`{path}`', value
    return
  for key, entry in value.items():
    if name:
      entry = entry[name.removeprefix('.')]
    yield f'`{path}[{untrusted.shorten(key)}]`{name}', entry


def _problem_of_file_names(names: Iterable[str], num_data_processes: int) -> str | None:
  for name in names:
    owner = f'`files[{untrusted.shorten(name)}]`'
    problem = untrusted.name_problem(name)
    if problem is not None:
      return f'the name in {owner} {problem}'
    if name.startswith(f'{discovery.DATASET_DIRNAME}/'):
      match = _DATA_FILE_RE.fullmatch(name)
      if (
        match is None or int(match[2]) != num_data_processes or int(match[1]) >= num_data_processes
      ):
        return f'{owner} must belong to one of the {num_data_processes} processes of `num_data_processes`'
  return None


def _problem_of_arrays(arrays: Mapping[str, Any], entries: Mapping[str, Any]) -> str | None:
  num_bytes = 0
  for name, entry in arrays.items():
    parents = itertools.accumulate(name.split('/')[:-1], '{}/{}'.format)
    if not name or any(parent in arrays for parent in parents):
      owner = f'`arrays[{untrusted.shorten(name)}]`'
      return f'the name in {owner} must not be empty or below the name of another array'
    array_bytes = untrusted.num_bytes(entry['shape'], np.dtype(entry['dtype']))
    if array_bytes > _MAX_INLINE_BYTES:
      num_bytes += array_bytes
  # Nothing else is compressed (`array_io`).
  stored = sum(
    entry['bytes']
    for name, entry in entries.items()
    if name.startswith(f'{discovery.STATE_DIRNAME}/')
  )
  if num_bytes > stored:
    largest = max(arrays, key=lambda name: math.prod(arrays[name]['shape']))
    return (
      f'`arrays` must fit into the {stored:,} bytes of the files below {discovery.STATE_DIRNAME}/, got '
      f'{num_bytes:,} bytes; the largest is {largest!r} of shape {untrusted.shorten(arrays[largest]["shape"])}'
    )
  return None


# ---- Verification ----------------------------------------------------------------------------------------------------


def _stats(root: files.Path, names: Sequence[str]) -> dict[str, Any]:
  if files.is_remote(root):
    return dict(
      zip(
        names, files.each(lambda path: path.version(), [root / name for name in names]), strict=True
      )
    )
  stats = {name: os.stat(root / name) for name in names}
  return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


def attempts(root: files.Path) -> Iterator[str]:
  """Yield the folder of the arrays in a checkpoint that was saved in a store, relative to it.

  Raises:
    CheckpointError: see `read`.
  """
  if (root / discovery.STATE_DIRNAME).is_dir() and (found := read(root)) is not None:
    yield from _attempts_of(found)


def _attempts_of(manifest: Manifest) -> Iterator[str]:
  start = f'{discovery.STATE_DIRNAME}/{discovery.ATTEMPT_PREFIX}'
  end = '/_METADATA'
  return (
    name.removesuffix(end)
    for name in manifest.files
    if name.startswith(start) and name.endswith(end)
  )


def verify(checkpoint_dir: str | os.PathLike[str]) -> Manifest | None:
  """Compare every file of a checkpoint with the manifest; with several processes each reads its share of the files.

  Args:
    checkpoint_dir: path of the checkpoint. All processes of a run must call this together.

  Returns:
    The manifest, or None if the checkpoint has no manifest and cannot be verified.

  Raises:
    CheckpointDamagedError: a file is missing, surplus, unreadable, or differs in size or contents; the message names
      the first such files.
    CheckpointError: the format version of the manifest is unknown.
  """
  root = files.path(files.real_path(checkpoint_dir))
  problem = None
  manifest = None
  try:
    manifest = read(root)
    if manifest is not None:
      problem = _find_damage(root, manifest)
  except errors.CheckpointDamagedError as e:
    problem = str(e)
  except OSError as e:
    if files.is_remote(root) and not isinstance(e, FileNotFoundError):
      raise
    # The disk cannot read a bad sector: the checkpoint cannot be restored, as after a bit flip.
    name = e.filename or 'a file of it'
    problem = (
      f'The checkpoint {str(root)!r} is damaged: {name} cannot be read ({e.strerror}). '
      'Restore another checkpoint, or a copy of this one.'
    )
  if multihost.any_process(problem is not None):
    _verified(root).pop(str(root), None)
    if problem is not None:
      raise errors.CheckpointDamagedError(problem)
    raise errors.of_other_process(
      errors.CheckpointDamagedError(
        f'The checkpoint {os.fspath(checkpoint_dir)!r} is damaged: see the message of another process.'
      )
    )
  return manifest


def _verified(root: files.Path) -> dict[str, dict[str, Any]]:
  """Return the verified checkpoints of a folder's run: path -> result of `_stats`.

  Avoids a second reading when a caller first selects the newest intact checkpoint and then restores it.
  """
  return open_folders.folder_of(str(root)).verified


def damage(root: files.Path) -> str | None:
  """Return in what a checkpoint differs from its manifest, found by this process alone; None if in nothing.

  Raises:
    CheckpointError: it has no valid manifest.
  """
  found = read(root)
  if found is None:
    raise errors.CheckpointError(
      f'The checkpoint {str(root)!r} has no {discovery.MANIFEST_FILENAME}.'
    )
  return _find_damage(root, found, is_shared=False)


def _find_damage(root: files.Path, manifest: Manifest, *, is_shared: bool = True) -> str | None:
  link = untrusted.tree_problem(root, discovery.STATE_DIRNAME) or next(
    filter(None, (untrusted.file_problem(root, name) for name in manifest.files)), None
  )
  if link is not None:  # checked before any file is opened
    return f'The checkpoint {str(root)!r} is damaged: {link}. Restore another checkpoint, or a copy of this one.'
  problems = []
  # Orbax reads all files in the folder of the state; further files elsewhere, such as a pin, or those of another
  # attempt, are harmless.
  folder = next(_attempts_of(manifest), discovery.STATE_DIRNAME)
  others = f'{discovery.STATE_DIRNAME}/{discovery.ATTEMPT_PREFIX}'
  present = {
    name
    for name in (f'{folder}/{name}' for name in list_files(root / folder))
    if folder.startswith(others) or not name.startswith(others)
  }
  for name in sorted(present - set(manifest.files)):
    problems.append(f'{name} is not in the manifest')
  are_there = files.each(lambda path: path.is_file(), [root / name for name in manifest.files])
  missing = sorted(
    name for name, is_there in zip(manifest.files, are_there, strict=True) if not is_there
  )
  problems += [f'{name} is missing' for name in missing]
  if not problems:
    names = [discovery.MANIFEST_FILENAME, *manifest.files]
    before = _stats(root, names)
    if _verified(root).get(str(root)) == before:
      return None
    if is_shared:
      share = sorted(manifest.files)[jax.process_index() :: jax.process_count()]
    else:
      share = sorted(manifest.files)
    for name, found in hash_files(root, share).items():
      if found != manifest.files[name]:
        size = found['bytes']
        wanted_size = manifest.files[name]['bytes']
        problems.append(
          f'{name} has '
          + (
            f'{size} bytes instead of {wanted_size}' if size != wanted_size else 'changed contents'
          )
        )
    if not problems:
      _verified(root)[str(root)] = before
      return None
  shown = '; '.join(map(printable, problems[:3]))
  if len(problems) > 3:
    shown += f'; and {len(problems) - 3} more'
  return f'The checkpoint {str(root)!r} is damaged: {shown}. Restore another checkpoint, or a copy of this one.'


def describe_arrays(flat_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Return {'shape', 'dtype'} for each array of a flat state."""
  return {
    name: {'shape': list(leaf.shape), 'dtype': np.dtype(leaf.dtype).name}
    for name, leaf in flat_state.items()
  }
