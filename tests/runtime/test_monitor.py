"""The monitor of the processes of a run, with several in one process; real processes are in tests/multiprocess."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from t5x_lite.errors import ConfigError, Ending, SaveError, StoppedOnSignalError, of_other_process
from t5x_lite.runtime import monitor as monitor_lib
from t5x_lite.runtime.connections import SignedStore
from tests.runtime.fake_store import FakeStore

_SECONDS = 20
_ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
  for name, seconds in (
    ('_BEAT_SECONDS', 0.02),
    ('_AGREEING_SECONDS', 0.005),
    ('_CALL_SECONDS', 0.3),
    ('_GRACE_SECONDS', 0.1),
    ('_LINGER_SECONDS', 2.0),
    ('_SUSPICIOUS_SILENCE', 0.4),
  ):
    monkeypatch.setattr(monitor_lib, name, seconds)


class Cluster:
  """Monitors of one run, each with the status that its process ended with."""

  def __init__(self, num_processes, secret='', **options):
    self.store = FakeStore()
    store = SignedStore(self.store, secret) if secret else self.store
    self.statuses: dict[int, int] = {}
    self.values_at_end: dict[int, dict[str, str]] = {}
    options = {'heartbeat_timeout_seconds': 1.0, **options}
    self.monitors = [
      monitor_lib.Monitor(store, i, num_processes, exit_fn=self._exit_fn(i), **options)
      for i in range(num_processes)
    ]

  def _exit_fn(self, index):
    def end(status):
      self.values_at_end[index] = dict(self.store.values)
      self.statuses[index] = status
      self.monitors[index]._closed.set()

    return end

  def ended(self, *indices):
    """Waits until these have ended, and returns their statuses."""
    deadline = time.monotonic() + _SECONDS
    while not set(indices) <= self.statuses.keys() and time.monotonic() < deadline:
      time.sleep(0.01)
    return {index: self.statuses.get(index) for index in indices}


@contextlib.contextmanager
def running(num_processes, **options):
  cluster = Cluster(num_processes, **options)
  try:
    in_threads(
      [monitor.start for monitor in cluster.monitors]
    )  # only a main thread watches for signals
    yield cluster
  finally:
    cluster.store.is_gone = False
    for monitor in cluster.monitors:
      monitor.close()


def in_threads(fns):
  """Calls the functions at the same time, and returns what they return."""
  results = [None] * len(fns)

  def run(i, fn):
    results[i] = fn()

  threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(fns)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(_SECONDS)
    assert not thread.is_alive()
  return results


@pytest.mark.parametrize('hanging', [0, 1])
def test_all_print_their_stacks_if_one_makes_no_progress(hanging, capfd):
  with running(2) as cluster:
    cluster.monitors[hanging].end_all('Watchdog: no step was completed. Rerun.', 4)
    assert cluster.ended(0, 1) == {0: 4, 1: 4}
  err = capfd.readouterr().err
  assert err.count('Stacks of all threads:\nThread') == 2
  other = 1 - hanging
  assert (
    f'[process {other}] process {hanging} failed: Watchdog: no step was completed.\nStacks' in err
  )


def test_other_failures_have_no_stacks(capfd):
  with running(2) as cluster:
    cluster.monitors[1].report(ValueError('bad'))
    assert cluster.ended(0, 1) == {0: 1, 1: 1}
  assert 'Stacks' not in capfd.readouterr().err


def test_each_process_knows_whether_another_one_saves():
  with running(3) as cluster:
    for process, phase in enumerate(('step', 'saving', 'step')):
      cluster.monitors[process].state_fn = lambda phase=phase: (7, phase)
    deadline = time.monotonic() + _SECONDS
    while not cluster.monitors[0].others_are_in(('saving',)) and time.monotonic() < deadline:
      time.sleep(0.01)
    found = [monitor.others_are_in(('saving', 'evaluation')) for monitor in cluster.monitors]
    assert found == [True, False, True]
    cluster.store.is_gone = True
    assert not cluster.monitors[2].others_are_in(('compiling',))


@pytest.mark.parametrize('failing', [0, 2])
def test_an_error_ends_all_processes_with_its_status_and_name(failing, capfd, monkeypatch):
  # So that a thread that gets no time under load is not taken for a process that has gone.
  for name in ('_CALL_SECONDS', '_LINGER_SECONDS', '_SUSPICIOUS_SILENCE'):
    monkeypatch.setattr(monitor_lib, name, _SECONDS)
  with running(3) as cluster:
    cluster.monitors[failing].state_fn = lambda: (41, 'data')
    cluster.monitors[failing].describe_fn = lambda error: Ending(f'all about it: {error}', 3)
    failure = cluster.monitors[failing].report(ValueError('bad record 17.\nMore about it.'))
    assert (failure.process, failure.status, failure.step) == (failing, 3, 41)
    cluster.monitors[failing].leave(failure.status)
    assert set(cluster.ended(0, 1, 2).values()) == {3}
  err = capfd.readouterr().err
  assert (
    err.count(
      f'because process {failing} failed after step 41: ValueError: bad record 17. Its output has'
    )
    == 2
  )
  assert f'[process {failing}] ends' not in err
  assert (
    err.count('all about it: bad record 17.\nMore about it.') == err.count('More about it') == 1
  )
  # The store is that of the lead, which ends when the others no longer need it.
  for process in (1, 2):
    assert (
      json.loads(cluster.values_at_end[0][f'{monitor_lib._ROOT}/beat/{process}'])['stage']
      == 'ending'
    )


def test_the_first_of_several_errors_counts():
  with running(4) as cluster:
    for monitor in cluster.monitors:
      monitor.describe_fn = lambda error, monitor=monitor: Ending(
        f'all about {monitor.process}',
        monitor.process + 10,
      )
    failures = in_threads(
      [lambda m=m: m.report(KeyError(str(m.process))) for m in cluster.monitors]
    )
    assert len(set(failures)) == 1
    assert failures[0].status == failures[0].process + 10
  with running(3) as cluster:
    for process in (2, 0, 1):  # all have failed before they hear of each other
      cluster.monitors[process]._post('failed', process=process, status=process + 10, error='x')
    cluster.monitors[2].leave(12)
    assert cluster.ended(0, 1) == {0: 12, 1: 12}
    assert {monitor.failure.process for monitor in cluster.monitors} == {2}


def test_a_silent_process_ends_the_others_with_a_status_to_restart_on(capfd):
  with running(3) as cluster:
    cluster.monitors[1].state_fn = lambda: (7, 'step')
    time.sleep(0.1)
    cluster.monitors[1]._closed.set()  # its threads end, as after a kill
    assert cluster.ended(0, 2) == {0: 75, 2: 75}
    assert 1 not in cluster.statuses
  err = capfd.readouterr().err
  assert (
    err.count(
      "process 1 has given no sign of life for 1 s, the last after step 7 in the phase 'step'"
    )
    == 2
  )
  assert err.count('Rerun the command on all machines') == 2


def test_a_process_that_was_taken_for_lost_ends_too(capfd):
  with running(2) as cluster:
    late = cluster.monitors[1]  # it hears the others, and they do not hear it in time
    late._send_beat = lambda: setattr(late, '_contact_at', time.monotonic())
    assert cluster.ended(0, 1) == {0: 75, 1: 75}
  assert '[process 1] ends because process 1 has given no sign of life' in capfd.readouterr().err


def test_a_process_that_never_begins_is_missed():
  cluster = Cluster(3)
  in_threads([cluster.monitors[i].start for i in (0, 2)])
  assert cluster.ended(0, 2) == {0: 75, 2: 75}
  for i in (0, 2):
    assert cluster.monitors[i].failure.process == 1
    cluster.monitors[i].close()


def test_the_error_of_a_connection_is_that_of_the_process_that_is_gone():
  lost = ValueError('UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:20897')
  with running(3, heartbeat_timeout_seconds=60.0) as cluster:
    cluster.monitors[2]._closed.set()
    began = time.monotonic()
    failure = cluster.monitors[1].report(lost)
    assert (failure.process, failure.status, failure.error) == (2, 75, '')
    assert time.monotonic() - began < 30  # not 60
  with running(2, heartbeat_timeout_seconds=1.0) as cluster:  # nobody is gone
    failure = cluster.monitors[1].report(lost)
    assert (failure.process, failure.status) == (1, 1)
    assert 'Gloo AllGather failed' in failure.error


@pytest.mark.parametrize('is_known', [True, False])
def test_a_store_that_does_not_answer_is_the_end(is_known, capfd):
  asked = []
  with running(
    2,
    heartbeat_timeout_seconds=1.0 if not is_known else 60.0,
    is_gone_fn=lambda: asked.append(1) or is_known,
  ) as cluster:
    time.sleep(0.1)
    assert not asked
    began = time.monotonic()
    cluster.store.is_gone = True
    assert cluster.ended(1) == {1: 75}
    assert is_known or time.monotonic() - began >= 0.9
  assert 'because process 0 has given no sign of life' in capfd.readouterr().err


def test_an_error_about_another_process_gives_way_to_the_cause():
  about = ConfigError('The lead process has failed; see its message.')
  try:
    raise SaveError('the last save') from of_other_process(about)
  except SaveError as error:
    follow_up = error
  with running(2) as cluster:
    cluster.monitors[0].describe_fn = lambda error: Ending('the cause', 5)
    follower = threading.Thread(target=cluster.monitors[1].report, args=(follow_up,))
    follower.start()
    time.sleep(0.1)
    assert cluster.monitors[0].failure is None
    assert cluster.monitors[0].report(FileExistsError('results')).status == 5
    follower.join(_SECONDS)
    assert cluster.monitors[1].failure == cluster.monitors[0].failure
  with running(2) as cluster:  # without a cause
    assert cluster.monitors[1].report(follow_up).process == 1


def test_the_own_failure_ends_a_process_that_hangs_while_it_closes_files():
  with running(2) as cluster:
    cluster.monitors[1].describe_fn = lambda error: Ending('x', 3)
    with pytest.raises(SystemExit), cluster.monitors[1].reporting():
      raise SystemExit(3)
    assert cluster.ended(0, 1) == {0: 3, 1: 3}


def test_after_an_agreed_stop_a_save_may_take_its_time():
  with running(2, heartbeat_timeout_seconds=60.0) as cluster:
    cluster.monitors[0]._post('stop', request='SIGTERM to process 0')
    in_threads(
      [lambda m=m: [time.sleep(0.01) for _ in iter(m.stops.is_due, True)] for m in cluster.monitors]
    )
    assert all(monitor.stops.has_agreed for monitor in cluster.monitors)
    cluster.monitors[1]._send_beat = lambda: None
    time.sleep(1.0)
    assert cluster.monitors[0].failure is None


def test_time_in_which_all_processes_were_stopped_is_no_silence():
  passed = [0.0]
  with running(2, clock=lambda: time.monotonic() + passed[0]) as cluster:
    late = cluster.monitors[1]
    send_beat, late._send_beat = (
      late._send_beat,
      lambda: setattr(late, '_contact_at', late._clock()),
    )
    time.sleep(0.1)
    passed[0] = 1000.0
    time.sleep(0.1)
    late._send_beat = send_beat
    time.sleep(0.3)
    assert not cluster.statuses and cluster.monitors[0].failure is None


_SIGNALS = """
import ctypes, os, signal, sys, threading, time
from t5x_lite.runtime import monitor as monitor_lib
from tests.runtime.fake_store import FakeStore
monitor = monitor_lib.Monitor(FakeStore(), 0, 1, heartbeat_timeout_seconds=60)
monitor.start()
monitor_lib.set_current_monitor(monitor)
signal.signal(signal.SIGTERM, lambda *args: None)
if sys.argv[1] == 'child':
  child = os.fork()
  if not child:
    signal.signal(signal.SIGTERM, lambda *args: os._exit(0))
    print('ready', flush=True)
    time.sleep(60)
  time.sleep(0.5)
  os.kill(child, signal.SIGTERM)
  os.waitpid(child, 0)
  time.sleep(2)
  print(f'request {monitor.stops.request!r}')
