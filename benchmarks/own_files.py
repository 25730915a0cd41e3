"""Own files: seconds and memory to open each format, to convert Parquet and .gz, and batches per second.

python benchmarks/own_files.py [--gb 0.02] [--repeats 3] [--batches 200] [--only FORMAT ...] [--folder /tmp]

A record has about 500 bytes in a line. Each row is a new process, which opens the training split of a `data.FileTask`
(for Parquet and .gz with an empty folder of converted files, then again), and reads shuffled batches of 64, whose rate
is that of processor time. Seconds of the clock and of the processor, and rates, are medians of the repetitions. Memory
is the largest amount without mapped files during the opening, relative to the process before it. Files up to 100 MB are
also checked when they are opened, which takes most of the time of small files. Run it as `taskset -c 1 python ...` for
the seconds of one core.
"""

import argparse
from collections.abc import Iterator
import contextlib
import gzip
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import common

_FORMATS = ('jsonl', 'csv', 'parquet', 'arrow', 'jsonl.gz', 'csv.gz')
_CONVERTED = ('parquet', 'jsonl.gz', 'csv.gz')
_RECORD_BYTES = 500
_ROWS_TOGETHER = 10_000


def _blocks(num_records: int) -> Iterator[list[dict[str, object]]]:
  """Yield random records in lists; inputs have commas."""
  import numpy as np

  draw = np.random.default_rng(0)
  for first in range(0, num_records, _ROWS_TOGETHER):
    count = min(_ROWS_TOGETHER, num_records - first)
    letters = draw.integers(97, 123, (count, 430), np.uint8)
    letters[:, 6::7] = ord(' ')
    letters[:, 70:390:70] = ord(',')
    texts = letters.tobytes().decode()
    block = []
    for row in range(count):
      text = texts[430 * row : 430 * (row + 1)]
      block.append({'id': f'{first + row:024}', 'question': text[:390], 'answer': text[390:]})
    yield block


def _lines(kind: str, block: list[dict[str, object]]) -> bytes:
  if kind == 'jsonl':
    return ''.join(json.dumps(row) + '\n' for row in block).encode()
  return ''.join(f'{row["id"]},"{row["question"]}",{row["answer"]}\n' for row in block).encode()


def _write(path: pathlib.Path, kind: str, num_records: int) -> None:
  """Write the records in a format."""
  plain = kind.removesuffix('.gz')
  with contextlib.ExitStack() as stack:
    if plain in ('parquet', 'arrow'):
      import pyarrow as pa
      import pyarrow.parquet as pq

      schema = pa.schema([(name, pa.string()) for name in ('id', 'question', 'answer')])
      if plain == 'parquet':
        writer = stack.enter_context(pq.ParquetWriter(path, schema))
      else:
        sink = stack.enter_context(pa.OSFile(str(path), 'wb'))
        writer = stack.enter_context(pa.ipc.new_stream(sink, schema))
      for block in _blocks(num_records):
        writer.write_table(pa.Table.from_pylist(block, schema))
      return
    if kind.endswith('.gz'):
      stream = stack.enter_context(gzip.open(path, 'wb', compresslevel=1))
    else:
      stream = stack.enter_context(path.open('wb'))
    if plain == 'csv':
      stream.write(b'id,question,answer\n')
    for block in _blocks(num_records):
      stream.write(_lines(plain, block))


def _anonymous_mb() -> float:
  """Return the memory of this process without mapped files; on Linux alone."""
  status = pathlib.Path('/proc/self/status').read_text(encoding='utf-8')
  (line,) = (line for line in status.splitlines() if line.startswith('RssAnon'))
  return int(line.split()[1]) / 1e3


@contextlib.contextmanager
def _largest_memory() -> Iterator[list[float]]:
  """Yield a list that has the largest memory within the context at its end, in MB."""
  found = [_anonymous_mb()]
  is_over = threading.Event()

  def watch() -> None:
    while not is_over.wait(0.005):
      found[0] = max(found[0], _anonymous_mb())

  thread = threading.Thread(target=watch)
  thread.start()
  try:
    yield found
  finally:
    is_over.set()
    thread.join()
    found[0] = max(found[0], _anonymous_mb())


