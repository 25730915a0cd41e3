"""Ends a run that hangs, after showing where: a collective that waits for a dead process waits for ever."""

from collections.abc import Callable
import contextlib
import faulthandler
import os
import sys
import threading
import time

from t5x_lite.errors import ConfigError, ExitCode


class Watchdog:
  """A thread that acts when, while it is watching, `beat` is not called for `max_step_seconds`.

  Only training steps are watched: compiling, evaluating and saving may take as long as they need.
  """

  def __init__(self, max_step_seconds: float | None, on_timeout: Callable[[str], None] | None = None):
    """Configures the watchdog; the thread starts with the first `watching`.

    Args:
      max_step_seconds: the longest a step may take; None switches the watchdog off.
      on_timeout: what to do, given a message; by default writes the message and the stacks of all threads to stderr
        and ends the process with status 4.

    Raises:
      ConfigError: `max_step_seconds` is not positive.
    """
    if max_step_seconds is not None and max_step_seconds <= 0:
      raise ConfigError(f'max_step_seconds is {max_step_seconds}; expected a positive number, or None for no watchdog.')
    self._max_step_seconds = max_step_seconds
    self._on_timeout = on_timeout or _dump_stacks_and_exit
    self._changed = threading.Condition()
    self._deadline: float | None = None
    self._step: int | None = None
    self._closed = False
    self._thread: threading.Thread | None = None

  def beat(self, step: int | None = None) -> None:
    """Says that `step` has been completed."""
    if self._deadline is not None:
      with self._changed:
        self._step = step
        self._deadline = time.monotonic() + self._max_step_seconds

  @contextlib.contextmanager
  def watching(self):
    """Context in which steps are expected; entering it counts as a beat."""
    if self._max_step_seconds is None:
      yield
      return
    if self._thread is None:
      self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)
      self._thread.start()
    self._set_deadline(time.monotonic() + self._max_step_seconds)
    try:
      yield
    finally:
      self._set_deadline(None)

  def close(self) -> None:
    """Ends the thread."""
    with self._changed:
      self._closed = True
      self._changed.notify()
    if self._thread is not None:
      self._thread.join()

  def _set_deadline(self, deadline: float | None) -> None:
    with self._changed:
      self._deadline = deadline
      self._changed.notify()

  def _watch(self) -> None:
    with self._changed:
      while not self._closed:
        remaining = None if self._deadline is None else self._deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
          self._deadline = None
          after = '' if self._step is None else f' after step {self._step}'
          self._on_timeout(f'Watchdog: no step was completed for {self._max_step_seconds:g} seconds{after}. Raise '
                           'max_step_seconds if steps are rightly this slow.')
          continue
        self._changed.wait(remaining)


def _dump_stacks_and_exit(message: str) -> None:
  print(f'\n{message}\nStacks of all threads:', file=sys.stderr, flush=True)
  faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
  sys.stderr.flush()
  # The main thread hangs: nothing that waits for it, as sys.exit would, can end the process.
  os._exit(ExitCode.WATCHDOG)
