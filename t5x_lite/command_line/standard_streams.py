"""Standard output and standard error of a run, which must not end because its output cannot be written.

If a reader ends (`train 2>&1 | head -2`), a terminal is closed, the disk of a log file is full, or a descriptor was
closed from the start, the run continues: output that cannot be written is dropped, without an exception. So is output
to a reader that is there and does not read, such as a paused `less`, after five seconds.
"""

import atexit
import codecs
from collections.abc import Iterator
import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

# Errors after which no reader returns: the pipe or the terminal is closed. A full disk may recover.
_PERMANENT_ERRORS = (errno.EPIPE, errno.EIO)


class _LossyFile(io.FileIO):
  """Unbuffered file that drops output that it cannot write, or that its reader does not read in time.

  After a dropped part, output is only written where it needs no waiting, and begins with the number of lost lines.
  """

  def __init__(self, fd: int, patience_seconds: float):
    """Open a descriptor, which stays open; a reader that does not read is waited for once, for these seconds."""
    super().__init__(fd, 'wb', closefd=False)
    self._patience_seconds = patience_seconds
    self._is_dropping = False
    self._num_lost_lines = 0
    self._is_within_line = False

  def write(self, data) -> int:
    """See base class; never raises OSError."""
    data = bytes(data)
    if not data:  # A flush, which does not show whether the reader reads again.
      return 0
    notice = b''
    seconds = self._patience_seconds
    if self._is_dropping:
      notice = self._notice()
      seconds = 0.0
    text = notice + data
    unwritten = text
    while unwritten and _is_writable(self.fileno(), seconds):
      num_written = self._write_part(unwritten)
      if not num_written:
        break
      unwritten = unwritten[num_written:]
    if len(unwritten) < len(text):  # The notice is the first that is written.
      self._num_lost_lines = 0
    self._is_dropping = bool(unwritten)
    self._num_lost_lines += unwritten.removeprefix(notice).count(b'\n')
    return len(data)

  def _write_part(self, data: bytes) -> int:
    """Write what fits without waiting; return the number of bytes, 0 after an error."""
    try:
      num_written = _write_now(self.fileno(), data)
    except OSError as error:
      if error.errno in _PERMANENT_ERRORS:
        _discard(self.fileno())
      return 0
    if num_written:
      self._is_within_line = data[num_written - 1 : num_written] != b'\n'
    return num_written

  def _notice(self) -> bytes:
    """Return a line with the number of lost lines; empty if no line was lost."""
    if not self._num_lost_lines:
      return b''
    new_line = '\n' if self._is_within_line else ''
    noun = 'lines' if self._num_lost_lines > 1 else 'line'
    return f'{new_line}t5x_lite: {self._num_lost_lines:,} {noun} of output could not be written.\n'.encode()


class _Nowhere(io.RawIOBase):
  """Drops all output, instead of a stream that was closed when the process began."""

  def writable(self) -> bool:
    """See base class."""
    return True

  def write(self, data) -> int:
    """See base class."""
    return len(data)


@contextlib.contextmanager
def lossy_output(*names: str, patience_seconds: float = 5.0) -> Iterator[None]:
  """Context within which writing to standard streams never raises; output that cannot be written is dropped.

  Streams without a file descriptor, such as a StringIO, are not changed.

  Args:
    *names: 'stdout', 'stderr' or both.
    patience_seconds: time that a reader which does not read is waited for; afterwards output is dropped until it reads.
  """
  before = {name: getattr(sys, name) for name in names}
  lossy = {name: _lossy(stream, patience_seconds) for name, stream in before.items()}
  for name, stream in lossy.items():
    setattr(sys, name, stream)
  try:
    yield
  finally:
    for name, stream in before.items():
      lossy[name].flush()
      fd = _descriptor(stream)
      if fd is not None and reader_is_gone(stream):
        _discard(fd)
      setattr(sys, name, stream)


def write_without_waiting(text: str) -> None:
  """Write a short text to standard error, for signal handlers and threads that must not wait for a reader.

  Never raises; text that does not fit is dropped.
  """
  with contextlib.suppress(OSError, ValueError):
    if _is_writable(2, 0.0):
      _write_now(2, text.encode(errors='backslashreplace'))


