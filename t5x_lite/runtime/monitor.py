"""Monitor of the processes of one run: a fault in one ends all within seconds, with its name; stops are agreed.

JAX keeps the processes of a cluster waiting in a collective when one of them fails, and has no callback for a process
that it has lost. Each process therefore publishes where it is on the key-value store of `jax.distributed`, and listens
to messages there. The store lives in process 0, the lead.

    beat/<process>     overwritten every second: step, phase, and whether the process still runs
    message/<number>   written once, read by all in order: 'failed', 'lost_connection', 'stop', 'stop_at', 'done'

The first 'failed' counts, whatever else fails afterwards. The lead reads all beats, and so finds silent processes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from t5x_lite.command_line.standard_streams import write_without_waiting
from t5x_lite.configuration.masking import masked_text
from t5x_lite.errors import Ending, ExitCode, StoppedOnSignalError, is_of_other_process
from t5x_lite.formatting import printable
from t5x_lite.runtime.connections import Caller
from t5x_lite.runtime.connections import Store
from t5x_lite.runtime.connections import UnsignedValueError
from t5x_lite.runtime.connections import is_connection_error
from t5x_lite.runtime.failure import Failure
from t5x_lite.runtime.failure import describe_error
from t5x_lite.runtime.stacks import print_stacks
from t5x_lite.runtime.stop_requests import StopAgreement
from t5x_lite.runtime.stop_requests import StopRequests
from t5x_lite.runtime.watchdog import awake_seconds

# Prefix of keys.
_ROOT = 't5x_lite'
_BEAT_SECONDS = 1.0
# The same while the processes agree on a stop.
_AGREEING_SECONDS = 0.05
# Longest wait for a call of the store that may have no server any more.
_CALL_SECONDS = 3.0
# The same for the last output, before JAX aborts; see `hold_aborts`.
_FLUSH_SECONDS = 1.0
# The main thread has this time to handle a second signal.
_HANDLER_SECONDS = 2.0
# After the failure of another process, the main thread has this time to end.
_GRACE_SECONDS = 4.0
# The lead, which has the store, then waits for the others for at most this time.
_LINGER_SECONDS = 8.0
# Silence after which a process counts as lost if there are other signs: a broken connection, or a stop that it ignores.
_SUSPICIOUS_SILENCE = 8.0
# Errors of a value that no process of ours has written.
_INVALID = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
# The beat of a process before its first one.
_NO_BEAT = {'stage': 'running', 'step': None, 'phase': 'starting'}


class Monitor:
  """Monitor in one process of a run; see the module.

  Attributes:
    state_fn: returns (number of completed steps or None, phase), which the other processes see.
    describe_fn: returns how an error ends this process.
    process: index of this process.
    num_processes: number of processes.
    stops: agreement on the point at which all processes stop after a signal to one of them.
    caller: calls what may hang, also while Python ends.
  """

  def __init__(
    self,
    store: Store,
    process: int,
    num_processes: int,
    *,
    heartbeat_timeout_seconds: float = 30.0,
    is_gone_fn: Callable[[], bool] = lambda: False,
    exit_fn: Callable[[int], NoReturn] = os._exit,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Store the arguments; `start` begins.

    Args:
      store: the key-value store of the cluster.
      process: index of this process.
      num_processes: number of processes.
      heartbeat_timeout_seconds: silence after which a process counts as lost.
      is_gone_fn: returns whether the server of the store is known to be gone; asked when it does not answer.
      exit_fn: ends the process with a status.
      clock: returns seconds.
    """
    self.state_fn: Callable[[], tuple[int | None, str]] = lambda: (None, 'starting')
    self.describe_fn: Callable[[BaseException], Ending] = describe_error
    self.process = process
    self.num_processes = num_processes
    self.stops = StopAgreement()
    self.caller = Caller()
    self._store = store
    self._timeout = heartbeat_timeout_seconds
    self._is_gone_fn = is_gone_fn
    self._exit_fn = exit_fn
    self._clock = clock
    self._lock = threading.Lock()
    self._closed = threading.Event()
    self._wake = threading.Event()
    self._threads: list[threading.Thread] = []
    # 'running', 'done' or 'ending'.
    self._stage = 'running'
    self._state: tuple[int | None, str] = (None, 'starting')
    self._state_at = clock()
    self._contact_at = clock()
    self._next_message = 0
    # Of all processes, on the lead: newest beat, and when it changed; and the seconds of silence since then.
    self._beats: dict[int, tuple[Mapping[str, Any], float]] = {}
    self._silences = [0.0] * num_processes
    self._judged_at = clock()
    self._failure: Failure | None = None
    self._has_failed = threading.Event()
    self._has_printed = self._has_printed_stacks = self._has_lost_store = False
    self._num_values = 0
    self._end_fns: list[Callable[[Failure], None]] = []
    self._is_suspicious = False
    self._all_done = threading.Event()
    self._all_are_there = True
    self._signal_pipe: tuple[int, int] | None = None
    self._former_wakeup_fd = -1

  # ---- Life ----------------------------------------------------------------------------------------------------------

  def start(self) -> None:
    """Start the threads; in the main thread, also watch for signals."""
    self._started_at = self._clock()
    if threading.current_thread() is threading.main_thread():
      self._signal_pipe = os.pipe()
      for end in self._signal_pipe:
        os.set_blocking(end, False)
      # Python's handlers wait for the main thread, which may hang in a collective; this pipe does not.
      self._former_wakeup_fd = signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
      # A signal to a child is none to this process.
      os.register_at_fork(after_in_child=_forget_signals)
    for run in (self._beat, self._listen, self._watch):
      thread = threading.Thread(target=run, name=f't5x_lite-monitor{run.__name__}', daemon=True)
      self._threads.append(thread)
      thread.start()

  def finish(self) -> bool:
    """Wait until all processes have done their work; without this, JAX ends those that wait for 5 minutes.

    Returns:
      Whether all are still there, so that JAX's own end, a barrier, does not wait for one that has left.
    """
    self._stage = 'done'
    self._wake.set()
    self._all_done.wait()
    self.close()
    return self._all_are_there

  def close(self) -> None:
    """End the threads, without waiting for other processes."""
    self._closed.set()
    self._wake.set()
    if self._signal_pipe is not None and threading.current_thread() is threading.main_thread():
      signal.set_wakeup_fd(self._former_wakeup_fd)
    for thread in self._threads:
      thread.join(2 * _CALL_SECONDS)
    if self._signal_pipe is not None and not any(thread.is_alive() for thread in self._threads):
      for end in self._signal_pipe:
        os.close(end)
      self._signal_pipe = None

  # ---- Failures ------------------------------------------------------------------------------------------------------

  @property
  def failure(self) -> Failure | None:
    """The first failure of the run; None before."""
    return self._failure

  def call_at_end(self, fn: Callable[[Failure], None]) -> None:
    """Call a function before the process ends because of another one."""
    self._end_fns.append(fn)

  def report(self, error: BaseException) -> Failure:
    """Tell all processes that this one has failed, print the error, and return the failure that was first.

    If another process has failed before, this is printed instead. For an error that may come from there, such as that
    of a broken connection, it is waited for. Further calls print nothing. Afterwards the process ends within seconds,
    even if its main thread waits for another one.

    Args:
      error: the error of this process.
    """
    ending = self.describe_fn(error)
    if self._failure is None:
      is_lost = is_connection_error(error)
      if is_lost:
        self._post('lost_connection')
      if is_lost or is_of_other_process(error):
        self._has_failed.wait(_SUSPICIOUS_SILENCE + _CALL_SECONDS)
    first_line = masked_text(str(error).partition('\n')[0], sys.orig_argv)
    failure = self._fail(f'{type(error).__name__}: {first_line}'[:500].rstrip('.'), ending.status)
    if failure.process != self.process:
      self.print_reason()
    elif self._prints_first():
      ending.show()
    return failure

  def _prints_first(self) -> bool:
    with self._lock:
      is_first = not self._has_printed
      self._has_printed = True
    return is_first

  def _fail(self, text: str, status: int) -> Failure:
    if self._failure is not None:
      return self._failure
    step, phase = self._read_state()
    failure = Failure(process=self.process, status=status, error=text, step=step, phase=phase)
    self._post('failed', **dataclasses.asdict(failure))
    if not self._has_failed.wait(_CALL_SECONDS):  # the store is gone
      self._on_failure(failure)
    return self._failure or failure

  @contextlib.contextmanager
  def reporting(self) -> Iterator[None]:
    """Context whose error is reported at once, since closing files and writers may wait for the other processes."""
    try:
      yield
    except BaseException as error:
      if not (isinstance(error, StoppedOnSignalError) and self.stops.has_agreed):
        self.report(error)
      raise

  def end_all(self, message: str, status: int) -> NoReturn:
    """End all processes from any thread of this one, with a message and the stacks of its threads."""
    self._has_printed_stacks = True
    print_stacks(message)
    self._has_printed = True
    self.leave(self._fail(message.partition('. ')[0], int(status)).status)

  def print_reason(self) -> None:
    """Print once why this process ends, if another one has failed."""
    failure = self._failure
    if failure is None:
      return
    is_own = failure.process == self.process and failure.error
    if is_own or not self._prints_first():
      return
    if failure.error:
      more = 'Its output has the whole message'
    else:
      more = 'Rerun the command on all machines to resume'
    text = f't5x_lite: [process {self.process}] ends because {failure}. {more}.\n'
    write_without_waiting(text)

  def leave(self, status: int) -> NoReturn:
    """End this process after a failure. The lead waits for the others, since their connections end with it."""
    for stream in (sys.stdout, sys.stderr):
      self.caller.returns_within(_FLUSH_SECONDS, stream.flush)
    if self.process == 0:
      end = self._clock() + _LINGER_SECONDS
      while self._clock() < end and not self._others_have_left():
        time.sleep(_AGREEING_SECONDS)
    elif not self._has_lost_store:
      self._stage = 'ending'
      self.caller.returns_within(_CALL_SECONDS, self._send_beat)
    self._exit_fn(status)

  def _others_have_left(self) -> bool:
    if not self.caller.returns_within(_CALL_SECONDS, self._read_beats):
      return True
    now = self._clock()
    for process, (beat, at) in list(self._beats.items()):
      has_left = beat['stage'] == 'ending' or now - at > _SUSPICIOUS_SILENCE
      if process and not has_left:
        return False
    return True

  def _on_failure(self, failure: Failure) -> None:
    with self._lock:
      if self._failure is not None:
        return
      self._failure = failure
    self._has_failed.set()
    self.caller.start(functools.partial(self._end_after_grace, failure))

  def _end_after_grace(self, failure: Failure) -> None:
    """End the process, whose main thread may hang in a collective with the one that failed."""
    try:
      if failure.status == ExitCode.WATCHDOG and not self._has_printed_stacks:
        # Before the main thread is interrupted: it may be the cause of the hang.
        text = f't5x_lite: [process {self.process}] {failure}.'
        self.caller.returns_within(_FLUSH_SECONDS, functools.partial(print_stacks, text))
      if failure.error:
        self._closed.wait(_GRACE_SECONDS)
      self.print_reason()
      if failure.process != self.process:
        for fn in self._end_fns:
          self.caller.returns_within(_FLUSH_SECONDS, functools.partial(fn, failure))
    finally:
      self.leave(failure.status)

  # ---- What others do ------------------------------------------------------------------------------------------------

  def value_of_lead(self, value: str) -> str:
    """Return the value that the lead passes; all processes must call this in the same order."""
    self._num_values += 1
    key = f'{_ROOT}/value/{self._num_values}'
    if self.process == 0:
      self._store.key_value_set(key, value)
      return value
    while True:  # Should the lead fail, this process ends.
      try:
        return self._store.blocking_key_value_get(key, int(_BEAT_SECONDS * 1000))
      except Exception:  # not yet there
        time.sleep(_AGREEING_SECONDS)

  def others_are_in(self, phases: Collection[str]) -> bool:
    """Return whether another process is in one of `phases`, see `state_fn`; False if it is unknown."""
    if self.process and not self.caller.returns_within(_CALL_SECONDS, self._read_beats):
      return False
    return any(
      beat['phase'] in phases
      for process, (beat, _) in list(self._beats.items())
      if process != self.process
    )

  def describe_processes(self) -> str:
    """Return a sentence that says where each process is, those that are behind first; empty if it is unknown."""
    if self.process and not self.caller.returns_within(_CALL_SECONDS, self._read_beats):
      return ''
    groups: dict[tuple[int, str], dict[int, float]] = {}
    for process, (beat, at) in sorted(self._beats.items()):
      step = beat['step']
      if step is None:
        step = -1
      seconds_of = groups.setdefault((step, beat['phase']), {})
      seconds_of[process] = beat['seconds'] + self._clock() - at
    if not groups:
      return ''
    # Those that wait for another one at the same step are in the collectives of 'step'.
    in_order = sorted(groups, key=lambda group: (group[0], group[1] == 'step', len(groups[group])))
    parts = [_describe_group(step, phase, groups[step, phase]) for step, phase in in_order]
    return f'Processes, the last one first: {"; ".join(parts)}.'

  # ---- Threads -------------------------------------------------------------------------------------------------------

  def _beat(self) -> None:
    while not self._closed.is_set():
      try:
        self._send_beat()
        if self.process == 0:
          self._read_beats()
          self._judge()
      except Exception as error:  # an unknown error of the runtime must not end the monitor
        logging.getLogger(__name__).debug('The key-value store does not answer (%s).', error)
      agreeing = self.stops.is_pending or self._stage == 'done'
      self._wake.wait(_AGREEING_SECONDS if agreeing else _BEAT_SECONDS)
      self._wake.clear()

  def _read_state(self) -> tuple[int | None, str]:
    state = self._state
    with contextlib.suppress(Exception):
      state = self.state_fn()
    if state != self._state:
      self._state = state
      self._state_at = self._clock()
    return state

  def _send_beat(self) -> None:
    step, phase = self._read_state()
    now = self._clock()
    beat = {
      'at': now,
      'step': step,
      'phase': phase,
      'seconds': now - self._state_at,
      'limit': self.stops.limit,
      'stage': self._stage,
    }
    self._store.key_value_set(f'{_ROOT}/beat/{self.process}', json.dumps(beat), True)
    self._contact_at = self._clock()

  def _read_beats(self) -> None:
    beats = self._store.key_value_dir_get(f'{_ROOT}/beat/')
    now = self._clock()
    for key, text in beats:
      try:
        process = int(key.rpartition('/')[2])
        beat = _parse_beat(text)
      except _INVALID:  # not from a process of ours
        continue
      old = self._beats.get(process)
      is_new = old is None or old[0]['at'] != beat['at']
      if is_new and 0 <= process < self.num_processes:
        self._beats[process] = beat, now

  def _judge(self) -> None:
    """On the lead: find silent processes, the point at which all stop, and the end of all."""
    before = self._judged_at
    self._judged_at = self._clock()
    # Without the time in which this process was stopped.
    awake = awake_seconds(self._judged_at - before, 2 * _BEAT_SECONDS)
    for process in range(self.num_processes):
      beat, at = self._beats.get(process, (_NO_BEAT, self._started_at))
      if at > before:
        self._silences[process] = 0.0
      else:
        self._silences[process] += awake
      is_lost = beat['stage'] == 'running' and self._silences[process] > self._limit
      if is_lost and self._failure is None:
        failure = Failure(
          process=process,
          status=int(ExitCode.RESTART),
          step=beat['step'],
          phase=beat['phase'],
          seconds=self._silences[process],
        )
        self._post('failed', **dataclasses.asdict(failure))
        return
    if len(self._beats) < self.num_processes:
      return
    beats = [beat for beat, _ in list(self._beats.values())]
    limits = [beat['limit'] for beat in beats if beat['stage'] == 'running']
    if self.stops.is_pending and limits and None not in limits:
      self._post('stop_at', point=max(limits))
    stages = {beat['stage'] for beat in beats}
    if 'running' not in stages and not self._all_done.is_set():
      self._post('done', all_are_there='ending' not in stages)

  def _listen(self) -> None:
    while not self._closed.is_set():
      try:
        text = self._store.blocking_key_value_get(
          f'{_ROOT}/message/{self._next_message}', int(_BEAT_SECONDS * 1000)
        )
      except UnsignedValueError:
        self._next_message += 1
        continue
      except Exception:  # no message yet, or the store is gone, which `_watch` notices
        self._closed.wait(_AGREEING_SECONDS)
        continue
      self._next_message += 1
      try:
        self._handle(json.loads(text))
      except _INVALID as error:  # not from a process of ours
        logging.getLogger(__name__).debug('Ignored an invalid message (%r).', error)

  def _handle(self, message: dict[str, Any]) -> None:
    kind = message['kind']
    if kind == 'failed':
      self._on_failure(Failure.from_message(message))
    elif kind == 'lost_connection':
      self._is_suspicious = True
    elif kind == 'stop':
      self.stops.begin(printable(str(message['request'])))
      self._is_suspicious = True
      self._wake.set()
    elif kind == 'stop_at':
      self.stops.agree(int(message['point']))
      self._is_suspicious = False  # All have answered, and now save.
    elif kind == 'done':
      self._all_are_there = message['all_are_there'] is True
      self._all_done.set()

  def _on_lost_store(self) -> None:
    """End soon: JAX aborts the process when it loses the store, see `hold_aborts`."""
    self._has_lost_store = True
    self._on_failure(
      Failure(process=0, status=int(ExitCode.RESTART), seconds=self._clock() - self._contact_at)
    )

  @property
  def _limit(self) -> float:
    """Seconds of silence that are tolerated."""
    if self._is_suspicious:
      return min(self._timeout, _SUSPICIOUS_SILENCE)
    return self._timeout

  def _watch(self) -> None:
    """Watch for signals, and for a store that does not answer."""
    seen = self._contact_at
    seconds = 0.0
    now = self._clock()
    requests = StopRequests()
    while not self._closed.is_set():
      self._look_for_signals(requests)
      before = now
      now = self._clock()
      if seen != self._contact_at:
        seen = self._contact_at
        seconds = 0.0
        continue
      seconds += awake_seconds(now - before, 2 * _BEAT_SECONDS)
      if seconds > self._limit or (seconds > 2 * _BEAT_SECONDS and self._is_gone_fn()):
        self._on_lost_store()
        return

  def _look_for_signals(self, requests: StopRequests) -> None:
    if self._signal_pipe is None:
      time.sleep(_BEAT_SECONDS / 2)
      return
    if not select.select([self._signal_pipe[0]], [], [], _BEAT_SECONDS / 2)[0]:
      return
    for number in os.read(self._signal_pipe[0], 64):
      if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        continue
      if requests.add(number):  # A main thread that does not hang has ended the process before.
        self.caller.start(functools.partial(self._exit_soon, 128 + number))
      request = f'{signal.Signals(number).name} to process {self.process}'
      self._is_suspicious = True
      self.caller.start(functools.partial(self._post, 'stop', request=request))

  def _exit_soon(self, status: int) -> None:
    time.sleep(_HANDLER_SECONDS)
    self._exit_fn(status)

  def _post(self, kind: str, **details: Any) -> None:
    """Write a message; give up if the store is gone."""
    text = json.dumps({'kind': kind, **details})

    def write() -> None:
      number = self._next_message
      while True:
        try:
          self._store.key_value_set(f'{_ROOT}/message/{number}', text)
          return
        except Exception as error:
          if 'ALREADY_EXISTS' not in str(error):
            return
          number += 1

    self.caller.returns_within(_CALL_SECONDS, write)


