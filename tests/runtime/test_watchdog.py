"""The watchdog: limits per activity, warnings, and the end of a process that hangs."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from t5x_lite import runtime
from t5x_lite.errors import ConfigError
from t5x_lite.runtime import watchdog as watchdog_lib

_ROOT = pathlib.Path(__file__).parents[2]


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
  with pytest.raises(ConfigError, match='max_step_seconds` must be .* got -1'):
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
  watchdog = runtime.Watchdog(
    None,
    timeouts.append,
    on_warning=warnings.append,
    warning_seconds={'step': 0.1, 'evaluation': 60.0, 'saving': 60.0},
  )
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
    assert 'no step was completed within 0.1' in warning and ' seconds after step 3. ' in warning
    assert 'set `max_step_seconds` to limit the wait' in warning
  watchdog.close()

  # 20 times the median of 0.05 s is a second.
  watchdog = runtime.Watchdog(
    None,
    on_warning=warnings.append,
    warning_seconds={'step': 0.1, 'evaluation': 60.0, 'saving': 60.0},
  )
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
    with watchdog.watching('compiling'):
      time.sleep(0.3)
    assert not timeouts
    with watchdog.watching('saving'):
      time.sleep(0.25)
      assert not timeouts
      timeouts.wait(1)
    timeouts.wait(2)
  assert (
    'no save was completed within 0.4 seconds after step 5' in timeouts[0]
    and 'max_saving_seconds' in timeouts[0]
  )
  assert (
    'no step was completed within 0.2 seconds after step 5' in timeouts[1]
    and 'max_step_seconds' in timeouts[1]
  )
  watchdog.close()
  for name in ('max_evaluation_seconds', 'max_saving_seconds'):
    with pytest.raises(ConfigError, match=f'{name}` must be .* got 0'):
      runtime.Watchdog(**{name: 0})


@pytest.mark.parametrize('activity', ['step', 'evaluation', 'saving', 'compiling', None])
def test_the_watchdog_warns_each_time_without_a_step_and_never_ends_the_run(activity):
  warnings, timeouts = _Messages(), []
  watchdog = runtime.Watchdog(
    None, timeouts.append, warn_every_seconds=0.2, on_warning=warnings.append
  )
  with watchdog.watching():
    for step in range(8):  # steps within the interval
      watchdog.beat(step)
      time.sleep(0.05)
    assert not warnings
    watchdog.beat(8)
    with watchdog.watching(activity) if activity else contextlib.nullcontext():
      for _ in range(16):  # beats without a completed step, as of an evaluation or a wait for data
        watchdog.beat()
        time.sleep(0.05)
  watchdog.close()
  assert len(warnings) in (3, 4) and not timeouts
  assert all('seconds after step 8, see `warn_every_seconds`' in text for text in warnings)
  assert [text.split('within ')[1][:3] for text in warnings[:3]] == ['0.2', '0.4', '0.6']


def test_warnings_at_an_interval_and_the_limit_of_a_step_are_independent():
  warnings, timeouts = _Messages(), _Messages()
  watchdog = runtime.Watchdog(
    0.5, timeouts.append, warn_every_seconds=0.2, on_warning=warnings.append
  )
  with watchdog.watching():
    timeouts.wait(1)
  watchdog.close()
  assert len(warnings) >= 3 and 'max_step_seconds' in timeouts[0]
  with pytest.raises(ConfigError, match='warn_every_seconds` must be .* got 0'):
    runtime.Watchdog(warn_every_seconds=0)


@contextlib.contextmanager
def _automatic(**kwargs):
  """Yields a watchdog with the limit 'auto', of at least 0.2 s, that watches; and the messages of its limits."""
  timeouts = _Messages()
  watchdog = runtime.Watchdog('auto', timeouts.append, auto_seconds=0.2, **kwargs)
  with contextlib.closing(watchdog), watchdog.watching():
    yield watchdog, timeouts


def test_an_automatic_limit_counts_from_the_second_step_on():
  with _automatic() as (watchdog, timeouts):
    time.sleep(0.5)  # the first step may load programs
    assert not timeouts
    watchdog.beat(1)
    watchdog.beat(2)
    timeouts.wait(1)
  assert (
    'no step was completed within 0.2 seconds after step 2. Set max_step_seconds' in timeouts[0]
  )
  assert 'to a larger number if this duration is normal, otherwise rerun' in timeouts[0]


def test_an_automatic_limit_is_50_medians_of_long_steps():
  activity = watchdog_lib.Activity('step', 'max_step_seconds', 'auto', 600.0)
  assert activity.limit is None
  for seconds, limit in (
    (500.0, 25_000.0),  # the first step, which counts only until the second
    (1.0, 1800.0),
    (40.0, 1800.0),
    (40.0, 2000.0),
    (1e6, 2000.0),
    (60.0, 2000.0),
    (60.0, 2500.0),
  ):
    activity.complete(seconds)
    assert activity.limit == limit
  for _ in range(101):
    activity.complete(36.1)
  assert activity.limit == pytest.approx(1805.0)
  activity.leave(70.0)
  assert activity.limit == pytest.approx(1805.0)
  for _ in range(101):  # A step that is completed after a pause.
    activity.leave(30.0)
    activity.complete(10.0)
  assert activity.limit == 2000.0
  for limit in (7.0, None):
    assert watchdog_lib.Activity('step', 'max_step_seconds', limit, 600.0).limit == limit


def test_an_automatic_limit_knows_a_step_that_is_computed_before_a_pause():
  with _automatic() as (watchdog, timeouts):
    for step in range(1, 4):
      time.sleep(
        0.1
      )  # A step that waits for the device while it is dispatched, and is reported later.
      with watchdog.watching('saving'):
        pass
      watchdog.beat(step)
    time.sleep(1.0)  # 50 times the median of 0.1 s is five seconds.
    assert not timeouts


@pytest.mark.parametrize('activity', ['evaluation', 'saving', 'compiling'])
def test_an_automatic_limit_is_only_that_of_a_step(activity):
  with _automatic() as (watchdog, timeouts):
    watchdog.beat(1)
    watchdog.beat(2)
    with watchdog.watching(activity):
      watchdog.beat(2)
      watchdog.beat(2)
      time.sleep(0.5)
    assert not timeouts
    timeouts.wait(1)


def test_an_automatic_limit_counts_anew_while_other_processes_are_busy():
  busy = [True]
  with _automatic(others_are_busy_fn=lambda: busy[0]) as (watchdog, timeouts):
    watchdog.beat(1)
    time.sleep(0.5)
    assert not timeouts
    busy[0] = False
    timeouts.wait(1)
  timeouts = _Messages()  # a number is one of everything
  watchdog = runtime.Watchdog(0.2, timeouts.append, others_are_busy_fn=lambda: True)
  with contextlib.closing(watchdog), watchdog.watching():
    timeouts.wait(1)


@pytest.mark.parametrize('value', ['automatic', '', 0, True, float('nan'), [1]])
def test_invalid_limits_of_a_step(value):
  with pytest.raises(
    ConfigError,
    match=r"max_step_seconds` must be a number > 0, 'auto' or None, got .* 50 times the median",
  ):
    runtime.Watchdog(value)


def _run(code, **kwargs):
  return subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(code)],
    cwd=_ROOT,
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    **kwargs,
  )


def test_the_watchdog_shows_the_stacks_and_ends_a_process_that_hangs():
  process = _run("""
      import threading
      from t5x_lite import runtime

      def hangs_here():
        threading.Event().wait()

      with runtime.Watchdog(0.1).watching():
        hangs_here()
      """)
  _, err = process.communicate(timeout=60)
  assert process.returncode == 4
  assert (
    'no step was completed within 0.1 seconds' in err and 'hangs_here' in err and 'watchdog' in err
  )


def test_a_stopped_and_continued_process_is_not_late():
  process = _run(
    """
      import sys
      from t5x_lite import runtime
      with runtime.Watchdog(1.0).watching() as _:
        print('ready', flush=True)
        sys.stdin.readline()
        print('continued', flush=True)
        sys.stdin.readline()
      """,
    stdin=subprocess.PIPE,
  )
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