def reader_is_gone(stream: TextIO | None) -> bool:
  """Return True if `stream` is a pipe or a socket whose other end is closed, or a closed terminal."""
  fd = _descriptor(stream)
  if fd is None:
    return False
  poll = select.poll()
  poll.register(fd, select.POLLOUT)
  gone = select.POLLERR | select.POLLHUP
  return any(events & gone for _, events in poll.poll(0))


def escape_what_ascii_lacks() -> None:
  """Let standard output have `\\xe9` for a letter that its encoding lacks, as with PYTHONIOENCODING=ascii.

  Python's default is an exception, which would end a run by what it prints. Standard error has this already.
  """
  stream = sys.stdout
  if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == 'ascii':
    stream.reconfigure(errors='backslashreplace')


def open_closed_descriptors() -> None:
  """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed.

  Otherwise the next files get these numbers, and output of libraries to them could damage a checkpoint.
  """
  for fd in range(3):
    try:
      os.fstat(fd)
    except OSError:
      opened = os.open(os.devnull, os.O_RDWR)  # The lowest free number, which is `fd`.
      os.set_inheritable(opened, True)


def discard_unwritten_at_exit() -> None:
  """Prevent the interpreter from changing the exit status to 120 if it cannot write output at exit."""
  atexit.unregister(_discard_unwritten)
  atexit.register(_discard_unwritten)


def _discard_unwritten() -> None:
  for stream in (sys.stdout, sys.stderr):
    _flush_or_discard(stream)


def _lossy(stream: Any, patience_seconds: float) -> TextIO:
  """Return a stream with the same destination as `stream` that never raises OSError."""
  if stream is None:
    return io.TextIOWrapper(
      io.BufferedWriter(_Nowhere()), encoding='utf-8', errors='backslashreplace'
    )
  fd = _descriptor(stream)
  if fd is None:
    return stream
  if isinstance(getattr(stream.buffer, 'raw', stream.buffer), _LossyFile):
    return stream  # A reader is waited for once.
  _flush_or_discard(stream)
  file = _LossyFile(fd, patience_seconds)
  if isinstance(stream.buffer, io.FileIO):
    buffer = file
  else:
    buffer = io.BufferedWriter(file)
  return io.TextIOWrapper(
    buffer,
    encoding=stream.encoding,
    errors='backslashreplace',
    newline='\n',
    line_buffering=stream.line_buffering,
    write_through=stream.write_through,
  )


def _write_now(fd: int, data: bytes) -> int:
  """Write what fits into a writable `fd` without waiting, and return the number of bytes.

  Raises:
    OSError: nothing can be written.
  """
  if os.isatty(fd):
    # A terminal is writable as soon as one byte fits. This does not change the flags that other programs see.
    with contextlib.suppress(OSError):
      terminal = os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
      try:
        return os.write(terminal, data)
      except BlockingIOError:
        return 0
      finally:
        os.close(terminal)
  # A writable pipe has space for so many bytes.
  return os.write(fd, data[: select.PIPE_BUF])


def _is_writable(fd: int, seconds: float) -> bool:
  """Return whether `fd` takes output, or returns an error, without waiting; wait for it for so long."""
  poll = select.poll()
  poll.register(fd, select.POLLOUT)
  return bool(poll.poll(seconds * 1000))


def _descriptor(stream: TextIO | None) -> int | None:
  """Return the file descriptor of a text stream, or None."""
  buffer = getattr(stream, 'buffer', None)
  raw = getattr(buffer, 'raw', buffer)  # `python -u` uses no buffer.
  if isinstance(raw, io.FileIO) and not raw.closed:
    return raw.fileno()
  return None


def _flush_or_discard(stream: TextIO | None) -> None:
  fd = _descriptor(stream)
  if stream is None or fd is None:
    return
  try:
    stream.flush()
  except OSError:
    _discard(fd)
    with contextlib.suppress(OSError):
      stream.flush()


def _discard(fd: int) -> None:
  """Redirect `fd` to /dev/null, also for other streams, libraries and child processes."""
  null = os.open(os.devnull, os.O_WRONLY)
  os.dup2(null, fd)
  os.close(null)
