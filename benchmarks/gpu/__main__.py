"""Command of the kit: see `--help`, and `make gpu`."""

import argparse
import datetime
import os
import pathlib
import shlex
import shutil
import signal
import sys
import threading
import time

from benchmarks.gpu import runner
from benchmarks.gpu import worker

# Folder of results, logs and compiled programs.
_FOLDER = pathlib.Path('build/gpu')
# Seconds of all parts: on a GPU, nine minutes less the installation; in the rehearsal, on a busy machine.
_SECONDS = {'real': 525, 'tiny': 480}
# Shares of the parts, in the order of `worker.PARTS`.
_SHARES = {'real': (11, 12, 36, 16, 19, 6), 'tiny': (45, 10, 15, 12, 15, 5)}
# Share of the device's memory that a process takes; other parts start processes that need memory too.
_MEMORY_SHARES = {'attention': '0.9', 'training': '0.95', 'experts': '0.95'}
# Variables of the caller that would change the memory; JAX raises for both names of the share.
_DROPPED = (
  'XLA_PYTHON_CLIENT_ALLOCATOR',
  'XLA_PYTHON_CLIENT_MEM_FRACTION',
  'XLA_PYTHON_CLIENT_PREALLOCATE',
)


def _environment(part: str, sizes: str, folder: pathlib.Path) -> dict[str, str]:
  """Return the environment of the process of a part."""
  found = {name: value for name, value in os.environ.items() if name not in _DROPPED}
  found |= {
    # Batches, peak rates and goals are those of one GPU.
    'CUDA_VISIBLE_DEVICES': os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0],
    'XLA_CLIENT_MEM_FRACTION': _MEMORY_SHARES.get(part, '0.4'),
    # Learning-rate schedules and others use the CPU too.
    'JAX_PLATFORMS': 'cuda,cpu',
    # Equal programs of a part are compiled once.
    'JAX_COMPILATION_CACHE_DIR': str(folder / 'programs'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '1',
  }
  if sizes == 'tiny':
    found['JAX_PLATFORMS'] = 'cpu'
    found['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
  return found


def _end_with_parent(parent: int) -> None:
  """End this process and those that it started once the kit that started it was killed."""
  while os.getppid() == parent:
    time.sleep(1)
  os.killpg(0, signal.SIGKILL)


def main() -> int:
  """Run the kit, or the process of a part; return the exit status: 1 if a result is missing or wrong."""
  parser = argparse.ArgumentParser(
    prog='benchmarks.gpu', description='Measure and check t5x_lite on a GPU.'
  )
  parser.add_argument(
    '--sizes',
    choices=('real', 'tiny'),
    default='real',
    help="'tiny' rehearses all parts on the CPU and lowers the real programs for CUDA",
  )
  parser.add_argument('--parts', nargs='+', choices=worker.PARTS, default=list(worker.PARTS))
  parser.add_argument(
    '--output', type=pathlib.Path, metavar='FOLDER', help='folder of the results', default=_FOLDER
  )
  parser.add_argument('--seconds', type=float, help='limit of all parts together')
  # For the processes that the kit starts.
  parser.add_argument('--work', choices=(*worker.PARTS, worker.REHEARSAL), help=argparse.SUPPRESS)
  parser.add_argument('--events', type=pathlib.Path, help=argparse.SUPPRESS)
  parser.add_argument('--skip', nargs='*', default=[], help=argparse.SUPPRESS)
  parser.add_argument('--reference', type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.reference is not None:
    from benchmarks.gpu import correctness

    correctness.write_reference(args.reference, args.sizes)
    return 0
  if args.work is not None:
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    worker.run(args.work, args.sizes, worker.Events(args.events), args.skip)
    return 0
  folder = args.output.absolute()
  work_folder = _FOLDER.absolute() / 'work'
  # Times of compilation are those of a first run.
  shutil.rmtree(work_folder / 'programs', ignore_errors=True)

  def start(part, events, skip):
    command = [sys.executable, '-m', 'benchmarks.gpu', '--work', part, '--sizes', args.sizes]
    command += ['--events', str(events), '--skip', *skip]
    return command, _environment(part, args.sizes, work_folder)

  in_background = []
  if args.sizes == 'tiny':
    in_background = [worker.REHEARSAL]
  facts = {
    'command': shlex.join(['python', '-m', 'benchmarks.gpu', *sys.argv[1:]]),
    'date': datetime.date.today().isoformat(),
    'sizes': args.sizes,
  }
  shares = dict(zip(worker.PARTS, _SHARES[args.sizes], strict=True))
  seconds = args.seconds or _SECONDS[args.sizes]
  kit = runner.Runner(folder, work_folder, start, seconds, shares, facts)
  begin = time.monotonic()
  # The end of the process must not leave those that it started.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  kit.run(args.parts, in_background)
  found = runner.problems(kit.results)
  for problem in found:
    print(problem, file=sys.stderr)
  print(
    f'{len(found)} problems in {time.monotonic() - begin:.0f} s; results are in {folder}/results.md'
  )
  return 1 if found else 0


if __name__ == '__main__':
  sys.exit(main())
