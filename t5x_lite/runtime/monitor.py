"""Monitor of the processes of one run: a fault in one ends all within seconds, with its name; stops are agreed.

JAX keeps the processes of a cluster waiting in a collective when one of them fails, and has no callback for a process
that it has lost. Each process therefore publishes where it is on the key-value store of `jax.distributed`, and listens
to news there. The store lives in process 0, the lead.

    beat/<process>   overwritten every second: step, phase, and whether the process still runs
    news/<number>    written once, read by all in order: 'failed', 'lost_connection', 'stop', 'stop_at', 'done'

The first 'failed' counts, whatever else fails afterwards. The lead reads all beats, and so finds silent processes.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from typing import Any, NoReturn, Protocol

from t5x_lite.errors import ExitCode, StoppedOnSignalError
from t5x_lite.runtime.connections import is_connection_error, returns_within
from t5x_lite.runtime.stacks import print_stacks
from t5x_lite.runtime.stop_agreement import StopAgreement
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
# After the failure of another process, the main thread has this time to end.
_GRACE_SECONDS = 4.0
# The lead, which has the store, then waits for the others for at most this time.
_LINGER_SECONDS = 8.0
# Silence after which a process counts as lost if there are other signs: a broken connection, or a stop that it ignores.
_SUSPICIOUS_SILENCE = 8.0


class Store(Protocol):
  """The methods of JAX's distributed runtime client that are used."""

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
    """Set a value; raise for an existing key, unless it may be overwritten."""

  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
    """Return the keys below a folder, and their values."""

  def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
    """Return a value as soon as it exists; raise after the time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """Reason for the end of all processes of a run.

  Attributes:
    process: the process that failed first.
    status: exit status of all processes.
    error: type and first line of the exception; empty for a process that is silent.
    step: number of completed steps of the process; None if unknown.
    phase: what it did, e.g. 'data'; empty if unknown.
    seconds: how long it has been silent.
  """

  process: int
  status: int
  error: str = ''
  step: int | None = None
  phase: str = ''
  seconds: float = 0.0

  def __str__(self) -> str:
    """Return a sentence without a full stop."""
    where = '' if self.step is None else f'after step {self.step:,}'
    if self.error:
      return f'process {self.process} failed{where and " " + where}: {self.error}'
    last = ' '.join(part for part in (where, self.phase and f'in the phase {self.phase!r}') if part)
    return (f'process {self.process} has given no sign of life for {self.seconds:.0f} s{last and f", the last {last}"}: '
            'it was killed, or its machine or network has failed')


class Monitor:
  """Monitor in one process of a run; see the module.

  Attributes:
    state_fn: returns (number of completed steps or None, phase), which the other processes see.
    process: index of this process.
    num_processes: number of processes.
    stops: agreement on the point at which all processes stop after a signal to one of them.
  """

  def __init__(self, store: Store, process: int, num_processes: int, *, heartbeat_timeout_seconds: float = 30.0,
               is_gone_fn: Callable[[], bool] = lambda: False, name: str = 't5x_lite', exit_fn: Callable[[int], NoReturn] = os._exit,
               clock: Callable[[], float] = time.monotonic):
    """Store the arguments; `start` begins.

    Args:
      store: the key-value store of the cluster.
      process: index of this process.
      num_processes: number of processes.
      heartbeat_timeout_seconds: silence after which a process counts as lost.
      is_gone_fn: returns whether the server of the store is known to be gone; asked when it does not answer.
      name: beginning of messages.
      exit_fn: ends the process with a status.
      clock: returns seconds.
    """
    self.state_fn: Callable[[], tuple[int | None, str]] = lambda: (None, 'starting')
    self.process, self.num_processes = process, num_processes
    self.stops = StopAgreement()
    self._store = store
    self._timeout = heartbeat_timeout_seconds
    self._is_gone_fn = is_gone_fn
    self._name = name
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
    self._next_news = 0
    # Of all processes, on the lead: newest beat, and when it changed.
    self._beats: dict[int, tuple[Mapping[str, Any], float]] = {}
    self._failure: Failure | None = None
    self._has_failed = threading.Event()
    self._has_said = self._has_lost_store = False
    self._end_fns: list[Callable[[Failure], None]] = []
    self._is_suspicious = False
    self._all_done, self._all_are_there = threading.Event(), True
    self._signal_pipe: tuple[int, int] | None = None

  # ---- Life ----------------------------------------------------------------------------------------------------------

  def start(self) -> None:
    """Start the threads; in the main thread, also watch for signals."""
    self._started_at = self._clock()
    if threading.current_thread() is threading.main_thread():
      self._signal_pipe = os.pipe()
      for end in self._signal_pipe:
        os.set_blocking(end, False)
      # Python's handlers wait for the main thread, which may hang in a collective; this pipe does not.
      signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
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
      signal.set_wakeup_fd(-1)
    for thread in self._threads:
      thread.join(2 * _CALL_SECONDS)

  # ---- Failures ------------------------------------------------------------------------------------------------------

  @property
  def failure(self) -> Failure | None:
    """The first failure of the run; None before."""
    return self._failure

  def call_at_end(self, fn: Callable[[Failure], None]) -> None:
    """Call a function before the process ends because of another one."""
    self._end_fns.append(fn)

  def report(self, error: BaseException, status: int) -> Failure:
    """Tell all processes that this one has failed, and return the failure that was first.

    The error of a broken connection is the failure of another process: it is waited for, as long as a silent process is
    tolerated.

    Args:
      error: the error of this process.
      status: exit status.
    """
    text = f'{type(error).__name__}: {str(error).partition(chr(10))[0]}'[:500].rstrip('.')
    if self._failure is None and self.num_processes > 1 and is_connection_error(error):
      self._post('lost_connection')
      self._has_failed.wait(self._timeout + _CALL_SECONDS)
    return self.report_text(text, status)

  def report_text(self, text: str, status: int) -> Failure:
    """Tell all processes that this one has failed; see `report`."""
    if self._failure is None:
      step, phase = self._read_state()
      failure = Failure(process=self.process, status=status, error=text, step=step, phase=phase)
      self._post('failed', **dataclasses.asdict(failure))
      if not self._has_failed.wait(_CALL_SECONDS):  # the store is gone
        self._on_failure(failure)
    return self._failure

  @contextlib.contextmanager
  def reporting(self) -> Iterator[None]:
    """Context whose error is reported at once, since closing files and writers may wait for the other processes."""
    try:
      yield
    except Exception as error:
      if not (isinstance(error, StoppedOnSignalError) and self.stops.has_agreed):
        self.report(error, int(getattr(error, 'exit_code', ExitCode.ERROR)))
      raise

  def end_all(self, message: str, status: int) -> NoReturn:
    """End all processes from any thread of this one, with a message and the stacks of its threads."""
    print_stacks(message)
    self.leave(self.report_text(message.partition('. ')[0], int(status)).status)

  def say(self) -> None:
    """Print once why this process ends, if another one has failed."""
    with self._lock:
      failure = self._failure
      if self._has_said or failure is None or (failure.process == self.process and failure.error):
        return
      self._has_said = True
    more = 'Its output has the whole message' if failure.error else 'Rerun the command on all machines to resume'
    text = f'{self._name}: [process {self.process}] ends because {failure}. {more}.\n'
    with contextlib.suppress(OSError):
      os.write(2, text.encode())

  def leave(self, status: int) -> NoReturn:
    """End this process after a failure. The lead waits for the others, since their connections end with it."""
    for stream in (sys.stdout, sys.stderr):
      returns_within(_FLUSH_SECONDS, stream.flush)
    if self.process == 0:
      end = self._clock() + _LINGER_SECONDS
      while self._clock() < end and not self._others_have_left():
        time.sleep(_AGREEING_SECONDS)
    elif not self._has_lost_store:
      self._stage = 'ending'
      returns_within(_CALL_SECONDS, self._send_beat)
    self._exit_fn(status)

  def _others_have_left(self) -> bool:
    if not returns_within(_CALL_SECONDS, self._read_beats):
      return True
    now = self._clock()
    return all(beat['stage'] == 'ending' or now - at > _SUSPICIOUS_SILENCE
               for process, (beat, at) in self._beats.items() if process)

  def _on_failure(self, failure: Failure) -> None:
    with self._lock:
      if self._failure is not None:
        return
      self._failure = failure
    self._has_failed.set()
    # The main thread of a process that reports its error ends it; one that was taken for lost knows nothing.
    if failure.process != self.process or not failure.error:
      threading.Thread(target=self._end_after_grace, name='t5x_lite-monitor-end', daemon=True).start()

  def _end_after_grace(self) -> None:
    """End the process, whose main thread may hang in a collective with the one that failed."""
    failure = self._failure
    if failure.error:
      self._closed.wait(_GRACE_SECONDS)
    self.say()
    for fn in self._end_fns:
      returns_within(_FLUSH_SECONDS, lambda fn=fn: fn(failure))
    self.leave(failure.status)

  # ---- What others do ------------------------------------------------------------------------------------------------

  def describe_processes(self) -> str:
    """Return a sentence that says where each process is, those that are behind first; empty if it is unknown."""
    if self.process and not returns_within(_CALL_SECONDS, self._read_beats):
      return ''
    groups: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for process, (beat, at) in sorted(self._beats.items()):
      step = -1 if beat['step'] is None else beat['step']
      groups.setdefault((step, beat['phase']), []).append((process, beat['seconds'] + self._clock() - at))
    parts = []
    # Those that wait for another one at the same step are in the collectives of 'step'.
    for (step, phase), members in sorted(
        groups.items(), key=lambda item: (item[0][0], item[0][1] == 'step', len(item[1]))):
      names = ', '.join(str(process) for process, _ in members[:8]) + (', ...' if len(members) > 8 else '')
      where = 'before the first step' if step < 0 else f'after step {step:,}'
      parts.append(f'process{"es" if len(members) > 1 else ""} {names} {where} in {phase!r} for '
                   f'{max(seconds for _, seconds in members):.0f} s')
    return f'Processes, the last one first: {"; ".join(parts)}.' if parts else ''

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
      self._state, self._state_at = state, self._clock()
    return state

  def _send_beat(self) -> None:
    step, phase = self._read_state()
    now = self._clock()
    self._store.key_value_set(f'{_ROOT}/beat/{self.process}', json.dumps({
        'at': now, 'step': step, 'phase': phase, 'seconds': now - self._state_at, 'limit': self.stops.limit,
        'stage': self._stage}), True)
    self._contact_at = self._clock()

  def _read_beats(self) -> None:
    beats = self._store.key_value_dir_get(f'{_ROOT}/beat/')
    now = self._clock()
    for key, text in beats:
      process, beat = int(key.rpartition('/')[2]), json.loads(text)
      old = self._beats.get(process)
      if old is None or old[0]['at'] != beat['at']:
        self._beats[process] = beat, now

  def _judge(self) -> None:
    """On the lead: find silent processes, the point at which all stop, and the end of all."""
    now = self._clock()
    beats = [self._beats.get(process) for process in range(self.num_processes)]
    limit = min(self._timeout, _SUSPICIOUS_SILENCE) if self._is_suspicious else self._timeout
    for process, found in enumerate(beats):
      beat, at = found or ({'stage': 'running', 'step': None, 'phase': 'starting'}, self._started_at)
      if self._failure is None and beat['stage'] == 'running' and now - at > limit:
        self._post('failed', **dataclasses.asdict(Failure(
            process=process, status=int(ExitCode.RESTART), step=beat['step'], phase=beat['phase'], seconds=now - at)))
        return
    if None in beats:
      return
    limits = [beat['limit'] for beat, _ in beats]
    if self.stops.is_pending and None not in limits:
      self._post('stop_at', point=max(limits))
    stages = {beat['stage'] for beat, _ in beats}
    if 'running' not in stages and not self._all_done.is_set():
      self._post('done', all_are_there='ending' not in stages)

  def _listen(self) -> None:
    while not self._closed.is_set():
      try:
        text = self._store.blocking_key_value_get(f'{_ROOT}/news/{self._next_news}', int(_BEAT_SECONDS * 1000))
      except Exception:  # no news yet, or the store is gone, which `_watch` notices
        continue
      self._next_news += 1
      self._handle(json.loads(text))

  def _handle(self, news: dict[str, Any]) -> None:
    kind = news.pop('kind')
    if kind == 'failed':
      self._on_failure(Failure(**news))
    elif kind == 'lost_connection':
      self._is_suspicious = True
    elif kind == 'stop':
      self.stops.begin(news['request'])
      self._is_suspicious = True
      self._wake.set()
    elif kind == 'stop_at':
      self.stops.agree(news['point'])
    elif kind == 'done':
      self._all_are_there = news['all_are_there']
      self._all_done.set()

  def _on_lost_store(self) -> None:
    """End soon: JAX aborts the process when it loses the store, see `hold_aborts`."""
    self._has_lost_store = True
    self._on_failure(Failure(process=0, status=int(ExitCode.RESTART), seconds=self._clock() - self._contact_at))

  def _watch(self) -> None:
    """Watch for signals, and for a store that does not answer."""
    seen, seconds, now, num_signals = self._contact_at, 0.0, self._clock(), 0
    while not self._closed.is_set():
      num_signals = self._look_for_signals(num_signals)
      before, now = now, self._clock()
      if seen != self._contact_at:
        seen, seconds = self._contact_at, 0.0
        continue
      seconds += awake_seconds(now - before, 2 * _BEAT_SECONDS)
      limit = min(self._timeout, _SUSPICIOUS_SILENCE) if self._is_suspicious else self._timeout
      if seconds > limit or (seconds > 2 * _BEAT_SECONDS and self._is_gone_fn()):
        self._on_lost_store()
        return

  def _look_for_signals(self, num_signals: int) -> int:
    if self._signal_pipe is None:
      time.sleep(_BEAT_SECONDS / 2)
      return num_signals
    if not select.select([self._signal_pipe[0]], [], [], _BEAT_SECONDS / 2)[0]:
      return num_signals
    for number in os.read(self._signal_pipe[0], 64):
      if number not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        continue
      num_signals += number != signal.SIGHUP
      if num_signals > 1:
        self._exit_fn(128 + number)
      request = f'{signal.Signals(number).name} to process {self.process}'
      self._is_suspicious = True
      threading.Thread(target=self._post, args=('stop',), kwargs={'request': request}, daemon=True).start()
    return num_signals

  def _post(self, kind: str, **details: Any) -> None:
    """Write news; give up if the store is gone."""
    text = json.dumps({'kind': kind, **details})

    def write() -> None:
      number = self._next_news
      while True:
        try:
          self._store.key_value_set(f'{_ROOT}/news/{number}', text)
          return
        except Exception as error:
          if 'ALREADY_EXISTS' not in str(error):
            return
          number += 1

    returns_within(_CALL_SECONDS, write)


_current: Monitor | None = None


def current_monitor() -> Monitor | None:
  """Return the monitor of this process; None if it runs alone."""
  return _current


def set_current_monitor(monitor: Monitor | None) -> None:
  """Set the monitor of this process."""
  global _current
  _current = monitor
