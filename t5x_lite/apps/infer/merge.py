"""Merging of the results of all shards into one file, in the order of the source, by the last worker."""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import csv
import fcntl
import glob
import itertools
import json
import pathlib
import shutil
from typing import Any

from t5x_lite.apps.infer import paths as paths_lib
from t5x_lite.errors import ConfigError, DataError
from t5x_lite.storage import files
from t5x_lite.storage import json_lines

_LOCK_FILE = 'merge.lock'
# Of each shard's file.
_BUFFER_BYTES = 1 << 22


def merge_chunks_to_file(
  output_dir: str, output_fname: str, tmp_dir: str, step: int | None
) -> None:
  """Concatenate the files `<tmp_dir>/<output_fname>-chunk?????`, in their order, to `<output_dir>/<output_fname>`.

  Args:
    output_dir: folder of the result.
    output_fname: file name of the result, and the beginning of the chunks' names.
    tmp_dir: folder of the chunks.
    step: step of the checkpoint; not needed by this function.

  Raises:
    DataError: there are no chunks, or one of them is missing.
  """
  del step
  chunks = _chunks(tmp_dir, output_fname)
  files.write(files.path(output_dir) / output_fname, lambda local: concatenate(chunks, local))


def _chunks(tmp_dir: str, output_fname: str) -> list[files.Path]:
  """Return the paths of all chunks, in their order.

  Raises:
    DataError: there are no chunks, or one of them is missing.
  """
  folder = files.path(tmp_dir)
  pattern = f'{glob.escape(output_fname)}-chunk{"[0-9]" * 5}'
  numbers = sorted(int(path.name[-5:]) for path in folder.glob(pattern))
  if not numbers or numbers != list(range(len(numbers))):
    raise DataError(
      f'{tmp_dir} must have the chunks {output_fname}-chunk00000, -chunk00001, ..., got the numbers '
      f'{numbers}. Run the inference again.'
    )
  return [folder / f'{output_fname}-chunk{number:05}' for number in numbers]


def merge_chunks_to_table(
  output_dir: str, output_fname: str, tmp_dir: str, step: int | None
) -> None:
  """Write the chunks as one table of comma-separated values with a header.

  Its columns are the fields of the results: those of the record that `--keep_fields` names, the texts of inputs and
  targets, and the prediction or score. The scores of labels are a column `scores.<label>` each. Any other value that is
  no text is written as JSON. If a field of the record is named `targets`, the column of the text of the targets is
  `targets_pretokenized`, and if one is named `scores.<label>`, the column of this label is `aux.scores.<label>`.

  Args:
    output_dir: see `merge_chunks_to_file`.
    output_fname: see `merge_chunks_to_file`.
    tmp_dir: see `merge_chunks_to_file`.
    step: see `merge_chunks_to_file`.

  Raises:
    DataError: see `merge_chunks_to_file`.
  """
  del step
  chunks = _chunks(tmp_dir, output_fname)

  def lines() -> Iterator[dict[str, Any]]:
    for chunk in chunks:
      for _, line in json_lines.read(chunk):
        assert line is not None  # `write_inferences_to_file` has written it.
        yield line

  # The names of all lines, since those of JSON lines may have different fields.
  fields = {name for line in lines() for name in line if name != 'inputs'}

  def rows() -> Iterator[dict[str, Any]]:
    for line in lines():
      yield {name: _cell(value) for name, value in _flat(line, fields).items()}

  columns = dict.fromkeys(name for row in rows() for name in row)

  def write(local: pathlib.Path) -> None:
    # Half of a surrogate pair, which JSON may have, is written as JSON writes it.
    how: dict[str, Any] = {'encoding': 'utf-8', 'errors': 'backslashreplace', 'newline': ''}
    with local.open('w', **how) as stream:
      writer = csv.DictWriter(stream, columns, restval='')
      writer.writeheader()
      writer.writerows(rows())

  files.write(files.path(output_dir) / output_fname, write)


