"""Seconds in which a run of several processes ends after a fault in one of them, and in which it starts again.

    python benchmarks/faults.py [--processes 2] [--heartbeat 30] [--faults raise kill sigterm ...]

Real processes train the recipe of the README on a CPU. In one of them, the data source raises, is killed, or stalls at
step 20, or it gets a signal while each step takes a second. The table has the seconds from the fault to the end of the
last process, the exit statuses, and the step that is saved. The last row is the same command again, from its start to
the first new step, and the same for a process that runs alone.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import common
import gin

_AT = 20
# Process in which each fault happens; 0 is the lead. The last one must save, for the restart.
_FAULTS = {
  'raise_lead': 0,
  'raise': 1,
  'kill_lead': 0,
  'kill': 1,
  'stall': 1,
  'SIGTERM': 1,
  'SIGINT': 0,
}


@gin.configurable(module='faults')
def open_faulty(*args, **kwargs):
  """Open training data that fails as the environment says: FAULT=<kind>, FAULT_FILE=<file that gets the time>."""
  import jax

  from t5x_lite import data

  iterator = data.open_train_iterator(*args, **kwargs)
  kind = os.environ.get('FAULT', '')

  class Faulty(type(iterator)):
    """The iterator with a fault."""

    count = 0

    def __next__(self):
      Faulty.count += 1
      if kind.startswith('SIG'):
        time.sleep(1.0)
      if kind and Faulty.count == _AT and jax.process_index() == _FAULTS[kind]:
        pathlib.Path(os.environ['FAULT_FILE']).write_text(str(time.time()), encoding='utf-8')
        _fail(kind)
      return super().__next__()

  iterator.__class__ = Faulty
  return iterator


def _fail(kind: str) -> None:
  if kind.startswith('raise'):
    raise ValueError('injected')
  if kind.startswith('kill'):
    os.kill(os.getpid(), signal.SIGKILL)
  if kind == 'stall':
    time.sleep(3600)
  os.kill(os.getpid(), getattr(signal, kind))


def _start(
  folder: pathlib.Path, num_processes: int, steps: int, heartbeat: int, kind: str = ''
) -> list:
  """Start the processes of a run."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'FAULT': kind,
    'FAULT_FILE': str(folder / 'fault'),
    'PYTHONPATH': f'{pathlib.Path(__file__).parents[1]}:{pathlib.Path(__file__).parent}',
  }
  flags = [
    '--gin_file=recipes/keyword_cloze.gin',
    f"--gin.MODEL_DIR='{folder / 'run'}'",
    f'--gin.TRAIN_STEPS={steps}',
    '--gin.EVAL_PERIOD=1000',
    '--gin_bindings=import faults',
    f'--compilation_cache_dir={folder / "cache"}',
    '--gin.train_script.train.get_dataset_fn=@faults.open_faulty',
  ]
  if kind == 'stall':
    flags.append('--gin.train_script.train.max_step_seconds=10')
  processes = []
  for i in range(num_processes):
    own = (
      []
      if num_processes == 1
      else [
        f'--coordinator_address=127.0.0.1:{port}',
        f'--process_count={num_processes}',
        f'--process_index={i}',
        f'--heartbeat_timeout_seconds={heartbeat}',
      ]
    )
    with open(folder / f'log{i}', 'w', encoding='utf-8') as log:
      processes.append(
        subprocess.Popen(
          [sys.executable, '-m', 't5x_lite', 'train', *own, *flags],
          env=environment,
          stdout=log,
          stderr=log,
        )
      )
  return processes


def _measure(folder: pathlib.Path, num_processes: int, heartbeat: int, kind: str) -> list[str]:
  """Return a row of the table."""
  processes = _start(folder, num_processes, 1000, heartbeat, kind)
  statuses = [process.wait() for process in processes]
  seconds = time.time() - float((folder / 'fault').read_text())
  saved = sorted(int(path.name.partition('_')[2]) for path in (folder / 'run').glob('checkpoint_*'))
  victim = _FAULTS[kind]
  return [
    kind,
    f'{seconds:.1f}',
    str(statuses[victim]),
    ' '.join(sorted({str(status) for i, status in enumerate(statuses) if i != victim})),
    str(saved[-1]) if saved else 'none',
  ]


def _measure_restart(folder: pathlib.Path, num_processes: int, heartbeat: int) -> float:
  """Return the seconds from the start of a resumed run to its first step."""
  began = time.time()
  newest = max(int(path.name.partition('_')[2]) for path in (folder / 'run').glob('checkpoint_*'))
  for process in _start(folder, num_processes, newest + 3, heartbeat):
    process.wait()
  events = [json.loads(line) for line in (folder / 'run/events.jsonl').read_text().splitlines()]
  return [event['wall_time'] for event in events if event['event'] == 'first_step'][-1] - began


def main() -> None:
  """Measure and print the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--processes', type=common.positive, default=2)
  parser.add_argument('--heartbeat', type=common.positive, default=30)
  parser.add_argument('--faults', nargs='+', choices=list(_FAULTS), default=list(_FAULTS))
  args = parser.parse_args()
  rows, rate = [], common.matmul_gflops()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for kind in args.faults:
      shutil.rmtree(folder / 'run', ignore_errors=True)
      rows.append(_measure(folder, args.processes, args.heartbeat, kind))
    several = _measure_restart(folder, args.processes, args.heartbeat)
    one = _measure_restart(folder, 1, args.heartbeat)
  common.print_table(
    f'Faults: {args.processes} processes, heartbeat timeout {args.heartbeat} s; matmul {rate:.0f} GFLOP/s',
    rows,
    ['fault', 'seconds', 'its status', 'status of the others', 'saved step'],
  )
  print(f'Restart to the first step: {several:.1f} s; one process alone: {one:.1f} s.')


if __name__ == '__main__':
  main()
