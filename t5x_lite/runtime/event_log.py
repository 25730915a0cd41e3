"""Log of the events of a process: the file `events.jsonl`, hooks, the clock of phases, and the goodput at the end.

Unlike metrics, events are never deleted: a resumed run appends to the file, also to one whose last line was cut off
when the process was killed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from typing import Any

import jax

import t5x_lite
from t5x_lite.configuration import masking
from t5x_lite.configuration import mesh_rules
from t5x_lite.errors import NonFiniteMetricError, StoppedOnSignalError
from t5x_lite.runtime import goodput
from t5x_lite.runtime.events import Event
from t5x_lite.runtime.events import read_events
from t5x_lite.storage import files

# After this fraction of the time of the process without events, within these seconds, 'progress' is written, so that
# little is unknown about a process that is killed, and the file of a week has 10,000 lines.
_PROGRESS_FRACTION = 0.01
_PROGRESS_SECONDS = (2.0, 60.0)
# Loggers whose warnings are events.
_LOGGERS = ('t5x_lite', 'moe')
_MAX_MESSAGE = 1000  # characters


_File = files.AppendedFile | files.AppendedParts


class EventLog(contextlib.AbstractContextManager):
  """Log of the events of one process of a run, and clock of its phases.

  Entering it emits 'start', leaving it 'stop' if `stop` was not called before. Warnings of the loggers of t5x_lite and
  moe become events in between. `emit` may be called by any thread, `phase` only by one. No method raises if a hook
  fails or the file cannot be written: a hook that raises is reported once, and a full disk loses events at most.

  Hooks get the events in the order of the file, one event at a time, and no lock is held meanwhile, so a hook may wait
  for other threads. An event that is emitted during the hooks of another one is passed to the hooks after it, by the
  same thread. Not passed are events of the hooks themselves, and warnings during the hooks of a warning: such hooks
  would be called without end.

  Attributes:
    step: number of completed steps, for the next event; None before the run has its state.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    process: int = 0,
    event_fns: Sequence[Callable[[Event], None]] = (),
    log_fn: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
  ):
    """Start the clock; nothing is written before `open`.

    Args:
      path: path of the file, which process 0 alone writes.
      process: index of this process.
      event_fns: functions that are called with each event, in every process.
      log_fn: called with the goodput, one line, when the run stops.
      clock: returns seconds, for durations.
      wall_clock: returns seconds since 1970.
    """
    self.step: int | None = None
    self._path = files.path(path)
    self._process = process
    self._event_fns = event_fns
    self._log_fn = log_fn
    self._clock = clock
    self._wall_clock = wall_clock
    # Reentrant: a signal handler may log a warning.
    self._lock = threading.RLock()
    self._phase = 'starting'
    self._seconds: dict[str, float] = {}
    self._started = self._counted_at = self._emitted_at = clock()
    self._pending: list[Event] = []
    self._file: _File | None = None
    self._handler = _WarningHandler(self)
    self._failed_fns: list[Callable[[Event], None]] = []
    self._has_trained = self._has_stopped = False
    # Events for the hooks, the thread that passes them on, and the event whose hooks are running.
    self._for_hooks: list[Event] = []
    self._calling_thread: int | None = None
    self._event_of_hooks: Event | None = None
    self._hooks_returned = threading.Condition(self._lock)

  def __enter__(self) -> 'EventLog':
    for name in _LOGGERS:
      logging.getLogger(name).addHandler(self._handler)
    self.emit(
      'start',
      host=socket.gethostname(),
      pid=os.getpid(),
      version=t5x_lite.__version__,
      num_processes=jax.process_count(),
      hardware=mesh_rules.detected_selector(),
      command=masking.masked_command(sys.orig_argv),
    )
    return self

  def __exit__(self, exc_type, error: BaseException | None, traceback) -> None:
    if not self._has_stopped:
      # A start that fails in a new run directory leaves no file; one that fails in a run adds to its file.
      with contextlib.suppress(OSError):  # of a store; it must not replace `error`
        if self._file is None and self._path.exists():
          self.open()
      self.stop(**_cause(error))
    with self._hooks_returned:  # of another thread
      self._hooks_returned.wait_for(lambda: self._calling_thread in (None, threading.get_ident()))
    for name in _LOGGERS:
      logging.getLogger(name).removeHandler(self._handler)
    if self._file is not None:
      try:
        self._file.close()
      except OSError as problem:
        logging.getLogger(__name__).warning(
          'The newest events could not be written to %s: %s.', self._path, problem
        )

  def open(self) -> None:
    """Write the events so far to the file, and all further ones when they happen.

    Raises:
      LinkedFileError: the file is a link.
    """
    with self._lock:
      if self._process or self._file is not None:
        return
      files.check_regular(self._path)
      self._file = files.appended(self._path, missing_fn=self._missing_event)
      if files.is_cut(self._path):
        self._file.append(b'\n', at_once=False)
      for event in self._pending:
        _write(self._file, event)
      self._pending.clear()

  def _missing_event(self, cause: str, last: bytes | None) -> bytes:
    """Return the line of the event 'missing', after the loss of events up to the record `last`."""
    found = _parse(last)
    return (
      Event(
        kind='missing',
        wall_time=self._wall_clock(),
        step=self.step,
        process=self._process,
        details={
          'cause': cause,
          'to_step': found.get('step'),
          'to_wall_time': found.get('wall_time'),
        },
      )
      .to_line()
      .encode()
    )

  @property
  def state(self) -> tuple[int | None, str]:
    """Number of completed steps, or None, and the current phase."""
    return self.step, self._phase

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Count the time within the context for a phase, one of `PHASES`, except for the time of phases within it."""
    outer = self._change_phase(name)
    try:
      yield
    finally:
      if name == 'step' and outer == 'starting':
        outer = 'other'
      self._change_phase(outer)

  def _change_phase(self, name: str) -> str:
    with self._lock:
      self._count()
      outer = self._phase
      self._phase = name
      return outer

  def _count(self) -> None:
    now = self._clock()
    self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._counted_at
    self._counted_at = now

  def on_step(self, step: int) -> None:
    """Set the number of completed steps; emit 'first_step', or the same as `tick`."""
    self.step = step
    if not self._has_trained:
      self._has_trained = True
      self.emit('first_step')
    self.tick()

  def tick(self) -> None:
    """Emit 'progress' after some time without events; for calls within long phases."""
    now = self._clock()
    shortest, longest = _PROGRESS_SECONDS
    interval = _PROGRESS_FRACTION * (now - self._started)
    interval = min(longest, max(shortest, interval))
    if now - self._emitted_at >= interval:
      self.emit('progress')

  def emit(self, kind: str, **details: Any) -> None:
    """Write an event and pass it to the hooks; warn if the file lacks earlier events.

    Args:
      kind: see `Event`.
      **details: JSON values.
    """
    self._emit(kind, details)
    with self._lock:
      loss = ''
      if self._file is not None:
        loss = self._file.take_loss()
    if loss:  # An event too, so without the lock.
      logging.getLogger(__name__).warning(
        "%s %s while the run writes to it. The events from now on are written; the event 'missing' before them says "
        'which ones are lost.',
        self._path,
        loss,
      )

  def _emit(self, kind: str, details: Mapping[str, Any]) -> None:
    with self._lock:
      self._count()
      event = Event(
        kind=kind,
        wall_time=self._wall_clock(),
        step=self.step,
        process=self._process,
        seconds={phase: seconds for phase, seconds in self._seconds.items() if seconds},
        details=details,
      )
      self._seconds = {}
      self._emitted_at = self._counted_at
      if self._file is not None:
        _write(self._file, event)
      elif self._process == 0:
        self._pending.append(event)
      if not self._event_fns or self._comes_from_hooks(event):
        return
      self._for_hooks.append(event)
      if self._calling_thread is not None:
        return
      self._calling_thread = threading.get_ident()
    try:
      while (event := self._next_for_hooks()) is not None:
        self._call(event)
    except BaseException:  # e.g. sys.exit in a hook
      self._stop_calling()
      raise

  def stop(self, cause: str, **details: Any) -> None:
    """Emit 'stop', and the goodput of the run with its earlier processes as 'summary'; only the first call counts.

    Args:
      cause: 'completed', 'data_ended', 'action', 'signal', 'non_finite', 'error' or 'other_process'.
      **details: JSON values.
    """
    if self._has_stopped:
      return
    self._has_stopped = True
    self.emit('stop', cause=cause, **details)
    if self._file is None:
      return
    try:
      if isinstance(self._file, files.AppendedParts):
        self._file.check_outage()
        self._file.write_now()
      measured = goodput.measure(read_events(self._path))
      line = measured.describe()
    except Exception as error:  # the file may have any content, e.g. after a change by hand
      logging.getLogger(__name__).warning(
        'The goodput is unknown, because %s cannot be read (%s: %s).',
        self._path,
        type(error).__name__,
        error,
      )
      return
    self.emit('summary', **measured.details)
    self._log_fn(line)

  def _comes_from_hooks(self, event: Event) -> bool:
    """Return whether an event is not passed to the hooks, see the class; the caller holds the lock."""
    current = self._event_of_hooks
    if current is None:
      return False
    if self._calling_thread == threading.get_ident():
      return True
    return event.kind == 'warning' and current.kind == 'warning'

  def _next_for_hooks(self) -> Event | None:
    """Return the next event for the hooks; None ends the calls of this thread."""
    with self._hooks_returned:
      if self._for_hooks:
        return self._for_hooks.pop(0)
      self._stop_calling()  # With the lock held, so that no event is left to a thread that has looked already.
      return None

  def _stop_calling(self) -> None:
    with self._hooks_returned:
      self._calling_thread = None
      self._hooks_returned.notify_all()

  def _call(self, event: Event) -> None:
    errors = []
    self._event_of_hooks = event
    try:
      for event_fn in self._event_fns:
        try:
          event_fn(event)
        except Exception as error:  # users' functions may raise anything, and must not end the run
          if event_fn not in self._failed_fns:
            self._failed_fns.append(event_fn)
            errors.append(error)
    finally:  # also after sys.exit
      self._event_of_hooks = None
    for error in errors:
      logging.getLogger(__name__).warning(
        'A function of `train.event_fns` failed for the event %r (%s: %s). Training continues, and further errors of '
        'this function are not shown.',
        event.kind,
        type(error).__name__,
        error,
      )


class _WarningHandler(logging.Handler):
  """Emits an event for each log record of level WARNING or above."""

  def __init__(self, log: EventLog):
    self._log = log
    super().__init__(logging.WARNING)

  def handle(self, record: logging.LogRecord) -> bool | logging.LogRecord:
    """See base class, but without its lock: hooks may wait for a thread that logs."""
    kept = self.filter(record)
    if kept:
      self.emit(record)
      if logging.lastResort is not None and not _is_shown(record):
        logging.lastResort.handle(record)
    return kept

  def emit(self, record: logging.LogRecord) -> None:
    """See base class."""
    self._log.emit(
      'warning',
      level=record.levelname.lower(),
      logger=record.name,
      message=_masked(record.getMessage()),
    )


def _is_shown(record: logging.LogRecord) -> bool:
  """Return True if another handler than that of an `EventLog` gets the record.

  Without any handler `logging` prints warnings to stderr; that of an `EventLog` must not end this.
  """
  logger: logging.Logger | None = logging.getLogger(record.name)
  while logger is not None:
    if any(not isinstance(handler, _WarningHandler) for handler in logger.handlers):
      return True
    logger = logger.parent if logger.propagate else None
  return False


def _write(file: _File, event: Event) -> None:
  file.append(event.to_line().encode(), at_once=True)


def _cause(error: BaseException | None) -> dict[str, Any]:
  """Return the arguments of `EventLog.stop` for a run that ended with `error`, or without one."""
  if error is None:
    return {'cause': 'completed'}
  if isinstance(error, StoppedOnSignalError):
    return {'cause': 'signal', 'signal': error.signal}
  if isinstance(error, NonFiniteMetricError):
    cause = 'non_finite'
  else:
    cause = 'error'
  return {'cause': cause, 'error': type(error).__name__, 'message': _masked(str(error))}


def _masked(message: str) -> str:
  """Return the beginning of a message, without secrets of the command line."""
  return masking.masked_text(message, sys.orig_argv)[:_MAX_MESSAGE]


def _parse(record: bytes | None) -> dict[str, Any]:
  """Return the fields of a written event; empty for other records."""
  try:
    return dict(json.loads(record or b'{}'))
  except (TypeError, ValueError):
    return {}
