"""Several processes of one command on this machine. Those of a run are in tests/multiprocess."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from t5x_lite.apps.launch import run
from t5x_lite.errors import ConfigError


def _launch(program, num_processes, *arguments, flags=()):
  """Starts `launch` for a Python program in a process of its own."""
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      't5x_lite',
      'launch',
      '-n',
      str(num_processes),
      *flags,
      '--',
      sys.executable,
      '-c',
      textwrap.dedent(program),
      *map(str, arguments),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )


def test_each_process_knows_its_place_and_lines_name_it():
  process = _launch(
    """
      import os, sys
      i = os.environ['JAX_PROCESS_ID']
      print('place', i, 'of', os.environ['JAX_NUM_PROCESSES'], 'at', os.environ['JAX_COORDINATOR_ADDRESS'])
      print('[Gloo] Rank 0 is connected to 2 peer ranks.')
      print(f'[process {i}] has its name\\nlast line without end', end='', file=sys.stderr)
      """,
    3,
  )
  out, err = process.communicate(timeout=60)
  assert process.returncode == 0
  lines = sorted(out.splitlines())
  address = lines[0].rpartition(' ')[2]
  assert lines == [f'[process {i}] place {i} of 3 at {address}' for i in range(3)]
  assert sorted(err.splitlines()) == sorted(
    [f'[process {i}] has its name' for i in range(3)]
    + [f'[process {i}] last line without end' for i in range(3)]
  )


def test_all_end_with_the_status_of_the_first_that_fails(monkeypatch):
  monkeypatch.setattr(run, '_END_SECONDS', 0.5)
  began = time.monotonic()
  program = """
      import os, signal, sys, time
      signal.signal(signal.SIGTERM, lambda *args: sys.exit(9))
      if os.environ['JAX_PROCESS_ID'] == '1': sys.exit(3)
      if os.environ['JAX_PROCESS_ID'] == '2': signal.signal(signal.SIGTERM, signal.SIG_IGN)
      time.sleep(600)
      """
  assert run.launch([sys.executable, '-c', textwrap.dedent(program)], 3) == 3
  assert time.monotonic() - began < 60


def test_a_killed_process_ends_the_others_at_once(capfd):
  program = """
      import os, signal, time
      if os.environ['JAX_PROCESS_ID'] == '0': os.kill(os.getpid(), signal.SIGKILL)
      time.sleep(600)
      """
  began = time.monotonic()
  assert run.launch([sys.executable, '-c', textwrap.dedent(program)], 2) == 128 + signal.SIGKILL
  assert time.monotonic() - began < 10  # not after _END_SECONDS
  assert 'process 0 was killed by SIGKILL' in capfd.readouterr().err


def test_what_a_script_has_started_ends_too(tmp_path, monkeypatch):
  monkeypatch.setattr(run, '_END_SECONDS', 1.0)
  began = time.monotonic()
  # Process 0 has a child that ignores SIGTERM, and process 1 fails as soon as this child is there.
  script = f"""
    if [ $JAX_PROCESS_ID = 1 ]; then until [ -s {tmp_path}/pid ]; do sleep 0.05; done; exit 3; fi
    bash -c 'trap "" TERM; echo $$ > {tmp_path}/pid; sleep 600; true' & wait
  """
  assert run.launch(['bash', '-c', script], 2) == 3
  assert time.monotonic() - began < 60
  status = pathlib.Path('/proc', (tmp_path / 'pid').read_text().strip(), 'status')

  def has_ended():
    # Nobody may have asked for its status.
    return not status.exists() or 'State:\tZ' in status.read_text(encoding='utf-8')

  deadline = time.monotonic() + 10  # A killed process needs a processor to end.
  while not has_ended() and time.monotonic() < deadline:
    time.sleep(0.05)
  assert has_ended()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(number):
  process = _launch(
    """
      import os, signal, sys, time
      def handle(number, frame):
        print('got', number, flush=True)
        sys.exit(75)
      for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, handle)
      print('ready', flush=True)
      time.sleep(600)
      """,
    2,
  )
  for _ in range(2):
    assert 'ready' in process.stdout.readline()
  process.send_signal(number)
  out, err = process.communicate(timeout=60)
  assert sorted(out.splitlines()) == [f'[process {i}] got {int(number)}' for i in range(2)]
  assert process.returncode == 75 and 'the others end' not in err


# A run that takes two seconds to save.
_SAVES = """
    import sys, time
    from t5x_lite import runtime
    with runtime.StopSignals() as signals:
      print('ready', flush=True)
      while not signals.requested: time.sleep(0.01)
      print('saving', flush=True)
      time.sleep(2)
    print('saved', flush=True)
    sys.exit(75)
    """


def test_a_signal_to_the_launcher_and_its_processes_is_one_signal():
  process = _launch(_SAVES, 2)
  for _ in range(2):
    assert 'ready' in process.stdout.readline()
  children = (
    pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
    .read_text(encoding='utf-8')
    .split()
  )
  assert len(children) == 2
  for receiver in (process.pid, *map(int, children)):  # as systemd does
    os.kill(receiver, signal.SIGTERM)
  out, err = process.communicate(timeout=60)
  assert process.returncode == 75, err
  assert sorted(line.split()[-1] for line in out.splitlines()) == ['saved'] * 2 + ['saving'] * 2


# Runs a program whose controlling terminal is its standard input.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_second_ctrl_c_in_a_terminal_ends_all_at_once():
  master, slave = os.openpty()
  process = subprocess.Popen(
    [
      *(
        sys.executable,
        '-c',
        _TAKE_TERMINAL,
        sys.executable,
        '-m',
        't5x_lite',
        'launch',
        '-n',
        '2',
      ),
      *('--', sys.executable, '-c', textwrap.dedent(_SAVES)),
    ],
    stdin=slave,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )
  os.close(slave)
  for line in ('ready', 'saving'):
    if line == 'saving':
      os.write(master, b'\x03')
    for _ in range(2):
      assert line in process.stdout.readline()
  os.write(master, b'\x03')
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 128 + signal.SIGINT and 'saved' not in out
  os.close(master)


# Ends as the next word of a file says: a status, a signal, or 'save' in front of it for a checkpoint.
_ENDS = """
    import os, pathlib, signal, sys, time
    from t5x_lite.runtime import cluster_environment as names
    folder = pathlib.Path(sys.argv[1])
    if names.tells_launcher() and os.environ['JAX_PROCESS_ID'] == '0':
      ends = (folder / 'ends').read_text().split()
      end = ends[len(list(folder.glob('start-*')))]
      place = os.environ['JAX_COORDINATOR_ADDRESS'] + ' ' + os.environ['T5X_LITE_CLUSTER_SECRET']
      (folder / f'start-{time.time_ns()}').write_text(place)
      names.tell_launcher('restored', 40)
      if end.startswith('save'):
        names.tell_launcher('saved', 50)
      end = end.removeprefix('save')
      if end.startswith('SIG'):
        os.kill(os.getpid(), getattr(signal, end))
      sys.exit(int(end))
    """


@pytest.mark.parametrize(
  'ends, max_restarts, status, num_starts',
  [
    ('75 0', 1, 0, 2),
    ('4 74 SIGKILL SIGSEGV 139 75 0', 6, 0, 7),
    ('75 75 75 75', 2, 75, 3),
    ('save75 save75 save75 0', 1, 0, 4),
    ('75 75 save75 75 75 0', 2, 75, 5),
    ('75 1', 5, 1, 2),
    ('2', 5, 2, 1),
    ('3', 5, 3, 1),
    ('5', 5, 5, 1),
    ('130', 5, 130, 1),
    ('SIGINT', 5, 130, 1),
    ('75', 0, 0, 0),
  ],
)
def test_restarts(tmp_path, capfd, ends, max_restarts, status, num_starts):
  (tmp_path / 'ends').write_text(ends)
  program = [sys.executable, '-c', textwrap.dedent(_ENDS), str(tmp_path)]
  found = run.launch(program, 1, max_restarts=max_restarts, restart_seconds=0.01)
  places = [path.read_text() for path in tmp_path.glob('start-*')]
  assert found == status and len(places) == num_starts
  for values in zip(*map(str.split, places), strict=True):  # addresses, secrets
    assert len(set(values)) == num_starts
  lines = re.findall(
    r't5x_lite launch: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: (.*)', capfd.readouterr().err
  )
  num_restarts = max(num_starts - 1, 0)
  assert len(lines) == num_restarts + (run.is_mendable(status) and num_starts > 0)
  for line, end in zip(lines[:num_restarts], ends.split(), strict=False):
    assert re.search(rf'(status |by ){end.removeprefix("save")}\b', line)
    assert f'from step {50 if end.startswith("save") or "step 50" in line else 40} in' in line
  if lines[num_restarts:]:
    assert f'no restart after {max_restarts} without a new checkpoint (--max_restarts)' in lines[-1]


def test_the_waits_before_restarts_double(tmp_path, capfd):
  (tmp_path / 'ends').write_text('75 75 75 save75 75 0')
  program = [sys.executable, '-c', textwrap.dedent(_ENDS), str(tmp_path)]
  assert run.launch(program, 1, max_restarts=3, restart_seconds=0.01) == 0
  assert re.findall(r'in ([\d.]+) s', capfd.readouterr().err) == [
    '0.01',
    '0.02',
    '0.04',
    '0.01',
    '0.02',
  ]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_wait_before_a_restart_ends_at_once(tmp_path, number):
  (tmp_path / 'ends').write_text('74 0')
  process = _launch(_ENDS, 1, tmp_path, flags=['--max_restarts=3', '--restart_seconds=300'])
  assert 'restart 1 of at most 3 from step 40 in 300 s' in process.stderr.readline()
  process.send_signal(number)
  try:
    process.communicate(timeout=10)
  finally:
    process.kill()
  assert process.returncode == 74 and len(list(tmp_path.glob('start-*'))) == 1


def test_a_signal_to_a_run_ends_its_restarts():
  process = _launch(_SAVES, 1, flags=['--max_restarts=3'])
  assert 'ready' in process.stdout.readline()
  process.send_signal(signal.SIGTERM)
  out, err = process.communicate(timeout=60)
  assert process.returncode == 75 and 'ready' not in out and 'restart' not in err


@pytest.mark.parametrize(
  'environment, expected',
  [
    (
      {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': '0,1,2,3'},
      [{'JAX_NUM_CPU_DEVICES': '2', 'XLA_FLAGS': ''}] * 2,
    ),
    (
      {'CUDA_VISIBLE_DEVICES': '3,1,0,2'},
      [{'CUDA_VISIBLE_DEVICES': '3,1'}, {'CUDA_VISIBLE_DEVICES': '0,2'}],
    ),
    (
      {
        'CUDA_VISIBLE_DEVICES': '',
        'XLA_FLAGS': '--xla_a=1 --xla_force_host_platform_device_count=8',
      },
      [{'JAX_NUM_CPU_DEVICES': '2', 'XLA_FLAGS': '--xla_a=1'}] * 2,
    ),
  ],
)
def test_devices(environment, expected):
  assert run._devices(2, 2, environment) == expected


def test_too_few_gpus_and_tpus():
  with pytest.raises(
    ConfigError, match=r'launch -n 2 with --devices_per_process=2 must have 4 GPUs, got 3'
  ):
    run._devices(2, 2, {'CUDA_VISIBLE_DEVICES': '0,1,2'})
  with pytest.raises(ConfigError, match='one process uses all of them'):
    run._devices(2, 1, {'JAX_PLATFORMS': 'tpu'})
