"""What lies on the disk while inference runs, and how it becomes one file: written in pieces, whole or not at all.

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

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pathlib
from typing import Any

from t5x_lite.errors import ConfigError, DataError
from t5x_lite.inference import disk as disk_lib

_VERSION = 1
_RUN_FILE, _MERGED_FILE, _MERGE_LOCK = 'run.json', 'merged.json', 'merge.lock'
_TOTALS = ('num_examples', 'num_cut')
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """Results of some batches of a shard.

  Attributes:
    first: number of the first batch within the shard.
    num_batches: how many.
    num_examples: examples in them.
    num_cut: of these, how many were too long and cut.
    file: size, hash and number of lines of the file.
  """

  first: int
  num_batches: int
  num_examples: int
  num_cut: int
  file: Mapping[str, Any]


class ShardStore:
  """The files of one shard. Only the lead process of a worker has one."""

  def __init__(self, place: Place, identity: Mapping[str, Any], batch_size: int, disk: disk_lib.Disk | None = None):
    """Looks at what is there; changes nothing.

    Args:
      place: where results go; the shard's folder is locked by the caller.
      identity: everything that decides what the results are, fit for JSON; equal for all shards.
      batch_size: examples in a batch.
      disk: writes files.

    Raises:
      ConfigError: the place holds something else: results of other settings, or a file that is not ours.
    """
    self.place = place
    self._identity = json.loads(json.dumps({'version': _VERSION, 'batch_size': batch_size, **identity}))
    self._batch_size = batch_size
    self._disk = disk or disk_lib.Disk()
    run = _read_json(place.shard_folder / _RUN_FILE)
    self._run: dict[str, Any] = run if run is not None and 'identity' in run else {}
    self._check_identities()
    self._check_files()
    self._chunks = self._find_chunks() if self._run and not self.is_complete else []

  def _check_identities(self) -> None:
    """Refuses settings that differ from those of what is there, of this shard or of the others."""
    # Those of another number of shards too: they may have been merged into the file that this run would merge into.
    runs = sorted(self.place.run_folder.glob(f'shard-?????-of-?????/{_RUN_FILE}'))
    for place in sorted([self.place.of_run(path.parent) for path in runs], key=lambda place: place != self.place):
      run = _read_json(place.shard_folder / _RUN_FILE) or {}
      differences = _differences(run.get('identity', self._identity), self._identity)
      if differences:
        raise ConfigError(
            f'{place.result} {"was" if run.get("result") else "is being"} made with other settings '
            f'({"; ".join(differences)}). Run with the former ones, or write to another place (INFER_OUTPUT_DIR or '
            f'--output); to start over, delete {place.run_folder} and the results.')

  def _check_files(self) -> None:
    """Refuses to replace a file that is not known to be a result of this run."""
    known = [(self.place.result, self._run.get('result'))]
    if self.place.num_shards > 1:
      known.append((self.place.whole, (_read_json(self.place.run_folder / _MERGED_FILE) or {}).get('file')))
    for path, written in known:
      if path.exists() and (written is None or path.is_dir() or path.stat().st_size != written['size']):
        raise ConfigError(f'{path} exists, and is not what this command has written there. Move it, or write to '
                          'another place (INFER_OUTPUT_DIR or --output).')

  def _find_chunks(self) -> list[Chunk]:
    chunks: list[Chunk] = []
    next_batch = 0
    while True:
      found = _read_json(self._chunk_path(next_batch, '.json'))
      try:
        chunk = Chunk(**found) if found else None
      except TypeError:
        chunk = None
      path = self._chunk_path(next_batch)
      if (chunk is None or chunk.first != next_batch or chunk.num_batches < 1 or not path.exists()
          or disk_lib.describe(path) != chunk.file):
        return chunks
      chunks.append(chunk)
      next_batch += chunk.num_batches

  def _chunk_path(self, first: int, suffix: str = '.jsonl') -> pathlib.Path:
    return self.place.shard_folder / f'chunk-{first:010}{suffix}'

  @property
  def is_complete(self) -> bool:
    """Whether the shard's result is there."""
    return 'result' in self._run and self.place.result.exists()

  @property
  def has_all_chunks(self) -> bool:
    """Whether the results of all batches are there, but perhaps not yet in one file."""
    return 'num_source_examples' in self._run and self.totals['num_examples'] == self._num_wanted(
        self._run['num_source_examples'])

  @property
  def chunk_paths(self) -> list[pathlib.Path]:
    """The files that hold the results until they are made one."""
    return [self._chunk_path(chunk.first) for chunk in self._chunks]

  @property
  def next_batch(self) -> int:
    """Number of the first batch, within the shard, whose results are not there."""
    return self._chunks[-1].first + self._chunks[-1].num_batches if self._chunks else 0

  @property
  def totals(self) -> dict[str, int]:
    """Counts over what is there: 'num_examples' and 'num_cut'."""
    if self.is_complete:
      return {name: self._run['result'][name] for name in _TOTALS}
    return {name: sum(getattr(chunk, name) for chunk in self._chunks) for name in _TOTALS}

  def begin(self) -> None:
    """Records what the results are made from, and removes what a run that died left unfinished.

    Raises:
      ConfigError: meanwhile, another shard has begun with other settings.
    """
    self._check_identities()
    if self.is_complete:
      self._remove_chunks()
      return
    if not self._run or ('result' in self._run and not self._chunks):
      # 'result' without its file and without chunks: somebody has moved it away, and wants another.
      self._write_run()
    kept = {self._chunk_path(chunk.first, suffix).name for chunk in self._chunks for suffix in ('.json', '.jsonl')}
    self._remove_chunks(kept)

  def _remove_chunks(self, kept: set[str] = frozenset()) -> None:
    paths = [path for path in self.place.shard_folder.glob('*') if path.name not in kept
             and (path.name.startswith(('chunk-', 'merged')) or path.suffix == '.tmp')]
    # The description first: without it, results are nothing.
    for path in sorted(paths, key=lambda path: (path.suffix != '.json', path.name)):
      self._disk.remove(path)

  def write_chunk(self, first: int, num_batches: int, num_examples: int, num_cut: int,
                  write_fn: Callable[[pathlib.Path], None]) -> None:
    """Writes the results of the next batches.

    Args:
      first: number, within the shard, of the first of them.
      num_batches: how many.
      num_examples: examples in them.
      num_cut: of these, how many were cut.
      write_fn: writes a file at the path that it is given.

    Raises:
      RuntimeError: `first` is not `next_batch`, since the chunk before it could not be written.
    """
    if first != self.next_batch:
      raise RuntimeError(f'Got results from batch {first} on; expected those from {self.next_batch} on.')
    path = self._chunk_path(first)
    self._disk.write(path, write_fn)
    chunk = Chunk(first=first, num_batches=num_batches, num_examples=num_examples, num_cut=num_cut,
                  file=disk_lib.describe(path))
    self._write_json(self._chunk_path(first, '.json'), dataclasses.asdict(chunk))
    self._chunks.append(chunk)

  def end_chunks(self, num_source_examples: int) -> None:
    """Records that all chunks are there.

    Args:
      num_source_examples: the number of examples over all shards.

    Raises:
      DataError: the chunks have other examples than the source: it is not what it was when the run began.
    """
    found, wanted = self.totals['num_examples'], self._num_wanted(num_source_examples)
    if found != wanted:
      raise DataError(f'{found} examples were worked on, but the source has {wanted} for this shard now: it is not '
                      f'what it was when the run began. Delete {self.place.shard_folder} and start over.')
    self._write_run(num_source_examples=num_source_examples)

  def _num_wanted(self, num_source_examples: int) -> int:
    return num_shard_examples(num_source_examples, self._batch_size, self.place.shard_id, self.place.num_shards)

  def _write_run(self, **facts: Any) -> None:
    self._run = {'identity': self._identity, **facts}
    self._write_json(self.place.shard_folder / _RUN_FILE, self._run)

  def finish(self) -> None:
    """Makes one file of all chunks.

    Raises:
      ConfigError: meanwhile, somebody else has put a file there.
    """
    merged = self.place.shard_folder / 'merged'

    def concatenate(path):
      with open(path, 'wb') as stream:
        disk_lib.copy(self.chunk_paths, stream)

    self._disk.write(merged, concatenate)
    written = disk_lib.describe(merged)
    result = self.place.result
    if result.exists() and (result.is_dir() or disk_lib.describe(result) != written):
      raise ConfigError(f'{result} has been put there by somebody else while this command ran. Move it, and run the '
                        'same command again.')
    # Before the file has its name, so that it is never taken for somebody else's.
    self._write_run(num_source_examples=self._run['num_source_examples'], result={**written, **self.totals})
    self._disk.rename(merged, result)
    self._remove_chunks()
    self._chunks = []

  def merge_shards(self) -> list[int]:
    """Makes one file of the results of all shards, if all are there; the last worker to end does it.

    Returns:
      The shards whose results are missing; with any, nothing is done.

    Raises:
      ConfigError: the results cannot be put in order by their lines, or the file is somebody else's.
      DataError: a shard's file is not what was written, or the shards saw different sources.
    """
    with _lock(self.place.run_folder / _MERGE_LOCK):  # of two workers that end together, one merges
      places = [self.place.of_shard(i) for i in range(self.place.num_shards)]
      runs = [_read_json(place.shard_folder / _RUN_FILE) or {} for place in places]
      missing = [place.shard_id for place, run in zip(places, runs)
                 if 'result' not in run or not place.result.exists()]
      if not missing and not (self.place.whole.exists() and _read_json(self.place.run_folder / _MERGED_FILE)):
        _check_mergeable(places, runs)
        self._merge([place.result for place in places], runs[0]['num_source_examples'])
      return missing

  @property
  def merged_totals(self) -> dict[str, int]:
    """Counts over all shards, once `merge_shards` has made one file of them."""
    results = [_read_json(self.place.of_shard(i).shard_folder / _RUN_FILE)['result']
               for i in range(self.place.num_shards)]
    return {name: sum(result[name] for result in results) for name in _TOTALS}

  def _merge(self, sources: list[pathlib.Path], num_source_examples: int) -> None:
    merged = self.place.run_folder / 'merged'
    self._disk.write(merged, lambda path: _interleave(sources, path, self._batch_size, num_source_examples))
    written = disk_lib.describe(merged)
    if self.place.whole.exists() and disk_lib.describe(self.place.whole) != written:
      raise ConfigError(f'{self.place.whole} has been put there by somebody else. Move it, and run the same command '
                        'again.')
    self._write_json(self.place.run_folder / _MERGED_FILE, {'file': written})
    self._disk.rename(merged, self.place.whole)

  def _write_json(self, path: pathlib.Path, value: Mapping[str, Any]) -> None:
    self._disk.write(path, lambda temporary: temporary.write_text(json.dumps(value, indent=1), encoding='utf-8'))


