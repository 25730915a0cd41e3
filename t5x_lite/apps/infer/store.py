"""Results of one shard: chunks, written atomically, that are merged into one file when all are complete.

`paths` describes the files.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import json
import pathlib
import shutil
import tempfile
from typing import Any

from t5x_lite import checks
from t5x_lite.apps.infer import merge as merge_lib
from t5x_lite.apps.infer import paths as paths_lib
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.storage import files

_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """Results of some batches of a shard.

  Attributes:
    first: number of the first batch within the shard.
    num_batches: number of batches.
    num_examples: number of examples.
    num_cut: number of truncated examples.
    file: size, hash and number of lines of the file.
    num_unended: number of predictions without an end; 0 in results of earlier versions.
  """

  first: int
  num_batches: int
  num_examples: int
  num_cut: int
  file: Mapping[str, Any]
  num_unended: int = 0


class ShardStore:
  """Files of one shard; only the lead process of a worker has a store."""

  def __init__(self, paths: paths_lib.ResultPaths, identity: Mapping[str, Any], batch_size: int):
    """Read the state of the shard; change nothing.

    Args:
      paths: paths of the results; the caller has locked the shard's folder.
      identity: everything that the results depend on, as JSON values; equal for all shards.
      batch_size: number of examples per batch.

    Raises:
      ConfigError: there are results of other settings, or a file of another program.
    """
    self.paths = paths
    self._identity = json.loads(
      json.dumps({'version': _VERSION, 'batch_size': batch_size, **identity})
    )
    self._batch_size = batch_size
    self._run: dict[str, Any] = {}
    run = paths_lib.read_json(paths.shard_folder / paths_lib.RUN_FILE)
    if run is not None and 'identity' in run:
      self._run = run
    self._check_identities()
    self._check_files()
    if self._run and not self.is_complete:
      self._chunks = self._find_chunks()
    else:
      self._chunks = []

  def _check_identities(self) -> None:
    """Raise if the settings differ from those of existing results of this shard or of others."""
    # Also with another number of shards, which may have been merged into the same file.
    runs = sorted(self.paths.run_folder.glob(f'shard-?????-of-?????/{paths_lib.RUN_FILE}'))
    shards = [self.paths.of_run(path.parent) for path in runs]
    for paths in sorted(shards, key=lambda paths: paths != self.paths):
      run = paths_lib.read_json(paths.shard_folder / paths_lib.RUN_FILE) or {}
      identity = run.get('identity', self._identity)
      differences = paths_lib.differences(identity, self._identity)
      if differences:
        state = 'has' if run.get('result') else 'is being computed with'
        raise ConfigError(
          f'{paths.result} {state} other settings ({"; ".join(differences)}). Restore the former '
          'settings, choose another output (INFER_OUTPUT_DIR or --output), or delete '
          f'{paths.run_folder} and the results.'
        )

  def _check_files(self) -> None:
    """Raise if a result of this run would replace a file of another program."""
    known = [(self.paths.result, self._run.get('result'))]
    if self.paths.num_shards > 1:
      merged = paths_lib.read_json(self.paths.run_folder / paths_lib.MERGED_FILE) or {}
      known.append((self.paths.merged, merged.get('file')))
    for path, written in known:
      if path.exists() and (
        written is None or path.is_dir() or path.stat().st_size != written['size']
      ):
        raise ConfigError(
          f'{path} exists and was not written by this command. Move it, or choose another output '
          '(INFER_OUTPUT_DIR or --output).'
        )

  def _find_chunks(self) -> list[Chunk]:
    chunks: list[Chunk] = []
    next_batch = 0
    while True:
      found = paths_lib.read_json(self._chunk_path(next_batch, '.json'))
      try:
        chunk = Chunk(**found) if found else None
      except TypeError:
        chunk = None
      path = self._chunk_path(next_batch)
      if (
        chunk is None
        or chunk.first != next_batch
        or chunk.num_batches < 1
        or not path.exists()
        or paths_lib.describe(path) != chunk.file
      ):
        return chunks
      chunks.append(chunk)
      next_batch += chunk.num_batches

  def _chunk_path(self, first: int, suffix: str = '.jsonl') -> files.Path:
    return self.paths.shard_folder / f'chunk-{first:010}{suffix}'

  @property
  def is_complete(self) -> bool:
    """True if the shard's result is complete."""
    return 'result' in self._run and self.paths.result.exists()

  @property
  def has_all_chunks(self) -> bool:
    """True if the results of all batches are on disk, possibly not yet in one file."""
    return 'num_source_examples' in self._run and self.totals['num_examples'] == self._num_wanted(
      self._run['num_source_examples']
    )

  @property
  def chunk_paths(self) -> list[files.Path]:
    """Paths of the chunks."""
    return [self._chunk_path(chunk.first) for chunk in self._chunks]

  @property
  def next_batch(self) -> int:
    """Number of the first batch, within the shard, without results."""
    if self._chunks:
      return self._chunks[-1].first + self._chunks[-1].num_batches
    return 0

  @property
  def totals(self) -> dict[str, int]:
    """Sums of the counts `paths.TOTALS` over the results on disk."""
    if self.is_complete:
      return paths_lib.totals([self._run['result']])
    return paths_lib.totals([vars(chunk) for chunk in self._chunks])

  def begin(self) -> None:
    """Record the settings of the results, and remove incomplete files of a killed run.

    Raises:
      ConfigError: another shard has started with other settings in the meantime.
    """
    self._check_identities()
    if self.is_complete:
      self._remove_chunks()
      return
    if not self._run or ('result' in self._run and not self._chunks):
      # 'result' without its file and without chunks: the user has moved the file, and wants new results.
      self._write_run()
    kept = {
      self._chunk_path(chunk.first, suffix).name
      for chunk in self._chunks
      for suffix in ('.json', '.jsonl')
    }
    self._remove_chunks(kept)

  def _remove_chunks(self, kept: Collection[str] = ()) -> None:
    paths = []
    for path in self.paths.shard_folder.glob('*'):
      is_ours = path.name.startswith(('chunk-', 'merged')) or files.WRITING_INFIX in path.name
      if is_ours and path.name not in kept:
        paths.append(path)
    # Descriptions first: a chunk without its description does not count.
    for path in sorted(paths, key=lambda path: (path.suffix != '.json', path.name)):
      files.remove(path)

  def write_chunk(
    self,
    first: int,
    num_batches: int,
    num_examples: int,
    num_cut: int,
    num_unended: int,
    write_fn: Callable[[pathlib.Path], None],
  ) -> None:
    """Write the results of the next batches.

    Args:
      first: number, within the shard, of the first batch.
      num_batches: number of batches.
      num_examples: number of examples.
      num_cut: number of truncated examples.
      num_unended: number of predictions without an end.
      write_fn: writes a file at the given path.

    Raises:
      RuntimeError: `first` is not `next_batch`, since the previous chunk could not be written.
    """
    if first != self.next_batch:
      raise RuntimeError(
        f'`first` must be {self.next_batch}, the next batch without results, got {first}.'
      )
    path = self._chunk_path(first)
    chunk = Chunk(
      first=first,
      num_batches=num_batches,
      num_examples=num_examples,
      num_cut=num_cut,
      num_unended=num_unended,
      file=paths_lib.write_described(path, write_fn),
    )
    paths_lib.write_json(self._chunk_path(first, '.json'), dataclasses.asdict(chunk))
    self._chunks.append(chunk)

  def end_chunks(self, num_source_examples: int) -> None:
    """Record that all chunks are on disk.

    Args:
      num_source_examples: number of examples over all shards.

    Raises:
      DataError: the number of examples differs, since the source has changed during the run.
    """
    found = self.totals['num_examples']
    wanted = self._num_wanted(num_source_examples)
    if found != wanted:
      raise DataError(
        f'The results have {found} examples, but the source now has {wanted} for this shard: it has '
        f'changed. Delete {self.paths.shard_folder} and rerun the command.'
      )
    self._write_run(num_source_examples=num_source_examples)

  def _num_wanted(self, num_source_examples: int) -> int:
    return num_shard_examples(
      num_source_examples, self._batch_size, self.paths.shard_id, self.paths.num_shards
    )

  def _write_run(self, **facts: Any) -> None:
    self._run = {'identity': self._identity, **facts}
    paths_lib.write_json(self.paths.shard_folder / paths_lib.RUN_FILE, self._run)

  def finish(self, merge_fn: Callable[[str, str, str, int | None], None] | None = None) -> None:
    """Merge all chunks into the result.

    Args:
      merge_fn: see `infer`; None concatenates.

    Raises:
      ConfigError: another program has written a file of that name in the meantime, or `merge_fn` did not write it.
    """
    if merge_fn is None:
      self._write_result(lambda path: merge_lib.concatenate(self.chunk_paths, path))
    else:
      with tempfile.TemporaryDirectory(prefix='t5x_lite_merge_') as folder:
        self._merge_by(merge_fn, pathlib.Path(folder))
    self._remove_chunks()
    self._chunks = []

  def _merge_by(
    self, merge_fn: Callable[[str, str, str, int | None], None], folder: pathlib.Path
  ) -> None:
    """Call `merge_fn` with copies of the chunks in `folder`, and move the files that it writes to the results."""
    name = self.paths.result.name
    chunks = folder / 'chunks'
    output = folder / 'output'
    chunks.mkdir()
    output.mkdir()
    for number, path in enumerate(self.chunk_paths):
      merge_lib.concatenate([path], chunks / f'{name}-chunk{number:05}')
    step = self._identity.get('checkpoint', {}).get('step')
    merge_fn(str(output), name, str(chunks), step)
    if not (output / name).is_file():
      raise checks.invalid(
        'infer',
        'merge_fn',
        f'a function that writes <output_dir>/{name}',
        merge_fn,
        'The chunks are kept: correct it, and rerun the command.',
      )
    for path in sorted(output.iterdir()):
      target = self.paths.folder / path.name
      # Another shard may have written a file of that name.
      if path.is_dir() or (
        path.name != name and target.exists() and target.read_bytes() != path.read_bytes()
      ):
        raise checks.invalid(
          'infer',
          'merge_fn',
          'a function that writes files whose names no other shard or run has written',
          path.name,
          f'Begin names with its second argument, here {name!r}. The chunks are kept: rerun the command.',
        )
      if path.name != name:
        files.write(target, path.read_bytes())
    self._write_result(lambda path: shutil.copyfile(output / name, path))

  def _write_result(self, write_fn: Callable[[pathlib.Path], Any]) -> None:
    totals = self.totals
    paths_lib.write_result(
      self.paths.result,
      self.paths.shard_folder,
      write_fn,
      lambda written: self._write_run(
        num_source_examples=self._run['num_source_examples'], result={**written, **totals}
      ),
    )


def num_shard_examples(num_examples: int, batch_size: int, shard_id: int, num_shards: int) -> int:
  """Return the number of a source's examples in the batches of one shard.

  >>> [num_shard_examples(10, 3, shard, 2) for shard in range(2)]
  [6, 4]
  """
  num_batches = -(-num_examples // batch_size)
  num_own_batches = len(range(shard_id, num_batches, num_shards))
  has_last = num_batches > 0 and (num_batches - 1) % num_shards == shard_id
  num_own_examples = num_own_batches * batch_size
  if has_last:
    num_own_examples -= num_batches * batch_size - num_examples
  return num_own_examples
