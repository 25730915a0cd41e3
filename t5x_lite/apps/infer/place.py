"""Where results lie on the disk, and what is written there about them.

For a result `answers.jsonl` in two shards:

    answers.jsonl-00000-of-00002            the results of shard 0, once it has all
    answers.jsonl-00001-of-00002
    answers.jsonl                           both, in the order of the source, once both are there
    answers.jsonl.run/merged.json           what was written into it
    answers.jsonl.run/shard-00000-of-00002/
      run.json                              what the results are made from, and later what became of them
      chunk-0000000000.jsonl, .json         results of some batches from that number on, and their size and hash

A chunk counts when its `.json` is there and right; chunks that follow each other without a gap are what a run that goes
on has. A batch belongs to one chunk, and to one shard: batch b of the source to shard b % num_shards. So nothing is
doubled or dropped, whenever the process ends.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from t5x_lite import files

# In a shard's folder, and in the run's.
RUN_FILE, MERGED_FILE = 'run.json', 'merged.json'
# What is counted in each chunk and each result.
TOTALS = ('num_examples', 'num_cut')
# Ends of the names of settings that tell people nothing.
_HASHES = ('.content', '.first_example')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where results go.

  Attributes:
    folder: the folder of results.
    name: the name of the result over all shards.
    shard_id: this worker's shard.
    num_shards: how many workers share the source.
    is_whole: whether the only shard's file has the name of the whole; otherwise T5X's `<name>-00000-of-00001`.
  """

  folder: pathlib.Path
  name: str
  shard_id: int = 0
  num_shards: int = 1
  is_whole: bool = False

  @property
  def whole(self) -> pathlib.Path:
    """The file with the results of all shards."""
    return self.folder / self.name

  @property
  def result(self) -> pathlib.Path:
    """The file with the results of this shard."""
    if self.is_whole and self.num_shards == 1:
      return self.whole
    return self.folder / f'{self.name}-{self.shard_id:05}-of-{self.num_shards:05}'

  @property
  def run_folder(self) -> pathlib.Path:
    """What all shards keep of the run."""
    return self.folder / f'{self.name}.run'

  @property
  def shard_folder(self) -> pathlib.Path:
    """What this shard keeps of the run."""
    return self.run_folder / f'shard-{self.shard_id:05}-of-{self.num_shards:05}'

  def of_shard(self, shard_id: int) -> 'Place':
    """Returns the place of another shard of the same run."""
    return dataclasses.replace(self, shard_id=shard_id)

  def of_run(self, shard_folder: pathlib.Path) -> 'Place':
    """Returns the place of the shard, of this or another number of them, that a folder in `run_folder` belongs to."""
    shard_id, num_shards = shard_folder.name.removeprefix('shard-').split('-of-')
    return dataclasses.replace(self, shard_id=int(shard_id), num_shards=int(num_shards))


def read_json(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns the object in a file, None if there is none."""
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return None
  return found if isinstance(found, dict) else None


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
  """Writes an object into a file, whole or not at all."""
  files.write(path, json.dumps(value, indent=1))


def describe(path: pathlib.Path) -> dict[str, int | str]:
  """Returns the size, the hash and the number of lines of a file."""
  digest, size, lines = hashlib.sha256(), 0, 0
  with open(path, 'rb') as stream:
    while block := stream.read(1 << 20):
      digest.update(block)
      size += len(block)
      lines += block.count(b'\n')
  return {'size': size, 'sha256': digest.hexdigest(), 'lines': lines}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Returns what differs, for people: hashes are left out where something else says it, paths come last."""
  found = _leaves_that_differ(saved, now)
  told = {key: pair for key, pair in found.items() if not key.endswith(_HASHES)} or found
  if 'checkpoint.step' in told and len({os.path.dirname(str(path)) for path in told.get('checkpoint.path', ())}) == 1:
    del told['checkpoint.path']
  return [f'{key}: then {_shown(before)}, now {_shown(after)}'
          for key, (before, after) in sorted(told.items(), key=lambda item: item[0].endswith('path'))]


def _leaves_that_differ(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = '') -> dict[str, tuple]:
  found = {}
  for key in sorted({*saved, *now}):
    before, after = saved.get(key), now.get(key)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
      found |= _leaves_that_differ(before, after, f'{prefix}{key}.')
    elif before != after:
      found[f'{prefix}{key}'] = before, after
  return found


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else f'{text[:40]}...{text[-37:]}'