def _measure(path: str, cache_dir: str, num_batches: int) -> dict[str, float]:
  """Open a file in this process and read batches."""
  import numpy as np

  from t5x_lite import data
  from t5x_lite.data.files import delimited  # Before the measurement.

  del delimited
  with contextlib.suppress(ImportError):
    from t5x_lite.data.files import columnar

    del columnar
  task = data.FileTask(
    vocabulary=data.ByteVocabulary(extra_ids=0),
    inputs='question',
    targets='answer',
    train_file=path,
    cache_dir=cache_dir,
  )
  lengths = {'inputs': 392, 'targets': 48}
  before = _anonymous_mb()
  start = time.perf_counter()
  start_cpu = time.process_time()
  with _largest_memory() as largest:
    table = task.builtin_task().table('train', lengths)
    _ = table.fingerprint
    seconds = time.perf_counter() - start
    cpu = time.process_time() - start_cpu
  found = {'seconds': seconds, 'cpu': cpu, 'memory': largest[0] - before, 'records': len(table)}
  if num_batches:
    numbers = np.random.default_rng(0).integers(0, len(table), (num_batches, 64))
    start = time.process_time()
    for batch in numbers:
      table.examples(0, batch)
    found['batches'] = num_batches / (time.process_time() - start)
  return found


def _in_new_process(path: pathlib.Path, cache: pathlib.Path, num_batches: int) -> dict[str, float]:
  command = [sys.executable, __file__, '--measure', str(path), str(cache), str(num_batches)]
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  return json.loads(done.stdout.splitlines()[-1])


def _median(rows: list[dict[str, float]], name: str) -> float:
  return statistics.median(row[name] for row in rows)


def _row(path: pathlib.Path, cache: pathlib.Path, args: argparse.Namespace) -> list[object]:
  """Return the row of the table for a file."""
  converted: list[dict[str, float]] = []
  opened: list[dict[str, float]] = []
  for _ in range(args.repeats):
    if path.name.partition('.')[2] in _CONVERTED:
      shutil.rmtree(cache, ignore_errors=True)
      converted.append(_in_new_process(path, cache, 0))
    opened.append(_in_new_process(path, cache, args.batches))
  conversion = ['-', '-']
  if converted:
    conversion = [f'{_median(converted, name):.2f}' for name in ('seconds', 'cpu')]
  return [
    path.name.partition('.')[2],
    path.stat().st_size / 1e6,
    *conversion,
    _median(opened, 'seconds'),
    _median(opened, 'cpu'),
    max(each['memory'] for each in converted + opened),
    _median(opened, 'batches'),
  ]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--gb', type=float, default=0.02, help='size of the JSON lines')
  parser.add_argument('--repeats', type=common.positive, default=3)
  parser.add_argument('--batches', type=common.positive, default=200)
  parser.add_argument('--only', nargs='+', choices=_FORMATS, default=_FORMATS)
  parser.add_argument('--folder', default=None, help='where the files are made; default: TMPDIR')
  parser.add_argument('--measure', nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.measure:
    path, cache, num_batches = args.measure
    print(json.dumps(_measure(path, cache, int(num_batches))))
    return
  num_records = max(int(args.gb * 1e9 / _RECORD_BYTES), 64)
  before = os.getloadavg()[0]
  rows = []
  with tempfile.TemporaryDirectory(prefix='own_files_', dir=args.folder) as folder:
    for kind in args.only:
      path = pathlib.Path(folder) / f'train.{kind}'
      _write(path, kind, num_records)
      rows.append(_row(path, pathlib.Path(folder) / 'cache', args))
      path.unlink()
      shutil.rmtree(pathlib.Path(folder) / 'cache', ignore_errors=True)
  load = f'{before:.1f}, {os.getloadavg()[0]:.1f}'
  rate = common.matmul_gflops()
  common.print_table(
    f'Own files, {num_records} records (load before, after: {load}; matmul 2048^3: {rate:.0f} GFLOP/s)',
    rows,
    ('format', 'MB', 'convert, s', 'processor', 'open, s', 'processor', 'memory, MB', 'batches/s'),
  )


if __name__ == '__main__':
  main()
