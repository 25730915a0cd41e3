"""Signals: the first asks, the second ends the process, ignored ones stay ignored."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from t5x_lite import runtime

_ROOT = pathlib.Path(__file__).parents[2]


def _run(code, **kwargs):
  return subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(code)],
    cwd=_ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    **kwargs,
  )


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_handlers_are_restored(number, capfd):
  before = signal.getsignal(number)
  with runtime.StopSignals('finishing the batch') as signals:
    assert not signals.requested and signals.name == ''
    os.kill(os.getpid(), number)
    assert signals.requested and signals.name == number.name
  assert signal.getsignal(number) is before
  again = {
    signal.SIGINT: 'press Ctrl-C again',
    signal.SIGTERM: 'send SIGTERM again',
    signal.SIGHUP: 'send SIGTERM twice',
  }[number]
  assert (
    f'{number.name}: finishing the batch; {again} to exit immediately.' in capfd.readouterr().err
  )


def test_the_second_signal_ends_the_process_at_once():
  process = _run("""
      import time
      from t5x_lite import runtime
      with runtime.StopSignals() as signals:
        print('ready', flush=True)
        while not signals.requested:
          time.sleep(0.01)
        print('asked', flush=True)
        time.sleep(60)
      """)
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGINT)
  assert process.stdout.readline() == 'asked\n'
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 128 + signal.SIGTERM
  assert 'press Ctrl-C again to exit immediately' in err


def test_closing_a_terminal_only_asks_and_ignored_signals_stay_ignored():
  process = _run("""
      import signal, time
      for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
      from t5x_lite import runtime
      with runtime.StopSignals() as signals:  # as under nohup, in the background
        for number in (signal.SIGHUP, signal.SIGINT):
          signal.raise_signal(number)
        print(signals.requested, flush=True)
        signal.raise_signal(signal.SIGTERM)
        print(signals.name, flush=True)
      assert signal.getsignal(signal.SIGHUP) is signal.getsignal(signal.SIGINT) is signal.SIG_IGN

      signal.signal(signal.SIGHUP, signal.SIG_DFL)
      with runtime.StopSignals() as signals:
        # A shell passes on what the kernel has sent as well, and a scheduler may stop the session.
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
          signal.raise_signal(number)
        print(signals.name, flush=True)
        signal.raise_signal(signal.SIGTERM)  # the same request, passed on by the launcher
        time.sleep(1.1)
        signal.raise_signal(signal.SIGTERM)
      """)
  out, _ = process.communicate(timeout=60)
  assert (
    out.split() == ['False', 'SIGTERM', 'SIGHUP'] and process.returncode == 128 + signal.SIGTERM
  )


def test_the_same_sigterm_does_not_replace_the_status_of_a_process_that_ends():
  """A stop may take less time than the second in which a SIGTERM is the same."""
  received = []

  def record(number, frame):
    del frame
    received.append(number)

  before = signal.signal(signal.SIGTERM, record)
  try:
    with pytest.raises(ValueError), runtime.StopSignals():
      os.kill(os.getpid(), signal.SIGTERM)
      raise ValueError
    os.kill(os.getpid(), signal.SIGTERM)
    assert not received
    time.sleep(1.1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is record
  finally:
    signal.signal(signal.SIGTERM, before)
