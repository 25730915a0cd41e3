"""Paths of the files of batch inference.

For a result `answers.jsonl` in two shards:

    answers.jsonl-00000-of-00002            results of shard 0, when complete
    answers.jsonl-00001-of-00002
    answers.jsonl                           results of both shards in the order of the source, when both are complete
    answers.jsonl.run/merged.json           size and hash of answers.jsonl
    answers.jsonl.run/shard-00000-of-00002/
      run.json                              settings of the results, and later size and hash of the shard's file
      chunk-0000000000.jsonl, .json         results of some batches from this batch number on, and their size and hash

A chunk counts if its `.json` exists and matches; a run resumes after the chunks that follow each other without a gap.
Each batch belongs to one chunk and one shard (batch b of the source to shard b % num_shards), so that no result is lost
or duplicated by an interruption.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from t5x_lite.errors import ConfigError
from t5x_lite.storage import files

# Files in a shard's folder and in the run's folder.
RUN_FILE = 'run.json'
MERGED_FILE = 'merged.json'
# Counts of each chunk and each result.
TOTALS = ('num_examples', 'num_cut', 'num_unended')
# Suffixes of settings whose values are hashes, which are not readable.
_HASHES = ('.content', '.first_example')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResultPaths:
  """Paths of the results of a shard and of all shards.

  Attributes:
    folder: folder of results.
    name: file name of the merged result.
    shard_id: index of this worker's shard.
    num_shards: number of shards.
    has_plain_name: whether the file of a single shard is called `name`; otherwise, as in T5X,
      `<name>-00000-of-00001`.
  """

  folder: files.Path
  name: str
  shard_id: int = 0
  num_shards: int = 1
  has_plain_name: bool = False

  @property
  def merged(self) -> files.Path:
    """File with the results of all shards."""
    return self.folder / self.name

  @property
  def result(self) -> files.Path:
    """File with the results of this shard."""
    if self.has_plain_name and self.num_shards == 1:
      return self.merged
    return self.folder / f'{self.name}-{self.shard_id:05}-of-{self.num_shards:05}'

  @property
  def run_folder(self) -> files.Path:
    """Folder for the state of the run, of all shards."""
    return self.folder / f'{self.name}.run'

  @property
  def shard_folder(self) -> files.Path:
    """Folder for the state of this shard."""
    return self.run_folder / f'shard-{self.shard_id:05}-of-{self.num_shards:05}'

  def of_shard(self, shard_id: int) -> 'ResultPaths':
    """Return the paths of another shard of the same run."""
    return dataclasses.replace(self, shard_id=shard_id)

  def of_run(self, shard_folder: files.Path) -> 'ResultPaths':
    """Return the paths of the shard of a folder in `run_folder`; the number of shards may differ."""
    shard_id, num_shards = shard_folder.name.removeprefix('shard-').split('-of-')
    return dataclasses.replace(self, shard_id=int(shard_id), num_shards=int(num_shards))


def read_json(path: files.Path) -> dict[str, Any] | None:
  """Return the JSON object in a file; None if it is missing or invalid.

  Raises:
    OSError: the file is in a store that does not answer.
  """
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except ValueError:
    return None
  except OSError as error:
    if files.is_remote(path) and not isinstance(error, FileNotFoundError):
      raise
    return None
  if isinstance(found, dict):
    return found
  return None


def write_json(path: files.Path, value: Mapping[str, Any]) -> None:
  """Write a JSON object to a file, atomically."""
  files.write(path, json.dumps(value, indent=1))


def totals(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
  """Return the sums of the counts `TOTALS` of results; those of earlier versions have no 'num_unended'."""
  return {name: sum(result.get(name, 0) for result in results) for name in TOTALS}


def write_described(
  path: files.Path, write_fn: Callable[[pathlib.Path], None]
) -> dict[str, int | str]:
  """Write a file with a function that gets a local path, atomically, and return the result of `describe`."""
  described = {}

  def write(local: pathlib.Path) -> None:
    write_fn(local)
    described.update(describe(local))

  files.write(path, write)
  return described


def write_result(
  path: files.Path,
  state_folder: files.Path,
  write_fn: Callable[[pathlib.Path], None],
  record_fn: Callable[[Mapping[str, Any]], None],
) -> None:
  """Write a result file, atomically.

  Args:
    path: path of the result.
    state_folder: folder for the unfinished file on a disk.
    write_fn: writes the result at a local path.
    record_fn: called with the result of `describe` before the result appears, so that it is always recognized as ours.

  Raises:
    ConfigError: another program has written a file of that name in the meantime.
  """

  def record(local: pathlib.Path) -> None:
    written = describe(local)
    check_replaceable(path, written)
    record_fn(written)

  def write_and_record(local: pathlib.Path) -> None:
    write_fn(local)
    record(local)

  merged = state_folder / 'merged'
  if not isinstance(path, pathlib.Path) or not isinstance(merged, pathlib.Path):
    # A store cannot rename, but an object appears as a whole.
    files.write(path, write_and_record)
    return
  files.write(merged, write_fn)
  record(merged)
  files.rename(merged, path)


def describe(path: files.Path) -> dict[str, int | str]:
  """Return size, hash and number of lines of a file."""
  digest = hashlib.sha256()
  size = 0
  lines = 0
  with path.open('rb') as stream:
    while block := stream.read(1 << 20):
      digest.update(block)
      size += len(block)
      lines += block.count(b'\n')
  return {'size': size, 'sha256': digest.hexdigest(), 'lines': lines}


def check_replaceable(path: files.Path, written: Mapping[str, Any]) -> None:
  """Raise ConfigError if a file exists whose contents differ from those that this command writes.

  Args:
    path: path of a result.
    written: result of `describe` for the file that will replace it.
  """
  if path.exists() and (path.is_dir() or describe(path) != written):
    raise ConfigError(
      f'{path} was written by another program in the meantime. Move it, and rerun the command.'
    )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Return readable differences; hashes are omitted if another setting differs too, and paths come last."""
  found = _leaves_that_differ(saved, now)
  shown = {key: pair for key, pair in found.items() if not key.endswith(_HASHES)} or found
  if (
    'checkpoint.step' in shown
    and len({os.path.dirname(str(path)) for path in shown.get('checkpoint.path', ())}) == 1
  ):
    del shown['checkpoint.path']
  return [
    f'{key}: was {_shown(before)}, now {_shown(after)}'
    for key, (before, after) in sorted(shown.items(), key=lambda item: item[0].endswith('path'))
  ]


def _leaves_that_differ(
  saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ''
) -> dict[str, tuple]:
  found = {}
  for key in sorted({*saved, *now}):
    before = saved.get(key)
    after = now.get(key)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
      found |= _leaves_that_differ(before, after, f'{prefix}{key}.')
    elif before != after:
      found[f'{prefix}{key}'] = before, after
  return found


def _shown(value: Any) -> str:
  text = repr(value)
  if len(text) <= 80:
    return text
  return f'{text[:40]}...{text[-37:]}'
