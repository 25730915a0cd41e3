"""What a checkpoint consists of, with a hash of every file, and the check that its bytes are still those written.

Orbax restores flipped bits without a word, so the manifest is what stands between a bad disk and a bad model. The hash
is SHA-256: OpenSSL computes it with the processor's SHA instructions where there are any (2.0 GB/s on one core here,
against 1.25 for BLAKE2b and 0.6 for MD5), `hashlib` lets go of the interpreter lock meanwhile, and anyone can check a
file with `sha256sum`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from t5x_lite import __version__, errors, files, multihost, untrusted
from t5x_lite.checkpoints import discovery

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """Contents of `manifest.json`.

  Attributes:
    step: the training step of the state.
    files: path relative to the checkpoint -> {'sha256': hex digest, 'bytes': size}.
    arrays: name -> {'shape': list of int, 'dtype': name}, for each stored array.
    metadata: what the caller of `save` recorded, such as the parameter layout.
    metrics: metrics known when the state was saved.
    num_data_processes: number of processes with dataset state, 0 for none.
    versions: versions of the libraries that wrote it.
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
  """Returns the versions of what determines the bytes and the meaning of a checkpoint."""
  names = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore', 'numpy')
  return {'t5x_lite': __version__, 'python': platform.python_version(),
          **{name: importlib.metadata.version(name) for name in names}}


