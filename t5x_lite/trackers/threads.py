"""Followers of a run that trains: a thread of the lead process for each tracker.

Nothing that a tracker does stops or delays the run: its errors are logged once, and at the end of the run all trackers
together have a limited time.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import logging
import os
import shlex
import threading
import time

from t5x_lite.formatting import gin_flag
from t5x_lite.trackers import TRACKERS
from t5x_lite.trackers.base import Tracker
from t5x_lite.trackers.follower import Follower

_logger = logging.getLogger(__name__)

# Time between two looks at the files; doubled after each error in a row, up to the maximum.
POLL_SECONDS = 10.0
MAX_POLL_SECONDS = 300.0
# Time that all trackers together have after the end of the run.
END_SECONDS = 30.0


def delay(num_errors: int, poll_seconds: float = POLL_SECONDS) -> float:
  """Return the seconds until the next look at the files, after a number of errors in a row."""
  return min(MAX_POLL_SECONDS, poll_seconds * 2 ** min(num_errors, 10))


class FollowerThreads(contextlib.AbstractContextManager):
  """Followers of a run, in daemon threads; leaving the context sends the rest."""

  def __init__(
    self,
    run: str | os.PathLike[str],
    trackers: Sequence[Tracker],
    *,
    poll_seconds: float = POLL_SECONDS,
    end_seconds: float = END_SECONDS,
  ):
    """Start nothing.

    Args:
      run: run directory.
      trackers: the trackers.
      poll_seconds: time between two looks at the files.
      end_seconds: time that all trackers together have when the context is left.
    """
    self._run = os.fspath(run)
    self._trackers = trackers
    self._poll_seconds = poll_seconds
    self._end_seconds = end_seconds
    self._run_has_ended = threading.Event()
    # Whether the last attempt of each started tracker has ended.
    self._ended: dict[str, threading.Event] = {}
    self._done: set[str] = set()
    # Last error of each tracker.
    self._errors: dict[str, str] = {}

  def start(self) -> None:
    """Start the threads, once the run has discarded the results that it writes again."""
    for tracker in self._trackers:
      self._ended[tracker.name] = threading.Event()
      thread = threading.Thread(
        target=self._follow, args=(tracker,), name=f't5x_lite-tracker-{tracker.name}', daemon=True
      )
      thread.start()

  def __exit__(self, *exc_info) -> None:
    self._run_has_ended.set()
    deadline = time.monotonic() + self._end_seconds
    for ended in self._ended.values():
      ended.wait(max(0.0, deadline - time.monotonic()))
    for tracker in self._trackers:
      if tracker.name in self._ended and tracker.name not in self._done:
        error = self._errors.get(tracker.name, f'it had {self._end_seconds:g} s after the end')
        _logger.warning(
          'The tracker %s does not have all results of the run: %s. To send the rest:\n  %s',
          tracker.name,
          error,
          _command(self._run, tracker),
        )

  def _follow(self, tracker: Tracker) -> None:
    """Follow the run until it ends; log the first error and try again."""
    with contextlib.ExitStack() as stack:
      self._follow_to_the_end(tracker, stack)
    self._ended[tracker.name].set()
    if tracker.name not in self._done:
      # What the tracker has started could block the end of the program, which does not wait for this thread.
      threading.Event().wait()

  def _follow_to_the_end(self, tracker: Tracker, stack: contextlib.ExitStack) -> None:
    follower = None
    num_errors = 0
    is_last = False
    while not is_last:
      is_last = self._run_has_ended.is_set()
      try:
        if follower is None:
          new = Follower(self._run, tracker)
          stack.enter_context(new.alone())
          follower = new
        status = follower.send()
        if is_last:
          follower.finish(status.status)
          self._done.add(tracker.name)
        num_errors = 0
      except BaseException as error:  # of a tracker, which may raise anything
        num_errors += 1
        is_first = tracker.name not in self._errors
        self._errors[tracker.name] = f'{type(error).__name__}: {error}'.rstrip('.')
        if is_first and not self._run_has_ended.is_set():
          _logger.warning(
            'The tracker %s has failed: %s. Training continues, the results are sent later, and further errors of '
            'this tracker are not shown.',
            tracker.name,
            self._errors[tracker.name],
          )
      self._run_has_ended.wait(delay(num_errors, self._poll_seconds))


def _command(run: str, tracker: Tracker) -> str:
  """Return the command that sends the rest of a run to a tracker with these options."""
  cls = type(tracker)
  command = f't5x_lite track {shlex.quote(run)} --once'
  note = ''
  if cls.__name__ == TRACKERS.get(tracker.name):
    command += f' --to={tracker.name}'
    selector = f'trackers.{cls.__name__}'
  else:
    selector = f'{cls.__module__}.{cls.__name__}'
    command += f' --gin_file=FILE {gin_flag("TRACKER", f"@{selector}()")}'
    note = '  # FILE imports the module of the tracker'
  if dataclasses.is_dataclass(tracker):
    for field in dataclasses.fields(tracker):
      value = getattr(tracker, field.name)
      if field.init and value != field.default:
        command += f' {gin_flag(f"{selector}.{field.name}", repr(value))}'
  return command + note
