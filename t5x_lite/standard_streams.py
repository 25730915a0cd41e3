"""Standard output and standard error of a run, which must not end because its output cannot be written.

If a reader ends (`train 2>&1 | head -2`), a terminal is closed, the disk of a log file is full, or a descriptor was
closed from the start, the run continues: output that cannot be written is dropped, without an exception.
"""

import atexit
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
  """Unbuffered file that drops output that it cannot write."""

  def write(self, data) -> int:
    """See base class; never raises OSError."""
    try:
      written = super().write(data)
    except OSError as error:
      if error.errno in _PERMANENT_ERRORS:
        _discard(self.fileno())
      written = None
    # Also None for a full pipe that another process has made non-blocking.
    if written is None:
      return len(data)
    return written


class _Nowhere(io.RawIOBase):
  """Drops all output, instead of a stream that was closed when the process began."""

  def writable(self) -> bool:
    """See base class."""
    return True

  def write(self, data) -> int:
    """See base class."""
    return len(data)


@contextlib.contextmanager
def lossy_output(*names: str) -> Iterator[None]:
  """Context within which writing to standard streams never raises; output that cannot be written is dropped.

  Streams without a file descriptor, such as a StringIO, are not changed.

  Args:
    *names: 'stdout', 'stderr' or both.
  """
  before = {name: getattr(sys, name) for name in names}
  lossy = {name: _lossy(stream) for name, stream in before.items()}
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


def reader_is_gone(stream: TextIO | None) -> bool:
  """Return True if `stream` is a pipe or a socket whose other end is closed, or a closed terminal."""
  fd = _descriptor(stream)
  if fd is None:
    return False
  poll = select.poll()
  poll.register(fd, select.POLLOUT)
  gone = select.POLLERR | select.POLLHUP
  return any(events & gone for _, events in poll.poll(0))


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


def _lossy(stream: Any) -> TextIO:
  """Return a stream with the same destination as `stream` that never raises OSError."""
  if stream is None:
    return io.TextIOWrapper(
      io.BufferedWriter(_Nowhere()), encoding='utf-8', errors='backslashreplace'
    )
  fd = _descriptor(stream)
  if fd is None:
    return stream
  _flush_or_discard(stream)
  file = _LossyFile(fd, 'wb', closefd=False)
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