def _parse_beat(text: str) -> dict[str, Any]:
  """Return a beat, see `Monitor`.

  Raises:
    KeyError, TypeError, ValueError: it is not one.
  """
  beat = json.loads(text)
  return {
    'at': float(beat['at']),
    'step': _int_or_none(beat['step']),
    'phase': printable(str(beat['phase'])),
    'seconds': float(beat['seconds']),
    'limit': _int_or_none(beat['limit']),
    'stage': str(beat['stage']),
  }


def _int_or_none(value: Any) -> int | None:
  if value is None:
    return None
  return int(value)


def _describe_group(step: int, phase: str, seconds: Mapping[int, float]) -> str:
  """Return where the processes of one step and phase are, and for how long; the step is negative before the first."""
  names = ', '.join(map(str, list(seconds)[:8]))
  if len(seconds) > 8:
    names += ', ...'
  where = 'before the first step'
  if step >= 0:
    where = f'after step {step:,}'
  noun = 'processes' if len(seconds) > 1 else 'process'
  return f'{noun} {names} {where} in {phase!r} for {max(seconds.values()):.0f} s'


def _forget_signals() -> None:
  with contextlib.suppress(ValueError):  # not in the main thread
    if current_monitor() is not None:
      signal.set_wakeup_fd(-1)


_current: Monitor | None = None


def reporting_errors(phase: str = '') -> contextlib.AbstractContextManager[None]:
  """Return the context `Monitor.reporting` of this process; one without effect if it runs alone.

  Enter it last, so that an error is reported before anything is closed, which may wait for other processes.

  Args:
    phase: what the process does from now on, for the messages of others; '' keeps `Monitor.state_fn`.
  """
  if _current is None:
    return contextlib.nullcontext()
  if phase:
    _current.state_fn = lambda: (None, phase)
  return _current.reporting()


def current_monitor() -> Monitor | None:
  """Return the monitor of this process; None if it runs alone."""
  return _current


def set_current_monitor(monitor: Monitor | None) -> None:
  """Set the monitor of this process."""
  global _current
  _current = monitor
