"""The results of one shard: written in chunks, each whole or not at all, and made one file once all are there.

What lies where, and when it counts, is told in `place`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import pathlib
import shutil
from typing import Any

from t5x_lite import files
from t5x_lite.apps.infer import place as place_lib
from t5x_lite.errors import ConfigError, DataError

_VERSION = 1


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

  def __init__(self, place: place_lib.Place, identity: Mapping[str, Any], batch_size: int):
    """Looks at what is there; changes nothing.

    Args:
      place: where results go; the shard's folder is locked by the caller.
      identity: everything that decides what the results are, fit for JSON; equal for all shards.
      batch_size: examples in a batch.

    Raises:
      ConfigError: the place holds something else: results of other settings, or a file that is not ours.
    """
    self.place = place
    self._identity = json.loads(json.dumps({'version': _VERSION, 'batch_size': batch_size, **identity}))
    self._batch_size = batch_size
    run = place_lib.read_json(place.shard_folder / place_lib.RUN_FILE)
    self._run: dict[str, Any] = run if run is not None and 'identity' in run else {}
    self._check_identities()
    self._check_files()
    self._chunks = self._find_chunks() if self._run and not self.is_complete else []

  def _check_identities(self) -> None:
    """Refuses settings that differ from those of what is there, of this shard or of the others."""
    # Those of another number of shards too: they may have been merged into the file that this run would merge into.
    runs = sorted(self.place.run_folder.glob(f'shard-?????-of-?????/{place_lib.RUN_FILE}'))
    for place in sorted([self.place.of_run(path.parent) for path in runs], key=lambda place: place != self.place):
      run = place_lib.read_json(place.shard_folder / place_lib.RUN_FILE) or {}
      differences = place_lib.differences(run.get('identity', self._identity), self._identity)
      if differences:
        raise ConfigError(
            f'{place.result} {"was" if run.get("result") else "is being"} made with other settings '
            f'({"; ".join(differences)}). Run with the former ones, or write to another place (INFER_OUTPUT_DIR or '
            f'--output); to start over, delete {place.run_folder} and the results.')

  def _check_files(self) -> None:
    """Refuses to replace a file that is not known to be a result of this run."""
    known = [(self.place.result, self._run.get('result'))]
    if self.place.num_shards > 1:
      merged = place_lib.read_json(self.place.run_folder / place_lib.MERGED_FILE) or {}
      known.append((self.place.whole, merged.get('file')))
    for path, written in known:
      if path.exists() and (written is None or path.is_dir() or path.stat().st_size != written['size']):
        raise ConfigError(f'{path} exists, and is not what this command has written there. Move it, or write to '
                          'another place (INFER_OUTPUT_DIR or --output).')

  def _find_chunks(self) -> list[Chunk]:
    chunks: list[Chunk] = []
    next_batch = 0
    while True:
      found = place_lib.read_json(self._chunk_path(next_batch, '.json'))
      try:
        chunk = Chunk(**found) if found else None
      except TypeError:
        chunk = None
      path = self._chunk_path(next_batch)
      if (chunk is None or chunk.first != next_batch or chunk.num_batches < 1 or not path.exists()
          or place_lib.describe(path) != chunk.file):
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
      return {name: self._run['result'][name] for name in place_lib.TOTALS}
    return {name: sum(getattr(chunk, name) for chunk in self._chunks) for name in place_lib.TOTALS}

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
             and (path.name.startswith(('chunk-', 'merged')) or files.WRITING_INFIX in path.name)]
    # The description first: without it, results are nothing.
    for path in sorted(paths, key=lambda path: (path.suffix != '.json', path.name)):
      files.remove(path)

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
    files.write(path, write_fn)
    chunk = Chunk(first=first, num_batches=num_batches, num_examples=num_examples, num_cut=num_cut,
                  file=place_lib.describe(path))
    place_lib.write_json(self._chunk_path(first, '.json'), dataclasses.asdict(chunk))
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
    place_lib.write_json(self.place.shard_folder / place_lib.RUN_FILE, self._run)

  def finish(self) -> None:
    """Makes one file of all chunks.

    Raises:
      ConfigError: meanwhile, somebody else has put a file there.
    """
    merged = self.place.shard_folder / 'merged'

    def concatenate(path):
      with open(path, 'wb') as stream:
        for chunk in self.chunk_paths:
          with open(chunk, 'rb') as source:
            shutil.copyfileobj(source, stream)

    files.write(merged, concatenate)
    written = place_lib.describe(merged)
    result = self.place.result
    if result.exists() and (result.is_dir() or place_lib.describe(result) != written):
      raise ConfigError(f'{result} has been put there by somebody else while this command ran. Move it, and run the '
                        'same command again.')
    # Before the file has its name, so that it is never taken for somebody else's.
    self._write_run(num_source_examples=self._run['num_source_examples'], result={**written, **self.totals})
    files.rename(merged, result)
    self._remove_chunks()
    self._chunks = []


def num_shard_examples(num_examples: int, batch_size: int, shard_id: int, num_shards: int) -> int:
  """Returns how many of a source's examples are in the batches of one shard.

  >>> [num_shard_examples(10, 3, shard, 2) for shard in range(2)]
  [6, 4]
  """
  num_batches = -(-num_examples // batch_size)
  own = len(range(shard_id, num_batches, num_shards))
  has_last = num_batches > 0 and (num_batches - 1) % num_shards == shard_id
  return own * batch_size - (num_batches * batch_size - num_examples if has_last else 0)