def hash_files(root: pathlib.Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
  """Returns {'sha256', 'bytes'} of each file `names`, relative to `root`, read in parallel."""

  def one(name):
    try:
      with open(root / name, 'rb') as f:
        return {'sha256': hashlib.file_digest(f, 'sha256').hexdigest(), 'bytes': os.fstat(f.fileno()).st_size}
    except OSError as e:
      e.filename = name  # Errors of reading, unlike those of opening, do not know it.
      raise

  names = list(names)
  with concurrent.futures.ThreadPoolExecutor(files.NUM_THREADS, thread_name_prefix='checkpoint-hash') as pool:
    return dict(zip(names, pool.map(one, names), strict=True))


def list_files(root: pathlib.Path) -> list[str]:
  """Returns the files below `root`, relative to it, sorted."""
  return sorted(str(path.relative_to(root)) for path in root.rglob('*') if path.is_file())


def to_text(manifest: Manifest) -> str:
  """Returns the one text that stands for `manifest`; its second line is the hash of what it says."""
  body = dataclasses.asdict(manifest)
  text = json.dumps(body, indent=1, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()
  return json.dumps({'1_sha256': digest, '2_contents': body}, indent=1, sort_keys=True) + '\n'


def write(root: pathlib.Path, manifest: Manifest) -> None:
  """Writes `manifest` below `root`, replacing an older one in one step, and waits for the disk.

  Raises:
    CheckpointError: `read` would reject it.
    OSError: it cannot be written.
  """
  text = to_text(manifest)
  problem = _problem(dataclasses.asdict(manifest))
  if problem is None and len(text) > untrusted.MAX_TEXT_BYTES:
    problem = f'the file must have at most {untrusted.MAX_TEXT_BYTES:,} bytes, got {len(text):,}'
  if problem is not None:
    raise errors.CheckpointError(f'{discovery.MANIFEST_FILENAME} is not written: {problem}.')
  files.write(root / discovery.MANIFEST_FILENAME, text)


def read(checkpoint_dir: str | os.PathLike[str]) -> Manifest | None:
  """Reads a checkpoint's manifest and checks that it is intact and sound; the files that it names are not looked at.

  Args:
    checkpoint_dir: path of the checkpoint.

  Returns:
    The manifest, or None when the checkpoint has none.

  Raises:
    CheckpointDamagedError: the manifest is not what was written, or the disk does not give it back.
    CheckpointError: it is of a format that this version does not know, or has a field that it does not know or with a
      value of another kind.
  """
  try:
    data = untrusted.read_limited(pathlib.Path(checkpoint_dir), discovery.MANIFEST_FILENAME)
  except FileNotFoundError:
    return None
  except OSError as e:
    raise errors.CheckpointDamagedError(
        f'The checkpoint {os.fspath(checkpoint_dir)!r} is damaged: {discovery.MANIFEST_FILENAME} cannot be read '
        f'({e.strerror}). Restore another checkpoint, or a copy of this one.') from e
  try:
    document = json.loads(data)
    # A newer format may have other fields: look at its number first, but believe it only when the text is intact.
    canonical = json.dumps(document, indent=1, sort_keys=True) + '\n'
    body_text = json.dumps(document['2_contents'], indent=1, sort_keys=True)
    intact = (canonical.encode() == data
              and document['1_sha256'] == hashlib.sha256(body_text.encode()).hexdigest())
  except (ValueError, KeyError, TypeError, RecursionError):
    intact = False
  if not intact:
    raise errors.CheckpointDamagedError(
        f'The checkpoint {os.fspath(checkpoint_dir)!r} is damaged: {discovery.MANIFEST_FILENAME} is not what was '
        'written. Restore another checkpoint, or a copy of this one.')
  body = document['2_contents']
  version = body.get('format_version') if isinstance(body, dict) else None
  if untrusted.is_count(version) and version != FORMAT_VERSION:
    raise errors.CheckpointError(
        f'The checkpoint {os.fspath(checkpoint_dir)!r} is of format {version}, and this version of t5x_lite reads '
        f"format {FORMAT_VERSION}. Use the version that wrote it: {body.get('versions')}.")
  surplus = sorted(set(document) - {'1_sha256', '2_contents'})
  problem = f'`{surplus[0]}` is unknown' if surplus else _problem(body)
  if problem is not None:
    raise errors.CheckpointError(
        f'The checkpoint {os.fspath(checkpoint_dir)!r} cannot be read: in {discovery.MANIFEST_FILENAME}, {problem}. '
        'Restore another checkpoint, or use the version of t5x_lite that wrote this one.')
  return Manifest(**body)


# What programs of this package record, and read again; a caller may record further entries of any kind.
_METADATA_KINDS = {'param_layout': str, 'network': dict, 'optimizer': dict, 'run': dict, 'converted': dict,
                   'surgery': list}
_FIELD_KINDS = {
    'network': {'config': str, 'logits_via_embedding': bool, 'scale_tied_logits': bool, 'num_heads': int,
                'custom_blocks': list},
    'optimizer': {'name': str, 'evaluates_other_params': bool},
    'run': {'start_step': int, 'random_seed': int, 'batch_number': int, 'bad_steps_in_a_row': int,
            'num_roll_backs': int, 'left_out_batches': list, 'evaluation_due': (bool, list), 'actions': dict,
            'data': dict},
    'converted': {'family': str},
}
_MAX_COUNT = 2**32 - 1
_MAX_PROCESSES = 2**20
_SHA256_RE = re.compile('[0-9a-f]{64}')
_DATA_FILE_RE = re.compile(rf'{discovery.DATASET_DIRNAME}/process_(\d{{1,7}})-of-(\d{{1,7}})/.+')


def _problem(body: Any) -> str | None:
  """Returns what is wrong with the fields of a manifest, the first of all problems; None for a sound one."""
  if not isinstance(body, dict):
    return f'`2_contents` must be an object, got {untrusted.shorten(body)}'
  fields = {field.name: field for field in dataclasses.fields(Manifest)}
  for name in sorted(set(body) - set(fields)):
    return f'`{name}` is unknown'
  for name, field in fields.items():
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if name not in body and (required or name == 'format_version'):
      return f'`{name}` is missing'
  for name in ('files', 'arrays', 'metadata', 'metrics', 'versions'):
    if not isinstance(body.get(name, {}), dict):
      return f'`{name}` must be an object, got {untrusted.shorten(body[name])}'
  for name, most in (('step', untrusted.MAX_STEP), ('num_data_processes', _MAX_PROCESSES), ('format_version', None)):
    if not untrusted.is_count(body.get(name, 0), most):
      bound = '' if most is None else f' to {most}'
      return f'`{name}` must be a whole number from 0{bound or " up"}, got {untrusted.shorten(body[name])}'
  return _problem_of_files(body['files'], body.get('num_data_processes', 0)) or _problem_of_arrays(
      body['arrays'], body['files']) or _problem_of_metadata(body.get('metadata', {})) or _problem_of_facts(body)


def _problem_of_files(files: Mapping[str, Any], num_data_processes: int) -> str | None:
  for name, entry in files.items():
    owner = f'`files[{untrusted.shorten(name)}]`'
    problem = untrusted.name_problem(name)
    if problem is not None:
      return f'the name in {owner} {problem}'
    if not isinstance(entry, dict) or set(entry) != {'sha256', 'bytes'}:
      return f"{owner} must have the fields 'sha256' and 'bytes' alone, got {untrusted.shorten(entry)}"
    if not isinstance(entry['sha256'], str) or _SHA256_RE.fullmatch(entry['sha256']) is None:
      return f"{owner}.sha256 must be 64 hexadecimal digits, got {untrusted.shorten(entry['sha256'])}"
    if not untrusted.is_count(entry['bytes'], 2**63 - 1):
      return f"{owner}.bytes must be a whole number from 0 up, got {untrusted.shorten(entry['bytes'])}"
    if name.startswith(f'{discovery.DATASET_DIRNAME}/'):
      match = _DATA_FILE_RE.fullmatch(name)
      if match is None or int(match[2]) != num_data_processes or int(match[1]) >= num_data_processes:
        return f'{owner} must belong to one of the {num_data_processes} processes that `num_data_processes` says'
  return None


def _problem_of_arrays(arrays: Mapping[str, Any], files: Mapping[str, Any]) -> str | None:
  num_bytes = 0
  for name, entry in arrays.items():
    owner = f'`arrays[{untrusted.shorten(name)}]`'
    parents = itertools.accumulate(name.split('/')[:-1], '{}/{}'.format)
    if not name or any(parent in arrays for parent in parents):
      return f'the name in {owner} must not be empty, nor below that of another array'
    if not isinstance(entry, dict) or set(entry) != {'shape', 'dtype'}:
      return f"{owner} must have the fields 'shape' and 'dtype' alone, got {untrusted.shorten(entry)}"
    problem = untrusted.shape_problem(entry['shape'])
    if problem is not None:
      return f'{owner}.shape {problem}'
    dtype = untrusted.parse_dtype(entry['dtype'])
    if dtype is None:
      return f"{owner}.dtype must be the name of a dtype of numbers, got {untrusted.shorten(entry['dtype'])}"
    num_bytes += untrusted.num_bytes(entry['shape'], dtype)
  # Nothing is compressed (`state_io.HANDLER_OPTIONS`).
  stored = sum(entry['bytes'] for name, entry in files.items() if name.startswith(f'{discovery.STATE_DIRNAME}/'))
  if num_bytes > stored:
    largest = max(arrays, key=lambda name: math.prod(arrays[name]['shape']))
    return (f'`arrays` must fit into the {stored:,} bytes of the files below {discovery.STATE_DIRNAME}/, got '
            f"{num_bytes:,} bytes; the largest is {largest!r} of shape {untrusted.shorten(arrays[largest]['shape'])}")
  return None


def _problem_of_metadata(metadata: Mapping[str, Any]) -> str | None:
  for name, kind in _METADATA_KINDS.items():
    value = metadata.get(name)
    if value is not None and not isinstance(value, kind):
      return f'`metadata.{name}` must be a {kind.__name__}, got {untrusted.shorten(value)}'
    for field, kinds in _FIELD_KINDS.get(name, {}).items():
      if value is not None and field in value and not _is_of_kind(value[field], kinds):
        words = ' or '.join('whole number from 0' if k is int else k.__name__
                            for k in (kinds if isinstance(kinds, tuple) else (kinds,)))
        return f'`metadata.{name}.{field}` must be a {words}, got {untrusted.shorten(value[field])}'
  run = metadata.get('run') or {}
  if not all(untrusted.is_count(number, _MAX_COUNT) for number in run.get('left_out_batches', ())):
    return ('`metadata.run.left_out_batches` must hold whole numbers from 0, got '
            f"{untrusted.shorten(run['left_out_batches'])}")
  if not all(isinstance(states, list) for states in run.get('actions', {}).values()):
    return f"`metadata.run.actions` must hold lists, got {untrusted.shorten(run['actions'])}"
  return None


def _problem_of_facts(body: Mapping[str, Any]) -> str | None:
  for name, kind in (('metrics', (int, float)), ('versions', str)):
    for key, value in body.get(name, {}).items():
      if not isinstance(value, kind) or isinstance(value, bool):
        expected = 'a string' if kind is str else 'a number'
        return f'`{name}[{untrusted.shorten(key)}]` must be {expected}, got {untrusted.shorten(value)}'
  return None


def _is_of_kind(value: Any, kinds: type | tuple[type, ...]) -> bool:
  return untrusted.is_count(value, _MAX_COUNT) if kinds is int else isinstance(value, kinds)


# Files found sound by this process: path -> what `os.stat` said of each file then. Saves the second reading when a
# caller verifies while it looks for the newest sound checkpoint, and again as it restores that one.
_verified: dict[str, dict[str, tuple[int, int, int]]] = {}


def _stats(root: pathlib.Path, names: Iterable[str]) -> dict[str, tuple[int, int, int]]:
  stats = {name: os.stat(root / name) for name in names}
  return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}


def verify(checkpoint_dir: str | os.PathLike[str]) -> Manifest | None:
  """Reads every file of a checkpoint and compares it with the manifest; in several processes each reads its share.

  Args:
    checkpoint_dir: path of the checkpoint. All processes of a run must call this together.

  Returns:
    The manifest, or None when the checkpoint has none and so cannot be verified.

  Raises:
    CheckpointDamagedError: a file is missing, surplus, of another size or of other contents, or cannot be read; the
      message names the first such files.
    CheckpointError: the manifest is of a format that this version does not know.
  """
  root = pathlib.Path(os.path.realpath(checkpoint_dir))
  problem = None
  manifest = None
  try:
    manifest = read(root)
    if manifest is not None:
      problem = _find_damage(root, manifest)
  except errors.CheckpointDamagedError as e:
    problem = str(e)
  except OSError as e:
    # A bad sector is no bit flip to the program: the disk refuses to read. Whatever it is, nobody can restore this now.
    name = e.filename or 'a file of it'
    problem = (f'The checkpoint {str(root)!r} is damaged: {name} cannot be read ({e.strerror}). '
               'Restore another checkpoint, or a copy of this one.')
  if multihost.any_process(problem is not None):
    _verified.pop(str(root), None)
    raise errors.CheckpointDamagedError(
        problem or f'The checkpoint {os.fspath(checkpoint_dir)!r} is damaged: see the message of another process.')
  return manifest


def _find_damage(root: pathlib.Path, manifest: Manifest) -> str | None:
  link = untrusted.tree_problem(root, discovery.STATE_DIRNAME) or next(
      filter(None, (untrusted.file_problem(root, name) for name in manifest.files)), None)
  if link is not None:  # before a file is opened for its hash
    return f'The checkpoint {str(root)!r} is damaged: {link}. Restore another checkpoint, or a copy of this one.'
  problems = []
  # Orbax reads whatever lies in the state's folder; elsewhere a further file (a pin, a note) does no harm.
  present = {f'{discovery.STATE_DIRNAME}/{name}' for name in list_files(root / discovery.STATE_DIRNAME)}
  for name in sorted(present - set(manifest.files)):
    problems.append(f'{name} was not there when it was written')
  missing = sorted(name for name in manifest.files if not (root / name).is_file())
  problems += [f'{name} is missing' for name in missing]
  if not problems:
    names = [discovery.MANIFEST_FILENAME, *manifest.files]
    before = _stats(root, names)
    if _verified.get(str(root)) == before:
      return None
    share = sorted(manifest.files)[jax.process_index()::jax.process_count()]
    for name, found in hash_files(root, share).items():
      if found != manifest.files[name]:
        size, wanted_size = found['bytes'], manifest.files[name]['bytes']
        problems.append(f'{name} has ' + (
            f'{size} bytes instead of {wanted_size}' if size != wanted_size else 'other contents than were written'))
    if not problems:
      _verified[str(root)] = before
      return None
  shown = '; '.join(problems[:3]) + (f'; and {len(problems) - 3} more' if len(problems) > 3 else '')
  return f'The checkpoint {str(root)!r} is damaged: {shown}. Restore another checkpoint, or a copy of this one.'


def describe_arrays(flat_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns {'shape', 'dtype'} for each array of a flat state."""
  return {name: {'shape': list(leaf.shape), 'dtype': np.dtype(leaf.dtype).name} for name, leaf in flat_state.items()}
