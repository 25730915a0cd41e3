"""SLURM's sbatch, srun and scontrol for one job on this machine: `python -m tests.examples.fake_slurm srun`.

srun sets SLURM's variables and starts real processes. The folder `FAKE_SLURM` has the log of all calls. Its files
`limit` and `kill` have a text: when a task writes it, the job comes near its time limit, or the last task is killed.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

_JOB = '4711'
# Options of sbatch that may occur, all with a value except the last one.
_OPTIONS = {
  'job-name',
  'nodes',
  'ntasks-per-node',
  'gpus-per-node',
  'cpus-per-task',
  'time',
  'output',
  'open-mode',
  'signal',
  'requeue',
}


def install(folder):
  """Write the programs to a folder, to be put first in PATH."""
  root = pathlib.Path(__file__).parents[2]
  for name in ('sbatch', 'srun', 'scontrol'):
    (folder / name).write_text(
      f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m tests.examples.fake_slurm {name} "$@"\n'
    )
    (folder / name).chmod(0o755)


def _log(text):
  with open(pathlib.Path(os.environ['FAKE_SLURM']) / 'log', 'a', encoding='utf-8') as f:
    f.write(text + '\n')


def _parse(words):
  """Return the options, and the words after them."""
  options = {}
  for i, word in enumerate(words):
    if not word.startswith('--'):
      return options, words[i:]
    name, _, value = word.removeprefix('--').partition('=')
    options[name] = value
  return options, []


def sbatch(arguments):
  """Run a job until it ends and was not requeued; return the status of the last time."""
  given, (script, *rest) = _parse(arguments)
  text = pathlib.Path(script).read_text(encoding='utf-8')
  options = _parse(re.findall(r'^#SBATCH (\S+)$', text, re.MULTILINE))[0] | given
  assert options.keys() <= _OPTIONS, options
  num_nodes, tasks = int(options['nodes']), int(options['ntasks-per-node'])
  assert num_nodes == 1 and 'requeue' in options and options['open-mode'] == 'append'
  environment = {
    **os.environ,
    'SLURM_JOB_ID': _JOB,
    'SLURM_NTASKS': str(tasks),
    'SLURM_JOB_NODELIST': 'localhost',
    'SLURM_GPUS_ON_NODE': options['gpus-per-node'],
    'FAKE_SLURM_SIGNAL': options['signal'],
  }
  with tempfile.TemporaryDirectory() as spool:
    copy = shutil.copy(script, pathlib.Path(spool) / 'slurm_script')
    requeues = 0
    while True:
      _log('job starts')
      # SLURM runs a copy, in the folder of sbatch, without SLURM_RESTART_COUNT the first time.
      status = subprocess.run(['bash', copy, *rest], env=environment, check=False).returncode
      done = (pathlib.Path(os.environ['FAKE_SLURM']) / 'log').read_text().count('requeue')
      if done == requeues:
        return status
      requeues = done
      environment['SLURM_RESTART_COUNT'] = str(requeues)


def scontrol(arguments):
  """Requeue the job, and so kill its script."""
  assert arguments == ['requeue', _JOB]
  _log('requeue')
  os.kill(os.getppid(), signal.SIGKILL)


def srun(arguments):
  """Start the tasks; return the highest status."""
  options, command = _parse(arguments)
  assert options == {'kill-on-bad-exit': '0'}, options
  count = int(os.environ['SLURM_NTASKS'])
  tasks = [
    subprocess.Popen(
      command,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      env=os.environ
      | {
        'SLURM_STEP_NODELIST': 'localhost',
        'SLURM_STEP_TASKS_PER_NODE': str(count),
        'SLURM_NTASKS': str(count),
        'SLURM_PROCID': str(i),
        'SLURM_LOCALID': str(i),
        'SLURM_NODEID': '0',
      },
    )
    for i in range(count)
  ]
  readers = [threading.Thread(target=_read, args=[task, tasks]) for task in tasks]
  for reader in readers:
    reader.start()
  statuses = [task.wait() for task in tasks]
  for reader in readers:
    reader.join()
  _log(f'tasks end with {sorted(statuses)}')
  return max(status if status >= 0 else 128 - status for status in statuses)


def _read(task, tasks):
  """Copy the output of a task; cause each fault once, when its text appears."""
  # With B: before its name, the script would have the signal instead of the tasks.
  name = os.environ['FAKE_SLURM_SIGNAL'].split('@')[0]
  faults = {'limit': (getattr(signal, f'SIG{name}'), tasks), 'kill': (signal.SIGKILL, tasks[-1:])}
  for line in task.stdout:
    print(line, end='', flush=True)
    for file, (number, targets) in faults.items():
      path = pathlib.Path(os.environ['FAKE_SLURM']) / file
      if path.exists() and path.read_text() in line:
        path.unlink()
        for target in targets:
          target.send_signal(number)


if __name__ == '__main__':
  sys.exit({'sbatch': sbatch, 'srun': srun, 'scontrol': scontrol}[sys.argv[1]](sys.argv[2:]))
