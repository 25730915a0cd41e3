"""Seconds in which a run of several processes ends after a fault in one of them, and in which it continues.

    python benchmarks/faults.py [--processes 2] [--heartbeat 30] [--faults raise kill sigterm ...]

Real processes train the recipe of the README on a CPU. In one of them, the data source raises, is killed, stalls or is
paused (SIGSTOP) at step 20, its `launch` is killed, or it gets a signal while each step takes a second. The table has
the seconds from the fault to the end of the last process that is not paused, the exit statuses, and the step that is
saved. 'restart' is a killed process under `launch --max_restarts`: the seconds from the fault to the first new step.
The last lines are the same command again, from its start to the first new step, and the same for a process that runs
alone; and the seconds from a hang to the end of a process that runs alone, with a limit of 10 s.
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
  'pause': 1,
  'launcher': 1,
  'restart': 1,
  'SIGTERM': 1,
  'SIGINT': 0,
}
_LAUNCHED = ('launcher', 'restart')


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
      path = pathlib.Path(os.environ['FAULT_FILE'])
      path.with_name(f'pid{jax.process_index()}').write_text(str(os.getpid()), encoding='utf-8')
      is_due = kind and Faulty.count == _AT and jax.process_index() == _FAULTS.get(kind, 0)
      if is_due and not path.exists():  # once, also after a restart
        path.write_text(str(time.time()), encoding='utf-8')
        _fail(kind)
      return super().__next__()

  iterator.__class__ = Faulty
  return iterator


def _fail(kind: str) -> None:
  if kind.startswith('raise'):
    raise ValueError('injected')
  if kind.startswith('kill') or kind == 'restart':
    os.kill(os.getpid(), signal.SIGKILL)
  if kind == 'stall':
    time.sleep(3600)
  if kind == 'pause':
    os.kill(os.getpid(), signal.SIGSTOP)
  if kind == 'launcher':
    os.kill(os.getppid(), signal.SIGKILL)
  if kind.startswith('SIG'):
    os.kill(os.getpid(), getattr(signal, kind))


@gin.configurable(module='faults')
def hang(event):
  """Hook of events that hangs in a step."""
  if event.kind == 'progress' and os.environ.get('FAULT') == 'hang':
    pathlib.Path(os.environ['FAULT_FILE']).write_text(str(time.time()), encoding='utf-8')
    time.sleep(3600)


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
    '--gin.train_script.train.event_fns=@faults.hang',
  ]
  (folder / 'fault').unlink(missing_ok=True)
  if kind in ('stall', 'hang'):
    flags.append('--gin.train_script.train.max_step_seconds=10')
  program = [sys.executable, '-m', 't5x_lite']
  if kind in _LAUNCHED:
    options = ['--max_restarts=1', '--restart_seconds=0'] if kind == 'restart' else []
    with open(folder / 'log', 'w', encoding='utf-8') as log:
      command = [*program, 'launch', '-n', str(num_processes), *options, '--', 'train', *flags]
      return [subprocess.Popen(command, env=environment, stdout=log, stderr=log)]
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
          [*program, 'train', *own, *flags],
          env=environment,
          stdout=log,
          stderr=log,
        )
      )
  return processes


def _measure(folder: pathlib.Path, num_processes: int, heartbeat: int, kind: str) -> list[str]:
  """Return a row of the table."""
  processes = _start(folder, num_processes, 1000, heartbeat, kind)
  victim = _FAULTS[kind]
  if kind in _LAUNCHED:
    statuses = ['', '']
    if kind == 'restart':
      ended_at = _wait_for_first_step(folder)
      processes[0].send_signal(signal.SIGTERM)
      statuses = ['-9', str(processes[0].wait())]
    else:
      processes[0].wait()
      while any(_runs(folder / f'pid{i}') for i in range(num_processes)):
        time.sleep(0.05)
      ended_at = time.time()
  else:
    others = [str(process.wait()) for i, process in enumerate(processes) if i != victim]
    if kind != 'pause':
      processes[victim].wait()
    ended_at = time.time()
    processes[victim].kill()
    statuses = [str(processes[victim].wait()), ' '.join(sorted(set(others)))]
  seconds = ended_at - float((folder / 'fault').read_text())
  saved = sorted(int(path.name.partition('_')[2]) for path in (folder / 'run').glob('checkpoint_*'))
  return [kind, f'{seconds:.1f}', *statuses, str(saved[-1]) if saved else 'none']


def _wait_for_first_step(folder: pathlib.Path) -> float:
  """Return the time of the first step after the fault."""
  while True:
    time.sleep(0.05)
    for at in _times_of_first_steps(folder):
      if (folder / 'fault').exists() and at > float((folder / 'fault').read_text() or 'inf'):
        return at


def _times_of_first_steps(folder: pathlib.Path) -> list[float]:
  path = folder / 'run/events.jsonl'
  if not path.exists():
    return []
  lines = path.read_text().splitlines()
  events = [json.loads(line) for line in lines if line.endswith('}')]
  return [event['wall_time'] for event in events if event['event'] == 'first_step']


def _runs(path: pathlib.Path) -> bool:
  """Return whether the process whose id a file has is there, and is not a zombie."""
  try:
    status = pathlib.Path(f'/proc/{path.read_text(encoding="utf-8")}/stat').read_text(
      encoding='utf-8'
    )
  except OSError:
    return False
  return status.rpartition(')')[2].split()[0] != 'Z'


def _measure_hang(folder: pathlib.Path) -> float:
  """Return the seconds in which a process that runs alone ends after a hang in a step."""
  shutil.rmtree(folder / 'run', ignore_errors=True)
  (process,) = _start(folder, 1, 1000, 30, 'hang')
  assert process.wait() == 4, (folder / 'log0').read_text()
  return time.time() - float((folder / 'fault').read_text())


def _measure_restart(folder: pathlib.Path, num_processes: int, heartbeat: int) -> float:
  """Return the seconds from the start of a resumed run to its first step."""
  began = time.time()
  newest = max(int(path.name.partition('_')[2]) for path in (folder / 'run').glob('checkpoint_*'))
  for process in _start(folder, num_processes, newest + 3, heartbeat):
    process.wait()
  return _times_of_first_steps(folder)[-1] - began


def main() -> None:
  """Measure and print the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--processes', type=common.positive, default=2)
  parser.add_argument('--heartbeat', type=common.positive, default=30)
  parser.add_argument('--faults', nargs='+', choices=list(_FAULTS), default=list(_FAULTS))
  args = parser.parse_args()
  # A job in the background of a shell ignores SIGINT, and its children would too.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  rows, rate = [], common.matmul_gflops()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    for kind in args.faults:
      shutil.rmtree(folder / 'run', ignore_errors=True)
      rows.append(_measure(folder, args.processes, args.heartbeat, kind))
      print(*rows[-1], flush=True)
    several = _measure_restart(folder, args.processes, args.heartbeat)
    one = _measure_restart(folder, 1, args.heartbeat)
    hang = _measure_hang(folder)
  common.print_table(
    f'Faults: {args.processes} processes, heartbeat timeout {args.heartbeat} s; matmul {rate:.0f} GFLOP/s',
    rows,
    ['fault', 'seconds', 'its status', 'status of the others', 'saved step'],
  )
  print(f'Restart to the first step: {several:.1f} s; one process alone: {one:.1f} s.')
  print(f'A process alone whose step hangs, with a limit of 10 s: {hang:.1f} s.')


if __name__ == '__main__':
  main()
