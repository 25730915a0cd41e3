"""The results of all shards as one file, in the order of the source; the last worker to end makes it."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import itertools
import pathlib
from typing import Any

from t5x_lite import files
from t5x_lite.apps.infer import place as place_lib
from t5x_lite.errors import ConfigError, DataError

_LOCK_FILE = 'merge.lock'


def merge_shards(place: place_lib.Place) -> list[int]:
  """Makes one file of the results of all shards, if all are there.

  Args:
    place: where the results of any of the shards go.

  Returns:
    The shards whose results are missing; with any, nothing is done.

  Raises:
    ConfigError: the results cannot be put in order by their lines, or the file is somebody else's.
    DataError: a shard's file is not what was written, or the shards saw different sources.
  """
  with _lock(place.run_folder / _LOCK_FILE):  # of two workers that end together, one merges
    places = [place.of_shard(i) for i in range(place.num_shards)]
    runs = [place_lib.read_json(one.shard_folder / place_lib.RUN_FILE) or {} for one in places]
    missing = [one.shard_id for one, run in zip(places, runs, strict=True)
               if 'result' not in run or not one.result.exists()]
    is_merged = place.whole.exists() and place_lib.read_json(place.run_folder / place_lib.MERGED_FILE)
    if not missing and not is_merged:
      _check_mergeable(places, runs)
      _merge(places, runs[0])
    return missing


def merged_totals(place: place_lib.Place) -> dict[str, int]:
  """Returns counts over all shards, 'num_examples' and 'num_cut', once `merge_shards` has made one file of them."""
  results = [place_lib.read_json(place.of_shard(i).shard_folder / place_lib.RUN_FILE)['result']
             for i in range(place.num_shards)]
  return {name: sum(result[name] for result in results) for name in place_lib.TOTALS}


def _check_mergeable(places: list[place_lib.Place], runs: list[Mapping[str, Any]]) -> None:
  """Refuses files of shards that are not what was written, or that are of different sources."""
  total = runs[0]['num_source_examples']
  for place, run in zip(places, runs, strict=True):
    result = run['result']
    if differences := place_lib.differences(runs[0]['identity'], run['identity']):
      raise ConfigError(f'{place.result} was made with other settings than {places[0].result} '
                        f'({"; ".join(differences)}). Delete one of them, and run its shard again.')
    if run['num_source_examples'] != total:
      raise DataError(f'{place.result} was made from a source of {run["num_source_examples"]} examples, '
                      f'{places[0].result} from one of {total}. Start over with one source.')
    if place_lib.describe(place.result) != {name: result[name] for name in ('size', 'sha256', 'lines')}:
      raise DataError(f'{place.result} is not what was written there. Delete it, and run its shard again.')
    if result['lines'] != result['num_examples']:
      raise ConfigError(f'{place.result} has {result["lines"]} lines for {result["num_examples"]} examples, so the '
                        'shards cannot be put in order: the write_fn does not write one line for each. The shards '
                        'themselves are complete.')


def _merge(places: list[place_lib.Place], run: Mapping[str, Any]) -> None:
  """Writes the file of all shards, of which `run` is what one of them knows."""
  whole, folder = places[0].whole, places[0].run_folder
  merged = folder / 'merged'
  for left in folder.glob(f'merged*{files.WRITING_INFIX}*'):  # by workers that died here
    files.remove(left)
  files.write(merged, lambda path: _interleave(
      [place.result for place in places], path, run['identity']['batch_size'], run['num_source_examples']))
  written = place_lib.describe(merged)
  if whole.exists() and place_lib.describe(whole) != written:
    raise ConfigError(f'{whole} has been put there by somebody else. Move it, and run the same command again.')
  # Before the file has its name, so that it is never taken for somebody else's.
  place_lib.write_json(folder / place_lib.MERGED_FILE, {'file': written})
  files.rename(merged, whole)


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
  """Waits until no other process is in such a context; the kernel ends it with the process."""
  with open(path, 'wb') as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    yield


def _interleave(sources: list[pathlib.Path], target: pathlib.Path, batch_size: int, num_examples: int) -> None:
  """Writes the lines of shards in the order of the source."""
  with contextlib.ExitStack() as stack:
    streams = [stack.enter_context(open(source, 'rb')) for source in sources]
    with open(target, 'wb') as stream:
      for batch in range(-(-num_examples // batch_size)):
        size = min(batch_size, num_examples - batch * batch_size)
        stream.writelines(itertools.islice(streams[batch % len(streams)], size))
