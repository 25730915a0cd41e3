"""Stacks of all threads, for reports about a process that hangs."""

import contextlib
import sys
import threading
import traceback

from t5x_lite.formatting import show

# Writing to a pipe without a reader blocks; the caller must not wait longer than this.
_WRITE_SECONDS = 10.0


def format_stacks() -> str:
  """Return the Python stacks of all threads, innermost frame first.

  Source files are not read, since their file system may hang.
  """
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  lines = []
  # A copy, since other threads may start or end threads.
  for ident, frame in list(sys._current_frames().items()):
    lines.append(f'Thread {names.get(ident, ident)!r}, innermost frame first:')
    lines += [
      f'  File "{f.f_code.co_filename}", line {line} in {f.f_code.co_name}'
      for f, line in traceback.walk_stack(frame)
    ]
  return '\n'.join(lines)


def print_stacks(message: str) -> None:
  """Write a message and the stacks of all threads to stderr. Never raises, and returns within about ten seconds.

  Args:
    message: description of the problem.
  """
  text = f'\n{message}\nStacks of all threads:\n{format_stacks()}'

  def write() -> None:
    # Output that cannot be written is dropped, see `standard_streams`.
    with contextlib.suppress(Exception):
      show(text, file=sys.stderr, flush=True)

  # In a thread, since another thread may hold the lock of the stream while it waits for the reader.
  writer = threading.Thread(target=write, name='print_stacks', daemon=True)
  try:
    writer.start()
  except RuntimeError:  # There are too many threads, or the interpreter is shutting down.
    write()
  else:
    writer.join(_WRITE_SECONDS)
