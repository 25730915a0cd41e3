"""The process around the loop: what a person sees, the watchdog, signals."""

import io
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import pytest

from t5x_lite import runtime
from t5x_lite.errors import ConfigError

_ROOT = pathlib.Path(__file__).parent.parent.parent


class _Clock:

  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


class _Terminal(io.StringIO):

  def isatty(self):
    return True

  def screen(self):
    """Returns what a terminal shows: a carriage return goes back to the start of the line, ESC[K clears the rest."""
    lines = []
    for line in self.getvalue().split('\n'):
      shown = ''
      for part in line.split('\r'):
        clears = '\x1b[K' in part
        part = part.replace('\x1b[K', '')
        shown = part if clears else part + shown[len(part):]
      lines.append(shown)
    return lines


def test_one_line_in_place_on_a_terminal(monkeypatch):
  monkeypatch.setenv('COLUMNS', '120')
  clock, terminal = _Clock(), _Terminal()
  progress = runtime.Progress(stream=terminal, clock=clock)
  progress.note('starting')
  clock.now += 100
  progress.begin(2000, 1000, tokens_per_step=5000)
  for step in range(1001, 1101):
    clock.now += 0.5
    assert progress.due
    progress.update(step, {'loss': 2.34567, 'accuracy': 0.5})
    assert not progress.due
  assert terminal.screen() == [
      'step 1,100/2,000 ( 55%)  loss 2.346  accuracy 0.5  2 steps/s  10.0k tokens/s  ETA 7:30']
  progress.note('saving')
  assert terminal.screen() == ['saving']
  progress.log('evaluated')
  progress.update(2000, {'loss': 1.0}, last=True)
  assert terminal.screen()[0] == 'evaluated'
  assert terminal.screen()[1].startswith('step 2,000/2,000 (100%)  loss 1') and 'took 0:50' in terminal.screen()[1]
  assert terminal.screen()[2:] == ['']


def test_lines_do_not_wrap_on_a_narrow_terminal(monkeypatch):
  monkeypatch.setenv('COLUMNS', '20')
  terminal = _Terminal()
  runtime.Progress(10, stream=terminal, clock=_Clock()).update(5, {'loss': 1.0})
  assert len(terminal.screen()[0]) < 20