elif sys.argv[1] == 'hang':
  mutex = ctypes.create_string_buffer(64)  # locked twice, so that no handler in Python can run
  print('ready', flush=True)
  while not ctypes.CDLL(None).pthread_mutex_lock(mutex): pass
os._exit(0)
"""


def _start_with_signals(*what):
  return subprocess.Popen(
    [sys.executable, '-c', _SIGNALS, *what],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': str(_ROOT)},
  )


def test_a_signal_to_a_child_is_not_for_the_run():
  process = _start_with_signals('child')
  out, _ = process.communicate(timeout=60)
  assert process.returncode == 0 and "request ''" in out


def test_all_get_the_value_of_the_lead():
  with running(3) as cluster:
    for name in 'ab':
      assert (
        in_threads([lambda m=m: m.value_of_lead(f'{name}{m.process}') for m in cluster.monitors])
        == [f'{name}0'] * 3
      )


def test_a_second_signal_ends_a_process_whose_main_thread_hangs():
  process = _start_with_signals('hang')
  assert process.stdout.readline() == 'ready\n'
  process.terminate()
  process.terminate()  # The same request, which came through the launcher too.
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(3)
  process.terminate()
  assert process.wait(60) == 128 + signal.SIGTERM
  process.stdout.close()


def test_all_stop_at_the_same_point_wherever_the_signal_comes():
  with running(3) as cluster:
    points = [0] * 3

    def run(monitor, seconds):
      while not monitor.stops.is_due():
        points[monitor.process] += 1
        time.sleep(seconds)
        if monitor.process == 1 and points[1] == 5:
          monitor._post('stop', request='SIGTERM to process 1')
      return points[monitor.process]

    stops = in_threads(
      [
        lambda m=m, s=s: run(m, s)
        for m, s in zip(cluster.monitors, (0.03, 0.02, 0.001), strict=True)
      ]
    )
    assert len(set(stops)) == 1, stops
    assert all(monitor.stops.has_agreed for monitor in cluster.monitors)
    assert all(monitor.stops.request == 'SIGTERM to process 1' for monitor in cluster.monitors)


def test_an_agreed_stop_is_no_failure():
  with running(2) as cluster:
    monitor = cluster.monitors[1]
    monitor.stops.has_agreed = True
    with pytest.raises(StoppedOnSignalError), monitor.reporting():
      raise StoppedOnSignalError('saved')
    assert monitor.failure is None
    with pytest.raises(OSError), monitor.reporting():
      raise OSError('disk')
    assert monitor.failure.error == 'OSError: disk'
    assert cluster.ended(0) == {0: 1}


def test_processes_wait_for_each_other_at_the_end():
  with running(3) as cluster:
    done = []
    threads = [
      threading.Thread(target=lambda m=m: (m.finish(), done.append(m.process)))
      for m in cluster.monitors[:2]
    ]
    for thread in threads:
      thread.start()
    time.sleep(0.3)
    assert not done
    assert cluster.monitors[2].finish()
    for thread in threads:
      thread.join(_SECONDS)
    assert sorted(done) == [0, 1]
    assert not cluster.statuses


def test_a_process_that_leaves_at_the_end_is_not_waited_for():
  with running(3) as cluster:
    cluster.monitors[1].leave(75)  # it was done, and got a signal while it waited
    assert in_threads([cluster.monitors[i].finish for i in (0, 2)]) == [False, False]


@pytest.mark.parametrize('asked', [0, 2])
@pytest.mark.parametrize('step, others', [(41, '0, 2, 3'), (42, '0, 3')])
def test_the_process_that_is_behind_comes_first(asked, step, others):
  states = [
    (42, 'step'),
    (step, 'data'),
    (42, 'step') if step < 42 else (step, 'data'),
    (42, 'step'),
  ]
  with running(4) as cluster:
    for monitor, state in zip(cluster.monitors, states, strict=True):
      monitor.state_fn = lambda state=state: state
    time.sleep(0.3)
    text = cluster.monitors[asked].describe_processes()
  behind = 'process 1' if step < 42 else 'processes 1, 2'
  # A busy machine takes a second or two.
  assert re.sub(r'for [0-5] s', 'for 0 s', text) == (
    f"Processes, the last one first: {behind} after step {step} in 'data' for 0 s; processes {others} "
    "after step 42 in 'step' for 0 s."
  )


def test_what_is_called_at_the_end_may_hang():
  called = []
  with running(2) as cluster:
    cluster.monitors[0].call_at_end(lambda failure: time.sleep(_SECONDS))
    cluster.monitors[0].call_at_end(called.append)
    cluster.monitors[1].report(RuntimeError('x'))
    assert cluster.ended(0) == {0: 1}
  assert [failure.process for failure in called] == [1]


def test_values_of_strangers_change_nothing():
  with running(2, heartbeat_timeout_seconds=60.0) as cluster:
    for number, text in enumerate(
      ['no JSON', '[]', '{}', '{"kind": "failed"}', '{"kind": "stop_at", "point": null}', 'null']
    ):
      cluster.store.key_value_set(f't5x_lite/message/{number}', text)
    for name in ('0/x', 'x', '-1', '2', '7'):
      cluster.store.key_value_set(f't5x_lite/beat/{name}', 'no JSON', True)
    cluster.store.key_value_set(
      't5x_lite/beat/9',
      json.dumps({'at': 0, 'step': 1, 'phase': '', 'seconds': 0, 'limit': None, 'stage': 'ending'}),
      True,
    )
    time.sleep(0.3)
    assert not cluster.statuses and cluster.monitors[0].failure is None
    failure = {
      'process': 1,
      'status': 0,
      'error': 'a\x1b[2Jb',
      'step': None,
      'phase': 'x',
      'seconds': 0,
    }
    cluster.store.key_value_set('t5x_lite/message/6', json.dumps({'kind': 'failed', **failure}))
    assert set(cluster.ended(0, 1).values()) == {1}  # never 0
    assert cluster.monitors[0].failure.error == r'a\x1b[2Jb'


def test_processes_with_a_secret_ignore_unsigned_messages():
  with running(2, secret='secret', heartbeat_timeout_seconds=60.0) as cluster:
    message = json.dumps({'kind': 'stop', 'request': 'SIGTERM to process 0'})
    cluster.store.key_value_set('t5x_lite/message/0', message)
    time.sleep(0.3)
    assert not any(monitor.stops.request for monitor in cluster.monitors)
    cluster.monitors[1].report(ValueError('own'))
    assert set(cluster.ended(0, 1).values()) == {1}
    assert str(cluster.monitors[0].failure).endswith('ValueError: own')
