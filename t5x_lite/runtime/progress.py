"""Progress of a run: one line that is updated in place on a terminal, and separate lines elsewhere."""

from collections.abc import Iterator
import contextlib
import logging
import re
import shutil
import sys
import threading
import time
from typing import TextIO

from t5x_lite.formatting import capitalized
from t5x_lite.formatting import format_duration
from t5x_lite.formatting import format_number
from t5x_lite.formatting import printable
from t5x_lite.formatting import show

# Seconds between two updates of the line on a terminal.
_REDRAW_SECONDS = 0.2
# Elsewhere, the interval of the first lines; later ones follow when the elapsed time has grown by the fraction, so that
# the log file of a week stays readable.
_LINE_SECONDS = 10.0
_LINE_FRACTION = 0.02
# Beginning of a line that names its step.
_STEP = re.compile(r'step +[\d,]+')
# Weight of the newest interval in the displayed rate, per second of its length.
_RATE_MEMORY_SECONDS = 5.0


class Progress:
  """Shows the progress of a loop, in the lead process only.

  Nothing here waits for a device: callers pass Python numbers, and only when `due`. Nothing is shown if the level of
  the logger `t5x_lite`, or of its handler for the same stream, is above INFO.

  Attributes:
    step: number of completed steps, for the prefix of lines; None if unknown.
  """

  def __init__(
    self,
    *,
    enabled: bool = True,
    stream: TextIO | None = None,
    clock=time.monotonic,
    unit: str = 'step',
    process: int | None = None,
  ):
    """Start the clock; the number of steps is unknown until `begin`.

    Args:
      enabled: whether to show anything.
      stream: output stream; default: stderr.
      clock: returns seconds.
      unit: name of a step.
      process: index of this process, with which lines that stay then begin, followed by the step.
    """
    self.step: int | None = None
    self._unit = unit
    self._process = process
    self._stream = stream or sys.stderr
    self._enabled = enabled and _shows_info(self._stream)
    self._clock = clock
    self._in_place = self._enabled and self._stream.isatty()
    self._line = ''
    self.begin(0, 0)

  @property
  def enabled(self) -> bool:
    """True if lines are shown."""
    return self._enabled

  @property
  def due(self) -> bool:
    """True if `update` would show something now, so that metrics should be read from the device."""
    if not self._enabled:
      return False
    now = self._clock()
    if self._in_place:
      interval = _REDRAW_SECONDS
    else:
      interval = max(_LINE_SECONDS, _LINE_FRACTION * (now - self._started))
    return now - self._drawn_at >= interval

  def begin(self, total_steps: int, first_step: int, *, tokens_per_step: int = 0) -> None:
    """Restart the clock for rates and remaining time.

    Args:
      total_steps: step at which the run ends; 0 if unknown.
      first_step: step at which the run starts.
      tokens_per_step: number of tokens per batch, for the rate; 0 shows no rate of tokens.
    """
    self._total = total_steps
    self._first = first_step
    self._tokens_per_step = tokens_per_step
    self._started = self._drawn_at = self._rate_at = self._clock()
    self._rate_step = first_step
    self._rate: float | None = None

  def pause(self) -> float:
    """Return the current time for `resume`; the time in between does not count for the rate."""
    return self._clock()

  def resume(self, paused_at: float) -> None:
    """Exclude the time since `pause` from the displayed rate, but not from the remaining time."""
    self._rate_at += self._clock() - paused_at

  def update(self, step: int, values: dict[str, float], *, last: bool = False) -> None:
    """Show the line of a step.

    Args:
      step: number of completed steps since the model's first one.
      values: metrics to show, e.g. {'loss': 2.5}.
      last: keep this line on the terminal.
    """
    if not self._enabled:
      return
    now = self._clock()
    self._measure(step, now)
    done = step - self._first
    if self._total:
      width = len(f'{self._total:,}')
      parts = [f'{self._unit} {step:>{width},}/{self._total:,} ({step / self._total:4.0%})']
    else:
      parts = [f'{self._unit} {step:,}']
    parts += [f'{name} {format_number(value)}' for name, value in values.items()]
    if self._rate:
      ending = 'es' if self._unit.endswith('ch') else 's'
      parts.append(f'{format_number(self._rate)} {self._unit}{ending}/s')
      if self._tokens_per_step:
        parts.append(f'{format_number(self._rate * self._tokens_per_step)} tokens/s')
    elapsed = now - self._started
    if done > 0 and step < self._total:
      remaining = elapsed / done * (self._total - step)
      parts.append(f'ETA {format_duration(remaining)}')
    elif last or 0 < self._total <= step:
      parts.append(f'took {format_duration(elapsed)}')
    self._draw('  '.join(parts), keep=last)
    self._drawn_at = now

  def note(self, text: str, *, lines: bool = False) -> None:
    """Show the current work; on a terminal, the next line replaces it.

    Args:
      text: one line.
      lines: elsewhere, write it as a separate line if one is `due`.
    """
    if self._in_place:
      self._draw(text, keep=False)
    elif lines and self.due:
      self._draw(text, keep=True)
      self._drawn_at = self._clock()

  @contextlib.contextmanager
  def working(self, text: str, after_seconds: float = _LINE_SECONDS) -> Iterator[None]:
    """Context of work that may take long, such as compilation.

    Args:
      text: one line that says what is done; on a terminal a `note`, elsewhere a line.
      after_seconds: time in the context after which the line is written elsewhere than on a terminal.
    """
    self.note(text)
    if not self._enabled or self._in_place:
      yield
      return
    timer = threading.Timer(after_seconds, self.log, [f'{capitalized(text)} ...'])
    timer.daemon = True
    timer.start()
    try:
      yield
    finally:
      timer.cancel()

  def log(self, text: str) -> None:
    """Print lines that stay, above the progress line."""
    if not self._enabled:
      return
    line = self._line
    self.clear()
    show(self.prefix(text) + text, file=self._stream, flush=True)
    if line:
      self._draw(line, keep=False)

  def prefix(self, text: str) -> str:
    """Return the beginning of a line with `text`: the process and the step, unless the text begins with its own step.

    Returns:
      E.g. '[process 0] step 120  '; empty without `process`.
    """
    if self._process is None:
      return ''
    prefix = f'[process {self._process}] '
    if self.step is None or _STEP.match(text):
      return prefix
    return f'{prefix}step {self.step:,}  '

  @contextlib.contextmanager
  def above_line(self) -> Iterator[None]:
    """Context in which records of the package's loggers have the attribute `prefix`, and do not join the progress line.

    The handlers that the program has installed print the attribute.
    """

    def prepare(record: logging.LogRecord) -> bool:
      self.clear()  # The next update draws it again.
      record.prefix = self.prefix(record.getMessage())
      return True

    handlers = logging.getLogger('t5x_lite').handlers[:]
    for handler in handlers:
      handler.addFilter(prepare)
    try:
      yield
    finally:
      for handler in handlers:
        handler.removeFilter(prepare)

  def clear(self) -> None:
    """Remove the line from the terminal."""
    if self._line:
      print('\r\x1b[K', end='', file=self._stream, flush=True)
      self._line = ''

  def _measure(self, step: int, now: float) -> None:
    """Update the moving average of steps per second."""
    elapsed = now - self._rate_at
    if step <= self._rate_step or elapsed <= 0:
      return
    rate = (step - self._rate_step) / elapsed
    if self._rate is None:
      self._rate = rate
    else:
      weight = elapsed / (elapsed + _RATE_MEMORY_SECONDS)
      self._rate += weight * (rate - self._rate)
    self._rate_step = step
    self._rate_at = now

  def _draw(self, line: str, keep: bool) -> None:
    if not self._in_place:
      show(self.prefix(line) + line, file=self._stream, flush=True)
      return
    if keep:
      line = self.prefix(line) + line
    shown = line = printable(line)
    columns = shutil.get_terminal_size().columns
    if len(line) >= columns:
      shown = line[: max(columns - 2, 0)] + '…'
    shown = f'\r{shown}\x1b[K'
    if keep:
      print(shown, file=self._stream, flush=True)
      self._line = ''
    else:
      print(shown, end='', file=self._stream, flush=True)
      self._line = line


def _shows_info(stream: TextIO) -> bool:
  """Return whether the logger of the package, and its handlers for a stream, show records of the level INFO."""
  logger = logging.getLogger('t5x_lite')
  for handler in logger.handlers:
    if getattr(handler, 'stream', None) is stream and handler.level > logging.INFO:
      return False
  return logger.level <= logging.INFO