def test_plain_lines_become_rarer_where_there_is_no_terminal():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(10**6, stream=stream, clock=clock)
  progress.note('nothing of this')
  for step in range(1, 24 * 3600 // 5):
    clock.now += 5
    if progress.due:
      progress.update(step, {})
  lines = stream.getvalue().splitlines()
  assert '\r' not in stream.getvalue() and 'nothing' not in stream.getvalue()
  assert 200 < len(lines) < 600
  assert lines[0].startswith('step         2/1,000,000')
  assert runtime.Progress(10, enabled=False, stream=stream, clock=clock).due is False


def test_pauses_do_not_count_into_the_rate():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(100, stream=stream, clock=clock)
  clock.now += 10
  progress.update(10, {})
  paused_at = progress.pause()
  clock.now += 1000
  progress.resume(paused_at)
  clock.now += 10
  progress.update(20, {})
  assert '  1 steps/s' in stream.getvalue().splitlines()[1]


def test_notes_become_lines_where_that_is_asked_for():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(stream=stream, clock=clock)
  for second in range(1, 25):
    clock.now += 1
    progress.note('busy')
    progress.note(f'second {second}', lines=True)
  assert stream.getvalue().splitlines() == ['second 10', 'second 20']


# ---- Stacks ----------------------------------------------------------------------------------------------------------


def test_stacks_name_threads_and_functions(capsys):
  release = threading.Event()

  def hangs_here():
    release.wait()

  thread = threading.Thread(target=hangs_here, name='a thread that hangs')
  thread.start()
  try:
    while not any(f.name == 'wait' for f in traceback.extract_stack(sys._current_frames()[thread.ident])):
      time.sleep(0.01)
    runtime.print_stacks('Nothing happens.')
  finally:
    release.set()
    thread.join()
  err = capsys.readouterr().err
  assert err.startswith('\nNothing happens.\nStacks of all threads:\n')
  stack = err.partition("Thread 'a thread that hangs'")[2].partition('Thread ')[0].splitlines()
  places = [line.rpartition(' in ')[2] for line in stack[1:]]
  assert places.index('wait') < places.index('hangs_here') and f'"{__file__}"' in stack[1 + places.index('hangs_here')]
  assert "Thread 'MainThread'" in err and ' in test_stacks_name_threads_and_functions' in err


# ---- Watchdog --------------------------------------------------------------------------------------------------------


def test_the_watchdog_barks_once_a_step_is_late_and_only_while_watching():
  barked = threading.Event()
  messages = []

  def on_timeout(message):
    messages.append(message)
    barked.set()

  watchdog = runtime.Watchdog(0.2, on_timeout)
  time.sleep(0.3)
  with watchdog.watching():
    for step in range(5):
      time.sleep(0.02)
      watchdog.beat(step)
  time.sleep(0.4)  # Not watching: evaluation may take its time.
  assert not messages
  with watchdog.watching():
    watchdog.beat(7)
    assert barked.wait(10)
  assert len(messages) == 1 and '0.2 seconds after step 7' in messages[0]
  watchdog.close()
  with pytest.raises(ConfigError, match='max_step_seconds is -1'):
    runtime.Watchdog(-1)
  off = runtime.Watchdog(None)
  with off.watching():
    off.beat(1)
  off.close()


class _Messages(list):
  """Collects messages of the watchdog's thread."""

  def wait(self, number):
    deadline = time.monotonic() + 10
    while len(self) < number and time.monotonic() < deadline:
      time.sleep(0.01)
    time.sleep(0.3)
    assert len(self) == number, self


def test_the_watchdog_warns_once_per_hang_unless_that_is_the_usual_pace():
  warnings, timeouts = _Messages(), []
  watchdog = runtime.Watchdog(None, timeouts.append, on_warning=warnings.append,
                              warning_seconds={'step': 0.1, 'evaluation': 60.0, 'saving': 60.0})
  with watchdog.watching():
    watchdog.beat(3)
    warnings.wait(1)
    watchdog.beat()
    warnings.wait(2)
    for _ in range(10):  # while the run waits for data
      watchdog.beat()
      time.sleep(0.02)
    warnings.wait(3)
  warnings.wait(3)
  for warning in warnings:
    assert 'no step was completed for 0.1' in warning and ' seconds after step 3. ' in warning
    assert '`max_step_seconds` sets a limit' in warning
  watchdog.close()

  # 20 times the median of 0.05 s is a second.
  watchdog = runtime.Watchdog(None, on_warning=warnings.append,
                              warning_seconds={'step': 0.1, 'evaluation': 60.0, 'saving': 60.0})
  with watchdog.watching():
    for step in range(5):
      time.sleep(0.05)
      watchdog.beat(step)
    time.sleep(0.5)
    assert len(warnings) == 3
    warnings.wait(4)
  watchdog.close()
  assert not timeouts


def test_the_watchdog_has_a_limit_for_each_activity():
  timeouts = _Messages()
  watchdog = runtime.Watchdog(0.2, timeouts.append, max_saving_seconds=0.4)
  with watchdog.watching():
    watchdog.beat(5)
    with watchdog.watching('evaluation'):
      time.sleep(0.6)
    with watchdog.watching(None):
      time.sleep(0.3)
    assert not timeouts
    with watchdog.watching('saving'):
      time.sleep(0.25)
      assert not timeouts
      timeouts.wait(1)
    timeouts.wait(2)
  assert 'no save was completed for 0.4 seconds after step 5' in timeouts[0] and 'max_saving_seconds' in timeouts[0]
  assert 'no step was completed for 0.2 seconds after step 5' in timeouts[1] and 'max_step_seconds' in timeouts[1]
  watchdog.close()
  for name in ('max_evaluation_seconds', 'max_saving_seconds'):
    with pytest.raises(ConfigError, match=f'{name} is 0'):
      runtime.Watchdog(**{name: 0})


def _run(code, **kwargs):
  return subprocess.Popen([sys.executable, '-c', textwrap.dedent(code)], cwd=_ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, **kwargs)


def test_the_watchdog_shows_the_stacks_and_ends_a_process_that_hangs():
  process = _run('''
      import threading
      from t5x_lite import runtime

      def hangs_here():
        threading.Event().wait()

      with runtime.Watchdog(0.1).watching():
        hangs_here()
      ''')
  _, err = process.communicate(timeout=60)
  assert process.returncode == 4
  assert 'no step was completed for 0.1 seconds' in err and 'hangs_here' in err and 'watchdog' in err


def test_a_stopped_and_continued_process_is_not_late():
  process = _run('''
      import sys
      from t5x_lite import runtime
      with runtime.Watchdog(1.0).watching() as _:
        print('ready', flush=True)
        sys.stdin.readline()
        print('continued', flush=True)
        sys.stdin.readline()
      ''', stdin=subprocess.PIPE)
  assert process.stdout.readline() == 'ready\n'
  time.sleep(0.3)  # the watchdog has looked
  process.send_signal(signal.SIGSTOP)
  time.sleep(1.5)
  process.send_signal(signal.SIGCONT)
  time.sleep(0.2)  # the watchdog looks several times before the step ends
  process.stdin.write('\n')
  process.stdin.flush()
  assert process.stdout.readline() == 'continued\n'
  assert process.wait(timeout=30) == 4  # the time in which it can run counts
  process.communicate()


# ---- Signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_handlers_are_restored(number, capfd):
  before = signal.getsignal(number)
  with runtime.StopSignals('finishing the batch') as signals:
    assert not signals.requested and signals.name == ''
    os.kill(os.getpid(), number)
    assert signals.requested and signals.name == number.name
  assert signal.getsignal(number) is before
  again = 'SIGTERM twice' if number == signal.SIGHUP else 'once more'
  assert f'{number.name}: finishing the batch; {again} to exit at once.' in capfd.readouterr().err


def test_the_second_signal_ends_the_process_at_once():
  process = _run('''
      import time
      from t5x_lite import runtime
      with runtime.StopSignals() as signals:
        print('ready', flush=True)
        while not signals.requested:
          time.sleep(0.01)
        print('asked', flush=True)
        time.sleep(60)
      ''')
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGINT)
  assert process.stdout.readline() == 'asked\n'
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=30)
  assert process.returncode == 128 + signal.SIGTERM
  assert 'once more to exit at once' in err


def test_closing_a_terminal_only_asks_and_ignored_signals_stay_ignored():
  process = _run('''
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
        signal.raise_signal(signal.SIGTERM)
      ''')
  out, _ = process.communicate(timeout=60)
  assert out.split() == ['False', 'SIGTERM', 'SIGHUP'] and process.returncode == 128 + signal.SIGTERM


def test_the_plural_of_a_batch():
  clock, stream = _Clock(), io.StringIO()
  progress = runtime.Progress(10, stream=stream, clock=clock, unit='batch')
  clock.now += 4
  progress.update(4, {}, last=True)
  assert '  1 batches/s' in stream.getvalue()