def _flat(line: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
  """Return a line of results with its texts and its scores of labels as fields of their own.

  Args:
    line: the line.
    fields: names of the other fields of all lines; those of texts lose the end `_pretokenized` unless it is needed.
  """
  flat = {name: value for name, value in line.items() if name != 'inputs'}
  aux = dict(flat.get('aux') or {})
  if isinstance(aux.get('scores'), Mapping):
    for label, score in aux.pop('scores').items():
      short = f'scores.{label}'
      if short in fields:
        short = f'aux.{short}'
      flat[short] = score
    flat['aux'] = aux
    if not aux:
      del flat['aux']
  for name, value in line['inputs'].items():
    short = name.removesuffix('_pretokenized')
    if short in fields:
      short = name
    flat[short] = value
  return flat


def _cell(value: Any) -> str:
  if isinstance(value, str):
    return value
  return json.dumps(value, ensure_ascii=False)


def concatenate(sources: Sequence[files.Path], target: pathlib.Path) -> None:
  """Write the contents of files, one after the other, to a local file."""
  with open(target, 'wb') as stream:
    for path in sources:
      with path.open('rb') as source:
        shutil.copyfileobj(source, stream)


def merge_shards(paths: paths_lib.ResultPaths) -> list[int]:
  """Merge the results of all shards into one file, if all are complete.

  Args:
    paths: paths of the results of any shard.

  Returns:
    Shards whose results are missing; if any is, nothing is written.

  Raises:
    ConfigError: the results have not one line per example, or another program has written the file.
    DataError: a shard's file was modified, or the shards have different sources.
  """
  with _lock(paths.run_folder / _LOCK_FILE):  # If two workers end together, one of them merges.
    shards = [paths.of_shard(i) for i in range(paths.num_shards)]
    runs = [paths_lib.read_json(shard.shard_folder / paths_lib.RUN_FILE) or {} for shard in shards]
    missing = [
      shard.shard_id
      for shard, run in zip(shards, runs, strict=True)
      if 'result' not in run or not shard.result.exists()
    ]
    is_merged = paths.merged.exists() and paths_lib.read_json(
      paths.run_folder / paths_lib.MERGED_FILE
    )
    if not missing and not is_merged:
      _check_mergeable(shards, runs)
      _merge(shards, runs[0])
    return missing


def merged_totals(paths: paths_lib.ResultPaths) -> dict[str, int]:
  """Return the counts `paths.TOTALS` over all shards, after `merge_shards` has merged them."""
  results = []
  for i in range(paths.num_shards):
    run = paths_lib.read_json(paths.of_shard(i).shard_folder / paths_lib.RUN_FILE)
    assert run is not None  # `merge_shards` has read it
    results.append(run['result'])
  return paths_lib.totals(results)


def _check_mergeable(
  shards: Sequence[paths_lib.ResultPaths], runs: Sequence[Mapping[str, Any]]
) -> None:
  """Raise if a shard's file was modified, or if shards have different settings or sources."""
  total = runs[0]['num_source_examples']
  for shard, run in zip(shards, runs, strict=True):
    result = run['result']
    problem = None
    if differences := paths_lib.differences(runs[0]['identity'], run['identity']):
      problem = ConfigError(
        f'{shard.result} has other settings than {shards[0].result} ({"; ".join(differences)}). '
        'Delete one of them, and run its shard again.'
      )
    elif run['num_source_examples'] != total:
      problem = DataError(
        f'{shard.result} has a source of {run["num_source_examples"]} examples, {shards[0].result} '
        f'one of {total}. Rerun all shards with one source.'
      )
    elif not paths_lib.describe(shard.result).items() <= result.items():
      problem = DataError(f'{shard.result} was modified. Delete it, and run its shard again.')
    elif result['lines'] != result['num_examples']:
      problem = ConfigError(
        f'{shard.result} has {result["lines"]} lines for {result["num_examples"]} examples, so the '
        'shards cannot be merged: the write_fn must write one line per example. The shards are '
        'complete.'
      )
    if problem is not None:
      raise problem


def _merge(shards: list[paths_lib.ResultPaths], run: Mapping[str, Any]) -> None:
  """Write the file of all shards; `run` is the record of one of them."""
  target = shards[0].merged
  folder = shards[0].run_folder
  for left in folder.glob(f'merged*{files.WRITING_INFIX}*'):  # Of killed workers.
    files.remove(left)
  paths_lib.write_result(
    target,
    folder,
    lambda path: _interleave(
      [shard.result for shard in shards],
      path,
      run['identity']['batch_size'],
      run['num_source_examples'],
    ),
    lambda written: paths_lib.write_json(folder / paths_lib.MERGED_FILE, {'file': written}),
  )


@contextlib.contextmanager
def _lock(path: files.Path) -> Iterator[None]:
  """Exclude other processes; the lock ends with the process.

  A store has no such lock: there, two workers that end together both write the same bytes.
  """
  if files.is_remote(path):
    yield
    return
  with open(path, 'wb', opener=files.open_regular) as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    yield


def _interleave(
  sources: list[files.Path], target: pathlib.Path, batch_size: int, num_examples: int
) -> None:
  """Write the lines of shards in the order of the source."""
  with contextlib.ExitStack() as stack:
    streams = [
      stack.enter_context(source.open('rb', buffering=_BUFFER_BYTES)) for source in sources
    ]
    with open(target, 'wb') as stream:
      for batch in range(-(-num_examples // batch_size)):
        size = min(batch_size, num_examples - batch * batch_size)
        stream.writelines(itertools.islice(streams[batch % len(streams)], size))