def num_shard_examples(num_examples: int, batch_size: int, shard_id: int, num_shards: int) -> int:
  """Returns how many of a source's examples are in the batches of one shard.

  >>> [num_shard_examples(10, 3, shard, 2) for shard in range(2)]
  [6, 4]
  """
  num_batches = -(-num_examples // batch_size)
  own = len(range(shard_id, num_batches, num_shards))
  has_last = num_batches > 0 and (num_batches - 1) % num_shards == shard_id
  return own * batch_size - (num_batches * batch_size - num_examples if has_last else 0)


def _check_mergeable(places: list[Place], runs: list[Mapping[str, Any]]) -> None:
  """Refuses files of shards that are not what was written, or that are of different sources."""
  total = runs[0]['num_source_examples']
  for place, run in zip(places, runs):
    result = run['result']
    if differences := _differences(runs[0]['identity'], run['identity']):
      raise ConfigError(f'{place.result} was made with other settings than {places[0].result} '
                        f'({"; ".join(differences)}). Delete one of them, and run its shard again.')
    if run['num_source_examples'] != total:
      raise DataError(f'{place.result} was made from a source of {run["num_source_examples"]} examples, '
                      f'{places[0].result} from one of {total}. Start over with one source.')
    if disk_lib.describe(place.result) != {name: result[name] for name in ('size', 'sha256', 'lines')}:
      raise DataError(f'{place.result} is not what was written there. Delete it, and run its shard again.')
    if result['lines'] != result['num_examples']:
      raise ConfigError(f'{place.result} has {result["lines"]} lines for {result["num_examples"]} examples, so the '
                        'shards cannot be put in order: the write_fn does not write one line for each. The shards '
                        'themselves are complete.')


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
  """Waits until no other process is in such a context; the kernel ends it with the process."""
  with open(path, 'wb') as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    yield


def _interleave(sources: list[pathlib.Path], target: pathlib.Path, batch_size: int, num_examples: int) -> None:
  """Writes the lines of shards in the order of the source."""
  streams = [open(source, 'rb') for source in sources]
  try:
    with open(target, 'wb') as stream:
      for batch in range(-(-num_examples // batch_size)):
        size = min(batch_size, num_examples - batch * batch_size)
        stream.writelines(itertools.islice(streams[batch % len(streams)], size))
  finally:
    for opened in streams:
      opened.close()


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
  """Returns the object in a file, None if there is none."""
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return None
  return found if isinstance(found, dict) else None


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
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

